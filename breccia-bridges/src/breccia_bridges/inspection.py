"""What a checkpoint holds, from its headers; and what looks wrong about its scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from breccia import LayoutError
from breccia.backend import CODECS, F32, NUMPY, TENSOR, Codec, packed_length

from .compare import Held, held_tensors
from .safetensors_file import Container, Shape
from .text import spelled

#: How others name the scales of a tensor `name`: a suffix of the whole name, or a last word in the place of `weight`.
_FOREIGN_SUFFIXES = ("_scale_inv", "_scale", ".scale", ".scales", "_scales")
_FOREIGN_WORDS = ("weight_scale", "scale", "scales", "scale_weight")

#: Codecs that scales are stored in, by the file's dtype. U8 is E8M0 where only the header of a stranger tells.
_SCALE_CODECS = {"F8_E8M0": "E8M0", "U8": "E8M0", "F8_E4M3": "E4M3", "F32": "F32", "F16": "F16", "BF16": "BF16"}

_CODECS = {codec.name: codec for codec in CODECS}

#: A scale this many times the tensor's median one is worth a look: one outlier sets the step of its whole block.
OUTLIER = 1000.0


def inspected(path: Path, scales: bool = False) -> list[dict[str, Any]]:
    """A row for each tensor, by name. `scales` reads the scales as well, and nothing else of the data."""
    tensors = held_tensors(path, undeclared=True)
    foreign = {name: found for name, held in tensors.items() if (found := _scale_of(held, tensors))}
    rows: list[dict[str, Any]] = []
    for name, held in sorted(tensors.items()):
        scale = foreign.get(name)
        suspicious = list(_suspicious(held, scale))
        figures = None
        if scales:
            figures, doubts = _scale_figures(held, scale)
            suspicious += doubts
        config, listed = held.config, held.undeclared.listed if held.undeclared else {}
        rows.append(
            {
                "name": name,
                "file": held.container.path.name,
                "shape": list(held.shape),
                "stored_as": held.stored_as,
                "recipe": config.recipe.to_dict() if config else listed.get("recipe"),
                "layout": config.layout.to_dict() if config else listed.get("layout"),
                "scaled_by": scale.name if scale else None,
                "block": scale and tile(held.shape, scale.shape),
                "scales": figures,
                "parameters": math.prod(held.shape),
                "bytes": held.nbytes,
                "suspicious": suspicious,
            }
        )
    return rows


def _is_scale(name: str) -> bool:
    """Is it a name that others give to scales?"""
    return name.endswith(_FOREIGN_SUFFIXES) or name.rpartition(".")[2] in _FOREIGN_WORDS


def _is_foreign(held: Held, *dtypes: str) -> bool:
    """Is it a stranger's matrix, no scale, of a dtype that begins so?"""
    return (
        held.config is None
        and held.undeclared is None
        and len(held.shape) > 1
        and not _is_scale(held.name)
        and held.stored_as.startswith(dtypes)
    )


def _is_code(held: Held) -> bool:
    """Are these, by their dtype, codes of a stranger that need scales?"""
    return _is_foreign(held, "F8_E4M3", "F8_E5M2", "F4", "F6_")


def _scale_of(held: Held, tensors: dict[str, Held]) -> Held | None:
    """The tensor that another program's names make the scale of this one: of codes, or of bytes that may be."""
    if not _is_foreign(held, "U8", "I8") and not _is_code(held):
        return None
    stem = held.name.rpartition(".")[0]
    names = [held.name + suffix for suffix in _FOREIGN_SUFFIXES]
    names += [f"{stem}.{word}" if stem else word for word in _FOREIGN_WORDS]
    return next((tensors[name] for name in names if name in tensors and name != held.name), None)


