/* The functions that multiply, of all instruction sets. */

#ifndef BRECCIA_PRODUCTS_H
#define BRECCIA_PRODUCTS_H

#include "modes.h"

extern const version products_portable;
extern const mode_version modes_portable;

#if defined(HAS_X86)
extern const version products_avx2, products_avx512, products_vbmi, products_bf16;
void widen_by_bmi2(const weight *, const uint8_t *, uint8_t *);
void widen_by_vbmi(const weight *, const uint8_t *, uint8_t *);
/* What other versions share with that of AVX-512. */
void decode_tile_by_avx512(const weight *, const panel *, Py_ssize_t, Py_ssize_t, float *);
void stream_short_blocks(int, const weight *, const panel *, const float *, Py_ssize_t, float *);
void stream_narrow_blocks(const weight *, const panel *, const float *, Py_ssize_t, float *);
int stream_by_avx512(const weight *, const panel *, const float *, Py_ssize_t, int, float *);
Py_ssize_t most_streams_of_avx512(const weight *);
extern const micro micros_of_avx512[];
/* Fill the tables of tables512.h. */
void fill_byte_tables(void);
extern const mode_version int8_avx2, int8_vnni, int8_few, bf16_tiles, bf16_streams;
/* Whether int8_few multiplies m rows; what its unsigned codes are too large by; and whether a byte has two of them. */
int takes_few(const weight *, const grouping *, Py_ssize_t);
int shift_of_few(const weight *, const grouping *);
int is_in_nibbles(const weight *);
#endif

#if defined(HAS_MATRICES)
extern const mode_version bf16_matrices;
/* Ask the system for the matrix unit. Returns whether it may be used. */
int may_use_matrices(void);
/* Whether the unit multiplies these groups. */
int takes_matrices(const weight *, const grouping *);
/* Whether FP32 or FP16 activations are multiplied as sums of BF16 numbers, and the groups then. */
int takes_parts(const weight *, Py_ssize_t, int, grouping *);
#endif

#endif
