/* Estimates of the errors of blocks, one block a lane, in 16 bits: they tell which scales cannot be the best, most often all but one.

   An element x becomes an integer a near x * f, f being such that the largest element of the block has 15 bits. Under a scale e,
   t = round(a * M / 2^15) is near x / e in units of 2^-p code steps, M being the integer nearest to 2^(p + 15) / (f * e). Its distance
   from the number v of the nearest code is an integer d, and S, the sum of d^2, is exact but for a few FP32 additions.

   How near is it? a is within 0.51 of x * f; M rounds the computed fraction by a known r, and that is within 0.02 of the exact one (f and
   1 / e are within 2^-22); t is within 0.5 of a * M / 2^15; |x * f| and |M| are at most 2^15. So t is within
   0.5 + 0.51 |M| / 2^15 + 0.02 + |r| of 2^p x / e. A distance from the nearest of some numbers never changes by more than what it is the
   distance of. What the error itself rounds (1 / e, x times that, which may lead to the other one of two codes about as near, v, y - v,
   and y below 2^-20 that counts as 0) moves a distance by less than 0.07 of these units, as |t| is at most 2^15. So the distances in
   the error are within NEAR = 0.6 + 0.51 |M| / 2^15 + |r| < 1.62 of those here. The numbers of tables, and where the next one begins, are
   integers here, which adds 0.5, and twice 0.5 on the wrong side of a beginning.

   With weights, d becomes round(d * s / 2^15), s being the integer nearest to 2^15 sqrt(w / 2). With |d| below 2^14.5 that is within
   0.5 + 0.71 * (0.5 + 1) < 1.6 of d * sqrt(w / 2), and weights multiply NEAR by at most sqrt(w / 2) < 1.

   By the triangle inequality the root of the error of n elements, in units of e / 2^p (times sqrt(2) with weights), is within
   NEAR * sqrt(n) of the root of S; with weights within NEAR * sqrt(sum of s^2) / 2^15 + 1.6 sqrt(n). SLACK is for the FP32 operations of
   both: `_mm512_rsqrt14_ps` is within 2^-14, all others together within 2^-16. */

#ifndef BRECCIA_SEARCHING_ESTIMATES_H
#define BRECCIA_SEARCHING_ESTIMATES_H

#include "searching_lanes.h"

#define SLACK 0x1p-13f

/* Pairs of elements whose sums of squares are added at a time, so that no sum of one block is made of many FP32 additions. */
#define TOGETHER 128

/* How t finds v: by rounding to an integer; by the cell of half a step that it is in, of 64; by the cell of a quarter that it
   is in, of 32; the same of 64, of which the second half is beyond all codes; by its cell of a 16th of a table's largest
   number, in which at most one code begins. */
enum { UNKNOWN, ROUNDED, WHOLE_CELLS, CELLS, FAR_CELLS, HALVED_CELLS };

/* Elements of LANES blocks, two to a lane, and roots of weights. It has room for SEGMENT elements of each block. */
typedef struct {
    int16_t (*a)[2 * LANES], (*root)[2 * LANES];
} segment;

typedef struct {
    int how;
    segment part;
    float lift, step; /* 2^p, and what is 1 in t */
    float limit, near; /* of |M|; what of NEAR all scales have */
    float alike;       /* up to this |M| no element is beyond the codes of a scale, nor of its opposite */
    __m512i low, high, half, mask, places; /* places: p - 1 */
    __m512i opposite_low, opposite_high;   /* of codes under the opposite scale */
    __m512i starts, below, above;          /* of cells */
    __m512i inside[2], opposite_inside[2]; /* of WHOLE_CELLS: of cells of half a step, those of negative t last */
} estimator;

INLINE segment segment_of(const searched *s)
{
    const uintptr_t end = (uintptr_t)(s->room + room_of_elements(s->m, s->k) + (s->total * s->k + 1) / 2);
    char *const a = (char *)((end + 63) / 64 * 64), *const root = a + room_of_segment(s->m, s->k) * (Py_ssize_t)sizeof *s->room;
    return (segment){(int16_t (*)[2 * LANES])a, (int16_t (*)[2 * LANES])root};
}

INLINE __m512i all_of(float number)
{
    return _mm512_set1_epi16((int16_t)number);
}

