/* A matrix of codes that decoding.c knows, from which another extension takes FP32 numbers. */

#ifndef BRECCIA_CODED_MATRIX_H
#define BRECCIA_CODED_MATRIX_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The name of a capsule that has one, and holds what it is read from. */
#define CODED_MATRIX "breccia_native.decoding.matrix"

typedef struct coded_matrix coded_matrix;

/* numbers: those of some rows and columns, in rows that follow each other. Columns begin at a multiple of DECODED. It needs no GIL. */
struct coded_matrix {
    Py_ssize_t rows, columns;
    void (*numbers)(const coded_matrix *, Py_ssize_t row, Py_ssize_t row_end, Py_ssize_t column, Py_ssize_t column_end, float *found);
};

#define DECODED 256

#endif
