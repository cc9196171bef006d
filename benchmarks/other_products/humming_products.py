"""Products of humming-kernels: FP8 by FP8, and activations of 16 bits by quantized weights.

humming compiles kernels for each format and shape of a weight, which takes seconds, and wants weights in its own order: they
are rearranged at the first product, and kept (`rearranged`). It has about 30 kernels for a weight, by numbers of rows; a
product compiles the one that it needs, into humming's cache on disk. As in humming's own layers, products by one weight share
counters, so they must not overlap on two streams.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from breccia import ScaledTensor, UnsupportedError
from breccia.backend import FLOAT32, INT4, ProductOptions
from breccia_triton.gemm.fp8.plans import kind_of

from .plans import HUMMING_PAIRS, humming_weight
from .rearranged import rearranged
from .results import blocks, product

#: The components of a weight in humming's order, as its layer and `humming_forward` name them.
_PARTS = ("weight", "weight_scale", "zero_point", "weight_scale_2")
#: Counters with which blocks of humming's kernels agree on sums that they share; each kernel leaves zeros.
_LOCKS = 2048


class Layer(NamedTuple):
    """A weight as humming reads it, with its counters.

    most: the most rows that each kernel is meant for, in order. tuning: what humming compiles each of them from, as JSON.
    """

    config: Any
    most: list[int]
    tuning: list[str]
    locks: Any
    weight: Any
    weight_scale: Any
    zero_point: Any
    weight_scale_2: Any


def fp8_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` of two FP8 tensors, with scales of 1 x 128 by 128 x 128, or of rows. It may add parts of K in BF16."""
    pair = kind_of(a.recipe, a.layout, a.axis)[0], kind_of(b.recipe, b.layout, b.axis)[0]
    weight, activations = HUMMING_PAIRS[pair]
    layer = rearranged("humming.fp8_matmul", b, lambda: layer_of(b.mT, weight, activations, torch.bfloat16))

    def multiply(rows: int, into: Any) -> Any:
        codes, scale = blocks(a, rows) if pair[0] == "1x128" else (a.data.reshape(rows, a.shape[-1]), _each(a.scale, rows))
        return _run(layer, codes, scale, into)

    return product(a, b, options, multiply)


def weight_only(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` of BF16 or FP16 activations and a quantized weight, decoded to their dtype. It may add parts of K in it."""
    out_dtype = options.out_dtype
    config = humming_weight(b.recipe.format, b.layout.plain.block(-2))
    assert not isinstance(config, str), config  # `accepts` has asked
    layer = rearranged(f"humming.weight_only {out_dtype}", b, lambda: layer_of(b.mT, config, {}, a.dtype))

    def multiply(rows: int, into: Any) -> Any:
        return _run(layer, a.reshape(rows, a.shape[-1]).contiguous(), None, into)

    return product(a, b, options, multiply)


def layer_of(weight: ScaledTensor, config: Mapping[str, Any], activations: Mapping[str, Any], dtype: torch.dtype) -> Layer:
    """A weight (N, K) in humming's order. config, activations: humming's configurations. dtype: of results."""
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    n, k = weight.shape
    device = weight.data.device
    with torch.device(device):
        layer = HummingLayer(n, k, dict(config), dict(activations), torch_dtype=dtype).to(device)
    layer.load_from_tensors(tensors_of(weight, dtype))
    layer.transform()
    parts = (getattr(layer, name, None) for name in _PARTS)
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
    _, most, tuning = zip(*get_heuristics_config(layer.humming_config, device=device), strict=True)
    kernels = list(most), [json.dumps(one) for one in tuning]
    return Layer(layer.humming_config, *kernels, locks, *(None if part is None else part.detach() for part in parts))


def tensors_of(weight: ScaledTensor, dtype: torch.dtype) -> dict[str, Any]:
    """The components of a weight (N, K) by the names and in the dtypes of humming's checkpoints.

    Raises UnsupportedError for zero-points that do not fit 4 bits.
    """
    fmt, data = weight.recipe.format, weight.data.contiguous()
    n = weight.shape[0]
    codes = data.view(torch.uint8)
    if fmt.element == INT4:
        codes = codes ^ 0x88  # two's complement to an offset of 8
    scale = weight.scale.contiguous()
    if scale.dtype.itemsize > 1 and weight.layout.plain.block(-1)[0] == 1:  # else of 8 bits, or FP32 of tall blocks
        scale = scale.reshape(n, -1).to(dtype)
    tensors = {"weight": codes.view(torch.int32), "weight_scale": scale}
    if weight.zero_point is not None:
        tensors["zero_point"] = _packed(weight.zero_point.reshape(n, -1))
    if weight.global_scale is not None:
        tensors["weight_scale_2"] = weight.global_scale.reshape(1).float()
    return tensors


def _packed(points: Any) -> Any:
    """Zero-points (N, groups) as (N / 8, groups) words of eight, the first in the lowest bits."""
    if bool(((points < 0) | (points > 15)).any()):
        raise UnsupportedError("matmul: humming's zero-points have 4 bits; this weight has some that are not 0 to 15.")
    turned = points.t().to(torch.uint8)
    return (turned[:, ::2] | turned[:, 1::2] << 4).contiguous().view(torch.int32).t().contiguous()


def _each(scale: Any, rows: int) -> Any:
    """One scale for each row: (rows,) repeats for every matrix."""
    flat = scale.reshape(-1)
    return (flat if flat.numel() == rows else flat.repeat(rows // flat.numel())).reshape(rows, 1).contiguous()


def _run(layer: Layer, x: Any, scale: Any, into: Any) -> Any:
    from humming.forward import humming_forward

    parts = {name: getattr(layer, name) for name in _PARTS}
    tuning = layer.tuning[bisect_left(layer.most, len(x))]
    return humming_forward(
        layer.config, inputs=x, input_scale=scale, outputs=into, locks=layer.locks, tuning_config=tuning, **parts
    )
