/* The errors of short blocks of one row, one block a lane, where instructions do not estimate them: a loop over lanes is one of vectors.

   Products and sums must not be fused (see setup.py). */

#ifndef BRECCIA_SEARCHING_LANES_H
#define BRECCIA_SEARCHING_LANES_H

#include "searching_candidates.h"

/* The most elements of a block, and terms of which one loop makes a sum. */
#define MOST 256
#define LEAVES 8

/* Blocks, element by element, as `elements` has them, and sums. */
typedef struct {
    ALIGNED float x[MOST][LANES], y[MOST][LANES], w[MOST][LANES], sums[MOST / LEAVES][LANES];
} turned_blocks;

#if defined(BY_AVX512)
/* k numbers of each lane, lane by lane, as k vectors of all lanes, and zeros up to a multiple of 16. */
INLINE void turn(const char *const *from, int dtype, Py_ssize_t k, float (*to)[LANES])
{
    const Py_ssize_t bytes = dtype == FP32 ? 4 : 2;
    for (Py_ssize_t i = 0; i < k; i += 16) {
        const __mmask16 real = (__mmask16)(k - i < 16 ? (1u << (k - i)) - 1 : 0xffff);
        __m512 v[LANES];
        _Pragma("GCC unroll 16") for (int l = 0; l < LANES; l++) v[l] = sixteen(dtype, from[l] + i * bytes, real);
        transposed(v);
        _Pragma("GCC unroll 16") for (int j = 0; j < LANES; j++) _mm512_store_ps(to[i + j], v[j]);
    }
}
#else
/* k numbers of each lane, lane by lane, as k vectors of all lanes. */
INLINE void turn(const char *const *from, int dtype, Py_ssize_t k, float (*to)[LANES])
{
    float wide[LANES][MOST];
    const float *x[LANES];
    for (int l = 0; l < LANES; l++) {
        x[l] = (const float *)from[l];
        if (dtype != FP32) {
            row_of(from[l], k, dtype, (uint32_t *)wide[l]);
            x[l] = wide[l];
        }
    }
    Py_ssize_t i = 0;
#if defined(BY_AVX2)
    for (; i + 8 <= k; i += 8)
        for (int first = 0; first < LANES; first += 8) {
            __m256 v[8];
            _Pragma("GCC unroll 8") for (int l = 0; l < 8; l++) v[l] = _mm256_loadu_ps(x[first + l] + i);
            transposed8(v);
            _Pragma("GCC unroll 8") for (int l = 0; l < 8; l++) _mm256_storeu_ps(to[i + l] + first, v[l]);
        }
#endif
    for (; i < k; i++)
        for (int l = 0; l < LANES; l++)
            to[i][l] = x[l][i];
}
#endif

/* The sum, by a pairwise tree, of the terms of elements i, i + apart, ... of a block (`LEAVES` of them). */
INLINE float leaves_of(const int kind, const int weighted, const searched *s, const turned_blocks *restrict g, Py_ssize_t i,
    Py_ssize_t apart, int l, float inverse, float unit)
{
#define LEAF(n)                                                                                                                   \
    term_of(kind, weighted, s, g->x[i + n * apart][l], g->y[i + n * apart][l], weighted ? g->w[i + n * apart][l] : 0, 0, inverse, \
        unit)
    return ((LEAF(0) + LEAF(4)) + (LEAF(2) + LEAF(6))) + ((LEAF(1) + LEAF(5)) + (LEAF(3) + LEAF(7)));
#undef LEAF
}

/* The errors under a scale for each block of `length` elements, a power of two. */
INLINE void lane_errors(const int kind, const int weighted, const searched *s, Py_ssize_t length, turned_blocks *restrict g,
    const float *restrict inverse, const float *restrict unit, float *restrict error)
{
    Py_ssize_t some = length / LEAVES;
    if (some == 2) { /* stays in registers */
        EACH_LANE error[l] = leaves_of(kind, weighted, s, g, 0, 2, l, inverse[l], unit[l]) +
            leaves_of(kind, weighted, s, g, 1, 2, l, inverse[l], unit[l]);
        return;
    }
    for (Py_ssize_t i = 0; i < some; i++)
        EACH_LANE g->sums[i][l] = leaves_of(kind, weighted, s, g, i, some, l, inverse[l], unit[l]);
    while (some > 1) {
        some /= 2;
        for (Py_ssize_t i = 0; i < some; i++)
            EACH_LANE g->sums[i][l] += g->sums[i + some][l];
    }
    EACH_LANE error[l] = g->sums[0][l];
}

