"""GEMM of any operands by cuBLAS in BF16, which they are decoded to in memory; `matmul` has the idea."""
