"""GPTQ: codes and zero-points in words of 32 bits, and FP16 scales, all with K first.

    qweight  I32 [K * bits / 32, N]      a stream along K
    qzeros   I32 [groups, N * bits / 32] a stream along N
    scales   F16 [groups, N]
    g_idx    I32 [K]                     the group of each column; `desc_act` puts columns into groups out of order

Version 2 stores zero-points as they are. Version 1 stores them minus one, which gptqmodel subtracts from whole words where the
width divides 32: a zero-point of 0 borrows from the next one.

A value is (code - zero_point) * scale. Where all zero-points are half of the range, codes less that half are signed integers;
vLLM (0.32) loads no others.

Source: gptqmodel 7.7 (checkpoint_format "gptq", "gptq_v2" and "gptq_p"), transformers 5.24 (GPTQConfig).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import DialectError, Layout, PerGroupIndex, ScaledTensor, UnsupportedError
from breccia.backend import Entry, SettingsOf, StoredForm, StoredValue, ValueForm

from ..safetensors_file import is_far
from ..safetensors_file import read as loaded
from . import writing
from .holding import NO_INPUTS, check_matrix, check_multiples, model_dtype, most_common
from .integers import offset
from .patterns import Expressions
from .scales import RowReader, assembled, check_columns, check_scale, widened
from .words import (
    bits_of,
    blocks_of,
    check_bits,
    group_size_of,
    held,
    integers,
    matrices,
    unpacked,
    whole_number,
    words_of,
)

#: Widths whose codes are one stream of bits. gptqmodel has 5, 6 and 7 bits in planes.
_STREAMS = (2, 3, 4, 8)
#: Lengths of groups that gptqmodel's layers have, beside the whole row.
_SIZES = (16, 32, 64, 128, 256, 512, 1024)
#: gptqmodel reads version 1 as written only where this names it, in 0.9 or later; else it refuses zero-points that are not half
#: of the range.
_QUANTIZER = "gptqmodel:7.7.0"


def settings(config: Mapping[str, Any]) -> SettingsOf:
    """The config with what `dynamic` changes for a module: the first pattern that its name starts with.

    "-:" before a pattern excludes modules.
    """
    dynamic: Any = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(changes, Mapping) for changes in dynamic.values()):
        raise DialectError(f"dynamic is an object of objects by patterns; the config has {short(dynamic)}.", dynamic=dynamic)
    patterns = list(dynamic)
    expressions = Expressions(
        patterns, "the pattern {} of dynamic", written=lambda text: text.removeprefix("+:").removeprefix("-:")
    )

    def of(module: str) -> Mapping[str, Any] | None:
        matching = expressions.matching(module)
        if not matching:
            return config
        pattern = patterns[min(matching)]
        return None if pattern.startswith("-:") else {**config, **dynamic[pattern]}

    return of


def form_v1(value: StoredValue) -> ValueForm:
    """Unsigned integers with zero-points; signed ones where all are half of the range, unless the config has sym false."""
    return _form(value, _minus_one)


def form_v2(value: StoredValue) -> ValueForm:
    """The same, of version 2."""
    return _form(value, words_of)


def _form(value: StoredValue, packed_zeros: Callable[[np.ndarray, int], np.ndarray]) -> ValueForm:
    """packed_zeros: the words of zero-points of that version."""
    names = {key: value.settings[key] for key in ("checkpoint_format", "format") if value.settings.get(key) is not None}
    value.need(len(set(names.values())) < 2, f"checkpoint_format and format are the same; the config has {names}.", **names)
    planes = (3,) if "gptq_p" in names.values() else ()
    found = form_of(value, tuple(bits for bits in _STREAMS if bits not in planes))
    bits, rows = found.recipe.format.element.bits, found.shape[0]
    if value.settings.get("sym") is False or (value["qzeros"] != packed_zeros(_halves(1, rows, bits), bits)).any():
        return found
    recipe = integers(bits, found.recipe.format.block[1], found.shape[1], value.entries["scales"].dtype, is_symmetric=True)
    return replace(found, recipe=recipe)


def _halves(groups: int, rows: int, bits: int) -> np.ndarray:
    """Zero-points that are half of the range."""
    return np.full((groups, rows), 1 << (bits - 1), np.uint8)


def form_of(value: StoredValue, widths: tuple[int, ...]) -> ValueForm:
    """The same, of a library that packs these widths as a stream."""
    shapes = matrices(value)
    groups, rows = shapes["scales"]
    words = shapes["qweight"][0]
    value.need_shape("qweight", (words, rows))
    value.need_shape("qzeros", (groups, shapes["qzeros"][1]))
    stored = bits_of(shapes["qzeros"], rows)
    value.need(
        1 < stored < 9 and 32 * words % stored == 0,
        f"{rows} zero-points in a row of {shapes['qzeros'][1]} words, and {words} rows of words, fit no width of 2 to 8 bits. "
        "Download the checkpoint again.",
        shapes=shapes,
    )
    bits = whole_number(value, value.settings, "bits")
    check_bits(value, stored if bits is None else bits, stored, "'qzeros' and 'scales'")
    if stored not in widths:
        raise UnsupportedError(
            f"it has {stored} bits, which gptqmodel packs in planes; breccia reads {', '.join(map(str, widths))} bits. Convert "
            "the checkpoint that it was made from.",
            bits=stored,
        )
    length = 32 * words // stored
    return _grouped(value, stored, rows, length, groups)


def _grouped(value: StoredValue, bits: int, rows: int, length: int, groups: int) -> ValueForm:
    """The form, with an index of groups where they are out of order."""
    size, act_order = whole_number(value, value.settings, "group_size"), value.settings.get("desc_act")
    index = None
    if "g_idx" in value.entries:
        value.need_shape("g_idx", (length,))
        dtype = value.entries["g_idx"].dtype
        value.need(dtype in ("I32", "I64"), f"'g_idx' is {dtype}; it is I32 or I64.", dtype=dtype)
        index = value["g_idx"]
        value.need(
            bool((index >= 0).all() and (index < groups).all()),
            f"'g_idx' numbers groups 0 to {groups - 1}; it has {int(index.min())} to {int(index.max())}.",
            groups=groups,
        )
        size = int(np.bincount(index).max()) if size is None else size  # the last group may be shorter
    else:
        value.need(not act_order, "the config has desc_act, but no file has 'g_idx'. Download the checkpoint again.")
    group_size = group_size_of(value, size, length, groups)
    recipe = integers(bits, group_size, length, value.entries["scales"].dtype)
    layout: Layout | None = None
    size = group_size or length
    if index is not None and not np.array_equal(index, np.arange(length) // size):
        value.need(
            act_order is not False,
            f"the config has desc_act false, but 'g_idx' does not count groups of {size} in order: libraries differ in whether "
            "they use it. Set desc_act in the config to true if 'g_idx' is right, or remove 'g_idx'.",
            group_size=size,
        )
        layout = PerGroupIndex(tuple(index.tolist()), groups)
    return ValueForm(recipe, (rows, length), layout)


def read_v1(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales, and zero-points plus one."""
    return tensor(value, form, _plus_one(value["qzeros"], _bits(value)))


