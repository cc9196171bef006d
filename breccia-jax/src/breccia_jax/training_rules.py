"""Which layers of a model train in low precision; for Flax and Equinox."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from breccia import BrecciaError, Policy, TrainingRecipe
from breccia.backend import FLOATS, Parameter, TrainingSummary, choose, dtype_name, none_chosen
from breccia.internal import TENSORS

CALLER = "convert_to_training"
#: FP8 GEMMs of GPUs need both sides of a weight in multiples of this; breccia_torch leaves the same layers.
ALIGNED = 16


def chosen_layers(
    parameters: Iterable[Parameter], recipe: TrainingRecipe, include: Iterable[str], exclude: Iterable[str]
) -> TrainingSummary:
    """What is converted, by the names of weights, and what is left, and why.

    parameters: all of the model; those that cannot train in low precision have no axes, and a reason. Raises what
    `breccia.models.choose` raises.
    """
    wide = [_aligned(p) for p in parameters if len(p.shape) >= 2 and dtype_name(p.layer) in FLOATS]
    # The recipe of a weight only says that it is chosen.
    stand_in = next(r for t in TENSORS for r in (getattr(recipe, t), getattr(recipe, f"{t}_columns")) if r is not None)
    chosen, left = choose(wide, Policy.of(stand_in, include, exclude), CALLER)
    if not chosen:
        raise none_chosen(CALLER, left)
    return TrainingSummary(recipe, tuple(chosen), left)


def _aligned(p: Parameter) -> Parameter:
    if p.axes is None or p.why:
        return p
    k = math.prod(p.shape[axis] for axis in p.axes)
    n = math.prod(p.shape[p.axes[-1] + 1 :]) if p.axes[-1] + 1 < len(p.shape) else p.shape[p.axes[0] - 1]
    if k % ALIGNED == 0 and n % ALIGNED == 0:
        return p
    return replace(p, axes=None, why=f"{k} x {n} has a side that is no multiple of {ALIGNED}")


@contextmanager
def of_layer(name: str) -> Any:
    """Errors of breccia inside get the name of the layer."""
    try:
        yield
    except BrecciaError as e:
        raise type(e)(f"{name}: {e}", **e.found) from e
