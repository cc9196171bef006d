"""The parameters of a model as its policy has them, quantized."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from breccia import BrecciaError, Policy, ScalingRecipe
from breccia.backend import FLOATS, Parameter, QuantizeSummary, choose, dtype_name, none_chosen

from .weights import ScaledWeight, quantized

Axes = int | tuple[int, ...]
#: How to quantize a parameter: a recipe, a recipe and the contracted axes, or "keep" or None to leave it.
Rule = ScalingRecipe | str | tuple[ScalingRecipe | str, Axes] | None
#: One rule for all weights, a policy, or rules by shell-style patterns of names, of which the first that matches applies.
Rules = Rule | Policy | Mapping[str, Rule]

#: What `quantize` returns beside the model.
Report = QuantizeSummary


def described(name: str, array: Any, axes: tuple[int, ...] | None, why: str = "", kind: str = "linear") -> Parameter:
    """A parameter of a model; `layer` is its array."""
    return Parameter(name, tuple(array.shape), nbytes(array), kind, axes, why, array)


def apply(
    parameters: Iterable[Parameter], rules: Rules, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> tuple[dict[str, ScaledWeight], QuantizeSummary]:
    """The quantized parameters by name, and the report.

    parameters: as `described` makes them. Raises what `breccia.cast` raises, naming the parameter, and what
    `breccia.models.choose` and `breccia.Policy.of` raise.
    """
    listed = list(parameters)
    wide = [p for p in listed if len(p.shape) >= 2 and dtype_name(p.layer) in FLOATS]
    chosen, left = choose(wide, Policy.of(rules, include, exclude), "quantize")
    if not chosen:
        raise none_chosen("quantize", left)
    weights: dict[str, ScaledWeight] = {}
    for p in wide:
        if p.name in chosen:
            try:
                weights[p.name] = quantized(p.layer, *chosen[p.name])
            except BrecciaError as e:
                raise type(e)(f"quantize: {p.name}: {e}", **e.found) from e
    before = sum(p.nbytes for p in listed)
    after = before + sum(weights[p.name].nbytes - p.nbytes for p in wide if p.name in weights)
    return weights, QuantizeSummary(chosen, left, before, after)


def nbytes(array: Any) -> int:
    """The bytes of an array, a tracer or a description of an array."""
    return math.prod(array.shape) * array.dtype.itemsize
