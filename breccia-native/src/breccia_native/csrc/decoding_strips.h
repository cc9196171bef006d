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
    uint8_t codes[STRIP];
    if (e->bits == 4) {
        own->pairs(data, n, e->table, y);
        return;
    }
    if (e->bits == 6) {
        codes_of_sixes(data, n, codes);
        data = codes;
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
    if (f->subtracted || f->halved)
        blocks_prepared(y, n, t->k, f, at);
    switch (t->k) {
    case 16: blocks_scaled(y, n, 16, f, at); break;
    case 32: blocks_scaled(y, n, 32, f, at); break;
    case 128: blocks_scaled(y, n, 128, f, at); break;
    default: blocks_scaled(y, n, t->k, f, at);
    }
    if (f->has_global) {
        const float g = f->global_scale;
        if (f->divides)
            for (Py_ssize_t i = 0; i < n; i++)
                y[i] /= g;
        else
            for (Py_ssize_t i = 0; i < n; i++)
                y[i] *= g;
    }
    if (f->added)
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

static void decode_rows(const task *t, const element *e, const factors *f)
{
    switch (t->kind) { /* each compiled for its kind */
    case FP32: rows_decoded(t, e, f, &own_routines, FP32); break;
    case BF16: rows_decoded(t, e, f, &own_routines, BF16); break;
    default: rows_decoded(t, e, f, &own_routines, FP16);
    }
    finish(t);
}

static void decode_columns(const task *t, const element *e, const factors *f)
{
    switch (t->kind) {
    case FP32: columns_decoded(t, e, f, &own_routines, FP32); break;
    case BF16: columns_decoded(t, e, f, &own_routines, BF16); break;
    default: columns_decoded(t, e, f, &own_routines, FP16);
    }
    finish(t);
}

#endif
