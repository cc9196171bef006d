"""Products of many rows of BF16 activations by a weight in storage "mma_16x128", whose codes become BF16 operands in memory.

BF16 holds codes exactly (less their zero-point: 8 bits), for some formats code x scale too. `fp8_matmul.cu` multiplies them in
tensor cores. Partial sums of a group along K are added to FP32 sums times the group's scale; one scale of a row multiplies the
sum. So no factor is rounded, and the result once. A last launch computes rows with flags in FP32. Most often there is none, and
its blocks end at once. Codes are decoded

- `decoded_matmul`: by `weight_only_decode.cu`, to global memory, a slice of the weight's rows at a time;
- `overlapped_matmul`: by warps of the product, to shared memory, while tensor cores multiply.

Written without a GPU at hand: compiled, and run on the host with all threads, copies and barriers (tests/test_decoded.py), but
no result was computed on a card and no time measured. So both run only where they are named,
`prefer="cuda.weight_only_decoded"` and `prefer="cuda.weight_only_overlapped"`.
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
from .cuda.fp8_plans import ROWS, Tile, Variant
from .decoded_plans import Form
from .launch import Remembered, empty, on, stream_of
from .weight_only import CHUNKS, TURNS, Product, Weight, stored

#: Prepared calls, by the facts that they depend on; and of one, addresses whose launches are kept.
_calls, _PLACES = Remembered(), 64


def decoded_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """`a @ b + bias` as `breccia.matmul` documents it. a: (..., M, K) in BF16; b: a weight's transpose, (K, N)."""
    return _multiply(DecodedProduct, a, b, bias, out_dtype, out)


def overlapped_matmul(a: Any, b: Any, bias: Any = None, out_dtype: str = "float32", out: Any = None) -> Any:
    """The same; the weight is decoded while tensor cores multiply."""
    return _multiply(OverlappedProduct, a, b, bias, out_dtype, out)


