"""TransformerEngine's tensors: Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor, both ways.

A TransformerEngine tensor has up to two orientations: rowwise (blocks along the last axis) and columnwise (along the first,
for a backward pass). Columnwise codes are the transposed matrix, except in MXFP8. Block scales are padded, and transposed for
1 x 128 blocks; breccia keeps them so, in a storage of the same order, and nothing is copied:

    MXFP8, NVFP4           rows to 128, columns to 4     "padded_128x4", or "swizzle_128x4" if swizzled for a GEMM
    FP8 tiles 128 x 128    columns to 4                  "padded_1x4"
    FP8 blocks 1 x 128     transposed, rows to 4         "column_major"

Classes are recognized by name and read by attributes, so TransformerEngine is needed only to build its tensors without `like=`.
Source: TransformerEngine 2.20.
"""

from __future__ import annotations

from typing import Any

import torch

from breccia import DialectError, OptionError, ScaledTensor, ScalingRecipe, TensorPair, UnsupportedError

from .transformer_engine_library import load
from .transformer_engine_reading import CLASSES, class_name, fp8_format, oriented, recipe_of
from .transformer_engine_writing import buffers, class_for, derived, element_name, metadata, pair_of
from .wrapping import attribute, chosen, title

Tensor = Any

_USAGES = ("rowwise", "columnwise", "both")
_PADDING = ("refuse", "keep", "drop")


def from_transformer_engine(
    te_t: Tensor, recipe: ScalingRecipe | None = None, *, usage: str | None = None, padding: str | None = None
) -> Any:
    """Convert a TransformerEngine tensor, zero-copy: codes and scales are shared, padded and transposed scales as storages.

    te_t: Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor or NVFP4Tensor, or its storage class.
    recipe: by default the one that the tensor's quantizer implies; without a quantizer, FP8 per tensor is `DelayedScaling`.
    usage: "rowwise" or "columnwise" gives a ScaledTensor of that orientation (axis -1 or -2), "both" a TensorPair. By default
        rowwise if the tensor has it. Where the other orientation follows exactly (one scale per tensor, 128 x 128 tiles), it is
        derived from the one present.
    padding: of scales. "refuse" raises where it is not zero, which reads it (a GPU is synchronized); "keep" shares it as it is;
        "drop" copies the scales without it. By default "keep" for Float8BlockwiseQTensor, whose padding TransformerEngine 2.20
        leaves uninitialized (measured) and no product reads, and "refuse" for the others.

    Raises UnsupportedError for another class, DialectError for a missing orientation, contradictory buffers, and variants that
    decode otherwise (row-scaled NVFP4, rotated columnwise data).

        >>> import torch
        >>> st = breccia.cast(torch.tensor([[1.0, 448.0]]), "fp8_current")
        >>> te_t = breccia.bridges.to_transformer_engine(st, dtype=torch.bfloat16)
        >>> tensor = breccia.bridges.from_transformer_engine(te_t)
        >>> tensor.recipe.spec, breccia.dequantize(tensor).tolist()
        ('fp8_current,scale_rule=te', [[1.0, 448.0]])
    """
    if usage not in (None, *_USAGES):
        raise OptionError(f"usage is one of {', '.join(_USAGES)}; got {usage!r}.", usage=usage)
    if padding not in (None, *_PADDING):
        raise OptionError(f"padding is one of {', '.join(_PADDING)}; got {padding!r}.", padding=padding)
    name = class_name(te_t)
    if name is None:
        raise UnsupportedError(
            f"from_transformer_engine converts {', '.join(CLASSES)} and their storage classes; got {title(te_t)}. "
            f"Dequantize it, "
            "or wrap its buffers with breccia.from_buffer.",
            found=type(te_t).__name__,
        )
    if padding is None:
        padding = "keep" if name == "Float8BlockwiseQTensor" else "refuse"
    tensor_recipe = chosen(recipe, recipe_of(te_t, name), te_t)
    if usage is None:
        present = attribute(te_t, "_data" if name == "Float8Tensor" else "_rowwise_data") is not None
        usage = "rowwise" if present else "columnwise"
    if usage == "both":
        return TensorPair(*(oriented(te_t, name, tensor_recipe, columnwise, padding) for columnwise in (False, True)))
    return oriented(te_t, name, tensor_recipe, usage == "columnwise", padding)


def to_transformer_engine(
    scaled: ScaledTensor | TensorPair,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    quantizer: Any = None,
) -> Tensor:
    """Convert a tensor, or a pair of orientations, to TransformerEngine's class of its format, sharing buffers where possible.

    scaled: `DelayedScaling` or `Float8CurrentScaling` becomes a Float8Tensor, `Float8BlockScaling` with blocks 1 x 128 or tiles
        128 x 128 a Float8BlockwiseQTensor, `MXFP8BlockScaling` an MXFP8Tensor, `NVFP4BlockScaling(global_sense="amax")` an
        NVFP4Tensor. A tensor with axis -2 is columnwise data alone.
    like: a TransformerEngine tensor whose class, quantizer and dtype to take over.
    dtype: the dtype that the tensor pretends to have, FP32 by default; that of a layer's other weights.
    columnwise: derive the columnwise data too. Exact for one scale per tensor and for 128 x 128 tiles; the others need a
        TensorPair, from `breccia.cast_pair`.
    quantizer: TransformerEngine's quantizer; by default that of `like`, or a new one of the format.

    Scales are padded with zeros as TransformerEngine needs them.

    Raises ImportError without TransformerEngine (unless `like` is given), DialectError for other formats and shapes.

        >>> import torch
        >>> pair = breccia.cast_pair(torch.ones(128, 256), "mxfp8")
        >>> te_t = breccia.bridges.to_transformer_engine(pair, dtype=torch.bfloat16)
        >>> type(te_t).__name__, te_t.shape, te_t.dtype
        ('MXFP8Tensor', torch.Size([128, 256]), torch.bfloat16)
    """
    if like is None:
        load(CLASSES[0])
    pair = pair_of(scaled)
    first = pair[0] if pair[0] is not None else pair[1]
    assert first is not None
    name = class_for(first)
    if columnwise and pair[1] is None:
        pair = (pair[0], derived(first))
    arguments = buffers(name, first.recipe, pair)
    kind: Any = type(like) if like is not None else load(name)
    if like is not None and class_name(like) != name:
        raise DialectError(f"this tensor is for a {name}; like= is {title(like)}.", found=type(like).__name__)
    if like is not None and name != "NVFP4Tensor" and fp8_format(like) != element_name(first):
        fmt = fp8_format(like)
        raise DialectError(f"this tensor has {element_name(first)} codes; like= has {fmt}.", found=fmt)
    arguments |= metadata(name, first, like, quantizer, pair)
    build: Any = kind
    if not issubclass(kind, torch.Tensor):
        return build(**arguments)
    fake = dtype or (like.dtype if like is not None else torch.float32)
    return build(shape=first.shape, dtype=fake, device=first.data.device, requires_grad=False, **arguments)
