"""Run every op of the Triton kernels once under a recipe, on small tensors, for `gpu_sanitizer.sh`; or print the recipes."""

from __future__ import annotations

import sys

RECIPES = (
    "fp8_block",
    "fp8_block,block_m=32,block_k=32",
    "fp8_row",
    "fp8_current",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "int4,group_size=32",
    "int4,symmetric=false,signed=false,group_size=32",
    "int8",
    "nf4",
    "fp8_delayed",
)


def main(spec: str) -> None:
    import torch

    import breccia

    for shape in ((33, 200), (64, 512)):  # partial blocks, whole blocks
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        if spec == "fp8_delayed":
            history = breccia.AmaxHistory(spec)  # type: ignore[arg-type]
            for _ in range(3):
                _, history = history.cast(x)
                history = history.update(x)
            continue
        for axis in (-1, -2):
            st = breccia.cast(x, spec, axis=axis)
            breccia.dequantize(st, out_dtype="bf16")
            breccia.requantize(st, "mxfp8,fp8_format=E5M2,scale_rule=floor")
            breccia.cast_ste(x, spec, axis=axis)
        breccia.cast_pair(x, spec)
        breccia.cast(x, spec, rounding="stochastic", seed=1)
        if spec == "mxfp8":
            for storage in ("swizzle_128x4", "column_major"):
                breccia.dequantize(breccia.cast(x, spec, storage=storage))
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    print(*RECIPES, sep="\n") if len(sys.argv) == 1 else main(sys.argv[1])