def _multiply(kind: type[_Codes], a: Any, b: Any, bias: Any, out_dtype: str, out: Any) -> Any:
    points, out_dtype = b.zero_point, output_dtype(out_dtype)
    key = (
        kind, a.shape, b.data.shape, b.layout.interned_key, b.recipe.interned_key, out_dtype, b.data.device,
        None if bias is None else (bias.shape, bias.dtype), None if points is None else points.dtype, b.global_scale is None,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        checks.check_matmul(a, b, bias)
        # Zero-points of other libraries may have any dtype, which no fact of a call says.
        taken = points is None or points.dtype == torch.uint8
        call = _calls.keep(key, kind(a, b, bias, out_dtype) if taken else composites.matmul_plain)
    if not isinstance(call, _Codes):
        return call(a, b, bias, out_dtype, out)
    with on(call.device):
        return call(a, b, bias, out)


class Args(fp8_matmul.Args):
    """`Args` of the source where it decodes the weight."""

    _fields_ = (("weight", Weight),)


class _Codes(Product):
    """What products of equal shapes, dtypes and recipe have in common, and their launches by addresses.

    tile: instead of the one that is chosen. rows: of the weight at a time; None for all.
    """

    form: Form

    def __init__(
        self, a: Any, b: ScaledTensor, bias: Any, out_dtype: str, tile: Tile | None = None, rows: int | None = None
    ) -> None:
        super().__init__(a, b, out_dtype)
        form = self._form(b.layout.plain.block(-2))
        assert not isinstance(form, str), form  # `accepts` has asked
        self.form, self.slices = form, plans.slices(self.n, rows)
        self.bias_dtype = None if bias is None else dtype_name(bias)
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.tile = tile or self._tile()
        self.macros = weight_plans.macros_of_decoding(self.operand, out_dtype, self.bias_dtype)
        self.mend = self._function("mend")
        self.launches = dict[tuple[Any, ...], list[Launch]]()

    def _form(self, block: Any) -> Form | str:
        raise NotImplementedError

    def _tile(self) -> Tile:
        raise NotImplementedError

    def _scratch(self) -> list[Any]:
        """Arrays for the time of a call."""
        return []

    def _function(self, name: str) -> Any:
        """A kernel of weight_only_decode.cu."""
        source = program.source_of("weight_only_decode.cu")
        return program.function(source, f"weight_only_{name}", self.macros, 0, self.device)

    def __call__(self, a: Any, b: ScaledTensor, bias: Any, out: Any) -> Any:
        """The product, on the current device."""
        x, y = self._activations(a), self._result(out)
        data, rows, _ = stored(b)
        bias = None if bias is None else bias.contiguous()
        arrays = data, rows, b.global_scale, x, bias, y, *self._scratch()
        place: tuple[Any, ...] = x.stride(0), y.stride(0), *(None if part is None else part.data_ptr() for part in arrays)
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
        self,
        ldx: int,
        ldy: int,
        data: int,
        flags: int,
        tensor_scale: int | None,
        x: int,
        bias: int | None,
        y: int,
        *scratch: int,
    ) -> list[Launch]:
        """The launches for arrays at these addresses; rows of x and y are so many numbers apart."""
        size = -(-self.k // weight_plans.COLUMNS) * 4 * self.operand.slice_bytes  # of 64 rows
        of_bias = 0 if self.bias_dtype is None else getattr(torch, self.bias_dtype).itemsize

        def weight(row: int) -> Weight:
            block = row // weight_plans.ROWS
            operand = self.operand
            return Weight(data + block * size, flags + 2 * block, tensor_scale, operand.factor, int(operand.divides))

        found: list[Launch] = []
        for row, rows in self.slices:
            added = None if bias is None else bias + row * of_bias
            found += self._slice(rows, weight(row), x, ldx, y + row * self.dtype.itemsize, ldy, added, *scratch)
        sizes = map(ctypes.c_int, (self.m, self.n, self.k, ldx, ldy))
        given = [weight(0), *map(ctypes.c_void_p, (x, bias, y)), *sizes]
        blocks = -(-self.n // weight_plans.ROWS)
        found.append(self.mend.prepare((blocks, min(TURNS, -(-self.m // 64)), 1), 256, given))
        return found

    def _slice(
        self, rows: int, weight: Weight, x: int, ldx: int, y: int, ldy: int, bias: int | None, *scratch: int
    ) -> list[Launch]:
        """The launches for so many rows of the weight."""
        raise NotImplementedError

    def _product(
        self, rows: int, x: int, ldx: int, y: int, ldy: int, values: TensorMap, scales: TensorMap, args: Any
    ) -> Launch:
        """The launch of the product. values, scales: maps of A and its scales."""
        m, tile, none = self.m, self.tile, TensorMap()
        staged = self.dtype.itemsize == 2 and ldy % 8 == 0 and y % 16 == 0
        function = fp8_matmul.loaded(self._variant(staged), self.device)
        make = driver().tensor_map
        box = 1, tile.columns // tile.share[0], plans.WIDTH
        of_x = make(x, "bfloat16", (1, m, self.k), (m * ldx, ldx), box, 128)
        box = 1, tile.columns // tile.parts, 64
        out = make(y, self.out_dtype, (1, m, rows), (m * ldy, ldy), box, 128) if staged else none
        tiles = -(-rows // (tile.rows * tile.share[0])) * -(-m // (tile.columns * tile.share[1]))
        grid = fp8_matmul.grid_of(function, tile, tiles, self.processors), 1, 1
        return function.prepare(grid, tile.threads, (values, of_x, scales, none, out, args), 0, tile.cluster, tile.dependent)

    def _variant(self, staged: bool) -> Variant:
        return plans.variant_of(self.form, self.tile, self.out_dtype, self.bias_dtype, staged)


class DecodedProduct(_Codes):
    """A pass over each slice of the weight that decodes it to global memory, and its product."""

    def __init__(
        self, a: Any, b: ScaledTensor, bias: Any, out_dtype: str, tile: Tile | None = None, rows: int | None = None
    ) -> None:
        super().__init__(a, b, bias, out_dtype, tile, rows)
        self.decode = self._function("decode")
        # Rows of scales begin at multiples of 16 bytes.
        self.levels, self.pitch = self.form.levels(self.k), -(-self.slices[0][1] // 4) * 4

    def _form(self, block: Any) -> Form | str:
        return plans.form_of(self.operand, block)

    def _tile(self) -> Tile:
        return plans.tile_of(self.form, self.slices[0][1], self.m, self.k, self.processors)

    def _scratch(self) -> list[Any]:
        values = empty((self.slices[0][1], self.k), torch.bfloat16, self.device)
        return [values, empty((self.levels, self.pitch), torch.float32, self.device)]

    def _slice(
        self, rows: int, weight: Weight, x: int, ldx: int, y: int, ldy: int, bias: int | None, *scratch: int
    ) -> list[Launch]:
        (values, scales), k, tile, make = scratch, self.k, self.tile, driver().tensor_map
        blocks, chunks = -(-rows // weight_plans.ROWS), -(-k // weight_plans.COLUMNS)
        numbers = map(ctypes.c_int, (rows, k, self.pitch, self.levels, CHUNKS))
        given = [weight, ctypes.c_void_p(values), ctypes.c_void_p(scales), *numbers]
        decode = self.decode.prepare((blocks, -(-chunks // CHUNKS), 1), 128, given)
        box = 1, tile.rows // tile.share[1], plans.WIDTH
        codes, of_scales = make(values, "bfloat16", (1, rows, k), (rows * k, k), box, 128), TensorMap()
        if self.form.scales == ROWS:
            shape, box = (1, self.levels, rows), (1, self.form.pieces, tile.rows)
            of_scales = make(scales, "float32", shape, (self.levels * self.pitch, self.pitch), box)
        args = fp8_matmul.Args(scales, None, bias, y, None, 0, 0, ldy, 0, rows, self.m, k, 1, 1, 0, 0, 0)
        return [decode, self._product(rows, x, ldx, y, ldy, codes, of_scales, args)]


class OverlappedProduct(_Codes):
    """One launch, which decodes the weight to shared memory while tensor cores multiply."""

    def _form(self, block: Any) -> Form | str:
        return plans.overlapped_form_of(self.operand)

    def _tile(self) -> Tile:
        return plans.overlapped_tile_of(self.form, self.n, self.m, self.k, self.processors)

    def _variant(self, staged: bool) -> Variant:
        return plans.overlapped(super()._variant(staged), self.operand)

    def _slice(
        self, rows: int, weight: Weight, x: int, ldx: int, y: int, ldy: int, bias: int | None, *scratch: int
    ) -> list[Launch]:
        args = Args(None, None, bias, y, None, 0, 0, ldy, 0, rows, self.m, self.k, 1, 0, 0, 0, 0, weight)
        return [self._product(rows, x, ldx, y, ldy, TensorMap(), TensorMap(), args)]
