"""The dispatch table: selects the kernel for a call.

The table is keyed by (op, recipe class of a, recipe class of b, framework). A kernel fits a key by its declaration; for a call,
it may have an objection; of the others, the first in the order of preference runs. `memo` finds the winners of earlier calls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import targets
from ..arrays.frameworks import Device, Framework
from ..errors import AmbiguousKernelError, KernelError, NoKernelError, PluginWarning, UnknownNameError, suggestion
from ..operations import Operation
from ..options import DEFAULT, FLOAT32, PLAIN
from ..recipes import ScalingRecipe
from ..siblings import SIBLINGS
from ..tensors.checks import need_one_device
from ..tensors.tensor import ScaledTensor
from .call import Call
from .explanation import Explanation, Verdict
from .facts import FRAMEWORK, RECIPE, A, B, recipe_of
from .kernel import ANY_STORAGE, class_name, fits, key_title, named, order_of, why_first
from .memo import Memo

if TYPE_CHECKING:
    from .facts import Question, Values
    from .kernel import Kernel, Key, Order, Prefer


class Chosen(NamedTuple):
    """The winner of a call: the function, and how its result is checked.

    checked: whether the result is checked, for third-party kernels. audited: whether it is compared with `reference`
    """

    function: Any
    kernel: Kernel
    checked: bool
    audited: bool
    traced: str

    def failed(self, error: Exception) -> None:
        """Add a note naming the kernel to an error it raised."""
        error.add_note(f"This was raised inside {self.title}")

    def refused(self, why: str) -> KernelError:
        """The error for an invalid result."""
        return KernelError(f"{why} It came from {self.title}", kernel=self.kernel.name, plugin=self.kernel.plugin)

    @property
    def title(self) -> str:
        """Its title in messages, with the remedy."""
        k = self.kernel
        way_out = "." if k.plugin == "core" else f"; BRECCIA_BLOCK={k.plugin} sets that plug-in aside."
        return f"kernel {k.name!r} of plug-in {k.plugin!r} ({targets.locate(k.target)}){way_out}"


class Table:
    """All kernels; immutable except for its caches.

    operations: by name. frameworks: by name, for facts about arrays. auditing: compare every kernel with the generic algorithm.
    """

    def __init__(
        self,
        kernels: Iterable[Kernel],
        prefer: Sequence[str] = (),
        tracing: bool = False,
        frameworks: dict[str, Framework] | None = None,
        auditing: bool = False,
    ) -> None:
        self.kernels = tuple(kernels)
        self.tracing = tracing
        self._prefer = tuple(prefer)
        self._frameworks = frameworks or {}
        self._auditing = auditing
        self.memo = Memo[Chosen]()
        self._available: dict[tuple[str, Device], str | None] = {}

    def choose(
        self,
        op: Operation,
        framework: str,
        a: Any,
        b: Any = None,
        new: ScalingRecipe | None = None,
        options: Any = DEFAULT,
        prefer: Prefer = None,
    ) -> Chosen:
        """The kernel that runs for op(a, b). `new` is the recipe to write, for ops that write one."""
        other = type(b.recipe) if isinstance(b, ScaledTensor) else NoneType
        if op.casts:
            first = type(new)
        else:
            first = type(a.recipe) if isinstance(a, ScaledTensor) else NoneType
            if new is not None:
                other = type(new)
        if prefer is not None and not isinstance(prefer, str):
            prefer = tuple(prefer)
        key = (op.name, first, other, framework, prefer, options is DEFAULT or options is FLOAT32)
        chosen = self.memo.repeated(key, (a, b, new, options))
        if chosen is None:
            chosen = self._chosen(op, key, (a, b, new, options, self._frameworks.get(framework)))
        return chosen

    def explain(self, call: Call, prefer: Prefer = None, device: str = "") -> Explanation:
        """Every candidate of the call, the winner first, and the winner's calls of other kernels."""
        need_one_device(**_operands(call.operation, call.values))
        if call.values[FRAMEWORK] is None:
            values = (*call.values[:FRAMEWORK], self._frameworks.get(call.framework))
            call = Call(call.operation, call.framework, values)
        judged = replace(self._judge(_key(call), call, named(prefer)), device=device)
        winner = judged.winner
        if winner is None or winner.plan is None:
            return judged
        steps = _checked(winner.plan, call, winner, _calls)
        return judged if isinstance(steps, str) else replace(judged, plan=tuple([self.explain(step) for step in steps]))

    # -- choosing ------------------------------------------------------------------------------------------------

    def _chosen(self, op: Operation, memo_key: Any, values: Values) -> Chosen:
        """The winner, kept for calls that agree in all facts that were read."""
        if (chosen := self.memo.known(memo_key, values)) is not None:
            return chosen
        key, names = memo_key[:4], named(memo_key[4])
        need_one_device(**_operands(op, values))
        read: dict[Question, None] = {}
        call = Call(op, key[3], values, read)
        judged = self._judge(key, call, names)
        if judged.tied:
            raise AmbiguousKernelError(
                f"{judged.call} on {judged.framework}: {judged.fault}", kernels=tuple(k.name for k in judged.tied)
            )
        if judged.winner is None:
            raise NoKernelError(str(judged), op=call.op, prefer=names)
        winner = judged.winner
        traced = f"breccia: {judged.call} on {call.framework} ({call.device.kind}) -> {winner.name}" if self.tracing else ""
        generic = winner.kind != "kernel" and winner.plugin in _OURS
        foreign = winner.plugin not in _OURS
        chosen = Chosen(_loaded(winner), winner, foreign or self._auditing, self._auditing and not generic, traced)
        self.memo.learn(memo_key, values, read, chosen)
        return chosen

    def _judge(self, key: Key, call: Call, names: tuple[str, ...]) -> Explanation:
        known = [k.name for k in self.kernels]
        for name in names:
            if name not in known:
                raise UnknownNameError(f"prefer={name!r}: no such kernel{suggestion(name, known)}", name=name, known=known)
        wanted = (*names, *self._prefer)
        objections: list[tuple[Kernel, str | None, Order]] = []
        for k in (k for k in self.kernels if fits(k, key) or k.name in names):
            converts = k.kind == "storage" or (k.kind == "kernel" and k.writes == ANY_STORAGE)
            if converts and k.name not in names and not call.stored:
                continue  # they convert storages; skip them for plain operands
            objection = self._objection(k, key, call, names)
            score = self._score(k, call) if objection is None else math.inf
            objections.append((k, objection, order_of(k, key, wanted, score)))
        objections.sort(key=lambda entry: (entry[2], entry[0].name))
        usable = [(k, order) for k, objection, order in objections if objection is None]
        tied = [k for k, order in usable if order == usable[0][1]]
        verdicts: list[Verdict] = []
        for kernel, objection, order in objections:
            if objection is None and len(tied) > 1 and kernel in tied:
                others = ", ".join(k.name for k in tied if k is not kernel)
                objection = f"ranks the same as {others}"
            elif objection is None and kernel is not usable[0][0]:
                objection = f"{usable[0][0].name} comes first ({why_first(usable[0][1], order)})"
            verdicts.append(Verdict(kernel, objection))
        verdicts.sort(key=lambda v: v.reason is not None)
        return Explanation(
            key_title(key, call.operation.joint), call.framework, tuple(verdicts), tuple(tied) if len(tied) > 1 else ()
        )

    def _objection(self, k: Kernel, key: Key, call: Call, names: Sequence[str]) -> str | None:
        """Why `k` cannot run for `call`, or None."""
        if not fits(k, key):
            served = " and ".join(class_name(c) for c in (k.recipe, k.other))
            return f"it is declared for {k.op} of {served} on {k.framework}"
        if names and k.name not in names:
            return f"prefer= names {', '.join(names)}"
        if k.opt_in and k.name not in names and k.name not in self._prefer:
            return f"opt-in: it does not follow the contract of {k.op}; name it with prefer={k.name!r}"
        if k.device is not None and k.device != call.device.kind:
            return f"runs on {k.device}, the data is on {call.device.kind}"
        if k.kind == "kernel" and (unknown := sorted(call.features.difference(k.knows))):
            if "decode_only" in unknown:
                return f"{_title_of(call)} is only decoded"
            return f"does not know {', '.join(unknown).replace('_', ' ')}, which {_title_of(call)} has"
        if not k.traces and (opaque := call.opaque) is not None:
            return f"needs arrays in memory; this is {opaque}"
        if k.reads != ANY_STORAGE:
            for operand in call.scaled:
                if (storage := operand.storage) != PLAIN and storage not in k.reads:
                    return f"reads {_listed(k.reads)} storage, an operand is in {storage!r}; st.to_storage('plain') converts it"
        if call.operation.stores and k.writes != ANY_STORAGE and (storage := call.storage) not in (PLAIN, *k.writes):
            return f"writes {_listed(k.writes)} storage, not {storage!r}"
        if k.available is not None:
            fact = (k.available, call.device)
            if fact not in self._available:
                self._available[fact] = _ask(k.available, call.device, k)
            if self._available[fact] is not None:
                return self._available[fact]
        return _ask(k.accepts, call, k) if k.accepts is not None else None

    def _score(self, k: Kernel, call: Call) -> float:
        """The estimated time of a kernel; infinite if it has none."""
        if k.score is None:
            return math.inf
        score = _checked(k.score, call, k, _number)
        return math.inf if isinstance(score, str) else score


