"""Recipes, numbers and comparisons of the tests of Triton's casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from breccia import ScaledTensor
from breccia.backend import components

ON_GPU = torch.cuda.is_available()


DEVICE = "cuda" if ON_GPU else "cpu"


#: Every recipe, and each field that changes bytes.
SPECS = [
    "fp8_block", "fp8_block,fp8_format=E5M2,block_k=32", "fp8_block,block_m=32,block_k=32",
    "fp8_block,block_m=3,block_k=20", "fp8_block,power_of_two_scale=true", "fp8_block,scale_rule=te",
    "fp8_block,scale_rule=te,power_of_two_scale=true", "fp8_block,scale_rule=divide", "fp8_block,scale_rule=recip",
    "fp8_current", "fp8_current,scale_rule=te", "fp8_delayed,margin=2", "fp8_delayed,margin=-3,scale_rule=te",
    "fp8_row", "fp8_row,fp8_format=E5M2,scale_rule=divide", "mxfp8", "mxfp8,fp8_format=E5M2,scale_rule=even",
    "mxfp8,scale_rule=floor", "mxfp6", "mxfp6,fp6_format=E3M2,scale_rule=even", "mxfp4", "mxfp4,scale_rule=floor",
    "mxint8", "mxint8,scale_rule=floor", "nvfp4", "nvfp4,two_level=false", "nvfp4,global_sense=amax",
    "nvfp4,scale_format=UE5M3",
    "nvfp4,global_sense=divisor", "int4,group_size=32", "int4,group_size=12,scale_dtype=bf16,scale_rule=half_range",
    "int4,signed=false,group_size=32", "int4,symmetric=false,signed=false,group_size=32",
    "int4,symmetric=false,signed=false,group_size=32,offset=bias",
    "int4,symmetric=false,signed=false,group_size=32,offset=bias,scale_dtype=bf16", "int8",
    "int8,group_size=20,scale_dtype=fp16", "int8,symmetric=false,signed=false",
    "int8,symmetric=false,signed=false,offset=bias", "nf4", "nf4,block_size=16,scale_dtype=fp16",
]  # fmt: skip


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = torch.float32) -> Any:
    """Rows of very different magnitude, and every special number: both zeros, subnormals, NaN, Inf, the largest."""
    made = np.random.default_rng(seed)
    x = made.standard_normal(shape) * np.exp2(made.integers(-20, 20, (*shape[:-1], 1)))
    flat = x.reshape(-1)
    special = [0.0, -0.0, 1e-40, -1e-40, 2.0**-126, np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 2.0**-133]
    at = made.choice(flat.size // 2, len(special), replace=False)
    flat[at] = special
    if len(shape) > 1:
        x[..., -1, :] = 0
        x[..., -2, :] = np.exp2(-130.0) * made.standard_normal(shape[-1])
        x[..., -3, :] *= np.exp2(-100.0)
    return torch.tensor(x.astype(np.float32)).to(dtype).to(DEVICE)


def same(found: ScaledTensor, expected: ScaledTensor) -> None:
    """Compare all components bit by bit, dtypes and shapes included."""
    a, b = components(found), components(expected)
    assert list(a) == list(b) and found.layout == expected.layout and found.axis == expected.axis
    for part in a:
        assert (a[part].shape, a[part].dtype) == (b[part].shape, b[part].dtype), part
        x, y = (p.reshape(-1).contiguous().view(torch.uint8).cpu().numpy() for p in (a[part], b[part]))
        assert np.array_equal(x, y), f"{part}: {np.count_nonzero(x != y)} of {x.size} bytes differ"


def same_values(found: Any, expected: Any) -> None:
    """Compare arrays bit by bit, all NaNs as equal."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    word = torch.int32 if found.dtype == torch.float32 else torch.int16
    different = (found.contiguous().view(word) != expected.contiguous().view(word)) & ~(found.isnan() & expected.isnan())
    assert not different.any(), f"{int(different.sum())} of {different.numel()} values differ"
