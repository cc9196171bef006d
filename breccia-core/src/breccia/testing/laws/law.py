"""A law: one check of one declaration of a plug-in, at one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from ...dispatch.registry import Plugin
from ...recipes import ScalingRecipe
from ..places import Place, everywhere


@dataclass(frozen=True)
class Law:
    """A sentence about `subject`, a declaration of `kind`; tested at `place` if it depends on a framework or device.

    holds: raises AssertionError with what was found if the law does not hold; skips the test if the law cannot be tested here.
    """

    kind: str
    subject: str
    sentence: str
    holds: Callable[[], None]
    place: Place | None = None

    @property
    def id(self) -> str:
        """The law's name in test runs and xfail files."""
        at = () if self.place is None else (str(self.place),)
        return "/".join((self.kind, self.subject, *at, self.sentence))

    def check(self) -> None:
        """Raise AssertionError unless the law holds."""
        __tracebackhide__ = True
        if self.place is not None and self.place.absence:
            pytest.skip(self.place.absence)
        self.holds()


@dataclass(frozen=True)
class Subject:
    """A plug-in under test: its declarations by hook ("codecs", ...), further recipe instances to test, and the places."""

    plugin: Plugin
    declared: dict[str, list[Any]]
    settings: tuple[ScalingRecipe, ...] = ()
    places: tuple[Place, ...] = field(default_factory=everywhere)

    def of(self, kind: str) -> list[Any]:
        """The plug-in's declarations of a kind."""
        return self.declared.get(kind, [])


def each(
    kind: str, subject: str, checks: Iterable[Callable[..., None]], *arguments: Any, place: Place | None = None
) -> Iterator[Law]:
    """One law per check. Each check is called with `arguments`, followed by `place` if given."""
    for check in checks:
        all_arguments = arguments if place is None else (*arguments, place)
        yield Law(kind, subject, check.__name__, partial(check, *all_arguments), place)
