"""What a check found, as text and as JSON."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .reducing import Smallest
from .sets import Case

#: Differences of one format that the text lists; the JSON has all of them.
LISTED = 3


@dataclass(frozen=True)
class Difference:
    """A case that a library casts or decodes to other bytes.

    operation: `quantize` or `dequantize`. wrong: part -> how many of its items differ. part, index: the first of them, by its
    flat index; wanted, found: its bits. smallest: the smallest input that shows a difference, if there is a smaller one.
    """

    case: Case
    operation: str
    wrong: Mapping[str, int]
    part: str
    index: int
    wanted: int
    found: int
    smallest: Smallest | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{count} of {part}" for part, count in self.wrong.items())
        said = f"{self.case.name} ({self.case.tests}): {counts} differ; {_item(self)}"
        if self.smallest is None:
            return said
        return f"{said}\n    smallest input: {input_of(self.smallest)}\n    there {_item(self.smallest)}"


@dataclass(frozen=True)
class Failure:
    """A case on which a library raised."""

    case: Case
    operation: str
    error: str

    def __str__(self) -> str:
        return f"{self.case.name} ({self.case.tests}): {self.operation} raised {self.error}"


@dataclass(frozen=True)
class Skipped:
    """A case that an adapter declined, with its reason."""

    case: Case
    operation: str
    reason: str


@dataclass
class Report:
    """What a library does with the cases, in order. agreed: (operation, case, parts that were compared)."""

    library: str
    agreed: list[tuple[str, Case, tuple[str, ...]]] = field(default_factory=list[tuple[str, Case, tuple[str, ...]]])
    differences: list[Difference] = field(default_factory=list[Difference])
    failures: list[Failure] = field(default_factory=list[Failure])
    skipped: list[Skipped] = field(default_factory=list[Skipped])

    @property
    def agrees(self) -> bool:
        """Whether every case that ran agrees, and one ran."""
        return bool(self.agreed) and not self.differences and not self.failures

    def counts(self) -> dict[tuple[str, str], Counter[str]]:
        """(operation, format) -> how many cases `agree`, `differ`, `fail` and are `skipped`."""
        table: dict[tuple[str, str], Counter[str]] = {}
        outcomes: list[tuple[str, Case, str]] = [(operation, case, "agree") for operation, case, _ in self.agreed]
        for name, of in (("differ", self.differences), ("fail", self.failures), ("skipped", self.skipped)):
            outcomes += [(each.operation, each.case, name) for each in of]
        outcomes.sort(key=lambda each: (each[0] != "quantize", each[1].set, each[1].number))
        for operation, case, outcome in outcomes:
            table.setdefault((operation, case.format.name), Counter())[outcome] += 1
        return table

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ran = {key: of for key, of in self.counts().items() if of.total() > of["skipped"]}
        lists = {"agree": self.agreed, "differ": self.differences, "fail": self.failures, "skipped": self.skipped}
        yield f"{self.library}: {', '.join(f'{len(of)} {outcome}' for outcome, of in lists.items())}"
        width = max((len(name) for _, name in ran), default=0)
        for (operation, name), of in ran.items():
            numbers = "  ".join(f"{of[outcome]:3} {outcome}" for outcome in ("agree", "differ", "fail", "skipped"))
            yield f"  {operation:10}  {name:{width}}  {numbers}"
        for operation, name in ran:
            found = [d for d in self.differences if (d.operation, d.case.format.name) == (operation, name)]
            for difference in found[:LISTED]:
                yield f"{operation}: {difference}"
            if len(found) > LISTED:
                yield f"  and {len(found) - LISTED} more of {name}"
        yield from map(str, self.failures)
        for (operation, reason), count in Counter((s.operation, s.reason) for s in self.skipped).most_common():
            yield f"  {operation}: {count} skipped: {reason}"

    def json(self) -> str:
        """Everything but the cases that agree, which are counted."""
        said = {
            "library": self.library,
            "counts": [{"operation": operation, "format": name, **of} for (operation, name), of in self.counts().items()],
            "differences": [_facts(d) for d in self.differences],
            "failures": [{"case": f.case.name, "operation": f.operation, "error": f.error} for f in self.failures],
            "skipped": dict(Counter(f"{s.operation}: {s.reason}" for s in self.skipped)),
        }
        return json.dumps(said, indent=1) + "\n"


def _facts(d: Difference) -> dict[str, Any]:
    said: dict[str, Any] = {"case": d.case.name, "operation": d.operation, "wrong": dict(d.wrong), **_difference(d)}
    if (small := d.smallest) is not None:
        values = {str(i): _pattern(small.case, i) for i in small.kept}
        where = {"dtype": small.case.dtype, "shape": list(small.case.shape), "axis": small.case.axis}
        said["smallest"] = where | {"values": values, "rest": f"{small.rest:#x}"} | _difference(small)
    return said


def _difference(d: Difference | Smallest) -> dict[str, Any]:
    return {"part": d.part, "index": d.index, "wanted": _hex(d, d.wanted), "found": _hex(d, d.found)}


def _item(d: Difference | Smallest) -> str:
    """`scale[0] is 0x7F, not 0x80 (1.0, not 2.0)`."""
    said = f"{d.part}[{d.index}] is {_hex(d, d.found)}, not {_hex(d, d.wanted)}"
    numbers = [number_of(d, bits) for bits in (d.found, d.wanted)]
    return said if None in numbers else f"{said} ({numbers[0]!r}, not {numbers[1]!r})"


def _hex(d: Difference | Smallest, bits: int) -> str:
    return f"0x{bits:0{d.case.stored(d.part)[1] // 4}X}"


def number_of(d: Difference | Smallest, bits: int) -> float | None:
    """The number that an item stands for; None of a record's byte, padding or a zero-point."""
    fmt = d.case.format
    if d.part in ("decoded", "global_scale"):
        return float_of(bits, "float32")
    codec = {"codes": fmt.element, "scale": fmt.block_levels[0].codec}.get(d.part)
    if codec is None or fmt.alternative is not None or (d.part == "scale" and len(fmt.block_levels) > 1):
        return None
    if codec.values:
        return codec.values[bits] if bits < len(codec.values) else None
    return float_of(bits, {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[codec.name])


def float_of(bits: int, dtype: str) -> float:
    """The number of a bit pattern."""
    if dtype == "float16":
        return struct.unpack("<e", bits.to_bytes(2, "little"))[0]
    return struct.unpack("<f", (bits << 16 if dtype == "bfloat16" else bits).to_bytes(4, "little"))[0]


def _pattern(case: Case, index: int) -> str:
    size = case.stored("input")[1] // 8
    return f"0x{int.from_bytes(case.input[index * size : (index + 1) * size], 'little'):0{2 * size}X}"


def input_of(small: Smallest) -> str:
    """`float32 (1, 32), zeros but [3] = 448.0 (0x43E00000)`."""
    case = small.case
    patterns = {i: _pattern(case, i) for i in small.kept}
    values = [f"{_place(case, i)} = {float_of(int(bits, 16), case.dtype)!r} ({bits})" for i, bits in patterns.items()]
    everywhere = len(small.kept) == math.prod(case.shape)
    rest = "zeros" if not small.rest else repr(float_of(small.rest, case.dtype))
    axis = "" if case.axis == -1 else f", axis {case.axis}"
    given = "" if case.supplied is None else f", scale codes {case.supplied.hex()}"
    return f"{case.dtype} {case.shape}{axis}{given}, {'' if everywhere else f'{rest} but '}{', '.join(values)}"


def _place(case: Case, index: int) -> str:
    places: list[int] = []
    for length in reversed(case.shape):
        index, place = divmod(index, length)
        places.insert(0, place)
    return f"[{', '.join(map(str, places))}]"
