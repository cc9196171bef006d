"""Error metrics of one tensor against another: FP64 sums, slab by slab, behind SQNR, cosine and rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from ..arrays.frameworks import FLOATS, dtype_name, ops_of
from ..arrays.ops import NUMPY
from ..codecs import BF16, Codec
from ..dispatch import calls
from ..error_metrics import NOTHING, ErrorMetrics
from ..errors import ShapeError, UnsupportedError
from ..layouts import Shape
from ..tensors.components import components, part_grids, words
from ..tensors.grids import packing, whole_unit
from ..tensors.tensor import ScaledTensor, scaled, with_parts
from .reference import pack

#: Elements processed at a time. It bounds memory and does not affect results.
SLAB = 1 << 20

#: A range of a tensor's matrices, and a range of their rows.
Slab = tuple[slice, slice]


class Source:
    """A floating tensor, plain or scaled, read by slabs.

    Leading axes are flattened into one: a slab is a range of matrices, and a range of their rows.
    x: a NumPy array of floats, or of the bit patterns of BF16 if `bf16`; or a ScaledTensor of NumPy arrays.
    """

    def __init__(self, x: Any, bf16: bool = False) -> None:
        self.shape: Shape = tuple(x.shape)
        self._bf16, self._array, self._scaled = bf16, None, None
        self.unit: int | None = 1
        if isinstance(x, ScaledTensor):
            self._scaled = x.reshape(stacked(self.shape)) if x.ndim > 2 else x
            self.unit = _row_unit(self._scaled)
        else:
            self._array = x.reshape(stacked(self.shape))

    def values(self, slab: Slab) -> np.ndarray:
        """The values as FP32 (FP64 unchanged), with three axes."""
        if self._scaled is None:
            assert self._array is not None
            piece = self._read(self._array[slab])
            if piece.dtype == np.float64:
                return piece
            return BF16.read(NUMPY, piece) if self._bf16 else NUMPY.f32(piece)
        return self._decoded(self._piece(self._scaled, slab))

    def limits(self, slab: Slab) -> tuple[np.ndarray, np.ndarray] | None:
        """The magnitudes, below and above, beyond which each element of the slab saturates; None for a plain tensor."""
        if self._scaled is None:
            return None
        piece = self._piece(self._scaled, slab)
        (lowest, below), (highest, above) = _ends(piece.recipe.format.element)
        low, high = (self._decoded(_of_one_code(piece, code)) for code in (lowest, highest))
        with np.errstate(over="ignore", invalid="ignore"):  # beyond FP32 nothing saturates
            ends = low - (high * below - low * below), high + (high * above - low * above)
        return np.minimum(*ends), np.maximum(*ends)  # a negative scale swaps the two

    def _read(self, part: np.ndarray) -> np.ndarray:
        """A part of an array, in memory; for sources whose arrays are not."""
        return part

    def _piece(self, st: ScaledTensor, slab: Slab) -> ScaledTensor:
        st = st[slab] if st.ndim == 3 else st[slab[1]] if st.ndim == 2 else st
        parts = {name: self._read(part) for name, part in components(st).items()}
        return ScaledTensor.from_parts(recipe=st.recipe, layout=st.layout, axis=st.axis, padding=st.padding, **parts)

    def _decoded(self, st: ScaledTensor) -> np.ndarray:
        return calls.dequantize(st).reshape(stacked(st.shape))


def metrics(reference: Any, quantized: Any) -> ErrorMetrics:
    """`breccia.metrics`."""
    x, y = _source("reference", reference), _source("quantized", quantized)
    if x.shape != y.shape:
        raise ShapeError(
            f"metrics compares tensors of one shape; reference has {x.shape}, quantized {y.shape}.",
            reference=x.shape,
            quantized=y.shape,
        )
    return measure(x, y)


def _source(name: str, x: Any) -> Source:
    """An array or ScaledTensor of any framework, read as NumPy arrays."""
    x = scaled(x)
    if isinstance(x, ScaledTensor):
        x = x.to_plain()
        return Source(with_parts(x, words(x)))
    ops, dtype = ops_of(x, name), dtype_name(x)
    if dtype not in (*FLOATS, "float64"):
        raise UnsupportedError(f"metrics compares ScaledTensors and floating arrays; {name} is {dtype}.", found=dtype)
    return Source(ops.to_numpy(x), dtype == "bfloat16")


def slabs(shape: Shape, *units: int | None) -> Iterator[Slab]:
    """Slabs that cover a tensor, in C order, of about `SLAB` elements and a multiple of `units` rows; one if a unit is None."""
    matrices, rows, columns = stacked(shape)
    if None in units or matrices * rows * columns == 0:
        yield slice(0, matrices), slice(0, rows)
        return
    unit = math.lcm(*(u for u in units if u))
    across = max(1, SLAB // max(1, rows * columns))
    down = max(1, SLAB // (unit * columns)) * unit
    for i in range(0, matrices, across):
        for j in range(0, rows, down):
            yield slice(i, min(i + across, matrices)), slice(j, min(j + down, rows))


def measure(x: Source, y: Source) -> ErrorMetrics:
    """The error metrics of `y` against `x`, of the same shape."""
    pieces = slabs(x.shape, x.unit, y.unit)
    return sum((_error_metrics(x.values(slab), y.values(slab), y.limits(slab)) for slab in pieces), NOTHING)


def _error_metrics(x: np.ndarray, y: np.ndarray, limits: tuple[np.ndarray, np.ndarray] | None) -> ErrorMetrics:
    clipped = np.zeros(x.shape, bool)
    with np.errstate(invalid="ignore"):  # NaN exceeds no limit
        if limits is not None:
            low, high = limits
            clipped = ((x < low) | (x > high)) & (low < high)
    nonzero = x != 0
    p, q = (a.astype(np.float64).reshape(-1) for a in (x, y))
    with np.errstate(over="ignore", invalid="ignore"):  # FP64 squares overflow, 0 * Inf is invalid
        e = p - q
        sums = {"signal": float(p @ p), "noise": float(e @ e), "dot": float(p @ q), "energy": float(q @ q)}
    return ErrorMetrics(
        count=x.size,
        **sums,
        max_error=float(np.abs(e).max(initial=0.0)),
        nonzero=int(nonzero.sum()),
        flushed=int((nonzero & (y == 0) & ~clipped).sum()),
        bounded=0 if limits is None else x.size,
        clipped=int(clipped.sum()),
        bad=int((~np.isfinite(x)).sum()),
        bad_after=int((~np.isfinite(y)).sum()),
    )


def stacked(shape: Shape) -> tuple[int, int, int]:
    """`shape` as matrices, rows and columns."""
    *lead, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]
    return math.prod(lead), rows, columns


def _row_unit(st: ScaledTensor) -> int | None:
    """The number of rows that share scales or bytes; None for a tensor without rows."""
    return whole_unit(part_grids(st).values(), st.ndim - 2) if st.ndim > 1 else None


@cache
def _ends(codec: Codec) -> tuple[tuple[int, np.float32], tuple[int, np.float32]]:
    """The codes of the least and the largest value, each with half of the adjacent step, as a fraction of the whole range."""
    values = sorted((codec.value(code), code) for code in range(1 << codec.bits) if math.isfinite(codec.value(code)))
    distinct = sorted({value for value, _ in values})
    steps = distinct[1] - distinct[0], distinct[-1] - distinct[-2]
    below, above = (np.float32(step / 2 / (distinct[-1] - distinct[0])) for step in steps)
    return (values[0][1], below), (values[-1][1], above)


def _of_one_code(st: ScaledTensor, code: int) -> ScaledTensor:
    """The tensor with every code replaced by `code`, under the same scales."""
    codec = st.recipe.format.element
    group = pack(NUMPY, np.full((1, packing(codec)[0]), code, np.int32), codec).reshape(-1).astype(np.uint8)
    length = st.data.shape[st.axis]
    line = np.tile(group, -(-length // group.size))[:length]
    data = np.broadcast_to(line if st.axis == -1 else line[:, None], st.data.shape)
    parts = (data, st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis)
    return ScaledTensor.from_parts(*parts, padding=st.padding)
