/* The search for scales by AVX2. */

#define BY_AVX2 1
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX2)

#include "searching_blocks.h"

const searching_function searching_avx2 = search;

COMPILED
#endif
