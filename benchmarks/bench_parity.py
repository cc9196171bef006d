"""Parity of a framework with NumPy, in differing bytes: every recipe and its variants, eager and compiled, on a CPU or CUDA.

--grid compares a slab of each dtype along each axis for every recipe and variant, and `cast_pair`, `cast_ste` and `requantize`
on an eighth of it. --beyond adds tensors of more than 2^31 elements on torch, for which a GPU needs some 150 GB. parity.py
describes the inputs, the comparison, and the ways of each framework. Exits with 1 after naming the bytes that differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any
from unittest import mock

import ml_dtypes
import numpy as np
import parity
import typer
from bench_accuracy import variants
from bench_forms import changed
from harness import Benchmark, Recipes, Result, Seconds, Table, cores, known, program, provenance, recipes_named, refuse
from parity import Results, Tally

import breccia
from breccia.arrays.ops import NUMPY
from breccia.formats import TENSOR
from breccia.kernels import reference
from breccia.tensors.components import components
from breccia.testing import oracle

#: Values of a slab: NumPy's kernels have chunks to spread over threads, a GPU has enough to do.
SLAB = 1 << 21

#: Changes that `variants` does not make: margins, small and tall blocks, offsets, scales of every dtype.
CHANGES: list[dict[str, Any]] = [
    {"fp8_format": "E5M2", "margin": 3},
    {"margin": -126},
    {"margin": 126},
    {"margin": 3, "scale_rule": "te"},
    {"fp8_format": "E5M2", "block_k": 16},
    {"block_k": 16, "block_m": 4},
    {"block_k": 8, "block_m": 2, "power_of_two_scale": True},
    {"block_k": 16, "block_m": 2, "power_of_two_scale": True, "scale_rule": "te"},
    {"fp6_format": "E3M2", "scale_rule": "floor"},
    {"group_size": 16, "signed": False},
    {"group_size": 16, "signed": False, "symmetric": False, "offset": "bias"},
    {"group_size": 8, "signed": False, "symmetric": False, "offset": "bias", "scale_dtype": "bf16"},
    {"group_size": 16, "scale_dtype": "fp16", "scale_rule": "half_range"},
    {"group_size": 8, "signed": False, "symmetric": False, "scale_dtype": "fp32"},
    {"block_size": 16, "scale_dtype": "fp16"},
]

#: Beyond 2^31 elements: odd rows by columns that end within a block and a packing group.
BEYOND_SHAPE = (525_205, 4095)
#: Recipes cast at that size: one scale per tensor, per block, on two levels, and packed codes.
BEYOND = ("fp8_current", "mxfp8", "nvfp4", "int4")
#: The one that an H200 has the memory to round stochastically at that size.
STOCHASTIC = "int4"
#: Beyond 2^32 elements counters need both their words. Compared are those near its ends, 2^31 and 2^32, this many each way.
BEYOND_WORDS, NEAR = 2**32 + 2**20, 1000
#: Rows that NumPy casts at a time.
STRIP = 2048


def parity_table(result: Result) -> Table:
    options, rows = result["options"], result["rows"]
    ways, framework = options["modes"], options.get("framework", "torch")
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    flushing = any(row["modes"][way].get("flushed") for row in rows for way in ways)
    summed = ["values", "bytes", "differing", *(["flushed"] if flushing else [])]

    def sums(some: list[Any], way: str) -> list[str]:
        found = [{**row["modes"][way], "flushed": sum(row["modes"][way].get("flushed", {}).values())} for row in some]
        return [f"{sum(one[what] for one in found):,}" for what in summed]

    every = [*by_name.items(), ("all", rows)]
    lines = [(name, str(len(some)), *(cell for way in ways for cell in sums(some, way))) for name, some in every]
    for row in result["beyond"]:
        counts = [f"{row[what]:,}" for what in ("values", "bytes", "differing")]
        lines.append((row["what"], "1", *(cell for way in ways for cell in (counts if way == "eager" else [""] * 3))))
    names = ("values", "bytes", "differing bytes", *summed[3:])
    headings = ("recipe", "with variants", *(f"{way}: {what}" for way in ways for what in names))
    note = (
        f"{framework} on {result['runs'][-1].get('device', 'the CPU')} against NumPy: all parts, and what they decode to in "
        f"FP32, BF16 and FP16. At least {min(row['modes'][way]['values'] for row in rows for way in ways):,} values of each "
        "recipe and variant in each way."
    )
    if options.get("grid"):
        note += (
            " Of each, FP32, BF16 and FP16 numbers along both axes; `cast_pair`, `cast_ste` and `requantize` of an eighth of "
            "them, whose bytes are counted too."
        )
    if left := result.get("left"):
        note += f" {left} settings were left out: the time was up."
    if flushing:
        note += (
            " Flushed: decoded numbers, of FP32 and BF16, whose exact value lies below 2⁻¹²⁶, and that are zeros of its sign. "
            "They are counted here, and not among the differing bytes."
        )
    return Table("parity" if framework == "torch" else f"parity, {framework}", headings, tuple(lines), note)


BENCHMARKS = {
    framework: Benchmark(name, {name: parity_table})
    for framework, name in (("torch", "parity"), ("jax", "parity-jax"), ("mlx", "parity-mlx"))
}


def settings(names: list[str] | None) -> list[breccia.ScalingRecipe]:
    found: list[breccia.ScalingRecipe] = []
    for recipe in recipes_named(names):
        found += variants(recipe)
        found += [other for _, other in changed(recipe, CHANGES) if other not in found]
    return found


def measured(
    framework: str,
    recipe: breccia.ScalingRecipe,
    turn: slice,
    ways: list[str],
    device: str,
    values: int,
    threads: int,
    grid: bool,
) -> dict[str, Any]:
    """Compare one recipe, in this process. turn: which of the small shapes, and of the slabs that are not plain, to take.

    grid: compare every dtype and axis, and further ops, on a slab each (see `parity.grid`).
    """
    side = parity.FRAMEWORKS[framework]
    breccia.set_num_threads(threads)
    side.threads(threads)
    slabs = [slab for slab in parity.SLABS if slab.plain] + [slab for slab in parity.SLABS if not slab.plain][turn]
    drawn = itertools.chain(list(parity.small(recipe))[turn], parity.draws(recipe, values, SLAB, slabs))
    chosen = {way: side.ways[way] for way in ways}
    if grid:
        slabs = parity.grid(turn.start)
        drawn = parity.draws(recipe, values, -(-values // len(slabs)), slabs)
        every = {"eager": parity.Way(lambda recipe: lambda x, options: parity.other_ops(x, recipe, options))}
        tallies, seconds = parity.parity(framework, recipe, every, device, drawn, parity.other_ops)
    else:
        tallies, seconds = parity.parity(framework, recipe, chosen, device, drawn)
    found = {way: dataclasses.asdict(tally) for way, tally in tallies.items()}
    return {"recipe": recipe.spec, "name": recipe.name, "numpy_s": seconds, "modes": found}


def huge(rows: int, columns: int, device: str) -> Any:
    """BF16: normal numbers times 2^-8 to 2^8 by row, with zeros."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    x.mul_(torch.exp2(torch.randint(-8, 9, (rows, 1), device=device, generator=generator).float()).to(torch.bfloat16))
    x[:, 5::97] = 0
    return x