#: Plug-ins of breccia's own distributions: its tests check their kernels against the contract.
_OURS = frozenset(("core", *(sibling.plugin for sibling in SIBLINGS)))


def _operands(op: Operation, values: Values) -> dict[str, Any]:
    """The operands of a call that kernels are chosen by, by name; none for ops of arrays alone."""
    if not op.scaled:
        return {}
    named = {op.arguments[0][0]: values[A]}
    return named if op.second is None else {**named, op.arguments[op.second][0]: values[B]}


def _key(call: Call) -> Key:
    a, b = call.values[A], call.values[B]
    new: ScalingRecipe | None = call.values[RECIPE]
    written: type = type(new)
    if call.operation.casts:
        return call.op, written, _class_of(b), call.framework
    return call.op, _class_of(a), _class_of(b) if new is None else written, call.framework


def _class_of(x: Any) -> type:
    """The recipe class of an operand or its description."""
    recipe = recipe_of(x)
    return NoneType if recipe is None else type(recipe)


def _title_of(call: Call) -> str:
    """The recipe whose format has features that a kernel does not know."""
    recipes = [call.values[RECIPE], recipe_of(call.values[A]), recipe_of(call.values[B])]
    return next(recipe.spec for recipe in recipes if recipe is not None and recipe.features)


