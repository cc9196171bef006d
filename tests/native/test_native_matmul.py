"""Compiled products: every instruction set against FP64, every format, sizes around every vector width, and limits."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from native_weights import FORMATS, check_bound, integer
from paths import TESTS
from weights import packed, replaced, tensor, written

import breccia
from breccia.arrays.frameworks import Device
from breccia.codecs import E2M1, E2M3, E4M3, F16, F32
from breccia.formats import TENSOR, Format, Level
from breccia.kernels import threads
from breccia.tensors.tensor import ScaledTensor
from breccia_native import availability

if reason := availability.missing_products(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import facts, products
from breccia_native import matmul as native

NATIVE = "native.matmul"


def test_weights_that_cancel_to_zero_are_zero(instruction_set: str) -> None:
    for bits in (2, 3, 4, 5, 6, 7, 8):
        for block in (7, 32, 128):
            st = tensor(Format(integer(bits), (Level(F32, (1, block)),), "bias"), 40, 256)
            scale = np.full(st.scale.shape, 1.1 / 3, np.float32)
            parts = {"scale": scale, "zero_point": -(np.float32(3) * scale)}
            parts["data"] = packed(np.full((40, 256), 3, np.uint8), bits)
            st = replaced(st, **parts)
            assert not breccia.dequantize(st, prefer="reference.dequantize").any()
            for m in (1, 2, 4, 20):
                assert not multiplied(np.ones((m, 256), np.float32), st).any()


def multiplied(x: np.ndarray, st: ScaledTensor) -> np.ndarray:
    """The compiled product, which must not have been left to NumPy."""
    found = native._of_rows(x, st)
    assert found is not None, "beyond the limits of the kernel"
    return found


#: Rows of activations around every path: streams of 1, 2 and 4, and panels of every height.
ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 14, 15, 16, 17, 29, 64)
#: K around chunks of 128 codes and vectors of 4, 8 and 16 numbers; N around 4 rows and 32.
SHAPES = (
    (1, 32),
    (3, 33),
    (4, 63),
    (5, 127),
    (31, 128),
    (33, 129),
    (7, 159),
    (65, 256),
    (2, 640),
    (36, 1021),
    (37, 96),
    (6, 176),
)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format_are_within_the_bound(instruction_set: str, name: str) -> None:
    for i, (n, k) in enumerate(SHAPES):
        st = tensor(FORMATS[name], n, k, i)
        w = breccia.dequantize(st, prefer="reference.dequantize")
        for m in ROWS:
            x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
            x[:, 0] = 4096
            check_bound(multiplied(x, st), x, w)


@pytest.mark.parametrize(
    "recipe",
    ["int4", "mxfp4", "nvfp4", "nf4", "fp8_row", "fp8_block", "fp8_current", "mxfp8", "mxfp6", "int8", "mxint8", "int4_bias"],
)
def test_recipes_of_breccia_run_compiled_in_both_orders(recipe: str) -> None:
    w = np.random.default_rng(0).standard_normal((48, 384)).astype(np.float32)
    st = breccia.cast(w, recipe)
    d = breccia.dequantize(st)
    for m in (1, 5, 33, 200):
        x = np.random.default_rng(m).standard_normal((m, 384)).astype(np.float32)
        for op in ((x, st.mT), (st, x.T)):
            found = breccia.explain("matmul", *op)
            assert found.winner is not None and found.winner.name == NATIVE
        check_bound(breccia.matmul(x, st.mT), x, d)
        check_bound(breccia.matmul(st, x.T).T, x, d)


@pytest.mark.parametrize("first", ["mxfp8", "int4_bias", "fp8_current"])
def test_products_of_two_quantized_operands_decode_the_first(first: str) -> None:
    rng = np.random.default_rng(0)
    w = breccia.cast(rng.standard_normal((48, 384)).astype(np.float32), "nvfp4")
    for shape in ((1, 384), (33, 384), (2, 3, 384)):
        x = breccia.cast(rng.standard_normal(shape).astype(np.float32), first)
        found = breccia.explain("matmul", x, w.mT)
        assert found.winner is not None and found.winner.name == NATIVE
        check_bound(breccia.matmul(x, w.mT), breccia.dequantize(x), breccia.dequantize(w))
        with pytest.raises(breccia.BrecciaError, match="it rounds an array, and both operands are ScaledTensors"):
            breccia.matmul(x, w.mT, prefer="native.matmul_int8")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_batches_strides_bias_and_out(instruction_set: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    st = breccia.cast(rng.standard_normal((40, 200)).astype(np.float32), "mxfp4")
    d, bias = breccia.dequantize(st), rng.standard_normal(40).astype(dtype)
    x = rng.standard_normal((3, 2, 5, 400)).astype(dtype)[..., ::2].swapaxes(0, 1)
    check_bound(breccia.matmul(x, st.mT, bias=bias, prefer=NATIVE), x, d, bias)
    out = np.full((2, 3, 5, 40), 7, np.float16)
    assert breccia.matmul(x, st.mT, out_dtype="float16", out=out, prefer=NATIVE) is out
    np.testing.assert_array_equal(out, breccia.matmul(x, st.mT, prefer=NATIVE).astype(np.float16))
    x.flags.writeable = False
    check_bound(breccia.matmul(x[0, 0], st.mT, prefer=NATIVE), x[0, 0], d)
    with pytest.raises(breccia.BrecciaError, match=r"out= must have shape \(2, 3, 5, 40\)"):
        breccia.matmul(x, st.mT, out=np.zeros((5, 40), np.float32), prefer=NATIVE)


def test_matrices_of_a_batch_are_each_multiplied() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 40, 96)).astype(np.float32)
    for recipe in ("nvfp4", "fp8_current", "int8"):
        st = breccia.cast(w, recipe)
        d = breccia.dequantize(st)
        for lead in ((3,), (2, 3), (1,), ()):
            x = rng.standard_normal((*lead, 2, 96)).astype(np.float32)
            check_bound(breccia.matmul(x, st.mT, prefer=NATIVE), x, d)


def test_nan_codes_and_scales_make_nan_where_they_should(instruction_set: str) -> None:
    x = np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32)
    for name, part in (("mxfp8", "data"), ("e5m2-tensor", "data"), ("mxfp4", "scale"), ("nvfp4", "scale"), ("int4", "scale")):
        for rows in (1, 3, 9):
            st = tensor(FORMATS[name], 37, 256)
            array = getattr(st, part).copy()
            array[35, -1] = np.nan if array.dtype.kind == "f" else {"mxfp4": 255}.get(name, 127)
            st = replaced(st, **{part: array})
            d = breccia.dequantize(st, prefer="reference.dequantize")
            assert np.isnan(d).any(axis=1).tolist() == [n == 35 for n in range(37)]
            check_bound(multiplied(x[:rows], st), x[:rows], d)


@pytest.mark.parametrize("size", [1.0, 2.0**-45, 2.0**-70, 2.0**-90])
@pytest.mark.parametrize("name", ["int4-32", "mxfp4", "nf4", "e4m3-row", "e5m2-tensor", "mxfp6-e2m3", "mxfp6-e3m2", "int8"])
def test_no_bit_of_an_activation_is_lost(instruction_set: str, name: str, size: float) -> None:
    n, k, rng = 40, 256, np.random.default_rng(0)
    st, element = tensor(FORMATS[name], n, k), FORMATS[name].element
    codes, columns = np.zeros((n, k), np.uint8), np.arange(n) * 5
    if name == "nf4":
        codes[:] = [element.value(code) for code in range(16)].index(0)
    numbers = [code for code in range(1 << element.bits) if np.isfinite(element.value(code))]
    codes[np.arange(n), columns] = chosen = rng.choice(numbers, n)
    values = np.array([element.value(int(code)) for code in chosen], np.float32)
    scale = written(FORMATS[name].scale.codec, np.full(st.scale.shape, 0.25))
    st = replaced(st, data=packed(codes, element.bits), scale=scale)
    for m in (1, 4, 9, 17, 64):
        x = (rng.standard_normal((m, k)) * size).astype(np.float32)
        # One product of every sum is not zero: it is rounded once, and a quarter of it is exact.
        np.testing.assert_array_equal(multiplied(x, st), x[:, columns] * values / 4)
        if size == 1:
            half = x.astype(np.float16)
            np.testing.assert_array_equal(multiplied(half, st), half.astype(np.float32)[:, columns] * values / 4)


def test_infinite_codes_give_infinite_products(instruction_set: str) -> None:
    st = tensor(FORMATS["e5m2-tensor"], 37, 256)
    data = st.data.copy()
    data[35, -1] = 0b1_11111_00  # -inf
    st = replaced(st, data=data)
    for m in (1, 4, 9, 40):
        x = np.arange(1, m * 256 + 1, dtype=np.float32).reshape(m, 256)
        found = multiplied(x, st)
        assert (found[:, 35] == -np.inf).all() and np.isfinite(np.delete(found, 35, axis=1)).all()


def test_nan_in_activations_stays_in_its_row(instruction_set: str) -> None:
    st = tensor(FORMATS["nvfp4"], 33, 300)
    for rows in (1, 4, 20):
        x = np.random.default_rng(0).standard_normal((rows, 300)).astype(np.float32)
        x[0, 299] = np.nan
        found = multiplied(x, st)
        assert np.isnan(found[0]).all() and np.isfinite(found[1:]).all()


@pytest.mark.parametrize(
    ("what", "x", "scale"),
    [
        ("infinite activations", np.inf, 1.0),
        ("large activations", 2.0**120, 2.0**-30),
        ("large scales", 2.0**-60, 2.0**100),
        ("infinite scales", 1.0, np.inf),
        ("subnormal scales", 1.0, 2.0**-140),
    ],
)
def test_numbers_beyond_the_limits_are_left_to_numpy(instruction_set: str, what: str, x: float, scale: float) -> None:
    for name, m, k in itertools.product(("int4-32", "e4m3-row", "int4-tensor"), (2, 16), (64, 256)):
        st = tensor(FORMATS[name], 8, k)
        st = replaced(st, scale=np.full(st.scale.shape, scale, np.float32))
        a = np.ones((m, k), np.float32)
        a[1, 63] = x
        assert native._of_rows(a, st) is None, what
        with np.errstate(all="ignore"):
            expected = a @ breccia.dequantize(st, prefer="reference.dequantize").T
        np.testing.assert_allclose(native.matmul(a, st.mT), expected, rtol=1e-5)


def test_bits_do_not_depend_on_the_number_of_threads(instruction_set: str) -> None:
    st = tensor(FORMATS["nvfp4"], 700, 1000)
    before = threads.get_num_threads()
    try:
        for m in (1, 3, 17):
            x = np.random.default_rng(m).standard_normal((m, 1000)).astype(np.float32)
            found = []
            for number in (1, 2, 3, 7):
                breccia.set_num_threads(number)
                found.append(np.vstack([multiplied(x, st) for _ in range(3)]))
            for other in found[1:]:
                np.testing.assert_array_equal(other.view(np.uint32), found[0].view(np.uint32))
    finally:
        breccia.set_num_threads(before)


def test_several_threads_may_multiply_at_once() -> None:
    st = tensor(FORMATS["int4"], 600, 1024)
    x = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
    expected = multiplied(x, st)
    found: list[np.ndarray] = []
    workers = [threading.Thread(target=lambda: found.append(multiplied(x, st))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4 and all((y == expected).all() for y in found)


def test_a_limit_of_another_library_holds_in_its_thread_only() -> None:
    before = threads.get_num_threads()
    seen: list[int] = []

    def call(number: int) -> int:
        other = threading.Thread(target=lambda: seen.append(threads.get_num_threads()))
        other.start()
        other.join()
        if number == 0:
            raise ValueError
        return threads.get_num_threads()

    assert threads.at_most(1, call, number=1) == 1
    with pytest.raises(ValueError):
        threads.at_most(1, call, 0)
    assert seen == [before, before] and threads.get_num_threads() == before


def test_many_rows_are_multiplied_in_parts_with_the_same_bits(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    st = tensor(FORMATS["mxfp4"], 40, 200)
    x = np.random.default_rng(0).standard_normal((150, 200)).astype(np.float32)
    whole = multiplied(x, st)
    check_bound(whole, x, breccia.dequantize(st))
    monkeypatch.setattr(native, "_PACKED", 4 * 200 * 60)
    np.testing.assert_array_equal(multiplied(x, st).view(np.uint32), whole.view(np.uint32))
    x[149, 3] = np.inf
    assert native._of_rows(x, st) is None


@pytest.mark.parametrize("recipe", ["nvfp4", "int4", "fp8_block", "mxfp6"])
def test_groups_of_rows_are_multiplied_by_their_own_matrices(recipe: str) -> None:
    rng = np.random.default_rng(0)
    st = breccia.cast(rng.standard_normal((4, 40, 96)).astype(np.float32), recipe)
    d, x = breccia.dequantize(st), rng.standard_normal((70, 96)).astype(np.float32)
    offsets = np.array([20, 20, 61, 65], np.int32)
    found = breccia.explain("grouped_matmul", x, st.mT)
    assert found.winner is not None and found.winner.name == "native.grouped_matmul"
    y = breccia.grouped_matmul(x, st.mT, offsets)
    for group, start, end in ((0, 0, 20), (2, 20, 61), (3, 61, 65)):
        check_bound(y[start:end], x[start:end], d[group])
    assert not y[65:].any()
    out = np.full((70, 40), 7, np.float16)
    assert breccia.grouped_matmul(x, st.mT, offsets, "float16", out=out) is out
    np.testing.assert_array_equal(out, y.astype(np.float16))
    x[30] = np.inf  # beyond the kernel's limits: NumPy multiplies that group
    with np.errstate(all="ignore"):
        y = breccia.grouped_matmul(x, st.mT, offsets)
    assert not np.isfinite(y[30]).any() and np.isfinite(np.delete(y, 30, axis=0)).all()
    torch = pytest.importorskip("torch")
    w = breccia.cast(torch.from_numpy(d), recipe)
    x[30] = 1
    got = breccia.grouped_matmul(torch.from_numpy(x), w.mT, torch.from_numpy(offsets))
    again = breccia.grouped_matmul(x, breccia.cast(d, recipe).mT, offsets)
    np.testing.assert_array_equal(got.numpy().view(np.uint32), again.view(np.uint32))


def test_planted_kernels_break_the_bound() -> None:
    """One that sums in FP16, and one that leaves out the last partial chunk."""
    st = tensor(FORMATS["int4"], 8, 300)
    d = breccia.dequantize(st)
    x = np.random.default_rng(0).standard_normal((2, 300)).astype(np.float32)
    for planted in (x.astype(np.float16) @ d.T.astype(np.float16), x[:, :256] @ d[:, :256].T):
        with pytest.raises(AssertionError, match="times the bound"):
            check_bound(planted.astype(np.float32), x, d)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (np.ones((2, 64), np.float32), breccia.cast(np.ones((64, 8), np.float32), "mxfp4"), "blocks do not run along K"),
        (
            np.ones((2, 64), np.float32),
            tensor(Format(E2M3, (Level(F32, (1, 32)),), "bias"), 8, 64).mT,
            "it does not support offsets of E2M3",
        ),
        (np.ones((2, 16), np.float32), breccia.cast(np.ones((8, 16), np.float32), "mxfp4").mT, "K is 16, less than 32"),
        (np.ones((0, 64), np.float32), breccia.cast(np.ones((8, 64), np.float32), "mxfp4").mT, "an operand is empty"),
    ],
)
def test_explain_says_why_a_product_is_not_compiled(a: Any, b: Any, reason: str) -> None:
    found = breccia.explain("matmul", a, b)
    assert found.winner is not None and found.winner.name != NATIVE
    assert reason in str(found)
    if 0 not in a.shape:
        breccia.matmul(a, b)


def test_torch_tensors_are_multiplied_by_the_same_kernel_and_keep_gradients() -> None:
    torch = pytest.importorskip("torch")
    w = torch.randn(48, 320, generator=torch.Generator().manual_seed(0))
    for recipe in ("nvfp4", "fp8_block", "int4"):
        st = breccia.cast(w, recipe)
        x, bias = torch.randn(3, 2, 320), torch.randn(48)
        found = breccia.explain("matmul", x, st.mT)
        assert found.winner is not None and found.winner.name == "torch.cpu.matmul" and NATIVE in str(found)
        d = breccia.dequantize(st)
        check_bound(breccia.matmul(x, st.mT, bias=bias).numpy(), x.numpy(), d.numpy(), bias.numpy())
        half = x.bfloat16()
        rounded = breccia.matmul(half, st.mT, "bfloat16")
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, breccia.matmul(half, st.mT, "float32").bfloat16())
        check_bound(breccia.matmul(half, st.mT, "float32").numpy(), half.float().numpy(), d.numpy())
        out = torch.empty(3, 2, 48, dtype=torch.float16)
        assert breccia.matmul(x, st.mT, "float16", out=out) is out
        assert torch.equal(out, breccia.matmul(x, st.mT).half())
        x.requires_grad_()
        breccia.matmul(x, st.mT).sum().backward()
        torch.testing.assert_close(x.grad, d.sum(0).expand(3, 2, 320))


def test_torch_s_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    seen: list[int] = []

    def recorded(compiled: Any, at: int) -> Any:
        def multiply(*arguments: Any) -> bool:
            seen.append(arguments[at])
            return compiled(*arguments)

        return multiply

    st = breccia.cast(torch.ones(2048, 1024), "int4")
    x, before, ours = torch.ones(4, 1024), torch.get_num_threads(), threads.get_num_threads()
    monkeypatch.setattr(products, "multiply", recorded(products.multiply, -1))
    monkeypatch.setattr(products, "repeat", recorded(products.repeat, -2))
    try:
        breccia.set_num_threads(4)
        for number in (1, 3, 8):
            torch.set_num_threads(number)
            breccia.matmul(x, st.mT)  # contiguous: by a prepared call
            breccia.matmul(x.mT.contiguous().mT, st.mT)
            breccia.matmul(x[:1, :64], breccia.cast(torch.ones(32, 64), "int4").mT)
    finally:
        torch.set_num_threads(before)
        breccia.set_num_threads(ours)
    assert seen == [1, 1, 1, 3, 3, 1, 4, 4, 1]


def test_repeated_products_of_torch_read_the_operands_of_each_call(instruction_set: str) -> None:
    """The prepared call of the first product serves the others; each has the bits of NumPy's kernel for its operands."""
    torch = pytest.importorskip("torch")
    from breccia_torch import cpu

    seed = torch.Generator().manual_seed(0)
    for recipe in ("nvfp4", "int4", "int4,symmetric=false,signed=false", "fp8_block", "mxfp8"):
        for dtype in (torch.float32, torch.bfloat16):
            cpu._products.clear()
            for size in (1, 3, 5):
                x, bias = torch.randn(2, 3, 160, generator=seed).to(dtype) * size, torch.randn(48, generator=seed).to(dtype)
                st = breccia.cast(torch.randn(48, 160, generator=seed) * size, recipe)
                found = breccia.matmul(x, st.mT, bias=bias)
                arrays = [cpu._floats(x), cpu._arrays(st.mT), cpu._floats(bias)]
                expected = breccia.matmul(*arrays[:2], bias=arrays[2])
                np.testing.assert_array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))
            [(_, prepared)] = cpu._products.values()
            assert prepared is not None and prepared.shape == (2, 3, 48)


