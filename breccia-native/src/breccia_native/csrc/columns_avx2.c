/* Products of columns by AVX2 and FMA. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(AVX2)

#include "column_halves.h"

typedef float vector __attribute__((vector_size(32)));
enum { W = 8, STEP_ROWS = 2 };

INLINE __m256 looked_up(__m256i v, __m256 first, __m256 second)
{
    const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(v, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, v), _mm256_permutevar8x32_ps(second, v), high);
}

INLINE void decode_vector(const int kind, const uint8_t *codes, const float *table, vector *low, vector *high)
{
    const __m128i b = _mm_loadl_epi64((const void *)codes);
    if (kind == TABLE4) {
        const __m256i v = _mm256_cvtepu8_epi32(b);
        const __m256 x = _mm256_loadu_ps(table), y = _mm256_loadu_ps(table + 8);
        *low = (vector)looked_up(v, x, y);
        *high = (vector)looked_up(_mm256_srli_epi32(v, 4), x, y);
    } else if (IS_HALF(kind)) {
        __m128i v = _mm_cvtepu8_epi16(b);
        AS_HALVES(, si128, kind, v);
        *low = (vector)_mm256_cvtph_ps(v);
    } else if (kind == I8)
        *low = (vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
    else if (kind == U8)
        *low = (vector)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b));
    else
        *low = (vector)_mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(b), 4);
}
#include "column_steps.h"

const column_version columns_avx2 = {"avx2", steps, widen, scales_of, turn, lift_of, W * VECTORS, STEP_ROWS};

COMPILED
#endif
