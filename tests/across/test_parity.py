"""Every framework writes and reads the same bytes as NumPy, eagerly and under jax.jit, through the generic algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from in_frameworks import assert_equal_values, bits

import breccia
from breccia.arrays.frameworks import ops_of
from breccia.testing.examples import special_rows, wide

#: Every recipe and every framework in `make test`; their products in `make test-all`.
pytestmark = pytest.mark.covering(1, 2)

X = np.concatenate([wide((29, 77), seed=30, exponents=60), special_rows(77)])

#: Calls whose bytes are compared; each is (positional name, keyword options of `cast`).
OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "stochastic": {"rounding": "stochastic", "seed": 12345678901234},
    "along rows": {"axis": -2},
}


def converter(framework: str) -> Callable[[np.ndarray], Any]:
    module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}[framework])
    return {"torch": lambda m: m.from_numpy, "jax": lambda m: m.asarray, "mlx": lambda m: m.array}[framework](module)


def stored(st: breccia.ScaledTensor) -> list[bytes | None]:
    held = (st.data, st.scale, st.zero_point, st.global_scale)
    return [None if p is None else np.ascontiguousarray(ops_of(p).to_numpy(p)).tobytes() for p in held]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("framework", "generic"), [("torch", False), ("torch", True), ("jax", False), ("mlx", False)])
def test_bytes_and_values_equal_numpys(recipe: breccia.ScalingRecipe, framework: str, generic: bool, options: str) -> None:
    """With the kernels that dispatch selects, and with the generic algorithm if it is not among them."""
    convert = converter(framework)
    expected = breccia.cast(X, recipe, **OPTIONS[options])
    named = {op: f"reference.{op}" if generic else None for op in ("cast", "dequantize")}
    st = breccia.cast(convert(X), recipe, prefer=named["cast"], **OPTIONS[options])
    assert st.framework == framework
    assert (st.shape, st.layout, st.axis, st.padding) == (expected.shape, expected.layout, expected.axis, expected.padding)
    assert stored(st) == stored(expected)
    decoded = breccia.dequantize(st, prefer=named["dequantize"])
    assert_equal_values(framework, bits(breccia.dequantize(expected)), bits(decoded))


@pytest.mark.long
def test_bytes_under_jit_equal_numpys(recipe: breccia.ScalingRecipe) -> None:
    jax = pytest.importorskip("jax")

    def write(x: Any) -> tuple[Any, ...]:
        st = breccia.cast(x, recipe)
        return st.data, st.scale, st.zero_point, st.global_scale, breccia.dequantize(st)

    *parts, back = jax.jit(write)(jax.numpy.asarray(X))
    expected = breccia.cast(X, recipe)
    assert [None if p is None else ops_of(p).to_numpy(p).tobytes() for p in parts] == stored(expected)
    assert_equal_values("jax", bits(breccia.dequantize(expected)), bits(back))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_storage_is_the_frameworks_own_float8(framework: str) -> None:
    convert = converter(framework)
    st = breccia.cast(convert(X), breccia.MXFP8BlockScaling())
    assert str(st.data_dtype).endswith("float8_e4m3fn") and str(st.scale_dtype).endswith("float8_e8m0fnu")
    st = breccia.cast(convert(X), breccia.NVFP4BlockScaling())
    assert str(st.data_dtype).endswith("uint8") and str(st.scale_dtype).endswith("float8_e4m3fn")


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_half_precision_inputs_and_outputs_equal_numpys(framework: str) -> None:
    import ml_dtypes

    convert = converter(framework)
    x = wide((6, 64), seed=31, exponents=4)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        narrow = convert(x)
        narrow = ops_of(narrow).to_float(narrow, name)
        st = breccia.cast(narrow, breccia.Float8BlockScaling())
        assert stored(st) == stored(breccia.cast(x.astype(dtype), breccia.Float8BlockScaling()))
        back = breccia.dequantize(st, out_dtype=name)
        expected = breccia.dequantize(breccia.cast(x.astype(dtype), breccia.Float8BlockScaling())).astype(dtype)
        assert ops_of(back).to_numpy(back).tobytes() == expected.tobytes()


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_supplied_scales_and_histories_work_without_reading_back(framework: str) -> None:
    convert = converter(framework)
    history = breccia.AmaxHistory().update(convert(X[:4])).update(convert(X[:4] * 2))
    expected = breccia.AmaxHistory().update(X[:4]).update(X[:4] * 2)
    assert bits(history.scale).tobytes() == bits(expected.scale).tobytes()
    st = breccia.cast(convert(X), history.recipe, scale=history.scale)
    assert stored(st) == stored(breccia.cast(X, history.recipe, scale=expected.scale))


def test_mixed_frameworks_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    st = breccia.cast(X, breccia.MXFP8BlockScaling())
    with pytest.raises(breccia.UnsupportedError, match="a is a numpy array and b a torch array; move both"):
        breccia.matmul(st, torch.ones(77, 3))
    with pytest.raises(TypeError, match="data is a numpy array and scale a torch array"):
        breccia.ScaledTensor(st.data, torch.ones(3), st.recipe, st.layout)
    with pytest.raises(TypeError, match="x is a numpy array and scale a torch array"):
        breccia.cast(X, breccia.Float8CurrentScaling(), scale=torch.tensor(1.0))


def test_nonfinite_raise_on_traced_jax_values_is_refused() -> None:
    jax = pytest.importorskip("jax")
    cast = jax.jit(lambda x: breccia.cast(x, breccia.MXFP8BlockScaling(), nonfinite="raise").data)
    with pytest.raises(breccia.UnsupportedError, match="reads values, which a traced .* nonfinite='propagate'"):
        cast(jax.numpy.ones((2, 32)))


def quotients() -> tuple[np.ndarray, np.ndarray]:
    """Dividends and divisors: random bit patterns whose quotient is not subnormal, and exact, halfway and special ones."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in "ab")
    extra = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 7.0, 6.0, 448.0, 3.0, 2.0**-126, 2.0**126, 3e38], np.float32)
    a = np.concatenate([a, np.repeat(extra, len(extra)), rng.uniform(1, 2, 100_000).astype(np.float32)])
    b = np.concatenate([b, np.tile(extra, len(extra)), rng.uniform(1, 2, 100_000).astype(np.float32)])
    with np.errstate(all="ignore"):
        q = a.astype(np.float64) / b
    normal = [(np.abs(x) >= 2.0**-126) | (x == 0) | np.isnan(x) for x in (a, b)]
    keep = normal[0] & normal[1] & ((np.abs(q) >= 2.0**-126) | (q == 0) | ~np.isfinite(q))
    return a[keep], b[keep]


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_division_by_scalars_and_broadcasts_is_ieee(framework: str) -> None:
    """Every framework's `div` matches NumPy's division, under jit too."""
    convert = converter(framework)
    a, b = quotients()
    ops = ops_of(convert(a))

    def assert_divides(found: Any, x: Any, y: Any) -> None:
        with np.errstate(all="ignore"):
            expected = np.divide(x, y, dtype=np.float32)
        assert_equal_values(framework, expected.view(np.int32), bits(found))

    assert_divides(ops.div(convert(a), convert(b)), a, b)
    some = np.random.default_rng(1).uniform(1, 2, 50_000).astype(np.float32)
    for number in (7.0, 6.0, 448.0, 2688.0):
        assert_divides(ops.div(convert(some), number), some, np.float32(number))
        assert_divides(ops.div(number, convert(some)), np.float32(number), some)
        rows = some.reshape(100, 500)
        assert_divides(ops.div(convert(rows), convert(rows[:, :1].copy())), rows, rows[:, :1])
        if framework == "jax":
            jax = pytest.importorskip("jax")
            assert_divides(jax.jit(lambda x, n=number: ops.div(x, n))(some), some, np.float32(number))
            assert_divides(jax.vmap(jax.jit(lambda x: ops.div(x, x[0])))(rows), rows, rows[:, :1])


def test_jax_counters_are_64_bit() -> None:
    """The index words beyond 2^32 elements, checked on the multiplication that computes them."""
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from breccia_jax.ops import _times

    for value, n in ((0xFFFFFFFF, 0xFFFF), (0x123456789A, 77777), (2**40 + 12345, 2**20 + 3)):
        low, high = (jnp.asarray(w, jnp.uint32) for w in (value & 0xFFFFFFFF, value >> 32))
        got_low, got_high = _times(low, high, n)
        assert (int(got_high) << 32 | int(got_low)) == value * n % 2**64
