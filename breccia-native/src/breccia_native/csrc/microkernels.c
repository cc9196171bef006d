/* Microkernels of a cast: numbers as FP32, the largest magnitude of each block, and codes of scaled numbers.

   They write the bytes that breccia/kernels/numpy/ writes, by the same arithmetic. FP32 additions round to codes, so contraction
   into fused multiply-adds and reassociation must stay off (see pyproject.toml).
   Every function takes contiguous buffers, checks their sizes, and releases the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "numbers.h"
#include "versions.h"

#if defined(X86_VERSIONS)
#include "transpose.h"
#endif

#if defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 20")
#define PREFETCH(at) __builtin_prefetch(at)
enum { LANES = 16, MOST_STREAMS = 8 };
typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t unaligned_lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#else
#define UNROLL
#define PREFETCH(at)
enum { LANES = 1, MOST_STREAMS = 1 };
typedef uint32_t lanes;
typedef uint32_t unaligned_lanes;
#endif

INLINE uint32_t number_at(const char *x, int kind)
{
    uint32_t found;
    row_of(x, 1, kind, &found);
    return found;
}

/* A square whose side is a cache line of FP32. */
#define SIDE 16

/* The transpose of SIDE rows of SIDE adjacent numbers, `stride` bytes apart. Four squares later ones are prefetched. */
INLINE void square_of(const char *x, Py_ssize_t stride, int kind, uint32_t *found, Py_ssize_t columns)
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

typedef void square(const char *x, Py_ssize_t stride, int kind, uint32_t *found, Py_ssize_t columns);

#define baseline_square square_of
#if defined(X86_VERSIONS)
#define avx2_square square_of

FOR_AVX512 INLINE void avx512_square(const char *x, Py_ssize_t stride, int kind, uint32_t *found, Py_ssize_t columns)
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
#endif

/* A matrix in memory: strides in bytes. */
typedef struct {
    const char *at;
    Py_ssize_t rows, columns, down, along;
    int kind;
} matrix;

/* FP32 bits of a matrix in rows of `columns`. The rest of each row, and further rows, are not written. */
INLINE void numbers_of(matrix x, square *of_square, uint32_t *found, Py_ssize_t columns)
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
            of_square(x.at + r * x.down + c * x.along, x.along, x.kind, found + r * columns + c, columns);
    for (Py_ssize_t r = 0; r < x.rows; r++)
        for (Py_ssize_t c = r < squares ? across : 0; c < x.columns; c++)
            found[r * columns + c] = number_at(x.at + r * x.down + c * x.along, x.kind);
}

/* -------------------------------------------------------------------------------------------------- amax */

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

#if defined(X86_VERSIONS)
/* Magnitudes of 16 numbers, those of FP16 as they are. */
FOR_AVX512 INLINE __m512i magnitudes_at(const char *x, int kind)
{
    if (kind == FP32)
        return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32((int)MAGNITUDE));
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    const __m512i most = _mm512_and_si512(wide, _mm512_set1_epi32(0x7fff));
    return kind == BF16 ? _mm512_slli_epi32(most, 16) : most;
}

/* `largest_of_each` for multiples of 16: vectors of 16 blocks are reduced together, by 2 shuffles a block in place of 4. */
FOR_AVX512 INLINE void largest_by_avx512(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, uint32_t *amax)
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
FOR_AVX512 static void lines_by_avx512(const char *x, Py_ssize_t blocks, int kind, uint32_t *amax)
{
    switch (kind) {
    case FP32: largest_by_avx512(x, blocks, 16, FP32, amax); break;
    case BF16: largest_by_avx512(x, blocks, 32, BF16, amax); break;
    default: largest_by_avx512(x, blocks, 32, FP16, amax);
    }
}
#endif

/* Loops over the formats' block sizes have a length known at compile time. of_lines: of blocks of 64 bytes; or NULL. */
INLINE void amax_of(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind,
    void (*const of_lines)(const char *, Py_ssize_t, int, uint32_t *), uint32_t *amax)
{
    if (of_lines && k * (kind == FP32 ? 4 : 2) == 64) {
        of_lines(x, blocks, kind, amax);
        return;
    }
    switch (k) {
    case 16: largest_of_each(x, blocks, 16, kind, amax); break;
    case 32: largest_of_each(x, blocks, 32, kind, amax); break;
    case 128: largest_of_each(x, blocks, 128, kind, amax); break;
    default: largest_of_each(x, blocks, k, kind, amax);
    }
}

/* Numbers converted or scaled at once: they stay in the L1 cache. */
#define STRIP 256

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

/* While numbers are read in the order of memory, what comes AHEAD bytes later is prefetched. Not along columns: that would be
   the numbers of other columns (measured: `extremes` takes 1.4 times as long, codes 1.2 times). */
#define AHEAD 8192

INLINE void fetch_ahead(const char *x, Py_ssize_t bytes)
{
    for (Py_ssize_t i = 0; i < bytes; i += 64)
        PREFETCH(x + AHEAD + i);
}

/* FP16 as FP32, by the instructions of a version; baseline has none. */
typedef void (*widener)(const uint16_t *halves, Py_ssize_t n, float *y);

#if defined(X86_VERSIONS)
FOR_AVX2 static void widened_by_avx2(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    for (; i < n; i++)
        y[i] = float_of(bits_of_half(halves[i]));
}

FOR_AVX512 static void widened_by_avx512(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + i))));
    for (; i < n; i++)
        y[i] = float_of(bits_of_half(halves[i]));
}
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

/* -------------------------------------------------------------------------------------------------- random words */

#define ROTATED(y, r) (((y) << (r)) | ((y) >> (32 - (r))))

/* First words of Threefry-2x32 with 20 rounds, for counters that have the same high half: LANES of each of some streams. A word is
   a chain of 50 instructions that wait for each other; where there are registers for several streams, these keep a processor busy. */
INLINE void words_together(const int streams, const uint32_t key[3], uint32_t low, uint32_t high, const uint32_t *positions, uint32_t *found)
{
    static const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const uint32_t same = high + key[1]; /* the second half is that of all words until the first round ends */
    const lanes position = *(const unaligned_lanes *)positions;
    lanes x[MOST_STREAMS], y[MOST_STREAMS];
    UNROLL for (int s = 0; s < streams; s++) {
        x[s] = position + (low + key[0] + same + LANES * (uint32_t)s);
        y[s] = x[s] ^ ROTATED(same, rotations[0]);
    }
    UNROLL for (int r = 1; r < 20; r++) {
        UNROLL for (int s = 0; s < streams; s++) {
            x[s] += y[s];
            y[s] = ROTATED(y[s], rotations[r % 8]) ^ x[s];
            if (r % 4 == 3) {
                x[s] += key[(r / 4 + 1) % 3];
                y[s] += key[(r / 4 + 2) % 3] + (uint32_t)(r / 4 + 1);
            }
        }
    }
    UNROLL for (int s = 0; s < streams; s++) *(unaligned_lanes *)(found + LANES * s) = x[s];
}

