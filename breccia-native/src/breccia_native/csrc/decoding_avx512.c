/* Decoding by AVX-512. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX512)

#include "decoding_routines.h"
#include "transpose.h"

SPREAD_BY_BMI2

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

/* Numbers decoded in registers at once. */
#define GROUP 64

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

/* Forms of codes, and of what is done to numbers: times a scale only; also by the global scale; minus a zero-point before, too; or
   plus a bias after. */
enum { PAIRS, MINIFLOATS, INTEGERS };
enum { SCALED, TWICE, SHIFTED, ADDED };

/* Scales, and zero-points or biases: of each vector, where k is 0; else of blocks of k, of which a vector has several, or a
   part of one and of the next. */
typedef struct {
    const float *by, *shifts;
    Py_ssize_t k, at; /* at: where in its block the first number is */
} spans;

/* What has a scale: a vector, a number, or a block. */
enum { OF_VECTORS, OF_NUMBERS, OF_BLOCKS };

/* Returns how many numbers have been decoded. */
INLINE Py_ssize_t groups_by_avx512(const int form, const int kind, const int stream, const int steps, const int scales,
    const element *e, const factors *f, const spans *s, const uint8_t *data, Py_ssize_t n, char *to)
{
    const Py_ssize_t k = s->k, whole = scales == OF_VECTORS ? 1 : LANES / k, more = scales == OF_BLOCKS ? LANES % k : 0;
    const uint8_t *const blocks = quotients[k < LANES ? k : LANES]; /* a longer block is as if it had its last LANES numbers only */
    const Py_ssize_t rest = k > LANES ? k - LANES : 0;
    const float *by = s->by, *shifts = s->shifts;
    Py_ssize_t at = s->at;
    const int shifted = steps == SHIFTED || steps == ADDED;
    const int has_global = steps != SCALED && f->has_global, divides = f->divides;
    const __m512 g = _mm512_set1_ps(f->global_scale);
    Py_ssize_t i = 0;
    for (; i < n; i += GROUP, to += GROUP * (kind == FP32 ? 4 : 2)) {
        __m512 y[4];
        if (form == PAIRS)
            pairs_by_avx512(data + i / 2, e, y);
        else if (form == INTEGERS)
            integers_by_avx512(data + i, e, y);
        else if (!minifloats_by_avx512(data + i, e, y))
            break;
        for (int j = 0; j < 4; j++) {
            __m512 scale, shift;
            if (scales == OF_VECTORS) {
                scale = _mm512_set1_ps(*by);
                shift = shifted ? _mm512_set1_ps(*shifts) : scale;
            } else if (scales == OF_NUMBERS) {
                scale = _mm512_loadu_ps(by);
                shift = shifted ? _mm512_loadu_ps(shifts) : scale;
            } else {
                const __m128i lanes = _mm_loadu_si128((const __m128i *)(blocks + (at > rest ? at - rest : 0)));
                const __m512i which = _mm512_cvtepu8_epi32(lanes);
                scale = _mm512_permutexvar_ps(which, _mm512_loadu_ps(by));
                shift = shifted ? _mm512_permutexvar_ps(which, _mm512_loadu_ps(shifts)) : scale;
                at += more;
                const Py_ssize_t next = at >= k;
                at -= next ? k : 0, by += next, shifts += next;
            }
            by += whole, shifts += whole;
            y[j] = steps == SHIFTED ? _mm512_sub_ps(y[j], shift) : y[j];
            y[j] = _mm512_mul_ps(y[j], scale);
            if (steps == ADDED)
                y[j] = _mm512_add_ps(y[j], shift);
            else if (has_global)
                y[j] = divides ? _mm512_div_ps(y[j], g) : _mm512_mul_ps(y[j], g);
        }
        group_stored(kind, stream, y, to);
    }
    return i;
}

typedef Py_ssize_t (*groups)(
    const element *, const factors *, const spans *, const uint8_t *, Py_ssize_t, char *);

