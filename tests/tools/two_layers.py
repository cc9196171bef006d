"""The model of the tests of training: two linear layers, whose first weights are always the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import breccia_torch

WIDTH, HIDDEN = 32, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


def made(recipe: str) -> Model:
    """The model in training."""
    torch.manual_seed(0)
    model = Model()
    breccia_torch.convert_to_training_(model, recipe)
    return model
