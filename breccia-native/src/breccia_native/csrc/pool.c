/* A pool of threads for the work of one call in C. Its threads never enter Python.

   A caller that finds the pool free offers seats to its threads, then works itself; when it has run out of work it takes back
   the seats that nobody has taken, so it never waits for a thread that has not begun. A caller that finds the pool in use works
   alone. Threads without work look for seats for YIELD_NS and then sleep: the calls of a model's layers do not pay for
   waking them, which takes longer than a product of one row.

   A library whose own threads look for work between its operations, as OpenMP's do under torch, would take the processors from
   these threads. It can lend its threads instead (`borrow`): then a task is a parallel loop of that library. */

#if !defined(__GNUC__) || defined(_WIN32)
#error "pool.c needs POSIX threads and the atomic operations of GCC or Clang"
#endif

#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 255, SPIN_NS = 50000, YIELD_NS = 5000000, SPINS = 16 };
/* Bytes of a thread: some C libraries give less than the largest buffers take. */
enum { STACK = 1 << 20 };

#define LOAD(at) __atomic_load_n(at, __ATOMIC_SEQ_CST)
#define STORE(at, value) __atomic_store_n(at, value, __ATOMIC_SEQ_CST)
#define ADD(at, value) __atomic_add_fetch(at, value, __ATOMIC_SEQ_CST)
#define SWAP(at, value) __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t offered = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;

static struct {
    int busy;     /* whether a caller has the pool */
    int seats;    /* that threads of the pool may take */
    int ended;    /* threads that have ended this call's task */
    int asleep;   /* threads that wait for `offered` and have not been called */
    int calls;    /* to sleeping threads, which have not heard them; under the lock */
    int waiting;  /* whether the caller waits for `finished` */
    int stopped;
    int spins;    /* whether there is a processor for each thread, so that looking for work delays no other */
    int count;    /* threads; written by the caller that has the pool, and by `stop` */
    pthread_t threads[MOST];
    pool_task task; /* written before seats are offered, and read after one has been taken */
    void *context;
} state;

/* A parallel loop: part(i, j, context) for ranges that cover first to end, `grain` or more each, side by side. Returns 0, or an
   error. torch_parallel_for of torch's stable C interface is one. */
typedef int32_t (*loop_function)(int64_t first, int64_t end, int64_t grain, void (*part)(int64_t, int64_t, void *), void *context);
/* Writes how many threads such a loop uses. Returns 0, or an error. */
typedef int32_t (*threads_function)(uint32_t *threads);

static struct {
    loop_function loop; /* NULL: no library lends its threads; written after `threads` */
    threads_function threads;
} lender;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether there is time left to look for work, or for the end of a task, at another moment. After SPIN_NS other threads that are
   ready to run, such as those of a BLAS, come first. */
static int may_spin(int64_t *until)
{
    if (!LOAD(&state.spins))
        return 0;
    const int64_t t = now();
    *until = *until ? *until : t + YIELD_NS;
    if (t > *until - YIELD_NS + SPIN_NS)
        sched_yield();
    else
        for (int i = 0; i < SPINS; i++)
            RELAX();
    return t < *until;
}

/* Take a seat. Returns 0 when the pool is stopped.

   A thread that has been called looks for seats again, also where the call is over before the thread is awake: waking takes longer
   than a short product, and the next one is likely to come soon. */
