"""Recipes: a format plus how to write it. Data, never behaviour; one algorithm reads them all.

To add one: a frozen dataclass with `name`, `source`, and the properties `format`, `layout`, `rules`. Every
framework then casts, decodes and multiplies it, and the conformance kit tests it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .codecs import BF16, E2M1, E4M3, E5M2, E8M0, F16, F32, INT4, UINT4, Codec
from .declared import Declared, check_positive, check_type
from .errors import RecipeError, UnsupportedError
from .formats import TENSOR, Format, Level
from .layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor
from .rules import EVEN, FLOOR, LINEAR, RCEIL, Linear, Rule

_FP8: dict[str, Codec] = {"E4M3": E4M3, "E5M2": E5M2}
_SCALE_FLOATS: dict[str, Codec] = {"fp16": F16, "bf16": BF16, "fp32": F32}
_E8M0_RULES: dict[str, Rule] = {rule.name: rule for rule in (RCEIL, FLOOR, EVEN)}


class ScalingRecipe(Declared):
    """Base of recipes: hashable, comparable by value, JSON-serializable.

    `name` is the stable identifier in files and on the command line; `source` cites where the format is defined.
    """

    kind: ClassVar[str] = "recipe"
    source: ClassVar[str] = ""

    @cached_property
    def format(self) -> Format:
        """What the written bytes mean."""
        raise RecipeError(f"recipe {type(self).__name__} declares no format")

    @cached_property
    def layout(self) -> Layout:
        """How scales map onto data when blocks run along the last axis; derived from the finest level's block."""
        match self.format.scale.block:
            case (None, None):
                return PerTensor()
            case (1, None):
                return PerChannel()
            case (int(m), int(k)):
                return PerBlockMN(m, k)
            case block:
                raise RecipeError(f"recipe {self.name!r}: no standard layout has blocks {block}; declare `layout`.")

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The scale rule of each level of `format`, coarse to fine."""
        return (LINEAR,) * len(self.format.levels)


def check_recipe(recipe: object) -> None:
    """Raise UnsupportedError unless `recipe` is a recipe; a class, the commonest slip, is named."""
    if not isinstance(recipe, ScalingRecipe):
        found = recipe.__name__ if isinstance(recipe, type) else type(recipe).__name__
        hint = f"; did you mean {found}()?" if isinstance(recipe, type) else "."
        raise UnsupportedError(f"recipe must be a ScalingRecipe instance, got {found}{hint}")


def _check_fp8_format(fp8_format: str) -> None:
    if not isinstance(fp8_format, str) or fp8_format not in _FP8:
        raise RecipeError(f"fp8_format must be 'E4M3' or 'E5M2', got {fp8_format!r}", fp8_format=fp8_format)


def _check_fixed(recipe: str, field: str, value: object, fixed: object, by: str = "") -> None:
    if value != fixed or type(value) is not type(fixed):
        raise RecipeError(f"{recipe} {field} is fixed at {fixed!r}{by}, got {value!r}", **{field: value})


@dataclass(frozen=True)
class DelayedScaling(ScalingRecipe):
    """Per-tensor FP8 whose scale is meant to come from a history of amax values.

    The history is a policy outside the recipe: `breccia.AmaxHistory` chooses a scale, `cast(x, recipe, scale=...)`
    takes it. Without `scale=`, the current amax is used. `margin` multiplies the scale by 2^margin.
    """

    name: ClassVar[str] = "delayed"
    source: ClassVar[str] = "TransformerEngine 2.x, common.recipe.DelayedScaling"
    fp8_format: str = "E4M3"
    amax_history_len: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        _check_fp8_format(self.fp8_format)
        check_type("DelayedScaling", "amax_history_len", self.amax_history_len, int)
        check_type("DelayedScaling", "margin", self.margin, int)
        if not -126 <= self.margin <= 126:
            raise RecipeError(f"margin must lie in -126..126 (2^margin is an FP32 number), got {self.margin}")
        if self.amax_history_len < 1:
            raise RecipeError(
                f"amax_history_len must be >= 1, got {self.amax_history_len}", amax_history_len=self.amax_history_len
            )

    @cached_property
    def format(self) -> Format:
        return Format(_FP8[self.fp8_format], (Level(F32, TENSOR),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (Linear("linear", self.margin),)


@dataclass(frozen=True)
class Float8CurrentScaling(ScalingRecipe):
    """Per-tensor FP8, scaled by the tensor's own amax."""

    name: ClassVar[str] = "current"
    source: ClassVar[str] = "TransformerEngine 2.x, common.recipe.Float8CurrentScaling"
    fp8_format: str = "E4M3"

    def __post_init__(self) -> None:
        _check_fp8_format(self.fp8_format)

    @cached_property
    def format(self) -> Format:
        return Format(_FP8[self.fp8_format], (Level(F32, TENSOR),))


