"""On a CUDA device: GPTs that train under each `breccia.TrainingRecipe`, against BF16: held-out losses, and times of a step.

Runs of one seed have the same first weights and batches. Model, text and recipes are those of examples/02_training.py. A run is
named MODEL/RECIPE/SEED, and the times of all recipes of a model, which are interleaved, MODEL/times. `--only` chooses by
patterns, `--resume` keeps what an earlier result has, so several calls can share the work; `join.py` joins their results.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from bench_gpu_training import graph_of
from bench_training_layers import example
from harness import Benchmark, Device, Result, Seconds, command, joined, known, read, refuse
from harness.device import Arms, Call, Make, Timer, check_device, message, sampled, where
from harness.plots import BLUE, GREY, ORANGE, Plot
from harness.tables import ABSENT, Table, over, table, three
from torch import Tensor, nn
from torch.nn import functional

import breccia_torch
from breccia import TrainingRecipe

BF16 = "BF16"
PRESETS = ("fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "fp8_tile", "mxfp8", "nvfp4")
#: The scales of x and w of arXiv:2512.02010, which maps the largest value of a block to 4 or to 6.
FOUR_SIX = TrainingRecipe("nvfp4", input="nvfp4,scale_rule=four_six", weight="nvfp4,block_m=16,scale_rule=four_six")


class Variant(NamedTuple):
    """How a model trains beside a preset in all layers. Both options are of arXiv:2509.25149.

    ends: the first and last block of the model stay in BF16.
    late: the share of the steps, the last ones, in which the whole model is in BF16.
    """

    recipe: TrainingRecipe
    ends: bool = False
    late: float = 0.0


NVFP4 = TrainingRecipe("nvfp4")
VARIANTS = {
    "nvfp4-ends": Variant(NVFP4, ends=True),
    "nvfp4-late": Variant(NVFP4, late=0.2),
    "nvfp4-ends-late": Variant(NVFP4, ends=True, late=0.2),
    "nvfp4-four-six": Variant(FOUR_SIX),
    "nvfp4-four-six-ends": Variant(FOUR_SIX, ends=True),
    "nvfp4-bf16-wgrad": Variant(TrainingRecipe("nvfp4", high_precision=("grad_weight",))),
    "nvfp4-bf16-output": Variant(TrainingRecipe("nvfp4", high_precision=("output",))),
    "nvfp4-bf16-dgrad": Variant(TrainingRecipe("nvfp4", high_precision=("grad_input",))),
    "fp8_delayed-1024": Variant(
        TrainingRecipe(
            input="fp8_delayed,amax_history_len=1024",
            weight="fp8_delayed,amax_history_len=1024",
            gradient="fp8_delayed,amax_history_len=1024,fp8_format=E5M2",
        )
    ),
}
#: Controls: the model without autocast, its products in TF32, and BF16 a second time. Some sums have no order on a GPU, so
#: equal runs differ.
TF32, AGAIN = "TF32", "BF16-again"
RECIPES = (*PRESETS, *VARIANTS)
ABOUT = {
    "nvfp4-ends": "the first and last block in BF16",
    "nvfp4-late": "the last fifth of the steps in BF16",
    "nvfp4-ends-late": "the first and last block in BF16, and all blocks in the last fifth of the steps",
    "nvfp4-four-six": "scale_rule=four_six for x and w",
    "nvfp4-four-six-ends": "the same with the first and last block in BF16",
    "fp8_delayed-1024": "scales of the largest amax of 1,024 steps, TransformerEngine's default, in place of 16",
    "nvfp4-bf16-output": "the product of the forward pass in BF16",
    "nvfp4-bf16-dgrad": "grad_input in BF16",
    "nvfp4-bf16-wgrad": "grad_weight in BF16",
    AGAIN: "BF16 a second time; some sums have no order on a GPU",
    TF32: "without autocast",
}
#: Heads and the largest learning rate by LAYERSxWIDTH.
MODELS = {"12x768": (12, 6e-4), "24x1024": (16, 4e-4), "2x64": (2, 2e-3)}
#: How far a recipe's held-out loss may be from BF16's, unless the difference is within ERRORS standard errors.
GAPS = {name: 0.01 for name in ("nvfp4", *VARIANTS) if name.startswith("nvfp4")}
GAP, ERRORS = 0.0025, 2
#: How many times as fast as BF16 a step is to be.
GOAL = 1.2
#: Held-out losses on the way: how many, and on how many batches. The last one is on more: all held-out text at 16 x 512.
POINTS, BATCHES, LAST_BATCHES = 25, 8, 64
#: The share of steps in which the learning rate rises, and the share of it that is left at the end.
RISE, LEFT = 0.1, 0.1
#: Steps of one sample of time, and steps before the first.
SAMPLE, WARM_UP = 8, 3


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    rate: float
    context: int
    batch: int

    @classmethod
    def of(cls, model: str, context: int, batch: int) -> Size:
        layers, width = map(int, model.split("x"))
        return cls(layers, width, *MODELS[model], context, batch)


class Training:
    """A model in training. `step` reads `tokens` (batch, context + 1) and `rate`, and writes nothing to the host."""

    def __init__(self, gpt: Any, size: Size, characters: int, recipe: str, seed: int, device: str, compiled: bool) -> None:
        torch.manual_seed(seed)
        self.model = gpt.GPT(characters, size.layers, size.width, size.heads, size.context).to(device)
        self.converted = 0
        self.autocast = recipe != TF32
        torch.set_float32_matmul_precision("high" if recipe == TF32 else "highest")
        if recipe in RECIPES:
            how = VARIANTS.get(recipe) or Variant(TrainingRecipe.of(recipe))
            ends = [f"blocks.{n}.*" for n in (0, size.layers - 1)] if how.ends else []
            self.converted = len(breccia_torch.convert_to_training_(self.model, how.recipe, exclude=ends, min_size=0).chosen)
        if compiled:
            for block in self.model.blocks:
                block.compile(fullgraph=True)  # one compilation serves all blocks
        gpu = device == "cuda"
        self.rate = torch.tensor(size.rate, device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=gpu
        )
        self.tokens = torch.zeros(size.batch, size.context + 1, dtype=torch.long, device=device)
        self.device = device

    def loss(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            logits = self.model(self.tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def captured(self) -> Callable[[], Tensor]:
        """`step` in a CUDA graph. Capturing makes steps with `tokens`, which change histories alone."""
        loss = torch.zeros((), device=self.device)
        self.rate.zero_()
        replay = graph_of(lambda: loss.copy_(self.step()))
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

        def step() -> Tensor:
            replay()
            return loss.clone()

        return step

    @torch.no_grad()
    def held_out(self, windows: Tensor, batches: int) -> float:
        """The mean loss on the first whole batches of windows (count, context + 1)."""
        self.model.eval()
        losses: list[Tensor] = []
        batch = len(self.tokens)
        for n in range(min(batches, len(windows) // batch)):
            self.tokens.copy_(windows[n * batch :][:batch])
            losses.append(self.loss())
        self.model.train()
        return torch.stack(losses).mean().item()


def rate_at(step: int, steps: int) -> float:
    """The learning rate as a share of the largest: it rises in a straight line, and falls as a cosine."""
    rise = max(1, int(RISE * steps))
    if step < rise:
        return (step + 1) / rise
    return LEFT + (1 - LEFT) * 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def windows_of(text: Tensor, context: int) -> Tensor:
    """Windows of context + 1 characters, of which each begins with the last character of the one before."""
    return text.unfold(0, context + 1, context)


def trained(make: Callable[..., Training], data: Tensor, recipe: str, seed: int, steps: int, graph: bool) -> dict[str, Any]:
    """Train on the last nine tenths of the text, and measure the loss on the first. graph: replay a CUDA graph of a step."""
    run = make(recipe=recipe, seed=seed)
    batch, window = run.tokens.shape
    held_out = len(data) // 10
    source, windows = data[held_out:], windows_of(data[:held_out], window - 1)
    starts = torch.randint(len(source) - window, (steps, batch), generator=torch.Generator().manual_seed(seed))
    starts = starts.to(run.device)
    along = torch.arange(window, device=run.device)
    largest = run.rate.item()
    losses: list[Tensor] = []
    curve: list[tuple[int, float]] = []
    begun = time.perf_counter()
    run.tokens.copy_(source[starts[0, :, None] + along])
    step = run.captured() if graph else run.step
    late = round(VARIANTS[recipe].late * steps) if recipe in VARIANTS else 0
    for n in range(steps):
        if late and n == steps - late:
            breccia_torch.convert_from_training_(run.model)
            step = run.step
        run.tokens.copy_(source[starts[n, :, None] + along])
        run.rate.fill_(largest * rate_at(n, steps))
        losses.append(step())
        if (n + 1) % max(1, steps // POINTS) == 0 or n + 1 == steps:
            curve.append((n + 1, run.held_out(windows, BATCHES)))
    training = torch.stack(losses).tolist()
    tenths = [statistics.mean(training[i : i + 10]) for i in range(0, steps, 10)]
    return {
        "held_out": run.held_out(windows, LAST_BATCHES),
        "curve": curve,
        "training": tenths,
        "converted": run.converted,
        "graph": graph,
        "wall_s": time.perf_counter() - begun,
    }


def timed(make: Callable[..., Training], data: Tensor, recipes: list[str], samples: int, device: str) -> list[dict[str, Any]]:
    """The seconds of a step under each recipe, compiled and in a CUDA graph, all interleaved; and the bytes that it takes."""
    arms, graphs, peaks = Arms(device), dict[str, str](), dict[str, int]()

    def made(recipe: str) -> Call:
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        run = make(recipe=recipe, seed=0)
        run.tokens.copy_(data[: run.tokens.numel()].view_as(run.tokens))
        for _ in range(WARM_UP):
            run.step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run.step()
            peaks[recipe] = torch.cuda.max_memory_allocated() - before
        return run.step

    def timer(call: Call, device: str) -> Timer:
        return Timer(call, device, calls=SAMPLE)

    makers: dict[str, Make] = {recipe: partial(made, recipe) for recipe in recipes}
    arms.add(makers, timer)
    if device == "cuda":
        for recipe, call in arms.calls.items():
            try:
                arms.timers["graph", recipe] = timer(graph_of(call), device)
            except Exception as e:  # of any kind: the other recipes are measured all the same
                graphs[recipe] = message(e)
    sampled(arms.timers.values(), samples)
    found = arms.times(every=False)
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        row: dict[str, Any] = {"recipe": recipe, "peak_bytes": peaks.get(recipe)}
        row |= {measure: of[recipe] for measure, of in found.items() if recipe in of}
        rows.append(row | ({"graph_error": graphs[recipe]} if recipe in graphs else {}))
    return rows


# ------------------------------------------------------------------------------------------------ tables


class Runs(NamedTuple):
    """Runs of all seeds."""

    model: str
    steps: int
    recipe: str


def runs_of(row: dict[str, Any]) -> Runs:
    """What a row of losses is one of."""
    return Runs(row["model"], row["steps"], row["recipe"])


def losses_of(result: Result, runs: Runs) -> dict[int, dict[str, Any]]:
    """The rows by seed."""
    return {row["seed"]: row for row in result["rows"] if row["kind"] == "losses" and runs_of(row) == runs}


def beside_bf16(result: Result, runs: Runs) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, BF16's) of each seed that both have."""
    exact, rows = losses_of(result, runs._replace(recipe=BF16)), losses_of(result, runs)
    return [(rows[seed], exact[seed]) for seed in sorted(rows) if seed in exact]


