"""Facts of a call, and how each is read from its operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

from .. import targets
from ..arrays.frameworks import Device, dtype_name, ops_of, place_of
from ..layouts import Layout
from ..recipes import ScalingRecipe
from ..tensors.tensor import ScaledTensor

_ALIGNMENT_LIMIT = 256
#: The source of a fact: the values of a call are (a, b, recipe to write, options, framework).
A, B, RECIPE, OPTIONS, FRAMEWORK = range(5)
Values = tuple[Any, Any, Any, Any, Any]
#: A fact that was read: an attribute path or a reader function, and the index of the value it belongs to.
Question = tuple[str | Callable[[Any], Hashable], int]


class Described(NamedTuple):
    """A stand-in for an absent operand: the recipe given to `explain`, or an operand of a kernel's own calls."""

    recipe: ScalingRecipe | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    axis: int = -1
    device: Device = Device("cpu")


def bucket(n: int) -> int:
    """`n` up to 8, then rounded up to three significant bits: 9 to 10, 17 to 20, 4000 to 4096. Symbolic lengths are kept."""
    if not isinstance(n, int) or n <= 8:
        return n
    step = 1 << (n.bit_length() - 3)
    return -(-n // step) * step


def array_of(x: Any) -> Any:
    """The array that determines an operand's framework and device: the codes of a ScaledTensor."""
    return x.data_source if isinstance(x, ScaledTensor) else x


def device_of_operand(x: Any) -> Device:
    """The device of an operand, where arrays of some types have no attribute that says it."""
    return place_of(array_of(x))


def device_count(x: Any) -> int:
    """The number of devices that the operand is sharded over; 1 where it does not say, as traced arrays."""
    return len(getattr(getattr(array_of(x), "device", None), "device_set", ())) or 1


def recipe_of(x: Any) -> ScalingRecipe | None:
    """The recipe of an operand or its description."""
    return x.recipe if isinstance(x, ScaledTensor | Described) else None


def layout_of(x: Any) -> Layout | None:
    """The layout of an operand or its description."""
    return x.layout if isinstance(x, ScaledTensor | Described) else None


def bucketed_shape(x: Any) -> tuple[int, ...]:
    """The logical shape with every length except the last rounded up."""
    shape = tuple(x.shape)
    return (*map(bucket, shape[:-1]), *shape[-1:])


def shape_of(x: Any) -> tuple[int, ...]:
    """The logical shape."""
    return tuple(x.shape)


def is_empty(x: Any) -> bool:
    """Whether the operand has no elements"""
    return 0 in (x.data_source.shape if isinstance(x, ScaledTensor) else x.shape)


def aligned_of(x: Any) -> tuple[int, int]:
    """The largest powers of two, up to 256, that divide the last two lengths."""
    shape = x.shape
    sides = (_ALIGNMENT_LIMIT, _ALIGNMENT_LIMIT, *shape)[-2:] if len(shape) != 1 else (1, *shape)
    m, k = sides
    return _power_of_two(m), _power_of_two(k)


def _power_of_two(n: int) -> int:
    """The largest power of two, up to 256, that divides `n`."""
    return min((n & -n) or _ALIGNMENT_LIMIT, _ALIGNMENT_LIMIT)


def strides_of(x: Any) -> tuple[int, ...] | None:
    """Strides of the array in bytes; None where its framework has none."""
    return None if isinstance(x, Described) else ops_of(array_of(x)).strides(array_of(x))


def is_contiguous(x: Any) -> bool:
    """Whether the array is in C order"""
    strides, array = strides_of(x), array_of(x)
    if strides is None or 0 in array.shape:
        return True
    expected = ops_of(array).itemsize(array)
    for length, stride in zip(reversed(array.shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _components(x: Any) -> tuple[Any, ...]:
    if not isinstance(x, ScaledTensor):
        return (x,)
    zero_point, global_scale = x.zero_point, x.global_scale
    if zero_point is None:
        return (x.data, x.scale) if global_scale is None else (x.data, x.scale, global_scale)
    return (x.data, x.scale, zero_point) if global_scale is None else (x.data, x.scale, zero_point, global_scale)


def address_alignment(x: Any) -> int:
    """The largest power of two, up to 256, that divides the address of every component."""
    if isinstance(x, Described):
        return _ALIGNMENT_LIMIT
    return min(_power_of_two(ops_of(part).address(part) or 0) for part in _components(x))


def row_alignment(x: Any) -> int:
    """The largest power of two, up to 256, that divides every stride except that of adjacent items."""
    strides, array = strides_of(x), array_of(x)
    if strides is None:
        return _ALIGNMENT_LIMIT
    item = ops_of(array).itemsize(array)
    return min((_power_of_two(stride) for stride in strides if stride != item), default=_ALIGNMENT_LIMIT)


@cache
def opaque_reader(target: str) -> Callable[[Any], str | None]:
    """A reader that describes an operand whose arrays have no memory of their own."""

    ask: Any = None

    def read(x: Any) -> str | None:
        nonlocal ask
        try:
            if ask is None:
                ask = targets.load(target)
            return ask(*_components(x)) if isinstance(x, ScaledTensor) else ask(x)
        except Exception as e:
            return f"an array about which {target} fails ({type(e).__name__}: {e})"

    return read


@cache
def option_reader(name: str) -> Callable[[Any], Hashable]:
    """A reader of an option; for an array, only whether it is given."""

    def read(options: Any) -> Hashable:
        return as_fact(name, options.get(name))

    return read


def bias_dtype(options: Any) -> str | None:
    """The name of the dtype of a product's bias, None without one."""
    bias = options.get("bias")
    return None if bias is None else dtype_name(bias)


def all_options(options: Any) -> tuple[tuple[str, Hashable], ...]:
    """All options that were given, as facts."""
    return tuple([(name, as_fact(name, value)) for name, value in options.given().items()])


def as_fact(name: str, value: Any) -> Hashable:
    """An option as kernels see it; for arrays, scales and seeds, only whether it is given."""
    return True if (name in _BY_PRESENCE and value is not None) or hasattr(value, "shape") else value


_BY_PRESENCE = ("scale", "seed", "out", "importance")
#: Facts that are attributes, with their paths: for an array, and for a ScaledTensor.
ATTRIBUTES = {
    "device": ("device", "data_source.device"),
    "dtype": ("dtype", "data_dtype"),
    "ndim": ("ndim", "data_source.ndim"),
    "axis": ("axis", "axis"),
    "recipe": ("recipe.interned_key", "recipe.interned_key"),
    "layout": ("layout.interned_key", "layout.interned_key"),
    "storage": ("layout.storage", "layout.storage"),
}
#: The attribute that has the features of a recipe to write, and those of a ScaledTensor's format.
FEATURES = ("features", "recipe.format.features")
#: Facts that another fact determines.
IMPLIED: dict[Any, str] = {"features": "interned_key", "recipe.format.features": "recipe.interned_key"}
#: Facts derived from the shape, and the attributes that determine it.
OF_SHAPE = (bucketed_shape, shape_of, is_empty, aligned_of)
SHAPES = (("shape",), ("data_source.shape", "padding", "axis", "recipe.interned_key", "layout.interned_key"))
