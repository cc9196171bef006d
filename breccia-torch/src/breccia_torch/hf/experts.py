"""Mixtures of experts in transformers: a forward function of their modules that multiplies with `breccia.grouped_matmul`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import breccia

from ..nn import ScaledExperts
from ..storing import IMPLEMENTATION

#: What transformers calls this implementation.
NAME = IMPLEMENTATION


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The output of a module of experts, for tokens of shape (tokens, hidden_size).

    top_k_index, top_k_weights: each token's experts and their weights, (tokens, k). An index of `num_experts` or more
        belongs to no expert here (expert parallelism) and adds nothing.
    """
    tokens, k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    bounds = torch.arange(1, self.num_experts + 1, device=expert.device, dtype=expert.dtype)
    offsets = torch.searchsorted(expert, bounds).to(torch.int32)  # the end of each expert's rows
    rows, here = hidden_states[order // k], expert < self.num_experts
    which = expert.clamp(max=self.num_experts - 1)

    def product(x: Tensor, name: str) -> Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        if isinstance(weight, ScaledExperts):
            y = weight.grouped_matmul(x, offsets, self.is_transposed)
        else:
            y = breccia.grouped_matmul(x, weight if self.is_transposed else weight.mT, offsets, x.dtype)
        return y if bias is None else y + bias[which]

    inner = self._apply_gate(product(rows, "gate_up_proj")) if self.has_gate else self.act_fn(product(rows, "up_proj"))
    outer = product(inner, "down_proj")
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)
    weighted = torch.where(here[:, None], outer * top_k_weights.reshape(-1)[order, None], 0)
    unsorted = torch.empty_like(weighted).index_copy_(0, order, weighted)
    return unsorted.view(tokens, k, -1).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
