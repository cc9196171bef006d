"""The quantization method "breccia" of vLLM. Source of its interfaces: vLLM 0.32."""

# vLLM is no dependency of the tests: its types are unknown here.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from breccia import ScalingRecipe, UnsupportedError, bridges

from .experts import BrecciaExpertsMethod
from .linear import BrecciaLinearMethod

METHOD = "breccia"
#: The ids that vLLM's joined layers give their parts; those of other layers count from 0.
_SHARDS: dict[str, tuple[Hashable, ...]] = {"qkv_proj": ("q", "k", "v")}
#: The ids of the projections of experts, by the names that checkpoints have for them.
_OF_EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "w1": "w1", "w2": "w2", "w3": "w3"}


@register_quantization_config(METHOD)
class BrecciaConfig(QuantizationConfig):
    """What vLLM knows of a folder that `breccia convert` wrote: the recipe and layout of each quantized weight.

    activation: the recipe under which linear layers cast their inputs; None leaves inputs unchanged.
    """

    def __init__(self, activation: ScalingRecipe | None = None) -> None:
        super().__init__()
        self.activation = activation
        #: Headers of the quantized weights, by the names of their modules.
        self.headers: dict[str, Any] = {}

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BrecciaConfig:
        """Raises UnsupportedError where single layers cast their inputs under recipes of their own."""
        if config.get("activations"):
            raise UnsupportedError(
                "quantization_config has activations of single layers, which breccia's layers in vLLM do not have. Convert the "
                "model with one activation recipe, or with none."
            )
        activation = config.get("activation")
        return cls(None if activation is None else ScalingRecipe.from_dict(activation))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the headers of the model's files. Raises UnsupportedError for a model that is no local folder."""
        if not Path(model_name).is_dir():
            raise UnsupportedError(
                f"breccia reads the headers of a model's files before vLLM loads it, so {model_name!r} must be a local folder: "
                f"download it first (hf download {model_name}), and serve that folder.",
                path=model_name,
            )
        checkpoint = bridges.load_checkpoint(model_name, framework="torch")
        headers = {name: checkpoint.header(name) for name in checkpoint}
        self.headers = {name.removesuffix(".weight"): header for name, header in headers.items() if header.recipe is not None}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow vLLM's names of modules, which differ from the files' in some models."""
        self.headers = hf_to_vllm_mapper.apply_dict(self.headers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer multiplies. Raises UnsupportedError for a quantized embedding or output head."""
        if isinstance(layer, LinearBase):
            headers = {shard: self.headers[name] for shard, name in self._shards(prefix).items() if name in self.headers}
            return BrecciaLinearMethod(headers, self.activation) if headers else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            headers = self._of_experts(prefix)
            return BrecciaExpertsMethod(layer.moe_config, headers) if headers else None
        if isinstance(layer, VocabParallelEmbedding) and prefix in self.headers:
            raise UnsupportedError(
                f"{prefix} is quantized, and breccia's layers in vLLM are linear layers and experts. Convert the model again "
                f"with exclude={prefix + '.weight'!r} (--exclude).",
                name=prefix,
            )
        return None

    def _shards(self, prefix: str) -> Mapping[Hashable, str]:
        """The names of the weights that a linear layer joins, by their ids in vLLM; None is the id of a single one."""
        parent, _, last = prefix.rpartition(".")
        joined = self.packed_modules_mapping.get(last)
        if joined is None:
            return {None: prefix}
        ids = _SHARDS.get(last, range(len(joined)))
        return {shard: f"{parent}.{name}" for shard, name in zip(ids, joined, strict=True)}

    def _of_experts(self, prefix: str) -> dict[tuple[int, str], Any]:
        """The headers of a module's experts, by (expert, projection)."""
        found: dict[tuple[int, str], Any] = {}
        inside = f"{prefix.removesuffix('.routed_experts')}."
        for name, header in self.headers.items():
            expert, _, projection = name.removeprefix(inside).partition(".")
            if name.startswith(inside) and expert.isdecimal() and projection in _OF_EXPERTS:
                found[int(expert), _OF_EXPERTS[projection]] = header
        return found
