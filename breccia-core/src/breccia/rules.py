"""Scale rules: from a block's amax to its stored scale.

A rule is a value named in a recipe, one per level. The arithmetic of each is in docs/spec/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Base of scale rules; `name` is stable and appears in files."""

    name: str


@dataclass(frozen=True)
class Linear(Rule):
    """amax / capacity * 2^margin, rounded into the level's codec."""

    margin: int = 0


@dataclass(frozen=True)
class Exponent(Rule):
    """A power of two, found on the bits of amax: `rceil`, `floor` or `even`.

    `rceil`: smallest 2^n with amax <= capacity * 2^n. Nothing saturates.
    `floor`: 2^(floor(log2 amax) - floor(log2 capacity)); OCP MX v1.0 section 6.3. The largest element may saturate.
    `even`: `floor` after rounding amax's mantissa to the element's mantissa bits, ties away from zero.
    """


LINEAR = Linear("linear")
RCEIL = Exponent("rceil")
FLOOR = Exponent("floor")
EVEN = Exponent("even")

RULES: tuple[Rule, ...] = (LINEAR, RCEIL, FLOOR, EVEN)
