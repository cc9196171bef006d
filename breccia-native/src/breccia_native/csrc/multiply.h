/* A product by the instruction set in use, on several threads. */

#ifndef BRECCIA_MULTIPLY_H
#define BRECCIA_MULTIPLY_H

#include "products.h"

/* A weight, and its product. */
typedef struct {
    weight w;
    float *y;          /* (m, n) */
    const float *bias; /* (n,), added to the product; or NULL */
    Py_ssize_t start;  /* of its rows among those that threads claim: a multiple of CLAIM */
} multiplicand;

/* The most weights that are multiplied by the same activations in one call: those of an attention layer. */
enum { MOST_WEIGHTS = 3 };

/* Products of the same activations that several threads compute: they take parts of the activations to pack, then rows of the
   weights. These differ only in their length n, their factors, and where their numbers are. */
typedef struct {
    const multiplicand *weights;
    int count;
    const weight *w; /* the first of them: what packing and memory depend on */
    const grouping *g;
    const version *by; /* NULL: activations are rounded, in groups, and `mode` multiplies */
    const mode_version *mode;
    numbers x;     /* (m, k) activations in FP32, FP16 or BF16 */
    Py_ssize_t m;
    float *wide;   /* FP32 activations: x itself, or room for them */
    float *packed;
    Py_ssize_t parts, next_part, packed_parts, rows, next_row;
    int fine, memory, threads;
} product;

/* Compute products in the mode that was asked for, or one with its bound that is faster. Returns 0 where there is no memory. */
int multiply_all(product *p, int threads);

/* Call task(context) on up to `threads` threads. Products inside it use one thread each. */
void run_together(void (*task)(void *), void *context, int threads);

/* The instruction sets that this processor has, the best first, then NULL; and the one in use. */
extern const version *versions[6], *here;
/* Find them, and the threads. Returns -1 with an error set where that fails. */
int begin(void);
/* Let calls run for that instruction set. */
void take(const version *v);

/* What values of codes have to be multiplied by in a mode, before scales. */
float lift_in(int mode, int kind);
/* Whether a mode other than FP32 has instructions that are faster than FP32 for m rows of activations. */
int is_faster(int mode, const weight *w, Py_ssize_t m);

/* Columns in whole chunks. */
INLINE Py_ssize_t padded(Py_ssize_t k)
{
    return (k + CHUNK - 1) / CHUNK * CHUNK;
}

#endif
