"""Compiled products that round activations, to INT8 in groups or to BF16: their bounds, bits and limits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import Device
from breccia.codecs import E2M1, E5M2, E8M0, F16, F32, INT4, INT8, MXINT8, NF4, UINT4, UINT8, Lookup
from breccia.formats import TENSOR, Format, Level
from breccia_native import availability

if reason := availability.missing_products(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

import ml_dtypes
from native_weights import FORMATS as EVERY
from native_weights import check_bound
from weights import replaced, tensor

from breccia_native import facts, products
from breccia_native import matmul as native
from breccia_native.weights import weight_of

#: Formats of small integers and of BF16 numbers, with the group that INT8 activations share a scale in.
GROUPS = {
    "int4": 128, "int4-32": 32, "int4-row": 128, "int4-tensor": 128, "uint4-zero-128": 128, "uint4-zero-16": 16,
    "mxfp4": 32, "nvfp4": 16, "nvfp4-divisor": 16, "nvfp4-amax": 16, "e2m1-divisor-8": 8, "int8": 32,
    "int8-row": 128, "int8-zero": 32,
}  # fmt: skip
#: Formats of products, and a zero-point of signed codes of 8 bits, and powers of two of other codes.
FORMATS = {
    **EVERY,
    "int8-zero": Format(INT8, (Level(F32, (1, 32)),), "zero_point"),
    "e5m2-e8m0": Format(E5M2, (Level(E8M0, (1, 32)),)),
    "mxint8": Format(MXINT8, (Level(E8M0, (1, 32)),)),
}
EIGHT = ["e4m3-block", "e4m3-row", "e5m2-tensor", "mxfp8", "mxfp8-16", "uint8-zero", "mxfp6-e2m3", "mxfp6-e3m2"]
NARROW = ["uint3-zero-32", "uint5-zero-8", "int3-row", "table3-32"]
BRAIN = [*(name for name in GROUPS if name != "int8-zero"), *EIGHT, *NARROW]
#: The instruction sets that multiply BF16 activations in other orders: up to 4 rows by codes in registers; by matrices.
STREAMING, MATRICES = "avx512_vbmi", "amx"
#: Around panels of 12 and 16 rows, and beyond the most for which codes are decoded in registers.
ROWS = (1, 2, 5, 11, 12, 13, 17, 25, 33, 65)
#: N around 4 rows; K around chunks of 128 codes and vectors of 32.
FEW = ((1, 32), (3, 33), (4, 63), (5, 127), (9, 128), (8, 129), (7, 159), (33, 256), (2, 640), (6, 1021))
SHAPES = ((1, 32), (31, 128), (33, 129), (7, 159), (65, 520), (36, 1021))


def by_every_instruction_set(x: np.ndarray, st: breccia.ScaledTensor, mode: int, named: bool = True) -> list[np.ndarray]:
    """The products that may differ in bits: one by all instruction sets, since those without the instructions emulate them, and
    others by those which sum in another order: up to 4 rows in registers, and for mode BF16 matrices.

    named: whether `matmul` multiplies this weight in that mode.
    """
    n, k = st.shape
    weight = weight_of(st, n, k)
    assert native._supports(st, weight, mode, k) is named
    found = dict[str, np.ndarray]()
    for name in products.use():
        products.use(name)
        y = np.empty((len(x), n), np.float32)
        assert native._multiplied(x, weight, y, k, mode), "beyond the limits"
        found[name] = y
    products.use(products.use()[0])
    few = len(x) <= 4
    apart = mode == facts.BF16_MODE and few and weight.kind != products.kinds().index("u8")
    integers = mode == facts.INT8 and few  # in short blocks
    orders = {MATRICES: mode == facts.BF16_MODE or integers, STREAMING: apart or integers}
    others = [found.pop(name) for name, other in orders.items() if other and name in found]
    same = [np.where(np.isnan(y), np.float32(np.nan), y) for y in found.values()]  # NaNs may have any sign and payload
    for other in same[1:]:
        np.testing.assert_array_equal(other.view(np.uint32), same[0].view(np.uint32))
    return [same[0], *others]


def check_int8(found: np.ndarray, x: np.ndarray, w: np.ndarray, q: int) -> None:
    """The bound that `matmul_int8` documents: rounding of activations, then K / q + 5 roundings in FP32."""
    k = x.shape[1]
    padded = np.zeros((len(x), -(-k // q) * q), np.float32)
    padded[:, :k] = np.abs(x)
    scale = padded.reshape(len(x), -1, q).max(axis=-1) / np.float32(127)
    error = np.repeat((0.5 + 2.0**-15) * scale.astype(np.float64), q, axis=1)[:, :k]
    a, b = x.astype(np.float64), np.abs(w.astype(np.float64)).T
    n = (-(-k // q) + 5) * 2.0**-24
    bound = error @ b + n / (1 - n) * ((np.abs(a) + error) @ b)
    worst = np.max(np.abs(found - a @ w.astype(np.float64).T) / bound)
    assert worst <= 1, f"the error is {worst:.3g} times the bound"


def drawn(m: int, k: int, seed: int) -> np.ndarray:
    """Normal numbers of very different magnitudes in each group."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-12, 12, (m, k))).astype(np.float32)


