from typing import Any

TRITON_AVAILABLE: bool

# What breccia-triton exports, and the kernels that it declares.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
