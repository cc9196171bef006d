"""Core as a plug-in of itself: everything in `breccia` that a call can reach, through the public hooks only."""

from __future__ import annotations

from collections.abc import Iterable

from .codecs import CODECS, Codec
from .dispatch import ANY_FRAMEWORK, Kernel
from .frameworks import Framework
from .hookspecs import Command, hookimpl
from .layouts import LAYOUTS, Layout
from .recipes import RECIPES, ScalingRecipe
from .rules import RULES, Rule

api = 1

#: Below any kernel a plug-in declares: the generic algorithm serves what nothing else does.
_LAST = -1000
#: Above that, and below plug-ins too.
_FAST = -500


@hookimpl
def breccia_codecs() -> Iterable[Codec]:
    return CODECS


@hookimpl
def breccia_rules() -> Iterable[Rule]:
    return RULES


@hookimpl
def breccia_layouts() -> Iterable[type[Layout]]:
    return LAYOUTS


@hookimpl
def breccia_recipes() -> Iterable[type[ScalingRecipe]]:
    return RECIPES


@hookimpl
def breccia_frameworks() -> Iterable[Framework]:
    refuses = (
        ("matrix", "Pass np.asarray(x)."),
        ("ma.MaskedArray", "Say what stands for its masked elements: pass x.filled(value)."),
    )
    return [
        Framework("numpy", "numpy", ("ndarray", "generic"), "breccia.ops:NUMPY", refuses, "breccia.threads:devices", ("cpu",))
    ]


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    reference = "breccia.kernels.reference"
    for op in ("cast", "dequantize", "requantize", "matmul"):
        yield Kernel(op, ANY_FRAMEWORK, f"{reference}:{op}", f"reference.{op}", rank=_LAST)
    numpy = "breccia.kernels.numpy"
    yield Kernel("cast", "numpy", f"{numpy}:cast", "numpy.cast", rank=_FAST, accepts=f"{numpy}:accepts_cast")
    for op in ("dequantize", "requantize", "matmul", "cast_ste", "cast_ste_clipped"):
        yield Kernel(op, "numpy", f"{numpy}:{op}", f"numpy.{op}", rank=_FAST)
    for op in ("cast_ste", "cast_ste_clipped"):  # NumPy has no gradients, so the round trip is the whole of it
        yield Kernel(op, "numpy", f"{reference}:{op}", f"reference.{op}", rank=_LAST)


@hookimpl
def breccia_cli() -> Iterable[Command]:
    return [
        Command("explain", "breccia.cli:explain", "Say which kernel serves a call, and why no other does."),
        Command("plugins", "breccia.cli:plugins", "List plug-ins, what they declare, what was set aside."),
        Command("doctor", "breccia.cli:doctor", "Say what is installed, missing or wrong; what to type."),
        Command("bench", "breccia.cli:bench", "Time cast, dequantize and matmul on this machine."),
    ]
