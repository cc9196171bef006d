"""`matmul` on CUDA tensors of torch by kernels that decode quantized operands in registers; `fused_plans` has the idea."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from breccia.backend import ScaledTensor, checks, composites, dtype_name
from breccia_torch.ops import need_dense

from . import tuning
from .choices import Choose
from .cuda.fp8_matmul import check_out
from .facts import Hardware
from .fused import Given, Product, scaled
from .launch import Launcher, Remembered, current_stream, empty, on
from .operands import addresses, codes_of, components_of, facts_of, hardware, need_one_device, writable
from .plans import readable
from .prepare import Launch, needed
from .specs import Unsupported


def fused_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`matmul` as `breccia.matmul` documents it. a: an array, or a tensor of FP8; b: a ScaledTensor."""
    checks.check_matmul(a, b, bias)
    a, b = Operand(a, False), Operand(b, True)
    key = (a.facts, b.facts, out_dtype, None if bias is None else (bias.dtype, bias.device))
    call = _calls.get(key)
    if call is None:
        try:
            call = _made(a, b, bias, out_dtype)
        except Unsupported as e:
            call = str(e)
        _calls.keep(key, call)
    if isinstance(call, str):
        return composites.matmul(a.given, b.given, bias, out_dtype, out)
    with on(call.device):
        return call(a, b, bias, out)


#: Prepared calls; for calls that the kernels do not support, the reason.
_calls = Remembered()


class Operand:
    """An operand whose numbers or codes are in C order: with K last, or codes of b also with K first.

    given: the operand of the call. x: it, or the transpose of b, in C order; a copy where it is in neither order.
    """

    def __init__(self, given: Any, second: bool) -> None:
        self.given, self.scaled = given, isinstance(given, ScaledTensor)
        data = given.data if self.scaled else given
        need_dense(data)
        swapped = second and not data.is_contiguous() and data.mT.is_contiguous()
        x = given.mT if swapped else given
        if not (swapped or data.is_contiguous()):
            x = _contiguous(given) if self.scaled else given.contiguous()
        self.x: Any = x
        self.k_last = swapped == second
        own = facts_of(x) if self.scaled else _facts_of_array(x)
        self.facts = (swapped, *own)

    @property
    def data(self) -> Any:
        return self.x.data if self.scaled else self.x

    def described(self, merged: bool, found: Hardware) -> Given:
        """Its facts. merged: leading axes are rows, where they can be. Raises Unsupported."""
        if self.scaled:
            st = self.x
            return scaled(codes_of(st, needed(readable(st.recipe, st.layout)), merged, found), st.recipe.format)
        *lead, rows, depth = self.x.shape
        count = math.prod(lead)
        matrices, rows = (1, count * rows) if merged else (count, rows)
        return Given(matrices, rows, depth, True, dtype_name(self.x), aligned=self.x.data_ptr() % 16 == 0)


def _facts_of_array(x: Any) -> tuple[Any, ...]:
    """What a call for an array depends on."""
    return x.shape, x.dtype, x.device, x.data_ptr() % 16 == 0


def _contiguous(st: ScaledTensor) -> ScaledTensor:
    """The tensor with codes in C order."""
    return ScaledTensor.from_parts(
        st.data.contiguous(), st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.padding
    )


def _arrays(a: Operand, b: Operand, bias: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a call, by what they are."""
    yield "bias", bias
    for name, operand in (("a", a), ("b", b)):
        yield f"{name}'s codes" if operand.scaled else name, operand.data
        if operand.scaled:
            yield f"{name}'s scale", operand.x.scale
            yield f"{name}'s zero-point", operand.x.zero_point
            yield f"{name}'s global scale", operand.x.global_scale


def _made(a: Operand, b: Operand, bias: Any, out_dtype: str) -> Call:
    """The call for these arguments, tuned on request. Raises Unsupported."""
    device = a.data.device
    need_one_device(device, _arrays(a, b, bias))
    if 0 in (*a.given.shape, *b.given.shape):
        raise Unsupported("an empty tensor")
    found = hardware(device)

    def made(choose: Choose) -> Product:
        return prepared(a, b, bias, out_dtype, found, choose)

    def compiled(product: Product) -> Any:
        call = Call(a, b, out_dtype, product)
        return lambda: call(a, b, bias, None)

    return Call(a, b, out_dtype, tuning.tuned(made, launches, compiled, device, found.name))


def prepared(a: Operand, b: Operand, bias: Any, out_dtype: str, found: Hardware, choose: Choose) -> Product:
    """A call prepared for hardware under choices. Raises Unsupported."""
    sides = a.described(math.prod(b.given.shape[:-2]) == 1, found), b.described(False, found)
    return Product(*sides, None if bias is None else dtype_name(bias), out_dtype, found, choose)


def launches(product: Product) -> list[Launch]:
    """The kernels of a product."""
    return [product.launch] if product.sum is None else [product.launch, product.sum]


class Call:
    """What products of equal shapes, dtypes, recipes and orders of memory have in common: their kernels, compiled."""

    def __init__(self, a: Operand, b: Operand, out_dtype: str, product: Product) -> None:
        left, right = tuple(a.given.shape), tuple(b.given.shape)
        self.device, self.dtype = a.data.device, getattr(torch, out_dtype)
        self.shape = (*torch.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])
        self.product = product
        self.launcher = Launcher(product.launch)
        self.sum = None if product.sum is None else Launcher(product.sum)

    def __call__(self, a: Operand, b: Operand, bias: Any, out: Any) -> Any:
        """The product, on the current device."""
        shape, dtype, device = self.shape, self.dtype, self.device
        if out is not None:
            check_out(out, shape, dtype)
        stream = current_stream(device)
        to = out if writable(out, shape, dtype, device) else empty(shape, dtype, device)
        added = [] if bias is None else [bias.contiguous()]
        operands = [*_components(a), *_components(b)]
        if self.sum is None:
            numbers = addresses([*added, to], 1 + len(added))
            self.launcher(stream, (*operands, *numbers))
        else:
            parts = empty(self.product.parts, torch.float32, device)
            self.launcher(stream, (*operands, *addresses([parts], 1)))
            numbers = addresses([parts, *added, to], 2 + len(added))
            self.sum(stream, numbers)
        return to if out is None or to is out else out.copy_(to)


def _components(operand: Operand) -> list[Any]:
    """What the kernel reads of an operand."""
    return addresses(components_of(operand.x)) if operand.scaled else addresses([operand.x], 1)
