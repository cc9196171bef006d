"""`grouped_matmul` of BF16 arrays and quantized matrices through BF16: as `matmul`, with torch's grouped product of BF16.

It reads the ends of groups on the device, so the host waits for nothing.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from breccia.backend import FLOAT32, ProductOptions, checks, composites

from ...facts import NUMBERS, Argument
from ...geometry import divided_up
from ...launch.cache import Remembered
from ...launch.executable import Executable, remembered
from ...launch.launcher import Launcher
from ...launch.triton_launch import Launch
from ...operands import addresses, hardware
from ..contiguous import ContiguousOperand, need_one_device_for
from .kernels import grouped_mending_kernel
from .matmul import DEPTH, PROGRAMS, TILE, WARPS, Decoding, integers_of
from .plans import numbers_of


def grouped_matmul_bf16(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it."""
    checks.check_grouped(a, b, offsets)
    x, y = ContiguousOperand(a, False, swaps=False), ContiguousOperand(b, True)
    call = remembered(_calls, (x.facts, y.facts, offsets.device), lambda: executable(x, y, offsets))
    if isinstance(call, str):
        return composites.grouped_matmul(a, b, offsets, options)
    return call(x, y, offsets, options.out)


#: Prepared calls; for calls that the kernels do not support, the reason.
_calls = Remembered()


def executable(a: ContiguousOperand, b: ContiguousOperand, offsets: Any) -> Executable:
    """The product of operands with these facts, in BF16. Raises Unsupported."""
    device = a.data.device
    need_one_device_for(a, b, offsets)
    device_hardware = hardware(device)
    copies = numbers_of(b.x.recipe.format)
    first = Decoding(a, device_hardware, 0, True, copies)
    second = Decoding(b, device_hardware, first.lines, False, copies)
    rows, columns, matrices = first.lines, second.lines, second.matrices
    arguments = first.arguments("a") | second.arguments("b")
    arguments |= {name: Argument("*i32") for name in ("flags", "ends")} | {"out": Argument(NUMBERS["bfloat16"])}
    integers = {"rows": rows, "columns": columns, "depth": first.depth, "count": matrices}
    if second.codes is not None and second.codes.groups:
        integers["b_groups"] = second.codes.groups[0]
    constants = {"A": first.constants, "B": second.constants, "TILE": TILE, "DEPTH": DEPTH, "PTX": device_hardware.ptx}
    programs = (min(divided_up(rows, TILE) * divided_up(columns, TILE), PROGRAMS), 1, 1)
    arguments |= integers_of(integers)
    mend = Launcher(Launch(grouped_mending_kernel, programs, arguments, constants, WARPS, tuple(integers.values())))

    def enqueue(stream: int, a: ContiguousOperand, b: ContiguousOperand, offsets: Any, to: None) -> Any:
        flags = torch.zeros(1 + rows + matrices * columns, dtype=torch.int32, device=device)
        ends = offsets.to(torch.int32).contiguous()
        result = multiply(first(a, flags, stream), second(b, flags, stream), ends)
        mend.run(stream, *a.components, *b.components, *addresses([flags, ends]), *addresses([result], 1))
        return result

    return Executable(device, (rows, columns), "bfloat16", enqueue, allocates=True)


def multiply(x: Any, y: Any, ends: Any) -> Any:
    """The products of groups of rows of BF16 numbers in BF16. Sums are FP32; rows of no group are not written."""
    product: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(x, y, offs=ends, out_dtype=torch.bfloat16).contiguous()
