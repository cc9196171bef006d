/* How AVX-512 multiplies 4-bit codes that are decoded in registers. */

#ifndef BRECCIA_STREAMS512_H
#define BRECCIA_STREAMS512_H

#include "avx512.h"

/* The scales of a chunk of 4-bit codes, whose first one is at `at`, in the lanes of their codes. */
INLINE __m512 scales_of_lanes(const int grain, const float *scales, Py_ssize_t at, const __m512i span_of_lane)
{
    if (grain == ONE)
        return _mm512_set1_ps(scales[at]);
    return grain == WORDS ? spread_words(span_of_lane, (const uint16_t *)scales + at)
                          : _mm512_permutexvar_ps(span_of_lane, _mm512_loadu_ps(scales + at));
}

/* One instruction. GCC 12 copies its sums about in registers and memory where they come from intrinsics. */
#define MULTIPLY(instruction, sum, codes, words) __asm__(instruction " %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(words))

/* sum + d * y, or d * y where there is no sum yet; of `pairs` of BF16 numbers, whose products are exact. */
INLINE __m512 added(const int pairs, const int begins, __m512 d, __m512 y, __m512 sum)
{
    if (!pairs)
        return begins ? _mm512_mul_ps(d, y) : _mm512_fmadd_ps(d, y, sum);
    if (begins)
        sum = _mm512_setzero_ps();
    MULTIPLY("vdpbf16ps", sum, d, y);
    return sum;
}

/* Whether codes of a kind, less their zero-points, are decoded in registers as BF16 numbers. */
INLINE int are_pairs(int kind, int role)
{
    return role == NONE ? kind == TABLE4 || (kind >= E4M3 && kind <= I8) : role == ZERO_POINT && kind == TABLE4;
}

/* A table of 16 BF16 numbers in FP32 as words, twice. */
INLINE __m512 words_of_table(__m512 table)
{
    const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(table), 16);
    return _mm512_castsi512_ps(_mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(words)));
}

/* Integers from -16 to 15 as words, at their lowest 5 bits: the differences of 4-bit codes and zero-points. */
INLINE __m512 words_of_differences(void)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 low = _mm512_cvtepi32_ps(lanes), high = _mm512_sub_ps(low, _mm512_set1_ps(16));
    const __m256i first = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16));
    const __m256i second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16));
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}

/* Small integers in both halves of their lanes. */
INLINE __m512i in_both_halves(__m512 v)
{
    const __m512i low = _mm512_cvtps_epi32(v);
    return _mm512_or_si512(low, _mm512_slli_epi32(low, 16));
}

/* The values of the lowest code of each lane; of `pairs`, of each half of a lane. */
INLINE __m512 looked_up(const int pairs, __m512i v, __m512 table)
{
    if (pairs)
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(v, _mm512_castps_si512(table)));
    return _mm512_permutexvar_ps(v, table);
}

