/* The functions of casts by AVX-512. */

#define BY_AVX512 1
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX512)

#include "amax.h"
#include "table_codes.h"

const cast_functions casts_avx512 = {widened_halves, load, store, amax, amax_down, extremes, words, shifted, floats, integers,
    tables, scales, pairs, sixes, eights, down, values};

COMPILED
#endif
