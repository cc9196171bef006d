"""The functions of `columns.c`. Arguments are contiguous buffers; ValueError is raised if sizes do not match."""

from typing import Any

def multiply(
    x: Any,
    m: int,
    k: int,
    n: int,
    data: Any,
    kind: int,
    width: int,
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
    threads: int,
    /,
) -> bool: ...
def turn(data: Any, rows: int, columns: int, found: Any, threads: int, /) -> None: ...
def supports(kind: int, role: int, /) -> bool: ...
def use(name: str = ..., /) -> list[str]: ...
