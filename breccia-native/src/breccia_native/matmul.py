"""`matmul` of plain activations and a quantized weight, which is decoded in registers (products.c)."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from breccia import Format, Integer, ScaledTensor
from breccia.backend import FLOAT32, NUMPY, TENSOR, Array, ProductOptions, calls, checks, reference, threads
from breccia.internal import numpy as kernels

from . import columns, products
from .facts import BF16_MODE, FP32, INT8, NO_CODES, SPAN, factor_of, inexact
from .weights import BIAS, EMPTY, KINDS, OFFSETS, SCALES, Weight, fp32, offset_of, plan_of, scale_of, weight_of

#: The kinds of activations by dtype; BF16, whose dtype is of ml_dtypes, is added when it is first seen.
_ACTIVATIONS = {np.dtype(np.float32): KINDS["f32"], np.dtype(np.float16): KINDS["f16"]}
#: Multiply-adds below which one thread is as fast as several.
_FOR_THREADS = 1 << 18
#: Bytes of packed activations that are multiplied at a time, which should stay in a shared cache, and the fewest rows.
_PACKED, _FEWEST = 8 << 20, 56
#: The most rows of activations that are multiplied by codes in (K, N) order as they are; for more, codes are transposed.
_FEW = 32
#: So many rows of activations that any instructions for them are faster than FP32.
_MANY = 1 << 30
#: Codes of a batch or of experts below which NumPy's kernel, which decodes them all, takes less time than `_each` prepares.
_FEW_CODES = 1 << 20
#: Codes of a matrix from which a call of its own costs little beside its product.
_LONG = 1 << 16
_F32 = np.dtype(np.float32)


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`breccia.kernels.numpy.products.matmul`, which also multiplies what is beyond the limits of the compiled kernel."""
    return _matmul(a, b, options)


