"""Formats with an alternative, which no built-in recipe has, for golden vectors.

The module is a plug-in that nothing installs: a test registers it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from ..codecs import E2M1, E4M3, E5M2, F32, INT4, Codec, Lookup
from ..dispatch.hookspecs import hookimpl
from ..formats import TENSOR, Format, Level
from ..fp32 import f32
from ..locks import cached_property
from ..recipe_bases import ScalingRecipe
from ..recipe_fields import check_choices, one_of
from ..rules import DIVIDE, LINEAR, Rule

api = 1
PAPER = "Adaptive Block-Scaled Data Types (arXiv:2603.28765)"
#: INT4 of IF4: integers times 6/7, so that 7 is the number that 6 is in E2M1.
SEVENTHS = Lookup("SEVENTHS", 4, None, PAPER, tuple(f32(n * 6 / 7) for n in (*range(8), *range(-8, 0))))
#: Numbers at unequal distances up to 7, the largest of INT4.
UNEVEN = Lookup("UNEVEN", 4, None, "breccia", (0.0, 0.25, 0.5, 1, 1.5, 2, 4, 7, -7, -5, -3, -2, -1, -0.75, -0.5, -0.25))
CODECS: tuple[Codec, ...] = (SEVENTHS, UNEVEN)


@dataclass(frozen=True)
class TwoCodecs(ScalingRecipe):
    """Blocks of one of two element codecs, told apart by the sign of their scale.

    type: "if4", NVFP4 in which blocks are E2M1 or integers times 6/7; or "tiles", INT4 or a table, in tiles of 2 x 8 with a
        scale in E5M2 and no other.
    """

    name: ClassVar[str] = "two_codecs"
    source: ClassVar[str] = f"{PAPER} for if4; tiles are breccia's"
    type: str = field(default="if4", metadata=one_of(("if4", "tiles")))

    def __post_init__(self) -> None:
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        if self.type == "if4":
            return Format(E2M1, (Level(F32, TENSOR), Level(E4M3, (1, 16))), alternative=SEVENTHS)
        return Format(INT4, (Level(E5M2, (2, 8)),), alternative=UNEVEN)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (LINEAR, LINEAR) if self.type == "if4" else (DIVIDE,)


@hookimpl
def breccia_codecs() -> Iterable[Codec]:
    """The alternatives."""
    return CODECS


@hookimpl
def breccia_recipes() -> Iterable[type[ScalingRecipe]]:
    """The recipe."""
    return [TwoCodecs]
