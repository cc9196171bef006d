from typing import Any

TRITON_AVAILABLE: bool

# The kernels that breccia-triton declares.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
