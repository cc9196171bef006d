# pyright: reportUnsupportedDunderAll=false
"""Bridges to other libraries, resolved from installed plug-ins: `breccia.bridges.save_safetensors`, ...

Names are looked up on first use, so importing this module is cheap and has no dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import targets
from .dispatch.registry import registry
from .errors import suggestion
from .siblings import BRIDGES

if TYPE_CHECKING:
    from .dispatch.hookspecs import Bridge


def __getattr__(name: str) -> Any:
    if name == "__all__":  # `import *` takes what can be imported; `dir` also shows what another library would add
        return [bridge for bridge, declared in sorted(registry().bridges.items()) if not _missing(declared)]
    if name.startswith("_"):
        raise AttributeError(f"module 'breccia.bridges' has no attribute {name!r}")
    declarations = registry()
    bridge = declarations.bridges.get(name)
    if bridge is None and not any(
        p.distribution == BRIDGES.distribution and p.status == "active" for p in declarations.plugins
    ):
        raise ImportError(
            f"no installed plug-in declares breccia.bridges.{name}; breccia's own bridges come with {BRIDGES.distribution}: "
            f"{BRIDGES.remedy}." + declarations.absence(BRIDGES.distribution),
            name=name,
        )
    if bridge is None:
        raise AttributeError(f"no bridge {name!r} in any installed plug-in{suggestion(name, __dir__())}")
    if missing := _missing(bridge):
        raise ImportError(
            f"breccia.bridges.{name} needs {', '.join(missing)}, which is not installed: pip install {bridge.install}.",
            name=missing[0],
        )
    return targets.load(bridge.target)


def _missing(bridge: Bridge) -> list[str]:
    return [module for module in bridge.requires if not targets.installed(module)]


def __dir__() -> list[str]:
    return sorted(registry().bridges)
