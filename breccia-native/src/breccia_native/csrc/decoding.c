/* The microkernel of dequantize: codes of a matrix, times the scales of their blocks, as FP32, FP16 or BF16.

   The arithmetic is that of breccia/kernels/reference/decoding.py, in its order: contraction into fused multiply-adds must stay off
   (see setup.py). Codes are decoded in strips that stay in the L1 cache. Large results are written past the caches. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

#include "numbers.h"
#include "pool.h"
#include "versions.h"

#if defined(X86_VERSIONS)
#include <immintrin.h>

#include "transpose.h"
#endif

/* Numbers decoded at once: whole bytes for codes of 4, 6 and 8 bits. */
#define STRIP 256
/* Of a square that is transposed in registers: a cache line of FP32. */
#define SIDE 16
/* Rows that are transposed together: DRAM takes shorter runs of columns several times as slowly. */
#define TALL 256

/* How codes become numbers: by a table; as a minifloat, computed without one; as an integer times a unit. */
enum { TABLE, MINIFLOAT, INTEGER };

typedef struct {
    int bits, form;
    const float *table;
    int mantissa, infinite, nan; /* of a minifloat: bits of the mantissa; the first codes of infinite numbers, and of NaN */
    int flip;                    /* of an integer: 128 if it is signed */
    float unit;                  /* of an integer; of a minifloat, 2^(15 - bias) */
} element;

/* What is done to numbers, in this order; a NULL for what is not. One item per block. */
typedef struct {
    const float *subtracted;
    const char *scale;       /* FP32, or bytes */
    const float *of_bytes;   /* the FP32 scale of each byte, of which byte 0 is twice what it stands for if `halved` */
    int halved;
    int has_global, divides; /* whether there is a global scale, and numbers are divided by it */
    float global_scale;
    const float *added;
} factors;

/* A matrix to decode. Rows of codes are `pitch` bytes apart, blocks are m rows by k, and a row of blocks has `blocks` items. */
typedef struct {
    const uint8_t *data;
    Py_ssize_t rows, columns, pitch, m, k, blocks;
    Py_ssize_t row, row_end, column, column_end; /* the part of it to decode: columns from a multiple of STRIP on */
    char *out;
    Py_ssize_t down, along; /* strides of the result in bytes */
    int kind, stream;
} task;

/* The next numbers of a row: the block they are in, and how many numbers of it are left. */
typedef struct {
    Py_ssize_t block, left;
} place;

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

/* -------------------------------------------------------------------------------------------------- routines */

INLINE float scale_at(const factors *f, Py_ssize_t block)
{
    float by;
    if (f->of_bytes)
        return f->of_bytes[(uint8_t)f->scale[block]];
    memcpy(&by, f->scale + 4 * block, 4);
    return by;
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

static void portable_pairs(const uint8_t *data, Py_ssize_t n, const float *table, float *y)
{
    some_pairs(data, 0, n, table, y);
}

static void portable_widen(const uint16_t *halves, Py_ssize_t n, float *y)
{
    some_widened(halves, 0, n, y);
}

static void portable_narrow(const float *y, Py_ssize_t n, uint16_t *halves)
{
    some_narrowed(y, 0, n, halves);
}

static void portable_shorten(const float *y, Py_ssize_t n, uint16_t *halves)
{
    some_shortened(y, 0, n, halves);
}

static void portable_turn(const float *rows, float *columns)
{
    for (int j = 0; j < SIDE; j++)
        for (int i = 0; i < SIDE; i++)
            columns[j * TALL + i] = rows[i * STRIP + j];
}

#if defined(X86_VERSIONS)
FOR_AVX2 static void avx2_turn(const float *rows, float *columns)
{
    for (int i = 0; i < SIDE; i += 8)
        for (int j = 0; j < SIDE; j += 8) {
            __m256 v[8];
            for (int n = 0; n < 8; n++)
                v[n] = _mm256_loadu_ps(rows + (i + n) * STRIP + j);
            transposed8(v);
            for (int n = 0; n < 8; n++)
                _mm256_storeu_ps(columns + (j + n) * TALL + i, v[n]);
        }
}

FOR_AVX512 static void avx512_turn(const float *rows, float *columns)
{
    __m512 v[SIDE];
    for (int n = 0; n < SIDE; n++)
        v[n] = _mm512_loadu_ps(rows + n * STRIP);
    transposed(v);
    for (int n = 0; n < SIDE; n++)
        _mm512_storeu_ps(columns + n * TALL, v[n]);
}
#endif

#define portable_strip NULL
#define portable_past NULL

#if defined(X86_VERSIONS)
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

/* Whole lines of 64 bytes by one store; the rest by steps of 16, which the processor joins to what comes next. */
FOR_AVX512 static void avx512_past(char *to, const char *from, Py_ssize_t n)
{
    n = up_to(&to, &from, n, 64);
    for (; n >= 64; to += 64, from += 64, n -= 64)
        _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
    for (; n >= 16; to += 16, from += 16, n -= 16)
        _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
    memcpy(to, from, (size_t)n);
}

FOR_AVX2 static void avx2_past(char *to, const char *from, Py_ssize_t n)
{
    n = up_to(&to, &from, n, 32);
    for (; n >= 32; to += 32, from += 32, n -= 32)
        _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    for (; n >= 16; to += 16, from += 16, n -= 16)
        _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
    memcpy(to, from, (size_t)n);
}

#define avx2_strip NULL

/* 16 codes of 8 bytes, one a byte. */
INLINE __m128i halves_of_bytes(const uint8_t *data)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)data), low = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
}

