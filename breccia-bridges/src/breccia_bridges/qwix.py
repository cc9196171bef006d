"""qwix's QArray: codes, and scales of tiles of any shape, for JAX.

qwix holds scales of MX and NVFP4 as floats; those of a QArray that it quantized are exactly the numbers of E8M0 or E4M3, and
become their codes. Source: qwix 0.1.8, run on a CPU.
"""

from __future__ import annotations

from typing import Any

from breccia import (
    Codec,
    DialectError,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScaledTensor,
    ScalingRecipe,
)
from breccia.backend import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, NF4, TENSOR, Array, dtype_name, ops_of, pack, unpack
from breccia.internal import FLOAT_NAMES, check_scaled

from .wrapping import IntegerRecipe, attribute, buffer, chosen, float8_recipe, integer_recipe, title, wrapped

_FP8 = {str(codec.dtype): codec.name for codec in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
#: The recipes of qwix's block formats, and the codec of their scales.
_BLOCKS: dict[str, tuple[ScalingRecipe, Codec]] = {
    "mxfp8": (MXFP8BlockScaling(), E8M0),
    "mxfp4": (MXFP4BlockScaling(), E8M0),
    "nvfp4": (NVFP4BlockScaling(two_level=False), E4M3),
}


def from_qwix(array: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor:
    """Convert a `qwix.QArray`: int8, int4, float8, nf4, mxfp8, mxfp4 or nvfp4, with scales of tiles within rows or columns.

    Codes of 4 bits are packed, in a copy. Tiles along the axis before the last give axis -2, as for a kernel (in, out) whose
    scales are per output.

    Raises DialectError for other types and tiles, and for scales that their codec does not have.

        >>> import qwix, jax.numpy as jnp
        >>> array = qwix.quantize(jnp.ones((4, 64)), "int8", channelwise_axes=[0])
        >>> st = breccia.bridges.from_qwix(array)
        >>> st.recipe.spec, st.scale.shape
        ('int8', (4, 1))
    """
    codes, scale, zero = buffer(array, "qvalue"), buffer(array, "scale"), attribute(array, "zero_point")
    kind = attribute(array, "qtype")
    kind = kind if isinstance(kind, str) else dtype_name(codes)
    shape = tuple(codes.shape)
    if zero is not None:
        raise DialectError(
            f"{title(array)} has a zero-point; asymmetric QArrays are not supported. Use mode without zero_point."
        )
    if len(shape) < 2 or len(scale.shape) != len(shape):
        raise DialectError(
            f"{title(array)} has shape {shape} and scales {tuple(scale.shape)}; pass a matrix or a stack of them."
        )
    if any(not n or not s or n % s for n, s in zip(shape, scale.shape, strict=True)):
        raise DialectError(
            f"{title(array)} of shape {shape} has scales of shape {tuple(scale.shape)}, which do not cut it into tiles.",
            found=tuple(scale.shape),
        )
    *lead, rows, columns = (n // s for n, s in zip(shape, scale.shape, strict=True))
    one_tile = (rows, columns) == shape[-2:] and shape[-2] > 1
    if any(n != 1 for n in lead) and not (one_tile and lead == list(shape[:-2])):
        raise DialectError(f"{title(array)} has scales {tuple(scale.shape)} that matrices of shape {shape} share.")
    axis = -1 if rows == 1 or one_tile or columns != 1 else -2
    across, along = (rows, columns) if axis == -1 else (columns, rows)
    inferred, element_scale = _recipe(array, kind, scale, across, along, shape[axis], one_tile)
    array_recipe = chosen(recipe, inferred, array)
    ops, element = ops_of(codes), array_recipe.format.element
    if element.bits == 4:
        words = ops.load(codes.astype("int8").astype("uint8")) if kind in ("int4", "nf4") else _fp4_words(codes)
        words = words & 15
        data = pack(ops, words, element) if axis == -1 else ops.swap(pack(ops, ops.swap(words), element))
    else:
        data = codes
    if element_scale is not None:
        scale = _coded(array, scale, element_scale)
    if one_tile:
        scale = scale.reshape(scale.shape[:-2] if any(n > 1 for n in scale.shape) else ())
    return wrapped(array, data, scale, array_recipe, layout=array_recipe.layout.oriented(axis), axis=axis, shape=shape)


def to_qwix(scaled: ScaledTensor, *, like: Any = None) -> Any:
    """Convert a tensor to a `qwix.QArray`, with its scales as floats: FP32 for block formats, else as they are.

    like: a QArray whose scale dtype to take over. Raises ImportError without qwix, DialectError for other formats.

        >>> import jax.numpy as jnp
        >>> array = breccia.bridges.to_qwix(breccia.cast(jnp.ones((4, 64)), "mxfp8"))
        >>> array.qtype, array.qvalue.shape, array.scale.shape
        ('mxfp8', (4, 64), (4, 2))
    """
    import jax.numpy as jnp
    import qwix  # pyright: ignore[reportMissingImports]

    check_scaled("to_qwix", scaled, "jax")
    scaled = scaled.to_plain()
    fmt, scale, ops = scaled.recipe.format, scaled.scale, ops_of(scaled.data)
    kind = next((name for name, (recipe, _) in _BLOCKS.items() if recipe.format == fmt), None)
    if kind is None and fmt.element is NF4:
        kind = "nf4"
    elif (
        kind is None
        and isinstance(scaled.recipe, IntegerRecipe)
        and fmt.element.bits in (4, 8)
        and scaled.zero_point is None
        and _is_signed(scaled)
    ):
        kind = f"int{fmt.element.bits}"
    elif kind is None and fmt.element.dtype in _FP8 and fmt.scale.codec.bits == 32:
        kind = fmt.element.dtype
    if kind is None or scaled.layout.partial:
        raise DialectError(
            f"qwix has int8, int4, float8, nf4, mxfp8, mxfp4 and nvfp4 in whole tiles; this tensor is {scaled!r}."
        )
    if fmt.element.bits == 4:
        turned = scaled.axis == -2
        words = unpack(ops, ops.swap(scaled.data) if turned else scaled.data, fmt.element, scaled.shape[scaled.axis])
        words = ops.swap(words) if turned else words
        if kind == "nf4":
            codes = words.astype(jnp.uint4)
        elif kind == "int4":
            codes = ((words ^ 8) - 8).astype(jnp.int4)
        else:
            codes = _fp4_codes(words)
    else:
        codes = scaled.data
    if kind in _BLOCKS:
        scale = ops.bitcast_to_float(_f32_words(ops, scale, fmt.scale.codec))
        scale = scale.astype(like.scale.dtype) if like is not None else scale
    elif not scale.shape:
        scale = scale.reshape((1,) * scaled.ndim)
    elif len(scale.shape) < scaled.ndim:
        scale = scale.reshape(*scale.shape, *(1 for _ in range(scaled.ndim - len(scale.shape))))
    qtype = jnp.dtype(kind) if kind not in (*_BLOCKS, "nf4") else kind
    return qwix.QArray(qvalue=codes, scale=scale, qtype=qtype)  # pyright: ignore[reportAttributeAccessIssue]


def _is_signed(scaled: ScaledTensor) -> bool:
    return bool(getattr(scaled.recipe, "signed", False))


def _recipe(
    array: Any, kind: str, scale: Array, across: int, along: int, length: int, one_tile: bool
) -> tuple[ScalingRecipe, Codec | None]:
    """The recipe of a QArray's type and tiles, and the codec that its scales are to be coded in."""
    dtype = FLOAT_NAMES.get(dtype_name(scale))
    if kind in _BLOCKS:
        recipe, codec = _BLOCKS[kind]
        if (across, along) != recipe.format.scale.block:
            raise DialectError(
                f"{title(array)} is {kind} in tiles of {across} x {along}; they are {recipe.format.scale.block}."
            )
        return recipe, codec
    if kind in _FP8 and dtype == "fp32":
        block = TENSOR if one_tile else (across, None if across == 1 and along == length else along)
        return float8_recipe(_FP8[kind], block), None
    if dtype is not None and across == 1 and not one_tile:
        if kind in ("int4", "int8"):
            return integer_recipe(int(kind[3:]), along, length, scale_dtype=dtype), None
        if kind == "nf4":
            return NF4Scaling(block_size=along, scale_dtype=dtype), None
    raise DialectError(
        f"{title(array)} is {kind} with scales in {dtype_name(scale)} of tiles {across} x {along}; recipes exist for "
        f"int8, int4 and "
        "nf4 by rows or groups of a row, float8 with FP32 scales, and MX and NVFP4.",
        found=kind,
    )


def _f32_words(ops: Any, scale: Array, codec: Codec) -> Array:
    return ops.take(codec.table, ops.load(scale))


def _coded(array: Any, scale: Array, codec: Codec) -> Array:
    """Float scales as codes of `codec`. Raises DialectError if one is not a number of it."""
    ops = ops_of(scale)
    words = ops.bitcast_to_int(ops.f32(scale))
    table = dict(zip((w - (1 << 32) if w >> 31 else w for w in codec.table), range(256), strict=True))
    host = ops.to_numpy(words)
    missing = [int(w) for w in set(host.reshape(-1).tolist()) if w not in table]
    if missing:
        raise DialectError(f"{title(array)} has scales that {codec.name} does not have; they are from another quantizer.")
    coded = codec.encode(ops, ops.f32(scale)) if codec is not E8M0 else (words >> 23) & 255
    return ops.store(coded, ops.storage(codec))


def _fp4_words(codes: Array) -> Array:
    """The bits of float4_e2m1fn codes as int32, by their values: XLA has no bitcast of one 4-bit float."""
    import jax.numpy as jnp

    x = codes.astype(jnp.float32)
    magnitude = jnp.abs(x)
    index = sum((magnitude >= level).astype(jnp.int32) for level in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    return index | (jnp.signbit(x).astype(jnp.int32) << 3)


def _fp4_codes(words: Array) -> Array:
    import jax.numpy as jnp

    values = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)[words & 7]
    return jnp.where(words & 8, -values, values).astype(jnp.float4_e2m1fn)
