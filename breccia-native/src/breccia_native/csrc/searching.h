/* The search for scales (docs/spec/numerics.md, section 5.6), and its functions for each instruction set. */

#ifndef BRECCIA_SEARCHING_H
#define BRECCIA_SEARCHING_H

#include "casts.h"

/* Blocks whose scales are computed at a time, one a lane; the most candidates of a block; and the most of its elements whose
   errors are estimated at a time, a multiple of 16: more of LANES blocks would not fit the cache. */
#define LANES 16
#define CANDIDATES 32
#define SEGMENT (1 << 14)

/* Codecs of scales: powers of two, a table of 256, and floats. */
enum { POWERS, BYTES, HALVES, BRAINS, SINGLES };

/* Elements: minifloats, whose magnitudes alone matter; integers; integers whose products with scales are exact; and tables of 16. */
enum { FLOATS, INTEGERS, WHOLE, TABLES };

/* n numbers of a dtype in blocks of m rows of k, all below 2^100 and each block zero or with an amax of at least 2^-60, so that no product of
   scales overflows or is subnormal. Blocks are in rows of `across`, the first is number `first` of a row of the tensor.

   codes: of the plain scales of POWERS and BYTES; replaced by those that are found. scales: the numbers that scales stand for, without
   the global one, which is `global` (1 if there is none); those of floats are written. inverses: of all codes, of which each block's is
   written to `inverse`. weights: for each of `total` blocks of a row of
   the tensor, k of them; NULL for none. room: `room_of` numbers. */
typedef struct {
    const char *x;
    int dtype;
    Py_ssize_t n, m, k;
    const uint32_t *amax;
    int codec, kind;
    float qmax, global, least, most;
    int lowest, highest; /* codes that steps lead to */
    minifloat form;      /* of BYTES */
    minifloat floats;
    integer integers;
    table values; /* without codes */
    const float *factors, *opposite;
    const int32_t *steps;
    Py_ssize_t some_factors, some_opposite, some_steps;
    const float *weights;
    Py_ssize_t first, across, total;
    uint8_t *codes;
    const float *inverses;
    float *scales, *inverse, *room;
} searched;

/* The least power of two that is at least n, and 16. */
INLINE Py_ssize_t filled_up(Py_ssize_t n)
{
    Py_ssize_t length = 16;
    while (length < n)
        length *= 2;
    return length;
}

/* Numbers that the elements of a block need room for: twice themselves; the codes' numbers, weights, and sums of a row; and
   sums of rows. */
INLINE Py_ssize_t room_of_elements(Py_ssize_t m, Py_ssize_t k)
{
    return (2 * m + 3) * filled_up(k) + filled_up(m);
}

/* Numbers that need as much room as the elements of LANES blocks that are estimated at a time, in 16 bits. */
INLINE Py_ssize_t room_of_segment(Py_ssize_t m, Py_ssize_t k)
{
    const Py_ssize_t length = (k + 15) / 16 * 16;
    return LANES / 2 * (length < SEGMENT / m ? m * length : SEGMENT);
}

/* Numbers that a search needs room for: elements of a block; the roots of `weights` weights in 16 bits; and, from a multiple of
   64 bytes on, the elements of a segment and their roots. */
INLINE Py_ssize_t room_of(Py_ssize_t m, Py_ssize_t k, Py_ssize_t weights)
{
    return room_of_elements(m, k) + (weights + 1) / 2 + 16 + (weights ? 2 : 1) * room_of_segment(m, k);
}

typedef void (*searching_function)(const searched *);

extern const searching_function searching_portable;
#if defined(HAS_X86)
extern const searching_function searching_avx2, searching_avx512, searching_vnni;
#endif

#endif