/* How to estimate, or UNKNOWN: of integers; of minifloats whose codes change at multiples of 1/4 only, such as E2M1; of tables. Four
   sums of two squares must be below 2^32, and |d| below 2^14.5, 0.7 * 2^15: |t| is at most 2^15, and M is limited where the last codes are
   below 0.3 * 2^15. */
static estimator estimator_of(int kind, const searched *s)
{
    estimator by = {.how = UNKNOWN, .limit = 0x7fffp0f, .near = 0.6f, .step = 1};
    int16_t starts[32], below[64], above[64];
    if (kind == FLOATS) {
        const float largest = float_of(s->floats.largest);
        /* The error of the largest element alone does not rule out small scales of long blocks: t must reach farther. */
        const int far = s->weights || s->m * s->k > 64;
        by.lift = far ? 0x1p11f : 0x1p12f;
        if (largest > 7.75f || largest < 5)
            return by;
        for (int i = 0; i < 32; i++) {
            const float number = rounded_float((float)i / 4 + 0x1p-10f, s->floats);
            if (number != rounded_float((float)(i + 1) / 4 - 0x1p-10f, s->floats))
                return by;
            below[i] = (int16_t)(number * by.lift);
        }
        by.how = far ? FAR_CELLS : CELLS;
        by.high = all_of(31);
        by.below = _mm512_loadu_si512(below);
    } else if (kind == TABLES) {
        const float *values = s->values.values, *next = s->values.starts;
        const float largest = values[15] > -values[0] ? values[15] : -values[0], unit = 0x1p14f / largest;
        if (values[15] < 0.6f * largest || -values[0] < 0.6f * largest)
            return by;
        for (int i = -16, at = 0; i < 16; i++) {
            const float end = largest * (float)(i + 1) / 16;
            const int begins = at < 15 && next[at + 1] <= end;
            if (begins && at < 14 && next[at + 2] <= end)
                return by;
            starts[i & 31] = begins ? (int16_t)__builtin_rintf(next[at + 1] * unit) : INT16_MAX;
            below[i & 31] = (int16_t)__builtin_rintf(values[at] * unit);
            at += begins;
            above[i & 31] = (int16_t)__builtin_rintf(values[at] * unit);
        }
        by.how = HALVED_CELLS, by.lift = 0x1p14f, by.step = largest, by.near += 1.5f;
        by.low = all_of(-0x1p14f), by.high = all_of(0x1p14f - 1);
        by.starts = _mm512_loadu_si512(starts), by.below = _mm512_loadu_si512(below), by.above = _mm512_loadu_si512(above);
    } else {
        by.step = s->integers.magic / 0x1.8p23f;
        const float high = s->integers.high / by.step, low = s->integers.low / by.step;
        if (low == 0) /* |d| is |t| where that is negative */
            by.limit = 0x3fffp0f;
        by.lift = 1;
        while (2 * by.lift * high <= by.limit * (20.0f / 32) && 2 * by.lift * (0.5f - low) <= 0x7fffp0f)
            by.lift *= 2; /* so t next to the lowest code of the opposite scale, -low, is not beyond 2^15 */
        const float most = high * by.lift + 0.7f * 0x1p15f;
        by.limit = by.limit < most ? by.limit : most;
        by.how = low < 0 && high < 8 && by.lift >= 0x1p11f ? WHOLE_CELLS : ROUNDED; /* |t| is at most 16 steps */
        for (int i = -32; i < 32; i++) {
            const float cell = __builtin_floorf((float)(i + 1) / 2), inside = cell < low ? low : cell > high ? high : cell;
            below[i & 63] = (int16_t)(inside * by.lift);
            above[i & 63] = (int16_t)((cell < -high ? -high : cell > -low ? -low : cell) * by.lift);
        }
        for (int i = 0; i < 2; i++)
            by.inside[i] = _mm512_loadu_si512(below + 32 * i), by.opposite_inside[i] = _mm512_loadu_si512(above + 32 * i);
        by.places = _mm512_set1_epi16((int16_t)(__builtin_ctz((unsigned)by.lift) - 1));
        by.alike = low < 0 ? (high + 0.49f) * by.lift : 0;
        by.low = all_of(low * by.lift), by.high = all_of(high * by.lift);
        by.opposite_low = all_of(-high * by.lift), by.opposite_high = all_of(low < 0 ? -low * by.lift : 0);
        by.half = all_of(by.lift / 2), by.mask = all_of(-by.lift);
    }
    return by;
}

