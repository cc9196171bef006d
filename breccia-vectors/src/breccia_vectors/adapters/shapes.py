"""Parts of a case as matrices with the contraction axis last, and back. Everything here moves numbers; nothing rounds one."""

# NumPy is imported by the adapters alone.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..comparing import NotSupported
from ..sets import Case


def plain(case: Case) -> None:
    """Raise NotSupported for a cast that rounds stochastically, is given its scale, or has groups by an index."""
    if case.rounding != "nearest":
        raise NotSupported("stochastic rounding")
    if case.supplied is not None:
        raise NotSupported("supplied scales")
    if case.groups:
        raise NotSupported("groups by an index")


def matrix(case: Case, part: str) -> np.ndarray:
    """A part as (rows, columns), the contraction axis last and the leading axes joined."""
    array = np.asarray(case.array(part))
    if case.axis == -2 and array.ndim >= 2:
        array = array.swapaxes(-1, -2)
    return np.ascontiguousarray(array).reshape(-1, array.shape[-1]) if array.ndim else array


def values(case: Case) -> np.ndarray:
    """The input as an FP32 matrix; FP16 and BF16 are converted exactly."""
    x = matrix(case, "input")
    if case.dtype == "float16":
        return x.view(np.float16).astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32) if case.dtype == "bfloat16" else x


def tensor(case: Case, whole: int = 1) -> Any:
    """The input as a matrix of torch in its own dtype, with zeros up to a multiple of `whole` columns."""
    import torch

    x = padded(matrix(case, "input"), whole)
    of = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return torch.from_numpy(x) if case.dtype == "float32" else torch.from_numpy(x.view(np.int16)).view(of[case.dtype])


def padded(x: np.ndarray, whole: int) -> np.ndarray:
    """The matrix with zeros up to a multiple of `whole` columns."""
    return np.pad(x, ((0, 0), (0, -x.shape[-1] % whole)))


def widened(case: Case, x: np.ndarray, to: int) -> np.ndarray:
    """Blocks of `to` columns, of which the first are a block of `x`, and the others repeat its first.

    Raises NotSupported for a partial last block.
    """
    block = case.format.block[1] or x.shape[1]
    if x.shape[1] % block:
        raise NotSupported("a partial last block")
    of = x.reshape(len(x), -1, block)
    return np.concatenate([of, np.repeat(of[..., :1], to - block, axis=-1)], axis=-1).reshape(len(x), -1)


def narrowed(x: np.ndarray, block: int, to: int) -> np.ndarray:
    """The first `block` columns of each block of `to`: what `widened` was given."""
    return x.reshape(len(x), -1, to)[..., :block].reshape(len(x), -1)


def back(case: Case, x: np.ndarray, part: str = "codes") -> np.ndarray:
    """A matrix with the contraction axis last in the shape of that part of the case, without padding."""
    shape, _ = case.stored(part)
    if not shape:
        return x.reshape(())
    swapped = case.axis == -2 and len(shape) >= 2
    *lead, rows, columns = [1, *shape]
    rows, columns = (columns, rows) if swapped else (rows, columns)
    x = np.asarray(x).reshape(math.prod(lead) * rows, -1)[:, :columns].reshape(*lead, rows, columns)
    return np.ascontiguousarray(x.swapaxes(-1, -2) if swapped else x).reshape(shape)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """One code per byte, of bytes that hold two, the first in the low bits."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def bytes_of(codes: np.ndarray) -> np.ndarray:
    """The inverse of `nibbles`."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
