"""Laws of scale rules: the oracle's scales, on every framework; positive, and never smaller for a larger amax."""

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
from ...rules import RULES, Rule
from .. import oracle
from ..compare import expect, expect_words
from ..places import Place
from .law import Law, Subject, each

#: The codecs that scales are stored in.
_SCALES = tuple(codec for codec in CODECS if codec.bits > 8 or codec.name in ("E4M3", "UE4M3", "UE5M3", "E8M0"))


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the rules of a plug-in."""
    for rule in subject.of("rules"):
        checks = (it_accepts_some_codec, scales_are_positive_numbers, a_larger_amax_never_gets_a_smaller_scale)
        yield from each("rules", rule.name, checks, rule)
        for place in subject.places:
            yield from each("rules", rule.name, (scales_are_the_oracles,), rule, place=place)


def it_accepts_some_codec(rule: Rule) -> None:
    expect(bool(list(_served(rule))), f"rule {rule.name!r} raises RecipeError for every codec of scales and elements")


def scales_are_positive_numbers(rule: Rule) -> None:
    """Zero only where the codec lets a small block underflow to it; the largest block never does."""
    for codec, element, qmax in _served(rule):
        numbers = _numbers(rule, codec, element, qmax)
        least = getattr(codec, "scale_min", 0.0)
        bad = numbers[~(np.isfinite(numbers) & (numbers >= least))]
        expect(not bad.size, f"rule {rule.name!r} in {codec.name} for {element.name}: scales {bad[:3].tolist()}")
        expect(numbers[-1] > 0, f"rule {rule.name!r} in {codec.name} for {element.name}: scale 0 for amax {_AMAXES[-1]}")


def a_larger_amax_never_gets_a_smaller_scale(rule: Rule) -> None:
    for codec, element, qmax in _served(rule):
        numbers = _numbers(rule, codec, element, qmax)
        where = _AMAXES[1:][numbers[1:] < numbers[:-1]][:1].tolist()
        expect(not where, f"rule {rule.name!r} in {codec.name} for {element.name}: the scale falls at amax {where}")


def scales_are_the_oracles(rule: Rule, place: Place) -> None:
    """Where the oracle does not know the rule's class: those that the rule itself gives on NumPy."""
    known = any(type(rule) is type(one) for one in RULES)
    if not known and place.framework == "numpy":
        pytest.skip(f"the oracle does not know {type(rule).__name__}; other frameworks are held to NumPy's scales")
    for codec, element, qmax in _served(rule):
        found = _scales(rule, codec, element, qmax, place)
        if known:
            expect_words(
                f"{rule.name} in {codec.name} for {element.name}", found[_CHOSEN], _oracles_scales(rule, codec, element)
            )
        else:
            expect_words(
                f"{rule.name} in {codec.name} for {element.name}, against NumPy",
                found,
                _scales(rule, codec, element, qmax, Place("numpy")),
            )


@cache
def _oracles_scales(rule: Rule, codec: Codec, element: Codec) -> np.ndarray:
    """The words of the scales of `_CHOSEN`: the same at every place."""
    level = Level(codec, TENSOR)
    fmt = Format(element, (level,))
    found = [oracle.stored_scale(rule, Fraction(float(_AMAXES[i])), level, fmt, None) for i in _CHOSEN]
    return np.array(found).astype(np.uint32)


@cache
def _decoded(codec: Codec, code: int) -> float:
    return oracle.decode(codec, code)


def _amaxes() -> np.ndarray:
    """FP32 magnitudes, ascending: powers of two and what lies beside, and mantissas between, from 2^-126 to the largest."""
    rng = np.random.default_rng(3)
    words = [np.uint32(e << 23) + np.uint32(d) for e in range(1, 255) for d in (0, 1, 0x3FFFFF, 0x400000, 0x5FFFFF, 0x600000)]
    words = np.concatenate([words, rng.integers(0x00800000, 0x7F800000, 800, dtype=np.uint32), [np.uint32(0x7F7FFFFF)]])
    return np.unique(words.astype(np.uint32)).view(np.float32)


_AMAXES = _amaxes()
#: Those the oracle is asked about.
_CHOSEN = np.arange(0, len(_AMAXES), 23)


def _served(rule: Rule) -> Iterator[tuple[Codec, Codec, float]]:
    """(codec of scales, codec of elements, qmax) that the rule takes."""
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
    """The scales that the rule gives on NumPy, float64, by ascending amax. Raises AssertionError for what is no code."""
    codes = _scales(rule, codec, element, qmax, Place("numpy"))
    beyond = codes[codes > (1 << codec.bits) - 1]
    what = f"rule {rule.name!r} in {codec.name} for {element.name}"
    expect(not beyond.size, f"{what}: {list(map(hex, beyond[:3]))} are no codes of {codec.bits} bits")
    words, place = np.unique(codes, return_inverse=True)
    return np.array([_decoded(codec, int(word)) for word in words])[place]
