"""breccia.bridges.from_deepseek_v3 and to_deepseek_v3 wrap the checkpoint's buffers, unchanged, under the right recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.bridges import from_deepseek_v3, to_deepseek_v3

RNG = np.random.default_rng(17)


def codes(*shape: int) -> np.ndarray:
    """Random E4M3 codes of finite numbers."""
    c = RNG.integers(0, 256, shape, np.uint8)
    return np.where((c & 0x7F) == 0x7F, c & 0xF0, c).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def decoded(c: np.ndarray) -> np.ndarray:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return c.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def test_a_576_by_7168_weight_has_5_by_56_scales_that_multiply_their_tiles() -> None:
    data, scale = codes(576, 7168), scales(5, 56)
    w = from_deepseek_v3(data, scale)
    assert w.recipe == breccia.Float8BlockScaling(block_m=128)
    assert w.layout == breccia.PerBlockMN(128, 128, partial=True)
    expected = decoded(data) * np.repeat(np.repeat(scale, 128, 0)[:576], 128, 1)
    assert breccia.dequantize(w).tobytes() == expected.tobytes()


def test_activations_have_one_scale_per_128_elements_of_a_row() -> None:
    data, scale = codes(3, 300), scales(3, 3)
    x = from_deepseek_v3(data, scale)
    assert x.recipe == breccia.Float8BlockScaling()
    assert x.layout == breccia.PerBlockK(128, partial=True)
    expected = decoded(data) * np.repeat(scale, 128, 1)[:, :300]
    assert breccia.dequantize(x).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("m", "rows"), [(256, 256), (256, 2), (129, 129), (129, 2)])
def test_both_directions_are_zero_copy(m: int, rows: int) -> None:
    data, scale = codes(m, 256), scales(rows, 2)
    back = to_deepseek_v3(from_deepseek_v3(data, scale))
    assert back[0] is data
    assert back[1] is scale


def test_torch_float8_buffers_are_wrapped_zero_copy() -> None:
    torch = pytest.importorskip("torch")
    data = torch.from_numpy(codes(200, 130)).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(scales(2, 2))
    w = from_deepseek_v3(data, scale)
    assert w.data is data
    assert w.scale is scale
    assert w.framework == "torch"


def test_leading_axes_are_experts() -> None:
    data, scale = codes(4, 256, 256), scales(4, 2, 2)
    w = from_deepseek_v3(data, scale)
    assert w.layout == breccia.PerBlockMN(128, 128)
    alone = from_deepseek_v3(data[2], scale[2])
    assert breccia.dequantize(w)[2].tobytes() == breccia.dequantize(alone).tobytes()


def test_a_single_row_is_an_activation_unless_block_m_is_given() -> None:
    """Both give the same values: the only tile is the only row."""
    data, scale = codes(1, 256), scales(1, 2)
    row, tile = from_deepseek_v3(data, scale), from_deepseek_v3(data, scale, block_m=128)
    assert row.recipe == from_deepseek_v3(data, scale, block_m=1).recipe == breccia.Float8BlockScaling()
    assert tile.recipe == breccia.Float8BlockScaling(block_m=128)
    assert breccia.dequantize(row).tobytes() == breccia.dequantize(tile).tobytes()


def test_block_sizes_and_e5m2_can_be_given() -> None:
    w = from_deepseek_v3(codes(8, 64), scales(2, 2), block_k=32, block_m=4, fp8_format="E5M2")
    assert w.recipe == breccia.Float8BlockScaling("E5M2", 32, 4)


@pytest.mark.parametrize(
    ("framework", "native"),
    [("numpy", False), ("torch", False), ("torch", True), ("jax", False), ("jax", True), ("mlx", False)],
)
def test_e8m0_scales_are_converted_to_fp32_exactly(framework: str, native: bool) -> None:
    where = {"numpy": ("numpy", "asarray"), "torch": ("torch", "from_numpy")}
    where |= {"jax": ("jax.numpy", "asarray"), "mlx": ("mlx.core", "array")}
    module, convert = where[framework]
    array = getattr(pytest.importorskip(module), convert)
    scale = array(np.array([[0, 1, 126, 127], [128, 200, 254, 255]], np.uint8))
    if native:
        scale = ops_of(scale).from_numpy(ops_of(scale).to_numpy(scale), "float8_e8m0fnu")
    w = from_deepseek_v3(array(codes(256, 512)), scale)
    assert w.recipe == breccia.Float8BlockScaling(block_m=128, power_of_two_scale=True)
    assert str(w.scale.dtype).rpartition(".")[2] == "float32"
    powers = [[2.0**-127, 2.0**-126, 0.5, 1.0], [2.0, 2.0**73, 2.0**127, np.nan]]
    np.testing.assert_array_equal(np.array(w.scale.tolist()), powers)


def test_scales_of_another_shape_are_refused_with_both_valid_shapes() -> None:
    with pytest.raises(breccia.DialectError) as refused:
        from_deepseek_v3(codes(576, 7168), scales(4, 56))
    for said in (
        "(576, 7168)",
        "(576, 56) (one per 1 x 128)",
        "(5, 56) (one per 128 x 128)",
        "got (4, 56)",
        "weight_block_size",
    ):
        assert said in str(refused.value)
    assert refused.value.found["expected"] == ((576, 56), (5, 56))
    with pytest.raises(breccia.DialectError, match=r"needs scales of shape \(5, 56\) \(one per 128 x 128\); got \(576, 56\)"):
        from_deepseek_v3(codes(576, 7168), scales(576, 56), block_m=128)
    with pytest.raises(breccia.DialectError, match=r"got \(56, 5\).*not transposed"):
        from_deepseek_v3(codes(576, 7168), scales(5, 56).T)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_scales_of_another_dtype_are_refused(dtype: Any) -> None:
    with pytest.raises(
        breccia.DialectError, match=f"is float32, or E8M0 as uint8 or float8_e8m0fnu; got {np.dtype(dtype).name}"
    ):
        from_deepseek_v3(codes(4, 128), np.ones((4, 1), dtype))


def test_codes_of_another_dtype_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(
        breccia.DialectError, match=r"uint8 or float8_e4m3fn; got float8_e4m3fnuz\. Codes of another dtype decode to"
    ):
        from_deepseek_v3(codes(4, 128).view(ml_dtypes.float8_e4m3fnuz), scales(4, 1))
    with pytest.raises(breccia.DialectError, match=r"data is \(\.\.\., M, K\); got shape \(128,\)"):
        from_deepseek_v3(codes(128), scales(1))


def test_tensors_of_other_recipes_are_refused_with_the_call_that_converts_them() -> None:
    x = RNG.standard_normal((4, 256)).astype(np.float32)
    other = breccia.cast(x, breccia.MXFP8BlockScaling())
    with pytest.raises(breccia.DialectError) as refused:
        to_deepseek_v3(other)
    assert isinstance(refused.value, NotImplementedError)  # what breccia 0.1 raised
    assert "this one is 'mxfp8'" in str(refused.value)
    assert "breccia.requantize(scaled, breccia.Float8BlockScaling(block_m=128))" in str(refused.value)
    to_deepseek_v3(breccia.requantize(other, breccia.Float8BlockScaling(block_m=128)))

    turned = breccia.cast(x, breccia.Float8BlockScaling()).mT
    with pytest.raises(breccia.DialectError, match=r"blocks along the last axis; this tensor along axis -2\. Pass its \.mT"):
        to_deepseek_v3(turned)
    to_deepseek_v3(turned.mT)


def test_scales_that_deepseek_would_misread_are_refused() -> None:
    data, recipe = codes(4, 256), breccia.Float8BlockScaling()
    per_row = breccia.from_buffer(data, scales(4, 1), recipe, breccia.PerChannel())
    half = breccia.from_buffer(data, scales(4, 2).astype(np.float16), recipe, breccia.PerBlockK(128))
    for wrong, said in ((per_row, r"float32 scales of shape \(4, 1\)"), (half, r"float16 scales of shape \(4, 2\)")):
        with pytest.raises(breccia.DialectError, match=rf"has float32 scales of shape \(4, 2\) .*it has {said}"):
            to_deepseek_v3(wrong)
        to_deepseek_v3(breccia.cast(breccia.dequantize(wrong), breccia.Float8BlockScaling(block_m=128)))


def test_a_checkpoint_weight_round_trips_through_a_file(tmp_path: Any) -> None:
    stock = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    data, scale = codes(200, 300), scales(2, 3)
    stored = {"w.weight": torch.from_numpy(data).view(torch.float8_e4m3fn), "w.weight_scale_inv": torch.from_numpy(scale)}
    stock.save_file(stored, tmp_path / "f")
    with pytest.warns(breccia.DialectWarning, match="w.weight_scale_inv, w.weight are codes and scales of another program"):
        loaded = breccia.bridges.load_safetensors(tmp_path / "f")
    w = from_deepseek_v3(loaded["w.weight"], loaded["w.weight_scale_inv"])
    expected = decoded(data) * np.repeat(np.repeat(scale, 128, 0)[:200], 128, 1)[:, :300]
    assert breccia.dequantize(w).tobytes() == expected.tobytes()