/* d of pairs of elements with this t; of integers also under the opposite scale, where t and codes have the other sign. */
INLINE __m512i distance_of(const int how, const int opposite, const estimator *by, __m512i t)
{
    if (how == CELLS)
        return _mm512_sub_epi16(t, _mm512_permutexvar_epi16(_mm512_srli_epi16(t, 10), by->below));
    if (how == FAR_CELLS) {
        const __m512i cell = _mm512_min_epi16(_mm512_srli_epi16(t, 9), by->high);
        return _mm512_sub_epi16(t, _mm512_permutexvar_epi16(cell, by->below));
    }
    if (how == WHOLE_CELLS) {
        const __m512i *const inside = opposite ? by->opposite_inside : by->inside;
        return _mm512_sub_epi16(t, _mm512_permutex2var_epi16(inside[0], _mm512_srav_epi16(t, by->places), inside[1]));
    }
    if (how == ROUNDED) {
        const __m512i whole = _mm512_and_si512(_mm512_adds_epi16(t, by->half), by->mask);
        const __m512i low = opposite ? by->opposite_low : by->low, high = opposite ? by->opposite_high : by->high;
        return _mm512_sub_epi16(t, _mm512_min_epi16(_mm512_max_epi16(whole, low), high));
    }
    const __m512i inside = _mm512_min_epi16(_mm512_max_epi16(t, by->low), by->high), cell = _mm512_srai_epi16(inside, 10);
    const __mmask32 reached = _mm512_cmpge_epi16_mask(inside, _mm512_permutexvar_epi16(cell, by->starts));
    const __m512i below = _mm512_permutexvar_epi16(cell, by->below);
    return _mm512_sub_epi16(t, _mm512_mask_permutexvar_epi16(below, reached, cell, by->above));
}

/* Sums with the squares of pairs added. */
INLINE __m512i with_squares(__m512i sums, __m512i d)
{
#if defined(BY_VNNI)
    return _mm512_dpwssd_epi32(sums, d, d);
#else
    return _mm512_add_epi32(sums, _mm512_madd_epi16(d, d));
#endif
}

/* S of pairs of elements from `i` to `end`, a multiple of 4. */
INLINE __m512 sum_of_squares(const int how, const int weighted, const estimator *by, const segment *part, Py_ssize_t i,
    Py_ssize_t end, __m512i multiplier)
{
    __m512 sum = _mm512_setzero_ps();
    for (; i < end; i += 4) {
        __m512i squares = _mm512_setzero_si512();
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
            __m512i d = distance_of(how, 0, by, _mm512_mulhrs_epi16(_mm512_load_si512(part->a[i + j]), multiplier));
            if (weighted)
                d = _mm512_mulhrs_epi16(d, _mm512_load_si512(part->root[i + j]));
            squares = with_squares(squares, d);
        }
        sum = _mm512_add_ps(sum, _mm512_cvtepu32_ps(squares));
    }
    return sum;
}

/* The same of two scales, the second one's in `other`: their operations do not wait for each other. Of integers the second is the opposite
   of the first. */
INLINE __m512 sums_of_two(const int how, const int weighted, const estimator *by, const segment *part, Py_ssize_t i, Py_ssize_t end,
    __m512i multiplier, __m512i second, __m512 *other)
{
    const int opposite = how == WHOLE_CELLS || how == ROUNDED;
    __m512 sum = _mm512_setzero_ps(), sum_of_other = sum;
    for (; i < end; i += 4) {
        __m512i squares = _mm512_setzero_si512(), others = squares;
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
            const __m512i a = _mm512_load_si512(part->a[i + j]), t = _mm512_mulhrs_epi16(a, multiplier);
            __m512i d = distance_of(how, 0, by, t);
            __m512i e = distance_of(how, opposite, by, opposite ? t : _mm512_mulhrs_epi16(a, second));
            if (weighted) {
                const __m512i root = _mm512_load_si512(part->root[i + j]);
                d = _mm512_mulhrs_epi16(d, root), e = _mm512_mulhrs_epi16(e, root);
            }
            squares = with_squares(squares, d);
            others = with_squares(others, e);
        }
        sum = _mm512_add_ps(sum, _mm512_cvtepu32_ps(squares));
        sum_of_other = _mm512_add_ps(sum_of_other, _mm512_cvtepu32_ps(others));
    }
    *other = sum_of_other;
    return sum;
}

