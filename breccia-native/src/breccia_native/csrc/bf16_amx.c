/* BF16 activations, and FP32 ones in parts, by the matrix unit of x86 processors (AMX).

   The unit multiplies a tile of 16 rows by 32 BF16 numbers by one of 16 pairs of numbers for each of up to 16 columns, and adds
   the products to a tile of 16 x 16 sums in FP32. Rows of the weight are decoded into tiles of the first form, where they stay
   for all activations, whose rows are packed as the columns of the second form. A chunk of 16 rows fills 4 tiles.

   Scales are multiplied by codes when these are decoded where the products are BF16 numbers: E4M3 scales by 4-bit codes of few
   bits; and, for MANY_ROWS of activations and more, powers of two. Other scales are multiplied by the sums of each group, whose
   codes then have tiles of their own.

   An FP32 number is the sum of three BF16 numbers, an FP16 number of two, whose products with codes are added to the same sums:
   nothing is rounded that a product in FP32 would not round, and three of these products are faster than one by AVX-512. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_MATRICES)
#include <sys/syscall.h>
#include <unistd.h>

COMPILE_FOR("amx-tile,amx-bf16,avx512bf16," AVX512)

#include "groups512.h"

enum {
    SIDE = 16,                /* rows of a tile */
    WORDS_OF_TILE = 16 * SIDE,
    TILES = 4,                /* of a chunk */
    HALVES = CLAIM / SIDE,    /* tiles side by side that have the rows of a claim */
    CLAIMS = 4,               /* that are multiplied by a few chunks of many rows of activations while the L2 cache has these */
    MANY_ROWS = 48,           /* of activations, for which adding to exponents is faster than multiplying sums of groups */
    FEWEST_IN_PARTS = 9,      /* rows of activations for which their parts are multiplied faster than FP32 numbers */
    LONG = 2,                 /* chunks that are decoded together, at most: their tiles stay in the L1 cache */
    DECODED = HALVES * LONG * TILES * WORDS_OF_TILE, /* words of them */
};

/* The operand of the instruction that sets the shapes of tiles. */
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

static const tile_shapes shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* Ask the system to keep the tiles of this process, and of those that it starts. It refuses where it cannot, where the processor
   has none, and where a thread has an alternate stack for signals that is too small for them. */
int may_use_matrices(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18, TILE = 1 << 24, TILE_BF16 = 1 << 22 }; /* ARCH_REQ_XCOMP_PERM */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILE) && (d & TILE_BF16) &&
        syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

/* When scales are multiplied: by the sums of groups, or by codes, as numbers or by adding to exponents. */
enum { BY_SUMS, BY_CODES, BY_EXPONENTS };

/* Whether codes are 0 or from 2^-20 to 2^20. */
static int are_moderate(const weight *w)
{
    int moderate = 1;
    for (int i = 0; w->codes.kind == TABLE4 && i < 16; i++) {
        const float size = fabsf(w->codes.table[i]);
        moderate &= size == 0 || (size >= 0x1p-20f && size <= 0x1p20f);
    }
    return moderate;
}

/* Scales by codes need moderate codes, and powers of two are from 2^-30 to 2^6: no product of a code, a scale and an activation,
   or a part of one, is subnormal, which the unit would flush, or infinite. */
static int scaling_of(const weight *w)
{
    int few = 1;
    for (int i = 0; w->codes.kind == TABLE4 && i < 16; i++)
        few &= !(bits_of(w->codes.table[i]) & 0xfffff);
    if (!factor_is_last(w) || !are_moderate(w))
        return BY_SUMS;
    if (w->scale.kind == E8M0)
        return BY_EXPONENTS;
    return w->scale.kind == E4M3 && w->codes.kind == TABLE4 && few ? BY_CODES : BY_SUMS; /* 4 bits times 4 bits */
}

/* Make of powers of two, in place, what they add to the exponents of BF16 numbers, in both halves of a word. Returns 0, and does
   nothing, where one is beyond the limits (see above), or NaN. */
