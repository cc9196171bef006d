/* How AVX-512 decodes codes and scales. */

#ifndef BRECCIA_AVX512_H
#define BRECCIA_AVX512_H

#include "x86.h"

/* Of numbers in the high bytes of lanes; the low bytes of all but E5M2 do not matter. */
INLINE __m512 halves(const int kind, __m256i high)
{
    if (kind == E2M3)
        high = _mm256_and_si256(_mm256_srai_epi16(high, 3), _mm256_set1_epi16((short)0x8F80));
    if (kind == E3M2)
        high = _mm256_and_si256(_mm256_srai_epi16(high, 2), _mm256_set1_epi16((short)0x9F00));
    if (kind == E4M3) {
        const __m256i keep = _mm256_set1_epi16((short)0xBF80), nan = _mm256_set1_epi16(0x4000);
        high = _mm256_and_si256(_mm256_srai_epi16(high, 1), keep);
        /* 0x3F80 is E4M3's NaN: with bit 14 it is FP16's. */
        high = _mm256_or_si256(high, _mm256_and_si256(_mm256_add_epi16(high, _mm256_set1_epi16(0x80)), nan));
    }
    return _mm512_cvtph_ps(high);
}

/* FP16 with the bits of 64 FP8 or FP6 numbers: the even ones and the odd ones. */
INLINE void halves_of_bytes(const int kind, __m512i v, __m512i *even, __m512i *odd)
{
    const __m512i nan = _mm512_set1_epi16(0x4000), one = _mm512_set1_epi16(0x80);
    const int shift = kind == E2M3 ? 3 : kind == E3M2 ? 2 : 1;
    const __m512i keep = _mm512_set1_epi16((short)(kind == E2M3 ? 0x8F80 : kind == E3M2 ? 0x9F00 : 0xBF80));
    *even = _mm512_slli_epi16(v, 8);
    *odd = v;
    if (kind == E5M2) {
        *odd = _mm512_and_si512(v, _mm512_set1_epi16((short)0xFF00));
        return;
    }
    *even = _mm512_and_si512(_mm512_srai_epi16(*even, shift), keep);
    *odd = _mm512_and_si512(_mm512_srai_epi16(*odd, shift), keep);
    if (kind == E4M3) { /* 0x3F80 is E4M3's NaN: with bit 14 it is FP16's. a | (b & c) is the function 0xF8. */
        *even = _mm512_ternarylogic_epi64(*even, _mm512_add_epi16(*even, one), nan, 0xF8);
        *odd = _mm512_ternarylogic_epi64(*odd, _mm512_add_epi16(*odd, one), nan, 0xF8);
    }
}

/* How many scales a chunk has: one, one for each vector (or pair of vectors) of bytes at most, or more; or BF16 words of any. */
enum { ONE, FEW, MANY, WORDS, GRAINS };

INLINE __m512 nibble(__m512i v, int i, __m512 table)
{
    return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(v, 4 * i) : v, table);
}

INLINE __m512 applied(const int role, __m512 v, __m512 scale, __m512 offset)
{
    if (role == ZERO_POINT)
        v = _mm512_sub_ps(v, offset);
    v = _mm512_mul_ps(v, scale);
    if (role != BIAS)
        return v;
    AFTER(v); /* fused, they would not be rounded as a decoded weight is, and could differ where they cancel */
    return _mm512_add_ps(v, offset);
}

/* The 64 bytes of part `part` of a chunk's codes, one code a byte: those of 6 bits in its high bits. Or, of 4 bits, the whole chunk. */
INLINE __m512i part_of_codes(const int kind, const uint8_t *codes, const int part)
{
    if (!IS_SIX(kind))
        return _mm512_loadu_si512(codes + 64 * part);
    const __m512i lanes = _mm512_set_epi32(0, 11, 10, 9, 0, 8, 7, 6, 0, 5, 4, 3, 0, 2, 1, 0);
    const __m512i apart = _mm512_broadcast_i32x4(_mm_set_epi8(-1, 11, 10, 9, -1, 8, 7, 6, -1, 5, 4, 3, -1, 2, 1, 0));
    const __m512i from = _mm512_maskz_loadu_epi32(0x0fff, codes + 48 * part);
    const __m512i v = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, from), apart);
    const __m512i a = _mm512_and_si512(_mm512_slli_epi32(v, 2), _mm512_set1_epi32(0xfc));
    const __m512i b = _mm512_and_si512(_mm512_slli_epi32(v, 4), _mm512_set1_epi32(0xfc00));
    const __m512i c = _mm512_and_si512(_mm512_slli_epi32(v, 6), _mm512_set1_epi32(0xfc0000));
    const __m512i d = _mm512_and_si512(_mm512_slli_epi32(v, 8), _mm512_set1_epi32((int)0xfc000000));
    return _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
}

/* A chunk's codes, one a byte. */
INLINE const uint8_t *bytes_of(const int kind, const panel *p, int r, Py_ssize_t c, uint8_t *room)
{
    const uint8_t *codes = codes_of(p, r, c);
    if (!IS_SIX(kind))
        return codes;
    for (int half = 0; half < 2; half++)
        _mm512_storeu_si512(room + 64 * half, part_of_codes(kind, codes, half));
    return room;
}

/* Chunk c of the codes of 16 rows from `row` on: vector j has word j of each. `next`: the offset in a row of what is prefetched, into
   the L2 cache where it is `far`. */
