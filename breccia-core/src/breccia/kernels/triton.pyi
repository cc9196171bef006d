from contextlib import AbstractContextManager
from typing import Any

TRITON_AVAILABLE: bool

def configure(*, autotune: bool) -> AbstractContextManager[None]: ...
def scaled_matmul_triton(a: Any, b: Any, out_dtype: Any = "float32") -> Any: ...
def block_scaled_matmul_triton(a: Any, b: Any, out_dtype: Any = "float32") -> Any: ...

# The kernels that breccia-triton declares.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
