"""`grouped_matmul` of BF16 arrays and quantized matrices through BF16: as `bf16_matmul`, with torch's grouped product of BF16.

It reads the ends of groups on the device, so the host waits for nothing.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from breccia.backend import FLOAT32, ProductOptions, checks, composites

from .bf16_kernels import grouped_mending_kernel
from .bf16_matmul import DEPTH, PROGRAMS, TILE, WARPS, Decoding, integers_of
from .bf16_plans import numbers_of
from .facts import NUMBERS, Argument
from .geometry import divided_up
from .launch import Launcher, Remembered, current_stream, on
from .multiplying import Operand, need_one_device_for
from .operands import addresses, hardware
from .prepare import Launch
from .specs import Unsupported


def grouped_matmul_bf16(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """`grouped_matmul` as `breccia.grouped_matmul` documents it."""
    checks.check_grouped(a, b, offsets)
    x, y = Operand(a, False, swaps=False), Operand(b, True)
    key = x.facts, y.facts, offsets.device
    call = _calls.get(key)
    if call is None:
        try:
            call = Call(x, y, offsets)
        except Unsupported as e:
            call = str(e)
        _calls.keep(key, call)
    if isinstance(call, str):
        return composites.grouped_matmul(a, b, offsets, options)
    with on(call.device):
        found = call(x, y, offsets)
    return found if options.out is None else options.out.copy_(found)


#: Prepared calls; for calls that the kernels do not support, the reason.
_calls = Remembered()


class Call:
    """What products of equal shapes, dtypes and recipe have in common: their kernels, compiled. Raises Unsupported."""

    def __init__(self, a: Operand, b: Operand, offsets: Any) -> None:
        self.device = a.data.device
        need_one_device_for(a, b, offsets)
        device_hardware = hardware(self.device)
        copies = numbers_of(b.x.recipe.format)
        self.a = Decoding(a, device_hardware, 0, True, copies)
        self.b = Decoding(b, device_hardware, self.a.lines, False, copies)
        rows, columns, count = self.a.lines, self.b.lines, self.b.matrices
        self.flags = 1 + rows + count * columns
        arguments = self.a.arguments("a") | self.b.arguments("b")
        arguments |= {name: Argument("*i32") for name in ("flags", "ends")} | {"out": Argument(NUMBERS["bfloat16"])}
        integers = {"rows": rows, "columns": columns, "depth": self.a.depth, "count": count}
        if self.b.codes is not None and self.b.codes.groups:
            integers["b_groups"] = self.b.codes.groups[0]
        constants = {"A": self.a.side, "B": self.b.side, "TILE": TILE, "DEPTH": DEPTH, "PTX": device_hardware.ptx}
        programs = (min(divided_up(rows, TILE) * divided_up(columns, TILE), PROGRAMS), 1, 1)
        arguments |= integers_of(integers)
        launch = Launch(grouped_mending_kernel, programs, arguments, constants, WARPS, tuple(integers.values()))
        self.mend = Launcher(launch)

    def __call__(self, a: Operand, b: Operand, offsets: Any) -> Any:
        """The product in BF16, on the current device."""
        stream = current_stream(self.device)
        flags = torch.zeros(self.flags, dtype=torch.int32, device=self.device)
        ends = offsets.to(torch.int32).contiguous()
        to = multiply(self.a(a, flags, stream), self.b(b, flags, stream), ends)
        self.mend(stream, (*a.components, *b.components, *addresses([flags, ends]), *addresses([to], 1)))
        return to


def multiply(x: Any, y: Any, ends: Any) -> Any:
    """The products of groups of rows of BF16 numbers in BF16. Sums are FP32; rows of no group are not written."""
    product: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(x, y, offs=ends, out_dtype=torch.bfloat16).contiguous()
