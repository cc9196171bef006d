/* Products by AVX-512 VBMI of one row of activations and codes of 1 to 3 or 5 to 7 bits in short blocks, which are not widened. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vbmi," AVX512)

#include "short_blocks.h"

NARROW_STREAMS(PERMUTED)

void stream_narrow_blocks(const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    narrow_streams[stream_of(w->codes.kind)][w->role][w->short_block == 32](w, p, x, stride, sums);
}

COMPILED
#endif
