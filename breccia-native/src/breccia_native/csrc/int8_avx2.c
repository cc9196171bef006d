/* Products of activations rounded to INT8, by AVX2. */

#define VECTOR_BYTES 32
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(AVX2)

#include "avx2.h"

/* The most rows of a panel of activations, columns of a tile that are multiplied together, and words of codes whose products are
   added in 16 bits: pairs of products of activations and of codes up to SMALL. */
enum { PANEL256 = 3, COLUMNS256 = 16, WORDS256 = 4, SMALL = 32767 / (2 * 127 * WORDS256) };

/* Whether codes of 4 bits, as bytes without a sign, are so small. All recipes' are; tables of a user's own may not be. */
INLINE int are_small(const weight *w, const grouping *g)
{
    int most = 0;
    for (int i = 0; i < 16; i++)
        most = g->bytes[i] > most ? g->bytes[i] : most;
    return w->codes.kind == TABLE4 && most <= SMALL;
}

/* Scales (or zero-points) of a chunk's groups, for 8 rows. */
INLINE void group_scales_by_avx2(const grouping *g, const float *const *rows, Py_ssize_t c, float *to)
{
    __m256 scales[SPANS];
    scales_by_avx2(rows, c, scales);
    for (int i = 0; i < CHUNK / g->q; i++)
        _mm256_storeu_ps(to + i * WIDE, scales[i * g->q / SPAN]);
}

/* Words of 4 codes of each row. Codes of 8 bits, and those of 4 that are not small, keep their sign. */
INLINE void group_tile_by_avx2(const int nibbles, const weight *w, const grouping *g, const panel *p, Py_ssize_t first,
    Py_ssize_t chunks, const group_tile *tile)
{
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)g->bytes));
    const __m256i shift = _mm256_set1_epi8((char)(are_small(w, g) ? 0 : g->shift)), low = _mm256_set1_epi8(15);
    const __m256i table = _mm256_sub_epi8(bytes, shift);
    const int parts = nibbles ? 2 : 4, each = nibbles ? 8 : 4;
    for (Py_ssize_t c = 0; c < chunks; c++)
        for (int rows = 0; rows < WIDE; rows += 8) {
            const Py_ssize_t group = c * (CHUNK / g->q) * WIDE + rows;
            group_scales_by_avx2(g, p->scales + rows, first + c, tile->scales + group);
            if (tile->offsets)
                group_scales_by_avx2(g, p->offsets + rows, first + c, tile->offsets + group);
            for (int part = 0; part < parts; part++) {
                __m256 v[8];
                UNROLL for (int r = 0; r < 8; r++) {
                    v[r] = _mm256_loadu_ps((const void *)(codes_of(p, rows + r, first + c) + 32 * part));
                    _mm_prefetch((const char *)codes_of(p, rows + r, first + c) + DEEP * p->bytes + 32 * part, _MM_HINT_T0);
                }
                transposed8(v);
                uint32_t *to = tile->codes + (c * CHUNK + part * 8 * each) / 4 * WIDE + rows;
                UNROLL for (int j = 0; j < 8; j++) {
                    const __m256i u = _mm256_castps_si256(v[j]);
                    if (!nibbles) {
                        _mm256_storeu_si256((void *)(to + j * WIDE), u);
                        continue;
                    }
                    const __m256i even = _mm256_and_si256(u, low), odd = _mm256_and_si256(_mm256_srli_epi16(u, 4), low);
                    _mm256_storeu_si256((void *)(to + 2 * j * WIDE), _mm256_shuffle_epi8(table, even));
                    _mm256_storeu_si256((void *)(to + (2 * j + 1) * WIDE), _mm256_shuffle_epi8(table, odd));
                }
            }
        }
}

static void decode_groups(
    const weight *w, const grouping *g, const panel *p, Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    if (w->codes.kind == TABLE4)
        group_tile_by_avx2(1, w, g, p, first, chunks, tile);
    else
        group_tile_by_avx2(0, w, g, p, first, chunks, tile);
}

