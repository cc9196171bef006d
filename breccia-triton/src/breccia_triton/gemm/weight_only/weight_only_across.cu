// A weight in storage "mma_16x128" as bf16 numbers in C order, for products whose sums go over its rows: dL/dx = dL/dy * w.
//
// y is COPIES matrices of N x K, one behind the other. Each value is decoded to FP32 as the contract says and rounded to bf16; the
// second copy is what that leaves, rounded to bf16 too: 2^-17 of the value is lost. With one copy values are exact (E2M1, E4M3
// and E5M2 codes under E8M0 scales) or, for a product that rounds them, not. Columns are flagged that hold a value whose
// second number would be subnormal, or (one copy) that is subnormal itself, or that only rounding to bf16 makes infinite:
// weight_only_across_mend computes those columns in FP32, and rows of x that are flagged. Without a flag its blocks end at once.
//
// flags: one number that says whether there is a flag, one for each row of x, from `first` on one for each column of w.
//
// Macros: see weight_only.cuh, and COPIES 1 or 2. ACT 0, BIAS 3.
#include "weight_only.cuh"

constexpr int PITCH = COLUMNS + 8;                       // numbers of a decoded row: 8 rows start in different banks
constexpr int WARPS = 4;                                 // a slice each: 64 rows of w
constexpr int SUBNORMAL = 4;                             // flag of the storage; see fragments.py
// Bits of magnitudes: smaller ones but 0 are flagged (24 bits of 2^-102 end at 2^-125), and from BEYOND on bf16 has Inf.
constexpr u32 LEAST = (COPIES == 2 ? 127 - 102 : 1) << 23, BEYOND = 0x7f7f8000u, INFINITE = 0x7f800000u;

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ bool unusual(float v) { const u32 u = magnitude(v); return u != 0 && u - LEAST >= BEYOND - LEAST; }

__device__ __forceinline__ bool is_flagged(u32 u) { return (u != 0 && u < LEAST) || (u >= BEYOND && u < INFINITE); }

// Two values of a row, and of columns `column` and the next one. flags: those of the columns. Products are rounded before (not
// fused with the difference here): the second number is what the first one leaves of the value that the contract defines.
__device__ __forceinline__ void put(float v0, float v1, u16* high_row, u16* low_row, int* flags, int* any, int column, int K, bool exists) {
    u32 high = to_bf16x2(v1, v0), low = 0;
    if (COPIES == 2) low = to_bf16x2(v1 - __uint_as_float(high & 0xffff0000u), v0 - __uint_as_float(high << 16));
    if (unusual(v0) || unusual(v1)) {
        const u32 u0 = magnitude(v0), u1 = magnitude(v1);
        if (u0 >= BEYOND) low &= 0xffff0000u;                          // Inf - Inf
        if (u1 >= BEYOND) low &= 0x0000ffffu;
        if (exists && is_flagged(u0) && column < K) flags[column] = *any = 1;
        if (exists && is_flagged(u1) && column + 1 < K) flags[column + 1] = *any = 1;
    }
    *(u32*)high_row = high;
    if (COPIES == 2) *(u32*)low_row = low;
}

