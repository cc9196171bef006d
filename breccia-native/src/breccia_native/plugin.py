"""Everything breccia-native adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1

#: Above core's own kernels (-500), and below what others declare without a rank.
_FASTER = -400


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    # torch's CPU tensors come here too: breccia_torch.cpu calls the kernel for NumPy.
    kernels, available = "breccia_native.kernels", "breccia_native.availability:missing"
    for op, module in (("cast", "numpy.plan"), ("dequantize", "plans")):
        accepts = f"breccia.kernels.{module}:accepts_{op}"
        yield Kernel(op, "numpy", f"{kernels}:{op}", f"native.{op}", available=available, accepts=accepts, rank=_FASTER)
