/* The versions of an extension's functions, one for each kind of processor, and the choice between them at run time. */

#ifndef BRECCIA_VERSIONS_H
#define BRECCIA_VERSIONS_H

#include "instructions.h"

/* Those that this processor runs, the best first, and the one in use. */
static struct {
    const char *name;
    const void *functions;
} versions[4];
static const void *chosen;

static void add_version(const char *name, const void *functions)
{
    int i = 0;
    while (versions[i].name && strcmp(versions[i].name, name))
        i++;
    versions[i].name = name;
    versions[i].functions = functions;
    chosen = versions[0].functions;
}

#if defined(HAS_X86)
static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
}

#define ADD_VERSIONS(avx512, avx2, portable)                                                                                \
    do {                                                                                                                    \
        if (has_avx512())                                                                                                   \
            add_version("avx512", avx512);                                                                                  \
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && has_f16c())                                \
            add_version("avx2", avx2);                                                                                      \
        add_version("portable", portable);                                                                                  \
    } while (0)
#else
#define ADD_VERSIONS(avx512, avx2, portable) add_version("portable", portable)
#endif

PyDoc_STRVAR(use_doc,
    "use(name): let calls run for that instruction set, and return the names of those that this processor has, the best first.\n"
    "Without a name, only return them. For tests: no call may be running.");

static PyObject *use(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|s:use", &name))
        return NULL;
    PyObject *names = PyList_New(0);
    int found = name == NULL;
    for (int i = 0; names && i < 4 && versions[i].name; i++) {
        PyObject *each = PyUnicode_FromString(versions[i].name);
        if (!each || PyList_Append(names, each) < 0)
            Py_CLEAR(names);
        Py_XDECREF(each);
        if (name && strcmp(name, versions[i].name) == 0) {
            chosen = versions[i].functions;
            found = 1;
        }
    }
    if (names && !found) {
        PyErr_Format(PyExc_ValueError, "this processor has the instruction sets %R; got '%s'.", names, name);
        Py_CLEAR(names);
    }
    return names;
}

#endif
