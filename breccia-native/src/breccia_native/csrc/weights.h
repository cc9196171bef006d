/* Quantized weights: how their numbers are encoded, their scales, and the rows that a thread multiplies. */

#ifndef BRECCIA_WEIGHTS_H
#define BRECCIA_WEIGHTS_H

#include "bits.h"
#include "codes_in_words.h"
#include "instructions.h"

#define UNROLL _Pragma("GCC unroll 16")
/* Of loops that unrolling would only make longer. */
#define ONE_BY_ONE _Pragma("GCC unroll 1")

enum {
    CHUNK = 128,       /* codes of a row that are decoded together */
    SPAN = 8,          /* codes with one scale, unless blocks are no multiple of it */
    SPANS = CHUNK / SPAN,
    ROWS = 4,          /* rows of the weight that are multiplied together from registers */
    DEPTH = 2,         /* chunks of a tile */
    BETWEEN = 16,      /* FP32 words at most between the scales of two rows */
    CLAIM = 32,        /* rows of the weight that a thread takes at a time: one tile, or several */
    SCALES = 512,     /* scales that are read together for streams, which should stay in the L1 cache */
};

/* Limits of activations, and of scales before and after the factor (see above). */
#define MOST_X 0x1p100f
#define MOST_STORED 0x1p100f
#define MOST_SCALE 0x1p24f

/* How stored numbers are encoded: elements, scales and offsets. */
enum { TABLE4, TABLE8, E4M3, E5M2, E2M3, E3M2, I8, U8, E8M0, F16, BF16, F32, KINDS };
static const char *const kind_names[KINDS] = {
    "table4", "table8", "e4m3", "e5m2", "e2m3", "e3m2", "i8", "u8", "e8m0", "f16", "bf16", "f32"};
static const int kind_bits[KINDS] = {4, 8, 8, 8, 6, 6, 8, 8, 8, 16, 16, 32};

/* Whether codes of a kind may be stored in that many bits. */
INLINE int is_width(int width, int kind)
{
    return width == kind_bits[kind] || (width > 0 && width < kind_bits[kind] && (kind <= TABLE8 || kind == I8 || kind == U8));
}

/* What an offset is: none, a zero-point subtracted from codes, or a bias added to scaled codes. */
enum { NONE, ZERO_POINT, BIAS, ROLES };

typedef struct {
    int kind;
    const uint8_t *items;
    const float *table; /* the value of each code, for TABLE4 and TABLE8 */
    coding codes;       /* of scales and offsets */
} numbers;

/* Bytes of rows of `n` scales or offsets. */
INLINE Py_ssize_t bytes_of_scales(const numbers *a, Py_ssize_t n)
{
    const coding *const c = &a->codes;
    return c->bits ? n / c->blocks * ((c->blocks + c->each - 1) / c->each) * c->bytes : n * kind_bits[a->kind] / 8;
}

typedef struct weight weight;

/* Makes the codes of a kind from those of a row that are stored in fewer bits, up to the end of the last chunk. */
typedef void (*widener)(const weight *, const uint8_t *, uint8_t *);

struct weight {
    numbers codes, scale, offset;
    int role;
    int width;         /* bits of a stored code: those of its kind, or fewer, which `widen` then widens */
    widener widen;     /* NULL where nothing has to be widened */
    Py_ssize_t n, k, row_bytes;
    Py_ssize_t block;  /* codes with one stored scale */
    Py_ssize_t groups; /* stored scales of a row */
    Py_ssize_t tall;   /* rows that share their scales */
    Py_ssize_t span;   /* codes with one scale once scales are spread: SPAN, or 1 */
    int narrow;        /* whether streams of short blocks take codes as they are stored, in fewer bits than those of their kind */
    int short_block;   /* codes of a short block, where streams take them one at a time; else 0 */
    int divides;       /* whether stored scales are divisors */
    float factor;      /* times each scale */
    float least;       /* the smallest scale, other than 0 */
};

typedef float f4 __attribute__((vector_size(16)));

/* -------------------------------------------------------------------------------------------------- numbers */

/* Each of these is exact, and none goes through subnormal FP32 numbers, which a process may have chosen to flush. */

