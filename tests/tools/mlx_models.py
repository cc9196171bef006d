"""Models of MLX whose parameters have given names and shapes; nothing of them is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

import breccia
from breccia_mlx.nn import ScaledWeight


def model(shapes: Mapping[str, tuple[int, ...]], dtype: Any = mx.float32) -> nn.Module:
    """A model with a parameter of each name.

    A matrix "a.b.weight" is that of an embedding if the name says so, else of a linear layer; parameters of other shapes are
    arrays of a module. Numbers in names are places in lists.
    """
    out = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        matrix = last == "weight" and len(shape) == 2
        owner, path = out, path[:-1] if matrix else path
        for part, after in zip(path, [*path, last][1:], strict=False):
            owner = _child(owner, part, [] if after.isdigit() else nn.Module())
        if matrix:
            _child(owner, name.split(".")[-2], nn.Embedding(*shape) if "embed" in name else nn.Linear(*shape[::-1], bias=False))
        else:
            owner[last] = mx.zeros(shape)
    out.set_dtype(dtype)
    return out


def _child(owner: Any, part: str, new: Any) -> Any:
    if not isinstance(owner, list):
        return owner.setdefault(part, new)
    owner.extend(nn.Module() for _ in range(len(owner), int(part) + 1))
    return owner[int(part)]


def weight(model: nn.Module, name: str) -> Any:
    """The parameter of a model: an array, or the ScaledTensor of a layer."""
    for path, module in model.named_modules():
        if f"{path}.weight" == name and isinstance(module.get("weight"), ScaledWeight):
            return module.weight.tensor
    every: Any = tree_flatten(model.parameters())
    return dict(every)[name]


def decoded(model: nn.Module, name: str) -> np.ndarray:
    """The values of a parameter as FP32."""
    found = weight(model, name)
    return np.array((breccia.dequantize(found) if isinstance(found, breccia.ScaledTensor) else found).astype(mx.float32))
