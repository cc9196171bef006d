"""GPTQ: codes and zero-points in words of 32 bits, and FP16 scales, all with K first.

    qweight  I32 [K * bits / 32, N]      a stream along K
    qzeros   I32 [groups, N * bits / 32] a stream along N
    scales   F16 [groups, N]
    g_idx    I32 [K]                     the group of each column; `desc_act` puts columns into groups out of order

Version 2 stores zero-points as they are. Version 1 stores them minus one, which gptqmodel subtracts from whole words where the
width divides 32: a zero-point of 0 borrows from the next one. A value is (code - zero_point) * scale.

Source: gptqmodel 7.7 (checkpoint_format "gptq", "gptq_v2" and "gptq_p"), transformers 5.24 (GPTQConfig).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia import DialectError, Layout, PerGroupIndex, ScaledTensor, UnsupportedError
from breccia.backend import StoredValue, ValueForm

from .scales import assembled, check_scale, widened
from .words import bits_of, check_bits, group_size_of, integers, matrices, packed, unpacked, whole_number

#: Widths whose codes are one stream of bits. gptqmodel has 5, 6 and 7 bits in planes.
_STREAMS = (2, 3, 4, 8)


def settings(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """The config with what `dynamic` changes for a module: the first pattern that its name starts with.

    "-:" before a pattern excludes modules.
    """
    dynamic = config.get("dynamic")
    if not dynamic:
        return config
    if not isinstance(dynamic, Mapping) or not all(isinstance(changes, Mapping) for changes in dynamic.values()):
        raise DialectError(f"dynamic is an object of objects by patterns; the config has {dynamic!r}.", dynamic=dynamic)
    for pattern, changes in dynamic.items():
        try:
            matches = re.match(pattern.removeprefix("+:").removeprefix("-:"), module)
        except (re.error, OverflowError, RecursionError) as e:
            raise DialectError(f"the pattern {pattern!r} of dynamic is not a regular expression ({e}).", pattern=pattern) from e
        if matches:
            return None if pattern.startswith("-:") else {**config, **changes}
    return config


def form(value: StoredValue) -> ValueForm:
    """Unsigned integers with zero-points; those of 2 and 3 bits are held in 4."""
    names = {key: value.settings[key] for key in ("checkpoint_format", "format") if value.settings.get(key) is not None}
    value.need(len(set(names.values())) < 2, f"checkpoint_format and format are the same; the config has {names}.", **names)
    planes = (3,) if "gptq_p" in names.values() else ()
    return form_of(value, tuple(bits for bits in _STREAMS if bits not in planes))


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
    size = group_size_of(value, size, length, groups)
    recipe = integers(bits, size, value.entries["scales"].dtype)
    layout: Layout | None = None
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
    words, bits = value["qzeros"], _bits(value)
    if 32 % bits:
        zeros = (unpacked(words, bits) + np.uint8(1)) & np.uint8((1 << bits) - 1)
    else:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        zeros = unpacked(words.view(np.uint32) + np.uint32(ones), bits)
    return tensor(value, form, zeros)


def read_v2(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes, scales and zero-points."""
    return tensor(value, form, unpacked(value["qzeros"], _bits(value)))


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


def _bits(value: StoredValue) -> int:
    return bits_of(value.entries["qzeros"].shape, value.entries["scales"].shape[1])


def tensor(value: StoredValue, form: ValueForm, zeros: np.ndarray) -> ScaledTensor:
    """The tensor with these zero-points, (groups, N)."""
    check_scale(value, "scales", widened(value, "scales"))
    words = np.ascontiguousarray(value["qweight"].T)  # (N, K * bits / 32)
    bits = _bits(value)
    # Words of 4 and 8 bits are packed codes as they are.
    data = words.view(np.uint8) if bits in (4, 8) else packed(unpacked(words, bits), form.recipe)
    return assembled(form, data, np.ascontiguousarray(value["scales"].T), np.ascontiguousarray(zeros.T))
