"""The conformance laws for third-party plug-ins hold for breccia's own distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import on_cuda

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


test_core = pytest.mark.covering(1)(laws("core", "numpy", "torch", "mlx"))
test_torch = laws("torch", "torch")
test_mlx = laws("mlx", "mlx")
test_native = laws("native")
test_bridges = laws("bridges")
test_torch_on_cuda = on_cuda(laws("torch", "torch:cuda"))
test_core_on_cuda = on_cuda(laws("core", "torch:cuda"))
test_jax_on_cuda = on_cuda(laws("jax", "jax:cuda"))
test_triton_on_cuda = on_cuda(laws("triton", "torch:cuda"))
test_triton_for_jax_on_cuda = on_cuda(laws("triton", "jax:cuda"))