/* Find the best candidates of blocks whose first elements and weights are at `from` and `weights`. */
INLINE void compare_by(const int kind, const int weighted, const searched *s, const window *w, float reach, const char *const *from,
    const char *const *weights, const group *g, candidates *all)
{
    turned_blocks blocks;
    const Py_ssize_t length = filled_up(s->k);
    ALIGNED float least[LANES], first[LANES], inverse[LANES], unit[LANES], error[LANES];
    turn(from, s->dtype, s->k, blocks.x);
    if (weighted)
        turn(weights, FP32, s->k, blocks.w);
    for (Py_ssize_t i = 0; i < s->k; i++)
        EACH_LANE
        {
            const uint32_t u = bits_of(blocks.x[i][l]), a = u & MAGNITUDE;
            const float x = float_of(a < NORMAL ? 0 : kind == FLOATS ? a : u), y = x * g->power[l];
            blocks.x[i][l] = x;
            blocks.y[i][l] = float_of(bits_of(y) & MAGNITUDE) < 0x1p-20f ? 0 : y;
        }
    for (Py_ssize_t i = s->k; i < length; i++)
        EACH_LANE blocks.x[i][l] = blocks.y[i][l] = blocks.w[i][l] = 0;
    EACH_LANE least[l] = first[l] = INFINITY;
    /* The plain one, then others from the last to the first: of equal errors that of a later turn wins, except over the plain one. If one
       element's error rules out a scale in all lanes, it does so with those that are smaller. */
    for (Py_ssize_t c = 0, before = w->some; before > 0; c = --before) {
        candidate_of(s, c, g, all->written[c], all->scale[c]);
        bounds_of(weighted, reach, g, all->scale[c], all->bound[c]);
        int any = 0;
        EACH_LANE any |= all->bound[c][l] * all->bound[c][l] <= least[l];
        if (!any) {
            before = w->first[c];
            continue;
        }
        EACH_LANE
        {
            const float e = all->scale[c][l];
            const uint32_t usable = -(uint32_t)(e != 0);
            inverse[l] = float_of(bits_of(1 / e) & usable);
            unit[l] = e * g->power[l];
        }
        lane_errors(kind, weighted, s, length, &blocks, inverse, unit, error);
        if (c == 0)
            EACH_LANE first[l] = error[l];
        EACH_LANE
        {
            const uint32_t better = -(uint32_t)(error[l] <= least[l]) & (c ? -(uint32_t)(error[l] < first[l]) : ~0u);
            least[l] = error[l] < least[l] ? error[l] : least[l];
            all->may[l] = (1u << c & better) | (all->may[l] & ~better);
        }
    }
}

#define COMPARES(name, kind)                                                                                                      \
    static void name(const searched *s, const window *w, float reach, const char *const *from, const char *const *weights,        \
        const group *g, candidates *all)                                                                                          \
    {                                                                                                                             \
        if (s->weights)                                                                                                           \
            compare_by(kind, 1, s, w, reach, from, weights, g, all);                                                              \
        else                                                                                                                      \
            compare_by(kind, 0, s, w, reach, from, weights, g, all);                                                              \
    }

COMPARES(compare_floats, FLOATS)
COMPARES(compare_integers, INTEGERS)
COMPARES(compare_whole, WHOLE)

typedef void (*compare_function)(
    const searched *, const window *, float, const char *const *, const char *const *, const group *, candidates *);

static const compare_function compares[] = {[FLOATS] = compare_floats, [INTEGERS] = compare_integers, [WHOLE] = compare_whole};

#endif
