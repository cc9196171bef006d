/* Products of a few rows of FP32 activations and a quantized weight whose memory is (K, N), with blocks along K.

   products.c reads rows of K codes; a weight of this order would have to be transposed for it. Here a vector has codes of
   several columns, so that sums need no reduction. A thread takes a panel of columns, and walks down all rows in steps of at most
   STEP, which have one scale for each column: it is multiplied once for each step, unless a bias is added to scaled codes.

   An element of a product has at most STEP + K / STEP + 3 roundings, which are fewer than the K that the error bound of
   docs/spec/numerics.md allows from K = 32 on, where no sum overflows or underflows: `multiply` returns False for numbers beyond
   these limits, which are those of products.c. The order of a sum does not depend on threads, nor on other rows. */

#if !defined(__GNUC__)
#error "columns.c needs the vector extensions of GCC or Clang"
#endif

#include "pool.h"
#include "turning.h"
#include "weights.h"

enum {
    STEP = 16,     /* rows of codes that are summed before they are scaled: a multiple of 2 */
    VECTORS = 4,   /* vectors of a strip of columns: a cache line of 8-bit codes, with AVX-512 */
    WIDEST = 64,   /* columns of the widest strip */
    PANEL = 512,   /* columns that a thread takes at a time */
    MOST_ROWS = 6, /* rows of activations that are multiplied together, at most: with AVX-512 their sums are in 24 registers */
};

typedef struct {
    numbers codes, scale, offset;
    int role, divides;
    int width;                 /* bits of a stored code: those of its kind, or fewer */
    int widens;                /* whether stored codes have to be widened to those of the kind, from the first row of a step on */
    Py_ssize_t n, k, block, tall;
    Py_ssize_t wide;           /* stored scales of a row of blocks */
    float factor, least;
} matrix;

/* -------------------------------------------------------------------------------------------------- versions */

/* Each version decodes the codes of a vector of columns: of one row, or of two for 4-bit codes, the other in the high bits. */

INLINE void portable_decoded(const int kind, const uint8_t *codes, const float *table, f4 *low, f4 *high)
{
    float y[4];
    const numbers a = {kind, codes, table};
    if (kind == TABLE4) {
        *low = (f4){table[codes[0] & 15], table[codes[1] & 15], table[codes[2] & 15], table[codes[3] & 15]};
        *high = (f4){table[codes[0] >> 4], table[codes[1] >> 4], table[codes[2] >> 4], table[codes[3] >> 4]};
    } else {
        decoded(&a, 0, 4, y);
        memcpy(low, y, sizeof *low);
    }
}

/* Whether 6-bit codes are in the high bits of a byte. */
INLINE int is_high(int kind)
{
    return kind == E2M3 || kind == E3M2;
}

/* Adds to the bytes `to`, from bit `up` on, codes of `width` bits that begin in bit `shift` of bytes `a` and end in bytes `b`. */
INLINE void add_codes(
    const uint8_t *a, const uint8_t *b, const int shift, const int width, const int up, Py_ssize_t n, uint8_t *to)
{
    const uint64_t each = 0x0101010101010101u, all = (1u << width) - 1, first = all & 0xFF >> shift;
    const uint64_t low = first * each, high = (all - first) * each;
    Py_ssize_t i = 0;
    for (; i + (Py_ssize_t)sizeof(words) <= n; i += sizeof(words)) {
        words u, v, found;
        memcpy(&u, a + i, sizeof u);
        memcpy(&v, b + i, sizeof v);
        memcpy(&found, to + i, sizeof found);
        found |= (((u >> shift) & low) | ((v << (8 - shift)) & high)) << up;
        memcpy(to + i, &found, sizeof found);
    }
    for (; i < n; i++)
        to[i] |= (uint8_t)(((a[i] >> shift) | (b[i] << (8 - shift))) & (int)all) << up;
}

