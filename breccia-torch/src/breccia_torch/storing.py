"""The storage of weights: rearranged once, where the kernel of their products reads another order than the plain one."""

from __future__ import annotations

import torch
from torch import nn

from breccia import ScaledTensor
from breccia.backend import PLAIN
from breccia.internal import storing

from .nn import ScaledExperts, ScaledLinear
from .tables import ScaledTable

#: `storage=` of `quantize_` and `load_model`: what `for_products` finds.
AUTO = "auto"
#: What transformers calls the experts' implementation of `hf.experts`: `model.set_experts_implementation("breccia")`.
IMPLEMENTATION = "breccia"


def arrange(layer: ScaledLinear, storage: str, dtype: torch.dtype) -> None:
    """Put the weight of `layer` into a storage, in place. dtype: of the layer's inputs.

    "auto" leaves layers in training mode alone, whose backward pass multiplies by the plain weight, and layers that cast their
    inputs. A weight that an embedding shares stays plain. Raises UnknownNameError for an unknown storage, and UnsupportedError
    where it does not support the weight.
    """
    weight = layer.weight
    if isinstance(weight, ScaledTable):
        return
    tensor = weight.tensor
    if storage != AUTO:
        weight.take(tensor.to_storage(storage))
    elif not layer.training and layer.activation is None and tensor.storage == PLAIN:
        weight.take(for_products(tensor, dtype))


def arrange_experts(module: nn.Module, weight: ScaledExperts, storage: str) -> None:
    """Put the experts of `module` into a storage, in place. Raises what `arrange` raises.

    "auto" leaves those alone that `module` does not multiply by `breccia.grouped_matmul`, as modules in training mode: decoding
    an expert, and the backward pass, read the plain weight.
    """
    tensor = weight.tensor
    if storage != AUTO:
        weight.take(tensor.to_storage(storage))
    elif not module.training and tensor.storage == PLAIN and multiplies_groups(module):
        weight.take(for_products(tensor, weight.dtype))


def multiplies_groups(module: nn.Module) -> bool:
    """Whether transformers runs this module of experts by breccia's implementation."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == IMPLEMENTATION


def for_products(tensor: ScaledTensor, dtype: torch.dtype) -> ScaledTensor:
    """The weight in the storage that the kernel of its products with inputs of a dtype reads; itself if that is plain.

    tensor: a matrix, or those of experts, of shape (experts, rows, columns) or (experts, parts, rows, columns).
    """
    if tensor.device.type == "cpu":
        return tensor
    k = tensor.shape[-1 if tensor.axis == -1 else -2]
    return storing.for_products(tensor, torch.empty((1, k), dtype=dtype, device=tensor.device))
