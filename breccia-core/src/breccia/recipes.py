"""Recipes: a format plus the rules to write it. Recipes are data only; one generic algorithm implements them all.

To add one: a frozen dataclass with `name`, `source`, and the properties `format`, `layout`, `rules`. Every
framework can then cast, decode and multiply it, and the conformance kit tests it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from .codecs import (
    CODECS,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    FLOAT_CODECS,
    FLOAT_NAMES,
    INTEGERS,
    IQ4,
    MXINT8,
    NF4,
    TERNARY,
    UE5M3,
    Codec,
    Lookup,
    PowerOfTwo,
)
from .declared import check_positive, check_type, settle
from .errors import RecipeError
from .formats import CONVENTIONS, OFFSETS, ORDERS, TENSOR, Block, Format, Level
from .locks import cached_property
from .recipe_bases import (
    E8M0_RULES,
    FP8,
    FP8_RULES,
    INTEGER_RULES,
    NVFP4_RULES,
    TABLE_RULES,
    FP8Blocks,
    Integers,
    MXBlocks,
)
from .recipe_bases import ScalingRecipe as ScalingRecipe
from .recipe_bases import check_recipe as check_recipe
from .recipe_fields import check_choices, implying, one_of
from .recipe_fields import choices_of as choices_of
from .recipe_fields import each_of as each_of
from .recipe_fields import implication_of as implication_of
from .recipe_fields import with_implied as with_implied
from .rotations import ROTATIONS
from .rules import LINEAR, Rule

_MXFP8: dict[str, Codec] = {"E4M3": E4M3, "E5M2": E5M2}
_FP6: dict[str, Codec] = {"E2M3": E2M3, "E3M2": E3M2}
_NVFP4_SCALES: dict[str, Codec] = {"E4M3": E4M3, "UE5M3": UE5M3}
#: The offsets that a recipe of integers has if they are asked for; "zero_point" is the default.
_OFFSETS = OFFSETS[2:]


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
    fp8_format: str = field(default="E4M3", metadata=one_of(FP8))
    amax_history_len: int = field(default=16, metadata={"affects_bytes": False})
    margin: int = 0
    scale_rule: str = field(default="linear", metadata=one_of(FP8_RULES))

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
        return Format(FP8[self.fp8_format], (Level(F32, TENSOR),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (replace(FP8_RULES[self.scale_rule], margin=self.margin),)


@dataclass(frozen=True)
class Float8CurrentScaling(ScalingRecipe):
    """Per-tensor FP8, scaled by the tensor's own amax.

    `fp8_format`: "E4M3" (default) or "E5M2"; "E4M3FNUZ" or "E5M2FNUZ" for AMD MI300, whose codes stand for other numbers.
    `scale_rule`: "linear" (default), "recip", "divide", "te"; see `breccia.rules`.
    """

    name: ClassVar[str] = "fp8_current"
    aliases: ClassVar[tuple[str, ...]] = ("current",)
    source: ClassVar[str] = "TransformerEngine 2.x, common.recipe.Float8CurrentScaling"
    fp8_format: str = field(default="E4M3", metadata=one_of(FP8))
    scale_rule: str = field(default="linear", metadata=one_of(FP8_RULES))

    def __post_init__(self) -> None:
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(FP8[self.fp8_format], (Level(F32, TENSOR),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (FP8_RULES[self.scale_rule],)


@dataclass(frozen=True)
class Float8RowScaling(FP8Blocks):
    """FP8 with one FP32 scale per row along K: per token for activations, per output channel for weights.

    `power_of_two_scale` and `scale_rule` are those of `Float8BlockScaling`.
    """

    name: ClassVar[str] = "fp8_row"
    aliases: ClassVar[tuple[str, ...]] = ("row",)
    source: ClassVar[str] = "torchao 0.18, float8 rowwise scaling (PerRow)"
    fp8_format: str = field(default="E4M3", metadata=one_of(FP8))
    power_of_two_scale: bool = False
    scale_rule: str = field(default="linear", metadata=one_of(FP8_RULES))

    @property
    def block(self) -> Block:
        return (1, None)


@dataclass(frozen=True)
class Float8BlockScaling(FP8Blocks):
    """FP8 with an FP32 scale per `block_k` elements along K, or per `block_m` x `block_k` tile.

    `block_m=1` is DeepSeek-V3's form for activations, `block_m=128` its form for weights. `power_of_two_scale` rounds each
    scale up to a power of two. `scale_rule`: "linear" (default), "recip", "divide", "te"; see `breccia.rules`.
    """

    name: ClassVar[str] = "fp8_block"
    aliases: ClassVar[tuple[str, ...]] = ("block",)
    source: ClassVar[str] = "DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2"
    fp8_format: str = field(default="E4M3", metadata=one_of(FP8))
    block_k: int = 128
    block_m: int = 1
    power_of_two_scale: bool = False
    scale_rule: str = field(default="linear", metadata=one_of(FP8_RULES))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("Float8BlockScaling", "block_k", self.block_k)
        check_positive("Float8BlockScaling", "block_m", self.block_m)

    @property
    def block(self) -> Block:
        return (self.block_m, self.block_k)


@dataclass(frozen=True)
class MXFP8BlockScaling(MXBlocks):
    """OCP MXFP8: 32 elements along K share an E8M0 scale.

    `scale_rule`: "rceil" (default), "floor" (the OCP text), "even", "mse"; see `breccia.rules.Exponent` and `Search`.
    """

    name: ClassVar[str] = "mxfp8"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    fp8_format: str = field(default="E4M3", metadata=one_of(_MXFP8))
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(E8M0_RULES))

    @property
    def element(self) -> Codec:
        return _MXFP8[self.fp8_format]


@dataclass(frozen=True)
class MXFP6BlockScaling(MXBlocks):
    """OCP MXFP6: 32 elements of 6 bits along K, four in three bytes, share an E8M0 scale.

    `fp6_format`: "E2M3" (default: finer steps) or "E3M2" (wider range). `scale_rule` is that of `MXFP8BlockScaling`.
    """

    name: ClassVar[str] = "mxfp6"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    fp6_format: str = field(default="E2M3", metadata=one_of(_FP6))
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(E8M0_RULES))

    @property
    def element(self) -> Codec:
        return _FP6[self.fp6_format]


@dataclass(frozen=True)
class MXFP4BlockScaling(MXBlocks):
    """OCP MXFP4: 32 E2M1 elements along K share an E8M0 scale.

    `scale_rule` is that of `MXFP8BlockScaling`, `rotation` that of `NVFP4BlockScaling`.
    """

    name: ClassVar[str] = "mxfp4"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(E8M0_RULES))
    rotation: int = field(default=0, metadata={"added": True, **one_of(ROTATIONS)})
    rotation_seed: int = field(default=0, metadata={"added": True})

    @property
    def element(self) -> Codec:
        return E2M1


@dataclass(frozen=True)
class MXINT8BlockScaling(MXBlocks):
    """OCP MXINT8: 32 two's complement fixed-point elements (1.6 bits, up to 1.984375) along K share an E8M0 scale.

    `scale_rule` is that of `MXFP8BlockScaling`. Code -128, which the specification leaves open, is written for values that
    saturate below under "floor" and "even".
    """

    name: ClassVar[str] = "mxint8"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification v1.0, section 5"
    block_size: int = field(default=32, metadata=one_of((32,), by=" by the OCP MX spec"))
    scale_rule: str = field(default="rceil", metadata=one_of(E8M0_RULES))

    @property
    def element(self) -> Codec:
        return MXINT8


@dataclass(frozen=True)
class NVFP4BlockScaling(ScalingRecipe):
    """NVIDIA NVFP4: 16 E2M1 elements along K share an E4M3 scale, under one FP32 scale per tensor.

    `block_m=16` has a scale for each tile of 16 x 16, the form of weights in training: rows and columns have the same codes.
    `scale_format="UE5M3"` uses the sign bit, which scales do not need, for the exponent: scales from 2^-17 to 114688.
    `two_level=False` omits the FP32 scale: under E4M3 scales, tensors of small values then decode to zeros. Use it to read
    data written that way. `global_sense` is the scale convention of the FP32 scale: "multiplier" (default; torchao, ModelOpt),
    "divisor" (compressed-tensors) or "amax" (TransformerEngine, MLX). `order` is that of decoding: "codes_first" (default),
    (code * block scale) * FP32 scale; or "scales_first", code * (block scale * FP32 scale), as in torchao and ModelOpt.
    `scale_rule`: "linear" (default), "mse", "four_six"; see `breccia.rules`. `rotation`: the elements of blocks of 16, 32, 64
    or 128 along K are mixed by a Hadamard matrix with signs drawn from `rotation_seed`; see `breccia.rotations`.
    """

    name: ClassVar[str] = "nvfp4"
    source: ClassVar[str] = "Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), section 2"
    fp4_format: str = field(default="E2M1", metadata=one_of(("E2M1",)))
    block_size: int = field(default=16, metadata=one_of((16,)))
    scale_format: str = field(default="E4M3", metadata=one_of(_NVFP4_SCALES))
    two_level: bool = True
    global_sense: str = field(default="multiplier", metadata={"added": True, **one_of(CONVENTIONS)})
    order: str = field(default="codes_first", metadata={"added": True, **one_of(ORDERS)})
    scale_rule: str = field(default="linear", metadata={"added": True, **one_of(NVFP4_RULES)})
    block_m: int = field(default=1, metadata={"added": True, **one_of((1, 16))})
    rotation: int = field(default=0, metadata={"added": True, **one_of(ROTATIONS)})
    rotation_seed: int = field(default=0, metadata={"added": True})

    def __post_init__(self) -> None:
        check_choices(self)
        check_type("NVFP4BlockScaling", "two_level", self.two_level, bool)
        _ = self.rotated_by
        if not self.two_level and self.order != "codes_first":
            raise RecipeError(
                f"order={self.order!r} is that of two scales, and two_level=False has one; omit one of the two.",
                order=self.order,
            )
        if not self.two_level and self.global_sense != "multiplier":
            raise RecipeError(
                f"global_sense={self.global_sense!r} is that of the tensor's FP32 scale, absent with two_level=False; "
                "omit one of the two.",
                global_sense=self.global_sense,
            )

    @property
    def written_as(self) -> ScalingRecipe:
        return self if self.order == "codes_first" else replace(self, order="codes_first")

    @cached_property
    def format(self) -> Format:
        block = Level(_NVFP4_SCALES[self.scale_format], (self.block_m, self.block_size))
        levels = (Level(F32, TENSOR, self.global_sense), block) if self.two_level else (block,)
        return Format(E2M1, levels, order=self.order, rotation=self.rotated_by)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        rule = NVFP4_RULES[self.scale_rule]
        return (LINEAR, rule) if self.two_level else (rule,)


@dataclass(frozen=True)
class INT4Scaling(Integers):
    """4-bit integers, a float scale per `group_size` elements along K (the GPTQ and AWQ family).

    Symmetric: `x = scale * code`, codes -8..7 if `signed`, else 0..15 (negative input saturates at 0).
    Asymmetric (`symmetric=False, signed=False`): codes 0..15, and by `offset`
        "zero_point": `x = scale * (code - zero_point)`, zero-points 0..15, zero exactly representable;
        "float_zero_point": the same, with a float zero-point stored like the scale (HQQ);
        "bias": `x = scale * code + bias`, a float bias stored like the scale (MLX's affine mode, GGUF Q4_1).
    `scale_rule`: "linear" (default: amax / 7), "recip", "divide", "half_range" (amax / 7.5), "mse"; see `breccia.rules`.
    `rotation` is that of `NVFP4BlockScaling`.
    """

    name: ClassVar[str] = "int4"
    source: ClassVar[str] = "GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978)"
    bits: ClassVar[int] = 4  # pyright: ignore[reportIncompatibleVariableOverride]
    group_size: int = 128
    signed: bool = True
    scale_dtype: str = field(default="fp16", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))
    symmetric: bool = field(default=True, metadata=implying(False, signed=False))
    scale_rule: str = field(default="linear", metadata=one_of(INTEGER_RULES))
    offset: str = field(default="zero_point", metadata=one_of(OFFSETS[1:]) | implying(_OFFSETS, symmetric=False))
    rotation: int = field(default=0, metadata={"added": True, **one_of(ROTATIONS)})
    rotation_seed: int = field(default=0, metadata={"added": True})

    def __post_init__(self) -> None:
        check_positive("INT4Scaling", "group_size", self.group_size)
        _ = self.rotated_by
        super().__post_init__()


@dataclass(frozen=True)
class INT8Scaling(Integers):
    """8-bit integers, a float scale per row along K, or per `group_size` elements of it.

    Per row (`group_size=None`) is per output channel for weights, per token for activations. Otherwise like `INT4Scaling`, with
    codes and zero-points -128..127 or 0..255.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "LLM.int8() (arXiv:2208.07339), SmoothQuant (arXiv:2211.10438)"
    bits: ClassVar[int] = 8  # pyright: ignore[reportIncompatibleVariableOverride]
    group_size: int | None = None
    signed: bool = True
    scale_dtype: str = field(default="fp32", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))
    symmetric: bool = field(default=True, metadata=implying(False, signed=False))
    scale_rule: str = field(default="linear", metadata=one_of(INTEGER_RULES))
    offset: str = field(default="zero_point", metadata=one_of(OFFSETS[1:]) | implying(_OFFSETS, symmetric=False))


