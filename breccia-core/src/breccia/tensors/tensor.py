"""ScaledTensor: low-precision codes together with their scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import targets
from ..arrays.frameworks import dtype_name, framework_of, ops_of
from ..errors import BrecciaError, LayoutError, OptionError, UnsupportedError
from ..formats import TENSOR
from ..layouts import InStorage, Layout, Shape, placed
from ..options import PLAIN, whole_number
from ..recipes import ScalingRecipe
from ..specs import as_recipe
from ..tracing import traced_by_framework
from . import cutting, storing
from .advice import ADVICE
from .checks import as_shape, check_arrays, check_parts, contraction_axis, padding_of
from .components import PARTS, array_nbytes, components, moved, named_leaves
from .grids import Cut, check_axis, packing, read_index, read_positions
from .held import Held
from .printing import line, table


@dataclass(frozen=True, eq=False, init=False, repr=False, slots=True, weakref_slot=True)
class ScaledTensor:
    """`data` and `scale` of one framework, the `recipe` they follow, and the `layout` that maps one onto the other.

    data: codes. 8-bit codes one per item (uint8, or the framework's float8 dtype); 4-bit codes two to a uint8 along
        `axis`, the even index in the low nibble.
    scale: the multipliers of codes; `layout` determines the shape.
    zero_point: integers of `scale`'s shape, for recipes with zero-points; float biases for formats with offset "bias".
    global_scale: the tensor-level FP32 scale, shape () or a prefix of data.shape[:-2], for two-level recipes.
    axis: the contraction axis blocks run along, -1 or -2; stored negative.
    shape: the logical shape. Required only where `data` ends in padding codes.

    A ScaledTensor is frozen, compares and hashes by identity, and never converts to floating point implicitly: see
    `breccia.dequantize`. Operations also accept an object that contains a tensor, such as the weight of a quantized layer: its
    attribute `__scaled_tensor__` returns it.

    Raises TypeError or ValueError (their breccia subclasses) where components contradict each other.

        >>> st = breccia.cast(np.array([[0.5, -3.0, 448.0]], np.float32), "mxfp8")
        >>> st.data, st.scale  # codes in E4M3; an exponent in E8M0, where 127 is 2^0
        (array([[ 48, 196, 126]], dtype=uint8), array([[127]], dtype=uint8))
        >>> st.shape, st.recipe.spec, st.layout
        ((1, 3), 'mxfp8', PerBlockK(block_size=32, partial=True))
    """

    data: Any
    scale: Any
    recipe: ScalingRecipe
    layout: Layout
    zero_point: Any
    global_scale: Any
    axis: int
    #: Padding codes at the end of `axis`, less than one packing group.
    padding: int
    #: What the tensor holds in place of components, which are then made when they are read: see `Held`. None for most tensors.
    held: Held | None = field(init=False)

    @traced_by_framework
    def __init__(
        self,
        data: Any,
        scale: Any,
        recipe: ScalingRecipe | str,
        layout: Layout,
        zero_point: Any = None,
        global_scale: Any = None,
        axis: int = -1,
        shape: Shape | None = None,
        *,
        padding: int | None = None,
    ) -> None:
        check_arrays(data, scale, zero_point, global_scale)
        if recipe is None:
            raise LayoutError("recipe is required: a breccia.ScalingRecipe such as breccia.MXFP8BlockScaling().")
        if layout is None:
            raise LayoutError("layout is required: a breccia.layouts.Layout such as breccia.PerTensor().")
        if not isinstance(recipe, ScalingRecipe):
            recipe = as_recipe(recipe)
        if not isinstance(layout, Layout):
            raise UnsupportedError(f"layout must be a Layout instance, got {layout!r}.")
        storing.check_layout(layout)
        axis = contraction_axis(axis, len(data.shape))
        fmt = recipe.format
        if padding is not None:
            padding = whole_number("padding", padding)
        if isinstance(layout, InStorage) and layout.data_axes:
            padding = -layout.matrix[-1] % packing(fmt.element)[0]
        elif shape is not None:
            padding = padding_of(as_shape(shape), tuple(data.shape), fmt.element, axis)
        fill(self, data, scale, recipe, placed(layout, fmt.block, axis), zero_point, global_scale, axis, padding or 0)
        if layout.storage != PLAIN and shape is not None and self.shape != as_shape(shape):
            raise LayoutError(f"shape={tuple(shape)}, but the components have shape {self.shape}.", found=self.shape)
        check_parts(self if layout.storage == PLAIN else storing.checked_plain(self), fmt)

    @classmethod
    def from_parts(
        cls,
        data: Any,
        scale: Any,
        recipe: ScalingRecipe,
        layout: Layout,
        zero_point: Any = None,
        global_scale: Any = None,
        axis: int = -1,
        padding: int = 0,
    ) -> ScaledTensor:
        """The tensor with these components, unchecked: for kernels, and for pytrees whose leaves are placeholders."""
        self = object.__new__(cls)
        fill(self, data, scale, recipe, layout, zero_point, global_scale, axis, padding)
        return self

    @classmethod
    def from_sources(cls, held: Held, recipe: ScalingRecipe, layout: Layout, axis: int, padding: int) -> ScaledTensor:
        """The tensor whose components are made from the sources of `held` when they are read, unchecked: for pytrees."""
        data, scale, zero_point, global_scale = held.sources
        self = cls.from_parts(data, scale, recipe, layout, zero_point, global_scale, axis, padding)
        self.hold(held)
        return self

    def hold(self, held: Held) -> None:
        """Make components from the sources of `held` when they are read, from now on: the same bytes, unchecked."""
        _HELD(self, held)  # first: another thread may read a component meanwhile
        for n, unset in enumerate(_UNSET):
            if held.replaces(n):
                unset(self)

    @property
    def data_source(self) -> Any:
        """`data`, or the array from which it is made when it is read: of the same shape, framework and device."""
        held = self.held
        return self.data if held is None else held.sources[0]

    @property
    def shape(self) -> Shape:
        """The logical shape: that of the decoded tensor."""
        return logical_shape(self)

    @property
    @traced_by_framework
    def ndim(self) -> int:
        return len(self.data_source.shape) if self.layout.storage == PLAIN else len(self.shape)

    @property
    def size(self) -> int:
        """The number of logical elements: an int, as in NumPy and JAX, on every framework. `len(st)` is the first length."""
        return math.prod(self.shape)

    def numel(self) -> int:
        """The number of logical elements, as in torch."""
        return math.prod(self.shape)

    @property
    @traced_by_framework
    def dtype(self) -> Any:
        """The dtype that `dequantize` returns by default, FP32, as the framework's object; `data_dtype` is that of codes."""
        return ops_of(self.data_source).constant(0.0, self.data_source).dtype

    @property
    @traced_by_framework
    def storage(self) -> str:
        """The memory order of codes and scales: "plain", or the name of a registered storage."""
        return self.layout.storage

    @property
    def data_dtype(self) -> Any:
        return self.data.dtype if self.held is None else self.held.dtype(0)

    @property
    def scale_dtype(self) -> Any:
        return self.scale.dtype if self.held is None else self.held.dtype(1)

    @property
    @traced_by_framework
    def nbytes(self) -> int:
        """Total bytes of all components."""
        parts = components(self).values() if self.held is None else self.held.sources
        return sum(array_nbytes(part) for part in parts if part is not None)

    @property
    @traced_by_framework
    def framework(self) -> str:
        """Name of the framework of the components: "numpy", "torch", "jax", "mlx", ..."""
        return framework_of(self.data_source, "data").name

    @property
    def device(self) -> Any:
        """The framework's device of `data`; "cpu" for NumPy, None where arrays have no device."""
        return getattr(self.data_source, "device", None)

    @property
    @traced_by_framework
    def mT(self) -> ScaledTensor:
        """The transpose of the last two axes: zero-copy views, with blocks along the other axis. Raises LayoutError if 1-D.

        >>> w = breccia.cast(np.ones((32, 64), np.float32), "mxfp8")
        >>> w.mT.shape, w.mT.axis
        ((64, 32), -2)
        """
        layout, held = self.layout, self.held
        if held is None:
            data, scale, zero_point, global_scale = self.data, self.scale, self.zero_point, self.global_scale
        else:
            data, scale, zero_point, global_scale = held.leaves
        if data.ndim < 2:
            raise LayoutError(f"mT needs at least two axes; this tensor has shape {self.shape}.", shape=self.shape)
        if layout.storage == PLAIN:
            data = _swapped(data)
            if scale.ndim > 1 and layout.block() != TENSOR:
                scale = _swapped(scale)
                if zero_point is not None:
                    zero_point = _swapped(zero_point)
        elif not isinstance(layout, InStorage) or not layout.data_axes:
            data = _swapped(data)
        recipe, layout, axis = self.recipe, transposed(layout), -3 - self.axis
        if held is not None:
            leaves = (data, scale, zero_point, global_scale)
            return ScaledTensor.from_sources(held.transposed(leaves), recipe, layout, axis, self.padding)
        return ScaledTensor.from_parts(data, scale, recipe, layout, zero_point, global_scale, axis, self.padding)

    @property
    @traced_by_framework
    def T(self) -> ScaledTensor:
        """The transpose of a matrix, which is `mT`. Raises LayoutError for other ranks, where NumPy and torch disagree."""
        if self.ndim != 2:
            raise LayoutError(
                f"T is the transpose of a matrix; this tensor has shape {self.shape}. st.mT swaps the last two axes.",
                shape=self.shape,
            )
        return self.mT

    @traced_by_framework
    def dequantize(self, *, out_dtype: Any = "float32", out: Any = None, prefer: str | Sequence[str] | None = None) -> Any:
        """`breccia.dequantize(st)`, with its options."""
        return targets.load("breccia.api:dequantize")(self, out_dtype=out_dtype, out=out, prefer=prefer)

    @traced_by_framework
    def to_plain(self) -> ScaledTensor:
        """The same tensor in plain storage: itself, if it is plain."""
        return self if self.layout.storage == PLAIN else storing.plain_tensor(self)

    @traced_by_framework
    def to_storage(self, name: str) -> ScaledTensor:
        """The same tensor in the storage with that name; "plain" is `to_plain()`.

        Raises UnknownNameError for an unknown name, UnsupportedError where the storage does not support the tensor.

            >>> st = breccia.cast(np.ones((128, 128), np.float32), "mxfp8")
            >>> st.scale.shape, st.to_storage("swizzle_128x4").scale.shape
            ((128, 4), (1, 1, 512))
            >>> breccia.bytes_equal(st.to_storage("swizzle_128x4"), st)
            True
        """
        return self if name == self.layout.storage else storing.in_storage(self, name)

    # Structural ops: each commutes with `dequantize` and changes no code.

    @traced_by_framework
    def __getitem__(self, index: Any) -> ScaledTensor:
        """The tensor at a basic index: integers, slices, an Ellipsis, or a tuple of them. Components are views where possible.

        Leading axes take any index. The last two keep whole blocks and whole bytes of packed codes: if such a unit is longer
        than one element, a slice must start and stop at its multiples or at the end. An integer drops its axis: any axis that
        blocks do not run along, where they are one row high (`st[0]` is the first row of a matrix); the contraction axis
        only under per-tensor scales and 8-bit codes. Blocks of what is left run along its last axis.

        Raises OutOfRangeError (an IndexError), LayoutError naming the unit, UnsupportedError for lists and masks.

            >>> st = breccia.cast(np.ones((8, 4, 64), np.float32), "mxfp8")
            >>> st[0, :2].shape, st[..., :32].shape
            ((2, 64), (8, 4, 32))
        """
        cuts = read_index(index, self.shape)
        return cutting.cut(self, cuts) if self.held is None else self.held.run(cutting.cut, self, cuts)

    def __len__(self) -> int:
        return self.shape[0]

    @traced_by_framework
    def __iter__(self) -> Iterator[ScaledTensor]:
        return (self[n] for n in range(len(self)))

    #: `value in st` would compare codes with values.
    __contains__ = None

    @traced_by_framework
    def select(self, axis: int, index: Any) -> ScaledTensor:
        """Positions `index` of `axis`: an integer drops the axis; a list or 1-D array of them keeps it, in that order.

        For leading axes (experts of an MoE weight), and for the last two where blocks and packing groups are one
        element long (rows of an embedding). Negative positions count from the end.

        An array's values are read, except inside functions that are traced or compiled. There, a position out of range gives
        NaN on JAX, as in `jnp.take`; an error of `index_select` on torch; and anything on MLX, as in `mx.take`.

        Raises OutOfRangeError (an IndexError), LayoutError naming the unit, ShapeError for an invalid axis.

            >>> experts = breccia.cast(np.ones((8, 4, 64), np.float32), "mxfp8")
            >>> experts.select(0, 5).shape, experts.select(0, [5, 2]).shape
            ((4, 64), (2, 4, 64))
        """
        shape = self.shape
        axis = check_axis(axis, len(shape))
        cuts: list[Cut] = [range(n) for n in shape]
        cuts[axis] = read_positions(index, axis, shape[axis])
        return cutting.cut(self, tuple(cuts))

    @traced_by_framework
    def split(self, size: int | Sequence[int], axis: int = 0) -> tuple[ScaledTensor, ...]:
        """Consecutive pieces along `axis`: of length `size` (the last may be shorter), or of the lengths in a list.

        Raises OptionError for lengths that do not add up, LayoutError where a piece would end inside a block.

            >>> qkv = breccia.cast(np.ones((96, 64), np.float32), "mxfp8")
            >>> [part.shape for part in qkv.split(40)]
            [(40, 64), (40, 64), (16, 64)]
            >>> [part.shape for part in qkv.split([64, 16, 16])]
            [(64, 64), (16, 64), (16, 64)]
        """
        return cutting.split(self, size, axis)

    @traced_by_framework
    def reshape(self, *shape: int | Sequence[int]) -> ScaledTensor:
        """The tensor with other leading axes; its last two lengths (a 1-D tensor's only one) stay. One -1 is inferred.

        Raises ShapeError.

            >>> st = breccia.cast(np.ones((8, 4, 64), np.float32), "mxfp8")
            >>> st.reshape(2, -1, 4, 64).shape
            (2, 4, 4, 64)
        """
        return cutting.reshaped(self, shape)

    @traced_by_framework
    def to(self, device: Any) -> ScaledTensor:
        """The tensor with every component on `device`, in its framework's notation; None does not move it.

        On JAX, a sharding over the axes of a mesh is that of the codes; scales follow along every axis that the shards divide.

        Raises OptionError for a device unknown to the framework.
        """
        if hasattr(device, "itemsize"):
            raise OptionError(
                f"to() moves a tensor to a device; {device!r} is a dtype. Values of another dtype are "
                "breccia.dequantize(st, out_dtype=...).",
                device=str(device),
            )
        ops = ops_of(self.data_source)
        parts = named_leaves(self)
        places = {name: device if name == "data" else ops.beside(part, device) for name, part in parts.items()}
        return moved(self, {name: ops.to(part, places[name]) for name, part in parts.items()})

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of everything that `bytes_equal` compares; the same in every framework and process.

        Hashed are, in this order: UTF-8 canonical JSON (sorted keys, no spaces) of
        `{"axis": ..., "layout": layout.to_dict(), "parts": {name: [dtype, shape]}, "recipe": recipe.to_dict(), "shape": ...}`
        over the components present, float8 dtypes named "uint8" and bfloat16 "uint16"; then the bytes of data, scale,
        zero_point and global_scale, each in C order, little-endian.
        """
        return targets.load("breccia.tensors.equality:digest")(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its constructor's arguments, which are checked when it is read: pickles may be untrusted."""
        ops = ops_of(self.data)
        parts = [None if part is None else ops.portable(part) for part in (getattr(self, name) for name in PARTS)]
        dtypes = tuple(None if part is None else dtype_name(part) for part in (getattr(self, name) for name in PARTS))
        data, scale, *others = parts
        return restored, (data, scale, self.recipe, self.layout, *others, self.axis, self.padding, dtypes)

    #: NumPy's operators defer to this class, so that `array @ st` is a TypeError and not an array of objects.
    __array_ufunc__ = None

    def __matmul__(self, other: Any) -> Any:
        """Refused: the dtype of the product is to be chosen."""
        raise UnsupportedError("st @ x is breccia.matmul(st, x), where out_dtype= is the dtype of the product.")

    def __rmatmul__(self, other: Any) -> Any:
        """Refused, as `__matmul__`."""
        raise UnsupportedError("x @ st is breccia.matmul(x, st), where out_dtype= is the dtype of the product.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refused: it would dequantize implicitly."""
        raise UnsupportedError("a ScaledTensor is not an array; breccia.dequantize(st) returns its values, st.data its codes.")

    def __mlx_array__(self) -> Any:
        """Refused: it would dequantize implicitly. `mx.array(st)` and MLX's operators on arrays ask for it, except `@`."""
        self.__array__()

    def __repr__(self) -> str:
        return line(self)

    def _repr_html_(self) -> str:
        return table(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Runs only for missing attributes: makes a component; an array's attribute gets the call to make."""
            if name in PARTS and self.held is not None:
                return self.held.component(PARTS.index(name))
            if name in vars(type(self)):  # a property that lacks an attribute of a component
                return object.__getattribute__(self, name)
            advice = ADVICE.get(name)
            hint = f": {advice}." if advice else ""
            raise AttributeError(f"'ScaledTensor' object has no attribute {name!r}{hint}", name=name, obj=self)


def restored(*fields: Any) -> ScaledTensor:
    """Rebuild a tensor from the fields of a pickle: those of `FIELDS`, and a tuple of the dtypes of its components.

    Raises the errors of ScaledTensor, and LayoutError for fields that are not those of a tensor.
    """
    try:
        data, scale, recipe, layout, zero_point, global_scale, axis, padding, *rest = fields
        parts = [data, scale, zero_point, global_scale]
        for n, (part, dtype) in enumerate(zip(parts, rest[0] if rest else (), strict=False)):
            if part is not None and dtype is not None and dtype_name(part) != dtype:
                parts[n] = ops_of(part).from_portable(part, dtype)
        data, scale, zero_point, global_scale = parts
        return ScaledTensor(data, scale, recipe, layout, zero_point, global_scale, axis, padding=padding)
    except BrecciaError:
        raise
    except Exception as e:
        raise LayoutError(f"the pickle of a ScaledTensor is damaged ({type(e).__name__}: {e}).") from e


#: All fields, in order.
FIELDS = ("data", "scale", "recipe", "layout", "zero_point", "global_scale", "axis", "padding")
#: Slot descriptors, which set the fields of a frozen instance.
_SETTERS = tuple(vars(ScaledTensor)[name].__set__ for name in FIELDS)
_DATA, _SCALE, _RECIPE, _LAYOUT, _ZERO_POINT, _GLOBAL_SCALE, _AXIS, _PADDING = _SETTERS
_HELD = vars(ScaledTensor)["held"].__set__
_UNSET = tuple(vars(ScaledTensor)[name].__delete__ for name in PARTS)


@traced_by_framework
def fill(
    self: ScaledTensor,
    data: Any,
    scale: Any,
    recipe: ScalingRecipe,
    layout: Layout,
    zero_point: Any,
    global_scale: Any,
    axis: int,
    padding: int,
) -> None:
    """Set the fields of a new instance; module-level, so that torch.compile can substitute it."""
    _DATA(self, data)
    _SCALE(self, scale)
    _RECIPE(self, recipe)
    _LAYOUT(self, layout)
    _ZERO_POINT(self, zero_point)
    _GLOBAL_SCALE(self, global_scale)
    _AXIS(self, axis)
    _PADDING(self, padding)
    _HELD(self, None)


@traced_by_framework
def logical_shape(st: ScaledTensor) -> Shape:
    """`st.shape`; module-level, so that torch.compile can substitute it."""
    layout, held = st.layout, st.held
    data_shape = tuple((st.data if held is None else held.sources[0]).shape)
    if layout.storage != PLAIN:
        assert isinstance(layout, InStorage)
        if (stored := layout.shape(data_shape, st.axis)) is not None:
            return stored
    element, padding = st.recipe.format.element, st.padding
    if element.bits == 8 and not padding:
        return data_shape
    codes, size = packing(element)
    shape = list(data_shape)
    shape[st.axis] = shape[st.axis] // size * codes - padding
    return tuple(shape)


def _swapped(part: Any) -> Any:
    """The last two axes swapped. `mT` is a third faster than the call in torch; MLX 0.28 lacks it."""
    try:
        return part.mT
    except AttributeError:
        return part.swapaxes(-1, -2)


@traced_by_framework
def transposed(layout: Layout) -> Layout:
    """`layout.mT`; module-level, so that torch.compile can substitute it."""
    return layout.mT


def scaled(x: Any) -> Any:
    """The ScaledTensor that `x` contains, which its attribute `__scaled_tensor__` returns; other values unchanged."""
    return x if isinstance(x, ScaledTensor) else getattr(x, "__scaled_tensor__", x)


def check_scaled(taker: str, x: Any, framework: str, also: str = "") -> None:
    """Raise UnsupportedError unless `x` is a ScaledTensor of the framework, without a rotation.

    also: what else `taker` takes, for the error.
    """
    is_scaled = isinstance(x, ScaledTensor)
    if is_scaled and x.framework == framework:
        if x.recipe.format.rotation is not None:
            raise UnsupportedError(
                f"{taker}: no other library undoes the rotation of {x.recipe.spec}. Pass breccia.requantize(st, "
                f'"{x.recipe.unrotated.spec}"), which rounds again, or cast without rotation.',
                recipe=x.recipe,
            )
        return
    actual, remedy = type(x).__name__, "breccia.cast makes one of an array"
    if is_scaled:
        actual, remedy = x.framework, f"convert it by breccia.bridges.from_dlpack(st, {framework!r})"
    raise UnsupportedError(f"{taker} takes a ScaledTensor of {framework}{also}, got {actual}; {remedy}.", found=actual)


def from_buffer(
    data: Any,
    scale: Any,
    recipe: ScalingRecipe | str,
    layout: Layout,
    zero_point: Any = None,
    global_scale: Any = None,
    axis: int = -1,
    shape: Shape | None = None,
) -> ScaledTensor:
    """Wrap buffers that are already quantized. Nothing is copied or computed.

    The parameters are those of `ScaledTensor`. Raises LayoutError or ShapeError (ValueErrors) where components contradict each
    other or the layout, UnsupportedError (a TypeError) for dtypes that do not hold codes of the recipe.

        >>> codes = np.array([[0x38, 0x40]], np.uint8)  # 1.0 and 2.0 in E4M3
        >>> scale = np.array(0.5, np.float32)
        >>> st = breccia.from_buffer(codes, scale, "fp8_current", breccia.PerTensor())
        >>> breccia.dequantize(st)
        array([[0.5, 1. ]], dtype=float32)
    """
    return ScaledTensor(data, scale, recipe, layout, zero_point, global_scale, axis, shape)
