"""Time of every form of a cast on the CPU: each recipe with each other value of its fields, and each option of `cast`; input
in BF16 and FP16; `dequantize` to FP32, FP16 and BF16 into `out=`; `requantize`. Compared with the plain form of the recipe, and
with a copy of the matrix.

    python benchmarks/bench_forms.py [--size 4096] [--recipes nvfp4] [--framework torch] [--out benchmarks/results]

The plain form is the recipe's default, of FP32 input, in blocks along the last axis. Forms of one recipe, its plain one, the
copy and the write take turns in one process, so that a machine that slows down slows all of them. A ratio is minimum over
minimum; those of CPU time do not depend on what else runs. Exits with 1 where `--limit` is given and a form takes more than
this multiple of its plain form's CPU time.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import common
import ml_dtypes
import numpy as np
import tables
import typer

import breccia
from breccia.recipes import choices_of

#: Values of fields that take any number, or whose choice alone is not a form.
CHANGES: tuple[dict[str, Any], ...] = (
    {"margin": 1},
    {"block_m": 128},
    {"group_size": 32},
    {"group_size": 128},
    {"block_size": 16},
    {"signed": False, "symmetric": False},
    {"signed": False, "symmetric": False, "offset": "bias"},
    {"signed": False, "symmetric": False, "scale_dtype": "fp32"},
)
#: The copy and the write of the matrix, beside the forms of each recipe.
COPY, WRITE = "copy", "write"
PLAIN = "plain"
DTYPES = ("float32", "bfloat16", "float16")


def forms(recipe: breccia.ScalingRecipe) -> Iterator[tuple[str, breccia.ScalingRecipe]]:
    """(how it differs from `recipe`, the other recipe), for each other value of one field, and each of CHANGES."""
    fields = [field.name for field in dataclasses.fields(recipe)]
    changes = [{name: value} for name in fields for value in choices_of(type(recipe), name)[0]]
    changes += [{name: not getattr(recipe, name)} for name in fields if isinstance(getattr(recipe, name), bool)]
    found = [recipe]
    for change in [*changes, *CHANGES]:
        try:
            other = dataclasses.replace(recipe, **change)
        except (TypeError, breccia.RecipeError):  # it has no such field, or not that value
            continue
        if other not in found:
            found.append(other)
            yield ", ".join(f"{name}={value}" for name, value in change.items()), other


class Arrays:
    """A framework's matrices: of numbers in each dtype, and their copy and write."""

    def __init__(self, framework: str, size: int) -> None:
        self.framework, x = framework, common.normal((size, size), 0)
        if framework == "torch":
            import torch

            self.numbers: dict[str, Any] = {d: torch.from_numpy(x).to(getattr(torch, d)) for d in DTYPES}
            self.into = {d: torch.empty_like(a) for d, a in self.numbers.items()}
            self.copy: Callable[[], Any] = lambda: self.into["float32"].copy_(self.numbers["float32"])
            self.write: Callable[[str], Any] = lambda d: self.into[d].fill_(1)
        else:
            named = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
            self.numbers = {d: x.astype(t) for d, t in named.items()}
            self.into = {d: np.empty_like(a) for d, a in self.numbers.items()}
            self.copy = lambda: np.copyto(self.into["float32"], self.numbers["float32"])
            self.write = lambda d: self.into[d].view(np.uint8).fill(1)

    def calls(self, recipe: breccia.ScalingRecipe) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """(op, form, call) of all forms of a recipe, the plain one of each op first."""
        x = self.numbers["float32"]
        yield "copy", COPY, self.copy
        out = breccia.cast(x, recipe)
        yield "cast", PLAIN, lambda: breccia.cast(x, recipe, out=out)
        yield "cast", "without out=", lambda: breccia.cast(x, recipe)
        for dtype in DTYPES[1:]:
            yield "cast", dtype, lambda a=self.numbers[dtype]: breccia.cast(a, recipe, out=out)
        options = {
            "axis=-2": {"axis": -2},
            "rounding=stochastic": {"rounding": "stochastic", "seed": 1},
            "nonfinite=raise": {"nonfinite": "raise"},
            "scale=supplied": {"scale": out.scale if out.global_scale is None else out.global_scale},
        }
        for form, given in options.items():
            into = breccia.cast(x, recipe, axis=given.get("axis", -1))
            yield "cast", form, lambda given=given, into=into: breccia.cast(x, recipe, out=into, **given)
        for form, other in forms(recipe):
            into = breccia.cast(x, other)
            yield "cast", form, lambda other=other, into=into: breccia.cast(x, other, out=into)
        for dtype in DTYPES:
            form = PLAIN if dtype == "float32" else dtype
            yield "write", dtype, lambda d=dtype: self.write(d)
            yield "dequantize", form, lambda d=dtype: breccia.dequantize(out, out_dtype=d, out=self.into[d])
        turned = breccia.cast(x, recipe, axis=-2)
        yield "dequantize", "axis=-2", lambda: breccia.dequantize(turned, out=self.into["float32"])
        for form, other in forms(recipe):
            st = breccia.cast(x, other)
            yield "dequantize", form, lambda st=st: breccia.dequantize(st, out=self.into["float32"])
        for name in ("mxfp8", "int8"):
            target = breccia.recipe(name)
            into = breccia.requantize(out, target)
            yield "requantize", f"to {name}", lambda t=target, into=into: breccia.requantize(out, t, out=into)


