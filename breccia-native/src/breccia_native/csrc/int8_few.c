/* Products of one to four rows of activations rounded to INT8, and codes of 1 to 8 bits in blocks of 16, 32 or 64, by AVX-512 VNNI
   and VBMI.

   A row of the weight is taken in its own order, 64 codes at a time: `multishift` brings codes of any width to bytes, and
   lane j of a sum of integers has codes 4j to 4j + 3, which share a scale. Of 4-bit codes it takes 128 at a time, the even ones and
   the odd ones, as activations are packed: lane j has codes 8j to 8j + 7. A sum starts with what making codes unsigned adds, so it
   is the sum for the codes as they are. Biases are multiplied by the sums of activations. FP16 scales and biases are read as they
   are stored: all finite ones are within the limits, and others make their row's products NaN or Inf. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR("avx512vnni,avx512vbmi," AVX512)

#include "short_blocks.h"

/* Codes of a vector, and groups whose scales are multiplied together. */
enum { VECTOR = 64, TOGETHER = 16 };

/* How codes are stored: one a byte, in fewer bits, or two a byte, which are taken as two vectors. */
enum { WHOLE_BYTES, FEWER_BITS, NIBBLES };

/* Codes that are taken at a time. */
INLINE int step_of(const int how)
{
    return how == NIBBLES ? 2 * VECTOR : VECTOR;
}

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

int is_in_nibbles(const weight *w)
{
    return w->codes.kind == TABLE4 && w->width == 4;
}

int takes_few(const weight *w, const grouping *g, Py_ssize_t m)
{
    return m <= FEW_ROWS && w->role != ZERO_POINT && w->groups > 1 && g->q >= 16 && g->q <= VECTOR && w->k % g->q == 0;
}

