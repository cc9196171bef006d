"""BRECCIA_CHECK=1 finds wrong kernels: each fault planted here raises an error that names the kernel; correct kernels pass."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from marks import here
from recipes import RECIPES, recipe_id

import breccia
from breccia.arrays import frameworks
from breccia.dispatch.registry import Plugin, Registry, _installed
from breccia.kernels import reference
from breccia.operations import OPERATIONS
from breccia.options import FLOAT32, CastOptions, ProductOptions, product_options
from breccia.tensors.tensor import FIELDS
from breccia.testing.examples import special_rows, wide
from breccia.testing.places import Place

#: Warnings from torch's own modules on import.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

MXFP8, NVFP4 = breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling()
GROUPED = breccia.INT4Scaling(group_size=16, signed=False, symmetric=False)
#: Frameworks with eager calls, so with values to compare.
EAGER = ("numpy", "torch", "mlx")

X = np.concatenate([wide((9, 70), seed=1, exponents=3), special_rows(70)])
X[4, 5] = -0.0


@pytest.fixture(params=EAGER)
def place(request: pytest.FixtureRequest) -> Place:
    return here(request.param)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset torch.compile after each test, so that compiled code is not reused by the next one."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


_numbers = count()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register a plug-in "audit" with one kernel per op for every framework, under BRECCIA_CHECK=`check`."""

    def build(kernels: dict[str, Any], check: str | None = "1", **fields: Any) -> None:
        name = f"audit_npu_{next(_numbers)}"  # an object reference is loaded once per name
        npu, manifest = ModuleType(name), ModuleType("audit_manifest")
        vars(npu).update(kernels)
        monkeypatch.setitem(sys.modules, name, npu)
        declared = [breccia.Kernel(op, "*", f"{name}:{op}", f"audit.{op}", rank=1, traces=True, **fields) for op in kernels]
        vars(manifest).update(api=1, breccia_kernels=breccia.hookimpl(lambda: declared, specname="breccia_kernels"))
        environ = {key: value for key, value in os.environ.items() if key != "BRECCIA_CHECK"}
        environ |= {} if check is None else {"BRECCIA_CHECK": check}
        plugin = Plugin("audit", "audit", "1.0", "audit_manifest")
        monkeypatch.setattr(frameworks, "current", Registry([*_installed(), (plugin, lambda: manifest)], environ, pytest.fail))

    return build


# -- faults ----------------------------------------------------------------------------------------------------------


def changed(array: Any, change: Callable[[np.ndarray], Any]) -> Any:
    """A copy of the array that `change` has edited in place as a NumPy array."""
    ops = frameworks.ops_of(array)
    host = np.array(ops.to_numpy(array), order="C")
    change(host)
    name = frameworks.dtype_name(array)
    return ops.from_numpy(host, name if name != host.dtype.name else None)


def with_changed(st: breccia.ScaledTensor, name: str, change: Callable[[np.ndarray], Any]) -> breccia.ScaledTensor:
    """The tensor with one component edited by `change`."""
    fields = {field: getattr(st, field) for field in FIELDS}
    return breccia.ScaledTensor.from_parts(**fields | {name: changed(getattr(st, name), change)})


def one_bit(place: int = 0) -> Callable[[np.ndarray], Any]:
    """Change the lowest bit of one byte."""

    def change(host: np.ndarray) -> None:
        host.reshape(-1).view("u1")[place] ^= 1

    return change


def add_one(host: np.ndarray) -> None:
    """Add 1 to each bit pattern: each scale becomes the next larger one."""
    host.reshape(-1).view(f"u{host.itemsize}")[...] += 1


def without_nan(x: Any) -> Any:
    """Zeros where the array has NaN."""
    return changed(x, lambda host: np.nan_to_num(host, copy=False, nan=0.0, posinf=np.inf, neginf=-np.inf))


def native_cast(x: Any) -> Any:
    """The array in FP16."""
    ops = frameworks.ops_of(x)
    with np.errstate(over="ignore"):
        return ops.to_float(ops.f32(x), "float16")


def in_fp16(a: Any, b: Any) -> np.ndarray:
    """A product that accumulates in FP16."""
    left, right = (np.asarray(frameworks.ops_of(values(x)).to_numpy(values(x)), np.float16) for x in (a, b))
    total = np.zeros((left.shape[0], right.shape[1]), np.float16)
    for k in range(left.shape[1]):
        total = (total + (left[:, k : k + 1] * right[k]).astype(np.float16)).astype(np.float16)
    return total.astype(np.float32)


def values(x: Any) -> Any:
    return reference.dequantize(x) if isinstance(x, breccia.ScaledTensor) else x


