/* The version for processors with AVX-512. */

#ifndef BRECCIA_AVX512_H
#define BRECCIA_AVX512_H

#include <immintrin.h>

#include "avx2.h"

typedef float f16 __attribute__((vector_size(64)));

#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

/* Of numbers in the high bytes of lanes; the low bytes of all but E5M2 do not matter. */
FOR_AVX512 INLINE __m512 halves(const int kind, __m256i high)
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
FOR_AVX512 INLINE void halves_of_bytes(const int kind, __m512i v, __m512i *even, __m512i *odd)
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

/* 64 codes as the vectors that activations are in the order of. */
FOR_AVX512 INLINE void bytes_by_avx512(const int kind, const uint8_t *codes, __m512 to[4])
{
    if (!IS_HALF(kind)) {
        UNROLL for (int i = 0; i < 4; i++) {
            const __m128i v = _mm_loadu_si128((const void *)(codes + 16 * i));
            to[i] = _mm512_cvtepi32_ps(kind == U8 ? _mm512_cvtepu8_epi32(v) : _mm512_cvtepi8_epi32(v));
        }
        return;
    }
    __m512i even, odd;
    halves_of_bytes(kind, _mm512_loadu_si512(codes), &even, &odd);
    to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
    to[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
    to[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
    to[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}

/* How many scales a chunk has: one, one for each vector (or pair of vectors) of bytes at most, or more; or BF16 words of any. */
enum { ONE, FEW, MANY, WORDS, GRAINS };

/* The scales (or offsets) of the lanes of vector `i` of bytes, of a chunk with `spans` of them. */
FOR_AVX512 INLINE __m512 lanes_of(const int kind, const int grain, const float *scales, const int i, Py_ssize_t spans)
{
    const __m512i by4 = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i by8 = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const int first = IS_HALF(kind) ? i / 2 * 32 : i * 16; /* of its codes */
    const float *from = scales + first * spans / CHUNK;
    if (grain != MANY)
        return _mm512_set1_ps(*from);
    return _mm512_permutexvar_ps(IS_HALF(kind) && spans == SPANS ? by4 : by8, _mm512_loadu_ps(from));
}

FOR_AVX512 INLINE __m512 nibble(__m512i v, int i, __m512 table)
{
    return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(v, 4 * i) : v, table);
}

FOR_AVX512 INLINE __m512 applied(const int role, __m512 v, __m512 scale, __m512 offset)
{
    if (role == ZERO_POINT)
        v = _mm512_sub_ps(v, offset);
    v = _mm512_mul_ps(v, scale);
    if (role != BIAS)
        return v;
    AFTER(v); /* fused, they would not be rounded as a decoded weight is, and could differ where they cancel */
    return _mm512_add_ps(v, offset);
}

/* A chunk's codes, one a byte. */
FOR_AVX512 INLINE const uint8_t *bytes_of(const int kind, const panel *p, int r, Py_ssize_t c, uint8_t *room)
{
    const uint8_t *codes = codes_of(p, r, c);
    if (!IS_SIX(kind))
        return codes;
    const __m512i lanes = _mm512_set_epi32(0, 11, 10, 9, 0, 8, 7, 6, 0, 5, 4, 3, 0, 2, 1, 0);
    const __m512i apart = _mm512_broadcast_i32x4(_mm_set_epi8(-1, 11, 10, 9, -1, 8, 7, 6, -1, 5, 4, 3, -1, 2, 1, 0));
    for (int half = 0; half < 2; half++) {
        const __m512i from = _mm512_maskz_loadu_epi32(0x0fff, codes + 48 * half);
        const __m512i v = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lanes, from), apart);
        const __m512i a = _mm512_and_si512(_mm512_slli_epi32(v, 2), _mm512_set1_epi32(0xfc));
        const __m512i b = _mm512_and_si512(_mm512_slli_epi32(v, 4), _mm512_set1_epi32(0xfc00));
        const __m512i c = _mm512_and_si512(_mm512_slli_epi32(v, 6), _mm512_set1_epi32(0xfc0000));
        const __m512i d = _mm512_and_si512(_mm512_slli_epi32(v, 8), _mm512_set1_epi32((int)0xfc000000));
        _mm512_storeu_si512(room + 64 * half, _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
    }
    return room;
}

/* ------------------------------------------------------------------------------------------------ scales in words */

/* The span that lane j of 16 is in, of `spans` in a chunk. */
FOR_AVX512 INLINE __m512i span_of_lanes(Py_ssize_t spans)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_srl_epi32(lanes, _mm_cvtsi32_si128(4 - __builtin_ctz((unsigned)spans)));
}

