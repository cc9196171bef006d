"""Resident memory of this process, as Linux tells it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: Whether peaks can be measured here.
AVAILABLE = _STATUS.exists() and os.access(_RESET, os.W_OK)


def grown(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """(what a call returns, the bytes by which memory grew at its peak). Memory that is free to be reused counts as used."""
    _RESET.write_text("5")  # the peak starts here
    before = _bytes("VmRSS")
    result = function(*arguments)
    return result, _bytes("VmHWM") - before


def _bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
