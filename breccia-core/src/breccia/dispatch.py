"""Dispatch: which kernel serves a call, and why.

The table is keyed by (op, recipe class of a, recipe class of b, framework). A kernel that depends on nothing else
is found by one dictionary look-up; otherwise candidates are asked in order, and the winner is remembered for the
static facts of the call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from . import targets
from .errors import AmbiguousKernelError, NoKernelError, PluginError, UnknownNameError, suggestion
from .frameworks import device_of, dtype_name
from .layouts import Layout
from .recipes import ScalingRecipe
from .tensor import ScaledTensor

OPS = ("cast", "dequantize", "requantize", "matmul", "cast_ste", "cast_ste_clipped")
_CASTS = frozenset(("cast", "cast_ste", "cast_ste_clipped"))

#: `Kernel.framework` of a kernel written over `Ops`, for any framework.
ANY_FRAMEWORK = "*"

#: Version of each op's contract that kernels are written against (docs/spec/numerics.md).
CONTRACT = 1

_MEMO_LIMIT = 4096
_ALIGNMENT_LIMIT = 256

#: (op, recipe class of a, recipe class of b, framework); the class of what is not scaled is `type(None)`.
Key = tuple[str, type, type, str]
#: Options of a call as (name, value), hashable.
Options = tuple[tuple[str, Any], ...]
Prefer = str | Sequence[str] | None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op. It is called exactly as the verb is, without `prefer`.

    framework: the name of the one it serves, or "*" for any. device: likewise, a kind ("cpu", "cuda", ...) or None.
    target: the function. name: unique among all plug-ins; what `prefer=` and `breccia.explain` call it.
    recipe, other: the recipe class of the first and second operand it serves. A base class serves its family; None serves
        any; `type(None)` an operand that is not scaled. For `requantize`, `other` is the new recipe.
    available: target of `f(device) -> None | reason`, asked once per device.
    accepts: target of `f(call: Call) -> None | reason`; may read static facts only.
    rank: among equally specific kernels the highest wins.
    opt_in: does not keep the op's contract; runs only when named by `prefer=` or BRECCIA_PREFER.
    contract: the version of the op's contract that it was written against.
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
        what = f"kernel {self.name!r}"
        for name, served in (("recipe", self.recipe), ("other", self.other)):
            recipe_class = isinstance(served, type) and issubclass(served, ScalingRecipe)
            if not (served is None or served is NoneType or recipe_class):
                raise PluginError(f"{what}: {name} must be a recipe class, its base, None or type(None); got {served!r}.")
        for name, target in (("target", self.target), ("available", self.available), ("accepts", self.accepts)):
            if target is not None:
                targets.check(target, f"{what}: {name}")
        targets.check_fields(self, what)
        if self.op not in OPS:
            raise PluginError(f"{what}: no op {self.op!r}{suggestion(self.op, list(OPS))}")
        if self.contract != CONTRACT:
            raise PluginError(
                f"{what} keeps version {self.contract} of the contract of {self.op!r}; this is version {CONTRACT}."
            )


@dataclass(frozen=True)
class Operand:
    """Static facts of one operand. `aligned`: the largest powers of two (up to 256) that divide the last two sides."""

    recipe: ScalingRecipe | None
    dtype: str
    ndim: int
    layout: Layout | None
    axis: int
    aligned: tuple[int, int]


@dataclass(frozen=True)
class Call:
    """What `Kernel.accepts` may look at.

    `options` holds the verb's keyword options that are not at their default; of arrays (`scale`, `out`) only that they are
    given.
    """

    op: str
    framework: str
    device: str
    a: Operand
    b: Operand | None
    options: Options = ()

    def option(self, name: str, default: Any = None) -> Any:
        """The value of a keyword option of the verb, or `default` where the caller left it at its own."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True)
class Verdict:
    """One candidate of a call: why it was passed over, or None for the winner."""

    kernel: Kernel
    reason: str | None

    @property
    def location(self) -> str:
        """`file:line` of the kernel's definition."""
        return targets.locate(self.kernel.target)