@dataclass(frozen=True)
class INTScaling(Integers):
    """Integers of 1 to 8 bits, packed without gaps, a float scale per `group_size` elements along K, or per row if None.

    Like `INT4Scaling`, with codes of `bits` bits: -2^(bits-1)..2^(bits-1)-1 if `signed`, else 0..2^bits-1, as zero-points are.
    Of 4 and 8 bits it has the formats, and writes the bytes, of `INT4Scaling` and `INT8Scaling`. One bit is unsigned.
    `scale_rule`: "linear" (default: amax by the largest code), "recip", "divide", "half_range" (amax by half the width of the
    range of signed codes, 1.5 for 2 bits, 3.5 for 3), "mse"; see `breccia.rules`.
    """

    name: ClassVar[str] = "int"
    source: ClassVar[str] = "GPTQ (arXiv:2210.17323); ggml's Q5_0 and Q5_1"
    bits: int = field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=4, metadata=one_of(range(1, 9)) | implying(1, signed=False)
    )
    group_size: int | None = 128
    signed: bool = True
    scale_dtype: str = field(default="fp16", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))
    symmetric: bool = field(default=True, metadata=implying(False, signed=False))
    scale_rule: str = field(default="linear", metadata=one_of(INTEGER_RULES))
    offset: str = field(default="zero_point", metadata=one_of(OFFSETS[1:]) | implying(_OFFSETS, symmetric=False))


