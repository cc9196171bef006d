/* The operator of a quantized layer in torch's graphs, for CPUs: `breccia::linear(Tensor x, Tensor data, Tensor scale, Tensor?
   zero_point, Tensor? global_scale, Tensor? bias, str facts) -> Tensor`.

   It repeats products. Operands of which it knows none go, as they came, to an operator in Python, which chooses a kernel and
   tells what repeats its product (`keep`). That holds as long as operands are alike, which are compared here, and as the table
   of kernels is the same, which is asked for under Python's lock, as is the number of threads.

   The functions are of torch's stable interface in C, from 2.10 on (torch/csrc/stable/c/shim.h), whose addresses Python hands
   over, so that building needs no torch. A value on its stack is the handle of a tensor or a text, or for an optional argument
   NULL or memory that holds one; the operator owns all of them. */

#if !defined(__GNUC__)
#error "layers.c needs thread-local variables and the vector extensions of GCC or Clang"
#endif

#include <stdint.h>

#include "layers.h"

/* -------------------------------------------------------------------------------------------------- torch's interface */

typedef struct tensor_object *tensor;
typedef struct text_object *text;
typedef struct library_object *library;

/* They return 0, or an error. */
static struct {
    int32_t (*library_init_impl)(const char *name, const char *key, const char *file, uint32_t line, library *found);
    int32_t (*library_impl)(library, const char *op, void (*kernel)(uint64_t *, uint64_t, uint64_t), uint64_t version);
    int32_t (*call_dispatcher)(const char *op, const char *overload, uint64_t *stack, uint64_t version);
    int32_t (*const_data_ptr)(tensor, const void **);
    int32_t (*dim)(tensor, int64_t *);
    int32_t (*sizes)(tensor, int64_t **);
    int32_t (*strides)(tensor, int64_t **);
    int32_t (*dtype)(tensor, int32_t *);
    int32_t (*device_type)(tensor, int32_t *);
    int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor *);
    int32_t (*copy_)(tensor to, tensor from, int32_t non_blocking);
    int32_t (*delete_tensor)(tensor);
    int32_t (*string_length)(text, size_t *);
    int32_t (*string_c_str)(text, const char **);
    int32_t (*delete_string)(text);
    int32_t (*num_threads)(uint32_t *);
    void (*check)(int fine, const char *function, const char *file, uint32_t line, const char *message); /* throws if not */
    void (*delete_optional)(void *); /* of C++ */
} torch;

enum { FUNCTIONS = sizeof torch / sizeof(void *) };
/* The version of the interface that is used here. */
#define VERSION ((2ull << 56) | (10ull << 48))
#define OPERATOR "linear"
#define OTHERWISE "breccia::linear_by_choice"
enum { FLOAT32 = 6, CPU = 0 }; /* torch's numbers */
enum { X, DATA, SCALE, ZEROS, GLOBAL_SCALE, ADDED, FACTS }; /* arguments, in order */
/* What the address of an input must be a multiple of, as torch's own memory is. */
enum { ALIGNED = 64, MOST_AXES = 4 };

/* -------------------------------------------------------------------------------------------------- operands */

/* A tensor as far as a product depends on it, besides its numbers. No axes and no address: there is none. */
typedef struct {
    const void *at;
    int64_t sizes[MOST_AXES], strides[MOST_AXES], axes;
    int32_t dtype, device;
} operand;

/* The arguments of a call. */
typedef struct {
    operand tensors[FACTS];
    float global_scale; /* 0 where there is none */
    const char *facts;
    size_t length;
} operands;

static int is_read(tensor t, operand *o)
{
    int64_t *sizes, *strides;
    if (torch.dim(t, &o->axes) || o->axes > MOST_AXES || torch.sizes(t, &sizes) || torch.strides(t, &strides) ||
        torch.dtype(t, &o->dtype) || torch.device_type(t, &o->device) || o->device != CPU || torch.const_data_ptr(t, &o->at))
        return 0;
    for (int64_t i = 0; i < o->axes; i++)
        o->sizes[i] = sizes[i], o->strides[i] = strides[i];
    return 1;
}

