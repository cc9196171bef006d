"""Core as its own plug-in: it declares everything in `breccia` that calls use, through the public hooks only."""

from __future__ import annotations

from collections.abc import Iterable

from ..arrays.frameworks import Framework
from ..codecs import CODECS, Codec
from ..layouts import LAYOUTS, Layout
from ..operations import OPERATIONS, Operation
from ..recipes import DERIVED, RECIPES, ScalingRecipe
from ..rules import RULES, Rule
from ..tensors.storage import STORAGES, Storage
from .hookspecs import Command, hookimpl
from .kernel import ANY_FRAMEWORK, Kernel, Tier

api = 1


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
    return (*RECIPES, *DERIVED)


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
def breccia_operations() -> Iterable[Operation]:
    return OPERATIONS.values()


@hookimpl
def breccia_kernels() -> Iterable[Kernel]:
    numpy, plans, rank = "breccia.kernels.numpy", "breccia.kernels.plans", Tier.PORTABLE
    accepts = f"{numpy}.plan:accepts_cast"
    target, knows = f"{numpy}.casting:cast", ("scale_search",)
    yield Kernel("cast", "numpy", target, "numpy.cast", rank=rank, accepts=accepts, knows=knows)
    accepts = f"{plans}:accepts_dequantize"
    yield Kernel("dequantize", "numpy", f"{numpy}.decoding:dequantize", "numpy.dequantize", rank=rank, accepts=accepts)
    plan = f"{plans}:plan_of_products"
    for op in ("matmul", "grouped_matmul"):
        yield Kernel(op, "numpy", f"{numpy}.products:{op}", f"numpy.{op}", rank=rank, plan=plan)
    for op in ("cast", "dequantize"):
        yield _in_another_format(op, "rotating", "rotated", "rotated")
    for op in ("dequantize", "matmul", "grouped_matmul", "cast"):
        yield _in_another_format(op, "flattening", "flattened", "written_as" if op == "cast" else "flattened")


def _in_another_format(op: str, module: str, name: str, how: str) -> Kernel:
    """An op of a format that kernels do not know, by the kernel for one that they know. how: ends the names of its plan."""
    plans = "breccia.kernels.plans"
    return Kernel(
        op,
        ANY_FRAMEWORK,
        f"breccia.kernels.{module}:{op}",
        f"{name}.{op}",
        accepts=f"{plans}:accepts_{how}",
        plan=f"{plans}:plan_of_{how}",
        rank=Tier.FLATTENED,
        traces=True,
        kind="composite",
    )


@hookimpl
def breccia_cli() -> Iterable[Command]:
    return [
        Command("explain", "breccia.cli.commands:explain", "Show which kernel runs for a call, and why."),
        Command("recipes", "breccia.cli.recipe_pages:recipes", "List recipes and their fields, and presets for training."),
        Command("rosetta", "breccia.cli.rosetta:rosetta", "Show which conversions keep every value."),
        Command("plugins", "breccia.cli.commands:plugins", "List plug-ins: what they declare, and why one is set aside."),
        Command("plugin", "breccia.cli.commands:plugin", "Write a new plug-in: `breccia plugin new NAME`."),
        Command("doctor", "breccia.cli.commands:doctor", "Check the installation, and print how to fix it."),
        Command("bench", "breccia.cli.commands:bench", "Time cast, dequantize and matmul on this machine."),
    ]
