"""FP8 products on CUDA: pairings of scales and codecs, odd shapes, options, groups; planning and compiling without a GPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from marks import on_cuda

import breccia
from breccia import Device
from breccia.backend import Call, Described
from breccia.dispatch import registry
from breccia.dispatch.table import Table
from breccia.kernels import bounds
from breccia.operations import OPERATIONS
from breccia.options import FLOAT32, ProductOptions, product_options

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton_products  # noqa: E402
from compiling import compiled_with_log  # noqa: E402
from fp8_stand_in import StandIn, installed  # noqa: E402
from fp8_variants import fp8_variants  # noqa: E402
from triton_products import ROUNDOFF, call_of, captured, on_another_stream  # noqa: E402

from breccia_triton.gemm.fp8 import matmul as fp8_matmul  # noqa: E402
from breccia_triton.gemm.fp8 import plans as fp8_plans  # noqa: E402
from breccia_triton.gemm.scaled_mm import plans as torch_plans  # noqa: E402
from breccia_triton.gemm.scaled_mm import scaled_mm  # noqa: E402
from breccia_triton.launch import compiler, driver, program  # noqa: E402
from breccia_triton.tuning import measurements  # noqa: E402

TENSOR, ROW = breccia.Float8CurrentScaling(), breccia.Float8RowScaling()
BLOCK, TILES = breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128)
MX = breccia.MXFP8BlockScaling()
#: Recipes of a and b: every pair of kinds of scales that the kernel has.
PAIRS = {
    "tensor": (TENSOR, TENSOR), "row": (ROW, ROW), "tensor-row": (TENSOR, ROW), "row-tensor": (ROW, TENSOR),
    "tiles": (BLOCK, TILES), "blocks": (BLOCK, BLOCK), "mx": (MX, MX),
}  # fmt: skip
#: Kernels of two FP8 tensors that keep the contract of products: the first one that takes a product runs it.
KERNELS = "cuda.fp8_matmul", "torch.scaled_mm", "triton.fp8_matmul", "triton.matmul_bf16"
OURS, FAST, GROUPED = "cuda.fp8_matmul", "cuda.fp8_matmul_fast", "cuda.fp8_grouped_matmul"
#: M, N, K: one tile, whole tiles, partial ones in every direction, N without alignment, K of a part of a step, one row.
SHAPES = (
    (128, 128, 128), (256, 256, 1024), (1000, 704, 1152), (520, 1344, 512), (72, 2112, 256), (300, 264, 640), (100, 77, 272),
    (257, 129, 16), (4, 136, 384), (1, 1, 16), (1, 4096, 2048), (64, 3584, 4096), (128, 3584, 4096),
)  # fmt: skip


def operand(shape: tuple[int, ...], recipe: Any, seed: int, codec: str = "E4M3", device: str = "cuda") -> Any:
    """Normal numbers under a recipe; blocks differ in size."""
    import dataclasses

    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-4, 4, (*shape[:-1], 1))).astype(np.float32)
    return breccia.cast(torch.from_numpy(x).to(device), dataclasses.replace(recipe, fp8_format=codec))


def exact(a: Any, b: Any) -> tuple[Any, Any]:
    """(The FP64 product of what the operands decode to, the sums of magnitudes)."""
    x, y = (breccia.dequantize(st).double() for st in (a, b))
    return x @ y, x.abs() @ y.abs()


def check(found: Any, a: Any, b: Any, dtype: str = "float32", bias: Any = None) -> None:
    """The bound of FP8 tensor cores, one rounding to the dtype, and no NaN."""
    assert str(found.dtype) == f"torch.{dtype}" and not found.isnan().any()
    triton_products.check(found, a, b, bias, True)
    # Far inside the bound, random data also tell a wrong scale from a right one.
    product = exact(a, b)[0] + (0.0 if bias is None else bias.double())
    error = ((found.double() - product).norm() / product.norm().clamp(min=1e-300)).item()
    assert error <= 4e-3 + ROUNDOFF[dtype], f"relative error {error:.3g}"


# ------------------------------------------------------------------------------------------------ on a GPU


@on_cuda
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_products_stay_within_the_bound(pair: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, w = operand((m, k), PAIRS[pair][0], 1), operand((n, k), PAIRS[pair][1], 2)
    assert breccia.explain("matmul", a, w.mT, prefer=OURS).running == OURS
    for dtype in ROUNDOFF:
        check(breccia.matmul(a, w.mT, dtype, prefer=OURS), a, w.mT, dtype)


@on_cuda
@pytest.mark.parametrize("pair", ["tensor", "row", "tiles", "blocks", "mx"])
@pytest.mark.parametrize("codecs", list(itertools.product(("E4M3", "E5M2"), repeat=2)), ids="-".join)
def test_codecs_multiply_in_any_pairing(pair: str, codecs: tuple[str, str]) -> None:
    a, w = operand((200, 512), PAIRS[pair][0], 1, codecs[0]), operand((264, 512), PAIRS[pair][1], 2, codecs[1])
    check(breccia.matmul(a, w.mT, "bfloat16", prefer=OURS), a, w.mT, "bfloat16")


@on_cuda
@pytest.mark.parametrize("tile", [*fp8_plans.TABLE, *fp8_plans.GROUPED[1:2]], ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("pair", "copiers"),
    [("tensor", False), ("mx", False), *((pair, copiers) for pair in ("tiles", "blocks") for copiers in (False, True))],
)
def test_every_tile_multiplies_every_shape(tile: Any, pair: str, copiers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_plans, "copiers", lambda *of: copiers)
    monkeypatch.setattr(fp8_matmul, "tile_of", lambda m, n, k, matrices, processors: fp8_plans.short(tile, -(-k // 128)))
    fp8_matmul.forget()
    try:
        for m, n, k in ((300, 264, 640), (128, 2112, 2048), (1000, 1000, 1152), (5, 77, 256)):
            a, w = operand((m, k), PAIRS[pair][0], 1), operand((n, k), PAIRS[pair][1], 2)
            check(fp8_matmul.matmul(a, w.mT, product_options("bfloat16")), a, w.mT, "bfloat16")
            check(fp8_matmul.matmul(a, w.mT), a, w.mT)
    finally:
        fp8_matmul.forget()


@on_cuda
@pytest.mark.parametrize("tile", [tile for tile in fp8_plans.TABLE if tile.cluster > 1], ids=lambda t: t.name)
@pytest.mark.parametrize("pair", ["tiles", "blocks"])
def test_blocks_of_a_cluster_may_end_in_any_order(tile: Any, pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to a block that has ended is a launch failure, once in thousands of products."""
    monkeypatch.setattr(fp8_matmul, "tile_of", lambda m, n, k, matrices, processors: tile)
    fp8_matmul.forget()
    try:
        a, w = operand((3072, 1024), PAIRS[pair][0], 1), operand((1024, 1024), PAIRS[pair][1], 2)
        first = fp8_matmul.matmul(a, w.mT)
        for _ in range(3000):
            found = fp8_matmul.matmul(a, w.mT)
        torch.cuda.synchronize()
        assert torch.equal(found, first)
    finally:
        fp8_matmul.forget()


