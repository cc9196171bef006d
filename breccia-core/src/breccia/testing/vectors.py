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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..codecs import BF16, CODECS, F16, F32, FLOAT_CODECS, Codec, Integer, Lookup, Minifloat, PowerOfTwo
from ..errors import CorruptFileError
from ..formats import NUMERICS
from ..recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from . import oracle

#: Number of the set that this module makes, and name of its folder. More recipes or edges need a new set with the next number.
VERSION = 1
MADE_BY = "breccia.testing.oracle, which follows docs/spec/numerics.md in exact rationals and by enumeration"
COMPARISON = "all bits equal, signs of zeros too; decoded: any NaN equals any NaN (0x7FC00000 stands for it)"
BYTES, INDEX, TEXT = "vectors.bin", "index.json", "index.txt"
#: Arrays of a vector, in the order they have in the file.
PARTS = ("input", "supplied", "data", "scale", "zero_point", "global_scale", "decoded")
INPUTS = {"float32": 4, "float16": 2, "bfloat16": 2}
#: More than 32 bits, but below 2^53, so that every JSON reader keeps it exactly.
SEED = 0xDEADBEEFCAFE
QUIET_NAN = 0x7FC00000
_FLT_MAX, _MIN_NORMAL = 0x7F7FFFFF, 0x00800000


