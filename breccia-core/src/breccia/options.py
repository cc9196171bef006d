"""Options of a cast, checked in one place, whoever is called: a verb or the generic algorithm itself."""

from __future__ import annotations

from operator import index
from typing import Any

from .errors import OptionError

ROUNDINGS = ("nearest", "stochastic")
NONFINITE = ("propagate", "raise")
CLIPS = ("element", "scale")


def check_options(rounding: Any, seed: Any, nonfinite: Any) -> Any:
    """The seed as an int, or None; as it is where it is traced, or an array of its two words.

    Raises OptionError for values an option cannot have, or that contradict each other.
    """
    if rounding not in ROUNDINGS:
        raise OptionError(f"rounding is one of {', '.join(ROUNDINGS)}; got {rounding!r}.", rounding=rounding)
    if nonfinite not in NONFINITE:
        raise OptionError(f"nonfinite is one of {', '.join(NONFINITE)}; got {nonfinite!r}.", nonfinite=nonfinite)
    if (seed is None) != (rounding == "nearest"):
        want = "needs a seed" if seed is None else "takes no seed"
        raise OptionError(f"rounding={rounding!r} {want}; got seed={seed!r}.", rounding=rounding, seed=seed)
    if seed is None or _unread(seed):
        return seed
    number = whole_number("seed", seed)
    if not 0 <= number < 2**64:
        raise OptionError(f"seed must lie in 0 .. 2**64 - 1; got {seed}.", seed=seed)
    return number


def _unread(seed: Any) -> bool:
    """Is the seed an array of two words, or a whole number that is traced and has no value yet?"""
    shape = getattr(seed, "shape", None)
    if shape not in ((), (2,)) or "int" not in str(seed.dtype):
        return False
    try:
        index(seed)
    except TypeError:
        return True
    return False


def whole_number(name: str, value: Any) -> int:
    """`value` as an int, also from NumPy's integers. Raises OptionError for anything else."""
    try:
        return index(value)
    except TypeError:
        raise OptionError(f"{name} must be a whole number, got {value!r}.", **{name: value}) from None
