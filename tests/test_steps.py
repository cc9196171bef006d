"""Steps of a cast that somebody else does: they are called where they are given, and the bytes stay those of the oracle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from conftest import recipe_id, special_rows, wide

from breccia import (
    Float8BlockScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.kernels.numpy import FloatCodes, ScaledCodes, Steps
from breccia.ops import NUMPY

RECIPES = [
    Float8BlockScaling(block_k=32),
    MXFP8BlockScaling("E5M2"),
    MXFP6BlockScaling(),
    MXFP4BlockScaling(),
    NVFP4BlockScaling(),
]


class Planted:
    """Plain forms of the steps, which count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.steps = Steps(self.amax, self.pairs, self.scaled)

    def amax(self, source: Any, k: int, amax: Any) -> None:
        self.calls["amax"] += 1
        amax[:] = (source.view(np.uint32) & 0x7FFFFFFF).reshape(-1, k).max(1)

    def pairs(self, codes: Any, data: Any) -> None:
        self.calls["pairs"] += 1
        data.reshape(-1)[:] = codes[::2] | codes[1::2] << 4

    def scaled(self, writer: Any) -> ScaledCodes | None:
        if not isinstance(writer, FloatCodes):
            return None

        def write(source: Any, inverse: Any, k: int, codes: Any) -> None:
            self.calls["scaled"] += 1
            largest = np.float32(np.finfo(np.float32).max)
            with np.errstate(all="ignore"):
                y = np.clip(source.reshape(-1, k) * inverse[:, None], -largest, largest)
            y[inverse == 0] = 0
            codes[:] = writer.codec.encode(NUMPY, y).reshape(-1)

        return write


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_steps_of_somebody_else_are_called_and_change_no_byte(recipe: ScalingRecipe) -> None:
    planted = Planted()
    for x in (wide((9, 2048), seed=1, exponents=3), special_rows(608)):
        found, expected = kernels.cast(x, recipe, steps=planted.steps), reference.cast(x, recipe)
        for part in ("data", "scale", "global_scale"):
            a, b = getattr(found, part), getattr(expected, part)
            assert (a is None) == (b is None) and (a is None or a.tobytes() == b.tobytes()), part
    wanted = {"amax", "scaled"} | ({"pairs"} if recipe.format.element.bits == 4 else set())
    assert set(planted.calls) == wanted
