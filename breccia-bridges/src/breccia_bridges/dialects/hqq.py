"""HQQ's weights: integers with a float scale and a float zero-point for each group, as `HQQLinear.state_dict` writes them.

    W_q               U8, or I32 for 3 bits: the codes of groups; of `view_as_float`, the same bytes as floats
    scale, zero       (groups, 1) for axis 1, (1, groups) for axis 0
    nbits, group_size, axis, shape, packing and more: numbers, flags, and names of dtypes in bytes

A value is (code - zero) * scale. A weight (N, K) is reshaped to (groups, group_size) for axis 1, to (group_size, groups) for
axis 0, and packed along the first axis: the first part of its rows in the highest bits, the last one in the lowest. Codes of 5
and 6 bits take a byte each. Ten codes of 3 bits take a word; after the last row there are zeros.

With axis 0, the rows r, r + N / group_size, ... of a column are one group: the tensor is the transpose, with an index of
groups.

hqq computes in the dtype that a caller gives the layer, whatever the file says, and rounds to it after each of the two steps;
breccia computes in FP32, in which hqq has the same values, bit for bit. The setting `compute_dtype` asks for the values of
another dtype, the one that scales have.

Source: hqq 0.2.8, run on a CPU, and transformers 5.24 (HqqConfig). Neither is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np

from breccia import DialectError, Layout, PerGroupIndex, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import Entry, StoredForm, StoredValue, ValueForm
from breccia.internal import FLOAT_NAMES

from ..announcements import TORCH_NAMES
from ..recipes import RoundedIntScaling
from ..safetensors_file import byte_count
from ..safetensors_file import read as loaded
from ..text import either, spelled
from ..wrapping import integer_recipe, integers_of
from . import writing
from .holding import NO_INPUTS, check_format, check_matrix, check_multiples, most_common
from .scales import FLOATS, SCALE_DTYPES, RowReader, assembled, check_scale, widened
from .words import code_bytes, codes_in_parts, packed

#: The width of a code in an item, by the number of bits; 1.58 bits are the codes 0 to 2.
_WIDTHS = {1: 1, 1.58: 2, 2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 8: 8}
#: hqq's names of packings, by the width.
_PACKINGS = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 8: "8bit_u8"}
_OFFSET = "float_zero_point"
#: What hqq writes of a weight beside its numbers. How it was quantized, which nothing decodes by, is what hqq does by default.
_FLAGS = {
    **dict.fromkeys(("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize"), True),
    **dict.fromkeys(("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero"), False),
}
_NESTED = ("scale_q", "zero_q", "meta_scale", "meta_zero", "zero_scale")
#: Names of the dtypes that products have.
_COMPUTE_DTYPES = tuple(f"torch.{name}" for name in TORCH_NAMES.values())
_AGAIN = "Download the checkpoint again, or write it again with hqq."
_ORIGINAL = "Save HQQLinear.dequantize() of each layer with hqq, or convert the checkpoint that it was made from."


class _Packing(NamedTuple):
    """What the parts that are numbers say. rows, columns: of the reshaped weight. per_item: codes in an item of `dtype`."""

    bits: int
    width: int
    group_size: int
    axis: int
    shape: tuple[int, int]
    rows: int
    columns: int

    @classmethod
    def of(cls, bits: float, size: int, axis: int, shape: tuple[int, int]) -> _Packing:
        """That of a weight of `shape`, in groups of `size` over its values."""
        groups = math.prod(shape) // size
        return cls(math.ceil(bits), _WIDTHS[bits], size, axis, shape, *((groups, size) if axis else (size, groups)))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint32 if self.width == 3 else np.uint8)

    @property
    def per_item(self) -> int:
        return 8 * self.dtype.itemsize // self.width

    @property
    def shifts(self) -> list[int]:
        """Of the parts of rows in an item, the first part first."""
        return list(range((self.per_item - 1) * self.width, -1, -self.width))

    @property
    def texts(self) -> dict[str, str]:
        """The parts that are names."""
        return {"packing": _PACKINGS[self.width], "unpack_view_dtype": f"torch.{'int32' if self.width == 3 else 'uint8'}"}


def form(value: StoredValue) -> ValueForm:
    """Unsigned integers with float zero-points. nbits, group_size, axis and shape are read."""
    packing = _packing(value)
    _check_parts(value, packing)
    (n, k), size = packing.shape, packing.group_size
    length = k if packing.axis else n
    if length % size:
        raise UnsupportedError(
            f"its shape {spelled(packing.shape)} has groups of {size} over its flattened values, which share "
            f"{'rows' if packing.axis else 'columns'} in part: no layout describes them. {_ORIGINAL}",
            name=value.name,
        )
    recipe = _recipe(value, packing.bits, size, length)
    if packing.axis:
        return ValueForm(recipe, (n, k))
    return ValueForm(recipe, (k, n), _across(n, size), is_transposed=True)


def _across(n: int, size: int) -> Layout | None:
    """The layout of columns whose groups have every (n / size)th row; None where there is one group."""
    groups = n // size
    return PerGroupIndex(tuple(row % groups for row in range(n)), groups) if groups > 1 else None


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes, scales and zero-points as stored; codes are packed again."""
    if (by_rows := rows(value, form)) is not None:
        return by_rows(slice(0, form.shape[0]))
    packing = _packing(value)
    codes = _codes(value, packing, slice(0, packing.rows)).reshape(packing.shape)
    scale, zero = value["scale"], value["zero"]
    for end in ("scale", "zero"):
        check_scale(value, end, widened(value, end))
    # Group g has the column g % K, and the rows that leave the remainder g // K.
    by_column = (-1, packing.shape[1])
    return assembled(
        form, packed(codes.T, packing.bits), *(np.ascontiguousarray(a.reshape(by_column).T) for a in (scale, zero))
    )


