"""Formats with a factor or a precision, which no built-in recipe has, for golden vectors.

The module is a plug-in that nothing installs: a test registers it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from ..codecs import BF16, E2M1, E4M3, F16, F32, INT8, INTEGERS, UINT4
from ..dispatch.hookspecs import hookimpl
from ..formats import TENSOR, Format, Level
from ..fp32 import f32
from ..locks import cached_property
from ..recipe_bases import ScalingRecipe
from ..recipe_fields import check_choices, one_of

api = 1
_FORMATS = {
    "int8_factor": Format(INT8, (Level(F32, (1, None)),), factor=f32(1 / 127)),
    "two_levels_factor": Format(E2M1, (Level(F32, TENSOR), Level(E4M3, (1, 16))), factor=f32(1 / 3)),
    "bias_factor": Format(UINT4, (Level(F16, (1, 16)),), "bias", factor=1.5),
    "coded_factor": Format(INT8, (Level(F16, (1, 32)), Level(INTEGERS[6, False], (1, 16))), factor=f32(0.3)),
    "bf16_steps": Format(INT8, (Level(BF16, (1, 16)),), precision="bf16"),
    "bf16_bias": Format(UINT4, (Level(BF16, (1, 16)),), "bias", precision="bf16"),
    "fp16_bias": Format(INTEGERS[2, False], (Level(F16, (1, 16)),), "bias", precision="fp16"),
    "bf16_zero": Format(UINT4, (Level(BF16, (1, 16)),), "float_zero_point", precision="bf16"),
    "fp16_zero": Format(INTEGERS[3, False], (Level(F16, (1, 16)),), "float_zero_point", precision="fp16"),
}


@dataclass(frozen=True)
class StepsScaling(ScalingRecipe):
    """Values that are multiplied by a factor last, or rounded to FP16 or BF16 after each step.

    type: names the format. int8_factor is that of bitsandbytes' LLM.int8() with FP32 scales, bf16_bias that of quanto's qint4,
        and bf16_zero and fp16_zero those of HQQ in BF16 and FP16.
    """

    name: ClassVar[str] = "steps"
    source: ClassVar[str] = "bitsandbytes 0.50, optimum-quanto 0.2.7, hqq 0.2.8; other formats are breccia's"
    type: str = field(default="int8_factor", metadata=one_of(tuple(_FORMATS)))

    def __post_init__(self) -> None:
        check_choices(self)

    @cached_property
    def format(self) -> Format:
        return _FORMATS[self.type]


@hookimpl
def breccia_recipes() -> Iterable[type[ScalingRecipe]]:
    """The recipe."""
    return [StepsScaling]
