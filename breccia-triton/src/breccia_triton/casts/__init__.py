"""Casts, decoding and histories in Triton: the kernels, what a call of them is prepared from, and their calls on torch.

`plans` says which calls they take, `prepare` which kernels a call runs, for any framework; `cast` and `decode` are torch's.
"""
