"""On a CUDA device: a step of a linear layer in training, forward and backward, under each `breccia.TrainingRecipe`.

Rivals are BF16, torchao's float8 layers under torch.compile, and TransformerEngine's. Every arm casts its weight in each step.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from harness import Benchmark, Device, Result, command, known, listed, sizes
from harness.device import Arms, Call, Make, Timer, check_device, load, message, sampled, where
from harness.tables import ABSENT, GOAL, Table, failures, judged, over, table, three

import breccia
import breccia_torch

SHAPES = ("4096x8192x8192", "8192x4096x14336", "8192x4096x4096")
PRESETS = ("fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "fp8_tile", "mxfp8", "nvfp4")
#: As TransformerEngine multiplies by default: the sums of the forward GEMM stay in tensor cores.
FAST = {
    f"{preset}, fast output": breccia.TrainingRecipe(preset, fast_accumulation=("output",))
    for preset in ("fp8_current", "fp8_delayed")
}
BF16, AO = "BF16", "torchao tensorwise, compiled"
#: The recipes of TransformerEngine by the names of ours.
TE = {"fp8_delayed": "DelayedScaling", "fp8_current": "Float8CurrentScaling", "fp8_block": "Float8BlockScaling"}
#: What a preset of ours is compared with where TransformerEngine has no recipe of its name.
NEAREST = {"fp8_tile": "fp8_block", **{name: name.partition(",")[0] for name in FAST}}
#: No preset in FP8 may be slower than this, as a multiple of BF16's speed, at any shape.
NEVER_BELOW = 0.97
#: The goals of a preset: times as fast as BF16, and as TransformerEngine's layer of its kind.
GOALS = {"fp8_tile": (1.50, 1.18), "fp8_current": (1.50, 1.03), "fp8_delayed": (None, 1.02), "fp8_block": (None, 1.03)}
GOALS |= {name: GOALS[NEAREST[name]] for name in FAST}


def of_te(preset: str) -> str:
    return f"TransformerEngine {preset}"


def step(layer: Any, x: Any, dy: Any, weight: Any) -> Call:
    """Forward and backward of a layer whose weight an optimizer has just changed."""

    def call() -> Any:
        torch._C._autograd._unsafe_set_version_counter((weight,), (weight._version + 1,))
        x.grad = weight.grad = None
        y = layer(x)
        y.backward(dy)
        return y

    return call


def plain(k: int, n: int, device: str) -> Any:
    generator = torch.Generator(device).manual_seed(0)
    layer = torch.nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.normal_(0, k**-0.5, generator=generator)
    return layer


def ours(preset: str, layer: Any) -> Any:
    return breccia_torch.nn.TrainingLinear.from_linear(layer, FAST.get(preset) or breccia.TrainingRecipe(preset), seed=0)


def torchao(layer: Any) -> Any:
    float8: Any = importlib.import_module("torchao.float8")
    model = torch.nn.Sequential(layer)
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name("tensorwise"))
    return torch.compile(model), model[0].weight


def transformer_engine(recipe: str, k: int, n: int, layer: Any) -> Any:
    te: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    of = getattr(recipes, recipe)()
    theirs = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        theirs.weight.copy_(layer.weight)

    def call(x: Any) -> Any:
        with te.autocast(enabled=True, recipe=of):
            return theirs(x)

    return call, theirs.weight


def in_one_thread(call: Call) -> Call:
    """The call, its backward pass in the thread of its forward pass. torch runs it in a thread of its own for each device."""

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            call()

    return step


def graph_of(call: Call) -> Call:
    """The replay of a step in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_of(make: Callable[[], tuple[Call, Any]], x: Any, memory: Any = torch.cuda) -> int:
    """The bytes that a step of a new layer takes at most beside x, dy and the weight.

    make: returns the step and the weight. What the layer keeps from step to step counts; gradients of the step before do not,
    since they are freed before the measured step begins. memory: torch.cuda, or what counts in its place.
    """
    x.grad = None
    gc.collect()
    before = memory.memory_allocated()
    call, weight = make()
    for _ in range(2):  # of what compilers and layers keep
        call()
    x.grad = weight.grad = None
    memory.synchronize()
    memory.reset_peak_memory_stats()
    call()
    memory.synchronize()
    x.grad = weight.grad = None
    return memory.max_memory_allocated() - before - weight.nbytes