/* `count` rows from row k on of the codes of a panel of `n` columns, as bytes of their kind, PANEL to a row. */
INLINE void widened(const matrix *w, Py_ssize_t k, Py_ssize_t count, Py_ssize_t first, Py_ssize_t n, uint8_t *to)
{
    const int packed = w->codes.kind == TABLE4;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_ssize_t bit = (k + i) * w->width;
        const int shift = (int)(bit % 8), up = packed ? (int)(4 * (i % 2)) : is_high(w->codes.kind) ? 2 : 0;
        const uint8_t *codes = w->codes.items + bit / 8 * w->n + first;
        uint8_t *row = to + (packed ? i / 2 : i) * PANEL;
        if (up != 4)
            memset(row, 0, (size_t)n);
        add_codes(codes, shift + w->width > 8 ? codes + w->n : codes, shift, w->width, up, n, row);
    }
}

/* Numbers of columns `first` to `first + n` in a row of stored scales or offsets, each for `tall` columns. */
INLINE void of_columns(const numbers *a, Py_ssize_t start, Py_ssize_t first, Py_ssize_t n, Py_ssize_t tall, float *to)
{
    if (tall == 1) {
        decoded(a, start + first, n, to);
        return;
    }
    for (Py_ssize_t i = 0; i < n;) {
        float y;
        const Py_ssize_t slot = (first + i) / tall, end = (slot + 1) * tall - first;
        decoded(a, start + slot, 1, &y);
        for (; i < n && i < end; i++)
            to[i] = y;
    }
}

/* The scales and offsets of a row of blocks, for the columns of a panel. Returns whether they are within the limits. */
INLINE int panel_scales(const matrix *w, Py_ssize_t row, Py_ssize_t first, Py_ssize_t n, float *scales, float *offsets)
{
    of_columns(&w->scale, row * w->wide, first, n, w->tall, scales);
    int fine = w->factor == 1 || within(scales, n, MOST_STORED, w->least);
    if (w->divides)
        for (Py_ssize_t i = 0; i < n; i++)
            scales[i] = 1 / scales[i];
    for (Py_ssize_t i = 0; i < n; i++)
        scales[i] *= w->factor;
    fine = fine && within(scales, n, MOST_SCALE, w->least);
    if (w->role != NONE) {
        of_columns(&w->offset, row * w->wide, first, n, w->tall, offsets);
        fine = fine && within(offsets, n, MOST_STORED, 0);
    }
    return fine;
}

static float no_lift(int kind)
{
    (void)kind;
    return 1;
}

#if defined(__x86_64__)
#include <immintrin.h>

#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

typedef float f8 __attribute__((vector_size(32)));
typedef float f16 __attribute__((vector_size(64)));

static float lift_of(int kind)
{
    return kind == E4M3 ? 0x1p8f : kind == E2M3 ? 0x1p14f : kind == E3M2 ? 0x1p12f : 1;
}

#define IS_HALF(kind) ((kind) >= E4M3 && (kind) <= E3M2)

/* FP16 numbers with the bits of FP8 and FP6 ones, which are the lift smaller; the NaN of E4M3, 0x3F80, becomes that of FP16. */
#define AS_HALVES(width, si, kind, v)                                                                                          \
    do {                                                                                                                       \
        v = _mm##width##_slli_epi16(v, 8);                                                                                     \
        if (kind == E4M3) {                                                                                                    \
            v = _mm##width##_and_##si(_mm##width##_srai_epi16(v, 1), _mm##width##_set1_epi16((short)0xBF80));                  \
            v = _mm##width##_or_##si(v, _mm##width##_and_##si(_mm##width##_add_epi16(v, _mm##width##_set1_epi16(0x80)),        \
                                            _mm##width##_set1_epi16(0x4000)));                                                 \
        }                                                                                                                      \
        if (kind == E2M3)                                                                                                      \
            v = _mm##width##_and_##si(_mm##width##_srai_epi16(v, 3), _mm##width##_set1_epi16((short)0x8F80));                  \
        if (kind == E3M2)                                                                                                      \
            v = _mm##width##_and_##si(_mm##width##_srai_epi16(v, 2), _mm##width##_set1_epi16((short)0x9F00));                  \
    } while (0)

