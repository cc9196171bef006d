/* Squares of FP32 numbers, transposed in registers. */

#ifndef BRECCIA_TRANSPOSE_H
#define BRECCIA_TRANSPOSE_H

#include <immintrin.h>

#include "bits.h"

/* Lane i of vector j to lane j of vector i. */
__attribute__((target("avx512f,avx512dq"))) INLINE void transposed(__m512 r[16])
{
    __m512 t[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4)
        _Pragma("GCC unroll 16") for (int j = 0; j < 2; j++) {
            const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    _Pragma("GCC unroll 16") for (int j = 0; j < 4; j++) {
        const __m512 a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88), d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
        r[j] = _mm512_shuffle_f32x4(a, c, 0x88);
        r[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
        r[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
        r[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

/* The same of 8. */
__attribute__((target("avx2"))) INLINE void transposed8(__m256 r[8])
{
    __m256 t[8];
    _Pragma("GCC unroll 16") for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 8; i += 4)
        _Pragma("GCC unroll 16") for (int j = 0; j < 2; j++) {
            const __m256d a = _mm256_castps_pd(t[i + j]), b = _mm256_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    _Pragma("GCC unroll 16") for (int j = 0; j < 4; j++) {
        const __m256 a = r[j], b = r[4 + j];
        r[j] = _mm256_permute2f128_ps(a, b, 0x20);
        r[4 + j] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

/* The bytes of 16 FP32 numbers, the lowest of all first, in both halves of registers. */
__attribute__((target("avx2"))) INLINE void bytes_of_table(const float *table, __m256i to[4])
{
    const __m128i apart = _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m128i v[4];
    for (int i = 0; i < 4; i++)
        v[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(table + 4 * i)), apart);
    const __m128i a = _mm_unpacklo_epi32(v[0], v[1]), b = _mm_unpacklo_epi32(v[2], v[3]);
    const __m128i c = _mm_unpackhi_epi32(v[0], v[1]), d = _mm_unpackhi_epi32(v[2], v[3]);
    to[0] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(a, b));
    to[1] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(a, b));
    to[2] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(c, d));
    to[3] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(c, d));
}

#endif
