/* How AVX-512 multiplies groups of activations that are rounded, in either mode. */

#ifndef BRECCIA_GROUPS512_H
#define BRECCIA_GROUPS512_H

#include "tables512.h"

/* Scales (or zero-points) of a chunk's groups, for 16 rows. */
OUTLINE void group_scales(const weight *w, const grouping *g, const float *const *rows, Py_ssize_t c, float *to)
{
    __m512 scales[16];
    const int same = uniform(w);
    scales_of_rows(same, rows, c, scales);
    for (int i = 0; i < CHUNK / g->q; i++)
        _mm512_storeu_ps(to + i * WIDE, scales[same ? 0 : i * g->q / SPAN]);
}

/* Two values that are BF16 numbers, as a word. */
INLINE __m512i pair_of(__m512 low, __m512 high)
{
    const __m512i top = _mm512_and_si512(_mm512_castps_si512(high), _mm512_set1_epi32((int)0xFFFF0000));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), top);
}

INLINE void group_tile_of(const int kind, const int mode, const weight *w, const grouping *g, const panel *p,
    Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    const __m512 table = kind == TABLE4 ? _mm512_loadu_ps(w->codes.table) : _mm512_setzero_ps();
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)g->bytes));
    const __m512i nibbles = _mm512_set1_epi8(15);
    const int each = kind == TABLE4 ? 8 : 4, words = CHUNK / each;
    const int subtracts = mode == BF16_MODE && w->role == ZERO_POINT, same = uniform(w);
    for (Py_ssize_t c = 0; c < chunks; c++)
        for (int rows = 0; rows < WIDE; rows += 16) {
            const Py_ssize_t group = c * (CHUNK / g->q) * WIDE + rows;
            __m512 zeros[16] = {_mm512_setzero_ps()};
            group_scales(w, g, p->scales + rows, first + c, tile->scales + group);
            if (tile->offsets)
                group_scales(w, g, p->offsets + rows, first + c, tile->offsets + group);
            if (subtracts)
                scales_of_rows(same, p->offsets + rows, first + c, zeros);
            __m512 v[32];
            read_codes(kind, p, rows, first + c, (first + c + DEEP) * p->bytes, v);
            for (int j = 0; j < words; j++) {
                const __m512i u = _mm512_castps_si512(v[j]);
                const int k = j * each;
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
                    UNROLL for (int i = 0; i < each / 2; i++)
                        _mm512_storeu_si512(to + i * WIDE, pair_of(y[i], y[i + each / 2]));
                }
            }
        }
}

/* ------------------------------------------------------------------------------------------------ from registers */

/* Rows of the weight that are multiplied together, and how many chunks ahead codes are fetched. */
enum { STREAMED = 16, CHUNKS_AHEAD = 8 };

/* The most rows of activations for which decoding codes again for each panel is faster than tiles. Tiles keep scales of all
   groups in memory, so they gain less where groups are short. */
INLINE Py_ssize_t most_streamed(const weight *w, const grouping *g)
{
    const int kind = w->codes.kind;
    if (g->mode == BF16_MODE && !are_pairs(w->codes.kind, w->role))
        return 0;
    if (kind == I8 || IS_SIX(kind))
        return kind == I8 ? 24 : 16;
    return kind != TABLE4 || g->q > 32 ? 64 : PY_SSIZE_T_MAX;
}

/* Scales (or offsets) of 16 successive groups from `at` on: those of STREAMED rows in each vector. */
OUTLINE void scales_of_groups(const float *const *rows, Py_ssize_t at, __m512 *to)
{
    __m512 v[16];
    UNROLL for (int r = 0; r < 16; r++) v[r] = _mm512_loadu_ps(rows[r] + at);
    transposed(v);
    UNROLL for (int r = 0; r < 16; r++) to[r] = v[r];
}

/* What decodes codes in registers: tables of INT8 and BF16 numbers by 4-bit codes, and of BF16 numbers by others. */
typedef struct {
    __m512i integers, words;
    loaded_table bytes;
} tables;

INLINE tables tables_of(const int mode, const int kind, const int shifts, const weight *w, const grouping *g)
{
    tables t = {0};
    if (mode == INT8_MODE)
        t.integers = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)g->bytes));
    else if (kind != TABLE4)
        t.bytes = load_table(w->codes.kind);
    else
        t.words = _mm512_castps_si512(shifts ? words_of_differences() : words_of_table(_mm512_loadu_ps(w->codes.table)));
    return t;
}

/* Words of 64 bytes of codes, of a word of 4 bytes each. Returns how many vectors. `zero`: zero-points for BF16, in both halves
   of each lane. */
INLINE int words_of_codes(
    const int mode, const int kind, const int shifts, const tables *t, __m512i v, __m512i zero, __m512i to[4])
{
    const __m512i nibbles = _mm512_set1_epi8(15), high_bytes = _mm512_set1_epi16((short)0xFF00);
    if (mode == INT8_MODE && kind == TABLE4) {
        to[0] = _mm512_shuffle_epi8(t->integers, _mm512_and_si512(v, nibbles));
        to[1] = _mm512_shuffle_epi8(t->integers, _mm512_and_si512(_mm512_srli_epi32(v, 4), nibbles));
        return 2;
    }
    if (mode == INT8_MODE) {
        to[0] = _mm512_xor_si512(v, _mm512_set1_epi8((char)128));
        return 1;
    }
    if (kind == TABLE4) {
        UNROLL for (int i = 0; i < 4; i++) {
            __m512i code = i ? _mm512_srli_epi16(v, 4 * i) : v;
            if (shifts)
                code = _mm512_sub_epi16(_mm512_and_si512(code, _mm512_set1_epi16(15)), zero);
            to[i] = _mm512_permutexvar_epi16(code, t->words);
        }
        return 4;
    }
    __m512i low, high;
    bytes_by_table(kind, &t->bytes, v, &low, &high);
    to[0] = _mm512_ternarylogic_epi32(high_bytes, _mm512_slli_epi16(high, 8), low, 0xCA); /* a ? b : c */
    to[1] = _mm512_ternarylogic_epi32(high_bytes, high, _mm512_srli_epi16(low, 8), 0xCA);
    return 2;
}

