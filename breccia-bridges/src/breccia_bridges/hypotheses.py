"""Transformations of codes and scales: what one side of a difference would be if a hypothesis about its cause were true.

Each takes a ScaledTensor whose blocks run along the last axis, and the other side, and yields candidates: numbers that the
other side would have, with what the sentence about the cause names. Codes are transformed slab by slab; only scales are read
as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from breccia import Codec, Format, Level, PerGroupIndex, ScaledTensor
from breccia.backend import BF16, E4M3, E8M0, F16, NUMPY, components, pack, unpack
from breccia.internal import measuring, with_parts

from .measure import FileTensor, Numbers
from .safetensors_file import Shape

Found = dict[str, Any]
Slab = measuring.Slab

#: The components of a tensor, as messages name them.
PART_NAMES = {"data": "codes", "scale": "scales", "global_scale": "global scale", "zero_point": "zero-points"}
#: The columns 0 to 7 in the order of AWQ's words.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
#: What scales of more bits are rounded to, from fine to coarse.
_COARSER = (F16, BF16, E4M3, E8M0)


@dataclass(frozen=True)
class Side:
    """One of two tensors that differ. label: "A" or "B". x: a ScaledTensor, or the array of a plain tensor of that dtype."""

    label: str
    x: ScaledTensor | np.ndarray
    dtype: str = ""

    @property
    def numbers(self) -> FileTensor:
        return FileTensor(self.x, self.dtype)

    @property
    def opposite(self) -> str:
        """The label of the other side."""
        return "A" if self.label == "B" else "B"

    @property
    def scaled(self) -> ScaledTensor | None:
        """The tensor, if it is quantized in blocks along its last axis."""
        return self.x if isinstance(self.x, ScaledTensor) and self.x.axis == -1 else None

    @property
    def mT(self) -> Side:
        return replace(self, x=self.x.mT if isinstance(self.x, ScaledTensor) else np.swapaxes(self.x, -1, -2))


#: Yields what the other side would be.
Candidates = Iterator[tuple[Numbers, Found]]


class _Recoded(FileTensor):
    """A ScaledTensor of which each slab is changed before it is decoded."""

    def __init__(self, st: ScaledTensor, change: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(st)
        self._change = change

    def _piece(self, st: ScaledTensor, slab: Slab, rooms: measuring.Rooms | None = None) -> ScaledTensor:
        piece = super()._piece(st, slab, rooms)
        codec = piece.recipe.format.element
        codes = unpack(NUMPY, piece.data, codec, piece.shape[-1])
        return with_parts(piece, components(piece) | {"data": pack(NUMPY, self._change(codes), codec)})


def values_of(codec: Codec, stored: np.ndarray) -> np.ndarray:
    """The FP32 numbers of stored scales."""
    return codec.read(NUMPY, stored)


def stored_as(codec: Codec, values: np.ndarray) -> np.ndarray:
    """FP32 numbers as scales are stored, rounded to nearest."""
    codes = codec.encode(NUMPY, np.ascontiguousarray(values, np.float32))
    return NUMPY.store(codes, NUMPY.storage(codec)).reshape(np.shape(values))


def _other_parts(st: ScaledTensor, **parts: np.ndarray) -> FileTensor:
    return FileTensor(with_parts(st, components(st) | parts))


def _same_places(x: ScaledTensor, y: ScaledTensor | None) -> bool:
    """Whether the components of `x` fit the form of `y`."""
    if y is None or y.layout != x.layout or y.padding != x.padding:
        return False
    shapes = [{name: part.shape for name, part in components(st).items()} for st in (x, y)]
    return shapes[0] == shapes[1]


def _ordered(x: ScaledTensor, order: tuple[int, ...]) -> FileTensor | None:
    """The codes of each `len(order)` columns in another order; None where they do not divide a row."""
    n = len(order)
    if n < 2 or x.shape[-1] % n:
        return None
    index = list(order)
    return _Recoded(x, lambda codes: codes.reshape(*codes.shape[:-1], -1, n)[..., index].reshape(codes.shape))


def codes_of_bytes(x: ScaledTensor, y: Side) -> Candidates:
    """The codes of each byte in reverse: of 4 bits, the two nibbles are swapped."""
    bits = x.recipe.format.element.bits
    if bits in (1, 2, 4) and (candidate := _ordered(x, tuple(range(8 // bits - 1, -1, -1)))):
        yield candidate, {"bits": bits}


def codes_of_words(x: ScaledTensor, y: Side) -> Candidates:
    """The codes in an order that a library packs them in."""
    orders: dict[str, tuple[int, ...]] = {"each 8 columns are in the order 0, 2, 4, 6, 1, 3, 5, 7": _AWQ}
    for n in (32, x.layout.block()[1] or 0, x.shape[-1]):
        if n % 2 == 0:
            orders[f"each {n} columns have their halves interleaved"] = tuple(i // 2 + i % 2 * (n // 2) for i in range(n))
    for how, order in orders.items():
        if (candidate := _ordered(x, order)) is not None:
            yield candidate, {"how": how}


def codes_shifted(x: ScaledTensor, y: Side) -> Candidates:
    """Integer codes with the other highest bit: unsigned ones, offset by half of their range, as signed."""
    highest = 1 << (x.recipe.format.element.bits - 1)
    yield _Recoded(x, lambda codes: codes ^ highest), {"offset": highest}


def tiles_transposed(x: ScaledTensor, y: Side) -> Candidates:
    """The codes of each square block transposed."""
    rows, columns = x.layout.block()
    if rows is None or rows != columns or rows == 1 or x.ndim < 2 or x.shape[-1] % rows or x.shape[-2] % rows:
        return

    def change(codes: np.ndarray) -> np.ndarray:
        *lead, m, k = codes.shape
        tiles = codes.reshape(*lead, m // rows, rows, k // rows, rows)
        return np.swapaxes(tiles, -1, -3).reshape(codes.shape)

    yield _Recoded(x, change), {"block": f"{rows}x{rows}"}


def scales_reordered(x: ScaledTensor, y: Side) -> Candidates:
    """The scales in another order of memory."""
    if x.scale.ndim < 2 or x.recipe.format.scale_record is not None:
        return
    # Zero-points or biases, which have a place for each scale, may be stored in the same order or not.
    moved = ("scale", "zero_point") if x.zero_point is not None and x.zero_point.shape == x.scale.shape else ("scale",)
    for names in dict.fromkeys((moved, ("scale",))):
        swapped = {name: np.swapaxes(getattr(x, name), -1, -2).reshape(x.scale.shape) for name in names}
        yield _other_parts(x, **swapped), {"how": "transposed: by columns where the other has them by rows"}
    *_, rows, columns = x.scale.shape
    if x.scale.dtype.itemsize == 1 and rows % 128 == columns % 4 == 0 and x.padding == 0 and x.layout.block()[0] == 1:
        swizzled = x.to_storage("swizzle_128x4").scale.reshape(x.scale.shape)
        yield _other_parts(x, scale=swizzled), {"how": "swizzled: in the order of cuBLAS's tiles of 128x4"}


def scales_missing(x: ScaledTensor, y: Side) -> Candidates:
    """Scales of 1, and zero-points or biases of 0."""
    fmt = x.recipe.format
    ones: dict[str, np.ndarray] = {}
    if fmt.scale_record is None:
        ones["scale"] = stored_as(fmt.scale.codec, np.ones(x.scale.shape, np.float32))
    if fmt.global_scale is not None:
        ones["global_scale"] = stored_as(fmt.global_scale.codec, np.ones(x.global_scale.shape, np.float32))
    for name, one in ones.items():
        yield _other_parts(x, **{name: one}), {"part": PART_NAMES[name]}
    if len(ones) > 1:
        yield _other_parts(x, **ones), {"part": "scales and its global scale"}
    if x.zero_point is not None:
        yield _other_parts(x, zero_point=np.zeros_like(x.zero_point)), {"part": _offsets(x)}


def _offsets(x: ScaledTensor) -> str:
    return "biases" if x.recipe.format.offset == "bias" else "zero-points"


def zero_points_shifted(x: ScaledTensor, y: Side) -> Candidates:
    """Integer zero-points less by one, as GPTQ's first version stores them: the largest in place of -1, or not."""
    if x.recipe.format.offset == "zero_point":
        less = x.zero_point - x.zero_point.dtype.type(1)
        mask = x.zero_point.dtype.type((1 << x.recipe.format.element.bits) - 1)
        for zero_point in (less, less & mask):
            yield _other_parts(x, zero_point=zero_point), {}


