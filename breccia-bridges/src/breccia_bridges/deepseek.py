"""DeepSeek-V3 buffers: E4M3 codes and the FP32 `weight_scale_inv`, which multiplies in spite of its name.

Activations have one scale per 1 x 128 elements, weights one per 128 x 128 tile, partial at the edges (576 x 7168 has 5 x 56).
Source: DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2, and `weight_dequant` of its inference code.
"""

from __future__ import annotations

from typing import Any

from breccia import DialectError, Float8BlockScaling, ScaledTensor
from breccia.backend import E8M0, Array, Shape, dtype_name, ops_of

#: Rows of a scale tile of the checkpoints' weights.
TILE_M = 128


class NotBlocksError(DialectError, NotImplementedError):
    """The tensor's recipe is not block-scaled FP8. Programs for breccia 0.1 catch NotImplementedError."""


def from_deepseek_v3(
    data: Array, scale: Array, *, block_k: int = 128, fp8_format: str = "E4M3", block_m: int | None = None
) -> ScaledTensor:
    """Wrap FP8 codes and their `weight_scale_inv`; zero-copy.

    data: (..., M, K) codes, uint8 or the framework's float8 dtype.
    scale: FP32, (..., M, ceil(K / block_k)) for scales per row, (..., ceil(M / 128), ceil(K / block_k)) for scales per tile.
        Power-of-two scales in E8M0 (uint8 or float8_e8m0fnu, "ue8m0" in V3.1) are converted to FP32, exactly, in a
        new array.
    block_m: rows per scale; inferred from the scale's shape by default. Where both forms fit (M <= 1, where they are
        equivalent) it is 1. Pass 1 or 128 to require that form.

    Raises DialectError for buffers that do not follow this convention.

        >>> weight = np.full((256, 128), 0x38, np.uint8)  # 1.0 in E4M3
        >>> weight_scale_inv = np.array([[0.5], [2.0]], np.float32)  # of 128 rows each
        >>> st = breccia.bridges.from_deepseek_v3(weight, weight_scale_inv)
        >>> breccia.dequantize(st)[[0, 255], 0]
        array([0.5, 2. ], dtype=float32)
    """
    shape = tuple(data.shape)
    if len(shape) < 2:
        raise DialectError(f"DeepSeek-V3 data is (..., M, K); got shape {shape}. Reshape a vector to (1, K).", shape=shape)
    recipes = [Float8BlockScaling(fp8_format, block_k, rows) for rows in ((1, TILE_M) if block_m is None else (block_m,))]
    _check_codes(data, recipes[0])
    layouts = [recipe.layout.fitted(shape) for recipe in recipes]
    expected = [layout.scale_shapes(shape)[0] for layout in layouts]
    scale_shape = tuple(scale.shape)
    if scale_shape not in expected:
        forms = " or ".join(f"{e} (one per {r.block_m} x {block_k})" for e, r in zip(expected, recipes, strict=True))
        raise DialectError(
            f"data of shape {shape} needs scales of shape {forms}; got {scale_shape}. Give block_m= and block_k= as in the "
            "checkpoint's weight_block_size, and the tensor unsharded, not transposed.",
            expected=tuple(expected),
            found=scale_shape,
        )
    which = expected.index(scale_shape)
    recipe, layout = recipes[which], layouts[which]
    match dtype_name(scale):
        case "float32":
            return ScaledTensor(data, scale, recipe, layout)
        case "uint8" | "float8_e8m0fnu":
            recipe = Float8BlockScaling(fp8_format, block_k, recipe.block_m, power_of_two_scale=True)
            return ScaledTensor(data, E8M0.read(ops_of(scale, "scale"), scale), recipe, layout)
        case other:
            raise DialectError(
                f"weight_scale_inv is float32, or E8M0 as uint8 or float8_e8m0fnu; got {other}. Scales of another dtype have "
                "been rounded: load the checkpoint without a torch_dtype.",
                found=other,
            )


def to_deepseek_v3(scaled: ScaledTensor) -> tuple[Any, Any]:
    """`(data, scale)` of a block-scaled FP8 tensor, for `weight` and `weight_scale_inv`; zero-copy.

    Raises DialectError for any other recipe (a NotImplementedError, too), for blocks not along the last axis, and for scales
    that are not FP32.

        >>> st = breccia.cast(np.ones((256, 512), np.float32), "fp8_block,block_m=128")
        >>> weight, weight_scale_inv = breccia.bridges.to_deepseek_v3(st)
        >>> weight.shape, weight_scale_inv.shape  # one scale for 128 x 128 codes
        ((256, 512), (2, 4))
    """
    target = "breccia.Float8BlockScaling(block_m=128)"
    if not isinstance(scaled.recipe, Float8BlockScaling):
        raise NotBlocksError(
            f"DeepSeek-V3 stores tensors of recipe 'fp8_block'; this one is {scaled.recipe.name!r}. Convert it first: "
            f"breccia.requantize(scaled, {target}) for a weight, block_m=1 for activations.",
            recipe=scaled.recipe,
        )
    scaled = scaled.to_plain()
    if scaled.axis != -1:
        raise DialectError(
            f"DeepSeek-V3 has its blocks along the last axis; this tensor along axis {scaled.axis}. Pass its .mT.",
            axis=scaled.axis,
        )
    expected: Shape = scaled.recipe.layout.fitted(scaled.shape).scale_shapes(scaled.shape)[0]
    dtype = dtype_name(scaled.scale)
    if scaled.zero_point is not None or dtype != "float32" or tuple(scaled.scale.shape) != expected:
        extra = "" if scaled.zero_point is None else " and a zero-point"
        raise DialectError(
            f"DeepSeek-V3 has float32 scales of shape {expected} and no zero-point for this tensor; it has {dtype} scales of "
            f"shape {tuple(scaled.scale.shape)}{extra}. Quantize its values again: "
            f"breccia.cast(breccia.dequantize(scaled), {target}).",
            found=dtype,
        )
    return scaled.data, scaled.scale


def _check_codes(data: Array, recipe: Float8BlockScaling) -> None:
    element = recipe.format.element
    dtype = dtype_name(data)
    if dtype not in ("uint8", element.dtype):
        raise DialectError(
            f"fp8_format={recipe.fp8_format!r} means codes in uint8 or {element.dtype}; got {dtype}. Codes of another dtype "
            "decode to other values: pass their fp8_format, or quantize values with breccia.cast.",
            found=dtype,
        )
