"""Weights with coded scales: formats with records of scales, those of GGUF's super-blocks among them, and drawn tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from native_weights import integer
from weights import packed, recipe_of, written

import breccia
from breccia import GGUFScaling
from breccia.codecs import BF16, E4M3, E8M0, F16, F32, INT4, UINT4
from breccia.formats import Format, Level
from breccia.layouts import PerBlockK

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
#: Those that compiled kernels read as they are.
READ = {
    **{name: GGUFScaling(type=name).format for name in TYPES},
    "bf16 over 3 bits": Format(integer(7), (Level(BF16, (1, 64)), Level(integer(3), (1, 8)))),
    "f32 over 1 bit": Format(integer(1), (Level(F32, (1, 32)), Level(integer(1), (1, 32)))),
    "e4m3 elements": Format(E4M3, (Level(F16, (1, 128)), Level(integer(5, True), (1, 16)))),
    "f16 over 7 bits": Format(UINT4, (Level(F16, (1, 256)), Level(integer(7, True), (1, 128)))),
    "of bytes": Format(integer(8, True), (Level(F16, (1, 256)), Level(integer(8), (1, 16)))),
}
#: Those that products read, but of which a strip of `dequantize` does not have whole records.
LONG = {
    "beyond a strip": Format(INT4, (Level(F16, (1, 384)), Level(integer(4), (1, 48)))),
    "blocks of 4": Format(INT4, (Level(F16, (1, 64)), Level(integer(4), (1, 4)))),
    "of no vector": Format(integer(3, True), (Level(F32, (1, 36)), Level(integer(5), (1, 12)))),
}
#: And those that no compiled kernel reads.
OTHERS = {
    "two codes": Format(UINT4, (Level(F16, (1, 256)), Level(integer(6), (1, 64)), Level(integer(4), (1, 16)))),
    "under powers of two": Format(INT4, (Level(E8M0, (1, 128)), Level(integer(4), (1, 32)))),
}


def coded(fmt: Format, shape: tuple[int, ...], seed: int, wild: bool) -> breccia.ScaledTensor:
    """Random codes and records. wild: of any bits, NaN and subnormal numbers included."""
    rng, k = np.random.default_rng(seed), shape[-1]
    group = 8 // math.gcd(fmt.element.bits, 8)
    allowed = [code for code in range(1 << fmt.element.bits) if wild or np.isfinite(fmt.element.value(code))]
    codes = rng.choice(np.array(allowed, np.uint8), (math.prod(shape[:-1]), -(-k // group) * group))
    codes[:, k:] = 0
    outer = fmt.block[1]
    assert outer is not None
    parts: dict[str, Any] = {}
    for name in ("scale", "zero_point"):
        if (record := fmt.record(name)) is None:
            continue
        stored = rng.integers(0, 256, (*shape[:-1], -(-k // outer), record.nbytes), dtype=np.uint8)
        if not wild:
            base = rng.uniform(0.01, 0.03, stored.shape[:-1]) * (1 if name == "scale" else -1)
            stored[..., : record.sizes[0]] = written(record.levels[0].codec, base)[..., None].view(np.uint8)
        parts[name] = stored.reshape(*shape[:-1], -1)
    data = packed(codes, fmt.element.bits).reshape(*shape[:-1], -1)
    layout = PerBlockK(outer, bool(k % outer))
    return breccia.ScaledTensor.from_parts(
        data, parts["scale"], recipe_of(fmt), layout, parts.get("zero_point"), None, -1, -k % group
    )