OUTLINE int made_exponents(float *scales, Py_ssize_t n)
{
    const int32_t least = (int32_t)bits_of(0x1p-30f), most = (int32_t)bits_of(0x1p6f), one = (int32_t)bits_of(1);
    int32_t beyond = 0; /* the sign says whether */
    for (Py_ssize_t i = 0; i < n; i++) {
        const int32_t u = (int32_t)bits_of(scales[i]);
        beyond |= (u - least) | (most - u);
    }
    for (Py_ssize_t i = 0; i < n && beyond >= 0; i++) {
        const uint32_t added = (uint32_t)((int32_t)bits_of(scales[i]) - one);
        scales[i] = float_of((added & 0xffff0000) | added >> 16);
    }
    return beyond >= 0;
}

int takes_matrices(const weight *w, const grouping *g)
{
    return are_pairs(w->codes.kind, w->role) && (g->q >= 32 || scaling_of(w) == BY_CODES);
}

/* Other weights would be multiplied by AVX-512 BF16, which is no faster than FP32 on the processors that have matrices. */
static Py_ssize_t fewest_by_matrices(const weight *w)
{
    const int grouped = w->block >= w->k || w->block % 32 == 0 || (w->codes.kind == TABLE4 && w->scale.kind == E4M3);
    return are_pairs(w->codes.kind, w->role) && grouped ? 5 : PY_SSIZE_T_MAX;
}

/* Whether m rows of activations are multiplied in parts where a product in FP32 was asked for, and by which `parts` then. Fewer than
   CHUNK columns could have more roundings than the bound of FP32 allows them; infinite codes times parts of 0 would be NaN. */
int takes_parts(const weight *w, Py_ssize_t m, int x_kind, grouping *parts)
{
    if (m < FEWEST_IN_PARTS || m < fewest_by_matrices(w) || w->k < CHUNK || w->codes.kind == E5M2 || !are_moderate(w) ||
        !grouped(parts, BF16_MODE, w->codes.kind, w->codes.table, w->block, w->k) || !takes_matrices(w, parts))
        return 0;
    parts->parts = x_kind == BF16 ? 1 : x_kind == F16 ? 2 : 3;
    return w->role == NONE || w->offset.kind == U8 || w->offset.kind == I8;
}

/* Whether groups are shorter than the codes that one vector of 64 bytes has, which are then sorted by groups of 32. Codes with
   scales of fewer are multiplied by these before (see `takes_matrices`). */
INLINE int is_sorted(int kind, Py_ssize_t q)
{
    return q >= 32 && q < (kind == TABLE4 ? 128 : 64);
}

/* Sort the words of codes decoded from 64 bytes: each vector then has 32 successive codes. */
INLINE void sorted_words(const int count, __m512i d[4])
{
    if (count == 2) {
        const __m512i first = _mm512_shuffle_i64x2(d[0], d[1], 0x44);
        d[1] = _mm512_shuffle_i64x2(d[0], d[1], 0xEE);
        d[0] = first;
        return;
    }
    const __m512i a = _mm512_shuffle_i64x2(d[0], d[1], 0x44), b = _mm512_shuffle_i64x2(d[2], d[3], 0x44);
    const __m512i e = _mm512_shuffle_i64x2(d[0], d[1], 0xEE), f = _mm512_shuffle_i64x2(d[2], d[3], 0xEE);
    d[0] = _mm512_shuffle_i64x2(a, b, 0x88);
    d[1] = _mm512_shuffle_i64x2(a, b, 0xDD);
    d[2] = _mm512_shuffle_i64x2(e, f, 0x88);
    d[3] = _mm512_shuffle_i64x2(e, f, 0xDD);
}

/* The place in its chunk of the first number of word `row` of tile `tile`; the second one is `half` later. */
INLINE int place_of(int half, int sorted, int tile, int row)
{
    const int count = 16 / half, first = tile / half * (32 * half); /* of the vector of 64 bytes; it has `half` tiles */
    tile %= half;
    const int unit = sorted ? tile * count + row % count : row, i = sorted ? row / count : tile;
    return first + unit * 2 * half + i;
}

/* What is left of FP32 numbers without their first 8 bits, which `first` then has: numbers of 8 bits fewer. */
INLINE __m512 without_first_bits(__m512 y, __m512 *first)
{
    *first = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32((int)0xffff0000)));
    return _mm512_sub_ps(y, *first);
}

