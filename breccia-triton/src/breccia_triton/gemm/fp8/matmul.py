"""`matmul` and `grouped_matmul` of two FP8 tensors on Hopper: the kernel of `fp8_matmul.cu`, prepared and launched.

A call is prepared by its facts: shapes, strides, recipes, dtypes, and whether addresses are aligned. Later calls with the same
facts put their addresses into the arguments and tensor maps. For new facts a kernel is chosen, and compiled if it is new.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import FLOAT32, PLAIN, ProductOptions, checks
from breccia_torch.ops import need_dense

from ...launch import program
from ...launch.cache import Remembered
from ...launch.device import on
from ...launch.driver import CudaLaunch, MovableMap, TensorMap, driver
from ...launch.executable import Executable
from ...operands import leading, need_one_device, parts_of
from .. import wgmma
from . import plans as fp8_plans
from .plans import ALIGNED, BLOCKS, OUTER, SCALES, STEP, GemmTile, GemmVariant, grouped_tile_of, kind_of, tile_of

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENTRY = "fp8_matmul"
_calls, _plans = Remembered(), Remembered()


def forget() -> None:
    """Prepare all calls anew, for tests and benchmarks that force a tile."""
    _calls.clear()
    _plans.clear()


def matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it. Sums leave the tensor core every 128 along K."""
    return _multiply(a, b, options, None, True)


