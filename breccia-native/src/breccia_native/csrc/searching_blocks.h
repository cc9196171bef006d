/* The search for the scales of blocks, LANES blocks at a time: each loop over lanes is one of vectors.

   Products and sums must not be fused (see setup.py). */

#ifndef BRECCIA_SEARCHING_BLOCKS_H
#define BRECCIA_SEARCHING_BLOCKS_H

#include "searching.h"

#if defined(BY_AVX512) || defined(BY_AVX2)
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

/* Candidates whose scales are computed before the errors under them, so that no error waits for a division. */
#define BATCH 8

/* Numbers of a group of blocks, element by element: as they are (of minifloats their magnitudes), and in units of powers of two. */
typedef struct {
    ALIGNED float x[MOST][LANES], y[MOST][LANES], w[MOST][LANES], terms[MOST / LEAVES][LANES];
} group;

/* The scales of some candidates: what is written of them, inverses, and numbers in units of powers of two. */
typedef struct {
    ALIGNED int32_t written[BATCH][LANES];
    ALIGNED float inverse[BATCH][LANES], unit[BATCH][LANES];
} batch;

/* An element of each block: in units of powers of two, and its weight. */
typedef struct {
    ALIGNED float y[LANES], w[LANES];
} elements;

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

/* Of elements i, i + apart, ... of a block (`LEAVES` of them): the sum of errors by a pairwise tree. */
INLINE float leaves_of(const int kind, const int weighted, const rounding *by, const group *restrict g, Py_ssize_t i, Py_ssize_t apart,
    int l, float inverse, float unit)
{
#define LEAF(n) \
    term_of(kind, weighted, by, g->x[i + n * apart][l], g->y[i + n * apart][l], weighted ? g->w[i + n * apart][l] : 0, inverse, unit)
    return ((LEAF(0) + LEAF(4)) + (LEAF(2) + LEAF(6))) + ((LEAF(1) + LEAF(5)) + (LEAF(3) + LEAF(7)));
#undef LEAF
}

