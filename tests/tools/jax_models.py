"""Models of JAX's libraries whose parameters have given names and shapes, without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

#: Shapes by names of torch: a matrix "a.b.weight" is a linear layer's (out, in), or an embedding's if the name says so.
Shapes = Mapping[str, tuple[int, ...]]


def linen(shapes: Shapes, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Variables of linen."""
    out: dict[str, Any] = {}
    for name, shape in shapes.items():
        module = out
        for part in name.split(".")[:-1]:
            module = module.setdefault(part, {})
        leaf = "scale" if len(shape) == 1 else "embedding" if "embed" in name else "kernel"
        module[leaf] = jax.ShapeDtypeStruct(shape[::-1] if leaf == "kernel" else shape, dtype)
    return {"params": out}


class _Module(nnx.Module):
    """A module of other ones."""


def module(shapes: Shapes, dtype: Any = jnp.float32) -> Any:
    """A module of nnx."""
    return nnx.eval_shape(partial(_module, shapes, dtype))


def _module(shapes: Shapes, dtype: Any) -> _Module:
    out, options = _Module(), {"rngs": nnx.Rngs(0), "param_dtype": dtype}
    for name, shape in shapes.items():
        *path, last = name.split(".")[:-1]
        owner = out
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, _Module())
            owner = getattr(owner, part)
        if len(shape) == 1:
            layer = nnx.RMSNorm(*shape, **options)
        elif "embed" in name:
            layer = nnx.Embed(*shape, **options)
        else:
            layer = nnx.Linear(*shape[::-1], use_bias=False, **options)
        setattr(owner, last, layer)
    return out


def equinox(shapes: Shapes, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Layers of Equinox in dicts."""
    out: dict[str, Any] = {}
    key = jax.random.key(0)
    for name, shape in shapes.items():
        *path, last = name.split(".")[:-1]
        owner = out
        for part in path:
            owner = owner.setdefault(part, {})
        if len(shape) == 1:
            make = partial(eqx.nn.RMSNorm, *shape, use_bias=False, dtype=dtype)
        elif "embed" in name:
            make = partial(eqx.nn.Embedding, *shape, dtype=dtype, key=key)
        else:
            make = partial(eqx.nn.Linear, *shape[::-1], use_bias=False, dtype=dtype, key=key)
        owner[last] = eqx.filter_eval_shape(make)
    return out


#: Each library's models, by its name.
MODELS: dict[str, Callable[..., Any]] = {"linen": linen, "nnx": module, "equinox": equinox}


def weight(model: Any, name: str) -> Any:
    """The parameter of a model under a name of torch: an array, or a ScaledWeight."""
    found = _parameter(model, name)[1]
    return found.get_raw_value() if isinstance(found, nnx.Variable) else found


def decoded(model: Any, name: str) -> np.ndarray:
    """The values of a parameter in torch's order, as FP32."""
    values = np.asarray(jnp.asarray(weight(model, name), jnp.float32))
    return values.T if _parameter(model, name)[0] == "kernel" else values


def _parameter(model: Any, name: str) -> tuple[str, Any]:
    layer = model.get("params", model) if isinstance(model, dict) else model
    for part in name.split(".")[:-1]:
        layer = layer[part] if isinstance(layer, dict) else getattr(layer, part)
    if isinstance(layer, dict):
        return next(iter(layer.items()))
    leaf = next(leaf for leaf in ("kernel", "embedding", "scale", "weight") if hasattr(layer, leaf))
    return leaf, getattr(layer, leaf)
