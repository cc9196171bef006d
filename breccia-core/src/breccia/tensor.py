"""ScaledTensor: low-precision codes bound to the scales that give them meaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import targets
from .codecs import Codec
from .errors import LayoutError, OptionError, UnsupportedError
from .formats import TENSOR, Block, Format
from .frameworks import FLOATS, dtype_name, framework_of, ops_of, same_framework
from .grids import (
    Cut,
    Grid,
    check_axis,
    check_cut,
    data_grid,
    inferred,
    kept,
    packed_length,
    packing,
    pieces,
    read_index,
    read_positions,
    releaded,
    scale_grid,
    whole_unit,
)
from .layouts import Layout, PerBlockK, PerGroupIndex, Shape, Stored
from .options import PLAIN, whole_number
from .recipes import ScalingRecipe
from .storage import Plain, Storage


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
        check_layout(layout)
        axis = contraction_axis(axis, len(data.shape))
        fmt = recipe.format
        if isinstance(layout, Stored) and layout.data_axes:
            tail = -layout.matrix[-1] % packing(fmt.element)[0]
        elif shape is not None:
            tail = _tail_of(_lengths(shape), tuple(data.shape), fmt.element, axis)
        fill(self, data, scale, recipe, layout, zero_point, global_scale, axis, tail or 0)
        if layout.storage != PLAIN and shape is not None and self.shape != _lengths(shape):
            raise LayoutError(f"shape={tuple(shape)}, but these parts are of a tensor of shape {self.shape}.", found=self.shape)
        _check_parts(self if layout.storage == PLAIN else _checked_plain(self), fmt)

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
        fill(self, data, scale, recipe, layout, zero_point, global_scale, axis, tail)
        return self

    @property
    def shape(self) -> Shape:
        """The logical shape: that of the high-precision tensor this stands for."""
        return logical_shape(self)

    @property
    def ndim(self) -> int:
        return len(self.data.shape) if self.layout.storage == PLAIN else len(self.shape)

    @property
    def storage(self) -> str:
        """The name of how codes and scales lie: "plain", or that of a registered storage."""
        return self.layout.storage

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
        layout, data, scale, zero_point = self.layout, self.data, self.scale, self.zero_point
        if data.ndim < 2:
            raise LayoutError(f"mT needs at least two axes; this tensor has shape {self.shape}.", shape=self.shape)
        if layout.storage == PLAIN:
            data = _swapped(data)
            if scale.ndim > 1 and layout.block() != TENSOR:
                scale = _swapped(scale)
                if zero_point is not None:
                    zero_point = _swapped(zero_point)
        elif not isinstance(layout, Stored) or not layout.data_axes:
            data = _swapped(data)
        parts = (self.recipe, transposed(layout), zero_point, self.global_scale, -3 - self.axis, self.tail)
        return ScaledTensor.assemble(data, scale, *parts)

    def to_plain(self) -> ScaledTensor:
        """The same tensor in plain storage: itself, where it is."""
        layout = self.layout
        if layout.storage == PLAIN:
            return self
        if self.axis == -2:
            return self.mT.to_plain().mT
        assert isinstance(layout, Stored)
        storage, plain = storage_of(layout.storage), _plain(self, layout.layout)
        ops = ops_of(self.data)
        parts = targets.load(storage.to_plain)(ops, held(self), plain)
        return self._with(parts, layout=layout.layout)

    def to_storage(self, name: str) -> ScaledTensor:
        """The same tensor with codes and scales as the storage of that name has them; "plain" is `to_plain()`.

        Raises UnknownNameError for a name that no plug-in declares, UnsupportedError where the storage cannot hold the tensor.
        """
        if name == self.layout.storage:
            return self
        st = self.to_plain()
        if name == PLAIN:
            return st
        storage = storage_of(name)
        if st.axis == -2:
            return st.mT.to_storage(name).mT
        plain = _plain(st, st.layout)
        if isinstance(st.layout, PerGroupIndex) or (len(plain.shape) > 1 and not _one_scale_a_block(st, plain)):
            raise UnsupportedError(
                f"storage {name!r} holds one scale for each block, in the order of blocks; {st.layout} has scales of shape "
                f"{tuple(st.scale.shape)} for a tensor of shape {plain.shape}. It stays in plain storage."
            )
        storage.refuse(plain)
        parts = targets.load(storage.from_plain)(ops_of(st.data), held(st), plain)
        matrix = plain.shape[-2:] if storage.data_axes else ()
        return st._with(parts, layout=Stored(st.layout, name, matrix, storage.data_axes))

    # Structural verbs: each commutes with `dequantize` and changes no code.

    def __getitem__(self, index: Any) -> ScaledTensor:
        """The tensor at a basic index: integers, slices, an Ellipsis, or a tuple of them. Parts are views where there are any.

        Leading axes take any. The last two keep whole blocks, and whole bytes of packed codes: where such a unit is longer
        than one element, a slice starts and stops at its multiples or at the end. An integer drops its axis; one of the last
        two only under per-tensor scales that span neither, and 8-bit codes.

        Raises OutOfRangeError (an IndexError), LayoutError naming the unit, UnsupportedError for lists and masks.
        """
        return self._cut(read_index(index, self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ScaledTensor]:
        return (self[n] for n in range(len(self)))

    #: `value in st` would compare codes with numbers.
    __contains__ = None

    def select(self, axis: int, index: Any) -> ScaledTensor:
        """Positions `index` of `axis`: an integer drops the axis; a list or 1-D array of them keeps it, in that order.

        For leading axes (experts of an MoE weight), and those of the last two whose blocks and packing groups are one
        element long (rows of an embedding). Negative positions count from the end. An array is read, so it cannot be traced.

        Raises OutOfRangeError (an IndexError), LayoutError naming the unit, ShapeError for an axis there is not.
        """
        shape = self.shape
        axis = check_axis(axis, len(shape))
        cuts: list[Cut] = [range(n) for n in shape]
        cuts[axis] = read_positions(index, axis, shape[axis])
        return self._cut(tuple(cuts))

    def split(self, size: int | Sequence[int], axis: int = 0) -> tuple[ScaledTensor, ...]:
        """Consecutive pieces along `axis`: of length `size`, the last one maybe shorter; or of the lengths in a list.

        Raises OptionError for lengths that do not add up, LayoutError where a piece would end inside a block.
        """
        shape = self.shape
        axis = check_axis(axis, len(shape))
        self = self.to_plain()
        cuts: list[Cut] = [range(n) for n in shape]
        found: list[ScaledTensor] = []
        start = 0
        for length in pieces(size, shape[axis], axis):
            cuts[axis] = range(start, start + length) if length else range(0)
            found.append(self._cut(tuple(cuts)))
            start += length
        return tuple(found)

    def reshape(self, *shape: int | Sequence[int]) -> ScaledTensor:
        """The tensor with other leading axes; its last two lengths (a 1-D tensor's one) stay. One -1 is inferred.

        Raises ShapeError.
        """
        self = self.to_plain()
        old, ops = self.shape, ops_of(self.data)
        new = inferred(shape, old)
        if new == old:
            return self
        lead = new[: len(new) - len(old[-2:])]
        parts = {
            name: ops.reshape(part, (*lead, *part.shape[-2:]))
            if name == "data"
            else releaded(ops, part, lead, old, self.axis, scale_block(self, name))
            for name, part in held(self).items()
        }
        return self._with(parts)

    def to(self, device: Any) -> ScaledTensor:
        """The tensor with every part on `device`, as its framework names devices; None leaves it where it is.

        Raises OptionError for a device the framework does not know.
        """
        if hasattr(device, "itemsize"):
            raise OptionError(
                f"to() moves a tensor to a device; {device!r} is a dtype. Values of another dtype are "
                "breccia.dequantize(st, out_dtype=...).",
                device=str(device),
            )
        ops = ops_of(self.data)
        return self._with({name: ops.to(part, device) for name, part in held(self).items()})

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of what `bytes_equal` compares; the same in every framework and process.

        Hashed are, in this order: UTF-8 canonical JSON (sorted keys, no spaces) of
        `{"axis": ..., "layout": layout.to_dict(), "parts": {name: [dtype, shape]}, "recipe": recipe.to_dict(), "shape": ...}`
        over the parts there are, float8 dtypes named "uint8" and bfloat16 "uint16"; then the bytes of data, scale,
        zero_point and global_scale, each in C order, little-endian.
        """
        self = self.to_plain()
        stored = stored_parts(self)
        text = json.dumps(_facts(self, stored), sort_keys=True, separators=(",", ":"))
        found = hashlib.sha256(text.encode())
        for part in stored.values():
            found.update(part.reshape(-1).view("u1"))
        return found.hexdigest()

    def _cut(self, cuts: tuple[Cut, ...]) -> ScaledTensor:
        """What `cuts`, one for each axis, keep."""
        self = self.to_plain()
        shape, grids = self.shape, part_grids(self)
        _check_dropped(self, cuts, grids)
        for axis, (cut, length) in enumerate(zip(cuts, shape, strict=True)):
            check_cut(cut, axis, length, whole_unit(grids.values(), axis))
        ops = ops_of(self.data)
        parts = {name: kept(ops, part, grids[name], cuts, shape) for name, part in held(self).items()}
        if any(isinstance(cut, int) for cut in cuts[-2:]):
            return self._with(parts, axis=-1)  # one scale for all, whichever axis is left
        along, length = cuts[self.axis], shape[self.axis]
        assert not isinstance(along, int)
        left = tuple(len(cut) for cut in cuts if not isinstance(cut, int))
        layout = self.layout if along == range(length) else self.layout.along(along)
        to_the_end = isinstance(along, range) and along.stop == length
        return self._with(parts, layout=layout.fitted(left, self.axis), tail=self.tail if to_the_end else 0)

    def _with(self, parts: dict[str, Any], **changed: Any) -> ScaledTensor:
        """This tensor with these parts, the only ones it has, and other fields."""
        fields: dict[str, Any] = {"recipe": self.recipe, "layout": self.layout, "axis": self.axis, "tail": self.tail}
        return ScaledTensor.assemble(**(fields | changed | parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its constructor's arguments, which are checked when it is read: a pickle may come from anybody."""
        ops = ops_of(self.data)
        parts = [None if part is None else ops.portable(part) for part in (getattr(self, name) for name in PARTS)]
        dtypes = tuple(None if part is None else dtype_name(part) for part in (getattr(self, name) for name in PARTS))
        data, scale, *others = parts
        return restored, (data, scale, self.recipe, self.layout, *others, self.axis, self.tail, dtypes)

    #: NumPy's operators give way, so that `array @ st` is a TypeError and not an array of objects.
    __array_ufunc__ = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refused: it would dequantize in silence."""
        raise UnsupportedError("a ScaledTensor is no array; breccia.dequantize(st) gives its values, st.data its codes.")

    def __repr__(self) -> str:
        axis = "" if self.axis == -1 else f", axis={self.axis}"
        axis += "" if self.layout.storage == PLAIN else f", storage={self.layout.storage!r}"
        return (
            f"breccia.ScaledTensor(shape={self.shape}, data_dtype={self.data_dtype}, "
            f"scale_shape={tuple(self.scale.shape)}, recipe={type(self.recipe).__name__}, "
            f"layout={type(self.layout.plain).__name__}{axis})"
        )


def restored(
    data: Any,
    scale: Any,
    recipe: ScalingRecipe,
    layout: Layout,
    zero_point: Any,
    global_scale: Any,
    axis: int,
    tail: int,
    dtypes: tuple[str | None, ...] = (),
) -> ScaledTensor:
    """The tensor of a pickle; `dtypes` are those its parts had. Raises what ScaledTensor raises."""
    parts = [data, scale, zero_point, global_scale]
    for n, (part, dtype) in enumerate(zip(parts, dtypes, strict=False)):
        if part is not None and dtype is not None and dtype_name(part) != dtype:
            parts[n] = ops_of(part).from_portable(part, dtype)
    data, scale, zero_point, global_scale = parts
    return ScaledTensor(data, scale, recipe, layout, zero_point, global_scale, axis, tail=tail)


#: Dtypes of `zero_point`, by the format's offset. BF16 biases may be bit patterns, as BF16 scales may.
_ZERO_POINTS = {"zero_point": ("uint8", "int8", "int16", "int32", *FLOATS), "bias": (*FLOATS, "uint16")}
#: The fields that hold arrays.
PARTS = ("data", "scale", "zero_point", "global_scale")
#: All fields, in order.
FIELDS = ("data", "scale", "recipe", "layout", "zero_point", "global_scale", "axis", "tail")


#: How a frozen instance is filled: by the descriptors of its slots.
_SETTERS = tuple(vars(ScaledTensor)[name].__set__ for name in FIELDS)
_DATA, _SCALE, _RECIPE, _LAYOUT, _ZERO_POINT, _GLOBAL_SCALE, _AXIS, _TAIL = _SETTERS


def fill(
    self: ScaledTensor,
    data: Any,
    scale: Any,
    recipe: ScalingRecipe,
    layout: Layout,
    zero_point: Any,
    global_scale: Any,
    axis: int,
    tail: int,
) -> None:
    """Set the fields of a new instance; module-level, so that torch.compile can substitute it."""
    _DATA(self, data)
    _SCALE(self, scale)
    _RECIPE(self, recipe)
    _LAYOUT(self, layout)
    _ZERO_POINT(self, zero_point)
    _GLOBAL_SCALE(self, global_scale)
    _AXIS(self, axis)
    _TAIL(self, tail)


def logical_shape(st: ScaledTensor) -> Shape:
    """`st.shape`; module-level, so that torch.compile can substitute it."""
    layout = st.layout
    if layout.storage != PLAIN:
        assert isinstance(layout, Stored)
        if (found := layout.shape(tuple(st.data.shape), st.axis)) is not None:
            return found
    codes, size = packing(st.recipe.format.element)
    shape = list(st.data.shape)
    shape[st.axis] = shape[st.axis] // size * codes - st.tail
    return tuple(shape)


def _swapped(part: Any) -> Any:
    """The last two axes exchanged. `mT` is a third faster than the call in torch; MLX 0.28 lacks it."""
    try:
        return part.mT
    except AttributeError:
        return part.swapaxes(-1, -2)


def transposed(layout: Layout) -> Layout:
    """`layout.mT`; module-level, so that torch.compile can substitute it."""
    return layout.mT


def storage_of(name: str) -> Storage:
    """The registered storage of that name. Raises UnknownNameError."""
    return targets.load(targets.REGISTRY)().look_up("breccia_storages", name, "storage")


def check_layout(layout: Layout) -> None:
    """Raise UnsupportedError or UnknownNameError for a layout or storage that no plug-in declares."""
    declared = targets.load(targets.REGISTRY)().layouts
    for each in {layout, layout.plain}:
        if declared.get(each.name) is not type(each):
            raise UnsupportedError(
                f"no plug-in declares layout {type(each).__name__}, so where its scales lie is not known. Declare it through "
                f"the hook breccia_layouts, or use one of {', '.join(sorted(declared))}.",
                layout=each,
            )
    if layout.storage != PLAIN:
        storage_of(layout.storage)


def _checked_plain(st: ScaledTensor) -> ScaledTensor:
    """The plain tensor of `st`. Raises LayoutError where the parts do not have the shapes that its storage gives them."""
    wrong = f"parts of shapes {_shapes(st)} are no tensor in storage {st.storage!r}"
    try:
        plain = st.to_plain()
        again = plain.to_storage(st.storage)
    except UnsupportedError:
        raise
    except Exception as e:  # whatever shapes that do not fit lead to
        raise LayoutError(f"{wrong}: {e}. Store a plain tensor by st.to_storage({st.storage!r}).", found=_shapes(st)) from e
    if _shapes(again) != _shapes(st) or again.layout != st.layout:
        raise LayoutError(f"{wrong}: a tensor of shape {plain.shape} has {_shapes(again)} there.", found=_shapes(st))
    for name, part in held(again).items():
        here, there = dtype_name(getattr(st, name)), dtype_name(part)
        if here != there:
            raise UnsupportedError(f"{name} must be {there} in storage {st.storage!r}; got dtype {here}.", found=here)
    return plain


def _shapes(st: ScaledTensor) -> dict[str, Shape]:
    return {name: tuple(part.shape) for name, part in held(st).items()}


def _plain(st: ScaledTensor, layout: Layout) -> Plain:
    """What a storage's functions are told of the plain tensor of `st`, which has blocks along its last axis."""
    fmt = st.recipe.format
    return Plain(st.shape, layout.block(-1), fmt, ops_of(st.data).dtypes(fmt))


def _one_scale_a_block(st: ScaledTensor, plain: Plain) -> bool:
    return plain.block == TENSOR or tuple(st.scale.shape) == plain.scale_shape


def held(st: ScaledTensor) -> dict[str, Any]:
    """The parts that `st` has, by name."""
    return {name: part for name in PARTS if (part := getattr(st, name)) is not None}


class Meaning(NamedTuple):
    """What a tensor is beside its parts. Hashable: the static side of frameworks' trees, where equal ones make equal trees."""

    recipe: ScalingRecipe
    layout: Layout
    axis: int
    tail: int

    @classmethod
    def of(cls, st: ScaledTensor) -> Meaning:
        return cls(st.recipe, st.layout, st.axis, st.tail)

    def assembled(self, data: Any, scale: Any, zero_point: Any = None, global_scale: Any = None) -> ScaledTensor:
        """The tensor of these parts, unchecked: they may be placeholders."""
        return ScaledTensor.assemble(data, scale, self.recipe, self.layout, zero_point, global_scale, self.axis, self.tail)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        listed = {"recipe": self.recipe.to_dict(), "layout": self.layout.to_dict(), "axis": self.axis, "tail": self.tail}
        return json.dumps(listed, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Meaning:
        """What `to_json` wrote. Raises what the declarations raise."""
        listed = json.loads(text)
        recipe, layout = (json.dumps(listed[of.kind]) for of in (ScalingRecipe, Layout))
        axis, tail = int(listed["axis"]), int(listed["tail"])
        return cls(ScalingRecipe.from_json(recipe), Layout.from_json(layout), axis, tail)


def scale_block(st: ScaledTensor, name: str) -> Block:
    """The block that each item of the part `name` (scale, zero_point or global_scale) stands for."""
    return TENSOR if name == "global_scale" else st.layout.block(st.axis)


def part_grids(st: ScaledTensor) -> dict[str, Grid]:
    """How each part follows the logical axes. Raises LayoutError where the layout has blocks in an order of its own."""
    shape = st.shape
    found = {"data": data_grid(len(shape), st.axis, st.recipe.format.element)}
    for name, part in held(st).items():
        if name != "data":
            grid = found[name] = scale_grid(len(part.shape), len(shape), st.axis, scale_block(st, name))
            lengths = [
                -(-shape[along.axis] // along.codes) if along.codes else n for along, n in zip(grid, part.shape, strict=False)
            ]
            if len(grid) != len(part.shape) or lengths != list(part.shape):
                raise LayoutError(
                    f"structural verbs need one scale for each block, in the order of blocks; layout {st.layout} stores shape "
                    f"{tuple(part.shape)} for a tensor of shape {shape}. Dequantize first.",
                    found=tuple(part.shape),
                    shape=shape,
                )
    return found


def _check_dropped(st: ScaledTensor, cuts: tuple[Cut, ...], grids: dict[str, Grid]) -> None:
    """Raise LayoutError where an integer would drop an axis that codes or scales need."""
    dropped = [axis for axis in (-2, -1)[-len(cuts) :] if isinstance(cuts[axis], int)]
    if not dropped:
        return
    left = sum(not isinstance(cut, int) for cut in cuts)
    one_scale = st.layout.block(st.axis) == TENSOR and packing(st.recipe.format.element) == (1, 1)
    spans = max(sum(not isinstance(cuts[along.axis], int) for along in grid) for name, grid in grids.items() if name != "data")
    if left and one_scale and spans <= max(left - 2, 0):
        return
    axis = dropped[0]
    keep = "st[..., i:i+1, :]" if axis == -2 else "st[..., i:i+1]"
    raise LayoutError(
        f"axis {axis} of shape {st.shape} cannot be dropped: {st.layout} and {st.recipe.format.element.name} codes need it. "
        f"Keep it with length 1, {keep}, or dequantize first.",
        axis=axis,
        shape=st.shape,
    )


def bytes_equal(a: ScaledTensor, b: ScaledTensor) -> bool:
    """Do `a` and `b`, of whatever frameworks, hold the same tensor, bit by bit?

    Recipe, layout, axis and logical shape are equal, and so are the shape, dtype and bits of every part; float8 dtypes
    count as uint8, and bfloat16 as uint16, which are the same bytes. Reads values.

    Raises UnsupportedError unless both are ScaledTensors.
    """
    for name, st in (("a", a), ("b", b)):
        if not isinstance(st, ScaledTensor):
            raise UnsupportedError(f"bytes_equal compares ScaledTensors; {name} is {type(st).__name__}.")
    a, b = a.to_plain(), b.to_plain()
    left, right = stored_parts(a), stored_parts(b)
    if _facts(a, left) != _facts(b, right):
        return False
    return all(bool((left[name].reshape(-1).view("u1") == right[name].reshape(-1).view("u1")).all()) for name in left)


def stored_parts(st: ScaledTensor) -> dict[str, Any]:
    """The parts of `st` as NumPy arrays in C order, little-endian, float8 and bfloat16 as bit patterns."""
    arrays = {name: ops_of(part).to_numpy(part) for name, part in held(st).items()}
    return {name: a.astype(a.dtype.newbyteorder("<"), order="C", copy=False) for name, a in arrays.items()}


def _facts(st: ScaledTensor, stored: dict[str, Any]) -> dict[str, Any]:
    return {
        "recipe": st.recipe.to_dict(),
        "layout": st.layout.to_dict(),
        "axis": st.axis,
        "shape": st.shape,
        "parts": {name: [part.dtype.name, part.shape] for name, part in stored.items()},
    }


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
    groups = isinstance(st.recipe.layout, PerBlockK)  # whose size may be all of K, or told by an index
    fits = found == expected and not isinstance(st.layout, PerGroupIndex)
    if not fits and not (groups and found == (1, None)):
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