FOR_AVX512 static void avx512_pairs(const uint8_t *data, Py_ssize_t n, const float *table, float *y)
{
    const __m512 all = _mm512_loadu_ps(table);
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(halves_of_bytes(data + i / 2)), all));
    some_pairs(data, i, n, table, y);
}

/* Numbers of 4 bytes each, of which a shuffle looks up one for 32 codes. */
FOR_AVX2 static void avx2_pairs(const uint8_t *data, Py_ssize_t n, const float *table, float *y)
{
    __m256i bytes[4];
    bytes_of_table(table, bytes);
    Py_ssize_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i codes = _mm256_set_m128i(halves_of_bytes(data + i / 2 + 8), halves_of_bytes(data + i / 2));
        __m256i part[4];
        for (int j = 0; j < 4; j++)
            part[j] = _mm256_shuffle_epi8(bytes[j], codes);
        const __m256i low[2] = {_mm256_unpacklo_epi8(part[0], part[1]), _mm256_unpackhi_epi8(part[0], part[1])};
        const __m256i high[2] = {_mm256_unpacklo_epi8(part[2], part[3]), _mm256_unpackhi_epi8(part[2], part[3])};
        for (int j = 0; j < 2; j++) { /* each half of a register has four numbers of its half of the codes */
            const __m256i first = _mm256_unpacklo_epi16(low[j], high[j]), second = _mm256_unpackhi_epi16(low[j], high[j]);
            _mm256_storeu_si256((__m256i *)(y + i + 8 * j), _mm256_permute2x128_si256(first, second, 0x20));
            _mm256_storeu_si256((__m256i *)(y + i + 8 * j + 16), _mm256_permute2x128_si256(first, second, 0x31));
        }
    }
    some_pairs(data, i, n, table, y);
}

FOR_AVX512 static void avx512_widen(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + i))));
    some_widened(halves, i, n, y);
}

FOR_AVX2 static void avx2_widen(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    some_widened(halves, i, n, y);
}

FOR_AVX512 static void avx512_narrow(const float *y, Py_ssize_t n, uint16_t *halves)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(halves + i), _mm512_cvtps_ph(_mm512_loadu_ps(y + i), _MM_FROUND_TO_NEAREST_INT));
    some_narrowed(y, i, n, halves);
}

FOR_AVX512 static void avx512_shorten(const float *y, Py_ssize_t n, uint16_t *halves)
{
    some_shortened(y, 0, n, halves);
}

/* Numbers decoded in registers at once, and in one vector. */
#define GROUP 64
#define LANES 16

/* GROUP numbers of a minifloat, over its unit, from their codes, one a byte. Returns 0 where one is not finite. */
FOR_AVX512 INLINE int minifloats_by_avx512(const uint8_t *codes, const element *e, __m512 y[4])
{
    /* A code's sign and magnitude move to where FP16 has them. */
    const int left = 16 - e->bits, top = 1 << (e->bits - 1), most = e->infinite < e->nan ? e->infinite : e->nan;
    const __m128i up = _mm_cvtsi32_si128(left), down = _mm_cvtsi32_si128(left - (10 - e->mantissa));
    const __m512i kept = _mm512_set1_epi16((short)(0x8000 | ((top - 1) << (10 - e->mantissa))));
    const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8((char)(top - 1)));
    if (most < top && _mm512_cmpge_epu8_mask(magnitudes, _mm512_set1_epi8((char)most)))
        return 0;
    for (int i = 0; i < 2; i++) {
        const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + 32 * i)));
        const __m512i halves = _mm512_and_si512(_mm512_sra_epi16(_mm512_sll_epi16(words, up), down), kept);
        y[2 * i] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        y[2 * i + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    }
    return 1;
}

FOR_AVX512 INLINE void integers_by_avx512(const uint8_t *codes, const element *e, __m512 y[4])
{
    const __m512i flip = _mm512_set1_epi32(e->flip);
    for (int i = 0; i < 4; i++) {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + LANES * i)));
        y[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_xor_si512(code, flip), flip));
    }
}

/* Lane j of vector i reads the 8 codes that include 16 i + j, and shifts that one down; higher bits do not select. */
FOR_AVX512 INLINE void pairs_by_avx512(const uint8_t *data, const element *e, __m512 y[4])
{
    const __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)data));
    const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i words = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512 table = _mm512_loadu_ps(e->table);
    for (int i = 0; i < 4; i++) {
        const __m512i eight = _mm512_permutexvar_epi32(_mm512_add_epi32(words, _mm512_set1_epi32(2 * i)), all);
        y[i] = _mm512_permutexvar_ps(_mm512_srlv_epi32(eight, shifts), table);
    }
}

