"""Every error breccia raises. Messages state the problem, the values found, and the remedy.

Programs read the values from the dict `error.found`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class BrecciaError(Exception):
    """Base of all errors raised on purpose by breccia and its plug-ins.

    Messages may quote names from untrusted files, so control characters are escaped, except line ends.
    """

    def __init__(self, message: str, **found: Any) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.found = found


class RecipeError(BrecciaError, ValueError):
    """A recipe, layout, codec or format has an invalid field value."""


class UnknownNameError(BrecciaError, ValueError):
    """No installed plug-in declares this name; the message suggests similar ones."""


class ShapeError(BrecciaError, ValueError):
    """An array has too few axes, or the shapes of two operands do not match."""


class OutOfRangeError(BrecciaError, IndexError):
    """An index is out of range; this also ends iteration over a tensor."""


class LayoutError(BrecciaError, ValueError):
    """A scale (or zero-point) does not match the layout."""


class UnsupportedError(BrecciaError, TypeError):
    """A type, dtype, framework or combination that the op does not support."""


class OptionError(BrecciaError, ValueError):
    """An option of an op has an invalid value, or two options contradict each other."""


class NonFiniteError(BrecciaError, ValueError):
    """NaN or Inf in the input, under `nonfinite="raise"`."""


class InexactError(BrecciaError, ValueError):
    """Values would be rounded under `require_exact=True`."""


class NoKernelError(BrecciaError, NotImplementedError):
    """No kernel supports the call. The message is the text of `breccia.explain`."""


class AmbiguousKernelError(BrecciaError):
    """Two usable kernels have equal rank; the message names both and the two remedies."""


class DialectError(BrecciaError, ValueError):
    """Well-formed buffers do not follow the convention of the library that was named."""


class CorruptFileError(BrecciaError, ValueError):
    """A file is truncated, malicious, or has a schema or recipe that nothing installed can read."""


class KernelError(BrecciaError, RuntimeError):
    """A kernel returned a wrong type, shape or dtype, or wrong bytes under BRECCIA_CHECK=1."""


class PluginError(BrecciaError):
    """A plug-in's manifest is invalid, or an object it references cannot be loaded.

    While manifests are read, it is reported as a warning and the plug-in is set aside.
    """


class PluginWarning(UserWarning):
    """One plug-in was set aside, or breaks a rule of manifests; the others work."""


class DialectWarning(UserWarning):
    """Loaded arrays are the codes and scales of another library, which another function decodes; the message names it."""


class DtypeWarning(UserWarning):
    """A framework lacks the dtype of some loaded arrays; they stay NumPy arrays, so no value changes."""


def suggestion(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for the most similar known name, if any; then the list of known names."""
    return f"{did_you_mean(name, known) or '.'} Known: {', '.join(sorted(known)) or 'none'}."


def printable(text: str) -> str:
    """`text` on one line, without terminal control characters: names may come from untrusted files."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def abbreviated(names: Iterable[str], shown: int = 3) -> str:
    """`a, b, c and 4 more`, each printable."""
    listed = list(names)
    rest = len(listed) - shown
    return ", ".join(map(printable, listed[:shown])) + (f" and {rest} more" if rest > 0 else "")


def check_names(claim: str, missing: Sequence[str], unexpected: Sequence[str], remedy: str) -> None:
    """Raise UnknownNameError if a file lacks names of a model, or has others.

    claim: what does not hold then, such as "FILE does not match the parameters of the model". remedy: what to do.
    """
    both = {"missing": missing, "unexpected": unexpected}
    said = [f"{what}: {abbreviated(names, 5)}" for what, names in both.items() if names]
    if said:
        raise UnknownNameError(f"{claim}: {'; '.join(said)}. {remedy}", missing=missing, unexpected=unexpected)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the most similar known name; empty if none is similar."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
