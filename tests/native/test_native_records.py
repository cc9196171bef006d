"""Compiled products of weights whose scales are codes under a float, as in GGUF's super-blocks, by every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_weights import check_bound
from records import LONG, OTHERS, READ, coded
from weights import replaced

import breccia
from breccia import GGUFScaling
from breccia.arrays.frameworks import Device
from breccia_native import availability

if reason := availability.missing_products(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import facts, products
from breccia_native import matmul as native
from breccia_native.weights import weight_of

#: Formats whose records products read.
FORMATS = READ | LONG
KINDS = {name: number for number, name in enumerate(products.kinds())}
#: K around super-blocks, blocks and vectors; N around 4 rows and 32.
SHAPES = ((1, 32), (5, 127), (31, 256), (33, 576), (6, 640), (3, 1021), (70, 320))
ROWS = (1, 2, 3, 4, 7, 17, 33)


def multiplied(x: np.ndarray, st: breccia.ScaledTensor) -> np.ndarray:
    found = native._of_rows(x, st)
    assert found is not None, "beyond the limits of the kernel"
    return found


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("name", FORMATS)
def test_products_under_records_are_within_the_bound(instruction_set: str, name: str) -> None:
    for seed, shape in enumerate(SHAPES):
        st = coded(FORMATS[name], shape, seed, False)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        for m in ROWS:
            x = np.random.default_rng(m).standard_normal((m, shape[1])).astype(np.float32)
            x[:, 0] = 4096
            check_bound(multiplied(x, st), x, w)


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_values_of_dequantize(instruction_set: str, name: str) -> None:
    """Rows of the identity pick out values, each by one product that is exact."""
    k = 320
    st = coded(FORMATS[name], (6, k), 0, False)
    values = breccia.dequantize(st, prefer="reference.dequantize")
    for rows in (1, 2, 4, 20):
        for start in range(0, k, rows):
            x = np.zeros((min(rows, k - start), k), np.float32)
            x[np.arange(len(x)), start + np.arange(len(x))] = 1
            np.testing.assert_array_equal(multiplied(x, st), values[:, start : start + len(x)].T)


def test_views_and_batches_are_multiplied() -> None:
    rng = np.random.default_rng(0)
    for name in ("Q4_K", "Q6_K"):
        w = rng.standard_normal((3, 40, 576)).astype(np.float32)
        st = breccia.cast(w, GGUFScaling(type=name))
        x, d = rng.standard_normal((3, 2, 576)).astype(np.float32), breccia.dequantize(st)
        check_bound(breccia.matmul(x, st.mT, prefer="native.matmul"), x, d)
        grouped = breccia.grouped_matmul(
            x.reshape(6, 576), st.mT, np.array([2, 4, 6], np.int32), prefer="native.grouped_matmul"
        )
        check_bound(grouped.reshape(3, 2, 40), x, d)
        check_bound(breccia.matmul(x[0], st[1].mT, prefer="native.matmul"), x[0], d[1])
        check_bound(breccia.matmul(st[1], x[0].T, prefer="native.matmul").T, x[0], d[1])
        down = breccia.cast(np.ascontiguousarray(w[0].T), GGUFScaling(type=name), axis=-2)  # codes in (K, N) order
        check_bound(breccia.matmul(x[0], down, prefer="native.matmul"), x[0], breccia.dequantize(down).T)


def test_a_nan_in_a_record_makes_its_rows_nan_and_no_others(instruction_set: str) -> None:
    x, st = np.ones((3, 512), np.float32), coded(GGUFScaling().format, (9, 512), 0, False)
    for part in ("scale", "zero_point"):
        broken = getattr(st, part).copy()
        broken[4, 8:10] = np.array([np.nan], "<f2").view(np.uint8)
        found = multiplied(x, replaced(st, **{part: broken}))
        assert np.isnan(found).all(axis=0).tolist() == np.isnan(found).any(axis=0).tolist() == [n == 4 for n in range(9)]


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_an_infinite_scale_gives_what_numpy_does(instruction_set: str, name: str) -> None:
    x, st = np.ones((1, 256), np.float32), coded(READ[name], (9, 256), 0, False)
    st.scale[4, :2] = np.array([np.inf], "<f2").view(np.uint8)
    found = native._of_rows(x, st)
    with np.errstate(all="ignore"):
        expected = x @ breccia.dequantize(st, prefer="reference.dequantize").T
    assert found is None or (np.isfinite(found) == np.isfinite(expected)).all()


def test_records_at_any_address_are_read(instruction_set: str) -> None:
    x, st = np.ones((2, 512), np.float32), coded(READ["Q6_K"], (9, 512), 0, False)
    room = np.empty(st.scale.size + 1, np.uint8)
    room[1:] = st.scale.reshape(-1)
    np.testing.assert_array_equal(multiplied(x, replaced(st, scale=room[1:].reshape(st.scale.shape))), multiplied(x, st))


@pytest.mark.parametrize("name", OTHERS)
def test_formats_whose_records_are_not_read_have_other_kernels(name: str) -> None:
    st = coded(OTHERS[name], (9, 320), 0, False)
    found = breccia.explain("matmul", np.ones((1, 320), np.float32), st.mT)
    assert found.winner is not None and found.winner.name != "native.matmul"
    reason = facts.unsupported(st.recipe.format)
    assert reason is not None and "it reads records of" in reason and reason in str(found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale_codes": (9, False, 8)}, "codes of 1 to 8 bits; got kind 9, and 8 codes of 9 bits"),
        ({"scale_codes": (6, False, 0)}, "1 to 65536 codes"),
        ({"scale_codes": (6, False, 1 << 40)}, "1 to 65536 codes"),
        ({"scale_codes": (-6, True, 8)}, "8 codes of -6 bits"),
        ({"scale_kind": KINDS["e8m0"]}, "wanted records of an FP16, BF16 or FP32 number"),
        ({"offset_codes": (5, False, 8)}, "wanted offsets of 126 bytes; got 144"),
        ({"scale_codes": (8, False, 8)}, "wanted scales of 180 bytes; got 144"),
        ({"scale_codes": (0, False, 0)}, "wanted scales of 288 bytes; got 144"),
    ],
)
def test_records_of_other_sizes_are_refused_before_writing(changed: dict[str, Any], message: str) -> None:
    st = coded(GGUFScaling().format, (9, 512), 0, False)
    weight, product = weight_of(st, 9, 512)._replace(**changed), np.zeros((1, 9), np.float32)
    with pytest.raises(ValueError, match=message):
        native._multiplied(np.ones((1, 512), np.float32), weight, product, 512, native.FP32)
    assert not product.any()
