"""The C extensions; everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup

#: Python's own flags ask for debugging information, which makes inlined kernels several times larger and slower to compile.
PLAIN = ["-g0"]
HEADERS = [f"src/breccia_native/{name}.h" for name in ("bits", "numbers", "pool", "transpose", "versions")]

setup(
    ext_modules=[
        Extension(
            "breccia_native.pool",
            ["src/breccia_native/pool.c"],
            depends=HEADERS,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=[*PLAIN, "-O2", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            # Without POSIX threads, as on Windows, compiled products use one thread.
            optional=True,
        ),
        Extension(
            "breccia_native.microkernels",
            ["src/breccia_native/microkernels.c"],
            depends=HEADERS,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            # Contraction would fuse a product into the addition that rounds, and change codes.
            extra_compile_args=[*PLAIN, "-O3", "-ffp-contract=off", "-fno-trapping-math"],
            py_limited_api=True,
            # Without a compiler the distribution installs all the same, and its kernel says why it does not run.
            optional=True,
        ),
        Extension(
            "breccia_native.decoding",
            ["src/breccia_native/decoding.c"],
            depends=HEADERS,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=[*PLAIN, "-O3", "-ffp-contract=off", "-fno-trapping-math"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "breccia_native.products",
            ["src/breccia_native/products.c"],
            depends=[str(p) for p in sorted(Path("src/breccia_native").glob("*.h"))],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            # The order of a sum is free; fused multiply-adds round less often.
            extra_compile_args=[*PLAIN, "-O3", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "breccia_native.columns",
            ["src/breccia_native/columns.c"],
            depends=["src/breccia_native/bits.h", "src/breccia_native/turning.h", "src/breccia_native/weights.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=[*PLAIN, "-O3", "-ffp-contract=fast", "-fno-trapping-math", "-fno-math-errno"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "breccia_native.xla_calls",
            ["src/breccia_native/xla_calls.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=PLAIN,
            py_limited_api=True,
            optional=True,
        ),
    ],
    # One wheel for all versions of Python from 3.11 on; products.c takes minutes, so the others are compiled beside it.
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "build_ext": {"parallel": os.cpu_count() or 1}},
)
