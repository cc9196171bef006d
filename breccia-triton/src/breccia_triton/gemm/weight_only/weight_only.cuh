// Shared by the two kernels of y[M,N] = x[M,K] * w[N,K]^T + bias with a quantized w: decoding, PTX, and the slow path.
//
// The weight is in storage "mma_16x128" (breccia/tensors/fragments.py): chunks of 64 rows x 128 columns, [row block][chunk], each
// four slices of 16 rows: [codes in the order of the A operand][scales][zero-points]. One bulk copy moves a chunk.
// Codes become bf16 (or fp16, like x) in registers, exactly: every code has at most 8 significant bits. A scale is multiplied in
// where the product is exact too: E2M1 code x E8M0 or E4M3 scale has at most 2 + 4 bits, and bf16 has the exponents for E4M3 or
// E5M2 code x E8M0 scale. Other scales multiply the FP32 sum of their group. Sums are FP32 throughout.
// Rows with values that the fast decoding does not take (NaN codes, negative or far apart scales) are flagged in the storage; a
// block that meets a flag takes the slow path below: plain FP32, one element at a time.
//
// Macros: FMT 0 INT4, 1 UINT4, 2 E2M1, 3 E4M3, 4 E5M2, 5 INT8.   SCALE 0 fp16, 1 fp32, 2 bf16, 3 E8M0, 4 E4M3.
//         FRACTION fraction bits of integer codes.   GROUP 16, 32, 64, 128 columns of a scale.   ZERO 1: there are zero-points.   ACT (of x) 0 bf16, 1 fp16.
//         OUT (of y) and BIAS: 0 bf16, 1 fp16, 2 fp32; BIAS 3: none.   GROUPED 1: rows of x are in groups, each with a matrix w of its own.
#pragma once
#include "ptx.cuh"
#include "numbers.cuh"

#define INT4 0
#define UINT4 1
#define E2M1 2
#define E4M3 3
#define E5M2 4
#define INT8 5
#define SCALE_F16 0
#define SCALE_F32 1
#define SCALE_BF16 2
#define SCALE_E8M0 3
#define SCALE_E4M3 4
constexpr int COLUMNS = 128;                            // of a chunk
constexpr int UNITS = 8;                                // 16 x 16 operand tiles of a slice
constexpr int WORDS = FMT >= E4M3 ? 2 : 1;              // 32-bit words of a lane's codes in a tile
constexpr int CODES = 1024 * WORDS;                     // bytes of a slice's codes
constexpr int GROUPS = COLUMNS / GROUP;                 // scales of a row of a chunk
constexpr int SCALE_BYTES = SCALE == SCALE_F32 ? 4 : SCALE >= SCALE_E8M0 ? 1 : 2;
constexpr int POINTS = CODES + 16 * GROUPS * SCALE_BYTES;   // where a slice's zero-points start
constexpr int SLICE = POINTS + (ZERO ? 16 * GROUPS : 0);
constexpr int CHUNK = 4 * SLICE;
constexpr bool FP8_AT_DECODE = (FMT == E4M3 || FMT == E5M2) && SCALE == SCALE_E8M0 && ACT == 0;
constexpr bool AT_DECODE = (FMT == E2M1 && SCALE >= SCALE_E8M0) || FP8_AT_DECODE;   // scales are multiplied into the codes

