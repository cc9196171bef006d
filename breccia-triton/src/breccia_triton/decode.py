"""`dequantize` on CUDA tensors of torch."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from breccia.backend import ScaledTensor, reference
from breccia_torch.ops import TORCH

from .casting import dequantize_kernel
from .geometry import plain_tile
from .launch import Argument, Launcher, empty, type_of
from .operands import Codes, addresses, facts_of, grid_of, writable
from .plans import readable

_REMEMBERED = 4096


def dequantize(st: ScaledTensor, out_dtype: str = "float32", out: Any = None) -> Any:
    """`dequantize` as `breccia.dequantize` documents it.

    A transposed view of a contiguous tensor decodes into such a view.
    """
    data = st.data
    contiguous = data.is_contiguous()
    if not contiguous and data.ndim > 1 and data.mT.is_contiguous() and out is None:
        return dequantize(st.mT, out_dtype).mT
    key = (out_dtype, *facts_of(st))
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _REMEMBERED:
            _prepared.clear()
        prepared = _prepared[key] = Prepared(st, out_dtype)
    if prepared.reason is not None:
        return reference.dequantize(st, out_dtype, out)
    if out is not None and not writable(out, prepared.shape, prepared.dtype, prepared.device):
        return reference.result(TORCH, dequantize(st, out_dtype), "float32", out)
    device = data.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return prepared(st, out)
    return prepared(st, out)


_prepared: dict[Any, Prepared] = {}


class Prepared:
    """What calls for tensors of one shape, recipe, layout, device and result have in common.

    `reason` says why the kernels do not apply, or is None.
    """

    def __init__(self, st: ScaledTensor, out_dtype: str) -> None:
        self.shape, self.dtype, self.device = tuple(st.shape), getattr(torch, out_dtype), st.data.device
        spec = readable(st.recipe, st.layout)
        self.reason = spec if isinstance(spec, str) else "an empty tensor" if 0 in self.shape else None
        if self.reason is not None or isinstance(spec, str):
            return
        self.codes = codes = Codes(st, spec, merged=True)
        self.reason = codes.reason
        if self.reason is not None:
            return
        tile = plain_tile(1 if st.axis == -1 else 0, codes.rows, codes.columns)
        self.programs, folded = grid_of(tile, codes.matrices, codes.rows, codes.columns)
        tile = replace(tile, large=codes.large, folded=folded)
        arguments = codes.arguments | {
            "out": Argument(type_of(self.dtype), True),
            "rows": Argument("i32"),
            "columns": Argument("i32", codes.columns % 16 == 0),
        }
        arguments |= codes.counts
        self.integers = (codes.rows, codes.columns, *codes.groups)
        self.kernel = Launcher(dequantize_kernel, arguments, {"G": tile, "F": codes.source(tile)}, tile.warps)

    def __call__(self, st: ScaledTensor, out: Any) -> Any:
        device = self.device
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        result = empty(self.shape, self.dtype, device) if out is None else out
        inputs, _ = self.codes.read(st)
        self.kernel(self.programs, stream, (*addresses(inputs), *addresses([result], 1), *self.integers))
        return result
