"""The least time of a kernel by one model of a device: of its operations or its bytes, whichever take longer, and of launches.

A kernel's `score` is this times what was measured over it, or else times a constant of its module. Imports no framework.
"""

from __future__ import annotations

#: Operations per second of an H200's tensor cores by dtype (of FP32, outside of them), bytes per second, seconds of a launch.
#: Kernels are compared with each other, so the same numbers serve other devices.
OPERATIONS = {"float8": 1.5e15, "bfloat16": 0.8e15, "float16": 0.8e15, "float32": 0.08e15}
BANDWIDTH, LAUNCH = 4.0e12, 3e-6


def seconds(operations: float, dtype: str, moved: float, launches: int = 1) -> float:
    """The seconds of so many operations of a dtype, and of so many bytes that are read and written."""
    return max(operations / OPERATIONS[dtype], moved / BANDWIDTH) + launches * LAUNCH