def _listed(storages: tuple[str, ...]) -> str:
    return " and ".join(map(repr, (PLAIN, *storages)))


def _loaded(kernel: Kernel) -> Any:
    """The function of the chosen kernel. Raises PluginError: a fallback would hide the fault."""
    way_out = "." if kernel.plugin == "core" else f", or set its plug-in aside with BRECCIA_BLOCK={kernel.plugin}."
    what = f"kernel {kernel.name!r} of plug-in {kernel.plugin!r}"
    return targets.load_declared(what, kernel.target, f" Install what it needs{way_out}")


def _ask(target: str, argument: Any, kernel: Kernel) -> str | None:
    """The result of a kernel's check: None or a reason."""
    return _checked(target, argument, kernel, _reason)


class _Wrong(Exception):
    """A kernel's function returned an invalid value."""


def _reason(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _Wrong(f"returned {value!r}; it must be None or a reason")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise _Wrong(f"returned {value!r}, which is not a number")
    return float(value)


def _calls(calls: Any) -> list[Call]:
    return list(calls)


def _checked(target: str, argument: Any, kernel: Kernel, read: Callable[[Any], Any]) -> Any:
    """The result of a kernel's function, through `read`; or its failure as text, so that one faulty plug-in breaks no other."""
    try:
        return read(targets.load(target)(argument))
    except _Wrong as e:
        return _report(kernel, f"its {'score' if target == kernel.score else 'check'} {target} {e}")
    except (Exception, SystemExit) as e:
        return _report(kernel, f"its check {target} failed: {type(e).__name__}: {e}")


_reported: set[tuple[str, str]] = set()


def _report(kernel: Kernel, fault: str) -> str:
    """`fault`, with a warning that names the kernel, once per process."""
    if (kernel.name, kernel.target) not in _reported:
        _reported.add((kernel.name, kernel.target))
        way_out = "" if kernel.plugin == "core" else f" BRECCIA_BLOCK={kernel.plugin} sets the plug-in aside."
        what = f"kernel {kernel.name!r} of plug-in {kernel.plugin!r}"
        warnings.warn(f"{what}: {fault.removesuffix('.')}.{way_out}", PluginWarning, stacklevel=2)
    return fault