def measured(shape: tuple[int, int, int], arms: list[str], device: str, samples: int) -> Iterator[dict[str, Any]]:
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(m, k, device=device, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(m, n, device=device, generator=generator).bfloat16()

    def made(arm: str) -> tuple[Call, Any]:
        """The step of an arm, and its weight."""
        layer = plain(k, n, device)
        weight = layer.weight
        if arm == AO:
            layer, weight = torchao(layer)
        elif arm in map(of_te, TE):
            layer, weight = transformer_engine(TE[arm.rpartition(" ")[2]], k, n, layer)
        elif arm != BF16:
            layer = ours(arm, layer)
        one = step(layer, x, dy, weight)
        if getattr(layer, "state", None) is None:
            return one, weight

        def whole() -> None:
            one()
            breccia_torch.end_of_step(layer)

        return whole, weight

    runs = Arms(device)
    makers: dict[str, Make] = {arm: lambda arm=arm: made(arm)[0] for arm in arms}
    runs.add(makers)
    peaks: dict[str, int] = {}
    graphs: dict[str, str] = {}
    captured: list[Call] = []  # a CUDA graph keeps addresses, not tensors
    for arm, call in runs.calls.items():
        runs.timers["one_thread", arm] = Timer(in_one_thread(call), device)
        if device == "cuda":
            peaks[arm] = peak_of(partial(made, arm), x)
            if not arm.startswith("TransformerEngine"):
                try:  # of another layer: of a weight that a graph has had, calls keep no casts
                    captured.append(made(arm)[0])
                    runs.timers["graph", arm] = Timer(graph_of(captured[-1]), device)
                except Exception as e:
                    graphs[arm] = message(e)
    for timer in runs.timers.values():
        timer.fit()
    clock = load(device)
    sampled(runs.timers.values(), samples)
    fields = runs.times(every=False)
    for arm in arms:
        row = {"arm": arm, "shape": shape, "clock_mhz": clock, "peak_beside_bytes": peaks.get(arm)}
        row |= {measure: of[arm] for measure, of in fields.items() if arm in of}
        yield row | ({"graph_error": graphs[arm]} if arm in graphs else {})


def times(result: Result) -> Table:
    rows = [row for row in result["rows"] if "time" in row]
    by = {(tuple(row["shape"]), row["arm"]): row for row in rows}

    def against(row: Any, arm: str, measure: str = "time") -> str:
        other = by.get((tuple(row["shape"]), arm), {})
        return over(other[measure]["median_s"], row[measure]["median_s"]) if measure in other and measure in row else ABSENT

    def rival(row: Any) -> str:
        return of_te(NEAREST.get(row["arm"], row["arm"]))

    columns: dict[str, Any] = {
        "rows × in × out": lambda row: "×".join(map(str, row["shape"])),
        "layer": "arm",
        "eager, µs": lambda row: three(1e6 * row["time"]["median_s"]),
        "× BF16": lambda row: against(row, BF16),
        "× TransformerEngine": lambda row: against(row, rival(row)),
        "in one thread, µs": lambda row: three(1e6 * row["one_thread"]["median_s"]) if "one_thread" in row else ABSENT,
        "× BF16, both so": lambda row: against(row, BF16, "one_thread"),
        "× TransformerEngine, both so": lambda row: against(row, rival(row), "one_thread"),
        "in a CUDA graph, µs": lambda row: three(1e6 * row["graph"]["median_s"]) if "graph" in row else ABSENT,
        "× BF16, both in graphs": lambda row: against(row, BF16, "graph"),
        "peak, MB": lambda row: f"{peak / 1e6:,.0f}" if (peak := row.get("peak_beside_bytes")) else ABSENT,
    }
    note = (
        f"Forward and backward of a layer without bias, BF16 parameters; medians of {result['options']['samples']} samples, "
        "interleaved. Names of recipes are ours. Above 1 is faster. In one thread: under "
        "`torch.autograd.set_multithreading_enabled(False)` the backward pass runs in the thread of the forward pass, so that "
        "the host changes threads in no step; in a model of many layers it changes twice in a step. Peak: what a step takes at "
        "most beside x, dy and the weight; what a layer keeps from step to step counts. "
        f"Rivals: {listed(result['rivals']) or 'none'}."
    )
    errors = ((row["arm"], row["errors"], "×".join(map(str, row["shape"]))) for row in result["rows"] if "errors" in row)
    return table("steps of a layer in training", columns, rows, note + failures(errors))


def goals(result: Result) -> Table:
    by = {(row["arm"], "×".join(map(str, row["shape"]))): row for row in result["rows"]}
    shapes = list(dict.fromkeys(shape for _, shape in by))

    def speed(preset: str, rival: str, shape: str, measure: str) -> float | None:
        mine, other = (by.get((arm, shape), {}).get(measure) for arm in (preset, rival))
        return other["median_s"] / mine["median_s"] if mine and other else None

    def memory(preset: str, shape: str) -> float | None:
        mine, other = (by.get((arm, shape), {}).get("peak_beside_bytes") for arm in (preset, BF16))
        return mine / other if mine and other else None

    fp8 = [(f"{preset} {shape}", preset, shape) for preset in (*PRESETS, *FAST) if preset.startswith("fp8") for shape in shapes]
    lines: list[tuple[str, ...]] = []
    for measure, how in (("time", ""), ("one_thread", ", in one thread")):
        for preset, (bf16, te) in GOALS.items():
            rivals = ((BF16, "BF16", bf16), (of_te(NEAREST.get(preset, preset)), "TransformerEngine", te), (AO, "torchao", 1.0))
            for rival, name, goal in rivals:
                if goal is not None:
                    every = {shape: speed(preset, rival, shape, measure) for shape in shapes}
                    lines.append(judged(preset + how, f"≥ {goal:.2f} × {name}", every, goal))
        slow = {name: speed(preset, BF16, shape, measure) for name, preset, shape in fp8}
        lines.append(judged(f"every FP8 recipe{how}", f"≥ {NEVER_BELOW} × BF16, everywhere", slow, NEVER_BELOW))
    large = {name: memory(preset, shape) for name, preset, shape in fp8}
    lines.append(judged("peak memory of every FP8 recipe", "≤ 1.00 × BF16's", large, 1.0, at_most=True))
    return Table("goals of layers in training", GOAL, tuple(lines), "Of the table of steps, eager calls.")


BENCHMARK = Benchmark("gpu-training", {"gpu-training": times, "gpu-training-goals": goals}, key=("arm", "shape"))


def versions(names: dict[str, str]) -> dict[str, str]:
    """The versions of the libraries that are there."""
    found: dict[str, str] = {}
    for name, module in names.items():
        try:
            found[name] = str(importlib.import_module(module).__version__)
        except Exception:  # a library may be broken in any way where it was built for another device
            continue
    return found


@command
def training(
    shapes: Annotated[list[str] | None, typer.Option(help="ROWSxINxOUT; repeatable.")] = None,
    presets: Annotated[list[str] | None, typer.Option(help="Presets of TrainingRecipe; repeatable. Default: all.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each step, interleaved.")] = 15,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Time steps of a linear layer in training against BF16, torchao and TransformerEngine."""
    chosen, lengths = known(presets, PRESETS, "--presets"), [sizes(shape, 3) for shape in shapes or SHAPES]
    check_device(device)
    rivals = versions({"torchao": "torchao", "TransformerEngine": "transformer_engine"} if device == "cuda" else {})
    fast = [name for name in FAST if NEAREST[name] in chosen and device == "cuda"]
    arms = [BF16, *chosen, *fast, *([AO] if "torchao" in rivals else [])]
    arms += [of_te(preset) for preset in TE] if "TransformerEngine" in rivals else []
    options = {"device": device, "samples": samples, "shapes": lengths}
    run, rows = where(device), list[dict[str, Any]]()
    for shape in lengths:
        rows += measured(shape, arms, device, samples)
        torch._dynamo.reset()
        yield BENCHMARK.result(rows, options, run, rivals=rivals)
