"""Dispatch: which kernel serves a call, and why.

The table is keyed by (op, recipe class of a, recipe class of b, framework). A kernel that depends on nothing else
is found by one dictionary look-up; otherwise candidates are asked in order, and the winner is remembered for the
static facts of the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import targets
from .errors import AmbiguousKernelError, NoKernelError, PluginError, UnknownNameError, suggestion
from .frameworks import dtype_name, framework_of
from .layouts import Layout
from .recipes import ScalingRecipe
from .tensor import ScaledTensor

OPS = ("cast", "dequantize", "requantize", "matmul", "cast_ste", "cast_ste_clipped")

#: `Kernel.framework` of a kernel written over `Ops`, for any framework.
ANY_FRAMEWORK = "*"

#: Version of each op's contract that kernels are written against (docs/spec/numerics.md).
CONTRACT = 1

_MEMO_LIMIT = 4096
_ALIGNMENT_LIMIT = 256

trace = logging.getLogger("breccia.trace")

RecipeClass = type[ScalingRecipe] | None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op. It is called exactly as the verb is, without `prefer`.

    recipe, other: the recipe class of the first and second operand it serves. A base class serves its family; None serves any;
        `type(None)` an operand that is not scaled. For `requantize`, `other` is the new recipe.
    available: target of `f(device) -> None | reason`, asked once per device.
    accepts: target of `f(call: Call) -> None | reason`; may read static facts only.
    rank: among equally specific kernels the highest wins.
    opt_in: does not keep the op's contract; runs only when named by `prefer`.
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
    rank: int = 0
    opt_in: bool = False
    contract: int = CONTRACT
    plugin: str = field(default="", compare=False)

    def check(self) -> None:
        """Raise PluginError where the declaration cannot work."""
        if self.op not in OPS:
            raise PluginError(f"kernel {self.name!r}: no op {self.op!r}{suggestion(self.op, list(OPS))}")
        if not self.name:
            raise PluginError(f"a kernel of op {self.op!r} has no name; name it '<plug-in>.<op>...'.")
        if self.contract != CONTRACT:
            raise PluginError(
                f"kernel {self.name!r} keeps version {self.contract} of the contract of {self.op!r}; this is version {CONTRACT}."
            )
        for target in (self.target, self.available, self.accepts):
            if target is not None:
                targets.check(target)


@dataclass(frozen=True)
class Operand:
    """Static facts of one operand. `aligned` is the largest power of two (up to 256) that divides each of (M, K)."""

    recipe: ScalingRecipe | None
    dtype: str
    ndim: int
    layout: Layout | None
    axis: int
    aligned: tuple[int, int]


@dataclass(frozen=True)
class Call:
    """What `Kernel.accepts` may look at."""

    op: str
    framework: str
    device: str
    a: Operand
    b: Operand | None


@dataclass(frozen=True)
class Verdict:
    """One candidate of a call: why it was passed over, or None for the winner."""

    kernel: Kernel
    reason: str | None
    location: str


@dataclass(frozen=True)
class Explanation:
    """The answer of `breccia.explain`: print it, or read its fields."""

    call: str
    framework: str
    verdicts: tuple[Verdict, ...]

    @property
    def winner(self) -> Kernel | None:
        return next((v.kernel for v in self.verdicts if v.reason is None), None)

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.framework}"]
        width = max((len(v.kernel.name) for v in self.verdicts), default=0)
        for v in self.verdicts:
            arrow = " -> " if v.reason is None else "    "
            lines.append(f"{arrow}{v.kernel.name:{width}}  {v.kernel.plugin:10} {v.location}")
            if v.reason is not None:
                lines.append(f"      passed over: {v.reason}")
        if self.winner is None:
            lines.append("  No kernel serves this call. `breccia plugins` shows what is installed and what was set aside.")
        return "\n".join(lines)


class Table:
    """All kernels; immutable but for what it remembers."""

    def __init__(self, kernels: Iterable[Kernel], prefer: Sequence[str] = (), tracing: bool = False) -> None:
        self.kernels = tuple(kernels)
        self._prefer = tuple(prefer)
        self._tracing = tracing
        self._direct: dict[tuple[Any, ...], Any] = {}
        self._memo: dict[tuple[Any, ...], Any] = {}
        self._available: dict[tuple[str, str], str | None] = {}

    def resolve(
        self, op: str, framework: str, a: Any, b: Any, new: ScalingRecipe | None, prefer: str | Sequence[str] | None
    ) -> Any:
        """The function that serves op(a, b). `new` is the recipe to write, for cast and requantize."""
        key = (op, *_classes(op, a, b, new), framework)
        if prefer is None:
            direct = self._direct.get(key)
            if direct is not None:
                return direct
        names = () if prefer is None else ((prefer,) if isinstance(prefer, str) else tuple(prefer))
        call = _call(op, framework, a, b, new)
        memo = (key, call, names)
        function = self._memo.get(memo)
        if function is None:
            winner = self._choose(key, call, names)
            function = targets.load(winner.target)
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            if not self._tracing:
                self._memo[memo] = function
                if not names and not self._prefer and self._unconditional(key, winner):
                    self._direct[key] = function
            trace.info("%s of %s on %s (%s) -> %s", op, _names(key), framework, call.device, winner.name)
        return function

    def explain(self, op: str, framework: str, a: Any, b: Any, new: ScalingRecipe | None, names: Sequence[str]) -> Explanation:
        """Every candidate of the call, the winner first."""
        key = (op, *_classes(op, a, b, new), framework)
        call = _call(op, framework, a, b, new)
        judged = [(k, self._objection(k, call, names)) for k in self._candidates(key, names)]
        usable = [k for k, reason in judged if reason is None]
        rows: list[Verdict] = []
        for kernel, reason in judged:
            if reason is None and kernel is not usable[0]:
                reason = f"{usable[0].name} comes first ({_why_first(usable[0], kernel, key, (*names, *self._prefer))})"
            rows.append(Verdict(kernel, reason, targets.locate(kernel.target)))
        rows.sort(key=lambda v: v.reason is not None)
        return Explanation(f"{op} of {_names(key)}", framework, tuple(rows))

    # -- choosing ------------------------------------------------------------------------------------------------

    def _candidates(self, key: tuple[Any, ...], names: Sequence[str]) -> list[Kernel]:
        op, recipe, other, framework = key
        fitting = [
            k
            for k in self.kernels
            if k.op == op
            and k.framework in (framework, ANY_FRAMEWORK)
            and _serves(k.recipe, recipe) is not None
            and _serves(k.other, other) is not None
        ]
        return sorted(fitting, key=lambda k: (_order(k, key, (*names, *self._prefer)), k.name))

    def _choose(self, key: tuple[Any, ...], call: Call, names: Sequence[str]) -> Kernel:
        known = [k.name for k in self.kernels]
        for name in names:
            if name not in known:
                raise UnknownNameError(f"prefer={name!r}: no such kernel{suggestion(name, known)}", name=name)
        candidates = self._candidates(key, names)
        usable = [k for k in candidates if self._objection(k, call, names) is None]
        if names and not any(k.name in names for k in usable):
            reasons = [f"{k.name}: {self._objection(k, call, names)}" for k in candidates if k.name in names]
            raise NoKernelError(
                f"prefer={', '.join(names)} cannot serve {call.op} of {_names(key)} on {call.framework}: "
                + ("; ".join(reasons) or "declared for another op, recipe or framework"),
                prefer=names,
            )
        if not usable:
            raise NoKernelError(str(self._explanation_of(key, call, names)), op=call.op)
        if len(usable) > 1:
            first, second = (_order(k, key, (*names, *self._prefer)) for k in usable[:2])
            if first == second:
                a, b = usable[:2]
                raise AmbiguousKernelError(
                    f"{call.op} of {_names(key)} on {call.framework}: kernels {a.name!r} ({a.plugin}) and {b.name!r} ({b.plugin}) "
                    f"rank the same. Name one with prefer=, or set one plug-in aside with BRECCIA_BLOCK={b.plugin}.",
                    kernels=(a.name, b.name),
                )
        return usable[0]

    def _explanation_of(self, key: tuple[Any, ...], call: Call, names: Sequence[str]) -> Explanation:
        rows = [Verdict(k, self._objection(k, call, names), targets.locate(k.target)) for k in self._candidates(key, names)]
        return Explanation(f"{call.op} of {_names(key)}", call.framework, tuple(rows))

    def _unconditional(self, key: tuple[Any, ...], winner: Kernel) -> bool:
        """Would `winner` win whatever the operands' facts?"""
        for k in self._candidates(key, ()):
            if not k.opt_in:
                conditional = bool(k.device or k.available or k.accepts)
                return k is winner and not conditional
        return False

    def _objection(self, k: Kernel, call: Call, names: Sequence[str]) -> str | None:
        """Why `k` cannot serve `call`, or None."""
        if k.opt_in and k.name not in names and k.name not in self._prefer:
            return f"opt-in: it does not keep the contract of {k.op}; name it with prefer={k.name!r}"
        if k.device is not None and k.device != call.device:
            return f"runs on {k.device}, the data is on {call.device}"
        if k.available is not None:
            fact = (k.available, call.device)
            if fact not in self._available:
                self._available[fact] = _ask(k.available, call.device)
            if self._available[fact] is not None:
                return self._available[fact]
        return _ask(k.accepts, call) if k.accepts is not None else None


