/* The operators of quantized layers in torch's graphs, for CPUs: `breccia::linear(Tensor x, Tensor data, Tensor scale, Tensor?
   zero_point, Tensor? global_scale, Tensor? bias, str facts) -> Tensor`; and `breccia::two_linears` and `three_linears`, which take
   the five arguments of a weight once for each weight, and return a tensor for each.

   They repeat products. Operands without a known product go, as they came, to an operator in Python, which chooses a kernel and
   tells what repeats its product (`keep`). That holds as long as operands are alike, which are compared here, and as the table
   of kernels is the same, which is asked for under the GIL, as is the number of threads.

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
#define OTHERWISE "breccia::linear_by_choice"
enum { FLOAT32 = 6, CPU = 0 }; /* torch's numbers */
enum { X, DATA, SCALE, ZEROS, GLOBAL_SCALE, ADDED, FACTS }; /* arguments, in order */
enum { OF_WEIGHT = ADDED - X };                             /* arguments that each weight has */
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

/* The place of argument `i` of weight `n` of a call; NULL where an optional one is absent. */
static uint64_t *argument_at(uint64_t *stack, int n, int i)
{
    uint64_t *const given = &stack[n * OF_WEIGHT + i];
    return i < ZEROS ? given : (uint64_t *)(uintptr_t)*given;
}

