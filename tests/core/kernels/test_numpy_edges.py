"""Edge cases of the NumPy kernels: blocks of any shape, `out=` that overlaps the input, and declined calls."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from recipes import declared, recipe_id

import breccia
from breccia import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.arrays.ops import NUMPY
from breccia.codecs import E2M1, E4M3, E8M0, F32, INT8, Codec, Integer, Lookup, Minifloat
from breccia.dispatch import calls
from breccia.errors import NonFiniteError, RecipeError
from breccia.formats import TENSOR, Block, Level
from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.kernels.numpy.workspace import Buffers
from breccia.layouts import Layout, Shape
from breccia.options import CastOptions, product_options
from breccia.rules import DIVIDE, LINEAR, RECIP, Rule
from breccia.tensors.components import PARTS
from breccia.testing.examples import wide


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 8, 16, 32, 48, 64])
def test_blocks_of_any_shape_match_the_generic_algorithm(m: int, k: int, axis: int) -> None:
    recipe = Float8BlockScaling(block_m=m, block_k=k)
    for shape in ((12, 192), (9, 100), (2, 5, 64)):
        x = wide(shape, seed=m * k, exponents=4)
        found, expected = kernels.cast(x, recipe, CastOptions(axis=axis)), reference.cast(x, recipe, CastOptions(axis=axis))
        assert found.layout == expected.layout
        np.testing.assert_array_equal(found.data, expected.data)
        np.testing.assert_array_equal(found.scale.view(np.uint32), expected.scale.view(np.uint32))
        values, wanted = kernels.dequantize(expected), reference.dequantize(expected)
        np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("shape", [(3, 1, 5), (3, 1, 16), (4, 3, 5), (4, 3, 20), (5, 1)])
def test_tiles_of_a_codec_without_a_fast_form_do_not_join_rows_of_several_matrices(shape: Shape, m: int) -> None:
    powers = Minifloat("no mantissa", 4, None, "this test", 3, 0, 3, 16.0)
    recipe = declared(powers, Level(F32, (m, 8)))
    x = wide(shape, seed=3, exponents=4)
    given: Any
    for given in (None, np.full(reference.cast(x, recipe).scale.shape, 0.25, np.float32)):
        options = CastOptions(scale=given)
        assert breccia.bytes_equal(kernels.cast(x, recipe, options), reference.cast(x, recipe, options))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()], ids=lambda r: r.name)
def test_out_is_written_directly_without_a_copy(recipe: ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (wide((8, 128), seed=seed, exponents=2) for seed in (1, 2))
    out = kernels.cast(x, recipe)
    expected = reference.cast(y, recipe)

    def copied(*_: Any) -> Any:
        raise AssertionError("a second result was made")

    monkeypatch.setattr(reference, "assign", copied)
    assert kernels.cast(y, recipe, CastOptions(out=out)) is out
    assert breccia.bytes_equal(out, expected)


def test_out_that_overlaps_the_input_is_written_after_the_input_is_read() -> None:
    """4 bytes of input make 1 of data, in the last quarter of the same memory."""
    recipe = Float8CurrentScaling()
    memory = wide((64, 128), seed=5, exponents=2)
    expected = reference.cast(memory.copy(), recipe)
    data = memory.reshape(-1).view(np.uint8)[3 * memory.size :].reshape(memory.shape)
    out = ScaledTensor(data, np.zeros((), np.float32), recipe, recipe.layout)
    assert kernels.cast(memory, recipe, CastOptions(out=out)) is out
    assert breccia.bytes_equal(out, expected)


def test_out_that_overlaps_the_codes_is_written_after_the_codes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the first chunk overlap the codes of the next ones."""
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", 256)
    recipe = MXFP8BlockScaling()
    st = reference.cast(wide((64, 128), seed=9, exponents=2), recipe)
    expected = reference.dequantize(st)
    memory = np.zeros((64, 128), np.float32)
    data = memory.reshape(-1).view(np.uint8)[: memory.size].reshape(memory.shape)
    data[...] = st.data
    held = ScaledTensor(data, st.scale, recipe, st.layout)
    assert kernels.dequantize(held, product_options("float32", out=memory)) is memory
    np.testing.assert_array_equal(memory.view(np.uint32), expected.view(np.uint32))


def recipe_of(*rules: Rule) -> ScalingRecipe:
    @dataclass(frozen=True)
    class Odd(NVFP4BlockScaling):
        pass

    Odd.rules = rules  # type: ignore[assignment,misc]
    return Odd()


