"""The rivals of benchmarks: on stand-ins, and on a GPU, against FP64 within what is said of each."""

from __future__ import annotations

import gc
import logging
import math
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from marks import on_cuda

import breccia
from breccia.backend import Call, reference
from breccia.kernels import bounds
from breccia.operations import OPERATIONS
from breccia.options import ProductOptions, product_options

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import other_products  # noqa: E402
import product_standins  # noqa: E402
from other_products import deep_gemm_products, humming_products, plans, rearranged, refused, torch_int4  # noqa: E402
from other_products import matmul as theirs  # noqa: E402

#: The unit roundoffs of activations and results of 16 bits.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Recipes of weights, and whether humming decodes them exactly: otherwise the scale and the product with it are rounded.
HUMMING = {
    "int4,group_size=128": False, "int4,group_size=32": False,
    "int4,group_size=128,symmetric=false,signed=false": False, "mxfp4": True, "nvfp4": True,
    "fp8_block,block_m=128": False, "mxfp8": True,
}  # fmt: skip
#: Recipes of torch's INT4.
INT4 = ("int4,group_size=128", "int4,group_size=32", "int4,group_size=64,symmetric=false,signed=false", "int4_bias")
#: Recipes of a and b of FP8 products.
PAIRS = {"tiles": ("fp8_block", "fp8_block,block_m=128"), "row": ("fp8_row", "fp8_row")}


