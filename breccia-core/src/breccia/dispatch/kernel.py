"""Kernels as plug-ins declare them, and the order in which the table prefers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType

from .. import targets
from ..errors import PluginError, suggestion
from ..recipes import ScalingRecipe

#: Every op, with what `explain` calls its operands.
OPS = (
    "cast",
    "cast_pair",
    "dequantize",
    "requantize",
    "matmul",
    "cast_matmul",
    "grouped_matmul",
    "cast_ste",
    "cast_ste_clipped",
)
#: Ops of an array and the recipe to write it under, whose class is the first of the key.
CASTS = frozenset(("cast", "cast_pair", "cast_ste", "cast_ste_clipped", "cast_matmul"))
#: Ops that write ScaledTensors, in the storage that they are asked for.
WRITERS = ("cast", "cast_pair", "requantize")
#: `Kernel.framework` of a kernel written over `Ops`, for any framework.
ANY_FRAMEWORK = "*"
#: `Kernel.reads` or `Kernel.writes` of a kernel that takes every storage.
ANY_STORAGE = ("*",)
#: Version of each op's contract that kernels are written against (docs/spec/numerics.md).
CONTRACT = 1
#: (op, recipe class of a, recipe class of b, framework); the class of what is not scaled is `type(None)`.
Key = tuple[str, type, type, str]
Prefer = str | Sequence[str] | None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op: a function on plain arrays, with the arguments of the op in `breccia.dispatch.calls`.

    It is not given `prefer`.

    framework: the name of the one it is for, or "*" for any. device: likewise, a kind ("cpu", "cuda", ...) or None.
    target: the function. name: unique among all plug-ins; what `prefer=` and `breccia.explain` call it.
    recipe, other: the recipe class of the first and second operand it is for. A base class stands for its family; None for
        any; `type(None)` for an operand that is not scaled. For `requantize`, `other` is the new recipe.
    available: target of `f(device: Device) -> None | reason`, asked once per device, its index included.
    accepts: target of `f(call: Call) -> None | reason`.
    score: target of `f(call: Call) -> float`, its estimated time for the call in seconds, to be compared with others'.
    plan: target of `f(call: Call) -> Iterable[Call]`, the calls that it makes of other kernels, for `explain`.
    rank: among equally specific kernels of equal score the highest wins.
    reads, writes: names of the storages, beside "plain", that its operands may have and that it can write.
    traces: takes arrays without memory of their own too, such as fakes and those of transformations.
    opt_in: does not keep the op's contract; runs only when named by `prefer=` or BRECCIA_PREFER.
    contract: the version of the op's contract that it was written against.

    Kernels are compared by: a preference by name, an exact recipe before its family before any, score, rank. A kernel without a
    score comes after those that have one.
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
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    traces: bool = False
    opt_in: bool = False
    contract: int = CONTRACT
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError where the declaration cannot work."""
        what = f"kernel {self.name!r}"
        for name, served in (("recipe", self.recipe), ("other", self.other)):
            recipe_class = isinstance(served, type) and issubclass(served, ScalingRecipe)
            if not (served is None or served is NoneType or recipe_class):
                raise PluginError(f"{what}: {name} must be a recipe class, its base, None or type(None); got {served!r}.")
        for name in ("target", "available", "accepts", "score", "plan"):
            if (target := getattr(self, name)) is not None:
                targets.check(target, f"{what}: {name}")
        targets.check_fields(self, what)
        if self.op not in OPS:
            raise PluginError(f"{what}: no op {self.op!r}{suggestion(self.op, list(OPS))}")
        if self.contract != CONTRACT:
            raise PluginError(
                f"{what} keeps version {self.contract} of the contract of {self.op!r}; this is version {CONTRACT}."
            )


def named(prefer: Prefer) -> tuple[str, ...]:
    """The kernel names of a `prefer=` argument."""
    return () if prefer is None else (prefer,) if isinstance(prefer, str) else tuple(prefer)


def fits(k: Kernel, key: Key) -> bool:
    """Is the kernel declared for calls of this key?"""
    op, recipe, other, framework = key
    return (
        k.op == op
        and k.framework in (framework, ANY_FRAMEWORK)
        and _serves(k.recipe, recipe) is not None
        and _serves(k.other, other) is not None
    )


def _serves(declared: type | None, found: type) -> int | None:
    """2 if the kernel declares exactly this recipe class, 1 for its family, 0 for any; None if it is not for it."""
    if declared is None:
        return 0
    if declared is found:
        return 2
    if not issubclass(found, declared):
        return None
    return 0 if declared is ScalingRecipe else 1


#: Smaller comes first: preference, specificity of either recipe, score, rank.
Order = tuple[int, int, int, float, int]


def order_of(k: Kernel, key: Key, prefer: Sequence[str], score: float) -> Order:
    """Where the kernel stands among others; the least runs."""
    place = prefer.index(k.name) if k.name in prefer else len(prefer)
    return place, -(_serves(k.recipe, key[1]) or 0), -(_serves(k.other, key[2]) or 0), score, -k.rank


def why_first(winner: Order, loser: Order) -> str:
    """Why one kernel comes before another, for `explain`."""
    reasons = (
        "preferred by name",
        "declared for this recipe",
        "declared for the second operand's recipe",
        f"estimated {winner[3]:.3g} s against {loser[3]:.3g} s" if math.isfinite(loser[3]) else "it estimates its time",
        "higher rank",
    )
    return next(why for why, x, y in zip(reasons, winner, loser, strict=True) if x != y)


def key_title(key: Key) -> str:
    """How messages call the calls of a key."""
    op, a, b, _ = key
    joint = {"matmul": " and ", "cast_matmul": " and ", "grouped_matmul": " and ", "requantize": " to "}.get(op)
    return f"{op} of {class_name(a)}{joint}{class_name(b)}" if joint else f"{op} of {class_name(a)}"


def class_name(c: type | None) -> str:
    """How messages call a recipe class: by its stable name."""
    if c is None or c is ScalingRecipe:
        return "any"
    return "array" if c is NoneType else getattr(c, "name", "") or c.__name__
