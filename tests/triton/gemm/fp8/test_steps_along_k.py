"""What `fp8_matmul.cu` reads at each step along K: on a GPU, and without one by the source on the host."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import numpy as np
import pytest
from host_kernels import Driver, Product
from marks import long_but

import breccia
from breccia.options import product_options

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from breccia_triton.gemm.fp8 import matmul as fp8_matmul  # noqa: E402
from breccia_triton.gemm.fp8 import plans as fp8_plans  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

pytestmark = [pytest.mark.gpu] if ON_GPU else []

ONE = 0x38  # 1.0 in E4M3
#: Of the norm of a product of random numbers: far inside the contract's bound, and no wrong scale or step is so near.
FAR_INSIDE = 4e-3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Let products run the kernel, of this machine's GPU or on the host."""
    fp8_matmul.forget()
    if not ON_GPU:
        if shutil.which("g++") is None:
            pytest.skip("no C++ compiler")
        folder, seeds = tmp_path_factory.mktemp("kernels"), itertools.count()
        monkeypatch.setattr(fp8_matmul, "loaded", lambda variant, device: Product(variant, folder, seed=next(seeds)))
        monkeypatch.setattr(fp8_matmul, "driver", Driver)
        properties = type("Properties", (), {"multi_processor_count": 132})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield
    fp8_matmul.forget()


def tensor(codes: Any, scales: Any) -> Any:
    """An MXFP8 tensor with these bytes."""
    recipe = breccia.recipe("mxfp8")
    data = torch.from_numpy(codes).to(DEVICE).view(torch.float8_e4m3fn)
    return breccia.from_buffer(data, torch.from_numpy(scales).to(DEVICE).view(torch.float8_e8m0fnu), recipe, recipe.layout)


def drawn(*shape: int) -> Any:
    """Numbers whose blocks differ in size."""
    rng = np.random.default_rng(sum(shape))
    blocks = np.repeat(np.exp2(rng.integers(-4, 4, (*shape[:-1], shape[-1] // 32))), 32, -1)
    return torch.from_numpy((rng.standard_normal(shape) * blocks).astype(np.float32)).to(DEVICE)


def with_every_scale(k: int) -> Any:
    """(256, k): row r has a 1 in one block, under scale r, and zeros in the others, whose scale is 1."""
    rows, blocks = np.arange(256), np.arange(256) % (k // 32)
    codes, scales = np.zeros((256, k), np.uint8), np.full((256, k // 32), 127, np.uint8)
    codes[rows, 32 * blocks + rows % 32], scales[rows, blocks] = ONE, rows
    return tensor(codes, scales)


@pytest.mark.parametrize("k", long_but([256], [256, 160, 288]))  # rows of scales are whole words, or not
@pytest.mark.parametrize("tile", [fp8_plans.TABLE[0], fp8_plans.TABLE[-1]], ids=lambda t: t.name)
def test_every_scale_is_read(k: int, tile: Any, kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_matmul, "tile_of", lambda *of: tile)
    scaled = with_every_scale(k)
    for scale in (107, 147):  # below 1, so that no product overflows, and above
        ones = tensor(np.full((48, k), ONE, np.uint8), np.full((48, k // 32), scale, np.uint8))
        exact = np.ldexp(1.0, np.arange(255) - 127 + scale - 127)
        exact = np.where(exact < 2.0**128, exact, np.inf)
        keeps = exact >= 2.0**-126  # FP32 rounds others
        for product in (fp8_matmul.matmul(scaled, ones.mT), fp8_matmul.matmul(ones, scaled.mT).T):
            values = product.cpu().numpy()
            assert (values[:255] == values[:255, :1]).all() and np.isnan(values[255]).all()
            assert np.array_equal(values[:255, 0][keeps], exact[keeps].astype(np.float32))


@pytest.mark.parametrize("copiers", long_but([False], [False, True]))
@pytest.mark.parametrize("scales", long_but(["blocks"], ["tiles", "blocks", "mx"]))
@pytest.mark.parametrize("tile", fp8_plans.TABLE[-2:], ids=lambda t: t.name)
def test_scales_of_each_step_are_read(
    tile: Any, scales: str, copiers: bool, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_matmul, "tile_of", lambda *of: tile)
    monkeypatch.setattr(fp8_plans, "copiers", lambda *of: copiers)
    pair = {"tiles": ("fp8_block", "fp8_block,block_m=128"), "blocks": ("fp8_block", "fp8_block"), "mx": ("mxfp8", "mxfp8")}
    for m, n, k in ((3, 520, 1152), (70, 264, 640), (5, 584, 1024)):  # scales of steps lie four together, or not
        a, w = (breccia.cast(drawn(rows, k), spec) for rows, spec in zip((m, n), pair[scales], strict=True))
        exact = breccia.dequantize(a).double() @ breccia.dequantize(w).double().mT
        product = fp8_matmul.matmul(a, w.mT).double()
        assert (product - exact).norm() <= FAR_INSIDE * exact.norm()


@pytest.mark.parametrize("tile", long_but([fp8_plans.TABLE[i] for i in (0, 2, 7)], fp8_plans.TABLE), ids=lambda t: t.name)
def test_rows_of_a_end_anywhere(tile: Any, kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tile, or in a part of one that another block of the cluster copies."""
    monkeypatch.setattr(fp8_matmul, "tile_of", lambda *of: tile)
    w = breccia.cast(drawn(264, 384), "fp8_current")
    for lead in ((3,), (tile.part - 8,), (tile.part + 9,), (tile.rows + 1,), (2 * tile.rows,), (2, tile.part + 9)):
        a = breccia.cast(drawn(*lead, 384), "fp8_current")
        exact = breccia.dequantize(a).double() @ breccia.dequantize(w).double().mT
        product = fp8_matmul.matmul(a, w.mT).double()
        assert ((product - exact).norm(dim=-1) <= FAR_INSIDE * exact.norm(dim=-1)).all()


def test_groups_begin_at_any_row(kernel: None) -> None:
    rows, k, ends = 70, 160, torch.tensor([3, 3, 41, 64], dtype=torch.int32, device=DEVICE)
    a, w = breccia.cast(drawn(rows, k), "mxfp8"), breccia.cast(drawn(4, 40, k), "mxfp8")
    product = fp8_matmul.grouped_matmul(a, w.mT, ends, product_options("float32"))
    exact = torch.zeros(rows, 40, dtype=torch.float64, device=DEVICE)
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        exact[start:end] = breccia.dequantize(a[start:end]).double() @ breccia.dequantize(w[e]).double().mT
    assert (product.double() - exact).norm() <= FAR_INSIDE * exact.norm() and not product[64:].any()
