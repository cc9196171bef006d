"""Check an installation of breccia-vectors: it reads every set, agrees with itself, and finds a planted difference.

    /path/to/environment/bin/python release/smoke_vectors.py

Imports nothing of the repository, and no NumPy.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import breccia_vectors
from breccia_vectors import Case


def itself(case: Case) -> dict[str, bytes]:
    return {part: raw for part in ("global_scale", "scale", "zero_point", "codes") if (raw := getattr(case, part)) is not None}


def wrong(case: Case) -> dict[str, bytes]:
    """The code of the largest element of MXFP4 is off by one."""
    codes = bytearray(case.codes)
    values = case.array("input").cast("B").cast("f").tolist()
    codes[max(range(len(values)), key=lambda i: abs(values[i]))] ^= 1
    return {"codes": bytes(codes)}


def main() -> None:
    """Run the checks. Exits with the first fault."""
    if not Path(breccia_vectors.__file__).resolve().is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"smoke: breccia_vectors is imported from {breccia_vectors.__file__}, which is outside {sys.prefix}.")
    report = breccia_vectors.check(itself, lambda case: case.decoded)
    if not report.agrees or breccia_vectors.check(wrong, cases=breccia_vectors.cases("mxfp4", edge="ordinary")).agrees:
        sys.exit(f"smoke: the checker of breccia_vectors is wrong:\n{report}")
    if "numpy" in sys.modules:
        sys.exit("smoke: breccia_vectors imports NumPy.")
    for what in ("data", "spec", "c"):
        path = subprocess.run([sys.executable, "-m", "breccia_vectors", "path", what], capture_output=True, text=True).stdout
        if not Path(path.strip()).exists():
            sys.exit(f"smoke: python -m breccia_vectors path {what} printed {path!r}.")
    count = len(list(breccia_vectors.cases()))
    print(f"breccia-vectors {breccia_vectors.__version__}: {count} cases of {len(breccia_vectors.formats())} formats")


if __name__ == "__main__":
    main()
