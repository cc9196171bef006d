"""The cast of compiled functions on MLX's CPU: NumPy's bytes, in slabs, along both axes, and what it leaves to others."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from recipes import RECIPES, declared, recipe_id
from repeated_codes import REPEATED

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.codecs import F32, UE4M3, UINT4, Codec, Lookup
from breccia.formats import Level
from breccia.kernels.reference.packing import pack
from breccia.rules import LINEAR, Divide
from breccia.tensors.components import components
from breccia.tensors.equality import bytes_equal
from breccia.testing.examples import special_rows, wide
from breccia_mlx import compiled, from_tree, to_tree

NAME = "mlx.compiled.cast"
MXFP8 = breccia.MXFP8BlockScaling()
#: The recipes that the kernel casts to.
CAST = [recipe for recipe in RECIPES if not isinstance(recipe.rules[-1], Divide)]
K = 384


def negatives(rows: int) -> np.ndarray:
    """Blocks of one sign, of both zeros, of numbers below 2^-126, and of few of one sign among zeros."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, K)).astype(np.float32)
    x[0::4] = -np.abs(x[0::4]) - 1
    x[1::4] = np.where(rng.random((len(x[1::4]), K)) < 0.5, np.float32(-0.0), np.float32(0))
    x[2::4] = np.abs(x[2::4]) * np.float32(2.0**-127)
    x[3::4] = np.where(rng.random((len(x[3::4]), K)) < 0.05, x[3::4], np.float32(-0.0))
    return x


def tiny(rows: int) -> np.ndarray:
    """Numbers on both sides of 2^-126, whose scaled values are not small."""
    return wide((rows, K), seed=3, exponents=6) * np.float32(2.0**-122)


