"""Products of BF16 arrays and a weight in storage "mma_16x128" whose blocks go across K, on Hopper: dL/dx = dL/dy @ w.

As in `bf16_matmul`: one pass decodes the weight to BF16, to two numbers for each value where BF16 does not hold it, one writes
the array as often, cuBLAS multiplies, and a last launch computes tiles with a flag in FP32.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from breccia import KernelError
from breccia.internal import reentrant

from . import weight_plans
from .bf16_matmul import Decoding, multiply
from .cuda import program
from .cuda.fp8_matmul import BUSY, check_out
from .geometry import divided_up
from .launch import current_stream, empty
from .multiplying import Operand, need_one_device_for
from .operands import hardware, writable
from .specs import Unsupported
from .weight_products import Weight, stored

#: Chunks that a block decodes, one after the other; blocks that mend.
CHUNKS, MENDERS = 2, 512


class Call:
    """What products of equal shapes, dtypes and recipe have in common: their kernels, loaded.

    rounds: values that BF16 does not hold are rounded to one number. Raises Unsupported.
    """

    def __init__(self, a: Operand, b: Operand, bias: Any, out_dtype: str, rounds: bool = False) -> None:
        st = b.original
        self.n, self.k = st.shape
        self.device, self.dtype = a.data.device, getattr(torch, out_dtype)
        need_one_device_for(a, b, bias)
        operand = weight_plans.operand_of(st.recipe.format, st.layout.plain.block(-1))
        if isinstance(operand, str):
            raise Unsupported(operand)
        self.rounds, self.copies = rounds, 1 if rounds or operand.exact else 2
        self.array = Decoding(a, hardware(self.device), 0, True, self.copies)
        self.m = self.array.lines
        self.shape = (*a.original.shape[:-1], self.k)
        source = program.source_of("weight_only_across.cu")
        macros = {**weight_plans.macros_of_decoding(operand, out_dtype), "COPIES": self.copies}
        decode, mend = (program.function(source, f"weight_only_across{end}", macros, 0, self.device) for end in ("", "_mend"))
        self.weight = Weight(None, None, None, operand.factor, int(operand.divides))
        self.values, self.flags, self.x, self.y = (ctypes.c_void_p() for _ in range(4))
        m, n, k, chunks = map(ctypes.c_int, (self.m, self.n, self.k, CHUNKS))
        blocks = divided_up(self.n, weight_plans.ROWS), divided_up(self.k, weight_plans.COLUMNS * CHUNKS), 1
        self.decode = decode.prepare(blocks, 128, [self.weight, self.values, self.flags, m, n, k, chunks])
        tiles = divided_up(self.m, 64) * divided_up(self.k, 64)
        self.mend = mend.prepare(
            (min(tiles, MENDERS), 1, 1), 256, [self.weight, self.x, self.y, self.flags, m, n, k, n, k]
        )  # fmt: skip
        # The arguments of a launch are set in place: one thread at a time, and no call in the middle of another one.
        self.turn, self.busy = reentrant(), False

    def __call__(self, a: Operand, b: Operand, bias: Any, out: Any) -> Any:
        """The product, on the current device. bias: None."""
        if out is not None:
            check_out(out, self.shape, self.dtype)
        device = self.device
        to: Any = out if writable(out, self.shape, self.dtype, device) else empty(self.shape, self.dtype, device)
        values = empty((self.copies * self.n, self.k), torch.bfloat16, device)
        flags = torch.zeros(1 + self.m + self.k, dtype=torch.int32, device=device)
        stream = current_stream(device)
        numbers = self.array(a, flags, stream)
        st = b.original
        data, rows, _ = stored(st)
        with self.turn:
            if self.busy:
                raise KernelError(BUSY)
            self.busy = True
            try:
                self.weight.chunks, self.weight.rows = data.data_ptr(), rows.data_ptr()
                if st.global_scale is not None:
                    self.weight.tensor_scale = st.global_scale.data_ptr()
                self.values.value, self.flags.value = values.data_ptr(), flags.data_ptr()
                self.x.value, self.y.value = a.x.data_ptr(), to.data_ptr()
                self.decode.config.stream = self.mend.config.stream = stream or None
                self.decode()
                multiply(numbers.reshape(self.m, -1), values, to.view(self.m, self.k))
                if not self.rounds:
                    self.mend()
            finally:
                self.busy = False
        return to if out is None or to is out else out.copy_(to)
