/* Products of columns by AVX-512. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(AVX512)

#include "column_halves.h"

typedef float vector __attribute__((vector_size(64)));
enum { W = 16, STEP_ROWS = 6 };

INLINE void decode_vector(const int kind, const uint8_t *codes, const float *table, vector *low, vector *high)
{
    const __m128i b = _mm_loadu_si128((const void *)codes);
    if (kind == TABLE4) {
        const __m512i v = _mm512_cvtepu8_epi32(b);
        const __m512 items = _mm512_loadu_ps(table);
        *low = (vector)_mm512_permutexvar_ps(v, items); /* which reads the lowest four bits */
        *high = (vector)_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), items);
    } else if (IS_HALF(kind)) {
        __m256i v = _mm256_cvtepu8_epi16(b);
        AS_HALVES(256, si256, kind, v);
        *low = (vector)_mm512_cvtph_ps(v);
    } else if (kind == I8)
        *low = (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
    else if (kind == U8)
        *low = (vector)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b));
    else
        *low = (vector)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(b), table, 4);
}

#include "column_steps.h"

const column_version columns_avx512 = {"avx512", steps, widen, scales_of, turn, lift_of, W * VECTORS, STEP_ROWS};

COMPILED
#endif
