/* What products.c and layers.c share: products whose sizes have been compared, and the operator of layers in torch's graphs. */

#ifndef BRECCIA_LAYERS_H
#define BRECCIA_LAYERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "multiply.h"

/* The arguments of `multiply`: its buffers, and what they say of the product. */
typedef struct {
    Py_buffer x, data, table, scale, scale_table, offset, y, bias;
    weight w; /* its factor without the lift of a version */
    grouping g;
    int x_kind, mode, threads;
    Py_ssize_t m;
} call;

/* Where the numbers of a product are. Those of the weight may be NULL where its kinds have none. */
typedef struct {
    const void *x, *data, *scale, *offset, *bias;
    void *y;
} addresses;

/* The name of capsules of a `call`. */
#define PREPARED "breccia_native.products.prepared"

/* Multiply the m rows that lie at these addresses. Returns 0 where there is no memory. */
int multiply_at(const call *c, const addresses *at, Py_ssize_t m, float factor, int threads, int *fine);
/* Likewise, by `count` weights, MOST_WEIGHTS at most. All calls take the same activations. */
int multiply_each(const call *const *calls, const addresses *at, const float *factors, int count, int threads, int *fine);

/* Functions for Python; layers.c has their documentation. */
PyObject *operate(PyObject *self, PyObject *args);
PyObject *keep(PyObject *self, PyObject *args);
PyObject *refuse(PyObject *self, PyObject *text);
extern const char operate_doc[], keep_doc[], refuse_doc[];

#endif
