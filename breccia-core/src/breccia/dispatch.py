"""Dispatch: which kernel runs for a call, and why.

The table is keyed by (op, recipe class of a, recipe class of b, framework). The kernels of a key look at facts of the call:
shapes, alignment, storage, device, options. A fact is read when a kernel asks about it, and the table notes who asked: calls of
a key that agree in all facts ever asked about have one winner, which is remembered.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

from . import targets
from .codecs import Codec
from .errors import AmbiguousKernelError, KernelError, NoKernelError, PluginError, PluginWarning, UnknownNameError, suggestion
from .frameworks import Device, Framework, dtype_name, ops_of, place_of
from .layouts import Layout
from .options import DEFAULT, PLAIN, CastOptions
from .recipes import ScalingRecipe
from .siblings import SIBLINGS
from .tensor import ScaledTensor

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
_WRITERS = ("cast", "cast_pair", "requantize")

#: `Kernel.framework` of a kernel written over `Ops`, for any framework.
ANY_FRAMEWORK = "*"
#: `Kernel.reads` or `Kernel.writes` of a kernel that takes every storage.
ANY_STORAGE = ("*",)

#: Version of each op's contract that kernels are written against (docs/spec/numerics.md).
CONTRACT = 1

#: Winners remembered for each key of the table, those used last.
MEMO_LIMIT = 512
_ALIGNMENT_LIMIT = 256

#: (op, recipe class of a, recipe class of b, framework); the class of what is not scaled is `type(None)`.
Key = tuple[str, type, type, str]
Prefer = str | Sequence[str] | None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op: a function on plain arrays, called as the function of `breccia.calls` is, without `prefer`.

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


# -- facts of a call -------------------------------------------------------------------------------------------------

#: Where a fact is read from: the values of a call are (a, b, recipe to write, options, framework).
_A, _B, _RECIPE, _OPTIONS, _FRAMEWORK = range(5)
Values = tuple[Any, Any, Any, Any, Any]
#: A fact that was asked about: the path of an attribute or what reads it, and which of the values it is of.
Question = tuple[str | Callable[[Any], Hashable], int]


class Described(NamedTuple):
    """What stands for an operand that is not there: the recipe that `explain` was given, an operand of a kernel's own calls."""

    recipe: ScalingRecipe | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    axis: int = -1
    device: Device = Device("cpu")


