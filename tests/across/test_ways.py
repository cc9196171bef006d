"""Every execution mode of every framework writes NumPy's bytes: on 10^7 values, and on 10^9 in the slow run.

benchmarks/parity.py draws, runs and compares.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from marks import slow_but
from paths import ROOT
from recipes import RECIPES, recipe_id

import breccia
from breccia.arrays.frameworks import ops_of

BENCHMARKS = ROOT / "benchmarks"

#: Warnings that torch's own modules raise on import.
pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit"), pytest.mark.covering(1, 2)]

#: The first recipe of each name and offset. Each is compiled anew, which takes longer than all its numbers.
KINDS = list({(recipe.name, recipe.format.offset): recipe for recipe in reversed(RECIPES)}.values())[::-1]

#: Those that JAX runs in each way in the fast suite.
ON_JAX = {"eager": KINDS[3::4], "jit": KINDS[::2], "vmap": KINDS[1::2]}
CASES = [pytest.param(way, kind, id=f"{way}-{recipe_id(kind)}") for way, kinds in ON_JAX.items() for kind in kinds]

#: Values of each recipe, so that all of them have 10^7 in every suite, 10^9 in the slow one; of each kind, likewise.
FAST, SLOW = (-(-total // len(RECIPES)) for total in (10**7, 10**9))
FEW = -(-(10**7) // len(KINDS))
#: Values of a slab: memory of some 100 MB.
SLAB = 1 << 20

MXFP8 = breccia.MXFP8BlockScaling()


@pytest.fixture(scope="module")
def parity() -> Iterator[ModuleType]:
    """The module, on one thread: xdist has a process for each core."""
    pytest.importorskip("ml_dtypes")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import parity as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    torch = importlib.import_module("torch") if find_spec("torch") else None
    threads = torch and torch.get_num_threads(), breccia.get_num_threads()
    breccia.set_num_threads(1)
    if torch:
        torch.set_num_threads(1)
    yield module
    breccia.set_num_threads(threads[1])
    if torch:
        torch._dynamo.reset()
        torch.set_num_threads(threads[0])


def assert_parity(
    parity: ModuleType,
    framework: str,
    recipe: breccia.ScalingRecipe,
    ways: dict[str, Any],
    drawn: Iterable[Any],
    values: int,
    on: str = "cpu",
) -> None:
    tallies, _ = parity.parity(framework, recipe, ways, on, drawn)
    for way, tally in tallies.items():
        assert tally.faults == [] and tally.differing == 0, way
        assert tally.values >= values and tally.bytes > 7 * values, way  # of 4 + 2 + 2 decoded bytes and a part of one
        assert framework == "jax" or not tally.flushed, way


def ways_of(parity: ModuleType, framework: str, *names: str) -> dict[str, Any]:
    """The ways named, or those that users run."""
    side = parity.FRAMEWORKS[framework]
    pytest.importorskip(side.module)
    return {name: side.ways[name] for name in names or side.usual}


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_eager(recipe: breccia.ScalingRecipe, framework: str, parity: ModuleType) -> None:
    """With the kernels for CPUs, and with the generic algorithm that other devices use."""
    drawn = itertools.chain(parity.small(recipe), parity.draws(recipe, FAST, SLAB))
    assert_parity(parity, framework, recipe, ways_of(parity, framework, "eager", "generic"), drawn, FAST)


def few(
    parity: ModuleType, recipe: breccia.ScalingRecipe, values: int = FAST
) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """Every kind of numbers that one graph serves, and in turn one that needs its own."""
    number = RECIPES.index(recipe)
    plain, others = kinds_of_slabs(parity, number)
    small = list(parity.small(recipe))
    yield small[number % len(small)]
    yield from parity.draws(recipe, values, SLAB, [*plain, others[number % len(others)]])


def kinds_of_slabs(parity: ModuleType, number: int) -> tuple[list[Any], list[Any]]:
    """(slabs of one shape, in turn of whole blocks and ragged; those of other shapes, dtypes and options)"""
    columns = (parity.WHOLE, parity.RAGGED)[number % 2]
    plain = [replace(slab, columns=columns) for slab in parity.SLABS if slab.plain]
    return plain, [slab for slab in parity.SLABS if not slab.plain]


@pytest.mark.long
@pytest.mark.parametrize("recipe", slow_but(KINDS, RECIPES), ids=recipe_id)
def test_compiled_by_torch(recipe: breccia.ScalingRecipe, parity: ModuleType) -> None:
    compiled = parity.Way(partial(parity.torch_compiled, backend="aot_eager"))
    assert_parity(parity, "torch", recipe, {"compiled": compiled}, few(parity, recipe, FEW), FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8_current", "nvfp4"])
def test_compiled_by_inductor(name: str, parity: ModuleType) -> None:
    recipe = breccia.recipe(name)
    slabs = [slab for slab in parity.SLABS if slab.name in ("NaN and Inf, ragged", "along rows, ragged")]
    drawn = parity.draws(recipe, FAST, SLAB, slabs)
    assert_parity(parity, "torch", recipe, ways_of(parity, "torch", "compiled"), drawn, FAST)


def assert_jax(parity: ModuleType, way: str, kind: breccia.ScalingRecipe, on: str) -> None:
    """On slabs of one shape: plain ones for every other kind, and for those between one that is not, each in its turn."""
    kinds = ON_JAX[way]
    number, values = kinds.index(kind), -(-(10**7) // len(kinds))
    plain, others = kinds_of_slabs(parity, number // 2)
    slabs = [others[number // 2 if way == "vmap" else -1 - number // 2]] if number % 2 else plain
    assert_parity(parity, "jax", kind, ways_of(parity, "jax", way), parity.draws(kind, values, SLAB, slabs), values, on)


@pytest.mark.long
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_jax(way: str, kind: breccia.ScalingRecipe, parity: ModuleType) -> None:
    assert_jax(parity, way, kind, "cpu")


@pytest.mark.long  # MLX calls a C++ compiler; `make test` compares compiled casts in tests/mlx
@pytest.mark.parametrize("kind", slow_but(KINDS[1::4], KINDS), ids=recipe_id)
def test_compiled_by_mlx(kind: breccia.ScalingRecipe, parity: ModuleType) -> None:
    assert_parity(parity, "mlx", kind, ways_of(parity, "mlx", "compile"), few(parity, kind, FEW), FEW)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_a_billion_values(recipe: breccia.ScalingRecipe, framework: str, parity: ModuleType) -> None:
    drawn = itertools.chain(parity.small(recipe), parity.draws(recipe, SLOW, SLAB))
    assert_parity(parity, framework, recipe, ways_of(parity, framework), drawn, SLOW)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_torch_on_cuda(recipe: breccia.ScalingRecipe, way: str, parity: ModuleType) -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    every = itertools.chain(parity.small(recipe), parity.draws(recipe, FAST, SLAB))
    drawn = every if way == "eager" else few(parity, recipe)
    assert_parity(parity, "torch", recipe, ways_of(parity, "torch", way), drawn, FAST, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_jax_on_cuda(way: str, kind: breccia.ScalingRecipe, parity: ModuleType) -> None:
    try:
        pytest.importorskip("jax").devices("cuda")
    except RuntimeError:
        pytest.skip("JAX sees no CUDA device")
    assert_jax(parity, way, kind, "cuda")


# -- what is drawn, and that a difference is found --------------------------------------------------------------------


def test_slabs_contain_the_values_they_are_named_after(parity: ModuleType) -> None:
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


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_one_flipped_bit_is_one_differing_byte(framework: str, parity: ModuleType) -> None:
    recipe = breccia.INT4Scaling(group_size=16, signed=False, symmetric=False)
    (drawn,) = parity.draws(recipe, 1000, SLAB, parity.SLABS[:1])
    written = ways_of(parity, framework, "eager")["eager"].writer(recipe)

    for part in ("data", "scale", "zero_point", *parity.DTYPES):

        def astray(x: Any, options: dict[str, Any], part: str = part) -> Any:
            found = written(x, options)
            arrays = {name: ops_of(a).to_numpy(a).copy() for name, a in (found.parts | found.decoded).items()}
            arrays[part].view(np.uint8)[0, 0] ^= 1
            return parity.Results(*({name: arrays[name] for name in names} for names in (found.parts, found.decoded)))

        tallies, _ = parity.parity(framework, recipe, {"astray": parity.Way(lambda _, write=astray: write)}, "cpu", [drawn])
        tally = tallies["astray"]
        assert tally.differing == 1
        (fault,) = tally.faults
        assert f"astray on cpu, bit patterns: {'decoded to ' if 'float' in part else ''}{part}[0, 0], byte 0: 0x" in fault


def test_nan_never_equals_a_number(parity: ModuleType) -> None:
    nans = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001]).view(np.float32)
    tally = parity.Tally()
    tally.add("", parity.Results({}, {"float32": nans}), parity.Results({}, {"float32": np.full(3, np.nan, np.float32)}))
    assert tally.differing == 0 and tally.bytes == 12
    for name, wrong in (("Inf", np.inf), ("a number", 1.0)):
        tally = parity.Tally()
        found = parity.Results({}, {"float32": np.full(1, wrong, np.float32)})
        tally.add("", parity.Results({}, {"float32": nans[:1]}), found)
        assert tally.differing > 0, name


def decoded_to(parity: ModuleType, *numbers: float) -> Any:
    """The decoded results of a framework for these FP32 numbers, in all three dtypes."""
    import ml_dtypes

    y = np.float32(numbers)
    with np.errstate(all="ignore"):
        return parity.Results({}, {"float32": y, "bfloat16": y.astype(ml_dtypes.bfloat16), "float16": y.astype(np.float16)})


def test_flushed_subnormals_are_counted_separately(parity: ModuleType) -> None:
    below = np.nextafter(np.float32(2.0**-126), np.float32(0))  # to BF16 it rounds to 2^-126, which is a normal number
    exact = decoded_to(parity, 2.0**-127, -(2.0**-130), below, -below, 2.0**-149, 0.0, 2.0**-126)
    zeros = decoded_to(parity, 0.0, -0.0, 0.0, -0.0, 0.0, 0.0, 2.0**-126)
    tally = parity.Tally()
    tally.add("", exact, zeros, "a slab")
    tally.add("", exact, exact, "another")
    assert tally.faults == [] and tally.differing == 0
    assert tally.flushed == {"a slab: float32": 5, "a slab: bfloat16": 4}  # 2^-149 is a zero of BF16
    tally = parity.Tally()
    tally.add("", exact, zeros)
    assert tally.differing > 0 and len(tally.faults) == 2 and not tally.flushed, "of a framework that must not flush"


@pytest.mark.parametrize(
    ("number", "found"), [(2.0**-127, -0.0), (-(2.0**-127), 0.0), (2.0**-127, 2.0**-128), (2.0**-126, 0.0), (0.0, -0.0)]
)
def test_nothing_else_may_be_flushed(number: float, found: float, parity: ModuleType) -> None:
    """Zeros of the wrong sign, another number, the smallest normal number."""
    tally = parity.Tally()
    tally.add("", decoded_to(parity, number), decoded_to(parity, found), "a slab")
    assert tally.differing > 0 and tally.faults and not tally.flushed


def test_subnormals_of_fp16_may_not_be_flushed(parity: ModuleType) -> None:
    exact, tally = decoded_to(parity, 2.0**-20), parity.Tally()
    tally.add("", exact, replace(exact, decoded=exact.decoded | {"float16": np.float16([0])}), "a slab")
    assert tally.differing == 1 and not tally.flushed


def test_a_mapped_call_is_compared_with_single_calls(parity: ModuleType) -> None:
    """Arrays cast together round at random by one counter, and have one scale for the tensor."""
    together = {"together": replace(ways_of(parity, "torch", "eager")["eager"], mapped=True)}

    def differing(recipe: breccia.ScalingRecipe, name: str) -> int:
        drawn = parity.draws(recipe, 1000, SLAB, [slab for slab in parity.SLABS if slab.name == name])
        return parity.parity("torch", recipe, together, "cpu", drawn)[0]["together"].differing

    assert differing(MXFP8, "normal") == 0
    assert differing(MXFP8, "stochastic, ragged") > 0 and differing(breccia.Float8CurrentScaling(), "normal") > 0


def test_missing_results_and_exceptions_break_parity(parity: ModuleType) -> None:
    drawn = list(parity.draws(MXFP8, 1000, SLAB, parity.SLABS[:1]))
    written = parity.eager(MXFP8)

    def raises(x: Any, options: dict[str, Any]) -> Any:
        raise RuntimeError("no memory\nat all")

    def without(x: Any, options: dict[str, Any]) -> Any:
        found = written(x, options)
        return parity.Results({"data": found.parts["data"]}, found.decoded)

    def shorter(x: Any, options: dict[str, Any]) -> Any:
        return written(x[:, :-1], options)

    wrong = {write.__name__: parity.Way(lambda _, write=write: write) for write in (raises, without, shorter)}
    tallies, _ = parity.parity("torch", MXFP8, wrong, "cpu", drawn)
    for tally in tallies.values():
        assert 0 < tally.differing <= tally.bytes and tally.faults
    assert tallies["raises"].faults[0].endswith("bit patterns: RuntimeError: no memory")
    assert tallies["raises"].differing == tallies["raises"].bytes
