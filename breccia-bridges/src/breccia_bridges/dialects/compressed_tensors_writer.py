"""Writing checkpoints of compressed-tensors: the scheme of a format, its tensors, and the config of a model.

A scheme has the names of the library's QuantizationArgs. Source: compressed-tensors 0.20; vLLM 0.32 loads what it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from breccia import Codec, Integer, OptionError, ScaledTensor
from breccia.backend import BF16, E2M1, E2M3, E4M3, E8M0, F16, F32, NUMPY, TENSOR, Entry, StoredForm, ValueForm, as_recipe, pack

from . import integers
from .writing import check, check_matrix

#: How far a release is named in configs, which the library compares with none.
_VERSION = "0.20.0"
_DTYPES: dict[Codec, str] = {F32: "F32", F16: "F16", BF16: "BF16"}
_GLOBAL = "weight_global_scale"


def scheme_of(form: ValueForm) -> tuple[str, dict[str, Any]] | None:
    """(the name of the format, the scheme of its weights) of a value; None where the library has none."""
    fmt, shape = form.recipe.format, form.shape
    block = form.fitted_layout.block(-1)
    whole = block[1] is None or shape[-1] % block[1] == 0
    relative = any(level.convention == "amax" for level in fmt.levels)
    if len(shape) != 2 or fmt.features or relative or len(fmt.levels) > 2:
        return None
    element, scale, symmetric = fmt.element, fmt.scale.codec, fmt.offset == "none"
    if isinstance(element, Integer):
        fits = scale in _DTYPES and element.signed == symmetric and fmt.offset in ("none", "zero_point")
        if not fits or fmt.global_scale is not None or block[0] != 1 or not whole or element.bits == 1 or element.fraction_bits:
            return None
        group = {"strategy": "channel"} if block[1] is None else {"strategy": "group", "group_size": block[1]}
        args = {"num_bits": element.bits, "type": "int", "symmetric": symmetric, **group}
        return "int-quantized" if element.bits == 8 and symmetric and block[1] is None else "pack-quantized", args
    number = {"type": "float", "symmetric": True}
    powers = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    if not symmetric:
        return None
    if scale == E8M0 and block == (1, 32) and whole:
        known: dict[Codec, tuple[str, int]] = {
            E4M3: ("mxfp8-quantized", 8),
            E2M1: ("mxfp4-pack-quantized", 4),
            E2M3: ("mxfp6-pack-quantized", 6),
        }
        name, bits = known.get(element, ("", 0))
        return (name, {"num_bits": bits, **number, **powers}) if name else None
    if element == E2M1 and scale == E4M3 and block == (1, 16) and whole:
        if fmt.global_scale is None or fmt.global_scale.convention != "divisor":
            return None
        args = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
        return "nvfp4-pack-quantized", {"num_bits": 4, **number, **args}
    if element != E4M3 or scale != F32 or fmt.global_scale is not None:
        return None
    if fmt.scale.block == TENSOR:
        return "float-quantized", {"num_bits": 8, **number, "strategy": "tensor"}
    if block == (1, None):
        return "float-quantized", {"num_bits": 8, **number, "strategy": "channel"}
    if None not in block and block[0] != 1:
        return "float-quantized", {"num_bits": 8, **number, "strategy": "block", "block_structure": list(block)}
    return None


def _misfit(form: ValueForm) -> str | None:
    if scheme_of(form) is not None:
        return None
    return (
        f"{form.recipe.spec!r} of shape {list(form.shape)} is none of its schemes: matrices of integers of 2 to 8 bits without "
        "a bias, FP8 (E4M3), MXFP8, MXFP6 (E2M3), MXFP4, and NVFP4 whose global scale is a divisor, in whole groups along K."
    )


def stored(form: ValueForm) -> StoredForm:
    """The tensors of a value, and its scheme with that of the layer's inputs."""
    check_matrix(form, "compressed_tensors")
    check(form, "compressed_tensors", _misfit)
    found = scheme_of(form)
    assert found is not None
    name, weights = found
    inputs = _inputs(weights, form.activations)
    if name == "int-quantized" and inputs is None:
        name = "pack-quantized"  # engines take bytes only with inputs of 8 bits
    (rows, columns), fmt = form.shape, form.recipe.format
    grid = form.fitted_layout.scale_shapes(form.shape)[0]
    scales = Entry(_DTYPES.get(fmt.scale.codec, "U8"), grid or (1,))
    if name == "pack-quantized":
        entries = {
            "weight_packed": Entry("I32", (rows, _words(columns, fmt.element.bits))),
            "weight_scale": scales,
            "weight_shape": Entry("I64", (2,)),
        }
        if not weights["symmetric"]:
            entries["weight_zero_point"] = Entry("I32", (_words(rows, fmt.element.bits), grid[-1]))
    elif name == "nvfp4-pack-quantized":
        entries = {
            "weight_packed": Entry("U8", (rows, columns // 2)),
            "weight_scale": Entry("F8_E4M3", grid),
            _GLOBAL: Entry("F32", (1,)),
        }
    elif "pack" in name:
        entries = {"weight_packed": Entry("U8", (rows, columns * fmt.element.bits // 8)), "weight_scale": scales}
    else:
        entries = {"weight_scale": scales, "weight": Entry("I8" if weights["type"] == "int" else "F8_E4M3", (rows, columns))}
    known = {"weight_shape": np.array(form.shape, np.int64)} if "weight_shape" in entries else {}
    return StoredForm(entries, {"format": name, "weights": weights, "input_activations": inputs}, known)


def _words(length: int, bits: int) -> int:
    return -(-length * bits // 32)


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, np.ndarray]:
    """Codes and scales as they are; half of the range is added to integers that are packed."""
    shapes = {end: entry.shape for end, entry in stored.entries.items()}
    scale = np.asarray(st.scale).reshape(shapes["weight_scale"])
    if stored.settings["format"] != "pack-quantized":
        codes = "weight_packed" if "weight_packed" in shapes else "weight"
        arrays = {codes: np.asarray(st.data), "weight_scale": scale}
        return arrays | ({_GLOBAL: np.reshape(st.global_scale, (1,))} if _GLOBAL in shapes else {})
    bits, columns = st.recipe.format.element.bits, st.shape[-1]
    codes = np.asarray(st.data).view(np.uint8)
    if st.zero_point is None:
        codes = integers.cut(integers.offset(codes, bits), columns, bits)
    arrays = {"weight_packed": _filled(codes, shapes["weight_packed"]), "weight_scale": scale}
    if st.zero_point is not None:
        zero = np.asarray(st.zero_point).T.astype(np.int32)
        words, groups = shapes["weight_zero_point"]
        packed = np.asarray(pack(NUMPY, zero, st.recipe.format.element)).view(np.uint8)
        arrays["weight_zero_point"] = np.ascontiguousarray(_filled(packed, (groups, words)).T)
    return arrays


def _filled(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of packed codes as rows of int32 words of that shape; zeros follow."""
    rows = np.zeros((*shape[:-1], shape[-1] * 4), np.uint8)
    held = min(rows.shape[-1], data.shape[-1])
    rows[..., :held] = data[..., :held]
    return rows.view(np.int32)


# -- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(weights: Mapping[str, Any], activations: str | None) -> dict[str, Any] | None:
    """The scheme of a layer's inputs: by default dynamic ones for codes of 8 bits that engines multiply so; else none."""
    if activations == "none":
        return None
    if activations is not None:
        return _scheme_of_inputs(activations)
    if weights["num_bits"] != 8 or not weights["symmetric"]:
        return None
    match weights["strategy"]:
        case "tensor" | "channel":
            return _dynamic(8, weights["type"], "token")
        case "block":
            return _dynamic(8, "float", "group", group_size=weights["block_structure"][1])
        case "group" if weights["type"] == "float":
            return _dynamic(8, "float", "group", group_size=32, scale_dtype="torch.uint8")
        case _:
            return None


def _dynamic(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": True, **more}


def _scheme_of_inputs(spec: str) -> dict[str, Any]:
    """The scheme of inputs under a recipe. Raises OptionError for one that the library has no dynamic scheme for."""
    fmt = as_recipe(spec).format
    kind = "int" if isinstance(fmt.element, Integer) else "float"
    block, scale, element = fmt.scale.block, fmt.scale.codec, fmt.element
    is_signed = isinstance(element, Integer) and element.signed
    if fmt.offset == "none" and fmt.global_scale is None and (element == E4M3 or (element.bits == 8 and is_signed)):
        if scale == F32 and block == (1, None):
            return _dynamic(8, kind, "token")
        if scale == F32 and block == TENSOR:
            return _dynamic(8, kind, "tensor")
        if scale == F32 and element == E4M3 and block[0] == 1:
            return _dynamic(8, kind, "group", group_size=block[1])
    if scale == E8M0 and block == (1, 32) and element in (E4M3, E2M1):
        return _dynamic(element.bits, kind, "group", group_size=32, scale_dtype="torch.uint8")
    raise OptionError(
        f"activations={spec!r}: compressed-tensors quantizes inputs as they come under fp8_row, fp8_current, fp8_block, int8, "
        "mxfp8 or mxfp4. Give one of these, or none.",
        activations=spec,
    )


# -- the config -------------------------------------------------------------------------------------------------------


def config(stored: Mapping[str, StoredForm], plain: Sequence[str], activations: str | None) -> dict[str, dict[str, Any]]:
    """A config group for each scheme: the most common one is that of all linear layers, the others name theirs."""
    schemes = {module: (repr(dict(form.settings)), form.settings) for module, form in stored.items()}
    counts = Counter(key for key, _ in schemes.values())
    settings = dict(schemes.values())
    groups: dict[str, dict[str, Any]] = {}
    for n, (key, _) in enumerate(counts.most_common()):
        named = sorted(module for module, (own, _) in schemes.items() if own == key)
        targets = ["Linear"] if n == 0 else named
        one = settings[key]
        weights = {**one["weights"], "dynamic": False, "observer": "minmax"}
        groups[f"group_{n}"] = {**one, "targets": targets, "weights": weights, "output_activations": None}
    formats = {form.settings["format"] for form in stored.values()}
    return {
        "config.json": {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": formats.pop() if len(formats) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "config_groups": groups,
                "ignore": sorted(plain),
                "kv_cache_scheme": None,
                "global_compression_ratio": None,
                "version": _VERSION,
            }
        }
    }
