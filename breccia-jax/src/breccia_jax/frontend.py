"""JAX's frontend: each op is one function that JAX compiles once per recipe, shape and set of options.

Calls inside traced functions share it. Kernels are chosen at trace time and receive tracers. Kernels are not differentiated:
each differentiable op defines its tangent here, in operations that JAX can transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from breccia import ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import (
    DEFAULT,
    FLOAT32,
    CastOptions,
    Kind,
    Operation,
    Prefer,
    ProductOptions,
    calls,
    packing,
    product_options,
    reference,
    registry,
    targets,
)
from breccia.internal import Table, keeps_parts, named

from . import cpu
from .container import untransposed
from .meshes import automatic, check_operand, like_first, product
from .ops import JAX, dot

Array = Any
Names = tuple[str, ...] | None
#: Which of two operands are passed as the tensors that they are the transposes of.
Turned = tuple[bool, bool]


def runner_of(op: Operation) -> Callable[[tuple[Any, ...], Prefer], Any]:
    """Calls of the op with its gradient: f((*arguments, options), prefer)."""
    function = _function_of(op)
    return lambda arguments, prefer: function(*arguments, prefer=prefer)


def _function_of(op: Operation) -> Callable[..., Any]:
    """The op with its gradient, compiled where that is faster. Ops without a function here follow their declaration."""
    own = {"cast": cast, "cast_pair": cast_pair, "dequantize": dequantize, "requantize": requantize, "matmul": matmul}
    own |= {"cast_matmul": cast_matmul, "grouped_matmul": grouped_matmul}
    if op.name in own:
        return own[op.name]
    beside = any(kind in (Kind.BESIDE, Kind.NUMBER) for _, kind in op.arguments)
    return calls.function_of(op) if beside or op.scaled else _declared(op)


def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> ScaledTensor:
    """Codes have no gradient."""
    options = _with_array(options)
    if cpu.runs("cast", x, None, recipe, options, prefer) or _eager(x, options):
        return calls.cast(x, recipe, options, prefer=prefer)
    arrays = x, options.scale, _words(options), options.importance
    return _cast(*arrays, recipe, _static(options), *_names_and_table(prefer))


def cast_pair(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """Codes have no gradient."""
    options = _with_array(options)
    if cpu.casts("cast_pair", x, recipe, options, prefer) or _eager(x, options):
        return calls.cast_pair(x, recipe, options, prefer=prefer)
    return _cast_pair(x, options.scale, _words(options), recipe, _static(options), *_names_and_table(prefer))


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """No gradient passes to the components: that of a scale alone is not that of a weight."""
    if options.out is not None or cpu.runs("dequantize", st, prefer=prefer):
        return calls.dequantize(st, options, prefer=prefer)
    return _dequantize(st, options.out_dtype, *_names_and_table(prefer))


def requantize(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> ScaledTensor:
    """Compiled if it computes something and reads no values."""
    options = _with_array(options)
    layout = st.layout.plain
    if options.scale is None and keeps_parts(st.recipe, layout, st.axis, recipe) and options.nonfinite == "propagate":
        return calls.requantize(st, recipe, options, prefer=prefer)
    if options.out is not None or options.require_exact or options.nonfinite != "propagate" or not _traceable(options.scale):
        by = reference.Primitives(cast, dequantize)
        return reference.requantize(st, recipe, options, by)
    if prefer is None and cpu.recasts(st, recipe, options):
        return cast(dequantize(st), recipe, options.replace(axis=st.axis))
    return _requantize(st, options.scale, _words(options), recipe, _static(options), *_names_and_table(prefer))


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """Differentiable in plain array operands and in the bias."""
    if options.out is not None or cpu.runs("matmul", a, b, options=product_options("float32", options.bias), prefer=prefer):
        return calls.matmul(a, b, options, prefer=prefer)
    (a, first), (b, second) = untransposed(a), untransposed(b)
    return _matmul(a, b, options.bias, options.out_dtype, (first, second), *_names_and_table(prefer))


def cast_matmul(x: Array, recipe: ScalingRecipe, b: Any, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """Differentiable in `x`, straight through its cast, and in the other operands like `matmul`."""
    if prefer is None and cpu.casts_and_multiplies(x, recipe, b, options.bias):
        return calls.cast_matmul(x, recipe, b, options)
    b, turned = untransposed(b)
    return _cast_matmul(x, b, options.bias, recipe, options.out_dtype, turned, *_names_and_table(prefer))


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32, prefer: Prefer = None) -> Array:
    """Differentiable in plain array operands."""
    if options.out is not None:
        return calls.grouped_matmul(a, b, offsets, options, prefer=prefer)
    return _grouped_matmul(a, b, offsets, options.out_dtype, *_names_and_table(prefer))


def _declared(op: Operation) -> Callable[..., Any]:
    """An op of arrays by its declaration. Kernels are not differentiated: its derivative is, or nothing is."""
    function = calls.function_of(op)

    def run(*arguments: Any, prefer: Prefer = None) -> Any:
        *arrays, options = op.with_defaults(arguments) if op.options else (*arguments, DEFAULT)
        recipe = None if op.target is None else arrays.pop(op.target)
        if not isinstance(options, CastOptions):
            return function(*arguments, prefer=prefer)
        options = _with_array(options)
        alone = recipe is not None and op.second is None and op.composite is not None
        if (alone and cpu.casts(op.name, arrays[0], recipe, options, prefer)) or _eager(arrays, options):
            positional = _in_place(op, arrays, recipe)
            return function(*positional, options, prefer=prefer) if op.options else function(*positional, prefer=prefer)
        static, compiled = _Static(op.name, recipe, options.clip, _static(options)), _run
        if alone and op.derivative is not None and cpu.casts(op.name, _primal(arrays[0]), recipe, options, prefer):
            compiled = _elementwise  # differentiated outside of compiled functions
        return compiled(tuple(arrays), options.scale, _words(options), static, *_names_and_table(prefer))

    return run


def _in_place(op: Operation, arrays: Sequence[Array], recipe: Any) -> list[Any]:
    """The arrays with the recipe at its place among the arguments."""
    positional = list(arrays)
    if op.target is not None:
        positional.insert(op.target, recipe)
    return positional


# -- what is compiled ------------------------------------------------------------------------------------------------
# The kernel table is an argument, so that a function traced with one table is not reused with another.


@partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _cast(
    x: Array, scale: Any, seed: Any, importance: Any, recipe: ScalingRecipe, static: Any, names: Names, table: Table
) -> ScaledTensor:
    _check_symbols(x, recipe, static[0])

    def run(x: Array, scale: Any, seed: Any, importance: Any) -> ScaledTensor:
        options = _options(static, scale, seed).replace(importance=importance)
        return calls.cast(lax.stop_gradient(x), recipe, options, prefer=names)

    return automatic(like_first, run, x, scale, seed, importance)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _cast_pair(x: Array, scale: Any, seed: Any, recipe: ScalingRecipe, static: Any, names: Names, table: Table) -> Any:
    _check_symbols(x, recipe, -1, -2)

    def run(x: Array, scale: Any, seed: Any) -> Any:
        return calls.cast_pair(lax.stop_gradient(x), recipe, _options(static, scale, seed), prefer=names)

    return automatic(like_first, run, x, scale, seed)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _dequantize(st: ScaledTensor, out_dtype: str, names: Names, table: Table) -> Array:
    def run(st: ScaledTensor) -> Array:
        return calls.dequantize(_fixed(st), product_options(out_dtype), prefer=names)

    return automatic(like_first, run, st)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _requantize(
    st: ScaledTensor, scale: Any, seed: Any, recipe: ScalingRecipe, static: Any, names: Names, table: Table
) -> ScaledTensor:
    _check_symbols(st, recipe, st.axis)

    def run(st: ScaledTensor, scale: Any, seed: Any) -> ScaledTensor:
        return calls.requantize(_fixed(st), recipe, _options(static, scale, seed), prefer=names)

    return automatic(like_first, run, st, scale, seed)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def _product(a: Any, b: Any, bias: Any, out_dtype: str, turned: Turned, names: Names, table: Table) -> Array:
    left, right = _fixed(a, "a", turned[0]), _fixed(b, "b", turned[1])
    return calls.matmul(left, right, product_options(out_dtype, bias), prefer=names)


@_product.defjvp
def _(out_dtype: str, turned: Turned, names: Names, table: Table, primals: Any, tangents: Any) -> tuple[Array, Array]:
    y = _product(*primals, out_dtype, turned, names, table)
    a, b = (_turned(operand, turn) for operand, turn in zip(primals[:2], turned, strict=True))
    return y, _tangent(dot, (a, b, primals[2]), tangents, y)


# Checkpoints: the backward pass decodes a weight again instead of saving it in FP32.
@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _matmul(a: Any, b: Any, bias: Any, out_dtype: str, turned: Turned, names: Names, table: Table) -> Array:
    def run(a: Any, b: Any, bias: Any) -> Array:
        return _product(a, b, bias, out_dtype, turned, names, table)

    return automatic(product, jax.checkpoint(run), a, b, bias)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6, 7))
def _cast_product(
    x: Array, b: Any, bias: Any, recipe: ScalingRecipe, out_dtype: str, turned: bool, names: Names, table: Table
) -> Array:
    return calls.cast_matmul(x, recipe, _fixed(b, "b", turned), product_options(out_dtype, bias), prefer=names)


@_cast_product.defjvp
def _(
    recipe: ScalingRecipe, out_dtype: str, turned: bool, names: Names, table: Table, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    x, b, bias = primals
    y = _cast_product(x, b, bias, recipe, out_dtype, turned, names, table)
    written = None if isinstance(b, ScaledTensor) else calls.cast(lax.stop_gradient(x), recipe)
    return y, _tangent(dot, (x, _turned(b, turned), bias), tangents, y, written)


@partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _cast_matmul(
    x: Array, b: Any, bias: Any, recipe: ScalingRecipe, out_dtype: str, turned: bool, names: Names, table: Table
) -> Array:
    _check_symbols(x, recipe, -1)

    def run(x: Array, b: Any, bias: Any) -> Array:
        return _cast_product(x, b, bias, recipe, out_dtype, turned, names, table)

    return automatic(product, jax.checkpoint(run), x, b, bias)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _grouped_product(a: Any, b: Any, offsets: Array, out_dtype: str, names: Names, table: Table) -> Array:
    return calls.grouped_matmul(_fixed(a, "a"), _fixed(b, "b"), offsets, product_options(out_dtype), prefer=names)


@_grouped_product.defjvp
def _(out_dtype: str, names: Names, table: Table, primals: Any, tangents: Any) -> tuple[Array, Array]:
    a, b, offsets = primals
    y = _grouped_product(a, b, offsets, out_dtype, names, table)
    product = partial(_grouped, offsets)
    return y, _tangent(product, (a, b, None), (*tangents[:2], None), y)


def _grouped(offsets: Array, a: Array, b: Array) -> Array:
    return JAX.grouped_matmul(a, b, offsets)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _grouped_matmul(a: Any, b: Any, offsets: Array, out_dtype: str, names: Names, table: Table) -> Array:
    def run(a: Any, b: Any, offsets: Array) -> Array:
        return _grouped_product(a, b, offsets, out_dtype, names, table)

    return automatic(product, jax.checkpoint(run), a, b, offsets)


def _tangent(product: Any, primals: Any, tangents: Any, y: Array, written: Any = None) -> Array:
    """The tangent of `a @ b + bias` in the dtype of `y`, for plain array operands. `written` replaces a cast `a`."""
    a, b, _ = primals
    da, db, dbias = tangents
    tangent = jnp.zeros(y.shape, jnp.float32)
    if not isinstance(a, ScaledTensor):
        tangent = tangent + product(JAX.f32(da), _values(b))
    if not isinstance(b, ScaledTensor):
        tangent = tangent + product(_values(a if written is None else written), JAX.f32(db))
    if dbias is not None:
        tangent = tangent + JAX.f32(dbias)
    return tangent.astype(y.dtype)


def _values(x: Any) -> Array:
    """An operand in FP32."""
    return calls.dequantize(_fixed(x)) if isinstance(x, ScaledTensor) else JAX.f32(x)


class _Static(NamedTuple):
    """What a compiled function of a declared op is compiled for."""

    name: str
    recipe: ScalingRecipe | None
    clip: Any
    options: tuple[int, str, str]

    @property
    def op(self) -> Operation:
        return registry().operation(self.name)

    def arguments(self, arrays: Sequence[Array], scale: Any, seed: Any) -> tuple[Any, ...]:
        """The arguments of the op."""
        positional = _in_place(self.op, arrays, self.recipe)
        return (*positional, _options(self.options, scale, seed, self.clip)) if self.op.options else tuple(positional)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _elementwise(arrays: tuple[Array, ...], scale: Any, seed: Any, static: _Static, names: Names, table: Table) -> Any:
    """A declared op, with tangents by its derivative."""
    return calls.function_of(static.op)(*static.arguments(arrays, scale, seed), prefer=names)


@_elementwise.defjvp
def _(static: _Static, names: Names, table: Table, primals: Any, tangents: Any) -> tuple[Any, Any]:
    arrays, scale, seed = primals
    y, op = _elementwise(*primals, static, names, table), static.op
    arguments = static.arguments(arrays, scale, seed)
    if op.is_straight(arguments[-1]):
        return y, tangents[0][0]
    function = targets.load(op.derivative)
    directions = enumerate(_in_place(op, tangents[0], None))
    terms = [function(calls, direction, n, *arguments) for n, direction in directions if direction is not None]
    return y, sum(terms[1:], terms[0])


@partial(jax.jit, static_argnums=(3, 4, 5))
def _run(arrays: tuple[Array, ...], scale: Any, seed: Any, static: _Static, names: Names, table: Table) -> Any:
    if static.recipe is not None:
        _check_symbols(arrays[0], static.recipe, static.options[0])

    def run(*inputs: Any) -> Any:
        *operands, scale, seed = inputs
        if static.op.derivative is None:
            arguments = static.arguments(jax.tree.map(lax.stop_gradient, operands), scale, seed)
            return calls.function_of(static.op)(*arguments, prefer=names)
        return _elementwise(tuple(operands), scale, seed, static, names, table)

    return automatic(like_first, run, *arrays, scale, seed)


# -- arguments -------------------------------------------------------------------------------------------------------


def _with_array(options: CastOptions) -> CastOptions:
    """The options with a supplied number as an array; otherwise each number would compile a new function."""
    scale = options.scale
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        return options
    with np.errstate(over="ignore"):
        return options.replace(scale=jax.device_put(np.asarray(float(scale), np.float32)))


def _words(options: CastOptions) -> Any:
    """The seed as an array of its two 32-bit words; otherwise each seed would compile a new function."""
    seed = options.seed
    if seed is None:
        return None
    words = JAX.words(seed)
    return jnp.stack(words) if isinstance(seed, jax.Array) else jax.device_put(np.array(words, np.int32))


def _static(options: CastOptions) -> tuple[int, str, str]:
    """The static options of a compiled function."""
    return options.axis, options.rounding, options.storage


def _options(static: tuple[int, str, str], scale: Any, seed: Any, clip: Any = None) -> CastOptions:
    axis, rounding, storage = static
    return CastOptions(axis, scale, rounding, seed, storage=storage, clip=clip)


def _names_and_table(prefer: Prefer) -> tuple[Names, Table]:
    """The preferred kernel names, and the table to look them up in."""
    return None if prefer is None else named(prefer), registry().table


def _traceable(scale: Any) -> bool:
    """Can a compiled function take it? The generic algorithm refuses other values with an error."""
    return scale is None or isinstance(scale, jax.Array)


def _eager(x: Any, options: CastOptions) -> bool:
    """Must the call run eagerly, because it raises or reads values (`out=`, a non-array scale, nonfinite="raise")?"""
    if options.out is not None or not _traceable(options.scale):
        return True
    return options.nonfinite == "raise" and any(JAX.any(~jnp.isfinite(array)) for array in jax.tree.leaves(x))


def _primal(x: Array) -> Any:
    """The array that is differentiated; a tracer in compiled functions."""
    while isinstance(x, Tracer) and (primal := getattr(x, "primal", None)) is not None:
        x = primal
    return x


def _check_symbols(x: Any, recipe: ScalingRecipe, *axes: int) -> None:
    """Raise UnsupportedError where codes that share bytes run along a symbolic axis whose padding is not known."""
    codes = packing(recipe.format.element)[0]
    for axis in axes:
        if codes == 1 or not -len(x.shape) <= axis < len(x.shape) or isinstance(-x.shape[axis] % codes, int):
            continue
        raise UnsupportedError(
            f"axis {axis} has the symbolic length {x.shape[axis]}, and {recipe.name!r} packs {codes} codes along it: the "
            "number of padding codes, which is static metadata, would depend on it. Export for a multiple, as in "
            f'jax.export.symbolic_shape("{codes}*n"), or cast along the other axis.',
            axis=axis,
            length=str(x.shape[axis]),
            codes=codes,
        )


def _turned(x: Any, turned: bool) -> Any:
    return x.mT if turned else x


def _fixed(x: Any, name: str = "st", turned: bool = False) -> Any:
    """The operand, the transpose of `x` if `turned`, with gradients stopped if it is scaled.

    Raises LayoutError for a shard that splits its blocks.
    """
    if not isinstance(x, ScaledTensor):
        return x
    check_operand(name, _turned(x, turned))
    return _turned(jax.tree.map(lax.stop_gradient, x), turned)
