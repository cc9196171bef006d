// A weight in storage "mma_16x128" as a matrix of bf16 numbers in C order, for products with many rows of x.
//
// Where bf16 holds code x scale exactly (AT_DECODE) cuBLAS may multiply them. Elsewhere they are codes alone, less their zero-point,
// and scales go to a matrix of their own, [group along K][row], by which fp8_matmul.cu multiplies sums. It is bound by the bytes that
// it writes. A warp takes slices of 16 rows x 128 columns: it copies one to shared memory, decodes it as the other kernels do, and
// writes whole rows of it.
//
// weight_only_mend computes rows of w that are flagged in FP32, over what was made of them: values that bf16 does not hold, or
// only as subnormal numbers, of which NVIDIA does not say what tensor cores make. Without a flag its blocks end at once.
//
// Macros: see weight_only.cuh. ACT 0.
#include "weight_only.cuh"

constexpr int PITCH = COLUMNS + 8;                       // numbers of a decoded row: 8 rows start in different banks
constexpr int WARPS = 4;                                 // a slice each: 64 rows of w
constexpr int SUBNORMAL = 4;                             // flag; see fragments.py

// Blocks along x take 64 rows of w; along y, PER_BLOCK chunks. scales: the first `levels` groups of a row, `pitch` numbers apart; 1
// where there is one scale for each row, 0 for none. With AT_DECODE they are what multiplies the result besides.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
weight_only_decode(const __grid_constant__ Weight w, u16* __restrict__ y, float* __restrict__ scales, int N, int K, int pitch, int levels, int PER_BLOCK) {
    __shared__ __align__(16) u8 slices[WARPS][SLICE];
    __shared__ __align__(16) u16 rows[WARPS][16 * PITCH];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (K + COLUMNS - 1) / COLUMNS, row0 = blockIdx.x * 64 + warp * 16, largest = w.rows[blockIdx.x * 2 + 1];
    const int first = blockIdx.y * PER_BLOCK, last = min(chunks, first + PER_BLOCK);
    // What decoding leaves out, a power of two: the largest E8M0 scale, or 2^9.
    const u32 factor = (u32)to_bf16(factor_of_rows(largest)) * 0x00010001u;
    const u32 slice = shared_address(slices[warp]);
    for (int chunk = first; chunk < last; chunk++) {
        const uint4* from = (const uint4*)(w.chunks + ((u64)blockIdx.x * chunks + chunk) * CHUNK + warp * SLICE);
        for (int i = lane; i < SLICE / 16; i += 32) ((uint4*)slices[warp])[i] = from[i];
        __syncwarp();
        for (int i = lane; i < 8 * GROUPS; i += 32) {                  // rows r and r + 8 of group i / 8
            const int r = i % 8, level = chunk * GROUPS + i / 8, row = row0 + r;
            float s0, s1;
            if (level >= levels) break;
            if constexpr (AT_DECODE) s0 = s1 = factor_of(w);
            else load_scales(slice, r, i / 8, s0, s1);
            if (row < N) scales[(u64)level * pitch + row] = s0;
            if (row + 8 < N) scales[(u64)level * pitch + row + 8] = s1;
        }
        Codes codes;
        Rows multipliers = {};
        load_codes(slice, lane, codes);
#pragma unroll
        for (int j = 0; j < UNITS; j++) {
            u32 a[4];
            decode_tile(codes, slice, g, j, largest, multipliers, a);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(u32*)&rows[warp][(g + 8 * (i & 1)) * PITCH + j * 16 + 2 * t + 8 * (i >> 1)] = AT_DECODE ? mul2(a[i], factor) : a[i];
        }
        __syncwarp();
        for (int i = lane; i < 16 * (COLUMNS / 8); i += 32) {          // 16 bytes at a time: K is a multiple of 8
            const int row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8, k = chunk * COLUMNS + column;
            if (row0 + row < N && k < K) *(uint4*)(y + (u64)(row0 + row) * K + k) = *(const uint4*)&rows[warp][row * PITCH + column];
        }
        __syncwarp();
    }
}

// Blocks along x take 64 rows of w; along y, the rows of x in turn, 64 at a time.
extern "C" __global__ void weight_only_mend(const __grid_constant__ Weight w, const u16* __restrict__ x, const void* __restrict__ bias,
                                            void* __restrict__ y, int M, int N, int K, int ldx, int ldy) {
    if ((w.rows[blockIdx.x * 2] & (1 << ACT | SUBNORMAL)) == 0) return;
    for (int m = blockIdx.y * 64; m < M; m += gridDim.y * 64)
        slow_rows(w, x, bias, y, m, min(M, m + 64), blockIdx.x * 64, 64, N, K, ldx, ldy);
}
