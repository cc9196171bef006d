"""The forms by which kernels round, computed as they are declared, against the oracle's exact numbers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from repeated_codes import REPEATED

from breccia.codecs import CODECS, E2M1, E4M3, INT8, MXINT8, UINT4, Codec, Integer, Lookup, Minifloat
from breccia.forms import ROUNDER, WHOLE, FloatForm, IntegerForm, TableForm, form_of
from breccia.testing import oracle, strategies

U4, F4 = np.uint32, np.float32
EXPONENT, MAGNITUDE = 0x7F800000, 0x7FFFFFFF
ROUNDED = [codec for codec in (*CODECS, REPEATED) if form_of(codec) is not None]


def around(codec: Codec) -> Any:
    """Every value of a codec, the midpoints between them, the FP32 numbers next to all of these, and numbers far away."""
    values = oracle.ladder(codec)[0]
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    points = np.array([float(v) for v in (*values, *middles)], F4)
    far = np.array([0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-127, 3.4e38, -3.4e38], F4)
    beyond = np.array([1.25, 1.5, 2, 1024], F4) * points[[0, len(values) - 1]][:, None]
    nearby = [np.nextafter(points, F4(end)) for end in (-np.inf, np.inf)]
    return np.concatenate([points, *nearby, beyond.reshape(-1), far])


def exact(codec: Codec, y: Any) -> list[int]:
    return [oracle.encode(codec, Fraction(float(v)), bool(np.signbit(v))) for v in y]


def magnitudes(form: FloatForm, y: Any, by: Callable[[FloatForm, Any], Any]) -> Any:
    """Codes of `y`, of whose magnitudes `by` computes the codes."""
    if not form.codec.signed:
        return by(form, np.minimum(np.where(y < 0, F4(0), y).view(U4) & MAGNITUDE, U4(form.largest)))
    found = by(form, np.minimum(y.view(U4) & MAGNITUDE, U4(form.largest)))
    return found | ((y.view(U4) >> 31) << form.sign)


def by_addition(form: FloatForm, a: Any) -> Any:
    e = np.maximum(a & EXPONENT, U4(form.floor)) + U4(form.lift)
    return ((a.view(F4) + e.view(F4)).view(U4) + (e >> form.shift)) & 0xFF


def by_integers(form: FloatForm, a: Any) -> Any:
    magic = F4(WHOLE * form.step)
    steps = (a.view(F4) + magic).view(U4) - magic.view(U4)
    normal = (a + ((a >> form.shift) & 1) + U4((1 << (form.shift - 1)) - 1) - U4(form.rebase & 0xFFFFFFFF)) >> form.shift
    return np.where(a < form.floor, steps, normal)


def by_halves(form: FloatForm, a: Any) -> Any:
    """From BF16 numbers, with a last bit of 1 in place of what was cut off."""
    return by_addition(form, (a & 0xFFFF0000) | np.where(a & 0xFFFF, U4(0x10000), U4(0)))


def rounded(form: FloatForm | IntegerForm | TableForm, y: Any) -> list[Any]:
    """Codes of `y`, in each way that a form has."""
    match form:
        case FloatForm():
            return [magnitudes(form, y, by) for by in (by_addition, by_integers, by_halves)]
        case IntegerForm():
            return [(np.clip(y, F4(form.low), F4(form.high)) + F4(form.magic)).view(U4) & form.mask]
        case TableForm():
            return [np.array(form.codec.order)[(y[:, None] >= np.array(form.starts, F4)).sum(1)]]


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda c: c.name)
def test_forms_round_to_the_codes_of_the_oracle(codec: Codec) -> None:
    form, y = form_of(codec), around(codec)
    assert form is not None
    for found in rounded(form, y):
        assert found.tolist() == exact(codec, y)


@settings(deadline=None)  # the oracle takes a tenth of a second for a codec of 8 bits, and several on a busy machine
@given(codec=strategies.codecs())
def test_forms_of_any_codec_round_to_the_codes_of_the_oracle(codec: Codec) -> None:
    if (form := form_of(codec)) is not None:
        y = around(codec)
        expected = exact(codec, y)
        for found in rounded(form, y):
            assert found.tolist() == expected


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda c: c.name)
def test_numbers_within_the_limit_need_no_clamp(codec: Codec) -> None:
    form, y = form_of(codec), around(codec)
    assert form is not None
    y = np.append(y[np.abs(y) < form.limit], np.nextafter(F4(form.limit), F4(0)))
    match form:
        case FloatForm():
            y = np.abs(y)
            assert by_addition(form, y.view(U4)).tolist() == exact(codec, y)
        case IntegerForm():
            y = y if form.codec.signed else np.maximum(y, F4(0))
            assert ((y + F4(form.magic)).view(U4) & form.mask).tolist() == exact(codec, y)
        case _:
            assert np.isinf(form.limit)


@pytest.mark.parametrize("codec", ROUNDED, ids=lambda c: c.name)
def test_constants_of_forms_are_numbers_of_the_codec(codec: Codec) -> None:
    form, (values, codes) = form_of(codec), oracle.ladder(codec)
    match form:
        case FloatForm():
            positive = [float(v) for v in values if v > 0]
            assert (form.step, F4(positive[-1]).view(U4)) == (positive[0], form.largest)
            assert positive[1] == 2 * form.step, "codes from zero on have this spacing"
            assert form.floor == F4(positive[(1 << form.codec.mantissa_bits) - 1]).view(U4)
            assert form.sign == codec.bits - 1
        case IntegerForm():
            assert (form.low, form.high) == (values[0], values[-1])
            assert form.unit == values[codes.index(1)]
            assert form.mask == max(codes) == (1 << codec.bits) - 1
            assert np.spacing(F4(form.magic)) == form.unit
        case TableForm():
            assert form.zero == codes[values.index(0)]
            assert len(form.starts) == (1 << codec.bits) - 1
        case _:
            raise AssertionError


def test_every_element_codec_but_wide_ones_and_those_without_negative_zero_has_a_form() -> None:
    assert {codec.name for codec in CODECS} - {codec.name for codec in ROUNDED} == {
        *("E8M0", "F32", "F16", "BF16"),
        *("E4M3FNUZ", "E5M2FNUZ"),
        "IQ4",
    }
    assert [type(form_of(codec)) for codec in (E4M3, INT8)] == [FloatForm, IntegerForm]


@pytest.mark.parametrize(
    "codec",
    [
        Minifloat("no negative zero", 4, None, "this test", 2, 1, 1, 6.0, nan=8),
        Minifloat("no mantissa", 4, None, "this test", 3, 0, 3, 16.0),
        Minifloat("midpoints of seven bits", 8, None, "this test", 1, 6, 1, 2 - 2.0**-6),
        Minifloat("fine steps", 4, None, "this test", 2, 1, 25, 6 * 2.0**-24),
        Minifloat("sums beyond FP32", 4, None, "this test", 2, 1, -104, 6 * 2.0**105),
        Integer("fine steps", 4, None, "this test", True, 25),
        Integer("sums beyond FP32", 4, None, "this test", True, -105),
        Lookup("fine steps", 1, None, "this test", (0.0, 2.0**-25)),
    ],
    ids=lambda c: f"{type(c).__name__}: {c.name}",
)
def test_codecs_that_sums_do_not_round_exactly_have_no_form(codec: Codec) -> None:
    assert form_of(codec) is None


def test_a_codec_that_encodes_otherwise_has_no_form() -> None:
    class Truncated(Integer):
        """Its own `encode` is not that of integers."""

    assert form_of(Truncated("truncated", 4, None, "this test", True)) is None


def test_adding_the_rounder_rounds_to_an_integer_in_the_low_bits() -> None:
    y = np.arange(-64, 65, dtype=F4) / 4
    assert ((y + F4(ROUNDER)).view(U4) & 0xFF).tolist() == [int(v) & 0xFF for v in np.rint(y)]
    assert ((np.abs(y) + F4(WHOLE)).view(U4) & 0xFF).tolist() == np.rint(np.abs(y)).tolist()


def test_codes_of_the_examples_in_the_derivation() -> None:
    """E2M1 by hand: shift 22 of 23 - 1, floor 1.0; the sum of 2.5 and 2 * 2^22 counts 2.5 spacings of 1 and rounds to 2."""
    form = FloatForm(E2M1)
    assert (form.shift, form.step, np.array(form.floor, U4).view(F4)) == (22, 0.5, 1.0)
    assert by_addition(form, np.array([2.5, 3.5, 0.25, 0.75], F4).view(U4)).tolist() == [4, 6, 0, 2]
    assert [IntegerForm(codec).magic for codec in (MXINT8, UINT4)] == [ROUNDER / 64, ROUNDER]
