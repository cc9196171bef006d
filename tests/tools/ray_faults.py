"""What tests do to workers of Ray, by files in the folder FAULTS: `ray_faults.install` is the hook with which workers start.

A file named as a tensor has what happens in the middle of its cast: "kill once", "kill", "meet" (waits until two processes are
there), "wait" (until it is stopped; then there is a file `ended`), "fail system" or "fail breccia". The file `casts` lists the
tensors that were cast, each with the process, `slabs` with the rows of their largest slab, and `killed` those that killed
theirs; `assigned` has what a process may use.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "BRECCIA_TEST_FAULTS"


def install() -> None:
    import ray

    import breccia
    from breccia_bridges.jobs import Job

    real = Job.pieces

    def pieces(self: Job) -> Iterator[dict[str, Any]]:
        folder = Path(os.environ[FOLDER])
        with (folder / "casts").open("a") as file:
            file.write(f"{self.name} {os.getpid()}\n")
        with (folder / "slabs").open("a") as file:
            file.write(f"{self.name} {max(math.prod(part.stop - part.start for part in one) for one in self.casts().slabs)}\n")
        assigned = {"threads": breccia.get_num_threads(), **ray.get_runtime_context().get_assigned_resources()}
        (folder / "assigned").write_text(json.dumps(assigned))
        for piece in real(self):
            yield piece
            _happen(folder, folder / self.name)

    Job.pieces = pieces


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
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(0.01)
        finally:
            (folder / "ended").touch()
