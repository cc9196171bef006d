"""Every distribution of ours keeps the laws that a third party's plug-in is held to."""

from __future__ import annotations

import pytest
from conftest import RECIPES

from breccia.testing import conformance

test_core = conformance("core", frameworks=("numpy", "torch", "mlx"))
test_core_on_jax = pytest.mark.slow(conformance("core", frameworks=("jax",)))  # which compiles each shape anew
test_every_setting_of_cores_recipes = pytest.mark.slow(conformance("core", recipes=RECIPES))
test_torch = conformance("torch")
test_jax = conformance("jax")
test_mlx = conformance("mlx")
test_native = conformance("native")
test_bridges = conformance("bridges")
