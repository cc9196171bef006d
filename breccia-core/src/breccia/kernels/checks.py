"""Argument checks that read only shapes and dtypes, so that any layer can call them."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from ..arrays.frameworks import FLOATS, dtype_name, same_framework, shape_of
from ..codecs import F32
from ..errors import LayoutError, OptionError, RecipeError, ShapeError, UnsupportedError
from ..formats import TENSOR
from ..layouts import Layout, Shape
from ..options import CLIPS
from ..recipe_bases import ScalingRecipe, check_recipe
from ..recipe_fields import choices_of
from ..tensors.tensor import ScaledTensor

if TYPE_CHECKING:
    from ..arrays.ops import Ops

Array = Any


def check_cast(x: Array, recipe: Any) -> None:
    """Raise a typed error for an array or recipe that `cast` does not support."""
    check_recipe(recipe)
    if recipe.decode_only:
        raise UnsupportedError(
            f"cast does not write {recipe.spec}: {recipe.decode_only}. It is for data that exists; cast to another recipe.",
            recipe=recipe,
        )
    type_name = dtype_name(x) if hasattr(x, "dtype") else type(x).__name__
    if hasattr(x, "dtype") and type_name not in FLOATS:
        raise UnsupportedError(
            f"cast takes {', '.join(FLOATS)}; got {type_name}. "
            + (
                "Convert it first, so that the rounding to FP32 is explicit: x.astype('float32') (torch: x.float())."
                if type_name.startswith("float")
                else "Only floating-point numbers are quantized; wrap existing codes with breccia.from_buffer."
            ),
            found=type_name,
        )
    if hasattr(x, "dtype") and not shape_of(x):
        raise ShapeError("cast needs at least one axis; got a 0-D array. Reshape it to (1,).")


def check_importance(importance: Any, x: Array, recipe: ScalingRecipe, axis: int) -> None:
    """Raise a typed error unless `importance` has a number for each element of `x` along the contraction axis.

    Reads no values: those that are not positive numbers count as zero.
    """
    if not recipe.searches:
        rules = choices_of(type(recipe), "scale_rule")[0]
        way_out = (
            f"use {recipe.name!r} with scale_rule='mse'" if "mse" in rules else "its recipe has no such rule: leave it out"
        )
        raise OptionError(
            f"importance= weighs the errors that a search for scales compares, and {recipe.spec} searches for none; {way_out}.",
            recipe=recipe,
        )
    if recipe.format.rotation is not None:
        raise OptionError(
            f"importance= weighs columns, and the rotation of {recipe.spec} mixes {recipe.format.rotation.block} of them in "
            "every code; leave importance or rotation out.",
            recipe=recipe,
        )
    type_name = dtype_name(importance) if hasattr(importance, "dtype") else type(importance).__name__
    if not hasattr(importance, "dtype") or type_name not in FLOATS:
        raise UnsupportedError(
            f"importance= must be an array of {', '.join(FLOATS)}; got {type_name}. Convert it first.", found=type_name
        )
    same_framework({"x": x, "importance": importance})
    expected = (shape_of(x)[axis],)
    if shape_of(importance) != expected:
        raise ShapeError(
            f"importance= has a number for each element of x along its contraction axis ({axis}), shape {expected}; got shape "
            f"{shape_of(importance)}.",
            expected=expected,
            found=shape_of(importance),
        )


def check_weights(ops: Ops, importance: Array) -> None:
    """Raise OptionError where numbers of `importance` are negative, NaN or Inf, if they can be read."""
    if not ops.readable(importance):
        return
    numbers = ops.f32(importance)
    if ops.any(~((numbers >= 0) & (numbers <= F32.max))):
        raise OptionError(
            "importance= must be finite numbers that are not negative; it holds negative numbers, NaN or Inf. For the weight "
            "of a layer, use the mean square of each of its inputs."
        )


def check_searchable(recipe: ScalingRecipe) -> None:
    """Raise RecipeError where values are not codes times scales, which a search for scales compares."""
    fmt = recipe.format
    if fmt.offset != "none" or fmt.alternative is not None or fmt.factor != 1.0 or fmt.precision != "fp32":
        raise RecipeError(
            f"rule {recipe.rules[-1].name!r} searches for scales of formats whose values are codes times scales; {recipe.spec} "
            "has an offset, an alternative, a factor or another precision. Use another rule."
        )


def check_history(amaxes: Any, scale: Any) -> dict[str, Array]:
    """The arrays of an amax history by name: it may have no amaxes yet, (), and a number as its scale.

    Raises UnsupportedError for anything but FP32, ShapeError for shapes other than (n,) and ().
    """
    arrays: dict[str, Array] = {} if isinstance(amaxes, tuple | list) and not amaxes else {"amaxes": amaxes}
    if not isinstance(scale, Real) or isinstance(scale, bool):
        arrays["scale"] = scale
    for name, part in arrays.items():
        shape = shape_of(part, name) if hasattr(part, "dtype") else None
        if shape is None or dtype_name(part) != "float32":
            actual = type(part).__name__ if shape is None else f"an array of {dtype_name(part)}"
            wanted = "a float32 array, or () before the first update" if name == "amaxes" else "a float32 array or a number"
            raise UnsupportedError(f"AmaxHistory: {name} must be {wanted}; got {actual}. Convert it.", found=actual)
        if len(shape) != (name == "amaxes"):
            wanted = "(n,)" if name == "amaxes" else "()"
            raise ShapeError(f"AmaxHistory: {name} must have shape {wanted}; got {shape}. Reshape it.", found=shape)
    return arrays


def check_recorded(x: Any, recipe: Any, amaxes: Any, scale: Any, *options: Any) -> None:
    """`check_cast` and `check_history` with the arguments of an op that records."""
    check_cast(x, recipe)
    check_history(amaxes, scale)


def check_writable(name: str, out: Any) -> None:
    """Raise OptionError for a NumPy array that is read-only, before the first byte of a result is written."""
    if not getattr(getattr(out, "flags", None), "writeable", True):
        raise OptionError(f"{name} is read-only; pass an array that can be written, or call without out=.", name=name)


def fitted_layout(recipe: ScalingRecipe, shape: Shape, axis: int) -> Layout:
    """The layout of a cast of an array of `shape`. Raises ShapeError where the recipe needs a matrix."""
    layout = recipe.layout.oriented(axis)
    if layout.block(axis) != TENSOR and len(shape) < 2:
        raise ShapeError(
            f"{type(recipe).__name__} requires x.ndim >= 2, got {len(shape)} (shape {shape}); reshape x to "
            f"(1, {math.prod(shape)}).",
            shape=shape,
        )
    return layout.fitted(shape, axis)


def check_matmul(a: Any, b: Any, bias: Any = None) -> None:
    """Raise ShapeError or UnsupportedError unless `a @ b + bias` is defined for these shapes and dtypes of plain operands."""
    left, right = shape_of(a, "a"), shape_of(b, "b")
    if not (len(left) == 2 == len(right) and left[1] == right[0]):
        check_matmul_shapes(left, right)
    if isinstance(bias, ScaledTensor):
        raise UnsupportedError(
            "matmul: bias must be an array, and is a ScaledTensor; pass its values: breccia.dequantize(bias).",
            found="ScaledTensor",
        )
    if not isinstance(a, ScaledTensor) and a.dtype not in _FLOATS:
        check_float("a", a)
    if not isinstance(b, ScaledTensor) and b.dtype not in _FLOATS:
        check_float("b", b)
    if bias is None:
        return
    if bias.dtype not in _FLOATS:
        check_float("bias", bias)
    if shape_of(bias, "bias") != right[-1:]:
        raise ShapeError(
            f"matmul: bias has one number for each column of the product, shape {right[-1:]}; got {tuple(bias.shape)}.",
            expected=right[-1:],
            found=tuple(bias.shape),
        )


def check_float(name: str, x: Array) -> None:
    """Raise UnsupportedError unless `x` has a dtype that `matmul` supports."""
    if dtype_name(x) not in FLOATS:
        raise UnsupportedError(
            f"matmul takes ScaledTensors and {', '.join(FLOATS)} arrays; {name} is {dtype_name(x)}. Convert it first: "
            "x.astype('float32') (torch: x.float())."
        )
    if len(_FLOATS) < _REMEMBERED:
        _FLOATS.add(x.dtype)


#: Framework dtypes known to be floats that `matmul` supports.
_FLOATS: set[Any] = set()
_REMEMBERED = 64


def check_matmul_shapes(a: Shape, b: Shape) -> None:
    """Raise ShapeError unless (..., M, K) @ (..., K, N) is defined for these shapes."""
    if len(a) < 2 or len(b) < 2:
        raise ShapeError(
            f"matmul needs operands of at least two axes; got shapes {a} and {b}. Reshape a vector: x[None, :].", a=a, b=b
        )
    if a[-1] != b[-2]:
        raise ShapeError(
            f"matmul shape mismatch: a.shape[-1]={a[-1]} != b.shape[-2]={b[-2]} (shapes {a} and {b}). For a weight stored "
            "(N, K), multiply by its transpose: w.mT.",
            a=a,
            b=b,
        )
    for m, n in zip(reversed(a[:-2]), reversed(b[:-2]), strict=False):
        if m != n and 1 not in (m, n):
            raise ShapeError(f"matmul: leading axes {a[:-2]} and {b[:-2]} do not broadcast (shapes {a} and {b}).", a=a, b=b)


def check_product(a: Any, b: Any, options: Any) -> None:
    """`check_matmul` with the arguments of `matmul`."""
    check_matmul(a, b, options.bias)


def check_cast_product(x: Any, recipe: Any, b: Any, options: Any) -> None:
    """`check_matmul` with the arguments of `cast_matmul`."""
    check_matmul(x, b, options.bias)


def check_grouped_product(a: Any, b: Any, offsets: Any, options: Any) -> None:
    """`check_grouped` with the arguments of `grouped_matmul`."""
    check_grouped(a, b, offsets)


def check_cast_operand(x: Any, recipe: Any, *rest: Any) -> None:
    """`check_cast` with the arguments of an op that casts, and `check_importance` with its options."""
    check_cast(x, recipe)
    importance = getattr(rest[-1], "importance", None) if rest else None
    if importance is not None:
        check_importance(importance, x, recipe, rest[-1].axis)


def product_shape(a: Any, b: Any) -> Shape:
    """The shape of `a @ b` for operands that `check_matmul` accepts."""
    left, right = tuple(a.shape), tuple(b.shape)
    if len(left) == 2 == len(right):
        return left[0], right[1]
    ndim = max(len(left), len(right)) - 2
    pairs = zip((1,) * (ndim + 2 - len(left)) + left[:-2], (1,) * (ndim + 2 - len(right)) + right[:-2], strict=True)
    return (*(n if m == 1 else m for m, n in pairs), left[-2], right[-1])


def cast_product_shape(x: Any, recipe: Any, b: Any) -> Shape:
    """`product_shape` with the arguments of `cast_matmul`."""
    return product_shape(x, b)


def grouped_shape(a: Any, b: Any, offsets: Any) -> Shape:
    """The shape of a grouped product."""
    return a.shape[0], b.shape[-1]


def history_shape(x: Any, recipe: Any, amaxes: Any, scale: Any) -> Shape:
    """The shape of the amaxes after one more."""
    count = amaxes.shape[0] if hasattr(amaxes, "shape") else len(amaxes)
    return (min(count, recipe.amax_history_len - 1) + 1,)


def scalar_shape(*arguments: Any) -> Shape:
    """The shape of a scale for the whole tensor."""
    return ()


def check_grouped(a: Any, b: Any, offsets: Array) -> None:
    """Raise ShapeError, LayoutError or UnsupportedError unless `grouped_matmul` is defined for these operands."""
    left, right, ends = shape_of(a, "a"), shape_of(b, "b"), shape_of(offsets, "offsets")
    if len(left) != 2 or len(right) != 3 or ends != right[:1] or left[1] != right[1]:
        raise ShapeError(
            "grouped_matmul takes a of shape (M, K), b of shape (E, K, N) and offsets of shape (E,); got shapes "
            f"{left}, {right} and {ends}. Weights stored (E, N, K) are passed as w.mT.",
            a=left,
            b=right,
            offsets=ends,
        )
    if dtype_name(offsets) not in ("int32", "int64"):
        raise UnsupportedError(
            f"grouped_matmul: offsets are int32, where the rows of each group end; got {dtype_name(offsets)}.",
            found=dtype_name(offsets),
        )
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, ScaledTensor):
            check_float(name, x)
    if isinstance(a, ScaledTensor) and a.layout.block(a.axis)[0] not in (1, None):
        raise LayoutError(
            f"grouped_matmul: groups may begin at any row of a, so its blocks are one row high; {a.layout} has blocks of "
            f"{a.layout.block(a.axis)[0]}. Cast a under a recipe of 1 x k blocks.",
            layout=a.layout,
        )


def clip_bounds(
    recipe: ScalingRecipe, clip_min: float | None, clip_max: float | None, clip: str = "element"
) -> tuple[float, float] | None:
    """The range inside which gradients pass: `clip_min` and `clip_max`, else plus and minus the element codec's largest value.

    None where each block has its own range. Raises OptionError.
    """
    if clip not in CLIPS:
        raise OptionError(f"clip is one of {', '.join(CLIPS)}; got {clip!r}.", clip=clip)
    if clip == "scale":
        if clip_min is not None or clip_max is not None:
            raise OptionError('clip="scale" computes its own bounds; omit clip_min and clip_max.', clip=clip)
        return None
    high = recipe.format.element.max if clip_max is None else _bound("clip_max", clip_max)
    low = -high if clip_min is None else _bound("clip_min", clip_min)
    if not low < high:
        raise OptionError(f"clip_min must be less than clip_max; got {low} and {high}.", clip_min=low, clip_max=high)
    return low, high


def _bound(name: str, bound: Any) -> float:
    try:
        return float(bound)
    except Exception:  # each framework has its own error for traced numbers
        raise OptionError(f"{name} must be a number known at trace time; got {bound}.", **{name: bound}) from None
