"""Formats: the meaning of a scaled tensor's bytes, sufficient to decode, multiply, check and convert it.

A format does not say how scales were chosen; the recipe does.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from .codec_checks import check_element, check_qmax, check_scale
from .codecs import BF16, F16, F32, Codec, Integer, PowerOfTwo
from .errors import RecipeError

#: Version of docs/spec/numerics.md, part of every fingerprint.
NUMERICS = 1

CONVENTIONS = ("multiplier", "divisor", "amax")
OFFSETS = ("none", "zero_point", "bias")

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
        check_scale(self.codec, (F16, BF16, F32))
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
class Format:
    """Element codec, scale levels (global scale first), and offset.

    The finest level is stored as `ScaledTensor.scale`, a tensor-level one as `.global_scale`.
    Offsets: `zero_point` decodes (code - zero_point) * scale, `bias` decodes code * scale + bias.
    """

    element: Codec
    levels: tuple[Level, ...]
    offset: str = "none"

    def __post_init__(self) -> None:
        check_element(self.element)
        if isinstance(self.element, PowerOfTwo):
            raise RecipeError(
                f"elements include zero, but codec {self.element.name!r} has powers of two only, for scales. Declare a "
                "Minifloat, an Integer or a Lookup.",
                element=self.element.name,
            )
        if not 1 <= len(self.levels) <= 2:
            raise RecipeError(f"a format has one or two scale levels; got {len(self.levels)}.", levels=self.levels)
        if len(self.levels) == 2 and self.levels[0].block != TENSOR:
            raise RecipeError(
                f"the global scale spans the tensor, block (None, None); got {self.levels[0].block}.",
                block=self.levels[0].block,
            )
        for level in self.levels:
            check_qmax(self.qmax(level), self.element, [finer.codec for finer in self.levels[self.levels.index(level) + 1 :]])
        if self.offset not in OFFSETS:
            raise RecipeError(f"offset is one of {', '.join(OFFSETS)}; got {self.offset!r}.", offset=self.offset)
        if self.offset == "zero_point" and not (isinstance(self.element, Integer) and self.element.fraction_bits == 0):
            raise RecipeError(
                f"a zero-point shifts integers; the element codec here is {self.element.name}.",
                element=self.element.name,
            )

    @property
    def scale(self) -> Level:
        """The finest level, stored as `ScaledTensor.scale`."""
        return self.levels[-1]

    @property
    def global_scale(self) -> Level | None:
        """The tensor-level scale, stored as `ScaledTensor.global_scale`; None for one-level formats."""
        return self.levels[0] if len(self.levels) == 2 else None

    @property
    def parts(self) -> dict[str, Codec | None]:
        """The components of a tensor of this format, in order, with their codecs; None for zero-points, which are integers."""
        parts: dict[str, Codec | None] = {"data": self.element, "scale": self.scale.codec}
        if self.offset != "none":
            parts["zero_point"] = self.scale.codec if self.offset == "bias" else None
        if self.global_scale is not None:
            parts["global_scale"] = self.global_scale.codec
        return parts

    def qmax(self, level: Level) -> float:
        """Largest magnitude representable under a scale of 1.0 at `level`: element.max times finer levels' max."""
        cap = self.element.max
        for finer in self.levels[self.levels.index(level) + 1 :]:
            cap *= finer.codec.max
        return cap

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that determines how bytes decode, whatever recipe wrote them.

        The hashed text is canonical JSON (sorted keys, no spaces) of the numerics version; the element's bits and the FP32
        pattern of each code; per level its codec, block and scale convention; and the offset.
        """
        return sha256(
            {
                "numerics": NUMERICS,
                "element": _decoding(self.element),
                "levels": [[_decoding(level.codec), list(level.block), level.convention] for level in self.levels],
                "offset": self.offset,
            }
        )


def _decoding(codec: Codec) -> dict[str, Any]:
    """How codes of `codec` decode, as JSON."""
    return {"bits": codec.bits, "table": list(codec.table)} if codec.bits <= 8 else {"bits": codec.bits, "name": codec.name}


def sha256(facts: dict[str, Any]) -> str:
    """Hexadecimal SHA-256 of the canonical JSON of `facts`: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
