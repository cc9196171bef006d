"""Products through BF16: in Triton's interpreter with torch's FP32 product in place of cuBLAS's, compiled for GPUs that are not
here, and on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from marks import on_cuda, slow_but

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import torch
from triton_casts import DEVICE, ON_GPU
from triton_products import (
    ROUNDOFF,
    call_of,
    captured,
    check,
    compiled,
    declared_here,
    on_another_stream,
    values,
    without_waiting,
)
from triton_products import uneven as numbers
from weights import replaced

import breccia
from breccia import Device
from breccia.backend import E2M1, E4M3, E8M0, F32, INT8, UE4M3, Described, reference
from breccia.dispatch.registry import registry
from breccia.options import product_options
from breccia.testing.laws import products
from breccia.testing.places import Place
from breccia_triton import availability, plugin
from breccia_triton.gemm import contiguous
from breccia_triton.gemm.bf16 import grouped as grouped_bf16
from breccia_triton.gemm.bf16 import matmul as bf16_matmul
from breccia_triton.gemm.bf16 import plans as bf16_plans
from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.launch import compiler
from breccia_triton.launch import device as launch_device

NAME = "triton.matmul_bf16"
pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),  # where there is one, every test runs on it, with cuBLAS
    # Triton's interpreter computes with NumPy, which warns of Inf - Inf and of NaN; GPUs do not.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

#: Every format that the kernel takes, with the least scale byte under which all values are normal numbers: E8M0 byte s is
#: 2^(s - 127), and the least code of E4M3 is 2^-9, of E5M2 2^-16, of E2M3 2^-3, of E3M2 2^-4, of E2M1 2^-1, of MXINT8 2^-6.
LEAST_BYTE = {"mxfp8": 10, "mxfp8,fp8_format=E5M2": 17, "mxfp6": 4, "mxfp6,fp6_format=E3M2": 5, "mxfp4": 2, "mxint8": 7}
NVFP4 = ("nvfp4", "nvfp4,two_level=false", "nvfp4,global_sense=amax", "nvfp4,global_sense=divisor")
SPECS = (*LEAST_BYTE, *NVFP4)
#: The formats; `make test` runs two of them, and `make slow` and GPUs those of other codes.
IN_TURN = slow_but({"mxfp8", "mxfp4"}, LEAST_BYTE)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, multiply BF16 numbers in FP32: torch has no product of BF16 numbers with FP32 results on CPUs."""
    bf16_matmul._calls.clear()
    if not ON_GPU:
        monkeypatch.setattr(bf16_matmul, "multiply", lambda x, y, to: to.copy_(torch.matmul(x.float(), y.float())))


def operand(shape: tuple[int, ...], spec: str, seed: int, axis: int = -1) -> Any:
    """A tensor under a recipe, or an array ("array")."""
    x = numbers(shape, seed)
    return x.bfloat16() if spec == "array" else breccia.cast(x, spec, axis=axis)


def multiplied(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """The kernel's product; it did not pass the call on."""
    bf16_matmul._calls.clear()
    found = bf16_matmul.matmul_bf16(a, b, product_options(out_dtype, bias=bias, out=out))
    assert [isinstance(call, str) for call in bf16_matmul._calls.values()] == [False], list(bf16_matmul._calls.values())
    return found


# ------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("bias", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("out_dtype", ROUNDOFF)
@pytest.mark.parametrize("spec", SPECS)
def test_products_of_every_format_stay_within_the_bound(spec: str, out_dtype: str, bias: str | None) -> None:
    for m, n, k in ((7, 20, 102), (70, 66, 64)):  # partial blocks, groups of codes, and tiles
        a, w = operand((m, k), spec, 1), operand((n, k), spec, 2)
        added = None if bias is None else torch.linspace(-50, 50, n, device=DEVICE).to(getattr(torch, bias))
        check(multiplied(a, w.mT, added, out_dtype), a, w.mT, added)
        x = operand((m, k), "array", 3)
        check(multiplied(x, w.mT, added, out_dtype), x, w.mT, added)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"), list(itertools.product(("mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "array"), repeat=2))[:-1]
)
def test_formats_multiply_in_any_pairing_and_order_of_memory(first: str, second: str) -> None:
    for left, right in (("rows", "rows"), ("view", "across"), ("across", "view")):
        a, b = (operand_in(order, shape, spec) for order, shape, spec in ((left, (24, 72), first), (right, (20, 72), second)))
        check(multiplied(a, b.mT), a, b.mT)
        check(multiplied(a, b.mT, None, "float16"), a, b.mT)


