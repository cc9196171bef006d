"""Training with straight-through gradients against training in FP32: the same task, first weights and batches, by seed.

Every linear layer reads `cast_ste` of its input and of its FP32 weight. The task tells apart classes that overlap, so that
nobody can be right every time. NumPy draws all numbers: every framework trains on the same ones.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer
from harness import Benchmark, Result, Table, cores, known, program, provenance, recipes_named, table

import breccia

#: What quantized training is compared with; it stands in the place of a recipe.
FP32 = "FP32"
FRAMEWORKS = ("torch", "jax", "mlx")
#: Recipes whose mean accuracy must lie within BOUND of FP32's, and those trained for comparison.
HELD = ("fp8_block", "mxfp8", "nvfp4")
SHOWN = ("fp8_current", "mxfp4", "int4")
BOUND = 0.01
#: Fewer pairs are not judged: their mean moves too much.
PAIRS = 5
#: Frameworks that train on so many alone, and under HELD alone: MLX's wheels for Linux multiply matrices by reference BLAS.
SLOW = ("mlx",)
#: Where FP32 must end for the comparison to say anything: it has learned, and has room above.
LEARNED = (0.80, 0.95)

#: Inputs and hidden units: two blocks of 128, so that every recipe has several blocks to a row.
WIDTH, HIDDEN_LAYERS = 256, 2
#: Each class is several normal clusters of variance 1, whose centres lie at about this distance from zero.
CLASSES, CLUSTERS, DISTANCE = 10, 3, 4.0
BATCH, TEST = 256, 16384
#: Of stochastic gradient descent, falling to zero in a straight line.
RATE, MOMENTUM = 0.05, 0.9


def accuracies(result: Result) -> Table:
    exact = {row["framework"]: row["accuracy"] for row in result["rows"] if row["recipe"] == FP32}
    options, columns = result["options"], dict[str, Any]()

    def apart(row: Any) -> list[float]:
        return [100 * (a - b) for a, b in zip(row["accuracy"], exact[row["framework"]], strict=True)]

    def difference(row: Any) -> str:
        error = statistics.stdev(apart(row)) / len(row["accuracy"]) ** 0.5
        return f"{statistics.mean(apart(row)):+.2f} ± {error:.2f}"

    for heading, of in (("accuracy, mean", statistics.mean), ("least", min), ("most", max)):
        columns[heading] = lambda row, of=of: f"{100 * of(row['accuracy']):.2f}"
    compared: dict[str, Any] = {
        "minus FP32, mean": difference,
        "least to most": lambda row: f"{min(apart(row)):+.2f} to {max(apart(row)):+.2f}",
        "held to": lambda row: f"within {100 * options['bound']:g}" if row["held"] else "",
    }
    columns |= {head: (lambda row, of=of: "" if row["recipe"] == FP32 else of(row)) for head, of in compared.items()}
    note = (
        f"{options['classes']} classes in {options['width']} dimensions, {options['steps']} steps of {options['batch']} "
        f"samples. Percent of {options['test']:,} others, over seeds from 0 on. Differences are in "
        "percentage points, between runs of the same seed; ± one standard error of their mean. The benchmark fails where the "
        "mean of a recipe that is held to a bound is further from FP32's. The Bayes-optimal classifier scores "
        f"{100 * statistics.mean(result['best']):.2f} %."
    )
    first = {"recipe": "recipe", "framework": "framework", "seeds": lambda row: len(row["accuracy"])}
    return table("training", {**first, **columns}, result["rows"], note)


BENCHMARK = Benchmark("training", {"training": accuracies})


@dataclass(frozen=True)
class Problem:
    """A mixture of normal clusters, the first weights of a network that is to tell their classes apart, and its batches."""

    seed: int
    steps: int

    def _draw(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])

    def _centres(self) -> np.ndarray:
        """Of all clusters, (cluster, WIDTH); cluster i is of class i modulo CLASSES."""
        return self._draw(0).standard_normal((CLUSTERS * CLASSES, WIDTH)) * (DISTANCE / WIDTH**0.5)

    def _samples(self, draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        centres = self._centres()
        cluster = draw.integers(0, len(centres), count)
        return (centres[cluster] + draw.standard_normal((count, WIDTH))).astype(np.float32), cluster % CLASSES

    def weights(self) -> list[np.ndarray]:
        """One matrix a layer, (outputs, inputs), normal with variance 2 / inputs (He et al. 2015)."""
        draw, widths = self._draw(1), [WIDTH] * (HIDDEN_LAYERS + 1) + [CLASSES]
        shapes = zip(widths[1:], widths[:-1], strict=True)
        return [(draw.standard_normal(shape) * (2 / shape[1]) ** 0.5).astype(np.float32) for shape in shapes]

    def batches(self) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """Learning rate, inputs and classes of each step; none comes twice."""
        draw = self._draw(2)
        for step in range(self.steps):
            yield RATE * (1 - step / self.steps), *self._samples(draw, BATCH)

    def test(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and classes that are in no batch."""
        return self._samples(self._draw(3), TEST)

    def best(self) -> np.ndarray:
        """The likeliest class of each test input for one who knows the clusters; nobody is right more often."""
        centres = self._centres()
        # The log of a cluster's density, but for what all clusters of an input share.
        score = self.test()[0] @ centres.T - (centres**2).sum(1) / 2
        likelihood = np.exp(score - score.max(1, keepdims=True))
        return likelihood.reshape(TEST, CLUSTERS, CLASSES).sum(1).argmax(1)


