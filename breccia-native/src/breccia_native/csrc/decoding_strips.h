/* Matrices decoded strip by strip, by the `routines` that a source file for an instruction set defines before. */

#ifndef BRECCIA_DECODING_STRIPS_H
#define BRECCIA_DECODING_STRIPS_H

#include "decoding_routines.h"

INLINE float scale_at(const factors *f, Py_ssize_t block)
{
    float by;
    if (f->of_bytes)
        return f->of_bytes[(uint8_t)f->scale[block]];
    memcpy(&by, f->scale + 4 * block, 4);
    return by;
}

/* -------------------------------------------------------------------------------------------------- codes */

INLINE void integers_decoded(const uint8_t *codes, Py_ssize_t n, const element *e, float *y)
{
    const int flip = e->flip;
    const float unit = e->unit;
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] = (float)((codes[i] ^ flip) - flip) * unit;
}

/* By way of FP16, which has the exponents of all minifloats of 8 bits: `unit` is the ratio of the biases. */
INLINE void minifloats_decoded(const uint8_t *codes, Py_ssize_t n, const element *e, int bits, const routines *own, float *y)
{
    const uint16_t sign = (uint16_t)(1u << (bits - 1)), up = (uint16_t)(1u << (10 - e->mantissa)); /* products, not shifts: in 16 bits */
    const uint16_t infinite = (uint16_t)e->infinite, nan = (uint16_t)e->nan;
    const float unit = e->unit;
    uint16_t halves[STRIP];
    for (Py_ssize_t i = 0; i < n; i++) {
        const uint16_t c = codes[i], a = c & (uint16_t)(sign - 1u), finite = (uint16_t)(a * up);
        const uint16_t at_most = a >= infinite ? 0x7c00 : finite, number = (uint16_t)(at_most | (c & sign) * (0x8000u / sign));
        halves[i] = a >= nan ? 0x7e00 : number; /* tables have NaN without a sign */
    }
    own->widen(halves, n, y);
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] *= unit;
}

INLINE void codes_decoded(const uint8_t *data, Py_ssize_t n, const element *e, const routines *own, float *y)
{
    uint8_t room[STRIP];
    if (is_spread(e->bits)) {
        spread_in_room(data, n, e->bits, own->spread, room);
        data = room;
    }
    if (e->bits <= 4) {
        own->pairs(data, n, e->table, y);
        return;
    }
    if (e->form == INTEGER)
        integers_decoded(data, n, e, y);
    else if (e->form == MINIFLOAT && e->bits == 8)
        minifloats_decoded(data, n, e, 8, own, y);
    else if (e->form == MINIFLOAT)
        minifloats_decoded(data, n, e, 6, own, y);
    else
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] = e->table[data[i]];
}

/* -------------------------------------------------------------------------------------------------- scales */

/* +0 for magnitudes below 2^-126. */
INLINE float flushed(float y)
{
    return (int32_t)(bits_of(y) & MAGNITUDE) < (int32_t)NORMAL ? 0.0f : y;
}

/* y times the scales of blocks. A length k that is known at compile time makes the loop over short blocks a few instructions. */
INLINE void blocks_scaled(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    for (Py_ssize_t i = 0, run; i < n; i += run, at.block++, at.left = k) {
        run = at.left < n - i ? at.left : n - i;
        const float by = scale_at(f, at.block);
        if (run == k)
            for (Py_ssize_t j = i; j < i + k; j++)
                y[j] *= by;
        else
            for (Py_ssize_t j = i; j < i + run; j++)
                y[j] *= by;
    }
}

/* What comes before the scale, for blocks that need it: offsets, and scales of half the number in the table. */
INLINE void blocks_prepared(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    for (Py_ssize_t i = 0, run; i < n; i += run, at.block++, at.left = k) {
        run = at.left < n - i ? at.left : n - i;
        if (f->subtracted) {
            const float less = f->subtracted[at.block];
            if (run == k)
                for (Py_ssize_t j = i; j < i + k; j++)
                    y[j] -= less;
            else
                for (Py_ssize_t j = i; j < i + run; j++)
                    y[j] -= less;
        }
        if (f->halved && f->of_bytes && f->scale[at.block] == 0)
            for (Py_ssize_t j = i; j < i + run; j++)
                y[j] *= 0.5f;
    }
}

