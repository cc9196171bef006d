"""MLX's quantized arrays: `uint32` words of codes, scales, and biases in mode "affine", as `mx.quantize` gives them.

The words, little-endian, are breccia's packed codes in the same order: for 4-bit codes the low nibble comes first. Source: the
documentation of `mlx.core.quantize`, and MLX 0.32.4 run on a CPU.
"""

from __future__ import annotations

from typing import Any

from breccia import DialectError, ScaledTensor, UnsupportedError
from breccia.backend import Array, dtype_name, framework_of
from breccia.internal import FLOAT_NAMES, check_scaled

from .dialects.mlx import MODES, fits, group_of, length_of, options_of, recipe_of
from .wrapping import attribute, buffer, title


def from_mlx(
    w: Array,
    scales: Array,
    biases: Array | None = None,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
) -> ScaledTensor:
    """Wrap the output of `mx.quantize`, or of an MLX checkpoint; zero-copy, and nothing is computed.

    w: uint32 words, (..., M, K * bits / 32). scales, biases: (..., M, K / group_size).
    group_size, bits, mode: as in `mx.quantize`, with its defaults, or from `quantization` in a checkpoint's config.json.

    Mode "affine" is `INT4Scaling` or `INT8Scaling` with a bias, and of 2, 3, 5 and 6 bits the recipe `mlx_affine`. A scale may
    then be negative; it decodes as it is.

    Raises DialectError for arrays that MLX does not produce, or that have no recipe (one bit).

        >>> import mlx.core as mx
        >>> w, scales, biases = mx.quantize(mx.ones((4, 64)), group_size=32, bits=4)
        >>> st = breccia.bridges.from_mlx(w, scales, biases, group_size=32, bits=4)
        >>> st.recipe.name, st.shape, st.scale.shape
        ('int4', (4, 64), (4, 2))
    """
    _need_mlx("from_mlx", w)
    dtype = dtype_name(scales)
    recipe = recipe_of(mode, group_size, bits, FLOAT_NAMES.get(dtype), dtype)
    if (biases is None) is (mode == "affine"):
        state = "has biases; got none" if biases is None else "has no biases; got some"
        raise DialectError(f"mode {mode!r} {state}.", mode=mode)
    wanted = "uint8" if mode in MODES else dtype
    dtypes = {"w": dtype_name(w), "scales": dtype, **({} if biases is None else {"biases": dtype_name(biases)})}
    if dtypes != dict.fromkeys(dtypes, wanted) | {"w": "uint32"}:
        raise DialectError(
            f"mode {mode!r} has w as uint32, and scales and biases of one dtype, {wanted}; got "
            f"{', '.join(f'{name} as {dtype}' for name, dtype in dtypes.items())}. Pass the arrays as MLX gave them.",
            found=dtypes,
        )
    if len(w.shape) < 2:
        raise DialectError(f"w is (..., M, K * bits / 32); got shape {tuple(w.shape)}.", found=tuple(w.shape))
    import mlx.core as mx

    shape, bits = tuple(w.shape), recipe.format.element.bits
    group = group_of(recipe)
    expected = (*shape[:-1], length_of(shape, recipe) // group)
    for name, part in (("scales", scales), ("biases", biases)):
        if part is not None and not fits(shape, tuple(part.shape), recipe):
            raise DialectError(
                f"{name} are (..., M, K / group_size), {expected} for w of shape {shape}, {bits} bits and groups of "
                f"{group}; got {tuple(part.shape)}. Give group_size=, bits= and mode= as mx.quantize had them.",
                expected=expected,
                found=tuple(part.shape),
            )
    return ScaledTensor(w.view(mx.uint8), scales, recipe, recipe.layout, biases)


def to_mlx(scaled: ScaledTensor) -> tuple[Array, Array, Array | None, dict[str, Any]]:
    """Convert a tensor to `(w, scales, biases, options)`, for `mx.dequantize(w, scales, biases, **options)` and the like.

    The arrays are views of the tensor's components, of the shapes that `from_mlx` takes. biases: None except in mode "affine".
    options: `group_size`, `bits` and `mode`.

    Given `dtype=mx.float32`, `mx.dequantize` decodes codes under FP32, E8M0 and E4M3 scales to the same numbers, with two
    exceptions: it reads an E8M0 scale of NaN as Inf, and products below 2^-126 in mode "affine" differ. With 16-bit scales it
    computes in 16 bits.

    Raises DialectError for a format that MLX has no mode for, blocks not along the last axis, or a partial last block.

        >>> import mlx.core as mx
        >>> st = breccia.cast(mx.ones((4, 64)), "mxfp8")
        >>> w, scales, biases, options = breccia.bridges.to_mlx(st)
        >>> options
        {'group_size': 32, 'bits': 8, 'mode': 'mxfp8'}
        >>> mx.dequantize(w, scales, biases, **options).shape
        (4, 64)
    """
    check_scaled("to_mlx", scaled, "mlx")
    scaled = scaled.to_plain()
    options = options_of(scaled.recipe.format)
    if options is None:
        raise DialectError(
            "MLX's modes are mxfp4, mxfp8, nvfp4 without a tensor scale, and affine: integers of 2 to 8 bits, but not 7, with "
            f"a bias, in groups of 32, 64 or 128. This tensor is {scaled.recipe!r}. Requantize it first, to "
            'breccia.MXFP8BlockScaling() or breccia.INT4Scaling(group_size=64, signed=False, symmetric=False, offset="bias").',
            recipe=scaled.recipe,
        )
    if scaled.axis != -1:
        raise DialectError(
            f"MLX has its groups along the last axis; this tensor along axis {scaled.axis}. Pass its .mT.", axis=scaled.axis
        )
    group = options["group_size"]
    if scaled.ndim < 2 or scaled.shape[-1] % group or scaled.layout.block() != (1, group):
        raise DialectError(
            f"MLX needs (..., M, K) with K a multiple of {group} and one scale per group; this tensor has shape "
            f"{scaled.shape} and {scaled.layout}. Cast it padded to a multiple of {group}.",
            shape=scaled.shape,
        )
    import mlx.core as mx

    return scaled.data.view(mx.uint32), scaled.scale, scaled.zero_point, options


def from_mlx_layer(layer: Any) -> ScaledTensor:
    """The weight of an `mlx.nn.QuantizedLinear` or `QuantizedEmbedding`: `from_mlx` of its arrays and attributes.

    Raises what `from_mlx` raises.

        >>> import mlx.nn as nn
        >>> layer = nn.QuantizedLinear(64, 32, group_size=32, bits=8, mode="mxfp8")
        >>> breccia.bridges.from_mlx_layer(layer).shape
        (32, 64)
    """
    options = {"group_size": attribute(layer, "group_size"), "bits": attribute(layer, "bits")}
    weight, scales = buffer(layer, "weight"), buffer(layer, "scales")
    try:
        return from_mlx(weight, scales, layer.get("biases"), mode=getattr(layer, "mode", "affine"), **options)
    except DialectError as e:
        raise DialectError(f"{e} The arrays are those of a {title(layer)}.", **e.found) from e


def to_mlx_layer(scaled: ScaledTensor, *, bias: Array | None = None) -> Any:
    """An `mlx.nn.QuantizedLinear` with this weight, shape (out, in), and that bias. Raises what `to_mlx` raises.

    >>> import mlx.core as mx
    >>> breccia.bridges.to_mlx_layer(breccia.cast(mx.ones((32, 64)), "mxfp8"))
    QuantizedLinear(input_dims=64, output_dims=32, bias=False, group_size=32, bits=8, mode=mxfp8)
    """
    import mlx.nn as nn

    w, scales, biases, options = to_mlx(scaled)
    if scaled.ndim != 2:
        raise DialectError(
            f"a linear layer has a matrix as its weight; this tensor has shape {scaled.shape}.", shape=scaled.shape
        )
    rows, columns = scaled.shape
    layer = nn.QuantizedLinear(columns, rows, bias is not None, **options)
    layer.weight, layer.scales = w, scales
    if biases is not None:
        layer.biases = biases
    if bias is not None:
        layer.bias = bias
    return layer


def _need_mlx(op: str, array: Any) -> None:
    framework = framework_of(array, "w").name
    if framework != "mlx":
        raise UnsupportedError(
            f"{op} takes MLX arrays, got {framework} arrays; convert a tensor by breccia.bridges.from_dlpack(scaled, 'mlx').",
            found=framework,
        )
