/* The instruction set that a source file is compiled for.

   COMPILE_FOR("avx2,fma") begins the functions that use these instructions, and COMPILED ends them. Headers of the system come
   before. On other processors HAS_X86 is not defined, and such files are empty. */

#ifndef BRECCIA_INSTRUCTIONS_H
#define BRECCIA_INSTRUCTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define QUOTED(text) #text
#if defined(__clang__)
#define COMPILE_FOR(names) _Pragma(QUOTED(clang attribute push(__attribute__((target(names))), apply_to = function)))
#define COMPILED _Pragma("clang attribute pop")
#elif defined(__GNUC__)
#define COMPILE_FOR(names) _Pragma(QUOTED(GCC target(names)))
#define COMPILED
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#define HAS_X86 1
#include <cpuid.h>
#include <immintrin.h>

/* Clang's __builtin_cpu_supports does not know it. */
static inline int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(HAS_X86) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAS_MATRICES 1
#endif

#define AVX2 "avx2,fma,f16c,bmi2"
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"

/* Casts and dequantize must not fuse a product with an addition. GCC would use vectors of half the length. */
#define CASTS_AVX2 "avx2,f16c,bmi2"
#if defined(__clang__)
#define CASTS_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,bmi2"
#else
#define CASTS_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,bmi2,prefer-vector-width=512"
#endif

#endif
