/* What instruction sets do in their own ways. */

#ifndef BRECCIA_DECODING_ROUTINES_H
#define BRECCIA_DECODING_ROUTINES_H

#include "decoding.h"

/* What versions do with instructions of their own: FP32 numbers of pairs of 4-bit codes, the first in the low half, by a table of 16
   numbers; FP16 as FP32; and FP32 as FP16 and as BF16, where NaNs are quiet. `strip` writes the first of n numbers in the dtype
   of the result, from registers, and returns how many: those of usual blocks without special numbers; past the caches with
   `stream`, for which `to` is a multiple of 64. `past` copies n bytes past the caches. repeat: for each of n numbers the item of
   its block of k < LANES, of which the first has `left` numbers; items and `to` have room for LANES more. turn: the transpose of
   a square of numbers, whose rows are `STRIP` numbers apart; of the transpose, `TALL`. */
typedef struct {
    Py_ssize_t (*strip)(const task *, const element *, const factors *, place, const uint8_t *, Py_ssize_t n, int kind,
        int stream, void *to);
    void (*past)(char *to, const char *from, Py_ssize_t n);
    void (*pairs)(const uint8_t *data, Py_ssize_t n, const float *table, float *y);
    void (*widen)(const uint16_t *halves, Py_ssize_t n, float *y);
    void (*narrow)(const float *y, Py_ssize_t n, uint16_t *halves);
    void (*shorten)(const float *y, Py_ssize_t n, uint16_t *halves);
    void (*repeat)(const float *items, Py_ssize_t k, Py_ssize_t left, Py_ssize_t n, float *to);
    void (*turn)(const float *rows, float *columns);
    spreader spread;
} routines;

/* How many blocks of k have some of n numbers, where the first has `left` numbers from there on. */
INLINE Py_ssize_t blocks_of(Py_ssize_t n, Py_ssize_t k, Py_ssize_t left)
{
    return n > left ? (n - left + k - 1) / k + 1 : 1;
}

/* The scales of blocks as FP32. */
INLINE void scales_of(const factors *f, Py_ssize_t block, Py_ssize_t count, float *items)
{
    if (f->of_bytes)
        for (Py_ssize_t i = 0; i < count; i++)
            items[i] = f->of_bytes[(uint8_t)f->scale[block + i]];
    else
        memcpy(items, f->scale + 4 * block, 4 * (size_t)count);
}

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

/* n codes of few bits, of which whole eights begin in a byte: those of up to 4 bits two a byte, others one. n may end within bytes
   that are all there; `to` has room for whole eights. */
INLINE void codes_spread(const uint8_t *data, Py_ssize_t n, const int bits, const spreader spread, uint8_t *to)
{
    const int field = bits <= 4 ? 4 : 8, each = 64 / field * bits / 8; /* bytes of a word's codes */
    for (Py_ssize_t left = stored_bytes(n, bits); left > 0; left -= each, data += each, to += 8) {
        uint64_t u = 0;
        if (left >= 8)
            memcpy(&u, data, 8);
        else
            memcpy(&u, data, (size_t)left);
        u = spread(u, bits, field);
        memcpy(to, &u, 8);
    }
}

/* Codes of 6 bits, four in three bytes, as one a byte. */
INLINE void sixes_spread(const uint8_t *data, Py_ssize_t n, uint8_t *to)
{
    for (Py_ssize_t i = 0; i < n; i += 4, data += 3) {
        const uint32_t w = data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16;
        const uint32_t spread = (w & 0x3fu) | (w & 0xfc0u) << 2 | (w & 0x3f000u) << 4 | (w & 0xfc0000u) << 6;
        memcpy(to + i, &spread, 4);
    }
}

/* Are codes spread before they are decoded? */
INLINE int is_spread(int bits)
{
    return bits != 4 && bits != 8;
}

OUTLINE void spread_in_room(const uint8_t *data, Py_ssize_t n, int bits, const spreader spread, uint8_t *room)
{
    switch (bits) { /* each compiled for its width */
    case 1: codes_spread(data, n, 1, spread, room); break;
    case 2: codes_spread(data, n, 2, spread, room); break;
    case 3: codes_spread(data, n, 3, spread, room); break;
    case 5: codes_spread(data, n, 5, spread, room); break;
    case 6: sixes_spread(data, n, room); break;
    default: codes_spread(data, n, 7, spread, room);
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
