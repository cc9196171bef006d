/* Products of activations that are rounded first: to INT8 codes with a scale for each group, or to BF16.

   A group has q codes of a row: as many as share a scale, 128 at most. Within a group, codes and activations are multiplied
   exactly (integers), or products of BF16 are added in FP32; the group's sum is then multiplied by its scales and added in
   FP32. Codes are kept as they are stored, so they have to be integers times a power of two, or BF16 numbers.

   As in tiles.h, a tile has NR rows of the weight side by side, here as words of `per` codes. */

#ifndef BRECCIA_MODES_H
#define BRECCIA_MODES_H

#include "tiles.h"

enum { FP32_MODE, INT8_MODE, BF16_MODE, MODES };

/* Rows and chunks of a tile, and the most rows of a panel of activations. */
enum { WIDE = 32, DEEP = 4, TALLEST = 12 };

/* Activations of groups below this count as zero, where they are rounded to INT8. */
#define LEAST_AMAX 0x1p-100f
/* The smallest BF16 number other than zero: products of larger ones, and their sums, are not subnormal. And the smallest FP32
   number that is multiplied in parts (see bf16_amx.c), the last of which is 2^-23 of it or more. */
#define LEAST_BF16 0x1p-60f
#define LEAST_OF_PARTS 0x1p-46f

/* How codes of a kind are multiplied. */
typedef struct {
    int mode, per;      /* per: codes of a word */
    int parts;          /* BF16 numbers that an activation is the sum of: 1 where it is rounded */
    Py_ssize_t q;       /* codes of a group */
    uint8_t bytes[16];  /* INT8, 4-bit codes: the value times `unit`, plus `shift` */
    int shift;          /* what the bytes of all codes are too large by */
    float unit;
    int nibbles;        /* of int8_few.c: whether a byte has two codes */
} grouping;

/* A tile: (CHUNK * DEEP / per, WIDE) words of codes, then (groups, WIDE) scales, and zero-points or biases. */
typedef struct {
    uint32_t *codes;
    float *scales, *offsets; /* offsets: NULL where there are none, and where codes have been decoded without them */
    int biased;              /* whether they are biases */
} group_tile;

typedef struct {
    const uint32_t *codes;
    const float *scales, *sums; /* of the activations of each group; the sums of their codes */
    const int32_t *starts;      /* what its codes' excess takes from a group's sum (see `grouping`) */
} group_x;

typedef void (*group_micro)(const grouping *, const group_tile *, const group_x *, Py_ssize_t, float *);
typedef void (*group_tiler)(const weight *, const grouping *, const panel *, Py_ssize_t, Py_ssize_t, const group_tile *);

/* Words of packed activations of one row of `length` codes: codes, and for INT8 scales, sums and starts. */
INLINE Py_ssize_t words_of(const grouping *g, Py_ssize_t length)
{
    return length / g->per * g->parts + (g->mode == INT8_MODE ? 3 * (length / g->q) : 0);
}

/* The most rows of activations that int8_few.c multiplies; and the words of one: codes, what lanes start with, scales, and sums. */
enum { FEW_ROWS = 4 };

INLINE Py_ssize_t words_of_few(const grouping *g, Py_ssize_t length)
{
    return length / 2 + 2 * (length / g->q);
}

/* Where the codes of a panel of `rows` rows are, from chunk `c` on. */
INLINE group_x activations(const grouping *g, const float *panel, Py_ssize_t rows, Py_ssize_t length, Py_ssize_t c)
{
    const float *scales = panel + length / g->per * rows, *sums = scales + length / g->q * rows;
    const int32_t *starts = (const int32_t *)sums + length / g->q * rows;
    const Py_ssize_t group = c * CHUNK / g->q * rows;
    const group_x x = {(const uint32_t *)panel + c * CHUNK / g->per * rows, scales + group, sums + group, starts + group};
    return x;
}

/* The codes of a group. */
INLINE Py_ssize_t group_of(Py_ssize_t block, Py_ssize_t k)
{
    Py_ssize_t q = CHUNK;
    while (block < k && block % q)
        q /= 2;
    return q;
}

