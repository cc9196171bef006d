"""Laws of kernels: they write the bytes of the generic algorithm wherever they are available."""

from __future__ import annotations

import dataclasses
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
from ...dispatch.registry import registry
from ...errors import InexactError, NonFiniteError
from ...kernels import reference
from ...options import CastOptions
from ...recipes import DelayedScaling, MXFP4BlockScaling, NVFP4BlockScaling, ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect, expect_numbers, expect_tensor, expect_words
from ..places import Place, places_of
from . import products
from .choosing import (
    a_call_without_prefer_finds_one_kernel,
    accepts_score_and_plan_answer_every_call,
    it_runs_only_when_named,
    it_says_whether_it_is_available,
)
from .law import Law, Subject, each
from .recipes import instances, moved
from .trying import (
    arrays,
    expect_array_unchanged,
    expect_tensor_unchanged,
    float_dtypes,
    floats,
    half_words,
    knows,
    matches,
    rounded,
    run_alone,
    skip_unless_run,
    storages_of,
    takes_out,
)

_ALONG_ROWS: dict[str, Any] = {"axis": -2}
_STOCHASTIC: dict[str, Any] = {"rounding": "stochastic", "seed": 0x9E3779B97F4A7C15}


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the kernels of a plug-in, with every recipe that they are declared for, from any plug-in."""
    every = list(dict.fromkeys([*strategies.defaults(), *instances(subject)]))
    for kernel in subject.of("kernels"):
        recipes = [recipe for recipe in every if knows(kernel, recipe)]
        for place in places_of(kernel, subject.places):
            choosing = (it_runs_only_when_named,) if kernel.opt_in else ()
            yield from each("kernels", kernel.name, (it_says_whether_it_is_available, *choosing), kernel, place=place)
            if kernel.accepts or kernel.score or kernel.plan:
                yield from each(
                    "kernels", kernel.name, [accepts_score_and_plan_answer_every_call], kernel, recipes, place=place
                )
            if kernel.opt_in:
                continue
            yield from each("kernels", kernel.name, [a_call_without_prefer_finds_one_kernel], kernel, every, place=place)
            op = registry().operation(kernel.op)
            if op.product:
                yield from products.laws(kernel, recipes, place)
            stored = [declared_storages_are_read_and_written] if kernel.reads or kernel.writes else []
            for recipe in recipes:
                if any(matches(declared, recipe) for declared in _recipes_of(kernel)):
                    what = f"{kernel.name}.{recipe.spec}"
                    yield from each("kernels", what, (*_LAWS.get(kernel.op, ()), *stored), kernel, recipe, place=place)


def _recipes_of(kernel: Kernel) -> tuple[type | None, ...]:
    """The recipe classes declared for the recipe that a law tests: the one written, or that of either operand of a product."""
    if registry().operation(kernel.op).product:
        return kernel.recipe, kernel.other
    return (kernel.other if kernel.op == "requantize" else kernel.recipe,)


def casts_write_the_bytes_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    uneven, full = arrays()
    ran = False
    for x, options in ((uneven, {}), (full, {}), (uneven, _ALONG_ROWS), (uneven, _STOCHASTIC)):
        operand = place.array(x)
        st = run_alone(kernel, api.cast, operand, recipe, **options)
        if st is not None:
            ran = True
            expect_tensor(place, st, reference.cast(x, recipe, CastOptions(**options)))
            expect_array_unchanged(place, operand, x.view(np.uint32))
    skip_unless_run(kernel, ran)


def _supplies(recipe: ScalingRecipe) -> bool:
    """Whether a cast takes `scale=`: scales that are coded under others are not supplied."""
    return recipe.format.global_scale is not None or recipe.format.scale_record is None


def options_of_a_cast_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`scale=`, `nonfinite="raise"`, and `out=` if arrays are mutable."""
    x = arrays()[1]
    other = reference.cast(arrays()[1] * np.float32(3), recipe)
    scale = other.scale if other.global_scale is None else other.global_scale
    there = moved(other, place)
    supplied = there.scale if there.global_scale is None else there.global_scale
    st = run_alone(kernel, api.cast, place.array(x), recipe, scale=supplied) if _supplies(recipe) else None
    if st is not None:
        expect_tensor(place, st, reference.cast(x, recipe, CastOptions(scale=scale)))
    _expect_nan_refused(kernel, api.cast, recipe, place)
    if takes_out(place):
        written = run_alone(kernel, api.cast, place.array(x), recipe, out=there)
        if written is not None:
            expect(written is there, "it did not return out=")
            expect_tensor(place, there, reference.cast(x, recipe))


