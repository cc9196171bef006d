/* Products of a few rows of FP32 activations and a quantized weight whose memory is (K, N), with blocks along K.

   products.c reads rows of K codes; a weight of this order would have to be transposed for it. Here a vector has codes of
   several columns, so that sums need no reduction. A thread takes a panel of columns, and walks down all rows in steps of at most
   STEP, which have one scale for each column: it is multiplied once for each step, unless a bias is added to scaled codes.

   An element of a product has at most STEP + K / STEP + 3 roundings, which are fewer than the K that the error bound of
   docs/spec/numerics.md allows from K = 32 on, where no sum overflows or underflows: `multiply` returns False for numbers beyond
   these limits, which are those of products.c. The order of a sum does not depend on threads, nor on other rows. */

#if !defined(__GNUC__)
#error "columns.c needs the vector extensions of GCC or Clang"
#endif

#include "columns.h"
#include "pool.h"

/* -------------------------------------------------------------------------------------------------- instruction sets */

/* Those that this processor can run, the best first. */
static const column_version *versions[4], *here;

static void find_versions(void)
{
    int n = 0;
#if defined(HAS_X86)
    __builtin_cpu_init();
    const int avx2_too = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (avx2_too && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        versions[n++] = &columns_avx512;
    if (avx2_too)
        versions[n++] = &columns_avx2;
#endif
    versions[n] = &columns_portable;
    here = versions[0];
}

/* -------------------------------------------------------------------------------------------------- panels */

/* y = x times columns `first` to `end` of the weight, for m <= MOST_ROWS rows. Returns whether numbers are within the limits. */
static int multiplied(const matrix *w, const float *x, int m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    float sums[MOST_ROWS * PANEL] = {0}, scales[PANEL] = {0}, offsets[PANEL] = {0};
    uint8_t rest[STEP * WIDEST], wide[STEP * PANEL];
    const int packed = w->codes.kind == TABLE4;
    const stepper step = here->steps[w->codes.kind][w->role];
    const Py_ssize_t n = end - first, strip = here->strip;
    for (Py_ssize_t k = 0; k < w->k;) {
        if (k % w->block == 0 && !here->scales(w, k / w->block, first, n, scales, offsets))
            return 0;
        const Py_ssize_t left = w->block - k % w->block, count = left < w->k - k ? (left < STEP ? left : STEP) :
            w->k - k < STEP ? w->k - k : STEP;
        const Py_ssize_t rows = packed ? (count + 1) / 2 : count;
        const Py_ssize_t stride = w->widens ? PANEL : w->n;
        const uint8_t *codes = w->widens ? wide : w->codes.items + (packed ? k / 2 : k) * w->n + first;
        Py_ssize_t c = 0;
        if (w->widens)
            here->widened(w, k, count, first, n, wide);
        for (; c + strip <= n; c += strip)
            step(m, w, x + k, count, codes + c, stride, scales + c, offsets + c, sums + c);
        if (c < n) { /* the last strip of the weight, of fewer columns: zeros follow them */
            memset(rest, 0, sizeof rest);
            for (Py_ssize_t i = 0; i < rows; i++)
                memcpy(rest + i * strip, codes + i * stride + c, (size_t)(n - c));
            step(m, w, x + k, count, rest, strip, scales + c, offsets + c, sums + c);
        }
        k += count;
    }
    for (int r = 0; r < m; r++)
        memcpy(y + r * w->n + first, sums + r * PANEL, 4 * (size_t)n);
    return 1;
}

/* -------------------------------------------------------------------------------------------------- for Python */

static int refused(const char *wanted, Py_ssize_t expected, Py_ssize_t found)
{
    PyErr_Format(PyExc_ValueError, "wanted %s of %zd bytes; got %zd. Call breccia.matmul.", wanted, expected, found);
    return 0;
}

static int is_float(const char *what, const Py_buffer *x, Py_ssize_t n)
{
    return (x->len == 4 * n && (uintptr_t)x->buf % 4 == 0) || refused(what, 4 * n, x->len);
}

/* A product that threads share, each of which takes the next panel of columns until none is left. */
typedef struct {
    const matrix *w;
    const float *x;
    float *y;
    Py_ssize_t m;
    int64_t next; /* the first column that no thread has taken */
    int fine;     /* 0 once numbers are beyond the limits */
} product;

static void take_panels(void *context)
{
    product *p = context;
    const matrix *w = p->w;
    while (__atomic_load_n(&p->fine, __ATOMIC_RELAXED)) {
        const Py_ssize_t first = (Py_ssize_t)__atomic_fetch_add(&p->next, PANEL, __ATOMIC_RELAXED);
        if (first >= w->n)
            return;
        const Py_ssize_t end = first + PANEL < w->n ? first + PANEL : w->n;
        for (Py_ssize_t r = 0; r < p->m; r += here->most) {
            const int rows = p->m - r < here->most ? (int)(p->m - r) : here->most;
            if (!multiplied(w, p->x + r * w->k, rows, first, end, p->y + r * w->n)) {
                __atomic_store_n(&p->fine, 0, __ATOMIC_RELAXED);
                return;
            }
        }
    }
}

PyDoc_STRVAR(multiply_doc,
    "multiply(x, m, k, n, data, kind, width, table, scale, scale_kind, scale_table, block, tall, divides, factor, least, offset,\n"
    "offset_kind, role, product, threads): write (m, k) FP32 numbers times a weight of (k, n) codes, in C order, to `product`, in C\n"
    "order. Codes of several rows share bytes of their column. scale, offset: one for each block of `block` rows and `tall`\n"
    "columns, in C order. The other arguments are those of `products.multiply`. Returns False, and the result is\n"
    "unspecified, for numbers beyond the limits of products.c.");

static PyObject *multiply(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, data, table, scale, scale_table, offset, y;
    Py_ssize_t m;
    int threads, fine = 1;
    matrix w;
    memset(&w, 0, sizeof w);
    if (!PyArg_ParseTuple(args, "y*nnny*iiy*y*iy*nnpffy*iiw*i:multiply", &x, &m, &w.k, &w.n, &data, &w.codes.kind, &w.width, &table,
            &scale, &w.scale.kind, &scale_table, &w.block, &w.tall, &w.divides, &w.factor, &w.least, &offset, &w.offset.kind, &w.role, &y,
            &threads))
        return NULL;
    const Py_ssize_t most = (Py_ssize_t)1 << 40;
    int done = m > 0 && w.k > 0 && w.n > 0 && m < most / w.k && m < most / w.n && w.n < most / w.k && w.block > 0 && w.tall > 0 &&
        w.codes.kind >= 0 && w.codes.kind < KINDS && is_width(w.width, w.codes.kind) && w.role >= 0 && w.role < ROLES &&
        here->steps[w.codes.kind][w.role] != NULL && w.scale.kind > TABLE4 && w.scale.kind < KINDS && w.offset.kind > E5M2 &&
        w.offset.kind < KINDS && kind_bits[w.scale.kind] != 6 && kind_bits[w.offset.kind] != 6;
    if (!done)
        PyErr_SetString(PyExc_ValueError, "wanted lengths and kinds that breccia_native.matmul passes. Call breccia.matmul.");
    else {
        const Py_ssize_t block = w.block < w.k ? w.block : w.k, tall = w.tall < w.n ? w.tall : w.n;
        const Py_ssize_t rows = stored_bytes(w.k, w.width);
        w.block = block, w.tall = tall, w.wide = (w.n + tall - 1) / tall;
        w.widens = w.width % 4 || w.width < kind_bits[w.codes.kind] || (w.width == 4 && block % 2 && block < w.k);
        const Py_ssize_t scales = (w.k + block - 1) / block * w.wide;
        const Py_ssize_t scale_bytes = scales * kind_bits[w.scale.kind] / 8, offset_bytes = scales * kind_bits[w.offset.kind] / 8;
        done = is_float("activations", &x, m * w.k) && is_float("a product", &y, m * w.n) &&
            (data.len == rows * w.n || refused("codes", rows * w.n, data.len)) &&
            (w.codes.kind > TABLE8 || is_float("a table", &table, (Py_ssize_t)1 << kind_bits[w.codes.kind])) &&
            (w.scale.kind > TABLE8 || is_float("a table of scales", &scale_table, 256)) &&
            (scale.len == scale_bytes || refused("scales", scale_bytes, scale.len)) &&
            (w.role == NONE || offset.len == offset_bytes || refused("offsets", offset_bytes, offset.len));
    }
    if (done) {
        w.codes.items = data.buf, w.codes.table = table.buf;
        w.scale.items = scale.buf, w.scale.table = scale_table.buf;
        w.offset.items = offset.buf;
        w.factor *= here->lift(w.codes.kind);
        Py_BEGIN_ALLOW_THREADS
        product p = {&w, x.buf, y.buf, m, 0, within(x.buf, m * w.k, MOST_X, 0)};
        run_shared(take_panels, &p, threads);
        fine = p.fine;
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&data);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scale);
    PyBuffer_Release(&scale_table);
    PyBuffer_Release(&offset);
    PyBuffer_Release(&y);
    return done ? PyBool_FromLong(fine) : NULL;
}

