/* How AVX2 decodes codes and scales. */

#ifndef BRECCIA_AVX2_H
#define BRECCIA_AVX2_H

#include "x86.h"

/* FP16 with the bits of FP8 and FP6 numbers in the high bytes of lanes; the low bytes of all but E5M2 do not matter. E4M3's NaN
   becomes a number. */
INLINE __m256i finite_halves_by_avx2(const int kind, __m256i high)
{
    if (kind == E2M3)
        return _mm256_and_si256(_mm256_srai_epi16(high, 3), _mm256_set1_epi16((short)0x8F80));
    if (kind == E3M2)
        return _mm256_and_si256(_mm256_srai_epi16(high, 2), _mm256_set1_epi16((short)0x9F00));
    if (kind == E4M3)
        return _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xBF80));
    return high;
}

/* Likewise, and E4M3's NaN stays one. */
INLINE __m256i halves_by_avx2(const int kind, __m256i high)
{
    high = finite_halves_by_avx2(kind, high);
    if (kind != E4M3)
        return high;
    /* NaN became 0x3F80: with bit 14 it is FP16's. */
    const __m256i next = _mm256_add_epi16(high, _mm256_set1_epi16(0x80));
    return _mm256_or_si256(high, _mm256_and_si256(next, _mm256_set1_epi16(0x4000)));
}

INLINE __m256 low_half(__m256i v)
{
    return _mm256_cvtph_ps(_mm256_castsi256_si128(v));
}

INLINE __m256 high_half(__m256i v)
{
    return _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
}

/* The bytes of FP32 numbers by 4-bit codes (see `bytes_of_table`). */
typedef struct {
    __m256i of[4];
} table_bytes;

/* Whether the values of 4-bit codes are BF16 numbers: all but NF4's, and tables of a user's own. */
INLINE int are_words(const float *table)
{
    uint32_t rest = 0;
    for (int i = 0; i < 16; i++)
        rest |= bits_of(table[i]) & 0xFFFF;
    return !rest;
}

/* Words of 16 bits from the bytes, low and high, of those numbers. kept: of the even and the odd codes of each lane; else of the
   first 8 of every 16 bytes and the others, two codes to a lane. */
INLINE void words_by_avx2(const int kept, __m256i codes, __m256i low_table, __m256i high_table, __m256i to[2])
{
    const __m256i high_bytes = _mm256_set1_epi16((short)0xFF00);
    const __m256i high = _mm256_shuffle_epi8(high_table, codes), low = _mm256_shuffle_epi8(low_table, codes);
    to[0] = kept ? _mm256_blendv_epi8(low, _mm256_slli_epi16(high, 8), high_bytes) : _mm256_unpacklo_epi8(low, high);
    to[1] = kept ? _mm256_blendv_epi8(_mm256_srli_epi16(low, 8), high, high_bytes) : _mm256_unpackhi_epi8(low, high);
}

/* The values of the low (i = 0) or high codes of bytes: kept in their lanes, to[j] has those of byte j; else to[0] and to[2] those
   of the even and the odd of the first 8 of every 16 bytes, to[1] and to[3] of the others. A permutation of 8 numbers would look
   them up too, but AMD's takes longer than all this. words: whether they are BF16 numbers, so that their low words are 0. */
