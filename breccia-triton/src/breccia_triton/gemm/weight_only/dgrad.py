"""Products of BF16 arrays and a weight in storage "mma_16x128" whose blocks go across K, on Hopper: dL/dx = dL/dy @ w.

As in `gemm.bf16.matmul`: one pass decodes the weight to BF16, to two numbers for each value where BF16 does not hold it, one
writes the array as often, cuBLAS multiplies, and a last launch computes tiles with a flag in FP32.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ...geometry import divided_up
from ...launch import program
from ...launch.device import empty
from ...launch.executable import Executable
from ...operands import hardware
from ...specs import Unsupported
from ..bf16.matmul import Decoding, multiply
from ..contiguous import ContiguousOperand, need_one_device_for
from . import plans as weight_plans
from .problem import Weight, addresses_of, sizes, stored

#: Chunks that a block decodes, one after the other; blocks that mend.
CHUNKS, MENDERS = 2, 512


def executable(a: ContiguousOperand, b: ContiguousOperand, bias: Any, out_dtype: str, rounds: bool = False) -> Executable:
    """The product of operands with these facts. rounds: values that BF16 does not hold are rounded. Raises Unsupported."""
    st = b.original
    n, k = st.shape
    device = a.data.device
    need_one_device_for(a, b, bias)
    weight_format = weight_plans.weight_format_of(st.recipe.format, st.layout.plain.block(-1))
    if isinstance(weight_format, str):
        raise Unsupported(weight_format)
    copies = 1 if rounds or weight_format.exact else 2
    array = Decoding(a, hardware(device), 0, True, copies)
    m = array.lines
    source = program.source_of(weight_plans.SOURCES / "weight_only_across.cu")
    macros = {**weight_plans.macros_of_decoding(weight_format, out_dtype), "COPIES": copies}
    decode, mend = (program.function(source, f"weight_only_across{end}", macros, 0, device) for end in ("", "_mend"))

    def launch(kernel: Any, grid: Any, threads: int, addresses: int, *integers: int) -> Any:
        weight, pointers = Weight.of(weight_format), [ctypes.c_void_p() for _ in range(addresses)]
        slots = [*weight.slots(weight_format), *pointers]
        return kernel.prepare(grid, threads, [weight, *pointers, *sizes(*integers)], slots).run

    blocks = divided_up(n, weight_plans.ROWS), divided_up(k, weight_plans.COLUMNS * CHUNKS), 1
    first = launch(decode, blocks, 128, 2, m, n, k, CHUNKS)
    tiles = divided_up(m, 64) * divided_up(k, 64)
    last = launch(mend, (min(tiles, MENDERS), 1, 1), 256, 3, m, n, k, n, k)

    def enqueue(stream: int, a: ContiguousOperand, b: ContiguousOperand, added: Any, to: Any) -> None:
        values = empty((copies * n, k), torch.bfloat16, device)
        flags = torch.zeros(1 + m + k, dtype=torch.int32, device=device)
        numbers, st = array(a, flags, stream), b.original
        data, rows, _ = stored(st)
        weight, marks = addresses_of(data, rows, st.global_scale), flags.data_ptr()
        first(stream, *weight, values.data_ptr(), marks)
        multiply(numbers.reshape(m, -1), values, to.view(m, k))
        if not rounds:
            last(stream, *weight, a.x.data_ptr(), to.data_ptr(), marks)

    return Executable(device, (*a.original.shape[:-1], k), out_dtype, enqueue)
