/* `breccia_native.products` for Python: the arguments of a product, whose sizes are compared (see multiply.c). */

#if !defined(__GNUC__)
#error "products.c needs the vector extensions of GCC or Clang"
#endif

#include <limits.h>

#include "layers.h"

static int refused(const char *wanted, Py_ssize_t expected, Py_ssize_t found)
{
    PyErr_Format(PyExc_ValueError, "wanted %s of %zd bytes; got %zd. Call breccia.matmul.", wanted, expected, found);
    return 0;
}

static int is_float(const char *what, const Py_buffer *x, Py_ssize_t n)
{
    if (x->len == 4 * n && (uintptr_t)x->buf % 4 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted %s: %zd aligned FP32 numbers; got %zd bytes. Call breccia.matmul.", what, n, x->len);
    return 0;
}

static int is_kind(int kind)
{
    if (kind >= 0 && kind < KINDS)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted a kind from 0 to %d; got %d. Call breccia.matmul.", KINDS - 1, kind);
    return 0;
}

/* Codes with one scale, once scales are spread. */
static Py_ssize_t span_of(Py_ssize_t block, Py_ssize_t k)
{
    return block >= k || block % SPAN == 0 ? SPAN : 1;
}

/* Fill `g` for a mode other than FP32. */
static int is_mode(int mode, int kind, const Py_buffer *table, Py_ssize_t block, Py_ssize_t k, grouping *g)
{
    if (mode == FP32_MODE || (mode > FP32_MODE && mode < MODES && grouped(g, mode, kind, table->buf, block, k)))
        return 1;
    PyErr_Format(PyExc_ValueError,
        "wanted mode 0 (FP32), or mode 1 (INT8) or 2 (BF16) for codes that it multiplies exactly, in blocks of a multiple of %d; "
        "got mode %d, kind %d, block = %zd. Call breccia.matmul.", SPAN, mode, kind, block);
    return 0;
}

#define ARGUMENTS "y*innniy*iiy*y*iy*(ipn)nnpffy*i(ipn)iw*y*i"
/* Codes of scales in a record, at most. */
#define MOST_CODES 65536

/* Complete and check how scales or offsets are stored as records, for rows of `blocks`. */
static int is_coding(numbers *a, Py_ssize_t blocks)
{
    coding *const c = &a->codes;
    c->flip = c->flip && c->bits > 0 && c->bits <= 8 ? 1 << (c->bits - 1) : 0;
    c->blocks = blocks;
    if (c->bits == 0)
        return 1;
    if (c->bits > 0 && c->bits <= 8 && c->each > 0 && c->each <= MOST_CODES && a->kind >= F16 && a->kind <= F32) {
        c->bytes = kind_bits[a->kind] / 8 + stored_bytes(c->each, c->bits);
        return 1;
    }
    PyErr_Format(PyExc_ValueError,
        "wanted records of an FP16, BF16 or FP32 number and 1 to %d codes of 1 to 8 bits; got kind %d, and %zd codes of %d bits. Call "
        "breccia.matmul.", MOST_CODES, a->kind, c->each, c->bits);
    return 0;
}

static void released(call *c)
{
    Py_buffer *const all[] = {&c->x, &c->data, &c->table, &c->scale, &c->scale_table, &c->offset, &c->y, &c->bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        PyBuffer_Release(all[i]);
}

/* Read the arguments and compare all sizes. Returns 0 with an error set, and no buffer held, where they do not agree. */
static int is_call(PyObject *args, const char *format, call *c)
{
    Py_ssize_t tall;
    memset(c, 0, sizeof *c);
    c->g = (grouping){FP32_MODE, 1, 1, 1, {0}, 0, 1};
    weight *const w = &c->w;
    if (!PyArg_ParseTuple(args, format, &c->x, &c->x_kind, &c->m, &w->n, &w->k, &c->mode, &c->data, &w->codes.kind, &w->width,
            &c->table, &c->scale, &w->scale.kind, &c->scale_table,
            &w->scale.codes.bits, &w->scale.codes.flip, &w->scale.codes.each, &w->block, &tall, &w->divides, &w->factor, &w->least, &c->offset,
            &w->offset.kind, &w->offset.codes.bits, &w->offset.codes.flip, &w->offset.codes.each, &w->role, &c->y, &c->bias, &c->threads))
        return 0;
    const Py_ssize_t m = c->m;
    int done = is_kind(w->codes.kind) && is_kind(w->scale.kind) && is_kind(w->offset.kind) && (c->x_kind >= F16 || is_kind(-1)) &&
        is_kind(c->x_kind);
    if (done && (m < 1 || w->n < 1 || w->k < 1 || tall < 1 || w->block < 1 || w->role < 0 || w->role >= ROLES ||
                    w->codes.kind > U8 || !is_width(w->width, w->codes.kind) || kind_bits[w->scale.kind] == 6 ||
                    kind_bits[w->offset.kind] == 6 || m > PY_SSIZE_T_MAX / 16 / padded(w->k) || w->n > PY_SSIZE_T_MAX / 8 / m ||
                    w->n > PY_SSIZE_T_MAX / 8 / padded(w->k))) {
        PyErr_Format(PyExc_ValueError,
            "wanted lengths of at least 1, codes of the bits of their kind or, of integers and tables, fewer, and scales of 8, 16 or "
            "32 bits; got m = %zd, n = %zd, k = %zd, kind %d of %d bits, block = %zd, tall = %zd, role %d, scales of kind %d. Call "
            "breccia.matmul.",
            m, w->n, w->k, w->codes.kind, w->width, w->block, tall, w->role, w->scale.kind);
        done = 0;
    }
    if (done) {
        w->tall = tall < w->n ? tall : w->n;
        w->groups = w->block < w->k ? (w->k + w->block - 1) / w->block : 1;
        w->row_bytes = stored_bytes(w->k, w->width);
        w->span = span_of(w->block, w->k);
        const Py_ssize_t scales = (w->n + w->tall - 1) / w->tall * w->groups;
        done = is_coding(&w->scale, w->groups) && is_coding(&w->offset, w->groups);
        const Py_ssize_t scale_bytes = done ? bytes_of_scales(&w->scale, scales) : 0;
        const Py_ssize_t offset_bytes = done ? bytes_of_scales(&w->offset, scales) : 0;
        const Py_ssize_t x_bytes = m * w->k * kind_bits[c->x_kind] / 8;
        done = done && is_float("a product", &c->y, m * w->n) && (c->bias.len == 0 || is_float("a bias", &c->bias, w->n)) &&
            (c->data.len == w->n * w->row_bytes || refused("codes", w->n * w->row_bytes, c->data.len)) &&
            (w->codes.kind > TABLE8 || is_float("a table", &c->table, (Py_ssize_t)1 << kind_bits[w->codes.kind])) &&
            (w->scale.kind > TABLE8 || is_float("a table of scales", &c->scale_table, 256)) &&
            (w->scale.kind != TABLE4 || is_kind(-1)) &&
            (c->scale.len == scale_bytes || refused("scales", scale_bytes, c->scale.len)) &&
            (w->role == NONE || c->offset.len == offset_bytes || refused("offsets", offset_bytes, c->offset.len)) &&
            (w->role == NONE || w->offset.kind > E5M2 || is_kind(-1)) &&
            is_mode(c->mode, w->codes.kind, &c->table, w->block, w->k, &c->g) &&
            (c->mode != BF16_MODE || w->role != BIAS || is_kind(-1)) &&
            (c->x_kind == F32 ? is_float("activations", &c->x, m * w->k)
                              : c->x.len == x_bytes || refused("activations", x_bytes, c->x.len));
    }
    if (!done)
        released(c);
    w->codes.table = c->table.buf;
    w->scale.table = c->scale_table.buf;
    return done;
}

/* What is multiplied at these addresses. */
static multiplicand multiplicand_at(const call *c, const addresses *at, float factor)
{
    multiplicand found = {.w = c->w, .y = at->y, .bias = at->bias};
    weight *const w = &found.w;
    w->codes.items = at->data, w->scale.items = at->scale, w->offset.items = at->offset;
    w->widen = w->width < kind_bits[w->codes.kind] ? here->widen : NULL;
    w->factor = factor * lift_in(c->mode, w->codes.kind) / (c->mode == FP32_MODE ? 1 : c->g.unit);
    return found;
}

static int multiplied_by(const call *c, const void *x, Py_ssize_t m, const multiplicand *by, int count, int threads, int *fine)
{
    product p = {.weights = by, .count = count, .w = &by->w, .g = &c->g, .x = {c->x_kind, x, NULL}, .m = m};
    const int memory = multiply_all(&p, threads);
    *fine = p.fine;
    return memory;
}

int multiply_at(const call *c, const addresses *at, Py_ssize_t m, float factor, int threads, int *fine)
{
    const multiplicand by = multiplicand_at(c, at, factor);
    return multiplied_by(c, at->x, m, &by, 1, threads, fine);
}

static int are_coded_alike(const numbers *a, const numbers *b)
{
    return a->kind == b->kind && a->table == b->table && a->codes.bits == b->codes.bits && a->codes.flip == b->codes.flip &&
        a->codes.each == b->codes.each;
}

/* Whether two products pack their activations alike, and differ only in the lengths, factors and numbers of their weights. */
static int may_share(const call *a, const call *b)
{
    const weight *v = &a->w, *w = &b->w;
    return a->m == b->m && a->x_kind == b->x_kind && a->mode == b->mode && v->k == w->k && v->width == w->width &&
        v->block == w->block && v->tall == w->tall && v->divides == w->divides && v->least == w->least && v->role == w->role &&
        are_coded_alike(&v->codes, &w->codes) && are_coded_alike(&v->scale, &w->scale) && are_coded_alike(&v->offset, &w->offset);
}

int multiply_each(const call *const *calls, const addresses *at, const float *factors, int count, int threads, int *fine)
{
    multiplicand by[MOST_WEIGHTS];
    int alike = 1, memory = 1;
    *fine = 1;
    for (int i = 0; i < count; i++) {
        by[i] = multiplicand_at(calls[i], &at[i], factors[i]);
        alike &= may_share(calls[0], calls[i]);
    }
    if (alike)
        return multiplied_by(calls[0], at->x, calls[0]->m, by, count, threads, fine);
    for (int i = 0; i < count && memory && *fine; i++)
        memory = multiplied_by(calls[i], at->x, calls[i]->m, &by[i], 1, threads, fine);
    return memory;
}

static PyObject *multiplied(const call *c, const addresses *at, float factor, int threads)
{
    int memory, fine;
    Py_BEGIN_ALLOW_THREADS
    memory = multiply_at(c, at, c->m, factor, threads, &fine);
    Py_END_ALLOW_THREADS
    return memory ? PyBool_FromLong(fine) : PyErr_NoMemory();
}

PyDoc_STRVAR(multiply_doc,
    "multiply(x, x_kind, m, n, k, mode, data, kind, width, table, scale, scale_kind, scale_table, scale_codes, block, tall, divides,\n"
    "factor, least, offset, offset_kind, offset_codes, role, product, bias, threads): (m, k) activations times the transpose of the weight, in FP32.\n\n"
    "x: FP32, FP16 or BF16. data: (n, bytes) codes of `kind` in `width` bits each, whose values are in `table` where the kind is\n"
    "a table, of as many numbers as its codes could have; likewise scale. A scale covers `block` codes of `tall` rows; it divides or multiplies, after\n"
    "times `factor`. scale_codes: (bits, signed, count) where scales are records of a float and so many integers by which it is\n"
    "multiplied, one for each block; bits is 0 where they are numbers; likewise offset_codes. offset: zero-points (role 1) or biases (role 2), in the places of scales. product: (m, n). bias: (n,) FP32\n"
    "numbers to add, or none. threads: how many may work, at most. Returns False, and the product is unspecified, where an activation is above 2^100, or for mode 2\n"
    "below 2^-60 and not 0, where a scale is too large, or smaller than `least` and not 0, and for mode 2\n"
    "where 4-bit codes or their zero-points are not integers from 0 to 15.");

static PyObject *multiply(PyObject *Py_UNUSED(self), PyObject *args)
{
    call c;
    if (!is_call(args, ARGUMENTS ":multiply", &c))
        return NULL;
    const addresses at = {c.x.buf, c.data.buf, c.scale.buf, c.offset.buf, c.bias.len ? c.bias.buf : NULL, c.y.buf};
    PyObject *found = multiplied(&c, &at, c.w.factor, c.threads);
    released(&c);
    return found;
}

static void forgotten(PyObject *capsule)
{
    call *c = PyCapsule_GetPointer(capsule, PREPARED);
    if (c)
        released(c);
    free(c);
}

PyDoc_STRVAR(prepare_doc,
    "prepare(*arguments): what `repeat` needs for products of operands of the same kinds and sizes as these arguments of `multiply`,\n"
    "whose sizes are compared here. It keeps the tables, and forgets the other buffers.");

static PyObject *prepare(PyObject *Py_UNUSED(self), PyObject *args)
{
    call *c = malloc(sizeof *c);
    if (!c)
        return PyErr_NoMemory();
    if (!is_call(args, ARGUMENTS ":prepare", c)) {
        free(c);
        return NULL;
    }
    Py_buffer *const passing[] = {&c->x, &c->data, &c->scale, &c->offset, &c->y, &c->bias};
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        PyBuffer_Release(passing[i]);
    PyObject *capsule = PyCapsule_New(c, PREPARED, forgotten);
    if (!capsule) {
        released(c);
        free(c);
    }
    return capsule;
}

PyDoc_STRVAR(repeat_doc,
    "repeat(prepared, x, data, scale, offset, bias, factor, threads, product): `multiply` with the addresses of operands, as integers,\n"
    "0 for none; product is a buffer, or an address too. The memory at the addresses must be what `prepare` was given: kinds, sizes, contiguous.\n"
    "Also returns False where the address of an operand is missing, or not that of aligned numbers.");

static PyObject *repeat(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    if (count != 9) {
        PyErr_Format(PyExc_TypeError, "repeat takes 9 arguments; got %zd. Call breccia.matmul.", count);
        return NULL;
    }
    const call *c = PyCapsule_GetPointer(args[0], PREPARED);
    if (!c)
        return NULL;
    void *found[5];
    for (int i = 0; i < 5; i++)
        found[i] = PyLong_AsVoidPtr(args[1 + i]);
    const double factor = PyFloat_AsDouble(args[6]);
    const long threads = PyLong_AsLong(args[7]);
    Py_buffer y = {.buf = NULL};
    const int is_address = PyLong_Check(args[8]);
    if (is_address) {
        y.buf = PyLong_AsVoidPtr(args[8]);
        y.len = y.buf ? 4 * c->m * c->w.n : 0;
    }
    if (PyErr_Occurred() || (!is_address && PyObject_GetBuffer(args[8], &y, PyBUF_WRITABLE) < 0))
        return NULL;
    const addresses at = {found[0], found[1], found[2], found[3], found[4], y.buf};
    const uintptr_t size = (uintptr_t)kind_bits[c->x_kind] / 8;
    PyObject *done = NULL;
    if (!at.x || !at.data || !at.scale || (c->w.role != NONE && !at.offset) || (uintptr_t)at.x % size || (uintptr_t)at.bias % 4)
        done = Py_NewRef(Py_False);
    else if (is_float("a product", &y, c->m * c->w.n))
        done = multiplied(c, &at, (float)factor, threads < INT_MAX ? (int)threads : INT_MAX);
    if (!is_address)
        PyBuffer_Release(&y);
    return done;
}

/* Products of many matrices, which have the same sizes but for the rows of activations. */
typedef struct {
    const call *c;
    const int64_t *jobs; /* for each product: m, and the addresses of x, data, scale, offset and y */
    const float *factors;
    const float *bias;
    Py_ssize_t count, rows, next;
    int threads, fine, memory;
} series;

enum { JOB = 6 };

/* Multiply-adds from which the threads share one product. */
#define SHARED ((int64_t)1 << 21)

static int is_large(const series *s, const int64_t *job)
{
    return job[0] * s->c->w.n >= SHARED / s->c->w.k;
}

/* One of them, in parts of at most `rows` rows, which are about as long. */
static void multiply_job(series *s, Py_ssize_t i, int threads)
{
    const int64_t *job = s->jobs + i * JOB;
    const Py_ssize_t m = (Py_ssize_t)job[0], parts = (m + s->rows - 1) / s->rows, step = (m + parts - 1) / parts;
    const Py_ssize_t x_row = s->c->w.k * kind_bits[s->c->x_kind] / 8;
    for (Py_ssize_t r = 0; r < m && __atomic_load_n(&s->fine, __ATOMIC_RELAXED); r += step) {
        const addresses at = {(const char *)(intptr_t)job[1] + r * x_row, (const void *)(intptr_t)job[2],
            (const void *)(intptr_t)job[3], (const void *)(intptr_t)job[4], s->bias, (float *)(intptr_t)job[5] + r * s->c->w.n};
        int fine = 0;
        if (!multiply_at(s->c, &at, step < m - r ? step : m - r, s->factors[i], threads, &fine))
            __atomic_store_n(&s->memory, 0, __ATOMIC_RELAXED);
        if (!fine)
            __atomic_store_n(&s->fine, 0, __ATOMIC_RELAXED);
    }
}

/* The small ones, each by one thread. */
static void multiply_jobs(void *context)
{
    series *s = context;
    for (Py_ssize_t i; (i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->count;)
        if (!is_large(s, s->jobs + i * JOB))
            multiply_job(s, i, 1);
}

PyDoc_STRVAR(each_doc,
    "each(prepared, jobs, factors, bias, rows, threads): `repeat` for many products of the same n and k.\n\n"
    "jobs: six int64 numbers for each product: its m, and the addresses of x, data, scale, offset (0 for none) and product. The\n"
    "memory there must be what `prepare` was given, but for m. factors: an FP32 number for each. bias: an address, 0 for none. rows:\n"
    "the most that are multiplied at a time. Small products are spread over threads, which share the large ones.");

static PyObject *each(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *capsule;
    Py_buffer jobs, factors;
    unsigned long long bias;
    series s = {.fine = 1, .memory = 1};
    if (!PyArg_ParseTuple(args, "Oy*y*Kni:each", &capsule, &jobs, &factors, &bias, &s.rows, &s.threads))
        return NULL;
    s.c = PyCapsule_GetPointer(capsule, PREPARED);
    s.jobs = jobs.buf, s.factors = factors.buf, s.bias = (const float *)(uintptr_t)bias;
    s.count = factors.len / (Py_ssize_t)sizeof(float);
    int done = s.c != NULL;
    if (done && (jobs.len != s.count * JOB * (Py_ssize_t)sizeof(int64_t) || s.rows < 1 || bias % 4 ||
                    (uintptr_t)jobs.buf % 8 || (uintptr_t)factors.buf % 4))
        done = refused("jobs", s.count * JOB * (Py_ssize_t)sizeof(int64_t), jobs.len);
    for (Py_ssize_t i = 0; done && i < s.count; i++) {
        const int64_t *job = s.jobs + i * JOB;
        const int missing = job[0] < 1 || !job[1] || !job[2] || !job[3] || (s.c->w.role != NONE && !job[4]) || !job[5];
        if (missing || job[1] % (kind_bits[s.c->x_kind] / 8) || job[5] % 4)
            s.fine = 0;
    }
    if (done && s.fine) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < s.count; i++)
            if (is_large(&s, s.jobs + i * JOB))
                multiply_job(&s, i, s.threads);
        run_together(multiply_jobs, &s, s.threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&jobs);
    PyBuffer_Release(&factors);
    if (!done)
        return NULL;
    return s.memory ? PyBool_FromLong(s.fine) : PyErr_NoMemory();
}

PyDoc_STRVAR(kinds_doc, "kinds(): the names of the encodings that `multiply` reads, in the order of their numbers.");

static PyObject *kinds(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    PyObject *found = PyTuple_New(KINDS);
    for (int i = 0; found && i < KINDS; i++) {
        PyObject *name = PyUnicode_FromString(kind_names[i]);
        if (!name || PyTuple_SetItem(found, i, name)) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

PyDoc_STRVAR(use_doc,
    "use(name): let calls run for that instruction set, and return the names of those that this processor has, the best\n"
    "first. Without a name, only return them. For tests: no call may be running.");

static PyObject *use(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|s:use", &name))
        return NULL;
    PyObject *found = PyList_New(0);
    int known = !name;
    for (int i = 0; found && versions[i]; i++) {
        PyObject *each = PyUnicode_FromString(versions[i]->name);
        if (!each || PyList_Append(found, each)) {
            Py_XDECREF(each);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(each);
        if (name && strcmp(name, versions[i]->name) == 0) {
            take(versions[i]);
            known = 1;
        }
    }
    if (found && !known) {
        PyErr_Format(PyExc_ValueError, "this processor has the instruction sets %R; got '%s'.", found, name);
        Py_DECREF(found);
        return NULL;
    }
    return found;
}

PyDoc_STRVAR(fast_doc,
    "fast(mode, kind, width, scale_kind, role, block, k, m): whether the instruction set in use has instructions for mode 1 (INT8)\n"
    "or 2 (BF16) that are faster than FP32 for m rows of k activations, and codes of `kind` in `width` bits with offsets of `role`\n"
    "and a scale of `scale_kind` for each block, of a multiple of 8.");

static PyObject *fast(PyObject *Py_UNUSED(self), PyObject *args)
{
    int mode;
    Py_ssize_t m;
    weight w = {.span = SPAN};
    if (!PyArg_ParseTuple(args, "iiiiinnn:fast", &mode, &w.codes.kind, &w.width, &w.scale.kind, &w.role, &w.block, &w.k, &m))
        return NULL;
    w.groups = w.block < w.k ? (w.k + w.block - 1) / w.block : 1;
    return PyBool_FromLong(mode > FP32_MODE && mode < MODES && is_faster(mode, &w, m));
}

static PyMethodDef methods[] = {
    {"fast", fast, METH_VARARGS, fast_doc},
    {"multiply", multiply, METH_VARARGS, multiply_doc},
    {"prepare", prepare, METH_VARARGS, prepare_doc},
    {"repeat", (PyCFunction)(void (*)(void))repeat, METH_FASTCALL, repeat_doc},
    {"each", each, METH_VARARGS, each_doc},
    {"operate", operate, METH_VARARGS, operate_doc},
    {"keep", keep, METH_VARARGS, keep_doc},
    {"refuse", refuse, METH_O, refuse_doc},
    {"kinds", kinds, METH_NOARGS, kinds_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *Py_UNUSED(self))
{
    return begin();
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.products",
    .m_doc = "Compiled products of activations and quantized weights; see breccia_native.matmul, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_products(void)
{
    return PyModuleDef_Init(&module);
}