def _numbers_of(multiplier: np.ndarray, convention: str, qmax: float) -> np.ndarray:
    """Multipliers in a scale convention; of stored ones in that convention, the multipliers, except "amax"."""
    if convention == "amax":
        return multiplier * np.float32(qmax)
    return np.float32(1) / multiplier if convention == "divisor" else multiplier


def _differ_only_in(field: str, a: Format, b: Format) -> bool:
    return all(getattr(a, f.name) == getattr(b, f.name) for f in fields(Format) if f.name != field)


def _levels(fmt: Format) -> dict[str, Level | None]:
    """The levels of a format without records, by their components."""
    return {"global_scale": fmt.global_scale, "scale": fmt.scale}


def scales_in_another_convention(x: ScaledTensor, y: Side) -> Candidates:
    """Scales as multipliers where the other side has divisors or amax: declared so, or not."""
    fmt = x.recipe.format
    if fmt.scale_record is not None:
        return
    of = y.scaled if _same_places(x, y.scaled) else None
    with np.errstate(all="ignore"):
        for name, level in _levels(fmt).items():
            if level is None:
                continue
            qmax, part = fmt.qmax(level), PART_NAMES[name]
            stored = values_of(level.codec, getattr(x, name))
            multiplier = (
                stored / np.float32(qmax) if level.convention == "amax" else _numbers_of(stored, level.convention, qmax)
            )
            theirs = None if of is None else _levels(of.recipe.format)[name]
            if of is not None and theirs is not None and theirs.convention != level.convention:
                how = f"as {_a(theirs.convention)}, {y.opposite} as {_a(level.convention)}"
                converted = {name: stored_as(theirs.codec, _numbers_of(multiplier, theirs.convention, qmax))}
                yield (
                    FileTensor(with_parts(of, components(x) | converted)),
                    {"part": part, "how": f"{how}: converted, and rounded"},
                )
                yield FileTensor(with_parts(of, components(x))), {"part": part, "how": f"{how}: the same number"}
            for how, number in (
                ("the reciprocal of", np.float32(1) / stored),
                (f"{qmax:g} (largest magnitude at scale 1) times", stored * np.float32(qmax)),
                (f"{qmax:g} (largest magnitude at scale 1) divided by", np.float32(qmax) / stored),
            ):
                found = {"part": part, "how": f"as {how} what {y.opposite} stores; both are read alike"}
                yield _other_parts(x, **{name: stored_as(level.codec, number)}), found


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def scales_of_another_dtype(x: ScaledTensor, y: Side) -> Candidates:
    """Scales rounded to another dtype, the one that the other side declares or a coarser one."""
    fmt, of = x.recipe.format, y.scaled
    if fmt.scale_record is not None:
        return
    mine = values_of(fmt.scale.codec, x.scale)
    bias = values_of(fmt.scale.codec, x.zero_point) if fmt.offset_codec is not None and fmt.offset_record is None else None
    if of is not None and _same_places(x, of) and of.recipe.format.scale_record is None:
        codec = of.recipe.format.scale.codec
        if codec != fmt.scale.codec and _differ_only_in("levels", fmt, of.recipe.format):
            parts = {"scale": stored_as(codec, mine)} | ({} if bias is None else {"zero_point": stored_as(codec, bias)})
            yield FileTensor(with_parts(of, components(x) | parts)), {"part": "scales", "dtype": codec.name}
    for name, level in _levels(fmt).items():
        for coarser in _COARSER:
            if level is not None and coarser.bits < level.codec.bits:
                rounded = values_of(coarser, stored_as(coarser, values_of(level.codec, getattr(x, name))))
                found = {"part": PART_NAMES[name], "dtype": coarser.name}
                yield _other_parts(x, **{name: stored_as(level.codec, rounded)}), found


