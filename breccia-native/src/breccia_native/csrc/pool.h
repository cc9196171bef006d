/* The threads that all extensions share (pool.c). */

#ifndef BRECCIA_POOL_H
#define BRECCIA_POOL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A task that several threads do together: each call takes what no other one has taken, until nothing is left. */
typedef void (*pool_task)(void *context);

typedef struct {
    /* Call task(context) on this thread, and meanwhile on up to `threads` - 1 others; return when all calls have ended. */
    void (*run)(pool_task task, void *context, int threads);
} pool_functions;

#define POOL_MODULE "breccia_native.pool"
#define POOL_CAPSULE "breccia_native.pool.functions"

static const pool_functions *pool;

/* Call task(context) by the pool, or by this thread alone where the pool was not built. */
static inline void run_shared(pool_task task, void *context, int threads)
{
    if (pool && threads > 1)
        pool->run(task, context, threads);
    else
        task(context);
}

/* Find the pool, if it was built. Returns -1 for any other error. */
static inline int find_pool(void)
{
    PyObject *module = PyImport_ImportModule(POOL_MODULE);
    if (!module) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    pool = PyCapsule_Import(POOL_CAPSULE, 0);
    Py_DECREF(module);
    return pool ? 0 : -1;
}

#if defined(__GNUC__) && defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__GNUC__) && defined(__aarch64__)
#define RELAX() __asm__ volatile("yield" ::: "memory")
#else
#define RELAX() ((void)0)
#endif

#endif