def test_products_of_torch_that_cannot_be_repeated_are_multiplied_as_at_first() -> None:
    torch = pytest.importorskip("torch")

    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    st = breccia.cast(w, "mxfp8").mT
    expected = breccia.matmul(x, st)
    room = torch.empty(4 * 64 * 4 + 1, dtype=torch.uint8)
    room[1:] = x.reshape(-1).view(torch.uint8)
    misaligned = torch.from_numpy(room.numpy()[1:].view(np.float32)).reshape(4, 64)
    negative = torch.complex(torch.zeros(4, 64), -x).conj().imag  # has torch's negative bit
    strided = x.repeat_interleave(2, 0)[::2]
    assert misaligned.data_ptr() % 4 and negative.is_neg() and not strided.is_contiguous()
    for other in (misaligned, negative, strided):
        assert torch.equal(breccia.matmul(other, st), expected)
    large = x.clone()
    large[0, 0] = 2.0**120  # beyond the limits of the compiled kernel
    check_bound(breccia.matmul(large, st).numpy(), large.numpy(), breccia.dequantize(st).mT.numpy())


def test_a_prepared_product_of_torch_ends_with_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another preference for NumPy's arrays holds for the next product of the same operands."""
    torch = pytest.importorskip("torch")
    from breccia.dispatch import registry
    from breccia_torch import cpu

    st, x = breccia.cast(torch.ones(16, 64), "mxfp8").mT, torch.ones(4, 64)
    cpu._products.clear()
    breccia.matmul(x, st)
    assert [prepared is None for _, prepared in cpu._products.values()] == [False]
    try:
        monkeypatch.setenv("BRECCIA_PREFER", "numpy.matmul")
        registry.reload()
        breccia.matmul(x, st)
        assert [prepared is None for _, prepared in cpu._products.values()] == [True]
    finally:
        monkeypatch.undo()
        registry.reload()
    breccia.matmul(x, st)
    assert [prepared is None for _, prepared in cpu._products.values()] == [False]


