"""Run the tests of the compiled kernels with the extensions built for AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/tools/native_sanitized.py

Needs GCC. Builds into a temporary folder, and exits with the status of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "breccia-native" / "src" / "breccia_native"
C_SOURCE = SOURCE / "csrc"
FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
#: As in breccia-native/setup.py, where they change results; and the sources of each extension.
OWN = {
    "pool": ("-ffp-contract=off", ["pool"]),
    "microkernels": ("-ffp-contract=off", ["microkernels", "casts_*"]),
    "decoding": ("-ffp-contract=off", ["decoding", "decoding_*"]),
    "products": (
        "-ffp-contract=fast",
        ["products", "products_*", "multiply", "int8_*", "bf16_*", "pairs_*", "short_*", "narrow_*"],
    ),
    "columns": ("-ffp-contract=fast", ["columns", "columns_*"]),
}
#: Tests that start processes of their own, or need an unmodified installation.
LEFT_OUT = "not without_the_compiled and not torch and not use_the_compiled"


def build(folder: Path) -> None:
    """The package with sanitized extensions in `folder`."""
    package = folder / "breccia_native"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    include = sysconfig.get_paths()["include"]
    for name, (contraction, patterns) in OWN.items():
        made = str(package / f"{name}.abi3.so")
        command = ["gcc", "-shared", "-fPIC", "-Wall", "-DPy_LIMITED_API=0x030B0000", f"-I{include}", *FLAGS, contraction]
        sources = [str(source) for pattern in patterns for source in sorted(C_SOURCE.glob(f"{pattern}.c"))]
        subprocess.run([*command, *sources, "-o", made], check=True)


def main() -> int:
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
            "LD_PRELOAD": library,
            # Python's own allocations live until it exits. GCC 13's runtime would put locals on stacks of its own, where
            # vectors of 64 bytes are not aligned as its code expects.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:detect_stack_use_after_return=0",
            "PYTHONMALLOC": "malloc",
        }
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "-k", LEFT_OUT]
        return subprocess.run([sys.executable, "-m", "pytest", *options, "tests/native"], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
