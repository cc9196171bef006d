/* How AVX-512 multiplies codes in blocks of 16 or 32, which are decoded in registers, vector by vector.

   All lanes of a vector have the same scale, so a table of 4-bit codes is scaled in place of the codes. Rows are whole blocks (see
   `short_block_of`), so nothing is copied or padded, and scales lie as they are stored. */

#ifndef BRECCIA_SHORT_BLOCKS_H
#define BRECCIA_SHORT_BLOCKS_H

#include "streams512.h"

/* The sums of the lanes of four vectors. */
INLINE __m128 sums_of_four(const __m512 a[4])
{
    const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Where vectors of 16 narrow codes have them, each in two bytes that a lane begins with. */
typedef struct {
    __m512i bytes, shifts; /* shifts bring codes to the lowest bits of lanes, or those of integers to the highest */
    __m128i rest;          /* bits of a lane but those of a code */
    __mmask16 stored;      /* bytes of 16 codes */
    int width;
} narrow_lanes;

INLINE narrow_lanes lanes_of_codes(const int kind, int width)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i bits = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(width));
    const __m512i first = _mm512_srli_epi32(bits, 3), down = _mm512_and_si512(bits, _mm512_set1_epi32(7));
    narrow_lanes found = {.width = width, .stored = (__mmask16)((1 << 2 * width) - 1), .rest = _mm_cvtsi32_si128(32 - width)};
    found.bytes = _mm512_or_si512(first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(1)), 8));
    found.shifts = kind == TABLE4 ? down : _mm512_sub_epi32(_mm512_set1_epi32(32 - width), down);
    return found;
}

/* A table whose values do not depend on the bits of an index above those of a code. */
INLINE __m512 repeated_table(const float *table, int width)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_ps(_mm512_and_si512(lanes, _mm512_set1_epi32((1 << width) - 1)), _mm512_loadu_ps(table));
}

/* How narrow codes come to their lanes: by AVX-512 BW, or by one instruction of AVX-512 VBMI. */
enum { WIDENED, SHUFFLED, PERMUTED };

/* 16 narrow codes in their own order: integers, or their values in a repeated table. */
INLINE __m512 narrow_sixteen(const int narrow, const int kind, const narrow_lanes *l, const uint8_t *codes, __m512 table)
{
    const __m128i from = _mm_maskz_loadu_epi8(l->stored, codes);
    __m512i v = _mm512_castsi128_si512(from);
    if (narrow == PERMUTED)
        __asm__("vpermb %1, %2, %0" : "=v"(v) : "v"(v), "v"(l->bytes)); /* see `byte_at` in tables512.h */
    else
        v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(from), l->bytes);
    if (kind == TABLE4)
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(v, l->shifts), table);
    v = _mm512_sllv_epi32(v, l->shifts);
    return _mm512_cvtepi32_ps(kind == U8 ? _mm512_srl_epi32(v, l->rest) : _mm512_sra_epi32(v, l->rest));
}

/* Vector v of a block of codes: integers, or their values in a table, in the order that `order_of` gives activations. */
INLINE __m512 sixteen(const int kind, const int block, const uint8_t *codes, const int v, __m512 table)
{
    if (kind != TABLE4) {
        const __m128i some = _mm_loadu_si128((const void *)(codes + 16 * v));
        return _mm512_cvtepi32_ps(kind == U8 ? _mm512_cvtepu8_epi32(some) : _mm512_cvtepi8_epi32(some));
    }
    if (block == 16) {
        const __m512i shifts = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
        const __m512i all = _mm512_broadcastq_epi64(_mm_loadl_epi64((const void *)codes));
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(all, shifts), table);
    }
    const __m512i shifts = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)codes));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(all, v ? _mm512_add_epi32(shifts, _mm512_set1_epi32(16)) : shifts), table);
}

/* Fetch what the same rows of the next panels have at block `at`: a line of each row, in turns. */
INLINE void fetch(int bytes, const panel *p, Py_ssize_t at)
{
    if (bytes <= 8 && at % 2)
        return;
    const Py_ssize_t turn = bytes <= 8 ? at / 2 : bytes <= 16 ? at : 2 * at, place = at * bytes + p->ahead;
    _mm_prefetch((const char *)p->codes[turn % ROWS] + place, _MM_HINT_T1);
    if (bytes > 16)
        _mm_prefetch((const char *)p->codes[turn % ROWS + 1] + place, _MM_HINT_T1);
}

