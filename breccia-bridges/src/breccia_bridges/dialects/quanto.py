"""optimum-quanto's weights.

8 bits: `up.weight._data`, (N, ...) in int8 or FP8, and `up.weight._scale`, per row or one for all. quanto computes code · scale
in the dtype of its scale, mostly BF16; a ScaledTensor has the same codes and scales and computes in FP32, so that its values
rounded to BF16 are quanto's.

qint4 and qint2: `up.weight._data._data`, U8, has the weight reshaped to (groups, group_size), the first part of its rows in
the low bits; `._scale` and `._shift` are (groups, 1). quanto computes code · scale - shift and rounds to the dtype of the scale
after each step, as the recipe does. No file of quanto says how long a row is, which it takes from the layer: the caller has to
know, by the setting `in_features`, which may be added to the entries of quanto_qmap.json.

quanto writes quanto_qmap.json, which maps modules to {"weights": "qint8"}, and no quantization_config; transformers' config has
{"quant_method": "quanto", "weights": "int8"}.

Source: optimum-quanto 0.2.7, and the quantization configs of transformers 5.24. Neither is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import (
    Float8CurrentScaling,
    Float8RowScaling,
    INT8Scaling,
    ScaledTensor,
    ScalingRecipe,
    UnsupportedError,
)
from breccia.backend import TENSOR, Entry, SettingsOf, StoredForm, StoredValue, ValueForm

from ..recipes import RoundedIntScaling
from ..safetensors_file import read as loaded
from ..text import spelled
from ..wrapping import integer_recipe
from . import writing
from .fp8 import FORMATS
from .holding import NO_INPUTS, check_format, check_matrix
from .scales import FLOATS, SCALE_DTYPES, RowReader, assembled, check_scale, widened
from .words import code_bytes, codes_in_parts, packed

#: quanto's names of 8-bit types, without the leading q, by the dtype of the file.
_TYPES = {
    "I8": ("int8",),
    "F8_E4M3": ("float8", "float8_e4m3fn"),
    "F8_E5M2": ("float8_e5m2",),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz",),
}
_AGAIN = "Download the checkpoint again."
_BY_QUANTO = "Load it with optimum-quanto and save each weight.dequantize(), or convert the original checkpoint."
#: quanto's names of packed types, by bits.
_PACKED = {4: "int4", 2: "int2"}
#: Lengths of groups that quanto tries for these.
_SIZES = (128, 96, 64, 32)
_HAS = "INT8 and FP8 (E4M3, E5M2, E4M3FNUZ) per row, and integers of 4 and 2 bits with a bias in the groups of its layers"


def settings(config: Mapping[str, Any]) -> SettingsOf:
    """Those of transformers, for all modules, or those that quanto_qmap.json has for a module."""
    return (lambda module: config) if "quant_method" in config or not config else config.get


def form(value: StoredValue) -> ValueForm:
    """Codes of any number of axes, the first one being rows."""
    if "._data._data" in value.entries:
        return _packed_form(value)
    codes, scale = value.entries["._data"], value.entries["._scale"]
    value.need(codes.dtype in _TYPES, f"'._data' is {codes.dtype}; quanto has {' or '.join(_TYPES)} there. {_AGAIN}")
    value.need(scale.dtype in FLOATS, f"'._scale' is {scale.dtype}; quanto has {' or '.join(FLOATS)} there. {_AGAIN}")
    _check_settings(value, codes.dtype)
    shape = codes.shape
    value.need(len(shape) > 1, f"its codes have shape {spelled(shape)}; a weight has two axes or more. {_AGAIN}", shape=shape)
    value.need_shape("._scale", (), (shape[0], *(1 for _ in shape[1:])))
    if codes.dtype == "I8":
        return ValueForm(INT8Scaling(scale_dtype=SCALE_DTYPES[scale.dtype]), shape)
    fmt = FORMATS[codes.dtype]
    return ValueForm(Float8RowScaling(fmt) if scale.shape else Float8CurrentScaling(fmt), shape)


def _packed_form(value: StoredValue) -> ValueForm:
    """Codes of groups; the caller knows the length of rows."""
    codes, scale, shift = (value.entries[end] for end in ("._data._data", "._scale", "._shift"))
    value.need(
        codes.dtype == "U8" and len(codes.shape) == 2 and all(codes.shape),
        f"'._data._data' is {codes.dtype} of shape {spelled(codes.shape)}; quanto has U8 (items, group size). {_AGAIN}",
    )
    value.need(scale.dtype in FLOATS, f"'._scale' is {scale.dtype}; quanto has {' or '.join(FLOATS)} there. {_AGAIN}")
    items, size = codes.shape
    groups = scale.shape[0] if scale.shape else 0
    bits = next((bits for bits in _PACKED if groups and items == -(-groups * bits // 8)), 0)
    value.need(
        bits > 0 and scale.shape == (groups, 1),
        f"'._data._data' has {items} rows and '._scale' shape {spelled(scale.shape)}; qint4 has a scale for each half of "
        f"a row, qint2 for each quarter. {_AGAIN}",
    )
    value.need_shape("._shift", scale.shape)
    if shift.dtype != scale.dtype:
        raise UnsupportedError(
            f"'._shift' is {shift.dtype} and '._scale' {scale.dtype}; breccia reads shifts in the dtype of the scale. "
            f"{_BY_QUANTO}",
            name=value.name,
        )
    if (name := value.settings.get("weights")) is not None:
        known = isinstance(name, str) and name.removeprefix("q") == _PACKED[bits]
        value.need(known, f"its tensors are q{_PACKED[bits]}, and the config says weights {short(name)}. {_AGAIN}")
    length = value.settings.get("in_features")
    if length is None:
        raise UnsupportedError(
            f'no file says how long its rows are: it is {groups * size} codes in groups of {size}. Add "in_features" to the '
            f"module's entry in quanto_qmap.json, and remove quantization_config from config.json. Or {_BY_QUANTO[0].lower()}"
            f"{_BY_QUANTO[1:]}",
            name=value.name,
        )
    value.need(
        type(length) is int and length > 0 and length % size == 0 and groups * size % length == 0,
        f"in_features is {short(length)}; {groups} groups of {size} are rows of a multiple of {size}.",
        in_features=length,
    )
    return ValueForm(_packed_recipe(bits, size, length, SCALE_DTYPES[scale.dtype]), (groups * size // length, length))


def _packed_recipe(bits: int, size: int, length: int, dtype: str) -> ScalingRecipe:
    """That of rows of `length` codes in groups of `size`. dtype: of scales, in which values are rounded."""
    if dtype == "fp32":  # FP32 is what every recipe computes in
        return integer_recipe(bits, size, length, signed=False, symmetric=False, offset="bias", scale_dtype=dtype)
    return RoundedIntScaling(bits, size, dtype)


def _check_settings(value: StoredValue, dtype: str) -> None:
    """Raise DialectError if the config has another type of weights."""
    if (name := value.settings.get("weights")) is not None:
        known = isinstance(name, str) and name.removeprefix("q") in _TYPES[dtype]
        value.need(known, f"'._data' is {dtype}, and the config says weights {short(name)}. {_AGAIN}")


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes as they are; scales in their dtype for integers, in FP32 for FP8. A row of more than one axis repeats its scale.

    Packed codes are packed again, and biases are the shifts with the other sign.
    """
    if (packed_rows := rows(value, form)) is not None:
        return packed_rows(slice(0, form.shape[0]))
    wide = widened(value, "._scale")
    check_scale(value, "._scale", wide)
    scale = value["._scale"] if isinstance(form.recipe, INT8Scaling) else wide
    if not isinstance(form.recipe, Float8CurrentScaling):
        scale = np.ascontiguousarray(np.broadcast_to(scale, (*form.shape[:-1], 1)))
    return assembled(form, value.view("._data"), scale)