/* A sum of 32 bits in each lane and its two sums of 16. */
INLINE __m256i widened_sum(__m256i pairs, __m256i sum)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* MB rows of activations by COLUMNS256 rows of the weight. `small`: see `are_small`; otherwise codes have a sign, which moves to the
   activations, as products of pairs are of a number without one and a number with one. */
INLINE void integers_by_avx2(const int MB, const int small, const grouping *g, const group_tile *tile, const group_x *x,
    Py_ssize_t groups, const int column, float *sums)
{
    const uint32_t *from = tile->codes + column, *codes = x->codes;
    const Py_ssize_t words = g->q / 4;
    __m256 found[PANEL256][2];
    UNROLL for (int m = 0; m < MB; m++)
        UNROLL for (int half = 0; half < 2; half++) found[m][half] = _mm256_loadu_ps(sums + m * WIDE + column + 8 * half);
    for (Py_ssize_t i = 0; i < groups; i++) {
        const float *scales = tile->scales + i * WIDE + column;
        const float *offsets = tile->offsets ? tile->offsets + i * WIDE + column : NULL;
        __m256i all[PANEL256][2];
        UNROLL for (int m = 0; m < MB; m++)
            all[m][0] = all[m][1] = _mm256_set1_epi32(small ? x->starts[i * MB + m] : 0);
        for (Py_ssize_t k = 0; k < words; k += WORDS256) {
            __m256i pairs[PANEL256][2];
            UNROLL for (int m = 0; m < MB; m++) pairs[m][0] = pairs[m][1] = _mm256_setzero_si256();
            for (Py_ssize_t j = k; j < words && j < k + WORDS256; j++, from += WIDE, codes += MB)
                UNROLL for (int half = 0; half < 2; half++) {
                    const __m256i c = _mm256_loadu_si256((const void *)(from + 8 * half)), size = small ? c : _mm256_abs_epi8(c);
                    UNROLL for (int m = 0; m < MB; m++) {
                        const __m256i y = _mm256_set1_epi32((int)codes[m]);
                        const __m256i now = _mm256_maddubs_epi16(size, small ? y : _mm256_sign_epi8(y, c));
                        if (small)
                            pairs[m][half] = _mm256_add_epi16(pairs[m][half], now);
                        else
                            all[m][half] = widened_sum(now, all[m][half]);
                    }
                }
            if (small)
                UNROLL for (int m = 0; m < MB; m++)
                    UNROLL for (int half = 0; half < 2; half++) all[m][half] = widened_sum(pairs[m][half], all[m][half]);
        }
        UNROLL for (int m = 0; m < MB; m++)
            UNROLL for (int half = 0; half < 2; half++) {
                __m256 e = _mm256_cvtepi32_ps(all[m][half]);
                if (offsets && !tile->biased)
                    e = _mm256_fnmadd_ps(_mm256_loadu_ps(offsets + 8 * half), _mm256_set1_ps(x->sums[i * MB + m]), e);
                e = _mm256_mul_ps(e, _mm256_set1_ps(x->scales[i * MB + m]));
                const __m256 by = _mm256_loadu_ps(scales + 8 * half);
                if (offsets && tile->biased) {
                    const __m256 sum = _mm256_set1_ps(x->sums[i * MB + m] * x->scales[i * MB + m]);
                    const __m256 biases = _mm256_mul_ps(sum, _mm256_loadu_ps(offsets + 8 * half));
                    found[m][half] = _mm256_add_ps(found[m][half], _mm256_fmadd_ps(e, by, biases));
                } else
                    found[m][half] = _mm256_fmadd_ps(e, by, found[m][half]);
            }
    }
    UNROLL for (int m = 0; m < MB; m++)
        UNROLL for (int half = 0; half < 2; half++) _mm256_storeu_ps(sums + m * WIDE + column + 8 * half, found[m][half]);
}

