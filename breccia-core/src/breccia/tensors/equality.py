"""Equality of tensors bit by bit, in any framework: the bytes and facts that are compared, and their digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ..errors import UnsupportedError
from .components import words
from .tensor import ScaledTensor, scaled


def bytes_equal(a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether `a` and `b`, of any frameworks, are the same tensor bit by bit.

    Recipe, layout, axis and logical shape must be equal, and the shape, dtype and bits of every component; float8 dtypes
    count as uint8, and bfloat16 as uint16, which have the same bytes. Reads values.

    Raises UnsupportedError unless both are ScaledTensors.

        >>> x = np.array([[0.5, 1.0, 3.0]], np.float32)
        >>> breccia.bytes_equal(breccia.cast(x, "mxfp8"), breccia.cast(x, "mxfp8"))
        True
        >>> breccia.bytes_equal(breccia.cast(x, "mxfp8"), breccia.cast(x, "fp8_row"))
        False
    """
    a, b = scaled(a), scaled(b)
    for name, st in (("a", a), ("b", b)):
        if not isinstance(st, ScaledTensor):
            raise UnsupportedError(f"bytes_equal compares ScaledTensors; {name} is {type(st).__name__}.")
    a, b = a.to_plain(), b.to_plain()
    left, right = stored_parts(a), stored_parts(b)
    if _facts(a, left) != _facts(b, right):
        return False
    return all(bool((left[name].reshape(-1).view("u1") == right[name].reshape(-1).view("u1")).all()) for name in left)


def digest(st: ScaledTensor) -> str:
    """`st.digest()`, which specifies what is hashed."""
    st = st.to_plain()
    stored = stored_parts(st)
    text = json.dumps(_facts(st, stored), sort_keys=True, separators=(",", ":"))
    hashed = hashlib.sha256(text.encode())
    for part in stored.values():
        hashed.update(part.reshape(-1).view("u1"))
    return hashed.hexdigest()


def stored_parts(st: ScaledTensor) -> dict[str, Any]:
    """The components by name as NumPy arrays in C order, little-endian; see `words`."""
    return {name: a.astype(a.dtype.newbyteorder("<"), order="C", copy=False) for name, a in words(st).items()}


def _facts(st: ScaledTensor, stored: dict[str, Any]) -> dict[str, Any]:
    """What is compared in addition to the bytes."""
    return {
        "recipe": st.recipe.to_dict(),
        "layout": st.layout.to_dict(),
        "axis": st.axis,
        "shape": st.shape,
        "parts": {name: [part.dtype.name, part.shape] for name, part in stored.items()},
    }
