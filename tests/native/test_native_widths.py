"""Compiled dequantize of every width, of biases and of coded scales, bit for bit, by every instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from native_weights import integer
from records import LONG, OTHERS, READ, TYPES, coded
from weights import replaced, tensor

import breccia
from breccia import GGUFScaling, INTScaling
from breccia.arrays.frameworks import Device
from breccia.codecs import BF16, F16, F32, UINT4, Lookup
from breccia.formats import Format, Level
from breccia_native import availability

if reason := availability.missing(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import decoding, kernels

NATIVE = "native.dequantize"
#: K around strips of 256, groups of 64, and super-blocks.
SHAPES = ((3, 7), (2, 33), (5, 255), (19, 256), (4, 576), (3, 1000), (2, 3, 48), (260, 300))


@pytest.fixture(params=decoding.use())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    decoding.use(request.param)
    yield request.param
    decoding.use(decoding.use()[0])


def check(st: breccia.ScaledTensor) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for x in (st, st.mT):
            expected = breccia.dequantize(x, out_dtype=dtype, prefer="reference.dequantize")
            found = breccia.dequantize(x, out_dtype=dtype, prefer=NATIVE)
            word, nan = f"u{expected.itemsize}", np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(found), nan)
            assert (np.where(nan, 0, expected.view(word)) == np.where(nan, 0, np.asarray(found).view(word))).all()


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("name", READ)
def test_coded_scales_are_decoded_with_the_bits_of_the_generic_algorithm(instructions: str, name: str, wild: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        check(coded(READ[name], shape, seed, wild))


@pytest.mark.parametrize("name", LONG | OTHERS)
def test_records_that_are_not_in_strips_are_left_to_other_kernels(name: str) -> None:
    st = coded((LONG | OTHERS)[name], (9, 320), 0, False)
    found = breccia.explain("dequantize", st)
    assert found.winner is not None and found.winner.name != NATIVE and "skipped: it reads records of" in str(found)
    np.testing.assert_array_equal(breccia.dequantize(st), breccia.dequantize(st, prefer="reference.dequantize"))


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("offset", ["none", "zero_point", "bias"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_every_width_are_decoded_with_the_bits_of_the_generic_algorithm(
    instructions: str, bits: int, offset: str
) -> None:
    for (k, codec), signed in itertools.product(((16, F16), (32, BF16), (12, F32), (None, F32)), (False, True)):
        if (bits == 1 and signed) or (offset == "zero_point" and signed):
            continue
        fmt = Format(integer(bits, signed), (Level(codec, (1, k)),), offset)
        for seed, (n, length) in enumerate(((3, 7), (5, 255), (17, 256), (4, 576))):
            for wild in (False, True):
                check(tensor(fmt, n, length, seed, wild))


def test_tables_of_few_codes_are_looked_up(instructions: str) -> None:
    for values in ((-1.0, 0.0, 1.0, 2.0), (-2.5, -1.25, -0.5, 0.0, 0.0625, 0.75, 1.5, 3.0), (0.0, 2.0**-60)):
        codec = Lookup(f"of {len(values)}", len(values).bit_length() - 1, None, "", values=values)
        for offset in ("none", "bias"):
            fmt = Format(codec, (Level(F16, (1, 32)),), offset)
            check(tensor(fmt, 9, 320))
            check(tensor(fmt, 9, 320, wild=True))


def test_biases_that_are_subnormal_or_negative_zeros_are_flushed_as_the_contract_says(instructions: str) -> None:
    fmt = Format(UINT4, (Level(F32, (1, 16)),), "bias")
    st = tensor(fmt, 6, 256)
    scale, bias = st.scale.copy(), st.zero_point.copy()
    scale[0], scale[1], scale[2, ::2] = 2.0**-126, -(2.0**-120), 0
    bias[0], bias[1], bias[2], bias[3, 1] = 2.0**-130, -0.0, -0.0, np.inf
    check(replaced(st, scale=scale, zero_point=bias))


def test_super_blocks_run_compiled_in_all_frameworks_on_cpus() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    x = np.random.default_rng(1).standard_normal((3, 576)).astype(np.float32)
    for name in TYPES[:-1]:
        st = breccia.cast(np.random.default_rng(0).standard_normal((40, 576)).astype(np.float32), GGUFScaling(type=name))
        values, product = breccia.dequantize(st), breccia.matmul(x, st.mT)
        for framework, convert in (("torch", torch.from_numpy), ("jax", jax.numpy.asarray)):
            there = _converted(st, convert)
            found = breccia.explain("dequantize", there)
            assert found.winner is not None and NATIVE in str(found)
            np.testing.assert_array_equal(np.asarray(breccia.dequantize(there)), values)
            found = breccia.explain("matmul", convert(x), there.mT)
            assert found.winner is not None and found.winner.name == f"{framework}.cpu.matmul"
            np.testing.assert_array_equal(np.asarray(breccia.matmul(convert(x), there.mT)), product)


def _converted(st: breccia.ScaledTensor, convert: Any) -> breccia.ScaledTensor:
    zero_point = None if st.zero_point is None else convert(st.zero_point)
    return breccia.ScaledTensor.from_parts(
        convert(st.data), convert(st.scale), st.recipe, st.layout, zero_point, None, st.axis, st.padding
    )


def test_records_of_other_sizes_are_refused_before_writing() -> None:
    fmt, found = GGUFScaling().format, np.full((2, 256), 7, np.float32)
    st = coded(fmt, (2, 256), 0, False)
    from breccia.internal import Blocks

    good = Blocks(1, 32, st.scale, added=st.zero_point, scale_record=fmt.scale_record, added_record=fmt.offset_record)
    for changed in (
        {"scale": st.scale[:, :-1].copy()}, {"added": st.zero_point[:1].copy()}, {"k": 16}, {"k": 64}, {"m": 2},
        {"scale_record": None}, {"added_record": None}, {"of_bytes": np.ones(256, np.float32)},
    ):  # fmt: skip
        parts = {name: getattr(good, name) for name in good.__slots__} | changed
        with pytest.raises(ValueError, match="wanted rows of codes of 1 to 8 bits, an aligned matrix"):
            kernels._decode(UINT4, st.data, Blocks(**parts), "float32", found, False)
    assert (found == 7).all()
    kernels._decode(UINT4, st.data, good, "float32", found, False)
    np.testing.assert_array_equal(found, breccia.dequantize(st, prefer="reference.dequantize"))


def test_recipes_of_integers_name_their_kernels() -> None:
    for bits in range(1, 9):
        st = breccia.cast(np.ones((16, 64), np.float32), INTScaling(bits, 32, signed=bits > 1))
        for op, operands in (("dequantize", (st,)), ("matmul", (np.ones((1, 64), np.float32), st.mT))):
            found = breccia.explain(op, *operands)
            assert found.winner is not None and found.winner.name == f"native.{op}"