def rows(value: StoredValue, form: ValueForm) -> RowReader | None:
    """What reads rows of packed codes. Those of 8 bits stay as they are."""
    if "._data._data" not in value.entries:
        return None
    items, bits = value.view("._data._data"), form.recipe.format.element.bits
    length, shifts = form.shape[1], range(0, 8, bits)

    def some(rows: slice) -> ScaledTensor:
        groups = slice(rows.start * length // items.shape[1], rows.stop * length // items.shape[1])
        scale, shift = (loaded(value.view(end)[groups]) for end in ("._scale", "._shift"))
        for end, part in (("._scale", scale), ("._shift", shift)):
            check_scale(value, end, widened(value, end, part), groups.start)
        codes = codes_in_parts(items, bits, shifts, groups).reshape(-1, length)
        return assembled(replace(form, shape=codes.shape), packed(codes, bits), scale, _negated(shift))

    return some


def _negated(array: np.ndarray) -> np.ndarray:
    """Floats with the other sign; BF16 is bits in NumPy."""
    return array ^ np.uint16(0x8000) if array.dtype == np.uint16 else -array


# -- writing ----------------------------------------------------------------------------------------------------------


def stored(form: ValueForm) -> StoredForm:
    """Codes of 8 bits with a scale per row, or one for all of FP8; and codes of 4 and 2 bits in groups, with shifts."""
    check_matrix(form, "quanto")
    (rows, length), fmt = form.shape, form.recipe.format
    dtype = fmt.scale.codec.name if fmt.scale.codec.name in FLOATS else FLOATS[0]
    if fmt.element.bits <= max(_PACKED):
        return _packed_stored(form, dtype)
    codes = next((name for name, own in FORMATS.items() if own == fmt.element.name and name in _TYPES), "I8")
    nearest = INT8Scaling(scale_dtype=SCALE_DTYPES[dtype])
    if codes != "I8":
        nearest = (Float8CurrentScaling if fmt.scale.block == TENSOR else Float8RowScaling)(FORMATS[codes])
    check_format(form, _HAS, nearest)
    scale = Entry(dtype, () if fmt.scale.block == TENSOR else (rows, 1))
    return StoredForm({"._data": Entry(codes, (rows, length)), "._scale": scale}, {"weights": f"q{_TYPES[codes][-1]}"})


def _packed_stored(form: ValueForm, dtype: str) -> StoredForm:
    """Codes of groups; the length of rows is for the config."""
    rows, length = form.shape
    bits = 2 if form.recipe.format.element.bits <= 2 else 4
    size = _group_size(length)
    check_format(form, _HAS, _packed_recipe(bits, size, length, SCALE_DTYPES[dtype]))
    groups = rows * length // size
    scale = Entry(dtype, (groups, 1))
    entries = {"._data._data": Entry("U8", (-(-groups * bits // 8), size)), "._scale": scale, "._shift": scale}
    return StoredForm(entries, {"weights": f"q{_PACKED[bits]}", "in_features": length})


def _group_size(length: int) -> int:
    """The one that quanto has for rows of that length: the whole row where it is short, or no length of groups divides it."""
    return next((size for size in _SIZES if length % size == 0), length) if length > max(_SIZES) else length


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes and scales as they are; shifts are biases with the other sign."""
    scale = np.asarray(st.scale).reshape(stored.entries["._scale"].shape)
    if "._data" in stored.entries:
        return {"._data": np.asarray(st.data), "._scale": scale}
    bits, (items, size) = st.recipe.format.element.bits, stored.entries["._data._data"].shape
    codes = code_bytes(st.data, bits, st.shape[1]).reshape(-1, size)
    data = np.zeros((items, size), np.uint8)
    for n, shift in enumerate(range(0, 8, bits)):
        part = codes[n * items : (n + 1) * items]
        data[: len(part)] |= part << np.uint8(shift)
    return {"._data._data": data, "._scale": scale, "._shift": _negated(np.asarray(st.zero_point)).reshape(scale.shape)}


def config(stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    """The file with the types of modules. transformers loads no weights that quanto has quantized, so config.json says none."""
    writing.inputs("quanto", activations, NO_INPUTS)
    return {"quanto_qmap.json": {name: {"activations": "none", **form.settings} for name, form in stored.items()}}
