"""Products of many rows of BF16 activations by a weight in storage "mma_16x128", whose codes are decoded to memory first.

1. `weight_only_decode.cu` writes the codes of a slice of the weight's rows as BF16 numbers, which hold them exactly (less their
   zero-point: 8 bits), and their scales in FP32. Where BF16 holds code x scale too, it writes that.
2. `fp8_matmul.cu` multiplies BF16 numbers in tensor cores. Partial sums of a group along K are added to FP32 sums times the
   group's scale; one scale of a row multiplies the sum. So no factor is rounded, and the result once.
3. A launch computes rows with flags in FP32. Most often there is none, and its blocks end at once.

Written without a GPU at hand: compiled, its arguments and stores tested on the host, but no result was computed on a card and
no time measured. So it runs only where it is named, `prefer="cuda.weight_only_decoded"`.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from breccia.backend import ScaledTensor, checks, composites, dtype_name, output_dtype

from . import decoded_plans as plans
from . import weight_plans
from .cuda import fp8_matmul, program
from .cuda.driver import Launch, TensorMap, driver
from .cuda.fp8_plans import OUTER, Tile
from .launch import Remembered, empty, on, stream_of
from .weight_only import CHUNKS, TURNS, Product, Weight, stored

#: Prepared calls, by the facts that they depend on; and of one, addresses whose launches are kept.
_calls, _PLACES = Remembered(), 64


def decoded_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`a @ b + bias` as `breccia.matmul` documents it. a: (..., M, K) in BF16; b: a weight's transpose, (K, N)."""
    points, out_dtype = b.zero_point, output_dtype(out_dtype)
    key = (
        a.shape, b.data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, b.data.device,
        None if bias is None else (bias.shape, bias.dtype), None if points is None else points.dtype, b.global_scale is None,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_matmul(a, b, bias)
        # Zero-points of other libraries may have any dtype, which no fact of a call says.
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, DecodedProduct(a, b, bias, out_dtype) if taken else composites.matmul_plain)
    if not isinstance(call, DecodedProduct):
        return call(a, b, bias, out_dtype, out)
    with on(call.device):
        return call(a, b, bias, out)


