"""The contents of a checkpoint, from its headers, and what looks wrong about its scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breccia import BrecciaError, Codec, CorruptFileError, DialectError, LayoutError, UnsupportedError
from breccia.backend import CODECS, F32, NUMPY, TENSOR
from breccia.internal import packed_length

from .checkpoint import checkpoint_files
from .recognition import Stored
from .safetensors_file import Container, Shape
from .source import Source, Value
from .text import spelled

#: How other programs name the scales of a tensor: `name` with a suffix, or with `weight`, its last word, replaced.
_SCALE_SUFFIXES = ("_scale_inv", "_scale", ".scale", ".scales", "_scales")
_SCALE_WORDS = ("weight_scale", "scale", "scales", "scale_weight")

#: Codecs that scales are stored in, by the file's dtype. U8 means E8M0 in files of other programs.
_SCALE_CODECS = {"F8_E8M0": "E8M0", "U8": "E8M0", "F8_E4M3": "E4M3", "F32": "F32", "F16": "F16", "BF16": "BF16"}

_CODECS = {codec.name: codec for codec in CODECS}

#: A scale above this multiple of the tensor's median is suspicious: one outlier sets the step of its whole block.
OUTLIER = 1000.0


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint.

    rows: one for each value, by name. dialects: of what other programs quantized, each with its title, the number of its values
    and the evidence. problem: why what other programs quantized cannot be read, if it cannot: then rows are of tensors.
    """

    rows: list[dict[str, Any]]
    dialects: list[dict[str, Any]]
    problem: str = ""


def inspected(path: Path, scales: bool = False, source_dialect: str | None = None) -> Inspection:
    """The values of a checkpoint. `scales` reads the scales too, but no other data."""
    files = [Container(file) for file in checkpoint_files(path)]
    problem = ""
    try:
        source = Source.of(path, files, source_dialect, undeclared=True)
    except (UnsupportedError, DialectError, CorruptFileError) as e:
        source, problem = Source.of(path, files, undeclared=True, foreign=False), str(e)
    values = source.values
    rows: list[dict[str, Any]] = []
    for name, value in sorted(values.items()):
        row = _foreign_row(value, scales) if value.stored else _row(value, _scale_of(value, values), scales)
        rows.append({"name": name, "file": value.file, **row, "bytes": value.nbytes})
    return Inspection(rows, _dialects(values), problem)


def _row(value: Value, scale: Value | None, scales: bool) -> dict[str, Any]:
    """What is known of a plain tensor, or of one that breccia quantized."""
    suspicious = list(_suspicious(value, scale))
    figures = None
    if scales:
        figures, doubts = _scale_figures(value, scale)
        suspicious += doubts
    config, listed = value.config, value.undeclared.listed if value.undeclared else {}
    return {
        "shape": list(value.shape),
        "stored_as": value.stored_as,
        "dialect": "breccia" if config or value.undeclared else None,
        "recipe": config.recipe.to_dict() if config else listed.get("recipe"),
        "layout": config.layout.to_dict() if config else listed.get("layout"),
        "scaled_by": scale.name if scale else None,
        "block": scale and tile(value.shape, scale.shape),
        "scales": figures,
        "parameters": math.prod(value.shape),
        "suspicious": suspicious,
    }


def _foreign_row(value: Value, scales: bool) -> dict[str, Any]:
    """What is known of a value that another program quantized."""
    stored = value.stored
    assert stored is not None
    row: dict[str, Any] = dict.fromkeys(("recipe", "layout", "block", "scales"))
    row |= {"dialect": stored.dialect.name, "scaled_by": _scale_part(stored), "suspicious": []}
    try:
        recipe, shape = stored.form.recipe, value.shape
        row |= {
            "shape": list(shape), "stored_as": recipe.name, "recipe": recipe.to_dict(), "layout": value.layout.to_dict(),
            "block": _block_of(value), "parameters": math.prod(shape),
        }  # fmt: skip
        if scales:
            codec = recipe.format.scale.codec
            numbers = np.asarray(codec.read(NUMPY, np.asarray(value.tensor().scale))).reshape(-1)
            doubts = _doubts("scale", numbers, codec.bits > 8)
            row["scales"] = _figures_of(numbers)
            row["suspicious"] = [doubt for doubt in doubts if not doubt.endswith(" zero")]  # those of blocks of zeros
    except BrecciaError as e:
        entry = value.container.entries[value.largest]
        row |= {"shape": list(entry.shape), "stored_as": entry.dtype, "parameters": math.prod(entry.shape)}
        row["suspicious"] = [str(e)]
    return row


