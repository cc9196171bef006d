"""ScaledTensor: low-precision codes bound to the scales that give them meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .codecs import Codec
from .errors import LayoutError, OptionError, UnsupportedError
from .formats import Format
from .frameworks import FLOATS, dtype_name, framework_of, same_framework
from .layouts import Layout, PerBlockK, Shape
from .options import whole_number
from .recipes import ScalingRecipe


def packing(codec: Codec) -> tuple[int, int]:
    """(codes, bytes) of the smallest whole group of `codec`'s codes: (1, 1) for 8 bits, (2, 1) for 4, (4, 3) for 6."""
    group = math.lcm(codec.bits, 8)
    return group // codec.bits, group // 8


def packed_length(codec: Codec, length: int) -> int:
    """Bytes along the packed axis that hold `length` codes."""
    codes, size = packing(codec)
    return -(-length // codes) * size


@dataclass(frozen=True, eq=False, init=False, repr=False, slots=True, weakref_slot=True)
class ScaledTensor:
    """`data` and `scale` of one framework, the `recipe` they follow, and the `layout` that maps one onto the other.

    data: codes. 8-bit codes one per item (uint8, or the framework's float8 dtype); 4-bit codes two to a uint8 along
        `axis`, the even index in the low nibble.
    scale: what codes are multiplied by; its shape follows from `layout`.
    zero_point: whole numbers of `scale`'s shape, for recipes with one; the float biases of a format with offset "bias".
    global_scale: the coarse level's FP32 scale, shape () or a prefix of data.shape[:-2], for two-level recipes.
    axis: the contraction axis blocks run along, -1 or -2; stored negative.
    shape: the logical shape. Needed only where `data` ends in padding codes; derived otherwise.

    Frozen; equal and hashed by identity; never converts to floating point in silence (see `breccia.dequantize`).
    Raises TypeError or ValueError (their breccia subclasses) where the parts contradict each other.
    """

    data: Any
    scale: Any
    recipe: ScalingRecipe
    layout: Layout
    zero_point: Any
    global_scale: Any
    axis: int
    #: Padding codes at the end of `axis`, less than one packing group.
    tail: int

    def __init__(
        self,
        data: Any,
        scale: Any,
        recipe: ScalingRecipe,
        layout: Layout,
        zero_point: Any = None,
        global_scale: Any = None,
        axis: int = -1,
        shape: Shape | None = None,
        *,
        tail: int | None = None,
    ) -> None:
        _check_arrays(data, scale, zero_point, global_scale)
        if recipe is None:
            raise LayoutError("recipe is required: a breccia.ScalingRecipe such as breccia.MXFP8BlockScaling().")
        if layout is None:
            raise LayoutError("layout is required: a breccia.layouts.Layout such as breccia.PerTensor().")
        if not isinstance(recipe, ScalingRecipe):
            raise UnsupportedError(f"recipe must be a ScalingRecipe instance, got {recipe!r}.")
        if not isinstance(layout, Layout):
            raise UnsupportedError(f"layout must be a Layout instance, got {layout!r}.")
        axis = contraction_axis(axis, len(data.shape))
        fmt = recipe.format
        if shape is not None:
            tail = _tail_of(_lengths(shape), tuple(data.shape), fmt.element, axis)
        _fill(self, data, scale, recipe, layout, zero_point, global_scale, axis, tail or 0)
        _check_parts(self, fmt)

    @classmethod
    def assemble(
        cls,
        data: Any,
        scale: Any,
        recipe: ScalingRecipe,
        layout: Layout,
        zero_point: Any = None,
        global_scale: Any = None,
        axis: int = -1,
        tail: int = 0,
    ) -> ScaledTensor:
        """The tensor of parts known to fit, unchecked: for kernels, and for pytrees whose leaves are placeholders."""
        self = object.__new__(cls)
        _fill(self, data, scale, recipe, layout, zero_point, global_scale, axis, tail)
        return self

    @property
    def shape(self) -> Shape:
        """The logical shape: that of the high-precision tensor this stands for."""
        codes, size = packing(self.recipe.format.element)
        shape = list(self.data.shape)
        shape[self.axis] = shape[self.axis] // size * codes - self.tail
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def data_dtype(self) -> Any:
        return self.data.dtype

    @property
    def scale_dtype(self) -> Any:
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(int(part.nbytes) for part in (getattr(self, name) for name in PARTS) if part is not None)

    @property
    def framework(self) -> str:
        """Name of the framework that owns the parts: "numpy", "torch", "jax", "mlx", ..."""
        return framework_of(self.data, "data").name

    @property
    def device(self) -> Any:
        """The framework's device of `data`; "cpu" for NumPy, None where arrays have no device."""
        return getattr(self.data, "device", None)

    @property
    def mT(self) -> ScaledTensor:
        """The transpose of the last two axes: parts swapped as views, blocks along the other axis, no byte moved."""
        if self.ndim < 2:
            raise LayoutError(f"mT needs at least two axes; this tensor has shape {self.shape}.", shape=self.shape)

        def swapped(part: Any) -> Any:
            return part if part is None or len(part.shape) < 2 else part.swapaxes(-1, -2)

        per_tensor = self.layout.block() == (None, None)
        return ScaledTensor.assemble(
            swapped(self.data),
            self.scale if per_tensor else swapped(self.scale),
            self.recipe,
            self.layout.mT,
            self.zero_point if per_tensor else swapped(self.zero_point),
            self.global_scale,
            -3 - self.axis,
            self.tail,
        )

    #: NumPy's operators give way, so that `array @ st` is a TypeError and not an array of objects.
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refused: it would dequantize in silence."""
        raise UnsupportedError("a ScaledTensor is no array; breccia.dequantize(st) gives its values, st.data its codes.")

    def __repr__(self) -> str:
        axis = "" if self.axis == -1 else f", axis={self.axis}"
        return (
            f"breccia.ScaledTensor(shape={self.shape}, data_dtype={self.data_dtype}, "
            f"scale_shape={tuple(self.scale.shape)}, recipe={type(self.recipe).__name__}, "
            f"layout={type(self.layout).__name__}{axis})"
        )


#: Dtypes of `zero_point`, by the format's offset. BF16 biases may be bit patterns, as BF16 scales may.
_ZERO_POINTS = {"zero_point": ("uint8", "int8", "int16", "int32", *FLOATS), "bias": (*FLOATS, "uint16")}
#: The fields that hold arrays.
PARTS = ("data", "scale", "zero_point", "global_scale")
_FIELDS = ("data", "scale", "recipe", "layout", "zero_point", "global_scale", "axis", "tail")


def _fill(self: ScaledTensor, *values: Any) -> None:
    for name, value in zip(_FIELDS, values, strict=True):
        object.__setattr__(self, name, value)


def contraction_axis(axis: int, ndim: int) -> int:
    """`axis` as -1 or -2. Raises LayoutError for any other."""
    axis = whole_number("axis", axis)
    negative = axis - ndim if axis >= 0 else axis
    if negative not in (-1, -2) or -negative > ndim:
        raise LayoutError(
            f"the contraction axis is one of the last two (-1 or -2); got axis={axis} for {ndim} axes. "
            "Move that axis to the end first (moveaxis).",
            axis=axis,
            ndim=ndim,
        )
    return negative


def _check_arrays(data: Any, scale: Any, zero_point: Any, global_scale: Any) -> None:
    parts = {"data": data, "scale": scale, "zero_point": zero_point, "global_scale": global_scale}
    present = {name: part for name, part in parts.items() if part is not None or name in ("data", "scale")}
    for name, part in present.items():
        if not hasattr(part, "shape") or not hasattr(part, "dtype"):
            raise UnsupportedError(
                f"{name} must be array-like with .shape and .dtype, got {type(part).__name__}.", **{name: part}
            )
    same_framework(present)
    if len(data.shape) < 1:
        raise LayoutError("data must be at least 1-D, got 0-D; reshape it to (1,).")


def _lengths(shape: Any) -> Shape:
    try:
        return tuple(whole_number("shape", n) for n in shape)
    except TypeError:
        raise OptionError(f"shape must be a tuple of whole numbers, got {shape!r}.", shape=shape) from None


def _tail_of(shape: Shape, stored: Shape, element: Codec, axis: int) -> int:
    """Padding codes that make `stored` hold the logical `shape`. Raises LayoutError where none does."""
    if any(n < 0 for n in shape):
        raise LayoutError(f"shape= has lengths >= 0; got {shape}.", shape=shape)
    expected = list(shape)
    if len(shape) == len(stored):
        expected[axis] = packed_length(element, shape[axis])
    if tuple(expected) != stored:
        raise LayoutError(
            f"shape={shape} needs data of shape {tuple(expected)} ({element.name}, {element.bits} bits per code along "
            f"axis {axis}); got data of shape {stored}.",
            shape=shape,
            found=stored,
        )
    codes, size = packing(element)
    return stored[axis] // size * codes - shape[axis]


def _check_parts(st: ScaledTensor, fmt: Format) -> None:
    codes, size = packing(fmt.element)
    held = st.data.shape[st.axis] // size * codes
    if st.data.shape[st.axis] % size or not 0 <= st.tail < codes or st.tail > held:
        raise LayoutError(
            f"data of shape {tuple(st.data.shape)} does not hold whole groups of {codes} {fmt.element.name} codes in "
            f"{size} bytes along axis {st.axis} (tail={st.tail}).",
            found=tuple(st.data.shape),
            tail=st.tail,
        )
    check_codes("data", st.data, fmt.element)
    check_codes("scale", st.scale, fmt.scale.codec)
    st.layout.validate(st.data, st.scale, shape=st.shape, axis=st.axis)
    expected, found = fmt.scale.block, st.layout.block(st.axis)
    whole_rows = found == (1, None) and isinstance(st.recipe.layout, PerBlockK)  # a group of whatever size K is
    if found != expected and not whole_rows:
        raise LayoutError(
            f"recipe {st.recipe.name!r} scales blocks of {expected} (rows, elements along axis {st.axis}); layout "
            f"{st.layout} has blocks of {found}. Use {st.recipe.layout.oriented(st.axis)}.",
            expected=expected,
            found=found,
        )
    _check_zero_point(st, fmt)
    _check_global_scale(st, fmt)


def check_codes(name: str, part: Any, codec: Codec) -> None:
    """Raise UnsupportedError unless `part` has a dtype that codes of `codec` are stored in."""
    found = dtype_name(part)
    if codec.bits > 8:
        allowed = set(FLOATS) | ({"uint16"} if codec.name == "BF16" else set[str]())
    else:
        allowed = {"uint8"} | ({codec.dtype} if codec.dtype else set[str]())
    if found not in allowed:
        raise UnsupportedError(
            f"{name} must hold {codec.name} as {' or '.join(sorted(allowed))}; got dtype {found}. View bytes as uint8, or "
            "use breccia.cast to quantize numbers.",
            found=found,
            allowed=sorted(allowed),
        )


def _check_zero_point(st: ScaledTensor, fmt: Format) -> None:
    if (st.zero_point is not None) != (fmt.offset != "none"):
        state = "needs a zero_point" if st.zero_point is None else "has no zero_point"
        raise LayoutError(f"recipe {st.recipe!r} {state}; got {'none' if st.zero_point is None else 'one'}.")
    if st.zero_point is not None and dtype_name(st.zero_point) not in _ZERO_POINTS[fmt.offset]:
        what = "whole numbers" if fmt.offset == "zero_point" else "biases"
        raise UnsupportedError(
            f"zero_point must be {what} as one of {', '.join(_ZERO_POINTS[fmt.offset])}; got {dtype_name(st.zero_point)}.",
            found=dtype_name(st.zero_point),
        )
    if st.zero_point is not None and tuple(st.zero_point.shape) != tuple(st.scale.shape):
        raise LayoutError(
            f"zero_point.shape ({tuple(st.zero_point.shape)}) must match scale.shape ({tuple(st.scale.shape)}).",
            found=tuple(st.zero_point.shape),
            expected=tuple(st.scale.shape),
        )


def _check_global_scale(st: ScaledTensor, fmt: Format) -> None:
    if (st.global_scale is not None) != (fmt.global_scale is not None):
        state = "needs a global_scale" if st.global_scale is None else "has one scale level and no global_scale"
        raise LayoutError(
            f"recipe {st.recipe!r} {state}; got {'none' if st.global_scale is None else 'one'}."
            + (" Data without it is NVFP4BlockScaling(two_level=False)." if st.recipe.name == "nvfp4" else "")
        )
    if st.global_scale is not None:
        found, lead = tuple(st.global_scale.shape), st.shape[:-2]
        if found != lead[: len(found)]:
            raise LayoutError(
                f"global_scale.shape must be () or a prefix of data.shape[:-2]={lead}, got {found}; reshape a (1,) "
                "scale to ().",
                found=found,
            )
        if dtype_name(st.global_scale) != "float32":
            raise UnsupportedError(f"global_scale must be float32, got {dtype_name(st.global_scale)}.")


def from_buffer(
    data: Any,
    scale: Any,
    recipe: ScalingRecipe,
    layout: Layout,
    zero_point: Any = None,
    global_scale: Any = None,
    axis: int = -1,
    shape: Shape | None = None,
) -> ScaledTensor:
    """Wrap buffers that are quantized already. Nothing is copied or computed; what contradicts itself raises.

    Parameters are those of `ScaledTensor`.
    """
    return ScaledTensor(data, scale, recipe, layout, zero_point, global_scale, axis, shape)