/* Words of BF16 in the high halves: numbers, none of which is NaN, to nearest, ties to even. */
FOR_AVX512 INLINE __m512i rounded_to_bf16(__m512 y)
{
    const __m512i u = _mm512_castps_si512(y);
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    return _mm512_add_epi32(u, _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000)));
}

FOR_AVX512 INLINE void line_stored(const int stream, void *to, __m512i line)
{
    if (stream)
        _mm512_stream_si512((__m512i *)to, line);
    else
        _mm512_storeu_si512(to, line);
}

FOR_AVX512 INLINE void group_stored(const int kind, const int stream, const __m512 y[4], char *to)
{
    static const short odd[32] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51,
        53, 55, 57, 59, 61, 63};
    if (kind == FP32)
        for (int i = 0; i < 4; i++)
            line_stored(stream, to + 64 * i, _mm512_castps_si512(y[i]));
    else
        for (int i = 0; i < 4; i += 2) {
            __m512i both;
            if (kind == BF16)
                both = _mm512_permutex2var_epi16(rounded_to_bf16(y[i]), _mm512_loadu_si512(odd), rounded_to_bf16(y[i + 1]));
            else
                both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(y[i], _MM_FROUND_TO_NEAREST_INT)),
                    _mm512_cvtps_ph(y[i + 1], _MM_FROUND_TO_NEAREST_INT), 1);
            line_stored(stream, to + 32 * i, both);
        }
}

/* Forms of codes, and of what is done to numbers: times a scale only; also by the global scale; minus a zero-point before, too. */
enum { PAIRS, MINIFLOATS, INTEGERS };
enum { SCALED, TWICE, SHIFTED };

/* by, less: the scale and the zero-point of each vector. Returns how many numbers have been decoded. */
FOR_AVX512 INLINE Py_ssize_t groups_by_avx512(const int form, const int kind, const int stream, const int steps, const element *e,
    const factors *f, const float *by, const float *less, const uint8_t *data, Py_ssize_t n, char *to)
{
    const int has_global = steps != SCALED && f->has_global, divides = f->divides;
    const __m512 g = _mm512_set1_ps(f->global_scale);
    Py_ssize_t i = 0;
    for (; i < n; i += GROUP, by += 4, less += 4, to += GROUP * (kind == FP32 ? 4 : 2)) {
        __m512 y[4];
        if (form == PAIRS)
            pairs_by_avx512(data + i / 2, e, y);
        else if (form == INTEGERS)
            integers_by_avx512(data + i, e, y);
        else if (!minifloats_by_avx512(data + i, e, y))
            break;
        for (int j = 0; j < 4; j++) {
            y[j] = steps == SHIFTED ? _mm512_sub_ps(y[j], _mm512_set1_ps(less[j])) : y[j];
            y[j] = _mm512_mul_ps(y[j], _mm512_set1_ps(by[j]));
            if (has_global)
                y[j] = divides ? _mm512_div_ps(y[j], g) : _mm512_mul_ps(y[j], g);
        }
        group_stored(kind, stream, y, to);
    }
    return i;
}

typedef Py_ssize_t (*groups)(
    const element *, const factors *, const float *, const float *, const uint8_t *, Py_ssize_t, char *);

#define GROUPS(form, kind, stream, steps)                                                                                   \
    FOR_AVX512 static Py_ssize_t groups_##form##kind##stream##steps(const element *e, const factors *f, const float *by,    \
        const float *less, const uint8_t *data, Py_ssize_t n, char *to)                                                     \
    {                                                                                                                       \
        return groups_by_avx512(form, kind, stream, steps, e, f, by, less, data, n, to);                                    \
    }
#define OF_KINDS(what, form, stream, steps) what(form, FP32, stream, steps) what(form, BF16, stream, steps) what(form, FP16, stream, steps)
#define OF_STREAMS(what, form, steps) OF_KINDS(what, form, 0, steps) OF_KINDS(what, form, 1, steps)
#define OF_STEPS(what, form) OF_STREAMS(what, form, SCALED) OF_STREAMS(what, form, TWICE) OF_STREAMS(what, form, SHIFTED)
OF_STEPS(GROUPS, PAIRS)
OF_STREAMS(GROUPS, MINIFLOATS, SCALED)
OF_STREAMS(GROUPS, MINIFLOATS, TWICE)
OF_STEPS(GROUPS, INTEGERS)
/* By what is done, whether it streams, and the dtype. */
#define NAMES(form, stream, steps) {groups_##form##FP32##stream##steps, groups_##form##BF16##stream##steps, groups_##form##FP16##stream##steps}
#define TABLE_OF(form, steps) {NAMES(form, 0, steps), NAMES(form, 1, steps)}
static const groups grouped[3][3][2][3] = {
    {TABLE_OF(PAIRS, SCALED), TABLE_OF(PAIRS, TWICE), TABLE_OF(PAIRS, SHIFTED)},
    {TABLE_OF(MINIFLOATS, SCALED), TABLE_OF(MINIFLOATS, TWICE)}, /* nothing is subtracted from minifloats */
    {TABLE_OF(INTEGERS, SCALED), TABLE_OF(INTEGERS, TWICE), TABLE_OF(INTEGERS, SHIFTED)},
};

