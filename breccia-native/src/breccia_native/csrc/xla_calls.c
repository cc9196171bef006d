/* Calls from programs that XLA compiled: a handler for each platform, which passes arguments and results to Python.

   A call has one attribute, a text that says what to compute. On CPUs Python gets the memory of the arrays: `breccia_jax.native`
   reads the text, once, and runs the kernels for NumPy arrays, which release the GIL while they compute. So every kernel, recipe
   and option that NumPy arrays have can be called from XLA, and threads are those of these kernels. On CUDA Python gets
   addresses and the stream: `breccia_triton.jax.foreign` enqueues kernels of torch there.

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
    void *context;
    void *stream;
} stream_arguments;

typedef struct {
    size_t size;
    extension *extensions;
    void *error;
} destroy_arguments;

typedef struct {
    size_t size;
    extension *extensions;
    api_version version;
    const void *internal;
    void *(*create_error)(error_arguments *);
    void *get_message;
    void (*destroy_error)(destroy_arguments *);
    void *register_handler;
    void *(*get_stream)(stream_arguments *);
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

/* What `cpu_handler` and `cuda_handler` were given. */
static PyObject *on_cpu, *on_cuda;

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

/* A tuple with a view of the memory of each array; or, with no flags, with its address. */
static PyObject *items_of(const listed *all, int flags)
{
    PyObject *found = PyTuple_New((Py_ssize_t)all->count);
    for (Py_ssize_t i = 0; found && i < all->count; i++) {
        const buffer *b = all->items[i];
        const Py_ssize_t n = all->kinds[i] == BUFFER ? bytes_of(b) : -1;
        PyObject *each = NULL;
        if (n < 0)
            PyErr_Format(PyExc_TypeError, "operand %zd is no array of numbers of 8, 16, 32 or 64 bits.", i);
        else
            each = flags ? PyMemoryView_FromMemory(b->data, n, flags) : PyLong_FromVoidPtr(b->data);
        if (!each || PyTuple_SetItem(found, i, each))
            Py_CLEAR(found);
    }
    return found;
}

/* The stream of a call, as a number; None where XLA has none, as on CPUs. */
static PyObject *stream_of(const frame *f)
{
    stream_arguments given = {sizeof given, NULL, f->context, NULL};
    void *error = f->functions->get_stream(&given);
    if (error) {
        destroy_arguments done = {sizeof done, NULL, error};
        f->functions->destroy_error(&done);
        Py_RETURN_NONE;
    }
    return PyLong_FromVoidPtr(given.stream);
}

/* The error in progress as one of XLA's. */
static void *raised(const frame *f)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *name = type ? PyType_GetName((PyTypeObject *)type) : NULL;
    PyObject *shown = name ? PyUnicode_FromFormat("%U: %S", name, value ? value : Py_None) : NULL;
    PyObject *bytes = shown ? PyUnicode_AsUTF8String(shown) : NULL;
    const char *message = bytes ? PyBytes_AsString(bytes) : NULL;
    void *e = failed(f, INTERNAL, message ? message : "a kernel of breccia failed");
    PyErr_Clear();
    Py_XDECREF(bytes);
    Py_XDECREF(shown);
    Py_XDECREF(name);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return e;
}

/* What a call returns: `answer` is called with its text, arguments and results, and on CUDA with the stream. */
static void *called(const frame *f, PyObject *answer, int cuda)
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
    PyObject *from = what ? items_of(&f->arguments, cuda ? 0 : PyBUF_READ) : NULL;
    PyObject *to = from ? items_of(&f->results, cuda ? 0 : PyBUF_WRITE) : NULL;
    PyObject *stream = to && cuda ? stream_of(f) : NULL;
    PyObject *done = NULL;
    if (to && (stream || !cuda))
        done = PyObject_CallFunctionObjArgs(answer, what, from, to, stream, NULL);
    if (!done)
        error = raised(f);
    Py_XDECREF(done);
    Py_XDECREF(stream);
    Py_XDECREF(to);
    Py_XDECREF(from);
    Py_XDECREF(what);
    PyGILState_Release(state);
    fesetenv(&before);
    return error;
}

static void *called_on_cpu(frame *f)
{
    return called(f, on_cpu, 0);
}

static void *called_on_cuda(frame *f)
{
    return called(f, on_cuda, 1);
}

/* -------------------------------------------------------------------------------------------------- for Python */

static PyObject *handler_of(void *(*handler)(frame *), PyObject **answer, PyObject *function)
{
    PyObject *before = *answer;
    Py_INCREF(function);
    *answer = function;
    Py_XDECREF(before);
    return PyCapsule_New((void *)(uintptr_t)handler, "xla._CUSTOM_CALL_TARGET", NULL);
}

PyDoc_STRVAR(cpu_doc,
    "cpu_handler(function): the capsule that `jax.ffi.register_ffi_target` takes for platform \"cpu\". Its calls run\n"
    "function(text, arguments, results), with a memoryview of each array, which writes to those of the results. An exception\n"
    "ends the program that XLA runs. There is one function in a process, the last one given.");

static PyObject *cpu_handler(PyObject *Py_UNUSED(self), PyObject *function)
{
    return handler_of(called_on_cpu, &on_cpu, function);
}

PyDoc_STRVAR(cuda_doc,
    "cuda_handler(function): likewise for platform \"CUDA\". Its calls run function(text, arguments, results, stream), with\n"
    "the address of each array, which enqueues what writes the results. stream: the number of a CUDA stream; None where XLA\n"
    "has none, as in a call that was registered for CPUs.");

static PyObject *cuda_handler(PyObject *Py_UNUSED(self), PyObject *function)
{
    return handler_of(called_on_cuda, &on_cuda, function);
}

static PyMethodDef methods[] = {
    {"cpu_handler", cpu_handler, METH_O, cpu_doc},
    {"cuda_handler", cuda_handler, METH_O, cuda_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.xla_calls",
    .m_doc = "Calls of kernels from programs that XLA compiled; see breccia_jax.primitive.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_xla_calls(void)
{
    return PyModuleDef_Init(&module);
}
