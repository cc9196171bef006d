/* Products by tiles: rows of the weight are decoded and transposed into the L1 cache, and all activations pass over them.

   A tile is (k, NR): NR rows of the weight stand side by side, in two vectors, so that sums need no reduction and one number
   of the activations meets NR of them. Activations are packed in panels of up to `most` rows, k by k. */

#ifndef BRECCIA_TILES_H
#define BRECCIA_TILES_H

#include "weights.h"

/* Bytes of a vector register: a source file for one instruction set defines them first. */
#if !defined(VECTOR_BYTES)
#define VECTOR_BYTES 16
#endif
typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

/* Numbers of a vector; and rows of the weight in a tile. */
enum { W = VECTOR_BYTES / 4, NR = 2 * W };

typedef void (*micro)(const float *, const float *, Py_ssize_t, float *);
typedef void (*tiler)(const weight *, const panel *, Py_ssize_t, Py_ssize_t, float *);
typedef int (*streamer)(const weight *, const panel *, const float *, Py_ssize_t, int, float *);
typedef int (*worder)(const weight *, Py_ssize_t, uint16_t *);

/* Multiplies MB rows of packed activations by a tile, adding to (MB, NR) sums. */
INLINE void multiply_tile(const int MB, const float *tile, const float *x, Py_ssize_t depth, float *sums)
{
    enum { MOST = 14 };
    vector a[MOST], b[MOST];
    UNROLL for (int m = 0; m < MB; m++)
    {
        memcpy(&a[m], sums + 2 * m * W, sizeof(vector));
        memcpy(&b[m], sums + (2 * m + 1) * W, sizeof(vector));
    }
    for (Py_ssize_t k = 0; k < depth; k++, tile += 2 * W, x += MB) {
        vector c, d;
        memcpy(&c, tile, sizeof(vector));
        memcpy(&d, tile + W, sizeof(vector));
        UNROLL for (int m = 0; m < MB; m++)
        {
            a[m] += c * x[m];
            b[m] += d * x[m];
        }
    }
    UNROLL for (int m = 0; m < MB; m++)
    {
        memcpy(sums + 2 * m * W, &a[m], sizeof(vector));
        memcpy(sums + (2 * m + 1) * W, &b[m], sizeof(vector));
    }
}

#define MICRO(MB)                                                                                                           \
    static void micro##MB(const float *tile, const float *x, Py_ssize_t depth, float *sums)                                 \
    {                                                                                                                       \
        multiply_tile(MB, tile, x, depth, sums);                                                                            \
    }

/* The height of panel `i` of `panels` that begins at row `done` of `m`: heights differ by one at most. */
INLINE Py_ssize_t height_of(Py_ssize_t m, Py_ssize_t done, Py_ssize_t panels, Py_ssize_t i)
{
    return (m - done + panels - i - 1) / (panels - i);
}

/* `scales_of_panel` by the decoder of an instruction set; and, where it has one, by its worder, if `words`. */
typedef int (*scaler)(
    const weight *, const workspace *, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *);

/* How tiles are decoded, and multiplied by panels of m rows of activations: by micros[m], up to `tallest`. */
typedef struct {
    tiler decode;
    const micro *micros;
    int tallest;
} tiling;

/* Rows `first` to `end` of the weight, NR at most, times all of x. */
OUTLINE void by_tiles(const tiling *by, const weight *w, const workspace *to, panel *p, const float *x, Py_ssize_t m,
    Py_ssize_t base, Py_ssize_t first, Py_ssize_t end, float *y)
{
    const Py_ssize_t panels = (m + by->tallest - 1) / by->tallest, length = p->chunks * CHUNK;
    const Py_ssize_t rows = end - first < NR ? end - first : NR;
    memset(to->sums, 0, 4 * (size_t)(m * NR));
    fill(w, to, base, first, end, NR, p);
    for (Py_ssize_t c = 0; c < p->chunks; c += DEPTH) {
        const Py_ssize_t chunks = p->chunks - c < DEPTH ? p->chunks - c : DEPTH;
        by->decode(w, p, c, chunks, to->tile);
        for (Py_ssize_t i = 0, done = 0; i < panels; i++) {
            const Py_ssize_t now = height_of(m, done, panels, i);
            by->micros[now](to->tile, x + done * length + c * CHUNK * now, chunks * CHUNK, to->sums + done * NR);
            done += now;
        }
    }
    for (Py_ssize_t i = 0; i < m; i++)
        memcpy(y + i * w->n + first, to->sums + i * NR, 4 * (size_t)rows);
}