#define GROUPS(form, kind, stream, steps)                                                                                   \
    static Py_ssize_t groups_##form##kind##stream##steps(const element *e, const factors *f, const spans *s,     \
        const uint8_t *data, Py_ssize_t n, char *to)                                                                        \
    {                                                                                                                       \
        return s->k == 0   ? groups_by_avx512(form, kind, stream, steps, OF_VECTORS, e, f, s, data, n, to)                  \
               : s->k == 1 ? groups_by_avx512(form, kind, stream, steps, OF_NUMBERS, e, f, s, data, n, to)                  \
                           : groups_by_avx512(form, kind, stream, steps, OF_BLOCKS, e, f, s, data, n, to);                  \
    }
#define OF_KINDS(what, form, stream, steps) what(form, FP32, stream, steps) what(form, BF16, stream, steps) what(form, FP16, stream, steps)
#define OF_STREAMS(what, form, steps) OF_KINDS(what, form, 0, steps) OF_KINDS(what, form, 1, steps)
#define OF_STEPS(what, form) OF_STREAMS(what, form, SCALED) OF_STREAMS(what, form, TWICE) OF_STREAMS(what, form, SHIFTED) \
    OF_STREAMS(what, form, ADDED)
OF_STEPS(GROUPS, PAIRS)
OF_STREAMS(GROUPS, MINIFLOATS, SCALED)
OF_STREAMS(GROUPS, MINIFLOATS, TWICE)
OF_STEPS(GROUPS, INTEGERS)
/* By what is done, whether it streams, and the dtype. */
#define NAMES(form, stream, steps) {groups_##form##FP32##stream##steps, groups_##form##BF16##stream##steps, groups_##form##FP16##stream##steps}
#define TABLE_OF(form, steps) {NAMES(form, 0, steps), NAMES(form, 1, steps)}
static const groups grouped[3][4][2][3] = {
    {TABLE_OF(PAIRS, SCALED), TABLE_OF(PAIRS, TWICE), TABLE_OF(PAIRS, SHIFTED), TABLE_OF(PAIRS, ADDED)},
    {TABLE_OF(MINIFLOATS, SCALED), TABLE_OF(MINIFLOATS, TWICE)}, /* nothing is subtracted from minifloats, nor added */
    {TABLE_OF(INTEGERS, SCALED), TABLE_OF(INTEGERS, TWICE), TABLE_OF(INTEGERS, SHIFTED), TABLE_OF(INTEGERS, ADDED)},
};

/* Limits of scales and zero-points under which no result is NaN or infinite, and all are what they are with the unit in either
   factor. */
#define MOST_SCALE 0x1p80f
#define LEAST_SCALE 0x1p-80f
/* Of zero-points. */
#define MOST_SHIFT 0x1p24f
/* Of numbers of codes, so that no product with such a scale is subnormal. */
#define LEAST_NUMBER 0x1p-40f

/* Whether all 16 numbers of a table are large enough to be added to, or 0. */
INLINE int are_usual(const float *table)
{
    const __m512 sizes = _mm512_abs_ps(_mm512_loadu_ps(table));
    const __mmask16 usual = _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(LEAST_NUMBER), _CMP_GE_OQ) &
                            _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(MOST_SHIFT), _CMP_LE_OQ);
    return (uint16_t)(usual | _mm512_cmp_ps_mask(sizes, _mm512_setzero_ps(), _CMP_EQ_OQ)) == 0xFFFF;
}

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

/* Bits without signs. */
INLINE __m512i magnitudes_of(__m512 y)
{
    return _mm512_castps_si512(_mm512_abs_ps(y));
}

