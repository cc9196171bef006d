"""`matmul` on JAX arrays on CUDA by kernels that decode quantized operands in registers; `gemm.fused.plans` has the idea.

A quantized `b` is read with K first, as JAX's layers keep weights; pairs of FP8 tensors with K last, as tensor cores read FP8.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from breccia import ScaledTensor
from breccia.backend import FLOAT32, Metadata, Ops, ProductOptions, checks, composites, ops_of, product_options, reference

from ..casts.plans import readable
from ..facts import Hardware
from ..gemm.fused.prepare import OperandFacts, Product, scaled
from ..specs import Unsupported, needed
from .calls import UNKNOWN, Shapes, as_integers, codes_of, components, is_array, placeholder, shapes_of, tensor_of
from .launch import OnGPU, launched, run


def fused_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it. a: an array, or a tensor of FP8; b: a ScaledTensor."""
    out_dtype, bias, out = options
    checks.check_matmul(a, b, bias)
    turned = isinstance(a, ScaledTensor)
    first, second = _arrays("a", a), _arrays("b", b.mT if turned else b)
    added = {} if bias is None else {"bias": bias}
    arrays = first | second | added
    if out is None and all(map(is_array, arrays.values())):
        metadata = Metadata.of(a) if turned else None, Metadata.of(b.mT if turned else b)
        call = Multiply(ops_of(b.data), shapes_of(first), shapes_of(second), shapes_of(added), *metadata, out_dtype)
        if isinstance(_product(call), Product):
            return run(call, list(arrays.values()))[0]
    return composites.matmul(a, b, options)


def _arrays(name: str, x: Any) -> dict[str, Any]:
    """The arrays of an operand by the parameters of the kernel."""
    if not isinstance(x, ScaledTensor):
        return {name: x}
    return {name + parameter[1:]: a for parameter, a in components(x).items()}


@dataclass(frozen=True)
class Multiply(OnGPU):
    """A call of `matmul`. first, second, added: the arrays of a, of b (or for an FP8 tensor a, of b.mT), and the bias."""

    ops: Ops
    first: Shapes
    second: Shapes
    added: Shapes
    a: Metadata | None
    b: Metadata
    dtype: str

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        left, right = (
            tuple(placeholder(metadata, _as_x(shapes)).shape)
            for metadata, shapes in ((self.a, self.first), (self.b, self.second))
        )
        lead = jnp.broadcast_shapes(left[:-2], right[:-2])
        return (((*lead, left[-2], right[-2 if self.a is not None else -1]), self.dtype),)

    def generic(self, *arrays: Any) -> list[Any]:
        by_name = dict(zip((name for name, _, _ in self.first + self.second + self.added), arrays, strict=True))
        a, b = (
            tensor_of(metadata, _as_x(shapes), [by_name[name] for name, _, _ in shapes])
            for metadata, shapes in ((self.a, self.first), (self.b, self.second))
        )
        return [reference.matmul(a, b if self.a is None else b.mT, product_options(self.dtype, by_name.get("bias")))]

    def kernels(self, hardware: Hardware, *arrays: Any) -> list[Any]:
        prepared = needed(_product(self, hardware))
        by_name = dict(zip((name for name, _, _ in self.first + self.second + self.added), arrays, strict=True))
        codes = {name for name, _, _ in (self.first if self.a is not None else ()) + self.second}
        inputs = by_name | as_integers({name: by_name[name] for name in codes})
        ((shape, dtype),) = self.results
        out = {"out": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))}
        if prepared.sum is None:
            return [launched(prepared.launch, inputs, out)["out"]]
        parts = launched(prepared.launch, inputs, {"out": jax.ShapeDtypeStruct(prepared.parts, jnp.float32)})["out"]
        return [launched(prepared.sum, {"parts": parts, **inputs}, out)["out"]]


def _as_x(shapes: Shapes) -> Shapes:
    """The arrays of an operand by the parameters of other kernels."""
    return tuple((f"x{name[1:]}", shape, dtype) for name, shape, dtype in shapes)


@lru_cache(maxsize=4096)
def _product(call: Multiply, hardware: Hardware = UNKNOWN) -> Product | str:
    """The kernels of a call, or why they do not support it."""
    try:
        if 0 in call.results[0][0]:
            raise Unsupported("an empty tensor")
        b = _scaled(call, call.b, call.second, hardware, merged=False)
        if call.a is not None:
            a = _scaled(call, call.a, call.first, hardware, merged=b.matrices == 1)
        else:
            ((_, (*lead, rows, depth), dtype),) = call.first
            count = math.prod(lead)
            a = OperandFacts(*((1, count * rows) if b.matrices == 1 else (count, rows)), depth, True, dtype)
        bias = call.added[0][2] if call.added else None
        return Product(a, b, bias, call.dtype, hardware)
    except Unsupported as e:
        return str(e)


def _scaled(call: Multiply, metadata: Metadata, shapes: Shapes, hardware: Hardware, merged: bool) -> OperandFacts:
    """A ScaledTensor as an operand. Raises Unsupported."""
    st = placeholder(metadata, _as_x(shapes))
    spec = needed(readable(st.recipe, st.layout))
    return scaled(codes_of(call.ops, _as_x(shapes), st, spec, hardware, merged), st.recipe.format)