def rows(value: StoredValue, form: ValueForm) -> RowReader | None:
    """What reads rows whose groups lie along the last axis. Along the first one, each group has rows far apart."""
    packing = _packing(value)
    if not packing.axis:
        return None
    each = packing.shape[1] // packing.group_size

    def some(rows: slice) -> ScaledTensor:
        groups = slice(rows.start * each, rows.stop * each)
        scale, zero = (loaded(value.view(end)[groups]) for end in ("scale", "zero"))
        for end, part in (("scale", scale), ("zero", zero)):
            check_scale(value, end, widened(value, end, part), groups.start)
        codes = _codes(value, packing, groups).reshape(-1, packing.shape[1])
        return assembled(replace(form, shape=codes.shape), packed(codes, packing.bits), scale, zero)

    return some


def _codes(value: StoredValue, packing: _Packing, rows: slice) -> np.ndarray:
    """The codes of some rows of the reshaped weight, one a byte."""
    items = value.view("W_q").view(packing.dtype)
    codes = codes_in_parts(items, packing.width, packing.shifts, rows)
    highest = int(codes.max(initial=0))
    value.need(highest >> packing.bits == 0, f"'W_q' has codes up to {highest}, beyond {packing.bits} bits. {_AGAIN}")
    return codes


def _recipe(value: StoredValue, bits: int, size: int, length: int) -> ScalingRecipe:
    dtype, wanted = SCALE_DTYPES[value.entries["scale"].dtype], value.settings.get("compute_dtype")
    precision = "fp32" if wanted is None else FLOAT_NAMES.get(str(wanted).removeprefix("torch."))
    if precision == "fp32":
        return integer_recipe(bits, size, length, signed=False, symmetric=False, offset=_OFFSET, scale_dtype=dtype)
    value.need(
        precision == dtype,
        f"compute_dtype is {wanted!r}, and its scales are in {dtype}: hqq would round them. Set compute_dtype to 'float32', or "
        "to the dtype of the scales.",
        compute_dtype=wanted,
    )
    return RoundedIntScaling(bits, size, dtype, _OFFSET)


def _packing(value: StoredValue) -> _Packing:
    """The parts that are numbers, checked."""
    missing = [end for end in ("scale", "zero", "nbits", "group_size", "axis", "shape") if end not in value.entries]
    nested = [end for end in _NESTED if end in value.entries]
    if nested or any(_number(value, flag) for flag in ("quant_scale", "quant_zero") if flag in value.entries):
        raise UnsupportedError(
            "its scales or zero-points are quantized themselves or kept together, which hqq gave up: it has "
            f"{', '.join(nested) or 'quant_scale or quant_zero'}. {_ORIGINAL}",
            name=value.name,
        )
    value.need(not missing, f"no file has its {', '.join(map(repr, missing))}. {_AGAIN}")
    bits, axis, size = (_number(value, end) for end in ("nbits", "axis", "group_size"))
    bits = round(bits, 2)
    value.need(bits in _WIDTHS, f"nbits is {bits}; hqq has {', '.join(map(str, _WIDTHS))}. {_AGAIN}")
    value.need(axis in (0, 1) and size > 0, f"axis is 0 or 1, and group_size positive; got {axis} and {size}. {_AGAIN}")
    value.need_shape("shape", (2,))
    value.need(
        value.entries["shape"].dtype in ("I64", "I32"), f"'shape' is integers; it is {value.entries['shape'].dtype}. {_AGAIN}"
    )
    n, k = (int(length) for length in value["shape"])
    value.need(n > 0 and k > 0 and n * k % size == 0, f"its shape {[n, k]} has no whole groups of {size}. {_AGAIN}")
    if "channel_wise" in value.entries and not _number(value, "channel_wise"):
        raise UnsupportedError(f"it has one scale for all values (channel_wise is false), not one per group. {_ORIGINAL}")
    return _Packing.of(bits, int(size), int(axis), (n, k))


