/* Products of activations rounded to INT8, by AVX-512 VNNI. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vnni," AVX512)

#include "groups512.h"

static void decode_groups(
    const weight *w, const grouping *g, const panel *p, Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    if (w->codes.kind == TABLE4)
        group_tile_of(TABLE4, INT8_MODE, w, g, p, first, chunks, tile);
    else
        group_tile_of(I8, INT8_MODE, w, g, p, first, chunks, tile);
}

INLINE void integers(const int MB, const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups,
    float *sums)
{
    const uint32_t *from = tile->codes, *codes = x->codes;
    const Py_ssize_t words = g->q / 4;
    for (Py_ssize_t i = 0; i < groups; i++) {
        const float *by = x->scales + i * MB, *sum = x->sums + i * MB;
        const int32_t *starts = x->starts + i * MB;
        const float *scales = tile->scales + i * WIDE, *offsets = tile->offsets ? tile->offsets + i * WIDE : NULL;
        __m512i a[TALLEST], b[TALLEST];
        UNROLL for (int m = 0; m < MB; m++) a[m] = b[m] = _mm512_set1_epi32(starts[m]);
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
            if (offsets && !tile->biased) {
                e = _mm512_fnmadd_ps(_mm512_loadu_ps(offsets), _mm512_set1_ps(sum[m]), e);
                f = _mm512_fnmadd_ps(_mm512_loadu_ps(offsets + 16), _mm512_set1_ps(sum[m]), f);
            }
            e = _mm512_mul_ps(e, _mm512_set1_ps(by[m]));
            f = _mm512_mul_ps(f, _mm512_set1_ps(by[m]));
            const __m512 by_e = _mm512_loadu_ps(scales), by_f = _mm512_loadu_ps(scales + 16);
            const __m512 sums_e = _mm512_loadu_ps(to), sums_f = _mm512_loadu_ps(to + 16);
            if (offsets && tile->biased) {
                const __m512 all = _mm512_set1_ps(sum[m] * by[m]);
                e = _mm512_fmadd_ps(e, by_e, _mm512_mul_ps(all, _mm512_loadu_ps(offsets)));
                f = _mm512_fmadd_ps(f, by_f, _mm512_mul_ps(all, _mm512_loadu_ps(offsets + 16)));
                _mm512_storeu_ps(to, _mm512_add_ps(sums_e, e));
                _mm512_storeu_ps(to + 16, _mm512_add_ps(sums_f, f));
            } else {
                _mm512_storeu_ps(to, _mm512_fmadd_ps(e, by_e, sums_e));
                _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(f, by_f, sums_f));
            }
        }
    }
}

#define MULTIPLY_GROUPS(MB)                                                                                                 \
    static void groups##MB(const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups, float *sums)     \
    {                                                                                                                       \
        integers(MB, g, tile, x, groups, sums);                                                                                 \
    }
UP_TO_TALLEST(MULTIPLY_GROUPS)
static const group_micro all_groups[] = LIST_OF(groups);

static int rows_by_tiles(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_by_groups(w, g, to, x, m, TALLEST, first, end, y, decode_groups, all_groups);
}

/* `kind`: one with codes of as many bits, signed or not. Where groups or rows are few, even asking for zero-points takes time. */
#define GROUP_STREAM(name, MB, kind)                                                                                        \
    static void name##MB(const weight *w, const grouping *g, const panel *p, const float *x, float *sums)                   \
    {                                                                                                                       \
        if (w->role == BIAS)                                                                                                \
            groups_streamed(MB, INT8_MODE, kind, BIAS, w, g, p, x, sums);                                                   \
        else if ((MB <= 2 || kind == TABLE4) && w->role == NONE)                                                            \
            groups_streamed(MB, INT8_MODE, kind, NONE, w, g, p, x, sums);                                                   \
        else                                                                                                                \
            groups_streamed(MB, INT8_MODE, kind, w->role, w, g, p, x, sums);                                                \
    }
#define GROUP_STREAMS(MB) GROUP_STREAM(nibbles, MB, TABLE4) GROUP_STREAM(bytes, MB, I8)
UP_TO_TALLEST(GROUP_STREAMS)
static const group_stream nibble_streams[] = LIST_OF(nibbles), byte_streams[] = LIST_OF(bytes);

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    (void)words;
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx512, NULL, p);
}

/* `rows_by_tiles` without tiles: codes are transposed and decoded in registers for each panel of activations. */
static int rows_by_streams(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    Py_ssize_t first, Py_ssize_t end, float *y)
{
    const group_stream *streams = w->codes.kind == TABLE4 ? nibble_streams : byte_streams;
    return rows_from_registers(w, g, to, x, m, TALLEST, STREAMED, first, end, y, scales, streams);
}

/* From registers or by tiles. */
static int rows(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return (m <= most_streamed(w, g) ? rows_by_streams : rows_by_tiles)(w, g, to, x, m, first, end, y);
}

static void pack_groups(const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    pack_groups_of(INT8_MODE, g, kind, x, k, part, to);
}

const mode_version int8_vnni = {pack_groups, rows, no_lift, always, TALLEST, TILE, one_claim};

COMPILED
#endif
