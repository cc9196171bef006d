"""torchao's tensors in safetensors, as its `flatten_tensor_state_dict` and transformers write them.

`up.weight` has the parts `up._weight_qdata`, `up._weight_scale`, ...; the file's metadata has under "up.weight" its class and
attributes, as JSON. Codes and scales of Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, MXTensor and
NVFP4Tensor are breccia's, in other packings at most, as `breccia.bridges.from_torchao` says it of those in memory. How a layer
quantizes its inputs is not part of the value.

torchao decodes NVFP4 as q · (s · g), q being the code, s the scale of its block and g that of the tensor: the recipe has
`order="scales_first"`.

Source: torchao 0.18.0, prototype/safetensors. Neither it nor torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import DialectError, InStorage, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import E2M1, E2M3, E3M2, NUMPY, Entry, Shape, StoredValue, ValueForm, pack
from breccia.internal import abbreviated, parsed_json

from ..recipes import SignedInt4Scaling
from ..text import spelled
from ..torchao_parts import SWIZZLE, IntegerForm, integer_form, matrix_block, moved, mx_recipe, nvfp4_recipe, unsigned
from ..wrapping import check_padding, float8_recipe
from .fp8 import FORMATS
from .scales import FLOATS, SCALE_DTYPES, assembled, check_scale, widened

#: Classes of torchao whose codes are packed for the kernels of one device.
_OF_DEVICES = ("Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor")
_AGAIN = "Download the checkpoint again, or write it again with torchao's flatten_tensor_state_dict."


def form(value: StoredValue) -> ValueForm:
    """What its class and attributes say. Zero-points are read: integers whose zero-points are all 0 are symmetric."""
    stored = _Stored.of(value)
    return _CLASSES[stored.kind][0](stored)


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as stored. Integers with zero-points become unsigned ones, whose zero-points are moved as much."""
    stored = _Stored.of(value)
    return _CLASSES[stored.kind][1](stored, form)