@dataclass(frozen=True)
class Explanation:
    """The answer of `breccia.explain`: print it, or read its fields.

    tied: the best kernels, where they rank the same. device: the kind that was asked about, where it was asked by name.
    """

    call: str
    framework: str
    verdicts: tuple[Verdict, ...]
    tied: tuple[Kernel, ...] = ()
    device: str = ""

    @property
    def winner(self) -> Kernel | None:
        return next((v.kernel for v in self.verdicts if v.reason is None), None)

    @property
    def fault(self) -> str:
        """What stops the call, and the ways out; empty where a kernel serves it."""
        if self.tied:
            a, b = self.tied[:2]
            return (
                f"Kernels {a.name!r} ({a.plugin}) and {b.name!r} ({b.plugin}) rank the same. Name one with prefer=, or set one "
                f"plug-in aside with BRECCIA_BLOCK={b.plugin}."
            )
        if self.winner is None:
            return "No kernel serves this call. `breccia plugins` shows what is installed and what was set aside."
        return ""

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.framework}{self.device and ':' + self.device}"]
        width = max((len(v.kernel.name) for v in self.verdicts), default=0)
        for v in self.verdicts:
            arrow = " -> " if v.reason is None else "    "
            lines.append(f"{arrow}{v.kernel.name:{width}}  {v.kernel.plugin:10} {v.location}")
            if v.reason is not None:
                lines.append(f"      passed over: {v.reason}")
        if self.fault:
            lines.append(f"  {self.fault}")
        return "\n".join(lines)


