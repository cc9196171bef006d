"""What serves NumPy, on torch's memory: parts of CPU tensors are seen as arrays, and results as tensors, without a copy.

Tensors that have no memory of their own to look at (fakes, those under functorch transforms, subclasses) take the generic
algorithm.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import numpy as np
import torch

from breccia import api
from breccia.frameworks import output_dtype
from breccia.kernels import reference
from breccia.recipes import ScalingRecipe
from breccia.tensor import Meaning, ScaledTensor, held

from .ops import PLAIN, TORCH, need_dense, wrapped

Array = Any


def outside_graphs(kernel: Any) -> Any:
    """A kernel that Dynamo does not look into: where `enable_compile` has not been called, a verb breaks the graph."""

    @wraps(kernel)
    def called(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nobody compiles, and loading it takes a second
            return kernel(*arguments, **options)
        disabled = getattr(kernel, "_disabled", None)
        if disabled is None:
            disabled = kernel._disabled = torch.compiler.disable(kernel)
        return disabled(*arguments, **options)

    return called


@outside_graphs
def cast(
    x: Array, recipe: ScalingRecipe, *, scale: Any = None, out: ScaledTensor | None = None, **options: Any
) -> ScaledTensor:
    """`reference.cast` by whatever serves NumPy's arrays."""
    supplied = isinstance(scale, torch.Tensor)
    if not _plain(x) or (supplied and not _plain(scale)) or (out is not None and not _takes(out, recipe)):
        return reference.cast(x, recipe, scale=scale, out=out, **options)
    reference.check_cast(x, recipe)
    options["scale"] = _array(scale) if supplied else scale
    if out is None:
        return _tensors(api.cast(_floats(x), recipe, **options))
    api.cast(_floats(x), recipe, out=_arrays(out), **options)
    return out


@outside_graphs
def dequantize(st: ScaledTensor, *, out_dtype: Any = "float32", out: Array | None = None) -> Array:
    """`reference.dequantize` by whatever serves NumPy's arrays."""
    name = output_dtype(out_dtype)
    if not _viewable(st) or (out is not None and not _plain(out)):
        return reference.dequantize(st, out_dtype=name, out=out)
    if name == "bfloat16":  # which NumPy lacks
        return reference.result(TORCH, dequantize(st), name, out)
    if out is None:
        return torch.from_numpy(api.dequantize(_arrays(st), out_dtype=name))
    api.dequantize(_arrays(st), out_dtype=name, out=_array(out))
    return out


@outside_graphs
def requantize(st: ScaledTensor, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    """`reference.requantize` by way of the verbs here."""
    return reference.requantized(cast, dequantize, st, recipe, **options)


# ------------------------------------------------------------------------------------------------ the same memory


def _plain(x: Array) -> bool:
    """Has `x` memory that NumPy can look at?"""
    if type(x) not in PLAIN or x.device.type != "cpu" or wrapped(x):
        return False
    need_dense(x)
    return True


def _viewable(st: Any) -> bool:
    return isinstance(st, ScaledTensor) and all(map(_plain, held(st).values()))


def _takes(out: Any, recipe: ScalingRecipe) -> bool:
    """Can the kernel write into `out`? It sees bytes, which do not tell float8 from uint8."""
    return _viewable(out) and {name: part.dtype for name, part in held(out).items()} == _dtypes(recipe)


def _floats(x: Array) -> np.ndarray:
    """FP32 or FP16; BF16, which NumPy lacks, as FP32."""
    x = x.detach().resolve_neg()  # an imaginary part may be its negative, by a bit that NumPy does not know
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def _array(part: Array) -> np.ndarray:
    """A stored part: float8 as bytes, bfloat16 as bit patterns, others as they are."""
    part = part.detach()
    if part.dtype == torch.bfloat16:
        return part.view(torch.uint16).numpy()
    return (part.view(torch.uint8) if part.dtype.is_floating_point and part.itemsize == 1 else part).numpy()


def _arrays(st: ScaledTensor) -> ScaledTensor:
    parts = {name: _array(part) for name, part in held(st).items()}
    return Meaning.of(st).assembled(**parts)


def _tensors(st: ScaledTensor) -> ScaledTensor:
    """The result of a NumPy kernel, in the dtypes that torch stores its codecs in."""
    dtypes = _dtypes(st.recipe)
    parts = {name: _tensor(part, dtypes[name]) for name, part in held(st).items()}
    return Meaning.of(st).assembled(**parts)


_known: dict[object, dict[str, torch.dtype]] = {}


def _dtypes(recipe: ScalingRecipe) -> dict[str, torch.dtype]:
    """What torch stores the parts of a cast in."""
    found = _known.get(recipe.identity)
    if found is None:
        found = _known[recipe.identity] = {name: getattr(torch, d) for name, d in TORCH.dtypes(recipe.format).items()}
    return found


def _tensor(part: np.ndarray, dtype: torch.dtype) -> Array:
    found = torch.from_numpy(np.asarray(part))
    return found if found.dtype == dtype else found.view(dtype)
