/* The version for processors with AVX2 and FMA, and what it shares with that for AVX-512. */

#ifndef BRECCIA_AVX2_H
#define BRECCIA_AVX2_H

#include <immintrin.h>

#include "tiles.h"
#include "transpose.h"

typedef float f8 __attribute__((vector_size(32)));

#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))

/* Keeps instructions on either side of it apart. */
#define AFTER(v) __asm__ volatile("" : "+v"(v))

/* The order of activations for codes in registers.

   Vector i of a chunk of 4-bit codes has code SPAN j + i in lane j, which one shift brings to the low bits of each lane.
   Of FP8 and FP6, vectors 2i and 2i + 1 have the even and the odd of 32 codes, which are halves of FP16 numbers. */
static const uint8_t order_of_nibbles[CHUNK] = {
#define LANES_OF(i) i, 8 + i, 16 + i, 24 + i, 32 + i, 40 + i, 48 + i, 56 + i, 64 + i, \
        72 + i, 80 + i, 88 + i, 96 + i, 104 + i, 112 + i, 120 + i
    LANES_OF(0), LANES_OF(1), LANES_OF(2), LANES_OF(3), LANES_OF(4), LANES_OF(5), LANES_OF(6), LANES_OF(7)};
static const uint8_t order_of_bytes[CHUNK] = {
#define EVEN_OF(i) i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, i + 16, \
        i + 18, i + 20, i + 22, i + 24, i + 26, i + 28, i + 30
    EVEN_OF(0), EVEN_OF(1), EVEN_OF(32), EVEN_OF(33), EVEN_OF(64), EVEN_OF(65), EVEN_OF(96), EVEN_OF(97)};

/* Values of FP8 and FP6 codes: the FP16 with the same bits, which is a power of two, the lift, smaller. */
#define E4M3_LIFT 0x1p8f

#define E2M3_LIFT 0x1p14f
#define E3M2_LIFT 0x1p12f
#define IS_HALF(kind) ((kind) >= E4M3 && (kind) <= E3M2)

static const uint8_t *order_of(int kind)
{
    return kind == TABLE4 ? order_of_nibbles : IS_HALF(kind) ? order_of_bytes : NULL;
}

static float lift_of(int kind)
{
    return kind == E4M3 ? E4M3_LIFT : kind == E2M3 ? E2M3_LIFT : kind == E3M2 ? E3M2_LIFT : 1;
}

/* FP16 with the bits of FP8 and FP6 numbers in the high bytes of lanes; the low bytes of all but E5M2 do not matter. */
FOR_AVX2 INLINE __m256i halves_by_avx2(const int kind, __m256i high)
{
    if (kind == E2M3)
        return _mm256_and_si256(_mm256_srai_epi16(high, 3), _mm256_set1_epi16((short)0x8F80));
    if (kind == E3M2)
        return _mm256_and_si256(_mm256_srai_epi16(high, 2), _mm256_set1_epi16((short)0x9F00));
    if (kind == E4M3) {
        const __m256i keep = _mm256_set1_epi16((short)0xBF80), nan = _mm256_set1_epi16(0x4000);
        high = _mm256_and_si256(_mm256_srai_epi16(high, 1), keep);
        /* 0x3F80 is E4M3's NaN: with bit 14 it is FP16's. */
        return _mm256_or_si256(high, _mm256_and_si256(_mm256_add_epi16(high, _mm256_set1_epi16(0x80)), nan));
    }
    return high;
}

FOR_AVX2 INLINE __m256 low_half(__m256i v)
{
    return _mm256_cvtph_ps(_mm256_castsi256_si128(v));
}

FOR_AVX2 INLINE __m256 high_half(__m256i v)
{
    return _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
}

/* Code i of each lane. A table of 16 numbers is two registers, chosen between by the code's highest bit. */
FOR_AVX2 INLINE __m256 nibble_by_avx2(__m256i v, const int i, __m256 low, __m256 high)
{
    const __m256i c = i ? _mm256_srli_epi32(v, 4 * i) : v;
    const __m256 top = _mm256_castsi256_ps(i == 7 ? v : _mm256_slli_epi32(v, 28 - 4 * i));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, c), _mm256_permutevar8x32_ps(high, c), top);
}