@on_cuda
@pytest.mark.parametrize("pair", ["tensor", "row", "tiles"])
@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_a_bias_of_any_dtype_is_added_before_rounding(pair: str, dtype: str) -> None:
    for n, k in ((264, 512), (77, 272), (3584, 4096)):
        a, w = operand((100, k), PAIRS[pair][0], 1), operand((n, k), PAIRS[pair][1], 2)
        for bias_dtype in (torch.float32, torch.float16, torch.bfloat16):
            bias = torch.linspace(-50, 50, n, device="cuda").to(bias_dtype)
            check(breccia.matmul(a, w.mT, dtype, bias=bias, prefer=OURS), a, w.mT, dtype, bias)


@on_cuda
def test_out_receives_the_product_in_place_and_in_strided_memory() -> None:
    a, w = operand((100, 512), BLOCK, 1), operand((264, 512), TILES, 2)
    expected = breccia.matmul(a, w.mT, "bfloat16", prefer=OURS)
    guarded = torch.full((102, 264), 7.0, device="cuda", dtype=torch.bfloat16)
    wide = torch.zeros(100, 300, device="cuda", dtype=torch.bfloat16)
    for out in (guarded[1:101], wide[:, 5:269]):
        assert breccia.matmul(a, w.mT, "bfloat16", out=out, prefer=OURS) is out
        assert torch.equal(out, expected)
    assert (guarded[0] == 7).all() and (guarded[-1] == 7).all() and not wide[:, 269:].any()
    with pytest.raises(breccia.BrecciaError, match=r"out= must have shape \(100, 264\) and dtype bfloat16"):
        breccia.matmul(a, w.mT, "bfloat16", out=torch.zeros(100, 264, device="cuda"), prefer=OURS)


@on_cuda
@pytest.mark.parametrize("pair", PAIRS)
def test_leading_axes_are_batches(pair: str) -> None:
    for k in (512, 640):
        for left, right in (
            ((2, 3, 50, k), (72, k)),
            ((2, 3, 50, k), (2, 3, 72, k)),
            ((40, k), (3, 72, k)),
            ((3, 40, k), (1, 72, k)),
        ):
            a, w = operand(left, PAIRS[pair][0], 1), operand(right, PAIRS[pair][1], 2)
            check(breccia.matmul(a, w.mT, "bfloat16", prefer=OURS), a, w.mT, "bfloat16")
            check(breccia.matmul(a, w.mT, prefer=OURS), a, w.mT)


@on_cuda
def test_column_major_scales_are_read_as_they_are() -> None:
    x, y = torch.randn(300, 640, device="cuda"), torch.randn(264, 640, device="cuda")
    for recipe in (TILES, BLOCK):
        storage = {"storage": "column_major"} if recipe is BLOCK else {}
        a, w = breccia.cast(x, BLOCK, storage="column_major"), breccia.cast(y, recipe, **storage)
        assert breccia.explain("matmul", a, w.mT, prefer=OURS).running == OURS
        plain = breccia.matmul(a.to_plain(), w.to_plain().mT, prefer=OURS)
        assert torch.equal(breccia.matmul(a, w.mT, prefer=OURS), plain)


@on_cuda
def test_operands_in_any_order_of_memory_are_copied_where_that_is_needed() -> None:
    x, y = torch.randn(512, 100, device="cuda"), torch.randn(512, 264, device="cuda")
    a, b = breccia.cast(x, TENSOR).mT, breccia.cast(y, TENSOR, axis=-2)
    check(breccia.matmul(a, b, prefer=OURS), a, b)
    b = breccia.cast(y, BLOCK, axis=-2)
    a = operand((100, 512), BLOCK, 3)
    check(breccia.matmul(a, b, prefer=OURS), a, b)
    sliced = operand((200, 512), ROW, 4)[7:107]
    w = operand((264, 512), ROW, 5)
    check(breccia.matmul(sliced, w.mT, prefer=OURS), sliced, w.mT)


@on_cuda
@pytest.mark.parametrize("pair", ["tensor", "row", "tiles", "blocks", "mx"])
def test_nan_and_inf_reach_exactly_the_rows_and_columns_that_they_are_in(pair: str) -> None:
    x, y = torch.randn(130, 512, device="cuda"), torch.randn(200, 512, device="cuda")
    x[3, 5] = float("nan")
    a, w = breccia.cast(x, PAIRS[pair][0]), breccia.cast(y, PAIRS[pair][1])
    found, expected = breccia.matmul(a, w.mT, prefer=OURS), breccia.matmul(a, w.mT, prefer="reference.matmul")
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    a = breccia.cast(x.nan_to_num(), PAIRS[pair][0])
    a.data.view(torch.uint8)[7, 9] = 0x7F  # E4M3's NaN
    found = breccia.matmul(a, w.mT, prefer=OURS)
    assert found[7].isnan().all() and not found[:7].isnan().any() and not found[8:].isnan().any()
    e5 = operand((130, 512), PAIRS[pair][0], 1, "E5M2")
    e5.data.view(torch.uint8)[7, 9] = 0x7C  # E5M2's infinity
    found = breccia.matmul(e5, w.mT, prefer=OURS)
    weights = breccia.dequantize(w)[:, 9]
    assert torch.equal(found[7][weights > 0], torch.full_like(found[7][weights > 0], float("inf")))
    assert found[8:].isfinite().all() and found[:7].isfinite().all()