def weight(spec: str, n: int, k: int, device: str = "cpu") -> Any:
    """A weight (N, K) whose blocks differ in size."""
    rng = np.random.default_rng(n + k)
    x = (
        rng.standard_normal((n, k))
        * np.exp2(rng.integers(-3, 3, (n, 1)))
        * np.exp2(rng.integers(-2, 2, (1, k // 32)).repeat(32))
    )
    return breccia.cast(torch.from_numpy(x.astype(np.float32)).to(device), spec)


def activations(*shape: int, dtype: str = "bfloat16", device: str = "cpu") -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(getattr(torch, dtype)).to(device)


def check(found: Any, x: Any, w: Any, decoding: Any = 0.0, rounded: float = 1.0, bias: Any = None) -> None:
    """The bound of the contract, and what is rounded besides.

    w: the weight's values in FP64 (N, K). decoding: the largest error of each value that the library multiplies by. rounded:
    how often a result, or a part of it along K, is rounded to the dtype of the result; parts together are as large as all
    terms.
    """
    exact, size, k = x.double() @ w.t(), x.double().abs() @ w.abs().t(), w.shape[1]
    bound = bounds.accumulated(size, k, k, True)
    if isinstance(decoding, torch.Tensor):
        bound = bound + x.double().abs() @ decoding.t()
    unit = ROUNDOFF[str(found.dtype).removeprefix("torch.")]
    bound = bound + rounded * unit * (size + bound)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
        bound = bound + unit * (size + bound)
    assert found.shape == exact.shape and found.isfinite().all()
    ratio = ((found.double() - exact).abs() / bound).max().item()
    assert ratio <= 1, f"the error is {ratio:.3g} times the bound"
    # Random data also tell a wrong scale from a right one: errors of single elements do not add up to half of the bound.
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert error <= (4 + 2 * math.sqrt(rounded)) * unit, f"relative error {error:.3g}"


def humming_error(spec: str, w: Any, dtype: str) -> Any:
    """What humming's decoding adds to each value: a rounded scale, and a rounded product with it."""
    unit = ROUNDOFF[dtype]
    return 0.0 if HUMMING[spec] else w.abs() * (2 * unit + unit * unit)


def int4_error(st: Any) -> Any:
    """What torch's decoding adds to each value: `(code - 8) * scale + zero` with scale, zero and result rounded to BF16.

    |code - 8| scale is off by a unit, |zero| by one, and the sum of both by one; a product may be rounded before the addition.
    """
    unit = ROUNDOFF["bfloat16"]
    width = st.layout.block(-1)[1]
    scale = st.scale.double()
    offset = torch.zeros_like(scale)
    if st.recipe.format.element.name == "UINT4":
        offset = 8 * scale
    if st.recipe.format.offset == "zero_point":
        offset = offset - st.zero_point.double() * scale
    elif st.recipe.format.offset == "bias":
        offset = offset + st.zero_point.double()
    offset = offset.repeat_interleave(width, 1)
    values = breccia.dequantize(st).double()
    return 3 * unit * (1 + unit) ** 2 * ((values - offset).abs() + offset.abs())


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    product_standins.install(monkeypatch)


# ------------------------------------------------------------------------------------------------ on stand-ins


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("spec", HUMMING)
def test_humming_gets_every_weight_in_the_form_that_it_reads(spec: str) -> None:
    st = weight(spec, 128, 256)
    values = breccia.dequantize(st).double()
    for dtype in ("bfloat16", "float16") if spec in ("nvfp4", "int4,group_size=128") else ("bfloat16",):
        x = activations(2, 5, 256, dtype=dtype)
        found = humming_products.weight_only(x, st.mT, product_options(dtype))
        check(found.reshape(10, 128), x.reshape(10, 256), values, humming_error(spec, values, dtype))
        bias = torch.linspace(-3, 3, 128)
        found = humming_products.weight_only(x, st.mT, product_options(dtype, bias=bias))
        check(found.reshape(10, 128), x.reshape(10, 256), values, humming_error(spec, values, dtype), bias=bias)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17])
def test_a_product_names_the_one_kernel_of_humming_that_it_needs(rows: int) -> None:
    st, x = weight("mxfp4", 128, 256), activations(rows, 256)
    values = breccia.dequantize(st).double()
    check(humming_products.weight_only(x, st.mT, product_options("bfloat16")), x, values)  # it checks its rows


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("pair", PAIRS)
def test_humming_gets_codes_and_scales_of_two_tensors(pair: str) -> None:
    first, second = PAIRS[pair]
    a, w = breccia.cast(activations(2, 5, 256).float(), first), weight(second, 128, 256)
    values = breccia.dequantize(w).double()
    decoding = values.abs() * ROUNDOFF["bfloat16"] if pair == "row" else 0.0  # the stand-in's layer has scales of rows in BF16
    found = humming_products.fp8_matmul(a, w.mT, product_options("bfloat16"))
    check(found.reshape(10, 128), breccia.dequantize(a).reshape(10, 256), values, decoding)


@pytest.mark.usefixtures("stand_ins")
def test_deep_gemm_gets_codes_and_scales_of_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (128, 200):
        a, w = breccia.cast(activations(2, 5, 256).float(), "fp8_block"), weight("fp8_block,block_m=128", n, 256)
        found = deep_gemm_products.deep_gemm_matmul(a, w.mT, product_options("bfloat16"))
        values = breccia.dequantize(w).double()
        check(found.reshape(10, n), breccia.dequantize(a).reshape(10, 256), values)
        out = torch.empty(2, 5, n, dtype=torch.bfloat16)
        assert deep_gemm_products.deep_gemm_matmul(a, w.mT, product_options("bfloat16", out=out)) is out and out.equal(found)
    old = ModuleType("deep_gemm")  # 1.0.0, whose functions have other names
    old.__file__ = "deep_gemm/__init__.py"
    monkeypatch.setitem(sys.modules, "deep_gemm", old)
    with pytest.raises(
        breccia.UnsupportedError, match="deep_gemm/__init__.py has no fp8_gemm_nt, which DeepGEMM has since version 2"
    ):
        deep_gemm_products.deep_gemm_matmul(a, w.mT, product_options("bfloat16"))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("spec", INT4)
def test_torch_gets_codes_scales_and_zeros_of_int4(spec: str) -> None:
    for k in (256, 320) if "size=32" in spec or "size=64" in spec else (256,):
        st, x = weight(spec, 24, k), activations(2, 5, k)
        values = breccia.dequantize(st).double()
        found = torch_int4.int4pack_matmul(x, st.mT, product_options("bfloat16"))
        check(found.reshape(10, 24), x.reshape(10, k), values, int4_error(st))


@pytest.mark.usefixtures("stand_ins")
def test_results_go_to_out_and_wrong_operands_are_refused() -> None:
    st, x = weight("mxfp4", 128, 256), activations(6, 256)
    expected = humming_products.weight_only(x, st.mT, product_options("bfloat16"))
    out, wide = torch.empty(6, 128, dtype=torch.bfloat16), torch.zeros(6, 200, dtype=torch.bfloat16)
    assert humming_products.weight_only(x, st.mT, product_options("bfloat16", out=out)) is out and out.equal(expected)
    into = wide[:, 3:131]
    assert humming_products.weight_only(x, st.mT, product_options("bfloat16", out=into)) is into
    assert into.equal(expected)
    with pytest.raises(breccia.BrecciaError, match=r"out= must have shape \(6, 128\) and dtype bfloat16; got \(6, 127\)"):
        humming_products.weight_only(x, st.mT, product_options("bfloat16", out=torch.empty(6, 127)))
    with pytest.raises(breccia.BrecciaError, match="bias on meta; move it"):
        humming_products.weight_only(x, st.mT, product_options("bfloat16", bias=torch.empty(128, device="meta")))
    points = weight("int4,group_size=128,symmetric=false,signed=false", 128, 256)
    points.zero_point[3, 1] = 16
    with pytest.raises(breccia.UnsupportedError, match="zero-points have 4 bits"):
        humming_products.weight_only(x, points.mT, product_options("bfloat16"))


# ------------------------------------------------------------------------------------------------ what is kept


@pytest.mark.long
@pytest.mark.usefixtures("stand_ins")
def test_a_weight_is_rearranged_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    st, x, made = weight("int4", 128, 256), activations(6, 256), product_standins.HummingLayer.made

    def multiply(w: Any) -> Any:
        return humming_products.weight_only(x, w.mT, product_options("bfloat16"))

    with caplog.at_level(logging.INFO, "breccia"):
        first = multiply(st)
        assert multiply(st).equal(first) and len(made) == 1
    assert "humming.weight_only bfloat16 keeps a copy of a weight (256, 128) beside it: 25088 bytes" in caplog.text
    st.scale.mul_(2)
    assert multiply(st).equal(2 * first) and len(made) == 2
    st.data.zero_()
    assert not multiply(st).any() and len(made) == 3
    half = breccia.ScaledTensor.from_parts(st.data, st.scale * 0.5, st.recipe, st.layout)
    multiply(half)
    assert len(made) == 4
    for _ in range(20):  # scales whose memory is used again
        st.data.fill_(0x11)
        other = breccia.ScaledTensor.from_parts(st.data, torch.rand_like(st.scale.float()).half(), st.recipe, st.layout)
        values = breccia.dequantize(other).double()
        check(multiply(other), x, values, humming_error("int4,group_size=128", values, "bfloat16"))
        del other
    narrow = humming_products.weight_only(x.half(), st.mT, product_options("float16"))
    assert narrow.dtype == torch.float16


@pytest.mark.long
def test_what_is_kept_is_freed_with_the_weight_and_not_shared_by_parts_of_one_buffer() -> None:
    freed: list[int] = []

    class Made(list[Any]):
        def __del__(self) -> None:
            freed.append(1)

    st = weight("int4", 128, 256)
    first, second = st[:64], st[64:]
    one, two = rearranged.rearranged("k", first, lambda: Made([1])), rearranged.rearranged("k", second, lambda: Made([2]))
    assert one == [1] and two == [2] and rearranged.rearranged("k", st[:64], lambda: Made([3])) is one
    assert rearranged.rearranged("other", first, lambda: Made([4])) == [4]
    del one, two, first, second
    gc.collect()
    assert not freed
    del st
    gc.collect()
    assert len(freed) == 3


def test_a_graph_cannot_be_captured_before_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    st = weight("int4", 128, 256)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(type(st.data), "is_cuda", property(lambda self: True), raising=False)
    with pytest.raises(breccia.UnsupportedError, match="humming.weight_only rearranges a weight at its first product"):
        rearranged.rearranged("humming.weight_only bfloat16", st, lambda: [])


def test_inference_tensors_are_kept_too() -> None:
    with torch.inference_mode():
        st = weight("int4", 128, 256)
        made = rearranged.rearranged("k", st, lambda: [object()])
        assert rearranged.rearranged("k", st, lambda: [object()]) is made


# ------------------------------------------------------------------------------------------------ the table


def accepts(accept: Any, a: Any, b: Any, **options: Any) -> str | None:
    from breccia.backend import registry

    return accept(Call(OPERATIONS["matmul"], "torch", (a, b, None, ProductOptions(**options), registry().frameworks["torch"])))


BF16 = {"out_dtype": "bfloat16"}


@pytest.mark.parametrize("spec", HUMMING)
def test_what_humming_multiplies_is_accepted(spec: str) -> None:
    assert accepts(plans.accepts_humming, activations(4, 256), weight(spec, 128, 256).mT, **BF16) is None


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "options", "reason"),
    [
        ("int4", (128, 256), "float32", BF16, "multiplies activations of bfloat16 and float16; these are float32"),
        ("int4", (128, 256), "bfloat16", {}, "writes the dtype of the activations, bfloat16; this product is to be float32"),
        ("int4", (100, 256), "bfloat16", BF16, "K in multiples of 128 and N of 64; got K = 256, N = 100"),
        ("fp8_block,block_m=128", (192, 256), "bfloat16", BF16, "K in multiples of 128 and N of 128; got K = 256, N = 192"),
        ("mxfp8", (128, 256), "float16", {"out_dtype": "float16"}, "would round E8M0 scales to float16"),
        ("int4,group_size=256", (128, 256), "bfloat16", BF16, "humming is not called for INT4 codes with F16 scales of 1x256"),
        ("int4_bias", (128, 256), "bfloat16", BF16, "INT4 codes with offset 'bias'"),
        ("nf4", (128, 256), "bfloat16", BF16, "humming is not called for NF4 codes"),
        ("fp8_current", (128, 256), "bfloat16", BF16, "E4M3 codes with F32 scales of tensor"),
    ],
)
def test_what_humming_does_not_multiply_has_a_reason(
    spec: str, shape: tuple[int, int], dtype: str, options: Any, reason: str
) -> None:
    x, st = activations(4, shape[1], dtype=dtype), weight(spec, *shape)
    assert reason in str(accepts(plans.accepts_humming, x, st.mT, **options))


