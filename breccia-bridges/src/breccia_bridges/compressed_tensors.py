"""Modules that compressed-tensors compressed: the weight of one, by its quantization_scheme and the names of its parameters.

    naive, float, int             weight, weight_scale [, weight_zero_point]
    pack-quantized                weight_packed (int32 words along K), weight_scale, weight_shape [, weight_zero_point
                                  (int32 words along N)]
    nvfp4, mxfp4, mxfp6, mxfp8    weight_packed or weight, weight_scale [, weight_global_scale (a divisor)]

Integers are stored with half of their range added where they are packed. Asymmetric ones are unsigned in breccia.

Source: compressed-tensors 0.20, run on a CPU.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch

from breccia import (
    DelayedScaling,
    DialectError,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    INTScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.backend import INTEGERS, TENSOR, Array, dtype_name, ops_of, pack, unpack
from breccia.internal import FLOAT_CODECS, FLOAT_NAMES, check_scaled, packed_length

from .dialects.integers import cut, offset
from .wrapping import attribute, chosen, float8_recipe, integer_recipe, title, wrapped


def from_compressed_tensors(module: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor:
    """The weight of a compressed module, zero-copy where breccia packs codes in the same way.

    module: a linear layer after `ModelCompressor.compress_model`, or as transformers loads it with run_compressed: it has
        `quantization_scheme`, and parameters of the format.

    Raises DialectError for a module that is not compressed, for formats and settings without a recipe (sparse weights, codes of
    other widths, activation order), and for parameters that contradict each other.

        >>> import torch
        >>> st = breccia.cast(torch.ones(32, 64), "int8,group_size=32")
        >>> layer = breccia.bridges.to_compressed_tensors(st)
        >>> breccia.bytes_equal(breccia.bridges.from_compressed_tensors(layer), st)
        True
    """
    scheme = getattr(module, "quantization_scheme", None)
    args, form = getattr(scheme, "weights", None), getattr(scheme, "format", None)
    if args is None:
        raise DialectError(
            f"{title(module)} has no quantization_scheme with weights; pass a linear layer of a model that compressed-tensors "
            "compressed."
        )
    name = str(getattr(form, "value", form))
    parameters = {n: p.detach() for n, p in module.named_parameters(recurse=False)} | dict(module.named_buffers(recurse=False))
    if "weight_g_idx" in parameters:
        raise DialectError(f"{title(module)} has weight_g_idx (activation order), which this bridge does not read.", found=name)
    read = _READERS.get(name)
    if read is None:
        raise DialectError(f"{title(module)} is in format {name!r}; known are {', '.join(_READERS)}.", found=name)
    missing = [n for n in (*read[1], *(() if args.symmetric else ("weight_zero_point",))) if n not in parameters]
    if missing:
        raise DialectError(
            f"{title(module)} in format {name!r} lacks {', '.join(missing)}; it has "
            f"{', '.join(parameters) or 'no parameters'}. Compress "
            "the model first: ModelCompressor(...).compress_model(model).",
            missing=missing,
        )
    return read[0](module, parameters, recipe)


def _floats(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale = parameters["weight"], parameters["weight_scale"].float()
    fmt = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}.get(data.dtype)
    if data.dtype == torch.int8:
        return _int8(module, parameters, recipe)
    if fmt is None:
        raise DialectError(
            f"{title(module)} has a weight in {data.dtype}: it is not compressed, or of a format without a recipe."
        )
    if parameters["weight_scale"].dtype == torch.uint8:
        return _mxfp8(module, parameters, recipe)
    block = attribute(module.quantization_scheme.weights, "block_structure")
    if block is not None:
        inferred = float8_recipe(fmt, (block[0], block[1]))
    elif scale.numel() == 1:
        inferred = float8_recipe(fmt, TENSOR)
        scale = scale.reshape(())
    elif tuple(scale.shape) == (data.shape[0], 1):
        inferred = float8_recipe(fmt, (1, None))
    else:
        raise DialectError(f"{title(module)} has scales of shape {tuple(scale.shape)} for a weight {tuple(data.shape)}.")
    layout = inferred.layout.fitted(tuple(data.shape))
    return wrapped(module, data, scale, chosen(recipe, inferred, module), layout=layout)


def _int8(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    data, scale = parameters["weight"], parameters["weight_scale"]
    dtype = FLOAT_NAMES.get(dtype_name(scale))
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
    zero = None
    if not module.quantization_scheme.weights.symmetric:
        zero = parameters["weight_zero_point"]
        if zero.dtype != torch.int8 or (zero.numel() != 1 and zero.shape != scale.shape):
            raise DialectError(
                f"{title(module)} has weight_zero_point of shape {tuple(zero.shape)} in {zero.dtype}; it is torch.int8, one "
                f"for each of the scales of shape {tuple(scale.shape)}.",
                found=tuple(zero.shape),
            )
        data, zero = (_offset(part.contiguous(), 8) for part in (data, zero.expand(scale.shape)))
    inferred = integer_recipe(8, group, data.shape[1], signed=zero is None, scale_dtype=dtype, symmetric=zero is None)
    return wrapped(module, data, scale, chosen(recipe, inferred, module), zero_point=zero)


def _packed(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    """int32 words along K, a stream of codes, each with half of the range added."""
    args, scale = module.quantization_scheme.weights, parameters["weight_scale"]
    bits, symmetric = args.num_bits, args.symmetric
    shape = tuple(int(n) for n in parameters["weight_shape"].reshape(-1).tolist())
    dtype = FLOAT_NAMES.get(dtype_name(scale))
    if len(shape) != 2 or min(shape) < 1:
        raise DialectError(f"{title(module)} has weight_shape {shape}; it is the shape of a matrix.", found=shape)
    least = 2 if symmetric else 1
    if bits not in range(least, 9) or dtype is None:
        raise DialectError(
            f"{title(module)} packs {bits} bits with scales in {scale.dtype}; recipes exist for {least} to 8 bits "
            f"{'without' if symmetric else 'with'} zero-points, and scales in {', '.join(FLOAT_CODECS)}."
        )
    data = _rows(parameters["weight_packed"], shape[1], bits)
    scale = scale.expand(shape[0], 1) if scale.numel() == 1 else scale
    zero = None
    if symmetric:
        data = cut(_offset(data, bits), shape[1], bits)
        data = data.view(torch.int8) if bits == 8 else data
    else:
        zero = _zero_points(module, parameters["weight_zero_point"], bits, tuple(scale.shape))
    group = args.group_size or shape[1]
    group = shape[1] if group < 0 else group
    inferred = integer_recipe(bits, group, shape[1], signed=symmetric, scale_dtype=dtype, symmetric=symmetric)
    layout = inferred.layout.fitted(shape)
    return wrapped(module, data, scale, chosen(recipe, inferred, module), layout=layout, shape=shape, zero_point=zero)


def _zero_points(module: Any, words: Array, bits: int, shape: tuple[int, ...]) -> Array:
    """Unsigned zero-points, one per byte, of int32 words along N."""
    if words.dtype != torch.int32 or tuple(words.shape) != (-(-shape[0] * bits // 32), shape[1]):
        raise DialectError(
            f"{title(module)} has weight_zero_point of shape {tuple(words.shape)} in {words.dtype}; {bits} bits for scales of "
            f"shape {shape} are packed into ({-(-shape[0] * bits // 32)}, {shape[1]}) of torch.int32.",
            found=tuple(words.shape),
        )
    columns = _rows(words.T, shape[0], bits)
    return unpack(ops_of(columns), columns, INTEGERS[bits, False], shape[0]).to(torch.uint8).T.contiguous()


def _rows(words: Array, codes: int, bits: int) -> Array:
    """Rows of int32 words as rows of packed codes."""
    return _of_length(words.contiguous().view(torch.uint8), packed_length(INTEGERS[bits, False], codes))


def _of_length(data: Array, size: int) -> Array:
    """Rows of bytes, cut or with zeros at their end."""
    return data[:, :size] if data.shape[1] >= size else torch.nn.functional.pad(data, (0, size - data.shape[1]))


def _offset(data: Array, bits: int) -> Array:
    """Codes of two's complement as offset codes of half the range, and back."""
    return offset(data.view(torch.uint8), bits)


