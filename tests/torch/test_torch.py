"""torch on a CPU: zero-copy NumPy kernels, gradients, transforms, and refused input."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from marks import on_cuda
from products import assert_same_product
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import breccia
import breccia_torch.operators
from breccia.arrays.ops import NUMPY
from breccia.codecs import E4M3, E5M2, F16
from breccia.dispatch import registry
from breccia.tensors.components import components
from breccia.tensors.grids import packing
from breccia.tensors.metadata import Metadata
from breccia.tensors.tensor import FIELDS
from breccia.testing.examples import special_rows, wide
from breccia_torch import ops as torch_ops
from breccia_torch.ops import TORCH, WORDS

#: Warnings that torch's own modules raise on import.
pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit"), pytest.mark.covering(1, 2)]

X = np.concatenate([wide((29, 77), seed=40, exponents=30), special_rows(77)])
NVFP4 = breccia.NVFP4BlockScaling()
MXFP8 = breccia.MXFP8BlockScaling()
CURRENT = breccia.Float8CurrentScaling()


def same(a: Any, b: Any) -> bool:
    """Equal bits, NaN equal to NaN."""
    return torch.equal(torch.nan_to_num(a, nan=7e30), torch.nan_to_num(b, nan=7e30)) and torch.equal(a.isnan(), b.isnan())


def test_the_numpy_kernels_run_for_cpu_tensors_and_the_generic_algorithm_for_others() -> None:
    x = torch.ones(4, 32)
    st = breccia.cast(x, MXFP8)
    for op, operands in {"cast": (x, MXFP8), "dequantize": (st,)}.items():
        winner = breccia.explain(op, *operands).winner
        assert winner is not None and winner.name == f"torch.cpu.{op}"
    both = {step.winner.name for step in breccia.explain("requantize", st, NVFP4).plan if step.winner is not None}
    assert both == {"torch.cpu.cast", "torch.cpu.dequantize"}
    on_mps = breccia.explain("dequantize", MXFP8, on="torch:mps")
    assert on_mps.winner is not None and on_mps.winner.name == "reference.dequantize"
    assert "runs on cpu, the data is on mps" in str(on_mps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_and_stride_gives_the_bytes_of_the_generic_algorithm(
    recipe: breccia.ScalingRecipe, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(X).to(dtype)
    cube = torch.from_numpy(wide((3, 8, 64), seed=41, exponents=5)).to(dtype)
    views = [x, x.t(), x[::2, 3:], x[:, ::3], cube, cube.transpose(0, 1), cube[:, :, :1].expand(3, 8, 64), x[:0], x[:, :0]]
    for view in views:
        for options in ({}, {"axis": -2}):
            ours, generic = (breccia.cast(view, recipe, prefer=k, **options) for k in (None, "reference.cast"))
            assert breccia.bytes_equal(ours, generic)
            assert {n: (p.dtype, p.shape) for n, p in components(ours).items()} == {
                n: (p.dtype, p.shape) for n, p in components(generic).items()
            }
            for out_dtype in ("float32", "float16", "bfloat16"):
                a, b = (breccia.dequantize(ours, out_dtype=out_dtype, prefer=k) for k in (None, "reference.dequantize"))
                assert a.dtype == b.dtype and same(a, b)


def test_supplied_scales_and_out_can_be_tensors(recipe: breccia.ScalingRecipe) -> None:
    x = torch.from_numpy(wide((20, 70), seed=42, exponents=2))
    first = breccia.cast(x, recipe)
    out = breccia.cast(x * 3, recipe)
    pointers = {name: part.data_ptr() for name, part in components(out).items()}
    assert breccia.cast(x, recipe, out=out) is out and breccia.bytes_equal(out, first)
    assert {name: part.data_ptr() for name, part in components(out).items()} == pointers
    y = torch.empty(20, 70)
    assert breccia.dequantize(first, out=y) is y and torch.equal(y, breccia.dequantize(first))
    scale = first.scale if first.global_scale is None else first.global_scale
    if recipe.format.offset == "none":
        again, generic = (breccia.cast(x, recipe, scale=scale, prefer=k) for k in (None, "reference.cast"))
        assert breccia.bytes_equal(again, generic)


def test_matmul_and_requantize_equal_the_generic_algorithm() -> None:
    a, w = torch.from_numpy(wide((5, 64), exponents=1)), torch.from_numpy(wide((7, 64), seed=1, exponents=1))
    sa, sw = breccia.cast(a, MXFP8), breccia.cast(w, NVFP4)
    for left, right in ((sa, sw.mT), (a, sw.mT), (sa, w.mT)):
        values = [breccia.dequantize(x) if isinstance(x, breccia.ScaledTensor) else x for x in (left, right)]
        generic = breccia.matmul(left, right, prefer="reference.matmul")
        assert_same_product(breccia.matmul(left, right), generic, *values)
    assert breccia.bytes_equal(breccia.requantize(sw, MXFP8), breccia.requantize(sw, MXFP8, prefer="reference.requantize"))


def test_a_parameter_is_read_and_codes_carry_no_gradient() -> None:
    w = torch.nn.Parameter(torch.from_numpy(wide((4, 64), exponents=2)))
    st = breccia.cast(w, NVFP4)
    assert breccia.bytes_equal(st, breccia.cast(w.detach(), NVFP4))
    assert not st.data.requires_grad and not breccia.dequantize(st).requires_grad


def test_fake_tensors_have_shapes_and_dtypes_and_no_values(recipe: breccia.ScalingRecipe) -> None:
    real = breccia.cast(torch.ones(6, 70), recipe)
    with FakeTensorMode():
        st = breccia.cast(torch.ones(6, 70), recipe)
        y = breccia.dequantize(st, out_dtype=torch.bfloat16)
    assert {n: (p.dtype, p.shape) for n, p in components(st).items()} == {
        n: (p.dtype, p.shape) for n, p in components(real).items()
    }
    assert (st.shape, st.layout, y.shape, y.dtype) == (real.shape, real.layout, (6, 70), torch.bfloat16)


def narrowed_like_numpy(device: str) -> None:
    """torch's conversions against the integer arithmetic: random bits, every value of the codec, and the ties between them."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 21, dtype=np.uint32).view(np.float32)
    for codec in (E4M3, E5M2, F16):
        codes = NUMPY.store(np.arange(1 << codec.bits, dtype=np.int32), f"uint{codec.bits}")
        with np.errstate(invalid="ignore"):  # NaNs that signal
            values = np.sort(codec.read(NUMPY, codes.view(NUMPY.storage(codec))).astype(np.float64))
        ties = (values[:-1] + values[1:])[np.isfinite(values[:-1] + values[1:])] / 2
        y = np.concatenate([random, *(t.astype(np.float32) for t in (values, ties, np.nextafter(ties.astype(np.float32), 0)))])
        expected = codec.encode(NUMPY, y)
        found = codec.encode(TORCH, torch.from_numpy(y).to(device))
        assert TORCH.native_cast(torch.ones(1, device=device), codec) is not None
        assert np.array_equal(found.cpu().numpy(), expected), codec.name


