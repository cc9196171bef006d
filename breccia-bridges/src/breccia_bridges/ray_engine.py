"""The engine "ray": each file of a conversion is written and verified by a task of Ray, on any machine of a cluster.

A task is a generator whose steps reach this process one by one, so that the journal here has every finished value. A task whose
worker died is not repeated by Ray, which would start from the beginning: this engine starts it again with what the journal has
by then. Should the first worker still run, cut off from the cluster, then both write the same bytes.

Ray may lose the interrupt of a task, and the end of its process. So there is a file of the run in the staging folder as long as
it goes on, and a task that does not find it stops before it writes more.

Source: Ray 2.60, "Dynamic generators", "Resources", "Fault tolerance of tasks".
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import breccia
from breccia import UnsupportedError, set_num_threads
from breccia.internal import install, printable

from .convert_file import Step, Task, convert_file
from .engines import StoppedError, WorkerError
from .safetensors_file import shown
from .text import size

#: Workers that a task may lose one after the other without finishing a value in between.
_ATTEMPTS = 3
#: CPUs, and so threads, of a task: files beside each other use a machine better than threads of one.
_CPUS = 1
#: How the name of the file of a run begins.
_RUN = "run-"
#: Seconds to wait for tasks that were told to stop.
_STOPPING = 10.0


class RayEngine:
    """Runs tasks on the cluster that this process has joined, else the one that `ray.init()` finds or starts.

    max_memory: bytes of Ray's resource "memory" that each task takes.
    """

    def __init__(self, max_memory: int) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ImportError as e:
            raise UnsupportedError(
                f"engine='ray' (--engine ray) needs the library ray ({e}): {install('breccia-bridges[ray]')}.", engine="ray"
            ) from e
        self.max_memory = max_memory

    @property
    def at_once(self) -> int:
        """That of a file on each CPU, and one whose task has ended."""
        return (os.cpu_count() or 1) // _CPUS + 1

    def run(self, count: int, task: Callable[[int], Task], folder: Path) -> Generator[tuple[int, Step | None]]:
        with self._joined(), Run(folder) as run:
            self._check_resources()
            running: dict[Any, _Running] = {}
            try:
                for n in range(count):
                    self._start(running, _Running(n, task(n)), run)
                while running:
                    (ready,), _ = self._ray.wait(list(running), num_returns=1)
                    one = running[ready]
                    try:
                        step = self._next(ready)
                    except StopIteration:
                        del running[ready]
                        one.check_written()
                        yield one.number, None
                    except self._ray.exceptions.RayError as e:
                        del running[ready]
                        one.lose(e)
                        one.task = task(one.number)
                        self._start(running, one, run)
                    else:
                        one.advance()
                        yield one.number, step
            finally:
                run.end()
                self._stop(list(running))

    def _start(self, running: dict[Any, _Running], one: _Running, run: Run) -> None:
        options = {
            "num_returns": "streaming",
            "_generator_backpressure_num_objects": 1,  # no value is begun before the one before it is in the journal
            "num_cpus": _CPUS,
            "memory": self.max_memory,
            "max_retries": 0,
            "name": f"convert {one.path.name}",
        }
        function = self._ray.remote(_converted).options(**options)
        running[function.remote(breccia.__version__, pickle.dumps(replace(one.task, check_running=run.check)))] = one

    def _next(self, steps: Any) -> Step:
        """The next step of a task. Raises what the task raised, StopIteration at its end, and RayError for a lost worker."""
        try:
            return self._ray.get(next(steps))
        except self._ray.exceptions.RayTaskError as e:
            raise e.cause from None

    def _stop(self, running: list[Any]) -> None:
        """End tasks that are under way. One that Ray does not end stops before it writes more."""
        left = {steps.completed(): steps for steps in running}
        for force in (False, True):  # a KeyboardInterrupt in the task; then the end of the process, which Ray does not wait for
            for steps in left.values():
                self._ray.cancel(steps, force=force)
            ended, _ = self._ray.wait(list(left), num_returns=len(left), timeout=_STOPPING) if left else ([], [])
            left = {ref: steps for ref, steps in left.items() if ref not in ended}

    @contextmanager
    def _joined(self) -> Generator[None]:
        """Ray, initialized; it is left as it was found."""
        if self._ray.is_initialized():
            yield
            return
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        self._ray.init(logging_level="WARNING")
        try:
            if is_main and handler is not None:
                signal.signal(signal.SIGTERM, handler)  # Ray's own ends the process at once
            yield
        finally:
            self._ray.shutdown()

    def _check_resources(self) -> None:
        """Raise WorkerError where no machine is large enough for a task, which would wait for one without end."""
        machines = [
            node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= _CPUS
        ]
        largest = int(max((one.get("memory", 0) for one in machines), default=0))
        if largest < self.max_memory:
            raise WorkerError(
                f"a task takes {_CPUS} CPU and {size(self.max_memory)} of the resource 'memory', and the most that a machine "
                f"of the Ray cluster has is {size(largest)}. Give a smaller max_memory= (--max-memory), or start Ray with "
                "more.",
                max_memory=self.max_memory,
                largest=largest,
            )


class Run:
    """A run of the engine: there is a file in the folder, of another name for each run, while it goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / f"{_RUN}{uuid4().hex}"

    def __enter__(self) -> Self:
        for path in self._folder.glob(f"{_RUN}*"):  # of a run whose process was killed, and whose tasks may go on
            path.unlink(missing_ok=True)
        self._file.touch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Let no task write any more."""
        self._file.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise StoppedError if the run has ended."""
        try:
            self._file.open().close()  # on NFS, the server is asked
        except FileNotFoundError as e:
            raise StoppedError(
                f"the run that wrote in {shown(self._folder)} has ended, so that this task of Ray ends and writes nothing "
                "more. The same call goes on from what is finished.",
                folder=str(self._folder),
            ) from e


