"""MLX's frontend: defines gradients between the ops of breccia and their kernels.

Kernels are not differentiated: each differentiable op is an MLX custom function with its own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from breccia import ScaledTensor, ScalingRecipe
from breccia.backend import (
    FLOAT32,
    Kind,
    Metadata,
    Operation,
    Prefer,
    ProductOptions,
    calls,
    components,
    product_options,
    targets,
)

from .ops import MLX, in_c_order, is_exporting, opaque, together

Array = Any
#: A tuple of arrays.
Arrays = Any


def runner_of(op: Operation) -> Callable[[tuple[Any, ...], Prefer], Any]:
    """Calls of the op with its gradient: f((*arguments, options), prefer)."""
    function = _function_of(op)
    return lambda arguments, prefer: function(*arguments, prefer=prefer)


def _function_of(op: Operation) -> Callable[..., Any]:
    """The op with its gradient: products have rules of their own, other ops those that follow from their declaration."""
    own = {"matmul": matmul, "cast_matmul": cast_matmul, "grouped_matmul": grouped_matmul}.get(op.name)
    if own is not None:
        return own
    return calls.function_of(op) if op.arguments[0][1] is not Kind.ARRAY else _declared(op)


# -- products --------------------------------------------------------------------------------------------------------


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """Differentiable in plain array operands and in the bias."""
    out_dtype, bias, out = options
    if out is not None or (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor) and bias is None):
        return _multiplied(a, b, options, prefer)

    def forward(a: Any, b: Any, bias: Any) -> Array:
        return _multiplied(a, b, product_options(out_dtype, bias), prefer)

    return _product(forward, None, _matmul_fp32, (a, b, bias))


def cast_matmul(x: Array, recipe: ScalingRecipe, b: Any, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """Differentiable in `x`, straight through its cast, and in the other operands like `matmul`."""

    def forward(x: Any, b: Any, bias: Any) -> Array:
        with together(x, b, bias):
            return calls.cast_matmul(x, recipe, _captured(b), product_options(options.out_dtype, bias), prefer=prefer)

    return _product(forward, recipe, _matmul_fp32, (x, b, options.bias))


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """Differentiable in plain array operands."""
    if options.out is not None or (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor)):
        return _grouped(a, b, offsets, options, prefer)

    def forward(a: Any, b: Any, offsets: Any) -> Array:
        return _grouped(a, b, offsets, options, prefer)

    return _product(forward, None, None, (a, b, offsets))


def _multiplied(a: Any, b: Any, options: ProductOptions, prefer: Prefer) -> Array:
    a, b = _captured(a), _captured(b)
    with together(a, b, options.bias):
        return calls.matmul(a, b, options, prefer=prefer)


def _grouped(a: Any, b: Any, offsets: Array, options: ProductOptions, prefer: Prefer) -> Array:
    a, b = _captured(a), _captured(b)
    with together(a, b, offsets):
        return calls.grouped_matmul(a, b, offsets, options, prefer=prefer)


def _captured(x: Any) -> Any:
    """An operand as `mx.export_function` can write it."""
    return in_c_order(x) if is_exporting() and isinstance(x, ScaledTensor) else x


def _matmul_fp32(a: Any, b: Any) -> Array:
    return _multiplied(a, b, FLOAT32, None)


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

    def operands_of(arrays: Arrays) -> list[Any]:
        """The operands from their flattened arrays."""
        left, operands = list(arrays), list[Any]()
        for metadata, names, captured in how:
            taken = [left.pop(0) for _ in names]
            if metadata is not None:
                operands.append(metadata.assembled(**dict(zip(names, taken, strict=True))))
            else:
                operands.append(taken[0] if taken else captured)
        return operands

    def multiplied(a: Any, b: Any, third: Any) -> Array:
        return _grouped(a, b, third, FLOAT32, None) if product is None else product(a, b)

    def in_product(a: Any) -> Any:
        """The first operand as it enters the product."""
        return a if recipe is None else calls.cast(a, recipe)

    def gradients(gradient: Array, *arrays: Array) -> Arrays:
        a, b, third = operands_of(arrays)
        by_array: list[Array] = []
        for place, (x, operand) in enumerate(zip((a, b, third), how, strict=True)):
            if operand.captured is not None:
                continue
            if operand.scaled or (product is None and place == 2):
                by_array += [mx.zeros_like(part) for part in (components(x).values() if operand.scaled else (x,))]
            elif place == 0:
                by_array.append(_summed(multiplied(gradient, _transposed(b), third), x))
            elif place == 1:
                left = in_product(a)
                by_array.append(
                    _by_group(left, gradient, third, x) if product is None else _summed(product(left.mT, gradient), x)
                )
            elif operand.names:
                by_array.append(_summed(MLX.f32(gradient), x))
        return tuple(by_array)

    def tangent(tangents: Arrays, *arrays: Array) -> Array:
        a, b, third = operands_of(arrays)
        da, db, dthird = operands_of(tangents)
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
    return _with_rules(lambda *arrays: forward(*operands_of(arrays)), gradients, tangent)(*flat)


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
    row, start, sums = mx.arange(rows.shape[0]), 0, list[Array]()
    for e in range(b.shape[0]):
        inside = mx.reshape((row >= start) & (row < offsets[e]), (-1, 1))
        # Inf and NaN stay within their group: elsewhere both factors are zero.
        mine, upstream = (mx.where(inside, x, mx.zeros_like(x)) for x in (rows, MLX.f32(gradient)))
        sums.append(MLX.matmul(MLX.swap(mine), upstream))
        start = offsets[e]
    return mx.stack(sums).astype(b.dtype) if sums else mx.zeros_like(b)


# -- other ops -------------------------------------------------------------------------------------------------------


def _declared(op: Operation) -> Callable[..., Any]:
    """An op of arrays by its declaration: with the rules of its derivative, or on constants."""
    function = calls.function_of(op)

    def constant(*arguments: Any, prefer: Prefer = None) -> Any:
        return function(*[mx.stop_gradient(x) if isinstance(x, mx.array) else x for x in arguments], prefer=prefer)

    def run(*arguments: Any, prefer: Prefer = None) -> Array:
        *positional, options = op.with_defaults(arguments) if op.options else (*arguments, None)
        # Arguments, so that vmap maps over all of them.
        supplied = [name for name in ("scale", "seed") if options is not None and isinstance(options.get(name), mx.array)]
        places = [n for n, x in enumerate(positional) if isinstance(x, mx.array)]

        def arguments_of(arrays: Sequence[Array]) -> list[Any]:
            """The arguments from their arrays."""
            arguments = list(positional)
            for n, x in zip(places, arrays, strict=False):
                arguments[n] = x
            if options is not None:
                extra = dict(zip(supplied, arrays[len(places) :], strict=True))
                arguments.append(options.replace(**extra) if extra else options)
            return arguments

        def value(*arrays: Array) -> Array:
            return function(*arguments_of(arrays), prefer=prefer)

        def partial(direction: Array, n: int, *arrays: Array) -> Array:
            arguments = arguments_of(arrays)
            if op.is_straight(arguments[-1]):
                return direction
            return targets.load(op.derivative)(calls, direction, n, *arguments)

        def gradients(gradient: Array, *arrays: Array) -> Arrays:
            extra = map(mx.zeros_like, arrays[len(places) :])
            return *(partial(gradient, n, *arrays) for n in places), *extra

        def tangent(tangents: Arrays, *arrays: Array) -> Array:
            terms = [partial(direction, n, *arrays) for n, direction in zip(places, tangents, strict=False)]
            return sum(terms[1:], terms[0])

        arrays = [*(positional[n] for n in places), *(getattr(options, name) for name in supplied)]
        return _with_rules(value, gradients, tangent)(*arrays)

    return constant if op.derivative is None else run


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
        by_array = gradients(gradient, *_listed(primals))
        return by_array if len(by_array) > 1 else by_array[0]

    @function.jvp
    def _(primals: Any, tangents: Any) -> Array:
        arrays = _listed(primals)
        pairs = zip(_listed(tangents), arrays, strict=True)  # None means a tangent of zeros
        return tangent(tuple(mx.zeros_like(x) if t is None else t for t, x in pairs), *arrays)

    @function.vmap
    def _(inputs: Any, axes: Any) -> tuple[Array, int]:
        # Without this rule MLX maps over `forward` itself and loses the other rules.
        arrays, along = _listed(inputs), _listed(axes)

        def each(gradient: Array, *arrays: Array) -> Arrays:
            per_example = mx.vmap(gradients, in_axes=(0, *along))(gradient, *arrays)
            listed = zip(_listed(per_example), along, strict=True)
            return tuple(_unmapped(one, axis) for one, axis in listed)

        def tangents(directions: Arrays, *arrays: Array) -> Array:
            def flat(*both: Array) -> Array:
                half = len(both) // 2
                return tangent(both[:half], *both[half:])

            return mx.vmap(flat, in_axes=(*along, *along))(*directions, *arrays)

        return _with_rules(mx.vmap(forward, in_axes=tuple(along)), each, tangents)(*arrays), 0

    return function


def _unmapped(gradient: Array, axis: int | None) -> Array:
    """Reduce per-example gradients to that of the array: move the mapped axis back, or sum over it if unmapped."""
    return gradient.sum(axis=0) if axis is None else mx.moveaxis(gradient, 0, axis)


def _listed(arguments: Any) -> list[Any]:
    """The arguments that MLX passes to a rule, as a list: MLX passes a single one without a sequence."""
    return list(arguments) if isinstance(arguments, list | tuple) else [arguments]
