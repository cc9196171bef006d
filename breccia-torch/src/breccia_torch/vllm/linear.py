"""Linear layers of vLLM with weights of breccia."""

# vLLM is no dependency of the tests: its types are unknown here.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearMethodBase

from breccia import ScaledTensor, ScalingRecipe, UnsupportedError

from ..nn import ScaledLinear, ScaledWeight
from ..storing import AUTO, arrange
from .received import Received, joined, of_rank


class BrecciaLinearMethod(LinearMethodBase):
    """x @ dequantize(weight).mT + bias by `breccia.matmul`. A layer that joins several has their products side by side.

    headers: of the quantized weights, by the ids of the layer's shards. activation: as for `breccia_torch.nn.ScaledLinear`.
    """

    def __init__(self, headers: Mapping[Hashable, Any], activation: ScalingRecipe | None) -> None:
        self._headers, self._activation = headers, activation

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UnsupportedError where only some of the weights that the layer joins are quantized."""
        if len(self._headers) != len(output_partition_sizes):
            raise UnsupportedError(
                f"{layer.prefix} joins {len(output_partition_sizes)} weights, and {len(self._headers)} of them are quantized: "
                f"{', '.join(header.parts[0].rpartition('.')[0] for header in self._headers.values())}. Convert the model "
                "again with a policy that quantizes all of them, or none.",
                name=layer.prefix,
            )
        layer.weight = Received(self._headers)
        layer.columns, layer.rows, layer.weight_dtype = input_size_per_partition, output_partition_sizes, params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Raises what `of_rank` raises."""
        rank = getattr(layer, "tp_rank", get_tensor_model_parallel_rank())
        ranks = getattr(layer, "tp_size", get_tensor_model_parallel_world_size())
        cut: list[ScaledTensor] = []
        for tensor, rows in zip(layer.weight.tensors().values(), layer.rows, strict=True):
            part = of_rank(tensor, 0, rows, rank, ranks, layer.prefix)
            cut.append(of_rank(part, 1, layer.columns, rank, ranks, layer.prefix))
        del layer.weight
        layer.products = nn.ModuleList()
        for tensor in joined(cut):
            rows, columns = tensor.shape
            like = nn.Linear(columns, rows, bias=False, device="meta", dtype=layer.weight_dtype)
            linear = ScaledLinear.in_place_of(like, ScaledWeight(tensor), self._activation).eval()
            arrange(linear, AUTO, layer.weight_dtype)
            layer.products.append(linear)
        # Models of vLLM look for it, to find out which kind of layer this is.
        layer.weight = layer.products[0].weight if len(layer.products) == 1 else layer.products

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        products = [linear(x) for linear in layer.products]
        y = products[0] if len(products) == 1 else torch.cat(products, -1)
        return y if bias is None else y + bias
