/* Products of activations rounded to BF16, by AVX-512 BF16: by tiles, or where there is AVX-512 VBMI, from registers. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512bf16," AVX512)

#include "groups512.h"

static void decode_groups(
    const weight *w, const grouping *g, const panel *p, Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    switch (w->codes.kind) {
    case TABLE4: group_tile_of(TABLE4, BF16_MODE, w, g, p, first, chunks, tile); break;
    case E4M3: group_tile_of(E4M3, BF16_MODE, w, g, p, first, chunks, tile); break;
    case E5M2: group_tile_of(E5M2, BF16_MODE, w, g, p, first, chunks, tile); break;
    case E2M3: group_tile_of(E2M3, BF16_MODE, w, g, p, first, chunks, tile); break;
    case E3M2: group_tile_of(E3M2, BF16_MODE, w, g, p, first, chunks, tile); break;
    case I8: group_tile_of(I8, BF16_MODE, w, g, p, first, chunks, tile); break;
    default: group_tile_of(U8, BF16_MODE, w, g, p, first, chunks, tile);
    }
}

INLINE void brain_floats(const int MB, const grouping *g, const group_tile *tile, const group_x *x,
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

#define MULTIPLY_GROUPS(MB)                                                                                                 \
    static void groups##MB(const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups, float *sums)     \
    {                                                                                                                       \
        brain_floats(MB, g, tile, x, groups, sums);                                                                                 \
    }
UP_TO_TALLEST(MULTIPLY_GROUPS)
static const group_micro all_groups[] = LIST_OF(groups);

static int rows_by_tiles(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_by_groups(w, g, to, x, m, TALLEST, first, end, y, decode_groups, all_groups);
}

/* `kind`: one with codes of as many bits, signed or not. */
#define GROUP_STREAM(name, MB, kind, role)                                                                                  \
    static void name##MB(const weight *w, const grouping *g, const panel *p, const float *x, float *sums)                   \
    {                                                                                                                       \
        groups_streamed(MB, BF16_MODE, kind, role, w, g, p, x, sums);                                                       \
    }
#define GROUP_STREAMS(MB)                             \
    GROUP_STREAM(nibbles, MB, TABLE4, NONE)           \
    GROUP_STREAM(differences, MB, TABLE4, ZERO_POINT) \
    GROUP_STREAM(bytes, MB, E4M3, NONE)               \
    GROUP_STREAM(integers, MB, I8, NONE)
UP_TO_TALLEST(GROUP_STREAMS)
static const group_stream nibble_streams[] = LIST_OF(nibbles), difference_streams[] = LIST_OF(differences);
static const group_stream byte_streams[] = LIST_OF(bytes), integer_streams[] = LIST_OF(integers);

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    (void)words;
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx512, NULL, p);
}

/* `rows_by_tiles` without tiles: codes are transposed and decoded in registers for each panel of activations. */
static int rows_by_streams(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    Py_ssize_t first, Py_ssize_t end, float *y)
{
    const int kind = w->codes.kind;
    const group_stream *streams = kind == TABLE4 ? w->role == ZERO_POINT ? difference_streams : nibble_streams
        : kind == I8                             ? integer_streams
                                                 : byte_streams;
    return rows_from_registers(w, g, to, x, m, TALLEST, STREAMED, first, end, y, scales, streams);
}

/* From registers or by tiles. */
static int rows(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return (m <= most_streamed(w, g) ? rows_by_streams : rows_by_tiles)(w, g, to, x, m, first, end, y);
}

static Py_ssize_t fewest_by_tiles(const weight *w)
{
    (void)w;
    return 9;
}

static Py_ssize_t fewest_by_streams(const weight *w)
{
    return are_pairs(w->codes.kind, w->role) ? 1 : fewest_by_tiles(w);
}

static void pack_groups(const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    pack_groups_of(BF16_MODE, g, kind, x, k, part, to);
}

const mode_version bf16_tiles = {pack_groups, rows_by_tiles, lift_of, fewest_by_tiles, TALLEST, TILE, one_claim};
const mode_version bf16_streams = {pack_groups, rows, lift_of, fewest_by_streams, TALLEST, TILE, one_claim};

COMPILED
#endif
