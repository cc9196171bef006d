"""A cast calls the microkernels given to it, and still writes the bytes of the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from recipes import recipe_id

import breccia
from breccia.arrays.ops import NUMPY
from breccia.codecs import F32, Minifloat
from breccia.formats import Format, Level
from breccia.kernels import numpy as kernels
from breccia.kernels import reference
from breccia.kernels.numpy.codes import NEAREST, FloatCodes, IntegerCodes, Microkernels, ScaledCodes, TableCodes
from breccia.testing.examples import special_rows, wide

RECIPES = [
    breccia.Float8BlockScaling(block_k=32),
    breccia.MXFP8BlockScaling("E5M2"),
    breccia.MXFP6BlockScaling(),
    breccia.MXFP4BlockScaling(),
    breccia.NVFP4BlockScaling(),
]


class Planted:
    """NumPy versions of the microkernels that count their calls. `asked`: the kinds of codes for which one was requested."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.asked: list[type] = []
        self.microkernels = Microkernels(self.amax, self.pairs, self.scaled)

    def amax(self, source: Any, k: int, amax: Any) -> None:
        self.calls["amax"] += 1
        amax[:] = (source.view(np.uint32) & 0x7FFFFFFF).reshape(-1, k).max(1)

    def pairs(self, codes: Any, data: Any) -> None:
        self.calls["pairs"] += 1
        data.reshape(-1)[:] = codes[::2] | codes[1::2] << 4

    def scaled(self, writer: Any) -> ScaledCodes | None:
        self.asked.append(type(writer))
        if not isinstance(writer, FloatCodes):
            return None

        def write(source: Any, inverse: Any, k: int, codes: Any, dither: Any) -> None:
            assert dither == NEAREST
            self.calls["scaled"] += 1
            largest = np.float32(np.finfo(np.float32).max)
            with np.errstate(all="ignore"):
                y = np.clip(source.reshape(-1, k) * inverse[:, None], -largest, largest)
            y[inverse == 0] = 0
            codes[:] = writer.codec.encode(NUMPY, y).reshape(-1)

        return write


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_microkernels_of_a_plug_in_are_called_and_change_no_byte(recipe: breccia.ScalingRecipe) -> None:
    planted = Planted()
    for x in (wide((9, 2048), seed=1, exponents=3), special_rows(608)):
        found, expected = kernels.cast(x, recipe, microkernels=planted.microkernels), reference.cast(x, recipe)
        for part in ("data", "scale", "global_scale"):
            a, b = getattr(found, part), getattr(expected, part)
            assert (a is None) == (b is None) and (a is None or a.tobytes() == b.tobytes()), part
    wanted = {"amax", "scaled"} | ({"pairs"} if recipe.format.element.bits == 4 else set())
    assert set(planted.calls) == wanted


@dataclass(frozen=True)
class LowFloats(breccia.Float8BlockScaling):
    """A recipe whose codec has a bias as large as its largest exponent."""

    @cached_property
    def format(self) -> Format:
        low = Minifloat("E4M3 lowered", 8, None, "this test", 4, 3, 16, 0.875, nan=0x7F)
        return Format(low, (Level(F32, (1, 16)),))


def test_microkernels_are_requested_for_every_kind_of_codes() -> None:
    for recipe, form in (
        (breccia.MXFP6BlockScaling(), FloatCodes),
        (LowFloats(), FloatCodes),
        (breccia.NF4Scaling(), TableCodes),
        (breccia.INT4Scaling(), IntegerCodes),
    ):
        planted = Planted()
        x = wide((9, 2048), seed=2, exponents=3)
        assert (
            kernels.cast(x, recipe, microkernels=planted.microkernels).data.tobytes()
            == reference.cast(x, recipe).data.tobytes()
        )
        assert planted.asked == [form]
        assert planted.calls["amax"] > 0


def test_microkernels_write_signed_codes_into_one_row_of_unsigned_bytes() -> None:
    for recipe in (breccia.MXINT8BlockScaling(), breccia.INT8Scaling()):
        element = recipe.format.element
        rows: list[tuple[str, int, bool]] = []

        def write(source: Any, inverse: Any, k: int, codes: Any, dither: Any, element: Any = element, rows: Any = rows) -> None:
            rows.append((codes.dtype.name, codes.ndim, codes.flags.c_contiguous))
            codes[:] = element.encode(NUMPY, source.reshape(-1, k) * inverse[:, None]).reshape(-1)

        x = wide((9, 2048), seed=3, exponents=3)
        found = kernels.cast(x, recipe, microkernels=Microkernels(scaled=lambda _, write=write: write))
        assert set(rows) == {("uint8", 1, True)}
        assert found.data.dtype == np.int8
        assert found.data.tobytes() == reference.cast(x, recipe).data.tobytes()
