/* Numbers of a cast as FP32: loaded from matrices in any order, and stored as 16-bit floats. */

#ifndef BRECCIA_LOADS_H
#define BRECCIA_LOADS_H

#include "casts.h"

#if defined(BY_AVX512)
#include "transpose.h"
#endif

#if defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 20")
#else
#define UNROLL
#endif

INLINE uint32_t number_at(const char *x, int kind)
{
    uint32_t found;
    row_of(x, 1, kind, &found);
    return found;
}

/* A square whose side is a cache line of FP32. */
#define SIDE 16

#if defined(BY_AVX512)
INLINE void square_of_numbers(const char *x, Py_ssize_t stride, int kind, uint32_t *found, Py_ssize_t columns)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    uint32_t row[SIDE];
    __m512 v[SIDE];
    for (int j = 0; j < SIDE; j++)
        PREFETCH(x + j * stride + 4 * SIDE * size);
    UNROLL for (int j = 0; j < SIDE; j++)
        if (kind == FP32)
            v[j] = _mm512_loadu_ps(x + j * stride);
        else {
            row_of(x + j * stride, SIDE, kind, row);
            v[j] = _mm512_loadu_ps(row);
        }
    transposed(v);
    UNROLL for (int i = 0; i < SIDE; i++) _mm512_storeu_ps(found + i * columns, v[i]);
}
#else
/* The transpose of SIDE rows of SIDE adjacent numbers, `stride` bytes apart. Four squares later ones are prefetched. */
INLINE void square_of_numbers(const char *x, Py_ssize_t stride, int kind, uint32_t *found, Py_ssize_t columns)
{
    uint32_t tile[SIDE][SIDE];
    for (int j = 0; j < SIDE; j++)
        PREFETCH(x + j * stride + 4 * SIDE * (kind == FP32 ? 4 : 2));
    for (int j = 0; j < SIDE; j++)
        row_of(x + j * stride, SIDE, kind, tile[j]);
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++)
            found[i * columns + j] = tile[j][i];
}
#endif

/* FP32 bits of a matrix in rows of `columns`. The rest of each row, and further rows, are not written. */
INLINE void numbers_of(matrix x, uint32_t *found, Py_ssize_t columns)
{
    const Py_ssize_t size = x.kind == FP32 ? 4 : 2;
    if (x.along == size) {
        for (Py_ssize_t r = 0; r < x.rows; r++)
            row_of(x.at + r * x.down, x.columns, x.kind, found + r * columns);
        return;
    }
    const Py_ssize_t squares = x.down == size ? x.rows / SIDE * SIDE : 0, across = x.columns / SIDE * SIDE;
    for (Py_ssize_t c = 0; c < across; c += SIDE)
        for (Py_ssize_t r = 0; r < squares; r += SIDE)
            square_of_numbers(x.at + r * x.down + c * x.along, x.along, x.kind, found + r * columns + c, columns);
    for (Py_ssize_t r = 0; r < x.rows; r++)
        for (Py_ssize_t c = r < squares ? across : 0; c < x.columns; c++)
            found[r * columns + c] = number_at(x.at + r * x.down + c * x.along, x.kind);
}

/* Numbers converted or scaled at once: they stay in the L1 cache. */
#define STRIP 256

/* While numbers are read in the order of memory, what comes AHEAD bytes later is prefetched. Not along columns: that would be
   the numbers of other columns (measured: `extremes` takes 1.4 times as long, codes 1.2 times). */
#define AHEAD 8192

INLINE void fetch_ahead(const char *x, Py_ssize_t bytes)
{
    for (Py_ssize_t i = 0; i < bytes; i += 64)
        PREFETCH(x + AHEAD + i);
}

/* Whether the instruction set widens FP16. */
#if defined(BY_AVX512) || defined(BY_AVX2)
enum { WIDENS = 1 };
#else
enum { WIDENS = 0 };
#endif

#if defined(BY_AVX512)
static void widened_halves(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + i))));
    for (; i < n; i++)
        y[i] = float_of(bits_of_half(halves[i]));
}
#elif defined(BY_AVX2)
static void widened_halves(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    for (; i < n; i++)
        y[i] = float_of(bits_of_half(halves[i]));
}
#else
#define widened_halves NULL
#endif

/* FP32 numbers start .. start + n, n <= STRIP, of x, possibly in `room`. */
INLINE const float *strip_of(const char *x, int kind, Py_ssize_t start, Py_ssize_t n, widener widen, float *room)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    x += start * size;
    if (kind == FP32)
        return (const float *)x;
    if (kind == FP16 && widen) {
        widen((const uint16_t *)x, n, room);
        return room;
    }
    uint32_t found[STRIP];
    row_of(x, n, kind, found);
    memcpy(room, found, 4 * (size_t)n);
    return room;
}

/* -------------------------------------------------------------------------------------------------- functions */

static void load(matrix x, uint32_t *found, Py_ssize_t columns)
{
    switch (x.kind) { /* each compiled for its kind */
    case FP32:
        x.kind = FP32;
        numbers_of(x, found, columns);
        break;
    case BF16:
        x.kind = BF16;
        numbers_of(x, found, columns);
        break;
    default:
        x.kind = FP16;
        numbers_of(x, found, columns);
    }
}

static void store(const uint32_t *x, Py_ssize_t n, int kind, uint16_t *found)
{
    if (kind == BF16)
        halves_of(x, n, BF16, found);
    else
        halves_of(x, n, FP16, found);
}

#endif
