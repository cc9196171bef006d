"""What the three GEMMs of a layer in training multiply, cast by NumPy from the declaration in `TrainingRecipe.operands`."""

from __future__ import annotations

from typing import Any

import numpy as np

import breccia
from breccia import TrainingRecipe
from breccia.backend import ops_of, reference

PRESETS = ("fp8_current", "fp8_delayed", "fp8_row", "fp8_block", "fp8_tile", "mxfp8", "nvfp4")
_POWERS = "fp8_block,power_of_two_scale=true"
#: Recipes whose columns are cast from the codes of the rows.
FROM_CODES = (
    TrainingRecipe("mxfp8", gradient_rounding="stochastic", columns_from_codes=("input", "weight", "gradient")),
    TrainingRecipe(
        input=_POWERS,
        input_columns=f"{_POWERS},block_m=128",
        weight=f"{_POWERS},block_m=128",
        gradient=f"{_POWERS},fp8_format=E5M2",
        columns_from_codes=("input", "gradient"),
    ),
)
#: 2^32 * 7 + 5: both words of a seed count.
SEED = (7 << 32) + 5


def operands(
    recipe: TrainingRecipe, x: Any, w: Any, dy: Any, seed: int = SEED, scales: Any = None
) -> dict[str, tuple[Any, Any]]:
    """The (a, b) of each GEMM a @ b for x (M, K), w (N, K), dy (M, N). scales: supplied ones by tensor."""
    tensors = {"input": x, "weight": w, "gradient": dy}

    def made(of: Any) -> Any:
        a = breccia.dequantize(made(recipe.uses(of.tensor)[0])) if of.from_codes else tensors[of.tensor]
        if of.recipe is None:
            return a
        options: dict[str, Any] = {"rounding": "stochastic", "seed": seed} if of.rounding == "stochastic" else {}
        if scales and of.tensor in scales:
            options["scale"] = scales[of.tensor]
        if of.rotation is not None:
            a = reference.rotated(ops_of(a), np.asarray(a, np.float32), of.rotation, of.axis)
        return breccia.cast(a, of.recipe, axis=of.axis, **options)

    (x_rows, w_rows), (dy_rows, w_columns), (dy_columns, x_columns) = (
        tuple(map(made, recipe.operands[gemm])) for gemm in ("output", "grad_input", "grad_weight")
    )
    return {
        "output": (x_rows, w_rows.mT),
        "grad_input": (dy_rows, w_columns),
        "grad_weight": (dy_columns.mT, x_columns),
    }


def values(operand: Any) -> Any:
    """The values of an operand in FP64."""
    scaled = isinstance(operand, breccia.ScaledTensor)
    return np.asarray(breccia.dequantize(operand) if scaled else operand, np.float64)


def agrees(found: Any, a: Any, b: Any) -> bool:
    """Whether FP32 `found` is within the bound of the numerics contract, section 9, of the FP64 product of two operands.

    Sums of K products in FP32, in any order: gamma = K u / (1 - K u) of the sum of magnitudes, and K * 2^-126 for flushed ones.
    """
    a, b = values(a), values(b)
    u, k = 2.0**-24, a.shape[-1]
    bound = k * u / (1 - k * u) * (np.abs(a) @ np.abs(b)) + k * 2.0**-126
    # One more rounding of FP64: far below u.
    return bool((np.abs(np.asarray(found, np.float64) - a @ b) <= bound * (1 + 1e-6)).all())
