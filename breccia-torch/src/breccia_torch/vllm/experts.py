"""Experts of vLLM with weights of breccia."""

# vLLM is no dependency of the tests: its types are unknown here.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from ..experts import routed
from ..nn import ScaledExperts
from ..values import stacked
from .received import Received, check_experts, of_rank

#: The projections of each parameter.
_PARAMETERS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}


class BrecciaExpertsMethod(FusedMoEMethodBase):
    """Experts whose rows are multiplied by `breccia.grouped_matmul`. headers: of their weights, by (expert, projection)."""

    def __init__(self, moe: Any, headers: Mapping[tuple[int, str], Any]) -> None:
        super().__init__(moe)
        self._headers = headers
        self._activation = ApplyMoEActivationConfig(
            moe.swiglu_limit,
            1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha,
            0.0 if moe.swiglu_beta is None else moe.swiglu_beta,
            moe.activation_situ_beta,
            moe.activation_situ_linear_beta,
        )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises what `check_experts` raises."""
        check_experts(self._headers, layer.layer_name)
        here = {expert for expert, _ in self._headers if layer._map_global_expert_id_to_local_expert_id(expert) >= 0}
        for name, projections in _PARAMETERS.items():
            received = Received({key: h for key, h in self._headers.items() if key[0] in here and key[1] in projections})
            layer.add_module(name, received)
            for part, parameter in received.named_parameters():
                layer.__dict__[f"{name}.{part}"] = parameter  # vLLM looks it up by this name
        layer.inner, layer.weight_dtype = intermediate_size_per_partition, params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Raises what `of_rank` raises, and what `breccia.stack` raises for experts that are quantized differently."""
        parallel = self.moe.moe_parallel_config
        for name, projections in _PARAMETERS.items():
            tensors: dict[Any, Any] = getattr(layer, name).tensors()
            axis = 1 if name == "w2_weight" else 0
            where = f"{layer.layer_name}.{name}"
            columns = [
                [
                    of_rank(tensors[key], axis, layer.inner, parallel.tp_rank, parallel.tp_size, where)
                    for key in sorted(tensors)
                    if key[1] == projection
                ]
                for projection in projections
                if any(key[1] == projection for key in tensors)
            ]
            delattr(layer, name)
            layer.add_module(name, ScaledExperts(stacked(columns, where), layer.weight_dtype).eval())

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # breccia multiplies, none of vLLM's kernels

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        count = len(layer.w2_weight)
        if layer.expert_map is not None:  # those of other ranks add nothing here
            local = layer.expert_map[topk_ids]
            topk_ids = torch.where(local < 0, count, local)

        def experts(rows: Tensor, offsets: Tensor, which: Tensor) -> Tensor:
            both = layer.w13_weight.grouped_matmul(rows, offsets, False)
            inner = both.new_empty((len(both), both.shape[1] // (2 if self.moe.is_act_and_mul else 1)))
            apply_moe_activation(layer.activation, inner, both, activation_config=self._activation)
            return layer.w2_weight.grouped_matmul(inner, offsets, False)

        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return routed(x, topk_ids, topk_weights, count, experts)
