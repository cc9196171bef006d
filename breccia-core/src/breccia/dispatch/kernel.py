"""Kernel declarations, and the order of preference of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import NoneType

from .. import targets
from ..errors import PluginError
from ..operations import Operation
from ..recipes import ScalingRecipe

#: `Kernel.framework` of a kernel written in backend primitives, for any framework.
ANY_FRAMEWORK = "*"
#: `Kernel.reads` or `Kernel.writes` of a kernel that supports every storage.
ANY_STORAGE = ("*",)
#: The version of each op's contract that kernels declare (docs/spec/numerics.md).
CONTRACT = 1
#: (op, recipe class of a, recipe class of b, framework); `type(None)` for an operand that is not scaled.
Key = tuple[str, type, type, str]
Prefer = str | Sequence[str] | None


class Tier(IntEnum):
    """Ranks of breccia's own kernels, from the last to the first. Plug-ins' kernels without a rank precede all of them."""

    STORAGE = -1001  #: the op on plain tensors, for storages that no other kernel supports
    REFERENCE = -1000  #: the function that defines the op
    COMPOSITE = -900  #: composed of other ops
    FLATTENED = -850  #: the op on a tensor of the same values in a simpler format
    COMPILED = -600  #: compiled by the framework from backend primitives
    PORTABLE = -500  #: written for the framework in Python
    NATIVE = -400  #: compiled ahead of time
    PLUGIN = 0


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op: a function on plain arrays, with the arguments of its `Operation`, then its options.

    It does not receive `prefer`.

    framework: the framework's name, or "*" for any. device: a kind ("cpu", "cuda", ...), or None for any.
    target: object reference to the function. name: unique among all plug-ins; used by `prefer=` and `breccia.explain`.
    recipe, other: the supported recipe class of the first and second operand. A base class matches its family; None matches
        any; `type(None)` for an operand that is not scaled. For `requantize`, `other` is the new recipe.
    available: object reference to `f(device: Device) -> None | reason`, called once per device (with index).
    accepts: object reference to `f(call: Call) -> None | reason`.
    score: object reference to `f(call: Call) -> float`, the estimated time of the call in seconds.
    plan: object reference to `f(call: Call) -> Iterable[Call]`, its calls of other kernels, for `explain`.
    rank: the highest wins among equally specific kernels of equal score; see `Tier`.
    kind: "kernel"; or of those that are written over other ops: "reference", "composite" or "storage", as in `Tier`.
    knows: names of the features of formats (`Format.features`) that it supports; it is not asked about calls with others.
    reads, writes: names of the storages, besides "plain", that it supports for operands and results.
    traces: also supports arrays without their own memory, such as fakes and tracers of transformations.
    opt_in: does not follow the op's contract; runs only when named by `prefer=` or BRECCIA_PREFER.
    contract: the version of the op's contract that it implements.
    eager: of a framework whose frontend compiles calls: it also runs outside of compiled functions, and compiles nothing.
    prepare: object reference to `f(a, b, bias) -> call | None`, for products: a call that repeats the product of arrays like
        these at other addresses, so that another framework on the same memory need not look it up again. Of `matmul` on
        torch: `f(a, b, bias, out_dtype) -> call | None`; `call(a, b, bias, out)` repeats it for operands with the metadata of
        these. Of `record_amax` on torch: `f(recipes, length, device) -> kernels | None` for histories of layers in training,
        whose `end` and `note` do what `end_histories` and `_History.note` of breccia_torch.training.state do, versions of
        tensors included.
    errors: object reference to `f(x, y, ends) -> ErrorMetrics`, for `dequantize` of NumPy: those of the numbers `y` that it
        decoded against `x`, under the ends of blocks, as breccia.kernels.measuring has them: `Ends`.

    Kernels are compared by: a preference by name, an exact recipe before its family before any, score, rank. A kernel without a
    score comes after those with one.
    """

    op: str
    framework: str
    target: str
    name: str
    recipe: type | None = None
    other: type | None = None
    device: str | None = None
    available: str | None = None
    accepts: str | None = None
    score: str | None = None
    plan: str | None = None
    rank: int = 0
    knows: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    traces: bool = False
    opt_in: bool = False
    contract: int = CONTRACT
    kind: str = "kernel"
    eager: bool = False
    prepare: str | None = None
    errors: str | None = None
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError if the declaration is invalid."""
        what = f"kernel {self.name!r}"
        for name, served in (("recipe", self.recipe), ("other", self.other)):
            recipe_class = isinstance(served, type) and issubclass(served, ScalingRecipe)
            if not (served is None or served is NoneType or recipe_class):
                raise PluginError(f"{what}: {name} must be a recipe class, its base, None or type(None); got {served!r}.")
        for name in ("target", "available", "accepts", "score", "plan", "prepare", "errors"):
            if (target := getattr(self, name)) is not None:
                targets.check(target, f"{what}: {name}")
        targets.check_fields(self, what)
        if self.contract != CONTRACT:
            raise PluginError(
                f"{what} implements version {self.contract} of the contract of {self.op!r}; this is version {CONTRACT}."
            )


def named(prefer: Prefer) -> tuple[str, ...]:
    """The kernel names of a `prefer=` argument."""
    return () if prefer is None else (prefer,) if isinstance(prefer, str) else tuple(prefer)


def fits(k: Kernel, key: Key) -> bool:
    """Whether the kernel is declared for calls with this key"""
    op, recipe, other, framework = key
    return (
        k.op == op
        and k.framework in (framework, ANY_FRAMEWORK)
        and _serves(k.recipe, recipe) is not None
        and _serves(k.other, other) is not None
    )


def _serves(declared: type | None, recipe_class: type) -> int | None:
    """2 if the kernel declares exactly this recipe class, 1 for its family, 0 for any; None if it does not match."""
    if declared is None:
        return 0
    if declared is recipe_class:
        return 2
    if not issubclass(recipe_class, declared):
        return None
    return 0 if declared is ScalingRecipe else 1


#: Smaller comes first: preference, specificity of each recipe, score, rank.
Order = tuple[int, int, int, float, int]


def order_of(k: Kernel, key: Key, prefer: Sequence[str], score: float) -> Order:
    """The sort key of the kernel; the smallest runs."""
    place = prefer.index(k.name) if k.name in prefer else len(prefer)
    return place, -(_serves(k.recipe, key[1]) or 0), -(_serves(k.other, key[2]) or 0), score, -k.rank


def why_first(winner: Order, loser: Order) -> str:
    """Why one kernel precedes another, for `explain`."""
    reasons = (
        "preferred by name",
        "declared for this recipe",
        "declared for the second operand's recipe",
        f"estimated {winner[3]:.3g} s against {loser[3]:.3g} s" if math.isfinite(loser[3]) else "it estimates its time",
        "higher rank",
    )
    return next(why for why, x, y in zip(reasons, winner, loser, strict=True) if x != y)


def key_title(key: Key, joint: str) -> str:
    """The title of a key's calls in messages."""
    op, a, b, _ = key
    return f"{op} of {class_name(a)}{joint}{class_name(b)}" if joint else f"{op} of {class_name(a)}"