INLINE float of_half(uint32_t h)
{
    const int32_t e = (h >> 10) & 31, m = h & 1023;
    const float y = (float)(e ? m | 1024 : m) * float_of((uint32_t)((e ? e : 1) + 102) << 23);
    return float_of((e == 31 ? 0x7f800000 | (uint32_t)m << 13 : bits_of(y)) | (h & 0x8000) << 16);
}

INLINE float of_e4m3(uint32_t b)
{
    const int32_t e = (b >> 3) & 15, m = b & 7;
    const float y = (float)(e ? m | 8 : m) * float_of((uint32_t)((e ? e : 1) + 117) << 23);
    return float_of((b & 127) == 127 ? 0x7fc00000 : bits_of(y) | (b & 128) << 24);
}

/* 6-bit numbers in the high bits of a byte. */
INLINE float of_e2m3(uint32_t b)
{
    const int32_t e = (b >> 5) & 3, m = (b >> 2) & 7;
    const float y = (float)(e ? m | 8 : m) * float_of((uint32_t)((e ? e : 1) + 123) << 23);
    return float_of(bits_of(y) | (b & 128) << 24);
}

INLINE float of_e3m2(uint32_t b)
{
    const int32_t e = (b >> 4) & 7, m = (b >> 2) & 3;
    const float y = (float)(e ? m | 4 : m) * float_of((uint32_t)((e ? e : 1) + 122) << 23);
    return float_of(bits_of(y) | (b & 128) << 24);
}

INLINE float of_e8m0(uint32_t b)
{
    return float_of(b == 0 ? 0x00400000 : b == 255 ? 0x7fc00000 : b << 23);
}

/* Items `start` to `start + n` in FP32, in their own order. 6-bit numbers are one a byte (see `expanded`). */
INLINE void decoded(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    const int bits = kind_bits[a->kind];
    const uint8_t *b = a->items + start * (bits == 6 ? 8 : bits) / 8;
    const float *table = a->table;
    uint16_t h;
    switch (a->kind) {
    case TABLE4:
        for (Py_ssize_t i = 0; i < n / 2; i++) { /* both codes of a byte */
            y[2 * i] = table[b[i] & 15];
            y[2 * i + 1] = table[b[i] >> 4];
        }
        if (n & 1)
            y[n - 1] = table[b[n / 2] & 15];
        break;
    case TABLE8:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = table[b[i]];
        break;
    case E4M3:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = of_e4m3(b[i]);
        break;
    case E5M2:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = of_half((uint32_t)b[i] << 8);
        break;
    case E2M3:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = of_e2m3(b[i]);
        break;
    case E3M2:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = of_e3m2(b[i]);
        break;
    case I8:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = (float)(int8_t)b[i];
        break;
    case U8:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = (float)b[i];
        break;
    case E8M0:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = of_e8m0(b[i]);
        break;
    case F16:
        for (Py_ssize_t i = 0; i < n; i++) {
            memcpy(&h, b + 2 * i, 2);
            y[i] = of_half(h);
        }
        break;
    case BF16:
        for (Py_ssize_t i = 0; i < n; i++) {
            memcpy(&h, b + 2 * i, 2);
            y[i] = float_of((uint32_t)h << 16);
        }
        break;
    default: memcpy(y, b, 4 * (size_t)n);
    }
}

INLINE float float_at(int kind, const uint8_t *at)
{
    uint32_t u = 0;
    memcpy(&u, at, kind == F32 ? 4 : 2);
    return kind == F32 ? float_of(u) : kind == F16 ? of_half(u) : float_of(u << 16);
}

/* Scales `start` to `start + n`, which are those of whole rows, from records of floats of `kind` (see `coding`). */
INLINE void decode_records(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y, const spreader spread)
{
    const coding c = a->codes;
    const uint8_t *record = a->items + bytes_of_scales(a, start);
    for (const float *const last = y + n; y < last;)
        for (Py_ssize_t left = c.blocks; left > 0; left -= c.each, record += c.bytes) {
            const uint8_t *at = record + kind_bits[a->kind] / 8;
            const float base = float_at(a->kind, record);
            float some[8];
            for (Py_ssize_t i = left < c.each ? left : c.each; i > 0; i -= 8, at += c.bits) {
                const uint64_t u = eight_codes(record, at, record + c.bytes, c.bits, spread);
                uint8_t codes[8];
                memcpy(codes, &u, 8);
                float *const to = i < 8 ? some : y;
                for (int j = 0; j < 8; j++)
                    to[j] = (float)((codes[j] ^ c.flip) - c.flip) * base;
                if (i < 8)
                    memcpy(y, some, 4 * (size_t)i);
                y += i < 8 ? i : 8;
            }
        }
}

