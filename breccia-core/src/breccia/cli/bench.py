"""A quick benchmark of the operations on this machine. The repository's benchmarks/ compare with other libraries."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from .. import targets
from ..api import cast, dequantize, explain, matmul
from ..arrays.frameworks import Framework
from ..arrays.ops import Ops
from ..dispatch.registry import registry
from ..errors import OptionError
from ..options import whole_number
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor

#: Rows of the left operand of the timed product.
ROWS = 64


@dataclass(frozen=True)
class Timing:
    """Seconds of each run of one operation. `bytes` counts all that it reads and writes: codes, scales and FP32."""

    recipe: str
    op: str
    kernel: str
    bytes: int
    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> tuple[float, float, float]:
        """Minimum, median and maximum."""
        return self.least, statistics.median(self.seconds), max(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """All fields, with the spread instead of every time."""
        spread = dict(zip(("min_s", "median_s", "max_s"), self.spread, strict=True))
        return {"recipe": self.recipe, "op": self.op, "kernel": self.kernel, "bytes": self.bytes, **spread}


def measure(recipe: ScalingRecipe, on: str = "numpy", size: int = 4096, runs: int = 7, label: str = "") -> list[Timing]:
    """Time `cast`, `dequantize` and a `ROWS` x size by size x size `matmul` of standard normal FP32.

    on: framework, or framework:device. Each run waits for its result by reading one item. The first call, which loads
    and compiles, is not timed.

    Raises OptionError for a size or number of runs below 1 and for an unknown device, UnknownNameError for an unknown
    framework, ImportError if it is not installed.
    """
    for name, value in (("size", size), ("runs", runs)):
        if whole_number(name, value) < 1:
            raise OptionError(f"bench: {name} is at least 1; got {value}.", **{name: value})
    name, _, device = on.partition(":")
    framework: Framework = registry().look_up("breccia_frameworks", name, "framework")
    root = framework.package
    if not targets.installed(root):
        raise ImportError(f"bench on {name} needs {root}, which is not installed: pip install {root}", name=root)
    try:
        return _timings(recipe, targets.load(framework.ops), device, size, runs, label or recipe.name)
    except RuntimeError as e:  # frameworks raise it for an unusable device
        raise OptionError(f"bench cannot run on {on}: {e}", on=on) from e


def _timings(recipe: ScalingRecipe, ops: Ops, device: str, size: int, runs: int, label: str) -> list[Timing]:
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
        found.append(Timing(label, op, winner.name if winner else "", touched, tuple(seconds)))
    return found
