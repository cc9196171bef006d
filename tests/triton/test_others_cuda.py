"""Products of other libraries as kernels of the table: on stand-ins, and on a GPU, against FP64 within what is said of each."""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from marks import on_cuda

import breccia
from breccia import Device
from breccia.backend import Call, reference
from breccia.kernels import bounds
from breccia.operations import OPERATIONS
from breccia.options import FLOAT32, ProductOptions, product_options

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import product_standins  # noqa: E402

from breccia_triton import choices, weight_plans, weight_times  # noqa: E402
from breccia_triton.cuda import fp8_plans  # noqa: E402
from breccia_triton.others import (  # noqa: E402
    deep_gemm_products,
    humming_products,
    plans,
    rearranged,
    torch_int4,
    transformer_engine_products,
)

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
        found = humming_products.humming_weight_only(x, st.mT, product_options(dtype))
        check(found.reshape(10, 128), x.reshape(10, 256), values, humming_error(spec, values, dtype))
        bias = torch.linspace(-3, 3, 128)
        found = humming_products.humming_weight_only(x, st.mT, product_options(dtype, bias=bias))
        check(found.reshape(10, 128), x.reshape(10, 256), values, humming_error(spec, values, dtype), bias=bias)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17])
def test_a_product_names_the_one_kernel_of_humming_that_it_needs(rows: int) -> None:
    st, x = weight("mxfp4", 128, 256), activations(rows, 256)
    values = breccia.dequantize(st).double()
    check(humming_products.humming_weight_only(x, st.mT, product_options("bfloat16")), x, values)  # it checks its rows


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("pair", PAIRS)
def test_humming_gets_codes_and_scales_of_two_tensors(pair: str) -> None:
    first, second = PAIRS[pair]
    a, w = breccia.cast(activations(2, 5, 256).float(), first), weight(second, 128, 256)
    values = breccia.dequantize(w).double()
    decoding = values.abs() * ROUNDOFF["bfloat16"] if pair == "row" else 0.0  # the stand-in's layer has scales of rows in BF16
    found = humming_products.humming_fp8_matmul(a, w.mT, product_options("bfloat16"))
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
@pytest.mark.parametrize("codecs", [("E4M3", "E4M3"), ("E5M2", "E4M3"), ("E4M3", "E5M2")], ids="-".join)
def test_transformer_engine_gets_codes_and_one_scale_of_each_tensor(codecs: tuple[str, str]) -> None:
    first, second = (f"fp8_current,fp8_format={codec}" for codec in codecs)
    a, w = breccia.cast(activations(2, 5, 256).float(), first), breccia.cast(activations(48, 256).float() * 3, second)
    values, multiply = breccia.dequantize(w).double(), transformer_engine_products.transformer_engine_matmul
    found = multiply(a, w.mT, product_options("bfloat16"))
    check(found.reshape(10, 48), breccia.dequantize(a).reshape(10, 256), values)
    columns = breccia.cast(activations(256, 48).float(), second, axis=-2)  # K apart in memory
    check(
        multiply(a[0], columns, product_options("bfloat16")), breccia.dequantize(a[0]), breccia.dequantize(columns).double().t()
    )
    out = torch.empty(2, 5, 48, dtype=torch.bfloat16)
    assert multiply(a, w.mT, product_options("bfloat16", out=out)) is out and out.equal(found)
    bias = torch.linspace(-3, 3, 48)
    check(multiply(a[0], w.mT, product_options("bfloat16", bias=bias)), breccia.dequantize(a[0]), values, rounded=2, bias=bias)
    with pytest.raises(breccia.UnsupportedError, match="multiplies tensors with one scale; a has 2, one for each matrix"):
        multiply(breccia.stack([a[0], a[1]]), w.mT, product_options("bfloat16"))


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
    expected = humming_products.humming_weight_only(x, st.mT, product_options("bfloat16"))
    out, wide = torch.empty(6, 128, dtype=torch.bfloat16), torch.zeros(6, 200, dtype=torch.bfloat16)
    assert humming_products.humming_weight_only(x, st.mT, product_options("bfloat16", out=out)) is out and out.equal(expected)
    into = wide[:, 3:131]
    assert humming_products.humming_weight_only(x, st.mT, product_options("bfloat16", out=into)) is into
    assert into.equal(expected)
    with pytest.raises(breccia.BrecciaError, match=r"out= must have shape \(6, 128\) and dtype bfloat16; got \(6, 127\)"):
        humming_products.humming_weight_only(x, st.mT, product_options("bfloat16", out=torch.empty(6, 127)))
    with pytest.raises(breccia.BrecciaError, match="bias on meta; move it"):
        humming_products.humming_weight_only(x, st.mT, product_options("bfloat16", bias=torch.empty(128, device="meta")))
    points = weight("int4,group_size=128,symmetric=false,signed=false", 128, 256)
    points.zero_point[3, 1] = 16
    with pytest.raises(breccia.UnsupportedError, match="zero-points have 4 bits"):
        humming_products.humming_weight_only(x, points.mT, product_options("bfloat16"))