/* Limits of scales under which no product is NaN or infinite, and all are what they are with the unit in either factor. */
#define MOST_SCALE 0x1p80f
#define LEAST_SCALE 0x1p-80f

/* Items of blocks from `at` on, as FP32: each `each` times, or as often as its block has vectors where that is 0. */
FOR_AVX512 INLINE void items_of_vectors(const float *of_bytes, const char *items, place at, Py_ssize_t k, Py_ssize_t vectors,
    const int each, float *to)
{
    for (Py_ssize_t i = 0, run = at.left / LANES; i < vectors; at.block++, run = k / LANES) {
        float item;
        if (of_bytes)
            item = of_bytes[(uint8_t)items[at.block]];
        else
            memcpy(&item, items + 4 * at.block, 4);
        if (each)
            for (int j = 0; j < each; j++)
                to[i++] = item;
        else
            for (Py_ssize_t end = run < vectors - i ? i + run : vectors; i < end;)
                to[i++] = item;
    }
}

FOR_AVX512 INLINE void items_of_blocks(
    const float *of_bytes, const char *items, place at, Py_ssize_t k, Py_ssize_t vectors, float *to)
{
    if (at.left >= vectors * LANES) { /* all are in one block, which may end within a vector later */
        float item;
        items_of_vectors(of_bytes, items, at, LANES, 1, 1, &item);
        _mm512_storeu_ps(to, _mm512_set1_ps(item));
    } else if (k == 16)
        items_of_vectors(of_bytes, items, at, 16, vectors, 1, to);
    else if (k == 32 && at.left == 32 && vectors % 2 == 0)
        items_of_vectors(of_bytes, items, at, 32, vectors, 2, to);
    else
        items_of_vectors(of_bytes, items, at, k, vectors, 0, to);
}

/* The scale of each vector, times the unit. Returns 0 unless all are within the limits, or 0. */
FOR_AVX512 INLINE int scales_by_avx512(const task *t, const factors *f, place at, Py_ssize_t vectors, float unit, float *by, float *less)
{
    if (f->halved && f->of_bytes && *f->of_bytes >= LEAST_SCALE)
        return 0; /* else a scale of byte 0 is below the limit */
    if (f->of_bytes)
        items_of_blocks(f->of_bytes, f->scale, at, t->k, vectors, by);
    else
        items_of_blocks(NULL, f->scale, at, t->k, vectors, by);
    if (f->subtracted)
        items_of_blocks(NULL, (const char *)f->subtracted, at, t->k, vectors, less);
    const __mmask16 used = (__mmask16)((1u << vectors) - 1);
    const __m512 scales = _mm512_maskz_loadu_ps(used, by), sizes = _mm512_abs_ps(scales);
    const __mmask16 usual = _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(LEAST_SCALE), _CMP_GE_OQ) &
                            _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(MOST_SCALE), _CMP_LE_OQ);
    const __mmask16 zero = _mm512_cmp_ps_mask(sizes, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __m512 shifts = f->subtracted ? _mm512_maskz_loadu_ps(used, less) : _mm512_setzero_ps();
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(shifts), _mm512_set1_ps(0x1p24f), _CMP_LE_OQ);
    _mm512_storeu_ps(by, _mm512_mul_ps(scales, _mm512_set1_ps(unit)));
    return (used & ~((usual | zero) & finite)) == 0;
}

INLINE void codes_of_sixes(const uint8_t *data, Py_ssize_t n, uint8_t *codes);

FOR_AVX512 static Py_ssize_t avx512_strip(const task *t, const element *e, const factors *f, place at, const uint8_t *data,
    Py_ssize_t n, int kind, int stream, void *to)
{
    float by[STRIP / LANES], less[STRIP / LANES];
    uint8_t codes[STRIP];
    const float g = f->global_scale, size = fabsf(g);
    const int form = e->bits == 4 ? PAIRS : e->form == INTEGER ? INTEGERS : MINIFLOATS;
    const int steps = f->subtracted ? SHIFTED : f->has_global ? TWICE : SCALED;
    /* A unit of integers is applied before a zero-point is subtracted. */
    const float unit = form == PAIRS ? 1 : e->unit;
    n = n / GROUP * GROUP;
    if (f->added || (e->bits != 4 && e->form == TABLE) || (steps == SHIFTED && (form == MINIFLOATS || unit != 1)) ||
        (f->has_global && !(size >= LEAST_SCALE && size <= MOST_SCALE)) || (t->k % LANES && t->k < t->columns) ||
        !scales_by_avx512(t, f, at, n / LANES, unit, by, less))
        return 0;
    if (e->bits == 6) {
        codes_of_sixes(data, n, codes);
        data = codes;
    }
    return grouped[form][steps][stream][kind == FP32 ? 0 : kind == BF16 ? 1 : 2](e, f, by, less, data, n, to);
}

