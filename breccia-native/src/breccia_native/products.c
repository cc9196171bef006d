/* Products of FP32 activations and quantized weights, which are decoded in registers or in the L1 cache.

   A weight is (N, K) codes, with blocks along K. A row is taken in chunks of CHUNK codes. Its scales are first spread to one
   for each SPAN codes, so that the loops over codes know neither block sizes nor scale codecs. Activations are packed once per
   call, chunk by chunk, in the order in which a version decodes codes.

   Up to STREAMED rows of activations are multiplied by codes decoded in registers; more of them by tiles decoded into the L1
   cache. Every element of a product is summed by one thread in one order, so its bits do not depend on the number of threads.

   Scales may be applied to sums of a span: their roundings are fewer than the K that the error bound of docs/spec/numerics.md
   allows, where no sum overflows or underflows. `pack` and `multiply` return False for numbers beyond these limits. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__GNUC__)
#error "products.c needs the vector extensions of GCC or Clang"
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum {
    CHUNK = 128,       /* codes of a row that are decoded together */
    SPAN = 8,          /* codes with one scale */
    SPANS = CHUNK / SPAN,
    ROWS = 4,          /* rows of the weight that are multiplied together */
    DEPTH = 4,         /* chunks of a tile */
    TILE = DEPTH * CHUNK,
    CLAIM = 32,        /* rows that a thread takes at a time */
};

/* Limits of activations, and of scales before and after the factor (see above). */
#define MOST_X 0x1p100f
#define MOST_STORED 0x1p100f
#define MOST_SCALE 0x1p24f

/* How stored numbers are encoded: elements, scales and offsets. */
enum { TABLE4, TABLE8, E4M3, E5M2, I8, U8, E8M0, F16, BF16, F32, KINDS };
static const char *const kind_names[KINDS] = {"table4", "table8", "e4m3", "e5m2", "i8", "u8", "e8m0", "f16", "bf16", "f32"};
static const int kind_bits[KINDS] = {4, 8, 8, 8, 8, 8, 8, 16, 16, 32};

/* What an offset is: none, a zero-point subtracted from codes, or a bias added to scaled codes. */
enum { NONE, ZERO_POINT, BIAS, ROLES };

typedef struct {
    int kind;
    const uint8_t *items;
    const float *table; /* the value of each code, for TABLE4 and TABLE8 */
} numbers;

typedef struct {
    numbers codes, scale, offset;
    int role;
    Py_ssize_t n, k, row_bytes;
    Py_ssize_t block;  /* codes with one stored scale */
    Py_ssize_t groups; /* stored scales of a row */
    Py_ssize_t tall;   /* rows that share their scales */
    int divides;       /* whether stored scales are divisors */
    float factor;      /* times each scale */
    float least;       /* the smallest scale, other than 0 */
} weight;

typedef float f4 __attribute__((vector_size(16)));

INLINE uint32_t bits_of(float y)
{
    uint32_t u;
    memcpy(&u, &y, 4);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float y;
    memcpy(&y, &u, 4);
    return y;
}

/* -------------------------------------------------------------------------------------------------- numbers */

INLINE float of_half(uint32_t h)
{
    const uint32_t u = bits_of(float_of((h & 0x7fff) << 13) * 0x1p112f) | (h & 0x8000) << 16;
    return float_of((h & 0x7c00) == 0x7c00 ? u | 0x7f800000 : u);
}

INLINE float of_e4m3(uint32_t b)
{
    const int32_t e = (b >> 3) & 15, m = b & 7;
    const float y = (float)(e ? m | 8 : m) * float_of((uint32_t)((e ? e : 1) + 117) << 23);
    return float_of((b & 127) == 127 ? 0x7fc00000 : bits_of(y) | (b & 128) << 24);
}

INLINE float of_e8m0(uint32_t b)
{
    return float_of(b == 0 ? 0x00400000 : b == 255 ? 0x7fc00000 : b << 23);
}