/* Read the arguments of a call. Returns 0 for those that are never kept. */
static int are_read(const uint64_t *stack, operands *o)
{
    memset(o, 0, sizeof *o);
    for (int i = X; i < FACTS; i++) {
        const uint64_t *given = i < ZEROS ? &stack[i] : (const uint64_t *)(uintptr_t)stack[i];
        if (given && !is_read((tensor)(uintptr_t)*given, &o->tensors[i]))
            return 0;
    }
    const operand *global = &o->tensors[GLOBAL_SCALE];
    if (global->at) {
        if (global->dtype != FLOAT32)
            return 0;
        memcpy(&o->global_scale, global->at, sizeof o->global_scale);
    }
    const text facts = (text)(uintptr_t)stack[FACTS];
    return !torch.string_length(facts, &o->length) && !torch.string_c_str(facts, &o->facts);
}

/* Whether a product with `b` repeats one with `a`: all is equal but for the address of the input, and for the numbers at
   addresses other than the global scale's. */
static int are_alike(const operands *a, const operands *b)
{
    for (int i = X; i < FACTS; i++) {
        const operand *one = &a->tensors[i], *other = &b->tensors[i];
        if (one->axes != other->axes || one->dtype != other->dtype ||
            (i != X && i != GLOBAL_SCALE && one->at != other->at) || !one->at != !other->at ||
            memcmp(one->sizes, other->sizes, sizeof one->sizes) || memcmp(one->strides, other->strides, sizeof one->strides))
            return 0;
    }
    return memcmp(&a->global_scale, &b->global_scale, sizeof a->global_scale) == 0 && a->length == b->length &&
        memcmp(a->facts, b->facts, a->length) == 0;
}

/* -------------------------------------------------------------------------------------------------- what is kept */

/* What repeats a product. */
typedef struct {
    operands known; /* facts: memory of its own */
    PyObject *prepared, *table;
    const call *c;
    float factor;
    int32_t dtype; /* of the operator's result, by torch's number */
    int shares;    /* whether more than one thread is faster */
} layer;

#define LAYER "breccia_native.products.layer"

/* What Python handed over: by the address of codes, what repeats products; and functions without arguments, which return the
   registry, and breccia's number of threads. */
static PyObject *layers, *registry, *get_num_threads, *table_name;

/* The operands of the call that Python is choosing a kernel for on this thread, and where an error goes. */
static __thread const operands *asked;
static __thread char reason[1024];

static void forget_layer(PyObject *capsule)
{
    layer *l = PyCapsule_GetPointer(capsule, LAYER);
    if (!l)
        return;
    Py_XDECREF(l->prepared);
    Py_XDECREF(l->table);
    free((char *)l->known.facts);
    free(l);
}

const char keep_doc[] =
    "keep(prepared, table, factor, shares, dtype): a capsule of what repeats the product that the operator has asked Python\n"
    "for on this thread, or None if it has asked for none. It holds as long as the registry has this table. shares: whether\n"
    "more than one thread is faster. dtype: torch's number of that of the result, to which the product is rounded.";

