/* The microkernel of dequantize: codes of a matrix, times the scales of their blocks, as FP32, FP16 or BF16.

   The arithmetic is that of breccia/kernels/reference/decoding.py, in its order: contraction into fused multiply-adds must stay off
   (see setup.py). Codes are decoded in strips that stay in the L1 cache. Large results are written past the caches. */

#include "coded_matrix.h"
#include "decoding.h"
#include "pool.h"
#include "versions.h"

#define here ((const decoding_functions *)chosen)

uint8_t quotients[LANES + 1][2 * LANES];

/* -------------------------------------------------------------------------------------------------- threads */

/* Numbers that a thread decodes at a time, and how many columns of them at most. */
#define PART 65536
#define ACROSS (64 * STRIP)

typedef struct {
    const task *t;
    const element *e;
    const factors *f;
    Py_ssize_t rows, columns, across, next; /* of a part; how many parts are side by side; the next part */
} decoding;

static void decode_part(decoding *d, Py_ssize_t i)
{
    task part = *d->t;
    part.row = i / d->across * d->rows;
    part.row_end = part.row + d->rows < part.rows ? part.row + d->rows : part.rows;
    part.column = i % d->across * d->columns;
    part.column_end = part.column + d->columns < part.columns ? part.column + d->columns : part.columns;
    (is_turned(&part) ? here->columns : here->rows)(&part, d->e, d->f);
}

static Py_ssize_t parts_of(const decoding *d)
{
    return (d->t->rows + d->rows - 1) / d->rows * d->across;
}

#if defined(__GNUC__)
static void decode_some(void *context)
{
    decoding *d = context;
    const Py_ssize_t parts = parts_of(d);
    for (Py_ssize_t i; (i = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED)) < parts;)
        decode_part(d, i);
}
#endif

static void decode_all(const task *t, const element *e, const factors *f, int threads)
{
    const Py_ssize_t most = is_turned(t) ? STRIP : ACROSS, width = t->columns < most ? t->columns : most;
    decoding d = {t, e, f, 0, most, (t->columns + most - 1) / most, 0};
    d.rows = width > 0 ? PART / width / SIDE * SIDE : SIDE;
    d.rows = d.rows > SIDE ? d.rows : SIDE;
#if defined(__GNUC__)
    run_shared(decode_some, &d, threads);
#else
    (void)threads;
    for (Py_ssize_t i = 0; i < parts_of(&d); i++)
        decode_part(&d, i);
#endif
}

/* -------------------------------------------------------------------------------------------------- for Python */

static int is_missing(const Py_buffer *x)
{
    return x->len == 0;
}

/* Is the buffer of aligned FP32, one a block, or missing? */
static int per_block(const Py_buffer *x, Py_ssize_t count)
{
    return is_missing(x) || (x->len == 4 * count && (uintptr_t)x->buf % 4 == 0);
}

static int is_dtype(int kind)
{
    return kind == FP32 || kind == BF16 || kind == FP16;
}

/* Complete how numbers are stored as records. Are they records for the blocks of a task, in whole strips, and those of all rows? */
static int are_records(coding *c, int kind, const task *t, const Py_buffer *x)
{
    if (c->bits < 1 || c->bits > 8 || c->each < 1 || c->each > STRIP || t->k < SHORTEST || t->k > STRIP ||
        STRIP % (t->k * c->each) || t->m != 1 || !is_dtype(kind))
        return 0;
    const Py_ssize_t span = t->k * c->each;
    c->flip = c->flip ? 1 << (c->bits - 1) : 0;
    c->bytes = (kind == FP32 ? 4 : 2) + stored_bytes(c->each, c->bits);
    return x->len == t->rows * ((t->columns + span - 1) / span) * c->bytes;
}

/* Are the factors of all blocks there? */
static int are_factors(factors *f, const task *t, const Py_buffer *scale, const Py_buffer *of_bytes, const Py_buffer *subtracted,
    const Py_buffer *added)
{
    const Py_ssize_t count = (t->rows / t->m + (t->rows % t->m != 0)) * t->blocks;
    const int by_table = is_missing(of_bytes) ? 4 : 1;
    if (f->coded.bits)
        return is_missing(of_bytes) && is_missing(subtracted) && are_records(&f->coded, f->coded_kind, t, scale) &&
               (is_missing(added) || are_records(&f->coded_added, f->coded_added_kind, t, added));
    return scale->len == by_table * count && (uintptr_t)scale->buf % by_table == 0 && per_block(of_bytes, 256) &&
           per_block(subtracted, count) && per_block(added, count) && !f->coded_added.bits;
}