// Blocks along x take 64 rows of w; along y, PER_BLOCK chunks.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
weight_only_across(const __grid_constant__ Weight w, u16* __restrict__ y, int* __restrict__ flags, int first, int N, int K, int PER_BLOCK) {
    __shared__ __align__(16) u8 slices[WARPS][SLICE];
    __shared__ __align__(16) u16 rows[COPIES][WARPS][16 * PITCH];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (K + COLUMNS - 1) / COLUMNS, row0 = blockIdx.x * 64 + warp * 16, largest = w.rows[blockIdx.x * 2 + 1];
    const int from_chunk = blockIdx.y * PER_BLOCK, last = min(chunks, from_chunk + PER_BLOCK);
    const bool slow = (w.rows[blockIdx.x * 2] & (1 << ACT | SUBNORMAL)) != 0;
    const float factor = factor_of(w), power = AT_DECODE ? factor_of_rows(largest) : 1.f;
    const u32 slice = shared_address(slices[warp]);
    for (int chunk = from_chunk; chunk < last; chunk++) {
        const u8* here = w.chunks + ((u64)blockIdx.x * chunks + chunk) * CHUNK;
        for (int i = lane; i < SLICE / 16; i += 32) ((uint4*)slices[warp])[i] = ((const uint4*)(here + warp * SLICE))[i];
        __syncwarp();
        int* const of_columns = flags + 1 + first + chunk * COLUMNS;
        const int columns = K - chunk * COLUMNS;
        u16* const high_rows = rows[0][warp];
        u16* const low_rows = rows[COPIES - 1][warp];
        if (slow) {
#pragma unroll 1
            for (int i = lane; i < 16 * (COLUMNS / 2); i += 32) {
                const int row = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2, at = row * PITCH + column;
                const float v0 = element(here, warp * 16 + row, column), v1 = element(here, warp * 16 + row, column + 1);
                put(__fmul_rn(v0, factor), __fmul_rn(v1, factor), high_rows + at, low_rows + at, of_columns, flags, column, columns, row0 + row < N);
            }
        } else {
            Codes codes;
            Rows multipliers = {};
            float s0 = power, s1 = power;
            load_codes(slice, lane, codes);
#pragma unroll
            for (int j = 0; j < UNITS; j++) {
                u32 a[4];
                decode_tile(codes, slice, g, j, largest, multipliers, a);
                if (!AT_DECODE && j * 16 % GROUP == 0) load_scales(slice, g, j * 16 / GROUP, s0, s1);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = g + 8 * (i & 1), column = j * 16 + 2 * t + 8 * (i >> 1), at = row * PITCH + column;
                    const float s = i & 1 ? s1 : s0;
                    const float v0 = __fmul_rn(of_bf16(a[i] & 0xffff), s), v1 = __fmul_rn(__uint_as_float(a[i] & 0xffff0000u), s);
                    put(__fmul_rn(v0, factor), __fmul_rn(v1, factor), high_rows + at, low_rows + at, of_columns, flags, column, columns, row0 + row < N);
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int copy = 0; copy < COPIES; copy++)
            for (int i = lane; i < 16 * (COLUMNS / 8); i += 32) {      // 16 bytes at a time: K is a multiple of 8
                const int row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8, k = chunk * COLUMNS + column;
                if (row0 + row < N && k < K) *(uint4*)(y + ((u64)copy * N + row0 + row) * K + k) = *(const uint4*)&rows[copy][warp][row * PITCH + column];
            }
        __syncwarp();
    }
}

// Tiles of 64 x 64 numbers of y (M, K) with a flag, from x (M, N), in turn by all blocks.
extern "C" __global__ void weight_only_across_mend(const __grid_constant__ Weight w, const u16* __restrict__ x, void* __restrict__ y,
                                                   const int* __restrict__ flags, int M, int N, int K, int ldx, int ldy) {
    if (flags[0] == 0) return;
    const int chunks = (K + COLUMNS - 1) / COLUMNS, along = (K + 63) / 64, tiles = (M + 63) / 64 * along;
    const float factor = factor_of(w);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int m0 = tile / along * 64, k0 = tile % along * 64;
        bool flagged = false;
        for (int i = 0; i < 64; i++)
            flagged |= (m0 + i < M && flags[1 + m0 + i] != 0) || (k0 + i < K && flags[1 + M + k0 + i] != 0);
        if (!flagged) continue;
        for (int o = threadIdx.x; o < 64 * 64; o += blockDim.x) {
            const int m = m0 + o / 64, k = k0 + o % 64;
            if (m >= M || k >= K) continue;
            float sum = 0.f;
            for (int n = 0; n < N; n++)
                sum = fmaf(number<ACT>(x, (u64)m * ldx + n), element(w.chunks + ((u64)(n / 64) * chunks + k / COLUMNS) * CHUNK, n % 64, k % COLUMNS) * factor, sum);
            write(y, (u64)m * ldy + k, sum);
        }
    }
}
