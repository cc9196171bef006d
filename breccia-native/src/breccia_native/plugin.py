"""Everything breccia-native adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    # torch's CPU tensors come here too: breccia_torch.cpu asks what serves NumPy.
    yield Kernel(
        "cast",
        "numpy",
        "breccia_native.kernels:cast",
        "native.cast",
        available="breccia_native.availability:missing",
        accepts="breccia.kernels.numpy:accepts_cast",
    )
