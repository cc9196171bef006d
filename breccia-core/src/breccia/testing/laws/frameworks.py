"""Laws of a framework: each backend primitive of `Ops`, and the bytes of every recipe."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from ... import api, codecs
from ...arrays.frameworks import Framework, device_of, dtype_name, framework_of
from ...arrays.ops import Ops
from ...codecs import BF16, E4M3, E5M2, E8M0, F16
from ...errors import UnsupportedError
from ...fp32 import F32_INF, MAGNITUDE
from ...kernels import reference
from ...recipes import ScalingRecipe
from .. import oracle, strategies
from ..compare import expect, expect_numbers, expect_tensor, expect_words, fp32
from ..examples import special_rows, wide
from ..places import Place
from .law import Law, Subject, each


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the frameworks of a plug-in: their backend primitives, and the recipes of all plug-ins."""
    for framework in subject.of("frameworks"):
        for place in (p for p in subject.places if p.framework == framework.name):
            yield from each("frameworks", framework.name, (its_arrays_are_recognized,), framework, place=place)
            yield from each("ops", framework.name, PRIMITIVES, place=place)
            for recipe in strategies.defaults():
                what = f"{framework.name}.{recipe.name}"
                yield from each("frameworks", what, (casts_and_decoded_values_match_numpy,), recipe, place=place)


def its_arrays_are_recognized(framework: Framework, place: Place) -> None:
    x = place.array(np.ones((2, 3), np.float32))
    expect(framework_of(x) == framework, f"its array is recognized as one of {framework_of(x).name}")
    expect(dtype_name(x) == "float32", f"dtype_name of its float32 array is {dtype_name(x)!r}")
    expect(not framework.kinds or device_of(x) in framework.kinds, f"its array is on {device_of(x)!r}, not {framework.kinds}")


def casts_and_decoded_values_match_numpy(recipe: ScalingRecipe, place: Place) -> None:
    """For the generic algorithm and for the kernels that dispatch selects."""
    x = np.concatenate([special_rows(67), wide((9, 67), seed=1)])
    expected = reference.cast(x, recipe)
    numbers = reference.dequantize(expected)
    for cast, dequantize in ((reference.cast, reference.dequantize), (api.cast, api.dequantize)):
        st = cast(place.array(x), recipe)
        expect_tensor(place, st, expected)
        expect_numbers("decoded", place, dequantize(st), numbers)


# ------------------------------------------------------------------------------------------------ data


def _words(count: int = 400, seed: int = 0) -> np.ndarray:
    """FP32 bit patterns of every kind, as int32."""
    rng = np.random.default_rng(seed)
    special = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, F32_INF, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    drawn = np.concatenate([np.array(special, np.uint32), rng.integers(0, 1 << 32, count, dtype=np.uint32)])
    return np.concatenate([drawn, drawn ^ np.uint32(0x80000000)]).view(np.int32)