def test_the_operator_of_layers_keeps_what_it_asked_for_alone_and_takes_all_its_functions() -> None:
    given = products.prepare(*arguments())
    assert products.keep(given, object(), 1.0, False, 6) is None  # no operator has asked
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        products.keep("a product", object(), 1.0, False, 6)
    with pytest.raises(ValueError, match="operate takes 18 addresses of functions; got 1."):
        products.operate((1,), {}, list, list)


def test_addresses_that_are_missing_or_misaligned_are_refused() -> None:
    x, data, scale, bias = (np.zeros(n, t) for n, t in ((128, "f4"), (256, "u1"), (16, "u1"), (8, "f4")))
    product, given = np.full(16, 7, np.float32), products.prepare(*arguments(bias=bias))
    at = [part.ctypes.data for part in (x, data, scale)]
    for to in (product, product.ctypes.data):
        product[:] = 7
        assert products.repeat(given, *at, 0, bias.ctypes.data, 1.0, 1, to) is True and not product.any()
    for wrong, size in ((0, 0), (product.ctypes.data + 1, 64)):
        with pytest.raises(ValueError, match=f"wanted a product: 16 aligned FP32 numbers; got {size} bytes"):
            products.repeat(given, *at, 0, 0, 1.0, 1, wrong)
    for wrong in ((0, *at[1:], 0, 0), (at[0], 0, at[2], 0, 0), (*at[:2], 0, 0, 0), (at[0] + 1, *at[1:], 0, 0), (*at, 0, 2)):
        assert products.repeat(given, *wrong, 1.0, 1, product) is False
    with pytest.raises(ValueError, match="wanted a product: 16 aligned FP32 numbers; got 60 bytes. Call breccia.matmul"):
        products.repeat(given, *at, 0, 0, 1.0, 1, product[1:])
    with pytest.raises(TypeError, match="repeat takes 9 arguments; got 2. Call breccia.matmul"):
        products.repeat(given, 0)
    with pytest.raises(ValueError, match="wanted scales of 16 bytes; got 15"):
        products.prepare(*arguments(scale=np.zeros(15, np.uint8)))


