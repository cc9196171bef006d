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

/* Values of FP8 and FP6 codes: the FP16 with the same bits, which is a power of two, the lift, smaller. */
#define E4M3_LIFT 0x1p8f
#define E2M3_LIFT 0x1p14f
#define E3M2_LIFT 0x1p12f
#define IS_HALF(kind) ((kind) >= E4M3 && (kind) <= E3M2)

#define IS_SIX(kind) ((kind) == E2M3 || (kind) == E3M2)

static inline const uint8_t *order_of(int kind)
{
    return kind == TABLE4 ? order_of_nibbles : IS_HALF(kind) ? order_of_bytes : NULL;
}

static inline float lift_of(int kind)
{
    return kind == E4M3 ? E4M3_LIFT : kind == E2M3 ? E2M3_LIFT : kind == E3M2 ? E3M2_LIFT : 1;
}

#endif
