"""SwiGLU that writes codes: two ops of a plug-in, with all that makes them ops, in one file.

`swiglu_cast(x, gate, recipe)` casts `x * silu(gate)`, silu(g) = g / (1 + exp(-g)). `swiglu_ste` gives the values of that
cast; its gradients pass straight through the cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from breccia import ShapeError, bytes_equal, hookimpl
from breccia.backend import Kind, Operation, Result, calls, dtype_name, ops_of, product_options, public

api = 1

_ARGUMENTS = (("x", Kind.ARRAY), ("gate", Kind.ARRAY), ("recipe", Kind.RECIPE))
_OPTIONS = ("axis", "scale", "rounding", "seed", "nonfinite")

CAST = Operation(
    "swiglu_cast",
    _ARGUMENTS,
    (Result(tensor=True),),
    "swiglu_breccia:cast_reference",
    options=(*_OPTIONS, "storage"),
    validate="swiglu_breccia:check",
    examples="swiglu_breccia:examples",
    laws="swiglu_breccia:LAWS",
    passes_storages=True,
)
STE = Operation(
    "swiglu_ste",
    _ARGUMENTS,
    (Result(dtype="first"),),
    "swiglu_breccia:ste_reference",
    options=_OPTIONS,
    derivative="swiglu_breccia:derivative",
    validate="swiglu_breccia:check",
    examples="swiglu_breccia:examples",
)

swiglu_cast, swiglu_ste = public(CAST), public(STE)


@hookimpl
def breccia_operations() -> Iterable[Operation]:
    return [CAST, STE]


# -- the definition --------------------------------------------------------------------------------------------------


def cast_reference(x: Any, gate: Any, recipe: Any, options: Any) -> Any:
    """`x * silu(gate)` in FP32, cast by the kernel of `cast`."""
    ops = ops_of(x)
    return calls.cast(ops.f32(x) * ops.f32(gate) * _sigmoid(ops, ops.f32(gate)), recipe, options)


def ste_reference(x: Any, gate: Any, recipe: Any, options: Any) -> Any:
    """The values of `swiglu_cast` in the dtype of `x`."""
    return calls.dequantize(cast_reference(x, gate, recipe, options), product_options(dtype_name(x)))


def derivative(by: Any, direction: Any, n: int, x: Any, gate: Any, recipe: Any, options: Any) -> Any:
    """The direction times d/dx = silu(gate), or d/dgate = x sigmoid(gate) (1 + gate (1 - sigmoid(gate)))."""
    ops = ops_of(x)
    g = ops.f32(gate)
    s = _sigmoid(ops, g)
    factor = g * s if n == 0 else ops.f32(x) * s * (1.0 + g * (1.0 - s))
    return ops.to_float(ops.f32(direction) * factor, dtype_name(x))


def _sigmoid(ops: Any, g: Any) -> Any:
    """1 / (1 + exp(-g)); exp by a polynomial of the fraction left by a power of two, within 2 units in the last place."""
    y = ops.minimum(ops.maximum(0.0 - g, -87.0), 87.0)
    whole = ops.to_int32(y * 1.4426950408889634 + ops.where(y < 0, -0.5, 0.5))
    n = ops.int_to_float(whole)
    r = y - n * 0.693359375 + n * 2.12194440e-4
    p = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r / 720)))))
    power = ops.bitcast_to_float((whole + 127) << 23)
    return ops.div(ops.constant(1.0, g), 1.0 + p * power)


def check(x: Any, gate: Any, recipe: Any, options: Any = None) -> None:
    """Raise ShapeError unless both have one shape."""
    if tuple(x.shape) != tuple(gate.shape):
        raise ShapeError(f"swiglu takes x and gate of one shape; got {tuple(x.shape)} and {tuple(gate.shape)}.")


# -- the laws --------------------------------------------------------------------------------------------------------


def examples() -> Iterator[tuple[Any, ...]]:
    """Arguments of both ops."""
    import numpy as np

    import breccia

    rng = np.random.default_rng(0)
    for recipe in ("mxfp8", "nvfp4", "int4"):
        x, gate = (rng.standard_normal((6, 64)).astype(np.float32) for _ in range(2))
        yield x, gate, breccia.recipe(recipe)


def a_gate_of_zero_gives_zeros(operation: Operation, place: Any) -> None:
    """For finite x: silu(0) is 0."""
    for x, gate, recipe in examples():
        st = swiglu_cast(place.array(x), place.array(gate * 0), recipe)
        assert not place.ops.to_numpy(st.dequantize()).any()


def it_is_a_cast_of_the_product(operation: Operation, place: Any) -> None:
    """Under every option, the codes are those that `cast` writes of the product."""
    for x, gate, recipe in examples():
        a, g = place.array(x), place.array(gate)
        product = a * g * _sigmoid(place.ops, g)
        for options in ({"axis": -2}, {"rounding": "stochastic", "seed": 7}):
            import breccia

            assert bytes_equal(calls_of(operation, a, g, recipe, options), breccia.cast(product, recipe, **options))


def calls_of(operation: Operation, x: Any, gate: Any, recipe: Any, options: Any) -> Any:
    """The op below frontends, which compile nothing: a compiler may fuse a product and a sum."""
    from breccia.backend import CastOptions

    return getattr(calls, operation.name)(x, gate, recipe, CastOptions(**options))


LAWS = (a_gate_of_zero_gives_zeros, it_is_a_cast_of_the_product)
