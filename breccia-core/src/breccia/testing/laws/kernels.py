"""Laws of kernels: the bytes of the generic algorithm, wherever they say that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import NoneType
from typing import Any

import numpy as np
import pytest

from ... import api, targets
from ...arrays.frameworks import Device, dtype_name, place_of
from ...dispatch.kernel import Kernel
from ...errors import BrecciaError, NoKernelError, NonFiniteError, UnsupportedError
from ...kernels import reference
from ...options import CastOptions
from ...recipes import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect, expect_numbers, expect_tensor, expect_words, fp32
from ..examples import special_rows, wide
from ..places import Place, places_of
from .law import Law, Subject, each
from .recipes import instances, moved

_CASTS = ("cast", "cast_pair", "cast_ste", "cast_ste_clipped")
_ALONG_ROWS: dict[str, Any] = {"axis": -2}
_STOCHASTIC: dict[str, Any] = {"rounding": "stochastic", "seed": 0x9E3779B97F4A7C15}


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the kernels of a plug-in: with every recipe they are declared for, of whatever plug-in."""
    recipes = list(dict.fromkeys([*strategies.defaults(), *instances(subject)]))
    for kernel in subject.of("kernels"):
        for place in places_of(kernel, subject.places):
            asked = (it_says_whether_it_is_available, *((it_runs_only_when_named,) if kernel.opt_in else ()))
            yield from each("kernels", kernel.name, asked, kernel, place=place)
            if kernel.opt_in:
                continue
            for recipe in recipes:
                if _serves(kernel.other if kernel.op == "requantize" else kernel.recipe, recipe):
                    what = f"{kernel.name}.{recipe.spec}"
                    yield from each("kernels", what, _LAWS[kernel.op], kernel, recipe, place=place)


def it_says_whether_it_is_available(kernel: Kernel, place: Place) -> None:
    if kernel.available is None:
        return
    for device in (Device(kernel.device or "cpu"), Device("cuda"), Device("cuda", 1, (9, 0)), Device("no such device")):
        asked = f"{kernel.available}({str(device)!r})"
        try:
            reason = targets.load(kernel.available)(device)
        except Exception as e:  # dispatch skips such a kernel
            raise AssertionError(f"{asked} raised {type(e).__name__}: {e}") from e
        expect(reason is None or (isinstance(reason, str) and bool(reason)), f"{asked} gave {reason!r}")


def it_runs_only_when_named(kernel: Kernel, place: Place) -> None:
    for recipe in strategies.defaults():
        for operands in _operands(kernel, recipe, place):
            try:
                found = api.explain(kernel.op, *operands)
            except BrecciaError:
                continue
            expect(found.winner is None or found.winner.name != kernel.name, f"it is chosen unasked:\n{found}")


def casts_write_the_bytes_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    ragged, whole = _arrays()
    served = False
    for x, options in ((ragged, {}), (whole, {}), (ragged, _ALONG_ROWS), (ragged, _STOCHASTIC)):
        given = place.array(x)
        st = _asked(kernel, api.cast, given, recipe, **options)
        if st is not None:
            served = True
            expect_tensor(place, st, reference.cast(x, recipe, CastOptions(**options)))
            _expect_untouched(place, given, x)
    _need_served(kernel, served)


def options_of_a_cast_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """A supplied scale; `nonfinite="raise"`; and `out=`, where arrays are mutable."""
    x = _arrays()[1]
    other = reference.cast(_arrays()[1] * np.float32(3), recipe)
    scale = other.scale if other.global_scale is None else other.global_scale
    there = moved(other, place)
    supplied = there.scale if there.global_scale is None else there.global_scale
    st = _asked(kernel, api.cast, place.array(x), recipe, scale=supplied)
    if st is not None:
        expect_tensor(place, st, reference.cast(x, recipe, CastOptions(scale=scale)))
    _expect_nan_refused(kernel, api.cast, recipe, place)
    with suppress(UnsupportedError):
        written = _asked(kernel, api.cast, place.array(x), recipe, out=there)
        if written is not None:
            expect(written is there, "out= was not what it returned")
            expect_tensor(place, there, reference.cast(x, recipe))


