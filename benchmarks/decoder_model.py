"""The decoder of bench_decoder.py: plain PyTorch with a static cache of keys and values. One call is one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


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

    def forward(self, x: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attend(self.qkv_proj(x), *where))

    def attend(self, qkv: torch.Tensor, position: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = qkv.shape[0]
        q, k, v = qkv.view(batch, -1, 1, self.size).split((self.heads, self.shared, self.shared), dim=1)
        self.keys.index_copy_(2, position, _turned(k, turn))
        self.values.index_copy_(2, position, v)
        found = functional.scaled_dot_product_attention(
            _turned(q, turn), self.keys, self.values, attn_mask=mask, enable_gqa=self.heads != self.shared
        )
        return found.reshape(batch, -1)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: multiply pairs of numbers, as complex numbers, by `turn`."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * turn[0] - high * turn[1], high * turn[0] + low * turn[1]], dim=-1)


class Layer(nn.Module):
    """A layer. It first adds the result of the previous layer: compiled alone, it then fuses this addition with the norm."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int, batch: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, shared, batch, length)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, added: torch.Tensor, *where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + added
        x = x + self.attention(self.norms[0](x), *where)
        gate, up = self.gate_up_proj(self.norms[1](x)).chunk(2, dim=-1)
        return x, self.down_proj(functional.silu(gate) * up)


class Decoder(nn.Module):
    """One step: the tokens of a batch (B,) and their position (1,) to the next tokens."""

    turns: torch.Tensor
    nothing: torch.Tensor

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
        self.register_buffer("nothing", torch.zeros(batch, width), persistent=False)
        self.length = length

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x, turn, mask = self.first(tokens, position)
        added = self.nothing
        for layer in self.layers:
            x, added = layer(x, added, position, turn, mask)
        return self.last(x, added)

    def first(self, tokens: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mask = (torch.arange(self.length, device=tokens.device) <= position)[None, None, None]
        return self.embedding(tokens), self.turns.index_select(1, position), mask

    def last(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(x + added)).argmax(dim=-1)

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile `first`, `last` and every layer. The layers share one compilation."""
        self.first = torch.compile(self.first, fullgraph=True, backend=backend)
        self.last = torch.compile(self.last, fullgraph=True, backend=backend)
        for layer in self.layers:
            layer.compile(fullgraph=True, backend=backend)

    def products(self) -> Callable[[], None]:
        x = self.nothing
        hidden = x.new_zeros(len(x), self.layers[0].down_proj.in_features)

        def run() -> None:
            for layer in self.layers:
                for linear in (layer.attention.qkv_proj, layer.attention.o_proj, layer.gate_up_proj):
                    linear(x)
                layer.down_proj(hidden)
            self.lm_head(x)

        return run

    def attentions(self, tokens: torch.Tensor, position: torch.Tensor) -> Callable[[], None]:
        _, *where = self.first(tokens, position)
        qkv = self.nothing.new_zeros(len(tokens), self.layers[0].attention.qkv_proj.out_features)

        def run() -> None:
            for layer in self.layers:
                layer.attention.attend(qkv, position, *where)

        return run