/* Whether sums may be multiplied by the factor in place of scales: where it is neither so small nor so large that it matters. */
INLINE int factor_is_last(const weight *w)
{
    const float size = fabsf(w->factor);
    return w->role == NONE && !w->divides && size >= 0x1p-60f && size <= 0x1p24f;
}

/* Fetch the scales that follow `n` from `first` on. */
INLINE void fetch_scales(const numbers *a, Py_ssize_t first, Py_ssize_t n)
{
    const uint8_t *const next = a->items + bytes_of_scales(a, first + n);
    for (Py_ssize_t i = 0, bytes = bytes_of_scales(a, n); i < bytes; i += 64)
        __builtin_prefetch(next + i);
}

/* The scales of weight rows `n` to `stop`, as words where `worded` makes them, else in FP32. Returns whether they are within the
   limits. Those of as many rows after them are prefetched. */
INLINE int scales_of_panel(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, const decoder read,
    const worder worded, panel *p)
{
    const Py_ssize_t base = scale_row(w, n), count = scale_row(w, stop - 1) - base + 1, each = p->apart;
    fetch_scales(&w->scale, base * w->groups, count * w->groups);
    if (w->role != NONE)
        fetch_scales(&w->offset, base * w->groups, count * w->groups);
    p->words = worded != NULL;
    for (Py_ssize_t slot = 0; p->words && slot < count; slot++)
        p->words = worded(w, base + slot, (uint16_t *)(to->scales + slot * each));
    if (!p->words && each == w->groups && span == w->block) /* all are adjacent, as they are stored */
        return read_scales(w, base * each, count * each, read, to->scales) &&
            (w->role == NONE || read_offsets(w, base * each, count * each, read, to->offsets));
    for (Py_ssize_t slot = 0; !p->words && slot < count; slot++)
        if (!spread_scales(w, span, base + slot, read, to->run, to->scales + slot * each, to->offsets + slot * each))
            return 0;
    return 1;
}

/* Rows `first` to `end` of a product. Returns 0 where scales are beyond the limits. streams: whether codes are decoded in
   registers, by `stream`, for activations with `wide` FP32 words of a chunk. */
INLINE int rows_of(const tiling *by, const streamer stream, const scaler scales, const Py_ssize_t wide, int streams,
    const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    panel p;
    const Py_ssize_t span = streams ? span_in_streams(w) : w->span;
    /* Tiles read the scales of all rows in turns, which would share few places of a cache if they were a power of two apart. */
    begin_panel(w, span, streams ? 0 : BETWEEN, &p);
    const Py_ssize_t ahead = ROWS * w->row_bytes, step = streams ? rows_of_scales(w) : CLAIM;
    const int last = streams && factor_is_last(w); /* then scales are not multiplied by it */
    const int worth = last && span == w->block && span < CHUNK && w->groups > 1;
    weight unit = *w;
    unit.factor = last ? 1 : w->factor;
    p.ahead = w->widen ? 0 : ahead > 8192 && ahead <= 16384 ? ahead : 8192;
    for (Py_ssize_t n = first; n < end; n += step) {
        const Py_ssize_t stop = n + step < end ? n + step : end;
        if (!scales(&unit, to, n, stop, span, worth, &p))
            return 0;
        if (!streams) {
            for (Py_ssize_t row = n; row < stop; row += NR)
                by_tiles(by, w, to, &p, x, m, n, row, stop, y);
            continue;
        }
        for (Py_ssize_t row = n; row < stop; row += ROWS) {
            const Py_ssize_t rows = stop - row < ROWS ? stop - row : ROWS;
            fill(w, to, n, row, stop, ROWS, &p);
            for (Py_ssize_t i = 0; i < m;) {
                float sums[4 * ROWS];
                const int taken = stream(w, &p, x + i * wide, m * wide, (int)(m - i < 4 ? m - i : 4), sums);
                for (int j = 0; j < taken; j++)
                    for (Py_ssize_t r = 0; r < rows; r++)
                        y[(i + j) * w->n + row + r] = sums[j * ROWS + r] * (last ? w->factor : 1);
                i += taken;
            }
        }
    }
    return 1;
}

