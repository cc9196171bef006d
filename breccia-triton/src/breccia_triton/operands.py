"""Tensors of torch as kernels read and write them: their facts, which are looked up once, and their addresses for each call."""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from breccia import ScaledTensor, UnsupportedError
from breccia.backend import PLAIN, dtype_name
from breccia_torch.ops import TORCH

from .facts import INTERPRETED, LARGE, Array, Codes, Component, Hardware, Numbers, Written
from .launch.device import allocator
from .specs import Spec, Unsupported
from .tuning.measurements import name_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Warps that a multiprocessor of an NVIDIA GPU runs at the same time, however many registers they have.
_RESIDENT = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def hardware(device: torch.device) -> Hardware:
    """What kernels may use on a device."""
    if INTERPRETED or device.type != "cuda":
        return Hardware(resident=1)  # the interpreter runs one program after the other
    nvidia, facts = torch.version.cuda is not None, torch.cuda.get_device_properties(device)
    fp8 = nvidia and (facts.major, facts.minor) >= (8, 9)
    return Hardware(
        nvidia, fp8, name_of(facts) if nvidia else facts.name, _RESIDENT * facts.multi_processor_count if nvidia else 0
    )


def need_one_device(here: torch.device, named: Iterable[tuple[str, Any]]) -> None:
    """Raise UnsupportedError unless all arrays of a product, by what they are (None: absent), are where the codes of a are."""
    for name, x in named:
        if x is not None and x.device != here:
            raise UnsupportedError(f"matmul: a is on {here}, and {name} on {x.device}; move it: x.to({str(here)!r}).")


def parts_of(name: str, x: Any) -> list[tuple[str, Any]]:
    """The arrays of an operand, by what they are, for `need_one_device`."""
    if not isinstance(x, ScaledTensor):
        return [(name, x)]
    parts = ("codes", x.data), ("scale", x.scale), ("zero-point", x.zero_point), ("global scale", x.global_scale)
    return [(f"{name}'s {what}", part) for what, part in parts]


def leading(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The leading axes of a product of shapes (..., M, K) and (..., K, N), which broadcast.

    By NumPy: `torch.broadcast_shapes` imports SymPy, which takes two seconds of a first call.
    """
    return np.broadcast_shapes(a[:-2], b[:-2])


def addresses(tensors: list[Any], numbers: int = 0) -> list[Any]:
    """Addresses; the interpreter takes tensors instead, of codes as integers, after as many arrays of numbers."""
    if INTERPRETED:
        return [*tensors[:numbers], *(a.view(_WORDS[a.dtype.itemsize]) for a in tensors[numbers:])]
    return [a.data_ptr() for a in tensors]


def columns_adjacent(x: Any) -> bool:
    """Whether it is a view whose columns are contiguous: kernels work on its transpose, and the result is one too."""
    return x.ndim > 1 and not x.is_contiguous() and x.stride(-2) == 1 and x.stride(-1) != 1


def writable(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel can write into `out` as it writes into a new tensor"""
    return (
        type(out) is torch.Tensor
        and tuple(out.shape) == shape
        and out.dtype == dtype
        and out.device == device
        and out.is_contiguous()
        and out.data_ptr() % 16 == 0
    )


def span(x: Any) -> int:
    """The distance between the first and the last element of a tensor in memory."""
    return sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride(), strict=True))


def array_of(x: Any) -> Array:
    """The facts of a tensor of numbers."""

    def flat(shape: tuple[int, int, int]) -> Numbers:
        strided = not (x if x.is_contiguous() else x.reshape(shape)).is_contiguous()
        large = max(x.numel(), span(x)) >= LARGE
        return Numbers(shape, dtype_name(x), x.data_ptr() % 16 == 0, strided, large)

    return Array(tuple(x.shape), dtype_name(x), x.is_contiguous(), flat)


def facts_of(st: ScaledTensor) -> tuple[Any, ...]:
    """What `codes_of` depends on, for the keys of prepared calls."""
    data, zero_point, global_scale = st.data, st.zero_point, st.global_scale
    return (
        st.recipe.interned_key, st.layout.interned_key, st.axis, st.padding, data.shape, data.dtype, data.device,
        data.is_contiguous(), data.data_ptr() % 16 == 0, st.scale.shape, st.scale.dtype, st.scale.device, turned_scales(st),
        zero_point is None or (zero_point.shape, zero_point.dtype, zero_point.device),
        global_scale is None or (global_scale.shape, global_scale.dtype, global_scale.device),
    )  # fmt: skip


def codes_of(st: ScaledTensor, spec: Spec, merged: bool, other: Hardware | None = None) -> Codes:
    """The facts of a ScaledTensor. merged: as of `Codes`. other: hardware other than its device. Raises Unsupported."""
    parts: dict[str, Component | None] = {}
    for name in st.recipe.format.parts:
        part = getattr(st, name)
        here = isinstance(part, torch.Tensor) and part.device == st.data.device
        parts[name] = Component(tuple(part.shape), dtype_name(part), part.data_ptr() % 16 == 0) if here else None
    if not st.data.is_contiguous():
        raise Unsupported("its data is not contiguous")
    chosen = other or hardware(st.data.device)
    return Codes(st, spec, parts, TORCH.dtypes(st.recipe.format), chosen, merged, turned_scales(st))


def turned_scales(st: ScaledTensor) -> bool:
    """Whether columns of its scales are contiguous, not rows: in the transpose of what a cast down the columns wrote."""
    scale, zero_point = st.scale, st.zero_point
    recorded = st.recipe.format.scale_record is not None
    if scale.ndim < 2 or st.axis != -1 or scale.is_contiguous() or st.layout.storage != PLAIN or recorded:
        return False
    return scale.mT.is_contiguous() and (zero_point is None or zero_point.mT.is_contiguous())


def components_of(st: ScaledTensor) -> list[Any]:
    """The components of a ScaledTensor as kernels read them."""
    if turned_scales(st):
        offsets = [] if st.zero_point is None else [st.zero_point]
        return [st.data, st.scale, *offsets, *([] if st.global_scale is None else [st.global_scale])]
    components, zero_point, global_scale = [st.data, st.scale.contiguous()], st.zero_point, st.global_scale
    if zero_point is not None:
        components.append(zero_point.contiguous())
    if global_scale is not None:
        components.append(global_scale.contiguous())
    return components


class ResultBuffers:
    """The components of a result in memory. device: where they are allocated."""

    def __init__(self, written: Written, device: torch.device) -> None:
        self.written, self.tensor = written, written.tensor
        self.parts = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in written.parts]
        self.allocators = [
            partial(torch.zeros, shape, dtype=dtype, device=device)
            if name in written.padded
            else allocator(shape, dtype, device, name in written.columns)
            for name, shape, dtype in self.parts
        ]

    def allocated(self) -> list[Any]:
        """New ones, on the current device."""
        return [allocate() for allocate in self.allocators]

    def of(self, out: Any, device: torch.device) -> list[Any] | None:
        """Those of `out` where the kernel can write into them, else None."""
        written = self.written
        if not isinstance(out, ScaledTensor):
            return None
        if (out.recipe, out.layout, out.axis) != (written.recipe, written.layout, written.axis):
            return None
        parts = [getattr(out, name) for name, _, _ in self.parts]
        ordered = [part.mT if name in written.columns else part for part, (name, _, _) in zip(parts, self.parts, strict=True)]
        fits = all(
            writable(part, (*shape[:-2], shape[-1], shape[-2]) if name in written.columns else shape, dtype, device)
            for part, (name, shape, dtype) in zip(ordered, self.parts, strict=True)
        )
        return parts if fits else None