def times_of(result: Result, model: str, recipe: str) -> dict[str, Any]:
    """The row of its times; empty where they were not measured."""
    rows = (row for row in result["rows"] if row["kind"] == "times" and (row["model"], row["recipe"]) == (model, recipe))
    return next(rows, {})


def step_of(result: Result, model: str, recipe: str, measure: str) -> float | None:
    """The seconds of a step."""
    times = times_of(result, model, recipe)
    return times[measure]["median_s"] if measure in times else None


#: Losses of a row: on all held-out text at the end, the lowest on the way, and on the last 100 batches of training.
LOSSES: dict[str, Callable[[dict[str, Any]], float]] = {
    "held-out": lambda row: row["held_out"],
    "lowest": lambda row: min(loss for _, loss in row["curve"]),
    "training": lambda row: statistics.mean(row["training"][-10:]),
}


def gaps(result: Result, runs: Runs, what: str = "held-out") -> list[float]:
    """How much higher than BF16's a loss of each seed is, as a share of it. what: of `LOSSES`."""
    return [LOSSES[what](row) / LOSSES[what](exact) - 1 for row, exact in beside_bf16(result, runs)]


def error(values: list[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def reached(curve: list[tuple[int, float]], loss: float) -> float | None:
    """The step at which a curve falls to a loss, between its points in straight lines; None if it does not."""
    before: tuple[int, float] | None = None
    for step, now in curve:
        if now <= loss:
            return step if before is None else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
        before = step, now
    return None


def steps_to_bf16(result: Result, runs: Runs) -> list[float | None]:
    """By seed, the steps to the last point of BF16's curve."""
    return [reached(row["curve"], exact["curve"][-1][1]) for row, exact in beside_bf16(result, runs)]


def place_of(recipe: str) -> int:
    """The place of a recipe in tables, controls last."""
    order = [BF16, *RECIPES, AGAIN, TF32]
    return order.index(recipe) if recipe in order else len(order)


def all_runs(result: Result) -> list[Runs]:
    """Of all losses, by model and number of steps."""
    every = {runs_of(row) for row in result["rows"] if row["kind"] == "losses"}
    return sorted(every, key=lambda runs: (runs.model, runs.steps, place_of(runs.recipe)))


def all_times(result: Result) -> list[tuple[str, str]]:
    """(model, recipe) of all times."""
    every = {(row["model"], row["recipe"]) for row in result["rows"] if row["kind"] == "times"}
    return sorted(every, key=lambda of: (of[0], place_of(of[1])))


def held_to(recipe: str) -> float:
    return GAPS.get(recipe, GAP)


def within(apart: list[float], recipe: str) -> bool:
    mean = statistics.mean(apart)
    return mean <= held_to(recipe) or mean <= ERRORS * error(apart)


def losses(result: Result) -> Table:
    def gap(runs: Runs) -> str:
        apart = [100 * each for each in gaps(result, runs)]
        if runs.recipe == BF16 or not apart:
            return ABSENT
        return f"{statistics.mean(apart):+.3f} ± {three(error(apart))} ({', '.join(f'{each:+.3f}' for each in apart)})"

    def others(runs: Runs) -> str:
        if runs.recipe == BF16 or not gaps(result, runs):
            return ABSENT
        return "; ".join(f"{100 * statistics.mean(gaps(result, runs, what)):+.2f}" for what in ("lowest", "training"))

    def verdict(runs: Runs) -> str:
        apart = gaps(result, runs)
        if runs.recipe not in RECIPES or not apart:
            return ABSENT
        return f"{100 * held_to(runs.recipe):g}: {'yes' if within(apart, runs.recipe) else '**no**'}"

    def until(runs: Runs, measure: str | None) -> str:
        each = 1.0 if measure is None else step_of(result, runs.model, runs.recipe, measure)
        steps = steps_to_bf16(result, runs)
        found = [n for n in steps if n is not None]
        if not found or each is None:
            return ABSENT
        missed = f", {len(steps) - len(found)} of {len(steps)} never" if len(found) < len(steps) else ""
        return f"{three(each * statistics.mean(found))}{missed}"

    columns: dict[str, Any] = {
        "layers × width": lambda runs: runs.model.replace("x", "×"),
        "steps": lambda runs: f"{runs.steps:,}",
        "recipe": lambda runs: runs.recipe,
        "seeds": lambda runs: len(losses_of(result, runs)),
        "held-out loss": lambda runs: f"{statistics.mean(row['held_out'] for row in losses_of(result, runs).values()):.4f}",
        "minus BF16, % ± standard error (by seed)": gap,
        "held to, %": verdict,
        "lowest; training, minus BF16, %": others,
        "steps to BF16's last loss": lambda runs: until(runs, None),
        "seconds, compiled": lambda runs: until(runs, "time"),
        "seconds, in a CUDA graph": lambda runs: until(runs, "graph"),
    }
    options = result["options"]
    note = (
        f"{options['text']}, as characters, {options['batch']} × {options['context']} in a step. "
        "Runs of a seed have the same first weights and batches; all linear layers of the blocks are converted. "
        "Held-out losses are of the first tenth of the text. A loss above BF16's is held to the limit, or to "
        f"{ERRORS} standard errors of the mean of the pairs. Lowest: of the held-out losses on the way. Training: of the last "
        "100 batches. Seconds are steps times the time of a step in the next table; "
        f"losses on the way are those of {BATCHES} batches."
    )
    shown = all_runs(result)
    recipes = {runs.recipe for runs in shown}
    note = " ".join([note, *(f"{recipe}: {what}." for recipe, what in ABOUT.items() if recipe in recipes)])
    return table("losses of GPTs in training", columns, shown, note)


def times(result: Result) -> Table:
    def seconds(of: tuple[str, str], measure: str) -> str:
        found = step_of(result, *of, measure)
        return ABSENT if found is None else three(1e3 * found)

    def against(of: tuple[str, str], measure: str) -> str:
        mine, exact = step_of(result, *of, measure), step_of(result, of[0], BF16, measure)
        return ABSENT if mine is None or exact is None else over(exact, mine)

    def peak(of: tuple[str, str]) -> str:
        nbytes = times_of(result, *of).get("peak_bytes")
        return three(nbytes / 1e9) if nbytes else ABSENT

    columns: dict[str, Any] = {
        "layers × width": lambda of: of[0].replace("x", "×"),
        "recipe": lambda of: of[1],
        "compiled, ms": lambda of: seconds(of, "time"),
        "× BF16": lambda of: against(of, "time"),
        "in a CUDA graph, ms": lambda of: seconds(of, "graph"),
        "× BF16, both in graphs": lambda of: against(of, "graph"),
        "peak, GB": peak,
    }
    options, errors = result["options"], dict[str, None]()
    for row in result["rows"]:
        if row["kind"] == "times" and (why := row.get("errors") or row.get("graph_error")):
            errors[f"{row['recipe']}: {why}"] = None
    note = (
        f"Forward, backward, clipping and AdamW on {options['batch']} × {options['context']} characters; parameters in FP32, "
        f"the rest under BF16 autocast; medians, interleaved. Blocks are compiled. Above 1 is faster (goal {GOAL:g}). "
        "Peak: all memory of the compiled model, its optimizer and a step."
    )
    return table("steps of GPTs in training", columns, all_times(result), " ".join([note, *errors]))


def curves(tag: str, result: Result, _: Any) -> Plot:
    """Held-out losses, means of the seeds, against steps and against seconds, of the first model and number of steps."""
    every = all_runs(result)
    lines: dict[str, Any] = {}
    for runs in (each for each in every if each[:2] == every[0][:2] and each.recipe in (BF16, *PRESETS)):
        of_seeds = [row["curve"] for row in losses_of(result, runs).values()]
        steps = [step for step, _ in of_seeds[0]]
        means = [statistics.mean(points) for points in zip(*([loss for _, loss in curve] for curve in of_seeds), strict=True)]
        each = step_of(result, runs.model, runs.recipe, "graph") or step_of(result, runs.model, runs.recipe, "time")
        lines[runs.recipe] = {"steps": steps, "losses": means, "seconds": each}
    return Plot(f"gpt-{tag}.svg", "Held-out loss of a GPT in training", lines, drawn)


def drawn(lines: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    others = ("#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#8B4513", "#7B3F9E")
    colours = dict(zip(lines, (GREY, BLUE, ORANGE, *others), strict=False))
    for recipe, line in lines.items():
        left.plot(line["steps"], line["losses"], label=recipe, linewidth=1.2, color=colours[recipe])
        if line["seconds"] is not None:
            seconds = [line["seconds"] * step for step in line["steps"]]
            right.plot(seconds, line["losses"], linewidth=1.2, color=colours[recipe])
    left.set(xlabel="step", ylabel="held-out loss")
    right.set(xlabel="seconds of training")
    left.legend(frameon=False, labelcolor=GREY)
    for axes in (left, right):
        axes.grid(alpha=0.3, color=GREY)
    return figure


BENCHMARK = Benchmark(
    "gpu-gpt",
    {"gpu-gpt": losses, "gpu-gpt-times": times},
    key=("kind", "model", "recipe", "seed", "steps"),
    plots={"gpu-gpt-plot": curves},
)


@command
def gpt(
    models: Annotated[list[str] | None, typer.Option(help="LAYERSxWIDTH; repeatable. Default: 12x768 and 24x1024.")] = None,
    recipes: Annotated[list[str] | None, typer.Option(help="Presets of TrainingRecipe; repeatable. Default: all.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Runs by patterns, '12x768/*/0', '*/times'; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe: seeds 0, 1, ...")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Windows of text of a step.")] = 16,
    context: Annotated[int, typer.Option(min=2, help="Characters of a window.")] = 512,
    samples: Annotated[int, typer.Option(min=1, help=f"Samples of times, each of {SAMPLE} steps.")] = 7,
    seconds: Seconds = 1e9,
    resume: Annotated[Path | None, typer.Option(help="An earlier result: its rows are kept, and not run again.")] = None,
    compiled: Annotated[bool, typer.Option(help="Compile the blocks of the model.")] = True,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Train GPTs under each recipe and in BF16: held-out losses in pairs of a seed, and times of a step."""
    until = time.monotonic() + seconds
    check_device(device)
    chosen = [BF16, *known(recipes, PRESETS, "--recipes")]
    controls = [*VARIANTS, AGAIN, TF32] if recipes is None else []
    torch._dynamo.config.recompile_limit = 64  # one graph for each recipe
    example_ = example()
    source, letters = example_.text()
    data, characters = example_.encoded(letters)
    data = data.to(device)
    options = {"text": source, "batch": batch, "context": context, "compiled": compiled, "device": device}
    earlier = read(resume) if resume is not None and resume.exists() else None
    earlier_runs = {name_of(row) for row in earlier["rows"] if row.get("steps") in (None, steps)} if earlier else set[str]()
    run, rows, left = where(device), list[dict[str, Any]](), 0

    def made() -> Result:
        result = BENCHMARK.result(rows, options, run, left=left)
        return result if earlier is None else joined([earlier, result], BENCHMARK.key)

    for model in known(models or list(MODELS)[:2], MODELS, "--models"):
        size = Size.of(model, context, batch)
        make = partial(Training, example_, size, characters, device=device, compiled=compiled)
        names = [f"{model}/times", *(f"{model}/{recipe}/{seed}" for recipe in [*chosen, *controls] for seed in range(seeds))]
        for name in names:
            if name in earlier_runs or not any(fnmatchcase(name, pattern) for pattern in only or ["*"]):
                continue
            if time.monotonic() > until:
                left += 1
                continue
            _, recipe, seed = [*name.split("/"), "0"][:3]
            begun = time.monotonic()
            if recipe == "times":
                rows += [{"kind": "times", "model": model} | row for row in timed(make, data, chosen, samples, device)]
            else:
                row = trained(make, data, recipe, int(seed), steps, graph=device == "cuda")
                rows.append({"kind": "losses", "model": model, "recipe": recipe, "seed": int(seed), "steps": steps} | row)
            print(name, f"{time.monotonic() - begun:.0f} s", rows[-1].get("held_out", ""), file=sys.stderr, flush=True)
            yield made()
    if not rows:
        refuse(
            "no run fits into --seconds; give more."
            if left
            else "nothing to run: --only matches no run, or --resume has them all."
        )
    yield made()


def name_of(row: dict[str, Any]) -> str:
    """The name of the run that a row comes from."""
    return f"{row['model']}/times" if row["kind"] == "times" else f"{row['model']}/{row['recipe']}/{row['seed']}"
