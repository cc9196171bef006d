"""Scales and codes of files as components of ScaledTensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from breccia import Codec, ScaledTensor, from_buffer
from breccia.backend import BF16, E4M3, E8M0, NUMPY, StoredValue, ValueForm
from breccia.internal import FLOAT_CODECS

#: Dtypes of float scales in a file.
FLOATS = ("F32", "BF16", "F16")
#: The names of these in recipes.
SCALE_DTYPES = {codec.name: name for name, codec in FLOAT_CODECS.items()}
#: Dtypes of scales that are powers of two: the exponent with bias 127.
POWERS = ("F8_E8M0", "U8")

#: What `Dialect.rows` gives.
RowReader = Callable[[slice], ScaledTensor]

_BY_DTYPE: dict[str, Codec] = {"F8_E8M0": E8M0, "U8": E8M0, "F8_E4M3": E4M3, "BF16": BF16}


def widened(value: StoredValue, end: str, some: np.ndarray | None = None) -> np.ndarray:
    """Scales as FP32, exactly: of F32, BF16, F16, F8_E4M3, and of powers of two. some: some of the part, in place of all."""
    array, dtype = value[end] if some is None else some, value.entries[end].dtype
    if dtype in ("F32", "F16"):
        return np.asarray(array, np.float32)
    return np.asarray(_BY_DTYPE[dtype].read(NUMPY, array), np.float32)


def check_scale(value: StoredValue, end: str, scale: np.ndarray, first: int = 0) -> None:
    """Raise DialectError for scales that are NaN or Inf. scale: as FP32, from the position `first` on."""
    bad = np.flatnonzero(~np.isfinite(scale.reshape(-1)))
    if bad.size:
        at = int(bad[0])
        shown = scale.reshape(-1)[at]
        value.need(False, f"{end!r} has {bad.size} scales that are not finite; the first is {shown} at position {first + at}.")


def check_columns(value: StoredValue, end: str, some: np.ndarray) -> None:
    """As `check_scale` of the whole part, where some of its columns are such scales."""
    if not np.isfinite(widened(value, end, some)).all():
        check_scale(value, end, widened(value, end))


def assembled(
    form: ValueForm,
    codes: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray | None = None,
    global_scale: np.ndarray | None = None,
) -> ScaledTensor:
    """The tensor of codes as a recipe packs them, and scales in any shape with the right number of items."""
    layout = form.fitted_layout
    codes = codes.view(NUMPY.storage(form.recipe.format.element))
    shapes = layout.scale_shapes(form.shape)
    shape = next((shape for shape in shapes if math.prod(shape) == scale.size), shapes[0])
    zero = None if zero_point is None else zero_point.reshape(shape)
    level = None if global_scale is None else global_scale.reshape(() if global_scale.size == 1 else form.shape[:-2])
    return from_buffer(codes, scale.reshape(shape), form.recipe, layout, zero, level, shape=form.shape)