def read_as_another_codec(x: ScaledTensor, y: Side) -> Candidates:
    """The same bytes, and another codec of elements."""
    yield from _read_otherwise(x, y, "element", lambda element: element.name)


def multiplied_in_another_order(x: ScaledTensor, y: Side) -> Candidates:
    """The same bytes, and another order of multiplications."""
    yield from _read_otherwise(x, y, "order", lambda order: order.replace("_", " "))


def _read_otherwise(x: ScaledTensor, y: Side, field: str, spelled: Callable[[Any], str]) -> Candidates:
    """The bytes of `x` in the form of the other side, whose format differs in one field."""
    of = y.scaled
    if of is not None and _same_places(x, of):
        mine, theirs = (getattr(st.recipe.format, field) for st in (x, of))
        if mine != theirs and _differ_only_in(field, x.recipe.format, of.recipe.format):
            yield FileTensor(with_parts(of, components(x))), {"here": spelled(mine), "there": spelled(theirs)}


def group_index_ignored(x: ScaledTensor, y: Side) -> Candidates:
    """Groups in order where they follow an index."""
    if isinstance(x.layout, PerGroupIndex):
        layout = x.recipe.layout.fitted(x.shape)
        if tuple(x.scale.shape) in layout.scale_shapes(x.shape):
            yield FileTensor(with_parts(x, components(x), layout=layout)), {}