/* The words of counters first .. first + n (docs/spec/numerics.md, section 5.5). */
INLINE void words_of(const int most, uint32_t low, uint32_t high, uint64_t first, Py_ssize_t n, uint32_t *found)
{
    const uint32_t key[3] = {low, high, 0x1BD11BDAu ^ low ^ high};
    const int streams = most < MOST_STREAMS ? most : MOST_STREAMS;
    const Py_ssize_t together = streams * LANES;
    static const uint32_t position[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (Py_ssize_t i = 0, run; i < n; i += run) { /* the high half of a counter is the same within a run */
        const uint64_t at = first + (uint64_t)i, to_carry = (1ull << 32) - (at & 0xffffffffu);
        run = (uint64_t)(n - i) < to_carry ? n - i : (Py_ssize_t)to_carry;
        Py_ssize_t j = 0;
        for (; j + together <= run; j += together)
            words_together(streams, key, (uint32_t)at + (uint32_t)j, (uint32_t)(at >> 32), position, found + i + j);
        if (j < run) {
            uint32_t rest[MOST_STREAMS * LANES];
            words_together(streams, key, (uint32_t)at + (uint32_t)j, (uint32_t)(at >> 32), position, rest);
            memcpy(found + i + j, rest, 4 * (size_t)(run - j));
        }
    }
}

/* Where the random words of stochastic rounding come from: numbers in rows of `width`, of which each begins `stride` elements of the
   whole tensor after the one before. Rounding is to nearest where width is 0. */
typedef struct {
    uint64_t seed, first;
    Py_ssize_t width, stride;
    void (*words)(uint32_t, uint32_t, uint64_t, Py_ssize_t, uint32_t *); /* `words_of` of the version in use */
} dither;

/* The words of numbers start .. start + n. */
INLINE void words_at(dither d, Py_ssize_t start, Py_ssize_t n, uint32_t *found)
{
    for (Py_ssize_t i = 0, run, r = start / d.width, c = start % d.width; i < n; i += run, r++, c = 0) {
        run = d.width - c < n - i ? d.width - c : n - i;
        d.words((uint32_t)d.seed, (uint32_t)(d.seed >> 32), d.first + (uint64_t)(r * d.stride + c), run, found + i);
    }
}

/* 1 where the first 30 bits of a fraction, 0 <= fraction <= 1, and of a word carry when they are added; else 0. */
INLINE int32_t carry_of(float fraction, uint32_t word)
{
    return ((int32_t)(fraction * 0x1p30f) + (int32_t)(word >> 2)) >> 30;
}

/* y >= 0, rounded to one of the two integers beside it. */
INLINE int32_t dithered(float y, uint32_t word)
{
    const int32_t below = (int32_t)y;
    return below + carry_of(y - (float)below, word);
}

/* A zero of the same sign, if y is below 2^-126. */
INLINE float flushed(float y)
{
    const uint32_t u = bits_of(y);
    return float_of((int32_t)(u & MAGNITUDE) < (int32_t)NORMAL ? u & ~MAGNITUDE : u);
}

/* -------------------------------------------------------------------------------------------------- codes */

/* Number i of x, which is of the kind. */
INLINE float at(const char *x, int kind, Py_ssize_t i)
{
    float y;
    uint16_t half;
    if (kind == FP32) {
        memcpy(&y, x + 4 * i, 4);
        return y;
    }
    memcpy(&half, x + 2 * i, 2);
    return float_of(kind == BF16 ? (uint32_t)half << 16 : bits_of_half(half));
}

/* y = n numbers of x times a factor, or over it. flushes: whether those below 2^-126 become zeros before. */
INLINE void times(const char *x, int kind, int flushes, float by, Py_ssize_t n, int divides, float *y)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        const float number = flushes ? flushed(at(x, kind, i)) : at(x, kind, i);
        y[i] = divides ? number / by : number * by;
    }
}

/* Numbers of a cast, in blocks of k: each times the inverse scale of its block, or divided by its scale; +0 where that is 0.
   across: 0, or numbers are in rows of as many, and blocks are k rows of a column; see `row_at`. */
typedef struct {
    const char *x;
    int kind, divides;
    Py_ssize_t n, k, across;
    const float *inverse;
    dither random;
    widener widen; /* of the version in use, or NULL */
    int packed;    /* whether codes are written two a byte */
} numbers;

INLINE void pairs_of(const uint8_t *codes, Py_ssize_t n, uint8_t *data)
{
    for (Py_ssize_t i = 0; i < n; i++)
        data[i] = (uint8_t)(codes[2 * i] | (codes[2 * i + 1] << 4));
}

/* Row r of numbers whose blocks are columns: each number has a block of its own. All numbers, if blocks are along rows. */
INLINE numbers row_at(const numbers *all, Py_ssize_t r)
{
    numbers row = *all;
    if (!all->across)
        return row;
    row.x += r * all->across * (all->kind == FP32 ? 4 : 2);
    row.inverse += r / all->k * all->across;
    row.n = all->across;
    row.k = 1;
    return row;
}

/* The position of the next number in its block of k: the inverse scale, and how many numbers of the block are left. */
typedef struct {
    const float *inverse;
    Py_ssize_t left;
} place;

#if defined(X86_VERSIONS)
/* n numbers of FP16 times a scale, or over it. */
FOR_AVX512 INLINE void halves_times(const uint16_t *x, float by, Py_ssize_t n, int divides, float *y)
{
    const __m512 factor = _mm512_set1_ps(by);
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i)));
        _mm512_storeu_ps(y + i, divides ? _mm512_div_ps(wide, factor) : _mm512_mul_ps(wide, factor));
    }
    for (; i < n; i++)
        y[i] = divides ? float_of(bits_of_half(x[i])) / by : float_of(bits_of_half(x[i])) * by;
}

/* `scaled_of` for FP16. */
FOR_AVX512 static void halves_scaled_by_avx512(const uint16_t *x, Py_ssize_t k, Py_ssize_t n, int divides, place *next, float *y)
{
    for (Py_ssize_t i = 0, length; i < n; i += length) {
        const float by = *next->inverse;
        length = next->left < n - i ? next->left : n - i;
        if (by == 0)
            memset(y + i, 0, 4 * (size_t)length);
        else if (length == 32)
            halves_times(x + i, by, 32, divides, y + i);
        else
            halves_times(x + i, by, length, divides, y + i);
        next->left -= length;
        if (next->left == 0) {
            next->inverse++;
            next->left = k;
        }
    }
}
#endif

/* y = n numbers of x times the inverse scales of their blocks. Loops over usual blocks have a length known at compile time. */
INLINE void scaled_of(const char *x, int kind, int flushes, Py_ssize_t k, Py_ssize_t n, int divides, place *next, float *y)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    if (k == 1) {
        const float *by = next->inverse;
        for (Py_ssize_t i = 0; i < n; i++) {
            float found;
            times(x + i * size, kind, flushes, by[i], 1, divides, &found);
            y[i] = by[i] == 0 ? 0.0f : found;
        }
        next->inverse += n;
        return;
    }
    for (Py_ssize_t i = 0, length; i < n; i += length) {
        const float by = *next->inverse;
        length = next->left < n - i ? next->left : n - i;
        if (by == 0)
            memset(y + i, 0, 4 * (size_t)length);
        else if (length == 16)
            times(x + i * size, kind, flushes, by, 16, divides, y + i);
        else if (length == 32)
            times(x + i * size, kind, flushes, by, 32, divides, y + i);
        else
            times(x + i * size, kind, flushes, by, length, divides, y + i);
        next->left -= length;
        if (next->left == 0) {
            next->inverse++;
            next->left = k;
        }
    }
}

/* y = the next n scaled numbers. */
INLINE void scaled(const numbers *all, Py_ssize_t start, Py_ssize_t n, int divides, place *next, float *y)
{
    const Py_ssize_t size = all->kind == FP32 ? 4 : 2;
    const char *x = all->x + start * size;
    float room[STRIP];
    if (!all->across)
        fetch_ahead(x, n * size);
    if (all->random.width > 0) {
        x = (const char *)strip_of(all->x, all->kind, start, n, all->widen, room);
        scaled_of(x, FP32, 1, all->k, n, divides, next, y);
        return;
    }
#if defined(X86_VERSIONS)
    if (all->kind == FP16 && all->widen == widened_by_avx512 && all->k > 1) {
        halves_scaled_by_avx512((const uint16_t *)x, all->k, n, divides, next, y);
        return;
    }
#endif
    if (all->kind == FP16 && all->widen) {
        all->widen((const uint16_t *)x, n, room);
        scaled_of((const char *)room, FP32, 0, all->k, n, divides, next, y);
        return;
    }
    switch (all->kind) { /* each compiled for its kind */
    case FP32: scaled_of(x, FP32, 0, all->k, n, divides, next, y); break;
    case BF16: scaled_of(x, BF16, 0, all->k, n, divides, next, y); break;
    default: scaled_of(x, FP16, 0, all->k, n, divides, next, y);
    }
}

