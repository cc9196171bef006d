"""Build ggml from the source distribution of llama-cpp-python, for bench_matmul_cpu.py.

    python benchmarks/ggml_build.py FOLDER

Needs CMake and a C++ compiler. Downloads about 70 MB, builds for this processor, and leaves the libraries in FOLDER:
`BRECCIA_GGML=FOLDER python benchmarks/bench_matmul_cpu.py` then measures them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
OFF = ("GGML_BUILD_TESTS", "GGML_BUILD_EXAMPLES")


def main(folder: Annotated[Path, typer.Argument(help="Where the libraries go.")]) -> None:
    """Build ggml."""
    if shutil.which("cmake") is None:
        sys.exit("ggml_build: needs cmake; install it, for example with pip.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary)
        # `:all:` would build CMake too, which its build needs.
        wanted = ["--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "-d", temporary]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *wanted], check=True)
        with tarfile.open(next(there.glob("*.tar.gz"))) as archive:
            archive.extractall(there, filter="data")
        source = next(there.glob("*/vendor/llama.cpp/ggml"))
        (source / "ggml.pc.in").touch()  # the distribution leaves it out, and its absence ends the configuration
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", *(f"-D{x}=OFF" for x in OFF)]
        subprocess.run(["cmake", "-S", str(source), "-B", str(there / "build"), *options], check=True)
        subprocess.run(["cmake", "--build", str(there / "build"), "--parallel"], check=True)
        for library in sorted(there.glob("build/src/libggml*.so*")):
            shutil.copy(library, folder / library.name, follow_symlinks=True)
    print(f"BRECCIA_GGML={folder}")


if __name__ == "__main__":
    typer.run(main)