/* The errors under a scale for each block: sums by a pairwise tree over `length` elements, those after the k-th being zeros. */
INLINE void errors_of(const int kind, const int weighted, const rounding *by, Py_ssize_t length, group *restrict g,
    const float *restrict inverse, const float *restrict unit, float *restrict error)
{
    Py_ssize_t some = length / LEAVES;
#define LEAVES_OF(i, some) leaves_of(kind, weighted, by, g, i, some, l, inverse[l], unit[l])
    if (some == 2) { /* stays in registers */
        EACH_LANE error[l] = LEAVES_OF(0, 2) + LEAVES_OF(1, 2);
        return;
    }
    for (Py_ssize_t i = 0; i < some; i++)
        EACH_LANE g->terms[i][l] = LEAVES_OF(i, some);
#undef LEAVES_OF
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

/* Candidate `n` of each block: its code, or the bits of a float, and its number without the global scale. */
OUTLINE void candidate_of(int codec, const searched *s, Py_ssize_t n, const int32_t *restrict plain, const float *restrict t,
    int32_t *restrict written, float *restrict scale)
{
    const Py_ssize_t multiples = s->some_factors + s->some_opposite;
    const int negative = n > s->some_factors && n <= multiples;
    const float factor = n == 0 || n > multiples ? 1 : negative ? s->opposite[n - 1 - s->some_factors] : s->factors[n - 1];
    if (codec >= HALVES) {
        EACH_LANE
        {
            const float found = nearest(codec, t[l] * factor, s->least, s->most);
            scale[l] = negative ? -found : found;
            written[l] = (int32_t)bits_of(scale[l]);
        }
        return;
    }
    if (n == 0)
        EACH_LANE written[l] = plain[l];
    else if (n <= multiples)
        EACH_LANE written[l] = nearest_code(t[l] * factor, s->form);
    else {
        const int32_t step = s->steps[n - 1 - multiples];
        EACH_LANE
        {
            const int32_t moved = plain[l] + step, above = moved > s->lowest ? moved : s->lowest;
            written[l] = above < s->highest ? above : s->highest;
        }
    }
    if (codec == POWERS)
        EACH_LANE scale[l] = float_of((uint32_t)written[l] << 23);
    else
        EACH_LANE scale[l] = value_of_code(written[l], s->form);
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
#elif defined(BY_AVX2)
    enum { ACROSS = 8 };
    for (; i + ACROSS <= k; i += ACROSS)
        for (int first = 0; first < LANES; first += ACROSS) {
            __m256 v[ACROSS];
            _Pragma("GCC unroll 16") for (int l = 0; l < ACROSS; l++) v[l] = _mm256_loadu_ps(from[first + l] + i);
            transposed8(v);
            _Pragma("GCC unroll 16") for (int l = 0; l < ACROSS; l++) _mm256_storeu_ps(to[i + l] + first, v[l]);
        }
#endif
    for (; i < k; i++)
        for (int l = 0; l < LANES; l++)
            to[i][l] = from[l][i];
}

/* The element of each block whose square, times its weight, is largest. */
INLINE void find_heaviest(const int weighted, Py_ssize_t k, const group *restrict g, elements *restrict heaviest)
{
    ALIGNED float most[LANES];
    EACH_LANE most[l] = heaviest->y[l] = heaviest->w[l] = 0;
    for (Py_ssize_t i = 0; i < k; i++)
        EACH_LANE
        {
            const float y = g->y[i][l], w = weighted ? g->w[i][l] : 1, weight = y * y * w;
            const uint32_t more = -(uint32_t)(weight > most[l]);
            most[l] = weight > most[l] ? weight : most[l];
            heaviest->y[l] = float_of((bits_of(y) & more) | (bits_of(heaviest->y[l]) & ~more));
            if (weighted)
                heaviest->w[l] = float_of((bits_of(w) & more) | (bits_of(heaviest->w[l]) & ~more));
        }
}

/* Whether an error may be less than the least one, and than the first one, in a block: it is at least that of one element, whose
   code is between `low` and `high`, as rounded sums of numbers that are not negative never decrease. */
INLINE int any_less(const int weighted, const rounding *by, const elements *restrict heaviest, const float *restrict unit,
    const float *restrict least, const float *restrict first)
{
    ALIGNED float bound[LANES];
    EACH_LANE
    {
        const float y = heaviest->y[l], a = by->low * unit[l], b = by->high * unit[l];
        const float above = y - (a > b ? a : b), below = (a > b ? b : a) - y, beyond = above > below ? above : below;
        const float d = beyond > 0 ? beyond : 0;
        bound[l] = weighted ? d * d * heaviest->w[l] : d * d;
    }
    unsigned any = 0;
#if defined(BY_AVX512)
    for (int l = 0; l < LANES; l += 16) {
        const __m512 b = _mm512_load_ps(bound + l);
        const __mmask16 may = _mm512_cmp_ps_mask(b, _mm512_load_ps(least + l), _CMP_LE_OQ);
        any |= _mm512_mask_cmp_ps_mask(may, b, _mm512_load_ps(first + l), _CMP_LT_OQ);
    }
#elif defined(BY_AVX2)
    for (int l = 0; l < LANES; l += 8) {
        const __m256 b = _mm256_load_ps(bound + l), may = _mm256_cmp_ps(b, _mm256_load_ps(least + l), _CMP_LE_OQ);
        any |= (unsigned)_mm256_movemask_ps(_mm256_and_ps(may, _mm256_cmp_ps(b, _mm256_load_ps(first + l), _CMP_LT_OQ)));
    }
#else
    EACH_LANE any |= (bound[l] <= least[l]) & (bound[l] < first[l]);
#endif
    return any != 0;
}

/* `count` blocks from number `start` on. */
INLINE void search_group(const int kind, const int weighted, const searched *s, group *g, Py_ssize_t start, int count)
{
    const int codec = s->codec;
    ALIGNED float power[LANES], t[LANES], least[LANES], first[LANES], scale[LANES], error[LANES];
    ALIGNED int32_t plain[LANES], best[LANES];
    const float low = kind == FLOATS ? 0 : s->integers.low, high = kind == FLOATS ? float_of(s->floats.largest) : s->integers.high;
    const rounding by = {s->floats, low, high, s->integers.magic};
    batch some;
    elements heaviest;
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
        least[l] = first[l] = INFINITY;
        best[l] = 0;
    }
    const float *x[LANES], *w[LANES];
    Py_ssize_t place = start % s->across, of_row = weighted ? (s->first + place) % s->total : 0;
    for (int l = 0; l < LANES; l++) {
        x[l] = s->x + (start + (l < count ? l : 0)) * s->k;
        if (weighted) {
            w[l] = s->weights + of_row * s->k;
            of_row = of_row + 1 < s->total ? of_row + 1 : 0;
            if (++place == s->across) {
                place = 0;
                of_row = s->first % s->total;
            }
        }
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
    if (kind == FLOATS && !weighted)
        EACH_LANE heaviest.y[l] = float_of(amax[l]) * power[l];
    else
        find_heaviest(weighted, s->k, g, &heaviest);
    Py_ssize_t length = LEAVES;
    while (length < s->k)
        length *= 2;
    for (Py_ssize_t i = s->k; i < length; i++)
        EACH_LANE g->x[i][l] = g->y[i][l] = g->w[i][l] = 0;
    /* The plain scale, then the others from the last to the first: of equal errors that of a later turn wins, except over the plain
       one. So small scales, under which large elements saturate, come last, and need no errors where those are large enough. */
    const Py_ssize_t candidates = 1 + s->some_factors + s->some_opposite + s->some_steps;
    for (Py_ssize_t done = 0; done < candidates; done += BATCH) {
        const int turns = (int)(candidates - done < BATCH ? candidates - done : BATCH);
        for (int n = 0; n < turns; n++) {
            candidate_of(codec, s, done + n ? candidates - done - n : 0, plain, t, some.written[n], scale);
            EACH_LANE
            {
                const float e = scale[l] * s->global;
                const uint32_t usable = -(uint32_t)(e != 0); /* zero blocks are not */
                some.inverse[n][l] = float_of(bits_of(1 / e) & usable);
                some.unit[n][l] = e * power[l];
            }
        }
        for (int n = 0; n < turns; n++) {
            if (!any_less(weighted, &by, &heaviest, some.unit[n], least, first))
                continue;
            errors_of(kind, weighted, &by, length, g, some.inverse[n], some.unit[n], error);
            if (done + n == 0)
                EACH_LANE first[l] = error[l];
            EACH_LANE
            {
                const uint32_t better = -(uint32_t)(error[l] <= least[l]) & (done + n ? -(uint32_t)(error[l] < first[l]) : ~0u);
                least[l] = error[l] < least[l] ? error[l] : least[l];
                best[l] = (int32_t)(((uint32_t)some.written[n][l] & better) | ((uint32_t)best[l] & ~better));
            }
        }
    }
    for (int l = 0; l < count; l++)
        if (codec < HALVES)
            s->codes[start + l] = (uint8_t)best[l];
        else
            s->scales[start + l] = float_of((uint32_t)best[l]);
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