@on_cuda
def test_adversarial_sums_keep_the_bound_and_fast_accumulation_violates_it() -> None:
    for k in (4096, 16384):
        x, y = torch.full((64, k), 2.0, device="cuda"), torch.full((64, k), 4.0, device="cuda")
        x[:, 0] = y[:, 0] = 448.0
        a, w = breccia.cast(x, TENSOR), breccia.cast(y, TENSOR)
        product, size = exact(a, w.mT)
        bound = bounds.accumulated(size, k, k, True)
        found = breccia.matmul(a, w.mT, prefer=OURS)
        assert ((found.double() - product).abs() <= bound).all()
        fast = breccia.matmul(a, w.mT, prefer=FAST)
        assert ((fast.double() - product).abs() > bound).any(), "fast accumulation kept the bound: it could be the default"


@on_cuda
def test_products_repeat_bit_by_bit_on_streams_and_in_graphs() -> None:
    for m, n, k in ((300, 264, 640), (64, 3584, 4096), (1024, 2048, 2048)):
        a, w = operand((m, k), BLOCK, 1), operand((n, k), TILES, 2)
        first = breccia.matmul(a, w.mT, "bfloat16", prefer=OURS)
        for _ in range(5):
            assert torch.equal(breccia.matmul(a, w.mT, "bfloat16", prefer=OURS), first)
        assert torch.equal(on_another_stream(lambda a=a, w=w: breccia.matmul(a, w.mT, "bfloat16", prefer=OURS)), first)
        out = torch.empty_like(first)
        run = functools.partial(breccia.matmul, a, w.mT, "bfloat16", out=out, prefer=OURS)
        graph, _ = captured(lambda run=run: [run() for _ in range(3)])
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, first)


@on_cuda
def test_a_product_waits_for_the_casts_ahead_of_it() -> None:
    x, y = torch.randn(64, 4096, device="cuda"), torch.randn(3584, 4096, device="cuda")
    expected = breccia.matmul(breccia.cast(x, BLOCK), breccia.cast(y, TILES).mT, "bfloat16", prefer=OURS)
    for _ in range(50):
        a, w = breccia.cast(x, BLOCK), breccia.cast(y, TILES)
        found = breccia.matmul(a, w.mT, "bfloat16", prefer=OURS)
        a.data.view(torch.uint8).zero_(), w.data.view(torch.uint8).zero_()
        assert torch.equal(found, expected)


@on_cuda
@pytest.mark.parametrize("pair", ["tensor", "row", "tiles", "blocks"])
def test_torch_multiplies_any_number_of_rows(pair: str) -> None:
    for rows, k in ((1, 256), (3, 512), (4, 640), (17, 1024), (130, 128)):
        a, w = operand((rows, k), PAIRS[pair][0], 1), operand((144, k), PAIRS[pair][1], 2)
        assert breccia.explain("matmul", a, w.mT, out_dtype="bfloat16", prefer="torch.scaled_mm").running == "torch.scaled_mm"
        check(breccia.matmul(a, w.mT, "bfloat16", prefer="torch.scaled_mm"), a, w.mT, "bfloat16")


@on_cuda
@pytest.mark.parametrize("pair", ["tensor", "row", "tiles", "blocks", "mx"])
@pytest.mark.parametrize("rows", [(5, 0, 40, 3), (300, 200, 1, 500), (0, 0, 0, 0), (64, 64, 64, 64)], ids=str)
@pytest.mark.parametrize("copiers", [False, True])
def test_groups_multiply_their_own_matrices(
    pair: str, rows: tuple[int, ...], copiers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_plans, "copiers", lambda *of: copiers)
    for n, k in ((264, 512), (77, 640)):
        ends = np.cumsum(rows).astype(np.int32)
        m = int(ends[-1]) + 7  # rows of no group
        a, w = operand((m, k), PAIRS[pair][0], 1), operand((len(rows), n, k), PAIRS[pair][1], 2)
        for offsets, dtype in itertools.product((ends, ends.astype(np.int64)), ("bfloat16", "float32")):
            found = breccia.grouped_matmul(a, w.mT, torch.from_numpy(offsets).cuda(), dtype, prefer=GROUPED)
            assert not found[ends[-1] :].any()
            start = 0
            for e, end in enumerate(ends):
                if end > start:
                    check(found[start:end], a[start:end], w[e].mT, dtype)
                start = end


@on_cuda
def test_layers_gradients_and_graphs_of_torch_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:

    ran: list[Any] = []
    multiply = fp8_matmul._multiply
    monkeypatch.setattr(fp8_matmul, "_multiply", lambda *given: ran.append(given) or multiply(*given))
    monkeypatch.setenv("BRECCIA_PREFER", OURS)
    w = operand((264, 512), ROW, 1)

    def layer(x: Any) -> Any:
        return breccia.cast_matmul(x, ROW, w.mT, "bfloat16")

    x = torch.randn(100, 512, device="cuda", requires_grad=True)
    eager = layer(x)
    eager.sum().backward()
    assert len(ran) == 1 and x.grad is not None and x.grad.isfinite().all()
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graph(x.detach())
    ran.clear()
    assert torch.equal(graph(x.detach()), eager) and len(ran) == 1


@on_cuda
def test_operands_elsewhere_are_refused_before_any_launch() -> None:
    a, w = operand((64, 512), BLOCK, 1), operand((64, 512), TILES, 2)
    with pytest.raises(breccia.BrecciaError, match="cpu"):
        breccia.matmul(a, w.to("cpu").mT, prefer=OURS)
    with pytest.raises(breccia.BrecciaError, match="mismatch"):
        breccia.matmul(a, operand((64, 256), TILES, 2).mT, prefer=OURS)
    odd = operand((64, 72), ROW, 1)
    with pytest.raises(breccia.BrecciaError, match="K = 72 is not a multiple of 16"):
        breccia.matmul(odd, odd.mT, prefer=OURS)
    assert breccia.explain("matmul", odd, odd.mT).running == "triton.fp8_matmul"
    check(breccia.matmul(odd, odd.mT), odd, odd.mT)
    short = operand((64, 24), ROW, 1)  # too few terms for sums in tensor cores: dequantized
    check(breccia.matmul(short, short.mT), short, short.mT)