FOR_AVX2 static void avx2_narrow(const float *y, Py_ssize_t n, uint16_t *halves)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(halves + i), _mm256_cvtps_ph(_mm256_loadu_ps(y + i), _MM_FROUND_TO_NEAREST_INT));
    some_narrowed(y, i, n, halves);
}

/* Numbers, none of which is NaN, as BF16 in the low halves of lanes. */
FOR_AVX2 INLINE __m256i bfloats_by_avx2(__m256 y)
{
    const __m256i u = _mm256_castps_si256(y), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
}

FOR_AVX2 static void avx2_shorten(const float *y, Py_ssize_t n, uint16_t *halves)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256 first = _mm256_loadu_ps(y + i), second = _mm256_loadu_ps(y + i + 8);
        const __m256i both = _mm256_packus_epi32(bfloats_by_avx2(first), bfloats_by_avx2(second)); /* each half of the two */
        _mm256_storeu_si256((__m256i *)(halves + i), _mm256_permute4x64_epi64(both, 0xD8));
        if (_mm256_movemask_ps(_mm256_cmp_ps(first, second, _CMP_UNORD_Q)))
            some_shortened(y, i, i + 16, halves);
    }
    some_shortened(y, i, n, halves);
}
#endif

/* -------------------------------------------------------------------------------------------------- codes */

INLINE void integers_decoded(const uint8_t *codes, Py_ssize_t n, const element *e, float *y)
{
    const int flip = e->flip;
    const float unit = e->unit;
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] = (float)((codes[i] ^ flip) - flip) * unit;
}

/* By way of FP16, which has the exponents of all minifloats of 8 bits: `unit` is the ratio of the biases. */
INLINE void minifloats_decoded(const uint8_t *codes, Py_ssize_t n, const element *e, int bits, const routines *own, float *y)
{
    const uint16_t sign = (uint16_t)(1u << (bits - 1)), up = (uint16_t)(1u << (10 - e->mantissa)); /* products, not shifts: in 16 bits */
    const uint16_t infinite = (uint16_t)e->infinite, nan = (uint16_t)e->nan;
    const float unit = e->unit;
    uint16_t halves[STRIP];
    for (Py_ssize_t i = 0; i < n; i++) {
        const uint16_t c = codes[i], a = c & (uint16_t)(sign - 1u), finite = (uint16_t)(a * up);
        const uint16_t at_most = a >= infinite ? 0x7c00 : finite, number = (uint16_t)(at_most | (c & sign) * (0x8000u / sign));
        halves[i] = a >= nan ? 0x7e00 : number; /* tables have NaN without a sign */
    }
    own->widen(halves, n, y);
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] *= unit;
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

INLINE void codes_decoded(const uint8_t *data, Py_ssize_t n, const element *e, const routines *own, float *y)
{
    uint8_t codes[STRIP];
    if (e->bits == 4) {
        own->pairs(data, n, e->table, y);
        return;
    }
    if (e->bits == 6) {
        codes_of_sixes(data, n, codes);
        data = codes;
    }
    if (e->form == INTEGER)
        integers_decoded(data, n, e, y);
    else if (e->form == MINIFLOAT && e->bits == 8)
        minifloats_decoded(data, n, e, 8, own, y);
    else if (e->form == MINIFLOAT)
        minifloats_decoded(data, n, e, 6, own, y);
    else
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = e->table[data[i]];
}

/* -------------------------------------------------------------------------------------------------- scales */

/* +0 for magnitudes below 2^-126. */
INLINE float flushed(float y)
{
    return (int32_t)(bits_of(y) & MAGNITUDE) < (int32_t)NORMAL ? 0.0f : y;
}

/* y times the scales of blocks. A length k that is known at compile time makes the loop over short blocks a few instructions. */
INLINE void blocks_scaled(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    for (Py_ssize_t i = 0, run; i < n; i += run, at.block++, at.left = k) {
        run = at.left < n - i ? at.left : n - i;
        const float by = scale_at(f, at.block);
        if (run == k)
            for (Py_ssize_t j = i; j < i + k; j++)
                y[j] *= by;
        else
            for (Py_ssize_t j = i; j < i + run; j++)
                y[j] *= by;
    }
}

/* What comes before the scale, for blocks that need it: offsets, and scales of half the number in the table. */
INLINE void blocks_prepared(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    for (Py_ssize_t i = 0, run; i < n; i += run, at.block++, at.left = k) {
        run = at.left < n - i ? at.left : n - i;
        if (f->subtracted) {
            const float less = f->subtracted[at.block];
            for (Py_ssize_t j = i; j < i + run; j++)
                y[j] -= less;
        }
        if (f->halved && f->of_bytes && f->scale[at.block] == 0)
            for (Py_ssize_t j = i; j < i + run; j++)
                y[j] *= 0.5f;
    }
}