# ------------------------------------------------------------------------------------------------ what is kept


@pytest.mark.long
@pytest.mark.usefixtures("stand_ins")
def test_a_weight_is_rearranged_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    st, x, made = weight("int4", 128, 256), activations(6, 256), product_standins.HummingLayer.made

    def multiply(w: Any) -> Any:
        return humming_products.humming_weight_only(x, w.mT, product_options("bfloat16"))

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
    narrow = humming_products.humming_weight_only(x.half(), st.mT, product_options("float16"))
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


def test_transformer_engine_multiplies_tensors_with_one_scale() -> None:
    accept = plans.accepts_transformer_engine
    a, odd = (breccia.cast(activations(rows, 256).float(), "fp8_current") for rows in (16, 20))
    for dtype in ("float32", "bfloat16", "float16"):
        assert accepts(accept, a, a.mT, out_dtype=dtype) is None
    row, e5 = weight("fp8_row", 128, 256), breccia.cast(activations(16, 256).float(), "fp8_current,fp8_format=E5M2")
    assert accepts(accept, e5, a.mT) is None
    for x, w, reason in (
        (activations(4, 256), a.mT, "and a is an array"),
        (a, row.mT, "is called for one scale of each tensor, not for scales tensor times row"),
        (e5, e5.mT, "cuBLAS does not multiply E5M2 by E5M2"),
        (a, odd.mT, "cuBLAS is called for K in multiples of 16 and N of 16; got K = 256, N = 20"),
        (a, breccia.stack([a, a]).mT, "it multiplies one matrix of b"),
        (a[:0], a.mT, "empty operands"),
    ):
        assert reason in str(accepts(accept, x, w)), reason


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


def test_libraries_and_devices_that_are_missing_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert plans.int4_available(Device("cuda", 0, (9, 0))) == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(plans.targets, "installed", lambda module: module in ("torch",))
    assert plans.int4_available(Device("cuda", 0, (9, 0))) is None
    assert "humming is not installed; pip install humming-kernels" in str(plans.humming_available(Device("cuda", 0, (9, 0))))
    assert "transformer_engine is not installed; pip install transformer-engine[pytorch]" in str(
        plans.transformer_engine_available(Device("cuda", 0, (9, 0)))
    )
    assert "deep_gemm is not installed; see github.com" in str(plans.deep_gemm_available(Device("cuda", 0, (9, 0))))
    monkeypatch.setattr(plans.targets, "installed", lambda module: True)
    assert plans.deep_gemm_available(Device("cuda", 0, (9, 0))) is None
    assert "rounds scales to powers of two" in str(plans.deep_gemm_available(Device("cuda", 0, (10, 0))))
    assert "it needs compute capability 8.9; cuda:0 has 8.0" in str(plans.humming_fp8_available(Device("cuda", 0, (8, 0))))
    assert plans.humming_available(Device("cuda", 0, (8, 0))) is None


def test_explain_names_each_product_and_why_it_does_not_run() -> None:
    said = str(breccia.explain("matmul", "array", "int4", on="torch:cuda"))
    for name in ("humming.weight_only", "torch.int4"):
        assert f"it does not follow the contract of matmul; name it with prefer='{name}'" in said
    said = str(breccia.explain("matmul", "fp8_block", "fp8_block,block_m=128", on="torch:cuda"))
    for name in ("humming.fp8_matmul", "deep_gemm.fp8_matmul"):
        assert f"name it with prefer='{name}'" in said
    said = str(breccia.explain("matmul", "fp8_current", "fp8_current", on="torch:cuda"))
    assert "name it with prefer='transformer_engine.fp8_matmul'" in said


