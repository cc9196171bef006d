"""The functions of `measuring.c`. Arguments are buffers; ValueError is raised if sizes do not match."""

from typing import Any

def errors(
    x: Any, kind: int, y: Any, low: Any, high: Any, below: float, above: float, columns: int, each: int, /
) -> tuple[float, float, float, float, float, int, int, int, int, int]: ...
def use(name: str = ..., /) -> list[str]: ...
