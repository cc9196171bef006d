"""Requantize: conversions that are declared exact are exact for every code and scale, and no inexact one is called exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recipes import RECIPES, declared, is_exact, recipe_id

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.codecs import E2M1, E2M3, F32
from breccia.formats import Level
from breccia.kernels import reference
from breccia.testing.examples import every_decodable, special_rows, wide

#: Every recipe and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

PAIRS = [(a, b) for a in RECIPES for b in RECIPES if a != b]
PROMISED = [(a, b) for a, b in PAIRS if is_exact(a, b)]


def pair_id(pair: Any) -> str:
    return recipe_id(pair)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, NaN equal to NaN."""
    p, q = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b))
    return bool(np.all((p == q) | (np.isnan(a) & np.isnan(b))))


def checked(st: breccia.ScaledTensor) -> breccia.ScaledTensor:
    """`st`, rebuilt by the constructor, which checks it like foreign buffers."""
    parts = (st.data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.shape)
    return breccia.from_buffer(*parts)


@pytest.mark.parametrize(("source", "target"), PROMISED, ids=pair_id)
def test_a_promised_pair_keeps_every_code_under_every_scale(
    source: breccia.ScalingRecipe, target: breccia.ScalingRecipe
) -> None:
    """All codes by all scale codes of 8 bits, and 300 of 16 and 32 bits; the slow test has all 2^16."""
    st = every_decodable(source)
    kept = checked(breccia.requantize(st, target))
    assert kept.recipe == target
    assert same_values(reference.dequantize(st), reference.dequantize(kept))


@pytest.mark.slow
def test_promised_pairs_keep_every_code_under_all_scales_of_16_bits() -> None:
    pairs = [(a, b) for a, b in PROMISED if a.format.scale.codec.bits == 16]
    assert len(pairs) > 20
    for source, target in pairs:
        st = every_decodable(source, 1 << 16)
        assert same_values(reference.dequantize(st), reference.dequantize(breccia.requantize(st, target)))


def test_the_promised_pairs_are_those_of_the_spec() -> None:
    """Between default recipes of other formats; docs/spec/numerics.md, section 6."""
    defaults = {r.name: type(r)() for r in RECIPES} | {
        "mxfp6 E3M2": breccia.MXFP6BlockScaling("E3M2"),
        "mxfp8 E5M2": breccia.MXFP8BlockScaling("E5M2"),
    }
    found = {(a, b) for a in defaults for b in defaults if a != b and is_exact(defaults[a], defaults[b])}
    tensors = ("fp8_delayed", "fp8_current")
    assert found == {
        *((a, b) for a in tensors for b in (*tensors, "fp8_row", "fp8_block") if a != b),
        ("fp8_row", "fp8_block"),
        *(("mxfp4", b) for b in ("mxfp6", "mxfp6 E3M2", "mxfp8", "mxfp8 E5M2")),
        ("mxfp6", "mxfp8"),
        *(("mxfp6 E3M2", b) for b in ("mxfp8", "mxfp8 E5M2")),
        *((a, b) for a in ("int4", "int") for b in ("int4", "int", "fp8_block") if a != b),
    }


@pytest.mark.slow
def test_exact_means_exact_for_every_pair_and_an_error_means_that_bits_would_change() -> None:
    """All ordered pairs of recipes, on wide, special and quantized data: 0 false "exact"."""
    inputs = [
        wide((8, 128), seed=3, exponents=20),
        special_rows(128),
        np.exp2(np.arange(-64.0, 64)).reshape(2, 64).astype(np.float32),
    ]
    exact = refused = 0
    for x in inputs:
        for source, target in PAIRS:
            st = breccia.cast(x, source)
            before = reference.dequantize(st)
            try:
                kept = breccia.requantize(st, target, require_exact=True)
            except breccia.InexactError as e:
                through = reference.dequantize(reference.cast(before, target))
                assert e.found["count"] == np.count_nonzero(
                    (before.view("u4") != through.view("u4")) & ~(np.isnan(before) & np.isnan(through))
                )
                refused += 1
            else:
                assert same_values(before, reference.dequantize(checked(kept)))
                exact += 1
    assert exact > len(inputs) * len(PROMISED) and refused > 100


def test_the_direct_path_keeps_values_that_a_path_through_fp32_would_lose() -> None:
    """MXFP4 under 2^-127: its values are FP32 subnormals, which a cast counts as zero."""
    rows = np.full((1, 16), 0x21, np.uint8)
    st = breccia.from_buffer(rows, np.zeros((1, 1), np.uint8), breccia.MXFP4BlockScaling(), breccia.MXFP4BlockScaling().layout)
    kept = breccia.requantize(st, breccia.MXFP8BlockScaling())
    assert kept.scale.tolist() == [[0]] and kept.data[0, :2].tolist() == [0x30, 0x38]  # 0.5 and 1.0 in E4M3
    assert not reference.dequantize(reference.cast(reference.dequantize(st), breccia.MXFP8BlockScaling())).any()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(7, 37), (2, 3, 40), (5, 1), (0, 32), (4, 0)], ids=str)
