"""Sources of this package as loaded kernels."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from breccia.internal import once

from . import compiler
from .driver import Function, driver


@lru_cache
def source_of(path: Path, headers: tuple[tuple[str, str], ...] = ()) -> compiler.CudaSource:
    """The source in a file. headers: (name, text) of what it includes besides files."""
    return compiler.CudaSource.read(path, dict(headers))


def function(
    source: compiler.CudaSource, entry: str, macros: Mapping[str, int | str], shared: int, device: torch.device
) -> Function:
    """A kernel on a device, compiled for its architecture; once in a process. entry: its name (`extern "C"`).

    shared: bytes of dynamic shared memory. Raises CompileError or DriverError.
    """
    key = source.name, source.text, tuple(source.headers.items())
    return _function(key, entry, tuple(sorted(macros.items())), shared, device.index)


@once
def _function(key: tuple, entry: str, macros: tuple, shared: int, index: int) -> Function:
    name, text, headers = key
    major, minor = torch.cuda.get_device_capability(index)
    # Only the architecture-specific instructions (wgmma and what came after) need the "a".
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    nvrtc = compiler.nvrtc(int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None)
    cubin = compiler.cubin(compiler.CudaSource(name, text, dict(headers)), architecture, dict(macros), nvrtc)
    with torch.cuda.device(index):
        context = driver().enter(index)
        loaded = driver().load(cubin, entry, shared)
    loaded.context = context
    return loaded
