"""Kills a process at each of its calls that change files, looks at what is left, and runs it again: `killed.py WAY [RENAMES]`.

Children are forked from a process that has imported everything, so that a step takes milliseconds.
"""

from __future__ import annotations

import os
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
from breccia_bridges import staging
from breccia_bridges.huggingface import refuse_in_transformers

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


if __name__ == "__main__":
    print(main(sys.argv[1], "RENAMES" in sys.argv))
