"""Laws of kernels: the bytes of the generic algorithm, wherever the kernel is available."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from ... import api
from ...arrays.frameworks import dtype_name
from ...dispatch.kernel import Kernel
from ...errors import InexactError, NonFiniteError
from ...kernels import reference
from ...options import CastOptions
from ...recipes import MXFP4BlockScaling, NVFP4BlockScaling, ScalingRecipe
from .. import strategies
from ..compare import expect, expect_numbers, expect_tensor, expect_words
from ..places import Place, places_of
from . import products
from .choosing import (
    PRODUCTS,
    a_call_without_prefer_finds_one_kernel,
    accepts_score_and_plan_answer_every_call,
    it_runs_only_when_named,
    it_says_whether_it_is_available,
)
from .law import Law, Subject, each
from .recipes import instances, moved
from .trying import (
    arrays,
    asked,
    expect_kept,
    expect_untouched,
    float_dtypes,
    floats,
    half_words,
    matches,
    rounded,
    skip_unless_run,
    storages_of,
    takes_out,
)

_ALONG_ROWS: dict[str, Any] = {"axis": -2}
_STOCHASTIC: dict[str, Any] = {"rounding": "stochastic", "seed": 0x9E3779B97F4A7C15}


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the kernels of a plug-in: with every recipe they are declared for, of any plug-in."""
    recipes = list(dict.fromkeys([*strategies.defaults(), *instances(subject)]))
    for kernel in subject.of("kernels"):
        for place in places_of(kernel, subject.places):
            choosing = (it_runs_only_when_named,) if kernel.opt_in else ()
            yield from each("kernels", kernel.name, (it_says_whether_it_is_available, *choosing), kernel, place=place)
            if kernel.accepts or kernel.score or kernel.plan:
                yield from each(
                    "kernels", kernel.name, [accepts_score_and_plan_answer_every_call], kernel, recipes, place=place
                )
            if kernel.opt_in:
                continue
            yield from each("kernels", kernel.name, [a_call_without_prefer_finds_one_kernel], kernel, recipes, place=place)
            if kernel.op in PRODUCTS:
                yield from products.laws(kernel, recipes, place)
            stored = [declared_storages_are_read_and_written] if kernel.reads or kernel.writes else []
            for recipe in recipes:
                if any(matches(declared, recipe) for declared in _about(kernel)):
                    what = f"{kernel.name}.{recipe.spec}"
                    yield from each("kernels", what, (*_LAWS[kernel.op], *stored), kernel, recipe, place=place)


def _about(kernel: Kernel) -> tuple[type | None, ...]:
    """What the kernel declares of the operands whose recipe a law is about: the one written, or either of a product."""
    if kernel.op in PRODUCTS:
        return kernel.recipe, kernel.other
    return (kernel.other if kernel.op == "requantize" else kernel.recipe,)


def casts_write_the_bytes_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    ragged, whole = arrays()
    served = False
    for x, options in ((ragged, {}), (whole, {}), (ragged, _ALONG_ROWS), (ragged, _STOCHASTIC)):
        given = place.array(x)
        st = asked(kernel, api.cast, given, recipe, **options)
        if st is not None:
            served = True
            expect_tensor(place, st, reference.cast(x, recipe, CastOptions(**options)))
            expect_untouched(place, given, x.view(np.uint32))
    skip_unless_run(kernel, served)


def options_of_a_cast_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """A supplied scale; `nonfinite="raise"`; and `out=`, where arrays are mutable."""
    x = arrays()[1]
    other = reference.cast(arrays()[1] * np.float32(3), recipe)
    scale = other.scale if other.global_scale is None else other.global_scale
    there = moved(other, place)
    supplied = there.scale if there.global_scale is None else there.global_scale
    st = asked(kernel, api.cast, place.array(x), recipe, scale=supplied)
    if st is not None:
        expect_tensor(place, st, reference.cast(x, recipe, CastOptions(scale=scale)))
    _expect_nan_refused(kernel, api.cast, recipe, place)
    if takes_out(place):
        written = asked(kernel, api.cast, place.array(x), recipe, out=there)
        if written is not None:
            expect(written is there, "out= was not what it returned")
            expect_tensor(place, there, reference.cast(x, recipe))