def class_name(c: type | None) -> str:
    """The stable name of a recipe class, for messages."""
    if c is None or c is ScalingRecipe:
        return "any"
    return "array" if c is NoneType else getattr(c, "name", "") or c.__name__


def kernels_of(op: Operation) -> Iterator[Kernel]:
    """The kernels of any framework that an op has by its declaration: its reference, its composite, and one for storages."""
    recipe = None if op.recipe is ScalingRecipe else op.recipe

    def kernel(kind: str, target: str, tier: Tier, plan: str | None, stores: bool) -> Kernel:
        any_storage = ANY_STORAGE if stores else ()
        reads, writes = any_storage if op.scaled else (), any_storage if op.stores else ()
        name = f"{kind}.{op.name}"
        return Kernel(
            op.name,
            ANY_FRAMEWORK,
            target,
            name,
            recipe,
            plan=plan,
            rank=tier,
            reads=reads,
            writes=writes,
            traces=True,
            kind=kind,
        )

    plan = op.plan if op.composite is None else None
    yield kernel("reference", op.reference, Tier.REFERENCE, plan, op.passes_storages and op.composite is None)
    if op.composite is not None:
        yield kernel("composite", op.composite, Tier.COMPOSITE, op.plan, op.passes_storages)
    if (op.scaled or op.stores) and not op.passes_storages:
        target, plan = f"breccia.kernels.storages:{op.name}", "breccia.kernels.plans:plan_of_storages"
        yield kernel("storage", target, Tier.STORAGE, plan, True)
