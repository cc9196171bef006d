/* The modes for processors with AVX-512 VNNI and AVX-512 BF16. */

#ifndef BRECCIA_MODES512_H
#define BRECCIA_MODES512_H

#include "avx512.h"
#include "modes.h"

#define FOR_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")))
#define FOR_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))

/* Scales (or zero-points) of a chunk's groups, for 16 rows. */
FOR_AVX512 INLINE void group_scales(const weight *w, const grouping *g, const float *const *rows, Py_ssize_t c, float *to)
{
    __m512 scales[16];
    const int same = uniform(w);
    scales_of_rows(same, rows, c, scales);
    for (int i = 0; i < CHUNK / g->q; i++)
        _mm512_storeu_ps(to + i * WIDE, scales[same ? 0 : i * g->q / SPAN]);
}

/* Two values that are BF16 numbers, as a word. */
FOR_AVX512 INLINE __m512i pair_of(__m512 low, __m512 high)
{
    const __m512i top = _mm512_and_si512(_mm512_castps_si512(high), _mm512_set1_epi32((int)0xFFFF0000));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), top);
}

FOR_AVX512 INLINE void group_tile_of(const int kind, const int mode, const weight *w, const grouping *g, const panel *p,
    Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    const __m512 table = kind == TABLE4 ? _mm512_loadu_ps(w->codes.table) : _mm512_setzero_ps();
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)g->bytes));
    const __m512i nibbles = _mm512_set1_epi8(15);
    const int each = kind == TABLE4 ? 8 : 4, parts = CHUNK / (16 * each);
    const int subtracts = mode == BF16_MODE && w->role == ZERO_POINT, same = uniform(w);
    for (Py_ssize_t c = 0; c < chunks; c++)
        for (int rows = 0; rows < WIDE; rows += 16) {
            const Py_ssize_t group = c * (CHUNK / g->q) * WIDE + rows;
            __m512 zeros[16] = {_mm512_setzero_ps()};
            group_scales(w, g, p->scales + rows, first + c, tile->scales + group);
            if (tile->zeros)
                group_scales(w, g, p->offsets + rows, first + c, tile->zeros + group);
            if (subtracts)
                scales_of_rows(same, p->offsets + rows, first + c, zeros);
            for (int part = 0; part < parts; part++) {
                __m512 v[16];
                UNROLL for (int r = 0; r < 16; r++) {
                    uint8_t room[CHUNK];
                    v[r] = _mm512_castsi512_ps(_mm512_loadu_si512(bytes_of(kind, p, rows + r, first + c, room) + 64 * part));
                    _mm_prefetch((const char *)codes_of(p, rows + r, first + c) + DEEP * p->bytes, _MM_HINT_T0);
                }
                transposed(v);
                for (int j = 0; j < 16; j++) {
                    const __m512i u = _mm512_castps_si512(v[j]);
                    const int k = (part * 16 + j) * each;
                    uint32_t *to = tile->codes + (c * CHUNK + k) / g->per * WIDE + rows;
                    if (mode == INT8_MODE && kind == TABLE4) {
                        const __m512i odd = _mm512_srli_epi32(u, 4);
                        _mm512_storeu_si512(to, _mm512_shuffle_epi8(bytes, _mm512_and_si512(u, nibbles)));
                        _mm512_storeu_si512(to + WIDE, _mm512_shuffle_epi8(bytes, _mm512_and_si512(odd, nibbles)));
                    } else if (mode == INT8_MODE)
                        _mm512_storeu_si512(to, _mm512_xor_si512(u, _mm512_set1_epi8((char)128)));
                    else {
                        __m512 y[8];
                        UNROLL for (int i = 0; i < each; i++) {
                            y[i] = value_of(kind, u, i, table, w->codes.table);
                            if (subtracts)
                                y[i] = _mm512_sub_ps(y[i], zeros[same ? 0 : k / SPAN]);
                        }
                        UNROLL for (int i = 0; i < each; i += 2)
                            _mm512_storeu_si512(to + i / 2 * WIDE, pair_of(y[i], y[i + 1]));
                    }
                }
            }
        }
}

#define GROUPS_OF(kind, mode) \
    case kind: group_tile_of(kind, mode, w, g, p, first, chunks, tile); break;

FOR_AVX512 static void avx512_group_tile(
    const weight *w, const grouping *g, const panel *p, Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    if (g->mode == INT8_MODE)
        switch (w->codes.kind) {
            GROUPS_OF(TABLE4, INT8_MODE)
            GROUPS_OF(I8, INT8_MODE)
        }
    else
        switch (w->codes.kind) {
            GROUPS_OF(TABLE4, BF16_MODE)
            GROUPS_OF(E4M3, BF16_MODE)
            GROUPS_OF(E5M2, BF16_MODE)
            GROUPS_OF(E2M3, BF16_MODE)
            GROUPS_OF(E3M2, BF16_MODE)
            GROUPS_OF(I8, BF16_MODE)
            GROUPS_OF(U8, BF16_MODE)
        }
}

