"""Modules that compressed-tensors compressed: the weight of one, by its quantization_scheme and the names of its parameters.

    naive, float, int      weight, weight_scale [, weight_zero_point]
    pack-quantized         weight_packed (int32 words along K), weight_scale, weight_shape
    nvfp4, mxfp4, mxfp8    weight_packed or weight, weight_scale, weight_global_scale (a divisor)

Source: compressed-tensors 0.20, run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from breccia.backend import (
    Array,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)

from .wrapping import attribute, chosen, title, wrapped

_SCALE_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def from_compressed_tensors(module: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor:
    """The weight of a compressed module, zero-copy where breccia packs codes in the same way.

    module: a linear layer after `ModelCompressor.compress_model`, or as transformers loads it with run_compressed: it has
        `quantization_scheme`, and parameters of the format.

    Raises DialectError for a module that is not compressed, for formats and settings without a recipe (asymmetric or sparse
    weights, activation order), and for parameters that contradict each other.
    """
    scheme = getattr(module, "quantization_scheme", None)
    args, form = getattr(scheme, "weights", None), getattr(scheme, "format", None)
    if args is None:
        raise DialectError(
            f"{title(module)} has no quantization_scheme with weights; pass a linear layer of a model that compressed-tensors "
            "compressed."
        )
    name = str(getattr(form, "value", form))
    found = {n: p.detach() for n, p in module.named_parameters(recurse=False)} | dict(module.named_buffers(recurse=False))
    zero = found.get("weight_zero_point")
    if not args.symmetric and zero is not None and bool((zero != 0).any()):
        raise DialectError(f"{title(module)} has asymmetric weights ({name}), which this bridge does not read.", found=name)
    if "weight_g_idx" in found:
        raise DialectError(f"{title(module)} has weight_g_idx (activation order), which this bridge does not read.", found=name)
    read = _READERS.get(name)
    if read is None:
        raise DialectError(f"{title(module)} is in format {name!r}; known are {', '.join(_READERS)}.", found=name)
    missing = [n for n in read[1] if n not in found]
    if missing:
        raise DialectError(
            f"{title(module)} in format {name!r} lacks {', '.join(missing)}; it has "
            f"{', '.join(found) or 'no parameters'}. Compress "
            "the model first: ModelCompressor(...).compress_model(model).",
            missing=missing,
        )
    return read[0](module, found, recipe)


def _floats(module: Any, found: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale = found["weight"], found["weight_scale"].float()
    fmt = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}.get(data.dtype)
    if data.dtype == torch.int8:
        return _int8(module, found, recipe)
    if fmt is None:
        raise DialectError(
            f"{title(module)} has a weight in {data.dtype}: it is not compressed, or of a format without a recipe."
        )
    if found["weight_scale"].dtype == torch.uint8:
        return _mxfp8(module, found, recipe)
    block = attribute(module.quantization_scheme.weights, "block_structure")
    if scale.numel() == 1 and block is None:
        inferred: ScalingRecipe = Float8CurrentScaling(fmt)
        scale = scale.reshape(())
    elif tuple(scale.shape) == (data.shape[0], 1):
        inferred = Float8RowScaling(fmt)
    elif block is not None:
        inferred = Float8BlockScaling(fmt, block_m=block[0], block_k=block[1])
    else:
        raise DialectError(f"{title(module)} has scales of shape {tuple(scale.shape)} for a weight {tuple(data.shape)}.")
    layout = inferred.layout.fitted(tuple(data.shape))
    return wrapped(module, data, scale, chosen(recipe, inferred, module), layout=layout)


def _int8(module: Any, found: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale = found["weight"], found["weight_scale"]
    dtype = _SCALE_DTYPES.get(scale.dtype)
    if data.dtype != torch.int8 or dtype is None:
        raise DialectError(f"{title(module)} has a weight in {data.dtype} with scales in {scale.dtype}; codes are int8.")
    scale = scale.expand(data.shape[0], 1) if scale.numel() == 1 else scale
    if data.ndim != 2 or scale.ndim != 2 or not scale.shape[1] or data.shape[1] % scale.shape[1]:
        raise DialectError(
            f"{title(module)} has a weight of shape {tuple(data.shape)} and scales of shape {tuple(scale.shape)}, which do not "
            "cut it into groups.",
            found=tuple(scale.shape),
        )
    group = data.shape[1] // scale.shape[1]
    inferred = INT8Scaling(group_size=None if group == data.shape[1] else group, scale_dtype=dtype)
    return wrapped(module, data, scale, chosen(recipe, inferred, module))


def _packed(module: Any, found: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    """int32 words along K with 4- or 8-bit codes, each with half of the range added."""
    bits, scale = module.quantization_scheme.weights.num_bits, found["weight_scale"]
    shape = tuple(int(n) for n in found["weight_shape"].reshape(-1).tolist())
    dtype = _SCALE_DTYPES.get(scale.dtype)
    if len(shape) != 2 or min(shape) < 1:
        raise DialectError(f"{title(module)} has weight_shape {shape}; it is the shape of a matrix.", found=shape)
    if bits not in (4, 8) or dtype is None:
        raise DialectError(f"{title(module)} packs {bits} bits with scales in {scale.dtype}; recipes exist for 4 and 8 bits.")
    data = found["weight_packed"].contiguous().view(torch.uint8)
    data = (data ^ (0x88 if bits == 4 else 0x80))[:, : -(-shape[1] * bits // 8)]  # offset codes to two's complement
    data = data if bits == 4 else data.view(torch.int8)
    scale = scale.expand(shape[0], 1) if scale.numel() == 1 else scale
    group = module.quantization_scheme.weights.group_size or shape[1]
    group = shape[1] if group < 0 else group
    if bits == 4:
        inferred: ScalingRecipe = INT4Scaling(group_size=group, scale_dtype=dtype)
    else:
        inferred = INT8Scaling(group_size=None if group == shape[1] else group, scale_dtype=dtype)
    layout = inferred.layout.fitted(shape)
    return wrapped(module, data, scale, chosen(recipe, inferred, module), layout=layout, shape=shape)


def _nvfp4(module: Any, found: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    whole = found["weight_global_scale"]
    if whole.numel() != 1:
        raise DialectError(
            f"{title(module)} has one weight_global_scale; found {tuple(whole.shape)}.", found=tuple(whole.shape)
        )
    inferred = chosen(recipe, NVFP4BlockScaling(global_sense="divisor"), module)
    return wrapped(module, found["weight_packed"], found["weight_scale"], inferred, global_scale=whole.reshape(()))


def _mxfp4(module: Any, found: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    inferred = chosen(recipe, MXFP4BlockScaling(scale_rule="even"), module)
    return wrapped(module, found["weight_packed"], _powers(module, found), inferred)


def _mxfp8(module: Any, found: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    inferred = chosen(recipe, MXFP8BlockScaling(), module)
    return wrapped(module, found["weight"], _powers(module, found), inferred)


def _powers(module: Any, found: dict[str, Array]) -> Array:
    """E8M0 scales, stored as bytes."""
    scale = found["weight_scale"]
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise DialectError(
            f"{title(module)} has scales in {scale.dtype}; those of MX formats are E8M0 as torch.uint8.", found=scale.dtype
        )
    return scale.view(torch.float8_e8m0fnu)


_PLAIN = ("weight", "weight_scale")
_READERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "float-quantized": (_floats, _PLAIN),
    "naive-quantized": (_floats, _PLAIN),
    "int-quantized": (_int8, _PLAIN),
    "pack-quantized": (_packed, ("weight_packed", "weight_scale", "weight_shape")),
    "nvfp4-pack-quantized": (_nvfp4, ("weight_packed", "weight_scale", "weight_global_scale")),
    "mxfp4-pack-quantized": (_mxfp4, ("weight_packed", "weight_scale")),
    "mxfp8-quantized": (_mxfp8, _PLAIN),
}
