"""Casts in a few lines of plain torch, as a user would write them first, for eager torch and for torch.compile.

They take only finite nonzero numbers in whole blocks. torch does not convert to 4-bit and 6-bit codes, so these are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_work import SCALE
from rivals import TILES

Array = Any

E4M3, E8M0, F16, F32, U8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float16, torch.float32, torch.uint8
#: Length of a block along the contraction axis; 0 for the whole axis.
BLOCKS = {
    "fp8_block": 128,
    "fp8_row": 0,
    "mxfp8": 32,
    "mxfp6": 32,
    "mxfp4": 32,
    "nvfp4": 16,
    "int4": 128,
    "int8": 0,
}  # fmt: skip
#: Magnitudes of the codes, in order.
MAGNITUDES = {
    "mxfp6": [n / 8 for n in range(8)] + [2**e * (1 + n / 8) for e in (0, 1, 2) for n in range(8)],
    "mxfp4": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
MAGNITUDES["nvfp4"] = MAGNITUDES["mxfp4"]


class Formulas:
    """Casts under each recipe, and their inverse. dtype: of decoded values.

    A cast returns (recipe, codes, scale, ...). `dequantize` does not decode casts down the columns.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.supplied = torch.tensor(SCALE, device=device)
        self.tables: dict[str, Array] = {}
        self.middles: dict[str, Array] = {}
        for recipe, values in MAGNITUDES.items():
            table = torch.tensor(values, device=device)
            # Boundaries between codes. `bucketize` rounds a tie down, so where the even code is the upper one, the boundary is
            # the next smaller float.
            middles = (table[1:] + table[:-1]) / 2
            middles[1::2] = torch.nextafter(middles[1::2], torch.zeros((), device=device))
            self.tables[recipe], self.middles[recipe] = torch.cat([table, -table]), middles

    # -- codes -------------------------------------------------------------------------------------------------------

    def _codes(self, y: Array, recipe: str) -> Array:
        sign = torch.signbit(y).to(U8) << (5 if recipe == "mxfp6" else 3)
        return torch.bucketize(y.abs(), self.middles[recipe], out_int32=True).to(U8) | sign

    @staticmethod
    def _packed(codes: Array, shape: Any, axis: int) -> Array:
        """Two codes of 4 bits in each byte, along the axis."""
        nibbles = codes.reshape(shape)
        low, high = (nibbles[:, 0::2], nibbles[:, 1::2]) if axis == -1 else (nibbles[0::2], nibbles[1::2])
        return low | high << 4

    @staticmethod
    def _packed_6(codes: Array, shape: Any, axis: int) -> Array:
        """Four codes of 6 bits in each three bytes, along the axis."""
        m, n = shape
        each = codes.reshape((m, n // 4, 4) if axis == -1 else (m // 4, 4, n)).to(torch.int32)
        a, b, c, d = each.unbind(-1 if axis == -1 else 1)
        word = a | b << 6 | c << 12 | d << 18
        parts = [((word >> shift) & 255).to(U8) for shift in (0, 8, 16)]
        if axis == -1:
            return torch.stack(parts, -1).reshape(m, n // 4 * 3)
        return torch.stack(parts, 1).reshape(m // 4 * 3, n)

    # -- casts -------------------------------------------------------------------------------------------------------

    def cast(self, recipe: str) -> Callable[[Array], Any]:
        return self._cast(recipe, -1)

    def down(self, recipe: str) -> Callable[[Array], Any]:
        return self._cast(recipe, -2)

    def pair(self, recipe: str) -> Callable[[Array], Any]:
        along, down = self._cast(recipe, -1), self._cast(recipe, -2)
        return lambda x: (along(x), down(x))

    def recorded(self, recipe: str) -> Callable[[Array], Any]:
        cast = {"fp8_delayed": self._delayed}[recipe]
        return lambda x: (cast(x), x.abs().max().to(F32))

    def amax(self, recipe: str) -> Callable[[Array], Any]:
        return {"fp8_delayed": lambda x: x.abs().max().to(F32)}[recipe]

    def _cast(self, recipe: str, axis: int) -> Callable[[Array], Any]:
        """Raises KeyError for a recipe without formulas."""
        whole = {"fp8_current": self._current, "fp8_delayed": self._delayed, TILES: self._tiles}
        if recipe in whole:
            return whole[recipe]
        length = BLOCKS[recipe]
        return lambda x: self._blocks(x, recipe, length, axis)

    def _current(self, x: Array) -> Any:
        scale = x.abs().max().to(F32) / 448
        return "fp8_current", (x.to(F32) / scale).to(E4M3), scale

    def _delayed(self, x: Array) -> Any:
        return "fp8_delayed", (x.to(F32) / self.supplied).clamp(-448, 448).to(E4M3), self.supplied

    def _tiles(self, x: Array) -> Any:
        b = x.to(F32).reshape(x.shape[0] // 128, 128, -1, 128)
        scale = b.abs().amax((1, 3), keepdim=True) / 448
        return TILES, (b / scale).to(E4M3).reshape(x.shape[0], -1), scale

    def _blocks(self, x: Array, recipe: str, length: int, axis: int) -> Any:
        m, n = x.shape
        b = x.to(F32).reshape((m, -1, length or n) if axis == -1 else (-1, length or m, n))
        amax = b.abs().amax(-1 if axis == -1 else 1, keepdim=True)
        match recipe:
            case "fp8_block" | "fp8_row":
                scale = amax / 448
                return recipe, (b / scale).to(E4M3).reshape(m, n), scale
            case "mxfp8":
                scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
                return recipe, (b / scale).to(E4M3).reshape(m, n), scale.to(E8M0)
            case "mxfp4" | "mxfp6":
                scale = torch.exp2(torch.ceil(torch.log2(amax / MAGNITUDES[recipe][-1])))
                packed = self._packed if recipe == "mxfp4" else self._packed_6
                return recipe, packed(self._codes(b / scale, recipe), (m, n), axis), scale.to(E8M0)
            case "nvfp4":
                tensor = amax.max() / 2688
                scale = (amax / 6 / tensor).to(E4M3)
                codes = self._codes(b / (scale.to(F32) * tensor), recipe)
                return recipe, self._packed(codes, (m, n), axis), scale, tensor
            case "int4":
                scale = (amax / 7).to(F16)
                codes = torch.round(b / scale.to(F32)).to(torch.int8)
                return recipe, self._packed(codes.view(U8) & 15, (m, n), axis), scale
            case _:
                scale = amax / 127
                return recipe, torch.round(b / scale).to(torch.int8).reshape(m, n), scale

    # -- decoding ----------------------------------------------------------------------------------------------------

    def dequantize(self, cast: Any) -> Array:
        """The values of a cast along the rows."""
        recipe, data, scale, *tensor = cast
        m = data.shape[0]
        scale = scale.to(F32)
        if recipe in self.tables:
            scale = scale * tensor[0] if tensor else scale
            codes = (self._unpacked_6 if recipe == "mxfp6" else self._unpacked)(data, BLOCKS[recipe])
            return (self.tables[recipe][codes.int()] * scale).reshape(m, -1).to(self.dtype)
        if recipe == "int4":
            codes = (self._unpacked(data, BLOCKS[recipe]) ^ 8).to(F32) - 8
            return (codes * scale).reshape(m, -1).to(self.dtype)
        if recipe == TILES:
            data = data.reshape(m // 128, 128, -1, 128)
        elif recipe in BLOCKS:
            data = data.reshape(m, -1, BLOCKS[recipe] or data.shape[1])
        return (data.to(F32) * scale).reshape(m, -1).to(self.dtype)

    @staticmethod
    def _unpacked(data: Array, length: int) -> Array:
        return torch.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1, length)

    @staticmethod
    def _unpacked_6(data: Array, length: int) -> Array:
        a, b, c = data.reshape(data.shape[0], -1, 3).to(torch.int32).unbind(-1)
        word = a | b << 8 | c << 16
        codes = torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], -1)
        return codes.reshape(data.shape[0], -1, length)
