"""The arithmetic of casts in Triton: codes, scales and packing, bit for bit as in docs/spec/numerics.md.

Arguments in capitals are constants of `specs`. Kernels are compiled without contraction of products and sums
(`launch.triton_launch.OPTIONS`): additions here round to codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from breccia import backend

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
MANTISSA = tl.constexpr(0x007FFFFF)
NORMAL = tl.constexpr(0x00800000)
INF = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(0x7F7FFFFF)
LEAST_NORMAL = tl.constexpr(2.0**-126)
MOST = tl.constexpr(2.0**126)
ROUNDER = tl.constexpr(backend.ROUNDER)
WHOLE = tl.constexpr(backend.WHOLE)


@triton.jit
def bits_of(y):
    """The bits of FP32 numbers, as int32."""
    return y.to(tl.int32, bitcast=True)


@triton.jit
def number(u):
    """The FP32 numbers of these bits."""
    return u.to(tl.float32, bitcast=True)


@triton.jit
def flushed(y):
    """`y` with magnitudes below 2^-126 as +0."""
    return tl.where((bits_of(y) & MAGNITUDE) <= MANTISSA, 0.0, y)


@triton.jit
def saturated(y):
    """`y` with ±Inf as the largest finite number. NaN stays."""
    u = bits_of(y)
    return number(tl.where((u & MAGNITUDE) == INF, (u & -0x80000000) | LARGEST, u))


@triton.jit
def clean(u):
    """FP32 bits with FP32 subnormals, Inf and NaN as signed zeros, as a number."""
    magnitude = u & MAGNITUDE
    return number(tl.where((magnitude >= NORMAL) & (magnitude < INF), u, u & -0x80000000))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(u, AXIS: tl.constexpr, PTX: tl.constexpr, PAIRS: tl.constexpr = False):
    """The largest magnitude of FP32 bits along an axis, as bits: those of NaN and Inf are the largest.

    For PAIRS, likewise of BF16 numbers in the halves of words, with some sign.
    """
    if PAIRS:
        return tl.reduce(u, AXIS, _larger_magnitudes)
    elif PTX:  # the absolute value is a part of the instruction
        return bits_of(tl.reduce(tl.abs(number(u)), AXIS, _larger))
    else:
        return tl.max(u & MAGNITUDE, AXIS)


@triton.jit
def larger_of_pairs(a, b, DTYPE: tl.constexpr, NAN: tl.constexpr):
    """The larger magnitudes, with some sign, of two FP16 or BF16 numbers in each int32; NaN if NAN, else the other number.

    By an instruction of NVIDIA GPUs from compute capability 8.6 on.
    """
    if DTYPE == tl.bfloat16 and NAN:
        asm: tl.constexpr = "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
    elif DTYPE == tl.bfloat16:
        asm: tl.constexpr = "max.xorsign.abs.bf16x2 $0, $1, $2;"
    elif NAN:
        asm: tl.constexpr = "max.NaN.xorsign.abs.f16x2 $0, $1, $2;"
    else:
        asm: tl.constexpr = "max.xorsign.abs.f16x2 $0, $1, $2;"
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _larger_magnitudes(a, b):
    return larger_of_pairs(a, b, tl.bfloat16, True)


@triton.jit
def larger_half(pairs):
    """The larger of two 15-bit magnitudes in each int32."""
    return tl.maximum(pairs & 0x7FFF, (pairs >> 16) & 0x7FFF)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_pair(a, b):
    """The larger of two BF16 numbers, in each half of words; NaN if one is."""
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def smaller_pair(a, b):
    """As `larger_pair`, the smaller one."""
    return tl.inline_asm_elementwise("min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def least_pair(a, b):
    """As `smaller_pair`, but of a number and NaN the number."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def magnitude_pair(a):
    """The magnitudes of BF16 numbers in the halves of words."""
    return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [a], tl.int32, True, 1)


@triton.jit
def fma_pair(a, b, c):
    """a * b + c of BF16 numbers in the halves of words, rounded once."""
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)


@triton.jit
def both(a, C: tl.constexpr):
    """Words whose halves are the BF16 number `C`, of the shape of `a`."""
    return ((bits_of(tl.zeros(a.shape, tl.float32) + C) >> 16) & 0xFFFF) * 0x10001


@triton.jit
def of_pairs(words):
    """FP32 bits of the BF16 numbers in the halves of words: an axis more, of two."""
    return tl.join(words << 16, words & -65536)


