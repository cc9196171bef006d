"""Options of ops, checked in one place and passed through every layer as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

from .errors import OptionError

ROUNDINGS = ("nearest", "stochastic")
NONFINITE = ("propagate", "raise")
CLIPS = ("element", "scale")

#: Storage of codes and scales by default; see `breccia.tensors.storage`.
PLAIN = "plain"


@dataclass(frozen=True, slots=True, eq=False)
class CastOptions:
    """The options of ops that cast. Raises OptionError where they contradict each other.

    axis: the contraction axis. The ops pass it as -1 or -2.
    scale: the supplied scale (the global one of two levels), a number or an array, or None.
    rounding, seed: "nearest", or "stochastic" with a seed: an int, a traced integer, or an array of two 32-bit words.
    nonfinite: "propagate" or "raise".
    storage: the name of the storage to write.
    out: the ScaledTensor to write into, or None.
    require_exact: of `requantize`: raise InexactError if a value would change.
    clip: of `cast_ste`: the range (low, high) inside which gradients pass, "scale" for that of each block, None for all.
    importance: of `cast`: weights of the errors that a search for scales compares, an array of shape (K,), or None.
    """

    axis: int = -1
    scale: Any = None
    rounding: str = "nearest"
    seed: Any = None
    nonfinite: str = "propagate"
    storage: str = PLAIN
    out: Any = None
    require_exact: bool = False
    clip: tuple[float, float] | str | None = None
    importance: Any = None

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
    if shape:
        return True
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


class ProductOptions(NamedTuple):
    """The options of ops that return an array of a dtype that the caller chooses: products and `dequantize`.

    out_dtype: the name of the floating dtype of the result. bias: of products: a floating array of shape (N,), or None.
    out: the array to write into, or None.
    """

    out_dtype: str = "float32"
    bias: Any = None
    out: Any = None

    def given(self) -> dict[str, Any]:
        """The options that are not at their default, by name."""
        options = {} if self.out_dtype == "float32" else {"out_dtype": self.out_dtype}
        return options | {name: value for name, value in (("bias", self.bias), ("out", self.out)) if value is not None}

    def get(self, name: str, default: Any = None) -> Any:
        """One option by name, as `Call.option` reads it."""
        return getattr(self, name, default)


class _OfDtype(dict[str, ProductOptions]):
    def __missing__(self, dtype: str) -> ProductOptions:
        return ProductOptions(dtype)


#: The options of ops without `CastOptions` at their default: one object, which layers recognize.
FLOAT32 = ProductOptions()
_OF_DTYPE = _OfDtype(float32=FLOAT32, float16=ProductOptions("float16"), bfloat16=ProductOptions("bfloat16"))


def product_options(out_dtype: str, bias: Any = None, out: Any = None) -> ProductOptions:
    """The options of a product or of `dequantize`; the same object for calls that give a dtype alone."""
    return _OF_DTYPE[out_dtype] if bias is None and out is None else ProductOptions(out_dtype, bias, out)
