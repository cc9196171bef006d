"""MLX: codes in 32-bit words along K, scales, and biases in mode "affine". Arrays have any number of leading axes.

    weight          U32 [..., M, K * bits / 32]  a stream of bits along K, from the lowest one up
    scales          [..., M, K / group_size]     F16, BF16 or F32; U8 in the modes whose scales are codes
    biases          as scales; transformers' "metal" calls them qbiases

`quantization` of config.json has group_size, bits and mode ("affine", "mxfp4", "mxfp8", "nvfp4"), and by the name of a module
other ones, whose mode is "affine" where they have none; false for a module that is not quantized.

Source: MLX 0.32.4 (mlx.core.quantize, mlx.nn.quantize), transformers 5.24 (MetalConfig).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia import (
    DialectError,
    Format,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
    UnsupportedError,
)
from breccia.backend import (
    FLOATS,
    NUMPY,
    Entry,
    SettingsOf,
    Shape,
    StoredForm,
    StoredValue,
    ValueForm,
)
from breccia.internal import abbreviated

from ..recipes import AffineScaling
from . import writing
from .scales import SCALE_DTYPES, assembled, check_scale, widened
from .words import whole_number

#: The recipes of the modes whose scales are codes.
MODES: dict[str, ScalingRecipe] = {
    "mxfp4": MXFP4BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(two_level=False),
}
#: Widths and group sizes of mode "affine" that have a recipe.
WIDTHS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


def recipe_of(mode: str, group_size: int | None, bits: int | None, scale_dtype: str | None, stored: str) -> ScalingRecipe:
    """The recipe of a mode, with MLX's defaults where group_size or bits are None.

    scale_dtype: as recipes name it; None for another one. stored: the dtype, for messages.

    Raises DialectError for options that MLX lacks, or that have no recipe.
    """
    if mode in MODES:
        recipe = MODES[mode]
        own = (recipe.format.scale.block[1], recipe.format.element.bits)
        if (group_size or own[0], bits or own[1]) != own:
            raise DialectError(
                f"mode {mode!r} has group_size={own[0]} and bits={own[1]}; got group_size={group_size}, bits={bits}.", mode=mode
            )
        return recipe
    if mode != "affine":
        raise DialectError(f"mode is one of affine, {', '.join(MODES)}; got {mode!r}.", mode=mode)
    bits, group_size = bits or 4, group_size or 64
    if bits not in WIDTHS or group_size not in GROUPS or scale_dtype is None:
        raise DialectError(
            f"affine arrays of {', '.join(map(str, WIDTHS))} bits, in groups of 32, 64 or 128, with scales in "
            f"{', '.join(FLOATS)}, have a recipe; got bits={bits}, group_size={group_size} and scales in {stored}. Cast its "
            "values.",
            bits=bits,
            group_size=group_size,
        )
    kind = {4: INT4Scaling, 8: INT8Scaling}.get(bits)
    if kind is None:
        return AffineScaling(bits, group_size, scale_dtype)
    return kind(group_size=group_size, signed=False, symmetric=False, offset="bias", scale_dtype=scale_dtype)


def options_of(fmt: Format) -> dict[str, Any] | None:
    """MLX's group_size, bits and mode of arrays of a format: the inverse of `recipe_of`; None if MLX has no such mode."""
    (_, group), bits = fmt.scale.block, fmt.element.bits
    mode = next((mode for mode, recipe in MODES.items() if recipe.format == fmt), None)
    if mode is None and bits in WIDTHS and group in GROUPS and fmt.scale.codec.name in SCALE_DTYPES:
        affine = recipe_of("affine", group, bits, SCALE_DTYPES[fmt.scale.codec.name], "")
        mode = "affine" if affine.format == fmt else None
    return None if mode is None else {"group_size": group, "bits": bits, "mode": mode}


def group_of(recipe: ScalingRecipe) -> int:
    """Elements along K that share a scale."""
    return recipe.format.scale.block[1] or 1


def length_of(words: Shape, recipe: ScalingRecipe) -> int:
    """K of words (..., M, K * bits / 32)."""
    return words[-1] * 32 // recipe.format.element.bits


