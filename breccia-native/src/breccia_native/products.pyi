"""The functions of `products.c`. Arguments are contiguous buffers; ValueError is raised if sizes do not match."""

from typing import Any

def fast(mode: int, kind: int, width: int, scale_kind: int, role: int, block: int, k: int, m: int, /) -> bool: ...
def multiply(
    x: Any,
    x_kind: int,
    m: int,
    n: int,
    k: int,
    mode: int,
    data: Any,
    kind: int,
    width: int,
    table: Any,
    scale: Any,
    scale_kind: int,
    scale_table: Any,
    scale_codes: tuple[int, bool, int],
    block: int,
    tall: int,
    divides: bool,
    factor: float,
    least: float,
    offset: Any,
    offset_kind: int,
    offset_codes: tuple[int, bool, int],
    role: int,
    product: Any,
    bias: Any,
    threads: int,
    /,
) -> bool: ...
def prepare(*arguments: Any) -> Any: ...
def repeat(
    prepared: Any,
    x: int,
    data: int,
    scale: int,
    offset: int,
    bias: int,
    factor: float,
    threads: int,
    product: Any,
    /,
) -> bool: ...
def each(prepared: Any, jobs: Any, factors: Any, bias: int, rows: int, threads: int, /) -> bool: ...
def operate(functions: tuple[Any, ...], layers: dict[int, Any], registry: Any, get_num_threads: Any, /) -> bool: ...
def keep(prepared: Any, table: Any, factor: float, shares: bool, dtype: int, /) -> Any: ...
def refuse(reason: str, /) -> None: ...
def kinds() -> tuple[str, ...]: ...
def use(name: str = ..., /) -> list[str]: ...