@dataclass(frozen=True)
class Computed:
    """Numbers computed from others, slab by slab."""

    of: Numbers
    change: Callable[[np.ndarray], np.ndarray]

    @property
    def shape(self) -> Shape:
        return self.of.shape

    @property
    def unit(self) -> int | None:
        return self.of.unit

    def values(self, slab: Slab) -> np.ndarray:
        return self.change(self.of.values(slab))


def in_dtype(side: Side) -> Callable[[np.ndarray], np.ndarray]:
    """Rounds numbers to the dtype of a plain side; those of a quantized one stay FP32."""
    codec = {"F16": F16, "BF16": BF16}.get(side.dtype)
    return (lambda x: x) if codec is None else lambda x: values_of(codec, stored_as(codec, x))


def transposed(x: Side, y: Side) -> Candidates:
    """Rows as columns."""
    if x.x.ndim > 1:
        yield x.mT.numbers, {}


def plus_one(x: Side, y: Side) -> Candidates:
    """Weights of norms that are stored less by one, as Gemma has them."""
    kept = in_dtype(y)
    yield Computed(x.numbers, lambda v: kept(v + v.dtype.type(1))), {}


def rounded(x: Side, y: Side) -> Candidates:
    """Plain numbers rounded to a dtype, to nearest or by cutting bits off."""
    if isinstance(y.x, ScaledTensor):
        return
    kept = in_dtype(y)
    for codec in (BF16, F16):
        yield (
            Computed(x.numbers, lambda v, codec=codec: kept(values_of(codec, stored_as(codec, v)))),
            {"how": f"rounded to {codec.name}"},
        )
    yield Computed(x.numbers, lambda v: kept(_cut(v))), {"how": "cut to BF16, toward zero"}


def _cut(v: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(v, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def times_a_constant(x: Side, y: Side) -> Candidates:
    """All numbers times one, which the largest number of the first rows tells up to its rounding."""
    mine, theirs, kept = x.numbers, y.numbers, in_dtype(y)
    if mine.shape != theirs.shape or 0 in mine.shape:
        return
    slab = next(iter(measuring.slabs(mine.shape, mine.unit, theirs.unit)))
    a, b = (numbers.values(slab).reshape(-1) for numbers in (mine, theirs))
    place = int(np.argmax(np.abs(a)))
    if a[place] == 0 or not np.isfinite([a[place], b[place]]).all():
        return
    with np.errstate(all="ignore"):
        ratio = np.float32(b[place] / a[place])
    if not np.isfinite(ratio):
        return
    power = np.float32(0 if ratio == 0 else math.copysign(2.0 ** round(math.log2(abs(ratio))), ratio))
    near = [
        ratio,
        power,
        *(values_of(c, stored_as(c, np.array(ratio)))[()] for c in (F16, BF16)),
        *np.nextafter(ratio, [-np.inf, np.inf]),
    ]
    for factor in dict.fromkeys(np.float32(n) for n in near):
        with np.errstate(over="ignore"):
            yield Computed(x.numbers, lambda v, c=factor: kept(v * v.dtype.type(c))), {"factor": f"{factor:.9g}"}
