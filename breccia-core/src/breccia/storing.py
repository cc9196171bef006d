"""The storage of a weight: rearranged once, where the kernel of its products reads another order than the plain one."""

from __future__ import annotations

from .api import explain
from .arrays.frameworks import device_of
from .arrays.ops import Array
from .dispatch.kernel import Kernel
from .dispatch.registry import registry
from .errors import UnsupportedError
from .tensors.tensor import ScaledTensor


def for_products(weight: ScaledTensor, x: Array) -> ScaledTensor:
    """The weight in the storage that the kernel of its products with `x` reads; itself if that is plain.

    weight: (N, K), for `matmul(x, weight.mT)`; (E, N, K), or parts of experts (E, P, N, K), for `grouped_matmul` of each
    part. Each may be transposed, with its blocks along axis -2. x: activations (M, K), of which only facts are read.

    A kernel that also runs for the plain tensor is no reason to rearrange it.
    """
    op, part = ("matmul", weight) if weight.ndim == 2 else ("grouped_matmul", weight if weight.ndim == 3 else weight[:, 0])
    device = device_of(weight.data_source)
    kernels = [k for k in registry().table.kernels if k.op == op and k.framework == weight.framework and k.reads]

    def winner(stored: ScaledTensor) -> Kernel | None:
        return explain(op, x, stored if weight.axis == -2 else stored.mT).winner

    plain = winner(part)
    for name in dict.fromkeys(name for k in kernels if k.device == device for name in k.reads if name != "*"):
        try:
            stored = part.to_storage(name)
        except UnsupportedError:
            continue
        kernel = winner(stored)
        if kernel is not None and name in kernel.reads and kernel is not plain:
            return stored if part is weight else weight.to_storage(name)
    return weight
