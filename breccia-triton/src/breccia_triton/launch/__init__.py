"""How kernels are compiled and launched, whatever they compute: Triton's in `launcher`, and those in CUDA C++.

`compiler` makes a cubin of a CUDA C++ source by the NVRTC that torch ships, `driver` loads and launches it through the CUDA
driver, and `program` joins both. `compiler` and `driver` import no framework. An `executable` is an op that is ready to run.
"""