# ------------------------------------------------------------------------------------------------ measured times


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the shipped files, on "Some GPU"."""
    monkeypatch.setattr(choices, "SHIPPED", tmp_path)
    monkeypatch.setattr(fp8_plans, "device_name", lambda device: "Some GPU")
    monkeypatch.setattr(weight_times, "device_name", lambda device: "Some GPU")
    choices.measured.cache_clear()
    yield tmp_path
    choices.measured.cache_clear()


def test_estimated_times_come_from_the_table_of_the_device(tables: Path) -> None:
    a, w = breccia.cast(activations(4, 256).float(), "fp8_block"), weight("fp8_block,block_m=128", 128, 256)
    call = Call(OPERATIONS["matmul"], "torch", (a, w.mT, None, FLOAT32, None))
    unmeasured = plans.score_of_humming(call), plans.score_of_deep_gemm(call), fp8_plans.score(call)
    assert unmeasured[2] < unmeasured[1] < unmeasured[0]
    st, x = weight("int4", 128, 256), activations(16, 256)
    product = Call(OPERATIONS["matmul"], "torch", (x, st.mT, None, FLOAT32, None))
    assert weight_times.score(product) < weight_times.score_of_humming(product) < weight_times.score_of_torch(product)
    fmt, block = st.recipe.format, st.layout.block(-1)
    assert weight_times.key_of("humming", fmt, block, 16) == "humming INT4/F16 1x128 16"
    assert weight_times.key_of("cuda", fmt, block, 4096) == "cuda INT4/F16 1x128 more"
    tensors = breccia.cast(activations(16, 256).float(), "fp8_current")
    whole = Call(OPERATIONS["matmul"], "torch", (tensors, tensors.mT, None, FLOAT32, None))
    assert fp8_plans.score(whole) < plans.score_of_transformer_engine(whole)
    entries = {"humming 1x128 128x128 4x128x512": 1.5, "transformer_engine tensor tensor 16x16x256": 1.1}
    choices.write_measured(tables / "matmul_some_gpu.json", "Some GPU", "slowdowns", entries, {})
    choices.write_measured(
        tables / "weight_times_some_gpu.json", "Some GPU", "slowdowns", {"torch INT4/F16 1x128 16": 1.25}, {"date": "today"}
    )
    choices.measured.cache_clear()
    assert plans.score_of_humming(call) == pytest.approx(1.5 * fp8_plans.bound(4, 128, 256))
    assert plans.score_of_transformer_engine(whole) == pytest.approx(1.1 * fp8_plans.bound(16, 16, 256))
    bound = weight_times.bound(16, 128, 256, 4 + 16 / 128)
    assert weight_times.score_of_torch(product) == pytest.approx(1.25 * bound)
    assert weight_times.score(product) == pytest.approx(1.3 * bound)  # not measured


def test_measurements_of_several_runs_are_merged_and_faulty_files_replaced(tables: Path) -> None:
    path = tables / "times_some_gpu.json"
    for entries in ({"one": 1.0, "two": 2.0}, {"two": 3.0}):
        choices.write_measured(path, "Some GPU", "slowdowns", entries, {})
    assert choices.measured("times", "Some GPU", "slowdowns", choices.times_over_bound) == {"one": 1.0, "two": 3.0}
    path.write_text("{")
    choices.write_measured(path, "Some GPU", "slowdowns", {"three": 4.0}, {})
    choices.measured.cache_clear()
    assert choices.measured("times", "Some GPU", "slowdowns", choices.times_over_bound) == {"three": 4.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ('{"schema": 0}', "its schema is 0; this version of breccia-triton reads 1"),
        ('{"schema": 1, "device": "Other"}', "it is for 'Other', not for 'Some GPU'"),
        ('{"schema": 1, "device": "Some GPU"}', "it has no slowdowns"),
        ('{"schema": 1, "device": "Some GPU", "slowdowns": {"cuda row row": "x"}}', "'x' is not a positive number"),
        ('{"schema": 1, "device": "Some GPU", "slowdowns": {"cuda row row": -1}}', "-1 is not a positive number"),
    ],
)
def test_a_faulty_file_is_left_out_with_its_name_and_fault(tables: Path, text: str, reason: str) -> None:
    (tables / "matmul_some_gpu.json").write_text(text)
    with pytest.warns(UserWarning, match="breccia leaves out .*matmul_some_gpu.json: .*") as caught:
        assert fp8_plans.slowdowns("Some GPU") == {}
    assert reason in str(caught[0].message)


def test_tables_without_a_file_or_a_device_are_empty(tables: Path) -> None:
    assert fp8_plans.slowdowns("Some GPU") == weight_times.slowdowns("Some GPU") == weight_plans.measured_on("Some GPU") == {}
    assert fp8_plans.slowdowns("") == {}


def test_shipped_times_have_keys_of_kernels_that_there_are() -> None:
    for path in choices.SHIPPED.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        for key in found.get("slowdowns", ()):
            assert key.partition(" ")[0] in ("cuda", "torch", "humming", "deep_gemm", "transformer_engine", "bf16"), (path, key)


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
    assert (
        breccia.explain("matmul", x, st.mT, prefer="humming.weight_only", out_dtype="bfloat16").running == "humming.weight_only"
    )
    found = breccia.matmul(x, st.mT, "bfloat16", prefer="humming.weight_only")
    check(found, x, values, humming_error(spec, values, "bfloat16"), PARTS)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(found)
    with torch.cuda.graph(graph):
        breccia.matmul(x, st.mT, "bfloat16", out=out, prefer="humming.weight_only")
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
    found = breccia.matmul(a, w.mT, "bfloat16", prefer="humming.fp8_matmul")
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
        found = breccia.matmul(x, st.mT, "bfloat16", prefer="torch.int4")
        check(found, x, values, int4_error(st), 2)


@on_cuda
@pytest.mark.skipif(find_spec("deep_gemm") is None, reason="DeepGEMM is not installed")
def test_deep_gemm_multiplies_two_tensors_on_a_gpu() -> None:
    a, w = breccia.cast(activations(48, K, device="cuda").float(), "fp8_block"), weight("fp8_block,block_m=128", 256, K, "cuda")
    found = breccia.matmul(a, w.mT, "bfloat16", prefer="deep_gemm.fp8_matmul")
    check(found, breccia.dequantize(a), breccia.dequantize(w).double())


def _loads(module: str) -> bool:
    """Whether a library can be imported. Its package may be installed without its compiled part; it may warn of other ones."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError):
        return False
    return True


