"""Tokens per second and memory of a decoder, quantized and not: of 1.1 billion parameters on CUDA, of 0.2 on a CPU.

    python benchmarks/bench_decoder.py [--device cpu] [--how generate] [--recipes int4] [--batch 1 --batch 16] [--out RESULTS]

On a CPU, and with `--how generate` or `generate-compiled`, transformers' Llama with random weights decodes greedily after a
prompt of 32 tokens. Otherwise the decoder is plain PyTorch with a static cache (decoder_model.py): a step is a CUDA graph, of
eager operations (`--how graph`) or compiled layers, and separate graphs of its products and its attention measure its parts.
Samples of the models are interleaved.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from harness import Benchmark, Result, Seconds, known, program, summary
from harness.device import Timer, check_device, graph_of, message, sampled, where
from harness.tables import ABSENT, GOAL, Table, judged, median, over, ratio, table, three

BF16, FP32 = "bf16", "fp32"
#: How a decoder on CUDA runs: under a CUDA graph, eager or compiled, or through `generate`.
GRAPH, COMPILED, GENERATE, GENERATE_COMPILED = HOW = ("graph", "compiled", "generate", "generate-compiled")
#: Layers, width, heads, heads of keys and values, hidden width, vocabulary. wide: layers of Llama 3 8B; narrow: TinyLlama-1.1B.
MODELS = {"wide": (4, 4096, 32, 8, 14336, 32000), "narrow": (22, 2048, 32, 4, 5632, 32000)}
#: Their names in transformers.
CONFIG = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
#: The same of the decoder on a CPU, and of one to try the script.
SMALL, TINY = (12, 1024, 16, 4, 2816, 32000), (2, 256, 4, 2, 512, 256)
PROMPT = 32


def speeds(what: str, how: str, way: str | None = None) -> Callable[[Result], Table]:
    """Tokens per second of decoders, by recipe. how: a description of the run. way: the `how` of the rows to show."""

    def made(result: Result) -> Table:
        shown = [row for row in result["rows"] if row.get("how") == way]
        if not shown:
            return Table(what, ("weights",), (), "*This result has no such runs.*")
        by = {(row.get("model", ""), row["recipe"], row["batch"]): row for row in shown}
        models, names = dict.fromkeys(model for model, _, _ in by), dict.fromkeys(name for _, name, _ in by)
        base, prompts = next(iter(names)), "prompt" in shown[0]["time"]

        def cell(model: str, name: str, batch: int) -> str:
            row, first = by.get((model, name, batch)), by.get((model, base, batch))
            if row is None or first is None:
                return ABSENT
            speed = row["tokens_per_second"]
            found = f"{three(speed)}; {ratio(speed / first['tokens_per_second'])}"
            return f"{found}; {over(median(first, 'prompt'), median(row, 'prompt'))}" if prompts else found

        def size(model: str, name: str) -> str:
            row = next((row for key, row in by.items() if key[:2] == (model, name)), None)
            return f"{row['weight_bytes'] / 1e6:,.0f}; {row['model_bytes'] / 1e6:,.0f}" if row else ABSENT

        columns: dict[str, Any] = {"weights": lambda name: name}
        for model in models:
            prefix = f"{model}: " if model else ""
            columns[f"{prefix}MB"] = lambda name, model=model: size(model, name)
            for batch in sorted({batch for *_, batch in by}):
                columns[f"{prefix}batch {batch}"] = lambda name, model=model, batch=batch: cell(model, name, batch)
        first = {model: next(row for row in shown if row.get("model", "") == model) for model in models}
        million = [f"{model}: " * bool(model) + f"{row['parameters'] / 1e6:,.0f}" for model, row in first.items()]
        note = (
            f"Decoders with random weights, {how}; million parameters: {', '.join(million)}. MB of linear layers; of the model."
            f" Tokens per second{' after the prompt' if prompts else ''}; times faster than {base}"
            f"{f'; the same for the prompt of {PROMPT} tokens' if prompts else ''}."
        )
        return table(what, columns, names, note)

    return made


def steps(result: Result) -> Table:
    rows = [row for row in result["rows"] if median(row, "products")]
    bases = {(row["how"], row["model"], row["batch"]): median(row, "step") for row in rows if row["recipe"] == BF16}
    ways = {GRAPH: "eager, a CUDA graph", COMPILED: "compiled, a CUDA graph"}

    def us(of: Callable[[Any], float | None]) -> Callable[[Any], str]:
        return lambda row: ABSENT if of(row) is None else f"{of(row) * 1e6:,.0f}"

    def rest(row: Any) -> float:
        return median(row, "step") - median(row, "products") - (median(row, "attention") or 0)

    def base(row: Any) -> float | None:
        return bases.get((row["how"], row["model"], row["batch"]))

    columns = {
        "weights": "recipe",
        "how": lambda row: ways[row["how"]],
        "model, batch": lambda row: f"{row['model']}, {row['batch']}",
        **{part: us(lambda row, part=part: median(row, part)) for part in ("step", "products", "attention")},
        "rest": us(rest),
        "TB/s": lambda row: f"{row['weight_bytes'] / median(row, 'products') / 1e12:.2f}",
        "× BF16": lambda row: over(base(row), median(row, "step")),
        "at most": lambda row: over(base(row), median(row, "step") - median(row, "products")),
    }
    note = (
        "Microseconds of a step, of its products by weights, of its attention without projections, and of the rest. Products "
        "and attention are measured in CUDA graphs of their own; the attention of a compiled step is part of the rest. TB/s: "
        "bytes of weights over the time of products. × BF16: speed relative to the BF16 step. At most: the same if products "
        "took no time."
    )
    return table("what a step consists of", columns, rows, note if rows else "*This result has no parts of steps.*")


#: Recipes with goals; work, models, quantity, and the least part of BF16's that it must reach, or for bytes the most.
GOAL_RECIPES = ("int4", "nvfp4")
GOALS: tuple[tuple[str, tuple[str, ...], str, float], ...] = (
    *((f"tokens per second, INT4 and NVFP4, {model}", (model,), "tokens_per_second", 2.2) for model in MODELS),
    ("bytes of weights, INT4 and NVFP4", tuple(MODELS), "weight_bytes", 0.32),
)


def goals(result: Result) -> Table:
    by = {(row["how"], row["model"], row["batch"], row["recipe"]): row for row in result["rows"]}
    lines: list[tuple[str, ...]] = []
    for work, models, quantity, bound in GOALS:
        at_most = quantity == "weight_bytes"
        found = {
            f"{recipe}, {way}, {model}, batch {batch}": base and row[quantity] / base[quantity]
            for (way, model, batch, recipe), row in by.items()
            if recipe in GOAL_RECIPES and model in models
            for base in [by.get((way, model, batch, BF16))]
        }
        lines.append(judged(work, f"{'≤' if at_most else '≥'} {bound:.2f} × BF16", found, bound, at_most))
    note = "The smallest and the largest value among all batches, eager and compiled."
    return Table("goals of decoders", GOAL, tuple(lines), note)


KEY = ("how", "model", "recipe", "batch")
_STATIC = "through `generate` with a static cache, in "
ON_CPU = Benchmark("decoder-cpu", {"decoder-cpu": speeds("a decoder on the CPU", "under Hugging Face's `generate`")})
BY_STEPS = Benchmark(
    "gpu-decoder",
    {
        "gpu-decoder": speeds("a decoder on CUDA", "each step a CUDA graph", GRAPH),
        "gpu-decoder-compiled": speeds(
            "a compiled decoder on CUDA", "compiled by torch.compile, each step a CUDA graph", COMPILED
        ),
        "gpu-decoder-steps": steps,
        "gpu-decoder-goals": goals,
    },
    KEY,
)
GENERATED = Benchmark(
    "gpu-decoder-generate",
    {
        "gpu-decoder-generate": speeds("transformers' Llama on CUDA", f"{_STATIC}eager steps", GENERATE),
        "gpu-decoder-generate-compiled": speeds(
            "transformers' Llama on CUDA, compiled", f"{_STATIC}compiled steps", GENERATE_COMPILED
        ),
    },
    KEY,
)


def layers_of(model: Any) -> list[Any]:
    from torch import nn

    import breccia_torch

    return [m for m in model.modules() if isinstance(m, nn.Linear | breccia_torch.nn.ScaledLinear)]


def facts_of(model: Any) -> dict[str, int]:
    """Bytes of the weights of linear layers, and of all weights."""
    every = {id(t): t.nbytes for t in model.state_dict().values()}
    weights = sum(t.nbytes for layer in layers_of(model) for t in (*layer.parameters(), *layer.buffers()))
    return {"weight_bytes": weights, "model_bytes": sum(every.values())}


def made(
    recipe: str, dimensions: tuple[int, ...], batch: int, length: int, how: str, device: str
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(CUDA graphs of a step and of its parts, facts of the model, the captured calls).

    A graph keeps addresses, not tensors: the calls hold the tensors, so they have to live as long as the graphs.
    """
    from decoder_model import Decoder

    import breccia_torch

    torch.manual_seed(0)
    torch.cuda.empty_cache()
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Decoder(dimensions, batch, length).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if recipe != BF16:
        breccia_torch.quantize_(model, recipe, include=["lm_head.weight"])
    facts |= facts_of(model)
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> None:
        tokens.copy_(model(tokens, position))
        position.add_(1).remainder_(length)

    calls = {"products": model.products()}
    if how == GRAPH:
        calls["attention"] = model.attentions(tokens, position)
    graphs = {part: graph_of(call, device, 1, warm_up=3) for part, call in calls.items()}
    if how == COMPILED:
        torch.compiler.reset()  # graphs of other recipes and batches would count as recompilations
        model.compile_parts()
    graphs["step"] = graph_of(step, device, 1, warm_up=3)
    stored = {layer.weight.layout.storage for layer in layers_of(model) if not isinstance(layer, torch.nn.Linear)}
    return graphs, {**facts, "storages": sorted(stored)}, [*calls.values(), step]