OUTLINE void records_decoded(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    decode_records(a, start, n, y, spread_codes);
}

/* `decoded`, for scales and offsets. */
INLINE void scales_decoded(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    if (a->codes.bits)
        records_decoded(a, start, n, y);
    else
        decoded(a, start, n, y);
}

/* Likewise, of a kind that is not known when this is compiled. */
OUTLINE void decode_numbers(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    decoded(a, start, n, y);
}

/* -------------------------------------------------------------------------------------------------- scales */

/* Each of `run`, `each` times. */
INLINE void repeated(const float *run, Py_ssize_t n, const Py_ssize_t each, float *to)
{
    for (Py_ssize_t g = 0; g < n; g++)
        for (Py_ssize_t i = 0; i < each; i++)
            to[g * each + i] = run[g];
}

/* The most codes that have one scale wherever a chunk is cut into spans of as many: a power of two from SPAN to CHUNK. */
INLINE Py_ssize_t longest_span(const weight *w)
{
    Py_ssize_t span = CHUNK;
    while (w->groups > 1 && w->block % span)
        span /= 2;
    return span;
}

/* The codes that streams of short blocks decode with one scale: 32 or 16, where rows are whole blocks of them; else 0. Longer
   blocks, and scales that are kept as words, have streams of chunks; so have 4-bit codes without offsets in whole chunks, which
   take a tenth less then, unless they are stored in fewer bits. */
INLINE int short_block_of(const weight *w)
{
    const int kind = w->codes.kind, words = w->scale.kind == E8M0 || w->scale.kind == E4M3;
    const int chunks = kind == TABLE4 && (words || (w->role == NONE && w->k % CHUNK == 0 && w->width == 4));
    if (w->groups == 1 || w->block % 16 || w->block % CHUNK == 0 || w->k % 16 || chunks)
        return 0;
    return kind != TABLE4 && kind != I8 && kind != U8 ? 0 : w->block % 32 || w->k % 32 ? 16 : 32;
}

/* Codes with one scale in streams. */
INLINE Py_ssize_t span_in_streams(const weight *w)
{
    return w->short_block ? w->short_block : longest_span(w);
}

/* Rows of the weight whose scales are read together for streams. */
INLINE Py_ssize_t rows_of_scales(const weight *w)
{
    const Py_ssize_t rows = SCALES / w->groups / ROWS * ROWS;
    return rows < ROWS ? ROWS : rows < CLAIM ? rows : CLAIM;
}

/* Scales of a row once they are spread: up to the end of the last chunk, but for streams of short blocks. */
INLINE Py_ssize_t spans_of_row(const weight *w, Py_ssize_t span)
{
    return w->short_block ? w->k / span : (w->k + CHUNK - 1) / CHUNK * (CHUNK / span);
}

/* `to` = each of `run` for as many spans as a block has; the last one up to the chunk's end, where activations are 0. */
INLINE void spread(const weight *w, Py_ssize_t span, const float *run, float *to)
{
    const int bits = __builtin_ctz((unsigned)span); /* divisions would take as long as the rest */
    const Py_ssize_t end = spans_of_row(w, span), each = w->groups == 1 ? end : w->block >> bits;
    const Py_ssize_t whole = each * w->groups <= end ? w->groups : end / each;
    const float last = run[whole < w->groups ? whole : w->groups - 1];
    switch (each) {
    case 1:
        if (to != run)
            memcpy(to, run, 4 * (size_t)whole);
        break;
    case 2: repeated(run, whole, 2, to); break;
    case 4: repeated(run, whole, 4, to); break;
    case 16: repeated(run, whole, 16, to); break;
    default: repeated(run, whole, each, to);
    }
    for (Py_ssize_t i = whole * each; i < end; i++)
        to[i] = last;
}

