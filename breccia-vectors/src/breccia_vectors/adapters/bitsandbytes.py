"""bitsandbytes: NF4, on a CPU. Blocks of 16 are widened to its 64 with copies of their first element."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np

from ..sets import Case
from . import Adapter
from .shapes import back, bytes_of, matrix, narrowed, nibbles, plain, tensor, widened


def _swapped(data: np.ndarray) -> np.ndarray:
    """The first code of a byte in its low bits, for one in its high bits; and back."""
    return data >> 4 | (data & 15) << 4


def _cast(case: Case) -> dict[str, np.ndarray]:
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    plain(case)
    x = torch.from_numpy(widened(case, tensor(case).float().numpy(), 64))
    data, state = quantize_4bit(x, blocksize=64, quant_type="nf4")
    codes = nibbles(_swapped(data.numpy().reshape(-1))).reshape(x.shape)
    codes, decoded = (narrowed(a, 16, 64) for a in (codes, dequantize_4bit(data, state).float().numpy()))
    return {
        "codes": back(case, codes),
        "scale": back(case, state.absmax.numpy(), "scale"),
        "decoded": back(case, decoded),
    }


def _decoded(case: Case) -> np.ndarray:
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes = widened(case, matrix(case, "codes"), 64)
    _, state = quantize_4bit(torch.ones(codes.shape), blocksize=64, quant_type="nf4")
    state.absmax = torch.from_numpy(matrix(case, "scale").reshape(-1).copy())
    data = torch.from_numpy(_swapped(bytes_of(codes)).reshape(-1, 1))
    return back(case, narrowed(dequantize_4bit(data, state).numpy(), 16, 64))


ADAPTERS = (Adapter("quantize_4bit, nf4", ("nf4,block_size=16",), _cast, _decoded),)
