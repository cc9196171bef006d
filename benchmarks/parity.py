"""Parity of torch with NumPy: slabs that reach every clause of the contract, cast and decoded by both, in differing bytes.

bench_parity.py runs it at length, tests/test_torch_parity.py in short. NumPy, by the kernels that serve it by default, is the
expected side. Every byte of every part is compared, and every decoded bit in three dtypes, where a NaN is like another.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

import breccia
import breccia_torch
from breccia.formats import TENSOR
from breccia.tensor import held
from breccia_torch.ops import WORDS

#: What is decoded to.
DTYPES = ("float32", "bfloat16", "float16")
#: Bit patterns that hold numbers of each dtype: how to see them, their Inf, and the lowest bit of their exponent.
_WORDS = {
    "float32": (np.uint32, np.float32, 0x7F800000, 1 << 23),
    "bfloat16": (np.uint16, ml_dtypes.bfloat16, 0x7F80, 1 << 7),
    "float16": (np.uint16, np.float16, 0x7C00, 1 << 10),
}

Draw = Callable[[np.random.Generator, tuple[int, ...], breccia.ScalingRecipe], np.ndarray]


# ------------------------------------------------------------------------------------------------ data


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
    around = _f32([largest[1], middle, *(fmt.capacity(level) for level in fmt.levels), 1.0, 448.0, 464.0])
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


# ------------------------------------------------------------------------------------------------ both sides


@dataclass(frozen=True)
class Results:
    """What a cast wrote, and what it decodes to, by names: arrays of one framework."""

    parts: dict[str, Any]
    decoded: dict[str, Any]


def trip(x: Any, recipe: breccia.ScalingRecipe, options: dict[str, Any], dtypes: Sequence[str] = DTYPES) -> Any:
    """A cast, and what it decodes to in each of `dtypes`."""
    st = breccia.cast(x, recipe, **options)
    return st, [breccia.dequantize(st, out_dtype=dtype) for dtype in dtypes]


def results(st: Any, decoded: Sequence[Any], dtypes: Sequence[str] = DTYPES) -> Results:
    return Results(held(st), dict(zip(dtypes, decoded, strict=True)))


#: From a tensor and options of `cast`.
Writer = Callable[[Any, dict[str, Any]], Results]


def tensor(x: np.ndarray, device: str) -> Any:
    """NumPy's numbers on torch, on the device; BF16 by its bits."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(x).to(device)


def eager(recipe: breccia.ScalingRecipe) -> Writer:
    return lambda x, options: results(*trip(x, recipe, options))


def generic(recipe: breccia.ScalingRecipe) -> Writer:
    """Eager, by the generic algorithm, where another kernel would serve: what a device without kernels runs."""

    def write(x: Any, options: dict[str, Any]) -> Results:
        st = breccia.cast(x, recipe, prefer="reference.cast", **options)
        return results(st, [breccia.dequantize(st, out_dtype=d, prefer="reference.dequantize") for d in DTYPES])

    return write


def compiled(recipe: breccia.ScalingRecipe, backend: str = "inductor", dynamic: bool | None = None) -> Writer:
    """One compiled function for each way of casting; what was compiled for other recipes is forgotten."""
    breccia_torch.enable_compile()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # one code object serves all options, ranks and dtypes
    made: dict[str, Any] = {}

    def write(x: Any, options: dict[str, Any]) -> Results:
        key = str(options)
        if key not in made:
            made[key] = torch.compile(lambda x: trip(x, recipe, options), fullgraph=True, backend=backend, dynamic=dynamic)
        return results(*made[key](x))

    return write


#: Ways to run the verbs on torch.
MODES: dict[str, Callable[[breccia.ScalingRecipe], Writer]] = {
    "eager": eager,
    "generic": generic,
    "compiled": compiled,
}


# ------------------------------------------------------------------------------------------------ comparison


@dataclass
class Tally:
    """What one way of running has been compared in, and what differed."""

    values: int = 0
    bytes: int = 0
    differing: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list[str])

    def lost(self, fault: str, expected: Results) -> None:
        """Count all that was expected as different."""
        size = sum(a.nbytes for a in [*expected.parts.values(), *expected.decoded.values()])
        self.bytes, self.differing = self.bytes + size, self.differing + max(size, 1)
        self.faults.append(fault)

    def add(self, where: str, expected: Results, found: Results) -> None:
        """Compare all that both hold; `where` begins the name of a fault."""
        if (expected.parts.keys(), expected.decoded.keys()) != (found.parts.keys(), found.decoded.keys()):
            return self.lost(f"{where}: holds {[*found.parts, *found.decoded]}", expected)
        for name, part in expected.parts.items():
            self._compare(f"{where}: {name}", part, found.parts[name], None)
        for name, array in expected.decoded.items():
            self._compare(f"{where}: decoded to {name}", array, found.decoded[name], _WORDS[name][2])

    def _compare(self, where: str, expected: np.ndarray, found: Any, inf: int | None) -> None:
        """Differing bytes of one array, in the order of its indices. inf: of numbers of which any NaN is like another."""
        self.bytes += expected.nbytes
        if expected.shape != tuple(found.shape) or expected.itemsize != found.element_size():
            self.differing += max(expected.nbytes, 1)
            self.faults.append(f"{where} is {tuple(found.shape)} of {found.dtype}, not {expected.shape} of {expected.dtype}")
            return
        width = expected.itemsize
        words = np.ascontiguousarray(expected).reshape(-1).view(f"u{width}" if width == 1 else f"i{width}")
        ours, theirs = torch.from_numpy(words).to(found.device), found.view(WORDS[width]).contiguous().reshape(-1)
        if torch.equal(ours, theirs):
            return
        unequal = ours.view(torch.uint8).reshape(-1, width) != theirs.view(torch.uint8).reshape(-1, width)
        if inf is not None:
            magnitude = (1 << (8 * width - 1)) - 1
            unequal &= ~(((ours & magnitude) > inf) & ((theirs & magnitude) > inf))[:, None]
        count = int(unequal.sum())
        if not count:
            return
        self.differing += count
        place, byte = divmod(int(unequal.reshape(-1).int().argmax()), width)
        index = tuple(int(i) for i in np.unravel_index(place, expected.shape)) if expected.ndim else ()
        a, b = (int(side[place : place + 1].cpu().view(torch.uint8)[byte]) for side in (ours, theirs))
        self.faults.append(f"{where}{list(index)}, byte {byte}: 0x{b:02x}, NumPy has 0x{a:02x} ({count} differing bytes)")


def parity(
    recipe: breccia.ScalingRecipe,
    writers: dict[str, Writer],
    device: str,
    drawn: Iterable[tuple[str, np.ndarray, dict[str, Any]]],
) -> tuple[dict[str, Tally], float]:
    """(tallies of the ways named, seconds that NumPy took) over all that is drawn."""
    tallies = {name: Tally() for name in writers}
    seconds = 0.0
    for name, x, options in drawn:
        start = time.perf_counter()
        expected = results(*trip(x, recipe, options))
        seconds += time.perf_counter() - start
        given = tensor(x, device)
        for mode, write in writers.items():
            start, tally = time.perf_counter(), tallies[mode]
            where = f"{recipe!r} {mode} on {device}, {name}"
            try:
                tally.add(where, expected, write(given, options))
            except Exception as e:  # which ends no run of hours: what was not written differs in every byte
                tally.lost(f"{where}: {type(e).__name__}: {str(e).partition(chr(10))[0]}", expected)
            tally.values += x.size
            tally.seconds += time.perf_counter() - start
    return tallies, seconds