INLINE void blocks_added(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    for (Py_ssize_t i = 0, run; i < n; i += run, at.block++, at.left = k) {
        run = at.left < n - i ? at.left : n - i;
        const float more = flushed(f->added[at.block]);
        for (Py_ssize_t j = i; j < i + run; j++)
            y[j] = flushed(y[j]) + more;
    }
}

/* Whether a block has a scale of half the number in the table. */
INLINE int some_halved(const factors *f, Py_ssize_t block, Py_ssize_t count)
{
    return f->halved && f->of_bytes && memchr(f->scale + block, 0, (size_t)count);
}

/* y times the scales of blocks of k, after what comes before, block by block. */
INLINE void by_blocks(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at)
{
    if (f->subtracted || some_halved(f, at.block, blocks_of(n, k, at.left)))
        blocks_prepared(y, n, k, f, at);
    blocks_scaled(y, n, k, f, at);
}

/* The item of each number's block. */
INLINE const float *items_of_numbers(
    const float *items, Py_ssize_t k, Py_ssize_t left, Py_ssize_t n, const routines *own, float *to)
{
    if (k == 1)
        return items;
    own->repeat(items, k, left, n, to);
    return to;
}

/* The same for blocks shorter than a vector: number by number, which takes no loop for each block. */
INLINE void by_numbers(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at, const routines *own)
{
    const Py_ssize_t blocks = blocks_of(n, k, at.left);
    float items[STRIP + LANES], room[STRIP + LANES];
    if (f->subtracted) {
        memcpy(items, f->subtracted + at.block, 4 * (size_t)blocks);
        const float *less = items_of_numbers(items, k, at.left, n, own, room);
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] -= less[i];
    }
    if (some_halved(f, at.block, blocks)) {
        for (Py_ssize_t i = 0; i < blocks; i++)
            items[i] = f->scale[at.block + i] ? 1.0f : 0.5f;
        const float *halves = items_of_numbers(items, k, at.left, n, own, room);
        for (Py_ssize_t i = 0; i < n; i++)
            y[i] *= halves[i];
    }
    scales_of(f, at.block, blocks, items);
    const float *by = items_of_numbers(items, k, at.left, n, own, room);
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] *= by[i];
}

INLINE void added_by_numbers(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at, const routines *own)
{
    const Py_ssize_t blocks = blocks_of(n, k, at.left);
    float items[STRIP + LANES], room[STRIP + LANES];
    for (Py_ssize_t i = 0; i < blocks; i++)
        items[i] = flushed(f->added[at.block + i]);
    const float *more = items_of_numbers(items, k, at.left, n, own, room);
    for (Py_ssize_t i = 0; i < n; i++)
        y[i] = flushed(y[i]) + more[i];
}

/* Are blocks so short that their items are repeated for each number? */
INLINE int are_short(Py_ssize_t k, const routines *own)
{
    return k == 1 || (own->repeat && k < LANES);
}

INLINE void blocks_decoded(float *y, Py_ssize_t n, Py_ssize_t k, const factors *f, place at, const routines *own)
{
    if (are_short(k, own)) {
        by_numbers(y, n, k, f, at, own);
        return;
    }
    switch (k) {
    case 2: by_blocks(y, n, 2, f, at); break;
    case 3: by_blocks(y, n, 3, f, at); break;
    case 4: by_blocks(y, n, 4, f, at); break;
    case 8: by_blocks(y, n, 8, f, at); break;
    case 16: by_blocks(y, n, 16, f, at); break;
    case 32: by_blocks(y, n, 32, f, at); break;
    case 128: by_blocks(y, n, 128, f, at); break;
    default: by_blocks(y, n, k, f, at);
    }
}

INLINE place place_of(const task *t, Py_ssize_t r, Py_ssize_t c)
{
    return (place){r / t->m * t->blocks + c / t->k, t->k - c % t->k};
}

