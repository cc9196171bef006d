"""Golden vectors: inputs that test every clause of the contract, the bytes that a cast writes, and the decoded values.

A set is a folder of three files, readable from any language (docs/spec/vectors.md): `vectors.bin`, all arrays concatenated;
`index.json`; and `index.txt`, the same index as fields for scanf. All contents are computed by the oracle and from integers,
without the generic algorithm or a library's random generator. A published set never changes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..codecs import BF16, CODECS, F16, F32, Codec, Integer, Lookup, Minifloat, PowerOfTwo
from ..errors import CorruptFileError
from ..formats import NUMERICS, ORDERS, Level
from ..recipes import ScalingRecipe
from ..tensors.grids import in_records
from . import oracle, two_codecs
from .steps import StepsScaling
from .vector_inputs import (
    EDGES,
    GROUPS,
    QUIET_NAN,
    columns,
    group_index,
    importance,
    indexed_recipes,
    random_words,
    recipes,
    supplied_scales,
)

#: Number of the newest set, and name of its folder. A set has what those before it lack: more recipes or edges are a new set.
VERSION = 7
MADE_BY = "breccia.testing.oracle, which follows docs/spec/numerics.md in exact rationals and by enumeration"
COMPARISON = "all bits equal, signs of zeros too; decoded: any NaN equals any NaN (0x7FC00000 stands for it)"
BYTES, INDEX, TEXT = "vectors.bin", "index.json", "index.txt"
#: Arrays of a vector, in the order they have in the file.
PARTS = ("input", "supplied", "data", "scale", "zero_point", "global_scale", "decoded")
#: Of a search for scales: the edge, and the array that a cast takes besides its input.
IMPORTANCE = "importance"
#: The edge of groups that are given by an index, and that index.
GROUP_INDEX = "group_index"
INPUTS = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Vector:
    """One cast: its input and options, and the expected output.

    input: bit patterns in the logical shape, uint32 (float32) or uint16.
    supplied: codes of the scale supplied to the cast, in the stored shape, or None.
    importance: FP32 bit patterns of the weights of a search for scales, of shape (K,), or None.
    group_index: the group of each element along K, of `vector_inputs.GROUPS`, or None.
    decoded: FP32 bit patterns in the logical shape. data: packed, as stored.
    scale, zero_point: codes as stored, as wide as their codec; global_scale: FP32 bits.
    """

    recipe: ScalingRecipe
    edge: str
    input: np.ndarray
    dtype: str = "float32"
    axis: int = -1
    rounding: str = "nearest"
    seed: int | None = None
    supplied: np.ndarray | None = None
    data: np.ndarray | None = None
    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    global_scale: np.ndarray | None = None
    decoded: np.ndarray | None = None
    importance: np.ndarray | None = None
    group_index: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.input.shape


# ------------------------------------------------------------------------------------------------ inputs

#: The edge of recipes that are only decoded: random components, and an input of zeros, which no cast reads.
STORED = "stored"


def inputs(version: int | None = None) -> Iterator[Vector]:
    """Every vector of a set, or of all, without results."""
    for number in range(1, VERSION + 1) if version is None else (version,):
        for recipe in recipes(number):
            yield from _of_recipe(recipe)
        for recipe in indexed_recipes(number):
            for edge in ("ordinary", "wide", "zeros", "nan", "ragged", "axis=-2", "bfloat16"):
                draw, options = EDGES[edge]
                x = draw(recipe)
                index = group_index(x.shape[options.get("axis", -1)], recipe.format.scale.block[1] or 0)
                yield Vector(recipe, GROUP_INDEX, x, group_index=index, **options)


def _of_recipe(recipe: ScalingRecipe) -> Iterator[Vector]:
    """The vectors of a recipe, in blocks."""
    if recipe.decode_only:
        yield Vector(recipe, STORED, np.zeros((4, columns(recipe)), np.uint32))
        return
    for edge, (draw, options) in EDGES.items():
        if "supplied" in options and recipe.format.scale_record is not None and recipe.format.global_scale is None:
            continue  # coded scales are not supplied
        x = draw(recipe)
        fields = dict(options)
        if "supplied" in options:
            fields["supplied"] = supplied_scales(recipe, x.shape, options["supplied"])
        yield Vector(recipe, edge, x, **fields)
    if recipe.searches and recipe.format.rotation is None:
        for edge in ("ordinary", "axis=-2"):
            draw, options = EDGES[edge]
            x = draw(recipe)
            yield Vector(recipe, IMPORTANCE, x, importance=importance(x.shape[options.get("axis", -1)]), **options)


# ------------------------------------------------------------------------------------------------ results


def _k_last(a: np.ndarray, axis: int) -> np.ndarray:
    return np.ascontiguousarray(a.swapaxes(-1, -2)) if axis == -2 and a.ndim >= 2 else a


def expanded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Bit patterns of `dtype` converted to FP32, exactly."""
    if dtype == "float16":
        return x.view(np.float16).astype(np.float32)
    return (x if dtype == "float32" else x.astype(np.uint32) << 16).view(np.float32)


