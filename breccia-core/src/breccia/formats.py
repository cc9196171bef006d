"""Formats: the meaning of a scaled tensor's bytes, sufficient to decode, multiply, check and convert it.

A format does not say how scales were chosen; the recipe does.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .codec_checks import check_coded_scale, check_element, check_qmax, check_scale
from .codecs import BF16, F16, F32, FLOAT_CODECS, Codec, Integer, Minifloat, PowerOfTwo
from .errors import RecipeError
from .fp32 import f32
from .locks import cached_property
from .rotations import Rotation

#: Version of docs/spec/numerics.md, part of every fingerprint.
NUMERICS = 1

CONVENTIONS = ("multiplier", "divisor", "amax")
OFFSETS = ("none", "zero_point", "float_zero_point", "bias")
ORDERS = ("codes_first", "scales_first")
PRECISIONS = tuple(FLOAT_CODECS)
#: What a component of scale records holds: bytes. See `Record`.
BYTES = Codec("bytes", 8, None, "bytes of scale records")

#: Block of a level that spans the whole tensor. Elsewhere a block is (m, k): k elements along the
#: contraction axis by m along the other matrix axis; None is the whole extent of that axis.
TENSOR: tuple[None, None] = (None, None)

Block = tuple[int | None, int | None]


@dataclass(frozen=True)
class Level:
    """One level of scales: their codec, the block each covers, and their scale convention.

    Scale conventions (`convention`): `multiplier` (value is code * scale), `divisor` (code / scale), `amax` (the stored number
    is the block's largest magnitude, and the multiplier is amax / qmax; see `Format.qmax`). `sense` is its deprecated name,
    as a keyword and an attribute.
    """

    codec: Codec
    block: Block
    convention: str = "multiplier"

    def __init__(self, codec: Codec, block: Block, convention: str = "multiplier", *, sense: str | None = None) -> None:
        self.__setstate__({"codec": codec, "block": block, "convention": convention if sense is None else sense})
        check_coded_scale(self.codec, (F16, BF16, F32))
        if self.convention not in CONVENTIONS:
            raise RecipeError(
                f"a level's scale convention is one of {', '.join(CONVENTIONS)}; got {self.convention!r}.",
                convention=self.convention,
            )
        if any(side is not None and side < 1 for side in self.block):
            raise RecipeError(f"a block's sides are >= 1, or None for all; got {self.block}.", block=self.block)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields; earlier pickles have the convention as `sense`."""
        convention = state.get("sense", state.get("convention"))
        vars(self).update(codec=state["codec"], block=state["block"], convention=convention)

    @property
    def sense(self) -> str:
        """Deprecated: `convention`."""
        return self.convention


@dataclass(frozen=True)
class Record:
    """Several levels of one component, stored together: one record for each block of the coarsest level.

    It has the codes of each level, from coarse to fine, packed as elements are: densely, lowest bits first, in whole bytes.
    Floats are little-endian.
    """

    levels: tuple[Level, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many codes of each level a record has."""
        lengths = [level.block[1] or 1 for level in self.levels]
        return tuple(lengths[0] // length for length in lengths)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many bytes they take."""
        groups = [(math.lcm(level.codec.bits, 8), level.codec.bits) for level in self.levels]
        return tuple(-(-n * bits // group) * group // 8 for n, (group, bits) in zip(self.counts, groups, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Format:
    """Element codec, scale levels from coarse to fine, and offset.

    levels: first, if there are several, a global scale that spans the tensor (`ScaledTensor.global_scale`); then those of
        blocks. Of several levels of blocks, the codes of a finer one are multiplied by the scale of the coarser one; they are
        stored in `ScaledTensor.scale` as records (`Record`).
    offset: `zero_point` decodes (code - zero_point) * scale, with integers; `float_zero_point` the same with a float in the
        codec of the scale; `bias` decodes code * scale + bias.
    offset_levels: the levels of a bias that is coded itself, stored as records; () for one in the codec of the scale.
    order: `codes_first` multiplies a code by the scale of its block, then by the global scale; `scales_first` multiplies the
        two scales first.
    factor: multiplies the result of the scales, an FP32 number.
    precision: "fp16" or "bf16" rounds the result of each step to it; "fp32" computes in FP32, as all other fields say.
    alternative: the codec of elements in blocks whose scale has its sign bit set. Scales count by magnitude.
    rotation: what the decoded numbers are multiplied by, along the contraction axis, to become the values.
    """

    element: Codec
    levels: tuple[Level, ...]
    offset: str = "none"
    offset_levels: tuple[Level, ...] = ()
    order: str = "codes_first"
    factor: float = 1.0
    precision: str = "fp32"
    alternative: Codec | None = None
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        for codec in (self.element, self.alternative):
            if codec is not None:
                _check_element(codec)
        if not self.block_levels:
            raise RecipeError(
                f"a format has one scale level or more, and with a global one also that of blocks; got {len(self.levels)}.",
                levels=self.levels,
            )
        self._check_levels()
        for level in self.levels:
            check_qmax(self.qmax(level), self.element, [finer.codec for finer in self._finer(level)])
        for name, allowed in (("offset", OFFSETS), ("order", ORDERS), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise RecipeError(
                    f"{name} is one of {', '.join(allowed)}; got {getattr(self, name)!r}.", **{name: getattr(self, name)}
                )
        if self.offset.endswith("zero_point") and not (isinstance(self.element, Integer) and self.element.fraction_bits == 0):
            raise RecipeError(
                f"a zero-point shifts integers; the element codec here is {self.element.name}.",
                element=self.element.name,
            )
        if self.order == "scales_first" and (self.global_scale is None or self.scale.convention != "multiplier"):
            raise RecipeError(
                "order='scales_first' multiplies a block's scale by the global one; declare a global level, and multipliers in "
                "blocks.",
                order=self.order,
            )
        if not (0 < self.factor < math.inf and f32(self.factor) == self.factor):
            raise RecipeError(f"factor is a positive FP32 number; got {self.factor!r}.", factor=self.factor)
        if self.alternative is not None:
            self._check_alternative(self.alternative)

    def _check_alternative(self, other: Codec) -> None:
        """Raise RecipeError unless one scale serves both codecs of elements, and its sign bit is free to tell which."""
        element, scale = self.element, self.scale
        if (other.bits, other.max) != (element.bits, element.max) or (other.nan_code, element.nan_code) != (None, None):
            raise RecipeError(
                f"an alternative has as many bits as the element codec and the same largest value, so that one scale serves "
                f"both, and neither has NaN; got {other.name} ({other.bits} bits, up to {other.max!r}) and {element.name} "
                f"({element.bits} bits, up to {element.max!r}). Declare a Lookup of multiples that end at {element.max!r}.",
                alternative=other.name,
            )
        signed = isinstance(scale.codec, Minifloat) and scale.codec.bits == 8 and scale.codec.signed
        if not signed or scale.convention != "multiplier" or self.scale_record is not None or self.offset != "none":
            raise RecipeError(
                "the sign bit of a block's scale says which codec its elements have: declare one level of blocks of "
                f"multipliers in a codec of 8 bits with a sign, like E4M3, and no offset; got {scale.codec.name}.",
                codec=scale.codec.name,
            )

    def _check_levels(self) -> None:
        """Raise RecipeError where levels do not lie within each other."""
        for level in (*self.levels[:1], self.block_levels[0], *self.offset_levels[:1]):
            check_scale(level.codec, (F16, BF16, F32))
            if level.codec.nan_code is None and level is not self.scale:
                raise RecipeError(
                    f"finer scales are coded under a scale whose NaN marks faults; {level.codec.name} has no NaN.",
                    codec=level.codec.name,
                )
        if TENSOR in [level.block for level in self.levels[1:]]:
            raise RecipeError("only the first level spans the tensor, block (None, None); a finer one does.", block=TENSOR)
        if self.offset_levels and self.offset != "bias":
            raise RecipeError(f"offset_levels are those of a bias; offset is {self.offset!r}.", offset=self.offset)
        for levels in (self.block_levels, self.offset_levels):
            for coarse, fine in pairwise(levels):
                (rows, outer), (same, inner) = coarse.block, fine.block
                if not rows == 1 == same or outer is None or inner is None or outer % inner:
                    raise RecipeError(
                        f"blocks of a coded level lie within those of the coarser one, along the contraction axis: (1, n) in "
                        f"(1, a multiple of n); got {fine.block} in {coarse.block}.",
                        block=fine.block,
                    )
            if len(levels) > 1 and any(level.convention != "multiplier" for level in levels):
                raise RecipeError("scales that are coded under others are multipliers; got another convention.")
        if self.offset_levels and self.offset_levels[-1].block != self.scale.block:
            raise RecipeError(
                f"a bias has the blocks of the scale, {self.scale.block}; got {self.offset_levels[-1].block}.",
                block=self.offset_levels[-1].block,
            )
        if self.offset_levels and self.offset_levels[0].block != self.block:
            raise RecipeError(
                f"records of scales and biases span the same elements, {self.block}; got {self.offset_levels[0].block}.",
                block=self.offset_levels[0].block,
            )

    @property
    def scale(self) -> Level:
        """The finest level, stored in `ScaledTensor.scale`."""
        return self.levels[-1]

    @cached_property
    def global_scale(self) -> Level | None:
        """The tensor-level scale, stored as `ScaledTensor.global_scale`; None for formats of blocks, or of one level."""
        return self.levels[0] if len(self.levels) > 1 and self.levels[0].block == TENSOR else None

    @cached_property
    def block_levels(self) -> tuple[Level, ...]:
        """The levels in `ScaledTensor.scale`."""
        return self.levels if self.global_scale is None else self.levels[1:]

    @cached_property
    def block(self) -> Block:
        """The block of one item of `ScaledTensor.scale`, or of one record."""
        return self.block_levels[0].block

    @cached_property
    def scale_record(self) -> Record | None:
        """How several levels of blocks are stored in `ScaledTensor.scale`; None for one."""
        return Record(self.block_levels) if len(self.block_levels) > 1 else None

    @cached_property
    def offset_record(self) -> Record | None:
        """How the levels of a coded bias are stored in `ScaledTensor.zero_point`."""
        return Record(self.offset_levels) if self.offset_levels else None

    @property
    def scale_codec(self) -> Codec:
        """What an item of `ScaledTensor.scale` is: a code of the finest level, or a byte of a record."""
        return self.scale.codec if self.scale_record is None else BYTES

    @property
    def offset_codec(self) -> Codec | None:
        """What an item of `ScaledTensor.zero_point` is: a float in the scale's codec, a byte of a record; None for integers."""
        if self.offset in ("none", "zero_point"):
            return None
        return self.scale.codec if self.offset_record is None else BYTES

    @cached_property
    def parts(self) -> dict[str, Codec | None]:
        """The components of a tensor of this format, in order, with their codecs; None for zero-points, which are integers."""
        parts: dict[str, Codec | None] = {"data": self.element, "scale": self.scale_codec}
        if self.offset != "none":
            parts["zero_point"] = self.offset_codec
        if self.global_scale is not None:
            parts["global_scale"] = self.global_scale.codec
        return parts

    def record(self, part: str) -> Record | None:
        """How a component holds several levels; None for one that has an item for each block."""
        return {"scale": self.scale_record, "zero_point": self.offset_record}.get(part)

    @cached_property
    def features(self) -> frozenset[str]:
        """What a kernel has to know beyond elements, one scale for a block, a global scale, and an offset of one level.

        "coded_scales": records. "float_zero_point", "scales_first", "alternative": those. "factor": other than 1. "precision":
        not FP32. "rotation": there is one.
        """
        present = {
            "coded_scales": self.scale_record is not None or self.offset_record is not None,
            "float_zero_point": self.offset == "float_zero_point",
            "scales_first": self.order == "scales_first",
            "factor": self.factor != 1.0,
            "precision": self.precision != "fp32",
            "alternative": self.alternative is not None,
            "rotation": self.rotation is not None,
        }
        return frozenset(name for name, there in present.items() if there)

    def qmax(self, level: Level) -> float:
        """Largest magnitude representable under a scale of 1.0 at `level`: element.max times finer levels' max and `factor`."""
        cap = self.element.max
        for finer in self._finer(level):
            cap *= finer.codec.max
        return cap if self.factor == 1.0 else f32(cap * self.factor)

    def _finer(self, level: Level) -> tuple[Level, ...]:
        return self.levels[self.levels.index(level) + 1 :]

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that determines how bytes decode, whatever recipe wrote them.

        The hashed text is canonical JSON (sorted keys, no spaces) of the numerics version; the element's bits and the FP32
        pattern of each code; per level its codec, block and scale convention; the offset; and of `offset_levels`, `order`,
        `factor`, `precision`, `alternative` and `rotation` those that are not at their default.
        """
        later = {
            "offset_levels": _described(self.offset_levels),
            "order": self.order,
            "factor": self.factor,
            "precision": self.precision,
            "alternative": None if self.alternative is None else _decoding(self.alternative),
            "rotation": None if self.rotation is None else [self.rotation.block, self.rotation.seed],
        }
        defaults: dict[str, Any] = {"offset_levels": [], "order": ORDERS[0], "factor": 1.0, "precision": PRECISIONS[-1]}
        return sha256(
            {
                "numerics": NUMERICS,
                "element": _decoding(self.element),
                "levels": _described(self.levels),
                "offset": self.offset,
            }
            | {name: value for name, value in later.items() if value != defaults.get(name)}
        )


def _check_element(codec: Codec) -> None:
    """Raise RecipeError unless the codec is one of elements."""
    check_element(codec)
    if isinstance(codec, PowerOfTwo):
        raise RecipeError(
            f"elements include zero, but codec {codec.name!r} has powers of two only, for scales. Declare a "
            "Minifloat, an Integer or a Lookup.",
            element=codec.name,
        )


def _described(levels: tuple[Level, ...]) -> list[Any]:
    return [[_decoding(level.codec), list(level.block), level.convention] for level in levels]


def _decoding(codec: Codec) -> dict[str, Any]:
    """How codes of `codec` decode, as JSON."""
    return {"bits": codec.bits, "table": list(codec.table)} if codec.bits <= 8 else {"bits": codec.bits, "name": codec.name}


def sha256(facts: dict[str, Any]) -> str:
    """Hexadecimal SHA-256 of the canonical JSON of `facts`: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