@on_cuda
@pytest.mark.parametrize("pair", ["tensor", "row", "tiles", "blocks"])
def test_torch_writes_to_the_memory_of_the_caller(pair: str) -> None:
    a, w = operand((256, 512), PAIRS[pair][0], 1), operand((2048, 512), PAIRS[pair][1], 2)
    multiply = functools.partial(breccia.matmul, a, w.mT, "bfloat16", prefer="torch.scaled_mm")
    expected = multiply()
    out, apart = torch.empty_like(expected), torch.zeros(256, 2080, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert multiply(out=out) is out and torch.equal(out, expected)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes
    multiply(out=apart[:, :2048])
    assert torch.equal(apart[:, :2048], expected) and not apart[:, 2048:].any()


@on_cuda
@pytest.mark.parametrize("name", ["torch.scaled_mm", "torch.scaled_mm_fast"])
def test_products_of_torch_are_kernels_of_the_same_table(name: str) -> None:
    for pair, dtypes in (("tensor", ROUNDOFF), ("row", ("bfloat16",)), ("tiles", ("bfloat16",)), ("blocks", ("bfloat16",))):
        a, w = operand((256, 512), PAIRS[pair][0], 1), operand((384, 512), PAIRS[pair][1], 2)
        for dtype in dtypes:
            reasons = breccia.explain("matmul", a, w.mT, prefer=name, out_dtype=dtype)
            if reasons.running != name:
                assert name == "torch.scaled_mm_fast" or pair in ("tiles", "blocks"), str(reasons)
                continue
            check(breccia.matmul(a, w.mT, dtype, prefer=name), a, w.mT, dtype)


# ------------------------------------------------------------------------------------------------ without one


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", ["fp8_current", "fp8_row"])
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_torch_multiplies_in_the_memory_of_the_host_too(lead: tuple[int, ...], spec: str, out_dtype: str) -> None:
    """What the executable enqueues, of matrices as torch takes them and of operands that are made so."""
    if spec == "fp8_row" and torch.__version__ < "2.12":
        pytest.skip("torch before 2.12 multiplies rows with scales of their own on GPUs only")
    generator = torch.Generator().manual_seed(1)
    a, w = (breccia.cast(torch.randn(*shape, generator=generator), spec) for shape in ((*lead, 16, 64), (32, 64)))
    for first, second in ((a, w.mT), (a[..., ::2, :], breccia.cast(torch.randn(64, 32, generator=generator), spec, axis=-2))):
        multiplied = scaled_mm._executable(first, second, None, out_dtype, False)
        to = torch.empty(multiplied.shape, dtype=multiplied.dtype)
        own = multiplied.enqueue(0, first, second, None, to)
        check(to if own is None else own, first, second, out_dtype)


def all_variants() -> list[fp8_plans.GemmVariant]:
    """Those of FP8, and the same source for BF16 operands."""
    first, found = fp8_plans.TABLE[0], fp8_variants()
    bf16 = functools.partial(fp8_plans.GemmVariant, codecs=("bf16", "bf16"), a_plain=False)
    forms = ((fp8_plans.OUTER, 1, 1), *((fp8_plans.ROWS, span, pieces) for span, pieces in ((2, 1), (1, 1), (1, 2), (1, 4))))
    found += [
        bf16(t, s, promote=s != fp8_plans.OUTER, span=span, pieces=pieces) for t in fp8_plans.TABLE for s, span, pieces in forms
    ]
    found += [
        bf16(first, s, out=out, bias=bias, staged=out != "float32", promote=s != fp8_plans.OUTER)
        for s, out, bias in itertools.product(
            (fp8_plans.OUTER, fp8_plans.ROWS), ("float32", "float16"), ("none", "float32", "bfloat16")
        )
    ]
    return found


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 8))])
def test_variants_compile_for_hopper_with_few_spills(part: int) -> None:
    if reason := compiler.missing():
        pytest.skip(reason)
    for variant in all_variants()[part::8]:
        source = fp8_matmul.source_of(variant.tile.columns, variant.codecs)
        made, log = compiled_with_log(source, variant.macros)
        assert made[:4] == b"\x7fELF"
        assert "serialized" not in log and "warning" not in log, (variant, log)
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
        assert spilled <= 64, (variant, log)  # a few registers of an epilogue


def test_every_variant_fits_shared_memory_and_has_at_least_three_stages() -> None:
    for variant in all_variants():
        assert 3 <= variant.stages <= variant.tile.stages
        assert variant.shared <= fp8_plans.SHARED
        ring = variant.stages * (variant.tile.rows + variant.tile.columns) * 128
        partial = (variant.tile.split - 1) * variant.tile.rows * variant.tile.columns * 4
        assert partial <= ring


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((4096, 7168, 16384), "256x128"), ((4096, 4096, 4096), "256x128"), ((4096, 2112, 7168), "128x176"),
        ((4096, 24576, 1536), "256x128 short"), ((128, 7168, 16384), "128x112 split"), ((64, 7168, 16384), "64x112 split"),
        ((128, 7168, 2048), "128x64"), ((1, 4096, 128), "64x64"),
    ],
)  # fmt: skip
def test_tiles_follow_waves_and_the_length_of_k(shape: tuple[int, int, int], name: str) -> None:
    assert fp8_plans.tile_of(*shape, 1, 132).name == name


