"""A Triton kernel as it is compiled and launched, for any framework. Imports neither one nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..facts import Argument

#: Threads of a warp: of an NVIDIA GPU. AMD's waves have 64 on CDNA.
WARP = 32
#: Of Triton, for every kernel. Products and sums stay apart: the contract rounds both.
OPTIONS = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Launch:
    """A kernel, what it is compiled for, its programs, and the integers that it is passed at every call.

    arguments: of the run-time parameters by name, in the order of the values: arrays, seeds, integers, those of a history,
    strides. Parameters that are absent are None in the kernel. constants: by name. stages: of loops, 0 for Triton's default.
    together: all programs have to run at the same time.
    """

    function: Any
    programs: tuple[int, int, int]
    arguments: dict[str, Argument]
    constants: dict[str, Any]
    warps: int
    integers: tuple[int, ...]
    stages: int = 0
    together: bool = False

    def options(self, wave: int = WARP) -> dict[str, Any]:
        """Triton's options. wave: threads of a warp of the device; `warps` counts those of `WARP` threads."""
        stages = {"num_stages": self.stages} if self.stages else {}
        together = {"launch_cooperative_grid": True} if self.together else {}
        return {"num_warps": max(1, self.warps * WARP // wave), **stages, **together, **OPTIONS}

    @property
    def fixed(self) -> dict[str, int]:
        """The integers by name: they follow the arrays and the seeds."""
        others = (n for n, a in self.arguments.items() if not a.type.startswith("*") and n not in ("seed_low", "seed_high"))
        return dict(zip(others, self.integers, strict=False))
