"""Everything breccia-native adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1

#: Above core's kernels (-500), and below other plug-ins' kernels without a rank.
_FASTER = -400


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    # These also run for arrays of torch and MLX on the CPU: breccia_torch.cpu and breccia_mlx.cpu call the NumPy kernels.
    kernels, available = "breccia_native.kernels", "breccia_native.availability:missing"
    for op, accepted in (("cast", "numpy.plan:accepts_compiled_cast"), ("dequantize", "plans:accepts_dequantize")):
        accepts = f"breccia.kernels.{accepted}"
        yield Kernel(op, "numpy", f"{kernels}:{op}", f"native.{op}", available=available, accepts=accepts, rank=_FASTER)
    available, accepts = "breccia_native.availability:missing_products", "breccia_native.facts:accepts"
    yield Kernel(
        "matmul", "numpy", "breccia_native.matmul:matmul", "native.matmul", available=available, accepts=accepts, rank=_FASTER
    )
    for framework in ("torch", "mlx"):
        yield Kernel(
            "matmul",
            framework,
            f"breccia_{framework}.cpu:matmul",
            f"{framework}.cpu.matmul",
            device="cpu",
            available=available,
            accepts=accepts,
            plan="breccia.kernels.plans:plan_on_numpy",
            rank=_FASTER,
        )
