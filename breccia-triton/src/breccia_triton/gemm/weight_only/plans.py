"""Weight-only matmul: which calls the kernels take, what is compiled for one, how long it takes. Imports no framework.

`weight_only.cuh` has the idea, docs/kernels/weights.md the proofs that the kernels keep the contract of products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from breccia import Codec, Device, Format, Integer, Minifloat
from breccia.backend import BF16, E2M1, E4M3, E5M2, E8M0, F16, F32, TENSOR, Block, Call
from breccia.internal import fragments

from ... import availability
from ...launch import compiler
from ...tuning import roofline
from ...tuning.choices import block_text, codecs_of
from ...tuning.measurements import device_name, measured, times_over_bound
from ..fp8 import plans as fp8_plans

#: The folder of the kernels.
SOURCES = Path(__file__).parent
#: The storage of weights that the kernels read.
STORAGE = "mma_16x128"
#: Its chunks.
ROWS, COLUMNS = fragments.ROWS, fragments.COLUMNS
#: Numbers of x and of results, as macros.
DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
#: The macro for no bias.
NO_BIAS = 3
#: Shared memory of a block, and of a multiprocessor; the reserved kilobyte of each block is taken off.
SHARED, SHARED_OF_SM = fp8_plans.SHARED, 233472
#: Blocks that run at a time on the devices that were measured.
PROCESSORS = 132
#: The largest M of the kernel that is bound by the bytes of the weight.
SMALL = 16
#: From this M on the rule decodes to memory. Measured on an H200, over decoding in registers: 0.95 to 1.20 times as fast at
#: 2048 rows, 0.99 to 1.33 at 4096 (benchmarks/bench_weight_only.py --tune).
MANY = 2048
#: The largest M of measured configurations; they stand for more rows too.
MOST = 4096
#: Rows shorter than this have too few terms for the bound of products: it grows with K, the rounding of scales does not.
SHORTEST = 128


# -- what the kernels take -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightFormat:
    """A weight as the kernels know it: macros FMT, FRACTION, SCALE, GROUP and ZERO. factor: a constant that multiplies results.

    fraction: fraction bits of integer codes. divides: the tensor's scale is a divisor. global_scale: there is one.
    """

    codes: int
    scale: int
    group: int
    zero: bool
    fraction: int = 0
    factor: float = 1.0
    global_scale: bool = False
    divides: bool = False

    @property
    def slice_bytes(self) -> int:
        """Bytes of 16 rows by 128 columns."""
        groups, size = COLUMNS // self.group, (2, 4, 2, 1, 1)[self.scale]
        return (1024 if self.codes < 3 else 2048) + 16 * groups * (size + self.zero)

    @property
    def at_decode(self) -> bool:
        """Whether scales are multiplied into E2M1 codes, for activations of either dtype."""
        return self.codes == 2 and self.scale >= 3

    @property
    def decodes_scales(self) -> bool:
        """Whether decoding to BF16 multiplies codes by scales, exactly: minifloat codes and E8M0 or E4M3 scales."""
        return self.at_decode or (self.codes in (3, 4) and self.scale == 3)

    @property
    def exact(self) -> bool:
        """Whether BF16 holds the decoded values: those products, with no other factor."""
        return self.decodes_scales and not self.global_scale and self.factor == 1.0

    @property
    def macros(self) -> dict[str, int]:
        numbers = {"FMT": self.codes, "FRACTION": self.fraction, "SCALE": self.scale}
        return {**numbers, "GROUP": self.group, "ZERO": int(self.zero)}


#: Macro SCALE by the codec of scales. E4M3 scales belong to E2M1 codes.
_SCALES = {F16.name: 0, F32.name: 1, BF16.name: 2, E8M0.name: 3, E4M3.name: 4}


@lru_cache(maxsize=256)
def weight_format_of(fmt: Format, block: Block) -> WeightFormat | str:
    """A format, with its blocks along K, as the kernels know it; or why they do not take it."""
    level, global_scale = fmt.scale, fmt.global_scale
    codes = _codes_of(fmt.element)
    if codes is None:
        return f"it has no decoding for codes of {fmt.element.name}"
    if level.codec.name not in _SCALES or level.codec not in (F16, F32, BF16, E8M0, E4M3):
        return f"it has no decoding for scales of {level.codec.name}"
    if level.codec == E4M3 and fmt.element != E2M1:
        return f"E4M3 scales of {fmt.element.name} codes have no decoding"
    if level.convention != "multiplier":
        return f"its scales are stored as {level.convention}, and the kernel multiplies"
    if fmt.offset == "bias":
        return "a bias of each block would be rounded when it is added to codes: FP32 decoding is needed"
    if fmt.offset == "zero_point" and codes != 1:
        return f"zero-points of {fmt.element.name} codes have no decoding"
    width = COLUMNS if block == TENSOR or block[1] is None else min(block[1], COLUMNS)
    if width not in fragments.GROUPS or ((block[1] or COLUMNS) > COLUMNS and (block[1] or COLUMNS) % COLUMNS):
        return f"blocks of {block[1]} columns; the kernel takes 16, 32, 64 and multiples of 128"
    factor, divides = 1.0, False
    fraction = fmt.element.fraction_bits if isinstance(fmt.element, Integer) else 0
    if global_scale is not None:
        if global_scale.codec != F32:
            return f"its global scale is {global_scale.codec.name}, and the kernel reads FP32"
        if global_scale.convention == "amax":
            factor /= fmt.qmax(global_scale)
        divides = global_scale.convention == "divisor"
    scale, zero = _SCALES[level.codec.name], fmt.offset == "zero_point"
    return WeightFormat(codes, scale, width, zero, fraction, factor, global_scale is not None, divides)


def _codes_of(codec: Codec) -> int | None:
    """Macro FMT."""
    if codec in (E2M1, E4M3, E5M2) and isinstance(codec, Minifloat):
        return {E2M1.name: 2, E4M3.name: 3, E5M2.name: 4}[codec.name]
    if not isinstance(codec, Integer) or (codec.fraction_bits and codec.bits == 4):
        return None
    return {(4, True): 0, (4, False): 1, (8, True): 5}.get((codec.bits, codec.signed))


def available(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if device.capability and tuple(device.capability) != fp8_plans.HOPPER:
        capability = ".".join(map(str, device.capability))
        return f"its instructions are those of compute capability 9.0 (Hopper); {device} has {capability}"
    return compiler.missing()


def available_to_jax(device: Device) -> str | None:
    """Why XLA cannot call the kernels, or None."""
    return availability.missing_for_xla() or available(device)


def accepts_in_jax(call: Call) -> str | None:
    """Why XLA does not call them for these operands, or None."""
    return availability.refused_by_xla(call) or accepts(call)


def accepts(call: Call) -> str | None:
    """Why the weight would be decoded first, or None."""
    a, b = call.a, call.b
    if b is None or b.recipe is None or b.layout is None:
        return "the second operand is a plain array; the kernel takes a quantized weight there, x @ w.mT"
    if b.storage != STORAGE:
        return f"the weight is in {b.storage!r} storage; w.to_storage({STORAGE!r}) rearranges it once for this kernel"
    grouped = call.op == "grouped_matmul"
    if b.axis != -2 or b.ndim != 2 + grouped:
        requirement = "have to be transposed matrices" if grouped else "has to be a transposed matrix"
        return f"the weight{'s' * grouped} {requirement}, w.mT, with blocks along K"
    if a.dtype not in ("bfloat16", "float16"):
        return f"activations are {a.dtype}; tensor cores multiply bfloat16 and float16"
    if str(call.option("out_dtype", "float32")) not in DTYPES:
        return f"it does not write {call.option('out_dtype')}"
    if a.empty or b.empty:
        return "the generic algorithm runs for an empty tensor"
    if (k := b.shape[-2]) < SHORTEST:
        return f"{k} columns are too few for the bound of products in the tensor cores; it takes {SHORTEST} and more"
    weight_format = weight_format_of(b.recipe.format, b.layout.plain.block(-2))
    return weight_format if isinstance(weight_format, str) else None


# -- how it is compiled ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What a kernel may vary. Raises ValueError.

    batch: rows of x of a block: 8 or 16 (weight_only_small.cu), 16, 32, 64, 128 or 256 (weight_only_wide.cu, `wide`).
    high: slices of 16 rows of w of a block (small), warpgroups along the rows of w (wide). deep: warps, or warpgroups, along K.
    stages: of the rings. split: blocks along K, of a cluster. per_sm: blocks of a multiprocessor.
    """

    batch: int
    high: int
    deep: int
    stages: int
    split: int = 1
    per_sm: int = 1
    wide: bool = False

    def __post_init__(self) -> None:
        if self.wide:
            most = 2 if self.batch == 256 else 4
            fits = self.batch in (16, 32, 64, 128, 256) and self.high in (1, 2) and 1 <= self.high * self.deep <= most
            fits = fits and self.stages > self.deep  # else a warpgroup waits for the stage that it holds
        else:
            fits = self.batch in (8, 16) and self.high in (2, 4) and 1 <= self.deep <= 16
        if not (fits and 1 <= self.stages <= 16 and self.split in (1, 2, 4) and 1 <= self.per_sm <= 4):
            raise ValueError(f"{self} has no kernel")

    @property
    def kind(self) -> str:
        """Of the source: weight_only_small.cu or weight_only_wide.cu."""
        return "wide" if self.wide else "small"

    @property
    def rows(self) -> int:
        """Rows of w of a block."""
        return self.high * (ROWS if self.wide else 16)

    @property
    def threads(self) -> int:
        if not self.wide:
            return 32 * self.deep
        groups = self.high * self.deep
        return 128 * groups + (128 if self.batch >= 128 and groups == 2 else 32)

    def shared(self, of: WeightFormat, m: int) -> int:
        """Bytes of shared memory of a block."""
        sums = self.deep * (self.batch if self.wide else m) * (self.rows + 4) * 4
        weights = self.rows // 16 * of.slice_bytes
        if self.wide:
            return max(self.stages * (self.batch * 256 + weights + 16), sums)
        return max(self.deep * self.stages * (weights + m * (2 * COLUMNS + 16) + 8), sums)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks along x and y."""
        return self._columns(n), -(-m // self.batch) if self.wide else 1, 1

    def grid_of_groups(self, m: int, groups: int, n: int) -> tuple[int, int, int]:
        """Blocks along x and y for groups of rows that end anywhere; rows of no group are one group more.

        Groups of m_1, m_2, ... rows have sum(ceil(m_i / batch)) parts, which is at most (m + groups (batch - 1)) / batch.
        """
        return self._columns(n), min(m, (m + (groups + 1) * (self.batch - 1)) // self.batch), 1

    def _columns(self, n: int) -> int:
        return -(-n // self.rows) * self.split

    def macros(self) -> dict[str, int]:
        if self.wide:
            own = {"BATCH": self.batch, "HIGH": self.high, "DEEP": self.deep}
        else:
            own = {"BATCH": self.batch // 8, "TILES": self.high, "WARPS": self.deep}
        return {**own, "STAGES": self.stages, "SPLIT": self.split, "PER_SM": self.per_sm}

    def fits(self, of: WeightFormat, m: int, k: int) -> bool:
        """Whether the kernel runs a call of these sizes."""
        bytes_ = self.shared(of, m)
        inside = bytes_ <= SHARED and self.per_sm * (bytes_ + 1024) <= SHARED_OF_SM
        if self.batch == 256 and not of.at_decode:
            return False  # sums and the partial sums of a group would need more registers than there are
        return inside and (self.wide or m <= self.batch) and -(-k // COLUMNS) >= self.split


@dataclass(frozen=True)
class Decoded:
    """In place of a configuration: the weight is decoded to BF16 in memory, and cuBLAS multiplies. For BF16 in and out."""

    def fits(self, of: WeightFormat, m: int, k: int) -> bool:
        """Whether BF16 holds the values, and rows of the decoded weight begin at multiples of 16 bytes."""
        return of.exact and k % 8 == 0


@dataclass(frozen=True)
class DecodedCodes:
    """In place of a configuration: codes are decoded to BF16 in memory, and sums take the scales. For BF16 activations."""

    def fits(self, of: WeightFormat, m: int, k: int) -> bool:
        """Whether sums have a place for all scales, and rows of decoded codes begin at multiples of 16 bytes."""
        return k % 8 == 0 and (of.decodes_scales or not (of.global_scale or of.factor != 1.0))


#: How a product by a weight runs.
Algorithm = Config | Decoded | DecodedCodes


def configs(of: WeightFormat, m: int, n: int, k: int) -> Iterable[Config]:
    """Configurations for a call, the one that is expected to be fastest first. At least one of them fits."""
    wide_codes, blocks = of.codes >= 3, -(-n // ROWS)
    few, many = blocks <= PROCESSORS // 2, blocks > 1.25 * PROCESSORS
    # What was fastest on an H200, of the shapes in the measured configurations: benchmarks/bench_weight_only.py --tune.
    if m <= SMALL:
        batch = 8 if m <= 8 else 16
        if blocks <= PROCESSORS // 4 and k > 4096:
            yield Config(batch, 2, 8, 3, split=2)
        elif few:
            if k > 8192:
                yield Config(8, 2, 16, 2) if m <= 8 else Config(16, 4, 8, 2, split=2)
            elif k <= 2048 and m <= 8:
                yield Config(8, 2, 16, 2)
            yield Config(batch, 2, 8, 3)
        elif many and m > 8:
            yield Config(16, 2, 1, 4, wide=True)
        elif many and not wide_codes:
            yield Config(8, 4, 8, 2, per_sm=2)
            yield Config(8, 4, 8, 2)
        if m <= 8:
            yield Config(8, 2, 8, 3) if wide_codes else Config(8, 4, 12 if k <= 16384 else 16, 2)
            yield Config(8, 4, 8, 4)
        else:
            yield Config(16, 4, 8 if wide_codes else 12, 2)
        for deep, stages in ((12, 2), (8, 3), (8, 2), (4, 2), (2, 2)):
            yield Config(batch, 4, deep, stages)
    batch = next((b for b in (16, 32, 64) if m <= b), 128)
    if batch < 128:
        if few or batch == (32 if many else 64):
            yield Config(batch, 1, 1, 4, split=2, per_sm=2, wide=True)
        elif many:
            yield Config(batch, 2, 1, 4, wide=True)
        elif not wide_codes:
            yield Config(batch, 2, 1, 4, split=2, wide=True)
        for stages in (8, 6, 5, 4, 3):
            yield Config(batch, 1, 2, stages, wide=True)
    else:
        tiles = -(-m // 128) * -(-n // 128)
        for stages in (4, 3, 2):
            if tiles <= PROCESSORS // 2:
                yield Config(128, 2, 1, stages, split=2, wide=True)
            yield Config(128, 2, 1, stages, wide=True)


def config_of(
    of: WeightFormat, codecs: str, m: int, n: int, k: int, device: str = "", act: str = "bfloat16", direct: bool = False
) -> Algorithm:
    """The configuration for a call on a device: one measured for so many rows or somewhat more, or else the rule's.

    act: the dtype of activations. direct: they and the result are BF16, without a bias, so that cuBLAS can write the result.
    """

    def runs(config: Algorithm) -> bool:
        allowed = direct if isinstance(config, Decoded) else act == "bfloat16" or isinstance(config, Config)
        return allowed and config.fits(of, m, k)

    measured, known = measured_on(device), None
    if measured:
        # A measurement of somewhat more rows is better than the rule.
        sizes = (min(MOST, m * more) for more in ((1, 2) if m <= 128 else (1, 2, 4)))
        known = next((config for size in sizes if (config := measured.get(key_of(codecs, of.group, size, n, k)))), None)
    if known is not None and runs(known):
        return known
    if known is None and m >= MANY:
        if runs(Decoded()):
            return Decoded()
        if runs(DecodedCodes()):
            return DecodedCodes()
    return next(config for config in configs(of, m, n, k) if config.fits(of, m, k))


def key_of(codecs: str, group: int, m: int, n: int, k: int) -> str:
    """The key of measured configurations: M is rounded up to the next power of two, up to `MOST`."""
    return f"{codecs} {group} {min(MOST, 1 << (m - 1).bit_length())} {n} {k}"


def grouped_config_of(of: WeightFormat, m: int, groups: int, n: int, k: int) -> Config:
    """The configuration for m rows in groups, whose sizes only the device knows: the largest is taken for twice the mean.

    Smaller tiles than a group's rows read its weight several times; larger ones multiply by rows that are not there.
    """
    most = max(8, min(m, -(-2 * m // groups)))  # the smallest kernel has room for 8 rows, whatever a group has
    candidates = configs(of, most, n * min(groups, m), k)
    return next(config for config in candidates if config.fits(of, config.batch, k))


def measured_on(device: str) -> Mapping[str, Algorithm]:
    """The shipped configurations of a device, by their keys."""
    return measured("weight_only", device, config_from)


def config_from(entry: Any) -> Algorithm:
    """The configuration of an entry in a file. Raises ValueError or TypeError."""
    return next((config for config in _DECODED if entry == _DECODED[config]), None) or Config(**entry)


#: What stands for a configuration in a file.
_DECODED: dict[Decoded | DecodedCodes, dict[str, Any]] = {Decoded(): {"decoded": True}, DecodedCodes(): {"decoded": "codes"}}


def entry_of(config: Algorithm) -> dict[str, Any]:
    """A configuration in a file."""
    return asdict(config) if isinstance(config, Config) else dict(_DECODED[config])


def macros_of(of: WeightFormat, config: Config, act: str, out: str, bias: str | None, grouped: bool = False) -> dict[str, int]:
    """The macros of a kernel. act, out, bias: dtypes by name."""
    numbers = {"ACT": DTYPES[act], "OUT": DTYPES[out], "BIAS": NO_BIAS if bias is None else DTYPES[bias]}
    return {**of.macros, **config.macros(), **numbers, "GROUPED": int(grouped)}


def macros_of_decoding(of: WeightFormat, out: str = "bfloat16", bias: str | None = None) -> dict[str, int]:
    """The macros of weight_only_decode.cu. out, bias: dtypes by name."""
    numbers = {"ACT": DTYPES["bfloat16"], "OUT": DTYPES[out], "BIAS": NO_BIAS if bias is None else DTYPES[bias]}
    return {**of.macros, **numbers}


# -- codes that are decoded to memory -----------------------------------------------------------------------------------

#: The codecs of `fp8_matmul.cu` for BF16 operands, and elements along K of a stage.
CODECS = "bf16", "bf16"
WIDTH = 64


@dataclass(frozen=True)
class ScaleApplication:
    """How sums take scales: macros SCALES, SPAN and PIECES of `fp8_matmul.cu`.

    group: columns of a scale; 0 for one scale of a row.
    """

    scales: int
    span: int = 1
    pieces: int = 1
    group: int = 0

    @property
    def step(self) -> int:
        """Elements along K of a step of the product."""
        return WIDTH * self.span

    def levels(self, k: int) -> int:
        """Scales of a row of k columns."""
        return -(-k // self.group) if self.group else 1


#: Those with scales along K, by the columns of a group.
_SCALES_ALONG_K = {
    group: ScaleApplication(fp8_plans.ROWS, span, pieces, group)
    for group, span, pieces in ((128, 2, 1), (64, 1, 1), (32, 1, 2), (16, 1, 4))
}


def scale_application_of(of: WeightFormat, block: Block) -> ScaleApplication:
    """How sums take the scales of a weight whose blocks run along K, which `DecodedCodes` fits."""
    outer = of.decodes_scales or block == TENSOR or block[1] is None
    return ScaleApplication(fp8_plans.OUTER) if outer else _SCALES_ALONG_K[of.group]


def decoding_tile_of(form: ScaleApplication, rows: int, m: int, k: int, processors: int) -> fp8_plans.GemmTile:
    """The tile for so many rows of a weight and m rows of activations, which are columns of the tile."""
    steps = -(-k // form.step)
    fitting = (tile for tile in fp8_plans.TABLE if tile.split <= steps)
    return min(fitting, key=lambda tile: fp8_plans.cycles(tile, rows, m, steps * form.span, 1, processors))


def variant_of(
    form: ScaleApplication, tile: fp8_plans.GemmTile, out: str, bias: str | None, staged: bool
) -> fp8_plans.GemmVariant:
    """The kernel. Only sums that take scales along K leave the tensor core: of BF16 products it keeps FP32."""
    return fp8_plans.GemmVariant(
        tile, form.scales, CODECS, out, bias or "none", a_plain=False, staged=staged, promote=form.scales != fp8_plans.OUTER,
        pieces=form.pieces, span=form.span,
    )  # fmt: skip


assert COLUMNS == 2 * WIDTH


# -- time ------------------------------------------------------------------------------------------------------------

#: Times over `bound` without a measurement.
_UNMEASURED = 1.3
#: Numbers of rows up to which times are measured together; more rows are the last kind.
TIMED_ROWS = (4, 16, 64, 128)


def slowdowns(device: str) -> Mapping[str, float]:
    """Measured times over `bound`, by the keys of `time_key_of`; empty if not measured.

    From `configurations/weight_times_<device>.json`, which `benchmarks/bench_weight_only.py --table` writes.
    """
    return measured("weight_times", device, times_over_bound)


def time_key_of(fmt: Format, block: Block, m: int) -> str:
    """The key of a measured time. block: of scales along K. m: rows of activations."""
    rows = next((f"{n}" for n in TIMED_ROWS if m <= n), "more")
    return f"cuda {codecs_of(fmt)} {block_text(block)} {rows}"


def bound(m: int, n: int, k: int, bits: float) -> float:
    """The seconds that a product takes at least: for its operations, or for its bytes. bits: of an element of the weight."""
    return roofline.seconds(2.0 * m * n * k, "bfloat16", n * k * bits / 8 + 2 * m * (n + k))


def bits_of(fmt: Format, block: Block) -> float:
    """Bits of an element with its share of the finest scale."""
    height, width = block
    shared = (height or 1) * width if width else math.inf
    return fmt.element.bits + fmt.scale.codec.bits / shared


def score(call: Call) -> float:
    """The estimated time."""
    assert call.b is not None
    a, b, recipe, layout = call.a.shape, call.b, call.b.recipe, call.b.layout
    assert recipe is not None
    if len(a) < 2 or len(b.shape) < 2 or layout is None:  # `explain` of recipes alone
        return _UNMEASURED * roofline.LAUNCH
    fmt, block, m = recipe.format, layout.plain.block(-2), math.prod(a[:-1])
    over = slowdowns(device_name(call.device)).get(time_key_of(fmt, block, m), _UNMEASURED)
    return over * bound(m, b.shape[-1], b.shape[-2], bits_of(fmt, block))
