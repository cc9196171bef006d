"""GEMM in Triton whose mainloop decodes quantized operands in registers; `plans` has the idea."""
