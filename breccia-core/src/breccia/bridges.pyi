import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .recipes import ScalingRecipe
from .tensors.pair import TensorPair
from .tensors.tensor import ScaledTensor

def compare(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    histograms: bool = False,
    advance: Callable[[str, int], None] | None = None,
) -> Any: ...
def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe | str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    histograms: bool = False,
    advance: Callable[[str, int], None] | None = None,
) -> Any: ...
def from_deepseek_v3(
    data: Any, scale: Any, *, block_k: int = 128, fp8_format: str = "E4M3", block_m: int | None = None
) -> ScaledTensor: ...
def from_dlpack(source: Any, framework: str, *, device: Any = None, copy: bool | None = None) -> ScaledTensor: ...
def from_mlx(
    w: Any, scales: Any, biases: Any = None, *, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
) -> ScaledTensor: ...
def from_te_recipe(recipe: Any, role: str = "weight") -> ScalingRecipe: ...
def from_torchao(tensor: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor: ...
def from_transformer_engine(
    te_t: Any, recipe: ScalingRecipe | None = None, *, usage: str | None = None, padding: str = "refuse"
) -> Any: ...
def load_safetensors(
    path: str | os.PathLike[str], *, names: Sequence[str] | None = None, framework: str = "numpy", device: Any = None
) -> dict[str, Any]: ...
def refuse_in_transformers(folder: str | os.PathLike[str]) -> None: ...
def safetensors_metadata(tensors: Mapping[str, ScaledTensor]) -> dict[str, str]: ...
def save_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, str] | None = None,
    *,
    force: bool = True,
) -> None: ...
def to_deepseek_v3(scaled: ScaledTensor) -> tuple[Any, Any]: ...
def to_dlpack(scaled: ScaledTensor) -> Any: ...
def to_mlx(scaled: ScaledTensor) -> tuple[Any, Any, Any, dict[str, Any]]: ...
def to_te_recipe(recipe: ScalingRecipe, *, grad: ScalingRecipe | None = None) -> Any: ...
def to_torchao(
    scaled: ScaledTensor, *, like: Any = None, dtype: Any = None, activation: ScalingRecipe | None = None, **attributes: Any
) -> Any: ...
def to_transformer_engine(
    scaled: ScaledTensor | TensorPair,
    *,
    like: Any = None,
    dtype: Any = None,
    columnwise: bool = False,
    quantizer: Any = None,
) -> Any: ...
def torchao_activation(tensor: Any) -> ScalingRecipe | None: ...

# Bridges that other plug-ins declare.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
