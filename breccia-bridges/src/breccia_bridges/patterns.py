"""Patterns that select tensors by name: shell-style globs over whole names, in which an exact name selects itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from breccia import UnknownNameError

from .text import named


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Does any pattern select `name`?"""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise UnknownNameError for patterns that match none of `names`: a misspelled one would change what is selected."""
    unmatched = [pattern for pattern in dict.fromkeys(patterns) if not _matches_any(pattern, names)]
    if unmatched:
        raise UnknownNameError(" ".join(_unmatched(pattern, names) for pattern in unmatched), patterns=unmatched)


def _unmatched(pattern: str, names: Collection[str]) -> str:
    """What to do about a pattern that matches no name: the pattern with its unknown words replaced, if that matches one."""
    words = {word for name in names for word in name.split(".")}
    literals = [word for word in re.split(r"[.*?\[\],]+", pattern) if word and not any(word in known for known in words)]
    close = {word: near[0] for word in literals if (near := get_close_matches(word, sorted(words), n=1))}
    corrected = pattern
    for word, near in close.items():
        corrected = corrected.replace(word, near)
    if corrected != pattern and _matches_any(corrected, names):
        remedy = f"; did you mean {corrected!r}?"
    elif "," in pattern:
        remedy = "; give each pattern separately."
    else:
        remedy = f"; `breccia inspect` lists the names, such as {named(sorted(names))}."
    return f"the pattern {pattern!r} matches no tensor{remedy}"


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(name, [pattern]) for name in names)
