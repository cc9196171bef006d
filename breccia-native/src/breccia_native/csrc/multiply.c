/* Products of FP32 activations and quantized weights, which are decoded in registers or in the L1 cache.

   A weight is (N, K) codes, with blocks along K. A row is taken in chunks of CHUNK codes. Its scales are first spread to one
   for each SPAN codes, so that the loops over codes know neither block sizes nor scale codecs. Activations are packed once per
   call, in the order in which a version decodes codes.

   Few rows of activations are multiplied by codes decoded in registers (streams512.h), more of them by tiles decoded into the L1
   cache (tiles.h), or with AMX by its matrix unit, in parts (bf16_amx.c). Every element of a product is summed by one thread in
   one order, so its bits do not depend on the number of threads, nor on other rows of activations in the same path.

   Scales may be applied to sums of a span: their roundings are fewer than the K that the error bound of docs/spec/numerics.md
   allows, where no sum overflows or underflows. `multiply` returns False for numbers beyond these limits. */

#include "multiply.h"

#include <sched.h>

#include "pool.h"

/* How often a thread looks whether others have packed their parts, before it lets other threads run. */
#define PATIENCE 4000

/* -------------------------------------------------------------------------------------------------- instruction sets */

const version *versions[6], *here;

/* What multiplies in each mode but FP32. */
static const mode_version *modes[MODES];
#if defined(HAS_X86)
/* What multiplies a few rows in mode BF16, or NULL. */
static const version *pairs;
static int has_vnni, has_bf16;
/* What multiplies a few rows in mode INT8, or NULL. */
static const mode_version *few;
#endif
#if defined(HAS_MATRICES)
/* The best version, with products in mode BF16 by matrices; and what multiplies by them, or NULL. */
static version amx;
static const mode_version *matrices;
#endif

#if defined(HAS_X86)
static int is_vbmi(const version *v)
{
    return v == &products_vbmi;
}

/* Whether that is a version for AVX-512. */
static int is_avx512(const version *v)
{
#if defined(HAS_MATRICES)
    if (v == &amx)
        return 1;
#endif
    return v == &products_avx512 || is_vbmi(v);
}
#endif

void take(const version *v)
{
    here = v;
    modes[INT8_MODE] = modes[BF16_MODE] = &modes_portable;
#if defined(HAS_X86)
    if (v == &products_avx2 || is_avx512(v))
        modes[INT8_MODE] = is_avx512(v) && has_vnni ? &int8_vnni : &int8_avx2;
    few = is_avx512(v) && v != &products_avx512 && has_vnni ? &int8_few : NULL;
    if (is_avx512(v) && has_bf16)
        modes[BF16_MODE] = is_vbmi(v) ? &bf16_streams : &bf16_tiles;
    pairs = is_vbmi(v) && has_bf16 ? &products_bf16 : NULL;
#endif
#if defined(HAS_MATRICES)
    matrices = v == &amx ? &bf16_matrices : NULL; /* and no pairs, which would be no faster than FP32 */
#endif
}

static void find_versions(void)
{
    int n = 0;
#if defined(HAS_X86)
    __builtin_cpu_init();
    const int avx2_too = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (avx2_too && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512vbmi")) {
            fill_byte_tables();
#if defined(HAS_MATRICES)
            if (__builtin_cpu_supports("avx512bf16") && may_use_matrices()) {
                amx = products_vbmi;
                amx.name = "amx";
                versions[n++] = &amx;
            }
#endif
            versions[n++] = &products_vbmi;
        }
        versions[n++] = &products_avx512;
    }
    if (avx2_too)
        versions[n++] = &products_avx2;
    has_vnni = __builtin_cpu_supports("avx512vnni");
    has_bf16 = __builtin_cpu_supports("avx512bf16");
#endif
    versions[n] = &products_portable;
    take(versions[0]);
}

int begin(void)
{
    find_versions();
    return find_pool();
}

/* What multiplies m rows of activations in a mode: NULL for groups of rounded ones. */
static const version *version_for(int mode, const weight *w, Py_ssize_t m)
{
    if (mode == FP32_MODE)
        return here;
#if defined(HAS_X86)
    if (mode == BF16_MODE && pairs && streams_of(pairs, w, m))
        return pairs;
#endif
    return NULL;
}