// ---- PTX ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_expect(u32 b, u32 bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(bytes) : "memory"); }
// Weights that are read once may leave L2 first.
__device__ __forceinline__ u64 policy_of(bool once) {
    u64 p;
    if (once) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    else asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
    return p;
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ uint4 load_16(u32 a) { uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v; }
__device__ __forceinline__ float2 load_floats(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
__device__ __forceinline__ u32 load_4(u32 a) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
__device__ __forceinline__ u32 load_2(u32 a) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a)); return v; }
__device__ __forceinline__ u32 load_1(u32 a) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
// Weights are fetched before the wait for the grid ahead, activations after it. The next grid may start only after our wait: by
// then everything ahead of us is complete, so its early reads of weights cannot overtake the kernel that wrote them.
__device__ __forceinline__ float load_of_rank(u32 a, u32 rank) {
    u32 there; float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(a), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
    return v;
}
template <u32 TABLE> __device__ __forceinline__ u32 lop3(u32 a, u32 b, u32 c) { u32 d; asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE)); return d; }
constexpr u32 AND_OR = 0xEA, AND_XOR = 0x6A;             // (a & b) | c, (a & b) ^ c
#if ACT == 0
#define PAIR "bf16x2"
#define INPUTS "bf16.bf16"
#else
#define PAIR "f16x2"
#define INPUTS "f16.f16"
#endif
__device__ __forceinline__ u32 sub2(u32 a, u32 b) { u32 d; asm("sub.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }

// ---- numbers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float of_f16(u32 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h)); return f; }
__device__ __forceinline__ float of_e4m3(u32 b) {
    const u32 m = b & 127;
    const float f = m == 127 ? __uint_as_float(0x7fc00000u) : m < 8 ? (float)m * 0x1p-9f : __uint_as_float((m << 20) + (120u << 23));
    return b & 128 ? -f : f;
}
__device__ __forceinline__ u16 to_bf16(float f) { u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
// Two numbers, `a` in the upper half.
__device__ __forceinline__ u32 to_bf16x2(float a, float b) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(a), "f"(b)); return d; }
__device__ __forceinline__ u16 to_f16(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
template <int KIND> __device__ __forceinline__ float number(const void* p, u64 i) {   // KIND as of OUT
    return KIND == 2 ? ((const float*)p)[i] : KIND == 1 ? of_f16(((const u16*)p)[i]) : of_bf16(((const u16*)p)[i]);
}
__device__ __forceinline__ void write(void* y, u64 i, float f) {
    if (OUT == 2) ((float*)y)[i] = f;
    else ((u16*)y)[i] = OUT == 1 ? to_f16(f) : to_bf16(f);
}

// What a call passes besides sizes. rows: flags and largest scale of each 64 rows. tensor_scale: null where there is none; it
// divides where `divides`. factor: a constant that multiplies the result.
struct Weight { const u8* chunks; const u8* rows; const float* tensor_scale; float factor; int divides; };

__device__ __forceinline__ float factor_of(const Weight& w) {
    if (w.tensor_scale == nullptr) return w.factor;
    return w.divides ? w.factor / *w.tensor_scale : w.factor * *w.tensor_scale;
}
__device__ __forceinline__ void finish(void* y, const void* bias, u64 ld, int m, int n, float sum, float factor) {
    float f = sum * factor;
    if (BIAS != 3) f += number<BIAS>(bias, n);
    write(y, m * ld + n, f);
}

// ---- fast decoding: a lane's codes of one 16 x 16 tile into the A operand a[0..3], which are rows g, g + 8, g, g + 8 at columns
// 2t, 2t, 2t + 8, 2t + 8, each with the next column in the upper half. tests/triton/test_weight_only_cuda.py checks it for all codes. ---

#if FMT == INT4 || FMT == UINT4
// bf16: 0x4300 is 128 with a last place of 1, so 0x4300 | u is 128 + u. A two's complement code v is (v ^ 8) - 8: the exclusive or
// also flips that bit, which gives 136 + v, and 136 is subtracted. A zero-point has 8 bits: 128, then z.
// fp16: 0x6400 is 1024; nibbles at bits 4 ... 7 count 16 each: a multiply-add by 1/16 brings them back.
__device__ __forceinline__ void decode(const u32* q, u32 z0, u32 z1, u32* a) {
#if ACT == 0
    const u32 one = FMT == INT4 ? 0x43084308u : 0x43004300u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = sub2(lop3<AND_XOR>(q[0] >> (4 * i), 0x000f000fu, one), one);
        if (ZERO) a[i] = sub2(a[i], i & 1 ? z1 : z0);
    }
#else
    const u32 one = FMT == INT4 ? 0x64086408u : 0x64006400u, sixteen = FMT == INT4 ? 0x64806480u : 0x64006400u;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 w = q[0] >> (4 * i);
        a[i] = sub2(lop3<AND_XOR>(w, 0x000f000fu, one), ZERO ? z0 : one);
        a[i + 1] = fma2(lop3<AND_XOR>(w, 0x00f000f0u, sixteen), 0x2c002c00u, ZERO ? z1 : FMT == INT4 ? 0xd480d480u : 0xd400d400u);
    }
#endif
}
// The number that `decode` subtracts for a zero-point: z in bf16; 1024 + z in fp16 for even i, and -(64 + z) for odd i.
__device__ __forceinline__ u32 point(u32 z, bool odd) {
    const float f = (float)z;
    return (ACT == 0 ? to_bf16(f) : to_f16(odd ? -64.f - f : 1024.f + f)) * 0x00010001u;
}
#elif FMT == E2M1
// Magnitudes at bits 8 ... 6 of a bf16 read as the value times 2^-126 (0.5 is subnormal), at bits 11 ... 9 of an fp16 times
// 2^-14. One exact product with a multiplier m0 (rows g), m1 (rows g + 8) of 2^126 or 2^14 times the scale completes them.
__device__ __forceinline__ void decode(const u32* q, u32 m0, u32 m1, u32* a) {
    const u32 w = q[0], w3 = w << 3, SIGN = 0x80008000u;
#if ACT == 0
    const u32 VALUE = 0x01c001c0u;
    a[0] = mul2(w & (VALUE | SIGN), m0);
    a[1] = mul2(w3 & (VALUE | SIGN), m1);
    a[2] = mul2(lop3<AND_OR>(w << 6, VALUE, (w << 2) & SIGN), m0);
    a[3] = mul2(lop3<AND_OR>(w >> 3, VALUE, (w << 1) & SIGN), m1);
#else
    const u32 VALUE = 0x0e000e00u;
    a[0] = mul2(lop3<AND_OR>(w3, VALUE, w & SIGN), m0);
    a[1] = mul2(lop3<AND_OR>(w << 6, VALUE, w3 & SIGN), m1);
    a[2] = mul2(lop3<AND_OR>(w << 9, VALUE, (w << 2) & SIGN), m0);
    a[3] = mul2(lop3<AND_OR>(w, VALUE, (w << 1) & SIGN), m1);
#endif
}
// The multiplier for a scale byte, in both halves. E8M0: 2^(byte - largest) times 2^126, or 2^15 in fp16, where smaller scales than
// 2^-29 of the largest belong to blocks of zeros. E4M3 (renamed, see the storage): the scale times 2^117 or 2^5; 0 gives -0 and
// NaN gives NaN. `factor_of_rows` undoes the powers of two. Other scales: multiplied later, so 2^126 or 2^14.
__device__ __forceinline__ u32 multiplier(u32 byte, int largest) {
    if (SCALE == SCALE_E4M3) return ACT == 0 ? byte * 0x00100010u + 0x75007500u : byte * 0x00800080u + 0x28002800u;
    if (ACT == 0) return byte * 0x00800080u + (u32)(253 - largest) * 0x00800080u;
    return (u32)(max((int)byte, largest - 29) - largest + 30) * 0x04000400u;
}
#elif FMT == INT8
// bf16: the low 7 bits as 128 + l, minus 128 or, for negative codes, 256. fp16: 1152 + v, minus 1152.
__device__ __forceinline__ u32 of_bytes(u32 p) {          // two codes, in the low bytes of the halves
#if ACT == 0
    return sub2(lop3<AND_OR>(p, 0x007f007fu, 0x43004300u), lop3<AND_OR>(p, 0x00800080u, 0x43004300u));
#else
    return sub2(lop3<AND_XOR>(p, 0x00ff00ffu, 0x64806480u), 0x64806480u);
#endif
}
#else
// E4M3: exponent and mantissa at bits 10 ... 4 of a bf16 read as the value times 2^-120, E5M2 at bits 11 ... 5 times 2^-112, subnormals
// included; one exact product with m completes them, 2^120 or 2^112, times the scale where that is E8M0. fp16: E4M3 at bits
// 13 ... 7 is the value times 2^-8 (see `factor_of_rows`), E5M2 is the upper byte. p: two codes, in the upper bytes of the halves.
__device__ __forceinline__ u32 of_bytes(u32 p, u32 m) {
    const u32 SIGN = 0x80008000u;
#if ACT == 1
    return FMT == E5M2 ? p & 0xff00ff00u : lop3<AND_OR>(p >> 1, 0x3f803f80u, p & SIGN);
#else
    return FMT == E5M2 ? mul2(lop3<AND_OR>(p >> 3, 0x0fe00fe0u, p & SIGN), m) : mul2(lop3<AND_OR>(p >> 4, 0x07f007f0u, p & SIGN), m);
#endif
}
// The multiplier for a scale byte, in both halves: 2^(byte - largest) times 2^120 or 2^112. Scales are at most `largest`, which is at
// most 150 in rows without a flag, so exponents stay in range. `factor_of_rows` undoes the rest.
constexpr u32 EXPONENT = FMT == E5M2 ? 112 + 127 : 120 + 127;
__device__ __forceinline__ u32 multiplier(u32 byte, int largest) { return (EXPONENT + byte - largest) * 0x00800080u; }
#endif
#if FMT >= E4M3
__device__ __forceinline__ void decode(const u32* q, u32 m0, u32 m1, u32* a) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if FMT == INT8
        a[2 * i] = of_bytes(q[i]);
        a[2 * i + 1] = of_bytes(q[i] >> 8);
