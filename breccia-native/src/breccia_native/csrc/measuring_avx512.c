/* Error metrics by AVX-512. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX512)

#include "measuring_sums.h"

const measuring_function measuring_avx512 = measure;

COMPILED
#endif