/* n numbers of row r, from column c on, as FP32. */
INLINE void strip_of(
    const task *t, const element *e, const factors *f, const routines *own, Py_ssize_t r, Py_ssize_t c, Py_ssize_t n, float *y)
{
    const place at = place_of(t, r, c);
    codes_decoded(t->data + r * t->pitch + c * e->bits / 8, n, e, own, y);
    blocks_decoded(y, n, t->k, f, at, own);
    if (f->has_global) {
        const float g = f->global_scale;
        if (f->divides)
            for (Py_ssize_t i = 0; i < n; i++)
                y[i] /= g;
        else
            for (Py_ssize_t i = 0; i < n; i++)
                y[i] *= g;
    }
    if (f->added && are_short(t->k, own))
        added_by_numbers(y, n, t->k, f, at, own);
    else if (f->added)
        blocks_added(y, n, t->k, f, at);
}

/* -------------------------------------------------------------------------------------------------- results */

/* Copies bytes; those that will not be read soon past the caches, where the processor can. */
INLINE void write_past(char *to, const char *from, Py_ssize_t n, const routines *own, int stream)
{
    if (stream && own->past)
        own->past(to, from, n);
    else
        memcpy(to, from, (size_t)n);
}

/* n numbers, adjacent in the result. */
INLINE void emit(char *to, const float *y, Py_ssize_t n, int kind, const routines *own, int stream)
{
    if (kind == FP32) {
        write_past(to, (const char *)y, 4 * n, own, stream);
        return;
    }
    uint16_t halves[STRIP];
    if (kind == FP16)
        own->narrow(y, n, halves);
    else
        own->shorten(y, n, halves);
    write_past(to, (const char *)halves, 2 * n, own, stream);
}

/* The part of a result whose rows are adjacent in memory, or of one that is strided both ways. */
INLINE void rows_decoded(const task *t, const element *e, const factors *f, const routines *own, int kind)
{
    const Py_ssize_t size = kind == FP32 ? 4 : 2;
    float y[STRIP];
    for (Py_ssize_t r = t->row; r < t->row_end; r++)
        for (Py_ssize_t c = t->column; c < t->column_end; c += STRIP) {
            const Py_ssize_t n = t->column_end - c < STRIP ? t->column_end - c : STRIP;
            const uint8_t *data = t->data + r * t->pitch + c * e->bits / 8;
            char *to = t->out + r * t->down + c * t->along;
            const int adjacent = t->along == size, past = adjacent && t->stream && (uintptr_t)to % 64; /* then by way of the cache */
            char *const first = adjacent && !past ? to : (char *)y;
            Py_ssize_t done = 0;
            if (own->strip)
                done = own->strip(t, e, f, place_of(t, r, c), data, n, adjacent ? kind : FP32, adjacent && t->stream && !past, first);
            if (past)
                write_past(to, (const char *)y, done * size, own, 1);
            if (done < n)
                strip_of(t, e, f, own, r, c + done, n - done, y + done);
            if (adjacent)
                emit(to + done * size, y + done, n - done, kind, own, t->stream);
            else
                for (Py_ssize_t i = 0; i < n; i++)
                    emit(to + i * t->along, y + i, 1, kind, own, 0);
        }
}

/* The part of a result whose columns are adjacent in memory. */
INLINE void columns_decoded(const task *t, const element *e, const factors *f, const routines *own, int kind)
{
    float y[TALL * STRIP], columns[SIDE * TALL];
    for (Py_ssize_t r = t->row; r < t->row_end; r += TALL)
        for (Py_ssize_t c = t->column; c < t->column_end; c += STRIP) {
            const Py_ssize_t n = t->column_end - c < STRIP ? t->column_end - c : STRIP;
            const Py_ssize_t height = t->row_end - r < TALL ? t->row_end - r : TALL;
            for (Py_ssize_t i = 0; i < height; i++) {
                const uint8_t *data = t->data + (r + i) * t->pitch + c * e->bits / 8;
                float *row = y + i * STRIP;
                const Py_ssize_t done = own->strip ? own->strip(t, e, f, place_of(t, r + i, c), data, n, FP32, 0, row) : 0;
                if (done < n)
                    strip_of(t, e, f, own, r + i, c + done, n - done, row + done);
            }
            for (Py_ssize_t i = 0; i < n; i += SIDE) {
                for (Py_ssize_t j = 0; j < height; j += SIDE)
                    own->turn(y + j * STRIP + i, columns + j);
                for (Py_ssize_t j = 0; j < SIDE && i + j < n; j++)
                    emit(t->out + r * t->down + (c + i + j) * t->along, columns + j * TALL, height, kind, own, t->stream);
            }
        }
}

