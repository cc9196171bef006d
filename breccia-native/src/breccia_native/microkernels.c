/* Microkernels of a cast: numbers as FP32, the largest magnitude of each block, and codes of scaled numbers.

   They write the bytes that breccia/kernels/numpy/ writes, by the same arithmetic. FP32 additions round to codes, so contraction
   into fused multiply-adds and reassociation must stay off (see pyproject.toml).
   Every function takes contiguous buffers, checks their sizes, and releases the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "numbers.h"
#include "versions.h"

INLINE uint32_t number_at(const char *x, int kind)
{
    uint32_t found;
    row_of(x, 1, kind, &found);
    return found;
}

/* A square whose side is a cache line of FP32. */
#define SIDE 16

/* The transpose of SIDE rows of SIDE adjacent numbers, `stride` bytes apart. */
INLINE void square_of(const char *x, Py_ssize_t stride, int kind, uint32_t *found, Py_ssize_t columns)
{
    uint32_t tile[SIDE][SIDE];
    for (int j = 0; j < SIDE; j++)
        row_of(x + j * stride, SIDE, kind, tile[j]);
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++)
            found[i * columns + j] = tile[j][i];
}

/* A matrix in memory: strides in bytes. */
typedef struct {
    const char *at;
    Py_ssize_t rows, columns, down, along;
    int kind;
} matrix;

/* FP32 bits of a matrix in rows of `columns`. The rest of each row, and further rows, are not written. */
INLINE void numbers_of(matrix x, uint32_t *found, Py_ssize_t columns)
{
    const Py_ssize_t size = x.kind == FP32 ? 4 : 2;
    if (x.along == size) {
        for (Py_ssize_t r = 0; r < x.rows; r++)
            row_of(x.at + r * x.down, x.columns, x.kind, found + r * columns);
        return;
    }
    const Py_ssize_t squares = x.down == size ? x.rows / SIDE * SIDE : 0, across = x.columns / SIDE * SIDE;
    for (Py_ssize_t c = 0; c < across; c += SIDE)
        for (Py_ssize_t r = 0; r < squares; r += SIDE)
            square_of(x.at + r * x.down + c * x.along, x.along, x.kind, found + r * columns + c, columns);
    for (Py_ssize_t r = 0; r < x.rows; r++)
        for (Py_ssize_t c = r < squares ? across : 0; c < x.columns; c++)
            found[r * columns + c] = number_at(x.at + r * x.down + c * x.along, x.kind);
}

/* -------------------------------------------------------------------------------------------------- amax */

INLINE void largest_of_each(const uint32_t *x, Py_ssize_t blocks, Py_ssize_t k, uint32_t *amax)
{
    for (Py_ssize_t b = 0; b < blocks; b++, x += k) {
        int32_t most = 0; /* magnitudes are non-negative as int32, which all processors can compare */
        for (Py_ssize_t i = 0; i < k; i++) {
            const int32_t a = (int32_t)(x[i] & MAGNITUDE);
            most = a > most ? a : most;
        }
        amax[b] = (uint32_t)most;
    }
}

/* Loops over the formats' block sizes have a length known at compile time. */
INLINE void amax_of(const uint32_t *x, Py_ssize_t blocks, Py_ssize_t k, uint32_t *amax)
{
    switch (k) {
    case 16: largest_of_each(x, blocks, 16, amax); break;
    case 32: largest_of_each(x, blocks, 32, amax); break;
    case 128: largest_of_each(x, blocks, 128, amax); break;
    default: largest_of_each(x, blocks, k, amax);
    }
}

/* The order of FP32 numbers as that of int32, and back. Numbers below 2^-126 are +0. */
INLINE int32_t ordered(uint32_t u)
{
    const uint32_t clean = (int32_t)(u & MAGNITUDE) < (int32_t)NORMAL ? 0 : u;
    return (int32_t)(clean ^ ((uint32_t)((int32_t)clean >> 31) >> 1));
}

INLINE uint32_t unordered(int32_t key)
{
    return (uint32_t)key ^ ((uint32_t)(key >> 31) >> 1);
}

