"""Whether a tensor of one format can become one of another with every decoded value the same: decided from the two formats.

`decided` says so before values are read; `requantize(..., require_exact=True)` converts, and compares. Defined in
docs/spec/numerics.md, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..codecs import F16, F32, Codec, Integer, Minifloat, PowerOfTwo
from ..formats import TENSOR, Block, Format, Level
from ..fp32 import f32
from ..layouts import Layout
from ..recipe_bases import powers_of_two
from ..recipes import ScalingRecipe
from .exact import Translation, covered, hold_scales, nests, renamed, translation
from .numbers import extent, fitting, half_gap, has, moves, numbers_of, shifts, specials_of

#: Kinds of exactness, from the best down. The first two are promised for every tensor.
SAME_CODES, NEW_CODES, BY_VALUES, INEXACT = KINDS = ("same codes", "new codes", "values decide", "inexact")


@dataclass(frozen=True, repr=False)
class Exactness:
    """Whether values stay the same in every bit when a tensor, or every tensor of a format, is converted to another format.

    kind: "same codes": each code stays the number that it is, and so do scales, which may be repeated, widened or multiplied
        out. "new codes": the conversion is exact, with other codes and scales. "values decide" (of formats only): every code
        fits under a suitable scale; whether the scales suit is known when they are read. "inexact": of formats, some codes have
        none in the target, so tensors that have them change; of a tensor, `changed` of its values change.
    why: how it is done, what decides, or what is lost.
    bound: how far a value that changes moves at most, as a multiple of its new scale: half the widest gap between codes of the
        target, which rounding in FP32 may exceed by its own error. It does not hold where a value saturates. Under a rotation
        of n elements it is sqrt(n) times that, and of the largest scale among them. 0.0 for the first two kinds.
    size, blocks: of a tensor: how many values it has, and how many blocks of the target. None for formats.
    changed, changed_blocks: how many of them change under `requantize`, and how many blocks have one that does.
    """

    kind: str
    why: str
    bound: float
    size: int | None = None
    changed: int | None = None
    blocks: int | None = None
    changed_blocks: int | None = None

    @property
    def exact(self) -> bool:
        """Whether no value changes: of this tensor, or of any tensor of the format."""
        return self.kind in (SAME_CODES, NEW_CODES)

    def __repr__(self) -> str:
        counted = moves = ""
        if self.size is not None:
            counted = f"; {self.changed:,} of {self.size:,} values change, in {self.changed_blocks:,} of {self.blocks:,} blocks"
        if not self.exact:
            moves = f"; by at most {self.bound:g} of a scale"
        return f"Exactness({self.kind}: {self.why}{counted}{moves})"


def decided(source: ScalingRecipe, layout: Layout, axis: int, target: ScalingRecipe) -> Exactness:
    """What holds for every tensor of `source` with this layout along `axis`."""
    return _decided(source, *covered(source, layout, axis), target, translation(source, layout, axis, target))


def keeps_values(old: ScalingRecipe, layout: Layout, axis: int, new: ScalingRecipe) -> bool:
    """Whether `requantize` keeps the values of every tensor, without decoding and casting"""
    conversion = translation(old, layout, axis, new)
    return (conversion is not None and conversion.promised) or promise(old, layout, axis, new) is not None


class Promise(NamedTuple):
    """A conversion that is exact for every tensor of a format, where a `Translation` is not.

    moves: whether powers of two move between codes and scales; else the scale of each block stays the number that it is.
    """

    kind: str
    why: str
    moves: bool = False


def promise(old: ScalingRecipe, layout: Layout, axis: int, new: ScalingRecipe) -> Promise | None:
    """How every tensor of `old` with this layout becomes one of `new`; None if values decide, or if a `Translation` does it."""
    return _promise(old, *covered(old, layout, axis), new)


@lru_cache(maxsize=4096)
def _promise(old: ScalingRecipe, grouped: bool, block: Block, new: ScalingRecipe) -> Promise | None:
    source, target = old.format, new.format
    if source.scale_record is not None:
        block = source.scale.block
    if grouped or not convertible(source, target) or not nests(block, target.scale.block):
        return None
    if why := _rescaled(source, new):
        return Promise(NEW_CODES, why, moves=True)
    if powers_of_two(new) and not powers_of_two(old):
        return None
    if why := _multiplied_out(source, target) or _under_one(source, target) or _as_multiplier(source, target):
        return Promise(SAME_CODES, why)
    return Promise(NEW_CODES, why) if (why := _recentred(source, target)) else None


@lru_cache(maxsize=4096)
def _decided(old: ScalingRecipe, grouped: bool, block: Block, new: ScalingRecipe, kept: Translation | None) -> Exactness:
    source, target = old.format, new.format
    if source.scale_record is not None:
        block = source.scale.block
    if kept is not None and kept.promised:
        return Exactness(SAME_CODES, _kept(source, target, block, kept), 0.0)
    if (promised := _promise(old, grouped, block, new)) is not None:
        return Exactness(promised.kind, promised.why, 0.0)
    bound = half_gap(target.element)
    if target.rotation is not None:  # the length of an error stays, and may end up in one value
        bound *= math.sqrt(target.rotation.block)
    if lost := _lost(source, target):
        return Exactness(INEXACT, lost, bound)
    conditions = list(_conditions(source, grouped, block, new)) or ["the scales suit"]
    return Exactness(BY_VALUES, "exact if " + ", and ".join(conditions), bound)


def _kept(source: Format, target: Format, block: Block, kept: Translation) -> str:
    """What stays, and what is done to the rest, where scales stay the same numbers."""
    if kept.recipe_only:
        return "every byte stays"
    done = ["codes stay" if source.element == target.element else f"codes of {target.element.name} for the same numbers"]
    if block != target.scale.block:
        done.append("scales repeated")
    if source.scale.codec != target.scale.codec:
        done.append(f"scales widened to {target.scale.codec.name}")
    return ", ".join(done)


# ------------------------------------------------------------------------------------------------- promises


def convertible(source: Format, target: Format) -> bool:
    """Whether both decode by products of codes and scales that are multipliers, the target's with one scale for each block"""
    beyond = {"alternative", "factor", "precision", "rotation"}
    return (
        not (beyond & source.features or (beyond | {"coded_scales"}) & target.features)
        and source.scale.convention == target.scale.convention == "multiplier"
    )


