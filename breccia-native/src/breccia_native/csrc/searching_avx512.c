/* The search for scales by AVX-512. */

#define BY_AVX512 1
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX512)

#include "searching_blocks.h"

const searching_function searching_avx512 = search;

COMPILED
#endif
