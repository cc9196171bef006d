"""Everything breccia-native adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1

#: Above core's own kernels (-500), and below what others declare without a rank.
_FASTER = -400


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    # torch's CPU tensors come here too: breccia_torch.cpu asks what serves NumPy.
    kernels, available = "breccia_native.kernels", "breccia_native.availability:missing"
    numpy_does = "breccia.kernels.numpy:accepts_cast"
    yield Kernel("cast", "numpy", f"{kernels}:cast", "native.cast", available=available, accepts=numpy_does, rank=_FASTER)
    for op in ("requantize", "cast_ste", "cast_ste_clipped"):
        yield Kernel(op, "numpy", f"{kernels}:{op}", f"native.{op}", available=available, rank=_FASTER)
