"""GEMM of two FP8 tensors on Hopper, in CUDA C++: `fp8_matmul.cu`."""