INLINE void blocks_added(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    for (Py_ssize_t i = 0, run; i < n; i += run, at.block++, at.left = k) {
        run = at.left < n - i ? at.left : n - i;
        const float more = flushed(f->added[at.block]);
        for (Py_ssize_t j = i; j < i + run; j++)
            y[j] = flushed(y[j]) + more;
    }
}

INLINE place place_of(const task *t, Py_ssize_t r, Py_ssize_t c)
{
    return (place){r / t->m * t->blocks + c / t->k, t->k - c % t->k};
}

/* n numbers of row r, from column c on, as FP32. */
INLINE void strip_of(
    const task *t, const element *e, const factors *f, const routines *own, Py_ssize_t r, Py_ssize_t c, Py_ssize_t n, float *y)
{
    const place at = place_of(t, r, c);
    codes_decoded(t->data + r * t->pitch + c * e->bits / 8, n, e, own, y);
    if (f->subtracted || f->halved)
        blocks_prepared(y, n, t->k, f, at);
    switch (t->k) {
    case 16: blocks_scaled(y, n, 16, f, at); break;
    case 32: blocks_scaled(y, n, 32, f, at); break;
    case 128: blocks_scaled(y, n, 128, f, at); break;
    default: blocks_scaled(y, n, t->k, f, at);
    }
    if (f->has_global) {
        const float g = f->global_scale;
        if (f->divides)
            for (Py_ssize_t i = 0; i < n; i++)
                y[i] /= g;
        else
            for (Py_ssize_t i = 0; i < n; i++)
                y[i] *= g;
    }
    if (f->added)
        blocks_added(y, n, t->k, f, at);
}

/* -------------------------------------------------------------------------------------------------- results */

/* Copies bytes; those that will not be read soon past the caches, where the processor can. */
INLINE void write_past(char *to, const char *from, Py_ssize_t n, const routines *own, int stream)
{
    if (stream && own->past)
        own->past(to, from, n);
    else
        memcpy(to, from, (size_t)n);
}

/* n numbers, adjacent in the result. */
INLINE void emit(char *to, const float *y, Py_ssize_t n, int kind, const routines *own, int stream)
{
    if (kind == FP32) {
        write_past(to, (const char *)y, 4 * n, own, stream);
        return;
    }
    uint16_t halves[STRIP];
    if (kind == FP16)
        own->narrow(y, n, halves);
    else
        own->shorten(y, n, halves);
    write_past(to, (const char *)halves, 2 * n, own, stream);
}

/* Are rows of the result, not columns, adjacent in memory? Parts are then one strip wide: each column lies in a page of its own. */
INLINE int is_turned(const task *t)
{
    const Py_ssize_t size = t->kind == FP32 ? 4 : 2;
    return t->along != size && t->down == size;
}

/* The part of a result whose rows are adjacent in memory, or of one that is strided both ways. */
INLINE void rows_decoded(const task *t, const element *e, const factors *f, const routines *own, int kind)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    float y[STRIP];
    for (Py_ssize_t r = t->row; r < t->row_end; r++)
        for (Py_ssize_t c = t->column; c < t->column_end; c += STRIP) {
            const Py_ssize_t n = t->column_end - c < STRIP ? t->column_end - c : STRIP;
            const uint8_t *data = t->data + r * t->pitch + c * e->bits / 8;
            char *to = t->out + r * t->down + c * t->along;
            const int adjacent = t->along == size, past = adjacent && t->stream && (uintptr_t)to % 64; /* then by way of the cache */
            char *const first = adjacent && !past ? to : (char *)y;
            Py_ssize_t done = 0;
            if (own->strip)
                done = own->strip(t, e, f, place_of(t, r, c), data, n, adjacent ? kind : FP32, adjacent && t->stream && !past, first);
            if (past)
                write_past(to, (const char *)y, done * size, own, 1);
            if (done < n)
                strip_of(t, e, f, own, r, c + done, n - done, y + done);
            if (adjacent)
                emit(to + done * size, y + done, n - done, kind, own, t->stream);
            else
                for (Py_ssize_t i = 0; i < n; i++)
                    emit(to + i * t->along, y + i, 1, kind, own, 0);
        }
}

/* The part of a result whose columns are adjacent in memory. */
INLINE void columns_decoded(const task *t, const element *e, const factors *f, const routines *own, int kind)
{
    float y[TALL * STRIP], columns[SIDE * TALL];
    for (Py_ssize_t r = t->row; r < t->row_end; r += TALL)
        for (Py_ssize_t c = t->column; c < t->column_end; c += STRIP) {
            const Py_ssize_t n = t->column_end - c < STRIP ? t->column_end - c : STRIP;
            const Py_ssize_t height = t->row_end - r < TALL ? t->row_end - r : TALL;
            for (Py_ssize_t i = 0; i < height; i++) {
                const uint8_t *data = t->data + (r + i) * t->pitch + c * e->bits / 8;
                float *row = y + i * STRIP;
                const Py_ssize_t done = own->strip ? own->strip(t, e, f, place_of(t, r + i, c), data, n, FP32, 0, row) : 0;
                if (done < n)
                    strip_of(t, e, f, own, r + i, c + done, n - done, row + done);
            }
            for (Py_ssize_t i = 0; i < n; i += SIDE) {
                for (Py_ssize_t j = 0; j < height; j += SIDE)
                    own->turn(y + j * STRIP + i, columns + j);
                for (Py_ssize_t j = 0; j < SIDE && i + j < n; j++)
                    emit(t->out + r * t->down + (c + i + j) * t->along, columns + j * TALL, height, kind, own, t->stream);
            }
        }
}