def rows_v1(value: StoredValue, form: ValueForm) -> RowReader | None:
    """The same of some rows."""
    return _rows(value, form, _plus_one)


def _plus_one(words: np.ndarray, bits: int) -> np.ndarray:
    """Zero-points that are stored minus one."""
    if 32 % bits:
        return (unpacked(words, bits) + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return unpacked(words.view(np.uint32) + _ones(bits), bits)


def read_v2(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes, scales and zero-points."""
    return tensor(value, form, unpacked(value["qzeros"], _bits(value)))


def rows_v2(value: StoredValue, form: ValueForm) -> RowReader | None:
    """The same of some rows."""
    return _rows(value, form, unpacked)


def read_minus_one(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """As AutoRound, which subtracts one from each zero-point that is not zero: none is the highest code."""
    bits = _bits(value)
    zeros = unpacked(value["qzeros"], bits)
    highest = int(np.count_nonzero(zeros == (1 << bits) - 1))
    value.need(
        highest == 0,
        f"'qzeros' has {highest} codes {(1 << bits) - 1}, of zero-points minus one. AutoRound reads them as {1 << bits}, "
        "gptqmodel as 0. Give source_dialect='gptq' (on the command line --from) if gptqmodel wrote it.",
        highest=highest,
    )
    return tensor(value, form, zeros + np.uint8(1))


def _ones(bits: int) -> np.uint32:
    """The word whose codes are all one."""
    return np.uint32(sum(1 << shift for shift in range(0, 32, bits)))


def _bits(value: StoredValue) -> int:
    return bits_of(value.entries["qzeros"].shape, value.entries["scales"].shape[1])


def tensor(value: StoredValue, form: ValueForm, zeros: np.ndarray) -> ScaledTensor:
    """The tensor with these zero-points, (groups, N). Signed codes are the unsigned ones less half of the range."""
    check_scale(value, "scales", widened(value, "scales"))
    return _made(form, value["qweight"], value["scales"], zeros)


def _rows(value: StoredValue, form: ValueForm, zeros_of: Callable[[np.ndarray, int], np.ndarray]) -> RowReader | None:
    """What reads rows, which are columns of each tensor. zeros_of: the zero-points of words."""
    words, scales, zeros = (value.view(end) for end in ("qweight", "scales", "qzeros"))
    if form.layout is not None or is_far(words):  # groups out of order belong to all rows
        return None
    bits = _bits(value)

    def some(rows: slice) -> ScaledTensor:
        scale, count = loaded(scales[:, rows]), rows.stop - rows.start
        check_columns(value, "scales", scale)
        zero = zeros_of(loaded(zeros[:, blocks_of(rows, bits)]), bits)[:, rows.start % 32 :][:, :count]
        return _made(replace(form, shape=(count, form.shape[1])), loaded(words[:, rows]), scale, zero)

    return some


def _made(form: ValueForm, words: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> ScaledTensor:
    """The tensor of codes, scales and zero-points with K first."""
    data = np.ascontiguousarray(words.T).view(np.uint8)  # a stream of bits along K, as packed codes are
    scale, fmt = np.ascontiguousarray(scales.T), form.recipe.format
    if fmt.offset == "none":
        return assembled(form, offset(data, fmt.element.bits), scale)
    return assembled(form, data, scale, np.ascontiguousarray(zeros.T))


def stored(form: ValueForm) -> StoredForm:
    """Unsigned integers with zero-points, or signed ones, in groups of any order."""
    check_matrix(form, "gptq", by_index=True)
    is_symmetric = form.recipe.format.offset == "none"
    bits, size = held(form, _STREAMS, _SIZES, is_symmetric=is_symmetric)
    unit = 32 // bits if 32 % bits == 0 else 32
    check_multiples(form, "gptq", unit, unit)
    length = form.shape[1]
    has_index = isinstance(form.layout, PerGroupIndex)
    if isinstance(form.layout, PerGroupIndex):
        _check_index(form, form.layout, size or length)
    entries = entries_of(form, bits, size) | {"g_idx": Entry("I32", (length,))}
    settings = {"bits": bits, "group_size": size or -1, "sym": is_symmetric, "desc_act": has_index}
    return StoredForm(entries, settings)


def entries_of(form: ValueForm, bits: int, size: int | None) -> dict[str, Entry]:
    """Codes, zero-points and scales of groups of that size, None for the whole row."""
    rows, length = form.shape
    groups = -(-length // (size or length))
    return {
        "qweight": Entry("I32", (length * bits // 32, rows)),
        "qzeros": Entry("I32", (groups, rows * bits // 32)),
        "scales": Entry(form.recipe.format.scale.codec.name, (groups, rows)),
    }


def _check_index(form: ValueForm, layout: PerGroupIndex, size: int) -> None:
    """Raise UnsupportedError for an index that is read back as something else."""
    groups = -(-len(layout.index) // size)
    if layout.groups != groups or layout.index == tuple(k // size for k in range(len(layout.index))):
        raise writing.refused(
            form,
            "gptq",
            f"its index has {groups} groups of {size} out of order there, not {layout!r}; give groups in order the layout "
            f"PerBlockK({size})",
        )


def write_v2(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes, scales and zero-points, and the group of each column where `stored` has it."""
    return _parts(st, stored, words_of)


def write_v1(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """The same, with zero-points minus one."""
    return _parts(st, stored, _minus_one)


def _minus_one(zeros: np.ndarray, bits: int) -> np.ndarray:
    """The words of zero-points minus one."""
    if 32 % bits:
        return words_of((zeros - np.uint8(1)) & np.uint8((1 << bits) - 1), bits)
    return (words_of(zeros, bits).view(np.uint32) - _ones(bits)).view(np.int32)


def _parts(
    st: ScaledTensor, stored: StoredForm, packed_zeros: Callable[[np.ndarray, int], np.ndarray]
) -> dict[str, np.ndarray]:
    bits, size, layout = stored.settings["bits"], stored.settings["group_size"], st.layout
    (rows, length), groups = st.shape, stored.entries["scales"].shape[0]
    index = layout.index if isinstance(layout, PerGroupIndex) else np.arange(length) // (length if size == -1 else size)
    codes = np.ascontiguousarray(st.data).view(np.uint8)
    is_signed = st.zero_point is None
    parts = {
        "qweight": np.ascontiguousarray((offset(codes, bits) if is_signed else codes).view(np.int32).T),
        "qzeros": packed_zeros(_halves(groups, rows, bits) if is_signed else np.asarray(st.zero_point).T, bits),
        "scales": np.ascontiguousarray(st.scale.T),
        "g_idx": np.asarray(index, np.int32),
    }
    return {end: parts[end] for end in stored.entries}


def config_v1(stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    """What gptqmodel and transformers expect, in config.json and in quantize_config.json."""
    return _config("gptq", stored, plain, activations)


def config_v2(stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    """The same, of version 2."""
    return _config("gptq_v2", stored, plain, activations)


def _config(version: str, stored: Mapping[str, StoredForm], plain: Collection[str], activations: str | None) -> dict[str, Any]:
    writing.inputs(version, activations, NO_INPUTS)
    common, others = most_common(stored, "bits", "group_size", "sym")
    dynamic = {f"-:{_exactly(module)}": {} for module in plain}
    dynamic |= {f"+:{_exactly(module)}": settings for module, settings in others.items()}
    config = {
        "quant_method": "gptq",
        "checkpoint_format": version,
        **common,
        "desc_act": any(form.settings["desc_act"] for form in stored.values()),
        "lm_head": any(module.rpartition(".")[2] == "lm_head" for module in stored),
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": {"quantizer": [_QUANTIZER]},
    }
    return {"config.json": {**model_dtype(stored, "GPTQ"), "quantization_config": config}, "quantize_config.json": config}


def _exactly(module: str) -> str:
    return f"^{re.escape(module)}$"