@pytest.mark.parametrize("name", GROUPS)
def test_int8_activations_are_within_their_bound(name: str) -> None:
    for i, (n, k) in enumerate(SHAPES):
        st = tensor(FORMATS[name], n, k, i)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        for m in ROWS[i % 2 :: 2]:
            x = drawn(m, k, m)
            q = GROUPS[name] if st.layout.block(st.axis)[1] not in (None, *range(k, 9999)) else 128
            for found in by_every_instruction_set(x, st, facts.INT8):
                check_int8(found, x, w, q)


@pytest.mark.long
@pytest.mark.parametrize("name", BRAIN)
def test_bf16_activations_keep_the_bound_of_fp32_accumulation(name: str) -> None:
    for i, (n, k) in enumerate(SHAPES):
        st = tensor(FORMATS[name], n, k, i)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        for m in ROWS[i % 2 :: 2]:
            x = drawn(m, k, m)
            rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
            found, again = (by_every_instruction_set(y, st, facts.BF16_MODE) for y in (x, rounded))
            for y, same in zip(found, again, strict=True):
                check_bound(y, rounded, w)
                np.testing.assert_array_equal(y, same)


@pytest.mark.parametrize("name", BRAIN)
def test_few_rows_of_bf16_activations_keep_the_bound_of_fp32_accumulation(name: str) -> None:
    """One large product and many small ones, and sizes around 4 rows of either operand, vectors and chunks."""
    for i, (n, k) in enumerate(FEW):
        st = tensor(FORMATS[name], n, k, i)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        for m in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17):
            x = np.random.default_rng(m).standard_normal((m, k)).astype(ml_dtypes.bfloat16)
            x[:, 0] = 4096
            for y in by_every_instruction_set(x, st, facts.BF16_MODE):
                check_bound(y, x.astype(np.float32), w)


def test_every_code_is_multiplied_as_its_value() -> None:
    """Rows of one code each: codes of 8 bits are found in tables by their magnitudes, and -128 has none."""
    for name in ("int4", "mxfp4", "e4m3-row", "e5m2-tensor", "mxfp6-e2m3", "mxfp6-e3m2", "int8", "int8-row"):
        element = FORMATS[name].element
        values = [element.value(code) for code in range(1 << element.bits)]
        codes = [code for code, value in enumerate(values) if np.isfinite(value)]
        n, k = len(codes), 256
        st = tensor(FORMATS[name], n, k)
        data = {4: np.array([code * 17 for code in codes]), 8: np.array(codes)}.get(element.bits)
        if data is not None:
            data = np.repeat(data.astype(np.uint8)[:, None], st.data.shape[1], axis=1)
        else:
            words = np.array(codes, np.uint32) * (1 + 64 + 4096 + 262144)
            data = np.tile(np.stack([words & 255, words >> 8 & 255, words >> 16], axis=-1).astype(np.uint8), k // 4)
        st = replaced(st, data=data)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        x = np.zeros((2, k), ml_dtypes.bfloat16)
        x[0, 200] = x[1, 7] = 2
        for y in by_every_instruction_set(x, st, facts.BF16_MODE):
            np.testing.assert_array_equal(y, x.astype(np.float32) @ w.T)


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 50, 130])
def test_nan_in_codes_scales_or_bf16_activations_makes_nan_where_it_should(rows: int) -> None:
    x = drawn(rows, 256, 0).astype(ml_dtypes.bfloat16)
    for name, part in (("mxfp8", "data"), ("e5m2-tensor", "data"), ("mxfp4", "scale"), ("nvfp4", "scale"), ("int8", "scale")):
        st = tensor(FORMATS[name], 37, 256)
        array = getattr(st, part).copy()
        array[35, -1] = np.nan if array.dtype.kind == "f" else {"mxfp4": 255}.get(name, 127)
        st = replaced(st, **{part: array})
        d = breccia.dequantize(st, prefer="reference.dequantize")
        assert np.isnan(d).any(axis=1).tolist() == [n == 35 for n in range(37)]
        y = x.copy()
        for found in by_every_instruction_set(y, st, facts.BF16_MODE):
            check_bound(found, y.astype(np.float32), d)
        y[rows - 1, 100] = np.nan
        for found in by_every_instruction_set(y, st, facts.BF16_MODE):
            assert np.isnan(found[rows - 1]).all() and np.isfinite(np.delete(found[: rows - 1], 35, axis=1)).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp6-e2m3", "mxfp6-e3m2", "e5m2-e8m0", "mxint8"])