@dataclass(frozen=True)
class _Stored:
    """A value, with its class and attributes by the file's metadata."""

    value: StoredValue
    kind: str
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, value: StoredValue) -> _Stored:
        """Raises DialectError for metadata that torchao does not write, UnsupportedError for a class that no recipe holds."""
        text = value.metadata.get(value.name)
        if text is None:
            raise DialectError(
                f"the file's metadata has no entry {value.name!r} with the class of the tensor: a program that drops metadata "
                f"wrote the file. {_AGAIN}",
                name=value.name,
            )
        try:
            listed = parsed_json(text)
        except ValueError as e:
            raise DialectError(f"its entry in the file's metadata is not JSON ({e}). {_AGAIN}", name=value.name) from e
        fields: dict[str, Any] = listed if isinstance(listed, dict) else {}
        kind, attributes, names = (fields.get(key) for key in ("_type", "_data", "_tensor_data_names"))
        if not isinstance(kind, str) or not isinstance(attributes, dict) or not isinstance(names, list):
            raise DialectError(
                "its entry in the file's metadata is an object with _type, _data and _tensor_data_names; got "
                f"{short(listed)}. {_AGAIN}",
                name=value.name,
            )
        if kind not in _CLASSES:
            why = "packs codes for the kernels of one device" if kind in _OF_DEVICES else "is none that breccia knows"
            raise UnsupportedError(
                f"its class is torchao's {kind}, which {why}. {', '.join(_CLASSES)} can be read: quantize the original "
                "checkpoint with a config that gives one of them, or convert the original.",
                name=value.name,
                kind=kind,
            )
        stored = cls(value, kind, attributes)
        stored._check_parts(names)
        return stored

    def _check_parts(self, names: list[Any]) -> None:
        value = self.value
        missing = [str(name) for name in names if f"_{name}" not in value.entries]
        others = [end for end in value.entries if end.removeprefix("_") not in names]
        differ = f"no file has {abbreviated(missing)}" if missing else f"the files have {abbreviated(others)}, too"
        value.need(
            not missing and not others,
            f"its entry in the file's metadata lists the parts {abbreviated(list(map(str, names)))}; {differ}. {_AGAIN}",
        )
        if "_act_pre_scale" in value.entries:
            raise UnsupportedError(
                "it has act_pre_scale, by which its layer multiplies the inputs: the weight alone is not that of the model, "
                "and a ScaledTensor has no such factor. Convert the original checkpoint, or quantize it without SmoothQuant "
                "and AWQ.",
                name=value.name,
            )

    @property
    def codes(self) -> Entry:
        entry = self.value.entries["_qdata"]
        self.value.need(
            len(entry.shape) > 1, f"'_qdata' has shape {spelled(entry.shape)}; a weight has two axes or more. {_AGAIN}"
        )
        return entry

    @property
    def scale(self) -> Entry:
        self.value.need("_scale" in self.value.entries, f"a {self.kind} has the part '_scale'. {_AGAIN}")
        return self.value.entries["_scale"]

    def attribute(self, name: str) -> Any:
        self.value.need(
            name in self.attributes,
            f"its {self.kind} has no attribute {name!r}: it is of a version of torchao that breccia does not know. Load the "
            "checkpoint with torchao 0.18 and write it again.",
        )
        return self.attributes[name]

    def block(self) -> list[int]:
        """block_size: the shape of the elements that share a scale; all elements where it is null."""
        block = self.attribute("block_size")
        if block is None and math.prod(self.scale.shape) == 1:
            return list(self.codes.shape)
        if not isinstance(block, list) or not block or any(type(n) is not int or n < 1 for n in block):
            raise DialectError(f"block_size is a list of lengths; got {short(block)}. {_AGAIN}", name=self.value.name)
        return block

    def need_block(self, size: int) -> None:
        block = self.attribute("block_size")
        if block != size:
            raise UnsupportedError(
                f"its {self.kind} has blocks of {short(block)} codes; recipes of this format have {size}. Convert the original "
                "checkpoint.",
                name=self.value.name,
            )

    def dtype(self, name: str) -> str:
        """torch's name of an attribute that is a dtype, an object in JSON; or the attribute's text."""
        item: Any = self.attribute(name)
        item = item.get("_data") if isinstance(item, dict) else item
        self.value.need(isinstance(item, str), f"{name} is a dtype; got {short(self.attributes[name])}. {_AGAIN}")
        return item

    @property
    def is_swizzled(self) -> bool:
        swizzled = self.attribute("is_swizzled_scales")
        self.value.need(isinstance(swizzled, bool), f"is_swizzled_scales is true or false; got {short(swizzled)}. {_AGAIN}")
        return swizzled

    def need_dtype(self, end: str, *dtypes: str) -> str:
        self.value.need(end in self.value.entries, f"a {self.kind} has the part {end!r}. {_AGAIN}")
        dtype = self.value.entries[end].dtype
        self.value.need(dtype in dtypes, f"{end!r} is {dtype}; a {self.kind} has {' or '.join(dtypes)} there. {_AGAIN}")
        return dtype

    def checked_scale(self, end: str = "_scale") -> np.ndarray:
        """Scales as FP32. Raises DialectError if one is NaN or Inf."""
        scale = widened(self.value, end)
        check_scale(self.value, end, scale)
        return scale


def _oriented(stored: _Stored, recipe: ScalingRecipe, axis: int, scales: Shape) -> ValueForm:
    """The form of a tensor, or of its transpose if blocks run along axis -2. scales: their shape, after broadcasting."""
    shape = stored.codes.shape
    form = ValueForm(recipe, shape)
    if axis != -1:
        form = ValueForm(recipe, (*shape[:-2], shape[-1], shape[-2]), is_transposed=True)
    needed = [math.prod(shape) for shape in form.fitted_layout.scale_shapes(form.shape)]
    stored.value.need(
        math.prod(scales) in needed,
        f"its {stored.kind} of shape {spelled(shape)} has block_size {stored.block()}, which needs {needed[0]} scales; "
        f"'_scale' has shape {spelled(stored.scale.shape)}. {_AGAIN}",
    )
    return form


# ------------------------------------------------------------------------------------------------ FP8


def _float8_form(stored: _Stored) -> ValueForm:
    """Codes (..., M, K); a scale per tensor, matrix, row, column or block."""
    fmt, shape = FORMATS[stored.need_dtype("_qdata", *FORMATS)], stored.codes.shape
    stored.need_dtype("_scale", *FLOATS)
    m, k, axis = matrix_block(stored.kind, shape, stored.scale.shape, stored.block())
    return _oriented(stored, float8_recipe(fmt, (m, k)), axis, stored.scale.shape)


def _float8(stored: _Stored, form: ValueForm) -> ScaledTensor:
    scale = stored.checked_scale()
    if form.is_transposed:
        return assembled(form, NUMPY.swap(stored.value["_qdata"]), NUMPY.swap(scale))
    return assembled(form, stored.value.view("_qdata"), scale)