def library(framework: str) -> SimpleNamespace:
    """What a framework trains by: `array` of NumPy's, `relu`, mean `cross_entropy`, `gradients` of a function, `compiled`."""
    if framework == "torch":
        import torch
        from torch.nn import functional

        torch.set_num_threads(1)  # runs share the cores

        def gradients(loss: Any) -> Any:
            def of(parameters: list[Any], *batch: Any) -> Any:
                leaves = [p.detach().requires_grad_() for p in parameters]
                return torch.autograd.grad(loss(leaves, *batch), leaves)

            return of

        more = {"cross_entropy": functional.cross_entropy, "gradients": gradients, "compiled": lambda step: step}
        return SimpleNamespace(array=torch.as_tensor, relu=torch.relu, done=lambda arrays: None, **more)
    if framework == "jax":
        import jax

        def cross_entropy(logits: Any, y: Any) -> Any:
            return -jax.nn.log_softmax(logits)[np.arange(len(y)), y].mean()

        more = {"cross_entropy": cross_entropy, "gradients": jax.grad, "compiled": jax.jit, "done": lambda arrays: None}
        return SimpleNamespace(array=jax.numpy.asarray, relu=jax.nn.relu, **more)
    import mlx.core as mx
    from mlx import nn

    mean = partial(nn.losses.cross_entropy, reduction="mean")
    return SimpleNamespace(
        array=mx.array, relu=nn.relu, cross_entropy=mean, gradients=mx.grad, compiled=mx.compile, done=mx.eval
    )


@cache
def functions(framework: str, spec: str) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """(the library, the network, a step of gradient descent), compiled once for all seeds. spec: of the recipe, or FP32."""
    lib, recipe = library(framework), None if spec == FP32 else breccia.recipe(spec)

    def rounded(x: Any) -> Any:
        return x if recipe is None else breccia.cast_ste(x, recipe)

    def network(parameters: list[Any], x: Any) -> Any:
        for layer, (w, b) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            x = rounded(lib.relu(x) if layer else x) @ rounded(w).T + b
        return x

    def loss(parameters: list[Any], x: Any, y: Any) -> Any:
        return lib.cross_entropy(network(parameters, x), y)

    def step(parameters: list[Any], momentum: list[Any], rate: Any, x: Any, y: Any) -> tuple[list[Any], list[Any]]:
        gradients = lib.gradients(loss)(parameters, x, y)
        momentum = [MOMENTUM * m + g for m, g in zip(momentum, gradients, strict=True)]
        return [p - rate * m for p, m in zip(parameters, momentum, strict=True)], momentum

    return lib, network, lib.compiled(step)


