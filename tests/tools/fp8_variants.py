"""The FP8 kernels that `cuda.fp8_matmul` and its groups may be compiled to, for tests of the source and its machine code."""

from __future__ import annotations

import itertools
from dataclasses import fields

from breccia_triton.gemm.fp8 import plans as fp8_plans
from breccia_triton.gemm.fp8.plans import BLOCKS, GROUPED, OUTER, TABLE, TILES, GemmVariant

#: Tiles of products, the tile that only grouped products use, and the tile for short K.
ALL_TILES = [*TABLE, *GROUPED[1:2], fp8_plans.short(TABLE[0], 8)]


def fp8_variants() -> list[GemmVariant]:
    """Every tile with every kind of scales, and each other choice once."""
    tiles, first = ALL_TILES, TABLE[0]
    found = [GemmVariant(t, s) for t in tiles for s in (OUTER, TILES, BLOCKS)]
    found += [GemmVariant(first, s, a_plain=False, w_plain=False) for s in range(3)]
    found += [GemmVariant(first, codecs=pair) for pair in itertools.product(("e4m3", "e5m2"), repeat=2)]
    outs, biases = ("float32", "float16"), ("none", "float32", "float16", "bfloat16")
    found += [
        GemmVariant(first, out=out, bias=bias, staged=False, pairs=pairs)
        for out, bias, pairs in itertools.product(outs, biases, (True, False))
    ]
    found += [GemmVariant(t, promote=False) for t in tiles]
    found += [GemmVariant(t, BLOCKS, pieces=4) for t in tiles]
    found += [GemmVariant(t, s, copiers=True) for t in tiles for s in (TILES, BLOCKS)]
    found += [GemmVariant(t, BLOCKS, pieces=4, e8m0=(True, True)) for t in tiles]
    found += [GemmVariant(first, BLOCKS, pieces=4, e8m0=each) for each in ((True, False), (False, True))]
    found += [GemmVariant(t, s, grouped=True, copiers=True) for t in GROUPED for s in (TILES, BLOCKS)]
    found += [
        GemmVariant(t, s, staged=staged, grouped=True) for t, s, staged in itertools.product(GROUPED, range(3), (True, False))
    ]
    return found


def title(variant: GemmVariant) -> str:
    """The tile's name and all fields that differ from their defaults. Revisions with other fields give the same titles."""
    values = [(f, getattr(variant, f.name)) for f in fields(variant) if f.name != "tile"]
    return ", ".join([variant.tile.name, *(f"{f.name}={value}" for f, value in values if value != f.default)])
