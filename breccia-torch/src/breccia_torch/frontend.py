"""torch's frontend: handles gradients, functorch and Dynamo between the ops of breccia and their kernels.

Kernels receive tensors that need no gradient; each differentiable op defines its gradient here, once. `operators` registers
the same definitions for compiled graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.autograd import Function, forward_ad

from breccia import NoKernelError, ScaledTensor, ScalingRecipe
from breccia.backend import (
    DEFAULT,
    FLOAT32,
    FLOATS,
    OPERATIONS,
    CastOptions,
    Kind,
    Metadata,
    Operation,
    Prefer,
    ProductOptions,
    calls,
    components,
    dtype_name,
    product_options,
    registry,
    targets,
)

from .ops import TORCH, autocast_dtype, need_dense, transforming, wrapped

Array = Any
#: Calls of an op: f((*arguments, options), prefer).
Run = Callable[[tuple[Any, ...], Prefer], Any]
#: A product with at most one scaled operand, f(a, b, out_dtype="float32"): the frontend's in eager mode, the operator in
#: compiled graphs.
Product = Callable[..., Array]


class Preferred(NamedTuple):
    """The kernels that a layer prefers for its product, and for the products that are its gradients."""

    forward: Prefer
    backward: Prefer


def runner_of(op: Operation) -> Run:
    """Calls of the op with its gradient: products have rules of their own, other ops those of their declaration."""
    own = {"matmul": matmul, "cast_matmul": cast_matmul, "grouped_matmul": grouped_matmul}.get(op.name)
    if own is None:
        own = _without_gradient(op) if op.derivative is None else _with_derivative(op)
    return outside_graphs(op, own)


def outside_graphs(op: Operation, function: Run) -> Run:
    """Hide a function from Dynamo, which may meet it where a function that it does not trace calls an op.

    While `torch.export` traces without Dynamo, one operator takes its place, as in compiled graphs.
    """

    @wraps(function)
    def called(arguments: tuple[Any, ...], prefer: Prefer) -> Any:
        if torch.compiler.is_exporting():
            return targets.load("breccia_torch.exporting:function_of")(op)(*arguments, prefer=prefer)
        if _frame_callback() is None or "torch._dynamo" not in sys.modules:  # loading Dynamo takes a second
            return function(arguments, prefer)
        disabled = getattr(function, "_disabled", None)
        if disabled is None:
            disabled = function._disabled = torch.compiler.disable(function)  # pyright: ignore[reportFunctionMemberAccess]
        return disabled(arguments, prefer)  # pyright: ignore[reportCallIssue]

    return called


#: What Dynamo does with the frames that this thread evaluates; None outside compiled functions. torch has no public API for it.
_frame_callback: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: ...)  # pyright: ignore


# -- ops other than products ------------------------------------------------------------------------------------------


def _without_gradient(op: Operation) -> Run:
    """The op on constants: codes and statistics have no gradient, and that of a scale alone is not that of a weight."""
    call, takes_options = calls.runner_of(op), isinstance(op.default, CastOptions)
    operands = tuple(n for n in range(1, len(op.arguments)) if n != op.target)
    constant = _fixed if op.arguments[0][1] is Kind.TENSOR else _detached

    def run(arguments: tuple[Any, ...], prefer: Prefer) -> Any:
        x = constant(arguments[0])
        changed = x is not arguments[0]
        if changed or operands or (takes_options and arguments[-1] is not DEFAULT):
            constants = list(arguments)
            constants[0] = x
            for n in operands:
                constants[n] = _fixed(constants[n]) if isinstance(constants[n], ScaledTensor) else _detached(constants[n])
            if takes_options:
                constants[-1] = _constant(constants[-1])
            arguments = tuple(constants)
        return call(arguments, prefer)

    return run


def _with_derivative(op: Operation) -> Run:
    """The op whose derivative is declared: a function of autograd where an operand is tracked."""
    constant = _without_gradient(op)

    def run(arguments: tuple[Any, ...], prefer: Prefer) -> Any:
        if _tracked(*arguments):
            options = arguments[-1]
            return _Elementwise.apply(op, prefer, options.scale, options.replace(scale=None), *arguments[:-1])
        return constant(arguments, prefer)

    return run


class _Elementwise(Function):
    """An op of which each element of the result depends on the elements of the operands at its place.

    A supplied scale is a separate argument, so that autograd detects changes to it before the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Operation, prefer: Prefer, scale: Any, options: CastOptions, *arguments: Any) -> Array:
        return _OPS.runner(op.name)((*arguments, _with_scale(options, scale)), prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        ctx.op, _, scale, ctx.options, *arguments = inputs
        ctx.straight = ctx.op.is_straight(ctx.options)
        if ctx.straight:
            return
        ctx.arguments = [None if isinstance(x, torch.Tensor) else x for x in arguments]
        ctx.number = None if isinstance(scale, torch.Tensor) else scale
        tensors = [x if isinstance(x, torch.Tensor) else None for x in (*arguments, scale)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        partials = [_derivative(ctx, gradients[0], n) if needed else None for n, needed in enumerate(ctx.needs_input_grad[4:])]
        return None, None, None, None, *partials

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        terms = [_derivative(ctx, tangent, n) for n, tangent in enumerate(tangents[4:]) if tangent is not None]
        return sum(terms[1:], terms[0])


def _derivative(ctx: Any, direction: Array, n: int) -> Array:
    """The direction times the partial derivative by argument n."""
    if ctx.straight:
        return direction.clone()  # an output that is an input would alias it
    *tensors, scale = ctx.saved_tensors
    arguments = [other if x is None else x for x, other in zip(tensors, ctx.arguments, strict=True)]
    options = _with_scale(ctx.options, ctx.number if scale is None else scale)
    return targets.load(ctx.op.derivative)(_OPS, direction, n, *arguments, options)


class _Constants:
    """The ops on constants, by name, for derivatives."""

    def __init__(self) -> None:
        self._runners: dict[str, Run] = {}

    def runner(self, name: str) -> Run:
        """Calls of the op of that name."""
        if name not in self._runners:
            self._runners[name] = _without_gradient(registry().operation(name))
        return self._runners[name]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = registry().operation(name)

        def function(*arguments: Any, prefer: Prefer = None) -> Any:
            return self.runner(name)(op.with_defaults(arguments), prefer)

        return function


_OPS = _Constants()


def _with_scale(options: CastOptions, scale: Any) -> CastOptions:
    return options if scale is None else options.replace(scale=scale)


# -- products --------------------------------------------------------------------------------------------------------


def matmul(arguments: tuple[Any, ...], prefer: Prefer) -> Array:
    """Differentiable in plain tensor operands and in the bias. prefer: kernels, or `Preferred` ones."""
    a, b, options = arguments
    out_dtype, bias, out = options
    prefer, backward = prefer if isinstance(prefer, Preferred) else (prefer, None)
    a, b = _fixed(a), _fixed(b)
    differentiated = _tracked(a, b)
    if out is None and (differentiated or (bias is not None and _tracked(bias))):
        if bias is not None and not differentiated and not wrapped(bias):  # a frozen layer: autograd adds it
            return _plus(_matmul((_detached(a), _detached(b), FLOAT32), prefer), bias, out_dtype)
        return _function_of_matmul().apply(a, b, bias, out_dtype, prefer, backward)
    if out is not None or not torch.is_grad_enabled():  # else none needs a gradient
        a, b, options = _detached(a), _detached(b), _constant_result(options)
    return _matmul((a, b, options), prefer)


def cast_matmul(arguments: tuple[Any, ...], prefer: Prefer) -> Array:
    """Differentiable in `x`, straight through its cast, and in the other operands like `matmul`."""
    x, recipe, b, options = arguments
    out_dtype, bias, _ = options
    b = _fixed(b)
    differentiated = _tracked(x, b)
    if differentiated or (bias is not None and _tracked(bias)):
        if bias is not None and not differentiated and not wrapped(bias):
            return _plus(_cast_matmul((_detached(x), recipe, _detached(b), FLOAT32), prefer), bias, out_dtype)
        return _CastMatmul.apply(x, recipe, b, bias, out_dtype, prefer)
    return _cast_matmul((_detached(x), recipe, _detached(b), _constant_result(options)), prefer)


def grouped_matmul(arguments: tuple[Any, ...], prefer: Prefer) -> Array:
    """Differentiable in plain tensor operands."""
    a, b, offsets, options = arguments
    a, b = _fixed(a), _fixed(b)
    if options.out is None and _tracked(a, b):
        return _GroupedMatmul.apply(a, b, offsets, options.out_dtype, prefer)
    return calls.grouped_matmul(_detached(a), _detached(b), offsets, options, prefer=prefer)


def _plus(product: Array, bias: Array, dtype: str) -> Array:
    """A product in FP32 plus the bias, rounded once."""
    total = product + (bias if bias.dtype == torch.float32 else bias.float())
    return total if dtype == "float32" else total.to(getattr(torch, dtype))


def _product(a: Any, b: Any, out_dtype: str = "float32", prefer: Prefer = None) -> Array:
    options = product_options(out_dtype)
    if prefer is not None:
        try:
            return matmul((a, b, options), prefer)
        except NoKernelError:
            pass  # it does not run for these operands, or on this device
    return matmul((a, b, options), None)


def _grouped_product(a: Any, b: Any, offsets: Array, out_dtype: str = "float32") -> Array:
    return grouped_matmul((a, b, offsets, product_options(out_dtype)), None)


class _Matmul(Function):
    """Autograd saves the operands unchanged: codes and scales, no weight in high precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, b: Any, bias: Any, out_dtype: str, prefer: Prefer, backward: Prefer) -> Array:
        return calls.matmul(_detached(a), _detached(b), product_options(out_dtype, _detached(bias)), prefer=prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        a, b, bias, ctx.out_dtype, _, ctx.prefer = inputs
        _keep(ctx, a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        a, b, bias = _operands(ctx)
        product = partial(_product, prefer=ctx.prefer)
        return *product_gradients(product, gradients[0], a, b, bias, ctx.needs_input_grad[:3]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        a, b, _ = _operands(ctx)
        return _tangent(_product, a, b, *tangents[:3]).to(getattr(torch, ctx.out_dtype))


class _ReverseMatmul(Function):
    """`_Matmul` for gradients alone. Where a function has a `setup_context`, torch binds its arguments anew at each call, which
    takes as long on the host as a small product."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b, bias, ctx.out_dtype, _, ctx.prefer = inputs
        _keep(ctx, a, b, bias, forward=False)
        return _Matmul.forward(*inputs)

    backward = _Matmul.backward


def _function_of_matmul() -> Any:
    """The function of autograd for products: functorch and forward-mode derivatives need all of it."""
    forward = forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
    return _Matmul if forward or transforming() else _ReverseMatmul


class _CastMatmul(Function):
    """Saves the uncast operand; its codes are recomputed where another operand's gradient needs them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Array, recipe: ScalingRecipe, b: Any, bias: Any, out_dtype: str, prefer: Prefer) -> Array:
        options = product_options(out_dtype, _detached(bias))
        return calls.cast_matmul(_detached(x), recipe, _detached(b), options, prefer=prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        x, ctx.recipe, b, bias, ctx.out_dtype, _ = inputs
        _keep(ctx, x, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        x, b, bias = _operands(ctx)
        first, _, *others, _, _ = ctx.needs_input_grad
        a = _OPS.cast(x, ctx.recipe, DEFAULT) if others[0] else x
        operand_gradients = product_gradients(_product, gradients[0], x, b, bias, (first, *others), written=a)
        return operand_gradients[0], None, operand_gradients[1], operand_gradients[2], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        x, b, _ = _operands(ctx)
        return _tangent(_product, _OPS.cast(x, ctx.recipe, DEFAULT), b, tangents[0], *tangents[2:4]).to(
            getattr(torch, ctx.out_dtype)
        )


class _GroupedMatmul(Function):
    """Products of groups. Autograd saves the operands unchanged."""

    @staticmethod
    def forward(a: Any, b: Any, offsets: Array, out_dtype: str, prefer: Prefer) -> Array:
        return calls.grouped_matmul(_detached(a), _detached(b), offsets, product_options(out_dtype), prefer=prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        a, b, offsets, *_ = inputs
        _keep(ctx, a, b, offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        a, b, offsets = _operands(ctx)
        return *grouped_gradients(_grouped_product, gradients[0], a, b, offsets, ctx.needs_input_grad[:2]), None, None, None


#: `matmul` for layers, which have checked their operands.
multiply = runner_of(OPERATIONS["matmul"])


_matmul, _cast_matmul = (calls.runner_of(OPERATIONS[name]) for name in ("matmul", "cast_matmul"))


def product_gradients(
    product: Product, gradient: Array, a: Any, b: Any, bias: Any, needed: Any, written: Any = None
) -> tuple[Any, Any, Any]:
    """The required gradients of `a @ b + bias`: products of the gradient with the transposed other operand.

    written: the cast operand that replaces `a` in the product.
    """
    left = right = added = None
    if needed[0] and not isinstance(a, ScaledTensor):
        left = _summed(product, gradient, b.mT, a, gradient)
    if needed[1] and not isinstance(b, ScaledTensor):
        right = _summed(product, (a if written is None else written).mT, gradient, b, gradient)
    if bias is not None and needed[2]:
        added = gradient.float().sum_to_size(bias.shape).to(bias.dtype)
    return left, right, added


def _summed(product: Product, x: Any, y: Any, like: Array, gradient: Array) -> Array:
    """The product in the shape and dtype of the operand `like`, rounded once, and summed where `like` was broadcast."""
    if gradient.shape[:-2] == like.shape[:-2] and dtype_name(like) in FLOATS:
        return product(x, y, dtype_name(like))
    return product(x, y).sum_to_size(like.shape).to(like.dtype)


def grouped_gradients(
    product: Any, gradient: Array, a: Any, b: Any, offsets: Array, needed: Any, values: Any = None
) -> tuple[Any, Any]:
    """The gradients of `grouped_matmul`. The gradient of a high-precision matrix sums over the rows of its group.

    values: converts an operand to FP32; by default `dequantize`.
    """
    left = right = None
    if needed[0] and not isinstance(a, ScaledTensor):
        dtype = dtype_name(a)
        left = product(gradient, b.mT, offsets, dtype) if dtype in FLOATS else product(gradient, b.mT, offsets).to(a.dtype)
    if needed[1] and not isinstance(b, ScaledTensor):
        rows = values(a) if values is not None else _OPS.dequantize(a, FLOAT32) if isinstance(a, ScaledTensor) else a.float()
        right = TORCH.k_grouped_matmul(rows.mT, gradient.float(), offsets).to(b.dtype)
    return left, right


def _tangent(product: Product, a: Any, b: Any, da: Any, db: Any, dbias: Any) -> Array:
    """The tangent of `a @ b + bias`, in FP32."""
    terms = [product(da, b)] if da is not None and not isinstance(da, ScaledTensor) else []
    terms += [product(a, db)] if db is not None and not isinstance(db, ScaledTensor) else []
    terms += [dbias.float()] if dbias is not None else []
    return sum(terms[1:], terms[0])


def _keep(ctx: Any, *operands: Any, forward: bool = True) -> None:
    """Save operands, ScaledTensors by component, so that autograd detects in-place changes before the backward pass.

    Components made under `torch.inference_mode` are copied, as autograd saves no such tensors.
    """
    saved: list[Any] = []
    ctx.operands = []
    for x in operands:
        names = tuple(components(x)) if isinstance(x, ScaledTensor) else ()
        ctx.operands.append((Metadata.of(x) if names else None, names))
        saved += [p.clone() if p.is_inference() else p for p in components(x).values()] if names else [x]
    ctx.save_for_backward(*saved)
    if forward:  # for forward-mode derivatives too
        ctx.save_for_forward(*saved)


def _operands(ctx: Any) -> list[Any]:
    """The operands that `_keep` saved."""
    saved, operands = iter(ctx.saved_tensors), list[Any]()
    for metadata, names in ctx.operands:
        operands.append(next(saved) if metadata is None else metadata.assembled(**{name: next(saved) for name in names}))
    return operands


def is_constant(x: Array) -> bool:
    """Can a layer call a kernel for `x` with nothing between: no gradient, autocast, transformation or compiler?"""
    return not (
        (x.requires_grad and torch.is_grad_enabled())
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or transforming()
        or autocast_dtype(x) is not None
        or _frame_callback() is not None
        or torch.compiler.is_exporting()
    )


# -- what needs a gradient -------------------------------------------------------------------------------------------


def _tracked(*operands: Any) -> bool:
    """Is any tensor among the operands differentiated or transformed?"""
    enabled, inside = torch.is_grad_enabled(), transforming()
    if enabled or inside:
        for x in operands:
            if isinstance(x, torch.Tensor) and ((enabled and x.requires_grad) or (inside and wrapped(x))):
                return True
    return forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def _trainable(x: ScaledTensor) -> bool:
    """Does any component need a gradient?"""
    zero_point, global_scale = x.zero_point, x.global_scale
    return (
        x.scale.requires_grad
        or x.data.requires_grad
        or (global_scale is not None and global_scale.requires_grad)
        or (zero_point is not None and zero_point.requires_grad)
    )


def _detached(x: Any) -> Any:
    """`x` without its gradient. Raises UnsupportedError for a nested tensor, whose shape is unknown."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.is_nested:
        need_dense(x)
    return x.detach() if x.requires_grad else x


def _constant(options: CastOptions) -> CastOptions:
    """The options with their tensors detached."""
    tensors = {"scale": options.scale, "importance": options.importance}
    tracked = {name: x.detach() for name, x in tensors.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    return options.replace(**tracked) if tracked else options


def _constant_result(options: ProductOptions) -> ProductOptions:
    """The options with the bias detached."""
    bias = options.bias
    return options if bias is None or not bias.requires_grad else options._replace(bias=bias.detach())


def _fixed(x: Any) -> Any:
    """The ScaledTensor with detached components."""
    if not isinstance(x, ScaledTensor) or not _trainable(x):
        return x
    return Metadata.of(x).assembled(**{name: part.detach() for name, part in components(x).items()})
