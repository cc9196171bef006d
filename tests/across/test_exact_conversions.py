"""Conversions that are promised to be exact write the same bytes on every framework, and under its compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import breccia
from breccia import ScaledTensor
from breccia.arrays.frameworks import ops_of
from breccia.testing.examples import every_decodable

#: Every pair and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

PAIRS = [
    ("mxfp4", "fp8_block,block_k=32"),
    ("mxfp6,fp6_format=E3M2", "fp8_block,block_k=32"),
    ("nvfp4", "nvfp4,scale_format=UE5M3"),
    ("nvfp4,global_sense=amax", "nvfp4"),
    ("nvfp4,two_level=false", "nvfp4,global_sense=divisor"),
    ("int4", "int4,symmetric=false"),
    ("gguf,type=Q6_K", "flat,element=INT6,block_size=16"),
    ("gguf,type=Q4_K", "flat,offset=bias"),
]


MODULES = {"torch": ("torch", "from_numpy"), "jax": ("jax.numpy", "asarray"), "mlx": ("mlx.core", "array")}


def components(st: ScaledTensor) -> tuple[Any, ...]:
    return st.data, st.scale, st.zero_point, st.global_scale


def stored(parts: tuple[Any, ...]) -> list[bytes | None]:
    return [None if part is None else np.ascontiguousarray(ops_of(part).to_numpy(part)).tobytes() for part in parts]


def moved(st: ScaledTensor, convert: Any) -> ScaledTensor:
    """A tensor of NumPy arrays with arrays of another framework."""
    data, scale, zero, total = (None if part is None else convert(np.asarray(part)) for part in components(st))
    return breccia.from_buffer(data, scale, st.recipe, st.layout, zero, total, shape=st.shape)


@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_promised_conversions_write_the_bytes_of_numpy(framework: str, pair: tuple[str, str]) -> None:
    module, function = MODULES[framework]
    convert = getattr(pytest.importorskip(module), function)
    st, target = every_decodable(breccia.recipe(pair[0])), pair[1]
    assert breccia.exactness(*pair).exact
    expected = stored(components(breccia.requantize(st, target)))
    for exact in (False, True):
        assert stored(components(breccia.requantize(moved(st, convert), target, require_exact=exact))) == expected


@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
def test_they_read_no_values_under_jit(pair: tuple[str, str]) -> None:
    jax = pytest.importorskip("jax")
    st, target = every_decodable(breccia.recipe(pair[0])), pair[1]

    def run(t: ScaledTensor) -> tuple[Any, ...]:
        return components(breccia.requantize(t, target))

    found = jax.jit(run)(moved(st, jax.numpy.asarray))
    assert stored(found) == stored(components(breccia.requantize(st, target)))
