/* What the products of columns by AVX2 and by AVX-512 share. */

#ifndef BRECCIA_COLUMN_HALVES_H
#define BRECCIA_COLUMN_HALVES_H

#include "columns.h"

static inline float lift_of(int kind)
{
    return kind == E4M3 ? 0x1p8f : kind == E2M3 ? 0x1p14f : kind == E3M2 ? 0x1p12f : 1;
}

#define IS_HALF(kind) ((kind) >= E4M3 && (kind) <= E3M2)

/* FP16 numbers with the bits of FP8 and FP6 ones, which are the lift smaller; the NaN of E4M3, 0x3F80, becomes that of FP16. */
#define AS_HALVES(width, si, kind, v)                                                                                          \
    do {                                                                                                                       \
        v = _mm##width##_slli_epi16(v, 8);                                                                                     \
        if (kind == E4M3) {                                                                                                    \
            v = _mm##width##_and_##si(_mm##width##_srai_epi16(v, 1), _mm##width##_set1_epi16((short)0xBF80));                  \
            v = _mm##width##_or_##si(v, _mm##width##_and_##si(_mm##width##_add_epi16(v, _mm##width##_set1_epi16(0x80)),        \
                                            _mm##width##_set1_epi16(0x4000)));                                                 \
        }                                                                                                                      \
        if (kind == E2M3)                                                                                                      \
            v = _mm##width##_and_##si(_mm##width##_srai_epi16(v, 3), _mm##width##_set1_epi16((short)0x8F80));                  \
        if (kind == E3M2)                                                                                                      \
            v = _mm##width##_and_##si(_mm##width##_srai_epi16(v, 2), _mm##width##_set1_epi16((short)0x9F00));                  \
    } while (0)

#endif
