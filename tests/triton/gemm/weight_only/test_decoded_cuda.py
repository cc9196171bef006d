"""Products of decoded codes on a GPU: every format, tile and option against FP64, within the bound of the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_weights import activations, check, weight
from marks import on_cuda
from weights import FORMATS, in_torch, tensor

import breccia
from breccia.backend import reference
from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.gemm.weight_only import plans as weight_plans

STORAGE = "mma_16x128"
#: (N, K): whole tiles; rows and columns that end within them; K of a part of a step; many steps.
SHAPES = ((256, 512), (70, 200), (328, 648), (192, 3072))
ROWS = (1, 17, 130, 300)
#: A format of each form of scales: of rows, and of groups of 128, 64, 32 and 16.
FORMS = ("int8-row", "int4-128", "int4-64", "uint4", "int4-16")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every product of BF16 activations decode codes to memory."""
    from breccia_triton.gemm.weight_only import matmul as weight_only

    weight_only._calls.clear()
    monkeypatch.setattr(weight_plans, "config_of", lambda *args, **options: weight_plans.DecodedCodes())


@on_cuda
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format_are_within_the_bound(name: str, always: None) -> None:
    for n, k in SHAPES:
        w, values = weight(name, n, k)
        for m in ROWS:
            x = activations(m, k, "bfloat16")
            for dtype in ("float32", "bfloat16"):
                found = breccia.matmul(x, w, dtype)
                check(found, x, values)
                assert found.equal(breccia.matmul(x, w, dtype)), "two calls differ"


@on_cuda
@pytest.mark.parametrize("tile", fp8_plans.TABLE, ids=lambda tile: tile.name)
@pytest.mark.parametrize("name", FORMS)
def test_every_tile_multiplies_every_form(name: str, tile: Any) -> None:
    from breccia_triton.gemm.weight_only.decoded import decoded_codes
    from breccia_triton.gemm.weight_only.problem import Problem

    for n, k in ((328, 648), (512, 2048), (70, 256)):
        w, values = weight(name, n, k)
        for m in (40, 300):
            x = activations(m, k, "bfloat16")
            for dtype in ("float32", "bfloat16"):
                check(decoded_codes(Problem.of(x, w, None, dtype), tile)(x, w, None, None), x, values)


@on_cuda
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["int4-128", "uint4", "nvfp4", "e4m3-tensor"])
def test_results_have_any_dtype_bias_and_memory(name: str, out_dtype: str, always: None) -> None:
    import torch

    w, values = weight(name, 72, 200)
    dtype = getattr(torch, out_dtype)
    for m in (1, 40, 260):
        x = activations(m, 200, "bfloat16")
        for bias_dtype in (torch.float32, torch.bfloat16, torch.float16):
            bias = torch.randn(144, device="cuda").to(bias_dtype)[::2]
            check(breccia.matmul(x, w, dtype, bias=bias), x, values, bias)
        wide = torch.full((m, 104), 7.0, dtype=dtype, device="cuda")
        breccia.matmul(x, w, dtype, out=wide[:, :72])
        check(wide[:, :72], x, values)
        assert (wide[:, 72:] == 7).all()
        odd = torch.full((m, 101), 7.0, dtype=dtype, device="cuda")
        breccia.matmul(x, w, dtype, out=odd[:, 1:73])
        check(odd[:, 1:73], x, values)
        assert (odd[:, 73:] == 7).all() and (odd[:, 0] == 7).all()
        strided = torch.randn(m, 400, device="cuda").bfloat16()[:, ::2]
        check(breccia.matmul(strided, w, dtype), strided, values)
        batched = breccia.matmul(x[None].expand(3, m, 200), w, dtype)
        assert batched.shape == (3, m, 72)
        check(batched[2], x, values)


@on_cuda
@pytest.mark.parametrize("name", ["int4-128", "int4-64", "mxfp4", "nvfp4", "e4m3-block", "mxfp8"])
def test_rows_with_flags_are_computed_in_fp32(name: str, always: None) -> None:
    import torch

    st = tensor(name, 192, 256, seed=9, wild=True)
    calm = tensor(name, 192, 256, seed=9)
    st.data[:64], st.scale[:64] = calm.data[:64], calm.scale[:64]  # without a flag
    values = torch.from_numpy(reference.dequantize(st).astype(np.float64)).cuda()
    w, x = in_torch(st, "cuda").to_storage(STORAGE).mT, activations(200, 256, "bfloat16")
    bias = torch.randn(192, device="cuda")
    found, exact = breccia.matmul(x, w, bias=bias), x.double() @ values.mT + bias.double()
    size = x.double().abs() @ values.mT.abs() + bias.double().abs()
    inside = (size < 1e37) & ~exact.isnan()
    assert ((found.double() - exact).abs() <= 257 * 2.0**-24 * size + 256 * 2.0**-126)[inside].all()
    assert not found[exact.isnan()].isfinite().any()
    check(found[:, :64], x, values[:64], bias[:64])


@on_cuda
@pytest.mark.parametrize("name", ["int4-128", "int4-16", "nvfp4", "e4m3-block"])
def test_long_sums_and_activations_that_are_not_finite(name: str, always: None) -> None:
    import torch

    w, values = weight(name, 64, 8192)
    x = torch.randn(260, 8192, device="cuda") * 2.0**-10
    x[:, 0] = 2.0**10  # one large, many small
    x[:, 4096] = -(2.0**10)
    x = x.bfloat16()
    check(breccia.matmul(x, w), x, values)
    x[1, 7], x[130, 9] = float("nan"), float("inf")
    found = breccia.matmul(x, w)
    assert found[1].isnan().all()
    keep = [i for i in range(260) if i not in (1, 130)]
    check(found[keep], x[keep], values)


@on_cuda
def test_graphs_replay_products_of_new_activations(always: None) -> None:
    import torch

    w, values = weight("int4-128", 512, 640)
    x = activations(600, 640, "bfloat16")
    breccia.matmul(x, w, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = breccia.matmul(x, w, torch.bfloat16)
    for seed in range(3):
        x.copy_(activations(600, 640, "bfloat16", seed))
        graph.replay()
        check(y, x, values)
        assert y.equal(breccia.matmul(x, w, torch.bfloat16))
