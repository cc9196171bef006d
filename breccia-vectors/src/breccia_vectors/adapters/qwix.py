"""qwix: `qwix.quantize` and `qwix.dequantize`, on a CPU."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, padded, plain, values

#: qtype -> the dtype whose values the scales are; they are stored in FP32.
_SCALES = {"mxfp8": "float8_e8m0fnu", "mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn", "nf4": "float32"}


def _cast(qtype: str, case: Case) -> dict[str, np.ndarray]:
    import jax.numpy as jnp
    import ml_dtypes
    import qwix

    plain(case)
    block, stored = case.format.block[1], _SCALES[qtype]
    q = qwix.quantize(jnp.asarray(padded(values(case), block)), qtype, channelwise_axes=(0,), tiled_axes={1: block})
    scale = np.asarray(q.scale).astype(np.float32)
    scale = scale if stored == "float32" else scale.astype(getattr(ml_dtypes, stored)).view(np.uint8)
    parts = {"codes": back(case, np.asarray(q.qvalue).view(np.uint8)), "scale": back(case, scale, "scale")}
    return parts | {"decoded": back(case, np.asarray(qwix.dequantize(q)).astype(np.float32))}


def _adapter(qtype: str, *formats: str) -> Adapter:
    return Adapter(qtype, formats, partial(_cast, qtype))


ADAPTERS = (
    _adapter("mxfp8", "mxfp8"),
    _adapter("mxfp4", "mxfp4"),
    _adapter("nvfp4", "nvfp4,two_level=False"),
    _adapter("nf4", "nf4,block_size=16"),
)