def fits(words: Shape, scales: Shape, recipe: ScalingRecipe) -> bool:
    """Do words and scales of these shapes have the same groups?"""
    groups, rest = divmod(length_of(words, recipe), group_of(recipe))
    return not rest and scales == (*words[:-1], groups)


def settings(config: Mapping[str, Any]) -> SettingsOf:
    """The options of a module: its own ones, or those of the config."""
    names = ("group_size", "bits", "mode")
    common = {**dict.fromkeys(names), **{key: config[key] for key in names if key in config}} if config else config

    def of(module: str) -> Mapping[str, Any] | None:
        own = config.get(module)
        if own is False:
            return None
        return {"mode": "affine", **own} if isinstance(own, Mapping) else common

    return of


def form(value: StoredValue) -> ValueForm:
    """Integers with a bias, MXFP4, MXFP8, or NVFP4 without a tensor scale."""
    words, scales = value.entries["weight"].shape, value.entries["scales"]
    value.need(
        len(words) > 1 and all(words) and len(scales.shape) == len(words),
        f"'weight' has shape {list(words)} and 'scales' {list(scales.shape)}; they are (..., M, K * bits / 32) and (..., M, "
        "K / group_size).",
        shape=words,
    )
    biases = [end for end in value.entries if end not in ("weight", "scales")]
    announced = value.settings.get("mode")
    announced = "affine" if announced is None and value.settings else announced
    is_affine = bool(biases)
    value.need(
        is_affine == (scales.dtype in SCALE_DTYPES),
        f"'scales' is {scales.dtype} {'with' if is_affine else 'without'} biases; MLX has float scales with biases (affine), "
        "or U8 without.",
        dtype=scales.dtype,
    )
    value.need(
        announced is None or (announced == "affine") == is_affine,
        f"the config has mode {announced!r}, but the files have scales in {scales.dtype} {'with' if is_affine else 'without'} "
        "biases. Download the checkpoint again.",
        mode=announced,
    )
    for end in biases:
        value.need_shape(end, scales.shape)
        dtype = value.entries[end].dtype
        value.need(dtype == scales.dtype, f"{end!r} is {dtype} and 'scales' {scales.dtype}; MLX has one dtype for both.")
    if value.settings:
        size, bits = (whole_number(value, value.settings, key) for key in ("group_size", "bits"))
        value.need(size != 0 and bits != 0, f"the config has group_size {size} and bits {bits}; neither is 0.")
        mode = str(announced)
    else:
        mode, size, bits = _of_shapes(value)
    if mode == "affine" and bits == 1:
        raise UnsupportedError(
            f"it has 1 bit; recipes have {', '.join(map(str, WIDTHS))} bits. Convert the checkpoint that it was made from.",
            bits=bits,
        )
    recipe = recipe_of(mode, size, bits, SCALE_DTYPES.get(scales.dtype), scales.dtype)
    length = length_of(words, recipe)
    value.need(
        fits(words, scales.shape, recipe),
        f"'weight' of shape {list(words)} is {length} codes of {recipe.format.element.bits} bits a row; 'scales' of shape "
        f"{list(scales.shape)} does not fit groups of {group_of(recipe)}. Check quantization in config.json, or download the "
        "checkpoint again.",
        shape=scales.shape,
    )
    return ValueForm(recipe, (*words[:-1], length))


