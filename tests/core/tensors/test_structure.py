"""Structural ops commute with dequantize in every framework; comparison by value; scales by group index."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recipes
from hypothesis import given, settings
from hypothesis import strategies as some
from in_frameworks import FRAMEWORKS, convert, moved, same_bits, sound, values
from recipes import recipe_id

import breccia
from breccia import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    LayoutError,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerBlockK,
    PerChannel,
    PerGroupIndex,
    PerTensor,
    ScaledTensor,
    ScalingRecipe,
    UnsupportedError,
)
from breccia.arrays.frameworks import ops_of
from breccia.formats import TENSOR
from breccia.tensors.components import components
from breccia.tensors.grids import packing
from breccia.testing.examples import wide

#: Every recipe and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

quick = settings(max_examples=12, deadline=None)
#: One recipe for each arrangement of components; scale rules make no difference here.
RECIPES = list({(recipe.format, recipe.layout): recipe for recipe in reversed(recipes.RECIPES)}.values())


def units(st: ScaledTensor) -> list[int]:
    """The granularity of slices along each axis, from the recipe's declarations."""
    m, k = st.layout.block(st.axis)
    found = [1] * st.ndim
    found[st.axis] = math.lcm(k or 1, packing(st.recipe.format.element)[0])
    if st.ndim > 1:
        found[-3 - st.axis] = m or 1
    return found


@some.composite
def tensors(draw: Any, recipe: ScalingRecipe) -> ScaledTensor:
    lead = draw(some.lists(some.integers(1, 3), max_size=2))
    k = draw(some.sampled_from([1, 8, 15, 64, 77, 256]))
    x = wide((*lead, draw(some.integers(1, 9)), k), seed=draw(some.integers(0, 9)), exponents=3)
    return breccia.cast(x.swapaxes(-1, -2), recipe, axis=-2) if draw(some.booleans()) else breccia.cast(x, recipe)