def matmul_int8(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` of activations rounded to INT8, with a scale of amax / 127 for each group; codes of weights are kept.

    A group has q codes of a row along K: as many as share a scale of the weight, 128 at most. Its activations have errors of up
    to (1/2 + 2^-15) amax / 127 each, which the exact product of rounded activations and decoded weights inherits; to that come
    K / q + 5 roundings in FP32. Groups with an amax below 2^-100 count as zero; one with NaN or Inf gives NaN.

    With biases there is one more rounding, and all of them are relative to the sizes of scaled codes and biases. For up to 4
    rows, AVX-512 VNNI with VBMI also multiplies unsigned bytes and codes of other widths than 4 and 8 bits, in blocks of a
    multiple of 16 that divide K; where they are not multiplied so, activations are not rounded.
    """
    return _matmul(a, b, options, INT8)


def matmul_bf16(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Array:
    """`matmul` of activations rounded to BF16 (errors of up to 2^-8 of each), within its bound for the rounded ones."""
    return _matmul(a, b, options, BF16_MODE)


def grouped_matmul(a: Any, b: Any, offsets: Array, options: ProductOptions = FLOAT32) -> Array:
    """`reference.grouped_matmul`: each group of rows by its own matrix, which is decoded only for groups with rows."""
    checks.check_grouped(a, b, offsets)
    product = None if _has_few_codes(b) else _of_groups(a, b.mT, offsets)
    return kernels.grouped_matmul(a, b, offsets, options) if product is None else _result(product, options)


def _result(product: Array, options: ProductOptions) -> Array:
    """The FP32 product in the dtype and the array that the options name."""
    if options.out is None and options.out_dtype == "float32":
        return product
    with np.errstate(all="ignore"):
        return reference.result(NUMPY, product, options.out_dtype, options.out)


def _matmul(a: Any, b: Any, options: ProductOptions, mode: int | None = None) -> Array:
    bias = options.bias
    if mode is None and _has_few_codes(b if isinstance(b, ScaledTensor) else a):
        return kernels.matmul(a, b, options)
    checks.check_matmul(a, b, bias)
    if isinstance(b, ScaledTensor):
        if isinstance(a, ScaledTensor):
            a = calls.dequantize(a)
        # The kernel adds the bias to numbers that are still in a cache.
        added = None if bias is None else bias if bias.dtype is _F32 else NUMPY.f32(bias)
        product = _of_rows(a, b.mT, mode, added)
    else:
        product = _swapped(_of_rows(_swapped(b), a, mode))
        if product is not None and bias is not None:
            with np.errstate(all="ignore"):
                np.add(product, NUMPY.f32(bias), out=product)
    return kernels.matmul(a, b, options) if product is None else _result(product, options)


def _has_few_codes(st: ScaledTensor) -> bool:
    shape = st.shape
    return len(shape) > 2 and math.prod(shape) < _FEW_CODES


def _swapped(x: Any) -> Any:
    return None if x is None else x.swapaxes(-1, -2)


def _of_rows(x: Array, st: ScaledTensor, mode: int | None = None, bias: Array | None = None) -> Array | None:
    """(..., M, K) times the transpose of (..., N, K) in FP32; None where numbers are beyond the kernel's limits.

    mode: how activations are rounded; None for a mode that does not round them. bias: (N,) FP32 numbers to add.
    """
    n, k = st.shape[-2:]
    if st.ndim == 2:
        product = _product(x if x.ndim == 2 else x.reshape(-1, k), st, n, k, mode, bias)
        return product if product is None or x.ndim == 2 else product.reshape(*x.shape[:-1], n)
    lead, m = np.broadcast_shapes(x.shape[:-2], st.shape[:-2]), x.shape[-2]
    product = np.empty((*lead, m, n), np.float32)
    if (weights := _matrices(st)) is not None:
        x, mode = _as_read(x, weights, mode)
        jobs = [np.full(math.prod(lead), m), _addresses(x, lead), *weights.at(lead), _addresses(product, lead)]
        return product if _each(x, weights, jobs, product, mode, bias) else None
    if n * k < _LONG:
        return None
    x = np.broadcast_to(x, (*lead, *x.shape[-2:]))
    first = len(lead) - (st.ndim - 2)
    for index in np.ndindex(*lead):
        part = st[tuple(min(i, length - 1) for i, length in zip(index[first:], st.shape, strict=False))]
        part_product = _product(x[index], part, n, k, mode, bias)
        if part_product is None:
            return None
        product[index] = part_product
    return product


def _of_groups(x: Array, st: ScaledTensor, offsets: Array) -> Array | None:
    """Groups of rows of (M, K), each times the transpose of its matrix of (E, N, K), and zeros beyond; None as above."""
    count, n, k = st.shape
    product = np.zeros((len(x), n), np.float32)
    starts, ends = kernels.group_bounds(offsets, len(x))
    chosen = np.flatnonzero(ends > starts)
    if not len(chosen):
        return product
    if (weights := _matrices(st)) is not None:
        x, _ = _as_read(x, weights, None)
        rows, start = (ends - starts)[chosen], starts[chosen]
        of_rows = [_address(a) + start * (a.itemsize * a.shape[-1]) for a in (x, product)]
        jobs = [rows, of_rows[0], *(part[chosen] for part in weights.at((count,))), of_rows[1]]
        return product if _each(x, weights, jobs, product, None, None) else None
    if n * k < _LONG:
        return None
    for group in chosen.tolist():
        part = slice(starts[group], ends[group])
        part_product = _product(x[part], st[group], n, k, None, None)
        if part_product is None:
            return None
        product[part] = part_product
    return product


def _product(x: Array, st: ScaledTensor, n: int, k: int, mode: int | None, bias: Array | None) -> Array | None:
    """(M, K) times the transpose of the matrix `st`, (N, K), plus the bias."""
    if mode is None and (product := _by_columns(x, st, n, k)) is not None:
        return product if bias is None else np.add(product, bias, out=product)
    m, weight, rows = len(x), weight_of(st, n, k), _rows_at_once(k)
    product, mode = np.empty((m, n), np.float32), _mode(x, m, st, weight, k, mode)
    if mode == BF16_MODE and not products.fast(BF16_MODE, *_about(weight, k), _MANY):
        x, mode = _rounded_to_bf16(x), FP32  # emulated instructions would take 30 times as long
    if m > rows:  # parts of about as many rows each are multiplied in the same way
        rows = -(-m // -(-m // rows))
    for start in range(0, m, rows):
        part, to = (x, product) if m <= rows else (x[start : start + rows], product[start : start + rows])
        if not (
            (mode != FP32 and _multiplied(part, weight, to, k, mode, bias)) or _multiplied(part, weight, to, k, FP32, bias)
        ):
            return None
    return product


def _rows_at_once(k: int) -> int:
    """How many rows of activations are multiplied together."""
    return max(_PACKED // (4 * k), _FEWEST)


def _mode(x: Array, rows: int, st: ScaledTensor, weight: Weight, k: int, mode: int | None) -> int:
    """How `rows` rows of activations are rounded: as asked for, where the kernel supports it for that weight."""
    if mode is None:  # BF16 activations are not rounded to BF16, so that mode keeps the bound of FP32 accumulation
        exact = x.dtype.name == "bfloat16" and products.fast(BF16_MODE, *_about(weight, k), rows)
        mode = BF16_MODE if exact else FP32
    if mode == INT8 and _has_few(weight):
        return mode if inexact(mode, st.recipe.format) is None and products.fast(mode, *_about(weight, k), rows) else FP32
    return mode if mode == FP32 or _supports(st, weight, mode, k) else FP32


def _about(weight: Weight, k: int) -> tuple[int, int, int, int, int, int]:
    """What `products.fast` asks of a weight."""
    return weight.kind, weight.width, weight.scale_kind, weight.role, weight.block, k


def _has_few(weight: Weight) -> bool:
    """Whether only a few rows of activations are rounded to INT8 for a weight: one of unsigned bytes, or of some widths."""
    return weight.kind == KINDS["u8"] or weight.width not in (4, 8)


def _rounded_to_bf16(x: Array) -> Array:
    """Activations rounded to BF16, to the nearest and to even, in FP32."""
    if x.dtype.name == "bfloat16":
        return x
    x = NUMPY.f32(x)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000
    return np.where(np.isnan(x), x, rounded.view(np.float32))


class Prepared(NamedTuple):
    """Products of arrays of the same kinds and sizes as earlier ones, by the addresses of their memory.

    shape: that of the product. threads: whether more than one is faster. format: of the weight.
    """

    call: Any
    shape: tuple[int, ...]
    threads: bool
    factor: float
    format: Format

    def __call__(
        self,
        x: int,
        data: int,
        scale: int,
        offset: int,
        bias: int,
        global_scale: float | None,
        threads: int,
        product: Any = None,
    ) -> Any:
        """The product of what lies at these addresses, 0 for none; None for numbers beyond the kernel's limits.

        product: where it is written, an array or the address of as many FP32 numbers, which is then returned.
        """
        if product is None:
            product = np.empty(self.shape, np.float32)
        factor = self.factor if global_scale is None else fp32(factor_of(self.format, global_scale))
        count = threads if self.threads else 1
        return product if products.repeat(self.call, x, data, scale, offset, bias, factor, count, product) else None

    def keep(self, table: Any, global_scale: float | None, dtype: int) -> Any:
        """What lets the operator of layers in torch's graphs repeat this product as long as the registry has that table.

        None if the operator has not asked for it on this thread. dtype: torch's number of that of the operator's result.
        """
        factor = self.factor if global_scale is None else fp32(factor_of(self.format, global_scale))
        return products.keep(self.call, table, factor, self.threads, dtype)


def prepared_int8(x: Array, b: ScaledTensor, bias: Array | None) -> Prepared | None:
    """`prepared` for `matmul_int8`."""
    return prepared(x, b, bias, INT8)


def prepared(x: Array, b: ScaledTensor, bias: Array | None, mode: int | None = None) -> Prepared | None:
    """What multiplies arrays like `x` by weights like the matrix `b` again; None where `matmul` copies one of them first."""
    st = b.mT
    n, k = st.shape
    parts = [x, st.data, st.scale, *(part for part in (st.zero_point, bias) if part is not None)]
    if x.ndim < 2 or not all(part.flags.c_contiguous and part.flags.aligned for part in parts):
        return None
    rows, weight = x.reshape(-1, k), weight_of(st, n, k)
    m, kind = len(rows), _kind_of(x)
    as_they_are = (
        kind is not None
        and (bias is None or bias.dtype is _F32)
        and (st.zero_point is None or st.zero_point.dtype in OFFSETS)
        and (st.scale.itemsize == 1 or st.scale.dtype in SCALES)
    )
    if not as_they_are or m > _rows_at_once(k):
        return None
    mode = _mode(rows, m, st, weight, k, mode)
    bits = rows.view(np.uint16) if kind == KINDS["bf16"] else rows
    product, added = np.empty((m, n), np.float32), EMPTY if bias is None else bias
    call = products.prepare(bits, kind, m, n, k, mode, *weight, product, added, 1)
    return Prepared(call, (*x.shape[:-1], n), m * n * k >= _FOR_THREADS, weight.factor, st.recipe.format)


def _kind_of(x: Array) -> int | None:
    """The number of the kind of activations; None for a dtype that is converted first."""
    kind = _ACTIVATIONS.get(x.dtype)
    if kind is None and x.dtype.name == "bfloat16":
        kind = _ACTIVATIONS[x.dtype] = KINDS["bf16"]
    return kind


def _by_columns(x: Array, st: ScaledTensor, n: int, k: int) -> Array | None:
    """`_product` of a few rows by codes whose memory is (K, N), which need no transpose; None for others."""
    data = st.data
    if len(x) > _FEW or data.flags.c_contiguous or not data.T.flags.c_contiguous:
        return None
    plan = plan_of(st)
    if plan.scale_codes != NO_CODES:
        return None
    tall, block = st.layout.block(st.axis)
    shared = (tall, block) == TENSOR or tall is None
    tall, block = n if shared or tall is None else tall, k if block is None else block
    offset, offset_kind = offset_of(st, plan)
    scale, scale_kind = scale_of(st, plan)
    if not columns.supports(plan.kind, plan.role):
        return None
    shape = -(-n // tall), -(-k // block)
    scale, offset = (np.ascontiguousarray(part.reshape(shape).T) if part.size else part for part in (scale, offset))
    x, product = np.ascontiguousarray(NUMPY.f32(x)), np.empty((len(x), n), np.float32)
    factor = plan.factor if st.global_scale is None else factor_of(st.recipe.format, float(st.global_scale))
    call: tuple[Any, ...] = (
        x.reshape(-1),
        len(x),
        k,
        n,
        data.T,
        plan.kind,
        plan.width,
        plan.table,
        scale,
        scale_kind,
        plan.scale_table,
        block,
        tall,
        plan.divides,
        fp32(factor),
        plan.least,
        offset,
        offset_kind,
        plan.role,
        product,
        threads.get_num_threads() if len(x) * n * k >= _FOR_THREADS else 1,
    )
    return product if columns.multiply(*call) else None


def _supports(st: ScaledTensor, w: Weight, mode: int, k: int) -> bool:
    if mode == INT8 and _has_few(w):
        return False
    integers, element = (KINDS["u8"], KINDS["i8"]), st.recipe.format.element
    offsets_fit = w.role in (0, BIAS) or w.offset_kind in integers
    if w.role and mode == BF16_MODE:  # others differ by up to 383, which needs 9 bits
        narrow = isinstance(element, Integer) and element.bits <= 4 and not element.signed
        offsets_fit = offsets_fit and (w.kind == w.offset_kind or narrow)
    return offsets_fit and (w.block >= k or w.block % SPAN == 0) and inexact(mode, st.recipe.format) is None


# -- many matrices ---------------------------------------------------------------------------------------------------


class _Matrices(NamedTuple):
    """Many weights, (..., N, K). first: one of them, and how the kernel reads it. offset: None where there is none.

    parts: codes, scales and offsets, each matrix of them in C order. factors: what broadcasts to one for each matrix.
    """

    first: ScaledTensor
    weight: Weight
    parts: tuple[Array, Array, Array | None]
    factors: Array

    def at(self, lead: tuple[int, ...]) -> list[Array]:
        """For each matrix of the leading axes: the addresses of its codes, scales and offsets, and its factor."""
        zeros = np.zeros(math.prod(lead), np.int64)
        addresses = [zeros if part is None else _addresses(part, lead) for part in self.parts]
        return [*addresses, np.broadcast_to(self.factors, lead).reshape(-1)]


def _matrices(st: ScaledTensor) -> _Matrices | None:
    """What `_each` needs of weights; None for codes in (K, N) order, and for scales that are no matrices."""
    outer, per_tensor = st.ndim - 2, st.layout.block(st.axis) == TENSOR
    plan = plan_of(st)
    (scale, _), (offset, _) = scale_of(st, plan), offset_of(st, plan)
    if st.data.strides[-2] < st.data.strides[-1]:
        return None
    if per_tensor:  # one for each index of the first axes, or for all
        scale, offset = (part.reshape(*part.shape, *(1,) * (st.ndim - part.ndim)) for part in (np.asarray(scale), offset))
    if scale.ndim != st.ndim:
        return None
    first = st[(0,) * outer]
    weight = weight_of(first, *first.shape)
    factors = np.array(weight.factor, np.float32)
    if st.global_scale is not None:
        global_scales = np.asarray(st.global_scale)
        every = [fp32(factor_of(st.recipe.format, g)) for g in global_scales.reshape(-1).tolist()]
        factors = np.array(every, np.float32).reshape(*global_scales.shape, *(1,) * (outer - global_scales.ndim))
    parts = (st.data, scale, None if st.zero_point is None else offset)
    codes, scale, offset = (part if part is None else _matrices_in_order(part) for part in parts)
    return _Matrices(first, weight, (codes, scale, offset), factors)


def _as_read(x: Array, weights: _Matrices, mode: int | None) -> tuple[Array, int | None]:
    """Activations in a dtype and an order that the kernel reads, and how it rounds them."""
    k = x.shape[-1]
    rounds = mode == BF16_MODE and _mode(x, 1, weights.first, weights.weight, k, mode) == BF16_MODE
    if rounds and not products.fast(BF16_MODE, *_about(weights.weight, k), _MANY):
        x, mode = _rounded_to_bf16(x), FP32  # see `_product`
    return _matrices_in_order(x if _kind_of(x) is not None else NUMPY.f32(x)), mode


def _matrices_in_order(a: Array) -> Array:
    """`a`, copied unless each of its matrices is aligned and in C order."""
    one = a[(0,) * (a.ndim - 2)]
    return a if one.flags.c_contiguous and a.flags.aligned else np.array(a, order="C")


def _address(a: Array) -> int:
    return a.__array_interface__["data"][0]


def _addresses(a: Array, lead: tuple[int, ...]) -> Array:
    """The address of each matrix of `a`, whose leading axes broadcast to `lead`."""
    addresses = np.array(_address(a), np.int64)
    for length, stride in zip(lead, np.broadcast_to(a[..., 0, 0], lead).strides, strict=True):
        addresses = np.add.outer(addresses, stride * np.arange(length))
    return addresses.reshape(-1)


def _each(x: Array, weights: _Matrices, jobs: list[Array], product: Array, mode: int | None, bias: Array | None) -> bool:
    """Many products in one call of the kernel, which shares them among threads; False for numbers beyond the limits.

    jobs: for each, its rows, the addresses of activations, codes, scales and offsets, its factor, and the product's address.
    """
    first, weight = weights.first, weights.weight
    n, k = first.shape
    rows, factors = jobs[0], np.ascontiguousarray(jobs[5])
    table = np.stack([*jobs[:5], jobs[6]], axis=1, dtype=np.int64)
    added = None if bias is None else np.require(bias, np.float32, ["C", "A"])
    number = threads.get_num_threads() if int(rows.sum()) * n * k >= _FOR_THREADS else 1
    modes = {m: _mode(x, m, first, weight, k, mode) for m in set(rows.tolist())}
    row, to = x.reshape(-1, k)[:1], product.reshape(-1, n)[:1]
    row, kind = row.view(np.uint16) if x.dtype.name == "bfloat16" else row, _kind_of(x)
    for each in set(modes.values()):
        chosen = np.isin(rows, [m for m in modes if modes[m] == each])
        arguments = table[chosen], factors[chosen], 0 if added is None else _address(added), _rows_at_once(k), number
        for by in dict.fromkeys((each, FP32)):
            call = products.prepare(row, kind, 1, n, k, by, *weight, to, EMPTY, 1)
            if products.each(call, *arguments):
                break
        else:
            return False
    return True


def _multiplied(x: Array, w: Weight, product: Array, k: int, mode: int, bias: Array | None = None) -> bool:
    """Write (M, K) times the transpose of `w`, (N, K), plus the bias to `product`. False for numbers beyond the limits."""
    m, n = product.shape
    kind = _kind_of(x)
    if kind is None:
        x, kind = NUMPY.f32(x), KINDS["f32"]
    if not (x.flags.c_contiguous and x.flags.aligned):
        x = x.copy()
    if kind == KINDS["bf16"]:  # this dtype has no buffer
        x = x.view(np.uint16)
    if bias is None:
        bias = EMPTY
    elif not (bias.flags.c_contiguous and bias.flags.aligned):
        bias = bias.copy()
    number = threads.get_num_threads() if m * n * k >= _FOR_THREADS else 1
    return products.multiply(x, kind, m, n, k, mode, *w, product, bias, number)
