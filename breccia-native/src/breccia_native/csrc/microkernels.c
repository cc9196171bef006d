/* `breccia_native.microkernels` for Python: the microkernels of a cast, which are numbers as FP32, the largest magnitude of each
   block, and codes of scaled numbers (casts.h).

   Every function takes contiguous buffers, checks their sizes, and releases the GIL. */

#include "casts.h"
#include "coded_matrix.h"
#include "versions.h"

#define here ((const cast_functions *)chosen)

/* Bytes of a number of a kind. */
static Py_ssize_t size_of(int kind)
{
    return kind == FP32 ? 4 : 2;
}

/* Sets ValueError and returns 0 unless x holds numbers of the kind in blocks of k, and per_block 4 bytes for each. */
static int sizes_agree(const Py_buffer *x, int kind, const Py_buffer *per_block, Py_ssize_t k)
{
    const Py_ssize_t size = size_of(kind);
    if (k > 0 && x->len % size == 0 && x->len / size % k == 0 && per_block->len == x->len / size / k * 4 &&
        (uintptr_t)x->buf % size == 0 && (uintptr_t)per_block->buf % 4 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError,
        "wanted aligned %s numbers in blocks of k = %zd and one number a block; got %zd and %zd bytes. Call breccia.cast.",
        kind == FP32 ? "FP32" : "16-bit", k, x->len, per_block->len);
    return 0;
}

/* Sets ValueError and returns 0 unless `across` is 0, or n numbers are whole blocks of k rows of as many. */
static int are_rows(Py_ssize_t n, Py_ssize_t k, Py_ssize_t across)
{
    if (across == 0 || (across > 0 && n / k % across == 0))
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted blocks of k = %zd rows; got %zd numbers in rows of %zd. Call breccia.cast.", k, n, across);
    return 0;
}

static int has_length(const Py_buffer *codes, Py_ssize_t n)
{
    if (codes->len == n)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted room for %zd codes, one a byte; got %zd bytes. Call breccia.cast.", n, codes->len);
    return 0;
}

