import os
from collections.abc import Mapping
from typing import Any

from .tensor import ScaledTensor

def from_deepseek_v3(
    data: Any, scale: Any, *, block_k: int = 128, fp8_format: str = "E4M3", block_m: int | None = None
) -> ScaledTensor: ...
def load_safetensors(path: str | os.PathLike[str], *, framework: str = "numpy", device: Any = None) -> dict[str, Any]: ...
def save_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, str] | None = None,
    *,
    force: bool = True,
) -> None: ...
def to_deepseek_v3(scaled: ScaledTensor) -> tuple[Any, Any]: ...

# Bridges that other plug-ins declare.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
