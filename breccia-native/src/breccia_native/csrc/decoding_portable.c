/* Decoding for any processor. */

#include "decoding_routines.h"

static void pairs(const uint8_t *data, Py_ssize_t n, const float *table, float *y)
{
    some_pairs(data, 0, n, table, y);
}

static void widen(const uint16_t *halves, Py_ssize_t n, float *y)
{
    some_widened(halves, 0, n, y);
}

static void narrow(const float *y, Py_ssize_t n, uint16_t *halves)
{
    some_narrowed(y, 0, n, halves);
}

static void shorten(const float *y, Py_ssize_t n, uint16_t *halves)
{
    some_shortened(y, 0, n, halves);
}

static void turn(const float *rows, float *columns)
{
    for (int j = 0; j < SIDE; j++)
        for (int i = 0; i < SIDE; i++)
            columns[j * TALL + i] = rows[i * STRIP + j];
}

static const routines own_routines = {NULL, NULL, pairs, widen, narrow, shorten, NULL, turn, spread_codes};

#include "decoding_strips.h"

const decoding_functions decoding_portable = {decode_rows, decode_columns};
