# pyright: reportUnsupportedDunderAll=false
"""Bridges to neighbours, resolved from installed plug-ins: `breccia.bridges.save_safetensors`, ...

A name is looked up when it is used, so importing this costs nothing and needs nothing.
"""

from __future__ import annotations

from typing import Any

from . import targets
from .dispatch.registry import registry
from .errors import suggestion
from .siblings import BRIDGES

#: Bridges of the distribution breccia-bridges; other plug-ins may add more.
__all__ = list(BRIDGES.bridges)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'breccia.bridges' has no attribute {name!r}")
    bridge = registry().bridges.get(name)
    if bridge is None and name in __all__:
        raise ImportError(
            f"breccia.bridges.{name} comes with {BRIDGES.distribution}: {BRIDGES.remedy}."
            + registry().absence(BRIDGES.distribution),
            name=name,
        )
    if bridge is None:
        raise AttributeError(f"no bridge {name!r} in any installed plug-in{suggestion(name, __dir__())}")
    missing = [module for module in bridge.requires if not targets.installed(module)]
    if missing:
        raise ImportError(
            f"breccia.bridges.{name} needs {', '.join(missing)}, which is not installed: pip install {bridge.install}.",
            name=missing[0],
        )
    return targets.load(bridge.target)


def __dir__() -> list[str]:
    return sorted({*__all__, *registry().bridges})
