/* Microkernels of a cast: the largest magnitude of each block, and codes of scaled numbers.

   They write the bytes that breccia/kernels/numpy/ writes, by the same arithmetic. FP32 additions round to codes, so contraction
   into fused multiply-adds and reassociation must stay off (see pyproject.toml).
   Every function takes contiguous buffers, checks their sizes, and releases the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define INLINE static __forceinline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

#define MAGNITUDE 0x7fffffffu
#define EXPONENT 0x7f800000u

INLINE uint32_t bits_of(float y)
{
    uint32_t u;
    memcpy(&u, &y, 4);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float y;
    memcpy(&y, &u, 4);
    return y;
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

/* -------------------------------------------------------------------------------------------------- codes */

/* Numbers scaled before they are encoded: they stay in the L1 cache. Meanwhile what comes AHEAD is prefetched. */
#define STRIP 256
#define AHEAD 2048

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address)
#endif

INLINE void times(const float *x, float by, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16) { /* a cache line */
        FETCH(x + i + AHEAD);
        for (Py_ssize_t j = i; j < i + 16; j++)
            y[j] = x[j] * by;
    }
    for (; i < n; i++)
        y[i] = x[i] * by;
}

/* The position of the next number in its block of k: the inverse scale, and how many numbers of the block are left. */
typedef struct {
    const float *inverse;
    Py_ssize_t left;
} place;

/* y = the next n of x, each times the inverse scale of its block of k; +0 where that is 0, whatever x is. */
INLINE void scaled(const float *x, Py_ssize_t k, Py_ssize_t n, place *next, float *y)
{
    for (Py_ssize_t i = 0, length; i < n; i += length) {
        const float by = *next->inverse;
        length = next->left < n - i ? next->left : n - i;
        if (by == 0)
            memset(y + i, 0, 4 * (size_t)length);
        else
            times(x + i, by, length, y + i);
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

INLINE void floats_of(const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, minifloat f, uint8_t *codes)
{
    float y[STRIP];
    uint32_t words[STRIP];
    place next = {inverse, k};
    for (Py_ssize_t start = 0; start < n; start += STRIP) {
        const Py_ssize_t length = n - start < STRIP ? n - start : STRIP;
        scaled(x + start, k, length, &next, y);
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

INLINE void integers_of(const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, integer f, uint8_t *codes)
{
    float y[STRIP];
    place next = {inverse, k};
    for (Py_ssize_t start = 0; start < n; start += STRIP) {
        const Py_ssize_t length = n - start < STRIP ? n - start : STRIP;
        scaled(x + start, k, length, &next, y);
        for (Py_ssize_t i = 0; i < length; i++) {
            const float below = y[i] < f.high ? y[i] : f.high, within = below > f.low ? below : f.low;
            codes[start + i] = (uint8_t)(bits_of(within + f.magic) & f.mask);
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
    void (*amax)(const uint32_t *, Py_ssize_t, Py_ssize_t, uint32_t *);
    void (*floats)(const float *, const float *, Py_ssize_t, Py_ssize_t, minifloat, uint8_t *);
    void (*integers)(const float *, const float *, Py_ssize_t, Py_ssize_t, integer, uint8_t *);
    void (*pairs)(const uint8_t *, Py_ssize_t, uint8_t *);
    void (*values)(const uint8_t *, const float *, const float *, Py_ssize_t, Py_ssize_t, int, float *);
} version;

/* The same functions, compiled for one kind of processor. */
#define VERSION(name, target)                                                                                               \
    target static void name##_amax(const uint32_t *x, Py_ssize_t blocks, Py_ssize_t k, uint32_t *amax)                      \
    {                                                                                                                       \
        amax_of(x, blocks, k, amax);                                                                                        \
    }                                                                                                                       \
    target static void name##_floats(                                                                                       \
        const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, minifloat f, uint8_t *codes)                      \
    {                                                                                                                       \
        floats_of(x, inverse, n, k, f, codes);                                                                              \
    }                                                                                                                       \
    target static void name##_integers(                                                                                     \
        const float *x, const float *inverse, Py_ssize_t n, Py_ssize_t k, integer f, uint8_t *codes)                        \
    {                                                                                                                       \
        integers_of(x, inverse, n, k, f, codes);                                                                            \
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
    static const version name = {name##_amax, name##_floats, name##_integers, name##_pairs, name##_values};

VERSION(baseline, )

#if defined(__GNUC__) && defined(__x86_64__)
#if defined(__clang__)
#define WIDE
#else
#define WIDE ",prefer-vector-width=512"
#endif
VERSION(avx2, __attribute__((target("avx2"))))
VERSION(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl" WIDE))))

static const version *best(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &avx512;
    return __builtin_cpu_supports("avx2") ? &avx2 : &baseline;
}
#else
static const version *best(void)
{
    return &baseline;
}
#endif

static const version *here = &baseline;

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

PyDoc_STRVAR(floats_doc,
    "floats(source, inverse, k, codes, floor, lift, largest, shift, sign): codes of a minifloat, one a byte, of FP32 numbers times\n"
    "the inverse scale of their block of k; zeros where that is 0. The others are the fields of numpy._FloatCodes.");

static PyObject *floats(PyObject *self, PyObject *args)
{
    Py_buffer x, inverse, codes;
    Py_ssize_t k;
    minifloat f;
    if (!PyArg_ParseTuple(
            args, "y*y*nw*IIIii:floats", &x, &inverse, &k, &codes, &f.floor, &f.lift, &f.largest, &f.shift, &f.sign))
        return NULL;
    const int done = sizes_agree(&x, &inverse, k) && has_length(&codes, x.len / 4);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->floats(x.buf, inverse.buf, x.len / 4, k, f, codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&inverse);
    PyBuffer_Release(&codes);
    return result(done);
}

PyDoc_STRVAR(integers_doc,
    "integers(source, inverse, k, codes, low, high, magic, mask): as floats, for the fields of numpy._IntegerCodes.");

static PyObject *integers(PyObject *self, PyObject *args)
{
    Py_buffer x, inverse, codes;
    Py_ssize_t k;
    integer f;
    if (!PyArg_ParseTuple(args, "y*y*nw*fffb:integers", &x, &inverse, &k, &codes, &f.low, &f.high, &f.magic, &f.mask))
        return NULL;
    const int done = sizes_agree(&x, &inverse, k) && has_length(&codes, x.len / 4);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->integers(x.buf, inverse.buf, x.len / 4, k, f, codes.buf);
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
    {"amax", amax, METH_VARARGS, amax_doc},
    {"floats", floats, METH_VARARGS, floats_doc},
    {"integers", integers, METH_VARARGS, integers_doc},
    {"pairs", pairs, METH_VARARGS, pairs_doc},
    {"values", values, METH_VARARGS, values_doc},
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
    here = best();
    return PyModuleDef_Init(&module);
}