def strip(x: Any, rows: slice) -> np.ndarray:
    import torch

    return x[rows].cpu().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def amax(x: Any) -> np.ndarray:
    """The largest magnitude of all, found by NumPy strip by strip; shape (1, 1)."""
    return np.max([np.abs(NUMPY.f32(strip(x, slice(i, i + STRIP)))).max() for i in range(0, len(x), STRIP)]).reshape(1, 1)


def beyond(recipe: breccia.ScalingRecipe, x: Any) -> Tally:
    """All of the cast of `x`, and of what it decodes to, against NumPy's, strip by strip."""
    tally = Tally(values=x.numel())
    st, (y,) = parity.trip(x, recipe, {}, ["bfloat16"])
    parts, options = components(st), {}
    where, fmt = f"{recipe!r} of {list(x.shape)}", recipe.format
    if fmt.global_scale is not None or fmt.scale.block == TENSOR:  # a strip takes the scale of the whole
        name = "scale" if fmt.global_scale is None else "global_scale"
        options["scale"] = getattr(breccia.cast(amax(x), recipe), name)
        tally.add(where, Results({name: options["scale"]}, {}), Results({name: parts[name]}, {}))
    for first in range(0, len(x), STRIP):
        rows = slice(first, first + STRIP)
        expected = parity.results(*parity.trip(strip(x, rows), recipe, options, ["bfloat16"]), ["bfloat16"])
        found = Results({name: part[rows] if part.ndim else part for name, part in parts.items()}, {"bfloat16": y[rows]})
        tally.add(f"{where}, rows {first} on", expected, found)
    return tally


