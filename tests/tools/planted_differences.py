"""Pairs of checkpoints with one planted difference each, by its cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import breccia
from breccia import PerGroupIndex, ScaledTensor
from breccia.backend import NUMPY, components, pack, unpack
from breccia.bridges import diff, save_safetensors
from breccia.internal import with_parts
from breccia_bridges.diff import TensorDifference

W = "layers.0.up.weight"


def weights(seed: int = 0, shape: tuple[int, ...] = (64, 256)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def changed(st: ScaledTensor, **parts: Any) -> ScaledTensor:
    return with_parts(st, components(st) | parts)


def recoded(st: ScaledTensor, change: Callable[[np.ndarray], np.ndarray]) -> ScaledTensor:
    codec = st.recipe.format.element
    codes = change(unpack(NUMPY, st.data, codec, st.shape[-1]))
    return changed(st, data=pack(NUMPY, codes, codec))


def as_recipe(st: ScaledTensor, recipe: breccia.ScalingRecipe, **parts: Any) -> ScaledTensor:
    return with_parts(st, components(st) | parts, recipe=recipe)


@dataclass
class Planted:
    """Two checkpoints, the cause of their difference, and what its sentence says. original: what both were quantized from."""

    a: dict[str, Any]
    b: dict[str, Any]
    cause: str
    why: str
    original: dict[str, Any] = field(default_factory=dict)

    def found(self, folder: Path, **options: Any) -> TensorDifference:
        for name in ("a", "b", "original"):
            if tensors := getattr(self, name):
                save_safetensors(tensors, folder / f"{name}.safetensors")
        original = folder / "original.safetensors" if self.original else None
        report = diff(folder / "a.safetensors", folder / "b.safetensors", original=original)
        return next(t for t in report.different)


def of(a: Any, b: Any, cause: str, why: str, original: Any = None) -> Planted:
    return Planted({W: a}, {W: b}, cause, why, {} if original is None else {W: original})


def _interleaved(codes: np.ndarray, n: int) -> np.ndarray:
    halves = codes.reshape(*codes.shape[:-1], -1, 2, n // 2)
    return np.swapaxes(halves, -1, -2).reshape(codes.shape)


def _tiles(codes: np.ndarray, n: int) -> np.ndarray:
    m, k = codes.shape
    return codes.reshape(m // n, n, k // n, n).transpose(0, 3, 2, 1).reshape(m, k)


def planted() -> dict[str, Planted]:
    x = weights()
    mxfp4, nvfp4, mxfp8 = (breccia.cast(x, name) for name in ("mxfp4", "nvfp4", "mxfp8"))
    int4 = breccia.cast(x, breccia.INT4Scaling(group_size=32))
    asymmetric = breccia.cast(x, breccia.INT4Scaling(group_size=32, signed=False, symmetric=False))
    biased = breccia.cast(x, breccia.INT4Scaling(group_size=32, signed=False, symmetric=False, offset="bias"))
    block = breccia.cast(x, breccia.Float8BlockScaling(block_k=16, block_m=16))
    tensor = breccia.cast(x, "fp8_current")
    square = breccia.cast(weights(shape=(128, 128)), breccia.Float8BlockScaling(block_k=32, block_m=32))
    wide = breccia.cast(weights(shape=(128, 128)), "mxfp8")
    swizzled = wide.to_storage("swizzle_128x4").scale.reshape(wide.scale.shape)
    divisor = breccia.NVFP4BlockScaling(global_sense="divisor")
    ordered = tuple(k // 32 for k in range(256))
    index = np.random.default_rng(1).permutation(ordered)
    by_index = with_parts(int4, components(int4), layout=PerGroupIndex(tuple(int(i) for i in index), 8))
    bf16 = x.astype(ml_dtypes.bfloat16)
    cut = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(ml_dtypes.bfloat16)
    order = np.random.default_rng(2).permutation(64)
    columns = np.random.default_rng(2).permutation(256)
    experts = weights(shape=(4, 8, 64))
    towards = recoded_toward_zero(x, mxfp8)
    norm = (1 + 0.1 * weights(3, (64,))).astype(np.float32)
    one = np.float32(1)
    return {
        "nibbles": of(
            mxfp4,
            recoded(mxfp4, lambda c: c.reshape(64, -1, 2)[..., ::-1].reshape(c.shape)),
            "nibble_order",
            "The codes of 4 bits within each byte are in reverse.",
        ),
        "codes of 2 bits": of(
            two := breccia.cast(x, breccia.INTScaling(bits=2)),
            recoded(two, lambda c: c.reshape(64, -1, 4)[..., ::-1].reshape(c.shape)),
            "nibble_order",
            "The codes of 2 bits within each byte are in reverse.",
        ),
        "AWQ's order": of(
            int4,
            recoded(int4, lambda c: c.reshape(64, -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(c.shape)),
            "code_order",
            "The codes are packed in another order: in B, each 8 columns are in the order 0, 2, 4, 6, 1, 3, 5, 7.",
        ),
        "halves": of(
            mxfp4,
            recoded(mxfp4, lambda c: _interleaved(c, 32)),
            "code_order",
            "The codes are packed in another order: in B, each 32 columns have their halves interleaved.",
        ),
        "offset": of(int4, recoded(int4, lambda c: c ^ 8), "code_offset", "The codes of B are those of A with an offset of 8."),
        "codec": of(
            tensor,
            as_recipe(tensor, breccia.Float8CurrentScaling("E5M2")),
            "element_codec",
            "The bytes are equal; A reads codes as E4M3, B as E5M2.",
        ),
        "order of multiplications": of(
            nvfp4,
            as_recipe(nvfp4, breccia.NVFP4BlockScaling(order="scales_first")),
            "multiplication_order",
            "The bytes are equal; A multiplies codes first, B scales first.",
        ),
        "tiles": of(
            square,
            recoded(square, lambda c: _tiles(c, 32)),
            "tiles_transposed",
            "The codes of each block of 32x32 are transposed.",
        ),
        "scales by columns": of(
            block,
            changed(block, scale=block.scale.T.reshape(block.scale.shape)),
            "scale_order",
            "The scales of B are those of A, transposed: by columns where the other has them by rows.",
        ),
        "scales and zero-points by columns": of(
            asymmetric,
            changed(
                asymmetric,
                scale=asymmetric.scale.T.reshape(64, 8),
                zero_point=np.ascontiguousarray(asymmetric.zero_point.T).reshape(64, 8),
            ),
            "scale_order",
            "The scales of B are those of A, transposed: by columns where the other has them by rows.",
        ),
        "swizzled scales": of(
            wide,
            changed(wide, scale=swizzled),
            "scale_order",
            "The scales of B are those of A, swizzled: in the order of cuBLAS's tiles of 128x4.",
        ),
        "no global scale": of(
            nvfp4,
            as_recipe(nvfp4, breccia.NVFP4BlockScaling(two_level=False), global_scale=None),
            "scale_missing",
            "B has the values of A without its global scale.",
        ),
        "no scales": of(
            block, changed(block, scale=np.ones_like(block.scale)), "scale_missing", "B has the values of A without its scales."
        ),
        "plain codes": of(
            tensor,
            tensor.data.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
            "scale_missing",
            "B has the values of A without its scales.",
        ),
        "no scale of either level": of(
            nvfp4,
            breccia.dequantize(changed(nvfp4, scale=np.full_like(nvfp4.scale, 0x38), global_scale=one * np.ones((), "f4"))),
            "scale_missing",
            "B has the values of A without its scales and its global scale.",
        ),
        "no zero-points": of(
            asymmetric,
            changed(asymmetric, zero_point=np.zeros_like(asymmetric.zero_point)),
            "scale_missing",
            "B has the values of A without its zero-points.",
        ),
        "no biases": of(
            biased,
            changed(biased, zero_point=np.zeros_like(biased.zero_point)),
            "scale_missing",
            "B has the values of A without its biases.",
        ),
        "GPTQ's first zero-points": of(
            asymmetric,
            changed(asymmetric, zero_point=(asymmetric.zero_point - np.uint8(1)) & np.uint8(15)),
            "zero_point_shift",
            "The zero-points of B are those of A less by one.",
        ),
        "group index": of(by_index, int4, "group_index", "B has the groups of A in order, and ignores their index."),
        "convention, same number": of(
            nvfp4,
            as_recipe(nvfp4, divisor),
            "scale_convention",
            "B stores the global scale as a divisor, A as a multiplier: the same number.",
        ),
        "convention, converted": of(
            nvfp4,
            as_recipe(nvfp4, divisor, global_scale=one / nvfp4.global_scale),
            "scale_convention",
            "B stores the global scale as a divisor, A as a multiplier: converted, and rounded.",
        ),
        "reciprocal scales": of(
            block,
            changed(block, scale=one / block.scale),
            "scale_convention",
            "B stores the scales as the reciprocal of what A stores; both are read alike.",
        ),
        "amax": of(
            nvfp4,
            changed(nvfp4, global_scale=nvfp4.global_scale * np.float32(2688)),
            "scale_convention",
            "B stores the global scale as 2688 (largest magnitude at scale 1) times what A stores; both are read alike.",
        ),
        "BF16 scales": of(
            int4,
            as_recipe(
                int4,
                breccia.INT4Scaling(group_size=32, scale_dtype="bf16"),
                scale=int4.scale.astype(ml_dtypes.bfloat16).view(np.uint16),
            ),
            "scale_dtype",
            "B has the scales of A rounded to BF16.",
        ),
        "scales that were BF16": of(
            block,
            changed(block, scale=block.scale.astype(ml_dtypes.bfloat16).astype(np.float32)),
            "scale_dtype",
            "B has the scales of A rounded to BF16.",
        ),
        "another layer": Planted(
            {f"layers.{n}.up.weight": weights(n) for n in (0, 3, 5)},
            {f"layers.{n}.up.weight": weights(5 if n == 3 else n) for n in (0, 3, 5)},
            "other_tensor",
            "B has here what A has as layers.5.up.weight.",
        ),
        "transpose": of(x, x.T.copy(), "transposed", "B is the transpose of A."),
        "transpose of a square": of(s := weights(shape=(64, 64)), s.T.copy(), "transposed", "B is the transpose of A."),
        "norm less by one": of(norm, norm - one, "plus_one", "A is B plus 1."),
        "rounded": of(x, bf16, "rounded", "B is A rounded to BF16."),
        "cut": of(x, cut, "rounded", "B is A cut to BF16, toward zero."),
        "through FP16": of(x, x.astype(np.float16).astype(np.float32), "rounded", "B is A rounded to F16."),
        "factor": of(x, x * np.float32(0.3), "factor", "B is A times 0.300000012."),
        "zeros": of(x, x * 0, "factor", "B is A times 0."),
        "rows": of(x, x[order], "permuted", f"64 of 64 rows are in another place: row 0 of B is row {order[0]} of A."),
        "columns": of(
            x,
            x[:, columns],
            "permuted",
            f"{(columns != np.arange(256)).sum()} of 256 columns are in another place: column 0 of B is column "
            f"{columns[0]} of A.",
        ),
        "rows of codes": of(
            mxfp4,
            mxfp4.select(0, [1, 0, *range(2, 64)]),
            "permuted",
            "2 of 64 rows are in another place: row 0 of B is row 1 of A.",
        ),
        "experts": of(
            experts, experts[[0, 1, 3, 2]], "permuted", "16 of 32 rows are in another place: row 16 of B is row 24 of A."
        ),
        "elements": of(
            norm, norm[::-1].copy(), "permuted", "64 of 64 elements are in another place: element 0 of B is element 63 of A."
        ),
        "rounding": of(
            mxfp8,
            towards,
            "rounding",
            "The scales are equal; codes are rounded to nearest, ties to even in A, toward zero in B.",
            x,
        ),
        "stochastic rounding": of(
            mxfp8,
            breccia.cast(x, "mxfp8", rounding="stochastic", seed=0),
            "rounding",
            "The scales are equal; codes are rounded to nearest, ties to even in A, up or down to the next code in B.",
            x,
        ),
        "scale rule": of(
            mxfp4,
            as_recipe(breccia.cast(x, "mxfp4,scale_rule=floor"), breccia.MXFP4BlockScaling()),
            "scale_rule",
            "The scales follow another rule: of the original's values, A is mxfp4 and B is mxfp4,scale_rule=floor.",
            x,
        ),
        "scale rule of the other side": of(
            mxfp8,
            as_recipe(breccia.cast(breccia.dequantize(mxfp8), "mxfp8,scale_rule=floor"), breccia.MXFP8BlockScaling()),
            "scale_rule",
            "The scales follow another rule: B is mxfp8,scale_rule=floor of the values of A.",
        ),
        "recipe": of(nvfp4, mxfp4, "recipe", "The recipes differ: of the original's values, A is nvfp4 and B is mxfp4.", x),
        "quantized": of(
            x,
            breccia.cast(x, "fp8_row,scale_rule=te"),
            "quantized",
            "B is A quantized, as a cast to fp8_row,scale_rule=te.",
        ),
        "quantized again": of(
            nvfp4, breccia.cast(breccia.dequantize(nvfp4), "int8"), "quantized", "B is A quantized, as a cast to int8."
        ),
        "quantized under chosen scales": of(
            x,
            breccia.cast(x, "fp8_current", scale=np.float32(0.0123)),
            "quantized",
            "B is A quantized, to fp8_current under scales of its own, rounded to nearest, ties to even.",
        ),
    }


def recoded_toward_zero(x: np.ndarray, st: ScaledTensor) -> ScaledTensor:
    """The codes of E4M3 next to zero: those whose magnitude is larger than the number's are less by one."""
    too_far = np.abs(breccia.dequantize(st)) > np.abs(x)
    return changed(st, data=np.where(too_far, st.data - np.uint8(1), st.data))


def spoiled(x: Any) -> Any:
    """A tensor with one value changed: the last one."""
    if isinstance(x, ScaledTensor):
        data = x.data.copy()
        data[-1, -1] ^= 0x21
        return changed(x, data=data)
    x = x.copy()
    x.reshape(-1)[-1] = 7
    return x


PLANTED = planted()