@dataclass(frozen=True)
class Vector:
    """One cast: its input and options, and the expected output.

    input: bit patterns in the logical shape, uint32 (float32) or uint16.
    supplied: codes of the scale supplied to the cast, in the stored shape, or None.
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

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.input.shape


# ------------------------------------------------------------------------------------------------ inputs

_RULES = ("linear", "recip", "divide", "te")
_E8M0_RULES = ("rceil", "floor", "even")


def recipes() -> list[ScalingRecipe]:
    """Every element codec, scale rule, scale dtype and offset of the built-in recipes, with small blocks."""
    small: dict[str, Any] = {"block_k": 16}
    recipes: list[ScalingRecipe] = [DelayedScaling(scale_rule=rule) for rule in _RULES]
    recipes += [DelayedScaling("E5M2", margin=3), DelayedScaling(margin=-2, scale_rule="te")]
    for element in ("E4M3", "E5M2"):
        recipes += [Float8CurrentScaling(element, rule) for rule in _RULES]
        recipes += [Float8RowScaling(element, scale_rule=rule) for rule in _RULES]
        recipes += [Float8BlockScaling(element, scale_rule=rule, **small) for rule in _RULES]
    for rule in ("linear", "te"):
        recipes += [Float8RowScaling(power_of_two_scale=True, scale_rule=rule)]
        recipes += [Float8BlockScaling(power_of_two_scale=True, scale_rule=rule, **small)]
    recipes += [Float8BlockScaling(block_m=4, **small), Float8BlockScaling(block_m=4, scale_rule="te", **small)]
    for rule in _E8M0_RULES:
        recipes += [MXFP8BlockScaling("E4M3", scale_rule=rule), MXFP8BlockScaling("E5M2", scale_rule=rule)]
        recipes += [MXFP6BlockScaling("E2M3", scale_rule=rule), MXFP6BlockScaling("E3M2", scale_rule=rule)]
        recipes += [MXFP4BlockScaling(scale_rule=rule), MXINT8BlockScaling(scale_rule=rule)]
    recipes += [NVFP4BlockScaling(), NVFP4BlockScaling(two_level=False)]
    for kind in (INT4Scaling, INT8Scaling):
        recipes += [kind(16, scale_dtype="fp16", scale_rule=rule) for rule in ("linear", "recip", "divide", "half_range")]
        recipes += [kind(16, scale_dtype=dtype) for dtype in ("bf16", "fp32")]
        recipes += [kind(16, signed=False, scale_dtype="fp32")]
        for offset in ("zero_point", "bias"):
            recipes += [kind(16, False, dtype, False, offset=offset) for dtype in FLOAT_CODECS]
            recipes += [kind(16, False, "fp16", False, rule, offset) for rule in ("recip", "divide")]
    recipes += [INT8Scaling()]
    return recipes + [NF4Scaling(16, dtype) for dtype in FLOAT_CODECS]


@cache
def _words(stream: int, count: int) -> tuple[int, ...]:
    return tuple(oracle.random_word(stream, i) for i in range(count))


def _drawn(stream: int, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """FP32 bit patterns of both signs with exponents low..high, any mantissa."""
    words = np.array(_words(stream, math.prod(shape)), np.uint64).reshape(shape)
    exponent = (words >> np.uint64(23) & np.uint64(0xFF)) % np.uint64(high - low + 1) + np.uint64(low + 127)
    return (words & np.uint64(0x807FFFFF) | exponent << np.uint64(23)).astype(np.uint32)


def _bits(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def _columns(recipe: ScalingRecipe) -> int:
    """The columns of two blocks; 24 if a block is a whole row or tensor."""
    _, k = recipe.format.scale.block
    return 2 * k if k else 24


def _rows(recipe: ScalingRecipe) -> int:
    return 2 if recipe.format.scale.block[0] in (1, None) else 5


def _ordinary(recipe: ScalingRecipe) -> np.ndarray:
    return _drawn(1, (_rows(recipe), _columns(recipe)), -3, 2)


def _wide(recipe: ScalingRecipe) -> np.ndarray:
    n = _columns(recipe)
    return np.concatenate([_drawn(2, (1, n), -126, 127), _drawn(3, (1, n), -20, 20), _drawn(4, (1, n), -125, -100)])


def _zeros(recipe: ScalingRecipe) -> np.ndarray:
    """+0 and -0, in a block of zeros and beside other numbers."""
    x = np.zeros((2, _columns(recipe)), np.uint32)
    x[:, 1::2] = 0x80000000
    x[1, -3] = _bits(-1.5)
    return x


def _ties(recipe: ScalingRecipe) -> np.ndarray:
    """Midpoints between codes under a scale of one, and the FP32 numbers next to them."""
    element, n = recipe.format.element, _columns(recipe)
    values, _ = oracle.ladder(element)
    middles = [float(oracle.fl((a + b) / 2)) for a, b in pairwise(values)]
    chosen = _bits([middles[i * len(middles) // n] for i in range(n)])
    x = np.stack([chosen, chosen + 1, chosen - 1])
    x[:, :: n // 2] = _bits(element.max)
    return x


def _subnormals(recipe: ScalingRecipe) -> np.ndarray:
    """Numbers below 2^-126, beside larger ones and by themselves; and the smallest normal numbers."""
    x = np.concatenate(
        [_ordinary(recipe)[:1], _drawn(5, (1, _columns(recipe)), -127, -127), _drawn(6, (1, _columns(recipe)), -126, -124)]
    )
    x[0, 1::4] &= 0x807FFFFF
    x[1] &= 0x807FFFFF
    return x


def _nan(recipe: ScalingRecipe) -> np.ndarray:
    """A quiet, a signalling and a negative NaN in the first block."""
    x = _ordinary(recipe).copy()
    x[0, [1, 3, 6]] = (QUIET_NAN, 0x7F800001, 0xFFFFFFFF)
    return x


def _inf(recipe: ScalingRecipe) -> np.ndarray:
    x = _ordinary(recipe).copy()
    x[0, 2], x[-1, -2] = 0x7F800000, 0xFF800000
    return x


def _amax(*ends: int) -> Callable[[ScalingRecipe], np.ndarray]:
    """Blocks whose amaxes are the FP32 numbers with these bit patterns."""

    def draw(recipe: ScalingRecipe) -> np.ndarray:
        n = _columns(recipe)
        x = np.zeros((1, n), np.uint32)
        for block, end in enumerate(np.resize(ends, 2)):
            part = _drawn(7 + block, (n // 2,), -3, -1).view(np.float32)  # magnitudes below 1
            x[0, block * (n // 2) :][: n // 2] = (part * np.uint32(end).view(np.float32)).view(np.uint32)
            x[0, block * (n // 2) + 5] = end
        return x

    return draw


def _around_qmax(recipe: ScalingRecipe) -> np.ndarray:
    """Blocks whose amax is the element codec's largest value, or one of the FP32 numbers next to it."""
    at = int(_bits(recipe.format.element.max))
    return np.concatenate([_amax(at, at + 1)(recipe), _amax(at - 1, at + (1 << 19))(recipe)])


def _partial_block(recipe: ScalingRecipe) -> np.ndarray:
    return _drawn(9, (2, _rows(recipe), _columns(recipe) - 5), -4, 4)


def _along_rows(recipe: ScalingRecipe) -> np.ndarray:
    return _drawn(10, (_columns(recipe) - 5, 3), -4, 4)


def _overflowing(recipe: ScalingRecipe) -> np.ndarray:
    """Numbers with NaN, Inf and finite values that overflow; for supplied scales."""
    x = _drawn(11, (_rows(recipe), _columns(recipe)), -6, 12).copy()
    x[0, :4] = (QUIET_NAN, 0x7F800000, 0xFF800000, _FLT_MAX)
    return x


