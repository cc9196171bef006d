// Numbers of formats in FP32, for the kernels of this folder and for tests on the host: no instructions. After ptx.cuh.
#pragma once

__device__ __forceinline__ float of_bf16(u32 h) { return __uint_as_float(h << 16); }
// 2^(code - 127), which is subnormal for code 0; 255 is NaN.
__device__ __forceinline__ float of_e8m0(u32 code) {
    return __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : code << 23);
}