def _of_shapes(value: StoredValue) -> tuple[str, int, int]:
    """The mode, group size and bits that have arrays of these shapes. Raises DialectError where several have, or none."""
    words, scales = value.entries["weight"].shape, value.entries["scales"]
    options = [("affine", size, bits) for size in GROUPS for bits in (1, *WIDTHS)]
    if scales.dtype == "U8":
        options = [(mode, group_of(recipe), recipe.format.element.bits) for mode, recipe in MODES.items()]
    possible = [
        (mode, size, bits)
        for mode, size, bits in options
        if 32 * words[-1] == scales.shape[-1] * size * bits and scales.shape[:-1] == words[:-1]
    ]
    listed = " or ".join(f"{bits} bit{'s' if bits > 1 else ''} in groups of {size}" for _, size, bits in possible)
    value.need(
        len(possible) == 1,
        f"'weight' of shape {list(words)} and 'scales' of shape {list(scales.shape)} are "
        + (f"{listed}, and no config says which. Give the folder with config.json." if possible else "of no mode of MLX."),
        shape=scales.shape,
    )
    return possible[0]


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Words, scales and biases as they are."""
    codec, scale = form.recipe.format.scale.codec, value["scales"]
    check_scale(value, "scales", np.asarray(codec.read(NUMPY, scale), np.float32))
    biases = [end for end in value.entries if end not in ("weight", "scales")]
    for end in biases:
        check_scale(value, end, widened(value, end))
    zero_point = value[biases[0]] if biases else None
    return assembled(form, value.view("weight").view(np.uint8), scale, zero_point)


def stored(form: ValueForm) -> StoredForm:
    """Words, scales, and biases in mode "affine". Raises UnsupportedError for other formats and for partial groups."""
    writing.check(form, "mlx", _misfit)
    fmt = form.recipe.format
    options = options_of(fmt)
    assert options is not None
    *lead, length = form.shape
    scales = Entry(fmt.scale.codec.name if options["mode"] == "affine" else "U8", (*lead, length // options["group_size"]))
    entries = {"weight": Entry("U32", (*lead, length * options["bits"] // 32)), "scales": scales}
    return StoredForm(entries | ({"biases": scales} if fmt.offset == "bias" else {}), options)


def _misfit(form: ValueForm) -> str | None:
    recipe, shape = form.recipe, form.shape
    options = options_of(recipe.format)
    if options is None:
        return (
            "it holds mxfp4, mxfp8, nvfp4 without a tensor scale, and unsigned integers of 2, 3, 4, 5, 6 or 8 bits with a "
            f"bias in groups of 32, 64 or 128; {recipe.spec!r} is none of these."
        )
    if form.is_transposed:
        return "it has its groups along the last axis; those of this value run along axis -2."
    group = options["group_size"]
    if len(shape) < 2 or not all(shape) or shape[-1] % group:
        return f"it holds (..., M, K) in whole groups of K; groups of {group} do not divide shape {list(shape)}."
    if form.fitted_layout.plain != recipe.layout.fitted(shape):
        return f"it has groups of neighboring columns; this value has {form.layout!r}."
    return None


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Views of the components."""
    parts = {"weight": np.ascontiguousarray(st.data).view(np.uint32), "scales": st.scale}
    return parts | ({"biases": st.zero_point} if "biases" in stored.entries else {})


#: The name of one expert of several.
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """The options that most modules have, and by name those of others, under both keys that mlx-lm writes.

    It finds modules that are not quantized by the absence of their scales. By default inputs are not quantized; mlx-lm does it
    where all modules have mode "mxfp8" or all "nvfp4", and inputs the same.

    Raises UnsupportedError for experts one by one: mlx-lm has those of a layer as one stack, and joins only plain ones.
    """
    single = [module for module in stored if _SINGLE_EXPERT.search(module)]
    if single:
        raise UnsupportedError(
            f"{abbreviated(single)}: mlx-lm has the experts of a layer as one stack, and breccia does not join them. Leave "
            "them as they are: exclude='*.experts.*' (--exclude), which mlx-lm joins itself.",
            names=single,
        )
    options = {module: dict(form.settings) for module, form in stored.items()}
    common = dict(Counter(tuple(own.items()) for own in options.values()).most_common(1)[0][0])
    quantization = common | {module: own for module, own in options.items() if own != common}
    known: dict[str | None, dict[str, Any]] = {None: {}, "none": {}}
    if common["mode"] in ("mxfp8", "nvfp4") and len(quantization) == len(common):
        known[MODES[common["mode"]].spec] = {"quantize_activations": True}
    inputs = writing.inputs("mlx", activations, known)
    return {"config.json": {"quantization": quantization, "quantization_config": quantization, **inputs}}
