/* Steps down the columns of a weight, by the vectors of an instruction set.

   A source file for one defines first: `vector`, of W numbers; `decode_vector`, which decodes the codes of a vector of columns: of
   one row, or of two for 4-bit codes, the other in the high bits; and STEP_ROWS, the rows of activations that have registers. */

#ifndef BRECCIA_COLUMN_STEPS_H
#define BRECCIA_COLUMN_STEPS_H

/* Whether 6-bit codes are in the high bits of a byte. */
INLINE int is_high(int kind)
{
    return kind == E2M3 || kind == E3M2;
}

/* Adds to the bytes `to`, from bit `up` on, codes of `width` bits that begin in bit `shift` of bytes `a` and end in bytes `b`. */
INLINE void add_codes(
    const uint8_t *a, const uint8_t *b, const int shift, const int width, const int up, Py_ssize_t n, uint8_t *to)
{
    const uint64_t each = 0x0101010101010101u, all = (1u << width) - 1, first = all & 0xFF >> shift;
    const uint64_t low = first * each, high = (all - first) * each;
    Py_ssize_t i = 0;
    for (; i + (Py_ssize_t)sizeof(words) <= n; i += sizeof(words)) {
        words u, v, found;
        memcpy(&u, a + i, sizeof u);
        memcpy(&v, b + i, sizeof v);
        memcpy(&found, to + i, sizeof found);
        found |= (((u >> shift) & low) | ((v << (8 - shift)) & high)) << up;
        memcpy(to + i, &found, sizeof found);
    }
    for (; i < n; i++)
        to[i] |= (uint8_t)(((a[i] >> shift) | (b[i] << (8 - shift))) & (int)all) << up;
}

/* `count` rows from row k on of the codes of a panel of `n` columns, as bytes of their kind, PANEL to a row. */
INLINE void widened(const matrix *w, Py_ssize_t k, Py_ssize_t count, Py_ssize_t first, Py_ssize_t n, uint8_t *to)
{
    const int packed = w->codes.kind == TABLE4;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_ssize_t bit = (k + i) * w->width;
        const int shift = (int)(bit % 8), up = packed ? (int)(4 * (i % 2)) : is_high(w->codes.kind) ? 2 : 0;
        const uint8_t *codes = w->codes.items + bit / 8 * w->n + first;
        uint8_t *row = to + (packed ? i / 2 : i) * PANEL;
        if (up != 4)
            memset(row, 0, (size_t)n);
        add_codes(codes, shift + w->width > 8 ? codes + w->n : codes, shift, w->width, up, n, row);
        for (Py_ssize_t j = 0; w->codes.kind == I8 && j < n; j++)
            row[j] = (uint8_t)((row[j] ^ 1 << (w->width - 1)) - (1 << (w->width - 1)));
    }
}

/* Numbers of columns `first` to `first + n` in a row of stored scales or offsets, each for `tall` columns. */
INLINE void of_columns(const numbers *a, Py_ssize_t start, Py_ssize_t first, Py_ssize_t n, Py_ssize_t tall, float *to)
{
    if (tall == 1) {
        decoded(a, start + first, n, to);
        return;
    }
    for (Py_ssize_t i = 0; i < n;) {
        float y;
        const Py_ssize_t slot = (first + i) / tall, end = (slot + 1) * tall - first;
        decoded(a, start + slot, 1, &y);
        for (; i < n && i < end; i++)
            to[i] = y;
    }
}

/* The scales and offsets of a row of blocks, for the columns of a panel. Returns whether they are within the limits. */
INLINE int panel_scales(const matrix *w, Py_ssize_t row, Py_ssize_t first, Py_ssize_t n, float *scales, float *offsets)
{
    of_columns(&w->scale, row * w->wide, first, n, w->tall, scales);
    int fine = w->factor == 1 || within(scales, n, MOST_STORED, w->least);
    if (w->divides)
        for (Py_ssize_t i = 0; i < n; i++)
            scales[i] = 1 / scales[i];
    for (Py_ssize_t i = 0; i < n; i++)
        scales[i] *= w->factor;
    fine = fine && within(scales, n, MOST_SCALE, w->least);
    if (w->role != NONE) {
        of_columns(&w->offset, row * w->wide, first, n, w->tall, offsets);
        fine = fine && within(offsets, n, MOST_STORED, 0);
    }
    return fine;
}

/* Keeps operations on either side of it apart: a product fused with the addition of a bias is not rounded as decoding does. */
#if defined(__x86_64__)
#define APART(v) __asm__ volatile("" : "+v"(v))
#elif defined(__aarch64__)
#define APART(v) __asm__ volatile("" : "+w"(v))
#else
#define APART(v) __asm__ volatile("" : "+m"(v))
#endif

