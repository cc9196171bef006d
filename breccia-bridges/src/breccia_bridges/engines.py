"""What runs the tasks of a conversion, each of which writes and verifies one file: this process, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from breccia import BrecciaError, OptionError
from breccia.backend import targets
from breccia.internal import suggestion

from .convert_file import Step, Task, convert_file

#: The classes of engines by their names; one is imported when it is asked for.
ENGINES = {"local": f"{__name__}:Local", "ray": "breccia_bridges.ray_engine:RayEngine"}


class WorkerError(BrecciaError, RuntimeError):
    """A process or machine for a part of the work is lost, too small, or does not see what it should.

    It says nothing against the conversion, which keeps what is finished.
    """


class StoppedError(WorkerError):
    """The run that started a task has ended, so that the task writes nothing any more."""


class Engine(Protocol):
    """max_memory: the bytes that a task takes at most, which the conversion has checked.

    at_once: the most files of which this machine has a part at a time, if each is removed when its task has ended.
    """

    max_memory: int

    @property
    def at_once(self) -> int: ...

    def run(self, count: int, task: Callable[[int], Task], folder: Path) -> Generator[tuple[int, Step | None]]:
        """The steps of `count` tasks, those of each in order, as `convert_file` has them, with the number of the task.

        In place of a step there is None when the task has ended: nothing writes or reads its file any more.
        task: gives one by its number, with what is finished of it by then; an engine asks again to repeat what it has lost,
        and repeats steps. When the generator is closed, all tasks have ended, or write nothing any more.
        folder: in which an engine may have files until then.
        """
        ...


def engine_of(name: str, max_memory: int) -> Engine:
    """Raises OptionError for an unknown name, UnsupportedError where a library that the engine needs is not installed."""
    if name not in ENGINES:
        raise OptionError(f"no engine {name!r}{suggestion(str(name), list(ENGINES))}", engine=name)
    return targets.load(ENGINES[name])(max_memory)


@dataclass
class Local:
    """One task after the other, in this process."""

    max_memory: int
    at_once: ClassVar[int] = 1

    def run(self, count: int, task: Callable[[int], Task], folder: Path) -> Generator[tuple[int, Step | None]]:
        for n in range(count):
            with closing(convert_file(task(n))) as steps:
                for step in steps:
                    yield n, step
            yield n, None