/* Items `start` to `start + n` in FP32, in their own order. */
INLINE void decoded(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    const uint8_t *b = a->items + start * kind_bits[a->kind] / 8;
    const float *table = a->table;
    uint16_t h;
    switch (a->kind) {
    case TABLE4:
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = table[b[i / 2] >> 4 * (i & 1) & 15];
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

/* -------------------------------------------------------------------------------------------------- scales */

/* Each of `run`, `each` times. */
INLINE void repeated(const float *run, Py_ssize_t n, const Py_ssize_t each, float *to)
{
    for (Py_ssize_t g = 0; g < n; g++)
        for (Py_ssize_t i = 0; i < each; i++)
            to[g * each + i] = run[g];
}

/* `to` = each of `run` for as many spans as a block has; the last one up to the chunk's end, where activations are 0. */
INLINE void spread(const weight *w, const float *run, float *to)
{
    const Py_ssize_t end = (w->k + CHUNK - 1) / CHUNK * SPANS, each = w->groups == 1 ? end : w->block / SPAN;
    const Py_ssize_t whole = end / each < w->groups ? end / each : w->groups;
    switch (each) {
    case 2: repeated(run, whole, 2, to); break;
    case 4: repeated(run, whole, 4, to); break;
    case 16: repeated(run, whole, 16, to); break;
    default: repeated(run, whole, each, to);
    }
    for (Py_ssize_t i = whole * each; i < end; i++)
        to[i] = run[whole < w->groups ? whole : w->groups - 1];
}

/* Whether magnitudes are at most `most`, and at least `least` or 0; NaN is. */
INLINE int within(const float *y, Py_ssize_t n, float most, float least)
{
    const int32_t top = (int32_t)bits_of(most), bottom = (int32_t)bits_of(least);
    int32_t beyond = 0; /* the sign says whether; integers, since comparisons of floats are slow to combine */
    for (Py_ssize_t i = 0; i < n; i++) {
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

/* The scales and offsets of a row of scales, one for each span. Returns whether they are within the limits. */
INLINE int spread_scales(const weight *w, Py_ssize_t row, float *run, float *scales, float *offsets)
{
    const Py_ssize_t groups = w->groups;
    const float factor = w->factor;
    int fine = 1;
    decoded(&w->scale, row * groups, groups, run);
    if (factor != 1 && w->scale.kind != E4M3 && w->scale.kind != F16)
        fine = within(run, groups, MOST_STORED, w->least);
    if (w->divides)
        for (Py_ssize_t g = 0; g < groups; g++)
            run[g] = 1 / run[g];
    if (factor != 1)
        for (Py_ssize_t g = 0; g < groups; g++)
            run[g] *= factor;
    fine = fine && within(run, groups, MOST_SCALE, w->least);
    spread(w, run, scales);
    if (w->role != NONE) {
        decoded(&w->offset, row * groups, groups, run);
        fine = fine && within(run, groups, MOST_STORED, 0);
        spread(w, run, offsets);
    }
    return fine;
}

/* -------------------------------------------------------------------------------------------------- a thread's work */

/* Rows of a weight that are multiplied together, fewer than ROWS at the end of the weight: the last one is then repeated. */
typedef struct {
    Py_ssize_t whole, chunks;       /* chunks without, and with, a partial one at the end */
    Py_ssize_t bytes;               /* of a whole chunk of codes */
    Py_ssize_t ahead;               /* how far to prefetch */
    const uint8_t *codes[ROWS];
    const float *scales[ROWS], *offsets[ROWS];
    uint8_t rest[ROWS][CHUNK];      /* codes of the partial chunk, then zeros */
} panel;

/* Memory of one thread. */
typedef struct {
    void *memory;
    float *run, *scales, *offsets, *sums, *tile;
} workspace;

INLINE const uint8_t *codes_of(const panel *p, int r, Py_ssize_t chunk)
{
    return chunk < p->whole ? p->codes[r] + chunk * p->bytes : p->rest[r];
}

/* Fill `p` with rows from `first` on, whose scales have been spread from row `base` on. */
INLINE void fill(const weight *w, const workspace *to, Py_ssize_t base, Py_ssize_t first, Py_ssize_t end, panel *p)
{
    const Py_ssize_t each = p->chunks * SPANS;
    const Py_ssize_t rest = w->row_bytes - p->whole * p->bytes;
    for (int r = 0; r < ROWS; r++) {
        const Py_ssize_t row = first + r < end ? first + r : end - 1, slot = row / w->tall - base / w->tall;
        p->codes[r] = w->codes.items + row * w->row_bytes;
        p->scales[r] = to->scales + slot * each;
        p->offsets[r] = to->offsets + slot * each;
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

/* Multiplies MB rows of packed activations by a tile of ROWS rows, adding to vectors of W partial sums. */
#define MICRO(name, target, V, W, MB)                                                                                       \
    target static void name##_micro##MB(                                                                                    \
        const float *tile, const float *x, Py_ssize_t stride, Py_ssize_t chunks, float *sums)                               \
    {                                                                                                                       \
        V a[MB][ROWS];                                                                                                      \
        UNROLL for (int m = 0; m < MB; m++)                                                                                 \
            UNROLL for (int r = 0; r < ROWS; r++) memcpy(&a[m][r], sums + (m * ROWS + r) * W, sizeof(V));                   \
        for (Py_ssize_t c = 0; c < chunks; c++, x += stride)                                                                \
            for (int i = 0; i < CHUNK; i += W) {                                                                            \
                V y[MB];                                                                                                    \
                UNROLL for (int m = 0; m < MB; m++) memcpy(&y[m], x + m * CHUNK + i, sizeof(V));                            \
                UNROLL for (int r = 0; r < ROWS; r++) {                                                                     \
                    V b;                                                                                                    \
                    memcpy(&b, tile + r * TILE + c * CHUNK + i, sizeof(V));                                                 \
                    UNROLL for (int m = 0; m < MB; m++) a[m][r] += y[m] * b;                                                \
                }                                                                                                           \
            }                                                                                                               \
        UNROLL for (int m = 0; m < MB; m++)                                                                                 \
            UNROLL for (int r = 0; r < ROWS; r++) memcpy(sums + (m * ROWS + r) * W, &a[m][r], sizeof(V));                   \
    }

typedef void (*micro)(const float *, const float *, Py_ssize_t, Py_ssize_t, float *);
typedef void (*tiler)(const weight *, const panel *, Py_ssize_t, Py_ssize_t, float *);
typedef int (*streamer)(const weight *, const panel *, const float *, Py_ssize_t, int, float *);

/* Rows `first` to `end` of a product by tiles. `micros[m]` takes m rows of activations, up to `most`; vectors have W. */
INLINE void by_tiles(const weight *w, const workspace *to, panel *p, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y, tiler decode, const micro *micros, int most, int W)
{
    const Py_ssize_t stride = m * CHUNK, each = m * ROWS * W, panels = (m + most - 1) / most;
    memset(to->sums, 0, 4 * (size_t)((end - first + ROWS - 1) / ROWS * each));
    for (Py_ssize_t c = 0; c < p->chunks; c += DEPTH) {
        const Py_ssize_t chunks = p->chunks - c < DEPTH ? p->chunks - c : DEPTH;
        for (Py_ssize_t n = first; n < end; n += ROWS) {
            float *sums = to->sums + (n - first) / ROWS * each;
            fill(w, to, first, n, end, p);
            decode(w, p, c, chunks, to->tile);
            for (Py_ssize_t i = 0, done = 0; i < panels; i++) {
                const Py_ssize_t now = (m - done + panels - i - 1) / (panels - i);
                micros[now](to->tile, x + c * stride + done * CHUNK, stride, chunks, sums + done * ROWS * W);
                done += now;
            }
        }
    }
    for (Py_ssize_t n = first; n < end; n++)
        for (Py_ssize_t i = 0; i < m; i++) {
            const float *sums = to->sums + (n - first) / ROWS * each + (i * ROWS + (n - first) % ROWS) * W;
            float half[16];
            memcpy(half, sums, 4 * (size_t)W);
            for (int width = W / 2; width; width /= 2)
                for (int j = 0; j < width; j++)
                    half[j] += half[j + width];
            y[i * w->n + n] = half[0];
        }
}

/* Rows `first` to `end` of a product. Returns 0 where scales are beyond the limits. */
INLINE int rows_of(const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first, Py_ssize_t end,
    float *y, tiler decode, const micro *micros, int most, int W, streamer stream, Py_ssize_t streamed)
{
    panel p;
    const Py_ssize_t each = (w->k + CHUNK - 1) / CHUNK * SPANS, ahead = ROWS * w->row_bytes;
    p.bytes = CHUNK * kind_bits[w->codes.kind] / 8;
    p.whole = w->row_bytes / p.bytes;
    p.chunks = (w->k + CHUNK - 1) / CHUNK;
    p.ahead = ahead > 8192 && ahead <= 16384 ? ahead : 8192;
    const int streams = stream && m <= streamed;
    /* Rows whose scales are spread at once. */
    const Py_ssize_t step = streams ? ROWS : CLAIM;
    for (Py_ssize_t n = first; n < end; n += step) {
        const Py_ssize_t stop = n + step < end ? n + step : end;
        for (Py_ssize_t row = n / w->tall, slot = 0; row * w->tall < stop; row++, slot++)
            if (!spread_scales(w, row, to->run, to->scales + slot * each, to->offsets + slot * each))
                return 0;
        if (streams) {
            fill(w, to, n, n, stop, &p);
            for (Py_ssize_t i = 0; i < m;) {
                float sums[4 * ROWS];
                const int taken = stream(w, &p, x + i * CHUNK, m * CHUNK, (int)(m - i < 4 ? m - i : 4), sums);
                for (int j = 0; j < taken; j++)
                    for (Py_ssize_t row = n; row < stop; row++)
                        y[(i + j) * w->n + row] = sums[j * ROWS + row - n];
                i += taken;
            }
        } else
            by_tiles(w, to, &p, x, m, n, stop, y, decode, micros, most, W);
    }
    return 1;
}

/* ------------------------------------------------------------------------------------------------ codes in their own order */

/* y = (the value of each of a chunk's codes - zero-point) * scale + bias, given values. */
INLINE void apply(const weight *w, const float *scales, const float *offsets, float *y)
{
    for (int s = 0; s < SPANS; s++) {
        const float by = scales[s], offset = w->role == NONE ? 0 : offsets[s];
        for (int i = s * SPAN; i < (s + 1) * SPAN; i++)
            y[i] = ((w->role == ZERO_POINT ? y[i] - offset : y[i]) * by) + (w->role == BIAS ? offset : 0);
    }
}

/* Decode a tile with codes in their own order, by `decode` from a chunk's codes. */
#define TILER(name, target, values)                                                                                         \
    target static void name##_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)       \
    {                                                                                                                       \
        for (int r = 0; r < ROWS; r++)                                                                                      \
            for (Py_ssize_t c = first; c < first + chunks; c++) {                                                           \
                float *y = tile + r * TILE + (c - first) * CHUNK;                                                           \
                values(w, codes_of(p, r, c), y);                                                                            \
                apply(w, p->scales[r] + c * SPANS, p->offsets[r] + c * SPANS, y);                                           \
            }                                                                                                               \
    }

INLINE void values_of(const weight *w, const uint8_t *codes, float *y)
{
    const numbers chunk = {w->codes.kind, codes, w->codes.table};
    decoded(&chunk, 0, CHUNK, y);
}

/* Activations chunk by chunk, in `order`, or their own where it is NULL. Returns whether they are within the limit. */
INLINE int packed(const float *x, Py_ssize_t m, Py_ssize_t k, const uint8_t *order, float *to)
{
    for (Py_ssize_t c = 0; c * CHUNK < k; c++)
        for (Py_ssize_t r = 0; r < m; r++, to += CHUNK) {
            const float *from = x + r * k + c * CHUNK;
            const Py_ssize_t left = k - c * CHUNK;
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
    return within(x, m * k, MOST_X, 0);
}

/* -------------------------------------------------------------------------------------------------- versions */

typedef struct {
    const char *name;
    int (*rows)(const weight *, const workspace *, const float *, Py_ssize_t, Py_ssize_t, Py_ssize_t, float *);
    int (*pack)(const float *, Py_ssize_t, Py_ssize_t, const uint8_t *, float *);
    int permutes; /* whether activations are packed in the order of `orders` */
} version;

/* One version of everything, for one kind of processor. */
#define VERSION(version_name, target, most, W, stream, streamed, permutes)                                                  \
    target static int version_name##_rows(const weight *w, const workspace *to, const float *x, Py_ssize_t m,               \
        Py_ssize_t first, Py_ssize_t end, float *y)                                                                         \
    {                                                                                                                       \
        return rows_of(w, to, x, m, first, end, y, version_name##_tile, version_name##_micros, most, W, stream, streamed);  \
    }                                                                                                                       \
    target static int version_name##_pack(const float *x, Py_ssize_t m, Py_ssize_t k, const uint8_t *order, float *to)      \
    {                                                                                                                       \
        return packed(x, m, k, order, to);                                                                                  \
    }                                                                                                                       \
    static const version version_name = {#version_name, version_name##_rows, version_name##_pack, permutes};

TILER(portable, , values_of)
MICRO(portable, , f4, 4, 1)
MICRO(portable, , f4, 4, 2)
static const micro portable_micros[] = {NULL, portable_micro1, portable_micro2};
VERSION(portable, , 2, 4, NULL, 0, 0)

#if defined(__x86_64__)
#include <immintrin.h>

typedef float f8 __attribute__((vector_size(32)));
typedef float f16 __attribute__((vector_size(64)));

#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))

/* Tables of 16 numbers are two registers, chosen between by the code's highest bit. */
FOR_AVX2 INLINE void values_by_avx2(const weight *w, const uint8_t *codes, float *y)
{
    if (w->codes.kind != TABLE4) {
        values_of(w, codes, y);
        return;
    }
    const __m256 low = _mm256_loadu_ps(w->codes.table), high = _mm256_loadu_ps(w->codes.table + 8);
    const __m256i shifts = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    for (int s = 0; s < SPANS; s++) {
        int word;
        memcpy(&word, codes + 4 * s, 4);
        const __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
        const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(c, 28));
        const __m256 v = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, c), _mm256_permutevar8x32_ps(high, c), top);
        _mm256_storeu_ps(y + SPAN * s, v);
    }
}

TILER(avx2, FOR_AVX2, values_by_avx2)
MICRO(avx2, FOR_AVX2, f8, 8, 1)
MICRO(avx2, FOR_AVX2, f8, 8, 2)
static const micro avx2_micros[] = {NULL, avx2_micro1, avx2_micro2};
VERSION(avx2, FOR_AVX2, 2, 8, NULL, 0, 0)

#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

/* Vector i of a chunk of 4-bit codes has code SPAN j + i in lane j, which one shift brings to the low bits of each lane.
   Of FP8, vectors 2i and 2i + 1 have the even and the odd of 32 codes, which are halves of FP16 numbers. */
static const uint8_t order_of_nibbles[CHUNK] = {
#define LANES_OF(i) i, 8 + i, 16 + i, 24 + i, 32 + i, 40 + i, 48 + i, 56 + i, 64 + i, \
        72 + i, 80 + i, 88 + i, 96 + i, 104 + i, 112 + i, 120 + i
    LANES_OF(0), LANES_OF(1), LANES_OF(2), LANES_OF(3), LANES_OF(4), LANES_OF(5), LANES_OF(6), LANES_OF(7)};
static const uint8_t order_of_bytes[CHUNK] = {
#define EVEN_OF(i) i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, i + 16, \
        i + 18, i + 20, i + 22, i + 24, i + 26, i + 28, i + 30
    EVEN_OF(0), EVEN_OF(1), EVEN_OF(32), EVEN_OF(33), EVEN_OF(64), EVEN_OF(65), EVEN_OF(96), EVEN_OF(97)};

/* Values of 32 FP8 codes: the FP16 with the same bits, which for E4M3 is 2^-8 times the value. */
#define E4M3_LIFT 256.f

FOR_AVX512 INLINE __m512 halves(const int kind, __m256i high)
{
    if (kind == E4M3) {
        const __m256i keep = _mm256_set1_epi16((short)0xBF80), nan = _mm256_set1_epi16(0x4000);
        high = _mm256_and_si256(_mm256_srai_epi16(high, 1), keep);
        /* 0x3F80 is E4M3's NaN: with bit 14 it is FP16's. */
        high = _mm256_or_si256(high, _mm256_and_si256(_mm256_add_epi16(high, _mm256_set1_epi16(0x80)), nan));
    }
    return _mm512_cvtph_ps(high);
}

FOR_AVX512 INLINE void bytes_by_avx512(const int kind, const uint8_t *codes, const float *table, __m512 *first, __m512 *second)
{
    if (kind == E4M3 || kind == E5M2) {
        const __m256i v = _mm256_loadu_si256((const void *)codes);
        *first = halves(kind, _mm256_slli_epi16(v, 8));
        *second = halves(kind, _mm256_and_si256(v, _mm256_set1_epi16((short)0xFF00)));
        return;
    }
    const __m128i a = _mm_loadu_si128((const void *)codes), b = _mm_loadu_si128((const void *)(codes + 16));
    if (kind == I8) {
        *first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a));
        *second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
    } else if (kind == U8) {
        *first = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a));
        *second = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b));
    } else {
        *first = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(a), table, 4);
        *second = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(b), table, 4);
    }
}

