"""Components as callers have them: of any byte order, address and floating dtype, on every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from in_frameworks import convert, moved, ops_for

import breccia
from breccia import ScaledTensor
from breccia.kernels import reference

#: FP32, FP16 and BF16 scales; zero-points and biases; one scale, one per row, per block; 8-bit scales under a global one.
SPECS = (
    "fp8_current",
    "int8",
    "fp8_block",
    "nf4,scale_dtype=fp16",
    "int4,scale_dtype=bf16",
    "mlx_affine",
    "int4_bias",
    "nvfp4",
)
PARTS = ("scale", "zero_point", "global_scale")


def values(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def swapped(a: Any) -> Any:
    """The same numbers, of the other byte order."""
    return a.astype(a.dtype.newbyteorder(">"))


def shifted(a: Any) -> Any:
    """The same numbers at an address that no number of more than one byte has in C."""
    raw = np.frombuffer(b"\x01" + a.tobytes(), a.dtype, offset=1).reshape(a.shape)
    assert not raw.flags.aligned
    return raw


def with_part(st: ScaledTensor, name: str, part: Any) -> ScaledTensor:
    parts = {each: getattr(st, each) for each in ("data", *PARTS)} | {name: part}
    return ScaledTensor(
        parts["data"], parts["scale"], st.recipe, st.layout, parts["zero_point"], parts["global_scale"], st.axis, st.shape
    )


def wide_parts(st: ScaledTensor) -> dict[str, Any]:
    """The components of more than one byte an item."""
    parts = {name: getattr(st, name) for name in PARTS}
    return {name: part for name, part in parts.items() if part is not None and part.dtype.itemsize > 1}


def close(product: Any, x: Any, decoded: Any) -> None:
    """The product in FP32: each of its K sums has at most K + 2 roundings of terms of that size."""
    bound = (x.shape[-1] + 2) * 2.0**-24 * (np.abs(x) @ np.abs(decoded).T)
    assert (np.abs(product - x.astype(np.float64) @ decoded.astype(np.float64).T) <= bound).all()


@pytest.mark.parametrize("change", [swapped, shifted])
@pytest.mark.parametrize("spec", SPECS)
def test_every_op_reads_components_of_any_byte_order_and_address(spec: str, change: Any) -> None:
    st, x = breccia.cast(values(0, 64, 256), spec), values(1, 3, 256)
    decoded = breccia.dequantize(st)
    for name, part in wide_parts(st).items():
        other = with_part(st, name, change(part))
        assert other.digest() == st.digest()
        for dtype in ("float32", "float16"):
            assert np.array_equal(breccia.dequantize(other, out_dtype=dtype), breccia.dequantize(st, out_dtype=dtype))
        assert breccia.bytes_equal(breccia.requantize(other, "mxfp8"), breccia.requantize(st, "mxfp8"))
        for rows in (x, np.tile(x, (30, 1))):
            assert np.array_equal(breccia.matmul(rows, other.mT), breccia.matmul(rows, st.mT))
        assert np.array_equal(breccia.matmul(other, x.T), breccia.matmul(st, x.T))
        ends, few = np.array([1, 3], np.int32), (breccia.stack([each, each]) for each in (other, st))
        of_other, of_st = (breccia.grouped_matmul(x, each.mT, ends) for each in few)
        assert np.array_equal(of_other, of_st)
        close(breccia.matmul(x, other.mT), x, decoded)


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_scale_of_another_float_dtype_is_read_as_the_numbers_it_holds(spec: str, framework: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    plain, x = breccia.cast(values(0, 64, 256), spec), values(1, 3, 256)
    for name, part in wide_parts(plain).items():
        if name == "global_scale":
            continue  # FP32 alone
        numbers = part.view(ml_dtypes.bfloat16) if part.dtype == np.uint16 else part
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            given = numbers.astype(dtype)
            decoded, ops = reference.dequantize(with_part(plain, name, given)), ops_for(framework)
            narrow = given.dtype == ml_dtypes.bfloat16 and framework != "numpy"
            part = ops.from_numpy(given.view(np.uint16), "bfloat16") if narrow else ops.from_numpy(given)
            there, rows, columns = (
                with_part(moved(plain, framework), name, part),
                convert(framework, x),
                convert(framework, x.T),
            )
            assert np.array_equal(ops.to_numpy(breccia.dequantize(there)), decoded)
            close(ops.to_numpy(breccia.matmul(rows, there.mT)), x, decoded)
            close(ops.to_numpy(breccia.matmul(there, columns)).T, x, decoded)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize("spec", SPECS[:5])
def test_a_supplied_scale_of_any_float_dtype_is_the_number_that_it_holds(spec: str, framework: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, ops = values(0, 64, 256), ops_for(framework)
    scale = breccia.cast(x, spec).scale
    numbers = np.asarray(scale.view(ml_dtypes.bfloat16) if scale.dtype == np.uint16 else scale, np.float32)
    rounded = numbers.astype(ml_dtypes.bfloat16).astype(np.float16).astype(np.float32)  # what all three hold
    expected = breccia.cast(convert(framework, x), spec, scale=convert(framework, rounded))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        given = np.asarray(rounded, dtype)
        narrow = dtype is ml_dtypes.bfloat16 and framework != "numpy"
        part = ops.from_numpy(given.view(np.uint16), "bfloat16") if narrow else ops.from_numpy(given)
        assert breccia.bytes_equal(breccia.cast(convert(framework, x), spec, scale=part), expected)
    with pytest.raises(breccia.UnsupportedError, match="scale= must hold .* got dtype int32"):
        breccia.cast(convert(framework, x), spec, scale=convert(framework, np.ones(scale.shape, np.int32)))


def test_a_repeated_product_of_torch_does_not_take_unaligned_scales_for_the_aligned_ones() -> None:
    torch = pytest.importorskip("torch")
    st, x = moved(breccia.cast(values(0, 64, 256), "nf4"), "torch"), torch.from_numpy(values(1, 3, 256))
    raw = torch.zeros(st.scale.nbytes + 1, dtype=torch.uint8)
    raw[1:] = st.scale.reshape(-1).view(torch.uint8)
    scale = torch.frombuffer(memoryview(raw.numpy())[1:], dtype=torch.float32).reshape(st.scale.shape)
    assert scale.data_ptr() % 4 and torch.equal(scale, st.scale)
    expected = breccia.matmul(x, st.mT)
    assert torch.equal(breccia.matmul(x, with_part(st, "scale", scale).mT), expected)
    assert torch.equal(breccia.matmul(x, st.mT), expected)
    held = torch.frombuffer(bytearray(b"\x01" + x.numpy().tobytes()), dtype=torch.float32, offset=1).reshape(x.shape)
    assert held.data_ptr() % 4 and torch.equal(breccia.matmul(held, st.mT), expected)
