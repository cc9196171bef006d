/* What instruction sets do in their own ways. */

#ifndef BRECCIA_DECODING_ROUTINES_H
#define BRECCIA_DECODING_ROUTINES_H

#include "decoding.h"

/* What versions do with instructions of their own: FP32 numbers of pairs of 4-bit codes, the first in the low half, by a table of 16
   numbers; FP16 as FP32; and FP32 as FP16 and as BF16, where NaNs are quiet. `strip` writes the first of n numbers in the dtype
   of the result, from registers, and returns how many: those of usual blocks without special numbers; past the caches with
   `stream`, for which `to` is a multiple of 64. `past` copies n bytes past the caches. turn: the transpose of a square of numbers,
   whose rows are `STRIP` numbers apart; of the transpose, `TALL`. */
typedef struct {
    Py_ssize_t (*strip)(const task *, const element *, const factors *, place, const uint8_t *, Py_ssize_t n, int kind,
        int stream, void *to);
    void (*past)(char *to, const char *from, Py_ssize_t n);
    void (*pairs)(const uint8_t *data, Py_ssize_t n, const float *table, float *y);
    void (*widen)(const uint16_t *halves, Py_ssize_t n, float *y);
    void (*narrow)(const float *y, Py_ssize_t n, uint16_t *halves);
    void (*shorten)(const float *y, Py_ssize_t n, uint16_t *halves);
    void (*turn)(const float *rows, float *columns);
} routines;

INLINE void some_pairs(const uint8_t *data, Py_ssize_t start, Py_ssize_t n, const float *table, float *y)
{
    for (Py_ssize_t i = start; i < n; i++)
        y[i] = table[i % 2 ? data[i / 2] >> 4 : data[i / 2] & 15];
}

INLINE void some_widened(const uint16_t *halves, Py_ssize_t start, Py_ssize_t n, float *y)
{
    for (Py_ssize_t i = start; i < n; i++)
        y[i] = float_of(bits_of_half(halves[i]));
}

INLINE void some_narrowed(const float *y, Py_ssize_t start, Py_ssize_t n, uint16_t *halves)
{
    for (Py_ssize_t i = start; i < n; i++)
        halves[i] = half_of(bits_of(y[i]));
}

INLINE void some_shortened(const float *y, Py_ssize_t start, Py_ssize_t n, uint16_t *halves)
{
    for (Py_ssize_t i = start; i < n; i++)
        halves[i] = bfloat_of(bits_of(y[i]));
}

/* Codes of 6 bits, four in three bytes, as one a byte; n may end within a group, whose bytes are all there. */
INLINE void codes_of_sixes(const uint8_t *data, Py_ssize_t n, uint8_t *codes)
{
    for (Py_ssize_t i = 0; i < n; i += 4, data += 3) {
        const uint32_t w = data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16;
        const uint32_t spread = (w & 0x3fu) | (w & 0xfc0u) << 2 | (w & 0x3f000u) << 4 | (w & 0xfc0000u) << 6;
        memcpy(codes + i, &spread, 4);
    }
}

#if defined(HAS_X86)
/* Bytes up to the next multiple of `line`, in steps of 16 where `to` is one of 16. */
INLINE Py_ssize_t up_to(char **to, const char **from, Py_ssize_t n, Py_ssize_t line)
{
    const Py_ssize_t first = -(intptr_t)*to & 15, odd = first < n ? first : n;
    memcpy(*to, *from, (size_t)odd);
    *to += odd, *from += odd, n -= odd;
    for (; n >= 16 && (intptr_t)*to & (line - 1); *to += 16, *from += 16, n -= 16)
        _mm_stream_si128((__m128i *)*to, _mm_loadu_si128((const __m128i *)*from));
    return n;
}

/* 16 codes of 8 bytes, one a byte. */
INLINE __m128i halves_of_bytes(const uint8_t *data)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)data), low = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
}
#endif

#endif
