"""torch's products of MXFP8 and NVFP4 tensors: what torch is given, on a stand-in, and on a GPU with tensor cores for them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from marks import on_cuda

import breccia
from breccia import Device
from breccia.backend import Call, registry
from breccia.kernels import bounds
from breccia.operations import OPERATIONS
from breccia.options import ProductOptions, product_options

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import product_standins  # noqa: E402

from breccia_triton.gemm.scaled_mm import block_scaled_mm  # noqa: E402
from breccia_triton.gemm.scaled_mm import plans as torch_plans  # noqa: E402

NAME = "torch.block_scaled_mm"
#: Recipes of a and b.
PAIRS = (("mxfp8", "mxfp8"), ("mxfp8,fp8_format=E5M2", "mxfp8"), ("nvfp4", "nvfp4"), ("nvfp4,two_level=false",) * 2)
STORAGES = ("plain", "swizzle_128x4")


def operand(shape: tuple[int, ...], spec: str, storage: str = "plain", device: str = "cpu") -> Any:
    """Normal numbers whose rows, and blocks along K, differ in size."""
    rng = np.random.default_rng(shape[-2])
    lengths = (*shape[:-1], shape[-1] // 16)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, lengths)).repeat(16, -1)
    return breccia.cast(torch.from_numpy(x.astype(np.float32)).to(device), spec, storage=storage)


def values(st: Any) -> Any:
    return breccia.dequantize(st).double()


def check(found: Any, a: Any, w: Any, bias: Any = None) -> None:
    """The stand-in's product, rounded once to the dtype of the result.

    `dequantize` rounds E2M1 x E4M3 values under a global scale to FP32, once in each operand: 2 u + u² of the sum of
    magnitudes, u = 2^-24. FP64 sums are exact to K 2^-53 of it. 2^-22 covers both.
    """
    exact, size = values(a) @ values(w).t(), values(a).abs() @ values(w).abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[found.dtype]
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= unit * exact.abs() + 2.0**-22 * size).all()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    product_standins.install(monkeypatch)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[2], *(pytest.param(p, marks=pytest.mark.long) for p in PAIRS[1::2])], ids=str)
def test_torch_gets_codes_and_swizzled_scales_of_both_operands(pair: tuple[str, str]) -> None:
    for m, n, k in ((1, 16, 32), (130, 144, 160)):
        for storages in itertools.product(STORAGES, repeat=2):
            a, w = (operand((rows, k), spec, storage) for rows, spec, storage in zip((m, n), pair, storages, strict=True))
            for dtype in ("bfloat16", "float32"):
                check(block_scaled_mm.block_scaled_mm(a, w.mT, product_options(dtype)), a, w)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
def test_swizzled_scales_are_passed_in_their_memory_and_plain_ones_rearranged(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    multiply = torch.nn.functional.scaled_mm
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *args, **named: given.append(args) or multiply(*args, **named))
    a, w = operand((200, 512), spec), operand((144, 512), spec, "swizzle_128x4")
    block_scaled_mm.block_scaled_mm(a, w.mT, product_options("bfloat16"))
    left, right, scale_a, kinds, scale_b, _ = given[0]
    assert (left.data_ptr(), right.data_ptr(), scale_b[0].data_ptr()) == (
        a.data.data_ptr(),
        w.data.data_ptr(),
        w.scale.data_ptr(),
    )
    # Bytes against the document's own formula: row r, column c of a tile at (r % 32) * 16 + (r // 32) * 4 + c.
    rows, columns = a.scale.shape
    found = product_standins.unswizzled(scale_a[0].view(torch.uint8), rows, columns)
    assert torch.equal(found, a.scale.view(torch.uint8))
    assert torch.equal(scale_a[0].view(torch.uint8), a.to_storage("swizzle_128x4").scale.view(torch.uint8).reshape(-1))
    assert len(kinds) == (1 if spec == "mxfp8" else 2)
    if spec == "nvfp4":
        assert (scale_a[1].item(), scale_b[1].item()) == (a.global_scale.item(), w.global_scale.item())


@pytest.mark.usefixtures("stand_ins")
def test_leading_axes_bias_and_out_follow_the_op() -> None:
    w = operand((144, 96), "mxfp8", "swizzle_128x4")
    for storage in STORAGES:
        a = operand((2, 3, 50, 96), "mxfp8", storage)
        bias = torch.linspace(-3, 3, 144).bfloat16()
        check(block_scaled_mm.block_scaled_mm(a, w.mT, product_options("bfloat16", bias=bias)), a, w, bias)
    a = operand((50, 96), "mxfp8")
    expected = block_scaled_mm.block_scaled_mm(a, w.mT, product_options("bfloat16"))
    out = torch.zeros(50, 150, dtype=torch.bfloat16)[:, 3:147]
    assert block_scaled_mm.block_scaled_mm(a, w.mT, product_options("bfloat16", out=out)) is out and out.equal(expected)
    with pytest.raises(breccia.BrecciaError, match=r"out= must have shape \(50, 144\) and dtype bfloat16; got \(50, 143\)"):
        block_scaled_mm.block_scaled_mm(a, w.mT, product_options("bfloat16", out=torch.empty(50, 143)))
    with pytest.raises(breccia.BrecciaError, match="a is on cpu, and bias on meta; move it"):
        block_scaled_mm.block_scaled_mm(a, w.mT, product_options("bfloat16", bias=torch.empty(144, device="meta")))
    many = breccia.stack([operand((50, 96), "nvfp4"), operand((50, 96), "nvfp4")])
    with pytest.raises(breccia.UnsupportedError, match="one global scale of a; it has 2. Multiply its matrices one by one"):
        block_scaled_mm.block_scaled_mm(many, operand((144, 96), "nvfp4").mT, product_options("bfloat16"))


def accepts(a: Any, b: Any, **options: Any) -> str | None:
    return torch_plans.accepts_block_scaled(
        Call(OPERATIONS["matmul"], "torch", (a, b, None, ProductOptions(**options), registry().frameworks["torch"]))
    )


def test_what_torch_does_not_multiply_has_a_reason() -> None:
    mx, nv, one = operand((64, 96), "mxfp8"), operand((64, 96), "nvfp4"), operand((64, 96), "nvfp4,two_level=false")
    e5 = operand((64, 96), "mxfp8,fp8_format=E5M2")
    for st in (mx, nv, one):
        assert accepts(st, st.mT) is None
    assert accepts(e5, mx.mT) is None and accepts(mx, mx.mT, out_dtype="bfloat16", bias=torch.zeros(64).bfloat16()) is None
    amax, short = operand((64, 96), "nvfp4,global_sense=amax"), operand((64, 80), "nvfp4")
    for a, b, options, reason in (
        (torch.zeros(64, 96), mx.mT, {}, "it multiplies two MXFP8 or two NVFP4 tensors; a is an array"),
        (mx, operand((64, 96), "mxfp4").mT, {}, "b is mxfp4"),
        (mx, nv.mT, {}, "torch has no product of mxfp8 by nvfp4"),
        (nv, one.mT, {}, "torch has no product of nvfp4 by nvfp4 of one level"),
        (amax, amax.mT, {}, "a has a global scale that is stored as amax"),
        (e5, e5.mT, {}, "cuBLAS does not multiply E5M2 by E5M2"),
        (mx, operand((96, 64), "mxfp8"), {}, "blocks of b do not run along K"),
        (short, short.mT, {}, "K in multiples of 32 and N of 16; got K = 80, N = 64"),
        (mx, operand((50, 96), "mxfp8").mT, {}, "K in multiples of 32 and N of 16; got K = 96, N = 50"),
        (mx, operand((2, 64, 96), "mxfp8").mT, {}, "torch multiplies one matrix of b"),
        (mx[:0], mx.mT, {}, "empty operands"),
        (mx, mx.mT, {"bias": torch.zeros(64)}, "torch adds no bias to a float32 result"),
        (mx, mx.mT, {"bias": torch.zeros(64), "out_dtype": "bfloat16"}, "the bias is float32, and torch would round it"),
    ):  # fmt: skip
        assert reason in str(accepts(a, b, **options)), reason


def test_other_devices_and_versions_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    available = torch_plans.block_scaled_available
    assert available(Device("cuda", 0, (10, 0))) is None and available(Device("cuda", 0, (12, 0))) is None
    assert "need compute capability 10.0; cuda:0 has 9.0" in str(available(Device("cuda", 0, (9, 0))))
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert "no torch.nn.functional.scaled_mm; upgrade to 2.10" in str(available(Device("cuda", 0, (10, 0))))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert available(Device("cuda", 0, (10, 0))) == "this torch is built without CUDA"


def test_it_runs_only_where_it_is_named() -> None:
    said = str(breccia.explain("matmul", "mxfp8", "mxfp8", on="torch:cuda"))
    assert f"it does not follow the contract of matmul; name it with prefer='{NAME}'" in said
    found = breccia.explain("matmul", "nvfp4", "nvfp4", on="torch:cuda", prefer=NAME)
    assert NAME in str(found) and "reads 'plain'" not in str(found)


@on_cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0), reason="no block-scaled tensor cores"
)
@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_products_on_block_scaled_tensor_cores_have_the_error_of_their_result(pair: tuple[str, str]) -> None:
    """The bound of FP8 tensor cores in docs/spec/numerics.md, section 9, and one rounding; not run so far."""
    for m, n, k in ((130, 144, 96), (256, 256, 4096)):
        for storages in itertools.product(STORAGES, repeat=2):
            a, w = (operand((r, k), s, storage, "cuda") for r, s, storage in zip((m, n), pair, storages, strict=True))
            exact, size = values(a) @ values(w).t(), values(a).abs() @ values(w).abs().t()
            bound = bounds.accumulated(size, k, k, True)
            found = breccia.matmul(a, w.mT, "bfloat16", prefer=NAME)
            assert ((found.double() - exact).abs() <= bound + 2.0**-8 * (exact.abs() + bound)).all()
            assert ((found.double() - exact).norm() / exact.norm()).item() <= 4e-3 + 2.0**-8  # scales in their places