X = np.concatenate([wide((24, K), seed=2, exponents=60), special_rows(K)[:8], negatives(16), tiny(8)])
X = X[: len(X) // 8 * 8]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("recipe", CAST, ids=recipe_id)
def test_every_slab_has_numpys_bytes(recipe: breccia.ScalingRecipe, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SLAB", 9 * K)  # several slabs, of several rows of blocks
    with np.errstate(all="ignore"):
        whole = mx.array(X).astype(getattr(mx, kind))
    numbers = np.array(whole.astype(mx.float32))
    for axis in (-1, -2):
        x, same = (whole, numbers) if axis == -1 else (mx.contiguous(whole.T), np.ascontiguousarray(numbers.T))
        expected = breccia.cast(same, recipe, axis=axis)
        assert bytes_equal(breccia.cast(x, recipe, axis=axis, prefer=NAME), expected)


def test_slabs_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SLAB", 2**14)
    x = mx.ones((1024, 1024))
    cast = mx.compile(lambda x: to_tree(breccia.cast(x, "fp8_row")))
    mx.eval(x, cast(x))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(cast(x))
    assert mx.get_peak_memory() - before < 3 * 2**20, "codes take 1 MiB: they are not kept twice"


@pytest.mark.parametrize("recipe", CAST, ids=recipe_id)
def test_leading_axes_are_kept(recipe: breccia.ScalingRecipe) -> None:
    cube = X.reshape(-1, 8, K)
    for x, axis in ((cube, -1), (cube.swapaxes(1, 2), -2)):
        assert bytes_equal(breccia.cast(mx.array(x), recipe, axis=axis, prefer=NAME), breccia.cast(x.copy(), recipe, axis=axis))


@pytest.mark.parametrize("recipe", CAST, ids=recipe_id)
def test_partial_blocks_have_numpys_bytes(recipe: breccia.ScalingRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along both axes, with a partly filled last byte, and in arrays of several matrices."""
    monkeypatch.setattr(compiled, "SLAB", 9 * K)
    for rows, columns in ((53, K - 3), (56, 7), (1, K - 129)):
        x = np.ascontiguousarray(X[:rows, :columns])
        for part, axis in ((x, -1), (np.ascontiguousarray(x.T), -2), (np.stack([x, x * np.float32(0.5)]), -1)):
            expected = breccia.cast(part, recipe, axis=axis)
            found = breccia.cast(mx.array(part), recipe, axis=axis, prefer=NAME)
            assert found.padding == expected.padding and found.layout == expected.layout and bytes_equal(found, expected)


def test_a_tensor_with_one_scale_may_have_one_axis() -> None:
    x, recipe = X[0], breccia.Float8CurrentScaling()
    assert bytes_equal(breccia.cast(mx.array(x), recipe, prefer=NAME), breccia.cast(x, recipe))


ELEMENTS = list({recipe.format.element: recipe for recipe in CAST}.values())


@pytest.mark.parametrize("recipe", ELEMENTS, ids=lambda r: r.format.element.name)
def test_numbers_around_every_boundary_of_two_codes_are_rounded_as_numpy_rounds_them(recipe: breccia.ScalingRecipe) -> None:
    """The halves between neighbouring codes, and the two FP32 numbers beside each."""
    element: Codec = recipe.format.element
    values = np.unique([v for v in map(element.value, range(1 << element.bits)) if np.isfinite(v)])
    halves = np.float32((values[1:] + values[:-1]) / 2)
    near = np.concatenate([halves, *(np.nextafter(halves, np.float32(end)) for end in (-np.inf, np.inf))])
    scaled = np.concatenate([near, near * 1.5, np.float32(values), -np.float32(values)])
    ones = mx.ones(scaled.shape)
    codes = compiled._codes(mx.array(scaled), element, ones, None, None)
    expected = element.encode(ops_of(scaled), scaled)
    assert np.array_equal(np.array(codes), expected)
    assert len(set(expected.tolist())) >= len(values) - 1  # all but the negative end of symmetric integers


@pytest.mark.parametrize("bits", range(1, 8))
def test_codes_of_every_width_are_packed_as_numpy_packs_them(bits: int) -> None:
    codec = Lookup(f"L{bits}", bits, None, "a test", tuple(float(n) for n in range(1 << bits)))
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 48)).astype(np.uint8)
    expected = pack(ops_of(codes), codes.astype(np.int32), codec)
    packed = compiled._packed(mx.array(codes), codec)
    assert np.array_equal(np.array(mx.reshape(packed, (5, -1)).view(mx.uint8)), expected)


@pytest.mark.parametrize(
    "codec",
    [
        Lookup("shuffled", 2, None, "a test", (1.0, -0.5, 0.0, 0.25)),
        Lookup("great", 2, None, "a test", (2.0**100, 0.0, -(2.0**127), 2.0**120)),
        REPEATED,
    ],
    ids=lambda c: c.name,
)
def test_a_table_in_any_order_is_looked_up(codec: Lookup) -> None:
    far = np.float32([-0.0, 3e38, -3e38, 2.0**99, 2.0**110, np.inf, -np.inf])
    y = np.concatenate([np.linspace(-4, 4, 129, dtype=np.float32), far])
    found = compiled._looked_up(codec, mx.array(y.view(np.int32)), mx.full(y.shape, 0x3F800000, mx.int32))
    assert np.array_equal(np.array(found), codec.encode(ops_of(y), y))


def test_transformed_functions_run_it() -> None:
    """Compiled and mapped ones; each example of a batch has its own scales."""
    winners: list[str] = []

    def cast(x: Any, recipe: breccia.ScalingRecipe) -> breccia.ScaledTensor:
        winner = breccia.explain("cast", x, recipe).winner
        assert winner is not None
        winners.append(winner.name)
        return breccia.cast(x, recipe)

    for recipe in (MXFP8, breccia.INT4Scaling(group_size=64, signed=False, symmetric=False, offset="bias")):
        expected = breccia.cast(X, recipe)
        found = mx.compile(lambda x, recipe=recipe: to_tree(cast(x, recipe)))(mx.array(X))
        assert bytes_equal(from_tree(found), expected)
        batch = mx.array(np.stack([X[::-1], X], axis=1))
        mapped = mx.vmap(lambda x, recipe=recipe: components(cast(x, recipe)), in_axes=1)(batch)
        for name, part in components(expected).items():
            assert np.array_equal(np.array(mapped[name][1]).view(np.uint8), part.view(np.uint8))
    assert winners == [NAME] * 4


def test_explain_says_what_it_leaves_to_the_generic_algorithm() -> None:
    x = mx.ones((8, 128))
    margin = declared(UINT4, Level(F32, (1, 32)), rule=replace(LINEAR, margin=1), offset="bias")
    for array, recipe, options, said in (
        (x, MXFP8, {"rounding": "stochastic", "seed": 1}, "stochastic rounding, supplied scales and out= are"),
        (x, breccia.DelayedScaling(), {"scale": 2.0}, "stochastic rounding, supplied scales and out= are"),
        (x, MXFP8, {"nonfinite": "raise"}, "nonfinite='raise' reads values"),
        (x, declared(UE4M3, Level(F32, (1, 32))), {}, "it does not round to UE4M3"),
        (
            x,
            declared(breccia.Integer("vast", 4, None, "this test", True, -105), Level(F32, (1, 32))),
            {},
            "it does not round to vast",
        ),
        (x, breccia.Float8RowScaling(scale_rule="divide"), {}, "scale rule 'divide' does not multiply by one reciprocal"),
        (
            x,
            margin,
            {},
            "it supports offsets of integers in blocks, without a margin",
        ),
        (x[:0], breccia.Float8BlockScaling(), {}, "empty arrays, and those of too few axes, are"),
    ):
        assert_said(said, str(breccia.explain("cast", array, recipe, **options)))


def test_explain_says_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert_said("its arithmetic has been tested on MLX's CPU only", str(breccia.explain("cast", mx.ones((8, 96)), MXFP8)))
    monkeypatch.undo()
    monkeypatch.setattr(sys, "byteorder", "big")
    assert_said("it packs codes on little-endian machines", str(breccia.explain("cast", mx.ones((8, 160)), MXFP8)))


def assert_said(reason: str | None, explained: str) -> None:
    """The line after the kernel's name has the reason; without one, only a faster kernel precedes it."""
    lines = explained.splitlines()
    line = lines[next(n for n, line in enumerate(lines) if NAME in line) + 1]
    assert (reason or "mlx.cpu.cast comes first") in line, explained
