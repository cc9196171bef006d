"""Where each tensor of a checkpoint lies in a model of transformers: a parameter, or the rows of one expert in a stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

from breccia import UnsupportedError

from ..quantize import is_conv1d
from .places import Place, natural, places_of


class Spot(NamedTuple):
    """Where a value of the files lies: in the parameter or buffer `leaf` of a module.

    name: in the files. owner: the module's name. expert: the matrix of a stack that it is; None for a whole parameter.
    first: the first of its rows there, where a stack joins the rows of several. turned: whether its last two axes are swapped.
    """

    name: str
    owner: str
    leaf: str
    expert: int | None = None
    first: int = 0
    turned: bool = False

    def of(self, model: nn.Module, shape: tuple[int, ...]) -> Tensor:
        """The part of the model's parameter that holds the value, of its shape; writing to it changes the model."""
        tensor: Tensor = getattr(model.get_submodule(self.owner), self.leaf).detach()
        if self.expert is not None:
            tensor = tensor[self.expert]
            tensor = tensor.mT if self.turned else tensor
            return tensor[self.first : self.first + shape[0]]
        return tensor.mT if self.turned else tensor

    @property
    def target(self) -> str:
        return f"{self.owner}.{self.leaf}".lstrip(".")


def spots_of(model: Any, checkpoint: Any) -> dict[str, Spot]:
    """The spot of each tensor of a checkpoint that the model has, by its name in the files.

    Raises UnsupportedError for tensors that transformers computes in other ways than stacking experts and swapping axes.
    """
    places = places_of(model, checkpoint)
    spots: dict[str, Spot] = {}
    stacks: dict[str, dict[str, list[Place]]] = {}
    for place in places:
        if place.pattern is None or place.transposes or not place.operations:
            shape = checkpoint.header(place.name).shape
            flipped = is_conv1d(_owner(model, place.target)) and checkpoint.is_as_linear(place.name)
            spots[place.name] = Spot(place.name, *_split(place.target), turned=place.turns(shape) != flipped)
        else:
            stacks.setdefault(place.target, {}).setdefault(place.pattern, []).append(place)
    for target, columns in stacks.items():
        _add_stack(spots, target, columns.values(), checkpoint)
    return spots


def _add_stack(spots: dict[str, Spot], target: str, columns: Iterable[list[Place]], checkpoint: Any) -> None:
    first, turned = 0, False
    for column in columns:
        kinds = [type(operation) for operation in column[0].operations]
        turned = Transpose in kinds
        if kinds[:1] != [MergeModulelist] or not set(kinds) <= {MergeModulelist, Concatenate, Transpose} or (turned and first):
            spelled = ", ".join(kind.__name__ for kind in kinds)
            raise UnsupportedError(
                f"transformers makes {target} of {column[0].name} and others by {spelled}, which calibration does not follow. "
                "Convert without --calibrate.",
                name=target,
            )
        column = sorted(column, key=lambda place: natural(place.name))
        for expert, place in enumerate(column):
            spots[place.name] = Spot(place.name, *_split(target), expert, first, turned)
        first += checkpoint.header(column[0].name).shape[0]


def _split(target: str) -> tuple[str, str]:
    owner, _, leaf = target.rpartition(".")
    return owner, leaf


def _owner(model: nn.Module, target: str) -> nn.Module:
    return model.get_submodule(_split(target)[0])
