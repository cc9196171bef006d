/* How AVX-512 VBMI decodes FP8, FP6 and INT8 codes: as BF16 numbers, by tables in registers. */

#ifndef BRECCIA_TABLES512_H
#define BRECCIA_TABLES512_H

#include "streams512.h"

/* BF16 numbers by the low 7 bits of a byte: their high bytes, less the sign, and their low bytes. */
typedef struct {
    uint8_t high[128], low[128];
} byte_table;

/* Those of FP8 and FP6 codes (see `expanded`), divided by the lift, of magnitudes of INT8 codes; and at 0, of E4M3 scales. */
extern byte_table byte_tables[KINDS];

/* A table in registers. */
typedef struct {
    __m512i high[2], low[2];
} loaded_table;

INLINE loaded_table load_table(int kind)
{
    const byte_table *t = &byte_tables[kind];
    const loaded_table found = {{_mm512_loadu_si512(t->high), _mm512_loadu_si512(t->high + 64)},
        {_mm512_loadu_si512(t->low), _mm512_loadu_si512(t->low + 64)}};
    return found;
}

/* Of 128 bytes in two vectors, those at the low 7 bits of each index. Not an intrinsic, so that functions that also run without
   AVX-512 VBMI, for other codes, may contain it. */
INLINE __m512i byte_at(__m512i index, const __m512i table[2])
{
    __asm__("vpermi2b %2, %1, %0" : "+v"(index) : "v"(table[0]), "v"(table[1]));
    return index;
}

/* The low and the high bytes of the BF16 numbers of 64 codes. */
INLINE void bytes_by_table(const int kind, const loaded_table *t, __m512i v, __m512i *low, __m512i *high)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80), size = kind == I8 ? _mm512_abs_epi8(v) : v;
    *low = byte_at(size, t->low);
    *high = byte_at(size, t->high);
    if (kind == I8) /* -128 is found at 0 */
        *high = _mm512_mask_mov_epi8(*high, _mm512_cmpeq_epi8_mask(v, sign), _mm512_set1_epi8(0x43));
    *high = _mm512_ternarylogic_epi32(*high, v, sign, 0xF8); /* a | (b & c) */
}

/* The BF16 numbers of 64 codes: of the first 8 of every 16, and of the others. */
INLINE void words_by_table(const int kind, const loaded_table *t, __m512i v, __m512i *first, __m512i *second)
{
    __m512i low, high;
    bytes_by_table(kind, t, v, &low, &high);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* The `worder` that has tables. */
INLINE int words_by_vbmi(const weight *w, Py_ssize_t row, uint16_t *to)
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

/* As `bytes_streamed`, for FP8 and FP6 (`kind` is one with as many bits), and `pairs` of INT8. Scales are applied to sums of a
   span, or of half a chunk at most. */
INLINE void tables_streamed(
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

#endif
