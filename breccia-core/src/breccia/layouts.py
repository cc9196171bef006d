"""Layouts: how `scale` maps onto `data`.

Most have one scale per block (m, k) of elements: all elements (`PerTensor`), a row (`PerChannel`), k elements of a row
(`PerBlockK(k)`), m rows by k columns (`PerBlockMN(m, k)`). `PerBlockMN(1, k)` is `PerBlockK(k)`.

Shapes here are logical shapes `(..., M, K)`. `axis` is the contraction axis, always negative; blocks of size
`block_size` run along it. Layouts are strict: `partial=True` is required
for a partial last block and refused otherwise, so that each tensor has one layout.
"""

from __future__ import annotations

import json
from abc import ABCMeta
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from inspect import Signature, signature
from operator import attrgetter
from operator import index as to_integer
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .declared import Declared, check_positive, check_type
from .errors import LayoutError, RecipeError
from .formats import Block
from .locks import cached_property
from .options import PLAIN

Shape = tuple[int, ...]


def other_axis(axis: int) -> int:
    """The matrix axis that is not the contraction axis: -2 for -1 and vice versa."""
    return -1 if axis == -2 else -2


class Layout(Declared):
    """Base of layouts: frozen dataclasses that determine the scale shapes for a logical shape."""

    kind: ClassVar[str] = "layout"
    partial: bool
    #: The memory order of codes and scales: "plain", or the name of a registered storage (see `InStorage`).
    storage: ClassVar[str] = PLAIN
    #: Whether there is one scale per block, in the order of blocks, so that `block` says all about where they lie. A class
    #: says this of itself: it is False for a subclass that does not say it again.
    in_order: ClassVar[bool] = False
    #: The fewest axes of a tensor under this layout.
    least_ndim: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.in_order = vars(cls).get("in_order", False)

    @property
    def plain(self) -> Layout:
        """The layout of the plain tensor."""
        return self

    def block(self, axis: int = -1) -> Block:
        """The block (m, k) each scale covers: k elements along `axis`, m along the other matrix axis."""
        raise LayoutError(f"layout {type(self).__name__} does not say its block")

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        """Valid scale shapes for the logical `shape`, the canonical one first. Raises LayoutError if there is none."""
        raise LayoutError(f"layout {type(self).__name__} does not say its scale shapes")

    def oriented(self, axis: int) -> Layout:
        """This layout, which is declared for axis=-1, with blocks along `axis`."""
        return self

    @property
    def mT(self) -> Layout:
        """The layout after the last two axes of data and scale are swapped."""
        return self

    def canonical(self, axis: int) -> Layout:
        """The canonical layout with the same blocks along `axis`, which a ScaledTensor stores: k x 1 tiles of a tensor whose
        blocks run along axis -2 are PerBlockK(k)."""
        return self

    def fitted(self, shape: Shape, axis: int = -1) -> Layout:
        """This layout with `partial` set for `shape`."""
        return self

    def along(self, positions: Iterable[int]) -> Layout:
        """The layout after selecting these positions of the contraction axis, in this order."""
        return self

    def followed_by(self, following: Layout) -> Layout:
        """The layout after concatenating a tensor under `following` along the contraction axis."""
        return self

    def validate(self, data: Any, scale: Any, *, shape: Shape | None = None, axis: int = -1) -> None:
        """Raise LayoutError unless `scale` fits.

        `shape` is the logical shape; required where `data` is packed; the default is data.shape.
        """
        logical = tuple(data.shape) if shape is None else tuple(shape)
        self._check_ndim(logical, axis)
        allowed = self.scale_shapes(logical, axis)
        scale_shape = tuple(scale.shape)
        if scale_shape not in allowed:
            wanted = f"{allowed[0]}" if len(allowed) == 1 else f"one of {sorted(allowed)}"
            raise LayoutError(
                f"{type(self).__name__}: scale.shape must be {wanted}, got {scale_shape} (data of logical shape {logical}, "
                f"blocks along axis {axis}).",
                expected=allowed,
                found=scale_shape,
                shape=logical,
                axis=axis,
            )

    def _check_ndim(self, shape: Shape, axis: int) -> None:
        if len(shape) < max(self.least_ndim, -axis):
            raise LayoutError(
                f"{type(self).__name__} requires data.ndim >= {max(self.least_ndim, -axis)}, got ndim={len(shape)}; "
                f"reshape it to (1, {shape[0] if shape else 1}) first.",
                shape=shape,
                axis=axis,
            )


