"""What tests do to workers of Ray, by files in the folder FAULTS: `ray_faults.install` is the hook with which workers start.

A file named as a tensor has what happens in the middle of its cast: "kill once", "kill", "meet" (waits until two processes are
there), "wait" (until there is a file `go`, also when it is interrupted), "fail system" or "fail breccia". The file `casts` has
the tensors that were cast, each with the process, `slabs` with the rows of their largest slab, and `killed` those that killed
theirs; `assigned` has what a process may use, and there is a file `stopped PID` of each process that found its run ended.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = "BRECCIA_TEST_FAULTS"


def install() -> None:
    import ray

    import breccia
    from breccia_bridges.engines import StoppedError
    from breccia_bridges.jobs import Job
    from breccia_bridges.production import Production
    from breccia_bridges.ray_engine import Run

    real, check = Production.of, Run.check

    def of(job: Job, planned: Any, alone: bool) -> Production:
        production = real(job, planned, alone)
        if job.way != "cast":
            return production
        largest = max(math.prod(part.stop - part.start for part in one) for one in job.casts().slabs)
        return replace(production, made=partial(_made, job.name, largest, production.made, assigned))

    def assigned() -> dict[str, Any]:
        return {"threads": breccia.get_num_threads(), **ray.get_runtime_context().get_assigned_resources()}

    def checked(self: Run) -> None:
        try:
            check(self)
        except StoppedError:
            (Path(os.environ[FOLDER]) / f"stopped {os.getpid()}").touch()
            raise

    Production.of, Run.check = of, checked


def _made(
    name: str, largest: int, make: Callable[[Any], Iterable[Any]], assigned: Callable[[], dict[str, Any]], found: Any
) -> Iterator[Any]:
    folder = Path(os.environ[FOLDER])
    with (folder / "casts").open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    with (folder / "slabs").open("a") as file:
        file.write(f"{name} {largest}\n")
    (folder / "assigned").write_text(json.dumps(assigned()))
    for piece in make(found):
        _happen(folder, folder / name)
        yield piece


def _happen(folder: Path, fault: Path) -> None:
    what = fault.read_text() if fault.is_file() else ""
    if what.startswith("kill"):
        with (folder / "killed").open("a") as file:
            file.write(f"{fault.name} {os.getpid()}\n")
        if what == "kill once":
            fault.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "meet":
        end = time.monotonic() + 60
        while len({line.split()[1] for line in (folder / "casts").read_text().splitlines()}) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    elif what == "fail system":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model-1.safetensors")
    elif what == "fail breccia":
        from breccia import UnsupportedError

        raise UnsupportedError(f"{fault.name}: a value that nothing holds")
    elif what == "wait":
        end = time.monotonic() + 120
        while not (folder / "go").exists() and time.monotonic() < end:
            with suppress(KeyboardInterrupt):  # as if Ray had lost it
                time.sleep(0.01)
