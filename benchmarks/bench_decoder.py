"""Tokens per second and memory of a decoder, quantized and not: of 1.1 billion parameters on CUDA, of 0.2 on a CPU.

    python benchmarks/bench_decoder.py [--device cpu] [--recipes int4 --recipes nvfp4] [--batch 1 --batch 16] [--out RESULTS]
    python benchmarks/bench_decoder.py --how generate --how generate-compiled    # on CUDA, through Hugging Face's generate

**On a CPU** the decoder is transformers' Llama with random weights, which Hugging Face's `generate` decodes greedily, after a
prompt of 32 tokens: FP32, BF16, and FP32 activations by each recipe.

**On CUDA** the decoder is plain PyTorch with random weights and a static cache of keys and values. A step from one token to the
next is a CUDA graph, of eager operations (`--how graph`) or of layers compiled by torch.compile (`--how compiled`). Separate
graphs of the products by weights, and of attention without projections, measure the parts of a step. `--models` are `wide`,
four layers of Llama 3 8B, and `narrow`, TinyLlama; both have about a billion parameters. Through `generate` they are
transformers' Llama with BF16 activations, also with a static cache. Steps are eager, or with `generate-compiled` compiled by
transformers through `torch.compile`.

Samples of the models are interleaved, since a GPU lowers its clock under load, and other processes disturb a CPU.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common
import torch
import typer
from decoder_model import MODELS, TINY, Decoder
from decoder_tables import COMPILED, GENERATE, GENERATE_COMPILED, GRAPH
from torch import nn

app = typer.Typer(add_completion=False)

#: Dimensions of the decoder on a CPU, in the order of MODELS.
SMALL = (12, 1024, 16, 4, 2816, 32000)
BF16, FP32 = "bf16", "fp32"
HOW = (GRAPH, COMPILED, GENERATE, GENERATE_COMPILED)


def made(
    recipe: str, dimensions: tuple[int, ...], batch: int, length: int, how: str
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """(CUDA graphs of a step and of its parts, facts of the model, the captured calls).

    A graph keeps addresses, not tensors: the calls hold the tensors, so they have to live as long as the graphs.
    """
    import breccia_torch

    torch.manual_seed(0)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Decoder(dimensions, batch, length).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if recipe != BF16:
        breccia_torch.quantize_(model, recipe, include=["lm_head.weight"])
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | breccia_torch.nn.ScaledLinear)]
    facts |= _bytes_of(model)
    tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        tokens.copy_(model(tokens, position))
        position.add_(1).remainder_(length)

    calls = {"products": model.products()}
    if how == GRAPH:
        calls["attention"] = model.attentions(tokens, position)
    graphs = {part: captured(call) for part, call in calls.items()}
    if how == COMPILED:
        breccia_torch.enable_compile()
        torch.compiler.reset()  # graphs of other recipes and batches would count as recompilations
        model.compile_parts()
    graphs["step"] = captured(step)
    facts["storages"] = sorted({layer.weight.layout.storage for layer in layers if not isinstance(layer, nn.Linear)})
    return graphs, facts, [*calls.values(), step]


def captured(run: Callable[[], None]) -> Any:
    """A CUDA graph of a call, captured after three warm-up calls."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the weights and tokens were written on another stream
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def timed(graphs: dict[tuple[str, str], Any], steps: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step of each graph. A sample replays a graph `steps` times; samples are interleaved."""
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(steps):
                graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) * 1e-3 / steps)
    return seconds


def decoded(
    how: str, model: str, dimensions: tuple[int, ...], batch: int, recipes: list[str], length: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows of the result for one model and batch."""
    graphs, facts, alive = dict[tuple[str, str], Any](), dict[str, dict[str, Any]](), list[Any]()
    for recipe in recipes:
        try:
            found, facts[recipe], kept = made(recipe, dimensions, batch, length, how)
            alive.append(kept)
            graphs |= {(recipe, part): graph for part, graph in found.items()}
        except Exception as e:  # one recipe that fails must not stop the rest
            print(f"{how}, {model}, {recipe}, batch {batch}: {type(e).__name__}: {e}"[:500], flush=True)
    taken = {name: common.summary(found) for name, found in timed(graphs, steps, rounds).items()}
    table: list[dict[str, Any]] = []
    for recipe, of in facts.items():
        if (recipe, "step") in taken:
            parts = {part: times for (name, part), times in taken.items() if name == recipe}
            speed = batch / parts["step"]["median_s"]
            row = {"how": how, "model": model, "recipe": recipe, "batch": batch, **of, **parts, "tokens_per_second": speed}
            table.append(row)
            _print(table)
    return table


def generating(recipe: str, dimensions: tuple[int, ...], device: str) -> tuple[Any, dict[str, Any]]:
    """(transformers' Llama with random weights, facts of the model). On CUDA it has BF16 activations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import breccia_torch

    layers, width, heads, shared, hidden, vocabulary = dimensions
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if recipe == BF16 or device == "cuda":
        model = model.bfloat16()
    parameters = sum(p.numel() for p in model.parameters())
    if recipe not in (FP32, BF16):
        breccia_torch.quantize_(model, recipe, include=["lm_head.weight"])
    return model, {"parameters": parameters, **_bytes_of(model)}


def _bytes_of(model: Any) -> dict[str, int]:
    """Bytes of the weights of linear layers, and of all weights."""
    import breccia_torch

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | breccia_torch.nn.ScaledLinear)]
    every = {id(t): t.nbytes for t in model.state_dict().values()}
    weights = sum(t.nbytes for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    return {"weight_bytes": weights, "model_bytes": sum(every.values())}


class Clock:
    """A streamer for `generate` that records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self.ended = time.perf_counter()


def generated(
    names: list[str],
    batches: list[int],
    steps: int,
    rounds: int,
    dimensions: tuple[int, ...],
    device: str,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Rows of the result: seconds of a generated token after the prompt, and of the prompt. options: of `generate`."""
    models = {name: generating(name, dimensions, device) for name in names}
    table: list[dict[str, Any]] = []
    for count in batches:
        prompt = torch.randint(0, dimensions[-1], (count, 32), generator=torch.Generator().manual_seed(0)).to(device)
        seconds: dict[str, list[float]] = {recipe: [] for recipe in models}
        first: dict[str, list[float]] = {recipe: [] for recipe in models}
        for turn in range(rounds + 1):
            for recipe, (model, _) in models.items():
                clock, start = Clock(), time.perf_counter()
                with torch.no_grad():
                    model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=1 + steps,
                        min_new_tokens=1 + steps,
                        do_sample=False,
                        pad_token_id=0,
                        streamer=clock,
                        **options,
                    )
                if turn:  # the first round is not counted
                    _, after, *_, last = clock.times  # the prompt, the first token, the last token
                    first[recipe].append(after - start)
                    seconds[recipe].append((last - after) / steps)
        for recipe, (_, facts) in models.items():
            taken = common.summary(seconds[recipe])
            speed = count / taken["median_s"]
            row = {"recipe": recipe, "batch": count, **facts, "step": taken, "prompt": common.summary(first[recipe])}
            table.append({**row, "tokens_per_second": speed})
            _print(table)
    return table


def _print(table: list[dict[str, Any]]) -> None:
    """Print the last row, and its ratios to the first row of the same model and batch."""
    row = table[-1]
    first = next(one for one in table if (one.get("model"), one["batch"]) == (row.get("model"), row["batch"]))
    size, ratio = row["weight_bytes"], row["weight_bytes"] / first["weight_bytes"]
    speed = row["tokens_per_second"]
    print(
        f"{row.get('model', ''):7s} {row['recipe']:24s} batch {row['batch']:3d} {speed:9.1f} tokens/s "
        f"{speed / first['tokens_per_second']:5.2f} x  "
        f"weights {size / 1e9:6.3f} GB {ratio:5.3f} x  {' '.join(row.get('storages', ()))}",
        flush=True,
    )


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes of weights; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes; repeat for several.")] = None,
    length: Annotated[int, typer.Option(help="Length of the cache in tokens.")] = 512,
    steps: Annotated[int, typer.Option(help="Tokens in a sample.")] = 64,
    rounds: Annotated[int, typer.Option(help="Samples of each model.")] = 7,
    how: Annotated[
        list[str] | None, typer.Option(help=f"On CUDA: {', '.join(HOW)}; repeat for several. Default: the first two.")
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option(help=f"On CUDA: {', '.join(MODELS)}; repeat for several. Default: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="On CUDA: start no measurement after this many seconds.")] = 600.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of a million parameters, to try the script.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
) -> None:
    """Time the decoding of tokens with quantized weights."""
    if device == "cpu":
        names = recipes or ["int4", "mxfp4", "nvfp4", "mxfp8", "fp8_block", "int8"]
        rows = generated([FP32, BF16, *names], batch or [1, 4], steps, rounds, TINY if tiny else SMALL, "cpu", {})
        where_ran = {**common.provenance(), "torch_threads": torch.get_num_threads()}
        where_ran["versions"]["torch"] = torch.__version__
        answer = {"benchmark": "decoder-cpu", "schema": common.SCHEMA, "provenance": where_ran, "rows": rows}
        if out is not None:
            common.save(answer, out)
        return
    if not torch.cuda.is_available():
        sys.exit("bench_decoder: torch sees no CUDA device here.")
    for option, given, there_are in (("--models", models, MODELS), ("--how", how, HOW)):
        if unknown := [name for name in given or [] if name not in there_are]:
            sys.exit(f"bench_decoder: {option} takes {', '.join(there_are)}; got {unknown[0]!r}.")
    from bench_gpu import where

    until = time.perf_counter() + seconds
    names, batches = [BF16, *(recipes or ["int4", "nvfp4", "mxfp4", "fp8_block,block_m=128"])], batch or [1, 16]
    chosen = {"tiny": TINY} if tiny else {name: MODELS[name] for name in models or MODELS}
    kinds = {"gpu-decoder": [], "gpu-decoder-generate": []}
    for way, name, count in itertools.product(how or [GRAPH, COMPILED], chosen, batches):
        what, begun = f"{way}, {name}, batch {count}", time.perf_counter()
        if begun > until:
            print(f"{what}: left out, out of time", flush=True)
            continue
        if way in (GRAPH, COMPILED):
            kinds["gpu-decoder"] += decoded(way, name, chosen[name], count, names, length, steps, rounds)
        else:
            # All models share the code of `forward`; torch.compile would leave those from the ninth on in eager mode.
            torch.compiler.reset()
            torch._dynamo.config.recompile_limit = 4 * len(names)
            static = {"cache_implementation": "static", "disable_compile": way == GENERATE}
            found = generated(names, [count], steps, rounds, chosen[name], "cuda", static)
            kinds["gpu-decoder-generate"] += [{"how": way, "model": name, **row} for row in found]
        print(f"{what}: {time.perf_counter() - begun:.0f} s", flush=True)
        for kind, rows in kinds.items():  # now, so that a run that is stopped leaves results
            if rows:
                _save(kind, rows, where("cuda"), out)


def _save(kind: str, table: list[dict[str, Any]], provenance: dict[str, Any], out: Path | None) -> None:
    """Write a result on a GPU to the folder, if one is given."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": kind, "schema": common.SCHEMA, "provenance": provenance, "rows": table}
        path = out / f"{kind}-{common.device_tag(torch.cuda.get_device_name())}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
