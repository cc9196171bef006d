/* Products of one to four rows of activations rounded to INT8, and codes of 1 to 8 bits in blocks of 16, 32 or 64, by AVX-512 VNNI
   and VBMI.

   A row of the weight is taken in its own order, 64 codes at a time: `multishift` brings codes of any width to bytes, and
   lane j of a sum of integers has codes 4j to 4j + 3, which share a scale. It starts with what making codes unsigned adds, so it
   is the sum for the codes as they are. Biases are multiplied by the sums of activations. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vnni,avx512vbmi," AVX512)

#include "short_blocks.h"

/* Codes of a vector, and groups whose scales are multiplied together. */
enum { VECTOR = 64, TOGETHER = 16 };

/* Activations of one row, packed: codes, what each lane's sum starts with, and of each group the scale, and that times the sum. */
typedef struct {
    const int8_t *codes;
    const int32_t *starts;
    const float *scales, *sums;
} few_x;

INLINE few_x few_at(const grouping *g, const float *packed, Py_ssize_t length)
{
    const float *const scales = packed + length / 2;
    const few_x x = {(const int8_t *)packed, (const int32_t *)packed + length / 4, scales, scales + length / g->q};
    return x;
}

/* What stored codes are made unsigned by, which the sums start without. */
int shift_of_few(const weight *w, const grouping *g)
{
    return w->codes.kind == TABLE4 ? g->shift : w->codes.kind == I8 ? 1 << (w->width - 1) : 0;
}

int takes_few(const weight *w, const grouping *g, Py_ssize_t m)
{
    return m <= FEW_ROWS && w->role != ZERO_POINT && w->groups > 1 && g->q >= 16 && g->q <= VECTOR && w->k % g->q == 0;
}

INLINE void pack_few_of(const grouping *g, const Py_ssize_t q, const float *x, Py_ssize_t k, part part, float *to)
{
    const Py_ssize_t length = (k + CHUNK - 1) / CHUNK * CHUNK, end = part.end < k ? part.end : length;
    for (Py_ssize_t r = 0; r < part.rows; r++) {
        const few_x row = few_at(g, to + (part.row + r) * words_of_few(g, length), length);
        int8_t *codes = (int8_t *)(uintptr_t)row.codes;
        int32_t *starts = (int32_t *)(uintptr_t)row.starts;
        float *scales = (float *)(uintptr_t)row.scales, *sums = (float *)(uintptr_t)row.sums;
        for (Py_ssize_t start = part.column; start < end; start += q) {
            float sum = 0;
            scales[start / q] = 0;
            if (start < k)
                scales[start / q] = rounded(x + (part.row + r) * k + start, q, codes + start, &sum);
            else
                memset(codes + start, 0, (size_t)q);
            for (Py_ssize_t j = start; j < start + q; j += 4)
                starts[j / 4] = -g->shift * (codes[j] + codes[j + 1] + codes[j + 2] + codes[j + 3]);
            sums[start / q] = scales[start / q] * sum;
        }
    }
}

static void pack_few(const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    (void)kind;
    if (g->q == 32)
        pack_few_of(g, 32, x, k, part, to);
    else if (g->q == 16)
        pack_few_of(g, 16, x, k, part, to);
    else
        pack_few_of(g, 64, x, k, part, to);
}

/* How 64 codes of a width come to bytes. */
typedef struct {
    __m512i places, shifts, low, top, table;
    __mmask64 stored; /* bytes of 64 codes */
} unpacking;

INLINE unpacking unpacking_of(const weight *w, const grouping *g)
{
    const __m512i of_eight = _mm512_set_epi64(0x0707070707070707, 0x0606060606060606, 0x0505050505050505, 0x0404040404040404,
        0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m512i in_eight = _mm512_set1_epi64(0x0706050403020100), width = _mm512_set1_epi16((short)w->width);
    const unpacking u = {
        .places = _mm512_add_epi8(_mm512_mullo_epi16(of_eight, width), in_eight), /* products of small bytes are those of words */
        .shifts = _mm512_mullo_epi16(in_eight, width),
        .low = _mm512_set1_epi8((char)((1 << w->width) - 1)),
        .top = _mm512_set1_epi8((char)(w->codes.kind == I8 ? 1 << (w->width - 1) : 0)),
        .table = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)g->bytes)),
        .stored = w->width == 8 ? ~(__mmask64)0 : ((__mmask64)1 << 8 * w->width) - 1,
    };
    return u;
}

/* 64 codes, unsigned. */
INLINE __m512i sixty_four(const int kind, const int narrow, const unpacking *u, __mmask64 here, const uint8_t *codes)
{
    __m512i v = _mm512_maskz_loadu_epi8(here, codes);
    if (narrow) {
        v = _mm512_multishift_epi64_epi8(u->shifts, _mm512_permutexvar_epi8(u->places, v));
        v = _mm512_ternarylogic_epi32(v, u->top, u->low, 0x28); /* (a ^ b) & c */
    } else if (kind == I8)
        v = _mm512_xor_si512(v, u->top);
    return kind == TABLE4 ? _mm512_shuffle_epi8(u->table, v) : v;
}

