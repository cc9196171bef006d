"""The end of a training step on CUDA: the histories of all layers take their newest amaxes, and give new scales, in one launch.

`record_amax` does so for one tensor. breccia_torch.training.state has the algorithm, in operations of torch.
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
from ..operands import hardware
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

    places: the addresses of a layer's amaxes (3, LENGTH), scales (3,) and pending amaxes (3,), all FP32 bits. FIRST, SECOND,
    THIRD: the `Row` of each tensor, None without delayed scaling.
    """
    layer = places + 3 * tl.program_id(0)
    amaxes = tl.load(layer).to(tl.pointer_type(tl.int32))
    scales = tl.load(layer + 1).to(tl.pointer_type(tl.int32))
    pending = tl.load(layer + 2).to(tl.pointer_type(tl.int32))
    _end_row(amaxes, scales, pending, FIRST, LENGTH, BLOCK, PTX)
    _end_row(amaxes + LENGTH, scales + 1, pending + 1, SECOND, LENGTH, BLOCK, PTX)
    _end_row(amaxes + 2 * LENGTH, scales + 2, pending + 2, THIRD, LENGTH, BLOCK, PTX)


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


class Ender:
    """Ends the step of layers on one device whose histories have the same recipes and the same length."""

    def __init__(self, rows: Sequence[Row | None], length: int, ptx: bool) -> None:
        self.constants: dict[str, Any] = dict(zip(("FIRST", "SECOND", "THIRD"), rows, strict=True))
        self.constants |= {"LENGTH": length, "BLOCK": power_of_two(length), "PTX": ptx}
        #: By the device and the addresses of all buffers: these addresses there, and the launch.
        self.known = Remembered()
        #: What graphs read must stay.
        self.captured: dict[Any, Any] = {}

    def __call__(self, amaxes: Sequence[Any], scales: Sequence[Any], pending: Sequence[Any]) -> bool:
        """Write the amaxes (3, length), the scales (3,) and the pending amaxes (3,) of each layer: int32, the bits of FP32.

        False, and nothing is written, where buffers are not contiguous, and for a CUDA graph of layers whose steps have never
        ended outside of one.
        """
        buffers = [buffer for layer in zip(amaxes, scales, pending, strict=True) for buffer in layer]
        if not all(buffer.is_contiguous() for buffer in buffers):
            return False
        device = pending[0].device
        key = device, *[buffer.data_ptr() for buffer in buffers]
        captured = is_captured(pending[0])
        known = self.known.get(key)
        if known is None:
            if captured:  # a copy from the host would be part of the graph
                return False
            launch = Launch(end_kernel, (len(pending), 1, 1), {"places": Argument("*i64")}, self.constants, 1, ())
            known = self.known.keep(key, (torch.tensor(key[1:], dtype=torch.int64, device=device), Launcher(launch)))
        if captured:
            self.captured[key] = known
        places, launcher = known
        with on(device):
            launcher.run(current_stream(device), places if INTERPRETED else places.data_ptr())
        torch.autograd.graph.increment_version(buffers)
        return True


def ender(recipes: Sequence[DelayedScaling | None], length: int, device: torch.device) -> Ender | None:
    """What ends steps of histories of that length, with these recipes of input, weight and gradient; None if it cannot."""
    rows: list[Row | None] = []
    for recipe in recipes:
        spec = None if recipe is None else spec_of(recipe)
        if isinstance(spec, str):
            return None
        rows.append(None if recipe is None or spec is None else Row(spec, recipe.amax_history_len))
    return Ender(rows, length, hardware(device).ptx)
