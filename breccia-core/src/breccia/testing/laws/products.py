"""Laws of products: every order of scaled and plain operands stays within the error bound of FP32 accumulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ... import api
from ...arrays.frameworks import device_of, dtype_name
from ...dispatch.kernel import Kernel
from ...formats import TENSOR
from ...kernels import bounds, reference
from ...options import CastOptions
from ...recipes import MXFP8BlockScaling, ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect
from ..places import Place
from .law import Law, each
from .recipes import moved
from .trying import (
    expect_array_unchanged,
    expect_tensor_unchanged,
    float_dtypes,
    floats,
    knows,
    matches,
    numbers,
    rounded,
    run_alone,
    skip_unless_run,
    storages_of,
    takes_out,
)

#: M, N and K of the tested products.
_ROWS, _COLUMNS, _LENGTH = 9, 7, 512
#: Ends of the groups of `grouped_matmul`: one group is empty, and two rows belong to none.
_ENDS = (2, 2, 7)


def laws(kernel: Kernel, recipes: Iterable[ScalingRecipe], place: Place) -> Iterator[Law]:
    """The laws of a kernel of `matmul`, `cast_matmul` or `grouped_matmul`, for each order of operands it is declared for."""
    both = (
        grouped_products_stay_within_the_error_bound if kernel.op == "grouped_matmul" else products_stay_within_the_error_bound
    )
    casts = kernel.op == "cast_matmul"
    for recipe in recipes:
        what = f"{kernel.name}.{recipe.spec}"
        first = matches(kernel.recipe, recipe)
        if first and _partner(kernel, recipe) is not None:
            yield from each("kernels", what, [both], kernel, recipe, place=place)
        if first and matches(kernel.other, None):
            yield from each("kernels", what, [tensor_times_array_stays_within_the_error_bound], kernel, recipe, place=place)
        if not casts and matches(kernel.recipe, None) and matches(kernel.other, recipe):
            yield from each("kernels", what, [array_times_tensor_stays_within_the_error_bound], kernel, recipe, place=place)
    if not casts and matches(kernel.recipe, None) and matches(kernel.other, None):
        yield from each("kernels", kernel.name, [array_times_array_stays_within_the_error_bound], kernel, place=place)


def products_stay_within_the_error_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """|error| <= n u / (1 - n u) (sum |a||b| + |bias|) + K 2^-126, u = 2^-24: any FP32 order of summation (Higham, 3.1).

    n is K, or K + 1 with a bias. The bound adds half a unit in the last place of `out_dtype`, for the final rounding, and
    K 2^-126, because products below 2^-126 may become zero. Two FP8 tensors on CUDA have the bound of tensor cores that are
    promoted every 128 along K (`breccia.kernels.bounds`). In each sum one term is large and many are small. The second
    operand has the same recipe if the kernel accepts it, otherwise another. `cast_matmul` casts the first operand itself.
    """
    _check_bound(kernel, place, recipe, _partner(kernel, recipe))


def grouped_products_stay_within_the_error_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """The bound of `matmul` in each group. One group is empty; rows that belong to no group are zeros."""
    _check_bound(kernel, place, recipe, _partner(kernel, recipe))


def array_times_tensor_stays_within_the_error_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """A plain first operand (FP32, FP16 or BF16) times a scaled one, with the same bound."""
    _check_bound(kernel, place, None, recipe)


def tensor_times_array_stays_within_the_error_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """A scaled first operand times a plain one, with the same bound."""
    _check_bound(kernel, place, recipe, None)


def array_times_array_stays_within_the_error_bound(kernel: Kernel, place: Place) -> None:
    """Two plain operands, with the same bound."""
    _check_bound(kernel, place, None, None)


def stored_operands_stay_within_the_error_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> bool:
    """Check the bound with the first operand, then the second, in each storage that the kernel reads.

    Plain operands have every dtype. Returns whether the kernel ran at all.
    """
    tried = False
    pairs: list[tuple[ScalingRecipe | None, ScalingRecipe | None]] = []
    if matches(kernel.recipe, recipe):
        pairs.append((recipe, None if matches(kernel.other, None) else _partner(kernel, recipe)))
    if matches(kernel.other, recipe):
        pairs.append((None if matches(kernel.recipe, None) else recipe, recipe))
    grouped, casts = kernel.op == "grouped_matmul", kernel.op == "cast_matmul"
    left, right = _factors((_ROWS, _LENGTH)), _factors((len(_ENDS), _COLUMNS, _LENGTH)[0 if grouped else 1 :], seed=1)
    dtypes = float_dtypes(place)
    for (first, second), dtype in itertools.product(pairs, dtypes):
        if dtype != "float32" and first is not None and second is not None and not casts:
            continue  # no operand has this dtype
        if grouped and first is not None and first.layout.block(-1)[0] not in (1, None):
            continue
        a = _Operand.create(place, left, None if casts else first, dtype, "rows")
        b = _Operand.create(place, right, second, dtype, "rows")
        stored = b if second is not None else a
        if stored.st is None:
            continue
        written = recipe if casts else None
        p = a.numbers if written is None else reference.dequantize(reference.cast(a.numbers, written))
        for name in storages_of(kernel.reads, stored.st):
            x, y = (o.array.to_storage(name) if o is stored else o.array for o in (a, b))
            more: tuple[Any, ...] = (place.array(np.array(_ENDS, np.int32)),) if grouped else ()
            operands = (x, *([written] if written else []), _swapped(place, y), *more)
            result = run_alone(kernel, getattr(api, kernel.op), *operands)
            if result is not None:
                tried = True
                fp8 = bounds.in_tensor_cores(written or first, second, device_of(result))
                expected = _expected(p, b.numbers, None, grouped)
                _expect_within(f"{kernel.op} of {name} storage", place, result, "float32", *expected, False, fp8)
    return tried


# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """Options and orientations of one product.

    dtype: of plain operands. a, b: orientation of an operand: blocks along K, K last in memory ("rows"); a transposed view of
    an array with K first ("view"); or blocks along the other axis ("across"). marked: the first operand has a NaN.
    """

    dtype: str = "float32"
    out_dtype: str = "float32"
    out: bool = False
    bias: bool = False
    a: str = "rows"
    b: str = "rows"
    lead: tuple[int, ...] = ()
    marked: bool = False

    def description(self, op: str) -> str:
        """The case, in messages."""
        said = [op + " with a bias" * self.bias]
        said += [f"{name}={value!r}" for name, value in (("out_dtype", self.out_dtype),) if value != "float32"]
        said += ["out="] * self.out + [f"plain operands {self.dtype}"] * (self.dtype != "float32")
        said += [f"orientation of a {self.a!r}"] * (self.a != "rows") + [f"orientation of b {self.b!r}"] * (self.b != "rows")
        return ", ".join(said + ["several matrices"] * bool(self.lead))


#: Every value of each field, and most pairs of values.
_CASES = (
    _Case(),
    _Case(bias=True, marked=True),
    _Case("float16", "bfloat16", bias=True, a="view", b="view"),
    _Case("bfloat16", "float16", out=True, b="across", lead=(2,)),
    _Case("float16", out=True, bias=True, a="across", b="rows"),
)


def _check_bound(kernel: Kernel, place: Place, first: ScalingRecipe | None, second: ScalingRecipe | None) -> None:
    """Check the bound in all cases, for operands under these recipes (None: a plain operand)."""
    grouped, casts = kernel.op == "grouped_matmul", kernel.op == "cast_matmul"
    if grouped and first is not None and first.layout.block(-1)[0] not in (1, None):
        pytest.skip(f"groups begin at any row of a, and blocks of {first.spec} are taller than one")
    ran = False
    for case in _CASES:
        if case.dtype not in float_dtypes(place) or case.out_dtype not in float_dtypes(place):
            continue
        if (case.out and (casts or not takes_out(place))) or (grouped and (case.bias or case.lead)):
            continue
        left = _factors((*case.lead, _ROWS, _LENGTH))
        right = _factors((len(_ENDS), _COLUMNS, _LENGTH) if grouped else (*case.lead, _COLUMNS, _LENGTH), seed=1)
        if case.marked:
            left[..., 1, 5] = np.nan
        a = _Operand.create(place, left, None if casts else first, case.dtype, "rows" if grouped else case.a)
        b = _Operand.create(place, right, second, case.dtype, case.b)
        p = reference.dequantize(reference.cast(a.numbers, first)) if casts and first is not None else a.numbers
        operands: tuple[Any, ...] = (a.array, *([first] if casts else []), _swapped(place, b.array))
        bias = np.linspace(-100, 100, _COLUMNS, dtype=np.float32) if case.bias else None
        options: dict[str, Any] = {} if case.out_dtype == "float32" else {"out_dtype": case.out_dtype}
        if bias is not None:
            options["bias"] = place.array(bias)
        if case.out:
            shape = (*case.lead, _ROWS, _COLUMNS)
            options["out"] = floats(place, np.full(shape, 7, np.float32), case.out_dtype)
        if grouped:
            operands = (*operands, place.array(np.array(_ENDS, np.int32)))
        before = [place.words(x.array).copy() if x.st is None else None for x in (a, b)]
        result = run_alone(kernel, getattr(api, kernel.op), *operands, **options)
        if result is None:
            continue
        ran = True
        what = case.description(kernel.op)
        expect(not case.out or result is options["out"], f"{what}: it did not return out=")
        products, magnitudes = _expected(p, b.numbers, bias, grouped)
        fp8 = bounds.in_tensor_cores(first, second, device_of(result))
        _expect_within(what, place, result, case.out_dtype, products, magnitudes, case.bias, fp8)
        for x, words in zip((a, b), before, strict=True):
            expect_tensor_unchanged(place, x.array, x.st)
            if words is not None:
                expect_array_unchanged(place, x.array, words)
    skip_unless_run(kernel, ran)


@dataclass(frozen=True)
class _Operand:
    """One operand with K last: the array or tensor passed to the operation, the NumPy tensor, and its FP32 values."""

    array: Any
    st: ScaledTensor | None
    numbers: np.ndarray

    @classmethod
    def create(cls, place: Place, x: np.ndarray, recipe: ScalingRecipe | None, dtype: str, how: str) -> _Operand:
        if recipe is None:
            known = np.where(np.isnan(x), x, rounded(np.nan_to_num(x), dtype))
            return cls(floats(place, known, dtype, view=how == "view"), None, known)
        if how == "view":
            st = reference.cast(np.asarray(x.swapaxes(-1, -2), order="C"), recipe, CastOptions(axis=-2))
            return cls(moved(st, place).mT, st.mT, reference.dequantize(st.mT))
        across = how == "across" and recipe.layout.block() != TENSOR
        st = reference.cast(x, recipe, CastOptions(axis=-2 if across else -1))
        return cls(moved(st, place), st, reference.dequantize(st))


def _partner(kernel: Kernel, recipe: ScalingRecipe) -> ScalingRecipe | None:
    """The recipe of the second operand: the first operand's if the kernel accepts it, otherwise another, or None."""
    return next(
        (r for r in (recipe, MXFP8BlockScaling(), *strategies.defaults()) if matches(kernel.other, r) and knows(kernel, r)),
        None,
    )


