"""Compiled casts and `dequantize` against the generic algorithm, on every instruction set, and arguments they must refuse."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from repeated_codes import REPEATED

import breccia
from breccia.arrays.frameworks import Device
from breccia.arrays.ops import NUMPY
from breccia.backend import Metadata, components
from breccia.codecs import E2M1, E2M3, E3M2, E4M3, E5M2, INT4, INT8, MXINT8, NF4, UINT4, UINT8, Codec, Integer, Lookup
from breccia.errors import LayoutError, ShapeError, UnsupportedError
from breccia.kernels.numpy import columns
from breccia.kernels.numpy.codes import Blocks, FloatCodes, code_writer
from breccia.testing import oracle
from breccia_native import availability

if reason := availability.missing(Device("cpu")):
    pytest.skip(reason, allow_module_level=True)

from breccia_native import decoding, kernels, microkernels

SETS = microkernels.use()
#: Lengths at and around the widths of vectors, of a strip, and of the rows that are transposed together.
LENGTHS = sorted({n + d for n in (1, 4, 8, 16, 32, 64, 256, 512) for d in (-1, 0, 1) if n + d > 0} | {300, 1000})
ELEMENTS = [E4M3, E5M2, E2M1, E2M3, E3M2, INT4, UINT4, INT8, UINT8, MXINT8, NF4, REPEATED]


@pytest.fixture(params=[SETS[0], *(pytest.param(name, marks=pytest.mark.long) for name in SETS[1:])])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of one instruction set."""
    for module in (microkernels, decoding):
        module.use(request.param)
    yield request.param
    for module in (microkernels, decoding):
        module.use(SETS[0])


