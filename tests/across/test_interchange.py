"""A tensor keeps its bytes and values when it is transferred between frameworks in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_frameworks import assert_equal_values, bits
from recipes import RECIPES, recipe_id

import breccia
from breccia.bridges import from_dlpack, to_dlpack
from breccia.testing.examples import every_decodable, special_rows, wide

#: `make test` runs every recipe and every framework; `make test-all` runs all combinations.
pytestmark = pytest.mark.covering(1, 2)

for module in ("torch", "jax", "mlx"):
    pytest.importorskip(module)

OTHERS = ("torch", "jax", "mlx")
#: Partial last blocks and padded packed codes along both axes; subnormals, NaN, Inf and zeros.
X = np.concatenate([wide((14, 77), seed=61), special_rows(77)])


def assert_same(taken: breccia.ScaledTensor, home: breccia.ScaledTensor, digest: str) -> None:
    assert breccia.bytes_equal(taken, home)
    assert taken.digest() == digest
    assert (taken.recipe, taken.layout, taken.axis, taken.padding) == (home.recipe, home.layout, home.axis, home.padding)


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_round_trip_through_all_frameworks_keeps_the_bytes(recipe: breccia.ScalingRecipe, axis: int) -> None:
    home = breccia.cast(X, recipe, axis=axis)
    digest, decoded = home.digest(), bits(breccia.dequantize(home))
    for tour in (OTHERS, OTHERS[::-1]):
        taken = home
        for framework in (*tour, "numpy"):
            taken = from_dlpack(taken, framework)
            assert taken.framework == framework
            assert_same(taken, home, digest)
            if tour is OTHERS:
                assert_equal_values(framework, decoded, bits(breccia.dequantize(taken)))
    assert taken.data.shape == home.data.shape and taken.data.dtype == home.data.dtype


def test_every_code_and_scale_is_transferred_unchanged(recipe: breccia.ScalingRecipe) -> None:
    """NaN and Inf codes, NaN payloads, negative and subnormal scales, zero-points, biases."""
    home = every_decodable(recipe)
    digest, taken = home.digest(), home
    for framework in (*OTHERS, "numpy"):
        taken = from_dlpack(to_dlpack(taken), framework)
        assert_same(taken, home, digest)


CROSSINGS = st.tuples(st.sampled_from(("numpy", *OTHERS)), st.sampled_from((None, True)), st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    recipe=st.sampled_from(RECIPES),
    shape=st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 70)),
    axis=st.sampled_from((-1, -2)),
    tour=st.lists(CROSSINGS, min_size=1, max_size=6),
)
def test_no_sequence_of_frameworks_changes_a_tensor(
    recipe: Any, shape: tuple[int, ...], axis: int, tour: list[tuple[str, Any, bool]]
) -> None:
    home = breccia.cast(np.resize(X, shape).astype(np.float32), recipe, axis=axis)
    digest, taken = home.digest(), home
    for framework, copy, bundled in tour:
        taken = from_dlpack(to_dlpack(taken) if bundled else taken, framework, copy=copy)
        assert_same(taken, home, digest)


@pytest.mark.parametrize("recipe", [breccia.MXFP8BlockScaling(), breccia.INT4Scaling(group_size=16)], ids=recipe_id)
def test_pieces_of_a_tensor_can_be_transferred_and_concatenated(recipe: breccia.ScalingRecipe) -> None:
    home = breccia.cast(X, recipe)
    pieces = [from_dlpack(piece, framework) for piece, framework in zip(home.split(16), OTHERS, strict=False)]
    assert len(pieces) == 3
    assert breccia.bytes_equal(breccia.concat([from_dlpack(piece, "numpy") for piece in pieces]), home)