def cast_pair_equals_two_casts(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`cast_pair` returns `cast` along axis -1 and along axis -2, with the same options, `scale=` among them."""
    uneven, full = arrays()
    ran = False
    for x, options in ((uneven, {}), (full, {}), (uneven, _STOCHASTIC)):
        operand = place.array(x)
        pair = run_alone(kernel, api.cast_pair, operand, recipe, **options)
        if pair is not None:
            ran = True
            for st, axis in zip(pair, (-1, -2), strict=True):
                expect_tensor(place, st, reference.cast(x, recipe, CastOptions(axis=axis, **options)))
            expect_array_unchanged(place, operand, x.view(np.uint32))
    rows, columns = (reference.cast(full * np.float32(3), recipe, CastOptions(axis=axis)) for axis in (-1, -2))
    if rows.global_scale is not None or rows.scale.shape == columns.scale.shape:  # one scale fits both
        there = moved(rows, place)
        scale, supplied = (st.scale if st.global_scale is None else st.global_scale for st in (rows, there))
        pair = run_alone(kernel, api.cast_pair, place.array(full), recipe, scale=supplied)
        if pair is not None:
            for st, axis in zip(pair, (-1, -2), strict=True):
                expect_tensor(place, st, reference.cast(full, recipe, CastOptions(axis=axis, scale=scale)))
    _expect_nan_refused(kernel, api.cast_pair, recipe, place)
    skip_unless_run(kernel, ran)


def options_of_dequantize_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`out_dtype` rounds once, to nearest, ties to even; and `out=` if arrays are mutable."""
    st = reference.cast(arrays()[1], recipe)
    numbers = reference.dequantize(st)
    for dtype in float_dtypes(place)[1:]:
        back = run_alone(kernel, api.dequantize, moved(st, place), out_dtype=dtype)
        if back is not None:
            expect(dtype_name(back) == dtype, f"out_dtype={dtype!r} gave {dtype_name(back)}")
            expect_words(f"decoded to {dtype}", place.words(back), half_words(numbers, dtype))
    if takes_out(place):
        out = place.array(np.zeros(st.shape, np.float32))
        result = run_alone(kernel, api.dequantize, moved(st, place), out=out)
        if result is not None:
            expect(result is out, "it did not return out=")
            expect_numbers("out", place, out, numbers)


def decoded_values_match_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    uneven, full = arrays()
    ran = False
    for x, axis in ((uneven, -1), (full, -1), (uneven, -2)):
        st = reference.cast(x, recipe, CastOptions(axis=axis))
        operand = moved(st, place)
        back = run_alone(kernel, api.dequantize, operand)
        if back is not None:
            ran = True
            expect_numbers("decoded", place, back, reference.dequantize(st))
            expect_tensor_unchanged(place, operand, st)
    skip_unless_run(kernel, ran)


def requantize_writes_the_bytes_of_the_generic_algorithm(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """From recipes that other formats represent exactly, and from recipes that none represents exactly."""
    ran = False
    for source in islice(_sources(kernel, recipe), 3):
        st = reference.cast(arrays()[0], source)
        operand = moved(st, place)
        result = run_alone(kernel, api.requantize, operand, recipe)
        if result is not None:
            ran = True
            expect_tensor(place, result, reference.requantize(st, recipe))
            expect_tensor_unchanged(place, operand, st)
    skip_unless_run(kernel, ran)


def options_of_requantize_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`axis=-2`, `scale=`, stochastic rounding, `require_exact`, which raises if a value would be rounded, and `out=`."""
    source = _source(kernel, recipe)
    rows, columns = (reference.cast(arrays()[1], source, CastOptions(axis=axis)) for axis in (-1, -2))
    other = reference.cast(arrays()[1] * np.float32(3), recipe)
    scale, supplied = ((st.scale if st.global_scale is None else st.global_scale) for st in (other, moved(other, place)))
    scaled = ({"scale": supplied}, {"scale": scale})
    cases: tuple[tuple[ScaledTensor, dict[str, Any], dict[str, Any]], ...] = (
        (columns, {}, {}),
        (rows, _STOCHASTIC, _STOCHASTIC),
        (columns, _STOCHASTIC, _STOCHASTIC),
        *([(rows, *scaled)] if _supplies(recipe) else []),
    )
    ran = False
    for st, given, options in cases:
        operand = moved(st, place)
        result = run_alone(kernel, api.requantize, operand, recipe, **given)
        if result is not None:
            ran = True
            expect_tensor(place, result, reference.requantize(st, recipe, CastOptions(**options)))
            expect_tensor_unchanged(place, operand, st)
    try:
        exact = reference.requantize(rows, recipe, CastOptions(require_exact=True))
    except InexactError:
        exact = None
    with suppress(InexactError):
        result = run_alone(kernel, api.requantize, moved(rows, place), recipe, require_exact=True)
        if result is not None:
            if exact is None:
                raise AssertionError("require_exact=True did not raise where values are rounded")
            expect_tensor(place, result, exact)
    if takes_out(place):
        out = moved(reference.cast(arrays()[1] * np.float32(3), recipe), place)
        written = run_alone(kernel, api.requantize, moved(rows, place), recipe, out=out)
        if written is not None:
            expect(written is out, "it did not return out=")
            expect_tensor(place, out, reference.requantize(rows, recipe))
    skip_unless_run(kernel, ran)


def _source(kernel: Kernel, recipe: ScalingRecipe) -> ScalingRecipe:
    """A recipe that the kernel reads, different from the new one if possible."""
    sources = list(_sources(kernel, recipe))
    if not sources:
        pytest.skip(f"{kernel.name} reads no recipe that is tested here")
    return next((source for source in sources if source != recipe), recipe)


def _sources(kernel: Kernel, recipe: ScalingRecipe) -> Iterator[ScalingRecipe]:
    """Recipes that a kernel of `requantize` reads; those that other formats represent exactly come first."""
    sources = dict.fromkeys((MXFP4BlockScaling(), NVFP4BlockScaling(), recipe, *strategies.defaults()))
    return filter(partial(matches, kernel.recipe), filter(partial(knows, kernel), sources))


def round_trips_equal_dequantize_of_cast(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    function = getattr(api, kernel.op)
    uneven, full = arrays()
    ran = False
    for x, options in ((uneven, _STOCHASTIC), (full, {})):
        operand = place.array(x)
        back = run_alone(kernel, function, operand, recipe, **options)
        if back is not None:
            ran = True
            expect_numbers(kernel.op, place, back, reference.dequantize(reference.cast(x, recipe, CastOptions(**options))))
            expect_array_unchanged(place, operand, x.view(np.uint32))
    skip_unless_run(kernel, ran)


def options_of_round_trips_are_honoured(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """`axis=-2`, `scale=`, and `nonfinite="raise"`."""
    function, x = getattr(api, kernel.op), arrays()[1]
    other = reference.cast(x * np.float32(3), recipe)
    there = moved(other, place)
    scale, supplied = ((st.scale if st.global_scale is None else st.global_scale) for st in (other, there))
    ran = False
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        (_ALONG_ROWS, _ALONG_ROWS),
        ({"scale": supplied}, {"scale": scale}),
    )
    for kernel_options, options in cases if _supplies(recipe) else cases[:1]:
        back = run_alone(kernel, function, place.array(x), recipe, **kernel_options)
        if back is not None:
            ran = True
            expected = reference.dequantize(reference.cast(x, recipe, CastOptions(**options)))
            expect_numbers(f"{kernel.op} with {next(iter(kernel_options))}=", place, back, expected)
    _expect_nan_refused(kernel, function, recipe, place)
    skip_unless_run(kernel, ran)


# -- half precision, views and storages ------------------------------------------------------------------------------


def half_precision_and_views_cast_to_the_same_bytes(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """FP16 and BF16 inputs are converted to FP32 exactly; transposed views and stacked matrices give their copies' bytes."""
    full = arrays()[1]
    large = full * np.float32(2.0**20)  # beyond what FP16 holds
    cases: tuple[tuple[np.ndarray, str, bool, dict[str, Any]], ...] = (
        (full, "float16", False, _STOCHASTIC),
        (large[:5, :67], "bfloat16", True, {}),
        (full, "float32", True, _ALONG_ROWS),
        (large.reshape(2, 8, 256), "bfloat16", False, _ALONG_ROWS),
        (full.reshape(2, 8, 256)[..., :67], "float16", True, {}),
    )
    function, ran = getattr(api, kernel.op), False
    for numbers, dtype, view, options in cases:
        if dtype not in float_dtypes(place):
            continue
        if kernel.op == "cast_pair":
            options = {name: value for name, value in options.items() if name != "axis"}
        x = rounded(np.asarray(numbers, order="C"), dtype)
        operand = floats(place, x, dtype, view)
        before = place.words(operand).copy()
        result = run_alone(kernel, function, operand, recipe, **options)
        if result is None:
            continue
        ran = True
        what = f"of {dtype}" + " and a transposed array" * view
        try:
            _expect_cast(kernel.op, place, result, x, recipe, dtype, options)
        except AssertionError as e:
            raise AssertionError(f"{what}: {e}") from None
        expect_array_unchanged(place, operand, before)
    skip_unless_run(kernel, ran)


def _expect_cast(
    op: str, place: Place, result: Any, x: np.ndarray, recipe: ScalingRecipe, dtype: str, options: dict[str, Any]
) -> None:
    """Raise AssertionError unless the result of an operation on `x`, passed in a dtype, matches the generic algorithm."""
    if op == "cast_pair":
        for st, axis in zip(result, (-1, -2), strict=True):
            expect_tensor(place, st, reference.cast(x, recipe, CastOptions(axis=axis, **options)))
        return
    st = reference.cast(x, recipe, CastOptions(**options))
    if op == "cast":
        expect_tensor(place, result, st)
    elif dtype == "float32":
        expect_numbers(op, place, result, reference.dequantize(st))
    else:
        expect(dtype_name(result) == dtype, f"{op} gave {dtype_name(result)}")
        expect_words(op, place.words(result), half_words(reference.dequantize(st), dtype))


def views_decode_to_the_same_values(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """A transposed tensor, also of stacked matrices, decodes to the values of its copy; also in FP16 and with `out=`."""
    full = arrays()[1]
    ran = False
    columns = np.asarray(full.T, order="C")
    for x, axis, dtype in ((full, -1, "float32"), (columns, -2, "float32"), (full.reshape(2, 8, 256), -2, "float16")):
        st = reference.cast(x, recipe, CastOptions(axis=axis))
        operand = moved(st, place)
        expected = np.asarray(reference.dequantize(st).swapaxes(-1, -2), order="C")
        options: dict[str, Any] = {} if dtype == "float32" else {"out_dtype": dtype}
        if options and takes_out(place):
            options["out"] = floats(place, np.full(expected.shape, 7, np.float32), dtype)
        back = run_alone(kernel, api.dequantize, operand.mT, **options)
        if back is None:
            continue
        ran = True
        if dtype == "float32":
            expect_numbers("the transpose decoded", place, back, expected)
        else:
            expect("out" not in options or back is options["out"], "it did not return out=")
            expect(dtype_name(back) == dtype, f"out_dtype={dtype!r} gave {dtype_name(back)}")
            expect_words(f"the transpose decoded to {dtype}", place.words(back), half_words(expected, dtype))
        expect_tensor_unchanged(place, operand, st)
    skip_unless_run(kernel, ran)


def declared_storages_are_read_and_written(kernel: Kernel, recipe: ScalingRecipe, place: Place) -> None:
    """Operands in each storage of `Kernel.reads` give the plain result; each of `Kernel.writes` holds the plain bytes."""
    x = arrays()[1]
    tried = False
    plain = reference.cast(x, recipe)
    if kernel.op in ("cast", "cast_pair"):
        for name in storages_of(kernel.writes, plain):
            result = run_alone(kernel, getattr(api, kernel.op), place.array(x), recipe, storage=name)
            if result is not None:
                tried = True
                for st, axis in zip(result if kernel.op == "cast_pair" else (result,), (-1, -2), strict=False):
                    expect(st.storage == name, f"it wrote {st.storage!r} storage, not {name!r}")
                    expect_tensor(place, st.to_plain(), reference.cast(x, recipe, CastOptions(axis=axis)))
    elif kernel.op == "requantize":
        source = reference.cast(x, _source(kernel, recipe))
        expected = reference.requantize(source, recipe)
        for name in storages_of(kernel.reads, source):
            result = run_alone(kernel, api.requantize, moved(source, place).to_storage(name), recipe)
            if result is not None:
                tried = True
                expect_tensor(place, result, expected)
        for name in storages_of(kernel.writes, expected):
            result = run_alone(kernel, api.requantize, moved(source, place), recipe, storage=name)
            if result is not None:
                tried = True
                expect(result.storage == name, f"it wrote {result.storage!r} storage, not {name!r}")
                expect_tensor(place, result.to_plain(), expected)
    elif kernel.op == "dequantize":
        for name in storages_of(kernel.reads, plain):
            back = run_alone(kernel, api.dequantize, moved(plain, place).to_storage(name))
            if back is not None:
                tried = True
                expect_numbers(f"decoded from {name}", place, back, reference.dequantize(plain))
    else:
        tried = products.stored_operands_stay_within_the_error_bound(kernel, recipe, place)
    skip_unless_run(kernel, tried)


_ROUND_TRIP = (
    round_trips_equal_dequantize_of_cast,
    options_of_round_trips_are_honoured,
    half_precision_and_views_cast_to_the_same_bytes,
)


def a_history_follows_the_generic_algorithm(kernel: Kernel, recipe: DelayedScaling, place: Place) -> None:
    """Some steps from an empty history: an ordinary amax, one of zeros, of NaN and of Inf, and more than it keeps."""
    full = arrays()[1]
    recipe = dataclasses.replace(recipe, amax_history_len=3)
    steps = [full, full * np.float32(4), full * np.float32(0), full / np.float32(2), full, full]
    faulty = [np.where(np.arange(full.size).reshape(full.shape) == 7, np.float32(fault), full) for fault in ("nan", "-inf")]
    amaxes: Any = ()
    there: tuple[Any, Any] = (), 1.0
    scale: Any = 1.0
    ran = False
    for step, x in enumerate((*steps, *faulty, *steps)):
        operand, options = place.array(x), _ALONG_ROWS if step % 2 and kernel.op == "cast_and_record" else {}
        results = run_alone(kernel, getattr(api, kernel.op), operand, recipe, *there, **options)
        *tensors, amaxes, scale = getattr(reference, kernel.op)(
            x, recipe, amaxes, scale, *([] if kernel.op == "record_amax" else [CastOptions(**options)])
        )
        if results is None:
            there = place.array(np.asarray(amaxes)), place.array(np.asarray(scale))
            continue
        ran = True
        for found, expected in zip(results, tensors, strict=False):
            expect_tensor(place, found, expected)
        there = results[-2:]
        expect_numbers("amaxes", place, there[0], amaxes)
        expect_numbers("the scale", place, there[1], scale)
        expect_array_unchanged(place, operand, x.view(np.uint32))
    skip_unless_run(kernel, ran)


_LAWS: dict[str, tuple[Callable[..., None], ...]] = {
    "cast": (
        casts_write_the_bytes_of_the_generic_algorithm,
        options_of_a_cast_are_honoured,
        half_precision_and_views_cast_to_the_same_bytes,
    ),
    "dequantize": (
        decoded_values_match_the_generic_algorithm,
        options_of_dequantize_are_honoured,
        views_decode_to_the_same_values,
    ),
    "requantize": (requantize_writes_the_bytes_of_the_generic_algorithm, options_of_requantize_are_honoured),
    "cast_pair": (cast_pair_equals_two_casts, half_precision_and_views_cast_to_the_same_bytes),
    "record_amax": (a_history_follows_the_generic_algorithm,),
    "cast_and_record": (a_history_follows_the_generic_algorithm,),
    "cast_pair_and_record": (a_history_follows_the_generic_algorithm,),
    "cast_ste": _ROUND_TRIP,
}


def _expect_nan_refused(kernel: Kernel, function: Any, recipe: ScalingRecipe, place: Place) -> None:
    bad = arrays()[1]
    bad[3, 5] = np.nan
    with suppress(NonFiniteError):
        marked = run_alone(kernel, function, place.array(bad), recipe, nonfinite="raise")
        expect(marked is None, 'nonfinite="raise" did not raise for a NaN')