def arguments(**changed: Any) -> tuple[Any, ...]:
    """Arguments of a product of (2, 64) and an MXFP4 weight (8, 64), some changed."""
    given: dict[str, Any] = {
        "x": np.zeros(2 * 64, np.float32), "x_kind": products.kinds().index("f32"), "m": 2, "n": 8, "k": 64,
        "mode": 0, "data": np.zeros(256, np.uint8), "kind": 0, "width": 4, "table": np.zeros(16, np.float32),
        "scale": np.zeros(16, np.uint8), "scale_kind": products.kinds().index("e8m0"),
        "scale_table": np.zeros(0, np.float32), "scale_codes": (0, False, 0), "block": 32, "tall": 1, "divides": False,
        "factor": 1.0, "least": 0.0, "offset": np.zeros(0, np.float32), "offset_kind": products.kinds().index("f32"),
        "offset_codes": (0, False, 0), "role": 0,
        "product": np.full(16, 7, np.float32), "bias": np.zeros(0, np.float32), "threads": 1,
    }  # fmt: skip
    assert not set(changed) - set(given)
    return tuple((given | changed).values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros(127, np.float32)}, "wanted activations: 128 aligned FP32 numbers; got 508 bytes"),
        ({"x": np.zeros(513, np.uint8)[1:]}, "wanted activations: 128 aligned"),
        ({"x_kind": products.kinds().index("f16")}, "wanted activations of 256 bytes; got 512"),
        ({"x_kind": products.kinds().index("e8m0")}, "wanted a kind from 0 to 11; got -1"),
        ({"x_kind": 12}, "wanted a kind from 0 to 11; got 12"),
        ({"data": np.zeros(255, np.uint8)}, "wanted codes of 256 bytes; got 255"),
        ({"scale": np.zeros(15, np.uint8)}, "wanted scales of 16 bytes; got 15"),
        ({"table": np.zeros(15, np.float32)}, "wanted a table: 16 aligned FP32 numbers; got 60 bytes"),
        ({"scale_kind": 1}, "wanted a table of scales: 256 aligned"),
        ({"role": 1}, "wanted offsets of 64 bytes; got 0"),
        ({"product": np.zeros(15, np.float32)}, "wanted a product: 16 aligned FP32 numbers; got 60 bytes"),
        ({"bias": np.zeros(7, np.float32)}, "wanted a bias: 8 aligned FP32 numbers; got 28 bytes"),
        ({"kind": 99}, "wanted a kind from 0 to 11; got 99"),
        ({"scale_kind": -1}, "wanted a kind from 0 to 11; got -1"),
        ({"kind": products.kinds().index("f32")}, "wanted lengths of at least 1, codes of the bits of their kind"),
        (
            {"block": 0},
            "wanted lengths of at least 1, .*; got m = 2, n = 8, k = 64, kind 0 of 4 bits, block = 0, tall = 1, role 0",
        ),
        ({"width": 3}, "wanted codes of 192 bytes; got 256"),
        ({"width": 0}, "got m = 2, n = 8, k = 64, kind 0 of 0 bits"),
        ({"width": 5}, "kind 0 of 5 bits"),
        ({"kind": products.kinds().index("i8"), "width": 7}, "wanted codes of 448 bytes; got 256"),
        ({"kind": products.kinds().index("e4m3"), "width": 7}, "kind 2 of 7 bits"),
        ({"scale_kind": products.kinds().index("e2m3")}, "scales of 8, 16 or 32 bits; got m = 2, .* scales of kind 4"),
        ({"mode": 3}, "wanted mode 0 .FP32., .*; got mode 3, kind 0, block = 32"),
        ({"mode": -1}, "got mode -1"),
        ({"mode": 1, "table": np.linspace(0, 1, 16, dtype=np.float32)}, "codes that it multiplies exactly"),
        ({"mode": 2, "table": np.linspace(0, 1, 16, dtype=np.float32)}, "codes that it multiplies exactly"),
        (
            {"mode": 1, "block": 12, "scale": np.zeros(48, np.uint8)},
            "in blocks of a multiple of 8; got mode 1, kind 0, block = 12",
        ),
        ({"m": 0}, "wanted lengths of at least 1"),
        ({"k": -1}, "wanted lengths of at least 1"),
        ({"n": 2**62}, "wanted lengths of at least 1"),
        ({"tall": 0}, "wanted lengths of at least 1"),
    ],
)
def test_mismatched_sizes_are_refused_before_writing(changed: dict[str, Any], message: str) -> None:
    given = arguments(**changed)
    with pytest.raises(ValueError, match=message):
        products.multiply(*given)
    before = np.zeros(15) if "product" in changed else np.full(16, 7)
    assert (given[-3] == before).all()
    assert products.multiply(*arguments()) is True


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_activations_of_every_dtype_are_multiplied_as_their_fp32_values(instruction_set: str, kind: str, mode: int) -> None:
    st = tensor(FORMATS["mxfp4"], 100, 333)
    dtype = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}[kind]
    for m in (1, 5, 30):
        x = np.random.default_rng(m).standard_normal((m, 333)).astype(np.float32).astype(dtype)
        found, expected = (native._of_rows(y, st, mode) for y in (x, x.astype(np.float32)))
        assert found is not None and expected is not None
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_read_only_activations_are_multiplied_and_read_only_products_are_refused() -> None:
    given = list(arguments(x=bytes(512)))
    assert products.multiply(*given) is True and not given[-3].any()
    given[-3] = bytes(64)
    with pytest.raises((TypeError, BufferError, ValueError), match="read-only|read-write"):
        products.multiply(*given)


