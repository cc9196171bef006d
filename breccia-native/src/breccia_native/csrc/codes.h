/* Codes of scaled numbers: minifloats and integers. */

#ifndef BRECCIA_CODES_H
#define BRECCIA_CODES_H

#include "packing.h"
#include "random.h"
#include "scaled.h"

INLINE void floats_of(const numbers *all, minifloat f, uint8_t *codes)
{
    float y[STRIP];
    uint32_t found[STRIP], words[STRIP];
    uint8_t room[STRIP];
    /* Less the exponent bits of a binade, these are the bits of 1 over the spacing of its codes. */
    const uint32_t units = (uint32_t)(254 + 23 - f.shift) << 23;
    place next = {all->inverse, all->k};
    for (Py_ssize_t start = 0; start < all->n; start += STRIP) {
        const Py_ssize_t length = all->n - start < STRIP ? all->n - start : STRIP;
        scaled(all, start, length, &next, y);
        if (all->random.width) {
            words_at(all->random, start, length, words);
            for (Py_ssize_t i = 0; i < length; i++) {
                const uint32_t u = bits_of(y[i]);
                int32_t a = (int32_t)(u & MAGNITUDE);
                a = a > (int32_t)f.largest ? (int32_t)f.largest : a;
                int32_t e = (int32_t)((uint32_t)a & EXPONENT);
                e = e > (int32_t)f.floor ? e : (int32_t)f.floor;
                const int32_t rest = dithered(float_of((uint32_t)a) * float_of(units - (uint32_t)e), words[i]);
                const int32_t code = rest + ((e - (int32_t)f.floor) >> f.shift);
                found[i] = (uint32_t)code | ((u >> 31) << f.sign);
            }
        } else
            for (Py_ssize_t i = 0; i < length; i++) {
                const uint32_t u = bits_of(y[i]);
                int32_t a = (int32_t)(u & MAGNITUDE), e;
                a = a > (int32_t)f.largest ? (int32_t)f.largest : a;
                e = (int32_t)((uint32_t)a & EXPONENT);
                e = (e > (int32_t)f.floor ? e : (int32_t)f.floor) + (int32_t)f.lift;
                const uint32_t sum = bits_of(float_of((uint32_t)a) + float_of((uint32_t)e));
                found[i] = ((sum + ((uint32_t)e >> f.shift)) & 0xff) | ((u >> 31) << f.sign);
            }
        uint8_t *const to = all->packed ? room : codes + start;
        for (Py_ssize_t i = 0; i < length; i++) /* a separate loop, else each of the terms above would be narrowed */
            to[i] = (uint8_t)found[i];
        if (all->packed)
            pairs_of(room, length / 2, codes + start / 2);
    }
}

#if defined(BY_AVX512)
/* Numbers `i` to `i + 16` of x, in FP32. */
INLINE __m512 vector_at(const char *x, const int kind, Py_ssize_t i)
{
    if (kind == FP32)
        return _mm512_loadu_ps(x + 4 * i);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)(x + 2 * i));
    return kind == FP16 ? _mm512_cvtph_ps(halves) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* 64 numbers to codes of minifloats, one a byte or two: `floats_of` in registers. The numbers have 64 / k inverse scales. */
INLINE void vectors_of_floats(const char *x, const int kind, const int k, const int some_zero, const int packed,
    const float *inverse, minifloat f, uint8_t *data)
{
    const __m512i magnitude = _mm512_set1_epi32((int)MAGNITUDE), exponent = _mm512_set1_epi32((int)EXPONENT);
    const __m512i largest = _mm512_set1_epi32((int)f.largest), floor = _mm512_set1_epi32((int)f.floor);
    const __m512i lift = _mm512_set1_epi32((int)f.lift), low = _mm512_set1_epi32((1 << f.sign) - 1);
    const __m128i shift = _mm_cvtsi32_si128(f.shift), sign = _mm_cvtsi32_si128(31 - f.sign);
    __m512i codes[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const float by = inverse[16 * i / k];
        const __m512 y = _mm512_mul_ps(vector_at(x, kind, 16 * i), _mm512_set1_ps(by));
        const __m512i u = some_zero && by == 0 ? _mm512_setzero_si512() : _mm512_castps_si512(y);
        const __m512i a = _mm512_min_epi32(_mm512_and_si512(u, magnitude), largest);
        const __m512i e = _mm512_add_epi32(_mm512_max_epi32(_mm512_and_si512(a, exponent), floor), lift);
        const __m512i sum = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(e)));
        const __m512i code = _mm512_add_epi32(sum, _mm512_srl_epi32(e, shift));
        codes[i] = _mm512_ternarylogic_epi32(low, code, _mm512_srl_epi32(u, sign), 0xCA); /* low ? code : sign */
    }
    /* Packing vectors takes 4 codes of each in turn. These are their places, and those of their bytes when packed, two by two. */
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m256i pairs_in_order = _mm256_set_epi16(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i words = _mm512_packus_epi32(codes[0], codes[1]), others = _mm512_packus_epi32(codes[2], codes[3]);
    const __m512i bytes = _mm512_packus_epi16(words, others);
    if (packed) {
        const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001)); /* c + 16 d */
        _mm256_storeu_si256((__m256i *)data, _mm256_permutexvar_epi16(pairs_in_order, _mm512_cvtepi16_epi8(pairs)));
    } else
        _mm512_storeu_si512(data, _mm512_permutexvar_epi32(in_order, bytes));
}