def operand_in(order: str, shape: tuple[int, int], spec: str) -> Any:
    """Rows with blocks along them; the same as a view of columns; or rows with blocks across them."""
    if order == "view":
        return operand(shape[::-1], spec, 5, axis=-2).mT
    return operand(shape, spec, 5, axis=-2 if order == "across" else -1)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("mxfp8", "mxfp8"), ("mxfp4", "nvfp4"), ("array", "mxfp6"), ("nvfp4", "array")])
@pytest.mark.parametrize(
    ("left", "right"), [((2, 3), ()), ((2, 3), (2, 3)), ((), (3,)), ((3,), (1,)), ((1,), (2,)), ((1, 2), (2,))], ids=str
)
def test_leading_axes_are_batches_and_broadcast(first: str, second: str, left: Any, right: Any) -> None:
    a, w = operand((*left, 5, 36), first, 1), operand((*right, 20, 36), second, 2)
    check(multiplied(a, w.mT), a, w.mT)
    bias = torch.linspace(-5, 5, 20, device=DEVICE)
    check(multiplied(a, w.mT, bias, "bfloat16"), a, w.mT, bias)
    columns = operand((*left, 36, 8), first, 3, axis=-2).mT
    check(multiplied(columns, w.mT, bias), columns, w.mT, bias)


@pytest.mark.parametrize("storage", plugin.STORAGES)
@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4"])
def test_scales_are_read_in_every_storage_that_the_casts_write(spec: str, storage: str) -> None:
    a, w = (operand(shape, spec, 1).to_storage(storage) for shape in ((40, 160), (24, 160)))
    check(multiplied(a, w.mT), a.to_plain(), w.to_plain().mT)


def test_operands_in_neither_order_are_copied() -> None:
    a, w = operand((12, 128), "mxfp8", 1)[:, 32:96], operand((3, 40, 64), "mxfp4", 2)[:, 7]
    check(multiplied(a, w.mT), a, w.mT)
    x = numbers((12, 128), 3).bfloat16()[:, ::2]
    check(multiplied(x, w.mT), x, w.mT)


def test_out_receives_the_product_in_place_and_in_strided_memory() -> None:
    for a in (operand((9, 64), "mxfp8", 1), operand((9, 64), "nvfp4", 1)):
        w = operand((24, 64), "mxfp8", 2)
        expected = multiplied(a, w.mT, None, "bfloat16")
        guarded, wide = (torch.full(shape, 7.0, device=DEVICE).bfloat16() for shape in ((11, 24), (9, 40)))
        for out in (guarded[1:10], wide[:, 5:29]):
            assert multiplied(a, w.mT, None, "bfloat16", out) is out
            assert torch.equal(out, expected)
        assert (guarded[0] == 7).all() and (guarded[-1] == 7).all() and (wide[:, 29:] == 7).all()
        with pytest.raises(
            breccia.ShapeError, match=r"out= must have shape \(9, 24\) and dtype bfloat16; got \(9, 24\) and float32"
        ):
            multiplied(a, w.mT, None, "bfloat16", torch.zeros(9, 24, device=DEVICE))


# ------------------------------------------------------------------------------------------------ values as two BF16 numbers

