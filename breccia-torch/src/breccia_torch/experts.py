"""Mixtures of experts: each token's rows sorted by expert, multiplied, and added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: (rows sorted by expert, the end of each expert's rows, the expert of each row) -> the experts' output of each row.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
#: What follows the name of a parameter of experts in the name of the module that multiplies it in training.
TRAINING = "_training"


def training_layer(module: Any, leaf: str) -> Any:
    """The layer that multiplies a parameter of a module of experts in training; None if it does not train in low precision."""
    return getattr(module, f"{leaf}{TRAINING}", None)


def routed(tokens: Tensor, expert_of: Tensor, weights: Tensor, count: int, experts: Experts) -> Tensor:
    """The sum of the outputs of each token's experts, by their weights, in the dtype of `tokens`.

    tokens: (tokens, hidden_size). expert_of, weights: of each token's experts, (tokens, k); an expert of `count` or more is
        none of these (expert parallelism) and adds nothing.
    """
    k = expert_of.shape[1]
    expert, order = torch.sort(expert_of.reshape(-1), stable=True)
    bounds = torch.arange(1, count + 1, device=expert.device, dtype=expert.dtype)
    offsets = torch.searchsorted(expert, bounds).to(torch.int32)
    outer = experts(tokens[order // k], offsets, expert.clamp(max=count - 1))
    weighted = torch.where((expert < count)[:, None], outer * weights.reshape(-1)[order, None], 0)
    unsorted = torch.empty_like(weighted).index_copy_(0, order, weighted)
    return unsorted.view(len(tokens), k, -1).sum(1).to(tokens.dtype)
