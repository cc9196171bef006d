"""IF4 (Int/Float 4) as a plug-in of one file: NVFP4, in which each block has codes of FP4 or of INT4.

From the paper (arXiv:2603.28765) and its code (github.com/mit-han-lab/fouroversix): 16 elements share an E4M3 scale, under an
FP32 scale of the tensor, as in NVFP4; the sign bit of a block's scale, which is 0 in NVFP4, is 1 for INT4. An integer of such a
block stands for itself times 6/7, so that 7 is the number that 6 is in FP4, and one scale serves both.

Ours: which codec is written. Here it is the one whose largest error in the block is smaller, FP4 if they are equal, which is
`abs_max` of that code; the paper takes the mean squared error, whose sum depends on the order of summation, so that frameworks
would choose differently. As INT4 elsewhere in breccia, casts write -8 where it is nearest, which that code clips to -7. It also
computes scales in another order of operations; values of equal codes and scales are the same up to rounding.
"""

from dataclasses import dataclass

from breccia import Format, Level, Lookup, ScalingRecipe, hookimpl
from breccia.backend import E2M1, E4M3, F32, TENSOR, f32

api = 1
PAPER = "Adaptive Block-Scaled Data Types (arXiv:2603.28765)"
SCALED_INT4 = Lookup("SCALED_INT4", 4, None, PAPER, tuple(f32(n * 6 / 7) for n in (*range(8), *range(-8, 0))))


@dataclass(frozen=True)
class IF4Scaling(ScalingRecipe):
    """E2M1, or integers times 6/7 under scales with a sign; 16 along K share an E4M3 scale, under one FP32 scale of all."""

    name = "if4"
    source = PAPER
    format = Format(E2M1, (Level(F32, TENSOR), Level(E4M3, (1, 16))), alternative=SCALED_INT4)


@hookimpl
def breccia_codecs():
    return [SCALED_INT4]


@hookimpl
def breccia_recipes():
    return [IF4Scaling]
