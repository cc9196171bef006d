import os
from collections.abc import Mapping, Sequence
from typing import Any

from .policies import Policy
from .recipe_bases import ScalingRecipe
from .tensors.pair import TensorPair
from .tensors.tensor import ScaledTensor

def compare(
    reference: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    histograms: bool = False,
    advance: Any = None,
    source_dialect: str | tuple[str | None, str | None] | None = None,
) -> Any: ...
def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: ScalingRecipe | str | Policy | Mapping[str, Any] | Sequence[ScalingRecipe | str] | None = None,
    *,
    target_bits: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    histograms: bool = False,
    advance: Any = None,
    source_dialect: str | None = None,
    dialect: str | None = None,
    activations: str | None = None,
    exact: bool = False,
    restart: bool = False,
    max_shard_size: int | str | None = None,
    max_memory: int | str = "1GiB",
    verify: str = "full",
    engine: str = "local",
    calibrate: Any = None,
    method: str | None = None,
    device: str | None = None,
) -> Any: ...
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    advance: Any = None,
    source_dialect: str | tuple[str | None, str | None] | None = None,
) -> Any: ...
def from_bitsandbytes(weight: Any, recipe: ScalingRecipe | None = None, *, quant_state: Any = None) -> ScaledTensor: ...
def from_compressed_tensors(module: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor: ...
def from_deepseek_v3(
    data: Any, scale: Any, *, block_k: int = 128, fp8_format: str = "E4M3", block_m: int | None = None
) -> ScaledTensor: ...
def from_dlpack(source: Any, framework: str, *, device: Any = None, copy: bool | None = None) -> ScaledTensor: ...
def from_mlx(
    w: Any, scales: Any, biases: Any = None, *, group_size: int | None = None, bits: int | None = None, mode: str = "affine"
) -> ScaledTensor: ...
def from_mlx_layer(layer: Any) -> ScaledTensor: ...
def from_qwix(array: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor: ...
def from_te_recipe(recipe: Any, role: str = "weight") -> ScalingRecipe: ...
def from_torchao(tensor: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor: ...
def from_transformer_engine(
    te_t: Any, recipe: ScalingRecipe | None = None, *, usage: str | None = None, padding: str | None = None
) -> Any: ...
def load_checkpoint(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    names: Sequence[str] | None = None,
    framework: str = "numpy",
    device: Any = None,
    source_dialect: str | None = None,
    settings: Any = None,
) -> Any: ...
def load_safetensors(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    framework: str = "numpy",
    device: Any = None,
    nested: bool = False,
) -> dict[str, Any]: ...
def merge(
    source: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    min_share: float = 0.9,
    calibrate: Any = None,
    force: bool = False,
    advance: Any = None,
    source_dialect: str | None = None,
    restart: bool = False,
    max_memory: int | str = "4GiB",
    verify: str = "bytes",
) -> Any: ...
def refuse_in_transformers(folder: str | os.PathLike[str]) -> None: ...
def safetensors_metadata(tensors: Mapping[str, ScaledTensor]) -> dict[str, str]: ...
def save_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None: ...
def to_bitsandbytes(scaled: ScaledTensor, *, like: Any = None, dtype: Any = None, **attributes: Any) -> Any: ...
def to_compressed_tensors(scaled: ScaledTensor, *, like: Any = None, bias: Any = None) -> Any: ...
def to_deepseek_v3(scaled: ScaledTensor) -> tuple[Any, Any]: ...
def to_dlpack(scaled: ScaledTensor) -> Any: ...
def to_mlx(scaled: ScaledTensor) -> tuple[Any, Any, Any, dict[str, Any]]: ...
def to_mlx_layer(scaled: ScaledTensor, *, bias: Any = None) -> Any: ...
def to_qwix(scaled: ScaledTensor, *, like: Any = None) -> Any: ...
def to_te_recipe(recipe: ScalingRecipe, *, grad: ScalingRecipe | None = None) -> Any: ...
def to_torchao(
    scaled: ScaledTensor, *, like: Any = None, dtype: Any = None, activation: ScalingRecipe | None = None, **attributes: Any
) -> Any: ...
def to_transformer_engine(
    scaled: ScaledTensor | TensorPair, *, like: Any = None, dtype: Any = None, columnwise: bool = False, quantizer: Any = None
) -> Any: ...
def torchao_activation(tensor: Any) -> ScalingRecipe | None: ...
def why(
    model: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    *,
    calibrate: Any = None,
    device: str | None = None,
    remedies: int = 3,
    histograms: bool = False,
    advance: Any = None,
    source_dialect: str | tuple[str | None, str | None] | None = None,
) -> Any: ...

# Bridges that other plug-ins declare.
def __getattr__(name: str) -> Any: ...  # pyright: ignore[reportIncompleteStub]