def _normal(seed: int, count: int = 300, low: int = -20, high: int = 20) -> np.ndarray:
    """FP32 numbers of both signs with exponents low..high."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, count, dtype=np.uint32) & np.uint32(0x807FFFFF)
    exponents = rng.integers(low + 127, high + 128, count, dtype=np.uint32)
    return (words | exponents << np.uint32(23)).view(np.float32)


def _integers(seed: int, count: int = 300) -> np.ndarray:
    ends = [0, 1, -1, 2**31 - 1, -(2**31), 0xFF, 1 << 30]
    return np.concatenate([ends, np.random.default_rng(seed).integers(-(2**31), 2**31, count)]).astype(np.int32)


def _exact(operation: Callable[[Fraction, Fraction], Fraction], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """FP32 results of an operation in exact rationals, rounded once."""
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    return np.array([float(oracle.fl(operation(Fraction(p), Fraction(q)))) for p, q in pairs], np.float32)


def _expect_equal(place: Place, what: str, array: Any, expected: np.ndarray) -> None:
    """Raise AssertionError unless an array of integers or booleans equals `expected`, dtype included."""
    host = np.asarray(place.ops.to_numpy(array))
    expect(host.shape == expected.shape, f"{what}: shape {host.shape}, expected {expected.shape}")
    expect(dtype_name(host) == dtype_name(expected), f"{what}: {dtype_name(host)}, expected {dtype_name(expected)}")
    different = host != expected
    index = tuple(int(i) for i in np.argwhere(different)[0]) if different.any() else ()
    expect(not different.any(), f"{what}: {host[index]}, expected {expected[index]}, at {list(index)}")


# ------------------------------------------------------------------------------------------------ bit patterns


def bitcasts_are_inverse_and_change_no_bit(place: Place) -> None:
    ops, words = place.ops, _words()
    floats = ops.bitcast_to_float(place.array(words))
    expect(dtype_name(floats) == "float32", f"bitcast_to_float returns {dtype_name(floats)}")
    _expect_equal(place, "bitcast_to_int(bitcast_to_float(i))", ops.bitcast_to_int(floats), words)
    _expect_equal(place, "bitcast_to_int(x)", ops.bitcast_to_int(place.array(words.view(np.float32))), words)


def half_precision_becomes_fp32_exactly(place: Place) -> None:
    ops, words = place.ops, np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expect_numbers(
            "float16", place, ops.f32(place.array(words.view(np.float16))), words.view(np.float16).astype(np.float32)
        )
    wide = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if ops.bfloat16 == "bfloat16":
        expect_numbers("bfloat16", place, ops.f32(place.array(words, "bfloat16")), wide)
    else:
        expect(ops.is_bit_pattern(place.array(words)), "BF16 is stored as uint16, but is_bit_pattern returns False")
        try:
            with ops.errstate():
                numbers = ops.f32(ops.to_float(place.array(wide), "bfloat16"))
        except UnsupportedError:  # NumPy without ml_dtypes
            return
        expect_numbers("bfloat16", place, numbers, wide)


def to_float_rounds_once_to_the_nearest(place: Place) -> None:
    """Includes FP16 subnormals, which are below 2^-14."""
    ops, x = place.ops, _normal(1, low=-27, high=15)
    x = np.concatenate([x, np.array([0.0, -0.0, 1.0 + 2.0**-11, 1.0 + 2.0**-8, 65504.0, 3.0 * 2.0**-12], np.float32)])
    x = x[np.abs(x) <= 65504]
    for codec in (F16, BF16):
        name = str(codec.dtype)
        expected = [oracle.encode(codec, Fraction(float(v)), np.signbit(v)) for v in x]
        try:
            rounded = ops.to_float(place.array(x), name)
        except UnsupportedError:  # NumPy without ml_dtypes
            continue
        expect(dtype_name(rounded) == name, f"to_float(x, {name!r}) returns {dtype_name(rounded)}")
        expect_words(f"to_float(x, {name!r})", place.words(rounded), np.array(expected, np.uint16))


def load_is_the_inverse_of_store(place: Place) -> None:
    """For each dtype that a codec is stored in. `load` extends with zeros."""
    ops = place.ops
    for codec in codecs.CODECS:
        dtype = ops.storage(codec)
        width = min(codec.bits, 32)
        words = _words() if width == 32 else np.arange(1 << width, dtype=np.int32)
        stored = ops.store(place.array(words), dtype)
        expect(dtype_name(stored) == dtype, f"store(codes, {dtype!r}) returns {dtype_name(stored)}")
        _expect_equal(place, f"load(store(codes, {dtype!r}))", ops.load(stored), words)
        there = ops.from_numpy(place.words(stored), dtype if dtype_name(place.words(stored)) != dtype else None)
        _expect_equal(place, f"load(from_numpy(words, {dtype!r}))", ops.load(there), words)


def take_reads_the_table(place: Place) -> None:
    table = tuple(int(w) & 0xFFFFFFFF for w in _words(118))
    index = np.random.default_rng(2).integers(0, len(table), (5, 40)).astype(np.int32)
    expected = np.array(table, np.uint32).view(np.int32)[index]
    _expect_equal(place, "take", place.ops.take(table, place.array(index)), expected)


# ------------------------------------------------------------------------------------------------ integers


def integers_wrap_and_shift_in_twos_complement(place: Place) -> None:
    a, b = _integers(3), _integers(4)
    x, y = place.array(a), place.array(b)
    p, q = a.astype(np.int64), b.astype(np.int64)

    def wrapped(value: np.ndarray) -> np.ndarray:
        return value.astype(np.uint64).astype(np.uint32).view(np.int32)

    results: dict[str, tuple[Any, np.ndarray]] = {
        "a + b": (x + y, wrapped(p + q)),
        "a - b": (x - y, wrapped(p - q)),
        "a * b": (x * y, wrapped(p * q)),
        "a & b": (x & y, a & b),
        "a | b": (x | y, a | b),
        "a ^ b": (x ^ y, a ^ b),
        "~a": (~x, ~a),
        "-a": (-x, wrapped(-p)),
        "a + 7": (x + 7, wrapped(p + 7)),
        "a * 3": (x * 3, wrapped(p * 3)),
        "a & 0x7FFFFFFF": (x & MAGNITUDE, a & MAGNITUDE),
    }
    for n in (1, 7, 23, 31):
        results[f"a << {n}"] = (x << n, wrapped(p << n))
        results[f"a >> {n}"] = (x >> n, a >> n)
    shifts = np.random.default_rng(5).integers(0, 32, len(a)).astype(np.int32)
    results["a << n"] = (x << place.array(shifts), wrapped(p << shifts))
    results["a >> n"] = (x >> place.array(shifts), a >> shifts)
    for what, (result, expected) in results.items():
        _expect_equal(place, what, result, expected)


def comparisons_match_numpy(place: Place) -> None:
    a, b = _integers(6), _integers(7)
    b[::3] = a[::3]
    for what, compare in _COMPARISONS.items():
        _expect_equal(place, f"a {what} b", compare(place.array(a), place.array(b)), compare(a, b))
        _expect_equal(place, f"a {what} 255", compare(place.array(a), 255), compare(a, 255))
    x = np.array([0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, 2.0**-126], np.float32)
    for what, compare in _COMPARISONS.items():
        _expect_equal(place, f"x {what} 1.5", compare(place.array(x), 1.5), compare(x, np.float32(1.5)))
        _expect_equal(place, f"x {what} 0.0", compare(place.array(x), 0.0), compare(x, np.float32(0.0)))


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def where_minimum_and_maximum_match_numpy(place: Place) -> None:
    ops, a, b = place.ops, _integers(8), _integers(9)
    x, y = place.array(a), place.array(b)
    _expect_equal(place, "where(a < b, a, b)", ops.where(x < y, x, y), np.where(a < b, a, b))
    _expect_equal(place, "where(a < b, a, 0)", ops.where(x < y, x, 0), np.where(a < b, a, 0).astype(np.int32))
    _expect_equal(place, "where(a < b, 5, a)", ops.where(x < y, 5, x), np.where(a < b, 5, a).astype(np.int32))
    for word, expected in (("minimum", np.minimum), ("maximum", np.maximum)):
        choose = getattr(ops, word)
        _expect_equal(place, f"{word}(a, b)", choose(x, y), expected(a, b))
        _expect_equal(place, f"{word}(a, 100)", choose(x, 100), expected(a, 100).astype(np.int32))
        p, q = _normal(10), _normal(11)
        _expect_equal(
            place, f"{word} of FP32", ops.bitcast_to_int(choose(place.array(p), place.array(q))), expected(p, q).view(np.int32)
        )
        numbers = expected(p, np.float32(2.5)).view(np.int32)
        _expect_equal(place, f"{word}(x, 2.5)", ops.bitcast_to_int(choose(place.array(p), 2.5)), numbers)


def amax_reduces_over_axes_and_keeps_nan(place: Place) -> None:
    ops = place.ops
    words = (_words(2 * 3 * 8 * 16)[: 2 * 3 * 8 * 16] & MAGNITUDE).reshape(2, 3, 8, 16)
    for axes in ((-1,), (-3, -1), (0, 1, 2, 3)):
        expected = words.max(axis=axes, keepdims=True)
        _expect_equal(place, f"amax(i, {axes})", ops.amax(place.array(words), axes), expected)
    lone = np.zeros((4, 32), np.int32)
    lone[2, 17] = 0x7F800001
    _expect_equal(place, "amax with one signalling NaN", ops.amax(place.array(lone), (-1,)), lone.max(-1, keepdims=True))
    nothing = ops.amax(place.array(np.zeros((3, 0), np.int32)), (-1,))
    _expect_equal(place, "amax over nothing", nothing, np.zeros((3, 1), np.int32))


# ------------------------------------------------------------------------------------------------ FP32


def arithmetic_rounds_once(place: Place) -> None:
    a, b = _normal(12), _normal(13)
    x, y = place.array(a), place.array(b)
    expect_numbers("x + y", place, x + y, _exact(lambda p, q: p + q, a, b))
    expect_numbers("x - y", place, x - y, _exact(lambda p, q: p - q, a, b))
    expect_numbers("x * y", place, x * y, _exact(lambda p, q: p * q, a, b))
    expect_numbers("x * 0.3", place, x * float(np.float32(0.3)), _exact(lambda p, q: p * q, a, np.full_like(a, 0.3)))
    expect_numbers("-x", place, -x, -a)


def products_are_not_fused_into_sums(place: Place) -> None:
    a, b = _normal(14), _normal(15)
    c = -_exact(lambda p, q: p * q, a, b)
    expected = np.zeros_like(a)  # a fused a * b + c would be the rounding error of the product
    sums = fp32("a * b + c", place, place.array(a) * place.array(b) + place.array(c), a.shape)
    expect(bool((sums == expected).all()), "a * b + c is fused into one rounding")


def division_by_arrays_scalars_and_broadcasts_is_ieee(place: Place) -> None:
    ops, a, b = place.ops, _normal(16), _normal(17)
    x = place.array(a)
    expect_numbers("div(x, y)", place, ops.div(x, place.array(b)), _exact(lambda p, q: p / q, a, b))
    for number in (7.0, 6.0, 448.0, 2688.0):
        by = np.full_like(a, number)
        expect_numbers(f"div(x, {number})", place, ops.div(x, number), _exact(lambda p, q: p / q, a, by))
        expect_numbers(f"div({number}, x)", place, ops.div(number, x), _exact(lambda p, q: p / q, by, a))
    rows, column = a.reshape(10, 30), b[:10].reshape(10, 1)
    expected = _exact(lambda p, q: p / q, rows.ravel(), np.broadcast_to(column, rows.shape).ravel()).reshape(rows.shape)
    expect_numbers("div(x, column)", place, ops.div(place.array(rows), place.array(column)), expected)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.0], np.float32)
    p, q = (np.array(v, np.float32) for v in zip(*itertools.product(special, special), strict=True))
    with np.errstate(all="ignore"), ops.errstate():
        quotients, results = p.astype(np.float64) / q, ops.div(place.array(p), place.array(q))
    expect_numbers("div of zeros, Inf and NaN", place, results, quotients.astype(np.float32))


def integers_are_converted_exactly(place: Place) -> None:
    ops = place.ops
    i = np.concatenate([np.arange(-300, 300), [2**24 - 1, 1 - 2**24, 65535]]).astype(np.int32)
    expect_words("int_to_float(i)", place.words(ops.int_to_float(place.array(i))), i.astype(np.float32).view(np.uint32))
    _expect_equal(place, "to_int32(x)", ops.to_int32(place.array(i.astype(np.float32))), i)
    expect(ops.to_int32(7.0) == 7, f"to_int32(7.0) is {ops.to_int32(7.0)!r}")
    bytes_ = np.arange(256, dtype=np.uint8)
    numbers = np.arange(256, dtype=np.float32).view(np.uint32)
    expect_words("int_to_float of uint8", place.words(ops.int_to_float(place.array(bytes_))), numbers)


def constants_are_exact_0d_arrays(place: Place) -> None:
    like = place.array(np.ones((2, 2), np.float32))
    for value in (0.0, 1.0, 448.0, 2.0**-126, 2.0**126, float(np.float32(0.1))):
        constant = place.ops.constant(value, like)
        expect_words(f"constant({value})", place.words(constant), np.array(value, np.float32).view(np.uint32))


def matmul_accumulates_in_fp32(place: Place) -> None:
    """Within the bound of any FP32 order of summation (Higham, 3.1): K u / (1 - K u) sum |a||b|, u = 2^-24."""
    a, b = _normal(18, 8 * 96, -4, 4).reshape(8, 96), _normal(19, 96 * 5, -4, 4).reshape(96, 5)
    product = fp32("matmul", place, place.ops.matmul(place.array(a), place.array(b)), (8, 5))
    p, q = a.astype(np.float64), b.astype(np.float64)
    bound = 96 * 2.0**-24 / (1 - 96 * 2.0**-24) * (np.abs(p) @ np.abs(q))
    worst = np.max(np.abs(product - p @ q) / bound)
    expect(bool(worst <= 1), f"the error of matmul is {worst:.1f} times the FP32 bound")


# ------------------------------------------------------------------------------------------------ shapes


def shape_operations_match_numpy(place: Place) -> None:
    ops, a = place.ops, np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    x = place.array(a)
    _expect_equal(place, "reshape", ops.reshape(x, (4, 1, 6)), a.reshape(4, 1, 6))
    _expect_equal(place, "pad", ops.pad(x, (0, 1, 3)), np.pad(a, [(0, 0), (0, 1), (0, 3)]))
    _expect_equal(place, "swap", ops.swap(x), a.swapaxes(-1, -2))
    _expect_equal(place, "broadcast", ops.broadcast(x[:, :, :1], (2, 3, 5)), np.broadcast_to(a[:, :, :1], (2, 3, 5)))
    _expect_equal(place, "x[..., :2, :3]", x[..., :2, :3], a[..., :2, :3])
    for axis in (-1, -2):
        _expect_equal(place, f"concat along {axis}", ops.concat([x, x], axis), np.concatenate([a, a], axis))
    _expect_equal(place, "gather", ops.gather(x, (2, 0, 0), -1), a[..., [2, 0, 0]])


def shape_operations_keep_every_float8_bit(place: Place) -> None:
    """NaN codes that no cast writes are unchanged, too."""
    ops, words = place.ops, np.arange(256, dtype=np.int32).reshape(4, 64)
    for codec in (codecs.E4M3, codecs.E5M2, codecs.E8M0):
        x = ops.store(place.array(words), ops.storage(codec))
        moves = {
            "concat": (ops.concat([x, x]), np.concatenate([words, words], -1)),
            "gather": (ops.gather(x, (5, 63, 0), -1), words[:, [5, 63, 0]]),
            "reshape": (ops.reshape(x, (2, 128)), words.reshape(2, 128)),
            "swap": (ops.swap(x), words.T),
            "broadcast": (ops.broadcast(x, (3, 4, 64)), np.broadcast_to(words, (3, 4, 64))),
            "slice": (x[1:3, 7:], words[1:3, 7:]),
        }
        for move, (result, expected) in moves.items():
            _expect_equal(place, f"{move} of {codec.name}", ops.load(result), expected)


def pack_bits_puts_the_first_code_in_the_lowest_bits(place: Place) -> None:
    ops = place.ops
    for bits, count in ((4, 2), (6, 4), (1, 8), (2, 4), (3, 8)):
        codes = np.random.default_rng(20).integers(0, 1 << bits, (3, 5, count)).astype(np.int32)
        expected = np.sum(codes << (np.arange(count) * bits), axis=-1).astype(np.int32)
        word = ops.pack_bits(place.array(codes), bits)
        _expect_equal(place, f"pack_bits by {bits} bits", word, expected)
        _expect_equal(place, f"unpack_bits by {bits} bits", ops.unpack_bits(word, bits, count), codes)


def counter_gives_the_index_of_each_element(place: Place) -> None:
    like = place.array(np.zeros((3, 5, 7), np.float32))
    low, high = place.ops.counter(like)
    _expect_equal(place, "counter, low words", low, np.arange(105, dtype=np.int32).reshape(3, 5, 7))
    _expect_equal(place, "counter, high words", high, np.zeros((3, 5, 7), np.int32))
    low, _ = place.ops.counter(place.array(np.zeros((2, 40_000), np.float32)))  # beyond 16 bits
    _expect_equal(place, "counter, low words", low, np.arange(80_000, dtype=np.int32).reshape(2, 40_000))


def seeds_are_split_into_two_words(place: Place) -> None:
    for seed in (0, 1, 2**32 - 1, 2**63 + 5, 2**64 - 1):
        words = [int(w) & 0xFFFFFFFF for w in place.ops.words(seed)]
        expect(words == [seed & 0xFFFFFFFF, seed >> 32], f"words({seed}) are {words}")


# ------------------------------------------------------------------------------------------------ other primitives


def any_returns_a_python_bool(place: Place) -> None:
    ops = place.ops
    expect(ops.any(place.array(np.array([0, 0, 1], np.int32)) == 1) is True, "any of [False, False, True] is not True")
    expect(ops.any(place.array(np.zeros(3, np.int32)) == 1) is False, "any of three False is not False")


def assign_writes_in_place_or_refuses(place: Place) -> None:
    out, value = place.array(np.zeros(4, np.float32)), place.array(np.arange(4, dtype=np.float32))
    try:
        place.ops.assign(out, value)
    except UnsupportedError:
        return
    expect_words("assign(out, value)", place.words(out), np.arange(4, dtype=np.float32).view(np.uint32))


def native_casts_follow_the_contract(place: Place) -> None:
    """If the framework has `native_cast`, which replaces the codec's integer arithmetic."""
    ops: Ops = place.ops
    for codec in codecs.CODECS:
        if codec.bits > 16 or not isinstance(codec, codecs.Minifloat):
            continue
        y = np.concatenate([_normal(21, 300, -20, 17), np.array([0.0, -0.0], np.float32)])
        code = ops.native_cast(place.array(y), codec)
        if code is not None:
            expected = [oracle.encode(codec, Fraction(float(v)), np.signbit(v)) for v in y]
            expect_words(f"native_cast(y, {codec.name})", place.words(code), np.array(expected, np.uint32))