def _swapped(place: Place, x: Any) -> Any:
    return x.mT if isinstance(x, ScaledTensor) else place.ops.swap(x)


def _factors(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers; the first product of each row is large."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[..., 0] = 1.0 if seed else 4096.0
    return x


# -- expected results ------------------------------------------------------------------------------------------------


def _expected(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, grouped: bool) -> tuple[np.ndarray, np.ndarray]:
    """The FP64 product of operands with K last, and the sums of the magnitudes of its terms."""
    p, q = a.astype(np.float64), b.astype(np.float64).swapaxes(-1, -2)
    if not grouped:
        added = np.zeros(_COLUMNS) if bias is None else bias.astype(np.float64)
        return p @ q + added, np.abs(p) @ np.abs(q) + np.abs(added)
    products, magnitudes, start = np.zeros((_ROWS, _COLUMNS)), np.zeros((_ROWS, _COLUMNS)), 0
    for matrix, end in zip(q, _ENDS, strict=True):
        products[start:end], magnitudes[start:end] = p[start:end] @ matrix, np.abs(p[start:end]) @ np.abs(matrix)
        start = end
    return products, magnitudes


def _expect_within(
    what: str, place: Place, sums: Any, dtype: str, products: np.ndarray, magnitudes: np.ndarray, bias: bool, fp8: bool
) -> None:
    """Check sums of `_LENGTH` products, and a bias, against the bound of summation in any order plus one rounding.

    fp8: of FP8 tensor cores, promoted to FP32; else of FP32.
    """
    expect(dtype_name(sums) == dtype, f"{what}: {dtype_name(sums)}, expected {dtype}")
    expect(tuple(sums.shape) == products.shape, f"{what}: shape {tuple(sums.shape)}, expected {products.shape}")
    values = numbers(place, sums, dtype).astype(np.float64)
    nan = np.isnan(products)
    expect(bool((np.isnan(values) | ~nan).all()), f"{what}: a NaN became a finite number")
    bound = bounds.accumulated(magnitudes, _LENGTH + bias, _LENGTH, fp8)
    bound += _half_unit(np.abs(products) + bound, dtype)
    none = magnitudes == 0
    expect(not values[none].any(), f"{what}: rows of no group are not zeros")
    with np.errstate(invalid="ignore"):
        errors = np.where(nan | none, 0, np.abs(values - products) / bound)
    worst = float(np.max(np.where(np.isnan(errors), np.inf, errors)))
    expect(worst <= 1, f"{what}: the error is {worst:.1f} times the bound of FP32 accumulation")


def _half_unit(x: np.ndarray, dtype: str) -> np.ndarray | float:
    """Half a unit in the last place, in a dtype, of numbers up to `x`. Zero for FP32, whose rounding the bound includes."""
    if dtype == "float32":
        return 0.0
    bits, least = (11, 2.0**-14) if dtype == "float16" else (8, 2.0**-126)
    return np.exp2(np.floor(np.log2(np.maximum(np.nan_to_num(x), least))) - bits)