INLINE void extremes_of(const uint32_t *x, Py_ssize_t blocks, Py_ssize_t k, uint32_t *low, uint32_t *high)
{
    for (Py_ssize_t b = 0; b < blocks; b++, x += k) {
        int32_t least = INT32_MAX, most = INT32_MIN;
        for (Py_ssize_t i = 0; i < k; i++) {
            const int32_t a = ordered(x[i]);
            least = a < least ? a : least;
            most = a > most ? a : most;
        }
        low[b] = unordered(least);
        high[b] = unordered(most);
    }
}

/* -------------------------------------------------------------------------------------------------- codes */

/* Numbers scaled before they are encoded: they stay in the L1 cache. Meanwhile what comes AHEAD is prefetched. */
#define STRIP 256
#define AHEAD 2048

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address)
#endif

INLINE void times(const float *x, float by, Py_ssize_t n, int divides, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16) { /* a cache line */
        FETCH(x + i + AHEAD);
        for (Py_ssize_t j = i; j < i + 16; j++)
            y[j] = divides ? x[j] / by : x[j] * by;
    }
    for (; i < n; i++)
        y[i] = divides ? x[i] / by : x[i] * by;
}

/* The position of the next number in its block of k: the inverse scale, and how many numbers of the block are left. */
typedef struct {
    const float *inverse;
    Py_ssize_t left;
} place;

/* y = the next n of x, each times the inverse scale of its block of k, or divided by its scale; +0 where that is 0, whatever x is. */
INLINE void scaled(const float *x, Py_ssize_t k, Py_ssize_t n, int divides, place *next, float *y)
{
    for (Py_ssize_t i = 0, length; i < n; i += length) {
        const float by = *next->inverse;
        length = next->left < n - i ? next->left : n - i;
        if (by == 0)
            memset(y + i, 0, 4 * (size_t)length);
        else
            times(x + i, by, length, divides, y + i);
        next->left -= length;
        if (next->left == 0) {
            next->inverse++;
            next->left = k;
        }
    }
}

/* Fields of breccia.kernels.numpy.FloatCodes. */
typedef struct {
    uint32_t floor, lift, largest;
    int shift, sign;
} minifloat;

INLINE void floats_of(
    const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, int divides, minifloat f, uint8_t *codes)
{
    float y[STRIP];
    uint32_t words[STRIP];
    place next = {inverse, k};
    for (Py_ssize_t start = 0; start < n; start += STRIP) {
        const Py_ssize_t length = n - start < STRIP ? n - start : STRIP;
        scaled(x + start, k, length, divides, &next, y);
        for (Py_ssize_t i = 0; i < length; i++) {
            const uint32_t u = bits_of(y[i]);
            int32_t a = (int32_t)(u & MAGNITUDE), e;
            a = a > (int32_t)f.largest ? (int32_t)f.largest : a;
            e = (int32_t)((uint32_t)a & EXPONENT);
            e = (e > (int32_t)f.floor ? e : (int32_t)f.floor) + (int32_t)f.lift;
            const uint32_t sum = bits_of(float_of((uint32_t)a) + float_of((uint32_t)e));
            words[i] = ((sum + ((uint32_t)e >> f.shift)) & 0xff) | ((u >> 31) << f.sign);
        }
        for (Py_ssize_t i = 0; i < length; i++) /* a separate loop, else each of the terms above would be narrowed */
            codes[start + i] = (uint8_t)words[i];
    }
}

/* Fields of breccia.kernels.numpy.IntegerCodes. */
typedef struct {
    float low, high, magic;
    uint8_t mask;
} integer;

INLINE void integers_of(
    const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, int divides, integer f, uint8_t *codes)
{
    float y[STRIP];
    place next = {inverse, k};
    for (Py_ssize_t start = 0; start < n; start += STRIP) {
        const Py_ssize_t length = n - start < STRIP ? n - start : STRIP;
        scaled(x + start, k, length, divides, &next, y);
        for (Py_ssize_t i = 0; i < length; i++) {
            const float below = y[i] < f.high ? y[i] : f.high, within = below > f.low ? below : f.low;
            codes[start + i] = (uint8_t)(bits_of(within + f.magic) & f.mask);
        }
    }
}

