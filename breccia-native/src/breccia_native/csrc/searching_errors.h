/* The error of a block under a scale, by the operations and in the order of docs/spec/numerics.md, section 5.6.

   Products and sums must not be fused (see setup.py). */

#ifndef BRECCIA_SEARCHING_ERRORS_H
#define BRECCIA_SEARCHING_ERRORS_H

#include "positions.h"
#include "searching.h"

#if defined(BY_AVX512) || defined(BY_AVX2)
#include "transpose.h"
#endif

/* A number rounded to that of a code. */
INLINE float rounded_float(float a, minifloat f)
{
    int32_t u = (int32_t)bits_of(a);
    u = u > (int32_t)f.largest ? (int32_t)f.largest : u;
    const int32_t e = (int32_t)((uint32_t)u & EXPONENT), binade = e > (int32_t)f.floor ? e : (int32_t)f.floor;
    /* The last bit of what is added is the spacing of codes. */
#if defined(BY_AVX512)
    const float m = float_of((uint32_t)binade), power = float_of((uint32_t)(127 + f.shift) << 23); /* their product is exact */
    return __builtin_fmaf(-m, power, __builtin_fmaf(m, power, float_of((uint32_t)u)));
#else
    const float m = float_of((uint32_t)(binade + (f.shift << 23)));
    return (float_of((uint32_t)u) + m) - m;
#endif
}

/* The nearest integer, and y less a product that FP32 has exactly. */
#if defined(BY_AVX512)
#define WHOLE_OF(a, magic) __builtin_rintf(a)
#define LESS(y, q, unit) __builtin_fmaf(-(q), unit, y)
#else
#define WHOLE_OF(a, magic) (((a) + (magic)) - (magic))
#define LESS(y, q, unit) ((y) - (q) * (unit))
#endif

/* The number of the code of a number in units of its scale; of tables, see `look_up`. */
INLINE float rounded(const int kind, const searched *s, float scaled)
{
    if (kind == FLOATS)
        return rounded_float(scaled, s->floats);
    const integer by = s->integers;
    const float below = scaled < by.high ? scaled : by.high, inside = below > by.low ? below : by.low;
    return kind == WHOLE ? WHOLE_OF(inside, by.magic) : (inside + by.magic) - by.magic;
}

/* The numbers of the codes of a table for n numbers, a multiple of 16. */
OUTLINE void look_up(const table *by, const float *restrict x, float inverse, Py_ssize_t n, float *restrict q)
{
#if defined(BY_AVX512)
    const __m512 starts = _mm512_loadu_ps(by->starts), values = _mm512_loadu_ps(by->values);
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse));
        _mm512_storeu_ps(q + i, _mm512_permutexvar_ps(position_by_halving(scaled, starts), values));
    }
#else
    for (Py_ssize_t i = 0; i < n; i++) {
        const float scaled = x[i] * inverse;
        float found = by->values[0];
        for (int j = 1; j < 16; j++)
            found = scaled >= by->starts[j] ? by->values[j] : found;
        q[i] = found;
    }
#endif
}

