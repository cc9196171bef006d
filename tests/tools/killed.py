"""Kills a process at each of its calls that change files, looks at what is left, and runs it again: `killed.py WAY [RENAMES]`.

`killed.py resumed` kills conversions at 20 random ones, and looks at what the same command makes of what is left.

Children are forked from a process that has imported everything, so that a step takes milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import breccia
from breccia.bridges import convert, save_safetensors
from breccia_bridges import staged_writer, staging
from breccia_bridges.huggingface import refuse_in_transformers
from breccia_bridges.journal import Journal

X = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)

#: Ways to replace something, by the name of what they replace.
WAYS: dict[str, Callable[[], Any]] = {
    "out": lambda: convert("m", "out", "nvfp4", force=True),
    "out.safetensors": lambda: convert("m/model.safetensors", "out.safetensors", "nvfp4", force=True),
    "saved.safetensors": lambda: save_safetensors({"w": X + 1}, "saved.safetensors", force=True),
    "config/config.json": lambda: refuse_in_transformers("config"),
}
#: Functions that change files.
CHANGING = (
    *((os, name) for name in ("replace", "rename", "open", "fsync", "mkdir", "unlink", "rmdir")),
    (shutil, "rmtree"),
    (shutil, "copy2"),
    (staging, "exchange"),
    (staged_writer, "raw_bytes"),  # before each write of tensors
    (Journal, "_add"),
)


def contents(path: Path) -> dict[str, bytes] | None:
    """The bytes of a file, or of all files in a folder; None if there is nothing."""
    if not path.exists():
        return None
    return {str(p.relative_to(path)): p.read_bytes() for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()}


def child(work: Callable[[], Any], at: int) -> tuple[int, int, str]:
    """Run `work` in a forked process that kills itself at its call number `at`. Returns (signal, calls, warnings)."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            calls = 0

            def counted(function: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*arguments, **options)

                return call

            for owner, name in CHANGING:
                setattr(owner, name, counted(getattr(owner, name)))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                work()
            os.write(writing, f"{calls} {' '.join(str(one.message) for one in said)}".encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the process ended with {status}"
    calls, _, warned = text.partition(" ")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, int(calls or 0), warned


def main(name: str, renames: bool) -> int:
    """Try every step; returns their number. renames: as on a system that cannot exchange two paths."""
    if renames:
        staging.exchange = lambda a, b: False
    folder = Path(tempfile.mkdtemp()).resolve()
    os.chdir(folder)
    target = folder / name
    for made in ("m", "config"):
        (folder / made).mkdir()
        save_safetensors({"w": X, "v": X}, folder / made / "model.safetensors")
        (folder / made / "config.json").write_text('{"model_type": "llama"}')
    if name == "out":
        shutil.copytree("m", "out")
    elif name != "config/config.json":
        shutil.copy("m/model.safetensors", name)
    breccia.set_num_threads(1)  # a forked process has no other threads
    convert("m", "warm", "nvfp4")  # once here, so that no child loads plug-ins
    shutil.rmtree("warm")
    old, names = contents(target), sorted(os.listdir(target.parent))
    _, last, _ = child(WAYS[name], -1)
    new = contents(target)
    assert new != old and last > 5
    hidden = staging.staging_folder(target)
    for at in range(1, last + 1):
        stopped, _, _ = child(WAYS[name], at)
        assert stopped == signal.SIGKILL, at
        found = contents(target)
        assert found in (old, new) or (renames and found is None and contents(hidden / "old" / target.name) in (old, new)), at
        assert set(os.listdir(target.parent)) - set(names) <= {hidden.name}, at
        left = hidden.exists() and set(os.listdir(hidden)) - {"lock"}
        _, _, warned = child(WAYS[name], -1)
        assert contents(target) == new and sorted(os.listdir(target.parent)) == names, at
        assert bool(left) == ("interrupted" in warned), at
    shutil.rmtree(folder)
    return last


def resumed(kills: int = 20) -> int:
    """Kill conversions of several shards at random calls, and again while they go on. Returns how many went on with tensors."""
    folder = Path(tempfile.mkdtemp()).resolve()
    os.chdir(folder)
    breccia.set_num_threads(1)
    rng, points = np.random.default_rng(0), random.Random(0)
    (folder / "m").mkdir()
    for n in range(3):
        weights = {f"layers.{n}.{i}.weight": rng.standard_normal((33, 64)).astype(np.float32) for i in range(6)}
        save_safetensors(weights, folder / "m" / f"model-{n}.safetensors")
    (folder / "m" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "m" / "notes.txt").write_text("notes")

    def work() -> None:
        convert("m", "out", "nvfp4")

    convert("m", "whole", "nvfp4")
    whole, hidden, went_on = contents(folder / "whole"), staging.staging_folder(folder / "out"), 0
    _, last, _ = child(work, -1)
    assert contents(folder / "out") == whole
    for at in points.sample(range(1, last * 9 // 10), kills):  # the last calls come after the destination is there
        shutil.rmtree("out", ignore_errors=True)
        stopped, _, _ = child(work, at)
        assert stopped == signal.SIGKILL and not (folder / "out").exists(), at
        child(work, points.randrange(1, last // 3))  # again, on the way
        journal = hidden / "journal"
        lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        written = {line["written"] for line in lines if "written" in line}
        if not (folder / "out").exists():
            _, _, warned = child(work, -1)
            assert not lines or f": {len(written)} tensors are written" in warned, (at, warned)
            went_on += bool(written)
        assert contents(folder / "out") == whole and sorted(os.listdir()) == ["m", "out", "whole"], at
    shutil.rmtree(folder)
    return went_on


if __name__ == "__main__":
    print(resumed() if sys.argv[1] == "resumed" else main(sys.argv[1], "RENAMES" in sys.argv))
