/* Products by AVX2 and FMA. */

#define VECTOR_BYTES 32
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(AVX2)

#include "avx2.h"

/* Of 4-bit codes, that of unpacked bytes: a vector has every fourth code of the first 16 of each 32, or of the others. Of INT8 and
   UINT8, vector j of 32 codes has byte j of each lane. */
static const uint8_t order_of_unpacked[CHUNK] = {
#define QUADS_FROM(base) base, base + 4, base + 8, base + 12, base + 32, base + 36, base + 40, base + 44
#define OF_BOTH_HALVES(base) QUADS_FROM(base), QUADS_FROM(64 + base)
    OF_BOTH_HALVES(0), OF_BOTH_HALVES(1), OF_BOTH_HALVES(16), OF_BOTH_HALVES(17), OF_BOTH_HALVES(2), OF_BOTH_HALVES(3),
    OF_BOTH_HALVES(18), OF_BOTH_HALVES(19)};
static const uint8_t order_of_integers[CHUNK] = {
#define BYTES_OF_LANES(i) i, i + 4, i + 8, i + 12, i + 16, i + 20, i + 24, i + 28
#define ORDER_OF_32(i) BYTES_OF_LANES(i), BYTES_OF_LANES(i + 1), BYTES_OF_LANES(i + 2), BYTES_OF_LANES(i + 3)
    ORDER_OF_32(0), ORDER_OF_32(32), ORDER_OF_32(64), ORDER_OF_32(96)};

static const uint8_t *order(const weight *w)
{
    const int kind = w->codes.kind;
    return kind == TABLE4 ? order_of_unpacked : kind == I8 || kind == U8 ? order_of_integers : order_of(w);
}

/* ------------------------------------------------------------------------------------------------ from registers */

INLINE float sum_of(__m256 v)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

/* The spans that codes of a chunk are in, of `spans`. */
INLINE __m256i spans_of(__m256i codes, Py_ssize_t spans)
{
    return _mm256_srl_epi32(codes, _mm_cvtsi32_si128(7 - __builtin_ctz((unsigned)spans)));
}

/* Scales (or offsets) in lanes of codes: `lanes` says which of the four from `scales` on; in the high half, from `high` on. */
INLINE __m256 scales_of_lanes_by_avx2(const float *scales, const float *high, __m256i lanes)
{
    const __m256 found = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(scales)), _mm_loadu_ps(high), 1);
    return _mm256_permutevar_ps(found, lanes);
}

/* Values times scales plus biases, each rounded. */
INLINE __m256 biased_by_avx2(__m256 value, __m256 scale, __m256 offset)
{
    value = _mm256_mul_ps(value, scale);
    AFTER(value); /* see `applied` in avx512.h */
    return _mm256_add_ps(value, offset);
}

/* Products of ROWS rows and M rows of activations, all along K, into sums[m * ROWS + r]. words: whether values of codes are BF16
   numbers. Scales are applied to sums of 4 codes where they are `fine`: there may be one for 16 codes or fewer; else to those of 8,
   or, with `one` scale for a chunk, of 16. With biases, which are `fine`, they are applied to each code. */
