/* The search for the scales of blocks, LANES blocks at a time.

   Products and sums must not be fused (see setup.py). */

#ifndef BRECCIA_SEARCHING_BLOCKS_H
#define BRECCIA_SEARCHING_BLOCKS_H

#include "searching_candidates.h"

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

/* The weights of a block are those of this number of a row. */
INLINE Py_ssize_t place_of(const searched *s, Py_ssize_t block)
{
    return s->total ? (s->first + block % s->across) % s->total : 0;
}

/* What is written of the candidate of block `block`, lane l, with the least error; of equal ones, of the first. x: its first element, in rows
   that are `down` apart. */
static int32_t best_of(
    const search_state *state, const candidates *all, const group *g, int l, Py_ssize_t block, const float *x, Py_ssize_t down)
{
    const searched *s = state->s;
    float least = INFINITY;
    int32_t best = all->written[0][l];
    load_elements(state->kind, &state->room, x, down, g->power[l]);
    if (s->weights)
        memcpy(state->room.w, s->weights + place_of(s, block) * s->k, (size_t)s->k * sizeof(float));
    for (Py_ssize_t i = 0; i < all->turns; i++) {
        const Py_ssize_t n = all->turn[i ? all->turns - i : 0];
        const float bound = all->bound[n][l], e = all->scale[n][l];
        if (bound > all->most[l] || bound * bound >= least)
            continue;
        const float error = state->error(s, &state->room, e != 0 ? 1 / e : 0, e * g->power[l]);
        if (error < least)
            least = error, best = all->written[n][l];
    }
    return best;
}

/* In lanes where candidate `n` may be the best: let it be, and count it. */
OUTLINE void consider(const candidates *restrict all, Py_ssize_t n, int32_t *restrict best, int32_t *restrict left)
{
    EACH_LANE
    {
        const int32_t may = -(int32_t)(all->bound[n][l] <= all->most[l]);
        best[l] = (all->written[n][l] & may) | (best[l] & ~may);
        left[l] -= may;
    }
}

/* `count` blocks from number `start` on. */
static void search_group(const search_state *state, Py_ssize_t start, int count)
{
    const searched *s = state->s;
    const Py_ssize_t down = s->m > 1 ? s->across * s->k : s->k;
    group g;
    candidates all;
    ALIGNED uint32_t amax[LANES];
    ALIGNED int32_t best[LANES], left[LANES];
    const float *x[LANES];
    for (int l = 0; l < LANES; l++) {
        const Py_ssize_t block = start + (l < count ? l : 0);
        amax[l] = s->amax[block];
        g.plain[l] = s->codec < HALVES ? s->codes[block] : 0;
        x[l] = s->x + (s->m > 1 ? block / s->across * s->m * down + block % s->across * s->k : block * s->k);
    }
    EACH_LANE
    {
        const uint32_t u = amax[l], field = u >> 23;
        g.power[l] = float_of((254 - (field < 253 ? field : 253)) << 23);
        g.y[l] = float_of(u) * g.power[l];
        g.t[l] = float_of(u) / s->qmax / s->global;
        all.most[l] = INFINITY;
    }
#if defined(BY_AVX512)
    if (state->by.how != UNKNOWN) {
        const int16_t *roots[LANES];
        if (s->weights)
            for (int l = 0; l < LANES; l++)
                roots[l] = state->roots + place_of(s, start + (l < count ? l : 0)) * s->k;
        (state->by.how == ROUNDED     ? estimate_by_rounding
                : state->by.how == CELLS ? estimate_by_cells
                                         : estimate_by_halved_cells)(
            state->kind, &state->by, s, &state->window, state->reach, x, down, roots, amax, &g, &all);
    } else
#endif
    {
        all.turns = 0;
        for (Py_ssize_t c = 0, before = state->window.some; before > 0; c = --before) {
            candidate_of(s, c, &g, all.written[c], all.scale[c]);
            bounds_of(s->weights != NULL, state->reach, &g, all.scale[c], all.bound[c]);
            all.turn[all.turns++] = c;
        }
    }
    /* The first of those that may be the best, and how many there are. */
    EACH_LANE best[l] = left[l] = 0;
    for (Py_ssize_t i = 0; i < all.turns; i++)
        consider(&all, all.turn[i + 1 < all.turns ? i + 1 : 0], best, left);
    for (int l = 0; l < count; l++)
        if (amax[l] == 0)
            best[l] = all.written[0][l];
        else if (left[l] > 1)
            best[l] = best_of(state, &all, &g, l, start + l, x[l], down);
    for (int l = 0; l < count; l++)
        if (s->codec < HALVES)
            s->codes[start + l] = (uint8_t)best[l];
        else
            s->scales[start + l] = float_of((uint32_t)best[l]);
}

/* Whether integers times scales are FP32 numbers: scales of 16 bits have 11 bits or fewer, and integers 8. */
INLINE int is_whole(const searched *s)
{
    return s->kind == INTEGERS && s->integers.magic == 0x1.8p23f && s->codec != SINGLES && s->codec != BYTES && s->global == 1;
}

static void search(const searched *s)
{
    static const error_function errors[][2] = {
        [FLOATS] = {floats_error, weighted_floats_error},
        [INTEGERS] = {integers_error, weighted_integers_error},
        [WHOLE] = {whole_error, weighted_whole_error},
        [TABLES] = {tables_error, weighted_tables_error},
    };
    const Py_ssize_t blocks = s->n / (s->m * s->k), length = filled_up(s->k);
    const int kind = is_whole(s) ? WHOLE : s->kind;
    float *const y = s->room + s->m * length, *const q = y + s->m * length, *const of_rows = q + 3 * length;
    search_state state = {s, kind, 0, window_of(s), {s->room, y, q, q + length, q + 2 * length, of_rows, s->m, s->k, length}, errors[kind][s->weights != NULL]
#if defined(BY_AVX512)
        , estimator_of(kind, s), (const int16_t *)(of_rows + filled_up(s->m))
#endif
    };
    const float low = kind == TABLES ? s->values.values[0] : kind == FLOATS ? 0 : s->integers.low;
    const float high = kind == TABLES ? s->values.values[15] : kind == FLOATS ? float_of(s->floats.largest) : s->integers.high;
    state.reach = -low > high ? -low : high;
    memset(s->room, 0, (size_t)room_of(s->m, s->k, 0) * sizeof *s->room);
#if defined(BY_AVX512)
    if (s->weights)
        write_roots(s, (int16_t *)(of_rows + filled_up(s->m)));
#endif
    for (Py_ssize_t start = 0; start < blocks; start += LANES)
        search_group(&state, start, (int)(blocks - start < LANES ? blocks - start : LANES));
}

#endif