def test_products_of_two_tensors_have_reasons() -> None:
    a, w = breccia.cast(activations(4, 256).float(), "fp8_block"), weight("fp8_block,block_m=128", 200, 256)
    row = weight("fp8_row", 128, 256)
    assert accepts(plans.accepts_deep_gemm, a, w.mT, **BF16) is None
    assert accepts(plans.accepts_humming_fp8, row[:5], row.mT, **BF16) is None
    assert "N of 128; got K = 256, N = 200" in str(accepts(plans.accepts_humming_fp8, a, w.mT, **BF16))
    assert "DeepGEMM writes bfloat16; this product is to be float32" in str(accepts(plans.accepts_deep_gemm, a, w.mT))
    assert "DeepGEMM has no form for scales row times row" in str(accepts(plans.accepts_deep_gemm, row, row.mT, **BF16))
    odd = weight("fp8_block,block_m=128", 100, 256)
    assert "N of 8; got K = 256, N = 100" in str(accepts(plans.accepts_deep_gemm, a, odd.mT, **BF16))
    e5 = breccia.cast(activations(4, 256).float(), "fp8_block,fp8_format=E5M2")
    assert "humming is called for E4M3 codes only" in str(accepts(plans.accepts_humming_fp8, e5, w.mT, **BF16))
    assert "and a is an array" in str(accepts(plans.accepts_humming_fp8, activations(4, 256), row.mT, **BF16))
    batch = breccia.cast(activations(2, 128, 256).float(), "fp8_row")
    assert "it multiplies one matrix of b" in str(accepts(plans.accepts_humming_fp8, row, batch.mT, **BF16))
    assert "empty operands" in str(accepts(plans.accepts_humming_fp8, row[:0], row.mT, **BF16))


