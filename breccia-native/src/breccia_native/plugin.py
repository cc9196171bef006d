"""Everything breccia-native adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl

api = 1

#: Above core's kernels (-500), and below other plug-ins' kernels without a rank.
_FASTER = -400


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    # These also run for torch's CPU tensors: breccia_torch.cpu calls the NumPy kernels.
    kernels, available = "breccia_native.kernels", "breccia_native.availability:missing"
    for op, module in (("cast", "numpy.plan"), ("dequantize", "plans")):
        accepts = f"breccia.kernels.{module}:accepts_{op}"
        yield Kernel(op, "numpy", f"{kernels}:{op}", f"native.{op}", available=available, accepts=accepts, rank=_FASTER)
    available, accepts = "breccia_native.availability:missing_products", "breccia_native.facts:accepts"
    for op, grouped in (("matmul", ""), ("grouped_matmul", "_grouped")):
        yield Kernel(
            op,
            "numpy",
            f"breccia_native.matmul:{op}",
            f"native.{op}",
            available=available,
            accepts=accepts + grouped,
            rank=_FASTER,
        )
        yield Kernel(
            op,
            "torch",
            f"breccia_torch.cpu:{op}",
            f"torch.cpu.{op}",
            device="cpu",
            available=available,
            accepts=accepts + grouped,
            plan="breccia_torch.plans:plan",
            rank=_FASTER,
        )
    # These round activations, so they run only where they are named.
    for mode in ("int8", "bf16"):
        for framework, module, prefix in (
            ("numpy", "breccia_native.matmul", "native"),
            ("torch", "breccia_torch.cpu", "torch.cpu"),
        ):
            yield Kernel(
                "matmul",
                framework,
                f"{module}:matmul_{mode}",
                f"{prefix}.matmul_{mode}",
                device="cpu" if framework == "torch" else None,
                available=available,
                accepts=f"{accepts}_{mode}",
                rank=_FASTER,
                opt_in=True,
            )