def conversion_from_and_to_numpy_changes_no_bit(place: Place) -> None:
    ops, words = place.ops, _words()
    for dtype in ("uint8", "uint16", "int32", "float32", "float16"):
        host = words.view(np.uint8)[:64].view(dtype)
        there = place.array(host)
        expect(dtype_name(there) == dtype, f"a NumPy {dtype} array becomes {dtype_name(there)}")
        expect_words(f"{dtype}, converted and back", place.words(there), host.view(f"u{host.itemsize}"))
        moved = ops.to(there, None)
        expect_words(f"{dtype}, to(None)", place.words(moved), host.view(f"u{host.itemsize}"))


def transpose_permutes_axes(place: Place) -> None:
    ops, words = place.ops, _words().reshape(-1)[:360]
    for shape, axes in (((3, 4, 30), (1, 0, 2)), ((2, 3, 4, 15), (0, 3, 1, 2)), ((360,), (0,))):
        expected = words.reshape(shape).transpose(axes)
        _expect_equal(place, f"transpose by {axes}", ops.transpose(place.array(words.reshape(shape)), axes), np.array(expected))


def grouped_matmul_multiplies_each_group_by_its_matrix(place: Place) -> None:
    """With integers, whose FP32 sums are exact in any order; an empty group, rows after the last group, and no groups."""
    ops, rng = place.ops, np.random.default_rng(7)
    a = rng.integers(-8, 9, (7, 16)).astype(np.float32)
    for ends in ([2, 2, 5], [0, 0, 7], [7], [0], []):
        b = rng.integers(-8, 9, (len(ends), 16, 5)).astype(np.float32)
        expected, start = np.zeros((7, 5), np.float32), 0
        for matrix, end in zip(b, ends, strict=True):
            expected[start:end] = a[start:end] @ matrix
            start = end
        products = ops.grouped_matmul(place.array(a), place.array(b), place.array(np.array(ends, np.int32)))
        expect_numbers(f"groups that end at {ends}", place, products, expected)


