"""Checks of a ScaledTensor's components against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arrays.frameworks import FLOATS, dtype_name, framework_of, same_framework
from ..codecs import CODECS, Codec
from ..errors import LayoutError, OptionError, UnsupportedError
from ..formats import Format
from ..layouts import PerGroupIndex, Shape
from ..options import whole_number
from .components import named_leaves
from .grids import in_records, packed_length, packing

if TYPE_CHECKING:
    from .tensor import ScaledTensor


#: Dtypes of `zero_point`, by the format's offset. BF16 biases may be bit patterns, as BF16 scales may.
_BIASES = (*FLOATS, "uint16")
_ZERO_POINTS = {
    "zero_point": ("uint8", "int8", "int16", "int32", *FLOATS),
    "float_zero_point": _BIASES,
    "bias": _BIASES,
}


def contraction_axis(axis: int, ndim: int) -> int:
    """Normalize `axis` to -1 or -2. Raises LayoutError for others."""
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


def check_arrays(data: Any, scale: Any, zero_point: Any, global_scale: Any) -> None:
    """Raise UnsupportedError unless the components are arrays of one framework."""
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


def need_one_device(**operands: Any) -> None:
    """Raise UnsupportedError if components of an operand, by its name, are on different devices; operands may be arrays.

    `ScaledTensor.from_parts` and functions over the leaves of trees can make such a tensor. This is not asked at each call: the
    table asks before it chooses a kernel for a new kind of call, the generic algorithm before it decodes, and `calls` after a
    kernel has failed. Kernels that pass addresses to a device check them.
    """
    for name, st in operands.items():
        if not hasattr(st, "held"):
            continue
        parts = named_leaves(st)
        home = framework_of(parts["data"], "data").name  # the registry may be replaced meanwhile, and its frameworks with it
        # Frameworks that convert arrays of NumPy may hold them beside their own.
        same_framework({f"{name}.{part}": x for part, x in parts.items() if framework_of(x, part).name == home})


def as_shape(shape: Any) -> Shape:
    """`shape` as a tuple of integers. Raises OptionError."""
    try:
        return tuple(whole_number("shape", n) for n in shape)
    except TypeError:
        raise OptionError(f"shape must be a tuple of integers, got {shape!r}.", shape=shape) from None


def padding_of(shape: Shape, stored: Shape, element: Codec, axis: int) -> int:
    """The number of padding codes in `stored` for the logical `shape`. Raises LayoutError if they do not match."""
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


def check_parts(st: ScaledTensor, fmt: Format) -> None:
    """Raise LayoutError or UnsupportedError where components contradict each other."""
    codes, size = packing(fmt.element)
    stored_codes = st.data.shape[st.axis] // size * codes
    if st.data.shape[st.axis] % size or not 0 <= st.padding < codes or st.padding > stored_codes:
        raise LayoutError(
            f"data of shape {tuple(st.data.shape)} is not a multiple of packing groups of {codes} {fmt.element.name} codes in "
            f"{size} bytes along axis {st.axis} (padding={st.padding}).",
            found=tuple(st.data.shape),
            padding=st.padding,
        )
    check_codes("data", st.data, fmt.element)
    check_codes("scale", st.scale, fmt.scale_codec)
    if fmt.features & {"coded_scales"}:
        _check_records(st, fmt)
    else:
        st.layout.validate(st.data, st.scale, shape=st.shape, axis=st.axis)
    expected, block = fmt.block, st.layout.block(st.axis)
    # Groups with floating-point scales may span K or be given by an index; MX and NVFP4 blocks have a fixed length.
    groups = expected[0] == 1 and expected[1] is not None and fmt.scale_codec.bits > 8
    fits = block == expected and not isinstance(st.layout, PerGroupIndex)
    if not fits and not (groups and block == (1, None)):
        raise LayoutError(
            f"recipe {st.recipe.name!r} scales blocks of {expected} (rows, elements along axis {st.axis}); layout "
            f"{st.layout} has blocks of {block}. Use {st.recipe.layout.oriented(st.axis)}.",
            expected=expected,
            found=block,
        )
    _check_zero_point(st, fmt)
    _check_global_scale(st, fmt)


def check_codes(name: str, part: Any, codec: Codec) -> None:
    """Raise UnsupportedError unless `part` has a storage dtype of `codec`."""
    dtype = dtype_name(part)
    if codec.bits > 8:
        allowed = set(FLOATS) | ({"uint16"} if codec.dtype == "bfloat16" else set[str]())
    else:
        allowed = {"uint8"} | ({codec.dtype} if codec.dtype else set[str]())
    if dtype not in allowed:
        remedy = "View bytes as uint8, or use breccia.cast to quantize numbers."
        if (other := next((c.name for c in CODECS if c.dtype == dtype and dtype.startswith("float8")), None)) is not None:
            remedy = f"Those are codes of {other}, which stand for other numbers: pass a recipe of {other}, and "
            remedy += f"breccia.requantize to {codec.name} if it is wanted."
        raise UnsupportedError(
            f"{name} must hold {codec.name} as {' or '.join(sorted(allowed))}; got dtype {dtype}. {remedy}",
            found=dtype,
            allowed=sorted(allowed),
        )


def _check_records(st: ScaledTensor, fmt: Format) -> None:
    """Raise LayoutError unless components of records have their bytes for each block of the layout."""
    blocks = st.layout.scale_shapes(st.shape, st.axis)[0]
    for name in ("scale", "zero_point"):
        part, expected = getattr(st, name), in_records(fmt, name, blocks, st.axis)
        if part is not None and tuple(part.shape) != expected:
            record = fmt.record(name)
            has = "one item" if record is None else f"a record of {record.nbytes} bytes"
            raise LayoutError(
                f"{name}.shape must be {expected}, {has} for each block of {fmt.block[1]} elements along axis {st.axis} of the "
                f"logical shape {st.shape}; got {tuple(part.shape)}.",
                expected=expected,
                found=tuple(part.shape),
            )


def _check_zero_point(st: ScaledTensor, fmt: Format) -> None:
    if (st.zero_point is not None) != (fmt.offset != "none"):
        state = "needs a zero_point" if st.zero_point is None else "has no zero_point"
        raise LayoutError(f"recipe {st.recipe!r} {state}; got {'none' if st.zero_point is None else 'one'}.")
    if st.zero_point is None:
        return
    allowed = _ZERO_POINTS[fmt.offset] if fmt.offset_record is None else ("uint8",)
    if dtype_name(st.zero_point) not in allowed:
        what = "whole numbers" if fmt.offset == "zero_point" else "biases" if fmt.offset == "bias" else "floats"
        what = what if fmt.offset_record is None else "records of biases"
        raise UnsupportedError(
            f"zero_point must be {what} as one of {', '.join(allowed)}; got {dtype_name(st.zero_point)}.",
            found=dtype_name(st.zero_point),
        )
    if "coded_scales" not in fmt.features and tuple(st.zero_point.shape) != tuple(st.scale.shape):
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
        shape, lead = tuple(st.global_scale.shape), st.shape[:-2]
        if shape != lead[: len(shape)]:
            raise LayoutError(
                f"global_scale.shape must be () or a prefix of data.shape[:-2]={lead}, got {shape}; reshape a (1,) "
                "scale to ().",
                found=shape,
            )
        if dtype_name(st.global_scale) != "float32":
            raise UnsupportedError(f"global_scale must be float32, got {dtype_name(st.global_scale)}.")
