"""How fast the verbs are on this machine: a first look. benchmarks/ of the repository measures against rivals."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from . import targets
from .api import cast, dequantize, explain, matmul
from .errors import OptionError
from .options import whole_number
from .recipes import ScalingRecipe
from .registry import registry
from .tensor import ScaledTensor

#: Rows of the left operand of the measured product.
ROWS = 64


@dataclass(frozen=True)
class Timing:
    """Seconds of one verb, `runs` times; `bytes` is what it reads and writes, codes, scales and FP32 together."""

    recipe: str
    op: str
    kernel: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, and least, median and most."""
        spread = {"min_s": self.least, "median_s": statistics.median(self.seconds), "max_s": max(self.seconds)}
        return {"recipe": self.recipe, "op": self.op, "kernel": self.kernel, "bytes": self.bytes, **spread}


def measure(recipe: ScalingRecipe, on: str = "numpy", size: int = 4096, runs: int = 7, label: str = "") -> list[Timing]:
    """Time `cast`, `dequantize` and a `ROWS` x size by size x size `matmul` of standard normal FP32.

    on: framework, or framework:device. Each result is waited for by reading one item of it. The first call, which loads
    and compiles, is not counted.

    Raises OptionError for a size or a number of runs below 1, UnknownNameError for a framework.
    """
    for name, value in (("size", size), ("runs", runs)):
        if whole_number(name, value) < 1:
            raise OptionError(f"bench: {name} is at least 1; got {value}.", **{name: value})
    framework, _, device = on.partition(":")
    ops = targets.load(registry().look_up("breccia_frameworks", framework, "framework").ops)

    def placed(*shape: int) -> Any:
        x = ops.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
        return ops.to(x, device) if device else x

    def wait(found: Any) -> None:
        parts = (found.data, found.scale) if isinstance(found, ScaledTensor) else (found,)
        for part in parts:
            ops.to_numpy(ops.reshape(part, (-1,))[:1])

    x, rows = placed(size, size), placed(ROWS, size)
    st = cast(x, recipe)
    fp32 = 4 * size * size
    calls: dict[str, tuple[Callable[[], Any], int, tuple[Any, ...]]] = {
        "cast": (partial(cast, x, recipe), fp32 + st.nbytes, (x, recipe)),
        "dequantize": (partial(dequantize, st), fp32 + st.nbytes, (st,)),
        "matmul": (partial(matmul, rows, st.mT), 8 * ROWS * size + st.nbytes, (rows, st.mT)),
    }
    found: list[Timing] = []
    for op, (call, touched, operands) in calls.items():
        wait(call())
        seconds: list[float] = []
        for _ in range(runs):
            started = perf_counter()
            wait(call())
            seconds.append(perf_counter() - started)
        winner = explain(op, *operands).winner
        found.append(Timing(label or recipe.name, op, winner.name if winner else "", touched, tuple(seconds)))
    return found
