"""Storages of a ScaledTensor: what is declared, and the plain tensor behind one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import targets
from ..arrays.frameworks import dtype_name, ops_of
from ..errors import LayoutError, UnsupportedError
from ..formats import TENSOR
from ..layouts import Layout, Shape
from ..options import PLAIN
from .components import components
from .storage import Plain, Storage

if TYPE_CHECKING:
    from .tensor import ScaledTensor


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


def checked_plain(st: ScaledTensor) -> ScaledTensor:
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
    for name, part in components(again).items():
        here, there = dtype_name(getattr(st, name)), dtype_name(part)
        if here != there:
            raise UnsupportedError(f"{name} must be {there} in storage {st.storage!r}; got dtype {here}.", found=here)
    return plain


def _shapes(st: ScaledTensor) -> dict[str, Shape]:
    return {name: tuple(part.shape) for name, part in components(st).items()}


def plain_of(st: ScaledTensor, layout: Layout) -> Plain:
    """What a storage's functions are told of the plain tensor of `st`, which has blocks along its last axis."""
    fmt = st.recipe.format
    return Plain(st.shape, layout.block(-1), fmt, ops_of(st.data).dtypes(fmt))


def one_scale_per_block(st: ScaledTensor, plain: Plain) -> bool:
    """Has the plain tensor one scale for each block, as storages need it?"""
    return plain.block == TENSOR or tuple(st.scale.shape) == plain.scale_shape
