from contextlib import AbstractContextManager
from typing import Any

TRITON_AVAILABLE: bool

def configure(*, autotune: bool) -> AbstractContextManager[None]: ...

# The kernels that breccia-triton declares.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
