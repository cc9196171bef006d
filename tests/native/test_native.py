"""Compiled microkernels: numbers around every code, mismatched sizes, and a build without a compiler.

That casts by them write the bytes of the generic algorithm is shown in test_numpy_kernels.py, beside NumPy's own loops.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fresh import printed
from recipes import is_exact, recipe_id

import breccia
from breccia.arrays.frameworks import Device
from breccia.arrays.ops import NUMPY
from breccia.codecs import CODECS, E2M1, E4M3, INT4, INT8, NF4, UINT4, UINT8, Integer, Minifloat
from breccia.kernels.numpy.codes import NEAREST, FloatCodes, IntegerCodes, code_writer
from breccia_native import availability

if reason := availability.missing(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import kernels, microkernels

#: Codecs whose codes NumPy's kernels compute, so that compiled microkernels may.
COMPUTED = [c for c in CODECS if isinstance(c, Minifloat | Integer) and code_writer(c) is not None]


def around_every_code(codec: Minifloat | Integer) -> np.ndarray:
    """All values of the codec, the ties between them, their FP32 neighbours, and numbers beyond the largest."""
    values = np.unique([v for code in range(1 << codec.bits) if np.isfinite(v := codec.value(code))]).astype(np.float32)
    ties = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(y, np.float32(end)) for y in (values, ties) for end in (-np.inf, np.inf)]
    beyond = np.array([1.01, 1.1, 2, 1e30], np.float32) * values[-1]
    y = np.concatenate([values, ties, *beside, beyond, -beyond, np.array([0.0, -0.0, 2.0**-126], np.float32)])
    return y.astype(np.float32)


@pytest.mark.parametrize("codec", COMPUTED, ids=lambda c: c.name)
@pytest.mark.parametrize("k", [1, 7, 16, 32, 128, 1025])
@pytest.mark.parametrize("divides", [False, True])
def test_microkernels_round_numbers_around_every_code_as_the_codec_does(
    codec: Minifloat | Integer, k: int, divides: bool
) -> None:
    y = np.resize(around_every_code(codec), 5 * k * 7)
    inverse = np.ones(35, np.float32)
    inverse[3::5] = 0
    inverse[4::5] = 3 if divides else 0.5
    each = inverse.repeat(k)
    with np.errstate(all="ignore"):
        scaled = np.where(each == 0, np.float32(0), y / each if divides else y * each)
    with np.errstate(all="ignore"):
        expected = codec.encode(NUMPY, scaled)
    codes = np.full(y.size, 0xAA, np.uint8)
    writer = FloatCodes(codec) if isinstance(codec, Minifloat) else IntegerCodes(codec)
    write = kernels._scaled(writer, divides)
    assert write is not None
    write(y, inverse, k, codes)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("codec", [INT4, UINT4, INT8, UINT8], ids=lambda c: c.name)
@pytest.mark.parametrize("k", [1, 7, 16, 32, 129])
def test_microkernels_shift_numbers_before_and_codes_after_they_are_scaled(codec: Integer, k: int) -> None:
    made = np.random.default_rng(2)
    blocks = 40
    y = made.integers(-600, 600, (blocks, k)).astype(np.float32) / 4  # many ties
    inverse = np.exp2(made.integers(-2, 2, blocks)).astype(np.float32)
    inverse[3] = 0
    before = made.integers(-64, 64, blocks).astype(np.float32)
    after = made.integers(0, int(codec.high) + 1, blocks).astype(np.float32)
    expected = codec.encode(NUMPY, (y - before[:, None]) * inverse[:, None], None, after[:, None]).astype(np.uint8)
    expected[3] = 0
    codes = np.full(y.size, 0xAA, np.uint8)
    writer = IntegerCodes(codec)
    kernels._shifted(writer, y.reshape(-1), inverse, before, after, k, codes)
    np.testing.assert_array_equal(codes.reshape(blocks, k), expected)


@pytest.mark.parametrize("k", [1, 5, 16, 32, 33, 128, 4096])
def test_extremes_are_over_numbers_where_those_below_the_normal_ones_are_zero(k: int) -> None:
    x = np.random.default_rng(3).standard_normal((9, k)).astype(np.float32)
    x[1], x[2], x[3] = -np.abs(x[1]) - 1, np.abs(x[2]) + 1, -0.0
    x[4] = np.float32(2.0**-127)
    x[5] *= np.float32(2.0**-125)
    low, high = (np.empty(9, np.float32) for _ in range(2))
    microkernels.extremes(x, k, low, high)
    clean = np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x)
    np.testing.assert_array_equal(low.view(np.uint32), clean.min(1).view(np.uint32))
    np.testing.assert_array_equal(high.view(np.uint32), clean.max(1).view(np.uint32))


def test_a_block_without_a_usable_scale_has_zero_codes() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -1.0] * 8, np.float32)
    codes = np.full(32, 0xAA, np.uint8)
    write = kernels._scaled(FloatCodes(E4M3))
    assert write is not None
    write(x, np.zeros(1, np.float32), 32, codes)
    assert not codes.any()


@pytest.mark.parametrize("k", [1, 5, 16, 32, 33, 128, 4096])
def test_amax_is_over_magnitudes_including_nan_and_inf(k: int) -> None:
    bits = np.random.default_rng(k).integers(0, 1 << 32, 8 * k, dtype=np.uint32)
    found = np.zeros(8, np.uint32)
    microkernels.amax(bits.view(np.float32), k, found)
    np.testing.assert_array_equal(found, (bits & 0x7FFFFFFF).reshape(8, k).max(axis=1))


#: The number of each 16-bit dtype in C.
KINDS = [("bfloat16", 16), ("float16", -16)]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_16_bit_number_is_loaded_as_its_fp32_value(name: str, kind: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    found = np.empty(1 << 16, np.float32)
    microkernels.load(halves.reshape(1, -1), kind, 1 << 16, found)
    expected = halves.view(dtype_of(name)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_fp32_numbers_are_stored_to_nearest_ties_to_even(name: str, kind: int) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(name)).astype(np.float32)
    bits = values[np.isfinite(values)].view(np.uint32)
    half = {"bfloat16": 1 << 15, "float16": 1 << 12}[name]  # of the distance between normal numbers
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    tiny = np.float32(2.0**-25) * np.arange(-4096, 4096, dtype=np.float32)  # ties of FP16's subnormal numbers
    words = [bits + np.uint32(d % (1 << 32)) for d in (-1, 0, 1, half - 1, half, half + 1)]
    x = np.concatenate([*words, random, tiny.view(np.uint32)]).view(np.float32)
    found = np.empty(x.size, np.uint16)
    microkernels.store(x, kind, found)
    with np.errstate(all="ignore"):
        expected = x.astype(dtype_of(name)).view(np.uint16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["rows", "columns", "steps", "backwards"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (15, 33), (33, 15), (48, 64), (3, 100), (100, 3)])
def test_matrices_of_any_order_are_loaded_with_zeros_after_them(shape: tuple[int, int], order: str, dtype: str) -> None:
    rows, columns = shape
    numbers = np.random.default_rng(1).standard_normal((2 * rows, 3 * columns)).astype(dtype_of(dtype))
    numbers = numbers.view(np.uint32 if dtype == "float32" else np.uint16)
    x = {
        "rows": numbers[:rows, :columns],
        "columns": np.ascontiguousarray(numbers[:rows, :columns].T).T,
        "steps": numbers[::2, ::3],
        "backwards": numbers[rows - 1 :: -1, columns - 1 :: -1],
    }[order][:rows, :columns]
    found = np.full((rows + 2, columns + 5), np.nan, np.float32)
    microkernels.load(x, {"float32": 32, "bfloat16": 16, "float16": -16}[dtype], columns + 5, found)
    expected = np.zeros_like(found)
    expected[:rows, :columns] = np.ascontiguousarray(x).view(dtype_of(dtype)).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_matrices_that_do_not_fit_are_refused_before_writing() -> None:
    found = np.ones((4, 8), np.float32)
    x = np.zeros((4, 8), np.float32)
    unaligned = np.zeros(4 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 8)
    for values, kind, columns in (
        (x, 32, 7), (x, 16, 8), (x[0], 32, 8), (np.zeros((5, 8), np.float32), 32, 8), (x, 32, 0), (unaligned, 32, 8),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"wanted an aligned matrix of numbers of \d bytes and room for it in rows of \d"):
            microkernels.load(values, kind, columns, found)
    with pytest.raises(ValueError, match="wanted aligned FP32 numbers, and room for as many of 2 bytes; got 128 and 62 bytes"):
        microkernels.store(x, 16, np.zeros(31, np.uint16))
    with pytest.raises(TypeError, match="read-write bytes-like object"):
        microkernels.load(x, 32, 8, found[:, :4])
    assert (found == 1).all()


def test_packed_pairs_have_the_first_code_in_the_low_nibble() -> None:
    codes = np.random.default_rng(0).integers(0, 16, 2 * 333, dtype=np.uint8)
    data = np.zeros(333, np.uint8)
    microkernels.pairs(codes, data)
    np.testing.assert_array_equal(data, codes[::2] | codes[1::2] << 4)


@pytest.mark.parametrize("instructions", microkernels.use())
@pytest.mark.parametrize("codec", [E2M1, INT4, NF4], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_room_for_half_as_many_codes_is_filled_with_pairs(instructions: str, codec: Any, dtype: str) -> None:
    """Random bits, numbers around every code, and blocks without a scale; in lengths around every vector."""
    writer, rng = code_writer(codec), np.random.default_rng(0)
    assert writer is not None
    microkernels.use(instructions)
    for k, blocks in itertools.product((2, 16, 32, 48, 64, 128), (1, 3, 4, 9, 67)):
        n = k * blocks
        x = rng.integers(0, 1 << 32, n, np.uint32).view(np.float32)
        x[::3] = rng.integers(-64, 65, len(x[::3])) / np.float32(8)
        with np.errstate(all="ignore"):
            source = x.astype(dtype_of(dtype))
        source = source.view(np.uint16) if dtype == "bfloat16" else source
        inverse = rng.choice(np.array([0, 1, 0.5, 3.7, np.inf, 1e-30], np.float32), blocks)
        for write, dither in itertools.product(
            (kernels._scaled(writer), kernels._scaled(writer, True)), (NEAREST, (7, 3, n, n))
        ):
            codes, found = np.empty(n, np.uint8), np.empty(n // 2 + 1, np.uint8)
            found[-1] = 0xAA
            write(source, inverse, k, codes, dither)
            write(source, inverse, k, found[:-1], dither)
            np.testing.assert_array_equal(found[:-1], codes[::2] | codes[1::2] << 4)
            assert found[-1] == 0xAA
    microkernels.use(microkernels.use()[0])


def test_buffers_of_mismatched_sizes_are_refused_before_writing() -> None:
    x, per_block, codes = np.ones(64, np.float32), np.ones(2, np.float32), np.full(64, 7, np.uint8)
    fields = (0, 0, 0, 0, 0)
    wanted = r"aligned FP32 numbers in blocks of k = {} and one number a block; got {} and {} bytes. Call breccia.cast"
    for source, inverse, k in (
        (x, per_block, 31),
        (x, per_block, 0),
        (x, per_block, -1),
        (x[:63], per_block, 32),
        (x, per_block[:1], 32),
    ):
        with pytest.raises(ValueError, match=wanted.format(k, source.nbytes, inverse.nbytes)):
            microkernels.floats(source, inverse, k, False, codes, *fields)
        with pytest.raises(ValueError, match="in blocks of k"):
            microkernels.integers(source, inverse, k, True, codes, 0.0, 1.0, 1.0, 15)
        with pytest.raises(ValueError, match="in blocks of k"):
            microkernels.amax(source, k, inverse.view(np.uint32))
        with pytest.raises(ValueError, match="in blocks of k"):
            microkernels.extremes(source, k, inverse, np.ones(2, np.float32))
        with pytest.raises(ValueError, match="in blocks of k"):
            microkernels.shifted(source, inverse, per_block, per_block, k, codes, 0.0, 1.0, 1.0, 15)
    with pytest.raises(ValueError, match="got 256 and 4 bytes"):
        microkernels.shifted(x, per_block, per_block, per_block[:1], 32, codes, 0.0, 1.0, 1.0, 15)
    odd = np.frombuffer(bytes(257), np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="aligned FP32 numbers"):
        microkernels.floats(odd, per_block, 32, False, codes, *fields)
    with pytest.raises(ValueError, match="wanted room for 64 codes, one a byte; got 63 bytes"):
        microkernels.floats(x, per_block, 32, False, codes[:63], *fields)
    with pytest.raises(ValueError, match="wanted room for 64 codes, one a byte; got 32 bytes"):
        microkernels.shifted(x, per_block, per_block, per_block, 32, codes[:32], 0.0, 1.0, 1.0, 15)
    with pytest.raises(ValueError, match="wanted room for 62 codes"):
        microkernels.pairs(codes, np.zeros(31, np.uint8))
    with pytest.raises((TypeError, BufferError, ValueError), match="read-only|read-write|contiguous"):
        microkernels.pairs(codes, bytes(32))
    assert (codes == 7).all()


def test_unaligned_arrays_cast_to_the_same_bytes(recipe: breccia.ScalingRecipe) -> None:
    raw = np.zeros(4 * 64 * 300 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(64, 300)
    x[:] = np.random.default_rng(0).standard_normal((64, 300))
    assert not x.flags.aligned
    assert breccia.bytes_equal(kernels.cast(x, recipe), breccia.cast(x.copy(), recipe, prefer="reference.cast")), recipe_id(
        recipe
    )


def cast_by(explained: breccia.Explanation) -> set[str]:
    """The `cast` kernels in a call's plan."""
    found: set[str] = set()
    for step in explained.plan:
        if step.winner is not None and step.winner.op == "cast":
            found.add(step.winner.name)
        found |= cast_by(step)
    return found


