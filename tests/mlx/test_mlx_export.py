"""Functions that call breccia, exported by MLX: imported ones give the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import breccia
import breccia_mlx
from breccia_mlx import to_tree

X = mx.array(np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32))
W = mx.array(np.random.default_rng(1).standard_normal((128, 256)).astype(np.float32))
RECIPES = ["mxfp8", "nvfp4", "int4", "int8,group_size=64,signed=false,symmetric=false", "nf4", "fp8_block", "mlx_affine,bits=3"]


def imported(path: Path, fun: Any, *args: Any) -> list[Any]:
    """Export `fun`, import it, and return its results."""
    file = str(path / "f.mlxfn")
    breccia_mlx.export_function(file, fun, *args)
    return list(mx.import_function(file)(*args))


def within(found: Any, x: Any, st: breccia.ScaledTensor) -> bool:
    """Two sums of 256 products, or 258 terms with a bias and a tensor scale, in any order."""
    values, wide = np.array(breccia.dequantize(st), np.float64), np.array(x, np.float64)
    bound = 259 * 2.0**-24 * (np.abs(wide) @ np.abs(values).T)
    return bool((np.abs(np.array(found, np.float64) - wide @ values.T) <= bound).all())


@pytest.mark.parametrize("recipe", RECIPES)
def test_exported_products_contain_the_codes_that_they_capture(recipe: str, tmp_path: Path) -> None:
    """Evaluated transposed views are included: MLX writes their memory as if it were in C order."""
    st = breccia.cast(W, recipe)
    turned = st.mT
    mx.eval(turned.data, turned.scale)
    assert within(breccia.matmul(X, turned), X, st)
    for fun in (lambda x: breccia.matmul(x, st.mT), lambda x: breccia.matmul(x, turned)):
        (found,) = imported(tmp_path, fun, X)
        assert within(found, X, st)


@pytest.mark.parametrize("recipe", RECIPES)
def test_exported_casts_write_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    for options in ({}, {"axis": -2}, {"rounding": "stochastic", "seed": 7}):
        for x in (X, X[:, :250]):
            key, parts = next(iter(to_tree(breccia.cast(x, recipe, **options)).items()))
            found = imported(
                tmp_path, lambda x, o=options: list(to_tree(breccia.cast(x, recipe, **o)).popitem()[1].values()), x
            )
            assert breccia.bytes_equal(
                breccia_mlx.from_tree({key: dict(zip(parts, found, strict=True))}), breccia.cast(x, recipe, **options)
            )


@pytest.mark.parametrize("recipe", RECIPES)
def test_exported_models_multiply_as_compiled_ones(recipe: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 256))
    breccia_mlx.quantize(model, recipe)
    first = model.layers[0]
    first(X)  # keeps an evaluated view
    (found,) = imported(tmp_path, lambda x: first(x), X)
    assert within(found, X, first.weight.tensor)
    (found,) = imported(tmp_path, lambda x: model(x), X)
    assert np.allclose(np.array(found), np.array(model(X)), rtol=1e-4, atol=1e-4), "sums of two layers in another order"


def test_round_trips_are_exported_and_rules_come_back_afterwards(tmp_path: Path) -> None:
    (found,) = imported(tmp_path, lambda x: breccia.cast_ste(x, "mxfp8"), X)
    assert mx.array_equal(found, breccia.cast_ste(X, "mxfp8")).item()
    assert mx.array_equal(mx.grad(lambda x: breccia.cast_ste(x, "mxfp8").sum())(X), mx.ones(X.shape)).item()
    with pytest.raises(ValueError, match="CustomTransforms"):  # the reason for `breccia_mlx.export_function`
        mx.export_function(str(tmp_path / "f.mlxfn"), lambda x: breccia.cast_ste(x, "mxfp8"), X)
