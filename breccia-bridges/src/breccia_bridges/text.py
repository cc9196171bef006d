"""Numbers as text, for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Iterable

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float, space: str = " ") -> str:
    """Bytes, in the decimal unit with less than four digits before the point."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{2 if unit else 0}f}{space}{_UNITS[unit]}"


def percent(rate: float | None, space: str = " ") -> str:
    """A share to three digits; a nonzero share is never shown as zero, and an unknown one is a dash."""
    if rate is None:
        return "–"
    return f"<{space}0.001{space}%" if 0 < rate < 1e-5 else f"{100 * rate:.3g}{space}%"


def spelled(shape: Iterable[int]) -> str:
    """`2x3`."""
    return "x".join(map(str, shape)) or "scalar"


def number(value: float | None) -> float | None:
    """`value` if JSON can represent it, else None."""
    return value if value is not None and math.isfinite(value) else None
