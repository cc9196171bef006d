"""Settings per module: which of the schemes of a config is that of a value, and whether the two agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from breccia import DialectError, UnsupportedError
from breccia.backend import StoredValue, ValueForm

Scheme = Mapping[str, Any]

_REMEDY = "Check the config, or download the checkpoint again."


def one_form(value: StoredValue, form: Callable[[StoredValue, Scheme], ValueForm]) -> ValueForm:
    """What the tensors are by the schemes that may be theirs, `value.settings["schemes"]`: those that do not fit drop out.

    A scheme has a name under "where". Raises DialectError if none fits, or if two fit and say different things.
    """
    schemes: Sequence[Scheme] = value.settings.get("schemes", ({},))
    forms: list[tuple[ValueForm, Scheme]] = []
    wrong: list[DialectError | UnsupportedError] = []
    for scheme in schemes:
        try:
            forms.append((form(value, scheme), scheme))
        except (DialectError, UnsupportedError) as e:
            wrong.append(e)
    if not forms:
        raise wrong[0]
    first, one = forms[0]
    for other, two in forms[1:]:
        value.need(
            other == first,
            f"both {one['where']} and {two['where']} may be its scheme, and its tensors fit both: {first.recipe!r} or "
            f"{other.recipe!r}. Name the module in one of the two.",
        )
    return first


def agree(value: StoredValue, scheme: Scheme, what: str, **allowed: tuple[Any, ...]) -> None:
    """Raise DialectError where a scheme says other than the tensors. what: what they are. Settings may be absent or None."""
    for key, values in allowed.items():
        setting = scheme.get(key)
        value.need(
            setting is None or (type(setting), setting) in [(type(one), one) for one in values],
            f"its tensors are {what}, but {scheme.get('where', 'the config')} has {key} {setting!r}, not "
            f"{' or '.join(map(repr, values))}. {_REMEDY}",
            **{key: setting},
        )
