"""Products rounded to INT8 of up to four rows, by codes of any width; and of more, by weights with biases."""

from __future__ import annotations

import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import Device
from breccia_native import availability

if reason := availability.missing_products(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from native_weights import integer
from records import READ, coded
from weights import replaced, tensor

from breccia.codecs import F16, F32, INT8, UINT4
from breccia.formats import Format, Level
from breccia_native import facts, products
from breccia_native import matmul as native
from breccia_native.weights import weight_of

#: GGUF's types, and every width; with the group that activations share a scale in.
PLAIN = {
    "Q4_1": (Format(UINT4, (Level(F16, (1, 32)),), "bias"), 32),
    "Q5_0": (Format(integer(5, True), (Level(F16, (1, 32)),)), 32),
    "Q8_0": (Format(INT8, (Level(F16, (1, 32)),)), 32),
    "uint8-bias-64": (Format(integer(8), (Level(F32, (1, 64)),), "bias"), 64),
    "int8-bias-16": (Format(integer(8, True), (Level(F32, (1, 16)),), "bias"), 16),
    **{f"int{n}-48": (Format(integer(n, True), (Level(F32, (1, 48)),)), 16) for n in (2, 3, 6, 7)},
    **{f"uint{n}-64": (Format(integer(n), (Level(F16, (1, 64)),), "bias"), 64) for n in (1, 2, 5, 7)},
}
#: Whose codes tiles multiply too.
TILED = ("Q4_1", "Q8_0", "int8-bias-16", "Q4_K")
CODED = {"Q2_K": 16, "Q3_K": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}
#: N around 4 rows; K around vectors of 64 codes and 16 groups of them, whole groups and not.
SHAPES = ((1, 48), (5, 192), (9, 240), (37, 576), (3, 1040), (6, 1072), (2, 100))


def drawn_weight(name: str, n: int, k: int, seed: int = 0) -> breccia.ScaledTensor:
    return coded(READ[name], (n, k), seed, False) if name in CODED else tensor(PLAIN[name][0], n, k, seed)


def sizes(st: breccia.ScaledTensor) -> np.ndarray:
    """|code * scale| + |bias| of each element."""
    values = np.abs(breccia.dequantize(st, prefer="reference.dequantize").astype(np.float64))
    if st.zero_point is None:
        return values
    bias = breccia.dequantize(replaced(st, data=np.zeros_like(st.data)), prefer="reference.dequantize").astype(np.float64)
    alone = breccia.dequantize(replaced(st, zero_point=np.zeros_like(st.zero_point)), prefer="reference.dequantize")
    return np.abs(alone.astype(np.float64)) + np.abs(bias)


def check(found: np.ndarray, x: np.ndarray, st: breccia.ScaledTensor, q: int) -> None:
    """The bound of the contract: rounding of activations, then K / q + 5 roundings in FP32, and one for a bias."""
    k = x.shape[1]
    padded = np.zeros((len(x), -(-k // q) * q))
    padded[:, :k] = np.abs(x)
    error = np.repeat((0.5 + 2.0**-15) / 127 * padded.reshape(len(x), -1, q).max(axis=-1), q, axis=1)[:, :k]
    w, size = breccia.dequantize(st, prefer="reference.dequantize").astype(np.float64), sizes(st)
    n = (-(-k // q) + 5 + (st.zero_point is not None)) * 2.0**-24
    bound = error @ np.abs(w).T + n / (1 - n) * ((np.abs(x.astype(np.float64)) + error) @ size.T)
    worst = np.max(np.abs(found - x.astype(np.float64) @ w.T) / np.where(bound == 0, 1, bound))
    assert worst <= 1, f"the error is {worst:.3g} times the bound"


def drawn(m: int, k: int) -> np.ndarray:
    rng = np.random.default_rng(m)
    return (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-12, 12, (m, k))).astype(np.float32)


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("name", [*PLAIN, *CODED])
def test_few_rows_are_within_the_bound_of_rounded_activations(instruction_set: str, name: str) -> None:
    q = CODED.get(name) or PLAIN[name][1]
    for seed, (n, k) in enumerate(SHAPES):
        st = drawn_weight(name, n, k, seed)
        for m in (1, 2, 4, 5):
            x = drawn(m, k)
            check(native.matmul_int8(x, st.mT), x, st, q)


@pytest.mark.parametrize("name", TILED)
def test_more_rows_have_the_same_bits_on_every_instruction_set(name: str) -> None:
    q = CODED.get(name) or PLAIN[name][1]
    for seed, (n, k) in enumerate(((37, 576), (9, 240), (33, 1040), (2, 100))):
        st = drawn_weight(name, n, k, seed)
        for m in (5, 13, 33, 70):
            x, found = drawn(m, k), dict[str, np.ndarray]()
            try:
                for each in products.use():
                    products.use(each)
                    found[each] = native.matmul_int8(x, st.mT)
            finally:
                products.use(products.use()[0])
            first = next(iter(found.values()))
            check(first, x, st, q)
            for other in found.values():
                np.testing.assert_array_equal(other.view(np.uint32), first.view(np.uint32))


def rounds(name: str, m: int, k: int = 576) -> bool:
    """Whether m rows of activations are rounded for a weight."""
    st = drawn_weight(name, 8, k)
    return native._mode(drawn(m, k), m, st, weight_of(st, 8, k), k, facts.INT8) == facts.INT8


@pytest.mark.parametrize("name", [*PLAIN, *CODED])
def test_up_to_four_rows_are_rounded_where_the_processor_multiplies_bytes(instruction_set: str, name: str) -> None:
    if name in TILED:
        assert rounds(name, 1) and rounds(name, 5)
        return
    about = (facts.INT8, products.kinds().index("u8"), 5, products.kinds().index("f16"), 0, 32, 576)
    able = products.fast(*about, 1)
    assert able == products.fast(*about, 4) and not products.fast(*about, 5)
    assert instruction_set in ("avx512_vbmi", "amx") or not able
    assert [rounds(name, m) for m in (1, 4, 5)] == [able, able, False]
    assert not rounds(name, 1, 568), "blocks that K is no multiple of"


def test_planted_activations_break_the_bound() -> None:
    """Rounded with one scale for a row; and cut off."""
    st = drawn_weight("Q4_1", 16, 512)
    w = breccia.dequantize(st)
    uneven = np.full((4, 512), 0.3, np.float32)
    uneven[:, 0] = 100
    high = np.random.default_rng(0).integers(0, 126, (4, 512)).astype(np.float32) + np.float32(0.9)
    high[:, ::32] = 127
    for x, planted in ((uneven, np.rint(uneven / uneven.max() * 127) / 127 * uneven.max()), (high, np.trunc(high))):
        check(native.matmul_int8(x, st.mT), x, st, 32)
        with pytest.raises(AssertionError, match="times the bound"):
            check(planted @ w.T, x, st, 32)


@pytest.mark.parametrize("name", ["Q5_0", "Q8_0", "int3-48", "Q6_K", "Q3_K"])
def test_codes_of_zero_give_exactly_zero(name: str) -> None:
    """Signed codes are multiplied as unsigned ones: what that adds is taken away in integers."""
    st = drawn_weight(name, 9, 576)
    st = replaced(st, data=np.zeros_like(st.data))
    assert not breccia.dequantize(st).any()
    assert not native.matmul_int8(drawn(3, 576), st.mT).any()


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "uint8-bias-64", "int7-48", "Q4_K", "Q6_K"])
def test_every_code_is_multiplied_as_its_value(name: str) -> None:
    """Activations of one number that is 127, whose scale is 1: products by 127 are within two roundings."""
    st = drawn_weight(name, 256, 576)
    w = breccia.dequantize(st, prefer="reference.dequantize")
    x = np.zeros((4, 576), np.float32)
    x[range(4), [0, 77, 320, 575]] = 127
    found, expected = native.matmul_int8(x, st.mT), 127.0 * w[:, [0, 77, 320, 575]].T.astype(np.float64)
    assert (np.abs(found - expected) <= 4 * 2.0**-24 * 127 * sizes(st)[:, [0, 77, 320, 575]].T).all()


def test_nan_stays_in_its_row_and_bits_do_not_depend_on_threads() -> None:
    before = breccia.get_num_threads()
    for name in ("Q4_1", "Q6_K"):
        st = drawn_weight(name, 700, 576)
        x = drawn(3, 576)
        alone = native.matmul_int8(x, st.mT)
        x[1, 300] = np.nan
        for number in (1, 2, 3):
            breccia.set_num_threads(number)
            try:
                product = native.matmul_int8(x, st.mT)
            finally:
                breccia.set_num_threads(before)
            assert np.isnan(product[1]).all()
            np.testing.assert_array_equal(product[[0, 2]].view(np.uint32), alone[[0, 2]].view(np.uint32))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["scale", "zero_point"])
def test_a_scale_or_bias_that_is_not_finite_spoils_its_row_alone(number: float, part: str) -> None:
    """Of Q4_1, whose FP16 scales and biases are read as they are stored."""
    st, x = drawn_weight("Q4_1", 9, 576), drawn(2, 576)
    spoiled = getattr(st, part).copy()
    spoiled[5, 17] = number
    product, alone = native.matmul_int8(x, replaced(st, **{part: spoiled}).mT), native.matmul_int8(x, st.mT)
    assert not np.isfinite(product[:, 5]).any()
    others = np.arange(9) != 5
    np.testing.assert_array_equal(product[:, others].view(np.uint32), alone[:, others].view(np.uint32))


def test_prepared_products_round_as_named_ones() -> None:
    for name in ("Q4_1", "Q5_0", "Q4_K"):
        st = drawn_weight(name, 40, 576)
        x = drawn(1, 576)
        call = native.prepared_int8(x, st.mT, None)
        assert call is not None
        at = [part.ctypes.data if part is not None else 0 for part in (x, st.data, st.scale, st.zero_point, None)]
        np.testing.assert_array_equal(call(*at, None, 1), native.matmul_int8(x, st.mT))
