"""What a kernel makes of a weight, once, and keeps with the memory of its codes: freed with them, renewed when it changes.

It is a second copy of the weight, in the order that another library wants; the logger "breccia" says so (INFO) when it is made.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from breccia import ScaledTensor, UnsupportedError

T = TypeVar("T")
_log = logging.getLogger("breccia")
#: The attribute of the codes' memory.
_NAME = "_breccia_rearranged"


def rearranged(kernel: str, weight: ScaledTensor, make: Callable[[], T]) -> T:
    """What `make` made of the weight for a kernel. kernel: its name, and what else `make` depends on.

    Tensors made in inference mode count as unchanged, as torch counts no changes of them. Raises UnsupportedError while a CUDA
    graph is captured and nothing is kept yet.
    """
    parts = [part for part in (weight.data, weight.scale, weight.zero_point, weight.global_scale) if part is not None]
    memory = [part.untyped_storage() for part in parts]
    copies: dict[Any, Any] = memory[0].__dict__.setdefault(_NAME, {})
    place = (
        kernel,
        weight.axis,
        weight.recipe.interned_key,
        weight.layout.interned_key,
        *((p.data_ptr(), p.shape) for p in parts),
    )
    versions = [0 if part.is_inference() else part._version for part in parts]
    entry = copies.get(place)
    if entry is not None:
        owners, then, result = entry
        # An address may be used again, by other scales: the memory itself has to be the same.
        if then == versions and all(owner() is now for owner, now in zip(owners, memory[1:], strict=True)):
            return result
    if weight.data.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"matmul: {kernel.split()[0]} rearranges a weight at its first product, which a CUDA graph cannot capture. "
            "Multiply by the weight once before the graph is captured."
        )
    result = make()
    _log.info("%s keeps a copy of a weight %s beside it: %d bytes", kernel, tuple(weight.shape), nbytes(result))
    copies[place] = [weakref.ref(owner) for owner in memory[1:]], versions, result
    return result


def nbytes(parts: Any) -> int:
    """Bytes of the tensors among the parts of a copy."""
    return sum(x.nbytes for x in parts if isinstance(x, torch.Tensor))
