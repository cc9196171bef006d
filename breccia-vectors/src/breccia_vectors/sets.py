"""The golden vectors, read with the standard library alone: the sets, their formats, and their cases.

The files and the bytes of each part are specified in `spec/vectors.md` and `spec/formats.md`, which this package holds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

#: The pages of the specification; `SPEC / "vectors" / "1"` is the first set.
SPEC = Path(__file__).resolve().parent / "spec"
#: Results of a cast, as they are stored, in the order in which they are compared.
STORED = ("global_scale", "scale", "zero_point", "data")
#: All arrays of a case.
PARTS = ("input", "supplied", "importance", "group_index", *STORED, "decoded")
#: What the cases of an edge test.
EDGES: Mapping[str, str] = {
    "ordinary": "numbers of medium exponents",
    "wide": "numbers of all exponents, by element and by row",
    "zeros": "+0 and -0, alone and beside a number",
    "ties": "halfway between codes, and the FP32 numbers next to that, under a scale of one",
    "subnormals": "FP32 subnormals, which count as signed zeros, alone and beside other numbers",
    "nan": "a quiet, a signalling and a negative NaN in one block",
    "inf": "Inf of both signs",
    "largest": "blocks with an amax of the largest FP32 number",
    "smallest": "blocks with an amax of 2^-126 and next to it",
    "capacity": "blocks with an amax of the element's largest number and next to it",
    "ragged": "three axes, a partial last block, codes that do not fill the last byte",
    "axis=-2": "blocks along the axis before the last",
    "stochastic": "stochastic rounding with a seed beyond 32 bits",
    "supplied": "supplied scales, with NaN, Inf and overflow in the input",
    "faulty": "supplied scales that are not valid: NaN, 0, negative",
    "float16": "FP16 input, its subnormals included",
    "bfloat16": "BF16 input, its subnormals included",
    "importance": "a search for scales under weights of columns, zeros among them",
    "group_index": "groups that an index gives, one of them empty",
    "stored": "decoding alone: any codes under any scales",
}
_INPUT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Codec:
    """How one number is encoded. kind: `float`, `power`, `signed`, `unsigned` or `table` (spec/formats.md, "Codecs").

    values: the number of each code, of codecs up to 8 bits; empty for F32, F16 and BF16.
    """

    name: str
    bits: int
    kind: str
    values: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Level:
    """A level of scales. block: (rows, columns along the contraction axis), None for the whole axis."""

    codec: Codec
    block: tuple[int | None, int | None]
    convention: str = "multiplier"

    def __str__(self) -> str:
        sides = ["all" if side is None else str(side) for side in self.block]
        convention = "" if self.convention == "multiplier" else f" ({self.convention})"
        return f"{self.codec.name}{convention} per {'x'.join(sides) if self.block != (None, None) else 'tensor'}"


@dataclass(frozen=True)
class Format:
    """A recipe as the sets name it: the format that it writes, and the rule by which it computes scales.

    recipe, fields: its name, and the fields that are not at their default. rules: the scale rule of each level.
    levels: from coarse to fine; the first spans the tensor if its block is (None, None) and there are others.
    offset: `none`, `zero_point`, `float_zero_point` or `bias`. rotation: (block, seed) of a Hadamard rotation, or None.
    factor: what values are multiplied by last. precision: `fp32`, or `fp16` or `bf16` to which each step is rounded.
    """

    recipe: str
    fields: Mapping[str, Any] = field(hash=False)
    rules: tuple[str, ...]
    element: Codec
    levels: tuple[Level, ...]
    offset: str
    offset_levels: tuple[Level, ...]
    order: str
    alternative: Codec | None
    rotation: tuple[int, int] | None
    factor: float
    precision: str
    fingerprint: str

    @property
    def name(self) -> str:
        """The recipe with its fields, `nvfp4,scale_rule=mse`."""
        return ",".join([self.recipe, *(f"{name}={value}" for name, value in self.fields.items())])

    @property
    def has_global_scale(self) -> bool:
        """Whether the coarsest of several levels spans the tensor."""
        return len(self.levels) > 1 and self.levels[0].block == (None, None)

    @property
    def block_levels(self) -> tuple[Level, ...]:
        """The levels that `scale` stores."""
        return self.levels[1:] if self.has_global_scale else self.levels

    @property
    def block(self) -> tuple[int | None, int | None]:
        """The elements that one item of `scale` belongs to: (rows, columns). Of coded scales, one record."""
        return self.block_levels[0].block

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Case:
    """One cast: its input and options, and the bytes that it has to write. All bytes are little-endian.

    set, number: where it is. edge: what it tests, one of `EDGES`.
    dtype, shape: of the input, which `input` holds as bit patterns in C order. axis: the contraction axis, -1 or -2.
    rounding, seed: `nearest`, or `stochastic` with a seed.
    supplied: codes of the scale that the cast is given, or None. importance: FP32 weights of columns, or None.
    group_index, groups: the group of each element along K, 32 bits each, and how many there are; None and 0 for blocks.
    data, scale, zero_point, global_scale: as stored; decoded: FP32, in the shape of the input.
    """

    set: int
    number: int
    format: Format
    edge: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    rounding: str
    seed: int | None
    input: bytes = field(repr=False)
    supplied: bytes | None = field(repr=False)
    importance: bytes | None = field(repr=False)
    group_index: bytes | None = field(repr=False)
    groups: int
    data: bytes = field(repr=False)
    scale: bytes = field(repr=False)
    zero_point: bytes | None = field(repr=False)
    global_scale: bytes | None = field(repr=False)
    decoded: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """`set:number format edge`, as reports have it."""
        return f"{self.set}:{self.number} {self.format} {self.edge}"

    @property
    def tests(self) -> str:
        """What the case tests, in words."""
        return EDGES[self.edge]

    @property
    def decode_only(self) -> bool:
        """Whether nothing casts to this format: only `decoded` is to be computed."""
        return self.edge == "stored"

    @property
    def k_last(self) -> tuple[int, ...]:
        """The shape with the contraction axis last."""
        return self.shape if self.axis == -1 else (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @cached_property
    def codes(self) -> bytes:
        """The codes of `data`, one per byte, in the shape of the input."""
        return bytes(unpacked(self, self.data))

    def array(self, part: str) -> memoryview:
        """A part as a read-only memoryview of its shape: `numpy.asarray(case.array("input"))` has shape and dtype.

        Items of 32 bits are floats (format `f`), or integers of a group index (`I`); other floats are bit patterns (`H`), and
        codes are `B`. `codes` is a part, too.
        Raises KeyError for a part that the case does not have.
        """
        raw = getattr(self, part) if part in (*PARTS, "codes") else None
        if raw is None:
            raise KeyError(f"{self.name} has no {part}")
        shape, bits = self.stored(part)
        kind: Any = "I" if part == "group_index" else {8: "B", 16: "H", 32: "f"}[bits]
        return memoryview(raw).cast(kind, shape)

    def stored(self, part: str) -> tuple[tuple[int, ...], int]:
        """(shape, bits of an item) of a part as it is stored. A scale of the whole tensor has shape ()."""
        fmt = self.format
        if part in ("input", "decoded", "codes"):
            return self.shape, {"input": _INPUT_BITS[self.dtype], "decoded": 32, "codes": 8}[part]
        if part == "global_scale":
            return (), 32
        if part in ("importance", "group_index"):
            return (self.k_last[-1],), 32
        *lead, rows, columns = self.k_last
        if part == "data":
            bits, shape = 8, (*lead, rows, packed_size(columns, fmt.element.bits))
        else:
            levels = {"scale": fmt.block_levels, "supplied": fmt.levels[:1], "zero_point": fmt.offset_levels}[part]
            if not levels:  # an offset without levels of its own, one for each block
                levels = fmt.block_levels
            m, k = levels[0].block
            if (m, k) == (None, None):
                return (), levels[0].codec.bits
            width = self.groups or (-(-columns // k) if k else 1)
            bits = levels[0].codec.bits
            if part == "zero_point" and fmt.offset == "zero_point":
                bits = 8
            if len(levels) > 1:
                width, bits = width * record_size(levels), 8
            shape = (*lead, -(-rows // m) if m else 1, width)
        return (shape if self.axis == -1 else (*shape[:-2], shape[-1], shape[-2])), bits

    def with_input(self, raw: bytes) -> Case:
        """The case with another input of the same shape. Its results are not those of this input."""
        return replace(self, input=raw)


def packed_size(codes: int, bits: int) -> int:
    """Bytes of so many codes of a row, in whole groups."""
    group = math.lcm(bits, 8) // bits
    return -(-codes // group) * group * bits // 8


def record_size(levels: tuple[Level, ...]) -> int:
    """Bytes of a record of coded scales (spec/formats.md, "Scale records")."""
    whole = levels[0].block[1] or 0
    return sum(packed_size(whole // (level.block[1] or whole), level.codec.bits) for level in levels)


def unpacked(case: Case, data: bytes | memoryview) -> bytearray:
    """Packed codes as one code per byte, in the shape of the input."""
    bits, (*_, rows, columns) = case.format.element.bits, case.k_last
    width, mask, k_first = packed_size(columns, bits), (1 << bits) - 1, case.axis == -2
    codes = bytearray(math.prod(case.shape))
    for row in range(math.prod(case.k_last[:-1])):
        lead, i = divmod(row, rows)
        start = lead * rows * width
        packed = data[start + i : start + rows * width : rows] if k_first else data[row * width : (row + 1) * width]
        number = int.from_bytes(packed, "little")
        for j in range(columns):
            codes[lead * rows * columns + (j * rows + i if k_first else i * columns + j)] = number >> (bits * j) & mask
    return codes


def sets() -> list[int]:
    """The numbers of the sets. Raises FileNotFoundError in a clone of the repository without symbolic links."""
    if not (SPEC / "vectors").is_dir():
        raise FileNotFoundError(
            f"{SPEC / 'vectors'} is no folder: the repository was cloned without symbolic links, which lead there. Install the "
            "wheel of breccia-vectors, or clone again after `git config --global core.symlinks true`."
        )
    return sorted(int(path.name) for path in (SPEC / "vectors").iterdir() if path.name.isdigit())


def cases(format: str | None = None, *, edge: str | None = None, set: int | None = None) -> Iterator[Case]:
    """The cases of all sets, or those of a format (its recipe's name, or `Format.name`), an edge, a set."""
    for number in sets() if set is None else [set]:
        for case in read(number):
            named = format in (None, case.format.recipe, case.format.name)
            if named and edge in (None, case.edge):
                yield case


def formats(recipe: str | None = None) -> list[Format]:
    """The formats of all sets, or those of a recipe, in the order of the sets."""
    found = {case.format.fingerprint: case.format for case in cases()}
    return [each for each in found.values() if recipe in (None, each.recipe)]


@cache
def read(number: int) -> tuple[Case, ...]:
    """The cases of a set."""
    return tuple(_read(number, SPEC / "vectors" / str(number)))


def _read(number: int, folder: Path) -> Iterator[Case]:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    buffer = (folder / "vectors.bin").read_bytes()

    def part(place: list[int] | None) -> bytes | None:
        return None if place is None else buffer[place[0] : sum(place)]

    codecs: dict[str, Codec] = {}
    for said in index["codecs"]:
        values = part(said.get("values")) or b""
        listed = struct.unpack(f"<{len(values) // 4}f", values)
        codecs[said["name"]] = Codec(said["name"], said["bits"], said["kind"], listed)
    known = [_format(said, codecs) for said in index["recipes"]]
    for place, said in enumerate(index["cases"]):
        options = {name: said[name] for name in ("edge", "dtype", "axis", "rounding", "seed")}
        parts: dict[str, Any] = {name: part(said.get(name)) for name in PARTS}
        options |= {"shape": tuple(said["shape"]), "groups": said.get("groups", 0)}
        yield Case(number, place, known[said["recipe"]], **options, **parts)


def _format(said: dict[str, Any], codecs: dict[str, Codec]) -> Format:
    facts = said["format"]

    def levels(name: str) -> tuple[Level, ...]:
        return tuple(
            Level(codecs[of["codec"]], (of["block"][0], of["block"][1]), of.get("convention", "multiplier"))
            for of in facts.get(name, [])
        )

    return Format(
        recipe=said["recipe"]["name"],
        fields=said["recipe"]["fields"],
        rules=tuple(said["rules"]),
        element=codecs[facts["element"]],
        levels=levels("levels"),
        offset=facts["offset"],
        offset_levels=levels("offset_levels"),
        order=facts.get("order", "codes_first"),
        alternative=codecs[facts["alternative"]] if "alternative" in facts else None,
        rotation=(facts["rotation"][0], facts["rotation"][1]) if "rotation" in facts else None,
        factor=struct.unpack("<f", struct.pack("<I", facts.get("factor", 0x3F800000)))[0],
        precision=facts.get("precision", "fp32"),
        fingerprint=said["fingerprint"],
    )