def trained(framework: str, spec: str, problem: Problem) -> np.ndarray:
    """The class that the trained network gives each test input."""
    lib, network, step = functions(framework, spec)
    parameters = [lib.array(each) for w in problem.weights() for each in (w, np.zeros(len(w), np.float32))]
    momentum = [0 * p for p in parameters]
    for rate, x, y in problem.batches():
        parameters, momentum = step(parameters, momentum, *(lib.array(each) for each in (np.float32(rate), x, y)))
        lib.done([parameters, momentum])
    return np.asarray(network(parameters, lib.array(problem.test()[0]))).argmax(1)


def accuracy(framework: str, spec: str, problem: Problem) -> float:
    """The share of test inputs whose class the trained network finds."""
    return float(np.mean(trained(framework, spec, problem) == problem.test()[1]))


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """In words, what in the rows breaks the promise."""
    found: list[str] = []
    reference = {row["framework"]: statistics.mean(row["accuracy"]) for row in rows if row["recipe"] == FP32}
    for row in rows:
        mean, exact = statistics.mean(row["accuracy"]), reference[row["framework"]]
        if row["recipe"] == FP32 and not LEARNED[0] <= mean <= LEARNED[1]:
            found.append(f"FP32 on {row['framework']} is right in {mean:.4f}, which must lie in {LEARNED} to compare with")
        if row["held"] and abs(mean - exact) > BOUND:
            found.append(f"{row['recipe']} on {row['framework']} is right in {mean:.4f}, FP32 in {exact:.4f}")
    return found


@program
def main(
    seeds: Annotated[int, typer.Option(min=2, help="Pairs of runs: seeds 0, 1, ...")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 600,
    framework: Annotated[list[str] | None, typer.Option(help="Repeat for several. Default: those that are installed.")] = None,
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes by name; repeat for several.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0 for one a core.")] = 0,
) -> Result | None:
    """Accuracy after training with straight-through gradients, against FP32's."""
    frameworks = [name for name in known(framework, FRAMEWORKS, "--framework") if find_spec(name)]
    if not frameworks:
        wanted = ", ".join(framework or FRAMEWORKS)
        print(f"skipped training: none of {wanted} is installed; `make bench` sets it up", file=sys.stderr)
        return None
    where = provenance(frameworks)
    specs = [FP32, *(one.spec for one in recipes_named(recipes or [*HELD, *SHOWN]))]
    problems = [Problem(seed, steps) for seed in range(seeds)]
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever threads NumPy has started
    with ProcessPoolExecutor(jobs or cores(), mp_context=spawn) as pool:
        waiting = {
            (name, spec): [pool.submit(accuracy, name, spec, p) for p in problems[: PAIRS if name in SLOW else None]]
            for name in frameworks
            for spec in specs
            if name not in SLOW or spec not in SHOWN
        }
        rows = [
            {"framework": name, "recipe": spec, "held": spec in HELD, "accuracy": [one.result() for one in runs]}
            for (name, spec), runs in waiting.items()
        ]
    found = faults(rows) if seeds >= PAIRS else []
    refused = f"{'; '.join(found)}. Recipes held to it must come within {BOUND:g} of FP32; nothing written." if found else ""
    options = {"seeds": seeds, "steps": steps, "batch": BATCH, "width": WIDTH, "classes": CLASSES, "test": TEST, "bound": BOUND}
    best = [float(np.mean(problem.best() == problem.test()[1])) for problem in problems]
    return BENCHMARK.result(rows, options, where, best=best, refused=refused)
