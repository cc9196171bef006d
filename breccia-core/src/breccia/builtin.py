"""Core as a plug-in of itself: everything in `breccia` that a call can reach, through the public hooks only."""

from __future__ import annotations

from collections.abc import Iterable

from .codecs import CODECS, Codec
from .dispatch import ANY_FRAMEWORK, ANY_STORAGE, Kernel
from .frameworks import Framework
from .hookspecs import Command, hookimpl
from .layouts import LAYOUTS, Layout
from .recipes import RECIPES, ScalingRecipe
from .rules import RULES, Rule
from .storage import STORAGES, Storage

api = 1

#: Below any kernel a plug-in declares: the generic algorithm runs where nothing else does.
_LAST = -1000
#: Above that: over the kernels of other ops.
_COMPOSED = -900
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
def breccia_storages() -> Iterable[Storage]:
    return STORAGES


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    reference, composites, plans = (f"breccia.kernels.{module}" for module in ("reference", "composites", "plans"))
    for op in ("cast", "dequantize", "requantize", "matmul", "grouped_matmul"):
        yield Kernel(op, ANY_FRAMEWORK, f"{reference}:{op}", f"reference.{op}", rank=_LAST, traces=True)
    for op, plan in _PLANS.items():
        target, plan = f"{composites}:{op}", f"{plans}:{plan}"
        reads = ANY_STORAGE if op == "cast_matmul" else ()  # which passes its second operand on as it is
        yield Kernel(op, ANY_FRAMEWORK, target, f"composite.{op}", plan=plan, rank=_COMPOSED, reads=reads, traces=True)
    plan = f"{plans}:plan_of_storages"
    for op, function in _STORAGES.items():
        yield Kernel(
            op,
            ANY_FRAMEWORK,
            f"{composites}:{function}",
            f"storage.{op}",
            plan=plan,
            rank=_LAST - 1,
            reads=ANY_STORAGE,
            writes=ANY_STORAGE,
            traces=True,
        )
    numpy = "breccia.kernels.numpy"
    yield Kernel("cast", "numpy", f"{numpy}:cast", "numpy.cast", rank=_FAST, accepts=f"{numpy}:accepts_cast")
    accepts = f"{plans}:accepts_dequantize"
    yield Kernel("dequantize", "numpy", f"{numpy}:dequantize", "numpy.dequantize", rank=_FAST, accepts=accepts)
    yield Kernel("matmul", "numpy", f"{numpy}:matmul", "numpy.matmul", rank=_FAST, plan=f"{plans}:plan_of_products")


#: Ops written over other ops, with the function that says which.
_PLANS = {
    "requantize": "plan_of_requantize",
    "matmul": "plan_of_products",
    "grouped_matmul": "plan_of_products",
    "cast_pair": "plan_of_cast_pair",
    "cast_matmul": "plan_of_cast_matmul",
    "cast_ste": "plan_of_round_trips",
    "cast_ste_clipped": "plan_of_clipped",
}
#: What runs for storages that no other kernel reads or writes.
_STORAGES = {
    "cast": "cast_into_storage",
    "cast_pair": "cast_pair_into_storage",
    "dequantize": "dequantize_plain",
    "requantize": "requantize_into_storage",
    "matmul": "matmul_plain",
    "grouped_matmul": "grouped_matmul_plain",
}


@hookimpl
def breccia_cli() -> Iterable[Command]:
    return [
        Command("explain", "breccia.cli:explain", "Say which kernel runs for a call, and why no other does."),
        Command("plugins", "breccia.cli:plugins", "List plug-ins, what they declare, what was set aside."),
        Command("plugin", "breccia.cli:plugin", "Start a plug-in: `breccia plugin new NAME`."),
        Command("doctor", "breccia.cli:doctor", "Say what is installed, missing or wrong; what to type."),
        Command("bench", "breccia.cli:bench", "Time cast, dequantize and matmul on this machine."),
    ]
