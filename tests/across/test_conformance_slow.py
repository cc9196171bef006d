"""Slow conformance runs: JAX, which compiles each shape, and every setting of every recipe.

tests/jax/test_jax.py, test_parity.py and test_ways.py compare JAX with NumPy's bytes in the fast suite.
"""

from __future__ import annotations

import pytest
from own_laws import laws
from recipes import RECIPES, WIDTHS

pytestmark = pytest.mark.slow

test_core_on_jax = laws("core", "jax")
test_jax = laws("jax", "jax")
test_every_setting_of_cores_recipes = laws("core", recipes=[*RECIPES, *WIDTHS])