/* `read_codes` of the rows that are multiplied together. */
OUTLINE void stream_codes(int kind, const panel *p, Py_ssize_t c, Py_ssize_t next, __m512 *to)
{
    if (kind == TABLE4)
        transposed_codes(TABLE4, 1, p, 0, c, next, to);
    else if (IS_SIX(kind))
        transposed_codes(E2M3, 1, p, 0, c, next, to);
    else
        transposed_codes(I8, 1, p, 0, c, next, to);
}

/* Products of STREAMED rows of the weight and a panel of MB rows of activations, all along K, in the order of `integers` or
   `brain_floats`. role: of offsets. */
INLINE void groups_streamed(const int MB, const int mode, const int kind, const int role, const weight *w,
    const grouping *g, const panel *p, const float *x, float *sums)
{
    enum { EACH = 16 };
    const int shifts = role == ZERO_POINT;
    const tables t = tables_of(mode, kind, shifts, w, g);
    const Py_ssize_t length = p->chunks * CHUNK, block = g->q / SPAN; /* chunks with 16 groups */
    const int parts = kind == TABLE4 ? 1 : 2, vectors = EACH * parts, step = (int)(g->q * vectors / CHUNK);
    const group_x from = activations(g, x, MB, length, 0);
    const uint32_t *codes = from.codes;
    const float *by = from.scales, *all = from.sums;
    const int32_t *starts = from.starts;
    __m512 found[TALLEST];
    UNROLL for (int m = 0; m < MB; m++) found[m] = _mm512_setzero_ps();
    for (Py_ssize_t start = 0; start < p->chunks; start += block) {
        const Py_ssize_t stop = start + block < p->chunks ? start + block : p->chunks;
        __m512 scales[16], offsets[16];
        const __m512 *scale = scales, *offset = offsets;
        scales_of_groups(p->scales, start * CHUNK / g->q, scales);
        if (role != NONE)
            scales_of_groups(p->offsets, start * CHUNK / g->q, offsets);
        for (Py_ssize_t c = start; c < stop; c++) {
            __m512 v[2 * EACH];
            const Py_ssize_t next = c + CHUNKS_AHEAD < p->chunks
                ? (c + CHUNKS_AHEAD) * p->bytes
                : STREAMED * w->row_bytes + (c + CHUNKS_AHEAD - p->chunks) * p->bytes;
            if (MB > 2 || IS_SIX(w->codes.kind)) /* a call takes some time */
                stream_codes(w->codes.kind, p, c, next, v);
            else
                transposed_codes(kind, 1, p, 0, c, next, v);
            for (int i = 0; i < vectors; scale++, offset++, by += MB, all += MB, starts += MB) {
                __m512i a[TALLEST], shift = _mm512_setzero_si512();
                UNROLL for (int m = 0; m < MB; m++)
                    a[m] = mode == INT8_MODE ? _mm512_set1_epi32(starts[m]) : _mm512_setzero_si512();
                if (mode == BF16_MODE && shifts)
                    shift = in_both_halves(*offset);
                for (const int end = i + step; i < end; i++) {
                    __m512i d[4];
                    const int count = words_of_codes(mode, kind, shifts, &t, _mm512_castps_si512(v[i]), shift, d);
                    UNROLL for (int j = 0; j < count; j++)
                        UNROLL for (int m = 0; m < MB; m++) {
                            const __m512i y = _mm512_set1_epi32((int)codes[j * MB + m]);
                            if (mode == INT8_MODE)
                                MULTIPLY("vpdpbusd", a[m], d[j], y);
                            else
                                MULTIPLY("vdpbf16ps", a[m], d[j], y);
                        }
                    codes += count * MB;
                }
                UNROLL for (int m = 0; m < MB; m++) {
                    __m512 e = mode == INT8_MODE ? _mm512_cvtepi32_ps(a[m]) : _mm512_castsi512_ps(a[m]);
                    if (mode == INT8_MODE && shifts)
                        e = _mm512_fnmadd_ps(*offset, _mm512_set1_ps(all[m]), e);
                    if (mode == INT8_MODE)
                        e = _mm512_mul_ps(e, _mm512_set1_ps(by[m]));
                    if (mode == INT8_MODE && role == BIAS) {
                        const __m512 biases = _mm512_mul_ps(_mm512_set1_ps(all[m] * by[m]), *offset);
                        found[m] = _mm512_add_ps(found[m], _mm512_fmadd_ps(e, *scale, biases));
                    } else
                        found[m] = _mm512_fmadd_ps(e, *scale, found[m]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < MB; m++) _mm512_storeu_ps(sums + m * STREAMED, found[m]);
}

#endif
