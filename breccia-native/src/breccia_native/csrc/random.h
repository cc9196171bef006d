/* The random numbers of stochastic rounding, and what rounds by them. */

#ifndef BRECCIA_RANDOM_H
#define BRECCIA_RANDOM_H

#include "loads.h"

#if defined(__GNUC__)
enum { LANES = 16, MOST_STREAMS = 8 };
typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t unaligned_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#else
enum { LANES = 1, MOST_STREAMS = 1 };
typedef uint32_t lanes;
typedef uint32_t unaligned_lanes;
#endif

/* Streams that the registers of the instruction set have room for. */
#if defined(BY_AVX512)
enum { STREAMS = 8 };
#elif defined(BY_AVX2)
enum { STREAMS = 2 };
#else
enum { STREAMS = 1 };
#endif

#define ROTATED(y, r) (((y) << (r)) | ((y) >> (32 - (r))))

/* First words of Threefry-2x32 with 20 rounds, for counters that have the same high half: LANES of each of some streams. A word is
   a chain of 50 instructions that wait for each other; where there are registers for several streams, these keep a processor busy. */
INLINE void words_together(const int streams, const uint32_t key[3], uint32_t low, uint32_t high, const uint32_t *positions, uint32_t *found)
{
    static const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t same = high + key[1]; /* the second half is that of all words until the first round ends */
    const lanes position = *(const unaligned_lanes *)positions;
    lanes x[MOST_STREAMS], y[MOST_STREAMS];
    UNROLL for (int s = 0; s < streams; s++) {
        x[s] = position + (low + key[0] + same + LANES * (uint32_t)s);
        y[s] = x[s] ^ ROTATED(same, rotations[0]);
    }
    UNROLL for (int r = 1; r < 20; r++) {
        UNROLL for (int s = 0; s < streams; s++) {
            x[s] += y[s];
            y[s] = ROTATED(y[s], rotations[r % 8]) ^ x[s];
            if (r % 4 == 3) {
                x[s] += key[(r / 4 + 1) % 3];
                y[s] += key[(r / 4 + 2) % 3] + (uint32_t)(r / 4 + 1);
            }
        }
    }
    UNROLL for (int s = 0; s < streams; s++) *(unaligned_lanes *)(found + LANES * s) = x[s];
}

/* The words of counters first .. first + n (docs/spec/numerics.md, section 5.5). */
INLINE void words_of(const int most, uint32_t low, uint32_t high, uint64_t first, Py_ssize_t n, uint32_t *found)
{
    const uint32_t key[3] = {low, high, 0x1BD11BDAu ^ low ^ high};
    const int streams = most < MOST_STREAMS ? most : MOST_STREAMS;
    const Py_ssize_t together = streams * LANES;
    static const uint32_t position[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (Py_ssize_t i = 0, run; i < n; i += run) { /* the high half of a counter is the same within a run */
        const uint64_t at = first + (uint64_t)i, to_carry = (1ull << 32) - (at & 0xffffffffu);
        run = (uint64_t)(n - i) < to_carry ? n - i : (Py_ssize_t)to_carry;
        Py_ssize_t j = 0;
        for (; j + together <= run; j += together)
            words_together(streams, key, (uint32_t)at + (uint32_t)j, (uint32_t)(at >> 32), position, found + i + j);
        if (j < run) {
            uint32_t rest[MOST_STREAMS * LANES];
            words_together(streams, key, (uint32_t)at + (uint32_t)j, (uint32_t)(at >> 32), position, rest);
            memcpy(found + i + j, rest, 4 * (size_t)(run - j));
        }
    }
}

/* The words of numbers start .. start + n. */
INLINE void words_at(dither d, Py_ssize_t start, Py_ssize_t n, uint32_t *found)
{
    for (Py_ssize_t i = 0, run, r = start / d.width, c = start % d.width; i < n; i += run, r++, c = 0) {
        run = d.width - c < n - i ? d.width - c : n - i;
        d.words((uint32_t)d.seed, (uint32_t)(d.seed >> 32), d.first + (uint64_t)(r * d.stride + c), run, found + i);
    }
}

/* 1 where the first 30 bits of a fraction, 0 <= fraction <= 1, and of a word carry when they are added; else 0. */
INLINE int32_t carry_of(float fraction, uint32_t word)
{
    return ((int32_t)(fraction * 0x1p30f) + (int32_t)(word >> 2)) >> 30;
}

/* y >= 0, rounded to one of the two integers beside it. */
INLINE int32_t dithered(float y, uint32_t word)
{
    const int32_t below = (int32_t)y;
    return below + carry_of(y - (float)below, word);
}

static void words(uint32_t low, uint32_t high, uint64_t first, Py_ssize_t n, uint32_t *found)
{
    words_of(STREAMS, low, high, first, n, found);
}

#endif
