/* The transpose of a matrix of bytes: codes of a weight in (K, N) order as products.c reads them. */

#ifndef BRECCIA_TURNING_H
#define BRECCIA_TURNING_H

#include <stdint.h>
#include <string.h>

#include "bits.h"
#include "pool.h"

enum {
    SQUARE = 64,       /* the side of squares that are transposed: a cache line, which is then read and written as a whole */
    WIDE = 4 * SQUARE, /* columns that a thread takes at a time: more of a row at once, in fewer pages */
};

typedef struct {
    const uint8_t *from;
    uint8_t *to;
    Py_ssize_t rows, columns; /* of `from` */
    Py_ssize_t next;          /* the first column that no thread has taken */
} turning;

typedef uint64_t words __attribute__((vector_size(SQUARE)));

/* Moves byte i of vector j to byte j of vector i, in each of the 8 words of the vectors. */
INLINE void turn_words(words w[8])
{
    static const uint64_t kept[3] = {0x00000000ffffffffu, 0x0000ffff0000ffffu, 0x00ff00ff00ff00ffu};
    for (int step = 0, apart = 4; step < 3; step++, apart /= 2)
        for (int i = 0; i < 8; i++)
            if (!(i & apart)) {
                const words moved = ((w[i] >> (8 * apart)) ^ w[i + apart]) & kept[step];
                w[i + apart] ^= moved;
                w[i] ^= moved << (8 * apart);
            }
}

/* Copies n bytes, n <= SQUARE. A constant length takes one instruction. */
INLINE void copy_line(uint8_t *to, const uint8_t *from, Py_ssize_t n)
{
    if (n == SQUARE)
        memcpy(to, from, SQUARE);
    else
        memcpy(to, from, (size_t)n);
}

/* Transposes the square at (row, column), or what the matrix has of it. */
INLINE void turn_square(const turning *t, Py_ssize_t row, Py_ssize_t column)
{
    uint8_t before[SQUARE][SQUARE], after[SQUARE][SQUARE];
    const Py_ssize_t rows = t->rows - row < SQUARE ? t->rows - row : SQUARE;
    const Py_ssize_t columns = t->columns - column < SQUARE ? t->columns - column : SQUARE;
    if (rows < SQUARE || columns < SQUARE)
        memset(before, 0, sizeof before);
    for (Py_ssize_t i = 0; i < rows; i++) {
        const uint8_t *from = t->from + (row + i) * t->columns + column;
        copy_line(before[i], from, columns);
        if (row + SQUARE + i < t->rows)
            __builtin_prefetch(from + SQUARE * t->columns);
    }
    for (int i = 0; i < SQUARE; i += 8) {
        words w[8];
        memcpy(w, before[i], sizeof w);
        turn_words(w);
        for (int n = 0; n < 8; n++)
            for (int j = 0; j < 8; j++) {
                const uint64_t word = w[n][j];
                memcpy(&after[8 * j + n][i], &word, 8);
            }
    }
    for (Py_ssize_t j = 0; j < columns; j++)
        copy_line(t->to + (column + j) * t->rows + row, after[j], rows);
}

/* One thread's share: columns that no other has taken, WIDE at a time. */
INLINE void turn_some(void *context)
{
    turning *t = context;
    for (Py_ssize_t first; (first = __atomic_fetch_add(&t->next, WIDE, __ATOMIC_RELAXED)) < t->columns;)
        for (Py_ssize_t i = 0; i < t->rows; i += SQUARE)
            for (Py_ssize_t j = first; j < first + WIDE && j < t->columns; j += SQUARE)
                turn_square(t, i, j);
}

#endif
