"""`breccia.exactness`: every promise is kept by every code under every scale, and what is not promised can fail."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from recipes import declared

import breccia
from breccia import Exactness, Format, Level, ScaledTensor, ScalingRecipe
from breccia.arrays.ops import NUMPY
from breccia.cli.rosetta import every_format, fitted, matrix
from breccia.codecs import E4M3, E4M3FNUZ, E8M0, F32, UE5M3, Codec
from breccia.dispatch.registry import registry
from breccia.errors import InexactError, UnknownNameError, UnsupportedError
from breccia.formats import TENSOR
from breccia.kernels import reference
from breccia.kernels.exactness import INEXACT, KINDS, NEW_CODES, SAME_CODES
from breccia.testing.examples import every_decodable

#: All formats of all recipes, and of blocks that others do not have by default.
RECIPES = [
    *every_format(registry()).values(),
    *map(breccia.recipe, ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "fp8_block,block_k=32", "fp8_block,block_m=128")),
    breccia.recipe("fp8_block,block_k=32,power_of_two_scale=true"),
    breccia.recipe("fp8_block,block_m=128,power_of_two_scale=true"),
    breccia.recipe("fp8_block,block_k=32,fp8_format=E5M2"),
    breccia.recipe("int4,group_size=32,symmetric=false"),
]
PAIRS = [(a, b) for a in RECIPES for b in RECIPES if a is not b]
#: Scales of 32 bits where something may go wrong: zeros, subnormal numbers, the ends of the normal ones, Inf and NaN.
EDGES = (0, 1, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800000, 0x3F7FFFFF, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)
#: Likewise scales of a whole tensor.
GLOBAL = (1.0, 0.0173, 2.0**-126, 2.0**-149, 3e38, -1.0, 0.0, math.inf, math.nan)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, NaN equal to NaN."""
    p, q = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b))
    return bool(np.all((p == q) | (np.isnan(a) & np.isnan(b))))


def with_edges(codec: Codec, stored: np.ndarray) -> np.ndarray:
    """Stored scales, of which the first ones of FP32 are `EDGES`, of both signs."""
    if codec != F32:
        return stored
    stored = stored.copy()
    rows = stored.reshape(len(stored), -1)
    edges = np.array([*EDGES, *(bits | 1 << 31 for bits in EDGES)], np.uint32).view(np.float32)
    rows[: len(edges)] = edges[: len(rows), None]
    return stored


