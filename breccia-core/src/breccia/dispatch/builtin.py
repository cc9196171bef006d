"""Core as its own plug-in: it declares everything in `breccia` that calls use, through the public hooks only."""

from __future__ import annotations

from collections.abc import Iterable

from ..arrays.frameworks import Framework
from ..codecs import CODECS, Codec
from ..layouts import LAYOUTS, Layout
from ..recipes import RECIPES, DelayedScaling, ScalingRecipe
from ..rules import RULES, Rule
from ..tensors.storage import STORAGES, Storage
from .hookspecs import Command, hookimpl
from .kernel import ANY_FRAMEWORK, ANY_STORAGE, Kernel

api = 1

#: The lowest rank: the generic algorithm runs only where no other kernel does.
_LAST = -1000
#: The next rank: kernels composed of other ops.
_COMPOSED = -900
#: The rank above these, still below plug-ins.
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
        ("ma.MaskedArray", "Choose a value for its masked elements: pass x.filled(value)."),
    )
    return [
        Framework(
            "numpy",
            "numpy",
            ("ndarray", "generic"),
            "breccia.arrays.ops:NUMPY",
            refuses,
            "breccia.kernels.threads:devices",
            ("cpu",),
        )
    ]


@hookimpl
def breccia_storages() -> Iterable[Storage]:
    return STORAGES


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    kernels = "breccia.kernels"
    composites, plans = f"{kernels}.composites", f"{kernels}.plans"
    for op, module in _GENERIC.items():
        target, recipe = f"{kernels}.reference.{module}:{op}", _RECIPES.get(op)
        yield Kernel(op, ANY_FRAMEWORK, target, f"reference.{op}", recipe, rank=_LAST, traces=True)
    for op, plan in _PLANS.items():
        target, plan, recipe = f"{composites}:{op}", f"{plans}:{plan}", _RECIPES.get(op)
        reads = ANY_STORAGE if op == "cast_matmul" else ()  # it passes its second operand on unchanged
        yield Kernel(op, ANY_FRAMEWORK, target, f"composite.{op}", recipe, plan=plan, rank=_COMPOSED, reads=reads, traces=True)
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
    numpy = f"{kernels}.numpy"
    accepts = f"{numpy}.plan:accepts_cast"
    yield Kernel("cast", "numpy", f"{numpy}.casting:cast", "numpy.cast", rank=_FAST, accepts=accepts)
    accepts = f"{plans}:accepts_dequantize"
    yield Kernel("dequantize", "numpy", f"{numpy}.decoding:dequantize", "numpy.dequantize", rank=_FAST, accepts=accepts)
    plan = f"{plans}:plan_of_products"
    for op in ("matmul", "grouped_matmul"):
        yield Kernel(op, "numpy", f"{numpy}.products:{op}", f"numpy.{op}", rank=_FAST, plan=plan)


#: Ops that the generic algorithm implements, with their modules.
_GENERIC = {
    "cast": "casting",
    "dequantize": "decoding",
    "requantize": "requantizing",
    "matmul": "products",
    "grouped_matmul": "products",
    "record_amax": "recording",
}
#: The recipes of ops that only some have.
_RECIPES: dict[str, type[ScalingRecipe]] = {"record_amax": DelayedScaling, "cast_and_record": DelayedScaling}
#: Ops composed of other ops, with the function that lists those.
_PLANS = {
    "requantize": "plan_of_requantize",
    "matmul": "plan_of_products",
    "grouped_matmul": "plan_of_products",
    "cast_pair": "plan_of_cast_pair",
    "cast_matmul": "plan_of_cast_matmul",
    "cast_ste": "plan_of_round_trips",
    "cast_ste_clipped": "plan_of_clipped",
    "cast_and_record": "plan_of_cast_and_record",
}
#: Kernels for storages that no other kernel reads or writes.
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
        Command("explain", "breccia.cli.main:explain", "Show which kernel runs for a call, and why."),
        Command("recipes", "breccia.cli.main:recipes", "List recipes: size, formats, fields and their values."),
        Command("plugins", "breccia.cli.main:plugins", "List plug-ins: what they declare, and why one is set aside."),
        Command("plugin", "breccia.cli.main:plugin", "Write a new plug-in: `breccia plugin new NAME`."),
        Command("doctor", "breccia.cli.main:doctor", "Check the installation, and print how to fix it."),
        Command("bench", "breccia.cli.main:bench", "Time cast, dequantize and matmul on this machine."),
    ]