/* Other threads see what was written past the caches after this. */
INLINE void finish(const task *t)
{
#if defined(X86_VERSIONS)
    if (t->stream)
        _mm_sfence();
#else
    (void)t;
#endif
}

/* -------------------------------------------------------------------------------------------------- processors */

typedef struct {
    void (*rows)(const task *, const element *, const factors *);
    void (*columns)(const task *, const element *, const factors *);
} version;

/* A function for each kind of results. */
#define FOR_KINDS(name, target, part)                                                                                       \
    target static void name##_##part(const task *t, const element *e, const factors *f)                                     \
    {                                                                                                                       \
        switch (t->kind) {                                                                                                  \
        case FP32: part##_decoded(t, e, f, &name##_routines, FP32); break;                                                  \
        case BF16: part##_decoded(t, e, f, &name##_routines, BF16); break;                                                  \
        default: part##_decoded(t, e, f, &name##_routines, FP16);                                                           \
        }                                                                                                                   \
        finish(t);                                                                                                          \
    }
#define VERSION(name, target)                                                                                               \
    static const routines name##_routines = {                                                                               \
        name##_strip, name##_past, name##_pairs, name##_widen, name##_narrow, name##_shorten, name##_turn};                                 \
    FOR_KINDS(name, target, rows)                                                                                           \
    FOR_KINDS(name, target, columns)                                                                                        \
    static const version name = {name##_rows, name##_columns};

VERSION(portable, )
#if defined(X86_VERSIONS)
VERSION(avx2, FOR_AVX2)
VERSION(avx512, FOR_AVX512)
#endif

#define here ((const version *)chosen)

/* -------------------------------------------------------------------------------------------------- threads */

/* Numbers that a thread decodes at a time, and how many columns of them at most. */
#define PART 65536
#define ACROSS (64 * STRIP)

typedef struct {
    const task *t;
    const element *e;
    const factors *f;
    Py_ssize_t rows, columns, across, next; /* of a part; how many parts are side by side; the next part */
} decoding;

static void decode_part(decoding *d, Py_ssize_t i)
{
    task part = *d->t;
    part.row = i / d->across * d->rows;
    part.row_end = part.row + d->rows < part.rows ? part.row + d->rows : part.rows;
    part.column = i % d->across * d->columns;
    part.column_end = part.column + d->columns < part.columns ? part.column + d->columns : part.columns;
    (is_turned(&part) ? here->columns : here->rows)(&part, d->e, d->f);
}

static Py_ssize_t parts_of(const decoding *d)
{
    return (d->t->rows + d->rows - 1) / d->rows * d->across;
}

#if defined(__GNUC__)
static void decode_some(void *context)
{
    decoding *d = context;
    const Py_ssize_t parts = parts_of(d);
    for (Py_ssize_t i; (i = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED)) < parts;)
        decode_part(d, i);
}
#endif

static void decode_all(const task *t, const element *e, const factors *f, int threads)
{
    const Py_ssize_t most = is_turned(t) ? STRIP : ACROSS, width = t->columns < most ? t->columns : most;
    decoding d = {t, e, f, 0, most, (t->columns + most - 1) / most, 0};
    d.rows = width > 0 ? PART / width / SIDE * SIDE : SIDE;
    d.rows = d.rows > SIDE ? d.rows : SIDE;
#if defined(__GNUC__)
    run_shared(decode_some, &d, threads);
#else
    (void)threads;
    for (Py_ssize_t i = 0; i < parts_of(&d); i++)
        decode_part(&d, i);
#endif
}

/* -------------------------------------------------------------------------------------------------- for Python */

static int is_missing(const Py_buffer *x)
{
    return x->len == 0;
}

/* Is the buffer of aligned FP32, one a block, or missing? */
static int per_block(const Py_buffer *x, Py_ssize_t count)
{
    return is_missing(x) || (x->len == 4 * count && (uintptr_t)x->buf % 4 == 0);
}