def decoded(
    run: tuple[str, str, int],
    dimensions: tuple[int, ...],
    recipes: list[str],
    length: int,
    steps: int,
    rounds: int,
    device: str,
) -> Iterator[dict[str, Any]]:
    """Rows for one (how, model, batch). A sample replays a graph `steps` times; samples are interleaved."""
    how, model, batch = run
    timers, facts, alive = dict[tuple[str, str], Timer](), dict[str, dict[str, Any]](), list[Any]()
    for recipe in recipes:
        try:
            found, facts[recipe], kept = made(recipe, dimensions, batch, length, how, device)
            alive.append(kept)
            timers |= {(recipe, part): Timer(graph, device, calls=steps) for part, graph in found.items()}
        except Exception as e:  # one recipe that fails must not stop the rest
            print(f"{how}, {model}, {recipe}, batch {batch}: {message(e)}", file=sys.stderr)
    sampled(timers.values(), rounds)
    for recipe, of in facts.items():
        parts = {part: summary(timer.seconds) for (name, part), timer in timers.items() if name == recipe}
        row = {"how": how, "model": model, "recipe": recipe, "batch": batch, **of, "time": parts}
        yield {**row, "tokens_per_second": batch / parts["step"]["median_s"]}


def generating(recipe: str, dimensions: tuple[int, ...], device: str) -> tuple[Any, dict[str, Any]]:
    """(transformers' Llama with random weights, facts of the model). On CUDA it has BF16 activations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import breccia_torch

    named = dict(zip(CONFIG, dimensions, strict=True))
    config = LlamaConfig(**named, max_position_embeddings=2048, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if recipe == BF16 or device == "cuda":
        model = model.bfloat16()
    parameters = sum(p.numel() for p in model.parameters())
    if recipe not in (FP32, BF16):
        breccia_torch.quantize_(model, recipe, include=["lm_head.weight"])
    return model, {"parameters": parameters, **facts_of(model)}


class Clock:
    """A streamer for `generate` that records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """`generate` calls it after the last token."""