PyObject *keep(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *prepared, *table;
    float factor;
    int shares, dtype;
    if (!PyArg_ParseTuple(args, "OOfpi:keep", &prepared, &table, &factor, &shares, &dtype))
        return NULL;
    const call *c = PyCapsule_GetPointer(prepared, PREPARED);
    if (!c)
        return NULL;
    const operands *o = asked;
    if (!o)
        Py_RETURN_NONE;
    const operand *x = &o->tensors[X];
    int64_t rows = 1;
    for (int64_t i = 0; i < x->axes - 1; i++)
        rows *= x->sizes[i];
    if (x->axes < 2 || rows != c->m || x->sizes[x->axes - 1] != c->w.k)
        Py_RETURN_NONE;
    layer *l = calloc(1, sizeof *l);
    char *facts = malloc(o->length + 1);
    if (!l || !facts) {
        free(l), free(facts);
        return PyErr_NoMemory();
    }
    memcpy(facts, o->facts, o->length);
    *l = (layer){*o, Py_NewRef(prepared), Py_NewRef(table), c, factor, dtype, shares};
    l->known.facts = facts;
    PyObject *capsule = PyCapsule_New(l, LAYER, forget_layer);
    if (!capsule) {
        Py_DECREF(prepared), Py_DECREF(table);
        free(facts), free(l);
    }
    return capsule;
}

const char refuse_doc[] = "refuse(reason): say why the product fails that the operator has asked Python for on this thread.";

PyObject *refuse(PyObject *Py_UNUSED(self), PyObject *text)
{
    const char *given = PyUnicode_AsUTF8AndSize(text, NULL);
    if (!given)
        return NULL;
    PyOS_snprintf(reason, sizeof reason, "%s", given);
    Py_RETURN_NONE;
}

/* Whether the registry has that table. */
static int is_current(const PyObject *table)
{
    PyObject *now = PyObject_CallNoArgs(registry), *found = now ? PyObject_GetAttr(now, table_name) : NULL;
    Py_XDECREF(now);
    Py_XDECREF(found);
    return found == table;
}

/* How many threads may work. */
static int threads_now(void)
{
    uint32_t theirs = 1;
    PyObject *number = PyObject_CallNoArgs(get_num_threads);
    const long ours = number ? PyLong_AsLong(number) : 1;
    Py_XDECREF(number);
    if (torch.num_threads(&theirs))
        theirs = 1;
    return ours < 1 ? 1 : (uint32_t)ours < theirs ? (int)ours : (int)theirs;
}

/* -------------------------------------------------------------------------------------------------- the operator */

/* The product, in memory of torch; NULL where there is none, or for numbers beyond the kernel's limits. */
static tensor multiplied(const layer *l, const operands *o, int threads)
{
    const operand *x = &o->tensors[X], *t = o->tensors;
    int64_t sizes[MOST_AXES], strides[MOST_AXES], step = 1;
    for (int64_t i = x->axes; i--; step *= sizes[i]) {
        sizes[i] = i == x->axes - 1 ? l->c->w.n : x->sizes[i];
        strides[i] = step;
    }
    tensor product, rounded;
    if (torch.empty_strided(x->axes, sizes, strides, FLOAT32, CPU, 0, &product))
        return NULL;
    addresses at = {x->at, t[DATA].at, t[SCALE].at, t[ZEROS].at, t[ADDED].at, NULL};
    int fine = 0, done = !torch.const_data_ptr(product, (const void **)&at.y);
    done = done && multiply_at(l->c, &at, l->c->m, l->factor, threads, &fine) && fine;
    if (done && l->dtype == FLOAT32)
        return product;
    done = done && !torch.empty_strided(x->axes, sizes, strides, l->dtype, CPU, 0, &rounded);
    if (done && torch.copy_(rounded, product, 0)) {
        torch.delete_tensor(rounded);
        done = 0;
    }
    torch.delete_tensor(product);
    return done ? rounded : NULL;
}

