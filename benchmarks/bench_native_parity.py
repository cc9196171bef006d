"""Parity of the compiled CPU kernels with the generic algorithm, in differing bytes, for each instruction set of this CPU.

    python benchmarks/bench_native_parity.py [--values 100000000] [--recipes nvfp4] [--out benchmarks/results]

Blocks of random bit patterns of FP32, BF16 and FP16, normal numbers with NaN and Inf, ties, zeros and numbers at the edges of
the format (parity.py) are cast, decoded to three dtypes, and requantized: each recipe, with every form of bench_forms.py and
option of `cast` in turn, in shapes with and without partial blocks. What the generic algorithm writes is computed once for all
instruction sets. `--values` are compared of each recipe, op and instruction set. Exits with 1 where a byte differs, after
naming it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import common
import ml_dtypes
import numpy as np
import parity
import tables
import typer
from bench_forms import forms

import breccia
from breccia.tensors.components import components
from breccia_native import decoding, microkernels

#: What is compared in turn: 2^20 values, or a few fewer in rows and blocks that are not whole.
SHAPES = ((512, 2048), (511, 2051), (3, 170, 2055), (1024, 1024), (4099, 257))
#: Options of `cast` in turn. "supplied": the scales that the generic algorithm chose.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"axis": -2},
    {"rounding": "stochastic"},
    {"scale": "supplied"},
    {"axis": -2, "rounding": "stochastic"},
    {"scale": "supplied", "rounding": "stochastic"},
)
OPS = ("cast", "dequantize", "requantize")


def draws(rng: np.random.Generator, recipe: breccia.ScalingRecipe) -> Iterator[np.ndarray]:
    """Blocks without an end: every shape with every way of drawing, in three dtypes."""
    faulty = partial(parity.normal, exponents=20, faulty=True)
    bits = [partial(parity.patterns, dtype=d, finite=f) for d in parity.DTYPES for f in (False, True)]
    for draw, shape in itertools.cycle(
        zip(itertools.cycle([*bits, faulty, parity.zeros, parity.ties, parity.edges]), SHAPES * 10)
    ):
        x = draw(rng, shape, recipe)
        yield x
        if x.dtype == np.float32:
            with np.errstate(all="ignore"):
                yield x.astype(rng.choice([ml_dtypes.bfloat16, np.float16]))


def differing(expected: Any, found: Any) -> int:
    """Bytes of components or arrays that differ, where a decoded NaN is like another."""
    if isinstance(expected, breccia.ScaledTensor):
        a, b = components(expected), components(found)
        if a.keys() != b.keys():
            return 1
        return sum(differing_bytes(np.asarray(a[name]), np.asarray(b[name])) for name in a)
    return differing_bytes(expected, found)


def differing_bytes(a: np.ndarray, b: np.ndarray) -> int:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return max(a.nbytes, 1)
    word = f"u{a.itemsize}"
    p, q = np.ascontiguousarray(a).view(word), np.ascontiguousarray(b).view(word)
    if np.array_equal(p, q):
        return 0
    wrong = p != q
    if a.dtype.kind in "fV":
        wrong &= ~(np.isnan(np.ascontiguousarray(a)) & np.isnan(np.ascontiguousarray(b)))
    return int(wrong.sum()) * a.itemsize


def compared(recipe: breccia.ScalingRecipe, values: int, seed: int) -> list[dict[str, Any]]:
    """A row for each op and instruction set."""
    rng, sets = np.random.default_rng(seed), microkernels.use()
    every = itertools.cycle([recipe, *(other for _, other in forms(recipe))])
    targets = itertools.cycle(common.recipes([]))
    tallies = {(op, name): {"values": 0, "bytes": 0, "differing": 0, "first": ""} for op in OPS for name in sets}
    blocks, options = draws(rng, recipe), itertools.cycle(OPTIONS)
    while min(tally["values"] for tally in tallies.values()) < values:
        x, form, given, target = next(blocks), next(every), dict(next(options)), next(targets)
        if "rounding" in given:
            given["seed"] = int(rng.integers(0, 1 << 63))
        if "scale" in given:
            st = breccia.cast(x, form, prefer="reference.cast")
            given["scale"] = st.scale if st.global_scale is None else st.global_scale
        dtype = parity.DTYPES[int(rng.integers(3))]
        cast = breccia.cast(x, form, prefer="reference.cast", **given)
        expected = {
            "cast": cast,
            "dequantize": breccia.dequantize(cast, out_dtype=dtype, prefer="reference.dequantize"),
            "requantize": breccia.requantize(cast, target, prefer="reference.requantize"),
        }
        out = np.empty_like(expected["dequantize"])
        calls: dict[str, Callable[[], Any]] = {
            "cast": partial(breccia.cast, x, form, **given),
            "dequantize": partial(breccia.dequantize, cast, out_dtype=dtype, out=out),
            "requantize": partial(breccia.requantize, cast, target),
        }
        for name, op in itertools.product(sets, OPS):
            microkernels.use(name)
            decoding.use(name)
            tally, wrong = tallies[op, name], differing(expected[op], calls[op]())
            tally["values"] += x.size
            tally["bytes"] += expected[op].nbytes
            tally["differing"] += wrong
            if wrong and not tally["first"]:
                tally["first"] = f"{form!r}, {x.dtype} of shape {x.shape}, {given.keys()}, to {dtype} or {target.name}"
                print(f"{op}, {name}: {wrong} bytes differ: {tally['first']}", file=sys.stderr)
    microkernels.use(sets[0])
    decoding.use(sets[0])
    return [{"recipe": recipe.name, "op": op, "instructions": name, **tally} for (op, name), tally in tallies.items()]


def main(
    values: Annotated[int, typer.Option(min=1, help="Values of each recipe, op and instruction set.")] = 100_000_000,
    seed: Annotated[int, typer.Option(help="Of the numbers drawn.")] = 0,
    recipes: Annotated[list[str] | None, typer.Option(help="Only these recipes; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the compiled kernels with the generic algorithm, byte by byte."""
    start, rows = time.perf_counter(), list[dict[str, Any]]()
    for recipe in common.recipes(recipes or []):
        rows += compared(recipe, values, seed)
        print(f"{recipe.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    result: dict[str, Any] = {"benchmark": "native-parity", "schema": common.SCHEMA, "provenance": common.provenance()}
    options = {"values": values, "seed": seed, "threads": breccia.get_num_threads()}
    tables.tell({**result, "options": options, "rows": rows}, out, as_json)
    sys.exit(1 if any(row["differing"] for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
