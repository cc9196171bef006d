"""The conformance laws for breccia's own plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from breccia.dispatch.registry import registry
from breccia.testing import conformance


def laws(plugin: str, *frameworks: str, **options: Any) -> Callable[..., None]:
    """The laws for one of breccia's plug-ins, on these frameworks or on all. Skips what is not installed."""
    found = registry()
    installed = [name for name in frameworks if name.partition(":")[0] in found.frameworks]
    if any(p.name == plugin for p in found.plugins) and bool(installed) == bool(frameworks):
        return conformance(plugin, frameworks=installed or None, **options)

    def absent() -> None:
        pytest.skip(f"breccia-{plugin} is not installed, or none of {', '.join(frameworks)}")

    return absent