def test_torch_says_which_weights_of_four_bits_it_does_not_take() -> None:
    x = activations(4, 256)
    for spec in INT4:
        assert accepts(plans.accepts_int4, x, weight(spec, 24, 256).mT, **BF16) is None
    for spec, shape, reason in (
        ("int4,group_size=16", (24, 256), "it has groups of 32, 64, 128, 256 along K; these are PerBlockK(block_size=16"),
        ("int4", (20, 256), "N in multiples of 8; got K = 256, N = 20"),
        ("mxfp4", (24, 256), "it multiplies INT4 and UINT4 codes, not E2M1"),
        ("int8", (24, 256), "it multiplies INT4 and UINT4 codes, not INT8"),
    ):
        assert reason in str(accepts(plans.accepts_int4, x, weight(spec, *shape).mT, **BF16))
    assert "torch multiplies activations of bfloat16; these are float16" in str(
        accepts(plans.accepts_int4, x.half(), weight("int4", 24, 256).mT, out_dtype="float16")
    )


@pytest.mark.usefixtures("stand_ins")
def test_a_product_is_refused_before_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    x, st = activations(4, 256), weight("nf4", 128, 256)
    monkeypatch.setattr(other_products, "find_spec", lambda module: None)
    assert refused("humming.weight_only", x, st.mT) == "humming is not installed; pip install humming-kernels"
    monkeypatch.setattr(other_products, "find_spec", lambda module: module)
    assert refused("torch.int4", x, weight("int4", 24, 256).mT) is None
    with pytest.raises(breccia.UnsupportedError, match="matmul: humming.weight_only: humming is not called for NF4 codes"):
        theirs("humming.weight_only", x, st.mT)
    int4 = weight("int4", 128, 256)
    values = breccia.dequantize(int4).double()
    check(theirs("humming.weight_only", x, int4.mT), x, values, humming_error("int4,group_size=128", values, "bfloat16"))