/* A matrix of codes that Python gave, in the buffers that it is read from. */
typedef struct {
    coded_matrix matrix;
    task t;
    element e;
    factors f;
    Py_buffer data, table, scale, of_bytes, subtracted, added;
} coded;

static void release(coded *c)
{
    Py_buffer *all[] = {&c->data, &c->table, &c->scale, &c->of_bytes, &c->subtracted, &c->added};
    for (int i = 0; i < 6; i++)
        if (all[i]->obj)
            PyBuffer_Release(all[i]);
}

/* How many arguments say what a matrix is. */
#define OF_MATRIX 15

/* Take the first arguments. Returns 0 with an exception set where they are none; `release` follows either way. */
static int take(PyObject *args, coded *c)
{
    element *e = &c->e;
    factors *f = &c->f;
    PyObject *codes, *given, *first = PyTuple_GetSlice(args, 0, OF_MATRIX);
    if (!first)
        return 0;
    int done = PyArg_ParseTuple(first, "Oiy*(iiiiif)nny*y*py*y*(ipni)(ipni)Op:a matrix of codes", &codes, &e->bits, &c->table, &e->form,
        &e->mantissa, &e->infinite, &e->nan, &e->flip, &e->unit, &c->t.k, &c->t.m, &c->scale, &c->of_bytes, &f->halved, &c->subtracted,
        &c->added, &f->coded.bits, &f->coded.flip, &f->coded.each, &f->coded_kind, &f->coded_added.bits, &f->coded_added.flip,
        &f->coded_added.each, &f->coded_added_kind, &given, &f->divides);
    if (!done) /* which has released what it had */
        c->table.obj = c->scale.obj = c->of_bytes.obj = c->subtracted.obj = c->added.obj = NULL;
    else {
        f->has_global = given != Py_None;
        const double global_scale = f->has_global ? PyFloat_AsDouble(given) : 0;
        f->global_scale = (float)global_scale;
        done = !(global_scale == -1.0 && PyErr_Occurred()) && PyObject_GetBuffer(codes, &c->data, PyBUF_STRIDED_RO) == 0;
    }
    Py_DECREF(first);
    return done;
}

/* Complete a matrix of so many columns. Are its arguments those of one? */
static int is_coded(coded *c, Py_ssize_t columns)
{
    task *t = &c->t;
    element *e = &c->e;
    factors *f = &c->f;
    if (c->data.ndim != 2 || c->data.itemsize != 1 || t->k <= 0 || t->m <= 0 || e->bits < 1 || e->bits > 8 || columns < 0)
        return 0;
    const Py_ssize_t bytes = stored_bytes(columns, e->bits);
    t->rows = c->data.shape[0], t->columns = columns;
    t->data = c->data.buf, t->pitch = c->data.strides[0];
    t->blocks = columns / t->k + (columns % t->k != 0);
    const int few = e->bits <= 4; /* whose table has a number for each code of 4 bits */
    e->table = c->table.buf;
    f->scale = c->scale.buf, f->of_bytes = is_missing(&c->of_bytes) ? NULL : c->of_bytes.buf;
    f->subtracted = is_missing(&c->subtracted) ? NULL : c->subtracted.buf;
    f->added = is_missing(&c->added) ? NULL : c->added.buf;
    return c->data.shape[1] == bytes && (c->data.strides[1] == 1 || bytes <= 1) &&
           are_factors(f, t, &c->scale, &c->of_bytes, &c->subtracted, &c->added) && e->form >= TABLE && e->form <= INTEGER &&
           (uintptr_t)c->table.buf % 4 == 0 && ((!few && e->form != TABLE) || c->table.len == (few ? 64 : 4 << e->bits)) &&
           (e->form != MINIFLOAT || (e->mantissa > 0 && e->mantissa < 8 && e->bits >= 6)) && (e->form != INTEGER || !few);
}

static void refuse(const coded *c, Py_ssize_t room)
{
    PyErr_Format(PyExc_ValueError,
        "wanted rows of codes of 1 to 8 bits, an aligned matrix for as many numbers, and a scale for each block of m = %zd by "
        "k = %zd; got %d bits, %zd bytes of codes, of scales %zd, and %zd of room. Call breccia.dequantize.",
        c->t.m, c->t.k, c->e.bits, c->data.len, c->scale.len, room);
}

