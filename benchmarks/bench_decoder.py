"""Tokens per second and memory of a decoder, quantized and not: of 1.1 billion parameters on CUDA, of 0.2 on a CPU.

    python benchmarks/bench_decoder.py [--device cpu] [--recipes int4 --recipes nvfp4] [--batch 1 --batch 16] [--out RESULTS]
    python benchmarks/bench_decoder.py --generate [--compiled]    # on CUDA, through Hugging Face's generate

**On a CPU** the decoder is transformers' Llama with random weights, which Hugging Face's `generate` decodes greedily, after a
prompt of 32 tokens: FP32, BF16, and FP32 activations by each recipe.

**On CUDA** the decoder is plain PyTorch with random weights and a static cache of keys and values. One step, from tokens to
the next, is a CUDA graph; with `--compiled`, of what torch.compile makes of the model. `--models` has narrow layers, of
TinyLlama, and wide ones, four layers of Llama 3 8B: both have about a billion parameters. With `--generate` they are
transformers' Llama, all activations in BF16, and `generate` has a static cache too: its steps are eager, or with `--compiled`
what transformers makes of them by `torch.compile`.

The models are measured in rotation, since a GPU lowers its clock under load, and other processes disturb a CPU.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import common
import torch
import typer
from torch import nn
from torch.nn import functional

app = typer.Typer(add_completion=False)

#: Layers, width, heads, heads of keys and values, hidden width, vocabulary: of TinyLlama-1.1B, and of a part of Llama 3 8B.
MODELS = {"narrow": (22, 2048, 32, 4, 5632, 32000), "wide": (4, 4096, 32, 8, 14336, 32000)}
TINY = (2, 256, 4, 2, 512, 256)
#: The same of the decoder on a CPU.
SMALL = (12, 1024, 16, 4, 2816, 32000)
BF16, FP32 = "bf16", "fp32"


class Attention(nn.Module):
    """Grouped-query attention of one new token to a static cache."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, heads: int, shared: int, batch: int, length: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.qkv_proj = nn.Linear(width, (heads + 2 * shared) * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, shared, length, self.size), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        q, k, v = self.qkv_proj(x).view(batch, -1, 1, self.size).split((self.heads, self.shared, self.shared), dim=1)
        self.keys.index_copy_(2, position, _turned(k, turn))
        self.values.index_copy_(2, position, v)
        found = functional.scaled_dot_product_attention(
            _turned(q, turn), self.keys, self.values, attn_mask=mask, enable_gqa=self.heads != self.shared
        )
        return self.o_proj(found.reshape(batch, -1))


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: pairs of numbers as complex ones, times `turn`."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * turn[0] - high * turn[1], high * turn[0] + low * turn[1]], dim=-1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, hidden: int, batch: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, shared, batch, length)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), *where)
        gate, up = self.gate_up_proj(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down_proj(functional.silu(gate) * up)


class Decoder(nn.Module):
    """One step: the tokens of a batch (B,) and their position (1,) to the next tokens."""

    turns: torch.Tensor

    def __init__(self, dimensions: tuple[int, ...], batch: int, length: int) -> None:
        super().__init__()
        layers, width, heads, shared, hidden, vocabulary = dimensions
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, heads, shared, hidden, batch, length) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.length = length

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        turn = self.turns.index_select(1, position)
        mask = (torch.arange(self.length, device=tokens.device) <= position)[None, None, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, position, turn, mask)
        return self.lm_head(self.norm(x)).argmax(dim=-1)


def made(recipe: str, dimensions: tuple[int, ...], batch: int, length: int, compiled: bool) -> tuple[Any, dict[str, Any]]:
    """(A graph of one step, facts of the model)."""
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
    if compiled:
        breccia_torch.enable_compile()
        torch.compiler.reset()  # graphs of other recipes and batches would count as recompilations
        model.compile(fullgraph=True)
    tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        tokens.copy_(model(tokens, position))
        position.add_(1).remainder_(length)

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the weights and tokens were written on another stream
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        step()
    facts["storages"] = sorted({layer.weight.layout.storage for layer in layers if not isinstance(layer, nn.Linear)})
    return (graph, model, tokens, position), facts


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
    """A streamer of `generate` that notes when tokens come."""

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
                    _, after, *_, last = clock.times  # of the prompt, of the first token, of the last one
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
    """The last row, and its ratios to the first one of its batch."""
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
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at a time; repeat for several.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the cache.")] = 512,
    steps: Annotated[int, typer.Option(help="Tokens of a sample.")] = 64,
    rounds: Annotated[int, typer.Option(help="Samples of each model.")] = 7,
    generate: Annotated[bool, typer.Option("--generate", help="On CUDA: through Hugging Face's generate.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="On CUDA: by torch.compile.")] = False,
    models: Annotated[list[str] | None, typer.Option(help=f"On CUDA: {', '.join(MODELS)}; repeat for several.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of a million parameters, to try the script.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
) -> None:
    """Time decoding under a CUDA graph."""
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
    if unknown := [name for name in models or [] if name not in MODELS]:
        sys.exit(f"bench_decoder: --models takes {', '.join(MODELS)}; got {unknown[0]!r}.")
    from bench_gpu import where

    names, batches = recipes or ["int4", "mxfp4", "nvfp4", "fp8_block,block_m=128"], batch or [1, 16]
    chosen = {"tiny": TINY} if tiny else {name: MODELS[name] for name in models or MODELS}
    if generate:
        static = {"cache_implementation": "static", "disable_compile": not compiled}
        rows = []
        for name, dimensions in chosen.items():
            found = generated([BF16, *names], batches, steps, rounds, dimensions, "cuda", static)
            rows += [{"model": name, **row} for row in found]
        _save("gpu-decoder-generate" + ("-compiled" if compiled else ""), rows, where("cuda"), out)
        return
    table: list[dict[str, Any]] = []
    for name, count in itertools.product(chosen, batches):
        built: dict[str, tuple[Any, dict[str, Any]]] = {}
        for recipe in [BF16, *names]:
            try:
                built[recipe] = made(recipe, chosen[name], count, length, compiled)
            except Exception as e:  # one recipe that fails must not stop the rest
                print(f"{name}, {recipe}, batch {count}: {type(e).__name__}: {e}"[:500], flush=True)
        seconds: dict[str, list[float]] = {recipe: [] for recipe in built}
        for _ in range(rounds):
            for recipe, ((graph, *_), _) in built.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(steps):
                    graph.replay()
                end.record()
                end.synchronize()
                seconds[recipe].append(start.elapsed_time(end) * 1e-3 / steps)
        for recipe, (_, facts) in built.items():
            taken = common.summary(seconds[recipe])
            row = {"model": name, "recipe": recipe, "batch": count, **facts, "step": taken}
            table.append({**row, "tokens_per_second": count / taken["median_s"]})
            _print(table)
        built.clear()
    _save("gpu-decoder" + ("-compiled" if compiled else ""), table, where("cuda"), out)


def _save(kind: str, table: list[dict[str, Any]], provenance: dict[str, Any], out: Path | None) -> None:
    """Write the result of a GPU to the folder, if there is one."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": kind, "schema": common.SCHEMA, "provenance": provenance, "rows": table}
        path = out / f"{kind}-{common.device_tag(torch.cuda.get_device_name())}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