static PyObject *result(int done)
{
    return done ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(load_doc,
    "load(values, kind, columns, found): a matrix in any order as FP32 in rows of `columns`, with zeros after its columns and rows.\n"
    "kind: 32 for FP32, 16 for BF16 and -16 for FP16, as integers of their size.");

static PyObject *load(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *values;
    Py_buffer x, found;
    Py_ssize_t columns;
    int kind;
    if (!PyArg_ParseTuple(args, "Oinw*:load", &values, &kind, &columns, &found))
        return NULL;
    if (PyObject_GetBuffer(values, &x, PyBUF_STRIDED_RO) < 0) {
        PyBuffer_Release(&found);
        return NULL;
    }
    const int size = kind == FP32 ? 4 : 2;
    const int fits = x.ndim == 2 && x.itemsize == size && columns > 0 && x.shape[1] <= columns && found.len % (4 * columns) == 0 &&
                     x.shape[0] <= found.len / 4 / columns && (uintptr_t)x.buf % size == 0 && x.strides[0] % size == 0 &&
                     x.strides[1] % size == 0 && (uintptr_t)found.buf % 4 == 0;
    if (fits) {
        const matrix m = {x.buf, x.shape[0], x.shape[1], x.strides[0], x.strides[1], kind};
        uint32_t *to = found.buf;
        Py_BEGIN_ALLOW_THREADS
        here->load(m, to, columns);
        if (m.columns < columns)
            for (Py_ssize_t r = 0; r < m.rows; r++)
                memset(to + r * columns + m.columns, 0, 4 * (size_t)(columns - m.columns));
        memset(to + m.rows * columns, 0, (size_t)found.len - 4 * (size_t)(m.rows * columns));
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted an aligned matrix of numbers of %d bytes and room for it in rows of %zd; got %d axes of items of %zd bytes, and %zd "
            "bytes of room. Call breccia.cast.",
            size, columns, x.ndim, x.itemsize, found.len);
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(fits);
}

PyDoc_STRVAR(store_doc,
    "store(values, kind, found): FP32 numbers rounded to BF16 (kind 16) or FP16 (kind -16), to nearest, ties to even.");

static PyObject *store(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, found;
    int kind;
    if (!PyArg_ParseTuple(args, "y*iw*:store", &x, &kind, &found))
        return NULL;
    const int fits = x.len % 4 == 0 && found.len == x.len / 2 && (uintptr_t)x.buf % 4 == 0 && (uintptr_t)found.buf % 2 == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        here->store(x.buf, x.len / 4, kind, found.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted aligned FP32 numbers, and room for as many of 2 bytes; got %zd and %zd bytes. Call breccia.dequantize.", x.len,
            found.len);
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(fits);
}

PyDoc_STRVAR(amax_doc,
    "amax(source, k, amax, kind=32, across=0): FP32 bits of the largest magnitude of each k numbers, as uint32. across: unless 0,\n"
    "the numbers are rows of as many, and blocks are k rows of a column.");

static PyObject *amax(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, found;
    Py_ssize_t k;
    int kind = FP32;
    Py_ssize_t across = 0;
    if (!PyArg_ParseTuple(args, "y*nw*|in:amax", &x, &k, &found, &kind, &across))
        return NULL;
    const int done = sizes_agree(&x, kind, &found, k) && are_rows(x.len / size_of(kind), k, across);
    if (done && across) {
        Py_BEGIN_ALLOW_THREADS
        here->amax_down(x.buf, x.len / size_of(kind) / k / across, k, across, kind, found.buf);
        Py_END_ALLOW_THREADS
    } else if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->amax(x.buf, x.len / size_of(kind) / k, k, kind, found.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(done);
}

PyDoc_STRVAR(extremes_doc,
    "extremes(source, k, low, high, kind=32, across=0): the smallest and the largest of each k numbers, as FP32. Those below 2^-126\n"
    "are +0. across: as for `amax`.");

static PyObject *extremes(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, low, high;
    Py_ssize_t k;
    int kind = FP32;
    Py_ssize_t across = 0;
    if (!PyArg_ParseTuple(args, "y*nw*w*|in:extremes", &x, &k, &low, &high, &kind, &across))
        return NULL;
    const int done = sizes_agree(&x, kind, &low, k) && sizes_agree(&x, kind, &high, k) && are_rows(x.len / size_of(kind), k, across);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->extremes(x.buf, x.len / size_of(kind) / k, k, across, kind, low.buf, high.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&low);
    PyBuffer_Release(&high);
    return result(done);
}

PyDoc_STRVAR(words_doc,
    "words(seed, first, found): the first words of Threefry-2x32 with 20 rounds, key `seed`, for counters from `first` on, as uint32.");

static PyObject *words(PyObject *Py_UNUSED(self), PyObject *args)
{
    unsigned long long seed, first;
    Py_buffer found;
    if (!PyArg_ParseTuple(args, "KKw*:words", &seed, &first, &found))
        return NULL;
    const int done = found.len % 4 == 0 && (uintptr_t)found.buf % 4 == 0;
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->words((uint32_t)seed, (uint32_t)(seed >> 32), first, found.len / 4, found.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "wanted aligned room for words of 4 bytes; got %zd bytes. Call breccia.cast.", found.len);
    PyBuffer_Release(&found);
    return result(done);
}

/* The arguments of all writers of codes. */
typedef struct {
    Py_buffer x, inverse, codes;
    numbers all;
    unsigned long long seed, first;
} writing;

/* Sets ValueError and returns 0 unless sizes agree. packs: whether codes may be written two a byte, into room for half as many. */
static int ready(writing *w, int packs)
{
    w->all.x = w->x.buf;
    w->all.n = w->x.len / size_of(w->all.kind);
    w->all.inverse = w->inverse.buf;
    w->all.random.seed = w->seed;
    w->all.random.first = w->first;
    w->all.widen = here->widen;
    w->all.random.words = here->words;
    w->all.packed = packs && !w->all.across && w->all.n % 2 == 0 && w->codes.len == w->all.n / 2;
    if (!sizes_agree(&w->x, w->all.kind, &w->inverse, w->all.k) || (!w->all.packed && !has_length(&w->codes, w->all.n)) ||
        !are_rows(w->all.n, w->all.k, w->all.across))
        return 0;
    if (w->all.random.width >= 0 && w->all.random.stride >= 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted a width and a stride of rows, at least 0; got %zd and %zd. Call breccia.cast.",
        w->all.random.width, w->all.random.stride);
    return 0;
}

static PyObject *written(writing *w, int done)
{
    PyBuffer_Release(&w->x);
    PyBuffer_Release(&w->inverse);
    PyBuffer_Release(&w->codes);
    return result(done);
}

PyDoc_STRVAR(shifted_doc,
    "shifted(source, inverse, before, after, k, codes, low, high, magic, mask, kind=32, seed=0, first=0, width=0, stride=0, across=0):\n"
    "as integers, with numbers of each\n"
    "block of k that are subtracted before the numbers are scaled, and added to their codes.");

static PyObject *shifted(PyObject *Py_UNUSED(self), PyObject *args)
{
    writing w = {.all.kind = FP32};
    Py_buffer before, after;
    integer f;
    if (!PyArg_ParseTuple(args, "y*y*y*y*nw*fffb|iKKnnn:shifted", &w.x, &w.inverse, &before, &after, &w.all.k, &w.codes, &f.low,
            &f.high, &f.magic, &f.mask, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride, &w.all.across))
        return NULL;
    const int done =
        ready(&w, 0) && sizes_agree(&w.x, w.all.kind, &before, w.all.k) && sizes_agree(&w.x, w.all.kind, &after, w.all.k);
    if (done) {
        const offsets o = {before.buf, after.buf};
        Py_BEGIN_ALLOW_THREADS
        here->shifted(&w.all, o, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&before);
    PyBuffer_Release(&after);
    return written(&w, done);
}

PyDoc_STRVAR(floats_doc,
    "floats(source, inverse, k, divides, codes, floor, lift, largest, shift, sign, kind=32, seed=0, first=0, width=0, stride=0,\n"
    "across=0): codes of a minifloat, one a byte. Codes of 4 bits may be two a byte, the first in the low half, in room for half as\n"
    "many. Numbers are multiplied by the inverse scale of their block of k, or divided by its scale; where that is 0, codes are 0.\n"
    "floor, lift, largest, shift, sign: the fields of numpy.FloatCodes. kind: 32 for FP32, 16 for BF16, -16 for FP16.\n"
    "Unless width is 0, codes are rounded stochastically: numbers are rows of `width`, which begin `stride` elements after each\n"
    "other, the first at `first`. Unless across is 0, numbers are rows of as many, and blocks are k rows of a column; then width is 0.");

static PyObject *floats(PyObject *Py_UNUSED(self), PyObject *args)
{
    writing w = {.all.kind = FP32};
    minifloat f;
    if (!PyArg_ParseTuple(args, "y*y*niw*IIIii|iKKnnn:floats", &w.x, &w.inverse, &w.all.k, &w.all.divides, &w.codes, &f.floor, &f.lift,
            &f.largest, &f.shift, &f.sign, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride,
            &w.all.across))
        return NULL;
    const int done = ready(&w, 1);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->floats(&w.all, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    return written(&w, done);
}

PyDoc_STRVAR(integers_doc,
    "integers(source, inverse, k, divides, codes, low, high, magic, mask, kind=32, seed=0, first=0, width=0, stride=0, across=0):\n"
    "as `floats`, for the fields of numpy.IntegerCodes.");

static PyObject *integers(PyObject *Py_UNUSED(self), PyObject *args)
{
    writing w = {.all.kind = FP32};
    integer f;
    if (!PyArg_ParseTuple(args, "y*y*niw*fffb|iKKnnn:integers", &w.x, &w.inverse, &w.all.k, &w.all.divides, &w.codes, &f.low, &f.high,
            &f.magic, &f.mask, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride,
            &w.all.across))
        return NULL;
    const int done = ready(&w, 1);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->integers(&w.all, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    return written(&w, done);
}

PyDoc_STRVAR(tables_doc,
    "tables(source, inverse, k, divides, codes, starts, values, order, zero, kind=32, seed=0, first=0, width=0, stride=0, across=0):\n"
    "as `floats`, for a table of 16 numbers in ascending order: the smallest number rounded to each (the first is unused), their\n"
    "values, and their codes; and the code of +0.");

static PyObject *tables(PyObject *Py_UNUSED(self), PyObject *args)
{
    writing w = {.all.kind = FP32};
    Py_buffer starts, values, order;
    table f;
    if (!PyArg_ParseTuple(args, "y*y*niw*y*y*y*b|iKKnnn:tables", &w.x, &w.inverse, &w.all.k, &w.all.divides, &w.codes, &starts, &values,
            &order, &f.zero, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride,
            &w.all.across))
        return NULL;
    int done = ready(&w, 1);
    if (done && (starts.len != 64 || values.len != 64 || order.len != 16 || (uintptr_t)starts.buf % 4 || (uintptr_t)values.buf % 4)) {
        PyErr_Format(PyExc_ValueError,
            "wanted a table of 16 FP32 numbers, twice, and of their codes; got %zd, %zd and %zd bytes. Call breccia.cast.", starts.len,
            values.len, order.len);
        done = 0;
    }
    if (done) {
        f.starts = starts.buf, f.values = values.buf, f.order = order.buf;
        Py_BEGIN_ALLOW_THREADS
        here->tables(&w.all, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&starts);
    PyBuffer_Release(&values);
    PyBuffer_Release(&order);
    return written(&w, done);
}

PyDoc_STRVAR(scales_doc,
    "scales(amax, divisor, global_scale, floor, lift, largest, shift, sign, inverses, codes, inverse): codes of a minifloat of FP32\n"
    "amax / divisor / global_scale, and the FP32 inverse of each, from a table of 256. The others are the fields of numpy.FloatCodes.");

static PyObject *scales(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer x, inverses, codes, inverse;
    minifloat f;
    float divisor, global_scale;
    if (!PyArg_ParseTuple(args, "y*ffIIIiiy*w*w*:scales", &x, &divisor, &global_scale, &f.floor, &f.lift, &f.largest, &f.shift, &f.sign,
            &inverses, &codes, &inverse))
        return NULL;
    int done = sizes_agree(&x, FP32, &inverse, 1) && has_length(&codes, x.len / 4);
    if (done && (inverses.len != 1024 || (uintptr_t)inverses.buf % 4)) {
        PyErr_Format(PyExc_ValueError, "wanted FP32 inverses of 256 codes; got %zd bytes. Call breccia.cast.", inverses.len);
        done = 0;
    }
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->scales(x.buf, x.len / 4, divisor, global_scale, f, inverses.buf, codes.buf, inverse.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&inverses);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&inverse);
    return result(done);
}

/* Blocks whose numbers stay in the L1 cache from their amax to their codes, and how many numbers they have at most, if they are several. */
#define BLOCKS 512
#define NUMBERS 8192

/* What takes blocks from their numbers to their codes. */
typedef struct {
    writing w;
    Py_buffer inverses, found;
    minifloat of_scale, f;
    float divisor, global_scale;
    uint32_t largest;
} passing;

/* The scales and codes of n numbers at x, in whole blocks, of which there are `first` before. */
static void pass(passing *p, const void *x, Py_ssize_t n, Py_ssize_t first)
{
    uint32_t amaxes[BLOCKS];
    float inverse[BLOCKS];
    numbers all = p->w.all;
    const Py_ssize_t k = all.k, count = n / k;
    all.x = x, all.n = n, all.inverse = inverse;
    here->amax(all.x, count, k, all.kind, amaxes);
    for (Py_ssize_t i = 0; i < count; i++)
        p->largest = amaxes[i] > p->largest ? amaxes[i] : p->largest;
    here->scales((const float *)amaxes, count, p->divisor, p->global_scale, p->of_scale, p->inverses.buf,
        (uint8_t *)p->found.buf + first, inverse);
    here->floats(&all, p->f, (uint8_t *)p->w.codes.buf + (all.packed ? first * k / 2 : first * k));
}

static void pass_numbers(passing *p, Py_ssize_t n)
{
    const Py_ssize_t k = p->w.all.k, size = size_of(p->w.all.kind);
    const Py_ssize_t most = k > NUMBERS / BLOCKS ? k > NUMBERS ? 1 : NUMBERS / k : BLOCKS;
    for (Py_ssize_t at = 0; at < n; at += most * k)
        pass(p, (const char *)p->w.x.buf + at * size, n - at < most * k ? n - at : most * k, at / k);
}

/* Numbers of a matrix of codes that are decoded at once: FP32 of which half of an L1 cache has room. */
#define SOME 4096

/* Likewise of a matrix of codes, rows of which are whole blocks. */
static void pass_codes(passing *p, const coded_matrix *m)
{
    float room[SOME];
    const Py_ssize_t k = p->w.all.k, across = m->columns < SOME ? m->columns : SOME, down = SOME / across;
    for (Py_ssize_t r = 0; r < m->rows; r += down)
        for (Py_ssize_t c = 0; c < m->columns; c += across) {
            const Py_ssize_t row_end = r + down < m->rows ? r + down : m->rows;
            const Py_ssize_t end = c + across < m->columns ? c + across : m->columns;
            m->numbers(m, r, row_end, c, end, room);
            pass(p, room, (row_end - r) * (end - c), (r * m->columns + c) / k);
        }
}

PyDoc_STRVAR(blocks_doc,
    "blocks(source, k, kind, divisor, global_scale, scale, inverses, element, scales, codes): the FP32 bits of the largest magnitude.\n"
    "The scales of blocks of k numbers as `scales` has them of their amax, and the codes of their numbers as `floats` has them, in\n"
    "one pass. scale, element: the fields of numpy.FloatCodes of the two. Above a largest magnitude of 2^100 they are no result.\n"
    "source: numbers, or a `decoding.matrix` whose rows are whole blocks: its FP32 numbers are decoded on the way (kind 32), and k is\n"
    "a power of two from 16 to 256.");

static PyObject *blocks(PyObject *Py_UNUSED(self), PyObject *args)
{
    passing p = {.w.all.kind = FP32};
    writing *const w = &p.w;
    PyObject *source;
    if (!PyArg_ParseTuple(args, "Oniff(IIIii)y*(IIIii)w*w*:blocks", &source, &w->all.k, &w->all.kind, &p.divisor, &p.global_scale,
            &p.of_scale.floor, &p.of_scale.lift, &p.of_scale.largest, &p.of_scale.shift, &p.of_scale.sign, &p.inverses, &p.f.floor,
            &p.f.lift, &p.f.largest, &p.f.shift, &p.f.sign, &p.found, &w->codes))
        return NULL;
    const coded_matrix *const m =
        PyCapsule_IsValid(source, CODED_MATRIX) ? PyCapsule_GetPointer(source, CODED_MATRIX) : NULL;
    const Py_ssize_t size = size_of(w->all.kind), k = w->all.k;
    int done = m || PyObject_GetBuffer(source, &w->x, PyBUF_SIMPLE) == 0, fits = 0;
    if (done) {
        const Py_ssize_t n = m ? m->rows * m->columns : w->x.len / size;
        w->all.widen = here->widen;
        w->all.packed = n % 2 == 0 && k % 2 == 0 && w->codes.len == n / 2;
        fits = k > 0 && n % k == 0 && p.found.len == n / k && (w->all.packed || w->codes.len == n) && p.inverses.len == 1024 &&
               (uintptr_t)p.inverses.buf % 4 == 0;
        if (m)
            fits = fits && k >= SOME / BLOCKS && k >= 16 && k <= DECODED && (k & (k - 1)) == 0 && m->columns % k == 0 && w->all.kind == FP32;
        else
            fits = fits && w->x.len % size == 0 && (uintptr_t)w->x.buf % size == 0;
        if (fits && n) {
            Py_BEGIN_ALLOW_THREADS
            if (m)
                pass_codes(&p, m);
            else
                pass_numbers(&p, n);
            Py_END_ALLOW_THREADS
        } else if (!fits)
            PyErr_Format(PyExc_ValueError,
                "wanted aligned numbers in blocks of k = %zd, room for a scale of each and for their codes, and FP32 inverses of 256 "
                "codes; got %zd bytes, room for %zd and %zd, and %zd bytes of inverses. Call breccia.cast.",
                k, m ? 4 * n : w->x.len, p.found.len, w->codes.len, p.inverses.len);
    }
    if (!m && done)
        PyBuffer_Release(&w->x);
    PyBuffer_Release(&p.inverses);
    PyBuffer_Release(&p.found);
    PyBuffer_Release(&w->codes);
    return fits ? PyLong_FromUnsignedLong(p.largest) : NULL;
}

PyDoc_STRVAR(sixes_doc, "sixes(codes, data): four codes of 6 bits, one a byte, to each three bytes of data; the first in the low bits.");

static PyObject *sixes(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer codes, data;
    if (!PyArg_ParseTuple(args, "y*w*:sixes", &codes, &data))
        return NULL;
    const int done = has_length(&codes, data.len / 3 * 4) && has_length(&codes, (data.len * 4 + 2) / 3);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->sixes(codes.buf, data.len / 3, data.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(eights_doc,
    "eights(codes, bits, data): eight codes of 1, 2, 3, 5 or 7 bits, one a byte, to as many bytes of data; the first in the low bits.");

static PyObject *eights(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer codes, data;
    int bits;
    if (!PyArg_ParseTuple(args, "y*iw*:eights", &codes, &bits, &data))
        return NULL;
    const int known = bits == 1 || bits == 2 || bits == 3 || bits == 5 || bits == 7;
    const int done = known && codes.len % 8 == 0 && data.len == codes.len / 8 * bits;
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->eights(codes.buf, codes.len / 8, bits, data.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted eights of codes of 1, 2, 3, 5 or 7 bits, and room for them; got %zd codes of %d bits and %zd bytes. Call breccia.cast.",
            codes.len, bits, data.len);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(down_doc,
    "down(codes, bits, data): rows of codes of less than 8 bits, one a byte, whose columns are packed: whole groups of rows that share\n"
    "bytes, to rows of data; the first in the low bits.");

static PyObject *down(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *from, *to;
    Py_buffer codes, data;
    int bits;
    if (!PyArg_ParseTuple(args, "OiO:down", &from, &bits, &to) || PyObject_GetBuffer(from, &codes, PyBUF_ND) < 0)
        return NULL;
    if (PyObject_GetBuffer(to, &data, PyBUF_ND | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&codes);
        return NULL;
    }
    const int done = codes.ndim == 2 && data.ndim == 2 && codes.itemsize == 1 && data.itemsize == 1 && bits > 0 && bits < 8 &&
        codes.shape[1] == data.shape[1] && codes.shape[0] % (bits % 2 ? 8 : bits == 4 ? 2 : 4) == 0 &&
        data.shape[0] == codes.shape[0] * bits / 8;
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->down(codes.buf, codes.shape[0], codes.shape[1], bits, data.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted rows of codes of 1 to 7 bits, whole groups that share bytes, and as many columns of room for them; got %zd codes of "
            "%d bits and %zd bytes. Call breccia.cast.", codes.len, bits, data.len);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(pairs_doc, "pairs(codes, data): two codes of 4 bits, one a byte, to each byte of data; the first in its low half.");

static PyObject *pairs(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer codes, data;
    if (!PyArg_ParseTuple(args, "y*w*:pairs", &codes, &data))
        return NULL;
    const int done = has_length(&codes, 2 * data.len);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->pairs(codes.buf, data.len, data.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(values_doc,
    "values(data, table, scale, k, bits, values): the FP32 number of each code, by a table, times the FP32 scale of its block of k.\n"
    "Codes have 8 bits, or 4, two a byte, the first in the low half.");

static PyObject *values(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data, table, scale, found;
    Py_ssize_t k;
    int bits;
    if (!PyArg_ParseTuple(args, "y*y*y*niw*:values", &data, &table, &scale, &k, &bits, &found))
        return NULL;
    int done = sizes_agree(&found, FP32, &scale, k) && has_length(&data, found.len / 4 * bits / 8);
    if (done && ((bits != 4 && bits != 8) || table.len != 4 << bits || (uintptr_t)table.buf % 4 || (bits == 4 && k % 2))) {
        PyErr_Format(PyExc_ValueError,
            "wanted codes of 4 or 8 bits with a number for each, and whole bytes in each block; got %d bits, %zd bytes of numbers and "
            "k = %zd. Call breccia.dequantize.",
            bits, table.len, k);
        done = 0;
    }
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->values(data.buf, table.buf, scale.buf, found.len / 4, k, bits, found.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scale);
    PyBuffer_Release(&found);
    return result(done);
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, load_doc},
    {"store", store, METH_VARARGS, store_doc},
    {"amax", amax, METH_VARARGS, amax_doc},
    {"extremes", extremes, METH_VARARGS, extremes_doc},
    {"shifted", shifted, METH_VARARGS, shifted_doc},
    {"floats", floats, METH_VARARGS, floats_doc},
    {"integers", integers, METH_VARARGS, integers_doc},
    {"words", words, METH_VARARGS, words_doc},
    {"tables", tables, METH_VARARGS, tables_doc},
    {"scales", scales, METH_VARARGS, scales_doc},
    {"blocks", blocks, METH_VARARGS, blocks_doc},
    {"sixes", sixes, METH_VARARGS, sixes_doc},
    {"down", down, METH_VARARGS, down_doc},
    {"eights", eights, METH_VARARGS, eights_doc},
    {"pairs", pairs, METH_VARARGS, pairs_doc},
    {"values", values, METH_VARARGS, values_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.microkernels",
    .m_doc = "Compiled microkernels of casts and of dequantize; see breccia_native.kernels, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_microkernels(void)
{
    ADD_VERSIONS(&casts_avx512, &casts_avx2, &casts_portable);
    return PyModuleDef_Init(&module);
}
