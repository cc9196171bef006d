# pyright: reportUnsupportedDunderAll=false
"""The conformance kit: one line tests everything that a plug-in declares.

    test_conformance = breccia.testing.conformance("acme")

`oracle` computes expected results in exact rationals, `strategies` draws test arrays, `vectors` writes the golden vectors.
The kit needs the extra `breccia-core[testing]`.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Public name -> module that defines it; and the public modules. Keep in step with `__init__.pyi`.
_HOMES = {"conformance": "kit", "Law": "laws"}
_MODULES = ("oracle", "strategies", "vectors")

__all__ = ["Law", "conformance", "oracle", "strategies", "vectors"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'breccia.testing' has no attribute {name!r}")
    try:
        module = import_module(f".{_HOMES.get(name, name)}", __name__)
    except ModuleNotFoundError as e:
        if e.name not in ("pytest", "hypothesis"):
            raise
        extra = import_module("breccia.siblings").TESTING
        raise ImportError(f"breccia.testing.{name} needs {e.name}, which is not installed: {extra.remedy}.", name=e.name) from e
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