@triton.jit
def extreme(u, AXIS: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """FP32 bits of the "largest" or "smallest" number, or "amax", along an axis of bits; for PAIRS, likewise of BF16 in words.

    Of NaNs, NaN; but without PTX the largest and the smallest are those of clean numbers.
    """
    if PAIRS:
        if KIND == "smallest":
            return tl.reduce(u, AXIS, smaller_pair)
        else:
            return tl.reduce(magnitude_pair(u) if KIND == "amax" else u, AXIS, larger_pair)
    elif KIND == "amax":
        return largest(u, AXIS, PTX)
    elif PTX:
        return bits_of(tl.reduce(number(u), AXIS, _smaller if KIND == "smallest" else _larger))
    elif KIND == "smallest":
        return bits_of(tl.min(clean(u), AXIS))
    else:
        return bits_of(tl.max(clean(u), AXIS))


@triton.jit
def extreme_of_each(u, KIND: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """`extreme` along the last axis of (ROWS, SIZE), whose numbers are in the registers of a thread.

    In an order that does not depend on registers: the compiler may do it in several layouts, which it finds to be the same.
    """
    if SIZE == 1:
        return tl.reshape(u, (ROWS,))
    else:
        even, odd = tl.split(tl.reshape(u, (ROWS, SIZE // 2, 2)))
        if PAIRS:
            extremes = smaller_pair(even, odd) if KIND == "smallest" else larger_pair(even, odd)
        elif KIND == "smallest":
            extremes = bits_of(_smaller(number(even), number(odd)))
        else:
            extremes = bits_of(_larger(number(even), number(odd)))
        return extreme_of_each(extremes, KIND, ROWS, SIZE // 2, PAIRS, PTX)


@triton.jit
def extreme_of_pair(words, KIND: tl.constexpr):
    """`extreme` of the two BF16 numbers in words; amaxes have no signs."""
    if KIND == "smallest":
        return bits_of(_smaller(number(words << 16), number(words & -65536)))
    else:
        return bits_of(_larger(number(words << 16), number(words & -65536)))


@triton.jit
def difference(u, b, PTX: tl.constexpr):
    """x - b, of the FP32 bits of x; subnormal numbers are zeros on both sides."""
    if PTX:
        return tl.inline_asm_elementwise("sub.ftz.f32 $0, $1, $2;", "=f,f,f", [number(u), b], tl.float32, True, 1)
    else:
        return flushed(clean(u) - b)


@triton.jit
def quotient(a, B: tl.constexpr, INVERSE: tl.constexpr, PTX: tl.constexpr):
    """a / B, rounded to nearest, for a constant `B`; with PTX, quotients below 2^-126 are some number below 2^-126.

    INVERSE is 1 / B, rounded to nearest. q = a * INVERSE is within one unit of the quotient, the remainder a - q * B is exact,
    and q + remainder * INVERSE then rounds correctly (Markstein's theorem on division with a fused multiply-add).
    """
    if PTX and B % 1 == 0:  # else the remainder of a small number may have bits below FP32's last one
        return _refined(a, B, INVERSE)
    else:
        return tl.div_rn(a, tl.zeros_like(a) + B)


@triton.jit
def _refined(a, b, inverse):
    q = a * inverse
    return tl.fma(tl.fma(q, -b, a), inverse, q)


@triton.jit
def reciprocal(a, PTX: tl.constexpr):
    """1 / a, rounded to nearest, for normal `a` with a normal reciprocal."""
    if PTX:  # what the compiler makes of rcp.rn.f32, without the case of subnormal numbers
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
        return tl.fma(tl.fma(-a, y, 1.0), y, y)
    else:
        return tl.div_rn(tl.zeros_like(a) + 1.0, a)


@triton.jit
def rounded(v, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """FP32 numbers in another floating dtype, to nearest."""
    if DTYPE == tl.bfloat16 and not PTX:  # Triton's interpreter cuts the bits off
        u = bits_of(v)
        u = tl.where((u & MAGNITUDE) > INF, 0x7FC00000, u + 0x7FFF + ((u >> 16) & 1))
        return (u >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(DTYPE)


# ------------------------------------------------------------------------------------------------ codes


@triton.jit
def encode(
    y, word, shift, C: tl.constexpr, FITS: tl.constexpr, NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr, SHIFTED: tl.constexpr
):
    """int32 codes of finite FP32 `y`, saturating; with FITS, nothing does. word: random, for stochastic rounding. shift: the
    zero-point, if SHIFTED."""
    if C.kind == "float":
        if STOCHASTIC:
            return _stochastic(y, word, C)
        elif NATIVE and C.name == "E4M3":
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        elif NATIVE and C.name == "E5M2":
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            return _nearest(y, C, FITS)
    elif C.kind == "integer":
        if SHIFTED:  # it is added to the rounded number, and saturates with it
            y = tl.minimum(tl.maximum(y, C.low - shift), C.high - shift)
        else:
            y = tl.minimum(tl.maximum(y, C.low), C.high)
        if STOCHASTIC:
            u = bits_of(y * (1.0 / C.unit))
            magnitude = u & MAGNITUDE
            integer = _round_shift(_significand(magnitude), 150 - (magnitude >> 23), word)
            integer = tl.where(u < 0, -integer, integer)
        else:
            integer = bits_of(y + ROUNDER * C.unit)
        if SHIFTED:
            integer += shift.to(tl.int32)
        return integer & ((1 << C.bits) - 1)
    elif len(C.cells) > 0 and not STOCHASTIC:
        return places(y, C, False)
    else:
        return _place(y, word, C, STOCHASTIC)


@triton.jit
def _nearest(y, C: tl.constexpr, FITS: tl.constexpr):
    u = bits_of(y)
    a = u & MAGNITUDE
    if not FITS:
        a = tl.minimum(a, C.largest)
    return _nearest_magnitude(a, C) | ((u >> (32 - C.bits)) & (C.magnitude + 1))


@triton.jit
def _nearest_magnitude(a, C: tl.constexpr):
    e = tl.maximum(a & EXPONENT, C.floor) + C.lift
    return (bits_of(number(a) + number(e)) + (e >> (23 - C.mantissa))) & C.magnitude


@triton.jit
def _stochastic(y, word, C: tl.constexpr):
    u = bits_of(y)
    a = tl.minimum(u & MAGNITUDE, C.largest)
    exponent = a >> 23
    first: tl.constexpr = C.floor >> 23
    shift = 23 - C.mantissa + tl.maximum(first - exponent, 0)
    code = _round_shift(_significand(a), shift, word) + (tl.maximum(exponent - first, 0) << C.mantissa)
    return code | ((u >> (32 - C.bits)) & (C.magnitude + 1))


@triton.jit
def _significand(magnitude):
    return tl.where(magnitude < NORMAL, 0, (magnitude & MANTISSA) | NORMAL)


@triton.jit
def _round_shift(m, shift, word):
    """m / 2^shift, rounded up where the fraction's first 30 bits plus the top 30 of `word` carry."""
    cut = tl.minimum(shift, 30)
    m = m >> tl.minimum(shift - cut, 31)
    random = (word >> (32 - cut).to(tl.uint32)).to(tl.int32, bitcast=True)
    return (m + (random & ((1 << cut) - 1))) >> cut


@triton.jit
def _place(y, word, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    place = tl.zeros_like(bits_of(y))
    if STOCHASTIC:
        low = tl.zeros_like(y) + C.values[C.order[0]]
        high = low
        y = tl.minimum(tl.maximum(y, C.values[C.order[0]]), C.values[C.order[len(C.order) - 1]])
        for i in tl.static_range(1, len(C.order)):
            reached = y >= C.values[C.order[i]]
            place += reached.to(tl.int32)
            low = tl.where(reached, C.values[C.order[i]], low)
        for i in tl.static_range(len(C.order) - 1, 0, -1):
            high = tl.where(y < C.values[C.order[i]], C.values[C.order[i]], high)
        high = tl.maximum(high, low)
        f = tl.div_rn(y - low, tl.where(low < high, high - low, 1.0))
        up = (tl.minimum(f, 1.0) * 1073741824.0).to(tl.int32) + (word >> 2).to(tl.int32, bitcast=True) >= 1073741824
        place += up.to(tl.int32)
    else:
        for i in tl.static_range(len(C.starts)):
            place += (y >= C.starts[i]).to(tl.int32)
    codes = tl.zeros_like(place)
    for i in tl.static_range(len(C.order)):
        if C.order[i] != i:
            codes += tl.where(place == i, C.order[i] - i, 0)
    return place + codes


@triton.jit
def cleared(codes, used):
    """Codes of 8 bits as uint8, with zeros where not `used`; on NVIDIA GPUs, for threads of four or more."""
    mask = tl.where(used, 255, 0).to(tl.uint8)
    return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [codes.to(tl.uint8), mask], tl.uint8, True, 4)


#: PTX. $1 to $4 are numbers, $5 to $8 the elements they are multiples of: a number, or NaN where its element is not finite.
_OR_NAN = """{
.reg .b16 lo, hi;
.reg .b32 or_nan, codes, differ;
.reg .f32 a, b, c, d;
fma.rn.f32 a, $5, 0f00000000, $1;
fma.rn.f32 b, $6, 0f00000000, $2;
fma.rn.f32 c, $7, 0f00000000, $3;
fma.rn.f32 d, $8, 0f00000000, $4;
"""
_TO_E4M3 = tl.constexpr(
    _OR_NAN
    + """
cvt.rn.satfinite.e4m3x2.f32 lo, b, a;
cvt.rn.satfinite.e4m3x2.f32 hi, d, c;
mov.b32 $0, {lo, hi};
}"""
)
#: Only of Inf do both conversions differ: by the bit of 4. The saturated code is the largest one, and that of Inf comes next.
_TO_E5M2 = tl.constexpr(
    _OR_NAN
    + """
cvt.rn.satfinite.e5m2x2.f32 lo, b, a;
cvt.rn.satfinite.e5m2x2.f32 hi, d, c;
mov.b32 or_nan, {lo, hi};
cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;
cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;
mov.b32 codes, {lo, hi};
xor.b32 differ, or_nan, codes;
shr.b32 differ, differ, 2;
and.b32 differ, differ, 0x01010101;
add.u32 $0, codes, differ;
}"""
)


@triton.jit
def converted(y, x, C: tl.constexpr):
    """uint8 codes of `y`, which is x times a positive number, with those of NaN and Inf where `x` is not finite.

    For E4M3 and E5M2 on NVIDIA GPUs that have an instruction for them, and threads of four or more.
    """
    ASM: tl.constexpr = _TO_E4M3 if C.inf < 0 else _TO_E5M2
    return tl.inline_asm_elementwise(ASM, "=r,f,f,f,f,f,f,f,f", [y, x], tl.uint8, True, 4)


@triton.jit
def own_codes(code, u, C: tl.constexpr):
    """Codes with those of NaN and Inf where the FP32 bits `u` are not finite."""
    magnitude = u & MAGNITUDE
    if C.inf >= 0:
        infinite = C.inf | ((u >> (32 - C.bits)) & (C.magnitude + 1))
    else:
        infinite = C.nan
    return tl.where(magnitude < INF, code, tl.where(magnitude > INF, C.nan, infinite))


@triton.jit
def decode(code, C: tl.constexpr, NATIVE: tl.constexpr):
    """FP32 values of int32 codes, exactly. NATIVE: the device converts from FP8."""
    if C.kind == "float":
        if NATIVE and C.name == "E4M3":
            v = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif NATIVE and C.name == "E5M2":
            v = code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
        else:
            # The fields of the code as those of an FP32 number, which is a subnormal where the code is one.
            magnitude = code & C.magnitude
            u = magnitude << (23 - C.mantissa)
            if C.signed:
                u = u | ((code << (32 - C.bits)) & -0x80000000)
            v = number(u) * 2.0 ** (127 - C.bias)
            if C.highest < C.magnitude:  # a code without a sign may have a bit too many, and is NaN then
                v = tl.where((magnitude if C.signed else code) > C.highest, float("nan"), v)
            if C.inf >= 0:
                v = tl.where(magnitude == C.inf, number((u & -0x80000000) | INF), v)
    elif C.kind == "integer":
        # The code in the low bits of 2^23, from which 2^23 is subtracted; negative codes are moved up first.
        if C.signed:
            half: tl.constexpr = 1 << (C.bits - 1)
            v = number((code ^ half) | 0x4B000000) - (8388608.0 + half)
        else:
            v = number(code | 0x4B000000) - 8388608.0
        if C.unit != 1.0:
            v = v * C.unit
    else:
        # A table in the lanes of each warp.
        at = tl.arange(0, 32)
        values = tl.zeros((32,), tl.float32) + C.values[0]
        for i in tl.static_range(1, len(C.values)):
            values = tl.where(at == i, C.values[i], values)
        v = tl.reshape(tl.gather(values, tl.reshape(code, (code.numel,)), 0), code.shape)
    return v


@triton.jit
def value(code, scale_code, offset, global_code, S: tl.constexpr, NATIVE: tl.constexpr):
    """FP32 values of codes under their scales and offsets, all as int32 codes (section 4 of docs/spec/numerics.md)."""
    ELEMENT: tl.constexpr = S.element
    SCALE: tl.constexpr = S.scale
    OFFSET: tl.constexpr = S.offset_scale
    LEVEL: tl.constexpr = S.global_scale
    v = decode(code, ELEMENT, NATIVE)
    if S.offset == "zero_point":
        v = v - offset.to(tl.float32)
    elif S.offset == "float_zero_point":
        v = v - read_scale(offset, OFFSET)
    scale = read_scale(scale_code, SCALE)
    if S.scales_first:
        scale = scale * global_multiplier(global_code, LEVEL)
    v = v * scale
    if S.global_scale is not None and not S.scales_first:
        stored = number(global_code)
        if S.global_scale.convention == "divisor":
            v = tl.div_rn(v, tl.zeros_like(v) + stored)
        else:
            v = v * global_multiplier(global_code, LEVEL)
    if S.offset == "bias":
        v = flushed(v) + flushed(read_scale(offset, OFFSET))
    return v


# ------------------------------------------------------------------------------------------------ scales


@triton.jit
def _product(a, b):
    """a * b by an instruction of NVIDIA GPUs that flushes subnormal numbers."""
    return tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def scale_codes(statistic, multiplier, S: tl.constexpr, TWO_LEVEL: tl.constexpr, GLOBAL_FITS: tl.constexpr, PTX: tl.constexpr):
    """int32 codes of the scales of blocks: from their amax (or width), and the `multiplier` of any global scale.

    GLOBAL_FITS: it is computed from the same tensor, so that no quotient overflows.
    """
    if S.rule == "exponent":
        n = ((bits_of(statistic) + S.carry) >> 23) - S.cap
        if S.codec.kind == "power":
            codes = tl.minimum(tl.maximum(n + S.codec.bias, 0), S.nan - 1)
        else:
            codes = (tl.minimum(tl.maximum(n, -126), 126) + 127) << 23
    elif S.rule == "te":
        codes = encode_scale(reciprocal(te_multiplier(statistic, S), PTX), S)
    else:
        t = unrounded_scales(statistic, multiplier, S, TWO_LEVEL, GLOBAL_FITS, PTX)
        codes = encode_scale(tl.minimum(tl.maximum(t, S.least), S.most), S)
    if S.rule == "linear" and S.codec.kind == "float" and S.least == 0 and S.zero == 0:
        return codes
    return tl.where(statistic == 0, S.zero, codes)


@triton.jit
def unrounded_scales(
    statistic, multiplier, S: tl.constexpr, TWO_LEVEL: tl.constexpr, GLOBAL_FITS: tl.constexpr, PTX: tl.constexpr
):
    """What the linear rules round to scales; arguments as of `scale_codes`. With PTX, some number below 2^-126 for such."""
    if S.reciprocal:
        t = statistic * S.divisor
    else:
        t = quotient(statistic, S.divisor, S.inverse, PTX)
    # Without another factor, codecs take what is below 2^-126 as zero, or as their least number.
    LIFTS: tl.constexpr = PTX and TWO_LEVEL and GLOBAL_FITS
    if not PTX or (TWO_LEVEL and not LIFTS) or S.factor > 1.0:
        t = flushed(t)
    if S.qmax < 1:
        t = saturated(t)
    if TWO_LEVEL:
        if GLOBAL_FITS:
            # Both times a power of two, where the remainder would have bits below FP32's last one.
            lift = tl.where(multiplier < 2.0**-40, 2.0**64, 1.0)
            t = _product(t, lift) if LIFTS else t * lift
            t = _refined(t, multiplier * lift, reciprocal(multiplier * lift, PTX))
        else:
            t = saturated(tl.div_rn(t, tl.zeros_like(t) + multiplier))
    if S.factor != 1.0:
        t = saturated(t * S.factor)
    return t


@triton.jit
def te_multiplier(statistic, S: tl.constexpr):
    """The multiplier of elements under the rule "te"."""
    m = tl.div_rn(tl.zeros_like(statistic) + S.qmax, tl.where(statistic == 0, S.qmax, statistic))
    m = tl.minimum(m, MOST)
    if S.factor != 1.0:
        m = m * S.factor
    m = tl.minimum(tl.maximum(m, LEAST_NORMAL), MOST)
    if S.power_of_two:
        m = number(bits_of(m) & INF)
    return m


@triton.jit
def encode_scale(t, S: tl.constexpr):
    """int32 codes of non-negative numbers within the codec's range, rounded to nearest."""
    CODEC: tl.constexpr = S.codec
    if S.codec.kind == "float":
        return _nearest_magnitude(bits_of(t), CODEC)
    elif S.codec.name == "F16":
        return t.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    elif S.codec.name == "BF16":
        u = bits_of(t)
        return (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    else:
        return bits_of(t)


@triton.jit
def encode_bias(low, S: tl.constexpr):
    """int32 codes of finite numbers in a floating codec of 16 or 32 bits, saturating."""
    if S.codec.name == "F32":
        return bits_of(low)
    else:
        low = tl.minimum(tl.maximum(low, -S.codec.largest), S.codec.largest)
        return encode_scale(low, S) & 0xFFFF


@triton.jit
def read_scale(codes, S: tl.constexpr):
    """FP32 values of int32 scale codes. S: a `specs.Scale`, or a `specs.Coded`."""
    CODEC: tl.constexpr = S.codec
    if S.codec.kind == "float" or S.codec.kind == "integer" or S.codec.kind == "table":
        return decode(codes, CODEC, False)
    elif S.codec.kind == "power":
        u = tl.where(codes == 0, 0x00400000, codes << 23)
        return number(tl.where(codes == S.nan, 0x7FC00000, u))
    elif S.codec.name == "F16":
        return codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif S.codec.name == "BF16":
        return number(codes << 16)
    else:
        return number(codes)


@triton.jit
def accept_scale(stored, S: tl.constexpr):
    """int32 codes of supplied scales; NaN for those that are no positive scales, or no scales of either sign with S.signs."""
    if S.codec.kind == "power":
        return stored
    else:
        v = read_scale(stored, S)
        if S.codec.kind == "float":
            return tl.where(v > 0, stored, S.nan)
        else:
            magnitude = tl.abs(v) if S.signs else v
            good = (magnitude >= S.least) & (magnitude <= S.most)
            return tl.where(good, encode_scale(tl.where(good, v, 1.0), S), S.nan)


@triton.jit
def divisor_of(codes, multiplier, S: tl.constexpr, TWO_LEVEL: tl.constexpr, PTX: tl.constexpr, FINITE: tl.constexpr = False):
    """(what elements are multiplied by, or divided under the rule "divide"; whether the scale is usable) of scale codes.

    FINITE: no code is that of NaN, or what is returned for it does not matter.
    """
    if S.codec.kind == "power" and not TWO_LEVEL:
        # 2^-127, the reciprocal of 2^127, is an FP32 subnormal: products with it are exact, or below every element's step.
        by = number(tl.where(codes == 254, 0x00400000, (254 - codes) << 23))
        usable = codes != S.nan
    else:
        if FINITE and PTX and S.codec.kind == "float":
            # A subnormal code is an FP32 subnormal first, which this product takes as it is.
            by = number(codes << (23 - S.codec.mantissa)) * 2.0 ** (127 - S.codec.bias)
        else:
            by = read_scale(codes, S)
        if TWO_LEVEL:
            by = by * multiplier
        if FINITE and PTX and S.codec.kind == "float" and not TWO_LEVEL and S.rule != "divide":
            usable = codes != 0
        else:
            magnitude = tl.abs(by) if S.signs else by
            usable = (magnitude >= LEAST_NORMAL) & (magnitude <= MOST)
            by = tl.where(usable, by, 1.0)
        if S.rule != "divide":
            by = reciprocal(by, PTX)
    return by, usable


@triton.jit
def scaled(x, by, usable, S: tl.constexpr, SUBNORMALS: tl.constexpr, FLUSHES: tl.constexpr):
    """Elements in units of their scale; 0 where it is not usable (None: anything).

    SUBNORMALS: those of `x` count as signed zeros. FLUSHES: by an instruction of NVIDIA GPUs.
    """
    if FLUSHES and S.rule != "divide":
        # Flushes subnormal results too, which round to zero.
        y = _product(x, by)
    else:
        if SUBNORMALS:
            u = bits_of(x)
            x = number(tl.where((u & MAGNITUDE) >= NORMAL, u, u & -0x80000000))
        if S.rule == "divide":
            y = tl.div_rn(x, by)
        else:
            y = x * by
    if usable is None:
        return y
    else:
        return tl.where(usable, y, 0.0)


@triton.jit
def scaled_magnitude(x, by):
    """|x| * by by an instruction of NVIDIA GPUs that flushes subnormal numbers, and takes the magnitude too."""
    return tl.inline_asm_elementwise(
        "{.reg .f32 a; abs.f32 a, $1; mul.ftz.f32 $0, a, $2;}", "=f,f,f", [x, by], tl.float32, True, 1
    )


@triton.jit
def global_codes(amax, G: tl.constexpr, PTX: tl.constexpr):
    """int32 codes of the global scale, from the amax (bits) of the finite elements."""
    a = number(tl.where(amax >= NORMAL, amax, 0))
    if G.convention == "multiplier":
        codes = scale_codes(a, 1.0, G, False, False, PTX)
    else:
        stored = tl.where(a == 0, G.qmax, tl.maximum(a, G.qmax * 2.0**-126))
        if G.convention == "divisor":
            stored = tl.minimum(tl.div_rn(tl.zeros_like(stored) + G.qmax, stored), MOST)
        codes = bits_of(stored)
    return codes


@triton.jit
def global_multiplier(codes, G: tl.constexpr):
    """The multiplier of a stored global scale."""
    stored = number(codes)
    if G.convention == "amax":
        stored = tl.div_rn(stored, tl.zeros_like(stored) + G.qmax)
    if G.convention == "divisor":
        stored = tl.div_rn(tl.zeros_like(stored) + 1.0, stored)
    return stored


# ------------------------------------------------------------------------------------------------ packing


@triton.jit
def packed(codes, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALONG: tl.constexpr):
    """Codes (ROWS, COLUMNS) in groups along axis ALONG: two of 4 bits in a byte, four of 6 bits in 24 bits of a word."""
    COUNT: tl.constexpr = 2 if C.bits == 4 else 4
    if ALONG == 1:
        groups = tl.reshape(codes, (ROWS, COLUMNS // COUNT, COUNT))
    else:
        groups = tl.permute(tl.reshape(codes, (ROWS // COUNT, COUNT, COLUMNS)), (0, 2, 1))
    if C.bits == 4:
        low, high = tl.split(groups)
        return low | (high << 4)
    else:
        if ALONG == 1:
            pairs = tl.reshape(groups, (ROWS, COLUMNS // 4, 2, 2))
        else:
            pairs = tl.reshape(groups, (ROWS // 4, COLUMNS, 2, 2))
        even, odd = tl.split(pairs)
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a | (b << 6) | (c << 12) | (d << 18)


@triton.jit
def magnitudes(a, C: tl.constexpr, FITS: tl.constexpr, PTX: tl.constexpr):
    """Codes of non-negative FP32 numbers in a minifloat with `lines` (see `specs.Floats`), in the low bits of words."""
    STEEP: tl.constexpr = 2.0 ** (C.bias - 1 + C.mantissa)
    LINES: tl.constexpr = C.lines
    #: The first code of the last line.
    LAST: tl.constexpr = C.lines << C.mantissa
    #: Whether the last line has two codes: then it saturates in the instruction that draws it.
    STEP: tl.constexpr = PTX and not FITS and C.lines > 1 and C.highest == LAST + 1
    code = tl.fma(a, STEEP, WHOLE)
    for k in tl.static_range(1, LINES - 1 if STEP else LINES):
        code = tl.minimum(code, tl.fma(a, STEEP * 2.0**-k, WHOLE + k * 2.0**C.mantissa))
    if STEP:
        step = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [a, STEEP * 2.0 ** (1 - LINES), -(2.0**C.mantissa)],
            tl.float32,
            True,
            1,
        )
        code = tl.minimum(code, step + (WHOLE + LAST))
    elif not FITS:
        code = tl.minimum(code, WHOLE + C.highest)
    return bits_of(code)


@triton.jit
def codes_of_pairs(x, by, C: tl.constexpr, FITS: tl.constexpr):
    """4-bit codes of pairs of BF16 numbers times powers of two `by`, in the top bits of the halves; below is anything.

    As `magnitudes`, in BF16: products with powers of two are exact, and numbers from 2^7 on are rounded to integers too.
    """
    STEEP: tl.constexpr = 2.0 ** (C.bias - 1 + C.mantissa) * 64
    LINES: tl.constexpr = C.lines
    a = magnitude_pair(x)
    # 2^-6 for a normal number, from its excess over the largest subnormal one; 0 for a subnormal one.
    normal = tl.inline_asm_elementwise(
        "fma.rn.relu.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, both(a, 2.0**127), both(a, -127 / 64)], tl.int32, True, 1
    )
    normal = least_pair(normal, both(a, 2.0**-6))
    none = both(a, 0.0)
    y = fma_pair(a, fma_pair(normal, by, none), none)
    code = fma_pair(y, both(a, STEEP), both(a, 128.0))
    for k in tl.static_range(1, LINES):
        code = least_pair(code, fma_pair(y, both(a, STEEP * 2.0**-k), both(a, 128 + k * 2.0**C.mantissa)))
    if not FITS:
        code = least_pair(code, both(a, 128.0 + C.highest))
    return ((code << 12) & 0x70007000) | (x & -0x70007001)


@triton.jit
def join_bytes(a, b, ORDER: tl.constexpr):
    """The bytes of two words in another order, on NVIDIA GPUs."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, ORDER], tl.int32, True, 1)


@triton.jit
def word_of_pairs(a, b, c, d, ROWS: tl.constexpr):
    """Words of eight 4-bit codes of `codes_of_pairs`, in the order of a, b, c, d; with ROWS, a and c above b and d."""
    if ROWS:
        ab = ((a >> 4) & 0x0F0F0F0F) | (b & -0x0F0F0F10)
        cd = ((c >> 4) & 0x0F0F0F0F) | (d & -0x0F0F0F10)
        return join_bytes(ab, cd, 0x7531)
    else:
        ab, cd = join_bytes(a, b, 0x7351), join_bytes(c, d, 0x7351)
        low, high = join_bytes(ab, cd, 0x5410), join_bytes(ab, cd, 0x7632)
        return ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)


@triton.jit
def halves(t, LANES: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr):
    """Elements of even and of odd index along the last axis of (LANES, WORDS, 2 * N)."""
    even, odd = tl.split(tl.reshape(t, (LANES, WORDS, N, 2)))
    return even, odd


@triton.jit
def eight(t, LANES: tl.constexpr, WORDS: tl.constexpr):
    """The eight elements along the last axis of (LANES, WORDS, 8)."""
    even, odd = halves(t, LANES, WORDS, 4)
    e04, e26 = halves(even, LANES, WORDS, 2)
    e15, e37 = halves(odd, LANES, WORDS, 2)
    e0, e4 = tl.split(e04)
    e2, e6 = tl.split(e26)
    e1, e5 = tl.split(e15)
    e3, e7 = tl.split(e37)
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def tops(a, b, c, d, PTX: tl.constexpr):
    """The top bytes of four words, in one."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b32 p, q; prmt.b32 p, $1, $2, 0x0073; prmt.b32 q, $3, $4, 0x0073; prmt.b32 $0, p, q, 0x5410;}",
            "=r,r,r,r,r", [a, b, c, d], tl.int32, True, 1,
        )  # fmt: skip
    else:
        return ((a >> 24) & 0xFF) | ((b >> 16) & 0xFF00) | ((c >> 8) & 0xFF0000) | (d & -0x1000000)


@triton.jit
def sum_of(a, b, c, d, e, f, g, h):
    """Eight 4-bit digits in a word, the least first. What is above the digits is added up too."""
    return (a + (b << 4)) + ((c + (d << 4)) << 8) + (((e + (f << 4)) + ((g + (h << 4)) << 8)) << 16)


@triton.jit
def lows(a, b, c, d, PTX: tl.constexpr):
    """The low bytes of four words, in one."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b32 p, q; prmt.b32 p, $1, $2, 0x0040; prmt.b32 q, $3, $4, 0x0040; prmt.b32 $0, p, q, 0x5410;}",
            "=r,r,r,r,r", [a, b, c, d], tl.int32, True, 1,
        )  # fmt: skip
    else:
        return (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | (d << 24)


@triton.jit
def bytes_of(a, b, c, d, e, f, g, h, PTX: tl.constexpr):
    """As `sum_of`, but nothing reaches another pair of digits."""
    return lows(a + (b << 4), c + (d << 4), e + (f << 4), g + (h << 4), PTX)


@triton.jit
def words_of_four(
    y, u, C: tl.constexpr, FITS: tl.constexpr, APART: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr
):
    """Words of eight 4-bit codes of FP32 `y` (LANES, WORDS, 8), rounded to nearest; of its magnitude for minifloats, whose
    signs are those of the bits `u`, or of BF16 numbers in words: of a row, or with APART of two columns.

    `y` may be anything where the codes are replaced later: of whole words, or with APART of the bytes of words.
    """
    if C.kind == "float":
        codes = eight(magnitudes(y, C, FITS, PTX), LANES, WORDS)
        signs = eight(u, LANES, WORDS) if u.numel == y.numel else four(u, LANES, WORDS)
    elif C.kind == "integer":
        codes, signs = eight(integers(y, C, FITS), LANES, WORDS), None
    else:
        codes, signs = eight(places(y, C, PTX), LANES, WORDS), None
    return word_of_eight(codes, signs, C, APART, PTX)


@triton.jit
def integers(y, C: tl.constexpr, FITS: tl.constexpr):
    """Codes of FP32 numbers in an integer codec of 4 bits, in the low bits of words: shifted to 0..15, so that digits do not
    borrow."""
    if not FITS:
        y = tl.minimum(tl.maximum(y, C.low), C.high)
    SHIFT: tl.constexpr = 8 if C.signed else 0
    return bits_of(y + (ROUNDER + SHIFT))


@triton.jit
def word_of_eight(codes, signs, C: tl.constexpr, APART: tl.constexpr, PTX: tl.constexpr):
    """Words of eight codes of `magnitudes`, `integers` or `places`. signs: of minifloats, as `u` of `words_of_four`, apart."""
    a, b, c, d, e, f, g, h = codes
    if APART:
        word = bytes_of(a, b, c, d, e, f, g, h, PTX)
    else:
        word = sum_of(a, b, c, d, e, f, g, h)
    if C.kind == "float":
        if not APART:
            word += 0x05000000  # without the bits of WHOLE
        if len(signs) == 8:
            a, b, c, d, e, f, g, h = signs
            even, odd = tops(a, c, e, g, PTX), tops(b, d, f, h, PTX)
        else:
            a, b, c, d = signs
            if APART:  # of two columns, even and odd rows in turn
                even, odd = join_bytes(a, c, 0x7531), join_bytes(b, d, 0x7531)
            else:
                ab, cd = join_bytes(a, b, 0x7351), join_bytes(c, d, 0x7351)
                even, odd = join_bytes(ab, cd, 0x5410), join_bytes(ab, cd, 0x7632)
        word |= (even >> 4) & 0x08080808
        return word | (odd & -0x7F7F7F80)
    elif C.kind == "integer":
        if not APART:
            word -= 0x3F400000  # without the bits of ROUNDER
        if C.signed:  # the top bit of each is turned back
            word = word ^ -0x77777778
        return word
    else:
        return word


@triton.jit
def words_of_rounded(n, LANES: tl.constexpr, WORDS: tl.constexpr):
    """Words of eight 4-bit digits, the low bits of FP32 numbers (LANES, WORDS, 8) that ROUNDER was added to.

    Digits may be negative, or too large: the word is their sum modulo 2^32.
    """
    return word_of_rounded(eight(bits_of(n), LANES, WORDS))


@triton.jit
def word_of_rounded(n):
    """`words_of_rounded` of the bits of eight arrays."""
    a, b, c, d, e, f, g, h = n
    return sum_of(a, b, c, d, e, f, g, h) - 0x3F400000  # without the bits of ROUNDER


@triton.jit
def places(y, C: tl.constexpr, PTX: tl.constexpr):
    """Positions of FP32 numbers in a table whose `cells` hold a start each: it is looked up and compared."""
    COUNT: tl.constexpr = len(C.cells)
    cell = tl.arange(0, 32)
    below = tl.zeros((32,), tl.float32) + C.below[0]
    place = tl.zeros((32,), tl.int32)
    for i in tl.static_range(1, COUNT):
        reached = cell >= C.cells[i]
        below = tl.where(reached, C.below[i], below)
        place += reached.to(tl.int32)
    if PTX:
        part = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [y, C.steep, C.middle], tl.float32, True, 1
        )
    else:
        part = tl.minimum(tl.maximum(tl.fma(y, C.steep, C.middle), 0.0), 1.0)
    at = tl.reshape(bits_of(tl.fma(part, C.count, WHOLE)) & 31, (y.numel,))
    below = tl.reshape(tl.gather(below, at, 0), y.shape)
    place = tl.reshape(tl.gather(place, at, 0), y.shape)
    # The sign of the difference is 1 from the start on.
    return place + (bits_of(below - y).to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)


@triton.jit
def four(t, LANES: tl.constexpr, WORDS: tl.constexpr):
    """The four elements along the last axis of (LANES, WORDS, 4)."""
    even, odd = halves(t, LANES, WORDS, 2)
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    return e0, e1, e2, e3


@triton.jit
def code_of(y, u, C: tl.constexpr, FITS: tl.constexpr, PTX: tl.constexpr):
    """int32 codes of FP32 `y`, rounded to nearest, and anything from bit 22 on; of its magnitude for minifloats with `lines`,
    whose signs are those of the bits `u`.
    """
    if C.kind == "float" and C.lines > 0:
        return magnitudes(y, C, FITS, PTX) | ((u >> (32 - C.bits)) & (C.magnitude + 1))
    elif C.kind == "table":
        return places(y, C, PTX)
    else:
        return encode(y, 0, 0, C, FITS, False, False, False)


@triton.jit
def words_of_six(y, u, C: tl.constexpr, FITS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr):
    """Groups of 24 bits of four 6-bit codes of FP32 `y` (LANES, WORDS, 4), and anything above them."""
    a, b, c, d = four(code_of(y, u, C, FITS, PTX), LANES, WORDS)
    return group_of_six(a, b, c, d)


@triton.jit
def group_of_six(a, b, c, d):
    """Four 6-bit codes in 24 bits, and anything above."""
    return (a + (b << 6)) + ((c + (d << 6)) << 12)


# ------------------------------------------------------------------------------------------------ random words


@triton.jit
def _round(x, y, R: tl.constexpr):
    x = x + y
    return x, ((y << R) | (y >> (32 - R))) ^ x


@triton.jit
def _four_rounds(x, y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x, y = _round(x, y, A)
    x, y = _round(x, y, B)
    x, y = _round(x, y, C)
    return _round(x, y, D)


@triton.jit
def _word(seed):
    """A word of a seed, which is an integer or the address of one."""
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    return seed.to(tl.uint32, bitcast=True)


@triton.jit
def random_word(index, low, high):
    """The first output word of Threefry-2x32 with 20 rounds: key (low, high), counter `index` (int64)."""
    k0, k1 = _word(low), _word(high)
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x = (index & 0xFFFFFFFF).to(tl.uint32) + k0
    y = (index >> 32).to(tl.uint32) + k1
    x, y = _four_rounds(x, y, 13, 15, 26, 6)
    x, y = _four_rounds(x + k1, y + k2 + 1, 17, 29, 16, 24)
    x, y = _four_rounds(x + k2, y + k0 + 2, 13, 15, 26, 6)
    x, y = _four_rounds(x + k0, y + k1 + 3, 17, 29, 16, 24)
    x, y = _four_rounds(x + k1, y + k2 + 4, 13, 15, 26, 6)
    return x + k2
