/* `breccia_native.measuring` for Python: the error metrics of decoded numbers, in one pass over them. */

#include "measuring.h"
#include "versions.h"

#define here (*(const measuring_function *)chosen)

static int has_numbers(const Py_buffer *x, Py_ssize_t n, int size)
{
    return x->len == n * size && (uintptr_t)x->buf % size == 0;
}

PyDoc_STRVAR(errors_doc,
    "errors(x, kind, y, low, high, below, above, columns, each): (signal, noise, dot, energy, max_error, nonzero, flushed, clipped, bad, bad_after) of\n"
    "numbers y against x, as breccia.ErrorMetrics has them. x: of FP64 (kind 64), FP32 (32), BF16 (16) or FP16 (-16). y: FP32. low,\n"
    "high: FP32, what the least and the largest code of each block stand for; a row of so many columns has blocks of `each`. The sums have the same bits by every\n"
    "instruction set.");

static PyObject *errors_of(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, y, low, high;
    measured m;
    if (!PyArg_ParseTuple(args, "y*iy*y*y*ffnn:errors", &x, &m.kind, &y, &low, &high, &m.below, &m.above, &m.columns, &m.each))
        return NULL;
    m.n = y.len / 4;
    int done = has_numbers(&x, m.n, m.kind == FP64 ? 8 : m.kind == FP32 ? 4 : 2) && has_numbers(&y, m.n, 4) && m.columns > 0 &&
               m.each > 0 && m.n % m.columns == 0;
    if (done) {
        const Py_ssize_t blocks = m.n / m.columns * blocks_of_row(&m);
        done = has_numbers(&low, blocks, 4) && has_numbers(&high, blocks, 4);
    }
    errors found = {0};
    if (done) {
        m.x = x.buf, m.y = y.buf, m.low = low.buf, m.high = high.buf;
        Py_BEGIN_ALLOW_THREADS
        here(&m, &found);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted as many aligned numbers of FP32 as of kind %d in rows of %zd, and two for each block of %zd; got %zd, %zd, %zd and "
            "%zd bytes. Call breccia.metrics.",
            m.kind, m.columns, m.each, x.len, y.len, low.len, high.len);
    PyBuffer_Release(&x);
    PyBuffer_Release(&y);
    PyBuffer_Release(&low);
    PyBuffer_Release(&high);
    if (!done)
        return NULL;
    return Py_BuildValue("(dddddnnnnn)", found.signal, found.noise, found.dot, found.energy, found.max_error, found.nonzero,
        found.flushed, found.clipped, found.bad, found.bad_after);
}

static PyMethodDef methods[] = {
    {"errors", errors_of, METH_VARARGS, errors_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.measuring",
    .m_doc = "Compiled error metrics; see breccia_native.kernels, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_measuring(void)
{
    ADD_VERSIONS(&measuring_avx512, &measuring_avx2, &measuring_portable);
    return PyModuleDef_Init(&module);
}