/* What is the same for all numbers of a block: the inverse scale, what is subtracted before, and added to codes. */
typedef struct {
    const float *inverse, *before, *after;
} offsets;

INLINE void shifted_of(const float *x, offsets o, Py_ssize_t n, Py_ssize_t k, integer f, uint8_t *codes)
{
    for (Py_ssize_t start = 0, b = 0; start < n; start += k, b++) {
        const float by = o.inverse[b], before = o.before[b], after = o.after[b], low = f.low - after, high = f.high - after;
        const uint8_t add = (uint8_t)(int32_t)after;
        if (by == 0) {
            memset(codes + start, 0, (size_t)k);
            continue;
        }
        for (Py_ssize_t i = start; i < start + k; i++) {
            const float y = (x[i] - before) * by, below = y < high ? y : high, within = below > low ? below : low;
            codes[i] = (uint8_t)((bits_of(within + f.magic) + add) & f.mask);
        }
    }
}

INLINE void pairs_of(const uint8_t *codes, Py_ssize_t n, uint8_t *data)
{
    for (Py_ssize_t i = 0; i < n; i++)
        data[i] = (uint8_t)(codes[2 * i] | (codes[2 * i + 1] << 4));
}

/* -------------------------------------------------------------------------------------------------- values */

/* values = the value of each code times the scale of its block of k: 8-bit codes, and 4-bit codes, two per byte. */
INLINE void values_of_bytes(const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, float *values)
{
    for (Py_ssize_t start = 0; start < n; start += k, scale++) {
        const float by = *scale;
        for (Py_ssize_t i = start; i < start + k; i++)
            values[i] = table[data[i]] * by;
    }
}

INLINE void values_of_pairs(const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, float *values)
{
    for (Py_ssize_t start = 0; start < n; start += k, scale++) {
        const float by = *scale;
        for (Py_ssize_t i = start; i < start + k; i += 2) {
            values[i] = table[data[i / 2] & 15] * by;
            values[i + 1] = table[data[i / 2] >> 4] * by;
        }
    }
}

/* -------------------------------------------------------------------------------------------------- processors */

typedef struct {
    void (*load)(matrix, uint32_t *, Py_ssize_t);
    void (*store)(const uint32_t *, Py_ssize_t, int, uint16_t *);
    void (*amax)(const uint32_t *, Py_ssize_t, Py_ssize_t, uint32_t *);
    void (*extremes)(const uint32_t *, Py_ssize_t, Py_ssize_t, uint32_t *, uint32_t *);
    void (*shifted)(const float *, offsets, Py_ssize_t, Py_ssize_t, integer, uint8_t *);
    void (*floats)(const float *, const float *, Py_ssize_t, Py_ssize_t, int, minifloat, uint8_t *);
    void (*integers)(const float *, const float *, Py_ssize_t, Py_ssize_t, int, integer, uint8_t *);
    void (*pairs)(const uint8_t *, Py_ssize_t, uint8_t *);
    void (*values)(const uint8_t *, const float *, const float *, Py_ssize_t, Py_ssize_t, int, float *);
} version;

