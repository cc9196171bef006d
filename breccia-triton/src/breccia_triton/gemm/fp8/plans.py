"""What the FP8 product of `fp8_matmul.cu` takes, which tile it uses, and how long it takes. Imports no framework.

Scales come in five kinds: "tensor", "row" (one for each row along K), "1x128", "128x128" and "1x32".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from breccia import Codec, Device, Layout, ScalingRecipe
from breccia.backend import E4M3, E5M2, E8M0, F32, PLAIN, TENSOR, Block, Call, Operand, Shape

from ... import availability
from ...launch import compiler
from ...tuning import roofline
from ...tuning.measurements import device_name, measured, nearest, times_over_bound

#: The kernel.
SOURCE = Path(__file__).parent / "fp8_matmul.cu"
#: Compute capability of the instructions: warpgroup products are Hopper's alone.
HOPPER = (9, 0)
#: Elements along K of a step, and the bytes to which TMA wants rows aligned.
STEP, ALIGNED = 128, 16
#: Elements along K of one instruction, and of the blocks of the MX formats.
PIECE = 32
#: FP8 codecs, with their names in PTX.
CODECS: dict[Codec, str] = {E4M3: "e4m3", E5M2: "e5m2"}
_BLOCKS: dict[Block, str] = {
    TENSOR: "tensor",
    (1, None): "row",
    (1, STEP): "1x128",
    (STEP, STEP): "128x128",
    (1, PIECE): "1x32",
}
#: Macro SCALES. ROWS belongs to BF16 operands, of which only the first has scales: `gemm.weight_only.plans.ScaleApplication`.
OUTER, TILES, BLOCKS, ROWS = range(4)
#: Pairs of scales of a and b.
SCALES = {
    **{(a, b): OUTER for a in ("tensor", "row") for b in ("tensor", "row")},
    ("1x128", "128x128"): TILES,
    ("1x128", "1x128"): BLOCKS,
    ("1x32", "1x32"): BLOCKS,
}
#: Macros OUT and BIAS.
KINDS = {"none": 0, "float32": 1, "float16": 2, "bfloat16": 3}
#: Bytes of shared memory that a block can have.
SHARED = 232448


# ------------------------------------------------------------------------------------------------ what the kernel takes


def available(device: Device) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if device.capability and tuple(device.capability) != HOPPER:
        return f"it has instructions of compute capability 9.0; {device} has {'.'.join(map(str, device.capability))}"
    return compiler.missing()


def available_to_jax(device: Device) -> str | None:
    """Why XLA cannot call the kernel, or None."""
    return availability.missing_for_xla() or available(device)


def accepts_matmul(call: Call) -> str | None:
    """Why the kernel does not multiply these operands, or None."""
    assert call.b is not None
    pair = kinds(call.a, call.b)
    return pair if isinstance(pair, str) else _refused_shapes(call)


def accepts_in_jax(call: Call) -> str | None:
    """Why XLA calls the kernel neither for these operands nor, transposed, for b.mT by a.mT, or None."""
    assert call.b is not None
    if (why := availability.refused_by_xla(call)) is not None:
        return why
    pair = scales_of(call.a, call.b)
    return _refused_shapes(call) if turns(pair) and call.bias is None else accepts_matmul(call)


def accepts_grouped_in_jax(call: Call) -> str | None:
    """Why XLA does not call the kernel for groups of rows of these operands, or None."""
    return availability.refused_by_xla(call) or accepts_grouped(call)


def _refused_shapes(call: Call) -> str | None:
    assert call.b is not None
    if call.a.empty or call.b.empty:
        return "the generic algorithm runs for empty operands"
    a, b = call.a.shape, call.b.shape
    if not a or not b:  # `explain` of recipes alone
        return None
    if why := _refused_length(a[-1]):
        return why
    if not batches(a[:-2], b[:-2]):
        return f"leading axes {a[:-2]} and {b[:-2]} broadcast in both directions"
    return None


def accepts_fast(call: Call) -> str | None:
    """Why the kernel without promotion does not multiply these operands, or None."""
    why = accepts_matmul(call)
    if why is None and call.b is not None and SCALES[_pair(call)] != OUTER:
        return "scales change within K, so partial sums leave the tensor core after every block"
    return why


def accepts_grouped(call: Call) -> str | None:
    """Why the kernel does not multiply these groups, or None."""
    assert call.b is not None
    pair = kinds(call.a, call.b)
    if isinstance(pair, str):
        return pair
    if call.a.empty or call.b.empty:
        return "the generic algorithm runs for empty operands"
    return _refused_length(call.a.shape[-1]) if call.a.shape else None


def _refused_length(k: int) -> str | None:
    if k % ALIGNED:
        return f"K = {k} is not a multiple of {ALIGNED}, so rows do not begin where TMA reads"
    return None


def _pair(call: Call) -> tuple[str, str]:
    assert call.b is not None
    pair = kinds(call.a, call.b)
    assert not isinstance(pair, str)
    return pair


def turns(pair: tuple[str, str] | str) -> bool:
    """Whether the kernel knows kinds of scales in the other order alone."""
    return pair not in SCALES and pair[::-1] in SCALES


def kinds(a: Operand, b: Operand) -> tuple[str, str] | str:
    """(Kind of scales of a, of b); or why there is no kernel for them."""
    pair = scales_of(a, b)
    return pair if isinstance(pair, str) or pair in SCALES else f"it has no form for scales {pair[0]} times {pair[1]}"


def scales_of(a: Operand, b: Operand) -> tuple[str, str] | str:
    """(Kind of scales of a, of b), whether or not the kernel multiplies them; or why an operand has no such kind."""
    scale_kinds: list[str] = []
    for name, operand, axis in (("a", a, -1), ("b", b, -2)):
        recipe, layout = operand.recipe, operand.layout
        known = bool(operand.shape)  # else `explain` of a recipe alone
        if recipe is None or (layout is None and known):
            return f"it multiplies two FP8 tensors, and {name} is an array"
        kind, why = _kind(recipe, recipe.layout.oriented(operand.axis) if layout is None else layout, operand.axis)
        if why:
            return why.format(name)
        if kind != "tensor" and known and operand.axis != axis:
            return f"blocks of {name} do not run along K"
        scale_kinds.append(kind)
    return scale_kinds[0], scale_kinds[1]


def _kind(recipe: ScalingRecipe, layout: Layout, axis: int) -> tuple[str, str]:
    """(Kind of scales, why there is no kernel for them): one of them is empty. The reason has {} for the operand's name."""
    fmt, block = recipe.format, layout.plain.block(axis)
    if fmt.element not in CODECS or fmt.global_scale is not None or fmt.offset != "none":
        return "", f"it multiplies two FP8 tensors, and {{}} is {recipe.name} of {fmt.element.name}"
    kind = _BLOCKS.get(block, "") if layout.plain.in_order else ""
    if fmt.scale.codec not in ((F32, E8M0) if kind == "1x32" else (F32,)) or fmt.scale.convention != "multiplier":
        return "", f"it reads FP32 scales that multiply; those of {{}} are {fmt.scale.codec.name} ({fmt.scale.convention})"
    if not kind:
        return "", f"it has no form for {layout.plain} of {{}}"
    if layout.storage != PLAIN and not (kind == "1x128" and layout.storage == "column_major"):
        return "", f"it does not read {layout.storage} scales of {{}}"
    return kind, ""


