/* Error metrics by AVX2. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX2)

#include "measuring_sums.h"

const measuring_function measuring_avx2 = measure;

COMPILED
#endif
