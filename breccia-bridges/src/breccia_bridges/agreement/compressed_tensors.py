"""compressed-tensors: its qparams, quantize and dequantize under the schemes it names."""

# Other libraries may be absent, and declare few types.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from breccia import (
    Codec,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.backend import E2M1, E2M3, E4M3, E8M0, INT4, INT8, NUMPY, UINT4

from . import DIVIDED, Library, Quantizer, Setting, Written, installed, packed


def _scheme(name: str, element: Codec) -> Callable[[np.ndarray], Written]:
    def write(x: np.ndarray) -> Written:
        import torch
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args: Any = preset_name_to_scheme(name, ["Linear"]).weights
        w = torch.from_numpy(x)
        blocks = _blocks(w, args)
        global_scale = generate_gparam(w.amin(), w.amax()) if element == E2M1 and args.group_size == 16 else None
        scale, offset = calculate_qparams(blocks.amin((-2, -1)), blocks.amax((-2, -1)), args, global_scale=global_scale)
        if args.strategy == "tensor":
            scale, offset = scale.reshape(1), offset.reshape(1)
        stored = torch.int8 if args.type == "int" else None  # as in its compressors: integers have no −0
        q = quantize(w, scale, offset, args, dtype=stored, global_scale=global_scale)
        decoded = dequantize(q, scale, offset, args, dtype=torch.float32, global_scale=global_scale)
        return _written(args, element, q.numpy(), scale, offset, decoded.numpy())

    return write


def _blocks(w: Any, args: Any) -> Any:
    """The matrix as (rows of blocks, columns of blocks, m, k)."""
    rows, columns = w.shape
    m, k = args.block_structure or {"tensor": (rows, columns), "channel": (1, columns)}.get(args.strategy, (1, args.group_size))
    return w.reshape(rows // m, m, columns // k, k).transpose(1, 2)


def _written(args: Any, element: Codec, values: np.ndarray, scale: Any, offset: Any, decoded: np.ndarray) -> Written:
    """Encode values on the element's grid, and E8M0 and E4M3 scales, which the library keeps as floats."""
    zero_point = None
    if element in (INT4, INT8, UINT4):
        codes = values.astype(np.int32)
        if not args.symmetric:  # they start at -8, breccia's at 0
            codes, zero_point = codes + 8, (offset.to(int).numpy() + 8).astype(np.uint8)
    else:
        codes = element.encode(NUMPY, values)
    stored = scale.numpy()
    if args.strategy == "tensor":
        stored = stored.reshape(())
    if args.scale_dtype is not None:
        stored = (E4M3 if args.group_size == 16 else E8M0).encode(NUMPY, stored).astype(np.uint8)
    return Written(packed(codes, element), decoded, stored, zero_point=zero_point)


_EVEN = "amax is rounded to the element's mantissa bits before its exponent is taken."
_HALF = "The scale is amax over half the width of the codes' range, {}; breccia's is amax / {}."
_NO_NAME = "Codes are x / scale; breccia's under this rule are x times its reciprocal."
_NVFP4 = (
    "With G = 2688 / amax of the tensor, block scales are G · (amax / 6), codes x / (s / G) and values q · (s / G); breccia's "
    "come from g = amax / 2688: (amax / 6) / g, x · (1 / (s · g)), (q · s) · g. A block scale that underflows to 0 is 0.125."
)
_INT4 = partial(INT4Scaling, scale_dtype="fp32")


def _divided(name: str, recipe: Callable[..., ScalingRecipe]) -> Quantizer:
    return Quantizer(name, _scheme(name, E4M3), Setting(recipe(), DIVIDED), Setting(recipe(scale_rule="divide")))


def _even(name: str, element: Codec, recipe: Callable[..., ScalingRecipe]) -> Quantizer:
    return Quantizer(name, _scheme(name, element), Setting(recipe(), _EVEN), Setting(recipe(scale_rule="even")))


def _half_range(name: str, element: Codec, recipe: Callable[..., ScalingRecipe]) -> Quantizer:
    cause = _HALF.format(element.max + 0.5, f"{element.max:g}")
    return Quantizer(name, _scheme(name, element), Setting(recipe(), cause), Setting(recipe(scale_rule="half_range"), _NO_NAME))


LIBRARIES = (
    Library(
        "compressed-tensors",
        installed("compressed-tensors"),
        (
            _divided("FP8", Float8CurrentScaling),
            _divided("FP8_DYNAMIC", Float8RowScaling),
            _divided("FP8_BLOCK", partial(Float8BlockScaling, block_m=128)),
            Quantizer(
                "MXFP8A16",
                _scheme("MXFP8A16", E4M3),
                Setting(
                    MXFP8BlockScaling(),
                    "amax is rounded to one mantissa bit, as for FP4, before its exponent is taken: an amax of 448 · 2^k gets "
                    "twice breccia's scale; all others agree.",
                ),
            ),
            _even("MXFP6A16", E2M3, MXFP6BlockScaling),
            _even("MXFP4A16", E2M1, MXFP4BlockScaling),
            Quantizer(
                "NVFP4A16",
                _scheme("NVFP4A16", E2M1),
                Setting(
                    NVFP4BlockScaling(),
                    _NVFP4,
                ),
            ),
            _half_range("W4A16", INT4, _INT4),
            Quantizer(
                "W4A16_ASYM",
                _scheme("W4A16_ASYM", UINT4),
                Setting(
                    _INT4(signed=False, symmetric=False),
                    "x / scale + zero-point is rounded, while breccia rounds x / scale, then adds: ties differ.",
                ),
            ),
            _half_range("W8A16", INT8, partial(INT8Scaling, 128)),
            _half_range("W8A8", INT8, INT8Scaling),
        ),
    ),
)
