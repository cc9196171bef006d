/* Codes of numbers that a table of 16 lists, and of integers with offsets. */

#ifndef BRECCIA_TABLE_CODES_H
#define BRECCIA_TABLE_CODES_H

#include "codes.h"
#include "positions.h"

/* How many of 15 ascending numbers, of which values[0] is none, are at most y: for each of n. If `low`, also the number that y has
   reached, and the next one; the last is its own. */
typedef void (*position_finder)(const float *y, Py_ssize_t n, const float *values, int32_t *found, float *low, float *high);

INLINE void positions_by_comparing(const float *y, Py_ssize_t n, const float *values, int32_t *found, float *low, float *high)
{
    if (!low)
        for (Py_ssize_t i = 0; i < n; i++) {
            int32_t at = 0;
            for (int j = 1; j < 16; j++)
                at += y[i] >= values[j];
            found[i] = at;
        }
    else
        for (Py_ssize_t i = 0; i < n; i++) {
            float below = values[0], above = values[1];
            int32_t at = 0;
            for (int j = 1; j < 16; j++) {
                const int reached = y[i] >= values[j];
                at += reached;
                below = reached ? values[j] : below;
                above = reached ? values[j < 15 ? j + 1 : 15] : above;
            }
            found[i] = at, low[i] = below, high[i] = above;
        }
}

/* The codes that `order` has at n positions. */
typedef void (*position_coder)(const int32_t *positions, Py_ssize_t n, const uint8_t *order, uint8_t *codes);

INLINE void codes_one_by_one(const int32_t *positions, Py_ssize_t n, const uint8_t *order, uint8_t *codes)
{
    for (Py_ssize_t i = 0; i < n; i++)
        codes[i] = order[positions[i]];
}

#if defined(BY_AVX512)
/* Buffers of STRIP numbers, here and below: whole vectors are written. */
INLINE void codes_by_permuting(const int32_t *positions, Py_ssize_t n, const uint8_t *order, uint8_t *codes)
{
    const __m512i all = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)order));
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512i found = _mm512_permutexvar_epi32(_mm512_loadu_si512(positions + i), all);
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(found));
    }
}

INLINE void positions_by_halving(const float *y, Py_ssize_t n, const float *values, int32_t *found, float *low, float *high)
{
    const __m512 all = _mm512_loadu_ps(values);
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512i at = position_by_halving(_mm512_loadu_ps(y + i), all);
        _mm512_storeu_si512(found + i, at);
        if (!low)
            continue;
        const __m512i after = _mm512_min_epi32(_mm512_add_epi32(at, _mm512_set1_epi32(1)), _mm512_set1_epi32(15));
        _mm512_storeu_ps(low + i, _mm512_permutexvar_ps(at, all));
        _mm512_storeu_ps(high + i, _mm512_permutexvar_ps(after, all));
    }
}
#endif

INLINE void tables_of(
    const numbers *all, table f, const position_finder positions, const position_coder coded, uint8_t *codes)
{
    float y[STRIP], low[STRIP], high[STRIP];
    int32_t found[STRIP];
    uint32_t words[STRIP];
    uint8_t room[STRIP];
    place next = {all->inverse, all->k};
    memset(y, 0, sizeof y); /* `positions` may read whole vectors */
    for (Py_ssize_t start = 0; start < all->n; start += STRIP) {
        const Py_ssize_t length = all->n - start < STRIP ? all->n - start : STRIP;
        const float *inverse = next.inverse;
        Py_ssize_t left = next.left;
        scaled(all, start, length, &next, y);
        if (all->random.width) {
            words_at(all->random, start, length, words);
            for (Py_ssize_t i = 0; i < length; i++)
                y[i] = clamped(y[i], f.values[0], f.values[15]);
            positions(y, length, f.values, found, low, high);
            for (Py_ssize_t i = 0; i < length; i++) {
                const float width = high[i] - low[i], part = (y[i] - low[i]) / (low[i] < high[i] ? width : 1.0f);
                found[i] += carry_of(part < 1.0f ? part : 1.0f, words[i]);
            }
        } else
            positions(y, length, f.starts, found, NULL, NULL);
        coded(found, length, f.order, room);
        if (all->k == 1)
            for (Py_ssize_t i = 0; i < length; i++)
                room[i] = inverse[i] == 0 ? f.zero : room[i];
        else
            for (Py_ssize_t i = 0, run; i < length; i += run, left = all->k, inverse++) { /* +0 where there is no scale */
                run = left < length - i ? left : length - i;
                if (*inverse == 0)
                    memset(room + i, f.zero, (size_t)run);
            }
        if (all->packed)
            pairs_of(room, length / 2, codes + start / 2);
        else
            memcpy(codes + start, room, (size_t)length);
    }
}

