"""Recipes: a format plus the rules to write it. Recipes are data only; one generic algorithm implements them all.

To add one: a frozen dataclass with `name`, `source`, and the properties `format`, `layout`, `rules`. Every
framework can then cast, decode and multiply it, and the conformance kit tests it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from .codecs import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    F32,
    FLOAT_CODECS,
    FLOAT_NAMES,
    INT4,
    INT8,
    MXINT8,
    NF4,
    UINT4,
    UINT8,
    Codec,
)
from .declared import Declared, check_positive, check_type, settle
from .errors import RecipeError, UnsupportedError
from .formats import CONVENTIONS, NUMERICS, TENSOR, Block, Format, Level, sha256
from .layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor
from .locks import cached_property
from .rules import DIVIDE, EVEN, FLOOR, HALF_RANGE, LINEAR, RCEIL, RECIP, TE, Inverse, Rule

_FP8: dict[str, Codec] = {"E4M3": E4M3, "E5M2": E5M2}
_FP6: dict[str, Codec] = {"E2M3": E2M3, "E3M2": E3M2}
_FP8_RULES: dict[str, Any] = {rule.name: rule for rule in (LINEAR, RECIP, DIVIDE, TE)}
_INTEGER_RULES: dict[str, Rule] = {rule.name: rule for rule in (LINEAR, RECIP, DIVIDE, HALF_RANGE)}
_E8M0_RULES: dict[str, Rule] = {rule.name: rule for rule in (RCEIL, FLOOR, EVEN)}


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

    @cached_property
    def layout(self) -> Layout:
        """How scales map onto data when blocks run along the last axis; derived from the finest level's block."""
        match self.format.scale.block:
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


def _check_fixed(recipe: ScalingRecipe, title: str, field: str, fixed: object, by: str = "") -> None:
    """Raise RecipeError unless the field has its only value; text may be in any case."""
    value = getattr(recipe, field)
    if isinstance(value, str) and isinstance(fixed, str) and value.lower() == fixed.lower():
        object.__setattr__(recipe, field, fixed)
    elif value != fixed or type(value) is not type(fixed):
        raise RecipeError(f"{title} {field} is fixed at {fixed!r}{by}, got {value!r}", **{field: value})


