"""torch writes NumPy's bytes: on 10^7 values, and on 10^9 in the slow run; benchmarks/parity.py draws and compares."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RECIPES

import breccia

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

#: What torch's own modules do when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

#: Values of each recipe, so that all of them have 10^7 in every suite, 10^9 in the slow one.
FAST, SLOW = (-(-total // len(RECIPES)) for total in (10**7, 10**9))
#: Values of a slab: memory of some 100 MB.
SLAB = 1 << 20

MXFP8 = breccia.MXFP8BlockScaling()


@pytest.fixture(scope="module")
def parity() -> Iterator[ModuleType]:
    """The module, on one thread: xdist has a process for each core."""
    pytest.importorskip("ml_dtypes")
    threads = torch.get_num_threads(), breccia.get_num_threads()
    torch.set_num_threads(1)
    breccia.set_num_threads(1)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import parity as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    yield module
    torch._dynamo.reset()
    torch.set_num_threads(threads[0])
    breccia.set_num_threads(threads[1])


def assert_parity(tallies: dict[str, Any], values: int) -> None:
    for mode, tally in tallies.items():
        assert tally.faults == [] and tally.differing == 0, mode
        assert tally.values >= values and tally.bytes > 7 * values, mode  # of 4 + 2 + 2 decoded bytes and a part of one


def test_eager(recipe: breccia.ScalingRecipe, parity: ModuleType) -> None:
    """By the kernels that serve a CPU, and by the generic algorithm that serves other devices."""
    drawn = itertools.chain(parity.small(recipe), parity.draws(recipe, FAST, SLAB))
    writers = {"eager": parity.eager(recipe), "generic": parity.generic(recipe)}
    assert_parity(parity.parity(recipe, writers, "cpu", drawn)[0], FAST)


def few(parity: ModuleType, recipe: breccia.ScalingRecipe) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """Every kind that one graph serves, and in turn one that needs its own: a graph takes longer than all its numbers."""
    number = RECIPES.index(recipe)
    columns = (parity.WHOLE, parity.RAGGED)[number % 2]
    plain = [replace(slab, columns=columns) for slab in parity.SLABS if slab.plain]
    others = [slab for slab in parity.SLABS if not slab.plain]
    small = list(parity.small(recipe))
    yield small[number % len(small)]
    yield from parity.draws(recipe, FAST, SLAB, [*plain, others[number % len(others)]])


def test_compiled(recipe: breccia.ScalingRecipe, parity: ModuleType) -> None:
    writers = {"compiled": parity.compiled(recipe, "aot_eager")}
    assert_parity(parity.parity(recipe, writers, "cpu", few(parity, recipe))[0], FAST)


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_compiled_by_inductor(name: str, parity: ModuleType) -> None:
    recipe = breccia.recipe(name)
    slabs = [slab for slab in parity.SLABS if slab.name in ("NaN and Inf, ragged", "along rows, ragged")]
    drawn = parity.draws(recipe, FAST, SLAB, slabs)
    assert_parity(parity.parity(recipe, {"compiled": parity.compiled(recipe)}, "cpu", drawn)[0], FAST)


@pytest.mark.slow
def test_a_billion_values(recipe: breccia.ScalingRecipe, parity: ModuleType) -> None:
    drawn = itertools.chain(parity.small(recipe), parity.draws(recipe, SLOW, SLAB))
    writers = {"eager": parity.eager(recipe), "compiled": parity.compiled(recipe)}
    assert_parity(parity.parity(recipe, writers, "cpu", drawn)[0], SLOW)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_cuda(recipe: breccia.ScalingRecipe, mode: str, parity: ModuleType) -> None:
    every = itertools.chain(parity.small(recipe), parity.draws(recipe, FAST, SLAB))
    drawn = every if mode == "eager" else few(parity, recipe)
    assert_parity(parity.parity(recipe, {mode: parity.MODES[mode](recipe)}, "cuda", drawn)[0], FAST)


# -- what is drawn, and that a difference is found --------------------------------------------------------------------


def test_slabs_reach_what_they_are_named_after(parity: ModuleType) -> None:
    drawn = {name: x for name, x, _ in parity.draws(MXFP8, 10 * FAST, SLAB)}
    assert {x.dtype.name for x in drawn.values()} == {"float32", "float16", "bfloat16"}
    bits = drawn["bit patterns"].view(np.uint32)
    assert len(np.unique(bits >> 23)) == 512, "all signs and exponents"
    for name, every in (("bit patterns", False), ("finite bit patterns, ragged", True), ("FP16 patterns", False)):
        finite = np.isfinite(drawn[name].astype(np.float32))
        assert finite.all() == every and finite.all(axis=-1).any(), name
    x = drawn["zeros, ragged"]
    assert ((x == 0) & np.signbit(x)).any() and ((x == 0) & ~np.signbit(x)).any() and (x == 0).all(axis=-1).any()
    assert ((x != 0) & (np.abs(x) < 2.0**-126)).any()
    x = drawn["saturation"]
    flt_max, smallest = np.finfo(np.float32).max, np.float32(2.0**-126)
    beside = [np.nextafter(limit, np.float32(0)) for limit in (448, 464, flt_max, smallest)]
    assert {448, 464, flt_max, smallest, *beside} <= set(np.abs(x).ravel().tolist())
    x = np.abs(drawn["wide exponents"].astype(np.float64))
    assert np.isfinite(x).all() and x.max() / x[x > 0].min() > 2.0**100
    x = drawn["NaN and Inf, ragged"]
    assert np.isnan(x).any() and np.isinf(x).any() and np.isfinite(x).all(axis=-1).any()
    assert drawn["3-D, ragged"].ndim == 3 and drawn["3-D, ragged"].shape[-1] % 8 and drawn["3-D, ragged"].shape[-2] % 2


@pytest.mark.parametrize("recipe", [MXFP8, breccia.INT8Scaling(), breccia.INT4Scaling(group_size=16)], ids=lambda r: r.name)
def test_ties_are_halfway_between_codes(recipe: breccia.ScalingRecipe, parity: ModuleType) -> None:
    x = next(x for name, x, _ in parity.draws(recipe, FAST, SLAB) if name == "ties").astype(np.float64)
    st = breccia.cast(x.astype(np.float32), recipe)
    scale = np.max(np.abs(x), axis=-1, keepdims=True) / recipe.format.element.max  # all blocks of a row have its amax
    y = breccia.dequantize(st) / scale
    numbers = np.unique(np.array(recipe.format.element.table, np.uint32).view(np.float32).astype(np.float64))
    numbers = numbers[np.isfinite(numbers)]
    above = np.searchsorted(numbers, x / scale)
    halfway = (numbers[above] + numbers[above - 1]) / 2 == x / scale
    assert 0.2 < np.mean(halfway) < 0.5
    assert set(np.abs(y - x / scale)[halfway]) == set((np.diff(numbers) / 2)[np.unique(above[halfway]) - 1])


@pytest.mark.parametrize("part", ["data", "scale", "zero_point", "float32", "bfloat16", "float16"])
def test_one_flipped_bit_is_one_differing_byte(part: str, parity: ModuleType) -> None:
    recipe = breccia.INT4Scaling(group_size=16, signed=False, symmetric=False)
    drawn = list(parity.draws(recipe, 1000, SLAB, parity.SLABS[:1]))

    def astray(x: Any, options: dict[str, Any]) -> Any:
        found = parity.eager(recipe)(x, options)
        array = (found.parts | found.decoded)[part]
        array.reshape(-1)[:1].view(torch.uint8)[0] ^= 1
        return found

    tallies, _ = parity.parity(recipe, {"astray": astray}, "cpu", drawn)
    tally = tallies["astray"]
    assert tally.differing == 1
    (fault,) = tally.faults
    assert f"astray on cpu, bit patterns: {'decoded to ' if 'float' in part else ''}{part}[0, 0], byte 0: 0x" in fault


def test_nan_is_nan_and_no_number(parity: ModuleType) -> None:
    nans = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001]).view(np.float32)
    tally = parity.Tally()
    tally.add("", parity.Results({}, {"float32": nans}), parity.Results({}, {"float32": torch.full((3,), torch.nan)}))
    assert tally.differing == 0 and tally.bytes == 12
    for name, wrong in (("Inf", torch.inf), ("a number", 1.0)):
        tally = parity.Tally()
        tally.add("", parity.Results({}, {"float32": nans[:1]}), parity.Results({}, {"float32": torch.full((1,), wrong)}))
        assert tally.differing > 0, name


def test_what_is_missing_or_raises_is_no_parity(parity: ModuleType) -> None:
    drawn = list(parity.draws(MXFP8, 1000, SLAB, parity.SLABS[:1]))

    def raises(x: Any, options: dict[str, Any]) -> Any:
        raise RuntimeError("no memory\nat all")

    def without(x: Any, options: dict[str, Any]) -> Any:
        found = parity.eager(MXFP8)(x, options)
        return parity.Results({"data": found.parts["data"]}, found.decoded)

    def shorter(x: Any, options: dict[str, Any]) -> Any:
        return parity.eager(MXFP8)(x[:, :-1], options)

    tallies, _ = parity.parity(MXFP8, {"raises": raises, "without": without, "shorter": shorter}, "cpu", drawn)
    for tally in tallies.values():
        assert 0 < tally.differing <= tally.bytes and tally.faults
    assert tallies["raises"].faults[0].endswith("bit patterns: RuntimeError: no memory")
    assert tallies["raises"].differing == tallies["raises"].bytes
