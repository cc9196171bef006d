"""`matmul` and `grouped_matmul` of two FP8 tensors on Hopper: the kernel of `fp8_matmul.cu`, prepared and launched.

A call that repeats an earlier one, addresses included, looks its launch up. Otherwise tensor maps and arguments are made
anew, and for new facts (shapes are facts too) a kernel is chosen and loaded.
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

from breccia.backend import ScaledTensor, ShapeError, UnsupportedError, checks, dtype_name
from breccia_torch.ops import need_dense

from ..launch import Remembered, current_stream, empty, on
from ..operands import writable
from . import program, wgmma
from .driver import Launch, TensorMap, driver
from .fp8_plans import BLOCKS, OUTER, SCALES, STEP, Tile, Variant, grouped_tile_of, kind_of, tile_of

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ENTRY = "fp8_matmul"
_launches, _plans = Remembered(), Remembered()


def matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`matmul` as `breccia.matmul` documents it. Sums leave the tensor core every 128 along K."""
    checks.check_matmul(a, b, bias)
    return _multiply(a, b, bias, out_dtype, out, None, True)


def matmul_fast(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`matmul` whose sums stay in the tensor core, with about 13 fraction bits: less than the contract of products."""
    checks.check_matmul(a, b, bias)
    return _multiply(a, b, bias, out_dtype, out, None, False)


def grouped_matmul(a: Any, b: Any, offsets: Any, out_dtype: str = "float32", out: Any = None) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it. The device reads `offsets`; the host waits for nothing."""
    checks.check_grouped(a, b, offsets)
    return _multiply(a, b, None, out_dtype, out, offsets, True)


def _multiply(a: Any, b: Any, bias: Any, out_dtype: str, out: Any, offsets: Any, promote: bool) -> Any:
    device = a.data.device
    for name, x in (
        ("a's scale", a.scale),
        ("b's codes", b.data),
        ("b's scale", b.scale),
        ("bias", bias),
        ("offsets", offsets),
    ):
        if x is not None and x.device != device:
            raise UnsupportedError(f"matmul: a is on {device}, and {name} on {x.device}; move it: x.to({str(device)!r}).")
    shape, dtype = (*_lead(a, b, offsets), a.shape[-2], b.shape[-1]), _DTYPES[out_dtype]
    if out is not None:
        check_out(out, shape, dtype)
    with on(device):
        left, right = _Side(a, False), _Side(b, True)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        if offsets is not None and (offsets.dtype != torch.int32 or not offsets.is_contiguous()):
            offsets = offsets.to(torch.int32).contiguous()
        to = out if out is not None and writable(out, shape, dtype, device) else empty(shape, dtype, device)
        key = (
            left.key, right.key, to.data_ptr(), shape, dtype, current_stream(device), device.index, promote,
            None if bias is None else (bias.data_ptr(), bias.dtype), None if offsets is None else offsets.data_ptr(),
        )  # fmt: skip
        launch = _launches.get(key)
        if launch is None:
            launch = _launches.keep(key, _prepared(left, right, to, shape, bias, offsets, promote))
        launch()
    return to if out is None or to is out else out.copy_(to)


def check_out(out: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ShapeError unless `out` can hold the result."""
    if tuple(out.shape) != shape or out.dtype != dtype:
        found = f"{tuple(out.shape)} and {dtype_name(out)}"
        raise ShapeError(f"out= must have shape {shape} and dtype {_NAMES[dtype]}; got {found}.")


def _lead(a: Any, b: Any, offsets: Any) -> tuple[int, ...]:
    """Leading axes of the product."""
    if offsets is not None or (a.ndim == 2 and b.ndim == 2):
        return ()
    return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


class _Side:
    """One operand as the kernel reads it: codes (matrices, rows, K) and scales, copied only where their order does not fit.

    pitch: of column-major scales, from one block of K to the next; 0 for plain ones. key: everything above, with addresses.
    """

    __slots__ = ("codec", "data", "k", "key", "kind", "matrices", "pitch", "rows", "scale", "scale_matrix", "scale_row")

    def __init__(self, st: ScaledTensor, transposed: bool) -> None:
        data, scale = st.data, st.scale
        if transposed:
            data = data.mT
        need_dense(data)
        if not data.is_contiguous() or data.data_ptr() % 16:
            data = data.contiguous() if not data.is_contiguous() else data.clone()  # both are aligned
        self.rows, self.k = data.shape[-2:]
        self.matrices = math.prod(data.shape[:-2])
        self.kind, self.codec = kind_of(st.recipe, st.layout, st.axis)
        self.data, self.pitch, self.scale_row, self.scale_matrix = data, 0, 0, 0
        self.scale = self._tensor(scale, data) if self.kind == "tensor" else self._blocks(st, scale, transposed)
        self.key = (
            data.data_ptr(), self.scale.data_ptr(), data.shape, self.kind, self.codec, self.pitch, self.scale_row,
            self.scale_matrix,
        )  # fmt: skip

    def _tensor(self, scale: Any, data: Any) -> Any:
        if scale.numel() == 1:
            return scale
        self.scale_matrix = 1
        lead = data.shape[:-2]
        return scale.reshape(*scale.shape, *[1] * (len(lead) - scale.ndim)).expand(lead).contiguous()

    def _blocks(self, st: ScaledTensor, scale: Any, transposed: bool) -> Any:
        steps = -(-self.k // STEP)
        if st.layout.storage == "column_major":
            if not scale.is_contiguous() or scale.data_ptr() % 16:
                scale = scale.contiguous().clone()
            self.pitch = scale.shape[-1]
            return scale
        if self.kind == "row":
            self.scale_row, self.scale_matrix = 1, self.rows if self.matrices > 1 else 0
            each = self.rows * self.matrices
            # One number for each row, whichever axis is 1; (rows,) are those of every matrix.
            return scale.contiguous() if scale.numel() == each else scale.reshape(-1).repeat(self.matrices)
        scale = scale.mT if transposed else scale
        if self.kind == "128x128":
            self.scale_matrix = -(-self.rows // STEP) * steps
            return scale.contiguous()
        if steps % 4 == 0:  # rows begin at multiples of 16 bytes
            return scale if scale.is_contiguous() and scale.data_ptr() % 16 == 0 else scale.contiguous().clone()
        self.pitch = -(-self.rows // 4) * 4
        turned = scale.new_empty((*scale.shape[:-2], steps, self.pitch))
        turned[..., : self.rows] = scale.mT
        return turned

    def merged(self) -> bool:
        """Whether all matrices can be one with more rows."""
        return self.pitch == 0 and (self.scale_row == 1 or self.scale_matrix == 0)

    def data_map(self, box: int) -> TensorMap:
        """The codes, in boxes of so many rows."""
        return driver().tensor_map(
            self.data.data_ptr(), "uint8", (self.matrices, self.rows, self.k), (self.rows * self.k, self.k), (1, box, STEP), 128
        )

    def scale_map(self, box: int) -> TensorMap:
        """The scales of blocks, for so many rows."""
        steps = -(-self.k // STEP)
        if self.pitch:
            shape, strides, part = (self.matrices, steps, self.rows), (steps * self.pitch, self.pitch), (1, 1, box)
        else:
            shape, strides, part = (self.matrices, self.rows, steps), (self.rows * steps, steps), (1, box, 4)
        return driver().tensor_map(self.scale.data_ptr(), "float32", shape, strides, part)

    def merge(self) -> None:
        """All matrices as one."""
        self.rows, self.matrices, self.scale_matrix = self.rows * self.matrices, 1, 0


class Args(ctypes.Structure):
    """`Args` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sa", "sw", "bias", "out", "offsets")),
        *((name, ctypes.c_longlong) for name in ("sa_matrix", "sw_matrix", "out_row", "out_matrix")),
        *((name, ctypes.c_int) for name in ("M", "N", "K", "matrices", "sa_row", "sw_row", "a_matrix", "w_matrix")),
    )


def _prepared(a: _Side, w: _Side, out: Any, shape: tuple[int, ...], bias: Any, offsets: Any, promote: bool) -> Launch:
    """The launch for these operands."""
    device, grouped = out.device, offsets is not None
    if not grouped and w.matrices == 1 and a.matrices > 1 and a.merged():
        a.merge()
    matrices = w.matrices if grouped else max(a.matrices, w.matrices)
    m, n, k = a.rows, w.rows, a.k
    facts = (
        m, n, k, matrices, (a.kind, w.kind), (a.codec, w.codec), not a.pitch, not w.pitch, out.dtype,
        None if bias is None else bias.dtype, promote, grouped, device.index,
    )  # fmt: skip
    plan = _plans.get(facts)
    if plan is None:
        plan = _plans.keep(facts, _Plan.of(*facts[:-1], device))
    variant = plan.variant
    tile, none = variant.tile, TensorMap()
    args = Args(
        a.scale.data_ptr(), w.scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        None if offsets is None else offsets.data_ptr(), a.scale_matrix, w.scale_matrix, n, m * n, m, n, k, matrices,
        a.scale_row, w.scale_row, int(a.matrices > 1), int(w.matrices > 1),
    )  # fmt: skip
    outputs = 1 if grouped else matrices
    maps = (
        a.data_map(tile.rows // tile.share[1]),
        w.data_map(tile.columns // tile.share[0]),
        a.scale_map(tile.rows) if variant.scales != OUTER else none,
        w.scale_map(tile.columns) if variant.scales == BLOCKS else none,
        _output_map(out, outputs, m, n, tile) if variant.staged else none,
    )
    return plan.function.prepare(
        (plan.grid, 1, 1), tile.threads, (*maps, args), current_stream(device), tile.cluster, tile.dependent
    )


def _output_map(out: Any, matrices: int, m: int, n: int, tile: Tile) -> TensorMap:
    box = next(width for width in (64, 32, 16) if tile.columns % width == 0)
    return driver().tensor_map(out.data_ptr(), _NAMES[out.dtype], (matrices, m, n), (m * n, n), (1, 64, box), 2 * box)


@dataclass(frozen=True)
class _Plan:
    """A loaded kernel and its grid."""

    variant: Variant
    function: Any
    grid: int

    @staticmethod
    def of(
        m: int, n: int, k: int, matrices: int, kinds: tuple[str, str], codecs: tuple[str, str], a_plain: bool, w_plain: bool,
        dtype: torch.dtype, bias: Any, promote: bool, grouped: bool, device: torch.device,
    ) -> _Plan:  # fmt: skip
        """The kernel for a product of these lengths. The output is contiguous, and 16 divides its address."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        tile = grouped_tile_of(m, matrices, k) if grouped else tile_of(m, n, k, matrices, processors)
        staged = dtype.itemsize == 2 and n % 8 == 0
        added = "none" if bias is None else _NAMES[bias]
        variant = Variant(
            tile, SCALES[kinds], codecs, _NAMES[dtype], added, a_plain, w_plain, staged, n % 2 == 0, promote, grouped
        )  # fmt: skip
        function = loaded(variant, device)
        # As many clusters as run at a time walk over all tiles. With split-K each has one: its ring holds the partial sums.
        clusters = function.clusters(tile.threads, tile.cluster) if tile.cluster > 1 else processors
        if not grouped:
            tiles = matrices * -(-m // (tile.rows * tile.share[0])) * -(-n // (tile.columns * tile.share[1]))
            clusters = tiles if tile.split > 1 else min(clusters, tiles)
        return _Plan(variant, function, clusters * tile.cluster)


@lru_cache
def source_of(columns: int, codecs: tuple[str, str]) -> Any:
    """The source, with its instruction for tiles of so many columns."""
    return program.source_of("fp8_matmul.cu", (("wgmma.cuh", wgmma.header(columns, *codecs)),))


def loaded(variant: Variant, device: torch.device) -> Any:
    """The kernel of a variant on a device."""
    return program.function(source_of(variant.tile.columns, variant.codecs), _ENTRY, variant.macros, variant.shared, device)
