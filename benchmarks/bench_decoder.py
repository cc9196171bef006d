"""On a CUDA device: tokens per second and memory of a decoder of 1.1 billion parameters, BF16 and quantized.

    python benchmarks/bench_decoder.py [--recipes int4 --recipes nvfp4] [--batch 1 --batch 16] [--out RESULTS]

The decoder is plain PyTorch with random weights and a static cache of keys and values. One step, from tokens to the next,
is a CUDA graph. The models are measured in rotation, since a GPU lowers its clock under load.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import common
import torch
import typer
from torch import nn
from torch.nn import functional

app = typer.Typer(add_completion=False)

#: Layers, width, heads, heads of keys and values, hidden width, vocabulary: those of TinyLlama-1.1B.
LARGE = (22, 2048, 32, 4, 5632, 32000)
TINY = (2, 256, 4, 2, 512, 256)
BF16 = "bf16"


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


def made(recipe: str, dimensions: tuple[int, ...], batch: int, length: int) -> tuple[Any, dict[str, Any]]:
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
    seen = {id(t): t.nbytes for t in model.state_dict().values()}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | breccia_torch.nn.ScaledLinear)]
    facts["weight_bytes"] = sum(t.nbytes for layer in layers for t in (*layer.parameters(), *layer.buffers()))
    facts["model_bytes"] = sum(seen.values())
    tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        tokens.copy_(model(tokens, position))
        position.add_(1).remainder_(length)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        step()
    facts["storages"] = sorted({layer.weight.layout.storage for layer in layers if not isinstance(layer, nn.Linear)})
    return (graph, model, tokens, position), facts


@app.command()
def main(
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at a time; repeat for several.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the cache.")] = 512,
    steps: Annotated[int, typer.Option(help="Tokens of a sample.")] = 64,
    rounds: Annotated[int, typer.Option(help="Samples of each model.")] = 7,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of a million parameters, to try the script.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
) -> None:
    """Time decoding under a CUDA graph."""
    if not torch.cuda.is_available():
        sys.exit("bench_decoder: torch sees no CUDA device here.")
    from bench_gpu import where

    table: list[dict[str, Any]] = []
    for count in batch or [1, 16]:
        models: dict[str, tuple[Any, dict[str, Any]]] = {}
        for recipe in [BF16, *(recipes or ["int4", "mxfp4", "nvfp4", "fp8_block,block_m=128"])]:
            try:
                models[recipe] = made(recipe, TINY if tiny else LARGE, count, length)
            except Exception as e:  # one recipe that fails must not stop the rest
                print(f"{recipe}, batch {count}: {type(e).__name__}: {e}"[:500], flush=True)
        seconds: dict[str, list[float]] = {recipe: [] for recipe in models}
        for _ in range(rounds):
            for recipe, ((graph, *_), _) in models.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(steps):
                    graph.replay()
                end.record()
                end.synchronize()
                seconds[recipe].append(start.elapsed_time(end) * 1e-3 / steps)
        for recipe, (_, facts) in models.items():
            taken = common.summary(seconds[recipe])
            speed = count / taken["median_s"]
            table.append({"recipe": recipe, "batch": count, **facts, "step": taken, "tokens_per_second": speed})
            first = next(one for one in table if one["batch"] == count)
            size, ratio = facts["weight_bytes"], facts["weight_bytes"] / first["weight_bytes"]
            print(
                f"{recipe:24s} batch {count:3d} {speed:9.0f} tokens/s {speed / first['tokens_per_second']:5.2f} x  "
                f"weights {size / 1e9:6.3f} GB {ratio:5.3f} x  {' '.join(facts['storages'])}",
                flush=True,
            )
        models.clear()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": "gpu-decoder", "schema": common.SCHEMA, "provenance": where("cuda"), "rows": table}
        path = out / f"gpu-decoder-{common.device_tag(torch.cuda.get_device_name())}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
