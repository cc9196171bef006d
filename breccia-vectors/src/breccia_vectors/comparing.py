"""What a library returned for a case, item by item beside what the contract says."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .sets import Case, unpacked

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

#: What an adapter may return, in the order in which it is compared: what the first of them gets wrong explains the others.
RESULTS = ("global_scale", "scale", "zero_point", "codes", "data", "decoded")
#: Part -> its items, as unsigned integers.
Items = Mapping[str, Sequence[int]]


class NotSupported(Exception):
    """Raised by an adapter for a case that its library cannot cast or decode; the text is the reason."""


class ResultError(ValueError):
    """An adapter or a file returned what is not a result of this case."""


def items_of(case: Case, returned: Mapping[str, Buffer]) -> dict[str, Sequence[int]]:
    """The items of each part that was returned. Raises ResultError for parts that do not exist, or of another size."""
    if unknown := sorted(returned.keys() - set(RESULTS)):
        raise ResultError(f"{case.name}: {', '.join(unknown)} returned; a result has {', '.join(RESULTS)}.")
    if not returned:
        raise ResultError(f"{case.name}: nothing returned; return at least one of {', '.join(RESULTS)}.")
    found: dict[str, Sequence[int]] = {}
    for part, buffer in returned.items():
        raw = bytes_of(case, part, buffer)
        if getattr(case, part) is None:
            raise ResultError(f"{case.name}: {part} returned, but this format has none; leave it out.")
        shape, bits = case.stored(part)
        size = math.prod(shape) * bits // 8
        if len(raw) != size:
            raise ResultError(f"{case.name}: {part} has {len(raw)} bytes; {size} expected, for {shape} items of {bits} bits.")
        found[part] = integers(raw, bits)
    if "data" in found:
        found["codes"] = unpacked(case, bytes(found["data"]))
    return found


def bytes_of(case: Case, part: str, buffer: Buffer) -> bytes:
    """The bytes of a returned buffer, in C order."""
    try:
        return memoryview(buffer).tobytes()
    except (TypeError, ValueError, BufferError) as e:
        raise ResultError(
            f"{case.name}: {part} is {type(buffer).__name__}, without buffer protocol: return its bytes ({e})."
        ) from e


def integers(raw: bytes, bits: int) -> Sequence[int]:
    """Little-endian items as unsigned integers."""
    return raw if bits == 8 else struct.unpack(f"<{len(raw) * 8 // bits}{'H' if bits == 16 else 'I'}", raw)


def expected(case: Case, part: str) -> Sequence[int]:
    """The items that a part has to have."""
    return integers(getattr(case, part), case.stored(part)[1])


def same(part: str, found: int, wanted: int, flushes: bool) -> bool:
    """Whether two items are equal. Decoded, any NaN equals any NaN, and under `flushes` zero a subnormal of its sign."""
    if found == wanted or part != "decoded":
        return found == wanted
    a, b = found & 0x7FFFFFFF, wanted & 0x7FFFFFFF
    return (a > 0x7F800000 and b > 0x7F800000) or (flushes and b < 0x00800000 and found == wanted & 0x80000000)


def differing(case: Case, found: Items, flushes: bool) -> dict[str, list[int]]:
    """Part -> the indices of the items that differ, in the order of RESULTS; empty if all agree."""
    wrong: dict[str, list[int]] = {}
    for part in (part for part in RESULTS if part in found):
        wanted = expected(case, part)
        places = [i for i, (a, b) in enumerate(zip(found[part], wanted, strict=True)) if not same(part, a, b, flushes)]
        if places and not (part == "data" and "codes" in wrong):  # of packed codes that agree, padding is left
            wrong[part] = places
    return wrong
