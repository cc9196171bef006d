"""`matmul` on CUDA tensors of torch by kernels that decode quantized operands in registers; `plans` has the idea."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch

from breccia.backend import FLOAT32, ProductOptions, checks, dtype_name

from ...casts.plans import readable
from ...facts import Hardware
from ...launch.cache import Remembered
from ...launch.device import empty
from ...launch.executable import Executable
from ...launch.launcher import Launcher
from ...launch.triton_launch import Launch
from ...operands import addresses, codes_of, hardware, leading
from ...specs import Unsupported, needed
from ...tuning import timing
from ...tuning.choices import Choose
from ..contiguous import ContiguousOperand, multiplied, need_one_device_for
from .prepare import OperandFacts, Product, scaled


def fused_matmul(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    """`matmul` as `breccia.matmul` documents it. a: an array, or a tensor of FP8; b: a ScaledTensor."""
    checks.check_matmul(a, b, options.bias)
    return multiplied(_calls, _new_call, ContiguousOperand(a, False, swaps=False), ContiguousOperand(b, True), options)


#: Prepared calls; for calls that the kernels do not support, the reason.
_calls = Remembered()


def described(operand: ContiguousOperand, merged: bool, hardware: Hardware) -> OperandFacts:
    """The facts of an operand. merged: leading axes are rows, where they can be. Raises Unsupported."""
    x = operand.x
    if operand.scaled:
        return scaled(codes_of(x, needed(readable(x.recipe, x.layout)), merged, hardware), x.recipe.format)
    *lead, rows, depth = x.shape
    count = math.prod(lead)
    matrices, rows = (1, count * rows) if merged else (count, rows)
    return OperandFacts(matrices, rows, depth, True, dtype_name(x), aligned=x.data_ptr() % 16 == 0)


def _new_call(a: ContiguousOperand, b: ContiguousOperand, bias: Any, out_dtype: str) -> Executable:
    """The product of operands with these facts, tuned on request. Raises Unsupported."""
    device = a.data.device
    need_one_device_for(a, b, bias)
    if 0 in (*a.original.shape, *b.original.shape):
        raise Unsupported("an empty tensor")
    device_hardware = hardware(device)

    def prepare(choose: Choose) -> Product:
        return prepared(a, b, bias, out_dtype, device_hardware, choose)

    def compiled(product: Product) -> Any:
        call = executable(a, b, out_dtype, product)
        return lambda: call(a, b, bias, None)

    return executable(a, b, out_dtype, timing.tuned(prepare, launches, compiled, device, device_hardware.name))


def prepared(
    a: ContiguousOperand, b: ContiguousOperand, bias: Any, out_dtype: str, hardware: Hardware, choose: Choose
) -> Product:
    """A call prepared for hardware under choices. Raises Unsupported."""
    sides = described(a, math.prod(b.original.shape[:-2]) == 1, hardware), described(b, False, hardware)
    return Product(*sides, None if bias is None else dtype_name(bias), out_dtype, hardware, choose)


def launches(product: Product) -> list[Launch]:
    """The kernels of a product."""
    return [product.launch] if product.sum is None else [product.launch, product.sum]


def executable(a: ContiguousOperand, b: ContiguousOperand, out_dtype: str, product: Product) -> Executable:
    """The kernels of a product, compiled."""
    left, right, device = tuple(a.original.shape), tuple(b.original.shape), a.data.device
    multiply, add_up = Launcher(product.launch), None if product.sum is None else Launcher(product.sum)

    def enqueue(stream: int, a: ContiguousOperand, b: ContiguousOperand, bias: Any, to: Any) -> None:
        added, operands = [] if bias is None else [bias.contiguous()], (*a.components, *b.components)
        if add_up is None:
            return multiply.run(stream, *operands, *addresses([*added, to], 1 + len(added)))
        parts = empty(product.parts, torch.float32, device)
        multiply.run(stream, *operands, *addresses([parts], 1))
        add_up.run(stream, *addresses([parts, *added, to], 2 + len(added)))

    return Executable(device, (*leading(left, right), left[-2], right[-1]), out_dtype, enqueue, product)
