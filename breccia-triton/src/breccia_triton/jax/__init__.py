"""The ops on JAX arrays: the kernels of `casts` and of `gemm.fused`, launched through jax-triton."""