class _Running:
    """A task that a worker has, and what is known of it."""

    def __init__(self, number: int, task: Task) -> None:
        self.number, self.task = number, task
        self.path = task.planned.writer.path
        self._names = list(task.planned.jobs)
        self._steps = 0  # of the current worker
        self._finished, self._lost = 0, 0

    def advance(self) -> None:
        """Note a step; one that no worker has made before shows that the task can be done."""
        self._steps += 1
        if self._steps > self._finished:
            self._finished, self._lost = self._steps, 0

    def lose(self, error: Exception) -> None:
        """Warn that the worker is lost. Raises WorkerError if too many were lost at the same value."""
        self._lost += 1
        phase, at = divmod(self._steps, max(1, len(self._names)))
        name = self._names[at] if phase < 2 and self._names else ""
        what = f"{('writing', 'verifying')[phase]} {printable(name)} of" if name else "writing"
        where = f"while {what} {shown(self.path.name)}"
        self._steps = 0
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if self._lost >= _ATTEMPTS:
            raise WorkerError(
                f"{self._lost} workers of Ray were lost one after the other {where} ({said}). If memory ran out, give a larger "
                "max_memory= (--max-memory), which Ray keeps free for each task. The same call goes on from what is finished.",
                file=self.path.name,
                name=name,
            ) from error
        warnings.warn(f"a worker of Ray was lost {where} ({said}); another one goes on from there.", stacklevel=2)

    def check_written(self) -> None:
        """Raise WorkerError if what a worker wrote is not here."""
        if not self.path.is_file():
            raise _unseen(self.path, "the program that started the conversion")


def _converted(version: str, pickled: bytes) -> Generator[Step]:
    """The steps of a task, in a worker of Ray."""
    worker = f"the worker on {socket.gethostname()}"
    if version != breccia.__version__:
        raise WorkerError(
            f"{worker} has breccia {breccia.__version__}, and the program that started the conversion has {version}. Install "
            "one version on all machines of the Ray cluster."
        )
    set_num_threads(_CPUS)
    try:
        task: Task = pickle.loads(pickled)
    except FileNotFoundError as e:
        if e.filename is None:  # what fsspec does not find
            raise WorkerError(
                f"{worker} does not see the source: {e}. Give a URL of a server, which all machines of the Ray cluster reach; "
                "memory:// is another store in each process."
            ) from e
        raise _unseen(Path(e.filename), worker) from e
    except ImportError as e:
        raise WorkerError(
            f"{worker} lacks a module of the conversion ({e}). Install the same plug-ins of breccia on all machines of the Ray "
            "cluster."
        ) from e
    folder = task.planned.writer.path.parent
    if not folder.is_dir() and task.uploaded_to:
        raise WorkerError(
            f"{worker} does not see {shown(folder)}, where files are made before they are uploaded to "
            f"{printable(task.uploaded_to)}. Use a Ray cluster of one machine, or set XDG_CACHE_HOME to a folder that all "
            "machines of the cluster have under the same path, such as one on NFS.",
            path=str(folder),
        )
    if not folder.is_dir():
        raise _unseen(folder, worker)
    yield from convert_file(task)


def _unseen(path: Path, who: str) -> WorkerError:
    return WorkerError(
        f"{who} does not see {shown(path)}. Source and destination have to be in folders that all machines of the Ray cluster "
        "have under the same path, such as one on NFS.",
        path=str(path),
    )
