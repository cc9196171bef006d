/* What the products by AVX2 and by AVX-512 share. */

#ifndef BRECCIA_X86_H
#define BRECCIA_X86_H

#include "products.h"
#include "transpose.h"

/* Keeps instructions on either side of it apart. */
#define AFTER(v) __asm__ volatile("" : "+v"(v))

/* The order of activations for codes in registers.

   Vector i of a chunk of 4-bit codes has code SPAN j + i in lane j, which one shift brings to the low bits of each lane.
   Of FP8 and FP6, vectors 2i and 2i + 1 have the even and the odd of 32 codes, which are halves of FP16 numbers. */
static const uint8_t order_of_nibbles[CHUNK] = {
#define LANES_OF(i) i, 8 + i, 16 + i, 24 + i, 32 + i, 40 + i, 48 + i, 56 + i, 64 + i, \
        72 + i, 80 + i, 88 + i, 96 + i, 104 + i, 112 + i, 120 + i
    LANES_OF(0), LANES_OF(1), LANES_OF(2), LANES_OF(3), LANES_OF(4), LANES_OF(5), LANES_OF(6), LANES_OF(7)};
static const uint8_t order_of_bytes[CHUNK] = {
#define EVEN_OF(i) i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, i + 16, \
        i + 18, i + 20, i + 22, i + 24, i + 26, i + 28, i + 30
    EVEN_OF(0), EVEN_OF(1), EVEN_OF(32), EVEN_OF(33), EVEN_OF(64), EVEN_OF(65), EVEN_OF(96), EVEN_OF(97)};

/* Of 4-bit codes in short blocks of 16, lanes 2i and 2i + 1 of a vector have the codes i and 8 + i. In blocks of 32, lanes 4i to
   4i + 3 have the codes i, 8 + i, 16 + i and 24 + i; those of the second vector, 4 more. */
static const uint8_t order_of_sixteens[CHUNK] = {
#define PAIR_OF(i) i, 8 + i
#define SIXTEEN_OF(i) PAIR_OF(i), PAIR_OF(1 + i), PAIR_OF(2 + i), PAIR_OF(3 + i), PAIR_OF(4 + i), PAIR_OF(5 + i), PAIR_OF(6 + i), \
        PAIR_OF(7 + i)
    SIXTEEN_OF(0), SIXTEEN_OF(16), SIXTEEN_OF(32), SIXTEEN_OF(48), SIXTEEN_OF(64), SIXTEEN_OF(80), SIXTEEN_OF(96), SIXTEEN_OF(112)};
static const uint8_t order_of_thirty_twos[CHUNK] = {
#define FOUR_OF(i) i, 8 + i, 16 + i, 24 + i
#define THIRTY_TWO_OF(i) FOUR_OF(i), FOUR_OF(1 + i), FOUR_OF(2 + i), FOUR_OF(3 + i), FOUR_OF(4 + i), FOUR_OF(5 + i), FOUR_OF(6 + i), \
        FOUR_OF(7 + i)
    THIRTY_TWO_OF(0), THIRTY_TWO_OF(32), THIRTY_TWO_OF(64), THIRTY_TWO_OF(96)};

/* Values of FP8 and FP6 codes: the FP16 with the same bits, which is a power of two, the lift, smaller. */
#define E4M3_LIFT 0x1p8f
#define E2M3_LIFT 0x1p14f
#define E3M2_LIFT 0x1p12f
#define IS_HALF(kind) ((kind) >= E4M3 && (kind) <= E3M2)

#define IS_SIX(kind) ((kind) == E2M3 || (kind) == E3M2)

static inline const uint8_t *order_of(const weight *w)
{
    const int kind = w->codes.kind;
    if (w->short_block)
        return kind != TABLE4 || w->narrow ? NULL : w->short_block == 16 ? order_of_sixteens : order_of_thirty_twos;
    return kind == TABLE4 ? order_of_nibbles : IS_HALF(kind) ? order_of_bytes : NULL;
}

static inline float lift_of(int kind)
{
    return kind == E4M3 ? E4M3_LIFT : kind == E2M3 ? E2M3_LIFT : kind == E3M2 ? E3M2_LIFT : 1;
}

SPREAD_BY_BMI2

/* `decode_records`, eight numbers at a time. */
OUTLINE void records_by_bmi2(const numbers *a, Py_ssize_t start, Py_ssize_t n, float *y)
{
    const coding c = a->codes;
    const __m256i flip = _mm256_set1_epi32(c.flip);
    const uint8_t *record = a->items + bytes_of_scales(a, start);
    for (const float *const last = y + n; y < last;)
        for (Py_ssize_t left = c.blocks; left > 0; left -= c.each, record += c.bytes) {
            const uint8_t *at = record + kind_bits[a->kind] / 8;
            uint16_t half;
            memcpy(&half, record, 2);
            const __m256 base = a->kind == F16 ? _mm256_cvtph_ps(_mm_set1_epi16((short)half)) : _mm256_set1_ps(float_at(a->kind, record));
            for (Py_ssize_t i = left < c.each ? left : c.each; i > 0; i -= 8, at += c.bits) {
                const uint64_t u = eight_codes(record, at, record + c.bytes, c.bits, spread_by_bmi2);
                const __m256i code = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)u));
                const __m256 found = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_xor_si256(code, flip), flip)), base);
                if (i >= 8)
                    _mm256_storeu_ps(y, found);
                else {
                    float some[8];
                    _mm256_storeu_ps(some, found);
                    memcpy(y, some, 4 * (size_t)i);
                }
                y += i < 8 ? i : 8;
            }
        }
}

#endif