/* Fill `g`. Returns whether codes of this kind can be multiplied in this mode. */
OUTLINE int grouped(grouping *g, int mode, int kind, const float *table, Py_ssize_t block, Py_ssize_t k)
{
    g->mode = mode;
    g->per = mode == INT8_MODE ? 4 : 2;
    g->parts = 1;
    g->shift = g->nibbles = 0;
    g->unit = 1;
    g->q = group_of(block, k);
    if (g->q < SPAN)
        return 0;
    if (mode == BF16_MODE) {
        if (kind == TABLE4)
            for (int i = 0; i < 16; i++)
                if (bits_of(table[i]) & 0xffff)
                    return 0;
        return kind != TABLE8 && kind <= U8;
    }
    if (kind == I8 || kind == U8) {
        g->shift = kind == I8 ? 128 : 0;
        return 1;
    }
    if (kind != TABLE4)
        return 0;
    for (g->unit = 1; g->unit <= 16; g->unit *= 2) {
        float least = 0, most = 0;
        int whole = 1;
        for (int i = 0; i < 16; i++) {
            const float v = table[i] * g->unit;
            if (!(v >= -127 && v <= 127))
                return 0;
            whole &= v == (float)(int)v;
            least = v < least ? v : least;
            most = v > most ? v : most;
        }
        if (!whole)
            continue;
        g->shift = (int)-least;
        for (int i = 0; i < 16; i++)
            g->bytes[i] = (uint8_t)((int)(table[i] * g->unit) + g->shift);
        return 1;
    }
    return 0;
}

/* Whether differences of codes and zero-points are exact in a mode, for weight rows `first` to `end`: those of 4-bit codes in
   BF16 where both are from 0 to 15. */
OUTLINE int differences_are_exact(const weight *w, int mode, Py_ssize_t first, Py_ssize_t end)
{
    if (mode != BF16_MODE || w->role != ZERO_POINT || w->codes.kind != TABLE4)
        return 1;
    const uint8_t *bytes = w->offset.items + first / w->tall * w->groups;
    const Py_ssize_t count = ((end - 1) / w->tall - first / w->tall + 1) * w->groups;
    int fine = w->offset.kind == U8 || w->offset.kind == I8;
    for (int i = 0; i < 1 << w->width; i++)
        fine &= w->codes.table[i] == (float)i;
    uint8_t all = 0;
    for (Py_ssize_t i = 0; fine && i < count; i++)
        all |= bytes[i];
    return fine && all < 16;
}

/* ------------------------------------------------------------------------------------------------ activations */

/* The code at place i of words of 8 codes. INT8: those of 4 bits are taken apart into the even and the odd ones. BF16: each
   word has codes of both halves of 4 bytes of codes. */
INLINE int code_of(int mode, int kind, int i)
{
    if (mode == INT8_MODE)
        return kind == TABLE4 ? i % 4 * 2 + i / 4 : i;
    return kind == TABLE4 ? i / 2 + i % 2 * 4 : i / 4 * 4 + i % 4 / 2 + i % 2 * 2;
}

INLINE uint32_t bf16_of(float y)
{
    const uint32_t u = bits_of(y);
    return (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

/* To nearest, ties to even. */
INLINE int32_t nearest(float y)
{
#if defined(__clang__)
    return (int32_t)lrintf(y);
#else
    return __builtin_irintf(y); /* of whole vectors, too */
#endif
}

/* Round `n` numbers to INT8 codes. Returns the scale: NaN where one is not finite. */
INLINE float rounded(const float *x, const Py_ssize_t n, int8_t *codes, float *sum)
{
    int32_t most = 0, all = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int32_t u = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        most = u > most ? u : most;
    }
    const float amax = float_of((uint32_t)most);
    *sum = 0;
    if (!(amax >= LEAST_AMAX && most < 0x7f800000)) {
        for (Py_ssize_t i = 0; i < n; i++)
            codes[i] = 0;
        return most < 0x7f800000 ? 0 : float_of(0x7fc00000);
    }
    const float inverse = 127 / amax;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int32_t code = nearest(x[i] * inverse);
        codes[i] = (int8_t)code;
        all += code;
    }
    *sum = (float)all;
    return amax / 127;
}

