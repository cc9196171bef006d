/* `breccia_native.searching` for Python: of the scales in a window, those with the least squared error (searching.h). */

#include "searching.h"
#include "versions.h"

#define here (*(const searching_function *)chosen)

static int is_aligned(const Py_buffer *b, Py_ssize_t bytes)
{
    return b->len == bytes && (uintptr_t)b->buf % 4 == 0;
}

PyDoc_STRVAR(search_doc,
    "search(source, dtype, m, k, amax, found, inverses, inverse, codec, qmax, global_scale, window, scales, element, weights, first,\n"
    "across): the scale of each block of m rows of k numbers with the least error, as numerics.md, section 5.6, computes it. dtype:\n"
    "32 FP32, 16 BF16, -16 FP16. amax: its bits, uint32; zero, or from 2^-60 to 2^100. found: of scales of 8 bits the plain codes,\n"
    "which are replaced; of others room for FP32 numbers. inverses: of scales of 8 bits, the FP32 number of each code that is written\n"
    "to `inverse`. codec: 0 powers of two, 1 floats of 8 bits, 2 FP16, 3 BF16, 4 FP32. window: (factors, opposite) as FP32 and steps as\n"
    "int32. scales: (least, most, the lowest and highest code that steps lead to, and the fields of numpy.FloatCodes). element: the\n"
    "fields of numpy.FloatCodes or of numpy.IntegerCodes, or (thresholds, values) of numpy.TableCodes. weights: FP32, k for each block\n"
    "of a row of the tensor; empty for none. The blocks are in rows of `across`, of which each begins at block `first` of such a row.");

static PyObject *search_of(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, amax, found, inverses, inverse, factors, opposite, steps, weights;
    Py_buffer starts = {0}, values = {0};
    searched s = {0};
    PyObject *element;
    if (!PyArg_ParseTuple(args, "y*inny*w*y*w*iff(y*y*y*)(ffii(IIIii))O!y*nn:search", &x, &s.dtype, &s.m, &s.k, &amax, &found,
            &inverses, &inverse, &s.codec, &s.qmax, &s.global, &factors, &opposite, &steps, &s.least, &s.most, &s.lowest, &s.highest, &s.form.floor, &s.form.lift,
            &s.form.largest, &s.form.shift, &s.form.sign, &PyTuple_Type, &element, &weights, &s.first, &s.across))
        return NULL;
    Py_buffer *const every[] = {&x, &amax, &found, &inverses, &inverse, &factors, &opposite, &steps, &weights, &starts, &values};
    minifloat *const f = &s.floats;
    integer *const i = &s.integers;
    int done;
    switch (PyTuple_Size(element)) {
    case 5:
        s.kind = FLOATS;
        done = PyArg_ParseTuple(element, "IIIii", &f->floor, &f->lift, &f->largest, &f->shift, &f->sign);
        break;
    case 4:
        s.kind = INTEGERS;
        done = PyArg_ParseTuple(element, "fffb", &i->low, &i->high, &i->magic, &i->mask);
        break;
    default:
        s.kind = TABLES;
        done = PyArg_ParseTuple(element, "y*y*", &starts, &values);
    }
    if (done) {
        const Py_ssize_t size = s.m > 0 && s.k > 0 && s.k <= PY_SSIZE_T_MAX / 4 / s.m ? s.m * s.k : 0;
        const Py_ssize_t bytes = s.dtype == FP32 ? 4 : 2;
        s.n = x.len / bytes;
        const Py_ssize_t blocks = size ? s.n / size : 0, row = 4 * s.k;
        s.some_factors = factors.len / 4, s.some_opposite = opposite.len / 4, s.some_steps = steps.len / 4;
        s.total = weights.len && row > 0 ? weights.len / row : 0;
        done = size && s.codec >= POWERS && s.codec <= SINGLES && x.len == blocks * size * bytes && (uintptr_t)x.buf % (size_t)bytes == 0 &&
            is_aligned(&amax, 4 * blocks) && is_aligned(&weights, s.total * row) && s.across > 0 &&
            (s.m == 1 || blocks % s.across == 0) && s.first >= 0 &&
            (s.codec < HALVES ? found.len == blocks && is_aligned(&inverses, 1024) && is_aligned(&inverse, 4 * blocks)
                              : is_aligned(&found, 4 * blocks)) &&
            is_aligned(&factors, 4 * s.some_factors) && is_aligned(&opposite, 4 * s.some_opposite) &&
            is_aligned(&steps, 4 * s.some_steps) && s.some_factors + s.some_opposite + s.some_steps < CANDIDATES &&
            s.lowest >= 0 && s.highest < 256 && (s.kind != TABLES || (is_aligned(&starts, 64) && is_aligned(&values, 64)));
        if (!done)
            PyErr_Format(PyExc_ValueError,
                "wanted numbers in blocks of m rows of k, with one amax and one scale a block, and fewer than %d steps and factors; got "
                "m = %zd, k = %zd and %zd, %zd and %zd bytes. Call breccia.cast.",
                CANDIDATES, s.m, s.k, x.len, amax.len, found.len);
    }
    if (done) {
        s.room = PyMem_Malloc((size_t)room_of(s.m, s.k, s.total * s.k) * sizeof *s.room);
        done = s.room != NULL;
        if (!done)
            PyErr_NoMemory();
    }
    if (done) {
        s.x = x.buf, s.amax = amax.buf, s.factors = factors.buf, s.opposite = opposite.buf, s.steps = steps.buf;
        s.values = (table){starts.buf, values.buf, NULL, 0};
        s.weights = s.total ? weights.buf : NULL;
        s.codes = found.buf, s.scales = found.buf, s.inverses = inverses.buf, s.inverse = inverse.buf;
        Py_BEGIN_ALLOW_THREADS
        here(&s);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(s.room);
    for (size_t n = 0; n < sizeof every / sizeof *every; n++)
        PyBuffer_Release(every[n]);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"search", search_of, METH_VARARGS, search_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.searching",
    .m_doc = "The compiled search for scales; see breccia_native.kernels, which calls it.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_searching(void)
{
#if defined(HAS_X86)
    if (has_avx512() && __builtin_cpu_supports("avx512vnni"))
        add_version("avx512vnni", &searching_vnni);
#endif
    ADD_VERSIONS(&searching_avx512, &searching_avx2, &searching_portable);
    return PyModuleDef_Init(&module);
}