def generated(
    names: list[str], batches: list[int], steps: int, rounds: int, dimensions: tuple[int, ...], device: str, **options: Any
) -> Iterator[dict[str, Any]]:
    """Rows of the result: seconds of a generated token after the prompt, and of the prompt. options: of `generate`."""
    models = {name: generating(name, dimensions, device) for name in names}
    fixed = {"max_new_tokens": 1 + steps, "min_new_tokens": 1 + steps, "do_sample": False, "pad_token_id": 0, **options}
    for count in batches:
        prompt = torch.randint(0, dimensions[-1], (count, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
        taken: dict[str, dict[str, list[float]]] = {recipe: {"step": [], "prompt": []} for recipe in models}
        for turn in range(rounds + 1):
            for recipe, (model, _) in models.items():
                clock, start = Clock(), time.perf_counter()
                with torch.no_grad():
                    model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **fixed)
                if turn:  # the first round is not counted
                    _, after, *_, last = clock.times  # the prompt, the first token, the last token
                    taken[recipe]["prompt"].append(after - start)
                    taken[recipe]["step"].append((last - after) / steps)
        for recipe, (_, facts) in models.items():
            times = {part: summary(seconds) for part, seconds in taken[recipe].items()}
            speed = count / statistics.median(taken[recipe]["step"])
            yield {"recipe": recipe, "batch": count, **facts, "time": times, "tokens_per_second": speed}


@program
def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes of weights; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes; repeat for several.")] = None,
    length: Annotated[int, typer.Option(help="Length of the cache in tokens.")] = 512,
    steps: Annotated[int, typer.Option(help="Tokens in a sample.")] = 64,
    rounds: Annotated[int, typer.Option(help="Samples of each model.")] = 7,
    how: Annotated[list[str] | None, typer.Option(help=f"{', '.join(HOW)}. Default on CUDA: the first two.")] = None,
    models: Annotated[list[str] | None, typer.Option(help=f"On CUDA: {', '.join(MODELS)}; repeatable. Default: all.")] = None,
    seconds: Seconds = 600.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of a million parameters, to try the script.")] = False,
) -> Iterator[Result]:
    """Time the decoding of tokens with quantized weights."""
    check_device(device)
    if device == "cpu" and not how:
        names = recipes or ["int4", "mxfp4", "nvfp4", "mxfp8", "fp8_block", "int8"]
        rows = generated([FP32, BF16, *names], batch or [1, 4], steps, rounds, TINY if tiny else SMALL, "cpu")
        yield ON_CPU.result(list(rows), run=where("cpu"))
        return

    chosen, ways = known(models, MODELS, "--models"), known(how or [GRAPH, COMPILED], HOW, "--how")
    until, provenance = time.perf_counter() + seconds, where(device)
    names = [BF16, *(recipes or ["int4", "nvfp4", "mxfp4", "fp8_block,block_m=128"])]
    dimensions = {"tiny": TINY} if tiny else {name: MODELS[name] for name in chosen}
    found: dict[str, list[dict[str, Any]]] = {BY_STEPS.name: [], GENERATED.name: []}
    for way, name, count in itertools.product(ways, dimensions, batch or [1, 16]):
        if time.perf_counter() > until:
            print(f"{way}, {name}, batch {count}: left out, out of time", file=sys.stderr)
            continue
        benchmark = BY_STEPS if way in (GRAPH, COMPILED) else GENERATED
        if benchmark is BY_STEPS:
            found[benchmark.name] += decoded((way, name, count), dimensions[name], names, length, steps, rounds, device)
        else:
            # All models share the code of `forward`; torch.compile would leave those from the ninth on in eager mode.
            torch.compiler.reset()
            torch._dynamo.config.recompile_limit = 4 * len(names)
            static = {"cache_implementation": "static", "disable_compile": way == GENERATE}
            rows = generated(names, [count], steps, rounds, dimensions[name], device, **static)
            found[benchmark.name] += [{"how": way, "model": name, **row} for row in rows]
        yield benchmark.result(found[benchmark.name], run=provenance)
