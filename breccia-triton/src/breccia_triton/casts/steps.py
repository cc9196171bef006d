"""Histories of layers in training on CUDA: a pass notes its amaxes, and a step of all layers ends, in one launch each.

breccia_torch.training.state has both in operations of torch.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from breccia import DelayedScaling
from breccia_torch.ops import is_captured

from ..facts import INTERPRETED, Argument
from ..geometry import power_of_two
from ..launch.cache import Remembered
from ..launch.device import current_stream, on
from ..launch.launcher import Launcher
from ..launch.triton_launch import Launch
from ..numerics import INF, NORMAL, number, scale_codes
from ..operands import addresses, hardware
from ..specs import Spec, spec_of


@dataclass(frozen=True)
class Row:
    """The history of one tensor. length: how many of the newest amaxes give its scale."""

    spec: Spec
    length: int


@triton.jit
def end_kernel(
    places, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """End the step of one layer for each program.

    places: the addresses of a layer's amaxes (3, LENGTH), scales (3,) and pending amaxes (3,), all FP32 bits, and of its draws,
    int64 (2,). FIRST, SECOND, THIRD: the `Row` of each tensor, None without delayed scaling.
    """
    layer = places + 4 * tl.program_id(0)
    amaxes = tl.load(layer).to(tl.pointer_type(tl.int32))
    scales = tl.load(layer + 1).to(tl.pointer_type(tl.int32))
    pending = tl.load(layer + 2).to(tl.pointer_type(tl.int32))
    _end_row(amaxes, scales, pending, FIRST, LENGTH, BLOCK, PTX)
    _end_row(amaxes + LENGTH, scales + 1, pending + 1, SECOND, LENGTH, BLOCK, PTX)
    _end_row(amaxes + 2 * LENGTH, scales + 2, pending + 2, THIRD, LENGTH, BLOCK, PTX)
    steps = tl.load(layer + 3).to(tl.pointer_type(tl.int64)) + 1
    tl.store(steps, tl.load(steps) + 1)


@triton.jit
def _end_row(
    amaxes, scale, pending, ROW: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """The end of a step for one tensor of a layer; a tensor without delayed scaling has the scale 0."""
    at = tl.arange(0, BLOCK)
    newest = tl.load(pending)
    old = tl.load(amaxes + at, mask=at < LENGTH, other=0)
    moved = tl.load(amaxes + at + 1, mask=at + 1 < LENGTH, other=0)
    moved = tl.where(at == LENGTH - 1, newest, moved)
    now = tl.where(newest >= NORMAL, moved, old)
    tl.debug_barrier()  # all threads have read
    tl.store(amaxes + at, now, mask=at < LENGTH)
    tl.store(pending, 0)
    codes = tl.zeros((1, 1), tl.int32)
    if ROW is not None:
        SCALE: tl.constexpr = ROW.spec.scale
        largest = tl.max(tl.where(at >= LENGTH - ROW.length, now, 0), 0)
        usable = (largest >= NORMAL) & (largest < INF)
        statistic = number(tl.where(usable, codes + largest, 0))
        codes = tl.where(usable, scale_codes(statistic, 1.0, SCALE, False, False, PTX), 0)
    tl.store(scale + tl.zeros((1, 1), tl.int32), codes)


@triton.jit
def note_kernel(pending, input, weight, gradient):
    """Raise the pending amaxes (3,) to those of a pass, which are FP32 bits; None for tensors without one.

    An amax that is NaN or infinite is left out. That of a gradient also removes what is pending of input and gradient.
    """
    if weight is not None:
        tl.store(pending + 1, tl.maximum(tl.load(pending + 1), _finite(tl.load(weight))))
    if input is not None or gradient is not None:
        of_input, of_gradient = tl.load(pending), tl.load(pending + 2)
        if input is not None:
            of_input = tl.maximum(of_input, _finite(tl.load(input)))
        if gradient is not None:
            newest = tl.load(gradient)
            valid = newest == _finite(newest)
            of_input = tl.where(valid, of_input, 0)
            of_gradient = tl.where(valid, tl.maximum(of_gradient, newest), 0)
        tl.store(pending, of_input)
        tl.store(pending + 2, of_gradient)


@triton.jit
def _finite(amax):
    """The bits of a finite amax; 0 for others."""
    return tl.where((amax >= 0) & (amax < INF), amax, 0)


#: By what an end is compiled for, the device and the addresses of all buffers: the addresses on the device, and the launcher.
_known = Remembered()
#: The same of ends that are captured in CUDA graphs, which read the addresses in every replay.
_captured: dict[Any, Any] = {}


class Histories:
    """What `end_histories` and `_History.note` of breccia_torch.training.state do, for layers of equal recipes and lengths."""

    def __init__(self, rows: Sequence[Row | None], length: int, ptx: bool) -> None:
        self.constants: dict[str, Any] = dict(zip(("FIRST", "SECOND", "THIRD"), rows, strict=True))
        self.constants |= {"LENGTH": length, "BLOCK": power_of_two(length), "PTX": ptx}
        self.key = tuple(self.constants.values())
        #: The launches of `note` by the device and the tensors that have an amax.
        self.notes: dict[Any, Launcher] = {}

    def end(self, amaxes: Sequence[Any], scales: Sequence[Any], pending: Sequence[Any], draws: Sequence[Any]) -> bool:
        """Write the amaxes (3, length), the scales (3,) and the pending amaxes (3,) of each layer, and count the step in draws.

        False, and nothing is written, where they are not contiguous on one device, and for a CUDA graph of layers whose steps
        have never ended outside of one.
        """
        buffers = [buffer for layer in zip(amaxes, scales, pending, draws, strict=True) for buffer in layer]
        device = pending[0].device
        if not all(buffer.is_contiguous() and buffer.device == device for buffer in buffers):
            return False
        if INTERPRETED and device.type != "cpu":  # the interpreter reads memory of the host
            return False
        key = self.key, device, *[buffer.data_ptr() for buffer in buffers]
        captured = is_captured(pending[0])
        known = _captured.get(key) or _known.get(key)
        if known is None:
            if captured:  # a copy from the host would be part of the graph
                return False
            launch = Launch(end_kernel, (len(pending), 1, 1), {"places": Argument("*i64")}, self.constants, 1, ())
            known = _known.keep(key, (torch.tensor(key[2:], dtype=torch.int64, device=device), Launcher(launch)))
        if captured:
            _captured[key] = known
        places, launcher = known
        with on(device):
            launcher.run(current_stream(device), places if INTERPRETED else places.data_ptr())
        torch.autograd.graph.increment_version(buffers)
        return True

    def note(self, pending: Any, **amaxes: Any) -> None:
        """Raise the pending amaxes (3,) of a layer to those of a pass: input=, weight=, gradient=, FP32 of shape (1,)."""
        device = pending.device
        key = device, *amaxes
        launcher = self.notes.get(key)
        if launcher is None:
            arguments = {name: Argument("*i32") for name in ("pending", *amaxes)}
            launcher = self.notes[key] = Launcher(Launch(note_kernel, (1, 1, 1), arguments, {}, 1, ()))
        with on(device):
            launcher.run(current_stream(device), *addresses([pending, *amaxes.values()]))


def histories(recipes: Sequence[DelayedScaling | None], length: int, device: torch.device) -> Histories | None:
    """The kernels for histories of that length, with these recipes of input, weight and gradient; None if there are none."""
    rows: list[Row | None] = []
    for recipe in recipes:
        spec = None if recipe is None else spec_of(recipe)
        if isinstance(spec, str):
            return None
        rows.append(None if recipe is None or spec is None else Row(spec, recipe.amax_history_len))
    return Histories(rows, length, hardware(device).ptx)
