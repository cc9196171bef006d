"""Bases of recipes: that of all, and those of the families whose recipes differ in a few fields."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from .codecs import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, F32, FLOAT_CODECS, INTEGERS, Codec
from .declared import Declared, check_positive, check_type
from .errors import RecipeError, UnsupportedError
from .formats import NUMERICS, Block, Format, Level, sha256
from .layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor
from .locks import cached_property
from .recipe_fields import check_choices
from .rotations import Rotation, rotation_of
from .rules import DIVIDE, EVEN, FLOOR, FOUR_SIX, HALF_RANGE, LINEAR, MSE, RCEIL, RECIP, TE, Exponent, Inverse, Rule, Search

FP8: dict[str, Codec] = {"E4M3": E4M3, "E5M2": E5M2, "E4M3FNUZ": E4M3FNUZ, "E5M2FNUZ": E5M2FNUZ}
FP8_RULES: dict[str, Any] = {rule.name: rule for rule in (LINEAR, RECIP, DIVIDE, TE)}
INTEGER_RULES: dict[str, Rule] = {rule.name: rule for rule in (LINEAR, RECIP, DIVIDE, HALF_RANGE, MSE)}
E8M0_RULES: dict[str, Rule] = {rule.name: rule for rule in (RCEIL, FLOOR, EVEN, MSE)}
#: Of 8-bit float scales over E2M1, and of float scales over a table.
NVFP4_RULES: dict[str, Rule] = {rule.name: rule for rule in (LINEAR, MSE, FOUR_SIX)}
TABLE_RULES: dict[str, Rule] = {rule.name: rule for rule in (LINEAR, MSE)}


class ScalingRecipe(Declared):
    """Base of recipes: hashable, comparable by value, JSON-serializable.

    `name` is the stable identifier in files and on the command line; `aliases` are accepted alternatives;
    `source` cites where the format is defined.
    """

    kind: ClassVar[str] = "recipe"
    aliases: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[str] = ""

    @cached_property
    def format(self) -> Format:
        """The meaning of the written bytes."""
        raise RecipeError(f"recipe {type(self).__name__} declares no format")

    @property
    def decode_only(self) -> str:
        """Why `cast` cannot write this recipe; "" if it can."""
        return ""

    @property
    def written_as(self) -> ScalingRecipe:
        """A recipe of a simpler format, if there is one whose casts have the same bytes; otherwise this one."""
        return self

    @property
    def rotated_by(self) -> Rotation | None:
        """The rotation that the fields `rotation` and `rotation_seed` declare; None for recipes without them."""
        return rotation_of(getattr(self, "rotation", 0), getattr(self, "rotation_seed", 0))

    @property
    def unrotated(self) -> ScalingRecipe:
        """The recipe without its rotation, which writes the same bytes from what was rotated; this one if it has none.

        Raises RecipeError for one that rotates, and neither has the fields `rotation` and `rotation_seed` nor overrides this.
        """
        if self.format.rotation is None:
            return self
        if self.rotated_by is None:
            raise RecipeError(
                f"recipe {self.name!r} has a rotation: give it fields rotation and rotation_seed, or override unrotated."
            )
        return dataclasses.replace(self, rotation=0, rotation_seed=0)  # type: ignore[type-var]

    @cached_property
    def features(self) -> frozenset[str]:
        """What a kernel that writes this recipe knows: the features of its format, "scale_search", and "decode_only".

        "scale_search": a rule is a `breccia.rules.Search`. "decode_only": no kernel writes it.
        """
        own = {"decode_only": bool(self.decode_only), "scale_search": not self.decode_only and self.searches}
        return self.format.features | {name for name, there in own.items() if there}

    @property
    def searches(self) -> bool:
        """Whether the scales of blocks are searched for: `cast` then takes `importance=`."""
        return isinstance(self.rules[-1], Search)

    @cached_property
    def layout(self) -> Layout:
        """How scales map onto data when blocks run along the last axis; derived from the finest level's block."""
        match self.format.block:
            case (None, None):
                return PerTensor()
            case (1, None):
                return PerChannel()
            case (1, int(k)):
                return PerBlockK(k)
            case (int(m), int(k)):
                return PerBlockMN(m, k)
            case block:
                raise RecipeError(f"recipe {self.name!r}: no standard layout has blocks {block}; declare `layout`.")

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The scale rule of each level of `format`, global scale first."""
        return (LINEAR,) * len(self.format.levels)

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that determines the bytes of a cast.

        Recipes of equal fingerprint write equal bytes from equal (x, scale, seed) on every backend and in every release.
        Hashed is canonical JSON (sorted keys, no spaces) of the numerics version, the recipe's name, and the fields that affect
        bytes and are not at their default.
        """
        affects = {f.name: f.metadata.get("affects_bytes", True) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        fields = {name: value for name, value in self.changed.items() if affects[name]}
        return sha256({"numerics": NUMERICS, "recipe": self.name, "fields": fields})


def check_recipe(recipe: object) -> None:
    """Raise UnsupportedError unless `recipe` is a recipe; a class instead of an instance gets a hint."""
    if not isinstance(recipe, ScalingRecipe):
        class_name = recipe.__name__ if isinstance(recipe, type) else type(recipe).__name__
        hint = f"; did you mean {class_name}()?" if isinstance(recipe, type) else "."
        raise UnsupportedError(f"recipe must be a ScalingRecipe instance, got {class_name}{hint}")


def powers_of_two(recipe: ScalingRecipe) -> bool:
    """Whether the recipe writes only powers of two as scales of blocks"""
    rule = recipe.rules[-1]
    return isinstance(rule, Exponent) or (isinstance(rule, Inverse) and rule.power_of_two)


def _fp8_rule(scale_rule: str, power_of_two_scale: bool) -> Rule:
    """The rule of FP8 recipes with FP32 scales; "linear" and "te" support power-of-two scales."""
    if not power_of_two_scale:
        return FP8_RULES[scale_rule]
    return Inverse(TE.name, power_of_two=True) if scale_rule == TE.name else RCEIL


class FP8Blocks(ScalingRecipe):
    """Base of FP8 recipes with FP32 scales per block."""

    fp8_format: str
    power_of_two_scale: bool
    scale_rule: str

    def __post_init__(self) -> None:
        check_choices(self)
        check_type(type(self).__name__, "power_of_two_scale", self.power_of_two_scale, bool)
        if self.power_of_two_scale and self.scale_rule not in (LINEAR.name, TE.name):
            raise RecipeError(
                f"power_of_two_scale=True requires scale_rule='linear' or 'te', got {self.scale_rule!r}",
                scale_rule=self.scale_rule,
            )

    @property
    def block(self) -> Block:
        raise RecipeError(f"recipe {type(self).__name__} declares no block")

    @cached_property
    def format(self) -> Format:
        return Format(FP8[self.fp8_format], (Level(F32, self.block),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (_fp8_rule(self.scale_rule, self.power_of_two_scale),)


class MXBlocks(ScalingRecipe):
    """Base of the OCP MX recipes: `block_size` elements along K share an E8M0 scale."""

    block_size: int
    scale_rule: str

    def __post_init__(self) -> None:
        check_choices(self)
        _ = self.rotated_by

    @property
    def element(self) -> Codec:
        raise RecipeError(f"recipe {type(self).__name__} declares no element codec")

    @cached_property
    def format(self) -> Format:
        return Format(self.element, (Level(E8M0, (1, self.block_size)),), rotation=self.rotated_by)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (E8M0_RULES[self.scale_rule],)


class Integers(ScalingRecipe):
    """Base of the integer recipes: a float scale per `group_size` elements along K, or per row if None."""

    bits: Any  # a constant of the class, or a field
    group_size: Any  # int, or None for one scale per row
    signed: bool
    scale_dtype: str
    symmetric: bool
    scale_rule: str
    offset: str

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.group_size is not None:
            check_positive(owner, "group_size", self.group_size)
        check_type(owner, "signed", self.signed, bool)
        check_type(owner, "symmetric", self.symmetric, bool)
        check_choices(self)
        width = f"INT{self.bits}"
        if self.bits == 1 and self.signed:
            raise RecipeError(
                "one signed bit has no positive value; bits=1 requires signed=False, got signed=True", bits=1, signed=True
            )
        if not self.symmetric and self.signed:
            raise RecipeError(
                f"asymmetric {width} (symmetric=False) requires signed=False: the zero-point moves an unsigned "
                f"0..{INTEGERS[self.bits, False].high} range onto the values; got signed=True",
                signed=True,
                symmetric=False,
            )
        if self.symmetric and self.offset != "zero_point":
            raise RecipeError(f"offset={self.offset!r} requires symmetric=False; symmetric {width} has no offset")
        if self.scale_rule == HALF_RANGE.name and not self.signed:
            because = "" if self.symmetric else ", which symmetric=False requires"
            raise RecipeError(
                f"scale_rule='half_range' is for signed codes; got signed=False{because}", scale_rule=self.scale_rule
            )
        if self.scale_rule == MSE.name and not self.symmetric:
            raise RecipeError(
                "scale_rule='mse' searches scales of symmetric codes; got symmetric=False. Omit one of the two.",
                scale_rule=self.scale_rule,
            )

    @cached_property
    def format(self) -> Format:
        level = Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size))
        offset = "none" if self.symmetric else self.offset
        return Format(INTEGERS[self.bits, self.signed], (level,), offset, rotation=self.rotated_by)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (INTEGER_RULES[self.scale_rule],)
