"""Parity of frameworks with NumPy: slabs that reach every clause of the contract, cast and decoded by both, in differing bytes.

bench_parity.py runs it at length, tests/across/test_ways.py in short. NumPy, by the kernels that serve it by default, is
the expected side. Every byte of every part is
compared, and every decoded bit in three dtypes, where a NaN is like another. Decoded numbers
below 2^-126 that XLA returns as zeros, which the contract allows it, are told apart and counted.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import breccia
from breccia.arrays.frameworks import dtype_name, ops_of
from breccia.formats import TENSOR
from breccia.tensors.components import components
from breccia.testing.places import Place

#: What is decoded to.
DTYPES = ("float32", "bfloat16", "float16")
#: Bit patterns that hold numbers of each dtype: how to see them, their Inf, and the lowest bit of their exponent.
_WORDS = {
    "float32": (np.uint32, np.float32, 0x7F800000, 1 << 23),
    "bfloat16": (np.uint16, ml_dtypes.bfloat16, 0x7F80, 1 << 7),
    "float16": (np.uint16, np.float16, 0x7C00, 1 << 10),
}

Draw = Callable[[np.random.Generator, tuple[int, ...], breccia.ScalingRecipe], np.ndarray]


def _f32(numbers: Sequence[float]) -> np.ndarray:
    return np.array(numbers, np.float32)


def patterns(
    rng: np.random.Generator, shape: tuple[int, ...], _: breccia.ScalingRecipe, dtype: str = "float32", finite: bool = False
) -> np.ndarray:
    """Random bits: all exponents, subnormals. NaN and Inf, unless `finite`, are in every fourth row alone: they mark blocks."""
    word, kind, inf, lowest = _WORDS[dtype]
    bits = rng.integers(0, 1 << (8 * np.dtype(word).itemsize), shape, dtype=word)
    tamed = bits if finite else np.concatenate([bits[..., i::4, :] for i in (1, 2, 3)], axis=-2)
    tamed = np.where(tamed & word(inf) == inf, tamed ^ word(lowest), tamed)
    return (tamed if finite else np.concatenate([bits[..., ::4, :], tamed], axis=-2)).view(kind)


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], _: breccia.ScalingRecipe, exponents: float = 0, faulty: bool = False
) -> np.ndarray:
    """Normal numbers, times 2^uniform(-exponents, exponents) by row; `faulty`: of some rows, one is NaN or Inf."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if exponents:
        x *= np.exp2(rng.uniform(-exponents, exponents, (*shape[:-1], 1)).astype(np.float32))
    if faulty:
        rows = x[..., 3::11, shape[-1] // 3]
        rows[...] = rng.choice(_f32([np.nan, np.inf, -np.inf]), rows.shape)
    return x


def zeros(rng: np.random.Generator, shape: tuple[int, ...], recipe: breccia.ScalingRecipe) -> np.ndarray:
    """+0 and -0 among normal numbers and subnormals: no other in some rows, most, half or one in 64 of others."""
    x = normal(rng, shape, recipe)
    x *= rng.choice(_f32([1, 1, 2.0**-127, 2.0**-140]), (*shape[:-1], 1))
    x *= rng.random(shape, dtype=np.float32) >= rng.choice(_f32([1 / 64, 1 / 2, 15 / 16, 1]), (*shape[:-1], 1))
    return x


def ties(rng: np.random.Generator, shape: tuple[int, ...], recipe: breccia.ScalingRecipe) -> np.ndarray:
    """Numbers of the element format and the midpoints between them, times 2^e by 128 rows, the largest in each 8."""
    element = recipe.format.element
    numbers = np.unique(np.array(element.table, np.uint32).view(np.float32))
    numbers = numbers[np.abs(numbers) <= element.max].astype(np.float64)  # no NaN, and no lowest integer: amax is round
    chosen = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    x = rng.choice(chosen, shape)
    x[..., ::8] = element.max
    x[..., 1::8] = 0 if numbers[0] == 0 else -element.max  # so that ranges too, which offsets are made of, are round
    bands = rng.integers(-9, 9, (*shape[:-2], -(-shape[-2] // 128), 1)).repeat(128, axis=-2)[..., : shape[-2], :]
    return np.ldexp(x, bands).astype(np.float32)


def edges(rng: np.random.Generator, shape: tuple[int, ...], recipe: breccia.ScalingRecipe) -> np.ndarray:
    """A few units in the last place around saturation, capacities, powers of two, FLT_MAX and the smallest normal number."""
    fmt = recipe.format
    largest = np.unique(np.abs(np.array(fmt.element.table, np.uint32).view(np.float32)))
    largest = largest[np.isfinite(largest)][-2:].astype(np.float64)
    middle = largest[1] + (largest[1] - largest[0]) / 2
    around = _f32([largest[1], middle, *(fmt.qmax(level) for level in fmt.levels), 1.0, 448.0, 464.0])
    signs = rng.choice(_f32([-1, 1]), shape)
    powers = rng.integers(-40, 40, (*shape[:-1], 1)) + rng.integers(0, 3, shape)
    x = np.ldexp(rng.choice(around, shape), powers).astype(np.float32)
    x = (x.view(np.int32) + rng.integers(-3, 4, shape, dtype=np.int32)).view(np.float32)
    for start, bits in ((5, 0x7F7FFFFF - 3), (6, 0x00800000)):  # no further: an ulp above FLT_MAX is Inf
        rows = x[..., start::29, :]
        rows[...] = (rng.integers(-3, 4, rows.shape, dtype=np.int32) + bits).view(np.float32)
    return x * signs


@dataclass(frozen=True)
class Slab:
    """How numbers are drawn, the shape they fill (its last axis; leading axes before the rows), and how they are cast."""

    name: str
    draw: Draw
    columns: int
    lead: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def plain(self) -> bool:
        """FP32 matrices cast along their rows, which a compiler has one graph for, or two."""
        half = isinstance(self.draw, partial) and "dtype" in self.draw.keywords
        return not (half or self.lead or self.options) and self.columns in (WHOLE, RAGGED)

    def shape(self, size: int) -> tuple[int, ...]:
        """Some `size` values. Columns that are whole blocks have rows that are, too; odd ones have odd rows."""
        rows = max(size // self.columns // math.prod(self.lead), 1)
        rows = max(rows // 128 * 128, min(rows, 16)) if self.columns % 128 == 0 else rows | 1
        return (*self.lead, rows, self.columns)


#: Whole blocks and packing groups of every recipe, and neither: 1021 is prime.
WHOLE, RAGGED = 1024, 1021

wide = partial(normal, exponents=60)
faulty = partial(normal, exponents=60, faulty=True)
ROWS: dict[str, Any] = {"axis": -2}
STOCHASTIC: dict[str, Any] = {"rounding": "stochastic", "seed": 0x9E3779B97F4A7C15}

SLABS = (
    Slab("bit patterns", patterns, WHOLE),
    Slab("finite bit patterns, ragged", partial(patterns, finite=True), RAGGED),
    Slab("wide exponents", wide, WHOLE),
    Slab("NaN and Inf, ragged", faulty, RAGGED),
    Slab("normal", normal, WHOLE),
    Slab("ties", ties, WHOLE),
    Slab("zeros, ragged", zeros, RAGGED),
    Slab("saturation", edges, WHOLE),
    Slab("FP16 patterns", partial(patterns, dtype="float16"), WHOLE),
    Slab("BF16 patterns, ragged", partial(patterns, dtype="bfloat16"), RAGGED),
    Slab("finite FP16 patterns", partial(patterns, dtype="float16", finite=True), WHOLE),
    Slab("finite BF16 patterns, ragged", partial(patterns, dtype="bfloat16", finite=True), RAGGED),
    Slab("narrower than a block", normal, 21),
    Slab("along rows, ragged", faulty, RAGGED, options=ROWS),
    Slab("along rows, bit patterns", partial(patterns, finite=True), WHOLE, options=ROWS),
    Slab("3-D, ragged", wide, RAGGED, (3,)),
    Slab("3-D along rows", normal, 37, (5,), ROWS),
    Slab("stochastic, ragged", normal, RAGGED, options=STOCHASTIC),
    Slab("stochastic, 3-D along rows", wide, WHOLE, (3,), ROWS | STOCHASTIC),
)

#: The dtypes and axes that `grid` combines, and the part of its rows that further ops take.
AXES, PART = (-1, -2), 8


def mixed(
    rng: np.random.Generator, shape: tuple[int, ...], recipe: breccia.ScalingRecipe, dtype: str = "float32", axis: int = -1
) -> np.ndarray:
    """Numbers of a dtype for blocks along the axis, in equal parts: random bits, normal numbers of wide exponents, ties, and
    numbers around saturation. With one scale for the tensor, which the largest number would decide, only normal numbers."""
    across = shape if axis == -1 else (shape[1], shape[0])
    few = dtype == "float16"  # its exponents are few
    if recipe.format.scale.block == TENSOR:
        x = normal(rng, across, recipe, 4)
    else:
        parts = np.array_split(np.arange(across[0]), 4)
        draws = (partial(patterns, dtype=dtype), partial(normal, exponents=6 if few else 60), ties, edges)
        made = [draw(rng, (len(rows), across[1]), recipe) for draw, rows in zip(draws, parts, strict=True)]
        if few:
            made[3] = np.clip(made[3], -65504, 65504)
        with np.errstate(over="ignore"):
            x = np.concatenate([part.astype(_WORDS[dtype][1]) for part in made])
    x = x.astype(_WORDS[dtype][1])
    return x if axis == -1 else np.ascontiguousarray(x.T)


def grid(turn: int) -> list[Slab]:
    """A slab for each dtype and axis. Half of them have only whole blocks: which half depends on whether `turn` is even."""
    both = itertools.product(DTYPES, AXES)
    return [
        Slab(f"{d}, axis {axis}", partial(mixed, dtype=d, axis=axis), (WHOLE, RAGGED)[(turn + n) % 2], options={"axis": axis})
        for n, (d, axis) in enumerate(both)
    ]


#: Shapes that are no matrix of many blocks; empty ones among them.
SHAPES = ((0, 64), (5, 0), (2, 0, 8), (1, 1), (2, 3, 4, 33))
#: Those of one axis, for recipes that take them.
FLAT = ((0,), (1,), (37,))


def small(recipe: breccia.ScalingRecipe) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """As `draws`, of the small shapes that the recipe takes."""
    for shape in SHAPES + FLAT if recipe.format.scale.block == TENSOR else SHAPES:
        yield f"shape {shape}", normal(np.random.default_rng(0), shape, recipe), {}


def draws(
    recipe: breccia.ScalingRecipe, values: int, size: int, slabs: Sequence[Slab] = SLABS
) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """(name, numbers, options of `cast`): slabs of about `size` in turn, each at least once, until `values` are drawn."""
    size = min(size, -(-values // len(slabs)))
    drawn = 0
    for number, slab in enumerate(itertools.cycle(slabs)):
        if drawn >= values and number >= len(slabs):
            return
        x = slab.draw(np.random.default_rng(number), slab.shape(size), recipe)
        drawn += x.size
        yield slab.name, x, slab.options


@dataclass(frozen=True)
class Results:
    """What a cast wrote, and what it decodes to, by names: arrays of one framework."""

    parts: dict[str, Any]
    decoded: dict[str, Any]


def trip(x: Any, recipe: breccia.ScalingRecipe, options: dict[str, Any], dtypes: Sequence[str] = DTYPES) -> Any:
    st = breccia.cast(x, recipe, **options)
    return st, [breccia.dequantize(st, out_dtype=dtype) for dtype in dtypes]


def results(st: Any, decoded: Sequence[Any], dtypes: Sequence[str] = DTYPES) -> Results:
    return Results(components(st), dict(zip(dtypes, decoded, strict=True)))


def other_ops(x: Any, recipe: breccia.ScalingRecipe, options: dict[str, Any]) -> Results:
    """Results of `trip`, and for the first rows of `cast_pair`, `cast_ste`, and `requantize` to other codes."""
    found = results(*trip(x, recipe, options))
    some = x[: -(-x.shape[0] // PART)]
    to = "nvfp4" if recipe.format.element.bits == 8 else "fp8_block,block_k=32"
    others: dict[str, Any] = {f"requantize to {to}": breccia.requantize(breccia.cast(some, recipe, **options), to)}
    if options["axis"] == -1:
        others |= dict(zip(("cast_pair, rows", "cast_pair, columns"), breccia.cast_pair(some, recipe), strict=True))
    parts = {f"{op}: {name}": part for op, st in others.items() for name, part in components(st).items()}
    values = {f"cast_ste {dtype_name(some)}": breccia.cast_ste(some, recipe, **options)}
    return Results(found.parts | parts, found.decoded | values)


def compilable(recipe: breccia.ScalingRecipe, options: dict[str, Any]) -> Callable[[Any], tuple[dict[str, Any], Any]]:
    """From numbers to the fields of `Results`: trees of arrays, whatever a compiler knows of ScaledTensor."""

    def run(x: Any) -> tuple[dict[str, Any], Any]:
        found = results(*trip(x, recipe, options))
        return found.parts, found.decoded

    return run


def stacked(each: Sequence[Results]) -> Results:
    """The results of NumPy's arrays one by one, along a new first axis."""

    def along(arrays: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: np.stack([one[name] for one in arrays]) for name in arrays[0]}

    return Results(along([one.parts for one in each]), along([one.decoded for one in each]))


#: From a tensor and options of `cast`.
Writer = Callable[[Any, dict[str, Any]], Results]


@dataclass(frozen=True)
class Way:
    """A way to run the ops: `writer` takes the recipe. `mapped`: on two arrays at a time, along a new first axis."""

    writer: Callable[[breccia.ScalingRecipe], Writer]
    mapped: bool = False


@dataclass(frozen=True)
class Side:
    """A framework: its module, and the ways it runs in, all but "generic" by default.

    flushes: may decoded numbers below 2^-126 be zeros of their sign? (numerics.md, section 4)
    threads: tells it how many to use, where it can be told.
    """

    module: str
    ways: dict[str, Way]
    devices: tuple[str, ...] = ("cpu",)
    flushes: bool = False
    threads: Callable[[int], None] = lambda count: None

    @property
    def usual(self) -> list[str]:
        """The ways that users run."""
        return [way for way in self.ways if way != "generic"]


def eager(recipe: breccia.ScalingRecipe) -> Writer:
    return lambda x, options: results(*trip(x, recipe, options))


def generic(recipe: breccia.ScalingRecipe) -> Writer:
    """Eager, by the generic algorithm, where another kernel would serve: what a device without kernels runs."""

    def write(x: Any, options: dict[str, Any]) -> Results:
        st = breccia.cast(x, recipe, prefer="reference.cast", **options)
        return results(st, [breccia.dequantize(st, out_dtype=d, prefer="reference.dequantize") for d in DTYPES])

    return write


def once(make: Callable[[dict[str, Any]], Callable[[Any], Results]]) -> Writer:
    """One function that `make` compiled for each way of casting."""
    made: dict[str, Callable[[Any], Results]] = {}

    def write(x: Any, options: dict[str, Any]) -> Results:
        key = str(options)
        if key not in made:
            made[key] = make(options)
        return made[key](x)

    return write


def compiled_by(compiler: Callable[[Any], Callable[[Any], Any]], recipe: breccia.ScalingRecipe) -> Writer:
    """What `compiler` makes of `compilable`."""

    def make(options: dict[str, Any]) -> Callable[[Any], Results]:
        run = compiler(compilable(recipe, options))
        return lambda x: Results(*run(x))

    return once(make)


def on_place(x: np.ndarray, framework: str, device: str) -> Any:
    """NumPy's numbers as an array of a framework; BF16 by its bits."""
    half = x.dtype == ml_dtypes.bfloat16
    return Place(framework, device).array(x.view(np.uint16) if half else x, "bfloat16" if half else None)


def torch_threads(count: int) -> None:
    import torch

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes of its own would wait for nothing: operators are no kernels
    torch.set_num_threads(count)


def torch_compiled(recipe: breccia.ScalingRecipe, backend: str = "inductor", dynamic: bool | None = None) -> Writer:
    """What was compiled for other recipes is forgotten."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # one code object serves all options, ranks and dtypes

    def make(options: dict[str, Any]) -> Callable[[Any], Results]:
        run = torch.compile(lambda x: trip(x, recipe, options), fullgraph=True, backend=backend, dynamic=dynamic)
        return lambda x: results(*run(x))

    return once(make)


def jax_compiled(recipe: breccia.ScalingRecipe, mapped: bool = False) -> Writer:
    """What was compiled for other recipes is forgotten. mapped: under jax.vmap within jax.jit."""
    import jax

    jax.clear_caches()
    return compiled_by(lambda run: jax.jit(jax.vmap(run) if mapped else run), recipe)


def mlx_compiled(recipe: breccia.ScalingRecipe) -> Writer:
    import mlx.core as mx

    return compiled_by(mx.compile, recipe)


UNCOMPILED = {"eager": Way(eager), "generic": Way(generic)}
_JAX = {**UNCOMPILED, "jit": Way(jax_compiled), "vmap": Way(partial(jax_compiled, mapped=True), mapped=True)}
FRAMEWORKS = {
    "torch": Side("torch", {**UNCOMPILED, "compiled": Way(torch_compiled)}, ("cpu", "cuda"), threads=torch_threads),
    "jax": Side("jax", _JAX, ("cpu", "cuda"), flushes=True),
    "mlx": Side("mlx.core", {**UNCOMPILED, "compile": Way(mlx_compiled)}),
}


@dataclass
class Tally:
    """What one way of running has been compared in, and what differed.

    flushed: by slab and dtype, the decoded numbers below 2^-126 that were zeros of their sign; they differ by permission.
    """

    values: int = 0
    bytes: int = 0
    differing: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list[str])
    flushed: dict[str, int] = field(default_factory=dict[str, int])

    def lost(self, fault: str, expected: Results) -> None:
        """Count all that was expected as different."""
        size = sum(a.nbytes for a in [*expected.parts.values(), *expected.decoded.values()])
        self.bytes, self.differing = self.bytes + size, self.differing + max(size, 1)
        self.faults.append(fault)

    def add(self, where: str, expected: Results, found: Results, flushes: str | None = None) -> None:
        """Compare all that both hold; `where` begins the name of a fault. flushes: of a framework that may, the slab's name."""
        if (expected.parts.keys(), expected.decoded.keys()) != (found.parts.keys(), found.decoded.keys()):
            return self.lost(f"{where}: holds {[*found.parts, *found.decoded]}", expected)
        for name, part in expected.parts.items():
            self._compare(f"{where}: {name}", part, found.parts[name])
        permitted = None if flushes is None else subnormal(expected.decoded["float32"])
        for name, array in expected.decoded.items():
            inf = _WORDS[name.rpartition(" ")[2]][2]
            if count := self._compare(f"{where}: decoded to {name}", array, found.decoded[name], inf, permitted):
                cells = f"{flushes}: {name}"
                self.flushed[cells] = self.flushed.get(cells, 0) + count

    def _compare(
        self, where: str, expected: np.ndarray, found: Any, inf: int | None = None, permitted: np.ndarray | None = None
    ) -> int:
        """Count differing bytes of one array, in the order of its indices.

        inf: of numbers of which any NaN is like another. permitted: where zeros of the right sign are no difference; those
        that are found there in place of another number are returned, counted.
        """
        self.bytes += expected.nbytes
        width = expected.itemsize
        array = ops_of(found, "found").to_numpy(found)
        if expected.shape != array.shape or width != array.itemsize:
            self.differing += max(expected.nbytes, 1)
            of = f"{array.shape} of {dtype_name(found)}, not {expected.shape} of {dtype_name(expected)}"
            self.faults.append(f"{where} is {of}")
            return 0
        ours, theirs = (np.ascontiguousarray(a).reshape(-1).view(f"u{width}") for a in (expected, array))
        if np.array_equal(ours, theirs):
            return 0
        different = ours != theirs
        magnitude, flushed = (1 << (8 * width - 1)) - 1, 0
        if inf is not None:
            different &= ~(((ours & magnitude) > inf) & ((theirs & magnitude) > inf))
        if permitted is not None:
            zeros = different & permitted.reshape(-1) & (theirs == ours & ~np.uint32(magnitude))
            flushed, different = int(zeros.sum()), different & ~zeros
        (places,) = np.nonzero(different)
        if not len(places):
            return flushed
        unequal = (ours[places] ^ theirs[places]).view(np.uint8).reshape(-1, width) != 0
        self.differing += (count := int(unequal.sum()))
        place, byte = int(places[0]), int(unequal[0].argmax())
        index = [int(i) for i in np.unravel_index(place, expected.shape)] if expected.ndim else []
        a, b = (int(side[place : place + 1].view(np.uint8)[byte]) for side in (ours, theirs))
        self.faults.append(f"{where}{index}, byte {byte}: 0x{b:02x}, NumPy has 0x{a:02x} ({count} differing bytes)")
        return flushed


def subnormal(y: np.ndarray) -> np.ndarray:
    """Where FP32 is below 2^-126, and not zero."""
    magnitude = np.ascontiguousarray(y).view(np.uint32) & 0x7FFFFFFF
    return (magnitude > 0) & (magnitude < 0x00800000)


def parity(
    framework: str,
    recipe: breccia.ScalingRecipe,
    ways: dict[str, Way],
    device: str,
    drawn: Iterable[tuple[str, np.ndarray, dict[str, Any]]],
    by: Callable[..., Results] = lambda *arguments: results(*trip(*arguments)),
) -> tuple[dict[str, Tally], float]:
    """(tallies of the ways named, seconds that NumPy took) over all that is drawn; mapped ways see it reversed, too.

    by: the function that computes the expected results in NumPy.
    """
    side = FRAMEWORKS[framework]
    writers = {name: way.writer(recipe) for name, way in ways.items()}
    tallies = {name: Tally() for name in ways}
    seconds = 0.0
    for name, x, options in drawn:
        for mapped in sorted({way.mapped for way in ways.values()}):
            start = time.perf_counter()
            each = [by(one, recipe, options) for one in ((x, np.flip(x)) if mapped else (x,))]
            seconds += time.perf_counter() - start
            expected = stacked(each) if mapped else each[0]
            given = on_place(np.stack([x, np.flip(x)]) if mapped else x, framework, device)
            for way in (way for way in ways if ways[way].mapped == mapped):
                start, tally = time.perf_counter(), tallies[way]
                where = f"{recipe!r} {way} on {device}, {name}"
                try:
                    tally.add(where, expected, writers[way](given, options), name if side.flushes else None)
                except Exception as e:  # which ends no run of hours: what was not written differs in every byte
                    tally.lost(f"{where}: {type(e).__name__}: {str(e).partition(chr(10))[0]}", expected)
                tally.values += x.size * len(each)
                tally.seconds += time.perf_counter() - start
    return tallies, seconds
