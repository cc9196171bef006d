"""torchao's tensors: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, MXTensor, NVFP4Tensor, both ways.

Their codes and scales are breccia's, in other packings at most: 6-bit and integer codes one to a byte, swizzled scales,
zero-points of signed codes. A bridge relabels or repacks them; it computes no value. Attributes that a ScaledTensor lacks (the
dtype that torchao decodes to, kernel preferences, how inputs are quantized) come from `like=` or keywords on the way back.

Source: torchao 0.18.0, run on a CPU. AffineQuantizedTensor, of torchao before 0.16, is read by its attributes.
"""

from __future__ import annotations

from typing import Any

import torch

from breccia import DialectError, ScaledTensor, ScalingRecipe, UnsupportedError
from breccia.backend import targets
from breccia.internal import check_scaled

from .torchao_activations import activation_options
from .torchao_parts import CLASSES
from .torchao_reading import READERS
from .torchao_writing import WRITERS, class_for
from .wrapping import title

Tensor = Any


def from_torchao(tensor: Tensor, recipe: ScalingRecipe | None = None) -> ScaledTensor:
    """Convert a torchao tensor, bit by bit; codes and scales are shared where torchao packs them as breccia does.

    tensor: Float8Tensor (scales per tensor, row or block), Int8Tensor, IntxUnpackedToInt8Tensor, MXTensor (FP8, FP6, FP4),
        NVFP4Tensor, Int4Tensor, or the AffineQuantizedTensor of older releases. Swizzled scales stay so, in storage
        "swizzle_128x4". A transposed tensor (`.t()`) has its blocks along axis -2.
    recipe: the recipe that wrote the tensor, which its bytes do not tell: `MXFP8BlockScaling(scale_rule="floor")`, say. By
        default one of the same format. Of NVFP4 that is `order="scales_first"`; `NVFP4BlockScaling()` has faster kernels, and
        values that differ from torchao's in the last bit.

    How the tensor's linear layer quantizes its inputs is not part of the result; see `torchao_activation`.

    Raises UnsupportedError for another class, DialectError for a format without a recipe and for contradictory attributes.

        >>> import torch
        >>> from torchao.quantization import Int8WeightOnlyConfig, quantize_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> quantize_(model, Int8WeightOnlyConfig())
        >>> breccia.bridges.from_torchao(model[0].weight)
        breccia.ScaledTensor('int8', shape=(32, 64), torch cpu, 8.5 bits per value)
    """
    name = next((kind.__name__ for kind in type(tensor).__mro__ if kind.__name__ in READERS), None)
    if name is None:
        raise UnsupportedError(
            f"from_torchao converts {', '.join(READERS)}; got {title(tensor)}. Quantize with a config that gives one "
            f"of these, "
            "or pass a tensor of high precision to breccia.cast.",
            found=type(tensor).__name__,
        )
    return READERS[name](tensor, recipe)


def to_torchao(
    scaled: ScaledTensor,
    *,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
    activation: ScalingRecipe | None = None,
    **attributes: Any,
) -> Tensor:
    """Convert a tensor to the torchao class of its format, bit by bit.

    FP8 becomes a Float8Tensor, MX an MXTensor, NVFP4 an NVFP4Tensor, `int4_bias` an Int4Tensor, symmetric INT8 by rows
    an Int8Tensor. Other INT8 and INT4 becomes an IntxUnpackedToInt8Tensor, one code to a byte, because torchao's linear layer
    ignores an Int8Tensor's zero-points. Values are equal too, but for NVFP4 with a tensor scale in the order "codes_first":
    torchao multiplies the scales first, so that its values can differ in the last bit.

    like: a torchao tensor whose class and attributes to take over: `to_torchao(from_torchao(t), like=t)` equals `t`.
    dtype: the dtype that torchao decodes to, and that a linear layer's inputs have; by default that of `like`, else FP32.
    activation: the recipe under which torchao's linear layer quantizes its inputs; None leaves them alone. torchao multiplies
        by an MXTensor only with inputs in MX.
    attributes: further arguments of the class, such as `act_quant_kwargs=`.

    Raises ImportError without torchao, DialectError for a format or layout that torchao has no class for.

        >>> import torch
        >>> st = breccia.cast(torch.ones(4, 64), "fp8_row")
        >>> tensor = breccia.bridges.to_torchao(st, dtype=torch.bfloat16)
        >>> type(tensor).__name__, tensor.dtype, tensor.qdata.dtype
        ('Float8Tensor', torch.bfloat16, torch.float8_e4m3fn)
    """
    if like is None:
        _class("Float8Tensor")
    check_scaled("to_torchao", scaled, "torch")
    name = class_for(scaled) if like is None else type(like).__name__
    if name not in WRITERS:
        raise UnsupportedError(f"to_torchao builds {', '.join(WRITERS)}; like= is {title(like)}.", found=name)
    kind: Any = _class(name) if like is None else type(like)
    options: dict[str, Any] = {} if like is None else {n: getattr(like, n) for n in _attribute_names(kind)}
    if dtype is not None or like is None:
        options["orig_dtype" if name in ("MXTensor", "NVFP4Tensor") else "dtype"] = dtype or torch.float32
    if activation is not None:
        options |= activation_options(activation)
    options |= attributes
    fields = WRITERS[name](scaled, options, kind)
    try:
        return kind(**(options | fields))
    except TypeError as e:
        raise DialectError(
            f"torchao's {name} does not take these attributes: {e}. This bridge is written for torchao 0.18.", found=name
        ) from e


def _class(name: str) -> type:
    try:
        return targets.load(f"{CLASSES[name]}:{name}")
    except ImportError as e:
        raise ImportError(
            f"to_torchao needs torchao, which cannot be imported ({e}): pip install torchao.", name="torchao"
        ) from e


def _attribute_names(kind: Any) -> list[str]:
    """The arguments of a torchao class that are not the codes and scales; `zero_point` says whether there is one."""
    names = [*kind.tensor_attribute_names, *getattr(kind, "optional_tensor_attribute_names", ())]
    names += getattr(kind, "optional_tensor_data_names", ())
    return [name for name in names if name not in ("per_tensor_scale", "is_swizzled_scales", "elem_dtype")]
