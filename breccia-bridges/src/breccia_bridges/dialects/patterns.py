"""Names and patterns of modules in configs: compiled once for a config, and matched in linear time.

Anyone may have written a config, and Python's `re` takes exponential time for patterns such as `(a+)+b`. RE2 never does: all
patterns of a config are followed at once. It lacks what needs more than one pass over a name, such as `(?=a)` and `\1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from typing import Any

from breccia import DialectError, UnsupportedError

#: Bytes that what RE2 makes of a config's patterns may take.
_MEMORY = 1 << 28
#: The longest pattern, in characters.
LONGEST = 2000
#: What RE2 reads in another way than `re`: `a{,3}`, POSIX's classes of characters, and those beyond ASCII.
_OTHERWISE = re.compile(r"\{,|\[:\^?\w+:\]|\\[uUxN]|[^\x00-\x7f]")
_WRITE = "Write the names of modules in its place."


class Expressions:
    """Regular expressions of a config, in their order.

    what: the place in the config, with {} for the text there: "the target {}". written: the expression of a text, by default
        the text. anywhere: whether it may match in the middle of a name, as `re.search`; else at its start, as `re.match`.

    Raises DialectError for what is no regular expression, and UnsupportedError for what RE2 does not match.
    """

    def __init__(self, texts: Sequence[str], what: str, *, written: Callable[[str], str] = str, anywhere: bool = False) -> None:
        self._set: Any = None
        if not texts:
            return
        import re2  # most configs have no pattern

        options = re2.Options()
        options.log_errors, options.max_mem = False, _MEMORY
        self._set = re2.Set.SearchSet(options) if anywhere else re2.Set.MatchSet(options)
        for text in texts:
            pattern = written(text) if len(text) <= LONGEST else text
            _check(re2, options, pattern, what.format(repr(text[:200])), text)
            self._set.Add(pattern)
        self._always = self._set.Add("")
        first = what.format(repr(texts[0][:200]))
        self._too_large = f"the {len(texts)} patterns of the config, such as {first}, take too much memory. {_WRITE}"
        try:
            self._set.Compile()
        except re2.error as e:
            raise UnsupportedError(self._too_large) from e

    def matching(self, name: str) -> set[int]:
        """The positions of the expressions that match a name. Raises UnsupportedError where they need too much memory."""
        if self._set is None:
            return set()
        matching: set[int] = set(self._set.Match(name) or ())
        if self._always not in matching:  # RE2 has no other way to say so
            raise UnsupportedError(self._too_large)
        return matching - {self._always}


def _check(re2: Any, options: Any, pattern: str, what: str, text: str) -> None:
    """Raise an error unless `pattern` is a regular expression that RE2 matches as `re` does."""
    reason = ""
    if len(pattern) > LONGEST:
        reason = f"it has {len(pattern)} characters; at most {LONGEST} are read"
    elif (other := _OTHERWISE.search(pattern)) is not None:
        reason = f"{other[0]} is read in another way by RE2"
    if not reason:
        try:
            re.compile(pattern)
            re2.compile(pattern, options)
            return
        except (re.error, OverflowError, RecursionError) as e:
            raise DialectError(f"{what} is not a regular expression ({e}). Fix it, or download it again.", pattern=text) from e
        except re2.error as e:
            reason = e.args[0].decode(errors="replace")
    raise UnsupportedError(f"{what} is a regular expression that breccia does not match ({reason}). {_WRITE}", pattern=text)


class Names:
    """Names of modules and patterns of them, in the order of a config. Names are looked up in a table.

    patterns: the positions of the patterns among the texts. matching: which of these, by their own positions, match a name.
    """

    def __init__(self, texts: Sequence[str], patterns: Sequence[int], matching: Callable[[str], Iterable[int]]) -> None:
        self._patterns, self._matching, places = patterns, matching, set(patterns)
        self._names: dict[str, list[int]] = {}
        for n, text in enumerate(texts):
            if n not in places:
                self._names.setdefault(text, []).append(n)

    def named(self, module: str) -> list[int]:
        """The positions of a name."""
        return self._names.get(module, [])

    def matching(self, module: str) -> list[int]:
        """The positions of the patterns that match a name, in their order."""
        return sorted(self._patterns[n] for n in self._matching(module))

    def first(self, module: str) -> int | None:
        """The position of the first name or pattern that matches a module, or None."""
        return min([*self.named(module), *self.matching(module)], default=None)


def expressions(texts: Sequence[str], what: str, prefix: str) -> Names:
    """Names, and regular expressions that start with `prefix`."""
    places = [n for n, text in enumerate(texts) if text.startswith(prefix)]
    return Names(
        texts, places, Expressions([texts[n] for n in places], what, written=lambda text: text.removeprefix(prefix)).matching
    )


def globs(texts: Sequence[str], what: str) -> Names:
    """Names, and globs as `fnmatch.fnmatchcase` matches them."""
    places = [n for n, text in enumerate(texts) if any(char in text for char in "*?[")]
    return Names(texts, places, Expressions([texts[n] for n in places], what, written=_of_glob).matching)


#: What is special in a glob.
_WILD = re.compile(r"\*+ | \? | \[ !? \]? [^\]]* \]", re.VERBOSE)


def _of_glob(glob: str) -> str:
    """A glob as a regular expression."""
    pieces: list[str] = []
    at = 0
    for wild in _WILD.finditer(glob):
        # Of "(?s:[^a])\\Z", the class.
        special = {"*": r"[\s\S]*", "?": r"[\s\S]"}.get(wild[0][0]) or translate(wild[0])[4:-3]
        pieces += (re.escape(glob[at : wild.start()]), special)
        at = wild.end()
    return "".join(pieces) + re.escape(glob[at:]) + "$"  # of RE2, which is the end