def _multiplied_out(source: Format, target: Format) -> str:
    """Scales coded under others become the FP32 numbers by which they decode."""
    records = [record for record in (source.scale_record, source.offset_record) if record is not None]
    same = renamed(source.element, target.element) is not None and source.offset == target.offset
    # The products are normal FP32 numbers, or 0: no backend flushes them.
    normal = all(record.levels[0].codec == F16 and _whole(record.levels[1:]) for record in records)
    plain = source.global_scale is None and target.global_scale is None and target.scale.codec == F32
    return "scales multiplied out to F32" if records and same and normal and plain and _plain_scale(source) else ""


def _plain_scale(source: Format) -> bool:
    """Whether a scale beside a coded bias is itself a number that F32 has"""
    return source.scale_record is not None or hold_scales(source.scale.codec, F32)


def _whole(levels: Iterable[Any]) -> bool:
    return all(isinstance(level.codec, Integer) for level in levels)


def _under_one(source: Format, target: Format) -> str:
    """A global scale of 1 is added."""
    level = target.global_scale
    if level is None or source.global_scale is not None or source.scale_record is not None or source.offset_record is not None:
        return ""
    one = 1.0 if level.convention != "amax" else target.qmax(level)
    holds = isinstance(level.codec, Minifloat) and f32(one) == one and has(level.codec, one)
    same = renamed(source.element, target.element) is not None and source.offset == target.offset == "none"
    return "a global scale of 1 is added" if holds and same and hold_scales(source.scale.codec, target.scale.codec) else ""


def _as_multiplier(source: Format, target: Format) -> str:
    """A largest magnitude of the tensor becomes the FP32 number that it multiplies by."""
    level = source.global_scale
    if level is None or level.convention != "amax" or target.global_scale != Level(F32, TENSOR):
        return ""
    same = renamed(source.element, target.element) is not None and source.offset == target.offset == "none"
    kept = source.order == target.order and source.scale_record is None
    holds = same and kept and hold_scales(source.scale.codec, target.scale.codec)
    return "the global scale becomes a multiplier" if holds else ""


def middle(codec: Codec) -> int:
    """The code of 0 where integers get a zero-point: the middle of an unsigned range."""
    return 1 << (codec.bits - 1) if isinstance(codec, Integer) and not codec.signed else 0