#else
        a[2 * i] = of_bytes(q[i] << 8, m0);
        a[2 * i + 1] = of_bytes(q[i], m1);
#endif
    }
}
#endif

// The factor of the sums of 64 rows that the fast decoding leaves out. largest: their largest E8M0 scale.
__device__ __forceinline__ float factor_of_rows(int largest) {
    if (FMT == E4M3 && ACT == 1) return 0x1p8f;
    if (FMT == E2M1 && SCALE == SCALE_E4M3) return 0x1p9f;
    if (FMT == E2M1 && SCALE == SCALE_E8M0) return of_e8m0(largest) * (ACT == 0 ? 1.f : 0.5f);
    if (FP8_AT_DECODE) return of_e8m0(largest);
    return 1.f;
}

// A slice's codes of one lane, in registers.
struct Codes { u32 q[UNITS * WORDS]; };
__device__ __forceinline__ void load_codes(u32 slice, int lane, Codes& v) {
#pragma unroll
    for (int h = 0; h < CODES / 512; h++) {
        const uint4 x = load_16(slice + h * 512 + lane * 16);
        v.q[4 * h] = x.x; v.q[4 * h + 1] = x.y; v.q[4 * h + 2] = x.z; v.q[4 * h + 3] = x.w;
    }
}
// Tile j of them as operand a. m: of rows g and g + 8, kept by the caller from tile to tile of a group.
struct Rows { u32 m[4]; };
__device__ __forceinline__ void decode_tile(const Codes& v, u32 slice, int g, int j, int largest, Rows& r, u32* a) {
#if FMT >= E2M1 && FMT <= E5M2
    const int at = g * GROUPS + j * 16 / GROUP;
    if (!AT_DECODE) r.m[0] = r.m[1] = FMT == E2M1 ? (ACT == 0 ? 0x7e807e80u : 0x74007400u) : FMT == E4M3 ? 0x7b807b80u : 0x77807780u;
    else if (j * 16 % GROUP == 0) {
        r.m[0] = multiplier(load_1(slice + CODES + 2 * at), largest);
        r.m[1] = multiplier(load_1(slice + CODES + 2 * at + 1), largest);
    }
#elif ZERO
    if (j * 16 % GROUP == 0) {
        const u32 z = load_2(slice + POINTS + 2 * (g * GROUPS + j * 16 / GROUP));
        r.m[0] = point(z & 255, false);
        r.m[1] = point(z >> 8, true);
    }
#endif
    decode(v.q + j * WORDS, r.m[0], r.m[1], a);
}
// The scales of a group of rows g and g + 8 that multiply sums, and with them 2^-FRACTION: later, sums might have overflowed.
__device__ __forceinline__ void load_scales(u32 slice, int g, int group, float& s0, float& s1) {
    const u32 at = slice + CODES + (g * GROUPS + group) * 2 * SCALE_BYTES;
    if (SCALE == SCALE_F32) { const float2 v = load_floats(at); s0 = v.x; s1 = v.y; }
    else if (SCALE == SCALE_E8M0) { const u32 v = load_2(at); s0 = of_e8m0(v & 255); s1 = of_e8m0(v >> 8); }
    else if (SCALE == SCALE_BF16) { const u32 v = load_4(at); s0 = of_bf16(v & 0xffff); s1 = __uint_as_float(v & 0xffff0000u); }
    else { const u32 v = load_4(at); s0 = of_f16(v & 0xffff); s1 = of_f16(v >> 16); }
    if (FRACTION) { s0 *= 1.f / (1 << FRACTION); s1 *= 1.f / (1 << FRACTION); }
}