/* Fields of breccia.kernels.numpy.FloatCodes. */
typedef struct {
    uint32_t floor, lift, largest;
    int shift, sign;
} minifloat;

INLINE void floats_of(const numbers *all, int divides, minifloat f, uint8_t *codes)
{
    float y[STRIP];
    uint32_t found[STRIP], words[STRIP];
    uint8_t room[STRIP];
    /* Less the exponent bits of a binade, these are the bits of 1 over the spacing of its codes. */
    const uint32_t units = (uint32_t)(254 + 23 - f.shift) << 23;
    place next = {all->inverse, all->k};
    for (Py_ssize_t start = 0; start < all->n; start += STRIP) {
        const Py_ssize_t length = all->n - start < STRIP ? all->n - start : STRIP;
        scaled(all, start, length, divides, &next, y);
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

#if defined(X86_VERSIONS)
/* Numbers `i` to `i + 16` of x, in FP32. */
FOR_AVX512 INLINE __m512 vector_at(const char *x, const int kind, Py_ssize_t i)
{
    if (kind == FP32)
        return _mm512_loadu_ps(x + 4 * i);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)(x + 2 * i));
    return kind == FP16 ? _mm512_cvtph_ps(halves) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* 64 numbers to codes of minifloats, one a byte or two: `floats_of` in registers. The numbers have 64 / k inverse scales. */
FOR_AVX512 INLINE void vectors_of_floats(const char *x, const int kind, const int k, const int some_zero, const int packed,
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
FOR_AVX512 INLINE void floats_in_vectors(const numbers *all, const int kind, const int k, const int packed, minifloat f, uint8_t *data)
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

FOR_AVX512 INLINE void floats_by_kind(const numbers *all, const int k, const int packed, minifloat f, uint8_t *data)
{
    switch (all->kind) { /* each compiled for its kind */
    case FP32: floats_in_vectors(all, FP32, k, packed, f, data); break;
    case BF16: floats_in_vectors(all, BF16, k, packed, f, data); break;
    default: floats_in_vectors(all, FP16, k, packed, f, data);
    }
}

/* Codes, to nearest, of blocks of 16, 32 and multiples of 64 numbers, 64 at a time. Returns how many it wrote. */
FOR_AVX512 static Py_ssize_t floats_by_avx512(const numbers *all, minifloat f, uint8_t *data)
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

/* Fields of breccia.kernels.numpy.IntegerCodes. */
typedef struct {
    float low, high, magic;
    uint8_t mask;
} integer;

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

INLINE void integers_of(const numbers *all, int divides, integer f, uint8_t *codes)
{
    float y[STRIP];
    uint32_t found[STRIP], words[STRIP];
    uint8_t room[STRIP];
    const float units = 0x1.8p23f / f.magic;
    place next = {all->inverse, all->k};
    for (Py_ssize_t start = 0; start < all->n; start += STRIP) {
        const Py_ssize_t length = all->n - start < STRIP ? all->n - start : STRIP;
        uint8_t *const to = all->packed ? room : codes + start;
        scaled(all, start, length, divides, &next, y);
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

/* Fields of breccia.kernels.numpy.TableCodes: by position in ascending order the smallest number rounded to the value there, the
   value, and its code; and the code of +0. */
typedef struct {
    const float *starts, *values;
    const uint8_t *order;
    uint8_t zero;
} table;

/* How many of 15 ascending numbers, of which values[0] is none, are at most y: for each of n. If `low`, also the number that y has
   reached, and the next one; the last is its own. */
typedef void (*position_finder)(const float *y, Py_ssize_t n, const float *values, int32_t *found, float *low, float *high);

INLINE void positions_by_comparing(const float *y, Py_ssize_t n, const float *values, int32_t *found, float *low, float *high)
{
    if (!low)
        for (Py_ssize_t i = 0; i < n; i++) {
            int32_t at = 0;
            for (int j = 1; j < 16; j++)
                at += y[i] >= values[j];
            found[i] = at;
        }
    else
        for (Py_ssize_t i = 0; i < n; i++) {
            float below = values[0], above = values[1];
            int32_t at = 0;
            for (int j = 1; j < 16; j++) {
                const int reached = y[i] >= values[j];
                at += reached;
                below = reached ? values[j] : below;
                above = reached ? values[j < 15 ? j + 1 : 15] : above;
            }
            found[i] = at, low[i] = below, high[i] = above;
        }
}

/* The codes that `order` has at n positions. */
typedef void (*position_coder)(const int32_t *positions, Py_ssize_t n, const uint8_t *order, uint8_t *codes);

INLINE void codes_one_by_one(const int32_t *positions, Py_ssize_t n, const uint8_t *order, uint8_t *codes)
{
    for (Py_ssize_t i = 0; i < n; i++)
        codes[i] = order[positions[i]];
}

#if defined(X86_VERSIONS)
FOR_AVX512 INLINE __m512i position_by_halving(__m512 number, __m512 all)
{
    __m512i at = _mm512_setzero_si512();
    for (int step = 8; step; step /= 2) {
        const __m512i next = _mm512_or_si512(at, _mm512_set1_epi32(step));
        at = _mm512_mask_mov_epi32(at, _mm512_cmp_ps_mask(number, _mm512_permutexvar_ps(next, all), _CMP_GE_OQ), next);
    }
    return at;
}

/* Buffers of STRIP numbers, here and below: whole vectors are written. */
FOR_AVX512 INLINE void codes_by_permuting(const int32_t *positions, Py_ssize_t n, const uint8_t *order, uint8_t *codes)
{
    const __m512i all = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)order));
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512i found = _mm512_permutexvar_epi32(_mm512_loadu_si512(positions + i), all);
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(found));
    }
}

FOR_AVX512 INLINE void positions_by_halving(const float *y, Py_ssize_t n, const float *values, int32_t *found, float *low, float *high)
{
    const __m512 all = _mm512_loadu_ps(values);
    for (Py_ssize_t i = 0; i < n; i += 16) {
        const __m512i at = position_by_halving(_mm512_loadu_ps(y + i), all);
        _mm512_storeu_si512(found + i, at);
        if (!low)
            continue;
        const __m512i after = _mm512_min_epi32(_mm512_add_epi32(at, _mm512_set1_epi32(1)), _mm512_set1_epi32(15));
        _mm512_storeu_ps(low + i, _mm512_permutexvar_ps(at, all));
        _mm512_storeu_ps(high + i, _mm512_permutexvar_ps(after, all));
    }
}
#endif

INLINE void tables_of(
    const numbers *all, int divides, table f, const position_finder positions, const position_coder coded, uint8_t *codes)
{
    float y[STRIP], low[STRIP], high[STRIP];
    int32_t found[STRIP];
    uint32_t words[STRIP];
    uint8_t room[STRIP];
    place next = {all->inverse, all->k};
    memset(y, 0, sizeof y); /* `positions` may read whole vectors */
    for (Py_ssize_t start = 0; start < all->n; start += STRIP) {
        const Py_ssize_t length = all->n - start < STRIP ? all->n - start : STRIP;
        const float *inverse = next.inverse;
        Py_ssize_t left = next.left;
        scaled(all, start, length, divides, &next, y);
        if (all->random.width) {
            words_at(all->random, start, length, words);
            for (Py_ssize_t i = 0; i < length; i++)
                y[i] = clamped(y[i], f.values[0], f.values[15]);
            positions(y, length, f.values, found, low, high);
            for (Py_ssize_t i = 0; i < length; i++) {
                const float width = high[i] - low[i], part = (y[i] - low[i]) / (low[i] < high[i] ? width : 1.0f);
                found[i] += carry_of(part < 1.0f ? part : 1.0f, words[i]);
            }
        } else
            positions(y, length, f.starts, found, NULL, NULL);
        coded(found, length, f.order, room);
        if (all->k == 1)
            for (Py_ssize_t i = 0; i < length; i++)
                room[i] = inverse[i] == 0 ? f.zero : room[i];
        else
            for (Py_ssize_t i = 0, run; i < length; i += run, left = all->k, inverse++) { /* +0 where there is no scale */
                run = left < length - i ? left : length - i;
                if (*inverse == 0)
                    memset(room + i, f.zero, (size_t)run);
            }
        if (all->packed)
            pairs_of(room, length / 2, codes + start / 2);
        else
            memcpy(codes + start, room, (size_t)length);
    }
}

