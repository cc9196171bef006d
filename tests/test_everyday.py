"""What a user of NumPy, torch or JAX expects of a tensor: rows, names of recipes and dtypes, attributes, printed forms."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import RECIPES, recipe_id, wide
from test_structure import FRAMEWORKS, moved, same_bits, sound, values

import breccia
from breccia import (
    Float8BlockScaling,
    Float8CurrentScaling,
    INT4Scaling,
    LayoutError,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerChannel,
    PerGroupIndex,
    ScaledTensor,
    ScalingRecipe,
)

#: One recipe for each way components are stored, whose blocks are one row high.
ROWS = [r for r in {(r.format, r.layout): r for r in reversed(RECIPES)}.values() if r.format.scale.block[0] in (1, None)]

# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.covering(1)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("recipe", ROWS, ids=recipe_id)
def test_an_integer_takes_a_row(recipe: ScalingRecipe, framework: str, axis: int) -> None:
    x = wide((3, 77), seed=1, exponents=3)
    st = moved(breccia.cast(x if axis == -1 else np.ascontiguousarray(x.T), recipe, axis=axis), framework)
    expected = values(st)
    for i in (0, -1):
        row, wanted = (st[i], expected[i]) if axis == -1 else (st[:, i], expected[:, i])
        assert (sound(row).shape, row.axis, row.framework) == ((77,), -1, framework)
        assert same_bits(values(row), np.ascontiguousarray(wanted))
        assert breccia.bytes_equal(pickle.loads(pickle.dumps(row)), row)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling()], ids=recipe_id)
def test_iteration_gives_as_many_rows_as_len(recipe: ScalingRecipe) -> None:
    st = breccia.cast(wide((4, 48), seed=2), recipe)
    rows = list(st)
    assert len(rows) == len(st) == 4
    assert all(same_bits(values(row), values(st)[n]) for n, row in enumerate(rows))
    assert same_bits(values(st.select(-2, 3)), values(st)[3])


def test_a_row_is_an_ordinary_tensor(tmp_path: Path) -> None:
    st = breccia.cast(wide((4, 77), seed=3), NVFP4BlockScaling())
    row = st[1]
    matrix = row.reshape(1, 77)
    assert breccia.bytes_equal(sound(matrix), st[1:2]) and breccia.bytes_equal(matrix[0], row)
    assert breccia.bytes_equal(breccia.concat(row.split(32)), row) and len(row.digest()) == 64
    assert same_bits(values(row[32:64]), values(row)[32:64])
    fp8 = Float8BlockScaling(block_k=16)
    assert breccia.bytes_equal(sound(breccia.requantize(row, fp8)), breccia.requantize(matrix, fp8)[0])
    half, out = np.empty(77, np.float16), np.empty(77, np.float32)
    assert breccia.dequantize(row, out_dtype="float16", out=half) is half and breccia.dequantize(row, out=out) is out
    assert same_bits(out, values(row)) and same_bits(half, values(row).astype(np.float16))
    with pytest.raises(breccia.ShapeError, match=r"out= must have shape \(77,\)"):
        breccia.dequantize(row, out=np.empty((1, 77), np.float32))
    with pytest.raises(breccia.ShapeError, match="at least two axes"):
        breccia.matmul(row, st.mT)
    breccia.bridges.save_safetensors({"row": row}, tmp_path / "w.safetensors")
    assert breccia.bytes_equal(breccia.bridges.load_safetensors(tmp_path / "w.safetensors")["row"], row)


def test_a_row_of_a_tensor_in_a_storage_is_the_plain_one() -> None:
    st = breccia.cast(wide((4, 64), seed=4), MXFP8BlockScaling())
    assert breccia.bytes_equal(st.to_storage("swizzle_128x4")[2], st[2])
    with pytest.raises(breccia.BrecciaError, match="storage 'swizzle_128x4'"):
        st[2].to_storage("swizzle_128x4")


def test_a_row_keeps_its_scale_where_scales_have_their_short_form_or_an_index() -> None:
    data = np.arange(64, dtype=np.uint8).reshape(2, 4, 8)
    flat = breccia.from_buffer(data, np.array([1, 2, 3, 4], np.float32), Float8BlockScaling(), PerChannel())
    assert sound(flat[1, 2]).scale.tolist() == [3.0] and sound(flat[:, 2]).scale.tolist() == [[3.0], [3.0]]
    for index in ((1, 2), (slice(None), 2), (slice(1, None), -1)):
        assert same_bits(values(flat[index]), values(flat)[index])
    recipe = INT4Scaling(group_size=4, scale_dtype="fp32")
    st = ScaledTensor(data[0], np.arange(1, 9, dtype="f4").reshape(4, 2), recipe, PerGroupIndex([0, 1] * 8, 2))
    assert same_bits(values(sound(st[3])), values(st)[3])


def test_a_row_of_tiles_of_several_rows_is_refused_with_a_remedy() -> None:
    st = breccia.cast(wide((4, 64), seed=5), Float8BlockScaling(block_k=32, block_m=2))
    message = r"axis -2 of shape \(4, 64\) cannot be dropped: .* Keep it: st\[..., i:i\+2, :\], i a multiple of 2; or dequ"
    with pytest.raises(LayoutError, match=message):
        st[0]
    with pytest.raises(LayoutError, match="cannot be dropped"):
        list(st)
    assert same_bits(values(st[2:4]), values(st)[2:4])
    experts = breccia.cast(wide((2, 4, 48), seed=6), MXFP8BlockScaling())
    assert sound(experts[:, 2]).shape == (2, 48) and same_bits(values(experts[:, 2]), values(experts)[:, 2])
    scaled = breccia.stack([breccia.cast(wide((3, 32), seed=s), NVFP4BlockScaling()) for s in (6, 7)])
    with pytest.raises(LayoutError, match="axis -2 .* cannot be dropped"):  # each matrix has its own global scale
        scaled[:, 1]
    assert sound(scaled[1, 1]).shape == (32,)


def test_a_traced_tensor_gives_its_rows() -> None:
    jax = pytest.importorskip("jax")
    x = wide((3, 64), seed=8)
    row = jax.jit(lambda x: breccia.dequantize(breccia.cast(x, NVFP4BlockScaling())[1]))(x)
    assert same_bits(np.asarray(row), values(breccia.cast(x, NVFP4BlockScaling()))[1])