def test_ops_that_include_a_cast_use_the_compiled_kernels(recipe: breccia.ScalingRecipe) -> None:
    x = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    st = breccia.cast(x, breccia.Float8BlockScaling(), prefer="reference.cast")
    for op, operand, options in (
        ("requantize", st, {}),
        ("cast_ste", x, {"axis": -2}),
        ("cast_ste_clipped", x, {"clip": "scale"}),
    ):
        verb, target = getattr(breccia, op), breccia.MXFP8BlockScaling() if op == "cast_ste_clipped" else recipe
        explained = breccia.explain(op, operand, target)
        assert explained.winner is not None and explained.winner.name == f"composite.{op.removesuffix('_clipped')}"
        renamed = op == "requantize" and is_exact(st.recipe, target)
        assert cast_by(explained) == (set() if renamed else {"native.cast"})
        found = verb(operand, target, **options)
        if op == "requantize":
            assert breccia.bytes_equal(found, breccia.requantize(st, target, prefer="reference.requantize"))
        else:
            cast = breccia.cast(x, target, axis=options.get("axis", -1), prefer="reference.cast")
            expected = breccia.dequantize(cast, prefer="reference.dequantize")
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.long
def test_numpy_arrays_and_torch_tensors_use_the_compiled_kernels() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    found = breccia.explain("cast", x, breccia.NVFP4BlockScaling())
    assert found.winner is not None and found.winner.name == "native.cast"
    script = (
        "import breccia, torch; breccia.cast(torch.ones(64, 256), breccia.NVFP4BlockScaling());"
        "import sys; print('breccia_native.microkernels' in sys.modules)"
    )
    assert printed(script) == "True\n"
    st = breccia.cast(torch.from_numpy(x), breccia.NVFP4BlockScaling())
    assert st.digest() == breccia.cast(x, breccia.NVFP4BlockScaling(), prefer="reference.cast").digest()


def test_without_the_compiled_extension_the_numpy_kernels_run_and_explain_says_why(tmp_path: Path) -> None:
    """The distribution without its compiled extension: only the Python files."""
    package = tmp_path / "breccia_native"
    package.mkdir()
    for path in Path(availability.__file__).parent.glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import breccia, numpy as np\n"
        "x = np.ones((4, 64), np.float32)\n"
        "print(breccia.explain('cast', x, breccia.MXFP8BlockScaling()))\n"
        "print(breccia.cast(x, breccia.MXFP8BlockScaling()).shape)"
    )
    said = printed(script)
    assert " -> numpy.cast" in said and said.endswith("(4, 64)\n")
    assert "breccia-native was built without a C compiler; install one and reinstall breccia-native" in said
