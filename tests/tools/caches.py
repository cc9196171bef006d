"""Where tests keep what JAX and torch compiled, for later runs: compiling is most of the time that such tests take."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import time
from pathlib import Path

from paths import ROOT

#: torch's operators of breccia, of this tree.
OPERATORS = ROOT / "breccia-torch" / "src" / "breccia_torch" / "operators.py"
#: After so many days an entry is removed.
_DAYS = 30


def keep_compiled_functions() -> None:
    """Let JAX and torch, in this process and its children, keep compiled functions in the user's cache folder.

    JAX looks them up by program, options and version. They hold machine code, so each kind of processor has its own folder.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # of the user, or of the process that started this one
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "breccia-tests"
    if OPERATORS.exists():  # torch's key has the names of operators, and not the order of memory that their fakes promise
        digest = hashlib.sha256(OPERATORS.read_bytes()).hexdigest()[:12]
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / f"inductor-{digest}"))
    folder = caches / f"jax-{_processor()}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run removed it
            if time.time() - entry.stat().st_mtime > _DAYS * 86400:
                entry.unlink()
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _processor() -> str:
    """A digest of the instruction sets of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else [platform.processor()]
    kinds = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))} or lines[:1])
    return hashlib.sha256("\n".join([platform.machine(), *kinds]).encode()).hexdigest()[:12]
