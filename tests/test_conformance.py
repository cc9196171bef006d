"""Every distribution of ours keeps the laws that a third party's plug-in is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import on_cuda

from breccia.dispatch.registry import registry
from breccia.testing import conformance


def laws(plugin: str, *frameworks: str, **options: Any) -> Callable[..., None]:
    """The laws about a plug-in of ours on these frameworks, or all; of both, those that are installed."""
    found = registry()
    there = [name for name in frameworks if name.partition(":")[0] in found.frameworks]
    if any(p.name == plugin for p in found.plugins) and bool(there) == bool(frameworks):
        return conformance(plugin, frameworks=there or None, **options)

    def absent() -> None:
        pytest.skip(f"breccia-{plugin} is not installed, or none of {', '.join(frameworks)}")

    return absent


test_core = pytest.mark.covering(1)(laws("core", "numpy", "torch", "mlx"))
test_torch = laws("torch", "torch")
test_mlx = laws("mlx", "mlx")
test_native = laws("native")
test_bridges = laws("bridges")
test_torch_on_cuda = on_cuda(laws("torch", "torch:cuda"))
test_core_on_cuda = on_cuda(laws("core", "torch:cuda"))
test_jax_on_cuda = on_cuda(laws("jax", "jax:cuda"))