def test_an_instruction_set_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="this processor has the instruction sets .*portable.*; got 'mmx'"):
        products.use("mmx")
    assert products.use()[-1] == "portable"


def test_formats_say_why_they_are_not_compiled() -> None:
    assert (
        facts.unsupported(Format(E2M1, (Level(F16, TENSOR), Level(E4M3, (1, 16))))) == "it does not support this global scale"
    )


@pytest.mark.slow
def test_few_rows_are_much_faster_than_torch_in_fp32() -> None:
    """Ratios of interleaved calls, with weights larger than the caches; half of what was measured on an idle machine."""
    torch = pytest.importorskip("torch")
    if "avx512" not in products.use():
        pytest.skip("measured with AVX-512 only")
    w = torch.randn(4096, 4096) * 0.02
    dense, coded = [w.clone() for _ in range(4)], [breccia.cast(w, "int4") for _ in range(16)]
    for rows, least in ((1, 3.0), (4, 4.0), (16, 1.3)):
        x = torch.randn(rows, 4096)
        times: dict[str, list[float]] = {"fp32": [], "int4": []}
        for turn in range(30):
            for name, call in (
                ("fp32", lambda x=x, n=turn: torch.nn.functional.linear(x, dense[n % 4])),
                ("int4", lambda x=x, n=turn: breccia.matmul(x, coded[n % 16].mT)),
            ):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        assert min(times["fp32"]) > least * min(times["int4"]), rows


@pytest.mark.slow
def test_the_sanitizers_find_nothing_in_the_compiled_kernels() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("GCC is not installed")
    script = TESTS / "tools" / "native_sanitized.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
