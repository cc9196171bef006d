"""GEMM with quantized operands, a package for each family of kernels.

| package | operands | device |
|---|---|---|
| `fp8` | two FP8 tensors, CUDA C++ | Hopper |
| `scaled_mm` | two FP8, MXFP8 or NVFP4 tensors, by torch's own kernels | Ada, Hopper, Blackwell |
| `weight_only` | an array and a weight in storage "mma_16x128", CUDA C++ | Hopper |
| `bf16` | any; decoded to BF16 in memory, then cuBLAS | from compute capability 8.0 |
| `fused` | any; the mainloop decodes in registers, in Triton | from compute capability 8.0, also JAX |
"""