FOR_AVX2 INLINE const uint8_t *bytes_by_avx2(const int kind, const panel *p, int r, Py_ssize_t c, uint8_t *room)
{
    const uint8_t *codes = codes_of(p, r, c);
    if (kind != E2M3 && kind != E3M2)
        return codes;
    expanded(codes, room);
    return room;
}

/* ------------------------------------------------------------------------------------------------ from registers */

FOR_AVX2 INLINE float sum_of(__m256 v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

/* Products of ROWS rows and M rows of activations, all along K, into sums[m * ROWS + r]. Scales are applied to sums of 8. */
FOR_AVX2 INLINE void nibbles_by_avx2(
    const int M, const int role, const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    const __m256 low = _mm256_loadu_ps(w->codes.table), high = _mm256_loadu_ps(w->codes.table + 8);
    __m256 a[2][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm256_setzero_ps();
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride)
        UNROLL for (int r = 0; r < ROWS; r++) {
            const uint8_t *codes = codes_of(p, r, c);
            _mm_prefetch((const char *)codes + p->ahead, _MM_HINT_T0);
            for (int half = 0; half < 2; half++) {
                const __m256i v = _mm256_loadu_si256((const void *)(codes + 32 * half));
                const __m256 scale = _mm256_loadu_ps(p->scales[r] + c * SPANS + 8 * half);
                __m256 span[2];
                UNROLL for (int i = 0; i < 8; i++) {
                    __m256 d = nibble_by_avx2(v, i, low, high);
                    if (role == ZERO_POINT)
                        d = _mm256_sub_ps(d, _mm256_loadu_ps(p->offsets[r] + c * SPANS + 8 * half));
                    UNROLL for (int m = 0; m < M; m++) {
                        const __m256 y = _mm256_loadu_ps(x + m * CHUNK + 16 * i + 8 * half);
                        span[m] = i ? _mm256_fmadd_ps(d, y, span[m]) : _mm256_mul_ps(d, y);
                    }
                }
                UNROLL for (int m = 0; m < M; m++) a[m][r] = _mm256_fmadd_ps(span[m], scale, a[m][r]);
            }
        }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = sum_of(a[m][r]);
}

FOR_AVX2 INLINE void bytes_streamed_by_avx2(
    const int M, const int kind, const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    (void)w;
    __m256 a[2][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm256_setzero_ps();
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride)
        UNROLL for (int r = 0; r < ROWS; r++) {
            uint8_t room[CHUNK];
            const uint8_t *codes = bytes_by_avx2(kind, p, r, c, room);
            const float *scales = p->scales[r] + c * SPANS;
            const char *next = (const char *)codes_of(p, r, c) + p->ahead;
            _mm_prefetch(next, _MM_HINT_T0);
            _mm_prefetch(next + 64, _MM_HINT_T0);
            for (int i = 0; i < CHUNK; i += 32, codes += 32, scales += 4) {
                __m256 d[4], scale[2];
                if (IS_HALF(kind)) {
                    const __m256i v = _mm256_loadu_si256((const void *)codes);
                    const __m256i even = halves_by_avx2(kind, _mm256_slli_epi16(v, 8));
                    const __m256i odd = halves_by_avx2(kind, _mm256_and_si256(v, _mm256_set1_epi16((short)0xFF00)));
                    d[0] = low_half(even), d[1] = high_half(even), d[2] = low_half(odd), d[3] = high_half(odd);
                } else
                    UNROLL for (int j = 0; j < 4; j++)
                        d[j] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(codes + 8 * j))));
                if (IS_HALF(kind)) { /* lanes of vectors 0 and 2 have the codes 0 to 15, of 1 and 3 the codes 16 to 31 */
                    const __m256 four = _mm256_castps128_ps256(_mm_loadu_ps(scales));
                    scale[0] = _mm256_permutevar8x32_ps(four, _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
                    scale[1] = _mm256_permutevar8x32_ps(four, _mm256_set_epi32(3, 3, 3, 3, 2, 2, 2, 2));
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int j = 0; j < 2; j++) {
                            const float *y = x + m * CHUNK + i + 8 * j;
                            const __m256 one = _mm256_mul_ps(d[j], _mm256_loadu_ps(y));
                            a[m][r] = _mm256_fmadd_ps(_mm256_fmadd_ps(d[j + 2], _mm256_loadu_ps(y + 16), one), scale[j], a[m][r]);
                        }
                } else
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int j = 0; j < 4; j++) {
                            const __m256 one = _mm256_mul_ps(d[j], _mm256_loadu_ps(x + m * CHUNK + i + 8 * j));
                            a[m][r] = _mm256_fmadd_ps(one, _mm256_set1_ps(scales[j]), a[m][r]);
                        }
            }
        }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = sum_of(a[m][r]);
}

