/* The functions of casts by AVX2. */

#define BY_AVX2 1
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX2)

#include "amax.h"
#include "table_codes.h"

const cast_functions casts_avx2 = {widened_halves, load, store, amax, amax_down, extremes, words, shifted, floats, integers,
    tables, scales, pairs, sixes, eights, down, values};

COMPILED
#endif