INLINE void pack_few_of(const grouping *g, const Py_ssize_t q, const float *x, Py_ssize_t k, part part, float *to)
{
    const Py_ssize_t length = (k + CHUNK - 1) / CHUNK * CHUNK, end = part.end < k ? part.end : length;
    const Py_ssize_t of_lane = step_of(g->nibbles ? NIBBLES : WHOLE_BYTES) / 16;
    for (Py_ssize_t r = 0; r < part.rows; r++) {
        const few_x row = few_at(g, to + (part.row + r) * words_of_few(g, length), length);
        int8_t *const codes = (int8_t *)(uintptr_t)row.codes;
        int32_t *const starts = (int32_t *)(uintptr_t)row.starts;
        float *const scales = (float *)(uintptr_t)row.scales, *const sums = (float *)(uintptr_t)row.sums;
        for (Py_ssize_t start = part.column; start < end; start += q) {
            int8_t group[VECTOR] = {0};
            float sum = 0;
            scales[start / q] = start < k ? rounded(x + (part.row + r) * k + start, q, group, &sum) : 0;
            sums[start / q] = scales[start / q] * sum;
            for (Py_ssize_t j = 0; j < q; j += of_lane) {
                int32_t of_codes = 0;
                for (Py_ssize_t i = 0; i < of_lane; i++)
                    of_codes += group[j + i];
                starts[(start + j) / of_lane] = -g->shift * of_codes;
            }
            if (g->nibbles) {
                int8_t *const even = codes + start / CHUNK * CHUNK + start % CHUNK / 2, *const odd = even + VECTOR;
                for (Py_ssize_t j = 0; j < q / 2; j++)
                    even[j] = group[2 * j], odd[j] = group[2 * j + 1];
            } else
                memcpy(codes + start, group, (size_t)q);
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

/* Scales and biases of rows of the weight, from row `first` to `end`: where the first are, and the bytes of a row. halves: whether
   they are in FP16, else they are in FP32. ahead, ahead_of_scales: how far ahead codes, and stored scales and biases, are fetched. */
typedef struct {
    Py_ssize_t first, end;
    const uint8_t *scales, *biases;
    Py_ssize_t bytes, ahead, ahead_of_scales;
    int halves;
} weight_rows;

/* Scales of the groups from `group` on. */
INLINE __m512 scales_at(const weight_rows *p, const uint8_t *row, Py_ssize_t group, __mmask16 here)
{
    if (p->halves)
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(here, row + 2 * group));
    return _mm512_maskz_loadu_ps(here, row + 4 * group);
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
INLINE __m512i sixty_four(const int kind, const int how, const unpacking *u, __mmask64 here, const uint8_t *codes)
{
    __m512i v = _mm512_maskz_loadu_epi8(here, codes);
    if (how == FEWER_BITS) {
        v = _mm512_multishift_epi64_epi8(u->shifts, _mm512_permutexvar_epi8(u->places, v));
        v = _mm512_ternarylogic_epi32(v, u->top, u->low, 0x28); /* (a ^ b) & c */
    } else if (kind == I8)
        v = _mm512_xor_si512(v, u->top);
    return kind == TABLE4 ? _mm512_shuffle_epi8(u->table, v) : v;
}

/* Products of rows of the weight and one row of activations, ROWS rows at a time. */
INLINE void few_streamed(const int kind, const int how, const int role, const int q, const weight *w, const grouping *g,
    const weight_rows *p, const few_x *x, float *y)
{
    const unpacking u = unpacking_of(w, g);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const int step = step_of(how), bytes = step * w->width / 8, lanes_of_group = 16 * q / step;
    const __m512i group_of_lane = _mm512_srli_epi32(lanes, (unsigned)__builtin_ctz((unsigned)lanes_of_group));
    const Py_ssize_t groups = w->k / q, base = scale_row(w, p->first);
    for (Py_ssize_t n = p->first; n < p->end; n += ROWS) {
        const uint8_t *codes[ROWS], *scales[ROWS], *biases[ROWS];
        __m512 a[ROWS], o[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++)
        {
            const Py_ssize_t row = n + r < p->end ? n + r : p->end - 1, at = (scale_row(w, row) - base) * p->bytes;
            codes[r] = w->codes.items + row * w->row_bytes;
            scales[r] = p->scales + at, biases[r] = p->biases + at;
            a[r] = o[r] = _mm512_setzero_ps();
        }
        for (Py_ssize_t i = 0; p->ahead_of_scales && i < ROWS * p->bytes; i += 64) {
            _mm_prefetch((const char *)scales[0] + p->ahead_of_scales + i, _MM_HINT_T1);
            if (role == BIAS)
                _mm_prefetch((const char *)biases[0] + p->ahead_of_scales + i, _MM_HINT_T1);
        }
        Py_ssize_t at = 0;
        for (Py_ssize_t group = 0; group < groups; group += TOGETHER) {
            const Py_ssize_t left = groups - group, start = group * q, end = left < TOGETHER ? w->k : start + TOGETHER * q;
            const __mmask16 here = first_lanes(left);
            const __m512 by = _mm512_maskz_loadu_ps(here, x->scales + group), all = _mm512_maskz_loadu_ps(here, x->sums + group);
            __m512 by_group[ROWS];
            __m512i which = group_of_lane;
            UNROLL for (int r = 0; r < ROWS; r++)
            {
                by_group[r] = _mm512_mul_ps(scales_at(p, scales[r], group, here), by);
                if (role == BIAS)
                    o[r] = _mm512_fmadd_ps(scales_at(p, biases[r], group, here), all, o[r]);
            }
            for (Py_ssize_t c = start; c < end; c += step, at += bytes) {
                const Py_ssize_t missing = end - c < step ? (step - (end - c)) * w->width / 8 : 0;
                const __mmask64 stored = (how == FEWER_BITS ? u.stored : ~(__mmask64)0) >> missing;
                const __m512i first = _mm512_loadu_si512(x->codes + c), begin = _mm512_loadu_si512(x->starts + 16 * c / step);
                UNROLL for (int r = 0; r < ROWS; r++)
                {
                    _mm_prefetch((const char *)codes[r] + at + p->ahead, _MM_HINT_T1);
                    __m512i sum = begin;
                    if (how == NIBBLES) {
                        const __m512i second = _mm512_loadu_si512(x->codes + c + VECTOR);
                        const __m512i v = _mm512_maskz_loadu_epi8(stored, codes[r] + at);
                        const __m512i even = _mm512_and_si512(v, u.low), odd = _mm512_and_si512(_mm512_srli_epi16(v, 4), u.low);
                        MULTIPLY("vpdpbusd", sum, _mm512_shuffle_epi8(u.table, even), first);
                        MULTIPLY("vpdpbusd", sum, _mm512_shuffle_epi8(u.table, odd), second);
                    } else {
                        const __m512i v = sixty_four(kind, how, &u, stored, codes[r] + at);
                        MULTIPLY("vpdpbusd", sum, v, first);
                    }
                    a[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(which, by_group[r]), a[r]);
                }
                which = _mm512_add_epi32(which, _mm512_set1_epi32(step / q));
            }
        }
        if (role == BIAS)
            UNROLL for (int r = 0; r < ROWS; r++) a[r] = _mm512_add_ps(a[r], o[r]);
        const __m128 sums = sums_of_four(a);
        _mm_mask_storeu_ps(y + n, (__mmask8)first_lanes(p->end - n < ROWS ? p->end - n : ROWS), sums);
    }
}

typedef void (*few_stream)(const weight *, const grouping *, const weight_rows *, const few_x *, float *);
#define FEW_STREAM(kind, how, role, q)                                                                                      \
    static void few_##kind##how##role##q(const weight *w, const grouping *g, const weight_rows *p, const few_x *x, float *y)      \
    {                                                                                                                       \
        few_streamed(kind, how, role, q, w, g, p, x, y);                                                                    \
    }
#define FEW_OF(kind, how, role)                                                                                             \
    FEW_STREAM(kind, how, role, 16) FEW_STREAM(kind, how, role, 32) FEW_STREAM(kind, how, role, 64)
#define FEW_ROLES(kind, how) FEW_OF(kind, how, NONE) FEW_OF(kind, how, BIAS)
FEW_ROLES(TABLE4, FEWER_BITS)
FEW_ROLES(TABLE4, NIBBLES)
FEW_ROLES(I8, WHOLE_BYTES)
FEW_ROLES(I8, FEWER_BITS)
FEW_ROLES(U8, WHOLE_BYTES)
FEW_ROLES(U8, FEWER_BITS)
#define NAMES_OF_FEW(kind, how, role) {few_##kind##how##role##16, few_##kind##how##role##32, few_##kind##how##role##64}
#define FEW_NAMES(kind, how) {NAMES_OF_FEW(kind, how, NONE), NAMES_OF_FEW(kind, how, BIAS)}
/* By kind; whether codes are stored in fewer bits than those of their kind; role; and length of groups. */
static const few_stream few_streams[3][2][2][3] = {{FEW_NAMES(TABLE4, NIBBLES), FEW_NAMES(TABLE4, FEWER_BITS)},
    {FEW_NAMES(I8, WHOLE_BYTES), FEW_NAMES(I8, FEWER_BITS)}, {FEW_NAMES(U8, WHOLE_BYTES), FEW_NAMES(U8, FEWER_BITS)}};

/* Whether numbers are FP16, as they are stored. */
INLINE int are_halves(const numbers *a)
{
    return a->kind == F16 && !a->codes.bits;
}

static int rows_of_few(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m, Py_ssize_t first,
    Py_ssize_t end, float *y)
{
    const int halves = w->block == g->q && w->factor == 1 && !w->divides && are_halves(&w->scale) &&
        (w->role == NONE || are_halves(&w->offset));
    const Py_ssize_t ahead = ROWS * w->row_bytes, length = (w->k + CHUNK - 1) / CHUNK * CHUNK;
    weight_rows p = {.first = first, .end = end, .halves = halves};
    p.ahead = ahead > 8192 && ahead <= 16384 ? ahead : 8192; /* as in rows_of */
    if (halves) {
        p.bytes = 2 * w->groups;
        p.ahead_of_scales = p.ahead / w->row_bytes * p.bytes;
        p.scales = w->scale.items + scale_row(w, first) * p.bytes;
        p.biases = w->role == NONE ? p.scales : w->offset.items + scale_row(w, first) * p.bytes;
    } else {
        panel decoded;
        begin_panel(w, g->q, 0, &decoded);
        if (!scales_of_panel(w, to, first, end, g->q, decoded_by_avx512, NULL, &decoded))
            return 0;
        p.bytes = 4 * decoded.apart;
        p.scales = (const uint8_t *)to->scales;
        p.biases = w->role == NONE ? p.scales : (const uint8_t *)to->offsets;
    }
    const int length_of_group = g->q == 16 ? 0 : g->q == 32 ? 1 : 2;
    const int narrow = w->width < kind_bits[w->codes.kind];
    const few_stream stream = few_streams[stream_of(w->codes.kind)][narrow][w->role == BIAS][length_of_group];
    for (Py_ssize_t i = 0; i < m; i++) {
        const few_x row = few_at(g, x + i * words_of_few(g, length), length);
        stream(w, g, &p, &row, y + i * w->n);
    }
    return 1;
}

const mode_version int8_few = {pack_few, rows_of_few, no_lift, always, FEW_ROWS, 0, one_claim};

COMPILED
#endif
