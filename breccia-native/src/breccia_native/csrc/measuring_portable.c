/* Error metrics for any processor. */

#include "measuring_sums.h"

const measuring_function measuring_portable = measure;