@on_cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformer_engine_multiplies_two_tensors_on_a_gpu(dtype: str) -> None:
    if not _loads("transformer_engine.pytorch"):
        pytest.skip("TransformerEngine is not installed")
    name = "transformer_engine.fp8_matmul"
    for m, n, k in ((16, 256, K), (300, 512, 4096)):
        a, w = breccia.cast(activations(m, k, device="cuda").float(), "fp8_current"), weight("fp8_current", n, k, "cuda")
        assert breccia.explain("matmul", a, w.mT, out_dtype=dtype, prefer=name).running == name
        found, x, y = (
            breccia.matmul(a, w.mT, dtype, prefer=name),
            breccia.dequantize(a).double(),
            breccia.dequantize(w).double(),
        )
        exact, bound = x @ y.t(), bounds.accumulated(x.abs() @ y.abs().t(), k, k, True)
        bound = bound + ROUNDOFF.get(dtype, 0.0) * (exact.abs() + bound)
        assert found.dtype == getattr(torch, dtype) and ((found.double() - exact).abs() <= bound).all()
        assert ((found.double() - exact).norm() / exact.norm()).item() <= 4e-3 + ROUNDOFF.get(dtype, 0.0)


@on_cuda
def test_the_thin_names_run_a_kernel_of_the_table() -> None:
    from breccia.kernels import triton

    a, w = breccia.cast(activations(48, K, device="cuda").float(), "fp8_block"), weight("fp8_block,block_m=128", 256, K, "cuda")
    for name in ("scaled_matmul_triton", "block_scaled_matmul_triton"):
        check(getattr(triton, name)(a, w.mT, "bfloat16"), breccia.dequantize(a), breccia.dequantize(w).double())


@on_cuda
def test_bench_matmul_shows_cublas_beside_breccia_s_kernels() -> None:
    from breccia.cli import bench

    recipes = [(spec, breccia.recipe(spec)) for spec in ("fp8_block", "int4")]
    found = bench.measure_products(recipes, "torch:cuda", size=1024, rows=(16,), runs=2)
    by_arm = {p.arm: p.kernel for p in found}
    assert {"dense bfloat16", "fp8_block x fp8_block", "int4"} <= by_arm.keys()
    if torch.cuda.get_device_capability() == (9, 0):
        assert {"cuda.fp8_matmul", "torch.scaled_mm", "cuda.weight_only"} <= set(by_arm.values())
