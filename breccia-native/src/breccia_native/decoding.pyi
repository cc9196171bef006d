"""The functions of `decoding.c`. Arguments are buffers; ValueError is raised if sizes do not match."""

from typing import Any

def decode(
    data: Any,
    bits: int,
    table: Any,
    fields: tuple[int, int, int, int, int, float],
    k: int,
    m: int,
    scale: Any,
    of_bytes: Any,
    halved: bool,
    subtracted: Any,
    added: Any,
    scale_codes: tuple[int, bool, int, int],
    added_codes: tuple[int, bool, int, int],
    global_scale: float | None,
    divides: bool,
    kind: int,
    stream: bool,
    threads: int,
    found: Any,
    /,
) -> None: ...
def matrix(
    data: Any,
    bits: int,
    table: Any,
    fields: tuple[int, int, int, int, int, float],
    k: int,
    m: int,
    scale: Any,
    of_bytes: Any,
    halved: bool,
    subtracted: Any,
    added: Any,
    scale_codes: tuple[int, bool, int, int],
    added_codes: tuple[int, bool, int, int],
    global_scale: float | None,
    divides: bool,
    columns: int,
    /,
) -> Any: ...
def pooled() -> bool: ...
def use(name: str = ..., /) -> list[str]: ...
