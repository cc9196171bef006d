"""Error metrics of one tensor against another: FP64 sums, slab by slab, behind SQNR, cosine and rates.

Slabs are shared by threads, and their metrics added in order, so that the number of threads changes no bit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

from ..arrays.frameworks import FLOATS, dtype_name, ops_of
from ..arrays.ops import NUMPY
from ..codecs import Codec
from ..dispatch import calls
from ..dispatch.registry import registry
from ..error_metrics import ErrorMetrics
from ..errors import ShapeError, UnsupportedError
from ..formats import TENSOR
from ..layouts import Shape
from ..locks import cached_property
from ..operations import OPERATIONS
from ..options import FLOAT32, PLAIN, CastOptions, ProductOptions
from ..recipe_bases import ScalingRecipe
from ..targets import load
from ..tensors.components import components, part_grids, unit_of, with_parts, words
from ..tensors.tensor import ScaledTensor, scaled
from . import reference
from .affine import data_of_one_code, with_data
from .threads import at_most, get_num_threads, spread

#: Elements processed at a time. It bounds memory; sums are added slab by slab.
SLAB = 1 << 20
#: The same in each thread, where `of_elements` says another number.
_of_thread = threading.local()
#: Elements that NumPy measures at a time: FP64 copies of them stay in cache.
_CHUNK = 1 << 13

#: All bytes.
_BYTES = np.arange(256, dtype=np.uint8)

#: A range of a tensor's matrices, and a range of their rows.
Slab = tuple[slice, slice]


class Ends(NamedTuple):
    """What bounds the elements of each block: the numbers of its least and largest codes, in FP32.

    each: the elements of a block along a row, of which the last has fewer; 1 where the arrays have an item for each element.
    below, above: half of the step next to each, as a fraction of the whole range. Beyond them an element saturates.
    """

    low: np.ndarray
    high: np.ndarray
    below: np.float32
    above: np.float32
    each: int = 1

    def limits(self, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """The numbers below and above which some of the elements, in C order, saturate; of blocks of one element."""
        low, high = self.low.reshape(-1)[part], self.high.reshape(-1)[part]
        with np.errstate(over="ignore", invalid="ignore"):  # beyond FP32 nothing saturates
            ends = low - (high * self.below - low * self.below), high + (high * self.above - low * self.above)
        return np.minimum(*ends), np.maximum(*ends)  # a negative scale swaps the two


class Rooms:
    """Arrays by name that are written again for each slab: pages of new ones take longer than what fills them."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._codes: dict[str, tuple[Any, np.ndarray]] = {}

    def array(self, name: str, shape: Shape, dtype: Any = np.float32) -> np.ndarray:
        size, array = math.prod(shape) * np.dtype(dtype).itemsize, self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, np.uint8)
        return array[:size].view(dtype).reshape(shape)

    def codes(self, name: str, st: ScaledTensor, code: int) -> np.ndarray:
        """The data of a tensor like `st` in which every code is `code`; that of the slab before, if it is the same."""
        wanted = st.recipe.format.element, code, st.data.shape, st.axis
        known, data = self._codes.get(name, (None, None))
        if known != wanted or data is None:
            data = data_of_one_code(st, code)
            self._codes[name] = wanted, data
        return data


