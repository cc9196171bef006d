"""The functions of `products.c`. Arguments are contiguous buffers; ValueError is raised if sizes do not match."""

from typing import Any

def pack(x: Any, m: int, k: int, mode: int, kind: int, table: Any, role: int, block: int, packed: Any, /) -> bool: ...
def packed_length(k: int, mode: int, kind: int, table: Any, block: int, /) -> int: ...
def fast(mode: int, /) -> bool: ...
def multiply(
    packed: Any,
    m: int,
    n: int,
    k: int,
    mode: int,
    data: Any,
    kind: int,
    table: Any,
    scale: Any,
    scale_kind: int,
    scale_table: Any,
    block: int,
    tall: int,
    divides: bool,
    factor: float,
    least: float,
    offset: Any,
    offset_kind: int,
    role: int,
    product: Any,
    next: Any,
    /,
) -> bool: ...
def kinds() -> tuple[str, ...]: ...
def use(name: str = ..., /) -> list[str]: ...