def test_torchs_own_conversions_write_the_codes_of_the_contract() -> None:
    narrowed_like_numpy("cpu")
    other = dataclasses.replace(E4M3, bias=8, largest=224.0)
    assert TORCH.native_cast(torch.ones(1), other) is None, "a codec of that name but other numbers"


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_codes_match_numpy_around_every_code(name: str) -> None:
    """With supplied scales, so that inputs are on, next to and beyond the codes."""
    codec = {"E4M3": E4M3, "E5M2": E5M2}[name]
    values = np.array([v for code in range(256) if math.isfinite(v := codec.value(code))], np.float32)
    ties = (np.sort(values)[:-1] + np.sort(values)[1:]) / 2
    y = np.concatenate([values, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), 1.1 * values]).astype(np.float32)
    x = np.resize(y, (131, 3000))
    for recipe in (breccia.Float8CurrentScaling(name), breccia.Float8RowScaling(name), breccia.Float8BlockScaling(name)):
        scale: Any = np.float32(1.0)
        if recipe.name != "fp8_current":
            scale = np.ones(breccia.cast(x, recipe).scale.shape, np.float32)
        expected = breccia.cast(x, recipe, scale=scale)
        found = breccia.cast(torch.from_numpy(x), recipe, scale=torch.as_tensor(scale))
        assert found.digest() == expected.digest()


