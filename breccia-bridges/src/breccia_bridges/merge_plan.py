"""The conversion that merges an adapter: tensors are copied, except those that hold a value with a change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np

from breccia import OptionError, ScaledTensor, ShapeError, UnknownNameError, UnsupportedError
from breccia.backend import NUMPY
from breccia.internal import abbreviated, did_you_mean, printable

from .adapters import Adapter, LowRank
from .announcements import QUANTIZATION_FILES
from .calibrated import Calibrated, Stage
from .conversion import Conversion
from .dialect_writer import DialectWriter, Placed
from .engines import engine_of
from .jobs import CASTABLE
from .merging import Survival, merged
from .results import Advance
from .safetensors_file import read
from .source import Source, Value
from .staging import Staging
from .text import size
from .uploads import Uploads

#: Bytes per element of a matrix while a change is added: FP32 and FP64 copies of it, of the change, of steps and codes.
_OF_ELEMENT = 64
_MIB = 1 << 20


class Merging(Conversion):
    """A conversion to the dialect of its source.

    changes: the change of each value that has one, by its name, (rows, columns) as the value's.
    """

    def __init__(
        self, src: Path, staging: Staging, force: bool, source_dialect: str | None, adapter: Adapter, memory: int
    ) -> None:
        values = Source.open(src, source_dialect).values
        self.dialects = _dialects(src, values)
        #: Of files that are not safetensors, which have one plan of their own for all values.
        own = next((one for one in self.dialects.values() if one.file), None)
        super().__init__(src, staging, force, source_dialect, own, None, engine_of("local", memory))
        self.values = self.source.values
        self.dialects = {name: replace(one, dtype=self.source.dtype) for name, one in self.dialects.items()}
        self.changes = _changes(adapter, self.values, src)
        self._check_memory(memory)
        if own is None:
            # Every tensor that another library has written is a plain one, which is copied.
            self.source = Source.of(src, list(self.source.files), foreign=False)

    def _check_memory(self, limit: int) -> None:
        largest = max(self.changes, key=lambda name: math.prod(self.values[name].shape))
        needed = _OF_ELEMENT * math.prod(self.values[largest].shape)
        if needed > limit:
            give = f"{math.ceil(needed / _MIB / 64) * 64}MiB"
            raise OptionError(
                f"the merge takes about {size(needed)} of memory for {printable(largest)}, and the limit is {size(limit)}. "
                f"Give max_memory={give!r} (--max-memory {give}).",
                name=largest,
                max_memory=limit,
                needed=needed,
            )

    def _describe(self, stage: Path, uploads: Uploads | None) -> None:
        for name in QUANTIZATION_FILES:
            if (self.src / name).is_file():
                copyfile(self.src / name, stage / name)
        self._write_index(stage, uploads)

    def choose(self, results: Calibrated, judge: Callable[[Mapping[str, Mapping[str, Any]]], None]) -> None:
        """Let the values with a change be merged when the conversion runs. judge: gets the records of all, and may refuse."""
        self.chosen_by(results)

        def run(advance: Advance) -> None:
            for name in self.changes:
                if results.finished(name) is None:
                    results.add(self._merged(name))
                advance(name, self.values[name].nbytes)
            judge({name: results.records[name] for name in self.changes})

        self.calibration = run

    def _merged(self, name: str) -> Stage:
        """A value with its change, as the new file has it. Raises UnsupportedError for what its dialect does not write."""
        value, change = self.values[name], self.changes[name]
        if not value.is_scaled:
            return _plain(value, change)
        st = value.loaded()
        found = merged(st, change)
        record = _record(value, change, found.survival, found.blocks, found.changed, found.rescaled)
        dialect = self.dialects[value.stored.dialect.name] if value.stored else None
        if dialect is None or dialect.file:
            return Stage(name, {name: found.tensor}, {}, {name: record})
        return Stage(name, {}, self._arrays(dialect, value, st, found.tensor), {name: record})

    def _arrays(self, dialect: DialectWriter, value: Value, before: ScaledTensor, after: ScaledTensor) -> dict[str, np.ndarray]:
        """The tensors of a value that its codes and scales determine, as they are stored.

        Raises UnsupportedError where those of before would change their bytes.
        """
        placed = dialect.place(value.name, before.recipe, value.layout, value.axis, value.shape)
        known = {placed.parts[end] for end in placed.stored.known}
        old, new = ({part: a for part, a in dialect.arrays(placed, st).items() if part not in known} for st in (before, after))
        unlike = [part for part, array in old.items() if not _is_stored(value, placed, part, array)]
        if unlike:
            raise UnsupportedError(
                f"{printable(value.name)}: breccia writes {abbreviated(unlike)} of {dialect.dialect.title} in another way than "
                "this checkpoint has it. Convert it first, to breccia's own files: `breccia convert --recipe none`.",
                name=value.name,
                parts=unlike,
            )
        return new


def _is_stored(value: Value, placed: Placed, part: str, array: np.ndarray) -> bool:
    """Has the source these bytes, under this name and dtype?"""
    file = value.files.get(part)
    if file is None or (file.entries[part].dtype, tuple(file.entries[part].shape)) != placed.entries[part]:
        return False
    return np.ascontiguousarray(array).tobytes() == read(file.view(part)).tobytes()


def _plain(value: Value, change: LowRank) -> Stage:
    """A value that is not quantized, with its change, rounded once to its dtype."""
    codec = CASTABLE[value.stored_as]
    before, wanted = value.numbers().values((slice(0, 1), slice(0, value.shape[0])))[0].astype(np.float32), change.matrix()
    stored = NUMPY.store(codec.encode(NUMPY, before + wanted), NUMPY.storage(codec))
    survival = Survival.of(before, codec.read(NUMPY, stored), wanted)
    return Stage(value.name, {}, {value.name: stored}, {value.name: _record(value, change, survival)})


def _record(value: Value, change: LowRank, survival: Survival, *counts: int) -> dict[str, Any]:
    """What the journal keeps of a merged value. counts: of blocks, of changed and of rescaled ones."""
    sums = (survival.wanted, survival.along, survival.missed)
    blocks = dict(zip(("blocks", "changed", "rescaled"), counts or (0, 0, 0), strict=True))
    return {"stored_as": value.stored_as, "rank": change.rank, **blocks, "survival": sums}


def _dialects(src: Path, values: Mapping[str, Value]) -> dict[str, DialectWriter]:
    """The writers of the dialects of a source. Raises UnsupportedError where nothing is quantized, or one is only read."""
    if not any(value.is_scaled for value in values.values()):
        raise UnsupportedError(
            f"no tensor of {src} is quantized. Merge the adapter in PEFT, and convert the result: `breccia convert`.",
            path=str(src),
        )
    names = dict.fromkeys(value.stored.dialect.name for value in values.values() if value.stored)
    try:
        return {name: DialectWriter.of(name, None) for name in names}
    except UnsupportedError as e:
        raise UnsupportedError(
            f"{e} Convert {src} first, to one of these or to breccia's own files: `breccia convert --recipe none`.",
            **e.found,
        ) from e


def _changes(adapter: Adapter, values: Mapping[str, Value], src: Path) -> dict[str, LowRank]:
    """The change of each value. Raises UnknownNameError, ShapeError and UnsupportedError for layers that have none."""
    changes: dict[str, LowRank] = {}
    missing = {layer: f"{layer}.weight" for layer in adapter.layers if f"{layer}.weight" not in values}
    if missing:
        first = next(iter(missing.values()))
        raise UnknownNameError(
            f"{adapter.path} changes {abbreviated(missing.values())}, which {src} does not have"
            f"{did_you_mean(first, values) or '.'} It is the adapter of another model, or of one with other names of layers.",
            missing=list(missing.values()),
        )
    for layer, change in adapter.layers.items():
        name, value = f"{layer}.weight", values[f"{layer}.weight"]
        if not value.is_scaled and value.stored_as not in CASTABLE:
            raise UnsupportedError(
                f"{printable(name)} of {src} is {value.stored_as}, not floating; nothing is added.", name=name
            )
        turned = change.mT if adapter.is_turned else change
        if turned.shape != tuple(value.shape):
            raise ShapeError(
                f"{printable(name)} of {src} has shape {tuple(value.shape)}, and the change of {adapter.path} has "
                f"{turned.shape}. It is the adapter of another model.",
                name=name,
                found=turned.shape,
                expected=tuple(value.shape),
            )
        changes[name] = turned
    return changes