/* FP32 numbers of BF16 words: the high halves of `lanes` say which. */
FOR_AVX512 INLINE __m512 spread_words(const __m512i lanes, const uint16_t *words)
{
    const __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)words));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, all));
}

/* E8M0 scales as words. Returns 0 where one is NaN, subnormal, or above the limit. */
FOR_AVX512 INLINE int words_of_e8m0(const uint8_t *bytes, Py_ssize_t n, uint16_t *to)
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
FOR_AVX512 INLINE __m512 e4m3_scales(const uint8_t *bytes, __mmask16 here)
{
    const __m256i b = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(here, bytes));
    return _mm512_mul_ps(halves(E4M3, _mm256_slli_epi16(b, 8)), _mm512_set1_ps(E4M3_LIFT));
}

/* E4M3 scales as words. */
FOR_AVX512 INLINE void words_of_e4m3(const uint8_t *bytes, Py_ssize_t n, uint16_t *to)
{
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(e4m3_scales(bytes + i, first_lanes(n - i))), 16);
        _mm256_storeu_si256((void *)(to + i), _mm512_cvtepi32_epi16(words));
    }
}

/* The `worder`. */
FOR_AVX512 static int words_by_avx512(const weight *w, Py_ssize_t row, uint16_t *to)
{
    const uint8_t *bytes = w->scale.items + row * w->groups;
    if (w->codes.kind != TABLE4)
        return 0;
    if (w->scale.kind == E8M0)
        return words_of_e8m0(bytes, w->groups, to);
    if (w->scale.kind != E4M3)
        return 0;
    words_of_e4m3(bytes, w->groups, to);
    return 1;
}

/* ------------------------------------------------------------------------------------------------ from registers */

/* The scales of a chunk of 4-bit codes, whose first one is at `at`, in the lanes of their codes. */
FOR_AVX512 INLINE __m512 scales_of_lanes(const int grain, const float *scales, Py_ssize_t at, const __m512i span_of_lane)
{
    if (grain == ONE)
        return _mm512_set1_ps(scales[at]);
    return grain == WORDS ? spread_words(span_of_lane, (const uint16_t *)scales + at)
                          : _mm512_permutexvar_ps(span_of_lane, _mm512_loadu_ps(scales + at));
}

/* One instruction. GCC 12 copies its sums about in registers and memory where they come from intrinsics. */
#define MULTIPLY(instruction, sum, codes, words) __asm__(instruction " %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(words))

/* sum + d * y, or d * y where there is no sum yet; of `pairs` of BF16 numbers, whose products are exact. */
FOR_AVX512 INLINE __m512 added(const int pairs, const int begins, __m512 d, __m512 y, __m512 sum)
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
FOR_AVX512 INLINE __m512 words_of_table(__m512 table)
{
    const __m512i words = _mm512_srli_epi32(_mm512_castps_si512(table), 16);
    return _mm512_castsi512_ps(_mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(words)));
}

/* Integers from -16 to 15 as words, at their lowest 5 bits: the differences of 4-bit codes and zero-points. */
FOR_AVX512 INLINE __m512 words_of_differences(void)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 low = _mm512_cvtepi32_ps(lanes), high = _mm512_sub_ps(low, _mm512_set1_ps(16));
    const __m256i first = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16));
    const __m256i second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16));
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}

/* Small integers in both halves of their lanes. */
FOR_AVX512 INLINE __m512i in_both_halves(__m512 v)
{
    const __m512i low = _mm512_cvtps_epi32(v);
    return _mm512_or_si512(low, _mm512_slli_epi32(low, 16));
}

/* The values of the lowest code of each lane; of `pairs`, of each half of a lane. */
FOR_AVX512 INLINE __m512 looked_up(const int pairs, __m512i v, __m512 table)
{
    if (pairs)
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(v, _mm512_castps_si512(table)));
    return _mm512_permutexvar_ps(v, table);
}

