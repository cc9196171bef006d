"""Laws of kernel selection: a kernel's `accepts`, `score` and `plan`, and that calls without `prefer=` select one kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pytest

from ... import api, targets
from ...arrays.frameworks import Device
from ...dispatch.call import Call, Operand
from ...dispatch.kernel import Kernel
from ...dispatch.registry import registry
from ...errors import AmbiguousKernelError, BrecciaError, NoKernelError
from ...kernels import reference
from ...operations import Operation
from ...options import DEFAULT, CastOptions, ProductOptions
from ...recipes import MXFP8BlockScaling, ScalingRecipe
from .. import strategies
from ..compare import expect
from ..examples import wide
from ..places import Place
from .recipes import moved
from .trying import matches, unavailable


class _Request(NamedTuple):
    """A call as dispatch sees it: its operands and the recipe to write."""

    a: Any
    b: Any = None
    recipe: ScalingRecipe | None = None

    @property
    def explained(self) -> tuple[Any, ...]:
        """The operands as `explain` takes them."""
        return tuple(x for x in (self.a, self.recipe, self.b) if x is not None)


def it_says_whether_it_is_available(kernel: Kernel, place: Place) -> None:
    if kernel.available is None:
        return
    for device in (Device(kernel.device or "cpu"), Device("cuda"), Device("cuda", 1, (9, 0)), Device("no such device")):
        said = f"{kernel.available}({str(device)!r})"
        try:
            reason = targets.load(kernel.available)(device)
        except Exception as e:  # dispatch skips such a kernel
            raise AssertionError(f"{said} raised {type(e).__name__}: {e}") from e
        expect(
            reason is None or (isinstance(reason, str) and bool(reason)),
            f"{said} returned {reason!r}, expected None or a reason",
        )


def it_runs_only_when_named(kernel: Kernel, place: Place) -> None:
    for recipe in (*strategies.defaults(), None):
        for request in _requests(kernel, recipe, place):
            try:
                explanation = api.explain(kernel.op, *request.explained)
            except BrecciaError:
                continue
            expect(
                explanation.winner is None or explanation.winner.name != kernel.name,
                f"it is selected without being named:\n{explanation}",
            )


def accepts_score_and_plan_answer_every_call(kernel: Kernel, recipes: Iterable[ScalingRecipe], place: Place) -> None:
    """For each recipe it is declared for, with several shapes, dtypes and options; and with operands described to `explain`.

    Dispatch skips a kernel whose `accepts` raises, and ignores a `score` that raises: nothing else would report these faults.
    """
    home, op = registry().frameworks[place.framework], registry().operation(kernel.op)
    for recipe in (*recipes, None):
        for request in _requests(kernel, recipe, place):
            if (reason := unavailable(kernel, request.a)) is not None:
                pytest.skip(reason)
            for options in _options(op):
                real = Call(op, place.framework, (request.a, request.b, request.recipe, options, home))
                described = [None if x is None else x.described() for x in (real.a, real.b)]
                for call in (
                    real,
                    Call(op, place.framework, (described[0], described[1], request.recipe, options, home)),
                ):
                    _check_answers(kernel, call)


def a_call_without_prefer_finds_one_kernel(kernel: Kernel, recipes: Iterable[ScalingRecipe], place: Place) -> None:
    """No other kernel has the same rank; and the kernel that runs, for cached calls too, is the one that `explain` names."""
    op = registry().operation(kernel.op)
    for recipe in (*recipes, None):
        for a, b, new in _requests(kernel, recipe, place):
            explained = api.explain(kernel.op, *_Request(a, b, new).explained)
            try:
                ran = registry().table.choose(op, place.framework, a, b, new, op.default or DEFAULT).kernel.name
            except AmbiguousKernelError as e:
                if kernel.name in (k.name for k in explained.tied):
                    raise AssertionError(f"a call without prefer= raises: {e}") from e
                continue
            except NoKernelError:
                continue
            said = explained.winner.name if explained.winner else "none"
            expect(
                ran == said or kernel.name not in (ran, said),
                f"{explained.call} of shape {tuple(a.shape)} ran {ran}, but explain names {said}: the answers of {kernel.name} "
                "depend on more than the facts that it read",
            )


# -- the calls -------------------------------------------------------------------------------------------------------


#: Shapes of the operands: full blocks, partial blocks, and full blocks in another size.
_SHAPES = ((32, 256), (9, 67), (64, 128))


@cache
def _operand_of(place: Place, shape: tuple[int, int], recipe: ScalingRecipe | None, grouped: bool = False) -> Any:
    """An array, or a tensor under the recipe; two matrices for groups. It is cached: do not write into it."""
    x = wide(shape, seed=shape[0], exponents=2)
    x = np.stack([x, x]) if grouped else x
    return place.array(x) if recipe is None else moved(reference.cast(x, recipe), place)


def _requests(kernel: Kernel, recipe: ScalingRecipe | None, place: Place) -> Iterator[_Request]:
    """Calls that the kernel is declared for, with this recipe, or with plain operands only if it is None."""
    op, first = registry().operation(kernel.op), matches(kernel.recipe, recipe)
    for shape in _SHAPES:
        array = _operand_of(place, shape, None)
        if op.product:
            yield from _product_requests(kernel, recipe, place, shape)
        elif recipe is None:
            return
        elif op.casts and first:
            for x in (array, place.ops.swap(array)):
                yield _Request(x, None if op.second is None else x, recipe)
        elif op.scaled and op.target is None and first:
            st = _operand_of(place, shape, recipe)
            yield from (_Request(x) for x in (st, st.mT))
        elif op.scaled and first:
            written = dict.fromkeys((MXFP8BlockScaling(), *strategies.defaults()[:1], recipe))
            st = _operand_of(place, shape, recipe)
            yield from (_Request(st, None, new) for new in written if matches(kernel.other, new))


def _product_requests(kernel: Kernel, recipe: ScalingRecipe | None, place: Place, shape: tuple[int, int]) -> Iterator[_Request]:
    """Calls of a product: tensor by tensor, tensor by array, and array by tensor."""
    array = _operand_of(place, shape, None)
    for other in dict.fromkeys((None, recipe)):
        if not matches(kernel.other, other):
            continue
        second = _operand_of(place, shape, other, kernel.op == "grouped_matmul")
        b = place.ops.swap(second) if other is None else second.mT
        if kernel.op == "cast_matmul":
            if recipe is not None and matches(kernel.recipe, recipe):
                yield _Request(array, b, recipe)
            continue
        if other == recipe and matches(kernel.recipe, None):
            yield _Request(array, b)
        if recipe is not None and matches(kernel.recipe, recipe):
            yield _Request(_operand_of(place, shape, recipe), b)


def _options(op: Operation) -> list[Any]:
    """The default options, and each option on its own."""
    if isinstance(op.default, ProductOptions):
        values: dict[str, Any] = {"out_dtype": "bfloat16", "out": np.zeros(()), "bias": np.zeros(())}
        return [op.default, *(ProductOptions(**{name: value}) for name, value in values.items() if name in op.options)]
    stochastic = CastOptions(rounding="stochastic", seed=1)
    return [DEFAULT, CastOptions(axis=-2), stochastic, CastOptions(scale=1.0), CastOptions(nonfinite="raise")]


def _check_answers(kernel: Kernel, call: Call) -> None:
    """Raise AssertionError unless `accepts`, and for accepted calls `score` and `plan`, return valid answers."""
    reason = None if kernel.accepts is None else _call_hook(kernel.accepts, call)
    expect(
        reason is None or (isinstance(reason, str) and bool(reason)),
        f"{kernel.accepts} gave {reason!r}, expected None or a reason: {_describe(call)}",
    )
    if reason is not None:
        return
    if kernel.score is not None:
        score = _call_hook(kernel.score, call)
        known = isinstance(score, Real) and not isinstance(score, bool) and not math.isnan(score)
        expect(known, f"{kernel.score} gave {score!r}, expected a number: {_describe(call)}")
    if kernel.plan is not None:
        plan = _call_hook(kernel.plan, call)
        expect(all(isinstance(step, Call) for step in plan), f"{kernel.plan} gave {plan!r}, expected calls: {_describe(call)}")


def _call_hook(target: str, call: Call) -> Any:
    try:
        answer = targets.load(target)(call)
        return list(answer) if hasattr(answer, "__next__") else answer
    except (Exception, SystemExit) as e:
        raise AssertionError(f"{target} raised {type(e).__name__}: {e}: {_describe(call)}") from e


def _describe(call: Call) -> str:
    """A call, in messages."""
    operands = " and ".join(_describe_operand(x) for x in (call.a, call.b) if x is not None)
    options = "".join(f", {name}={value!r}" for name, value in call.options.items())
    return f"{call.op} of {operands}{options}"


def _describe_operand(x: Operand) -> str:
    recipe = x.recipe
    return f"{'array' if recipe is None else recipe.name} {tuple(x.values[x.slot].shape)}"