/* Scales times the unit, and zero-points or biases, if any. Returns 0 unless all are within the limits, or 0; of biases, +0. */
INLINE int usual_by_avx512(
    const float *scales, const float *offsets, int added, Py_ssize_t count, float unit, float *by, float *shifts)
{
    const __m512i one = _mm512_set1_epi32(1);
    __m512i least = _mm512_set1_epi32(-1), most = _mm512_setzero_si512(), least_shift = least, most_shift = most;
    for (Py_ssize_t i = 0; i < count; i += LANES) {
        const __mmask16 used = count - i < LANES ? (__mmask16)((1u << (count - i)) - 1) : 0xffff;
        const __m512 scale = _mm512_maskz_loadu_ps(used, scales + i);
        const __m512i size = magnitudes_of(scale);
        least = _mm512_min_epu32(least, _mm512_sub_epi32(size, one)); /* the largest of all for 0 */
        most = _mm512_max_epu32(most, size);
        _mm512_storeu_ps(by + i, _mm512_mul_ps(scale, _mm512_set1_ps(unit)));
        if (offsets) {
            const __m512 offset = _mm512_maskz_loadu_ps(used, offsets + i);
            const __m512i shift = magnitudes_of(offset);
            least_shift = _mm512_min_epu32(least_shift, _mm512_sub_epi32(shift, one));
            most_shift = _mm512_max_epu32(most_shift, shift);
            _mm512_storeu_ps(shifts + i, added ? _mm512_maskz_mov_ps(_mm512_test_epi32_mask(shift, shift), offset) : offset);
        }
    }
    const float largest = added ? MOST_SCALE : MOST_SHIFT;
    const uint32_t smallest = added ? NORMAL : 1; /* subnormal biases count as 0 */
    return !(_mm512_cmplt_epu32_mask(least, _mm512_set1_epi32((int)bits_of(LEAST_SCALE) - 1)) |
             _mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32((int)bits_of(MOST_SCALE))) |
             _mm512_cmplt_epu32_mask(least_shift, _mm512_set1_epi32((int)smallest - 1)) |
             _mm512_cmpgt_epu32_mask(most_shift, _mm512_set1_epi32((int)bits_of(largest))));
}

static Py_ssize_t strip(const task *t, const element *e, const factors *f, place at, const uint8_t *data,
    Py_ssize_t n, int kind, int stream, void *to)
{
    float by[STRIP + LANES], shifts[STRIP + LANES];
    uint8_t room[STRIP];
    const int form = e->bits <= 4 ? PAIRS : e->form == INTEGER ? INTEGERS : MINIFLOATS;
    const int steps = f->added ? ADDED : f->subtracted ? SHIFTED : f->has_global ? TWICE : SCALED;
    /* A unit of integers is applied before a zero-point is subtracted. */
    const float unit = form == PAIRS ? 1 : e->unit, g = fabsf(f->global_scale);
    n = n / GROUP * GROUP;
    if (steps == ADDED && (f->subtracted || f->has_global || form == MINIFLOATS || unit < LEAST_NUMBER ||
                              (form == PAIRS && !are_usual(e->table))))
        return 0;
    if ((e->bits > 4 && e->form == TABLE) || (steps == SHIFTED && (form == MINIFLOATS || unit != 1)) ||
        (f->has_global && !(g >= LEAST_SCALE && g <= MOST_SCALE)) || (f->halved && f->of_bytes && *f->of_bytes >= LEAST_SCALE))
        return 0; /* where byte 0 may be halved, its scale is below the limit */
    spans s = {by, shifts, 0, 0};
    const float *scales = by, *offsets = f->added ? f->added : f->subtracted;
    Py_ssize_t count = n / LANES;
    if (t->k % LANES && at.left < n) {
        count = blocks_of(n, t->k, at.left);
        s.k = t->k, s.at = t->k - at.left;
        if (f->of_bytes)
            scales_of(f, at.block, count, by);
        else
            scales = (const float *)f->scale + at.block;
        offsets = offsets ? offsets + at.block : NULL;
    } else {
        if (f->of_bytes)
            items_of_blocks(f->of_bytes, f->scale, at, t->k, count, by);
        else
            items_of_blocks(NULL, f->scale, at, t->k, count, by);
        if (offsets) {
            items_of_blocks(NULL, (const char *)offsets, at, t->k, count, shifts);
            offsets = shifts;
        }
    }
    if (!usual_by_avx512(scales, offsets, steps == ADDED, count, unit, by, shifts))
        return 0;
    if (is_spread(e->bits)) {
        spread_in_room(data, n, e->bits, spread_by_bmi2, room);
        data = room;
    }
    return grouped[form][steps][stream][kind == FP32 ? 0 : kind == BF16 ? 1 : 2](e, f, &s, data, n, to);
}

static const routines own_routines = {strip, past, pairs, widen, narrow, shorten, NULL, turn, spread_by_bmi2};

#include "decoding_strips.h"

const decoding_functions decoding_avx512 = {decode_rows, decode_columns};

COMPILED
#endif
