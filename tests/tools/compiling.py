"""CUDA C++ compiled for the sake of what ptxas prints."""

from __future__ import annotations

from collections.abc import Mapping

from breccia_triton.launch import compiler


def compiled_with_log(
    source: compiler.CudaSource, macros: Mapping[str, int | str], architecture: str = "sm_90a"
) -> tuple[bytes, str]:
    """(The cubin, what NVRTC and ptxas printed.)

    Where a driver is installed, NVRTC 12.9 and later takes known cubins from a cache, and ptxas prints nothing about those.
    """
    nvrtc = compiler.nvrtc()
    uncached = ["--no-cache"] if nvrtc.version >= (12, 9) else []
    return nvrtc.compile(source, [*compiler.options_of(architecture, macros), *uncached])