/* 32 numbers of each lane, or 16 or fewer with zeros after them, as 16 or 8 rows of pairs of all lanes. */
INLINE void store_pairs(__m512i *v, Py_ssize_t n, int16_t (*to)[2 * LANES])
{
    __m512 turned[LANES];
    _Pragma("GCC unroll 16") for (int l = 0; l < LANES; l++) turned[l] = _mm512_castsi512_ps(v[l]);
    transposed(turned);
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) _mm512_store_ps(to[j], turned[j]);
    if (n > 16)
        _Pragma("GCC unroll 8") for (int j = 8; j < 16; j++) _mm512_store_ps(to[j], turned[j]);
}

/* 16 numbers of each lane as 8 rows of pairs of all lanes. A vector has those of two lanes, 4 by 4 in turn: vector i those of i and i + 4,
   vector 4 + i those of 8 + i and 12 + i. */
INLINE void store_short_pairs(const __m512i *v, int16_t (*to)[2 * LANES])
{
    __m512 four[2][4]; /* pairs 0, 2, 4 and 6 of four lanes, and of the next four; pairs 1, 3, 5 and 7 of both */
    _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
        const __m512 a = _mm512_castsi512_ps(v[4 * half]), b = _mm512_castsi512_ps(v[4 * half + 1]);
        const __m512 c = _mm512_castsi512_ps(v[4 * half + 2]), d = _mm512_castsi512_ps(v[4 * half + 3]);
        const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        const __m512d lower = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), higher = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        four[half][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, lower));
        four[half][1] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, higher));
        four[half][2] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, lower));
        four[half][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, higher));
    }
    _Pragma("GCC unroll 2") for (int odd = 0; odd < 2; odd++) {
        const __m512 a = _mm512_shuffle_f32x4(four[0][2 * odd], four[0][2 * odd + 1], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(four[0][2 * odd], four[0][2 * odd + 1], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(four[1][2 * odd], four[1][2 * odd + 1], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(four[1][2 * odd], four[1][2 * odd + 1], 0xdd);
        _mm512_store_ps(to[odd], _mm512_shuffle_f32x4(a, c, 0x88));
        _mm512_store_ps(to[odd + 2], _mm512_shuffle_f32x4(b, d, 0x88));
        _mm512_store_ps(to[odd + 4], _mm512_shuffle_f32x4(a, c, 0xdd));
        _mm512_store_ps(to[odd + 6], _mm512_shuffle_f32x4(b, d, 0xdd));
    }
}

/* 16 elements, of those that `real` says, times a factor. */
INLINE __m512i sixteen_times(int dtype, const char *x, __mmask16 real, float factor)
{
    return _mm512_cvtps_epi32(_mm512_mul_ps(sixteen(dtype, x, real), _mm512_set1_ps(factor)));
}

/* n elements of each lane times its factor, at most SEGMENT, of minifloats their magnitudes. They are filled up with zeros to a multiple
   of 4 pairs, whose number is returned. */
INLINE Py_ssize_t load_segment(const int dtype, int kind, const char *const *from, Py_ssize_t n, const float *factor,
    int16_t (*to)[2 * LANES])
{
    const Py_ssize_t bytes = dtype == FP32 ? 4 : 2;
    const __mmask32 magnitudes = kind == FLOATS ? ~0u : 0;
    for (Py_ssize_t i = 0; i < n; i += 32) {
        const uint32_t real = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
        __m512i v[LANES];
        if (n - i <= 16) {
            _Pragma("GCC unroll 8") for (int l = 0; l < 8; l++) {
                const int p = l < 4 ? l : l + 4, q = p + 4;
                v[l] = _mm512_packs_epi32(sixteen_times(dtype, from[p] + i * bytes, (__mmask16)real, factor[p]),
                    sixteen_times(dtype, from[q] + i * bytes, (__mmask16)real, factor[q]));
                v[l] = _mm512_mask_abs_epi16(v[l], magnitudes, v[l]);
            }
            store_short_pairs(v, to + i / 2);
            continue;
        }
        _Pragma("GCC unroll 16") for (int l = 0; l < LANES; l++) {
            v[l] = _mm512_packs_epi32(sixteen_times(dtype, from[l] + i * bytes, 0xffff, factor[l]),
                sixteen_times(dtype, from[l] + (i + 16) * bytes, (__mmask16)(real >> 16), factor[l]));
            v[l] = _mm512_mask_abs_epi16(v[l], magnitudes, v[l]);
        }
        store_pairs(v, n - i, to + i / 2);
    }
    return (n + 15) / 16 * 8;
}

#define LOADS(name, dtype)                                                                                          \
    OUTLINE Py_ssize_t name(                                                                                        \
        int kind, const char *const *from, Py_ssize_t n, const float *factor, int16_t (*to)[2 * LANES])             \
    {                                                                                                               \
        return load_segment(dtype, kind, from, n, factor, to);                                                      \
    }

LOADS(load_singles, FP32)
LOADS(load_halves, FP16)
LOADS(load_brains, BF16)

/* The roots of weights, in the order of `load_segment`. */
OUTLINE void load_roots(const int16_t *const *from, Py_ssize_t n, int16_t (*to)[2 * LANES])
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (Py_ssize_t i = 0; i < n; i += 32) {
        const uint32_t real = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
        __m512i v[LANES];
        for (int l = 0; l < LANES; l++) {
            v[l] = _mm512_maskz_loadu_epi16(real, from[l] + i);
            if (n - i > 16)
                v[l] = _mm512_permutexvar_epi64(order, v[l]);
        }
        store_pairs(v, n - i, to + i / 2);
    }
}

/* What `load_roots` reads, for all weights. */
static void write_roots(const searched *s, int16_t *to)
{
    for (Py_ssize_t i = 0; i < s->total * s->k; i++) {
        const float root = __builtin_sqrtf(s->weights[i] * 0.5f) * 0x1p15f + 0.5f;
        to[i] = (int16_t)(int32_t)(root < 0x7fffp0f ? root : 0x7fffp0f);
    }
}

/* 1 / a within 2^-22 of it; NaN of 0. */
INLINE __m512 inverse_of(__m512 a)
{
    const __m512 near = _mm512_rcp14_ps(a), twice = _mm512_add_ps(near, near);
    return _mm512_fnmadd_ps(_mm512_mul_ps(a, near), near, twice);
}

/* Whether a candidate may be the best of any lane. */
INLINE int possible(const candidates *all, Py_ssize_t c, __m512 most)
{
    return _mm512_cmp_ps_mask(_mm512_load_ps(all->bound[c]), most, _CMP_LE_OQ) != 0;
}

/* A scale of each lane: M before it is rounded, and its magnitude; M, and M for both elements of a pair; and what is 1 in t. */
typedef struct {
    __m512 exact, size, unit;
    __m512i rounded, of_pairs;
} multiplier;

INLINE multiplier multiplier_of(__m512 e, __m512 fraction, __m512 power)
{
    multiplier m;
    m.exact = _mm512_mul_ps(fraction, inverse_of(e)), m.size = _mm512_abs_ps(m.exact);
    m.unit = _mm512_abs_ps(_mm512_mul_ps(e, power));
    m.rounded = _mm512_cvtps_epi32(m.exact);
    m.of_pairs = _mm512_mask_mov_epi16(m.rounded, 0xaaaaaaaa, _mm512_slli_epi32(m.rounded, 16));
    return m;
}

/* Raise the bound of a candidate to what S leaves, or to infinity in the lanes `alike`; and lower `most` to what its error is at most.
   length: what NEAR is multiplied by. of_weights: what is added to that. */
INLINE void settle(const estimator *by, const multiplier *m, __m512 sum, __m512 length, __m512 of_weights, __mmask16 alike, float *bound,
    __m512 *most)
{
    const __mmask16 known = _mm512_cmp_ps_mask(m->size, _mm512_set1_ps(by->limit), _CMP_LE_OQ);
    const __m512 root = _mm512_mul_ps(sum, _mm512_rsqrt14_ps(_mm512_max_ps(sum, _mm512_set1_ps(1))));
    const __m512 rounding = _mm512_abs_ps(_mm512_sub_ps(m->exact, _mm512_cvtepi32_ps(m->rounded)));
    const __m512 of_all = _mm512_add_ps(rounding, _mm512_set1_ps(by->near));
    const __m512 of_t = _mm512_fmadd_ps(m->size, _mm512_set1_ps(0.51f * 0x1p-15f), of_all);
    const __m512 near = _mm512_fmadd_ps(of_t, length, of_weights), before = _mm512_load_ps(bound);
    const __m512 above = _mm512_mul_ps(m->unit, _mm512_fmadd_ps(root, _mm512_set1_ps(1 + SLACK), near));
    const __m512 below = _mm512_mul_ps(m->unit, _mm512_fmsub_ps(root, _mm512_set1_ps(1 - SLACK), near));
    const __m512 raised = _mm512_mask_max_ps(before, known, before, below);
    _mm512_store_ps(bound, _mm512_mask_mov_ps(raised, alike, _mm512_set1_ps(INFINITY)));
    *most = _mm512_mask_min_ps(*most, known, *most, above);
}

/* Find the candidates that may be the best, with bounds of their errors. from: the blocks, whose rows are `down` bytes apart. roots: of their
   weights. */
INLINE void estimate_by(const int how, const int weighted, int kind, const estimator *by, const searched *s, const window *w,
    float reach, const char *const *from, Py_ssize_t down, const int16_t *const *roots, const uint32_t *amax, const group *g,
    candidates *all)
{
    const int of_integers = how == WHOLE_CELLS || how == ROUNDED;
    const segment part = by->part;
    ALIGNED float factor[LANES];
    __m512 sums[CANDIDATES], weight = _mm512_setzero_ps();
    const __m512 largest = _mm512_max_ps(_mm512_load_ps(amax), _mm512_set1_ps(0x1p-60f)); /* of zeros too the factor is finite */
    _mm512_store_ps(factor, _mm512_mul_ps(_mm512_set1_ps(0x7fffp0f), inverse_of(largest)));
    const __m512 fraction = _mm512_mul_ps(largest, _mm512_set1_ps(by->lift * (0x1p15f / 0x7fffp0f) / by->step));
    Py_ssize_t (*const load)(int, const char *const *, Py_ssize_t, const float *, int16_t (*)[2 * LANES]) =
        s->dtype == FP32 ? load_singles : s->dtype == FP16 ? load_halves : load_brains;
    const __m512 power = _mm512_mul_ps(_mm512_load_ps(g->power), _mm512_set1_ps(by->step / by->lift * (weighted ? 0x1.6a09e6p0f : 1)));
    const float root_of_n = __builtin_sqrtf((float)(s->m * s->k));
    const __m512 of_weights = _mm512_set1_ps(weighted ? 1.6f * root_of_n : 0);
    __m512 length = _mm512_set1_ps(root_of_n), most = _mm512_set1_ps(INFINITY);
    uint32_t settled = 0;
    candidates_of(s, w->some, reach, g, all);
    const Py_ssize_t bytes = s->dtype == FP32 ? 4 : 2, together = s->k <= SEGMENT ? SEGMENT / ((s->k + 15) / 16 * 16) : 1;
    for (Py_ssize_t r = 0, rows; r < s->m; r += rows) {
        rows = together < s->m - r ? together : s->m - r; /* as many as a segment has room for */
        for (Py_ssize_t i = 0; i < s->k; i += SEGMENT) {
            const Py_ssize_t n = s->k - i < SEGMENT ? s->k - i : SEGMENT;
            const int first = r == 0 && i == 0, last = r + rows == s->m && i + n == s->k;
            Py_ssize_t pairs = 0;
            for (Py_ssize_t j = 0; j < rows; j++) {
                const char *x[LANES];
                const int16_t *of_lanes[LANES];
                for (int l = 0; l < LANES; l++)
                    x[l] = from[l] + (r + j) * down + i * bytes;
                if (weighted) {
                    for (int l = 0; l < LANES; l++)
                        of_lanes[l] = roots[l] + i;
                    load_roots(of_lanes, n, part.root + pairs);
                }
                pairs += load(kind, x, n, factor, part.a + pairs);
            }
            if (weighted) {
                for (Py_ssize_t j = 0; j < pairs; j++) {
                    const __m512i root = _mm512_load_si512(part.root[j]);
                    weight = _mm512_add_ps(weight, _mm512_cvtepu32_ps(_mm512_madd_epi16(root, root)));
                }
                length = _mm512_mul_ps(_mm512_sqrt_ps(weight), _mm512_set1_ps(0x1p-15f));
            }
            uint32_t summed = 0;
            /* Small scales come last: if one element's error rules one out in all lanes, it does so with those that are smaller. */
            for (Py_ssize_t c = 0, before = w->some; before > 0; c = --before) {
                if (summed >> c & 1)
                    continue;
                if (!possible(all, c, most)) {
                    before = w->first[c];
                    continue;
                }
                const multiplier of_c = multiplier_of(_mm512_load_ps(all->scale[c]), fraction, power);
                multiplier of_d = of_c; /* so it is of a twin, but for the sign */
                Py_ssize_t d = 0; /* the candidate that is estimated with c, or 0 */
                __mmask16 alike = 0;
                if (of_integers) {
                    const __mmask16 inside = _mm512_cmp_ps_mask(of_c.size, _mm512_set1_ps(by->alike), _CMP_LE_OQ);
                    if (first && c == 0) /* no integer is farther than half a step */
                        most = _mm512_mask_mul_ps(most, inside, of_c.unit, _mm512_set1_ps(0.505f * by->lift * root_of_n));
                    d = w->twin[c];
                    if (d) /* what is as good as its twin, an earlier one, is not the first of the best */
                        alike = inside;
                    if (alike == 0xffff)
                        continue;
                } else {
                    while (!d && before > 1)
                        if (possible(all, before - 1, most))
                            d = --before;
                        else
                            before = w->first[before - 1];
                    if (d)
                        of_d = multiplier_of(_mm512_load_ps(all->scale[d]), fraction, power);
                }
                for (Py_ssize_t j = 0; j < pairs; j += TOGETHER) {
                    const Py_ssize_t end = pairs - j < TOGETHER ? pairs : j + TOGETHER;
                    const int begins = first && j == 0;
                    __m512 sum, sum_of_d = _mm512_setzero_ps();
                    if (d) {
                        sum = sums_of_two(how, weighted, by, &part, j, end, of_c.of_pairs, of_d.of_pairs, &sum_of_d);
                        sums[d] = begins ? sum_of_d : _mm512_add_ps(sums[d], sum_of_d);
                    } else
                        sum = sum_of_squares(how, weighted, by, &part, j, end, of_c.of_pairs);
                    sums[c] = begins ? sum : _mm512_add_ps(sums[c], sum);
                }
                if (last)
                    settle(by, &of_c, sums[c], length, of_weights, alike, all->bound[c], &most);
                if (last && d)
                    settle(by, &of_d, sums[d], length, of_weights, 0, all->bound[d], &most);
                summed |= 1u << c | (d ? 1u << d : 0);
            }
            settled = summed;
        }
    }
    __m512i may = _mm512_setzero_si512();
    for (; settled; settled &= settled - 1) {
        const __mmask16 here = _mm512_cmp_ps_mask(_mm512_load_ps(all->bound[__builtin_ctz(settled)]), most, _CMP_LE_OQ);
        may = _mm512_mask_or_epi32(may, here, may, _mm512_set1_epi32((int)(settled & -settled)));
    }
    _mm512_store_si512(all->may, may);
}

#define ESTIMATES(name, how)                                                                                               \
    static void name(int kind, const estimator *by, const searched *s, const window *w, float reach, const char *const *from, \
        Py_ssize_t down, const int16_t *const *roots, const uint32_t *amax, const group *g, candidates *all)               \
    {                                                                                                                      \
        if (s->weights)                                                                                                    \
            estimate_by(how, 1, kind, by, s, w, reach, from, down, roots, amax, g, all);                                   \
        else                                                                                                               \
            estimate_by(how, 0, kind, by, s, w, reach, from, down, roots, amax, g, all);                                   \
    }

ESTIMATES(estimate_by_rounding, ROUNDED)
ESTIMATES(estimate_by_whole_cells, WHOLE_CELLS)
ESTIMATES(estimate_by_cells, CELLS)
ESTIMATES(estimate_by_far_cells, FAR_CELLS)
ESTIMATES(estimate_by_halved_cells, HALVED_CELLS)

typedef void (*estimate_function)(int, const estimator *, const searched *, const window *, float, const char *const *, Py_ssize_t,
    const int16_t *const *, const uint32_t *, const group *, candidates *);

static const estimate_function estimates[] = {
    [ROUNDED] = estimate_by_rounding,
    [WHOLE_CELLS] = estimate_by_whole_cells,
    [CELLS] = estimate_by_cells,
    [FAR_CELLS] = estimate_by_far_cells,
    [HALVED_CELLS] = estimate_by_halved_cells,
};

#endif
