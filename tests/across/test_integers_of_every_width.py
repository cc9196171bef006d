"""Integers of 1 to 8 bits have the same bytes in every framework, along both axes, cut, joined, in files and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_frameworks import FRAMEWORKS, assert_equal_values, bits, convert
from marks import jax_is_long
from recipes import WIDTHS, recipe_id

import breccia
from breccia.bridges import from_dlpack, load_safetensors, save_safetensors
from breccia.testing import oracle, vectors
from breccia.testing.examples import special_rows, wide

#: Every recipe and every framework in `make test`, and all pairs in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

#: Lengths that end within a block and within a group of bytes; subnormals, NaN, Inf and zeros.
X = np.concatenate([wide((6, 43), seed=5), special_rows(43)])
frameworks = pytest.mark.parametrize("framework", jax_is_long(FRAMEWORKS))
widths = pytest.mark.parametrize("recipe", WIDTHS, ids=recipe_id)


@frameworks
@widths
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_cast_writes_a_dense_stream_that_decodes_as_the_oracle_says(
    recipe: breccia.INTScaling, framework: str, axis: int
) -> None:
    expected = oracle.cast(X, recipe)
    x = convert(framework, X if axis == -1 else np.ascontiguousarray(X.T))
    st = breccia.cast(x, recipe, axis=axis)
    st = st if axis == -1 else st.mT
    data = np.asarray(from_dlpack(st, "numpy").data).view(np.uint8)
    assert data.tobytes() == vectors.packed(expected.codes, recipe.format.element).tobytes()
    assert_equal_values(framework, bits(breccia.dequantize(st)), oracle.dequantize(expected, recipe).view(np.int32))


@frameworks
@widths
def test_cut_joined_and_kept_tensors_have_the_same_bytes(recipe: breccia.INTScaling, framework: str, tmp_path: Path) -> None:
    home = breccia.cast(X, recipe)
    st = breccia.cast(convert(framework, X), recipe)
    assert st.digest() == home.digest()
    pieces = st.split([4, 25]) if recipe.group_size is None else st.split(24, -1)
    joined = breccia.concat(pieces, 0 if recipe.group_size is None else -1)
    assert joined.digest() == home.digest() and breccia.stack([st, st])[1].digest() == home.digest()
    assert breccia.bytes_equal(st[2:5], home[2:5]) and st.mT.mT.digest() == home.digest()
    save_safetensors({"w": st}, tmp_path / "w.safetensors")
    assert load_safetensors(tmp_path / "w.safetensors", framework=framework)["w"].digest() == home.digest()
    assert from_dlpack(from_dlpack(st, "numpy"), framework).digest() == home.digest()


@pytest.mark.long
@pytest.mark.parametrize("recipe", [r for r in WIDTHS if r.bits in (1, 3, 5)], ids=recipe_id)
def test_torch_compiles_casts_and_products_of_odd_widths(recipe: breccia.INTScaling) -> None:
    torch = pytest.importorskip("torch")

    def step(x: Any, w: Any) -> tuple[Any, Any, Any]:
        st = breccia.cast(w, recipe)
        return st.data, breccia.dequantize(st), breccia.matmul(x, st.mT)

    torch.compiler.reset()  # of one function it keeps few graphs
    x, w = (torch.from_numpy(wide(shape, seed=6, exponents=2)) for shape in ((3, 43), (5, 43)))
    for found, wanted in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(x, w), step(x, w), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [r for r in WIDTHS if r.bits in (2, 3, 7) and r.offset == "bias"], ids=recipe_id)
def test_jax_maps_trees_of_odd_widths_and_compiles_them(recipe: breccia.INTScaling) -> None:
    jax = pytest.importorskip("jax")
    st = breccia.cast(jax.numpy.asarray(X), recipe)
    leaves, tree = jax.tree.flatten({"w": st})
    again = jax.tree.unflatten(tree, leaves)["w"]
    assert again.digest() == st.digest()
    assert_equal_values("jax", bits(jax.jit(breccia.dequantize)(again)), bits(breccia.dequantize(st)))
