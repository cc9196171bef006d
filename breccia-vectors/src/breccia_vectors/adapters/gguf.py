"""gguf: the quantizers of llama.cpp's Python package. Blocks of 16 are widened to its 32 with copies of their first element."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, matrix, narrowed, padded, plain, values, widened

#: Items before the codes of a block of 32: the dtypes of the scale and of the bias.
_HEADS = {"MXFP4": ("u1",), "Q8_0": ("<f2",), "Q4_1": ("<f2", "<f2"), "IQ4_NL": ("<f2",)}


def _whole(case: Case, x: np.ndarray) -> np.ndarray:
    return padded(x, 32) if case.format.block[1] == 32 else widened(case, x, 32)


def _cast(kind: str, case: Case) -> dict[str, np.ndarray]:
    from gguf import GGMLQuantizationType, quants

    plain(case)
    block, x = case.format.block[1], _whole(case, values(case))
    raw = quants.quantize(x, GGMLQuantizationType[kind])
    blocks, at, heads = raw.reshape(len(x), x.shape[1] // 32, -1), 0, []
    for dtype in _HEADS[kind]:
        size = np.dtype(dtype).itemsize
        heads.append(np.ascontiguousarray(blocks[..., at : at + size]).view(dtype.replace("f", "u"))[..., 0])
        at += size
    codes = blocks[..., at:]  # of 4 bits, elements j and j + 16 share a byte
    codes = codes if kind == "Q8_0" else np.concatenate([codes & 15, codes >> 4], axis=-1)
    decoded = quants.dequantize(raw, GGMLQuantizationType[kind])
    codes, decoded = (narrowed(a.reshape(x.shape), block, 32) for a in (codes, decoded))
    parts = {"codes": back(case, codes), "scale": back(case, heads[0], "scale"), "decoded": back(case, decoded)}
    return parts | ({"zero_point": back(case, heads[1], "zero_point")} if len(heads) > 1 else {})


def _decoded(kind: str, case: Case) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    codes = _whole(case, matrix(case, "codes"))
    blocks = codes.reshape(len(codes), -1, 32)
    codes = blocks if kind == "Q8_0" else blocks[..., :16] | blocks[..., 16:] << 4
    heads = [matrix(case, part) for part in ("scale", "zero_point")[: len(_HEADS[kind])]]
    heads = [np.ascontiguousarray(h).view(np.uint8).reshape(*blocks.shape[:2], -1) for h in heads]
    raw = np.concatenate([*heads, codes.view(np.uint8)], axis=-1).reshape(len(blocks), -1)
    decoded = quants.dequantize(raw, GGMLQuantizationType[kind])
    return back(case, narrowed(decoded, case.format.block[1], 32))


def _adapter(kind: str, *formats: str, casts: bool = True) -> Adapter:
    return Adapter(kind, formats, partial(_cast, kind) if casts else None, partial(_decoded, kind))


ADAPTERS = (
    _adapter("MXFP4", "mxfp4,scale_rule=floor"),
    _adapter("Q8_0", "int8,group_size=16,scale_dtype=fp16,scale_rule=recip"),
    _adapter("Q4_1", "int4,group_size=16,signed=False,symmetric=False,scale_rule=recip,offset=bias"),
    _adapter("IQ4_NL", "gguf,type=IQ4_NL", casts=False),
)
