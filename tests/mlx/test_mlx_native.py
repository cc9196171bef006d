"""MLX's own quantized arrays: same bytes and values as breccia's, and products by MLX and breccia-native."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import breccia
from breccia.bridges import from_mlx, to_mlx
from breccia.dispatch import registry
from breccia.kernels import bounds
from breccia.tensors.tensor import ScaledTensor
from breccia.testing.examples import every_decodable, wide
from breccia_mlx import cpu, native
from breccia_mlx.nn import ScaledLinear
from breccia_native.availability import missing_products

MXFP8, MXFP4 = breccia.MXFP8BlockScaling(), breccia.MXFP4BlockScaling()
NVFP4 = breccia.NVFP4BlockScaling(two_level=False)
QUANTIZED = "mlx.quantized_matmul"
#: The default kernels for few rows.
DEFAULT = "mlx.cpu.quantized_matmul"
DEFAULTS = (DEFAULT,) if missing_products("cpu") else ("mlx.cpu.matmul", DEFAULT)


def affine(bits: int, group_size: int = 64, scale_dtype: str = "fp32") -> breccia.ScalingRecipe:
    kind = {4: breccia.INT4Scaling, 8: breccia.INT8Scaling}.get(bits)
    if kind is None:
        return breccia.recipe(f"mlx_affine,bits={bits},group_size={group_size},scale_dtype={scale_dtype}")
    return kind(group_size=group_size, signed=False, symmetric=False, offset="bias", scale_dtype=scale_dtype)


WIDTHS = (2, 3, 4, 5, 6, 8)
#: Each mode of `mx.quantize` -> (its options, the equivalent recipe).
MODES: dict[str, tuple[dict[str, Any], breccia.ScalingRecipe]] = {
    "mxfp4": ({"mode": "mxfp4"}, MXFP4),
    "mxfp8": ({"mode": "mxfp8"}, MXFP8),
    "nvfp4": ({"mode": "nvfp4"}, NVFP4),
    "affine": ({}, affine(4)),
    "affine, 8 bits": ({"bits": 8, "group_size": 32}, affine(8, 32)),
    **{f"affine, {bits} bits": ({"bits": bits}, affine(bits)) for bits in (2, 3, 5, 6)},
    "affine, 3 bits, groups of 32": ({"bits": 3, "group_size": 32}, affine(3, 32)),
    "affine, groups of 128": ({"mode": "affine", "bits": 4, "group_size": 128}, affine(4, 128)),
}


def weight(seed: int = 0, rows: int = 24, columns: int = 256) -> Any:
    w = wide((rows, columns), seed=seed, exponents=2)
    w[0] = 0.0
    return mx.array(w)


def pointer(a: Any) -> int:
    return np.from_dlpack(a).__array_interface__["data"][0]


def mlxs(st: ScaledTensor) -> np.ndarray:
    """The values that MLX decodes from a breccia tensor, in FP32."""
    w, scales, biases, options = to_mlx(st)
    return np.array(mx.dequantize(w, scales, biases, dtype=mx.float32, **options))


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mask of equal bits of two FP32 arrays; NaN equals NaN."""
    return (a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))


# -- the bridge ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_arrays_quantized_by_mlx_decode_to_the_values_of_mlx(mode: str) -> None:
    options, recipe = MODES[mode]
    parts = mx.quantize(weight(), **options)
    st = from_mlx(*parts, **options)
    assert st.recipe == recipe and st.shape == (24, 256) and st.axis == -1 and st.padding == 0
    theirs = mx.dequantize(*parts, **options, **({} if "affine" in mode else {"dtype": mx.float32}))
    assert np.array_equal(np.array(breccia.dequantize(st)).view(np.int32), np.array(theirs).view(np.int32))


