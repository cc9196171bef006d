"""Products that decode quantized operands in registers: in Triton's interpreter, compiled for GPUs that are not here, and on a
GPU.

The interpreter has no BF16: there numbers are rounded to BF16, and multiplied in FP32.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covering import covering
from marks import on_cuda

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("breccia_triton")

import torch
import triton_products
from triton_casts import DEVICE, ON_GPU
from triton_products import (
    COMPILING,
    ROUNDOFF,
    call_of,
    captured,
    compiled,
    declared_here,
    on_another_stream,
    values,
    without_waiting,
)
from triton_products import uneven as numbers
from weights import FORMATS, in_torch, replaced, tensor

import breccia
from breccia import ScaledTensor
from breccia.backend import Described, reference
from breccia.dispatch.registry import registry
from breccia.kernels import bounds
from breccia.options import product_options
from breccia.testing.laws import products
from breccia.testing.places import Place
from breccia_triton import plugin
from breccia_triton.gemm import contiguous
from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.gemm.fused import kernels as fused_kernels
from breccia_triton.gemm.fused import matmul as fused_matmul
from breccia_triton.gemm.fused import plans as fused_plans
from breccia_triton.gemm.fused import prepare as fused
from breccia_triton.launch import compiler
from breccia_triton.tuning import timing
from breccia_triton.tuning.choices import Choice, Key

WEIGHT, FP8 = "triton.weight_only", "triton.fp8_matmul"
pytestmark = [
    pytest.mark.covering(1, 1),  # the interpreter takes seconds for some cases; `make slow` and a GPU run all
    *([pytest.mark.gpu] if ON_GPU else []),  # where there is one, every test runs on it
    # Triton's interpreter computes with NumPy, which warns of Inf - Inf and of NaN; GPUs do not.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

#: Formats of weights, and what is multiplied for BF16, FP16 and FP32 activations: the dtype (of three numbers for a number of
#: the weight: "3 x"), and whether scales are multiplied into the codes.
SPECS = {
    "int4": ("bfloat16", "float16", "float32"),
    "int4,group_size=64": ("bfloat16", "float16", "float32"),
    "int4,group_size=16,scale_dtype=float32": ("bfloat16", "float16", "float32"),
    "int4,symmetric=false,signed=false,group_size=32": ("bfloat16", "float16", "float32"),
    "int4,symmetric=false,signed=false,offset=bias,group_size=32": ("3 x bfloat16", "float32", "float32"),
    "int8": ("bfloat16", "float16", "float32"),
    "int8,symmetric=false,signed=false": ("bfloat16", "float16", "float32"),
    "fp8_block": ("bfloat16", "float16", "float32"),
    "fp8_block,block_m=128": ("bfloat16", "float16", "float32"),
    "fp8_row,fp8_format=E5M2": ("bfloat16", "float16", "float32"),
    "fp8_current": ("bfloat16", "float16", "float32"),
    "mxfp8": ("bfloat16", "float16", "float32"),
    "mxfp6": ("folded bfloat16", "float16", "float32"),
    "mxfp6,fp6_format=E3M2": ("folded bfloat16", "float16", "float32"),
    "mxfp4": ("folded bfloat16", "float16", "float32"),
    "mxint8": ("folded bfloat16", "float16", "float32"),
    "nvfp4": ("folded bfloat16", "float16", "float32"),
    "nvfp4,two_level=false": ("folded bfloat16", "float16", "float32"),
    "nvfp4,global_sense=amax": ("folded bfloat16", "float16", "float32"),
    "nvfp4,global_sense=divisor": ("folded bfloat16", "float16", "float32"),
    "nf4": ("3 x bfloat16", "float32", "float32"),
}
ACTS = ("bfloat16", "float16", "float32")
#: Pairs of FP8: scales of the tensor, of rows, of 1 x 128 by 128 x 128 and by 1 x 128, of 1 x 32.
PAIRS = {
    "tensor": ("fp8_current", "fp8_current"),
    "row": ("fp8_row", "fp8_row"),
    "row-tensor": ("fp8_row,fp8_format=E5M2", "fp8_current"),
    "tiles": ("fp8_block", "fp8_block,block_m=128"),
    "blocks": ("fp8_block", "fp8_block"),
    "mx": ("mxfp8", "mxfp8,fp8_format=E5M2"),
}


@pytest.fixture(autouse=True)
def prepared_anew() -> None:
    fused_matmul._calls.clear()


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts sums in FP32 in place of those in tensor cores, in the interpreter."""
    count: list[int] = []
    if not ON_GPU:
        from breccia_triton.gemm.fused import kernels as fused_kernels

        run = fused_kernels._in_fp32

        def counted(*arguments: Any) -> Any:
            count.append(1)
            return run(*arguments)

        monkeypatch.setattr(fused_kernels, "_in_fp32", counted)
    return count


