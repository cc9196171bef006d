/* A matrix of codes to decode, and the functions that decode it for each instruction set. */

#ifndef BRECCIA_DECODING_H
#define BRECCIA_DECODING_H

#include "codes_in_words.h"
#include "numbers.h"

/* Numbers decoded at once: whole bytes for codes of any width. */
#define STRIP 256
/* The shortest blocks under records, and how many of them a strip has at most. */
#define SHORTEST 8
#define WHOLE (STRIP / SHORTEST)
/* Of a square that is transposed in registers: a cache line of FP32. */
#define SIDE 16
/* Rows that are transposed together: DRAM takes shorter runs of columns several times as slowly. */
#define TALL 256

/* FP32 numbers of the longest vector. */
#define LANES 16
/* quotients[k][i] is i / k, for blocks of k that are shorter than a vector, or as long. */
extern uint8_t quotients[LANES + 1][2 * LANES];

/* How codes become numbers: by a table; as a minifloat, computed without one; as an integer times a unit. */
enum { TABLE, MINIFLOAT, INTEGER };

typedef struct {
    int bits, form;
    const float *table;
    int mantissa, infinite, nan; /* of a minifloat: bits of the mantissa; the first codes of infinite numbers, and of NaN */
    int flip;                    /* of an integer: its highest bit if it is signed */
    float unit;                  /* of an integer; of a minifloat, 2^(15 - bias) */
} element;

/* What is done to numbers, in this order; a NULL for what is not. One item per block. */
typedef struct {
    const float *subtracted;
    const char *scale;       /* FP32, or bytes */
    const float *of_bytes;   /* the FP32 scale of each byte, of which byte 0 is twice what it stands for if `halved` */
    int halved;
    int has_global, divides; /* whether there is a global scale, and numbers are divided by it */
    float global_scale;
    const float *added;
    coding coded, coded_added; /* how scales and what is added are stored as records, after a float of these kinds; or no bits */
    int coded_kind, coded_added_kind;
} factors;

/* A matrix to decode. Rows of codes are `pitch` bytes apart, blocks are m rows by k, and a row of blocks has `blocks` items. */
typedef struct {
    const uint8_t *data;
    Py_ssize_t rows, columns, pitch, m, k, blocks; /* under records, those of their codes */
    Py_ssize_t row, row_end, column, column_end; /* the part of it to decode: columns from a multiple of STRIP on */
    char *out;
    Py_ssize_t down, along; /* strides of the result in bytes */
    int kind, stream;
} task;

/* The next numbers of a row: the block they are in, and how many numbers of it are left. */
typedef struct {
    Py_ssize_t block, left;
} place;

/* Are rows of the result, not columns, adjacent in memory? Parts are then one strip wide: each column lies in a page of its own. */
INLINE int is_turned(const task *t)
{
    const Py_ssize_t size = t->kind == FP32 ? 4 : 2;
    return t->along != size && t->down == size;
}

/* The functions of an instruction set: for results whose rows are adjacent in memory, or that are strided both ways; and for those
   whose columns are. */
typedef struct {
    void (*rows)(const task *, const element *, const factors *);
    void (*columns)(const task *, const element *, const factors *);
} decoding_functions;

extern const decoding_functions decoding_portable;
#if defined(HAS_X86)
extern const decoding_functions decoding_avx2, decoding_avx512;
#endif

#endif
