/* Products of columns for any processor. */

#include "columns.h"

typedef float vector __attribute__((vector_size(16)));
enum { W = 4, STEP_ROWS = 2 };

INLINE void decode_vector(const int kind, const uint8_t *codes, const float *table, vector *low, vector *high)
{
    float y[4];
    const numbers a = {kind, codes, table};
    if (kind == TABLE4) {
        *low = (vector){table[codes[0] & 15], table[codes[1] & 15], table[codes[2] & 15], table[codes[3] & 15]};
        *high = (vector){table[codes[0] >> 4], table[codes[1] >> 4], table[codes[2] >> 4], table[codes[3] >> 4]};
    } else {
        decoded(&a, 0, 4, y);
        memcpy(low, y, sizeof *low);
    }
}

#include "column_steps.h"

static float no_lift(int kind)
{
    (void)kind;
    return 1;
}

const column_version columns_portable = {"portable", steps, widen, scales_of, turn, no_lift, W * VECTORS, STEP_ROWS};