/* Products of ROWS rows and M rows of activations, all along K, into sums[m * ROWS + r]. */
INLINE void nibbles_streamed(
    const int pairs, const int M, const int role, const int grain, const weight *w, const panel *p, const float *x,
    Py_ssize_t stride, float *sums)
{
    enum { MOST_PAIRED = 2 };
    const int steps = pairs ? 4 : 8;
    const __m512 numbers = _mm512_loadu_ps(w->codes.table);
    const int early = grain == ONE;                               /* scales or zero-points are applied to the table */
    const int shifts = pairs && role == ZERO_POINT && !early;     /* zero-points are subtracted from codes */
    const __m512 table = !pairs ? numbers : shifts ? words_of_differences() : words_of_table(numbers);
    const int later = pairs || (role != BIAS && (M == 1 || !early)); /* scales are applied to sums of a span */
    const int together = M == 1 || !later ? ROWS : MOST_PAIRED; /* rows whose sums of spans are in registers */
    const Py_ssize_t spans = grain == ONE ? 1 : p->spans;
    const __m512i span_of_lane = grain == WORDS ? _mm512_slli_epi32(span_of_lanes(spans), 16) : span_of_lanes(spans);
    const Py_ssize_t chunks = p->chunks, ahead = p->ahead;
    __m512 a[4][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm512_setzero_ps();
    for (Py_ssize_t c = 0; c < chunks; c++, x += stride) {
        __m512i v[ROWS];
        __m512 values[ROWS], scale[ROWS], offset[ROWS];
        /* GCC would keep pointers in vector registers, and move them from there to where they are needed by instructions that
           decoding needs, too. */
        FROM_MEMORY(p);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const uint8_t *codes = c == p->whole ? p->rest[r] : p->codes[r] + c * (CHUNK / 2);
            v[r] = _mm512_loadu_si512(codes);
            _mm_prefetch((const char *)codes + ahead, _MM_HINT_T1);
            values[r] = table;
            if (role != NONE) {
                const float *offsets = p->offsets[r] + c * spans;
                offset[r] = grain == ONE ? _mm512_set1_ps(*offsets)
                                         : _mm512_permutexvar_ps(span_of_lane, _mm512_loadu_ps(offsets));
                if (shifts)
                    offset[r] = _mm512_castsi512_ps(in_both_halves(offset[r]));
            }
            if (!later)
                scale[r] = scales_of_lanes(grain, p->scales[r], c * spans, span_of_lane);
            if (early && later)
                values[r] = role == NONE ? table : _mm512_sub_ps(numbers, offset[r]);
            else if (early)
                values[r] = applied(role, table, scale[r], offset[r]);
            if (pairs && early && role == ZERO_POINT)
                values[r] = words_of_table(values[r]);
        }
        UNROLL for (int first = 0; first < ROWS; first += together) {
            __m512 span[4][ROWS];
            UNROLL for (int i = 0; i < steps; i++) {
                __m512i shifted[ROWS];
                __m512 d[ROWS];
                UNROLL for (int r = 0; r < together; r++) {
                    shifted[r] = i ? _mm512_srli_epi32(v[first + r], 4 * i) : v[first + r];
                    if (shifts)
                        shifted[r] = _mm512_sub_epi16(
                            _mm512_and_si512(shifted[r], _mm512_set1_epi16(15)), _mm512_castps_si512(offset[first + r]));
                    /* Written in turns, shifts, permutations and products use all ports of a processor; in the order that GCC
                       likes they take a twentieth longer. */
                    AFTER(shifted[r]);
                }
                UNROLL for (int r = 0; r < together; r++) {
                    d[r] = looked_up(pairs, shifted[r], values[first + r]);
                    AFTER(d[r]);
                    if (later && role == ZERO_POINT && !early && !shifts)
                        d[r] = _mm512_sub_ps(d[r], offset[first + r]);
                    if (!later && !early)
                        d[r] = applied(role, d[r], scale[first + r], offset[first + r]);
                }
                UNROLL for (int m = 0; m < M; m++) {
                    const __m512 y = _mm512_loadu_ps(x + 16 * (m * steps + i));
                    UNROLL for (int r = 0; r < together; r++) {
                        if (!later)
                            a[m][first + r] = _mm512_fmadd_ps(d[r], y, a[m][first + r]);
                        else
                            span[m][r] = added(pairs, i == 0, d[r], y, span[m][r]);
                    }
                }
            }
            if (later) {
                FROM_MEMORY(p);
                UNROLL for (int r = 0; r < together; r++) {
                    const __m512 by = scales_of_lanes(grain, p->scales[first + r], c * spans, span_of_lane);
                    UNROLL for (int m = 0; m < M; m++) a[m][first + r] = _mm512_fmadd_ps(span[m][r], by, a[m][first + r]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = _mm512_reduce_add_ps(a[m][r]);
}

/* ------------------------------------------------------------------------------------------------ all streams */

typedef void (*streamed)(const weight *, const panel *, const float *, Py_ssize_t, float *);

#define STREAM(name, call)                                                                                                  \
    static void name(const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)                       \
    {                                                                                                                       \
        call;                                                                                                               \
    }
#define FOR_ALL(what, which, grain) what(1, which, grain) what(2, which, grain) what(4, which, grain)

/* By rows of activations, and by the grain. */
#define FUNCTIONS(what, which, grain) {what##1##which##grain, what##2##which##grain, what##4##which##grain}
#define OF_TABLES(name, kind) \
    {FUNCTIONS(name, kind, ONE), FUNCTIONS(name, kind, MANY), FUNCTIONS(name, kind, MANY), FUNCTIONS(name, kind, WORDS)}

#endif