/* Whether magnitudes are at most `most`, and at least `least` or 0; NaN is. */
INLINE int within(const float *y, Py_ssize_t n, float most, float least)
{
    const int32_t top = (int32_t)bits_of(most), bottom = (int32_t)bits_of(least);
    int32_t beyond = 0; /* the sign says whether; integers, since comparisons of floats are slow to combine */
    for (Py_ssize_t i = 0; !bottom && i < n; i++)
        beyond |= top - (int32_t)(bits_of(y[i]) & 0x7fffffff);
    for (Py_ssize_t i = 0; bottom && i < n; i++) {
        const int32_t a = (int32_t)(bits_of(y[i]) & 0x7fffffff);
        beyond |= (top - a) | ((a - bottom) & ~(a - 1));
    }
    if (beyond >= 0)
        return 1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (fabsf(y[i]) > most || (y[i] != 0 && fabsf(y[i]) < least))
            return 0;
    return 1;
}

typedef void (*decoder)(const numbers *, Py_ssize_t, Py_ssize_t, float *);

/* Stored scales `first` to `first + n`, times the factor. Returns whether they are within the limits. */
INLINE int read_scales(const weight *w, Py_ssize_t first, Py_ssize_t n, const decoder read, float *found)
{
    const float factor = w->factor, size = fabsf(factor);
    const int kind = w->scale.kind, narrow = kind == E4M3 || kind == E5M2 || kind == F16; /* 0, or from 2^-24 to 2^16 */
    /* Then no product by the factor is beyond the limits. */
    const int known = narrow && !w->divides && size >= 0x1p-60f && size <= 0x1p8f;
    int fine = 1;
    read(&w->scale, first, n, found);
    if (factor != 1 && !narrow)
        fine = within(found, n, MOST_STORED, w->least);
    if (w->divides)
        for (Py_ssize_t g = 0; g < n; g++)
            found[g] = 1 / found[g];
    if (factor != 1)
        for (Py_ssize_t g = 0; g < n; g++)
            found[g] *= factor;
    return fine && (known || within(found, n, MOST_SCALE, w->least));
}

/* Likewise, offsets. */
INLINE int read_offsets(const weight *w, Py_ssize_t first, Py_ssize_t n, const decoder read, float *found)
{
    read(&w->offset, first, n, found);
    return within(found, n, MOST_STORED, 0);
}

/* The scales and offsets of a row of scales, one for each `span` codes. Returns whether they are within the limits. */
INLINE int spread_scales(
    const weight *w, Py_ssize_t span, Py_ssize_t row, const decoder read, float *run, float *scales, float *offsets)
{
    const Py_ssize_t groups = w->groups;
    float *found = span == w->block && groups > 1 ? scales : run; /* then each is spread to one place */
    int fine = read_scales(w, row * groups, groups, read, found);
    spread(w, span, found, scales);
    if (w->role != NONE) {
        fine = fine && read_offsets(w, row * groups, groups, read, run);
        spread(w, span, run, offsets);
    }
    return fine;
}

/* -------------------------------------------------------------------------------------------------- a thread's work */

/* Rows of a weight that are multiplied together, fewer at the end of the weight: the last one is then repeated. */
typedef struct {
    Py_ssize_t whole, chunks;       /* chunks without, and with, a partial one at the end */
    Py_ssize_t bytes;               /* of a whole chunk of codes */
    Py_ssize_t ahead;               /* how far to prefetch */
    Py_ssize_t spans;               /* of a chunk */
    Py_ssize_t apart;               /* FP32 words from the scales of a row to those of the next */
    int words;                      /* whether scales are BF16 words without the factor, one for each block (see `words_of`) */
    const uint8_t *codes[CLAIM];
    const float *scales[CLAIM], *offsets[CLAIM];
    uint8_t rest[CLAIM][CHUNK];     /* codes of the partial chunk, then zeros */
} panel;

/* Memory of one thread. */
typedef struct {
    void *memory;
    float *run, *scales, *offsets, *sums, *tile;
    uint8_t *codes; /* widened codes of rows that are multiplied together */
} workspace;

