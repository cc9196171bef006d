"""torch's frontend: handles gradients, functorch and Dynamo between the ops of breccia and their kernels.

Kernels receive tensors that need no gradient; each differentiable op defines its gradient here, once. `operators` registers
the same definitions for compiled graphs.

Straight-through gradients: Bengio, Leonard and Courville 2013 (arXiv 1308.3432), section 4; the clipped form as in Hubara et
al. 2016.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from breccia.backend import (
    DEFAULT,
    CastOptions,
    Metadata,
    Prefer,
    ScaledTensor,
    ScalingRecipe,
    calls,
    components,
    composites,
    targets,
)

from .ops import need_dense, transforming, wrapped

Array = Any
Clip = calls.Clip
#: A product with at most one scaled operand: the frontend's in eager mode, the operator in compiled graphs.
Product = Callable[[Any, Any], Array]


def outside_graphs(function: Any) -> Any:
    """Hide a function from Dynamo, which may meet it where a function that it does not trace calls an op.

    While `torch.export` traces without Dynamo, the function of that name in `exporting` is called.
    """

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_exporting():
            return targets.load(f"breccia_torch.exporting:{function.__name__}")(*arguments, **options)
        if _frame_callback() is None or "torch._dynamo" not in sys.modules:  # loading Dynamo takes a second
            return function(*arguments, **options)
        disabled = getattr(function, "_disabled", None)
        if disabled is None:
            disabled = function._disabled = torch.compiler.disable(function)
        return disabled(*arguments, **options)

    return called


#: What Dynamo does with the frames that this thread evaluates; None outside compiled functions. torch has no public API for it.
_frame_callback: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: ...)  # pyright: ignore


# -- ops without a gradient ------------------------------------------------------------------------------------------


@outside_graphs
def cast(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> ScaledTensor:
    """Codes have no gradient."""
    return calls.cast(_detached(x), recipe, options if options is DEFAULT else _constant(options), prefer)


@outside_graphs
def cast_pair(
    x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> tuple[ScaledTensor, ScaledTensor]:
    """Codes have no gradient."""
    return calls.cast_pair(_detached(x), recipe, _constant(options), prefer)


@outside_graphs
def record_amax(x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, prefer: Prefer = None) -> tuple[Array, Array]:
    """An amax has no gradient."""
    return calls.record_amax(_detached(x), recipe, _detached(amaxes), _detached(scale), prefer)


@outside_graphs
def cast_and_record(
    x: Array, recipe: ScalingRecipe, amaxes: Any, scale: Any, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> tuple[ScaledTensor, Array, Array]:
    """Neither codes nor an amax have a gradient."""
    return calls.cast_and_record(_detached(x), recipe, _detached(amaxes), _detached(scale), options, prefer)


@outside_graphs
def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Array | None = None, prefer: Prefer = None) -> Array:
    """No gradient passes to the components: that of a scale alone is not that of a weight."""
    return calls.dequantize(_fixed(st), out_dtype, out, prefer)


@outside_graphs
def requantize(
    st: ScaledTensor,
    recipe: ScalingRecipe,
    options: CastOptions = DEFAULT,
    require_exact: bool = False,
    prefer: Prefer = None,
) -> ScaledTensor:
    """Codes have no gradient."""
    return calls.requantize(_fixed(st), recipe, _constant(options), require_exact, prefer)


# -- products --------------------------------------------------------------------------------------------------------


@outside_graphs
def matmul(
    a: Any,
    b: Any,
    bias: Array | None = None,
    out_dtype: str = "float32",
    out: Array | None = None,
    prefer: Prefer = None,
) -> Array:
    """Differentiable in plain tensor operands and in the bias."""
    a, b = _fixed(a), _fixed(b)
    if out is None and _tracked(a, b, bias):
        if (
            bias is not None and not _tracked(a, b) and not wrapped(bias)
        ):  # a frozen layer: autograd differentiates the addition itself
            return _plus(calls.matmul(_detached(a), _detached(b), None, "float32", None, prefer), bias, out_dtype)
        return _Matmul.apply(a, b, bias, out_dtype, prefer)
    if out is not None or not torch.is_grad_enabled():  # else none needs a gradient
        a, b, bias = _detached(a), _detached(b), _detached(bias)
    return calls.matmul(a, b, bias, out_dtype, out, prefer)


@outside_graphs
def cast_matmul(
    x: Array,
    recipe: ScalingRecipe,
    b: Any,
    bias: Array | None = None,
    out_dtype: str = "float32",
    prefer: Prefer = None,
) -> Array:
    """Differentiable in `x`, straight through its cast, and in the other operands like `matmul`."""
    b = _fixed(b)
    if _tracked(x, b, bias):
        if bias is not None and not _tracked(x, b) and not wrapped(bias):
            return _plus(calls.cast_matmul(_detached(x), recipe, _detached(b), None, "float32", prefer), bias, out_dtype)
        return _CastMatmul.apply(x, recipe, b, bias, out_dtype, prefer)
    return calls.cast_matmul(_detached(x), recipe, _detached(b), _detached(bias), out_dtype, prefer)


@outside_graphs
def grouped_matmul(
    a: Any, b: Any, offsets: Array, out_dtype: str = "float32", out: Array | None = None, prefer: Prefer = None
) -> Array:
    """Differentiable in plain tensor operands."""
    a, b = _fixed(a), _fixed(b)
    if out is None and _tracked(a, b):
        return _GroupedMatmul.apply(a, b, offsets, out_dtype, prefer)
    return calls.grouped_matmul(_detached(a), _detached(b), offsets, out_dtype, out, prefer)


def _plus(product: Array, bias: Array, dtype: str) -> Array:
    """A product in FP32 plus the bias, rounded once."""
    found = product + (bias if bias.dtype == torch.float32 else bias.float())
    return found if dtype == "float32" else found.to(getattr(torch, dtype))


class _Matmul(Function):
    """Autograd saves the operands unchanged: codes and scales, no weight in high precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, b: Any, bias: Any, out_dtype: str, prefer: Prefer) -> Array:
        return calls.matmul(_detached(a), _detached(b), _detached(bias), out_dtype, None, prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        a, b, bias, ctx.out_dtype, _ = inputs
        _keep(ctx, a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        a, b, bias = _kept(ctx)
        return *product_gradients(matmul, gradients[0], a, b, bias, ctx.needs_input_grad[:3]), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        a, b, _ = _kept(ctx)
        return _tangent(matmul, a, b, *tangents[:3]).to(getattr(torch, ctx.out_dtype))


class _CastMatmul(Function):
    """Saves the uncast operand; its codes are recomputed where another operand's gradient needs them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Array, recipe: ScalingRecipe, b: Any, bias: Any, out_dtype: str, prefer: Prefer) -> Array:
        return calls.cast_matmul(_detached(x), recipe, _detached(b), _detached(bias), out_dtype, prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        x, ctx.recipe, b, bias, ctx.out_dtype, _ = inputs
        _keep(ctx, x, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        x, b, bias = _kept(ctx)
        first, _, *others, _, _ = ctx.needs_input_grad
        a = cast(x, ctx.recipe) if others[0] else x
        found = product_gradients(matmul, gradients[0], x, b, bias, (first, *others), written=a)
        return found[0], None, found[1], found[2], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        x, b, _ = _kept(ctx)
        return _tangent(matmul, cast(x, ctx.recipe), b, tangents[0], *tangents[2:4]).to(getattr(torch, ctx.out_dtype))


class _GroupedMatmul(Function):
    """As `_Matmul`, group by group."""

    @staticmethod
    def forward(a: Any, b: Any, offsets: Array, out_dtype: str, prefer: Prefer) -> Array:
        return calls.grouped_matmul(_detached(a), _detached(b), offsets, out_dtype, None, prefer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        a, b, offsets, *_ = inputs
        _keep(ctx, a, b, offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        a, b, offsets = _kept(ctx)
        return *grouped_gradients(grouped_matmul, gradients[0], a, b, offsets, ctx.needs_input_grad[:2]), None, None, None


def product_gradients(
    product: Product, gradient: Array, a: Any, b: Any, bias: Any, needed: Any, written: Any = None
) -> tuple[Any, Any, Any]:
    """The required gradients of `a @ b + bias`: products of the gradient with the transposed other operand.

    written: the cast operand that replaces `a` in the product.
    """
    left = right = added = None
    if needed[0] and not isinstance(a, ScaledTensor):
        left = product(gradient, b.mT).sum_to_size(a.shape).to(a.dtype)
    if needed[1] and not isinstance(b, ScaledTensor):
        right = product((a if written is None else written).mT, gradient).sum_to_size(b.shape).to(b.dtype)
    if bias is not None and needed[2]:
        added = gradient.float().sum_to_size(bias.shape).to(bias.dtype)
    return left, right, added


def grouped_gradients(
    product: Any, gradient: Array, a: Any, b: Any, offsets: Array, needed: Any, values: Any = None
) -> tuple[Any, Any]:
    """The gradients of `grouped_matmul`. The gradient of a high-precision matrix sums over the rows of its group.

    values: converts an operand to FP32; by default `dequantize`.
    """
    left = right = None
    if needed[0] and not isinstance(a, ScaledTensor):
        left = product(gradient, b.mT, offsets).to(a.dtype)
    if needed[1] and not isinstance(b, ScaledTensor):
        rows = values(a) if values is not None else dequantize(a) if isinstance(a, ScaledTensor) else a.float()
        row = torch.arange(a.shape[0], device=gradient.device)
        ends = offsets.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        inside = (row >= starts[:, None]) & (row < ends[:, None])
        upstream = gradient.float()  # Inf and NaN stay within their group: elsewhere both factors are zero
        each = [torch.where(m[:, None], rows, 0.0).mT @ torch.where(m[:, None], upstream, 0.0) for m in inside]
        right = torch.stack(each).to(b.dtype) if each else torch.zeros_like(b)
    return left, right


def _tangent(product: Product, a: Any, b: Any, da: Any, db: Any, dbias: Any) -> Array:
    """The tangent of `a @ b + bias`, in FP32."""
    terms = [product(da, b)] if da is not None and not isinstance(da, ScaledTensor) else []
    terms += [product(a, db)] if db is not None and not isinstance(db, ScaledTensor) else []
    terms += [dbias.float()] if dbias is not None else []
    return sum(terms[1:], terms[0])


def _keep(ctx: Any, *operands: Any) -> None:
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
    ctx.save_for_forward(*saved)


def _kept(ctx: Any) -> list[Any]:
    """The operands that `_keep` saved."""
    saved, found = iter(ctx.saved_tensors), list[Any]()
    for metadata, names in ctx.operands:
        found.append(next(saved) if metadata is None else metadata.assembled(**{name: next(saved) for name in names}))
    return found


# -- round trips -----------------------------------------------------------------------------------------------------


@outside_graphs
def cast_ste(x: Array, recipe: ScalingRecipe, options: CastOptions = DEFAULT, prefer: Prefer = None) -> Array:
    """The gradient passes unchanged."""
    return _round_trip(x, recipe, None, options, prefer)


@outside_graphs
def cast_ste_clipped(
    x: Array, recipe: ScalingRecipe, clip: Clip, options: CastOptions = DEFAULT, prefer: Prefer = None
) -> Array:
    """The gradient passes where `x` is within the bounds."""
    return _round_trip(x, recipe, clip, options, prefer)


def _round_trip(x: Array, recipe: ScalingRecipe, clip: Clip | None, options: CastOptions, prefer: Prefer) -> Array:
    if _tracked(x):
        return _Straight.apply(x, options.scale, recipe, clip, options, prefer)
    return round_trip(_detached(x), recipe, clip, _constant(options), prefer)


def round_trip(x: Array, recipe: ScalingRecipe, clip: Clip | None, options: CastOptions, prefer: Prefer = None) -> Array:
    """The value of `cast_ste`, or of `cast_ste_clipped` if there is a clip."""
    if clip is None:
        return calls.cast_ste(x, recipe, options, prefer)
    return calls.cast_ste_clipped(x, recipe, clip, options, prefer)


class _Straight(Function):
    """The round trip of `x`; gradients of clipped elements are zero.

    A supplied scale is a separate argument, so that autograd detects changes to it before the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Array, scale: Any, recipe: ScalingRecipe, clip: Any, options: CastOptions, prefer: Prefer) -> Array:
        found = round_trip(_detached(x), recipe, clip, options.replace(scale=_detached(scale)), prefer)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        x, scale, ctx.recipe, ctx.clip, options, _ = inputs
        ctx.options = options.replace(scale=None)
        if ctx.clip is not None:
            ctx.number = None if isinstance(scale, torch.Tensor) else scale
            kept = (x, scale if ctx.number is None else None)
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Array) -> tuple[Any, ...]:
        return _passed(ctx, gradients[0]), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Array:
        return _passed(ctx, tangents[0])


