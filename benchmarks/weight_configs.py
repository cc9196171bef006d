"""Configurations of `cuda.weight_only` that `bench_weight_only.py --tune` tries, compiled several at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from breccia_triton.gemm.weight_only import matmul as weight_only
from breccia_triton.gemm.weight_only import plans as weight_plans
from breccia_triton.gemm.weight_only.plans import Config, Decoded, DecodedCodes
from breccia_triton.launch import compiler


def candidates(operand: Any, m: int, k: int) -> list[Any]:
    found = list(dict.fromkeys(_tried(m)))
    return [config for config in [*found, *([Decoded(), DecodedCodes()] if m >= 128 else [])] if config.fits(operand, m, k)]


def label_of(config: Any) -> str:
    """The name of a configuration in results: its numbers, or "decoded" or "decoded codes" if it decodes to memory."""
    if not isinstance(config, Config):
        return "decoded" if isinstance(config, Decoded) else "decoded codes"
    numbers = (config.batch, config.high, config.deep, config.stages, config.split, config.per_sm)
    return " ".join(map(str, numbers)) + (" wide" if config.wide else "")


def call_of(config: Any, x: Any, w: Any) -> Any:
    """The prepared product of BF16 activations and a weight, with a BF16 result."""
    return weight_only.executable(x, w, None, "bfloat16", config)


def _tried(m: int) -> list[Any]:
    """Configurations for m rows, whether they fit or not."""
    if m <= 16:
        batch = 8 if m <= 8 else 16
        shapes = [(4, 16, 2), (4, 16, 1), (4, 12, 2), (4, 8, 2), (4, 8, 3), (4, 8, 4), (2, 16, 2), (2, 8, 3)]
        small = [Config(batch, *s) for s in shapes]
        small += [Config(batch, *s, split=2) for s in ((4, 16, 1), (4, 8, 2), (4, 8, 3), (2, 8, 3))]
        small += [Config(batch, *s, per_sm=2) for s in ((4, 8, 2), (4, 8, 3), (2, 8, 3), (4, 4, 4))]
        if m <= 8:
            return small
        wide = [(1, 2, 8), (1, 3, 9), (2, 1, 4)]
        return [*small, *(Config(16, *s, wide=True) for s in wide), Config(16, 2, 1, 4, split=2, wide=True)]
    batch = next((b for b in (32, 64) if m <= b), 128)
    if batch < 128:
        shapes = [(1, 2, 6), (1, 2, 8), (1, 3, 6), (2, 1, 4), (2, 1, 6)]
        split = [(2, 1, 4), (1, 2, 4), (1, 1, 6)]
        found = [Config(batch, *s, wide=True) for s in shapes] + [Config(batch, *s, split=2, wide=True) for s in split]
        return [*found, Config(batch, 1, 1, 4, split=2, per_sm=2, wide=True), Config(batch, 1, 1, 4, per_sm=2, wide=True)]
    found = [Config(128, 2, 1, stages, wide=True) for stages in (4, 3, 5)]
    if m <= 256:  # too few blocks for all processors
        found += [Config(128, 2, 1, 4, split=2, wide=True), Config(128, 1, 2, 4, wide=True)]
    if m > 128:
        return [*found, *(Config(256, 2, 1, stages, wide=True) for stages in (3, 2)), Config(256, 2, 1, 3, split=2, wide=True)]
    return [*found, *(Config(64, *s, wide=True) for s in ((2, 1, 4), (1, 2, 6)))]


def build(operand: Any, configs: list[Any]) -> None:
    nvrtc = compiler.nvrtc(int((torch.version.cuda or "13").partition(".")[0]))

    def one(config: Any) -> None:
        if isinstance(config, Config):
            macros = weight_plans.macros_of(operand, config, "bfloat16", "bfloat16", None)
            compiler.cubin(weight_only.source_of(config), "sm_90a", macros, nvrtc)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, configs))