@dataclass(frozen=True)
class NF4Scaling(ScalingRecipe):
    """4-bit codes of a table of normal quantiles, a float scale per `block_size` elements along K (QLoRA's NF4).

    `scale_rule`: "linear" (default: amax), "mse"; see `breccia.rules`.
    """

    name: ClassVar[str] = "nf4"
    source: ClassVar[str] = "QLoRA (arXiv:2305.14314), section 3"
    block_size: int = 64
    scale_dtype: str = field(default="fp32", metadata=one_of(FLOAT_CODECS, aliases=FLOAT_NAMES))
    scale_rule: str = field(default="linear", metadata={"added": True, **one_of(TABLE_RULES)})

    def __post_init__(self) -> None:
        check_positive("NF4Scaling", "block_size", self.block_size)
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(NF4, (Level(FLOAT_CODECS[self.scale_dtype], (1, self.block_size)),))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return (TABLE_RULES[self.scale_rule],)


@dataclass(frozen=True)
class FlatScaling(ScalingRecipe):
    """Codes of any element codec with one FP32 scale, and one FP32 offset, for each block of elements along K, or row if None.

    It is what scales of several levels become when they are multiplied (`breccia.kernels.flattening`), and takes more bytes.
    """

    name: ClassVar[str] = "flat"
    source: ClassVar[str] = "breccia"
    element: str = "UINT4"
    block_size: int | None = 32
    offset: str = field(default="none", metadata=one_of(("none", "zero_point", "bias")))

    def __post_init__(self) -> None:
        check_choices(self)
        settle(self, "element", tuple(self.elements()))
        if self.block_size is not None:
            check_positive("FlatScaling", "block_size", self.block_size)
        _ = self.format

    @staticmethod
    def elements() -> dict[str, Codec]:
        """The codecs that elements may have, by name."""
        return {codec.name: codec for codec in CODECS if codec.bits <= 8 and not isinstance(codec, PowerOfTwo)}

    @property
    def decode_only(self) -> str:
        return "its table has no 0" if isinstance(self.format.element, Lookup) and 0.0 not in self.format.element.values else ""

    @cached_property
    def format(self) -> Format:
        return Format(self.elements()[self.element], (Level(F32, (1, self.block_size)),), self.offset)


