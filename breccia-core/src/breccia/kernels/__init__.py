"""Kernels: `reference` is the generic algorithm; `triton` a façade of what the plug-in breccia-triton registers."""