/* The `group_packer`: tile by tile, a word of each row of the panel next to those of the others. Tiles of smaller parts come before
   those of larger ones. */
static void pack_matrices(const grouping *g, int kind, const float *x, Py_ssize_t k, part part, float *to)
{
    const Py_ssize_t length = (k + CHUNK - 1) / CHUNK * CHUNK, rows = part.rows, end = part.end < k ? part.end : length;
    const int half = kind == TABLE4 ? 4 : 2, sorted = is_sorted(kind, g->q);
    const __mmask16 here = first_lanes(rows);
    /* 16 first and 16 second numbers are rounded together, and become pairs then. */
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i paired = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16));
    int places[TILES][SIDE];
    for (int t = 0; t < TILES; t++)
        for (int i = 0; i < SIDE; i++)
            places[t][i] = place_of(half, sorted, t, i);
    x += part.row * k;
    to += part.row * words_of(g, length);
    for (Py_ssize_t c = part.column; c < end; c += CHUNK) {
        float rest[SIDE][CHUNK];
        const float *from[SIDE];
        for (Py_ssize_t r = 0; r < rows; r++) {
            const Py_ssize_t left = k - c;
            from[r] = x + r * k + c;
            if (left >= CHUNK)
                continue;
            memset(rest[r], 0, sizeof rest[r]);
            memcpy(rest[r], from[r], 4 * (size_t)left);
            from[r] = rest[r];
        }
        for (int t = 0; t < TILES; t++) {
            const __m512i first = _mm512_loadu_si512(places[t]), second = _mm512_add_epi32(first, _mm512_set1_epi32(half));
            __m512 v[3][SIDE];
            for (Py_ssize_t r = 0; r < SIDE; r++) {
                const float *row = from[r < rows ? r : 0];
                __m512 low = _mm512_i32gather_ps(first, row, 4), high = _mm512_i32gather_ps(second, row, 4);
                for (int i = g->parts - 1; i >= 0; i--) {
                    __m512 a = low, b = high;
                    if (g->parts > 1)
                        low = without_first_bits(low, &a), high = without_first_bits(high, &b);
                    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
                    v[i][r] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(paired, both));
                }
            }
            float *tile = to + (c / CHUNK * TILES + t) * g->parts * SIDE * rows;
            for (int part = 0; part < g->parts; part++, tile += SIDE * rows) {
                transposed(v[part]);
                for (int i = 0; i < SIDE; i++)
                    _mm512_mask_storeu_ps(tile + i * rows, here, v[part][i]);
            }
        }
    }
}

/* BF16 numbers with more in their exponents, but zeros and NaNs, which FP8 codes may be. */
INLINE __m512i with_exponents(const int kind, __m512i words, __m512i exponents)
{
    const __m512i size = _mm512_set1_epi16(0x7fff), one = _mm512_set1_epi16(1), last = _mm512_set1_epi16(0x7f7e);
    const __mmask32 finite = kind == E4M3 ? _mm512_cmple_epu16_mask(_mm512_sub_epi16(_mm512_and_si512(words, size), one), last)
                                          : _mm512_test_epi16_mask(words, size);
    return _mm512_mask_add_epi16(words, finite, words, exponents);
}

