"""The functions of `microkernels.c`. Arguments are contiguous buffers; ValueError is raised if sizes do not match.

`load` takes a matrix of any strides.
"""

from typing import Any

def load(values: Any, kind: int, columns: int, found: Any, /) -> None: ...
def store(values: Any, kind: int, found: Any, /) -> None: ...
def amax(source: Any, k: int, amax: Any, /) -> None: ...
def extremes(source: Any, k: int, low: Any, high: Any, /) -> None: ...
def shifted(
    source: Any,
    inverse: Any,
    before: Any,
    after: Any,
    k: int,
    codes: Any,
    low: float,
    high: float,
    magic: float,
    mask: int,
    /,
) -> None: ...
def floats(
    source: Any, inverse: Any, k: int, divides: bool, codes: Any, floor: int, lift: int, largest: int, shift: int, sign: int, /
) -> None: ...
def integers(
    source: Any, inverse: Any, k: int, divides: bool, codes: Any, low: float, high: float, magic: float, mask: int, /
) -> None: ...
def pairs(codes: Any, data: Any, /) -> None: ...
def values(data: Any, table: Any, scale: Any, k: int, bits: int, values: Any, /) -> None: ...