INLINE void nibbles_streamed(const int M, const int words, const int role, const int one, const int fine,
    const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    table_bytes bytes;
    bytes_of_table(w->codes.table, bytes.of);
    const Py_ssize_t spans = one ? 1 : p->spans;
    const Py_ssize_t second = spans == SPANS ? 4 : 0; /* of the high lanes' scales, where half a chunk has 8 */
    const __m256i codes_of_lanes = _mm256_set_epi32(44, 40, 36, 32, 12, 8, 4, 0);
    const __m256i lanes[2] = {
        spans_of(codes_of_lanes, spans), spans_of(_mm256_add_epi32(codes_of_lanes, _mm256_set1_epi32(16)), spans)};
    const int apart = M == 1; /* two sums, so that fewer additions wait for the one before */
    __m256 a[4][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm256_setzero_ps();
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride)
        UNROLL for (int r = 0; r < ROWS; r++) {
            FROM_MEMORY(p); /* activations stay in the L1 cache; in registers they would push out what is needed there */
            const uint8_t *codes = codes_of(p, r, c);
            __m256 sum[4][2];
            _mm_prefetch((const char *)codes + p->ahead, _MM_HINT_T0);
            UNROLL for (int half = 0; half < 2; half++) {
                const __m256i v = _mm256_loadu_si256((const void *)(codes + 32 * half));
                const Py_ssize_t at = c * spans + half * spans / 2;
                const float *scales = p->scales[r] + at, *offsets = p->offsets[r] + at;
                __m256 d[2][4];
                UNROLL for (int i = 0; i < 2; i++) nibbles_by_avx2(words, 0, v, i, &bytes, d[i]);
                UNROLL for (int part = 0; part < 2; part++) {
                    const int to = apart ? part : 0, begins = (fine || apart || !part) && !(one && half);
                    __m256 offset = _mm256_setzero_ps(), scale = offset;
                    if (role != NONE)
                        offset = one ? _mm256_set1_ps(*offsets) : scales_of_lanes_by_avx2(offsets, offsets + second, lanes[part]);
                    if (fine)
                        scale = scales_of_lanes_by_avx2(scales, scales + second, lanes[part]);
                    UNROLL for (int j = 0; j < 4; j++) {
                        const int vector = j % 2 + 2 * part + j / 2 * 4;
                        __m256 value = d[j % 2][part + j / 2 * 2];
                        if (role == ZERO_POINT)
                            value = _mm256_sub_ps(value, offset);
                        if (role == BIAS)
                            value = biased_by_avx2(value, scale, offset);
                        UNROLL for (int m = 0; m < M; m++) {
                            const __m256 y = _mm256_loadu_ps(x + m * CHUNK + 16 * vector + 8 * half);
                            if (role == BIAS)
                                a[m][r] = _mm256_fmadd_ps(value, y, a[m][r]);
                            else
                                sum[m][to] = begins && !j ? _mm256_mul_ps(value, y) : _mm256_fmadd_ps(value, y, sum[m][to]);
                        }
                    }
                    if (!fine || role == BIAS)
                        continue;
                    UNROLL for (int m = 0; m < M; m++) a[m][r] = _mm256_fmadd_ps(sum[m][to], scale, a[m][r]);
                }
                if (fine || (one && !half))
                    continue;
                const __m256 scale = one ? _mm256_set1_ps(*scales) : scales_of_lanes_by_avx2(scales, scales, lanes[0]);
                UNROLL for (int m = 0; m < M; m++) {
                    const __m256 all = apart ? _mm256_add_ps(sum[m][0], sum[m][1]) : sum[m][0];
                    a[m][r] = _mm256_fmadd_ps(all, scale, a[m][r]);
                }
            }
        }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = sum_of(a[m][r]);
}

/* Whether a row has a code whose bits but the sign are all 1: E4M3's NaN. */
static int has_nan(const panel *p, int r)
{
    for (Py_ssize_t c = 0; c < p->chunks; c++)
        for (int i = 0; i < CHUNK; i++)
            if ((codes_of(p, r, c)[i] & 127) == 127)
                return 1;
    return 0;
}

/* Likewise for codes of 6 and 8 bits: scales are applied to sums of two codes, or of INT8 ones of four. All sums of a row with
   E4M3's NaN are NaN, so it is enough to look for it once per panel. */
