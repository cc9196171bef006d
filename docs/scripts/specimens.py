"""Tables of docs/spec/formats: the components of each format, tables of codes, and worked blocks.

Values are computed by the oracle (`breccia.testing.oracle`); components and sources are read from the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from harness.blocks import table
from listings import NONE, either, variants

from breccia import codecs
from breccia.cli.recipes import bits_per_value
from breccia.codecs import Codec, Minifloat
from breccia.dispatch.registry import registry
from breccia.formats import Format, Record
from breccia.recipes import GGUFScaling, ScalingRecipe, choices_of
from breccia.testing import oracle, oracle_records, vectors

#: Codes per table row.
WIDE = 8
#: Recipe and values of a worked block; zeros fill the block.
WORKED: dict[str, tuple[dict[str, Any], list[float]]] = {
    "fp8_current": ({}, [1, -2, 3.5, 448]),
    "fp8_row": ({}, [2, 4, -8, 896]),
    "fp8_block": ({"block_k": 4}, [0.3, -0.1, 0, 0.02, 60, -7.5, 1, 2**-6]),
    "mxfp8": ({}, [5, -0.25, 0.013, 480]),
    "mxfp6": ({}, [5, -0.2, 0.3125, 7.5]),
    "mxfp4": ({}, [5, -0.7, 0.25, 2.5]),
    "mxint8": ({}, [1.5, -0.26, 1.984375, -2]),
    "nvfp4": ({}, [6, -0.7, 0.25, 2.5]),
    "int4": ({"group_size": 4, "signed": False, "symmetric": False, "scale_dtype": "fp32"}, [-1, 14, 0, 6.4]),
    "int8": ({}, [127, -3, 0.5, 1.5]),
    "int": ({"bits": 3, "group_size": 8, "scale_dtype": "fp32"}, [3, -3, 1.5, 0.5, -1, 2, 0, -2.6]),
    "nf4": ({"block_size": 4}, [2, -2, 0.2, 0]),
    "gguf": ({}, [-3.9375, 10.828125, 6.4, -1, 2.5, 0.5, 9, 0]),
}


def number(value: float) -> str:
    """The shortest decimal that reads back as the FP32 number; -0 keeps its sign."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    text = str(np.float32(value)).removesuffix(".0")
    return f"−{text[1:]}" if text.startswith("-") else text


def decoded(codec: Codec, code: int) -> str:
    return number(oracle.decode(codec, code))


def codes(codec: Codec) -> str:
    """The values of a codec by code. If it has a sign bit, only codes without it."""
    half = isinstance(codec, Minifloat) and codec.signed
    every = range(1 << (codec.bits - half))
    digits = math.ceil(codec.bits / 4)
    rows = [[f"`{n:0{digits}X}`", *(decoded(codec, c) for c in every[n : n + WIDE])] for n in every[::WIDE]]
    sign = 1 << (codec.bits - 1)
    zero = "NaN" if getattr(codec, "fnuz", False) else "−0"
    note = f"\nCodes from `{sign:0{digits}X}` on are their negatives; `{sign:0{digits}X}` is {zero}.\n" if half else ""
    return table(["code", *(f"+{n}" for n in range(min(WIDE, len(every))))], rows) + note


def components(name: str) -> str:
    """The stored components of a matrix (M, K), with contraction axis K, and the sources that define the format."""
    kind = registry().recipes[name]
    formats = list(dict.fromkeys(v.format for v in variants(kind)))
    found: dict[tuple[str, str, str], list[Format]] = {}
    for fmt in formats:
        for component in fmt.parts:
            found.setdefault((component, shape(component, fmt), presence(component, fmt)), []).append(fmt)
    rows: list[list[str]] = []
    for (component, dimensions, when), having in sorted(found.items(), key=lambda item: vectors.PARTS.index(item[0][0])):
        used = dict.fromkeys(f.parts[component] for f in having)
        names = either("integer" if codec is None else codec.name for codec in used)
        rows.append([f"`{component}`", names, either(map(on_disk, used)), dimensions, when])
    sources = dict.fromkeys([kind.source, *(f.element.source for f in formats), *(f.scale.codec.source for f in formats)])
    return (
        table(["component", "codec", "in a file", "shape for (M, K)", "present"], rows) + f"\nSources: {'; '.join(sources)}.\n"
    )


def on_disk(codec: Codec | None) -> str:
    return "U8" if codec is None or codec.bits <= 8 else codec.name


def presence(component: str, fmt: Format) -> str:
    """When a tensor has the component."""
    if component == "zero_point":
        return f'with `offset="{fmt.offset}"`'
    return "with two levels" if component == "global_scale" else "always"


