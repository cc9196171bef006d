"""Whether compiled kernels convert checkpoints; where none does, that is said once."""

from __future__ import annotations

import warnings

from breccia.backend import registry, targets
from breccia.internal import install, once

_NATIVE = "breccia-native"


def warn_without_kernels() -> None:
    """Warn, once in a process, where no compiled kernel decodes and measures on this machine."""
    if why := missing():
        _warn(why)


def missing() -> str:
    """Why there is no such kernel, and what to do; empty if there is one."""
    kernels = [kernel for kernel in registry().table.kernels if kernel.errors]
    reasons = [targets.load(kernel.available)("cpu") if kernel.available else None for kernel in kernels]
    if None in reasons:
        return ""
    if reasons:
        return f"{reasons[0]}."
    return registry().absence(_NATIVE).strip() or f"Install it: {install(_NATIVE)}."


@once
def _warn(why: str) -> None:
    warnings.warn(
        f"no compiled kernel of {_NATIVE} runs here, so NumPy converts: to the same bytes, several times slower. {why}",
        stacklevel=5,
    )
