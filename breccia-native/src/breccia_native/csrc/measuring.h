/* Error metrics of decoded numbers, and their functions for each instruction set. */

#ifndef BRECCIA_MEASURING_H
#define BRECCIA_MEASURING_H

#include "instructions.h"
#include "numbers.h"

#define FP64 64

/* Partial sums, whatever the instruction set: the same additions in the same order give the same bits. */
#define SUMS 16

/* See breccia.ErrorMetrics. */
typedef struct {
    double signal, noise, dot, energy, max_error;
    Py_ssize_t nonzero, flushed, clipped, bad, bad_after;
} errors;

/* n numbers of a kind in rows of so many columns, what was decoded in their place, and the least and the largest number of each
   block, which has `each` columns of a row. An element saturates beyond these by the parts `below` and `above` of their distance. */
typedef struct {
    const char *x;
    int kind;
    const float *y, *low, *high;
    float below, above;
    Py_ssize_t n, columns, each;
} measured;

INLINE Py_ssize_t blocks_of_row(const measured *m)
{
    return m->columns / m->each + (m->columns % m->each != 0);
}

typedef void (*measuring_function)(const measured *, errors *);

extern const measuring_function measuring_portable;
#if defined(HAS_X86)
extern const measuring_function measuring_avx2, measuring_avx512;
#endif

#endif
