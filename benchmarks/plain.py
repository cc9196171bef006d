"""The formats in a few lines of NumPy with ml_dtypes, torch or JAX, as a user would write them first: the baselines of casts.

amax, scale, divide, convert, pack. Only finite nonzero numbers in whole blocks; no exact quotients. A library without a format
of 4 or 6 bits looks its codes up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
Cast = Callable[[Array], Any]

#: The spec of FP8 with one scale per 128x128 tile.
TILES = "fp8_block,block_m=128"
#: The supplied scale of fp8_delayed. Standard normal numbers stay below 448 times it.
SCALE = 1 / 64
#: Magnitudes of codes, in order.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M3 = [n / 8 for n in range(8)] + [2**e * (1 + n / 8) for e in (0, 1, 2) for n in range(8)]
#: The numbers of NF4 (QLoRA, arXiv 2305.14314, appendix E).
_BELOW = (-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0)
_ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1)
NF4 = np.array((*_BELOW, *_ABOVE), np.float32)


@dataclass(frozen=True)
class Format:
    """codes: their name. block: numbers that share a scale; 0 for a row, -1 for the tensor, -2 for a tile.

    top: the largest code. scale: "real", "power" of two, "half" precision, "levels" of blocks and the tensor, or "given".
    """

    codes: str
    block: int
    top: float
    scale: str = "real"


FORMATS = {
    "fp8_current": Format("e4m3", -1, 448),
    "fp8_delayed": Format("e4m3", -1, 448, "given"),
    "fp8_row": Format("e4m3", 0, 448),
    "fp8_block": Format("e4m3", 128, 448),
    TILES: Format("e4m3", -2, 448),
    "mxfp8": Format("e4m3", 32, 448, "power"),
    "mxfp6": Format("e2m3", 32, 7.5, "power"),
    "mxfp4": Format("e2m1", 32, 6, "power"),
    "mxint8": Format("i1.6", 32, 127 / 64, "power"),
    "nvfp4": Format("e2m1", 16, 6, "levels"),
    "int4": Format("i4", 128, 7, "half"),
    "int4,symmetric=false,signed=false": Format("u4", 128, 15, "half"),
    "int8": Format("i8", 0, 127),
    "nf4": Format("nf4", 64, 1),
}


class Plain:
    """Casts of matrices along the rows (axis -1) or the columns (axis -2), and the inverse of those along the rows.

    A cast is (recipe, codes, scale, ...). Subclasses have one library's functions, and the codes that they can write.
    """

    xp: Any
    #: Dtypes by name.
    dtypes: dict[str, Any]
    codes: tuple[str, ...] = ("e4m3", "e2m1", "i4")
    #: Recipes of these codes that nobody casts under here.
    unused: tuple[str, ...] = ("fp8_delayed", TILES)

    @classmethod
    def recipes(cls) -> list[str]:
        return [name for name, fmt in FORMATS.items() if fmt.codes in cls.codes and name not in cls.unused]

    # -- what libraries do differently

    def to(self, x: Array, dtype: str) -> Array:
        return x.astype(self.dtypes[dtype])

    def largest(self, x: Array, axes: Any) -> Array:
        return x.max(axis=axes, keepdims=True)

    def quotient(self, x: Array, scale: Array, top: float) -> Array:
        return x / scale

    def power_of_two(self, x: Array) -> tuple[Array, Array]:
        """(the least power of two that is not below, the E8M0 number that stands for it)."""
        power = self.xp.exp2(self.xp.ceil(self.xp.log2(x)))
        return power, self.to(power, "e8m0")

    def encoded(self, y: Array, codes: str) -> Array:
        """Codes of numbers, one per element."""
        if codes == "i4":
            return self.to(self.xp.round(y), "i8").view(self.dtypes["u8"]) & 15
        return self.to(self.xp.round(y), "i8") if codes == "i8" else self.to(y, codes)

    def packed(self, codes: Array, shape: Any, axis: int) -> Array:
        """Two codes of 4 bits in each byte, along the axis."""
        nibbles = codes.reshape(shape)
        low, high = (nibbles[:, 0::2], nibbles[:, 1::2]) if axis == -1 else (nibbles[0::2], nibbles[1::2])
        return low | high << 4

    # -- casts

    def cast(self, recipe: str, axis: int = -1) -> Cast:
        """Raises KeyError for a recipe that is not in `recipes`."""
        fmt = {name: FORMATS[name] for name in self.recipes()}[recipe]
        return lambda x: self._cast(self.to(x, "f32"), recipe, fmt, axis)

    def _cast(self, x: Array, recipe: str, fmt: Format, axis: int) -> Any:
        b, axes = self.blocks(x, fmt.block, axis)
        if fmt.codes == "u4":
            return self._asymmetric(b, axes, x.shape, recipe, axis)
        scale, factor, *more = self.scales(b, axes, fmt)
        codes = self.encoded(self.quotient(b, factor, fmt.top), fmt.codes)
        small = fmt.codes in ("e2m1", "e2m3", "i4", "nf4")
        return recipe, self.packed(codes, x.shape, axis) if small else codes.reshape(x.shape), scale, *more

    def blocks(self, x: Array, block: int, axis: int) -> tuple[Array, Any]:
        """(the matrix with its blocks along axes of their own, these axes)."""
        m, n = x.shape
        if block == -1:
            return x, (0, 1)
        if block == -2:
            return x.reshape(m // 128, 128, -1, 128), (1, 3)
        return (x.reshape(m, -1, block or n), 2) if axis == -1 else (x.reshape(-1, block or m, n), 1)

    def scales(self, b: Array, axes: Any, fmt: Format) -> Any:
        """(the stored scale, the number to divide by, further components)."""
        if fmt.scale == "given":
            return self.supplied, self.supplied
        amax = self.largest(self.xp.abs(b), axes)
        amax = amax.reshape(()) if fmt.block == -1 else amax
        if fmt.scale == "levels":
            tensor = amax.max() / (448 * fmt.top)
            scale = self.to(amax / fmt.top / tensor, "e4m3")
            return scale, self.to(scale, "f32") * tensor, tensor
        if fmt.scale == "power":
            factor, scale = self.power_of_two(amax / fmt.top)
            return scale, factor
        scale = self.to(amax / fmt.top, "f16") if fmt.scale == "half" else amax / fmt.top
        return scale, self.to(scale, "f32")

    def _asymmetric(self, b: Array, axes: Any, shape: Any, recipe: str, axis: int) -> Any:
        xp = self.xp
        low, high = (xp.minimum(b.min(axis=axes, keepdims=True), 0), xp.maximum(b.max(axis=axes, keepdims=True), 0))
        scale = self.to((high - low) / 15, "f16")
        inverse = 1 / self.to(scale, "f32")
        zero = xp.clip(xp.round(-low * inverse), 0, 15)
        codes = self.to(xp.clip(xp.round(b * inverse) + zero, 0, 15), "u8")
        return recipe, self.packed(codes, shape, axis), scale, self.to(zero, "u8")

    # -- decoding

    def decoded(self, data: Array, codes: str, block: int) -> Array:
        """The numbers that codes of 4 bits stand for, in blocks."""
        nibbles = self.xp.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1, block)
        if codes == "i4":
            return self.to(nibbles ^ 8, "f32") - 8
        return self.to(nibbles.view(self.dtypes[codes]), "f32")

    def dequantize(self, cast: Any) -> Array:
        """The values of a cast along the rows."""
        recipe, data, scale, *tensor = cast
        fmt, m = FORMATS[recipe], data.shape[0]
        factor = self.to(scale, "f32")
        factor = factor * tensor[0] if tensor else factor
        if fmt.codes in ("e2m1", "e2m3", "i4"):
            return (self.decoded(data, fmt.codes, fmt.block) * factor).reshape(m, -1)
        return (self.to(self.blocks(data, fmt.block, -1)[0], "f32") * factor).reshape(m, -1)


class InNumPy(Plain):
    def __init__(self) -> None:
        import ml_dtypes as ml

        self.xp = np
        self.dtypes = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "u8": np.uint8}
        self.dtypes |= {"e4m3": ml.float8_e4m3fn, "e2m1": ml.float4_e2m1fn, "e8m0": ml.float8_e8m0fnu}

    def encoded(self, y: Array, codes: str) -> Array:
        return y.astype(self.dtypes[codes]).view(np.uint8) if codes == "e2m1" else super().encoded(y, codes)


class InTorch(Plain):
    """torch does not convert to 4-bit and 6-bit codes, so these are looked up. dtype: of decoded values."""

    codes = ("e4m3", "e2m1", "e2m3", "i4", "i8")
    unused = ()

    def __init__(self, device: str = "cpu", dtype: Any = None) -> None:
        import torch

        self.xp, self.dtype = torch, dtype or torch.float32
        self.dtypes = {"f32": torch.float32, "f16": torch.float16, "i8": torch.int8, "u8": torch.uint8}
        self.dtypes |= {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
        self.supplied = torch.tensor(SCALE, device=device)
        self.tables: dict[str, Array] = {}
        self.middles: dict[str, Array] = {}
        for codes, values in (("e2m1", E2M1), ("e2m3", E2M3)):
            table = torch.tensor(values, device=device)
            # Boundaries between codes. `bucketize` rounds a tie down, so where the even code is the upper one, the boundary is
            # the next smaller float.
            middles = (table[1:] + table[:-1]) / 2
            middles[1::2] = torch.nextafter(middles[1::2], torch.zeros((), device=device))
            self.tables[codes], self.middles[codes] = torch.cat([table, -table]), middles

    def to(self, x: Array, dtype: str) -> Array:
        return x.to(self.dtypes[dtype])

    def largest(self, x: Array, axes: Any) -> Array:
        return x.amax(axes, keepdim=True)

    def encoded(self, y: Array, codes: str) -> Array:
        if codes not in self.tables:
            return super().encoded(y, codes)
        sign = self.to(self.xp.signbit(y), "u8") << (5 if codes == "e2m3" else 3)
        found = self.to(self.xp.bucketize(y.abs(), self.middles[codes], out_int32=True), "u8") | sign
        return self.to(found, "i8") if codes == "e2m3" else found

    def packed(self, codes: Array, shape: Any, axis: int) -> Array:
        """Those of 6 bits, which are signed here, are packed four in three bytes."""
        torch = self.xp
        if codes.dtype != torch.int8:
            return super().packed(codes, shape, axis)
        m, n = shape
        each = codes.reshape((m, n // 4, 4) if axis == -1 else (m // 4, 4, n)).to(torch.int32)
        a, b, c, d = each.unbind(-1 if axis == -1 else 1)
        word = a | b << 6 | c << 12 | d << 18
        parts = [self.to((word >> shift) & 255, "u8") for shift in (0, 8, 16)]
        return torch.stack(parts, -1).reshape(m, -1) if axis == -1 else torch.stack(parts, 1).reshape(-1, n)

    def decoded(self, data: Array, codes: str, block: int) -> Array:
        if codes == "i4":
            return super().decoded(data, codes, block)
        nibbles = self.xp.stack([data & 15, data >> 4], -1)
        if codes == "e2m3":
            a, b, c = data.reshape(data.shape[0], -1, 3).to(self.xp.int32).unbind(-1)
            word = a | b << 8 | c << 16
            nibbles = self.xp.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], -1)
        return self.tables[codes][nibbles.reshape(data.shape[0], -1, block).int()]

    def dequantize(self, cast: Any) -> Array:
        return super().dequantize(cast).to(self.dtype)


class InJax(Plain):
    """Of JAX, under `jax.jit`. It has no 6-bit dtype."""

    codes = ("e4m3", "e2m1", "i4", "u4", "i8", "i1.6", "nf4")

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.xp, self.bitcast = jnp, jax.lax.bitcast_convert_type
        self.dtypes = {"f32": jnp.float32, "f16": jnp.float16, "i8": jnp.int8, "u8": jnp.uint8}
        self.dtypes |= {"e4m3": jnp.float8_e4m3fn, "e2m1": jnp.float4_e2m1fn}

    def quotient(self, x: Array, scale: Array, top: float) -> Array:
        return self.xp.clip(x * (1 / scale), -top, top)

    def power_of_two(self, x: Array) -> tuple[Array, Array]:
        bits = self.bitcast(x, self.xp.int32)
        exponent = self.xp.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 0, 254)
        return self.bitcast(exponent << 23, self.xp.float32), self.to(exponent, "u8")

    def encoded(self, y: Array, codes: str) -> Array:
        if codes == "nf4":
            return sum(self.to(y > middle, "u8") for middle in (NF4[1:] + NF4[:-1]) / 2)
        return self.to(self.xp.round(y * 64), "i8") if codes == "i1.6" else super().encoded(y, codes)

    def packed(self, codes: Array, shape: Any, axis: int) -> Array:
        pairs = codes.reshape(shape[0], -1, 2) if axis == -1 else codes.reshape(-1, 2, shape[1]).swapaxes(1, 2)
        if pairs.dtype == self.dtypes["e2m1"]:
            return self.bitcast(pairs, self.xp.uint8)
        return pairs[..., 0] | pairs[..., 1] << 4