def measured(arrays: Arrays, recipe: breccia.ScalingRecipe, runs: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each form of a recipe."""
    found = list(arrays.calls(recipe))
    taken: list[list[tuple[float, float]]] = [[] for _ in found]
    until = time.perf_counter() + seconds
    while len(taken[0]) < runs or time.perf_counter() < until:
        for (_, _, call), times in zip(found, taken, strict=True):
            call()  # uncounted
            start = time.perf_counter(), time.process_time()
            call()
            times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    rows = [
        {
            "recipe": recipe.name,
            "op": op,
            "form": form,
            **common.summary([wall for wall, _ in times]),
            "cpu_s": round(min(cpu for _, cpu in times), 10),
        }
        for (op, form, _), times in zip(found, taken, strict=True)
    ]
    by = {(row["op"], row["form"]): row for row in rows}

    def over(row: dict[str, Any], other: dict[str, Any], what: str = "min_s") -> float:
        return round(row[what] / other[what], 3)

    for row in rows:
        row["over_copy"] = over(row, by["copy", COPY])
        if row["op"] == "dequantize":
            row["over_write"] = over(row, by["write", row["form"] if row["form"] in DTYPES else "float32"])
        if (plain := by.get((row["op"], PLAIN))) is not None:
            row["over_plain"], row["cpu_over_plain"] = over(row, plain), over(row, plain, "cpu_s")
    return rows


def main(
    size: Annotated[int, typer.Option(min=128, help="Rows and columns of the matrix.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Least turns.")] = 5,
    seconds: Annotated[float, typer.Option(help="Least seconds of the turns of a recipe.")] = 3.0,
    framework: Annotated[str, typer.Option(help="Whose arrays: numpy or torch.")] = "numpy",
    recipes: Annotated[list[str] | None, typer.Option(help="Only these recipes; repeatable.")] = None,
    limit: Annotated[
        float | None, typer.Option(help="Exit with 1 if a form takes more than this times its plain form.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time every form of cast, dequantize and requantize on the CPU."""
    if framework not in ("numpy", "torch"):
        sys.exit(f"bench_forms: --framework takes numpy or torch; got {framework!r}.")
    arrays = Arrays(framework, size)
    rows = [row for recipe in common.recipes(recipes or []) for row in measured(arrays, recipe, runs, seconds)]
    result: dict[str, Any] = {"benchmark": "forms", "schema": common.SCHEMA, "provenance": common.provenance()}
    options = {"size": size, "framework": framework, "threads": breccia.get_num_threads()}
    copies = [row["median_s"] for row in rows if row["op"] == "copy"]
    options["copy_spread"] = round(max(copies) / statistics.median(copies), 3)
    tables.tell({**result, "options": options, "rows": rows}, out, as_json, "" if framework == "numpy" else framework)
    slow = [row for row in rows if limit is not None and row.get("cpu_over_plain", 0) > limit]
    for row in slow:
        print(f"{row['recipe']}, {row['op']}, {row['form']}: {row['cpu_over_plain']} times the plain form", file=sys.stderr)
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    typer.run(main)
