/* The functions of casts for any processor. */

#include "amax.h"
#include "table_codes.h"

const cast_functions casts_portable = {widened_halves, load, store, amax, amax_down, extremes, words, shifted, floats, integers,
    tables, scales, pairs, sixes, eights, down, values};