def activations(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return (numbers(shape, seed) / 2**6).to(getattr(torch, dtype))


def weight(shape: tuple[int, ...], spec: str, seed: int = 0, first: bool = False) -> Any:
    """A weight as the second operand (..., K, N) for a shape (..., N, K). first: K is first in memory."""
    x = numbers(shape, seed)
    return breccia.cast(x.mT.contiguous(), spec, axis=-2) if first else breccia.cast(x, spec).mT


def check(found: Any, a: Any, b: Any, bias: Any = None) -> None:
    """The bound of FP32 sums, or of FP8 tensor cores, and one rounding."""
    recipes = (side.recipe if isinstance(side, ScaledTensor) else None for side in (a, b))
    triton_products.check(found, a, b, bias, bounds.in_tensor_cores(*recipes, found.device.type))


def multiplied(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """The kernel's product; it did not pass the call on."""
    fused_matmul._calls.clear()
    found = fused_matmul.fused_matmul(a, b, product_options(out_dtype, bias=bias, out=out))
    assert [isinstance(call, str) for call in fused_matmul._calls.values()] == [False], list(fused_matmul._calls.values())
    return found


def prepared() -> fused.Product:
    """The product of the last call."""
    (call,) = fused_matmul._calls.values()
    return call.plan


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("first", [False, True], ids=["k_last", "k_first"])
@pytest.mark.parametrize("spec", SPECS)
def test_products_of_every_format_stay_within_the_bound(spec: str, first: bool, act: str, in_fp32: list[int]) -> None:
    for m, n, k in ((1, 40, 160), (35, 72, 96)):  # partial tiles, blocks and steps
        x, w = activations((m, k), act, 1), weight((n, k), spec, 2, first)
        check(multiplied(x, w), x, w)
        way = prepared().way
        said = "folded " * way.folded + f"{way.parts} x " * (way.parts > 1) + way.dot
        assert said == SPECS[spec][ACTS.index(act)]
    assert bool(in_fp32) == (not ON_GPU and way.dot == "float32")


@pytest.mark.long
@pytest.mark.parametrize("bias", [None, "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("out_dtype", ROUNDOFF)
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("spec", ["int4,group_size=64", "nvfp4"])
def test_results_have_any_dtype_and_bias_also_in_parts_of_k(
    spec: str, split: int, out_dtype: str, bias: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "choices_of", lambda name: lambda key: Choice(split=split, deep=32))
    x, w = activations((5, 530), "bfloat16", 1), weight((40, 530), spec, 2)
    added = None if bias is None else torch.linspace(-50, 50, 40, device=DEVICE).to(getattr(torch, bias))
    found = multiplied(x, w, added, out_dtype)
    check(found, x, w, added)
    assert prepared().tiling.split == split
    assert torch.equal(found, multiplied(x, w, added, out_dtype))  # the order of sums is fixed


@pytest.mark.parametrize("spec", ["int4,group_size=32", "nvfp4", "fp8_current"])
@pytest.mark.parametrize(("left", "right"), [((2, 3), ()), ((2, 3), (2, 3)), ((), (3,)), ((3,), (1,)), ((1,), (2,))], ids=str)
def test_leading_axes_are_batches_and_broadcast(spec: str, left: Any, right: Any) -> None:
    x, w = activations((*left, 5, 64), "bfloat16", 1), weight((*right, 20, 64), spec, 2)
    bias = torch.linspace(-5, 5, 20, device=DEVICE)
    if right and spec == "nvfp4" and right != (1,):
        w = weight((*right, 20, 64), "nvfp4,two_level=false", 2)
    check(multiplied(x, w, bias, "bfloat16"), x, w, bias)


@pytest.mark.long
@pytest.mark.parametrize("storage", plugin.STORAGES)
@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4"])
def test_scales_are_read_in_every_storage_that_the_casts_write(spec: str, storage: str) -> None:
    for first in (False, True):
        plain = weight((40, 160), spec, 1, first)
        for act in ("bfloat16", "float16"):
            x = activations((9, 160), act, 2)
            check(multiplied(x, plain.to_storage(storage)), x, plain)


def test_operands_in_any_order_of_memory_are_read_or_copied() -> None:
    x, w = activations((12, 128), "bfloat16", 1), weight((24, 128), "int8", 2)
    part, narrow = x[:, 32:96], weight((24, 64), "mxfp4", 3)
    check(multiplied(part, narrow), part, narrow)
    check(multiplied(x.mT.contiguous().mT, w), x, w)
    strided = w.mT[::2].mT
    check(multiplied(x, strided), x, strided)


def test_out_receives_the_product_in_place_and_in_strided_memory() -> None:
    x, w = activations((9, 128), "bfloat16", 1), weight((24, 128), "mxfp8", 2)
    expected = multiplied(x, w, None, "bfloat16")
    guarded, wide = (torch.full(shape, 7.0, device=DEVICE).bfloat16() for shape in ((11, 24), (9, 40)))
    for out in (guarded[1:10], wide[:, 5:29]):
        assert multiplied(x, w, None, "bfloat16", out) is out
        assert torch.equal(out, expected)
    assert (guarded[0] == 7).all() and (guarded[-1] == 7).all() and (wide[:, 29:] == 7).all()
    with pytest.raises(
        breccia.ShapeError, match=r"out= must have shape \(9, 24\) and dtype bfloat16; got \(9, 24\) and float32"
    ):
        multiplied(x, w, None, "bfloat16", torch.zeros(9, 24, device=DEVICE))


# ------------------------------------------------------------------------------------------------ values that are not ordinary


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", FORMATS)
def test_any_bits_of_codes_and_scales_decode_as_the_contract_says(name: str, act: str) -> None:
    """NaN and Inf codes; scales that are NaN, Inf, negative, zero, subnormal and huge."""
    st = tensor(name, 40, 256, seed=9, wild=True)
    st.data[:24] = tensor(name, 40, 256, seed=9).data[:24]  # finite codes
    w, y = in_torch(st, DEVICE).mT, torch.from_numpy(reference.dequantize(st).astype(np.float64)).to(DEVICE).mT
    rng = np.random.default_rng(3)
    x = torch.tensor(rng.standard_normal((3, 256)).astype(np.float32), device=DEVICE).to(getattr(torch, act))
    found = multiplied(x, w)
    exact, size = x.double() @ y, x.double().abs() @ y.abs()
    known = exact.isfinite() & (size < 1e38)  # other sums may overflow
    assert known.any() and ((found.double() - exact).abs() <= bounds.accumulated(size, 256, 256))[known].all()
    assert not found[~exact.isfinite()].isfinite().any()
    assert found[exact.isnan()].isnan().all()


def with_scale(w: Any, at: tuple[int, ...], number: Any) -> Any:
    """A weight (K, N) with another scale, or scale byte, in one place."""
    st = w.mT
    scale = st.scale.clone()
    (scale if scale.dtype.itemsize > 1 else scale.view(torch.uint8))[at] = number
    return replaced(st, scale=scale).mT


@pytest.mark.parametrize(
    ("spec", "number", "large"),
    [
        ("fp8_block", 2.0**-130, 2.0**100),  # values that FP32 rounds as subnormal numbers
        ("fp8_block", 2.0**100, 2.0**-120),  # sums that would be subnormal
        ("fp8_block", 2.0**125, 1.0),  # values that are Inf
        ("int4,group_size=32,scale_dtype=float32", 3.3e38, 1.0),
        ("mxfp8", 0, 2.0**100),
        ("mxfp8", 254, 1.0),
        ("mxfp4", 0, 2.0**100),
        ("mxfp4", 254, 1.0),
        ("mxint8", 0, 2.0**100),
    ],
)
def test_scales_of_any_size_multiply_as_the_decoded_values_do(spec: str, number: Any, large: float) -> None:
    w = with_scale(breccia.cast(torch.linspace(-7, 7, 40 * 128, device=DEVICE).reshape(40, 128), spec).mT, (3, 0), number)
    for act in ("bfloat16", "float32"):
        x = torch.full((4, 128), large, device=DEVICE).to(getattr(torch, act))
        x[1] = 0
        check(multiplied(x, w), x, w)


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**60, float("inf"), -(2.0**-20), 0.0, float("nan")])
def test_global_scales_of_any_size_multiply_as_the_decoded_values_do(scale: float) -> None:
    st = breccia.cast(numbers((24, 64), 1), "nvfp4")
    w = replaced(st, global_scale=torch.tensor(scale, device=DEVICE)).mT
    for x in (activations((5, 64), "bfloat16", 2), torch.full((5, 64), 2.0**-120, device=DEVICE).bfloat16()):
        check(multiplied(x, w), x, w)


def test_sums_that_overflow_without_a_scale_are_computed_under_it(in_fp32: list[int]) -> None:
    for spec in ("nvfp4", "fp8_block"):
        st = breccia.cast(numbers((24, 128), 1) * 2.0**-40, spec)
        x = torch.ones(5, 128, device=DEVICE).bfloat16()
        x[3] = 2.0**125
        found = multiplied(x, st.mT)
        assert found.isfinite().all()
        check(found, x, st.mT)
    assert ON_GPU or in_fp32


@pytest.mark.long
@pytest.mark.parametrize("spec", ["int4,group_size=32", "nvfp4", "mxfp8", "nf4"])
def test_nan_and_inf_reach_exactly_the_rows_and_columns_that_they_are_in(spec: str) -> None:
    x, w = activations((20, 128), "bfloat16", 1), weight((70, 128), spec, 2)
    x[5, 7], x[9, 3] = float("nan"), float("-inf")
    nan = {"mxfp8": 255, "nvfp4": 127}.get(spec, float("nan"))
    w = with_scale(w, (11, 1), nan)
    found = multiplied(x, w)
    check(found, x, w)
    assert found[5].isnan().all() and found[:, 11].isnan().all()
    others = [i for i in range(20) if i not in (5, 9)]
    assert found[others][:, [j for j in range(70) if j != 11]].isfinite().all()


# ------------------------------------------------------------------------------------------------ bad kernels


def test_sums_of_steps_in_fp16_violate_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own source, with one line changed. One product is large, so that FP16 has no bits for those that follow.

    FP16 numbers at 64 are 2^-4 apart: a step of 128 columns adds 2^-6, and is rounded off.
    """
    x, w = torch.full((4, 512), 2.0**-13, device=DEVICE), breccia.cast(torch.full((24, 512), 7.0, device=DEVICE), "int8").mT
    x[:, 0] = 64
    x = x.bfloat16()
    check(multiplied(x, w), x, w)
    text = Path(fused_kernels.__file__).read_text(encoding="utf-8")
    line = "total = tl.fma(part, by, total)\n"
    assert text.count(line) == 1
    path = tmp_path / "in_fp16.py"
    path.write_text(text.replace(line, f"{line.rstrip()}.to(tl.float16).to(tl.float32)\n"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("breccia_triton.gemm.fused.in_fp16", path)
    assert spec is not None and spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, planted)
    spec.loader.exec_module(planted)
    monkeypatch.setattr(fused, "fused_kernel", planted.fused_kernel)
    fused_matmul._calls.clear()
    with pytest.raises(AssertionError, match="times the bound"):
        check(multiplied(x, w), x, w)


@pytest.mark.parametrize("fault", ["weights rounded once", "no second and third number", "scales forgotten"])
def test_planted_faults_violate_the_bound(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above are not vacuous. Faults are planted in what the kernel is compiled for, or in its result."""
    spec = {"no second and third number": "nf4"}.get(fault, "fp8_block")
    x, w = activations((4, 512), "bfloat16", 1), weight((24, 512), spec, 2)
    check(multiplied(x, w), x, w)
    if fault == "weights rounded once":
        other = breccia.cast(values(w).float().mT * (1 + 2.0**-8), spec).mT
        found = multiplied(x, other)
    else:
        way = fused.way_of

        def planted(*arguments: Any) -> Any:
            made = way(*arguments)
            return replace(made, parts=1) if spec == "nf4" else replace(made, folded=True)

        monkeypatch.setattr(fused, "way_of", planted)
        found = multiplied(x, w)
    with pytest.raises(AssertionError, match="times the bound"):
        check(found, x, w)


# ------------------------------------------------------------------------------------------------ FP8 by FP8


@pytest.mark.long
@pytest.mark.parametrize("out_dtype", ROUNDOFF)
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_fp8_stay_within_the_bound(pair: str, out_dtype: str) -> None:
    first, second = PAIRS[pair]
    for m, n, k in ((1, 40, 160), (70, 72, 288)):
        a, w = breccia.cast(numbers((m, k), 1), first), breccia.cast(numbers((n, k), 2), second).mT
        bias = torch.linspace(-5, 5, n, device=DEVICE)
        check(multiplied(a, w, bias, out_dtype), a, w, bias)
    assert prepared().tiling.deep <= 128  # the bound of FP8 tensor cores


def test_pairs_of_fp8_in_any_order_of_memory_and_batch() -> None:
    a, w = breccia.cast(numbers((2, 9, 160), 1), "fp8_block"), weight((24, 160), "fp8_block", 2, first=True)
    check(multiplied(a, w), a, w)
    columns = breccia.cast(numbers((160, 20), 3), "mxfp8", axis=-2).mT
    experts = breccia.cast(numbers((3, 24, 160), 4), "mxfp8").mT
    check(multiplied(columns, experts), columns, experts)


def test_special_codes_and_scales_of_fp8_pairs_follow_the_contract() -> None:
    a, w = breccia.cast(numbers((20, 128), 1), "mxfp8,fp8_format=E5M2"), breccia.cast(numbers((24, 128), 2), "mxfp8").mT
    codes = a.data.view(torch.uint8)
    codes[3, 5], codes[4, 6] = 0x7C, 0x7F  # Inf, NaN
    for byte in (0, 254, 255):
        b = with_scale(w, (7, 1), byte)
        check(multiplied(a, b), a, b)


# ------------------------------------------------------------------------------------------------ which calls


def test_what_the_kernels_do_not_take_has_a_reason() -> None:
    x, w = torch.zeros(8, 64).bfloat16(), breccia.cast(torch.ones(16, 64), "mxfp4").mT
    a = breccia.cast(torch.ones(8, 64), "mxfp8")
    assert fused_plans.accepts_weight_only(call_of(x, w)) is None
    assert fused_plans.accepts_fp8(call_of(a, a.mT)) is None
    wide = breccia.cast(torch.ones(16, 62), "int4,group_size=31").mT
    across = breccia.cast(torch.ones(64, 16), "mxfp4")
    both = torch.zeros(2, 1, 4, 64).bfloat16(), breccia.cast(torch.ones(3, 4, 64), "mxfp4").mT
    short = torch.zeros(8, 16).bfloat16(), breccia.cast(torch.ones(8, 16), "int8").mT
    for call, reason in (
        (call_of(a, w), "a: it multiplies plain arrays, and this is a ScaledTensor"),
        (call_of(x, x.mT), "b: it decodes a quantized operand, and this is an array"),
        (call_of(torch.zeros(8, 62), wide), "b: blocks of 31 columns; steps of a product take multiples of 16"),
        (call_of(x, across), "b: its blocks go across K"),
        (call_of(*both), "leading axes (2, 1) and (3,) broadcast in both directions"),
        (call_of(*short), "K = 16 has too few terms for the bound of sums in tensor cores; it takes 32 and more"),
        (call_of(x[:0], w), "the generic algorithm runs for empty operands"),
    ):
        assert fused_plans.accepts_weight_only(call) == reason
    assert fused_plans.accepts_weight_only(call_of(short[0].float(), short[1])) is None
    assert fused_plans.accepts_fp8(call_of(x, w)) == "it multiplies two FP8 tensors"
    assert fused_plans.accepts_fp8(call_of(a, w)) == "E2M1 codes are not FP8"


def test_operands_of_unknown_shape_are_judged_by_their_recipes() -> None:
    row, nf4 = breccia.recipe("fp8_row"), breccia.recipe("nf4")
    call = call_of(Described(row), Described(row, axis=-2))
    assert fused_plans.accepts_fp8(call) is None and fused_plans.score(call) > 0
    assert fused_plans.accepts_fp8(call_of(Described(row), Described(nf4, axis=-2))) == "NF4 codes are not FP8"


def test_the_estimated_time_grows_with_the_work_and_with_the_bytes() -> None:
    def score(spec: str, m: int, dtype: str = "bfloat16") -> float:
        recipe = breccia.recipe(spec)
        b = Described(recipe, "uint8", (8192, 8192), recipe.layout, -2)
        return fused_plans.score(call_of(Described(None, dtype, (m, 8192)), b))

    assert score("mxfp4", 1) < score("mxfp6", 1) < score("mxfp8", 1)
    assert score("mxfp4", 16) < score("mxfp4", 4096) < score("mxfp4", 4096, "float32")


@pytest.mark.parametrize("pair", ["tensor", "row", "tiles", "mx"])
def test_the_kernels_for_hopper_come_first_where_they_run(pair: str) -> None:
    first, second = map(breccia.recipe, PAIRS[pair])
    for m, n, k in ((1, 8192, 8192), (16, 7168, 16384), (32, 512, 512), (128, 4096, 4096), (16384, 7168, 7168)):
        a = Described(first, "float8_e4m3fn", (m, k), first.layout)
        b = Described(second, "float8_e4m3fn", (k, n), second.layout.mT, -2)
        assert fused_plans.score(call_of(a, b)) > fp8_plans.score(call_of(a, b))


def test_explain_names_the_kernels_and_why_they_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "missing", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    breccia.dispatch.registry.reload()
    try:
        for first, second, name in (("array", "nf4", WEIGHT), ("fp8_row", "fp8_current", FP8)):
            explained = breccia.explain("matmul", first, second, on="torch:cuda", prefer=name)
            assert explained.running == name, str(explained)
        assert breccia.explain("matmul", "array", "nf4", on="torch:cuda").running == WEIGHT
        explained = breccia.explain("matmul", "fp8_row", "fp8_current", on="torch:cuda")
        assert explained.running != FP8 and FP8 in str(explained)  # the kernel for Hopper
    finally:
        breccia.dispatch.registry.reload()


def test_what_kernels_do_not_read_takes_the_generic_algorithm() -> None:
    experts = breccia.stack([breccia.cast(numbers((20, 64), n), "nvfp4") for n in range(3)])  # a global scale for each matrix
    x = activations((3, 5, 64), "bfloat16", 4)
    found = fused_matmul.fused_matmul(x, experts.mT, product_options("bfloat16"))
    assert [*fused_matmul._calls.values()] == ["it has a global scale for each matrix"]
    check(found, x, experts.mT)


def test_operands_on_several_devices_are_refused() -> None:
    x, w = activations((8, 64), "bfloat16", 1), weight((16, 64), "nvfp4", 2)
    with pytest.raises(breccia.UnsupportedError, match=r"matmul: a is on .*, and bias on meta; move it: x.to\('"):
        fused_matmul.fused_matmul(x, w, product_options("float32", bias=torch.zeros(16, device="meta")))
    st = w.mT
    stray = replaced(st, scale=st.scale.to("meta"))
    with pytest.raises(breccia.UnsupportedError, match="and b's scale on meta"):
        fused_matmul.fused_matmul(x, stray.mT)


@pytest.mark.parametrize(
    ("m", "spec", "choice"),
    [(1, "int4", {}), (16, "mxfp8", {}), (300, "nvfp4", {}), (300, "nf4", {}), (1, "int4", {"deep": 256, "lines": 256})],
)
def test_steps_lie_within_a_block_and_in_two_or_more_parts_of_k(m: int, spec: str, choice: dict[str, int]) -> None:
    x, w = torch.zeros(m, 192).bfloat16(), breccia.cast(torch.ones(40, 192), spec).mT
    sides = fused_matmul.described(contiguous.ContiguousOperand(x, False), True, fused_matmul.hardware(x.device)), None
    b = fused_matmul.described(contiguous.ContiguousOperand(w, True), False, fused_matmul.hardware(x.device))
    made = fused.Product(sides[0], b, None, "float32", fused_matmul.hardware(x.device), lambda key: Choice(**choice))
    group = fused_plans.group_of(w.layout.plain.block(-2))
    assert made.way.folded or group % made.tiling.deep == 0
    assert 2 * made.tiling.deep <= 192 <= made.tiling.deep * made.tiling.steps * made.tiling.split


#: `make test-all` multiplies under candidates in which every two numbers occur, `make slow` under all.
TUNED = [
    pytest.param("int4,group_size=64", False),
    *(pytest.param(spec, True, marks=pytest.mark.slow) for spec in ("int4,group_size=64", "nvfp4", "nf4")),
]


@pytest.mark.long
@pytest.mark.parametrize(("spec", "every"), TUNED)
def test_candidates_of_the_tuning_give_products_within_the_bound(
    spec: str, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = activations((35, 512), "bfloat16", 1), weight((72, 512), spec, 2)
    candidates = list(timing.candidates(Key("fused", "")))
    pairs = covering([itertools.combinations(dataclasses.asdict(choice).items(), 2) for choice in candidates])
    for choice in candidates if every else [candidates[n] for n in sorted(pairs)]:
        monkeypatch.setattr(timing, "choices_of", lambda name, choice=choice: lambda key: choice)
        check(multiplied(x, w), x, w)


# ------------------------------------------------------------------------------------------------ the conformance kit


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    return declared_here(monkeypatch, WEIGHT, FP8)


LAWS = [
    (products.array_times_tensor_stays_within_the_error_bound, WEIGHT, tuple(SPECS)),
    (products.stored_operands_stay_within_the_error_bound, WEIGHT, ("mxfp8", "mxfp4", "nvfp4")),
    (products.products_stay_within_the_error_bound, FP8, ("mxfp8", "fp8_current", "fp8_row", "fp8_block")),
]
#: `make test-all` runs the first format of each law, and test_products_of_every_format_stay_within_the_bound every format.
EACH = [
    pytest.param(law, name, spec, id=f"{law.__name__}-{spec}", marks=[pytest.mark.slow] if spec != specs[0] else [])
    for law, name, specs in LAWS
    for spec in specs
]


@pytest.mark.long
@pytest.mark.parametrize(("law", "name", "spec"), EACH)
def test_the_laws_of_products_hold(law: Any, name: str, spec: str, place: Place) -> None:
    kernel = next(k for k in registry().table.kernels if k.name == name)
    law(kernel, breccia.recipe(spec), place)
    assert any(not isinstance(call, str) for call in fused_matmul._calls.values())


# ------------------------------------------------------------------------------------------------ on a GPU


LARGE = ((1, 4096, 2048), (16, 264, 4096), (33, 705, 1152), (256, 1024, 4096))


@on_cuda
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("spec", SPECS)
def test_larger_products_stay_within_the_bound(spec: str, act: str) -> None:
    for (m, n, k), dtype, first in zip(LARGE, itertools.cycle(ROUNDOFF), itertools.cycle((False, False, True)), strict=False):
        x, w = activations((m, k), act, 3), weight((n, k), spec, 2, first)
        check(breccia.matmul(x, w, dtype, prefer=WEIGHT), x, w)


@on_cuda
@pytest.mark.parametrize("pair", PAIRS)
def test_larger_pairs_of_fp8_stay_within_the_bound(pair: str) -> None:
    first, second = PAIRS[pair]
    for (m, n, k), dtype in zip(LARGE, itertools.cycle(ROUNDOFF), strict=False):
        a, w = breccia.cast(numbers((m, k), 1), first), breccia.cast(numbers((n, k), 2), second).mT
        check(breccia.matmul(a, w, dtype, prefer=FP8), a, w)


@on_cuda
def test_sums_of_one_large_and_many_small_numbers_keep_the_bound() -> None:
    for k in (64, 4096, 16384):
        x, y = torch.full((64, k), 0.03, device="cuda"), torch.full((64, k), 0.04, device="cuda")
        x[:, 0] = y[:, 0] = 448.0
        for spec in ("int4", "int8", "fp8_row", "mxfp8", "mxfp4", "nvfp4", "nf4"):
            w, z = breccia.cast(y, spec).mT, x.bfloat16()
            check(breccia.matmul(z, w, prefer=WEIGHT), z, w)
            check(breccia.matmul(z, w, "bfloat16", prefer=WEIGHT), z, w)
        for spec in ("fp8_current", "fp8_row", "fp8_block", "mxfp8"):
            a, w = breccia.cast(x, spec), breccia.cast(y, spec).mT
            check(breccia.matmul(a, w, prefer=FP8), a, w)


@on_cuda
def test_tensor_cores_take_subnormal_numbers_as_they_are() -> None:
    x = (torch.randint(1, 128, (128, 256), device="cuda") * 2.0**-133).bfloat16()
    for spec in ("int8", "mxfp4", "nvfp4"):
        w = breccia.cast(torch.full((256, 256), 2.0**100 if spec == "mxfp4" else 2.0**20, device="cuda"), spec).mT
        check(breccia.matmul(x, w, prefer=WEIGHT), x, w)


@on_cuda
def test_calls_wait_for_nothing_and_are_captured_in_graphs() -> None:
    for spec, bias in (("int4", None), ("nvfp4", torch.ones(264, device="cuda"))):
        for m in (1, 300):
            x, w = activations((m, 640), "bfloat16", 1), weight((264, 640), spec, 2)
            run = functools.partial(breccia.matmul, x, w, "bfloat16", bias=bias, prefer=WEIGHT)
            run()
            expected, (graph, found) = without_waiting(run), captured(run)
            graph.replay()
            assert torch.equal(found, expected)


@on_cuda
def test_products_run_on_the_current_stream() -> None:
    x, w = activations((300, 640), "bfloat16", 1), weight((264, 640), "mxfp8", 2)
    run = functools.partial(breccia.matmul, x, w, prefer=WEIGHT)
    assert torch.equal(on_another_stream(run), run())


# ------------------------------------------------------------------------------------------------ compiled without one

COMPILED = (
    COMPILING
    + """
from breccia_triton.gemm.fused import matmul as fused_matmul
from breccia_triton.gemm import contiguous

fused_matmul.Launcher, fused_matmul.hardware = Launcher, lambda device: found

def compiled(a, b, bias=None, dtype="bfloat16"):
    fused_matmul._new_call(contiguous.ContiguousOperand(a, False), contiguous.ContiguousOperand(b, True), bias, dtype)

bias, x = torch.ones(512, dtype=torch.bfloat16), torch.randn(128, 1024)
for spec in ("int4", "int4,symmetric=false,signed=false,group_size=32", "int4,symmetric=false,signed=false,offset=bias",
             "mxfp6", "mxfp4", "nvfp4", "nf4", "fp8_block,block_m=128", "mxfp8"):
    w = breccia.cast(torch.randn(512, 1024), spec).mT
    compiled(x[:1].bfloat16(), w)
    compiled(x.bfloat16(), w, bias)
    compiled(x.half(), w, bias, "float16")
    compiled(x[:20].bfloat16(), breccia.cast(torch.randn(1024, 512), spec, axis=-2))
compiled(x, w)
for spec in ("fp8_row", "fp8_block", "mxfp8,fp8_format=E5M2"):
    compiled(breccia.cast(x, spec), breccia.cast(torch.randn(512, 1024), spec.partition(",")[0]).mT)
print(made.count("fused_kernel"), "products compiled")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm89", "sm90", "sm100", "gfx942", "gfx950"])
def test_kernels_compile_for_gpus_that_are_not_here(target: str, tmp_path: Path) -> None:
    assert compiled(COMPILED, target, tmp_path) == "40 products compiled\n"
