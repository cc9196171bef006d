/* Products for any processor. */

#include "products.h"

static void decode_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    tile_of_rows(w, p, first, chunks, 1, tile);
}

MICRO(1)
MICRO(2)
MICRO(3)
MICRO(4)
static const micro micros[] = {NULL, micro1, micro2, micro3, micro4};
INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    (void)words;
    return scales_of_panel(w, to, n, stop, span, scales_decoded, NULL, p);
}

static const tiling tiles = {decode_tile, micros, 4};

static Py_ssize_t most_streams(const weight *w)
{
    (void)w;
    return 0;
}

static int rows(int streams, const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_of(&tiles, NULL, scales, CHUNK, streams, w, to, x, m, first, end, y);
}

static void pack(int streams, const weight *w, const float *x, Py_ssize_t m, part part, float *to)
{
    (void)streams;
    (void)m;
    pack_panel(x, w->k, part, to);
}

static void widen(const weight *w, const uint8_t *from, uint8_t *to)
{
    widen_codes(w, from, to, spread_codes);
}

const version products_portable = {"portable", rows, pack, most_streams, 4, no_lift, widen, 0};

/* ------------------------------------------------------------------------------------------------ modes */

static void decode_groups(
    const weight *w, const grouping *g, const panel *p, Py_ssize_t first, Py_ssize_t chunks, const group_tile *tile)
{
    const int kind = w->codes.kind;
    for (Py_ssize_t c = 0; c < chunks; c++)
        for (int r = 0; r < WIDE; r++) {
            const uint8_t *codes = codes_of(p, r, first + c);
            const float *scales = p->scales[r] + (first + c) * SPANS, *offsets = p->offsets[r] + (first + c) * SPANS;
            for (int i = 0; i < CHUNK / g->q; i++) {
                const Py_ssize_t group = (c * CHUNK / g->q + i) * WIDE + r;
                tile->scales[group] = scales[i * g->q / SPAN];
                if (tile->offsets)
                    tile->offsets[group] = offsets[i * g->q / SPAN];
            }
            float values[CHUNK];
            values_of(w, codes, values);
            for (int i = 0; i < CHUNK; i += g->per) {
                uint32_t word = 0;
                for (int j = 0; j < g->per; j++) {
                    const int at = i / 8 * 8 + code_of(g->mode, kind, i % 8 + j);
                    if (g->mode == INT8_MODE) {
                        const int code = kind == TABLE4 ? g->bytes[codes[at / 2] >> 4 * (at & 1) & 15] : codes[at] ^ 128;
                        word |= (uint32_t)code << 8 * j;
                    } else {
                        const float v = values[at] - (w->role == ZERO_POINT ? offsets[at / SPAN] : 0);
                        word |= bf16_of(v) << 16 * j;
                    }
                }
                tile->codes[((c * CHUNK + i) / g->per) * WIDE + r] = word;
            }
        }
}

/* `rows` rows of activations: what vpdpbusd and vdpbf16ps do, number by number. */
static void multiply_groups(
    const grouping *g, const group_tile *tile, const group_x *x, const int rows, Py_ssize_t groups, float *sums)
{
    const Py_ssize_t words = g->q / g->per;
    for (Py_ssize_t i = 0; i < groups; i++)
        for (int m = 0; m < rows; m++)
            for (int n = 0; n < WIDE; n++) {
                float sum = 0, *to = sums + m * WIDE + n;
                int32_t whole = 0;
                for (Py_ssize_t k = i * words; k < (i + 1) * words; k++) {
                    const uint32_t a = tile->codes[k * WIDE + n], b = x->codes[k * rows + m];
                    if (g->mode == INT8_MODE)
                        for (int j = 0; j < 32; j += 8)
                            whole += (int32_t)(a >> j & 255) * (int8_t)(b >> j);
                    else {
                        sum = fmaf(float_of(a & 0xffff0000), float_of(b & 0xffff0000), sum);
                        sum = fmaf(float_of(a << 16), float_of(b << 16), sum);
                    }
                }
                if (g->mode == INT8_MODE) {
                    sum = (float)(whole + x->starts[i * rows + m]);
                    if (tile->offsets && !tile->biased)
                        sum = fmaf(-tile->offsets[i * WIDE + n], x->sums[i * rows + m], sum);
                    sum = sum * x->scales[i * rows + m];
                }
                if (tile->offsets && tile->biased) {
                    const float biases = x->sums[i * rows + m] * x->scales[i * rows + m] * tile->offsets[i * WIDE + n];
                    *to += fmaf(sum, tile->scales[i * WIDE + n], biases);
                } else
                    *to = fmaf(sum, tile->scales[i * WIDE + n], *to);
            }
}

#define GROUPS(MB)                                                                                                 \
    static void groups##MB(                                                                                        \
        const grouping *g, const group_tile *tile, const group_x *x, Py_ssize_t groups, float *sums)                        \
    {                                                                                                                       \
        multiply_groups(g, tile, x, MB, groups, sums);                                                                 \
    }
UP_TO_TALLEST(GROUPS)
static const group_micro groups[] = LIST_OF(groups);

static int rows_by_tiles(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_by_groups(w, g, to, x, m, TALLEST, first, end, y, decode_groups, groups);
}

static void pack_groups(const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    pack_groups_of(g->mode, g, kind, x, k, part, to);
}

const mode_version modes_portable = {pack_groups, rows_by_tiles, no_lift, NULL, TALLEST, TILE, one_claim};
