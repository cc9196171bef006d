"""How long products of activations and a quantized weight take. Imports neither torch nor Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping

from breccia import Format
from breccia.backend import Block, Call

from . import roofline
from .choices import block_text, codecs_of
from .measurements import device_name, measured, times_over_bound

#: Times over `bound` without a measurement.
_UNMEASURED = 1.3
#: Numbers of rows up to which times are measured together; more rows are the last kind.
ROWS = (4, 16, 64, 128)


def slowdowns(device: str) -> Mapping[str, float]:
    """Measured times over `bound`, by the keys of `key_of`; empty if not measured.

    From `configurations/weight_times_<device>.json`, which `benchmarks/bench_weight_only.py --table` writes.
    """
    return measured("weight_times", device, times_over_bound)


def key_of(fmt: Format, block: Block, m: int) -> str:
    """The key of a measured time. block: of scales along K. m: rows of activations."""
    rows = next((f"{n}" for n in ROWS if m <= n), "more")
    return f"cuda {codecs_of(fmt)} {block_text(block)} {rows}"


def bound(m: int, n: int, k: int, bits: float) -> float:
    """The seconds that a product takes at least: for its operations, or for its bytes. bits: of an element of the weight."""
    return roofline.seconds(2.0 * m * n * k, "bfloat16", n * k * bits / 8 + 2 * m * (n + k))


def bits_of(fmt: Format, block: Block) -> float:
    """Bits of an element with its share of the finest scale."""
    height, width = block
    shared = (height or 1) * width if width else math.inf
    return fmt.element.bits + fmt.scale.codec.bits / shared


def score(call: Call) -> float:
    """The estimated time."""
    assert call.b is not None
    a, b, recipe, layout = call.a.shape, call.b, call.b.recipe, call.b.layout
    assert recipe is not None
    if len(a) < 2 or len(b.shape) < 2 or layout is None:  # `explain` of recipes alone
        return _UNMEASURED * roofline.LAUNCH
    fmt, block, m = recipe.format, layout.plain.block(-2), math.prod(a[:-1])
    over = slowdowns(device_name(call.device)).get(key_of(fmt, block, m), _UNMEASURED)
    return over * bound(m, b.shape[-1], b.shape[-2], bits_of(fmt, block))
