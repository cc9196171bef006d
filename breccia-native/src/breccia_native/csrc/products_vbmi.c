/* Products by AVX-512 VBMI: those by AVX-512, but FP8 and FP6 codes are decoded by tables. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vbmi," AVX512)

#include "tables512.h"

byte_table byte_tables[KINDS];

void fill_byte_tables(void)
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

/* The order of activations: of 64 codes, the even and the odd ones of the first 8 of every 16, then of the others. So lanes
   4j to 4j + 3 have codes 16j to 16j + 15. */
static const uint8_t order_by_tables[CHUNK] = {
#define QUADS_OF(i) i, i + 2, i + 4, i + 6, i + 16, i + 18, i + 20, i + 22, i + 32, i + 34, i + 36, i + 38, i + 48, i + 50, \
        i + 52, i + 54
    QUADS_OF(0), QUADS_OF(1), QUADS_OF(8), QUADS_OF(9), QUADS_OF(64), QUADS_OF(65), QUADS_OF(72), QUADS_OF(73)};

static const uint8_t *order(const weight *w)
{
    return IS_HALF(w->codes.kind) ? order_by_tables : order_of(w);
}

#define TABLES(M, kind, grain) \
    STREAM(tables_##M##kind##grain, tables_streamed(0, M, kind, grain, w, p, x, stride, sums))
#define TABLES_OF(kind) FOR_ALL(TABLES, kind, ONE) FOR_ALL(TABLES, kind, MANY) FOR_ALL(TABLES, kind, WORDS)
TABLES_OF(E4M3)
TABLES_OF(E2M3)
static const streamed table_streams[2][GRAINS][3] = {OF_TABLES(tables_, E4M3), OF_TABLES(tables_, E2M3)};

INLINE int stream(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    const int size = m >= 4 ? 2 : m >= 2 ? 1 : 0, kind = w->codes.kind;
    if (w->narrow) {
        stream_narrow_blocks(w, p, x, stride, sums);
        return 1;
    }
    if (!IS_HALF(kind))
        return stream_by_avx512(w, p, x, stride, m, sums);
    table_streams[IS_SIX(kind)][p->words ? WORDS : p->spans == 1 ? ONE : MANY][size](w, p, x, stride, sums);
    return 1 << size;
}

/* By tables, codes of 8 bits are decoded in registers for more rows; those of 6 would be expanded again for every 4 rows. */
static Py_ssize_t most_streams(const weight *w)
{
    const int kind = w->codes.kind;
    const Py_ssize_t most = most_streams_of_avx512(w);
    return most && (kind == E4M3 || kind == E5M2) ? 16 : most;
}

/* The `widener` of 64 bytes at a time: each word of 8 has the bytes of its codes, from which `multishift` takes 8 bits a byte. */
void widen_by_vbmi(const weight *w, const uint8_t *from, uint8_t *to)
{
    const int bits = kind_bits[w->codes.kind], width = w->width, each = 8 * width / bits;
    /* Products of small bytes are those of words. */
    const __m512i of_eight = _mm512_set_epi64(0x0707070707070707, 0x0606060606060606, 0x0505050505050505, 0x0404040404040404,
        0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m512i in_eight = _mm512_set1_epi64(0x0706050403020100);
    const __m512i places = _mm512_add_epi8(_mm512_mullo_epi16(of_eight, _mm512_set1_epi16((short)each)), in_eight);
    const __m512i shifts = _mm512_mullo_epi16(in_eight, _mm512_set1_epi16((short)each));
    const __m512i others = _mm512_add_epi8(shifts, _mm512_set1_epi8((char)(width - 4))); /* second codes, for the high bits */
    const __m512i low = _mm512_set1_epi8((char)((1 << width) - 1)), high = _mm512_slli_epi16(low, 4);
    const __m512i top = _mm512_set1_epi8((char)(1 << (width - 1)));
    const uint8_t *const stop = to + row_of_chunks(w);
    for (Py_ssize_t left = w->row_bytes; to < stop; to += 64, from += 8 * each, left -= 8 * each) {
        const __mmask64 here = left <= 0 ? 0 : left < 8 * each ? ((__mmask64)1 << left) - 1 : ((__mmask64)1 << 8 * each) - 1;
        const __m512i v = _mm512_permutexvar_epi8(places, _mm512_maskz_loadu_epi8(here, from));
        __m512i found = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, v), low);
        if (bits == 4)
            found = _mm512_ternarylogic_epi32(found, _mm512_multishift_epi64_epi8(others, v), high, 0xF8); /* a | (b & c) */
        if (w->codes.kind == I8)
            found = _mm512_sub_epi8(_mm512_xor_si512(found, top), top);
        _mm512_storeu_si512(to, found);
    }
}

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx512, words ? words_by_vbmi : NULL, p);
}

static const tiling tiles = {decode_tile_by_avx512, micros_of_avx512, 14};

static int rows(int streams, const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_of(&tiles, stream, scales, CHUNK, streams, w, to, x, m, first, end, y);
}

static void pack(int streams, const weight *w, const float *x, Py_ssize_t m, part part, float *to)
{
    if (streams)
        pack_chunks(x, m, w->k, part, order(w), to);
    else
        pack_panel(x, w->k, part, to);
}

const version products_vbmi = {"avx512_vbmi", rows, pack, most_streams, 14, lift_of, widen_by_vbmi, 1};

COMPILED
#endif