#: From the stored numbers of a slab, those that were decoded, and what bounds these.
Compiled = Callable[[np.ndarray, np.ndarray, Ends], ErrorMetrics]


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

    @property
    def is_plain(self) -> bool:
        """Is it an array of numbers, neither FP64 nor codes and scales?"""
        return self._array is not None and self._array.dtype != np.float64

    @property
    def bits(self) -> int:
        """Bits of an element as it is stored, without scales."""
        if self._scaled is not None:
            return self._scaled.recipe.format.element.bits
        assert self._array is not None
        return 8 * self._array.itemsize

    @property
    def recipe(self) -> ScalingRecipe | None:
        """That of a scaled tensor."""
        return None if self._scaled is None else self._scaled.recipe

    def codes(self, slab: Slab, rooms: Rooms | None = None) -> ScaledTensor | None:
        """A slab of a scaled tensor, in memory, which may be `rooms`; None of a plain one."""
        return None if self._scaled is None else self._piece(self._scaled, slab, rooms)

    def values(self, slab: Slab, rooms: Rooms | None = None) -> np.ndarray:
        """The values as FP32 (FP64 unchanged), with three axes; they may lie in `rooms`."""
        return numbers_of(self.stored(slab, rooms))

    def stored(self, slab: Slab, rooms: Rooms | None = None) -> np.ndarray:
        """The values as they are stored, BF16 as uint16; FP32 of a scaled tensor. They may lie in `rooms`."""
        if self._scaled is None:
            assert self._array is not None
            return self._plain(self._array[slab], rooms)
        return self._decoded(self._piece(self._scaled, slab, rooms), rooms, "stored")

    def decode_into(self, slab: Slab, out: np.ndarray, rooms: Rooms | None = None) -> bool:
        """Write the values of a scaled tensor as FP32 to `out`, of three axes; False for a plain one."""
        if self._scaled is None:
            return False
        piece = self._piece(self._scaled, slab, rooms)
        calls.dequantize(piece, FLOAT32._replace(out=out.reshape(piece.shape)))
        return True

    def takes_one_pass(self, recipe: ScalingRecipe) -> bool:
        """Does a kernel convert codes of a scaled tensor to a recipe under a supplied global scale in one pass?"""
        if self._scaled is None:
            return False
        operation, options = OPERATIONS["requantize"], CastOptions(scale=1.0)
        return registry().table.choose(operation, "numpy", self._scaled, None, recipe, options).kernel.kind == "kernel"

    def requantized(self, slab: Slab, recipe: ScalingRecipe, scale: Any, rooms: Rooms) -> ScaledTensor:
        """A slab of a scaled tensor under another recipe and a supplied global scale, as `breccia.requantize` writes it."""
        assert self._scaled is not None
        return calls.requantize(self._piece(self._scaled, slab, rooms), recipe, CastOptions(scale=scale))

    def bounded(self, slab: Slab, rooms: Rooms, by_blocks: bool = False) -> tuple[np.ndarray, list[Ends]]:
        """The values as they are stored, and what bounds them by each codec of elements: nothing those of a plain tensor.

        by_blocks: whether `Ends` may have items of blocks.
        """
        if self._scaled is None:
            return self.stored(slab), []
        piece = self._piece(self._scaled, slab, rooms)
        fmt = piece.recipe.format
        if fmt.rotation is not None:  # values are sums, which no one code bounds
            return self._decoded(piece, rooms, "decoded"), []
        codecs = [fmt.element] if fmt.alternative is None else [fmt.element, fmt.alternative]
        if by_blocks and (of_blocks := _ends_of_blocks(piece)) is not None:
            return self._decoded(piece, rooms, "decoded"), [of_blocks]
        ends = [self._ends_of(piece, codec, rooms if n == 0 else Rooms()) for n, codec in enumerate(codecs)]
        return self._decoded(piece, rooms, "decoded"), ends

    def rounded(self, slab: Slab, dtype: str) -> np.ndarray:
        """The values in another floating dtype, with three axes."""
        if self._scaled is None:
            return NUMPY.to_float(self.values(slab), dtype)
        piece = self._piece(self._scaled, slab)
        return calls.dequantize(piece, ProductOptions(dtype)).reshape(stacked(piece.shape))

    def compiled(self) -> Compiled | None:
        """The function that measures a slab of this tensor, by the kernel that decodes it; None where NumPy does."""
        if self._scaled is None or self._scaled.recipe.format.features & {"alternative", "rotation"}:
            return None
        errors = registry().table.choose(OPERATIONS["dequantize"], "numpy", self._scaled).kernel.errors
        return None if errors is None else load(errors)

    def _ends_of(self, piece: ScaledTensor, codec: Codec, rooms: Rooms) -> Ends:
        (lowest, below), (highest, above) = _ends(codec)
        high = self._decoded(with_data(piece, rooms.codes("high", piece, highest)), rooms, "high")
        fmt = piece.recipe.format
        if fmt.offset == "none" and fmt.alternative is None and codec.value(lowest) == -codec.value(highest):
            return Ends(np.negative(high, out=rooms.array("low", high.shape)), high, below, above)  # decoding is symmetric
        low = self._decoded(with_data(piece, rooms.codes("low", piece, lowest)), rooms, "low")
        return Ends(low, high, below, above)

    def _plain(self, part: np.ndarray, rooms: Rooms | None = None) -> np.ndarray:
        """A part of a plain tensor; as uint16 if it is BF16."""
        piece = self._read(part, rooms, "read")
        return piece.view(np.uint16) if self._bf16 else piece

    def _read(self, part: np.ndarray, rooms: Rooms | None, name: str) -> np.ndarray:
        """A part of an array, in memory; for sources whose arrays are not. It may lie in `rooms`, under `name`."""
        return part

    def _piece(self, st: ScaledTensor, slab: Slab, rooms: Rooms | None = None) -> ScaledTensor:
        matrices, rows = slab
        layout, parts = st.layout, components(st)
        if (matrices.stop - matrices.start, rows.stop - rows.start) != stacked(self.shape)[:2]:
            if self._rows is not None:
                layout = layout.fitted((rows.stop - rows.start, self.shape[-1]))
                parts = {
                    name: part if along is None else part[rows.start // along : -(-rows.stop // along)]
                    for (name, part), along in zip(parts.items(), self._rows, strict=True)
                }
            else:
                cut = st[slab] if st.ndim == 3 else st[rows]
                layout, parts = cut.layout, components(cut)
        read = {name: self._read(part, rooms, name) for name, part in parts.items()}
        return ScaledTensor.from_parts(recipe=st.recipe, layout=layout, axis=st.axis, padding=st.padding, **read)

    @cached_property
    def _rows(self) -> list[int | None] | None:
        """The rows of each item of a component, None of one without rows; None of what is no matrix with blocks along rows.

        Slabs have whole units of rows, so that nothing else has to be checked when one is cut.
        """
        st = self._scaled
        if st is None or st.ndim != 2 or st.axis != -1 or st.held is not None or st.layout.storage != PLAIN:
            return None
        grids = part_grids(st)
        return [next((along.codes for along in grids[name][:1] if along.axis == 0), None) for name in components(st)]

    def _decoded(self, st: ScaledTensor, rooms: Rooms | None = None, name: str = "") -> np.ndarray:
        options = FLOAT32 if rooms is None else FLOAT32._replace(out=rooms.array(name, st.shape))
        return calls.dequantize(st, options).reshape(stacked(st.shape))


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
    """Slabs that cover a tensor, in C order, of about `SLAB` elements, a multiple of `units` rows; one if a unit is None."""
    matrices, rows, columns = stacked(shape)
    if None in units or matrices * rows * columns == 0:
        yield slice(0, matrices), slice(0, rows)
        return
    unit, size = math.lcm(*(u for u in units if u)), getattr(_of_thread, "slab", None) or SLAB
    across = max(1, size // max(1, rows * columns))
    down = max(1, size // (unit * columns)) * unit
    for i in range(0, matrices, across):
        for j in range(0, rows, down):
            yield slice(i, min(i + across, matrices)), slice(j, min(j + down, rows))


@contextmanager
def of_elements(count: int) -> Generator[None]:
    """Slabs that this thread makes have about so many elements meanwhile."""
    before: int | None = getattr(_of_thread, "slab", None)
    _of_thread.slab = count
    try:
        yield
    finally:
        _of_thread.slab = before


def measure(x: Source, y: Source) -> ErrorMetrics:
    """The error metrics of `y` against `x`, of the same shape."""
    every = items(x, y)
    found: dict[int, ErrorMetrics] = {}

    def work(first: int, end: int) -> None:
        rooms = Rooms()
        for n in range(first, end):
            found[n] = at_most(1, every[n], rooms)

    if _compiled(x, y) is None or len(every) == 1:  # NumPy's short loops would wait for the interpreter, not for each other
        rooms = Rooms()
        return reduce(add, (item(rooms) for item in every))
    spread(work, len(every), get_num_threads())
    return reduce(add, (found[n] for n in range(len(every))))


def items(x: Source, y: Source) -> list[Callable[[Rooms], ErrorMetrics]]:
    """Functions that give the metrics of the slabs of `y` against `x`, whose sum in this order is that of `measure`."""
    compiled = _compiled(x, y)
    return [partial(_of_slab, x, y, slab, compiled) for slab in slabs(x.shape, x.unit, y.unit)]


def _compiled(x: Source, y: Source) -> Compiled | None:
    return y.compiled() or (x.compiled() if y.is_plain else None)


def _of_slab(x: Source, y: Source, slab: Slab, compiled: Compiled | None, rooms: Rooms) -> ErrorMetrics:
    a, (b, ends) = x.stored(slab, rooms), y.bounded(slab, rooms, compiled is not None)
    if compiled is not None:
        if ends:
            return compiled(a, b, ends[0])
        if b.dtype == np.uint16:
            b = np.left_shift(b, 16, out=rooms.array("plain", b.shape).view(np.uint32), dtype=np.uint32).view(np.float32)
        return replace(compiled(a, NUMPY.f32(b), _endless(b.shape)), bounded=0)
    a, b = a.reshape(-1), b.reshape(-1)
    chunks = (slice(start, start + _CHUNK) for start in range(0, max(a.size, 1), _CHUNK))
    return reduce(add, (_error_metrics(numbers_of(a[part]), numbers_of(b[part]), ends, part) for part in chunks))


def _ends_of_blocks(st: ScaledTensor) -> Ends | None:
    """What bounds the blocks of a tensor, by their scales alone; None for a format where more has a part in it."""
    fmt, block = st.recipe.format, st.layout.block()
    plain = fmt.offset == "none" and fmt.alternative is None and "coded_scales" not in fmt.features
    if (
        not plain
        or block == TENSOR
        or block[1] == 1
        or st.axis != -1
        or not st.layout.in_order
        or not 2 <= st.ndim == st.scale.ndim
    ):
        return None
    (lowest, below), (highest, above) = _ends(fmt.element)
    rows, tall = st.shape[-2], block[0] or st.shape[-2]
    of_tensor = None if fmt.global_scale is None else np.asarray(st.global_scale)
    in_bytes = fmt.scale.codec.bits == 8 and st.scale.itemsize == 1 and (of_tensor is None or of_tensor.size == 1)

    def numbers(code: int) -> np.ndarray:
        value = np.full((1,) * st.ndim, fmt.element.value(code), np.float32)
        scale = _BYTES.view(st.scale.dtype).reshape(*(1,) * (st.ndim - 1), -1) if in_bytes else st.scale
        number = reference.apply_scale(NUMPY, value, scale, fmt, fmt.scale)
        if of_tensor is not None:
            each = of_tensor.reshape(*of_tensor.shape, *(1,) * (st.ndim - of_tensor.ndim))
            number = reference.apply_scale(NUMPY, number, each, fmt, fmt.global_scale)
        if in_bytes:  # the numbers of all scales that there are, which are fewer than blocks
            number = number.reshape(-1).take(st.scale.view(np.uint8), mode="clip")
        return number if tall == 1 else number.repeat(tall, -2)[..., :rows, :]

    with np.errstate(all="ignore"):
        high = numbers(highest)
        symmetric = fmt.element.value(lowest) == -fmt.element.value(highest)
        low = -high if symmetric else numbers(lowest)
    return Ends(low, high, below, above, block[1] or st.shape[-1])


def _endless(shape: Shape) -> Ends:
    """Of numbers that nothing bounds."""
    every = np.broadcast_to(np.float32(np.inf), shape)
    return Ends(-every, np.ascontiguousarray(every), np.float32(0), np.float32(0))


def _error_metrics(x: np.ndarray, y: np.ndarray, ends: list[Ends], part: slice) -> ErrorMetrics:
    clipped = np.zeros(x.shape, bool)
    with np.errstate(invalid="ignore"):  # NaN exceeds no limit
        if ends:
            low, high = _limits(ends, part)
            clipped = ((x < low) | (x > high)) & (low < high)
    nonzero = x != 0
    p, q = (a.astype(np.float64) for a in (x, y))
    with np.errstate(over="ignore", invalid="ignore"):  # FP64 squares overflow, 0 * Inf is invalid
        e = p - q
        sums = {"signal": float(p @ p), "noise": float(e @ e), "dot": float(p @ q), "energy": float(q @ q)}
    return ErrorMetrics(
        count=x.size,
        **sums,
        max_error=float(np.abs(e).max(initial=0.0)),
        nonzero=int(nonzero.sum()),
        flushed=int((nonzero & (y == 0) & ~clipped).sum()),
        bounded=x.size if ends else 0,
        clipped=int(clipped.sum()),
        bad=int((~np.isfinite(x)).sum()),
        bad_after=int((~np.isfinite(y)).sum()),
    )


def _limits(ends: list[Ends], part: slice) -> tuple[np.ndarray, np.ndarray]:
    """The numbers below and above which elements saturate: the wider range, where a format has two codecs of elements."""
    (low, high), *others = (each.limits(part) for each in ends)
    for other in others:  # in its blocks, codes of the other codec reach less far
        wider = other[1] - other[0] > high - low
        low, high = (np.where(wider, *pair) for pair in zip(other, (low, high), strict=True))
    return low, high


def numbers_of(stored: np.ndarray) -> np.ndarray:
    """FP32 numbers of FP32, FP16, or BF16 as uint16; FP64 as it is."""
    if stored.dtype == np.uint16:
        return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    return stored if stored.dtype == np.float64 else NUMPY.f32(stored)


def stacked(shape: Shape) -> tuple[int, int, int]:
    """`shape` as matrices, rows and columns."""
    *lead, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]
    return math.prod(lead), rows, columns


def _row_unit(st: ScaledTensor) -> int | None:
    """The number of rows that share scales or bytes; None for a tensor without rows."""
    return unit_of(st, part_grids(st), st.ndim - 2) if st.ndim > 1 else None


@cache
def _ends(codec: Codec) -> tuple[tuple[int, np.float32], tuple[int, np.float32]]:
    """The codes of the least and the largest value, each with half of the adjacent step, as a fraction of the whole range."""
    values = sorted((codec.value(code), code) for code in range(1 << codec.bits) if math.isfinite(codec.value(code)))
    distinct = sorted({value for value, _ in values})
    steps = distinct[1] - distinct[0], distinct[-1] - distinct[-2]
    below, above = (np.float32(step / 2 / (distinct[-1] - distinct[0])) for step in steps)
    return (values[0][1], below), (values[-1][1], above)