/* Whether nothing but `few` multiplies in mode INT8. */
static int has_only_few(const weight *w)
{
    return w->codes.kind == U8 || w->width < kind_bits[w->codes.kind];
}

/* What multiplies a few rows in mode INT8 by codes in short blocks, for which `g` is changed, or NULL. */
static const mode_version *few_for(const weight *w, Py_ssize_t m, grouping *g)
{
#if defined(HAS_X86)
    if (g->mode == INT8_MODE && few && takes_few(w, g, m)) {
        g->shift = shift_of_few(w, g);
        g->nibbles = is_in_nibbles(w);
        return few;
    }
#endif
    return NULL;
}

/* What multiplies in a mode other than FP32; NULL where nothing does. */
static const mode_version *mode_for(const grouping *g, const weight *w)
{
    if (g->mode == INT8_MODE && has_only_few(w))
        return NULL;
#if defined(HAS_MATRICES)
    if (g->mode == BF16_MODE && matrices && takes_matrices(w, g))
        return matrices;
#endif
    return modes[g->mode];
}

/* -------------------------------------------------------------------------------------------------- memory */

/* Memory for `rows` rows of the weight and `m` of activations, in cache lines. Returns 0 where there is none. `tile`: FP32 words
   of decoded codes; 0 where they are decoded in registers, which takes ROWS rows at a time. */
static int allocate(const weight *w, Py_ssize_t span, size_t rows, Py_ssize_t m, size_t tile, workspace *to)
{
    const size_t spans = rows * (size_t)(padded(w->k) / span + BETWEEN), sums = (size_t)(m + 15) / 16 * 16;
    const size_t codes = w->widen ? (tile ? rows : ROWS) * (size_t)row_of_chunks(w) / 4 : 0;
    const size_t sizes[] = {(size_t)w->groups, spans, w->role == NONE ? 0 : spans, tile ? rows * sums : 0, tile, codes};
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
    const part part = p->by ? part_of(p->by, w, p->m, i) : rounded_part(p->m, k, i, p->mode->tallest);
    int fine = 1;
    for (Py_ssize_t r = part.row; r < part.row + part.rows; r++) {
        float *row = p->wide + r * k;
        if (p->x.kind != F32)
            decode_numbers(&p->x, r * k + part.column, part.end - part.column, row + part.column);
        fine &= within(row + part.column, part.end - part.column, MOST_X, least);
    }
    if (p->by)
        p->by->pack(streams_of(p->by, w, p->m), w, p->wide, p->m, part, p->packed);
    else
        p->mode->pack(p->g, w->codes.kind, p->wide, k, part, p->packed);
    return fine;
}

/* Claim rows of the weights, whose end is in `end`. Returns the first one, or `rows` where none is left.

   A claim is a thread's share of what is left: long at first, since the codes that follow a thread's rows are being fetched, and
   short at the end, when all threads should end together. A thread that comes late finds fewer rows. */