def test_exact_requantization_works_for_partial_blocks_transposed_and_empty_shapes(shape: tuple[int, ...], axis: int) -> None:
    pairs = [
        (breccia.MXFP4BlockScaling(), breccia.MXFP8BlockScaling()),
        (breccia.MXFP4BlockScaling(), breccia.MXFP6BlockScaling()),
        (breccia.Float8CurrentScaling(), breccia.Float8BlockScaling(block_k=16)),
        (breccia.Float8BlockScaling(block_k=16, block_m=4), breccia.Float8BlockScaling(block_k=4, block_m=2)),
        (breccia.INT4Scaling(group_size=32), breccia.INT8Scaling(group_size=8)),
        (breccia.INT4Scaling(group_size=32, scale_dtype="bf16"), breccia.INT4Scaling(group_size=16, scale_dtype="fp32")),
    ]
    for source, target in pairs:
        st = breccia.cast(wide(shape, seed=1, exponents=4), source, axis=axis)
        kept = checked(breccia.requantize(st, target))
        assert (kept.shape, kept.axis) == (shape, axis)
        assert same_values(breccia.dequantize(st), breccia.dequantize(kept))


def test_a_scale_per_expert_is_repeated_over_the_blocks_of_its_expert() -> None:
    x = wide((3, 4, 64), seed=2, exponents=4)
    st = breccia.cast(x, breccia.Float8CurrentScaling(), scale=np.array([0.5, 2.0, 3.0], np.float32))
    kept = breccia.requantize(st, breccia.Float8BlockScaling(block_k=32))
    assert kept.scale.shape == (3, 4, 2) and (kept.scale == st.scale[:, None, None]).all()
    assert kept.data is st.data
    assert kept.scale.flags.writeable and kept.scale.strides[-1] == 4  # items of its own, not one item seen many times


def test_a_recipe_of_the_same_format_relabels_and_copies_nothing() -> None:
    st = breccia.cast(wide((4, 64), seed=4), breccia.MXFP8BlockScaling())
    kept = breccia.requantize(st, breccia.MXFP8BlockScaling(scale_rule="floor"))
    assert kept.data is st.data and kept.scale is st.scale and kept.recipe.scale_rule == "floor"  # type: ignore[attr-defined]


def test_arbitrary_scales_are_not_kept_where_powers_of_two_are_required() -> None:
    x = wide((4, 64), seed=5, exponents=3)
    powers = breccia.Float8BlockScaling(block_k=32, power_of_two_scale=True)
    st = breccia.requantize(breccia.cast(x, breccia.Float8BlockScaling(block_k=32)), powers)
    assert (np.frexp(st.scale)[0] == 0.5).all()


def test_rescaling_between_fp32_and_e8m0_scales_is_exact_if_the_scales_allow_it() -> None:
    x = wide((64, 64), seed=6, exponents=30)
    powers = breccia.Float8BlockScaling(block_k=32, power_of_two_scale=True)
    for source, target in ((powers, breccia.MXFP8BlockScaling()), (breccia.MXFP8BlockScaling(), powers)):
        st = breccia.cast(x, source)
        kept = breccia.requantize(st, target, require_exact=True)
        assert kept.data is st.data
        assert same_values(breccia.dequantize(st), breccia.dequantize(kept))


@pytest.mark.parametrize("narrow", ["fp16", "bf16"])
def test_biases_that_a_narrower_codec_would_round_are_not_called_exact(narrow: str) -> None:
    """The scale is 1, which any codec holds; the bias 0.1 is not."""
    x = (np.float32(0.1) + np.arange(16, dtype=np.float32))[None]
    wide_bias, narrow_bias = (
        breccia.INT4Scaling(group_size=16, signed=False, symmetric=False, offset="bias", scale_dtype=d)
        for d in ("fp32", narrow)
    )
    with pytest.raises(breccia.InexactError):
        breccia.requantize(breccia.cast(x, wide_bias), narrow_bias, require_exact=True)
    whole = breccia.cast(np.arange(16, dtype=np.float32)[None], wide_bias)
    kept = breccia.requantize(whole, narrow_bias, require_exact=True)
    assert same_values(breccia.dequantize(whole), breccia.dequantize(kept))


def test_the_multiplier_of_an_amax_scale_depends_on_the_element_codec() -> None:
    """The multiplier is amax / qmax, so the same amax gives different multipliers under E2M1 and E2M3."""
    narrow, wide = (declared(element, Level(F32, (1, 16), "amax")) for element in (E2M1, E2M3))
    assert not is_exact(narrow, wide) and is_exact(narrow, narrow)


def test_a_vector_cannot_have_row_scales() -> None:
    st = breccia.cast(np.ones(32, np.float32), breccia.Float8CurrentScaling())
    for target in (breccia.Float8RowScaling(), breccia.Float8BlockScaling()):
        with pytest.raises(breccia.ShapeError, match=r"requires x.ndim >= 2, got 1 \(shape \(32,\)\); reshape x to \(1, 32\)"):
            breccia.requantize(st, target)


