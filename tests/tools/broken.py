"""Foreign tensors with one attribute missing or changed: a bridge converts them, or raises a typed error that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from breccia import BrecciaError

MISSING = object()


def faults(value: Any) -> Iterator[tuple[str, Any]]:
    """(what happened to an attribute, its new value)."""
    yield "is missing", MISSING
    yield "is None", None
    yield "is text", "odd"
    if hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "reshape"):
        yield "is flat", value.reshape(-1)
        yield "has another axis", value[None]
        if len(value.shape):
            yield "is shorter", value[:-1]
            yield "is empty", value[:0]
        yield "has another dtype", value != value
    elif isinstance(value, bool):
        yield "is negated", not value
    elif isinstance(value, int):
        yield from (("is doubled", 2 * value), ("is zero", 0), ("is negative", -1))
    elif isinstance(value, list | tuple):
        yield from (("is doubled", type(value)(2 * n for n in value)), ("is empty", type(value)()))


def untyped(make: Callable[[], Any], names: Iterable[str], convert: Callable[[Any], Any], title: str) -> list[str]:
    """What goes wrong when attributes of an object are broken one at a time: errors of other types or without `title`."""
    found: list[str] = []
    for name in names:
        for what, value in faults(getattr(make(), name, None)):
            broken = make()
            try:
                if value is MISSING:
                    delattr(broken, name)
                else:
                    setattr(broken, name, value)
            except Exception:  # the library itself refuses it
                continue
            try:
                convert(broken)
            except BrecciaError as e:
                if title not in str(e):
                    found.append(f"{name} {what}: no {title!r} in {e}")
            except Exception as e:
                found.append(f"{name} {what}: {type(e).__name__}: {e}")
    return found
