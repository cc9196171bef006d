// A weight in storage "mma_16x128" as a matrix of bf16 numbers in C order, for products with many rows of x: cuBLAS multiplies them.
//
// Only where bf16 holds code x scale exactly (AT_DECODE). It is bound by the bytes that it writes. A warp takes slices of 16 rows x
// 128 columns: it copies one to shared memory, decodes it as the other kernels do, and writes whole rows of it.
//
// weight_only_mend computes rows of w that are flagged in FP32, over what cuBLAS made of them: values that bf16 does not hold, or
// only as subnormal numbers, of which NVIDIA does not say what tensor cores make. Without a flag its blocks end at once.
//
// Macros: see weight_only.cuh. ACT 0.
#include "weight_only.cuh"

constexpr int PITCH = COLUMNS + 8;                       // numbers of a decoded row: 8 rows start in different banks
constexpr int WARPS = 4;                                 // a slice each: 64 rows of w
constexpr int SUBNORMAL = 4;                             // flag; see fragments.py

// Blocks along x take 64 rows of w; along y, PER_BLOCK chunks.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
weight_only_decode(const __grid_constant__ Weight w, u16* __restrict__ y, int N, int K, int PER_BLOCK) {
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
        Codes codes;
        Rows scales = {};
        load_codes(slice, lane, codes);
#pragma unroll
        for (int j = 0; j < UNITS; j++) {
            u32 a[4];
            decode_tile(codes, slice, g, j, largest, scales, a);
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(u32*)&rows[warp][(g + 8 * (i & 1)) * PITCH + j * 16 + 2 * t + 8 * (i >> 1)] = mul2(a[i], factor);
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
extern "C" __global__ void weight_only_mend(const __grid_constant__ Weight w, const u16* __restrict__ x, void* __restrict__ y,
                                            int M, int N, int K, int ldx, int ldy) {
    if ((w.rows[blockIdx.x * 2] & (1 << ACT | SUBNORMAL)) == 0) return;
    for (int m = blockIdx.y * 64; m < M; m += gridDim.y * 64)
        slow_rows(w, x, nullptr, y, m, min(M, m + 64), blockIdx.x * 64, 64, N, K, ldx, ldy);
}