// ---- the slow path: any code and scale, for flagged rows ----------------------------------------------------------------

// Element (row of 64, column of 128) of a chunk in FP32, as the contract decodes it.
__device__ __noinline__ float element(const u8* chunk, int row, int column) {
    const u8* slice = chunk + row / 16 * SLICE;
    const int g = row % 8, upper = row % 16 / 8, lane = g * 4 + column % 8 / 2, half = column % 16 / 8;
    const int scale = ((g * GROUPS + column / GROUP) * 2 + upper);
    float v;
    if (FMT >= E4M3) {
        const u32 code = slice[column / 32 * 512 + lane * 16 + column % 32 / 16 * 8 + half * 4 + column % 2 * 2 + upper];
        v = FMT == E4M3 ? of_e4m3(code) : FMT == E5M2 ? of_f16(code << 8) : (float)(signed char)code;
    } else {
        const int i = 2 * half + upper;
        const u32 w = ((const u16*)slice)[column / 64 * 256 + lane * 8 + column % 64 / 16 * 2 + column % 2];
        if (FMT == E2M1) {
            const u32 m = (w >> (i == 0 ? 6 : i == 1 ? 3 : i == 2 ? 0 : 9)) & 7, sign = (w >> (i == 0 ? 15 : 11 + i)) & 1;
            v = m < 2 ? 0.5f * m : (2 + m % 2) * (0.25f * (1 << m / 2));
            v = sign ? -v : v;
        } else {
            const int code = (w >> (4 * i)) & 15;
            v = (float)(FMT == INT4 ? (code ^ 8) - 8 : code - (ZERO ? slice[POINTS + scale] : 0));
        }
    }
    v *= 1.f / (1 << FRACTION);
    const u8* s = slice + CODES + scale * SCALE_BYTES;
    if (SCALE == SCALE_E4M3) {
        const int b = *s;                               // the storage's name of the code
        if (b == 176) return v * 0.f;
        if (b == 169) return __uint_as_float(0x7fc00000u);
        const bool positive = (b >= 32 && b <= 150) || b == 8 || b == 16 || b == 20 || b == 24 || b == 26 || b == 28 || b == 30;
        if (positive) return v * __uint_as_float((u32)(b + 117 * 8) << 20);
        const int below = (b > 8) + (b > 16) + (b > 20) + (b > 24) + (b > 26) + (b > 28) + (b > 30) + min(max(b - 32, 0), 119) + (b > 169) + (b > 176);
        return v * -of_e4m3(b - below);
    }
    return v * (SCALE == SCALE_F32 ? *(const float*)s : SCALE == SCALE_E8M0 ? of_e8m0(*s) : SCALE == SCALE_BF16 ? of_bf16(*(const u16*)s) : of_f16(*(const u16*)s));
}
// Columns row0 ... row0 + rows of y for rows m0 ... m1 of x, by all threads of a block.
__device__ __noinline__ void slow_rows(const Weight& w, const u16* x, const void* bias, void* y, int m0, int m1, int row0, int rows, int N, int K, int ldx, int ldy) {
    const int chunks = (K + COLUMNS - 1) / COLUMNS;
    const float factor = factor_of(w);
    for (int o = threadIdx.x; o < (m1 - m0) * rows; o += blockDim.x) {
        const int m = m0 + o / rows, n = row0 + o % rows;
        if (n >= N) continue;
        float sum = 0.f;
        for (int k = 0; k < K; k++)
            sum = fmaf(number<ACT>(x, (u64)m * ldx + k), element(w.chunks + ((u64)(n / 64) * chunks + k / COLUMNS) * CHUNK, n % 64, k % COLUMNS), sum);
        finish(y, bias, ldy, m, n, sum, factor);
    }
}