def test_scales_of_one_number_per_row_keep_their_shape() -> None:
    x = wide((2, 3, 32), seed=11, exponents=2)
    st = breccia.cast(x, breccia.INT8Scaling(scale_dtype="fp16"))
    rows = breccia.from_buffer(st.data, np.ascontiguousarray(st.scale[0, :, 0]), st.recipe, st.layout)
    kept = breccia.requantize(rows, breccia.INT8Scaling(scale_dtype="fp16", scale_rule="half_range"), require_exact=True)
    assert kept.scale is rows.scale
    widened = breccia.requantize(rows, breccia.INT8Scaling())
    assert widened.scale.flags.writeable and same_values(breccia.dequantize(rows), breccia.dequantize(widened))


def test_refusing_to_round_says_how_many_values_would_change_and_what_to_do() -> None:
    st = breccia.cast(wide((4, 64), seed=7, exponents=3), breccia.Float8CurrentScaling())
    with pytest.raises(
        breccia.InexactError, match=r"require_exact=True\): \d+ of 256 values do not fit MXFP4.*Omit require_exact"
    ):
        breccia.requantize(st, breccia.MXFP4BlockScaling(), require_exact=True)
    with pytest.raises(breccia.OptionError, match="require_exact is True or False; got 1"):
        breccia.requantize(st, breccia.MXFP4BlockScaling(), require_exact=1)  # type: ignore[arg-type]


def test_a_supplied_scale_is_used_and_still_checked() -> None:
    st = breccia.cast(np.array([[1.0, 2.0, 448.0]], np.float32), breccia.Float8CurrentScaling())
    moved = breccia.requantize(st, breccia.Float8CurrentScaling(), scale=2.0, require_exact=True)
    assert float(moved.scale) == 2.0
    with pytest.raises(breccia.InexactError, match="1 of 3 values"):
        breccia.requantize(st, breccia.Float8CurrentScaling(), scale=0.5, require_exact=True)


def test_nonfinite_raise_checks_exactly_requantized_tensors_too() -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 3] = np.nan
    st = breccia.cast(x, breccia.MXFP4BlockScaling())
    assert np.isnan(breccia.dequantize(breccia.requantize(st, breccia.MXFP8BlockScaling()))).any()
    with pytest.raises(breccia.NonFiniteError):
        breccia.requantize(st, breccia.MXFP8BlockScaling(), nonfinite="raise")


def test_out_receives_an_exact_requantization() -> None:
    st = breccia.cast(wide((4, 64), seed=8), breccia.MXFP4BlockScaling())
    out = breccia.cast(np.zeros((4, 64), np.float32), breccia.MXFP8BlockScaling())
    assert breccia.requantize(st, breccia.MXFP8BlockScaling(), out=out) is out
    assert same_values(breccia.dequantize(out), breccia.dequantize(st))


def converter(framework: str) -> Callable[[np.ndarray], Any]:
    module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}[framework])
    return {"torch": getattr(module, "from_numpy", None), "jax": getattr(module, "asarray", None)}.get(
        framework
    ) or module.array


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_every_framework_keeps_the_same_bytes(framework: str) -> None:
    convert = converter(framework)
    x = np.concatenate([wide((6, 64), seed=9, exponents=30), special_rows(64)])
    x[np.abs(x) < 2.0**-120] = 0.0  # XLA's subnormal results are another test's business
    for source, target in PROMISED[:: len(PROMISED) // 40]:
        ours = breccia.requantize(breccia.cast(x, source), target)
        theirs = breccia.requantize(breccia.cast(convert(x), source), target)
        for part in ("data", "scale", "zero_point", "global_scale"):
            p, q = getattr(ours, part), getattr(theirs, part)
            assert (p is None) == (q is None)
            if p is not None:
                assert np.asarray(p).tobytes() == ops_of(q).to_numpy(q).tobytes(), (source, target, part)
    kept = breccia.requantize(breccia.cast(convert(x), breccia.MXFP4BlockScaling()), breccia.MXINT8BlockScaling())
    assert breccia.dequantize(kept).shape == x.shape


def test_promised_pairs_work_inside_a_traced_jax_function_and_others_raise_with_a_reason() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(wide((4, 64), seed=10, exponents=3))

    def moved(x: Any, target: breccia.ScalingRecipe) -> Any:
        return breccia.requantize(breccia.cast(x, breccia.MXFP4BlockScaling()), target, require_exact=True).data

    expected = breccia.requantize(breccia.cast(x, breccia.MXFP4BlockScaling()), breccia.MXFP8BlockScaling()).data
    got = jax.jit(lambda x: moved(x, breccia.MXFP8BlockScaling()))(x)
    assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    with pytest.raises(breccia.UnsupportedError, match="reads values, which a traced JAX function does not have"):
        jax.jit(lambda x: moved(x, breccia.NVFP4BlockScaling()))(x)
