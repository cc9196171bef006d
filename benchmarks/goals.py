"""Goals of products and decoders on an H200, as data: the work, the rival, and the required speed relative to the rival.

`tables.py` compares them with the measurements, for docs/kernels.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import common
import weight_arms
from cells import ABSENT, Table, extent
from fp8_plan import BF16, DECODING, FEW, LARGE, OURS, TORCH, TORCH_ROWS
from rivals import OLD, TRANSFORMER_ENGINE


@dataclass(frozen=True)
class Goal:
    """The fastest of `arms` must be at least `least` times as fast as the fastest of `rivals`, for `kinds` at `shapes`.

    against: the rivals in words. state: of the device, "graph" under load, "burst" after pauses.
    """

    work: str
    kinds: tuple[str, ...]
    shapes: tuple[str, ...]
    rivals: tuple[str, ...]
    against: str
    least: float
    arms: tuple[str, ...] = (OURS,)
    state: str = "graph"


#: Shapes that have a higher goal for scales of 1 x 128 by 128 x 128.
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


# ------------------------------------------------------------------------------------------------ quantized weights


@dataclass(frozen=True)
class WeightGoal:
    """Products of `rows` rows of BF16 activations by weights of `formats` and `shapes`.

    With a rival, each must be at least `bound` times as fast; without one, each must take at most `bound` microseconds.
    """

    work: str
    formats: tuple[str, ...]
    rows: tuple[int, ...]
    bound: float
    rival: str = ""
    shapes: tuple[str, ...] = ("8192x8192",)


_FOUR_BITS, _EIGHT_BITS = ("int4", "mxfp4", "nvfp4"), ("fp8", "mxfp8")
_MANY = (256, 512, 1024, 2048, 4096)

WEIGHT_GOALS = (
    *(
        WeightGoal(f"{name}, M = {m}", formats, (m,), most)
        for name, formats, limits in (
            ("INT4", ("int4",), (10.5, 14.0, 21.0)),
            ("MXFP4", ("mxfp4",), (12.0, 15.0, 21.0)),
            ("NVFP4", ("nvfp4",), (12.5, 16.0, 21.5)),
            ("FP8 and MXFP8", _EIGHT_BITS, (16.5, 18.0, 24.0)),
        )
        for m, most in zip((1, 16, 64), limits, strict=True)
    ),
    *(
        WeightGoal(f"4 bits, M = {m}", _FOUR_BITS, (m,), least, weight_arms.HUMMING)
        for m, least in ((1, 1.5), (16, 1.3), (64, 1.2))
    ),
    WeightGoal("4 bits, M = 128", _FOUR_BITS, (128,), 1 / 0.85, weight_arms.BF16),
    WeightGoal("4 bits, M = 256 to 4096", _FOUR_BITS, _MANY, 0.97, weight_arms.BF16),
)


# ------------------------------------------------------------------------------------------------ decoders


@dataclass(frozen=True)
class DecoderGoal:
    """`quantity`, divided by that of BF16 weights, must be at least `bound`, or at most `bound` if `at_most`."""

    work: str
    recipes: tuple[str, ...]
    models: tuple[str, ...]
    quantity: str
    bound: float
    at_most: bool = False


_DECODED, _MODELS = ("int4", "nvfp4"), ("wide", "narrow")

DECODER_GOALS = (
    *(
        DecoderGoal(f"tokens per second, INT4 and NVFP4, {model}", _DECODED, (model,), "tokens_per_second", 2.2)
        for model in _MODELS
    ),
    DecoderGoal("bytes of weights, INT4 and NVFP4", _DECODED, _MODELS, "weight_bytes", 0.32, at_most=True),
)


# ------------------------------------------------------------------------------------------------ rows of tables

#: Headings of tables of goals.
HEADINGS = ("work", "goal", "measured", "worst at", "met")


def judged(
    work: str, asked: str, every: Mapping[str, float | None], bound: float, at_most: bool = False
) -> tuple[str, str, str, str, str]:  # fmt: skip
    """The row of a goal. every: measured values by name, None where not measured. at_most: values may not exceed `bound`."""
    found = {name: value for name, value in every.items() if value is not None}
    if not found:
        return work, asked, "not measured", ABSENT, ABSENT
    worst = (max if at_most else min)(found, key=lambda name: found[name])
    met = sum(value <= bound if at_most else value >= bound for value in found.values())
    reached = "yes" if met == len(every) else "no" if len(every) == 1 else f"{met} of {len(found)}"
    if missing := len(every) - len(found):
        reached += f"; {missing} not measured"
    return work, asked, extent(found.values(), lambda value: f"{value:.2f}"), worst, reached


# ------------------------------------------------------------------------------------------------ trials


def tried(work: str, case: str, title: str, unit: str = "") -> Table:
    """Variants of kernels with their expected and measured effect, from tried.json. case: the column that says what ran."""
    found = json.loads((common.HERE / "tried.json").read_text(encoding="utf-8"))[work]
    columns = ("what", case, "expected", "measured")
    rows = tuple((*(row[name] or ABSENT for name in columns), "yes" if row["kept"] else "no") for row in found["rows"])
    note = (
        f"{found['device']}. Each variant was compared with the kernel of that time, so numbers differ from those above.{unit} "
        f"{ABSENT}: no prediction was written down. Kept: in the source."
    )
    return Table(title, (*columns, "kept"), rows, note)