// ---- groups of rows of x, each with a matrix w of its own ---------------------------------------------------------------

#if GROUPED
// ends: where the rows of each of `count` groups end. The others say how far the next group's chunks (bytes), flags (bytes) and
// tensor scale (numbers) are.
struct Groups { const int* ends; u64 chunks, rows, tensor_scale; int count; };
// Rows first ... last of x. group: `count` for rows of no group, -1 for no rows.
struct Part { int group, first, last; };
#define GROUPS_ARGUMENT const __grid_constant__ Groups groups,

__device__ __forceinline__ Weight weight_of(const Weight& w, const Groups& groups, int group) {
    const float* scale = w.tensor_scale == nullptr ? nullptr : w.tensor_scale + group * groups.tensor_scale;
    return {w.chunks + group * groups.chunks, w.rows + group * groups.rows, scale, w.factor, w.divides};
}
// Part `index` of M rows that are taken in parts of `batch` rows, each of one group. All lanes of a warp look at 32 groups at a time.
__device__ __forceinline__ Part part_of(const Groups& groups, int index, int batch, int M, int lane) {
    const u32 all = 0xffffffffu;
    int parts = 0, start = 0;                                          // of the groups before
    for (int from = 0; from <= groups.count; from += 32) {
        const int group = from + lane;
        int end = group < groups.count ? min(groups.ends[group], M) : group == groups.count ? M : 0;
        end = max(end, start);
#pragma unroll
        for (int o = 1; o < 32; o *= 2) { const int before = __shfl_up_sync(all, end, o); if (lane >= o) end = max(end, before); }
        int first = __shfl_up_sync(all, end, 1);
        if (lane == 0) first = start;
        const int own = (end - first + batch - 1) / batch;
        int upto = own;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) { const int before = __shfl_up_sync(all, upto, o); if (lane >= o) upto += before; }
        upto += parts;
        const u32 found = __ballot_sync(all, index < upto && index >= upto - own);
        if (found != 0) {
            const int at = __ffs(found) - 1;
            const int row = __shfl_sync(all, first, at) + (index - __shfl_sync(all, upto - own, at)) * batch;
            return {from + at, row, min(__shfl_sync(all, end, at), row + batch)};
        }
        parts = __shfl_sync(all, upto, 31);
        start = __shfl_sync(all, end, 31);
    }
    return {-1, 0, 0};
}
__device__ __forceinline__ void write_zeros(void* y, int m0, int m1, int row0, int rows, int N, int ldy) {
    for (int o = threadIdx.x; o < (m1 - m0) * rows; o += blockDim.x)
        if (row0 + o % rows < N) write(y, (u64)(m0 + o / rows) * ldy + row0 + o % rows, 0.f);
}
#else
#define GROUPS_ARGUMENT
#endif
