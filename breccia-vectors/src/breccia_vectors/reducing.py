"""The smallest input that shows a difference.

No cast is computed here. The contract says which elements determine a block's scale: the one of the largest magnitude, or the
largest and the smallest, and under a scale of the tensor the largest of the tensor. With all other elements set to zero, the
scale and the code of every element that stays are those of the golden vector, so that its bytes still are what has to be
written. Rules that search, and formats of coded scales, depend on all elements of a block, which then stay; rotations depend
on more, and groups by an index are no blocks: these are not reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .comparing import Items, expected, integers, same
from .sets import Case, record_size

#: Differing items that are tried, of each part.
TRIED = 6
#: What a library returns for a case; None if it raises.
Run = Callable[[Case], Items | None]
#: A block: (place along the leading axes, along the rows, along the contraction axis).
Block = tuple[int, int, int]
#: The bit patterns of Inf and of the largest magnitude.
_TOPS = {"float32": (0x7F800000, 0x7FFFFFFF), "float16": (0x7C00, 0x7FFF), "bfloat16": (0x7F80, 0x7FFF)}


@dataclass(frozen=True)
class Smallest:
    """An input that still shows a difference.

    case: with this input, of a shape that may be smaller. kept: the flat indices of the elements that were kept.
    rest: the bit pattern of all others. part, index: what differs; wanted, found: the bits of that item.
    """

    case: Case
    kept: tuple[int, ...]
    rest: int
    part: str
    index: int
    wanted: int
    found: int


@dataclass(frozen=True)
class Target:
    """What is to differ: the scales of a block, and the code and the number of one of its elements, if there is one.

    Without a block, the scale of the tensor.
    """

    block: Block | None
    element: int | None


class Geometry:
    """Which elements and which items of scales belong together, in a case."""

    def __init__(self, case: Case) -> None:
        self.rows, self.columns = case.k_last[-2:]
        m, k = case.format.block
        self.m, self.k = m or self.rows, k or self.columns
        self.count, self.k_first = math.prod(case.shape), case.axis == -2
        self.whole = case.format.block == (None, None)
        levels = case.format.block_levels
        self.record = record_size(levels) if len(levels) > 1 else 1

    def place(self, index: int) -> tuple[int, int, int]:
        """(leading place, row, column) of an element, K last."""
        lead, rest = divmod(index, self.rows * self.columns)
        first, second = divmod(rest, self.rows if self.k_first else self.columns)
        return (lead, second, first) if self.k_first else (lead, first, second)

    def index(self, lead: int, i: int, j: int) -> int:
        """The inverse of `place`."""
        return lead * self.rows * self.columns + (j * self.rows + i if self.k_first else i * self.columns + j)

    def block_of(self, element: int) -> Block:
        """The block that an element lies in."""
        lead, i, j = self.place(element)
        return (0, 0, 0) if self.whole else (lead, i // self.m, j // self.k)

    def members(self, block: Block | None) -> list[int]:
        """The elements of a block, or of the tensor."""
        if self.whole or block is None:
            return list(range(self.count))
        lead, bi, bj = block
        rows = range(bi * self.m, min((bi + 1) * self.m, self.rows))
        columns = range(bj * self.k, min((bj + 1) * self.k, self.columns))
        return [self.index(lead, i, j) for i in rows for j in columns]

    def scale_items(self, block: Block | None) -> list[int]:
        """The items of `scale` and `zero_point` that belong to a block."""
        if self.whole or block is None:
            return [0] if self.whole else []
        lead, bi, bj = block
        rows, width = -(-self.rows // self.m), -(-self.columns // self.k) * self.record
        items = range(bj * self.record, (bj + 1) * self.record)
        return [lead * rows * width + (j * rows + bi if self.k_first else bi * width + j) for j in items]

    def block_of_scale(self, item: int) -> Block:
        """The block that an item of `scale` or `zero_point` belongs to."""
        if self.whole:
            return (0, 0, 0)
        rows, width = -(-self.rows // self.m), -(-self.columns // self.k) * self.record
        lead, rest = divmod(item, rows * width)
        first, second = divmod(rest, rows if self.k_first else width)
        bi, j = (second, first) if self.k_first else (first, second)
        return lead, bi, j // self.record

    def items(self, target: Target) -> dict[str, list[int]]:
        """Part -> the items that a target is about."""
        scales, elements = self.scale_items(target.block), [] if target.element is None else [target.element]
        return {"global_scale": [0], "scale": scales, "zero_point": scales, "codes": elements, "decoded": elements}


def smallest(case: Case, wrong: Mapping[str, Sequence[int]], run: Run, flushes: bool) -> Smallest | None:
    """The input of fewest elements that a library still gets wrong; None if no smaller one shows a difference.

    wrong: part -> the items that differ for the whole input. flushes: as in `same`.
    """
    if case.format.rotation is not None or case.decode_only or case.groups:
        return None
    search = _Search(case, run, flushes)
    found = [small for target in search.targets(wrong) if (small := search.reduced(target)) is not None]
    return min(found, key=lambda small: (len(small.kept), math.prod(small.case.shape)), default=None)


class _Search:
    def __init__(self, case: Case, run: Run, flushes: bool) -> None:
        self.case, self.run, self.flushes = case, run, flushes
        self.geometry = Geometry(case)
        self.size = case.stored("input")[1] // 8
        self.bits = integers(case.input, 8 * self.size)
        self.infinity, self.magnitude = _TOPS[case.dtype]

    def targets(self, wrong: Mapping[str, Sequence[int]]) -> Iterable[Target]:
        """Of scales if one differs, as they explain codes and numbers."""
        if "global_scale" in wrong:
            return [Target(None, None)]
        scales = [item for part in ("scale", "zero_point") for item in wrong.get(part, ())[:TRIED]]
        if scales:
            return dict.fromkeys(Target(self.geometry.block_of_scale(item), None) for item in scales)
        elements = [element for part in ("codes", "decoded") for element in wrong.get(part, ())[:TRIED]]
        return dict.fromkeys(Target(self.geometry.block_of(element), element) for element in elements)

    def reduced(self, target: Target) -> Smallest | None:
        """The smallest input for a target."""
        fixed = self.determinants(target.block) | (set() if target.element is None else {target.element})
        found = self.shown(fixed, target) or self.fewer(fixed, target)
        return found and (self.in_one_block(found, target) or found)

    def determinants(self, block: Block | None) -> set[int]:
        """The elements that the scale of a block, and that of the tensor, depend on."""
        case, fmt = self.case, self.case.format
        kept: set[int] = set()
        if fmt.has_global_scale and case.supplied is None:
            finite = [i for i in range(len(self.bits)) if self.size_of(i) < self.infinity]
            kept |= {max(finite, key=self.size_of)} if finite else set()
        if block is None:
            return kept
        members = self.geometry.members(block)
        if fmt.rules[-1] in ("mse", "four_six") or fmt.alternative is not None or len(fmt.block_levels) > 1:
            return kept | set(members)
        computed = case.supplied is None or fmt.has_global_scale
        nonfinite = [i for i in members if self.size_of(i) >= self.infinity]
        if nonfinite and (computed or not any(map(math.isnan, fmt.element.values))):
            return kept | {nonfinite[0]}
        if not computed:
            return kept
        if fmt.offset == "none":
            return kept | {max(members, key=self.size_of)}
        return kept | {max(members, key=self.rank_of), min(members, key=self.rank_of)}

    def size_of(self, i: int) -> int:
        """The magnitude of an element, as an integer of the same order."""
        return self.bits[i] & self.magnitude

    def rank_of(self, i: int) -> int:
        """The element as an integer of the same order."""
        return self.size_of(i) if self.bits[i] <= self.magnitude else -self.size_of(i)

    def shown(self, kept: set[int], target: Target) -> Smallest | None:
        """The input of the elements kept, if the library gets the target wrong there."""
        # A bias is the smallest element of its block, so that a zero may change it.
        biased = self.case.format.offset == "bias"
        rest = self.bits[min(self.geometry.members(target.block), key=self.rank_of)] if biased else 0
        raw = bytearray(rest.to_bytes(self.size, "little") * len(self.bits))
        for i in kept:
            raw[i * self.size : (i + 1) * self.size] = self.bits[i].to_bytes(self.size, "little")
        return self.difference(self.case.with_input(bytes(raw)), kept, rest, target, target)

    def fewer(self, fixed: set[int], target: Target) -> Smallest | None:
        """For a library whose results depend on more: the block, less the halves, quarters, ... that turn out not to matter."""
        members = self.geometry.members(target.block)
        best, step = self.shown(fixed | set(members), target), len(members)
        while best is not None and step > 1:
            step = (step + 1) // 2
            free = [i for i in best.kept if i not in fixed]
            for start in range(0, len(free), step):
                best = self.shown(set(best.kept) - set(free[start : start + step]), target) or best
        return best

    def in_one_block(self, found: Smallest, target: Target) -> Smallest | None:
        """The same as a tensor of one block, if all elements kept are in it, and the library takes that shape."""
        case, geometry = self.case, self.geometry
        block = geometry.block_of(found.kept[0]) if target.block is None else target.block
        members = geometry.members(block)
        if case.rounding != "nearest" or case.supplied or case.importance or not set(found.kept) <= set(members):
            return None
        rows = sorted({geometry.place(i)[:2] for i in (found.kept if geometry.whole else members)})
        columns = sorted({geometry.place(i)[2] for i in members})
        shape, origins = (len(rows), len(columns)), [geometry.index(*row, j) for row in rows for j in columns]
        if geometry.k_first:
            shape, origins = shape[::-1], [geometry.index(*row, j) for j in columns for row in rows]
        raw = b"".join(found.case.input[i * self.size : (i + 1) * self.size] for i in origins)
        there = {origin: place for place, origin in enumerate(origins)}
        moved = Target(None if target.block is None else (0, 0, 0), None if target.element is None else there[target.element])
        kept = {there[i] for i in found.kept}
        return self.difference(replace(case, shape=shape, input=raw), kept, found.rest, moved, target)

    def difference(self, case: Case, kept: set[int], rest: int, target: Target, original: Target) -> Smallest | None:
        """The first item of a target that is not that of the golden vector, where it is called `original`."""
        found = self.run(case)
        origins = self.geometry.items(original)
        for part, items in Geometry(case).items(target).items():
            if found is None or part not in found:
                continue
            wanted = expected(self.case, part)
            for item, origin in zip(items, origins[part], strict=True):
                if not same(part, found[part][item], wanted[origin], self.flushes):
                    return Smallest(case, tuple(sorted(kept)), rest, part, item, wanted[origin], found[part][item])
        return None