def test_powers_of_two_of_any_size_keep_the_bound_and_their_bits_on_any_number_of_threads(name: str) -> None:
    """Those from 2^-30 to 2^6 may be added to exponents, where all of 32 rows are; 1100 rows are multiplied 128 at a time."""
    st, before = tensor(FORMATS[name], 1100, 300), breccia.get_num_threads()
    scale = np.random.default_rng(0).integers(127 - 30, 127 + 7, st.scale.shape).astype(np.uint8)
    scale[70], scale[161, -1], scale[162, 0] = 127 + 7, 127 - 31, 127 - 60
    scale[1000], scale[1001] = 127 - 30, 127 + 6
    st = replaced(st, scale=scale)
    w, weight = breccia.dequantize(st, prefer="reference.dequantize"), weight_of(st, 1100, 300)
    try:
        for m in (16, 50, 130):
            x = np.random.default_rng(m).standard_normal((m, 300)).astype(ml_dtypes.bfloat16)
            x[3], x[4] = 2.0**-60, 2.0**90
            for found in by_every_instruction_set(x, st, facts.BF16_MODE):
                check_bound(found, x.astype(np.float32), w)
            bits = list[np.ndarray]()
            for number in (1, 2, 3):
                breccia.set_num_threads(number)
                y = np.empty((m, 1100), np.float32)
                assert native._multiplied(x, weight, y, 300, facts.BF16_MODE)
                bits.append(y.view(np.uint32))
            np.testing.assert_array_equal(bits[1], bits[0])
            np.testing.assert_array_equal(bits[2], bits[0])
    finally:
        breccia.set_num_threads(before)


def test_bf16_activations_beyond_the_limits_are_left_to_fp32() -> None:
    for name in ("nvfp4", "mxfp8", "int8"):
        st = tensor(FORMATS[name], 8, 64)
        d, weight = breccia.dequantize(st), weight_of(st, 8, 64)
        for special in (np.inf, 2.0**101, 2.0**-61, 2.0**-130):
            x = np.ones((2, 64), ml_dtypes.bfloat16)
            x[1, 63] = special
            assert not native._multiplied(x, weight, np.empty((2, 8), np.float32), 64, facts.BF16_MODE)
            with np.errstate(all="ignore"):
                found, expected = native.matmul(x, st.mT), x.astype(np.float32) @ d.T
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_planted_kernels_break_the_bounds() -> None:
    """INT8 with one scale for each row, INT8 that cuts off, BF16 that cuts off, and decoded weights rounded to BF16."""
    st = breccia.cast(np.ones((16, 512), np.float32), "mxfp4")
    w = breccia.dequantize(st)
    uneven = np.full((4, 512), 0.3, np.float32)
    uneven[:, 0] = 100
    high = np.random.default_rng(0).integers(0, 126, (4, 512)).astype(np.float32) + np.float32(0.9)
    high[:, ::32] = 127
    for x, planted in ((uneven, np.rint(uneven / uneven.max() * 127) / 127 * uneven.max()), (high, np.trunc(high))):
        check_int8(by_every_instruction_set(x, st, facts.INT8)[0], x, w, 32)
        with pytest.raises(AssertionError, match="times the bound"):
            check_int8(planted @ w.T, x, w, 32)
    cut = (high.view(np.uint32) & 0xFFFF0000).view(np.float32)
    with pytest.raises(AssertionError, match="times the bound"):
        check_bound(cut @ w.T, high.astype(ml_dtypes.bfloat16).astype(np.float32), w)
    st, x = tensor(FORMATS["nvfp4"], 8, 512), np.random.default_rng(0).standard_normal((4, 512)).astype(ml_dtypes.bfloat16)
    w, x = breccia.dequantize(st), x.astype(np.float32)
    with pytest.raises(AssertionError, match="times the bound"):
        check_bound(x @ w.astype(ml_dtypes.bfloat16).astype(np.float32).T, x, w)


