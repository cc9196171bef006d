"""TensorPair: one matrix quantized in both orientations."""

from __future__ import annotations

from typing import NamedTuple

from .tensor import ScaledTensor


class TensorPair(NamedTuple):
    """A matrix quantized with blocks along its last axis, and again along the one before it.

    `breccia.cast_pair` returns it, and bridges use it for tensors with both orientations, such as TransformerEngine's. It is a
    tuple, `rows, columns = pair`, and a pytree in every framework.

    rowwise: blocks along the last axis, for products that sum over it. columnwise: blocks along the one before it.
        Both have the same logical shape.

        >>> pair = breccia.cast_pair(np.ones((64, 128), np.float32), "mxfp8")
        >>> pair.rowwise.axis, pair.columnwise.axis
        (-1, -2)
    """

    rowwise: ScaledTensor
    columnwise: ScaledTensor
