"""JSON from files and users."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parsed_json(text: str | bytes | bytearray, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """`json.loads`, with one error for all text that it cannot read. Raises ValueError, also for text nested too deeply.

    object_of: makes an object of its pairs, in order, duplicate keys included.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError("objects and lists are nested too deeply") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its pairs. Raises ValueError for a key that is there twice: readers differ in which value they take."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} is twice in one object")
    return out
