"""The C extensions; everything else is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/breccia_native/csrc")
#: Python's own flags ask for debugging information, which makes inlined kernels several times larger and slower to compile.
FLAGS = ["-g0", "-fvisibility=hidden"]
#: Contraction would fuse a product into the addition that rounds, and change codes.
EXACT = ["-O3", "-ffp-contract=off", "-fno-trapping-math"]
#: The order of a sum is free; fused multiply-adds round less often.
SUMS = ["-O3", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno"]


class BuildSideBySide(build_ext):
    """Compiles all sources side by side: setuptools would only compile extensions so, and the sources of each in turn."""

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def compile(sources: list[str], **options) -> list[str]:
                return [made for each in pool.map(lambda s: compile_all([s], **options), sources) for made in each]

            self.compiler.compile = compile
            self.parallel = len(self.extensions)
            super().build_extensions()


def extension(name: str, *flags: str, sources: tuple[str, ...] = (), link: tuple[str, ...] = ()) -> Extension:
    """Compiled from NAME.c and `sources`, for Python's stable ABI.

    Without a compiler the distribution installs all the same, and its kernels say why they do not run. Without POSIX threads,
    as on Windows, products use one thread.
    """
    return Extension(
        f"breccia_native.{name}",
        [str(SOURCES / f"{source}.c") for source in (*sources, name)],
        depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=[*FLAGS, *flags],
        extra_link_args=list(link),
        py_limited_api=True,
        optional=True,
    )


#: One for each instruction set, those that take longest first; files for other processors are empty.
PRODUCTS = (
    "products_avx2",
    "products_avx512",
    "short_blocks",
    "narrow_blocks",
    "bf16_avx512",
    "int8_vnni",
    "int8_few",
    "int8_avx2",
    "pairs_bf16",
    "products_vbmi",
    "products_portable",
    "bf16_amx",
    "multiply",
    "layers",
)

setup(
    cmdclass={"build_ext": BuildSideBySide},
    ext_modules=[
        # First, since one of its sources takes longer than any other.
        extension("decoding", *EXACT, sources=("decoding_avx512", "decoding_avx2", "decoding_portable")),
        # An exception of torch passes through layers.c.
        extension("products", *SUMS, "-fexceptions", sources=PRODUCTS),
        extension("microkernels", *EXACT, sources=("casts_avx512", "casts_avx2", "casts_portable")),
        extension("measuring", *EXACT, sources=("measuring_avx512", "measuring_avx2", "measuring_portable")),
        extension("searching", *EXACT, sources=("searching_avx512", "searching_vnni", "searching_avx2", "searching_portable")),
        extension("columns", *SUMS, sources=("columns_avx512", "columns_avx2", "columns_portable")),
        extension("pool", "-O2", "-pthread", link=("-pthread",)),
        extension("xla_calls", "-O2"),
    ],
    # One wheel for all versions of Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
