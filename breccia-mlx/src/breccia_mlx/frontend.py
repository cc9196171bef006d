"""MLX's frontend: defines gradients between the ops of breccia and their kernels.

Kernels are not differentiated: each differentiable op is an MLX custom function with its own rules.

Straight-through gradients: Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et
al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from breccia.backend import DEFAULT, CastOptions, Metadata, Prefer, ScaledTensor, ScalingRecipe, calls, components, composites

from .ops import MLX, in_c_order, is_exporting, opaque, together

Array = Any
#: A tuple of arrays.
Arrays = Any


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> ScaledTensor:
    """Codes have no gradient."""
    return calls.cast(mx.stop_gradient(x), recipe, options, prefer)


def cast_pair(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """Codes have no gradient."""
    return calls.cast_pair(mx.stop_gradient(x), recipe, options, prefer)


# -- products --------------------------------------------------------------------------------------------------------


def matmul(
    a: Any,
    b: Any,
    bias: Array | None = None,
    out_dtype: str = "float32",
    out: Array | None = None,
    prefer: Prefer = None,
) -> Array:
    """Differentiable in plain array operands and in the bias."""
    if out is not None or (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor) and bias is None):
        return _multiplied(a, b, bias, out_dtype, out, prefer)

    def forward(a: Any, b: Any, bias: Any) -> Array:
        return _multiplied(a, b, bias, out_dtype, None, prefer)

    return _product(forward, None, _matmul_fp32, (a, b, bias))


def cast_matmul(
    x: Array,
    recipe: ScalingRecipe,
    b: Any,
    bias: Array | None = None,
    out_dtype: str = "float32",
    prefer: Prefer = None,
) -> Array:
    """Differentiable in `x`, straight through its cast, and in the other operands like `matmul`."""

    def forward(x: Any, b: Any, bias: Any) -> Array:
        with together(x, b, bias):
            return calls.cast_matmul(x, recipe, _captured(b), bias, out_dtype, prefer)

    return _product(forward, recipe, _matmul_fp32, (x, b, bias))


def grouped_matmul(
    a: Any, b: Any, offsets: Array, out_dtype: str = "float32", out: Array | None = None, prefer: Prefer = None
) -> Array:
    """Differentiable in plain array operands."""
    if out is not None or (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor)):
        return _grouped(a, b, offsets, out_dtype, out, prefer)

    def forward(a: Any, b: Any, offsets: Any) -> Array:
        return _grouped(a, b, offsets, out_dtype, None, prefer)

    return _product(forward, None, None, (a, b, offsets))


def _multiplied(a: Any, b: Any, bias: Array | None, out_dtype: str, out: Array | None, prefer: Prefer) -> Array:
    a, b = _captured(a), _captured(b)
    with together(a, b, bias):
        return calls.matmul(a, b, bias, out_dtype, out, prefer)


def _grouped(a: Any, b: Any, offsets: Array, out_dtype: str, out: Array | None, prefer: Prefer) -> Array:
    a, b = _captured(a), _captured(b)
    with together(a, b, offsets):
        return calls.grouped_matmul(a, b, offsets, out_dtype, out, prefer)


def _captured(x: Any) -> Any:
    """An operand as `mx.export_function` can write it."""
    return in_c_order(x) if is_exporting() and isinstance(x, ScaledTensor) else x


def _matmul_fp32(a: Any, b: Any) -> Array:
    return _multiplied(a, b, None, "float32", None, None)


class _Operand(NamedTuple):
    """How an operand is passed to a custom function.

    metadata and names of components: a scaled tensor that is flattened into arrays. captured: one in memory, which no
    transformation maps over; passed as arrays, its components would be other objects on each call.
    """

    metadata: Metadata | None
    names: tuple[str, ...]
    captured: ScaledTensor | None = None

    @classmethod
    def of(cls, x: Any) -> _Operand:
        if not isinstance(x, ScaledTensor):
            return cls(None, () if x is None else ("array",))
        parts = components(x)
        return cls(Metadata.of(x), tuple(parts)) if opaque(*parts.values()) is not None else cls(None, (), x)

    @property
    def scaled(self) -> bool:
        return self.metadata is not None or self.captured is not None


def _product(forward: Callable[..., Array], recipe: ScalingRecipe | None, product: Any, operands: tuple[Any, ...]) -> Array:
    """`forward` of two operands and a third array, with the rules of a product.

    recipe: the cast of the first operand. product: multiplies two operands in FP32; None for a grouped product, whose third
    array has the group ends.
    """
    how = [_Operand.of(x) for x in operands]

    def whole(arrays: Arrays) -> list[Any]:
        """The operands from their flattened arrays."""
        left, found = list(arrays), list[Any]()
        for metadata, names, captured in how:
            taken = [left.pop(0) for _ in names]
            if metadata is not None:
                found.append(metadata.assembled(**dict(zip(names, taken, strict=True))))
            else:
                found.append(taken[0] if taken else captured)
        return found

    def multiplied(a: Any, b: Any, third: Any) -> Array:
        return _grouped(a, b, third, "float32", None, None) if product is None else product(a, b)

    def in_product(a: Any) -> Any:
        """The first operand as it enters the product."""
        return a if recipe is None else calls.cast(a, recipe)

    def gradients(gradient: Array, *arrays: Array) -> Arrays:
        a, b, third = whole(arrays)
        found: list[Array] = []
        for place, (x, operand) in enumerate(zip((a, b, third), how, strict=True)):
            if operand.captured is not None:
                continue
            if operand.scaled or (product is None and place == 2):
                found += [mx.zeros_like(part) for part in (components(x).values() if operand.scaled else (x,))]
            elif place == 0:
                found.append(_summed(multiplied(gradient, _transposed(b), third), x))
            elif place == 1:
                left = in_product(a)
                found.append(_by_group(left, gradient, third, x) if product is None else _summed(product(left.mT, gradient), x))
            elif operand.names:
                found.append(_summed(MLX.f32(gradient), x))
        return tuple(found)

    def tangent(tangents: Arrays, *arrays: Array) -> Array:
        a, b, third = whole(arrays)
        da, db, dthird = whole(tangents)
        terms: list[Array] = []
        if not how[0].scaled:
            terms.append(multiplied(da, b, third))
        if not how[1].scaled:
            terms.append(multiplied(in_product(a), db, third))
        if product is not None and dthird is not None:
            terms.append(MLX.f32(dthird))
        y = sum(terms[1:], terms[0])
        return y

    flat: list[Array] = []
    for x, operand in zip(operands, how, strict=True):
        flat += components(x).values() if operand.metadata is not None else [x] if operand.names else []
    return _with_rules(lambda *arrays: forward(*whole(arrays)), gradients, tangent)(*flat)


def _transposed(x: Any) -> Any:
    return x.mT if isinstance(x, ScaledTensor) else MLX.swap(x)


def _summed(gradient: Array, like: Array) -> Array:
    """The gradient in the shape and dtype of `like`: summed over broadcast axes."""
    extra = gradient.ndim - like.ndim
    if extra:
        gradient = gradient.sum(axis=tuple(range(extra)))
    axes = tuple(n for n, (here, there) in enumerate(zip(gradient.shape, like.shape, strict=True)) if here != there)
    return (gradient.sum(axis=axes, keepdims=True) if axes else gradient).astype(like.dtype)


def _by_group(a: Any, gradient: Array, offsets: Array, b: Array) -> Array:
    """The gradient of high-precision matrices: for each, the sum over the rows of its group."""
    rows = calls.dequantize(a) if isinstance(a, ScaledTensor) else MLX.f32(a)
    row, start, found = mx.arange(rows.shape[0]), 0, list[Array]()
    for e in range(b.shape[0]):
        inside = mx.reshape((row >= start) & (row < offsets[e]), (-1, 1))
        # Inf and NaN stay within their group: elsewhere both factors are zero.
        mine, upstream = (mx.where(inside, x, mx.zeros_like(x)) for x in (rows, MLX.f32(gradient)))
        found.append(MLX.matmul(MLX.swap(mine), upstream))
        start = offsets[e]
    return mx.stack(found).astype(b.dtype) if found else mx.zeros_like(b)


# -- round trips -----------------------------------------------------------------------------------------------------


def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> Array:
    """The gradient passes unchanged."""

    def forward(x: Array, options: CastOptions) -> Array:
        return calls.cast_ste(x, recipe, options, prefer)

    return _straight(forward, x, recipe, None, options)


def cast_ste_clipped(
    x: Array, recipe: ScalingRecipe, clip: calls.Clip, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> Array:
    """The gradient passes where `x` is within the bounds."""

    def forward(x: Array, options: CastOptions) -> Array:
        return calls.cast_ste_clipped(x, recipe, clip, options, prefer)

    return _straight(forward, x, recipe, clip, options)


def _straight(forward: Any, x: Array, recipe: ScalingRecipe, clip: calls.Clip | None, options: CastOptions) -> Array:
    """The round trip of `x`; gradients of clipped elements are zero."""
    # Arguments, so that vmap maps over them too.
    arrays = {name: given for name in ("scale", "seed") if isinstance(given := options.get(name), mx.array)}

    def given(found: Arrays) -> CastOptions:
        return options.replace(**dict(zip(arrays, found, strict=True))) if arrays else options

    def value(x: Array, *arrays: Array) -> Array:
        return forward(x, given(arrays))

    def passed(gradient: Array, x: Array, *arrays: Array) -> Array:
        if clip is None:
            return gradient
        low, high = clip if clip != "scale" else composites.within_scales(x, recipe, given(arrays))
        # A select, not a product with the mask: an infinite gradient outside the bounds becomes zero too.
        return mx.where((x >= low) & (x <= high), gradient, mx.zeros_like(gradient))

    def gradients(gradient: Array, x: Array, *arrays: Array) -> Arrays:
        return passed(gradient, x, *arrays), *map(mx.zeros_like, arrays)

    def tangent(tangents: Arrays, x: Array, *arrays: Array) -> Array:
        return passed(tangents[0], x, *arrays)

    return _with_rules(value, gradients, tangent)(x, *arrays.values())


# -- rules -----------------------------------------------------------------------------------------------------------


def _with_rules(forward: Callable[..., Array], gradients: Callable[..., Arrays], tangent: Callable[..., Array]) -> Any:
    """`forward`, a function of arrays, with rules for MLX's transformations.

    gradients: f(gradient of the result, *arrays), gives a gradient per array. tangent: f(tangents of the arrays, *arrays),
    gives the tangent of the result. Functions that are exported have no such rules: MLX cannot write them.
    """
    if is_exporting():
        return forward
    function: Any = mx.custom_function(forward)

    @function.vjp
    def _(primals: Any, gradient: Array, output: Array) -> Any:
        found = gradients(gradient, *_listed(primals))
        return found if len(found) > 1 else found[0]

    @function.jvp
    def _(primals: Any, tangents: Any) -> Array:
        arrays = _listed(primals)
        given = zip(_listed(tangents), arrays, strict=True)  # None means a tangent of zeros
        return tangent(tuple(mx.zeros_like(x) if t is None else t for t, x in given), *arrays)

    @function.vmap
    def _(inputs: Any, axes: Any) -> tuple[Array, int]:
        # Without this rule MLX maps over `forward` itself and loses the other rules.
        arrays, along = _listed(inputs), _listed(axes)

        def each(gradient: Array, *arrays: Array) -> Arrays:
            found = mx.vmap(gradients, in_axes=(0, *along))(gradient, *arrays)
            listed = zip(_listed(found), along, strict=True)
            return tuple(_unmapped(one, axis) for one, axis in listed)

        def tangents(given: Arrays, *arrays: Array) -> Array:
            def flat(*both: Array) -> Array:
                half = len(both) // 2
                return tangent(both[:half], *both[half:])

            return mx.vmap(flat, in_axes=(*along, *along))(*given, *arrays)

        return _with_rules(mx.vmap(forward, in_axes=tuple(along)), each, tangents)(*arrays), 0

    return function


def _unmapped(gradient: Array, axis: int | None) -> Array:
    """Reduce per-example gradients to that of the array: move the mapped axis back, or sum over it if unmapped."""
    return gradient.sum(axis=0) if axis is None else mx.moveaxis(gradient, 0, axis)


def _listed(found: Any) -> list[Any]:
    """The arguments that MLX passes to a rule, as a list: MLX passes a single one without a sequence."""
    return list(found) if isinstance(found, list | tuple) else [found]
