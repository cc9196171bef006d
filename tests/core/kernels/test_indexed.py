"""Casts with groups given by an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import jax_is_long
from recipes import recipe_id

import breccia
from breccia import INT4Scaling, INTScaling, LayoutError, NF4Scaling, OptionError, PerGroupIndex, RecipeError, UnsupportedError
from breccia.testing.examples import wide
from breccia.testing.places import Place

SETTINGS = [
    INT4Scaling(8),
    INT4Scaling(8, signed=False, symmetric=False),
    INTScaling(3, 8, signed=False, symmetric=False, offset="bias", scale_dtype="fp32"),
    INT4Scaling(8, signed=False, symmetric=False, offset="float_zero_point"),
    NF4Scaling(8),
]
#: 20 elements: 8 of group 0, 7 of group 1, 5 of group 2.
INDEX = [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 2, 1, 2, 1]


def values_of_groups(x: np.ndarray, recipe: breccia.ScalingRecipe) -> np.ndarray:
    """Each group's columns cast by themselves."""
    expected = np.zeros_like(x)
    for group in set(INDEX):
        columns = [k for k, of in enumerate(INDEX) if of == group]
        expected[:, columns] = breccia.dequantize(breccia.cast(np.ascontiguousarray(x[:, columns]), recipe))
    return expected


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("framework", jax_is_long(["numpy", "torch", "jax", "mlx"]))
@pytest.mark.parametrize("recipe", SETTINGS, ids=recipe_id)
def test_each_group_is_cast_as_if_it_were_alone(recipe: breccia.ScalingRecipe, framework: str) -> None:
    place, x = Place(framework), wide((5, 20), seed=3, exponents=3)
    expected = values_of_groups(x, recipe)
    st = breccia.cast(place.array(x), recipe, group_index=INDEX)
    assert st.layout == PerGroupIndex(tuple(INDEX), 3) and st.shape == (5, 20) and tuple(st.scale.shape) == (5, 3)
    assert (np.asarray(breccia.dequantize(st)) == expected).all()
    across = breccia.cast(place.array(np.ascontiguousarray(x.T)), recipe, axis=-2, group_index=np.array(INDEX))
    assert breccia.bytes_equal(across.mT, st)


def test_an_index_in_order_gives_the_codes_of_a_plain_cast() -> None:
    x = wide((4, 64), seed=1, exponents=2)
    st, plain = breccia.cast(x, INT4Scaling(16), group_index=np.arange(64) // 16), breccia.cast(x, INT4Scaling(16))
    assert st.data.tobytes() == plain.data.tobytes() and st.scale.tobytes() == plain.scale.tobytes()


def test_a_group_may_have_no_elements() -> None:
    st = breccia.cast(wide((2, 4), seed=1, exponents=1), INT4Scaling(4), group_index=PerGroupIndex((2, 0, 2, 0), 4))
    assert st.scale[:, [1, 3]].tolist() == [[1.0, 1.0]] * 2 and st.layout.groups == 4  # type: ignore[attr-defined]


def test_a_file_has_the_index_as_an_array(tmp_path: Path) -> None:
    x = wide((3, 20), seed=2, exponents=1)
    st = breccia.cast(x, INT4Scaling(8), group_index=INDEX)
    breccia.bridges.save_safetensors({"w": st}, tmp_path / "a.safetensors")
    from safetensors.numpy import load_file

    assert load_file(tmp_path / "a.safetensors")["w.group_index"].tolist() == INDEX
    assert b'"index"' not in (tmp_path / "a.safetensors").read_bytes()
    assert breccia.bytes_equal(breccia.bridges.load_safetensors(tmp_path / "a.safetensors")["w"], st)
    loaded = breccia.bridges.load_safetensors(tmp_path / "a.safetensors", framework="torch")["w"]
    assert loaded.layout == st.layout and (breccia.dequantize(loaded).numpy() == breccia.dequantize(st)).all()


@pytest.mark.parametrize(
    ("index", "options", "error", "said"),
    [
        ([0] * 9 + [1] * 11, {}, LayoutError, "puts 9 elements into group 0; a scale of int4,group_size=8 is for 8 at most"),
        (INDEX[:-1], {}, LayoutError, "one group for each element of the contraction axis, 20 of them; got 19"),
        ([-1, *INDEX[1:]], {}, RecipeError, r"index\[0\]=-1 must lie in 0..2"),
        (INDEX, {"rounding": "stochastic", "seed": 1}, OptionError, "takes neither rounding=, storage= nor out="),
        (
            INDEX,
            {"recipe": "mxfp8"},
            UnsupportedError,
            "for recipes with one float scale per group along K.*; mxfp8 has other blocks",
        ),
        (INDEX, {"recipe": "fp8_current"}, UnsupportedError, "fp8_current has other blocks. Cast without it"),
    ],
)
def test_an_index_that_no_cast_follows_is_refused(index: Any, options: Any, error: type[Exception], said: str) -> None:
    arguments = {"recipe": INT4Scaling(8), **options}
    with pytest.raises(error, match=said):
        breccia.cast(wide((5, 20), seed=3, exponents=3), group_index=index, **arguments)


def test_a_traced_index_is_refused() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 20))
    with pytest.raises(UnsupportedError, match="group_index has to be known"):
        jax.jit(lambda i: breccia.cast(x, INT4Scaling(8), group_index=i))(jax.numpy.array(INDEX))
    st = jax.jit(lambda x: breccia.cast(x, INT4Scaling(8), group_index=INDEX))(x)
    assert st.layout.groups == 3
