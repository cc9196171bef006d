/* Products of FP32 activations and quantized weights, which are decoded in registers or in the L1 cache.

   A weight is (N, K) codes, with blocks along K. A row is taken in chunks of CHUNK codes. Its scales are first spread to one
   for each SPAN codes, so that the loops over codes know neither block sizes nor scale codecs. Activations are packed once per
   call, in the order in which a version decodes codes.

   Few rows of activations are multiplied by codes decoded in registers (avx512.h), more of them by tiles decoded into the L1
   cache (tiles.h), or with AMX by its matrix unit, in parts (matrices.h). Every element of a product is summed by one thread in
   one order, so its bits do not depend on the number of threads, nor on other rows of activations in the same path.

   Scales may be applied to sums of a span: their roundings are fewer than the K that the error bound of docs/spec/numerics.md
   allows, where no sum overflows or underflows. `multiply` returns False for numbers beyond these limits. */

#if !defined(__GNUC__)
#error "products.c needs the vector extensions of GCC or Clang"
#endif

#include <limits.h>
#include <sched.h>

#include "modes.h"
#include "pool.h"

/* How often a thread looks whether others have packed their parts, before it lets other threads run. */
#define PATIENCE 4000
/* A thread claims one of so many portions of its share of what is left (see `claimed`). */
#define PORTIONS 4

/* ------------------------------------------------------------------------------------------------ versions */

static void portable_tile(const weight *w, const panel *p, Py_ssize_t first, Py_ssize_t chunks, float *tile)
{
    tile_of_rows(w, p, first, chunks, 8, 1, tile);
}

MICRO(portable, , f4, 4, 1)
MICRO(portable, , f4, 4, 2)
MICRO(portable, , f4, 4, 3)
MICRO(portable, , f4, 4, 4)
static const micro portable_micros[] = {NULL, portable_micro1, portable_micro2, portable_micro3, portable_micro4};

#define no_streams(kind, role, span) 0
#define portable_span(w) SPAN
#define portable_order(kind) NULL
static float portable_lift(int kind)
{
    (void)kind;
    return 1;
}

WIDENER(portable_widen, , spread_codes)
VERSION(portable, , 4, 8, NULL, no_streams, portable_span, decoded, NULL, portable_order, portable_lift, pack_chunks, CHUNK,
    portable_widen)

#if defined(__x86_64__)
#include "avx2.h"
#include "modes256.h"
#include "pairs512.h"
#include "matrices.h"
#endif

/* Those that this processor can run, the best first. */
static const version *versions[6];
static const version *here;
/* What multiplies in each mode but FP32. `fewest`: the fewest rows for which it is faster than FP32; NULL where the processor
   has no instructions for it. `tallest`: the most rows of a panel of activations. `tile`: FP32 words of decoded codes. `together`:
   the most rows of the weight that `rows` takes, for m rows of activations. */
typedef struct {
    group_packer pack;
    group_rows rows;
    float (*lift)(int);
    Py_ssize_t (*fewest)(const weight *);
    Py_ssize_t tallest;
    size_t tile;
    Py_ssize_t (*together)(Py_ssize_t);
} mode_version;
static mode_version modes[MODES];
/* What multiplies a few rows in mode BF16, or NULL. */
static const version *pairs;
/* What multiplies in mode BF16 by matrices, or NULL. */
static const mode_version *matrices;
static int has_vnni, has_bf16;

/* Of a tile in the L1 cache; INT8 codes have scales and zero-points of every SPAN codes at most. */
enum { TILE = CLAIM * DEEP * (CHUNK / 2 + 2 * SPANS) };

static Py_ssize_t one_claim(Py_ssize_t m)
{
    (void)m;
    return CLAIM;
}

#if defined(HAS_MATRICES)
/* The best version, with products in mode BF16 by matrices. */
static version amx;
static const mode_version by_matrices = {pack_matrices, rows_by_matrices, lift_of, fewest_by_matrices, SIDE, DECODED, rows_of_matrices};
#endif

#if defined(__x86_64__)
/* Whether that is a version for AVX-512. */
static int is_avx512(const version *v)
{
#if defined(HAS_MATRICES)
    if (v == &amx)
        return 1;
#endif
    return v == &avx512 || v == &avx512_vbmi;
}
#endif

