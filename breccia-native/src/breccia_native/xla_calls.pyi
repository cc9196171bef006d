"""The functions of `xla_calls.c`."""

from collections.abc import Callable
from typing import Any

def cpu_handler(function: Callable[[str, tuple[memoryview, ...], tuple[memoryview, ...]], object], /) -> Any: ...
def cuda_handler(function: Callable[[str, tuple[int, ...], tuple[int, ...], int | None], object], /) -> Any: ...