/* Products of ROWS rows and M rows of activations, all along K, into sums[m * ROWS + r]. */
FOR_AVX512 INLINE void nibbles_streamed(
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

FOR_AVX512 INLINE void bytes_streamed(
    const int M, const int kind, const int role, const int grain, const weight *w, const panel *p, const float *x,
    Py_ssize_t stride, float *sums)
{
    /* With one row of activations, scales are applied to sums of a pair of vectors, or of a chunk. */
    const int later = role == NONE && M == 1 && (grain == ONE || IS_HALF(kind));
    const Py_ssize_t spans = grain == ONE ? 1 : p->spans;
    const Py_ssize_t chunks = p->chunks, ahead = p->ahead;
    __m512 a[4][ROWS];
    (void)w;
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm512_setzero_ps();
    for (Py_ssize_t c = 0; c < chunks; c++, x += stride) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            uint8_t room[CHUNK];
            FROM_MEMORY(p);
            const uint8_t *codes = bytes_of(kind, p, r, c, room);
            const float *scales = p->scales[r] + c * spans, *offsets = p->offsets[r] + c * spans;
            const char *next = (const char *)(IS_SIX(kind) ? codes_of(p, r, c) : codes) + ahead;
            __m512 all[2];
            _mm_prefetch(next, _MM_HINT_T1);
            _mm_prefetch(next + 64, _MM_HINT_T1);
            UNROLL for (int half = 0; half < 2; half++) {
                const float *y = x + 64 * half;
                __m512 d[4];
                bytes_by_avx512(kind, codes + 64 * half, d);
                UNROLL for (int i = 0; i < 4; i += 2) {
                    if (later) {
                        __m512 sum = _mm512_mul_ps(d[i], _mm512_loadu_ps(y + 16 * i));
                        if (grain == ONE && half)
                            sum = _mm512_fmadd_ps(d[i], _mm512_loadu_ps(y + 16 * i), all[i / 2]);
                        sum = _mm512_fmadd_ps(d[i + 1], _mm512_loadu_ps(y + 16 * i + 16), sum);
                        if (grain == ONE)
                            all[i / 2] = sum;
                        else
                            a[0][r] = _mm512_fmadd_ps(sum, lanes_of(kind, grain, scales, 4 * half + i, spans), a[0][r]);
                        continue;
                    }
                    UNROLL for (int j = i; j < i + 2; j++) {
                        const __m512 scale = lanes_of(kind, grain, scales, 4 * half + j, spans);
                        const __m512 offset = role == NONE ? scale : lanes_of(kind, grain, offsets, 4 * half + j, spans);
                        const __m512 e = applied(role, d[j], scale, offset);
                        UNROLL for (int m = 0; m < M; m++)
                            a[m][r] = _mm512_fmadd_ps(e, _mm512_loadu_ps(y + m * CHUNK + 16 * j), a[m][r]);
                    }
                }
            }
            if (later && grain == ONE)
                a[0][r] = _mm512_fmadd_ps(_mm512_add_ps(all[0], all[1]), _mm512_set1_ps(*scales), a[0][r]);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = _mm512_reduce_add_ps(a[m][r]);
}

/* ------------------------------------------------------------------------------------------------ bytes by tables */

#define FOR_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")))

/* BF16 numbers by the low 7 bits of a byte: their high bytes, less the sign, and their low bytes. */
typedef struct {
    uint8_t high[128], low[128];
} byte_table;

/* Those of FP8 and FP6 codes (see `expanded`), divided by the lift, of magnitudes of INT8 codes; and at 0, of E4M3 scales. */
static byte_table byte_tables[KINDS];

static void fill_byte_tables(void)
{
    for (int kind = 0; kind <= I8; kind = kind ? kind + 1 : E4M3)
        for (int i = 0; i < 128; i++) {
            const uint8_t byte = (uint8_t)i;
            const numbers one = {kind ? kind : E4M3, &byte, NULL};
            float y;
            decoded(&one, 0, 1, &y);
            const uint32_t u = bits_of(y / (kind ? lift_of(kind) : 1));
            byte_tables[kind].high[i] = (uint8_t)(u >> 24);
            byte_tables[kind].low[i] = (uint8_t)(u >> 16);
        }
}

/* A table in registers. */
typedef struct {
    __m512i high[2], low[2];
} loaded_table;

FOR_AVX512 INLINE loaded_table load_table(int kind)
{
    const byte_table *t = &byte_tables[kind];
    const loaded_table found = {{_mm512_loadu_si512(t->high), _mm512_loadu_si512(t->high + 64)},
        {_mm512_loadu_si512(t->low), _mm512_loadu_si512(t->low + 64)}};
    return found;
}

/* Of 128 bytes in two vectors, those at the low 7 bits of each index. Not an intrinsic, so that functions that also run without
   AVX-512 VBMI, for other codes, may contain it. */
FOR_AVX512 INLINE __m512i byte_at(__m512i index, const __m512i table[2])
{
    __asm__("vpermi2b %2, %1, %0" : "+v"(index) : "v"(table[0]), "v"(table[1]));
    return index;
}

/* The low and the high bytes of the BF16 numbers of 64 codes. */
FOR_AVX512 INLINE void bytes_by_table(const int kind, const loaded_table *t, __m512i v, __m512i *low, __m512i *high)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80), size = kind == I8 ? _mm512_abs_epi8(v) : v;
    *low = byte_at(size, t->low);
    *high = byte_at(size, t->high);
    if (kind == I8) /* -128 is found at 0 */
        *high = _mm512_mask_mov_epi8(*high, _mm512_cmpeq_epi8_mask(v, sign), _mm512_set1_epi8(0x43));
    *high = _mm512_ternarylogic_epi32(*high, v, sign, 0xF8); /* a | (b & c) */
}

