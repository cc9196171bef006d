"""GGUF: blocks of codes with their scales, of llama.cpp.

A block has its scales before or after its codes. Where codes have more bits than one of its fields, another field has the high
ones. `KINDS` says where everything is; reading puts codes into breccia's order, and scales beside each other, bit for bit, and
writing puts them back:

    Q4_0, Q5_0, Q8_0          an F16 scale for 32 signed codes, stored without a sign
    Q4_1, Q5_1                an F16 scale and an F16 bias for 32 codes
    Q2_K, Q4_K, Q5_K          256 codes: F16 d and dmin, and for each 16 or 32 codes a scale and a minimum in 4 or 6 bits;
                              a value is d * scale * code - dmin * minimum
    Q3_K, Q6_K                256 codes: F16 d, and for each 16 codes a signed scale of 6 or 8 bits
    IQ4_NL, IQ4_XS            codes of a table; an F16 scale for 32, or d for 256 and signed scales of 6 bits for 32
    TQ1_0, TQ2_0              -1, 0, 1 with an F16 scale for 256; five codes in a byte, which become 2 bits each, or four
    MXFP4, NVFP4              E2M1, with E8M0 for 32, or E4M3 for 16 of 64; a tensor `scale` beside NVFP4 multiplies all values

Source: ggml-common.h and ggml-quants.c of ggml, gguf 0.19 (gguf.quants).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from breccia import Format, ScaledTensor, ScalingRecipe, UnsupportedError, from_buffer, recipe
from breccia.backend import NUMPY, Entry, StoredForm, StoredValue, ValueForm, components

from ..gguf_types import NAMED, TRANSPOSED
from .gguf_codes import Codes, HalfBytes, Nibbles, Plane, Planes, Sixes, Trits, items
from .scales import check_scale

#: Bytes of blocks that are rearranged at a time: their codes, one a byte, stay in a core's cache.
_PIECE = 1 << 18


@dataclass(frozen=True)
class Scales:
    """The scales, or biases, of a block: floats in `field`, and behind them `count` codes of scales.

    dtype: of the floats. is_negated: whether the sign of a bias is to be turned.
    """

    field: slice
    codes: Codes | None = None
    count: int = 0
    dtype: str = "F16"
    is_negated: bool = False

    @property
    def floats(self) -> int:
        """The bytes of its floats."""
        return self.field.stop - self.field.start

    @property
    def width(self) -> int:
        """Its bytes for a block."""
        return self.floats + (0 if self.codes is None else self.count * self.codes.bits // 8)


@dataclass(frozen=True)
class Kind:
    """A type of blocks. spec: of the recipe that holds it. scale, bias: what is beside codes."""

    spec: str
    codes: Codes
    scale: Scales
    bias: Scales | None = None


#: A recipe whose global scale is the tensor `scale` beside NVFP4.
_WITH_SCALE = "nvfp4"


def form(value: StoredValue) -> ValueForm:
    """What the type of a tensor says."""
    entry = value.entries[_blocks(value)]
    kind = KINDS.get(entry.dtype)
    if kind is None:
        raise UnsupportedError(
            f"it is {entry.dtype}; breccia reads {', '.join(KINDS)}. Quantize the model that it was made from to one of these.",
            type=entry.dtype,
        )
    is_transposed = value.metadata.get(value.name) == TRANSPOSED
    if "scale" not in value:
        return ValueForm(recipe(kind.spec), entry.shape, is_transposed=is_transposed)
    if entry.dtype != "NVFP4":
        raise UnsupportedError(f"its values are multiplied by a scale of the tensor, for which {entry.dtype} has no place.")
    value.need_shape("scale", (), (1,))
    return ValueForm(recipe(_WITH_SCALE), entry.shape, is_transposed=is_transposed)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales, in breccia's order."""
    end = _blocks(value)
    data, scale, bias = rearranged(value, value[end], value.entries[end].dtype)
    lead = form.shape[:-1]
    element = form.recipe.format.element
    parts = [None if part is None else part.reshape(*lead, -1) if part.size else part for part in (scale, bias)]
    codes = data.view(NUMPY.storage(element)).reshape(*lead, -1) if data.size else data
    of_tensor = None
    if "scale" in value:
        check_scale(value, "scale", of_tensor := value["scale"].reshape(()))
    return from_buffer(codes, parts[0], form.recipe, form.fitted_layout, parts[1], of_tensor, shape=form.shape)


