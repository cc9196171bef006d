"""The NumPy kernels with compiled microkernels: the same chunks, threads and scales; amax, codes and packing in C."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np

from breccia import Codec, ErrorMetrics, Integer, Minifloat, ScaledTensor, ScalingRecipe
from breccia.backend import DEFAULT, F32_INF, FLOAT32, CastOptions, ProductOptions, threads
from breccia.internal import Blocks, FloatCodes, IntegerCodes, Microkernels, ScaledCodes, TableCodes
from breccia.internal import measuring as numpy_measuring
from breccia.internal import numpy as kernels

from . import decoding, measuring, microkernels, searching


def cast(x: Any, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`breccia.kernels.numpy.casting.cast`, several times faster on large arrays."""
    return kernels.cast(x, recipe, options, _MICROKERNELS)


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """`breccia.kernels.numpy.decoding.dequantize`, faster on small tensors."""
    return kernels.dequantize(st, options, _MICROKERNELS)


def requantize(st: ScaledTensor, recipe: ScalingRecipe, options: CastOptions = DEFAULT) -> ScaledTensor:
    """`breccia.kernels.numpy.requantizing.requantize`, which takes one pass with these microkernels."""
    return kernels.requantize(st, recipe, options, _MICROKERNELS)


def errors(x: Any, y: Any, ends: numpy_measuring.Ends) -> ErrorMetrics:
    """The metrics of decoded numbers as `breccia.kernels.measuring` has them, in one pass; sums are added in another order."""
    if x.dtype not in _STORED:
        x = numpy_measuring.numbers_of(x)
    kind = _STORED[x.dtype]
    x, y, low, high = (np.ascontiguousarray(a) for a in (x, y, ends.low, ends.high))
    columns = y.shape[-1] if ends.each > 1 else max(y.size, 1)
    found = measuring.errors(x, kind, y, low, high, float(ends.below), float(ends.above), columns, ends.each)
    signal, noise, dot, energy, max_error, nonzero, flushed, clipped, bad, bad_after = found
    return ErrorMetrics(
        y.size, signal, noise, dot, energy, max_error, nonzero, flushed, y.size, clipped, bad, bad_after
    )  # fmt: skip


#: The numbers in C of the dtypes that compiled metrics read; uint16 has the bits of BF16.
_STORED = {np.dtype(np.float64): 64, np.dtype(np.float32): 32, np.dtype(np.float16): -16, np.dtype(np.uint16): 16}
#: In the place of the form of scales that have none.
_NO_FORM = (0, 0, 0, 0, 0)
#: The seed of no stochastic rounding.
_NEAREST = (0, 0, 0, 0)


def _amax(source: Any, k: int, amax: Any, across: int = 0) -> None:
    microkernels.amax(source, k, amax, _kind(source), across)


def _extremes(source: Any, k: int, low: Any, high: Any, across: int = 0) -> None:
    microkernels.extremes(source, k, low, high, _kind(source), across)


def _kind(source: Any) -> int:
    """The number of a source's dtype in C."""
    return 32 if source.itemsize == 4 else -16 if source.dtype.kind == "f" else 16


def _scaled(codes: FloatCodes | IntegerCodes | TableCodes, divides: bool = False) -> ScaledCodes:
    match codes:
        case FloatCodes():
            write = partial(_write, microkernels.floats, divides, _floats(codes))
            return partial(_write_without_negative_zeros, codes, write) if codes.codec.fnuz else write
        case IntegerCodes():
            return partial(_write, microkernels.integers, divides, _integers(codes))
        case _:
            fields = (codes.thresholds, codes.values, codes.order, codes.zero)
            return partial(_write, microkernels.tables, divides, fields)


def _floats(codes: FloatCodes) -> tuple[int, int, int, int, int]:
    """The fields of `minifloat` in C."""
    return codes.floor, codes.lift, codes.largest, codes.shift, codes.sign


def _integers(codes: IntegerCodes) -> tuple[float, float, float, int]:
    """The fields of `integer` in C."""
    return codes.low, codes.high, codes.magic, codes.mask


def _write(
    step: Any,
    divides: bool,
    fields: tuple[Any, ...],
    source: Any,
    inverse: Any,
    k: int,
    codes: Any,
    dither: tuple[int, int, int, int] = _NEAREST,
    *,
    across: int = 0,
) -> None:
    step(source, inverse, k, divides, codes, *fields, _kind(source), *dither, across)


def _write_without_negative_zeros(
    writer: FloatCodes, write: ScaledCodes, source: Any, inverse: Any, k: int, codes: Any, *dither: Any, **across: int
) -> None:
    write(source, inverse, k, codes, *dither, **across)
    writer.drop_negative_zeros(codes)


def _shifted(
    codes: IntegerCodes,
    source: Any,
    inverse: Any,
    before: Any,
    after: Any,
    k: int,
    out: Any,
    dither: tuple[int, int, int, int] = _NEAREST,
    *,
    across: int = 0,
) -> None:
    microkernels.shifted(source, inverse, before, after, k, out, *_integers(codes), _kind(source), *dither, across)


def _scales(codes: FloatCodes, amax: Any, divisor: float, inverses: Any, out: Any, inverse: Any, global_scale: float) -> None:
    microkernels.scales(amax, divisor, global_scale, *_floats(codes), inverses, out, inverse)


