"""Compare two checkpoints, tensor by tensor, whatever each is stored as."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from breccia import CorruptFileError, UnsupportedError
from breccia.backend import PARTS

from .checkpoint import checkpoint_files
from .measure import FLOATING, SLAB, Stored, histogram, measure
from .results import EQUAL, Advance, Report, TensorReport, unnoticed
from .safetensors import Config, Undeclared, read_configs
from .safetensors_file import Container, Shape
from .text import named, spelled


@dataclass(frozen=True)
class Held:
    """One tensor of a checkpoint: the file, and what makes a scaled tensor of its parts."""

    container: Container
    name: str
    config: Config | None
    undeclared: Undeclared | None = None

    @property
    def parts(self) -> list[str]:
        """The entries of the file that hold it."""
        if self.config is None and self.undeclared is None:
            return [self.name]
        return [part for part in (f"{self.name}.{suffix}" for suffix in PARTS) if part in self.container.entries]

    @property
    def nbytes(self) -> int:
        return sum(self.container.entries[part].nbytes for part in self.parts)

    @property
    def shape(self) -> Shape:
        """The logical shape; that of the codes, where nobody here knows how they are packed."""
        if self.undeclared is not None:
            entry = self.container.entries.get(f"{self.name}.data")
            return self.undeclared.shape or (entry.shape if entry else ())
        if self.config is None:
            return self.container.entries[self.name].shape
        return self.config.shape or self.container.entries[f"{self.name}.data"].shape

    @property
    def stored_as(self) -> str:
        """A recipe's name, or a dtype of the file."""
        if self.undeclared is not None:
            return self.undeclared.recipe
        return self.config.recipe.name if self.config else self.container.entries[self.name].dtype

    @property
    def readable(self) -> bool:
        """Does the file say which numbers it holds?"""
        return self.config is not None or self.stored_as in FLOATING


def held_tensors(path: Path, *, undeclared: bool = False) -> dict[str, Held]:
    """The tensors of a checkpoint by name, with those of recipes that no plug-in declares if `undeclared` asks for them.

    Raises CorruptFileError where two files hold the same one, and as `read_configs` does.
    """
    found: dict[str, Held] = {}
    for file in checkpoint_files(path):
        container = Container(file)
        unknown: dict[str, Undeclared] = {}
        configs = read_configs(container, unknown if undeclared else None)
        scaled = [Held(container, name, configs.get(name), unknown.get(name)) for name in (*configs, *unknown)]
        owned = {part for held in scaled for part in held.parts}
        for name in (*(name for name in container.entries if name not in owned), *configs, *unknown):
            if name in found:
                raise CorruptFileError(
                    f"tensor {name!r} lies in {found[name].container.path.name} and {file.name} of {path}; name one file, or "
                    "fetch the folder again.",
                    name=name,
                )
            found[name] = Held(container, name, configs.get(name), unknown.get(name))
    return found


def compare(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    histograms: bool = False,
    advance: Advance | None = None,
) -> Report:
    """How near the tensors of `candidate` are to those of the same name in `reference`.

    Each is a `.safetensors` file or a folder of them, plain or quantized by breccia, in any mixture. Scaled tensors are
    compared by the FP32 values that `dequantize` gives. Tensors of equal bytes, and those that hold no floating numbers, are
    listed with the reason why they were not measured.
    histograms: count the elements of compared tensors by value, in both.
    advance: called with a tensor's name and its bytes in the reference.

    Raises UnsupportedError where no name is in both, and as `checkpoint_files` and `Container` do.
    """
    before, after = held_tensors(Path(reference)), held_tensors(Path(candidate))
    common = [name for name in before if name in after]
    if not common:
        here, there = (named(names) or "none at all" for names in (before, after))
        raise UnsupportedError(
            f"{reference} and {candidate} have no tensor in common ({here}; {there}); compare checkpoints of one model."
        )
    report = Report(
        str(reference),
        str(candidate),
        missing=[name for name in before if name not in after],
        added=[name for name in after if name not in before],
    )
    for name in common:
        report.tensors.append(_compared(before[name], after[name], histograms))
        (advance or unnoticed)(name, before[name].nbytes)
    return report


def _compared(x: Held, y: Held, histograms: bool) -> TensorReport:
    found = TensorReport(x.name, x.shape, x.stored_as, y.stored_as, _why_not(x, y), x.nbytes, y.nbytes)
    if found.reason:
        return found
    a, b = (Stored(held.container, held.name, held.config) for held in (x, y))
    return replace(found, fidelity=measure(a, b), histogram=histogram(a, b) if histograms else None)


def _why_not(x: Held, y: Held) -> str:
    """Why two tensors are not measured; empty where they are."""
    if x.shape != y.shape:
        return f"shapes differ: {spelled(x.shape)} and {spelled(y.shape)}"
    if _same_bytes(x, y):
        return EQUAL
    unknown = [held.stored_as for held in (x, y) if not held.readable]
    if not unknown:
        return ""
    coded = unknown[0].startswith("F")
    return f"differ, and {f'breccia finds no scales for {unknown[0]}' if coded else f'{unknown[0]} is not floating'}"


def _same_bytes(x: Held, y: Held) -> bool:
    """Are all parts the same, and do they mean the same?"""
    if x.config != y.config or x.stored_as != y.stored_as:
        return False
    pairs = [(x.container, y.container, part) for part in x.parts]
    if any(here.entries[part].nbytes != there.entries[part].nbytes for here, there, part in pairs):
        return False
    return all(_same(here.array(part), there.array(part)) for here, there, part in pairs)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = (array.reshape(-1).view(np.uint8) for array in (a, b))
    return all(np.array_equal(a[i : i + SLAB], b[i : i + SLAB]) for i in range(0, a.size, SLAB))
