"""Parity of the compiled CPU kernels with the generic algorithm, in differing bytes, for each instruction set of this CPU.

Blocks of numbers (parity.py) are cast, decoded to three dtypes, and requantized: each recipe, with every form of
bench_forms.py and option of `cast` in turn, in shapes with and without partial blocks. Exits with 1 after naming a differing
byte.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import parity
import typer
from bench_forms import forms
from harness import Benchmark, Recipes, Result, Table, program, progress, recipes_named, table

import breccia
from breccia.tensors.components import components

#: What is compared in turn: 2^20 values, or a few fewer in rows and blocks that are not whole.
SHAPES = ((512, 2048), (511, 2051), (3, 170, 2055), (1024, 1024), (4099, 257))
#: Options of `cast` in turn. "supplied": the scales that the generic algorithm chose.
_ROUNDED, _GIVEN = {"rounding": "stochastic"}, {"scale": "supplied"}
OPTIONS: tuple[dict[str, Any], ...] = ({}, parity.ROWS, _ROUNDED, _GIVEN, parity.ROWS | _ROUNDED, _GIVEN | _ROUNDED)
OPS = ("cast", "dequantize", "requantize")


def compared_table(result: Result) -> Table:
    rows = result["rows"]
    kinds = dict.fromkeys((row["op"], row["instructions"]) for row in rows)

    def total(what: str) -> Callable[[Any], str]:
        return lambda kind: f"{sum(row[what] for row in rows if (row['op'], row['instructions']) == kind):,}"

    columns: dict[str, Any] = {"op": lambda kind: kind[0], "instruction set": lambda kind: kind[1]}
    columns |= {"values": total("values"), "bytes": total("bytes"), "differing bytes": total("differing")}
    note = (
        f"{len({row['recipe'] for row in rows})} recipes with every form and option in turn, at least "
        f"{result['options']['values']:,} values of each."
    )
    return table("compiled kernels against the generic algorithm", columns, kinds, note)


BENCHMARK = Benchmark("native-parity", {"native-parity": compared_table})


def draws(rng: np.random.Generator, recipe: breccia.ScalingRecipe) -> Iterator[np.ndarray]:
    """Blocks without an end: every shape with every way of drawing, in three dtypes."""
    faulty = partial(parity.normal, exponents=20, faulty=True)
    bits = [partial(parity.patterns, dtype=d, finite=f) for d in parity.DTYPES for f in (False, True)]
    every = itertools.cycle([*bits, faulty, parity.zeros, parity.ties, parity.edges])
    for draw, shape in itertools.cycle(zip(every, SHAPES * 10, strict=False)):
        x = draw(rng, shape, recipe)
        yield x
        if x.dtype == np.float32:
            with np.errstate(all="ignore"):
                yield x.astype(rng.choice([ml_dtypes.bfloat16, np.float16]))


def results(found: Any) -> parity.Results:
    if isinstance(found, breccia.ScaledTensor):
        return parity.Results({name: np.asarray(part) for name, part in components(found).items()}, {})
    return parity.Results({}, {str(found.dtype): found})


def compared(recipe: breccia.ScalingRecipe, values: int, seed: int) -> list[dict[str, Any]]:
    from breccia_native import decoding, microkernels

    rng, sets = np.random.default_rng(seed), microkernels.use()
    every = itertools.cycle([recipe, *(other for _, other in forms(recipe))])
    targets = itertools.cycle(recipes_named(None))
    tallies = {(op, name): parity.Tally() for op in OPS for name in sets}
    blocks, options = draws(rng, recipe), itertools.cycle(OPTIONS)
    while min(tally.values for tally in tallies.values()) < values:
        x, form, given, target = next(blocks), next(every), dict(next(options)), next(targets)
        if "rounding" in given:
            given["seed"] = int(rng.integers(0, 1 << 63))
        if "scale" in given:
            st = breccia.cast(x, form, prefer="reference.cast")
            given["scale"] = st.scale if st.global_scale is None else st.global_scale
        dtype = parity.DTYPES[int(rng.integers(3))]
        cast = breccia.cast(x, form, prefer="reference.cast", **given)
        calls: dict[str, Callable[..., Any]] = {
            "cast": partial(breccia.cast, x, form, **given),
            "dequantize": partial(breccia.dequantize, cast, out_dtype=dtype),
            "requantize": partial(breccia.requantize, cast, target),
        }
        expected = {op: results(call(prefer=f"reference.{op}")) for op, call in calls.items()}
        (decoded,) = expected["dequantize"].decoded.values()
        calls["dequantize"] = partial(calls["dequantize"], out=np.empty_like(decoded))
        for name, op in itertools.product(sets, OPS):
            microkernels.use(name)
            decoding.use(name)
            tally = tallies[op, name]
            tally.values += x.size
            where = f"{form!r}, {x.dtype} of shape {x.shape}, {given.keys()}, to {dtype} or {target.name}"
            tally.add(f"{op}, {name}: {where}", expected[op], results(calls[op]()))
    microkernels.use(sets[0])
    decoding.use(sets[0])
    for fault in (tally.faults[0] for tally in tallies.values() if tally.faults):
        print(fault, file=sys.stderr)
    return [
        {"recipe": recipe.name, "op": op, "instructions": name, "values": t.values, "bytes": t.bytes, "differing": t.differing}
        | {"first": t.faults[0] if t.faults else ""}
        for (op, name), t in tallies.items()
    ]


@program
def main(
    values: Annotated[int, typer.Option(min=1, help="Values of each recipe, op and instruction set.")] = 100_000_000,
    seed: Annotated[int, typer.Option(help="Of the numbers drawn.")] = 0,
    recipes: Recipes = None,
) -> Result:
    """Compare the compiled kernels with the generic algorithm, byte by byte."""
    rows = [row for recipe in progress(recipes_named(recipes), "recipes") for row in compared(recipe, values, seed)]
    options = {"values": values, "seed": seed, "threads": breccia.get_num_threads()}
    differing = sum(row["differing"] for row in rows)
    failed = f"bench_native_parity: {differing} bytes differ." if differing else ""
    return BENCHMARK.result(rows, options, failed=failed)