def test_counters_computed_in_pieces_are_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "_SPAN", 8)
    for shape in ((3, 7), (8,), (2, 8), (0, 4)):
        low, high = TORCH.counter(torch.empty(shape))
        assert torch.equal(low, torch.arange(low.numel(), dtype=torch.int32).reshape(shape)) and not high.any()


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cast_ste_returns_the_round_trip_and_passes_gradients_unchanged(
    recipe: breccia.ScalingRecipe, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(wide((6, 70), seed=3, exponents=2)).to(dtype).requires_grad_()
    y = breccia.cast_ste(x, recipe)
    assert y.dtype == dtype and same(y.detach(), breccia.dequantize(breccia.cast(x, recipe), out_dtype=dtype))
    upstream = torch.arange(y.numel(), dtype=dtype).reshape(y.shape)
    (found,) = torch.autograd.grad(y, x, upstream)
    assert torch.equal(found, upstream)


def test_the_clipped_gradient_is_zero_only_outside_the_bounds() -> None:
    x = torch.tensor([[-500.0, -448.0, -1.0, 0.0, 1.0, 448.0, 449.0, float("nan")]]).requires_grad_()
    (found,) = torch.autograd.grad(breccia.cast_ste_clipped(x, CURRENT).nansum() * 1.0, x, allow_unused=False)
    (passed,) = torch.autograd.grad(breccia.cast_ste_clipped(x, CURRENT), x, torch.full_like(x, 3.0))
    assert passed.tolist() == [[0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]]
    (passed,) = torch.autograd.grad(breccia.cast_ste_clipped(x, CURRENT, -1.0, 0.5), x, torch.ones_like(x))
    assert passed.tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
    assert found.shape == x.shape
    with pytest.raises(breccia.OptionError, match="clip_min must be less than clip_max; got 2.0 and 1.0"):
        breccia.cast_ste_clipped(x, CURRENT, 2.0, 1.0)


def test_an_infinite_gradient_outside_the_bounds_is_still_zero() -> None:
    x = torch.tensor([[1.0, 1000.0]]).requires_grad_()
    (found,) = torch.autograd.grad(breccia.cast_ste_clipped(x, CURRENT), x, torch.full_like(x, torch.inf))
    assert found.tolist() == [[torch.inf, 0.0]]


def test_gradients_are_clipped_where_the_cast_saturates(recipe: breccia.ScalingRecipe) -> None:
    x = torch.from_numpy(X).requires_grad_()
    with torch.no_grad():
        st = breccia.cast(x, recipe)
        element = recipe.format.element
        values = {code: v for code in range(1 << element.bits) if math.isfinite(v := element.value(code))}
        group, size = packing(element)

        def all_of(code: int) -> Any:
            """What a tensor of nothing but this code under the same scales decodes to."""
            pattern = sum(code << (i * element.bits) for i in range(group)).to_bytes(size, "little")
            data = np.resize(np.frombuffer(pattern, np.uint8), st.data.shape)
            fields = {name: getattr(st, name) for name in FIELDS}
            return breccia.dequantize(breccia.ScaledTensor.from_parts(**fields | {"data": torch.from_numpy(data)}))

        low, high = (all_of(end(values, key=lambda code: values[code])) for end in (min, max))
    (found,) = torch.autograd.grad(breccia.cast_ste_clipped(x, recipe, clip="scale"), x, torch.full_like(x, 2.0))
    assert torch.equal(found, torch.where((x >= low) & (x <= high), 2.0, 0.0))


def test_a_scale_changed_before_the_backward_pass_raises() -> None:
    scale = torch.tensor(1.0)
    x = torch.full((1, 64), 500.0, requires_grad=True)
    y = breccia.cast_ste_clipped(x, CURRENT, clip="scale", scale=scale)
    scale.fill_(100.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_stale_scale_cuts_the_gradients_of_what_it_clips() -> None:
    x = torch.tensor([[-500.0, -448.0, -1.0, 449.0, 896.0, 897.0]]).requires_grad_()
    for scale, expected in ((1.0, [0, 1, 1, 0, 0, 0]), (2.0, [1, 1, 1, 1, 1, 0])):
        y = breccia.cast_ste_clipped(x, CURRENT, clip="scale", scale=scale)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [expected]
    with pytest.raises(breccia.OptionError, match="clip is one of element, scale; got 'block'"):
        breccia.cast_ste_clipped(x, CURRENT, clip="block")
    with pytest.raises(breccia.OptionError, match=r'clip="scale" computes its own bounds; omit clip_min and clip_max'):
        breccia.cast_ste_clipped(x, CURRENT, 0.0, clip="scale")


def test_the_gradient_of_matmul_is_its_derivative() -> None:
    """Sums of integers below 2^24, scaled by powers of two, are exact in FP32, so no tolerance is needed."""
    whole = torch.arange(-30.0, 34.0).reshape(2, 32)
    w = breccia.cast(whole.sign() * (whole.abs() % 8), breccia.INT4Scaling(group_size=32, scale_dtype="fp32"))
    assert w.scale.unique().tolist() == [1.0]
    a = torch.arange(-32.0, 32.0).reshape(2, 32).requires_grad_()
    exact = {"eps": 0.5, "atol": 0.0, "rtol": 0.0, "check_undefined_grad": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #0 requires gradient and is not a double precision")
        assert torch.autograd.gradcheck(lambda x: breccia.matmul(x, w.mT), (a,), nondet_tol=0.0, **exact)
        assert torch.autograd.gradcheck(lambda x: breccia.matmul(w, x.mT), (a,), nondet_tol=0.0, **exact)


def test_autocast_changes_no_op(recipe: breccia.ScalingRecipe) -> None:
    x = torch.from_numpy(wide((6, 64), seed=8, exponents=1)).requires_grad_()

    def every(x: Any) -> list[Any]:
        st = breccia.cast(x, recipe)
        y = breccia.matmul(x, st.mT)
        return [*components(st).values(), breccia.dequantize(st), breccia.cast_ste(x, recipe), y]

    plain = every(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = every(x)
    plain, found = ([*them, torch.autograd.grad(them[-1].sum(), x)[0]] for them in (plain, found))
    assert [a.dtype for a in found] == [a.dtype for a in plain]
    assert all(torch.equal(a.view(WORDS[a.itemsize]), b.view(WORDS[a.itemsize])) for a, b in zip(found, plain, strict=True))


def test_tensors_on_meta_have_shapes_and_no_values(recipe: breccia.ScalingRecipe) -> None:
    x = torch.from_numpy(wide((6, 70), seed=9))
    real = breccia.cast(x, recipe)
    st = breccia.cast(x.to("meta"), recipe)
    assert {n: (p.dtype, p.shape, p.device.type) for n, p in components(st).items()} == {
        n: (p.dtype, p.shape, "meta") for n, p in components(real).items()
    }
    assert (st.shape, st.layout, st.padding) == (real.shape, real.layout, real.padding)
    assert breccia.dequantize(st, out_dtype=torch.bfloat16).shape == x.shape
    assert breccia.matmul(x.to("meta"), st.mT).shape == (6, 6)
    assert breccia.cast_ste(x.to("meta"), recipe).is_meta
    assert breccia.requantize(st, MXFP8).shape == x.shape
    with pytest.raises(breccia.UnsupportedError, match="the meta device have no values, which this option reads"):
        breccia.cast(x.to("meta"), recipe, nonfinite="raise")


def test_without_a_graph_nothing_is_recorded() -> None:
    x = torch.ones(2, 32, requires_grad=True)
    with torch.no_grad():
        assert not breccia.cast_ste(x, MXFP8).requires_grad
    assert not breccia.cast_ste(x.detach(), MXFP8).requires_grad
    assert breccia.cast_ste(x, MXFP8).requires_grad


def test_matmul_is_differentiable_in_the_operand_of_high_precision() -> None:
    a = torch.from_numpy(wide((5, 64), exponents=1)).requires_grad_()
    w = breccia.cast(torch.from_numpy(wide((7, 64), seed=1, exponents=1)), NVFP4)
    upstream = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad(breccia.matmul(a, w.mT), a, upstream)
    b = a.detach().requires_grad_()
    (expected,) = torch.autograd.grad(b @ breccia.dequantize(w).mT, b, upstream)
    assert torch.equal(found, expected)


def test_functorch_transforms_see_one_example_at_a_time() -> None:
    x = torch.from_numpy(wide((4, 6, 64), seed=5, exponents=3))
    for recipe in (CURRENT, MXFP8, NVFP4, breccia.INT4Scaling(group_size=16)):

        def trip(t: Any, recipe: breccia.ScalingRecipe = recipe) -> Any:
            return breccia.cast_ste(t, recipe)

        each = torch.stack([trip(t) for t in x])
        assert same(vmap(trip)(x), each), "a scale for each example, where the recipe has one for the tensor"
        assert same(vmap(trip, in_dims=1, out_dims=1)(x.transpose(0, 1)), each.transpose(0, 1))
        assert torch.equal(vmap(grad(lambda t, f=trip: f(t).sum()))(x), torch.ones_like(x))
    value, tangent = jvp(lambda t: breccia.cast_ste_clipped(t, MXFP8, -1.0, 1.0), (x,), (torch.full_like(x, 2.0),))
    assert same(value, breccia.cast_ste(x, MXFP8))
    assert torch.equal(tangent, torch.where(x.abs() <= 1, 2.0, 0.0))


def test_tables_made_under_a_transform_are_not_cached() -> None:
    """They would be wrapped tensors, and later calls would fail."""
    x = rows(4, 64)
    st = breccia.cast(x, NVFP4)
    expected = breccia.dequantize(st)
    torch_ops._table.cache_clear()

    def function(t: Any) -> Any:
        return t.sum() + breccia.dequantize(st, prefer="reference.dequantize").sum()

    grad(function)(torch.ones(3))
    assert type(breccia.dequantize(st, prefer="reference.dequantize")) is torch.Tensor
    assert np.array_equal(breccia.dequantize(st, prefer="reference.dequantize").numpy(), expected.numpy())


# -- what is refused -------------------------------------------------------------------------------------------------


ONES = torch.ones(4, 32)
FLOATS = r"cast takes float32, float16, bfloat16; got "


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ONES.double(), FLOATS + r"float64\. Convert it first.*x\.float\(\)"),
        (lambda: ONES.int(), FLOATS + r"int32\. Only floating-point numbers are quantized"),
        (lambda: ONES.bool(), FLOATS + r"bool\. Only floating-point numbers are quantized"),
        (lambda: ONES.to(torch.complex64), FLOATS + r"complex64\. Only floating-point numbers are quantized"),
        (lambda: ONES.to(torch.float8_e4m3fn), FLOATS + r"float8_e4m3fn\."),
        (
            lambda: ONES.to_sparse(),
            r"x is a sparse tensor \(torch\.sparse_coo\); breccia computes on dense ones: pass x\.to_dense\(\)",
        ),
        (lambda: ONES.to_sparse_csr(), r"x is a sparse tensor \(torch\.sparse_csr\); .* pass x\.to_dense\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_inputs_that_cannot_be_cast_are_named_with_a_remedy(made: Callable[[], Any], message: str) -> None:
    for verb in (breccia.cast, breccia.cast_ste):
        with pytest.raises(TypeError, match=message):
            verb(made(), MXFP8)
    with pytest.raises(TypeError, match=message):
        breccia.cast(made(), MXFP8, prefer="reference.cast")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_products_name_sparse_operands() -> None:
    w, ends = breccia.cast(torch.ones(32, 32), MXFP8), torch.tensor([4], dtype=torch.int32)
    for sparse in (ONES.to_sparse(), ONES.to_sparse_csr()):
        for product in (
            lambda x: breccia.matmul(x, w.mT),
            lambda x: breccia.matmul(w, x.mT),
            lambda x: breccia.cast_matmul(x, MXFP8, w.mT),
            lambda x: breccia.grouped_matmul(x, breccia.stack([w]).mT, ends),
        ):
            with pytest.raises(breccia.UnsupportedError, match=r"x is a sparse tensor \(torch\.sparse_.* pass x\.to_dense\(\)"):
                product(sparse)


def test_operands_on_two_devices_are_named() -> None:
    w = breccia.cast(torch.ones(4, 32), MXFP8)
    with pytest.raises(TypeError, match="a is on meta and b on cpu; move both to one device"):
        breccia.matmul(torch.ones(4, 32, device="meta"), w.mT)
    with pytest.raises(TypeError, match=r"x is on cpu and scale on meta; move both to one device\. Nothing is copied"):
        breccia.cast(torch.ones(4, 32), MXFP8, scale=w.scale.to("meta"))
    with pytest.raises(TypeError, match="data is on cpu and scale on meta; move both to one device"):
        breccia.from_buffer(w.data, w.scale.to("meta"), w.recipe, w.layout)
    with pytest.raises(TypeError, match="the result is on cpu and out on meta; move both to one device"):
        breccia.dequantize(w, out=torch.empty(4, 32, device="meta"))
    with pytest.raises(TypeError, match=r"tensors\[0\] is on cpu and tensors\[1\] on meta"):
        breccia.concat([w, w.to("meta")], 0)


@pytest.mark.parametrize("known", [False, True], ids=["new kind of call", "repeated call"])
@pytest.mark.parametrize(
    ("spec", "component"),
    [
        ("fp8_block", "scale"),
        ("fp8_current", "scale"),
        ("int4,symmetric=false,signed=false", "scale"),
        ("int4,symmetric=false,signed=false", "zero_point"),
        ("nvfp4", "scale"),
        ("nvfp4", "global_scale"),
    ],
)
def test_a_component_on_another_device_is_named(spec: str, component: str, known: bool) -> None:
    """Constructors with checks refuse such a tensor. The cache of repeated calls does not compare the devices of components."""
    st = breccia.cast(torch.ones(32, 256), spec)
    parts = {name: getattr(st, name) for name in ("data", "scale", "zero_point", "global_scale")}
    parts[component] = parts[component].to("meta")
    stray = breccia.ScaledTensor.from_parts(**parts, recipe=st.recipe, layout=st.layout, axis=st.axis, padding=st.padding)
    x, ends = torch.ones(4, 256), torch.tensor([4], dtype=torch.int32)
    calls: dict[str, tuple[str, Any]] = {
        "dequantize": ("st", breccia.dequantize),
        "requantize": ("st", lambda w: breccia.requantize(w, "mxfp8")),
        "matmul by it": ("b", lambda w: breccia.matmul(x, w.mT)),
        "matmul of it": ("a", lambda w: breccia.matmul(w, st.mT)),
        "cast_matmul": ("b", lambda w: breccia.cast_matmul(x, "mxfp8", w.mT)),
        "grouped_matmul": ("b", lambda w: breccia.grouped_matmul(x, w.reshape(1, 32, 256).mT, ends)),
        "explain": ("st", lambda w: breccia.explain("dequantize", w)),
        "the generic algorithm": ("st", lambda w: breccia.dequantize(w, prefer="reference.dequantize")),
    }
    registry.reload()
    for name, (operand, call) in calls.items():
        if known:
            call(st)
        with pytest.raises(TypeError) as e:
            call(stray)
        what = operand if not known else "(st|a|b)"  # the error may come from a step of the op, under its operand's name
        said = f"{what}.data is on cpu and {what}.{component} on meta; move both to one device. Nothing is copied"
        assert re.match(said, str(e.value)), (name, str(e.value))


def test_operations_leave_the_storage_of_tensors_resizable(recipe: breccia.ScalingRecipe) -> None:
    """FSDP frees the storage of parameters between passes, where `Tensor.numpy()` has not fixed its size for good."""
    x, bias = torch.randn(40, 96), torch.randn(40)
    w = breccia.cast(x, recipe)
    own = Metadata.of(w).assembled(**{name: part.clone() for name, part in components(w).items()})
    for activations in (x, x.bfloat16()):
        breccia.dequantize(own)
        breccia.matmul(activations, own.mT, bias=bias)
        breccia.cast_ste(activations, recipe)
        used = activations, bias, *components(own).values()
        assert all(part.untyped_storage().resizable() for part in used)


# -- trees and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_tensor_made_from_parts_is_a_pytree_before_any_cast() -> None:
    script = (
        "import torch, breccia\n"
        "from torch.utils import _pytree as pytree\n"
        "codes, scale = torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)\n"
        "recipe = breccia.MXFP8BlockScaling()\n"
        "parts = codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)\n"
        "print(len(pytree.tree_leaves(breccia.from_buffer(*parts, recipe, recipe.layout))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n", "data and scale: the recipe has no other component"


def test_a_scaled_tensor_is_a_pytree_of_its_components(recipe: breccia.ScalingRecipe) -> None:
    st = breccia.cast(torch.from_numpy(X), recipe)
    leaves, spec = pytree.tree_flatten({"w": st, "b": torch.ones(2)})
    assert len(leaves) == len(components(st)) + 1
    assert breccia.bytes_equal(pytree.tree_unflatten(leaves, spec)["w"], st)
    moved = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, st)
    assert breccia.bytes_equal(moved, st) and moved.data.data_ptr() != st.data.data_ptr()
    placeholders = pytree.tree_map(lambda leaf: None, st)
    assert placeholders.data is None and placeholders.recipe == recipe
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(st)[0]]
    assert paths == [f".{name}" for name in components(st)]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec, "as torch.export.save stores it"


def test_vmap_maps_over_scaled_tensors_and_returns_them(recipe: breccia.ScalingRecipe) -> None:
    x = torch.stack([torch.from_numpy(X), torch.from_numpy(X) * 3])
    each = [breccia.cast(one, recipe) for one in x]
    mapped = vmap(lambda one: breccia.cast(one, recipe))(x)
    assert breccia.bytes_equal(mapped, breccia.stack(each))
    values = vmap(breccia.dequantize)(mapped)
    assert same(values, torch.stack([breccia.dequantize(one) for one in each]))


def test_torch_saves_and_loads_weights_only(recipe: breccia.ScalingRecipe, tmp_path: Path) -> None:
    st = breccia.cast(torch.from_numpy(X), recipe)
    torch.save({"w": st, "b": torch.ones(2)}, tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert breccia.bytes_equal(found["w"], st) and found["w"].recipe == recipe


def test_a_pickle_is_checked_when_it_is_read() -> None:
    st = breccia.cast(torch.from_numpy(X), MXFP8)
    rebuild, (data, scale, *rest) = st.__reduce__()
    with pytest.raises(breccia.LayoutError):
        rebuild(data, scale[:3], *rest)
    rebuild, (kind, fields) = breccia.INT4Scaling().__reduce__()
    with pytest.raises(breccia.RecipeError, match="group_size"):
        rebuild(kind, fields | {"group_size": 0})


def test_copies_share_nothing_and_shared_memory_is_shared(recipe: breccia.ScalingRecipe) -> None:
    st = breccia.cast(torch.from_numpy(X), recipe)
    deep = copy.deepcopy(st)
    assert breccia.bytes_equal(deep, st) and deep.data.data_ptr() != st.data.data_ptr()
    for part in components(st).values():
        part.share_memory_()
    sent = pickle.loads(ForkingPickler.dumps(st))
    assert breccia.bytes_equal(sent, st)
    st.data.view(torch.uint8).fill_(1)
    assert breccia.bytes_equal(sent, st) and not breccia.bytes_equal(deep, st)


# -- torch.compile ---------------------------------------------------------------------------------------------------

COMPILED = [
    CURRENT,
    breccia.Float8RowScaling(),
    breccia.Float8BlockScaling(block_k=32, block_m=4),
    MXFP8,
    breccia.MXFP6BlockScaling(),
    NVFP4,
    breccia.INT4Scaling(group_size=32, signed=False, symmetric=False),
    breccia.NF4Scaling(),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset the compiler, so that tests do not share graphs."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def graph_count() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def rows(n: int, k: int = 70) -> Any:
    return torch.from_numpy(wide((n, k), seed=n, exponents=2))


@pytest.mark.long
@pytest.mark.parametrize("recipe", COMPILED, ids=lambda r: r.name)
def test_compiled_casts_give_the_bytes_of_eager_ones_for_every_batch(recipe: breccia.ScalingRecipe) -> None:
    def trip(x: Any) -> Any:
        st = breccia.cast(x * 2, recipe)
        return st, breccia.dequantize(st, out_dtype=torch.bfloat16)

    fast = compiled(trip)
    for n in (4, 8, 12, 20):
        (st, y), (expected, z) = fast(rows(n)), trip(rows(n))
        assert breccia.bytes_equal(st, expected) and (st.layout, st.padding) == (expected.layout, expected.padding)
        assert torch.equal(y, z)


def test_a_dynamic_batch_is_recompiled_once() -> None:
    torch._dynamo.utils.counters.clear()
    fast = compiled(lambda x: breccia.dequantize(breccia.cast(x, MXFP8)))
    for n in (4, 5, 6, 7, 8, 9):
        fast(rows(n, 64))
    assert graph_count() == 2


@pytest.mark.long
def test_dynamic_shapes_are_not_confused_with_integer_fields_of_recipes() -> None:
    fast = compiled(lambda x, recipe: breccia.dequantize(breccia.cast(x, recipe)), dynamic=True)
    for recipe in (breccia.INT4Scaling(group_size=16), breccia.INT4Scaling(group_size=32), breccia.DelayedScaling(margin=-2)):
        for n in (4, 6):
            assert same(fast(rows(n, 64), recipe), breccia.dequantize(breccia.cast(rows(n, 64), recipe)))


def test_operators_return_results_in_the_order_of_memory_that_their_fakes_promise(recipe: breccia.ScalingRecipe) -> None:
    """Contiguous, but for the codes of a cast along axis -2, whose columns are contiguous."""
    x = torch.from_numpy(wide((35, 77), seed=12, exponents=2))
    text = recipe.to_json()
    ops = torch.ops.breccia
    for axis in (-1, -2):
        for prefer in ("", "reference.cast,reference.dequantize"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("BRECCIA_PREFER", prefer)
                options = (text, axis, None, "nearest", None, "propagate")
                parts = ops.cast(x, *options)
                st = breccia.cast(x, recipe, axis=axis)
                flat = (parts, text, st.layout.to_json(), axis, st.padding)
                data, *others = parts
                assert (data.mT if axis == -2 else data).is_contiguous()
                made = [*others, ops.dequantize(*flat, "float32"), ops.cast_ste(x, *options, "", 0.0, 0.0)]
                made += [ops.within_scales(x, *options), *ops.requantize(*flat, MXFP8.to_json(), *options[2:])]
            assert all(part.is_contiguous() for part in made)


def test_options_reach_the_operator() -> None:
    x = rows(6, 64)
    for options in (
        {"axis": -2},
        {"axis": 0},
        {"rounding": "stochastic", "seed": 2**64 - 3},
        {"scale": 0.5},
        {"scale": torch.tensor(0.25)},
    ):
        recipe = CURRENT if "scale" in options else breccia.NF4Scaling(block_size=2)

        def trip(t: Any, recipe: Any = recipe, options: Any = options) -> Any:
            return breccia.cast(t, recipe, **options)

        assert breccia.bytes_equal(compiled(trip)(x), trip(x)), options


def test_scaled_tensors_can_be_inputs_and_outputs_of_graphs() -> None:
    w = breccia.cast(rows(8, 64), NVFP4)

    def linear(x: Any, w: Any) -> Any:
        return breccia.matmul(breccia.cast(x, MXFP8), w.mT)

    fast, values = compiled(linear), breccia.dequantize(w).mT
    for n in (3, 5, 6):
        x = rows(n, 64)
        assert_same_product(fast(x, w), linear(x, w), breccia.dequantize(breccia.cast(x, MXFP8)), values)
    assert compiled(lambda st: st.mT)(w).axis == -2
    assert compiled(lambda st: (st.shape, st.global_scale * 1))(w)[0] == (8, 64)


@pytest.mark.long
@pytest.mark.parametrize("into", [MXFP8, breccia.MXFP8BlockScaling(scale_rule="floor"), NVFP4, breccia.Float8BlockScaling()])
def test_compiled_requantize_equals_eager_requantize(into: breccia.ScalingRecipe) -> None:
    """To the same recipe, to one of the same format, with kept scales, and through FP32."""
    for recipe in (MXFP8, breccia.MXFP4BlockScaling(), breccia.Float8BlockScaling(block_m=4)):

        def change(x: Any, recipe: Any = recipe) -> Any:
            return breccia.requantize(breccia.cast(x, recipe), into)

        found, expected = compiled(change)(rows(8, 64)), change(rows(8, 64))
        assert breccia.bytes_equal(found, expected) and (found.layout, found.padding) == (expected.layout, expected.padding)
        torch._dynamo.reset()
    with pytest.raises(Exception, match="requantize: require_exact= is not supported inside torch.compile"):
        compiled(lambda st: breccia.requantize(st, MXFP8, require_exact=True))(breccia.cast(rows(4, 64), NVFP4))


@pytest.mark.long
def test_a_new_process_compiles_ops_and_methods_without_any_preparation() -> None:
    script = """
import torch, breccia
def trip(x): return breccia.cast(x, "mxfp8")[1:].mT.dequantize()
x = torch.randn(3, 64)
assert torch.equal(torch.compile(trip, fullgraph=True, backend="eager")(x), trip(x))
import breccia_torch
assert breccia_torch.enable_compile() is None, "an old call of it is harmless"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


@pytest.mark.long
def test_only_calls_between_the_graphs_of_a_compiled_function_leave_the_compiler() -> None:
    """Leaving it takes time; inside, Dynamo would compile the frames of breccia."""
    script = """
import torch, torch._dynamo, breccia
from breccia.dispatch.registry import registry
x = torch.randn(3, 64)
expected = breccia.dequantize(breccia.cast(x * 2, "mxfp8"))
left, inner = [], registry().functions["cast", "torch"].__wrapped__
outside = torch.compiler.disable(inner)
def leaving(*given):
    left.append(given)
    return outside(*given)
inner._disabled = leaving
assert not left
class Context:
    def __enter__(self): return self
    def __exit__(self, *_): return None
def trip(x):
    with Context():
        torch._dynamo.graph_break()  # in a context that Dynamo does not know: the rest of the function is not traced
        return breccia.dequantize(breccia.cast(x * 2, "mxfp8"))
assert torch.equal(torch.compile(trip, backend="eager")(x), expected)
assert len(left) == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_compiled_requantize_takes_a_row_of_a_matrix() -> None:
    row = breccia.cast(rows(4, 120), MXFP8)[0]
    for into in (MXFP8, NVFP4, CURRENT, breccia.INT4Scaling(group_size=32)):

        def change(st: Any, into: Any = into) -> Any:
            return breccia.requantize(st, into)

        found, expected = compiled(change)(row), change(row)
        assert breccia.bytes_equal(found, expected)
        assert (found.layout, found.padding, found.shape) == (expected.layout, expected.padding, expected.shape)
        torch._dynamo.reset()


def test_compiled_ops_take_the_weight_of_a_layer() -> None:
    """Its attribute `__scaled_tensor__` is read."""
    layer = breccia_torch.nn.ScaledLinear.from_linear(torch.nn.Linear(64, 8), MXFP8)

    def uses(x: Any) -> Any:
        values = breccia.dequantize(layer.weight), breccia.dequantize(breccia.requantize(layer.weight, NVFP4))
        return *values, breccia.matmul(layer.weight, x.mT)

    x = rows(3, 64)
    assert all(map(torch.equal, compiled(uses)(x), uses(x)))


def test_compiled_matmul_has_the_gradients_of_eager_matmul() -> None:
    """With integers, whose sums are exact in any order."""
    w = breccia.cast(rows(8, 64).clamp(-7, 7).round(), breccia.INT4Scaling(group_size=64), scale=torch.ones(8, 1).half())
    for dtype in (torch.float32, torch.bfloat16):
        pairs = [[(rows(n, 64) * 3).round().to(dtype).requires_grad_() for n in (5, 8)] for _ in range(2)]

        def product(a: Any, b: Any) -> Any:
            cube = a.reshape(5, 1, 64)
            return breccia.matmul(a, w.mT).sum() + breccia.matmul(w, a.mT).sum() + (breccia.matmul(cube, b.mT) ** 2).sum()

        values = [f(*pair) for f, pair in zip((compiled(product), product), pairs, strict=True)]
        assert torch.equal(*values)
        for value in values:
            value.backward()
        for compiled_one, eager in zip(*pairs, strict=True):
            assert torch.equal(compiled_one.grad, eager.grad)
        torch._dynamo.reset()


def test_vmap_compiles() -> None:
    x = torch.stack([rows(4, 64), rows(4, 64) * 9])
    w = breccia.cast(rows(8, 64), NVFP4)
    each_alone = torch.stack([breccia.matmul(t, w.mT) for t in x])
    assert_same_product(compiled(vmap(lambda t: breccia.matmul(t, w.mT)))(x), each_alone, x, breccia.dequantize(w).mT)
    each = vmap(lambda t: breccia.cast_ste_clipped(t, CURRENT, -1.0, 1.0))
    assert torch.equal(compiled(each)(x), each(x))


@pytest.mark.long
@pytest.mark.parametrize("recipe", [CURRENT, MXFP8, NVFP4], ids=lambda r: r.name)
def test_compiled_gradients_equal_eager_gradients(recipe: breccia.ScalingRecipe) -> None:
    def loss(x: Any) -> Any:
        clipped = breccia.cast_ste_clipped(x, recipe, -1.0, 0.5) + breccia.cast_ste_clipped(x, recipe, clip="scale")
        return (breccia.cast_ste(x, recipe) ** 2).sum() + (clipped * 3).sum()

    x, y = rows(6).requires_grad_(), rows(6).requires_grad_()
    compiled(loss)(x).backward()
    loss(y).backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


@pytest.mark.long
def test_the_torch_operators_pass_opcheck() -> None:
    x = rows(4, 64)
    recipe = breccia.NF4Scaling()  # no float8, on which torch's own checks cannot compute
    text = recipe.to_json()
    options = (-1, None, "nearest", None, "propagate")
    torch.library.opcheck(torch.ops.breccia.cast.default, (x, text, *options))
    st = breccia.cast(x, recipe)
    flat = ([st.data, st.scale], text, st.layout.to_json(), -1, 0)
    torch.library.opcheck(torch.ops.breccia.dequantize.default, (*flat, "float32"))
    torch.library.opcheck(torch.ops.breccia.requantize.default, (*flat, breccia.INT4Scaling().to_json(), *options[1:]))
    turned = ([st.mT.data, st.mT.scale], text, st.mT.layout.to_json(), -2, 0)
    x.requires_grad_()
    plain = [([a], "", "", -1, 0) for a in (x, rows(64, 4).requires_grad_())]
    for operands in ((*flat, *turned), (*plain[0], *turned), (*plain[0], *plain[1])):
        torch.library.opcheck(torch.ops.breccia.matmul.default, (*operands, "float32"))
    torch.library.opcheck(torch.ops.breccia.within_scales.default, (x.detach(), text, *options))
    for clip in ("", "element", "scale"):
        torch.library.opcheck(torch.ops.breccia.cast_ste.default, (x, text, *options, clip, -1.0, 1.0))


def test_unsupported_calls_inside_a_graph_raise() -> None:
    with pytest.raises(Exception, match="cast: prefer= is not supported inside torch.compile; leave it out"):
        compiled(lambda x: breccia.cast(x, MXFP8, prefer="reference.cast"))(rows(4, 64))
    with pytest.raises(Exception, match="cast takes float32, float16, bfloat16; got float64"):
        compiled(lambda x: breccia.cast(x, MXFP8))(rows(4, 64).double())
    words = torch.tensor([7, 0], dtype=torch.int32)
    with pytest.raises(Exception, match=r"inside torch.compile seed= is a number; got a tensor. Cast outside, or pass"):
        compiled(lambda x: breccia.cast(x, MXFP8, rounding="stochastic", seed=words))(rows(4, 64))
    assert breccia.bytes_equal(
        breccia.cast(rows(4, 64), MXFP8, rounding="stochastic", seed=words),
        breccia.cast(rows(4, 64), MXFP8, rounding="stochastic", seed=7),
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_recipe_compiles(recipe: breccia.ScalingRecipe, backend: str) -> None:
    def trip(x: Any) -> Any:
        st = breccia.cast(x + 0, recipe)
        return st, breccia.dequantize(st) * 1

    st, y = compiled(trip, backend)(rows(8))
    expected, z = trip(rows(8))
    assert breccia.bytes_equal(st, expected) and same(y, z)


def test_operators_take_texts_without_double_quotes(recipe: breccia.ScalingRecipe) -> None:
    operators = breccia_torch.operators
    text = operators.text_of(recipe)
    assert not {'"', "\\"} & set(text)
    assert operators.recipe_of(text) == operators.recipe_of(recipe.to_json()) == recipe
    for value in ("it's", "a\\b"):
        foreign = SimpleNamespace(to_json=lambda value=value: json.dumps({"name": value}))
        assert json.loads(operators.json_in(operators.text_of(foreign))) == {"name": value}


@pytest.mark.slow
def test_inductor_calls_operators_from_cpp() -> None:
    """It writes the texts of their arguments into C++ as they are."""
    st = breccia.cast(rows(16, 64), "int4").mT

    def trip(x: Any) -> Any:
        return breccia.matmul(breccia.dequantize(breccia.cast(x, "nvfp4")), st)

    fast = torch.compile(trip, fullgraph=True, options={"cpp_wrapper": True})
    assert same(fast(rows(8, 64)), trip(rows(8, 64)))


# -- CUDA ------------------------------------------------------------------------------------------------------------


class NoHostTraffic(TorchDispatchMode):
    """Fails on a copy between devices, and on a value that is read back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read back"
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in pytree.tree_leaves((args, kwargs, found)) if isinstance(t, torch.Tensor) and t.ndim]
        assert len({t.device.type for t in tensors}) <= 1, f"{func} crosses devices"
        return found


@on_cuda
@pytest.mark.parametrize("options", [{}, {"axis": -2}, {"rounding": "stochastic", "seed": 7}], ids=str)
def test_cuda_writes_numpys_bytes(recipe: breccia.ScalingRecipe, options: dict[str, Any]) -> None:
    x = np.concatenate([wide((509, 517), seed=50, exponents=60), special_rows(517)])
    expected = breccia.cast(x, recipe, **options)
    st = breccia.cast(torch.from_numpy(x).cuda(), recipe, **options)
    assert st.device.type == "cuda" and breccia.bytes_equal(st.to("cpu"), breccia.cast(torch.from_numpy(x), recipe, **options))
    assert st.digest() == expected.digest()
    assert same(breccia.dequantize(st).cpu(), torch.from_numpy(breccia.dequantize(expected)))


@on_cuda
@pytest.mark.parametrize("recipe", COMPILED, ids=lambda r: r.name)
def test_compiled_cuda_writes_the_same_bytes(recipe: breccia.ScalingRecipe) -> None:
    def trip(x: Any) -> Any:
        st = breccia.cast(x * 2, recipe)
        return st, breccia.dequantize(st) + 1

    fast = compiled(trip, "inductor")
    for n in (64, 96):
        (st, y), (expected, z) = fast(rows(n, 192).cuda()), trip(rows(n, 192))
        assert breccia.bytes_equal(st.to("cpu"), expected) and same(y.cpu(), z)


@on_cuda
def test_cuda_operations_copy_nothing_through_the_host(recipe: breccia.ScalingRecipe) -> None:
    x = rows(64, 192).cuda().requires_grad_()
    first = breccia.cast(x, recipe)
    breccia.dequantize(breccia.requantize(first, MXFP8))  # tables are made on the device once
    breccia.dequantize(first)
    with NoHostTraffic():
        st = breccia.cast(x, recipe)
        breccia.matmul(x, st.mT)
        breccia.requantize(st, MXFP8)
        breccia.cast_ste_clipped(x, recipe).sum().backward()
        breccia.cast_ste_clipped(x, recipe, clip="scale").sum().backward()


@on_cuda
def test_requantize_and_gradients_on_cuda_are_those_of_the_cpu(recipe: breccia.ScalingRecipe) -> None:
    x = torch.from_numpy(np.concatenate([wide((61, 192), seed=51), special_rows(192)]))
    for into in (MXFP8, NVFP4, breccia.Float8BlockScaling(), breccia.INT4Scaling()):
        expected = breccia.requantize(breccia.cast(x, recipe), into)
        assert breccia.bytes_equal(breccia.requantize(breccia.cast(x.cuda(), recipe), into).to("cpu"), expected)
    for clip in ({}, {"clip": "scale"}, {"clip_min": -1.0, "clip_max": 0.5}):
        a, b = x.clone().requires_grad_(), x.cuda().requires_grad_()
        for leaf in (a, b):
            breccia.cast_ste_clipped(leaf, recipe, **clip).sum().backward()
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad.cpu())


@on_cuda
def test_cudas_own_conversions_write_the_codes_of_the_contract() -> None:
    narrowed_like_numpy("cuda")


@on_cuda
def test_operands_on_the_host_and_on_a_device_are_named() -> None:
    st = breccia.cast(torch.ones(4, 32).cuda(), MXFP8)
    with pytest.raises(TypeError, match="a is on cpu and b on cuda:0; move both to one device"):
        breccia.matmul(torch.ones(4, 32), st.mT)
    with pytest.raises(TypeError, match="x is on cuda:0 and scale on cpu; move both to one device"):
        breccia.cast(torch.ones(4, 32).cuda(), CURRENT, scale=torch.tensor(1.0))


# -- torch.export -----------------------------------------------------------------------------------------------------


class EveryOp(torch.nn.Module):
    """Each op that a model may call, on activations of shape (tokens, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = breccia_torch.nn.ScaledWeight(breccia.cast(torch.randn(64, 64), "nvfp4"))
        self.experts = breccia_torch.nn.ScaledWeight(breccia.stack([self.weight.tensor] * 2))

    def forward(self, x: torch.Tensor) -> list[Any]:
        w = self.weight.tensor
        st, (along, down) = breccia.cast(x, "mxfp8"), breccia.cast_pair(x, "fp8_current")
        ends = torch.stack([torch.tensor(1), torch.tensor(x.shape[0])]).to(torch.int32)
        q, history = breccia.AmaxHistory(breccia.DelayedScaling(amax_history_len=2)).cast(x)
        return [
            breccia.dequantize(st, out_dtype=torch.bfloat16),
            *map(breccia.dequantize, (along, down, q)),
            history.scale,
            breccia.dequantize(breccia.requantize(st, "fp8_block")),
            breccia.dequantize(breccia.cast(x, "fp8_current", scale=0.5, rounding="stochastic", seed=3)),
            breccia.matmul(x, w.mT, bias=x[0]),
            breccia.cast_matmul(x, "mxfp8", w.mT),
            breccia.grouped_matmul(x, self.experts.tensor.mT, ends),
            breccia.cast_ste(x, "nvfp4"),
            breccia.cast_ste_clipped(x, "mxfp8", -1.0, 1.0),
            breccia.cast_ste_clipped(x, "fp8_current", clip="scale", scale=0.001),
        ]


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_contain_operators_and_take_any_batch(strict: bool, tmp_path: Path) -> None:
    model = EveryOp()
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(model, (torch.randn(4, 64),), dynamic_shapes=({0: tokens},), strict=strict)
    called = {node.target._opname for node in program.graph.nodes if getattr(node.target, "namespace", "") == "breccia"}
    casts = {"cast", "cast_pair", "cast_and_record", "dequantize", "requantize", "cast_ste"}
    assert called == casts | {"matmul", "cast_matmul", "grouped_matmul"}
    torch.export.save(program, tmp_path / "program.pt2")
    x = torch.randn(37, 64)
    for run in (program.module(), torch.export.load(tmp_path / "program.pt2").module()):
        assert all(torch.equal(a, b) for a, b in zip(run(x), model(x), strict=True))


@pytest.mark.long
def test_exported_programs_take_and_return_scaled_tensors(tmp_path: Path) -> None:
    class Requantize(torch.nn.Module):
        def forward(self, st: breccia.ScaledTensor) -> breccia.ScaledTensor:
            return breccia.requantize(st, "int8")

    first, second = (breccia.cast(torch.randn(4, 64), "nvfp4") for _ in range(2))
    torch.export.save(torch.export.export(Requantize(), (first,)), tmp_path / "program.pt2")
    script = (
        "import sys, torch, breccia_torch.operators\n"
        "st, folder = torch.load(sys.argv[1] + '/st.pt'), sys.argv[1]\n"
        "print(torch.export.load(folder + '/program.pt2').module()(st).digest())\n"
    )
    torch.save(second, tmp_path / "st.pt")
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [breccia.requantize(second, "int8").digest()], done.stderr
