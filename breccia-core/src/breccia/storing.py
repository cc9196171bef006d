"""The storage of a weight: rearranged once, where the kernel of its products reads another order than the plain one."""

from __future__ import annotations

from .api import explain
from .arrays.frameworks import device_of
from .arrays.ops import Array
from .dispatch.registry import registry
from .errors import UnsupportedError
from .tensors.tensor import ScaledTensor


def for_products(weight: ScaledTensor, x: Array) -> ScaledTensor:
    """The weight in the storage that the kernel of `matmul(x, weight.mT)` reads; itself if that is plain.

    weight: (N, K), or transposed with its blocks along axis -2. x: activations (M, K), of which only facts are read.
    """
    device = device_of(weight.held_data)
    kernels = [k for k in registry().table.kernels if k.op == "matmul" and k.framework == weight.framework and k.reads]
    for name in dict.fromkeys(name for k in kernels if k.device == device for name in k.reads if name != "*"):
        try:
            stored = weight.to_storage(name)
        except UnsupportedError:
            continue
        winner = explain("matmul", x, stored if weight.axis == -2 else stored.mT).winner
        if winner is not None and name in winner.reads:
            return stored
    return weight