class Table:
    """All kernels; immutable but for what it remembers."""

    def __init__(self, kernels: Iterable[Kernel], prefer: Sequence[str] = (), tracing: bool = False) -> None:
        self.kernels = tuple(kernels)
        self._prefer = tuple(prefer)
        self._tracing = tracing
        self._direct: dict[Key, Any] = {}
        self._memo: dict[tuple[Any, ...], Any] = {}
        self._available: dict[tuple[str, str], str | None] = {}

    def resolve(
        self,
        op: str,
        framework: str,
        a: Any,
        b: Any,
        new: ScalingRecipe | None,
        prefer: Prefer,
        options: Options = (),
    ) -> Any:
        """The function that serves op(a, b). `new` is the recipe to write, for cast and requantize."""
        key = (op, *_classes(op, a, b, new), framework)
        names: tuple[str, ...] = ()
        if prefer is None:
            direct = self._direct.get(key)
            if direct is not None:
                return direct
        else:
            names = named(prefer)
        device = getattr(a.data if isinstance(a, ScaledTensor) else a, "device", None)
        written = None if new is None else new.identity
        facts = (op, framework, _facts(a), _facts(b), device, written, names, options)
        function = self._memo.get(facts)
        return self._chosen(key, _call(op, framework, a, b, new, options), names, facts) if function is None else function

    def explain(
        self,
        op: str,
        framework: str,
        a: Any,
        b: Any,
        new: ScalingRecipe | None,
        prefer: Prefer,
        device: str | None = None,
    ) -> Explanation:
        """Every candidate of the call, the winner first; for data on a kind of `device`, where that is given."""
        key = (op, *_classes(op, a, b, new), framework)
        call = _call(op, framework, a, b, new)
        if device is None:
            return self._judge(key, call, named(prefer))
        return replace(self._judge(key, replace(call, device=device), named(prefer)), device=device)

    # -- choosing ------------------------------------------------------------------------------------------------

    def _chosen(self, key: Key, call: Call, names: tuple[str, ...], facts: tuple[Any, ...]) -> Any:
        """The function of the winner, remembered for the next call of equal facts."""
        judged = self._judge(key, call, names)
        if judged.tied:
            raise AmbiguousKernelError(
                f"{judged.call} on {judged.framework}: {judged.fault}", kernels=tuple(k.name for k in judged.tied)
            )
        if judged.winner is None:
            raise NoKernelError(str(judged), op=call.op, prefer=names)
        function = _loaded(judged.winner)
        if self._tracing:
            print(f"breccia: {judged.call} on {call.framework} ({call.device}) -> {judged.winner.name}", file=sys.stderr)
        elif not names and not self._prefer and self._unconditional(key, judged.winner):
            self._direct[key] = function
        else:
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            self._memo[facts] = function
        return function

    def _judge(self, key: Key, call: Call, names: tuple[str, ...]) -> Explanation:
        known = [k.name for k in self.kernels]
        for name in names:
            if name not in known:
                raise UnknownNameError(f"prefer={name!r}: no such kernel{suggestion(name, known)}", name=name, known=known)
        wanted = (*names, *self._prefer)
        objections = [(k, self._objection(k, key, call, names)) for k in self._candidates(key, names)]
        usable = [k for k, objection in objections if objection is None]
        tied = [k for k in usable if _order(k, key, wanted) == _order(usable[0], key, wanted)]
        verdicts: list[Verdict] = []
        for kernel, objection in objections:
            if objection is None and len(tied) > 1 and kernel in tied:
                others = ", ".join(k.name for k in tied if k is not kernel)
                objection = f"ranks the same as {others}"
            elif objection is None and kernel is not usable[0]:
                objection = f"{usable[0].name} comes first ({_why_first(usable[0], kernel, key, wanted)})"
            verdicts.append(Verdict(kernel, objection))
        verdicts.sort(key=lambda v: v.reason is not None)
        return Explanation(_described(key), call.framework, tuple(verdicts), tuple(tied) if len(tied) > 1 else ())

    def _candidates(self, key: Key, names: Sequence[str]) -> list[Kernel]:
        """Kernels declared for the key, and those named, best first."""
        found = [k for k in self.kernels if _fits(k, key) or k.name in names]
        return sorted(found, key=lambda k: (_order(k, key, (*names, *self._prefer)), k.name))

    def _unconditional(self, key: Key, winner: Kernel) -> bool:
        """Would `winner` win whatever the operands' facts?"""
        first, *rest = [k for k in self._candidates(key, ()) if not k.opt_in]
        conditional = winner.device or winner.available or winner.accepts
        return first is winner and not conditional and all(_order(k, key, ()) != _order(winner, key, ()) for k in rest)

    def _objection(self, k: Kernel, key: Key, call: Call, names: Sequence[str]) -> str | None:
        """Why `k` cannot serve `call`, or None."""
        if not _fits(k, key):
            served = " and ".join(_class_name(c) for c in (k.recipe, k.other))
            return f"it is declared for {k.op} of {served} on {k.framework}"
        if names and k.name not in names:
            return f"prefer= names {', '.join(names)}"
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


def _loaded(kernel: Kernel) -> Any:
    """The function of a kernel that was chosen. Raises PluginError: falling back would hide the fault."""
    way_out = "." if kernel.plugin == "core" else f", or set its plug-in aside with BRECCIA_BLOCK={kernel.plugin}."
    what = f"kernel {kernel.name!r} of plug-in {kernel.plugin!r}"
    return targets.load_declared(what, kernel.target, f" Install what it needs{way_out}")


def _ask(target: str, argument: Any) -> str | None:
    """The answer of a kernel's check; a check that raises is a reason too, so one vendor cannot stop the others."""
    try:
        return targets.load(target)(argument)
    except Exception as e:
        return f"its check {target} failed: {type(e).__name__}: {e}"


def named(prefer: Prefer) -> tuple[str, ...]:
    """The kernel names of a `prefer=` argument."""
    return () if prefer is None else (prefer,) if isinstance(prefer, str) else tuple(prefer)


def _fits(k: Kernel, key: Key) -> bool:
    op, recipe, other, framework = key
    return (
        k.op == op
        and k.framework in (framework, ANY_FRAMEWORK)
        and _serves(k.recipe, recipe) is not None
        and _serves(k.other, other) is not None
    )