/* Let calls run for that version. */
static void take(const version *v)
{
    here = v;
    modes[INT8_MODE] = modes[BF16_MODE] =
        (mode_version){portable_pack_groups, portable_rows_by_groups, portable_lift, NULL, TALLEST, TILE, one_claim};
    matrices = NULL;
#if defined(__x86_64__)
    if (v == &avx2 || is_avx512(v))
        modes[INT8_MODE] =
            (mode_version){avx2_pack_groups, avx2_rows_by_groups, portable_lift, fewest_by_integers, PANEL256, TILE, one_claim};
    if (is_avx512(v) && has_vnni)
        modes[INT8_MODE] = (mode_version){
            avx512_pack_groups, avx512_rows_by_groups, portable_lift, fewest_by_integers, TALLEST, TILE, one_claim};
    if (is_avx512(v) && has_bf16)
        modes[BF16_MODE] =
            (mode_version){avx512_pack_groups, avx512_rows_by_tiles, lift_of, fewest_by_tiles, TALLEST, TILE, one_claim};
    pairs = NULL;
    if (v == &avx512_vbmi && has_bf16) {
        modes[BF16_MODE] =
            (mode_version){avx512_pack_groups, avx512_rows_by_groups, lift_of, fewest_by_streams, TALLEST, TILE, one_claim};
        pairs = &avx512_pairs;
    }
#if defined(HAS_MATRICES)
    if (v == &amx)
        matrices = &by_matrices; /* and no pairs, which would be no faster than FP32 */
#endif
#endif
}

static void find_versions(void)
{
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2_too = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (avx2_too && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512vbmi")) {
            fill_byte_tables();
#if defined(HAS_MATRICES)
            if (__builtin_cpu_supports("avx512bf16") && may_use_matrices()) {
                amx = avx512_vbmi;
                amx.name = "amx";
                versions[n++] = &amx;
            }
#endif
            versions[n++] = &avx512_vbmi;
        }
        versions[n++] = &avx512;
    }
    if (avx2_too)
        versions[n++] = &avx2;
    has_vnni = __builtin_cpu_supports("avx512vnni");
    has_bf16 = __builtin_cpu_supports("avx512bf16");
#endif
    versions[n] = &portable;
    take(versions[0]);
}

/* -------------------------------------------------------------------------------------------------- for Python */

static int refused(const char *wanted, Py_ssize_t expected, Py_ssize_t found)
{
    PyErr_Format(PyExc_ValueError, "wanted %s of %zd bytes; got %zd. Call breccia.matmul.", wanted, expected, found);
    return 0;
}

