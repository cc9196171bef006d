"""The values of a checkpoint for the tensors of a model, read one by one; those of single experts are stacked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import breccia
from breccia import ScaledTensor, UnsupportedError
from breccia.backend import part_shapes

from .ops import TORCH

#: The projections that transformers fuses into one parameter of a module of experts, as files of one tensor per expert name
#: them. The rows of several are joined.
_PROJECTIONS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
#: Names of values of experts, by projection.
Columns = Sequence[Sequence[str]]


class Values(Mapping[str, Any]):
    """The values of a checkpoint by the names of a model: ScaledTensors and tensors, each read when it is asked for.

    checkpoint: what `breccia.bridges.load_checkpoint` returns.
    stacks: for a parameter of experts that are stacked, the names of their values, by projection.
    flipped: weights that the model has as (in_features, out_features). Other libraries store these as those of linear layers.
    turned: values, or stacks, whose last two axes the model has in the other order, whatever library stored them.
    """

    def __init__(
        self, checkpoint: Any, stacks: Mapping[str, Columns], flipped: Collection[str] = (), turned: Collection[str] = ()
    ) -> None:
        self._checkpoint, self._stacks = checkpoint, stacks
        self._headers: dict[str, Any] = {name: checkpoint.header(name) for name in checkpoint}
        linear = {name for name in flipped if name in checkpoint and checkpoint.is_as_linear(name)}
        self._turned = linear | set(turned)
        single = {one for columns in stacks.values() for column in columns for one in column}
        self._names = dict.fromkeys([*(name for name in checkpoint if name not in single), *stacks])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> ScaledTensor | Tensor:
        if name in self._stacks:
            stack = _joined([_stacked([self._checkpoint[one] for one in column]) for column in self._stacks[name]])
            return self._in_the_model(name, stack)
        return self._in_the_model(name, self._checkpoint[name])

    def empty(self, name: str) -> ScaledTensor | Tensor:
        """The value on the meta device, by headers. Of a plain tensor only the shape counts.

        Raises what `stacked` raises.
        """
        if name in self._stacks:
            stack = stacked([[empty(self._headers[one]) for one in column] for column in self._stacks[name]], name)
            return self._in_the_model(name, stack)
        return self._in_the_model(name, empty(self._headers[name]))

    def shape_and_axis(self, name: str) -> tuple[tuple[int, ...], int | None]:
        """The shape of a value, and the contraction axis of a quantized one, by headers. Raises as `empty` does."""
        if name in self._stacks or name in self._turned:
            like = self.empty(name)
            return tuple(like.shape), like.axis if isinstance(like, ScaledTensor) else None
        header = self._headers[name]
        return header.shape, None if header.recipe is None else header.axis

    def sources(self, name: str) -> list[str]:
        """The names in the checkpoint of what a value consists of."""
        return [one for column in self._stacks[name] for one in column] if name in self._stacks else [name]

    def is_scaled(self, name: str) -> bool:
        """Is there a quantized value of that name?"""
        first = self.sources(name)[0]
        return first in self._headers and self._headers[first].recipe is not None

    def _in_the_model(self, name: str, value: ScaledTensor | Tensor) -> ScaledTensor | Tensor:
        if name not in self._turned:
            return value
        return value.mT if isinstance(value, ScaledTensor) else value.mT.contiguous()


def stacks_of(checkpoint: Mapping[str, Any], parameters: Mapping[str, int]) -> dict[str, Columns]:
    """The `stacks` of `Values`. parameters: those of experts that the checkpoint does not have, with the number of experts."""
    return {name: columns for name, count in parameters.items() if (columns := _singles(checkpoint, name, count))}


def _singles(checkpoint: Mapping[str, Any], name: str, count: int) -> Columns:
    """The values of the single experts that a parameter fuses; none if the checkpoint lacks one."""
    module, _, fused = name.rpartition(".")
    for projections in _PROJECTIONS.get(fused, ()):
        names = [[f"{module}.{expert}.{projection}.weight" for expert in range(count)] for projection in projections]
        if all(one in checkpoint for column in names for one in column):
            return names
    return ()


def empty(header: Any) -> ScaledTensor | Tensor:
    """The value of a header of `load_checkpoint` on the meta device, with the dtypes of its recipe."""
    if header.recipe is None:
        return torch.empty(header.shape, device="meta")
    dtypes = TORCH.dtypes(header.recipe.format)
    shapes = part_shapes(header.recipe.format, header.layout, header.shape, header.axis)
    parts: dict[str, Any] = {
        name: torch.empty(shape, dtype=getattr(torch, dtypes[name]), device="meta") for name, shape in shapes.items()
    }
    return ScaledTensor(recipe=header.recipe, layout=header.layout, axis=header.axis, shape=header.shape, **parts)


def stacked(columns: Sequence[Sequence[Any]], name: str) -> Any:
    """Projections of all experts as one tensor: of shape (experts, rows, columns), with the rows of several joined.

    columns: for each projection, the tensors of the experts. Several quantized projections become
        (experts, projections, rows, columns), since each keeps its tensor-level scale.
    Raises UnsupportedError if only some are quantized, and what `breccia.stack` raises.
    """
    scaled = [isinstance(one, ScaledTensor) for column in columns for one in column]
    if any(scaled):
        check_all_quantized(name, sum(scaled), len(scaled))
    return _joined([_stacked(column) for column in columns])


def _stacked(experts: Sequence[Any]) -> Any:
    return breccia.stack(experts) if isinstance(experts[0], ScaledTensor) else torch.stack(list(experts))


def _joined(projections: list[Any]) -> Any:
    if not isinstance(projections[0], ScaledTensor):
        return torch.cat(projections, dim=1)
    return projections[0] if len(projections) == 1 else breccia.stack(projections, axis=1)


def check_turned(name: str, columns: Columns) -> None:
    """Raise UnsupportedError if several projections would be stacked into a parameter of (experts, in_features, out_features).

    Models with such parameters differ in how they order the columns: gpt-oss alternates those of gate and up.
    """
    if len(columns) > 1:
        projections = " and ".join(column[0].split(".")[-2] for column in columns)
        raise UnsupportedError(
            f"{name} is transposed in the model, and the file has {projections} of each expert: their order in it is "
            "not known. Give the file one tensor of that name.",
            name=name,
        )


def check_all_quantized(name: str, quantized: int, count: int) -> None:
    """Raise UnsupportedError unless all `count` tensors of a module's experts are quantized."""
    if quantized < count:
        raise UnsupportedError(
            f"{name}: {quantized} of {count} tensors of its experts are quantized; a module of experts has all of them "
            "quantized, or none. Convert the checkpoint again, with --include or --exclude for all experts.",
            name=name,
        )
