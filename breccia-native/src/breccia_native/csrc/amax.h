/* The largest magnitude of each block, and its extremes. */

#ifndef BRECCIA_AMAX_H
#define BRECCIA_AMAX_H

#include "loads.h"

/* Magnitudes are non-negative as signed integers, which all processors can compare. */
INLINE void largest_of_each(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, uint32_t *amax)
{
    for (Py_ssize_t b = 0; b < blocks; b++) {
        if (kind == FP32) {
            const uint32_t *numbers = (const uint32_t *)x + b * k;
            int32_t most = 0;
            for (Py_ssize_t i = 0; i < k; i++) {
                const int32_t a = (int32_t)(numbers[i] & MAGNITUDE);
                most = a > most ? a : most;
            }
            amax[b] = (uint32_t)most;
        } else {
            const uint16_t *numbers = (const uint16_t *)x + b * k;
            int16_t most = 0;
            for (Py_ssize_t i = 0; i < k; i++) {
                const int16_t a = (int16_t)(numbers[i] & 0x7fffu);
                most = a > most ? a : most;
            }
            amax[b] = kind == BF16 ? (uint32_t)most << 16 : (uint32_t)most;
        }
    }
    for (Py_ssize_t b = 0; kind == FP16 && b < blocks; b++) /* together, which takes less than one by one */
        amax[b] = bits_of_half((uint16_t)amax[b]);
}

#if defined(BY_AVX512)
/* Magnitudes of 16 numbers, those of FP16 as they are. */
INLINE __m512i magnitudes_at(const char *x, int kind)
{
    if (kind == FP32)
        return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32((int)MAGNITUDE));
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    const __m512i most = _mm512_and_si512(wide, _mm512_set1_epi32(0x7fff));
    return kind == BF16 ? _mm512_slli_epi32(most, 16) : most;
}

/* `largest_of_each` for multiples of 16: vectors of 16 blocks are reduced together, by 2 shuffles a block in place of 4. */
INLINE void largest_by_avx512(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, uint32_t *amax)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2, whole = blocks / 16 * 16;
    for (Py_ssize_t b = 0; b < whole; b += 16) {
        __m512i v[16];
        UNROLL for (int i = 0; i < 16; i++) {
            const char *block = x + (b + i) * k * size;
            v[i] = magnitudes_at(block, kind);
            for (Py_ssize_t j = 16; j < k; j += 16)
                v[i] = _mm512_max_epi32(v[i], magnitudes_at(block + j * size, kind));
        }
        UNROLL for (int i = 0; i < 16; i += 2)
            v[i / 2] = _mm512_max_epi32(_mm512_unpacklo_epi32(v[i], v[i + 1]), _mm512_unpackhi_epi32(v[i], v[i + 1]));
        UNROLL for (int i = 0; i < 8; i += 2)
            v[i / 2] = _mm512_max_epi32(_mm512_unpacklo_epi64(v[i], v[i + 1]), _mm512_unpackhi_epi64(v[i], v[i + 1]));
        UNROLL for (int step = 4; step > 1; step /= 2)
            UNROLL for (int i = 0; i < step; i += 2)
                v[i / 2] = _mm512_max_epi32(
                    _mm512_shuffle_i32x4(v[i], v[i + 1], 0x88), _mm512_shuffle_i32x4(v[i], v[i + 1], 0xdd));
        _mm512_storeu_si512(amax + b, v[0]);
    }
    for (Py_ssize_t b = 0; kind == FP16 && b < whole; b++)
        amax[b] = bits_of_half((uint16_t)amax[b]);
    largest_of_each(x + whole * k * size, blocks - whole, k, kind, amax + whole);
}

/* Of blocks that are a cache line, where this is faster (measured). */
static void amax_of_lines(const char *x, Py_ssize_t blocks, int kind, uint32_t *amax)
{
    switch (kind) {
    case FP32: largest_by_avx512(x, blocks, 16, FP32, amax); break;
    case BF16: largest_by_avx512(x, blocks, 32, BF16, amax); break;
    default: largest_by_avx512(x, blocks, 32, FP16, amax);
    }
}
#endif

/* Loops over the formats' block sizes have a length known at compile time. */
INLINE void amax_of(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, uint32_t *amax)
{
#if defined(BY_AVX512)
    if (k * (kind == FP32 ? 4 : 2) == 64) {
        amax_of_lines(x, blocks, kind, amax);
        return;
    }
#endif
    switch (k) {
    case 16: largest_of_each(x, blocks, 16, kind, amax); break;
    case 32: largest_of_each(x, blocks, 32, kind, amax); break;
    case 128: largest_of_each(x, blocks, 128, kind, amax); break;
    default: largest_of_each(x, blocks, k, kind, amax);
    }
}

/* The same of blocks of k rows of `across` numbers, for each column. */
INLINE void amax_down_of(const char *x, Py_ssize_t blocks, Py_ssize_t k, Py_ssize_t across, int kind, uint32_t *amax)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    for (Py_ssize_t b = 0; b < blocks; b++)
        for (Py_ssize_t start = 0; start < across; start += STRIP) {
            const Py_ssize_t n = across - start < STRIP ? across - start : STRIP;
            uint32_t found[STRIP];
            int32_t most[STRIP] = {0};
            for (Py_ssize_t r = 0; r < k; r++) {
                const char *row = x + ((b * k + r) * across + start) * size;
                const uint32_t *bits = kind == FP32 ? (const uint32_t *)row : found;
                if (kind != FP32)
                    row_of(row, n, kind, found);
                for (Py_ssize_t i = 0; i < n; i++) {
                    const int32_t a = (int32_t)(bits[i] & MAGNITUDE);
                    most[i] = a > most[i] ? a : most[i];
                }
            }
            memcpy(amax + b * across + start, most, 4 * (size_t)n);
        }
}