PyDoc_STRVAR(decode_doc,
    "decode(data, bits, table, fields, k, m, scale, of_bytes, halved, subtracted, added, global_scale, divides, kind, stream, threads, found):\n"
    "the numbers of a matrix of codes. data: rows of bytes; found: a matrix in any order of FP32 (kind 32), BF16 (16) or FP16 (-16),\n"
    "16-bit numbers as integers. fields: (form, mantissa, infinite, nan, flip, unit), see `element`. Blocks have m rows and k\n"
    "columns. scale: FP32, or bytes, for which of_bytes has FP32 numbers. subtracted, added: FP32 for each block, or empty.\n"
    "global_scale: a float, or None; with divides, numbers are divided by it. stream: write past the caches. threads: how many may\n"
    "work, at most.");

static PyObject *decode(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *values, *codes, *given;
    Py_buffer table, scale, of_bytes, subtracted, added, data, found;
    element e;
    factors f = {0};
    task t = {0};
    int threads;
    if (!PyArg_ParseTuple(args, "Oiy*(iiiiif)nny*y*py*y*OpipiO:decode", &codes, &e.bits, &table, &e.form, &e.mantissa,
            &e.infinite, &e.nan, &e.flip, &e.unit, &t.k, &t.m, &scale, &of_bytes, &f.halved, &subtracted, &added, &given, &f.divides,
            &t.kind, &t.stream, &threads, &values))
        return NULL;
    int done = 0;
    f.has_global = given != Py_None;
    const double global_scale = f.has_global ? PyFloat_AsDouble(given) : 0;
    if (global_scale == -1.0 && PyErr_Occurred())
        goto arguments;
    f.global_scale = (float)global_scale;
    if (PyObject_GetBuffer(codes, &data, PyBUF_STRIDED_RO) < 0)
        goto arguments;
    if (PyObject_GetBuffer(values, &found, PyBUF_STRIDED) < 0)
        goto codes;
    const int size = t.kind == FP32 ? 4 : 2;
    const int matrices = data.ndim == 2 && data.itemsize == 1 && found.ndim == 2 && found.itemsize == size;
    if (matrices) {
        t.rows = found.shape[0], t.columns = found.shape[1], t.down = found.strides[0], t.along = found.strides[1];
        t.data = data.buf, t.pitch = data.strides[0], t.out = found.buf;
    }
    const Py_ssize_t bytes = e.bits == 6 ? (t.columns + 3) / 4 * 3 : (t.columns * e.bits + 7) / 8;
    done = matrices && t.k > 0 && t.m > 0 && (e.bits == 4 || e.bits == 6 || e.bits == 8) && data.shape[0] == t.rows &&
           data.shape[1] == bytes && (data.strides[1] == 1 || bytes <= 1) && (uintptr_t)t.out % size == 0 && t.down % size == 0 &&
           t.along % size == 0;
    if (done) {
        t.blocks = t.columns / t.k + (t.columns % t.k != 0);
        const Py_ssize_t count = (t.rows / t.m + (t.rows % t.m != 0)) * t.blocks;
        const int by_table = is_missing(&of_bytes) ? 4 : 1;
        done = scale.len == by_table * count && (uintptr_t)scale.buf % by_table == 0 && per_block(&of_bytes, 256) &&
               per_block(&subtracted, count) && per_block(&added, count) && e.form >= TABLE && e.form <= INTEGER &&
               (uintptr_t)table.buf % 4 == 0 && ((e.bits != 4 && e.form != TABLE) || table.len == 4 << e.bits) &&
               (e.form != MINIFLOAT || (e.mantissa > 0 && e.mantissa < 8)) &&
               (e.form != INTEGER || e.bits != 6);
    }
    if (done) {
        e.table = table.buf;
        f.scale = scale.buf, f.of_bytes = is_missing(&of_bytes) ? NULL : of_bytes.buf;
        f.subtracted = is_missing(&subtracted) ? NULL : subtracted.buf;
        f.added = is_missing(&added) ? NULL : added.buf;
        Py_BEGIN_ALLOW_THREADS
        decode_all(&t, &e, &f, threads);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError,
            "wanted rows of codes of 4, 6 or 8 bits, an aligned matrix for as many numbers, and a scale for each block of m = %zd by "
            "k = %zd; got %d bits, %zd bytes of codes, of scales %zd, and %zd of room. Call breccia.dequantize.",
            t.m, t.k, e.bits, data.len, scale.len, found.len);
    PyBuffer_Release(&found);
codes:
    PyBuffer_Release(&data);
arguments:
    PyBuffer_Release(&table);
    PyBuffer_Release(&scale);
    PyBuffer_Release(&of_bytes);
    PyBuffer_Release(&subtracted);
    PyBuffer_Release(&added);
    return done ? Py_NewRef(Py_None) : NULL;
}

PyDoc_STRVAR(pooled_doc, "pooled(): whether `decode` can use several threads.");

static PyObject *pooled(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(pool != NULL);
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_VARARGS, decode_doc},
    {"pooled", pooled, METH_NOARGS, pooled_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *Py_UNUSED(self))
{
    return find_pool();
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.decoding",
    .m_doc = "The compiled microkernel of dequantize; see breccia_native.kernels, which calls it.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_decoding(void)
{
    ADD_VERSIONS(&avx512, &avx2, &portable);
    return PyModuleDef_Init(&module);
}