def _suspicious(held: Held, scale: Held | None) -> Iterator[str]:
    """What the headers alone give away."""
    if held.undeclared is not None:
        yield held.undeclared.reason
        return
    if held.config is not None:
        wanted, found = held.config.recipe.format.scale.codec.name, held.config.scale_dtype
        if found and found != wanted:
            yield f"its scales are {found}; the recipe writes {wanted}"
        yield from _contradictions(held)
    elif _is_code(held) and scale is None:
        yield f"{held.stored_as} codes without scales that breccia knows by name"
    elif scale is not None:
        if scale.stored_as not in _SCALE_CODECS:
            yield f"{scale.name} is {scale.stored_as}, which is no dtype of scales"
        if tile(held.shape, scale.shape) is None:
            yield f"{scale.name} of shape {spelled(scale.shape)} does not tile shape {spelled(held.shape)}"


def _contradictions(held: Held) -> Iterator[str]:
    """Parts of other shapes than the config's logical shape asks for."""
    config, entries = held.config, held.container.entries
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
        found = entries[f"{held.name}.{part}"].shape
        if found not in shapes and not (part == "scale" and config.layout.block(config.axis) == TENSOR):
            asked = " or ".join(map(spelled, shapes))
            yield f"its {part} has shape {spelled(found)}; its config says {spelled(config.shape)}, which takes {asked}"


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
    """A block's length where `count` blocks cover `length`: a power of two, whose last block may be short, or a divisor.

    0 where there is neither.
    """
    if count == 1 or not 0 < count <= length:
        return length if count == 1 else 0
    power = 1 << (-(-length // count) - 1).bit_length()
    return power if -(-length // power) == count else length // count if length % count == 0 else 0


def _scale_figures(held: Held, scale: Held | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Figures of a tensor's scales by name, and doubts about them."""
    parts: list[tuple[str, np.ndarray, bool]] = []
    if held.config is not None:
        codec = held.config.recipe.format.scale.codec
        parts = [
            (part, _values(held.container, f"{held.name}.{part}", codec if part == "scale" else F32), codec.bits > 8)
            for part in ("scale", "global_scale")
            if f"{held.name}.{part}" in held.container.entries
        ]
    elif scale is not None and scale.stored_as in _SCALE_CODECS:
        named = _CODECS[_SCALE_CODECS[scale.stored_as]]
        parts = [(scale.name, _values(scale.container, scale.name, named), named.bits > 8)]
    if not parts:
        return None, []
    doubts = [doubt for name, values, is_float in parts for doubt in _doubts(name, values, is_float)]
    _, values, _ = parts[0]
    finite = values[np.isfinite(values)]
    low, middle, high = (float(f(finite)) if finite.size else None for f in (np.min, np.median, np.max))
    return {"count": int(values.size), "min": low, "median": middle, "max": high}, doubts


def _values(container: Container, entry: str, codec: Codec) -> np.ndarray:
    """Stored scales as FP32."""
    found = container.entries[entry].dtype
    if codec.bits > 8 and found != codec.name:  # a float scale that was kept as it came
        codec = _CODECS[found]
    return np.asarray(codec.read(NUMPY, container.array(entry))).reshape(-1)


def _doubts(name: str, values: np.ndarray, is_float: bool) -> Iterator[str]:
    """What is odd about scales. 8-bit scales are zero in blocks of zeros; float ones are 1 there."""
    of = f"of {values.size}"
    counts = {
        "NaN (their blocks held NaN or Inf)": np.isnan(values),
        "Inf": np.isinf(values),
        "negative": values < 0,
    }
    if is_float:
        magnitude = np.abs(values)
        counts["zero"] = values == 0
        counts["subnormal in FP32, which some hardware reads as zero"] = (magnitude > 0) & (magnitude < 2.0**-126)
    for what, found in counts.items():
        if found.any():
            yield f"{name}: {int(found.sum())} {of} {what}"
    if is_float and values.size > 1 and (values == 1).all():
        yield f"{name}: all are 1, as those of zeros are, or as if none had been computed"
    computed = values[np.isfinite(values) & (values > 0) & ~(is_float & (values == 1))]
    if computed.size > 1:
        ratio = float(computed.max()) / float(np.median(computed))
        if ratio > OUTLIER:
            yield f"{name}: the largest is {ratio:.3g} times the median"