FOR_AVX512 INLINE void avx512_decoded(const int kind, const uint8_t *codes, const float *table, f16 *low, f16 *high)
{
    const __m128i b = _mm_loadu_si128((const void *)codes);
    if (kind == TABLE4) {
        const __m512i v = _mm512_cvtepu8_epi32(b);
        const __m512 items = _mm512_loadu_ps(table);
        *low = (f16)_mm512_permutexvar_ps(v, items); /* which reads the lowest four bits */
        *high = (f16)_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), items);
    } else if (IS_HALF(kind)) {
        __m256i v = _mm256_cvtepu8_epi16(b);
        AS_HALVES(256, si256, kind, v);
        *low = (f16)_mm512_cvtph_ps(v);
    } else if (kind == I8)
        *low = (f16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
    else if (kind == U8)
        *low = (f16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b));
    else
        *low = (f16)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(b), table, 4);
}

FOR_AVX2 INLINE __m256 looked_up(__m256i v, __m256 first, __m256 second)
{
    const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(v, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, v), _mm256_permutevar8x32_ps(second, v), high);
}

FOR_AVX2 INLINE void avx2_decoded(const int kind, const uint8_t *codes, const float *table, f8 *low, f8 *high)
{
    const __m128i b = _mm_loadl_epi64((const void *)codes);
    if (kind == TABLE4) {
        const __m256i v = _mm256_cvtepu8_epi32(b);
        const __m256 x = _mm256_loadu_ps(table), y = _mm256_loadu_ps(table + 8);
        *low = (f8)looked_up(v, x, y);
        *high = (f8)looked_up(_mm256_srli_epi32(v, 4), x, y);
    } else if (IS_HALF(kind)) {
        __m128i v = _mm_cvtepu8_epi16(b);
        AS_HALVES(, si128, kind, v);
        *low = (f8)_mm256_cvtph_ps(v);
    } else if (kind == I8)
        *low = (f8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
    else if (kind == U8)
        *low = (f8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b));
    else
        *low = (f8)_mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(b), 4);
}
#endif

/* Keeps operations on either side of it apart: a product fused with the addition of a bias is not rounded as decoding does. */
#if defined(__x86_64__)
#define APART(v) __asm__ volatile("" : "+v"(v))
#elif defined(__aarch64__)
#define APART(v) __asm__ volatile("" : "+w"(v))
#else
#define APART(v) __asm__ volatile("" : "+m"(v))
#endif