/* A writer of codes, for the rows of numbers whose blocks are columns too. */
#define EACH_ROW(call, all, codes)                                                                                          \
    do {                                                                                                                    \
        const Py_ssize_t rows = (all)->across ? (all)->n / (all)->across : 1;                                               \
        for (Py_ssize_t r = 0; r < rows; r++) {                                                                             \
            const numbers row = row_at(all, r), *part = &row;                                                               \
            uint8_t *to = (codes) + r * (all)->across;                                                                      \
            call;                                                                                                           \
        }                                                                                                                   \
    } while (0)

/* What is the same for all numbers of a block: what is subtracted before, and added to codes. */
typedef struct {
    const float *before, *after;
} offsets;

/* n numbers of block b. */
INLINE void block_shifted(
    const float *x, const numbers *all, offsets o, integer f, Py_ssize_t b, const uint32_t *words, Py_ssize_t n, uint8_t *codes)
{
    const float by = all->inverse[b], before = o.before[b], after = o.after[b], low = f.low - after, high = f.high - after;
    const uint8_t add = (uint8_t)(int32_t)after;
    if (by == 0) {
        memset(codes, 0, (size_t)n);
        return;
    }
    if (words) {
        const float units = 0x1.8p23f / f.magic;
        uint32_t found[STRIP];
        for (Py_ssize_t i = 0; i < n; i++) {
            const float y = flushed(flushed(x[i]) - before) * by;
            found[i] = (uint32_t)dithered_integer(clamped(y, low, high), units, words[i]);
        }
        for (Py_ssize_t i = 0; i < n; i++)
            codes[i] = (uint8_t)((found[i] + add) & f.mask);
    } else
        for (Py_ssize_t i = 0; i < n; i++)
            codes[i] = (uint8_t)((bits_of(clamped((x[i] - before) * by, low, high) + f.magic) + add) & f.mask);
}

/* Numbers in rows of `across`, whose blocks are columns. */
INLINE void shifted_down_of(const numbers *all, offsets o, integer f, uint8_t *codes)
{
    float room[STRIP];
    for (Py_ssize_t r = 0; r < all->n / all->across; r++)
        for (Py_ssize_t start = 0, n; start < all->across; start += n, codes += n) {
            const Py_ssize_t b = r / all->k * all->across + start;
            n = all->across - start < STRIP ? all->across - start : STRIP;
            const float *x = strip_of(all->x, all->kind, r * all->across + start, n, all->widen, room);
            const float *by = all->inverse + b, *before = o.before + b, *after = o.after + b;
            for (Py_ssize_t i = 0; i < n; i++) {
                const float y = clamped((x[i] - before[i]) * by[i], f.low - after[i], f.high - after[i]) + f.magic;
                const uint32_t code = (bits_of(y) + (uint32_t)(int32_t)after[i]) & f.mask;
                codes[i] = (uint8_t)(by[i] == 0 ? 0 : code);
            }
        }
}

INLINE void shifted_of(const numbers *all, offsets o, integer f, uint8_t *codes)
{
    if (all->across) {
        shifted_down_of(all, o, f, codes);
        return;
    }
    float room[STRIP];
    uint32_t words[STRIP];
    const Py_ssize_t k = all->k, whole = k < STRIP ? STRIP / k * k : k, size = all->kind == FP32 ? 4 : 2;
    const uint32_t *drawn = all->random.width ? words : NULL;
    for (Py_ssize_t first = 0; first < all->n; first += whole) { /* some short blocks, or a long one */
        const Py_ssize_t end = whole < all->n - first ? first + whole : all->n;
        for (Py_ssize_t start = first, n; start < end; start += n) {
            n = end - start < STRIP ? end - start : STRIP;
            fetch_ahead(all->x + start * size, n * size);
            const float *x = strip_of(all->x, all->kind, start, n, all->widen, room);
            if (drawn)
                words_at(all->random, start, n, words);
            for (Py_ssize_t i = 0, run; i < n; i += run) {
                run = k < n - i ? k : n - i;
                const uint32_t *own = drawn ? drawn + i : NULL;
                if (run == 32)
                    block_shifted(x + i, all, o, f, (start + i) / k, own, 32, codes + start + i);
                else if (run == 128)
                    block_shifted(x + i, all, o, f, (start + i) / k, own, 128, codes + start + i);
                else
                    block_shifted(x + i, all, o, f, (start + i) / k, own, run, codes + start + i);
            }
        }
    }
}

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
        const numbers all = {(const char *)t, FP32, 0, length, length, 0, &one, {0}};
        floats_of(&all, 0, f, codes + start);
        for (Py_ssize_t i = start; i < start + length; i++)
            inverse[i] = inverses[codes[i]];
    }
}

/* Eight codes of as many bits to that many bytes: gaps between fields are closed in pairs. */
INLINE void eights_of(const uint8_t *codes, Py_ssize_t groups, const int bits, uint8_t *data)
{
    for (Py_ssize_t i = 0; i < groups; i++, codes += 8, data += bits) {
        uint64_t w;
        memcpy(&w, codes, 8);
        for (int field = 8, filled = bits; field < 64; field *= 2, filled *= 2) {
            uint64_t low = 0;
            for (int at = 0; at < 64; at += 2 * field)
                low |= (((uint64_t)1 << filled) - 1) << at;
            w = (w & low) | ((w >> (field - filled)) & (low << filled));
        }
        if ((groups - i) * bits >= 8)
            memcpy(data, &w, 8); /* the next group overwrites what is too much */
        else
            memcpy(data, &w, (size_t)bits);
    }
}

/* Rows of `n` codes of `bits` bits, one a byte: those of each column packed down the rows, 8 bits to a row of data. */
INLINE void packed_down_of(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t n, const int bits, uint8_t *data)
{
    const int group = bits % 2 ? 8 : bits == 4 ? 2 : 4; /* rows that share bytes */
    for (Py_ssize_t first = 0; first < rows; first += group, codes += group * n, data += group * bits / 8 * n)
        UNROLL for (int j = 0; j < group * bits / 8; j++)
            for (Py_ssize_t c = 0; c < n; c++) {
                uint8_t found = 0;
                UNROLL for (int i = 8 * j / bits; i * bits < 8 * j + 8; i++)
                {
                    const int shift = i * bits - 8 * j;
                    const uint8_t code = codes[i * n + c];
                    found |= (uint8_t)(shift < 0 ? code >> -shift : code << shift);
                }
                data[j * n + c] = found;
            }
}

/* Four codes of 6 bits to three bytes. */
INLINE void sixes_of(const uint8_t *codes, Py_ssize_t groups, uint8_t *data)
{
    for (Py_ssize_t i = 0; i < groups; i++, codes += 4, data += 3) {
        const uint32_t w = codes[0] | (uint32_t)codes[1] << 6 | (uint32_t)codes[2] << 12 | (uint32_t)codes[3] << 18;
        data[0] = (uint8_t)w;
        data[1] = (uint8_t)(w >> 8);
        data[2] = (uint8_t)(w >> 16);
    }
}

