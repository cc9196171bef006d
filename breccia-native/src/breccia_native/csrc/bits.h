/* FP32 numbers as their bits. */

#ifndef BRECCIA_BITS_H
#define BRECCIA_BITS_H

#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define INLINE static __forceinline
#else
#define INLINE static inline __attribute__((always_inline))
#endif

/* A function that a source file has once, where it would be copied into many. */
#if defined(__GNUC__)
#define OUTLINE static __attribute__((noinline, unused))
#else
#define OUTLINE static
#endif

INLINE uint32_t bits_of(float y)
{
    uint32_t u;
    memcpy(&u, &y, 4);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float y;
    memcpy(&y, &u, 4);
    return y;
}

#endif
