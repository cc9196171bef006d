"""Embeddings whose weight is quantized, because an output layer that shares it multiplies by its codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import breccia
from breccia import ScaledTensor, ShapeError, UnsupportedError
from breccia.backend import PARTS, PLAIN, TENSOR

from .nn import ScaledWeight


class ScaledTable(ScaledWeight):
    """The quantized weight of an `nn.Embedding`, of shape (num_embeddings, embedding_dim), and of the output layers tied to it.

    It is where the embedding had its parameter, so that the forward function of the embedding, or of a subclass, looks rows up
    in it. Only these rows are decoded, in `dtype`. They take no gradient. The tensor stays in plain storage.

    Raises ShapeError unless the tensor is a matrix with blocks along its rows, UnsupportedError for another storage than the
    plain one, and for blocks of several rows.

        >>> import torch
        >>> from breccia_torch.tables import ScaledTable, put_table
        >>> embedding = torch.nn.Embedding(100, 64)
        >>> put_table(embedding, ScaledTable(breccia.cast(embedding.weight.detach(), "int8,group_size=32")))
        >>> embedding(torch.tensor([[3, 7]])).shape
        torch.Size([1, 2, 64])
    """

    #: What is asked of an embedding's weight.
    requires_grad: bool = False

    def __init__(self, tensor: ScaledTensor) -> None:
        super().__init__(tensor)
        if tensor.ndim != 2 or tensor.axis != -1:
            raise ShapeError(
                f"an embedding has a weight of shape (num_embeddings, embedding_dim) with blocks along the last axis; "
                f"got shape {tensor.shape} and axis {tensor.axis}.",
                shape=tensor.shape,
            )
        parts = parts_with_rows(tensor)
        if parts is None or tensor.storage != PLAIN:
            raise UnsupportedError(
                f"an embedding looks single rows up, and {tensor.recipe.spec} in storage {tensor.storage!r} has blocks of "
                "several: use blocks of one row in plain storage, or leave the embedding in high precision.",
                recipe=tensor.recipe.spec,
            )
        self._with_rows = parts

    def looked_up(self, positions: Tensor) -> Tensor:
        """The rows at `positions`, integers of any shape, in `dtype`. Raises IndexError for one that is out of range."""
        flat = positions.reshape(-1)
        held = [self._buffers[name] for name in PARTS]
        data, scale, zero_point, global_scale = [
            _rows(part, flat) if part is not None and name in self._with_rows else part
            for name, part in zip(PARTS, held, strict=True)
        ]
        rest = (zero_point, global_scale, self.axis, self.padding)
        rows: Any = ScaledTensor.from_parts(data, scale, self.recipe, self.layout, *rest)
        return breccia.dequantize(rows, out_dtype=self.dtype).reshape(*positions.shape, rows.shape[1])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding:
            named = dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {})
            if isinstance(named["weight"], ScaledTable) and named.get("max_norm") is None:
                return named["weight"].looked_up(named["input"])
        return super().__torch_function__(func, types, args, kwargs)


#: The first arguments of `embedding`, which TorchDynamo passes by their places.
_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm")


def _rows(part: Tensor, positions: Tensor) -> Tensor:
    """Those of a component: as bytes where it has one for each number, since not every function of torch takes float8."""
    words = part.view(torch.uint8) if part.itemsize == 1 else part
    return words.index_select(0, positions).view(part.dtype)


def parts_with_rows(tensor: ScaledTensor) -> frozenset[str] | None:
    """The components of a matrix that have a row for each of its rows; None where a block has several rows."""
    block = tensor.layout.block(tensor.axis)
    if block == TENSOR:
        return frozenset({"data"})
    return frozenset({"data", "scale", "zero_point"}) if block[0] == 1 else None


def can_look_up(module: nn.Module) -> bool:
    """Whether the module is an embedding with a parameter that it does not change itself."""
    return isinstance(module, nn.Embedding) and module.max_norm is None and "weight" in module._parameters  # pyright: ignore[reportPrivateUsage]


def put_table(module: nn.Module, table: ScaledTable) -> None:
    """Give an embedding a quantized weight in place of its parameter."""
    if "weight" in module._parameters:  # pyright: ignore[reportPrivateUsage]
        del module.weight
    module.weight = table