/* 6-bit codes of a chunk, four in three bytes, one a byte: in its high bits. */
OUTLINE void expanded(const uint8_t *from, uint8_t *to)
{
    for (int i = 0; i < CHUNK; i += 4, from += 3, to += 4) {
        const uint32_t u = from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16;
        to[0] = (uint8_t)(u << 2);
        to[1] = (uint8_t)(u >> 4 & 0xfc);
        to[2] = (uint8_t)(u >> 10 & 0xfc);
        to[3] = (uint8_t)(u >> 16 & 0xfc);
    }
}

/* Bytes of a row of codes in whole chunks, each of the bits of its kind. */
INLINE Py_ssize_t row_of_chunks(const weight *w)
{
    return (w->k + CHUNK - 1) / CHUNK * (CHUNK * kind_bits[w->codes.kind] / 8);
}

/* The `widener`. `spread(u, width, bits)`: the codes in the low bits of a word, one to `bits` bits each. */
INLINE void widen_codes(const weight *w, const uint8_t *from, uint8_t *to, const spreader spread)
{
    const int bits = kind_bits[w->codes.kind], each = 8 * w->width / bits, is_signed = w->codes.kind == I8;
    const uint64_t top = 0x0101010101010101u << (w->width - 1), rest = ((uint64_t)2 << (8 - w->width)) - 2; /* bits above the top one */
    const uint8_t *const end = from + w->row_bytes;
    uint8_t *const stop = to + row_of_chunks(w);
    for (; from < end; from += each, to += 8) {
        uint64_t u = 0;
        if (end - from >= 8)
            memcpy(&u, from, 8);
        else
            memcpy(&u, from, (size_t)(end - from));
        u = spread(u, w->width, bits);
        u |= is_signed ? (u & top) * rest : 0;
        memcpy(to, &u, 8);
    }
    memset(to, 0, (size_t)(stop - to));
}

/* The codes of a chunk, as they are stored or widened. */
INLINE const uint8_t *codes_of(const panel *p, int r, Py_ssize_t chunk)
{
    return chunk < p->whole ? p->codes[r] + chunk * p->bytes : p->rest[r];
}

/* The row of scales of a row. */
INLINE Py_ssize_t scale_row(const weight *w, Py_ssize_t row)
{
    return w->tall == 1 ? row : row / w->tall;
}

/* Begin a panel whose rows have a scale for every `span` codes, and `between` FP32 words between the scales of two rows. */
INLINE void begin_panel(const weight *w, Py_ssize_t span, Py_ssize_t between, panel *p)
{
    p->bytes = CHUNK * kind_bits[w->codes.kind] / 8;
    p->whole = w->row_bytes / p->bytes;
    p->chunks = (w->k + CHUNK - 1) / CHUNK;
    p->spans = CHUNK / span;
    p->apart = spans_of_row(w, span) + between;
    p->ahead = 0;
    p->words = 0;
}

/* Fill `p` with `count` rows from `first` on, whose scales have been spread from row `base` on. */
INLINE void fill(
    const weight *w, const workspace *to, Py_ssize_t base, Py_ssize_t first, Py_ssize_t end, const int count, panel *p)
{
    const Py_ssize_t rest = w->widen ? 0 : w->row_bytes - p->whole * p->bytes;
    if (w->widen)
        p->whole = p->chunks;
    for (int r = 0; r < count; r++) {
        const Py_ssize_t row = first + r < end ? first + r : end - 1, slot = scale_row(w, row) - scale_row(w, base);
        p->codes[r] = w->codes.items + row * w->row_bytes;
        p->scales[r] = to->scales + slot * p->apart;
        p->offsets[r] = to->offsets + slot * p->apart;
        if (w->widen) {
            uint8_t *codes = to->codes + r * row_of_chunks(w);
            w->widen(w, p->codes[r], codes);
            p->codes[r] = codes;
        }
        if (rest) {
            memset(p->rest[r], 0, sizeof p->rest[r]);
            memcpy(p->rest[r], p->codes[r] + p->whole * p->bytes, (size_t)rest);
        }
    }
}

/* Whether a chunk has one scale and one offset. */
INLINE int uniform(const weight *w)
{
    return w->groups == 1 || w->block % CHUNK == 0;
}

#endif