def stored(form: ValueForm) -> StoredForm:
    """The type whose blocks hold a form; two types have the format of TQ1_0 and TQ2_0, of which the recipe names one."""
    types = _types(form.recipe.format)
    if not types:
        raise UnsupportedError(
            f"GGUF has no type for {form.recipe.spec!r}; the nearest recipe that it has is {_nearest(form.recipe)!r}.",
            recipe=form.recipe.spec,
        )
    if form.is_transposed:
        raise UnsupportedError("its blocks run down the columns of the weight; those of GGUF run along rows, its last axis.")
    name = next((name for name in types if recipe(KINDS[name].spec) == form.recipe), types[0])
    length = NAMED[name].length
    if not form.shape or form.shape[-1] % length:
        raise UnsupportedError(
            f"{name} has whole blocks of {length} elements, which do not divide the last axis of {list(form.shape)}. Choose "
            f"another recipe for it: {_that_fits(form.shape)}.",
            shape=form.shape,
            type=name,
        )
    if form.fitted_layout != form.recipe.layout.fitted(form.shape):
        raise UnsupportedError(
            f"{name} has the scales of blocks in their order; this tensor has the layout {form.fitted_layout!r}. Quantize it "
            f"again under {form.recipe.spec!r}.",
            layout=form.fitted_layout,
        )
    entry = Entry(name, form.shape)
    if form.recipe.format.global_scale is None:
        return StoredForm({"": entry})
    if len(form.shape) > 2:
        raise UnsupportedError(
            f"{list(form.shape)} is a stack, and GGUF has a scale of NVFP4 for each of its matrices, where this tensor has one "
            "scale for all. Quantize them one by one, or under 'nvfp4,two_level=false'.",
            shape=form.shape,
        )
    return StoredForm({"weight": entry, "scale": Entry("F32", (1,))})


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Rows of blocks, as bytes, and the scale beside NVFP4.

    Raises UnsupportedError for scales that are NaN or Inf, which readers refuse or ggml decodes as other numbers, for negative
    ones of NVFP4, for several global scales, and for codes that TQ1_0 lacks.
    """
    end = next(iter(stored.entries))
    parts = components(st)
    written = {end: blocks_of(stored.entries[end].dtype, parts, st.shape)}
    if "scale" in stored.entries:
        scale = np.asarray(parts["global_scale"], np.float32)
        if scale.size != 1 or not np.isfinite(scale).all():
            raise UnsupportedError(f"GGUF has one finite scale of a tensor of NVFP4; this one has {scale.reshape(-1)[:4]}.")
        written["scale"] = scale.reshape(1)
    return written


def _blocks(value: StoredValue) -> str:
    """The end of the name of its blocks."""
    return "weight" if "weight" in value else ""


@cache
def _types(of: Format) -> tuple[str, ...]:
    """The types whose blocks have a format; first the one that programs multiply faster."""
    specs = [(name, kind.spec) for name, kind in reversed(KINDS.items())] + [("NVFP4", _WITH_SCALE)]
    return tuple(name for name, spec in specs if recipe(spec).format == of)


def _nearest(other: ScalingRecipe) -> str:
    """The spec of a type with the same elements as another recipe, or of as many bits."""
    of = other.format
    specs = [*(kind.spec for kind in KINDS.values()), _WITH_SCALE]

    def distance(spec: str) -> tuple[bool, int, bool, int]:
        one = recipe(spec).format
        sizes = [format.scale.block[1] or 0 for format in (one, of)]
        return (
            one.element != of.element,
            abs(one.element.bits - of.element.bits),
            one.offset != of.offset,
            abs(sizes[0] - sizes[1]),
        )

    return min(specs, key=distance)


def _that_fits(shape: tuple[int, ...]) -> str:
    """What is possible for a shape whose last axis blocks do not divide."""
    last = shape[-1] if shape else 1
    return "one with blocks of 32, such as 'int8,group_size=32,scale_dtype=fp16'" if last % 32 == 0 else "'bf16' or 'fp16'"


# ------------------------------------------------------------------------------------------------ blocks


def rearranged(value: StoredValue, array: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The codes of blocks of a type, packed; their scales, and biases if they have them: a row for each block.

    Raises DialectError for scales that are NaN or Inf.
    """
    kind = KINDS[name]
    _, length, size, _ = NAMED[name]
    blocks = np.ascontiguousarray(array).reshape(array.size // size, size)
    data = np.empty((len(blocks), length * kind.codes.bits // 8), np.uint8)
    scale = np.empty((len(blocks), kind.scale.width), np.uint8)
    bias = None if kind.bias is None else np.empty((len(blocks), kind.bias.width), np.uint8)
    step = max(1, _PIECE // size)
    for start in range(0, len(blocks), step):
        at = slice(start, start + step)
        piece = blocks[at]
        kind.codes.read(data[at], piece)
        _read_scales(value, scale[at], piece, kind.scale)
        if kind.bias is not None and bias is not None:
            _read_scales(value, bias[at], piece, kind.bias)
    return data, _typed(scale, kind.scale), None if bias is None or kind.bias is None else _typed(bias, kind.bias)


def blocks_of(name: str, parts: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Rows of blocks of a type from the components of a tensor: the inverse of `rearranged`."""
    kind = KINDS[name]
    _, length, size, _ = NAMED[name]
    rows = (*shape[:-1], shape[-1] // length * size)
    blocks = np.zeros((int(np.prod(rows)) // size, size), np.uint8)
    data = _as_bytes(parts["data"], length * kind.codes.bits // 8)
    scale = _as_bytes(parts["scale"], kind.scale.width)
    bias = None if kind.bias is None else _as_bytes(parts["zero_point"], kind.bias.width)
    step = max(1, _PIECE // size)
    for start in range(0, len(blocks), step):
        at = slice(start, start + step)
        if name == "TQ1_0":
            _check_trits(data[at])
        kind.codes.write(blocks[at], data[at])
        _write_scales(blocks[at], scale[at], kind.scale)
        if kind.bias is not None and bias is not None:
            _write_scales(blocks[at], bias[at], kind.bias)
    return blocks.reshape(rows)


def _as_bytes(array: np.ndarray, width: int) -> np.ndarray:
    """A component, with the bytes of a block in a row."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, width)


def _check_trits(data: np.ndarray) -> None:
    """Refuse the code of 2, of which ggml's table has three more than digits of base 3."""
    count = int(np.count_nonzero(np.bitwise_count(data & data >> np.uint8(1) & np.uint8(0x55))))
    if count:
        raise UnsupportedError(f"{count} bytes have codes of 2, for which TQ1_0 has no place; store it as 'gguf,type=TQ2_0'.")


def _read_scales(value: StoredValue, out: np.ndarray, blocks: np.ndarray, part: Scales) -> None:
    """Write what is beside the codes of blocks. Raises DialectError for floats that are no numbers."""
    floats = blocks[:, part.field]
    bad = int(np.count_nonzero(_is_bad(floats, part.dtype)))
    value.need(bad == 0, f"{_of_scales(bad)} NaN or Inf. Quantize the model that it was made from again.", count=bad)
    items(out, slice(part.floats))[:] = items(blocks, part.field)
    if part.dtype == "UE4M3":  # where ggml decodes the code of NaN as 0
        out[out == 0x7F] = 0
    if part.is_negated:
        out[:, 1] ^= np.uint8(0x80)
    if part.codes is not None:
        part.codes.read(out[:, part.floats :], blocks)


def _write_scales(blocks: np.ndarray, scales: np.ndarray, part: Scales) -> None:
    """Set what is beside the codes of blocks: the inverse of `_read_scales`."""
    floats = scales[:, : part.floats]
    bad = int(np.count_nonzero(_is_bad(floats, part.dtype) | (floats == 0x7F if part.dtype == "UE4M3" else False)))
    if bad:
        raise UnsupportedError(
            f"{_of_scales(bad)} NaN or Inf, or negative where GGUF has no sign. Quantize the model again.", count=bad
        )
    items(blocks, part.field)[:] = items(scales, slice(part.floats))
    if part.is_negated:
        blocks[:, part.field.start + 1] ^= np.uint8(0x80)
    if part.codes is not None:
        part.codes.write(blocks, scales[:, part.floats :])


def _of_scales(count: int) -> str:
    return f"{count} of its scales {'is' if count == 1 else 'are'}"


def _is_bad(floats: np.ndarray, dtype: str) -> np.ndarray:
    """Which floats are NaN or Inf, or, of UE4M3, have a sign."""
    if dtype == "F16":
        return (floats[:, 1:] & 0x7C) == 0x7C  # all bits of the exponent are ones
    return floats == 0xFF if dtype == "E8M0" else floats > 0x7F


def _typed(array: np.ndarray, part: Scales) -> np.ndarray:
    """Scales as arrays of their dtype: bytes where codes follow."""
    return array.view(np.float16) if part.dtype == "F16" and part.codes is None else array


# ------------------------------------------------------------------------------------------------ the types


_D, _SECOND = Scales(slice(0, 2)), Scales(slice(2, 4))
_K_SCALE = Scales(slice(0, 2), Sixes(4, 0), 8)
_K_BIAS = Scales(slice(2, 4), Sixes(8, 4), 8, is_negated=True)

KINDS: dict[str, Kind] = {
    "Q4_0": Kind("int4,group_size=32", Nibbles(2, 18, 16, flip=8), _D),
    "Q4_1": Kind("int4,group_size=32,signed=false,symmetric=false,offset=bias", Nibbles(4, 20, 16), _D, _SECOND),
    "Q5_0": Kind("int,bits=5,group_size=32", Planes(Plane(slice(6, 22), 4, 16), Plane(slice(2, 6), 1, 1), flip=16), _D),
    "Q5_1": Kind(
        "int,bits=5,group_size=32,signed=false,symmetric=false,offset=bias",
        Planes(Plane(slice(8, 24), 4, 16), Plane(slice(4, 8), 1, 1)),
        _D,
        _SECOND,
    ),
    "Q8_0": Kind("int8,group_size=32,scale_dtype=fp16", Planes(Plane(slice(2, 34), 8, 32)), _D),
    "Q2_K": Kind(
        "gguf,type=Q2_K",
        Planes(Plane(slice(16, 80), 2, 32)),
        Scales(slice(80, 82), HalfBytes(slice(0, 16), 0), 16),
        Scales(slice(82, 84), HalfBytes(slice(0, 16), 4), 16, is_negated=True),
    ),
    "Q3_K": Kind(
        "gguf,type=Q3_K",
        Planes(Plane(slice(32, 96), 2, 32), Plane(slice(0, 32), 1, 32), flip=4),
        Scales(slice(108, 110), Planes(Plane(slice(96, 104), 4, 8), Plane(slice(104, 108), 2, 4), flip=32), 16),
    ),
    "Q4_K": Kind("gguf,type=Q4_K", Nibbles(16, 144, 32), _K_SCALE, _K_BIAS),
    "Q5_K": Kind("gguf,type=Q5_K", Planes(Plane(slice(48, 176), 4, 32), Plane(slice(16, 48), 1, 32)), _K_SCALE, _K_BIAS),
    "Q6_K": Kind(
        "gguf,type=Q6_K",
        Planes(Plane(slice(0, 128), 4, 64), Plane(slice(128, 192), 2, 32), flip=32),
        Scales(slice(208, 210), Planes(Plane(slice(192, 208), 8, 16)), 16),
    ),
    "IQ4_NL": Kind("gguf,type=IQ4_NL", Nibbles(2, 18, 16), _D),
    "IQ4_XS": Kind(
        "gguf,type=IQ4_XS",
        Nibbles(8, 136, 16),
        Scales(slice(0, 2), Planes(Plane(slice(4, 8), 4, 1), Plane(slice(2, 4), 2, 1), flip=32), 8),
    ),
    "TQ1_0": Kind("gguf,type=TQ1_0", Trits(), Scales(slice(52, 54))),
    "TQ2_0": Kind("gguf,type=TQ2_0", Planes(Plane(slice(0, 64), 2, 32)), Scales(slice(64, 66))),
    "MXFP4": Kind("mxfp4", Nibbles(1, 17, 16), Scales(slice(0, 1), dtype="E8M0")),
    "NVFP4": Kind("nvfp4,two_level=false", Nibbles(4, 36, 8), Scales(slice(0, 4), dtype="UE4M3")),
}
