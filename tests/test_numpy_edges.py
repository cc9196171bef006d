"""The NumPy kernels at their borders: blocks of any sides, results that lie in the input, what they decline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import recipe_id, wide

import breccia
from breccia import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT8Scaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.codecs import E4M3
from breccia.errors import NonFiniteError
from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.ops import NUMPY
from breccia.rules import DIVIDE, LINEAR, RECIP, Rule


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 8, 16, 32, 48, 64])
def test_blocks_of_any_sides_are_written_and_read_alike(m: int, k: int, axis: int) -> None:
    recipe = Float8BlockScaling(block_m=m, block_k=k)
    for shape in ((12, 192), (9, 100), (2, 5, 64)):
        x = wide(shape, seed=m * k, exponents=4)
        found, expected = kernels.cast(x, recipe, axis=axis), reference.cast(x, recipe, axis=axis)
        assert found.layout == expected.layout
        np.testing.assert_array_equal(found.data, expected.data)
        np.testing.assert_array_equal(found.scale.view(np.uint32), expected.scale.view(np.uint32))
        values, wanted = kernels.dequantize(expected), reference.dequantize(expected)
        np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()], ids=lambda r: r.name)
def test_out_is_written_where_it_lies_and_not_copied_into(recipe: ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (wide((8, 128), seed=seed, exponents=2) for seed in (1, 2))
    out = kernels.cast(x, recipe)
    expected = reference.cast(y, recipe)

    def copied(*_: Any) -> Any:
        raise AssertionError("a second result was made")

    monkeypatch.setattr(reference, "_assign", copied)
    assert kernels.cast(y, recipe, out=out) is out
    assert breccia.bytes_equal(out, expected)


def test_out_that_lies_in_the_input_is_written_when_all_is_read() -> None:
    """4 bytes of input make 1 of data, in the last quarter of the same memory."""
    recipe = Float8CurrentScaling()
    memory = wide((64, 128), seed=5, exponents=2)
    expected = reference.cast(memory.copy(), recipe)
    data = memory.reshape(-1).view(np.uint8)[3 * memory.size :].reshape(memory.shape)
    out = ScaledTensor(data, np.zeros((), np.float32), recipe, recipe.layout)
    assert kernels.cast(memory, recipe, out=out) is out
    assert breccia.bytes_equal(out, expected)


def test_out_that_holds_the_codes_is_written_when_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the first chunk lie over codes of the next ones."""
    monkeypatch.setattr(kernels, "CHUNK", 256)
    recipe = MXFP8BlockScaling()
    st = reference.cast(wide((64, 128), seed=9, exponents=2), recipe)
    expected = reference.dequantize(st)
    memory = np.zeros((64, 128), np.float32)
    data = memory.reshape(-1).view(np.uint8)[: memory.size].reshape(memory.shape)
    data[...] = st.data
    held = ScaledTensor(data, st.scale, recipe, st.layout)
    assert kernels.dequantize(held, out=memory) is memory
    np.testing.assert_array_equal(memory.view(np.uint32), expected.view(np.uint32))


def recipe_of(*rules: Rule) -> ScalingRecipe:
    @dataclass(frozen=True)
    class Odd(NVFP4BlockScaling):
        pass

    Odd.rules = rules  # type: ignore[assignment,misc]
    return Odd()


def test_a_coarse_rule_of_another_kind_is_declined_with_the_reason() -> None:
    x = wide((4, 64), seed=6, exponents=2)
    for recipe, reason in (
        (NVFP4BlockScaling(), None),
        (recipe_of(RECIP, LINEAR), "'nvfp4' as declared has no fast form here"),
    ):
        found = breccia.explain("cast", x, recipe, prefer="numpy.cast")
        assert next(v.reason for v in found.verdicts if v.kernel.name == "numpy.cast") == reason


@pytest.mark.parametrize("rules", [(RECIP, LINEAR), (LINEAR, DIVIDE), (LINEAR, RECIP)], ids=str)
def test_the_rules_of_both_levels_are_those_declared(rules: tuple[Rule, Rule]) -> None:
    recipe = recipe_of(*rules)
    for x in (wide((4, 64), seed=6, exponents=2), wide((64, 512), seed=7, exponents=2)):
        found, expected = kernels.cast(x, recipe), reference.cast(x, recipe)
        for part in ("data", "scale", "global_scale"):
            assert getattr(found, part).tobytes() == getattr(expected, part).tobytes(), part


@pytest.mark.parametrize(
    "recipe",
    [INT8Scaling(signed=False, symmetric=False, offset="bias"), INT8Scaling(signed=False, symmetric=False), Float8RowScaling()],
    ids=recipe_id,
)
def test_blocks_larger_than_a_chunk_are_read_alike(recipe: ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 256)
    for axis in (-1, -2):
        st = reference.cast(wide((600, 600), seed=8, exponents=2), recipe, axis=axis)
        values, wanted = kernels.dequantize(st), reference.dequantize(st)
        np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))


def test_codes_by_division_are_divided_under_two_levels() -> None:
    """Numbers beside midpoints of codes times the scale: there a product with the reciprocal rounds otherwise."""
    recipe = recipe_of(LINEAR, DIVIDE)
    x = wide((64, 256), seed=10, exponents=2)
    first = reference.cast(x, recipe)
    e = np.repeat(first.scale.view(np.uint8).astype(np.int32), 16, axis=1)
    e = E4M3.decode(NUMPY, e) * first.global_scale
    largest = np.abs(x).reshape(64, -1, 16).max(-1).repeat(16, axis=1) == np.abs(x)
    middles = np.random.default_rng(0).choice(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32), x.shape)
    beside = (middles * e).view(np.int32) + np.random.default_rng(1).integers(-1, 2, x.shape, dtype=np.int32)
    ties = np.where(largest, x, beside.view(np.float32))
    expected = reference.cast(ties, recipe)
    assert expected.data.tobytes() != reference.cast(ties, NVFP4BlockScaling()).data.tobytes()
    assert kernels.cast(ties, recipe).data.tobytes() == expected.data.tobytes()


@pytest.mark.parametrize("cast", [reference.cast, kernels.cast], ids=["generic", "NumPy"])
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_nonfinite_raise_refuses_one_fault(cast: Any, fault: float) -> None:
    x = wide((8, 64), seed=11, exponents=2)
    assert cast(x, MXFP8BlockScaling(), nonfinite="raise").shape == x.shape
    x[5, 33] = fault
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling(), NVFP4BlockScaling()):
        with pytest.raises(NonFiniteError, match="x holds NaN or Inf"):
            cast(x, recipe, nonfinite="raise")