def _ask(target: str, argument: Any) -> str | None:
    """The answer of a kernel's check; a check that raises is a reason too, so one vendor cannot stop the others."""
    try:
        return targets.load(target)(argument)
    except Exception as e:
        return f"its check {target} failed: {type(e).__name__}: {e}"


def _serves(declared: type | None, found: type) -> int | None:
    """2 if the kernel declares exactly this recipe class, 1 for its family, 0 for any; None if it does not serve it."""
    if declared is None or declared is ScalingRecipe:
        return 0
    if declared is found:
        return 2
    return 1 if issubclass(found, declared) else None


def _order(k: Kernel, key: tuple[Any, ...], prefer: Sequence[str]) -> tuple[int, int, int, int]:
    place = prefer.index(k.name) if k.name in prefer else len(prefer)
    return place, -(_serves(k.recipe, key[1]) or 0), -(_serves(k.other, key[2]) or 0), -k.rank


def _why_first(winner: Kernel, loser: Kernel, key: tuple[Any, ...], prefer: Sequence[str]) -> str:
    reasons = ("preferred by name", "declared for this recipe", "declared for the second operand's recipe", "higher rank")
    a, b = _order(winner, key, prefer), _order(loser, key, prefer)
    return next((why for why, x, y in zip(reasons, a, b, strict=True) if x != y), "same rank: prefer= must decide")


