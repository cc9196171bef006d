"""Options of ops, checked in one place and passed through every layer as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from .errors import OptionError

ROUNDINGS = ("nearest", "stochastic")
NONFINITE = ("propagate", "raise")
CLIPS = ("element", "scale")

#: Storage of codes and scales by default; see `breccia.tensors.storage`.
PLAIN = "plain"


@dataclass(frozen=True, slots=True, eq=False)
class CastOptions:
    """The options of `breccia.cast`. Raises OptionError where they contradict each other.

    axis: the contraction axis. The ops pass it as -1 or -2.
    scale: the supplied scale (the global one of two levels), a number or an array, or None.
    rounding, seed: "nearest", or "stochastic" with a seed: an int, a traced integer, or an array of two 32-bit words.
    nonfinite: "propagate" or "raise".
    storage: the name of the storage to write.
    out: the ScaledTensor to write into, or None.
    """

    axis: int = -1
    scale: Any = None
    rounding: str = "nearest"
    seed: Any = None
    nonfinite: str = "propagate"
    storage: str = PLAIN
    out: Any = None

    def __post_init__(self) -> None:
        seed = check_options(self.rounding, self.seed, self.nonfinite)
        if seed is not self.seed:
            object.__setattr__(self, "seed", seed)

    def replace(self, **changed: Any) -> CastOptions:
        """A copy with some options changed."""
        return CastOptions(**{**{name: getattr(self, name) for name in self.__slots__}, **changed})

    def given(self) -> dict[str, Any]:
        """The options that are not at their default, by name."""
        every = ((name, getattr(self, name), getattr(DEFAULT, name)) for name in self.__slots__)
        return {name: value for name, value, default in every if value is not default and not _equal(value, default)}

    def get(self, name: str, default: Any = None) -> Any:
        """One option by name, as `Call.option` reads it."""
        return getattr(self, name, default)


def _equal(value: Any, default: Any) -> bool:
    """Whether an option (not an array) is at its default"""
    return isinstance(value, str | int) and value == default


def check_options(rounding: Any, seed: Any, nonfinite: Any) -> Any:
    """The seed as an int, or None; unchanged where it is traced or an array of two words.

    Raises OptionError for invalid or contradictory values.
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
    """Whether the seed is an array of two words or a traced integer without a value yet"""
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
        raise OptionError(f"{name} must be an integer, got {value!r}.", **{name: value}) from None


#: The default options, and those along the other axis: one object each, which layers recognize.
DEFAULT = CastOptions()
COLUMNS = CastOptions(axis=-2)