def moved_by(source: Format, target: Format) -> int | None:
    """What is added to integers of `source` under an offset of `target`; None where the range of `target` is too short."""
    a, b = source.element, target.element
    if not (isinstance(a, Integer) and isinstance(b, Integer) and a.fraction_bits == b.fraction_bits == 0):
        return None
    added = middle(b) - middle(a)
    return added if target.offset != "none" and b.low <= a.low + added and a.high + added <= b.high else None


def _recentred(source: Format, target: Format) -> str:
    """Integers without a zero-point get one."""
    added = moved_by(source, target)
    plain = (source.offset, target.offset) == ("none", "zero_point") and source.scale_record is None
    scales = source.global_scale == target.global_scale and source.order == target.order
    if added is None or not (plain and scales and hold_scales(source.scale.codec, target.scale.codec)):
        return ""
    return f"{added} is added to codes, with zero-points of {added}"


def _rescaled(source: Format, new: ScalingRecipe) -> str:
    """Under every scale all codes have codes of the same numbers, with a power of two moved between codes and scales."""
    target = new.format
    plain = source.offset == target.offset == "none" and source.scale_record is None
    if not plain or source.global_scale != target.global_scale or "scales_first" in (source.order, target.order):
        return ""
    found = moves(source.element, source.scale.codec, target.element, target.scale.codec, powers_of_two(new))
    if found is None:
        return ""
    return f"powers of two move between scales and codes of {target.element.name}"


# ----------------------------------------------------------------------------------------- what values decide


def _lost(source: Format, target: Format) -> str:
    """Which codes of the source have none in the target, whatever the scale; empty if all have one."""
    a, b = source.element, target.element
    if source.alternative is not None or target.alternative is not None:
        return "elements change their codec from block to block"
    if source.rotation != target.rotation:
        return "values are sums of codes under one rotation"
    if (source.offset, target.offset) == ("bias", "none"):
        return "a bias has no place"
    if renamed(a, b) is not None or moved_by(source, target) is not None or shifts(a, b):
        return ""
    count = len(numbers_of(a))
    return f"{b.name} lacks {count - fitting(a, b)} of the {count} numbers of {a.name}, whatever the power-of-two scale"


def _conditions(source: Format, grouped: bool, block: Block, new: ScalingRecipe) -> Iterator[str]:
    """What values have to be, where all codes fit under a suitable scale."""
    target = new.format
    exponents = shifts(source.element, target.element)
    span = exponents[-1] - exponents[0] if exponents else 0
    missing = sorted(specials_of(source.element) - specials_of(target.element))
    if missing and not source.offset.endswith("zero_point"):
        yield f"no code is {' or '.join(missing)}"
    if not convertible(source, target):
        yield "the scales of a cast happen to suit"
        return
    nested = nests(block, target.scale.block) and not grouped
    if not nested and isinstance(source.scale.codec, PowerOfTwo) and target.global_scale is None:
        yield f"exponents of scales span at most {span} in a block"
    elif not nested:
        yield f"scales in a block differ by powers of two, at most 2^{span}"
    if source.offset != target.offset and "bias" in (source.offset, target.offset):
        yield "each bias is a whole multiple of its scale" if target.offset != "bias" else "each bias is a number of its codec"
    elif source.offset.endswith("zero_point") and source.offset != target.offset:
        yield "codes less their zero-point lie in the range of codes"
    if source.global_scale is not None and source.global_scale != target.global_scale:
        yield (
            "the global scale is a power of two"
            if target.global_scale is None
            else f"the global scale is exact as a {target.global_scale.convention}"
        )
    elif source.global_scale is not None and source.order != target.order:
        yield "the global scale is a power of two"
    wide = extent(target.scale.codec)
    if source.global_scale is None and target.global_scale is not None and wide is not None:
        yield f"exponents of scales span at most {wide.top[0] - wide.last + span} in a tensor"
        if not isinstance(source.scale.codec, PowerOfTwo):
            yield f"they have one significand, or each one of {target.scale.codec.name}"
    elif not hold_scales(source.scale.codec, target.scale.codec) or (powers_of_two(new) and not _is_power(source)):
        yield _of_scales(source, new)


def _is_power(source: Format) -> bool:
    return isinstance(source.scale.codec, PowerOfTwo)


def _of_scales(source: Format, new: ScalingRecipe) -> str:
    codec = new.format.scale.codec
    if _is_power(source):
        return f"scales are normal numbers of {codec.name}"
    if powers_of_two(new):
        return "scales are powers of two"
    return f"scales are numbers of {codec.name}, but for powers of two that codes can take"
