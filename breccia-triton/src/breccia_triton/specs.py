"""The constants that kernels are compiled for: codecs, scale levels and rules, as frozen values. Imports no framework."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

from breccia import Codec, Format, Integer, Level, Lookup, Minifloat, PowerOfTwo, RecipeError, ScalingRecipe, rules
from breccia.backend import F32, F32_INF, INT8, TENSOR, FloatForm, IntegerForm, TableForm, f32, form_of
from breccia.internal import Record, f32_bits

from .plugin import READ

_T = TypeVar("_T")

#: Element codecs with a conversion instruction on NVIDIA GPUs from compute capability 8.9 on.
CONVERTED = ("E4M3", "E5M2")
#: The widths of codes that casts write. All are read.
_WRITTEN = (4, 6, 8)
#: The most bits of a table's codes: its values are in the lanes of a warp.
_LANES = 5
#: The most linear functions whose least one is faster than the binade of each number.
_LINES = 4


@dataclass(frozen=True)
class Floats:
    """A minifloat, encoded by addition (`breccia.forms.FloatForm`).

    nan, inf: codes, -1 where there is none. highest: the code of the largest finite number.
    lines: how many code spacings there are, or 0 where they are many. As a function of |y| the code is their concave polygon,
    the least of `lines` linear functions: so it is also the least of these functions rounded, ties to even codes in each.
    """

    name: str
    bits: int
    mantissa: int
    bias: int
    floor: int
    lift: int
    largest: int
    magnitude: int
    highest: int
    nan: int
    inf: int
    signed: bool
    lines: int = 0
    empty: int = 0
    kind: str = "float"

    @property
    def smallest(self) -> float:
        """The smallest positive number."""
        return 2.0 ** ((self.floor >> 23) - 127 - self.mantissa)


@dataclass(frozen=True)
class Integers:
    """An integer codec (`breccia.forms.IntegerForm`)."""

    bits: int
    low: float
    high: float
    unit: float
    signed: bool
    nan: int = -1
    empty: int = 0
    kind: str = "integer"

    @property
    def smallest(self) -> float:
        """The smallest positive number."""
        return self.unit


@dataclass(frozen=True)
class Table:
    """A table codec (`breccia.forms.TableForm`). order: codes by position.

    empty: the code of 0. cells: of the starts, the cell of y being RNE(f * count), with f = y * steep + middle clamped to 0..1;
    none where two starts share a cell, or codes are not in order. below: the FP32 numbers before the starts.
    """

    bits: int
    starts: tuple[float, ...]
    values: tuple[float, ...]
    order: tuple[int, ...]
    empty: int = 0
    cells: tuple[int, ...] = ()
    below: tuple[float, ...] = ()
    steep: float = 0.0
    middle: float = 0.0
    count: float = 0.0
    nan: int = -1
    kind: str = "table"

    @property
    def smallest(self) -> float:
        """The smallest magnitude but 0."""
        return min(abs(value) for value in self.values if value)


@dataclass(frozen=True)
class Wide:
    """A floating codec that frameworks have as a dtype: F32, F16, BF16."""

    name: str
    bits: int
    largest: float
    kind: str = "wide"


@dataclass(frozen=True)
class Powers:
    """A codec of powers of two."""

    name: str
    bits: int
    bias: int
    kind: str = "power"


@dataclass(frozen=True)
class Window:
    """The scales that a search tries after the plain one (`breccia.rules.Window`): multiples, or steps from code to code.

    multiples: of the unrounded plain scale, in this order; negative ones have the sign bit set. down, up: how many codes below
    and above the plain one, from lowest to highest; of equal errors the lowest counts. signs: whether scales may be negative.
    least: the least ratio of a candidate to the plain scale.
    """

    multiples: tuple[float, ...]
    down: int
    up: int
    lowest: int
    highest: int
    signs: bool
    least: float


@dataclass(frozen=True)
class Scale:
    """One level: its codec and its rule.

    rule: "linear", "divide", "te" or "exponent". divisor: the statistic is divided by it (inverse: its reciprocal); or, with
    `reciprocal`, multiplied by it. factor: 2^margin. carry, cap: integers of the exponent rules. extreme: a scale may be 2^127,
    whose reciprocal is subnormal. fits: no element exceeds the largest code by as much as half a step. least, most, zero, nan:
    of the codec. window: of a rule that searches, None for others.
    """

    codec: Floats | Wide | Powers
    rule: str
    divisor: float
    inverse: float
    reciprocal: bool
    factor: float
    power_of_two: bool
    carry: int
    cap: int
    qmax: float
    least: float
    most: float
    zero: int
    nan: int
    convention: str
    fits: bool
    extreme: bool
    window: Window | None = None

    @property
    def signs(self) -> bool:
        """Whether scales may be negative."""
        return self.window is not None and self.window.signs


@dataclass(frozen=True)
class Coded:
    """A level of a record: the codec of its codes, their first byte, and how many blocks of the finest level each covers.

    nan: as of `Scale`.
    """

    codec: Floats | Wide | Powers | Integers | Table
    start: int
    blocks: int
    nan: int


@dataclass(frozen=True)
class Records:
    """How the FP32 scale, or bias, of each block is stored in several levels (`breccia.formats.Record`), from coarse to fine.

    length, blocks, nbytes: elements, blocks of the finest level, and bytes of a record.
    """

    levels: tuple[Coded, ...]
    length: int
    blocks: int
    nbytes: int


@dataclass(frozen=True)
class Spec:
    """A recipe for kernels: element, scale, global scale or None, offset.

    scales_first: the global scale multiplies that of a block first. scale_records, offset_records: where these have several
    levels. `scale` is then what they multiply to.
    """

    element: Floats | Integers | Table
    scale: Scale
    global_scale: Scale | None
    offset: str
    scales_first: bool = False
    scale_records: Records | None = None
    offset_records: Records | None = None

    @property
    def offset_scale(self) -> Scale:
        """What reads a float offset: the codec of a plain scale, FP32 from records."""
        return self.scale if self.offset_records is None else _FLAT

    @property
    def lanes(self) -> bool:
        """Whether its codes have formulas that keep to a thread."""
        element = self.element
        unsigned = isinstance(element, Integers) and not element.signed and element.bits == 4
        if self.offset != "none" and not unsigned:
            return False
        if element.bits == 6:
            return element.kind == "float"
        ways = {"float": "lines", "integer": "unit", "table": "cells"}
        return bool(getattr(element, ways[element.kind])) and getattr(element, "unit", 1.0) == 1.0

    @property
    def paired(self) -> bool:
        """Whether BF16 numbers have formulas in BF16: scales are powers of two, and 4-bit codes a polygon."""
        element = self.element
        exact = self.scale.codec.kind == "power" and self.global_scale is None and self.offset == "none"
        return exact and isinstance(element, Floats) and element.bits == 4 and element.lines > 0


class Unsupported(Exception):
    """A part of a recipe that the kernels do not support; the text is the reason."""


class TwoCasts(Unsupported):
    """A pair of casts where two kernels are faster than one."""


def needed(value: _T | str) -> _T:
    """The value. Raises Unsupported where it is a reason instead."""
    if isinstance(value, str):
        raise Unsupported(value)
    return value


@lru_cache(maxsize=256)
def spec_of(recipe: ScalingRecipe, decoding: bool = False) -> Spec | str:
    """The constants for a recipe, or why the kernels do not support it. decoding: its rules do not matter."""
    fmt = recipe.format
    rules_of = [None] * len(fmt.levels) if decoding else recipe.rules
    try:
        if unknown := sorted(fmt.features.difference(READ if decoding else ())):
            raise Unsupported(
                f"it does not {'read' if decoding else 'write'} formats with {', '.join(unknown).replace('_', ' ')}"
            )
        element = _element(fmt.element, decoding)
        global_scale = None if fmt.global_scale is None else _scale(fmt, fmt.global_scale, rules_of[0], True)
        if global_scale is not None and fmt.scale.block == TENSOR:
            raise Unsupported("a tensor scale under another one has no kernel here")
        scale = _scale(fmt, fmt.scale, rules_of[-1], False) if fmt.scale_record is None else _FLAT
        if fmt.offset != "none" and scale.window is not None:
            raise Unsupported("it searches for scales of formats without an offset only")
        if fmt.offset != "none" and fmt.offset_record is None:
            if fmt.scale_record is not None:
                raise Unsupported("it reads offsets of coded scales from records only")
            if fmt.offset != "zero_point" and not isinstance(scale.codec, Wide):
                what = "biases" if fmt.offset == "bias" else "zero-points"
                raise Unsupported(f"it does not {'read' if decoding else 'write'} {what} of {scale.codec.name}")
        records = (None if record is None else _records(record) for record in (fmt.scale_record, fmt.offset_record))
        return Spec(element, scale, global_scale, fmt.offset, fmt.order == "scales_first", *records)
    except Unsupported as e:
        return str(e)


def _element(codec: Codec, decoding: bool) -> Floats | Integers | Table:
    if not decoding and codec.bits not in _WRITTEN:
        raise Unsupported(f"it does not pack codes of {codec.bits} bits")
    if decoding and isinstance(codec, Lookup):
        if codec.bits > _LANES:
            raise Unsupported(f"it reads tables of up to {1 << _LANES} numbers; {codec.name} has {1 << codec.bits}")
        return Table(codec.bits, (), codec.values, ())
    match form := form_of(codec):
        case FloatForm() if form.codec.signed and _decodes(form):
            return _floats(form)
        case IntegerForm():
            return Integers(codec.bits, form.low, form.high, form.unit, form.codec.signed)
        case TableForm() if codec.bits <= 4:
            table = form.codec
            return Table(codec.bits, form.starts, table.values, table.order, form.zero, *_cells(form))
        case _:
            raise Unsupported(f"it has no formula for codes of {codec.name}")


def _records(record: Record) -> Records:
    """The constants that read a record."""
    starts, blocks = accumulate((0, *record.sizes)), record.counts[-1]
    levels = [
        Coded(_codec(level.codec), start, blocks // count, -1 if level.codec.nan_code is None else level.codec.nan_code)
        for level, start, count in zip(record.levels, starts, record.counts, strict=False)
    ]
    length = record.levels[0].block[1]
    assert length is not None  # coded levels lie within blocks along K
    return Records(tuple(levels), length, blocks, record.nbytes)


def _codec(codec: Codec) -> Floats | Wide | Powers | Integers | Table:
    """The codec of a level of a record."""
    if codec.bits > 8:
        return Wide(codec.name, codec.bits, codec.max)
    if type(codec) is PowerOfTwo:
        return Powers(codec.name, codec.bits, codec.bias)
    form = form_of(codec)
    return _floats(form) if isinstance(form, FloatForm) and _decodes(form) else _element(codec, True)


def _cells(form: TableForm) -> tuple[Any, ...]:
    """The fields of a table from `cells` on."""
    codec, starts = form.codec, form.starts
    least, most = min(codec.values), max(codec.values)
    steep = f32(1 / (most - least))
    middle = f32(-least * steep)
    for count in (31.0, 30.0, 29.0, 28.0):
        exact = [count * (t * steep + middle) for t in starts]
        cells = tuple(map(round, exact))
        apart = all(abs(x % 1 - 0.5) > 1e-4 for x in exact)  # rounded f has the same cells
        if apart and len(set(cells)) == len(cells) and codec.order == tuple(range(len(cells) + 1)) and 0 not in starts:
            # The bits of the next smaller number: of a positive one one less, of a negative one one more.
            return cells, tuple(_number(f32_bits(t) + (-1 if t > 0 else 1)) for t in starts), steep, middle, count
    return ()


def _decodes(form: FloatForm) -> bool:
    """Whether `numerics.decode` has an FP32 number for 2^(127 - bias)."""
    return form.codec.bias >= 0


def _floats(form: FloatForm) -> Floats:
    codec, p = form.codec, form.codec.mantissa_bits
    nan, inf = (-1 if code is None else code for code in (codec.nan, codec.inf))
    mask, highest = codec.magnitude_mask, codec.highest
    lines = max(1, highest >> p)
    lines = lines if lines <= _LINES else 0
    bits = form.floor, form.lift, form.largest
    return Floats(codec.name, codec.bits, p, codec.bias, *bits, mask, highest, nan, inf, codec.signed, lines)


def _scale(fmt: Format, level: Level, rule: rules.Rule | None, outermost: bool) -> Scale:
    codec, qmax = level.codec, fmt.qmax(level)
    if level.convention != "multiplier" and not outermost:
        raise Unsupported(f"it does not write scales as {level.convention}")
    kernel_codec: Floats | Wide | Powers
    least = most = 0.0
    if type(codec) is PowerOfTwo:
        kernel_codec = Powers(codec.name, codec.bits, codec.bias)
    elif type(codec) is Minifloat and codec.name in ("F32", "F16", "BF16"):
        least, most = codec.scale_min, codec.scale_max
        kernel_codec = Wide(codec.name, codec.bits, codec.max)
    elif isinstance(form := form_of(codec), FloatForm) and codec.bits == 8 and codec.nan_code is not None and _decodes(form):
        least, most = form.codec.scale_min, form.codec.scale_max
        kernel_codec = _floats(form)
    else:
        raise Unsupported(f"it does not write scales of {codec.name}")
    if outermost and codec.name != "F32":
        raise Unsupported(f"it does not write global scales of {codec.name}")
    formula: dict[str, Any] = {"rule": "linear", "divisor": qmax, "reciprocal": False, "factor": 1.0, "power_of_two": False}
    formula |= {"carry": 0, "cap": 0}
    if rule is not None:
        formula |= _formula(fmt, rule, qmax, outermost)
    if rule is not None and formula["rule"] != "exponent" and type(codec) is PowerOfTwo:
        raise Unsupported(f"rule {rule.name!r} writes no powers of two")
    if rule is not None and formula["rule"] == "exponent" and not (type(codec) is PowerOfTwo or codec.bits == 32):
        raise Unsupported(f"rule {rule.name!r} writes powers of two only")
    window = formula["window"] = _window(rule, codec, fmt.element)
    top = ((F32_INF - 1 + formula["carry"]) >> 23) - formula["cap"] + (window.up if window else 0)
    largest = codec.need_nan() - 1 - kernel_codec.bias if isinstance(kernel_codec, Powers) else 126
    formula["extreme"] = isinstance(kernel_codec, Powers) and top >= largest
    exact = isinstance(rule, rules.Linear) and codec.bits == 32 and rule.margin >= 0 and qmax >= 4
    formula["fits"] = top <= largest if rule is not None and rule.name == rules.RCEIL.name else exact
    formula["inverse"] = f32(1.0 / formula["divisor"])
    return Scale(
        kernel_codec,
        qmax=qmax,
        least=least,
        most=most,
        zero=codec.zero_scale,
        nan=codec.need_nan(),
        convention=level.convention,
        **formula,
    )


def _formula(fmt: Format, rule: rules.Rule, qmax: float, outermost: bool) -> dict[str, Any]:
    """The fields of `Scale` that say how a rule computes it, where they are not the usual ones."""
    only = not outermost and fmt.global_scale is None
    match rule:
        case rules.Exponent() if type(rule) is rules.Exponent and only:
            cap = f32_bits(qmax)
            return {"rule": "exponent", "carry": rule.carry(fmt.element, cap), "cap": cap >> 23}
        case rules.Inverse() if type(rule) is rules.Inverse and only:
            return {"rule": "te", "power_of_two": rule.power_of_two, "factor": 2.0**-rule.margin}
        case rules.Reciprocal() if type(rule) is rules.Reciprocal:
            return {"factor": 2.0**rule.margin, "divisor": f32(1.0 / qmax), "reciprocal": True}
        case rules.HalfRange() if type(rule) is rules.HalfRange:
            fields: dict[str, Any] = {"factor": 2.0**rule.margin}
            if isinstance(fmt.element, Integer):
                high, low = fmt.element.high, fmt.element.low
                fields["divisor"] = math.ldexp(high - low, -1 - fmt.element.fraction_bits)
            return fields
        case rules.Divide() if type(rule) is rules.Divide:
            return {"rule": "divide", "factor": 2.0**rule.margin}
        case rules.Linear() if type(rule) is rules.Linear:
            return {"factor": 2.0**rule.margin}
        case rules.Search() if type(rule) is rules.Search and not outermost:
            return _formula(fmt, rule.plain(fmt.scale.codec), qmax, outermost)
        case _:
            raise Unsupported(f"it does not have the scale rule {rule.name!r} here")


def _window(rule: rules.Rule | None, codec: Codec, element: Codec) -> Window | None:
    """The window of a rule that searches."""
    if not isinstance(rule, rules.Search):
        return None
    try:
        window = rule.tried(codec, element)
    except RecipeError as e:
        raise Unsupported(f"rule {rule.name!r} has no window of {codec.name} scales") from e
    signs = rules.takes_signs(codec, element)
    multiples = (*window.factors, *(-factor for factor in window.opposite if signs))
    lowest, highest = (0, codec.need_nan() - 1) if isinstance(codec, PowerOfTwo) else (1, getattr(codec, "highest", 0))
    down, up = -min((0, *window.steps)), max((0, *window.steps))
    if window.steps != tuple(step for step in range(-down, up + 1) if step) or (window.steps and multiples):
        raise Unsupported(f"the window of rule {rule.name!r} is neither multiples nor steps from each code to the next")
    # From a code to the one before, a scale is at most halved; and so a multiple that is rounded to a code.
    least = min((2.0**-down, *(abs(multiple) / 4 for multiple in multiples)))
    return Window(multiples, down, up, lowest, highest, signs, least)


def _number(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def _fp32() -> Scale:
    level = Level(F32, (1, 1))
    return _scale(Format(INT8, (level,)), level, None, False)


#: An FP32 scale, as the levels of a record multiply to.
_FLAT = _fp32()
