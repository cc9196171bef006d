"""Compare two checkpoints tensor by tensor, in any mixture of formats."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from breccia import UnsupportedError
from breccia.backend import PARTS
from breccia.internal import abbreviated, measuring

from .checkpoint import checkpoint_files
from .configs import Config, Undeclared
from .foreign import BlockFP8, recognized
from .measure import FLOATING, FileTensor, histogram, measure
from .results import EQUAL, Advance, Report, TensorReport, no_progress
from .safetensors import joined, named_tensors
from .safetensors_file import Container, Shape, read
from .text import spelled


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint: its file, its name, and its config if it is scaled.

    blocks: of a weight that another program quantized to block FP8, the checkpoint's weights of this kind.
    """

    container: Container
    name: str
    config: Config | None
    undeclared: Undeclared | None = None
    blocks: BlockFP8 | None = None

    @property
    def parts(self) -> dict[str, Container]:
        """The names of its entries, each with its file."""
        if self.blocks is not None:
            return {part: self.blocks.files[part] for part in (self.name, self.blocks.scales[self.name])}
        if self.config is None and self.undeclared is None:
            return {self.name: self.container}
        names = [f"{self.name}.{suffix}" for suffix in PARTS]
        return {part: self.container for part in names if part in self.container.entries}

    @property
    def file(self) -> str:
        """The name of its file; several where a checkpoint was cut between its components."""
        return ", ".join(dict.fromkeys(file.file_of(part).name for part, file in self.parts.items()))

    @property
    def nbytes(self) -> int:
        return sum(file.entries[part].nbytes for part, file in self.parts.items())

    @property
    def shape(self) -> Shape:
        """The logical shape; the shape of the codes if no installed recipe declares their packing."""
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
        """Can its values be decoded?"""
        return self.config is not None or self.blocks is not None or self.stored_as in FLOATING

    def stored(self) -> FileTensor:
        """Its values, by slabs."""
        return FileTensor(self.container, self.name, self.blocks.tensor(self.name) if self.blocks else self.config)


def checkpoint_tensors(path: Path, *, undeclared: bool = False) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint by name; `undeclared` includes those of unknown recipes.

    Raises as `checkpoint_files` and `named_tensors` do.
    """
    unknown: dict[str, Undeclared] = {}
    containers = joined(path, [Container(file) for file in checkpoint_files(path)])
    listed = named_tensors(path, containers, unknown if undeclared else None)
    return {name: CheckpointTensor(file, name, config, unknown.get(name)) for name, (file, config) in listed.items()}


def _decodable_tensors(path: Path) -> dict[str, CheckpointTensor]:
    """`checkpoint_tensors`, with weights and scales of block FP8 as one tensor.

    Raises as `recognized` does for checkpoints in other programs' formats.
    """
    tensors = checkpoint_tensors(path)
    blocks = recognized(path, list({tensor.container.path: tensor.container for tensor in tensors.values()}.values()))
    if blocks is None:
        return tensors
    scales = set(blocks.scales.values())
    return {
        name: replace(tensor, blocks=blocks) if name in blocks.scales else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def compare(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    histograms: bool = False,
    advance: Advance | None = None,
) -> Report:
    """Measure the tensors of `candidate` against those of the same name in `reference`.

    Each is a `.safetensors` file or a folder of them: plain, quantized by breccia, or in block FP8 as DeepSeek-V3, in any
    mixture. Scaled tensors are compared by the FP32 values of `dequantize`. Tensors with equal bytes, and non-floating ones,
    are listed with the reason why they were not measured.

    histograms: count the elements of compared tensors by value, in both.
    advance: called with a tensor's name and its bytes in the reference.

    Raises FileNotFoundError for a missing checkpoint, CorruptFileError for a file that breaks its format, UnsupportedError if
    the two have no name in common and for other formats of checkpoints.

        >>> x = np.array([[0.125, 1.0, 3.0, 6.0]], np.float32)
        >>> breccia.bridges.save_safetensors({"w": x}, tmp / "before.safetensors")
        >>> st = breccia.cast(x, "mxfp4")
        >>> breccia.bridges.save_safetensors({"w": st}, tmp / "after.safetensors")
        >>> report = breccia.bridges.compare(tmp / "before.safetensors", tmp / "after.safetensors")
        >>> [(tensor.name, tensor.stored_as, tensor.fidelity.max_error) for tensor in report.tensors]
        [('w', 'mxfp4', 0.125)]
    """
    before, after = _decodable_tensors(Path(reference)), _decodable_tensors(Path(candidate))
    common = [name for name in before if name in after]
    if not common:
        here, there = (abbreviated(names) or "none at all" for names in (before, after))
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
        (advance or no_progress)(name, before[name].nbytes)
    for container in {id(t.container): t.container for t in (*before.values(), *after.values())}.values():
        container.check_unchanged()
    return report


def _compared(x: CheckpointTensor, y: CheckpointTensor, histograms: bool) -> TensorReport:
    recipe = y.config and y.config.recipe
    report = TensorReport(x.name, x.shape, x.stored_as, y.stored_as, _why_not(x, y), x.nbytes, y.nbytes, recipe=recipe)
    if report.reason:
        return report
    a, b = x.stored(), y.stored()
    return replace(report, fidelity=measure(a, b), histogram=histogram(a, b) if histograms else None)


def _why_not(x: CheckpointTensor, y: CheckpointTensor) -> str:
    """Why two tensors are not measured; empty if they are."""
    if x.shape != y.shape:
        return f"shapes differ: {spelled(x.shape)} and {spelled(y.shape)}"
    if _same_bytes(x, y):
        return EQUAL
    unknown = [t.stored_as for t in (x, y) if not t.readable]
    if not unknown:
        return ""
    coded = unknown[0].startswith("F")
    return f"differ, and {f'breccia finds no scales for {unknown[0]}' if coded else f'{unknown[0]} is not floating'}"


def _same_bytes(x: CheckpointTensor, y: CheckpointTensor) -> bool:
    """Are all components and configs equal?"""
    if x.config != y.config or x.stored_as != y.stored_as or x.parts.keys() != y.parts.keys():
        return False
    if x.blocks and y.blocks and x.blocks.block != y.blocks.block:
        return False
    pairs = [(file, y.parts[part], part) for part, file in x.parts.items()]
    if any(here.entries[part].nbytes != there.entries[part].nbytes for here, there, part in pairs):
        return False
    return all(_same(here.view(part), there.view(part)) for here, there, part in pairs)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = (array.reshape(-1).view(np.uint8) for array in (a, b))
    step = measuring.SLAB
    return all(np.array_equal(read(a[i : i + step]), read(b[i : i + step])) for i in range(0, a.size, step))