/* Groups of one row of a panel of `rows`, of q numbers, from number `first` to `last`, of which `left` are in x. */
INLINE void pack_row(const int mode, const grouping *g, const Py_ssize_t q, int kind, const float *x, Py_ssize_t left, Py_ssize_t rows,
    Py_ssize_t first, Py_ssize_t last, uint32_t *words, float *scales, float *sums, int32_t *starts)
{
    for (Py_ssize_t start = first; start < last; start += q) {
        float rest[CHUNK] = {0};
        const float *from = x + start;
        if (start + q > left) {
            if (start < left)
                memcpy(rest, from, 4 * (size_t)(left - start));
            from = rest;
        }
        if (mode == INT8_MODE) {
            int8_t codes[CHUNK], moved[CHUNK];
            scales[start / q * rows] = rounded(from, q, codes, &sums[start / q * rows]);
            starts[start / q * rows] = -g->shift * (int32_t)sums[start / q * rows];
            for (Py_ssize_t j = 0; j < q; j++)
                moved[j] = codes[j / 8 * 8 + code_of(INT8_MODE, kind, (int)(j % 8))];
            for (Py_ssize_t j = 0; j < q / 4; j++)
                memcpy(words + (start / 4 + j) * rows, moved + 4 * j, 4);
        } else {
            uint32_t bits[CHUNK];
            for (Py_ssize_t j = 0; j < q; j++)
                bits[j] = bf16_of(from[j]);
            const int half = kind == TABLE4 ? 4 : 2; /* see `code_of` */
            uint32_t *to = words + start / 2 * rows;
            for (Py_ssize_t j = 0; j < q; j += 2 * half)
                for (int i = 0; i < half; i++, to += rows)
                    *to = bits[j + i] | bits[j + half + i] << 16;
        }
    }
}

/* Some chunks of a panel of up to TALLEST rows, word by word. */
INLINE void pack_groups_of(const int mode, const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    const Py_ssize_t length = (k + CHUNK - 1) / CHUNK * CHUNK, now = part.rows;
    const Py_ssize_t begin = part.column, end = part.end < k ? part.end : length;
    to += part.row * words_of(g, length);
    x += part.row * k;
    float *scales = to + length / g->per * now, *sums = scales + length / g->q * now;
    int32_t *starts = (int32_t *)sums + length / g->q * now;
    for (Py_ssize_t r = 0; r < now; r++, x += k) {
        uint32_t *words = (uint32_t *)to + r;
        if (g->q == 128)
            pack_row(mode, g, 128, kind, x, k, now, begin, end, words, scales + r, sums + r, starts + r);
        else if (g->q == 32)
            pack_row(mode, g, 32, kind, x, k, now, begin, end, words, scales + r, sums + r, starts + r);
        else if (g->q == 16)
            pack_row(mode, g, 16, kind, x, k, now, begin, end, words, scales + r, sums + r, starts + r);
        else
            pack_row(mode, g, g->q, kind, x, k, now, begin, end, words, scales + r, sums + r, starts + r);
    }
}

/* ------------------------------------------------------------------------------------------------ rows of a product */