/* Other threads see what was written past the caches after this. */
INLINE void finish(const task *t)
{
#if defined(HAS_X86)
    if (t->stream)
        _mm_sfence();
#else
    (void)t;
#endif
}

/* -------------------------------------------------------------------------------------------------- functions */

typedef void (*decoded_part)(const task *, const element *, const factors *);

/* Scales, or what is added, of part of a task, one strip wide, whose records begin at the strip: FP32, as many to a row as it has. */
INLINE void numbers_of_records(const task *part, const coding *by, int kind, const char *records, Py_ssize_t row, Py_ssize_t each_row,
    const spreader spread, float *y)
{
    const Py_ssize_t span = part->k * by->each;
    for (Py_ssize_t r = 0; r < part->rows; r++, y += part->blocks) {
        const char *record = records + (row + r) * each_row;
        for (Py_ssize_t i = 0; i < part->columns; i += span, record += by->bytes) {
            float some[WHOLE + 8];
            const Py_ssize_t left = (part->columns - i + part->k - 1) / part->k, count = left < by->each ? left : by->each;
            const float base = float_of(number_of(record, kind));
            numbers_of_record(by, (const uint8_t *)record, kind == FP32 ? 4 : 2, base, count, spread, some);
            memcpy(y + i / part->k, some, 4 * (size_t)count);
        }
    }
}

/* Decode a part whose scales are records, `height` rows of a strip at a time, with scales that are numbers. */
INLINE void decode_under_records(const task *t, const element *e, const factors *f, const Py_ssize_t height, const decoded_part decode)
{
    float scales[TALL * WHOLE], added[TALL * WHOLE];
    const Py_ssize_t span = t->k * f->coded.each, records = (t->columns + span - 1) / span;
    factors plain = *f;
    plain.coded.bits = 0, plain.scale = (const char *)scales, plain.added = f->added ? added : NULL;
    for (Py_ssize_t r = t->row; r < t->row_end; r += height)
        for (Py_ssize_t c = t->column; c < t->column_end; c += STRIP) {
            task part = *t;
            part.row = part.column = 0;
            part.rows = part.row_end = t->row_end - r < height ? t->row_end - r : height;
            part.columns = part.column_end = t->column_end - c < STRIP ? t->column_end - c : STRIP;
            part.blocks = (part.columns + t->k - 1) / t->k;
            part.data += r * t->pitch + c * e->bits / 8;
            part.out += r * t->down + c * t->along;
            const char *const from = f->scale + c / span * f->coded.bytes;
            numbers_of_records(&part, &f->coded, f->coded_kind, from, r, records * f->coded.bytes, own_routines.spread, scales);
            if (f->added)
                numbers_of_records(&part, &f->coded_added, f->coded_added_kind,
                    (const char *)f->added + c / span * f->coded_added.bytes, r, records * f->coded_added.bytes, own_routines.spread, added);
            decode(&part, e, &plain);
        }
}

static void rows_by_kind(const task *t, const element *e, const factors *f)
{
    switch (t->kind) { /* each compiled for its kind */
    case FP32: rows_decoded(t, e, f, &own_routines, FP32); break;
    case BF16: rows_decoded(t, e, f, &own_routines, BF16); break;
    default: rows_decoded(t, e, f, &own_routines, FP16);
    }
}

static void columns_by_kind(const task *t, const element *e, const factors *f)
{
    switch (t->kind) {
    case FP32: columns_decoded(t, e, f, &own_routines, FP32); break;
    case BF16: columns_decoded(t, e, f, &own_routines, BF16); break;
    default: columns_decoded(t, e, f, &own_routines, FP16);
    }
}

static void decode_rows(const task *t, const element *e, const factors *f)
{
    if (f->coded.bits)
        decode_under_records(t, e, f, 1, rows_by_kind);
    else
        rows_by_kind(t, e, f);
    finish(t);
}

static void decode_columns(const task *t, const element *e, const factors *f)
{
    if (f->coded.bits)
        decode_under_records(t, e, f, TALL, columns_by_kind);
    else
        columns_by_kind(t, e, f);
    finish(t);
}

#endif