static int is_float(const char *what, const Py_buffer *x, Py_ssize_t n)
{
    if (x->len == 4 * n && (uintptr_t)x->buf % 4 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted %s: %zd aligned FP32 numbers; got %zd bytes. Call breccia.matmul.", what, n, x->len);
    return 0;
}

static int is_kind(int kind)
{
    if (kind >= 0 && kind < KINDS)
        return 1;
    PyErr_Format(PyExc_ValueError, "wanted a kind from 0 to %d; got %d. Call breccia.matmul.", KINDS - 1, kind);
    return 0;
}

static Py_ssize_t padded(Py_ssize_t k)
{
    return (k + CHUNK - 1) / CHUNK * CHUNK;
}

/* Codes with one scale, once scales are spread. */
static Py_ssize_t span_of(Py_ssize_t block, Py_ssize_t k)
{
    return block >= k || block % SPAN == 0 ? SPAN : 1;
}

/* Fill `g` for a mode other than FP32. */
static int is_mode(int mode, int kind, const Py_buffer *table, Py_ssize_t block, Py_ssize_t k, grouping *g)
{
    if (mode == FP32_MODE || (mode > FP32_MODE && mode < MODES && grouped(g, mode, kind, table->buf, block, k)))
        return 1;
    PyErr_Format(PyExc_ValueError,
        "wanted mode 0 (FP32), or mode 1 (INT8) or 2 (BF16) for codes that it multiplies exactly, in blocks of a multiple of %d; "
        "got mode %d, kind %d, block = %zd. Call breccia.matmul.", SPAN, mode, kind, block);
    return 0;
}

/* Memory for `rows` rows of the weight and `m` of activations, in cache lines. Returns 0 where there is none. `tile`: FP32 words
   of decoded codes; 0 where they are decoded in registers. */
static int allocate(const weight *w, size_t rows, Py_ssize_t m, size_t tile, workspace *to)
{
    const size_t spans = (size_t)(padded(w->k) / w->span + BETWEEN), sums = (size_t)(m + 15) / 16 * 16;
    const size_t codes = w->widen ? rows * (size_t)row_of_chunks(w) / 4 : 0;
    const size_t sizes[] = {
        (size_t)w->groups, rows * spans, w->role == NONE ? 0 : rows * spans, tile ? rows * sums : 0, tile, codes};
    float *widened, **parts[] = {&to->run, &to->scales, &to->offsets, &to->sums, &to->tile, &widened};
    size_t all = 64; /* some for alignment, and for vectors that begin in the last row's scales */
    for (int i = 0; i < 6; i++)
        all += (sizes[i] + 15) / 16 * 16;
    to->memory = malloc(4 * all);
    if (!to->memory)
        return 0;
    float *next = (float *)(((uintptr_t)to->memory + 63) & ~(uintptr_t)63);
    for (int i = 0; i < 6; i++) {
        *parts[i] = next;
        next += (sizes[i] + 15) / 16 * 16;
    }
    to->codes = (uint8_t *)widened;
    return 1;
}

/* -------------------------------------------------------------------------------------------------- threads */

/* A product that several threads compute: they take parts of the activations to pack, then rows of the weight. */
typedef struct {
    const weight *w;
    const grouping *g;
    const version *by; /* NULL: activations are rounded, in groups, and `mode` multiplies */
    const mode_version *mode;
    numbers x;     /* (m, k) activations in FP32, FP16 or BF16 */
    Py_ssize_t m;
    float *wide;   /* FP32 activations: x itself, or room for them */
    float *packed, *y;
    const float *bias; /* (n,), added to the product; or NULL */
    Py_ssize_t parts, next_part, packed_parts, next_row;
    int fine, memory, threads;
} product;

/* What multiplies m rows of activations in a mode: NULL for groups of rounded ones. */
static const version *version_for(int mode, const weight *w, Py_ssize_t m)
{
    if (mode == FP32_MODE)
        return here;
    return mode == BF16_MODE && pairs && pairs->streams(w, m) ? pairs : NULL;
}

/* What multiplies in a mode other than FP32. */
static const mode_version *mode_for(const grouping *g, const weight *w)
{
#if defined(HAS_MATRICES)
    if (g->mode == BF16_MODE && matrices && takes_matrices(w, g))
        return matrices;
#endif
    return &modes[g->mode];
}

/* In how many parts rounded activations are packed, and one of them: some chunks of one panel, or one of several panels. */
static Py_ssize_t rounded_parts(Py_ssize_t m, Py_ssize_t k, Py_ssize_t tallest)
{
    const Py_ssize_t chunks = (k + CHUNK - 1) / CHUNK;
    return m > tallest ? (m + tallest - 1) / tallest : m < chunks ? m : chunks;
}

static part rounded_part(Py_ssize_t m, Py_ssize_t k, Py_ssize_t i, Py_ssize_t tallest)
{
    return m > tallest ? part_of_panels(m, k, i, tallest) : part_of_chunks(m, k, i, rounded_parts(m, k, tallest));
}

/* Pack part `i`. Returns whether its numbers are within the limits. */
static int pack_part(const product *p, Py_ssize_t i)
{
    const weight *w = p->w;
    const Py_ssize_t k = w->k;
    const float least = p->g->mode != BF16_MODE ? 0 : p->g->parts > 1 ? LEAST_OF_PARTS : LEAST_BF16;
    const part part = p->by ? p->by->part(w, p->m, i) : rounded_part(p->m, k, i, p->mode->tallest);
    int fine = 1;
    for (Py_ssize_t r = part.row; r < part.row + part.rows; r++) {
        float *row = p->wide + r * k;
        if (p->x.kind != F32)
            decoded(&p->x, r * k + part.column, part.end - part.column, row + part.column);
        fine &= within(row + part.column, part.end - part.column, MOST_X, least);
    }
    if (p->by)
        p->by->pack(w, p->wide, p->m, part, p->packed);
    else
        p->mode->pack(p->g, w->codes.kind, p->wide, k, part, p->packed);
    return fine;
}

/* Claim rows of the weight, whose end is in `end`. Returns the first one, or n where none is left.

   Claims are long at first, since the codes that follow a thread's rows are being fetched, and short at the end, when all
   threads should end together. A thread that comes late finds fewer rows. */
static Py_ssize_t claimed(product *p, Py_ssize_t *end)
{
    const Py_ssize_t n = p->w->n;
    Py_ssize_t first = __atomic_load_n(&p->next_row, __ATOMIC_RELAXED);
    do {
        const Py_ssize_t rows = (n - first) / (PORTIONS * p->threads) / CLAIM * CLAIM;
        *end = first + (rows > CLAIM ? rows : CLAIM);
        *end = *end < n ? *end : n;
    } while (first < n && !__atomic_compare_exchange_n(&p->next_row, &first, *end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return first;
}

static void multiply_some(void *context)
{
    product *p = context;
    const weight *w = p->w;
    const version *by = p->by;
    workspace to;
    for (Py_ssize_t i; (i = __atomic_fetch_add(&p->next_part, 1, __ATOMIC_RELAXED)) < p->parts;) {
        if (!pack_part(p, i))
            __atomic_store_n(&p->fine, 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&p->packed_parts, 1, __ATOMIC_RELEASE);
    }
    const int streams = by && by->streams(w, p->m);
    const Py_ssize_t step = by ? CLAIM : p->mode->together(p->m);
    if (!allocate(w, streams ? ROWS : (size_t)step, p->m, streams ? 0 : by ? TILE : p->mode->tile, &to)) {
        __atomic_store_n(&p->memory, 0, __ATOMIC_RELAXED);
        return;
    }
    for (int spins = 0; __atomic_load_n(&p->packed_parts, __ATOMIC_ACQUIRE) < p->parts; spins++) {
        RELAX(); /* a part takes microseconds, unless its thread has been suspended */
        if (spins > PATIENCE)
            sched_yield();
    }
    while (__atomic_load_n(&p->fine, __ATOMIC_RELAXED)) {
        Py_ssize_t last;
        const Py_ssize_t begin = claimed(p, &last);
        if (begin >= w->n)
            break;
        for (Py_ssize_t first = begin; first < last && __atomic_load_n(&p->fine, __ATOMIC_RELAXED); first += step) {
            const Py_ssize_t end = first + step < last ? first + step : last;
            if (!differences_are_exact(w, p->g->mode, first, end) ||
                !(by ? by->rows(w, &to, p->packed, p->m, first, end, p->y)
                     : p->mode->rows(w, p->g, &to, p->packed, p->m, first, end, p->y)))
                __atomic_store_n(&p->fine, 0, __ATOMIC_RELAXED);
            for (Py_ssize_t i = 0; p->bias && i < p->m; i++)
                for (Py_ssize_t j = first; j < end; j++)
                    p->y[i * w->n + j] += p->bias[j];
        }
    }
    free(to.memory);
}

/* Compute a product in a mode on up to `threads` threads. Returns 0 where there is no memory. */
static int multiply_in_mode(product *p, int threads)
{
    const weight *w = p->w;
    const size_t words = (size_t)(p->m * words_of(p->g, padded(w->k))), plain = p->x.kind == F32 ? 0 : (size_t)(p->m * w->k);
    void *memory = malloc(4 * (words + plain) + 128); /* a tile of activations may begin in its last words */
    if (!memory)
        return 0;
    p->packed = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    p->wide = plain ? p->packed + words : (float *)(uintptr_t)p->x.items;
    p->by = version_for(p->g->mode, w, p->m);
    p->mode = p->by ? NULL : mode_for(p->g, w);
    p->parts = p->by ? p->by->parts(w, p->m) : rounded_parts(p->m, w->k, p->mode->tallest);
    p->next_part = p->packed_parts = p->next_row = 0;
    p->fine = p->memory = 1;
    p->threads = threads > 1 ? threads : 1;
    run_shared(multiply_some, p, threads);
    free(memory);
    return p->memory;
}

/* Likewise, in the mode that was asked for, or one with its bound that is faster. */
static int multiply_all(product *p, int threads)
{
#if defined(HAS_MATRICES)
    const grouping *const asked = p->g;
    grouping parts;
    if (asked->mode == FP32_MODE && matrices && takes_parts(p->w, p->m, p->x.kind, &parts)) {
        p->g = &parts;
        if (!multiply_in_mode(p, threads))
            return 0;
        p->g = asked;
        if (p->fine)
            return 1;
    }
#endif
    return multiply_in_mode(p, threads);
}

/* The arguments of `multiply`: its buffers, and what they say of the product. */
typedef struct {
    Py_buffer x, data, table, scale, scale_table, offset, y, bias;
    weight w; /* its factor without the lift of a version */
    grouping g;
    int x_kind, mode, threads;
    Py_ssize_t m;
} call;

static void released(call *c)
{
    Py_buffer *const all[] = {&c->x, &c->data, &c->table, &c->scale, &c->scale_table, &c->offset, &c->y, &c->bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        PyBuffer_Release(all[i]);
}

/* Read the arguments and compare all sizes. Returns 0 with an error set, and no buffer held, where they do not agree. */
static int is_call(PyObject *args, const char *format, call *c)
{
    Py_ssize_t tall;
    memset(c, 0, sizeof *c);
    c->g = (grouping){FP32_MODE, 1, 1, 1, {0}, 0, 1};
    weight *const w = &c->w;
    if (!PyArg_ParseTuple(args, format, &c->x, &c->x_kind, &c->m, &w->n, &w->k, &c->mode, &c->data, &w->codes.kind, &w->width,
            &c->table, &c->scale, &w->scale.kind, &c->scale_table, &w->block, &tall, &w->divides, &w->factor, &w->least, &c->offset,
            &w->offset.kind, &w->role, &c->y, &c->bias, &c->threads))
        return 0;
    const Py_ssize_t m = c->m;
    int done = is_kind(w->codes.kind) && is_kind(w->scale.kind) && is_kind(w->offset.kind) && (c->x_kind >= F16 || is_kind(-1)) &&
        is_kind(c->x_kind);
    if (done && (m < 1 || w->n < 1 || w->k < 1 || tall < 1 || w->block < 1 || w->role < 0 || w->role >= ROLES ||
                    w->codes.kind > U8 || !is_width(w->width, w->codes.kind) || kind_bits[w->scale.kind] == 6 ||
                    kind_bits[w->offset.kind] == 6 || m > PY_SSIZE_T_MAX / 16 / padded(w->k) || w->n > PY_SSIZE_T_MAX / 8 / m ||
                    w->n > PY_SSIZE_T_MAX / 8 / padded(w->k))) {
        PyErr_Format(PyExc_ValueError,
            "wanted lengths of at least 1, codes of the bits of their kind or, of integers and tables, fewer, and scales of 8, 16 or "
            "32 bits; got m = %zd, n = %zd, k = %zd, kind %d of %d bits, block = %zd, tall = %zd, role %d, scales of kind %d. Call "
            "breccia.matmul.",
            m, w->n, w->k, w->codes.kind, w->width, w->block, tall, w->role, w->scale.kind);
        done = 0;
    }
    if (done) {
        w->tall = tall < w->n ? tall : w->n;
        w->groups = w->block < w->k ? (w->k + w->block - 1) / w->block : 1;
        w->row_bytes = stored_bytes(w->k, w->width);
        w->span = span_of(w->block, w->k);
        const Py_ssize_t scales = (w->n + w->tall - 1) / w->tall * w->groups;
        const Py_ssize_t scale_bytes = scales * kind_bits[w->scale.kind] / 8;
        const Py_ssize_t offset_bytes = scales * kind_bits[w->offset.kind] / 8;
        const Py_ssize_t x_bytes = m * w->k * kind_bits[c->x_kind] / 8;
        done = is_float("a product", &c->y, m * w->n) && (c->bias.len == 0 || is_float("a bias", &c->bias, w->n)) &&
            (c->data.len == w->n * w->row_bytes || refused("codes", w->n * w->row_bytes, c->data.len)) &&
            (w->codes.kind > TABLE8 || is_float("a table", &c->table, (Py_ssize_t)1 << kind_bits[w->codes.kind])) &&
            (w->scale.kind > TABLE8 || is_float("a table of scales", &c->scale_table, 256)) &&
            (w->scale.kind != TABLE4 || is_kind(-1)) &&
            (c->scale.len == scale_bytes || refused("scales", scale_bytes, c->scale.len)) &&
            (w->role == NONE || c->offset.len == offset_bytes || refused("offsets", offset_bytes, c->offset.len)) &&
            (w->role == NONE || w->offset.kind > E5M2 || is_kind(-1)) &&
            is_mode(c->mode, w->codes.kind, &c->table, w->block, w->k, &c->g) &&
            (c->mode == FP32_MODE || w->role != BIAS || is_kind(-1)) &&
            (c->x_kind == F32 ? is_float("activations", &c->x, m * w->k)
                              : c->x.len == x_bytes || refused("activations", x_bytes, c->x.len));
    }
    if (!done)
        released(c);
    w->codes.table = c->table.buf;
    w->scale.table = c->scale_table.buf;
    return done;
}

/* Where the numbers of a product are. Those of the weight may be NULL where its kinds have none. */
typedef struct {
    const void *x, *data, *scale, *offset, *bias;
    void *y;
} addresses;

/* Multiply what lies at these addresses. */
static PyObject *multiplied(const call *c, const addresses *at, float factor, int threads)
{
    weight w = c->w;
    w.codes.items = at->data, w.scale.items = at->scale, w.offset.items = at->offset;
    w.widen = w.width < kind_bits[w.codes.kind] ? here->widen : NULL;
    w.factor = factor * (c->mode == FP32_MODE ? here->lift(w.codes.kind) : modes[c->mode].lift(w.codes.kind) / c->g.unit);
    product p = {.w = &w, .g = &c->g, .x = {c->x_kind, at->x, NULL}, .m = c->m, .y = at->y, .bias = at->bias};
    int memory;
    Py_BEGIN_ALLOW_THREADS
    memory = multiply_all(&p, threads);
    Py_END_ALLOW_THREADS
    return memory ? PyBool_FromLong(p.fine) : PyErr_NoMemory();
}

PyDoc_STRVAR(multiply_doc,
    "multiply(x, x_kind, m, n, k, mode, data, kind, width, table, scale, scale_kind, scale_table, block, tall, divides, factor,\n"
    "least, offset, offset_kind, role, product, bias, threads): (m, k) activations times the transpose of the weight, in FP32.\n\n"
    "x: FP32, FP16 or BF16. data: (n, bytes) codes of `kind` in `width` bits each, whose values are in `table` where the kind is\n"
    "a table, of as many numbers as its codes could have; likewise scale. A scale covers `block` codes of `tall` rows; it divides or multiplies, after\n"
    "times `factor`. offset: zero-points (role 1) or biases (role 2), in the places of scales. product: (m, n). bias: (n,) FP32\n"
    "numbers to add, or none. threads: how many may work, at most. Returns False, and the product is unspecified, where an activation is above 2^100, or for mode 2\n"
    "below 2^-60 and not 0, where a scale is too large, or smaller than `least` and not 0, and for mode 2\n"
    "where 4-bit codes or their zero-points are not integers from 0 to 15.");

static PyObject *multiply(PyObject *self, PyObject *args)
{
    call c;
    if (!is_call(args, "y*innniy*iiy*y*iy*nnpffy*iiw*y*i:multiply", &c))
        return NULL;
    const addresses at = {c.x.buf, c.data.buf, c.scale.buf, c.offset.buf, c.bias.len ? c.bias.buf : NULL, c.y.buf};
    PyObject *found = multiplied(&c, &at, c.w.factor, c.threads);
    released(&c);
    return found;
}

#define PREPARED "breccia_native.products.prepared"

static void forgotten(PyObject *capsule)
{
    call *c = PyCapsule_GetPointer(capsule, PREPARED);
    if (c)
        released(c);
    free(c);
}

PyDoc_STRVAR(prepare_doc,
    "prepare(*arguments): what `repeat` needs for products of operands of the same kinds and sizes as these arguments of `multiply`,\n"
    "whose sizes are compared here. It keeps the tables, and forgets the other buffers.");

static PyObject *prepare(PyObject *self, PyObject *args)
{
    call *c = malloc(sizeof *c);
    if (!c)
        return PyErr_NoMemory();
    if (!is_call(args, "y*innniy*iiy*y*iy*nnpffy*iiw*y*i:prepare", c)) {
        free(c);
        return NULL;
    }
    Py_buffer *const passing[] = {&c->x, &c->data, &c->scale, &c->offset, &c->y, &c->bias};
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        PyBuffer_Release(passing[i]);
    PyObject *capsule = PyCapsule_New(c, PREPARED, forgotten);
    if (!capsule) {
        released(c);
        free(c);
    }
    return capsule;
}

PyDoc_STRVAR(repeat_doc,
    "repeat(prepared, x, data, scale, offset, bias, factor, threads, product): `multiply` with the addresses of operands, as integers,\n"
    "0 for none; product is a buffer. The memory at the addresses must be what `prepare` was given: kinds, sizes, contiguous.\n"
    "Also returns False where the address of an operand is missing, or not that of aligned numbers.");

static PyObject *repeat(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 9) {
        PyErr_Format(PyExc_TypeError, "repeat takes 9 arguments; got %zd. Call breccia.matmul.", count);
        return NULL;
    }
    const call *c = PyCapsule_GetPointer(args[0], PREPARED);
    if (!c)
        return NULL;
    void *found[5];
    for (int i = 0; i < 5; i++)
        found[i] = PyLong_AsVoidPtr(args[1 + i]);
    const double factor = PyFloat_AsDouble(args[6]);
    const long threads = PyLong_AsLong(args[7]);
    Py_buffer y;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[8], &y, PyBUF_WRITABLE) < 0)
        return NULL;
    const addresses at = {found[0], found[1], found[2], found[3], found[4], y.buf};
    const uintptr_t size = (uintptr_t)kind_bits[c->x_kind] / 8;
    PyObject *done = NULL;
    if (!at.x || !at.data || !at.scale || (c->w.role != NONE && !at.offset) || (uintptr_t)at.x % size || (uintptr_t)at.bias % 4)
        done = Py_NewRef(Py_False);
    else if (is_float("a product", &y, c->m * c->w.n))
        done = multiplied(c, &at, (float)factor, threads < INT_MAX ? (int)threads : INT_MAX);
    PyBuffer_Release(&y);
    return done;
}

PyDoc_STRVAR(kinds_doc, "kinds(): the names of the encodings that `multiply` reads, in the order of their numbers.");

static PyObject *kinds(PyObject *self, PyObject *unused)
{
    PyObject *found = PyTuple_New(KINDS);
    for (int i = 0; found && i < KINDS; i++) {
        PyObject *name = PyUnicode_FromString(kind_names[i]);
        if (!name || PyTuple_SetItem(found, i, name)) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

PyDoc_STRVAR(use_doc,
    "use(name): let calls run for that instruction set, and return the names of those that this processor has, the best\n"
    "first. Without a name, only return them. For tests: no call may be running.");

static PyObject *use(PyObject *self, PyObject *args)
{
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "|s:use", &name))
        return NULL;
    PyObject *found = PyList_New(0);
    int known = !name;
    for (int i = 0; found && versions[i]; i++) {
        PyObject *each = PyUnicode_FromString(versions[i]->name);
        if (!each || PyList_Append(found, each)) {
            Py_XDECREF(each);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(each);
        if (name && strcmp(name, versions[i]->name) == 0) {
            take(versions[i]);
            known = 1;
        }
    }
    if (found && !known) {
        PyErr_Format(PyExc_ValueError, "this processor has the instruction sets %R; got '%s'.", found, name);
        Py_DECREF(found);
        return NULL;
    }
    return found;
}

PyDoc_STRVAR(fast_doc,
    "fast(mode, kind, scale_kind, role, block, k, m): whether the instruction set in use has instructions for mode 1 (INT8) or 2\n"
    "(BF16) that are faster than FP32 for m rows of k activations, and codes of `kind` with offsets of `role` and a scale of\n"
    "`scale_kind` for each block, of a multiple of 8.");

static PyObject *fast(PyObject *self, PyObject *args)
{
    int mode;
    Py_ssize_t m;
    weight w = {.span = SPAN};
    if (!PyArg_ParseTuple(args, "iiiinnn:fast", &mode, &w.codes.kind, &w.scale.kind, &w.role, &w.block, &w.k, &m))
        return NULL;
    return PyBool_FromLong(mode > FP32_MODE && mode < MODES && modes[mode].fewest &&
        m >= (mode == BF16_MODE && matrices ? matrices : &modes[mode])->fewest(&w));
}

static PyMethodDef methods[] = {
    {"fast", fast, METH_VARARGS, fast_doc},
    {"multiply", multiply, METH_VARARGS, multiply_doc},
    {"prepare", prepare, METH_VARARGS, prepare_doc},
    {"repeat", (PyCFunction)(void (*)(void))repeat, METH_FASTCALL, repeat_doc},
    {"kinds", kinds, METH_NOARGS, kinds_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *self)
{
    find_versions();
    return find_pool();
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "breccia_native.products",
    .m_doc = "Compiled products of activations and quantized weights; see breccia_native.matmul, which calls them.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_products(void)
{
    return PyModuleDef_Init(&module);
}
