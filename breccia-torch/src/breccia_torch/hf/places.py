"""Where the tensors of a checkpoint go in a model of transformers, and the conversions between them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from breccia import UnsupportedError

#: What transposes the matrices of all experts, and the conversions of the weights of single experts, as `_described`.
_TRANSPOSITION = [(Transpose, 1, 2)]
_STACKINGS = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


class Place(NamedTuple):
    """Where a tensor of the files goes.

    name: in the files. target, parameter: the name in the model's state, and the tensor there.
    pattern, operations: of the conversion between them, whose pattern the name matches; None and none if there is none.
    """

    name: str
    target: str
    parameter: Tensor
    pattern: str | None
    operations: list[ConversionOps]

    @property
    def transposes(self) -> bool:
        """Is the conversion to swap the last two axes of one tensor of all experts, and nothing else?"""
        return _described(self.operations) == _TRANSPOSITION

    def turns(self, shape: tuple[int, ...]) -> bool:
        """Are the last two axes of a tensor of that shape swapped?"""
        where_needed = self.transposes and getattr(self.operations[0], "check_dims", False)
        return self.transposes and not (where_needed and shape == tuple(self.parameter.shape))

    def check(self) -> None:
        """Raise UnsupportedError for a conversion that breccia does not do with quantized weights."""
        if self.pattern is None or self.transposes or _described(self.operations) in _STACKINGS:
            return
        raise UnsupportedError(
            f"transformers makes {self.target} of {self.name} by {', '.join(map(_spelled, self.operations))}, which breccia "
            "does not do with quantized weights. Convert the checkpoint again, with --exclude for these weights.",
            name=self.target,
        )


def places_of(model: Any, names: Iterable[str]) -> list[Place]:
    """The places of the tensors of these names in the files. Those of one conversion are in the order of its patterns.

    Those that the model lacks, such as layers that predict further tokens, are left out: transformers reports them as
    unexpected.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    operations: dict[str | None, list[ConversionOps]] = {None: []}
    for converter in converters:
        for pattern in converter.source_patterns:
            operations.setdefault(pattern, converter.operations)
    order = {pattern: number for number, pattern in enumerate(operations)}
    state, prefix = model.state_dict(), model.base_model_prefix
    renamed = [(name, *rename_source_key(name, renamings, converters, prefix, state)) for name in names]
    found = [Place(name, target, state[target], p, operations[p]) for name, target, p in renamed if target in state]
    return sorted(found, key=lambda place: order[place.pattern])


def natural(name: str) -> list[Any]:
    """Sorts names by the numbers in them."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _described(operations: list[ConversionOps]) -> list[tuple[Any, ...]]:
    """Operations by their types and axes."""
    return [(type(one), *(vars(one)[key] for key in ("dim", "dim0", "dim1") if key in vars(one))) for one in operations]


def _spelled(operation: ConversionOps) -> str:
    ((kind, *axes),) = _described([operation])
    return f"{kind.__name__}({', '.join(map(str, axes))})"