def test_nan_and_inf_in_int8_activations_give_nan_in_their_row() -> None:
    st = tensor(FORMATS["int4"], 20, 300)
    for special in (np.nan, np.inf):
        x = drawn(3, 300, 0)
        x[1, 299] = special
        y = np.empty((3, 20), np.float32)
        weight = weight_of(st, 20, 300)
        done = native._multiplied(x, weight, y, 300, facts.INT8)
        if np.isinf(special):  # beyond the limits: the product in FP32 has Inf
            assert not done
            continue
        assert done and np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_groups_of_tiny_activations_count_as_zero() -> None:
    st = tensor(FORMATS["mxfp4"], 20, 64)
    x = np.full((2, 64), 2.0**-110, np.float32)
    x[1, 40] = 1
    for found in by_every_instruction_set(x, st, facts.INT8):
        assert not found[0].any() and found[1].any()


def test_bf16_products_that_could_be_subnormal_are_left_to_fp32() -> None:
    st = tensor(FORMATS["mxfp4"], 20, 64)
    x = np.full((2, 64), 2.0**-61, np.float32)
    assert not native._multiplied(x, weight_of(st, 20, 64), np.empty((2, 20), np.float32), 64, facts.BF16_MODE)
    check_bound(native._of_rows(x, st, facts.BF16_MODE), x, breccia.dequantize(st))


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_kernels_that_round_run_only_where_they_are_named(mode: str) -> None:
    rng = np.random.default_rng(0)
    st = breccia.cast(rng.standard_normal((40, 256)).astype(np.float32), "int4")
    x, bias = rng.standard_normal((2, 9, 256)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    d, name = breccia.dequantize(st), f"native.matmul_{mode}"
    assert "opt-in" in str(breccia.explain("matmul", x, st.mT))
    check_bound(breccia.matmul(x, st.mT), x, d)
    exact = x.astype(np.float64) @ d.T.astype(np.float64)
    named = breccia.matmul(x, st.mT, prefer=name)
    assert 1e-4 < np.abs(named - exact).max() / np.abs(exact).max() < 2e-2
    left = breccia.matmul(st, x[0].T, prefer=name)
    np.testing.assert_array_equal(left, breccia.matmul(x[0], st.mT, prefer=name).T)
    out = np.empty((2, 9, 40), np.float16)
    breccia.matmul(x, st.mT, bias=bias, out=out, out_dtype="float16", prefer=name)
    np.testing.assert_array_equal(out, (named + bias).astype(np.float16))
    torch = pytest.importorskip("torch")
    w = breccia.cast(torch.from_numpy(d), "int4")
    got = breccia.matmul(torch.from_numpy(x), w.mT, prefer=f"torch.cpu.matmul_{mode}")
    again = breccia.matmul(x, breccia.cast(d, "int4").mT, prefer=name)
    np.testing.assert_array_equal(got.numpy(), again)


def test_pairs_of_products_by_large_codes_do_not_overflow() -> None:
    """In 16 bits the sum of two products by codes of up to 127 has room only where they keep their sign."""
    wide = Lookup("wide", 4, None, "", (*range(-127, -7, 17), 0.0, *range(25, 128, 17)))
    for block in (8, 16, 32, 128):
        st = tensor(Format(wide, (Level(F32, (1, block)),)), 37, 256)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        for m in (1, 3, 7, 20):
            x = np.sign(drawn(m, 256, m)) * np.float32(3)
            for found in by_every_instruction_set(x, st, facts.INT8, named=False):
                check_int8(found, x, w, block)


def test_without_instructions_bf16_activations_are_rounded_and_multiplied_in_fp32() -> None:
    st, x = tensor(FORMATS["nvfp4"], 40, 256), drawn(7, 256, 0)
    x[3, 5] = np.nan
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    try:
        products.use("portable")
        for rows in (slice(0, 3), slice(3, 4), slice(4, 7)):
            found = native.matmul_bf16(x[rows], st.mT)
            np.testing.assert_array_equal(found, native.matmul(rounded[rows], st.mT))
            again = native.matmul_bf16(x[rows].astype(ml_dtypes.bfloat16), st.mT)
            np.testing.assert_array_equal(again, found)
    finally:
        products.use(products.use()[0])


@pytest.mark.parametrize(
    ("mode", "fmt", "reason"),
    [
        ("int8", Format(NF4, (Level(F32, (1, 64)),)), "NF4 codes are not small integers times a power of two"),
        ("int8", FORMATS["mxfp8"], "E4M3 codes are not small integers"),
        ("int8", Format(UINT8, (Level(F16, (1, 32)),), "zero_point"), "UINT8 codes are not small integers"),
        ("int8", Format(NF4, (Level(F32, (1, 64)),), "bias"), "NF4 codes are not small integers"),
        ("bf16", FORMATS["uint4-bias-64"], "it does not support biases"),
        ("bf16", FORMATS["nf4"], "NF4 codes are not BF16 numbers"),
        ("bf16", FORMATS["ue4m3"], "UE4M3 codes are not BF16 numbers"),
        ("bf16", Format(INT4, (Level(F32, (1, 12)),)), "blocks of 12 are not a multiple of 8"),
        ("int8", Format(INT8, (Level(F32, (1, 20)),)), "blocks of 20 are not a multiple of 8"),
    ],
)
def test_explain_says_which_codes_cannot_be_multiplied_as_stored(mode: str, fmt: Format, reason: str) -> None:
    st, x = tensor(fmt, 8, 64), np.ones((2, 64), np.float32)
    with pytest.raises(breccia.NoKernelError, match=reason):
        breccia.matmul(x, st.mT, prefer=f"native.matmul_{mode}")


def test_zero_points_whose_differences_from_codes_are_no_bf16_numbers_are_left_to_fp32() -> None:
    """Signed codes of 8 bits less zero-points of up to 255 need 9 bits."""
    st, x = tensor(FORMATS["int8-zero"], 8, 64), drawn(3, 64, 0)
    assert st.zero_point is not None and st.zero_point.dtype == np.uint8
    assert not native._supports(st, weight_of(st, 8, 64), facts.BF16_MODE, 64)
    check_bound(native._of_rows(x, st, facts.BF16_MODE), x, breccia.dequantize(st))


@pytest.mark.parametrize(("element", "zero"), [(UINT4, 16), (UINT4, 255), (INT4, 255), (INT4, -8)])
def test_zero_points_whose_differences_from_4_bit_codes_may_need_9_bits_are_left_to_fp32(element: Any, zero: int) -> None:
    st = tensor(Format(element, (Level(F32, (1, 32)),), "zero_point"), 40, 96)
    assert st.zero_point is not None
    zeros = np.ones(st.scale.shape, np.int8 if zero < 0 else np.uint8)
    zeros[17, 1] = zero
    st = st.from_parts(st.data, st.scale, st.recipe, st.layout, zeros)
    for rows in (1, 4, 9, 70):
        x = drawn(rows, 96, 0).astype(ml_dtypes.bfloat16)
        for name in products.use():
            products.use(name)
            assert not native._multiplied(x, weight_of(st, 40, 96), np.empty((rows, 40), np.float32), 96, facts.BF16_MODE)
            check_bound(native._of_rows(x, st), x.astype(np.float32), breccia.dequantize(st))
        products.use(products.use()[0])


def test_zero_points_that_are_not_integers_are_left_to_fp32() -> None:
    st = tensor(Format(UINT4, (Level(F32, (1, 32)),), "zero_point"), 8, 64)
    st = st.from_parts(st.data, st.scale, st.recipe, st.layout, np.full(st.scale.shape, 7.3, np.float16))
    x = drawn(3, 64, 0)
    for mode in (facts.INT8, facts.BF16_MODE):
        check_bound(native._of_rows(x, st, mode), x, breccia.dequantize(st))


def test_bf16_activations_take_the_faster_kernel_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    st = breccia.cast(torch.randn(48, 320, generator=torch.Generator().manual_seed(0)), "nvfp4")
    d, modes = breccia.dequantize(st).numpy(), list[int]()
    from breccia_torch import cpu

    prepare = native.products.prepare

    def seen(*arguments: Any) -> Any:
        modes.append(arguments[5])
        return prepare(*arguments)

    monkeypatch.setattr(native.products, "prepare", seen)
    monkeypatch.setattr(native.products, "fast", lambda *about: about[-1] > 4)
    cpu._products.clear()
    for rows, mode in ((4, 0), (5, 2), (130, 2)):
        for _ in range(2):
            x = torch.randn(rows, 320).bfloat16()
            check_bound(breccia.matmul(x, st.mT, "float32").numpy(), x.float().numpy(), d)
        assert modes.pop() == mode and not modes  # prepared once
    monkeypatch.setattr(native.products, "fast", lambda *about: False)
    cpu._products.clear()
    breccia.matmul(x, st.mT)
    assert modes == [0]
    cpu._products.clear()


def test_bf16_activations_of_any_rows_are_fast_where_codes_are_decoded_in_registers() -> None:
    kinds = {name: number for number, name in enumerate(products.kinds())}

    def fast(kind: str, role: int, m: int, block: int = 32, scale: str = "f16", mode: int = facts.BF16_MODE) -> bool:
        return products.fast(mode, kinds[kind], 4 if kind == "table4" else 8, kinds[scale], role, block, 256, m)

    paired = ("table4", "e4m3", "e5m2", "e3m2", "i8")
    for name in products.use():
        products.use(name)
        many = fast("table4", 1, 9)
        assert [fast(kind, 0, 1) for kind in paired] == [many and name == STREAMING] * 5
        assert [fast(kind, 0, 5) for kind in paired] == [many and name in (STREAMING, MATRICES)] * 5
        assert fast("u8", 1, 9) == (many and name != MATRICES)
        if name == MATRICES:
            assert not fast("table4", 0, 4) and not fast("table4", 0, 99, 16), "few rows, and groups of less than 32"
            assert fast("table4", 0, 5, 16, "e4m3") and fast("table4", 0, 5, 256), "scales by codes, and rows of one group"
        for kind, role in (("u8", 0), ("table4", 2), ("i8", 1)):
            assert not fast(kind, role, 8)
        assert not fast("table4", 0, 9, mode=facts.FP32) and not fast("table4", 0, 9, mode=3)
    products.use(products.use()[0])


@pytest.mark.skipif(
    "amx_bf16" not in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""),
    reason="this processor has no matrix unit, or its system does not use it",
)
def test_processors_with_a_matrix_unit_use_it() -> None:
    assert products.use()[0] == MATRICES


