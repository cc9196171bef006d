"""The storage of a layer's weight: rearranged once, where the kernel of its products reads another order than the plain one."""

from __future__ import annotations

import torch

from breccia.backend import PLAIN, ScaledTensor, storing

from .nn import ScaledLinear

#: `storage=` of `quantize_` and `load_model`: what `for_products` finds.
AUTO = "auto"


def arrange(layer: ScaledLinear, storage: str, dtype: torch.dtype) -> None:
    """Put the weight of `layer` into a storage, in place. dtype: of the layer's inputs.

    "auto" leaves layers in training mode alone, whose backward pass multiplies by the plain weight, and layers that cast their
    inputs. Raises UnknownNameError for an unknown storage, UnsupportedError where it does not support the weight.
    """
    weight = layer.weight
    tensor = weight.tensor
    if storage != AUTO:
        weight.take(tensor.to_storage(storage))
    elif not layer.training and layer.activation is None and tensor.storage == PLAIN:
        weight.take(for_products(tensor, dtype))


def for_products(tensor: ScaledTensor, dtype: torch.dtype) -> ScaledTensor:
    """The weight in the storage that the kernel of its products with inputs of a dtype reads; itself if that is plain."""
    if tensor.ndim != 2 or tensor.device.type == "cpu":
        return tensor
    k = tensor.shape[-1 if tensor.axis == -1 else -2]
    return storing.for_products(tensor, torch.empty((1, k), dtype=dtype, device=tensor.device))
