"""The conformance laws for third-party plug-ins hold for breccia's own distributions."""

from __future__ import annotations

import pytest
from marks import on_cuda
from own_laws import laws
from recipes import WIDTHS

values_and_pairs = pytest.mark.covering(1, 2)
#: Every kind of scales and, with those of int4, every width; `make slow` takes each kind with each width.
KINDS = WIDTHS[::5]
test_core = values_and_pairs(laws("core", "numpy", recipes=KINDS))
#: The generic algorithm on other arrays, whose bytes tests/across/test_parity.py compares with NumPy's for every recipe.
test_core_on_others = pytest.mark.long(pytest.mark.covering(1, 1)(laws("core", "torch", "mlx", recipes=KINDS)))
test_torch = values_and_pairs(laws("torch", "torch"))
test_mlx = values_and_pairs(laws("mlx", "mlx"))
test_native = values_and_pairs(laws("native"))
test_bridges = values_and_pairs(laws("bridges"))
test_torch_on_cuda = on_cuda(laws("torch", "torch:cuda"))
test_core_on_cuda = on_cuda(laws("core", "torch:cuda"))
test_jax_on_cuda = on_cuda(laws("jax", "jax:cuda"))
test_triton_on_cuda = on_cuda(laws("triton", "torch:cuda"))
test_triton_for_jax_on_cuda = on_cuda(laws("triton", "jax:cuda"))
