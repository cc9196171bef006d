"""Arrays that exercise every clause of the contract."""

from __future__ import annotations

import numpy as np

from ..arrays.ops import NUMPY
from ..kernels import reference
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor, from_buffer


def wide(shape: tuple[int, ...], seed: int = 0, exponents: int = 60) -> np.ndarray:
    """FP32 normal numbers times 2^uniform(-exponents, exponents) per row, with some zeros of both signs."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.uniform(-exponents, exponents, (*shape[:-1], 1)))
    x = (rng.standard_normal(shape) * scale).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size >= 16:
        flat[rng.integers(0, flat.size, flat.size // 16)] = 0.0
        flat[rng.integers(0, flat.size, flat.size // 32)] = -0.0
    return x


def special_rows(columns: int) -> np.ndarray:
    """Rows that each test one clause of the contract; FP32, shape (rows, columns)."""
    rng = np.random.default_rng(7)
    smooth = rng.standard_normal(columns).astype(np.float32)
    tiny, largest = np.float32(2.0**-126), np.finfo(np.float32).max
    rows = [np.zeros(columns), np.full(columns, -0.0), smooth]
    for value in (np.nan, np.inf, -np.inf, largest, -largest, tiny, 2.0**-127, -(2.0**-149), 448.0, 480.0, 6.0, 7.5):
        row = smooth.copy()
        row[columns // 3] = value
        rows.append(row)
    rows += [smooth * tiny, smooth * np.float32(2.0**-120), np.full(columns, tiny), np.full(columns, largest)]
    rows += [np.abs(smooth) + 10, -np.abs(smooth) - 10, np.full(columns, largest) * np.sign(smooth)]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0], np.float32)
    rows.append(np.resize(ties, columns))
    return np.array(rows, np.float32)


def every_decodable(recipe: ScalingRecipe, scales: int = 300) -> ScaledTensor:
    """Every element code under many scale codes, including NaN and Inf codes that no cast writes; a NumPy tensor.

    All scale codes of 8-bit scales, and of 16-bit scales if `scales` is 2^16; otherwise `scales` random codes.
    """
    fmt = recipe.format
    codes = np.arange(1 << fmt.element.bits, dtype=np.int32)
    m, k = fmt.block
    if fmt.scale_record is not None or fmt.offset_record is not None:
        return _random_records(recipe, scales)
    if fmt.scale.codec.bits == 8:
        stored = np.arange(256, dtype=np.uint8)
    else:
        size = fmt.scale.codec.bits
        random = np.random.default_rng(0).integers(0, 1 << size, scales, dtype=np.uint64)
        patterns = np.arange(1 << size) if scales == 1 << size else random
        stored = NUMPY.store(NUMPY.load(patterns.astype(f"u{size // 8}")), NUMPY.storage(fmt.scale.codec))
    columns = len(codes) if k is None else -(-len(codes) // k) * k
    rows = np.resize(codes, (len(stored) * (m or 1), columns))
    data = reference.pack(NUMPY, rows, fmt.element)
    if m is None:  # one scale per matrix of one row
        data, scale = data[:, None], stored
    else:
        scale = np.repeat(stored[:, None], columns // (k or columns), axis=1)
    zero = None
    if fmt.offset != "none":
        zero = np.resize(np.arange(16, dtype=np.uint8) if fmt.offset == "zero_point" else stored[::-1], scale.shape)
    global_scale = np.float32(0.0173) if fmt.global_scale is not None else None
    shape = (len(stored), 1, columns) if m is None else rows.shape
    return from_buffer(data, scale, recipe, recipe.layout, zero, global_scale, shape=shape)


def _random_records(recipe: ScalingRecipe, rows: int) -> ScaledTensor:
    """Every element code under random records of scales, in which coarse scales are NaN and Inf now and then."""
    fmt, rng = recipe.format, np.random.default_rng(0)
    columns = fmt.block[1] or 1
    codes = np.resize(np.arange(1 << fmt.element.bits, dtype=np.int32), (rows, columns))
    parts = [
        None if (record := fmt.record(name)) is None else rng.integers(0, 256, (rows, record.nbytes), np.uint8)
        for name in _RECORDS
    ]
    scale, zero = parts
    if scale is None:
        values = rng.standard_normal((rows, 1)).astype(np.float32)
        scale = NUMPY.store(fmt.scale.codec.encode(NUMPY, np.abs(values)), NUMPY.storage(fmt.scale.codec))
    global_scale = np.float32(0.0173) if fmt.global_scale is not None else None
    return from_buffer(
        reference.pack(NUMPY, codes, fmt.element), scale, recipe, recipe.layout, zero, global_scale, shape=(rows, columns)
    )


_RECORDS = ("scale", "zero_point")
