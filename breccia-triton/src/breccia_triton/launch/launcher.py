"""Compiling and launching Triton kernels with little work per call.

Triton's own launch path inspects every argument at every call. Here the constants, the types of arguments and their alignment
are decided once; a call passes addresses and integers. Compiled kernels are cached on disk by Triton.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime import cache

from breccia.internal import reentrant

from ..facts import INTERPRETED
from .cache import Remembered
from .generated import defined
from .package_key import remembered
from .triton_launch import WARP, Launch

#: Versions of Triton whose launcher has the arguments that `Launcher` passes.
_KNOWN = "3.6."
if not INTERPRETED and triton.__version__.startswith(_KNOWN):
    # The function that Triton's compiler calls for its key. Half of the time of the first call of a process.
    cache.triton_key = remembered(cache.triton_key, Path(triton.__file__).parent, triton.__version__)


class Launcher:
    """A prepared launch, compiled for one device.

    run: f(stream, *values), which enqueues the kernel on the current device. values: as of `__call__`; none are interpreted.
    """

    def __init__(self, launch: Launch, target: Any = None) -> None:
        self.launch = launch
        self.names: Sequence[str] = launch.function.arg_names
        self.fixed = launch.fixed
        self.varying = [name for name in launch.arguments if name not in self.fixed]
        self.run: Callable[..., None] = self._interpreted if INTERPRETED else self._first
        if not INTERPRETED:
            arguments, constants = launch.arguments, launch.constants
            absent = {name: None for name in self.names if name not in arguments and name not in constants}
            values = {**constants, **absent}
            signature = {name: "constexpr" if name in values else arguments[name].type for name in self.names}
            divisible = {
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(self.names) if n in arguments and arguments[n].aligned
            }
            self.key: Any = (
                launch.function, tuple(launch.arguments.items()), tuple(launch.constants.items()), launch.warps, launch.stages,
                launch.together, target,
            )  # fmt: skip
            self.compiled = _compiled.get(self.key)
            if self.compiled is None:
                source = ASTSource(launch.function, signature, values, divisible)
                options = launch.options(_wave() if target is None else target.warp_size)
                self.compiled = _compiled.keep(self.key, triton.compile(source, target=target, options=options))

    def __call__(self, stream: int, values: Iterable[Any]) -> None:
        """Launch on the current device. values: tensors' addresses and integers, in the order of `arguments`, but those of
        `launch.integers`, which are the same in every launch."""
        self.run(stream, *values)

    def _interpreted(self, stream: int, *values: Any) -> None:
        launch = self.launch
        rest = {name: launch.constants.get(name) for name in self.names if name not in launch.arguments}
        launch.function[launch.programs](**dict(zip(self.varying, values, strict=True)), **self.fixed, **rest)

    def _first(self, stream: int, *values: Any) -> None:
        """The first launch loads the module on the current device."""
        self.run = self._loaded()
        self.run(stream, *values)

    def _loaded(self) -> Callable[..., None]:
        place = self.key, torch.cuda.current_device()
        compiled = _modules.get(place)
        if compiled is None:
            compiled = _modules.keep(place, copy(self.compiled))  # loaded on one device
        with _turn:
            launcher = compiled.run  # loads the module, and sets itself before the function's handle
        handle, metadata = compiled.function, compiled.packed_metadata
        hooks = (metadata, None, None, None)
        scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
        if triton.__version__.startswith(_KNOWN) and scratch == [0, 0]:
            # Its compiled part, without the Python around it, which allocates memory that these kernels do not need.
            fixed = (handle, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *hooks)
            return self._written_out(launcher.launch, fixed)
        return self._written_out(launcher, (handle, *hooks))

    def _written_out(self, run: Any, fixed: Sequence[Any]) -> Callable[..., None]:
        """A function of the stream and the values alone. Its text has no numbers: they differ by lengths alone."""
        held = {f"_{n}": value for n, value in enumerate((*self.launch.programs, *fixed))}
        held |= {f"_{name}": number for name, number in self.fixed.items()}
        passed = [name if name in self.varying else f"_{name}" if name in self.fixed else "None" for name in self.names]
        first, rest = [f"_{n}" for n in range(3)], [f"_{n}" for n in range(3, 3 + len(fixed))]
        text = f"def run({', '.join(['_stream', *self.varying])}):\n    _run({', '.join([*first, '_stream', *rest, *passed])})"
        return defined(text, {**held, "_run": run})


def _wave() -> int:
    """Threads of a warp of the current device."""
    return WARP if torch.version.hip is None else torch.cuda.get_device_properties().warp_size


#: Compiled kernels, by all that they are compiled for, and those that are loaded, by that and the device. A call with other
#: lengths alone takes the same one: Triton would look for it on disk, which takes milliseconds.
_compiled, _modules = Remembered(), Remembered()
#: Threads load modules one at a time.
_turn = reentrant()
