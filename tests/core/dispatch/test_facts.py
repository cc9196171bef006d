"""Facts of a call: what a kernel's checks can read, and that winners are cached by exactly the facts that were read."""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import breccia
from breccia import (
    AmbiguousKernelError,
    Framework,
    Kernel,
    MXFP8BlockScaling,
    NoKernelError,
    NVFP4BlockScaling,
    PerBlockK,
    PerBlockMN,
    PerChannel,
    PluginWarning,
    ScaledTensor,
)
from breccia.arrays.frameworks import Device, framework_of
from breccia.dispatch import registry
from breccia.dispatch.call import Call, Operand
from breccia.dispatch.facts import Described, bucket
from breccia.dispatch.table import Table
from breccia.operations import OPERATIONS
from breccia.options import DEFAULT, FLOAT32, CastOptions, ProductOptions
from breccia.recipes import Float8CurrentScaling

MXFP8, NVFP4, CURRENT = MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling()
X = np.ones((64, 96), np.float32)
HERE = __name__

asked: list[Any] = []


@pytest.fixture(autouse=True)
def reset_records(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr("breccia.dispatch.table._reported", set[tuple[str, str]]())


def fast() -> None:
    """A kernel function."""


def slow() -> None:
    """Another kernel function."""


def kernel(name: str, **fields: Any) -> Kernel:
    fields = {"op": "cast", "framework": "numpy", "plugin": "acme", "target": f"{HERE}:{fields.pop('runs', 'fast')}"} | fields
    return Kernel(name=name, **fields)


def seen(op: str, a: Any, b: Any = None, new: Any = None, options: Any = FLOAT32) -> Call:
    """The call as a kernel's checks see it."""
    return Call(OPERATIONS[op], "numpy", (a, b, new, options, None))


def operand(a: Any, **options: Any) -> Operand:
    """The facts of the first operand: of a cast of an array, or of `dequantize` of a tensor."""
    return seen("dequantize", a).a if isinstance(a, ScaledTensor) else seen("cast", a, None, MXFP8, CastOptions(**options)).a


def chosen(table: Table, a: Any, recipe: Any = MXFP8, options: Any = DEFAULT, prefer: Any = None) -> str:
    """The name of the kernel that casts `a`."""
    return table.choose(OPERATIONS["cast"], "numpy", a, None, recipe, options, prefer).kernel.name


# -- the facts -------------------------------------------------------------------------------------------------------------


def test_lengths_are_rounded_up_to_three_significant_bits() -> None:
    few = {0: 0, 1: 1, 7: 7, 8: 8, 9: 10, 10: 10, 11: 12, 13: 14, 15: 16, 16: 16, 17: 20, 21: 24, 25: 28, 29: 32, 33: 40}
    assert {n: bucket(n) for n in few} == few
    assert [bucket(n) for n in (100, 1000, 4000, 4096, 4097, 1_000_000)] == [112, 1024, 4096, 4096, 5120, 1 << 20]
    for n in range(1, 5000):
        has_three_bits = (v for v in itertools.count(n) if len(bin(v)[2:].rstrip("0")) <= 3)
        assert bucket(n) == next(has_three_bits)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((96,), (96,)), ((64, 96), (64, 96)), ((61, 95), (64, 95)), ((3, 17, 4001), (3, 20, 4001)), ((9, 9, 9), (10, 10, 9))],
)
def test_all_lengths_of_the_first_operand_except_the_last_are_rounded_up(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert operand(np.ones(shape, np.float32)).shape == expected
    assert seen("matmul", np.ones((4, 4), np.float32), np.ones(shape, np.float32)).b.shape == shape, (
        "the second operand's are kept"
    )


def test_the_shape_of_a_tensor_is_the_logical_one_in_every_packing_and_storage() -> None:
    for recipe, axis in itertools.product((MXFP8, NVFP4, breccia.recipe("mxfp6")), (-1, -2)):
        st = breccia.cast(np.ones((64, 96), np.float32), recipe, axis=axis)
        for name in ("plain", "transposed", "interleaved"):
            found = operand(st.to_storage(name))
            assert (found.shape, found.ndim, found.axis, found.storage) == ((64, 96), 2, axis, name), (recipe, axis, name)
            assert found.aligned == (64, 32) and not found.empty
    experts = breccia.stack([breccia.cast(X, MXFP8)] * 3).to_storage("interleaved")
    assert (operand(experts).shape, operand(experts).ndim) == ((3, 64, 96), 3)


def test_an_operand_has_its_recipe_dtype_and_layout() -> None:
    st = breccia.cast(X, NVFP4)
    found = operand(st)
    assert (found.recipe, found.dtype, found.layout) == (NVFP4, "uint8", PerBlockK(16))
    for dtype in (np.float32, np.float16):
        found = operand(X.astype(dtype))
        assert (found.recipe, found.dtype, found.layout, found.axis) == (MXFP8, np.dtype(dtype).name, None, -1)
    call = seen("requantize", st, None, CURRENT)
    assert (call.a.recipe, call.recipe, call.b) == (NVFP4, CURRENT, None)
    call = seen("matmul", X, st.mT)
    assert (call.a.recipe, call.b.recipe, call.b.axis, call.recipe) == (None, NVFP4, -2, None)
    call = seen("cast_matmul", X, st.mT, MXFP8)
    assert (call.a.recipe, call.b.recipe, call.recipe) == (MXFP8, NVFP4, MXFP8)


def test_an_array_without_elements_is_empty() -> None:
    assert [operand(np.ones(shape, np.float32)).empty for shape in ((0, 4), (4, 0), (0,), (1, 1), ())] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), (256, 256)), ((48,), (1, 16)), ((3, 5), (1, 1)), ((7, 0, 1024), (256, 256)), ((2, 6, 96), (2, 32))],
)
def test_alignment_is_that_of_the_logical_shape(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert operand(np.ones(shape, np.float32)).aligned == expected
    if len(shape) > 1 and 0 not in shape:
        assert operand(breccia.cast(np.ones(shape, np.float32), NVFP4)).aligned == expected, "also with packed codes"
        assert seen("matmul", X, np.ones(shape, np.float32)).b.aligned == expected


def aligned_memory(nbytes: int) -> Any:
    """Bytes whose address is a multiple of 512."""
    memory = np.zeros(nbytes + 512, np.uint8)
    start = -memory.ctypes.data % 512
    return memory[start : start + nbytes]


RECORDS = np.zeros((4, 8), np.dtype([("value", "f4"), ("flag", "u2")]))
#: Name -> (an array, its strides in items, whether it is in C order).
ORDERS: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "in C order": (np.zeros((3, 8), np.float32), (8, 1), True),
    "half precision": (np.zeros((3, 8), np.float16), (8, 1), True),
    "a part of rows": (np.zeros((3, 16), np.float32)[:, :8], (16, 1), False),
    "every other column": (np.zeros((3, 16), np.float32)[:, ::2], (16, 2), False),
    "transposed": (np.zeros((8, 3), np.float32).T, (1, 3), False),
    "backwards": (np.zeros((3, 8), np.float32)[::-1], (-8, 1), False),
    "one number, spread": (np.broadcast_to(np.float32(1), (3, 8)), (0, 0), False),
    "some of the rows": (np.zeros((9, 8), np.float32)[:3], (8, 1), True),
    "every other row": (np.zeros((9, 8), np.float32)[::3], (24, 1), False),
    "one row of many": (np.zeros((9, 8), np.float32)[::9], (72, 1), True),
    "a vector": (np.zeros(8, np.float32), (1,), True),
    "every other number": (np.zeros(16, np.float32)[::2], (2,), False),
    "a number": (np.zeros((), np.float32), (), True),
    "batched": (np.zeros((2, 3, 8), np.float32), (24, 8, 1), True),
    "batched, axes exchanged": (np.zeros((3, 2, 8), np.float32).swapaxes(0, 1), (8, 16, 1), False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_strides_are_in_bytes_and_contiguous_is_c_order(name: str) -> None:
    array, steps, contiguous = ORDERS[name]
    strides = tuple(step * array.itemsize for step in steps)
    assert operand(array).strides == strides
    assert operand(array).contiguous is contiguous is bool(array.flags.c_contiguous)
    derived = array.view(type("Derived", (np.ndarray,), {}))
    assert operand(derived).strides == strides and operand(derived).contiguous is contiguous, "a subclass is an array"


@pytest.mark.parametrize("array", [RECORDS["value"][:1], RECORDS["value"][0], RECORDS["value"], RECORDS.T["value"]], ids=str)
def test_fields_of_a_structured_array_are_not_contiguous(array: Any) -> None:
    """A stride of 6 bytes is not a multiple of the item size 4."""
    assert not array.flags.c_contiguous
    assert operand(array).contiguous is False


def test_an_empty_array_is_contiguous() -> None:
    for shape in ((0,), (3, 0), (0, 3), (2, 0, 3)):
        assert np.zeros(shape).flags.c_contiguous
        assert operand(np.zeros(shape, np.float32)).contiguous is True
        assert operand(np.zeros((*shape, 4), np.float32)[..., ::2]).contiguous is True, "no step leads anywhere"


def test_a_tensor_has_the_strides_and_contiguity_of_its_codes() -> None:
    st = breccia.cast(X, NVFP4)  # 96 codes of 4 bits in 48 bytes
    assert (operand(st).strides, operand(st).contiguous) == ((48, 1), True)
    assert (operand(st.mT).strides, operand(st.mT).contiguous) == ((1, 48), False)


@pytest.mark.parametrize("offset", [0, 256, 128, 64, 32, 16, 8, 4, 2, 12, 36, 96])
def test_the_alignment_of_an_address_is_its_largest_power_of_two_divisor(offset: int) -> None:
    x = aligned_memory(1024)[offset : offset + 512].view(np.float16).reshape(16, 16)
    found = operand(x).address_alignment
    assert found == max(p for p in (1, 2, 4, 8, 16, 32, 64, 128, 256) if (512 + offset) % p == 0)


def test_the_alignment_of_a_tensor_is_the_smallest_of_its_components() -> None:
    data, scale = aligned_memory(64 * 96), aligned_memory(512)

    def found(data_offset: int, scale_offset: int) -> int:
        codes = data[data_offset : data_offset + 32 * 96].reshape(32, 96)
        scales = scale[scale_offset : scale_offset + 96].reshape(32, 3)
        return operand(ScaledTensor(codes, scales, MXFP8, PerBlockMN(1, 32))).address_alignment

    assert [found(0, 0), found(64, 0), found(0, 32), found(16, 8), found(1, 128)] == [256, 64, 32, 8, 1]
    global_scale = aligned_memory(512)[4:8].view(np.float32).reshape(())
    two_level = ScaledTensor(
        data[: 32 * 48].reshape(32, 48), scale[: 32 * 6].reshape(32, 6), NVFP4, PerBlockMN(1, 16), None, global_scale
    )
    assert operand(two_level).address_alignment == 4


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((4, 32), np.float32), 128),
        (np.zeros((4, 40), np.float32)[:, :32], 32),  # 160 bytes from row to row
        (np.zeros((4, 31), np.float32), 4),
        (np.zeros((4, 31), np.float16), 2),
        (np.zeros((2, 3, 24), np.float32), 32),  # rows of 96 bytes, matrices of 288
        (np.zeros((4, 4096), np.float32), 256),
        (np.zeros((32, 4), np.float32).T, 16),
        (np.zeros(32, np.float32), 256),  # there is one row
        (np.zeros((5, 1), np.float32), 256),  # each row has one number
        (np.zeros((1, 1), np.float32), 256),
        (np.zeros((), np.float32), 256),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_row_alignment_is_that_of_every_stride_except_the_contiguous_one(array: Any, expected: int) -> None:
    assert operand(array).row_alignment == expected


def test_row_alignment_is_defined_for_arrays_with_one_column() -> None:
    """A fact that was read for one call is read for all later calls too, so it must not fail for any."""
    table = asking(lambda call: call.a.row_alignment)
    assert chosen(table, X, CURRENT) == "fast"
    assert chosen(table, np.ones((5, 1), np.float32), CURRENT) in ("fast", "slow")


def capability(device: Any) -> tuple[int, int] | None:
    return {0: (8, 0), 1: (9, 0)}.get(device.index)


class Card:
    """A device with a kind and a number."""

    def __init__(self, index: int) -> None:
        self.type, self.index = "cuda", index


class Sheet(SimpleNamespace):
    """An array on a `Card`, of a framework that reports compute capabilities."""


OPS: Any = None


def test_a_device_has_its_kind_number_and_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    acme = Framework("acme", HERE, ("Sheet",), f"{HERE}:OPS", capability=f"{HERE}:capability")
    monkeypatch.setitem(registry.registry().types, Sheet, acme)
    sheets = [Sheet(shape=(4, 32), dtype=np.dtype("float32"), device=Card(n)) for n in (0, 1, 2)]
    found = [Call(OPERATIONS["cast"], "acme", (x, None, MXFP8, DEFAULT, acme)).device for x in sheets]
    assert found == [Device("cuda", 0, (8, 0)), Device("cuda", 1, (9, 0)), Device("cuda", 2, None)]
    assert list(map(str, found)) == ["cuda:0", "cuda:1", "cuda:2"] and str(Device("cpu")) == "cpu"
    assert operand(X).values[0] is X and seen("cast", X, None, MXFP8).device == Device("cpu")


def test_options_are_those_that_differ_from_their_default() -> None:
    given = CastOptions(axis=-2, rounding="stochastic", seed=7, storage="transposed")
    call = seen("cast", X, None, MXFP8, given)
    assert call.options == {"axis": -2, "rounding": "stochastic", "seed": True, "storage": "transposed"}
    assert (call.option("axis"), call.option("rounding"), call.option("nonfinite")) == (-2, "stochastic", "propagate")
    assert call.storage == "transposed" and call.stored
    assert seen("cast", X, None, MXFP8, DEFAULT).options == {} and not seen("cast", X, None, MXFP8, DEFAULT).stored
    matmul = seen("matmul", X, X.T, None, ProductOptions(bias=np.ones(64, np.float32), out_dtype="float16"))
    assert matmul.options == {"bias": True, "out_dtype": "float16"}
    assert (matmul.option("bias"), matmul.option("out"), matmul.option("out", "none")) == (True, None, "none")


def test_array_options_are_reported_only_as_present() -> None:
    for scale in (2.0, np.float32(2), np.ones((64, 3), np.uint8)):
        assert seen("cast", X, None, MXFP8, CastOptions(scale=scale)).options == {"scale": True}
    st = breccia.cast(X, MXFP8)
    assert seen("cast", X, None, MXFP8, CastOptions(out=st)).option("out") is True
    assert seen("cast", X, None, MXFP8, CastOptions(scale=0)).option("scale") is True, "zero is a scale"
    assert seen("cast", X, None, MXFP8, CastOptions(rounding="stochastic", seed=0)).option("seed") is True


def test_a_described_operand_has_the_facts_of_an_array() -> None:
    layout = PerChannel()
    described = Described(CURRENT, "float16", (61, 95), layout, -2, Device("cuda", 1, (9, 0)))
    call = seen("dequantize", described)
    found = call.a
    assert (found.recipe, found.dtype, found.shape, found.layout, found.axis) == (CURRENT, "float16", (64, 95), layout, -2)
    assert (found.ndim, found.empty, found.storage, found.aligned, found.strides) == (2, False, "plain", (1, 1), None)
    assert found.contiguous and found.address_alignment == found.row_alignment == 256
    assert call.device == Device("cuda", 1, (9, 0)) and found.described() is described
    of_array = operand(X.astype(np.float16)).described()
    assert of_array == Described(None, "float16", (64, 96), None, -1, Device("cpu"))


# -- arrays without memory -------------------------------------------------------------------------------------------------


class Fake(np.ndarray):
    """A stand-in for an array inside a transformation."""


def fake(*arrays: Any) -> str | None:
    return "a fake" if any(isinstance(x, Fake) for x in arrays) else None


def with_fakes(*kernels: Kernel) -> Table:
    numpy = Framework("numpy", "numpy", ("ndarray",), "breccia.arrays.ops:NUMPY", opaque=f"{HERE}:fake")
    return Table(kernels, frameworks={"numpy": numpy})


def test_only_tracing_kernels_get_arrays_without_memory() -> None:
    table = with_fakes(kernel("leaf", rank=1), kernel("traced", traces=True))
    for _ in range(2):
        assert [chosen(table, x) for x in (X, X.view(Fake), X[:32])] == ["leaf", "traced", "leaf"]
    text = str(table.explain(Call(OPERATIONS["cast"], "numpy", (X.view(Fake), None, MXFP8, DEFAULT, None))))
    assert "      skipped: needs arrays in memory; this is a fake" in text.splitlines()
    with pytest.raises(NoKernelError, match="needs arrays in memory; this is a fake"):
        chosen(with_fakes(kernel("leaf")), X.view(Fake))
    with pytest.raises(NoKernelError, match="needs arrays in memory; this is a fake"):
        chosen(table, X.view(Fake), prefer="leaf")


def test_tensors_and_second_operands_without_memory_need_tracing_kernels() -> None:
    table = with_fakes(kernel("leaf", op="matmul", rank=1), kernel("traced", op="matmul", traces=True))
    st = breccia.cast(X, MXFP8)
    faked = [
        ScaledTensor.from_parts(st.data.view(Fake), st.scale, MXFP8, st.layout),
        ScaledTensor.from_parts(st.data, st.scale.view(Fake), MXFP8, st.layout),
    ]
    for other in (st, *faked, st):
        expected = "traced" if other in faked else "leaf"
        assert table.choose(OPERATIONS["matmul"], "numpy", other, st.mT).kernel.name == expected
        assert table.choose(OPERATIONS["matmul"], "numpy", st, other.mT).kernel.name == expected
    assert table.choose(OPERATIONS["matmul"], "numpy", X, X.T).kernel.name == "leaf"
    assert table.choose(OPERATIONS["matmul"], "numpy", X, X.T.view(Fake)).kernel.name == "traced"


def test_a_recipe_in_place_of_a_tensor_counts_as_in_memory() -> None:
    table = with_fakes(kernel("leaf", op="dequantize", rank=1), kernel("traced", op="dequantize", traces=True))
    call = Call(
        OPERATIONS["dequantize"], "numpy", (Described(MXFP8, "uint8", (4, 32), MXFP8.layout), None, None, FLOAT32, None)
    )
    assert table.explain(call).running == "leaf"


# -- storages --------------------------------------------------------------------------------------------------------------


def test_a_kernel_runs_for_the_storages_that_it_reads() -> None:
    st = breccia.cast(X, MXFP8)
    swizzled, other = st.to_storage("swizzle_128x4"), st.to_storage("column_major")
    table = Table([kernel("plain", op="dequantize", rank=1), kernel("tiles", op="dequantize", reads=("swizzle_128x4",))])
    assert [table.choose(OPERATIONS["dequantize"], "numpy", x).kernel.name for x in (st, swizzled, st)] == [
        "plain",
        "tiles",
        "plain",
    ]
    with pytest.raises(NoKernelError) as e:
        table.choose(OPERATIONS["dequantize"], "numpy", other)
    reasons = [line.strip() for line in str(e.value).splitlines() if "skipped" in line]
    way_out = "storage, an operand is in 'column_major'; st.to_storage('plain') converts it"
    assert reasons == [f"skipped: reads 'plain' {way_out}", f"skipped: reads 'plain' and 'swizzle_128x4' {way_out}"]
    products = Table([kernel("tiles", op="matmul", reads=("swizzle_128x4",))])
    assert products.choose(OPERATIONS["matmul"], "numpy", swizzled, swizzled.mT).kernel.name == "tiles"
    assert products.choose(OPERATIONS["matmul"], "numpy", X, swizzled.mT).kernel.name == "tiles"
    with pytest.raises(NoKernelError, match="an operand is in 'column_major'"):
        products.choose(OPERATIONS["matmul"], "numpy", swizzled, other.mT)


def test_a_kernel_runs_for_the_storages_that_it_writes() -> None:
    table = Table([kernel("plain", rank=1), kernel("tiles", writes=("swizzle_128x4", "transposed"))])
    names = ("plain", "swizzle_128x4", "transposed", "plain")
    assert [chosen(table, X, options=CastOptions(storage=s)) for s in names] == ["plain", "tiles", "tiles", "plain"]
    with pytest.raises(NoKernelError) as e:
        chosen(table, X, options=CastOptions(storage="interleaved"))
    reasons = [line.strip() for line in str(e.value).splitlines() if "skipped" in line]
    writes = ("'plain'", "'plain' and 'swizzle_128x4' and 'transposed'")
    assert reasons == [f"skipped: writes {each} storage, not 'interleaved'" for each in writes]


def test_kernels_for_every_storage_are_not_listed_for_plain_tensors() -> None:
    converting = kernel("converting", op="dequantize", reads=("*",), writes=("*",), rank=9)
    table = Table([kernel("leaf", op="dequantize"), converting])
    st = breccia.cast(X, MXFP8)
    assert table.choose(OPERATIONS["dequantize"], "numpy", st).kernel.name == "leaf"
    assert table.choose(OPERATIONS["dequantize"], "numpy", st.to_storage("transposed")).kernel.name == "converting"
    found = table.explain(Call(OPERATIONS["dequantize"], "numpy", (st, None, None, FLOAT32, None)))
    assert [v.kernel.name for v in found.verdicts] == ["leaf"]


# -- the cache of winners --------------------------------------------------------------------------------------------------

#: The fact that the kernel `asks` reads. It accepts only calls with the value that it read first.
question: Callable[[Call], Any] = lambda call: None  # noqa: E731


def asks(call: Call) -> str | None:
    asked.append(question(call))
    return None if asked[-1] == asked[0] else f"it read {asked[-1]} and not {asked[0]}"


def asking(about: Callable[[Call], Any], op: str = "cast") -> Table:
    """A table with a kernel that reads one fact, and one without checks."""
    setattr(sys.modules[HERE], "question", about)  # noqa: B010
    either = {"op": op, "reads": ("transposed",), "writes": ("transposed",)}
    return Table([kernel("fast", accepts=f"{HERE}:asks", rank=1, **either), kernel("slow", runs="slow", **either)])


def off(offset: int) -> Any:
    return aligned_memory(8192)[offset : offset + 4096].view(np.float32).reshape(16, 64)


WIDE = np.ones((64, 192), np.float32)
ST = breccia.cast(np.ones((64, 64), np.float32), MXFP8)
CASTING = (None, MXFP8, DEFAULT)
CARDS = Card(0), Card(1)

#: (op, how to read a fact, a call, a call that differs only in other facts, a call that differs in this fact).
Row = tuple[str, Callable[[Call], Any], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def casts(read: Callable[[Call], Any], *arrays: Any) -> Row:
    """Casts of three arrays."""
    return "cast", read, *((x, *CASTING) for x in arrays)  # type: ignore[return-value]


def asked_for(read: Callable[[Call], Any], *options: dict[str, Any]) -> Row:
    """Casts of one array with three sets of options."""
    return "cast", read, *((X, None, MXFP8, CastOptions(**given)) for given in options)  # type: ignore[return-value]


def decodes(read: Callable[[Call], Any], *tensors: ScaledTensor) -> Row:
    return "dequantize", read, *((st, None, None, FLOAT32) for st in tensors)  # type: ignore[return-value]


def casts_again(read: Callable[[Call], Any], *pairs: tuple[ScaledTensor, Any]) -> Row:
    return "requantize", read, *((st, None, recipe, DEFAULT) for st, recipe in pairs)  # type: ignore[return-value]


def products(read: Callable[[Call], Any], *operands: tuple[Any, ...]) -> Row:
    """Products of two operands, with options or without."""
    return "matmul", read, *((a, b, None, *(options or [FLOAT32])) for a, b, *options in operands)  # type: ignore[return-value]


def on_card(rows: int, dtype: str, card: Any) -> Any:
    return SimpleNamespace(shape=(rows, 32), dtype=np.dtype(dtype), device=card)


def of_ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


HALF, OTHER = X.astype(np.float16), breccia.cast(of_ones(64, 4), MXFP8BlockScaling("E5M2"), axis=-2)
#: The recipes and tensors of a row have one class, so that its calls have one key.
FACTS: dict[str, Row] = {
    "dtype": casts(lambda call: call.a.dtype, X, WIDE[:, ::2], HALF),
    "shape, along rows": casts(lambda call: call.a.shape, X, X[:57], of_ones(65, 96)),
    "shape, along columns": casts(lambda call: call.a.shape, X, HALF, of_ones(64, 95)),
    "aligned, in a bucket": casts(lambda call: call.a.aligned, X, X.copy(), X[:63]),
    "ndim": casts(lambda call: call.a.ndim, X, X[:2, :2], X[None]),
    "empty": casts(lambda call: call.a.empty, X, X[None], X[:0]),
    "contiguous": casts(lambda call: call.a.contiguous, X, X[:5], WIDE[:, ::2]),
    "contiguous, a subclass": casts(lambda call: call.a.contiguous, X.view(Fake), X, WIDE[:, ::2].view(Fake)),
    "strides": casts(lambda call: call.a.strides, X, X[:5], WIDE[:, :96]),
    "alignment of the address": casts(lambda call: call.a.address_alignment, off(0), off(512), off(4)),
    "alignment of rows": casts(lambda call: call.a.row_alignment, X, X[:5], of_ones(64, 97)[:, :96]),
    "device": casts(
        lambda call: call.device, on_card(4, "f4", CARDS[0]), on_card(9, "f2", CARDS[0]), on_card(4, "f4", CARDS[1])
    ),
    "recipe of a cast": (
        "cast",
        lambda call: call.a.recipe,
        (X, *CASTING),
        (X[:5], None, MXFP8BlockScaling(), DEFAULT),
        (X, None, MXFP8BlockScaling(scale_rule="floor"), DEFAULT),
    ),
    "recipe to write": casts_again(
        lambda call: call.recipe, (ST, NVFP4), (ST.mT, NVFP4BlockScaling()), (ST, NVFP4BlockScaling(two_level=False))
    ),
    "recipe of a tensor": casts_again(
        lambda call: call.a.recipe,
        (ST, NVFP4),
        (ST.mT, NVFP4BlockScaling(two_level=False)),
        (breccia.cast(X, MXFP8BlockScaling("E5M2")), NVFP4),
    ),
    "layout": decodes(lambda call: call.a.layout, ST, ST[:5], breccia.cast(of_ones(64, 63), MXFP8)),
    "axis": decodes(lambda call: call.a.axis, ST, ST[:5], ST.mT),
    "storage of an operand": decodes(lambda call: call.a.storage, ST, ST.mT, ST.to_storage("transposed")),
    "storage to write": asked_for(lambda call: call.storage, {"axis": -2}, {"nonfinite": "raise"}, {"storage": "transposed"}),
    "an option": asked_for(
        lambda call: call.option("rounding"), {"nonfinite": "raise"}, {"axis": -2}, {"rounding": "stochastic", "seed": 1}
    ),
    "all options": asked_for(
        lambda call: call.options,
        {"rounding": "stochastic", "seed": 1},
        {"rounding": "stochastic", "seed": 2},
        {"axis": -2, "rounding": "stochastic", "seed": 1},
    ),
    "that a scale is given": asked_for(
        lambda call: call.option("scale", False), {"scale": np.ones((64, 3), np.uint8)}, {"scale": 1.0, "axis": -2}, {}
    ),
    "an option of a product": products(
        lambda call: call.option("out_dtype"),
        (X, X.T, ProductOptions(out_dtype="float16")),
        (X, X.T, ProductOptions(out_dtype="float16", bias=np.ones(64, np.float32))),
        (X, X.T),
    ),
    "shape of the second operand": products(
        lambda call: call.b.shape, (X, of_ones(96, 61)), (X[:3], of_ones(96, 61).astype(np.float16)), (X, of_ones(96, 62))
    ),
    "contiguity of the second operand": products(lambda call: call.b.contiguous, (X, X.T), (X, X[:, ::2]), (X, X.T.copy())),
    "recipe of the second operand": products(lambda call: call.b.recipe, (ST, ST.mT), (ST[:5], ST.mT), (ST, OTHER)),
}


@pytest.mark.parametrize("fact", FACTS)
def test_only_calls_that_differ_in_a_fact_that_was_read_are_checked_again(fact: str) -> None:
    op, about, call, alike, different = FACTS[fact]
    table = asking(about, op)

    def winner(values: tuple[Any, ...]) -> str:
        return table.choose(OPERATIONS[op], "numpy", *values).kernel.name

    assert winner(call) == "fast" and len(asked) == 1
    assert winner(alike) == "fast" and len(asked) == 1, "a fact that no check reads does not cause another check"
    assert winner(different) == "slow" and len(asked) == 2, "a fact that was read always counts"
    for _ in range(3):
        assert [winner(values) for values in (call, alike, different)] == ["fast", "fast", "slow"]
    assert len(asked) == 2, "and each result is cached"


def test_a_batch_size_in_a_known_bucket_is_not_checked_again() -> None:
    table = asking(lambda call: (call.a.shape[-1], call.a.shape[0] > 0))
    for rows in range(4000, 4097):
        assert chosen(table, np.broadcast_to(np.float32(1), (rows, 32))) == "fast"
    assert len(asked) == len({-(-rows // 512) for rows in range(4000, 4097)}) == 1
    for rows in range(1, 4097):
        chosen(table, np.broadcast_to(np.float32(1), (rows, 32)))
    three_bits = {v for v in range(1, 4097) if len(bin(v)[2:].rstrip("0")) <= 3}
    assert len(asked) == len(three_bits) == 44


def multiple_of_32(call: Call) -> str | None:
    asked.append(call)
    return None if call.a.aligned[1] >= 32 else f"K is a multiple of {call.a.aligned[1]} only, not of 32"


def test_the_winner_is_cached_for_equal_facts_and_checked_again_for_others() -> None:
    table = Table([kernel("fast", accepts=f"{HERE}:multiple_of_32", rank=1), kernel("slow", runs="slow")])
    for n in range(3):
        assert chosen(table, np.full((64, 96), n, np.float32), MXFP8BlockScaling()) == "fast"
    assert len(asked) == 1, "equal facts, other values"
    assert chosen(table, np.ones((64, 80), np.float32)) == "slow" and len(asked) == 2
    assert chosen(table, X[:32]) == "fast" and len(asked) == 3, "its rows have another alignment"
    for alike in (X.astype(np.float16), X[None], np.ones((192, 96), np.float32)):
        assert chosen(table, alike) == "fast" and len(asked) == 3
    assert chosen(table, X, MXFP8BlockScaling(scale_rule="floor")) == "fast" and len(asked) == 3, "no check read the recipe"
    assert chosen(table, X, prefer="fast") == "fast" and len(asked) == 4, "prefer is part of the call"


def test_an_unconditional_winner_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []
    judge = Table._judge
    monkeypatch.setattr(Table, "_judge", lambda self, key, *rest: judged.append(key) or judge(self, key, *rest))
    table = Table([kernel("only"), kernel("named", opt_in=True, accepts=f"{HERE}:any_shape", rank=9)])
    for n in range(1, 9):
        assert chosen(table, np.ones((n, n), np.float32)) == "only"
    assert len(judged) == 1 and asked == []
    assert chosen(table, X, prefer="named") == "named"
    assert chosen(table, X) == "only" and len(judged) == 2


def test_a_check_that_reads_no_fact_runs_once() -> None:
    table = asking(lambda call: 0)
    for x in (X, X[:3], X.astype(np.float16), X[None], WIDE[:, ::2], X[:0], X.T):
        for options in (DEFAULT, CastOptions(axis=-2), CastOptions(nonfinite="raise")):
            assert chosen(table, x, options=options) == "fast"
    assert len(asked) == 2, "calls without options are cached separately, since no option has to be read"
    chosen(table, X, NVFP4)
    assert len(asked) == 3, "a recipe of another class is another key"
    chosen(table, X, prefer="fast")
    assert len(asked) == 4, "and so is a preference"
    for prefer in ("fast", ("fast",), ["fast"], ("slow", "fast")):
        assert chosen(table, X, prefer=prefer) == ("slow" if prefer == ("slow", "fast") else "fast")


def picky(call: Call) -> str | None:
    """Read strides only if the dtype is float32, and the address only of those arrays that are not contiguous."""
    asked.append(call)
    if call.a.dtype != "float32" or call.a.contiguous:
        return None
    return None if call.a.address_alignment >= 64 else "rows apart, at an odd address"


def test_a_fact_that_is_read_for_some_calls_counts_for_all() -> None:
    table = Table([kernel("fast", accepts=f"{HERE}:picky", rank=1), kernel("slow", runs="slow")])
    even, odd = off(0)[:, ::2], off(4)[:, ::2]
    half = np.ones((16, 64), np.float16)
    calls = [(half, "fast"), (half[:, ::2], "fast"), (off(4), "fast"), (odd, "slow"), (even, "fast"), (odd, "slow")]
    for order in (calls, calls[::-1], calls[3:] + calls[:3]):
        for x, expected in order * 2:
            assert chosen(table, x) == expected
    before = len(asked)
    assert [chosen(table, x) for x, _ in calls] == [expected for _, expected in calls]
    assert len(asked) == before


#: Facts that randomly generated checks read.
FACT_READERS: dict[str, Callable[[Call], Any]] = {
    "dtype": lambda call: call.a.dtype,
    "shape": lambda call: call.a.shape,
    "aligned": lambda call: call.a.aligned,
    "contiguous": lambda call: call.a.contiguous,
    "strides": lambda call: call.a.strides,
    "row alignment": lambda call: call.a.row_alignment,
    "address": lambda call: call.a.address_alignment,
    "recipe": lambda call: call.a.recipe.spec,
    "options": lambda call: sorted(call.options),
    "axis": lambda call: call.option("axis"),
    "scale": lambda call: call.option("scale"),
}
trees: list[Any] = [None] * 6


def random_tree(random_: random.Random, depth: int) -> Any:
    """A random decision tree: nodes (fact, branch, branch), leaves True or False."""
    if depth == 0 or random_.random() < 0.2:
        return random_.random() < 0.6
    return random_.choice(list(FACT_READERS)), random_tree(random_, depth - 1), random_tree(random_, depth - 1)


def evaluate(number: int, call: Call) -> Any:
    """The result of decision tree `number` for a call."""
    tree = trees[number]
    while not isinstance(tree, bool):
        fact, *branches = tree
        tree = branches[zlib.crc32(repr(FACT_READERS[fact](call)).encode()) % 2]
    return tree


def check_of(number: int) -> Callable[[Call], str | None]:
    return lambda call: None if evaluate(number, call) else "the tree says no"


def cost_of(number: int) -> Callable[[Call], float]:
    return lambda call: 1.0 + evaluate(number, call)


check_0, check_1, check_2, check_3 = map(check_of, range(4))
cost_4, cost_5 = map(cost_of, (4, 5))


@pytest.mark.parametrize("seed", range(25))
def test_a_table_with_a_cache_chooses_as_a_new_table(seed: int) -> None:
    """Checks read random facts, which facts depends on the values of others, and calls come in random order."""
    random_ = random.Random(seed)
    trees[:] = [random_tree(random_, 4) for _ in trees]
    kernels = [
        kernel("a", accepts=f"{HERE}:check_0", rank=4, score=f"{HERE}:cost_4"),
        kernel("b", accepts=f"{HERE}:check_1", rank=3, score=f"{HERE}:cost_5"),
        kernel("c", accepts=f"{HERE}:check_2", rank=2, recipe=MXFP8BlockScaling),
        kernel("d", accepts=f"{HERE}:check_3", rank=1, score=f"{HERE}:cost_4"),
        kernel("e"),
    ]
    arrays: list[Any] = [
        X,
        X[:63],
        X[:33],
        X.astype(np.float16),
        WIDE[:, ::2],
        WIDE[:, :96],
        X.T,
        off(0),
        off(4),
        off(64),
        X[:, :95],
    ]
    recipes = [MXFP8, MXFP8BlockScaling("E5M2"), MXFP8BlockScaling(scale_rule="floor")]
    options = [DEFAULT, CastOptions(axis=-2), CastOptions(scale=1.0), CastOptions(nonfinite="raise")]
    calls = list(itertools.product(arrays, recipes, options))
    table = Table(kernels)
    for x, recipe, given in random_.choices(calls, k=300):
        assert chosen(table, x, recipe, given) == chosen(Table(kernels), x, recipe, given)


def test_the_cache_is_bounded_and_evicts_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.dispatch.memo.LIMIT", 8)
    table = Table([kernel("only", accepts=f"{HERE}:any_shape")])

    def met(columns: int) -> bool:
        """Was the winner for rows of this length cached?"""
        before = len(asked)
        chosen(table, np.broadcast_to(np.float32(1), (4, columns)))
        return len(asked) == before

    assert [met(n) for n in range(1, 9)] == [False] * 8
    assert [met(n) for n in range(1, 9)] == [True] * 8
    assert met(1) and met(3)
    assert [met(n) for n in (9, 10)] == [False, False], "they replace 2 and 4, the least recently used"
    assert [met(n) for n in (1, 3, 5, 6, 7, 8, 9, 10)] == [True] * 8
    assert not met(2), "it was replaced"
    for n in range(100, 200):
        met(n)
        assert sum(table.memo.counts()) <= 8
    assert [met(n) for n in range(192, 200)] == [True] * 8


def any_shape(call: Call) -> None:
    asked.append(call.a.shape)


def test_each_key_has_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.dispatch.memo.LIMIT", 4)
    table = Table([kernel("only", accepts=f"{HERE}:any_shape")])
    for recipe in (MXFP8, NVFP4, CURRENT):
        for n in range(1, 5):
            chosen(table, np.broadcast_to(np.float32(1), (4, n)), recipe)
    assert len(asked) == 12
    for recipe in (MXFP8, NVFP4, CURRENT):
        for n in range(1, 5):
            chosen(table, np.broadcast_to(np.float32(1), (4, n)), recipe)
    assert len(asked) == 12


def any_recipe(call: Call) -> None:
    asked.append((call.recipe and call.recipe.spec, call.a.layout and call.a.layout.block()))


def test_the_cache_keeps_no_array_and_no_declaration_alive() -> None:
    table = Table(
        [kernel("cast", accepts=f"{HERE}:any_recipe"), kernel("decode", op="dequantize", accepts=f"{HERE}:any_recipe")]
    )
    gone: list[weakref.ref[Any]] = []

    def use(n: int) -> None:
        x, recipe = np.ones((4, 32), np.float32), breccia.Float8BlockScaling(block_k=n)
        chosen(table, x, recipe, CastOptions(scale=x))
        st = ScaledTensor.from_parts(x, x, recipe, recipe.layout)
        table.choose(OPERATIONS["dequantize"], "numpy", st)
        gone.extend(map(weakref.ref, (x, recipe, st)))

    for n in range(30_001, 30_011):
        use(n)
    gc.collect()
    assert len(asked) == 20 and [ref for ref in gone if ref() is not None] == []


def test_concurrent_threads_each_get_the_right_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is too small for all calls, so threads evict each other's entries."""
    monkeypatch.setattr("breccia.dispatch.memo.LIMIT", 16)
    table = Table([kernel("fast", accepts=f"{HERE}:odd_only", rank=1), kernel("slow", runs="slow")])
    start, raised = threading.Barrier(8), list[BaseException]()

    def work(seed: int) -> None:
        random_ = random.Random(seed)
        start.wait()
        try:
            for _ in range(600):
                n = random_.randint(1, 40)
                x = np.broadcast_to(np.float32(1), (random_.randint(1, 9), n))
                assert chosen(table, x, options=random_.choice((DEFAULT, CastOptions(axis=-2)))) == (
                    "fast" if n % 2 else "slow"
                )
        except BaseException as e:
            raised.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert table.memo.counts() and max(table.memo.counts()) <= 16


def odd_only(call: Call) -> str | None:
    return None if call.a.shape[-1] % 2 else "even"


# -- estimates -------------------------------------------------------------------------------------------------------------


def for_decoding(call: Call) -> float:
    """Fast up to 16 rows, and very slow beyond."""
    asked.append(call.a.shape[0])
    return 1e-6 if call.a.shape[0] <= 16 else 1.0


def steady(call: Call) -> float:
    return 1e-3


def test_the_kernel_with_the_better_estimate_wins_up_to_16_rows() -> None:
    table = Table([kernel("skinny", score=f"{HERE}:for_decoding"), kernel("square", score=f"{HERE}:steady", rank=5)])
    for _ in range(2):
        for rows in range(1, 100):
            assert chosen(table, np.ones((rows, 32), np.float32)) == ("skinny" if rows <= 16 else "square"), rows
    assert sorted(set(asked)) == sorted(asked), "once for each bucket"


def test_an_estimate_ranks_after_names_and_recipes_and_before_rank() -> None:
    quick, late = {"score": f"{HERE}:quick"}, {"score": f"{HERE}:steady"}
    assert chosen(Table([kernel("quick", **quick, rank=-9), kernel("late", **late, rank=9)]), X) == "quick"
    assert chosen(Table([kernel("quick", **quick), kernel("exact", **late, recipe=MXFP8BlockScaling)]), X) == "exact"
    table = Table([kernel("quick", **quick), kernel("late", **late)])
    assert chosen(table, X, prefer="late") == chosen(Table(table.kernels, prefer=["late"]), X) == "late"
    assert chosen(Table([kernel("low", **late), kernel("high", **late, rank=1)]), X) == "high", "equal estimates: rank"


def quick(call: Call) -> float:
    return 1e-6


def test_a_kernel_without_an_estimate_comes_after_kernels_with_one() -> None:
    table = Table([kernel("silent", rank=900), kernel("glacial", score=f"{HERE}:glacial", rank=-900)])
    assert chosen(table, X) == "glacial"
    found = table.explain(seen("cast", X, None, MXFP8))
    assert [v.reason for v in found.verdicts] == [None, "glacial comes first (it estimates its time)"]
    assert chosen(Table([kernel("silent", rank=2), kernel("mute", rank=1)]), X) == "silent"


def glacial(call: Call) -> float:
    return 1e9


def test_explain_shows_both_estimates() -> None:
    table = Table([kernel("quick", score=f"{HERE}:quick"), kernel("late", score=f"{HERE}:steady", rank=9)])
    found = table.explain(seen("cast", X, None, MXFP8))
    assert [v.reason for v in found.verdicts] == [None, "quick comes first (estimated 1e-06 s against 0.001 s)"]


def test_equal_estimates_of_equal_rank_are_an_error_with_both_kernels_and_remedies() -> None:
    a, b = kernel("a.cast", score=f"{HERE}:steady"), kernel("b.cast", score=f"{HERE}:steady", plugin="bolt")
    for kernels in ([a, b], [b, a]):
        with pytest.raises(AmbiguousKernelError) as e:
            chosen(Table([*kernels, kernel("c.cast", score=f"{HERE}:glacial")]), X)
        assert str(e.value) == (
            "cast of mxfp8 on numpy: Kernels 'a.cast' (acme) and 'b.cast' (bolt) rank the same. Name one with prefer=, or set "
            "one plug-in aside with BRECCIA_BLOCK=bolt."
        )
    assert chosen(Table([a, b]), X, prefer="b.cast") == "b.cast"
    assert chosen(Table([a, b, kernel("quick", score=f"{HERE}:quick")]), X) == "quick", "a tie below the winner is no fault"
    apart = Table([a, kernel("b.cast", score=f"{HERE}:for_decoding", plugin="bolt")])
    assert chosen(apart, X) == "a.cast"


def test_only_kernels_that_can_run_are_asked_for_an_estimate() -> None:
    refused = kernel("refused", accepts=f"{HERE}:refuses", score=f"{HERE}:for_decoding")
    assert chosen(Table([refused, kernel("other", device="npu", score=f"{HERE}:for_decoding"), kernel("slow")]), X) == "slow"
    assert asked == []


def refuses(call: Call) -> str:
    return "not today"


@pytest.mark.parametrize("score", [0, 0.0, -1.0, 5, np.float64(1e-6), np.float32(1e-6), np.int64(3)], ids=repr)
def test_an_estimate_may_be_any_number(monkeypatch: pytest.MonkeyPatch, score: Any) -> None:
    monkeypatch.setattr(sys.modules[HERE], "opinion", score)
    table = Table([kernel("opinionated", score=f"{HERE}:opinionated"), kernel("silent", rank=9)])
    assert chosen(table, X) == "opinionated"


opinion: Any = None


def opinionated(call: Call) -> Any:
    return opinion


@pytest.mark.parametrize("score", [None, "soon", math.nan, True, [1.0], (), object], ids=repr)
def test_an_invalid_estimate_gives_one_warning_and_is_ignored(monkeypatch: pytest.MonkeyPatch, score: Any) -> None:
    monkeypatch.setattr(sys.modules[HERE], "opinion", score)
    table = Table(
        [kernel("odd", score=f"{HERE}:opinionated", rank=9), kernel("silent"), kernel("late", score=f"{HERE}:steady")]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [chosen(table, X), chosen(table, X[:3], NVFP4), chosen(table, X, prefer=("odd", "late"))] == [
            "late",
            "late",
            "odd",
        ]
        assert chosen(Table(table.kernels[:2]), X) == "odd", "without an estimate its rank counts"
    (warning,) = caught
    assert warning.category is PluginWarning
    assert str(warning.message) == (
        f"kernel 'odd' of plug-in 'acme': its score {HERE}:opinionated returned {score!r}, which is not a number. "
        "BRECCIA_BLOCK=acme sets the plug-in aside."
    )


# -- checks that fail --------------------------------------------------------------------------------------------------------


def crashes(fact: Any) -> Any:
    asked.append(fact)
    raise RuntimeError("driver crashed")


@pytest.mark.parametrize("field", ["accepts", "score", "available"])
def test_a_check_that_raises_gives_one_warning_and_excludes_only_its_kernel(field: str) -> None:
    broken = kernel("broken", rank=9, **{field: f"{HERE}:crashes"})
    table = Table([broken, kernel("sound", score=f"{HERE}:steady")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in (X, X[:3], X.astype(np.float16)):
            for recipe in (MXFP8, NVFP4):
                assert chosen(table, x, recipe) == "sound"
        assert chosen(Table(table.kernels), X) == "sound", "another table does not warn again"
    (warning,) = caught
    assert warning.category is PluginWarning
    assert str(warning.message) == (
        f"kernel 'broken' of plug-in 'acme': its check {HERE}:crashes failed: RuntimeError: driver crashed. BRECCIA_BLOCK=acme "
        "sets the plug-in aside."
    )


def test_a_failing_check_excludes_its_kernel_and_a_failing_estimate_does_not() -> None:
    for field in ("accepts", "available"):
        table = Table([kernel(f"no_{field}", **{field: f"{HERE}:crashes"})])
        with pytest.warns(PluginWarning, match=f"kernel 'no_{field}'"), pytest.raises(NoKernelError) as e:
            chosen(table, X)
        assert f"skipped: its check {HERE}:crashes failed: RuntimeError: driver crashed" in str(e.value)
    table = Table([kernel("no_score", score=f"{HERE}:crashes")])
    with pytest.warns(PluginWarning, match="kernel 'no_score'"):
        assert chosen(table, X) == "no_score"


def test_a_failing_check_raises_once_if_warnings_are_errors() -> None:
    table = Table([kernel("broken", rank=9, accepts=f"{HERE}:crashes"), kernel("sound")])
    with pytest.raises(PluginWarning, match="kernel 'broken' of plug-in 'acme'"):
        chosen(table, X)
    assert chosen(table, X) == "sound"


def test_a_check_of_core_that_fails_names_no_plug_in_to_set_aside() -> None:
    table = Table([kernel("broken", rank=9, accepts=f"{HERE}:crashes", plugin="core"), kernel("sound")])
    with pytest.warns(PluginWarning, match=r"failed: RuntimeError: driver crashed\.$"):
        assert chosen(table, X) == "sound"


@pytest.mark.parametrize("field", ["accepts", "available"])
@pytest.mark.parametrize("said", [True, False, 0, 1, ["reason"], b"reason"], ids=repr)
def test_an_invalid_result_of_a_check_excludes_its_kernel_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, field: str, said: Any
) -> None:
    monkeypatch.setattr(sys.modules[HERE], "opinion", said)
    table = Table([kernel("odd", rank=9, **{field: f"{HERE}:opinionated"}), kernel("sound")])
    fault = f"its check {HERE}:opinionated returned {said!r}; it must be None or a reason"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [chosen(table, X), chosen(table, X, NVFP4)] == ["sound", "sound"]
        found = table.explain(seen("cast", X, None, MXFP8))
    assert [str(w.message) for w in caught] == [
        f"kernel 'odd' of plug-in 'acme': {fault}. BRECCIA_BLOCK=acme sets the plug-in aside."
    ]
    assert found.verdicts[1].reason == fault


@pytest.mark.parametrize("field", ["accepts", "available", "score"])
def test_a_check_whose_module_raises_system_exit_excludes_its_kernel(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    module = f"checks_that_leave_{field}"
    (tmp_path / f"{module}.py").write_text("raise SystemExit('bye')")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = Table([kernel("leaver", rank=9, **{field: f"{module}:check"}), kernel("sound", score=f"{HERE}:steady")])
    with pytest.warns(PluginWarning, match="kernel 'leaver' of plug-in 'acme': .*SystemExit: bye"):
        assert chosen(table, X) == "sound"


def hard(device: Device) -> str | None:
    asked.append(device)
    raise OSError(f"no driver for {device}")


def test_a_device_check_that_raises_runs_once_per_device_with_its_number() -> None:
    sheets = [SimpleNamespace(shape=(4, 32), dtype=np.dtype("float32"), device=Card(n)) for n in (0, 1, 0, 1, 0)]
    table = Table([kernel("fast", rank=1, available=f"{HERE}:hard"), kernel("slow")])
    with pytest.warns(PluginWarning, match="kernel 'fast' .*OSError: no driver for cuda:0"):
        assert [chosen(table, x) for x in sheets] == ["slow"] * 5
    assert asked == [Device("cuda", 0), Device("cuda", 1)]


def test_numpy_arrays_and_their_subclasses_belong_to_numpy() -> None:
    assert framework_of(X) is framework_of(X.view(Fake)) is registry.registry().frameworks["numpy"]
    assert registry.registry().types[Fake] is registry.registry().frameworks["numpy"]
