"""qwix: `qwix.quantize`, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from breccia import Codec, INT4Scaling, INT8Scaling, MXFP4BlockScaling, MXFP8BlockScaling, NF4Scaling, NVFP4BlockScaling
from breccia.backend import E2M1, E4M3, E8M0, INT4, INT8, NF4, NUMPY

from . import Library, Quantizer, Setting, Written, installed, packed


def _quantize(qtype: str, tile: int, element: Codec, scale: Codec | None = None) -> Callable[[np.ndarray], Written]:
    """scale: the codec whose values the scales are, stored in FP32."""

    def write(x: np.ndarray) -> Written:
        import jax.numpy as jnp
        import qwix

        q: Any = qwix.quantize(jnp.asarray(x), qtype, channelwise_axes=(0,), tiled_axes={1: tile})
        codes, stored = np.asarray(q.qvalue), np.asarray(q.scale)
        if scale is not None:
            stored = scale.encode(NUMPY, stored).astype(np.uint8)
        data = packed(codes.view(np.uint8), element)
        return Written(data, np.asarray(qwix.dequantize(q)), stored)

    return write


_LOGARITHM = "The exponent is ceil(log2(amax / {})) in FP32: near {} · 2^k the logarithm is off by one step."
_UNDERFLOW = "Under a block scale that underflows to 0, division by zero gives codes of ±6; breccia gives 0."
_RECIPROCAL = "XLA replaces the division by {} by a multiplication by the reciprocal: scales differ in the last bit."
_HALF = "The scale is amax / {}; breccia's is amax / {}."
_INT4 = partial(INT4Scaling, scale_dtype="fp32")

LIBRARIES = (
    Library(
        "qwix",
        installed("qwix"),
        (
            Quantizer("mxfp8", _quantize("mxfp8", 32, E4M3, E8M0), Setting(MXFP8BlockScaling(), _LOGARITHM.format(448, 448))),
            Quantizer("mxfp4", _quantize("mxfp4", 32, E2M1, E8M0), Setting(MXFP4BlockScaling(), _LOGARITHM.format(6, 6))),
            Quantizer(
                "nvfp4",
                _quantize("nvfp4", 16, E2M1, E4M3),
                Setting(
                    NVFP4BlockScaling(two_level=False),
                    _UNDERFLOW,
                ),
            ),
            Quantizer(
                "int4, groups of 128",
                _quantize("int4", 128, INT4),
                Setting(_INT4(), _HALF.format(7.5, 7)),
                Setting(_INT4(scale_rule="half_range"), _RECIPROCAL.format(7.5)),
            ),
            Quantizer(
                "int8, groups of 128",
                _quantize("int8", 128, INT8),
                Setting(INT8Scaling(128), _HALF.format(127.5, 127)),
                Setting(INT8Scaling(128, scale_rule="half_range"), _RECIPROCAL.format(127.5)),
            ),
            Quantizer("nf4", _quantize("nf4", 64, NF4), Setting(NF4Scaling(64))),
        ),
    ),
)