def test_every_table_of_small_integers_is_found() -> None:
    """Formats of INT8 products: a unit of up to 16 makes the values whole."""
    x = np.ones((1, 128), np.float32)
    for fmt, supported in ((FORMATS["int4"], True), (FORMATS["mxfp4"], True), (FORMATS["nf4"], False)):
        weight, to = weight_of(tensor(fmt, 8, 128), 8, 128), np.empty((1, 8), np.float32)
        if supported:
            assert native._multiplied(x, weight, to, 128, facts.INT8)
        else:
            with pytest.raises(ValueError, match="codes that it multiplies exactly"):
                native._multiplied(x, weight, to, 128, facts.INT8)
    assert facts.inexact(facts.INT8, Format(E2M1, (Level(F32, TENSOR),))) is None


@pytest.mark.parametrize(
    "name", ["int4", "nvfp4", "int8", "uint4-zero-16", "uint4-zero-128", "e4m3-block", "int3-row", "table3-32"]
)
def test_bits_of_rounded_products_do_not_depend_on_the_number_of_threads(name: str) -> None:
    n, k = 1300, 620
    st, before = tensor(FORMATS[name], n, k), breccia.get_num_threads()
    w, weight = breccia.dequantize(st, prefer="reference.dequantize"), weight_of(st, n, k)
    try:
        for m, mode in itertools.product((3, 12, 30, 130), (facts.INT8, facts.BF16_MODE)):
            if not native._supports(st, weight, mode, k):
                continue
            x, found = drawn(m, k, m), list[np.ndarray]()
            for number in (1, 2, 3):
                breccia.set_num_threads(number)
                y = np.empty((m, n), np.float32)
                assert native._multiplied(x, weight, y, k, mode)
                found.append(y.view(np.uint32))
            np.testing.assert_array_equal(found[1], found[0])
            np.testing.assert_array_equal(found[2], found[0])
            if mode == facts.BF16_MODE:
                check_bound(found[0].view(np.float32), x.astype(ml_dtypes.bfloat16).astype(np.float32), w)
    finally:
        breccia.set_num_threads(before)