/* Products of ROWS rows of the weight and one row of activations. */
INLINE void few_streamed(const int kind, const int narrow, const int role, const int q, const weight *w, const grouping *g,
    const panel *p, const few_x *x, float *sums)
{
    const unpacking u = unpacking_of(w, g);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i group_of_lane = _mm512_srli_epi32(lanes, q == 16 ? 2 : q == 32 ? 3 : 4);
    const int bytes = 8 * w->width;
    __m512 a[ROWS], o[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) a[r] = o[r] = _mm512_setzero_ps();
    Py_ssize_t at = 0;
    for (Py_ssize_t group = 0; group < w->k / q; group += TOGETHER) {
        const Py_ssize_t left = w->k / q - group, start = group * q, end = left < TOGETHER ? w->k : start + TOGETHER * q;
        const __mmask16 here = first_lanes(left);
        const __m512 by = _mm512_maskz_loadu_ps(here, x->scales + group), all = _mm512_maskz_loadu_ps(here, x->sums + group);
        __m512 scales[ROWS];
        __m512i which = group_of_lane;
        UNROLL for (int r = 0; r < ROWS; r++) {
            scales[r] = _mm512_maskz_mul_ps(here, _mm512_maskz_loadu_ps(here, p->scales[r] + group), by);
            if (role == BIAS)
                o[r] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(here, p->offsets[r] + group), all, o[r]);
        }
        for (Py_ssize_t c = start; c < end; c += VECTOR, at += bytes) {
            const __mmask64 stored = end - c < VECTOR ? u.stored >> (VECTOR - (end - c)) * w->width / 8 : u.stored;
            const __m512i codes = _mm512_loadu_si512(x->codes + c), begin = _mm512_loadu_si512(x->starts + c / 4);
            UNROLL for (int r = 0; r < ROWS; r++) {
                _mm_prefetch((const char *)p->codes[r] + at + p->ahead, _MM_HINT_T1);
                const __m512i v = sixty_four(kind, narrow, &u, stored, p->codes[r] + at);
                __m512i sum = begin;
                MULTIPLY("vpdpbusd", sum, v, codes);
                a[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(which, scales[r]), a[r]);
            }
            which = _mm512_add_epi32(which, _mm512_set1_epi32(VECTOR / q));
        }
    }
    if (role == BIAS)
        UNROLL for (int r = 0; r < ROWS; r++) a[r] = _mm512_add_ps(a[r], o[r]);
    _mm_storeu_ps(sums, sums_of_four(a));
}

typedef void (*few_stream)(const weight *, const grouping *, const panel *, const few_x *, float *);
#define FEW_STREAM(kind, narrow, role, q)                                                                                   \
    static void few_##kind##narrow##role##q(const weight *w, const grouping *g, const panel *p, const few_x *x, float *sums)  \
    {                                                                                                                       \
        few_streamed(kind, narrow, role, q, w, g, p, x, sums);                                                              \
    }
#define FEW_OF(kind, narrow, role)                                                                                          \
    FEW_STREAM(kind, narrow, role, 16) FEW_STREAM(kind, narrow, role, 32) FEW_STREAM(kind, narrow, role, 64)
#define FEW_ROLES(kind, narrow) FEW_OF(kind, narrow, NONE) FEW_OF(kind, narrow, BIAS)
FEW_ROLES(TABLE4, 1)
FEW_ROLES(I8, 0)
FEW_ROLES(I8, 1)
FEW_ROLES(U8, 0)
FEW_ROLES(U8, 1)
#define NAMES_OF_FEW(kind, narrow, role) {few_##kind##narrow##role##16, few_##kind##narrow##role##32, few_##kind##narrow##role##64}
#define FEW_NAMES(kind, narrow) {NAMES_OF_FEW(kind, narrow, NONE), NAMES_OF_FEW(kind, narrow, BIAS)}
static const few_stream few_streams[3][2][2][3] = {
    {FEW_NAMES(TABLE4, 1), FEW_NAMES(TABLE4, 1)}, {FEW_NAMES(I8, 0), FEW_NAMES(I8, 1)}, {FEW_NAMES(U8, 0), FEW_NAMES(U8, 1)}};

static int rows_of_few(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    panel p;
    begin_panel(w, g->q, 0, &p);
    const Py_ssize_t ahead = ROWS * w->row_bytes, length = p.chunks * CHUNK;
    p.ahead = ahead > 8192 && ahead <= 16384 ? ahead : 8192; /* as in rows_of */
    const int length_of_group = g->q == 16 ? 0 : g->q == 32 ? 1 : 2;
    const few_stream stream = few_streams[stream_of(w->codes.kind)][w->width < 8][w->role == BIAS][length_of_group];
    if (!scales_of_panel(w, to, first, end, g->q, decoded_by_avx512, NULL, &p))
        return 0;
    for (Py_ssize_t n = first; n < end; n += ROWS) {
        for (int r = 0; r < ROWS; r++) {
            const Py_ssize_t row = n + r < end ? n + r : end - 1, slot = scale_row(w, row) - scale_row(w, first);
            p.codes[r] = w->codes.items + row * w->row_bytes;
            p.scales[r] = to->scales + slot * p.apart;
            p.offsets[r] = to->offsets + slot * p.apart;
        }
        for (Py_ssize_t i = 0; i < m; i++) {
            const few_x row = few_at(g, x + i * words_of_few(g, length), length);
            float sums[ROWS];
            stream(w, g, &p, &row, sums);
            memcpy(y + i * w->n + n, sums, 4 * (size_t)(end - n < ROWS ? end - n : ROWS));
        }
    }
    return 1;
}

const mode_version int8_few = {pack_few, rows_of_few, no_lift, always, FEW_ROWS, 0, one_claim};

COMPILED
#endif