@pytest.mark.parametrize("mode", MODES)
def test_the_bridge_is_zero_copy_in_both_directions(mode: str) -> None:
    options, _ = MODES[mode]
    parts = mx.quantize(weight(), **options)
    mx.eval(parts)
    st = from_mlx(*parts, **options)
    w, scales, biases, found = to_mlx(st)
    assert [pointer(st.data), pointer(w)] == [pointer(parts[0])] * 2
    assert scales is parts[1] and (biases is parts[2] if len(parts) == 3 else biases is None)
    assert w.dtype == mx.uint32 and mx.array_equal(w, parts[0])
    defaults = {"mode": "affine", "group_size": recipe_group(st), "bits": st.recipe.format.element.bits}
    assert found == defaults | options


def recipe_group(st: ScaledTensor) -> Any:
    return st.recipe.format.scale.block[1]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_affine_arrays_return_byte_for_byte(bits: int, group_size: int) -> None:
    """Random words too: every code under every scale."""
    rng = np.random.default_rng(bits)
    words = mx.array(rng.integers(0, 2**32, (24, 256 * bits // 32), dtype=np.uint64).astype(np.uint32))
    made, scales, biases = mx.quantize(weight(), bits=bits, group_size=group_size)
    for w in (made, words):
        st = from_mlx(w, scales, biases, bits=bits, group_size=group_size)
        assert st.shape == (24, 256) and st.recipe == affine(bits, group_size)
        again = to_mlx(st)
        assert all(mx.array_equal(a, b) for a, b in zip(again, (w, scales, biases), strict=False))
        theirs = mx.dequantize(w, scales, biases, bits=bits, group_size=group_size)
        assert np.array_equal(np.array(breccia.dequantize(st)), np.array(theirs))
        x = mx.array(rng.standard_normal((3, 256)).astype(np.float32))
        values = np.array(theirs, np.float64)
        size = np.abs(np.array(x, np.float64)) @ np.abs(values).T
        y = np.array(breccia.matmul(x, st.mT))
        assert (np.abs(y - np.array(x, np.float64) @ values.T) <= bounds.accumulated(size, 256, 256)).all()


def test_leading_axes_are_kept() -> None:
    w = mx.stack([weight(1), weight(2)])
    st = from_mlx(*mx.quantize(w, mode="mxfp8"), mode="mxfp8")
    assert st.shape == (2, 24, 256)
    assert np.array_equal(mlxs(st), np.array(breccia.dequantize(st)))


def test_mxfp8_matches_mlx_byte_for_byte_on_normal_data() -> None:
    w = mx.array(np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32))
    assert breccia.bytes_equal(from_mlx(*mx.quantize(w, mode="mxfp8"), mode="mxfp8"), breccia.cast(w, MXFP8))


@pytest.mark.parametrize("recipe", [MXFP8, MXFP4, NVFP4, affine(4, 32), affine(8, 32)], ids=lambda r: f"{r.name}")
def test_every_code_under_every_scale_matches_mlx_except_where_documented(recipe: breccia.ScalingRecipe) -> None:
    st = every_decodable(recipe)
    ours = breccia.dequantize(st)
    parts = (mx.array(p) if p is not None else None for p in (st.data, st.scale, st.zero_point))
    data, scale, zero = parts
    theirs = mlxs(breccia.from_buffer(data, scale, recipe, st.layout, zero))
    differ = ~same(ours, theirs)
    if recipe.format.offset == "bias":
        # The contract flushes products and biases below 2^-126 before they are added (numerics, section 4); MLX does not.
        product = ours.astype(np.float64) - np.repeat(st.zero_point.astype(np.float64), 32, axis=1)
        least = np.minimum(np.abs(product), np.abs(np.repeat(st.zero_point, 32, axis=1)))
        assert differ.any() and (np.abs(theirs[differ]) < 2.0**-120).all() and (least[differ] < 2.0**-120).all()
    elif recipe.format.scale.codec.name == "E8M0":
        nan = np.broadcast_to(st.scale[:, :1] == 255, ours.shape)
        assert np.isnan(ours[nan]).all() and (differ == (nan & ~np.isnan(theirs))).all()
        assert np.isinf(theirs[differ]).all(), "no fault turns into a number"
    else:
        assert not differ.any()


@pytest.mark.parametrize(("dtype", "scale_dtype"), [("float16", "fp16"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_16_bit_scales_are_accepted_and_decoded_in_fp32(dtype: str, scale_dtype: str, bits: int) -> None:
    """MLX computes in the dtype of the scales; with FP32 scales it computes the same values as breccia."""
    w, scales, biases = mx.quantize(weight().astype(getattr(mx, dtype)), bits=bits)
    st = from_mlx(w, scales, biases, bits=bits)
    assert st.recipe == affine(bits, 64, scale_dtype) and st.scale is scales
    wide_parts = (p.astype(mx.float32) for p in (scales, biases))
    assert np.array_equal(np.array(breccia.dequantize(st)), np.array(mx.dequantize(w, *wide_parts, bits=bits)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "nf4"}, r"mode is one of affine, mxfp4, mxfp8, nvfp4; got 'nf4'"),
        ({"mode": "mxfp8", "group_size": 64}, r"mode 'mxfp8' has group_size=32 and bits=8; got group_size=64, bits=None"),
        ({"mode": "affine"}, r"have a recipe; got bits=4, group_size=64 and scales in uint8"),
        ({"biases": True}, r"mode 'mxfp8' has no biases; got some"),
        ({"scales": "float32"}, r"scales and biases of one dtype, uint8; got w as uint32, scales as float32"),
        ({"w": "uint8"}, r"got w as uint8, scales as uint8\. Pass the arrays as MLX gave them"),
        ({"scales": "short"}, r"scales are \(\.\.\., M, K / group_size\), \(24, 8\) for w of shape \(24, 64\).* got \(24, 7\)"),
        ({"w": "flat"}, r"w is \(\.\.\., M, K \* bits / 32\); got shape \(1536,\)"),
    ],
)
def test_arguments_that_do_not_fit_an_mlx_mode_are_refused(change: dict[str, Any], said: str) -> None:
    w, scales = mx.quantize(weight(), mode="mxfp8")
    biases = scales if change.pop("biases", False) else None
    scales = {"float32": scales.astype(mx.float32), "short": scales[:, :7]}.get(change.pop("scales", ""), scales)
    w = {"uint8": w.view(mx.uint8), "flat": mx.reshape(w, (-1,))}.get(change.pop("w", ""), w)
    with pytest.raises(breccia.DialectError, match=said):
        from_mlx(w, scales, biases, **{"mode": "mxfp8"} | change)


def test_arrays_without_a_recipe_are_refused() -> None:
    w, scales, biases = mx.quantize(weight(), bits=2)
    with pytest.raises(breccia.DialectError, match=r"affine arrays of 2, 3, 4, 5, 6, 8 bits.* got bits=1, group_size=64"):
        from_mlx(w, scales, biases, bits=1)
    for bits in (4, 8):
        with pytest.raises(
            breccia.RecipeError, match=f"2, 3, 5 and 6 bits, got bits={bits}; .* are the recipe 'int{bits},"
        ) as raised:
            breccia.recipe(f"mlx_affine,bits={bits},group_size=32,scale_dtype=fp32")
        assert breccia.recipe(str(raised.value).split("'")[2]) == affine(bits, 32), "the recipe that is named"
    with pytest.raises(breccia.RecipeError, match="bits must be one of 2, 3, 5, 6, got 7"):
        breccia.recipe("mlx_affine,bits=7")
    with pytest.raises(breccia.DialectError, match="mode 'affine' has biases; got none"):
        from_mlx(*mx.quantize(weight())[:2])


def test_tensors_without_an_mlx_mode_are_refused_with_a_remedy() -> None:
    w = weight()
    for recipe in (breccia.NVFP4BlockScaling(), breccia.Float8BlockScaling(), breccia.INT4Scaling(), affine(4, 16)):
        with pytest.raises(
            breccia.DialectError, match=r"MLX's modes are .*Requantize it first, to breccia\.MXFP8BlockScaling\(\)"
        ):
            to_mlx(breccia.cast(w, recipe))
    with pytest.raises(breccia.DialectError, match=r"groups along the last axis; this tensor along axis -2\. Pass its \.mT"):
        to_mlx(breccia.cast(w, MXFP8).mT)
    with pytest.raises(
        breccia.DialectError, match=r"K a multiple of 32 .* shape \(24, 250\).*Cast it padded to a multiple of 32"
    ):
        to_mlx(breccia.cast(w[:, :250], MXFP8))
    with pytest.raises(
        breccia.UnsupportedError, match=r"to_mlx takes a ScaledTensor of mlx, got numpy; .*from_dlpack\(st, 'mlx'\)"
    ):
        to_mlx(breccia.cast(np.ones((2, 32), np.float32), MXFP8))


# -- the product -----------------------------------------------------------------------------------------------------


#: breccia-native multiplies affine codes of 4 and 8 bits.
MULTIPLIED = [
    (recipe, kernel)
    for recipe in (MXFP8, MXFP4, NVFP4, breccia.NVFP4BlockScaling(), *map(affine, WIDTHS))
    for kernel in DEFAULTS
    if kernel != "mlx.cpu.matmul" or recipe.format.element.bits in (4, 8)
]


@pytest.mark.parametrize(("recipe", "kernel"), MULTIPLIED, ids=repr)
@pytest.mark.parametrize(("rows", "length"), [(1, 4096), (3, 512)])
def test_default_products_stay_within_the_bound_with_one_large_and_many_small_terms(
    recipe: breccia.ScalingRecipe, rows: int, length: int, kernel: str
) -> None:
    """The bound of `matmul` against FP64: K + 1 terms, one more for the tensor scale."""
    rng = np.random.default_rng(length)
    x = rng.uniform(0.5, 1, (rows, length)).astype(np.float32)
    x[:, 0] = 2.0**12
    w = mx.array(rng.uniform(0.5, 1, (16, length)).astype(np.float32))
    st = breccia.cast(w, recipe)
    values = np.array(breccia.dequantize(st)).astype(np.float64)
    bound = bounds.accumulated(np.abs(x.astype(np.float64)) @ np.abs(values).T, length + 2, length)
    exact = x.astype(np.float64) @ values.T
    prefer = kernel if rows <= native.most_rows(recipe.format) or kernel != DEFAULT else QUANTIZED
    found = np.array(breccia.matmul(mx.array(x), st.mT, prefer=prefer))
    assert (np.abs(found - exact) <= bound).all()

    total = np.zeros((rows, 16), np.float16)  # the bound is not vacuous: sums in FP16 break it
    for k in range(length):
        total = (total + (x[:, k : k + 1] * values[:, k]).astype(np.float16)).astype(np.float16)
    assert (np.abs(total - exact) > bound).any()


@pytest.mark.parametrize("recipe", [MXFP8, MXFP4, NVFP4, *(affine(b, 32) for b in WIDTHS)], ids=lambda r: r.spec)
def test_quantized_matmul_multiplies_by_the_decoded_values(recipe: breccia.ScalingRecipe) -> None:
    """A row with a single one picks out column k: a product that is exact, also where code times scale and bias cancel."""
    rng = np.random.default_rng(1)
    st = breccia.cast(weight(2, 8, 64), recipe)
    if st.zero_point is not None:
        code = rng.integers(0, 2**recipe.format.element.bits, st.scale.shape)
        bias = mx.array((-np.array(st.scale) * code * (1 + 2.0**-22)).astype(np.float32))
        st = breccia.from_buffer(st.data, st.scale, recipe, st.layout, bias)
    picked = breccia.matmul(mx.eye(64), st.mT, prefer=QUANTIZED)
    assert np.array_equal(np.array(picked.T), np.array(breccia.dequantize(st)))


def test_products_by_codes_are_the_default_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def winner(rows: int, recipe: breccia.ScalingRecipe) -> str:
        found = breccia.explain("matmul", mx.ones((rows, 256)), breccia.cast(weight(), recipe).mT).winner
        assert found is not None
        return found.name

    assert [winner(1, MXFP4), winner(4, MXFP4)] == [DEFAULTS[0]] * 2
    monkeypatch.setenv("BRECCIA_BLOCK", "native")
    registry.reload()
    try:
        assert {winner(rows, recipe) for recipe in (MXFP4, NVFP4) for rows in (1, 4, 500)} == {DEFAULT}
        assert [winner(4, MXFP8), winner(16, affine(3)), winner(16, affine(8))] == [DEFAULT] * 3
        assert {winner(5, MXFP8), winner(17, affine(3))} == {"composite.matmul"}
        assert [winner(16, breccia.INT4Scaling()), winner(16, breccia.INT8Scaling())] == [DEFAULT] * 2
        assert {winner(17, breccia.INT8Scaling()), winner(1, breccia.NF4Scaling())} == {"composite.matmul"}
    finally:
        monkeypatch.undo()
        registry.reload()


@pytest.mark.parametrize("kernel", [QUANTIZED, *DEFAULTS])
def test_nan_scales_are_found_once_and_decoded(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over codes that are not zero, which MLX multiplies by Inf."""
    st = breccia.cast(mx.ones((4, 64)), MXFP8)
    scale = mx.array([[127, 127], [255, 127], [127, 127], [127, 255]], mx.uint8)
    bad = breccia.from_buffer(st.data, scale, MXFP8, st.layout).mT
    looked: list[Any] = []
    monkeypatch.setattr(native, "_read_nan", lambda scale, read=native._read_nan: looked.append(scale) or read(scale))
    for x in (mx.ones((1, 64)), mx.zeros((1, 64)), mx.ones((1, 64))):
        y = np.array(breccia.matmul(x, bad, prefer=kernel))
        assert np.isnan(y[0, [1, 3]]).all() and np.isfinite(y[0, [0, 2]]).all()
    assert len(looked) == (0 if kernel == "mlx.cpu.matmul" else 1)
    known = len(native._nan_by_id)
    if looked:
        looked.clear()
        del bad
        assert len(native._nan_by_id) == known - 1, "the finding goes with the array"


@pytest.mark.parametrize("recipe", [MXFP4, MXFP8], ids=lambda r: r.name)
def test_compiled_functions_make_the_rows_of_nan_scales_nan(recipe: breccia.ScalingRecipe) -> None:
    """The scales are placeholders, so nothing can be looked up beforehand; MLX itself multiplies by Inf."""
    layer = ScaledLinear.in_place_of(breccia.cast(mx.ones((4, 64)), recipe))
    run = mx.compile(lambda x: breccia.matmul(x, layer.weight.transposed, prefer=QUANTIZED), inputs=layer.state)
    scale = layer.weight[recipe.spec]["scale"]
    for bad in ([], [1, 3]):
        layer.weight[recipe.spec]["scale"] = mx.where(mx.array([[n in bad, False] for n in range(4)]), 255, scale)
        layer.weight[recipe.spec]["scale"] = layer.weight[recipe.spec]["scale"].astype(mx.uint8)
        y = np.array(run(mx.ones((2, 64))))
        assert np.isnan(y[:, bad]).all() and np.isfinite(np.delete(y, bad, axis=1)).all()


def test_a_compiled_function_decodes_captured_codes_on_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It contains the codes, not their decoded values, which take several times the memory."""
    st = breccia.cast(weight(), MXFP8)
    ran: list[str] = []
    monkeypatch.setattr(cpu, "dequantize", lambda *arguments: ran.append("cpu"))
    registry.reload()
    try:
        function = mx.compile(lambda x: breccia.matmul(x, st.mT))
        assert function(mx.ones((2, 256))).shape == (2, 24) and not ran
    finally:
        monkeypatch.undo()
        registry.reload()


def test_quantized_matmul_runs_only_when_named_and_says_what_it_accepts() -> None:
    x, w = mx.ones((2, 256)), weight()
    st = breccia.cast(w, MXFP8)
    explained = breccia.explain("matmul", x, st.mT)
    assert explained.winner is not None and explained.winner.name != QUANTIZED
    assert f"opt-in: it does not follow the contract of matmul; name it with prefer='{QUANTIZED}'" in str(explained)
    named = breccia.explain("matmul", x, st.mT, prefer=QUANTIZED)
    assert named.winner is not None and named.winner.name == QUANTIZED
    for a, b, said in (
        (x, breccia.cast(w, breccia.NF4Scaling()).mT, r"MLX has no mode for this 'nf4' recipe; it has mxfp4"),
        (x[:, :250], breccia.cast(w[:, :250], MXFP8).mT, r"K must be a multiple of 32 with a scale per block; b has PerBlockK"),
        (x[:, :24], st, r"b must be the \.mT of one weight \(N, K\) with blocks along K"),
        (st, w.T, r"mx\.quantized_matmul multiplies by a quantized b"),
        (x, breccia.cast(mx.stack([w, w]), MXFP8).mT, r"b must be the \.mT of one weight \(N, K\)"),
    ):
        with pytest.raises(breccia.NoKernelError, match=said):
            breccia.matmul(a, b, prefer=QUANTIZED)


def test_quantized_matmul_accepts_the_operands_of_matmul() -> None:
    """Small integers: exact in any order, so equal to the generic product."""
    rng = np.random.default_rng(0)
    x, w = (mx.array(rng.integers(-3, 4, shape).astype(np.float32)) for shape in ((6, 64), (8, 64)))
    st = breccia.cast(w, MXFP8)
    assert mx.array_equal(breccia.dequantize(st), w)
    for a in (x, x.astype(mx.float16), x.astype(mx.bfloat16), mx.stack([x, 2 * x]), breccia.cast(x, MXFP8), x[:0]):
        for out_dtype in ("float32", "bfloat16"):
            ours, theirs = (breccia.matmul(a, st.mT, out_dtype, prefer=k) for k in (None, QUANTIZED))
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and mx.array_equal(ours, theirs)
    ours, theirs = (
        mx.grad(lambda x, w, k=k: (breccia.matmul(x, breccia.cast(w, MXFP8).mT, prefer=k) * 3).sum(), argnums=(0, 1))(x, w)
        for k in (None, QUANTIZED)
    )
    assert all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(breccia.UnsupportedError, match="matmul takes ScaledTensors and .* a is int32"):
        breccia.matmul(x.astype(mx.int32), st.mT, prefer=QUANTIZED)
    with pytest.raises(breccia.ShapeError, match=r"matmul shape mismatch: a.shape\[-1\]=32"):
        breccia.matmul(x[:, :32], st.mT, prefer=QUANTIZED)
    with pytest.raises(breccia.ShapeError, match="needs operands of at least two axes"):
        breccia.matmul(x[0], st.mT, prefer=QUANTIZED)


def test_nan_propagates_through_quantized_matmul() -> None:
    """A NaN in the weight. MLX reads the E4M3 scale as NaN and the E8M0 scale as Inf, which times a zero code is NaN."""
    w = np.ones((4, 64), np.float32)
    w[2, 40] = np.nan
    for recipe in (MXFP8, MXFP4, NVFP4, affine(4, 32)):
        y = np.array(breccia.matmul(mx.ones((1, 64)), breccia.cast(mx.array(w), recipe).mT, prefer=QUANTIZED))
        assert np.isnan(y[0, 2]) and np.isfinite(y[0, [0, 1, 3]]).all()


@pytest.mark.xfail(raises=RuntimeError, strict=True, reason="mx.vmap has no rule for mx.quantized_matmul in MLX 0.32.4")
def test_quantized_matmul_works_under_vmap() -> None:
    st = breccia.cast(weight(), MXFP8)
    mx.eval(mx.vmap(lambda x: breccia.matmul(x, st.mT, prefer=QUANTIZED))(mx.ones((2, 3, 256))))