def like(x: Any, host: np.ndarray) -> Any:
    """Convert a NumPy array to the framework of `x`."""
    return frameworks.ops_of(x.data if isinstance(x, breccia.ScaledTensor) else x).from_numpy(host)


def faulty_cast(fault: Callable[[breccia.ScaledTensor], Any]) -> Callable[..., Any]:
    return lambda x, recipe, options: fault(reference.cast(x, recipe, options))


def faulty_values(fault: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda st, options=FLOAT32: fault(reference.dequantize(st, options))


def faulty_matmul(fault: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda a, b, options=FLOAT32: fault(reference.matmul(a, b, options._replace(out=None)))


def double_row(y: Any) -> Any:
    def change(host: np.ndarray) -> None:
        host[1] *= 2

    return changed(y, change)


def negated_zero(y: Any) -> Any:
    """Flip the sign of one zero: one bit differs."""

    def change(host: np.ndarray) -> None:
        host.view(np.uint32)[host.view(np.uint32) << 1 == 0] ^= np.uint32(1 << 31)

    return changed(y, change)


CAST: dict[str, tuple[breccia.ScalingRecipe, Callable[..., Any], str]] = {
    "one bit of the codes": (MXFP8, faulty_cast(lambda st: with_changed(st, "data", one_bit(77))), "1 of 2240 bytes of data"),
    "one bit of packed codes": (NVFP4, faulty_cast(lambda st: with_changed(st, "data", one_bit(9))), "1 of 1120 bytes of data"),
    "one bit of a scale": (MXFP8, faulty_cast(lambda st: with_changed(st, "scale", one_bit())), "1 of 96 bytes of scale"),
    "one bit of the tensor's scale": (NVFP4, faulty_cast(lambda st: with_changed(st, "global_scale", one_bit())),
        "1 of 4 bytes of global_scale"),
    "one bit of a zero-point": (GROUPED, faulty_cast(lambda st: with_changed(st, "zero_point", one_bit(3))),
        "1 of 160 bytes of zero_point"),
    "scales that are off": (MXFP8, faulty_cast(lambda st: with_changed(st, "scale", add_one)), "96 of 96 bytes of scale"),
    "NaN is dropped": (MXFP8, lambda x, recipe, options: reference.cast(without_nan(x), recipe, options),
        "bytes of data; 1 of 96 bytes of scale"),
    "FP16 in between": (MXFP8, lambda x, recipe, options: reference.cast(native_cast(x), recipe, options), "bytes of data"),
    "blocks of twice the length": (
        breccia.Float8BlockScaling(block_k=16),
        lambda x, recipe, options: breccia.ScaledTensor.from_parts(
            **{field: getattr(reference.cast(x, breccia.Float8BlockScaling(block_k=32), options), field) for field in FIELDS}
            | {"recipe": recipe}
        ),
        "layout is PerBlockK(block_size=32, partial=True), not PerBlockK(block_size=16, partial=True)",
    ),
}  # fmt: skip

VALUES: dict[str, tuple[breccia.ScalingRecipe, Callable[..., Any], str]] = {
    "one bit": (MXFP8, faulty_values(lambda y: changed(y, one_bit())), "1 of 2240 values"),
    "NaN is dropped": (MXFP8, faulty_values(without_nan), " of 2240 values"),
    "a scale that is off": (MXFP8, faulty_values(double_row), " of 2240 values"),
    "zeros of the other sign": (MXFP8, faulty_values(negated_zero), " of 2240 values"),
    "the tensor's scale is left out": (
        NVFP4,
        lambda st, options=FLOAT32: reference.dequantize(
            with_changed(st, "global_scale", lambda host: host.reshape(-1).__setitem__(0, 1.0)), options
        ),
        " of 2240 values",
    ),
}

AGAIN: dict[str, tuple[Callable[..., Any], str]] = {
    "one bit of the codes": (
        lambda st, recipe, options: with_changed(reference.requantize(st, recipe, options), "data", one_bit(5)),
        "1 of 1120 bytes of data",
    ),
    "one bit of a scale": (
        lambda st, recipe, options: with_changed(reference.requantize(st, recipe, options), "scale", one_bit(5)),
        "1 of 160 bytes of scale",
    ),
    "NaN is dropped": (
        lambda st, recipe, options: reference.cast(without_nan(reference.dequantize(st)), recipe, options),
        "bytes of scale",
    ),
}

PAIR: dict[str, tuple[Callable[..., Any], str]] = {
    "one bit of the first": (
        lambda x, recipe, options: (
            with_changed(reference.cast(x, recipe), "data", one_bit()),
            reference.cast(x, recipe, options.replace(axis=-2)),
        ),
        "result 1 along axis -1: 1 of 2240 bytes of data",
    ),
    "one bit of the second": (
        lambda x, recipe, options: (
            reference.cast(x, recipe),
            with_changed(reference.cast(x, recipe, options.replace(axis=-2)), "scale", one_bit()),
        ),
        "result 2 along axis -2: 1 of 70 bytes of scale",
    ),
    "one of them twice": (lambda x, recipe, options: (reference.cast(x, recipe),) * 2, "along the other axis, layout is "),
}

TRIPS: dict[str, tuple[Callable[..., Any], str]] = {
    "one bit": (lambda x, recipe, *rest: changed(reference.cast_ste(x, recipe, rest[-1]), one_bit(8)), "1 of 2240 values"),
    "NaN is dropped": (lambda x, recipe, *rest: without_nan(reference.cast_ste(x, recipe, rest[-1])), " of 2240 values"),
    "nothing is cast": (lambda x, recipe, *rest: x, " of 2240 values"),
}


def assert_found(op: str, call: Callable[[], Any], differences: str, kernel: str = "") -> None:
    """The call must raise KernelError with the op, the kernel, its plug-in, what differs and how to block the plug-in."""
    with pytest.raises(breccia.KernelError) as e:
        call()
    said, kernel = str(e.value), kernel or op
    assert said.startswith(f"BRECCIA_CHECK: {op} differs from the generic algorithm: "), said
    assert differences in said, said
    assert f"It came from kernel 'audit.{kernel}' of plug-in 'audit' (" in said, said
    assert said.endswith("; BRECCIA_BLOCK=audit sets that plug-in aside."), said
    assert e.value.found == {"kernel": f"audit.{kernel}", "plugin": "audit"}


@pytest.mark.parametrize("fault", CAST)
def test_a_cast_that_writes_other_bytes_is_found(place: Place, plant: Any, fault: str) -> None:
    recipe, faulty, differences = CAST[fault]
    plant({"cast": faulty}, recipe=type(recipe))
    x = place.array(X)
    assert_found("cast", lambda: breccia.cast(x, recipe), differences)


@pytest.mark.parametrize("options", [{"axis": -2}, {"rounding": "stochastic", "seed": 5}, {"nonfinite": "raise"}], ids=str)
def test_the_comparison_uses_the_options_of_the_call(place: Place, plant: Any, options: dict[str, Any]) -> None:
    x = place.array(wide((9, 70), seed=11))
    plant({"cast": reference.cast})
    assert breccia.bytes_equal(breccia.cast(x, MXFP8, **options), reference.cast(x, MXFP8, CastOptions(**options)))
    plant({"cast": faulty_cast(lambda st: with_changed(st, "data", one_bit()))})
    assert_found("cast", lambda: breccia.cast(x, MXFP8, **options), "1 of 630 bytes of data")
    plant({"cast": lambda x, recipe, options: reference.cast(x, recipe)})
    if "axis" in options:  # dispatch itself refuses this
        with pytest.raises(breccia.KernelError, match="^cast was to write blocks along axis -2; the result has axis -1"):
            breccia.cast(x, MXFP8, **options)
    elif "nonfinite" not in options:
        assert_found("cast", lambda: breccia.cast(x, MXFP8, **options), "")


@pytest.mark.parametrize("fault", VALUES)
def test_values_that_differ_are_found(place: Place, plant: Any, fault: str) -> None:
    recipe, faulty, differences = VALUES[fault]
    plant({"dequantize": faulty}, recipe=type(recipe))
    st = breccia.cast(place.array(X), recipe)
    assert_found("dequantize", lambda: breccia.dequantize(st), differences)


@pytest.mark.parametrize("fault", AGAIN)
def test_a_requantize_that_writes_other_bytes_is_found(place: Place, plant: Any, fault: str) -> None:
    faulty, differences = AGAIN[fault]
    plant({"requantize": faulty}, recipe=breccia.MXFP8BlockScaling, other=breccia.NVFP4BlockScaling)
    st = breccia.cast(place.array(X), MXFP8)
    assert_found("requantize", lambda: breccia.requantize(st, NVFP4), differences)


@pytest.mark.parametrize("fault", PAIR)
def test_a_pair_with_one_wrong_tensor_is_found(place: Place, plant: Any, fault: str) -> None:
    faulty, differences = PAIR[fault]
    plant({"cast_pair": faulty}, recipe=breccia.MXFP8BlockScaling)
    x = place.array(X)
    if fault == "one of them twice":  # dispatch itself refuses this
        with pytest.raises(breccia.KernelError, match="^cast_pair was to write blocks along axis -2; the result has axis -1"):
            breccia.cast_pair(x, MXFP8)
        return
    assert_found("cast_pair", lambda: breccia.cast_pair(x, MXFP8), differences)


@pytest.mark.parametrize("op", ["cast_ste", "cast_ste_clipped"])
@pytest.mark.parametrize("fault", TRIPS)
def test_round_trips_that_differ_are_found(place: Place, plant: Any, op: str, fault: str) -> None:
    faulty, differences = TRIPS[fault]
    plant({op: faulty}, recipe=breccia.MXFP8BlockScaling)
    x = place.array(X)
    assert_found("cast_ste", lambda: getattr(breccia, op)(x, MXFP8), differences, kernel=op)


# -- products --------------------------------------------------------------------------------------------------------

#: Long sums of one large term and many small ones, which narrow accumulators lose.
LENGTH = 2048


def factors() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, w = np.ones((5, LENGTH), np.float32), np.ones((3, LENGTH), np.float32)
    a[:, 0] = 2048.0
    return a, w, np.array([1000.0, -3.0, 0.5], np.float32)


def with_nan(y: Any) -> bool:
    return bool(np.isnan(frameworks.ops_of(y).to_numpy(y)).any())


PRODUCTS: dict[str, Callable[..., Any]] = {
    "FP16 accumulates": lambda a, b, options=FLOAT32: like(a, in_fp16(a, b)),
    "a row is off": faulty_matmul(double_row),
    "a number is off by 2^-10 of itself": faulty_matmul(
        lambda y: changed(y, lambda host: host.reshape(-1).__setitem__(4, host.reshape(-1)[4] * (1 + 2.0**-10)))
    ),
    "the bias is left out": lambda a, b, options=FLOAT32: reference.matmul(a, b),
    "a number is NaN": faulty_matmul(lambda y: changed(y, lambda host: host.reshape(-1).__setitem__(4, np.nan))),
    "a number is infinite": faulty_matmul(lambda y: changed(y, lambda host: host.reshape(-1).__setitem__(4, np.inf))),
}
BEYOND = "are beyond the bound of FP32 accumulation"


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("fault", PRODUCTS)
def test_a_product_outside_its_error_bound_is_found(place: Place, plant: Any, fault: str) -> None:
    plant({"matmul": PRODUCTS[fault]}, other=breccia.MXFP8BlockScaling)
    a, w, bias = (place.array(x) for x in factors())
    weight = breccia.cast(w, MXFP8)
    assert_found("matmul", lambda: breccia.matmul(a, weight.mT, bias=bias), BEYOND)
    if fault != "the bias is left out":
        assert_found(
            "matmul", lambda: breccia.matmul(breccia.cast(a, MXFP8), weight.mT), f"of 15 numbers of the product {BEYOND}"
        )


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("fault", [fault for fault in PRODUCTS if fault != "the bias is left out"])
def test_a_cast_matmul_outside_its_error_bound_is_found(place: Place, plant: Any, fault: str) -> None:

    def faulty(x: Any, recipe: breccia.ScalingRecipe, b: Any, options: ProductOptions = FLOAT32) -> Any:
        return PRODUCTS[fault](reference.cast(x, recipe), b, options)

    plant({"cast_matmul": faulty}, recipe=breccia.MXFP8BlockScaling)
    a, w, _ = (place.array(x) for x in factors())
    weight = breccia.cast(w, MXFP8)
    assert_found("cast_matmul", lambda: breccia.cast_matmul(a, MXFP8, weight.mT), BEYOND)


def test_a_cast_matmul_that_skips_the_cast_is_found(place: Place, plant: Any) -> None:
    plant({"cast_matmul": lambda x, recipe, b, options: reference.matmul(x, b, options)})
    x, w = place.array(wide((5, 64), seed=2, exponents=1)), place.array(wide((3, 64), seed=3, exponents=1))
    weight = breccia.cast(w, MXFP8)
    assert_found("cast_matmul", lambda: breccia.cast_matmul(x, MXFP8, weight.mT), BEYOND)


def first_matrix(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """Multiply every group by the first matrix."""
    return reference.grouped_matmul(a, b, changed(offsets, lambda host: host.__setitem__(slice(None), host[-1])))


def to_the_end(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """Treat rows outside all groups as rows of the last group."""
    return reference.grouped_matmul(a, b, changed(offsets, lambda host: host.__setitem__(-1, a.shape[0])))


def grouped_in_fp16(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    found, start = np.zeros((a.shape[0], b.shape[-1]), np.float32), 0
    for e, end in enumerate(np.asarray(frameworks.ops_of(offsets).to_numpy(offsets)).tolist()):
        found[start:end] = in_fp16(values(a)[start:end], values(b)[e])
        start = end
    return like(a, found)


GROUPS: dict[str, Callable[..., Any]] = {
    "FP16 accumulates": grouped_in_fp16,
    "all groups are the first one's": first_matrix,
    "rows of no group have products": to_the_end,
    "a row is off": lambda a, b, offsets, options=FLOAT32: double_row(reference.grouped_matmul(a, b, offsets)),
}


@pytest.mark.parametrize("fault", GROUPS)
def test_a_grouped_matmul_outside_its_error_bound_is_found(place: Place, plant: Any, fault: str) -> None:
    plant({"grouped_matmul": GROUPS[fault]})
    a, w, _ = factors()
    experts = breccia.cast(place.array(np.stack([w, 3 * w])), MXFP8)
    offsets = place.array(np.array([1, 4], np.int32))
    assert_found("grouped_matmul", lambda: breccia.grouped_matmul(place.array(a), experts.mT, offsets), BEYOND)


@pytest.mark.parametrize("op", ["matmul", "cast_matmul", "grouped_matmul"])
def test_a_product_that_drops_a_nan_is_found(place: Place, plant: Any, op: str) -> None:
    """The NaN is a scale of a tensor or an element of an array; it must make its results NaN, and here they are finite."""
    kernels = {
        "matmul": lambda a, b, options=FLOAT32: reference.matmul(a, without_nan(values(b)), options),
        "cast_matmul": lambda x, recipe, b, options: reference.matmul(
            without_nan(reference.dequantize(reference.cast(x, recipe))), b, options
        ),
        "grouped_matmul": lambda a, b, offsets, options=FLOAT32: reference.grouped_matmul(without_nan(values(a)), b, offsets),
    }
    plant({op: kernels[op]})
    x, w = wide((5, 64), seed=4, exponents=1), wide((3, 64), seed=5, exponents=1)
    (w if op == "matmul" else x)[1, 40] = np.nan
    weight = breccia.cast(place.array(w), MXFP8)
    calls: dict[str, Callable[[], Any]] = {
        "matmul": lambda: breccia.matmul(place.array(x), weight.mT),
        "cast_matmul": lambda: breccia.cast_matmul(place.array(x), MXFP8, weight.mT),
        "grouped_matmul": lambda: breccia.grouped_matmul(
            breccia.cast(place.array(x), MXFP8), breccia.stack([weight]).mT, place.array(np.array([5], np.int32))
        ),
    }
    assert_found(op, calls[op], "")


@pytest.mark.parametrize("total", [2.0**127, np.inf])
@pytest.mark.parametrize("minus", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("op", ["matmul", "grouped_matmul"])
def test_sums_that_overflow_in_one_order_only_pass(place: Place, plant: Any, op: str, minus: int, total: float) -> None:
    """2^127 + 2^127 - 2^127 is finite or infinite in FP32, depending on which two are added first; orders differ by library."""
    terms = np.zeros((1, 128), np.float32)
    terms[0, [0, minus, 127]] = [2.0**127, -(2.0**127), 2.0**127]
    plant({op: lambda a, b, *rest, **options: like(a, np.full((1, 1), total, np.float32))}, other=breccia.MXFP8BlockScaling)
    ones = breccia.cast(place.array(np.ones((1, 128), np.float32)), MXFP8)
    if op == "matmul":
        found = breccia.matmul(place.array(terms), ones.mT)
    else:
        rows = breccia.cast(place.array(terms), MXFP8)
        found = breccia.grouped_matmul(rows, breccia.stack([ones]).mT, place.array(np.array([1], np.int32)))
    assert np.asarray(frameworks.ops_of(found).to_numpy(found)).item() == total


def test_an_infinite_half_is_found_unless_the_sum_may_round_to_it(place: Place, plant: Any) -> None:
    infinite = lambda a, b, options=FLOAT32: like(a, np.full((1, 1), np.inf, np.float16))  # noqa: E731
    plant({"matmul": infinite}, other=breccia.MXFP8BlockScaling)
    ones = breccia.cast(place.array(np.ones((1, 32), np.float32)), MXFP8)
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 65535.0
    found = breccia.matmul(place.array(x), ones.mT, "float16")
    assert np.isinf(frameworks.ops_of(found).to_numpy(found)).all()
    x[0, 0] = 65000.0
    assert_found(
        "matmul", lambda: breccia.matmul(place.array(x), ones.mT, "float16"), f"1 of 1 numbers of the product {BEYOND}"
    )


# -- results of the wrong type or shape ------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a cast gives an array": ("cast", lambda x, recipe, options: x, "cast returns a ScaledTensor, not "),
    "a pair is one tensor": ("cast_pair", lambda x, recipe, options: reference.cast(x, recipe), ""),
    "a requantize gives an array": ("requantize", lambda st, recipe, options: st.data,
        "requantize returns a ScaledTensor"),
    "values are a tensor": ("dequantize", lambda st, options=FLOAT32: st,
        "dequantize returns an array, not ScaledTensor"),
    "values of fewer rows": ("dequantize", faulty_values(lambda y: y[:-1]), "dequantize gives shape (32, 70); got (31, 70)."),
    "values of one row": ("dequantize", faulty_values(lambda y: y[:1]), "dequantize gives shape (32, 70); got (1, 70)."),
    "a product of fewer rows": ("matmul", faulty_matmul(lambda y: y[:-1]), "matmul gives shape (32, 32); got (31, 32)."),
    "a product of one row": ("matmul", faulty_matmul(lambda y: y[:1]), "matmul gives shape (32, 32); got (1, 32)."),
    "a trip of fewer rows": ("cast_ste", lambda x, recipe, options: x[:-1], "cast_ste gives shape (32, 70); got (31, 70)."),
}  # fmt: skip


@pytest.mark.parametrize("check", ["1", "0"], ids=["checked", "unchecked"])
@pytest.mark.parametrize("fault", WRONG)
def test_a_result_of_the_wrong_type_or_shape_is_always_refused(place: Place, plant: Any, fault: str, check: str) -> None:
    op, faulty, message = WRONG[fault]
    plant({op: faulty}, check)
    x = place.array(X)
    operands = {"dequantize": (), "requantize": (NVFP4,)}.get(op, (MXFP8,))
    if op == "matmul":
        call: Callable[[], Any] = lambda: breccia.matmul(x, breccia.cast(x, MXFP8).mT)  # noqa: E731
    else:
        first = breccia.Float8CurrentScaling() if op == "cast" else MXFP8
        st = reference.cast(x, first)
        call = lambda: getattr(breccia, op)(st if op in ("dequantize", "requantize") else x, *operands)  # noqa: E731
    with pytest.raises(breccia.KernelError) as e:
        call()
    assert f"kernel 'audit.{op}' of plug-in 'audit'" in str(e.value)
    assert message in str(e.value)


# -- correct kernels -------------------------------------------------------------------------------------------------

SOUND = {
    op: getattr(reference, op)
    for op in (
        "cast", "cast_pair", "dequantize", "requantize", "matmul", "cast_matmul", "grouped_matmul", "cast_ste",
    )
}  # fmt: skip


def every_op(place: Place, recipe: breccia.ScalingRecipe, x: np.ndarray) -> Iterator[Any]:
    """Results of every op, with the usual options."""
    array = place.array(x)
    st = breccia.cast(array, recipe)
    yield from (st, breccia.cast(array, recipe, axis=-2), breccia.cast(array, recipe, rounding="stochastic", seed=3))
    scale = st.scale if st.global_scale is None else st.global_scale
    if recipe.format.offset == "none":
        yield breccia.cast(array, recipe, scale=scale)
    yield from breccia.cast_pair(array, recipe)
    yield from (breccia.dequantize(st), breccia.dequantize(st.mT), breccia.dequantize(st, out_dtype="float16"))
    yield from (breccia.requantize(st, MXFP8), breccia.requantize(st, NVFP4), breccia.requantize(st, recipe))
    square = place.array(np.ascontiguousarray(x.T))
    bias = place.array(np.linspace(-3, 3, len(x), dtype=np.float32))
    yield from (breccia.matmul(array, st.mT), breccia.matmul(st, square, "float16", bias=bias), breccia.matmul(st, st.mT))
    yield breccia.cast_matmul(array, recipe, st.mT, bias=bias)
    cube = breccia.cast(place.array(np.stack([x, x])), recipe)
    rows = st if recipe.layout.block(-1)[0] in (1, None) else array
    yield breccia.grouped_matmul(rows, cube.mT, place.array(np.array([3, 9], np.int32)))
    yield from (breccia.cast_ste(array, recipe), breccia.cast_ste_clipped(array, recipe, clip="scale"))
    if place.framework != "mlx":
        yield breccia.cast(place.array(x * np.float32(0.5)), recipe, out=breccia.cast(array, recipe))
        yield breccia.dequantize(st, out=place.array(np.zeros(x.shape, np.float32)))
    empty = breccia.cast(place.array(x[:0]), recipe)
    yield from (breccia.dequantize(empty), breccia.matmul(empty, square))


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, breccia.ScaledTensor):
        return breccia.bytes_equal(a, b)
    ops = frameworks.ops_of(a)
    return np.asarray(ops.to_numpy(a)).tobytes() == np.asarray(ops.to_numpy(b)).tobytes()


#: One recipe for each kind of component and scale.
KINDS = [
    MXFP8,
    NVFP4,
    breccia.NVFP4BlockScaling(global_sense="amax"),
    breccia.Float8BlockScaling(block_m=4, block_k=8),
    GROUPED,
    breccia.Float8CurrentScaling(),
    breccia.MXFP6BlockScaling(),
    breccia.NF4Scaling(),
]


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("kernels", ["breccia's own", "a plug-in's"])
@pytest.mark.parametrize("recipe", KINDS, ids=recipe_id)
def test_correct_kernels_pass_and_give_the_same_results_as_without_the_check(
    place: Place, plant: Any, recipe: breccia.ScalingRecipe, kernels: str
) -> None:
    given = SOUND if kernels == "a plug-in's" else {}
    plant(given, None)
    unchecked = list(every_op(place, recipe, X))
    plant(given, "1")
    checked = list(every_op(place, recipe, X))
    assert len(checked) == len(unchecked) and all(map(alike, checked, unchecked))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_breccias_own_kernels_pass_for_every_recipe(place: Place, plant: Any, recipe: breccia.ScalingRecipe) -> None:
    plant({})
    assert all(found is not None for found in every_op(place, recipe, X))


def test_batched_and_empty_products_pass(place: Place, plant: Any) -> None:
    plant(SOUND)
    cube, w = wide((2, 3, 4, 32), seed=6, exponents=2), wide((3, 6, 32), seed=7, exponents=2)
    weight = breccia.cast(place.array(w), MXFP8)
    assert tuple(breccia.matmul(place.array(cube), weight.mT).shape) == (2, 3, 4, 6)
    assert tuple(breccia.matmul(breccia.cast(place.array(cube), MXFP8), weight.mT).shape) == (2, 3, 4, 6)
    none = place.array(np.zeros((4, 0), np.float32))
    assert not np.asarray(frameworks.ops_of(none).to_numpy(breccia.matmul(none, none.T))).any()


def test_blocking_the_plug_in_disables_the_faulty_kernel(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_BLOCK", "audit")
    plant({"cast": CAST["one bit of the codes"][1]}, recipe=breccia.MXFP8BlockScaling)
    assert breccia.bytes_equal(breccia.cast(X, MXFP8), reference.cast(X, MXFP8))


@pytest.mark.parametrize("storage", ["transposed", "interleaved"])
def test_a_tensor_in_another_storage_is_compared_as_the_plain_tensor(plant: Any, storage: str) -> None:
    def stored(fault: Callable[[breccia.ScaledTensor], breccia.ScaledTensor]) -> Callable[..., Any]:
        return lambda x, recipe, options: fault(reference.cast(x, recipe, options)).to_storage(options.storage)

    plant({"cast": stored(lambda st: st)}, writes=(storage,))
    assert breccia.bytes_equal(breccia.cast(X, MXFP8, storage=storage), reference.cast(X, MXFP8))
    plant({"cast": stored(lambda st: with_changed(st, "scale", one_bit()))}, writes=(storage,))
    assert_found("cast", lambda: breccia.cast(X, MXFP8, storage=storage), "1 of 96 bytes of scale")
    plant({"dequantize": VALUES["one bit"][1]}, reads=(storage,))
    st = reference.cast(X, MXFP8).to_storage(storage)
    assert_found("dequantize", lambda: breccia.dequantize(st), "1 of 2240 values")


# -- calls without a comparison --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [None, "", "0"], ids=["unset", "empty", "0"])
def test_without_the_variable_nothing_is_compared(place: Place, plant: Any, check: str | None) -> None:
    faulty = {
        "cast": CAST["one bit of the codes"][1],
        "dequantize": VALUES["one bit"][1],
        "matmul": PRODUCTS["a row is off"],
        "cast_ste": TRIPS["one bit"][0],
    }
    plant(faulty, check, recipe=None)
    x = place.array(X)
    st = breccia.cast(x, MXFP8)
    assert not breccia.bytes_equal(st, reference.cast(x, MXFP8)), "the fault is there, and nobody says so"
    assert not alike(breccia.dequantize(st), reference.dequantize(st))
    a, w, _ = (place.array(each) for each in factors())
    assert not alike(breccia.matmul(a, w.T), reference.matmul(a, w.T))
    assert not alike(breccia.cast_ste(x, MXFP8), reference.cast_ste(x, MXFP8))


def test_the_environment_is_read_when_the_registry_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """`breccia.dispatch.registry.reload` builds it anew."""
    from breccia.dispatch import registry

    before = frameworks.current
    audited = []
    try:
        for value in ("1", None):
            monkeypatch.delenv("BRECCIA_CHECK", raising=False)
            if value is not None:
                monkeypatch.setenv("BRECCIA_CHECK", value)
            table = registry.reload().table
            audited.append(table.choose(OPERATIONS["cast"], "numpy", X, None, MXFP8, CastOptions()).audited)
    finally:
        frameworks.current = before
    assert audited == [True, False]


@pytest.mark.parametrize("op", ["cast", "matmul"])
def test_calls_that_jax_traces_are_not_compared(plant: Any, op: str) -> None:
    place = here("jax")
    import jax

    plant({"cast": faulty_trace, "matmul": doubled_trace})
    x, w = place.array(wide((4, 32), seed=8)), place.array(wide((3, 32), seed=9))
    if op == "cast":
        for found in (breccia.cast(x, MXFP8), jax.jit(lambda x: breccia.cast(x, MXFP8))(x)):
            assert not breccia.bytes_equal(found, reference.cast(np.asarray(x), MXFP8))
    else:
        for found in (breccia.matmul(x, w.T), jax.jit(breccia.matmul)(x, w.T), jax.vmap(breccia.matmul)(x[None], w.T[None])[0]):
            assert not np.allclose(np.asarray(found), np.asarray(x @ w.T), rtol=0.5), "twice the product"


def faulty_trace(x: Any, recipe: breccia.ScalingRecipe, options: CastOptions) -> breccia.ScaledTensor:
    """Cast twice the numbers, in operations that JAX can trace."""
    return reference.cast(x + x, recipe, options)


def doubled_trace(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, bias, _ = options
    found = reference.matmul(a, b, product_options(out_dtype, bias=bias))
    return found + found


@pytest.mark.long
def test_calls_that_mlx_compiles_or_maps_are_not_compared(plant: Any) -> None:
    place = here("mlx")
    import mlx.core as mx

    plant({"cast": faulty_trace, "matmul": doubled_trace})
    x, w = place.array(wide((4, 32), seed=8)), place.array(wide((3, 32), seed=9))
    with pytest.raises(breccia.KernelError):
        breccia.matmul(x, w.T)
    assert np.array_equal(np.array(mx.compile(breccia.matmul)(x, w.T)), np.array(doubled_trace(x, w.T)))
    scale = mx.compile(lambda x: breccia.cast(x, MXFP8).scale)(x)
    assert np.array_equal(np.array(scale), np.array(reference.cast(x + x, MXFP8).scale))


@pytest.mark.long
def test_calls_on_fake_and_meta_tensors_are_not_compared(plant: Any) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    plant({"cast": faulty_trace, "matmul": doubled_trace, "dequantize": reference.dequantize})
    with FakeTensorMode():
        x = torch.ones(4, 32)
        st = breccia.cast(x, MXFP8)
        assert breccia.matmul(x, st.mT).shape == (4, 4) and breccia.dequantize(st).shape == (4, 32)
    x = torch.ones(4, 32, device="meta")
    st = breccia.cast(x, MXFP8)
    assert breccia.matmul(x, st.mT).shape == (4, 4) and breccia.dequantize(st).is_meta
    each = torch.func.vmap(lambda x: breccia.matmul(x, x.mT))(torch.ones(2, 4, 32))
    assert torch.equal(each, torch.full((2, 4, 4), 64.0)), "twice the product"


@pytest.mark.long
def test_kernels_in_torch_graphs_are_compared(plant: Any) -> None:
    """Custom operators in a compiled graph run with values."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("breccia_torch")
    x = torch.from_numpy(wide((4, 32), seed=10))
    plant(SOUND)
    fast = torch.compile(lambda x: breccia.dequantize(breccia.cast(x, MXFP8)), fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x), reference.dequantize(reference.cast(x, MXFP8)))
    plant({"cast": faulty_trace})
    with pytest.raises(breccia.KernelError, match=re.escape("It came from kernel 'audit.cast' of plug-in 'audit'")):
        fast(x)


def test_products_in_backward_passes_are_compared(plant: Any) -> None:
    torch = pytest.importorskip("torch")
    a, w, _ = (torch.from_numpy(x) for x in factors())
    weight = breccia.cast(w, MXFP8)
    plant(
        {"matmul": lambda a, b, *rest: PRODUCTS["a row is off"](a, b, *rest) if b.axis == -1 else reference.matmul(a, b, *rest)}
    )
    leaf = a.clone().requires_grad_()
    y = breccia.matmul(leaf, weight.mT)
    with pytest.raises(breccia.KernelError, match="^BRECCIA_CHECK: matmul differs from the generic algorithm: "):
        y.sum().backward()
