/* The search for the scales of blocks, LANES blocks at a time.

   Products and sums must not be fused (see setup.py). */

#ifndef BRECCIA_SEARCHING_BLOCKS_H
#define BRECCIA_SEARCHING_BLOCKS_H

#include "searching_lanes.h"

#if defined(BY_AVX512)
#include "searching_estimates.h"
#endif

/* What all groups of a call have in common. */
typedef struct {
    const searched *s;
    int kind;
    float reach; /* the largest magnitude of a code */
    window window;
    elements room;
    error_function error;
#if defined(BY_AVX512)
    estimator by;
    const int16_t *roots; /* of weights */
#endif
} search_state;

/* The place of the lowest bit that is set. */
INLINE int lowest_bit(uint32_t a)
{
#if defined(__GNUC__)
    return __builtin_ctz(a);
#else
    int at = 0;
    while (!(a >> at & 1))
        at++;
    return at;
#endif
}

/* The weights of a block are those of this number of a row. */
INLINE Py_ssize_t place_of(const searched *s, Py_ssize_t block)
{
    return s->total ? (s->first + block % s->across) % s->total : 0;
}

/* The number of the candidate of block `block`, lane l, with the least error; of equal ones, the first. x: its first element, in rows
   that are `down` bytes apart. The one with the least bound is mostly the best, so it comes first, and rules out most others. */
static int best_of(
    const search_state *state, const candidates *all, const group *g, int l, Py_ssize_t block, const char *x, Py_ssize_t down)
{
    const searched *s = state->s;
    float least = INFINITY;
    int best = 0;
    load_elements(state->kind, s, &state->room, x, down, g->power[l]);
    if (s->weights)
        memcpy(state->room.w, s->weights + place_of(s, block) * s->k, (size_t)s->k * sizeof(float));
    for (uint32_t left = all->may[l]; left;) {
        int n = lowest_bit(left);
        for (uint32_t may = left & (left - 1); may; may &= may - 1)
            n = all->bound[lowest_bit(may)][l] < all->bound[n][l] ? lowest_bit(may) : n;
        left &= ~(1u << n);
        const float bound = all->bound[n][l], e = all->scale[n][l];
        if (bound * bound > least)
            break;
        const float error = state->error(s, &state->room, e != 0 ? 1 / e : 0, e * g->power[l]);
        if (error < least || (error == least && n < best))
            least = error, best = n;
    }
    return best;
}

/* `count` blocks from number `start` on. */
static void search_group(const search_state *state, Py_ssize_t start, int count)
{
    const searched *s = state->s;
    const Py_ssize_t along = s->k * (s->dtype == FP32 ? 4 : 2), down = s->m > 1 ? s->across * along : along;
    group g;
    candidates all;
    ALIGNED uint32_t amax[LANES];
    const char *x[LANES];
    if (count == LANES)
        memcpy(amax, s->amax + start, sizeof amax);
    else
        for (int l = 0; l < LANES; l++)
            amax[l] = s->amax[start + (l < count ? l : 0)];
    if (s->codec < HALVES)
        for (int l = 0; l < LANES; l++)
            g.plain[l] = s->codes[start + (l < count ? l : 0)];
    for (int l = 0; l < LANES; l++) {
        const Py_ssize_t block = start + (l < count ? l : 0);
        x[l] = s->x + (s->m > 1 ? block / s->across * s->m * down + block % s->across * along : block * along);
        PREFETCH(x[l] + 2 * LANES * along); /* the blocks two groups later, if they are one line of the cache each */
    }
    EACH_LANE
    {
        const uint32_t u = amax[l], field = u >> 23;
        g.power[l] = float_of((254 - (field < 253 ? field : 253)) << 23);
        g.y[l] = float_of(u) * g.power[l];
    }
    if (s->codec >= HALVES || s->some_factors || s->some_opposite)
        EACH_LANE g.t[l] = float_of(amax[l]) / s->qmax / s->global;
#if defined(BY_AVX512)
    if (state->by.how != UNKNOWN) {
        const int16_t *roots[LANES];
        if (s->weights)
            for (int l = 0; l < LANES; l++)
                roots[l] = state->roots + place_of(s, start + (l < count ? l : 0)) * s->k;
        estimates[state->by.how](state->kind, &state->by, s, &state->window, state->reach, x, down, roots, amax, &g, &all);
    } else
#endif
    if (s->m == 1 && s->k <= MOST && state->kind != TABLES) {
        const char *weights[LANES];
        if (s->weights)
            for (int l = 0; l < LANES; l++)
                weights[l] = (const char *)(s->weights + place_of(s, start + (l < count ? l : 0)) * s->k);
        compares[state->kind](s, &state->window, state->reach, x, weights, &g, &all);
    } else {
        candidates_of(s, state->window.some, state->reach, &g, &all);
        EACH_LANE all.may[l] = ~0u >> (CANDIDATES - state->window.some);
    }
    ALIGNED int32_t best[LANES];
    uint32_t several = 0;
    EACH_LANE
    {
        const uint32_t may = amax[l] ? all.may[l] : 1, lowest = may & -may;
        best[l] = (int32_t)(bits_of((float)lowest) >> 23) - 127; /* the place of the lowest bit */
        several |= may ^ lowest;
    }
    for (int l = 0; several && l < count; l++)
        if (amax[l] && all.may[l] & (all.may[l] - 1))
            best[l] = best_of(state, &all, &g, l, start + l, x[l], down);
    for (int l = 0; l < count; l++) {
        const uint32_t written = (uint32_t)all.written[best[l]][l];
        if (s->codec < HALVES) {
            s->codes[start + l] = (uint8_t)written;
            s->inverse[start + l] = s->inverses[written & 0xff];
        } else
            s->scales[start + l] = float_of(written);
    }
}

/* Whether integers times scales are FP32 numbers: scales of 16 bits have 11 bits or fewer, and integers 8. */
INLINE int is_whole(const searched *s)
{
    return s->kind == INTEGERS && s->integers.magic == 0x1.8p23f && s->codec != SINGLES && s->codec != BYTES && s->global == 1;
}

static void search(const searched *s)
{
    const Py_ssize_t blocks = s->n / (s->m * s->k), length = filled_up(s->k);
    const int kind = is_whole(s) ? WHOLE : s->kind;
    float *const y = s->room + s->m * length, *const q = y + s->m * length, *const of_rows = q + 3 * length;
    search_state state = {.s = s, .kind = kind, .window = window_of(s),
        .error = errors[kind][s->weights != NULL][s->m == 1 && length <= 32],
        .room = {s->room, y, q, q + length, q + 2 * length, of_rows, s->m, s->k, length}};
#if defined(BY_AVX512)
    state.by = estimator_of(kind, s);
    state.by.part = segment_of(s);
    state.roots = (const int16_t *)(of_rows + filled_up(s->m));
#endif
    const float low = kind == TABLES ? s->values.values[0] : kind == FLOATS ? 0 : s->integers.low;
    const float high = kind == TABLES ? s->values.values[15] : kind == FLOATS ? float_of(s->floats.largest) : s->integers.high;
    state.reach = -low > high ? -low : high;
    memset(s->room, 0, (size_t)room_of_elements(s->m, s->k) * sizeof *s->room);
#if defined(BY_AVX512)
    if (s->weights)
        write_roots(s, (int16_t *)(of_rows + filled_up(s->m)));
#endif
    for (Py_ssize_t start = 0; start < blocks; start += LANES)
        search_group(&state, start, (int)(blocks - start < LANES ? blocks - start : LANES));
}

#endif
