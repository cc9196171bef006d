/* The 16-bit floats: what the microkernels of casts and of dequantize share.

   Extensions that include this must be compiled without contraction into fused multiply-adds (see setup.py). */

#ifndef BRECCIA_NUMBERS_H
#define BRECCIA_NUMBERS_H

#include "bits.h"

#define MAGNITUDE 0x7fffffffu
#define EXPONENT 0x7f800000u
#define NORMAL 0x00800000u

/* -------------------------------------------------------------------------------------------------- floating dtypes */

#define BF16 16
#define FP16 -16
#define FP32 32

/* FP16 as FP32, exactly: exponents are moved up, and subnormal numbers are integers times 2^-24. */
INLINE uint32_t bits_of_half(uint16_t h)
{
    const uint32_t a = h & 0x7fffu;
    const uint32_t u = (a << 13) + (a >= 0x7c00u ? 224u << 23 : 112u << 23);
    const uint32_t tiny = bits_of((float)(int32_t)a * 0x1p-24f);
    return (a < 0x400u ? tiny : u) | ((uint32_t)(h & 0x8000u) << 16);
}

/* To nearest, ties to even; NaNs as NumPy converts them. */
INLINE uint16_t half_of(uint32_t u)
{
    const uint32_t a = u & MAGNITUDE, payload = (a >> 13) & 0x3ffu;
    const uint32_t normal = (a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t tiny = bits_of(float_of(a) + 0.5f) - 0x3f000000u; /* the last bit of 0.5 is 2^-24 */
    const uint32_t finite = a < 0x38800000u ? tiny : a >= 0x477ff000u ? 0x7c00u : normal;
    const uint32_t nan = 0x7c00u | (payload ? payload : 1u);
    return (uint16_t)((a > EXPONENT ? nan : finite) | ((u >> 16) & 0x8000u));
}

/* To nearest, ties to even; a NaN becomes the one without a payload. */
INLINE uint16_t bfloat_of(uint32_t u)
{
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = 0x7fc0u | ((u >> 16) & 0x8000u);
    return (uint16_t)((u & MAGNITUDE) > EXPONENT ? nan : rounded);
}

INLINE void row_of(const char *x, Py_ssize_t n, int kind, uint32_t *found)
{
    const uint16_t *half = (const uint16_t *)x;
    if (kind == FP32)
        memcpy(found, x, 4 * (size_t)n);
    else if (kind == BF16)
        for (Py_ssize_t i = 0; i < n; i++)
            found[i] = (uint32_t)half[i] << 16;
    else
        for (Py_ssize_t i = 0; i < n; i++)
            found[i] = bits_of_half(half[i]);
}

/* The FP32 bits of the number at `x`. */
INLINE uint32_t number_of(const char *x, int kind)
{
    uint32_t u = 0;
    memcpy(&u, x, kind == FP32 ? 4 : 2);
    return kind == FP32 ? u : kind == BF16 ? u << 16 : bits_of_half((uint16_t)u);
}

INLINE void halves_of(const uint32_t *x, Py_ssize_t n, int kind, uint16_t *found)
{
    if (kind == BF16)
        for (Py_ssize_t i = 0; i < n; i++)
            found[i] = bfloat_of(x[i]);
    else
        for (Py_ssize_t i = 0; i < n; i++)
            found[i] = half_of(x[i]);
}

#endif