/* -------------------------------------------------------------------------------------------------- values */

/* values = the value of each code times the scale of its block of k: 8-bit codes, and 4-bit codes, two per byte. */
INLINE void values_of_bytes(const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, float *values)
{
    for (Py_ssize_t start = 0; start < n; start += k, scale++) {
        const float by = *scale;
        for (Py_ssize_t i = start; i < start + k; i++)
            values[i] = table[data[i]] * by;
    }
}

INLINE void values_of_pairs(const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, float *values)
{
    for (Py_ssize_t start = 0; start < n; start += k, scale++) {
        const float by = *scale;
        for (Py_ssize_t i = start; i < start + k; i += 2) {
            values[i] = table[data[i / 2] & 15] * by;
            values[i + 1] = table[data[i / 2] >> 4] * by;
        }
    }
}

/* -------------------------------------------------------------------------------------------------- processors */

typedef struct {
    widener widen;
    void (*load)(matrix, uint32_t *, Py_ssize_t);
    void (*store)(const uint32_t *, Py_ssize_t, int, uint16_t *);
    void (*amax)(const char *, Py_ssize_t, Py_ssize_t, int, uint32_t *);
    void (*amax_down)(const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t, int, uint32_t *);
    void (*extremes)(const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t, int, uint32_t *, uint32_t *);
    void (*words)(uint32_t, uint32_t, uint64_t, Py_ssize_t, uint32_t *);
    void (*shifted)(const numbers *, offsets, integer, uint8_t *);
    void (*floats)(const numbers *, minifloat, uint8_t *);
    void (*integers)(const numbers *, integer, uint8_t *);
    void (*tables)(const numbers *, table, uint8_t *);
    void (*scales)(const float *, Py_ssize_t, float, float, minifloat, const float *, uint8_t *, float *);
    void (*pairs)(const uint8_t *, Py_ssize_t, uint8_t *);
    void (*sixes)(const uint8_t *, Py_ssize_t, uint8_t *);
    void (*eights)(const uint8_t *, Py_ssize_t, int, uint8_t *);
    void (*down)(const uint8_t *, Py_ssize_t, Py_ssize_t, int, uint8_t *);
    void (*values)(const uint8_t *, const float *, const float *, Py_ssize_t, Py_ssize_t, int, float *);
} version;

enum { baseline_STREAMS = 1, avx2_STREAMS = 2, avx512_STREAMS = 8 };
#define baseline_widen NULL
#define avx2_widen widened_by_avx2
#define avx512_widen widened_by_avx512
#define baseline_floats_of_64(all, f, codes) 0
#define avx2_floats_of_64(all, f, codes) 0
#define avx512_floats_of_64 floats_by_avx512
#define baseline_lines NULL
#define avx2_lines NULL
#define avx512_lines lines_by_avx512
#define baseline_positions positions_by_comparing
#define avx2_positions positions_by_comparing
#define avx512_positions positions_by_halving
#define baseline_coded codes_one_by_one
#define avx2_coded codes_one_by_one
#define avx512_coded codes_by_permuting