def _check_parts(value: StoredValue, packing: _Packing) -> None:
    """Raise DialectError unless codes, scales and zero-points have the dtypes and shapes that the numbers say."""
    codes, scale, zero = (value.entries[end] for end in ("W_q", "scale", "zero"))
    own = "I32" if packing.width == 3 else "U8"
    allowed = (own, *FLOATS) if "view_as_float" in value.entries and _number(value, "view_as_float") else (own,)
    items, size = -(-packing.rows // packing.per_item), packing.dtype.itemsize
    fills = packing.width == 3 or packing.rows % packing.per_item == 0
    has_rows = len(codes.shape) == 2 and codes.shape[0] == items
    value.need(codes.dtype in allowed, f"'W_q' of {packing.bits} bits is {' or '.join(allowed)}; it is {codes.dtype}. {_AGAIN}")
    value.need(
        fills and has_rows and byte_count(codes.dtype, codes.shape) == items * packing.columns * size,
        f"'W_q' is {codes.dtype} of shape {spelled(codes.shape)}; shape {spelled(packing.shape)} in groups of "
        f"{packing.group_size} of {packing.bits} bits needs {items}x{packing.columns} items of {size} bytes. {_AGAIN}",
    )
    value.need(
        scale.dtype in FLOATS and zero.dtype == scale.dtype,
        f"'scale' is {scale.dtype} and 'zero' {zero.dtype}; both are {' or '.join(FLOATS)}. {_AGAIN}",
    )
    for end in ("scale", "zero"):
        value.need_shape(end, (packing.rows, 1) if packing.axis else (1, packing.columns))
    texts = {end: (text,) for end, text in packing.texts.items()} | {"compute_dtype": _COMPUTE_DTYPES}
    for end in texts.keys() & value.entries.keys():
        text = value[end].tobytes().decode("latin-1")
        value.need(text in texts[end], f"{end!r} is {short(text)}; it is {' or '.join(texts[end])}. {_AGAIN}")


def _number(value: StoredValue, end: str) -> Any:
    """A part that is one number."""
    dtype = value.entries[end].dtype
    value.need(dtype in ("I32", "I64", "U8", "F32"), f"{end!r} is one number; it is {dtype}. {_AGAIN}")
    value.need_shape(end, (), (1,))
    number = value[end].reshape(()).item()
    if not math.isfinite(number):
        raise DialectError(f"{end!r} is {number}. {_AGAIN}", name=value.name)
    return number


# -- writing ----------------------------------------------------------------------------------------------------------


def stored(form: ValueForm) -> StoredForm:
    """Unsigned integers with float zero-points, and the numbers that hqq writes beside them."""
    # Along the first axis, groups have rows far apart.
    check_matrix(replace(form, is_transposed=False), "hqq", by_index=form.is_transposed)
    bits, size, dtype, compute_dtype = _held(form)
    axis, (rows, length) = int(not form.is_transposed), form.shape
    packing = _Packing.of(bits, size, axis, (rows, length) if axis else (length, rows))
    _check_fill(form, packing)
    if axis == 0 and form.fitted_layout != (_across(length, size) or form.recipe.layout.fitted(form.shape)):
        raise writing.refused(
            form,
            "hqq",
            f"groups along the first axis have every {length // size}th row there, not {form.fitted_layout!r}; decode it "
            "first, with recipe 'bf16'",
        )
    numbers = {"nbits": bits, "group_size": size, "axis": axis}
    texts = {**packing.texts, "compute_dtype": f"torch.{TORCH_NAMES[dtype]}"}
    scales = Entry(dtype, (packing.rows, 1) if axis else (1, packing.columns))
    entries = {
        "W_q": Entry("I32" if packing.width == 3 else "U8", (-(-packing.rows // packing.per_item), packing.columns)),
        "scale": scales,
        "zero": scales,
        "shape": Entry("I64", (2,)),
        **dict.fromkeys(numbers, Entry("I32", ())),
        **dict.fromkeys(_FLAGS, Entry("U8", ())),
        **{end: Entry("U8", (len(text),)) for end, text in texts.items()},
    }
    return StoredForm(entries, {**numbers, "texts": texts, "compute_dtype": compute_dtype})


def _held(form: ValueForm) -> tuple[int, int, str, str | None]:
    """(bits, group size, dtype of scales in a file, the setting `compute_dtype`). Raises UnsupportedError for other formats."""
    fmt, length = form.recipe.format, form.shape[1]
    bits = int(min((bits for bits in _WIDTHS if bits == int(bits) and bits >= fmt.element.bits), default=8))
    dtype = fmt.scale.codec.name if fmt.scale.codec.name in FLOATS else FLOATS[0]
    size, name = fmt.block[1], SCALE_DTYPES[dtype]
    if fmt.precision == name != "fp32" and fmt == RoundedIntScaling(bits, size or length, name, _OFFSET).format:
        return bits, size or length, dtype, TORCH_NAMES[dtype]
    group = 64 if size is None and bits == 4 else size
    nearest = integers_of(bits)(group_size=group, signed=False, symmetric=False, offset=_OFFSET, scale_dtype=name)
    widths = either([bits for bits in _WIDTHS if bits == int(bits)])
    check_format(form, f"unsigned integers of {widths} bits with float zero-points, and a float scale for each group", nearest)
    return bits, size or length, dtype, None


def _check_fill(form: ValueForm, packing: _Packing) -> None:
    """Raise UnsupportedError unless groups are whole, and an item has a code of each part of their rows."""
    length, size = form.shape[1], packing.group_size
    per_item = 1 if packing.width == 3 else packing.per_item  # of 3 bits the last item may have fewer
    check_multiples(form, "hqq", per_item // math.gcd(per_item, length // size) if packing.axis else 1, size)
    if packing.axis == 0 and size % per_item:
        why = f"groups along the first axis have multiples of {per_item} codes there; decode it first, with recipe 'bf16'"
        raise writing.refused(form, "hqq", why)


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes packed as hqq does, scales and zero-points as they are."""
    bits, size, axis = (stored.settings[end] for end in ("nbits", "group_size", "axis"))
    (rows, length), codes = st.shape, code_bytes(st.data, bits, st.shape[1])
    packing = _Packing.of(bits, size, axis, (rows, length) if axis else (length, rows))
    entries = stored.entries
    codes = np.ascontiguousarray(codes if axis else codes.T).reshape(packing.rows, packing.columns)
    items = np.zeros(entries["W_q"].shape, packing.dtype)
    for n, shift in enumerate(packing.shifts):
        part = codes[n * len(items) : (n + 1) * len(items)]
        items[: len(part)] |= part.astype(packing.dtype) << packing.dtype.type(shift)
    scale, zero = (np.asarray(a) if axis else np.ascontiguousarray(a.T) for a in (st.scale, st.zero_point))
    return {
        "W_q": items.view(np.int32) if packing.width == 3 else items,
        "scale": scale.reshape(entries["scale"].shape),
        "zero": zero.reshape(entries["zero"].shape),
        "shape": np.array(packing.shape, np.int64),
        **{end: np.array(stored.settings[end], np.int32) for end in ("nbits", "group_size", "axis")},
        **{end: np.array(flag or (end == "round_zero" and bits == 4), np.uint8) for end, flag in _FLAGS.items()},
        **{end: np.frombuffer(text.encode(), np.uint8) for end, text in stored.settings["texts"].items()},
    }


def config(stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    """What transformers expects, whose names of layers have no numbers. hqq itself reads the numbers of each weight.

    Raises UnsupportedError where some modules compute in the dtype of their scales and others do not.
    """
    writing.inputs("hqq", activations, NO_INPUTS)
    params, _ = most_common(stored, "nbits", "group_size", "axis")
    rounded, others = most_common(stored, "compute_dtype")
    for module, settings in others.items():
        raise UnsupportedError(
            f"the config of HQQ has one compute_dtype; that of {module} is {settings['compute_dtype'] or 'float32'}, that of "
            f"most modules is {rounded['compute_dtype'] or 'float32'}. Give all modules one recipe.",
            module=module,
        )
    config = {
        "quant_method": "hqq",
        "quant_config": {
            "weight_quant_params": {**params, "channel_wise": True, "optimize": True, "round_zero": params["nbits"] == 4},
            "scale_quant_params": None,
            "zero_quant_params": None,
            "offload_meta": False,
        },
        "skip_modules": sorted({_tag(module) for module in plain} - {_tag(module) for module in stored}),
        **{key: dtype for key, dtype in rounded.items() if dtype},
    }
    return {"config.json": {"quantization_config": config}}


def _tag(module: str) -> str:
    return ".".join(part for part in module.split(".") if part not in ("model", "layers") and not part.isnumeric())
