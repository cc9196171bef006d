"""Losses of a small GPT whose linear layers train under each `breccia.TrainingRecipe`, against BF16, in pairs of the same seed.

The model, the text and the loop are those of examples/02_training.py. Runs of one seed have the same first weights and batches.
"""

from __future__ import annotations

import statistics
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import Benchmark, Result, Table, known, program, provenance, table

#: How far the loss of a recipe may be from BF16's, in the mean of the seeds.
BOUNDS = {"nvfp4": 0.015}
BOUND = 0.01
#: Losses of training are means of the last steps.
LAST = 20


def example() -> Any:
    """The module of the example."""
    path = Path(__file__).resolve().parents[1] / "examples" / "02_training.py"
    spec = spec_from_file_location("training_example", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(result: Result) -> Table:
    reference = next(row for row in result["rows"] if row["recipe"] == "BF16")

    def gap(row: Any, of: str) -> str:
        apart = [100 * (a / b - 1) for a, b in zip(row[of], reference[of], strict=True)]
        return f"{statistics.mean(apart):+.2f} ({', '.join(f'{each:+.2f}' for each in apart)})"

    columns: dict[str, Any] = {
        "recipe": "recipe",
        "held-out loss": lambda row: f"{statistics.mean(row['held_out']):.4f}",
        "minus BF16, % (by seed)": lambda row: "" if row is reference else gap(row, "held_out"),
        "training loss": lambda row: f"{statistics.mean(row['training']):.4f}",
        "minus BF16, %": lambda row: "" if row is reference else gap(row, "training"),
        "held to, %": lambda row: "" if row is reference else f"{100 * row['bound']:g}",
    }
    options = result["options"]
    note = (
        f"{options['text']}; {options['parameters']:,} parameters, {options['steps']} steps of {options['tokens']} characters, "
        f"{len(reference['held_out'])} seeds. Training losses are means of the last {LAST} steps. Means and, in brackets, each "
        "seed. The benchmark fails where the mean of held-out losses is further from BF16's."
    )
    return table("training-layers", columns, result["rows"], note)


BENCHMARK = Benchmark("training-layers", {"training-layers": losses})


@program
def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe: seeds 0, 1, ...")] = 2,
    steps: Annotated[int, typer.Option(min=LAST, help="Steps of each run.")] = 200,
    recipes: Annotated[list[str] | None, typer.Option(help="Presets by name; repeat for several.")] = None,
) -> Result:
    """Losses under each training recipe, against BF16's."""
    import torch

    gpt = example()
    where = provenance(["torch"])
    torch.set_num_threads(1)
    size = gpt.Size(steps=steps, context=64, batch=8, rate=2e-3)
    source, letters = gpt.text()
    data, characters = gpt.encoded(letters)
    rows: list[dict[str, Any]] = []
    for recipe in (gpt.BF16, *known(recipes, gpt.RECIPES, "--recipes")):
        row: dict[str, Any] = {"recipe": recipe, "bound": BOUNDS.get(recipe, BOUND), "held_out": [], "training": []}
        for seed in range(seeds):
            run = gpt.trained(recipe, size, data, characters, seed)
            row["held_out"].append(run["held_out"])
            row["training"].append(statistics.mean(run["losses"][-LAST:]))
            print(
                recipe, seed, row["held_out"][-1], row["training"][-1], f"{run['seconds']:.3f} s", file=sys.stderr, flush=True
            )
        rows.append(row)
    exact = statistics.mean(rows[0]["held_out"])
    far = [r["recipe"] for r in rows if abs(statistics.mean(r["held_out"]) / exact - 1) > r["bound"]]
    refused = f"{', '.join(far)}: further from BF16 than allowed; nothing written." if far else ""
    model = gpt.GPT(characters, size.layers, size.width, size.heads, size.context)
    options = {
        "text": source,
        "steps": steps,
        "tokens": size.batch * size.context,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return BENCHMARK.result(rows, options, where, refused=refused)