def a_pair_is_both_casts(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """Blocks along the last axis, then along the one before it, of the same numbers under the same options."""
    ragged, whole = arrays()
    served = False
    for x, options in ((ragged, {}), (whole, {}), (ragged, _STOCHASTIC)):
        given = place.array(x)
        pair = asked(kernel, api.cast_pair, given, recipe, **options)
        if pair is not None:
            served = True
            for st, axis in zip(pair, (-1, -2), strict=True):
                expect_tensor(place, st, reference.cast(x, recipe, CastOptions(axis=axis, **options)))
            expect_untouched(place, given, x.view(np.uint32))
    _expect_nan_refused(kernel, api.cast_pair, recipe, place)
    skip_unless_run(kernel, served)


def options_of_dequantize_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`out_dtype`: one rounding, to nearest, ties to even; and `out=`, where arrays are mutable."""
    st = reference.cast(arrays()[1], recipe)
    numbers = reference.dequantize(st)
    for dtype in float_dtypes(place)[1:]:
        back = asked(kernel, api.dequantize, moved(st, place), out_dtype=dtype)
        if back is not None:
            expect(dtype_name(back) == dtype, f"out_dtype={dtype!r} gave {dtype_name(back)}")
            expect_words(f"decoded to {dtype}", place.words(back), half_words(numbers, dtype))
    if takes_out(place):
        out = place.array(np.zeros(st.shape, np.float32))
        found = asked(kernel, api.dequantize, moved(st, place), out=out)
        if found is not None:
            expect(found is out, "out= was not what it returned")
            expect_numbers("out", place, out, numbers)


def values_are_those_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    ragged, whole = arrays()
    served = False
    for x, axis in ((ragged, -1), (whole, -1), (ragged, -2)):
        st = reference.cast(x, recipe, CastOptions(axis=axis))
        given = moved(st, place)
        back = asked(kernel, api.dequantize, given)
        if back is not None:
            served = True
            expect_numbers("decoded", place, back, reference.dequantize(st))
            expect_kept(place, given, st)
    skip_unless_run(kernel, served)


def requantize_writes_the_bytes_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """From codes that other formats represent exactly, and from codes that none does."""
    served = False
    for source in islice(_sources(kernel, recipe), 3):
        st = reference.cast(arrays()[0], source)
        given = moved(st, place)
        found = asked(kernel, api.requantize, given, recipe)
        if found is not None:
            served = True
            expect_tensor(place, found, reference.requantize(st, recipe))
            expect_kept(place, given, st)
    skip_unless_run(kernel, served)


def options_of_requantize_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """Blocks along rows; stochastic rounding; `require_exact`, which raises where a bit would change; and `out=`."""
    source = _source(kernel, recipe)
    rows, columns = (reference.cast(arrays()[1], source, CastOptions(axis=axis)) for axis in (-1, -2))
    served = False
    for st, options in ((columns, {}), (rows, _STOCHASTIC), (columns, _STOCHASTIC)):
        given = moved(st, place)
        found = asked(kernel, api.requantize, given, recipe, **options)
        if found is not None:
            served = True
            expect_tensor(place, found, reference.requantize(st, recipe, CastOptions(**options)))
            expect_kept(place, given, st)
    try:
        exact = reference.requantize(rows, recipe, require_exact=True)
    except InexactError:
        exact = None
    with suppress(InexactError):
        found = asked(kernel, api.requantize, moved(rows, place), recipe, require_exact=True)
        if found is not None:
            expect(exact is not None, "require_exact=True did not raise where values are rounded")
            expect_tensor(place, found, reference.requantize(rows, recipe))
    if takes_out(place):
        out = moved(reference.cast(arrays()[1] * np.float32(3), recipe), place)
        written = asked(kernel, api.requantize, moved(rows, place), recipe, out=out)
        if written is not None:
            expect(written is out, "out= was not what it returned")
            expect_tensor(place, out, reference.requantize(rows, recipe))
    skip_unless_run(kernel, served)


def _source(kernel: Kernel, recipe: ScalingRecipe) -> ScalingRecipe:
    """One that the kernel reads: another than the new one, if there is any."""
    found = list(_sources(kernel, recipe))
    if not found:
        pytest.skip(f"{kernel.name} reads no recipe that is tried here")
    return next((source for source in found if source != recipe), recipe)


def _sources(kernel: Kernel, recipe: ScalingRecipe) -> Iterator[ScalingRecipe]:
    """Recipes that a kernel of `requantize` reads: some that others hold without rounding come first."""
    sources = dict.fromkeys((MXFP4BlockScaling(), NVFP4BlockScaling(), recipe, *strategies.defaults()))
    return filter(partial(matches, kernel.recipe), sources)


def round_trips_are_dequantize_of_cast(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    function = getattr(api, kernel.op)
    ragged, whole = arrays()
    served = False
    for x, options in ((ragged, _STOCHASTIC), (whole, {})):
        given = place.array(x)
        back = asked(kernel, function, given, recipe, **options)
        if back is not None:
            served = True
            expect_numbers(kernel.op, place, back, reference.dequantize(reference.cast(x, recipe, CastOptions(**options))))
            expect_untouched(place, given, x.view(np.uint32))
    skip_unless_run(kernel, served)


def options_of_round_trips_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """Blocks along rows, a supplied scale, and `nonfinite="raise"`."""
    function, x = getattr(api, kernel.op), arrays()[1]
    other = reference.cast(x * np.float32(3), recipe)
    there = moved(other, place)
    scale, supplied = ((st.scale if st.global_scale is None else st.global_scale) for st in (other, there))
    served = False
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        (_ALONG_ROWS, _ALONG_ROWS),
        ({"scale": supplied}, {"scale": scale}),
    )
    for given, options in cases:
        back = asked(kernel, function, place.array(x), recipe, **given)
        if back is not None:
            served = True
            expected = reference.dequantize(reference.cast(x, recipe, CastOptions(**options)))
            expect_numbers(f"{kernel.op} with {next(iter(given))}=", place, back, expected)
    _expect_nan_refused(kernel, function, recipe, place)
    skip_unless_run(kernel, served)


# -- half precision, views and storages ------------------------------------------------------------------------------


def half_precision_and_views_are_cast_alike(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """FP16 and BF16 are widened first, without rounding; a transposed array and several matrices are cast as their copies."""
    whole = arrays()[1]
    large = whole * np.float32(2.0**20)  # beyond what FP16 holds
    cases: tuple[tuple[np.ndarray, str, bool, dict[str, Any]], ...] = (
        (whole, "float16", False, _STOCHASTIC),
        (large[:5, :67], "bfloat16", True, {}),
        (whole, "float32", True, _ALONG_ROWS),
        (large.reshape(2, 8, 256), "bfloat16", False, _ALONG_ROWS),
        (whole.reshape(2, 8, 256)[..., :67], "float16", True, {}),
    )
    function, served = getattr(api, kernel.op), False
    for numbers, dtype, view, options in cases:
        if dtype not in float_dtypes(place):
            continue
        if kernel.op == "cast_pair":
            options = {name: value for name, value in options.items() if name != "axis"}
        x = rounded(np.asarray(numbers, order="C"), dtype)
        given = floats(place, x, dtype, view)
        before = place.words(given).copy()
        found = asked(kernel, function, given, recipe, **options)
        if found is None:
            continue
        served = True
        what = f"of {dtype}" + " and a transposed array" * view
        try:
            _expect_cast(kernel.op, place, found, x, recipe, dtype, options)
        except AssertionError as e:
            raise AssertionError(f"{what}: {e}") from None
        expect_untouched(place, given, before)
    skip_unless_run(kernel, served)


def _expect_cast(
    op: str, place: Place, found: Any, x: np.ndarray, recipe: ScalingRecipe, dtype: str, options: dict[str, Any]
) -> None:
    """Hold what an op gave for FP32 `x`, which was given to it in a dtype, to the generic algorithm."""
    if op == "cast_pair":
        for st, axis in zip(found, (-1, -2), strict=True):
            expect_tensor(place, st, reference.cast(x, recipe, CastOptions(axis=axis, **options)))
        return
    st = reference.cast(x, recipe, CastOptions(**options))
    if op == "cast":
        expect_tensor(place, found, st)
    elif dtype == "float32":
        expect_numbers(op, place, found, reference.dequantize(st))
    else:
        expect(dtype_name(found) == dtype, f"{op} gave {dtype_name(found)}")
        expect_words(op, place.words(found), half_words(reference.dequantize(st), dtype))


def views_are_decoded_alike(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """The transpose of a tensor, of several matrices too, gives the values of its copy; in FP16, into `out=`, as well."""
    whole = arrays()[1]
    served = False
    columns = np.asarray(whole.T, order="C")
    for x, axis, dtype in ((whole, -1, "float32"), (columns, -2, "float32"), (whole.reshape(2, 8, 256), -2, "float16")):
        st = reference.cast(x, recipe, CastOptions(axis=axis))
        given = moved(st, place)
        expected = np.asarray(reference.dequantize(st).swapaxes(-1, -2), order="C")
        options: dict[str, Any] = {} if dtype == "float32" else {"out_dtype": dtype}
        if options and takes_out(place):
            options["out"] = floats(place, np.full(expected.shape, 7, np.float32), dtype)
        back = asked(kernel, api.dequantize, given.mT, **options)
        if back is None:
            continue
        served = True
        if dtype == "float32":
            expect_numbers("the transpose decoded", place, back, expected)
        else:
            expect("out" not in options or back is options["out"], "out= was not what it returned")
            expect(dtype_name(back) == dtype, f"out_dtype={dtype!r} gave {dtype_name(back)}")
            expect_words(f"the transpose decoded to {dtype}", place.words(back), half_words(expected, dtype))
        expect_kept(place, given, st)
    skip_unless_run(kernel, served)


def declared_storages_are_read_and_written(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """Each of `Kernel.reads` gives what the plain operand gives; each of `Kernel.writes` holds the plain bytes."""
    x = arrays()[1]
    tried = False
    plain = reference.cast(x, recipe)
    if kernel.op in ("cast", "cast_pair"):
        for name in storages_of(kernel.writes, plain):
            found = asked(kernel, getattr(api, kernel.op), place.array(x), recipe, storage=name)
            if found is not None:
                tried = True
                for st, axis in zip(found if kernel.op == "cast_pair" else (found,), (-1, -2), strict=False):
                    expect(st.storage == name, f"it wrote {st.storage!r} storage, not {name!r}")
                    expect_tensor(place, st.to_plain(), reference.cast(x, recipe, CastOptions(axis=axis)))
    elif kernel.op == "requantize":
        source = reference.cast(x, _source(kernel, recipe))
        expected = reference.requantize(source, recipe)
        for name in storages_of(kernel.reads, source):
            found = asked(kernel, api.requantize, moved(source, place).to_storage(name), recipe)
            if found is not None:
                tried = True
                expect_tensor(place, found, expected)
        for name in storages_of(kernel.writes, expected):
            found = asked(kernel, api.requantize, moved(source, place), recipe, storage=name)
            if found is not None:
                tried = True
                expect(found.storage == name, f"it wrote {found.storage!r} storage, not {name!r}")
                expect_tensor(place, found.to_plain(), expected)
    elif kernel.op == "dequantize":
        for name in storages_of(kernel.reads, plain):
            back = asked(kernel, api.dequantize, moved(plain, place).to_storage(name))
            if back is not None:
                tried = True
                expect_numbers(f"decoded from {name}", place, back, reference.dequantize(plain))
    else:
        tried = products.stored_operands_multiply_alike(kernel, recipe, place)
    skip_unless_run(kernel, tried)


_TRIP = (
    round_trips_are_dequantize_of_cast,
    options_of_round_trips_are_honoured,
    half_precision_and_views_are_cast_alike,
)
_LAWS: dict[str, tuple[Callable[..., None], ...]] = {
    "cast": (
        casts_write_the_bytes_of_the_generic_algorithm,
        options_of_a_cast_are_honoured,
        half_precision_and_views_are_cast_alike,
    ),
    "dequantize": (
        values_are_those_of_the_generic_algorithm,
        options_of_dequantize_are_honoured,
        views_are_decoded_alike,
    ),
    "requantize": (requantize_writes_the_bytes_of_the_generic_algorithm, options_of_requantize_are_honoured),
    "matmul": (),
    "cast_matmul": (),
    "grouped_matmul": (),
    "cast_pair": (a_pair_is_both_casts, half_precision_and_views_are_cast_alike),
    "cast_ste": _TRIP,
    "cast_ste_clipped": _TRIP,
}


def _expect_nan_refused(kernel: Kernel, function: Any, recipe: ScalingRecipe, place: Place) -> None:
    bad = arrays()[1]
    bad[3, 5] = np.nan
    with suppress(NonFiniteError):
        marked = asked(kernel, function, place.array(bad), recipe, nonfinite="raise")
        expect(marked is None, 'nonfinite="raise" did not raise for a NaN')
