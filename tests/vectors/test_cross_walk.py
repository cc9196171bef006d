"""What docs/spec/cross-walk.md says of codecs beside IEEE P3109's formats, from the draft's definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

import breccia_vectors
from breccia_vectors import SPEC


def values(bits: int, precision: int, signed: bool, extended: bool) -> list[float]:
    """The numbers of a P3109 format by code: Interim Report 4.0, sections 3.1 and 4.7.6."""
    bias = 2 ** (bits - precision - signed)
    half = 2 ** (bits - signed)  # the codes that are not negative

    def positive(code: int) -> float:
        exponent, trailing = divmod(code, 2 ** (precision - 1))
        significand = trailing + (2 ** (precision - 1) if exponent else 0)
        return float(Fraction(significand, 2 ** (precision - 1)) * Fraction(2) ** (max(exponent, 1) - bias))

    found = [positive(code) for code in range(half)]
    if not signed:
        found[-1] = math.nan
        return [*found[:-2], math.inf, math.nan] if extended else found
    if extended:
        found[-1] = math.inf
    return [*found, math.nan, *(-number for number in found[1:])]


def equal(a: float, b: float) -> bool:
    return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b))


#: Codec -> (bits, precision, signed, extended) of the P3109 format named on the page, the factor, and the codes that differ.
BESIDE = {
    "E4M3FNUZ": ("Binary8p4sf", (8, 4, True, False), 1, set[int]()),
    "E5M2FNUZ": ("Binary8p3sf", (8, 3, True, False), 1, set[int]()),
    "E4M3": ("Binary8p4sf", (8, 4, True, False), 2, {0x7F, 0x80, 0xFF}),
    "E5M2": ("Binary8p3se", (8, 3, True, True), 2, {*range(0x7C, 0x81), *range(0xFC, 0x100)}),
    "E2M1": ("Binary4p2sf", (4, 2, True, False), 2, {8}),
    "E2M3": ("Binary6p4sf", (6, 4, True, False), 2, {0x20}),
    "E3M2": ("Binary6p3sf", (6, 3, True, False), 2, {0x20}),
    "E8M0": ("Binary8p1uf", (8, 1, False, False), 2, {0}),
    "UE5M3": ("Binary8p4uf", (8, 4, False, False), 2, set[int]()),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_codec_is_beside_p3109_as_the_page_says(name: str) -> None:
    theirs, parameters, factor, differing = BESIDE[name]
    levels = ((level.codec for level in f.levels) for f in breccia_vectors.formats())
    codecs = {c.name: c for c in [f.element for f in breccia_vectors.formats()]} | {c.name: c for of in levels for c in of}
    ours = codecs[name].values
    wrong = {code for code, (a, b) in enumerate(zip(ours, values(*parameters), strict=True)) if not equal(a, factor * b)}
    assert wrong == differing
    rows = [line for line in (SPEC / "cross-walk.md").read_text(encoding="utf-8").splitlines() if f"`{name}`" in line]
    assert any(f"`{theirs}`" in row for row in rows), rows