static int seated(void)
{
    int64_t until = 0;
    for (;;) {
        int seats = LOAD(&state.seats);
        while (seats > 0)
            if (__atomic_compare_exchange_n(&state.seats, &seats, seats - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                return 1;
        if (LOAD(&state.stopped))
            return 0;
        if (may_spin(&until))
            continue;
        pthread_mutex_lock(&lock);
        ADD(&state.asleep, 1); /* before seats are read again: `run` offers seats before it reads who sleeps */
        if (LOAD(&state.seats) > 0 || LOAD(&state.stopped))
            ADD(&state.asleep, -1);
        else {
            while (state.calls == 0 && !LOAD(&state.stopped))
                pthread_cond_wait(&offered, &lock);
            state.calls -= state.calls > 0;
        }
        pthread_mutex_unlock(&lock);
        until = 0;
    }
}

static void *worker(void *unused)
{
    while (seated()) {
        state.task(state.context);
        ADD(&state.ended, 1); /* before `waiting` is read: the caller waits before it reads how many have ended */
        if (LOAD(&state.waiting)) {
            pthread_mutex_lock(&lock);
            pthread_cond_signal(&finished);
            pthread_mutex_unlock(&lock);
        }
    }
    return unused;
}

/* Start threads until there are `wanted`, if possible. Returns how many there are, `wanted` at most. */
static int enlisted(int wanted)
{
    wanted = wanted < MOST ? wanted : MOST;
    if (state.count < wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_mutex_lock(&lock);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
        pthread_attr_t own;
        pthread_attr_init(&own);
        pthread_attr_setstacksize(&own, STACK);
        while (state.count < wanted && !LOAD(&state.stopped) &&
               pthread_create(&state.threads[state.count], &own, worker, NULL) == 0)
            state.count++;
        pthread_attr_destroy(&own);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        STORE(&state.spins, state.count < sysconf(_SC_NPROCESSORS_ONLN));
        pthread_mutex_unlock(&lock);
    }
    return wanted < state.count ? wanted : state.count;
}

/* Wait until `taken` threads have ended the task. */
static void await(int taken)
{
    int64_t until = 0;
    while (LOAD(&state.ended) < taken) {
        if (may_spin(&until))
            continue;
        pthread_mutex_lock(&lock);
        STORE(&state.waiting, 1);
        while (LOAD(&state.ended) < taken)
            pthread_cond_wait(&finished, &lock);
        STORE(&state.waiting, 0);
        pthread_mutex_unlock(&lock);
    }
}

typedef struct {
    pool_task task;
    void *context;
} shared_task;

static void part(int64_t first, int64_t end, void *shared)
{
    (void)first, (void)end; /* a task takes its own parts */
    ((shared_task *)shared)->task(((shared_task *)shared)->context);
}

/* Do the task on threads of the lender. Returns 0 where it has not been done: nobody lends as many threads, or their loop failed. */
static int by_lender(pool_task task, void *context, int threads)
{
    const loop_function loop = LOAD(&lender.loop);
    uint32_t there = 0;
    if (!loop || lender.threads(&there) || there < (uint32_t)threads)
        return 0;
    shared_task shared = {task, context};
    return loop(0, threads, 1, part, &shared) == 0;
}

static void by_pool(pool_task task, void *context, int threads)
{
    const int others = enlisted(threads - 1);
    state.task = task;
    state.context = context;
    STORE(&state.ended, 0);
    STORE(&state.seats, others);
    if (state.count - LOAD(&state.asleep) < others) {
        pthread_mutex_lock(&lock);
        for (int awake = state.count - LOAD(&state.asleep); awake < others; awake++) {
            ADD(&state.asleep, -1); /* now: the calls that come before it is awake need not call it again */
            state.calls++;
            pthread_cond_signal(&offered);
        }
        pthread_mutex_unlock(&lock);
    }
    task(context);
    await(others - SWAP(&state.seats, 0));
}

static void run(pool_task task, void *context, int threads)
{
    if (threads < 2 || SWAP(&state.busy, 1)) {
        task(context);
        return;
    }
    if (!by_lender(task, context, threads))
        by_pool(task, context, threads);
    STORE(&state.busy, 0);
}

/* -------------------------------------------------------------------------------------------------- processes */

/* Before the interpreter ends: end all threads. Calls from then on work alone. */
static void stop(void)
{
    STORE(&lender.loop, NULL);
    pthread_mutex_lock(&lock);
    STORE(&state.stopped, 1);
    const int count = state.count;
    state.count = 0;
    pthread_cond_broadcast(&offered);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < count; i++)
        pthread_join(state.threads[i], NULL);
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* The child has none of the threads, those of a lender included; it starts its own. */
static void after_fork_in_child(void)
{
    lender.loop = NULL;
    const int stopped = state.stopped;
    memset(&state, 0, sizeof state);
    state.stopped = stopped;
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&offered, NULL);
    pthread_cond_init(&finished, NULL);
}

/* -------------------------------------------------------------------------------------------------- for Python */

static const pool_functions functions = {run};

PyDoc_STRVAR(size_doc, "size(): the threads that the pool has started.");

static PyObject *size(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(LOAD(&state.count));
}

PyDoc_STRVAR(borrow_doc,
    "borrow(loop, threads): from now on work on the threads of another library, by the addresses of two functions in C: a\n"
    "parallel loop, and one that says how many threads it uses (pool.c has their types). Where they are too few, in forked\n"
    "children and with addresses of 0, threads of the pool work.");

static PyObject *borrow(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_ssize_t loop, threads;
    if (!PyArg_ParseTuple(args, "nn:borrow", &loop, &threads))
        return NULL;
    STORE(&lender.loop, NULL);
    if (loop && threads) {
        lender.threads = (threads_function)threads;
        STORE(&lender.loop, (loop_function)loop);
    }
    Py_RETURN_NONE;
}

typedef struct {
    int64_t count, next, sum;
    int callers, threads;
} counting;

/* Adds numbers below `count`, each once. */
static void add_some(void *context)
{
    counting *c = context;
    int64_t sum = 0;
    for (int64_t i; (i = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->count;)
        sum += i;
    __atomic_fetch_add(&c->sum, sum, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->callers, 1, __ATOMIC_RELAXED);
}

PyDoc_STRVAR(add_doc,
    "add(count, threads): (the sum of range(count), how many threads added numbers). For tests: each number is taken once.");

static PyObject *add(PyObject *Py_UNUSED(self), PyObject *args)
{
    long long count;
    counting c = {0};
    if (!PyArg_ParseTuple(args, "Li:add", &count, &c.threads))
        return NULL;
    c.count = count;
    Py_BEGIN_ALLOW_THREADS
    run(add_some, &c, c.threads);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("Li", (long long)c.sum, c.callers);
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, add_doc},
    {"borrow", borrow, METH_VARARGS, borrow_doc},
    {"size", size, METH_NOARGS, size_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module)
{
    static int prepared;
    PyObject *capsule = PyCapsule_New((void *)&functions, POOL_CAPSULE, NULL);
    if (!capsule || PyModule_AddObjectRef(module, "functions", capsule) < 0) {
        Py_XDECREF(capsule);
        return -1;
    }
    Py_DECREF(capsule);
    if (!prepared && (Py_AtExit(stop) || pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child))) {
        PyErr_SetString(PyExc_RuntimeError, "no room for a function that ends the threads of breccia_native.pool at exit");
        return -1;
    }
    prepared = 1;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = POOL_MODULE,
    .m_doc = "The threads of breccia_native's compiled kernels.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_pool(void)
{
    return PyModuleDef_Init(&module);
}
