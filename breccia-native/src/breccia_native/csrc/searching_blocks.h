/* The search for the scales of blocks, LANES blocks at a time: each loop over lanes is one of vectors.

   Products and sums must not be fused (see setup.py). */

#ifndef BRECCIA_SEARCHING_BLOCKS_H
#define BRECCIA_SEARCHING_BLOCKS_H

#include "searching.h"

#if defined(BY_AVX512)
#include "transpose.h"
#endif

/* Terms of which one loop makes a sum. */
#define LEAVES 8

#define EACH_LANE for (int l = 0; l < LANES; l++)

#if defined(__GNUC__)
#define ALIGNED __attribute__((aligned(64)))
#else
#define ALIGNED
#endif

/* Numbers of a group of blocks, element by element: as they are (of minifloats their magnitudes), and in units of powers of two. */
typedef struct {
    ALIGNED float x[MOST][LANES], y[MOST][LANES], w[MOST][LANES], terms[MOST / LEAVES][LANES];
} group;

/* A number rounded to that of a code. */
INLINE float rounded_float(float a, minifloat f)
{
    int32_t u = (int32_t)bits_of(a);
    u = u > (int32_t)f.largest ? (int32_t)f.largest : u;
    int32_t e = (int32_t)((uint32_t)u & EXPONENT);
    e = (e > (int32_t)f.floor ? e : (int32_t)f.floor) + (f.shift << 23); /* the last bit of this is the spacing of codes */
    const float m = float_of((uint32_t)e);
    return (float_of((uint32_t)u) + m) - m;
}

/* The constants of a code's rounding. */
typedef struct {
    minifloat f;
    float low, high, magic;
} rounding;

/* The nearest integer, and y less a product that FP32 has exactly. */
#if defined(BY_AVX512)
#define WHOLE_OF(a, magic) __builtin_rintf(a)
#define LESS(y, q, unit) __builtin_fmaf(-(q), unit, y)
#else
#define WHOLE_OF(a, magic) (((a) + (magic)) - (magic))
#define LESS(y, q, unit) ((y) - (q) * (unit))
#endif

/* The error of an element: x, y and w as in `group`, under a scale of this inverse and unit. */
INLINE float term_of(const int kind, const int weighted, const rounding *by, float x, float y, float w, float inverse, float unit)
{
    const float scaled = x * inverse;
    float q;
    if (kind == FLOATS)
        q = rounded_float(scaled, by->f);
    else {
        const float below = scaled < by->high ? scaled : by->high, inside = below > by->low ? below : by->low;
        q = kind == WHOLE ? WHOLE_OF(inside, by->magic) : (inside + by->magic) - by->magic;
    }
    const float d = kind == WHOLE ? LESS(y, q, unit) : y - q * unit;
    return weighted ? d * d * w : d * d;
}

/* Of elements i, i + apart, ... of each block (`LEAVES` of them): the sum of errors by a pairwise tree. */
INLINE void leaves_of(const int kind, const int weighted, const rounding *by, const group *restrict g, Py_ssize_t i, Py_ssize_t apart,
    const float *restrict inverse, const float *restrict unit, float *restrict sum)
{
#define LEAF(n) \
    term_of(kind, weighted, by, g->x[i + n * apart][l], g->y[i + n * apart][l], weighted ? g->w[i + n * apart][l] : 0, inverse[l], unit[l])
    EACH_LANE sum[l] = ((LEAF(0) + LEAF(4)) + (LEAF(2) + LEAF(6))) + ((LEAF(1) + LEAF(5)) + (LEAF(3) + LEAF(7)));
#undef LEAF
}