/* The lanes of a chunk's 16 scales (or offsets) that belong to vector `i` of bytes. */
FOR_AVX512 INLINE __m512 lanes_of(const int kind, __m512 scales, int i)
{
    const __m512i by4 = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i by8 = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const int paired = kind == E4M3 || kind == E5M2;
    const __m512i lanes = paired ? by4 : by8, start = _mm512_set1_epi32(paired ? i / 2 * 4 : i * 2);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lanes, start), scales);
}

FOR_AVX512 INLINE __m512 nibble(__m512i v, int i, __m512 table)
{
    return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(v, 4 * i) : v, table);
}

FOR_AVX512 INLINE __m512 applied(const int role, __m512 v, __m512 scale, __m512 offset)
{
    if (role == ZERO_POINT)
        v = _mm512_sub_ps(v, offset);
    v = _mm512_mul_ps(v, scale);
    return role == BIAS ? _mm512_add_ps(v, offset) : v;
}

FOR_AVX512 INLINE void tile_by_avx512(
    const int kind, const int role, const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    const __m512 table = kind == TABLE4 ? _mm512_loadu_ps(w->codes.table) : _mm512_setzero_ps();
    const int same = uniform(w);
    for (Py_ssize_t c = first; c < first + chunks; c++)
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *codes = codes_of(p, r, c);
            float *y = tile + r * TILE + (c - first) * CHUNK;
            const __m512 scale = _mm512_loadu_ps(p->scales[r] + c * SPANS);
            const __m512 offset = role == NONE ? scale : _mm512_loadu_ps(p->offsets[r] + c * SPANS);
            if (kind == TABLE4) {
                const __m512i v = _mm512_loadu_si512(codes);
                if (same) {
                    const __m512 values = applied(role, table, scale, offset);
                    UNROLL for (int i = 0; i < 8; i++) _mm512_storeu_ps(y + 16 * i, nibble(v, i, values));
                } else
                    UNROLL for (int i = 0; i < 8; i++)
                        _mm512_storeu_ps(y + 16 * i, applied(role, nibble(v, i, table), scale, offset));
            } else
                UNROLL for (int i = 0; i < 8; i += 2) {
                    __m512 a, b;
                    bytes_by_avx512(kind, codes + 16 * i, w->codes.table, &a, &b);
                    _mm512_storeu_ps(y + 16 * i, applied(role, a, lanes_of(kind, scale, i), lanes_of(kind, offset, i)));
                    _mm512_storeu_ps(
                        y + 16 * i + 16, applied(role, b, lanes_of(kind, scale, i + 1), lanes_of(kind, offset, i + 1)));
                }
        }
}