/* One instruction. GCC 12 copies its sums about in registers and memory where they come from intrinsics. */
#define MULTIPLY(instruction, sum, codes, words) __asm__(instruction " %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(words))

FOR_VNNI INLINE void integers(const int MB, const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups,
    float *sums)
{
    const uint32_t *from = tile->codes, *codes = x->codes;
    const Py_ssize_t words = g->q / 4;
    for (Py_ssize_t i = 0; i < groups; i++) {
        const float *by = x->scales + i * MB, *sum = x->sums + i * MB;
        const float *scales = tile->scales + i * WIDE, *zeros = tile->zeros ? tile->zeros + i * WIDE : NULL;
        __m512i a[TALLEST], b[TALLEST];
        UNROLL for (int m = 0; m < MB; m++) a[m] = b[m] = _mm512_set1_epi32(-g->shift * (int32_t)sum[m]);
        for (Py_ssize_t k = 0; k < words; k++, from += WIDE, codes += MB) {
            const __m512i c = _mm512_loadu_si512(from), d = _mm512_loadu_si512(from + 16);
            UNROLL for (int m = 0; m < MB; m++) {
                const __m512i y = _mm512_set1_epi32((int)codes[m]);
                MULTIPLY("vpdpbusd", a[m], c, y);
                MULTIPLY("vpdpbusd", b[m], d, y);
            }
        }
        UNROLL for (int m = 0; m < MB; m++) {
            float *to = sums + m * WIDE;
            __m512 e = _mm512_cvtepi32_ps(a[m]), f = _mm512_cvtepi32_ps(b[m]);
            if (zeros) {
                e = _mm512_fnmadd_ps(_mm512_loadu_ps(zeros), _mm512_set1_ps(sum[m]), e);
                f = _mm512_fnmadd_ps(_mm512_loadu_ps(zeros + 16), _mm512_set1_ps(sum[m]), f);
            }
            e = _mm512_mul_ps(e, _mm512_set1_ps(by[m]));
            f = _mm512_mul_ps(f, _mm512_set1_ps(by[m]));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(e, _mm512_loadu_ps(scales), _mm512_loadu_ps(to)));
            _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(f, _mm512_loadu_ps(scales + 16), _mm512_loadu_ps(to + 16)));
        }
    }
}

FOR_BF16 INLINE void brain_floats(const int MB, const grouping *g, const group_tile *tile, const group_x *x,
    Py_ssize_t groups, float *sums)
{
    const uint32_t *from = tile->codes, *codes = x->codes;
    const Py_ssize_t words = g->q / 2;
    for (Py_ssize_t i = 0; i < groups; i++) {
        const float *scales = tile->scales + i * WIDE;
        __m512 a[TALLEST], b[TALLEST];
        UNROLL for (int m = 0; m < MB; m++) a[m] = b[m] = _mm512_setzero_ps();
        for (Py_ssize_t k = 0; k < words; k++, from += WIDE, codes += MB) {
            const __m512i c = _mm512_loadu_si512(from), d = _mm512_loadu_si512(from + 16);
            UNROLL for (int m = 0; m < MB; m++) {
                const __m512i y = _mm512_set1_epi32((int)codes[m]);
                MULTIPLY("vdpbf16ps", a[m], c, y);
                MULTIPLY("vdpbf16ps", b[m], d, y);
            }
        }
        UNROLL for (int m = 0; m < MB; m++) {
            float *to = sums + m * WIDE;
            _mm512_storeu_ps(to, _mm512_fmadd_ps(a[m], _mm512_loadu_ps(scales), _mm512_loadu_ps(to)));
            _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(b[m], _mm512_loadu_ps(scales + 16), _mm512_loadu_ps(to + 16)));
        }
    }
}

#define MODES512(MB)                                                                                                        \
    FOR_VNNI static void integers##MB(                                                                                      \
        const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups, float *sums)                        \
    {                                                                                                                       \
        integers(MB, g, tile, x, groups, sums);                                                                             \
    }                                                                                                                       \
    FOR_BF16 static void brain_floats##MB(                                                                                  \
        const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups, float *sums)                        \
    {                                                                                                                       \
        brain_floats(MB, g, tile, x, groups, sums);                                                                         \
    }
UP_TO_TALLEST(MODES512)
static const group_micro integer_groups[] = LIST_OF(integers), brain_groups[] = LIST_OF(brain_floats);

FOR_AVX512 static int avx512_pack_groups(
    const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    return pack_groups(g, kind, x, k, part, to);
}

FOR_AVX512 static int avx512_rows_by_integers(const weight *w, const grouping *g, const workspace *to, const float *x,
    Py_ssize_t m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    return rows_by_groups(w, g, to, x, m, first, end, y, avx512_group_tile, integer_groups);
}

FOR_AVX512 static int avx512_rows_by_brain_floats(const weight *w, const grouping *g, const workspace *to, const float *x,
    Py_ssize_t m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    return rows_by_groups(w, g, to, x, m, first, end, y, avx512_group_tile, brain_groups);
}

#endif