# ------------------------------------------------------------------------------------------------ on a GPU

NEEDS_HUMMING = pytest.mark.skipif(find_spec("humming") is None, reason="humming-kernels is not installed")
#: humming multiplies at least 64 along K at a time, so it adds at most so many parts; each of these sums is rounded.
K = 512
PARTS = K // 64


@on_cuda
@NEEDS_HUMMING
@pytest.mark.filterwarnings("ignore")  # humming's own
@pytest.mark.parametrize("spec", HUMMING)
def test_humming_multiplies_activations_by_weights_on_a_gpu(spec: str) -> None:
    st, x = weight(spec, 256, K, "cuda"), activations(16, K, device="cuda")
    values = torch.from_numpy(reference.dequantize(st.to("cpu").to_plain()).double().numpy()).cuda()
    found = theirs("humming.weight_only", x, st.mT)
    check(found, x, values, humming_error(spec, values, "bfloat16"), PARTS)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(found)
    with torch.cuda.graph(graph):
        theirs("humming.weight_only", x, st.mT, out=out)
    graph.replay()
    torch.cuda.synchronize()
    check(out, x, values, humming_error(spec, values, "bfloat16"), PARTS)


@on_cuda
@NEEDS_HUMMING
@pytest.mark.filterwarnings("ignore")  # humming's own
@pytest.mark.parametrize("pair", PAIRS)
def test_humming_multiplies_two_tensors_on_a_gpu(pair: str) -> None:
    first, second = PAIRS[pair]
    a, w = breccia.cast(activations(48, K, device="cuda").float(), first), weight(second, 256, K, "cuda")
    values = breccia.dequantize(w).double()
    found = theirs("humming.fp8_matmul", a, w.mT)
    # Scales of rows are BF16 numbers there and multiply a rounded sum, which leaves the tensor core once: 13 bits in each step.
    decoding = values.abs() * (ROUNDOFF["bfloat16"] + K / 32 * 2.0**-13) if pair == "row" else 0.0
    check(found, breccia.dequantize(a), values, decoding, PARTS + (pair == "row"))


@on_cuda
@pytest.mark.parametrize("spec", INT4)
def test_torch_multiplies_by_int4_on_a_gpu(spec: str) -> None:
    st = weight(spec, 264, K, "cuda")
    values = breccia.dequantize(st).double()
    for m in (1, 17):
        x = activations(m, K, device="cuda")
        found = theirs("torch.int4", x, st.mT)
        check(found, x, values, int4_error(st), 2)


@on_cuda
@pytest.mark.skipif(find_spec("deep_gemm") is None, reason="DeepGEMM is not installed")
def test_deep_gemm_multiplies_two_tensors_on_a_gpu() -> None:
    a, w = breccia.cast(activations(48, K, device="cuda").float(), "fp8_block"), weight("fp8_block,block_m=128", 256, K, "cuda")
    found = theirs("deep_gemm.fp8_matmul", a, w.mT)
    check(found, breccia.dequantize(a), breccia.dequantize(w).double())
