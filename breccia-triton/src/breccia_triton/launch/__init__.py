"""How kernels are compiled and launched, whatever they compute: Triton's, and those in CUDA C++.

A Triton kernel is described by `triton_launch`, compiled and launched by `launcher`. Of a CUDA C++ source, `compiler` makes a
cubin by the NVRTC that torch ships, `driver` loads and launches it through the CUDA driver, and `program` joins both. `device`
has memory and streams of torch, `cache` what is kept between calls. An `executable` is an op that is ready to run. `compiler`,
`driver`, `triton_launch` and `cache` import no framework.
"""
