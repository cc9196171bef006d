/* Products of a few rows of BF16 activations and codes that are BF16 numbers, by AVX-512 VBMI and AVX-512 BF16.

   One instruction, vdpbf16ps, adds two products to each of 16 sums, so codes are decoded as pairs of BF16 numbers, in half as
   many vectors as FP32 numbers. Products are exact, and sums of a span are multiplied by its scale, as in streams512.h. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vbmi,avx512bf16," AVX512)

#include "tables512.h"

/* The order of activations. Halves 2j and 2j + 1 of the lanes of vector i have codes 8j + i and 8j + 4 + i, of 4 bits.
   Of bytes, vectors have the first 8 of every 16 of 64 codes, and the others. */
static const uint8_t order_of_nibble_pairs[CHUNK] = {
#define EIGHT_OF(i) i, 4 + i, 8 + i, 12 + i, 16 + i, 20 + i, 24 + i, 28 + i
#define WORDS_OF(i) EIGHT_OF(i), EIGHT_OF(32 + i), EIGHT_OF(64 + i), EIGHT_OF(96 + i)
    WORDS_OF(0), WORDS_OF(1), WORDS_OF(2), WORDS_OF(3)};
static const uint8_t order_of_byte_pairs[CHUNK] = {
#define RUN_OF(i) i, 1 + i, 2 + i, 3 + i, 4 + i, 5 + i, 6 + i, 7 + i
#define RUNS_OF(i) RUN_OF(i), RUN_OF(16 + i), RUN_OF(32 + i), RUN_OF(48 + i)
    RUNS_OF(0), RUNS_OF(8), RUNS_OF(64), RUNS_OF(72)};

static const uint8_t *order(int kind)
{
    return kind == TABLE4 ? order_of_nibble_pairs : order_of_byte_pairs;
}

/* `pack_chunks`, rounded to BF16. */
static void pack_pairs(const float *x, Py_ssize_t m, Py_ssize_t k, part part, const uint8_t *order, float *to)
{
    __m512i from[4];
    __mmask32 upper[4];
    for (int i = 0; i < 4; i++) {
        from[i] = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(order + 32 * i)));
        upper[i] = _mm512_test_epi16_mask(from[i], _mm512_set1_epi16(64));
    }
    to += part.column / 2 * m;
    for (Py_ssize_t c = part.column; c < part.end; c += CHUNK)
        for (Py_ssize_t r = 0; r < m; r++, to += CHUNK / 2) {
            __m512i v[4];
            for (int i = 0; i < 4; i++) {
                const Py_ssize_t left = k - c - 32 * i;
                const uint32_t here = left >= 32 ? 0xFFFFFFFF : left > 0 ? (1u << left) - 1 : 0;
                const float *y = x + r * k + c + 32 * i;
                const __m512 low = _mm512_maskz_loadu_ps((__mmask16)here, y);
                const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(here >> 16), y + 16);
                v[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            for (int i = 0; i < 4; i++) {
                const __m512i first = _mm512_permutex2var_epi16(v[0], from[i], v[1]);
                const __m512i second = _mm512_permutex2var_epi16(v[2], from[i], v[3]);
                _mm512_storeu_si512(to + 16 * i, _mm512_mask_mov_epi16(first, upper[i], second));
            }
        }
}

#define NIBBLE_PAIRS(M, role, grain) \
    STREAM(nibble_pairs_##M##role##grain, nibbles_streamed(1, M, role, grain, w, p, x, stride, sums))
#define BYTE_PAIRS(M, kind, grain) \
    STREAM(byte_pairs_##M##kind##grain, tables_streamed(1, M, kind, grain, w, p, x, stride, sums))
#define BYTE_PAIRS_OF(kind) FOR_ALL(BYTE_PAIRS, kind, ONE) FOR_ALL(BYTE_PAIRS, kind, MANY) FOR_ALL(BYTE_PAIRS, kind, WORDS)
FOR_ALL(NIBBLE_PAIRS, NONE, ONE)
FOR_ALL(NIBBLE_PAIRS, NONE, MANY)
FOR_ALL(NIBBLE_PAIRS, NONE, WORDS)
FOR_ALL(NIBBLE_PAIRS, ZERO_POINT, ONE)
FOR_ALL(NIBBLE_PAIRS, ZERO_POINT, MANY)
BYTE_PAIRS_OF(E4M3)
BYTE_PAIRS_OF(E2M3)
BYTE_PAIRS_OF(I8)

static const streamed nibble_pair_streams[GRAINS][3] = OF_TABLES(nibble_pairs_, NONE);
static const streamed shifted_pair_streams[2][3] = {
    FUNCTIONS(nibble_pairs_, ZERO_POINT, ONE), FUNCTIONS(nibble_pairs_, ZERO_POINT, MANY)};
static const streamed byte_pair_streams[3][GRAINS][3] = {
    OF_TABLES(byte_pairs_, E4M3), OF_TABLES(byte_pairs_, E2M3), OF_TABLES(byte_pairs_, I8)};

INLINE int stream(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    const int size = m >= 4 ? 2 : m >= 2 ? 1 : 0, kind = w->codes.kind;
    const int grain = p->words ? WORDS : p->spans == 1 ? ONE : MANY;
    if (w->role == ZERO_POINT)
        shifted_pair_streams[grain == MANY][size](w, p, x, stride, sums);
    else if (kind == TABLE4)
        nibble_pair_streams[grain][size](w, p, x, stride, sums);
    else
        byte_pair_streams[kind == I8 ? 2 : IS_SIX(kind)][grain][size](w, p, x, stride, sums);
    return 1 << size;
}

/* The most rows of activations for which decoding codes again for every 4 rows, but in their own order, is faster than
   transposing them for panels of more rows (bf16_avx512.c). */
static Py_ssize_t most_streams(const weight *w)
{
    return w->span == SPAN && are_pairs(w->codes.kind, w->role) ? 4 : 0;
}

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx512, words ? words_by_vbmi : NULL, p);
}

static const tiling tiles = {decode_tile_by_avx512, micros_of_avx512, 14};

static int rows(int streams, const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_of(&tiles, stream, scales, CHUNK / 2, streams, w, to, x, m, first, end, y);
}

static void pack(int streams, const weight *w, const float *x, Py_ssize_t m, part part, float *to)
{
    if (streams)
        pack_pairs(x, m, w->k, part, order(w->codes.kind), to);
    else
        pack_panel(x, w->k, part, to);
}

const version products_bf16 = {"avx512_bf16", rows, pack, most_streams, 14, lift_of, widen_by_vbmi, 0};

COMPILED
#endif
