/* The candidates of blocks, LANES blocks at a time. A loop over lanes is one of vectors. */

#ifndef BRECCIA_SEARCHING_CANDIDATES_H
#define BRECCIA_SEARCHING_CANDIDATES_H

#include "searching_errors.h"

#if defined(__GNUC__)
#define ALIGNED __attribute__((aligned(64)))
#else
#define ALIGNED
#endif

/* A loop of vectors: GCC makes none of one that it unrolls first. */
#define EACH_LANE _Pragma("GCC unroll 1") for (int l = 0; l < LANES; l++)

/* What all candidates of a group of blocks have in common: the power of two near their amax, in units of which errors are; amax in
   these units, its number; and the plain scale's code, or the number that it is rounded from. */
typedef struct {
    ALIGNED float power[LANES], y[LANES], t[LANES];
    ALIGNED int32_t plain[LANES];
} group;

/* The candidates of a group: what is written of them, their scales, numbers that the roots of their errors are not less than, and in
   `may` a bit for each that may be the best. */
typedef struct {
    ALIGNED int32_t written[CANDIDATES][LANES];
    ALIGNED float scale[CANDIDATES][LANES], bound[CANDIDATES][LANES];
    ALIGNED uint32_t may[LANES];
} candidates;

/* Of a search: how many candidates there are, for each the first one of those before it whose scales are smaller in turn, and
   of scales with the sign bit set the one of the same magnitude without it, or 0. */
typedef struct {
    Py_ssize_t some, first[CANDIDATES], twin[CANDIDATES];
} window;

static window window_of(const searched *s)
{
    window found = {1 + s->some_factors + s->some_opposite + s->some_steps, {0}, {0}};
    for (Py_ssize_t i = 0, n = 1; i < s->some_factors; i++, n++)
        found.first[n] = i && s->factors[i - 1] < s->factors[i] ? found.first[n - 1] : n;
    for (Py_ssize_t i = 0, n = 1 + s->some_factors; i < s->some_opposite; i++, n++) {
        found.first[n] = i && s->opposite[i - 1] < s->opposite[i] ? found.first[n - 1] : n;
        for (Py_ssize_t j = 0; j < s->some_factors; j++)
            if (s->factors[j] == s->opposite[i])
                found.twin[n] = 1 + j;
    }
    for (Py_ssize_t i = 0, n = found.some - s->some_steps; i < s->some_steps; i++, n++)
        found.first[n] = i && s->steps[i - 1] < s->steps[i] ? found.first[n - 1] : n;
    return found;
}

/* A float scale of 16 or 32 bits, to nearest. */
INLINE float nearest(int codec, float t, float least, float most)
{
    const float above = t > least ? t : least, y = above < most ? above : most;
    const uint32_t u = bits_of(y);
    if (codec == SINGLES)
        return y;
    if (codec == BRAINS)
        return float_of((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
    const float tiny = (y + 0.5f) - 0.5f; /* the last bit of 0.5 is 2^-24 */
    return y < 0x1p-14f ? tiny : float_of((u + 0xfffu + ((u >> 13) & 1u)) & 0xffffe000u);
}

/* The code of a scale of 8 bits, to nearest. */
INLINE int32_t nearest_code(float t, minifloat f)
{
    int32_t a = (int32_t)bits_of(t);
    a = a > (int32_t)f.largest ? (int32_t)f.largest : a;
    int32_t e = (int32_t)((uint32_t)a & EXPONENT);
    e = (e > (int32_t)f.floor ? e : (int32_t)f.floor) + (int32_t)f.lift;
    return (int32_t)((bits_of(float_of((uint32_t)a) + float_of((uint32_t)e)) + ((uint32_t)e >> f.shift)) & 0xff);
}

/* The number of a code of positive numbers. */
INLINE float value_of_code(int32_t code, minifloat f)
{
    const int bits = 23 - f.shift; /* of a mantissa */
    const float subnormal = (float)code * float_of(f.floor - ((uint32_t)bits << 23));
    return code >> bits ? float_of(((uint32_t)code << f.shift) + f.floor - NORMAL) : subnormal;
}

/* Candidate `n` of each block: its code, or the bits of a float, and its number. */
INLINE void candidate_of(const searched *s, Py_ssize_t n, const group *restrict g, int32_t *restrict written, float *restrict scale)
{
    const Py_ssize_t multiples = s->some_factors + s->some_opposite;
    const int codec = s->codec, negative = n > s->some_factors && n <= multiples;
    const float factor = n == 0 || n > multiples ? 1 : negative ? s->opposite[n - 1 - s->some_factors] : s->factors[n - 1];
    if (codec >= HALVES) {
        EACH_LANE
        {
            const float found = nearest(codec, g->t[l] * factor, s->least, s->most), number = negative ? -found : found;
            written[l] = (int32_t)bits_of(number);
            scale[l] = number * s->global;
        }
        return;
    }
    if (n == 0)
        EACH_LANE written[l] = g->plain[l];
    else if (n <= multiples)
        EACH_LANE written[l] = nearest_code(g->t[l] * factor, s->form);
    else {
        const int32_t step = s->steps[n - 1 - multiples];
        EACH_LANE
        {
            const int32_t moved = g->plain[l] + step, above = moved > s->lowest ? moved : s->lowest;
            written[l] = above < s->highest ? above : s->highest;
        }
    }
    if (codec == POWERS)
        EACH_LANE scale[l] = float_of((uint32_t)written[l] << 23) * s->global;
    else
        EACH_LANE scale[l] = value_of_code(written[l], s->form) * s->global;
}

/* A number whose rounded square the error under a scale is not less than, in each block: the distance of its largest element, as a code's
   number is at most `reach` times the scale. Rounded sums of numbers that are not negative are not less than each of them, since
   rounding keeps the order of numbers. With weights it is 0. */
INLINE void bounds_of(int weighted, float reach, const group *restrict g, const float *restrict scale, float *restrict bound)
{
    const float most = weighted ? INFINITY : reach;
    EACH_LANE
    {
        const float beyond = g->y[l] - float_of(bits_of(most * (scale[l] * g->power[l])) & MAGNITUDE);
        bound[l] = beyond > 0 ? beyond : 0;
    }
}

/* All candidates of each block, and their bounds. */
OUTLINE void candidates_of(
    const searched *s, Py_ssize_t some, float reach, const group *restrict g, candidates *restrict all)
{
    for (Py_ssize_t n = 0; n < some; n++)
        candidate_of(s, n, g, all->written[n], all->scale[n]);
    for (Py_ssize_t n = 0; n < some; n++)
        bounds_of(s->weights != NULL, reach, g, all->scale[n], all->bound[n]);
}

#endif
