/* The sums of error metrics, which a compiler makes vectors of. Contraction must stay off: the arithmetic is that of
   breccia/kernels/measuring.py, except for the order of additions. */

#ifndef BRECCIA_MEASURING_SUMS_H
#define BRECCIA_MEASURING_SUMS_H

#include <float.h>

#include "measuring.h"

/* Numbers measured at a time, which stay in the L1 cache; a multiple of SUMS. */
#define STRIP 256

typedef struct {
    double signal[SUMS], noise[SUMS], dot[SUMS], energy[SUMS], most[SUMS];
} partial;

/* The sums of n numbers, a multiple of SUMS. wide: numbers of FP64 in place of x, or NULL. */
INLINE void add_sums(const float *x, const double *wide, const float *y, Py_ssize_t n, partial *s)
{
    for (Py_ssize_t i = 0; i < n; i += SUMS)
        for (int j = 0; j < SUMS; j++) {
            const double p = wide ? wide[i + j] : x[i + j], q = y[i + j], e = p - q, a = fabs(e);
            s->signal[j] += p * p;
            s->noise[j] += e * e;
            s->dot[j] += p * q;
            s->energy[j] += q * q;
            s->most[j] = a > s->most[j] ? a : s->most[j];
        }
}

/* The numbers below and above which an element saturates; infinite where nothing does. */
INLINE void limits_of_block(float l, float h, float below, float above, float *least, float *most)
{
    const float a = l - (h * below - l * below), b = h + (h * above - l * above);
    const float low = a < b ? a : b, high = a < b ? b : a; /* a negative scale swaps the two */
    const int some = low < high;                           /* not where one is NaN */
    *least = some ? low : -INFINITY;
    *most = some ? high : INFINITY;
}

/* The limits of up to STRIP numbers from number i on. */
INLINE void limits_of(const measured *m, Py_ssize_t i, Py_ssize_t n, float *least, float *most)
{
    if (m->each == 1) {
        for (Py_ssize_t j = 0; j < n; j++)
            limits_of_block(m->low[i + j], m->high[i + j], m->below, m->above, least + j, most + j);
        return;
    }
    Py_ssize_t column = i % m->columns, left = m->each - column % m->each;
    Py_ssize_t block = i / m->columns * blocks_of_row(m) + column / m->each;
    for (Py_ssize_t j = 0, run; j < n; j += run, block++, left = m->each) {
        const Py_ssize_t across = m->columns - column < n - j ? m->columns - column : n - j;
        float low, high;
        run = left < across ? left : across;
        limits_of_block(m->low[block], m->high[block], m->below, m->above, &low, &high);
        if (run == 16)
            for (Py_ssize_t k = j; k < j + 16; k++)
                least[k] = low, most[k] = high;
        else
            for (Py_ssize_t k = j; k < j + run; k++)
                least[k] = low, most[k] = high;
        column = column + run < m->columns ? column + run : 0;
    }
}

/* Counts of up to STRIP numbers. */
INLINE void add_counts(
    const float *x, const double *wide, const float *y, const float *least, const float *most, Py_ssize_t n, errors *found)
{
    uint32_t nonzero = 0, flushed = 0, clipped = 0, bad = 0, bad_after = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const uint32_t beyond = wide ? (wide[i] < least[i]) | (wide[i] > most[i]) : (x[i] < least[i]) | (x[i] > most[i]);
        const uint32_t some = wide ? wide[i] != 0 : x[i] != 0;
        nonzero += some;
        clipped += beyond;
        flushed += some & (y[i] == 0) & (beyond ^ 1u);
        bad += wide ? !(fabs(wide[i]) <= DBL_MAX) : (bits_of(x[i]) & EXPONENT) == EXPONENT;
        bad_after += (bits_of(y[i]) & EXPONENT) == EXPONENT;
    }
    found->nonzero += nonzero;
    found->flushed += flushed;
    found->clipped += clipped;
    found->bad += bad;
    found->bad_after += bad_after;
}

INLINE double sum_of(const double *s)
{
    double sum = 0;
    for (int j = 0; j < SUMS; j++)
        sum += s[j];
    return sum;
}

INLINE void measure_strip(const measured *m, Py_ssize_t i, Py_ssize_t n, const float *x, const double *wide, partial *s, errors *found)
{
    const Py_ssize_t whole = n / SUMS * SUMS, left = n - whole;
    add_sums(x, wide, m->y + i, whole, s);
    if (left) { /* zeros add nothing */
        float some[SUMS] = {0}, y[SUMS] = {0};
        double wider[SUMS] = {0};
        memcpy(y, m->y + i + whole, 4 * (size_t)left);
        if (wide)
            memcpy(wider, wide + whole, 8 * (size_t)left);
        else
            memcpy(some, x + whole, 4 * (size_t)left);
        add_sums(some, wide ? wider : NULL, y, SUMS, s);
    }
    float least[STRIP], most[STRIP];
    limits_of(m, i, n, least, most);
    add_counts(x, wide, m->y + i, least, most, n, found);
}

static void measure(const measured *m, errors *found)
{
    const Py_ssize_t size = m->kind == FP32 ? 4 : 2;
    partial s;
    memset(&s, 0, sizeof s);
    for (Py_ssize_t i = 0; i < m->n; i += STRIP) {
        const Py_ssize_t n = m->n - i < STRIP ? m->n - i : STRIP;
        float x[STRIP];
        if (m->kind == FP64)
            measure_strip(m, i, n, NULL, (const double *)m->x + i, &s, found);
        else {
            row_of(m->x + i * size, n, m->kind, (uint32_t *)x);
            measure_strip(m, i, n, x, NULL, &s, found);
        }
    }
    found->signal = sum_of(s.signal);
    found->noise = sum_of(s.noise);
    found->dot = sum_of(s.dot);
    found->energy = sum_of(s.energy);
    for (int j = 0; j < SUMS; j++)
        found->max_error = s.most[j] > found->max_error ? s.most[j] : found->max_error;
    if (isnan(found->noise)) /* a square is NaN only for an error that is */
        found->max_error = found->noise;
}

#endif
