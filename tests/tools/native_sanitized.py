"""Run the tests of the compiled kernels with the extensions built for AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/tools/native_sanitized.py

Needs GCC. Builds into a temporary folder, and exits with the status of the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  # which has distutils from Python 3.12 on

from distutils.core import run_setup  # isort: skip

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "breccia-native" / "src" / "breccia_native"
#: After those of setup.py, whose optimization and debugging information they replace.
FLAGS = ["-Wall", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
#: Tests that start processes of their own, or need an unmodified installation.
LEFT_OUT = "not without_the_compiled and not torch and not use_the_compiled"


def build(folder: Path) -> None:
    """The package with sanitized extensions in `folder`."""
    shutil.copytree(SOURCE, folder / "breccia_native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with contextlib.chdir(SOURCE.parents[1]), ThreadPoolExecutor(os.cpu_count()) as pool:
        extensions: list[Any] = run_setup("setup.py", stop_after="init").ext_modules

        def compiled(extension: Any, source: str) -> str:
            object_file = folder / f"{extension.name}.{Path(source).stem}.o"
            macros = [f"-D{name}={value}" for name, value in extension.define_macros]
            options = ["-fPIC", f"-I{sysconfig.get_paths()['include']}", *macros, *extension.extra_compile_args, *FLAGS]
            subprocess.run(["gcc", "-c", *options, source, "-o", str(object_file)], check=True)
            return str(object_file)

        objects = {e.name: [pool.submit(compiled, e, source) for source in e.sources] for e in extensions}
        for e in extensions:
            library = folder / f"{e.name.replace('.', '/')}.abi3.so"
            parts = [part.result() for part in objects[e.name]]
            subprocess.run(["gcc", "-shared", *FLAGS, *parts, *e.extra_link_args, "-o", str(library)], check=True)


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
