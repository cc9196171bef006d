"""`conformance`: one pytest test per law and per declaration of a plug-in."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, cast

import pytest

from ..dispatch.registry import Plugin, registry
from ..errors import UnknownNameError, suggestion
from ..recipe_bases import ScalingRecipe, check_recipe
from .compare import flushed
from .laws import LAWS, Law, Subject
from .places import Place, everywhere, place
from .pytest_plugin import FLUSHED, PROPERTY


def conformance(
    plugin: str,
    *,
    recipes: Iterable[ScalingRecipe] = (),
    frameworks: str | Iterable[str] | None = None,
    xfails: str | PathLike[str] | None = None,
) -> Callable[..., None]:
    """A pytest test function that checks all declarations of `plugin` against the laws of docs/spec/numerics.md and the hooks.

    Bind it to a name that pytest collects. It becomes one test per law, declaration and installed framework:

        test_conformance = conformance("acme")

    plugin: the name of its entry point.
    recipes: recipe instances to test besides the default of each class; required for classes whose fields have no defaults.
    frameworks: the frameworks to test on, optionally with a kind of device ("torch:cuda"). Default: all declared ones.
    xfails: a TOML file of known failures, one line `"law's id" = "reason"` each; `*` matches any text. It is strict: a listed
        law that passes is a failure, and an id that matches no law is an error.

    Laws that cannot be tested (framework not installed, kernel not available) are skipped, with the reason.
    Raises UnknownNameError for an undeclared plug-in or framework, ValueError for a malformed xfail file.

        >>> test_core = breccia.testing.conformance("core", frameworks="numpy")
        >>> test_core.__doc__
        "The laws of breccia.testing for all that plug-in 'core' declares."
    """
    instances = tuple(recipes)
    for recipe in instances:
        check_recipe(recipe)
    chosen = (frameworks,) if isinstance(frameworks, str) else frameworks
    laws = tuple(laws_of(plugin, instances, everywhere() if chosen is None else tuple(map(place, chosen))))
    reasons = _Reasons(xfails) if xfails is not None else None
    marked = [pytest.param(law, id=law.id, marks=reasons.marks(law) if reasons else ()) for law in laws]
    if reasons:
        reasons.check([law.id for law in (*laws, *laws_of(plugin, instances))])

    @pytest.mark.parametrize("law", marked)
    def test(law: Law, record_property: Callable[[str, Any], None]) -> None:
        __tracebackhide__ = True
        record_property(PROPERTY, plugin)
        before = flushed.copy()
        law.check()
        if flushed != before:
            record_property(FLUSHED, dict(flushed - before))

    setattr(test, PROPERTY, plugin)
    test.__doc__ = f"The laws of breccia.testing for all that plug-in {plugin!r} declares."
    return test


def laws_of(plugin: str, recipes: tuple[ScalingRecipe, ...] = (), places: tuple[Place, ...] | None = None) -> Iterator[Law]:
    """The laws about a plug-in, in the order of its hooks. Raises UnknownNameError if it is not installed."""
    record = _plugin(plugin)
    known = registry()
    listed = [declared.partition(":") for declared in record.declares]
    subject = Subject(record, {}, recipes, everywhere() if places is None else places)
    for kind, _, name in listed:
        subject.declared.setdefault(kind, []).append(known.declared[f"breccia_{kind}"][name])
    for recipe in recipes:
        if type(recipe) not in subject.declared.get("recipes", ()):
            own = [name for kind, _, name in listed if kind == "recipes"]
            raise UnknownNameError(
                f"recipes=: {recipe!r} is not a recipe of plug-in {plugin!r}, which declares {', '.join(own) or 'no recipe'}.",
                name=recipe.name,
                known=own,
            )
    for laws in LAWS:
        yield from laws(subject)


def _plugin(name: str) -> Plugin:
    plugins = registry().plugins
    for plugin in plugins:
        if plugin.name == name:
            return plugin
    known = [plugin.name for plugin in plugins]
    raise UnknownNameError(
        f"conformance({name!r}): no such plug-in is installed{suggestion(name, known)} It is the name of an entry point "
        "in the group 'breccia'; after a change of pyproject.toml install the distribution again.",
        name=name,
        known=known,
    )


class _Reasons:
    """An xfail file."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        try:
            listed = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except ValueError as e:  # not TOML, or not UTF-8
            raise ValueError(f'{self._path}: {e}. A line is written "law\'s id" = "reason".') from e
        for pattern, reason in listed.items():
            if not isinstance(reason, str) or not reason.strip():
                raise ValueError(f"{self._path}: {pattern!r} needs a reason, as text in quotes; got {reason!r}.")
        self._reasons = cast("dict[str, str]", listed)

    def marks(self, law: Law) -> tuple[pytest.MarkDecorator, ...]:
        for pattern, reason in self._reasons.items():
            if fnmatchcase(law.id, pattern):
                return (pytest.mark.xfail(reason=reason, strict=True),)
        return ()

    def check(self, ids: list[str]) -> None:
        """Raise ValueError if a pattern matches no law: such a list would hide a failure that returns under another name."""
        for pattern in self._reasons:
            if not any(fnmatchcase(law_id, pattern) for law_id in ids):
                raise ValueError(f"{self._path}: no law has the id {pattern!r}{suggestion(pattern, ids)}")