def _nvfp4(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    divisor = parameters["weight_global_scale"]
    if divisor.numel() != 1:
        raise DialectError(
            f"{title(module)} has one weight_global_scale; found {tuple(divisor.shape)}.", found=tuple(divisor.shape)
        )
    inferred = chosen(recipe, NVFP4BlockScaling(global_sense="divisor"), module)
    return wrapped(module, parameters["weight_packed"], parameters["weight_scale"], inferred, global_scale=divisor.reshape(()))


def _mxfp4(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    inferred = chosen(recipe, MXFP4BlockScaling(scale_rule="even"), module)
    return wrapped(module, parameters["weight_packed"], _powers(module, parameters), inferred)


def _mxfp8(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    inferred = chosen(recipe, MXFP8BlockScaling(), module)
    return wrapped(module, parameters["weight"], _powers(module, parameters), inferred)


def _mxfp6(module: Any, parameters: dict[str, Array], recipe: ScalingRecipe | None) -> ScaledTensor:
    inferred = chosen(recipe, MXFP6BlockScaling("E2M3"), module)
    return wrapped(module, parameters["weight_packed"], _powers(module, parameters), inferred)


def _powers(module: Any, parameters: dict[str, Array]) -> Array:
    """E8M0 scales, stored as bytes."""
    scale = parameters["weight_scale"]
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
    "mxfp6-pack-quantized": (_mxfp6, ("weight_packed", "weight_scale")),
    "mxfp8-quantized": (_mxfp8, _PLAIN),
}


def to_compressed_tensors(scaled: ScaledTensor, *, like: Any = None, bias: Array | None = None) -> Any:
    """A linear layer with this weight, as compressed-tensors compresses one.

    scaled: a matrix (out_features, in_features) in torch.
    like: a compressed layer with a weight of this shape and format. The result is a copy of it with the other weight: its
        scheme, bias, hooks and what belongs to activations stay. By default a new `torch.nn.Linear` whose scheme has the
        weight only.
    bias: that of the new layer.

    Raises ImportError without `like` and without compressed-tensors, and DialectError for formats that it does not have.

        >>> import torch
        >>> st = breccia.cast(torch.ones(32, 64), "fp8_row")
        >>> layer = breccia.bridges.to_compressed_tensors(st)
        >>> {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()}
        {'weight': ((32, 64), torch.float8_e4m3fn), 'weight_scale': ((32, 1), torch.float32)}
    """
    check_scaled("to_compressed_tensors", scaled, "torch")
    if like is not None and bias is not None:
        raise DialectError("to_compressed_tensors takes the bias of `like`; pass one of like= and bias=.")
    scaled = scaled.to_plain()
    if like is None:
        form, args = _scheme(scaled)
        return _layer(_written(scaled, form), form, args, scaled.shape, bias)
    known = from_compressed_tensors(like)
    facts = [(st.recipe.format, st.shape, st.layout, st.axis) for st in (scaled, known)]
    if facts[0] != facts[1]:
        raise DialectError(
            f"{title(like)} has a weight {known!r}; this tensor is {scaled!r}. Requantize it to {known.recipe!r}."
        )
    form = like.quantization_scheme.format
    written = _written(scaled, str(getattr(form, "value", form)))
    memo = {id(getattr(like, name)): _parameter(_fitted(like, name, value)) for name, value in written.items()}
    return copy.deepcopy(like, memo)


def _scheme(scaled: ScaledTensor) -> tuple[str, dict[str, Any]]:
    """(the format, the arguments of QuantizationArgs) of a weight. Raises DialectError if there are none."""
    recipe, block = scaled.recipe, scaled.layout.block(-1)
    integer: dict[str, Any] = {"type": "int", "symmetric": scaled.zero_point is None}
    number: dict[str, Any] = {"type": "float", "num_bits": 8}
    powers = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    scheme: tuple[str, dict[str, Any]] | None = None
    match recipe:
        case INT4Scaling() | INT8Scaling() | INTScaling() if (
            recipe.offset == "zero_point" and recipe.signed == recipe.symmetric
        ):
            group = {"strategy": "channel"} if block[1] is None else {"strategy": "group", "group_size": block[1]}
            scheme = "pack-quantized", integer | group | {"num_bits": recipe.format.element.bits}
        case Float8CurrentScaling("E4M3") | DelayedScaling("E4M3"):
            scheme = "float-quantized", number | {"strategy": "tensor"}
        case Float8RowScaling("E4M3"):
            scheme = "float-quantized", number | {"strategy": "channel"}
        case Float8BlockScaling("E4M3"):
            scheme = "float-quantized", number | {"strategy": "block", "block_structure": list(block)}
        case NVFP4BlockScaling(block_size=16, scale_format="E4M3", global_sense="divisor"):
            args = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
            scheme = "nvfp4-pack-quantized", number | args | {"num_bits": 4}
        case MXFP4BlockScaling():
            scheme = "mxfp4-pack-quantized", number | powers | {"num_bits": 4}
        case MXFP6BlockScaling("E2M3"):
            scheme = "mxfp6-pack-quantized", number | powers | {"num_bits": 6}
        case MXFP8BlockScaling("E4M3"):
            scheme = "mxfp8-quantized", number | powers
        case _:
            pass
    full_groups = block[1] is None or scaled.shape[-1] % block[1] == 0
    if scheme is None or len(scaled.shape) != 2 or scaled.axis != -1 or not (full_groups or scheme[1]["strategy"] == "block"):
        raise DialectError(
            "compressed-tensors has matrices of integers without a bias, FP8 (E4M3), MXFP8, MXFP6 (E2M3), MXFP4 and NVFP4 "
            f'(global_sense="divisor"), in whole groups along K; this tensor is {scaled!r}. Requantize it to one of these.',
            recipe=recipe,
        )
    return scheme


def _written(scaled: ScaledTensor, form: str) -> dict[str, Array]:
    """Parameters by name."""
    data, scale, zero = scaled.data, scaled.scale, scaled.zero_point
    if zero is not None:
        zero = _bytes_of(scaled, zero)
    if form == "pack-quantized":
        bits = scaled.recipe.format.element.bits
        words = data.view(torch.uint8) if zero is not None else _offset(data.view(torch.uint8), bits)
        parameters = {"weight_packed": _words(words, scaled.shape[1], bits), "weight_scale": scale}
        if zero is not None:
            columns = pack(ops_of(zero), zero.T.to(torch.int32), INTEGERS[bits, False])
            parameters["weight_zero_point"] = _words(columns, scaled.shape[0], bits).T.contiguous()
        return parameters | {"weight_shape": torch.tensor(scaled.shape, device=data.device)}
    if form == "nvfp4-pack-quantized":
        return {"weight_packed": data, "weight_scale": scale, "weight_global_scale": scaled.global_scale.reshape(1)}
    if form.startswith("mxfp"):
        return {"weight" if form == "mxfp8-quantized" else "weight_packed": data, "weight_scale": scale.view(torch.uint8)}
    if zero is not None:
        signed = [_offset(part, 8).view(torch.int8) for part in (data, zero)]
        return {"weight": signed[0], "weight_scale": scale, "weight_zero_point": signed[1]}
    return {"weight": data, "weight_scale": scale.reshape(1) if scale.ndim == 0 else scale}


def _bytes_of(scaled: ScaledTensor, zero: Array) -> Array:
    """Zero-points as bytes, in whose range they are."""
    zero_bytes = zero.to(torch.uint8)
    if not _equal(zero_bytes, zero):
        raise DialectError(f"compressed-tensors has zero-points in the range of the codes; this tensor is {scaled!r}.")
    return zero_bytes


def _words(data: Array, codes: int, bits: int) -> Array:
    """Rows of packed codes as int32 words; what follows the last code is 0."""
    if codes * bits < 8 * data.shape[1]:
        data = cut(data.clone(), codes, bits)
    filled = _of_length(data, -(-codes * bits // 32) * 4)
    return filled.reshape(-1).view(torch.int32).reshape(len(data), -1)


def _fitted(like: Any, name: str, value: Array) -> Array:
    """`value` in the dtype and shape of a parameter of `like`. Raises DialectError if a number is lost."""
    old = getattr(like, name)
    fitted = (value.reshape(-1)[0].reshape(1) if old.numel() == 1 else value).to(old.dtype)
    if fitted.numel() != old.numel() or not _equal(fitted, value):
        raise DialectError(
            f"{title(like)} has {name} of shape {tuple(old.shape)} in {old.dtype}, which does not hold this tensor's, of shape "
            f"{tuple(value.shape)} in {value.dtype}. Omit like=, or pass a layer with the same parameters.",
            found=tuple(old.shape),
        )
    return fitted.reshape(old.shape)


def _equal(narrow: Array, value: Array) -> bool:
    """Whether `narrow`, a copy of `value` in another dtype or of its first number, has all its numbers."""
    if narrow.dtype == value.dtype and narrow.shape == value.shape:
        return True
    wide = narrow.to(value.dtype).expand(value.shape)
    return bool(((wide == value) | (wide.isnan() & value.isnan())).all())


def _layer(values: dict[str, Array], form: str, args: dict[str, Any], shape: tuple[int, ...], bias: Array | None) -> Any:
    library = import_module("compressed_tensors.quantization")
    layer = torch.nn.Linear(shape[1], shape[0], bias=bias is not None, device="meta")
    del layer.weight
    for name, value in (values | ({} if bias is None else {"bias": bias})).items():
        layer.register_parameter(name, _parameter(value))
    weights = library.QuantizationArgs(**args)
    vars(layer)["quantization_scheme"] = library.QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    vars(layer)["quantization_status"] = library.QuantizationStatus.COMPRESSED
    return layer


def _parameter(value: Array) -> Any:
    return torch.nn.Parameter(value, requires_grad=False)