/* Decode row r of `chunks` chunks, from chunk `c` on, into rows of tiles that are adjacent. */
INLINE void decode_matrices(const int kind, const int shifts, const int scaling, const weight *w,
    const grouping *g, const tables *t, const panel *p, int r, Py_ssize_t c, Py_ssize_t chunks, uint32_t *to)
{
    const int parts = kind == TABLE4 ? 1 : 2, sorted = is_sorted(kind, g->q);
    const __m512 table = kind == TABLE4 ? _mm512_loadu_ps(w->codes.table) : _mm512_setzero_ps();
    const Py_ssize_t spans = p->spans > 1 ? p->spans / parts : 1, next = p->spans > 1 ? spans : 0; /* scales of a part */
    const __m512i lanes = span_of_lanes(spans);
    for (const Py_ssize_t end = c + chunks; c < end; c++) {
        const uint8_t *codes = codes_of(p, r, c);
        for (int part = 0; part < parts; part++) {
            const __m512i v = part_of_codes(kind, codes, part);
            const Py_ssize_t at = c * p->spans + part * next;
            const __m512 scale = _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(p->scales[r] + at));
            __m512i d[4], zero = _mm512_setzero_si512();
            int count = 4;
            _mm_prefetch((const char *)p->codes[r] + c * p->bytes + 64 * part + p->ahead, _MM_HINT_T1);
            if (shifts)
                zero = in_both_halves(_mm512_permutexvar_ps(lanes, _mm512_loadu_ps(p->offsets[r] + at)));
            if (scaling == BY_CODES) {
                __m512 y[8];
                UNROLL for (int i = 0; i < 8; i++) y[i] = _mm512_mul_ps(nibble(v, i, table), scale);
                UNROLL for (int i = 0; i < 4; i++) d[i] = pair_of(y[i], y[i + 4]);
            } else
                count = words_of_codes(BF16_MODE, kind, shifts, t, v, zero, d);
            if (scaling == BY_EXPONENTS)
                UNROLL for (int i = 0; i < count; i++) d[i] = with_exponents(kind, d[i], _mm512_castps_si512(scale));
            if (sorted)
                sorted_words(count, d);
            UNROLL for (int i = 0; i < count; i++, to += WORDS_OF_TILE) _mm512_storeu_si512(to, d[i]);
        }
    }
}

/* sums += the numbers of a tile, whose rows are multiplied by scales. */
INLINE void add_scaled(const float *tile, const float *scales, float *sums)
{
    UNROLL for (int n = 0; n < SIDE; n++) {
        const __m512 a = _mm512_loadu_ps(tile + SIDE * n), b = _mm512_loadu_ps(sums + SIDE * n);
        _mm512_storeu_ps(sums + SIDE * n, _mm512_fmadd_ps(a, _mm512_set1_ps(scales[n]), b));
    }
}

/* Tiles that are multiplied: of the first half of a claim, and of a panel of activations with so many rows and parts. */
typedef struct {
    const uint32_t *codes;
    const float *x;
    Py_ssize_t rows, parts;
} factors;

/* Sums of SIDE rows of activations by CLAIM rows of the weight. */
enum { SUMS = HALVES * SIDE * SIDE };

/* Add the products of `count` tiles to the sums in registers: those of `a` in the first two, those of `b` in two others where
   there are TWO. `shared`: their codes are the same.

   A compiler may move stores to memory past loads of tiles, but not past FROM_MEMORY and the stores of tiles, which come before
   and after these loops. */