def _half_precision(dtype: str) -> Callable[[ScalingRecipe], np.ndarray]:
    """16-bit patterns: finite numbers with medium exponents, zeros, subnormals, and the smallest normal number."""
    mantissa, bias = (10, 15) if dtype == "float16" else (7, 127)

    def draw(recipe: ScalingRecipe) -> np.ndarray:
        x = _drawn(12, (2, _columns(recipe)), -6, 6)
        low = (x >> 16 & 0x8000) | ((x >> 23 & 0xFF) - 127 + bias) << mantissa | (x & ((1 << mantissa) - 1))
        low[0, :6] = (0, 0x8000, 1, 0x8003, (1 << mantissa) - 1, 1 << mantissa)
        return low.astype(np.uint16)

    return draw


def _valid_scales(codec: Codec) -> list[int]:
    return [oracle.encode(codec, Fraction(n, 64)) for n in (64, 3, 37, 500)]


def _invalid_scales(codec: Codec) -> list[int]:
    """Codes of NaN, 0, and other values that a scale must not have."""
    nan = oracle.nan_code(codec)
    assert nan is not None, codec
    if isinstance(codec, PowerOfTwo):
        return [nan, 0, nan - 1]
    sign = 1 << (codec.bits - 1)
    if isinstance(codec, Minifloat) and not codec.signed:
        return [nan, 0]
    return [nan, 0, oracle.encode(codec, Fraction(1)) | sign, 1, sign]


def _supplied_scales(recipe: ScalingRecipe, shape: tuple[int, ...], codes: Callable[[Codec], list[int]]) -> np.ndarray:
    level = recipe.format.levels[0]
    return np.resize(np.array(codes(level.codec), np.uint32), oracle.scale_shape(shape, level.block))


#: Edge class -> the input, in the logical shape, and the options of its cast.
EDGES: dict[str, tuple[Callable[[ScalingRecipe], np.ndarray], dict[str, Any]]] = {
    "ordinary": (_ordinary, {}),
    "wide": (_wide, {}),
    "zeros": (_zeros, {}),
    "ties": (_ties, {}),
    "subnormals": (_subnormals, {}),
    "nan": (_nan, {}),
    "inf": (_inf, {}),
    "largest": (_amax(_FLT_MAX, _FLT_MAX | 0x80000000), {}),
    "smallest": (_amax(_MIN_NORMAL, _MIN_NORMAL + 1), {}),
    "capacity": (_around_qmax, {}),
    "ragged": (_partial_block, {}),
    "axis=-2": (_along_rows, {"axis": -2}),
    "stochastic": (_ordinary, {"rounding": "stochastic", "seed": SEED}),
    "supplied": (_overflowing, {"supplied": _valid_scales}),
    "faulty": (_ordinary, {"supplied": _invalid_scales}),
    "float16": (_half_precision("float16"), {"dtype": "float16"}),
    "bfloat16": (_half_precision("bfloat16"), {"dtype": "bfloat16"}),
}


def inputs() -> Iterator[Vector]:
    """Every vector of the set, without results."""
    for recipe in recipes():
        for edge, (draw, options) in EDGES.items():
            x = draw(recipe)
            fields = dict(options)
            if "supplied" in options:
                fields["supplied"] = _supplied_scales(recipe, x.shape, options["supplied"])
            yield Vector(recipe, edge, x, **fields)


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
    written = oracle.cast(x, v.recipe, scale=scale, rounding=v.rounding, seed=v.seed)
    decoded = oracle.dequantize(written, v.recipe)
    patterns = np.where(np.isnan(decoded), np.uint32(QUIET_NAN), decoded.view(np.uint32))
    offset = fmt.parts.get("zero_point") or (fmt.element if written.zero_point is not None else None)
    return replace(
        v,
        data=_k_last(packed(written.codes, fmt.element), v.axis),
        scale=_stored(_k_last(written.scale, v.axis), fmt.scale.codec.bits),
        zero_point=None if offset is None else _stored(_k_last(_part(written.zero_point), v.axis), max(offset.bits, 8)),
        global_scale=None if written.global_scale is None else np.array(written.global_scale, "<u4"),
        decoded=_k_last(patterns, v.axis),
    )