def k_grouped_matmul_multiplies_the_rows_of_each_group(place: Place) -> None:
    """With integers, whose FP32 sums are exact in any order; empty groups, rows of no group, and NaN, which stay in a group."""
    ops, rng = place.ops, np.random.default_rng(8)
    a, b = rng.integers(-8, 9, (3, 7)).astype(np.float32), rng.integers(-8, 9, (7, 5)).astype(np.float32)
    a[1, 0] = a[0, 6] = b[6, 2] = np.nan
    for ends in ([2, 2, 5], [0, 0, 6], [7], [0], []):
        expected, start = np.zeros((len(ends), 3, 5), np.float32), 0
        for product, end in zip(expected, ends, strict=True):
            product[:] = a[:, start:end] @ b[start:end]
            start = end
        products = ops.k_grouped_matmul(place.array(a), place.array(b), place.array(np.array(ends, np.int32)))
        expect_numbers(f"groups that end at {ends}", place, products, expected)


def portable_arrays_round_trip(place: Place) -> None:
    ops, words = place.ops, np.arange(256, dtype=np.uint8)
    for dtype in ("uint8", *(str(c.dtype) for c in (E4M3, E5M2, E8M0) if ops.storage(c) == c.dtype)):
        stored = ops.store(ops.load(place.array(words)), dtype)
        back = ops.from_portable(ops.portable(stored), dtype)
        expect(dtype_name(back) == dtype, f"{dtype} came back as {dtype_name(back)}")
        expect_words(dtype, place.words(back), words)
        expect(ops.itemsize(stored) == 1, f"itemsize of {dtype} is {ops.itemsize(stored)}, expected 1")
        pickle.loads(pickle.dumps(ops.portable(stored)))