def stretch(draw: Any, length: int, unit: int) -> slice:
    if unit == 1:
        return draw(some.slices(length))
    start, stop = sorted(draw(some.lists(some.integers(0, -(-length // unit)), min_size=2, max_size=2)))
    return slice(start * unit or draw(some.sampled_from([0, None])), None if stop * unit >= length else stop * unit)


@some.composite
def indexed(draw: Any, recipe: ScalingRecipe) -> tuple[ScaledTensor, tuple[Any, ...]]:
    st = draw(tensors(recipe))
    block, across = st.layout.block(st.axis), st.ndim - 3 - st.axis
    droppable = {across} if block == TENSOR or block[0] == 1 else set[int]()
    index: list[Any] = []
    for axis, (length, unit) in enumerate(zip(st.shape, units(st), strict=True)):
        integer = axis < st.ndim - 2 or axis in droppable
        if integer and draw(some.booleans()):
            index.append(draw(some.integers(-length, length - 1)))
        else:
            index.append(stretch(draw, length, unit))
    named = draw(some.integers(0, len(index)))
    if draw(some.booleans()):
        return st, (*index[:named],)
    return st, (..., *index[named:])


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@quick
@given(data=some.data())
def test_slicing_commutes_with_dequantize(recipe: ScalingRecipe, data: some.DataObject) -> None:
    st, index = data.draw(indexed(recipe))
    assert same_bits(values(sound(st[index])), values(st)[index])
    assert breccia.bytes_equal(st.mT.mT[index], st[index])


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@quick
@given(data=some.data())
def test_select_commutes_with_dequantize(recipe: ScalingRecipe, data: some.DataObject) -> None:
    st = data.draw(tensors(recipe))
    y = values(st)
    for axis in (a for a, unit in enumerate(units(st)) if unit == 1):
        positions = data.draw(some.lists(some.integers(-st.shape[axis], st.shape[axis] - 1), max_size=4))
        assert same_bits(values(sound(st.select(axis, positions))), np.take(y, np.array(positions, int), axis))
        assert same_bits(
            values(st.select(axis - st.ndim, np.array(positions, "i8"))), np.take(y, np.array(positions, int), axis)
        )
        if axis < st.ndim - 2:
            assert same_bits(values(sound(st.select(axis, -1))), np.take(y, -1, axis))


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@quick
@given(data=some.data())
def test_split_commutes_with_dequantize_and_concat_undoes_it(recipe: ScalingRecipe, data: some.DataObject) -> None:
    st = data.draw(tensors(recipe))
    y = values(st)
    for axis, unit in enumerate(units(st)):
        size = unit * data.draw(some.integers(1, 3))
        parts = st.split(size, axis)
        assert [p.shape[axis] for p in parts] == [min(size, st.shape[axis] - n) for n in range(0, st.shape[axis], size)]
        for part, expected in zip(parts, np.split(y, range(size, st.shape[axis], size), axis), strict=True):
            assert same_bits(values(sound(part)), expected)
        assert breccia.bytes_equal(sound(breccia.concat(parts, axis)), st)
        first = min(unit, st.shape[axis])
        lengths = [0, first, st.shape[axis] - first, 0]
        assert breccia.bytes_equal(breccia.concat(st.split(lengths, axis - st.ndim), axis), st)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
@quick
@given(data=some.data())
def test_stack_and_reshape_commute_with_dequantize(recipe: ScalingRecipe, data: some.DataObject) -> None:
    st = data.draw(tensors(recipe))
    other = breccia.cast(values(st) * np.float32(3), recipe, axis=st.axis)
    axis = data.draw(some.integers(0, st.ndim - 2))
    stacked = sound(breccia.stack([st, other, st], axis))
    assert same_bits(values(stacked), np.stack([values(st), values(other), values(st)], axis))
    again = sound(breccia.stack([stacked, stacked], data.draw(some.integers(0, st.ndim - 1))))
    flat = sound(again.reshape(-1, *st.shape[-2:]))
    assert same_bits(values(flat), values(again).reshape(-1, *st.shape[-2:]))
    assert same_bits(values(flat.reshape((1, flat.shape[0], 1, *st.shape[-2:]))), values(flat)[None, :, None])


FEW = [Float8CurrentScaling(), MXFP8BlockScaling(), MXFP6BlockScaling(), NVFP4BlockScaling(), Float8RowScaling(), INT8Scaling()]
FEW += [INT4Scaling(group_size=16, signed=False, symmetric=False), INT4Scaling(group_size=16, scale_dtype="bf16")]

STRUCTURAL: dict[str, Callable[[ScaledTensor], ScaledTensor]] = {
    "an integer": lambda st: st[-1],
    "a step": lambda st: st[::2, 1:5:3],
    "a negative step": lambda st: st[::-1, ::-2],
    "part of K": lambda st: st[..., 32:],
    "nothing": lambda st: st[:, 3:3],
    "a list": lambda st: st.select(0, [2, 0, 0]).select(1, (1, -1)),
    "split and concat": lambda st: breccia.concat(st.split([1, 2])[::-1]),
    "concat along K": lambda st: breccia.concat(st.split(64, -1), -1),
    "stack": lambda st: breccia.stack([st, st[::-1]], 1),
    "reshape": lambda st: breccia.stack([st, st]).reshape(6, *st.shape[-2:]),
    "the transpose": lambda st: breccia.stack([st.mT[:, 32:, 2:][:, ::1], st.mT[:, 32:, 2:]])[1, ::2],
    "to": lambda st: st.to("cpu").to(None),
}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("recipe", FEW, ids=recipe_id)
def test_every_framework_slices_and_concatenates_the_same_bytes(recipe: ScalingRecipe, framework: str) -> None:
    x = wide((3, 6, 77), seed=3, exponents=3)
    expected = breccia.cast(x, recipe)
    st = moved(expected, framework)
    for name, verb in STRUCTURAL.items():
        found = sound(verb(st))
        assert found.framework == framework
        assert found.digest() == verb(expected).digest(), name
        assert breccia.bytes_equal(found, verb(expected)), name


def test_slices_are_views_and_unsliced_components_are_the_same_objects() -> None:
    st = breccia.cast(wide((3, 4, 64)), NVFP4BlockScaling())
    part = st[1:, :, 32:]
    assert part.global_scale is st.global_scale
    assert np.shares_memory(part.data, st.data) and np.shares_memory(part.scale, st.scale)
    assert st[:].data is st.data and st.reshape(3, 4, 64) is st
    rows = breccia.cast(wide((4, 64)), Float8RowScaling())
    assert rows[:, 3:7].scale is rows.scale


def test_iteration_ends_and_gives_the_leading_positions() -> None:
    st = breccia.cast(wide((3, 4, 64)), NVFP4BlockScaling())
    assert [same_bits(values(e), values(st)[i]) for i, e in enumerate(st)] == [True] * 3


def test_an_integer_drops_a_matrix_axis_under_one_scale() -> None:
    st = breccia.cast(wide((3, 4, 64)), Float8CurrentScaling())
    for index in ((..., 2), (0, 1), (0, ..., 1), (slice(None), 2)):
        found = sound(st[index])
        assert found.axis == -1 and same_bits(values(found), values(st)[index])
    columns = breccia.cast(wide((64, 4)), Float8CurrentScaling(), axis=-2)
    assert columns[:, 1].axis == -1 and same_bits(values(columns[:, 1]), values(columns)[:, 1])
    assert st.select(1, 2).shape == (3, 64)


def test_per_tensor_scales_follow_the_leading_axes() -> None:
    singles = [breccia.cast(wide((4, 32), seed=s, exponents=2), Float8CurrentScaling()) for s in range(6)]
    grid = breccia.stack([breccia.stack(singles[:3]), breccia.stack(singles[3:])])
    assert (grid.shape, grid.scale.shape) == ((2, 3, 4, 32), (2, 3))
    assert breccia.bytes_equal(grid[1, 0], singles[3])
    assert grid.reshape(6, 4, 32).scale.shape == (6,)
    rows = sound(grid[0].reshape(1, 3, 4, 32))
    assert rows.scale.shape == (1, 3)
    prefix = breccia.from_buffer(grid.data, grid.scale[:, 0], Float8CurrentScaling(), PerTensor())
    for reshaped in (prefix.reshape(-1, 4, 32), prefix.reshape(3, 2, 4, 32)):
        assert same_bits(values(sound(reshaped)), values(prefix).reshape(reshaped.shape))
    assert sound(breccia.stack([prefix, prefix], 2)).scale.shape == (2, 3, 2)
    both = sound(breccia.concat([prefix, grid], 1))
    assert same_bits(values(both), np.concatenate([values(prefix), values(grid)], 1))


def test_concat_along_a_leading_axis_keeps_the_scale_of_each_tensor() -> None:
    for recipe in (Float8CurrentScaling(), NVFP4BlockScaling()):
        a, b = (breccia.cast(wide((n, 4, 32), seed=n, exponents=2), recipe) for n in (2, 3))
        joined = sound(breccia.concat([a, b]))
        assert same_bits(values(joined), np.concatenate([values(a), values(b)]))
        global_scale = joined.scale if recipe.name == "fp8_current" else joined.global_scale
        assert global_scale.shape == (5,)
        assert breccia.concat([a, a[:1]]).shape == (3, 4, 32) and breccia.concat([a, a[:1]]).scale.shape == (
            () if recipe.name == "fp8_current" else (3, 4, 2)
        )


def test_concat_accepts_equal_scales_in_different_objects() -> None:
    x = wide((4, 32), exponents=2)
    a, b = breccia.cast(x, Float8CurrentScaling()), breccia.cast(-x, Float8CurrentScaling())
    assert a.scale is not b.scale
    joined = sound(breccia.concat([a, b], -1))
    assert joined.scale is a.scale and same_bits(values(joined), np.concatenate([values(a), values(b)], -1))


def test_the_short_form_of_per_channel_scales_is_kept_where_it_can_be() -> None:
    data = np.arange(64, dtype=np.uint8).reshape(2, 4, 8)
    flat = breccia.from_buffer(data, np.array([1, 2, 3, 4], np.float32), Float8BlockScaling(), PerChannel())
    other = breccia.from_buffer(data, np.array([5, 6, 7, 8], np.float32), Float8BlockScaling(), PerChannel())
    for st in (flat, other, flat.mT, other.mT):
        rows = -3 - st.axis
        assert breccia.bytes_equal(breccia.concat(st.split(1)), st) and breccia.bytes_equal(
            breccia.concat(st.split(2, rows), rows), st
        )
        assert st.reshape(2, 1, *st.shape[1:]).scale is st.scale and st[1].scale is st.scale
        cut = (slice(None), slice(1, 3), slice(2, 7))
        assert sound(st[cut]).scale.shape == (2,)
        assert same_bits(values(st[cut]), values(st)[cut])
    for pair in ((flat, other), (flat.mT, other.mT)):
        y = [values(st) for st in pair]
        assert same_bits(values(sound(breccia.concat(pair, 0))), np.concatenate(y, 0))
        assert same_bits(values(sound(breccia.stack(pair, 1))), np.stack(y, 1))
        rows = -3 - pair[0].axis
        assert sound(breccia.concat(pair, rows)).scale.shape == (8,)
        tall = breccia.concat([*pair, breccia.stack([pair[0][0], pair[1][0]])], rows)
        assert same_bits(values(sound(tall))[:2], np.concatenate([*y, np.stack([y[0][0], y[1][0]])], rows))


def test_empty_rows_have_one_scale_each() -> None:
    st = sound(breccia.cast(np.zeros((3, 0), np.float32), Float8RowScaling()))
    assert st.scale.shape == (3, 1) and st.scale.tolist() == [[1.0]] * 3
    assert breccia.bytes_equal(breccia.concat([st, st]), breccia.cast(np.zeros((6, 0), np.float32), Float8RowScaling()))


def test_a_one_dimensional_tensor_can_be_sliced_concatenated_and_reshaped() -> None:
    st = breccia.cast(wide((37,), exponents=2), Float8CurrentScaling())
    assert same_bits(values(st[3:30:4]), values(st)[3:30:4])
    assert breccia.bytes_equal(breccia.concat(st.split(10)), st)
    matrix = sound(st.reshape(1, 37))
    assert breccia.stack([matrix, matrix]).scale.shape == (2,)


@pytest.mark.long
def test_traced_tensors_can_be_sliced_and_concatenated_if_no_value_is_read() -> None:
    jax = pytest.importorskip("jax")
    x = wide((2, 4, 64), exponents=2)

    def halves(x: Any, axis: int) -> Any:
        a, b = (breccia.cast(part, Float8CurrentScaling()) for part in (x[:1], x[1:] * 2))
        return breccia.dequantize(breccia.concat([a, b], axis))

    expected = np.concatenate([values(breccia.cast(p, Float8CurrentScaling())) for p in (x[:1], x[1:] * 2)])
    assert same_bits(np.asarray(jax.jit(halves, static_argnums=1)(x, 0)), expected)
    with pytest.raises(
        breccia.UnsupportedError,
        match=r"scale does not run along axis 1, so tensors\[0\] and .* must share it; this call reads values",
    ):
        jax.jit(halves, static_argnums=1)(x, 1)
    st = breccia.cast(jax.numpy.asarray(x), NVFP4BlockScaling())
    joined = jax.jit(lambda st: breccia.concat([st[:, :2], st[:, 2:]], 1))
    assert breccia.bytes_equal(joined(st), st), "slices of one tensor share its scale"
    same = jax.jit(lambda x: breccia.dequantize(breccia.concat(breccia.cast(x, NVFP4BlockScaling()).split(2, 1)[::-1], 1)))
    assert same(x).shape == (2, 4, 64)


#: Codes of every width, block and per-tensor scales of every dtype, zero-points and biases.
GATHERED = (
    "mxfp8", "nvfp4", "mxfp6", "fp8_block", "fp8_row", "fp8_current", "int8", "nf4", "int4,scale_dtype=bf16",
    "int4,symmetric=false,signed=false", "int4,symmetric=false,signed=false,offset=bias",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("spec", GATHERED)
def test_select_gathers_by_traced_positions_on_jax(spec: str) -> None:
    jax = pytest.importorskip("jax")
    st = breccia.cast(jax.numpy.asarray(wide((4, 32, 64), exponents=2)), spec)
    y = np.asarray(breccia.dequantize(st))
    picked = jax.jit(lambda st, i: breccia.dequantize(st.select(0, i)))
    for positions in (np.array([1, -1, 1]), np.array([3, 0], np.uint8), np.int32(-2), np.zeros(0, np.int32)):
        assert same_bits(np.asarray(picked(st, positions)), np.take(y, positions.astype(int), 0))
    each = jax.vmap(lambda i: breccia.dequantize(st.select(0, i)))(np.array([2, 0]))
    assert same_bits(np.asarray(each), y[[2, 0]])
    out = np.asarray(picked(st, np.array([4, 0, -5])))
    assert np.isnan(out[[0, 2]]).all() and same_bits(out[1], y[0]), "as jnp.take fills"
    if st.layout.block(st.axis)[0] == 1 or st.layout.block(st.axis) == TENSOR:
        rows = jax.jit(lambda st, i: breccia.dequantize(st.select(1, i)))(st, np.array([5, 0, 5]))
        assert same_bits(np.asarray(rows), y[:, [5, 0, 5]])


@pytest.mark.long
@pytest.mark.parametrize("spec", GATHERED)
def test_select_gathers_by_positions_of_compiled_functions_on_torch_and_mlx(spec: str) -> None:
    torch, mx = pytest.importorskip("torch"), pytest.importorskip("mlx.core")
    x = wide((4, 32, 64), exponents=2)
    st = breccia.cast(torch.tensor(x), spec)
    y = breccia.dequantize(st).numpy()
    each = torch.vmap(lambda i: breccia.dequantize(st.select(0, i)))(torch.tensor([3, -3]))
    assert same_bits(each.numpy(), y[[3, 1]])
    other = breccia.cast(mx.array(x), spec)
    picked = mx.compile(lambda i: breccia.dequantize(other.select(0, i)))(mx.array([3, -3]))
    assert same_bits(np.array(picked), np.array(breccia.dequantize(other))[[3, 1]])


@pytest.mark.long
def test_torch_exports_a_selection_by_any_number_of_positions() -> None:
    torch = pytest.importorskip("torch")
    st = breccia.cast(torch.tensor(wide((4, 32, 64), exponents=2)), "nvfp4")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in components(st).items():
                self.register_buffer(name, part)

        def forward(self, i: Any) -> Any:
            held = breccia.ScaledTensor(self.data, self.scale, st.recipe, st.layout, None, self.global_scale)
            return breccia.dequantize(held.select(0, i))

    shapes = ({0: torch.export.Dim("n", min=2)},)
    exported = torch.export.export(Experts(), (torch.tensor([1, 2]),), strict=False, dynamic_shapes=shapes).module()
    assert same_bits(exported(torch.tensor([3, -1, 0])).numpy(), breccia.dequantize(st).numpy()[[3, 3, 0]])
    with pytest.raises(IndexError, match="index out of range"):
        exported(torch.tensor([4, 0]))


@pytest.mark.long
def test_traced_positions_that_cannot_be_gathered_by_are_refused() -> None:
    jax = pytest.importorskip("jax")
    st = breccia.cast(jax.numpy.asarray(X), NVFP4BlockScaling())
    for axis, positions, error, message in (
        (2, np.array([0]), LayoutError, "Single positions of it cannot be picked; slice it at multiples of 16"),
        (0, np.zeros((1, 1), int), UnsupportedError, r"got an array of shape \(1, 1\) and dtype int32. Positions of a mask"),
        (0, np.array([True]), UnsupportedError, r"got an array of shape \(1,\) and dtype bool. Positions of a mask"),
    ):
        with pytest.raises(error, match=message):
            jax.jit(lambda i, axis=axis: st.select(axis, i).data)(positions)
    x = jax.numpy.ones((2, 4), jax.numpy.uint8)
    grouped = breccia.from_buffer(x, jax.numpy.ones((2, 2)), "int8,group_size=2", PerGroupIndex((0, 1, 0, 1), 2))
    with pytest.raises(UnsupportedError, match="this layout has one entry for each position, so positions must be numbers"):
        jax.jit(lambda i: grouped.select(1, i).data)(np.array([0]))


# ------------------------------------------------------------------------------------------------ refusals

X = wide((3, 4, 64), exponents=2)
ST = breccia.cast(X, NVFP4BlockScaling())
FP8 = breccia.cast(X, Float8CurrentScaling())


def torch_st() -> ScaledTensor:
    return breccia.cast(convert("torch", X), MXFP8BlockScaling())


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ST[3], IndexError, "index 3 is out of range for axis 0 of length 3"),
        (lambda: ST[0, 0, 0, 0], IndexError, r"too many indices: 4 for a tensor of 3 axes"),
        (lambda: ST[None], TypeError,
            r"got None for axis 0. For a list .* st.select\(axis, positions\); for a new axis, st.resh"),
        (lambda: ST[[0, 1]], TypeError, r"integers, slices and an Ellipsis; got list"),
        (lambda: ST[np.ones(3, bool)], TypeError, "got ndarray for axis 0"),
        (lambda: ST[np.array([1])], TypeError, "got ndarray for axis 0"),
        (lambda: ST[True], TypeError, "got bool for axis 0"),
        (lambda: ST[..., ...], TypeError, "one Ellipsis at most; got 2"),
        (lambda: ST[:1.5], TypeError, r"a slice has integers, or nothing, .* got slice\(None, 1.5, None\)"),
        (lambda: ST[::0], ValueError, "a slice's step is not zero"),
        (lambda: breccia.cast(X, Float8BlockScaling(block_m=2))[0, 1], LayoutError,
            r"axis -2 of shape \(3, 4, 64\) cannot be dropped: .*E4M3 codes need it. Keep it: st\[..., i:i\+2, :\], i a"),
        (lambda: ST[..., 1], LayoutError,
            r"axis -1 .* E2M1 codes need it. Keep it: st\[..., i:i\+16\], i a multiple of 16; or dequant"),
        (lambda: FP8[0, 0, 0], LayoutError, r"axis -2 of .* cannot be dropped.*Keep it: st\[..., i:i\+1, :\]; or dequantize"),
        (lambda: breccia.stack([FP8, FP8])[:, :, 0, 0], LayoutError, "axis -2 of .* cannot be dropped"),
        (lambda: ST[..., 8:], LayoutError, r"axis 2 \(length 64\) .* units of 16 .* multiples of 16 or at the end; got 8:64"),
        (lambda: ST[..., ::2], LayoutError, "A slice of it has step 1 .* got 0:64:2"),
        (lambda: breccia.cast(X, INT8Scaling(group_size=3))[..., 1:], LayoutError, "multiples of 3 "),
        (lambda: breccia.cast(X, INT4Scaling(group_size=3))[..., 3:], LayoutError, "multiples of 6 "),
        (lambda: breccia.cast(X, Float8BlockScaling(block_m=2))[:, 1:], LayoutError, "axis 1 .* multiples of 2 "),
        (lambda: ST.select(2, [0]), LayoutError, "Single positions of it cannot be picked; slice it at multiples of 16"),
        (lambda: ST.select(0, [0, -4]), IndexError, "index -4 is out of range for axis 0 of length 3"),
        (lambda: ST.select(0, np.array([[0]])), TypeError, r"select takes an integer, or .* shape \(1, 1\) and dtype int64"),
        (lambda: ST.select(0, np.array([True])), TypeError, r"dtype bool. Positions of a mask are its nonzero\(\)"),
        (lambda: ST.select(0, [0.0]), TypeError, "got float for axis 0"),
        (lambda: ST.select(3, 0), ValueError, r"axis must lie in -3..2 for a tensor of 3 axes; got 3"),
        (lambda: ST.split(0), ValueError, "split takes a length >= 1, or a list of lengths that add up to 3; got 0"),
        (lambda: ST.split([1, 1]), ValueError, r"split lengths are >= 0 and add up to 3, the length of axis 0; got \[1, 1\]"),
        (lambda: ST.split(24, -1), LayoutError, "multiples of 16 or at the end; got 0:24"),
        (lambda: ST.reshape(3, 8, 32), ValueError, r"\(3, 8, 32\) must end in 4, 64 and hold the 3 matrices"),
        (lambda: ST.reshape(2, -1, 4, 64), ValueError, "hold the 3 matrices"),
        (lambda: ST.reshape(-1, -1, 4, 64), ValueError, "with one -1 at most"),
        (lambda: ST.reshape(3, -1, 64), ValueError, "must end in 4, 64"),
        (lambda: ST.to("cuda"), ValueError, "NumPy arrays are on the 'cpu'; got device 'cuda'"),
        (lambda: torch_st().to("nowhere"), ValueError, "torch cannot use device 'nowhere'"),
        (lambda: torch_st().to(torch_st().data.dtype), ValueError,
            "moves a tensor to a device; torch.float8_e4m3fn is a dtype"),
        (lambda: breccia.cast(convert("jax", X), BLOCK).to("nowhere"), ValueError, "JAX cannot use device 'nowhere'"),
        (lambda: breccia.cast(convert("mlx", X), BLOCK).to("gpu"), ValueError, "memory that all devices share.*got 'gpu'"),
        (lambda: breccia.concat([]), ValueError, "concat needs at least one tensor; got none"),
        (lambda: breccia.concat([ST, X]), TypeError, r"concat takes ScaledTensors; tensors\[1\] is ndarray; cast it"),  # type: ignore[list-item]
        (lambda: breccia.concat([breccia.cast(X, MXFP8BlockScaling()), torch_st()]), TypeError,
            r"\[0\] is a numpy array and tens"),
        (lambda: breccia.concat([ST, FP8]), TypeError,
            r"tensors\[0\] has recipe NVFP4.*tensors\[1\] Float8Cur.*requantize one"),
        (lambda: breccia.concat([ST, ST[0]]), ValueError, r"tensors\[1\] \(4, 64\); reshape one to as many axes"),
        (lambda: breccia.concat([FP8, FP8.mT]), LayoutError,
            r"along axis -1 in tensors\[0\] and along -2 in tensors\[1\]; transpose"),
        (lambda: breccia.concat([ST, ST[:, :2]]), ValueError,
            r"all lengths must agree except along axis 0; .*tensors\[1\] \(3, 2, 64\)"),
        (lambda: breccia.concat([ST[..., :60], ST], -1), LayoutError, "units of 16"),
        (lambda: breccia.concat([breccia.cast(X, Float8BlockScaling(block_k=48))] * 2, -1), LayoutError,
            "along axis 2 all tensors but the last must end at a multiple of 48 .* one has length 64. Put it last"),
        (lambda: breccia.concat([FP8, breccia.cast(X * 2, Float8CurrentScaling())], 1), LayoutError,
            r"concat: scale does not run along axis 1, and tensors\[1\] differs from .*\. stack keeps each one's scale; or"),
        (lambda: breccia.concat([breccia.cast(X, Float8RowScaling()), breccia.cast(X * 2, Float8RowScaling())], 2),
            LayoutError, "concat: scale does not run along axis 2"),
        (lambda: breccia.concat([torch_st(), raw(torch_st())]), TypeError,
            r"data is float8_e4m3fn in .* and uint8 in tensors\[1\]"),
        (lambda: breccia.concat([rows(PerBlockK(8)), rows(PerChannel())]), LayoutError,
            r"has layout PerBlockK.*\[1\] PerChannel"),
        (lambda: breccia.stack([ST, ST[:2]]), ValueError,
            r"tensors have one shape; tensors\[0\] has \(3, 4, 64\), tensors\[1\]"),
        (lambda: breccia.stack([ST], 2), ValueError, "the new axis leads the last two, so axis is 0..1; got 2"),
        (lambda: breccia.stack([FP8[0, 0]]), ValueError,
            r"tensors of at least two axes; these have shape \(64,\). .*reshape\(1, 64"),
        (lambda: breccia.bytes_equal(ST, X), TypeError, "bytes_equal compares ScaledTensors; b is ndarray"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_impossible_slice_or_concat_raises_with_a_reason_and_a_remedy(
    call: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, breccia.BrecciaError)


BLOCK = MXFP8BlockScaling()


def raw(st: ScaledTensor) -> ScaledTensor:
    """The torch tensor `st` with its codes as uint8."""
    import torch

    return ScaledTensor(st.data.view(torch.uint8), st.scale, st.recipe, st.layout)


def rows(layout: breccia.Layout) -> ScaledTensor:
    return ScaledTensor(np.zeros((4, 8), np.uint8), np.ones((4, 1), np.float32), Float8BlockScaling(block_k=8), layout)


def test_a_layout_whose_scales_do_not_follow_blocks_cannot_be_sliced() -> None:
    st = ScaledTensor.from_parts(ST.data, ST.scale[:, :, :2], ST.recipe, ST.layout, global_scale=ST.global_scale)
    with pytest.raises(LayoutError, match=r"one scale for each block, in the order of blocks; .* stores shape \(3, 4, 2\)"):
        st[0]


# ------------------------------------------------------------------------------------------------ comparing by value


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_digests_are_equal_in_every_framework_exactly_if_bytes_are_equal(recipe: ScalingRecipe) -> None:
    x = wide((6, 77), seed=4, exponents=3)
    expected = breccia.cast(x, recipe)
    for framework in FRAMEWORKS[1:]:
        st = moved(expected, framework)
        assert st.digest() == expected.digest() == st.mT.mT.digest() and breccia.bytes_equal(st, expected)
        assert st.mT.digest() == expected.mT.digest() and not breccia.bytes_equal(st, expected.mT)
    strided = ScaledTensor.from_parts(
        np.repeat(expected.data, 2, 0)[::2],
        *(expected.scale, recipe, expected.layout, expected.zero_point, expected.global_scale, -1, expected.padding),
    )
    assert strided.digest() == expected.digest() and breccia.bytes_equal(strided, expected)


def test_a_digest_hashes_what_its_docstring_says() -> None:
    st = breccia.cast(wide((3, 17)), NVFP4BlockScaling())
    facts = {
        "axis": -1,
        "layout": {"fields": {"block_size": 16, "partial": True}, "name": "per_block_k"},
        "parts": {"data": ["uint8", [3, 9]], "global_scale": ["float32", []], "scale": ["uint8", [3, 2]]},
        "recipe": st.recipe.to_dict(),
        "shape": [3, 17],
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    stored = st.data.tobytes() + st.scale.tobytes() + st.global_scale.tobytes()
    assert st.digest() == hashlib.sha256(text + stored).hexdigest()


def test_tensors_that_differ_in_metadata_or_one_bit_are_not_equal() -> None:
    st = breccia.cast(wide((4, 32), exponents=2), INT4Scaling(group_size=16, signed=False, symmetric=False))
    parts = (st.data, st.scale, st.recipe, st.layout, st.zero_point)
    flipped = st.data.copy()
    flipped[-1, -1] ^= 1
    negative_zero = np.where(st.scale == st.scale[0, 0], -st.scale, st.scale)
    others = [
        ScaledTensor.from_parts(flipped, *parts[1:]),
        ScaledTensor.from_parts(st.data, negative_zero, *parts[2:]),
        ScaledTensor.from_parts(st.data, st.scale.astype("f4"), *parts[2:]),
        ScaledTensor.from_parts(st.data, st.scale, INT4Scaling(group_size=16, signed=False), *parts[3:]),
        ScaledTensor.from_parts(*parts[:3], PerBlockK(16, partial=True), st.zero_point),
        ScaledTensor.from_parts(*parts[:4], st.zero_point.view("i1")),
        ScaledTensor.from_parts(*parts, padding=1),
        st.mT,
        st[:3],
    ]
    assert len({st.digest(), *(other.digest() for other in others)}) == len(others) + 1
    assert not any(breccia.bytes_equal(st, other) for other in others)
    swapped = ScaledTensor.from_parts(st.data, st.scale.astype(">f2"), *parts[2:])
    assert breccia.bytes_equal(st, swapped) and st.digest() == swapped.digest()


def test_numpy_arrays_of_ml_dtypes_are_the_same_bytes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    st = breccia.cast(wide((4, 32)), INT8Scaling(group_size=16, scale_dtype="bf16"))
    other = ScaledTensor(st.data, st.scale.view(ml_dtypes.bfloat16), st.recipe, st.layout)
    assert breccia.bytes_equal(st, other) and st.digest() == other.digest()
    fp8 = breccia.cast(wide((4, 32)), BLOCK)
    other = ScaledTensor(fp8.data.view(ml_dtypes.float8_e4m3fn), fp8.scale.view(ml_dtypes.float8_e8m0fnu), BLOCK, fp8.layout)
    assert breccia.bytes_equal(fp8, other) and fp8.digest() == other.digest()


# ------------------------------------------------------------------------------------------------ scales by group index

GPTQ = INT4Scaling(group_size=4, signed=False, symmetric=False)
INDEX = (2, 0, 1, 1, 0, 2, 2, 0, 1, 0, 2, 1)


def grouped(framework: str = "numpy", axis: int = -1) -> tuple[ScaledTensor, np.ndarray]:
    """A tensor of shape (2, 5, 12) with scales by INDEX, or its transpose; and its values by the definition."""
    rng = np.random.default_rng(5)
    codes, zeros = rng.integers(0, 16, (2, 5, 12)), rng.integers(0, 16, (2, 5, 3))
    scale = rng.uniform(0.1, 2, (2, 5, 3)).astype(np.float16)
    expected = ((codes - zeros[..., INDEX]).astype(np.float32) * scale[..., INDEX].astype(np.float32)).astype(np.float32)
    packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    parts = [packed, scale, zeros.astype(np.uint8)]
    if axis == -2:
        parts, expected = [np.ascontiguousarray(p.swapaxes(-1, -2)) for p in parts], expected.swapaxes(-1, -2)
    data, scales, zero_point = (convert(framework, p) for p in parts)
    return ScaledTensor(data, scales, GPTQ, PerGroupIndex(INDEX, 3), zero_point, axis=axis), expected


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scales_by_group_index_decode_and_multiply(framework: str, axis: int) -> None:
    st, expected = grouped(framework, axis)
    assert same_bits(values(st), np.ascontiguousarray(expected))
    assert same_bits(np.ascontiguousarray(values(st.mT)), np.ascontiguousarray(expected.swapaxes(-1, -2)))
    assert st.mT.layout == st.layout
    x = convert(framework, wide((3, st.shape[-2]), exponents=1))
    product = breccia.matmul(x, st)
    assert same_bits(ops_of(product).to_numpy(product), ops_of(product).to_numpy(breccia.matmul(x, breccia.dequantize(st))))
    assert breccia.requantize(st, GPTQ) is st
    assert breccia.requantize(grouped(axis=axis)[0], INT4Scaling(group_size=6)).layout == PerBlockK(6)


@pytest.mark.parametrize("axis", [-1, -2])
def test_structural_ops_slice_the_group_index_with_the_codes(axis: int) -> None:
    st, y = grouped(axis=axis)
    k = slice(4, 10)
    cuts = [(1,), (slice(None), slice(2, 4)), (..., k) if axis == -1 else (..., k, slice(None)), (slice(None), slice(0, 0))]
    for cut in cuts:
        assert same_bits(np.ascontiguousarray(values(sound(st[cut]))), np.ascontiguousarray(y[cut]))
        for framework in FRAMEWORKS:
            assert breccia.bytes_equal(moved(st, framework)[cut], st[cut])
    along_k = st[cuts[2]]
    assert along_k.layout == PerGroupIndex(INDEX[4:10], 3) and along_k.scale is st.scale
    for a in (0, 1, 2):
        assert breccia.bytes_equal(breccia.concat(st.split(2, a), a), st)
    assert same_bits(np.ascontiguousarray(values(breccia.stack([st, st], 1))), np.stack([y, y], 1))


def test_8_bit_codes_can_be_indexed_singly_with_their_groups() -> None:
    recipe = INT8Scaling(group_size=4)
    st = ScaledTensor(np.arange(8, dtype=np.int8)[None], np.ones((1, 2), "f4"), recipe, PerGroupIndex([0, 1] * 4, 2))
    assert st.select(1, [3, 0]).layout == PerGroupIndex((1, 0), 2)
    assert st[:, ::3].layout == PerGroupIndex((0, 1, 0), 2)


@pytest.mark.together
def test_a_group_index_round_trips_through_json_and_files(tmp_path: Path) -> None:
    layout = PerGroupIndex(np.array([1, 0, 1]), 2)  # type: ignore[arg-type]
    assert layout == PerGroupIndex([1, 0, 1], 2) and layout.index == (1, 0, 1)  # type: ignore[arg-type]
    assert layout.to_json() == '{"fields":{"groups":2,"index":[1,0,1]},"name":"per_group_index"}'
    assert breccia.Layout.from_json(layout.to_json()) == layout
    assert repr(PerGroupIndex(INDEX, 3)) == "PerGroupIndex(index=(2, 0, 1, 1, 0, 2, 2, 0, ...) of 12, groups=3)"
    st, _ = grouped()
    breccia.bridges.save_safetensors({"w": st, "wT": st.mT}, tmp_path / "w.safetensors")
    for framework in FRAMEWORKS:
        if framework != "numpy":
            convert(framework, X)
        loaded = breccia.bridges.load_safetensors(tmp_path / "w.safetensors", framework=framework)
        assert breccia.bytes_equal(loaded["w"], st) and breccia.bytes_equal(loaded["wT"], st.mT)


def test_writing_into_a_tensor_with_a_group_index_is_refused() -> None:
    st, y = grouped()
    with pytest.raises(LayoutError, match="out= is .*PerGroupIndex.*but the cast returns .*PerBlockK"):
        breccia.cast(y, GPTQ, out=st)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerGroupIndex((0, 2), 2), r"index\[1\]=2 must lie in 0..1 \(groups=2\)"),
        (lambda: PerGroupIndex((0, -1), 2), r"index\[1\]=-1 must lie in 0..1"),
        (lambda: PerGroupIndex((0,), 0), "groups must be > 0, got 0"),
        (lambda: PerGroupIndex((0.0,), 1), r"index must be a sequence of integers, got \(0.0,\)"),  # type: ignore[arg-type]
        (lambda: PerGroupIndex(3, 4), "index must be a sequence of integers, got 3"),  # type: ignore[arg-type]
        (lambda: PerGroupIndex((0, 1), 2).validate(np.zeros((4, 3)), np.zeros((4, 2))),
            "whose length is 3 .* it has 2 entries"),
        (lambda: PerGroupIndex((0, 1), 2).validate(np.zeros((4, 2)), np.zeros((4, 1))),
            r"scale.shape must be \(4, 2\), got \(4, 1"),
        (lambda: ScaledTensor(np.zeros((4, 2), np.int8), np.ones((4, 2), "f4"), INT8Scaling(), PerGroupIndex((0, 1), 2)),
            r"recipe 'int8' scales blocks of \(1, None\).*PerGroupIndex"),
        (lambda: breccia.concat([grouped()[0], ScaledTensor.from_parts(*regrouped(2))], 2),
            r"has layout PerGroupIndex.*groups=3\), tensors\[1\] PerGroupIndex.*groups=2"),
        (lambda: breccia.concat([grouped()[0], ScaledTensor.from_parts(*regrouped(3))], 2), "scale does not run along axis 2"),
        (lambda: breccia.stack([grouped()[0], ScaledTensor.from_parts(*regrouped(3))]),
            "stack: tensors.0. has layout PerGroupInd"),
    ],
)  # fmt: skip
def test_a_group_index_that_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert isinstance(caught.value, breccia.BrecciaError)


def regrouped(groups: int) -> tuple[Any, ...]:
    """Components of `grouped`'s tensor with other scales and another index."""
    st, _ = grouped()
    layout = PerGroupIndex([k % groups for k in range(12)], groups)
    return st.data, 2 * st.scale[..., :groups], st.recipe, layout, st.zero_point[..., :groups]


def test_a_tensor_has_a_length_and_iterates_over_its_first_axis() -> None:
    st = breccia.cast(wide((3, 4, 32), seed=1), breccia.MXFP8BlockScaling())
    assert len(st) == 3
    assert [breccia.bytes_equal(one, st[n]) for n, one in enumerate(st)] == [True] * 3
    with pytest.raises(TypeError):
        _ = 0 in st


def test_a_single_tensor_is_refused_as_a_list_and_a_dtype_as_a_device() -> None:
    st = breccia.cast(wide((3, 4, 32), seed=1), breccia.MXFP8BlockScaling())
    for verb in (breccia.concat, breccia.stack):
        with pytest.raises(breccia.UnsupportedError, match=r"a list of ScaledTensors, got one ScaledTensor: \w+\(\[a, b\]\)"):
            verb(st)  # type: ignore[arg-type]
        with pytest.raises(breccia.UnsupportedError, match="got one int"):
            verb(5)  # type: ignore[arg-type]
    with pytest.raises(breccia.OptionError, match=r"to\(\) moves a tensor to a device; .*float16.* is a dtype.*out_dtype="):
        st.to(np.dtype("float16"))