INLINE void transposed_codes(
    const int kind, const int far, const panel *p, int row, Py_ssize_t c, Py_ssize_t next, __m512 *to)
{
    for (int part = 0; part < (kind == TABLE4 ? 1 : 2); part++) {
        __m512 v[16];
        UNROLL for (int r = 0; r < 16; r++) {
            const char *const later = (const char *)p->codes[row + r] + next + 64 * part;
            v[r] = _mm512_castsi512_ps(part_of_codes(kind, codes_of(p, row + r, c), part));
            if (far)
                _mm_prefetch(later, _MM_HINT_T1);
            else
                _mm_prefetch(later, _MM_HINT_T0);
        }
        transposed(v);
        UNROLL for (int r = 0; r < 16; r++) to[16 * part + r] = v[r];
    }
}

/* Likewise, of a kind that is not known when this is compiled. */
OUTLINE void read_codes(int kind, const panel *p, int row, Py_ssize_t c, Py_ssize_t next, __m512 *to)
{
    if (kind == TABLE4)
        transposed_codes(TABLE4, 0, p, row, c, next, to);
    else if (IS_SIX(kind))
        transposed_codes(E2M3, 0, p, row, c, next, to);
    else
        transposed_codes(I8, 0, p, row, c, next, to);
}

/* The value of code i of each lane, which holds 8 codes of 4 bits, or 4 of 8. */
INLINE __m512 value_of(const int kind, __m512i v, const int i, const __m512 table, const float *values)
{
    if (kind == TABLE4)
        return nibble(v, i, table);
    if (kind == I8)
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(i < 3 ? _mm512_slli_epi32(v, 24 - 8 * i) : v, 24));
    if (IS_HALF(kind)) {
        const __m256i words = _mm512_cvtepi32_epi16(i < 2 ? v : _mm512_srli_epi32(v, 16));
        return halves(kind, i % 2 ? _mm256_and_si256(words, _mm256_set1_epi16((short)0xFF00)) : _mm256_slli_epi16(words, 8));
    }
    const __m512i code = _mm512_and_si512(i ? _mm512_srli_epi32(v, 8 * i) : v, _mm512_set1_epi32(255));
    return kind == U8 ? _mm512_cvtepi32_ps(code) : _mm512_i32gather_ps(code, values, 4);
}

/* ------------------------------------------------------------------------------------------------ scales in words */

/* The span that lane j of 16 is in, of `spans` in a chunk. */
INLINE __m512i span_of_lanes(Py_ssize_t spans)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(4 - __builtin_ctz((unsigned)spans)));
}

/* FP32 numbers of BF16 words: the high halves of `lanes` say which. */
INLINE __m512 spread_words(const __m512i lanes, const uint16_t *words)
{
    const __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)words));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, all));
}

/* E8M0 scales as words. Returns 0 where one is NaN, subnormal, or above the limit. */
INLINE int words_of_e8m0(const uint8_t *bytes, Py_ssize_t n, uint16_t *to)
{
    const __m512i unit = _mm512_set1_epi8(127), one = _mm512_set1_epi8(1), most = _mm512_set1_epi8((char)150); /* 2^24, less one */
    __mmask64 beyond = 0;
    for (Py_ssize_t i = 0; i < n; i += 64) {
        const __mmask64 here = n - i < 64 ? ((__mmask64)1 << (n - i)) - 1 : ~(__mmask64)0;
        const __m512i b = _mm512_mask_loadu_epi8(unit, here, bytes + i);
        beyond |= _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(b, one), most);
        const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(b));
        const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(b, 1));
        _mm512_storeu_si512(to + i, _mm512_slli_epi16(low, 7));
        _mm512_storeu_si512(to + i + 32, _mm512_slli_epi16(high, 7));
    }
    return !beyond;
}

/* The first `n` lanes, of 16. */
INLINE __mmask16 first_lanes(Py_ssize_t n)
{
    return n < 16 ? (__mmask16)((1 << n) - 1) : (__mmask16)0xFFFF;
}

/* E4M3 scales in FP32: those of the lanes `here`. */
INLINE __m512 e4m3_scales(const uint8_t *bytes, __mmask16 here)
{
    const __m256i b = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(here, bytes));
    return _mm512_mul_ps(halves(E4M3, _mm256_slli_epi16(b, 8)), _mm512_set1_ps(E4M3_LIFT));
}

/* E4M3 scales as words. */
INLINE void words_of_e4m3(const uint8_t *bytes, Py_ssize_t n, uint16_t *to)
{
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(e4m3_scales(bytes + i, first_lanes(n - i))), 16);
        _mm256_storeu_si256((void *)(to + i), _mm512_cvtepi32_epi16(words));
    }
}

/* ------------------------------------------------------------------------------------------------ scales in FP32 */

/* `decoded`, for scales and offsets. */
INLINE void decoded_by_avx512(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    if (a->codes.bits) {
        records_by_bmi2(a, start, n, y);
        return;
    }
    if (a->kind != E4M3 && a->kind != F16) {
        decoded(a, start, n, y);
        return;
    }
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __mmask16 here = first_lanes(n - i);
        const __m512 v = a->kind == E4M3 ? e4m3_scales(a->items + start + i, here)
                                         : _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(here, a->items + 2 * (start + i)));
        _mm512_mask_storeu_ps(y + i, here, v);
    }
}

/* A chunk's scales (or offsets) of 16 rows: those of span s in vector s. Where `same`, in vector 0 only. */
OUTLINE void scales_of_rows(int same, const float *const *rows, Py_ssize_t c, __m512 *to)
{
    if (same) {
        float first[16];
        for (int r = 0; r < 16; r++)
            first[r] = rows[r][c * SPANS];
        to[0] = _mm512_loadu_ps(first);
        return;
    }
    __m512 v[16];
    UNROLL for (int r = 0; r < 16; r++) v[r] = _mm512_loadu_ps(rows[r] + c * SPANS);
    transposed(v);
    UNROLL for (int r = 0; r < 16; r++) to[r] = v[r];
}

#endif