def beyond_stochastic(recipe: breccia.ScalingRecipe, x: Any, seed: int = 2**64 - 3) -> Tally:
    """As `beyond`, of a stochastic cast's last row against the oracle's, whose counter starts where that row does."""
    parts = components(breccia.cast(x, recipe, rounding="stochastic", seed=seed))
    tally, word, before = Tally(values=x.shape[-1]), oracle.random_word, x[:-1].numel()
    with mock.patch.object(oracle, "random_word", lambda seed, index: word(seed, before + index)):
        written = oracle.cast(NUMPY.f32(strip(x, slice(-1, None))), recipe, rounding="stochastic", seed=seed)
    element, codec = recipe.format.element, recipe.format.scale.codec
    data = reference.pack(NUMPY, written.codes.astype(np.int32), element)
    expected = {"data": data, "scale": NUMPY.store(written.scale.astype(np.int32), NUMPY.storage(codec))}
    found = {name: part[-1:] for name, part in parts.items()}
    tally.add(f"{recipe!r} of {list(x.shape)}, stochastic, last row", Results(expected, {}), Results(found, {}))
    return tally


def beyond_words(count: int, device: str, seed: int = 2**64 - 3) -> Tally:
    """As `beyond`, of random words at both ends and around 2^31 and 2^32 against the oracle's."""
    import torch

    from breccia_torch.ops import TORCH

    words = reference.random_words(TORCH, torch.empty(1, device=device).expand(count), seed)
    around = [n for middle in (0, 1 << 31, 1 << 32, count) for n in range(middle - NEAR, middle + NEAR) if 0 <= n < count]
    found = words[torch.tensor(around, device=words.device)]
    tally, expected = Tally(values=len(around)), np.array([oracle.random_word(seed, n) for n in around], np.uint32)
    tally.add(f"random words of {count} elements", Results({"words": expected}, {}), Results({"words": found}, {}))
    return tally


def beyond_rows(device: str, shape: tuple[int, int] = BEYOND_SHAPE, words: int = BEYOND_WORDS) -> list[dict[str, Any]]:
    """What each of the comparisons above found, one at a time: there is no memory for two."""
    import torch

    def row(what: str, compare: Callable[..., Tally], *arguments: Any) -> dict[str, Any]:
        if device == "cuda":
            torch.cuda.empty_cache()
        try:
            return {"what": what, **dataclasses.asdict(compare(*arguments))}
        except torch.OutOfMemoryError as e:
            return {"what": what, **dataclasses.asdict(Tally(faults=[f"{what}: {e}"]))}

    size = "×".join(f"{n:,}" for n in shape)
    rows = [row(f"random words, of {words:,}", beyond_words, words, device)]
    x = huge(*shape, device)
    rows += [row(f"{name}, {size} BF16", beyond, breccia.recipe(name), x) for name in BEYOND]
    return [*rows, row(f"{STOCHASTIC}, stochastic, last row of {size} BF16", beyond_stochastic, breccia.recipe(STOCHASTIC), x)]