/* The product by what is kept for such operands; NULL where there is none, or for numbers beyond the kernel's limits. */
static tensor again(const operands *o)
{
    const operand *x = &o->tensors[X];
    if (x->axes < 1 || (uintptr_t)x->at % ALIGNED || !x->at)
        return NULL;
    tensor product = NULL;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *key = PyLong_FromVoidPtr((void *)o->tensors[DATA].at);
    PyObject *capsule = key ? PyDict_GetItemWithError(layers, key) : NULL;
    Py_XDECREF(key);
    layer *l = capsule && PyCapsule_IsValid(capsule, LAYER) ? PyCapsule_GetPointer(capsule, LAYER) : NULL;
    if (l && are_alike(&l->known, o) && is_current(l->table)) {
        const int threads = l->shares ? threads_now() : 1;
        Py_INCREF(capsule); /* another thread may forget it meanwhile */
        PyThreadState *mine = PyEval_SaveThread();
        product = multiplied(l, o, threads);
        PyEval_RestoreThread(mine);
        Py_DECREF(capsule);
    }
    if (PyErr_Occurred()) /* then Python chooses, and says what is wrong */
        PyErr_Clear();
    PyGILState_Release(state);
    return product;
}

/* Of `breccia::linear`: arguments come on the stack, and the product goes on it. */
static void linear(uint64_t *stack, uint64_t Py_UNUSED(arguments), uint64_t Py_UNUSED(outputs))
{
    operands found;
    const int known = are_read(stack, &found);
    const tensor product = known ? again(&found) : NULL;
    if (!product) {
        char *facts = known ? malloc(found.length + 1) : NULL; /* the dispatcher deletes what is on the stack */
        if (facts)
            found.facts = memcpy(facts, found.facts, found.length);
        const operands *before = asked;
        asked = facts ? &found : NULL;
        reason[0] = 0;
        const int32_t error = torch.call_dispatcher(OTHERWISE, "", stack, VERSION);
        asked = before;
        free(facts);
        torch.check(!error, "breccia::linear", "layers.c", __LINE__, reason[0] ? reason : "the product failed");
        return;
    }
    for (int i = X; i < FACTS; i++) {
        uint64_t *given = i < ZEROS ? &stack[i] : (uint64_t *)(uintptr_t)stack[i];
        if (given)
            torch.delete_tensor((tensor)(uintptr_t)*given);
        if (given && i >= ZEROS)
            torch.delete_optional(given);
    }
    torch.delete_string((text)(uintptr_t)stack[FACTS]);
    stack[0] = (uint64_t)(uintptr_t)product;
}

const char operate_doc[] =
    "operate(functions, layers, registry, get_num_threads): register the operator of layers with torch, by the addresses of\n"
    "functions in C (layers.c has their types). layers: a dict for what `keep` returns, by the address of codes. registry and\n"
    "get_num_threads: functions without arguments. Returns whether torch took it.";

PyObject *operate(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *functions, *given[3];
    if (!PyArg_ParseTuple(args, "O!O!OO:operate", &PyTuple_Type, &functions, &PyDict_Type, &given[0], &given[1], &given[2]))
        return NULL;
    if (PyTuple_Size(functions) != FUNCTIONS) {
        PyErr_Format(PyExc_ValueError, "operate takes %d addresses of functions; got %zd. breccia-torch is of another version.",
            (int)FUNCTIONS, PyTuple_Size(functions));
        return NULL;
    }
    void *at[FUNCTIONS];
    for (int i = 0; i < (int)FUNCTIONS; i++)
        at[i] = PyLong_AsVoidPtr(PyTuple_GetItem(functions, i));
    PyObject *name = PyErr_Occurred() ? NULL : PyUnicode_InternFromString("table");
    if (!name)
        return NULL;
    memcpy(&torch, at, sizeof torch);
    PyObject **const slots[] = {&layers, &registry, &get_num_threads, &table_name};
    PyObject *const values[] = {Py_NewRef(given[0]), Py_NewRef(given[1]), Py_NewRef(given[2]), name};
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        Py_XDECREF(*slots[i]);
        *slots[i] = values[i];
    }
    library found = NULL; /* it stays as long as the process */
    const int failed = torch.library_init_impl("breccia", "CPU", "layers.c", 0, &found) ||
        torch.library_impl(found, OPERATOR, linear, VERSION);
    return PyBool_FromLong(!failed);
}
