"""Kernels that an installed breccia-triton declares, by function name; `TRITON_AVAILABLE` says whether they can run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .. import targets
from ..dispatch import Kernel
from ..errors import suggestion
from ..registry import registry

__all__ = ["TRITON_AVAILABLE"]


def _kernels() -> dict[str, Kernel]:
    declared = (k for k in registry().table.kernels if k.plugin == "triton")
    return {k.target.rpartition(":")[2]: k for k in declared}


def __getattr__(name: str) -> Any:
    if name == "TRITON_AVAILABLE":
        active = any(p.name == "triton" and p.status == "active" for p in registry().plugins)
        return active and find_spec("triton") is not None and find_spec("torch") is not None
    if name.startswith("_"):
        raise AttributeError(f"module 'breccia.kernels.triton' has no attribute {name!r}")
    if not any(p.name == "triton" for p in registry().plugins):
        raise ImportError(f"breccia.kernels.triton.{name} comes with breccia-triton: pip install breccia-triton.", name=name)
    kernels = _kernels()
    if name not in kernels:
        raise AttributeError(f"breccia-triton declares no kernel function {name!r}{suggestion(name, list(kernels))}")
    return targets.load(kernels[name].target)


def __dir__() -> list[str]:
    return sorted({*__all__, *_kernels()})