def _passed(ctx: Any, gradient: Array) -> Array:
    if ctx.clip is None:
        return gradient.clone()  # an output that is an input would alias it
    x, scale = ctx.saved_tensors
    options = ctx.options.replace(scale=ctx.number if scale is None else scale)
    return clipped_gradient(within_scales, gradient, x, ctx.clip, ctx.recipe, options)


def clipped_gradient(mask: Any, gradient: Array, x: Array, clip: Clip, *arguments: Any) -> Array:
    """The gradient where `x` is within the bounds, and zero elsewhere, even for an infinite gradient.

    mask: computes the mask of per-block bounds from x and the further arguments.
    """
    inside = mask(x, *arguments) if isinstance(clip, str) else (x >= clip[0]) & (x <= clip[1])
    return torch.where(inside, gradient, torch.zeros_like(gradient))


def within_scales(x: Array, recipe: ScalingRecipe, options: CastOptions) -> Array:
    """Mask of elements that do not saturate under the scales of their blocks; False for NaN."""
    with torch.no_grad():
        low, high = composites.within_scales(x, recipe, options)
        return (x >= low) & (x <= high)


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
    """The options with a supplied scale detached."""
    scale = options.scale
    if not isinstance(scale, torch.Tensor) or not scale.requires_grad:
        return options
    return options.replace(scale=scale.detach())


def _fixed(x: Any) -> Any:
    """The ScaledTensor with detached components."""
    if not isinstance(x, ScaledTensor) or not _trainable(x):
        return x
    return Metadata.of(x).assembled(**{name: part.detach() for name, part in components(x).items()})