@cache
def adversarial(recipe: ScalingRecipe, scales: int = 300) -> list[ScaledTensor]:
    """Every code under every scale code of 8 bits and edges of wider ones, every zero-point, and edges of global scales."""
    tall = recipe.format.block[0] not in (1, None)  # each scale is of many rows
    st, fmt = every_decodable(recipe, min(40, scales // 7) if tall else scales), recipe.format
    scale, zero = st.scale, st.zero_point
    if fmt.scale_record is None:
        scale = with_edges(fmt.scale.codec, scale)
    if fmt.offset == "zero_point":
        last = (1 << fmt.element.bits) - 1
        points = np.array([0, last, last // 2, last // 2 + 1, 1], np.uint8)
        scale = np.concatenate([scale] * len(points))
        zero = np.repeat(points, len(st.scale)).reshape(-1, *(1,) * (scale.ndim - 1)) + np.zeros(scale.shape, np.uint8)
    elif fmt.offset == "bias" and fmt.offset_record is None:
        zero = with_edges(fmt.scale.codec, np.roll(scale, 7, axis=0))
    times = len(scale) // len(st.scale)
    data = np.concatenate([st.data] * times)
    shape = (st.shape[0] * times, *st.shape[1:])
    if fmt.block[1] is not None:  # neighbouring blocks with different scales
        data = np.concatenate([data] * 3, axis=1)
        scale = np.concatenate([np.roll(scale, n, axis=0) for n in (0, 1, 40)], axis=1)
        zero = zero if zero is None else np.concatenate([np.roll(zero, n, axis=0) for n in (0, 1, 40)], axis=1)
        shape = (shape[0], 3 * shape[1])
    totals = [None] if fmt.global_scale is None else [np.float32(one) for one in GLOBAL]
    return [breccia.from_buffer(data, scale, recipe, recipe.layout, zero, one, shape=shape) for one in totals]


def proved(source: ScalingRecipe, target: ScalingRecipe, found: Exactness, scales: int = 300) -> None:
    for st in adversarial(source, scales):
        kept = breccia.requantize(st, target)
        parts = (kept.data, kept.scale, target, kept.layout, kept.zero_point, kept.global_scale)
        checked = breccia.from_buffer(*parts, shape=kept.shape)
        with np.errstate(all="ignore"):
            assert same(reference.dequantize(st), reference.dequantize(checked))
        if found.kind == SAME_CODES:
            numbers = [
                t.recipe.format.element.decode(
                    NUMPY, reference.unpack(NUMPY, t.data, t.recipe.format.element, st.shape[-1], -1)
                )
                for t in (st, kept)
            ]
            assert same(*numbers)


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("source", RECIPES, ids=lambda r: r.spec)
def test_what_is_promised_holds_for_every_code_under_every_scale(source: ScalingRecipe) -> None:
    for target in {*RECIPES, *(fitted(source, one) for one in RECIPES)}:
        found = breccia.exactness(source, target)
        assert found.kind in KINDS and found.why and (found.bound == 0) == found.exact
        if found.exact:
            proved(source, target, found)


def test_more_than_200_pairs_of_formats_are_promised() -> None:
    kinds = [breccia.exactness(*pair).kind for pair in PAIRS]
    assert kinds.count(SAME_CODES) > 200 and kinds.count(NEW_CODES) > 30
    formats = every_format(registry())
    shown = [one.kind for (a, b), one in matrix(formats).items() if formats[a].format != formats[b].format]
    assert shown.count(SAME_CODES) + shown.count(NEW_CODES) > 200


@pytest.mark.slow
def test_promises_hold_under_every_scale_of_16_bits() -> None:
    for source, target in PAIRS:
        if source.format.scale.codec.bits == 16 and (found := breccia.exactness(source, target)).exact:
            proved(source, target, found, 1 << 16)


@pytest.mark.long
@pytest.mark.parametrize("source", RECIPES, ids=lambda r: r.spec)
def test_what_is_inexact_changes_some_tensor(source: ScalingRecipe) -> None:
    """No pair is called inexact whose conversions are all exact."""
    tensors = adversarial(source, 40)[:1]
    if source.format.rotation is not None:  # equal codes of a block are one number after a rotation
        tensors = [*tensors, breccia.cast(np.random.default_rng(0).standard_normal((8, 384)).astype(np.float32), source)]
    for target in RECIPES:
        if breccia.exactness(source, target).kind == INEXACT and not target.decode_only:
            with pytest.raises(InexactError), np.errstate(all="ignore"):
                for st in tensors:
                    breccia.requantize(st, target, require_exact=True)


def test_fn_becomes_fnuz_where_no_code_is_lost() -> None:
    """-0 has no code in E4M3FNUZ; every other number of E4M3 has one under twice the scale."""
    fn, fnuz = (breccia.Float8RowScaling(fp8_format=name) for name in ("E4M3", "E4M3FNUZ"))
    codes = np.arange(256, dtype=np.uint8)[None]
    scale = np.array([[0.375]], np.float32)
    st = breccia.from_buffer(codes, scale, fn, fn.layout)
    assert breccia.exactness(fn, fnuz).why == "exact if no code is -0"
    assert breccia.exactness(st, fnuz).kind == INEXACT
    kept = breccia.from_buffer(np.delete(codes, 0x80, axis=1), scale, fn, fn.layout)
    assert breccia.exactness(kept, fnuz).kind == NEW_CODES
    moved = breccia.requantize(kept, fnuz, require_exact=True)
    assert moved.recipe.format.element == E4M3FNUZ and same(breccia.dequantize(kept), breccia.dequantize(moved))


@pytest.mark.parametrize(("span", "exact"), [(17, True), (18, False)])
def test_mxfp4_becomes_nvfp4_where_exponents_span_at_most_17(span: int, exact: bool) -> None:
    """Every number of E2M1 in both blocks: the larger scale is at most 2^8 under the global one, the smaller at least 2^-9."""
    mxfp4 = breccia.recipe("mxfp4")
    assert breccia.exactness(mxfp4, "nvfp4").why == "exact if exponents of scales span at most 17 in a tensor"
    codes = reference.pack(NUMPY, np.resize(np.arange(16, dtype=np.int32), (2, 32)), mxfp4.format.element)
    for least in (0, 1, 100, 254 - span):
        st = breccia.from_buffer(codes, np.array([[least], [least + span]], np.uint8), mxfp4, mxfp4.layout)
        found = breccia.exactness(st, "nvfp4")
        assert found.exact is exact and (found.changed == 0) is exact
        if exact:
            assert same(breccia.dequantize(st), breccia.dequantize(breccia.requantize(st, "nvfp4", require_exact=True)))


def test_values_and_blocks_that_change_are_counted() -> None:
    st = breccia.cast(np.array([[1.0, 1.125], [3.0, 0.5]], np.float32), "mxfp8")
    found = breccia.exactness(st, "mxfp4")
    assert (found.kind, found.size, found.changed, found.blocks, found.changed_blocks) == (INEXACT, 4, 1, 2, 1)
    with pytest.raises(InexactError) as caught:
        breccia.requantize(st, "mxfp4", require_exact=True)
    assert caught.value.found["count"] == found.changed
    assert repr(found) == (
        "Exactness(inexact: E2M1 lacks 238 of the 252 numbers of E4M3, whatever the power-of-two scale; 1 of 4 values change, "
        "in 1 of 2 blocks; by at most 1 of a scale)"
    )


@pytest.mark.parametrize("spec", ["mxfp4", "mxfp6", "mxint8", "nvfp4", "int4", "int8", "fp8_block", "fp8_current"])
@pytest.mark.parametrize("source", ["fp8_row", "mxfp8", "int8", "nf4"])
def test_values_move_by_no_more_than_the_bound(source: str, spec: str) -> None:
    """Scales of these rules do not saturate. FP32 rounds the quotient and the product: 4 of its half units allow for both."""
    x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    st = breccia.cast(x, source)
    written, found = breccia.requantize(st, spec), breccia.exactness(st, spec)
    if found.exact:  # under other scales than a cast writes
        assert same(breccia.dequantize(st), breccia.dequantize(breccia.requantize(st, spec, require_exact=True)))
        return
    recipe = written.recipe
    scale = recipe.format.scale.codec.read(NUMPY, written.scale)
    scale = scale * (1 if written.global_scale is None else written.global_scale)
    columns = 256 // (scale.shape[1] if scale.ndim else 1)
    each = np.repeat(scale, columns, axis=1) if scale.ndim else scale
    y, z = breccia.dequantize(st), breccia.dequantize(written)
    assert (np.abs(y - z) <= found.bound * each + 4 * 2.0**-24 * np.abs(y)).all()


def test_formats_and_tensors_of_other_frameworks_are_taken() -> None:
    torch = pytest.importorskip("torch")
    mxfp4, mxfp8 = breccia.recipe("mxfp4"), breccia.recipe("mxfp8")
    assert breccia.exactness(mxfp4.format, mxfp8.format) == breccia.exactness("mxfp4", "mxfp8")
    st = breccia.cast(torch.tensor([[1.0, 1.125, 0.5]]), "mxfp8")
    assert breccia.exactness(st, mxfp4).changed == 1
    assert breccia.exactness(breccia.cast(np.ones((3,), np.float32), "fp8_current"), "fp8_delayed").size == 3


def test_a_declared_format_is_decided_like_one_of_breccia() -> None:
    """From its codecs and levels: no pair is listed anywhere."""
    ue5m3 = declared(E4M3, Level(UE5M3, (1, 16)))
    assert breccia.exactness(ue5m3, "fp8_block,block_k=16").kind == SAME_CODES
    assert (
        breccia.exactness(Format(E4M3, (Level(E8M0, TENSOR),)), "fp8_current").why
        == "exact if scales are normal numbers of F32"
    )


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="mxfp5"):
        breccia.exactness("mxfp5", "mxfp8")
    with pytest.raises(UnsupportedError, match="recipe must be a ScalingRecipe instance, got int"):
        breccia.exactness(4, "mxfp8")  # pyright: ignore[reportArgumentType]
    st = breccia.cast(np.ones((2, 32), np.float32), "mxfp4")
    with pytest.raises(UnsupportedError, match="recipe must be a ScalingRecipe instance, got Format"):
        breccia.exactness(st, breccia.recipe("mxfp8").format)


def test_fnuz_becomes_fn_without_its_largest_number() -> None:
    """240 would be 480, beyond 448; all others are numbers of E4M3 under half the scale."""
    fn, fnuz = (breccia.Float8RowScaling(fp8_format=name) for name in ("E4M3", "E4M3FNUZ"))
    codes, scale = np.arange(256, dtype=np.uint8)[None], np.array([[0.375]], np.float32)
    assert breccia.exactness(breccia.from_buffer(codes, scale, fnuz, fnuz.layout), fn).kind == INEXACT
    st = breccia.from_buffer(np.delete(codes, [0x7F, 0xFF], axis=1), scale, fnuz, fnuz.layout)
    assert breccia.exactness(st, fn).kind == NEW_CODES
    assert same(breccia.dequantize(st), breccia.dequantize(breccia.requantize(st, fn, require_exact=True)))
