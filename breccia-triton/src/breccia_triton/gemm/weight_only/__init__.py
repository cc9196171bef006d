"""GEMM of an array and a weight in storage "mma_16x128" on Hopper, in CUDA C++: `weight_only.cuh` has the idea.

`matmul` decodes in registers, `decoded` to memory first, for many rows; `dgrad` is dL/dx = dL/dy @ w.
"""
