"""torch's own product of BF16 activations and INT4 weights, `torch.ops.aten._weight_int4pack_mm`."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from breccia import ScaledTensor
from breccia.backend import FLOAT32, INT4, ProductOptions

from .rearranged import rearranged
from .results import product

#: The code that torch subtracts.
_MIDDLE = 8


def int4pack_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` of BF16 activations and a weight that torch decodes to BF16 as `(code - 8) * scale + zero`, all BF16 numbers."""
    packed, numbers = rearranged("torch.int4", b, lambda: packed_weight(b.mT))
    width = b.layout.plain.block(-2)[1]

    def multiply(rows: int, into: Any) -> Any:
        return torch.ops.aten._weight_int4pack_mm(a.reshape(rows, a.shape[-1]).contiguous(), packed, width, numbers)

    return product(a, b, options, multiply)


def packed_weight(weight: ScaledTensor) -> tuple[Any, Any]:
    """(Codes as torch packs them, scales and zeros (groups, N, 2)) of a weight (N, K)."""
    fmt = weight.recipe.format
    codes = weight.data.contiguous()
    if fmt.element == INT4:
        codes = codes ^ 0x88  # two's complement to an offset of 8
    # torch has the even element in the high half of a byte.
    swapped = codes << 4 | codes >> 4
    n, k = weight.shape
    tiles = next(tiles for tiles in (8, 4, 2) if k % (16 * tiles) == 0)
    packed = torch.ops.aten._convert_weight_to_int4pack(swapped.reshape(n, k // 2), tiles)
    scale = weight.scale.float()
    zero = torch.zeros_like(scale)
    if fmt.element != INT4:
        zero = scale * _MIDDLE
    if fmt.offset == "zero_point":
        zero = zero - weight.zero_point.float() * scale
    elif fmt.offset == "bias":
        zero = zero + weight.zero_point.float()
    numbers = torch.stack([scale.t(), zero.t()], -1).bfloat16().contiguous()
    return packed, numbers