@dataclass(frozen=True)
class Float8BlockScaling(ScalingRecipe):
    """FP8 with an FP32 scale per `block_k` elements along K, or per `block_m` x `block_k` tile.

    `block_m=1` is the activation form, `block_m=128` the weight form of DeepSeek-V3. `power_of_two_scale` rounds each
    scale up to a power of two.
    """

    name: ClassVar[str] = "block"
    source: ClassVar[str] = "DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2"
    fp8_format: str = "E4M3"
    block_k: int = 128
    block_m: int = 1
    power_of_two_scale: bool = False

    def __post_init__(self) -> None:
        _check_fp8_format(self.fp8_format)
        check_positive("Float8BlockScaling", "block_k", self.block_k)
        check_positive("Float8BlockScaling", "block_m", self.block_m)
        check_type("Float8BlockScaling", "power_of_two_scale", self.power_of_two_scale, bool)

    @cached_property
    def format(self) -> Format:
        return Format(_FP8[self.fp8_format], (Level(F32, (self.block_m, self.block_k)),))

    @cached_property
    def layout(self) -> Layout:
        return PerBlockK(self.block_k) if self.block_m == 1 else PerBlockMN(self.block_m, self.block_k)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (RCEIL if self.power_of_two_scale else LINEAR,)


@dataclass(frozen=True)
class MXFP8BlockScaling(ScalingRecipe):
    """OCP MXFP8: 32 elements along K share an E8M0 scale.

    `scale_rule`: "rceil" (default), "floor" (the OCP text), "even"; see `breccia.rules.Exponent`.
    """

    name: ClassVar[str] = "mxfp8"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    fp8_format: str = "E4M3"
    block_size: int = 32
    scale_rule: str = "rceil"

    def __post_init__(self) -> None:
        _check_fp8_format(self.fp8_format)
        _check_fixed("MXFP8", "block_size", self.block_size, 32, " by the OCP MX spec")
        if not isinstance(self.scale_rule, str) or self.scale_rule not in _E8M0_RULES:
            raise RecipeError(
                f"scale_rule must be one of {', '.join(_E8M0_RULES)}; got {self.scale_rule!r}",
                scale_rule=self.scale_rule,
            )

    @cached_property
    def format(self) -> Format:
        return Format(_FP8[self.fp8_format], (Level(E8M0, (1, self.block_size)),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (_E8M0_RULES[self.scale_rule],)


@dataclass(frozen=True)
class NVFP4BlockScaling(ScalingRecipe):
    """NVIDIA NVFP4: 16 E2M1 elements along K share an E4M3 scale, under one FP32 scale per tensor.

    `two_level=False` leaves the FP32 scale out: tensors of small values then decode to zeros. It is there to read
    data that was written so.
    """

    name: ClassVar[str] = "nvfp4"
    source: ClassVar[str] = "Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 2"
    fp4_format: str = "E2M1"
    block_size: int = 16
    scale_format: str = "E4M3"
    two_level: bool = True

    def __post_init__(self) -> None:
        _check_fixed("NVFP4", "fp4_format", self.fp4_format, "E2M1")
        _check_fixed("NVFP4", "block_size", self.block_size, 16)
        _check_fixed("NVFP4", "scale_format", self.scale_format, "E4M3")
        check_type("NVFP4BlockScaling", "two_level", self.two_level, bool)

    @cached_property
    def format(self) -> Format:
        block = Level(E4M3, (1, self.block_size))
        return Format(E2M1, (Level(F32, TENSOR), block) if self.two_level else (block,))


@dataclass(frozen=True)
class INT4Scaling(ScalingRecipe):
    """4-bit integers, a float scale per `group_size` elements along K (the GPTQ and AWQ family).

    Symmetric: `x = scale * code`, codes -8..7 if `signed`, else 0..15 (negative input saturates at 0).
    Asymmetric (`symmetric=False, signed=False`): `x = scale * (code - zero_point)`, codes and zero-points 0..15.
    """

    name: ClassVar[str] = "int4"
    source: ClassVar[str] = "GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978)"
    group_size: int = 128
    signed: bool = True
    scale_dtype: str = "fp16"
    symmetric: bool = True

    def __post_init__(self) -> None:
        check_positive("INT4Scaling", "group_size", self.group_size)
        check_type("INT4Scaling", "signed", self.signed, bool)
        check_type("INT4Scaling", "symmetric", self.symmetric, bool)
        if not isinstance(self.scale_dtype, str) or self.scale_dtype not in _SCALE_FLOATS:
            raise RecipeError(
                f"scale_dtype must be one of 'fp16', 'bf16', 'fp32', got {self.scale_dtype!r}",
                scale_dtype=self.scale_dtype,
            )
        if not self.symmetric and self.signed:
            raise RecipeError(
                "asymmetric INT4 (symmetric=False) requires signed=False: the zero-point moves an unsigned 0..15 range "
                "onto the values; got signed=True",
                signed=True,
                symmetric=False,
            )

    @cached_property
    def format(self) -> Format:
        level = Level(_SCALE_FLOATS[self.scale_dtype], (1, self.group_size))
        return Format(INT4 if self.signed else UINT4, (level,), "none" if self.symmetric else "zero_point")

    @cached_property
    def layout(self) -> Layout:
        return PerBlockK(self.group_size)


RECIPES: tuple[type[ScalingRecipe], ...] = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    INT4Scaling,
)