/* The same functions, compiled for one kind of processor. */
#define VERSION(name, target)                                                                                               \
    target static void name##_load(matrix x, uint32_t *found, Py_ssize_t columns)                                           \
    {                                                                                                                       \
        switch (x.kind) { /* each compiled for its kind */                                                                  \
        case FP32: x.kind = FP32; numbers_of(x, name##_square, found, columns); break;                                                     \
        case BF16: x.kind = BF16; numbers_of(x, name##_square, found, columns); break;                                                     \
        default: x.kind = FP16; numbers_of(x, name##_square, found, columns);                                                              \
        }                                                                                                                   \
    }                                                                                                                       \
    target static void name##_store(const uint32_t *x, Py_ssize_t n, int kind, uint16_t *found)                             \
    {                                                                                                                       \
        if (kind == BF16)                                                                                                   \
            halves_of(x, n, BF16, found);                                                                                   \
        else                                                                                                                \
            halves_of(x, n, FP16, found);                                                                                   \
    }                                                                                                                       \
    target static void name##_amax(const char *x, Py_ssize_t blocks, Py_ssize_t k, int kind, uint32_t *amax)                \
    {                                                                                                                       \
        switch (kind) {                                                                                                     \
        case FP32: amax_of(x, blocks, k, FP32, name##_lines, amax); break;                                                  \
        case BF16: amax_of(x, blocks, k, BF16, name##_lines, amax); break;                                                  \
        default: amax_of(x, blocks, k, FP16, name##_lines, amax);                                                           \
        }                                                                                                                   \
    }                                                                                                                       \
    target static void name##_amax_down(                                                                                    \
        const char *x, Py_ssize_t blocks, Py_ssize_t k, Py_ssize_t across, int kind, uint32_t *amax)                        \
    {                                                                                                                       \
        switch (kind) {                                                                                                     \
        case FP32: amax_down_of(x, blocks, k, across, FP32, amax); break;                                                   \
        case BF16: amax_down_of(x, blocks, k, across, BF16, amax); break;                                                   \
        default: amax_down_of(x, blocks, k, across, FP16, amax);                                                            \
        }                                                                                                                   \
    }                                                                                                                       \
    target static void name##_extremes(                                                                                     \
        const char *x, Py_ssize_t blocks, Py_ssize_t k, Py_ssize_t across, int kind, uint32_t *low, uint32_t *high)         \
    {                                                                                                                       \
        if (across)                                                                                                         \
            extremes_down_of(x, blocks / across, k, across, kind, name##_widen, low, high);                                 \
        else                                                                                                                \
            extremes_of(x, blocks, k, kind, name##_widen, low, high);                                                       \
    }                                                                                                                       \
    target static void name##_words(uint32_t low, uint32_t high, uint64_t first, Py_ssize_t n, uint32_t *found)             \
    {                                                                                                                       \
        words_of(name##_STREAMS, low, high, first, n, found);                                                                               \
    }                                                                                                                       \
    target static void name##_shifted(const numbers *all, offsets o, integer f, uint8_t *codes)                             \
    {                                                                                                                       \
        shifted_of(all, o, f, codes);                                                                                       \
    }                                                                                                                       \
    target static void name##_floats(const numbers *all, minifloat f, uint8_t *codes)                                       \
    {                                                                                                                       \
        const Py_ssize_t done = name##_floats_of_64(all, f, codes);                                                         \
        if (done) {                                                                                                         \
            numbers rest = *all;                                                                                            \
            rest.x += done * (all->kind == FP32 ? 4 : 2);                                                                   \
            rest.inverse += done / all->k;                                                                                  \
            rest.n -= done;                                                                                                 \
            floats_of(&rest, 0, f, codes + (all->packed ? done / 2 : done));                                                \
        } else if (all->divides)                                                                                            \
            EACH_ROW(floats_of(part, 1, f, to), all, codes);                                                                \
        else                                                                                                                \
            EACH_ROW(floats_of(part, 0, f, to), all, codes);                                                                \
    }                                                                                                                       \
    target static void name##_integers(const numbers *all, integer f, uint8_t *codes)                                       \
    {                                                                                                                       \
        if (all->divides)                                                                                                   \
            EACH_ROW(integers_of(part, 1, f, to), all, codes);                                                              \
        else                                                                                                                \
            EACH_ROW(integers_of(part, 0, f, to), all, codes);                                                              \
    }                                                                                                                       \
    target static void name##_tables(const numbers *all, table f, uint8_t *codes)                                           \
    {                                                                                                                       \
        if (all->divides)                                                                                                   \
            EACH_ROW(tables_of(part, 1, f, name##_positions, name##_coded, to), all, codes);                                \
        else                                                                                                                \
            EACH_ROW(tables_of(part, 0, f, name##_positions, name##_coded, to), all, codes);                                \
    }                                                                                                                       \
    target static void name##_scales(const float *amax, Py_ssize_t n, float divisor, float global_scale, minifloat f,       \
        const float *inverses, uint8_t *codes, float *inverse)                                                              \
    {                                                                                                                       \
        scales_of(amax, n, divisor, global_scale, f, inverses, codes, inverse);                                             \
    }                                                                                                                       \
    target static void name##_pairs(const uint8_t *codes, Py_ssize_t n, uint8_t *data)                                      \
    {                                                                                                                       \
        pairs_of(codes, n, data);                                                                                           \
    }                                                                                                                       \
    target static void name##_sixes(const uint8_t *codes, Py_ssize_t groups, uint8_t *data)                                 \
    {                                                                                                                       \
        sixes_of(codes, groups, data);                                                                                      \
    }                                                                                                                       \
    target static void name##_eights(const uint8_t *codes, Py_ssize_t groups, int bits, uint8_t *data)                      \
    {                                                                                                                       \
        switch (bits) { /* each compiled for its width */                                                                   \
        case 1: eights_of(codes, groups, 1, data); break;                                                                   \
        case 2: eights_of(codes, groups, 2, data); break;                                                                   \
        case 3: eights_of(codes, groups, 3, data); break;                                                                   \
        case 5: eights_of(codes, groups, 5, data); break;                                                                   \
        case 7: eights_of(codes, groups, 7, data); break;                                                                   \
        }                                                                                                                   \
    }                                                                                                                       \
    target static void name##_down(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t n, int bits, uint8_t *data)            \
    {                                                                                                                       \
        switch (bits) {                                                                                                     \
        case 1: packed_down_of(codes, rows, n, 1, data); break;                                                             \
        case 2: packed_down_of(codes, rows, n, 2, data); break;                                                             \
        case 3: packed_down_of(codes, rows, n, 3, data); break;                                                             \
        case 4: packed_down_of(codes, rows, n, 4, data); break;                                                             \
        case 5: packed_down_of(codes, rows, n, 5, data); break;                                                             \
        case 6: packed_down_of(codes, rows, n, 6, data); break;                                                             \
        case 7: packed_down_of(codes, rows, n, 7, data); break;                                                             \
        }                                                                                                                   \
    }                                                                                                                       \
    target static void name##_values(                                                                                       \
        const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, int bits, float *values)   \
    {                                                                                                                       \
        if (bits == 8)                                                                                                      \
            values_of_bytes(data, table, scale, n, k, values);                                                              \
        else                                                                                                                \
            values_of_pairs(data, table, scale, n, k, values);                                                              \
    }                                                                                                                       \
    static const version name = {                                                                                           \
        name##_widen, name##_load, name##_store, name##_amax, name##_amax_down, name##_extremes, name##_words,              \
        name##_shifted, name##_floats, name##_integers, name##_tables, name##_scales, name##_pairs, name##_sixes,           \
        name##_eights, name##_down, name##_values};

VERSION(baseline, )

#if defined(X86_VERSIONS)
VERSION(avx2, FOR_AVX2)
VERSION(avx512, FOR_AVX512)
#endif

#define here ((const version *)chosen)

/* -------------------------------------------------------------------------------------------------- for Python */

/* Bytes of a number of a kind. */
static Py_ssize_t size_of(int kind)
{
    return kind == FP32 ? 4 : 2;
}

/* Sets ValueError and returns 0 unless x holds numbers of the kind in blocks of k, and per_block 4 bytes for each. */
static int sizes_agree(const Py_buffer *x, int kind, const Py_buffer *per_block, Py_ssize_t k)
{
    const Py_ssize_t size = size_of(kind);
    if (k > 0 && x->len % size == 0 && x->len / size % k == 0 && per_block->len == x->len / size / k * 4 &&
        (uintptr_t)x->buf % size == 0 && (uintptr_t)per_block->buf % 4 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError,
        "wanted aligned %s numbers in blocks of k = %zd and one number a block; got %zd and %zd bytes. Call breccia.cast.",
        kind == FP32 ? "FP32" : "16-bit", k, x->len, per_block->len);
    return 0;
}

/* Sets ValueError and returns 0 unless `across` is 0, or n numbers are whole blocks of k rows of as many. */
static int are_rows(Py_ssize_t n, Py_ssize_t k, Py_ssize_t across)
{
    if (across == 0 || (across > 0 && n / k % across == 0))
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted blocks of k = %zd rows; got %zd numbers in rows of %zd. Call breccia.cast.", k, n, across);
    return 0;
}

static int has_length(const Py_buffer *codes, Py_ssize_t n)
{
    if (codes->len == n)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted room for %zd codes, one a byte; got %zd bytes. Call breccia.cast.", n, codes->len);
    return 0;
}

static PyObject *result(int done)
{
    return done ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(load_doc,
    "load(values, kind, columns, found): a matrix in any order as FP32 in rows of `columns`, with zeros after its columns and rows.\n"
    "kind: 32 for FP32, 16 for BF16 and -16 for FP16, as integers of their size.");

static PyObject *load(PyObject *self, PyObject *args)
{
    PyObject *values;
    Py_buffer x, found;
    Py_ssize_t columns;
    int kind;
    if (!PyArg_ParseTuple(args, "Oinw*:load", &values, &kind, &columns, &found))
        return NULL;
    if (PyObject_GetBuffer(values, &x, PyBUF_STRIDED_RO) < 0) {
        PyBuffer_Release(&found);
        return NULL;
    }
    const int size = kind == FP32 ? 4 : 2;
    const int fits = x.ndim == 2 && x.itemsize == size && columns > 0 && x.shape[1] <= columns && found.len % (4 * columns) == 0 &&
                     x.shape[0] <= found.len / 4 / columns && (uintptr_t)x.buf % size == 0 && x.strides[0] % size == 0 &&
                     x.strides[1] % size == 0 && (uintptr_t)found.buf % 4 == 0;
    if (fits) {
        const matrix m = {x.buf, x.shape[0], x.shape[1], x.strides[0], x.strides[1], kind};
        uint32_t *to = found.buf;
        Py_BEGIN_ALLOW_THREADS
        here->load(m, to, columns);
        if (m.columns < columns)
            for (Py_ssize_t r = 0; r < m.rows; r++)
                memset(to + r * columns + m.columns, 0, 4 * (size_t)(columns - m.columns));
        memset(to + m.rows * columns, 0, (size_t)found.len - 4 * (size_t)(m.rows * columns));
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted an aligned matrix of numbers of %d bytes and room for it in rows of %zd; got %d axes of items of %zd bytes, and %zd "
            "bytes of room. Call breccia.cast.",
            size, columns, x.ndim, x.itemsize, found.len);
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(fits);
}

PyDoc_STRVAR(store_doc,
    "store(values, kind, found): FP32 numbers rounded to BF16 (kind 16) or FP16 (kind -16), to nearest, ties to even.");

static PyObject *store(PyObject *self, PyObject *args)
{
    Py_buffer x, found;
    int kind;
    if (!PyArg_ParseTuple(args, "y*iw*:store", &x, &kind, &found))
        return NULL;
    const int fits = x.len % 4 == 0 && found.len == x.len / 2 && (uintptr_t)x.buf % 4 == 0 && (uintptr_t)found.buf % 2 == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        here->store(x.buf, x.len / 4, kind, found.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted aligned FP32 numbers, and room for as many of 2 bytes; got %zd and %zd bytes. Call breccia.dequantize.", x.len,
            found.len);
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(fits);
}

PyDoc_STRVAR(amax_doc,
    "amax(source, k, amax, kind=32, across=0): FP32 bits of the largest magnitude of each k numbers, as uint32. across: unless 0,\n"
    "the numbers are rows of as many, and blocks are k rows of a column.");

static PyObject *amax(PyObject *self, PyObject *args)
{
    Py_buffer x, found;
    Py_ssize_t k;
    int kind = FP32;
    Py_ssize_t across = 0;
    if (!PyArg_ParseTuple(args, "y*nw*|in:amax", &x, &k, &found, &kind, &across))
        return NULL;
    const int done = sizes_agree(&x, kind, &found, k) && are_rows(x.len / size_of(kind), k, across);
    if (done && across) {
        Py_BEGIN_ALLOW_THREADS
        here->amax_down(x.buf, x.len / size_of(kind) / k / across, k, across, kind, found.buf);
        Py_END_ALLOW_THREADS
    } else if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->amax(x.buf, x.len / size_of(kind) / k, k, kind, found.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&found);
    return result(done);
}

PyDoc_STRVAR(extremes_doc,
    "extremes(source, k, low, high, kind=32, across=0): the smallest and the largest of each k numbers, as FP32. Those below 2^-126\n"
    "are +0. across: as for `amax`.");

static PyObject *extremes(PyObject *self, PyObject *args)
{
    Py_buffer x, low, high;
    Py_ssize_t k;
    int kind = FP32;
    Py_ssize_t across = 0;
    if (!PyArg_ParseTuple(args, "y*nw*w*|in:extremes", &x, &k, &low, &high, &kind, &across))
        return NULL;
    const int done = sizes_agree(&x, kind, &low, k) && sizes_agree(&x, kind, &high, k) && are_rows(x.len / size_of(kind), k, across);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->extremes(x.buf, x.len / size_of(kind) / k, k, across, kind, low.buf, high.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&low);
    PyBuffer_Release(&high);
    return result(done);
}

PyDoc_STRVAR(words_doc,
    "words(seed, first, found): the first words of Threefry-2x32 with 20 rounds, key `seed`, for counters from `first` on, as uint32.");

static PyObject *words(PyObject *self, PyObject *args)
{
    unsigned long long seed, first;
    Py_buffer found;
    if (!PyArg_ParseTuple(args, "KKw*:words", &seed, &first, &found))
        return NULL;
    const int done = found.len % 4 == 0 && (uintptr_t)found.buf % 4 == 0;
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->words((uint32_t)seed, (uint32_t)(seed >> 32), first, found.len / 4, found.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "wanted aligned room for words of 4 bytes; got %zd bytes. Call breccia.cast.", found.len);
    PyBuffer_Release(&found);
    return result(done);
}

/* The arguments of all writers of codes. */
typedef struct {
    Py_buffer x, inverse, codes;
    numbers all;
    unsigned long long seed, first;
} writing;

/* Sets ValueError and returns 0 unless sizes agree. packs: whether codes may be written two a byte, into room for half as many. */
static int ready(writing *w, int packs)
{
    w->all.x = w->x.buf;
    w->all.n = w->x.len / size_of(w->all.kind);
    w->all.inverse = w->inverse.buf;
    w->all.random.seed = w->seed;
    w->all.random.first = w->first;
    w->all.widen = here->widen;
    w->all.random.words = here->words;
    w->all.packed = packs && !w->all.across && w->all.n % 2 == 0 && w->codes.len == w->all.n / 2;
    if (!sizes_agree(&w->x, w->all.kind, &w->inverse, w->all.k) || (!w->all.packed && !has_length(&w->codes, w->all.n)) ||
        !are_rows(w->all.n, w->all.k, w->all.across))
        return 0;
    if (w->all.random.width >= 0 && w->all.random.stride >= 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted a width and a stride of rows, at least 0; got %zd and %zd. Call breccia.cast.",
        w->all.random.width, w->all.random.stride);
    return 0;
}

static PyObject *written(writing *w, int done)
{
    PyBuffer_Release(&w->x);
    PyBuffer_Release(&w->inverse);
    PyBuffer_Release(&w->codes);
    return result(done);
}

PyDoc_STRVAR(shifted_doc,
    "shifted(source, inverse, before, after, k, codes, low, high, magic, mask, kind=32, seed=0, first=0, width=0, stride=0, across=0):\n"
    "as integers, with numbers of each\n"
    "block of k that are subtracted before the numbers are scaled, and added to their codes.");

static PyObject *shifted(PyObject *self, PyObject *args)
{
    writing w = {.all.kind = FP32};
    Py_buffer before, after;
    integer f;
    if (!PyArg_ParseTuple(args, "y*y*y*y*nw*fffb|iKKnnn:shifted", &w.x, &w.inverse, &before, &after, &w.all.k, &w.codes, &f.low,
            &f.high, &f.magic, &f.mask, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride, &w.all.across))
        return NULL;
    const int done =
        ready(&w, 0) && sizes_agree(&w.x, w.all.kind, &before, w.all.k) && sizes_agree(&w.x, w.all.kind, &after, w.all.k);
    if (done) {
        const offsets o = {before.buf, after.buf};
        Py_BEGIN_ALLOW_THREADS
        here->shifted(&w.all, o, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&before);
    PyBuffer_Release(&after);
    return written(&w, done);
}

PyDoc_STRVAR(floats_doc,
    "floats(source, inverse, k, divides, codes, floor, lift, largest, shift, sign, kind=32, seed=0, first=0, width=0, stride=0,\n"
    "across=0): codes of a minifloat, one a byte. Codes of 4 bits may be two a byte, the first in the low half, in room for half as\n"
    "many. Numbers are multiplied by the inverse scale of their block of k, or divided by its scale; where that is 0, codes are 0.\n"
    "floor, lift, largest, shift, sign: the fields of numpy.FloatCodes. kind: 32 for FP32, 16 for BF16, -16 for FP16.\n"
    "Unless width is 0, codes are rounded stochastically: numbers are rows of `width`, which begin `stride` elements after each\n"
    "other, the first at `first`. Unless across is 0, numbers are rows of as many, and blocks are k rows of a column; then width is 0.");

static PyObject *floats(PyObject *self, PyObject *args)
{
    writing w = {.all.kind = FP32};
    minifloat f;
    if (!PyArg_ParseTuple(args, "y*y*niw*IIIii|iKKnnn:floats", &w.x, &w.inverse, &w.all.k, &w.all.divides, &w.codes, &f.floor, &f.lift,
            &f.largest, &f.shift, &f.sign, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride,
            &w.all.across))
        return NULL;
    const int done = ready(&w, 1);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->floats(&w.all, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    return written(&w, done);
}

PyDoc_STRVAR(integers_doc,
    "integers(source, inverse, k, divides, codes, low, high, magic, mask, kind=32, seed=0, first=0, width=0, stride=0, across=0):\n"
    "as `floats`, for the fields of numpy.IntegerCodes.");

static PyObject *integers(PyObject *self, PyObject *args)
{
    writing w = {.all.kind = FP32};
    integer f;
    if (!PyArg_ParseTuple(args, "y*y*niw*fffb|iKKnnn:integers", &w.x, &w.inverse, &w.all.k, &w.all.divides, &w.codes, &f.low, &f.high,
            &f.magic, &f.mask, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride,
            &w.all.across))
        return NULL;
    const int done = ready(&w, 1);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->integers(&w.all, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    return written(&w, done);
}

PyDoc_STRVAR(tables_doc,
    "tables(source, inverse, k, divides, codes, starts, values, order, zero, kind=32, seed=0, first=0, width=0, stride=0, across=0):\n"
    "as `floats`, for a table of 16 numbers in ascending order: the smallest number rounded to each (the first is unused), their\n"
    "values, and their codes; and the code of +0.");

static PyObject *tables(PyObject *self, PyObject *args)
{
    writing w = {.all.kind = FP32};
    Py_buffer starts, values, order;
    table f;
    if (!PyArg_ParseTuple(args, "y*y*niw*y*y*y*b|iKKnnn:tables", &w.x, &w.inverse, &w.all.k, &w.all.divides, &w.codes, &starts, &values,
            &order, &f.zero, &w.all.kind, &w.seed, &w.first, &w.all.random.width, &w.all.random.stride,
            &w.all.across))
        return NULL;
    int done = ready(&w, 1);
    if (done && (starts.len != 64 || values.len != 64 || order.len != 16 || (uintptr_t)starts.buf % 4 || (uintptr_t)values.buf % 4)) {
        PyErr_Format(PyExc_ValueError,
            "wanted a table of 16 FP32 numbers, twice, and of their codes; got %zd, %zd and %zd bytes. Call breccia.cast.", starts.len,
            values.len, order.len);
        done = 0;
    }
    if (done) {
        f.starts = starts.buf, f.values = values.buf, f.order = order.buf;
        Py_BEGIN_ALLOW_THREADS
        here->tables(&w.all, f, w.codes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&starts);
    PyBuffer_Release(&values);
    PyBuffer_Release(&order);
    return written(&w, done);
}

PyDoc_STRVAR(scales_doc,
    "scales(amax, divisor, global_scale, floor, lift, largest, shift, sign, inverses, codes, inverse): codes of a minifloat of FP32\n"
    "amax / divisor / global_scale, and the FP32 inverse of each, from a table of 256. The others are the fields of numpy.FloatCodes.");

static PyObject *scales(PyObject *self, PyObject *args)
{
    Py_buffer x, inverses, codes, inverse;
    minifloat f;
    float divisor, global_scale;
    if (!PyArg_ParseTuple(args, "y*ffIIIiiy*w*w*:scales", &x, &divisor, &global_scale, &f.floor, &f.lift, &f.largest, &f.shift, &f.sign,
            &inverses, &codes, &inverse))
        return NULL;
    int done = sizes_agree(&x, FP32, &inverse, 1) && has_length(&codes, x.len / 4);
    if (done && (inverses.len != 1024 || (uintptr_t)inverses.buf % 4)) {
        PyErr_Format(PyExc_ValueError, "wanted FP32 inverses of 256 codes; got %zd bytes. Call breccia.cast.", inverses.len);
        done = 0;
    }
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->scales(x.buf, x.len / 4, divisor, global_scale, f, inverses.buf, codes.buf, inverse.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&inverses);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&inverse);
    return result(done);
}

PyDoc_STRVAR(sixes_doc, "sixes(codes, data): four codes of 6 bits, one a byte, to each three bytes of data; the first in the low bits.");

static PyObject *sixes(PyObject *self, PyObject *args)
{
    Py_buffer codes, data;
    if (!PyArg_ParseTuple(args, "y*w*:sixes", &codes, &data))
        return NULL;
    const int done = has_length(&codes, data.len / 3 * 4) && has_length(&codes, (data.len * 4 + 2) / 3);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->sixes(codes.buf, data.len / 3, data.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(eights_doc,
    "eights(codes, bits, data): eight codes of 1, 2, 3, 5 or 7 bits, one a byte, to as many bytes of data; the first in the low bits.");

static PyObject *eights(PyObject *self, PyObject *args)
{
    Py_buffer codes, data;
    int bits;
    if (!PyArg_ParseTuple(args, "y*iw*:eights", &codes, &bits, &data))
        return NULL;
    const int known = bits == 1 || bits == 2 || bits == 3 || bits == 5 || bits == 7;
    const int done = known && codes.len % 8 == 0 && data.len == codes.len / 8 * bits;
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->eights(codes.buf, codes.len / 8, bits, data.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted eights of codes of 1, 2, 3, 5 or 7 bits, and room for them; got %zd codes of %d bits and %zd bytes. Call breccia.cast.",
            codes.len, bits, data.len);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(down_doc,
    "down(codes, bits, data): rows of codes of less than 8 bits, one a byte, whose columns are packed: whole groups of rows that share\n"
    "bytes, to rows of data; the first in the low bits.");

static PyObject *down(PyObject *self, PyObject *args)
{
    PyObject *from, *to;
    Py_buffer codes, data;
    int bits;
    if (!PyArg_ParseTuple(args, "OiO:down", &from, &bits, &to) || PyObject_GetBuffer(from, &codes, PyBUF_ND) < 0)
        return NULL;
    if (PyObject_GetBuffer(to, &data, PyBUF_ND | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&codes);
        return NULL;
    }
    const int done = codes.ndim == 2 && data.ndim == 2 && codes.itemsize == 1 && data.itemsize == 1 && bits > 0 && bits < 8 &&
        codes.shape[1] == data.shape[1] && codes.shape[0] % (bits % 2 ? 8 : bits == 4 ? 2 : 4) == 0 &&
        data.shape[0] == codes.shape[0] * bits / 8;
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->down(codes.buf, codes.shape[0], codes.shape[1], bits, data.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted rows of codes of 1 to 7 bits, whole groups that share bytes, and as many columns of room for them; got %zd codes of "
            "%d bits and %zd bytes. Call breccia.cast.", codes.len, bits, data.len);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(pairs_doc, "pairs(codes, data): two codes of 4 bits, one a byte, to each byte of data; the first in its low half.");

static PyObject *pairs(PyObject *self, PyObject *args)
{
    Py_buffer codes, data;
    if (!PyArg_ParseTuple(args, "y*w*:pairs", &codes, &data))
        return NULL;
    const int done = has_length(&codes, 2 * data.len);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->pairs(codes.buf, data.len, data.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&data);
    return result(done);
}

PyDoc_STRVAR(values_doc,
    "values(data, table, scale, k, bits, values): the FP32 number of each code, by a table, times the FP32 scale of its block of k.\n"
    "Codes have 8 bits, or 4, two a byte, the first in the low half.");

static PyObject *values(PyObject *self, PyObject *args)
{
    Py_buffer data, table, scale, found;
    Py_ssize_t k;
    int bits;
    if (!PyArg_ParseTuple(args, "y*y*y*niw*:values", &data, &table, &scale, &k, &bits, &found))
        return NULL;
    int done = sizes_agree(&found, FP32, &scale, k) && has_length(&data, found.len / 4 * bits / 8);
    if (done && ((bits != 4 && bits != 8) || table.len != 4 << bits || (uintptr_t)table.buf % 4 || (bits == 4 && k % 2))) {
        PyErr_Format(PyExc_ValueError,
            "wanted codes of 4 or 8 bits with a number for each, and whole bytes in each block; got %d bits, %zd bytes of numbers and "
            "k = %zd. Call breccia.dequantize.",
            bits, table.len, k);
        done = 0;
    }
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        here->values(data.buf, table.buf, scale.buf, found.len / 4, k, bits, found.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&table);
    PyBuffer_Release(&scale);
    PyBuffer_Release(&found);
    return result(done);
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, load_doc},
    {"store", store, METH_VARARGS, store_doc},
    {"amax", amax, METH_VARARGS, amax_doc},
    {"extremes", extremes, METH_VARARGS, extremes_doc},
    {"shifted", shifted, METH_VARARGS, shifted_doc},
    {"floats", floats, METH_VARARGS, floats_doc},
    {"integers", integers, METH_VARARGS, integers_doc},
    {"words", words, METH_VARARGS, words_doc},
    {"tables", tables, METH_VARARGS, tables_doc},
    {"scales", scales, METH_VARARGS, scales_doc},
    {"sixes", sixes, METH_VARARGS, sixes_doc},
    {"down", down, METH_VARARGS, down_doc},
    {"eights", eights, METH_VARARGS, eights_doc},
    {"pairs", pairs, METH_VARARGS, pairs_doc},
    {"values", values, METH_VARARGS, values_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.microkernels",
    .m_doc = "Compiled microkernels of casts and of dequantize; see breccia_native.kernels, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_microkernels(void)
{
    ADD_VERSIONS(&avx512, &avx2, &baseline);
    return PyModuleDef_Init(&module);
}
