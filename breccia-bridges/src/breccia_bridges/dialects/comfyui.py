"""ComfyUI's quantized layers: `up.weight`, its scales, and `up.comfy_quant`, JSON in bytes: {"format": "float8_e4m3fn"}.

FP8 with one scale for all is read. ComfyUI's other formats are refused: NVFP4 and MXFP8, whose block scales it stores in the
order of its kernels, and integers, some of them of rotated weights.

Source: ComfyUI, QUANTIZATION.md and comfy/quant_ops.py.
"""

from __future__ import annotations

import json
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import DialectError, ScaledTensor, UnsupportedError
from breccia.backend import Entry, StoredForm, StoredValue, ValueForm
from breccia.internal import parsed_json

from . import fp8
from .scales import FLOATS
from .writing import check_matrix, refused

#: The dtype of codes in a file, by ComfyUI's name of the format.
_FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_AGAIN = "Download the checkpoint again."


def form(value: StoredValue) -> ValueForm:
    """Codes of any number of axes and one scale, by `fp8`."""
    return fp8.form(_scaled(value))


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes as they are, the scale in FP32."""
    return fp8.read(_scaled(value), form)


def _scaled(value: StoredValue) -> StoredValue:
    """The scale and the codes alone, after a check of their format. comfy_quant is read."""
    try:
        listed = parsed_json(value["comfy_quant"].tobytes().decode())
    except ValueError as e:
        raise DialectError(f"'comfy_quant' holds JSON in bytes; they are not ({e}). {_AGAIN}", name=value.name) from e
    name = listed.get("format") if isinstance(listed, dict) else None
    value.need(isinstance(name, str), f"'comfy_quant' is an object with a format; got {short(listed)}. {_AGAIN}")
    if name not in _FORMATS or "pre_quant_scale" in value.entries:
        kind = name if name not in _FORMATS else f"{name} with pre_quant_scale, by which its layer multiplies the inputs"
        raise UnsupportedError(
            f"its format is ComfyUI's {kind}; {' and '.join(_FORMATS)} can be read. Convert the original checkpoint.",
            name=value.name,
        )
    dtype = value.entries["weight"].dtype
    value.need(dtype == _FORMATS[name], f"'weight' is {dtype}, and its format {name} has {_FORMATS[name]}. {_AGAIN}")
    value.need("weight_scale" in value.entries, f"no file has its 'weight_scale'. {_AGAIN}")
    scale = value.entries["weight_scale"].dtype
    value.need(scale in FLOATS, f"'weight_scale' is {scale}; ComfyUI has {' or '.join(FLOATS)} there. {_AGAIN}")
    value.need_shape("weight_scale", (), (1,))
    value.need("weight_scale_2" not in value.entries, f"it has a 'weight_scale_2', which {name} has not. {_AGAIN}")
    entries = {end: value.entries[end] for end in ("weight_scale", "weight")}
    return StoredValue(value.name, entries, value.settings, value.__getitem__, value.view, value.metadata)


# -- writing ----------------------------------------------------------------------------------------------------------

_NAME = "comfy_quant"


def stored(form: ValueForm) -> StoredForm:
    """FP8 codes of any number of axes with one scale, and the JSON that names their format."""
    check_matrix(form, _NAME)
    dtype = fp8.DTYPES.get(form.recipe.format.element.name)
    name = next((name for name, one in _FORMATS.items() if one == dtype), None)
    if name is None or fp8.kind_of(form) != "tensor":
        raise refused(form, _NAME)
    scaled = fp8.stored_as(form, "weight", "weight_scale", ())
    text = json.dumps({"format": name}).encode()
    return StoredForm({**scaled.entries, "comfy_quant": Entry("U8", (len(text),))}, {"comfy_quant": text})


def write(st: ScaledTensor, stored: StoredForm) -> dict[str, Any]:
    """Codes and scale as they are, and the JSON in bytes."""
    return {**fp8.write(st, stored), "comfy_quant": np.frombuffer(stored.settings["comfy_quant"], np.uint8)}