INLINE void add_products(const int TWO, const int shared, Py_ssize_t count, const factors a, const factors b)
{
    const Py_ssize_t half = LONG * TILES * WORDS_OF_TILE, parts = a.parts;
    const float *x = a.x, *y = b.x;
    for (Py_ssize_t t = 0; t < count; t++) {
        _tile_loadd(4, a.codes + t * WORDS_OF_TILE, 64);
        _tile_loadd(5, a.codes + half + t * WORDS_OF_TILE, 64);
        for (Py_ssize_t i = 0; i < parts; i++, x += SIDE * a.rows) {
            _tile_loadd(6, x, 4 * a.rows);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (TWO && shared) {
                _tile_loadd(7, y, 4 * b.rows);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
                y += SIDE * b.rows;
            }
        }
        if (!TWO || shared)
            continue;
        _tile_loadd(4, b.codes + t * WORDS_OF_TILE, 64);
        _tile_loadd(5, b.codes + half + t * WORDS_OF_TILE, 64);
        for (Py_ssize_t i = 0; i < parts; i++, y += SIDE * b.rows) {
            _tile_loadd(7, y, 4 * b.rows);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* Write the sums in registers: of `a`, and of `b` where there are TWO. */
INLINE void store_tiles(const int TWO, float *a, float *b)
{
    _tile_stored(0, a, 64);
    _tile_stored(1, a + SIDE * SIDE, 64);
    if (TWO) {
        _tile_stored(2, b, 64);
        _tile_stored(3, b + SIDE * SIDE, 64);
    }
}

/* The products of `count` tiles, times the scales of their group: of one group and two panels, or of two groups. */
INLINE void add_groups(const int TWO, const int shared, Py_ssize_t count, const factors a, const factors b,
    const float *by_a, const float *by_b, float *sums_a, float *sums_b)
{
    float found[2][SUMS];
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    add_products(TWO, shared, count, a, b);
    store_tiles(TWO, found[0], found[1]);
    add_scaled(found[0], by_a, sums_a);
    add_scaled(found[0] + SIDE * SIDE, by_a + SIDE, sums_a + SIDE * SIDE);
    if (TWO) {
        add_scaled(found[1], by_b, sums_b);
        add_scaled(found[1] + SIDE * SIDE, by_b + SIDE, sums_b + SIDE * SIDE);
    }
}

/* The factors that are `tiles` later. */
INLINE factors later(const factors a, Py_ssize_t tiles)
{
    const factors found = {a.codes + tiles * WORDS_OF_TILE, a.x + tiles * a.parts * SIDE * a.rows, a.rows, a.parts};
    return found;
}

/* Add the products of `tiles` tiles with a panel, or with TWO, to their sums. `each`: tiles of a group, whose scales are in `by`;
   neither is used unless scales multiply sums. */
INLINE void multiply_matrices(const int TWO, int scaling, Py_ssize_t tiles, Py_ssize_t each, const float *by,
    const factors a, const factors b, float *sums_a, float *sums_b)
{
    if (scaling != BY_SUMS) {
        _tile_loadd(0, sums_a, 64);
        _tile_loadd(1, sums_a + SIDE * SIDE, 64);
        if (TWO) {
            _tile_loadd(2, sums_b, 64);
            _tile_loadd(3, sums_b + SIDE * SIDE, 64);
        }
        add_products(TWO, 1, tiles, a, b);
        store_tiles(TWO, sums_a, sums_b);
        return;
    }
    Py_ssize_t t = 0;
    if (!TWO && each == 1) /* two of them keep the unit busy, where sums of one are stored at once */
        for (; t + 2 <= tiles; t += 2, by += 2 * CLAIM)
            add_groups(1, 0, 1, later(a, t), later(a, t + 1), by, by + CLAIM, sums_a, sums_a);
    for (; t < tiles; t += each, by += CLAIM)
        add_groups(TWO, 1, each, later(a, t), later(b, t), by, by, sums_a, sums_b);
}

/* The scales of a panel, group by group. */
OUTLINE void scales_by_groups(const panel *p, float *to)
{
    const Py_ssize_t groups = p->chunks * p->spans;
    for (Py_ssize_t i = 0; i < groups; i += 16)
        for (int half = 0; half < CLAIM; half += SIDE) {
            __m512 v[16];
            scales_of_groups(p->scales + half, i, v);
            for (int j = 0; j < 16 && i + j < groups; j++)
                _mm512_storeu_ps(to + (i + j) * CLAIM + half, v[j]);
        }
}

/* `matrix_rows` claim by claim: by exponents where the scales of one allow it, else by sums. */
static int matrix_rows_one_by_one(const weight *, const grouping *, const workspace *, const float *, Py_ssize_t, Py_ssize_t,
    Py_ssize_t, float *);

/* How many rows of the weight are multiplied together. */
static Py_ssize_t rows_of_matrices(Py_ssize_t m)
{
    return m > 128 && m <= 2048 ? CLAIMS * CLAIM : CLAIM; /* fewer stay in the L2 cache anyway; the sums of more would not */
}

/* Write the sums of a claim, times a factor, to the product: rows `first` to `end` of the weight. */
OUTLINE void write_sums(
    const float *sums, Py_ssize_t m, Py_ssize_t first, Py_ssize_t end, float factor, float *y, Py_ssize_t stride)
{
    const Py_ssize_t panels = (m + SIDE - 1) / SIDE;
    for (Py_ssize_t i = 0, done = 0; i < panels; i++) {
        const Py_ssize_t now = height_of(m, done, panels, i);
        for (Py_ssize_t row = first; row < end; row += SIDE) {
            const __mmask16 here = first_lanes(end - row);
            const float *from = sums + i * SUMS + (row - first) * SIDE;
            __m512 v[SIDE];
            UNROLL for (int n = 0; n < SIDE; n++) v[n] = _mm512_loadu_ps(from + n * SIDE);
            transposed(v);
            for (Py_ssize_t j = 0; j < now; j++)
                _mm512_mask_storeu_ps(y + (done + j) * stride + row, here, _mm512_mul_ps(v[j], _mm512_set1_ps(factor)));
        }
        done += now;
    }
}

/* Decodes `chunks` chunks from c on of row r of a claim, into tiles. */
typedef void (*matrix_decoder)(const weight *, const grouping *, const tables *, const panel *, int, Py_ssize_t, Py_ssize_t, uint32_t *);

/* The `group_rows`, by scales that are multiplied when `scaling` says, and codes that `decode` decodes. */
static int matrix_rows(int scaling, matrix_decoder decode, const weight *w, const grouping *g, const workspace *to, const float *x,
    Py_ssize_t m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    weight unit = *w;
    if (scaling != BY_SUMS)
        unit.factor = 1; /* it comes last */
    panel p[CLAIMS];
    const Py_ssize_t bytes = CHUNK * kind_bits[w->codes.kind] / 8, chunks = (w->k + CHUNK - 1) / CHUNK, length = chunks * CHUNK;
    const Py_ssize_t claims = (end - first + CLAIM - 1) / CLAIM, panels = (m + SIDE - 1) / SIDE, groups = length / g->q;
    const tables t = w->codes.kind == TABLE4 ? tables_of(BF16_MODE, TABLE4, w->role == ZERO_POINT, w, g)
                                             : tables_of(BF16_MODE, E4M3, 0, w, g);
    uint32_t *codes = (uint32_t *)to->tile;
    /* Scales by groups. There is room for a scale of every SPAN codes, and groups have 32 here. */
    float *by = scaling == BY_SUMS ? to->scales + claims * CLAIM * groups : to->scales;
    for (Py_ssize_t i = 0; i < claims; i++) {
        workspace own = *to;
        begin_panel(w, g->q, 0, &p[i]);
        p[i].ahead = w->widen ? 0 : LONG * bytes; /* the next ones of the row */
        if (i == 0 && !scales_of_panel(&unit, to, first, end, g->q, decoded_by_avx512, NULL, p))
            return 0;
        if (i == 0 && scaling == BY_EXPONENTS &&
            !made_exponents(to->scales, (scale_row(w, end - 1) - scale_row(w, first) + 1) * groups))
            return matrix_rows_one_by_one(w, g, to, x, m, first, end, y);
        if (w->widen)
            own.codes += i * CLAIM * row_of_chunks(w);
        fill(w, &own, first, first + i * CLAIM, end, CLAIM, &p[i]);
        if (scaling == BY_SUMS)
            scales_by_groups(&p[i], by + i * CLAIM * groups);
    }
    memset(to->sums, 0, 4 * SUMS * (size_t)(claims * panels));
    _tile_loadconfig(&shapes);
    for (Py_ssize_t c = 0; c < chunks; c += LONG)
        for (Py_ssize_t claim = 0; claim < claims; claim++) {
            const Py_ssize_t now = chunks - c < LONG ? chunks - c : LONG;
            const float *scales = scaling == BY_SUMS ? by + (claim * groups + c * p->spans) * CLAIM : by;
            for (int r = 0; r < CLAIM; r++) {
                uint32_t *row = codes + r / SIDE * LONG * TILES * WORDS_OF_TILE + r % SIDE * SIDE;
                decode(w, g, &t, &p[claim], r, c, now, row);
            }
            FROM_MEMORY(codes);
            for (Py_ssize_t i = 0, done = 0; i < panels; i += 2) {
                factors two[2];
                float *sums[2];
                const int count = i + 1 < panels ? 2 : 1;
                for (int j = 0; j < count; j++) {
                    const Py_ssize_t rows = height_of(m, done, panels, i + j);
                    two[j] = (factors){
                        codes, x + (done * length / 2 + c * TILES * SIDE * rows) * g->parts, rows, g->parts};
                    sums[j] = to->sums + (claim * panels + i + j) * SUMS;
                    done += rows;
                }
                if (count == 2)
                    multiply_matrices(1, scaling, now * TILES, g->q / 32, scales, two[0], two[1], sums[0], sums[1]);
                else
                    multiply_matrices(0, scaling, now * TILES, g->q / 32, scales, two[0], two[0], sums[0], sums[0]);
            }
        }
    _tile_release();
    for (Py_ssize_t i = 0; i < claims; i++) {
        const Py_ssize_t start = first + i * CLAIM, stop = start + CLAIM < end ? start + CLAIM : end;
        write_sums(to->sums + i * panels * SUMS, m, start, stop, scaling != BY_SUMS ? w->factor : 1, y, w->n);
    }
    return 1;
}

#define MATRIX_DECODER(name, kind, shifts, scaling)                                                                         \
    static void name(const weight *w, const grouping *g, const tables *t, const panel *p, int r, Py_ssize_t c,              \
        Py_ssize_t chunks, uint32_t *to)                                                                                    \
    {                                                                                                                       \
        decode_matrices(kind, shifts, scaling, w, g, t, p, r, c, chunks, to);                                               \
    }
MATRIX_DECODER(decode_nibbles, TABLE4, 0, BY_SUMS)
MATRIX_DECODER(decode_differences, TABLE4, 1, BY_SUMS)
MATRIX_DECODER(decode_scaled_nibbles, TABLE4, 0, BY_CODES)
MATRIX_DECODER(decode_nibbles_by_exponents, TABLE4, 0, BY_EXPONENTS)
MATRIX_DECODER(decode_bytes, E4M3, 0, BY_SUMS)
MATRIX_DECODER(decode_bytes_by_exponents, E4M3, 0, BY_EXPONENTS)
MATRIX_DECODER(decode_sixes, E2M3, 0, BY_SUMS)
MATRIX_DECODER(decode_sixes_by_exponents, E2M3, 0, BY_EXPONENTS)
MATRIX_DECODER(decode_integers, I8, 0, BY_SUMS)
MATRIX_DECODER(decode_integers_by_exponents, I8, 0, BY_EXPONENTS)

/* By kind (4 bits, 8, 6, INT8), and whether scales are added to exponents. */
static const matrix_decoder matrix_decoders[4][2] = {{decode_nibbles, decode_nibbles_by_exponents},
    {decode_bytes, decode_bytes_by_exponents}, {decode_sixes, decode_sixes_by_exponents},
    {decode_integers, decode_integers_by_exponents}};

static int matrix_rows_scaled(int scaling, const weight *w, const grouping *g, const workspace *to, const float *x,
    Py_ssize_t m, Py_ssize_t first, Py_ssize_t end, float *y)
{
    const int kind = w->codes.kind, bits = kind == TABLE4 ? 0 : kind == I8 ? 3 : 1 + IS_SIX(kind);
    const matrix_decoder decode = w->role == ZERO_POINT ? decode_differences
        : scaling == BY_CODES                           ? decode_scaled_nibbles
                                                        : matrix_decoders[bits][scaling == BY_EXPONENTS];
    return matrix_rows(scaling, decode, w, g, to, x, m, first, end, y);
}

/* Which claims a thread takes together depends on chance, so each one is decided by its own scales. */
static int matrix_rows_one_by_one(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    Py_ssize_t first, Py_ssize_t end, float *y)
{
    if (end - first <= CLAIM)
        return matrix_rows_scaled(BY_SUMS, w, g, to, x, m, first, end, y);
    int fine = 1;
    for (; fine && first < end; first += CLAIM)
        fine = matrix_rows_scaled(BY_EXPONENTS, w, g, to, x, m, first, first + CLAIM < end ? first + CLAIM : end, y);
    return fine;
}

static int rows(const weight *w, const grouping *g, const workspace *to, const float *x, Py_ssize_t m,
    Py_ssize_t first, Py_ssize_t end, float *y)
{
    const int scaling = scaling_of(w), sums = scaling == BY_EXPONENTS && m < MANY_ROWS;
    return matrix_rows_scaled(sums ? BY_SUMS : scaling, w, g, to, x, m, first, end, y);
}

const mode_version bf16_matrices = {pack_matrices, rows, lift_of, fewest_by_matrices, SIDE, DECODED, rows_of_matrices};

COMPILED
#endif
