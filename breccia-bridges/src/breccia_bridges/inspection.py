"""The contents of a checkpoint, from its headers, and what looks wrong about its scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breccia import BrecciaError, CorruptFileError, DialectError, LayoutError, UnsupportedError
from breccia.backend import CODECS, F32, NUMPY, TENSOR, reference
from breccia.internal import in_records, packed_length

from .checkpoint import all_opened, checkpoint_files
from .configs import Config
from .safetensors_file import Container, Shape
from .source import Source, Value
from .stored import Stored
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

    rows: one for each value, by name; "type" is that of a GGUF file.
    kinds: the sums over the rows of each dialect and recipe, or dtype, the largest first.
    dialects: of what other programs quantized, each with its title, the number of its values and the evidence.
    problem: why what other programs quantized cannot be read, if it cannot: then rows are of tensors.
    """

    rows: list[dict[str, Any]]
    kinds: list[dict[str, Any]]
    dialects: list[dict[str, Any]]
    problem: str = ""


def inspected(path: Path, scales: bool = False, source_dialect: str | None = None) -> Inspection:
    """The values of a checkpoint. `scales` reads the scales too, but no other data."""
    files = all_opened(checkpoint_files(path))
    problem = ""
    try:
        source = Source.of(path, files, source_dialect, undeclared=True)
    except (UnsupportedError, DialectError, CorruptFileError) as e:
        source, problem = Source.of(path, files, undeclared=True, foreign=False), str(e)
    values = source.values
    rows: list[dict[str, Any]] = []
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for name, value in sorted(values.items()):
        row = _foreign_row(value, scales) if value.stored else _row(value, _scale_of(value, values), scales)
        rows.append({"name": name, "file": value.file, **row, "bytes": value.nbytes})
        kind = value.recipe if row["recipe"] else None
        kinds.setdefault((row["dialect"], stored_as(row, kind.spec if kind else None), kind), []).append(rows[-1])
    return Inspection(rows, _kinds(kinds), _dialects(values), problem)


def _kinds(rows: Mapping[tuple[Any, ...], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Sums over rows, by their dialect, what they are stored as, and the recipe of scaled ones."""
    kinds = [
        {
            "dialect": dialect,
            "stored_as": what,
            "tensors": len(own),
            **{key: sum(row[key] for row in own) for key in ("parameters", "bytes")},
        }
        for (dialect, what, _), own in rows.items()
    ]
    return sorted(kinds, key=lambda kind: -kind["bytes"])


def stored_as(row: Mapping[str, Any], spec: str | None = None) -> str:
    """What a value is stored as, with its type in a GGUF file. spec: the recipe's, in place of its name."""
    if row["type"] is None:
        return spec or row["stored_as"]
    if row["dialect"] is None:
        return f"{row['type']}, decoded to {row['stored_as']}"
    if row["recipe"] is None or row["stored_as"] == row["dialect"]:  # of the recipe that has the types of GGUF
        return row["type"]
    return f"{row['type']}, as {spec or row['stored_as']}"


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
        "type": value.container.decoded.get(value.largest),
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
    row["type"] = value.container.entries[value.largest].dtype if stored.dialect.name == "gguf" else None
    try:
        recipe, shape = stored.form.recipe, value.shape
        row |= {
            "shape": list(shape), "stored_as": recipe.name, "recipe": recipe.to_dict(), "layout": value.layout.to_dict(),
            "block": _block_of(value), "parameters": math.prod(shape),
        }  # fmt: skip
        if scales:
            codec = recipe.format.scale_codec
            numbers = reference.scale_values(NUMPY, np.asarray(value.tensor().scale), recipe.format).reshape(-1)
            doubts = _doubts("scale", numbers, codec.bits > 8)
            row["scales"] = _figures_of(numbers)
            # Zeros are those of blocks of zeros, and ggml lets the largest element choose the sign.
            usual = (" zero", " negative") if stored.dialect.name == "gguf" else (" zero",)
            row["suspicious"] = [doubt for doubt in doubts if not doubt.endswith(usual)]
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
    """The dialects of a checkpoint, the most common first, each with an example of all dtypes that its values consist of."""
    stored = [value.stored for value in values.values() if value.stored]
    counts = Counter(one.dialect.name for one in stored)
    first: dict[str, dict[Any, Stored]] = {}
    for one in stored:
        dtypes = tuple((end, one.files[part].entries[part].dtype) for end, part in one.parts.items())
        first.setdefault(one.dialect.name, {}).setdefault(dtypes, one)
    listed: list[dict[str, Any]] = []
    for name, count in counts.most_common():
        ones = list(first[name].values())
        config = ones[0].config
        evidence = [f"{config.where} is {config.method!r}"] if config else []
        evidence += [
            ", ".join(f"{part} is {one.files[part].entries[part].dtype}" for part in one.parts.values()) for one in ones
        ]
        listed.append({"name": name, "title": ones[0].dialect.title, "values": count, "evidence": evidence})
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
        wanted, scale_dtype = tensor.config.recipe.format.scale_codec.name, tensor.config.scale_dtype
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
        shapes = config.layout.scale_shapes(config.shape, config.axis)
        wanted["scale"] = tuple(in_records(config.recipe.format, "scale", shape, config.axis) for shape in shapes)
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
        config = tensor.config
        codec = config.recipe.format.scale_codec
        parts = [
            (part, _values(tensor.container, f"{tensor.name}.{part}", config if part == "scale" else None), codec.bits > 8)
            for part in ("scale", "global_scale")
            if f"{tensor.name}.{part}" in tensor.container.entries
        ]
    elif scale is not None and scale.stored_as in _SCALE_CODECS:
        named = _CODECS[_SCALE_CODECS[scale.stored_as]]
        numbers = np.asarray(named.read(NUMPY, scale.container.read(scale.name))).reshape(-1)
        parts = [(scale.name, numbers, named.bits > 8)]
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


def _values(container: Container, entry: str, config: Config | None) -> np.ndarray:
    """Stored scales as FP32: those of the blocks of a tensor with this config, or its global scale."""
    stored = container.read(entry)
    if config is None:
        return np.asarray(F32.read(NUMPY, stored)).reshape(-1)
    codec, dtype = config.recipe.format.scale_codec, container.entries[entry].dtype
    if codec.bits > 8 and dtype != codec.name:  # a float scale kept in its original dtype
        return np.asarray(_CODECS[dtype].read(NUMPY, stored)).reshape(-1)
    if config.axis == -2:
        stored = stored.swapaxes(-1, -2)
    return reference.scale_values(NUMPY, stored, config.recipe.format).reshape(-1)


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
