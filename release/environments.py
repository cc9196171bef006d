"""Clean environments for built distributions: no compiler, no source distribution, nothing but wheels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Environment:
    """A virtual environment of some Python, which installs from a folder of wheels and the index."""

    def __init__(self, folder: Path, python: str, wheels: Path) -> None:
        self.folder, self._wheels = folder, wheels.resolve()
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        # Nothing of the caller's Python, and no compiler: no package may be built, nor may one compile while it is installed.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BRECCIA_"))}
        self._variables = kept | {"CC": "false", "CXX": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        checked([python, "-m", "venv", "--without-pip", folder], self._variables)

    def pip(self, command: str, *words: str, timeout: float | None = None) -> str:
        """Run the pip of the calling Python on this environment. Returns its output; raises Failed."""
        return checked([sys.executable, "-m", "pip", "--python", self.python, command, *words], self._variables, timeout)

    def install(self, *requirements: str) -> str:
        """Install from wheels, with breccia's from the folder of wheels."""
        constraints = str(ROOT / "constraints.txt")
        options = ("-q", "--only-binary", ":all:", "--find-links", str(self._wheels), "-c", constraints)
        return self.pip("install", *options, *requirements)

    def run(self, *words: str) -> str:
        """Run its Python, outside the repository. Returns what it printed; raises Failed."""
        return checked([self.python, *words], self._variables, cwd=self.folder)


class Failed(Exception):
    """A command failed; the message is the command and its output."""


def checked(command: list[str | Path], variables: dict[str, str], timeout: float | None = None, cwd: Path | None = None) -> str:
    """Run a command. Returns stdout and stderr together; raises Failed."""
    done = subprocess.run(
        [str(word) for word in command],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        cwd=cwd,
    )
    if done.returncode:
        raise Failed(f"{' '.join(str(word) for word in command)}\n{done.stdout}")
    return done.stdout
