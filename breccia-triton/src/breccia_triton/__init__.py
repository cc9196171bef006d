"""Triton kernels for breccia tensors on CUDA. Imports nothing; see `plugin.py`."""
