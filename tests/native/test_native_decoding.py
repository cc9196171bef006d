"""Compiled decoding of short blocks against the generic algorithm, on every instruction set."""

from collections.abc import Iterator

import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import Device
from breccia_native import availability

if reason := availability.missing(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import decoding

SETS = decoding.use()
#: Lengths of rows, each of which is a block: up to a vector and one more, and some longer ones.
LENGTHS = (*range(1, 18), 31, 33, 34, 100)
RECIPES = (
    *("int8", "int8,signed=false,symmetric=false", "mxint8", "fp8_row", "mxfp8", "mxfp6"),
    *("nvfp4", "mxfp4", "int4", "int4,signed=false,symmetric=false", "int4_bias", "nf4"),
)


@pytest.fixture(params=[SETS[0], *(pytest.param(name, marks=pytest.mark.long) for name in SETS[1:])])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of one instruction set."""
    decoding.use(request.param)
    yield request.param
    decoding.use(SETS[0])


def with_special_scales(st: breccia.ScaledTensor, made: np.random.Generator, often: float) -> breccia.ScaledTensor:
    """As many scales are 0, subnormal, very large, infinite or NaN."""
    scale = st.scale.copy()
    bits = scale.reshape(-1).view(f"u{scale.itemsize}")
    special = {
        1: (0, 1, 0x7E, 0x7F, 0xFF),
        2: (0, 1, 0x7BFF, 0x7C00, 0x7E00),
        4: (0, 1, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    }
    where = made.random(bits.shape) < often
    bits[where] = made.choice(np.array(special[scale.itemsize], bits.dtype), int(where.sum()))
    return breccia.ScaledTensor.from_parts(
        st.data, scale, st.recipe, st.layout, st.zero_point, st.global_scale, st.axis, st.padding
    )


@pytest.mark.parametrize("often", [0.0, 0.02], ids=["usual", "special"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_stacks_of_short_rows_and_columns_are_decoded_to_the_bits_of_the_generic_algorithm(
    recipe: str, dtype: str, often: float, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = np.random.default_rng(len(recipe))
    for length in LENGTHS:
        for shape, axis in (((29, 5, length), -1), ((29, length, 5), -2)):
            x = made.standard_normal(shape, np.float32)
            st = breccia.cast(x, recipe, axis=axis)
            st = with_special_scales(st, made, often) if often else st
            expected = np.ascontiguousarray(breccia.dequantize(st, out_dtype=dtype, prefer="reference.dequantize"))
            word = f"u{expected.itemsize}"
            for few in (0, 1 << 16):  # few codes have a kernel of their own
                monkeypatch.setattr("breccia.kernels.numpy.decoding._SHORT", few)
                found = np.ascontiguousarray(breccia.dequantize(st, out_dtype=dtype, prefer="native.dequantize"))
                equal = found.view(word) == expected.view(word)
                assert (equal | (np.isnan(found) & np.isnan(expected))).all(), (shape, axis, few)
