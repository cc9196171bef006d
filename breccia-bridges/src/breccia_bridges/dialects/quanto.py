"""optimum-quanto's 8-bit weights: `up.weight._data`, (N, ...) in int8 or FP8, and `up.weight._scale`, per row or one for all.

quanto computes code · scale in the dtype of its scale, mostly BF16; a ScaledTensor has the same codes and scales and computes
in FP32, so that its values rounded to BF16 are quanto's.

`qint4` and `qint2` are refused: quanto computes code · scale - shift in BF16 and rounds twice, which no format of ScaledTensor
does. quanto writes quanto_qmap.json, which maps modules to {"weights": "qint8"}, and no quantization_config; transformers'
config has {"quant_method": "quanto", "weights": "int8"}.

Source: optimum-quanto 0.2.7, and the quantization configs of transformers 5.24. Neither is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import numpy as np

from breccia import Float8CurrentScaling, Float8RowScaling, INT8Scaling, ScaledTensor, UnsupportedError
from breccia.backend import StoredValue, ValueForm

from ..text import spelled
from .fp8 import FORMATS
from .scales import FLOATS, SCALE_DTYPES, assembled, check_scale, widened

#: quanto's names of 8-bit types, without the leading q, by the dtype of the file.
_TYPES = {
    "I8": ("int8",),
    "F8_E4M3": ("float8", "float8_e4m3fn"),
    "F8_E5M2": ("float8_e5m2",),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz",),
}
_AGAIN = "Download the checkpoint again."
_BY_QUANTO = "Load it with optimum-quanto and save each weight.dequantize(), or convert the original checkpoint."


def settings(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Those of transformers, for all modules, or those that quanto_qmap.json has for a module."""
    return config if "quant_method" in config or not config else config.get(module)


def form(value: StoredValue) -> ValueForm:
    """Codes of any number of axes, the first one being rows."""
    if "._shift" in value.entries or "._data._data" in value.entries:
        raise UnsupportedError(
            "it is one of quanto's packed types, qint4 or qint2: quanto computes code * scale - shift in the dtype of the "
            f"scale and rounds after each step, which no format of ScaledTensor does. {_BY_QUANTO}",
            name=value.name,
        )
    codes, scale = value.entries["._data"], value.entries["._scale"]
    value.need(codes.dtype in _TYPES, f"'._data' is {codes.dtype}; quanto has {' or '.join(_TYPES)} there. {_AGAIN}")
    value.need(scale.dtype in FLOATS, f"'._scale' is {scale.dtype}; quanto has {' or '.join(FLOATS)} there. {_AGAIN}")
    _check_settings(value, codes.dtype)
    if codes.dtype not in ("I8", *FORMATS):
        raise UnsupportedError(
            f"its codes are {codes.dtype}; ScaledTensors have E4M3 and E5M2 as {' and '.join(FORMATS)}. {_BY_QUANTO}",
            name=value.name,
        )
    shape = codes.shape
    value.need(len(shape) > 1, f"its codes have shape {spelled(shape)}; a weight has two axes or more. {_AGAIN}", shape=shape)
    value.need_shape("._scale", (), (shape[0], *(1 for _ in shape[1:])))
    if codes.dtype == "I8":
        return ValueForm(INT8Scaling(scale_dtype=SCALE_DTYPES[scale.dtype]), shape)
    fmt = FORMATS[codes.dtype]
    return ValueForm(Float8RowScaling(fmt) if scale.shape else Float8CurrentScaling(fmt), shape)


def _check_settings(value: StoredValue, dtype: str) -> None:
    """Raise DialectError if the config has another type of weights."""
    if (name := value.settings.get("weights")) is not None:
        known = isinstance(name, str) and name.removeprefix("q") in _TYPES[dtype]
        value.need(known, f"'._data' is {dtype}, and the config says weights {short(name)}. {_AGAIN}")


def read(value: StoredValue, form: ValueForm) -> ScaledTensor:
    """Codes as they are; scales in their dtype for integers, in FP32 for FP8. A row of more than one axis repeats its scale."""
    wide = widened(value, "._scale")
    check_scale(value, "._scale", wide)
    scale = value["._scale"] if isinstance(form.recipe, INT8Scaling) else wide
    if not isinstance(form.recipe, Float8CurrentScaling):
        scale = np.ascontiguousarray(np.broadcast_to(scale, (*form.shape[:-1], 1)))
    return assembled(form, value.view("._data"), scale)
