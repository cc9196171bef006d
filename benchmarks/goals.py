"""The goals of FP8 products on an H200, as data: what has to be how many times as fast as what, at which shapes.

`tables.py` draws them with what was measured; docs/kernels.md shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8_plan import BF16, DECODING, FEW, LARGE, OURS, TORCH, TORCH_ROWS
from rivals import OLD, TRANSFORMER_ENGINE


@dataclass(frozen=True)
class Goal:
    """Of `kinds` at `shapes`, the fastest of `arms` has to be `least` times as fast as the fastest of `rivals`.

    against: these rivals in words. state: of the device, "graph" under load, "burst" after pauses.
    """

    work: str
    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    rivals: tuple[str, ...]
    against: str
    least: float
    arms: tuple[str, ...] = (OURS,)
    state: str = "graph"


#: Shapes at which blocks of 128 x 128 have to be further ahead, and those that torch's grouped product gets too.
_AHEAD = ("4096x2112x7168", "4096x24576x1536")
_CUBLAS = (TORCH, TRANSFORMER_ENGINE)
_BLOCKWISE = "cuBLAS's blockwise"
_PRECISE = ("tensor", "row")

GOALS = (
    Goal("scales per tensor and row", _PRECISE, LARGE, (TORCH,), "`torch._scaled_mm`", 1.05),
    Goal("the same, fast accumulation", ("tensor fast", "row fast"), LARGE, (TORCH,), "`torch._scaled_mm`, fast", 1.03),
    Goal("scales per tensor", ("tensor",), LARGE, (OLD,), "breccia 0.1.3, autotuned", 5.0),
    *(
        goal
        for state, name in (("graph", "hot"), ("burst", "burst"))
        for goal in (
            Goal(f"1×128 by 128×128, {name}", ("tiles",), LARGE, (TORCH,), _BLOCKWISE, 1.06, state=state),
            Goal(
                f"1×128 by 128×128, N = 2112 and K = 1536, {name}", ("tiles",), _AHEAD, (TORCH,), _BLOCKWISE, 1.12, state=state
            ),
        )
    ),
    Goal("1×128 by 1×128", ("blocks",), LARGE, _CUBLAS, _BLOCKWISE, 1.20),
    Goal("at most 128 rows", (*_PRECISE, "tiles", "blocks"), FEW, _CUBLAS, "the best of cuBLAS and torch", 1.30),
    Goal("MXFP8", ("mx",), LARGE, (BF16,), "cuBLAS in BF16", 0.95, (OURS, DECODING)),
    Goal("groups, 1×128 by 128×128", ("grouped tiles",), LARGE, (TORCH_ROWS,), "`torch._scaled_grouped_mm` by rows", 1.0),
)