class DecodedProduct(Product):
    """What products of equal shapes, dtypes and recipe have in common, and their launches by addresses."""

    def __init__(
        self, a: Any, b: ScaledTensor, bias: Any, out_dtype: str, tile: Tile | None = None, rows: int | None = None
    ) -> None:
        """tile: instead of the one that is chosen. rows: of a slice of the weight; None for all at once."""
        super().__init__(a, b, out_dtype)
        form = plans.form_of(self.operand, b.layout.plain.block(-2))
        assert not isinstance(form, str), form  # `accepts` has asked
        self.form, self.slices = form, plans.slices(self.n, rows)
        self.bias_dtype = None if bias is None else dtype_name(bias)
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.tile = tile or plans.tile_of(form, self.slices[0][1], self.m, self.k, self.processors)
        self.levels, self.pitch = (
            form.levels(self.k),
            -(-self.slices[0][1] // 4) * 4,
        )  # rows of scales are multiples of 16 bytes
        macros = weight_plans.macros_of_decoding(self.operand, out_dtype, self.bias_dtype)
        source = program.source_of("weight_only_decode.cu")
        self.decode, self.mend = (
            program.function(source, f"weight_only_{name}", macros, 0, self.device) for name in ("decode", "mend")
        )
        self.launches = dict[tuple[Any, ...], list[Launch]]()

    def __call__(self, a: Any, b: ScaledTensor, bias: Any, out: Any) -> Any:
        """The product, on the current device."""
        x, y = self._activations(a), self._result(out)
        values = empty((self.slices[0][1], self.k), torch.bfloat16, self.device)
        scales = empty((self.levels, self.pitch), torch.float32, self.device)
        data, rows, _ = stored(b)
        bias = None if bias is None else bias.contiguous()
        arrays = data, rows, b.global_scale, x, bias, y, values, scales
        place: tuple[Any, ...] = *(None if x is None else x.data_ptr() for x in arrays), x.stride(0), y.stride(0)
        with self.turn:
            found = self.launches.get(place)
            if found is None:
                if len(self.launches) >= _PLACES:
                    self.launches.clear()
                found = self.launches[place] = self._prepared(*place)
            stream = stream_of(self.index)
            for launch in found:
                launch.config.stream = stream
                launch()
        return self._returned(y, out)

    def _prepared(
        self, data: int, flags: int, tensor_scale: int | None, x: int, bias: int | None, y: int, values: int, scales: int,
        ldx: int, ldy: int,
    ) -> list[Launch]:  # fmt: skip
        """The launches for arrays at these addresses; rows of x and y are so many numbers apart."""
        operand, item = self.operand, self.dtype.itemsize
        chunks = -(-self.k // weight_plans.COLUMNS)
        of_bias = 0 if self.bias_dtype is None else getattr(torch, self.bias_dtype).itemsize
        staged = item == 2 and ldy % 8 == 0 and y % 16 == 0
        variant = plans.variant_of(self.form, self.tile, self.out_dtype, self.bias_dtype, staged)
        multiply = fp8_matmul.loaded(variant, self.device)
        size = chunks * 4 * operand.slice_bytes  # of 64 rows

        def weight(row: int) -> Weight:
            block = row // weight_plans.ROWS
            return Weight(data + block * size, flags + 2 * block, tensor_scale, operand.factor, int(operand.divides))

        found: list[Launch] = []
        for row, rows in self.slices:
            blocks = -(-rows // weight_plans.ROWS)
            numbers = map(ctypes.c_int, (rows, self.k, self.pitch, self.levels, CHUNKS))
            given = [weight(row), ctypes.c_void_p(values), ctypes.c_void_p(scales), *numbers]
            found.append(self.decode.prepare((blocks, -(-chunks // CHUNKS), 1), 128, given))
            added = None if bias is None else bias + row * of_bias
            maps, args = self._arguments(rows, values, scales, x, ldx, y + row * item, ldy, added, staged)
            tile = self.tile
            tiles = -(-rows // (tile.rows * tile.share[0])) * -(-self.m // (tile.columns * tile.share[1]))
            grid = fp8_matmul.grid_of(multiply, tile, tiles, self.processors), 1, 1
            found.append(multiply.prepare(grid, tile.threads, (*maps, args), 0, tile.cluster, tile.dependent))
        sizes = map(ctypes.c_int, (self.m, self.n, self.k, ldx, ldy))
        given = [weight(0), *map(ctypes.c_void_p, (x, bias, y)), *sizes]
        blocks = -(-self.n // weight_plans.ROWS)
        found.append(self.mend.prepare((blocks, min(TURNS, -(-self.m // 64)), 1), 256, given))
        return found

    def _arguments(
        self, rows: int, values: int, scales: int, x: int, ldx: int, y: int, ldy: int, bias: int | None, staged: bool
    ) -> tuple[tuple[TensorMap, ...], Any]:
        """(Tensor maps, `Args`) of the product of so many rows of the weight: A, with the activations as W."""
        m, k, tile, width, none = self.m, self.k, self.tile, plans.WIDTH, TensorMap()
        make = driver().tensor_map
        boxes = tile.rows // tile.share[1], tile.columns // tile.share[0]
        maps = (
            make(values, "bfloat16", (1, rows, k), (rows * k, k), (1, boxes[0], width), 128),
            make(x, "bfloat16", (1, m, k), (m * ldx, ldx), (1, boxes[1], width), 128),
            none
            if self.form.scales == OUTER
            else make(
                scales,
                "float32",
                (1, self.levels, rows),
                (self.levels * self.pitch, self.pitch),
                (1, self.form.pieces, tile.rows),
            ),
            none,
            make(y, self.out_dtype, (1, m, rows), (m * ldy, ldy), (1, tile.columns // tile.parts, 64), 128) if staged else none,
        )
        return maps, fp8_matmul.Args(scales, None, bias, y, None, 0, 0, ldy, 0, rows, m, k, 1, 1, 0, 0, 0)
