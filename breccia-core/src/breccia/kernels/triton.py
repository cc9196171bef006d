# pyright: reportUnsupportedDunderAll=false
"""The kernels for PyTorch of an installed breccia-triton, by function name; `TRITON_AVAILABLE` is whether they can run.

`configure` sets how they run. `scaled_matmul_triton` and `block_scaled_matmul_triton` multiply two FP8 tensors on CUDA.
"""

from __future__ import annotations

from typing import Any

from .. import targets
from ..dispatch.kernel import Kernel
from ..dispatch.registry import registry
from ..errors import suggestion
from ..siblings import TRITON

__all__ = ["TRITON_AVAILABLE", "block_scaled_matmul_triton", "configure", "scaled_matmul_triton"]


def _kernels() -> dict[str, Kernel]:
    """The declared kernels by function name; empty if they cannot be imported."""
    declared = [k for k in registry().table.kernels if k.plugin == TRITON.plugin and k.framework == "torch"]
    return {k.target.rpartition(":")[2]: k for k in declared if not _missing()}


def _missing() -> list[str]:
    return [module for module in TRITON.kernels if not targets.installed(module)]


def __getattr__(name: str) -> Any:
    active = any(p.distribution == TRITON.distribution and p.status == "active" for p in registry().plugins)
    if name == "TRITON_AVAILABLE":
        return active and not _missing()
    if name.startswith("_"):
        raise AttributeError(f"module 'breccia.kernels.triton' has no attribute {name!r}")
    if not active:
        raise ImportError(
            f"breccia.kernels.triton.{name} comes with {TRITON.distribution}: {TRITON.remedy}."
            + registry().absence(TRITON.distribution),
            name=name,
        )
    if _missing():
        raise ImportError(
            f"breccia.kernels.triton.{name} needs {', '.join(_missing())}, which is not installed: pip install "
            f"{' '.join(_missing())} (triton has wheels for Linux only).",
            name=_missing()[0],
        )
    found = {**dict(TRITON.functions), **{name: kernel.target for name, kernel in _kernels().items()}}
    if name not in found:
        raise AttributeError(f"{TRITON.distribution} declares no kernel function {name!r}{suggestion(name, list(found))}")
    return targets.load(found[name])


def __dir__() -> list[str]:
    return sorted({*__all__, *_kernels()})