#define MODES256(name, MB, small)                                                                                             \
    static void name##MB(                                                                                          \
        const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups, float *sums)                        \
    {                                                                                                                       \
        for (int column = 0; column < WIDE; column += COLUMNS256)                                                             \
            integers_by_avx2(MB, small, g, tile, x, groups, column, sums);                                                  \
    }
#define OF_PANEL256(macro, name, small) \
    macro(name, 1, small) macro(name, 2, small) macro(name, 3, small)
OF_PANEL256(MODES256, small_integers, 1)
OF_PANEL256(MODES256, signed_integers, 0)
#define LIST256_OF(name) {NULL, name##1, name##2, name##3}
static const group_micro small_integers[] = LIST256_OF(small_integers), signed_integers[] = LIST256_OF(signed_integers);

/* ------------------------------------------------------------------------------------------------ from registers */

/* Rows of the weight that are multiplied together, and how many chunks ahead codes are fetched. */
enum { STREAMED256 = 8, AHEAD256 = 8 };

/* Scales (or zero-points) of 8 successive groups from `at` on: those of STREAMED256 rows in each vector. */
INLINE void scales_of_8_groups(const float *const *rows, Py_ssize_t at, __m256 *to)
{
    __m256 v[8];
    UNROLL for (int r = 0; r < STREAMED256; r++) v[r] = _mm256_loadu_ps(rows[r] + at);
    transposed8(v);
    UNROLL for (int r = 0; r < 8; r++) to[r] = v[r];
}

/* Products of STREAMED256 rows of the weight and a panel of MB rows of activations, all along K, in the order of `integers_by_avx2`.
   Codes are transposed in registers. small: see `are_small`. shifts: whether codes have zero-points. */
INLINE void integers_streamed_by_avx2(const int MB, const int small, const int nibbles, const int shifts, const weight *w,
    const grouping *g, const panel *p, const float *x, float *sums)
{
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)g->bytes)), low = _mm256_set1_epi8(15);
    const __m256i table = small ? bytes : _mm256_sub_epi8(bytes, _mm256_set1_epi8((char)g->shift));
    const int parts = nibbles ? 2 : 4, per = nibbles ? 2 : 1; /* words of 4 codes in a lane */
    const Py_ssize_t length = p->chunks * CHUNK, steps = g->q / (8 * per); /* of two lanes, in a group */
    const group_x from = activations(g, x, MB, length, 0);
    const uint32_t *codes = from.codes;
    const float *by = from.scales, *all_codes = from.sums;
    const int32_t *starts = from.starts;
    Py_ssize_t group = 0, done = 0;
    __m256 scales[8], zeros[8], found[PANEL256];
    __m256i all[PANEL256];
    UNROLL for (int m = 0; m < MB; m++) {
        found[m] = _mm256_setzero_ps();
        all[m] = _mm256_set1_epi32(small ? starts[m] : 0);
    }
    for (Py_ssize_t c = 0; c < p->chunks; c++) {
        const Py_ssize_t next = c + AHEAD256 < p->chunks
            ? (c + AHEAD256) * p->bytes
            : STREAMED256 * w->row_bytes + (c + AHEAD256 - p->chunks) * p->bytes;
        for (int part = 0; part < parts; part++) {
            __m256 v[8];
            UNROLL for (int r = 0; r < STREAMED256; r++) {
                v[r] = _mm256_loadu_ps((const void *)(codes_of(p, r, c) + 32 * part));
                if (part % 2 == 0)
                    _mm_prefetch((const char *)p->codes[r] + next + 32 * part, _MM_HINT_T0);
            }
            transposed8(v);
            for (int i = 0; i < 8; i += 2) {
                if (!done && group % 8 == 0) {
                    scales_of_8_groups(p->scales, group, scales);
                    if (shifts)
                        scales_of_8_groups(p->offsets, group, zeros);
                }
                __m256i pairs[PANEL256];
                UNROLL for (int j = 0; j < 2; j++) {
                    const __m256i u = _mm256_castps_si256(v[i + j]);
                    UNROLL for (int word = 0; word < per; word++, codes += MB) {
                        const __m256i place = _mm256_and_si256(word ? _mm256_srli_epi16(u, 4) : u, low);
                        const __m256i d = nibbles ? _mm256_shuffle_epi8(table, place) : u, size = small ? d : _mm256_abs_epi8(d);
                        UNROLL for (int m = 0; m < MB; m++) {
                            const __m256i y = _mm256_set1_epi32((int)codes[m]);
                            const __m256i now = _mm256_maddubs_epi16(size, small ? y : _mm256_sign_epi8(y, d));
                            if (small)
                                pairs[m] = j || word ? _mm256_add_epi16(pairs[m], now) : now;
                            else
                                all[m] = widened_sum(now, all[m]);
                        }
                    }
                }
                if (small)
                    UNROLL for (int m = 0; m < MB; m++) all[m] = widened_sum(pairs[m], all[m]);
                if (++done < steps)
                    continue;
                UNROLL for (int m = 0; m < MB; m++) {
                    __m256 e = _mm256_cvtepi32_ps(all[m]);
                    if (shifts)
                        e = _mm256_fnmadd_ps(zeros[group % 8], _mm256_set1_ps(all_codes[m]), e);
                    e = _mm256_mul_ps(e, _mm256_set1_ps(by[m]));
                    found[m] = _mm256_fmadd_ps(e, scales[group % 8], found[m]);
                }
                done = 0, group++, by += MB, all_codes += MB, starts += MB;
                UNROLL for (int m = 0; m < MB; m++) all[m] = _mm256_set1_epi32(small && group * g->q < length ? starts[m] : 0);
            }
        }
    }
    UNROLL for (int m = 0; m < MB; m++) _mm256_storeu_ps(sums + m * STREAMED256, found[m]);
}