/* sums += x times the codes of `count` rows and of a strip of columns, scaled. x: (m, k) from the first of these rows on. */
INLINE void step_by(const int kind, const int m, const int role, const matrix *w, const float *x, Py_ssize_t count,
    const uint8_t *codes, Py_ssize_t stride, const float *scales, const float *offsets, float *sums)
{
    vector t[MOST_ROWS][VECTORS] = {{{0}}}, low, high = {0};
    for (Py_ssize_t i = 0; i < count; i += kind == TABLE4 ? 2 : 1, codes += stride) {
        __builtin_prefetch(codes + (kind == TABLE4 ? STEP / 2 : STEP) * stride);
        const int pair = kind == TABLE4 && i + 1 < count;
        UNROLL for (int v = 0; v < VECTORS; v++)
        {
            decode_vector(kind, codes + v * W, w->codes.table, &low, &high);
            if (role != NONE) {
                vector scale, offset;
                memcpy(&scale, scales + v * W, sizeof scale);
                memcpy(&offset, offsets + v * W, sizeof offset);
                if (role == BIAS) {
                    low *= scale, high *= scale;
                    APART(low);
                    APART(high);
                    low += offset, high += offset;
                } else
                    low -= offset, high -= offset;
            }
            UNROLL for (int r = 0; r < m; r++) t[r][v] += low * x[r * w->k + i];
            if (pair)
                UNROLL for (int r = 0; r < m; r++) t[r][v] += high * x[r * w->k + i + 1];
        }
    }
    UNROLL for (int v = 0; v < VECTORS; v++)
    {
        vector scale, sum;
        memcpy(&scale, scales + v * W, sizeof scale);
        UNROLL for (int r = 0; r < m; r++)
        {
            memcpy(&sum, sums + r * PANEL + v * W, sizeof sum);
            sum += role == BIAS ? t[r][v] : t[r][v] * scale;
            memcpy(sums + r * PANEL + v * W, &sum, sizeof sum);
        }
    }
}

/* One for each number of rows that have registers. */
#define STEP_OF(rows, kind, role)            \
    if (rows <= STEP_ROWS && m == rows)      \
        step_by(kind, rows, role, w, x, count, codes, stride, scales, offsets, sums);
#define STEPPER(kind, role)                                                                                                 \
    static void step_##kind##_##role(int m, const matrix *w, const float *x, Py_ssize_t count, const uint8_t *codes,        \
        Py_ssize_t stride, const float *scales, const float *offsets, float *sums)                                          \
    {                                                                                                                       \
        STEP_OF(1, kind, role)                                                                                              \
        STEP_OF(2, kind, role)                                                                                              \
        STEP_OF(3, kind, role)                                                                                              \
        STEP_OF(4, kind, role)                                                                                              \
        STEP_OF(5, kind, role)                                                                                              \
        STEP_OF(6, kind, role)                                                                                              \
    }
STEPPER(TABLE4, NONE)
STEPPER(TABLE4, ZERO_POINT)
STEPPER(TABLE4, BIAS)
STEPPER(TABLE8, NONE)
STEPPER(TABLE8, ZERO_POINT)
STEPPER(TABLE8, BIAS)
STEPPER(I8, NONE)
STEPPER(I8, ZERO_POINT)
STEPPER(I8, BIAS)
STEPPER(U8, NONE)
STEPPER(U8, ZERO_POINT)
STEPPER(U8, BIAS)
STEPPER(E4M3, NONE)
STEPPER(E5M2, NONE)
STEPPER(E2M3, NONE)
STEPPER(E3M2, NONE)
static const stepper steps[KINDS][ROLES] = {
    [TABLE4] = {step_TABLE4_NONE, step_TABLE4_ZERO_POINT, step_TABLE4_BIAS},
    [TABLE8] = {step_TABLE8_NONE, step_TABLE8_ZERO_POINT, step_TABLE8_BIAS},
    [I8] = {step_I8_NONE, step_I8_ZERO_POINT, step_I8_BIAS},
    [U8] = {step_U8_NONE, step_U8_ZERO_POINT, step_U8_BIAS},
    [E4M3] = {step_E4M3_NONE},
    [E5M2] = {step_E5M2_NONE},
    [E2M3] = {step_E2M3_NONE},
    [E3M2] = {step_E3M2_NONE}};

static void widen(const matrix *w, Py_ssize_t k, Py_ssize_t count, Py_ssize_t first, Py_ssize_t n, uint8_t *to)
{
    widened(w, k, count, first, n, to);
}

static int scales_of(const matrix *w, Py_ssize_t row, Py_ssize_t first, Py_ssize_t n, float *scales, float *offsets)
{
    return panel_scales(w, row, first, n, scales, offsets);
}

static void turn(void *context)
{
    turn_some(context);
}

#endif
