/* The search for scales for any processor. */

#include "searching_blocks.h"

const searching_function searching_portable = search;
