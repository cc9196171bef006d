/* Codes of few bits in words: spread to as many as a byte or half of it has; and records of scales. */

#ifndef BRECCIA_CODES_IN_WORDS_H
#define BRECCIA_CODES_IN_WORDS_H

#include "bits.h"
#include "instructions.h"

/* Bytes of `k` codes of that many bits: those that share bytes are whole groups. */
INLINE Py_ssize_t stored_bytes(Py_ssize_t k, int width)
{
    const int group = width % 2 ? 8 : width % 4 ? 4 : width % 8 ? 2 : 1;
    return (k + group - 1) / group * (group * width / 8);
}

/* The bits of `width` low bits in each of `bits` bits of a word. */
INLINE uint64_t low_bits(int width, int bits)
{
    return ((1u << width) - 1) * (bits == 4 ? 0x1111111111111111u : 0x0101010101010101u);
}

INLINE uint64_t spread_codes(uint64_t u, int width, int bits)
{
    uint64_t found = 0;
    for (int i = 0; i < 64 / bits; i++, u >>= width)
        found |= (u & ((1u << width) - 1)) << bits * i;
    return found;
}

/* `spread_codes`, or an instruction for it. */
typedef uint64_t (*spreader)(uint64_t, int, int);

/* How scales are stored as records: a float, then a code for each of some blocks, an integer by which it is multiplied. */
typedef struct {
    int bits;          /* of a code; 0 where floats are stored alone */
    int flip;          /* of signed codes, their highest bit; else 0 */
    Py_ssize_t each;   /* codes of a record */
    Py_ssize_t bytes;  /* of a record */
    Py_ssize_t blocks; /* codes of a row, which may end within a record */
} coding;

/* Eight codes from `at` on, bytes before `end`, one to a byte. `from` is where their record begins. */
INLINE uint64_t eight_codes(
    const uint8_t *from, const uint8_t *at, const uint8_t *end, int bits, const spreader spread)
{
    uint64_t u = 0;
    if (end - at >= 8)
        memcpy(&u, at, 8);
    else if (end - from >= 8) {
        memcpy(&u, end - 8, 8);
        u >>= 8 * (8 - (end - at));
    } else
        memcpy(&u, at, (size_t)(end - at));
    return spread(u, bits, 8);
}

/* The first `count` numbers of a record, whose codes begin after `head` bytes, times `base`; written in whole eights. */
INLINE void numbers_of_record(
    const coding *c, const uint8_t *record, int head, float base, Py_ssize_t count, const spreader spread, float *y)
{
    const uint8_t *at = record + head;
    for (Py_ssize_t i = 0; i < count; i += 8, at += c->bits) {
        const uint64_t u = eight_codes(record, at, record + c->bytes, c->bits, spread);
        uint8_t codes[8];
        memcpy(codes, &u, 8);
        for (int j = 0; j < 8; j++)
            y[i + j] = (float)((codes[j] ^ c->flip) - c->flip) * base;
    }
}

#if defined(HAS_X86)
/* For functions that are compiled for BMI2. */
#define SPREAD_BY_BMI2                                                                                                      \
    INLINE uint64_t spread_by_bmi2(uint64_t u, int width, int bits)                                                         \
    {                                                                                                                       \
        return _pdep_u64(u, low_bits(width, bits));                                                                         \
    }
#endif

#endif
