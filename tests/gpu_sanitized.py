"""Every op of the Triton kernels once, on small tensors with partial blocks: what `gpu_sanitizer.sh` runs."""

from __future__ import annotations

import torch

import breccia

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
)

for shape in ((33, 200), (64, 512)):  # the second in whole blocks
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for spec in RECIPES:
        for axis in (-1, -2):
            st = breccia.cast(x, spec, axis=axis)
            breccia.dequantize(st, out_dtype="bf16")
            breccia.requantize(st, "mxfp8,fp8_format=E5M2,scale_rule=floor")
            breccia.cast_ste(x, spec, axis=axis)
        breccia.cast_pair(x, spec)
        breccia.cast(x, spec, rounding="stochastic", seed=1)
    for storage in ("swizzle_128x4", "column_major"):
        breccia.dequantize(breccia.cast(x, "mxfp8", storage=storage))
    history = breccia.AmaxHistory("fp8_delayed")  # type: ignore[arg-type]
    for _ in range(3):
        st, history = history.cast(x)
        history = history.update(x)
torch.cuda.synchronize()
print("every kernel ran")
