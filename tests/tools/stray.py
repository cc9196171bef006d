"""A plug-in that declares what a test plants, and the verdicts of the laws on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from inspect import isfunction
from types import ModuleType
from typing import Any

import pytest

import breccia
from breccia import Kernel, MXFP8BlockScaling, ScalingRecipe, hookimpl
from breccia.arrays import frameworks
from breccia.dispatch import builtin, registry
from breccia.dispatch.registry import Plugin, Registry
from breccia.testing.kit import laws_of
from breccia.testing.laws import Law

STRAY = Plugin("stray", "stray-breccia", "0.1", "stray_manifest")


def outcome(law: Law) -> str:
    """The outcome of a law: "" if it holds, the reason if it was skipped, or the message of its failure."""
    try:
        law.check()
    except pytest.skip.Exception as e:
        return f"skipped: {e.msg}"
    except AssertionError as e:
        return str(e)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def here(laws: Iterable[Law]) -> list[Law]:
    """The laws without a framework, or for NumPy."""
    return [law for law in laws if law.place is None or law.place.framework == "numpy"]


def verdicts(laws: Iterable[Law]) -> dict[str, str]:
    """Sentence -> outcome, for the laws that do not hold."""
    return {law.sentence: message for law in here(laws) if (message := outcome(law))}


@pytest.fixture
def declare() -> Iterator[Callable[..., list[Law]]]:
    """Register only core and a plug-in "stray" for one test; returns the laws for stray's declarations, on NumPy."""

    def declaring(*tried: ScalingRecipe, **declared: list[Any]) -> list[Law]:
        registered(ModuleType("stray_manifest"), **declared)
        return [law for law in here(laws_of("stray", tried)) if law.kind != "manifest"]

    yield declaring
    registry.reload()


def registered(module: ModuleType, **declared: list[Any]) -> Registry:
    """A registry with core and a plug-in whose hooks return `declared`; it becomes the current one."""

    def hook(found: list[Any]) -> Any:
        return hookimpl(lambda: found)

    vars(module).update({"api": 1, **{f"breccia_{kind}": hook(found) for kind, found in declared.items()}})
    core = Plugin("core", registry.CORE, breccia.__version__, builtin.__name__)
    found = Registry([(core, lambda: builtin), (STRAY, lambda: module)], {})
    frameworks.current = found
    return found


def planted(faults: dict[Any, dict[str, Any]]) -> list[Any]:
    """(law, fault) as parameters, for a table law -> fault -> what is planted and what the law says."""
    names = {law: law if isinstance(law, str) else law.__name__ for law in faults}
    return [pytest.param(law, fault, id=f"{names[law]}-{fault}") for law in faults for fault in faults[law]]


def along_k(call: Any) -> str | None:
    return None if call.option("axis", -1) == -1 else "along the last axis only"


def kernel(target: Callable[..., Any], op: str = "cast", **declared: Any) -> Kernel:
    """A kernel for MXFP8 on NumPy, named after its function."""
    recipes: dict[str, Any] = {"other": MXFP8BlockScaling} if op == "requantize" else {"recipe": MXFP8BlockScaling}
    asked = {name: f"{f.__module__}:{f.__name__}" for name, f in declared.items() if isfunction(f)}
    name = f"stray.{target.__name__}"
    return Kernel(op, "numpy", f"{target.__module__}:{target.__name__}", name, **recipes | declared | asked)


#: Modules of the generic algorithm, by op.
MODULES = {"cast": "casting", "dequantize": "decoding", "requantize": "requantizing"}
MODULES |= dict.fromkeys(("cast_pair", "cast_ste"), "composed")
MODULES |= dict.fromkeys(("matmul", "cast_matmul", "grouped_matmul"), "products")
SOUND = tuple(MODULES)