def _scale_part(stored: Stored) -> str | None:
    """The tensor with the scales of a value."""
    return next((part for end, part in stored.parts.items() if "scale" in end or end.endswith(("absmax", "SCB"))), None)


def _block_of(value: Value) -> tuple[int, ...]:
    """The lengths that a scale covers."""
    shape = value.shape
    block = value.layout.block(value.axis)
    if block == TENSOR:
        return tuple(shape)
    sides = tuple(n if side is None else side for n, side in zip(shape[-2:], block, strict=True))
    return (1,) * (len(shape) - 2) + sides


def _dialects(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    """The dialects of a checkpoint, the most common first."""
    stored = [value.stored for value in values.values() if value.stored]
    first = {one.dialect.name: one for one in reversed(stored)}
    listed: list[dict[str, Any]] = []
    for name, count in Counter(one.dialect.name for one in stored).most_common():
        one = first[name]
        seen = [f"{part} is {one.files[part].entries[part].dtype}" for part in one.parts.values()]
        evidence = [f"{one.config.where} is {one.config.method!r}"] if one.config else []
        listed.append({"name": name, "title": one.dialect.title, "values": count, "evidence": [*evidence, ", ".join(seen)]})
    return listed


def _is_scale(name: str) -> bool:
    """Does another program name scales like this?"""
    return name.endswith(_SCALE_SUFFIXES) or name.rpartition(".")[2] in _SCALE_WORDS


def _is_other_matrix(tensor: Value, *dtypes: str) -> bool:
    """Is it a matrix of another program, not a scale, of a dtype with one of these prefixes?"""
    return (
        tensor.config is None
        and tensor.undeclared is None
        and len(tensor.shape) > 1
        and not _is_scale(tensor.name)
        and tensor.stored_as.startswith(dtypes)
    )


def _is_code(tensor: Value) -> bool:
    """Does its dtype mark it as codes of another program, which need scales?"""
    return _is_other_matrix(tensor, "F8_E4M3", "F8_E5M2", "F4", "F6_")


def _scale_of(tensor: Value, tensors: Mapping[str, Value]) -> Value | None:
    """The scale of a tensor of codes (or of bytes that may be codes), by the names that other programs use."""
    if not _is_other_matrix(tensor, "U8", "I8") and not _is_code(tensor):
        return None
    stem = tensor.name.rpartition(".")[0]
    names = [tensor.name + suffix for suffix in _SCALE_SUFFIXES]
    names += [f"{stem}.{word}" if stem else word for word in _SCALE_WORDS]
    return next((tensors[name] for name in names if name in tensors and name != tensor.name), None)


def _suspicious(tensor: Value, scale: Value | None) -> Iterator[str]:
    """Doubts that follow from the headers alone."""
    if tensor.undeclared is not None:
        yield tensor.undeclared.reason
        return
    if tensor.config is not None:
        wanted, scale_dtype = tensor.config.recipe.format.scale.codec.name, tensor.config.scale_dtype
        if scale_dtype and scale_dtype != wanted:
            yield f"its scales are {scale_dtype}; the recipe writes {wanted}"
        yield from _contradictions(tensor)
    elif _is_code(tensor) and scale is None:
        yield f"{tensor.stored_as} codes without scales under any name that breccia knows"
    elif scale is not None:
        if scale.stored_as not in _SCALE_CODECS:
            yield f"{scale.name} is {scale.stored_as}, which is not a scale dtype"
        if tile(tensor.shape, scale.shape) is None:
            yield f"{scale.name} of shape {spelled(scale.shape)} does not tile shape {spelled(tensor.shape)}"


def _contradictions(tensor: Value) -> Iterator[str]:
    """Components whose shapes contradict the config's logical shape."""
    config, entries = tensor.config, tensor.container.entries
    if config is None or config.shape is None:
        return
    data = list(config.shape)
    data[config.axis] = packed_length(config.recipe.format.element, data[config.axis])
    wanted: dict[str, tuple[Shape, ...]] = {"data": (tuple(data),)}
    try:
        wanted["scale"] = config.layout.scale_shapes(config.shape, config.axis)
    except LayoutError as e:
        yield str(e)
    for part, shapes in wanted.items():
        shape = entries[f"{tensor.name}.{part}"].shape
        if shape not in shapes and not (part == "scale" and config.layout.block(config.axis) == TENSOR):
            asked = " or ".join(map(spelled, shapes))
            yield f"its {part} has shape {spelled(shape)}; its config says {spelled(config.shape)}, which needs {asked}"


def tile(shape: Shape, scales: Shape) -> tuple[int, ...] | None:
    """The block that each scale covers, if scales of that shape tile a tensor of that shape."""
    if math.prod(scales) == 1:
        return shape
    if len(scales) == 1 and len(shape) == 2:  # of rows, or of columns
        scales = (scales[0], 1) if scales[0] == shape[0] else (1, scales[0]) if scales[0] == shape[1] else (0, 0)
    if len(scales) != len(shape):
        return None
    sides = tuple(_side(n, count) for n, count in zip(shape, scales, strict=True))
    return None if 0 in sides else sides


def _side(length: int, count: int) -> int:
    """The block length of `count` blocks that cover `length`: a power of two, with a partial last block, or a divisor.

    0 if there is neither.
    """
    if count == 1 or not 0 < count <= length:
        return length if count == 1 else 0
    power = 1 << (-(-length // count) - 1).bit_length()
    return power if -(-length // power) == count else length // count if length % count == 0 else 0


def _scale_figures(tensor: Value, scale: Value | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Statistics of a tensor's scales by name, and doubts about them."""
    parts: list[tuple[str, np.ndarray, bool]] = []
    if tensor.config is not None:
        codec = tensor.config.recipe.format.scale.codec
        parts = [
            (part, _values(tensor.container, f"{tensor.name}.{part}", codec if part == "scale" else F32), codec.bits > 8)
            for part in ("scale", "global_scale")
            if f"{tensor.name}.{part}" in tensor.container.entries
        ]
    elif scale is not None and scale.stored_as in _SCALE_CODECS:
        named = _CODECS[_SCALE_CODECS[scale.stored_as]]
        parts = [(scale.name, _values(scale.container, scale.name, named), named.bits > 8)]
    if not parts:
        return None, []
    doubts = [doubt for name, values, is_float in parts for doubt in _doubts(name, values, is_float)]
    _, values, _ = parts[0]
    return _figures_of(values), doubts


def _figures_of(values: np.ndarray) -> dict[str, Any]:
    """The number of scales, and the least, median and largest finite one."""
    finite = values[np.isfinite(values)]
    low, middle, high = (float(f(finite)) if finite.size else None for f in (np.min, np.median, np.max))
    return {"count": int(values.size), "min": low, "median": middle, "max": high}


def _values(container: Container, entry: str, codec: Codec) -> np.ndarray:
    """Stored scales as FP32."""
    dtype = container.entries[entry].dtype
    if codec.bits > 8 and dtype != codec.name:  # a float scale kept in its original dtype
        codec = _CODECS[dtype]
    return np.asarray(codec.read(NUMPY, container.read(entry))).reshape(-1)


def _doubts(name: str, values: np.ndarray, is_float: bool) -> Iterator[str]:
    """Suspicious scales. Blocks of zeros have 8-bit scales of zero, and float scales of 1."""
    of = f"of {values.size}"
    counts = {
        "NaN (their blocks contained NaN or Inf)": np.isnan(values),
        "Inf": np.isinf(values),
        "negative": values < 0,
    }
    if is_float:
        magnitude = np.abs(values)
        counts["zero"] = values == 0
        counts["subnormal in FP32, which some hardware reads as zero"] = (magnitude > 0) & (magnitude < 2.0**-126)
    for what, mask in counts.items():
        if mask.any():
            yield f"{name}: {int(mask.sum())} {of} {what}"
    if is_float and values.size > 1 and (values == 1).all():
        yield f"{name}: all are 1, as for blocks of zeros, or as if none had been computed"
    computed = values[np.isfinite(values) & (values > 0) & ~(is_float & (values == 1))]
    if computed.size > 1:
        ratio = float(computed.max()) / float(np.median(computed))
        if ratio > OUTLIER:
            yield f"{name}: the largest is {ratio:.3g} times the median"
