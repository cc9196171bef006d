"""Products of many rows of BF16 activations by a weight in storage "mma_16x128" that is decoded to BF16 in memory first.

- `DecodedCall`: where BF16 holds the values exactly, cuBLAS multiplies by them.
- `DecodedCodesCall`: BF16 holds codes exactly (less their zero-point: 8 bits). `fp8_matmul.cu` multiplies them in tensor cores.
  It adds the partial sum of a group along K, times the group's scale, to FP32 sums; one scale of a row multiplies the sum.

So no factor is rounded, and the result once. A last launch computes rows with flags in FP32; its blocks end at once where no
row has a flag.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import dtype_name

from . import decoded_plans as plans
from . import weight_plans
from .bf16_matmul import multiply
from .cuda import fp8_matmul, program
from .cuda.driver import Launch, TensorMap, driver
from .cuda.fp8_plans import ROWS, Tile
from .launch import empty, stream_of
from .weight_products import Product, Weight, stored

#: Chunks of a block that decodes, one after the other; blocks along the rows of x that mend.
CHUNKS, TURNS = 4, 8
#: Addresses whose launches are kept, of a call.
_PLACES = 64


class DecodedCall(Product):
    """A pass that decodes a weight to BF16, cuBLAS's product with BF16 activations, and a launch over rows with flags."""

    def __init__(self, a: Any, b: ScaledTensor, out_dtype: str) -> None:
        super().__init__(a, b, out_dtype)
        source, macros = program.source_of("weight_only_decode.cu"), weight_plans.macros_of_decoding(self.operand)
        decode, mend = (program.function(source, f"weight_only_{name}", macros, 0, self.device) for name in ("decode", "mend"))
        self.values = ctypes.c_void_p()
        _, n, k, *_ = self.sizes
        rows, chunks = -(-self.n // weight_plans.ROWS), -(-self.k // weight_plans.COLUMNS)
        none, scales = ctypes.c_int(0), ctypes.c_void_p()  # they are part of the values
        values = [self.weight, self.values, scales, n, k, none, none, ctypes.c_int(CHUNKS)]
        self.decode = decode.prepare((rows, -(-chunks // CHUNKS), 1), 128, values)
        operands = [self.weight, self.x, self.bias, self.y, *self.sizes]
        self.mend = mend.prepare((rows, min(TURNS, -(-self.m // 64)), 1), 256, operands)

    def __call__(self, a: Any, b: ScaledTensor, bias: Any, out: Any) -> Any:
        """The product, on the current device. bias: None."""
        x, y = self._activations(a), self._result(out)
        values = empty((self.n, self.k), torch.bfloat16, self.device)
        data, rows, _ = stored(b)
        with self.turn:
            self.need_free()
            self.busy = True
            try:
                self.weight.chunks, self.weight.rows = data.data_ptr(), rows.data_ptr()
                self.values.value, self.x.value, self.y.value = values.data_ptr(), x.data_ptr(), y.data_ptr()
                self.ldx.value, self.ldy.value = x.stride(0), y.stride(0)
                self.decode.config.stream = self.mend.config.stream = stream_of(self.index)
                self.decode()
                multiply(x, values.mT, y)
                self.mend()
            finally:
                self.busy = False
        return self._returned(y, out)


class DecodedCodesCall(Product):
    """A pass over each slice of the weight that decodes its codes, its product, and a launch over rows with flags."""

    def __init__(
        self, a: Any, b: ScaledTensor, bias: Any, out_dtype: str, tile: Tile | None = None, rows: int | None = None
    ) -> None:
        """tile: instead of the one that is chosen. rows: of the weight at a time; None for all."""
        super().__init__(a, b, out_dtype)
        self.form = plans.form_of(self.operand, b.layout.plain.block(-2))
        self.slices = plans.slices(self.n, rows)
        self.bias_dtype = None if bias is None else dtype_name(bias)
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        most = self.slices[0][1]
        self.tile = tile or plans.tile_of(self.form, most, self.m, self.k, self.processors)
        self.levels, self.pitch = self.form.levels(self.k), -(-most // 4) * 4  # rows of scales begin at multiples of 16 bytes
        source = program.source_of("weight_only_decode.cu")
        macros = weight_plans.macros_of_decoding(self.operand, out_dtype, self.bias_dtype)
        self.decode, self.mend = (
            program.function(source, f"weight_only_{name}", macros, 0, self.device) for name in ("decode", "mend")
        )
        self.launches = dict[tuple[Any, ...], list[Launch]]()

    def __call__(self, a: Any, b: ScaledTensor, bias: Any, out: Any) -> Any:
        """The product, on the current device."""
        x, y = self._activations(a), self._result(out)
        data, rows, _ = stored(b)
        bias = None if bias is None else bias.contiguous()
        values = empty((self.slices[0][1], self.k), torch.bfloat16, self.device)
        scales = empty((self.levels, self.pitch), torch.float32, self.device)
        arrays = data, rows, b.global_scale, x, bias, y, values, scales
        place: tuple[Any, ...] = x.stride(0), y.stride(0), *(None if part is None else part.data_ptr() for part in arrays)
        with self.turn:
            self.need_free()
            self.busy = True
            try:
                launches = self.launches.get(place)
                if launches is None:
                    if len(self.launches) >= _PLACES:
                        self.launches.clear()
                    launches = self.launches[place] = self._prepared(*place)
                stream = stream_of(self.index)
                for launch in launches:
                    launch.config.stream = stream
                    launch()
            finally:
                self.busy = False
        return self._returned(y, out)

    def _prepared(
        self, ldx: int, ldy: int, data: int, flags: int, tensor_scale: int | None, x: int, bias: int | None, y: int,
        values: int, scales: int,
    ) -> list[Launch]:  # fmt: skip
        """The launches for arrays at these addresses; rows of x and y are so many numbers apart."""
        size = -(-self.k // weight_plans.COLUMNS) * 4 * self.operand.slice_bytes  # of 64 rows
        of_bias = 0 if self.bias_dtype is None else getattr(torch, self.bias_dtype).itemsize

        def weight(row: int) -> Weight:
            block = row // weight_plans.ROWS
            operand = self.operand
            return Weight(data + block * size, flags + 2 * block, tensor_scale, operand.factor, int(operand.divides))

        launches: list[Launch] = []
        for row, rows in self.slices:
            added = None if bias is None else bias + row * of_bias
            launches.append(self._decoding(rows, weight(row), values, scales))
            launches.append(self._product(rows, values, scales, x, ldx, y + row * self.dtype.itemsize, ldy, added))
        sizes = map(ctypes.c_int, (self.m, self.n, self.k, ldx, ldy))
        arguments = [weight(0), *map(ctypes.c_void_p, (x, bias, y)), *sizes]
        blocks = -(-self.n // weight_plans.ROWS)
        launches.append(self.mend.prepare((blocks, min(TURNS, -(-self.m // 64)), 1), 256, arguments))
        return launches

    def _decoding(self, rows: int, weight: Weight, values: int, scales: int) -> Launch:
        """The pass over so many rows of the weight."""
        blocks, chunks = -(-rows // weight_plans.ROWS), -(-self.k // weight_plans.COLUMNS)
        numbers = map(ctypes.c_int, (rows, self.k, self.pitch, self.levels, CHUNKS))
        arguments = [weight, ctypes.c_void_p(values), ctypes.c_void_p(scales), *numbers]
        return self.decode.prepare((blocks, -(-chunks // CHUNKS), 1), 128, arguments)

    def _product(self, rows: int, values: int, scales: int, x: int, ldx: int, y: int, ldy: int, bias: int | None) -> Launch:
        """The product by so many rows of the weight."""
        m, k, tile, none, make = self.m, self.k, self.tile, TensorMap(), driver().tensor_map
        staged = self.dtype.itemsize == 2 and ldy % 8 == 0 and y % 16 == 0
        variant = plans.variant_of(self.form, tile, self.out_dtype, self.bias_dtype, staged)
        function = fp8_matmul.loaded(variant, self.device)
        box = 1, tile.rows // tile.share[1], plans.WIDTH
        of_values, of_scales = make(values, "bfloat16", (1, rows, k), (rows * k, k), box, 128), none
        if self.form.scales == ROWS:
            shape, box = (1, self.levels, rows), (1, self.form.pieces, tile.rows)
            of_scales = make(scales, "float32", shape, (self.levels * self.pitch, self.pitch), box)
        box = 1, tile.columns // tile.share[0], plans.WIDTH
        of_x = make(x, "bfloat16", (1, m, k), (m * ldx, ldx), box, 128)
        box = 1, tile.columns // tile.parts, 64
        of_y = make(y, self.out_dtype, (1, m, rows), (m * ldy, ldy), box, 128) if staged else none
        args = fp8_matmul.Args(scales, None, bias, y, None, 0, 0, ldy, 0, rows, m, k, 1, 1, 0, 0, 0)
        tiles = -(-rows // (tile.rows * tile.share[0])) * -(-m // (tile.columns * tile.share[1]))
        grid = fp8_matmul.grid_of(function, tile, tiles, self.processors), 1, 1
        return function.prepare(
            grid, tile.threads, (of_values, of_x, of_scales, none, of_y, args), 0, tile.cluster, tile.dependent
        )
