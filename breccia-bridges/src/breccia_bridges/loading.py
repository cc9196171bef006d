"""The values of a checkpoint in any dialect, read one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from breccia import ScaledTensor
from breccia.backend import components
from breccia.internal import check_patterns, matches, with_parts

from .safetensors import Target
from .source import Source, Value


class Checkpoint(Mapping[str, Any]):
    """The values of a checkpoint under the model's names: ScaledTensors and arrays, each read when it is asked for.

    Nothing is kept: the same name asked for twice is read twice. `load_checkpoint` makes them.
    """

    def __init__(self, source: Source, names: Sequence[str], target: Target) -> None:
        self._source, self._names, self._target = source, dict.fromkeys(names), target

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return _loaded(self._source.values[name], self._target)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def dialects(self) -> list[str]:
        """The names of the dialects of its values, the most common first; "breccia" for those that breccia quantized."""
        counts: dict[str, int] = {}
        for name in self._names:
            value = self._source.values[name]
            if value.is_scaled:
                dialect = value.stored.dialect.name if value.stored else "breccia"
                counts[dialect] = counts.get(dialect, 0) + 1
        return sorted(counts, key=lambda dialect: -counts[dialect])

    def __repr__(self) -> str:
        scaled = sum(self._source.values[name].is_scaled for name in self._names)
        kinds = f" ({', '.join(self.dialects)})" if scaled else ""
        return f"Checkpoint({str(self._source.path)!r}, {len(self)} values, {scaled} of them scaled{kinds})"


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    framework: str = "numpy",
    device: Any = None,
    source_dialect: str | None = None,
) -> Checkpoint:
    """The values of a checkpoint that any library wrote, by the model's names: a lazy mapping.

    path: a `.safetensors` file, or a folder of them: plain, quantized by breccia, or in any dialect that breccia reads
        (GPTQ, AWQ, compressed-tensors, ModelOpt, MLX, bitsandbytes, torchao, DeepSeek-V3, gpt-oss, ...), in any mixture.
    names: the values, as names or shell-style globs over whole names; by default all.
    framework, device: of the tensors, as in `load_safetensors`.
    source_dialect: the name of the dialect, where the config and the tensors leave a choice.

    Each value is read when it is asked for: a ScaledTensor with every code and scale as stored, or an array. One value at a
    time is in memory. Raises DialectError where two dialects are possible and for values that do not follow theirs;
    UnsupportedError for a dialect that breccia does not read; UnknownNameError for a name that matches nothing, and as
    `load_safetensors` does.

        >>> w = breccia.cast(np.ones((64, 32), np.float32), "mxfp8")
        >>> breccia.bridges.save_safetensors({"w": w}, tmp / "m.safetensors")
        >>> checkpoint = breccia.bridges.load_checkpoint(tmp / "m.safetensors")
        >>> checkpoint["w"]
        breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)
        >>> checkpoint.dialects
        ['breccia']
    """
    target = Target.of(framework, device)
    source = Source.open(Path(path), source_dialect)
    for value in source.values.values():
        if value.stored is not None:
            value.stored.form  # noqa: B018  # raises for what a dialect does not write
    if names is None:
        return Checkpoint(source, list(source.values), target)
    patterns = (names,) if isinstance(names, str) else tuple(names)
    check_patterns(patterns, source.values)
    return Checkpoint(source, [name for name in source.values if matches(name, patterns)], target)


def _loaded(value: Value, target: Target) -> ScaledTensor | Any:
    if value.stored is None and value.config is None:
        return target.plain(value.container, value.name)
    if value.config is not None:
        return target.scaled(value.container, value.name, value.config)
    st = value.loaded()
    if target.framework == "numpy":
        return st
    codecs = st.recipe.format.parts
    return with_parts(st, {name: target.component(part, codecs[name]) for name, part in components(st).items()})