#define BY_ROLE(kind)                                                                                                       \
    case kind:                                                                                                              \
        if (w->role == NONE)                                                                                                \
            tile_by_avx512(kind, NONE, w, p, first, chunks, tile);                                                          \
        else if (w->role == BIAS)                                                                                           \
            tile_by_avx512(kind, BIAS, w, p, first, chunks, tile);                                                          \
        else                                                                                                                \
            tile_by_avx512(kind, ZERO_POINT, w, p, first, chunks, tile);                                                    \
        break;

FOR_AVX512 static void avx512_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    switch (w->codes.kind) {
        BY_ROLE(TABLE4)
        BY_ROLE(TABLE8)
        BY_ROLE(E4M3)
        BY_ROLE(E5M2)
        BY_ROLE(I8)
        BY_ROLE(U8)
    }
}

/* Products of ROWS rows and M rows of activations, all along K, into sums[m * ROWS + r]. */
FOR_AVX512 INLINE void nibbles_streamed(
    const int M, const int role, const int same, const weight *w, const panel *p, const float *x, Py_ssize_t stride,
    float *sums)
{
    const __m512 table = _mm512_loadu_ps(w->codes.table);
    const int later = M == 1 && role != BIAS && !same; /* scales are applied to sums of a span */
    __m512 a[M][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm512_setzero_ps();
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride) {
        __m512i v[ROWS];
        __m512 values[ROWS], scale[ROWS], offset[ROWS], span[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) {
            const uint8_t *codes = codes_of(p, r, c);
            v[r] = _mm512_loadu_si512(codes);
            _mm_prefetch((const char *)codes + p->ahead, _MM_HINT_T0);
            scale[r] = _mm512_loadu_ps(p->scales[r] + c * SPANS);
            offset[r] = role == NONE ? scale[r] : _mm512_loadu_ps(p->offsets[r] + c * SPANS);
            values[r] = same ? applied(role, table, scale[r], offset[r]) : table;
        }
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int r = 0; r < ROWS; r++) {
                __m512 d = nibble(v[r], i, values[r]);
                if (later) {
                    const __m512 y = _mm512_loadu_ps(x + 16 * i);
                    d = role == ZERO_POINT ? _mm512_sub_ps(d, offset[r]) : d;
                    span[r] = i ? _mm512_fmadd_ps(d, y, span[r]) : _mm512_mul_ps(d, y);
                    continue;
                }
                d = same ? d : applied(role, d, scale[r], offset[r]);
                UNROLL for (int m = 0; m < M; m++)
                    a[m][r] = _mm512_fmadd_ps(d, _mm512_loadu_ps(x + m * CHUNK + 16 * i), a[m][r]);
            }
        if (later)
            UNROLL for (int r = 0; r < ROWS; r++) a[0][r] = _mm512_fmadd_ps(span[r], scale[r], a[0][r]);
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = _mm512_reduce_add_ps(a[m][r]);
}