PyDoc_STRVAR(turn_doc,
    "turn(data, rows, columns, found, threads): write the transpose of a matrix of bytes, in C order, to `found`, in C order.");

static PyObject *turn(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data, found;
    turning t = {0};
    int threads;
    if (!PyArg_ParseTuple(args, "y*nnw*i:turn", &data, &t.rows, &t.columns, &found, &threads))
        return NULL;
    const int whole = t.rows > 0 && t.columns > 0 && t.rows <= PY_SSIZE_T_MAX / t.columns;
    const Py_ssize_t n = whole ? t.rows * t.columns : 0;
    const int done = whole && data.len == n && found.len == n;
    if (done) {
        t.from = data.buf, t.to = found.buf;
        Py_BEGIN_ALLOW_THREADS
        run_shared(here->turned, &t, threads);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "wanted two matrices of %zd x %zd bytes; got %zd and %zd bytes. Call breccia.matmul.", t.rows,
            t.columns, data.len, found.len);
    PyBuffer_Release(&data);
    PyBuffer_Release(&found);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(supports_doc, "supports(kind, role): whether `multiply` decodes these codes, with offsets of this role.");

static PyObject *supports(PyObject *Py_UNUSED(self), PyObject *args)
{
    int kind, role;
    if (!PyArg_ParseTuple(args, "ii:supports", &kind, &role))
        return NULL;
    return PyBool_FromLong(kind >= 0 && kind < KINDS && role >= 0 && role < ROLES && here->steps[kind][role] != NULL);
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
    for (int i = 0; found && i < 4 && versions[i]; i++) {
        PyObject *each = PyUnicode_FromString(versions[i]->name);
        if (!each || PyList_Append(found, each))
            Py_CLEAR(found);
        Py_XDECREF(each);
        if (name && strcmp(name, versions[i]->name) == 0) {
            here = versions[i];
            known = 1;
        }
    }
    if (found && !known) {
        PyErr_Format(PyExc_ValueError, "this processor has the instruction sets %R; got '%s'.", found, name);
        Py_CLEAR(found);
    }
    return found;
}

static PyMethodDef methods[] = {
    {"multiply", multiply, METH_VARARGS, multiply_doc},
    {"turn", turn, METH_VARARGS, turn_doc},
    {"supports", supports, METH_VARARGS, supports_doc},
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
    .m_name = "breccia_native.columns",
    .m_doc = "Compiled products of activations and weights in (K, N) order; see breccia_native.matmul, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_columns(void)
{
    find_versions();
    return PyModuleDef_Init(&module);
}