def bucket(n: int) -> int:
    """`n` up to 8, then rounded up to three significant bits: 9 to 10, 17 to 20, 4000 to 4096."""
    if n <= 8:
        return n
    step = 1 << (n.bit_length() - 3)
    return -(-n // step) * step


def _array(x: Any) -> Any:
    return x.data if isinstance(x, ScaledTensor) else x


def _recipe(x: Any) -> ScalingRecipe | None:
    return x.recipe if isinstance(x, ScaledTensor | Described) else None


def _layout(x: Any) -> Layout | None:
    return x.layout if isinstance(x, ScaledTensor | Described) else None


def _bucketed(x: Any) -> tuple[int, ...]:
    shape = tuple(x.shape)
    return (*map(bucket, shape[:-1]), *shape[-1:])


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _empty(x: Any) -> bool:
    return 0 in (x.data.shape if isinstance(x, ScaledTensor) else x.shape)


def _aligned(x: Any) -> tuple[int, int]:
    shape = x.shape
    sides = (_ALIGNMENT_LIMIT, _ALIGNMENT_LIMIT, *shape)[-2:] if len(shape) != 1 else (1, *shape)
    m, k = sides
    return _power_of_two(m), _power_of_two(k)


def _power_of_two(n: int) -> int:
    """The largest one, up to 256, that divides `n`."""
    return min((n & -n) or _ALIGNMENT_LIMIT, _ALIGNMENT_LIMIT)


def _strides(x: Any) -> tuple[int, ...] | None:
    return None if isinstance(x, Described) else ops_of(_array(x)).strides(_array(x))


def _contiguous(x: Any) -> bool:
    strides, array = _strides(x), _array(x)
    if strides is None or 0 in array.shape:
        return True
    expected = ops_of(array).itemsize(array)
    for length, stride in zip(reversed(array.shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _components(x: Any) -> tuple[Any, ...]:
    if not isinstance(x, ScaledTensor):
        return (x,)
    zero_point, coarse = x.zero_point, x.global_scale
    if zero_point is None:
        return (x.data, x.scale) if coarse is None else (x.data, x.scale, coarse)
    return (x.data, x.scale, zero_point) if coarse is None else (x.data, x.scale, zero_point, coarse)


def _address_alignment(x: Any) -> int:
    if isinstance(x, Described):
        return _ALIGNMENT_LIMIT
    return min(_power_of_two(ops_of(part).address(part) or 0) for part in _components(x))


def _row_alignment(x: Any) -> int:
    strides, array = _strides(x), _array(x)
    if strides is None:
        return _ALIGNMENT_LIMIT
    item = ops_of(array).itemsize(array)
    return min((_power_of_two(stride) for stride in strides if stride != item), default=_ALIGNMENT_LIMIT)


@cache
def _opaque(target: str) -> Callable[[Any], str | None]:
    """The reader of what an operand is, if it holds an array without memory of its own."""

    ask: Any = None

    def read(x: Any) -> str | None:
        nonlocal ask
        try:
            if ask is None:
                ask = targets.load(target)
            return ask(*_components(x))
        except Exception as e:
            return f"an array about which {target} fails ({type(e).__name__}: {e})"

    return read


@cache
def _option(name: str) -> Callable[[Any], Hashable]:
    """The reader of an option: of an array, only that it is given."""

    def read(options: Any) -> Hashable:
        return _hashable(name, options.get(name))

    return read


def _all_options(options: Any) -> tuple[tuple[str, Hashable], ...]:
    return tuple([(name, _hashable(name, value)) for name, value in options.given().items()])


def _hashable(name: str, value: Any) -> Hashable:
    """An option as kernels see it: of an array, a supplied scale or a seed, only that it is given."""
    return True if (name in _BY_PRESENCE and value is not None) or hasattr(value, "shape") else value


_BY_PRESENCE = ("scale", "seed", "out")


#: Facts that are attributes, by their paths: of an array, and of a ScaledTensor.
_ATTRIBUTES = {
    "device": ("device", "data.device"),
    "dtype": ("dtype", "data.dtype"),
    "ndim": ("ndim", "data.ndim"),
    "axis": ("axis", "axis"),
    "recipe": ("recipe.identity", "recipe.identity"),
    "layout": ("layout.identity", "layout.identity"),
    "storage": ("layout.storage", "layout.storage"),
}
#: Facts that follow from the shape, and the attributes that it follows from.
_OF_SHAPE = (_bucketed, _shape, _empty, _aligned)
_SHAPES = (("shape",), ("data.shape", "tail", "axis", "recipe.identity", "layout.identity"))


class _Asking:
    """Reads facts of a call, and notes which. `values` is not for kernels: nobody notes what they read there."""

    def __init__(self, values: Values, asked: dict[Question, None]) -> None:
        self.values, self._asked = values, asked

    def _note(self, slot: int, fact: str | Callable[[Any], Hashable]) -> None:
        self._asked[fact, slot] = None

    def _ask(self, slot: int, read: Callable[[Any], Any]) -> Any:
        """A fact that is compared as it is."""
        self._note(slot, read)
        return read(self.values[slot])

    def _attribute(self, slot: int, name: str) -> None:
        """Note a fact that is compared by an attribute of the operand."""
        x = self.values[slot]
        scaled = isinstance(x, ScaledTensor)
        if isinstance(x, Described) or (not scaled and not hasattr(x, name)):
            return  # nothing that is remembered, or no attribute of this framework's arrays
        self._note(slot, _ATTRIBUTES[name][scaled])


class Operand(_Asking):
    """Facts of one operand. Of a ScaledTensor dtype, strides and contiguity are those of its codes.

    recipe: that of a ScaledTensor; of the operand of a cast, the recipe to write.
    shape: the logical shape. Of the first operand every length but the last is rounded up (see `bucket`), so that a kernel
        chosen for one batch size is found at once for the next; what `aligned` says is so of the exact shape.
    empty: has it no element? aligned: the largest powers of two (up to 256) that divide the last two sides.
    strides: in bytes, or None where the framework has none. contiguous: in C order.
    address_alignment: the largest power of two (up to 256) that divides the address of every array of it, in bytes.
    row_alignment: the same of every stride but that of neighbouring items.
    """

    def __init__(self, slot: int, values: Values, asked: dict[Question, None]) -> None:
        super().__init__(values, asked)
        self.slot = slot

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operand) and all(getattr(self, name) == getattr(other, name) for name in _OPERAND_FACTS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Operand({', '.join(f'{name}={getattr(self, name)!r}' for name in _OPERAND_FACTS)})"

    @property
    def recipe(self) -> ScalingRecipe | None:
        x = self.values[self.slot]
        found = _recipe(x)
        if found is None and self.slot == _A and self.values[_RECIPE] is not None:
            self._note(_RECIPE, "identity")
            return self.values[_RECIPE]
        if isinstance(x, ScaledTensor):
            self._attribute(self.slot, "recipe")
        return found

    @property
    def dtype(self) -> str:
        self._attribute(self.slot, "dtype")
        x = self.values[self.slot]
        return x.dtype if isinstance(x, Described) else dtype_name(_array(x))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._ask(self.slot, _bucketed if self.slot == _A else _shape)

    @property
    def ndim(self) -> int:
        self._attribute(self.slot, "ndim")
        if isinstance(self.values[self.slot], ScaledTensor):
            self._attribute(self.slot, "storage")  # codes may have other axes there
        return len(self.values[self.slot].shape)

    @property
    def empty(self) -> bool:
        return self._ask(self.slot, _empty)

    @property
    def layout(self) -> Layout | None:
        if isinstance(self.values[self.slot], ScaledTensor):
            self._attribute(self.slot, "layout")
        return _layout(self.values[self.slot])

    @property
    def axis(self) -> int:
        x = self.values[self.slot]
        if isinstance(x, ScaledTensor):
            self._attribute(self.slot, "axis")
        return x.axis if isinstance(x, ScaledTensor | Described) else -1

    @property
    def storage(self) -> str:
        x = self.values[self.slot]
        if not isinstance(x, ScaledTensor):
            return PLAIN
        self._attribute(self.slot, "storage")
        return x.layout.storage

    @property
    def aligned(self) -> tuple[int, int]:
        return self._ask(self.slot, _aligned)

    @property
    def strides(self) -> tuple[int, ...] | None:
        return self._ask(self.slot, _strides)

    @property
    def contiguous(self) -> bool:
        return self._ask(self.slot, _contiguous)

    @property
    def address_alignment(self) -> int:
        return self._ask(self.slot, _address_alignment)

    @property
    def row_alignment(self) -> int:
        return self._ask(self.slot, _row_alignment)

    def storage_of(self, codec: Codec) -> str:
        """Name of the dtype that codes of `codec` are stored in, on the operand's framework."""
        x = self.values[self.slot]
        return codec.dtype or "uint8" if isinstance(x, Described) else ops_of(_array(x)).storage(codec)

    def described(self) -> Described:
        """What this operand is, without its values."""
        x = self.values[self.slot]
        if isinstance(x, Described):
            return x
        return Described(_recipe(x), dtype_name(_array(x)), tuple(x.shape), _layout(x), self.axis, place_of(_array(x)))


_OPERAND_FACTS = ("recipe", "dtype", "ndim", "shape", "layout", "axis", "storage", "aligned", "contiguous")


class Call(_Asking):
    """What `Kernel.accepts`, `score` and `plan` are asked about: the facts of one call.

    op, framework: their names. a, b: the operands; b is None where the op has one.
    """

    def __init__(self, op: str, framework: str, values: Values, asked: dict[Question, None] | None = None) -> None:
        super().__init__(values, {} if asked is None else asked)
        self.op, self.framework = op, framework
        self.a = Operand(_A, values, self._asked)
        self.b = None if values[_B] is None else Operand(_B, values, self._asked)

    @property
    def recipe(self) -> ScalingRecipe | None:
        """The recipe to write, or None."""
        recipe = self.values[_RECIPE]
        if recipe is not None:
            self._note(_RECIPE, "identity")
        return recipe

    @property
    def device(self) -> Device:
        """Where the first operand is, with the number and the compute capability of the device."""
        framework: Framework | None = self.values[_FRAMEWORK]
        if framework is None or len(framework.kinds) != 1:  # else there is but one answer
            self._attribute(_A, "device")
        x = self.values[_A]
        return x.device if isinstance(x, Described) else place_of(_array(x))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options that are not at their default; of `scale`, `seed`, `out`, `bias` only that they are given."""
        return dict(_all_options(self.values[_OPTIONS])) if self._defaults else dict(self._ask(_OPTIONS, _all_options))

    def option(self, name: str, default: Any = None) -> Any:
        """One keyword option of the op; `default` where the op has no such option, or it is None."""
        options = self.values[_OPTIONS]
        found = _hashable(name, options.get(name)) if self._defaults else self._ask(_OPTIONS, _option(name))
        return default if found is None else found

    @property
    def _defaults(self) -> bool:
        """Are all options at their default? Such calls are remembered apart, so that nothing need be read of them."""
        return self.values[_OPTIONS] is DEFAULT or self.values[_OPTIONS] is NO_OPTIONS

    def cast_options(self) -> CastOptions:
        """The options of an op that casts."""
        options = self.values[_OPTIONS]
        if isinstance(options, CastOptions):
            return options
        return CastOptions(**{name: value for name, value in options.items() if hasattr(DEFAULT, name)})

    @property
    def storage(self) -> str:
        """The storage to write."""
        return self.option("storage", PLAIN)

    @property
    def stored(self) -> bool:
        """Is any operand, or what is to be written, in a storage other than plain?"""
        writes = self.op in _WRITERS and self.storage != PLAIN
        return writes or any(operand.storage != PLAIN for operand in self.scaled)

    @property
    def opaque(self) -> str | None:
        """What kind of array without memory of its own an operand is, or None."""
        framework: Framework | None = self.values[_FRAMEWORK]
        if framework is None or framework.opaque is None:
            return None
        read = _opaque(framework.opaque)
        for slot in (_A, _B):
            x = self.values[slot]
            if x is None or isinstance(x, Described):
                continue  # and no framework is imported
            if (found := self._ask(slot, read)) is not None:
                return found
        return None

    @property
    def scaled(self) -> tuple[Operand, ...]:
        """The operands that are ScaledTensors."""
        values = ((self.a, self.values[_A]), (self.b, self.values[_B]))
        return tuple([operand for operand, value in values if operand is not None and isinstance(value, ScaledTensor)])

    def makes(self, op: str, a: Any, b: Any = None, recipe: ScalingRecipe | None = None, **changed: Any) -> Call:
        """A call that a kernel makes on the way, for `Kernel.plan`. Operands are those of this call, or `Described` ones.

        changed: framework=, options=.
        """
        framework: str = changed.get("framework", self.framework)
        first, second = (x.values[x.slot] if isinstance(x, Operand) else x for x in (a, b))
        home = self.values[_FRAMEWORK] if framework == self.framework else None
        return Call(op, framework, (first, second, recipe, changed.get("options", NO_OPTIONS), home))


class Options(dict[str, Any]):
    """The options of an op that takes no `CastOptions`, by name: those that are not at their default."""

    def given(self) -> dict[str, Any]:
        """All of them."""
        return self

    def get(self, name: str, default: Any = None) -> Any:
        """One of them; where it is not given, its default."""
        return super().get(name, "float32" if name == "out_dtype" else default)


NO_OPTIONS = Options()


# -- what explain says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One candidate of a call: why it was skipped, or None for the winner."""

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
    plan: the calls that the winner makes of other kernels, explained in the same way.
    """

    call: str
    framework: str
    verdicts: tuple[Verdict, ...]
    tied: tuple[Kernel, ...] = ()
    device: str = ""
    plan: tuple[Explanation, ...] = ()

    @property
    def winner(self) -> Kernel | None:
        return next((v.kernel for v in self.verdicts if v.reason is None), None)

    @property
    def fault(self) -> str:
        """What stops the call, and the ways out; empty where a kernel runs."""
        if self.tied:
            a, b = self.tied[:2]
            return (
                f"Kernels {a.name!r} ({a.plugin}) and {b.name!r} ({b.plugin}) rank the same. Name one with prefer=, or set one "
                f"plug-in aside with BRECCIA_BLOCK={b.plugin}."
            )
        if self.winner is None:
            return "No kernel runs for this call. `breccia plugins` shows what is installed and what was set aside."
        return ""

    @property
    def running(self) -> str:
        """The winner's name, and in parentheses those of the kernels that it calls."""
        if self.winner is None:
            return ""
        inner = ", ".join(step.running for step in self.plan)
        return self.winner.name + (f" ({inner})" if inner else "")

    def _calls(self, indent: str) -> list[str]:
        """A line for each call of the plan, and those of its own plan below it."""
        lines: list[str] = []
        for step in self.plan:
            where = next((f" {v.location}" for v in step.verdicts if v.reason is None), "")
            lines.append(
                f"{indent}calls {step.call} on {step.framework}: {step.winner.name if step.winner else step.fault}{where}"
            )
            lines += step._calls(indent + "  ")
        return lines

    def __str__(self) -> str:
        lines = [f"{self.call} on {self.framework}{self.device and ':' + self.device}"]
        width = max((len(v.kernel.name) for v in self.verdicts), default=0)
        for v in self.verdicts:
            arrow = " -> " if v.reason is None else "    "
            lines.append(f"{arrow}{v.kernel.name:{width}}  {v.kernel.plugin:10} {v.location}")
            if v.reason is not None:
                lines.append(f"      skipped: {v.reason}")
            if v.reason is None:
                lines += self._calls("      ")
        if self.fault:
            lines.append(f"  {self.fault}")
        return "\n".join(lines)


# -- the table -------------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """The winner of a call: what to call, and what to do with what it returns.

    checked: is the result looked at, since the kernel is a third party's? audited: is it compared with the generic algorithm?
    """

    function: Any
    kernel: Kernel
    checked: bool
    audited: bool
    traced: str

    def failed(self, error: Exception) -> None:
        """Name the kernel on an error that left it."""
        error.add_note(f"This was raised inside {self.title}")

    def refused(self, why: str) -> KernelError:
        """The error of a result that it must not give."""
        return KernelError(f"{why} It came from {self.title}", kernel=self.kernel.name, plugin=self.kernel.plugin)

    @property
    def title(self) -> str:
        """How messages call it, with the way out."""
        k = self.kernel
        way_out = "." if k.plugin == "core" else f"; BRECCIA_BLOCK={k.plugin} sets that plug-in aside."
        return f"kernel {k.name!r} of plug-in {k.plugin!r} ({targets.locate(k.target)}){way_out}"


class _Site:
    """What is remembered of one key of the table, for calls with `values` like these.

    asked: the facts that its kernels asked about. chosen: the winner for each of their values.
    seen: the winner by the attributes that those facts follow from. Most calls are like an earlier one in all of them, and are
        found here. attributes: reads them, all of a value at once in C.
    """

    __slots__ = ("asked", "attributes", "chosen", "seen")

    def __init__(self, asked: tuple[Question, ...], values: Values) -> None:
        self.asked = asked
        self.chosen: OrderedDict[tuple[Hashable, ...], Chosen] = OrderedDict()
        self.seen: OrderedDict[Hashable, Chosen] = OrderedDict()
        paths: dict[int, dict[str, None]] = {}
        others: list[tuple[Callable[[Any], Hashable], int]] = []
        for fact, slot in asked:
            if fact in _OF_SHAPE:
                paths.setdefault(slot, {}).update(dict.fromkeys(_SHAPES[isinstance(values[slot], ScaledTensor)]))
            elif isinstance(fact, str):
                paths.setdefault(slot, {})[fact] = None
            else:
                others.append((fact, slot))
        self.attributes = _reading([*((attrgetter(*names), slot) for slot, names in paths.items()), *others])

    def facts(self, values: Values) -> tuple[Hashable, ...]:
        """What the call has for each fact that was asked about."""
        return tuple([attrgetter(f)(values[slot]) if isinstance(f, str) else f(values[slot]) for f, slot in self.asked])

    def remember(self, values: Values, chosen: Chosen) -> None:
        """Find the winner for values like these at once the next time."""
        with suppress(TypeError):  # a length that a compiler has yet to learn has no hash
            self.seen[self.attributes(values)] = chosen
        if len(self.seen) > MEMO_LIMIT:
            with suppress(KeyError):  # another thread has dropped the last one since
                self.seen.popitem(last=False)


def _reading(readers: list[tuple[Callable[[Any], Hashable], int]]) -> Callable[[Any], Hashable]:
    """One function for all of them. Usual numbers of them are spelled out: a loop costs as much as what is read in it."""
    match readers:
        case [(f, i)]:
            return lambda values: f(values[i])
        case [(f, i), (g, j)]:
            return lambda values: (f(values[i]), g(values[j]))
        case [(f, i), (g, j), (h, k)]:
            return lambda values: (f(values[i]), g(values[j]), h(values[k]))
        case [(f, i), (g, j), (h, k), (e, m)]:
            return lambda values: (f(values[i]), g(values[j]), h(values[k]), e(values[m]))
        case _:
            return lambda values: tuple([read(values[slot]) for read, slot in readers])


class Table:
    """All kernels; immutable but for what it remembers.

    frameworks: by name, for what they say of arrays. auditing: compare every kernel with the generic algorithm.
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
        self._sites: dict[Any, _Site] = {}
        self._available: dict[tuple[str, Device], str | None] = {}
        self._learning = threading.Lock()

    def choose(
        self,
        op: str,
        framework: str,
        a: Any,
        b: Any = None,
        new: ScalingRecipe | None = None,
        options: Any = NO_OPTIONS,
        prefer: Prefer = None,
    ) -> Chosen:
        """The kernel that runs for op(a, b). `new` is the recipe to write, for casts and requantize."""
        other = type(b.recipe) if isinstance(b, ScaledTensor) else NoneType
        if op in CASTS:
            first = type(new)
        else:
            first = type(a.recipe) if isinstance(a, ScaledTensor) else NoneType
            if new is not None:
                other = type(new)
        if prefer is not None and not isinstance(prefer, str):
            prefer = tuple(prefer)
        place = (op, first, other, framework, prefer, options is DEFAULT or options is NO_OPTIONS)
        site = self._sites.get(place)
        if site is not None:
            values = (a, b, new, options)
            attributes = site.attributes(values)
            try:
                chosen = site.seen.get(attributes)
            except TypeError:  # see `_Site.remember`
                chosen = None
            if chosen is not None:
                if len(site.seen) > MEMO_LIMIT // 2:
                    _used(site.seen, attributes)
                return chosen
        return self._chosen(place, (a, b, new, options, self._frameworks.get(framework)))

    def explain(self, call: Call, prefer: Prefer = None, device: str = "") -> Explanation:
        """Every candidate of the call, the winner first, and what the winner calls in its turn."""
        if call.values[_FRAMEWORK] is None:
            values = (*call.values[:_FRAMEWORK], self._frameworks.get(call.framework))
            call = Call(call.op, call.framework, values)
        found = replace(self._judge(_key(call), call, named(prefer)), device=device)
        winner = found.winner
        if winner is None or winner.plan is None:
            return found
        steps = _checked(winner.plan, call, winner, _calls)
        return found if isinstance(steps, str) else replace(found, plan=tuple([self.explain(step) for step in steps]))

    # -- choosing ------------------------------------------------------------------------------------------------

    def _chosen(self, place: Any, values: Values) -> Chosen:
        """The winner, remembered for the next call that agrees in all facts that were asked about."""
        site = self._sites.get(place)
        if site is not None:
            facts = site.facts(values)
            chosen = site.chosen.get(facts)
            if chosen is not None:
                _used(site.chosen, facts)
                site.remember(values, chosen)
                return chosen
        key, names = place[:4], named(place[4])
        asked: dict[Question, None] = {}
        call = Call(key[0], key[3], values, asked)
        judged = self._judge(key, call, names)
        if judged.tied:
            raise AmbiguousKernelError(
                f"{judged.call} on {judged.framework}: {judged.fault}", kernels=tuple(k.name for k in judged.tied)
            )
        if judged.winner is None:
            raise NoKernelError(str(judged), op=call.op, prefer=names)
        winner = judged.winner
        traced = f"breccia: {judged.call} on {call.framework} ({call.device.kind}) -> {winner.name}" if self.tracing else ""
        generic = winner.plugin == "core" and winner.target.startswith(_GENERIC)
        foreign = winner.plugin not in _OURS
        chosen = Chosen(_loaded(winner), winner, foreign or self._auditing, self._auditing and not generic, traced)
        with self._learning:
            site = self._sites.get(place)
            questions = tuple(dict.fromkeys([*(() if site is None else site.asked), *asked]))
            if site is None or site.asked != questions:  # a new question: what was remembered did not answer it
                site = self._sites[place] = _Site(questions, values)
            site.chosen[site.facts(values)] = chosen
            if len(site.chosen) > MEMO_LIMIT:
                site.chosen.popitem(last=False)
            site.remember(values, chosen)
        return chosen

    def _judge(self, key: Key, call: Call, names: tuple[str, ...]) -> Explanation:
        known = [k.name for k in self.kernels]
        for name in names:
            if name not in known:
                raise UnknownNameError(f"prefer={name!r}: no such kernel{suggestion(name, known)}", name=name, known=known)
        wanted = (*names, *self._prefer)
        objections: list[tuple[Kernel, str | None, _Order]] = []
        for k in (k for k in self.kernels if _fits(k, key) or k.name in names):
            if k.writes == ANY_STORAGE and k.name not in names and not call.stored:
                continue  # they convert storages, and are of no interest where there are none
            objection = self._objection(k, key, call, names)
            score = self._score(k, call) if objection is None else math.inf
            objections.append((k, objection, _order(k, key, wanted, score)))
        objections.sort(key=lambda found: (found[2], found[0].name))
        usable = [(k, order) for k, objection, order in objections if objection is None]
        tied = [k for k, order in usable if order == usable[0][1]]
        verdicts: list[Verdict] = []
        for kernel, objection, order in objections:
            if objection is None and len(tied) > 1 and kernel in tied:
                others = ", ".join(k.name for k in tied if k is not kernel)
                objection = f"ranks the same as {others}"
            elif objection is None and kernel is not usable[0][0]:
                objection = f"{usable[0][0].name} comes first ({_why_first(usable[0][1], order)})"
            verdicts.append(Verdict(kernel, objection))
        verdicts.sort(key=lambda v: v.reason is not None)
        return Explanation(_described(key), call.framework, tuple(verdicts), tuple(tied) if len(tied) > 1 else ())

    def _objection(self, k: Kernel, key: Key, call: Call, names: Sequence[str]) -> str | None:
        """Why `k` cannot run for `call`, or None."""
        if not _fits(k, key):
            served = " and ".join(_class_name(c) for c in (k.recipe, k.other))
            return f"it is declared for {k.op} of {served} on {k.framework}"
        if names and k.name not in names:
            return f"prefer= names {', '.join(names)}"
        if k.opt_in and k.name not in names and k.name not in self._prefer:
            return f"opt-in: it does not keep the contract of {k.op}; name it with prefer={k.name!r}"
        if k.device is not None and k.device != call.device.kind:
            return f"runs on {k.device}, the data is on {call.device.kind}"
        if not k.traces and (opaque := call.opaque) is not None:
            return f"needs arrays in memory; this is {opaque}"
        if k.reads != ANY_STORAGE:
            for operand in call.scaled:
                if (storage := operand.storage) != PLAIN and storage not in k.reads:
                    return f"reads {_listed(k.reads)} storage, an operand is in {storage!r}; st.to_storage('plain') converts it"
        if k.op in _WRITERS and k.writes != ANY_STORAGE and (storage := call.storage) not in (PLAIN, *k.writes):
            return f"writes {_listed(k.writes)} storage, not {storage!r}"
        if k.available is not None:
            fact = (k.available, call.device)
            if fact not in self._available:
                self._available[fact] = _ask(k.available, call.device, k)
            if self._available[fact] is not None:
                return self._available[fact]
        return _ask(k.accepts, call, k) if k.accepts is not None else None

    def _score(self, k: Kernel, call: Call) -> float:
        """The estimated time of a kernel; infinite where it gives none."""
        if k.score is None:
            return math.inf
        found = _checked(k.score, call, k, _number)
        return math.inf if isinstance(found, str) else found


#: Plug-ins of breccia's own distributions: their kernels are held to the contract by its tests.
_OURS = frozenset(("core", *(sibling.plugin for sibling in SIBLINGS)))
#: Where kernels are that need no comparison with the generic algorithm: itself, and what calls other kernels.
_GENERIC = ("breccia.kernels.reference:", "breccia.kernels.composites:")


def _used(chosen: OrderedDict[Any, Chosen], facts: Hashable) -> None:
    """Note that an entry was used just now."""
    with suppress(KeyError):  # another thread has dropped it since
        chosen.move_to_end(facts)


def _key(call: Call) -> Key:
    a, b = call.values[_A], call.values[_B]
    new: ScalingRecipe | None = call.values[_RECIPE]
    written: type = type(new)
    if call.op in CASTS:
        return call.op, written, _class_of(b), call.framework
    return call.op, _class_of(a), _class_of(b) if new is None else written, call.framework


def _class_of(x: Any) -> type:
    """The recipe class of an operand, there or described."""
    recipe = _recipe(x)
    return NoneType if recipe is None else type(recipe)


def _listed(storages: tuple[str, ...]) -> str:
    return " and ".join(map(repr, (PLAIN, *storages)))


def _loaded(kernel: Kernel) -> Any:
    """The function of a kernel that was chosen. Raises PluginError: falling back would hide the fault."""
    way_out = "." if kernel.plugin == "core" else f", or set its plug-in aside with BRECCIA_BLOCK={kernel.plugin}."
    what = f"kernel {kernel.name!r} of plug-in {kernel.plugin!r}"
    return targets.load_declared(what, kernel.target, f" Install what it needs{way_out}")


def _ask(target: str, argument: Any, kernel: Kernel) -> str | None:
    """The answer of a kernel's check, None or the reason it gave."""
    return _checked(target, argument, kernel, _reason)


class _Wrong(Exception):
    """What a kernel's function gave, and must not."""


def _reason(found: Any) -> str | None:
    if found is not None and not isinstance(found, str):
        raise _Wrong(f"gave {found!r}; it must be None or a reason")
    return found


def _number(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, Real) or math.isnan(found):
        raise _Wrong(f"gave {found!r}, which is no number")
    return float(found)


def _calls(found: Any) -> list[Call]:
    return list(found)


def _checked(target: str, argument: Any, kernel: Kernel, read: Callable[[Any], Any]) -> Any:
    """What a kernel's function says, as `read` takes it; or why it says nothing, so that one vendor's mistake stops nobody."""
    try:
        return read(targets.load(target)(argument))
    except _Wrong as e:
        return _report(kernel, f"its {'score' if target == kernel.score else 'check'} {target} {e}")
    except (Exception, SystemExit) as e:
        return _report(kernel, f"its check {target} failed: {type(e).__name__}: {e}")


_reported: set[tuple[str, str]] = set()


def _report(kernel: Kernel, fault: str) -> str:
    """`fault`, with a warning that names the kernel, once a process."""
    if (kernel.name, kernel.target) not in _reported:
        _reported.add((kernel.name, kernel.target))
        way_out = "" if kernel.plugin == "core" else f" BRECCIA_BLOCK={kernel.plugin} sets the plug-in aside."
        what = f"kernel {kernel.name!r} of plug-in {kernel.plugin!r}"
        warnings.warn(f"{what}: {fault.removesuffix('.')}.{way_out}", PluginWarning, stacklevel=2)
    return fault


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
    """2 if the kernel declares exactly this recipe class, 1 for its family, 0 for any; None if it is not for it."""
    if declared is None:
        return 0
    if declared is found:
        return 2
    if not issubclass(found, declared):
        return None
    return 0 if declared is ScalingRecipe else 1


#: Smaller comes first: preference, specificity of either recipe, score, rank.
_Order = tuple[int, int, int, float, int]


def _order(k: Kernel, key: Key, prefer: Sequence[str], score: float) -> _Order:
    place = prefer.index(k.name) if k.name in prefer else len(prefer)
    return place, -(_serves(k.recipe, key[1]) or 0), -(_serves(k.other, key[2]) or 0), score, -k.rank


def _why_first(winner: _Order, loser: _Order) -> str:
    reasons = (
        "preferred by name",
        "declared for this recipe",
        "declared for the second operand's recipe",
        f"estimated {winner[3]:.3g} s against {loser[3]:.3g} s" if math.isfinite(loser[3]) else "it estimates its time",
        "higher rank",
    )
    return next(why for why, x, y in zip(reasons, winner, loser, strict=True) if x != y)


def _described(key: Key) -> str:
    op, a, b, _ = key
    joint = {"matmul": " and ", "cast_matmul": " and ", "grouped_matmul": " and ", "requantize": " to "}.get(op)
    return f"{op} of {_class_name(a)}{joint}{_class_name(b)}" if joint else f"{op} of {_class_name(a)}"


def _class_name(c: type | None) -> str:
    """How messages call a recipe class: by its stable name."""
    if c is None or c is ScalingRecipe:
        return "any"
    return "array" if c is NoneType else getattr(c, "name", "") or c.__name__