#: Recipes with values of more than 8 significant bits.
LONGER = (
    "fp8_block,block_m=128",
    *slow_but(
        {"int8", "nf4"}, ("fp8_block", "fp8_row", "fp8_current", "int4", "int8", "int4,symmetric=false,signed=false", "nf4")
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("spec", LONGER)
def test_values_of_more_bits_than_bf16_keep_the_bound_as_two_numbers(spec: str) -> None:
    k = bf16_plans.SHORTEST_OF_TWO
    w, gradient = breccia.cast(numbers((k, 136), 1), spec), numbers((24, k), 2).bfloat16()  # blocks of w go across K
    check(multiplied(gradient, w, None, "bfloat16"), gradient, w)
    turned, bias = breccia.cast(numbers((20, k), 3), spec).mT, torch.linspace(-5, 5, 20, device=DEVICE)
    check(multiplied(gradient, turned, bias), gradient, turned, bias)
    mx = operand((24, k), "mxfp8", 4)
    check(multiplied(mx, turned, None, "float16"), mx, turned)
    check(multiplied(turned.mT, mx.mT), turned.mT, mx.mT)


def test_one_rounded_number_violates_the_bound() -> None:
    k = bf16_plans.SHORTEST_OF_TWO
    w, x = breccia.cast(numbers((20, k), 3), "fp8_row").mT, numbers((24, k), 2).bfloat16()
    found = bf16_matmul.matmul_rounded(x, w)
    with pytest.raises(AssertionError, match="times the bound"):
        check(found, x, w)
    size = values(x).abs() @ values(w).abs()
    assert ((found.double() - values(x) @ values(w)).abs() <= (2.0**-8 + 2.0**-14) * size).all()
    exact = operand((20, 64), "nvfp4", 5)
    check(bf16_matmul.matmul_rounded(x[:, :64], exact.mT), x[:, :64], exact.mT)  # values that BF16 holds are not rounded


@pytest.mark.long
def test_inf_nan_and_values_whose_second_number_would_be_subnormal_are_multiplied_in_fp32() -> None:
    k = bf16_plans.SHORTEST_OF_TWO
    w = breccia.cast(numbers((20, k), 3), "fp8_block")
    scale = w.scale.clone()
    scale[3, 1], scale[5, 0], scale[7] = 2.0**-110, float("nan"), float("inf")
    scale[9] = 2.0**119.9  # times 448 it rounds to Inf in BF16
    x = numbers((24, k), 2).bfloat16()
    x[:, :128] = 0
    x[2, 0], x[4, 1], x[6, 2], x[8] = float("inf"), -float("inf"), float("nan"), 2.0**-20
    for b in (replaced(w, scale=scale), w):
        known = values(b)[9].abs().max() < 2.0**127.5
        check(multiplied(x, b.mT) if known else multiplied(x[8:9], b.mT), x if known else x[8:9], b.mT)
    assert multiplied(x, w.mT)[2, :-1].isinf().all()  # the last row of w has zeros


def test_a_flagged_tile_of_a_weight_with_zero_points_is_decoded_with_them() -> None:
    k = bf16_plans.SHORTEST_OF_TWO
    w = breccia.cast(numbers((20, k), 3) + 3, "int4,symmetric=false,signed=false")
    assert w.zero_point is not None and w.zero_point.any()
    x = numbers((24, k), 2).bfloat16()
    x[2, 0] = float("inf")
    check(multiplied(x, w.mT), x, w.mT)


# ------------------------------------------------------------------------------------------------ groups of rows


@pytest.mark.long
@pytest.mark.parametrize("spec", slow_but({"mxfp8"}, ["int4,symmetric=false,signed=false", "mxfp8"]))
def test_groups_of_rows_meet_their_own_matrices_and_other_rows_are_zeros(spec: str) -> None:
    k = bf16_plans.SHORTEST_OF_TWO
    experts = breccia.stack([breccia.cast(numbers((k, 72), n), spec) for n in range(3)])  # blocks go across K
    x, offsets = numbers((150, k), 5).bfloat16(), torch.tensor([70, 70, 130], dtype=torch.int32, device=DEVICE)
    x[75, 3] = float("inf")
    grouped_bf16._calls.clear()
    for b in (experts, breccia.stack([breccia.cast(numbers((72, k), n), spec) for n in range(3)]).mT):
        found = grouped_bf16.grouped_matmul_bf16(x, b, offsets, product_options("bfloat16"))
        for n, (start, end) in enumerate(((0, 70), (70, 70), (70, 130))):
            if end > start:
                check(found[start:end], x[start:end], b[n])
        assert not found[130:].any()
    assert not any(isinstance(call, str) for call in grouped_bf16._calls.values())


# ------------------------------------------------------------------------------------------------ values that are not exact


def with_scale(st: Any, at: tuple[int, ...], byte: int) -> Any:
    """The tensor with another scale byte in one place."""
    scale = st.scale.clone()
    scale.view(torch.uint8)[at] = byte
    return replaced(st, scale=scale)


def flags_of(x: Any, second: bool = False) -> Any:
    """(The flags that the decoding pass writes: whether there is one, and for each line; its BF16 numbers)."""
    given = contiguous.ContiguousOperand(x, second)
    side = bf16_matmul.Decoding(given, bf16_matmul.hardware(x.data.device), 0, False)
    flags = torch.zeros(1 + side.matrices * side.lines, dtype=torch.int32, device=DEVICE)
    found = side(given, flags, launch_device.current_stream(flags.device))
    return flags, found


def planted(spec: str, byte: int) -> tuple[Any, Any]:
    """Operands where a block under a small scale, with the least codes of all, meets large numbers, and no other terms.

    Under E8M0 byte s the terms of row 3 are 2^(s - 127) times the least code times 2^100.
    """
    a, w = breccia.cast(torch.zeros(70, 64, device=DEVICE), spec), torch.zeros(20, 64, device=DEVICE)
    codes = a.data.view(torch.uint8).clone()
    codes[3, : codes.shape[1] // 2] = 0x11 if "4" in spec.partition(",")[0] else 1  # each group begins with the least code
    w[:, :32] = 2.0**100
    return with_scale(replaced(a, data=codes.view(a.data.dtype)), (3, 0), byte), breccia.cast(w, "mxfp8")


@pytest.mark.parametrize("byte", ["0", "1", "3", "below", "least"])
@pytest.mark.parametrize("spec", IN_TURN)
def test_values_that_bf16_does_not_hold_are_multiplied_in_fp32(spec: str, byte: str) -> None:
    least = LEAST_BYTE[spec]
    a, w = planted(spec, {"below": least - 1, "least": least}[byte] if byte.isalpha() else int(byte))
    assert values(a)[3].any()
    check(multiplied(a, w.mT), a, w.mT)
    check(multiplied(a, w.mT, torch.zeros(20, device=DEVICE), "bfloat16"), a, w.mT)
    check(multiplied(w, a.mT), w, a.mT)  # as columns


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_without_mending_such_values_violate_the_bound(out_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, w = planted("mxfp8", 0)
    found = multiplied(a, w.mT, None, out_dtype)
    check(found, a, w.mT)
    monkeypatch.setattr(
        bf16_matmul._Result, "mending", lambda self, a, b, added: replace(mending(self, a, b, added), **NOTHING)
    )
    with pytest.raises(AssertionError, match="times the bound"):
        check(multiplied(a, w.mT, None, out_dtype), a, w.mT)


mending = bf16_matmul._Result.mending
#: Changes of a launch after which it computes no tile.
NOTHING: dict[str, Any] = {"programs": (0, 1, 1)}


@pytest.mark.parametrize("spec", IN_TURN)
@pytest.mark.long
def test_flags_are_those_of_lines_with_subnormal_values_and_all_other_values_are_exact(spec: str) -> None:
    st = every_code_and_scale(spec)
    expected, least = reference.dequantize(st), LEAST_BYTE[spec]
    flags, found = flags_of(st)
    lines = flags[1:].reshape(-1).bool()
    assert flags[0] == 1
    subnormal = (expected != 0) & (expected.abs() < 2.0**-126)
    assert torch.equal(lines, subnormal.any(1)) and torch.equal(lines, torch.arange(256, device=DEVICE) < least)
    kept = found[~lines].float()
    assert torch.equal(kept.nan_to_num(7.5), expected[~lines].nan_to_num(7.5))
    assert torch.equal(kept.isnan(), expected[~lines].isnan())


def every_code_and_scale(spec: str) -> Any:
    """A tensor of 256 rows with all scales and, in each, all codes: the bytes of packed codes repeat 0 ... 255."""
    st = breccia.cast(torch.ones(256, 1024, device=DEVICE), spec)
    data = torch.arange(st.data.shape[1], device=DEVICE).to(torch.uint8)
    if "mxfp6" in spec:  # four codes in three bytes
        groups = torch.arange(st.data.shape[1] // 3, device=DEVICE) * 4
        word = sum((((groups + i) & 63) << (6 * i)) for i in range(4))
        data = torch.stack([(word >> (8 * i)) & 255 for i in range(3)], 1).reshape(-1).to(torch.uint8)
    scale = torch.arange(256, device=DEVICE).to(torch.uint8)[:, None].expand(st.scale.shape).contiguous()
    return replaced(st, data=data.expand(st.data.shape).contiguous().view(st.data.dtype), scale=scale.view(st.scale.dtype))


@pytest.mark.parametrize("spec", IN_TURN)
def test_blocks_of_zeros_and_nan_are_not_flagged(spec: str) -> None:
    st = breccia.cast(numbers((9, 64), 1), spec)
    zeros = replaced(st, data=torch.zeros_like(st.data.view(torch.uint8)).view(st.data.dtype))
    for byte in (0, 255):
        for tensor in (with_scale(zeros, (slice(None), 0), byte), with_scale(st, (slice(None), 0), 255)):
            for x, second in ((tensor, False), (tensor.mT, True)):
                assert not flags_of(x, second)[0].any()
    small = planted(spec, 0)[0]
    for x, second in ((small, False), (small.mT, True)):
        assert flags_of(x, second)[0].nonzero()[:, 0].tolist() == [0, 1 + 3]


def test_flags_of_columns_with_k_first_are_theirs() -> None:
    st = breccia.cast(torch.zeros(64, 70, device=DEVICE), "mxfp8", axis=-2)
    codes = st.data.view(torch.uint8).contiguous()  # a cast writes K last
    codes[:32, 21] = 1
    small = with_scale(replaced(st, data=codes.view(st.data.dtype)), (0, 21), 0)
    assert flags_of(small, True)[0].nonzero()[:, 0].tolist() == [0, 1 + 21]
    w = torch.zeros(20, 64, device=DEVICE)
    w[:, :32] = 2.0**100
    large = breccia.cast(w, "mxfp8")
    product = multiplied(large, small)
    assert product[:, 21].any()
    check(product, large, small)


@pytest.mark.parametrize("spec", [*IN_TURN, *NVFP4[:1]])
def test_nan_and_inf_reach_exactly_the_rows_and_columns_that_they_are_in(spec: str) -> None:
    a, w = operand((70, 64), spec, 1), operand((20, 64), "mxfp8", 2)
    a = with_scale(a, (5, 1), 255 if "mx" in spec else 127)  # NaN
    if "E5M2" in spec:
        a.data.view(torch.uint8)[7, 9] = 0x7C  # +Inf
    elif spec == "mxfp8":
        a.data.view(torch.uint8)[7, 9] = 0x7F  # NaN
    found = multiplied(a, w.mT)
    check(found, a, w.mT)
    assert found[5].isnan().all() and found[:5].isfinite().all()
    check(multiplied(a, w.mT, torch.ones(20, device=DEVICE), "bfloat16"), a, w.mT, torch.ones(20, device=DEVICE))


@pytest.mark.long
@pytest.mark.parametrize("spec", ["nvfp4", "nvfp4,global_sense=amax", "nvfp4,global_sense=divisor"])
@pytest.mark.parametrize(
    "scale",
    [
        *(2.0**-140, float("inf"), -(2.0**-20)),
        *(pytest.param(g, marks=pytest.mark.long) for g in (2.0**-118, 2.0**-100, 2.0**30, 2.0**110, 0.0, float("nan"))),
    ],
)
def test_global_scales_of_any_size_multiply_as_the_decoded_values_do(spec: str, scale: float) -> None:
    st, zeros = (breccia.cast(x, spec) for x in (numbers((9, 64), 1), torch.zeros(9, 64, device=DEVICE)))
    for tensor, other in itertools.product((st, zeros), (numbers((20, 64), 2), torch.full((20, 64), 2.0**90, device=DEVICE))):
        a = replaced(tensor, global_scale=torch.tensor(scale, device=DEVICE))
        w = breccia.cast(other, "mxfp8")
        # Sums that may overflow have no bound.
        if (values(a).abs() @ values(w).mT.abs()).nan_to_num(0, 0).max() < 2.0**127:
            check(multiplied(a, w.mT), a, w.mT)
            check(multiplied(w, a.mT), w, a.mT)


def test_sums_that_overflow_without_the_global_scale_are_computed_under_it() -> None:
    st = breccia.cast(numbers((20, 64), 2), "nvfp4")
    w = replaced(st, global_scale=torch.tensor(2.0**-40, device=DEVICE))
    x = torch.ones(9, 64, device=DEVICE).bfloat16()
    x[3] = 2.0**125
    found = multiplied(x, w.mT)
    assert found.isfinite().all()
    check(found, x, w.mT)
    tiny = replaced(st, global_scale=torch.tensor(2.0**60, device=DEVICE))  # beyond 2^22: sums below 2^-149 would count
    x[3] = 2.0**-120
    check(multiplied(x, tiny.mT), x, tiny.mT)


# ------------------------------------------------------------------------------------------------ torch's product


class Products:
    """In place of `torch.mm` and `torch.bmm`: records what they were called with, and under which settings."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.fails = False

    def __call__(self, x: Any, y: Any, out_dtype: Any = None, *, out: Any) -> None:
        settings = torch.backends.cuda.matmul
        allowed = settings.allow_bf16_reduced_precision_reduction
        self.seen.append((x.dtype, y.dtype, out_dtype, out.dtype, allowed, torch.is_autocast_enabled(x.device.type)))
        if self.fails:
            raise RuntimeError("cuBLAS")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Products]:
    monkeypatch.undo()  # of `on_cpu`
    found = Products()
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, found)
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    yield found
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def test_cublas_adds_in_fp32_and_torchs_settings_are_as_before(called: Products) -> None:
    settings: Any = torch.backends.cuda.matmul
    x, bf16 = torch.zeros(4, 16).bfloat16(), torch.bfloat16
    split = "allow_bf16_reduced_precision_reduction_split_k"
    for before in (True, False, *([(False, False), (True, True)] if hasattr(settings, split) else [])):
        settings.allow_bf16_reduced_precision_reduction = before
        known = [settings.allow_bf16_reduced_precision_reduction, getattr(settings, split, None)]
        bf16_matmul.multiply(x, x.mT, torch.zeros(4, 4))
        bf16_matmul.multiply(x[None], x.mT[None], torch.zeros(1, 4, 4).bfloat16())
        called.fails = True
        with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="cuBLAS"):
            bf16_matmul.multiply(x, x.mT, torch.zeros(4, 4))
        called.fails = False
        assert [settings.allow_bf16_reduced_precision_reduction, getattr(settings, split, None)] == known
    fp32 = (bf16, bf16, torch.float32, torch.float32, False, False)
    assert called.seen == [fp32, (bf16, bf16, None, bf16, False, False), fp32] * (len(called.seen) // 3)


# ------------------------------------------------------------------------------------------------ which calls


def test_what_the_kernel_does_not_take_has_a_reason() -> None:
    a, w = operand((8, 64), "mxfp8", 1), operand((16, 64), "mxfp4", 2).mT
    assert bf16_plans.accepts(call_of(a, w)) is None
    assert bf16_plans.accepts(call_of(a.data.bfloat16(), w, out_dtype="float16", bias=torch.zeros(16))) is None
    assert bf16_plans.accepts(call_of(a, torch.zeros(64, 4).bfloat16())) is None
    for b, reason in (
        (torch.zeros(64, 4), "b: tensor cores multiply BF16, and the array is float32"),
        (
            operand((16, 64), "fp8_block", 1).mT,
            "b: E4M3 codes under F32 scales may need more than the 8 significant bits of BF16",
        ),
        (operand((16, 64), "nf4", 1).mT, "b: NF4 codes under F32 scales may need more"),
        (operand((16, 64), "int4,symmetric=false,signed=false,group_size=32", 1).mT, "b: codes have a zero-point, so values"),
        (breccia.cast(torch.zeros(0, 64), "mxfp8").mT, "the generic algorithm runs for empty operands"),
    ):
        assert reason in str(bf16_plans.accepts(call_of(a, b)))
    x = torch.zeros(8, 64).bfloat16()
    assert bf16_plans.accepts(call_of(x, x.mT)) == "it decodes quantized operands, and both are arrays"
    assert "two BF16 numbers for each value take K = 640 and more, and K is 64" in str(
        bf16_plans.accepts(call_of(x, operand((16, 64), "nf4", 1).mT))
    )
    assert bf16_plans.accepts_rounded(call_of(x, operand((16, 64), "nf4", 1).mT)) is None
    short = operand((8, 8), "mxfp8", 1)
    assert "K = 8 has too few terms for the bound of sums in tensor cores" in str(bf16_plans.accepts(call_of(short, short.mT)))
    both = operand((2, 1, 4, 64), "mxfp8", 1), operand((3, 4, 64), "mxfp8", 1).mT
    assert "leading axes (2, 1) and (3,) broadcast in both directions" in str(bf16_plans.accepts(call_of(*both)))


def test_operands_of_unknown_shape_are_judged_by_their_recipes() -> None:
    mx, nv = breccia.recipe("mxfp6"), breccia.recipe("nvfp4")
    call = call_of(Described(mx), Described(nv, axis=-2))
    assert bf16_plans.accepts(call) is None and bf16_plans.score(call) > 0
    row = breccia.recipe("fp8_row")
    assert bf16_plans.accepts(call_of(Described(mx), Described(row))) is None
    assert "a: E4M3 codes under F32 scales" in str(bf16_plans.accepts(call_of(Described(row), Described(row))))


def test_formats_are_judged_by_the_bits_and_the_range_of_their_values() -> None:
    def found(element: Any, scale: Any, sense: Any = "multiplier", global_scale: Any = None) -> Any:
        level = breccia.Level(scale, (1, 32), sense)
        return bf16_plans.range_of(breccia.Format(element, (level,) if global_scale is None else (level, global_scale)))

    assert found(E4M3, E4M3) == bf16_plans.Range(-18, 18)
    assert found(E2M1, UE4M3) == bf16_plans.Range(-10, 12)
    assert found(E4M3, E8M0) == bf16_plans.Range(-136, 137)
    nvfp4 = bf16_plans.range_of(breccia.recipe("nvfp4").format)
    assert (nvfp4.least_multiplier, nvfp4.most_multiplier) == (-116, 22)
    assert "INT8 codes under E4M3 scales may need more" in found(INT8, E4M3)
    assert "scales are stored as divisor" in found(E2M1, F32, "divisor")
    fine = breccia.Minifloat("fine", 8, None, "tests", 5, 2, 24, 224.0)
    assert "may be below FP32's least number" in found(fine, E8M0)


@pytest.mark.parametrize(
    ("shape", "ours"),
    [((128, 7168, 16384), False), ((16, 7168, 16384), False), ((512, 7168, 7168), True), ((8192, 8192, 8192), True)],
)
def test_mxfp8_goes_through_bf16_where_that_is_estimated_to_be_faster(shape: tuple[int, int, int], ours: bool) -> None:
    m, n, k = shape
    mx, blocks = breccia.recipe("mxfp8"), breccia.PerBlockK(32)
    call = call_of(Described(mx, "float8_e4m3fn", (m, k), blocks), Described(mx, "float8_e4m3fn", (k, n), blocks, -2))
    assert (bf16_plans.score(call) < fp8_plans.score(call)) == ours


def test_a_pass_over_the_result_and_wider_codes_take_longer() -> None:
    def score(spec: str, **options: Any) -> float:
        recipe = breccia.recipe(spec)
        a, b = (Described(recipe, "uint8", (4096, 4096), recipe.layout, axis) for axis in (-1, -2))
        return bf16_plans.score(call_of(a, b, **options))

    assert score("mxfp4") < score("mxfp6") < score("mxfp8")
    assert score("mxfp4") < score("nvfp4") == score("mxfp4", bias=torch.zeros(1)) == score("mxfp4", out_dtype="float16")


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Let the table ask anew whether kernels are available, now and after the test."""
    breccia.dispatch.registry.reload()
    yield
    breccia.dispatch.registry.reload()


@pytest.mark.usefixtures("reloaded")
def test_explain_names_the_kernel_and_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(compiler, "missing", lambda: None)
    for first, second in (("mxfp4", "nvfp4"), ("mxint8", "mxint8"), ("mxfp8", "mxfp6")):
        explained = breccia.explain("matmul", first, second, on="torch:cuda", prefer=NAME)
        assert explained.running == NAME, str(explained)
    said = str(breccia.explain("matmul", "int4", "mxfp6", on="torch:cuda", prefer=NAME))
    assert NAME in said and "a: INT4 codes under" in said
    assert "a: tensor cores multiply BF16, and the array is float32" in str(
        breccia.explain("matmul", "array", "mxfp6", on="torch:cuda", prefer=NAME)
    )


def test_devices_without_the_instructions_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(availability.targets, "installed", lambda module: True)
    assert bf16_plans.available(Device("cuda", 0, (8, 0))) is None
    assert "it needs compute capability 8.0; cuda:0 has 7.5" in str(bf16_plans.available(Device("cuda", 0, (7, 5))))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert bf16_plans.available(Device("cuda", 0, (9, 0))) == "this torch is built without CUDA"


def test_operands_on_several_devices_are_refused() -> None:
    a, w = operand((8, 64), "mxfp8", 1), operand((16, 64), "nvfp4", 2)
    with pytest.raises(breccia.UnsupportedError, match=r"matmul: a is on .*, and bias on meta; move it: x.to\('"):
        bf16_matmul.matmul_bf16(a, w.mT, product_options("float32", bias=torch.zeros(16, device="meta")))
    stray = replaced(w, scale=w.scale.to("meta"))
    with pytest.raises(breccia.UnsupportedError, match="and b's scale on meta"):
        bf16_matmul.matmul_bf16(a, stray.mT)


def test_what_kernels_do_not_read_takes_the_generic_algorithm() -> None:
    experts = breccia.stack([operand((20, 64), "nvfp4", n) for n in range(3)])  # a global scale for each matrix
    a = operand((3, 5, 64), "mxfp8", 4)
    found = bf16_matmul.matmul_bf16(a, experts.mT, product_options("bfloat16"))
    assert [*bf16_matmul._calls.values()] == ["it has a global scale for each matrix"]
    check(found, a, experts.mT)


# ------------------------------------------------------------------------------------------------ the conformance kit

LAWS = [
    products.products_stay_within_the_error_bound,
    products.array_times_tensor_stays_within_the_error_bound,
    products.tensor_times_array_stays_within_the_error_bound,
    products.stored_operands_stay_within_the_error_bound,
]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return declared_here(monkeypatch, NAME)


@pytest.mark.long
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("spec", SPECS)
def test_the_laws_of_products_hold(spec: str, law: Any, place: Place) -> None:
    kernel = next(k for k in registry().table.kernels if k.name == NAME)
    law(kernel, breccia.recipe(spec), place)
    assert any(not isinstance(call, str) for call in bf16_matmul._calls.values())


# ------------------------------------------------------------------------------------------------ on a GPU


@on_cuda
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(1, 4096, 2048), (300, 264, 640), (1000, 705, 1152), (256, 7168, 1024)], ids=str)
def test_larger_products_stay_within_the_bound(spec: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    w = operand((n, k), spec, 2)
    for a in (operand((m, k), spec, 1), operand((m, k), "array", 3)):
        for dtype in ROUNDOFF:
            check(breccia.matmul(a, w.mT, dtype, prefer=NAME), a, w.mT)


@on_cuda
def test_sums_of_one_large_and_many_small_numbers_keep_the_bound() -> None:
    for k in (64, 4096, 16384):
        x, y = torch.full((64, k), 0.03, device="cuda"), torch.full((64, k), 0.04, device="cuda")
        x[:, 0] = y[:, 0] = 448.0
        a, w = breccia.cast(x, "mxfp8"), breccia.cast(y, "mxfp8")
        check(breccia.matmul(a, w.mT, prefer=NAME), a, w.mT)
        z = x.bfloat16()
        check(breccia.matmul(z, w.mT, "bfloat16", prefer=NAME), z, w.mT)


@on_cuda
def test_tensor_cores_take_subnormal_bf16_numbers_of_arrays_as_they_are() -> None:
    x = (torch.randint(1, 128, (128, 256), device="cuda") * 2.0**-133).bfloat16()
    w = breccia.cast(torch.full((256, 256), 2.0**100, device="cuda"), "mxfp8")
    found = breccia.matmul(x, w.mT, prefer=NAME)
    assert found.all()
    check(found, x, w.mT)


@on_cuda
def test_calls_wait_for_nothing_and_are_captured_in_graphs_with_their_flags() -> None:
    for spec, bias in (("mxfp8", None), ("nvfp4", torch.ones(264, device="cuda"))):
        a, w = operand((300, 640), spec, 1), operand((264, 640), spec, 2)
        run = functools.partial(breccia.matmul, a, w.mT, "bfloat16", bias=bias, prefer=NAME)
        run()
        expected, (graph, found) = without_waiting(run), captured(run)
        graph.replay()
        assert torch.equal(found, expected)
        if spec == "mxfp8":  # a value that is not exact comes and goes
            scales, before = a.scale.view(torch.uint8), a.scale.view(torch.uint8).clone()
            scales[3] = 0
            graph.replay()
            check(found, a, w.mT, bias)
            scales.copy_(before)
            graph.replay()
            assert torch.equal(found, expected)


@on_cuda
def test_products_run_on_the_current_stream() -> None:
    a, w = operand((300, 640), "nvfp4", 1), operand((264, 640), "mxfp8", 2)
    run = functools.partial(breccia.matmul, a, w.mT, prefer=NAME)
    assert torch.equal(on_another_stream(run), run())


@on_cuda
def test_the_kernel_runs_where_it_is_estimated_to_be_fastest() -> None:
    for a, b, name in (
        (operand((4096, 4096), "mxfp8", 1), operand((4096, 4096), "mxfp8", 2), NAME),
        (operand((16, 1024), "mxfp4", 1), operand((256, 1024), "nvfp4", 2), NAME),
        (operand((4096, 4096), "array", 1), operand((4096, 4096), "nvfp4", 2), NAME),
    ):
        assert breccia.explain("matmul", a, b.mT).running == name
        check(breccia.matmul(a, b.mT, "bfloat16"), a, b.mT)


# ------------------------------------------------------------------------------------------------ compiled without one

COMPILED = """
import sys, torch, breccia
from triton.backends.compiler import GPUTarget
from breccia_triton.gemm.bf16 import matmul as bf16_matmul
from breccia_triton.launch import launcher as launch
from breccia_triton.gemm import contiguous
from breccia_triton.facts import Hardware

capability, *specs = sys.argv[1:]
capability = int(capability)
made = []

class Launcher(launch.Launcher):
    def __init__(self, launched):
        super().__init__(launched, GPUTarget("cuda", capability, 32))
        made.append(launched.function.__name__)

bf16_matmul.Launcher, bf16_matmul.hardware = Launcher, lambda device: Hardware(True, capability >= 89)
bias, x = torch.ones(128, dtype=torch.bfloat16), torch.randn(96, 256)
for spec in specs:
    w = contiguous.ContiguousOperand(breccia.cast(torch.randn(128, 256), spec).mT, True)
    for a in (breccia.cast(x, spec), breccia.cast(x.mT.contiguous(), spec, axis=-2).mT, x.bfloat16()):
        bf16_matmul.executable(contiguous.ContiguousOperand(a, False), w, None, "bfloat16")
        bf16_matmul.executable(contiguous.ContiguousOperand(a, False), w, bias, "float16")
print(len(made), "kernels compiled:", *sorted(set(made)))
"""


#: Formats, and how many kernels multiply them.
COUNTS = [
    pytest.param(("nvfp4",), 22, id="nvfp4"),
    pytest.param(("mxfp8", "mxfp8,fp8_format=E5M2", "mxfp6", "mxfp4", "mxint8", "nvfp4"), 117, id="each"),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80, 100])
@pytest.mark.parametrize(("specs", "count"), COUNTS)
def test_kernels_compile_for_gpus_that_are_not_here(
    capability: int, specs: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    found = compiled(COMPILED, str(capability), tmp_path, *specs)
    assert found == f"{count} kernels compiled: exact_kernel finishing_kernel mending_kernel\n"
