"""What products of torch tensors by kernels of this package share: operands in C order, and calls that are prepared once."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from breccia import ScaledTensor
from breccia.backend import ProductOptions, composites
from breccia_torch.ops import need_dense

from ..launch.cache import Remembered
from ..launch.executable import Executable, remembered
from ..operands import addresses, components_of, facts_of, need_one_device, parts_of


class ContiguousOperand:
    """An operand whose numbers or codes are in C order in memory: K last, or, where `k_last` is false, first.

    original: the operand of the call. swaps: may it be transposed? x: it, or with `swapped` its transpose, in C order; a copy
    if it is in neither order.
    """

    def __init__(self, original: Any, second: bool, swaps: bool = True) -> None:
        self.original, self.scaled = original, isinstance(original, ScaledTensor)
        data = original.data if self.scaled else original
        need_dense(data)
        swapped = swaps and not data.is_contiguous() and data.mT.is_contiguous()
        x: Any = original.mT if swapped else original
        if not (swapped or data.is_contiguous()):
            x = _contiguous(original) if self.scaled else original.contiguous()
        self.x = x
        self.swapped, self.k_last = swapped, swapped == second
        own = facts_of(x) if self.scaled else (x.shape, x.dtype, x.device, x.data_ptr() % 16 == 0)
        self.facts = (swapped, *own)

    @property
    def data(self) -> Any:
        return self.x.data if self.scaled else self.x

    @property
    def global_scale(self) -> Any:
        return self.x.global_scale if self.scaled else None

    @property
    def components(self) -> list[Any]:
        """What a kernel reads of it."""
        return addresses(components_of(self.x)) if self.scaled else addresses([self.x], 1)


def _contiguous(st: ScaledTensor) -> ScaledTensor:
    """The tensor with codes in C order."""
    return ScaledTensor.from_parts(
        st.data.contiguous(), st.scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.padding
    )


def need_one_device_for(a: ContiguousOperand, b: ContiguousOperand, bias: Any) -> None:
    """Raise UnsupportedError unless all arrays of a product are on one device."""
    need_one_device(a.data.device, [("bias", bias), *parts_of("a", a.x), *parts_of("b", b.x)])


#: Returns the executable for (a, b, bias, name of the result's dtype). Raises Unsupported.
Make = Callable[[ContiguousOperand, ContiguousOperand, Any, str], Executable]


def prepared(
    calls: Remembered, make: Make, a: ContiguousOperand, b: ContiguousOperand, bias: Any, out_dtype: str
) -> Executable | str:
    """The executable for operands with these facts, which `calls` remembers; or why `make` refuses them."""
    key = (a.facts, b.facts, out_dtype, None if bias is None else (bias.dtype, bias.device))
    return remembered(calls, key, lambda: make(a, b, bias, out_dtype))


def multiplied(calls: Remembered, make: Make, a: ContiguousOperand, b: ContiguousOperand, options: ProductOptions) -> Any:
    """The product by an executable that `calls` remembers, or by decoding where `make` refuses."""
    out_dtype, bias, out = options
    call = prepared(calls, make, a, b, bias, out_dtype)
    if isinstance(call, str):
        return composites.matmul(a.original, b.original, options)
    return call(a, b, bias, out)