/* ------------------------------------------------------------------------------------------------ decoding a tile */

/* The values of a chunk's codes, in their own order. */
INLINE void values_of(const weight *w, const uint8_t *codes, float *y)
{
    uint8_t room[CHUNK];
    if (kind_bits[w->codes.kind] == 6) {
        expanded(codes, room);
        codes = room;
    }
    const numbers chunk = {w->codes.kind, codes, w->codes.table};
    decoded(&chunk, 0, CHUNK, y);
}

/* What follows reads the memory of `pointers` anew. */
#define FROM_MEMORY(pointers) __asm__ volatile("" : : "r"(pointers) : "memory")

/* y = (the value of each of a chunk's codes - zero-point) * scale + bias, given values. */
INLINE void apply_each(const weight *w, const float *scales, const float *offsets, const int span, float *y)
{
    for (int s = 0; s < CHUNK / span; s++) {
        const float by = scales[s], offset = w->role == ZERO_POINT ? offsets[s] : 0;
        for (int i = s * span; i < (s + 1) * span; i++)
            y[i] = (y[i] - offset) * by;
    }
    if (w->role != BIAS)
        return;
    FROM_MEMORY(y); /* fused with products, sums would not be rounded as a decoded weight is */
    for (int s = 0; s < CHUNK / span; s++)
        for (int i = s * span; i < (s + 1) * span; i++)
            y[i] += offsets[s];
}

/* Row r of a chunk, decoded. */
INLINE void row_of(const weight *w, const panel *p, int r, Py_ssize_t c, const float unlift, float *y)
{
    values_of(w, codes_of(p, r, c), y);
    for (int i = 0; i < CHUNK; i++)
        y[i] *= unlift;
    const float *scales = p->scales[r] + c * p->spans, *offsets = p->offsets[r] + c * p->spans;
    if (w->span == SPAN)
        apply_each(w, scales, offsets, SPAN, y);
    else
        apply_each(w, scales, offsets, 1, y);
}

/* Decode `chunks` chunks of NR rows into a tile, number by number. `lift`: what scales have been multiplied by. */
INLINE void tile_of_rows(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, const float lift, float *tile)
{
    float y[CHUNK];
    for (Py_ssize_t c = 0; c < chunks; c++)
        for (int r = 0; r < NR; r++) {
            row_of(w, p, r, first + c, 1 / lift, y);
            for (int k = 0; k < CHUNK; k++)
                tile[(c * CHUNK + k) * NR + r] = y[k];
        }
}

/* ------------------------------------------------------------------------------------------------ packing activations */

/* What is packed at a time: rows `row` to `row + rows`, columns `column` to `end`. */
typedef struct {
    Py_ssize_t row, rows, column, end;
} part;

/* Part `i` of `count` for codes decoded in registers: some chunks of all rows. */
INLINE part part_of_chunks(Py_ssize_t m, Py_ssize_t k, Py_ssize_t i, Py_ssize_t count)
{
    const Py_ssize_t chunks = (k + CHUNK - 1) / CHUNK, end = chunks * (i + 1) / count * CHUNK;
    const part found = {0, m, chunks * i / count * CHUNK, end < k ? end : k};
    return found;
}

