"""Checkpoints of compressed-tensors: the formats of its config groups, told apart by names and dtypes of tensors.

    pack-quantized                            weight_packed I32 (..., N, words along K), weight_scale, weight_shape
                                              [, weight_zero_point I32 (..., words along N, groups)] [, weight_g_idx (K,)]
    nvfp4-pack-quantized                      weight_packed U8 (..., N, K / 2), weight_scale F8_E4M3, weight_global_scale (1,),
                                              which is a divisor
    mxfp4-pack-quantized, mxfp6-              weight_packed U8, weight_scale U8 (E8M0)
    float-quantized, mxfp8-quantized          weight F8_E4M3, weight_scale in floats or U8 (E8M0)
    int-quantized                             weight I8, weight_scale [, weight_zero_point I8]
    naive-quantized                           as one of the two before

Packed integers have half of their range added, and fill words from the lowest bit up. Signed codes with a zero-point become
unsigned ones here: both have half of the range added.

Source: compressed-tensors 0.20, run on a CPU. Releases to 0.19 wrote weight_g_idx: the group of each column, or -1 for all
where columns are in order. Its sparse formats are recognized only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import (
    CorruptFileError,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    NVFP4BlockScaling,
    PerGroupIndex,
    ScaledTensor,
    UnsupportedError,
)
from breccia.backend import NUMPY, SettingsOf, Shape, StoredValue, ValueForm, unpack

from ..safetensors_file import read as loaded
from ..text import spelled
from . import fp8, integers, packed_floats
from .patterns import expressions
from .scales import POWERS, RowReader, assembled, check_scale, widened
from .schemes import Scheme, agree, one_form
from .words import blocks_of

#: What users can do with what breccia does not read.
_DECOMPRESS = (
    "Convert the checkpoint that it was made from, or decompress it with compressed-tensors (ModelCompressor.decompress_model) "
    "and convert that."
)
_PATTERN = "re:"


# -- settings ---------------------------------------------------------------------------------------------------------


def settings(config: Mapping[str, Any]) -> SettingsOf:
    """{"schemes": what may be the scheme of a module}: more than one where several targets of one kind match it.

    Targets that are its name come before patterns, and those before names of classes, which a checkpoint does not have. None
    for a module that is ignored, that no target matches, or whose scheme has no weights.
    Raises CorruptFileError for groups that are not what the library writes.
    """
    if config.get("transform_config"):
        raise UnsupportedError(
            "the config has a transform_config: the weights are rotated, and the model's code rotates its inputs, for which no "
            "other format has a place. Convert the checkpoint that it was made from."
        )
    groups = config.get("config_groups")
    if not groups:
        return lambda module: {"schemes": ({"where": "the config", "format": _format(config)},)}
    if not isinstance(groups, dict):
        raise CorruptFileError(f"config_groups is an object; found {short(groups)}. Fix it, or download it again.")
    ignored = expressions(_strings(config.get("ignore") or [], "ignore"), "the target {}", _PATTERN)
    schemes = [_scheme(config, name, group) for name, group in groups.items()]
    owners = [(n, target) for n, scheme in enumerate(schemes) for target in scheme["targets"]]
    targets = expressions([target for _, target in owners], "the target {}", _PATTERN)
    classes = [n for n, (_, target) in enumerate(owners) if target.isidentifier() and target[0].isupper()]

    def of(module: str) -> Mapping[str, Any] | None:
        if ignored.first(module) is not None:
            return None
        places = targets.named(module) or targets.matching(module) or classes
        matching = [schemes[n] for n in dict.fromkeys(owners[place][0] for place in places)]
        weights = tuple(scheme for scheme in matching if not scheme["empty"])
        return {"schemes": weights} if weights else None

    return of


def _scheme(config: Mapping[str, Any], name: str, group: Any) -> Scheme:
    """The settings of weights of a group, with what messages call it, its targets, and whether it has weights."""
    where = f"config_groups[{name!r}]"
    if isinstance(group, list):  # the name of a preset, with its targets
        return {"where": where, "targets": _strings(group, where), "empty": False}
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict | None):
        raise CorruptFileError(f"{where} is an object with targets and weights; found {short(group)}. Download it again.")
    stated = {key: setting.lower() if isinstance(setting, str) else setting for key, setting in (weights or {}).items()}
    written = group.get("format") or _format(config)
    return {**stated, "where": where, "format": written, "targets": _strings(group.get("targets"), where), "empty": not weights}


def _format(config: Mapping[str, Any]) -> str | None:
    """The format of all groups; None where each has its own, or the config was written before compression."""
    written = config.get("format")
    return None if written in ("mixed-precision", "dense", "fakequant") else written


def _strings(targets: Any, where: str) -> Sequence[str]:
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CorruptFileError(f"{where} lists names of modules; found {short(targets)}. Fix it, or download it again.")
    return targets


# -- what a value is --------------------------------------------------------------------------------------------------


def form(value: StoredValue) -> ValueForm:
    """What the tensors are, which the scheme of the module has to agree with."""
    for end in (".compressed", "scale_packed"):
        if end in value.entries:
            raise UnsupportedError(f"it is in a sparse format ({', '.join(map(repr, value))}). {_DECOMPRESS}")
    return one_form(value, _form)


def _form(value: StoredValue, scheme: Scheme) -> ValueForm:
    if "weight_packed" in value.entries:
        return (_packed_integers if value.entries["weight_packed"].dtype == "I32" else _packed_floats)(value, scheme)
    return (_integers if value.entries["weight"].dtype == "I8" else _floats)(value, scheme)


def _packed_integers(value: StoredValue, scheme: Scheme) -> ValueForm:
    """int32 words along K."""
    agree(value, scheme, "pack-quantized", format=("pack-quantized",), type=("int",))
    shape = _shape(value)
    *lead, rows, columns = shape
    packed = value.entries["weight_packed"].shape
    bits = _bits(value, scheme, packed, shape)
    value.need_shape("weight_packed", (*lead, rows, _words(columns, bits)))
    groups, group = _groups(value, scheme, shape)
    symmetric = _is_symmetric(value, scheme)
    if bits == 1 and symmetric:
        raise UnsupportedError(
            f"its integers are -1 and 0, of one bit without 'weight_zero_point'; a ScaledTensor has signed integers of 2 to 8 "
            f"bits. {_DECOMPRESS}",
            bits=bits,
        )
    if not symmetric and value.entries["weight_scale"].shape not in ((), (1,)):
        _need_part(value, "weight_zero_point", ("I32",), (*lead, _words(rows, bits), groups))
    elif not symmetric:
        _need_part(value, "weight_zero_point", ("I8",), (1,), ())
    index = _group_index(value, scheme, columns, groups)
    return replace(integers.form(value, shape, bits, symmetric, group, "weight_scale"), layout=index)


def _shape(value: StoredValue) -> Shape:
    ndim = len(value.entries["weight_packed"].shape)
    value.need_shape("weight_shape", (ndim,))
    shape = tuple(int(n) for n in value["weight_shape"].reshape(-1))
    value.need(ndim > 1 and min(shape) > 0, f"'weight_shape' is the shape of a matrix or more; it holds {list(shape)}.")
    return shape


def _words(length: int, bits: int) -> int:
    return -(-length * bits // 32)


def _bits(value: StoredValue, scheme: Scheme, packed: Shape, shape: Shape) -> int:
    """The width of codes: as the config says, else the one that fits the shapes."""
    stated = scheme.get("num_bits")
    if stated is not None:
        value.need(type(stated) is int and 1 <= stated <= 8, f"{scheme['where']} has num_bits {stated!r}; it is 1 to 8.")
        return stated
    fitting = [bits for bits in range(1, 9) if packed[-1] == _words(shape[-1], bits)]
    value.need(
        len(fitting) == 1,
        f"'weight_packed' has {packed[-1]} words for rows of {shape[-1]} codes, which {len(fitting)} widths fit; the "
        "config has no num_bits.",
    )
    return fitting[0]


def _groups(value: StoredValue, scheme: Scheme, shape: Shape) -> tuple[int, int | None]:
    """(scales in a row, columns per scale or None for all of them) of integers, by the shape of scales."""
    *lead, rows, columns = shape
    stored = value.entries["weight_scale"].shape
    strategy, size = scheme.get("strategy"), scheme.get("group_size")
    if strategy == "block":
        raise UnsupportedError(
            f"its integers have a scale per block of {scheme.get('block_structure')}; a ScaledTensor has integers with "
            f"scales per row, and per group along K. {_DECOMPRESS}"
        )
    if stored in ((), (1,)):
        agree(value, scheme, "integers with one scale", strategy=("tensor",))
        return 1, None
    value.need(
        len(stored) == len(shape) and stored[:-1] == (*lead, rows) and stored[-1] > 0,
        f"'weight_scale' has shape {spelled(stored)}; codes of shape {spelled(shape)} need {spelled((*lead, rows))}x(number "
        "of groups), or one scale.",
        shape=stored,
    )
    groups = stored[-1]
    if strategy == "channel" or (size is not None and size in (-1, columns)) or (size is None and groups == 1):
        value.need_shape("weight_scale", (*lead, rows, 1))
        agree(value, scheme, "integers with a scale per row", strategy=("channel", "group"))
        return 1, None
    agree(value, scheme, "integers with scales per group", strategy=("group",))
    if size is None:
        value.need(
            columns % groups == 0,
            f"'weight_scale' has {groups} scales for {columns} columns, and the config has no group_size.",
        )
        return groups, columns // groups
    value.need(type(size) is int and size > 0, f"{scheme['where']} has group_size {size!r}; it is an integer >= 1, or -1.")
    value.need_shape("weight_scale", (*lead, rows, -(-columns // size)))
    return groups, size


def _is_symmetric(value: StoredValue, scheme: Scheme) -> bool:
    """Whether codes have no zero-point."""
    symmetric = "weight_zero_point" not in value.entries
    what = "without 'weight_zero_point'" if symmetric else "with 'weight_zero_point'"
    agree(value, scheme, f"integers {what}", symmetric=(symmetric,))
    return symmetric


def _need_part(value: StoredValue, end: str, dtypes: tuple[str, ...], *shapes: Shape) -> None:
    dtype = value.entries[end].dtype
    value.need(dtype in dtypes, f"{end!r} is {dtype}; it is {' or '.join(dtypes)} there.", dtype=dtype)
    value.need_shape(end, *shapes)


def _group_index(value: StoredValue, scheme: Scheme, columns: int, groups: int) -> PerGroupIndex | None:
    """The group of each column; None where they are in order."""
    if "weight_g_idx" not in value.entries:
        actorder = scheme.get("actorder")
        value.need(
            actorder not in ("group", "dynamic", True),
            f"{scheme.get('where')} has actorder {actorder!r}, but no 'weight_g_idx' says the groups of columns. Download the "
            "checkpoint again.",
        )
        return None
    _need_part(value, "weight_g_idx", ("I32", "I64"), (columns,))
    index = value["weight_g_idx"]
    if np.all(index == -1):
        return None
    wrong = np.flatnonzero((index < 0) | (index >= groups))
    value.need(
        not wrong.size,
        f"'weight_g_idx' has the group of each column, 0..{groups - 1}; {wrong.size} are others, the first "
        f"{index[wrong[:1]]} at position {wrong[:1]}.",
    )
    return PerGroupIndex(tuple(index.tolist()), groups) if groups > 1 else None


def _integers(value: StoredValue, scheme: Scheme) -> ValueForm:
    """A byte for each code."""
    agree(value, scheme, "integers in I8", format=("int-quantized", "naive-quantized"), type=("int",))
    agree(value, scheme, "integers in I8", num_bits=tuple(range(1, 9)))
    shape = value.entries["weight"].shape
    value.need(len(shape) > 1, f"'weight' has shape {spelled(shape)}; a weight has two axes or more.")
    _, group = _groups(value, scheme, shape)
    symmetric = _is_symmetric(value, scheme)
    if not symmetric:
        scales = value.entries["weight_scale"].shape
        _need_part(value, "weight_zero_point", ("I8",), *((scales,) if math.prod(scales) > 1 else (scales, (1,), ())))
    return integers.form(value, shape, 8, symmetric, group, "weight_scale")


def _packed_floats(value: StoredValue, scheme: Scheme) -> ValueForm:
    """Codes of 4 or 6 bits in bytes."""
    scale = value.entries["weight_scale"]
    _refuse_zero_points(value)
    if scale.dtype not in POWERS:
        what, names = "NVFP4", ("nvfp4-pack-quantized",)
        agree(value, scheme, what, format=names, type=("float",), symmetric=(True,), num_bits=(4,), group_size=(16,))
        two_level = "weight_global_scale" in value.entries
        agree(
            value,
            scheme,
            f"NVFP4 with{'' if two_level else 'out'} 'weight_global_scale'",
            strategy=("tensor_group",) if two_level else ("group",),
        )
        if two_level:
            _need_part(value, "weight_global_scale", ("F32",), (1,), ())
        elif scheme.get("strategy") is None:
            value.need(False, "'weight_global_scale' is missing, and no config says that the format has none.")
        recipe = NVFP4BlockScaling(global_sense="divisor") if two_level else NVFP4BlockScaling(two_level=False)
        return packed_floats.form(value, "weight_packed", "weight_scale", recipe)
    value.need("weight_global_scale" not in value.entries, "scales that are powers of two have no 'weight_global_scale'.")
    recipes = {4: MXFP4BlockScaling(scale_rule="even"), 6: MXFP6BlockScaling("E2M3")}
    length, blocks = value.entries["weight_packed"].shape[-1:], scale.shape[-1:]
    possible = [bits for bits in recipes if length and length[0] * 8 % math.lcm(bits, 8) == 0]
    fitting = [bits for bits in possible if blocks == (-(-(length[0] * 8 // bits) // 32),)]
    bits = scheme.get("num_bits") or (fitting or [4])[0]
    agree(value, scheme, "MXFP4 or MXFP6", type=("float",), symmetric=(True,), num_bits=(4, 6))
    agree(value, scheme, "MXFP4 or MXFP6", group_size=(32,), strategy=("group",))
    value.need(
        len(fitting) < 2 or scheme.get("num_bits") is not None,
        f"{spelled(length)} bytes of 'weight_packed' and {spelled(blocks)} of 'weight_scale' in a row fit MXFP4 and MXFP6, "
        "and the config has no num_bits.",
    )
    agree(value, scheme, f"MXFP{bits}", format=(f"mxfp{bits}-pack-quantized",))
    return packed_floats.form(value, "weight_packed", "weight_scale", recipes[bits])


def _refuse_zero_points(value: StoredValue) -> None:
    if "weight_zero_point" in value.entries:
        raise UnsupportedError(
            f"it has floating-point codes with 'weight_zero_point'; a ScaledTensor has zero-points of integers only. "
            f"{_DECOMPRESS}"
        )


def _floats(value: StoredValue, scheme: Scheme) -> ValueForm:
    """FP8 codes."""
    _refuse_zero_points(value)
    shape, scale = value.entries["weight"].shape, value.entries["weight_scale"]
    powers = scale.dtype in POWERS
    what = "MXFP8" if powers else "FP8"
    names = ("mxfp8-quantized",) if powers else ("float-quantized", "naive-quantized")
    agree(value, scheme, what, format=names, type=("float",), symmetric=(True,), num_bits=(8,))
    strategy, size = scheme.get("strategy"), scheme.get("group_size")
    if powers:
        agree(value, scheme, what, strategy=("group",), group_size=(32,))
        return fp8.form_of(value, None)
    match strategy:
        case "tensor":
            value.need_shape("weight_scale", (1,), ())
        case "channel":
            value.need_shape("weight_scale", (*shape[:-1], 1))
        case "block":
            return fp8.form_of(value, _block(value, scheme))
        case "group":
            value.need(type(size) is int and size > 0, f"{scheme['where']} has group_size {size!r}; it is an integer >= 1.")
            return fp8.form_of(value, (1, size))
        case None:
            return fp8.form_of(value, fp8.TILE)
        case _:
            agree(value, scheme, what, strategy=("tensor", "channel", "block", "group"))
    return fp8.form_of(value, None)


def _block(value: StoredValue, scheme: Scheme) -> list[int]:
    """Rows and columns of a block, of a list or, as earlier releases wrote it, of "128x128"."""
    block = scheme.get("block_structure")
    listed = [int(n) if n.isdecimal() else 0 for n in block.split("x")] if isinstance(block, str) else block
    sizes: list[Any] = listed if isinstance(listed, list) else []
    valid = len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    value.need(valid, f"{scheme['where']} has block_structure {block!r}; it is two integers >= 1.")
    return sizes


# -- reading ----------------------------------------------------------------------------------------------------------


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes and scales as stored; signed integers without the half of the range that packing adds, unsigned ones with it."""
    if "weight_packed" not in value.entries:
        return _read_bytes(value, form) if value.entries["weight"].dtype == "I8" else fp8.read(value, form)
    if value.entries["weight_packed"].dtype == "I32":
        return _read_words(value, form)
    global_scale = "weight_global_scale" if form.recipe.format.global_scale else None
    return packed_floats.read(value, form, "weight_packed", "weight_scale", global_scale)


