/* Products by AVX-512. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(AVX512)

#include "streams512.h"

/* The scales (or offsets) of the lanes of vector `i` of bytes, of a chunk with `spans` of them. */
INLINE __m512 lanes_of(const int kind, const int grain, const float *scales, const int i, Py_ssize_t spans)
{
    const __m512i by4 = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i by8 = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const int first = IS_HALF(kind) ? i / 2 * 32 : i * 16; /* of its codes */
    const float *from = scales + first * spans / CHUNK;
    if (grain != MANY)
        return _mm512_set1_ps(*from);
    return _mm512_permutexvar_ps(IS_HALF(kind) && spans == SPANS ? by4 : by8, _mm512_loadu_ps(from));
}

/* 64 codes as the vectors that activations are in the order of. */
INLINE void bytes_by_avx512(const int kind, const uint8_t *codes, __m512 to[4])
{
    if (!IS_HALF(kind)) {
        UNROLL for (int i = 0; i < 4; i++) {
            const __m128i v = _mm_loadu_si128((const void *)(codes + 16 * i));
            to[i] = _mm512_cvtepi32_ps(kind == U8 ? _mm512_cvtepu8_epi32(v) : _mm512_cvtepi8_epi32(v));
        }
        return;
    }
    __m512i even, odd;
    halves_of_bytes(kind, _mm512_loadu_si512(codes), &even, &odd);
    to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
    to[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
    to[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
    to[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}

INLINE void bytes_streamed(
    const int M, const int kind, const int role, const int grain, const weight *w, const panel *p, const float *x,
    Py_ssize_t stride, float *sums)
{
    /* With one row of activations, scales are applied to sums of a pair of vectors, or of a chunk. */
    const int later = role == NONE && M == 1 && (grain == ONE || IS_HALF(kind));
    const Py_ssize_t spans = grain == ONE ? 1 : p->spans;
    const Py_ssize_t chunks = p->chunks, ahead = p->ahead;
    __m512 a[4][ROWS];
    (void)w;
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) a[m][r] = _mm512_setzero_ps();
    for (Py_ssize_t c = 0; c < chunks; c++, x += stride) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            uint8_t room[CHUNK];
            FROM_MEMORY(p);
            const uint8_t *codes = bytes_of(kind, p, r, c, room);
            const float *scales = p->scales[r] + c * spans, *offsets = p->offsets[r] + c * spans;
            const char *next = (const char *)(IS_SIX(kind) ? codes_of(p, r, c) : codes) + ahead;
            __m512 all[2];
            _mm_prefetch(next, _MM_HINT_T1);
            _mm_prefetch(next + 64, _MM_HINT_T1);
            UNROLL for (int half = 0; half < 2; half++) {
                const float *y = x + 64 * half;
                __m512 d[4];
                bytes_by_avx512(kind, codes + 64 * half, d);
                UNROLL for (int i = 0; i < 4; i += 2) {
                    if (later) {
                        __m512 sum = _mm512_mul_ps(d[i], _mm512_loadu_ps(y + 16 * i));
                        if (grain == ONE && half)
                            sum = _mm512_fmadd_ps(d[i], _mm512_loadu_ps(y + 16 * i), all[i / 2]);
                        sum = _mm512_fmadd_ps(d[i + 1], _mm512_loadu_ps(y + 16 * i + 16), sum);
                        if (grain == ONE)
                            all[i / 2] = sum;
                        else
                            a[0][r] = _mm512_fmadd_ps(sum, lanes_of(kind, grain, scales, 4 * half + i, spans), a[0][r]);
                        continue;
                    }
                    UNROLL for (int j = i; j < i + 2; j++) {
                        const __m512 scale = lanes_of(kind, grain, scales, 4 * half + j, spans);
                        const __m512 offset = role == NONE ? scale : lanes_of(kind, grain, offsets, 4 * half + j, spans);
                        const __m512 e = applied(role, d[j], scale, offset);
                        UNROLL for (int m = 0; m < M; m++)
                            a[m][r] = _mm512_fmadd_ps(e, _mm512_loadu_ps(y + m * CHUNK + 16 * j), a[m][r]);
                    }
                }
            }
            if (later && grain == ONE)
                a[0][r] = _mm512_fmadd_ps(_mm512_add_ps(all[0], all[1]), _mm512_set1_ps(*scales), a[0][r]);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int r = 0; r < ROWS; r++) sums[m * ROWS + r] = _mm512_reduce_add_ps(a[m][r]);
}

/* ------------------------------------------------------------------------------------------------ all streams */

#define NIBBLES(M, role, grain) \
    STREAM(nibbles_##M##role##grain, nibbles_streamed(0, M, role, grain, w, p, x, stride, sums))
#define BYTES(M, kind, grain) \
    STREAM(bytes_##M##kind##grain, bytes_streamed(M, kind, NONE, grain, w, p, x, stride, sums))
#define SHIFTED_I8(M, role, grain) \
    STREAM(shifted_i8_##M##role##grain, bytes_streamed(M, I8, role, grain, w, p, x, stride, sums))
#define SHIFTED_U8(M, role, grain) \
    STREAM(shifted_u8_##M##role##grain, bytes_streamed(M, U8, role, grain, w, p, x, stride, sums))
#define BYTES_OF(kind) FOR_ALL(BYTES, kind, ONE) FOR_ALL(BYTES, kind, FEW) FOR_ALL(BYTES, kind, MANY)
FOR_ALL(NIBBLES, NONE, ONE)
FOR_ALL(NIBBLES, NONE, MANY)
FOR_ALL(NIBBLES, NONE, WORDS)
FOR_ALL(NIBBLES, ZERO_POINT, ONE)
FOR_ALL(NIBBLES, ZERO_POINT, MANY)
FOR_ALL(NIBBLES, BIAS, ONE)
FOR_ALL(NIBBLES, BIAS, MANY)
BYTES_OF(E4M3)
BYTES_OF(E5M2)
BYTES_OF(E2M3)
BYTES_OF(E3M2)
BYTES_OF(I8)
BYTES_OF(U8)
#define SHIFTED_OF(what) \
    FOR_ALL(what, ZERO_POINT, FEW) FOR_ALL(what, ZERO_POINT, MANY) FOR_ALL(what, BIAS, FEW) FOR_ALL(what, BIAS, MANY)
SHIFTED_OF(SHIFTED_I8)
SHIFTED_OF(SHIFTED_U8)

#define OF_NIBBLES(role) {FUNCTIONS(nibbles_, role, ONE), FUNCTIONS(nibbles_, role, MANY), FUNCTIONS(nibbles_, role, MANY)}
#define OF_BYTES(kind) {FUNCTIONS(bytes_, kind, ONE), FUNCTIONS(bytes_, kind, FEW), FUNCTIONS(bytes_, kind, MANY)}
static const streamed nibble_streams[ROLES][MANY + 1][3] = {OF_NIBBLES(NONE), OF_NIBBLES(ZERO_POINT), OF_NIBBLES(BIAS)};
static const streamed nibbles_by_words[3] = FUNCTIONS(nibbles_, NONE, WORDS);
static const streamed byte_streams[6][MANY + 1][3] = {
    OF_BYTES(E4M3), OF_BYTES(E5M2), OF_BYTES(E2M3), OF_BYTES(E3M2), OF_BYTES(I8), OF_BYTES(U8)};
/* Of integers with zero-points and biases. */
#define OF_SHIFTED(name, role) {FUNCTIONS(name, role, FEW), FUNCTIONS(name, role, FEW), FUNCTIONS(name, role, MANY)}
static const streamed shifted_streams[2][2][MANY + 1][3] = {
    {OF_SHIFTED(shifted_i8_, ZERO_POINT), OF_SHIFTED(shifted_i8_, BIAS)},
    {OF_SHIFTED(shifted_u8_, ZERO_POINT), OF_SHIFTED(shifted_u8_, BIAS)}};

/* Multiplies up to `m` rows of activations, 4 at most. Returns how many. */
int stream_by_avx512(const weight *w, const panel *p, const float *x, Py_ssize_t stride, int m, float *sums)
{
    const int size = m >= 4 ? 2 : m >= 2 ? 1 : 0, kind = w->codes.kind;
    const int grain = p->words ? WORDS : p->spans == 1 ? ONE : p->spans <= (IS_HALF(kind) ? 4 : 8) ? FEW : MANY;
    if (w->short_block)
        stream_short_blocks(size, w, p, x, stride, sums);
    else if (kind == TABLE4)
        (grain == WORDS ? nibbles_by_words : nibble_streams[w->role][grain])[size](w, p, x, stride, sums);
    else if (w->role != NONE)
        shifted_streams[kind - I8][w->role - ZERO_POINT][grain][size](w, p, x, stride, sums);
    else
        byte_streams[kind - E4M3][grain][size](w, p, x, stride, sums);
    return 1 << size;
}

/* ------------------------------------------------------------------------------------------------ tiles */

/* 64 bytes of codes of 16 rows are transposed as words of 32 bits, which are decoded then. */
INLINE void tile_by_avx512(
    const int kind, const int role, const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    const __m512 table = kind == TABLE4 ? _mm512_loadu_ps(w->codes.table) : _mm512_setzero_ps();
    const int same = uniform(w), each = kind == TABLE4 ? 8 : 4, words = CHUNK / each;
    for (Py_ssize_t c = first; c < first + chunks; c++)
        for (int rows = 0; rows < NR; rows += 16) {
            __m512 scales[16], offsets[16], v[32];
            read_codes(kind, p, rows, c, (c + 2) * p->bytes, v);
            scales_of_rows(same, p->scales + rows, c, scales);
            if (role != NONE)
                scales_of_rows(same, p->offsets + rows, c, offsets);
            for (int j = 0; j < words; j++) {
                const int k = j * each, span = same ? 0 : k / SPAN;
                const __m512 scale = scales[span], offset = role == NONE ? scale : offsets[span];
                float *to = tile + ((c - first) * CHUNK + k) * NR + rows;
                UNROLL for (int i = 0; i < each; i++) {
                    const __m512 value = value_of(kind, _mm512_castps_si512(v[j]), i, table, w->codes.table);
                    _mm512_storeu_ps(to + i * NR, applied(role, value, scale, offset));
                }
            }
        }
}

#define BY_ROLE(kind)                                                                                                       \
    case kind:                                                                                                              \
        if (w->role == NONE)                                                                                                \
            tile_by_avx512(kind, NONE, w, p, first, chunks, tile);                                                          \
        else if (w->role == BIAS)                                                                                           \
            tile_by_avx512(kind, BIAS, w, p, first, chunks, tile);                                                          \
        else                                                                                                                \
            tile_by_avx512(kind, ZERO_POINT, w, p, first, chunks, tile);                                                    \
        break;

void decode_tile_by_avx512(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    if (w->span != SPAN) {
        tile_of_rows(w, p, first, chunks, lift_of(w->codes.kind), tile);
        return;
    }
    switch (w->codes.kind) {
        BY_ROLE(TABLE4)
        BY_ROLE(TABLE8)
        BY_ROLE(E4M3)
        BY_ROLE(E5M2)
        BY_ROLE(E2M3)
        BY_ROLE(E3M2)
        BY_ROLE(I8)
        BY_ROLE(U8)
    }
}

MICRO(1)
MICRO(2)
MICRO(3)
MICRO(4)
MICRO(5)
MICRO(6)
MICRO(7)
MICRO(8)
MICRO(9)
MICRO(10)
MICRO(11)
MICRO(12)
MICRO(13)
MICRO(14)
const micro micros_of_avx512[] = {NULL, micro1, micro2, micro3, micro4, micro5, micro6, micro7,
    micro8, micro9, micro10, micro11, micro12, micro13, micro14};

/* ------------------------------------------------------------------------------------------------ the version */

/* The most rows of activations for which codes are decoded in registers, once for every 4 rows. */
Py_ssize_t most_streams_of_avx512(const weight *w)
{
    const int kind = w->codes.kind, role = w->role;
    if (w->span != SPAN || (kind != TABLE4 && (kind < (role == NONE ? E4M3 : I8) || kind > U8)))
        return 0;
    return kind == TABLE4 ? 16 : 8;
}

/* The `worder`. */
INLINE int words_by_avx512(const weight *w, Py_ssize_t row, uint16_t *to)
{
    const uint8_t *bytes = w->scale.items + row * w->groups;
    if (w->codes.kind != TABLE4)
        return 0;
    if (w->scale.kind == E8M0)
        return words_of_e8m0(bytes, w->groups, to);
    if (w->scale.kind != E4M3)
        return 0;
    words_of_e4m3(bytes, w->groups, to);
    return 1;
}

INLINE int scales(const weight *w, const workspace *to, Py_ssize_t n, Py_ssize_t stop, Py_ssize_t span, int words, panel *p)
{
    return scales_of_panel(w, to, n, stop, span, decoded_by_avx512, words ? words_by_avx512 : NULL, p);
}

static const tiling tiles = {decode_tile_by_avx512, micros_of_avx512, 14};

static int rows(int streams, const weight *w, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    return rows_of(&tiles, stream_by_avx512, scales, CHUNK, streams, w, to, x, m, first, end, y);
}

static void pack(int streams, const weight *w, const float *x, Py_ssize_t m, part part, float *to)
{
    if (streams)
        pack_chunks(x, m, w->k, part, order_of(w), to);
    else
        pack_panel(x, w->k, part, to);
}

const version products_avx512 = {"avx512", rows, pack, most_streams_of_avx512, 14, lift_of, widen_by_bmi2, 1};

COMPILED
#endif
