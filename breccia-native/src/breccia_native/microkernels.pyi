"""The functions of `microkernels.c`. Arguments are contiguous buffers; ValueError is raised if sizes do not match.

`load` takes a matrix of any strides. kind: of the source's numbers, 32 for FP32, 16 for BF16 and -16 for FP16.
"""

from typing import Any

def load(values: Any, kind: int, columns: int, found: Any, /) -> None: ...
def store(values: Any, kind: int, found: Any, /) -> None: ...
def amax(source: Any, k: int, amax: Any, kind: int = 32, across: int = 0, /) -> None: ...
def extremes(source: Any, k: int, low: Any, high: Any, kind: int = 32, across: int = 0, /) -> None: ...
def down(codes: Any, bits: int, data: Any, /) -> None: ...
def words(seed: int, first: int, found: Any, /) -> None: ...
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
    kind: int = 32,
    seed: int = 0,
    first: int = 0,
    width: int = 0,
    stride: int = 0,
    across: int = 0,
    /,
) -> None: ...
def floats(
    source: Any,
    inverse: Any,
    k: int,
    divides: bool,
    codes: Any,
    floor: int,
    lift: int,
    largest: int,
    shift: int,
    sign: int,
    kind: int = 32,
    seed: int = 0,
    first: int = 0,
    width: int = 0,
    stride: int = 0,
    across: int = 0,
    /,
) -> None: ...
def integers(
    source: Any,
    inverse: Any,
    k: int,
    divides: bool,
    codes: Any,
    low: float,
    high: float,
    magic: float,
    mask: int,
    kind: int = 32,
    seed: int = 0,
    first: int = 0,
    width: int = 0,
    stride: int = 0,
    across: int = 0,
    /,
) -> None: ...
def tables(
    source: Any,
    inverse: Any,
    k: int,
    divides: bool,
    codes: Any,
    starts: Any,
    values: Any,
    order: Any,
    zero: int,
    kind: int = 32,
    seed: int = 0,
    first: int = 0,
    width: int = 0,
    stride: int = 0,
    across: int = 0,
    /,
) -> None: ...
def scales(
    amax: Any,
    divisor: float,
    global_scale: float,
    floor: int,
    lift: int,
    largest: int,
    shift: int,
    sign: int,
    inverses: Any,
    codes: Any,
    inverse: Any,
    /,
) -> None: ...
def blocks(
    source: Any,
    k: int,
    kind: int,
    divisor: float,
    global_scale: float,
    scale: tuple[int, int, int, int, int],
    inverses: Any,
    element: tuple[int, int, int, int, int],
    scales: Any,
    codes: Any,
    /,
) -> int: ...
def pairs(codes: Any, data: Any, /) -> None: ...
def sixes(codes: Any, data: Any, /) -> None: ...
def eights(codes: Any, bits: int, data: Any, /) -> None: ...
def values(data: Any, table: Any, scale: Any, k: int, bits: int, values: Any, /) -> None: ...
def use(name: str = ..., /) -> list[str]: ...