/* Blocks have all->k numbers, and of 64 numbers k have the same inverse scale. */
INLINE void floats_in_vectors(const numbers *all, const int kind, const int k, const int packed, minifloat f, uint8_t *data)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    const char *x = all->x;
    place next = {all->inverse, all->k};
    for (Py_ssize_t i = 0; i + 64 <= all->n; i += 64, x += 64 * size, data += packed ? 32 : 64) {
        int some_zero = 0;
        for (int j = 0; j < 64 / k; j++)
            some_zero |= next.inverse[j] == 0;
        for (int j = 0; j < size; j++)
            PREFETCH(x + AHEAD + 64 * j);
        if (some_zero)
            vectors_of_floats(x, kind, k, 1, packed, next.inverse, f, data);
        else
            vectors_of_floats(x, kind, k, 0, packed, next.inverse, f, data);
        next.left -= 64;
        if (next.left <= 0) {
            next.inverse += 64 / k;
            next.left = all->k;
        }
    }
}

INLINE void floats_by_kind(const numbers *all, const int k, const int packed, minifloat f, uint8_t *data)
{
    switch (all->kind) { /* each compiled for its kind */
    case FP32: floats_in_vectors(all, FP32, k, packed, f, data); break;
    case BF16: floats_in_vectors(all, BF16, k, packed, f, data); break;
    default: floats_in_vectors(all, FP16, k, packed, f, data);
    }
}

/* Codes, to nearest, of blocks of 16, 32 and multiples of 64 numbers, 64 at a time. Returns how many it wrote. */
static Py_ssize_t floats_by_avx512(const numbers *all, minifloat f, uint8_t *data)
{
    const Py_ssize_t k = all->k % 64 ? all->k : 64;
    if (all->divides || all->random.width || all->across || (k != 16 && k != 32 && k != 64))
        return 0;
    switch (k + all->packed) {
    case 16: floats_by_kind(all, 16, 0, f, data); break;
    case 17: floats_by_kind(all, 16, 1, f, data); break;
    case 32: floats_by_kind(all, 32, 0, f, data); break;
    case 33: floats_by_kind(all, 32, 1, f, data); break;
    case 64: floats_by_kind(all, 64, 0, f, data); break;
    case 65: floats_by_kind(all, 64, 1, f, data); break;
    }
    return all->n / 64 * 64;
}
#endif

INLINE float clamped(float y, float low, float high)
{
    const float below = y < high ? y : high;
    return below > low ? below : low;
}

/* The integer that y times `units` is rounded to. */
INLINE int32_t dithered_integer(float y, float units, uint32_t word)
{
    const uint32_t u = bits_of(y * units);
    const int32_t a = dithered(float_of(u & MAGNITUDE), word);
    return (int32_t)u < 0 ? -a : a;
}

INLINE void integers_of(const numbers *all, integer f, uint8_t *codes)
{
    float y[STRIP];
    uint32_t found[STRIP], words[STRIP];
    uint8_t room[STRIP];
    const float units = 0x1.8p23f / f.magic;
    place next = {all->inverse, all->k};
    for (Py_ssize_t start = 0; start < all->n; start += STRIP) {
        const Py_ssize_t length = all->n - start < STRIP ? all->n - start : STRIP;
        uint8_t *const to = all->packed ? room : codes + start;
        scaled(all, start, length, &next, y);
        if (all->random.width) {
            words_at(all->random, start, length, words);
            for (Py_ssize_t i = 0; i < length; i++)
                found[i] = (uint32_t)dithered_integer(clamped(y[i], f.low, f.high), units, words[i]);
            for (Py_ssize_t i = 0; i < length; i++)
                to[i] = (uint8_t)(found[i] & f.mask);
        } else
            for (Py_ssize_t i = 0; i < length; i++)
                to[i] = (uint8_t)(bits_of(clamped(y[i], f.low, f.high) + f.magic) & f.mask);
        if (all->packed)
            pairs_of(room, length / 2, codes + start / 2);
    }
}

OUTLINE void all_floats(const numbers *all, minifloat f, uint8_t *codes)
{
    EACH_ROW(floats_of(part, f, to), all, codes);
}

/* -------------------------------------------------------------------------------------------------- scales */

/* Scales of 8 bits from amax: codes of amax / divisor / global_scale, and the inverse of each by a table of 256. */
INLINE void scales_of(
    const float *amax, Py_ssize_t n, float divisor, float global_scale, minifloat f, const float *inverses, uint8_t *codes, float *inverse)
{
    const float one = 1;
    for (Py_ssize_t start = 0; start < n; start += STRIP) {
        const Py_ssize_t length = n - start < STRIP ? n - start : STRIP;
        float t[STRIP];
        for (Py_ssize_t i = 0; i < length; i++)
            t[i] = amax[start + i] / divisor / global_scale;
        const numbers all = {.x = (const char *)t, .kind = FP32, .n = length, .k = length, .inverse = &one};
        all_floats(&all, f, codes + start);
        for (Py_ssize_t i = start; i < start + length; i++)
            inverse[i] = inverses[codes[i]];
    }
}

/* -------------------------------------------------------------------------------------------------- functions */

static void floats(const numbers *all, minifloat f, uint8_t *codes)
{
#if defined(BY_AVX512)
    const Py_ssize_t done = floats_by_avx512(all, f, codes);
    if (done) {
        numbers rest = *all;
        rest.x += done * (all->kind == FP32 ? 4 : 2);
        rest.inverse += done / all->k;
        rest.n -= done;
        all_floats(&rest, f, codes + (all->packed ? done / 2 : done));
        return;
    }
#endif
    all_floats(all, f, codes);
}

static void integers(const numbers *all, integer f, uint8_t *codes)
{
    EACH_ROW(integers_of(part, f, to), all, codes);
}

static void scales(const float *amax, Py_ssize_t n, float divisor, float global_scale, minifloat f, const float *inverses,
    uint8_t *codes, float *inverse)
{
    scales_of(amax, n, divisor, global_scale, f, inverses, codes, inverse);
}

#endif
