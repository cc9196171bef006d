"""Storages of a ScaledTensor: declared storages, and conversion between them and plain storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import targets
from ..arrays.frameworks import dtype_name, ops_of
from ..errors import LayoutError, UnsupportedError
from ..formats import TENSOR
from ..layouts import InStorage, Layout, PerGroupIndex, Shape
from ..options import PLAIN
from .components import components, named_leaves, with_parts
from .storage import Plain, Storage

if TYPE_CHECKING:
    from .tensor import ScaledTensor


def storage_of(name: str) -> Storage:
    """The registered storage with that name. Raises UnknownNameError."""
    return targets.load(targets.REGISTRY)().look_up("breccia_storages", name, "storage")


def plain_tensor(st: ScaledTensor) -> ScaledTensor:
    """The plain tensor of one in a storage."""
    if st.axis == -2:
        return st.mT.to_plain().mT
    layout = st.layout
    assert isinstance(layout, InStorage)
    storage, plain = storage_of(layout.storage), plain_of(st, layout.layout)
    parts = targets.load(storage.to_plain)(ops_of(st.data), components(st), plain)
    return with_parts(st, parts, layout=layout.layout)


def in_storage(st: ScaledTensor, name: str) -> ScaledTensor:
    """The tensor in the storage with that name, which may be "plain". Raises as `ScaledTensor.to_storage`."""
    st = st.to_plain()
    if name == PLAIN:
        return st
    storage = storage_of(name)
    if "coded_scales" in st.recipe.format.features:
        raise UnsupportedError(
            f"storage {name!r} orders one scale per block; {st.recipe.spec} has records. It stays in plain storage."
        )
    if st.axis == -2:
        return st.mT.to_storage(name).mT
    plain = plain_of(st, st.layout)
    if isinstance(st.layout, PerGroupIndex) or (len(plain.shape) > 1 and not _one_scale_per_block(st, plain)):
        raise UnsupportedError(
            f"storage {name!r} needs one scale for each block, in the order of blocks; {st.layout} has scales of shape "
            f"{tuple(st.scale.shape)} for a tensor of shape {plain.shape}. It stays in plain storage."
        )
    storage.refuse(plain)
    parts = targets.load(storage.from_plain)(ops_of(st.data), components(st), plain)
    matrix = plain.shape[-2:] if storage.data_axes else ()
    return with_parts(st, parts, layout=InStorage(st.layout, name, matrix, storage.data_axes))


def check_layout(layout: Layout) -> None:
    """Raise UnsupportedError or UnknownNameError for a layout or storage that no plug-in declares."""
    declared = targets.load(targets.REGISTRY)().layouts
    for each in {layout, layout.plain}:
        if declared.get(each.name) is not type(each):
            raise UnsupportedError(
                f"no plug-in declares layout {type(each).__name__}, so its scale order is unknown. Declare it through "
                f"the hook breccia_layouts, or use one of {', '.join(sorted(declared))}.",
                layout=each,
            )
    if layout.storage != PLAIN:
        storage_of(layout.storage)


def checked_plain(st: ScaledTensor) -> ScaledTensor:
    """The plain tensor of `st`. Raises LayoutError where the components do not have the shapes required by its storage."""
    wrong = f"components of shapes {_shapes(st)} do not form a tensor in storage {st.storage!r}"
    try:
        plain = st.to_plain()
        again = plain.to_storage(st.storage)
    except UnsupportedError:
        raise
    except Exception as e:  # mismatched shapes can raise anything
        raise LayoutError(f"{wrong}: {e}. Store a plain tensor by st.to_storage({st.storage!r}).", found=_shapes(st)) from e
    if _shapes(again) != _shapes(st) or again.layout != st.layout:
        raise LayoutError(f"{wrong}: a tensor of shape {plain.shape} needs {_shapes(again)}.", found=_shapes(st))
    for name, part in components(again).items():
        here, there = dtype_name(getattr(st, name)), dtype_name(part)
        if here != there:
            raise UnsupportedError(f"{name} must be {there} in storage {st.storage!r}; got dtype {here}.", found=here)
    return plain


def _shapes(st: ScaledTensor) -> dict[str, Shape]:
    return {name: tuple(part.shape) for name, part in named_leaves(st).items()}


def plain_of(st: ScaledTensor, layout: Layout) -> Plain:
    """The description of the plain tensor of `st` (blocks along its last axis) for a storage's functions."""
    fmt = st.recipe.format
    return Plain(st.shape, layout.block(-1), fmt, ops_of(st.data).dtypes(fmt))


def _one_scale_per_block(st: ScaledTensor, plain: Plain) -> bool:
    """Whether the plain tensor has one scale per block, as storages require."""
    return plain.block == TENSOR or tuple(st.scale.shape) == plain.scale_shape
