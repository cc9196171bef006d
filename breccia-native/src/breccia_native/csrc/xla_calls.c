/* Calls from programs that XLA compiled for the CPU: one handler, which passes the memory of arguments and results to Python.

   A call has one attribute, a text that says what to compute. `breccia_jax.primitive` reads it, once, and runs the kernels for
   NumPy arrays on this memory, which release the GIL while they compute. So every kernel, recipe and option that NumPy arrays
   have can be called from XLA, and threads are those of these kernels.

   XLA's binary interface for such handlers is declared here as far as it is used (`xla/ffi/api/c_api.h` of XLA, whose structs
   begin with their size and only grow at their end), so that building needs no JAX. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fenv.h>
#include <stdint.h>

/* -------------------------------------------------------------------------------------------------- XLA's interface */

enum { EXECUTE = 3 };              /* the stage of a call */
enum { METADATA = 1 };             /* the kind of extension by which XLA asks for the version of a handler */
enum { BUFFER = 1, STRING = 4 };   /* the kinds of arguments, and of attributes */
enum { INVALID_ARGUMENT = 3, INTERNAL = 13 };
enum { MAJOR = 0, MINOR = 1 };     /* the first version with all that is used here */

typedef struct extension {
    size_t size;
    int kind;
    struct extension *next;
} extension;

typedef struct {
    size_t size;
    extension *extensions;
    int major, minor;
} api_version;

typedef struct {
    size_t size;
    api_version version;
    uint32_t traits;
} metadata;

typedef struct {
    extension base;
    metadata *found;
} metadata_extension;

typedef struct {
    size_t size;
    extension *extensions;
    const char *message;
    int code;
} error_arguments;

typedef struct {
    size_t size;
    extension *extensions;
    api_version version;
    const void *internal;
    void *(*create_error)(error_arguments *);
} api;

typedef struct {
    size_t size;
    extension *extensions;
    int dtype;
    void *data;
    int64_t rank, *lengths;
} buffer;

typedef struct {
    const char *start;
    size_t length;
} text;

typedef struct {
    size_t size;
    extension *extensions;
    int64_t count;
    int *kinds;
    void **items;
} listed; /* arguments, and results */

typedef struct {
    size_t size;
    extension *extensions;
    int64_t count;
    int *kinds;
    text **names;
    void **items;
} attributes;

typedef struct {
    size_t size;
    extension *extensions;
    const api *functions;
    void *context;
    int stage;
    listed arguments, results;
    attributes given;
} frame;

/* Bits of an item of each dtype, by XLA's numbers of dtypes; 0 for those that no kernel takes. */
static const uint8_t bits[] = {
    [1] = 8, [2] = 8, [3] = 16, [4] = 32, [5] = 64, [6] = 8, [7] = 16, [8] = 32, [9] = 64, [10] = 16, [11] = 32, [12] = 64,
    [16] = 16, [19] = 8, [20] = 8, [23] = 8, [24] = 8, [25] = 8, [28] = 8, [29] = 8, [33] = 8};

/* -------------------------------------------------------------------------------------------------- the handler */

/* What `answer_with` was given. */
static PyObject *answer;

static void *failed(const frame *f, int code, const char *message)
{
    error_arguments e = {sizeof e, NULL, message, code};
    return f->functions->create_error(&e);
}

/* Bytes of an argument; -1 for dtypes that are not listed. */
static Py_ssize_t bytes_of(const buffer *b)
{
    const int each = b->dtype >= 0 && b->dtype < (int)sizeof bits ? bits[b->dtype] : 0;
    int64_t n = each / 8;
    for (int64_t i = 0; i < b->rank; i++)
        n *= b->lengths[i];
    return each ? (Py_ssize_t)n : -1;
}

/* A tuple with a view of the memory of each. */
static PyObject *views(const listed *all, int flags)
{
    PyObject *found = PyTuple_New((Py_ssize_t)all->count);
    for (Py_ssize_t i = 0; found && i < all->count; i++) {
        const buffer *b = all->items[i];
        const Py_ssize_t n = all->kinds[i] == BUFFER ? bytes_of(b) : -1;
        PyObject *each = NULL;
        if (n < 0)
            PyErr_Format(PyExc_TypeError, "operand %zd is no array of numbers of 8, 16, 32 or 64 bits.", i);
        else
            each = PyMemoryView_FromMemory(b->data, n, flags);
        if (!each || PyTuple_SetItem(found, i, each))
            Py_CLEAR(found);
    }
    return found;
}

/* The error in progress as one of XLA's. */
static void *raised(const frame *f)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *shown = PyUnicode_FromFormat("%S: %S", type, value ? value : Py_None);
    PyObject *bytes = shown ? PyUnicode_AsUTF8String(shown) : NULL;
    const char *message = bytes ? PyBytes_AsString(bytes) : NULL;
    void *e = failed(f, INTERNAL, message ? message : "a kernel of breccia-native failed");
    PyErr_Clear();
    Py_XDECREF(bytes);
    Py_XDECREF(shown);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return e;
}

static void *handler(frame *f)
{
    for (extension *e = f->extensions; e; e = e->next)
        if (e->kind == METADATA) {
            metadata *m = ((metadata_extension *)e)->found;
            m->version.major = MAJOR;
            m->version.minor = MINOR;
            return NULL;
        }
    if (f->stage != EXECUTE)
        return NULL;
    if (f->given.count != 1 || f->given.kinds[0] != STRING)
        return failed(f, INVALID_ARGUMENT, "wanted one attribute, a text");
    if (!Py_IsInitialized())
        return failed(f, INTERNAL, "Python has ended");
    /* XLA's threads flush subnormal numbers to zero; NumPy's kernels do not. */
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    const PyGILState_STATE state = PyGILState_Ensure();
    const text *call = f->given.items[0];
    void *error = NULL;
    PyObject *what = PyUnicode_FromStringAndSize(call->start, (Py_ssize_t)call->length);
    PyObject *from = what ? views(&f->arguments, PyBUF_READ) : NULL, *to = from ? views(&f->results, PyBUF_WRITE) : NULL;
    if (to && !answer)
        PyErr_SetString(PyExc_RuntimeError, "answer_with was not called.");
    PyObject *done = to && answer ? PyObject_CallFunctionObjArgs(answer, what, from, to, NULL) : NULL;
    if (!done)
        error = raised(f);
    Py_XDECREF(done);
    Py_XDECREF(to);
    Py_XDECREF(from);
    Py_XDECREF(what);
    PyGILState_Release(state);
    fesetenv(&before);
    return error;
}

/* -------------------------------------------------------------------------------------------------- for Python */

PyDoc_STRVAR(answer_doc,
    "answer_with(function): let the handler call function(text, arguments, results), with a memoryview of each array. It\n"
    "writes to those of the results. An exception ends the program that XLA runs.");

static PyObject *answer_with(PyObject *Py_UNUSED(self), PyObject *function)
{
    PyObject *before = answer;
    Py_INCREF(function);
    answer = function;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(handler_doc, "handler(): the capsule that `jax.ffi.register_ffi_target` takes for platform \"cpu\".");

static PyObject *handler_of(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return PyCapsule_New((void *)(uintptr_t)handler, "xla._CUSTOM_CALL_TARGET", NULL);
}

static PyMethodDef methods[] = {
    {"answer_with", answer_with, METH_O, answer_doc},
    {"handler", handler_of, METH_NOARGS, handler_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.xla_calls",
    .m_doc = "Calls of kernels from programs that XLA compiled for the CPU; see breccia_jax.primitive.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_xla_calls(void)
{
    return PyModuleDef_Init(&module);
}
