"""The ops on JAX arrays: kernels of `casts` and `gemm.fused`, through jax-triton, and of `gemm.fp8`, in `foreign`."""
