"""Scripts in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def ran(
    script: str, *words: str, cwd: Path | None = None, code: int = 0, flags: tuple[str, ...] = (), **environ: str | None
) -> subprocess.CompletedProcess[str]:
    """The process that ran `script` with these arguments, which must end with `code`.

    environ: environment variables to set beside those of this process, or to leave out (None). flags: of the interpreter.
    """
    given = {name: value for name, value in (os.environ | environ).items() if value is not None}
    command = [sys.executable, *flags, "-c", script, *words]
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def printed(script: str, *words: str, **options: object) -> str:
    """What `script` prints; see `ran`."""
    return ran(script, *words, **options).stdout  # type: ignore[arg-type]
