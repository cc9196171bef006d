"""CUDA C++ kernels: compiled at run time by the NVRTC that torch ships, launched through the CUDA driver.

`compiler` makes a cubin from a source in this folder, `driver` loads and launches it, `program` joins both. The first two
import no framework.
"""