def numbers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Half random bit patterns without NaN and Inf, half normal numbers, by row."""
    made = np.random.default_rng(seed)
    bits = made.integers(0, 1 << 32, shape, dtype=np.uint32)
    bits = np.where(bits & 0x7F800000 == 0x7F800000, bits ^ 0x00800000, bits).astype(np.uint32)
    rows = made.random((*shape[:-1], 1)) < 0.5
    with np.errstate(all="ignore"):
        return np.where(rows, bits.view(np.float32), made.standard_normal(shape, np.float32)).astype(dtype)


# ------------------------------------------------------------------------------------------------ microkernels


@pytest.mark.parametrize("first", [0, 5, 2**32 - 100, 2**40 + 3])
def test_random_words_are_those_of_the_oracle(instructions: str, first: int) -> None:
    seed, found = 0x0123456789ABCDEF, np.empty(200, np.uint32)
    microkernels.words(seed, first, found)
    assert found.tolist() == [oracle.random_word(seed, first + i) for i in range(200)]


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
@pytest.mark.parametrize("k", [1, 7, 16, 32, 300])
def test_codes_are_rounded_stochastically_as_the_codec_does(instructions: str, codec: Codec, k: int) -> None:
    x = np.random.default_rng(k).standard_normal((6, 7, k)).astype(np.float32) * np.float32(codec.max / 2)
    x[0, 0] = codec.max
    x[0, 1:3] *= 2.0**-20
    inverse = np.ones((6, 7, 1), np.float32)
    inverse[2, 3], inverse[1] = 0, 0.75
    words = np.array([[oracle.random_word(99, 1000 + 50 * 7 * k * r + i) for i in range(7 * k)] for r in range(6)], np.uint32)
    expected = codec.encode(NUMPY, np.where(inverse == 0, np.float32(0), x * inverse), words.view(np.int32).reshape(x.shape))
    if isinstance(codec, Lookup):  # the generic algorithm does not round blocks without a scale
        expected = np.where(inverse == 0, codec.encode(NUMPY, np.zeros(1, np.float32)), expected)
    write, codes = kernels._scaled(code_writer(codec)), np.full(x.size, 0xAA, np.uint8)
    write(x.reshape(-1), inverse.reshape(-1), k, codes, (99, 1000, 7 * k, 50 * 7 * k))
    np.testing.assert_array_equal(codes.reshape(x.shape), expected)


@pytest.mark.parametrize("codec", [NF4, REPEATED], ids=lambda c: c.name)
@pytest.mark.parametrize("k", [1, 7, 16, 32, 300])
def test_table_codes_are_rounded_to_nearest_as_the_codec_does(instructions: str, codec: Lookup, k: int) -> None:
    values = np.array(sorted(codec.values), np.float32)
    ties = (values[1:] + values[:-1]) / 2
    around = [np.nextafter(y, np.float32(end)) for y in (values, ties) for end in (-9, 9)]
    x = np.resize(np.concatenate([values, ties, *around, [-0.0, 5, -5]]).astype(np.float32), 9 * k)
    inverse = np.array([1, 1, 0.5, 0, 2, 1, 1, 1, 0], np.float32)
    expected = codec.encode(NUMPY, np.where(inverse[:, None] == 0, np.float32(0), x.reshape(9, k) * inverse[:, None]))
    codes = np.full(x.size, 0xAA, np.uint8)
    kernels._scaled(code_writer(codec))(x, inverse, k, codes)
    np.testing.assert_array_equal(codes.reshape(9, k), expected)


@pytest.mark.parametrize("codec", [UINT4, INT8], ids=lambda c: c.name)
@pytest.mark.parametrize("k", [7, 32, 128, 300])
def test_shifted_codes_are_rounded_stochastically_as_the_codec_does(instructions: str, codec: Integer, k: int) -> None:
    made = np.random.default_rng(k)
    x = made.standard_normal((9, k)).astype(np.float32) * 10
    inverse = np.ldexp(1.0, made.integers(-2, 2, 9)).astype(np.float32)
    before, after = made.integers(-9, 9, 9).astype(np.float32), made.integers(0, 8, 9).astype(np.float32)
    words = np.array([oracle.random_word(3, i) for i in range(9 * k)], np.uint32).view(np.int32).reshape(9, k)
    expected = codec.encode(NUMPY, (x - before[:, None]) * inverse[:, None], words, after[:, None])
    codes = np.full(x.size, 0xAA, np.uint8)
    kernels._shifted(code_writer(codec), x.reshape(-1), inverse, before, after, k, codes, (3, 0, 9 * k, 9 * k))
    np.testing.assert_array_equal(codes.reshape(9, k), expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("k", [1, 7, 16, 32, 128, 300, 1000])
def test_16_bit_sources_are_read_as_their_fp32_values(instructions: str, dtype: Any, k: int) -> None:
    x = numbers((7, k), k, dtype)
    wide, given = x.astype(np.float32).reshape(-1), (x if dtype is np.float16 else x.view(np.uint16)).reshape(-1)
    for step in (kernels._amax, kernels._extremes):
        found = [[np.empty(7, np.uint32) for _ in range(1 if step is kernels._amax else 2)] for _ in range(2)]
        step(wide, k, *found[0])
        step(given, k, *found[1])
        np.testing.assert_array_equal(found[0], found[1])
    inverse = np.linspace(0, 2, 7, dtype=np.float32)
    for codec, dither in itertools.product((E4M3, INT4, NF4), ((0, 0, 0, 0), (5, 6, k, k))):
        codes = np.full((2, x.size), 0xAA, np.uint8)
        for source, row in zip((wide, given), codes, strict=True):
            kernels._scaled(code_writer(codec))(source, inverse, k, row, dither)
        np.testing.assert_array_equal(codes[0], codes[1])


def test_packed_codes_of_6_bits_begin_in_the_low_bits(instructions: str) -> None:
    codes = np.random.default_rng(0).integers(0, 64, 4 * 37, dtype=np.uint8)
    data = np.zeros(3 * 37, np.uint8)
    microkernels.sixes(codes, data)
    bits = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, :6].reshape(-1)
    np.testing.assert_array_equal(data, np.packbits(bits, bitorder="little"))


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_eights_of_codes_are_packed_from_the_low_bits_on(instructions: str, bits: int, groups: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, 8 * groups).astype(np.uint8)
    data = np.full(bits * groups + 8, 0xAA, np.uint8)
    microkernels.eights(codes, bits, data[: bits * groups])
    number = sum(int(code) << bits * i for i, code in enumerate(codes))
    assert data.tobytes() == number.to_bytes(bits * groups, "little") + b"\xaa" * 8


@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
def test_codes_are_decoded_at_every_length_in_either_orientation(instructions: str, codec: Codec) -> None:
    for length in LENGTHS:
        check_decoded(codec, length, 17)


@pytest.mark.parametrize("rows", [1, 15, 255, 256, 257, 513])
@pytest.mark.parametrize("codec", [E2M1, E2M3, E4M3], ids=lambda c: c.name)
def test_codes_of_many_rows_are_decoded_in_either_orientation(instructions: str, codec: Codec, rows: int) -> None:
    for length in (20, 257):
        check_decoded(codec, length, rows)


def check_decoded(codec: Codec, length: int, rows: int) -> None:
    made, count = np.random.default_rng(length), {4: 2, 6: 4, 8: 1}[codec.bits]
    codes = made.integers(0, 1 << codec.bits, (rows, -(-length // count) * count), dtype=np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., : codec.bits].reshape(rows, -1)
    data = np.packbits(bits, axis=1, bitorder="little")
    k = int(made.choice([16, 32, 5, 128, length]))
    scale = made.standard_normal((rows, -(-length // k)), np.float32)
    table = np.array(codec.table, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = table[codes][:, :length] * scale.repeat(k, axis=1)[:, :length] * np.float32(3)
    blocks = Blocks(1, k, scale, global_scale=3.0)
    for name, dtype in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        word = np.uint32 if name == "float32" else np.uint16
        with np.errstate(all="ignore"):
            wanted = expected.astype(dtype)
        for turned, stream in itertools.product((False, True), repeat=2):
            found = np.zeros((length, rows) if turned else (rows, length), word)
            kernels._decode(codec, data, blocks, name, found.T if turned else found, stream)
            got = np.ascontiguousarray(found.T if turned else found).view(dtype)
            both = np.isnan(wanted) & np.isnan(got)
            np.testing.assert_array_equal(np.where(both, 0, got.view(word)), np.where(both, 0, np.array(wanted).view(word)))


def test_blocks_are_offset_halved_divided_and_added_to_in_the_order_of_the_contract(instructions: str) -> None:
    made = np.random.default_rng(7)
    codes, scale = made.integers(0, 256, (6, 96), dtype=np.uint8), made.integers(0, 4, (3, 3), dtype=np.uint8)
    of_bytes = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127).astype(np.float32)
    of_bytes[0] = of_bytes[1]
    less, more = made.standard_normal((2, 3, 3)).astype(np.float32) * np.float32(2.0**-118)
    less = np.abs(less) * np.float32(2.0**118)

    def each(a: np.ndarray) -> np.ndarray:
        return a.repeat(2, axis=0).repeat(32, axis=1)

    values = codes.astype(np.int8).astype(np.float32) - each(less)
    values = np.where(each(scale) == 0, values * np.float32(0.5), values) * each(of_bytes[scale]) / np.float32(0.75)
    values = np.where(np.abs(values) < 2.0**-126, np.float32(0), values)
    values += np.where(np.abs(each(more)) < 2.0**-126, np.float32(0), each(more))
    found = np.empty((6, 96), np.float32)
    blocks = Blocks(2, 32, scale, of_bytes, True, less, more, 0.75, True)
    kernels._decode(INT8, codes, blocks, "float32", found, False)
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


# ------------------------------------------------------------------------------------------------ ops


def settings(recipe: breccia.ScalingRecipe) -> list[dict[str, Any]]:
    st = breccia.cast(numbers((48, 320), 1), recipe, prefer="reference.cast")
    given = {"scale": st.scale if st.global_scale is None else st.global_scale}
    draws = {"rounding": "stochastic", "seed": (1 << 63) + 12345}
    return [{}, draws, {"axis": -2, **draws}, given, {**given, **draws}]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_casts_write_the_bytes_of_the_generic_algorithm(recipe: breccia.ScalingRecipe, instructions: str, dtype: Any) -> None:
    x = numbers((48, 320), 1, dtype)
    for options in settings(recipe):
        found = breccia.cast(x, recipe, prefer="native.cast", **options)
        assert breccia.bytes_equal(found, breccia.cast(x, recipe, prefer="reference.cast", **options)), options


@pytest.mark.parametrize("shape", [(33, 77), (3, 40, 130), (5, 4096), (1, 1), (2, 300000)])
def test_stochastic_bytes_depend_neither_on_chunks_nor_on_threads(shape: tuple[int, ...]) -> None:
    x = numbers(shape, 5)
    x.flat[-1] = np.nan  # one chunk is the generic algorithm's
    before = breccia.get_num_threads()
    try:
        for recipe in map(breccia.recipe, ("fp8_current", "mxfp8", "nvfp4", "int4", "nf4", "int4_bias")):
            options: dict[str, Any] = {"rounding": "stochastic", "seed": 7}
            expected = breccia.cast(x, recipe, prefer="reference.cast", **options)
            for threads in (1, 2, 3):
                breccia.set_num_threads(threads)
                assert breccia.bytes_equal(breccia.cast(x, recipe, **options), expected), (recipe, threads)
    finally:
        breccia.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_dequantize_writes_the_bits_of_the_generic_algorithm_with_and_without_out(
    recipe: breccia.ScalingRecipe, instructions: str, axis: int, dtype: str
) -> None:
    st = breccia.cast(numbers((48, 320), 2), recipe, axis=axis, prefer="reference.cast")
    expected = breccia.dequantize(st, out_dtype=dtype, prefer="reference.dequantize")
    out = np.empty(expected.shape, expected.dtype)
    word = f"u{expected.itemsize}"
    assert breccia.dequantize(st, out_dtype=dtype, out=out, prefer="native.dequantize") is out
    for found in (out, breccia.dequantize(st, out_dtype=dtype, prefer="native.dequantize")):
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(word), np.ascontiguousarray(expected).view(word))


@pytest.mark.parametrize("codec", [E4M3, E5M2, E2M3, E3M2], ids=lambda c: c.name)
def test_minifloats_of_8_and_6_bits_are_decoded_without_a_table(codec: Codec) -> None:
    """Their FP32 numbers, NaN and Inf included, are those that decoding.c computes, which is faster."""
    assert kernels._element(codec)[1][0] == kernels._MINIFLOAT


SCALES = ("usual", "of any bits", "zero, NaN or Inf")


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    "recipe",
    [
        *(
            "fp8_row", "fp8_block", "fp8_current", "mxfp8", "mxfp8,fp8_format=E5M2", "mxfp6",
            "mxfp6,fp6_format=E3M2", "mxfp4", "nvfp4",
        ),
        *("int4", "int4,signed=false,symmetric=false", "int8", "int8,signed=false,symmetric=false", "mxint8", "nf4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_codes_under_any_scales_are_decoded_to_any_address(
    recipe: str, dtype: str, scales: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of every kind in rows of whole and partial strips; results past the caches and not, in lines and across them."""
    made, shape = np.random.default_rng(len(recipe)), (24, 1536 + 96)
    plain = breccia.cast(made.standard_normal(shape, np.float32), recipe)
    data = made.integers(0, 256, plain.data.shape, dtype=np.uint8)
    data[: len(data) // 2] = plain.data[: len(data) // 2].view(np.uint8)  # rows without NaN codes
    scale = plain.scale.copy()
    bits = scale.reshape(-1).view(f"u{scale.itemsize}")
    if scales == SCALES[1]:
        bits[...] = made.integers(0, np.iinfo(bits.dtype).max, bits.shape, dtype=bits.dtype, endpoint=True)
    elif scales == SCALES[2]:
        top = {1: (0, 0x7F, 0xFF), 2: (0, 0x7C00, 0x7E00), 4: (0, 0x7F800000, 0x7FC00000)}[scale.itemsize]
        bits[made.random(bits.shape) < 0.1] = made.choice(np.array(top, bits.dtype))
    st = breccia.ScaledTensor(
        data.view(plain.data.dtype), scale, plain.recipe, plain.layout, plain.zero_point, plain.global_scale
    )
    expected = breccia.dequantize(st, out_dtype=dtype, prefer="reference.dequantize")
    word = f"u{expected.itemsize}"
    for streamed, offset in itertools.product((0, 1 << 40), (0, 16, 4)):
        monkeypatch.setattr("breccia.kernels.numpy.decoding._STREAMED", streamed)
        room = np.zeros(expected.nbytes + 192, np.uint8)
        start = -room.ctypes.data % 64 + offset
        out = room[start : start + expected.nbytes].view(expected.dtype).reshape(expected.shape)
        breccia.dequantize(st, out_dtype=dtype, out=out, prefer="native.dequantize")
        p, q = expected.view(word), out.view(word)
        assert ((p == q) | (np.isnan(expected) & np.isnan(out))).all()
        assert not room[:start].any() and not room[start + expected.nbytes :].any()


@pytest.mark.parametrize("bits", range(1, 8))
def test_columns_of_codes_are_packed_down_the_rows(instructions: str, bits: int) -> None:
    group = 8 // math.gcd(bits, 8)
    for groups, n in ((1, 1), (3, 67), (2, 300)):
        codes = np.random.default_rng(n).integers(0, 1 << bits, (group * groups, n), dtype=np.uint8)
        places = codes.T[..., None] >> np.arange(bits, dtype=np.uint8) & 1
        data = np.full((group * groups * bits // 8, n), 0xAA, np.uint8)
        microkernels.down(codes, bits, data)
        np.testing.assert_array_equal(data.T, np.packbits(places.reshape(n, -1), axis=-1, bitorder="little"))


@pytest.mark.parametrize("sense", ["multiplier", "divisor", "amax"])
@pytest.mark.parametrize("shape", [(4, 64), (64, 4096)])
def test_global_scales_are_written_in_every_convention(sense: str, shape: tuple[int, ...]) -> None:
    recipe = breccia.NVFP4BlockScaling(global_sense=sense)
    for x in (numbers(shape, 3), np.zeros(shape, np.float32), np.full(shape, 2.0**-126, np.float32)):
        found = breccia.cast(x, recipe, prefer="native.cast")
        assert breccia.bytes_equal(found, breccia.cast(x, recipe, prefer="reference.cast"))


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=["E2M1", "E4M3"])
@pytest.mark.parametrize("k", [1, 3, 16, 512, 8192, 10000])
def test_one_pass_writes_what_three_write(k: int, element: Codec, instructions: str) -> None:
    writer, by = code_writer(E4M3), code_writer(element)
    assert isinstance(writer, FloatCodes) and isinstance(by, FloatCodes)
    fields = [(one.floor, one.lift, one.largest, one.shift, one.sign) for one in (writer, by)]
    x = np.random.default_rng(k).standard_normal(12 * max(1, 8192 // k) * k, np.float32)
    inverses = 1 / np.arange(1, 257, dtype=np.float32)
    count, amax = x.size // k, np.empty(x.size // k, np.uint32)
    inverse, scales, codes = np.empty(count, np.float32), np.empty((2, count), np.uint8), np.empty(x.size, np.uint8)
    microkernels.amax(x, k, amax)
    microkernels.scales(amax.view(np.float32), 6.0, 0.5, *fields[0], inverses, scales[0], inverse)
    microkernels.floats(x, inverse, k, False, codes, *fields[1])
    packed = k % 2 == 0 and element.bits == 4
    found = np.empty(x.size // 2 if packed else x.size, np.uint8)
    largest = microkernels.blocks(x, k, 32, 6.0, 0.5, fields[0], inverses, fields[1], scales[1], found)
    assert largest == amax.max() and scales[0].tobytes() == scales[1].tobytes()
    assert found.tobytes() == (codes[::2] | codes[1::2] << 4 if packed else codes).tobytes()


#: Recipes whose blocks are cast in one pass: under scales of E4M3, with a global one and without.
IN_ONE_PASS = [
    breccia.NVFP4BlockScaling(),
    breccia.NVFP4BlockScaling(global_sense="divisor"),
    breccia.NVFP4BlockScaling(two_level=False),
]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("made", IN_ONE_PASS, ids=lambda recipe: recipe.spec)
def test_blocks_that_are_cast_in_one_pass_have_the_bytes_of_the_generic_algorithm(
    made: breccia.ScalingRecipe, dtype: Any, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ordinary numbers, and of those for which more is needed: NaN, Inf, magnitudes above 2^100, partial blocks."""
    calls: list[int] = []
    real = microkernels.blocks

    def blocks(*arguments: Any) -> int:
        calls.append(real(*arguments))
        return calls[-1]

    monkeypatch.setattr(microkernels, "blocks", blocks)
    ordinary = np.random.default_rng(0).standard_normal((300, 512), np.float32)
    ordinary[7], ordinary[8] = 0, 2.0**-130
    others = numbers((300, 512), 1)
    spoiled = ordinary.copy()
    spoiled[3, 5], spoiled[200, 511], spoiled[9, 9] = np.nan, np.inf, 2.0**101
    with np.errstate(all="ignore"):
        arrays = [x.astype(dtype) for x in (ordinary, others, spoiled, ordinary[:, :500], ordinary[::2])]
    for x in arrays:
        for scale in (0.01, 2.0**-70) if made.format.global_scale else (None,):
            options: dict[str, Any] = {} if scale is None else {"scale": np.float32(scale)}
            found = breccia.cast(x, made, prefer="native.cast", **options)
            assert breccia.bytes_equal(found, breccia.cast(x, made, prefer="reference.cast", **options))
    assert calls and max(calls) > np.float32(2.0**100).view(np.uint32) > min(calls)


@pytest.mark.parametrize("framework", ["torch", "mlx.core"])
def test_stochastic_casts_run_compiled_on_every_framework_of_the_cpu(framework: str) -> None:
    other, recipe = pytest.importorskip(framework), breccia.MXFP8BlockScaling()
    x, options = np.linspace(-3, 5, 64 * 256, dtype=np.float32).reshape(64, 256), {"rounding": "stochastic", "seed": 1}
    y = other.from_numpy(x) if framework == "torch" else other.array(x)
    name = framework.partition(".")[0]
    for array, winner in ((x, "native.cast"), (y, f"{name}.cpu.cast_stochastic")):
        found = breccia.explain("cast", array, recipe, **options)
        assert found.winner is not None and found.winner.name == winner and "native.cast" in str(found)
    nearest = breccia.explain("cast", y, recipe)
    assert nearest.winner is not None and nearest.winner.name == f"{name}.cpu.cast"
    assert "skipped: it only rounds stochastically; other casts have a kernel that needs no microkernels" in str(nearest)
    st = breccia.cast(y, recipe, **options)
    assert st.digest() == breccia.cast(x, recipe, **options, prefer="reference.cast").digest()
    if framework == "torch":
        assert breccia.cast(y, recipe, **options, out=st) is st


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_blocks_along_columns_are_cast_into_memory_of_the_order_of_the_array(
    recipe: breccia.ScalingRecipe, dtype: Any, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "chunk_size", lambda: 1 << 11)
    if cut:
        monkeypatch.setattr(columns, "_MOST_ELEMENTS", 1)
    for x in (numbers((384, 20), 1, dtype), np.random.default_rng(2).standard_normal((2, 384, 33)).astype(dtype)):
        expected = breccia.cast(x, recipe, axis=-2, prefer="reference.cast")
        parts = {name: np.empty_like(part, order="C") for name, part in components(expected).items()}
        out = Metadata.of(expected).assembled(**parts)
        assert breccia.cast(x, recipe, axis=-2, out=out, prefer="native.cast") is out
        assert breccia.bytes_equal(out, expected)


@pytest.mark.parametrize(
    "spec",
    [
        "fp8_row", "fp8_current", "fp8_block", "fp8_block,block_m=128", "mxfp8", "nvfp4", "int4", "mxfp6", "nf4",
        "int4,symmetric=false,signed=false", "int4,symmetric=false,signed=false,scale_dtype=bf16", "int4_bias",
        "int8,group_size=16,symmetric=false,signed=false", *(f"mlx_affine,bits={bits}" for bits in (2, 3, 5, 6)),
    ],
)  # fmt: skip
def test_blocks_along_columns_are_not_transposed(spec: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(2).standard_normal((256, 275)).astype(np.float32)
    x[:128, 3], x[130:150, 5] = 0, 1e-39
    expected = breccia.cast(x, spec, axis=-2, prefer="reference.cast")
    parts = {name: np.empty_like(part, order="C") for name, part in components(expected).items()}
    monkeypatch.setattr("breccia.kernels.reference.assign", None)  # the copy into another order
    out = breccia.cast(x, spec, axis=-2, out=Metadata.of(expected).assembled(**parts))
    assert breccia.bytes_equal(out, expected)


@pytest.mark.parametrize("values", [(np.nan,), (-np.nan,), (np.inf,), (-np.inf,), (2.0**127, -(2.0**127))], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_numbers_that_are_not_normal_are_cast_with_offsets(values: tuple[float, ...], axis: int) -> None:
    x = np.random.default_rng(2).standard_normal((2, 256, 256)).astype(np.float32)
    x[1, 200, 7 : 7 + len(values)] = x[1, 200 : 200 + len(values), 7] = values
    for spec in ("int4,symmetric=false,signed=false", "mlx_affine,bits=3"):
        expected = breccia.cast(x, spec, axis=axis, prefer="reference.cast")
        parts = {name: np.empty_like(part, order="C") for name, part in components(expected).items()}
        out = breccia.cast(x, spec, axis=axis, out=Metadata.of(expected).assembled(**parts))
        assert breccia.bytes_equal(out, expected)


# ------------------------------------------------------------------------------------------------ bad input


def test_arrays_in_any_order_and_read_only_ones_are_cast(recipe: breccia.ScalingRecipe) -> None:
    base = numbers((96, 640), 4)
    frozen = base[:48, :320].copy()
    frozen.flags.writeable = False
    broadcast = np.broadcast_to(base[:1, :320], (48, 320))
    for x in (frozen, broadcast, base[::2, ::2], base[47::-1, 319::-1], np.asfortranarray(frozen), base[:48, :320]):
        expected = breccia.cast(np.ascontiguousarray(x), recipe, prefer="reference.cast")
        assert breccia.bytes_equal(breccia.cast(x, recipe), expected)


def test_codes_in_any_order_and_read_only_ones_are_decoded() -> None:
    st = breccia.cast(numbers((48, 320), 4), breccia.MXFP8BlockScaling())
    expected = breccia.dequantize(st, prefer="reference.dequantize")
    data = np.asfortranarray(st.data)
    for part in (data, st.data):
        part.flags.writeable = False
        found = breccia.dequantize(breccia.ScaledTensor(part, st.scale, st.recipe, st.layout))
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (0, 3, 64)])
def test_empty_arrays_are_cast_and_decoded(recipe: breccia.ScalingRecipe, shape: tuple[int, ...]) -> None:
    x = np.empty(shape, np.float32)
    for options in ({}, {"rounding": "stochastic", "seed": 1}):
        st = breccia.cast(x, recipe, **options)
        assert st.shape == shape and breccia.dequantize(st).shape == shape
        assert breccia.dequantize(st, out_dtype="bfloat16", out=np.empty(shape, ml_dtypes.bfloat16)).shape == shape


def test_results_that_cannot_be_written_are_refused_before_native_code() -> None:
    x = numbers((48, 320), 4)
    st = breccia.cast(x, breccia.MXFP8BlockScaling())
    out = np.zeros((48, 320), np.float32)
    with pytest.raises(ShapeError, match=r"out= must have shape \(48, 320\) and dtype float32; got \(48, 319\) and float32"):
        breccia.dequantize(st, out=out[:, 1:])
    with pytest.raises(ShapeError, match=r"dtype float32; got \(48, 320\) and float64"):
        breccia.dequantize(st, out=out.astype(np.float64))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        breccia.dequantize(st, out=out)
    other = breccia.cast(x[:, :288], breccia.MXFP8BlockScaling())
    with pytest.raises(LayoutError, match="out= is .* allocate it with the same call once"):
        breccia.cast(x, breccia.MXFP8BlockScaling(), out=other)
    with pytest.raises(LayoutError, match=r"scale= must have shape \(48, 10\)"):
        breccia.cast(x, breccia.MXFP8BlockScaling(), scale=np.zeros((48, 9), np.uint8))
    with pytest.raises(UnsupportedError, match="float64"):
        breccia.cast(x.astype(np.float64), breccia.MXFP8BlockScaling())
    assert not out.any()


def test_a_strided_result_is_written_where_it_lies() -> None:
    st = breccia.cast(numbers((48, 320), 4), breccia.NVFP4BlockScaling())
    room = np.full((96, 640), 7, np.float32)
    for out in (room[:48, :320], room[::2, ::2], room[47::-1, 319::-1]):
        room[...] = 7
        assert breccia.dequantize(st, out=out) is out
        np.testing.assert_array_equal(out, breccia.dequantize(st, prefer="reference.dequantize"))
        assert (room == 7).sum() >= room.size - out.size


def test_mismatched_buffers_are_refused_before_writing() -> None:
    codes, x = np.full(64, 7, np.uint8), np.ones(64, np.float32)
    one, found = np.ones(2, np.float32), np.full((2, 32), 7, np.float32)
    with pytest.raises(ValueError, match="a width and a stride of rows, at least 0; got -1 and 0"):
        microkernels.floats(x, one, 32, False, codes, 0, 0, 0, 0, 0, 32, 0, 0, -1, 0)
    with pytest.raises(ValueError, match="16-bit numbers in blocks of k = 32 and one number a block; got 256 and 8 bytes"):
        microkernels.amax(x, 32, one.view(np.uint32), 16)
    with pytest.raises(ValueError, match="wanted blocks of k = 32 rows; got 64 numbers in rows of 3"):
        microkernels.amax(x, 32, one.view(np.uint32), 32, 3)
    with pytest.raises(ValueError, match="wanted a table of 16 FP32 numbers, twice, and of their codes; got 64, 60 and 16"):
        microkernels.tables(x, one, 32, False, codes, x[:16], x[:15], codes[:16].copy(), 0)
    with pytest.raises(ValueError, match="wanted FP32 inverses of 256 codes; got 1020 bytes"):
        microkernels.scales(one, 1.0, 1.0, 0, 0, 0, 20, 7, np.ones(255, np.float32), codes[:2], np.ones(2, np.float32))
    form = (0, 0, 0, 20, 7)
    for source, k, room, out in ((x, 30, 2, 32), (x, 32, 3, 32), (x, 32, 2, 31), (x, 0, 2, 32)):
        with pytest.raises(
            ValueError, match=rf"in blocks of k = {k}, .*; got 256 bytes, room for {room} and {out}, and 1024 bytes of inverses"
        ):
            inverses, scales = np.ones(256, np.float32), codes[:room].copy()
            microkernels.blocks(source, k, 32, 6.0, 1.0, form, inverses, form, scales, codes[:out].copy())
    with pytest.raises(ValueError, match="and 1020 bytes of inverses. Call breccia.cast."):
        microkernels.blocks(x, 32, 32, 6.0, 1.0, form, np.ones(255, np.float32), form, codes[:2].copy(), codes[:32].copy())
    with pytest.raises(ValueError, match="wanted room for 8 codes"):
        microkernels.sixes(codes[:7].copy(), np.zeros(6, np.uint8))
    with pytest.raises(ValueError, match="wanted eights of codes of .* and room for them; got 64 codes of 3 bits"):
        microkernels.eights(codes, 3, np.zeros(23, np.uint8))
    rows = codes.reshape(16, 4)
    for given, bits, shape in (
        (rows, 3, (6, 3)),
        (rows, 3, (5, 4)),
        (rows[:12], 5, (7, 4)),
        (rows, 8, (16, 4)),
        (codes, 4, (32,)),
    ):
        with pytest.raises(ValueError, match="wanted rows of codes of 1 to 7 bits, .* and as many columns of room for them"):
            microkernels.down(given, bits, np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="not C-contiguous"):
        microkernels.down(rows[:, ::2], 4, np.zeros((8, 2), np.uint8))
    with pytest.raises(ValueError, match="not C-contiguous"):
        microkernels.down(rows, 4, np.zeros((16, 4), np.uint8)[::2])
    x, ends = np.zeros(96, np.float32), np.zeros(6, np.float32)
    with pytest.raises(ValueError, match="wanted blocks of k = 16 rows; got 96 numbers in rows of 4"):
        microkernels.extremes(x, 16, ends, ends.copy(), 32, 4)
    with pytest.raises(ValueError, match="wanted aligned room for words of 4 bytes; got 3 bytes"):
        microkernels.words(1, 2, bytearray(3))
    data = np.zeros((2, 32), np.uint8)
    for bad, blocks in (
        (data[:, :31], Blocks(1, 32, one)), (data[:1], Blocks(1, 32, one)), (data, Blocks(1, 32, one[:1])),
        (data, Blocks(1, 31, one)), (data, Blocks(0, 32, one)), (data, Blocks(1, 32, one, added=one[:1])),
        (data[:, ::2], Blocks(1, 32, one)), (data, Blocks(1, 32, np.zeros(2, np.uint8), one)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="wanted rows of codes of 1 to 8 bits, an aligned matrix for as many numbers"):
            kernels._decode(E4M3, bad, blocks, "float32", found, False)
    with pytest.raises(ValueError, match="this processor has the instruction sets .* got 'avx9000'"):
        decoding.use("avx9000")
    assert (codes == 7).all() and (found == 7).all()


def test_casts_of_tensors_use_no_more_threads_than_torch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from breccia.kernels.numpy import pieces

    asked: list[int] = []

    def spread(work: Any, count: int, threads: int) -> None:
        asked.append(threads)
        work(0, count)

    def decode(*arguments: Any) -> None:
        decoded.append(arguments[-2])
        compiled(*arguments)

    decoded: list[int] = []
    compiled = decoding.decode
    monkeypatch.setattr(pieces, "spread", spread)
    monkeypatch.setattr(decoding, "decode", decode)
    x, before, allowed = torch.randn(512, 1024), torch.get_num_threads(), breccia.get_num_threads()
    out = torch.empty(512, 1024, dtype=torch.bfloat16)
    try:
        breccia.set_num_threads(4)
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            st = breccia.cast(x, breccia.MXFP8BlockScaling())
            breccia.cast(x, breccia.MXFP8BlockScaling(), axis=-2)
            breccia.dequantize(st)
            breccia.dequantize(st, out_dtype="bfloat16", out=out)
            assert asked[:2] == [min(threads, 4)] * 2
            # Where there is a pool in C, one call of `decode` uses all threads.
            assert (decoded if decoding.pooled() else asked[2:]) == [min(threads, 4)] * 2
            asked.clear()
            decoded.clear()
        breccia.cast(x.numpy(), breccia.MXFP8BlockScaling())  # an array is not torch's
        assert asked == [4]
    finally:
        torch.set_num_threads(before)
        breccia.set_num_threads(allowed)


@pytest.mark.slow
def test_arrays_of_more_than_2_to_the_31_elements() -> None:
    rows, row = (1 << 20) + 3, numbers((1, 2049), 8, ml_dtypes.bfloat16)
    x = np.broadcast_to(row, (rows, 2049))  # no memory of its own
    assert x.size > 1 << 31
    options: dict[str, Any] = {"rounding": "stochastic", "seed": 3}
    st = breccia.cast(x, breccia.INT4Scaling(), **options)
    first = (rows - 1) * 2049  # the last row: elements beyond 2^31
    words = np.array([oracle.random_word(3, first + i) for i in range(2049)], np.uint32).view(np.int32).reshape(1, -1)
    from breccia.kernels import reference

    expected = reference.cast(row, breccia.INT4Scaling(), breccia.backend.DEFAULT, words)
    np.testing.assert_array_equal(st.data[-1], expected.data[0])
    np.testing.assert_array_equal(st.scale[-1], expected.scale[0])
    out = np.empty(x.shape, np.float16)
    breccia.dequantize(st, out_dtype="float16", out=out)
    np.testing.assert_array_equal(out[-1], breccia.dequantize(expected, out_dtype="float16")[0])
