"""What was prepared for the facts of calls, kept for later calls with the same facts. Imports no framework."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar


class Remembered(dict[Any, Any]):
    """What has been prepared, by the facts of calls. Where it is full, the oldest entry makes room."""

    _all: ClassVar[list[Remembered]] = []

    def __init__(self) -> None:
        super().__init__()
        self._all.append(self)

    @classmethod
    def forget(cls) -> None:
        """Let all of them start anew."""
        for each in cls._all:
            each.clear()

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= _REMEMBERED:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread may have changed it meanwhile
                del self[next(iter(self))]
        self[key] = value
        return value


_REMEMBERED = 4096
