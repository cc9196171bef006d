/* Numbers of a cast times the inverse scales of their blocks, or over their scales. */

#ifndef BRECCIA_SCALED_H
#define BRECCIA_SCALED_H

#include "loads.h"

/* A zero of the same sign, if y is below 2^-126. */
INLINE float flushed(float y)
{
    const uint32_t u = bits_of(y);
    return float_of((int32_t)(u & MAGNITUDE) < (int32_t)NORMAL ? u & ~MAGNITUDE : u);
}

/* Number i of x, which is of the kind. */
INLINE float at(const char *x, int kind, Py_ssize_t i)
{
    float y;
    uint16_t half;
    if (kind == FP32) {
        memcpy(&y, x + 4 * i, 4);
        return y;
    }
    memcpy(&half, x + 2 * i, 2);
    return float_of(kind == BF16 ? (uint32_t)half << 16 : bits_of_half(half));
}

/* y = n numbers of x times a factor, or over it. flushes: whether those below 2^-126 become zeros before. */
INLINE void times(const char *x, int kind, int flushes, float by, Py_ssize_t n, int divides, float *y)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        const float number = flushes ? flushed(at(x, kind, i)) : at(x, kind, i);
        y[i] = divides ? number / by : number * by;
    }
}

/* Row r of numbers whose blocks are columns: each number has a block of its own. All numbers, if blocks are along rows. */
INLINE numbers row_at(const numbers *all, Py_ssize_t r)
{
    numbers row = *all;
    if (!all->across)
        return row;
    row.x += r * all->across * (all->kind == FP32 ? 4 : 2);
    row.inverse += r / all->k * all->across;
    row.n = all->across;
    row.k = 1;
    return row;
}

/* The position of the next number in its block of k: the inverse scale, and how many numbers of the block are left. */
typedef struct {
    const float *inverse;
    Py_ssize_t left;
} place;

#if defined(BY_AVX512)
/* n numbers of FP16 times a scale, or over it. */
INLINE void halves_times(const uint16_t *x, float by, Py_ssize_t n, int divides, float *y)
{
    const __m512 factor = _mm512_set1_ps(by);
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i)));
        _mm512_storeu_ps(y + i, divides ? _mm512_div_ps(wide, factor) : _mm512_mul_ps(wide, factor));
    }
    for (; i < n; i++)
        y[i] = divides ? float_of(bits_of_half(x[i])) / by : float_of(bits_of_half(x[i])) * by;
}

/* `scaled_of` for FP16. */
static void halves_scaled_by_avx512(const uint16_t *x, Py_ssize_t k, Py_ssize_t n, int divides, place *next, float *y)
{
    for (Py_ssize_t i = 0, length; i < n; i += length) {
        const float by = *next->inverse;
        length = next->left < n - i ? next->left : n - i;
        if (by == 0)
            memset(y + i, 0, 4 * (size_t)length);
        else if (length == 32)
            halves_times(x + i, by, 32, divides, y + i);
        else
            halves_times(x + i, by, length, divides, y + i);
        next->left -= length;
        if (next->left == 0) {
            next->inverse++;
            next->left = k;
        }
    }
}
#endif

/* y = n numbers of x times the inverse scales of their blocks. Loops over usual blocks have a length known at compile time. */
INLINE void scaled_of(const char *x, int kind, int flushes, Py_ssize_t k, Py_ssize_t n, int divides, place *next, float *y)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    if (k == 1) {
        const float *by = next->inverse;
        for (Py_ssize_t i = 0; i < n; i++) {
            float found;
            times(x + i * size, kind, flushes, by[i], 1, divides, &found);
            y[i] = by[i] == 0 ? 0.0f : found;
        }
        next->inverse += n;
        return;
    }
    for (Py_ssize_t i = 0, length; i < n; i += length) {
        const float by = *next->inverse;
        length = next->left < n - i ? next->left : n - i;
        if (by == 0)
            memset(y + i, 0, 4 * (size_t)length);
        else if (length == 16)
            times(x + i * size, kind, flushes, by, 16, divides, y + i);
        else if (length == 32)
            times(x + i * size, kind, flushes, by, 32, divides, y + i);
        else
            times(x + i * size, kind, flushes, by, length, divides, y + i);
        next->left -= length;
        if (next->left == 0) {
            next->inverse++;
            next->left = k;
        }
    }
}

/* y = the next n scaled numbers, in a strip. */
INLINE void scaled_strip(const numbers *all, Py_ssize_t start, Py_ssize_t n, const int divides, place *next, float *y)
{
    const Py_ssize_t size = all->kind == FP32 ? 4 : 2;
    const char *x = all->x + start * size;
    float room[STRIP];
    if (!all->across)
        fetch_ahead(x, n * size);
    if (all->random.width > 0) {
        x = (const char *)strip_of(all->x, all->kind, start, n, all->widen, room);
        scaled_of(x, FP32, 1, all->k, n, divides, next, y);
        return;
    }
#if defined(BY_AVX512)
    if (all->kind == FP16 && all->k > 1) {
        halves_scaled_by_avx512((const uint16_t *)x, all->k, n, divides, next, y);
        return;
    }
#endif
    if (WIDENS && all->kind == FP16) {
        all->widen((const uint16_t *)x, n, room);
        scaled_of((const char *)room, FP32, 0, all->k, n, divides, next, y);
        return;
    }
    switch (all->kind) { /* each compiled for its kind */
    case FP32: scaled_of(x, FP32, 0, all->k, n, divides, next, y); break;
    case BF16: scaled_of(x, BF16, 0, all->k, n, divides, next, y); break;
    default: scaled_of(x, FP16, 0, all->k, n, divides, next, y);
    }
}

/* Likewise over scales: a function of its own, since few formats have divisors. */
OUTLINE void divided_strip(const numbers *all, Py_ssize_t start, Py_ssize_t n, place *next, float *y)
{
    scaled_strip(all, start, n, 1, next, y);
}

INLINE void scaled(const numbers *all, Py_ssize_t start, Py_ssize_t n, place *next, float *y)
{
    if (all->divides)
        divided_strip(all, start, n, next, y);
    else
        scaled_strip(all, start, n, 0, next, y);
}

/* What writes codes, for the rows of numbers whose blocks are columns too. */
#define EACH_ROW(call, all, codes)                                                                                          \
    do {                                                                                                                    \
        const Py_ssize_t rows = (all)->across ? (all)->n / (all)->across : 1;                                               \
        for (Py_ssize_t r = 0; r < rows; r++) {                                                                             \
            const numbers row = row_at(all, r), *part = &row;                                                               \
            uint8_t *to = (codes) + r * (all)->across;                                                                      \
            call;                                                                                                           \
        }                                                                                                                   \
    } while (0)

#endif
