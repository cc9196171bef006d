"""Every error breccia raises. A message says what was asked, what was found, and what to do.

The values a message names are also in `error.found`, a dict, for programs.
"""

from __future__ import annotations

from typing import Any


class BrecciaError(Exception):
    """Base of all errors raised on purpose by breccia and its plug-ins."""

    def __init__(self, message: str, **found: Any) -> None:
        super().__init__(message)
        self.found = found


class RecipeError(BrecciaError, ValueError):
    """A recipe, layout, codec or format was declared or configured with a value it cannot have."""


class UnknownNameError(BrecciaError, ValueError):
    """A name that no installed plug-in declares; the message suggests the nearest ones."""


class ShapeError(BrecciaError, ValueError):
    """An array has too few axes, or two operands do not fit together."""


class OutOfRangeError(BrecciaError, IndexError):
    """A position lies beyond the axis it indexes; iteration over a tensor ends by it."""


class LayoutError(BrecciaError, ValueError):
    """A scale (or zero-point) contradicts the layout that is said to map it onto the data."""


class UnsupportedError(BrecciaError, TypeError):
    """A type, dtype, framework or combination that the called op does not take."""


class OptionError(BrecciaError, ValueError):
    """An option of an op has a value it cannot have, or two options contradict each other."""


class NonFiniteError(BrecciaError, ValueError):
    """NaN or Inf in the input, where the caller asked for an error (`nonfinite="raise"`)."""


class InexactError(BrecciaError, ValueError):
    """Values would be rounded, where the caller asked for none to be (`require_exact=True`)."""


class NoKernelError(BrecciaError, NotImplementedError):
    """No kernel can serve the call. The message is the text of `breccia.explain`."""


class AmbiguousKernelError(BrecciaError):
    """Two usable kernels rank the same; the message names both and the two ways out."""


class DialectError(BrecciaError, ValueError):
    """Buffers are well formed but do not follow the neighbour's convention that was named."""


class CorruptFileError(BrecciaError, ValueError):
    """A file is truncated, hostile, or of a schema or recipe that nothing installed here reads."""


class KernelError(BrecciaError, RuntimeError):
    """A kernel returned what it must not: another type, shape or dtype, or other bytes under BRECCIA_CHECK=1."""


class PluginError(BrecciaError):
    """A plug-in's manifest is broken, or a target of it cannot be loaded.

    Found while manifests are read, it is reported as a warning and the plug-in is set aside.
    """


class PluginWarning(UserWarning):
    """One plug-in was set aside, or breaks a rule of manifests; the others work."""


def suggestion(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known name, or nothing; then the list of known names."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}."