class Blocks(Layout):
    """Base of the layouts with one scale per block, in the order of blocks."""

    def sides(self, axis: int) -> tuple[tuple[int, str, int], ...]:
        """The axes that are divided into blocks: (axis, field, its value: the length of a block along that axis)."""
        return ()

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        out, partial = list(shape), False
        for along, named, size in self.sides(axis):
            out[along] = -(-shape[along] // size)
            if shape[along] % size:
                partial = True
                if not self.partial:
                    raise LayoutError(
                        f"{type(self).__name__}: data.shape[{along}]={shape[along]} must be divisible by {named}={size}; "
                        "pass partial=True for a partial last block.",
                        shape=shape,
                        **{named: size},
                    )
        if self.partial and not partial:
            raise LayoutError(
                f"{type(self).__name__}: partial=True, but shape {shape} divides evenly into blocks; use partial=False.",
                shape=shape,
            )
        return (tuple(out),)

    def fitted(self, shape: Shape, axis: int = -1) -> Layout:
        partial = False
        for along, _, size in self.sides(axis):
            if shape[along] % size:
                partial = True
        return self if partial is self.partial else self._otherwise_partial

    @cached_property
    def _otherwise_partial(self) -> Layout:
        return self._changed(partial=not self.partial)

    def _changed(self, **changes: Any) -> Self:
        """A copy with other fields, of the same class: calling the class may give another (see `_Tiles`)."""
        return type.__call__(type(self), **{f.name: getattr(self, f.name) for f in fields(self)} | changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PerTensor(Blocks):
    """One scale for the whole tensor: shape `()`, or a prefix of `data.shape[:-2]` (one per expert, say)."""

    name: ClassVar[str] = "per_tensor"
    in_order: ClassVar[bool] = True
    partial: ClassVar[bool] = False  # type: ignore[misc]

    def block(self, axis: int = -1) -> Block:
        return (None, None)

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        return tuple(shape[:n] for n in range(max(len(shape) - 2, 0) + 1))

    def _check_ndim(self, shape: Shape, axis: int) -> None:
        return None

    def validate(self, data: Any, scale: Any, *, shape: Shape | None = None, axis: int = -1) -> None:
        logical = tuple(data.shape) if shape is None else tuple(shape)
        scale_shape = tuple(scale.shape)
        if scale_shape not in self.scale_shapes(logical, axis):
            raise LayoutError(
                f"PerTensor requires a scalar scale (ndim=0) or one whose shape is a prefix of data.shape[:-2]="
                f"{logical[:-2]}, got ndim={len(scale_shape)} with shape={scale_shape}; reshape a (1,) scale to ().",
                found=scale_shape,
                shape=logical,
            )


@dataclass(frozen=True)
class PerBlockK(Blocks):
    """One scale per `block_size` elements along the contraction axis: `(..., M, K / block_size)`.

    It is `PerBlockMN(1, block_size)`, and an instance of both classes.
    """

    name: ClassVar[str] = "per_block_k"
    in_order: ClassVar[bool] = True
    block_m: ClassVar[int] = 1
    block_size: int = 128
    partial: bool = False

    def __post_init__(self) -> None:
        check_positive("PerBlockK", "block_size", self.block_size)
        check_type("PerBlockK", "partial", self.partial, bool)

    @property
    def block_n(self) -> int:
        return self.block_size

    def block(self, axis: int = -1) -> Block:
        return (1, self.block_size)

    def sides(self, axis: int) -> tuple[tuple[int, str, int], ...]:
        return ((axis, "block_size", self.block_size),)


@dataclass(frozen=True)
class PerChannel(Blocks):
    """One scale per row along the contraction axis: shape `(..., M, 1)`, or `(M,)`; `(1,)` for a single row."""

    name: ClassVar[str] = "per_channel"
    in_order: ClassVar[bool] = True
    partial: ClassVar[bool] = False  # type: ignore[misc]

    def block(self, axis: int = -1) -> Block:
        return (1, None)

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        scale_shape = list(shape)
        scale_shape[axis] = 1
        return (tuple(scale_shape), (shape[other_axis(axis)],)) if len(shape) > 1 else (tuple(scale_shape),)


class _Tiles(ABCMeta):
    """The class of `PerBlockMN`: `PerBlockMN(1, k)` returns `PerBlockK(k)`, which is registered as a subclass."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Layout:
            layout = super().__call__(*args, **fields)
            return PerBlockK(layout.block_n, layout.partial) if cls is PerBlockMN and layout.block_m == 1 else layout

    @property
    def __signature__(cls) -> Signature:
        """That of `__init__`, not of `__call__` above."""
        return signature(MethodType(cls.__init__, cls))


@dataclass(frozen=True)
class PerBlockMN(Blocks, metaclass=_Tiles):
    """One scale per `(block_m, block_n)` tile of the last two axes: `(..., M / block_m, N / block_n)`.

    `PerBlockMN(1, k)` is `PerBlockK(k)`: one row high, a block runs along the contraction axis, whichever that is. A tile that
    is one row high across it is `PerBlockMN(k, 1).mT`, the layout of a transposed tensor.
    """

    name: ClassVar[str] = "per_block_mn"
    in_order: ClassVar[bool] = True
    least_ndim: ClassVar[int] = 2
    block_m: int = 1
    block_n: int = 32
    partial: bool = False

    def __post_init__(self) -> None:
        check_positive("PerBlockMN", "block_m", self.block_m)
        check_positive("PerBlockMN", "block_n", self.block_n)
        check_type("PerBlockMN", "partial", self.partial, bool)

    @property
    def _across(self) -> bool:
        """Whether this is `PerBlockMN(k, 1).mT`, whose fields alone would say `PerBlockK(k)`."""
        return type(self) is PerBlockMN and self.block_m == 1

    def __repr__(self) -> str:
        if self._across:
            return f"{self.mT!r}.mT"
        return f"{type(self).__qualname__}(block_m={self.block_m}, block_n={self.block_n}, partial={self.partial})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (attrgetter("mT"), (self.mT,)) if self._across else super().__reduce__()

    def _check_ndim(self, shape: Shape, axis: int) -> None:
        super()._check_ndim(shape, axis)
        if axis not in (-1, -2):
            raise LayoutError(
                f"PerBlockMN tiles the last two axes, so its contraction axis is -1 or -2; got {axis}. "
                "Move that axis there first.",
                axis=axis,
            )

    def block(self, axis: int = -1) -> Block:
        return (self.block_m, self.block_n) if axis == -1 else (self.block_n, self.block_m)

    def sides(self, axis: int) -> tuple[tuple[int, str, int], ...]:
        return ((-2, "block_m", self.block_m), (-1, "block_n", self.block_n))

    def canonical(self, axis: int) -> Layout:
        m, k = self.block(axis)
        return PerBlockK(k, self.partial) if m == 1 and k is not None and type(self) is PerBlockMN else self

    def oriented(self, axis: int) -> Layout:
        return self.mT if axis == -2 else self

    @cached_property
    def mT(self) -> Layout:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._changed(block_m=self.block_n, block_n=self.block_m)


PerBlockMN.register(PerBlockK)


@dataclass(frozen=True, repr=False)
class PerGroupIndex(Layout):
    """Scales by group, in any order: element k of the contraction axis belongs to group `index[k]` (GPTQ's g_idx).

    `scale` (and a zero-point) has shape `(..., M, groups)`, or `(..., groups, N)` where blocks run along axis -2.
    `index` is any sequence of integers in 0 .. groups - 1, as long as the contraction axis. It describes existing data:
    `cast` cannot write it.
    """

    name: ClassVar[str] = "per_group_index"
    partial: ClassVar[bool] = False  # type: ignore[misc]
    index: tuple[int, ...]
    groups: int

    def __post_init__(self) -> None:
        check_positive("PerGroupIndex", "groups", self.groups)
        try:
            index = tuple(int(to_integer(i)) for i in self.index)
        except TypeError:
            raise RecipeError(f"PerGroupIndex: index must be a sequence of integers, got {self.index!r}") from None
        wrong = next((k for k, group in enumerate(index) if not 0 <= group < self.groups), None)
        if wrong is not None:
            raise RecipeError(
                f"PerGroupIndex: index[{wrong}]={index[wrong]} must lie in 0..{self.groups - 1} (groups={self.groups})",
                index=index[wrong],
                groups=self.groups,
            )
        object.__setattr__(self, "index", index)

    def __repr__(self) -> str:
        ends = ", ".join(map(str, self.index[:8])) + (", ..." if len(self.index) > 8 else "")
        return f"PerGroupIndex(index=({ends}) of {len(self.index)}, groups={self.groups})"

    def block(self, axis: int = -1) -> Block:
        """(1, None): the scales of a row apply to the whole contraction axis, by index."""
        return (1, None)

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        if len(self.index) != shape[axis]:
            raise LayoutError(
                f"PerGroupIndex: index needs one group per element of axis {axis}, whose length is {shape[axis]} (shape "
                f"{shape}); it has {len(self.index)} entries.",
                shape=shape,
                axis=axis,
                found=len(self.index),
            )
        scale_shape = list(shape)
        scale_shape[axis] = self.groups
        return (tuple(scale_shape),)

    def along(self, positions: Iterable[int]) -> Layout:
        return replace(self, index=tuple(self.index[k] for k in positions))

    def followed_by(self, following: Layout) -> Layout:
        assert isinstance(following, PerGroupIndex)
        return replace(self, index=self.index + following.index)


@dataclass(frozen=True)
class InStorage(Layout):
    """`layout` in a storage other than plain: `storage` names the registered mapping (see `breccia.tensors.storage`).

    `ScaledTensor.to_storage` makes it and `to_plain` removes it. Blocks, slicing, files and digests follow
    `layout`.

    matrix, data_axes: where codes are moved too: the lengths (M, K) of the last two logical axes, K last, and how many axes
            the stored codes have in their place; `()` and 0 where codes are not moved.
    """

    name: ClassVar[str] = "stored"
    layout: Layout
    storage: str = field()  # type: ignore[misc]
    matrix: Shape = ()
    data_axes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout) or self.layout.storage != PLAIN:
            raise RecipeError(f"InStorage: layout must be a plain Layout, got {self.layout!r}", layout=self.layout)
        check_type("InStorage", "storage", self.storage, str)
        object.__setattr__(self, "matrix", tuple(self.matrix))

    @property
    def partial(self) -> bool:  # type: ignore[override]
        return self.layout.partial

    @property
    def plain(self) -> Layout:
        return self.layout

    def block(self, axis: int = -1) -> Block:
        return self.layout.block(axis)

    def shape(self, data: Shape, axis: int) -> Shape | None:
        """The logical shape of stored codes of shape `data`; None where it is derived as for a plain tensor."""
        if not self.data_axes:
            return None
        if len(data) == self.data_axes:
            return self.matrix if axis == -1 else self.matrix[::-1]
        m, k = self.matrix
        return (*data[: len(data) - self.data_axes], *((m, k) if axis == -1 else (k, m)))

    def scale_shapes(self, shape: Shape, axis: int = -1) -> tuple[Shape, ...]:
        """Raises LayoutError: the storage determines the shape of scales."""
        raise LayoutError(f"scales in storage {self.storage!r} have the shape it gives them; see st.to_plain().", shape=shape)

    def canonical(self, axis: int) -> Layout:
        layout = self.layout.canonical(axis)
        return self if layout is self.layout else replace(self, layout=layout)

    @cached_property
    def mT(self) -> Layout:  # pyright: ignore[reportIncompatibleMethodOverride]
        return replace(self, layout=self.layout.mT)

    def to_dict(self) -> dict[str, Any]:
        fields = {"layout": self.layout.to_dict(), "storage": self.storage}
        return {"name": self.name, "fields": {**fields, "matrix": list(self.matrix), "data_axes": self.data_axes}}

    @classmethod
    def with_fields(cls, fields: dict[str, Any]) -> InStorage:
        layout = fields.get("layout")
        if isinstance(layout, dict):
            fields = {**fields, "layout": layout_of_tensor(json.dumps(layout))}
        return super().with_fields(fields)


LAYOUTS: tuple[type[Layout], ...] = (PerTensor, PerBlockK, PerChannel, PerBlockMN, PerGroupIndex, InStorage)

#: Deprecated: the earlier name of `InStorage`, which pickles have.
Stored = InStorage


def layout_of_tensor(text: str) -> Layout:
    """The layout of a tensor from the JSON of its metadata. Raises what `Layout.from_json` raises.

    A tensor stores no `PerBlockMN(1, k)`, which is `PerBlockK(k)`: there, tiles one row high are `PerBlockMN(k, 1).mT`.
    """
    layout = Layout.from_json(text)
    if type(layout) is PerBlockK and json.loads(text)["name"] != layout.name:
        return PerBlockMN(layout.block_size, 1, layout.partial).mT
    return layout


def placed(layout: Layout, block: Block, axis: int) -> Layout:
    """The canonical layout of a tensor with blocks along `axis`, of a recipe whose scales cover `block`.

    Callers and earlier pickles may say 1 x n tiles: blocks along the contraction axis unless the recipe has n x 1.
    """
    canonical, (m, k) = layout.canonical(axis), block
    if axis == -2 and k == 1 and m not in (1, None) and canonical.plain == PerBlockK(m, canonical.partial):
        across = PerBlockMN(m, 1, canonical.partial).mT
        return replace(canonical, layout=across) if isinstance(canonical, InStorage) else across
    return canonical