def rows(value: StoredValue, form: ValueForm) -> RowReader | None:
    """What reads rows of a matrix of words. Other codes are components as they are stored, or lie in I8."""
    if "weight_packed" not in value.entries or value.entries["weight_packed"].dtype != "I32":
        return None
    words, scales, bits = value.view("weight_packed"), value.view("weight_scale"), form.recipe.format.element.bits
    zeros = value.view("weight_zero_point") if form.recipe.format.offset != "none" else None
    is_matrix = words.ndim == scales.ndim == 2 and len(scales) == len(words) and (zeros is None or zeros.ndim == 2)
    if not is_matrix or form.layout is not None:  # an index of groups belongs to all rows
        return None

    def some(rows: slice) -> ScaledTensor:
        scale, count = loaded(scales[rows]), rows.stop - rows.start
        check_scale(value, "weight_scale", widened(value, "weight_scale", scale), rows.start * scales.shape[1])
        codes, zero = _codes_of_words(value, form, loaded(words[rows])), None
        if zeros is not None:
            blocks = loaded(zeros[blocks_of(rows, bits)])
            each = min(32 * len(blocks) // bits, form.shape[0] - rows.start // 32 * 32)
            zero = _zero_points(value, form, blocks, each)[rows.start % 32 :][:count]
        return assembled(replace(form, shape=(count, form.shape[1])), codes, scale, zero)

    return some


def _codes_of_words(value: StoredValue, form: ValueForm, words: np.ndarray) -> np.ndarray:
    """Rows of codes, as the recipe packs them."""
    bits, columns = form.recipe.format.element.bits, form.shape[-1]
    codes = integers.row_bytes(value, "weight_packed", words, columns, bits)
    return integers.cut(integers.offset(codes, bits), columns, bits) if form.recipe.format.offset == "none" else codes


def _zero_points(value: StoredValue, form: ValueForm, words: np.ndarray, rows: int) -> np.ndarray:
    """Zero-points of so many rows, one a byte, of words along these."""
    element = form.recipe.format.element
    turned = np.ascontiguousarray(np.swapaxes(words, -1, -2))
    stored = integers.row_bytes(value, "weight_zero_point", turned, rows, element.bits)
    return np.swapaxes(unpack(NUMPY, stored, element, rows).astype(np.uint8), -1, -2)


def _read_words(value: StoredValue, form: ValueForm) -> ScaledTensor:
    bits, codes = form.recipe.format.element.bits, _codes_of_words(value, form, value["weight_packed"])
    if form.recipe.format.offset == "none":
        return integers.read(value, form, codes, "weight_scale")
    if value.entries["weight_zero_point"].dtype == "I8":
        zero = (_signed(value, "weight_zero_point", bits).astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    else:
        zero = _zero_points(value, form, value["weight_zero_point"], form.shape[-2])
    return integers.read(value, form, codes, "weight_scale", zero)


def _read_bytes(value: StoredValue, form: ValueForm) -> ScaledTensor:
    widths = [scheme.get("num_bits") for scheme in value.settings.get("schemes", ())]
    width = max([bits for bits in widths if type(bits) is int], default=8)
    symmetric = form.recipe.format.offset == "none"
    codes = value.view("weight") if symmetric and width == 8 else _signed(value, "weight", width)
    if symmetric:
        return integers.read(value, form, codes, "weight_scale")
    parts = (part.view(np.uint8) for part in (codes, _signed(value, "weight_zero_point", width)))
    codes, zero = (integers.offset(part, 8) for part in parts)
    return integers.read(value, form, codes, "weight_scale", zero)


def _signed(value: StoredValue, end: str, bits: int) -> np.ndarray:
    """Codes in I8. Raises DialectError for those that `bits` do not hold."""
    codes, half = value[end], 1 << (bits - 1)
    low, high = (int(codes.min()), int(codes.max())) if codes.size else (0, 0)
    value.need(
        -half <= low and high < half,
        f"{end!r} has codes {low}..{high}; those of {bits} bits are {-half}..{half - 1}.",
        bits=bits,
    )
    return codes
