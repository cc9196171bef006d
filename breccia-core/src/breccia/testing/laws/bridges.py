"""Laws of bridges: each is available or says what to install, and round trips are exact to the byte."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from ... import bridges as facade
from ... import foreign, targets
from ...dispatch.hookspecs import Bridge, Foreign
from ...errors import BrecciaError
from ...kernels import reference
from ...recipes import ScalingRecipe
from ...tensors.tensor import ScaledTensor
from .. import strategies
from ..compare import expect, expect_tensor
from ..examples import wide
from ..places import Place, everywhere
from .law import Law, Subject, each
from .recipes import instances, moved

#: A shape with full blocks and bytes, and one with partial last blocks, whose padding could be lost.
_FULL, _PARTIAL = (16, 256), (5, 67)


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the bridges of a plug-in. `to_x` and `from_x` are a pair: `from_x` takes what `to_x` returns."""
    bridges = {bridge.name: bridge for bridge in subject.of("bridges")}
    recipes = list(dict.fromkeys([*strategies.defaults(), *instances(subject)]))
    for name, bridge in bridges.items():
        yield from each("bridges", name, (it_is_available_or_says_what_to_install,), bridge)
        other = bridges.get(f"from_{name.removeprefix('to_')}")
        if name.startswith("to_") and other is not None and not name.endswith("_recipe"):  # those convert recipes
            yield from each("bridges", name, (it_accepts_some_recipe,), bridge, recipes)
            checks = (accepted_tensors_round_trip_byte_for_byte,)
            for recipe in recipes:
                yield from each("bridges", f"{name}.{recipe.spec}", checks, bridge, other, recipe)
    for library in subject.of("foreign"):
        yield from each("foreign", library.name, (its_functions_load_or_say_what_is_missing,), library)
        if library.to_foreign is not None:
            checks = (what_it_builds_is_found_by_its_class_and_returns,)
            for recipe in recipes:
                yield from each("foreign", f"{library.name}.{recipe.spec}", checks, library, recipe)


def it_is_available_or_says_what_to_install(bridge: Bridge) -> None:
    absent = [module for module in bridge.requires if not targets.installed(module)]
    if not absent:
        expect(callable(getattr(facade, bridge.name)), f"breccia.bridges.{bridge.name} is not a function")
        return
    try:
        getattr(facade, bridge.name)
    except ImportError as e:
        expect(bridge.install in str(e), f"breccia.bridges.{bridge.name} does not say what to install: {e}")
    else:
        raise AssertionError(
            f"breccia.bridges.{bridge.name} needs {absent[0]}, which is not installed, but raises no ImportError"
        )


def it_accepts_some_recipe(bridge: Bridge, recipes: list[ScalingRecipe]) -> None:
    _skip_unless_installed(bridge)
    refusals: list[BrecciaError] = []
    for recipe in recipes:
        if _exported(bridge, _tensor(recipe, _FULL), refusals) is not None:
            return
    reasons = "; ".join(dict.fromkeys(map(str, refusals)))
    raise AssertionError(f"it refuses every recipe: {reasons[:600]}")


def accepted_tensors_round_trip_byte_for_byte(bridge: Bridge, other: Bridge, recipe: ScalingRecipe) -> None:
    """If `to_x` returns a tuple, `from_x` gets its items as arguments, and a dict at its end as options.

    `from_x` may also take `framework=`, and `recipe=`, the recipe that the library's bytes do not tell.
    """
    _skip_unless_installed(bridge)
    for shape in (_FULL, _PARTIAL):
        st = _tensor(recipe, shape)
        taken = _exported(bridge, st, [])
        if taken is None:
            continue
        place, sent = taken
        back = targets.load(other.target)
        arguments: list[Any] = [*sent] if type(sent) is tuple else [sent]  # pyright: ignore[reportUnknownArgumentType]
        options: dict[str, Any] = arguments.pop() if len(arguments) > 1 and isinstance(arguments[-1], dict) else {}
        told = {"framework": place.framework, "recipe": st.recipe}
        signature = inspect.signature(back)
        bound = signature.bind_partial(*arguments).arguments
        options |= {name: told[name] for name in told if name in signature.parameters and name not in bound}
        result = back(*arguments, **options)
        expect(isinstance(result, ScaledTensor), f"{other.name} returned {type(result).__name__}, expected a ScaledTensor")
        expect_tensor(place, result.to_plain(), st)  # a storage orders the same bytes otherwise


def its_functions_load_or_say_what_is_missing(library: Foreign) -> None:
    """A module that needs the library may fail to load with an ImportError; any other error is a fault."""
    for target in (library.from_foreign, library.to_foreign):
        if target is not None:
            try:
                expect(callable(targets.load(target)), f"{target} is not a function")
            except ImportError as e:
                expect(bool(str(e)), f"{target} raises an ImportError without a message")


def what_it_builds_is_found_by_its_class_and_returns(library: Foreign, recipe: ScalingRecipe) -> None:
    """`from_foreign` of what `to_foreign` builds is the same tensor, byte for byte, at every place that the library accepts."""
    _skip_unless_installed(library)
    assert library.to_foreign is not None
    for place in (p for p in everywhere() if not p.absence):
        st = moved(_tensor(recipe, _FULL), place)
        try:
            theirs = foreign.to_foreign(st, library.name)
        except BrecciaError:
            continue
        except ImportError as e:
            pytest.skip(str(e))
        back = targets.load(library.from_foreign)
        told = {"recipe": st.recipe} if "recipe" in inspect.signature(back).parameters else {}
        result: Any = foreign.from_foreign(theirs, **told)
        expect(isinstance(result, ScaledTensor), f"from_foreign returned {type(result).__name__}, expected a ScaledTensor")
        expect_tensor(place, result.to_plain(), _tensor(recipe, _FULL))


def _skip_unless_installed(bridge: Bridge | Foreign) -> None:
    absent = [module for module in bridge.requires if not targets.installed(module)]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed")


def _exported(bridge: Bridge, st: ScaledTensor, refusals: list[BrecciaError]) -> tuple[Place, Any] | None:
    """(the first place whose tensors the bridge accepts, what `to_x` returns there); None if it refuses all places."""
    for place in (p for p in everywhere() if not p.absence):
        try:
            return place, targets.load(bridge.target)(moved(st, place))
        except BrecciaError as e:
            refusals.append(e)
        except ImportError as e:  # a library that is needed only to build its objects
            pytest.skip(str(e))
    return None


def _tensor(recipe: ScalingRecipe, shape: tuple[int, int]) -> ScaledTensor:
    return reference.cast(wide(shape, seed=1, exponents=4), recipe)