def cuda(framework: str) -> str:
    """The first CUDA device and its CUDA, as `framework` names them. Exits where it sees none."""
    if framework == "torch":
        import torch

        if torch.cuda.is_available():
            return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        import jax

        with suppress(RuntimeError):
            device = jax.devices("cuda")[0]
            return f"{device.device_kind}, {' '.join(device.client.platform_version.split())}"
    refuse(f"--device cuda needs a CUDA device, and {framework} sees none here; leave it out to compare on the CPU.")


@program
def main(
    framework: Annotated[str, typer.Option(help="torch, jax or mlx.")] = "torch",
    ways: Annotated[str, typer.Option(help="Ways to run it, with commas between. Default: all but generic.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    values: Annotated[int, typer.Option(min=1, help="Least number of values for each recipe and variant.")] = 20_000_000,
    recipes: Recipes = None,
    grid: Annotated[bool, typer.Option("--grid", help="Every dtype and axis, and further ops, eagerly on torch.")] = False,
    large: Annotated[bool, typer.Option("--beyond", help="Cast tensors of more than 2^31 elements too, on CUDA.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Of shapes compiled for few numbers, a recipe takes one in N.")] = 1,
    jobs: Annotated[int, typer.Option(help="Recipes compared at a time; 0 for one to two cores.")] = 0,
    seconds: Seconds = math.inf,
) -> Result:
    """Differing bytes between a framework and NumPy."""
    known([framework], parity.FRAMEWORKS, "--framework")
    side = parity.FRAMEWORKS[framework]
    chosen = known(ways.split(",") if ways else side.usual, side.ways, f"--ways of {framework}")
    known([device], side.devices, f"--device of {framework}")
    if grid and (framework != "torch" or chosen not in (["eager"], side.usual)):
        refuse("--grid compares eager calls of torch; leave --framework and --ways out, or ask for eager.")
    chosen = ["eager"] if grid else chosen
    if large and (framework, device) != ("torch", "cuda"):
        refuse("--beyond needs --device cuda and torch: a CPU is served by NumPy's own kernels.")
    if find_spec(framework) is None:
        refuse(f"{framework} is not installed; `pip install breccia-core[{framework}]` brings it.")
    where = provenance([framework], **({"device": cuda(framework)} if device == "cuda" else {}))
    start, every = time.perf_counter(), settings(recipes)
    at_once = min(jobs or max(cores() // 2, 1), len(every))
    threads = max(cores() // at_once, 1)
    spawn = multiprocessing.get_context("spawn")  # a fork has no CUDA, nor the threads of torch
    with ProcessPoolExecutor(at_once, mp_context=spawn) as pool:
        turned = [slice(n if grid else n % turns, None, turns) for n in range(len(every))]
        rest = (chosen, device, values, threads, grid)
        waiting = [pool.submit(measured, framework, r, turn, *rest) for r, turn in zip(every, turned, strict=True)]
        wait(waiting, timeout=None if seconds == math.inf else seconds)
        for one in waiting:
            one.cancel()  # those that run are awaited
        rows = [one.result() for one in waiting if not one.cancelled()]
    options = {"framework": framework, "device": device, "modes": chosen, "values": values, "slab": SLAB, "turns": turns}
    options |= {"grid": True} if grid else {}
    more: dict[str, Any] = {"left": len(every) - len(rows), "beyond": beyond_rows(device) if large else []}
    more["seconds"] = time.perf_counter() - start
    tallies = [*(tally for row in rows for tally in row["modes"].values()), *more["beyond"]]
    faults = [fault for tally in tallies for fault in tally["faults"]]
    if faults:
        more["failed"] = "\n".join([*faults[:20], f"bench_parity: {len(faults)} comparison(s) found different bytes."])
    return BENCHMARKS[framework].result(rows, options, where, **more)