def shape(component: str, fmt: Format) -> str:
    """The shape of the component for a matrix (M, K)."""
    if component == "global_scale":
        return "()"
    if component == "data":
        count, size = vectors.unit(fmt.element)
        return "(M, K)" if count == 1 else f"(M, {size if size > 1 else ''}⌈K/{count}⌉)"
    (m, k), record = fmt.block, fmt.record(component)
    if k is None:
        return "()" if m is None else "(M, 1)"
    return f"({'M' if m == 1 else f'⌈M/{m}⌉'}, {record.nbytes if record else ''}⌈K/{k}⌉)"


def types_of_gguf() -> str:
    """The levels of each type of `GGUFScaling`, the bytes of a record, the bits of a value, and whether casts write it."""
    rows: list[list[str]] = []
    for name in choices_of(GGUFScaling, "type")[0]:
        recipe = GGUFScaling(name)
        fmt, record = recipe.format, recipe.format.scale_record
        scales = ", ".join(f"{level.codec.name} per {level.block[1]}" for level in fmt.levels)
        biases = "as the scales" if fmt.offset_levels else NONE
        size, written = str(record.nbytes) if record else NONE, "no" if recipe.decode_only else "yes"
        rows.append([f"`{name}`", fmt.element.name, scales, biases, size, f"{bits_per_value(recipe):g}", written])
    return table(["type", "element", "scales", "biases", "bytes of a record", "bits per value", "`cast` writes it"], rows)


def worked(name: str) -> str:
    """One or two blocks cast by the oracle: the scale, and the code, its value and the decoded value of each number."""
    fields, values = WORKED[name]
    recipe: ScalingRecipe = registry().recipes[name](**fields)
    fmt, k = recipe.format, recipe.format.block[1] or len(values)
    x = np.zeros((1, math.ceil(len(values) / k) * k), np.float32)
    x[0, : len(values)] = values
    written = oracle.cast(x, recipe)
    back = oracle.dequantize(written, recipe)
    digits = math.ceil(fmt.element.bits / 4)
    rows = [
        [number(float(x[0, i])), f"`{code:0{digits}X}`", decoded(fmt.element, code), number(float(back[0, i]))]
        for i, code in enumerate(written.codes[0, : len(values)].tolist())
    ]
    said = [f"- scale {listed(np.ravel(written.scale), fmt.scale_codec, fmt.scale_record)}"]
    if written.global_scale is not None:
        said.append(f"- tensor scale {listed(np.ravel(written.global_scale), codecs.F32)}")
    if written.zero_point is not None:
        said.append(
            f"- {fmt.offset.replace('_', '-')} {listed(np.ravel(written.zero_point), fmt.offset_codec, fmt.offset_record)}"
        )
    said.append(f"- data {hexadecimal(vectors.packed(written.codes, fmt.element).tobytes())}")
    return f"`{recipe!r}`:\n\n" + table(["x", "code", "code value", "decodes to"], rows) + "\n" + "\n".join(said) + "\n"


def hexadecimal(raw: bytes) -> str:
    """Bytes; zeros at the end are counted where there are more than three."""
    zeros = len(raw) - len(raw.rstrip(b"\0"))
    return f"`{raw[:-zeros].hex(' ').upper()}` and {zeros} bytes 00" if zeros >= 4 else f"`{raw.hex(' ').upper()}`"


def listed(stored: np.ndarray, codec: Codec | None, record: Record | None = None) -> str:
    """Codes of scales in hexadecimal, with their values; integers without a codec; a record, and the codes that it holds."""
    if codec is None:
        return ", ".join(map(str, stored))
    if record is None:
        return ", ".join(f"`{int(c):0{codec.bits // 4}X}` ({decoded(codec, int(c))})" for c in stored)
    levels = zip(record.levels, oracle_records.from_bytes(record.levels, stored), strict=True)
    held = [f"{level.codec.name} {', '.join(decoded(level.codec, int(c)) for c in codes)}" for level, codes in levels]
    return f"record {hexadecimal(stored.astype(np.uint8).tobytes())}: {'; '.join(held)}"


BLOCKS: dict[str, Callable[[], str]] = {
    **{f"codes-{c.name}": partial(codes, c) for c in codecs.CODECS if c.bits <= 8},
    **{f"components-{name}": partial(components, name) for name in WORKED},
    **{f"worked-{name}": partial(worked, name) for name in WORKED},
    "types-gguf": types_of_gguf,
}
