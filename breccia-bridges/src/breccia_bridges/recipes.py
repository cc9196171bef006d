"""Recipes of the formats of other libraries that core's recipes do not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from breccia import Format, Level, Lookup, RecipeError, ScalingRecipe
from breccia.backend import F16, F32, INT4, INT8, INTEGERS, TENSOR
from breccia.internal import FLOAT_CODECS, FLOAT_NAMES, cached_property, check_choices, check_positive, one_of


@dataclass(frozen=True)
class SignedInt4Scaling(ScalingRecipe):
    """Signed 4-bit integers with a float bias, `x = scale * code + bias`: what torchao's Int4Tensor holds.

    It is for reading such tensors. A cast measures codes from the bias up and so writes 0..7 only: to quantize, use
    `INT4Scaling(signed=False, symmetric=False, offset="bias")`.
    """

    name: ClassVar[str] = "int4_bias"
    source: ClassVar[str] = "torchao 0.18, torchao.quantization.Int4Tensor"
    group_size: int = 128
    scale_dtype: str = field(default="bf16", metadata=one_of(FLOAT_CODECS))

    def __post_init__(self) -> None:
        check_positive("SignedInt4Scaling", "group_size", self.group_size)
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(INT4, (Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size)),), "bias")


@dataclass(frozen=True)
class AffineScaling(ScalingRecipe):
    """Unsigned integers of 2, 3, 5 or 6 bits with a float bias, `x = scale * code + bias`: MLX's mode "affine".

    Those of 4 and 8 bits are `INT4Scaling` and `INT8Scaling` with `signed=False, symmetric=False, offset="bias"`. Codes are
    packed from the lowest bit up, without gaps: 8 codes of 3 bits in 3 bytes.
    """

    name: ClassVar[str] = "mlx_affine"
    source: ClassVar[str] = "MLX 0.32, mlx.core.quantize, mode 'affine'"
    bits: int = field(default=3, metadata=one_of((2, 3, 5, 6)))
    group_size: int = field(default=64, metadata=one_of((32, 64, 128)))
    scale_dtype: str = field(default="fp16", metadata=one_of(FLOAT_CODECS))

    def __post_init__(self) -> None:
        if self.bits in (4, 8):
            fields = f"group_size={self.group_size},signed=false,symmetric=false,offset=bias,scale_dtype={self.scale_dtype}"
            raise RecipeError(
                f"mlx_affine has 2, 3, 5 and 6 bits, got bits={self.bits}; MLX's arrays of {self.bits} bits are the recipe "
                f"'int{self.bits},{fields}'.",
                bits=self.bits,
            )
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return Format(INTEGERS[self.bits, False], (Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size)),), "bias")


@dataclass(frozen=True)
class RoundedIntScaling(ScalingRecipe):
    """Unsigned integers with a float offset, whose values are rounded to the dtype of the scale after each step.

    By `offset`: "bias": round(round(scale * code) + bias), quanto's qint4 and qint2; "float_zero_point":
    round(round(code - zero) * scale), HQQ in BF16 or FP16. It is for reading such weights. To quantize, use `INTScaling`, whose
    values are rounded once.
    """

    name: ClassVar[str] = "int_rounded"
    source: ClassVar[str] = "optimum-quanto 0.2.7, QBitsTensor; hqq 0.2.8, Quantizer.dequantize"
    bits: int = field(default=4, metadata=one_of(range(1, 9)))
    group_size: int = 128
    scale_dtype: str = field(default="bf16", metadata=one_of(("bf16", "fp16"), aliases=FLOAT_NAMES))
    offset: str = field(default="bias", metadata=one_of(("bias", "float_zero_point")))

    def __post_init__(self) -> None:
        check_positive("RoundedIntScaling", "group_size", self.group_size)
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        level = Level(FLOAT_CODECS[self.scale_dtype], (1, self.group_size))
        return Format(INTEGERS[self.bits, False], (level,), self.offset, precision=self.scale_dtype)


#: Twelfths of 0, 1/16, 8, 12, 4, 6, 2, 3, as FP32 numbers.
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
#: bitsandbytes' table of FP4. Codes 0 and 8 both stand for +0.
BNB_FP4 = Lookup("BNB_FP4", 4, None, "bitsandbytes 0.50, functional.get_4bit_type", (*_FP4, 0.0, *(-v for v in _FP4[1:])))


@dataclass(frozen=True)
class BnbFP4Scaling(ScalingRecipe):
    """4-bit codes of bitsandbytes' table "fp4", which is not E2M1, with an FP32 absmax per `block_size` elements along K.

    It is for weights that bitsandbytes wrote or will read. To quantize for others, `NF4Scaling` is more accurate on normally
    distributed weights, and hardware multiplies the codes of `MXFP4BlockScaling` and `NVFP4BlockScaling`.
    """

    name: ClassVar[str] = "bnb_fp4"
    source: ClassVar[str] = "bitsandbytes 0.50, bitsandbytes.nn.Params4bit, quant_type 'fp4'"
    block_size: int = 64

    def __post_init__(self) -> None:
        check_positive("BnbFP4Scaling", "block_size", self.block_size)

    @cached_property
    def format(self) -> Format:
        return Format(BNB_FP4, (Level(F32, (1, self.block_size)),))


#: 1 / 127 in FP32, by which bitsandbytes multiplies code * absmax.
BNB_INT8_SCALE = 0.007874015718698502


@dataclass(frozen=True)
class BnbINT8Scaling(ScalingRecipe):
    """Signed 8-bit integers and an absmax per row: `x = code * absmax * FP32(1 / 127)`, rounded twice.

    It is for reading weights of bitsandbytes' LLM.int8(). By `scale_dtype`: "fp16" (default) has an FP16 absmax, which
    bitsandbytes measures on FP16 weights, and the constant as the scale of the tensor, for which a cast chooses another number;
    "fp32" has the absmax as it is stored, and the constant as the factor of the format. To quantize, use `INT8Scaling`.
    """

    name: ClassVar[str] = "bnb_int8"
    source: ClassVar[str] = "bitsandbytes 0.50, bitsandbytes.nn.Int8Params"
    scale_dtype: str = field(default="fp16", metadata={"added": True, **one_of(("fp16", "fp32"), aliases=FLOAT_NAMES)})

    def __post_init__(self) -> None:
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        if self.scale_dtype == "fp32":
            return Format(INT8, (Level(F32, (1, None)),), factor=BNB_INT8_SCALE)
        return Format(INT8, (Level(F32, TENSOR), Level(F16, (1, None))))