/* The sum by a pairwise tree of n numbers, a power of two of at least 16, which are overwritten. */
INLINE float sum_of(float *a, Py_ssize_t n)
{
    for (n /= 2; n >= 16; n /= 2)
        for (Py_ssize_t i = 0; i < n; i++)
            a[i] += a[i + n];
#if defined(BY_AVX512)
    const __m512 all = _mm512_loadu_ps(a);
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    for (int i = 0; i < 8; i++)
        a[i] += a[i + 8];
    for (int i = 0; i < 4; i++)
        a[i] += a[i + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
#endif
}

/* A block for which errors are computed: its elements, of minifloats their magnitudes, as they are and in units of powers of two, and
   weights; each row filled up with zeros to `length`. */
typedef struct {
    float *x, *y, *q, *w, *sums, *of_rows;
    Py_ssize_t m, k, length;
} elements;

#if defined(BY_AVX512)
/* 16 numbers of a dtype, of those that `real` says. */
INLINE __m512 sixteen(int dtype, const char *x, __mmask16 real)
{
    if (dtype == FP32)
        return _mm512_maskz_loadu_ps(real, x);
    const __m256i halves = _mm256_maskz_loadu_epi16(real, x);
    return dtype == FP16 ? _mm512_cvtph_ps(halves) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* n elements, of whose bits some are kept, and the same times `power`. */
INLINE void load_row(int dtype, uint32_t kept, const char *from, Py_ssize_t n, float power, float *x, float *y)
{
    const Py_ssize_t bytes = dtype == FP32 ? 4 : 2;
    const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(MAGNITUDE)), bits = _mm512_castsi512_ps(_mm512_set1_epi32((int)kept));
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512 all = sixteen(dtype, from + i * bytes, (__mmask16)(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff));
        const __mmask16 normal = _mm512_cmp_ps_mask(_mm512_and_ps(all, magnitude), _mm512_set1_ps(0x1p-126f), _CMP_GE_OQ);
        const __m512 number = _mm512_maskz_and_ps(normal, all, bits), scaled = _mm512_mul_ps(number, _mm512_set1_ps(power));
        const __mmask16 counts = _mm512_cmp_ps_mask(_mm512_and_ps(scaled, magnitude), _mm512_set1_ps(0x1p-20f), _CMP_GE_OQ);
        _mm512_storeu_ps(x + i, number);
        _mm512_storeu_ps(y + i, _mm512_maskz_mov_ps(counts, scaled));
    }
}
#else
INLINE void load_row(int dtype, uint32_t kept, const char *from, Py_ssize_t n, float power, float *restrict x, float *restrict y)
{
    row_of(from, n, dtype, (uint32_t *)x);
    for (Py_ssize_t i = 0; i < n; i++) {
        const uint32_t u = bits_of(x[i]);
        x[i] = float_of((u & MAGNITUDE) < NORMAL ? 0 : u & kept);
        const float scaled = x[i] * power;
        y[i] = float_of(bits_of(scaled) & MAGNITUDE) < 0x1p-20f ? 0 : scaled;
    }
}
#endif

/* Elements from `from` on, in rows `down` bytes apart. */
OUTLINE void load_elements(int kind, const searched *s, const elements *to, const char *from, Py_ssize_t down, float power)
{
    const uint32_t kept = kind == FLOATS ? MAGNITUDE : ~0u;
    for (Py_ssize_t r = 0; r < to->m; r++)
        load_row(s->dtype, kept, from + r * down, to->k, power, to->x + r * to->length, to->y + r * to->length);
}

/* A term of the error. */
INLINE float term_of(const int kind, const int weighted, const searched *s, float x, float y, float w, float q, float inverse, float unit)
{
    const float number = kind == TABLES ? q : rounded(kind, s, x * inverse);
    const float d = kind == WHOLE ? LESS(y, number, unit) : y - number * unit;
    return weighted ? d * d * w : d * d;
}

#define TERM(i) term_of(kind, weighted, s, x[i], y[i], weighted ? w[i] : 0, kind == TABLES ? q[i] : 0, inverse, unit)

/* Terms of the error of row r, of at most 32 elements: 16 that the pairwise tree still adds. */
INLINE void short_terms_of(const int kind, const int weighted, const searched *s, const elements *of, Py_ssize_t r, float inverse,
    float unit, float *restrict sums)
{
    const float *const restrict x = of->x + r * of->length, *const restrict y = of->y + r * of->length;
    const float *const restrict w = of->w, *const restrict q = of->q;
    if (kind == TABLES)
        look_up(&s->values, x, inverse, of->length, of->q);
    /* GCC makes no vectors of a loop that it unrolls first. */
    if (of->length == 16)
        _Pragma("GCC unroll 1") for (int i = 0; i < 16; i++) sums[i] = TERM(i);
    else
        _Pragma("GCC unroll 1") for (int i = 0; i < 16; i++) sums[i] = TERM(i) + TERM(i + 16);
}

