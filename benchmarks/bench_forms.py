"""Time of every form of a cast on the CPU, compared with the recipe's plain form and with a copy of the matrix.

Forms: each recipe with each other value of its fields, and each option of `cast`; input in BF16 and FP16; `dequantize` to FP32,
FP16 and BF16 into `out=`; `requantize`. The plain form is the recipe's default, of FP32 input, in blocks along the last axis.
Forms of one recipe, its plain one, the copy and the write are interleaved in one process. A ratio is minimum over minimum;
those of CPU time do not depend on what else runs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer
from harness import Benchmark, Call, Recipes, Result, interleaved, normal, program, progress, recipes_named, summary
from harness.tables import Table, table, three

import breccia

#: Values of fields that take any number, or whose choice alone is not a form.
CHANGES: tuple[dict[str, Any], ...] = (
    {"margin": 1}, {"block_m": 128}, {"group_size": 32}, {"group_size": 128}, {"block_size": 16},
    {"signed": False, "symmetric": False}, {"signed": False, "symmetric": False, "offset": "bias"},
    {"signed": False, "symmetric": False, "scale_dtype": "fp32"},
)  # fmt: skip
PLAIN = "plain"
DTYPES = ("float32", "bfloat16", "float16")


def times(result: Result) -> Table:
    options = result["options"]
    ratios = {
        "of plain": "over_plain",
        "of plain, CPU time": "cpu_over_plain",
        "of copy": "over_copy",
        "of write": "over_write",
    }
    columns: dict[str, Any] = {name: name for name in ("recipe", "op", "form")}
    columns["ms"] = lambda row: three(row["time"]["breccia"]["min_s"] * 1e3)
    columns |= {head: (lambda row, key=key: f"{row[key]:.2f}" if key in row else "") for head, key in ratios.items()}
    note = (
        f"A matrix of {options['size']} × {options['size']} in {options['framework']}, {options['threads']} thread(s), minima. "
        "plain: the default, of FP32 and along the last axis. copy: of the FP32 matrix. write: of the result's size. "
        f"The slowest copy took {options['copy_spread']:.2f} times the median one."
    )
    return table("forms of casts on the CPU", columns, [r for r in result["rows"] if r["op"] not in ("copy", "write")], note)


BENCHMARK = Benchmark("forms", {"forms": times})


def forms(recipe: Any) -> Iterator[tuple[str, Any]]:
    """(how it differs from `recipe`, the other recipe), for each other value of one field, and each of CHANGES."""
    from breccia.recipes import choices_of

    fields = [field.name for field in dataclasses.fields(recipe)]
    changes = [{name: value} for name in fields for value in choices_of(type(recipe), name)[0]]
    changes += [{name: not getattr(recipe, name)} for name in fields if isinstance(getattr(recipe, name), bool)]
    yield from changed(recipe, [*changes, *CHANGES])


def changed(recipe: Any, changes: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(the change, the other recipe) of each change that the recipe takes and that makes another recipe."""
    found = [recipe]
    for change in changes:
        try:
            other = dataclasses.replace(recipe, **change)
        except (TypeError, breccia.RecipeError):  # it has no such field, or not that value
            continue
        if other not in found:
            found.append(other)
            yield ", ".join(f"{name}={value}" for name, value in change.items()), other


def calls(recipe: Any, numbers: dict[str, Any], into: dict[str, Any]) -> Iterator[tuple[str, str, Call]]:
    """(op, form, call) of the copy, the writes and all forms of a recipe, the plain one of each op first."""
    x = numbers["float32"]
    yield "copy", "copy", lambda: np.copyto(into["float32"], x)
    out = breccia.cast(x, recipe)
    yield "cast", PLAIN, lambda: breccia.cast(x, recipe, out=out)
    yield "cast", "without out=", lambda: breccia.cast(x, recipe)
    for dtype in DTYPES[1:]:
        yield "cast", dtype, lambda a=numbers[dtype]: breccia.cast(a, recipe, out=out)
    options = {
        "axis=-2": {"axis": -2},
        "rounding=stochastic": {"rounding": "stochastic", "seed": 1},
        "nonfinite=raise": {"nonfinite": "raise"},
        "scale=supplied": {"scale": out.scale if out.global_scale is None else out.global_scale},
    }
    for form, given in options.items():
        to = breccia.cast(x, recipe, axis=given.get("axis", -1))
        yield "cast", form, lambda given=given, to=to: breccia.cast(x, recipe, out=to, **given)
    for form, other in forms(recipe):
        to = breccia.cast(x, other)
        yield "cast", form, lambda other=other, to=to: breccia.cast(x, other, out=to)
    for dtype in DTYPES:
        yield "write", dtype, lambda d=dtype: into[d].view(np.uint8).fill(1)
        form = PLAIN if dtype == "float32" else dtype
        yield "dequantize", form, lambda d=dtype: breccia.dequantize(out, out_dtype=d, out=into[d])
    stored = {"axis=-2": breccia.cast(x, recipe, axis=-2)}
    stored |= {form: breccia.cast(x, other) for form, other in forms(recipe)}
    for form, st in stored.items():
        yield "dequantize", form, lambda st=st: breccia.dequantize(st, out=into["float32"])
    for name in ("mxfp8", "int8"):
        target = breccia.recipe(name)
        to = breccia.requantize(out, target)
        yield "requantize", f"to {name}", lambda t=target, to=to: breccia.requantize(out, t, out=to)


def measured(found: list[tuple[str, str, Call]], recipe: str, runs: int, seconds: float) -> Iterator[dict[str, Any]]:
    taken = interleaved([call for _, _, call in found], runs, seconds)
    least = {(op, form): tuple(map(min, zip(*times, strict=True))) for (op, form, _), times in zip(found, taken, strict=True)}
    for (op, form, _), times in zip(found, taken, strict=True):
        wall, cpu = least[op, form]
        row = {"recipe": recipe, "op": op, "form": form, "time": {"breccia": summary([s for s, _ in times])}}
        row |= {"cpu_s": round(cpu, 10), "over_copy": round(wall / least["copy", "copy"][0], 3)}
        if op == "dequantize":
            row["over_write"] = round(wall / least["write", form if form in DTYPES else "float32"][0], 3)
        if plain := least.get((op, PLAIN)):
            row |= {"over_plain": round(wall / plain[0], 3), "cpu_over_plain": round(cpu / plain[1], 3)}
        yield row


@program
def main(
    size: Annotated[int, typer.Option(min=128, help="Rows and columns of the matrix.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Least turns.")] = 5,
    seconds: Annotated[float, typer.Option(help="Least seconds of the turns of a recipe.")] = 3.0,
    recipes: Recipes = None,
) -> Result:
    """Time every form of cast, dequantize and requantize on the CPU."""
    import ml_dtypes

    dtypes = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    numbers = {name: normal((size, size), 0).astype(dtype) for name, dtype in dtypes.items()}
    into = {name: np.empty_like(x) for name, x in numbers.items()}
    rows: list[dict[str, Any]] = []
    for recipe in progress(recipes_named(recipes), "recipes"):
        rows += measured(list(calls(recipe, numbers, into)), recipe.name, runs, seconds)
    copies = [row["time"]["breccia"]["median_s"] for row in rows if row["op"] == "copy"]
    options = {"size": size, "framework": "numpy", "threads": breccia.get_num_threads()}
    return BENCHMARK.result(rows, {**options, "copy_spread": round(max(copies) / statistics.median(copies), 3)})