/* The BF16 numbers of 64 codes: of the first 8 of every 16, and of the others. */
FOR_AVX512 INLINE void words_by_table(const int kind, const loaded_table *t, __m512i v, __m512i *first, __m512i *second)
{
    __m512i low, high;
    bytes_by_table(kind, t, v, &low, &high);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* The `worder` that has tables. */
FOR_VBMI static int words_by_vbmi(const weight *w, Py_ssize_t row, uint16_t *to)
{
    const uint8_t *bytes = w->scale.items + row * w->groups;
    if (w->codes.kind == I8 || w->codes.kind == U8) /* whose streams take scales in FP32 */
        return 0;
    if (w->scale.kind == E8M0)
        return words_of_e8m0(bytes, w->groups, to);
    if (w->scale.kind != E4M3)
        return 0;
    const loaded_table table = load_table(0);
    for (Py_ssize_t i = 0; i < w->groups; i += 64) {
        const __mmask64 here = w->groups - i < 64 ? ((__mmask64)1 << (w->groups - i)) - 1 : ~(__mmask64)0;
        const __m512i in_order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0); /* so that unpacked words are */
        const __m512i b = _mm512_permutexvar_epi64(in_order, _mm512_maskz_loadu_epi8(here, bytes + i));
        __m512i first, second;
        words_by_table(0, &table, b, &first, &second);
        _mm512_storeu_si512(to + i, first);
        _mm512_storeu_si512(to + i + 32, second);
    }
    return 1;
}

/* The order of activations: of 64 codes, the even and the odd ones of the first 8 of every 16, then of the others. So lanes
   4j to 4j + 3 have codes 16j to 16j + 15. */
static const uint8_t order_by_tables[CHUNK] = {
#define QUADS_OF(i) i, i + 2, i + 4, i + 6, i + 16, i + 18, i + 20, i + 22, i + 32, i + 34, i + 36, i + 38, i + 48, i + 50, \
        i + 52, i + 54
    QUADS_OF(0), QUADS_OF(1), QUADS_OF(8), QUADS_OF(9), QUADS_OF(64), QUADS_OF(65), QUADS_OF(72), QUADS_OF(73)};

static const uint8_t *order_of_vbmi(int kind)
{
    return IS_HALF(kind) ? order_by_tables : order_of(kind);
}

/* As `bytes_streamed`, for FP8 and FP6 (`kind` is one with as many bits), and `pairs` of INT8. Scales are applied to sums of a
   span, or of half a chunk at most. */