/* Rows `first` to `end` of a product. Returns 0 where scales are beyond the limits. `tallest`: as in the packed activations. */
OUTLINE int rows_by_groups(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    Py_ssize_t tallest, Py_ssize_t first, Py_ssize_t end, float *y, group_tiler decode, const group_micro *micros)
{
    panel p;
    begin_panel(w, SPAN, BETWEEN, &p);
    const Py_ssize_t each = p.apart, length = p.chunks * CHUNK, panels = (m + tallest - 1) / tallest;
    const Py_ssize_t most = DEEP * CHUNK / g->q * WIDE;
    const group_tile tile = {(uint32_t *)to->tile, to->tile + DEEP * CHUNK / g->per * WIDE,
        w->role != NONE && g->mode == INT8_MODE ? to->tile + DEEP * CHUNK / g->per * WIDE + most : NULL, w->role == BIAS};
    for (Py_ssize_t row = first / w->tall, slot = 0; row * w->tall < end; row++, slot++)
        if (!spread_scales(w, SPAN, row, scales_decoded, to->run, to->scales + slot * each, to->offsets + slot * each))
            return 0;
    fill(w, to, first, first, end, WIDE, &p);
    memset(to->sums, 0, 4 * (size_t)(m * WIDE));
    for (Py_ssize_t c = 0; c < p.chunks; c += DEEP) {
        const Py_ssize_t chunks = p.chunks - c < DEEP ? p.chunks - c : DEEP;
        decode(w, g, &p, c, chunks, &tile);
        for (Py_ssize_t i = 0, done = 0; i < panels; i++) {
            const Py_ssize_t now = height_of(m, done, panels, i);
            const group_x panel = activations(g, x + done * words_of(g, length), now, length, c);
            micros[now](g, &tile, &panel, chunks * CHUNK / g->q, to->sums + done * WIDE);
            done += now;
        }
    }
    for (Py_ssize_t i = 0; i < m; i++)
        memcpy(y + i * w->n + first, to->sums + i * WIDE, 4 * (size_t)(end - first));
    return 1;
}

typedef void (*group_stream)(const weight *, const grouping *, const panel *, const float *, float *);

/* `rows_by_groups` without tiles: `streams` transpose and decode the codes of `together` rows, 16 at most, in registers for each
   panel of activations. */
INLINE int rows_from_registers(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    const Py_ssize_t tallest, const int together, Py_ssize_t first, Py_ssize_t end, float *y, const scaler scales,
    const group_stream *streams)
{
    panel p;
    begin_panel(w, g->q, 0, &p);
    const Py_ssize_t panels = (m + tallest - 1) / tallest;
    for (Py_ssize_t n = first; n < end; n += together) {
        const Py_ssize_t stop = n + together < end ? n + together : end;
        if (!scales(w, to, n, stop, g->q, 0, &p))
            return 0;
        fill(w, to, n, n, stop, together, &p);
        for (Py_ssize_t i = 0, done = 0; i < panels; i++) {
            const Py_ssize_t now = height_of(m, done, panels, i);
            float sums[TALLEST * 16];
            streams[now](w, g, &p, x + done * words_of(g, p.chunks * CHUNK), sums);
            for (Py_ssize_t j = 0; j < now; j++)
                memcpy(y + (done + j) * w->n + n, sums + j * together, 4 * (size_t)(stop - n));
            done += now;
        }
    }
    return 1;
}

/* ------------------------------------------------------------------------------------------------ versions */

/* One function for each height of a panel. */
#define UP_TO_TALLEST(macro) \
    macro(1) macro(2) macro(3) macro(4) macro(5) macro(6) macro(7) macro(8) macro(9) macro(10) macro(11) macro(12)
#define LIST_OF(name) \
    {NULL, name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8, name##9, name##10, name##11, name##12}

typedef int (*group_rows)(
    const weight *, const grouping *, const workspace *, const float *, Py_ssize_t, Py_ssize_t, Py_ssize_t, float *);
typedef void (*group_packer)(const grouping *, int, const float *, Py_ssize_t, part, float *);

/* What multiplies in each mode but FP32. `fewest`: the fewest rows for which it is faster than FP32; NULL where the processor
   has no instructions for it. `tallest`: the most rows of a panel of activations. `tile`: FP32 words of decoded codes. `together`:
   the most rows of the weight that `rows` takes, for m rows of activations. */
typedef struct {
    group_packer pack;
    group_rows rows;
    float (*lift)(int);
    Py_ssize_t (*fewest)(const weight *);
    Py_ssize_t tallest;
    size_t tile;
    Py_ssize_t (*together)(Py_ssize_t);
} mode_version;

/* Of a tile in the L1 cache; INT8 codes have scales and zero-points of every SPAN codes at most. */
enum { TILE = CLAIM * DEEP * (CHUNK / 2 + 2 * SPANS) };

static inline Py_ssize_t one_claim(Py_ssize_t m)
{
    (void)m;
    return CLAIM;
}

static inline Py_ssize_t always(const weight *w)
{
    (void)w;
    return 1;
}

static inline float no_lift(int kind)
{
    (void)kind;
    return 1;
}

#endif