/* The order of FP32 numbers as that of int32, and back. Numbers below 2^-126 are +0. */
INLINE int32_t ordered(uint32_t u)
{
    const uint32_t clean = (int32_t)(u & MAGNITUDE) < (int32_t)NORMAL ? 0 : u;
    return (int32_t)(clean ^ ((uint32_t)((int32_t)clean >> 31) >> 1));
}

INLINE uint32_t unordered(int32_t key)
{
    return (uint32_t)key ^ ((uint32_t)(key >> 31) >> 1);
}

INLINE void extremes_of_each(const float *y, Py_ssize_t blocks, Py_ssize_t k, int32_t *least, int32_t *most)
{
    for (Py_ssize_t b = 0; b < blocks; b++, y += k) {
        int32_t low = least[b], high = most[b];
        for (Py_ssize_t i = 0; i < k; i++) {
            const int32_t a = ordered(bits_of(y[i]));
            low = a < low ? a : low;
            high = a > high ? a : high;
        }
        least[b] = low;
        most[b] = high;
    }
}

INLINE void extremes_of(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, widener widen, uint32_t *low, uint32_t *high)
{
    float room[STRIP];
    const Py_ssize_t together = k < STRIP ? STRIP / k : 1, size = kind == FP32 ? 4 : 2;
    for (Py_ssize_t b = 0; b < blocks; b += together) {
        const Py_ssize_t several = together < blocks - b ? together : blocks - b;
        int32_t least[STRIP], most[STRIP];
        for (Py_ssize_t j = 0; j < several; j++)
            least[j] = INT32_MAX, most[j] = INT32_MIN;
        for (Py_ssize_t start = 0; start < k; start += STRIP) {
            const Py_ssize_t n = k - start < STRIP ? k - start : STRIP;
            fetch_ahead(x + (b * k + start) * size, several * n * size);
            const float *y = strip_of(x, kind, b * k + start, several * n, widen, room);
            switch (n) {
            case 16: extremes_of_each(y, several, 16, least, most); break;
            case 32: extremes_of_each(y, several, 32, least, most); break;
            case 128: extremes_of_each(y, several, 128, least, most); break;
            default: extremes_of_each(y, several, n, least, most);
            }
        }
        for (Py_ssize_t j = 0; j < several; j++)
            low[b + j] = unordered(least[j]), high[b + j] = unordered(most[j]);
    }
}

/* The same of blocks of k rows of `across` numbers, for each column. */
INLINE void extremes_down_of(
    const char *x, Py_ssize_t blocks, Py_ssize_t k, Py_ssize_t across, int kind, widener widen, uint32_t *low, uint32_t *high)
{
    float room[STRIP];
    for (Py_ssize_t b = 0; b < blocks; b++)
        for (Py_ssize_t start = 0; start < across; start += STRIP) {
            const Py_ssize_t n = across - start < STRIP ? across - start : STRIP, first = b * across + start;
            int32_t least[STRIP], most[STRIP];
            for (Py_ssize_t i = 0; i < n; i++)
                least[i] = INT32_MAX, most[i] = INT32_MIN;
            for (Py_ssize_t r = 0; r < k; r++) {
                const float *y = strip_of(x, kind, (b * k + r) * across + start, n, widen, room);
                for (Py_ssize_t i = 0; i < n; i++) {
                    const int32_t a = ordered(bits_of(y[i]));
                    least[i] = a < least[i] ? a : least[i];
                    most[i] = a > most[i] ? a : most[i];
                }
            }
            for (Py_ssize_t i = 0; i < n; i++)
                low[first + i] = unordered(least[i]), high[first + i] = unordered(most[i]);
        }
}

/* -------------------------------------------------------------------------------------------------- functions */

static void amax(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, uint32_t *found)
{
    switch (kind) {
    case FP32: amax_of(x, blocks, k, FP32, found); break;
    case BF16: amax_of(x, blocks, k, BF16, found); break;
    default: amax_of(x, blocks, k, FP16, found);
    }
}

static void amax_down(const char *x, Py_ssize_t blocks, Py_ssize_t k, Py_ssize_t across, int kind, uint32_t *found)
{
    switch (kind) {
    case FP32: amax_down_of(x, blocks, k, across, FP32, found); break;
    case BF16: amax_down_of(x, blocks, k, across, BF16, found); break;
    default: amax_down_of(x, blocks, k, across, FP16, found);
    }
}

static void extremes(
    const char *x, Py_ssize_t blocks, Py_ssize_t k, Py_ssize_t across, int kind, uint32_t *low, uint32_t *high)
{
    if (across)
        extremes_down_of(x, blocks / across, k, across, kind, widened_halves, low, high);
    else
        extremes_of(x, blocks, k, kind, widened_halves, low, high);
}

#endif
