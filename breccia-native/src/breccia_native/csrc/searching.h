/* The search for scales (docs/spec/numerics.md, section 5.6), and its functions for each instruction set. */

#ifndef BRECCIA_SEARCHING_H
#define BRECCIA_SEARCHING_H

#include "casts.h"

/* Blocks that are searched at a time, one a lane (two vectors of AVX-512, whose latencies overlap), and their most elements. */
#define LANES 32
#define MOST 256

/* Codecs of scales: powers of two, a table of 256, and floats. */
enum { POWERS, BYTES, HALVES, BRAINS, SINGLES };

/* Elements: minifloats, whose magnitudes alone matter; integers; and integers whose products with scales are exact. */
enum { FLOATS, INTEGERS, WHOLE };

/* n numbers in blocks of k, all below 2^100 and each block zero or with an amax of at least 2^-60, so that no product of scales
   overflows or is subnormal.

   codes: of the plain scales of POWERS and BYTES; replaced by those that are found. scales: the numbers that scales stand for, without
   the global one, which is `global` (1 if there is none); those of floats are written. unrounded: of floats, and of BYTES where there are factors.
   weights: for each of `total` blocks of a row, k of them; NULL for none. Blocks are in rows of `across`, the first is number `first`. */
typedef struct {
    const float *x;
    Py_ssize_t n, k;
    const uint32_t *amax;
    int codec, kind;
    float qmax, global, least, most;
    int lowest, highest; /* codes that steps lead to */
    minifloat form;      /* of BYTES */
    minifloat floats;
    integer integers;
    const float *factors, *opposite;
    const int32_t *steps;
    Py_ssize_t some_factors, some_opposite, some_steps;
    const float *weights;
    Py_ssize_t first, across, total;
    uint8_t *codes;
    float *scales;
} searched;

typedef void (*searching_function)(const searched *);

extern const searching_function searching_portable;
#if defined(HAS_X86)
extern const searching_function searching_avx2, searching_avx512;
#endif

#endif