/* Panel `i` of up to `most` rows. */
INLINE part part_of_panels(Py_ssize_t m, Py_ssize_t k, Py_ssize_t i, Py_ssize_t most)
{
    const Py_ssize_t panels = (m + most - 1) / most;
    part found = {0, 0, 0, k};
    for (Py_ssize_t j = 0; j <= i; j++) {
        found.row += found.rows;
        found.rows = height_of(m, found.row, panels, j);
    }
    return found;
}

/* Chunk by chunk, in `order`, or their own where it is NULL: for codes decoded in registers. */
OUTLINE void pack_chunks(const float *x, Py_ssize_t m, Py_ssize_t k, part part, const uint8_t *order, float *to)
{
    to += part.column * m;
    for (Py_ssize_t c = part.column; c < part.end; c += CHUNK)
        for (Py_ssize_t r = 0; r < m; r++, to += CHUNK) {
            const float *from = x + r * k + c;
            const Py_ssize_t left = k - c;
            float last[CHUNK] = {0};
            if (left < CHUNK) {
                memcpy(last, from, 4 * (size_t)left);
                from = last;
            }
            if (order)
                for (int i = 0; i < CHUNK; i++)
                    to[i] = from[order[i]];
            else
                memcpy(to, from, 4 * CHUNK);
        }
}

/* A panel, k by k: for tiles. */
OUTLINE void pack_panel(const float *x, Py_ssize_t k, part part, float *to)
{
    const Py_ssize_t now = part.rows, length = (k + CHUNK - 1) / CHUNK * CHUNK;
    to += part.row * length;
    for (Py_ssize_t start = 0; start < k; start += 16) { /* a cache line of each row at a time */
        const Py_ssize_t stop = start + 16 < k ? start + 16 : k;
        for (Py_ssize_t r = 0; r < now; r++)
            for (Py_ssize_t j = start; j < stop; j++)
                to[j * now + r] = x[(part.row + r) * k + j];
    }
    memset(to + k * now, 0, 4 * (size_t)((length - k) * now));
}

/* ------------------------------------------------------------------------------------------------ versions */

/* The functions for one instruction set. streams: whether codes are decoded in registers. */
typedef struct {
    const char *name;
    /* Rows of a product: streams, weight, workspace, packed activations, m, first row, end, product. */
    int (*rows)(int, const weight *, const workspace *, const float *, Py_ssize_t, Py_ssize_t, Py_ssize_t, float *);
    /* Pack a part of activations: streams, weight, activations, m, part, where to. */
    void (*pack)(int, const weight *, const float *, Py_ssize_t, part, float *);
    /* The most rows of activations for which codes are decoded in registers; of a panel, where they are not. */
    Py_ssize_t (*most_streams)(const weight *);
    Py_ssize_t tallest;
    float (*lift)(int); /* what values of codes of a kind have to be multiplied by, before scales: a power of two */
    widener widen;
    int short_blocks; /* whether its streams take short blocks one at a time, of narrow codes as they are stored for one row */
} version;

INLINE int streams_of(const version *v, const weight *w, Py_ssize_t m)
{
    return m <= v->most_streams(w);
}

/* In how many parts m rows of activations are packed, and one of them. */
INLINE Py_ssize_t parts_of(const version *v, const weight *w, Py_ssize_t m)
{
    const Py_ssize_t chunks = (w->k + CHUNK - 1) / CHUNK;
    if (streams_of(v, w, m))
        return m < chunks ? m : chunks;
    return (m + v->tallest - 1) / v->tallest;
}

INLINE part part_of(const version *v, const weight *w, Py_ssize_t m, Py_ssize_t i)
{
    return streams_of(v, w, m) ? part_of_chunks(m, w->k, i, parts_of(v, w, m)) : part_of_panels(m, w->k, i, v->tallest);
}

#endif