FOR_AVX512 INLINE void bytes_streamed(
    const int M, const int kind, const int same, const weight *w, const panel *p, const float *x, Py_ssize_t stride,
    float *sums)
{
    const int paired = kind == E4M3 || kind == E5M2;
    __m512 a[M][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm512_setzero_ps();
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            const uint8_t *codes = codes_of(p, r, c);
            const __m512 scale = _mm512_loadu_ps(p->scales[r] + c * SPANS);
            __m512 all = _mm512_setzero_ps();
            _mm_prefetch((const char *)codes + p->ahead, _MM_HINT_T0);
            _mm_prefetch((const char *)codes + p->ahead + 64, _MM_HINT_T0);
            UNROLL for (int i = 0; i < 8; i += 2) {
                __m512 d, e;
                bytes_by_avx512(kind, codes + 16 * i, w->codes.table, &d, &e);
                if (M == 1 && (same || paired)) { /* scales are applied to sums of a span, or of a chunk */
                    const __m512 sum = _mm512_fmadd_ps(d, _mm512_loadu_ps(x + 16 * i), same ? all : _mm512_setzero_ps());
                    const __m512 both = _mm512_fmadd_ps(e, _mm512_loadu_ps(x + 16 * i + 16), sum);
                    if (same)
                        all = both;
                    else
                        a[0][r] = _mm512_fmadd_ps(both, lanes_of(kind, scale, i), a[0][r]);
                    continue;
                }
                d = _mm512_mul_ps(d, same ? scale : lanes_of(kind, scale, i));
                e = _mm512_mul_ps(e, same ? scale : lanes_of(kind, scale, i + 1));
                UNROLL for (int m = 0; m < M; m++) {
                    a[m][r] = _mm512_fmadd_ps(d, _mm512_loadu_ps(x + m * CHUNK + 16 * i), a[m][r]);
                    a[m][r] = _mm512_fmadd_ps(e, _mm512_loadu_ps(x + m * CHUNK + 16 * i + 16), a[m][r]);
                }
            }
            if (M == 1 && same)
                a[0][r] = _mm512_fmadd_ps(all, scale, a[0][r]);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = _mm512_reduce_add_ps(a[m][r]);
}

typedef void (*streamed)(const weight *, const panel *, const float *, Py_ssize_t, float *);

#define NIBBLES(M, role, same)                                                                                              \
    FOR_AVX512 static void nibbles_##M##role##same(                                                                         \
        const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)                                    \
    {                                                                                                                       \
        nibbles_streamed(M, role, same, w, p, x, stride, sums);                                                             \
    }
