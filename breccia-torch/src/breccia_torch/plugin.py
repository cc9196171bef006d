"""Everything breccia-torch adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Framework, Kernel, hookimpl

api = 1


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    ops, container = "breccia_torch.ops", "breccia_torch.container:register"
    return [Framework("torch", "torch", ("Tensor",), f"{ops}:TORCH", devices=f"{ops}:devices", container=container)]


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    cpu, gradients = "breccia_torch.cpu", "breccia_torch.gradients"
    numpy_does = "breccia.kernels.numpy:accepts_cast"
    yield Kernel("cast", "torch", f"{cpu}:cast", "torch.cpu.cast", device="cpu", accepts=numpy_does)
    for op in ("dequantize", "requantize"):
        yield Kernel(op, "torch", f"{cpu}:{op}", f"torch.cpu.{op}", device="cpu")
    for op in ("matmul", "cast_ste", "cast_ste_clipped"):
        yield Kernel(op, "torch", f"{gradients}:{op}", f"torch.{op}")
