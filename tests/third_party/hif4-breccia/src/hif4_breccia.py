"""HiFloat4 (HiF4) as a plug-in of one file: 64 elements of 4 bits share 32 bits of scales in three levels, 4.5 bits a value.

From the paper (arXiv:2602.11287) and its code (github.com/global-computing-consortium/HiFloat4): the levels, their codecs and
blocks; level 1 is amax / 7, to nearest, within the range of E6M2, whose last code is NaN; an element of at least 4 times level
1 makes a factor of 2 at level 2, and one of at least 2 times both at level 3. That is rule `floor`, with qmax 3.5 and 1.75.

Assumed: the order of bits, which is that of all scale records here: E6M2, level 2, level 3, the first block in the lowest bit.
(Comments in that code put it in the highest.) The code computes in BF16 and rounds elements half away from zero. Casts here are
those of breccia's contract, divisions in FP32 and ties to even, so that some of their codes and scales differ; values of equal
codes and scales do not.
"""

from dataclasses import dataclass

from breccia import Codec, Format, Level, Lookup, Minifloat, ScalingRecipe, hookimpl, rules

api = 1
PAPER = "HiFloat4 Format for Language Model Inference (arXiv:2602.11287)"


@dataclass(frozen=True)
class Normal(Codec):
    """E6M2: 6 bits of exponent, 2 of mantissa, no sign; every number is normal, so there is no zero. 255 is NaN."""

    bias = 48
    max = 1.5 * 2.0**15
    scale_min = 2.0**-48
    nan = nan_code = 255

    def value(self, code):
        return float("nan") if code == self.nan else (1 + code % 4 / 4) * 2.0 ** (code // 4 - self.bias)

    def encode(self, ops, y, word=None):
        u = ops.bitcast_to_int(ops.minimum(ops.maximum(y, self.scale_min), self.max))
        nearest = (u + 0xFFFFF + ((u >> 21) & 1)) >> 21  # the upper 11 bits, ties to even
        finite = (ops.bitcast_to_int(y) & 0x7FFFFFFF) < 0x7F800000
        return ops.where(finite, nearest - ((127 - self.bias) << 2), self.nan)


E6M2 = Normal("E6M2", 8, None, PAPER)
S1P2 = Minifloat("S1P2", 4, None, PAPER, exponent_bits=1, mantissa_bits=2, bias=1, largest=1.75)
FACTOR = Lookup("FACTOR", 1, None, PAPER, (1.0, 2.0))


@dataclass(frozen=True)
class HiF4Scaling(ScalingRecipe):
    """Multiples of 1/4 up to 1.75; 64 along K share an E6M2 scale, 8 a factor of 1 or 2, and 4 another."""

    name = "hif4"
    source = PAPER
    format = Format(S1P2, (Level(E6M2, (1, 64)), Level(FACTOR, (1, 8)), Level(FACTOR, (1, 4))))
    rules = (rules.LINEAR, rules.FLOOR, rules.FLOOR)


@hookimpl
def breccia_codecs():
    return [E6M2, S1P2, FACTOR]


@hookimpl
def breccia_recipes():
    return [HiF4Scaling]