#define STREAMS256(MB)                                                                                                        \
    static void integers_streamed##MB(                                                                             \
        const weight *w, const grouping *g, const panel *p, const float *x, float *sums)                                    \
    {                                                                                                                       \
        const int nibbles = w->codes.kind == TABLE4, shifts = w->role == ZERO_POINT;                                        \
        if (are_small(w, g) && shifts)                                                                                      \
            integers_streamed_by_avx2(MB, 1, 1, 1, w, g, p, x, sums);                                                       \
        else if (are_small(w, g))                                                                                           \
            integers_streamed_by_avx2(MB, 1, 1, 0, w, g, p, x, sums);                                                       \
        else if (nibbles)                                                                                                   \
            integers_streamed_by_avx2(MB, 0, 1, shifts, w, g, p, x, sums);                                                  \
        else                                                                                                                \
            integers_streamed_by_avx2(MB, 0, 0, shifts, w, g, p, x, sums);                                                  \
    }
STREAMS256(1)
STREAMS256(2)
STREAMS256(3)

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    (void)words;
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx2, NULL, p);
}

/* `rows_by_groups` without tiles: codes are transposed and decoded in registers for each panel of activations. */
static int rows_by_streams(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    Py_ssize_t first, Py_ssize_t end, float *y)
{
    static const group_stream streams[] = {NULL, integers_streamed1, integers_streamed2, integers_streamed3};
    return rows_from_registers(w, g, to, x, m, PANEL256, STREAMED256, first, end, y, scales, streams);
}

/* The most rows of activations for which decoding codes again for each panel is faster than tiles. */
enum { MOST_STREAMED256 = 2 * PANEL256 };

static int rows(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    if (w->role != BIAS && m <= MOST_STREAMED256 && g->q >= 16)
        return rows_by_streams(w, g, to, x, m, first, end, y);
    return rows_by_groups(
        w, g, to, x, m, PANEL256, first, end, y, decode_groups, are_small(w, g) ? small_integers : signed_integers);
}

static void pack_groups(const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    pack_groups_of(INT8_MODE, g, kind, x, k, part, to);
}

const mode_version int8_avx2 = {pack_groups, rows, no_lift, always, PANEL256, TILE, one_claim};

COMPILED
#endif
