"""Install built wheels into clean environments, check what was installed, and measure how long it took.

    python release/install.py dist                               # core, vectors and everything, on this Python
    python release/install.py dist --python python3.12           # on another; repeat it for several
    python release/install.py dist --what 'breccia[jax,native]'  # another requirement; repeat it for several
    python release/install.py dist --sbom dist/sbom.cdx.json  # write what the last one brought, with its licenses

Each requirement is installed twice, into an environment each: the first installation fills pip's cache, the second is measured.
There is no compiler: only wheels are installed. `everything` is breccia[all]. On a machine that does other work too, compare
the seconds of the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from environments import ROOT, Environment, Failed, checked

#: Name -> requirement, and the seconds that its installation may take with a warm cache.
NAMED = {"core": ("breccia-core", 5.0), "vectors": ("breccia-vectors", 5.0), "everything": ("breccia[all]", 60.0)}


@dataclass(frozen=True)
class Installed:
    """An installation: its seconds by the clock and of the CPU, what the smoke test printed, and where it is."""

    seconds: float
    cpu: float
    said: str
    environment: Environment


def measured(requirement: str, python: str, wheels: Path, folder: Path) -> Installed:
    """Install twice, measure the second, and check it. Raises Failed."""
    Environment(folder / "first", python, wheels).install(requirement)
    environment = Environment(folder / "second", python, wheels)
    started, used = time.monotonic(), cpu_of_children()
    environment.install(requirement)
    seconds, cpu = time.monotonic() - started, cpu_of_children() - used
    script, *words = (str(ROOT / "release" / "smoke.py"), str(ROOT / "docs" / "spec" / "vectors" / "1"))
    if requirement == "breccia-vectors":
        script, words = str(ROOT / "release" / "smoke_vectors.py"), []
    elif "native" in requirement or "all" in requirement:
        words.append("--native")
    said = environment.run("-W", "error::ImportWarning", script, *words)
    environment.pip("check")
    return Installed(seconds, cpu, said.strip(), environment)


def cpu_of_children() -> float:
    """CPU seconds of the commands that ended, user and system."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    """Run the program; the number of requirements that failed or took too long."""
    parser = argparse.ArgumentParser(description="Install built wheels into clean environments, check and measure.")
    parser.add_argument("wheels", type=Path, help="the folder that release/dist.py wrote")
    parser.add_argument("--python", action="append", metavar="PROGRAM", help="a Python; by default this one")
    parser.add_argument("--what", action="append", metavar="REQUIREMENT", help=f"{', '.join(NAMED)}, or a requirement of pip")
    parser.add_argument(
        "--sbom", type=Path, metavar="FILE", help="write the CycloneDX bill of materials of the last installation"
    )
    parser.add_argument("--limits", action="store_true", help="fail if core takes over 5 s, or everything over 60")
    given = parser.parse_args()
    wrong = 0
    for python in given.python or [sys.executable]:
        for what in given.what or list(NAMED):
            requirement, limit = NAMED.get(what, (what, None))
            with tempfile.TemporaryDirectory() as temporary:
                try:
                    done = measured(requirement, python, given.wheels, Path(temporary))
                    if given.sbom:
                        write_sbom(done.environment, given.sbom)
                except Failed as e:
                    print(f"{python}: {requirement}: FAILED: {e}", flush=True)
                    wrong += 1
                    continue
            late = given.limits and limit is not None and done.seconds > limit
            wrong += late
            of = f" of at most {limit:.0f}" if limit else ""
            load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs" if hasattr(os, "getloadavg") else ""
            took = f"{done.seconds:.1f} s{of}{', TOO LONG' if late else ''}, {done.cpu:.1f} s of CPU{load}"
            print(f"{python}: {requirement}: {took}; {done.said}", flush=True)
    return wrong


def write_sbom(environment: Environment, target: Path) -> None:
    """Write the packages of the environment, with versions and licenses, as what `breccia` brings."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON", "-o", target]
    project = ROOT / "release" / "breccia" / "pyproject.toml"
    checked([*command, "--pyproject", project, environment.python], dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