def one_of(allowed: Iterable[object], by: str = "", aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Metadata of a recipe's field that takes only these values; `check_choices` checks it, and `breccia recipes` lists them.

    by: for a single value, what fixes it. aliases: canonical spellings by lower-case ones, as `settle` takes them.
    """
    return {"choices": tuple(allowed), "by": by, "aliases": aliases or {}}


def choices_of(kind: type[ScalingRecipe], name: str) -> tuple[tuple[Any, ...], str]:
    """The values that a field takes and what fixes a single one; () for any value.

    A subclass that redeclares a field to change its default keeps the choices, unless it declares others.
    """
    metadata = _metadata(kind, name, "choices")
    return metadata.get("choices", ()), metadata.get("by", "")


def _metadata(kind: type[ScalingRecipe], name: str, key: str) -> Mapping[str, Any]:
    """The metadata of a field, from the nearest base that declares `key` for it; {} if none does."""
    for base in kind.__mro__:
        declared: dict[str, dataclasses.Field[Any]] = base.__dict__.get("__dataclass_fields__", {})
        if name in declared and key in declared[name].metadata:
            return declared[name].metadata
    return {}


def implying(value: Any, **fields: Any) -> dict[str, Any]:
    """Metadata of a field one of whose values requires values of other fields: in a spec, `value` sets the missing ones."""
    return {"implies": (value, fields)}


def implication_of(kind: type[ScalingRecipe], name: str) -> tuple[Any, dict[str, Any]]:
    """The value of a field that requires values of other fields, and those; (None, {}) if there is none."""
    return _metadata(kind, name, "implies").get("implies", (None, {}))


def with_implied(kind: type[ScalingRecipe], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields`, and the missing ones that they require: `offset=bias` is `symmetric=False`, and that is `signed=False`.

    Only what would be refused otherwise is set; a given value stays, and a recipe refuses one that contradicts another.
    """
    settings = dict(fields)
    waiting = list(fields)
    while waiting:
        name = waiting.pop()
        value, implied = implication_of(kind, name)
        setting = settings[name].lower() if isinstance(settings[name], str) else settings[name]
        if type(setting) is type(value) and setting == value:
            added = {other: of for other, of in implied.items() if other not in settings}
            settings |= added
            waiting += added
    return settings


def check_choices(recipe: ScalingRecipe) -> None:
    """Set fields with choices to their canonical spelling. Raises RecipeError for a value that is not among the choices."""
    for f in dataclasses.fields(recipe):  # type: ignore[arg-type]
        choices, by = choices_of(type(recipe), f.name)
        if len(choices) == 1:
            _check_fixed(recipe, type(recipe).__name__.removesuffix("BlockScaling"), f.name, choices[0], by)
        elif choices:
            settle(recipe, f.name, choices, f.metadata.get("aliases", {}))


def _fp8_rule(scale_rule: str, power_of_two_scale: bool) -> Rule:
    """The rule of FP8 recipes with FP32 scales; "linear" and "te" support power-of-two scales."""
    if not power_of_two_scale:
        return _FP8_RULES[scale_rule]
    return Inverse(TE.name, power_of_two=True) if scale_rule == TE.name else RCEIL


class _FP8Blocks(ScalingRecipe):
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
        return Format(_FP8[self.fp8_format], (Level(F32, self.block),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (_fp8_rule(self.scale_rule, self.power_of_two_scale),)


class _MX(ScalingRecipe):
    """Base of the OCP MX recipes: `block_size` elements along K share an E8M0 scale."""

    block_size: int
    scale_rule: str

    def __post_init__(self) -> None:
        check_choices(self)

    @property
    def element(self) -> Codec:
        raise RecipeError(f"recipe {type(self).__name__} declares no element codec")

    @cached_property
    def format(self) -> Format:
        return Format(self.element, (Level(E8M0, (1, self.block_size)),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (_E8M0_RULES[self.scale_rule],)


class _Integers(ScalingRecipe):
    """Base of the integer recipes: a float scale per `group_size` elements along K, or per row if None."""

    group_size: Any  # int, or None for one scale per row
    signed: bool
    scale_dtype: str
    symmetric: bool
    scale_rule: str
    offset: str
    #: The (unsigned, signed) element codecs.
    codecs: ClassVar[tuple[Codec, Codec]]

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_type(owner, "signed", self.signed, bool)
        check_type(owner, "symmetric", self.symmetric, bool)
        check_choices(self)
        width = f"INT{self.codecs[0].bits}"
        if not self.symmetric and self.signed:
            raise RecipeError(
                f"asymmetric {width} (symmetric=False) requires signed=False: the zero-point moves an unsigned "
                f"0..{self.codecs[0].max:g} range onto the values; got signed=True",
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

    @cached_property
    def format(self) -> Format:
        level = Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size))
        return Format(self.codecs[self.signed], (level,), "none" if self.symmetric else self.offset)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (_INTEGER_RULES[self.scale_rule],)


@dataclass(frozen=True)
class DelayedScaling(ScalingRecipe):
    """Per-tensor FP8 with a scale chosen from a history of amax values.

    The recipe does not keep the history: `breccia.AmaxHistory` chooses a scale, and `cast(x, recipe, scale=...)`
    uses it. Without `scale=`, the current amax is used. `margin` multiplies the scale by 2^margin. `scale_rule` is that of
    `Float8CurrentScaling`.
    """

    name: ClassVar[str] = "fp8_delayed"
    aliases: ClassVar[tuple[str, ...]] = ("delayed",)
    source: ClassVar[str] = "TransformerEngine 2.x, common.recipe.DelayedScaling"
    fp8_format: str = field(default="E4M3", metadata=one_of(_FP8))
    amax_history_len: int = field(default=16, metadata={"affects_bytes": False})
    margin: int = 0
    scale_rule: str = field(default="linear", metadata=one_of(_FP8_RULES))

    def __post_init__(self) -> None:
        check_choices(self)
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
        return (replace(_FP8_RULES[self.scale_rule], margin=self.margin),)


@dataclass(frozen=True)
class Float8CurrentScaling(ScalingRecipe):
    """Per-tensor FP8, scaled by the tensor's own amax.

    `scale_rule`: "linear" (default), "recip", "divide", "te"; see `breccia.rules`.
    """

    name: ClassVar[str] = "fp8_current"
    aliases: ClassVar[tuple[str, ...]] = ("current",)
    source: ClassVar[str] = "TransformerEngine 2.x, common.recipe.Float8CurrentScaling"
    fp8_format: str = field(default="E4M3", metadata=one_of(_FP8))
    scale_rule: str = field(default="linear", metadata=one_of(_FP8_RULES))

    def __post_init__(self) -> None:
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(_FP8[self.fp8_format], (Level(F32, TENSOR),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (_FP8_RULES[self.scale_rule],)


@dataclass(frozen=True)
class Float8RowScaling(_FP8Blocks):
    """FP8 with one FP32 scale per row along K: per token for activations, per output channel for weights.

    `power_of_two_scale` and `scale_rule` are those of `Float8BlockScaling`.
    """

    name: ClassVar[str] = "fp8_row"
    aliases: ClassVar[tuple[str, ...]] = ("row",)
    source: ClassVar[str] = "torchao 0.18, float8 rowwise scaling (PerRow)"
    fp8_format: str = field(default="E4M3", metadata=one_of(_FP8))
    power_of_two_scale: bool = False
    scale_rule: str = field(default="linear", metadata=one_of(_FP8_RULES))

    @property
    def block(self) -> Block:
        return (1, None)


@dataclass(frozen=True)
class Float8BlockScaling(_FP8Blocks):
    """FP8 with an FP32 scale per `block_k` elements along K, or per `block_m` x `block_k` tile.

    `block_m=1` is DeepSeek-V3's form for activations, `block_m=128` its form for weights. `power_of_two_scale` rounds each
    scale up to a power of two. `scale_rule`: "linear" (default), "recip", "divide", "te"; see `breccia.rules`.
    """

    name: ClassVar[str] = "fp8_block"
    aliases: ClassVar[tuple[str, ...]] = ("block",)
    source: ClassVar[str] = "DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2"
    fp8_format: str = field(default="E4M3", metadata=one_of(_FP8))
    block_k: int = 128
    block_m: int = 1
    power_of_two_scale: bool = False
    scale_rule: str = field(default="linear", metadata=one_of(_FP8_RULES))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("Float8BlockScaling", "block_k", self.block_k)
        check_positive("Float8BlockScaling", "block_m", self.block_m)

    @property
    def block(self) -> Block:
        return (self.block_m, self.block_k)


@dataclass(frozen=True)
class MXFP8BlockScaling(_MX):
    """OCP MXFP8: 32 elements along K share an E8M0 scale.

    `scale_rule`: "rceil" (default), "floor" (the OCP text), "even"; see `breccia.rules.Exponent`.
    """

    name: ClassVar[str] = "mxfp8"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    fp8_format: str = field(default="E4M3", metadata=one_of(_FP8))
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(_E8M0_RULES))

    @property
    def element(self) -> Codec:
        return _FP8[self.fp8_format]


@dataclass(frozen=True)
class MXFP6BlockScaling(_MX):
    """OCP MXFP6: 32 elements of 6 bits along K, four in three bytes, share an E8M0 scale.

    `fp6_format`: "E2M3" (default: finer steps) or "E3M2" (wider range). `scale_rule` is that of `MXFP8BlockScaling`.
    """

    name: ClassVar[str] = "mxfp6"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    fp6_format: str = field(default="E2M3", metadata=one_of(_FP6))
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(_E8M0_RULES))

    @property
    def element(self) -> Codec:
        return _FP6[self.fp6_format]


@dataclass(frozen=True)
class MXFP4BlockScaling(_MX):
    """OCP MXFP4: 32 E2M1 elements along K share an E8M0 scale. `scale_rule` is that of `MXFP8BlockScaling`."""

    name: ClassVar[str] = "mxfp4"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(_E8M0_RULES))

    @property
    def element(self) -> Codec:
        return E2M1


@dataclass(frozen=True)
class MXINT8BlockScaling(_MX):
    """OCP MXINT8: 32 two's complement fixed-point elements (1.6 bits, up to 1.984375) along K share an E8M0 scale.

    `scale_rule` is that of `MXFP8BlockScaling`. Code -128, which the specification leaves open, is written for values that
    saturate below under "floor" and "even".
    """

    name: ClassVar[str] = "mxint8"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(_E8M0_RULES))

    @property
    def element(self) -> Codec:
        return MXINT8


@dataclass(frozen=True)
class NVFP4BlockScaling(ScalingRecipe):
    """NVIDIA NVFP4: 16 E2M1 elements along K share an E4M3 scale, under one FP32 scale per tensor.

    `two_level=False` omits the FP32 scale: tensors of small values then decode to zeros. Use it to read
    data written that way. `global_sense` is the scale convention of the FP32 scale: "multiplier" (default; torchao, ModelOpt),
    "divisor" (compressed-tensors) or "amax" (TransformerEngine, MLX).
    """

    name: ClassVar[str] = "nvfp4"
    source: ClassVar[str] = "Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 2"
    fp4_format: str = field(default="E2M1", metadata=one_of(("E2M1",)))
    block_size: int = field(default=16, metadata=one_of((16,)))
    scale_format: str = field(default="E4M3", metadata=one_of(("E4M3",)))
    two_level: bool = True
    global_sense: str = field(default="multiplier", metadata={"added": True, **one_of(CONVENTIONS)})

    def __post_init__(self) -> None:
        check_choices(self)
        check_type("NVFP4BlockScaling", "two_level", self.two_level, bool)
        if not self.two_level and self.global_sense != "multiplier":
            raise RecipeError(
                f"global_sense={self.global_sense!r} is that of the tensor's FP32 scale, absent with two_level=False; "
                "omit one of the two.",
                global_sense=self.global_sense,
            )

    @cached_property
    def format(self) -> Format:
        block = Level(E4M3, (1, self.block_size))
        return Format(E2M1, (Level(F32, TENSOR, self.global_sense), block) if self.two_level else (block,))


@dataclass(frozen=True)
class INT4Scaling(_Integers):
    """4-bit integers, a float scale per `group_size` elements along K (the GPTQ and AWQ family).

    Symmetric: `x = scale * code`, codes -8..7 if `signed`, else 0..15 (negative input saturates at 0).
    Asymmetric (`symmetric=False, signed=False`): codes 0..15, and by `offset`
        "zero_point": `x = scale * (code - zero_point)`, zero-points 0..15, zero exactly representable;
        "bias": `x = scale * code + bias`, a float bias stored like the scale (MLX's affine mode, GGUF Q4_1).
    `scale_rule`: "linear" (default: amax / 7), "recip", "divide", "half_range" (amax / 7.5); see `breccia.rules`.
    """

    name: ClassVar[str] = "int4"
    source: ClassVar[str] = "GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978)"
    codecs: ClassVar[tuple[Codec, Codec]] = (UINT4, INT4)
    group_size: int = 128
    signed: bool = True
    scale_dtype: str = field(default="fp16", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))
    symmetric: bool = field(default=True, metadata=implying(False, signed=False))
    scale_rule: str = field(default="linear", metadata=one_of(_INTEGER_RULES))
    offset: str = field(default="zero_point", metadata=one_of(("zero_point", "bias")) | implying("bias", symmetric=False))

    def __post_init__(self) -> None:
        check_positive("INT4Scaling", "group_size", self.group_size)
        super().__post_init__()


@dataclass(frozen=True)
class INT8Scaling(_Integers):
    """8-bit integers, a float scale per row along K, or per `group_size` elements of it.

    Per row (`group_size=None`) is per output channel for weights, per token for activations. Otherwise like `INT4Scaling`, with
    codes and zero-points -128..127 or 0..255.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "LLM.int8() (arXiv:2208.07339), SmoothQuant (arXiv:2211.10438)"
    codecs: ClassVar[tuple[Codec, Codec]] = (UINT8, INT8)
    group_size: int | None = None
    signed: bool = True
    scale_dtype: str = field(default="fp32", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))
    symmetric: bool = field(default=True, metadata=implying(False, signed=False))
    scale_rule: str = field(default="linear", metadata=one_of(_INTEGER_RULES))
    offset: str = field(default="zero_point", metadata=one_of(("zero_point", "bias")) | implying("bias", symmetric=False))

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_positive("INT8Scaling", "group_size", self.group_size)
        super().__post_init__()


@dataclass(frozen=True)
class NF4Scaling(ScalingRecipe):
    """4-bit codes of a table of normal quantiles, a float scale per `block_size` elements along K (QLoRA's NF4)."""

    name: ClassVar[str] = "nf4"
    source: ClassVar[str] = "QLoRA (arXiv:2305.14314), section 3"
    block_size: int = 64
    scale_dtype: str = field(default="fp32", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))

    def __post_init__(self) -> None:
        check_positive("NF4Scaling", "block_size", self.block_size)
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(NF4, (Level(FLOAT_CODECS[self.scale_dtype], (1, self.block_size)),))


RECIPES: tuple[type[ScalingRecipe], ...] = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    MXFP6BlockScaling,
    MXFP4BlockScaling,
    MXINT8BlockScaling,
    NVFP4BlockScaling,
    INT4Scaling,
    INT8Scaling,
    NF4Scaling,
)
