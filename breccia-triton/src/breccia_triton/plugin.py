"""Everything breccia-triton adds to breccia: kernels for frameworks "torch" and "jax" on "cuda". Imports no framework."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType

from breccia import DelayedScaling, Kernel, hookimpl

api = 1

#: Each op with the module in `casts` of its function for torch, what it accepts, whether it reads or writes storages of
#: scales, and whether it searches for scales.
_KERNELS = (
    ("cast", "cast", "cast", False, True, True),
    ("cast_pair", "cast", "pair", False, True, False),
    ("cast_ste", "cast", "cast", False, False, True),
    ("record_amax", "cast", "cast", False, False, False),
    ("cast_and_record", "cast", "cast", False, False, False),
    ("cast_pair_and_record", "cast", "cast", False, False, False),
    ("dequantize", "decode", "dequantize", True, False, False),
    ("requantize", "cast", "requantize", True, True, True),
)


#: Storages of scales that the kernels read and write.
STORAGES = ("swizzle_128x4", "column_major", "transposed", "padded_1x4", "padded_128x4")

#: Features of formats that they read. None of them writes these.
READ = ("coded_scales", "float_zero_point", "scales_first")

#: Products of FP8 tensors: op, module and function in `gemm`, name, what it accepts, which score, whether it runs only where it
#: is named, as it keeps less than the contract.
_PRODUCTS = (
    ("matmul", "fp8.matmul:matmul", "cuda.fp8_matmul", "fp8.plans:accepts_matmul", "fp8.plans:score", False),
    ("matmul", "fp8.matmul:matmul_fast", "cuda.fp8_matmul_fast", "fp8.plans:accepts_fast", "fp8.plans:score", True),
    ("grouped_matmul", "fp8.matmul:grouped_matmul", "cuda.fp8_grouped_matmul", "fp8.plans:accepts_grouped", None, False),
    (
        "matmul",
        "scaled_mm.scaled_mm:scaled_mm",
        "torch.scaled_mm",
        "scaled_mm.plans:accepts",
        "fp8.plans:score_of_torch",
        False,
    ),
    (
        "matmul",
        "scaled_mm.scaled_mm:scaled_mm_fast",
        "torch.scaled_mm_fast",
        "scaled_mm.plans:accepts_fast",
        "fp8.plans:score_of_torch",
        True,
    ),
)

#: Products that decode in registers, in Triton: framework, target, name, what accepts, features of formats that it reads.
_FUSED: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("torch", "gemm.fused.matmul:fused_matmul", "triton.weight_only", "accepts_weight_only", READ),
    ("torch", "gemm.fused.matmul:fused_matmul", "triton.fp8_matmul", "accepts_fp8", ()),
    ("jax", "jax.matmul:fused_matmul", "triton.jax.matmul", "accepts_product", READ),
)


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    home = "breccia_triton.gemm"
    for op, target, name, accepts, score, opt_in in _PRODUCTS:
        ours = name.startswith("cuda.")
        yield Kernel(
            op,
            "torch",
            f"{home}.{target}",
            name,
            device="cuda",
            available=f"{home}.{'fp8' if ours else 'scaled_mm'}.plans:available",
            accepts=f"{home}.{accepts}",
            score=score and f"{home}.{score}",
            reads=("column_major",) if ours else (),
            opt_in=opt_in,
        )
    for op, accepts, score in (
        ("matmul", "accepts_in_jax", f"{home}.fp8.plans:score"),
        ("grouped_matmul", "accepts_grouped_in_jax", None),
    ):
        yield Kernel(
            op,
            "jax",
            f"breccia_triton.jax.foreign:{op}",
            f"cuda.jax.fp8_{op}",
            device="cuda",
            available=f"{home}.fp8.plans:available_to_jax",
            accepts=f"{home}.fp8.plans:{accepts}",
            score=score,
        )
    yield Kernel(
        "matmul",
        "jax",
        "breccia_triton.jax.foreign:matmul_bf16",
        "triton.jax.matmul_bf16",
        device="cuda",
        available=f"{home}.bf16.plans:available_to_jax",
        accepts=f"{home}.bf16.plans:accepts_in_jax",
        score=f"{home}.bf16.plans:score_in_jax",
        reads=STORAGES,
        knows=READ,
    )
    # What its sums keep is not measured: no device that runs it was at hand.
    yield Kernel(
        "matmul",
        "torch",
        f"{home}.scaled_mm.block_scaled_mm:block_scaled_mm",
        "torch.block_scaled_mm",
        device="cuda",
        available=f"{home}.scaled_mm.plans:block_scaled_available",
        accepts=f"{home}.scaled_mm.plans:accepts_block_scaled",
        reads=("swizzle_128x4",),
        opt_in=True,
        knows=("scales_first",),  # either order of two scales rounds once for each operand, and a sum bounds both
    )
    yield Kernel(
        "matmul",
        "torch",
        "breccia_triton.gemm.bf16.matmul:matmul_bf16",
        "triton.matmul_bf16",
        device="cuda",
        available="breccia_triton.gemm.bf16.plans:available",
        accepts="breccia_triton.gemm.bf16.plans:accepts",
        score="breccia_triton.gemm.bf16.plans:score",
        reads=(*STORAGES, "mma_16x128"),
        knows=READ,
    )
    yield Kernel(
        "grouped_matmul",
        "torch",
        "breccia_triton.gemm.bf16.grouped:grouped_matmul_bf16",
        "triton.grouped_matmul_bf16",
        device="cuda",
        available="breccia_triton.gemm.bf16.plans:available",
        accepts="breccia_triton.gemm.bf16.plans:accepts_grouped",
        reads=STORAGES,
        knows=READ,
    )
    yield Kernel(
        "matmul",
        "torch",
        "breccia_triton.gemm.bf16.matmul:matmul_rounded",
        "triton.matmul_bf16_rounded",
        device="cuda",
        available="breccia_triton.gemm.bf16.plans:available",
        accepts="breccia_triton.gemm.bf16.plans:accepts_rounded",
        reads=(*STORAGES, "mma_16x128"),
        opt_in=True,
        knows=READ,
    )
    for framework, target, name, accepts, knows in _FUSED:
        yield Kernel(
            "matmul",
            framework,
            f"breccia_triton.{target}",
            name,
            device="cuda",
            available=f"breccia_triton.availability:{'available' if framework == 'torch' else 'available_to_jax'}",
            accepts=f"breccia_triton.gemm.fused.plans:{accepts}",
            score=f"breccia_triton.gemm.fused.plans:{'score' if framework == 'torch' else 'score_in_jax'}",
            reads=STORAGES,
            knows=knows,
        )
    for op in ("cast", "dequantize"):
        yield Kernel(
            op,
            "torch",
            f"breccia_triton.casts.rotating:{op}",
            f"triton.rotated.{op}",
            device="cuda",
            available="breccia_triton.availability:available",
            accepts="breccia.kernels.plans:accepts_rotated",
            plan="breccia.kernels.plans:plan_of_rotated",
            kind="composite",
        )
    for framework in ("torch", "jax"):
        for op, module, accepts, reads, writes, searches in _KERNELS:
            torch = framework == "torch"
            yield Kernel(
                op,
                framework,
                f"breccia_triton.{f'casts.{module}' if torch else 'jax.calls'}:{op}",
                f"triton.{op}" if torch else f"triton.jax.{op}",
                recipe=DelayedScaling if "record" in op else None,
                device="cuda",
                available=f"breccia_triton.availability:{'available' if torch else 'available_to_jax'}",
                accepts=f"breccia_triton.casts.plans:accepts_{accepts}",
                reads=STORAGES if reads else (),
                writes=STORAGES if writes else (),
                knows=(READ if reads else ()) + (("scale_search",) if searches else ()),
                prepare="breccia_triton.casts.steps:histories" if torch and op == "record_amax" else None,
            )
    for op, framework, target, name in (
        ("matmul", "torch", "gemm.weight_only.matmul:weight_only_matmul", "cuda.weight_only"),
        ("grouped_matmul", "torch", "gemm.weight_only.matmul:weight_only_grouped", "cuda.weight_only_grouped"),
        ("matmul", "jax", "jax.foreign:weight_only_matmul", "cuda.jax.weight_only"),
        ("grouped_matmul", "jax", "jax.foreign:grouped_matmul", "cuda.jax.weight_only_grouped"),
    ):
        torch = framework == "torch"
        yield Kernel(
            op,
            framework,
            f"breccia_triton.{target}",
            name,
            recipe=NoneType,
            device="cuda",
            available=f"{home}.weight_only.plans:{'available' if torch else 'available_to_jax'}",
            accepts=f"{home}.weight_only.plans:{'accepts' if torch else 'accepts_in_jax'}",
            score=f"{home}.weight_only.plans:score" if op == "matmul" else None,
            reads=("mma_16x128",),
            prepare=f"{home}.weight_only.matmul:repeated" if torch and op == "matmul" else None,
        )
