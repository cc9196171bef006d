/* What the functions of casts take, and their tables for each instruction set.

   They write the bytes that breccia/kernels/numpy/ writes, by the same arithmetic. FP32 additions round to codes, so contraction
   into fused multiply-adds and reassociation must stay off (see setup.py). */

#ifndef BRECCIA_CASTS_H
#define BRECCIA_CASTS_H

#include "instructions.h"
#include "numbers.h"

#if defined(__GNUC__)
#define PREFETCH(at) __builtin_prefetch(at)
#else
#define PREFETCH(at)
#endif

/* A matrix in memory: strides in bytes. */
typedef struct {
    const char *at;
    Py_ssize_t rows, columns, down, along;
    int kind;
} matrix;

/* FP16 as FP32, by the instructions of a version; baseline has none. */
typedef void (*widener)(const uint16_t *halves, Py_ssize_t n, float *y);

/* Where the random words of stochastic rounding come from: numbers in rows of `width`, of which each begins `stride` elements of the
   whole tensor after the one before. Rounding is to nearest where width is 0. */
typedef struct {
    uint64_t seed, first;
    Py_ssize_t width, stride;
    void (*words)(uint32_t, uint32_t, uint64_t, Py_ssize_t, uint32_t *); /* `words` of the instruction set in use */
} dither;

/* Numbers of a cast, in blocks of k: each times the inverse scale of its block, or divided by its scale; +0 where that is 0.
   across: 0, or numbers are in rows of as many, and blocks are k rows of a column; see `row_at`. */
typedef struct {
    const char *x;
    int kind, divides;
    Py_ssize_t n, k, across;
    const float *inverse;
    dither random;
    widener widen; /* of the instruction set in use, or NULL */
    int packed;    /* whether codes are written two a byte */
} numbers;

/* Fields of breccia.kernels.numpy.FloatCodes. */
typedef struct {
    uint32_t floor, lift, largest;
    int shift, sign;
} minifloat;

/* Fields of breccia.kernels.numpy.IntegerCodes. */
typedef struct {
    float low, high, magic;
    uint8_t mask;
} integer;

/* Fields of breccia.kernels.numpy.TableCodes: by position in ascending order the smallest number rounded to the value there, the
   value, and its code; and the code of +0. */
typedef struct {
    const float *starts, *values;
    const uint8_t *order;
    uint8_t zero;
} table;

/* What is the same for all numbers of a block: what is subtracted before, and added to codes. */
typedef struct {
    const float *before, *after;
} offsets;

/* The functions of an instruction set. */
typedef struct {
    widener widen;
    void (*load)(matrix, uint32_t *, Py_ssize_t);
    void (*store)(const uint32_t *, Py_ssize_t, int, uint16_t *);
    void (*amax)(const char *, Py_ssize_t, Py_ssize_t, int, uint32_t *);
    void (*amax_down)(const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t, int, uint32_t *);
    void (*extremes)(const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t, int, uint32_t *, uint32_t *);
    void (*words)(uint32_t, uint32_t, uint64_t, Py_ssize_t, uint32_t *);
    void (*shifted)(const numbers *, offsets, integer, uint8_t *);
    void (*floats)(const numbers *, minifloat, uint8_t *);
    void (*integers)(const numbers *, integer, uint8_t *);
    void (*tables)(const numbers *, table, uint8_t *);
    void (*scales)(const float *, Py_ssize_t, float, float, minifloat, const float *, uint8_t *, float *);
    void (*pairs)(const uint8_t *, Py_ssize_t, uint8_t *);
    void (*sixes)(const uint8_t *, Py_ssize_t, uint8_t *);
    void (*eights)(const uint8_t *, Py_ssize_t, int, uint8_t *);
    void (*down)(const uint8_t *, Py_ssize_t, Py_ssize_t, int, uint8_t *);
    void (*values)(const uint8_t *, const float *, const float *, Py_ssize_t, Py_ssize_t, int, float *);
} cast_functions;

extern const cast_functions casts_portable;
#if defined(HAS_X86)
extern const cast_functions casts_avx2, casts_avx512;
#endif

#endif