def a_pair_is_both_casts(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """Blocks along the last axis, then along the one before it, of the same numbers under the same options."""
    ragged, whole = _arrays()
    served = False
    for x, options in ((ragged, {}), (whole, {}), (ragged, _STOCHASTIC)):
        given = place.array(x)
        pair = _asked(kernel, api.cast_pair, given, recipe, **options)
        if pair is not None:
            served = True
            for st, axis in zip(pair, (-1, -2), strict=True):
                expect_tensor(place, st, reference.cast(x, recipe, CastOptions(axis=axis, **options)))
            _expect_untouched(place, given, x)
    _expect_nan_refused(kernel, api.cast_pair, recipe, place)
    _need_served(kernel, served)


def options_of_dequantize_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`out_dtype`: one rounding, to nearest, ties to even; and `out=`, where arrays are mutable."""
    st = reference.cast(_arrays()[1], recipe)
    numbers = reference.dequantize(st)
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    with np.errstate(over="ignore"):
        expected = {"float16": numbers.astype(np.float16).view(np.uint16), "bfloat16": rounded.astype(np.uint16)}
    for dtype, words in expected.items():
        with suppress(UnsupportedError):  # NumPy without ml_dtypes has no bfloat16
            back = _asked(kernel, api.dequantize, moved(st, place), out_dtype=dtype)
            if back is not None:
                expect(dtype_name(back) == dtype, f"out_dtype={dtype!r} gave {dtype_name(back)}")
                expect_words(f"decoded to {dtype}", place.words(back), words)
    out = place.array(np.zeros(st.shape, np.float32))
    with suppress(UnsupportedError):
        found = _asked(kernel, api.dequantize, moved(st, place), out=out)
        if found is not None:
            expect(found is out, "out= was not what it returned")
            expect_numbers("out", place, out, numbers)


def values_are_those_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    ragged, whole = _arrays()
    served = False
    for x, axis in ((ragged, -1), (whole, -1), (ragged, -2)):
        st = reference.cast(x, recipe, CastOptions(axis=axis))
        given = moved(st, place)
        back = _asked(kernel, api.dequantize, given)
        if back is not None:
            served = True
            expect_numbers("decoded", place, back, reference.dequantize(st))
            _expect_kept(place, given, st)
    _need_served(kernel, served)


def requantize_writes_the_bytes_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """From codes that others hold without rounding, and from those that nothing does."""
    served = False
    sources = dict.fromkeys((MXFP4BlockScaling(), NVFP4BlockScaling(), recipe, *strategies.defaults()))
    for source in islice(filter(partial(_serves, kernel.recipe), sources), 3):
        st = reference.cast(_arrays()[0], source)
        given = moved(st, place)
        found = _asked(kernel, api.requantize, given, recipe)
        if found is not None:
            served = True
            expect_tensor(place, found, reference.requantize(st, recipe))
            _expect_kept(place, given, st)
    _need_served(kernel, served)


def round_trips_are_dequantize_of_cast(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    verb = getattr(api, kernel.op)
    ragged, whole = _arrays()
    served = False
    for x, options in ((ragged, _STOCHASTIC), (whole, {})):
        given = place.array(x)
        back = _asked(kernel, verb, given, recipe, **options)
        if back is not None:
            served = True
            expect_numbers(kernel.op, place, back, reference.dequantize(reference.cast(x, recipe, CastOptions(**options))))
            _expect_untouched(place, given, x)
    _need_served(kernel, served)


def products_keep_the_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """|error| <= K u / (1 - K u) sum |a||b| + K 2^-126, u = 2^-24: any FP32 order of summation (Higham, 3.1).

    A product below 2^-126 may come back as zero. One term is large, many are small. The other operand is of the recipe where
    the kernel takes that, else an array or MXFP8. A bias is one more term. `cast_matmul` casts the first operand itself.
    """
    a, w = _factors((9, _LENGTH)), _factors((7, _LENGTH), seed=1)
    bias = np.linspace(-100, 100, 7, dtype=np.float32)
    left = reference.cast(a, recipe)
    second, q = _second(kernel, recipe, place, w)
    p = reference.dequantize(left).astype(np.float64)
    first, x = moved(left, place), place.array(a)
    verb, operands = (api.matmul, (first, second)) if kernel.op == "matmul" else (api.cast_matmul, (x, recipe, second))
    served = False
    for added, options in ((np.zeros(7), {}), (bias, {"bias": place.array(bias)})):
        found = _asked(kernel, verb, *operands, **options)
        if found is not None:
            served = True
            products, magnitudes = p @ q + added, np.abs(p) @ np.abs(q) + np.abs(added)
            _expect_within(kernel.op + " with a bias" * bool(options), place, found, products, magnitudes, len(options))
    _need_served(kernel, served)
    _expect_kept(place, first, left)
    _expect_untouched(place, x, a)


def grouped_products_keep_the_bound(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """That of `matmul`, in each group; one group is empty, and rows of no group are zeros."""
    a, w = _factors((9, _LENGTH)), _factors((3, 7, _LENGTH), seed=1)
    left = reference.cast(a, recipe)
    scaled = left.layout.block(-1)[0] in (1, None)
    if not scaled and kernel.recipe is not None:
        pytest.skip(f"groups begin at any row of a, and blocks of {recipe.spec} are taller than one")
    second, q = _second(kernel, recipe, place, w)
    p = (reference.dequantize(left) if scaled else a).astype(np.float64)
    first = moved(left, place) if scaled else place.array(a)
    found = _asked(kernel, api.grouped_matmul, first, second, place.array(np.array([2, 2, 7], np.int32)))
    _need_served(kernel, found is not None)
    products, magnitudes = np.zeros((9, 7)), np.zeros((9, 7))
    for rows, matrix in ((slice(0, 2), q[0]), (slice(2, 7), q[2])):
        products[rows], magnitudes[rows] = p[rows] @ matrix, np.abs(p[rows]) @ np.abs(matrix)
    _expect_within(kernel.op, place, found, products, magnitudes)
    expect(not fp32(kernel.op, place, found, (9, 7))[7:].any(), "rows of no group are not zeros")
    if isinstance(first, ScaledTensor):
        _expect_kept(place, first, left)


_TRIP = (round_trips_are_dequantize_of_cast,)
_LAWS: dict[str, tuple[Callable[..., None], ...]] = {
    "cast": (casts_write_the_bytes_of_the_generic_algorithm, options_of_a_cast_are_honoured),
    "dequantize": (values_are_those_of_the_generic_algorithm, options_of_dequantize_are_honoured),
    "requantize": (requantize_writes_the_bytes_of_the_generic_algorithm,),
    "matmul": (products_keep_the_bound,),
    "cast_matmul": (products_keep_the_bound,),
    "grouped_matmul": (grouped_products_keep_the_bound,),
    "cast_pair": (a_pair_is_both_casts,),
    "cast_ste": _TRIP,
    "cast_ste_clipped": _TRIP,
}


def _arrays() -> list[np.ndarray]:
    """Every clause of the contract in a ragged shape, and whole blocks of the usual sizes."""
    return [np.concatenate([special_rows(67), wide((5, 67), seed=1)]), wide((16, 256), seed=2, exponents=8)]


def _asked(kernel: Kernel, verb: Any, *operands: Any, **options: Any) -> Any:
    """What the kernel alone gives; None where it declines this call. Skips the test where it cannot run here at all."""
    try:
        return verb(*operands, **options, prefer=kernel.name)
    except NoKernelError as e:
        if kernel.available is not None:
            x = operands[0]
            reason = targets.load(kernel.available)(place_of(x.data if isinstance(x, ScaledTensor) else x))
            if reason is not None:
                pytest.skip(reason)
        if kernel.accepts is None:
            raise AssertionError(f"it has no accepts=, and does not serve this call:\n{e}") from e
        return None


def _operands(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> Iterator[tuple[Any, ...]]:
    """Operands that `explain` takes for the kernel's op."""
    x = wide((32, 256), seed=3, exponents=2)
    if kernel.op in _CASTS:
        yield place.array(x), recipe
    elif kernel.op in ("matmul", "grouped_matmul"):
        st = moved(reference.cast(x, recipe), place)
        yield st, st.mT
        yield place.array(x), st.mT
    elif kernel.op == "cast_matmul":
        yield place.array(x), recipe, moved(reference.cast(x, recipe), place).mT
        yield place.array(x), recipe, place.ops.swap(place.array(x))
    else:
        st = moved(reference.cast(x, recipe), place)
        yield (st,) if kernel.op == "dequantize" else (st, MXFP8BlockScaling())


def _serves(declared: type | None, recipe: ScalingRecipe) -> bool:
    return declared is None or (declared is not NoneType and isinstance(recipe, declared))


def _need_served(kernel: Kernel, served: bool) -> None:
    """Skip the test of a kernel that never ran in it: nothing was held to anything."""
    if not served:
        pytest.skip(f"{kernel.name} declined every array tried here")


#: K of the products that are tried.
_LENGTH = 512


def _factors(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers; the first product of each row is large."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[..., 0] = 1.0 if seed else 4096.0
    return x


def _second(kernel: Kernel, recipe: ScalingRecipe, place: Place, w: np.ndarray) -> tuple[Any, np.ndarray]:
    """The transpose of `w` as the second operand of a product, and its values in FP64."""
    others = [r for r in (recipe, MXFP8BlockScaling()) if _serves(kernel.other, r)]
    right = reference.cast(w, others[0]) if others else None
    second = place.ops.swap(place.array(w)) if right is None else moved(right, place).mT
    return second, (w if right is None else reference.dequantize(right)).astype(np.float64).swapaxes(-1, -2)


def _expect_within(
    what: str, place: Place, found: Any, products: np.ndarray, magnitudes: np.ndarray, more_terms: int = 0
) -> None:
    """Hold sums of `_LENGTH` products, and so many more terms, to the bound of any FP32 order of summation."""
    n = (_LENGTH + more_terms) * 2.0**-24
    bound = n / (1 - n) * magnitudes + _LENGTH * 2.0**-126
    worst = np.max(np.abs(fp32(what, place, found, products.shape) - products) / bound)
    expect(bool(worst <= 1), f"{what} is {worst:.1f} times the bound of FP32 accumulation away")


def _expect_nan_refused(kernel: Kernel, verb: Any, recipe: ScalingRecipe, place: Place) -> None:
    bad = _arrays()[1]
    bad[3, 5] = np.nan
    with suppress(NonFiniteError):
        marked = _asked(kernel, verb, place.array(bad), recipe, nonfinite="raise")
        expect(marked is None, 'nonfinite="raise" did not raise for a NaN')


def _expect_untouched(place: Place, given: Any, x: np.ndarray) -> None:
    expect(bool((place.words(given) == x.view(np.uint32)).all()), "it writes into its input")


def _expect_kept(place: Place, given: ScaledTensor, st: ScaledTensor) -> None:
    try:
        expect_tensor(place, given, st)
    except AssertionError as e:
        raise AssertionError(f"it writes into its input: {e}") from None
