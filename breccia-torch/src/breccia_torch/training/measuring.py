"""How much faster than BF16 a layer trains on its device: measured once for each shape, for `min_size="auto"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from statistics import median

import torch
from torch import nn

from breccia import TrainingRecipe

from .linear import TrainingLinear

#: Rows of the input, and how often forward and backward are timed, after as many runs for warming up.
ROWS, ROUNDS = 4096, 5


def speed(layer: nn.Linear, recipe: TrainingRecipe) -> float | None:
    """The time of BF16 over that of the layer under `recipe`; None on CPUs, which only emulate low precision."""
    device = layer.weight.device
    if device.type != "cuda":
        return None
    return _measured(layer.in_features, layer.out_features, recipe, str(device))


@lru_cache(maxsize=256)
def _measured(in_features: int, out_features: int, recipe: TrainingRecipe, device: str) -> float:
    options = {"bias": False, "device": device, "dtype": torch.bfloat16}
    with torch.random.fork_rng(devices=[torch.device(device)]):
        plain = nn.Linear(in_features, out_features, **options)
        scaled = TrainingLinear.from_linear(plain, recipe, seed=0)
        x = torch.randn(ROWS, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(ROWS, out_features, device=device, dtype=torch.bfloat16)

    def step(module: nn.Linear) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.graph.increment_version(module.weight)  # as an optimizer's step, so that it is cast every time
            module(x).backward(dy)

        return run

    return timed(step(plain)) / timed(step(scaled))


def timed(run: Callable[[], None]) -> float:
    """The median time of a call on the current CUDA device, in milliseconds."""
    times: list[float] = []
    for n in range(2 * ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if n >= ROUNDS:
            times.append(start.elapsed_time(end))
    return median(times)