INLINE void bytes_streamed(
    const int M, const int kind, const int role, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    enum { EACH = 32 }; /* codes in a register */
    const Py_ssize_t spans = p->spans;
    const __m256i two = _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0), half = _mm256_set1_epi32(EACH / 2);
    const __m256i lanes = spans_of(IS_HALF(kind) ? two : _mm256_add_epi32(two, two), spans);
    const __m256i others = spans_of(_mm256_add_epi32(two, half), spans);
    __m256i largest = _mm256_setzero_si256();
    __m256 a[4][ROWS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm256_setzero_ps();
    for (Py_ssize_t c = 0; c < p->chunks; c++, x += stride)
        UNROLL for (int r = 0; r < ROWS; r++) {
            FROM_MEMORY(p);
            const uint8_t *codes = codes_of(p, r, c);
            const char *next = (const char *)codes + p->ahead;
            _mm_prefetch(next, _MM_HINT_T0);
            _mm_prefetch(next + 64, _MM_HINT_T0);
            ONE_BY_ONE for (int i = 0; i < CHUNK / EACH; i++) {
                const __m256i v = bytes_by_avx2(kind, codes + i * (IS_SIX(kind) ? 24 : 32));
                const Py_ssize_t at = c * spans + i * spans / (CHUNK / EACH);
                __m256 d[4];
                if (kind == E4M3)
                    largest = _mm256_max_epu8(largest, _mm256_or_si256(v, _mm256_set1_epi8((char)128)));
                if (IS_HALF(kind)) {
                    const __m256i high = kind == E5M2 ? _mm256_and_si256(v, _mm256_set1_epi16((short)0xFF00)) : v;
                    const __m256i even = finite_halves_by_avx2(kind, _mm256_slli_epi16(v, 8));
                    const __m256i odd = finite_halves_by_avx2(kind, high);
                    d[0] = low_half(even), d[1] = high_half(even), d[2] = low_half(odd), d[3] = high_half(odd);
                } else
                    UNROLL for (int j = 0; j < 4; j++) d[j] = integer_by_avx2(kind, v, j);
                const float *scales = p->scales[r] + at;
                const __m256 scale = scales_of_lanes_by_avx2(scales, scales, lanes);
                if (IS_HALF(kind)) { /* lanes of vectors 0 and 2 have the codes 0 to 15, of 1 and 3 the codes 16 to 31 */
                    const __m256 other = scales_of_lanes_by_avx2(scales, scales, others);
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int j = 0; j < 2; j++) {
                            const float *y = x + m * CHUNK + EACH * i + 8 * j;
                            const __m256 one = _mm256_mul_ps(d[j], _mm256_loadu_ps(y));
                            const __m256 both = _mm256_fmadd_ps(d[j + 2], _mm256_loadu_ps(y + 16), one);
                            a[m][r] = _mm256_fmadd_ps(both, j ? other : scale, a[m][r]);
                        }
                    continue;
                }
                if (role != NONE) {
                    const float *offsets = p->offsets[r] + at;
                    const __m256 offset = scales_of_lanes_by_avx2(offsets, offsets, lanes);
                    UNROLL for (int j = 0; j < 4; j++)
                        d[j] = role == BIAS ? biased_by_avx2(d[j], scale, offset) : _mm256_sub_ps(d[j], offset);
                }
                UNROLL for (int m = 0; m < M; m++) {
                    const float *y = x + m * CHUNK + EACH * i;
                    __m256 sum = _mm256_mul_ps(d[0], _mm256_loadu_ps(y));
                    UNROLL for (int j = 1; j < 4; j++) sum = _mm256_fmadd_ps(d[j], _mm256_loadu_ps(y + 8 * j), sum);
                    a[m][r] = role == BIAS ? _mm256_add_ps(sum, a[m][r]) : _mm256_fmadd_ps(sum, scale, a[m][r]);
                }
            }
        }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = sum_of(a[m][r]);
    if (kind != E4M3 || !_mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1))))
        return;
    for (int r = 0; r < ROWS; r++)
        if (has_nan(p, r))
            for (int m = 0; m < M; m++)
                sums[m * ROWS + r] = NAN;
}

#define NIBBLES_BY_AVX2(M, words, role, one, fine) nibbles_streamed(M, words, role, one, fine, w, p, x, stride, sums)
#define WORDS_BY_AVX2(M, role)                                                                                              \
    (p->spans == 1 ? NIBBLES_BY_AVX2(M, 1, role, 1, 0)                                                                      \
            : p->spans <= 4 ? NIBBLES_BY_AVX2(M, 1, role, 0, 0) : NIBBLES_BY_AVX2(M, 1, role, 0, 1))
#define BYTES_BY_AVX2(M, kind, role) bytes_streamed(M, kind, role, p, x, stride, sums)
#define BY_ROLE(what, M, kind)                                                                                              \
    (w->role == NONE ? what(M, kind, NONE) : w->role == BIAS ? what(M, kind, BIAS) : what(M, kind, ZERO_POINT))