def _classes(op: str, a: Any, b: Any, new: ScalingRecipe | None) -> tuple[type, type]:
    if op == "cast" or op.startswith("cast_ste"):
        return type(new), type(None)
    first = type(a.recipe) if isinstance(a, ScaledTensor) else type(_recipe_of(a))
    if op == "requantize":
        return first, type(new)
    second = type(b.recipe) if isinstance(b, ScaledTensor) else type(_recipe_of(b))
    return first, second


def _recipe_of(x: Any) -> ScalingRecipe | None:
    return x if isinstance(x, ScalingRecipe) else getattr(x, "recipe", None)


def _call(op: str, framework: str, a: Any, b: Any, new: ScalingRecipe | None) -> Call:
    array = a.data if isinstance(a, ScaledTensor) else a
    first = _operand(a, new if op != "requantize" else None)
    return Call(op, framework, device_of(array), first, None if b is None else _operand(b, None))


def device_of(array: Any) -> str:
    """Kind of device an array is on: "cpu", "cuda", ...; "cpu" where the framework does not say."""
    device = getattr(array, "device", None)
    kind = getattr(device, "type", None) or getattr(device, "platform", None) or "cpu"
    return {"gpu": "cuda"}.get(str(kind), str(kind))


def _operand(x: Any, new: ScalingRecipe | None) -> Operand:
    if isinstance(x, ScaledTensor):
        return Operand(x.recipe, dtype_name(x.data), x.ndim, x.layout, x.axis, _aligned(x.shape))
    recipe = new or _recipe_of(x)
    shape = tuple(getattr(x, "shape", (_ALIGNMENT_LIMIT, _ALIGNMENT_LIMIT)))
    dtype = dtype_name(x) if hasattr(x, "dtype") else "float32"
    return Operand(recipe, dtype, len(shape), None, -1, _aligned(shape))


def _aligned(shape: tuple[int, ...]) -> tuple[int, int]:
    m, k = ((n & -n) or _ALIGNMENT_LIMIT for n in (1, *shape)[-2:])
    return min(m, _ALIGNMENT_LIMIT), min(k, _ALIGNMENT_LIMIT)


def _names(key: tuple[Any, ...]) -> str:
    names = [getattr(c, "name", None) or "array" for c in key[1:3] if c is not type(None)]
    return " and ".join(names) or "arrays"


def framework_name(x: Any, what: str) -> str:
    """Name of the framework of an array or ScaledTensor."""
    return framework_of(x.data if isinstance(x, ScaledTensor) else x, what).name