def _blocks(
    codes: FloatCodes, writer: FloatCodes, source: Any, k: int, divisor: float, inverses: Any, stored: Any, out: Any, by: float
) -> int:
    kind = 32 if type(source) is not np.ndarray else _kind(source)
    return microkernels.blocks(source, k, kind, divisor, by, _floats(writer), inverses, _floats(codes), stored, out)


def _search(
    codes: FloatCodes | IntegerCodes | TableCodes, source: Any, m: int, k: int, amax: Any, found: Any, inverses: Any, *more: Any
) -> None:
    inverse, codec, qmax, global_scale, window, (writer, *scales), weights, first, across = more
    form = _NO_FORM if writer is None else _floats(writer)
    match codes:
        case FloatCodes():
            element = _floats(codes)
        case IntegerCodes():
            element = _integers(codes)
        case _:
            element = (codes.thresholds, codes.values)
    arrays = source, _kind(source), m, k, amax, found, inverses, inverse
    searching.search(*arrays, codec, qmax, global_scale, window, (*scales, form), element, weights, first, across)


def _load(values: Any, dtype: str, columns: int, out: Any) -> None:
    microkernels.load(values, _KINDS[dtype], columns, out)


def _store(values: Any, dtype: str, out: Any) -> None:
    microkernels.store(values, _KINDS[dtype], out)


def _decode(codec: Codec, data: Any, blocks: Blocks, dtype: str, out: Any, stream: bool) -> None:
    count = threads.get_num_threads() if out.size >= _FOR_THREADS else 1
    decoding.decode(*_codes(codec, data, blocks, _KINDS[dtype], stream, count, out))


def _matrix(codec: Codec, data: Any, blocks: Blocks, columns: int) -> Any:
    return decoding.matrix(*_codes(codec, data, blocks, columns))


def _codes(codec: Codec, data: Any, b: Blocks, *more: Any) -> tuple[Any, ...]:
    """The arguments of the functions of decoding.c for a matrix of codes, and then `more`."""
    table, fields = _element(codec)
    none = _NONE
    return (
        data,
        codec.bits,
        table,
        fields,
        b.k,
        b.m,
        b.scale,
        none if b.of_bytes is None else b.of_bytes,
        b.halved,
        none if b.subtracted is None else b.subtracted,
        none if b.added is None else b.added,
        _coded(b.scale_record),
        _coded(b.added_record),
        b.global_scale,
        b.divides,
        *more,
    )


def _coded(record: Any) -> tuple[int, bool, int, int]:
    """How decoding.c is told of records of integers under a float."""
    if record is None:
        return 0, False, 0, 0
    codes = record.levels[1].codec
    return codes.bits, codes.signed, record.counts[1], _KINDS[record.levels[0].codec.dtype]


@lru_cache(maxsize=64)
def _element(codec: Codec) -> tuple[Any, tuple[int, int, int, int, int, float]]:
    """The FP32 numbers of all codes, and the fields of `element` in decoding.c: a form that computes these very numbers."""
    table = np.array(codec.table, np.uint32)
    fields = (_TABLE, 0, 0, 0, 0, 0.0)
    magnitudes = np.arange(1 << codec.bits)
    match codec:
        case Integer() if codec.bits > 4:
            flip, unit = codec.signed << (codec.bits - 1), math.ldexp(1.0, -codec.fraction_bits)
            numbers = (((magnitudes ^ flip) - flip) * unit).astype(np.float32).view(np.uint32)
            fields = (_INTEGER, 0, 0, 0, flip, unit)
        case Minifloat() if codec.bits in (6, 8) and codec.signed and codec.mantissa_bits > 0 and codec.exponent_bits <= 5:
            p, top, unit = codec.mantissa_bits, 1 << (codec.bits - 1), math.ldexp(1.0, 15 - codec.bias)
            infinite, nan = (
                int(np.argmax(np.append(where, True))) for where in (table[:top] >= F32_INF, table[:top] > F32_INF)
            )
            a = magnitudes & (top - 1)
            signs = (magnitudes >= top).astype(a.dtype) << 15
            halves = np.where(a >= nan, 0x7E00, np.where(a >= infinite, 0x7C00, a << (10 - p)) | signs)
            numbers = (halves.astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(unit)).view(np.uint32)
            fields = (_MINIFLOAT, p, infinite, nan, 0, unit)
        case _:
            numbers = table
    exact = numbers.shape == table.shape and (numbers == table).all()
    whole = np.pad(table, (0, max(0, 16 - len(table))))  # codes of fewer bits are looked up as those of 4
    return whole.view(np.float32), fields if exact else (_TABLE, 0, 0, 0, 0, 0.0)


#: How decoding.c makes numbers from codes.
_TABLE, _MINIFLOAT, _INTEGER = range(3)
_NONE = b""
#: Numbers below which one thread decodes as fast as several.
_FOR_THREADS = 1 << 16
#: The numbers of dtypes in C.
_KINDS = {"float32": 32, "bfloat16": 16, "float16": -16}
_MICROKERNELS = Microkernels(
    amax=_amax,
    pairs=microkernels.pairs,
    scaled=_scaled,
    divided=partial(_scaled, divides=True),
    values=microkernels.values,
    load=_load,
    store=_store,
    extremes=_extremes,
    words=microkernels.words,
    sixes=microkernels.sixes,
    eights=microkernels.eights,
    scales=_scales,
    blocks=_blocks,
    shifted=_shifted,
    decode=_decode,
    matrix=_matrix,
    down=microkernels.down,
    search=_search,
    columns=True,
    shares=decoding.pooled(),
    packs=True,
)
