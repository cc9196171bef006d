"""GEMM by torch's own kernels: `torch._scaled_mm` and `torch.nn.functional.scaled_mm` (cuBLAS, CUTLASS)."""
