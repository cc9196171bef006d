"""bitsandbytes' Params4bit in NF4: two codes to a byte, the even index in the high nibble, and an FP32 absmax per block.

Blocks run over the flattened weight, so rows must be whole blocks. A nested absmax (double quantization) is decoded with the
formula of bitsandbytes, code * absmax2 + offset, because no recipe has scales of scales: the way back is not nested.
FP4 of bitsandbytes has two codes for zero in a table of its own, which no codec of breccia describes.
Source: bitsandbytes 0.50, run on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from breccia.backend import NF4, Array, DialectError, NF4Scaling, ScaledTensor, ScalingRecipe, UnsupportedError

from .wrapping import attribute, buffer, buffer_or_none, chosen, lengths, title, wrapped


def from_bitsandbytes(weight: Any, recipe: ScalingRecipe | None = None, *, quant_state: Any = None) -> ScaledTensor:
    """Convert a `Params4bit`, or packed data with its `QuantState`. The nibbles of each byte are swapped, in a copy.

    weight: a quantized `bitsandbytes.nn.Params4bit`, or its uint8 data.
    quant_state: by default that of `weight`.

    Raises DialectError for a weight that is not quantized yet, for FP4, other tables, and rows that are not whole blocks.
    """
    state = quant_state if quant_state is not None else getattr(weight, "quant_state", None)
    if state is None:
        raise DialectError(
            f"{title(weight)} has no quant_state: it is not quantized before it moves to its device. Call "
            f"weight.to(device) first."
        )
    kind = attribute(state, "quant_type")
    if kind != "nf4":
        raise DialectError(
            f"{title(weight)} is of type {kind!r}, whose table has two codes for zero; a recipe exists for 'nf4'. "
            f"Quantize with "
            'bnb_4bit_quant_type="nf4", or decode it with bitsandbytes.',
            found=kind,
        )
    shape = tuple(lengths(state, "shape"))
    block, table = attribute(state, "blocksize"), buffer_or_none(state, "code")
    if type(block) is not int or block < 1:
        raise DialectError(f"{title(weight)} has blocksize={block!r}; it is a number of codes.", found=block)
    expected = torch.tensor(NF4.values, dtype=torch.float32)
    if table is not None and not torch.equal(table.float().cpu(), expected):
        raise DialectError(f"{title(weight)} has another table than NF4: {table.tolist()}.")
    length = shape[-1] if len(shape) > 1 else 0
    if not length or length % block:
        raise DialectError(
            f"{title(weight)} of shape {shape} has blocks of {block} over its flattened values; they reach across "
            f"rows, which no "
            f"layout describes. Use a blocksize that divides {length}.",
            shape=shape,
            blocksize=block,
        )
    data = weight.data.reshape(-1)
    if data.dtype != torch.uint8:
        data = data.view(torch.uint8)
    if data.numel() * 2 != torch.Size(shape).numel():
        raise DialectError(f"{title(weight)} has {data.numel()} bytes of codes; shape {shape} needs half as many as numbers.")
    absmax = _absmax(weight, state)
    if absmax.numel() * block != torch.Size(shape).numel():
        raise DialectError(
            f"{title(weight)} of shape {shape} has {absmax.numel()} numbers in absmax; blocks of {block} need "
            f"{torch.Size(shape).numel() // block}.",
            found=absmax.numel(),
        )
    scale = absmax.reshape(*shape[:-1], length // block)
    codes = _swapped(data).reshape(*shape[:-1], length // 2)
    return wrapped(weight, codes, scale, chosen(recipe, NF4Scaling(block_size=block), weight))


def to_bitsandbytes(scaled: ScaledTensor, *, like: Any = None, dtype: torch.dtype | None = None, **attributes: Any) -> Any:
    """Convert a tensor of `NF4Scaling` to a quantized `Params4bit`, with an absmax that is not nested.

    like: a Params4bit whose dtype and storage dtype to take over. dtype: what bitsandbytes decodes to, FP32 by default.
    attributes: further arguments of Params4bit.

    Raises ImportError without bitsandbytes, DialectError for another format.
    """
    if not isinstance(scaled, ScaledTensor) or scaled.framework != "torch":
        found = scaled.framework if isinstance(scaled, ScaledTensor) else type(scaled).__name__
        raise UnsupportedError(f"to_bitsandbytes takes a torch ScaledTensor, got {found}.", found=found)
    scaled = scaled.to_plain()
    recipe, block = scaled.recipe, scaled.layout.block(-1)[1]
    if not isinstance(recipe, NF4Scaling) or scaled.axis != -1 or block is None or scaled.shape[-1] % block:
        raise DialectError(
            f"bitsandbytes holds NF4 in whole blocks along the last axis; this tensor is {scaled!r}. Requantize it to "
            "breccia.NF4Scaling() first.",
            recipe=recipe,
        )
    if recipe.scale_dtype != "fp32" or block & (block - 1) or block < 32:
        raise DialectError(f"bitsandbytes has FP32 scales of blocks of a power of two, from 32; this recipe is {recipe!r}.")
    state_of = import_module("bitsandbytes.functional").QuantState
    kind = type(like) if like is not None else import_module("bitsandbytes.nn").Params4bit
    state = like.quant_state if like is not None else None
    table = torch.tensor(NF4.values, dtype=torch.float32, device=scaled.data.device)
    dtype = dtype or (state.dtype if state is not None else torch.float32)
    shape = torch.Size(scaled.shape)
    new = state_of(scaled.scale.reshape(-1), shape, table, block, "nf4", dtype)
    data = _swapped(scaled.data.reshape(-1, 1))
    options = {"quant_type": "nf4", "blocksize": block, "compress_statistics": False, "bnb_quantized": True} | attributes
    return kind(data, requires_grad=False, quant_state=new, **options)


def _absmax(weight: Any, state: Any) -> Array:
    """The FP32 absmax of each block; a nested one decoded, in bitsandbytes' order of operations."""
    absmax = buffer(state, "absmax")
    if not getattr(state, "nested", False):
        return absmax.float()
    inner, offset = attribute(state, "state2"), buffer(state, "offset")
    coarse, table, block = buffer(inner, "absmax"), buffer(inner, "code"), attribute(inner, "blocksize")
    if absmax.dtype != torch.uint8 or table.numel() != 256 or coarse.numel() != -(-absmax.numel() // block):
        raise DialectError(
            f"{title(weight)} has a nested absmax of {absmax.numel()} codes in {absmax.dtype}, with {coarse.numel()} numbers "
            f"for blocks of {block} and a table of {table.numel()}; it needs torch.uint8, {-(-absmax.numel() // block)}, 256.",
            found=coarse.numel(),
        )
    scale = coarse.repeat_interleave(block)[: absmax.numel()]
    return table[absmax.long()] * scale.to(table.dtype) + offset


def _swapped(data: Array) -> Array:
    """The two nibbles of each byte exchanged."""
    return (data >> 4) | (data << 4)
