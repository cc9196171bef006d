"""`dequantize` on CUDA tensors of torch."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from breccia import ScaledTensor
from breccia.backend import FLOAT32, ProductOptions, components, product_options, reference
from breccia.internal import with_parts
from breccia_torch.ops import TORCH

from ..facts import INTERPRETED, Hardware
from ..launch.cache import Remembered
from ..launch.executable import Executable, remembered
from ..launch.launcher import Launcher
from ..launch.triton_launch import Launch
from ..operands import addresses, codes_of, components_of, facts_of, hardware, writable
from ..specs import Unsupported, needed
from ..tuning import timing
from ..tuning.choices import Choose
from .plans import readable
from .prepare import decoding


def dequantize(st: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """`dequantize` as `breccia.dequantize` documents it.

    A transposed view of a contiguous tensor decodes into such a view. Codes of other views are copied first.
    """
    out_dtype, _, out = options
    data = st.data
    if out is None and data.ndim > 1 and not data.is_contiguous() and data.mT.is_contiguous():
        return dequantize(st.mT, options).mT
    if not data.is_contiguous():
        st = with_parts(st, components(st) | {"data": data.contiguous()})
    key = (out_dtype, *facts_of(st))
    call = _calls.get(key)
    if call is None:
        call = remembered(_calls, key, lambda: _new_call(st, out_dtype))
    if isinstance(call, str):
        return reference.dequantize(st, options)
    if out is not None and not writable(out, call.shape, call.dtype, call.device):
        return reference.result(TORCH, dequantize(st, product_options(out_dtype)), "float32", out)
    return call(st, None, None, out)


#: Prepared calls; for calls that the kernel does not support, the reason.
_calls = Remembered()


def _new_call(st: ScaledTensor, out_dtype: str) -> Executable:
    """The call for these arguments, tuned on request. Raises Unsupported."""
    device = st.data.device
    device_hardware = hardware(device)

    def prepare(choose: Choose) -> Launch:
        return prepared(st, out_dtype, device_hardware, choose)

    def compiled(launch: Launch) -> Any:
        call = executable(st, out_dtype, launch)
        return lambda: call(st, None, None, None)

    return executable(st, out_dtype, timing.tuned(prepare, timing.one, compiled, device, device_hardware.name))


def prepared(st: ScaledTensor, out_dtype: str, hardware: Hardware, choose: Choose) -> Launch:
    """A call prepared for hardware under choices. Raises Unsupported."""
    spec = needed(readable(st.recipe, st.layout))
    if 0 in st.shape:
        raise Unsupported("an empty tensor")
    return decoding(codes_of(st, spec, True, hardware), out_dtype, choose)


def executable(st: ScaledTensor, out_dtype: str, launch: Launch) -> Executable:
    """The kernel, compiled."""
    kernel = Launcher(launch)

    def enqueue(stream: int, st: ScaledTensor, other: None, added: None, to: Any) -> None:
        kernel.run(stream, *addresses(components_of(st)), to if INTERPRETED else to.data_ptr())

    return Executable(st.data.device, tuple(st.shape), out_dtype, enqueue, launch)
