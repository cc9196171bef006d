"""A stand-in for a vendor's plug-in: kernels for one recipe that call the generic algorithm and count their calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from types import NoneType
from typing import Any

from breccia import Kernel, MXFP8BlockScaling, ScaledTensor, ScalingRecipe, hookimpl
from breccia.backend import FLOAT32, Call, CastOptions, ProductOptions, reference

api = 1

#: Kernel name -> number of calls.
calls: Counter[str] = Counter()

FRAMEWORKS = ("numpy", "torch", "jax", "mlx")
#: Up to this many rows, the kernel for few rows claims the shorter time.
FEW = 16


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    """The generic algorithm, counted."""
    _count("cast", x)
    return reference.cast(x, recipe, options)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """The generic algorithm, counted."""
    _count("dequantize", st.data)
    return reference.dequantize(st, options)


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """The generic algorithm, counted; for any number of rows."""
    _count("matmul", a, b)
    return reference.matmul(a, b, options)


def matmul_of_few(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """The generic algorithm, counted; for few rows."""
    _count("matmul of few", a, b)
    return reference.matmul(a, b, options)


def _count(name: str, *operands: Any) -> None:
    """Count a call, and check that no operand requires a gradient: a kernel must never see one."""
    calls[name] += 1
    for x in operands:
        array = x.data if isinstance(x, ScaledTensor) else x
        assert not getattr(array, "requires_grad", False), f"{name} was given a tensor that needs a gradient"


def score(call: Call) -> float:
    """Twice the score of the kernel for few rows there, half of it for many rows."""
    return 2.0


def score_of_few(call: Call) -> float:
    """1 up to `FEW` rows and 4 beyond, against 2 of the other kernel."""
    return 1.0 if call.a.shape[-2] <= FEW else 4.0


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    here, mx = "standin", MXFP8BlockScaling
    for framework in FRAMEWORKS:
        yield Kernel("cast", framework, f"{here}:cast", f"standin.{framework}.cast", recipe=mx, traces=True)
        yield Kernel("dequantize", framework, f"{here}:dequantize", f"standin.{framework}.dequantize", recipe=mx, traces=True)
        for kind, what in ((NoneType, "array"), (mx, "pair")):
            name = f"standin.{framework}.matmul.{what}"
            yield Kernel("matmul", framework, f"{here}:matmul", name, kind, mx, score=f"{here}:score", traces=True)
            few = f"{here}:matmul_of_few", f"{name}.few"
            yield Kernel("matmul", framework, *few, kind, mx, score=f"{here}:score_of_few", traces=True)


manifest = sys.modules[__name__]
