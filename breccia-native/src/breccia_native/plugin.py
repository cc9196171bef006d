"""Everything breccia-native adds to breccia. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable

from breccia import Kernel, hookimpl
from breccia.backend import Tier

api = 1

#: What kernels that decode know of formats besides one scale for a block.
KNOWS = ("coded_scales",)
#: What kernels that cast know of recipes besides scales that follow from amax.
SEARCHES = ("scale_search",)


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    # These also run for arrays of torch and MLX on the CPU: breccia_torch.cpu and breccia_mlx.cpu call the NumPy kernels.
    kernels, available = "breccia_native.kernels", "breccia_native.availability:missing"
    for op, accepted in (("cast", "numpy.plan:accepts_native_cast"), ("dequantize", "plans:accepts_dequantize")):
        accepts = f"breccia.kernels.{accepted}"
        yield Kernel(
            op,
            "numpy",
            f"{kernels}:{op}",
            f"native.{op}",
            available=available,
            accepts=accepts,
            knows=KNOWS if op == "dequantize" else SEARCHES,
            errors=f"{kernels}:errors" if op == "dequantize" else None,
            rank=Tier.NATIVE,
        )
    yield Kernel(
        "requantize",
        "numpy",
        f"{kernels}:requantize",
        "native.requantize",
        available=available,
        accepts="breccia.kernels.numpy.requantizing:accepts_requantize",
        knows=KNOWS,
        rank=Tier.NATIVE,
    )
    on_cpu = (("torch", "breccia_torch.cpu"), ("mlx", "breccia_mlx.cpu"))
    for framework, module in on_cpu:  # without microkernels, the NumPy kernels do not round stochastically
        yield Kernel(
            "cast",
            framework,
            f"{module}:cast",
            f"{framework}.cpu.cast_stochastic",
            device="cpu",
            available=available,
            accepts="breccia_native.facts:accepts_stochastic_cast",
            plan="breccia.kernels.plans:plan_on_numpy",
            knows=SEARCHES,
            rank=Tier.NATIVE,
        )
    available, accepts = "breccia_native.availability:missing_products", "breccia_native.facts:accepts"
    for op, grouped in (("matmul", ""), ("grouped_matmul", "_grouped")):
        yield Kernel(
            op,
            "numpy",
            f"breccia_native.matmul:{op}",
            f"native.{op}",
            available=available,
            accepts=accepts + grouped,
            knows=KNOWS,
            prepare=None if grouped else "breccia_native.matmul:prepared",
            rank=Tier.NATIVE,
        )
    for framework, module in on_cpu:  # torch's kernel for groups needs no microkernels
        yield Kernel(
            "matmul",
            framework,
            f"{module}:matmul",
            f"{framework}.cpu.matmul",
            device="cpu",
            available=available,
            accepts=accepts,
            plan="breccia.kernels.plans:plan_on_numpy",
            knows=KNOWS,
            rank=Tier.NATIVE,
        )
    # JAX's arrays on the CPU, eager and inside compiled functions.
    for op, accepted in (("cast", "accepts_cast"), ("dequantize", "accepts_dequantize"), ("matmul", "accepts")):
        yield Kernel(
            op,
            "jax",
            f"breccia_jax.cpu:{op}",
            f"jax.cpu.{op}",
            device="cpu",
            available="breccia_native.availability:missing_for_jax",
            accepts=f"breccia_native.facts:{accepted}_on_jax",
            plan="breccia.kernels.plans:plan_on_numpy",
            knows=SEARCHES if op == "cast" else KNOWS,
            rank=Tier.NATIVE,
            eager=True,
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
                knows=KNOWS,
                rank=Tier.NATIVE,
                prepare="breccia_native.matmul:prepared_int8" if (mode, framework) == ("int8", "numpy") else None,
                opt_in=True,
            )