FOR_VBMI INLINE void tables_streamed(
    const int pairs, const int M, const int kind, const int grain, const weight *w, const panel *p, const float *x,
    Py_ssize_t stride, float *sums)
{
    const loaded_table table = load_table(w->codes.kind);
    const __m512i top = _mm512_set1_epi32((int)0xFFFF0000);
    const int steps = pairs ? 1 : 2; /* vectors of activations by a vector of words */
    const Py_ssize_t chunks = p->chunks, ahead = p->ahead, spans = grain == ONE ? 1 : p->spans;
    const int fine = grain != ONE && spans == SPANS; /* the first 8 codes of 16 and the others have their own scales */
    const __m512i sixteen = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i lanes = fine ? _mm512_add_epi32(sixteen, sixteen)
                               : _mm512_srl_epi32(sixteen, _mm_cvtsi32_si128(3 - __builtin_ctz((unsigned)spans | 8)));
    __m512 a[4][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm512_setzero_ps();
    for (Py_ssize_t c = 0; c < chunks; c++, x += stride) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            uint8_t room[CHUNK];
            FROM_MEMORY(p);
            const uint8_t *codes = bytes_of(kind, p, r, c, room);
            const char *next = (const char *)(IS_SIX(kind) ? codes_of(p, r, c) : codes) + ahead;
            __m512 sum[4];
            _mm_prefetch(next, _MM_HINT_T1);
            _mm_prefetch(next + 64, _MM_HINT_T1);
            UNROLL for (int half = 0; half < 2; half++) {
                __m512i first, second;
                words_by_table(kind, &table, _mm512_loadu_si512(codes + 64 * half), &first, &second);
                const __m512i words[2] = {first, second};
                const Py_ssize_t at = c * spans + half * spans / 2;
                UNROLL for (int pair = 0; pair < 2; pair++) {
                    const __m512i d = words[pair];
                    const __m512 even = _mm512_castsi512_ps(pairs ? d : _mm512_slli_epi32(d, 16));
                    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(d, top));
                    UNROLL for (int m = 0; m < M; m++) {
                        const float *y = x + 16 * steps * (4 * m + 2 * half + pair);
                        const int begins = fine || (pair == 0 && (grain != ONE || half == 0));
                        sum[m] = added(pairs, begins, even, _mm512_loadu_ps(y), sum[m]);
                        if (!pairs)
                            sum[m] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(y + 16), sum[m]);
                    }
                    if (grain == ONE ? half == 0 || pair == 0 : !fine && pair == 0)
                        continue;
                    const __m512 scale = grain == ONE ? _mm512_set1_ps(p->scales[r][c])
                        : grain == WORDS ? spread_words(_mm512_slli_epi32(lanes, 16), (const uint16_t *)p->scales[r] + at + (fine ? pair : 0))
                                         : _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(p->scales[r] + at + (fine ? pair : 0)));
                    UNROLL for (int m = 0; m < M; m++) a[m][r] = _mm512_fmadd_ps(sum[m], scale, a[m][r]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = _mm512_reduce_add_ps(a[m][r]);
}

/* ------------------------------------------------------------------------------------------------ all streams */

typedef void (*streamed)(const weight *, const panel *, const float *, Py_ssize_t, float *);

#define STREAM(name, target, call)                                                                                          \
    target static void name(const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)                \
    {                                                                                                                       \
        call;                                                                                                               \
    }
#define NIBBLES(M, role, grain) \
    STREAM(nibbles_##M##role##grain, FOR_AVX512, nibbles_streamed(0, M, role, grain, w, p, x, stride, sums))
#define BYTES(M, kind, grain) \
    STREAM(bytes_##M##kind##grain, FOR_AVX512, bytes_streamed(M, kind, NONE, grain, w, p, x, stride, sums))
#define SHIFTED_I8(M, role, grain) \
    STREAM(shifted_i8_##M##role##grain, FOR_AVX512, bytes_streamed(M, I8, role, grain, w, p, x, stride, sums))
#define SHIFTED_U8(M, role, grain) \
    STREAM(shifted_u8_##M##role##grain, FOR_AVX512, bytes_streamed(M, U8, role, grain, w, p, x, stride, sums))
#define TABLES(M, kind, grain) \
    STREAM(tables_##M##kind##grain, FOR_VBMI, tables_streamed(0, M, kind, grain, w, p, x, stride, sums))
#define FOR_ALL(what, which, grain) what(1, which, grain) what(2, which, grain) what(4, which, grain)
#define BYTES_OF(kind) FOR_ALL(BYTES, kind, ONE) FOR_ALL(BYTES, kind, FEW) FOR_ALL(BYTES, kind, MANY)
#define TABLES_OF(kind) FOR_ALL(TABLES, kind, ONE) FOR_ALL(TABLES, kind, MANY) FOR_ALL(TABLES, kind, WORDS)
FOR_ALL(NIBBLES, NONE, ONE)
FOR_ALL(NIBBLES, NONE, MANY)
FOR_ALL(NIBBLES, NONE, WORDS)
FOR_ALL(NIBBLES, ZERO_POINT, ONE)
FOR_ALL(NIBBLES, ZERO_POINT, MANY)
FOR_ALL(NIBBLES, BIAS, ONE)
FOR_ALL(NIBBLES, BIAS, MANY)
BYTES_OF(E4M3)
BYTES_OF(E5M2)
BYTES_OF(E2M3)
BYTES_OF(E3M2)
BYTES_OF(I8)
BYTES_OF(U8)
#define SHIFTED_OF(what) \
    FOR_ALL(what, ZERO_POINT, FEW) FOR_ALL(what, ZERO_POINT, MANY) FOR_ALL(what, BIAS, FEW) FOR_ALL(what, BIAS, MANY)
SHIFTED_OF(SHIFTED_I8)
SHIFTED_OF(SHIFTED_U8)
TABLES_OF(E4M3)
TABLES_OF(E2M3)

/* By the grain, and by rows of activations. */
#define FUNCTIONS(what, which, grain) {what##1##which##grain, what##2##which##grain, what##4##which##grain}
#define OF_NIBBLES(role) {FUNCTIONS(nibbles_, role, ONE), FUNCTIONS(nibbles_, role, MANY), FUNCTIONS(nibbles_, role, MANY)}
#define OF_BYTES(kind) {FUNCTIONS(bytes_, kind, ONE), FUNCTIONS(bytes_, kind, FEW), FUNCTIONS(bytes_, kind, MANY)}
#define OF_TABLES(name, kind) \
    {FUNCTIONS(name, kind, ONE), FUNCTIONS(name, kind, MANY), FUNCTIONS(name, kind, MANY), FUNCTIONS(name, kind, WORDS)}
static const streamed nibble_streams[ROLES][MANY + 1][3] = {OF_NIBBLES(NONE), OF_NIBBLES(ZERO_POINT), OF_NIBBLES(BIAS)};
static const streamed nibbles_by_words[3] = FUNCTIONS(nibbles_, NONE, WORDS);
static const streamed byte_streams[6][MANY + 1][3] = {
    OF_BYTES(E4M3), OF_BYTES(E5M2), OF_BYTES(E2M3), OF_BYTES(E3M2), OF_BYTES(I8), OF_BYTES(U8)};
/* Of integers with zero-points and biases. */
#define OF_SHIFTED(name, role) {FUNCTIONS(name, role, FEW), FUNCTIONS(name, role, FEW), FUNCTIONS(name, role, MANY)}
static const streamed shifted_streams[2][2][MANY + 1][3] = {
    {OF_SHIFTED(shifted_i8_, ZERO_POINT), OF_SHIFTED(shifted_i8_, BIAS)},
    {OF_SHIFTED(shifted_u8_, ZERO_POINT), OF_SHIFTED(shifted_u8_, BIAS)}};
static const streamed table_streams[2][GRAINS][3] = {OF_TABLES(tables_, E4M3), OF_TABLES(tables_, E2M3)};

/* Multiplies up to `m` rows of activations, 4 at most. Returns how many. `tables`: whether it may take FP8 and FP6 by tables. */
INLINE int stream_by(
    const int tables, const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    const int size = m >= 4 ? 2 : m >= 2 ? 1 : 0, kind = w->codes.kind;
    const int grain = p->words ? WORDS : p->spans == 1 ? ONE : p->spans <= (IS_HALF(kind) ? 4 : 8) ? FEW : MANY;
    if (kind == TABLE4)
        (grain == WORDS ? nibbles_by_words : nibble_streams[w->role][grain])[size](w, p, x, stride, sums);
    else if (tables && IS_HALF(kind))
        table_streams[IS_SIX(kind)][grain][size](w, p, x, stride, sums);
    else if (w->role != NONE)
        shifted_streams[kind - I8][w->role - ZERO_POINT][grain][size](w, p, x, stride, sums);
    else
        byte_streams[kind - E4M3][grain][size](w, p, x, stride, sums);
    return 1 << size;
}

static int stream_by_avx512(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    return stream_by(0, w, p, x, stride, m, sums);
}

static int stream_by_vbmi(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    return stream_by(1, w, p, x, stride, m, sums);
}

/* ------------------------------------------------------------------------------------------------ tiles */

/* A chunk's scales (or offsets) of 16 rows: those of span s in vector s. Where `same`, in vector 0 only. */
FOR_AVX512 INLINE void scales_of_rows(const int same, const float *const *rows, Py_ssize_t c, __m512 *to)
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

/* The value of code i of each lane, which holds 8 codes of 4 bits, or 4 of 8. */
FOR_AVX512 INLINE __m512 value_of(const int kind, __m512i v, const int i, const __m512 table, const float *values)
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

/* 64 bytes of codes of 16 rows are transposed as words of 32 bits, which are decoded then. */
FOR_AVX512 INLINE void tile_by_avx512(
    const int kind, const int role, const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    enum { NR = 32 };
    const __m512 table = kind == TABLE4 ? _mm512_loadu_ps(w->codes.table) : _mm512_setzero_ps();
    const int same = uniform(w), each = kind == TABLE4 ? 8 : 4, parts = CHUNK / (16 * each);
    for (Py_ssize_t c = first; c < first + chunks; c++)
        for (int rows = 0; rows < NR; rows += 16) {
            uint8_t room[16][CHUNK];
            const uint8_t *codes[16];
            __m512 scales[16], offsets[16];
            for (int r = 0; r < 16; r++)
                codes[r] = bytes_of(kind, p, rows + r, c, room[r]);
            scales_of_rows(same, p->scales + rows, c, scales);
            if (role != NONE)
                scales_of_rows(same, p->offsets + rows, c, offsets);
            for (int part = 0; part < parts; part++) {
                __m512 v[16];
                UNROLL for (int r = 0; r < 16; r++) {
                    v[r] = _mm512_loadu_ps((const void *)(codes[r] + 64 * part));
                    _mm_prefetch((const char *)codes_of(p, rows + r, c) + 2 * p->bytes + 64 * part, _MM_HINT_T0);
                }
                transposed(v);
                for (int j = 0; j < 16; j++) {
                    const int k = (part * 16 + j) * each, span = same ? 0 : k / SPAN;
                    const __m512 scale = scales[span], offset = role == NONE ? scale : offsets[span];
                    float *to = tile + ((c - first) * CHUNK + k) * NR + rows;
                    UNROLL for (int i = 0; i < each; i++) {
                        const __m512 value = value_of(kind, _mm512_castps_si512(v[j]), i, table, w->codes.table);
                        _mm512_storeu_ps(to + i * NR, applied(role, value, scale, offset));
                    }
                }
            }
        }
}

#define BY_ROLE(kind)                                                                                                       \
    case kind:                                                                                                              \
        if (w->role == NONE)                                                                                                \
            tile_by_avx512(kind, NONE, w, p, first, chunks, tile);                                                          \
        else if (w->role == BIAS)                                                                                           \
            tile_by_avx512(kind, BIAS, w, p, first, chunks, tile);                                                          \
        else                                                                                                                \
            tile_by_avx512(kind, ZERO_POINT, w, p, first, chunks, tile);                                                    \
        break;

FOR_AVX512 static void avx512_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    if (w->span != SPAN) {
        tile_of_rows(w, p, first, chunks, 32, lift_of(w->codes.kind), tile);
        return;
    }
    switch (w->codes.kind) {
        BY_ROLE(TABLE4)
        BY_ROLE(TABLE8)
        BY_ROLE(E4M3)
        BY_ROLE(E5M2)
        BY_ROLE(E2M3)
        BY_ROLE(E3M2)
        BY_ROLE(I8)
        BY_ROLE(U8)
    }
}

MICRO(avx512, FOR_AVX512, f16, 16, 1)
MICRO(avx512, FOR_AVX512, f16, 16, 2)
MICRO(avx512, FOR_AVX512, f16, 16, 3)
MICRO(avx512, FOR_AVX512, f16, 16, 4)
MICRO(avx512, FOR_AVX512, f16, 16, 5)
MICRO(avx512, FOR_AVX512, f16, 16, 6)
MICRO(avx512, FOR_AVX512, f16, 16, 7)
MICRO(avx512, FOR_AVX512, f16, 16, 8)
MICRO(avx512, FOR_AVX512, f16, 16, 9)
MICRO(avx512, FOR_AVX512, f16, 16, 10)
MICRO(avx512, FOR_AVX512, f16, 16, 11)
MICRO(avx512, FOR_AVX512, f16, 16, 12)
MICRO(avx512, FOR_AVX512, f16, 16, 13)
MICRO(avx512, FOR_AVX512, f16, 16, 14)
static const micro avx512_micros[] = {NULL, avx512_micro1, avx512_micro2, avx512_micro3, avx512_micro4, avx512_micro5,
    avx512_micro6, avx512_micro7, avx512_micro8, avx512_micro9, avx512_micro10, avx512_micro11, avx512_micro12,
    avx512_micro13, avx512_micro14};

/* The most rows of activations for which codes are decoded in registers, once for every 4 rows. */
INLINE Py_ssize_t most_streams_of_avx512(int kind, int role, Py_ssize_t span)
{
    if (span != SPAN || (kind != TABLE4 && (kind < (role == NONE ? E4M3 : I8) || kind > U8)))
        return 0;
    return kind == TABLE4 ? 16 : 8;
}

/* `decoded`, for scales and offsets. */
FOR_AVX512 INLINE void decoded_by_avx512(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
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

VERSION(avx512, FOR_AVX512, 14, 32, stream_by_avx512, most_streams_of_avx512, longest_span, decoded_by_avx512, words_by_avx512,
    order_of, lift_of, pack_chunks, CHUNK, widen_by_bmi2)

#define avx512_vbmi_tile avx512_tile
#define avx512_vbmi_micros avx512_micros
/* Likewise, by tables: 6-bit codes would be expanded again for every 4 rows. */
INLINE Py_ssize_t most_streams_of_vbmi(int kind, int role, Py_ssize_t span)
{
    const Py_ssize_t most = most_streams_of_avx512(kind, role, span);
    return most && (kind == E4M3 || kind == E5M2) ? 16 : most;
}

/* The `widener` of 64 bytes at a time: each word of 8 has the bytes of its codes, from which `multishift` takes 8 bits a byte. */
FOR_VBMI static void widen_by_vbmi(const weight *w, const uint8_t *from, uint8_t *to)
{
    const int bits = kind_bits[w->codes.kind], width = w->width, each = 8 * width / bits;
    uint8_t place[64], shift[64], next[64];
    for (int i = 0; i < 64; i++) {
        place[i] = (uint8_t)(i / 8 * each + i % 8);
        shift[i] = (uint8_t)(i % 8 * width * 8 / bits);
        next[i] = (uint8_t)(shift[i] + width - 4); /* of the second code of a byte, for its high bits */
    }
    const __m512i places = _mm512_loadu_si512(place), shifts = _mm512_loadu_si512(shift), others = _mm512_loadu_si512(next);
    const __m512i low = _mm512_set1_epi8((char)((1 << width) - 1)), high = _mm512_slli_epi16(low, 4);
    const uint8_t *const stop = to + row_of_chunks(w);
    for (Py_ssize_t left = w->row_bytes; to < stop; to += 64, from += 8 * each, left -= 8 * each) {
        const __mmask64 here = left <= 0 ? 0 : left < 8 * each ? ((__mmask64)1 << left) - 1 : ((__mmask64)1 << 8 * each) - 1;
        const __m512i v = _mm512_permutexvar_epi8(places, _mm512_maskz_loadu_epi8(here, from));
        __m512i found = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, v), low);
        if (bits == 4)
            found = _mm512_ternarylogic_epi32(found, _mm512_multishift_epi64_epi8(others, v), high, 0xF8); /* a | (b & c) */
        _mm512_storeu_si512(to, found);
    }
}

VERSION(avx512_vbmi, FOR_AVX512, 14, 32, stream_by_vbmi, most_streams_of_vbmi, longest_span, decoded_by_avx512, words_by_vbmi,
    order_of_vbmi, lift_of, pack_chunks, CHUNK, widen_by_vbmi)

#endif
