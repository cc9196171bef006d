"""Fields of recipes: the values that each takes, and the values that require those of other fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .declared import Declared, settle
from .errors import RecipeError


def one_of(allowed: Iterable[object], by: str = "", aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Metadata of a recipe's field that takes only these values; `check_choices` checks it, and `breccia recipes` lists them.

    by: for a single value, what fixes it. aliases: canonical spellings by lower-case ones, as `settle` takes them.
    """
    return {"choices": tuple(allowed), "by": by, "aliases": aliases or {}}


def choices_of(kind: type[Declared], name: str) -> tuple[tuple[Any, ...], str]:
    """The values that a field takes and what fixes a single one; () for any value.

    A subclass that redeclares a field to change its default keeps the choices, unless it declares others.
    """
    metadata = _metadata(kind, name, "choices")
    return metadata.get("choices", ()), metadata.get("by", "")


def _metadata(kind: type[Declared], name: str, key: str) -> Mapping[str, Any]:
    """The metadata of a field, from the nearest base that declares `key` for it; {} if none does."""
    for base in kind.__mro__:
        declared: dict[str, dataclasses.Field[Any]] = base.__dict__.get("__dataclass_fields__", {})
        if name in declared and key in declared[name].metadata:
            return declared[name].metadata
    return {}


def implying(value: Any, **fields: Any) -> dict[str, Any]:
    """Metadata of a field one of whose values requires values of other fields: in a spec, `value` sets the missing ones.

    value: or a tuple of several that require the same.
    """
    return {"implies": (value, fields)}


def each_of(value: Any) -> tuple[Any, ...]:
    """The values that one of `implying` stands for."""
    return value if isinstance(value, tuple) else (value,)  # pyright: ignore[reportUnknownVariableType]


def implication_of(kind: type[Declared], name: str) -> tuple[Any, dict[str, Any]]:
    """The value of a field that requires values of other fields, and those; (None, {}) if there is none."""
    return _metadata(kind, name, "implies").get("implies", (None, {}))


def with_implied(kind: type[Declared], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields`, and the missing ones that they require: `offset=bias` is `symmetric=False`, and that is `signed=False`.

    Only what would be refused otherwise is set; a given value stays, and a recipe refuses one that contradicts another.
    """
    settings = dict(fields)
    waiting = list(fields)
    while waiting:
        name = waiting.pop()
        value, implied = implication_of(kind, name)
        setting = settings[name].lower() if isinstance(settings[name], str) else settings[name]
        if any(type(setting) is type(one) and setting == one for one in each_of(value)):
            added = {other: of for other, of in implied.items() if other not in settings}
            settings |= added
            waiting += added
    return settings


def check_choices(recipe: Declared) -> None:
    """Set fields with choices to their canonical spelling. Raises RecipeError for a value that is not among the choices."""
    for f in dataclasses.fields(recipe):  # type: ignore[arg-type]
        choices, by = choices_of(type(recipe), f.name)
        if len(choices) == 1:
            _check_fixed(recipe, type(recipe).__name__.removesuffix("BlockScaling"), f.name, choices[0], by)
        elif choices:
            settle(recipe, f.name, choices, f.metadata.get("aliases", {}))


def _check_fixed(recipe: Declared, title: str, field: str, fixed: object, by: str = "") -> None:
    """Raise RecipeError unless the field has its only value; text may be in any case."""
    value = getattr(recipe, field)
    if isinstance(value, str) and isinstance(fixed, str) and value.lower() == fixed.lower():
        object.__setattr__(recipe, field, fixed)
    elif value != fixed or type(value) is not type(fixed):
        raise RecipeError(f"{title} {field} is fixed at {fixed!r}{by}, got {value!r}", **{field: value})
