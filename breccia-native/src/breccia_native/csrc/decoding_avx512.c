/* Decoding by AVX-512. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX512)

#include "decoding_routines.h"
#include "transpose.h"

static void turn(const float *rows, float *columns)
{
    __m512 v[SIDE];
    for (int n = 0; n < SIDE; n++)
        v[n] = _mm512_loadu_ps(rows + n * STRIP);
    transposed(v);
    for (int n = 0; n < SIDE; n++)
        _mm512_storeu_ps(columns + n * TALL, v[n]);
}
/* Whole lines of 64 bytes by one store; the rest by steps of 16, which the processor joins to what comes next. */
static void past(char *to, const char *from, Py_ssize_t n)
{
    n = up_to(&to, &from, n, 64);
    for (; n >= 64; to += 64, from += 64, n -= 64)
        _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
    for (; n >= 16; to += 16, from += 16, n -= 16)
        _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
    memcpy(to, from, (size_t)n);
}

static void pairs(const uint8_t *data, Py_ssize_t n, const float *table, float *y)
{
    const __m512 all = _mm512_loadu_ps(table);
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(halves_of_bytes(data + i / 2)), all));
    some_pairs(data, i, n, table, y);
}

static void widen(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + i))));
    some_widened(halves, i, n, y);
}

static void narrow(const float *y, Py_ssize_t n, uint16_t *halves)
{
    Py_ssize_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(halves + i), _mm512_cvtps_ph(_mm512_loadu_ps(y + i), _MM_FROUND_TO_NEAREST_INT));
    some_narrowed(y, i, n, halves);
}

static void shorten(const float *y, Py_ssize_t n, uint16_t *halves)
{
    some_shortened(y, 0, n, halves);
}

/* Numbers decoded in registers at once, and in one vector. */
#define GROUP 64
#define LANES 16

/* GROUP numbers of a minifloat, over its unit, from their codes, one a byte. Returns 0 where one is not finite. */
INLINE int minifloats_by_avx512(const uint8_t *codes, const element *e, __m512 y[4])
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

INLINE void integers_by_avx512(const uint8_t *codes, const element *e, __m512 y[4])
{
    const __m512i flip = _mm512_set1_epi32(e->flip);
    for (int i = 0; i < 4; i++) {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + LANES * i)));
        y[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_xor_si512(code, flip), flip));
    }
}

/* Lane j of vector i reads the 8 codes that include 16 i + j, and shifts that one down; higher bits do not select. */
INLINE void pairs_by_avx512(const uint8_t *data, const element *e, __m512 y[4])
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
INLINE __m512i rounded_to_bf16(__m512 y)
{
    const __m512i u = _mm512_castps_si512(y);
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    return _mm512_add_epi32(u, _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000)));
}

INLINE void line_stored(const int stream, void *to, __m512i line)
{
    if (stream)
        _mm512_stream_si512((__m512i *)to, line);
    else
        _mm512_storeu_si512(to, line);
}

INLINE void group_stored(const int kind, const int stream, const __m512 y[4], char *to)
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
INLINE Py_ssize_t groups_by_avx512(const int form, const int kind, const int stream, const int steps, const element *e,
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
    static Py_ssize_t groups_##form##kind##stream##steps(const element *e, const factors *f, const float *by,    \
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
INLINE void items_of_vectors(const float *of_bytes, const char *items, place at, Py_ssize_t k, Py_ssize_t vectors,
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

INLINE void items_of_blocks(
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
INLINE int scales_by_avx512(const task *t, const factors *f, place at, Py_ssize_t vectors, float unit, float *by, float *less)
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

static Py_ssize_t strip(const task *t, const element *e, const factors *f, place at, const uint8_t *data,
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

static const routines own_routines = {strip, past, pairs, widen, narrow, shorten, turn};

#include "decoding_strips.h"

const decoding_functions decoding_avx512 = {decode_rows, decode_columns};

COMPILED
#endif
