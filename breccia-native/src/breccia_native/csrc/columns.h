/* A weight whose memory is (K, N), and the functions that multiply by it for each instruction set. */

#ifndef BRECCIA_COLUMNS_H
#define BRECCIA_COLUMNS_H

#include "turning.h"
#include "weights.h"

enum {
    STEP = 16,     /* rows of codes that are summed before they are scaled: a multiple of 2 */
    VECTORS = 4,   /* vectors of a strip of columns: a cache line of 8-bit codes, with AVX-512 */
    WIDEST = 64,   /* columns of the widest strip */
    PANEL = 512,   /* columns that a thread takes at a time */
    MOST_ROWS = 6, /* rows of activations that are multiplied together, at most: with AVX-512 their sums are in 24 registers */
};

typedef struct {
    numbers codes, scale, offset;
    int role, divides;
    int width;                 /* bits of a stored code: those of its kind, or fewer */
    int widens;                /* whether stored codes have to be widened to those of the kind, from the first row of a step on */
    Py_ssize_t n, k, block, tall;
    Py_ssize_t wide;           /* stored scales of a row of blocks */
    float factor, least;
} matrix;

typedef void (*stepper)(int, const matrix *, const float *, Py_ssize_t, const uint8_t *, Py_ssize_t, const float *,
    const float *, float *);

typedef struct {
    const char *name;
    const stepper (*steps)[ROLES];
    void (*widened)(const matrix *, Py_ssize_t, Py_ssize_t, Py_ssize_t, Py_ssize_t, uint8_t *);
    int (*scales)(const matrix *, Py_ssize_t, Py_ssize_t, Py_ssize_t, float *, float *);
    void (*turned)(void *turning);
    float (*lift)(int); /* what values of codes of a kind have to be multiplied by: a power of two */
    int strip, most;    /* columns of a strip, and rows of activations that have registers */
} column_version;

extern const column_version columns_portable;
#if defined(HAS_X86)
extern const column_version columns_avx2, columns_avx512;
#endif

#endif
