/* Positions in a table of 16 ascending numbers, by AVX-512. */

#ifndef BRECCIA_POSITIONS_H
#define BRECCIA_POSITIONS_H

#include "bits.h"

#if defined(BY_AVX512)
/* How many of the last 15 are at most each number. */
INLINE __m512i position_by_halving(__m512 number, __m512 all)
{
    __m512i at = _mm512_setzero_si512();
    for (int step = 8; step; step /= 2) {
        const __m512i next = _mm512_or_si512(at, _mm512_set1_epi32(step));
        at = _mm512_mask_mov_epi32(at, _mm512_cmp_ps_mask(number, _mm512_permutexvar_ps(next, all), _CMP_GE_OQ), next);
    }
    return at;
}
#endif

#endif
