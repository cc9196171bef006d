"""On a GPU, bad kernels of FP8 products violate the bound of docs/spec/numerics.md, section 9, and breccia's keep it.

One term is large and thousands are small: sums without promotion, or in FP16, lose the small ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from marks import on_cuda

import breccia
from breccia.kernels import bounds

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from breccia_triton.gemm.fp8 import matmul as fp8_matmul  # noqa: E402
from breccia_triton.gemm.fp8 import plans as fp8_plans  # noqa: E402
from breccia_triton.launch import compiler  # noqa: E402

#: Recipes of a and b whose scales change within K.
BLOCKS = {"tiles": ("fp8_block", "fp8_block,block_m=128"), "blocks": ("fp8_block", "fp8_block"), "mx": ("mxfp8", "mxfp8")}
ROWS = 64


def operand(spec: str, k: int, large: float, small: float, device: str = "cuda") -> Any:
    """ROWS rows of one large number and k - 1 small ones. They are exact as codes, and every scale is 1."""
    recipe = breccia.recipe(spec)
    x = torch.full((ROWS, k), small, device=device)
    x[:, 0] = large
    codes = x.to(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), x)
    like = breccia.cast(x, recipe)
    one = torch.full_like(like.scale.view(torch.uint8), 127) if like.scale.element_size() == 1 else torch.ones_like(like.scale)
    return breccia.ScaledTensor(codes, one.view(like.scale.dtype), recipe, like.layout)


def over_bound(found: Any, a: Any, w: Any) -> float:
    """The largest error, in units of the bound."""
    x, y = breccia.dequantize(a).double(), breccia.dequantize(w).double()
    bound = bounds.accumulated(x.abs() @ y.abs().t(), x.shape[1], x.shape[1], True)
    return float(((found.double() - x @ y.t()).abs() / bound).max())


@on_cuda
@pytest.mark.parametrize("k", [4096, 16384])
@pytest.mark.parametrize("pair", BLOCKS)
def test_products_of_blocks_without_promotion_violate_the_bound(pair: str, k: int) -> None:
    """With scales of 1, the source compiled with PROMOTE=0 differs in the promotion only.

    Tensor cores keep 13 fraction bits of 448² = 2^17.6, so they drop all terms of 8: 8 (k - 1) of the sum.
    """
    a, w = operand(BLOCKS[pair][0], k, 448.0, 2.0), operand(BLOCKS[pair][1], k, 448.0, 4.0)
    assert over_bound(breccia.matmul(a, w.mT, prefer="cuda.fp8_matmul"), a, w) <= 1
    variants: list[fp8_plans.GemmVariant] = []
    loaded = fp8_matmul.loaded

    def recorded(variant: fp8_plans.GemmVariant, device: Any) -> Any:
        variants.append(variant)
        return loaded(variant, device)

    fp8_matmul.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_matmul, "loaded", recorded)
        found = fp8_matmul.matmul_fast(a, w.mT)  # which the table refuses for blocks
    assert [(v.promote, v.scales) for v in variants] == [(False, fp8_plans.SCALES[_kinds(a, w.mT)])]
    assert over_bound(found, a, w) > 1


def _kinds(a: Any, b: Any) -> tuple[str, str]:
    first, second = (fp8_plans.kind_of(st.recipe, st.layout, st.axis)[0] for st in (a, b))
    return first, second


@pytest.mark.parametrize(
    ("scales", "pieces"), [(fp8_plans.TILES, 1), *(pytest.param(fp8_plans.BLOCKS, n, marks=pytest.mark.long) for n in (1, 4))]
)
def test_the_source_compiles_without_promotion_for_blocks(scales: int, pieces: int) -> None:
    if reason := compiler.missing():
        pytest.skip(reason)
    variant = fp8_plans.GemmVariant(fp8_plans.TABLE[4], scales, promote=False, out="float32", staged=False, pieces=pieces)
    source = fp8_matmul.source_of(variant.tile.columns, variant.codecs)
    made, _ = compiler.nvrtc().compile(source, compiler.options_of("sm_90a", variant.macros))
    assert made[:4] == b"\x7fELF"


@triton.jit
def product_kernel(x, w, out, k, ACCUMULATOR: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr):
    """x (ROWS, k) times the transpose of w (ROWS, k), FP8 codes as FP16 numbers, with sums of a dtype of choice."""
    row, column = tl.arange(0, ROWS), tl.arange(0, DEEP)
    total = tl.zeros((ROWS, ROWS), ACCUMULATOR)
    for start in range(0, k, DEEP):
        at = row[:, None] * k + start + column[None, :]
        left, right = tl.load(x + at).to(tl.float16), tl.load(w + at).to(tl.float16)
        total = tl.dot(left, tl.trans(right), total, out_dtype=ACCUMULATOR)
    tl.store(out + row[:, None] * ROWS + row[None, :], total.to(tl.float32))


@on_cuda
def test_products_with_sums_in_fp16_violate_the_bound() -> None:
    """An FP16 sum of 32 * 32 has a unit of 1, so adding 128 terms of 2^-9, or fewer, does not change it."""
    k = 32768
    a, w = operand("fp8_block", k, 32.0, 2.0**-4), operand("fp8_block,block_m=128", k, 32.0, 2.0**-5)
    errors = {}
    for dtype in (tl.float32, tl.float16):
        found = torch.empty(ROWS, ROWS, device="cuda")
        product_kernel[(1,)](a.data, w.data, found, k, dtype, ROWS, 128)
        errors[dtype] = over_bound(found, a, w)
    assert errors[tl.float32] <= 1, "the kernel is wrong in more than its sums"
    assert errors[tl.float16] > 1
    assert over_bound(breccia.matmul(a, w.mT, prefer="cuda.fp8_matmul"), a, w) <= 1
