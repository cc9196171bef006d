"""What happens where breccia 0.1.3 meets today's distributions, by pip: each way to get both, and how it ends.

    python release/successor.py dist

breccia 0.1.3, from the index, owns the import package `breccia`, as breccia-core does. Each case starts in a clean environment.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from environments import ROOT, Environment, Failed

OLD = "breccia==0.1.3"
VERSION: str = tomllib.loads((ROOT / "release/breccia/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
#: Prints the version of what is imported, and uses what both versions have, in files of either or both.
USE = """
import numpy as np, breccia, breccia.bridges, breccia.kernels.triton, breccia.kernels.reference
from breccia.layouts import PerBlockK
from breccia.recipes import Float8BlockScaling
st = breccia.cast(np.ones((2, 256), np.float32), breccia.Float8BlockScaling(block_k=128))
assert breccia.dequantize(st).sum() == 512
print(breccia.__version__, hasattr(breccia, "explain"))
"""
WORKS = f"{VERSION} True"


class Wrong(Exception):
    """A case did not end as it says."""


def expect(found: str, wanted: str) -> None:
    if wanted not in found:
        raise Wrong(f"expected {wanted!r} in:\n{found}")


def use(environment: Environment) -> str:
    return environment.run("-c", USE).strip()


def doctor(environment: Environment) -> str:
    """What `breccia doctor` prints; it exits with 1 where it finds a problem."""
    try:
        return environment.run("-m", "breccia", "doctor")
    except Failed as e:
        return " ".join(str(e).split())


def upgraded(environment: Environment) -> None:
    """`pip install --upgrade breccia` over 0.1.3 works."""
    environment.install(OLD)
    expect(use(environment), "0.1.3 False")
    environment.install("--upgrade", "breccia[cli]")
    expect(use(environment), WORKS)
    environment.pip("check")
    expect(doctor(environment), "no problems found")


def together(environment: Environment) -> None:
    """`pip install breccia-core` over 0.1.3 mixes both; doctor names it, and `pip install --upgrade breccia` mends it."""
    environment.install(OLD)
    environment.install("breccia-core[cli]")
    expect(environment.run("-c", "import breccia; print(breccia.__version__)"), VERSION)
    for package in ("bridges", "kernels.triton"):  # modules of breccia-core, which the packages of 0.1.3 hide
        found = environment.run("-c", f"from importlib.util import find_spec; print(find_spec('breccia.{package}').origin)")
        expect(Path(found.strip()).as_posix(), f"{package.rpartition('.')[2]}/__init__.py")
    expect(doctor(environment), "older, unrelated distribution `breccia` 0.1.3 is installed in the same folder")
    environment.install("--upgrade", "breccia")
    expect(use(environment), WORKS)
    expect(doctor(environment), "no problems found")


def overwritten(environment: Environment) -> None:
    """0.1.3 over breccia-core wins at import; the command says so in a line, and `pip install --upgrade breccia` mends it."""
    environment.install("breccia-core[cli]")
    environment.install(OLD)
    expect(environment.run("-c", "import breccia; print(breccia.__version__)"), "0.1.3")
    expect(doctor(environment), "error: the older, unrelated distribution `breccia` 0.1.3 is installed in the same folder")
    environment.install("--upgrade", "breccia")
    expect(use(environment), WORKS)


def by_hand(environment: Environment) -> None:
    """The remedy that doctor prints ends in breccia-core alone."""
    environment.install("breccia-core[cli]")
    environment.install(OLD)
    (remedy,) = re.findall(r"Type: (.+)", doctor(environment))
    expect(remedy, "pip uninstall breccia; pip install --force-reinstall --no-deps breccia-core")
    environment.pip("uninstall", "-q", "-y", "breccia")
    environment.install("--force-reinstall", "--no-deps", "breccia-core")
    expect(use(environment), WORKS)


def downgraded(environment: Environment) -> None:
    """0.1.3 over today's `breccia`: pip replaces it, and breccia-core's files with it; an upgrade mends both."""
    environment.install("breccia")
    environment.install(OLD)
    expect(use(environment), "0.1.3 False")
    environment.install("--upgrade", "breccia")
    expect(use(environment), WORKS)


def removed(environment: Environment) -> None:
    """`pip uninstall breccia` removes the files of breccia-core too, so imports fail; reinstalling breccia-core mends it."""
    environment.install("breccia")
    environment.pip("uninstall", "-q", "-y", "breccia")
    try:
        environment.run("-c", "import breccia")
    except Failed as e:
        expect(str(e), "No module named 'breccia'")
    else:
        raise Wrong("`import breccia` works without its files.")
    environment.install("--force-reinstall", "--no-deps", "breccia-core")
    expect(use(environment), WORKS)


@dataclass(frozen=True)
class Case:
    """A way to get both."""

    run: Callable[[Environment], None]

    @property
    def text(self) -> str:
        return str(self.run.__doc__)


CASES = tuple(map(Case, (upgraded, together, overwritten, by_hand, downgraded, removed)))


def main() -> int:
    """Run the program; the number of cases that ended otherwise."""
    parser = argparse.ArgumentParser(description="Check what happens where breccia 0.1.3 meets today's distributions.")
    parser.add_argument("wheels", type=Path, help="the folder that release/dist.py wrote")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environments")
    given = parser.parse_args()
    wrong = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            try:
                case.run(Environment(Path(temporary) / "env", given.python, given.wheels))
            except (Failed, Wrong) as e:
                print(f"WRONG: {case.text}\n{e}", flush=True)
                wrong += 1
            else:
                print(f"ok: {case.text}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