def unit(codec: Codec) -> tuple[int, int]:
    """(codes, bytes) of the smallest group of codes that fills whole bytes."""
    bits = math.lcm(codec.bits, 8)
    return bits // codec.bits, bits // 8


def packed(codes: np.ndarray, codec: Codec) -> np.ndarray:
    """Codes packed along the last axis: each row is one little-endian integer, with code i at bit i * codec.bits."""
    count, size = unit(codec)
    width = -(-codes.shape[-1] // count) * size
    rows = codes.reshape(-1, codes.shape[-1]).tolist()
    numbers = (sum(code << (codec.bits * i) for i, code in enumerate(row)) for row in rows)
    joined = b"".join(number.to_bytes(width, "little") for number in numbers)
    return np.frombuffer(joined, np.uint8).reshape(*codes.shape[:-1], width)


def with_results(v: Vector) -> Vector:
    """The vector with its results, computed by the oracle."""
    fmt = v.recipe.format
    x = _k_last(expanded(v.input, v.dtype), v.axis)
    scale: Any = v.supplied
    if scale is not None and scale.ndim == 0:
        scale = struct.unpack("<f", struct.pack("<I", int(scale)))[0]
    if v.edge == STORED:
        written = _random(v.recipe, x.shape)
    else:
        weights = None if v.importance is None else v.importance.view(np.float32).tolist()
        groups = None if v.group_index is None else oracle.Groups(v.group_index.tolist(), GROUPS)
        options: dict[str, Any] = {"rounding": v.rounding, "seed": v.seed, "importance": weights, "groups": groups}
        written = oracle.cast(x, v.recipe, scale=scale, **options)
    decoded = oracle.dequantize(written, v.recipe)
    patterns = np.where(np.isnan(decoded), np.uint32(QUIET_NAN), decoded.view(np.uint32))
    offset = fmt.parts.get("zero_point") or (fmt.element if written.zero_point is not None else None)
    return replace(
        v,
        data=_k_last(packed(written.codes, fmt.element), v.axis),
        scale=_stored(_k_last(written.scale, v.axis), fmt.scale_codec.bits),
        zero_point=None if offset is None else _stored(_k_last(_part(written.zero_point), v.axis), max(offset.bits, 8)),
        global_scale=None if written.global_scale is None else np.array(written.global_scale, "<u4"),
        decoded=_k_last(patterns, v.axis),
    )


def _random(recipe: ScalingRecipe, shape: tuple[int, ...]) -> oracle.Written:
    """Any codes under any scales, of a recipe without offset and global scale."""
    fmt = recipe.format
    scales = in_records(fmt, "scale", oracle.scale_shape(shape, fmt.block), -1)
    codes, words = (
        (np.array(random_words(stream, math.prod(of)), np.uint64) % np.uint64(1 << bits)).astype(np.uint32).reshape(of)
        for stream, of, bits in ((13, shape, fmt.element.bits), (14, scales, fmt.scale_codec.bits))
    )
    return oracle.Written(codes, words)


def _part(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array


def _stored(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes.astype(f"<u{bits // 8}")


# ------------------------------------------------------------------------------------------------ files


def files(vectors: Iterable[Vector] | None = None, version: int = VERSION) -> dict[str, bytes]:
    """The files of a set, by name. Default: all its vectors, which takes the oracle tens of seconds."""
    buffer, places = bytearray(), dict[bytes, int]()

    def place(array: np.ndarray | None) -> tuple[int, int] | None:
        """(offset, bytes) of an array; equal arrays are stored once."""
        if array is None:
            return None
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        if raw not in places:
            buffer.extend(bytes(-len(buffer) % 4))
            places[raw] = len(buffer)
            buffer.extend(raw)
        return places[raw], len(raw)

    answers = list(map(with_results, inputs(version)) if vectors is None else vectors)
    used = {F32, F16, BF16, *(codec for v in answers for codec in _codecs(v.recipe))}
    codecs: list[dict[str, Any]] = []
    for codec in (c for c in (*CODECS, *two_codecs.CODECS) if c in used):
        codecs.append(_codec(codec))
        if codec.bits <= 8:
            codecs[-1]["values"] = place(
                np.array([_f32_bits(oracle.decode(codec, c)) for c in range(1 << codec.bits)], np.uint32)
            )
    named: dict[ScalingRecipe, int] = {}
    cases: list[dict[str, Any]] = []
    for v in answers:
        case: dict[str, Any] = {"edge": v.edge, "recipe": named.setdefault(v.recipe, len(named))}
        case |= {"dtype": v.dtype, "shape": list(v.shape), "axis": v.axis, "rounding": v.rounding, "seed": v.seed}
        supplied = place(_stored(v.supplied, v.recipe.format.levels[0].codec.bits) if v.supplied is not None else None)
        parts = {
            name: supplied if name == "supplied" else place(getattr(v, name)) for name in (*PARTS, IMPORTANCE, GROUP_INDEX)
        }
        case |= {} if v.group_index is None else {"groups": GROUPS}
        cases.append(case | {name: part for name, part in parts.items() if part is not None})
    index: dict[str, Any] = {"vectors": version, "numerics": NUMERICS, "made_by": MADE_BY, "comparison": COMPARISON}
    text = _text(codecs, list(named), cases, version).encode()
    index["files"] = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name, raw in ((BYTES, bytes(buffer)), (TEXT, text))
    }
    index |= {"codecs": codecs, "recipes": [_recipe(r) for r in named], "cases": cases}
    return {BYTES: bytes(buffer), TEXT: text, INDEX: _json(index).encode()}


def _codecs(recipe: ScalingRecipe) -> list[Codec]:
    fmt = recipe.format
    elements = [fmt.element] if fmt.alternative is None else [fmt.element, fmt.alternative]
    return elements + [level.codec for level in (*fmt.levels, *fmt.offset_levels)]


def _codec(codec: Codec) -> dict[str, Any]:
    """The declaration of a codec, for the index."""
    facts: dict[str, Any] = {"name": codec.name, "bits": codec.bits}
    match codec:
        case Minifloat():
            facts |= {
                "kind": "float",
                "mantissa_bits": codec.mantissa_bits,
                "bias": codec.bias,
                "nan": codec.nan,
                "inf": codec.inf,
            }
            facts |= {} if codec.signed else {"signed": False}
        case PowerOfTwo():
            facts |= {"kind": "power", "bias": codec.bias, "nan": codec.nan}
        case Integer():
            facts |= {"kind": "signed" if codec.signed else "unsigned", "fraction_bits": codec.fraction_bits}
        case _:
            assert isinstance(codec, Lookup), codec
            facts |= {"kind": "table"}
    return facts


def _f32_bits(value: float) -> int:
    return QUIET_NAN if math.isnan(value) else oracle.f32_bits(value)


def _recipe(recipe: ScalingRecipe) -> dict[str, Any]:
    fmt = recipe.format
    levels, offset_levels = ([_level(level) for level in of] for of in (fmt.levels, fmt.offset_levels))
    # Fields at their default are omitted, as in fingerprints, so that fields added later do not change a set.
    named = {"name": recipe.name, "fields": recipe.changed}
    said: dict[str, Any] = {"recipe": named, "rules": [rule.name for rule in recipe.rules], "fingerprint": recipe.fingerprint()}
    facts: dict[str, Any] = {"element": fmt.element.name, "levels": levels, "offset": fmt.offset}
    facts |= {"offset_levels": offset_levels} if offset_levels else {}
    facts |= {"order": fmt.order} if fmt.order != ORDERS[0] else {}
    facts |= {"factor": oracle.f32_bits(fmt.factor)} if fmt.factor != 1.0 else {}
    facts |= {"precision": fmt.precision} if fmt.precision != "fp32" else {}
    facts |= {"alternative": fmt.alternative.name} if fmt.alternative is not None else {}
    facts |= {"rotation": [fmt.rotation.block, fmt.rotation.seed]} if fmt.rotation is not None else {}
    return said | {"format": facts | {"fingerprint": fmt.fingerprint()}}


def _level(level: Level) -> dict[str, Any]:
    convention = {} if level.convention == "multiplier" else {"convention": level.convention}
    return {"codec": level.codec.name, "block": list(level.block), **convention}


def _json(index: dict[str, Any]) -> str:
    """One line per codec, recipe and case."""
    lists = {name: index[name] for name in ("codecs", "recipes", "cases")}
    head = json.dumps({name: value for name, value in index.items() if name not in lists}, indent=1)[:-2]
    body = (f' "{name}": [\n' + ",\n".join("  " + json.dumps(item) for item in items) + "\n ]" for name, items in lists.items())
    return head + ",\n" + ",\n".join(body) + "\n}\n"


def _text(codecs: list[dict[str, Any]], named: list[ScalingRecipe], cases: list[dict[str, Any]], version: int) -> str:
    """The index as space-separated fields: a line of counts, a line per codec, a line per case. -1 stands for "none"."""
    lines = [f"breccia-vectors {version} {len(codecs)} {len(cases)}"]
    for c in codecs:
        first = c.get("mantissa_bits", c.get("fraction_bits", 0)) if c["kind"] != "table" else c["values"][0]
        kind = c["kind"] if c.get("signed", True) else "magnitude"
        facts = (c["name"], kind, c["bits"], first, c.get("bias", 0), c.get("nan"), c.get("inf"))
        lines.append(" ".join("-1" if fact is None else str(fact) for fact in facts))
    for place, case in enumerate(cases):
        recipe = named[int(case["recipe"])]
        fmt, (m, k) = recipe.format, recipe.format.scale.block
        *lead, rows, columns = case["shape"] if case["axis"] == -1 else [*case["shape"][:-2], *case["shape"][:-3:-1]]
        said = [place, recipe.name, case["edge"], fmt.element.name, fmt.scale.codec.name, fmt.offset, recipe.rules[-1].name]
        said += [
            m or 0,
            k or 0,
            case["axis"],
            math.prod(lead),
            rows,
            columns,
            case["dtype"],
            case["rounding"],
            case["seed"] or 0,
        ]
        said += [case.get(part, [-1])[0] for part in PARTS]
        if version > 2:
            coarse = fmt.block_levels[0] if fmt.scale_record is not None else None
            said += [coarse.codec.name, coarse.block[1], int(fmt.offset_record is not None)] if coarse else ["-1", -1, 0]
            said += [fmt.order, fmt.levels[0].convention]
        if version > 3:
            said.append("-1" if fmt.alternative is None else fmt.alternative.name)
        if version > 4:
            said.append(case.get(IMPORTANCE, [-1])[0])
        if version > 5:
            said += [0, 0] if fmt.rotation is None else [fmt.rotation.block, fmt.rotation.seed]
        if version > 6:
            said += [oracle.f32_bits(fmt.factor), fmt.precision, case.get(GROUP_INDEX, [-1])[0], case.get("groups", 0)]
        lines.append(" ".join(map(str, said)))
    return "\n".join(lines) + "\n"


def write(folder: Path, made: dict[str, bytes]) -> Path:
    """Write a set under `folder` and return its path. Raises FileExistsError if a file exists with other contents."""
    target = folder / str(VERSION)
    for name, raw in made.items():
        if (target / name).exists() and (target / name).read_bytes() != raw:
            raise FileExistsError(
                f"{target / name} differs from what the oracle computes now. A published set never changes: set VERSION of "
                f"breccia.testing.vectors to the next number, or remove {target} if it is not published yet."
            )
    target.mkdir(parents=True, exist_ok=True)
    for name, raw in made.items():
        (target / name).write_bytes(raw)
    return target


def read(folder: Path) -> list[Vector]:
    """Read a set, after checking the hashes of its files. Raises CorruptFileError that names a changed file."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    contents = {name: (folder / name).read_bytes() for name in index["files"]}
    for name, raw in contents.items():
        if hashlib.sha256(raw).hexdigest() != index["files"][name]["sha256"]:
            raise CorruptFileError(f"{folder / name} does not match its hash in {INDEX}; fetch the set again.", file=name)
    every = [recipe_of(r["recipe"]) for r in index["recipes"]]
    return [_vector(case, every[int(case["recipe"])], contents[BYTES]) for case in index["cases"]]


def recipe_of(named: dict[str, Any]) -> ScalingRecipe:
    """A recipe by its name and fields in an index: of a plug-in, or of the kit."""
    for kind in (two_codecs.TwoCodecs, StepsScaling):
        if named["name"] == kind.name:
            return kind.with_fields(named["fields"])
    return ScalingRecipe.from_json(json.dumps(named))


def _vector(case: dict[str, Any], recipe: ScalingRecipe, buffer: bytes) -> Vector:
    fmt, axis, shape = recipe.format, case["axis"], tuple(case["shape"])
    k_last = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    count, size = unit(fmt.element)
    blocks = oracle.scale_shape(k_last, fmt.block)
    shapes = {"input": shape, "decoded": shape, "global_scale": (), "supplied": oracle.scale_shape(k_last, fmt.levels[0].block)}
    if "groups" in case:
        blocks = (*k_last[:-1], case["groups"])
    shapes |= {part: in_records(fmt, part, blocks, -1) if blocks else () for part in ("scale", "zero_point")}
    shapes["data"] = (*k_last[:-1], -(-k_last[-1] // count) * size)
    bits = {"input": 8 * INPUTS[case["dtype"]], "decoded": 32, "global_scale": 32, "scale": fmt.scale_codec.bits, "data": 8}
    offset = fmt.offset_codec
    bits |= {"zero_point": 8 if offset is None else offset.bits, "supplied": fmt.levels[0].codec.bits}
    parts: dict[str, np.ndarray] = {}
    for name in (IMPORTANCE, GROUP_INDEX):
        shapes[name], bits[name] = (shape[axis],), 32
    for name in (*PARTS, IMPORTANCE, GROUP_INDEX):
        if name in case:
            stored = shapes[name]
            if axis == -2 and name not in ("input", "decoded") and len(stored) >= 2:
                stored = (*stored[:-2], stored[-1], stored[-2])
            offset, length = case[name]
            parts[name] = np.frombuffer(buffer[offset : offset + length], f"<u{bits[name] // 8}").reshape(stored)
    return Vector(recipe, case["edge"], dtype=case["dtype"], axis=axis, rounding=case["rounding"], seed=case["seed"], **parts)
