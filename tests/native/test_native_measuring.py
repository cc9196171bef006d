"""Compiled error metrics are NumPy's but for the order of FP64 sums, by every instruction set and any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import breccia
from breccia.arrays.frameworks import Device
from breccia.kernels import measuring
from breccia.kernels.measuring import Source
from breccia_native import availability

if reason := availability.missing(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import measuring as compiled

#: Some that clip and flush; offsets; scales of tensors, rows, tiles and blocks.
SPECS = (
    "mxfp4,scale_rule=floor",
    "nvfp4",
    "int4,group_size=16,symmetric=false,signed=false",
    "fp8_block",
    "fp8_row",
    "fp8_current",
    "mxfp6",
    "int4_bias",
)
DTYPES = ("float64", "float32", "float16", "bfloat16")
SUMS = ("signal", "noise", "dot", "energy")


@pytest.fixture(params=compiled.use())
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    compiled.use(request.param)
    yield request.param
    compiled.use(compiled.use()[0])


def drawn(shape: tuple[int, ...], dtype: str, faulty: bool) -> np.ndarray:
    """Numbers over several powers of ten, with zeros; with NaN, infinities and subnormal numbers if faulty."""
    rng = np.random.default_rng(len(shape) + faulty)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(np.float32)
    x[rng.random(shape) < 0.05] = 0
    if faulty:
        for bad in (np.nan, np.inf, -np.inf, 1e-40):
            x[tuple(rng.integers(n) for n in shape)] = bad
    return x.astype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)


def both(x: np.ndarray, st: breccia.ScaledTensor, monkeypatch: pytest.MonkeyPatch) -> list[breccia.ErrorMetrics]:
    """The compiled metrics, and those of NumPy."""
    assert Source(st).compiled() is not None
    found = breccia.metrics(x, st)
    with monkeypatch.context() as patch:
        patch.setattr(Source, "compiled", lambda self: None)
        return [found, breccia.metrics(x, st)]


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_compiled_metrics_are_those_of_numpy(
    spec: str, dtype: str, faulty: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in ((5, 512), (3, 17, 136)):
        x = drawn(shape, dtype, faulty)
        found, expected = both(x, breccia.cast(x.astype(np.float32), spec), monkeypatch)
        for name in ("count", "nonzero", "flushed", "bounded", "clipped", "bad", "bad_after"):
            assert getattr(found, name) == getattr(expected, name), name
        assert np.array_equal(found.max_error, expected.max_error, equal_nan=True)
        # n additions, and at most one rounding of each term, on both sides: 2 (n + 1) 2^-53 of the sum of magnitudes, which for
        # x * y is at most that of the two squares.
        bound = 2 * (x.size + 1) * 2.0**-53
        for name in SUMS:
            one, other = getattr(found, name), getattr(expected, name)
            if not np.isfinite(other):
                assert np.array_equal(one, other, equal_nan=True), name
            else:
                magnitude = max(expected.signal, expected.energy) if name == "dot" else other
                assert abs(one - other) <= bound * magnitude, name


def test_some_of_them_clip_and_flush() -> None:
    x = drawn((64, 512), "float32", False)
    found = [breccia.metrics(x, breccia.cast(x, spec)) for spec in SPECS]
    assert any(m.clipped for m in found) and any(m.flushed for m in found)


def test_instruction_sets_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SLAB", 4096)  # several for each tensor
    x = drawn((40, 1031), "bfloat16", False)
    st = breccia.cast(x, "nvfp4")
    found: set[breccia.ErrorMetrics] = set()
    before = breccia.get_num_threads()
    for name in compiled.use():
        for threads in (1, 2, 3):
            compiled.use(name)
            breccia.set_num_threads(threads)
            found.add(breccia.metrics(x, st))
    compiled.use(compiled.use()[0])
    breccia.set_num_threads(before)
    assert len(found) == 1


def test_a_preferred_kernel_of_numpy_measures_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_PREFER", "numpy.dequantize")
    from breccia.dispatch import registry

    registry.reload()
    try:
        assert Source(breccia.cast(np.ones((2, 32), np.float32), "mxfp8")).compiled() is None
    finally:
        monkeypatch.undo()
        registry.reload()


def test_sizes_that_do_not_agree_are_refused() -> None:
    x, y = np.zeros(16, np.float32), np.zeros(15, np.float32)
    said = r"wanted as many aligned numbers of FP32 as of kind 32 in rows of {}, and two for each block of {}; got {} bytes\."
    for numbers, bounds, columns, each, sizes in (
        (y, y, 15, 1, "64, 60, 60 and 60"),
        (x, y, 16, 1, "64, 64, 60 and 60"),
        (x, y[:3], 8, 4, "64, 64, 12 and 12"),
        (x, x, 5, 1, "64, 64, 64 and 64"),
        (x, x, 16, 0, "64, 64, 64 and 64"),
    ):
        with pytest.raises(ValueError, match=said.format(columns, each, sizes)):
            compiled.errors(x, 32, numbers, bounds, bounds, 0.5, 0.5, columns, each)
    compiled.errors(x, 32, x, y[:4], y[:4], 0.5, 0.5, 8, 4)
