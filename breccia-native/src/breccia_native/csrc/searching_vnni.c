/* The search for scales by AVX-512 with VNNI. */

#define BY_AVX512 1
#define BY_VNNI 1
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vnni," CASTS_AVX512)

#include "searching_blocks.h"

const searching_function searching_vnni = search;

COMPILED
#endif