#define BYTES(M, kind, same)                                                                                                \
    FOR_AVX512 static void bytes_##M##kind##same(                                                                           \
        const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)                                    \
    {                                                                                                                       \
        bytes_streamed(M, kind, same, w, p, x, stride, sums);                                                               \
    }
#define FOR_ALL(what, which) \
    what(1, which, 0) what(1, which, 1) what(2, which, 0) what(2, which, 1) what(4, which, 0) what(4, which, 1)
FOR_ALL(NIBBLES, NONE)
FOR_ALL(NIBBLES, ZERO_POINT)
FOR_ALL(NIBBLES, BIAS)
FOR_ALL(BYTES, E4M3)
FOR_ALL(BYTES, E5M2)
FOR_ALL(BYTES, I8)

#define FUNCTIONS(what, which) \
    {{what##1##which##0, what##1##which##1}, {what##2##which##0, what##2##which##1}, \
        {what##4##which##0, what##4##which##1}}
static const streamed nibble_streams[ROLES][3][2] = {
    FUNCTIONS(nibbles_, NONE), FUNCTIONS(nibbles_, ZERO_POINT), FUNCTIONS(nibbles_, BIAS)};
static const streamed byte_streams[3][3][2] = {FUNCTIONS(bytes_, E4M3), FUNCTIONS(bytes_, E5M2), FUNCTIONS(bytes_, I8)};

/* Multiplies up to `m` rows of activations, 4 at most. Returns how many. */
static int stream_by_avx512(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    const int size = m >= 4 ? 2 : m >= 2 ? 1 : 0, same = uniform(w), kind = w->codes.kind;
    const streamed(*found)[2] = kind == TABLE4 ? nibble_streams[w->role] : byte_streams[kind - E4M3];
    found[size][same](w, p, x, stride, sums);
    return 1 << size;
}

MICRO(avx512, FOR_AVX512, f16, 16, 1)
MICRO(avx512, FOR_AVX512, f16, 16, 2)
MICRO(avx512, FOR_AVX512, f16, 16, 3)
MICRO(avx512, FOR_AVX512, f16, 16, 4)
MICRO(avx512, FOR_AVX512, f16, 16, 5)
MICRO(avx512, FOR_AVX512, f16, 16, 6)
static const micro avx512_micros[] = {
    NULL, avx512_micro1, avx512_micro2, avx512_micro3, avx512_micro4, avx512_micro5, avx512_micro6};

/* The most rows of activations that are faster from registers: bytes take longer to decode, once for every 4 rows. */
#define STREAMED(w) ((w)->codes.kind == TABLE4 ? 16 : 4)
/* Codecs and offsets without a stream go by tiles. */
#define CAN_STREAM(w) ((w)->codes.kind == TABLE4 || ((w)->role == NONE && (w)->codes.kind >= E4M3 && (w)->codes.kind <= I8))
VERSION(avx512, FOR_AVX512, 6, 16, CAN_STREAM(w) ? stream_by_avx512 : NULL, STREAMED(w), 1)
#endif

/* Those that this processor can run, the best first. */
static const version *versions[4];
static const version *here;

static void find_versions(void)
{
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2_too = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2_too && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        versions[n++] = &avx512;
    if (avx2_too)
        versions[n++] = &avx2;
#endif
    versions[n] = &portable;
    here = versions[0];
}

/* The order in which `here` wants activations; NULL for their own. */
static const uint8_t *order_for(int kind)
{
#if defined(__x86_64__)
    if (here->permutes)
        return kind == TABLE4 ? order_of_nibbles : kind == E4M3 || kind == E5M2 ? order_of_bytes : NULL;
#endif
    (void)kind;
    return NULL;
}

/* What the values of codes are multiplied by before scales: a power of two. */
static float lift_of(int kind)
{
#if defined(__x86_64__)
    if (here->permutes && kind == E4M3)
        return E4M3_LIFT;
#endif
    (void)kind;
    return 1;
}

/* -------------------------------------------------------------------------------------------------- for Python */

static int refused(const char *wanted, Py_ssize_t expected, Py_ssize_t found)
{
    PyErr_Format(PyExc_ValueError, "wanted %s of %zd bytes; got %zd. Call breccia.matmul.", wanted, expected, found);
    return 0;
}

static int is_float(const char *what, const Py_buffer *x, Py_ssize_t n)
{
    if (x->len == 4 * n && (uintptr_t)x->buf % 4 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted %s: %zd aligned FP32 numbers; got %zd bytes. Call breccia.matmul.", what, n, x->len);
    return 0;
}

static int is_kind(int kind)
{
    if (kind >= 0 && kind < KINDS)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted a kind from 0 to %d; got %d. Call breccia.matmul.", KINDS - 1, kind);
    return 0;
}

static Py_ssize_t padded(Py_ssize_t k)
{
    return (k + CHUNK - 1) / CHUNK * CHUNK;
}

PyDoc_STRVAR(pack_doc,
    "pack(x, m, k, kind, packed): (m, k) FP32 activations in the order of codes of this kind. packed: m times k rounded up to\n"
    "whole chunks of 128. Returns False, and the result is unspecified, where a magnitude is above 2^100.");

static PyObject *pack(PyObject *self, PyObject *args)
{
    Py_buffer x, to;
    Py_ssize_t m, k;
    int kind, fine = 0;
    if (!PyArg_ParseTuple(args, "y*nniw*:pack", &x, &m, &k, &kind, &to))
        return NULL;
    const int sized = m > 0 && k > 0 && m <= PY_SSIZE_T_MAX / 8 / padded(k);
    const int done = is_kind(kind) && is_float("activations", &x, sized ? m * k : 1) &&
        is_float("packed activations", &to, sized ? m * padded(k) : 1) && (sized || refused("activations", 4, x.len));
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        fine = here->pack(x.buf, m, k, order_for(kind), to.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&to);
    return done ? PyBool_FromLong(fine) : NULL;
}

/* Memory for `m` rows of activations, in cache lines. Returns 0 where there is none. */
static int allocate(const weight *w, Py_ssize_t m, workspace *to)
{
    const size_t spans = (size_t)(padded(w->k) / SPAN), offsets = w->role == NONE ? 0 : CLAIM * spans;
    const size_t sizes[] = {(size_t)w->groups, CLAIM * spans, offsets, CLAIM * (size_t)m * 16, ROWS * TILE};
    float **parts[] = {&to->run, &to->scales, &to->offsets, &to->sums, &to->tile};
    size_t all = 16;
    for (int i = 0; i < 5; i++)
        all += (sizes[i] + 15) / 16 * 16;
    to->memory = malloc(4 * all);
    if (!to->memory)
        return 0;
    float *next = (float *)(((uintptr_t)to->memory + 63) & ~(uintptr_t)63);
    for (int i = 0; i < 5; i++) {
        *parts[i] = next;
        next += (sizes[i] + 15) / 16 * 16;
    }
    return 1;
}

PyDoc_STRVAR(multiply_doc,
    "multiply(packed, m, n, k, data, kind, table, scale, scale_kind, scale_table, block, tall, divides, factor, least,\n"
    "offset, offset_kind, role, product, next): the rows of the weight that no other thread has taken, in FP32.\n\n"
    "packed: by `pack`. data: (n, bytes) codes of `kind`, whose values are in `table` where the kind is a table; likewise\n"
    "scale. A scale covers `block` codes, a multiple of 8 or at least k, of `tall` rows; it divides or multiplies, after\n"
    "times `factor`. offset: zero-points (role 1) or biases (role 2), in the places of scales. product: (m, n). next: the\n"
    "first row not taken, int64, which all threads share. Returns False where a scale is too large, or smaller than `least`\n"
    "and not 0: then the product is unspecified.");

static PyObject *multiply(PyObject *self, PyObject *args)
{
    Py_buffer x, data, table, scale, scale_table, offset, y, next;
    Py_ssize_t m, tall;
    weight w;
    int fine = 1, memory = 1;
    memset(&w, 0, sizeof w);
    if (!PyArg_ParseTuple(args, "y*nnny*iy*y*iy*nnpffy*iiw*w*:multiply", &x, &m, &w.n, &w.k, &data, &w.codes.kind, &table,
            &scale, &w.scale.kind, &scale_table, &w.block, &tall, &w.divides, &w.factor, &w.least,
            &offset, &w.offset.kind, &w.role, &y,
            &next))
        return NULL;
    int done = is_kind(w.codes.kind) && is_kind(w.scale.kind) && is_kind(w.offset.kind);
    if (done && (m < 1 || w.n < 1 || w.k < 1 || tall < 1 || w.block < 1 || w.role < 0 || w.role >= ROLES || w.codes.kind > U8 ||
                    (w.block < w.k && w.block % SPAN) || m > PY_SSIZE_T_MAX / 8 / padded(w.k) || w.n > PY_SSIZE_T_MAX / 8 / m ||
                    w.n > PY_SSIZE_T_MAX / 8 / padded(w.k))) {
        PyErr_Format(PyExc_ValueError,
            "wanted lengths of at least 1, codes of at most 8 bits, and a block of a multiple of %d codes; got m = %zd, "
            "n = %zd, k = %zd, kind %d, block = %zd, tall = %zd, role %d. Call breccia.matmul.",
            SPAN, m, w.n, w.k, w.codes.kind, w.block, tall, w.role);
        done = 0;
    }
    if (done) {
        w.tall = tall < w.n ? tall : w.n;
        w.groups = w.block < w.k ? (w.k + w.block - 1) / w.block : 1;
        w.row_bytes = (w.k * kind_bits[w.codes.kind] + 7) / 8;
        w.factor *= lift_of(w.codes.kind);
        const Py_ssize_t scales = (w.n + w.tall - 1) / w.tall * w.groups;
        const Py_ssize_t scale_bytes = scales * kind_bits[w.scale.kind] / 8;
        const Py_ssize_t offset_bytes = scales * kind_bits[w.offset.kind] / 8;
        done = is_float("packed activations", &x, m * padded(w.k)) && is_float("a product", &y, m * w.n) &&
            (data.len == w.n * w.row_bytes || refused("codes", w.n * w.row_bytes, data.len)) &&
            (w.codes.kind > TABLE8 || is_float("a table", &table, (Py_ssize_t)1 << kind_bits[w.codes.kind])) &&
            (w.scale.kind > TABLE8 || is_float("a table of scales", &scale_table, 256)) &&
            (w.scale.kind != TABLE4 || is_kind(-1)) &&
            (scale.len == scale_bytes || refused("scales", scale_bytes, scale.len)) &&
            (w.role == NONE || offset.len == offset_bytes || refused("offsets", offset_bytes, offset.len)) &&
            (w.role == NONE || w.offset.kind > E5M2 || is_kind(-1)) &&
            ((next.len == 8 && (uintptr_t)next.buf % 8 == 0) || refused("an aligned counter", 8, next.len));
    }
    if (done) {
        workspace to;
        int64_t *counter = next.buf;
        w.codes.items = data.buf, w.codes.table = table.buf;
        w.scale.items = scale.buf, w.scale.table = scale_table.buf;
        w.offset.items = offset.buf;
        Py_BEGIN_ALLOW_THREADS
        memory = allocate(&w, m, &to);
        if (memory) {
            while (fine) {
                const Py_ssize_t first = (Py_ssize_t)__atomic_fetch_add(counter, CLAIM, __ATOMIC_RELAXED);
                if (first < 0 || first >= w.n)
                    break;
                fine = here->rows(&w, &to, x.buf, m, first, first + CLAIM < w.n ? first + CLAIM : w.n, y.buf);
            }
            free(to.memory);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&data);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scale);
    PyBuffer_Release(&scale_table);
    PyBuffer_Release(&offset);
    PyBuffer_Release(&y);
    PyBuffer_Release(&next);
    if (!memory)
        return PyErr_NoMemory();
    return done ? PyBool_FromLong(fine) : NULL;
}

PyDoc_STRVAR(kinds_doc, "kinds(): the names of the encodings that `multiply` reads, in the order of their numbers.");

static PyObject *kinds(PyObject *self, PyObject *unused)
{
    PyObject *found = PyTuple_New(KINDS);
    for (int i = 0; found && i < KINDS; i++) {
        PyObject *name = PyUnicode_FromString(kind_names[i]);
        if (!name || PyTuple_SetItem(found, i, name)) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

PyDoc_STRVAR(use_doc,
    "use(name): let calls run for that instruction set, and return the names of those that this processor has, the best\n"
    "first. Without a name, only return them. For tests: no call may be running.");

static PyObject *use(PyObject *self, PyObject *args)
{
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|s:use", &name))
        return NULL;
    PyObject *found = PyList_New(0);
    int known = !name;
    for (int i = 0; found && i < 4 && versions[i]; i++) {
        PyObject *each = PyUnicode_FromString(versions[i]->name);
        if (!each || PyList_Append(found, each)) {
            Py_XDECREF(each);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(each);
        if (name && strcmp(name, versions[i]->name) == 0) {
            here = versions[i];
            known = 1;
        }
    }
    if (found && !known) {
        PyErr_Format(PyExc_ValueError, "this processor has the instruction sets %R; got '%s'.", found, name);
        Py_DECREF(found);
        return NULL;
    }
    return found;
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, pack_doc},
    {"multiply", multiply, METH_VARARGS, multiply_doc},
    {"kinds", kinds, METH_NOARGS, kinds_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.products",
    .m_doc = "Compiled products of activations and quantized weights; see breccia_native.matmul, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_products(void)
{
    find_versions();
    return PyModuleDef_Init(&module);
}