INLINE void nibbles_by_avx2(
    const int words, const int kept, __m256i v, const int i, const table_bytes *t, __m256 to[4])
{
    const __m256i codes = _mm256_and_si256(i ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    __m256i high[2], low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    words_by_avx2(kept, codes, t->of[2], t->of[3], high);
    if (!words)
        words_by_avx2(kept, codes, t->of[0], t->of[1], low);
    UNROLL for (int j = 0; j < 2; j++) {
        const __m256i first = _mm256_slli_epi32(high[j], 16), second = _mm256_srli_epi32(low[j], 16);
        to[j] = _mm256_castsi256_ps(words ? first : _mm256_blend_epi16(low[j], first, 0xAA));
        to[j + 2] = _mm256_castsi256_ps(_mm256_blend_epi16(second, high[j], 0xAA));
    }
}

/* Byte j of each lane, of INT8 or UINT8 codes. */
INLINE __m256 integer_by_avx2(const int kind, __m256i v, const int j)
{
    const __m256i top = j < 3 ? _mm256_slli_epi32(v, 24 - 8 * j) : v;
    return _mm256_cvtepi32_ps(kind == U8 ? _mm256_srli_epi32(top, 24) : _mm256_srai_epi32(top, 24));
}

/* 32 codes of 6 or 8 bits, one a byte: those of 6 bits in its high bits. */
INLINE __m256i bytes_by_avx2(const int kind, const uint8_t *codes)
{
    if (!IS_SIX(kind))
        return _mm256_loadu_si256((const void *)codes);
    /* 12 bytes in each half: the first of one load and the last of another, which so ends where the codes end. */
    const __m128i second = _mm_loadu_si128((const void *)(codes + 8));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)codes)), second, 1);
    const __m256i v = _mm256_shuffle_epi8(both, _mm256_set_epi8(-1, 15, 14, 13, -1, 12, 11, 10, -1, 9, 8, 7, -1, 6, 5, 4, -1, 11,
        10, 9, -1, 8, 7, 6, -1, 5, 4, 3, -1, 2, 1, 0));
    const __m256i a = _mm256_and_si256(_mm256_slli_epi32(v, 2), _mm256_set1_epi32(0xfc));
    const __m256i b = _mm256_and_si256(_mm256_slli_epi32(v, 4), _mm256_set1_epi32(0xfc00));
    const __m256i c = _mm256_and_si256(_mm256_slli_epi32(v, 6), _mm256_set1_epi32(0xfc0000));
    const __m256i d = _mm256_and_si256(_mm256_slli_epi32(v, 8), _mm256_set1_epi32((int)0xfc000000));
    return _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
}

/* ------------------------------------------------------------------------------------------------ scales */

/* A chunk's scales (or offsets) of 8 rows: those of span s in vector s. */
OUTLINE void scales_by_avx2(const float *const *rows, Py_ssize_t c, __m256 to[SPANS])
{
    for (int half = 0; half < SPANS; half += 8) {
        __m256 v[8];
        UNROLL for (int r = 0; r < 8; r++) v[r] = _mm256_loadu_ps(rows[r] + c * SPANS + half);
        transposed8(v);
        UNROLL for (int r = 0; r < 8; r++) to[half + r] = v[r];
    }
}

/* `decoded`, for scales and offsets. */
INLINE void decoded_by_avx2(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    const int kind = a->kind;
    if (a->codes.bits) {
        records_by_bmi2(a, start, n, y);
        return;
    }
    const Py_ssize_t whole = kind == E4M3 || kind == F16 || kind == E8M0 ? n / 8 * 8 : 0;
    for (Py_ssize_t i = 0; i < whole; i += 8) {
        const uint8_t *from = a->items + (kind == F16 ? 2 : 1) * (start + i);
        __m256 v;
        if (kind == F16)
            v = _mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
        else if (kind == E4M3) {
            const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const void *)from));
            v = _mm256_mul_ps(low_half(halves_by_avx2(E4M3, _mm256_castsi128_si256(high))), _mm256_set1_ps(E4M3_LIFT));
        } else {
            const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
            const __m256i least = _mm256_max_epi32(_mm256_slli_epi32(b, 23), _mm256_set1_epi32(0x00400000)); /* 2^-127 */
            const __m256i nan = _mm256_cmpeq_epi32(b, _mm256_set1_epi32(255));
            v = _mm256_or_ps(_mm256_castsi256_ps(least), _mm256_and_ps(_mm256_castsi256_ps(nan), _mm256_set1_ps(NAN)));
        }
        _mm256_storeu_ps(y + i, v);
    }
    decoded(a, start + whole, n - whole, y + whole);
}

#endif