def matmul_fast(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` whose sums stay in the tensor core, with about 13 fraction bits: less than the contract of products."""
    return _multiply(a, b, options, None, False)


def grouped_matmul(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it. The device reads `offsets`; the host waits for nothing."""
    return _multiply(a, b, options, offsets, True)


def _multiply(a: Any, b: Any, options: ProductOptions, offsets: Any, promote: bool) -> Any:
    out_dtype, bias, out = options
    added = bias if offsets is None else offsets
    return prepared(a, b, bias, out_dtype, offsets, promote)(a, b, added, out)


def prepared(a: Any, b: Any, bias: Any, out_dtype: str, offsets: Any = None, promote: bool = True) -> Executable:
    """The product of operands with these facts, made where no earlier call had them."""
    key = product_facts(a, b, bias, out_dtype, offsets), promote
    call = _calls.get(key)
    return _calls.keep(key, executable(a, b, bias, out_dtype, offsets, promote)) if call is None else call


def product_facts(a: Any, b: Any, bias: Any, out_dtype: str, offsets: Any = None) -> tuple[Any, ...]:
    """What a product of two FP8 tensors is prepared for, strides included: `operands.facts_of` has none."""
    x, y, scale_x, scale_y = a.data, b.data, a.scale, b.scale
    return (
        x.data_ptr() % ALIGNED, y.data_ptr() % ALIGNED, scale_x.data_ptr() % ALIGNED, scale_y.data_ptr() % ALIGNED,
        x.shape, y.shape, x.stride(), y.stride(), scale_x.shape, scale_y.shape, scale_x.stride(), scale_y.stride(),
        scale_x.dtype, scale_y.dtype, a.axis, b.axis, a.recipe.interned_key, b.recipe.interned_key, a.layout.interned_key,
        b.layout.interned_key, x.device, y.device, scale_x.device, scale_y.device, out_dtype,
        None if bias is None else (bias.dtype, bias.shape, bias.device),
        None if offsets is None else (offsets.shape, offsets.device),
    )  # fmt: skip


def executable(a: Any, b: Any, bias: Any, out_dtype: str, offsets: Any = None, promote: bool = True) -> Executable:
    """The product of operands with these facts: its kernel, with arguments that each call completes."""
    grouped = offsets is not None
    if grouped:
        checks.check_grouped(a, b, offsets)
    else:
        checks.check_matmul(a, b, bias)
    device = a.data.device
    need_one_device(device, [*parts_of("a", a), *parts_of("b", b), ("bias", bias), ("offsets", offsets)])
    lead = () if grouped else leading(a.shape, b.shape)
    with on(device):
        copiers = _copiers(a, b, device, grouped)
        copies: tuple[list[Any], list[Any]] = [], []
        x = Fp8Operand(a, False, copies[0], copiers, groups=grouped)
        w = Fp8Operand(b, True, copies[1], copiers)
        if not grouped and w.matrices == 1 and x.matrices > 1 and x.merged():
            x.merge()
        run = _launch(x, w, _DTYPES[out_dtype], None if bias is None else bias.dtype, grouped, promote).run
    left, right = map(bool, copies)

    def enqueue(stream: int, a: Any, b: Any, added: Any, to: Any) -> None:
        kept: list[Any] = []  # until the kernel has been enqueued: memory is reused in the order of the stream
        if left:
            x = Fp8Operand(a, False, kept, copiers, groups=grouped)
            codes_a, scale_a = x.data, x.scale
        else:
            codes_a, scale_a = a.data.data_ptr(), a.scale.data_ptr()
        if right:
            w = Fp8Operand(b, True, kept, copiers)
            codes_b, scale_b = w.data, w.scale
        else:
            codes_b, scale_b = b.data.data_ptr(), b.scale.data_ptr()
        if added is None:
            return run(stream, codes_a, codes_b, scale_a, scale_b, to.data_ptr())
        added = (added.to(torch.int32) if grouped else added).contiguous()
        run(stream, codes_a, codes_b, scale_a, scale_b, to.data_ptr(), added.data_ptr())

    return Executable(device, (*lead, a.shape[-2], b.shape[-1]), out_dtype, enqueue, scratch=left or right)


def _launch(a: Fp8Operand, w: Fp8Operand, dtype: torch.dtype, bias: Any, grouped: bool, promote: bool) -> CudaLaunch:
    """The kernel and its arguments. Slots: codes of a and b, their scales, the result, and the bias or the offsets if any."""
    matrices = w.matrices if grouped else max(a.matrices, w.matrices)
    m, n, k = a.rows, w.rows, a.k
    facts = (
        fp8_plans.rounded_rows(m), n, k, matrices, (a.kind, w.kind), (a.codec, w.codec), not a.pitch, not w.pitch,
        dtype, bias, promote, grouped, a.device, a.copiers, (a.e8m0, w.e8m0),
    )  # fmt: skip
    plan = _plans.get(facts)
    if plan is None:
        plan = _plans.keep(facts, LoadedKernel.of(*facts))
    variant = plan.variant
    tile = variant.tile
    args = Args(
        None, None, None, None, None, a.scale_matrix, w.scale_matrix, n, m * n, m, n, k, matrices, a.scale_row,
        w.scale_row, int(a.matrices > 1), int(w.matrices > 1),
    )  # fmt: skip
    codes = [a.data_map(rows) for rows in ((tile.part,) if grouped else tile.boxes(m))]
    maps = [
        w.data_map(tile.columns // tile.share[0]),
        a.scale_map(tile.rows) if variant.scales != OUTER and not variant.warps_copy[0] else None,
        w.scale_map(tile.columns) if variant.scales == BLOCKS and not variant.warps_copy[1] else None,
        _output_map(dtype, 1 if grouped else matrices, m, n, tile) if variant.staged else None,
    ]
    slots: list[Any] = [codes]
    for each, field in zip(maps, (None, "sa", "sw", "out"), strict=True):
        slots.append([*([] if each is None else [each]), *([] if field is None else [(args, field)])])
    if grouped or bias is not None:
        slots.append((args, "offsets" if grouped else "bias"))
    none = TensorMap()
    values = (*codes, *[none] * (2 - len(codes)), *(none if each is None else each for each in maps), args)
    return plan.function.prepare((plan.grid, 1, 1), tile.threads, values, slots, tile.cluster, tile.dependent)


def _copiers(a: ScaledTensor, b: ScaledTensor, device: torch.device, grouped: bool) -> bool:
    """Whether warps copy the plain scales of a product: by its tile, if the rows of `a` that share a weight are merged."""
    alone = math.prod(b.shape[:-2]) == 1
    rows = math.prod(a.shape[:-1]) if alone else a.shape[-2]
    matrices = 1 if alone else math.prod(leading(a.shape, b.shape))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tile_of(rows, b.shape[-1], a.shape[-1], matrices, processors)
    first, second = (kind_of(st.recipe, st.layout, st.axis)[0] for st in (a, b))
    return fp8_plans.copiers(tile, (first, second), grouped)


class Fp8Operand:
    """One operand as the kernel reads it: codes (matrices, rows, K), K adjacent, and scales. Copied where they are not so.

    data, scale: addresses. scale_row, scale_matrix: from one row's scale to the next one's, and from one matrix's. pitch: of
    column-major scales, from one block of K to the next; 0 for plain ones.

    e8m0: scales are E8M0 codes, which the kernel decodes. copiers: warps read plain FP32 scales, not TMA. groups: tiles begin
    at any row. TMA reads column-major scales only from every fourth row on (it raises an illegal instruction elsewhere:
    measured on an H200), so plain ones are made of them.
    """

    def __init__(self, st: ScaledTensor, transposed: bool, copies: list[Any], copiers: bool, groups: bool = False) -> None:
        need_dense(st.data)
        data = st.data.mT if transposed else st.data
        codes = data if data.is_contiguous() and data.data_ptr() % ALIGNED == 0 else _copied(data)
        self.rows, self.k, self.matrices = *data.shape[-2:], math.prod(data.shape[:-2])
        self.kind, self.codec = kind_of(st.recipe, st.layout, st.axis)
        self.pitch = self.scale_row = self.scale_matrix = 0
        self.copiers, self.device = copiers, st.data.device
        self.e8m0 = self.kind == "1x32" and st.scale.dtype != torch.float32
        self.scales = -(-self.k // STEP)  # of a row, with those that fill it up
        scale = self._tensor(st, data) if self.kind == "tensor" else self._blocks(st, transposed, groups)
        if self.matrices == 1:
            self.scale_matrix = 0  # every matrix of the other operand meets this one
        copies += [codes] if codes is not data else []
        copies += [scale] if scale.data_ptr() != st.scale.data_ptr() else []
        self.data, self.scale = codes.data_ptr(), scale.data_ptr()

    def _tensor(self, st: ScaledTensor, data: Any) -> Any:
        scale, lead = st.scale, data.shape[:-2]
        if scale.numel() == 1:
            return scale
        self.scale_matrix = 1
        return scale.reshape(*scale.shape, *[1] * (len(lead) - scale.ndim)).expand(lead).contiguous()

    def _blocks(self, st: ScaledTensor, transposed: bool, groups: bool) -> Any:
        scale, steps = st.scale, self.scales
        if st.layout.storage != PLAIN:
            if not groups:
                self.pitch = scale.shape[-1]
                return _aligned(scale)
            scale = st.to_plain().scale
        if self.kind == "row":
            self.scale_row, self.scale_matrix = 1, self.rows
            # One number for each row, whichever axis is 1; (rows,) are those of every matrix.
            return scale.contiguous() if scale.numel() == self.rows * self.matrices else scale.reshape(-1).repeat(self.matrices)
        scale = scale.mT if transposed else scale
        if self.kind == "128x128":
            self.scale_matrix = -(-self.rows // STEP) * steps
            return scale.contiguous()
        if self.kind == "1x32":  # four of a step, zeros where K ends
            return self._plain(scale.view(torch.uint8) if self.e8m0 else scale, 4 * steps)
        if not groups and self._turned(scale):
            self.pitch = self.rows
            return scale
        if steps * scale.itemsize % ALIGNED == 0 or self.copiers:
            return self._plain(scale, steps)
        if groups:
            return self._plain(scale, -(-steps // 4) * 4)
        self.pitch = -(-self.rows // 4) * 4
        turned = scale.new_empty((*scale.shape[:-2], steps, self.pitch))
        turned[..., : self.rows] = scale.mT
        return turned

    def _turned(self, scale: Any) -> bool:
        """Whether scales of blocks of K lie as column-major ones do, as a cast down the columns leaves them."""
        ordered = scale.mT.is_contiguous() and not scale.is_contiguous()
        return ordered and self.rows % 4 == 0 and scale.data_ptr() % ALIGNED == 0

    def _plain(self, scale: Any, columns: int) -> Any:
        """Scales (rows, columns), zeros in columns that they do not have."""
        self.scales = self.scale_row = columns
        self.scale_matrix = self.rows * columns
        by_warps = self.e8m0 or (self.copiers and self.kind != "1x32")  # words of a number, or of four codes
        return _padded(scale, columns, 4 if by_warps else ALIGNED)

    def merged(self) -> bool:
        """Whether all matrices can be one with more rows."""
        return self.pitch == 0 and self.scale_matrix in (0, self.rows * self.scale_row)

    def merge(self) -> None:
        """All matrices as one."""
        self.rows, self.matrices, self.scale_matrix = self.rows * self.matrices, 1, 0

    def data_map(self, box: int) -> MovableMap:
        """The codes, in boxes of so many rows."""
        shape, strides = (self.matrices, self.rows, self.k), (self.rows * self.k, self.k)
        return MovableMap(driver(), "uint8", shape, strides, (1, box, STEP), STEP)

    def scale_map(self, box: int) -> MovableMap:
        """The scales of blocks, for so many rows."""
        steps = self.scales
        if self.pitch:
            shape, strides, part = (self.matrices, steps, self.rows), (steps * self.pitch, self.pitch), (1, 1, box)
        else:
            shape, strides, part = (self.matrices, self.rows, steps), (self.rows * steps, steps), (1, box, 4)
        return MovableMap(driver(), "float32", shape, strides, part)


def _aligned(x: Any, to: int = ALIGNED) -> Any:
    """A tensor in C order whose address is a multiple of so many bytes, by default of those that TMA takes."""
    return x if x.is_contiguous() and x.data_ptr() % to == 0 else _copied(x)


def _copied(x: Any) -> Any:
    """A new tensor in C order."""
    return x.clone(memory_format=torch.contiguous_format)


def _padded(x: Any, columns: int, alignment: int) -> Any:
    """A tensor in C order with so many columns, zeros beyond its own, at a multiple of so many bytes."""
    return _aligned(x if x.shape[-1] == columns else torch.nn.functional.pad(x, (0, columns - x.shape[-1])), alignment)


class Args(ctypes.Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sa", "sw", "bias", "out", "offsets")),
        *((name, ctypes.c_longlong) for name in ("sa_matrix", "sw_matrix", "out_row", "out_matrix")),
        *((name, ctypes.c_int) for name in ("M", "N", "K", "matrices", "sa_row", "sw_row", "a_matrix", "w_matrix")),
    )


def _output_map(dtype: torch.dtype, matrices: int, m: int, n: int, tile: GemmTile) -> MovableMap:
    box = next(width for width in (64, 32, 16) if tile.columns % width == 0)
    return MovableMap(driver(), _NAMES[dtype], (matrices, m, n), (m * n, n), (1, 64, box), 2 * box)


@dataclass(frozen=True)
class LoadedKernel:
    """A loaded kernel and its grid."""

    variant: GemmVariant
    function: Any
    grid: int

    @staticmethod
    def of(
        m: int, n: int, k: int, matrices: int, kinds: tuple[str, str], codecs: tuple[str, str], a_plain: bool, w_plain: bool,
        dtype: torch.dtype, bias: Any, promote: bool, grouped: bool, device: torch.device, copiers: bool,
        e8m0: tuple[bool, bool],
    ) -> LoadedKernel:  # fmt: skip
        """The kernel for a product of these lengths, M as of `rounded_rows`. The output is contiguous, aligned to 16 bytes."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        tile = grouped_tile_of(m, matrices, k) if grouped else tile_of(m, n, k, matrices, processors)
        staged = dtype.itemsize == 2 and n % 8 == 0
        added = "none" if bias is None else _NAMES[bias]
        variant = GemmVariant(
            tile, SCALES[kinds], codecs, _NAMES[dtype], added, a_plain, w_plain, staged, n % 2 == 0, promote, grouped,
            4 if kinds[0] == "1x32" else 1, copiers, e8m0=e8m0,
        )  # fmt: skip
        function = loaded(variant, device)
        down, along = -(-m // (tile.rows * tile.share[0])), -(-n // (tile.columns * tile.share[1]))
        return LoadedKernel(
            variant, function, grid_of(function, tile, None if grouped else matrices * down * along, processors)
        )


def grid_of(function: Any, tile: GemmTile, tiles: int | None, processors: int) -> int:
    """Blocks of a launch. tiles: of clusters; None where only the device knows how many there are."""
    # As many clusters as run at a time walk over all tiles. With split-K each has one: its ring holds the partial sums.
    clusters = function.clusters(tile.threads, tile.cluster) if tile.cluster > 1 else processors
    if tiles is not None:
        clusters = tiles if tile.split > 1 else min(clusters, tiles)
    return clusters * tile.cluster


@lru_cache
def source_of(columns: int, codecs: tuple[str, str]) -> Any:
    """The source, with its instruction for tiles of so many columns."""
    return program.source_of(fp8_plans.SOURCE, (("wgmma.cuh", wgmma.header(columns, *codecs)),))


def loaded(variant: GemmVariant, device: torch.device) -> Any:
    """The kernel of a variant on a device."""
    return program.function(source_of(variant.tile.columns, variant.codecs), _ENTRY, variant.macros, variant.shared, device)