#define FINE_BY_AVX2(M, words, role) NIBBLES_BY_AVX2(M, words, role, 0, 1)
#define STREAMS_BY_AVX2(M)                                                                                                  \
    static void streamed##M##_by_avx2(                                                                             \
        const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)                                    \
    {                                                                                                                       \
        switch (w->codes.kind) {                                                                                            \
        case TABLE4:                                                                                                        \
            if (!are_words(w->codes.table))                                                                                 \
                BY_ROLE(FINE_BY_AVX2, M, 0);                                                                                \
            else if (w->role == BIAS)                                                                                       \
                FINE_BY_AVX2(M, 1, BIAS);                                                                                   \
            else                                                                                                            \
                w->role == NONE ? WORDS_BY_AVX2(M, NONE) : WORDS_BY_AVX2(M, ZERO_POINT);                                    \
            break;                                                                                                          \
        case E4M3: BYTES_BY_AVX2(M, E4M3, NONE); break;                                                                     \
        case E5M2: BYTES_BY_AVX2(M, E5M2, NONE); break;                                                                     \
        case E2M3: BYTES_BY_AVX2(M, E2M3, NONE); break;                                                                     \
        case E3M2: BYTES_BY_AVX2(M, E3M2, NONE); break;                                                                     \
        case I8: BY_ROLE(BYTES_BY_AVX2, M, I8); break;                                                                      \
        default: BY_ROLE(BYTES_BY_AVX2, M, U8);                                                                             \
        }                                                                                                                   \
    }
STREAMS_BY_AVX2(1)
STREAMS_BY_AVX2(2)
STREAMS_BY_AVX2(4)

/* Multiplies up to `m` rows of activations, 4 at most. Returns how many. */
INLINE int stream(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    const int taken = m >= 4 ? 4 : m >= 2 ? 2 : 1;
    (taken == 4 ? streamed4_by_avx2 : taken == 2 ? streamed2_by_avx2 : streamed1_by_avx2)(w, p, x, stride, sums);
    return taken;
}

static Py_ssize_t most_streams(const weight *w)
{
    const int kind = w->codes.kind, role = w->role;
    const int integers = kind == TABLE4 || kind == I8 || kind == U8;
    return w->span == SPAN && kind != TABLE8 && (role == NONE || integers) ? 4 : 0;
}

/* ------------------------------------------------------------------------------------------------ tiles */

/* Four values of a lane's codes: i, i + 2, i + 4 and i + 6 of 8 of 4 bits; or all of 8. words: see `nibbles_by_avx2`. */
INLINE void values_by_avx2(
    const int kind, const int words, __m256i v, const int i, const float *table, const table_bytes *bytes, __m256 *to)
{
    if (kind == TABLE4)
        nibbles_by_avx2(words, 1, v, i, bytes, to);
    else if (IS_HALF(kind))
        UNROLL for (int j = 0; j < 2; j++) {
            const __m256i high = j ? _mm256_and_si256(v, _mm256_set1_epi16((short)0xFF00)) : _mm256_slli_epi16(v, 8);
            const __m256i both = halves_by_avx2(kind, high);
            const __m256i first = _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF)), second = _mm256_srli_epi32(both, 16);
            const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
            to[j] = low_half(halves);
            to[j + 2] = high_half(halves);
        }
    else if (kind != TABLE8)
        UNROLL for (int j = 0; j < 4; j++) to[j] = integer_by_avx2(kind, v, j);
    else
        UNROLL for (int j = 0; j < 4; j++) {
            const __m256i code = _mm256_and_si256(_mm256_srli_epi32(v, 8 * j), _mm256_set1_epi32(255));
            to[j] = _mm256_i32gather_ps(table, code, 4);
        }
}

/* 32 bytes of codes of 8 rows are transposed as words of 32 bits, which are decoded then. A number of all 16 rows is stored at a
   time, since a processor takes longer for half a cache line and then the other. */