/* The errors under a scale for each block: sums by a pairwise tree over `length` elements, those after the k-th being zeros. */
INLINE void errors_of(const int kind, const int weighted, const searched *s, Py_ssize_t length, group *restrict g,
    const float *restrict inverse, const float *restrict unit, float *restrict error)
{
    const rounding by = {s->floats, s->integers.low, s->integers.high, s->integers.magic};
    Py_ssize_t some = length / LEAVES;
    for (Py_ssize_t i = 0; i < some; i++)
        leaves_of(kind, weighted, &by, g, i, some, inverse, unit, g->terms[i]);
    while (some > 1) {
        some /= 2;
        for (Py_ssize_t i = 0; i < some; i++)
            EACH_LANE g->terms[i][l] += g->terms[i + some][l];
    }
    EACH_LANE error[l] = g->terms[0][l];
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

/* Candidate `n` of each block: its code, or 0 of floats, and its number without the global scale. */
OUTLINE void candidate_of(int codec, const searched *s, Py_ssize_t n, const int32_t *restrict plain, const float *restrict t,
    int32_t *restrict code, float *restrict scale)
{
    const Py_ssize_t multiples = s->some_factors + s->some_opposite;
    const int negative = n > s->some_factors && n <= multiples;
    const float factor = n == 0 || n > multiples ? 1 : negative ? s->opposite[n - 1 - s->some_factors] : s->factors[n - 1];
    if (codec >= HALVES) {
        EACH_LANE
        {
            const float found = nearest(codec, t[l] * factor, s->least, s->most);
            scale[l] = negative ? -found : found;
        }
        return;
    }
    if (n == 0)
        EACH_LANE code[l] = plain[l];
    else if (n <= multiples)
        EACH_LANE code[l] = nearest_code(t[l] * factor, s->form);
    else {
        const int32_t step = s->steps[n - 1 - multiples];
        EACH_LANE
        {
            const int32_t moved = plain[l] + step, above = moved > s->lowest ? moved : s->lowest;
            code[l] = above < s->highest ? above : s->highest;
        }
    }
    if (codec == POWERS)
        EACH_LANE scale[l] = float_of((uint32_t)code[l] << 23);
    else
        EACH_LANE scale[l] = value_of_code(code[l], s->form);
}

/* k numbers of each lane, lane by lane, as k vectors of all lanes. */
INLINE void turn(const float *const *from, Py_ssize_t k, float (*to)[LANES])
{
    Py_ssize_t i = 0;
#if defined(BY_AVX512)
    enum { ACROSS = 16 };
    for (; i + ACROSS <= k; i += ACROSS)
        for (int first = 0; first < LANES; first += ACROSS) {
            __m512 v[ACROSS];
            _Pragma("GCC unroll 16") for (int l = 0; l < ACROSS; l++) v[l] = _mm512_loadu_ps(from[first + l] + i);
            transposed(v);
            _Pragma("GCC unroll 16") for (int l = 0; l < ACROSS; l++) _mm512_storeu_ps(to[i + l] + first, v[l]);
        }
#endif
    for (; i < k; i++)
        for (int l = 0; l < LANES; l++)
            to[i][l] = from[l][i];
}

/* `count` blocks from number `start` on. */
INLINE void search_group(const int kind, const int weighted, const searched *s, group *g, Py_ssize_t start, int count)
{
    const int codec = s->codec;
    ALIGNED float power[LANES], t[LANES], least[LANES], best_scale[LANES], scale[LANES], inverse[LANES], unit[LANES], error[LANES];
    ALIGNED int32_t plain[LANES], best[LANES], code[LANES];
    ALIGNED uint32_t amax[LANES];
    EACH_LANE
    {
        amax[l] = s->amax[start + (l < count ? l : 0)];
        plain[l] = codec < HALVES ? s->codes[start + (l < count ? l : 0)] : 0;
    }
    EACH_LANE
    {
        const uint32_t u = amax[l], field = u >> 23;
        power[l] = float_of((254 - (field < 253 ? field : 253)) << 23);
        t[l] = float_of(u) / s->qmax / s->global;
        least[l] = INFINITY;
        best[l] = 0;
        best_scale[l] = 0;
        code[l] = 0;
    }
    const float *x[LANES], *w[LANES];
    for (int l = 0; l < LANES; l++) {
        const Py_ssize_t block = start + (l < count ? l : 0);
        x[l] = s->x + block * s->k;
        w[l] = weighted ? s->weights + (s->first + block % s->across) % s->total * s->k : NULL;
    }
    turn(x, s->k, g->x);
    if (weighted)
        turn(w, s->k, g->w);
    for (Py_ssize_t i = 0; i < s->k; i++)
        EACH_LANE
        {
            const uint32_t u = bits_of(g->x[i][l]), a = u & MAGNITUDE;
            const float x = float_of(a < NORMAL ? 0 : kind == FLOATS ? a : u);
            const float y = x * power[l];
            g->x[i][l] = x;
            g->y[i][l] = float_of(bits_of(y) & MAGNITUDE) < 0x1p-20f ? 0 : y;
        }
    Py_ssize_t length = LEAVES;
    while (length < s->k)
        length *= 2;
    for (Py_ssize_t i = s->k; i < length; i++)
        EACH_LANE g->x[i][l] = g->y[i][l] = g->w[i][l] = 0;
    const Py_ssize_t candidates = 1 + s->some_factors + s->some_opposite + s->some_steps;
    for (Py_ssize_t n = 0; n < candidates; n++) {
        candidate_of(codec, s, n, plain, t, code, scale);
        EACH_LANE
        {
            const float e = scale[l] * s->global;
            const uint32_t usable = -(uint32_t)(e != 0); /* zero blocks are not */
            inverse[l] = float_of(bits_of(1 / e) & usable);
            unit[l] = e * power[l];
        }
        errors_of(kind, weighted, s, length, g, inverse, unit, error);
        EACH_LANE
        {
            const uint32_t better = -(uint32_t)(error[l] < least[l]);
            least[l] = error[l] < least[l] ? error[l] : least[l];
            best[l] = (int32_t)(((uint32_t)code[l] & better) | ((uint32_t)best[l] & ~better));
            best_scale[l] = float_of((bits_of(scale[l]) & better) | (bits_of(best_scale[l]) & ~better));
        }
    }
    for (int l = 0; l < count; l++)
        if (codec < HALVES)
            s->codes[start + l] = (uint8_t)best[l];
        else
            s->scales[start + l] = best_scale[l];
}

INLINE void search_blocks(const int kind, const int weighted, const searched *s)
{
    group g;
    const Py_ssize_t blocks = s->n / s->k;
    for (Py_ssize_t start = 0; start < blocks; start += LANES)
        search_group(kind, weighted, s, &g, start, (int)(blocks - start < LANES ? blocks - start : LANES));
}

/* Whether integers times scales are FP32 numbers: scales of 16 bits have 11 bits or fewer, and integers 8. */
INLINE int is_whole(const searched *s)
{
    return s->kind == INTEGERS && s->integers.magic == 0x1.8p23f && s->codec != SINGLES && s->codec != BYTES && s->global == 1;
}

/* Compiled for each kind of elements, with weights and without. */
static void search(const searched *s)
{
    const int kind = is_whole(s) ? WHOLE : s->kind;
    if (kind == FLOATS && s->weights)
        search_blocks(FLOATS, 1, s);
    else if (kind == FLOATS)
        search_blocks(FLOATS, 0, s);
    else if (kind == WHOLE && s->weights)
        search_blocks(WHOLE, 1, s);
    else if (kind == WHOLE)
        search_blocks(WHOLE, 0, s);
    else if (s->weights)
        search_blocks(INTEGERS, 1, s);
    else
        search_blocks(INTEGERS, 0, s);
}

#endif