def test_split_tiles_have_a_step_for_each_part_and_never_groups() -> None:
    for m, n, k in itertools.product((1, 64, 128, 4096), (16, 112, 7168), (16, 128, 256, 65536)):
        assert fp8_plans.tile_of(m, n, k, 1, 132).split <= -(-k // 128)
    assert all(tile.split == 1 for tile in fp8_plans.GROUPED)


def test_warps_copy_scales_only_where_blocks_share_no_operand() -> None:
    pair = ("1x128", "128x128")
    assert {tile.share for tile in fp8_plans.TABLE if fp8_plans.copiers(tile, pair, False)} == {(1, 1)}
    assert not any(fp8_plans.copiers(tile, pair, True) for tile in fp8_plans.GROUPED)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield installed(monkeypatch)
    fp8_matmul.forget()


def cpu(shape: tuple[int, ...], recipe: Any) -> Any:
    return operand(shape, recipe, 1, device="cpu")


def test_leading_axes_of_a_become_rows_where_b_has_one_matrix(stand_in: StandIn) -> None:
    a, w = cpu((2, 3, 50, 512), ROW), cpu((72, 512), ROW)
    assert fp8_matmul.matmul(a, w.mT, product_options("bfloat16")).shape == (2, 3, 50, 72)
    _, args = stand_in.launched[-1]
    assert (args.M, args.N, args.K, args.matrices, args.a_matrix, args.w_matrix) == (300, 72, 512, 1, 0, 0)
    assert (args.sa, args.sa_row, args.sw_row) == (a.scale.data_ptr(), 1, 1)
    fp8_matmul.matmul(a, cpu((2, 3, 72, 512), ROW).mT)
    _, args = stand_in.launched[-1]
    assert (args.M, args.matrices, args.a_matrix, args.w_matrix, args.sa_matrix, args.sw_matrix) == (50, 6, 1, 1, 50, 72)


@pytest.fixture
def no_copiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA copies all scales."""
    monkeypatch.setattr(fp8_plans, "copiers", lambda *of: False)


@pytest.mark.usefixtures("no_copiers")
def test_scales_of_blocks_are_read_in_place_and_copied_only_where_rows_are_not_aligned(stand_in: StandIn) -> None:
    a, w = cpu((300, 512), BLOCK), cpu((264, 512), TILES)
    fp8_matmul.matmul(a, w.mT, product_options("bfloat16"))
    codes, weights, scales, out = stand_in.maps
    assert codes[1:6] == [3, a.data.data_ptr(), [512, 300, 1], [512, 300 * 512], [128, 64, 1]]
    assert weights[2] == w.data.data_ptr()
    assert scales[2:6] == [a.scale.data_ptr(), [4, 300, 1], [16, 4800], [4, 64, 1]]
    assert out[3] == [264, 300, 1]
    assert stand_in.launched[-1][1].sw == w.scale.data_ptr()
    short = cpu((300, 640), BLOCK)
    fp8_matmul.matmul(short, cpu((264, 640), TILES).mT)
    assert stand_in.maps[2][3:6] == [[300, 5, 1], [1200, 6000], [64, 1, 1]]
    assert stand_in.maps[2][2] != short.scale.data_ptr()
    assert not stand_in.variants[-1].a_plain and stand_in.variants[0].a_plain


def test_scales_of_mx_formats_are_read_as_they_are_with_four_for_each_step(stand_in: StandIn) -> None:
    a, w = cpu((300, 512), MX), cpu((264, 512), MX)
    fp8_matmul.matmul(a, w.mT, product_options("bfloat16"))
    variant, args = stand_in.variants[-1], stand_in.launched[-1][1]
    assert (variant.pieces, variant.scales, variant.e8m0) == (4, fp8_plans.BLOCKS, (True, True))
    assert (args.sa, args.sa_row, args.sw, args.sw_row) == (a.scale.data_ptr(), 16, w.scale.data_ptr(), 16)
    assert "scales of a" not in stand_in.read and "scales of b" not in stand_in.read
    short, fp32 = cpu((300, 272), MX), cpu((264, 272), breccia.Float8BlockScaling(block_k=32))
    fp8_matmul.matmul(short, fp32.mT, product_options("bfloat16"))
    assert stand_in.variants[-1].e8m0 == (True, False) and "scales of a" not in stand_in.read
    assert stand_in.maps[2][3:6] == [[12, 264, 1], [48, 48 * 264], [4, 64, 1]]
    for name, dtype, scale in (("sa", np.uint8, short.scale.view(torch.uint8)), ("scales of b", np.float32, fp32.scale)):
        scales = np.frombuffer(stand_in.read[name], dtype).reshape(-1, 12)
        assert np.array_equal(scales[:, :9], scale.numpy()) and not scales[:, 9:].any()


@pytest.mark.usefixtures("no_copiers")
@pytest.mark.parametrize("opaque", [False, True])
def test_a_repeated_call_prepares_nothing(opaque: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a call with tensors at other addresses, unless the driver's tensor maps do not show how they hold one."""
    stand_in = installed(monkeypatch, opaque)
    a, w, out = cpu((300, 512), BLOCK), cpu((264, 512), TILES), torch.empty(300, 264, dtype=torch.bfloat16)
    for _ in range(3):
        fp8_matmul.matmul(a, w.mT, product_options("bfloat16", out=out))
    assert len(stand_in.variants) == 1 and len(stand_in.launched) == 3
    assert stand_in.described == (15 if opaque else 5)
    prepared = list(fp8_matmul._calls.values())
    x, y, to = cpu((300, 512), BLOCK), cpu((264, 512), TILES), torch.empty(300, 264, dtype=torch.bfloat16)
    fp8_matmul.matmul(x, y.mT, product_options("bfloat16", out=to))
    assert stand_in.described == (20 if opaque else 5) and len(stand_in.variants) == 1
    assert list(fp8_matmul._calls.values()) == prepared
    assert [each[2] for each in stand_in.maps] == [t.data_ptr() for t in (x.data, y.data, x.scale, to)]


@pytest.mark.parametrize(
    ("tile", "rows", "end"),
    [
        ("64x64", 1, 8),
        ("64x64", 64, 0),
        ("64x64", 150, 24),
        ("256x128", 100, 104),  # the second block of a cluster copies nothing
        ("256x128", 129, 8),
        ("256x128", 384, 0),
        ("192x128", 200, 8),
    ],
)
def test_rows_where_a_ends_have_a_map_of_their_own(
    tile: str, rows: int, end: int, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = next(each for each in fp8_plans.TABLE if each.name == tile)
    monkeypatch.setattr(fp8_matmul, "tile_of", lambda *of: chosen)
    fp8_matmul.matmul(cpu((rows, 512), TENSOR), cpu((264, 512), TENSOR).mT)
    assert stand_in.maps[0][5] == [128, chosen.rows // chosen.share[1], 1]
    assert (stand_in.end[5] if stand_in.end else [128, 0, 1]) == [128, end, 1]


def test_odd_columns_leave_without_the_copy_engine(stand_in: StandIn) -> None:
    for n, staged, pairs in ((264, True, True), (262, False, True), (77, False, False)):
        fp8_matmul.matmul(cpu((300, 512), ROW), cpu((n, 512), ROW).mT, product_options("bfloat16"))
        assert (stand_in.variants[-1].staged, stand_in.variants[-1].pairs) == (staged, pairs)
    fp8_matmul.matmul(cpu((300, 512), ROW), cpu((264, 512), ROW).mT)
    assert not stand_in.variants[-1].staged


def test_groups_have_a_persistent_grid_and_their_offsets_on_the_device(stand_in: StandIn) -> None:
    a, w, ends = cpu((300, 512), ROW), cpu((4, 264, 512), ROW), torch.tensor([10, 20, 30, 300], dtype=torch.int32)
    fp8_matmul.grouped_matmul(a, w.mT, ends, product_options("bfloat16"))
    grid, args = stand_in.launched[-1]
    assert grid == 132 and args.offsets == ends.data_ptr()
    assert (args.M, args.matrices, args.w_matrix, args.sw_matrix) == (300, 4, 1, 264)


@pytest.mark.parametrize("storage", ["plain", "column_major"])
def test_scales_of_groups_are_plain_as_tiles_begin_at_any_row(stand_in: StandIn, storage: str) -> None:
    a, ends = breccia.cast(torch.randn(53, 640), BLOCK, storage=storage), torch.tensor([5, 53])
    fp8_matmul.grouped_matmul(a, cpu((2, 264, 640), BLOCK).mT, ends, product_options("bfloat16"))
    assert stand_in.variants[-1].a_plain and not stand_in.variants[-1].w_plain
    assert stand_in.maps[2][3:6] == [[8, 53, 1], [32, 32 * 53], [4, 64, 1]]
    assert stand_in.maps[3][3:6] == [[264, 5, 2], [4 * 264, 4 * 5 * 264], [64, 1, 1]]


def test_plain_scales_that_warps_copy_are_read_in_place(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_plans, "copiers", lambda *of: True)
    a, w, ends = cpu((53, 640), BLOCK), cpu((2, 264, 640), BLOCK), torch.tensor([5, 53], dtype=torch.int32)
    fp8_matmul.grouped_matmul(a, w.mT, ends, product_options("bfloat16"))
    _, args = stand_in.launched[-1]
    assert stand_in.variants[-1].copiers and len(stand_in.maps) == 3  # codes of both, and the output
    assert (args.sa, args.sw, args.sa_row, args.sw_row) == (a.scale.data_ptr(), w.scale.data_ptr(), 5, 5)
    assert (args.sa_matrix, args.sw_matrix) == (0, 264 * 5)
    fp8_matmul.matmul(cpu((2, 3, 50, 640), BLOCK), cpu((72, 640), TILES).mT)
    assert (stand_in.launched[-1][1].M, stand_in.launched[-1][1].matrices) == (300, 1)


@pytest.mark.long
def test_warps_copy_plain_scales_of_small_tiles(stand_in: StandIn) -> None:
    """For these shapes they were 1.2 to 1.9 times faster on an H200, and slower for those below."""
    tiles = cpu((7168, 2048), TILES)
    for a in (cpu((32, 2048), BLOCK), cpu((128, 2048), BLOCK), cpu((2, 4, 16, 2048), BLOCK)):
        fp8_matmul.matmul(a, tiles.mT, product_options("bfloat16"))
        assert stand_in.variants[-1].copiers and stand_in.launched[-1][1].sa == a.scale.data_ptr()
    fp8_matmul.matmul(cpu((16, 2048), BLOCK), cpu((7168, 2048), BLOCK).mT)
    assert stand_in.variants[-1].copiers
    stand_in.variants.clear()
    fp8_matmul.matmul(cpu((1024, 2048), BLOCK), tiles.mT)
    fp8_matmul.matmul(cpu((2, 4, 128, 2048), BLOCK), tiles.mT)  # its rows are merged: the same kernel
    fp8_matmul.matmul(cpu((32, 2048), ROW), cpu((7168, 2048), ROW).mT)
    fp8_matmul.matmul(cpu((32, 2048), MX), cpu((7168, 2048), MX).mT)
    fp8_matmul.grouped_matmul(cpu((32, 2048), BLOCK), cpu((2, 7168, 2048), TILES).mT, torch.tensor([10, 32]))
    assert [variant.copiers for variant in stand_in.variants] == [False] * 4


@pytest.mark.usefixtures("no_copiers")
def test_one_matrix_of_w_has_one_matrix_of_scales(stand_in: StandIn) -> None:
    for w in (cpu((72, 640), TILES), cpu((1, 72, 640), TILES)):
        fp8_matmul.matmul(cpu((2, 50, 640), BLOCK), w.mT)
        _, args = stand_in.launched[-1]
        assert (args.matrices, args.w_matrix, args.sw_matrix) == (2, 0, 0)
    fp8_matmul.matmul(cpu((2, 50, 640), BLOCK), cpu((2, 272, 640), TILES).mT)
    assert stand_in.launched[-1][1].sw_matrix == 3 * 5


def test_wrong_devices_and_wrong_outputs_are_refused_before_any_launch(stand_in: StandIn) -> None:
    a, w = cpu((300, 512), ROW), cpu((264, 512), ROW)
    elsewhere = torch.empty(264, device="meta")
    with pytest.raises(breccia.BrecciaError, match="matmul: a is on cpu, and bias on meta; move it"):
        fp8_matmul.matmul(a, w.mT, product_options("float32", bias=elsewhere))
    with pytest.raises(breccia.BrecciaError, match=r"out= must have shape \(300, 264\) and dtype float32; got \(300, 260\)"):
        fp8_matmul.matmul(a, w.mT, product_options("float32", out=torch.empty(300, 260)))
    assert not stand_in.launched


def accepts(accept: Any, a: Any, b: Any, **options: Any) -> str | None:
    return accept(call_of(a, b, **options))


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (cpu((64, 512), ROW), cpu((64, 512), BLOCK).mT, "it has no form for scales row times 1x128"),
        (cpu((64, 512), TILES), cpu((64, 512), TILES).mT, "it has no form for scales 128x128 times 128x128"),
        (cpu((64, 72), ROW), cpu((64, 72), ROW).mT, "K = 72 is not a multiple of 16"),
        (cpu((64, 64), BLOCK), cpu((64, 64), BLOCK), "blocks of b do not run along K"),
        (cpu((2, 1, 64, 64), ROW), cpu((3, 64, 64), ROW).mT, "leading axes (2, 1) and (3,) broadcast in both directions"),
        (cpu((64, 64), breccia.Float8BlockScaling(block_k=64)), cpu((64, 64), ROW).mT, "it has no form for PerBlockK"),
        (torch.zeros(64, 64), cpu((64, 64), ROW).mT, "it multiplies two FP8 tensors, and a is an array"),
        (cpu((0, 64), ROW), cpu((64, 64), ROW).mT, "the generic algorithm runs for empty operands"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_kernel_does_not_take_has_a_reason(a: Any, b: Any, reason: str) -> None:
    assert reason in str(accepts(fp8_plans.accepts_matmul, a, b))


def test_leading_axes_of_any_length_are_batches_where_one_operand_has_them_all() -> None:
    for left, right in (
        ((9, 8, 64), (9, 16, 64)),
        ((17, 3, 8, 64), (16, 64)),
        ((8, 64), (9, 16, 64)),
        ((1, 9, 8, 64), (9, 16, 64)),
    ):
        assert accepts(fp8_plans.accepts_matmul, cpu(left, ROW), cpu(right, ROW).mT) is None
    assert "both directions" in str(accepts(fp8_plans.accepts_matmul, cpu((9, 1, 8, 64), ROW), cpu((9, 16, 64), ROW).mT))


def test_other_formats_and_fast_sums_of_blocks_have_reasons() -> None:
    w = cpu((64, 512), ROW)
    mx = breccia.cast(torch.zeros(64, 512), "mxfp8")
    assert accepts(fp8_plans.accepts_matmul, mx, mx.mT) is None
    assert "it has no form for scales 1x32 times row" in str(accepts(fp8_plans.accepts_matmul, mx, w.mT))
    assert "blocks of 32 along K in torch.block_scaled_mm" in str(accepts(torch_plans.accepts, mx, mx.mT))
    nv = breccia.cast(torch.zeros(64, 512), "nvfp4")
    assert "it multiplies two FP8 tensors, and a is nvfp4" in str(accepts(fp8_plans.accepts_matmul, nv, w.mT))
    a, b = cpu((64, 512), BLOCK), cpu((64, 512), TILES)
    assert accepts(fp8_plans.accepts_matmul, a, b.mT) is None
    assert "scales change within K" in str(accepts(fp8_plans.accepts_fast, a, b.mT))
    assert accepts(fp8_plans.accepts_fast, w, w.mT) is None


def test_the_products_of_torch_say_what_they_do_not_take() -> None:
    row, tensor, blocks = cpu((64, 512), ROW), cpu((64, 512), TENSOR), cpu((64, 512), BLOCK)
    accept = torch_plans.accepts
    assert accepts(accept, tensor, tensor.mT) is None
    assert accepts(accept, row, row.mT, out_dtype="bfloat16") is None
    assert "multiplies E4M3 to bfloat16 only" in str(accepts(accept, row, row.mT))
    assert "torch has no form for scales tensor times row" in str(accepts(accept, tensor, row.mT))
    assert "torch adds no bias to a product of scales row times row" in str(
        accepts(accept, row, row.mT, out_dtype="bfloat16", bias=torch.zeros(64))
    )
    for bias, dtype, why in (
        (torch.float32, "bfloat16", "the bias is float32, and torch would round it to bfloat16 before it is added"),
        (torch.bfloat16, "float16", "the bias is bfloat16, and torch would round it to float16"),
        (torch.float32, "float32", "torch adds no bias to a float32 result"),
    ):
        assert why in str(accepts(accept, tensor, tensor.mT, out_dtype=dtype, bias=torch.zeros(64, dtype=bias)))
    for dtype in ("bfloat16", "float16"):
        assert accepts(accept, tensor, tensor.mT, out_dtype=dtype, bias=torch.zeros(64, dtype=getattr(torch, dtype))) is None
    assert "fast accumulation for scales of tensors and rows" in str(
        accepts(torch_plans.accepts_fast, blocks, blocks.mT, out_dtype="bfloat16")
    )
    e5 = operand((64, 512), TENSOR, 1, "E5M2", "cpu")
    assert "E5M2 by E5M2" in str(accepts(accept, e5, e5.mT))
    odd = cpu((50, 512), TENSOR)
    assert "N of 16; got K = 512, N = 50" in str(accepts(accept, tensor, odd.mT))


def test_tensors_with_a_scale_for_each_matrix_are_dequantized_where_torch_has_one_scale() -> None:
    """No fact of a call says how many scales there are; torch takes one for a tensor."""
    a, w = breccia.stack([cpu((64, 512), TENSOR), operand((64, 512), TENSOR, 7, device="cpu")]), cpu((32, 512), TENSOR)
    assert a.scale.shape == (2,)
    check(scaled_mm.scaled_mm(a, w.mT, product_options("bfloat16")), a, w.mT, "bfloat16")


def test_kernels_are_chosen_anew_for_a_bias_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table caches what it chose by the facts that kernels have read."""
    asked: list[str | None] = []

    def reads_bias(call: Call) -> str | None:
        asked.append(call.bias)
        return "it is only here to ask"

    monkeypatch.setattr(sys.modules[__name__], "reads_bias", reads_bias, raising=False)
    kernel = breccia.Kernel("matmul", "torch", f"{__name__}:reads_bias", "test.bias", accepts=f"{__name__}:reads_bias")
    table = Table([*registry.registry().table.kernels, kernel], frameworks=registry.registry().frameworks)
    a, w = cpu((64, 512), TENSOR), cpu((64, 512), TENSOR)
    for bias in (torch.zeros(64), torch.zeros(64).bfloat16(), torch.ones(64)):
        table.choose(OPERATIONS["matmul"], "torch", a, w.mT, None, ProductOptions(bias=bias))
    table.choose(OPERATIONS["matmul"], "torch", a, w.mT)
    assert asked == ["float32", "bfloat16", None]  # the third call has the facts of the first


def test_the_fastest_by_the_table_of_the_device_runs_and_ours_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, w), (few_a, few_w) = ((cpu((m, 4096), ROW), cpu((4096, 4096), ROW)) for m in (4096, 512))

    def scores(a: Any = a, w: Any = w) -> tuple[float, float]:
        call = Call(OPERATIONS["matmul"], "torch", (a, w.mT, None, FLOAT32, None))
        return fp8_plans.score(call), fp8_plans.score_of_torch(call)

    monkeypatch.setattr(fp8_plans, "available", lambda device: "another device")
    ours, theirs = scores()
    assert ours < theirs
    measured = {f"{of} row row {m}x4096x4096": over for of, over in (("cuda", 1.5), ("torch", 1.2)) for m in (512, 4096)}
    monkeypatch.setattr(fp8_plans, "slowdowns", lambda device: measured)
    ours, theirs = scores()
    assert theirs == pytest.approx(ours * 1.2 / 1.5)
    ours, theirs = scores(few_a, few_w)
    assert theirs == pytest.approx(ours * 1.2 / 1.5)
    monkeypatch.setattr(fp8_plans, "available", lambda device: None)
    ours, theirs = scores(few_a, few_w)
    longer = 50e-6 - 33e-6  # what torch's product takes the host longer
    assert ours < theirs == pytest.approx(50e-6 + longer)
    ours, theirs = scores()
    assert theirs == pytest.approx(ours * 1.2 / 1.5 + longer)


def test_operands_of_unknown_shape_are_judged_by_their_recipes() -> None:
    a, b = Described(ROW), Described(ROW, axis=-2)
    call = Call(OPERATIONS["matmul"], "torch", (a, b, None, FLOAT32, None))
    assert fp8_plans.accepts_matmul(call) is None and torch_plans.accepts(call) is not None  # FP32 out
    assert fp8_plans.accepts_grouped(call) is None
    assert fp8_plans.score(call) < fp8_plans.score_of_torch(call)


def test_the_table_of_a_device_is_read_by_its_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "SHIPPED", tmp_path)
    measurements.measured.cache_clear()
    text = '{"schema": 2, "device": "NVIDIA H200", "entries": {"cuda row row 128x512x4096": 1.25}}'
    (tmp_path / "matmul_nvidia_h200.json").write_text(text)
    (tmp_path / "matmul_nvidia_h100.json").write_text(text)
    try:
        assert fp8_plans.slowdowns("NVIDIA H200") == {"cuda row row 128x512x4096": 1.25}
        with pytest.warns(UserWarning, match="matmul_nvidia_h100.json: it is for 'NVIDIA H200', not for 'NVIDIA H100'"):
            assert fp8_plans.slowdowns("NVIDIA H100") == {}
        assert fp8_plans.slowdowns("") == {}
    finally:
        measurements.measured.cache_clear()
    assert measurements.measured_key(fp8_plans.head_of("cuda", ("row", "row")), 128, 512, 4096) == "cuda row row 128x512x4096"


def test_the_facade_has_the_products_by_function_name() -> None:
    from breccia.kernels import triton

    assert triton.grouped_matmul is fp8_matmul.grouped_matmul
    assert triton.matmul is fp8_matmul.matmul


@pytest.mark.usefixtures("reloaded")
@pytest.mark.parametrize(
    ("capability", "recipe", "k", "name"),
    [
        ((9, 0), ROW, 72, "triton.fp8_matmul"),  # rows that TMA does not read
        ((8, 9), BLOCK, 512, "triton.fp8_matmul"),
        ((10, 0), BLOCK, 512, "triton.fp8_matmul"),
        ((8, 0), ROW, 512, "triton.fp8_matmul"),
        ((10, 0), MX, 512, "triton.fp8_matmul"),
        ((9, 0), MX, 24, "triton.matmul_bf16"),  # fewer terms than sums in tensor cores of Triton take
        ((9, 0), ROW, 512, OURS),
    ],
    ids=str,
)
def test_another_kernel_runs_where_the_first_does_not_take_a_product(
    capability: tuple[int, int], recipe: Any, k: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(compiler, "missing", lambda: None)
    device = Device("cuda", 0, capability)
    a, b = (Described(recipe, "float8_e4m3fn", (256, k)[::step], recipe.layout.oriented(axis), axis, device)
            for step, axis in ((1, -1), (-1, -2)))  # fmt: skip
    found = registry.registry().table.explain(Call(OPERATIONS["matmul"], "torch", (a, b, None, FLOAT32, None)), KERNELS)
    runs = [verdict.kernel.name for verdict in found.verdicts if verdict.reason is None]
    assert runs == [name], str(found)


def test_devices_without_the_instructions_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(compiler, "missing", lambda: None)
    assert fp8_plans.available(Device("cuda", 0, (9, 0))) is None
    assert "compute capability 9.0; cuda:0 has 8.9" in str(fp8_plans.available(Device("cuda", 0, (8, 9))))
    assert torch_plans.available(Device("cuda", 0, (8, 9))) is None
    assert "need compute capability 8.9" in str(torch_plans.available(Device("cuda", 0, (8, 0))))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(fp8_plans.available(Device("cuda", 0, (9, 0))))
    assert "built without CUDA" in str(torch_plans.available(Device("cuda", 0, (9, 0))))


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Let the table ask anew whether kernels are available, now and after the test."""
    registry.reload()
    yield
    registry.reload()


@pytest.mark.usefixtures("reloaded")
def test_explain_names_the_kernels_and_why_each_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(compiler, "missing", lambda: None)
    said = str(breccia.explain("matmul", "fp8_row", "fp8_block", on="torch:cuda"))
    assert f"{OURS}" in said and "it has no form for scales row times 1x128" in said
    found = breccia.explain("matmul", "fp8_row", "fp8_row", on="torch:cuda")
    assert found.running in (OURS, "torch.scaled_mm"), str(found)
    assert FAST in str(found)


def test_the_program_is_compiled_for_the_architecture_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(compiler, "nvrtc", lambda major: "nvrtc")
    monkeypatch.setattr(compiler, "cubin", lambda *given: asked.append(given) or b"cubin")
    loaded = driver.Function(driver.Driver(StandIn()), "one", ctypes.c_void_p(1), 64)
    loads = type("Loads", (), {"load": lambda self, *given: asked.append(given) or loaded, "enter": lambda self, index: index})
    monkeypatch.setattr(program, "driver", loads)
    source = compiler.CudaSource("one.cu", "text of this test")
    for _ in range(2):
        assert program.function(source, "one", {"A": 1}, 64, torch.device("cuda", 0)) is loaded
    assert loaded.context == 0
    assert len(asked) == 2 and asked[0][1:] == ("sm_90a", {"A": 1}, "nvrtc") and asked[1] == (b"cubin", "one", 64)


@on_cuda
def test_bench_matmul_shows_cublas_beside_breccia_s_kernels() -> None:
    from breccia.cli import bench

    recipes = [(spec, breccia.recipe(spec)) for spec in ("fp8_block", "int4")]
    found = bench.measure_products(recipes, "torch:cuda", size=1024, rows=(16,), runs=2)
    by_arm = {p.arm: p.kernel for p in found}
    assert {"dense bfloat16", "fp8_block x fp8_block", "int4"} <= by_arm.keys()
    if torch.cuda.get_device_capability() == (9, 0):
        assert {"cuda.fp8_matmul", "torch.scaled_mm", "cuda.weight_only"} <= set(by_arm.values())