#define STREAMS_BY_AVX2(M)                                                                                                  \
    FOR_AVX2 static void streamed##M##_by_avx2(                                                                             \
        const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)                                    \
    {                                                                                                                       \
        switch (w->codes.kind) {                                                                                            \
        case TABLE4:                                                                                                        \
            if (w->role == NONE)                                                                                            \
                nibbles_by_avx2(M, NONE, w, p, x, stride, sums);                                                            \
            else                                                                                                            \
                nibbles_by_avx2(M, ZERO_POINT, w, p, x, stride, sums);                                                      \
            break;                                                                                                          \
        case E4M3: bytes_streamed_by_avx2(M, E4M3, w, p, x, stride, sums); break;                                           \
        case E5M2: bytes_streamed_by_avx2(M, E5M2, w, p, x, stride, sums); break;                                           \
        case E2M3: bytes_streamed_by_avx2(M, E2M3, w, p, x, stride, sums); break;                                           \
        case E3M2: bytes_streamed_by_avx2(M, E3M2, w, p, x, stride, sums); break;                                           \
        default: bytes_streamed_by_avx2(M, I8, w, p, x, stride, sums);                                                      \
        }                                                                                                                   \
    }
STREAMS_BY_AVX2(1)
STREAMS_BY_AVX2(2)

/* Multiplies up to `m` rows of activations, 2 at most. Returns how many. */
static int stream_by_avx2(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    (m >= 2 ? streamed2_by_avx2 : streamed1_by_avx2)(w, p, x, stride, sums);
    return m >= 2 ? 2 : 1;
}

static Py_ssize_t most_streams_of_avx2(int kind, int role, Py_ssize_t span)
{
    const int nibbles = kind == TABLE4 && role != BIAS, bytes = kind >= E4M3 && kind <= I8 && role == NONE;
    return span == SPAN && (nibbles || bytes) ? 4 : 0;
}

/* ------------------------------------------------------------------------------------------------ tiles */

/* A chunk's scales (or offsets) of 8 rows: those of span s in vector s. */
FOR_AVX2 INLINE void scales_by_avx2(const float *const *rows, Py_ssize_t c, __m256 to[SPANS])
{
    for (int half = 0; half < SPANS; half += 8) {
        __m256 v[8];
        UNROLL for (int r = 0; r < 8; r++) v[r] = _mm256_loadu_ps(rows[r] + c * SPANS + half);
        transposed8(v);
        UNROLL for (int r = 0; r < 8; r++) to[half + r] = v[r];
    }
}

/* The values of a lane's codes: 8 of 4 bits, or 4 of 8. */
FOR_AVX2 INLINE void values_by_avx2(const int kind, __m256i v, __m256 low, __m256 high, const float *table, __m256 *to)
{
    if (kind == TABLE4)
        UNROLL for (int i = 0; i < 8; i++) to[i] = nibble_by_avx2(v, i, low, high);
    else if (IS_HALF(kind))
        UNROLL for (int i = 0; i < 2; i++) {
            const __m256i bytes = i ? _mm256_and_si256(v, _mm256_set1_epi16((short)0xFF00)) : _mm256_slli_epi16(v, 8);
            const __m256i both = halves_by_avx2(kind, bytes);
            const __m256i first = _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF)), second = _mm256_srli_epi32(both, 16);
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
            to[i] = low_half(words);
            to[i + 2] = high_half(words);
        }
    else
        UNROLL for (int i = 0; i < 4; i++) {
            const __m256i code = _mm256_and_si256(_mm256_srli_epi32(v, 8 * i), _mm256_set1_epi32(255));
            if (kind == I8)
                to[i] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * i), 24));
            else
                to[i] = kind == U8 ? _mm256_cvtepi32_ps(code) : _mm256_i32gather_ps(table, code, 4);
        }
}

