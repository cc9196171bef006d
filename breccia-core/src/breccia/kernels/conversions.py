"""`breccia.exactness`: what a conversion keeps, for every tensor of a format or for one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..arrays.frameworks import ops_of
from ..arrays.ops import Array, Ops
from ..formats import TENSOR, Format
from ..options import DEFAULT
from ..recipes import ScalingRecipe
from ..specs import as_recipe
from ..tensors.checks import need_one_device
from ..tensors.tensor import ScaledTensor, scaled
from .checks import fitted_layout
from .composites import SELECTED
from .exactness import INEXACT, NEW_CODES, SAME_CODES, Exactness, decided
from .reference import unpack
from .reference.requantizing import cast_again, differ, kept, total
from .reference.tiles import Tiles


def exactness(source: Any, target: ScalingRecipe | Format | str) -> Exactness:
    """`breccia.exactness`."""
    if isinstance(tensor := scaled(source), ScaledTensor):
        return _of_tensor(tensor, as_recipe(target))  # pyright: ignore[reportArgumentType]
    old, new = (_OfFormat(one) if isinstance(one, Format) else as_recipe(one) for one in (source, target))
    return decided(old, old.layout, -1, new)


@dataclass(frozen=True)
class _OfFormat(ScalingRecipe):
    """A format alone, of which any scales may be written."""

    of: Format

    @cached_property
    def format(self) -> Format:
        return self.of


def _of_tensor(st: ScaledTensor, recipe: ScalingRecipe) -> Exactness:
    need_one_device(st=st)
    st = st.to_plain()
    if st.ndim < 2 and TENSOR not in (st.recipe.format.block, recipe.format.block):
        st = st.reshape(1, *st.shape)
    ops, shape, axis = ops_of(st.data, "data"), tuple(st.shape), st.axis
    of_formats = decided(st.recipe, st.layout, axis, recipe)
    tiles = Tiles.along(ops, axis, shape, fitted_layout(recipe, shape, axis).block(axis))
    size, blocks = math.prod(shape), 1 if tiles.block == TENSOR else math.prod((*shape[:-2], *tiles.counts))
    if of_formats.exact:
        return replace(of_formats, size=size, changed=0, blocks=blocks, changed_blocks=0)
    written, different = kept(ops, st, recipe, checking=True), None
    if written is None:
        written, different = cast_again(ops, st, recipe, DEFAULT.replace(require_exact=True), SELECTED)
    if different is not None:
        counts = ops.to_int32(different)
        changed, changed_blocks = (total(ops, a) for a in (counts, ops.amax(tiles.split(counts), tiles.axes)))
        return Exactness(INEXACT, of_formats.why, of_formats.bound, size, changed, blocks, changed_blocks)
    same = not ops.any(differ(ops, _numbers(ops, st), _numbers(ops, written)))
    kind, why = (SAME_CODES, "codes stand for the same numbers") if same else (NEW_CODES, "other codes and scales, same values")
    return Exactness(kind, why, 0.0, size, 0, blocks, 0)


def _numbers(ops: Ops, st: ScaledTensor) -> Array:
    """What the codes of a tensor stand for under a scale of one"""
    element = st.recipe.format.element
    return element.decode(ops, unpack(ops, st.data, element, st.shape[st.axis], st.axis))