def test_a_global_rule_of_another_kind_is_declined_with_the_reason() -> None:
    x = wide((4, 64), seed=6, exponents=2)
    for recipe, reason in (
        (NVFP4BlockScaling(), None),
        (recipe_of(RECIP, LINEAR), "'nvfp4' as declared has no fast form here"),
    ):
        found = breccia.explain("cast", x, recipe, prefer="numpy.cast")
        assert next(v.reason for v in found.verdicts if v.kernel.name == "numpy.cast") == reason


@pytest.mark.parametrize("rules", [(RECIP, LINEAR), (LINEAR, DIVIDE), (LINEAR, RECIP)], ids=str)
def test_each_level_uses_its_declared_rule(rules: tuple[Rule, Rule]) -> None:
    recipe = recipe_of(*rules)
    for x in (wide((4, 64), seed=6, exponents=2), wide((64, 512), seed=7, exponents=2)):
        found, expected = kernels.cast(x, recipe), reference.cast(x, recipe)
        for part in ("data", "scale", "global_scale"):
            assert getattr(found, part).tobytes() == getattr(expected, part).tobytes(), part


@pytest.mark.parametrize(
    "recipe",
    [INT8Scaling(signed=False, symmetric=False, offset="bias"), INT8Scaling(signed=False, symmetric=False), Float8RowScaling()],
    ids=recipe_id,
)
def test_blocks_larger_than_a_chunk_decode_to_the_same_values(recipe: ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", 256)
    for axis in (-1, -2):
        st = reference.cast(wide((600, 600), seed=8, exponents=2), recipe, CastOptions(axis=axis))
        values, wanted = kernels.dequantize(st), reference.dequantize(st)
        np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))


def test_rule_divide_divides_under_two_levels() -> None:
    """Numbers next to midpoints of codes times the scale, where multiplying by the reciprocal rounds differently."""
    recipe = recipe_of(LINEAR, DIVIDE)
    x = wide((64, 256), seed=10, exponents=2)
    first = reference.cast(x, recipe)
    e = np.repeat(first.scale.view(np.uint8).astype(np.int32), 16, axis=1)
    e = E4M3.decode(NUMPY, e) * first.global_scale
    largest = np.abs(x).reshape(64, -1, 16).max(-1).repeat(16, axis=1) == np.abs(x)
    middles = np.random.default_rng(0).choice(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32), x.shape)
    beside = (middles * e).view(np.int32) + np.random.default_rng(1).integers(-1, 2, x.shape, dtype=np.int32)
    ties = np.where(largest, x, beside.view(np.float32))
    expected = reference.cast(ties, recipe)
    assert expected.data.tobytes() != reference.cast(ties, NVFP4BlockScaling()).data.tobytes()
    assert kernels.cast(ties, recipe).data.tobytes() == expected.data.tobytes()


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_nonfinite_raise_refuses_a_single_nonfinite_element(cast: Any, fault: float) -> None:
    x = wide((8, 64), seed=11, exponents=2)
    assert cast(x, MXFP8BlockScaling(), CastOptions(nonfinite="raise")).shape == x.shape
    x[5, 33] = fault
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling(), NVFP4BlockScaling()):
        with pytest.raises(NonFiniteError, match="x holds NaN or Inf"):
            cast(x, recipe, CastOptions(nonfinite="raise"))


# ------------------------------------------------------------------------------------------------ what a plug-in may declare


def assert_same_bytes(found: ScaledTensor, expected: ScaledTensor) -> None:
    for part in PARTS:
        a, b = getattr(found, part), getattr(expected, part)
        assert (a is None) == (b is None), part
        assert a is None or (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), part


def assert_read_alike(st: ScaledTensor) -> None:
    values, wanted = kernels.dequantize(st), reference.dequantize(st)
    np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))


def test_5_bit_and_7_bit_codes_match_the_generic_algorithm() -> None:
    """Eight codes fill as many bytes as each has bits; the NumPy kernels have no special case for that."""
    for bits in (5, 7):
        for element in (
            Integer("odd", bits, None, "this test", True),
            Minifloat("odd", bits, None, "this test", bits - 3, 2, 1, 1.75 * 2.0 ** (2 ** (bits - 3) - 2)),
        ):
            for block in ((1, 16), TENSOR):
                recipe = declared(element, Level(F32, block))
                for shape in ((3, 40), (70, 96)):
                    expected = reference.cast(wide(shape, seed=bits, exponents=2), recipe)
                    assert_same_bytes(kernels.cast(wide(shape, seed=bits, exponents=2), recipe), expected)
                    assert_read_alike(expected)