# ------------------------------------------------------------------------------------------------ integers


def _widths(stored: _Stored) -> tuple[int, int]:
    """The width of its codes, which are one to a byte, and the width that a ScaledTensor holds them in."""
    if stored.kind == "Int8Tensor":
        return 8, 8
    name = stored.dtype("target_dtype")
    digits = name.removeprefix("int")
    known = name.startswith("int") and digits in map(str, range(1, 9))
    stored.value.need(known, f"target_dtype is {name!r}; torchao's integers are int1 to int8. {_AGAIN}")
    return int(digits), 4 if digits == "4" else 8


def _integers(stored: _Stored) -> IntegerForm:
    value = stored.value
    stored.need_dtype("_qdata", "I8")
    scale_dtype, asymmetric = SCALE_DTYPES[stored.need_dtype("_scale", *FLOATS)], False
    if "_zero_point" in value.entries:
        stored.need_dtype("_zero_point", "I8", *FLOATS)
        value.need_shape("_zero_point", stored.scale.shape)
        asymmetric = bool(np.any(_zero_points(value) != 0))
    bits, shape = _widths(stored)[1], stored.codes.shape
    return integer_form(stored.kind, bits, shape, stored.scale.shape, stored.block(), scale_dtype, asymmetric)


def _zero_points(value: StoredValue) -> np.ndarray:
    """As int8, or as FP32."""
    return value["_zero_point"] if value.entries["_zero_point"].dtype == "I8" else widened(value, "_zero_point")


def _integer_form(stored: _Stored) -> ValueForm:
    """Codes (..., M, K) in int8; a scale, and maybe a zero-point, per tensor, row, column or group of a row."""
    integers = _integers(stored)
    return _oriented(stored, integers.recipe, integers.axis, integers.scale)


def _integer(stored: _Stored, form: ValueForm) -> ScaledTensor:
    value, integers, (width, bits) = stored.value, _integers(stored), _widths(stored)
    stored.checked_scale()
    asymmetric = integers.recipe.format.offset != "none"
    as_they_are = width == 8 and not asymmetric and not form.is_transposed
    codes = value.view("_qdata") if as_they_are else value["_qdata"]
    if width < 8:
        _check_range(value, "_qdata", codes, width)
    zero = None
    if asymmetric:
        zero, codes = _zero_points(value), unsigned(codes, bits)
        if zero.dtype == np.int8:
            _check_range(value, "_zero_point", zero, bits)
            zero = unsigned(zero, bits)
        else:
            check_scale(value, "_zero_point", zero)
            zero = moved(stored.kind, zero, bits)
        zero = np.broadcast_to(zero, integers.scale)
    scale = np.broadcast_to(value["_scale"], integers.scale)
    if form.is_transposed:
        codes, scale, zero = NUMPY.swap(codes), NUMPY.swap(scale), None if zero is None else NUMPY.swap(zero)
    if bits == 4:
        codes = pack(NUMPY, NUMPY.load(codes) & 15, form.recipe.format.element)
    return assembled(form, codes, scale, zero)


def _check_range(value: StoredValue, end: str, codes: np.ndarray, bits: int) -> None:
    """Raise DialectError for codes or zero-points beyond their width."""
    if codes.size:
        low, high, least, most = -(1 << bits - 1), (1 << bits - 1) - 1, int(codes.min()), int(codes.max())
        value.need(low <= least <= most <= high, f"{end!r} of int{bits} lies in {low}..{high}; got {least}..{most}. {_AGAIN}")