/* Read the arguments of a call, for each of `count` weights. Returns 0 for those that are never kept. */
static int are_read(uint64_t *stack, operands *all, int count)
{
    memset(all, 0, sizeof *all * (size_t)count);
    const text facts = (text)(uintptr_t)stack[1 + count * OF_WEIGHT];
    if (!is_read((tensor)(uintptr_t)stack[X], &all->tensors[X]) || torch.string_length(facts, &all->length) ||
        torch.string_c_str(facts, &all->facts))
        return 0;
    for (int n = 0; n < count; n++) {
        operands *const o = &all[n];
        o->tensors[X] = all->tensors[X], o->length = all->length, o->facts = all->facts;
        for (int i = DATA; i < FACTS; i++) {
            const uint64_t *given = argument_at(stack, n, i);
            if (given && !is_read((tensor)(uintptr_t)*given, &o->tensors[i]))
                return 0;
        }
        const operand *global = &o->tensors[GLOBAL_SCALE];
        if (global->at) {
            if (global->dtype != FLOAT32)
                return 0;
            memcpy(&o->global_scale, global->at, sizeof o->global_scale);
        }
    }
    return 1;
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

/* A contiguous tensor for the product of an input by a weight with n rows; NULL where there is no memory. */
static tensor room_for(const operand *x, int64_t n, int32_t dtype)
{
    int64_t sizes[MOST_AXES], strides[MOST_AXES], step = 1;
    for (int64_t i = x->axes; i--; step *= sizes[i]) {
        sizes[i] = i == x->axes - 1 ? n : x->sizes[i];
        strides[i] = step;
    }
    tensor found;
    return torch.empty_strided(x->axes, sizes, strides, dtype, CPU, 0, &found) ? NULL : found;
}

/* Round a product to a dtype. Returns 0 where that fails. */
static int is_rounded(tensor *product, const operand *x, int64_t n, int32_t dtype)
{
    const tensor rounded = room_for(x, n, dtype);
    if (!rounded || torch.copy_(rounded, *product, 0)) {
        if (rounded)
            torch.delete_tensor(rounded);
        return 0;
    }
    torch.delete_tensor(*product);
    *product = rounded;
    return 1;
}

/* Write the products by `count` weights to memory of torch. Returns 0, and makes none, where there is no memory, and for numbers
   beyond the kernel's limits. */
static int multiplied(layer *const *all, const operands *o, int count, int threads, tensor *products)
{
    const operand *x = &o->tensors[X];
    const call *calls[MOST_WEIGHTS];
    addresses at[MOST_WEIGHTS];
    float factors[MOST_WEIGHTS];
    int made = 0, done = 1, fine = 0;
    for (; done && made < count; made++) {
        const operand *t = o[made].tensors;
        calls[made] = all[made]->c, factors[made] = all[made]->factor;
        at[made] = (addresses){x->at, t[DATA].at, t[SCALE].at, t[ZEROS].at, t[ADDED].at, NULL};
        products[made] = room_for(x, calls[made]->w.n, FLOAT32);
        done = products[made] && !torch.const_data_ptr(products[made], (const void **)&at[made].y);
    }
    done = done && multiply_each(calls, at, factors, count, threads, &fine) && fine;
    for (int i = 0; done && i < count; i++)
        done = all[i]->dtype == FLOAT32 || is_rounded(&products[i], x, calls[i]->w.n, all[i]->dtype);
    while (!done && made)
        if (products[--made])
            torch.delete_tensor(products[made]);
    return done;
}

/* A reference to what is kept for such operands, or NULL. */
static PyObject *kept_for(const operands *o, layer **found)
{
    PyObject *key = PyLong_FromVoidPtr((void *)o->tensors[DATA].at);
    PyObject *capsule = key ? PyDict_GetItemWithError(layers, key) : NULL;
    Py_XDECREF(key);
    *found = capsule && PyCapsule_IsValid(capsule, LAYER) ? PyCapsule_GetPointer(capsule, LAYER) : NULL;
    return *found && are_alike(&(*found)->known, o) ? Py_NewRef(capsule) : NULL; /* another thread may forget it meanwhile */
}

/* Make the products by what is kept for such operands. Returns 0 where there is none, or for numbers beyond the kernel's limits. */
static int again(const operands *o, int count, tensor *products)
{
    const operand *x = &o->tensors[X];
    if (x->axes < 1 || (uintptr_t)x->at % ALIGNED || !x->at)
        return 0;
    int done = 0;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *capsules[MOST_WEIGHTS];
    layer *all[MOST_WEIGHTS] = {NULL};
    int held = 0, fits = 1, shares = 0;
    for (; fits && held < count; held++) {
        capsules[held] = kept_for(&o[held], &all[held]);
        const layer *const l = capsules[held] ? all[held] : NULL;
        fits = l && l->table == all[0]->table;
        shares |= fits && l->shares;
    }
    if (fits && is_current(all[0]->table)) {
        const int threads = shares ? threads_now() : 1;
        PyThreadState *mine = PyEval_SaveThread();
        done = multiplied(all, o, count, threads, products);
        PyEval_RestoreThread(mine);
    }
    while (held)
        Py_XDECREF(capsules[--held]);
    if (PyErr_Occurred()) /* then Python chooses, and says what is wrong */
        PyErr_Clear();
    PyGILState_Release(state);
    return done;
}

/* Put results on the stack in place of the arguments, which end here. */
static void answer(uint64_t *stack, int count, const tensor *products)
{
    torch.delete_tensor((tensor)(uintptr_t)stack[X]);
    for (int n = 0; n < count; n++)
        for (int i = DATA; i < FACTS; i++) {
            uint64_t *given = argument_at(stack, n, i);
            if (given)
                torch.delete_tensor((tensor)(uintptr_t)*given);
            if (given && i >= ZEROS)
                torch.delete_optional(given);
        }
    torch.delete_string((text)(uintptr_t)stack[1 + count * OF_WEIGHT]);
    for (int n = 0; n < count; n++)
        stack[n] = (uint64_t)(uintptr_t)products[n];
}

/* Of `breccia::linear`: arguments come on the stack, and the product goes on it. */
static void linear(uint64_t *stack, uint64_t Py_UNUSED(arguments), uint64_t Py_UNUSED(outputs))
{
    operands found;
    const int known = are_read(stack, &found, 1);
    tensor product;
    if (!known || !again(&found, 1, &product)) {
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
    answer(stack, 1, &product);
}

/* Of `breccia::two_linears` and `breccia::three_linears`, which look at what is kept for each weight. Python multiplies by one weight
   at a time, so that it is kept. */
static void linears(uint64_t *stack, uint64_t arguments, uint64_t Py_UNUSED(outputs))
{
    const int count = (int)(arguments - 2) / OF_WEIGHT;
    operands found[MOST_WEIGHTS];
    tensor products[MOST_WEIGHTS];
    if (are_read(stack, found, count) && again(found, count, products)) {
        answer(stack, count, products);
        return;
    }
    reason[0] = 0;
    const char *const otherwise = count == 2 ? "breccia::two_linears_by_choice" : "breccia::three_linears_by_choice";
    const int32_t error = torch.call_dispatcher(otherwise, "", stack, VERSION);
    torch.check(!error, otherwise, "layers.c", __LINE__, reason[0] ? reason : "the product failed");
}

const char operate_doc[] =
    "operate(functions, layers, registry, get_num_threads): register the operators of layers with torch, by the addresses of\n"
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
        torch.library_impl(found, "linear", linear, VERSION) || torch.library_impl(found, "two_linears", linears, VERSION) ||
        torch.library_impl(found, "three_linears", linears, VERSION);
    return PyBool_FromLong(!failed);
}