def _part(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array


def _stored(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes.astype(f"<u{bits // 8}")


# ------------------------------------------------------------------------------------------------ files


def files(vectors: Iterable[Vector] | None = None) -> dict[str, bytes]:
    """The files of a set, by name. Default: all vectors, which takes the oracle tens of seconds."""
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

    answers = list(map(with_results, inputs()) if vectors is None else vectors)
    used = {F32, F16, BF16, *(codec for v in answers for codec in _codecs(v.recipe))}
    codecs: list[dict[str, Any]] = []
    for codec in (c for c in CODECS if c in used):
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
        parts = {name: supplied if name == "supplied" else place(getattr(v, name)) for name in PARTS}
        cases.append(case | {name: part for name, part in parts.items() if part is not None})
    index: dict[str, Any] = {"vectors": VERSION, "numerics": NUMERICS, "made_by": MADE_BY, "comparison": COMPARISON}
    text = _text(codecs, list(named), cases).encode()
    index["files"] = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name, raw in ((BYTES, bytes(buffer)), (TEXT, text))
    }
    index |= {"codecs": codecs, "recipes": [_recipe(r) for r in named], "cases": cases}
    return {BYTES: bytes(buffer), TEXT: text, INDEX: _json(index).encode()}


def _codecs(recipe: ScalingRecipe) -> list[Codec]:
    return [recipe.format.element, *(level.codec for level in recipe.format.levels)]


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
    levels = [{"codec": level.codec.name, "block": list(level.block)} for level in fmt.levels]
    # Fields at their default are omitted, as in fingerprints, so that fields added later do not change a set.
    named = {"name": recipe.name, "fields": recipe.changed}
    said: dict[str, Any] = {"recipe": named, "rules": [rule.name for rule in recipe.rules], "fingerprint": recipe.fingerprint()}
    return said | {
        "format": {"element": fmt.element.name, "levels": levels, "offset": fmt.offset, "fingerprint": fmt.fingerprint()}
    }


def _json(index: dict[str, Any]) -> str:
    """One line per codec, recipe and case."""
    lists = {name: index[name] for name in ("codecs", "recipes", "cases")}
    head = json.dumps({name: value for name, value in index.items() if name not in lists}, indent=1)[:-2]
    body = (f' "{name}": [\n' + ",\n".join("  " + json.dumps(item) for item in items) + "\n ]" for name, items in lists.items())
    return head + ",\n" + ",\n".join(body) + "\n}\n"


def _text(codecs: list[dict[str, Any]], named: list[ScalingRecipe], cases: list[dict[str, Any]]) -> str:
    """The index as space-separated fields: a line of counts, a line per codec, a line per case. -1 stands for "none"."""
    lines = [f"breccia-vectors {VERSION} {len(codecs)} {len(cases)}"]
    for c in codecs:
        first = c.get("mantissa_bits", c.get("fraction_bits", 0)) if c["kind"] != "table" else c["values"][0]
        facts = (c["name"], c["kind"], c["bits"], first, c.get("bias", 0), c.get("nan"), c.get("inf"))
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
        lines.append(" ".join(map(str, [*said, *(case.get(part, [-1])[0] for part in PARTS)])))
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
    every: list[ScalingRecipe] = [ScalingRecipe.from_json(json.dumps(r["recipe"])) for r in index["recipes"]]
    return [_vector(case, every[int(case["recipe"])], contents[BYTES]) for case in index["cases"]]


def _vector(case: dict[str, Any], recipe: ScalingRecipe, buffer: bytes) -> Vector:
    fmt, axis, shape = recipe.format, case["axis"], tuple(case["shape"])
    k_last = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    count, size = unit(fmt.element)
    scales = oracle.scale_shape(k_last, fmt.scale.block)
    supplied = oracle.scale_shape(k_last, fmt.levels[0].block)
    shapes = {"input": shape, "decoded": shape, "global_scale": (), "scale": scales, "zero_point": scales, "supplied": supplied}
    shapes["data"] = (*k_last[:-1], -(-k_last[-1] // count) * size)
    bits = {"input": 8 * INPUTS[case["dtype"]], "decoded": 32, "global_scale": 32, "scale": fmt.scale.codec.bits, "data": 8}
    bits |= {"zero_point": fmt.scale.codec.bits if fmt.offset == "bias" else 8, "supplied": fmt.levels[0].codec.bits}
    parts: dict[str, np.ndarray] = {}
    for name in PARTS:
        if name in case:
            stored = shapes[name]
            if axis == -2 and name not in ("input", "decoded") and len(stored) >= 2:
                stored = (*stored[:-2], stored[-1], stored[-2])
            offset, length = case[name]
            parts[name] = np.frombuffer(buffer[offset : offset + length], f"<u{bits[name] // 8}").reshape(stored)
    return Vector(recipe, case["edge"], dtype=case["dtype"], axis=axis, rounding=case["rounding"], seed=case["seed"], **parts)
