"""The functions of `searching.c`. Arguments are buffers; ValueError is raised if sizes do not match."""

from typing import Any

def search(
    source: Any,
    dtype: int,
    m: int,
    k: int,
    amax: Any,
    found: Any,
    inverses: Any,
    inverse: Any,
    codec: int,
    qmax: float,
    global_scale: float,
    window: tuple[Any, Any, Any],
    scales: tuple[float, float, int, int, tuple[int, int, int, int, int]],
    element: tuple[Any, ...],
    weights: Any,
    first: int,
    across: int,
    /,
) -> None: ...
def use(name: str = ..., /) -> list[str]: ...
