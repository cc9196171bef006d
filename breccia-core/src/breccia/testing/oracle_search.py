"""The oracle's search for scales: the candidates of a rule, and the errors under them, by exact rationals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from ..codecs import Codec, Integer, Minifloat, PowerOfTwo
from ..formats import Format, Level
from ..rules import LINEAR, Search
from .oracle_numbers import MIN_NORMAL, fl_finite, flush
from .oracle_scales import floor_log2, nearest_scale, stored_scale, unrounded

_SMALLEST, _LIGHTEST = Fraction(1, 1 << 20), Fraction(1, 1 << 40)
Index = tuple[int, ...]
#: f(stored scale) -> (the number of each element's code, the scale of all levels); None if the scale is not usable.
Values = Callable[[int], tuple[Mapping[Index, Fraction], Fraction] | None]


def signed(codec: Codec, element: Codec) -> bool:
    """Whether a search tries negative scales."""
    return isinstance(element, Integer) and element.signed and isinstance(codec, Minifloat) and codec.signed and codec.bits > 8


def candidates(rule: Search, statistic: Fraction, level: Level, fmt: Format, global_scale: Fraction | None) -> list[int]:
    """The codes of the scales that are compared, in order."""
    codec, window = level.codec, rule.window(level.codec)
    plain = stored_scale(rule, statistic, level, fmt, global_scale)
    found = [plain]
    if window.factors or window.opposite:
        t = unrounded(LINEAR, statistic, level, fmt, global_scale)
        found += [nearest_scale(codec, flush(fl_finite(t * Fraction(factor)))) for factor in window.factors]
        if signed(codec, fmt.element):
            sign = 1 << (codec.bits - 1)
            found += [nearest_scale(codec, flush(fl_finite(t * Fraction(factor)))) + sign for factor in window.opposite]
    if isinstance(codec, PowerOfTwo):
        least, most = 0, codec.nan - 1
    else:
        assert isinstance(codec, Minifloat), codec
        least, most = 1, codec.highest
    found += [min(max(plain + step, least), most) for step in window.steps]
    return found


def least_error(
    codes: Sequence[int],
    block: Mapping[Index, Fraction],
    statistic: Fraction,
    importance: Sequence[float] | None,
    values: Values,
) -> int:
    """The first of the scales with the least error.

    block: the elements, in C order of their indices. importance: of the elements along the last axis.
    """
    weights = None if importance is None else _weights({i[-1]: importance[i[-1]] for i in block})
    errors = [_error(values(code), block, statistic, weights) for code in codes]
    return codes[errors.index(min(errors))]


def _weights(importance: Mapping[int, float]) -> Mapping[int, Fraction]:
    """The weights of the columns of a block."""
    ordinary = {k: Fraction(w) if MIN_NORMAL <= w < math.inf else Fraction(0) for k, w in importance.items()}
    largest = max(ordinary.values())
    scaled = {k: w * _power(largest) if largest else w for k, w in ordinary.items()}
    return {k: w if w >= _LIGHTEST else Fraction(0) for k, w in scaled.items()}


def _error(
    found: tuple[Mapping[Index, Fraction], Fraction] | None,
    block: Mapping[Index, Fraction],
    statistic: Fraction,
    weights: Mapping[int, Fraction] | None,
) -> Fraction:
    power = _power(statistic)
    terms: dict[Index, Fraction] = {}
    for i, x in block.items():
        v = Fraction(0)
        if found is not None:
            numbers, scale = found
            v = fl_finite(numbers[i] * fl_finite(scale * power))
        d = fl_finite(_large(x * power) - _large(v))
        terms[i] = fl_finite(d * d) if weights is None else fl_finite(fl_finite(d * d) * weights[i[-1]])
    while () not in terms:  # the last axis first
        lines: dict[Index, list[Fraction]] = {}
        for i, term in terms.items():
            lines.setdefault(i[:-1], []).append(term)
        terms = {i: _tree(line) for i, line in lines.items()}
    return terms[()]


def _power(q: Fraction) -> Fraction:
    """2^-n with the largest power of two, up to 2^126, that is at most `q`."""
    return 1 / Fraction(2) ** min(floor_log2(q), 126)


def _large(q: Fraction) -> Fraction:
    return q if abs(q) >= _SMALLEST else Fraction(0)


def _tree(terms: list[Fraction]) -> Fraction:
    """The sum of a power of two of numbers, zeros among them: its halves are added place by place, until one is left."""
    size = 1
    while size < len(terms):
        size *= 2
    padded = terms + [Fraction(0)] * (size - len(terms))
    while len(padded) > 1:
        half = len(padded) // 2
        padded = [fl_finite(a + b) for a, b in zip(padded[:half], padded[half:], strict=True)]
    return padded[0]