/* The sums by a pairwise tree of each of `rows` rows of 16 terms. */
INLINE void sums_of_rows(float (*terms)[16], int rows, float *sums)
{
#if defined(BY_AVX512)
    if (rows == 16) {
        __m512 v[16];
        _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++) v[r] = _mm512_loadu_ps(terms[r]);
        transposed(v);
        _Pragma("GCC unroll 4") for (int n = 8; n; n /= 2)
            _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) v[i] = _mm512_add_ps(v[i], v[i + n]);
        _mm512_storeu_ps(sums, v[0]);
        return;
    }
#endif
    for (int r = 0; r < rows; r++)
        sums[r] = sum_of(terms[r], 16);
}

/* The error of a block of one row of at most 32 elements. */
INLINE float short_error_of(const int kind, const int weighted, const searched *s, const elements *of, float inverse, float unit)
{
    float terms[16];
    short_terms_of(kind, weighted, s, of, 0, inverse, unit, terms);
    return sum_of(terms, 16);
}

INLINE float error_of(const int kind, const int weighted, const searched *s, const elements *of, float inverse, float unit)
{
    const Py_ssize_t half = of->length / 2, both = of->k - half;
    float *const restrict sums = of->sums;
    for (Py_ssize_t r = 0; of->length <= 32 && r < of->m; r += 16) {
        const int rows = of->m - r < 16 ? (int)(of->m - r) : 16;
        float terms[16][16];
        for (int j = 0; j < rows; j++)
            short_terms_of(kind, weighted, s, of, r + j, inverse, unit, terms[j]);
        sums_of_rows(terms, rows, of->of_rows + r);
    }
    for (Py_ssize_t r = 0; of->length > 32 && r < of->m; r++) {
        const float *const restrict x = of->x + r * of->length, *const restrict y = of->y + r * of->length;
        const float *const restrict w = of->w, *const restrict q = of->q;
        if (kind == TABLES)
            look_up(&s->values, x, inverse, of->length, of->q);
        for (Py_ssize_t i = 0; i < both; i++)
            sums[i] = TERM(i) + TERM(i + half);
        for (Py_ssize_t i = both; i < half; i++)
            sums[i] = TERM(i);
        of->of_rows[r] = sum_of(sums, half);
    }
    const Py_ssize_t rows = filled_up(of->m);
    for (Py_ssize_t r = of->m; r < rows; r++)
        of->of_rows[r] = 0;
    return of->m == 1 ? of->of_rows[0] : sum_of(of->of_rows, rows);
}

#undef TERM

/* The error of a block under a scale of this inverse and unit: for each kind of elements, with weights and without, for blocks of one
   row of at most 32 elements, and others. */
typedef float (*error_function)(const searched *, const elements *, float, float);

#define ERRORS(name, kind, weighted)                                                              \
    static float name(const searched *s, const elements *of, float inverse, float unit)           \
    {                                                                                             \
        return error_of(kind, weighted, s, of, inverse, unit);                                    \
    }                                                                                             \
    static float short_##name(const searched *s, const elements *of, float inverse, float unit)   \
    {                                                                                             \
        return short_error_of(kind, weighted, s, of, inverse, unit);                              \
    }

ERRORS(floats_error, FLOATS, 0)
ERRORS(integers_error, INTEGERS, 0)
ERRORS(whole_error, WHOLE, 0)
ERRORS(tables_error, TABLES, 0)
ERRORS(weighted_floats_error, FLOATS, 1)
ERRORS(weighted_integers_error, INTEGERS, 1)
ERRORS(weighted_whole_error, WHOLE, 1)
ERRORS(weighted_tables_error, TABLES, 1)

#define ERRORS_OF(name) {{name, short_##name}, {weighted_##name, short_weighted_##name}}

/* By kind, weights and shortness. */
static const error_function errors[][2][2] = {
    [FLOATS] = ERRORS_OF(floats_error),
    [INTEGERS] = ERRORS_OF(integers_error),
    [WHOLE] = ERRORS_OF(whole_error),
    [TABLES] = ERRORS_OF(tables_error),
};

#endif