/* sums += x times the codes of `count` rows and of a strip of columns, scaled. x: (m, k) from the first of these rows on. */
#define STEP_BY(version, target, vector)                                                                                       \
    target static void version##_widened(                                                                                      \
        const matrix *w, Py_ssize_t k, Py_ssize_t count, Py_ssize_t first, Py_ssize_t n, uint8_t *to)                          \
    {                                                                                                                          \
        widened(w, k, count, first, n, to);                                                                                    \
    }                                                                                                                          \
    target static int version##_scales(                                                                                        \
        const matrix *w, Py_ssize_t row, Py_ssize_t first, Py_ssize_t n, float *scales, float *offsets)                        \
    {                                                                                                                          \
        return panel_scales(w, row, first, n, scales, offsets);                                                                \
    }                                                                                                                          \
    target static void version##_turned(void *context)                                                                         \
    {                                                                                                                          \
        turn_some(context);                                                                                                    \
    }                                                                                                                          \
    target INLINE void version##_step(const int kind, const int m, const int role, const matrix *w, const float *x,            \
        Py_ssize_t count, const uint8_t *codes, Py_ssize_t stride, const float *scales, const float *offsets, float *sums)     \
    {                                                                                                                          \
        vector t[MOST_ROWS][VECTORS] = {{{0}}}, low, high = {0};                                                               \
        for (Py_ssize_t i = 0; i < count; i += kind == TABLE4 ? 2 : 1, codes += stride) {                                      \
            __builtin_prefetch(codes + (kind == TABLE4 ? STEP / 2 : STEP) * stride);                                           \
            const int pair = kind == TABLE4 && i + 1 < count;                                                                  \
            UNROLL for (int v = 0; v < VECTORS; v++)                                                                           \
            {                                                                                                                  \
                version##_decoded(kind, codes + v * (int)(sizeof(vector) / 4), w->codes.table, &low, &high);                   \
                if (role != NONE) {                                                                                            \
                    vector scale, offset;                                                                                      \
                    memcpy(&scale, scales + v * (int)(sizeof(vector) / 4), sizeof scale);                                      \
                    memcpy(&offset, offsets + v * (int)(sizeof(vector) / 4), sizeof offset);                                   \
                    if (role == BIAS) {                                                                                        \
                        low *= scale, high *= scale;                                                                           \
                        APART(low);                                                                                            \
                        APART(high);                                                                                           \
                        low += offset, high += offset;                                                                         \
                    } else                                                                                                     \
                        low -= offset, high -= offset;                                                                         \
                }                                                                                                              \
                UNROLL for (int r = 0; r < m; r++) t[r][v] += low * x[r * w->k + i];                                           \
                if (pair)                                                                                                      \
                    UNROLL for (int r = 0; r < m; r++) t[r][v] += high * x[r * w->k + i + 1];                                  \
            }                                                                                                                  \
        }                                                                                                                      \
        UNROLL for (int v = 0; v < VECTORS; v++)                                                                               \
        {                                                                                                                      \
            vector scale, sum;                                                                                                 \
            memcpy(&scale, scales + v * (int)(sizeof(vector) / 4), sizeof scale);                                              \
            UNROLL for (int r = 0; r < m; r++)                                                                                 \
            {                                                                                                                  \
                memcpy(&sum, sums + r * PANEL + v * (int)(sizeof(vector) / 4), sizeof sum);                                    \
                sum += role == BIAS ? t[r][v] : t[r][v] * scale;                                                               \
                memcpy(sums + r * PANEL + v * (int)(sizeof(vector) / 4), &sum, sizeof sum);                                    \
            }                                                                                                                  \
        }                                                                                                                      \
    }                                                                                                                          \
    OF_ROWS(version, target, TABLE4, NONE)                                                                                     \
    OF_ROWS(version, target, TABLE4, ZERO_POINT)                                                                               \
    OF_ROWS(version, target, TABLE4, BIAS)                                                                                     \
    OF_ROWS(version, target, TABLE8, NONE)                                                                                     \
    OF_ROWS(version, target, TABLE8, ZERO_POINT)                                                                               \
    OF_ROWS(version, target, TABLE8, BIAS)                                                                                     \
    OF_ROWS(version, target, I8, NONE)                                                                                         \
    OF_ROWS(version, target, I8, ZERO_POINT)                                                                                   \
    OF_ROWS(version, target, I8, BIAS)                                                                                         \
    OF_ROWS(version, target, U8, NONE)                                                                                         \
    OF_ROWS(version, target, U8, ZERO_POINT)                                                                                   \
    OF_ROWS(version, target, U8, BIAS)                                                                                         \
    OF_ROWS(version, target, E4M3, NONE)                                                                                       \
    OF_ROWS(version, target, E5M2, NONE)                                                                                       \
    OF_ROWS(version, target, E2M3, NONE)                                                                                       \
    OF_ROWS(version, target, E3M2, NONE)                                                                                       \
    static const stepper version##_steps[KINDS][ROLES] = {                                                                     \
        [TABLE4] = {version##_TABLE4_NONE, version##_TABLE4_ZERO_POINT, version##_TABLE4_BIAS},                                \
        [TABLE8] = {version##_TABLE8_NONE, version##_TABLE8_ZERO_POINT, version##_TABLE8_BIAS},                                \
        [E4M3] = {version##_E4M3_NONE}, [E5M2] = {version##_E5M2_NONE}, [E2M3] = {version##_E2M3_NONE},                        \
        [E3M2] = {version##_E3M2_NONE}, [I8] = {version##_I8_NONE, version##_I8_ZERO_POINT, version##_I8_BIAS},                \
        [U8] = {version##_U8_NONE, version##_U8_ZERO_POINT, version##_U8_BIAS}};

#define OF_ROWS(version, target, kind, role)                                                                                   \
    target static void version##_##kind##_##role(int m, const matrix *w, const float *x, Py_ssize_t count,                    \
        const uint8_t *codes, Py_ssize_t stride, const float *scales, const float *offsets, float *sums)                       \
    {                                                                                                                          \
        switch (m) {                                                                                                           \
        case 1: version##_step(kind, 1, role, w, x, count, codes, stride, scales, offsets, sums); break;                      \
        case 2: version##_step(kind, 2, role, w, x, count, codes, stride, scales, offsets, sums); break;                      \
        case 3: version##_step(kind, 3, role, w, x, count, codes, stride, scales, offsets, sums); break;                      \
        case 4: version##_step(kind, 4, role, w, x, count, codes, stride, scales, offsets, sums); break;                       \
        case 5: version##_step(kind, 5, role, w, x, count, codes, stride, scales, offsets, sums); break;                       \
        default: version##_step(kind, 6, role, w, x, count, codes, stride, scales, offsets, sums);                             \
        }                                                                                                                      \
    }

typedef void (*stepper)(int, const matrix *, const float *, Py_ssize_t, const uint8_t *, Py_ssize_t, const float *,
    const float *, float *);

typedef struct {
    const char *name;
    const stepper (*steps)[ROLES];
    void (*widened)(const matrix *, Py_ssize_t, Py_ssize_t, Py_ssize_t, Py_ssize_t, uint8_t *);
    int (*scales)(const matrix *, Py_ssize_t, Py_ssize_t, Py_ssize_t, float *, float *);
    void (*turned)(void *turning);
    float (*lift)(int); /* what values of codes of a kind have to be multiplied by: a power of two */
    int strip, most;    /* columns of a strip, and rows of activations that have registers */
} version;

STEP_BY(portable, , f4)
static const version portable = {
    "portable", portable_steps, portable_widened, portable_scales, portable_turned, no_lift, 4 * VECTORS, 2};
#if defined(__x86_64__)
STEP_BY(avx2, FOR_AVX2, f8)
STEP_BY(avx512, FOR_AVX512, f16)
static const version avx2 = {
    "avx2", avx2_steps, avx2_widened, avx2_scales, avx2_turned, lift_of, 8 * VECTORS, 2};
static const version avx512 = {
    "avx512", avx512_steps, avx512_widened, avx512_scales, avx512_turned, lift_of, 16 * VECTORS, 6};
#endif

/* Those that this processor can run, the best first. */
static const version *versions[4], *here;

static void find_versions(void)
{
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2_too = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2_too && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        versions[n++] = &avx512;
    if (avx2_too)
        versions[n++] = &avx2;
#endif
    versions[n] = &portable;
    here = versions[0];
}

/* -------------------------------------------------------------------------------------------------- panels */

/* y = x times columns `first` to `end` of the weight, for m <= MOST_ROWS rows. Returns whether numbers are within the limits. */
static int multiplied(const matrix *w, const float *x, int m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    float sums[MOST_ROWS * PANEL] = {0}, scales[PANEL] = {0}, offsets[PANEL] = {0};
    uint8_t rest[STEP * WIDEST], wide[STEP * PANEL];
    const int packed = w->codes.kind == TABLE4;
    const stepper step = here->steps[w->codes.kind][w->role];
    const Py_ssize_t n = end - first, strip = here->strip;
    for (Py_ssize_t k = 0; k < w->k;) {
        if (k % w->block == 0 && !here->scales(w, k / w->block, first, n, scales, offsets))
            return 0;
        const Py_ssize_t left = w->block - k % w->block, count = left < w->k - k ? (left < STEP ? left : STEP) :
            w->k - k < STEP ? w->k - k : STEP;
        const Py_ssize_t rows = packed ? (count + 1) / 2 : count;
        const Py_ssize_t stride = w->widens ? PANEL : w->n;
        const uint8_t *codes = w->widens ? wide : w->codes.items + (packed ? k / 2 : k) * w->n + first;
        Py_ssize_t c = 0;
        if (w->widens)
            here->widened(w, k, count, first, n, wide);
        for (; c + strip <= n; c += strip)
            step(m, w, x + k, count, codes + c, stride, scales + c, offsets + c, sums + c);
        if (c < n) { /* the last strip of the weight, of fewer columns: zeros follow them */
            memset(rest, 0, sizeof rest);
            for (Py_ssize_t i = 0; i < rows; i++)
                memcpy(rest + i * strip, codes + i * stride + c, (size_t)(n - c));
            step(m, w, x + k, count, rest, strip, scales + c, offsets + c, sums + c);
        }
        k += count;
    }
    for (int r = 0; r < m; r++)
        memcpy(y + r * w->n + first, sums + r * PANEL, 4 * (size_t)n);
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
    return (x->len == 4 * n && (uintptr_t)x->buf % 4 == 0) || refused(what, 4 * n, x->len);
}

/* A product that threads share, each of which takes the next panel of columns until none is left. */
typedef struct {
    const matrix *w;
    const float *x;
    float *y;
    Py_ssize_t m;
    int64_t next; /* the first column that no thread has taken */
    int fine;     /* 0 once numbers are beyond the limits */
} product;

static void take_panels(void *context)
{
    product *p = context;
    const matrix *w = p->w;
    while (__atomic_load_n(&p->fine, __ATOMIC_RELAXED)) {
        const Py_ssize_t first = (Py_ssize_t)__atomic_fetch_add(&p->next, PANEL, __ATOMIC_RELAXED);
        if (first >= w->n)
            return;
        const Py_ssize_t end = first + PANEL < w->n ? first + PANEL : w->n;
        for (Py_ssize_t r = 0; r < p->m; r += here->most) {
            const int rows = p->m - r < here->most ? (int)(p->m - r) : here->most;
            if (!multiplied(w, p->x + r * w->k, rows, first, end, p->y + r * w->n)) {
                __atomic_store_n(&p->fine, 0, __ATOMIC_RELAXED);
                return;
            }
        }
    }
}

PyDoc_STRVAR(multiply_doc,
    "multiply(x, m, k, n, data, kind, width, table, scale, scale_kind, scale_table, block, tall, divides, factor, least, offset,\n"
    "offset_kind, role, product, threads): write (m, k) FP32 numbers times a weight of (k, n) codes, in C order, to `product`, in C\n"
    "order. Codes of several rows share bytes of their column. scale, offset: one for each block of `block` rows and `tall`\n"
    "columns, in C order. The other arguments are those of `products.multiply`. Returns False, and the result is\n"
    "unspecified, for numbers beyond the limits of products.c.");

static PyObject *multiply(PyObject *self, PyObject *args)
{
    Py_buffer x, data, table, scale, scale_table, offset, y;
    Py_ssize_t m;
    int threads, fine = 1;
    matrix w = {{0}};
    if (!PyArg_ParseTuple(args, "y*nnny*iiy*y*iy*nnpffy*iiw*i:multiply", &x, &m, &w.k, &w.n, &data, &w.codes.kind, &w.width, &table,
            &scale, &w.scale.kind, &scale_table, &w.block, &w.tall, &w.divides, &w.factor, &w.least, &offset, &w.offset.kind, &w.role, &y,
            &threads))
        return NULL;
    const Py_ssize_t most = (Py_ssize_t)1 << 40;
    int done = m > 0 && w.k > 0 && w.n > 0 && m < most / w.k && m < most / w.n && w.n < most / w.k && w.block > 0 && w.tall > 0 &&
        w.codes.kind >= 0 && w.codes.kind < KINDS && is_width(w.width, w.codes.kind) && w.role >= 0 && w.role < ROLES &&
        here->steps[w.codes.kind][w.role] != NULL && w.scale.kind > TABLE4 && w.scale.kind < KINDS && w.offset.kind > E5M2 &&
        w.offset.kind < KINDS && kind_bits[w.scale.kind] != 6 && kind_bits[w.offset.kind] != 6;
    if (!done)
        PyErr_SetString(PyExc_ValueError, "wanted lengths and kinds that breccia_native.matmul passes. Call breccia.matmul.");
    else {
        const Py_ssize_t block = w.block < w.k ? w.block : w.k, tall = w.tall < w.n ? w.tall : w.n;
        const Py_ssize_t rows = stored_bytes(w.k, w.width);
        w.block = block, w.tall = tall, w.wide = (w.n + tall - 1) / tall;
        w.widens = w.width % 4 || w.width < kind_bits[w.codes.kind] || (w.width == 4 && block % 2 && block < w.k);
        const Py_ssize_t scales = (w.k + block - 1) / block * w.wide;
        const Py_ssize_t scale_bytes = scales * kind_bits[w.scale.kind] / 8, offset_bytes = scales * kind_bits[w.offset.kind] / 8;
        done = is_float("activations", &x, m * w.k) && is_float("a product", &y, m * w.n) &&
            (data.len == rows * w.n || refused("codes", rows * w.n, data.len)) &&
            (w.codes.kind > TABLE8 || is_float("a table", &table, (Py_ssize_t)1 << kind_bits[w.codes.kind])) &&
            (w.scale.kind > TABLE8 || is_float("a table of scales", &scale_table, 256)) &&
            (scale.len == scale_bytes || refused("scales", scale_bytes, scale.len)) &&
            (w.role == NONE || offset.len == offset_bytes || refused("offsets", offset_bytes, offset.len));
    }
    if (done) {
        w.codes.items = data.buf, w.codes.table = table.buf;
        w.scale.items = scale.buf, w.scale.table = scale_table.buf;
        w.offset.items = offset.buf;
        w.factor *= here->lift(w.codes.kind);
        Py_BEGIN_ALLOW_THREADS
        product p = {&w, x.buf, y.buf, m, 0, within(x.buf, m * w.k, MOST_X, 0)};
        run_shared(take_panels, &p, threads);
        fine = p.fine;
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&data);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scale);
    PyBuffer_Release(&scale_table);
    PyBuffer_Release(&offset);
    PyBuffer_Release(&y);
    return done ? PyBool_FromLong(fine) : NULL;
}

PyDoc_STRVAR(turn_doc,
    "turn(data, rows, columns, found, threads): write the transpose of a matrix of bytes, in C order, to `found`, in C order.");

static PyObject *turn(PyObject *self, PyObject *args)
{
    Py_buffer data, found;
    turning t = {0};
    int threads;
    if (!PyArg_ParseTuple(args, "y*nnw*i:turn", &data, &t.rows, &t.columns, &found, &threads))
        return NULL;
    const int whole = t.rows > 0 && t.columns > 0 && t.rows <= PY_SSIZE_T_MAX / t.columns;
    const Py_ssize_t n = whole ? t.rows * t.columns : 0;
    const int done = whole && data.len == n && found.len == n;
    if (done) {
        t.from = data.buf, t.to = found.buf;
        Py_BEGIN_ALLOW_THREADS
        run_shared(here->turned, &t, threads);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "wanted two matrices of %zd x %zd bytes; got %zd and %zd bytes. Call breccia.matmul.", t.rows,
            t.columns, data.len, found.len);
    PyBuffer_Release(&data);
    PyBuffer_Release(&found);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(supports_doc, "supports(kind, role): whether `multiply` decodes these codes, with offsets of this role.");

static PyObject *supports(PyObject *self, PyObject *args)
{
    int kind, role;
    if (!PyArg_ParseTuple(args, "ii:supports", &kind, &role))
        return NULL;
    return PyBool_FromLong(kind >= 0 && kind < KINDS && role >= 0 && role < ROLES && here->steps[kind][role] != NULL);
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
        if (!each || PyList_Append(found, each))
            Py_CLEAR(found);
        Py_XDECREF(each);
        if (name && strcmp(name, versions[i]->name) == 0) {
            here = versions[i];
            known = 1;
        }
    }
    if (found && !known) {
        PyErr_Format(PyExc_ValueError, "this processor has the instruction sets %R; got '%s'.", found, name);
        Py_CLEAR(found);
    }
    return found;
}

static PyMethodDef methods[] = {
    {"multiply", multiply, METH_VARARGS, multiply_doc},
    {"turn", turn, METH_VARARGS, turn_doc},
    {"supports", supports, METH_VARARGS, supports_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *self)
{
    return find_pool();
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.columns",
    .m_doc = "Compiled products of activations and weights in (K, N) order; see breccia_native.matmul, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_columns(void)
{
    find_versions();
    return PyModuleDef_Init(&module);
}