/* narrow: how codes that are stored in fewer bits than those of their kind are decoded, unless they have been WIDENED. */
INLINE void short_blocks_streamed(const int narrow, const int M, const int kind, const int role, const int block,
    const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    const narrow_lanes lanes = lanes_of_codes(kind, w->width);
    const int vectors = block / 16, bytes = block * (narrow ? w->width : kind_bits[kind]) / 8;
    const int more = M == 1; /* two sums, so that fewer additions wait for the one before */
    const __m512 numbers = kind != TABLE4 ? _mm512_setzero_ps()
        : narrow                          ? repeated_table(w->codes.table, w->width)
                                          : _mm512_loadu_ps(w->codes.table);
    __m512 a[4][2][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][0][r] = a[m][1][r] = _mm512_setzero_ps();
    Py_ssize_t at = 0;
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride) {
        const Py_ssize_t end = (c + 1) * CHUNK < w->k ? (c + 1) * (CHUNK / block) : w->k / block;
        for (const float *y = x; at < end; at++, y += block) {
            fetch(bytes, p, at);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const __m512 scale = _mm512_set1_ps(p->scales[r][at]);
                const __m512 offset = role == NONE ? scale : _mm512_set1_ps(p->offsets[r][at]);
                const __m512 table = kind == TABLE4 ? applied(role, numbers, scale, offset) : numbers;
                UNROLL for (int v = 0; v < vectors; v++) {
                    const uint8_t *codes = p->codes[r] + at * bytes;
                    __m512 d = narrow ? narrow_sixteen(narrow, kind, &lanes, codes + 2 * v * lanes.width, table)
                                      : sixteen(kind, block, codes, v, table);
                    if (kind != TABLE4)
                        d = applied(role, d, scale, offset);
                    UNROLL for (int m = 0; m < M; m++)
                        a[m][more && v][r] = _mm512_fmadd_ps(d, _mm512_loadu_ps(y + m * CHUNK + 16 * v), a[m][more && v][r]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        if (more && vectors > 1)
            UNROLL for (int r = 0; r < ROWS; r++) a[m][0][r] = _mm512_add_ps(a[m][0][r], a[m][1][r]);
        _mm_storeu_ps(sums + m * ROWS, sums_of_four(a[m][0]));
    }
}

/* The streams of narrow codes, for one row of activations. */
#define NARROW(how, kind, role, block)                                                                                      \
    STREAM(narrow_##kind##role##block, short_blocks_streamed(how, 1, kind, role, block, w, p, x, stride, sums))
#define NARROW_ROLES(how, kind, block) NARROW(how, kind, NONE, block) NARROW(how, kind, ZERO_POINT, block) NARROW(how, kind, BIAS, block)
#define NARROW_BLOCKS(how, kind) NARROW_ROLES(how, kind, 16) NARROW_ROLES(how, kind, 32)
#define NAMES_OF_NARROW(kind, role) {narrow_##kind##role##16, narrow_##kind##role##32}
#define NAMES_OF_NARROW_ROLES(kind) {NAMES_OF_NARROW(kind, NONE), NAMES_OF_NARROW(kind, ZERO_POINT), NAMES_OF_NARROW(kind, BIAS)}
#define NARROW_STREAMS(how)                                                                                                 \
    NARROW_BLOCKS(how, TABLE4)                                                                                              \
    NARROW_BLOCKS(how, I8)                                                                                                  \
    NARROW_BLOCKS(how, U8)                                                                                                  \
    static const streamed narrow_streams[3][ROLES][2] = {                                                                   \
        NAMES_OF_NARROW_ROLES(TABLE4), NAMES_OF_NARROW_ROLES(I8), NAMES_OF_NARROW_ROLES(U8)};

/* The place of a kind in tables of streams. */
INLINE int stream_of(int kind)
{
    return kind == TABLE4 ? 0 : kind == I8 ? 1 : 2;
}

#endif