PyDoc_STRVAR(decode_doc,
    "decode(data, bits, table, fields, k, m, scale, of_bytes, halved, subtracted, added, scale_codes, added_codes, global_scale, divides,\n"
    "kind, stream, threads, found):\n"
    "the numbers of a matrix of codes. data: rows of bytes; found: a matrix in any order of FP32 (kind 32), BF16 (16) or FP16 (-16),\n"
    "16-bit numbers as integers. fields: (form, mantissa, infinite, nan, flip, unit), see `element`. Blocks have m rows and k\n"
    "columns. scale: FP32, or bytes, for which of_bytes has FP32 numbers. subtracted, added: FP32 for each block, or empty.\n"
    "scale_codes, added_codes: (bits, signed, count, kind) where these are records of a float of a kind and so many integers by\n"
    "which it is multiplied, one for each block; bits is 0 where they are numbers. A strip of 256 columns has whole records.\n"
    "global_scale: a float, or None; with divides, numbers are divided by it. stream: write past the caches. threads: how many may\n"
    "work, at most.");

static PyObject *decode(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *values, *rest = PyTuple_GetSlice(args, OF_MATRIX, PyTuple_Size(args));
    Py_buffer found;
    coded c = {0};
    task *t = &c.t;
    int threads, done = 0;
    if (!rest)
        return NULL;
    if (!take(args, &c) || !PyArg_ParseTuple(rest, "ipiO:decode", &t->kind, &t->stream, &threads, &values) ||
        PyObject_GetBuffer(values, &found, PyBUF_STRIDED) < 0)
        goto arguments;
    const int size = t->kind == FP32 ? 4 : 2;
    if (found.ndim == 2 && found.itemsize == size) {
        t->down = found.strides[0], t->along = found.strides[1], t->out = found.buf;
        done = is_coded(&c, found.shape[1]) && c.data.shape[0] == found.shape[0] && (uintptr_t)t->out % size == 0 &&
               t->down % size == 0 && t->along % size == 0;
    }
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        decode_all(t, &c.e, &c.f, threads);
        Py_END_ALLOW_THREADS
    } else
        refuse(&c, found.len);
    PyBuffer_Release(&found);
arguments:
    release(&c);
    Py_DECREF(rest);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* A part of a matrix as FP32, in rows of as many numbers as it has columns; these begin at a multiple of STRIP. */
static void numbers_of_part(
    const coded_matrix *matrix, Py_ssize_t row, Py_ssize_t row_end, Py_ssize_t column, Py_ssize_t column_end, float *found)
{
    const coded *c = (const coded *)matrix;
    task part = c->t;
    part.row = row, part.row_end = row_end, part.column = column, part.column_end = column_end;
    part.kind = FP32, part.stream = 0;
    part.along = 4, part.down = 4 * (column_end - column);
    part.out = (char *)((uintptr_t)found - (uintptr_t)(row * part.down + 4 * column)); /* where row 0 would begin */
    here->rows(&part, &c->e, &c->f);
}

static void free_matrix(PyObject *capsule)
{
    coded *c = PyCapsule_GetPointer(capsule, CODED_MATRIX);
    if (c) {
        release(c);
        PyMem_Free(c);
    }
}

PyDoc_STRVAR(matrix_doc,
    "matrix(data, bits, table, fields, k, m, scale, of_bytes, halved, subtracted, added, scale_codes, added_codes, global_scale, divides,\n"
    "columns): a matrix of codes, as `decode` takes it, of so many columns, for `microkernels.blocks`, which decodes part after part.");

static PyObject *matrix(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *capsule = NULL, *rest = PyTuple_GetSlice(args, OF_MATRIX, PyTuple_Size(args));
    coded *c = PyMem_Calloc(1, sizeof *c);
    Py_ssize_t columns;
    if (!rest || !c) {
        Py_XDECREF(rest);
        PyMem_Free(c);
        return PyErr_NoMemory();
    }
    if (take(args, c) && PyArg_ParseTuple(rest, "n:matrix", &columns)) {
        if (is_coded(c, columns)) {
            c->matrix = (coded_matrix){c->t.rows, columns, numbers_of_part};
            capsule = PyCapsule_New(c, CODED_MATRIX, free_matrix);
        } else
            refuse(c, 0);
    }
    if (!capsule) {
        release(c);
        PyMem_Free(c);
    }
    Py_DECREF(rest);
    return capsule;
}

PyDoc_STRVAR(pooled_doc, "pooled(): whether `decode` can use several threads.");

static PyObject *pooled(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(pool != NULL);
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_VARARGS, decode_doc},
    {"matrix", matrix, METH_VARARGS, matrix_doc},
    {"pooled", pooled, METH_NOARGS, pooled_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *Py_UNUSED(self))
{
    return find_pool();
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.decoding",
    .m_doc = "The compiled microkernels of dequantize; see breccia_native.kernels, which calls it.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_decoding(void)
{
    ADD_VERSIONS(&decoding_avx512, &decoding_avx2, &decoding_portable);
    for (int k = 1; k <= LANES; k++)
        for (int i = 0; i < 2 * LANES; i++)
            quotients[k][i] = (uint8_t)(i / k);
    return PyModuleDef_Init(&module);
}
