/* Products by AVX-512 of codes in short blocks. */

#define VECTOR_BYTES 64
#include "instructions.h"

#if defined(HAS_X86)
COMPILE_FOR(AVX512)

#include "short_blocks.h"

#define SHORT(M, kind, role, block) \
    STREAM(short_##M##kind##role##block, short_blocks_streamed(WIDENED, M, kind, role, block, w, p, x, stride, sums))
#define OF_ROWS(kind, role, block) SHORT(1, kind, role, block) SHORT(2, kind, role, block) SHORT(4, kind, role, block)
#define OF_BLOCKS(kind, role) OF_ROWS(kind, role, 16) OF_ROWS(kind, role, 32)
#define OF_ROLES(kind) OF_BLOCKS(kind, NONE) OF_BLOCKS(kind, ZERO_POINT) OF_BLOCKS(kind, BIAS)
OF_ROLES(TABLE4)
OF_ROLES(I8)
OF_ROLES(U8)
#define NAMES_OF_ROWS(kind, role, block) {short_1##kind##role##block, short_2##kind##role##block, short_4##kind##role##block}
#define NAMES_OF_BLOCKS(kind, role) {NAMES_OF_ROWS(kind, role, 16), NAMES_OF_ROWS(kind, role, 32)}
#define NAMES_OF(kind) {NAMES_OF_BLOCKS(kind, NONE), NAMES_OF_BLOCKS(kind, ZERO_POINT), NAMES_OF_BLOCKS(kind, BIAS)}
static const streamed streams[3][ROLES][2][3] = {NAMES_OF(TABLE4), NAMES_OF(I8), NAMES_OF(U8)};

NARROW_STREAMS(SHUFFLED)

/* Multiplies 2 to the power of `size` rows of activations. */
void stream_short_blocks(int size, const weight *w, const panel *p, const float *x, Py_ssize_t stride, float *sums)
{
    const int kind = stream_of(w->codes.kind), is_long = w->short_block == 32;
    (w->narrow ? narrow_streams[kind][w->role][is_long] : streams[kind][w->role][is_long][size])(w, p, x, stride, sums);
}

COMPILED
#endif