def codec_of(operand: Operand) -> str:
    """The codec's name in PTX, of an operand that `kinds` knows."""
    assert operand.recipe is not None
    return CODECS[operand.recipe.format.element]


def kind_of(recipe: ScalingRecipe, layout: Layout, axis: int) -> tuple[str, str]:
    """(Kind of scales, the codec's name in PTX) of an operand that `accepts_matmul` took."""
    key = recipe.interned_key, layout.interned_key, axis
    kind_and_codec = _known.get(key)
    if kind_and_codec is None:
        kind_and_codec = _known[key] = _kind(recipe, layout, axis)[0], CODECS[recipe.format.element]
    return kind_and_codec


_known: dict[Any, tuple[str, str]] = {}


def batches(a: Shape, b: Shape) -> bool:
    """Whether leading axes, which broadcast, are the same, or those of one operand are all 1. Lengths may be rounded up."""
    same = all((m == 1) == (n == 1) for m, n in zip_longest(reversed(a), reversed(b), fillvalue=1))
    return same or math.prod(a) == 1 or math.prod(b) == 1


# ------------------------------------------------------------------------------------------------ tiles


@dataclass(frozen=True)
class GemmTile:
    """A way to cut the output, as macros of the source.

    columns: of a tile. groups: consumers, each of `halves` times 64 rows. stages: of the ring, at most. share: blocks of a
    cluster that share operands, along (M, N). split: along K. efficiency: of the tensor cores, measured on an H200.
    """

    name: str
    columns: int
    groups: int = 2
    halves: int = 1
    stages: int = 4
    share: tuple[int, int] = (1, 1)
    split: int = 1
    turns: bool = False
    parts: int = 1
    buffers: int = 1
    dependent: bool = False
    efficiency: float = 0.8

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups * self.halves

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups + 128

    @property
    def part(self) -> int:
        """Rows of a that a block copies at once."""
        return self.rows // self.share[1]

    def boxes(self, m: int) -> tuple[int, ...]:
        """Rows of copies of a, of m rows: `part`; where a ends within a part, also the next multiple of 8 of what is left."""
        left = m % self.part
        return (self.part, -(-left // 8) * 8) if left else (self.part,)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.share[0] * self.share[1] * self.split


#: Tiles, those of large products first. `efficiency` orders them; it is no measurement of the finished kernel.
TABLE = (
    GemmTile("256x128", 128, halves=2, share=(1, 2), turns=True, parts=2, efficiency=0.85),
    GemmTile("192x128", 128, groups=3, share=(1, 2), efficiency=0.84),
    GemmTile("128x192", 192, share=(2, 1), turns=True, efficiency=0.84),
    GemmTile("128x176", 176, share=(2, 1), efficiency=0.82),
    GemmTile("128x128", 128, stages=6, efficiency=0.70),
    GemmTile("128x64", 64, stages=7, dependent=True, efficiency=0.5),
    GemmTile("128x112 split", 112, stages=6, split=2, dependent=True, efficiency=0.68),
    GemmTile("64x64", 64, groups=1, stages=10, dependent=True, efficiency=0.3),
    GemmTile("64x112 split", 112, groups=1, stages=8, split=2, dependent=True, efficiency=0.4),
)
#: Of groups: rows of a tile that fit the average group, whose own number only the device knows.
GROUPED = (TABLE[0], GemmTile("128x128 shared", 128, share=(1, 2), stages=4, turns=True, efficiency=0.7), TABLE[7])
#: Cycles of a tile besides its steps: prologue and epilogue, and the reduction of split-K.
_FIXED, _REDUCTION = 1500.0, 3500.0
#: FP8 multiply-adds of an SM in a cycle.
_RATE = 4096
#: The least rows of a tile.
_ROWS = 64
#: Up to this many steps three stages and two output buffers are faster: the epilogue is what is left to hide.
_SHORT = 16


def tile_of(m: int, n: int, k: int, matrices: int, processors: int) -> GemmTile:
    """The tile for a product: fewest cycles in whole waves of clusters."""
    return _tile_of(rounded_rows(m), n, k, matrices, processors)


def rounded_rows(m: int) -> int:
    """Rows up to which a product has the same tile and grid: all tiles have a multiple of so many."""
    return -(-m // _ROWS) * _ROWS


@lru_cache(maxsize=4096)
def _tile_of(m: int, n: int, k: int, matrices: int, processors: int) -> GemmTile:
    steps = -(-k // STEP)
    best = min((tile for tile in TABLE if tile.split <= steps), key=lambda t: cycles(t, m, n, steps, matrices, processors))
    return short(best, steps)


def cycles(tile: GemmTile, m: int, n: int, steps: int, matrices: int, processors: int) -> float:
    """The estimated cycles of a product by a tile. steps: of 128 bytes along K."""
    down, along = -(-m // (tile.rows * tile.share[0])), -(-n // (tile.columns * tile.share[1]))
    waves = -(-matrices * down * along // max(1, processors // tile.cluster))
    each = tile.rows * tile.columns * STEP / _RATE / tile.efficiency
    reduction = _REDUCTION if tile.split > 1 else 0.0
    return waves * (-(-steps // tile.split) * each + _FIXED + reduction)


def grouped_tile_of(m: int, groups: int, k: int) -> GemmTile:
    """The tile for groups that have m rows together."""
    average = m / max(1, groups)
    best = GROUPED[0] if average > 160 else GROUPED[1] if average > 64 else GROUPED[2]
    return short(best, -(-k // STEP))


def copiers(tile: GemmTile, pair: tuple[str, str], grouped: bool) -> bool:
    """Whether warps copy plain 1 x 128 scales, one number for each row and step, and not TMA.

    Its boxes have 16 bytes a row, which take as long as the codes of the row. Measured on an H200: with warps a product is up
    to 1.9 times faster where the tile has few rows or columns, and slower elsewhere. Not measured for groups and blocks of 32.
    """
    return "1x128" in pair and not grouped and (tile.groups == 1 or tile.columns == 64)


def short(tile: GemmTile, steps: int) -> GemmTile:
    """The tile with fewer stages and a second output buffer, where K is short."""
    if tile.name != "256x128" or steps > _SHORT:
        return tile
    return GemmTile(
        "256x128 short", 128, halves=2, stages=3, share=(1, 2), turns=True, parts=2, buffers=2, efficiency=tile.efficiency
    )


@dataclass(frozen=True)
class GemmVariant:
    """Everything that `fp8_matmul.cu` is compiled for. e8m0: whether scales of a and of b are E8M0 codes."""

    tile: GemmTile
    scales: int = OUTER
    codecs: tuple[str, str] = ("e4m3", "e4m3")
    out: str = "bfloat16"
    bias: str = "none"
    a_plain: bool = True
    w_plain: bool = True
    staged: bool = True
    pairs: bool = True
    promote: bool = True
    grouped: bool = False
    pieces: int = 1
    copiers: bool = False
    span: int = 1
    e8m0: tuple[bool, bool] = (False, False)

    @property
    def warps_copy(self) -> tuple[bool, bool]:
        """Whether warps copy the scales of a and of b, and not TMA."""
        a = self.e8m0[0] or (self.copiers and self.a_plain and self.scales != OUTER)
        return a, self.e8m0[1] or (self.copiers and self.w_plain and self.scales == BLOCKS)

    @property
    def element(self) -> int:
        """Bytes of an element of both operands."""
        return 2 if self.codecs[0] == "bf16" else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of one stage of the ring, with its scales and barriers."""
        tile = self.tile
        a, w = (16 if self.pieces == 4 or (plain and not self.copiers) else 4 for plain in (self.a_plain, self.w_plain))
        a = 0 if self.scales == OUTER else tile.rows * (4 * self.pieces if self.scales == ROWS else a)
        w = 0 if self.scales != BLOCKS else -(-tile.columns * w // 128) * 128
        return (tile.rows + tile.columns) * STEP + a + w + 16

    @property
    def output_bytes(self) -> int:
        """Bytes of shared memory through which the output leaves."""
        tile = self.tile
        return tile.groups * tile.buffers * 64 * (tile.columns // tile.parts) * 2 if self.staged else 0

    @property
    def stages(self) -> int:
        """Stages of the ring that fit, for whole steps."""
        stages = min(self.tile.stages, (SHARED - self.output_bytes) // self.stage_bytes)
        return stages // self.span * self.span

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * self.stage_bytes + self.output_bytes

    @property
    def macros(self) -> Mapping[str, int]:
        """Macros of the source."""
        t = self.tile
        return {
            "BN": t.columns, "NWG": t.groups, "H": t.halves, "STAGES": self.stages, "CM": t.share[0], "CN": t.share[1],
            "SK": t.split, "TURNS": int(t.turns), "RASTER": 8, "PARTS": t.parts, "BUFFERS": t.buffers,
            "DEPENDENT": int(t.dependent), "PROMOTE": int(self.promote), "SCALES": self.scales, "A_PLAIN": int(self.a_plain),
            "W_PLAIN": int(self.w_plain), "OUT": KINDS[self.out], "BIAS": KINDS[self.bias], "STAGED": int(self.staged),
            "PAIRS": int(self.pairs), "GROUPED": int(self.grouped),
            "PIECES": self.pieces, "COPIERS": int(self.copiers), "ELEMENT": self.element, "SPAN": self.span,
            "A_E8M0": int(self.e8m0[0]), "W_E8M0": int(self.e8m0[1]),
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------ time

#: Times over `bound` without a measurement, by whose kernel it is: breccia's is taken to be faster where it runs.
_UNMEASURED = {"cuda": 1.2, "torch": 1.3}
#: Times over the bound for blocks of 32 along K, which four promotions in a step bound: of few rows, and of more.
_UNMEASURED_MX = 3.0, 5.0
#: Up to so many rows one number of these holds, above the other.
_FEW = 128
#: The host's seconds for a product of `fp8_matmul.cu`, and of torch, where cuBLAS looks for an algorithm in each call: medians
#: of products by one scale per tensor or row in benchmarks/results/matmul-gpu-nvidia-h200.json.
_HOST, _HOST_OF_TORCH = 33e-6, 50e-6


def slowdowns(device: str) -> Mapping[str, float]:
    """Measured times over `bound`, by the keys of `measurements.measured_key`; empty if not measured. head: that of `head_of`.

    From `configurations/matmul_<device>.json`, which `benchmarks/bench_matmul.py --table` writes.
    """
    return measured("matmul", device, times_over_bound)


def bound(m: int, n: int, k: int, matrices: int = 1) -> float:
    """The seconds that a product takes at least: for its operations, or for its bytes with a result of two bytes."""
    return roofline.seconds(2.0 * m * n * k, "float8", m * k + matrices * n * k + 2 * m * n)


def head_of(kernel: str, pair: tuple[str, str]) -> str:
    """What keys of a kernel's measured times begin with. kernel: "cuda" (this package's) or "torch"."""
    return " ".join((kernel, *pair))


def seconds(call: Call, kernel: str) -> float:
    """The estimated time of a product that the kernel takes. kernel: as of `head_of`."""
    assert call.b is not None
    a, b = call.a.shape, call.b.shape
    known = all(isinstance(length, int) for length in (*a, *b))  # else `jax.export` traces symbolic ones
    if len(a) < 2 or len(b) < 2 or not known:  # `explain` of recipes alone
        return _UNMEASURED[kernel] * roofline.LAUNCH
    (*lead, k), n, pair = a, b[-1], scales_of(call.a, call.b)
    m = math.prod(lead)
    assert not isinstance(pair, str)
    if turns(pair):
        m, n, pair = n, m, (pair[1], pair[0])
    over = nearest(slowdowns(device_name(call.device)), head_of(kernel, pair), m, n, k)
    if over is None:
        over = _UNMEASURED_MX[m > _FEW] if pair == ("1x32", "1x32") else _UNMEASURED[kernel]
    return over * bound(m, n, k, math.prod(b[:-2]))


def score(call: Call) -> float:
    """The estimated time on the kernel of `fp8_matmul.cu`."""
    return seconds(call, "cuda")


def score_of_torch(call: Call) -> float:
    """The estimated time on torch's kernels. They take the host longer than this package's, which counts where those run.

    A caller may wait for the host alone; one that waits for the device loses no more than that difference.
    """
    if available(call.device) is not None:
        return seconds(call, "torch")
    return max(seconds(call, "torch"), _HOST_OF_TORCH) + _HOST_OF_TORCH - _HOST
