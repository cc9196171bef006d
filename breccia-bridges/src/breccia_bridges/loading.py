"""The values of a checkpoint in any dialect, read one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from breccia import DialectError, Layout, OptionError, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import StoredValue, components
from breccia.internal import abbreviated, check_patterns, matches, with_parts

from .announcements import OWN, Announced
from .beside import activations, factors
from .checkpoint import all_opened, of_one
from .remote_path import is_remote, path_of
from .safetensors import Target, warn_of_narrowed
from .safetensors_file import shown
from .source import Source, Value
from .stored import ModuleSettings
from .text import spelled

#: What the config of a value's dialect would say of it, by its headers; None where nothing is known.
Settings = Callable[[StoredValue], Mapping[str, Any] | None]


class Header(NamedTuple):
    """A value of a checkpoint, by its headers and configs.

    shape: the logical one. dtype: of a plain tensor, as a safetensors file names it ("BF16"); None for a scaled value.
    recipe, axis, layout, dialect: of the ScaledTensor; None and -1 for a plain tensor. The dialect is "breccia" if breccia
        quantized it.
    parts: the names of its tensors in the files, the smallest first.
    """

    shape: tuple[int, ...]
    dtype: str | None
    recipe: ScalingRecipe | None
    axis: int
    layout: Layout | None
    dialect: str | None
    parts: tuple[str, ...]


class Checkpoint(Mapping[str, Any]):
    """The values of a checkpoint under the model's names: ScaledTensors and arrays, each read when it is asked for.

    Nothing is kept: the same name asked for twice is read twice. A plain array whose dtype the framework would narrow stays a
    NumPy array, with a DtypeWarning, as in `load_safetensors`. `load_checkpoint` makes them.
    """

    def __init__(self, source: Source, names: Sequence[str], target: Target) -> None:
        self._source, self._names, self._target = source, dict.fromkeys(names), target

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        value, target = self._source.values[name], self._target
        if not value.is_scaled and target.narrowed(value.container, name):
            array = target.fetch(value.container, name)
            warn_of_narrowed(self._source.path, target.framework, {name: array.dtype.name})
            return array
        return _loaded(value, target)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def header(self, name: str) -> Header:
        """The shape and the dtype or recipe of a value, without reading it. Raises KeyError for an unknown name."""
        if name not in self._names:
            raise KeyError(name)
        value = self._source.values[name]
        parts = tuple(sorted(value.files, key=lambda part: value.files[part].entries[part].nbytes))
        if not value.is_scaled:
            return Header(value.shape, value.stored_as, None, -1, None, None, parts)
        return Header(value.shape, None, value.recipe, value.axis, value.layout, _dialect(value), parts)

    def is_as_linear(self, name: str) -> bool:
        """Did another library quantize the value, which has weights of all layers as those of linear ones?

        Their shape is (out_features, in_features), whatever that of the model's parameter is. Raises KeyError as `header` does.
        """
        if name not in self._names:
            raise KeyError(name)
        value = self._source.values[name]
        return value.stored is not None and not value.container.has_model_shapes

    @property
    def activations(self) -> list[str]:
        """The names of its values by which layers of the other library quantize inputs, outputs and caches."""
        return [name for name in activations(self._source) if name in self._names]

    @property
    def left_out(self) -> list[str]:
        """The tensors of its files that are no values, as a model computes them from its config: rotary frequencies of GGUF."""
        return [name for file in self._source.files for name in file.left_out]

    @property
    def unmapped(self) -> str:
        """Why the names of its values are not those of transformers, as of some architectures in GGUF; "" where they may be."""
        return self._source.files[0].unmapped

    def check_inputs(self, parameters: Container[str]) -> None:
        """Raise UnsupportedError if a weight was quantized for inputs that its layer multiplies, which the model does not.

        parameters: the names of the values for which the model has a place.
        """
        for name, factor in factors(self._source).items():
            if name in parameters and factor not in parameters:
                raise UnsupportedError(
                    f"the inputs of {name} are multiplied by {factor}, for which a quantized layer has no place. Convert the "
                    "checkpoint that it was made from.",
                    name=name,
                )

    def check_codes(self, floating: Iterable[str]) -> None:
        """Raise DialectError if one of these values is a plain tensor of two axes or more that has no floats.

        floating: names of values for which the model has floating parameters. Codes without scales have no values.
        """
        for name in floating:
            value = self._source.values[name]
            if not value.is_readable and len(value.shape) > 1:
                raise DialectError(
                    f"{shown(value.container.path)}: {name} is {value.stored_as} of shape {spelled(value.shape)}, without "
                    "scales that breccia knows, and the model has floats there. Load it with the library that wrote it.",
                    name=name,
                    dtype=value.stored_as,
                )

    @property
    def dialects(self) -> list[str]:
        """The names of the dialects of its values, the most common first; "breccia" for those that breccia quantized."""
        counts: dict[str, int] = {}
        for name in self._names:
            value = self._source.values[name]
            if value.is_scaled:
                counts[_dialect(value)] = counts.get(_dialect(value), 0) + 1
        return sorted(counts, key=lambda dialect: -counts[dialect])

    def __repr__(self) -> str:
        scaled = sum(self._source.values[name].is_scaled for name in self._names)
        kinds = f" ({', '.join(self.dialects)})" if scaled else ""
        return f"Checkpoint({str(self._source.path)!r}, {len(self)} values, {scaled} of them scaled{kinds})"


def load_checkpoint(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    names: Sequence[str] | None = None,
    framework: str = "numpy",
    device: Any = None,
    source_dialect: str | None = None,
    settings: Settings | None = None,
) -> Checkpoint:
    """The values of a checkpoint that any library wrote, by the model's names: a lazy mapping.

    path: a safetensors file, or a folder of them: plain, quantized by breccia, or in any dialect that breccia reads
        (GPTQ, AWQ, compressed-tensors, ModelOpt, MLX, bitsandbytes, torchao, DeepSeek-V3, gpt-oss, ...). Or a GGUF file, or a
        folder with one; a part of a model that was split stands for all parts. Or files of torch.save, of which
        `torch.load(weights_only=True)` reads tensors alone; they need torch. Or a list of files of one folder. The configs of a
        file's folder are about it if it has tensors that another library quantized. Or a URL of any of these but torch.save's,
        "s3://bucket/model", of which the headers, and the tensors that are asked for, are read by ranges.
    names: the values, as names or shell-style globs over whole names; by default all.
    framework, device: of the tensors, as in `load_safetensors`.
    source_dialect: the name of the dialect, where the config and the tensors leave a choice.
    settings: called with the headers of each value that no config announces, for what the config of its dialect would say; None
        leaves it to the tensors. A model knows the length of rows, from which MLX's bits and group size follow. Values are then
        checked when they, or their headers, are asked for.

    Each value is read when it is asked for: a ScaledTensor with every code and scale as stored, or an array. One value at a
    time is in memory. Raises DialectError where two dialects are possible and for values that do not follow theirs;
    UnsupportedError for a dialect that breccia does not read; UnknownNameError for a name that matches nothing; OptionError
    for files of several folders, and as `load_safetensors` does; ConnectionError and ImportError for a URL, as `convert` does.

        >>> w = breccia.cast(np.ones((64, 32), np.float32), "mxfp8")
        >>> breccia.bridges.save_safetensors({"w": w}, tmp / "m.safetensors")
        >>> checkpoint = breccia.bridges.load_checkpoint(tmp / "m.safetensors")
        >>> checkpoint["w"]
        breccia.ScaledTensor('mxfp8', shape=(64, 32), numpy cpu, 8.25 bits per value)
        >>> checkpoint.header("w").shape, checkpoint.dialects
        ((64, 32), ['breccia'])
    """
    target = Target.of(framework, device)
    files = list(dict.fromkeys(one for file in _files(path) for one in of_one(file)))
    if len(files) > 1 or files[0].is_file():  # of any names, as for `load_safetensors`
        root = files[0] if len(files) == 1 else files[0].parent
        source = Source.of(root, all_opened(files), source_dialect)
    else:
        source = Source.open(files[0], source_dialect)
    if settings is not None:
        source = replace(source, values={name: _with_settings(value, settings) for name, value in source.values.items()})
    else:
        for value in source.values.values():
            if value.stored is not None:
                value.stored.form  # noqa: B018  # raises for what a dialect does not write
    if names is None:
        return Checkpoint(source, list(source.values), target)
    patterns = (names,) if isinstance(names, str) else tuple(names)
    check_patterns(patterns, source.values)
    return Checkpoint(source, [name for name in source.values if matches(name, patterns)], target)


def _files(path: Any) -> list[Path]:
    """What the caller of `load_checkpoint` gives. Raises OptionError unless it is a path, or files of one folder."""
    listed = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(one, str | os.PathLike) for one in listed):
        raise OptionError(
            f"path must be that of a file or folder, or a list of files of one folder; got {short(path)}.", path=path
        )
    files = [path_of(one) for one in listed]
    folders = list(dict.fromkeys(str(file.parent) if is_remote(file) else os.path.abspath(file.parent) for file in files))
    if len(folders) > 1:
        raise OptionError(
            f"path must be that of a file or folder, or a list of files of one folder; got files of {abbreviated(folders)}. "
            "Load each folder by itself.",
            path=path,
        )
    return files


def _dialect(value: Value) -> str:
    return value.stored.dialect.name if value.stored else OWN


def _with_settings(value: Value, settings: Settings) -> Value:
    stored = value.stored
    if stored is None or stored.config is not None or (said := settings(stored.value)) is None:
        return value
    config = Announced("the caller", stored.dialect.name, said)
    return replace(value, stored=replace(stored, config=config, settings_of=ModuleSettings(stored.dialect, config)))


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