INLINE void tile_by_avx2(const int kind, const int words, const int role, const weight *w, const panel *p,
    Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    table_bytes bytes;
    if (kind == TABLE4)
        bytes_of_table(w->codes.table, bytes.of);
    const int each = kind == TABLE4 ? 8 : 4, parts = CHUNK / (8 * each), size = IS_SIX(kind) ? 24 : 32;
    for (Py_ssize_t c = first; c < first + chunks; c++) {
        const Py_ssize_t after = c + chunks < p->chunks ? c + chunks : c + chunks - p->chunks;
        const Py_ssize_t next = after * p->bytes + (after < c ? NR * w->row_bytes : 0);
        __m256 scales[2][SPANS], offsets[2][SPANS];
        for (int half = 0; half < 2; half++) {
            scales_by_avx2(p->scales + 8 * half, c, scales[half]);
            if (role != NONE)
                scales_by_avx2(p->offsets + 8 * half, c, offsets[half]);
        }
        for (int part = 0; part < parts; part++) {
            __m256 v[2][8];
            UNROLL for (int half = 0; half < 2; half++) {
                UNROLL for (int r = 0; r < 8; r++) {
                    const int row = 8 * half + r;
                    v[half][r] = _mm256_castsi256_ps(bytes_by_avx2(kind, codes_of(p, row, c) + size * part));
                    if (part % 2 == 0)
                        _mm_prefetch((const char *)p->codes[row] + next + size * part, _MM_HINT_T0);
                }
                transposed8(v[half]);
            }
            for (int j = 0; j < 8; j++) {
                const int k = (part * 8 + j) * each;
                float *to = tile + ((c - first) * CHUNK + k) * NR;
                UNROLL for (int i = 0; i < each / 4; i++) {
                    __m256 y[2][4];
                    UNROLL for (int half = 0; half < 2; half++) {
                        values_by_avx2(kind, words, _mm256_castps_si256(v[half][j]), i, w->codes.table, &bytes, y[half]);
                        UNROLL for (int q = 0; q < 4; q++) {
                            __m256 *one = &y[half][q];
                            if (role == ZERO_POINT)
                                *one = _mm256_sub_ps(*one, offsets[half][k / SPAN]);
                            *one = _mm256_mul_ps(*one, scales[half][k / SPAN]);
                            if (role == BIAS) {
                                AFTER(*one); /* see `applied` in avx512.h */
                                *one = _mm256_add_ps(*one, offsets[half][k / SPAN]);
                            }
                        }
                    }
                    UNROLL for (int q = 0; q < 4; q++)
                        UNROLL for (int half = 0; half < 2; half++)
                            _mm256_storeu_ps(to + (each == 8 ? i + 2 * q : q) * NR + 8 * half, y[half][q]);
                }
            }
        }
    }
}

#define TILE_BY_AVX2(kind, words)                                                                                           \
    (w->role == NONE             ? tile_by_avx2(kind, words, NONE, w, p, first, chunks, tile)                               \
            : w->role == ZERO_POINT ? tile_by_avx2(kind, words, ZERO_POINT, w, p, first, chunks, tile)                      \
                                    : tile_by_avx2(kind, words, BIAS, w, p, first, chunks, tile))

static void decode_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    if (w->span != SPAN) {
        tile_of_rows(w, p, first, chunks, lift_of(w->codes.kind), tile);
        return;
    }
    switch (w->codes.kind) {
    case TABLE4: are_words(w->codes.table) ? TILE_BY_AVX2(TABLE4, 1) : TILE_BY_AVX2(TABLE4, 0); break;
    case TABLE8: TILE_BY_AVX2(TABLE8, 0); break;
    case E4M3: TILE_BY_AVX2(E4M3, 0); break;
    case E5M2: TILE_BY_AVX2(E5M2, 0); break;
    case E2M3: TILE_BY_AVX2(E2M3, 0); break;
    case E3M2: TILE_BY_AVX2(E3M2, 0); break;
    case I8: TILE_BY_AVX2(I8, 0); break;
    default: TILE_BY_AVX2(U8, 0);
    }
}

MICRO(1)
MICRO(2)
MICRO(3)
MICRO(4)
MICRO(5)
MICRO(6)
static const micro micros[] = {NULL, micro1, micro2, micro3, micro4, micro5, micro6};

/* ------------------------------------------------------------------------------------------------ the version */

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    (void)words;
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx2, NULL, p);
}

static const tiling tiles = {decode_tile, micros, 6};

static int rows(int streams, const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_of(&tiles, stream, scales, CHUNK, streams, w, to, x, m, first, end, y);
}

static void pack(int streams, const weight *w, const float *x, Py_ssize_t m, part part, float *to)
{
    if (streams)
        pack_chunks(x, m, w->k, part, order(w), to);
    else
        pack_panel(x, w->k, part, to);
}

void widen_by_bmi2(const weight *w, const uint8_t *from, uint8_t *to)
{
    widen_codes(w, from, to, spread_by_bmi2);
}

const version products_avx2 = {"avx2", rows, pack, most_streams, 6, lift_of, widen_by_bmi2, 0};

COMPILED
#endif
