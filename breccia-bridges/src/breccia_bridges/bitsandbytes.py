"""bitsandbytes' Params4bit in NF4 and FP4: two codes to a byte, the even index in the high nibble; an FP32 absmax per block.

Blocks run over the flattened weight, so rows must be whole blocks. Every code keeps its number, also FP4's second code for
zero. A nested absmax (double quantization) is decoded with the formula of bitsandbytes, code * absmax2 + offset, because no
recipe has scales of scales; the way back is nested only with `like=` the nested weight, whose buffers it takes.
Source: bitsandbytes 0.50, run on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from breccia import DialectError, ScaledTensor, ScalingRecipe
from breccia.backend import F32, Array
from breccia.internal import check_scaled

from .dialects.bitsandbytes import RECIPES, decoded_absmax, kind_of, swapped, table_of
from .wrapping import attribute, buffer, buffer_or_none, chosen, lengths, title, wrapped


def from_bitsandbytes(weight: Any, recipe: ScalingRecipe | None = None, *, quant_state: Any = None) -> ScaledTensor:
    """Convert a `Params4bit`, or packed data with its `QuantState`. The nibbles of each byte are swapped, in a copy.

    weight: a quantized `bitsandbytes.nn.Params4bit`, or its uint8 data.
    quant_state: by default that of `weight`.

    The recipe is `NF4Scaling` or `bnb_fp4`. Raises DialectError for a weight that is not quantized yet or that a layer has
    packed for a CPU, for other types and tables, and for rows that are not whole blocks.

        >>> import torch
        >>> from bitsandbytes.nn import Params4bit
        >>> weight = Params4bit(torch.ones(64, 128), requires_grad=False, quant_type="nf4")
        >>> breccia.bridges.from_bitsandbytes(weight.to("cpu"))
        breccia.ScaledTensor('nf4', shape=(64, 128), torch cpu, 4.5 bits per value)
    """
    state = quant_state if quant_state is not None else getattr(weight, "quant_state", None)
    if state is None:
        raise DialectError(
            f"{title(weight)} has no quant_state: it is not quantized before it moves to its device. Call "
            f"weight.to(device) first."
        )
    kind = attribute(state, "quant_type")
    if not isinstance(kind, str) or kind not in RECIPES:
        raise DialectError(f"{title(weight)} has quant_type={kind!r}; recipes exist for 'nf4' and 'fp4'.", found=kind)
    if getattr(state, "packing_format_for_cpu", False):
        raise DialectError(
            f"{title(weight)} has packing_format_for_cpu=True: a product of its layer in eval mode has put the codes in "
            "another order and rounded absmax to BF16. Convert the weight before that product, or load it again."
        )
    shape = tuple(lengths(state, "shape"))
    block, table = attribute(state, "blocksize"), buffer_or_none(state, "code")
    if type(block) is not int or block < 1:
        raise DialectError(f"{title(weight)} has blocksize={block!r}; it is a number of codes.", found=block)
    inferred = RECIPES[kind](block_size=block)
    if table is not None and not torch.equal(table.float().cpu(), _table(inferred)):
        raise DialectError(f"{title(weight)} is of type {kind!r} and has the table of another type: {table.tolist()}.")
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
    if absmax.shape != (torch.Size(shape).numel() // block,):
        raise DialectError(
            f"{title(weight)} of shape {shape} has absmax of shape {tuple(absmax.shape)}; blocks of {block} need "
            f"({torch.Size(shape).numel() // block},).",
            found=tuple(absmax.shape),
        )
    scale = absmax.reshape(*shape[:-1], length // block)
    codes = swapped(data).reshape(*shape[:-1], length // 2)
    return wrapped(weight, codes, scale, chosen(recipe, inferred, weight))


def to_bitsandbytes(scaled: ScaledTensor, *, like: Any = None, dtype: torch.dtype | None = None, **attributes: Any) -> Any:
    """Convert a tensor of `NF4Scaling` or `bnb_fp4` to a quantized `Params4bit`.

    like: a Params4bit whose dtype and storage dtype to take over, and its nested absmax if that decodes to these scales.
    dtype: what bitsandbytes decodes to, FP32 by default. attributes: further arguments of Params4bit.

    Raises ImportError without bitsandbytes, DialectError for another format.

        >>> import torch
        >>> weight = breccia.bridges.to_bitsandbytes(breccia.cast(torch.ones(64, 128), "nf4"))
        >>> type(weight).__name__, weight.quant_state.quant_type, weight.quant_state.blocksize
        ('Params4bit', 'nf4', 64)
    """
    check_scaled("to_bitsandbytes", scaled, "torch")
    scaled = scaled.to_plain()
    recipe, block = scaled.recipe, scaled.layout.block(-1)[1]
    quant_type = kind_of(recipe.format)
    if quant_type is None or scaled.axis != -1 or block is None or scaled.shape[-1] % block:
        raise DialectError(
            f"bitsandbytes holds NF4 and its own FP4 in whole blocks along the last axis; this tensor is {scaled!r}. "
            'Requantize it to breccia.NF4Scaling() or breccia.recipe("bnb_fp4") first.',
            recipe=recipe,
        )
    if recipe.format.scale.codec != F32 or block & (block - 1) or block < 32:
        raise DialectError(f"bitsandbytes has FP32 scales of blocks of a power of two, from 32; this recipe is {recipe!r}.")
    kind = type(like) if like is not None else import_module("bitsandbytes.nn").Params4bit
    state = like.quant_state if like is not None else None
    state_of = type(state) if state is not None else import_module("bitsandbytes.functional").QuantState
    dtype = dtype or (state.dtype if state is not None else torch.float32)
    table, scale = _table(recipe).to(scaled.data.device), scaled.scale.reshape(-1)
    absmax, levels = scale, dict[str, Any]()
    if state is not None and getattr(state, "nested", False) and _same(_absmax(like, state), scale):
        absmax, levels = state.absmax, {"offset": state.offset, "state2": state.state2}
    new = state_of(absmax, torch.Size(scaled.shape), table, block, quant_type, dtype, **levels)
    storage = getattr(like, "quant_storage", torch.uint8)
    data = swapped(scaled.data.reshape(-1)).view(storage).reshape(-1, 1)
    options = {"quant_type": quant_type, "blocksize": block, "compress_statistics": bool(levels), "quant_storage": storage}
    return kind(data, requires_grad=False, quant_state=new, **(options | {"bnb_quantized": True} | attributes))


def _table(recipe: ScalingRecipe) -> Array:
    """The FP32 numbers of all codes."""
    return torch.tensor(table_of(recipe), dtype=torch.float32)


def _absmax(weight: Any, state: Any) -> Array:
    """The FP32 absmax of each block; a nested one decoded, in bitsandbytes' order of operations."""
    absmax = buffer(state, "absmax")
    if not getattr(state, "nested", False):
        return absmax.float()
    inner, offset = attribute(state, "state2"), buffer(state, "offset")
    coarse, table, block = buffer(inner, "absmax"), buffer(inner, "code"), attribute(inner, "blocksize")
    shapes = (absmax.numel(),), (-(-absmax.numel() // block),), (256,)
    if absmax.dtype != torch.uint8 or (absmax.shape, coarse.shape, table.shape) != shapes:
        raise DialectError(
            f"{title(weight)} has a nested absmax of {absmax.numel()} codes in {absmax.dtype}, with {coarse.numel()} numbers "
            f"for blocks of {block} and a table of {table.numel()}; it needs torch.uint8, {-(-absmax.numel() // block)}, 256.",
            found=coarse.numel(),
        )
    return decoded_absmax(absmax, table, coarse.to(table.dtype), block, offset)


def _same(a: Array, b: Array) -> bool:
    return a.device == b.device and torch.equal(a, b)
