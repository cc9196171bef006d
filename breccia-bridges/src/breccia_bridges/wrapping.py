"""Helpers of the bridges to other libraries' tensor classes: reading attributes, and errors that name the class and version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from reprlib import repr as short
from typing import Any

from breccia import (
    BrecciaError,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    INTScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.backend import PLAIN, TENSOR, Array, Block, dtype_name, ops_of

#: The recipes of integers, whose width is that of the format.
IntegerRecipe = INT4Scaling | INT8Scaling | INTScaling


def title(obj: Any) -> str:
    """The class of an object in messages, with the version of its library: "torchao's Float8Tensor (torchao 0.18.0)"."""
    kind = type(obj)
    package = kind.__module__.partition(".")[0]
    return f"{kind.__qualname__} ({package}{_version(package)})"


def _version(package: str) -> str:
    number = getattr(sys.modules.get(package), "__version__", None)
    if number is None:
        try:
            number = version(package)
        except PackageNotFoundError:
            return ", unknown version"
    return f" {number}"


def attribute(obj: Any, name: str) -> Any:
    """An attribute of a foreign object. Raises DialectError if the class lacks it: another version of the library."""
    try:
        return getattr(obj, name)
    except AttributeError:
        raise DialectError(
            f"{title(obj)} has no attribute {name!r}, which this bridge reads; it is of a version that breccia does not know. "
            "Wrap its buffers with breccia.from_buffer.",
            attribute=name,
        ) from None


def buffer(obj: Any, name: str) -> Array:
    """An attribute that is an array. Raises DialectError for others, also for None: buffers that were freed."""
    value = attribute(obj, name)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise DialectError(
            f"{title(obj)} has {name}={short(value)}, where this bridge reads an array. Quantize the tensor again, or wrap its "
            "buffers with breccia.from_buffer.",
            attribute=name,
            found=value,
        )
    return value


def buffer_or_none(obj: Any, name: str) -> Array | None:
    """An attribute that is an array or None. Raises DialectError for others."""
    return None if attribute(obj, name) is None else buffer(obj, name)


def lengths(obj: Any, name: str) -> list[int]:
    """An attribute that is a sequence of lengths, or None for none. Raises DialectError for others."""
    value = attribute(obj, name)
    listed: list[Any] = list(value) if isinstance(value, list | tuple) else []
    if value is not None and (not isinstance(value, list | tuple) or any(type(n) is not int or n < 1 for n in listed)):
        raise DialectError(
            f"{title(obj)} has {name}={short(value)}; this bridge reads a list of lengths.", attribute=name, found=value
        )
    return listed


def float8_recipe(fmt: str, block: Block) -> ScalingRecipe:
    """The recipe of FP8 codes of format `fmt` with an FP32 scale per block (m, k): all, (1, None) for rows, or two lengths."""
    if block == TENSOR:
        return Float8CurrentScaling(fmt)
    if block == (1, None):
        return Float8RowScaling(fmt)
    m, k = block
    assert m is not None and k is not None
    return Float8BlockScaling(fmt, block_k=k, block_m=m)


def integer_recipe(bits: int, group: int | None, length: int, **fields: Any) -> ScalingRecipe:
    """The recipe of codes of `bits` bits with a scale per `group` along a contraction axis of `length`; None is the whole axis.

    fields: of all integer recipes, such as `scale_dtype`.
    """
    if bits == 4:
        return INT4Scaling(group_size=group or length, **fields)
    return integers_of(bits)(group_size=None if group == length else group, **fields)


def integers_of(bits: int) -> Callable[..., ScalingRecipe]:
    """The recipe of integers of that width, without its other fields."""
    return {4: INT4Scaling, 8: INT8Scaling}.get(bits) or partial(INTScaling, bits)


def chosen(recipe: ScalingRecipe | None, inferred: ScalingRecipe, obj: Any) -> ScalingRecipe:
    """The recipe that the caller passed, or the inferred one. Raises DialectError if they decode differently."""
    if recipe is None:
        return inferred
    if recipe.format != inferred.format:
        raise DialectError(
            f"recipe={recipe!r} decodes differently than {title(obj)}, which is {inferred!r}. Omit recipe=, or pass "
            "one of that format.",
            recipe=recipe,
            inferred=inferred,
        )
    return recipe


def wrapped(obj: Any, data: Array, scale: Array, recipe: ScalingRecipe, **fields: Any) -> ScaledTensor:
    """A ScaledTensor of a foreign object's buffers. Raises DialectError where they contradict each other."""
    layout = fields.pop("layout", None) or recipe.layout
    try:
        return ScaledTensor(data, scale, recipe, layout, **fields)
    except BrecciaError as e:
        raise DialectError(f"{title(obj)} has buffers that contradict each other: {e}", **e.found) from e


def check_padding(st: ScaledTensor, what: str, name: str, remedy: str) -> None:
    """Raise DialectError if the padding of stored scales is not zero. Reads them, so a GPU is synchronized."""
    if st.layout.storage == PLAIN:
        return
    stored, again = st.scale, st.to_plain().to_storage(st.layout.storage).scale
    ops = ops_of(stored)
    differ = ops.load(stored) != ops.load(again)
    if ops.any(differ):
        nonzero = ops.to_numpy(stored)[ops.to_numpy(differ)].reshape(-1)[0]
        raise DialectError(
            f"{what}: the padding of {name} (shape {tuple(stored.shape)}, {dtype_name(stored)}) holds {nonzero}; padding "
            f"is zero. {remedy}",
            part=name,
            found=nonzero,
        )


def rounded_up(n: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-n // multiple) * multiple
