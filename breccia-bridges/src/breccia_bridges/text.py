"""Numbers as text, for terminals and pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from breccia import OptionError

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float, space: str = " ") -> str:
    """Bytes, in the decimal unit with less than four digits before the point."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{2 if unit else 0}f}{space}{_UNITS[unit]}"


def byte_count_of(text: str | int, option: str) -> int:
    """The bytes that an option says: an integer, or a number with a unit, "5GB" (10**9) or "1GiB" (2**30), as users write it.

    Raises OptionError for anything else, and for less than one byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?", str(text).strip(), re.IGNORECASE)
    count = 0
    if found and not isinstance(text, bool):
        power = "KMGT".find((found[2] or "").upper()) + 1 if found[2] else 0
        count = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if count < 1:
        raise OptionError(f'{option}={text!r} is no size; give bytes, or a number with a unit: "5GB" or "512MiB".')
    return count


def percent(rate: float | None, space: str = " ") -> str:
    """A share to three digits; a nonzero share is never shown as zero, and an unknown one is a dash."""
    if rate is None:
        return "–"
    return f"<{space}0.001{space}%" if 0 < rate < 1e-5 else f"{100 * rate:.3g}{space}%"


def spelled(shape: Iterable[int]) -> str:
    """`2x3`."""
    return "x".join(map(str, shape)) or "scalar"


def either(items: Iterable[object]) -> str:
    """`a, b or c`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} or {last}" if first else last


def number(value: float | None) -> float | None:
    """`value` if JSON can represent it, else None."""
    return value if value is not None and math.isfinite(value) else None
