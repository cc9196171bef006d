/* Codes packed into bytes, and the values of packed codes. */

#ifndef BRECCIA_PACKING_H
#define BRECCIA_PACKING_H

#include "loads.h"

INLINE void pairs_of(const uint8_t *codes, Py_ssize_t n, uint8_t *data)
{
    for (Py_ssize_t i = 0; i < n; i++)
        data[i] = (uint8_t)(codes[2 * i] | (codes[2 * i + 1] << 4));
}

/* Eight codes, one a byte, without the gaps between them: these are closed in pairs. */
INLINE uint64_t closed(const uint8_t *codes, const int bits)
{
    uint64_t w;
    memcpy(&w, codes, 8);
    UNROLL for (int field = 8, filled = bits; field < 64; field *= 2, filled *= 2) {
        uint64_t low = 0;
        for (int at = 0; at < 64; at += 2 * field)
            low |= (((uint64_t)1 << filled) - 1) << at;
        w = (w & low) | ((w >> (field - filled)) & (low << filled));
    }
    return w;
}

/* Eight codes of as many bits to that many bytes. */
INLINE void eights_of(const uint8_t *codes, Py_ssize_t groups, const int bits, uint8_t *data)
{
    const Py_ssize_t last = (8 + bits - 1) / bits - 1; /* groups behind which there is no room for 8 bytes */
    Py_ssize_t i = 0;
    for (; i < groups - last; i++, codes += 8, data += bits) {
        const uint64_t w = closed(codes, bits);
        memcpy(data, &w, 8); /* the next group overwrites what is too much */
    }
    for (; i < groups; i++, codes += 8, data += bits) {
        const uint64_t w = closed(codes, bits);
        memcpy(data, &w, (size_t)bits);
    }
}

/* Rows of `n` codes of `bits` bits, one a byte: those of each column packed down the rows, 8 bits to a row of data. */
INLINE void packed_down_of(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t n, const int bits, uint8_t *data)
{
    const int group = bits % 2 ? 8 : bits == 4 ? 2 : 4; /* rows that share bytes */
    for (Py_ssize_t first = 0; first < rows; first += group, codes += group * n, data += group * bits / 8 * n)
        UNROLL for (int j = 0; j < group * bits / 8; j++)
            for (Py_ssize_t c = 0; c < n; c++) {
                uint8_t found = 0;
                UNROLL for (int i = 8 * j / bits; i * bits < 8 * j + 8; i++)
                {
                    const int shift = i * bits - 8 * j;
                    const uint8_t code = codes[i * n + c];
                    found |= (uint8_t)(shift < 0 ? code >> -shift : code << shift);
                }
                data[j * n + c] = found;
            }
}

/* Four codes of 6 bits to three bytes. */
INLINE void sixes_of(const uint8_t *codes, Py_ssize_t groups, uint8_t *data)
{
    for (Py_ssize_t i = 0; i < groups; i++, codes += 4, data += 3) {
        const uint32_t w = codes[0] | (uint32_t)codes[1] << 6 | (uint32_t)codes[2] << 12 | (uint32_t)codes[3] << 18;
        data[0] = (uint8_t)w;
        data[1] = (uint8_t)(w >> 8);
        data[2] = (uint8_t)(w >> 16);
    }
}

/* -------------------------------------------------------------------------------------------------- values */

/* values = the value of each code times the scale of its block of k: 8-bit codes, and 4-bit codes, two per byte. */
INLINE void values_of_bytes(const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, float *values)
{
    for (Py_ssize_t start = 0; start < n; start += k, scale++) {
        const float by = *scale;
        for (Py_ssize_t i = start; i < start + k; i++)
            values[i] = table[data[i]] * by;
    }
}

INLINE void values_of_pairs(const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, float *values)
{
    for (Py_ssize_t start = 0; start < n; start += k, scale++) {
        const float by = *scale;
        for (Py_ssize_t i = start; i < start + k; i += 2) {
            values[i] = table[data[i / 2] & 15] * by;
            values[i + 1] = table[data[i / 2] >> 4] * by;
        }
    }
}

/* -------------------------------------------------------------------------------------------------- functions */

static void pairs(const uint8_t *codes, Py_ssize_t n, uint8_t *data)
{
    pairs_of(codes, n, data);
}

static void sixes(const uint8_t *codes, Py_ssize_t groups, uint8_t *data)
{
    sixes_of(codes, groups, data);
}

static void eights(const uint8_t *codes, Py_ssize_t groups, int bits, uint8_t *data)
{
    switch (bits) { /* each compiled for its width */
    case 1: eights_of(codes, groups, 1, data); break;
    case 2: eights_of(codes, groups, 2, data); break;
    case 3: eights_of(codes, groups, 3, data); break;
    case 5: eights_of(codes, groups, 5, data); break;
    case 7: eights_of(codes, groups, 7, data); break;
    }
}

static void down(const uint8_t *codes, Py_ssize_t rows, Py_ssize_t n, int bits, uint8_t *data)
{
    switch (bits) {
    case 1: packed_down_of(codes, rows, n, 1, data); break;
    case 2: packed_down_of(codes, rows, n, 2, data); break;
    case 3: packed_down_of(codes, rows, n, 3, data); break;
    case 4: packed_down_of(codes, rows, n, 4, data); break;
    case 5: packed_down_of(codes, rows, n, 5, data); break;
    case 6: packed_down_of(codes, rows, n, 6, data); break;
    case 7: packed_down_of(codes, rows, n, 7, data); break;
    }
}

static void values(
    const uint8_t *data, const float *table, const float *scale, Py_ssize_t n, Py_ssize_t k, int bits, float *found)
{
    if (bits == 8)
        values_of_bytes(data, table, scale, n, k, found);
    else
        values_of_pairs(data, table, scale, n, k, found);
}

#endif