static Py_ssize_t claimed(product *p, Py_ssize_t *end)
{
    const Py_ssize_t n = p->rows;
    Py_ssize_t first = __atomic_load_n(&p->next_row, __ATOMIC_RELAXED);
    do {
        const Py_ssize_t rows = (n - first) / p->threads / CLAIM * CLAIM;
        *end = first + (rows > CLAIM ? rows : CLAIM);
        *end = *end < n ? *end : n;
    } while (first < n && !__atomic_compare_exchange_n(&p->next_row, &first, *end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return first;
}

/* Multiply those rows of a weight that are among the claimed ones, `step` at a time. */
static void multiply_rows(product *p, const multiplicand *by, Py_ssize_t begin, Py_ssize_t last, Py_ssize_t step, int streams,
    const workspace *to)
{
    const weight *const w = &by->w;
    const Py_ssize_t stop = last - by->start < w->n ? last - by->start : w->n;
    Py_ssize_t first = begin > by->start ? begin - by->start : 0;
    for (; first < stop && __atomic_load_n(&p->fine, __ATOMIC_RELAXED); first += step) {
        const Py_ssize_t end = first + step < stop ? first + step : stop;
        if (!differences_are_exact(w, p->g->mode, first, end) ||
            !(p->by ? p->by->rows(streams, w, to, p->packed, p->m, first, end, by->y)
                    : p->mode->rows(w, p->g, to, p->packed, p->m, first, end, by->y)))
            __atomic_store_n(&p->fine, 0, __ATOMIC_RELAXED);
        for (Py_ssize_t i = 0; by->bias && i < p->m; i++)
            for (Py_ssize_t j = first; j < end; j++)
                by->y[i * w->n + j] += by->bias[j];
    }
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
    const int streams = by && streams_of(by, w, p->m);
    const Py_ssize_t step = by ? CLAIM : p->mode->together(p->m);
    const Py_ssize_t span = streams ? span_in_streams(w) : w->span, rows = streams ? rows_of_scales(w) : step;
    if (!allocate(w, span, (size_t)rows, p->m, streams ? 0 : by ? TILE : p->mode->tile, &to)) {
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
        if (begin >= p->rows)
            break;
        for (int i = 0; i < p->count; i++)
            multiply_rows(p, &p->weights[i], begin, last, step, streams, &to);
    }
    free(to.memory);
}

/* Compute products in a mode on up to `threads` threads. Returns 0 where there is no memory. */
static int multiply_in_mode(product *p, int threads)
{
    const multiplicand *const weights = p->weights;
    const weight *const w = &weights->w;
    const grouping *const g = p->g;
    grouping own_g = *g;
    const mode_version *const by_few = few_for(w, p->m, &own_g);
    p->by = version_for(g->mode, w, p->m);
    p->mode = p->by ? NULL : by_few ? by_few : mode_for(g, w);
    p->fine = p->by || p->mode;
    if (!p->fine)
        return 1;
    p->g = &own_g;
    const Py_ssize_t length = padded(w->k), of_row = by_few ? words_of_few(g, length) : words_of(g, length);
    const size_t words = (size_t)(p->m * of_row), plain = p->x.kind == F32 ? 0 : (size_t)(p->m * w->k);
    void *memory = malloc(4 * (words + plain) + 128); /* a tile of activations may begin in its last words */
    if (!memory) {
        p->g = g;
        return 0;
    }
    p->packed = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    p->wide = plain ? p->packed + words : (float *)(uintptr_t)p->x.items;
    multiplicand own[MOST_WEIGHTS];
    const int short_block = p->by && p->by->short_blocks && streams_of(p->by, w, p->m) ? short_block_of(w) : 0;
    p->rows = 0;
    for (int i = 0; i < p->count; i++) {
        own[i] = weights[i];
        own[i].start = (p->rows + CLAIM - 1) / CLAIM * CLAIM;
        p->rows = own[i].start + weights[i].w.n;
        own[i].w.short_block = by_few ? (int)g->q : short_block;
        own[i].w.narrow |= !by_few && short_block && p->m == 1 && w->widen;
        if (by_few || own[i].w.narrow)
            own[i].w.widen = NULL;
    }
    p->weights = own, p->w = &own->w;
    p->parts = p->by ? parts_of(p->by, w, p->m) : rounded_parts(p->m, w->k, p->mode->tallest);
    p->next_part = p->packed_parts = p->next_row = 0;
    p->fine = p->memory = 1;
    p->threads = threads > 1 ? threads : 1;
    run_shared(multiply_some, p, threads);
    p->weights = weights, p->w = w, p->g = g;
    free(memory);
    return p->memory;
}

/* Likewise, in the mode that was asked for, or one with its bound that is faster. */
int multiply_all(product *p, int threads)
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

void run_together(void (*task)(void *), void *context, int threads)
{
    run_shared(task, context, threads);
}

/* -------------------------------------------------------------------------------------------------- modes */

float lift_in(int mode, int kind)
{
    return mode == FP32_MODE ? here->lift(kind) : modes[mode]->lift(kind);
}

int is_faster(int mode, const weight *w, Py_ssize_t m)
{
    const mode_version *by = modes[mode];
    if (mode == INT8_MODE && has_only_few(w)) {
        grouping g = {.mode = mode, .q = group_of(w->block, w->k)};
        by = few_for(w, m, &g);
        return by != NULL;
    }
#if defined(HAS_MATRICES)
    if (by->fewest && mode == BF16_MODE && matrices)
        by = matrices;
#endif
    return by->fewest && m >= by->fewest(w);
}
