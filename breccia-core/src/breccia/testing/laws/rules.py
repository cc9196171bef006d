"""Laws of scale rules: scales match the oracle on every framework, are positive, and never decrease with amax."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from ...codecs import CODECS, Codec
from ...errors import RecipeError
from ...formats import TENSOR, Format, Level
from ...rules import RULES, Rule, Search
from .. import oracle
from ..compare import expect, expect_words
from ..places import Place
from .law import Law, Subject, each

#: The codecs that scales are stored in.
_SCALES = tuple(codec for codec in CODECS if codec.bits > 8 or codec.name in ("E4M3", "UE4M3", "UE5M3", "E8M0"))


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the rules of a plug-in."""
    for rule in subject.of("rules"):
        checks = (it_accepts_some_codec, scales_are_positive, a_larger_amax_never_gets_a_smaller_scale)
        yield from each("rules", rule.name, checks, rule)
        for place in subject.places:
            yield from each("rules", rule.name, (scales_match_the_oracle,), rule, place=place)
            if isinstance(rule, Search):
                yield from each("rules", rule.name, (candidates_match_the_oracle,), rule, place=place)


def it_accepts_some_codec(rule: Rule) -> None:
    expect(bool(list(_supported(rule))), f"rule {rule.name!r} raises RecipeError for every codec of scales and elements")


def scales_are_positive(rule: Rule) -> None:
    """Zero only if the codec lets the scale of a small block underflow; never for the largest amax."""
    for codec, element, qmax in _supported(rule):
        numbers = _numbers(rule, codec, element, qmax)
        least = getattr(codec, "scale_min", 0.0)
        bad = numbers[~(np.isfinite(numbers) & (numbers >= least))]
        expect(not bad.size, f"rule {rule.name!r} in {codec.name} for {element.name}: scales {bad[:3].tolist()}")
        expect(numbers[-1] > 0, f"rule {rule.name!r} in {codec.name} for {element.name}: scale 0 for amax {_AMAXES[-1]}")


def a_larger_amax_never_gets_a_smaller_scale(rule: Rule) -> None:
    for codec, element, qmax in _supported(rule):
        numbers = _numbers(rule, codec, element, qmax)
        where = _AMAXES[1:][numbers[1:] < numbers[:-1]][:1].tolist()
        expect(not where, f"rule {rule.name!r} in {codec.name} for {element.name}: the scale falls at amax {where}")


def scales_match_the_oracle(rule: Rule, place: Place) -> None:
    """If the oracle does not know the rule's class, scales must match those that the rule gives on NumPy."""
    known = any(type(rule) is type(one) for one in RULES)
    if not known and place.framework == "numpy":
        pytest.skip(f"the oracle does not know {type(rule).__name__}; other frameworks are compared with NumPy's scales")
    for codec, element, qmax in _supported(rule):
        scales = _scales(rule, codec, element, qmax, place)
        if known:
            expect_words(
                f"{rule.name} in {codec.name} for {element.name}", scales[_CHOSEN], _oracles_scales(rule, codec, element)
            )
        else:
            expect_words(
                f"{rule.name} in {codec.name} for {element.name}, against NumPy",
                scales,
                _scales(rule, codec, element, qmax, Place("numpy")),
            )


def candidates_match_the_oracle(rule: Search, place: Place) -> None:
    """The scales that a search compares; the first are those of `scale`."""
    for codec, element, qmax in _supported(rule):
        level = Level(codec, TENSOR)
        with place.ops.errstate():
            found = place.words(rule.candidates(place.ops, place.array(_AMAXES[_FEW]), codec, element, qmax, None))
        what = f"candidates of {rule.name} in {codec.name} for {element.name}"
        expect_words(f"the first {what}", found[0], _scales(rule, codec, element, qmax, place, _AMAXES[_FEW]))
        fmt = Format(element, (level,))
        every = [oracle.candidates(rule, Fraction(float(_AMAXES[i])), level, fmt, None) for i in _FEW]
        expect_words(what, found, np.array(every).astype(np.uint32).T)


@cache
def _oracles_scales(rule: Rule, codec: Codec, element: Codec) -> np.ndarray:
    """The scale codes for the amaxes `_CHOSEN`; they do not depend on the place."""
    level = Level(codec, TENSOR)
    fmt = Format(element, (level,))
    codes = [oracle.stored_scale(rule, Fraction(float(_AMAXES[i])), level, fmt, None) for i in _CHOSEN]
    return np.array(codes).astype(np.uint32)


@cache
def _decoded(codec: Codec, code: int) -> float:
    return oracle.decode(codec, code)


def _amaxes() -> np.ndarray:
    """FP32 magnitudes, ascending: powers of two, their neighbours, and numbers between, from 2^-126 to the largest."""
    rng = np.random.default_rng(3)
    words = [np.uint32(e << 23) + np.uint32(d) for e in range(1, 255) for d in (0, 1, 0x3FFFFF, 0x400000, 0x5FFFFF, 0x600000)]
    words = np.concatenate([words, rng.integers(0x00800000, 0x7F800000, 800, dtype=np.uint32), [np.uint32(0x7F7FFFFF)]])
    return np.unique(words.astype(np.uint32)).view(np.float32)


_AMAXES = _amaxes()
#: Indices of the amaxes that are compared with the oracle, which is slow.
_CHOSEN = np.arange(0, len(_AMAXES), 23)
_FEW = _CHOSEN[::13]


def _supported(rule: Rule) -> Iterator[tuple[Codec, Codec, float]]:
    """(codec of scales, codec of elements, qmax) that the rule accepts."""
    for codec in _SCALES:
        for element in (c for c in CODECS if c.bits <= 8 and c.name != "E8M0"):
            qmax = Format(element, (Level(codec, TENSOR),)).qmax(Level(codec, TENSOR))
            try:
                _scales(rule, codec, element, qmax, Place("numpy"), _AMAXES[:1])
            except RecipeError:
                continue
            yield codec, element, qmax


def _scales(rule: Rule, codec: Codec, element: Codec, qmax: float, place: Place, amaxes: np.ndarray = _AMAXES) -> np.ndarray:
    """The stored scales, as codes."""
    with place.ops.errstate():
        codes: Any = rule.scale(place.ops, place.array(amaxes), codec, element, qmax, None)
    return place.words(codes)


def _numbers(rule: Rule, codec: Codec, element: Codec, qmax: float) -> np.ndarray:
    """The scales that the rule gives on NumPy, float64, by ascending amax. Raises AssertionError for an invalid code."""
    codes = _scales(rule, codec, element, qmax, Place("numpy"))
    beyond = codes[codes > (1 << codec.bits) - 1]
    what = f"rule {rule.name!r} in {codec.name} for {element.name}"
    expect(not beyond.size, f"{what}: {list(map(hex, beyond[:3]))} are not {codec.bits}-bit codes")
    words, place = np.unique(codes, return_inverse=True)
    return np.array([_decoded(codec, int(word)) for word in words])[place]
