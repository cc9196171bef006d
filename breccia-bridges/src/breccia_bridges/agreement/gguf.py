"""gguf: the quantizers of llama.cpp's Python package."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from breccia import Codec, INT4Scaling, INT8Scaling, MXFP4BlockScaling
from breccia.backend import E2M1, INT4, UINT4

from . import TIES, Library, Quantizer, Setting, Written, installed, packed


def _blocks(kind: str, dtypes: tuple[str, ...], element: Codec | None, shift: int = 0) -> Callable[[np.ndarray], Written]:
    """Blocks of 32: scales and biases of these dtypes, then codes. In 4-bit codes, elements j and j + 16 share a byte."""

    def write(x: np.ndarray) -> Written:
        from gguf import GGMLQuantizationType, quants

        of = GGMLQuantizationType[kind]
        raw = quants.quantize(x, of)
        rows = raw.reshape(x.shape[0], x.shape[1] // 32, -1)
        stored: list[np.ndarray] = []
        at = 0
        for dtype in dtypes:
            size = np.dtype(dtype).itemsize
            stored.append(np.ascontiguousarray(rows[..., at : at + size]).view(dtype)[..., 0])
            at += size
        codes = rows[..., at:]
        if element is not None:
            codes = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.int32) - shift
        codes = codes.reshape(x.shape)
        data = codes if element is None else packed(codes, element)
        offset = stored[1] if len(stored) > 1 else None
        return Written(data, quants.dequantize(raw, of), stored[0], zero_point=offset)

    return write


_SIGNED = "The scale is the element of the largest magnitude, with its sign, over −8; breccia's is amax / 7, never negative."
_UNROUNDED = "Codes come from {} rounded to FP16, and ties go {}; breccia uses the stored values, ties to even."
_FLOOR = "The exponent of amax is taken unrounded, the rule of the OCP specification."
_GROUPS: dict[str, Any] = {"group_size": 32, "scale_dtype": "fp16"}

LIBRARIES = (
    Library(
        "gguf",
        installed("gguf"),
        (
            Quantizer(
                "Q4_0",
                _blocks("Q4_0", ("<f2",), INT4, shift=8),
                Setting(
                    INT4Scaling(**_GROUPS),
                    _SIGNED,
                ),
            ),
            Quantizer(
                "Q4_1",
                _blocks("Q4_1", ("<f2", "<f2"), UINT4),
                Setting(
                    INT4Scaling(**_GROUPS, signed=False, symmetric=False, offset="bias"),
                    _UNROUNDED.format("scale and bias before they are", "up"),
                ),
            ),
            Quantizer(
                "Q8_0",
                _blocks("Q8_0", ("<f2",), None),
                Setting(
                    INT8Scaling(**_GROUPS),
                    _UNROUNDED.format("the scale before it is", "away from zero"),
                ),
            ),
            Quantizer(
                "MXFP4",
                _blocks("MXFP4", ("u1",), E2M1),
                Setting(
                    MXFP4BlockScaling(),
                    _FLOOR,
                ),
                Setting(
                    MXFP4BlockScaling(scale_rule="floor"),
                    TIES,
                ),
            ),
        ),
    ),
)