/* The same functions, compiled for one kind of processor. */
#define VERSION(name, target)                                                                                               \
    target static void name##_load(matrix x, uint32_t *found, Py_ssize_t columns)                                           \
    {                                                                                                                       \
        switch (x.kind) { /* each compiled for its kind */                                                                  \
        case FP32: x.kind = FP32; numbers_of(x, found, columns); break;                                                     \
        case BF16: x.kind = BF16; numbers_of(x, found, columns); break;                                                     \
        default: x.kind = FP16; numbers_of(x, found, columns);                                                              \
        }                                                                                                                   \
    }                                                                                                                       \
    target static void name##_store(const uint32_t *x, Py_ssize_t n, int kind, uint16_t *found)                             \
    {                                                                                                                       \
        if (kind == BF16)                                                                                                   \
            halves_of(x, n, BF16, found);                                                                                   \
        else                                                                                                                \
            halves_of(x, n, FP16, found);                                                                                   \
    }                                                                                                                       \
    target static void name##_amax(const uint32_t *x, Py_ssize_t blocks, Py_ssize_t k, uint32_t *amax)                      \
    {                                                                                                                       \
        amax_of(x, blocks, k, amax);                                                                                        \
    }                                                                                                                       \
    target static void name##_extremes(                                                                                     \
        const uint32_t *x, Py_ssize_t blocks, Py_ssize_t k, uint32_t *low, uint32_t *high)                                  \
    {                                                                                                                       \
        extremes_of(x, blocks, k, low, high);                                                                               \
    }                                                                                                                       \
    target static void name##_shifted(const float *x, offsets o, Py_ssize_t n, Py_ssize_t k, integer f, uint8_t *codes)     \
    {                                                                                                                       \
        shifted_of(x, o, n, k, f, codes);                                                                                   \
    }                                                                                                                       \
    target static void name##_floats(                                                                                       \
        const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, int divides, minifloat f, uint8_t *codes)         \
    {                                                                                                                       \
        if (divides)                                                                                                        \
            floats_of(x, inverse, n, k, 1, f, codes);                                                                       \
        else                                                                                                                \
            floats_of(x, inverse, n, k, 0, f, codes);                                                                       \
    }                                                                                                                       \
    target static void name##_integers(                                                                                     \
        const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, int divides, integer f, uint8_t *codes)           \
    {                                                                                                                       \
        if (divides)                                                                                                        \
            integers_of(x, inverse, n, k, 1, f, codes);                                                                     \
        else                                                                                                                \
            integers_of(x, inverse, n, k, 0, f, codes);                                                                     \
    }                                                                                                                       \
    target static void name##_pairs(const uint8_t *codes, Py_ssize_t n, uint8_t *data)                                      \
    {                                                                                                                       \
        pairs_of(codes, n, data);                                                                                           \
    }                                                                                                                       \
    target static void name##_values(                                                                                       \
        const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, int bits, float *values)   \
    {                                                                                                                       \
        if (bits == 8)                                                                                                      \
            values_of_bytes(data, table, scale, n, k, values);                                                              \
        else                                                                                                                \
            values_of_pairs(data, table, scale, n, k, values);                                                              \
    }                                                                                                                       \
    static const version name = {                                                                                           \
        name##_load, name##_store, name##_amax, name##_extremes, name##_shifted, name##_floats, name##_integers,               \
        name##_pairs, name##_values};

VERSION(baseline, )

#if defined(X86_VERSIONS)
VERSION(avx2, FOR_AVX2)
VERSION(avx512, FOR_AVX512)
#endif

#define here ((const version *)chosen)

/* -------------------------------------------------------------------------------------------------- for Python */

/* Sets ValueError and returns 0 unless both buffers have the 4-byte items that blocks of k need. */
static int sizes_agree(const Py_buffer *x, const Py_buffer *per_block, Py_ssize_t k)
{
    if (k > 0 && x->len % 4 == 0 && x->len / 4 % k == 0 && per_block->len == x->len / k && (uintptr_t)x->buf % 4 == 0 &&
        (uintptr_t)per_block->buf % 4 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError,
        "wanted aligned FP32 numbers in blocks of k = %zd and one number a block; got %zd and %zd bytes. Call breccia.cast.", k,
        x->len, per_block->len);
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

static PyObject *load(PyObject *self, PyObject *args)
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

static PyObject *store(PyObject *self, PyObject *args)
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

PyDoc_STRVAR(amax_doc, "amax(source, k, amax): bits of the largest magnitude of each k FP32 numbers, as uint32.");

static PyObject *amax(PyObject *self, PyObject *args)
{
    Py_buffer x, found;
    Py_ssize_t k;
    if (!PyArg_ParseTuple(args, "y*nw*:amax", &x, &k, &found))
        return NULL;
    const int done = sizes_agree(&x, &found, k);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->amax(x.buf, x.len / 4 / k, k, found.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(done);
}

PyDoc_STRVAR(extremes_doc,
    "extremes(source, k, low, high): the smallest and the largest of each k FP32 numbers. Numbers below 2^-126 count as +0.");

static PyObject *extremes(PyObject *self, PyObject *args)
{
    Py_buffer x, low, high;
    Py_ssize_t k;
    if (!PyArg_ParseTuple(args, "y*nw*w*:extremes", &x, &k, &low, &high))
        return NULL;
    const int done = sizes_agree(&x, &low, k) && sizes_agree(&x, &high, k);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->extremes(x.buf, x.len / 4 / k, k, low.buf, high.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&low);
    PyBuffer_Release(&high);
    return result(done);
}

PyDoc_STRVAR(shifted_doc,
    "shifted(source, inverse, before, after, k, codes, low, high, magic, mask): as integers, with numbers of each block of k that are\n"
    "subtracted before the numbers are scaled, and added to their codes.");

static PyObject *shifted(PyObject *self, PyObject *args)
{
    Py_buffer x, inverse, before, after, codes;
    Py_ssize_t k;
    integer f;
    if (!PyArg_ParseTuple(
            args, "y*y*y*y*nw*fffb:shifted", &x, &inverse, &before, &after, &k, &codes, &f.low, &f.high, &f.magic, &f.mask))
        return NULL;
    const int done = sizes_agree(&x, &inverse, k) && sizes_agree(&x, &before, k) && sizes_agree(&x, &after, k) &&
                     has_length(&codes, x.len / 4);
    if (done) {
        const offsets o = {inverse.buf, before.buf, after.buf};
        Py_BEGIN_ALLOW_THREADS
        here->shifted(x.buf, o, x.len / 4, k, f, codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&inverse);
    PyBuffer_Release(&before);
    PyBuffer_Release(&after);
    PyBuffer_Release(&codes);
    return result(done);
}

PyDoc_STRVAR(floats_doc,
    "floats(source, inverse, k, divides, codes, floor, lift, largest, shift, sign): codes of a minifloat, one a byte, of FP32 numbers\n"
    "times the inverse scale of their block of k, or divided by its scale; zeros where that is 0. The others are the fields of\n"
    "numpy._FloatCodes.");

static PyObject *floats(PyObject *self, PyObject *args)
{
    Py_buffer x, inverse, codes;
    Py_ssize_t k;
    int divides;
    minifloat f;
    if (!PyArg_ParseTuple(
            args, "y*y*niw*IIIii:floats", &x, &inverse, &k, &divides, &codes, &f.floor, &f.lift, &f.largest, &f.shift, &f.sign))
        return NULL;
    const int done = sizes_agree(&x, &inverse, k) && has_length(&codes, x.len / 4);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->floats(x.buf, inverse.buf, x.len / 4, k, divides, f, codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&inverse);
    PyBuffer_Release(&codes);
    return result(done);
}

PyDoc_STRVAR(integers_doc,
    "integers(source, inverse, k, divides, codes, low, high, magic, mask): as floats, for the fields of numpy._IntegerCodes.");

static PyObject *integers(PyObject *self, PyObject *args)
{
    Py_buffer x, inverse, codes;
    Py_ssize_t k;
    int divides;
    integer f;
    if (!PyArg_ParseTuple(
            args, "y*y*niw*fffb:integers", &x, &inverse, &k, &divides, &codes, &f.low, &f.high, &f.magic, &f.mask))
        return NULL;
    const int done = sizes_agree(&x, &inverse, k) && has_length(&codes, x.len / 4);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->integers(x.buf, inverse.buf, x.len / 4, k, divides, f, codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&inverse);
    PyBuffer_Release(&codes);
    return result(done);
}

PyDoc_STRVAR(pairs_doc, "pairs(codes, data): two codes of 4 bits, one a byte, to each byte of data; the first in its low half.");

static PyObject *pairs(PyObject *self, PyObject *args)
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

static PyObject *values(PyObject *self, PyObject *args)
{
    Py_buffer data, table, scale, found;
    Py_ssize_t k;
    int bits;
    if (!PyArg_ParseTuple(args, "y*y*y*niw*:values", &data, &table, &scale, &k, &bits, &found))
        return NULL;
    int done = sizes_agree(&found, &scale, k) && has_length(&data, found.len / 4 * bits / 8);
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
    ADD_VERSIONS(&avx512, &avx2, &baseline);
    return PyModuleDef_Init(&module);
}
