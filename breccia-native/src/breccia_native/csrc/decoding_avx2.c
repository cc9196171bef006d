/* Decoding by AVX2. */

#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(CASTS_AVX2)

#include "decoding_routines.h"
#include "transpose.h"

SPREAD_BY_BMI2

static void turn(const float *rows, float *columns)
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

static void past(char *to, const char *from, Py_ssize_t n)
{
    n = up_to(&to, &from, n, 32);
    for (; n >= 32; to += 32, from += 32, n -= 32)
        _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
    for (; n >= 16; to += 16, from += 16, n -= 16)
        _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
    memcpy(to, from, (size_t)n);
}

/* Numbers of 4 bytes each, of which a shuffle looks up one for 32 codes. */
static void pairs(const uint8_t *data, Py_ssize_t n, const float *table, float *y)
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

static void widen(const uint16_t *halves, Py_ssize_t n, float *y)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    some_widened(halves, i, n, y);
}

static void narrow(const float *y, Py_ssize_t n, uint16_t *halves)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(halves + i), _mm256_cvtps_ph(_mm256_loadu_ps(y + i), _MM_FROUND_TO_NEAREST_INT));
    some_narrowed(y, i, n, halves);
}

/* Numbers, none of which is NaN, as BF16 in the low halves of lanes. */
INLINE __m256i bfloats_by_avx2(__m256 y)
{
    const __m256i u = _mm256_castps_si256(y), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
}

static void shorten(const float *y, Py_ssize_t n, uint16_t *halves)
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

/* A vector has numbers of a few blocks, whose items are in one vector of them. */
static void repeat(const float *items, Py_ssize_t k, Py_ssize_t left, Py_ssize_t n, float *to)
{
    const Py_ssize_t whole = 8 / k, more = 8 % k;
    Py_ssize_t at = k - left; /* where in its block the first number is */
    for (Py_ssize_t i = 0; i < n; i += 8) {
        const __m256i which = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(quotients[k] + at)));
        _mm256_storeu_ps(to + i, _mm256_permutevar8x32_ps(_mm256_loadu_ps(items), which));
        items += whole, at += more;
        if (at >= k)
            items++, at -= k;
    }
}

static const routines own_routines = {NULL, past, pairs, widen, narrow, shorten, repeat, turn, spread_by_bmi2};

#include "decoding_strips.h"

const decoding_functions decoding_avx2 = {decode_rows, decode_columns};

COMPILED
#endif