def _serves(declared: type | None, found: type) -> int | None:
    """2 if the kernel declares exactly this recipe class, 1 for its family, 0 for any; None if it does not serve it."""
    if declared is None:
        return 0
    if declared is found:
        return 2
    if not issubclass(found, declared):
        return None
    return 0 if declared is ScalingRecipe else 1


def _order(k: Kernel, key: Key, prefer: Sequence[str]) -> tuple[int, int, int, int]:
    place = prefer.index(k.name) if k.name in prefer else len(prefer)
    return place, -(_serves(k.recipe, key[1]) or 0), -(_serves(k.other, key[2]) or 0), -k.rank


def _why_first(winner: Kernel, loser: Kernel, key: Key, prefer: Sequence[str]) -> str:
    reasons = ("preferred by name", "declared for this recipe", "declared for the second operand's recipe", "higher rank")
    a, b = _order(winner, key, prefer), _order(loser, key, prefer)
    return next(why for why, x, y in zip(reasons, a, b, strict=True) if x != y)


# -- what a call looks like ------------------------------------------------------------------------------------------


def _classes(op: str, a: Any, b: Any, new: ScalingRecipe | None) -> tuple[type, type]:
    if op in _CASTS:
        return type(new), NoneType
    return _class_of(a), type(new) if op == "requantize" else _class_of(b)


def _class_of(x: Any) -> type:
    """The recipe class of an operand, or of the recipe that stands for it."""
    return type(x.recipe) if isinstance(x, ScaledTensor) else type(x) if isinstance(x, ScalingRecipe) else NoneType


def _facts(x: Any) -> Any:
    """All that `_operand` reads of `x`, cheap to gather and hash (so `identity`): equal facts make equal operands."""
    if x is None:
        return None
    if isinstance(x, ScaledTensor):
        data = x.data
        return x.recipe.identity, x.layout.identity, x.axis, x.tail, data.shape, data.dtype
    return x.identity if isinstance(x, ScalingRecipe) else (x.shape, x.dtype)


def _call(op: str, framework: str, a: Any, b: Any, new: ScalingRecipe | None, options: Options = ()) -> Call:
    first = _operand(a, new if op in _CASTS else None)
    device = device_of(a.data if isinstance(a, ScaledTensor) else a)
    return Call(op, framework, device, first, None if b is None else _operand(b, None), options)


def _operand(x: Any, new: ScalingRecipe | None) -> Operand:
    if isinstance(x, ScaledTensor):
        return Operand(x.recipe, dtype_name(x.data), x.ndim, x.layout, x.axis, _aligned(x.shape))
    if isinstance(x, ScalingRecipe):  # `explain` by name: a well aligned matrix under that recipe
        return Operand(x, x.format.element.dtype or "uint8", 2, x.layout, -1, _aligned(()))
    if x is None:
        return Operand(new, "float32", 2, None, -1, _aligned(()))
    return Operand(new, dtype_name(x), len(x.shape), None, -1, _aligned(tuple(x.shape)))


def _aligned(shape: tuple[int, ...]) -> tuple[int, int]:
    sides = (_ALIGNMENT_LIMIT, _ALIGNMENT_LIMIT, *shape)[-2:] if len(shape) != 1 else (1, *shape)
    m, k = ((n & -n) or _ALIGNMENT_LIMIT for n in sides)
    return min(m, _ALIGNMENT_LIMIT), min(k, _ALIGNMENT_LIMIT)


def _described(key: Key) -> str:
    op, a, b, _ = key
    joint = {"matmul": " and ", "requantize": " to "}.get(op)
    return f"{op} of {_class_name(a)}{joint}{_class_name(b)}" if joint else f"{op} of {_class_name(a)}"


def _class_name(c: type | None) -> str:
    """How messages call a recipe class: by its stable name."""
    if c is None or c is ScalingRecipe:
        return "any"
    return "array" if c is NoneType else getattr(c, "name", "") or c.__name__