PRIMITIVES: tuple[Callable[[Place], None], ...] = (
    bitcasts_are_inverse_and_change_no_bit,
    half_precision_becomes_fp32_exactly,
    to_float_rounds_once_to_the_nearest,
    load_is_the_inverse_of_store,
    take_reads_the_table,
    integers_wrap_and_shift_in_twos_complement,
    comparisons_match_numpy,
    where_minimum_and_maximum_match_numpy,
    amax_reduces_over_axes_and_keeps_nan,
    arithmetic_rounds_once,
    products_are_not_fused_into_sums,
    division_by_arrays_scalars_and_broadcasts_is_ieee,
    integers_are_converted_exactly,
    constants_are_exact_0d_arrays,
    matmul_accumulates_in_fp32,
    shape_operations_match_numpy,
    shape_operations_keep_every_float8_bit,
    pack_bits_puts_the_first_code_in_the_lowest_bits,
    counter_gives_the_index_of_each_element,
    seeds_are_split_into_two_words,
    any_returns_a_python_bool,
    assign_writes_in_place_or_refuses,
    native_casts_follow_the_contract,
    conversion_from_and_to_numpy_changes_no_bit,
    transpose_permutes_axes,
    grouped_matmul_multiplies_each_group_by_its_matrix,
    k_grouped_matmul_multiplies_the_rows_of_each_group,
    portable_arrays_round_trip,
)