def test_an_8_bit_lookup_codec_under_one_scale_is_left_to_the_generic_algorithm() -> None:
    table = Lookup("table", 8, None, "this test", tuple((code - 100) / 16 for code in range(256)))
    recipe = declared(table, Level(F32, TENSOR))
    x = wide((6, 40), seed=20, exponents=2)
    assert_same_bytes(kernels.cast(x, recipe), reference.cast(x, recipe))
    found = breccia.explain("cast", x, recipe, prefer="numpy.cast")
    assert "no fast form" in str(next(v.reason for v in found.verdicts if v.kernel.name == "numpy.cast"))


def test_a_rule_for_float_scales_refuses_power_of_two_codecs() -> None:
    recipe = declared(E4M3, Level(E8M0, (1, 16)))
    for cast in (reference.cast, kernels.cast):
        with pytest.raises(RecipeError, match="rule 'linear' writes float scales; E8M0 has powers of two only"):
            cast(np.ones((2, 32), np.float32), recipe)


@dataclass(frozen=True)
class Strips(Layout):
    """One scale per 16 elements along the contraction axis, for all rows of a matrix."""

    name: ClassVar[str] = "strips"
    partial: ClassVar[bool] = False  # type: ignore[misc]

    def block(self, axis: int = -1) -> Block:
        return (None, 16)

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        return ((*shape[:-2], 1, shape[-1] // 16),)


def test_blocks_that_span_all_rows_stay_within_each_matrix() -> None:
    recipe = declared(E4M3, Level(F32, (None, 16)), within=Strips())
    for shape in ((5, 64), (3, 8, 64), (3, 300, 64)):
        x = wide(shape, seed=21, exponents=4)
        expected = reference.cast(x, recipe)
        assert expected.scale.shape == (*shape[:-2], 1, 4)
        assert_same_bytes(kernels.cast(x, recipe), expected)


def test_divisor_and_amax_scales_decode_like_the_generic_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other libraries store them. Bytes written with multiplier scales decode to other values; blocks small and large."""
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", 256)
    x = wide((4, 1024), seed=22, exponents=2)
    for block in ((1, 32), (2, 16), (1, 1024), TENSOR):
        written = reference.cast(x, declared(INT8, Level(F32, block)))
        seen = {reference.dequantize(written).tobytes()}
        for sense in ("divisor", "amax"):
            held = declared(INT8, Level(F32, block, sense))
            st = ScaledTensor(written.data, written.scale, held, written.layout)
            assert_read_alike(st)
            seen.add(kernels.dequantize(st).tobytes())
        assert len(seen) == 3


def test_global_scales_per_matrix_decode_like_the_generic_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks smaller and larger than a chunk, and every scale convention."""
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", 256)
    x = wide((3, 4, 1024), seed=23, exponents=2)
    scales = np.array([0.5, 3.0, 0.125], np.float32)
    for element in (E2M1, INT8):
        for block in ((1, 16), (1, 1024)):
            written = reference.cast(x, declared(element, Level(F32, TENSOR), Level(E4M3, block)), CastOptions(scale=scales))
            for sense in ("multiplier", "divisor", "amax"):
                held = declared(element, Level(F32, TENSOR, sense), Level(E4M3, block))
                parts = {"global_scale": written.global_scale}
                assert_read_alike(ScaledTensor(written.data, written.scale, held, written.layout, **parts))


# ------------------------------------------------------------------------------------------------ smallest and largest numbers


@pytest.mark.parametrize("rows", [1, 600])
def test_subnormal_elements_beside_the_smallest_amax_become_signed_zeros(rows: int) -> None:
    """Multiplied by the reciprocal of such a scale, they would become nonzero E5M2 values."""
    x = np.zeros((rows, 16), np.float32)
    x[:, :3] = np.ldexp(1.0, -95), np.nextafter(np.float32(2.0**-126), np.float32(0)), -(2.0**-127)
    recipe = Float8BlockScaling("E5M2", block_k=16)
    found = kernels.cast(x, recipe)
    assert_same_bytes(found, reference.cast(x, recipe))
    assert found.data[:, :3].tolist() == [[0x7B, 0, 0x80]] * rows


@pytest.mark.parametrize("rows", [1, 600])
def test_subnormal_elements_become_zero_under_a_lookup_codec_with_a_large_range(rows: int) -> None:
    """Multiplied by the reciprocal 2^110, 2^-127 would become the second value of the table."""
    great = Lookup("great", 4, None, "this test", (0.0, 2.0**-17, 2.0**50, *(-i * 2.0**40 for i in range(1, 14))))
    x = np.zeros((rows, 16), np.float32)
    x[:, :2] = 2.0**-60, 2.0**-127
    recipe = declared(great, Level(F32, (1, 16)))
    found = kernels.cast(x, recipe)
    assert_same_bytes(found, reference.cast(x, recipe))
    assert (found.data[:, 0] == 2).all()


def test_a_positive_contraction_axis_means_the_same_axis() -> None:
    x = wide((64, 32), seed=24, exponents=4)
    for recipe in (MXFP8BlockScaling(), INT4Scaling(group_size=16)):
        found = kernels.cast(x, recipe, CastOptions(axis=0))
        assert found.axis == -2
        assert_same_bytes(found, reference.cast(x, recipe, CastOptions(axis=-2)))


# ------------------------------------------------------------------------------------------------ memory


def test_the_workspace_is_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that nearly fill a chunk, for all rows under one scale, and for an amax of the whole tensor."""
    sizes: list[int] = []

    def buffers(size: int) -> Any:
        sizes.append(size)
        return Buffers(size)

    monkeypatch.setattr("breccia.kernels.numpy.pieces.take_buffers", buffers)
    monkeypatch.setattr("breccia.kernels.numpy.workspace.CHUNK", 256)
    for recipe in (Float8RowScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(), INT8Scaling()):
        for shape in ((50, 200), (3, 7, 240)):
            x = wide(shape, seed=25, exponents=2)
            st = kernels.cast(np.concatenate([x] * 2, axis=-2), recipe, CastOptions(nonfinite="raise"))
            kernels.dequantize(st)
    kernels.cast(wide((128, 128), seed=25, exponents=2), Float8BlockScaling(block_m=2, block_k=128))
    assert len(sizes) > 20
    assert max(sizes) == 256


def test_rows_longer_than_a_chunk_of_the_generic_algorithm_are_processed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.numpy.call.GENERIC", 64)
    recipe = Float8RowScaling(scale_rule="divide")
    x = wide((90, 100), seed=26, exponents=4)
    assert_same_bytes(kernels.cast(x, recipe), reference.cast(x, recipe))


def test_the_caches_of_plans_and_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: dict[Any, Any] = {}
    monkeypatch.setattr("breccia.kernels.numpy.plan._plans", plans)
    monkeypatch.setattr("breccia.kernels.numpy.workspace._REMEMBERED", 4)
    most = 0
    for size in range(1, 12):
        recipe = Float8BlockScaling(block_k=size)
        kernels.cast(np.ones((2, size), np.float32), recipe)
        most = max(most, len(plans))
    assert most == 4
    for rows in range(1, 12):
        kernels.cast(np.ones((rows, 16), np.float32), Float8RowScaling())
        assert max(len(plan._layouts) for plan in plans.values()) <= 4


def test_a_half_precision_operand_is_converted_to_fp32_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.numpy.products.TILE", 1 << 12)
    a, b = np.ones((1024, 256), np.float16), np.ones((256, 8), np.float32)
    tracemalloc.start()
    try:
        product = kernels.matmul(a, b)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (product == 256).all()
    assert peak < a.size  # as FP32 it would take four times as much


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes of the tiles that `matmul` decodes, with tiles of 4 KB."""
    shapes: list[Shape] = []
    decode = calls.dequantize

    def watched(st: ScaledTensor, *options: Any) -> Any:
        shapes.append(st.shape)
        return decode(st, *options)

    monkeypatch.setattr("breccia.kernels.numpy.products.TILE", 1 << 12)
    monkeypatch.setattr(calls, "dequantize", watched)
    return shapes


def whole_numbers(shape: Shape, seed: int) -> np.ndarray:
    """Integers in -8 .. 8, which E4M3 represents exactly and whose products FP32 adds exactly."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def test_a_weight_shared_by_all_matrices_is_decoded_once(decoded: list[Shape]) -> None:
    x, w = whole_numbers((3, 2, 64), 1), whole_numbers((64, 64), 2)
    weight = breccia.cast(w, Float8CurrentScaling(), scale=1.0).mT
    np.testing.assert_array_equal(kernels.matmul(x, weight), x @ w.T)
    assert sum(m * n for m, n in decoded) == w.size
    assert len(decoded) > 1


def test_an_operand_with_one_scale_is_decoded_tile_by_tile(decoded: list[Shape]) -> None:
    x, w = whole_numbers((8, 1024), 3), whole_numbers((3, 1024), 4)
    a, b = (breccia.cast(part, Float8CurrentScaling(), scale=1.0) for part in (x, w))
    np.testing.assert_array_equal(kernels.matmul(a, b.mT), x @ w.T)
    assert sorted(set(decoded)) == [(1, 1024), (1024, 1)]


FINE = [Integer("fine", 8, None, "test", True, 30), Lookup("fine", 4, None, "test", tuple(i * 2.0**-30 for i in range(16)))]


@pytest.mark.parametrize("codec", FINE, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("level", [Level(F32, TENSOR), Level(F32, (1, 16)), Level(F32, (1, None))], ids=str)
def test_subnormal_elements_become_zero_under_codecs_with_equally_fine_steps(codec: Codec, level: Level) -> None:
    """Under a scale near 2^-97 an element below 2^-126 comes to 2^-29, which is a number of such a codec."""
    recipe = declared(codec, level)
    for exponent in (-126, -124, -120, -110):
        x = np.zeros((600, 16), np.float32)
        x[:, :4] = 2.0**exponent, 1.1e-38, 2.0**-127, -(2.0**-149)
        found, expected = kernels.cast(x, recipe), reference.cast(x, recipe)
        assert found.data.tobytes() == expected.data.tobytes()
        assert found.scale.tobytes() == expected.scale.tobytes()
        assert not reference.dequantize(found)[:, 2:].any()


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("rows", [4, 400], ids=["short", "long"])
def test_unaligned_arrays_cast_to_the_same_bytes(recipe: ScalingRecipe, rows: int, offset: int) -> None:
    """Files may have a header of any length, so arrays mapped from them start at any byte."""
    x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    memory = np.zeros(x.nbytes + 4, np.uint8)
    memory[offset : offset + x.nbytes] = x.view(np.uint8).reshape(-1)
    unaligned = memory[offset : offset + x.nbytes].view(np.float32).reshape(x.shape)
    assert not unaligned.flags.aligned
    assert breccia.bytes_equal(breccia.cast(unaligned, recipe), breccia.cast(x, recipe))


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("columns", [64, 200])
def test_integers_of_any_width_with_biases_have_the_bytes_and_values_of_the_generic_algorithm(bits: int, columns: int) -> None:
    """Casts, and decoding of every code under ordinary, zero, subnormal and huge scales and biases, and under NaN."""

    codec = Integer(f"U{bits}", bits, None, "unsigned binary", False)
    recipe = declared(codec, Level(F32, (1, 32)), offset="bias")
    x = wide((40, columns), seed=bits, exponents=3)
    x[3] = 0.0
    for rows in (40, 4000):
        given = np.tile(x, (rows // 40, 1))
        for cast in (breccia.cast, kernels.cast):  # the one that runs by default may be compiled
            assert breccia.bytes_equal(cast(given, recipe), reference.cast(given, recipe))
    written = kernels.cast(x, recipe)
    rng = np.random.default_rng(bits)
    shape = written.scale.shape
    few = np.array([0.0, -0.0, 2.0**-149, -(2.0**-130), 2.0**-126, -1.5, 3e38, np.inf, np.nan, 0.1], np.float32)
    data = rng.integers(0, 256, written.data.shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        for scale, bias in ((few, few), (few[4:6], few), (few, few[4:6]), (few[5:6], few[9:])):
            scale, bias = (rng.choice(each, shape) for each in (scale, bias))
            st = ScaledTensor.from_parts(data, scale, recipe, written.layout, bias, None, -1, written.padding)
            wanted = reference.dequantize(st)
            nan = np.isnan(wanted)
            for found in (kernels.dequantize(st), breccia.dequantize(st)):
                assert np.array_equal(np.isnan(found), nan)
                assert np.array_equal(found.view(np.int32)[~nan], wanted.view(np.int32)[~nan])
