/* The version for processors with AVX2 and FMA. */

#ifndef BRECCIA_AVX2_H
#define BRECCIA_AVX2_H

#include <immintrin.h>

#include "tiles.h"

typedef float f8 __attribute__((vector_size(32)));

#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))

FOR_AVX2 static void avx2_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    tile_of_rows(w, p, first, chunks, 16, tile);
}

MICRO(avx2, FOR_AVX2, f8, 8, 1)
MICRO(avx2, FOR_AVX2, f8, 8, 2)
MICRO(avx2, FOR_AVX2, f8, 8, 3)
MICRO(avx2, FOR_AVX2, f8, 8, 4)
MICRO(avx2, FOR_AVX2, f8, 8, 5)
MICRO(avx2, FOR_AVX2, f8, 8, 6)
static const micro avx2_micros[] = {
    NULL, avx2_micro1, avx2_micro2, avx2_micro3, avx2_micro4, avx2_micro5, avx2_micro6};

#define avx2_streams(kind, role, span) 0
#define avx2_order(kind) NULL
static float avx2_lift(int kind)
{
    (void)kind;
    return 1;
}

VERSION(avx2, FOR_AVX2, 6, 16, NULL, avx2_streams, avx2_order)

#endif