/* 32 bytes of codes of 8 rows are transposed as words of 32 bits, which are decoded then. */
FOR_AVX2 INLINE void tile_by_avx2(
    const int kind, const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    enum { NR = 16 };
    const float *table = w->codes.table;
    const __m256 low = kind == TABLE4 ? _mm256_loadu_ps(table) : _mm256_setzero_ps();
    const __m256 high = kind == TABLE4 ? _mm256_loadu_ps(table + 8) : low;
    const int role = w->role, each = kind == TABLE4 ? 8 : 4, parts = CHUNK / (8 * each);
    for (Py_ssize_t c = first; c < first + chunks; c++)
        for (int rows = 0; rows < NR; rows += 8) {
            __m256 scales[SPANS], offsets[SPANS];
            scales_by_avx2(p->scales + rows, c, scales);
            if (role != NONE)
                scales_by_avx2(p->offsets + rows, c, offsets);
            for (int part = 0; part < parts; part++) {
                __m256 v[8];
                UNROLL for (int r = 0; r < 8; r++) {
                    uint8_t room[CHUNK];
                    const uint8_t *codes = bytes_by_avx2(kind, p, rows + r, c, room);
                    v[r] = _mm256_castsi256_ps(_mm256_loadu_si256((const void *)(codes + 32 * part)));
                }
                transposed8(v);
                for (int j = 0; j < 8; j++) {
                    const int k = (part * 8 + j) * each;
                    const __m256 scale = scales[k / SPAN];
                    __m256 values[8];
                    values_by_avx2(kind, _mm256_castps_si256(v[j]), low, high, table, values);
                    float *to = tile + ((c - first) * CHUNK + k) * NR + rows;
                    UNROLL for (int i = 0; i < each; i++) {
                        __m256 y = role == ZERO_POINT ? _mm256_sub_ps(values[i], offsets[k / SPAN]) : values[i];
                        y = _mm256_mul_ps(y, scale);
                        AFTER(y); /* see `applied` in avx512.h */
                        _mm256_storeu_ps(to + i * NR, role == BIAS ? _mm256_add_ps(y, offsets[k / SPAN]) : y);
                    }
                }
            }
        }
}

FOR_AVX2 static void avx2_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    if (w->span != SPAN) {
        tile_of_rows(w, p, first, chunks, 16, lift_of(w->codes.kind), tile);
        return;
    }
    switch (w->codes.kind) {
    case TABLE4: tile_by_avx2(TABLE4, w, p, first, chunks, tile); break;
    case TABLE8: tile_by_avx2(TABLE8, w, p, first, chunks, tile); break;
    case E4M3: tile_by_avx2(E4M3, w, p, first, chunks, tile); break;
    case E5M2: tile_by_avx2(E5M2, w, p, first, chunks, tile); break;
    case E2M3: tile_by_avx2(E2M3, w, p, first, chunks, tile); break;
    case E3M2: tile_by_avx2(E3M2, w, p, first, chunks, tile); break;
    case I8: tile_by_avx2(I8, w, p, first, chunks, tile); break;
    default: tile_by_avx2(U8, w, p, first, chunks, tile);
    }
}

MICRO(avx2, FOR_AVX2, f8, 8, 1)
MICRO(avx2, FOR_AVX2, f8, 8, 2)
MICRO(avx2, FOR_AVX2, f8, 8, 3)
MICRO(avx2, FOR_AVX2, f8, 8, 4)
MICRO(avx2, FOR_AVX2, f8, 8, 5)
MICRO(avx2, FOR_AVX2, f8, 8, 6)
static const micro avx2_micros[] = {
    NULL, avx2_micro1, avx2_micro2, avx2_micro3, avx2_micro4, avx2_micro5, avx2_micro6};

#define avx2_span(w) SPAN

#define FOR_BMI2 __attribute__((target("bmi2")))
#define SPREAD_BY_BMI2(u, width, bits) _pdep_u64(u, low_bits(width, bits))
WIDENER(widen_by_bmi2, FOR_BMI2, SPREAD_BY_BMI2)

VERSION(avx2, FOR_AVX2, 6, 16, stream_by_avx2, most_streams_of_avx2, avx2_span, decoded, NULL, order_of, lift_of, pack_chunks,
    CHUNK, widen_by_bmi2)

#endif
