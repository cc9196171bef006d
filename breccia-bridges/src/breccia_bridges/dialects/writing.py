"""What all dialects need to write: refusals that name a recipe that works, and components as the parts of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from breccia import BrecciaError, DialectError, Format, OptionError, ScaledTensor, UnsupportedError
from breccia.backend import E8M0, NUMPY, Shape, StoredForm, ValueForm, as_recipe, registry, words

from ..text import spelled

_T = TypeVar("_T")
#: The dtypes of NumPy that hold what a file has. Those of a byte that are not here are uint8.
_NUMPY: dict[str, Any] = {
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "BF16": np.uint16,
}
#: What a side of a block that spans the tensor counts as, in `_differs`.
_ALL = 1 << 20


def refused(form: ValueForm, dialect: str, why: str = "") -> UnsupportedError:
    """The error for a form that a dialect does not hold: what it holds, and the recipe of these that is most like the form's.

    why: where the format alone is not what it refuses: a main clause, and what to do. Callers add the names of the value and of
    the dialect.
    """
    recipe = form.recipe
    if why:
        return UnsupportedError(f"{recipe.spec!r} of shape {spelled(form.shape)}: {why}.", recipe=recipe, shape=form.shape)
    specs = registry().dialects[dialect].recipes
    nearest = _nearest(specs, recipe.format)
    return UnsupportedError(
        f"it holds {', '.join(map(repr, specs))} and others of the same formats, not {recipe.spec!r}. The nearest is "
        f"{nearest!r}.",
        recipe=recipe,
        nearest=nearest,
    )


def check(form: ValueForm, dialect: str, misfit: Callable[[ValueForm], str | None]) -> None:
    """Raise UnsupportedError if a form has a misfit: why, and the nearest of the dialect's recipes that this shape has.

    misfit: why the dialect does not hold a form; None if it does.
    """
    why = misfit(form)
    if why is None:
        return
    specs = registry().dialects[dialect].recipes
    fitting = [spec for spec in specs if misfit(replace(form, recipe=as_recipe(spec), layout=None)) is None]
    if not fitting:
        remedy = "None of its recipes fits this shape: leave the value as it is, with exclude= (--exclude)."
        raise UnsupportedError(f"{why} {remedy}", recipe=form.recipe, shape=form.shape)
    nearest = _nearest(fitting, form.recipe.format)
    raise UnsupportedError(
        f"{why} The nearest recipe for it is {nearest!r}.", recipe=form.recipe, shape=form.shape, nearest=nearest
    )


def titled(dialect: str) -> str:
    """What messages call a dialect, with the name that users give: "modelopt (ModelOpt)"."""
    return f"{dialect} ({registry().dialects[dialect].title})"


def _nearest(specs: Sequence[str], fmt: Format) -> str:
    """The recipe whose format is most like another."""
    return min(specs, key=lambda spec: _differs(as_recipe(spec).format, fmt))


def _differs(one: Format, other: Format) -> tuple[float, ...]:
    """How two formats differ, what weighs most first: the codes, then the offset, the scales, the sizes of blocks."""

    def logarithms(fmt: Format) -> list[float]:
        return [math.log2(_ALL if side is None else side) for side in fmt.scale.block]

    return (
        abs(one.element.bits - other.element.bits),
        type(one.element) is not type(other.element),
        one.element.name != other.element.name,
        one.offset != other.offset,
        len(one.levels) != len(other.levels),
        one.scale.codec != other.scale.codec,
        sum(abs(a - b) for a, b in zip(logarithms(one), logarithms(other), strict=True)),
    )


def check_matrix(form: ValueForm, dialect: str, is_transposed: bool = False) -> None:
    """Raise UnsupportedError for vectors, groups by index, and where the contraction axis is not where the dialect has it.

    is_transposed: whether the dialect has the model's (..., K, N) there.
    """
    if len(form.shape) < 2:
        raise refused(form, dialect, "its weights have two axes or more; leave this one as it is: exclude= (--exclude)")
    if form.layout is not None and not form.layout.plain.in_order:
        raise refused(
            form, dialect, "its columns are in groups by index, which it has no place for; decode it first, with recipe 'bf16'"
        )
    if form.is_transposed and not is_transposed:
        raise refused(
            form, dialect, "its blocks run along the axis before the last of the model's value, and there along the last"
        )
    if is_transposed and not form.is_transposed:
        raise refused(form, dialect, "its blocks run along the last axis of the model's value, and there along the one before")


def check_not_stacked(form: ValueForm, dialect: str) -> None:
    """Raise UnsupportedError for a stack of matrices."""
    if len(form.shape) > 2:
        raise refused(form, dialect, "its weights are matrices, one for each expert")


def parts_of(st: ScaledTensor, stored: StoredForm, **ends: str) -> dict[str, np.ndarray]:
    """Components as the parts of a file, in the order, dtypes and shapes of `stored`: the inverse of `scales.assembled`.

    ends: the end of the name of each component's part, as `data="weight", scale="weight_scale"`.
    One number is repeated where the file has several. FP32 scales that the file has in E8M0 become the exponents' bytes.
    Arrays are views where the bytes are the same.
    Raises DialectError for scales that E8M0 does not hold, and for one scale per matrix where the file has one for all.
    """
    held = words(st.to_plain())
    parts = {end: held[component] for component, end in ends.items()}
    return {end: as_stored(parts[end], entry.dtype, entry.shape, end) for end, entry in stored.entries.items() if end in parts}


def as_stored(array: np.ndarray, dtype: str, shape: Shape, end: str) -> np.ndarray:
    """The array of a component in the dtype and the shape that it has in a file, as `parts_of` says."""
    if dtype in ("F8_E8M0", "U8") and array.dtype == np.float32:
        array = exponents(array, end)
    array = array.view(_NUMPY.get(dtype, np.uint8))
    if array.size == 1 != math.prod(shape):
        return np.broadcast_to(array.reshape(()), shape)
    if array.size != math.prod(shape):
        raise DialectError(
            f"{end!r} has {array.size} numbers of shape {spelled(array.shape)}; the file has {spelled(shape)} there."
        )
    return array.reshape(shape)


def exponents(scale: np.ndarray, end: str) -> np.ndarray:
    """FP32 powers of two as bytes of E8M0. Raises DialectError for other numbers."""
    codes = np.where(np.isnan(scale), 255, scale.view(np.uint32) >> 23).astype(np.uint8)
    same = np.equal(E8M0.read(NUMPY, codes), scale) | np.isnan(scale)
    if not np.all(same):
        raise DialectError(
            f"{end!r} is in E8M0, and {np.count_nonzero(~same)} of its scales are no powers of two, the first "
            f"{scale[~same][0]}. Write them in FP32: under a recipe with power_of_two_scale=false."
        )
    return codes


def inputs(dialect: str, activations: str | None, known: Mapping[str | None, _T]) -> _T:
    """What a config says of how layers quantize their inputs, by `activations`: a recipe's spec, "none", or None.

    known: what it says for each of these that the library has; recipes count by their formats.
    Raises OptionError for others.
    """
    if activations in known:
        return known[activations]
    if activations not in (None, "none"):
        try:
            fmt = as_recipe(activations).format
        except BrecciaError as e:
            raise OptionError(f"activations={activations!r} is no recipe: {e}", activations=activations) from e
        for spec, said in known.items():
            if spec not in (None, "none") and as_recipe(spec).format == fmt:
                return said
    has = [repr(spec if spec == "none" else as_recipe(spec).spec) for spec in known if spec is not None]
    raise OptionError(
        f"activations={activations!r}: layers of {titled(dialect)} with these weights have {' or '.join(has)}. Leave it out "
        "for what the library does by default.",
        activations=activations,
    )


def same_settings(dialect: str, stored: Mapping[str, StoredForm]) -> Mapping[str, Any]:
    """The settings of all modules, which have one config. Raises UnsupportedError where two differ."""
    modules = iter(stored.items())
    first, one = next(modules, ("", StoredForm({})))
    for name, other in modules:
        if other.settings != one.settings:
            raise UnsupportedError(
                f"{titled(dialect)} has one setting for all modules: {first!r} needs {dict(one.settings)}, "
                f"and {name!r} {dict(other.settings)}. Give both the same recipe, or keep one of them.",
            )
    return one.settings