def _int4_form(stored: _Stored) -> ValueForm:
    """Signed codes (..., M, K / 2), two to a byte; scales and float biases lie transposed, (..., K / group, M)."""
    value, block = stored.value, stored.block()
    stored.need_dtype("_qdata", "I8", "U8")
    dtype = stored.need_dtype("_scale", *FLOATS)
    stored.need_dtype("_zero_point", dtype)
    *lead, columns = stored.codes.shape
    shape, group = (*lead, 2 * columns), block[-1]
    value.need(
        len(block) == len(shape) > 1 and all(n == 1 for n in block[:-1]) and shape[-1] % group == 0,
        f"its shape {spelled(shape)} has block_size {block}; an Int4Tensor has whole groups of a row. {_AGAIN}",
    )
    for end in ("_scale", "_zero_point"):
        value.need_shape(end, (*shape[:-2], shape[-1] // group, shape[-2]))
    return ValueForm(SignedInt4Scaling(group, SCALE_DTYPES[dtype]), shape)


def _int4(stored: _Stored, form: ValueForm) -> ScaledTensor:
    for end in ("_scale", "_zero_point"):
        stored.checked_scale(end)
    scale, bias = (np.ascontiguousarray(NUMPY.swap(stored.value[end])) for end in ("_scale", "_zero_point"))
    return assembled(form, stored.value.view("_qdata").view(np.uint8), scale, bias)


# ------------------------------------------------------------------------------------------------ MX and NVFP4


def _mx_form(stored: _Stored) -> ValueForm:
    """FP8 codes (..., M, K), FP6 codes likewise, one to a byte, or FP4 codes (..., M, K / 2); scales in E8M0."""
    recipe = mx_recipe(stored.kind, stored.dtype("elem_dtype"))
    stored.need_block(32)
    element = recipe.format.element.name
    stored.need_dtype("_qdata", *([dtype for dtype, fmt in FORMATS.items() if fmt == element] or ["U8"]))
    stored.need_dtype("_scale", "F8_E8M0", "U8")
    return _blocks_form(stored, recipe)


def _nvfp4_form(stored: _Stored) -> ValueForm:
    """FP4 codes (..., M, K / 2), scales in E4M3, and maybe one FP32 scale for all, or one for each matrix of a stack."""
    stored.need_block(16)
    stored.need_dtype("_qdata", "U8")
    stored.need_dtype("_scale", "F8_E4M3")
    two_level = "_per_tensor_scale" in stored.value.entries
    if two_level:
        stored.need_dtype("_per_tensor_scale", "F32")
        stored.value.need_shape("_per_tensor_scale", (), (*stored.codes.shape[:-2], 1, 1))
    return _blocks_form(stored, nvfp4_recipe(two_level))


def _blocks_form(stored: _Stored, recipe: ScalingRecipe) -> ValueForm:
    """Scales (..., M, K / block), or swizzled: each tile of 128 x 4 is 32 x 16."""
    *lead, columns = stored.codes.shape
    k, block = 2 * columns if recipe.format.element == E2M1 else columns, recipe.format.scale.block[1] or 1
    stored.value.need(
        k % block == 0,
        f"it has shape {spelled((*lead, k))}; torchao has matrices whose rows are whole blocks of {block}. {_AGAIN}",
    )
    scale = (*lead, k // block)
    if stored.is_swizzled:
        scale = (*lead[:-1], 32 * -(-lead[-1] // 128), 16 * -(-scale[-1] // 4))
    stored.value.need_shape("_scale", scale)
    return ValueForm(recipe, (*lead, k))


def _blocks(stored: _Stored, form: ValueForm) -> ScaledTensor:
    value, element = stored.value, form.recipe.format.element
    codes = value["_qdata"] if element in (E2M3, E3M2) else value.view("_qdata")
    if element in (E2M3, E3M2):
        most = int(codes.max(initial=0))
        value.need(most < 64, f"'_qdata' has codes of FP6, one to a byte, below 64; got {most}. {_AGAIN}")
        codes = pack(NUMPY, NUMPY.load(codes), element)
    tensor_scale = None
    if "_per_tensor_scale" in value.entries:
        tensor_scale = stored.checked_scale("_per_tensor_scale")
        tensor_scale = tensor_scale.reshape(tensor_scale.shape[:-2])
    stored.checked_scale()
    scale = value["_scale"]
    if not stored.is_swizzled:
        return assembled(form, codes, scale, global_scale=tensor_scale)
    *lead, rows, columns = scale.shape
    tiles, layout = scale.reshape(*lead, rows // 32, columns // 16, 512), InStorage(form.recipe.layout, SWIZZLE)
    st = ScaledTensor(codes, tiles, form.recipe, layout, global_scale=tensor_scale, shape=form.shape)
    check_padding(st, stored.kind, "scale", _AGAIN)
    return st.to_plain()


_CLASSES: dict[str, tuple[Callable[[_Stored], ValueForm], Callable[[_Stored, ValueForm], ScaledTensor]]] = {
    "Float8Tensor": (_float8_form, _float8),
    "Int8Tensor": (_integer_form, _integer),
    "IntxUnpackedToInt8Tensor": (_integer_form, _integer),
    "Int4Tensor": (_int4_form, _int4),
    "MXTensor": (_mx_form, _blocks),
    "NVFP4Tensor": (_nvfp4_form, _blocks),
}