#: Of each type of GGUF with super-blocks: the element, elements per scale, the codec of scales, and whether there are biases.
_SUPER_BLOCKS: dict[str, tuple[Codec, int, Codec, bool]] = {
    "Q2_K": (INTEGERS[2, False], 16, INTEGERS[4, False], True),
    "Q3_K": (INTEGERS[3, True], 16, INTEGERS[6, True], False),
    "Q4_K": (INTEGERS[4, False], 32, INTEGERS[6, False], True),
    "Q5_K": (INTEGERS[5, False], 32, INTEGERS[6, False], True),
    "Q6_K": (INTEGERS[6, True], 16, INTEGERS[8, True], False),
    "IQ4_XS": (IQ4, 32, INTEGERS[6, True], False),
}
#: Of the types with tables and one FP16 scale: the element, and elements per scale.
_TABLES: dict[str, tuple[Codec, int]] = {"IQ4_NL": (IQ4, 32), "TQ1_0": (TERNARY, 256), "TQ2_0": (TERNARY, 256)}


@dataclass(frozen=True)
class GGUFScaling(ScalingRecipe):
    """The formats of GGUF files that no other recipe has, by the type of their tensors.

    Q2_K to Q6_K: integers of 2 to 6 bits in super-blocks of 256 elements with one FP16 scale, and a coded scale per 16 or
    32 elements; those of Q2_K, Q4_K, Q5_K are unsigned, with coded biases. IQ4_XS: 16 fixed numbers in such super-blocks.
    IQ4_NL: the same numbers, an FP16 scale per 32 elements. TQ1_0, TQ2_0: -1, 0, 1 (and 2, which no program writes) with an
    FP16 scale per 256 elements, held in 2 bits; files of TQ1_0 have 1.6.

    A cast computes scales by the rule "linear" on both levels, without llama.cpp's search. It does not write IQ4 and TQ types.
    """

    name: ClassVar[str] = "gguf"
    source: ClassVar[str] = "llama.cpp, ggml-common.h and ggml-quants.c (GGUF version 3)"
    type: str = field(default="Q4_K", metadata=one_of((*_SUPER_BLOCKS, *_TABLES)))

    def __post_init__(self) -> None:
        check_choices(self)

    @property
    def decode_only(self) -> str:
        if not isinstance(self.format.element, Lookup):
            return ""
        return (
            "its table has no 0"
            if self.format.element is IQ4
            else "its scale is the value of 1, which no rule of a cast computes"
        )

    @cached_property
    def format(self) -> Format:
        if self.type in _TABLES:
            element, size = _TABLES[self.type]
            return Format(element, (Level(F16, (1, size)),))
        element, size, codec, biased = _SUPER_BLOCKS[self.type]
        levels = (Level(F16, (1, 256)), Level(codec, (1, size)))
        return Format(element, levels, "bias" if biased else "none", levels if biased else ())


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
    INTScaling,
    NF4Scaling,
    GGUFScaling,
)
#: Recipes that tensors have and few casts name.
DERIVED: tuple[type[ScalingRecipe], ...] = (FlatScaling,)