/* -------------------------------------------------------------------------------------------------- offsets */

/* n numbers of block b. */
INLINE void block_shifted(
    const float *x, const numbers *all, offsets o, integer f, Py_ssize_t b, const uint32_t *words, Py_ssize_t n, uint8_t *codes)
{
    const float by = all->inverse[b], before = o.before[b], after = o.after[b], low = f.low - after, high = f.high - after;
    const uint8_t add = (uint8_t)(int32_t)after;
    if (by == 0) {
        memset(codes, 0, (size_t)n);
        return;
    }
    if (words) {
        const float units = 0x1.8p23f / f.magic;
        uint32_t found[STRIP];
        for (Py_ssize_t i = 0; i < n; i++) {
            const float y = flushed(flushed(x[i]) - before) * by;
            found[i] = (uint32_t)dithered_integer(clamped(y, low, high), units, words[i]);
        }
        for (Py_ssize_t i = 0; i < n; i++)
            codes[i] = (uint8_t)((found[i] + add) & f.mask);
    } else
        for (Py_ssize_t i = 0; i < n; i++)
            codes[i] = (uint8_t)((bits_of(clamped((x[i] - before) * by, low, high) + f.magic) + add) & f.mask);
}

/* Numbers in rows of `across`, whose blocks are columns. */
INLINE void shifted_down_of(const numbers *all, offsets o, integer f, uint8_t *codes)
{
    float room[STRIP];
    for (Py_ssize_t r = 0; r < all->n / all->across; r++)
        for (Py_ssize_t start = 0, n; start < all->across; start += n, codes += n) {
            const Py_ssize_t b = r / all->k * all->across + start;
            n = all->across - start < STRIP ? all->across - start : STRIP;
            const float *x = strip_of(all->x, all->kind, r * all->across + start, n, all->widen, room);
            const float *by = all->inverse + b, *before = o.before + b, *after = o.after + b;
            for (Py_ssize_t i = 0; i < n; i++) {
                const float y = clamped((x[i] - before[i]) * by[i], f.low - after[i], f.high - after[i]) + f.magic;
                const uint32_t code = (bits_of(y) + (uint32_t)(int32_t)after[i]) & f.mask;
                codes[i] = (uint8_t)(by[i] == 0 ? 0 : code);
            }
        }
}

INLINE void shifted_of(const numbers *all, offsets o, integer f, uint8_t *codes)
{
    if (all->across) {
        shifted_down_of(all, o, f, codes);
        return;
    }
    float room[STRIP];
    uint32_t words[STRIP];
    const Py_ssize_t k = all->k, whole = k < STRIP ? STRIP / k * k : k, size = all->kind == FP32 ? 4 : 2;
    const uint32_t *drawn = all->random.width ? words : NULL;
    for (Py_ssize_t first = 0; first < all->n; first += whole) { /* some short blocks, or a long one */
        const Py_ssize_t end = whole < all->n - first ? first + whole : all->n;
        for (Py_ssize_t start = first, n; start < end; start += n) {
            n = end - start < STRIP ? end - start : STRIP;
            fetch_ahead(all->x + start * size, n * size);
            const float *x = strip_of(all->x, all->kind, start, n, all->widen, room);
            if (drawn)
                words_at(all->random, start, n, words);
            for (Py_ssize_t i = 0, run; i < n; i += run) {
                run = k < n - i ? k : n - i;
                const uint32_t *own = drawn ? drawn + i : NULL;
                if (run == 32)
                    block_shifted(x + i, all, o, f, (start + i) / k, own, 32, codes + start + i);
                else if (run == 128)
                    block_shifted(x + i, all, o, f, (start + i) / k, own, 128, codes + start + i);
                else
                    block_shifted(x + i, all, o, f, (start + i) / k, own, run, codes + start + i);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------- functions */

static void shifted(const numbers *all, offsets o, integer f, uint8_t *codes)
{
    shifted_of(all, o, f, codes);
}

#if defined(BY_AVX512)
#define POSITIONS positions_by_halving, codes_by_permuting
#else
#define POSITIONS positions_by_comparing, codes_one_by_one
#endif

static void tables(const numbers *all, table f, uint8_t *codes)
{
    EACH_ROW(tables_of(part, f, POSITIONS, to), all, codes);
}

#endif
