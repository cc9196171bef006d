# pyright: reportUnsupportedDunderAll=false
"""What an installed breccia-triton exports, and its kernels for PyTorch by function name.

`TRITON_AVAILABLE` is whether they can run. The import works anywhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import targets
from ..dispatch.registry import registry
from ..errors import suggestion
from ..siblings import TRITON

__all__ = ["TRITON_AVAILABLE"]


def _exported() -> dict[str, str]:
    """Object references by name: what the package exports, and the declared kernels. Empty if they cannot be imported."""
    if not _active() or _missing():
        return {}
    package = TRITON.distribution.replace("-", "_")
    kernels = [k.target for k in registry().table.kernels if k.plugin == TRITON.plugin and k.framework == "torch"]
    exported = {name: f"{package}:{name}" for name in import_module(package).__all__}
    return exported | {target.rpartition(":")[2]: target for target in kernels}


def _active() -> bool:
    return any(p.distribution == TRITON.distribution and p.status == "active" for p in registry().plugins)


def _missing() -> list[str]:
    return [module for module in TRITON.kernels if not targets.installed(module)]


def __getattr__(name: str) -> Any:
    if name == "TRITON_AVAILABLE":
        return _active() and not _missing()
    if name.startswith("_"):
        raise AttributeError(f"module 'breccia.kernels.triton' has no attribute {name!r}")
    if not _active():
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
    exported = _exported()
    if name not in exported:
        raise AttributeError(f"{TRITON.distribution} declares no kernel function {name!r}{suggestion(name, list(exported))}")
    return targets.load(exported[name])


def __dir__() -> list[str]:
    return sorted({*__all__, *_exported()})
