"""The conformance kit: every law fails for a fault planted against it, with a message about the fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from fresh import printed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stray import MODULES, SOUND, STRAY, along_k, here, kernel, outcome, planted, verdicts

import breccia
from breccia import Bridge, Codec, Foreign, Format, Kernel, Level, MXFP8BlockScaling, NVFP4BlockScaling, ScalingRecipe, api
from breccia.arrays import frameworks
from breccia.arrays.frameworks import Device
from breccia.arrays.ops import NUMPY, Ops
from breccia.codecs import E4M3, E8M0, F16, F32, F32_INF, INT4, MAGNITUDE, NF4, Minifloat
from breccia.errors import DialectError, RecipeError, UnknownNameError, UnsupportedError
from breccia.kernels import reference
from breccia.options import FLOAT32, CastOptions, ProductOptions, product_options
from breccia.recipes import RECIPES
from breccia.rules import LINEAR, Linear, Rule
from breccia.tensors.storage import Plain, Storage
from breccia.tensors.tensor import ScaledTensor
from breccia.testing import conformance, oracle, pytest_plugin, strategies
from breccia.testing.compare import expect_numbers, flushed
from breccia.testing.kit import laws_of
from breccia.testing.laws import Law, Subject, bridges, codecs, kernels, manifest, products, recipes, rules
from breccia.testing.laws import frameworks as framework_laws
from breccia.testing.laws.law import each
from breccia.testing.places import Place

MX = MXFP8BlockScaling()

Row = TypeVar("Row")
#: Law -> fault -> (what has that fault, the message of the law).
Faults = dict[str, dict[str, Row]]


def stray(kind: str, *declared: Any, tried: tuple[ScalingRecipe, ...] = ()) -> Subject:
    """A plug-in that declares these objects."""
    return Subject(STRAY, {kind: list(declared)}, tried)


# ---------------------------------------------------------------------------------------------- backend primitives


@dataclass(frozen=True)
class PlaceWithOps(Place):
    """A place with other primitives for NumPy's arrays."""

    primitives: Ops = NUMPY

    @property
    def ops(self) -> Ops:
        return self.primitives


def primitives(**replaced: Any) -> Ops:
    """NumPy's, with some primitives replaced."""
    return type("Faulty", (type(NUMPY),), replaced)()


def of_arrays(**operators: Any) -> Ops:
    """NumPy's primitives, on arrays with these operators."""
    kind = type("Faulty", (np.ndarray,), operators)
    return primitives(from_numpy=lambda _, a, dtype=None: NUMPY.from_numpy(a, dtype).view(kind))


def plain(a: Any) -> np.ndarray:
    """An array with NumPy's own operators."""
    return np.asarray(a)


@np.errstate(all="ignore")
def through(x: Any, *dtypes: Any) -> np.ndarray:
    """`x` converted to each of these dtypes in turn, then to FP32."""
    for dtype in (*dtypes, np.float32):
        x = x.astype(dtype)
    return x


def quieted(x: np.ndarray) -> np.ndarray:
    """FP32 with signalling NaNs converted to quiet ones."""
    i = x.view(np.int32)
    return np.where((i & MAGNITUDE) > F32_INF, i | 0x00400000, i).view(np.float32)


def narrow(x: np.ndarray, dropped: int) -> np.ndarray:
    """FP32 with the lowest `dropped` bits of the mantissa truncated."""
    return (x.view(np.int32) & -(1 << dropped)).view(np.float32)


def toward_zero(self: Any, other: Any) -> np.ndarray:
    """The product, rounded toward zero."""
    exact = plain(self).astype(np.float64) * other
    near = exact.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(exact), np.nextafter(near, np.float32(0)), near)


def unrounded_product(self: Any, other: Any) -> Any:
    """A product that remembers its exact value."""
    exact = plain(self).astype(np.float64) * plain(other).astype(np.float64)
    product = exact.astype(np.float32).view(type(self))
    product.exact = exact
    return product


def fused_sum(self: Any, other: Any) -> np.ndarray:
    return (getattr(self, "exact", plain(self)) + plain(other)).astype(np.float32)


def by_value(a: np.ndarray) -> np.ndarray:
    """E4M3 codes decoded to FP32 and encoded again."""
    return E4M3.encode(NUMPY, E4M3.decode(NUMPY, a.astype(np.int32))).astype(np.uint8) if a.dtype == np.uint8 else a


def by_elements(self: Any, other: Any) -> Any:
    """`==` of FP32 numbers by their bit patterns."""
    mine = plain(self)
    return mine == other if mine.dtype != np.float32 else mine.view(np.int32) == np.float32(other).view(np.int32)


def logical_shift(self: Any, n: Any) -> np.ndarray:
    return (plain(self).view(np.uint32) >> np.asarray(n).astype(np.uint32)).view(np.int32)


@np.errstate(all="ignore")
def float_amax(_: Any, i: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The maximum by FP32 comparison, ignoring NaN."""
    return np.fmax.reduce(i.view(np.float32), axis=axes, keepdims=True, initial=np.float32(0)).view(np.int32)


def expanded(_: Any, x: np.ndarray) -> np.ndarray:
    """FP16 with subnormals flushed to zero."""
    wide = through(x)
    return np.where(np.abs(wide) < 2.0**-14, np.copysign(np.float32(0), wide), wide)


def rounded_bf16(_: Any, x: np.ndarray) -> np.ndarray:
    """BF16 rounded through FP16."""
    return through((x.astype(np.uint32) << np.uint32(16)).view(np.float32), np.float16) if x.dtype == np.uint16 else through(x)


def sign_extended(_: Any, stored: Any) -> np.ndarray:
    a = plain(stored)
    return a.view(f"i{a.itemsize}").astype(np.int32)


def in_fortran_order(_: Any, like: np.ndarray) -> Any:
    i = np.arange(like.size, dtype=np.int32).reshape(like.shape, order="F")
    return i, np.zeros_like(i)


def in_16_bits(_: Any, like: np.ndarray) -> Any:
    low, high = NUMPY.counter(like)
    return low.astype(np.int16).astype(np.int32), high


def otherwise(dtype: Any, now: Callable[[Any], Any]) -> Callable[..., Any]:
    """A `from_numpy` or `to_numpy` that applies `now` to arrays of one dtype."""
    return lambda _, a, codec=None: now(a) if a.dtype == dtype and codec is None else NUMPY.from_numpy(a, codec)


TF32 = 13  # mantissa bits of FP32 that tensor cores drop in TF32

#: Law of a backend primitive -> fault -> (the faulty primitives, the message).
FAULTS: dict[Callable[[Place], None], dict[str, tuple[Ops, str]]] = {
    framework_laws.bitcasts_are_inverse_and_change_no_bit: {
        "bitcast_to_float flushes subnormals": (
            primitives(bitcast_to_float=lambda _, i: np.where((i & F32_INF) == 0, i & ~MAGNITUDE, i).view(np.float32)),
            r"bitcast_to_int\(bitcast_to_float\(i\)\): 0, expected 1, at \[1\]",
        ),
        "bitcast_to_float converts": (primitives(bitcast_to_float=lambda _, i: i.astype(np.float32)),
            r"bitcast_to_int\(bitcast_to_float\(i\)\): \d+, expected 1,"),
        "bitcast_to_float is FP64": (primitives(bitcast_to_float=lambda _, i: i.astype(np.float64)),
            "bitcast_to_float returns float64"),
        "bits makes NaN quiet": (primitives(bitcast_to_int=lambda _, x: quieted(x).view(np.int32)),
            r"2143289345, expected 2139095041"),
        "bits are 64": (primitives(bitcast_to_int=lambda _, x: x.view(np.int32).astype(np.int64)), "int64, expected int32"),
    },
    framework_laws.half_precision_becomes_fp32_exactly: {
        "FP16 loses its subnormals": (primitives(f32=expanded), "float16: 2046 of 65536 differ, the first at"),
        "BF16 passes through FP16": (
            primitives(
                bfloat16="bfloat16",
                from_numpy=lambda _, a, dtype=None: a if dtype == "bfloat16" else NUMPY.from_numpy(a, dtype),
                f32=rounded_bf16,
            ),
            r"bfloat16: \d+ of 65536 differ",
        ),
        "bit patterns are no bit patterns": (primitives(is_bit_pattern=lambda _, s: False), "but is_bit_pattern returns False"),
    },
    framework_laws.to_float_rounds_once_to_the_nearest: {
        "it cuts bits off": (
            primitives(to_float=lambda _, x, dtype: NUMPY.to_float(narrow(x, 13 if dtype == "float16" else 16), dtype)),
            r"to_float\(x, 'float16'\): \d+ of \d+ differ",
        ),
        "it rounds twice": (
            primitives(to_float=lambda _, x, dtype: NUMPY.to_float(NUMPY.to_float(narrow(x + x * 2**-10, 11), dtype), dtype)),
            r"to_float\(x, 'float16'\): \d+ of \d+ differ",
        ),
        "FP16 subnormals are flushed": (
            primitives(to_float=lambda _, x, dtype: NUMPY.to_float(np.where(np.abs(x) < 2.0**-14, 0 * x, x), dtype)),
            r"to_float\(x, 'float16'\): \d+ of \d+ differ.*: 0x[08]0*, expected",
        ),
        "it stays FP32": (primitives(to_float=lambda _, x, dtype: x), r"to_float\(x, 'float16'\) returns float32"),
    },
    framework_laws.load_is_the_inverse_of_store: {
        "int8 saturates": (
            primitives(store=lambda _, c, d: np.clip(c, -128, 127).astype(np.int8) if d == "int8" else NUMPY.store(c, d)),
            r"load\(store\(codes, 'int8'\)\): 127, expected 128, at \[128\]",
        ),
        "bytes are loaded with a sign": (primitives(load=sign_extended),
            r"load\(store\(codes, 'uint8'\)\): -128, expected 128, at \[128\]"),
        "everything is stored in bytes": (primitives(store=lambda _, c, d: c.astype(np.uint8)),
            r"store\(codes, 'int8'\) returns uint8"),
    },
    framework_laws.take_reads_the_table: {
        "the table is FP32": (
            primitives(take=lambda _, t, c: NUMPY.take(t, c).astype(np.float32).astype(np.int64).astype(np.int32)),
            r"take: -?\d+, expected",
        ),
        "it counts from one": (primitives(take=lambda _, t, c: NUMPY.take(t, np.maximum(c - 1, 0))), r"take: -?\d+, expected"),
    },
    framework_laws.integers_wrap_and_shift_in_twos_complement: {
        ">> is logical": (of_arrays(__rshift__=logical_shift), r"a >> 1: \d+, expected -1,"),
        "* saturates": (
            of_arrays(__mul__=lambda a, b: np.clip(plain(a).astype(np.int64) * b, -(2**31), 2**31 - 1).astype(np.int32)),
            r"a \* b: -?\d+, expected",
        ),
        "+ widens": (of_arrays(__add__=lambda a, b: plain(a).astype(np.int64) + b), r"a \+ b: int64, expected int32"),
        "~ negates": (of_arrays(__invert__=lambda a: -plain(a)), r"~a: 0, expected -1, at \[0\]"),
        "<< counts modulo 16": (of_arrays(__lshift__=lambda a, n: plain(a) << n % 16), "a << 23: 128, expected"),
    },
    framework_laws.comparisons_match_numpy: {
        "< is not >=": (of_arrays(__lt__=lambda a, b: ~(plain(a) >= b)), r"x < 1\.5: True, expected False, at \[6\]"),
        "== is that of bits": (of_arrays(__eq__=by_elements), r"x == 0\.0: False, expected True, at \[1\]"),
        "> gives integers": (of_arrays(__gt__=lambda a, b: (plain(a) > b).astype(np.int32)), "a > b: int32, expected bool"),
    },
    framework_laws.where_minimum_and_maximum_match_numpy: {
        "where widens": (primitives(where=lambda _, c, a, b: np.where(c, a, b).astype(np.int64)), "int64, expected int32"),
        "where is the wrong way round": (primitives(where=lambda _, c, a, b: np.where(c, b, a)),
            r"where\(a < b, a, b\): -?\d+,"),
        "maximum passes through FP32": (
            primitives(maximum=lambda _, a, b: np.maximum(a.astype(np.float32), b).astype(np.int64).astype(a.dtype)),
            r"maximum\(a, b\): -?\d+, expected",
        ),
        "minimum by magnitude": (primitives(minimum=lambda _, a, b: np.where(np.abs(a) < np.abs(b), a, b)),
            r"minimum\(a, b\): -?\d+, expected"),
    },
    framework_laws.amax_reduces_over_axes_and_keeps_nan: {
        "numbers are compared, not bits": (primitives(amax=float_amax), r"amax\(i, \(-1,\)\): \d+, expected 21\d+, at"),
        "nothing has no maximum": (primitives(amax=lambda _, i, axes: np.max(i, axis=axes, keepdims=True)),
            "ValueError: zero-size"),
        "axes are dropped": (primitives(amax=lambda _, i, axes: np.max(i, axis=axes, initial=0)),
            r"shape \(2, 3, 8\), expected"),
        "one axis of two": (primitives(amax=lambda _, i, axes: np.max(i, axis=axes[-1:], keepdims=True, initial=0)),
            r"amax\(i, \(-3, -1\)\): shape \(2, 3, 8, 1\), expected \(2, 1, 8, 1\)"),
    },
    framework_laws.arithmetic_rounds_once: {
        "* cuts off": (of_arrays(__mul__=toward_zero), r"x \* y: \d+ of 300 differ"),
        "- by way of BF16": (of_arrays(__sub__=lambda a, b: narrow(plain(a) - plain(b), 16)), r"x - y: \d+ of 300 differ"),
        "+ is FP64": (of_arrays(__add__=lambda a, b: plain(a).astype(np.float64) + b), r"x \+ y: float64, expected float32"),
    },
    framework_laws.products_are_not_fused_into_sums: {
        "fused multiply-add": (of_arrays(__mul__=unrounded_product, __add__=fused_sum), "fused into one rounding")
    },
    framework_laws.division_by_arrays_scalars_and_broadcasts_is_ieee: {
        "by a reciprocal": (primitives(div=lambda _, a, b: np.float32(1) / b * a), r"div\(x, y\): \d+ of 300 differ"),
        "by a constant's reciprocal": (
            primitives(div=lambda _, a, b: a * np.float32(1 / b) if isinstance(b, float) else NUMPY.div(a, b)),
            r"div\(x, 7\.0\): \d+ of 300 differ",
        ),
        "0 / 0 is 0": (
            primitives(div=lambda _, a, b: np.where(np.equal(b, 0) & np.equal(a, 0), np.float32(0), NUMPY.div(a, b))),
            "div of zeros, Inf and NaN: 4 of 49 differ",
        ),
    },
    framework_laws.integers_are_converted_exactly: {
        "number is FP16": (primitives(int_to_float=lambda _, i: through(i, np.float16)), r"int_to_float\(i\): 3 of 603 differ"),
        "bytes have a sign": (
            primitives(int_to_float=lambda _, i: NUMPY.int_to_float(i.view(np.int8) if i.dtype == np.uint8 else i)),
            "int_to_float of uint8: 128 of 256 differ",
        ),
        "to_int32 is of 16 bits": (
            primitives(
                to_int32=lambda _, x: NUMPY.to_int32(x).astype(np.int16).astype(np.int32) if hasattr(x, "astype") else int(x)
            ),
            r"to_int32\(x\): -1, expected 16777215",
        ),
        "to_int32 leaves Python's numbers": (
            primitives(to_int32=lambda _, x: NUMPY.to_int32(x) if hasattr(x, "astype") else str(x)),
            r"to_int32\(7\.0\) is '7\.0'",
        ),
    },
    framework_laws.constants_are_exact_0d_arrays: {
        "FP16": (primitives(constant=lambda _, v, like: through(np.array(v), np.float16)), r"constant\(1\.17\S+\): 1 of 1"),
        "an axis": (primitives(constant=lambda _, v, like: np.full(1, v, np.float32)), r"constant\(0\.0\): shape \(1,\), "),
    },
    framework_laws.matmul_accumulates_in_fp32: {
        "operands of TF32": (primitives(matmul=lambda _, a, b: np.matmul(narrow(a, TF32), narrow(b, TF32))),
            r"the error of matmul is \d+\.\d times the FP32 bound$"),
        "a product of FP64": (primitives(matmul=lambda _, a, b: np.matmul(a.astype(float), b)),
            "matmul: float64, expected float32"),
        "the transpose": (primitives(matmul=lambda _, a, b: np.matmul(a, b).T), r"matmul: shape \(5, 8\), expected \(8, 5\)"),
    },
    framework_laws.shape_operations_match_numpy: {
        "pad at the front": (primitives(pad=lambda _, a, w: np.pad(a, [(n, 0) for n in w])), "pad: 0, expected"),
        "swap of the first axes": (primitives(swap=lambda _, a: a.swapaxes(0, 1)), r"swap: shape \(3, 2, 4\), expected"),
        "gather in ascending order": (primitives(gather=lambda _, a, i, axis: NUMPY.gather(a, tuple(sorted(i)), axis)),
            r"gather: 0, expected 2, at \[0, 0, 0\]"),
        "concat along the last axis always": (primitives(concat=lambda _, parts, axis=-1: np.concatenate(parts, -1)),
            r"concat along -2: shape \(2, 3, 8\), expected \(2, 6, 4\)"),
    },
    framework_laws.shape_operations_keep_every_float8_bit: {
        "concat by value": (primitives(concat=lambda _, parts, axis=-1: by_value(np.concatenate(parts, axis))),
            "concat of E4M3: 127, expected 255"),
        "gather by value": (primitives(gather=lambda _, a, i, axis: by_value(NUMPY.gather(a, i, axis))),
            "gather of E4M3: 127, expected 255"),
    },
    framework_laws.pack_bits_puts_the_first_code_in_the_lowest_bits: {
        "highest first": (primitives(pack_bits=lambda _, c, bits: NUMPY.pack_bits(c[..., ::-1], bits)),
            r"pack_bits by 4 bits: \d+, expected"),
        "always nibbles": (primitives(pack_bits=lambda _, c, bits: NUMPY.pack_bits(c, 4)),
            r"pack_bits by 6 bits: \d+, expected"),
        "parted from the highest": (
            primitives(unpack_bits=lambda _, w, bits, count: NUMPY.unpack_bits(w, bits, count)[..., ::-1]),
            r"unpack_bits by 4 bits: \d+, expected",
        ),
    },
    framework_laws.counter_gives_the_index_of_each_element: {
        "16 bits": (primitives(counter=in_16_bits), r"counter, low words: -32768, expected 32768, at \[0, 32768\]"),
        "Fortran's order": (primitives(counter=in_fortran_order), r"counter, low words: 15, expected 1, at \[0, 0, 1\]"),
        "high word for low": (primitives(counter=lambda _, like: NUMPY.counter(like)[::-1]),
            "counter, low words: 0, expected 1"),
    },
    framework_laws.seeds_are_split_into_two_words: {
        "the high word is lost": (primitives(words=lambda _, seed: (NUMPY.words(seed)[0], 0)),
            r"words\(9223372036854775813\) are \[5, 0\]")
    },
    framework_laws.any_returns_a_python_bool: {
        "NumPy's own truth": (primitives(any=lambda _, c: np.any(c)), "is not True"),
        "all": (primitives(any=lambda _, c: bool(np.all(c))), "is not True"),
        "always": (primitives(any=lambda _, c: True), "is not False"),
    },
    framework_laws.assign_writes_in_place_or_refuses: {
        "the copy is written": (primitives(assign=lambda _, out, v: np.copyto(out.copy(), v)),
            r"assign\(out, value\): 3 of 4 differ")
    },
    framework_laws.native_casts_follow_the_contract: {
        "overflow is Inf": (
            primitives(
                native_cast=lambda _, y, codec: (
                    plain(y).astype(np.float16).view(np.uint16).astype(np.int32) if codec == F16 else None
                )
            ),
            r"native_cast\(y, F16\): \d+ of 302 differ, the first at .*: 0x[7f]c00, expected 0x[7f]bff",
        ),
        "-0 is lost": (primitives(native_cast=lambda _, y, codec: NUMPY.where(y == 0, 0, codec.encode(NUMPY, y))),
            r"native_cast\(y, E4M3\): 1 of 302 differ, the first at \[301\]: 0x0, expected 0x80"),
    },
    framework_laws.conversion_from_and_to_numpy_changes_no_bit: {
        "FP16 is widened on the way out": (
            primitives(to_numpy=lambda _, a: through(a) if a.dtype == np.float16 else NUMPY.to_numpy(a)),
            r"float16, converted and back: \d+ of 32 differ",
        ),
        "uint16 is widened on the way in": (primitives(from_numpy=otherwise(np.uint16, lambda a: a.astype(np.int32))),
            "a NumPy uint16 array becomes int32"),
        "FP32 NaN are made quiet": (primitives(from_numpy=otherwise(np.float32, quieted)),
            r"float32, converted and back: 1 of 16 differ.*: 0x7fc00001, expected 0x7f800001"),
    },
    framework_laws.transpose_permutes_axes: {
        "axes are reversed": (primitives(transpose=lambda _, a, axes: np.transpose(a)), r"transpose by \(1, 0, 2\): shape"),
        "the order is undone": (primitives(transpose=lambda _, a, axes: np.transpose(a, np.argsort(axes))),
            r"transpose by \(0, 3, 1, 2\): shape"),
    },
    framework_laws.grouped_matmul_multiplies_each_group_by_its_matrix: {
        "the last group has the other rows too": (
            primitives(grouped_matmul=lambda _, a, b, ends: NUMPY.grouped_matmul(a, b, np.append(ends[:-1], len(a)))),
            r"groups that end at \[2, 2, 5\]: \d+ of 35 differ",
        ),
        "all groups have the first matrix": (
            primitives(grouped_matmul=lambda _, a, b, ends: NUMPY.grouped_matmul(a, b[:1], ends[-1:])),
            r"groups that end at \[2, 2, 5\]: \d+ of 35 differ",
        ),
    },
    framework_laws.k_grouped_matmul_multiplies_the_rows_of_each_group: {
        "the last group has the other rows too": (
            primitives(k_grouped_matmul=lambda _, a, b, ends: NUMPY.k_grouped_matmul(a, b, np.append(ends[:-1], a.shape[1]))),
            r"groups that end at \[2, 2, 5\]: 15 of 45 differ",
        ),
        "each group has the rows before it": (
            primitives(k_grouped_matmul=lambda _, a, b, ends: np.stack([a[:, :end] @ b[:end] for end in ends])),
            r"groups that end at \[2, 2, 5\]: \d+ of 45 differ",
        ),
        "NaN are multiplied by zero": (
            primitives(
                k_grouped_matmul=lambda _, a, b, ends: np.stack(
                    [(a * ((np.arange(7) < e) & (np.arange(7) >= s))) @ b for s, e in zip([0, *ends[:-1]], ends, strict=True)]
                )
            ),
            r"groups that end at \[2, 2, 5\]: \d+ of 45 differ",
        ),
    },
    framework_laws.portable_arrays_round_trip: {
        "the highest bit is lost": (primitives(portable=lambda _, a: a & 0x7F), r"uint8: 128 of 256 differ"),
        "views lose the highest bit": (primitives(view=lambda _, a, dtype: a & 0x7F), r"uint8: 128 of 256 differ"),
        "they come back as int32": (primitives(from_portable=lambda _, a, dtype: a.astype(np.int32)),
            "uint8 came back as int32"),
        "items have four bytes": (primitives(itemsize=lambda _, a: 4), "itemsize of uint8 is 4, expected 1"),
    },
}  # fmt: skip


@pytest.mark.parametrize("law", framework_laws.PRIMITIVES, ids=lambda law: law.__name__)
def test_a_law_of_words_holds_for_numpy_and_has_a_fault_planted_against_it(law: Callable[[Place], None]) -> None:
    assert FAULTS.get(law), "plant a fault that this law reports"
    law(PlaceWithOps("elsewhere"))


@pytest.mark.parametrize(("law", "fault"), planted(FAULTS))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_law_of_primitives_reports_its_planted_fault(law: Callable[[Place], None], fault: str) -> None:
    ops, message = FAULTS[law][fault]
    (found,) = each("ops", "elsewhere", (law,), place=PlaceWithOps("numpy", primitives=ops))
    assert re.search(message, outcome(found)), outcome(found)


def flushing(self: Any, other: Any) -> Any:
    """A product as in XLA: subnormal results become zeros of the same sign."""
    product = plain(self) * other
    return np.where(np.abs(product) < np.float32(2.0**-126), np.copysign(np.float32(0), product), product).view(type(self))


def test_flushed_subnormals_are_allowed_and_counted_only_where_a_place_flushes() -> None:
    xla = PlaceWithOps("xla", primitives=of_arrays(__mul__=flushing))
    exact = np.array([2.0**-130, -(2.0**-130), 1.5], np.float32)
    lost = np.array([0.0, -0.0, 1.5], np.float32)
    assert xla.flushes and not Place("numpy").flushes
    before = flushed["xla"]
    expect_numbers("decoded", xla, xla.array(lost), exact)
    assert flushed["xla"] == before + 2
    with pytest.raises(AssertionError, match=r"decoded: 2 of 3 differ, the first at \[0\]: 0x0, expected 0x80000"):
        expect_numbers("decoded", Place("numpy"), lost, exact)
    with pytest.raises(AssertionError, match=r"decoded: 1 of 3 differ, the first at \[1\]: 0x0, expected 0x80080000"):
        expect_numbers("decoded", xla, xla.array(np.abs(lost)), exact)
    with pytest.raises(AssertionError, match=r"decoded: 1 of 3 differ, the first at \[2\]"):
        expect_numbers("decoded", xla, xla.array(lost * 0), np.abs(exact) * np.array([1, -1, 1], np.float32))


def test_a_wrong_dtype_or_shape_of_numbers_is_reported() -> None:
    for found, message in (
        (np.ones(3, np.float16), "decoded: float16, expected float32"),
        (np.ones(3, np.float64), "decoded: float64, expected float32"),
        (np.ones((3, 1), np.float32), r"decoded: shape \(3, 1\), expected \(3,\)"),
    ):
        with pytest.raises(AssertionError, match=message):
            expect_numbers("decoded", Place("numpy"), found, np.ones(3, np.float32))


def test_a_framework_whose_arrays_belong_to_another_is_reported() -> None:
    declared = frameworks.framework_of(np.ones(1))
    framework_laws.its_arrays_are_recognized(declared, Place("numpy"))
    with pytest.raises(AssertionError, match="its array is recognized as one of numpy"):
        framework_laws.its_arrays_are_recognized(replace(declared, name="acme"), Place("numpy"))
    monkeyed = primitives(from_numpy=lambda _, a, dtype=None: a.astype(np.float16))
    with pytest.raises(AssertionError, match="dtype_name of its float32 array is 'float16'"):
        framework_laws.its_arrays_are_recognized(declared, PlaceWithOps("numpy", primitives=monkeyed))


# ---------------------------------------------------------------------------------------------- codecs


class RenamedE4M3(Minifloat):
    """E4M3 under another name; subclasses have one fault each."""

    @classmethod
    def made(cls, **fields: Any) -> RenamedE4M3:
        return cls(**{f: getattr(E4M3, f) for f in E4M3.__dataclass_fields__} | {"name": "A8"} | fields)


class NanOfFive(RenamedE4M3):
    @property
    def nan_code(self) -> int:
        return 5


class Truncates(RenamedE4M3):
    def encode(self, ops: Ops, y: Any, word: Any = None) -> Any:
        return super().encode(ops, ops.bitcast_to_float(ops.bitcast_to_int(y) & -(1 << 20)), word)


class TiesAway(RenamedE4M3):
    def encode(self, ops: Ops, y: Any, word: Any = None) -> Any:
        i = ops.bitcast_to_int(y)
        ordinary = ((i & MAGNITUDE) >= 0x3C000000) & ((i & MAGNITUDE) < 0x43000000)  # 2^-7 .. 128
        return super().encode(ops, ops.bitcast_to_float(ops.where(ordinary & (word is None), i + 1, i)), word)


class LosesMinusZero(RenamedE4M3):
    def encode(self, ops: Ops, y: Any, word: Any = None) -> Any:
        code = super().encode(ops, y, word)
        return ops.where(code == 0x80, 0, code)


class Overflows(RenamedE4M3):
    def encode(self, ops: Ops, y: Any, word: Any = None) -> Any:
        return ops.where(
            (ops.bitcast_to_int(y) & MAGNITUDE) > 0x43E80000, 0x7F, super().encode(ops, y, word)
        )  # beyond 464: NaN


class NanIsLargest(RenamedE4M3):
    def encode(self, ops: Ops, y: Any, word: Any = None) -> Any:
        code = super().encode(ops, y, word)
        return ops.where(code == 0x7F, 0x7E, code)


class IgnoresRandomBits(RenamedE4M3):
    def encode(self, ops: Ops, y: Any, word: Any = None) -> Any:
        return super().encode(ops, y)


class ReadsNoSubnormals(RenamedE4M3):
    def decode(self, ops: Ops, codes: Any) -> Any:
        return super().decode(ops, ops.where((codes & 0x78) == 0, 0, codes))


class Unchecked(RenamedE4M3):
    """Skips the checks of `Minifloat`, as a plug-in's class may."""

    def __post_init__(self) -> None:
        pass


CODEC_FAULTS: Faults[tuple[Codec, str]] = {
    "its_declaration_is_complete": {
        "no source": (RenamedE4M3.made(source=" "), r"codec 'A8' has no source=; say where the format is defined"),
        "None for a source": (RenamedE4M3.made(source=None), r"codec 'A8' has no source="),
        "a smaller maximum": (Unchecked.made(largest=440.0), r"max is 440\.0, but its largest value is 448\.0"),
        "a larger maximum": (Unchecked.made(largest=480.0), r"max is 480\.0, but its largest value is 448\.0"),
        "an infinite maximum": (Unchecked.made(largest=float("inf")), r"codec 'A8': max is inf"),
        "a NaN code that is a number": (NanOfFive.made(), r"nan_code 0x5 decodes to 0\.009765625"),
        "too many bits": (Unchecked.made(bits=64), r"codec 'A8' has 64 bits"),
        "nothing is declared": (Codec("A8", 8, None, "tests"), "'A8' does not declare its largest"),
    },
    "numbers_are_encoded_as_the_nearest_code": {
        "it truncates": (Truncates.made(), r"A8 codes of \d+ numbers: \d+ of \d+ differ"),
        "ties go away from zero": (TiesAway.made(), r"A8 codes of \d+ numbers: \d+ of \d+ differ"),
        "-0 is +0": (LosesMinusZero.made(), r"differ, the first at \[\d+\]: 0x0, expected 0x80"),
        "overflow is NaN": (Overflows.made(), r": 0x7f, expected 0x7e"),
        "NaN is a number": (NanIsLargest.made(), r": 0x7e, expected 0x7f"),
    },
    "stochastic_rounding_matches_the_oracle": {
        "random bits do nothing": (IgnoresRandomBits.made(), r"A8 stochastic codes of \d+ numbers: \d+ of \d+ differ")
    },
    "every_code_decodes_to_its_value": {
        "subnormals are read as zeros": (
            ReadsNoSubnormals.made(),
            r"A8 codes: 15 of 256 differ, the first at \[1\]: 0x0, expected 0x3b000000",
        )
    },
}


@pytest.mark.parametrize(("sentence", "fault"), planted(CODEC_FAULTS))
def test_the_laws_of_codecs_report(sentence: str, fault: str) -> None:
    codec, message = CODEC_FAULTS[sentence][fault]
    laws = [law for law in here(codecs.laws(stray("codecs", codec))) if law.sentence == sentence]
    assert [bool(re.search(message, outcome(law))) for law in laws] == [True], [outcome(law) for law in laws]


@pytest.mark.parametrize("codec", [RenamedE4M3.made(), E8M0, INT4, NF4, F16, F32], ids=lambda codec: codec.name)
def test_the_laws_of_codecs_hold_for_a_correct_one(codec: Codec) -> None:
    assert verdicts(codecs.laws(stray("codecs", codec))) == {}


# ---------------------------------------------------------------------------------------------- rules


class ForF32(Linear):
    """`linear` only for FP32 scales of E4M3, which keeps these tests short; subclasses have one fault each."""

    def scale(self, ops: Ops, statistic: Any, codec: Codec, element: Codec, qmax: float, global_scale: Any) -> Any:
        if (codec, element) != (F32, E4M3):
            raise RecipeError("for FP32 scales of E4M3 only")
        return self.wrong(ops, super().scale(ops, statistic, codec, element, qmax, global_scale))

    def wrong(self, ops: Ops, code: Any) -> Any:
        return code


class NotMonotone(ForF32):
    def wrong(self, ops: Ops, code: Any) -> Any:
        return code ^ 1


class ZeroScale(ForF32):
    def wrong(self, ops: Ops, code: Any) -> Any:
        return code * 0


class InfiniteScale(ForF32):
    def wrong(self, ops: Ops, code: Any) -> Any:
        return ops.where(code > 0x7A000000, F32_INF, code)


class OtherOutsideNumpy(ForF32):
    def wrong(self, ops: Ops, code: Any) -> Any:
        return code if ops is NUMPY else code + 1


class ZeroScaleInE4M3(Rule):
    def scale(self, ops: Ops, statistic: Any, codec: Codec, element: Codec, qmax: float, global_scale: Any) -> Any:
        if (codec, element) != (E4M3, E4M3):
            raise RecipeError("for E4M3 only")
        return ops.bitcast_to_int(statistic) * 0


class BeyondE8M0(Rule):
    code = 300

    def scale(self, ops: Ops, statistic: Any, codec: Codec, element: Codec, qmax: float, global_scale: Any) -> Any:
        if (codec, element) != (E8M0, E4M3):
            raise RecipeError("for E8M0 only")
        return ops.bitcast_to_int(statistic) * 0 + self.code


class BelowE8M0(BeyondE8M0):
    code = -1


class AcceptsNothing(Rule):
    def scale(self, ops: Ops, statistic: Any, codec: Codec, element: Codec, qmax: float, global_scale: Any) -> Any:
        raise RecipeError("not this one either")


POSITIVE, ASCENDING = "scales_are_positive", "a_larger_amax_never_gets_a_smaller_scale"
RULE_FAULTS: Faults[tuple[Rule, str]] = {
    ASCENDING: {"not monotone": (NotMonotone("jagged"), r"rule 'jagged' in F32 for E4M3: the scale falls at amax \[\d\S+\]")},
    POSITIVE: {
        "zero": (ZeroScale("nought"), r"rule 'nought' in F32 for E4M3: scales \[0\.0, 0\.0, 0\.0\]"),
        "zero where small blocks may be": (ZeroScaleInE4M3("nought"), r"in E4M3 for E4M3: scale 0 for amax 3\.402\S+e\+38"),
        "infinite": (InfiniteScale("endless"), r"rule 'endless' in F32 for E4M3: scales \[inf, inf, inf\]"),
        "codes of more bits": (BeyondE8M0("beyond"), r"\['0x12c', '0x12c', '0x12c'\] are not 8-bit codes"),
        "negative codes": (BelowE8M0("below"), r"\['0xffffffff', .* are not 8-bit codes"),
    },
    "it_accepts_some_codec": {
        "serves no codec": (AcceptsNothing("choosy"), "rule 'choosy' raises RecipeError for every codec")
    },
}


@pytest.mark.parametrize(("sentence", "fault"), planted(RULE_FAULTS))
def test_the_laws_of_rules_report(sentence: str, fault: str) -> None:
    rule, message = RULE_FAULTS[sentence][fault]
    found = verdicts(rules.laws(stray("rules", rule)))
    assert re.search(message, found[sentence]), found


def test_the_laws_of_rules_hold_for_a_correct_one_and_skip_what_the_oracle_does_not_know() -> None:
    found = verdicts(rules.laws(stray("rules", ForF32("mine"))))
    assert found == {
        "scales_match_the_oracle": "skipped: the oracle does not know ForF32; other frameworks are compared with NumPy's scales"
    }


def test_a_rule_of_other_scales_on_another_framework_is_reported() -> None:
    place = PlaceWithOps("elsewhere", primitives=primitives())
    rules.scales_match_the_oracle(ForF32("mine"), place)
    with pytest.raises(AssertionError, match=r"elsewise in F32 for E4M3, against NumPy: \d+ of \d+ differ"):
        rules.scales_match_the_oracle(OtherOutsideNumpy("elsewise"), place)


def test_a_rule_that_the_oracle_knows_is_compared_with_the_oracle() -> None:
    by_reciprocals = primitives(div=lambda _, a, b: a * np.float32(1 / b))
    with pytest.raises(AssertionError, match=r"linear in \w+ for \w+: \d+ of \d+ differ"):
        rules.scales_match_the_oracle(LINEAR, PlaceWithOps("numpy", primitives=by_reciprocals))


# ---------------------------------------------------------------------------------------------- a registry with one plug-in


# ---------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Stray(ScalingRecipe):
    """E4M3, `block` along K under an F32 scale."""

    name = "stray"
    source = "tests"
    block: int = 16

    @cached_property
    def format(self) -> Format:
        return Format(E4M3, (Level(F32, (1, self.block)),))


@dataclass(frozen=True)
class Sourceless(Stray):
    """It has no source."""

    source = ""


@dataclass(frozen=True)
class Undescribed(Stray):
    block: int = 16


@dataclass(frozen=True)
class Needing(ScalingRecipe):
    """Its block has no default."""

    name = "stray"
    source = "tests"
    block: int

    @cached_property
    def format(self) -> Format:
        return Format(E4M3, (Level(F32, (1, self.block)),))


@dataclass(frozen=True)
class NeedingInSecret(Needing):
    """Its fingerprint lacks the field too."""

    block: int = field(metadata={"affects_bytes": False})


@dataclass(frozen=True)
class Forgetful(Stray):
    """Its JSON lacks a field."""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": {}}


@dataclass(frozen=True)
class Unpicklable(Stray):
    """Its pickle restores a different recipe."""

    def __reduce__(self) -> Any:
        return type(self), (99,)


@dataclass(frozen=True)
class Secretive(Stray):
    """Its fingerprint lacks its block."""

    block: int = field(default=16, metadata={"affects_bytes": False})


@dataclass(frozen=True)
class Unhashed(Stray):
    """Equal recipes have different hashes."""

    def __hash__(self) -> int:
        return id(self)


class Twice(Linear):
    """Scales of twice the size."""

    def scale(self, ops: Ops, statistic: Any, codec: Codec, element: Codec, qmax: float, global_scale: Any) -> Any:
        return super().scale(ops, statistic, codec, element, qmax / 2, global_scale)


@dataclass(frozen=True)
class UnknownRule(Stray):
    """Its rule is of a class of its own."""

    rules = (Twice("twice"),)


TRAVELS, WELL, ONE = (
    "it_round_trips_through_json_and_pickle",
    "its_class_is_documented_and_tested",
    "equal_recipes_have_equal_hashes_and_fingerprints",
)
RECIPE_FAULTS: Faults[tuple[type[ScalingRecipe], tuple[ScalingRecipe, ...], str]] = {
    WELL: {
        "no source": (Sourceless, (), "Sourceless has no source; cite where the format is defined"),
        "no docstring": (Undescribed, (), "Undescribed has no docstring"),
        "a field without a default": (Needing, (), r"Needing needs block: no instance is tested; .* recipes=\[\.\.\.\]\)"),
    },
    TRAVELS: {
        "JSON without a field": (Forgetful, (), "its JSON lacks block: a file would be read with"),
        "JSON that loses a value": (Forgetful, (Forgetful(32),), r"from_json\(to_json\(\)\) gave Forgetful\(block=16\)"),
        "another pickle": (Unpicklable, (), r"pickle gave Unpicklable\(block=99\)"),
    },
    ONE: {
        "a hidden field": (Secretive, (Secretive(32),),
            r"Secretive\(block=\d+\) has the same fingerprint but writes different"),
        "a hidden field that is needed": (NeedingInSecret, (NeedingInSecret(8), NeedingInSecret(32)),
            r"NeedingInSecret\(block=\d+\) has the same fingerprint but writes different bytes"),
        "hashes of its own": (Unhashed, (), r"Unhashed\(block=16\) and Unhashed\(block=16\) are not equal"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("sentence", "fault"), planted(RECIPE_FAULTS))
def test_the_laws_of_recipes_report(declare: Callable[..., list[Law]], sentence: str, fault: str) -> None:
    kind, tried, message = RECIPE_FAULTS[sentence][fault]
    found = [outcome(law) for law in declare(*tried, recipes=[kind]) if law.sentence == sentence]
    assert any(re.search(message, one) for one in found), found


def test_the_laws_of_recipes_hold_for_a_sound_one(declare: Callable[..., list[Law]]) -> None:
    assert verdicts(declare(recipes=[Stray])) == {
        "it_round_trips_through_safetensors": "skipped: breccia-bridges is not installed"
    }


def test_a_required_field_is_tested_with_the_given_settings(declare: Callable[..., list[Law]]) -> None:
    laws = declare(Needing(8), recipes=[Needing])
    assert {law.subject for law in laws} == {"stray", "stray,block=8"}
    assert verdicts(law for law in laws if law.sentence in (WELL, TRAVELS, ONE)) == {}


def test_casts_under_a_rule_that_the_oracle_does_not_know_are_compared_with_numpy(
    declare: Callable[..., list[Law]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdicts(laws := declare(recipes=[UnknownRule]))
    unknown = "skipped: the oracle does not know Twice; casts are compared with NumPy's instead"
    judged = {"a_cast_writes_the_oracles_bytes", "a_stochastic_cast_writes_the_oracles_bytes"}
    judged |= {"any_bit_pattern_is_cast_as_the_oracle_casts_it"}
    assert found == dict.fromkeys(judged, unknown) | {
        "it_round_trips_through_safetensors": "skipped: breccia-bridges is not installed"
    }
    monkeypatch.setattr(api, "cast", as_op(wrong_code))
    assert re.search("^along rows: data: 1 of ", verdicts(laws)["casts_write_the_bytes_of_numpy"])


# Kernels with one fault each; some replace public operations too.


def as_op(faulty: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel of a casting op in the public signature of the op."""
    return lambda x, recipe, **options: faulty(x, recipe, CastOptions(**options))


def wrong_code(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    written = reference.cast(x, recipe, options)
    if x.size:
        written.data.flat[0] ^= 1
    return written


def wrong_scale(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    written = reference.cast(x, recipe, options)
    written.scale.view(f"u{written.scale.itemsize}").flat[-1] ^= 1
    return written


def wide_codes(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    c = reference.cast(x, recipe, options)
    parts = (c.zero_point, c.global_scale, c.axis, c.padding)
    return ScaledTensor.from_parts(c.data.astype(np.int32), c.scale, recipe, c.layout, *parts)


def ignores_axis(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options.replace(axis=-1))


def ignores_seed(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options.replace(seed=None if options.seed is None else 0))


def writes_into_x(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    written = reference.cast(x, recipe, options)
    x[...] = 0
    return written


def nan_is_zero(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(np.where(np.isnan(x), x.dtype.type(0), x), recipe, options)


def cast_in_half(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(through(x, np.float16), recipe, options)


def ignores_scale(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options.replace(scale=None))


def never_raises(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options.replace(nonfinite="propagate"))


def ignores_out(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options.replace(out=None))


def gives_out_back(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options) if options.out is None else options.out


def one_twice(x: Any, recipe: ScalingRecipe, options: CastOptions) -> tuple[ScaledTensor, ScaledTensor]:
    written = reference.cast(x, recipe, options)
    return written, written


def pair_of_any_number(x: Any, recipe: ScalingRecipe, options: CastOptions) -> tuple[ScaledTensor, ScaledTensor]:
    return reference.cast_pair(x, recipe, options.replace(nonfinite="propagate"))


def ignores_out_dtype(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    out = options.out
    return reference.dequantize(scaled, product_options("float32", out=out))


def cuts_off(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    """BF16 by truncation of FP32."""
    out_dtype = options.out_dtype
    if out_dtype != "bfloat16":
        return reference.dequantize(scaled, options)
    upper = (reference.dequantize(scaled).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return upper.view(pytest.importorskip("ml_dtypes").bfloat16)


def leaves_out(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    out_dtype, _, out = options
    return reference.dequantize(scaled, product_options(out_dtype)) if out is None else out


def fails(*arguments: Any) -> Any:
    raise ValueError("the driver is upset")


def halves(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    return through(reference.dequantize(scaled), np.float16).astype(np.float16)


def by_halves(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    return through(reference.dequantize(scaled), np.float16)


def numbers_only(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    return np.nan_to_num(reference.dequantize(scaled))


def flat_where_empty(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    back = reference.dequantize(scaled)
    return back if back.size else back.reshape(0)


def writes_into_codes(scaled: ScaledTensor, options: ProductOptions = FLOAT32) -> Any:
    back = reference.dequantize(scaled)
    scaled.data[...] = 0
    return back


def casts_again(scaled: ScaledTensor, recipe: ScalingRecipe, options: CastOptions) -> Any:
    back = reference.dequantize(scaled)
    return scaled if recipe == scaled.recipe else reference.cast(through(back, np.float16), recipe)


def matmul_in_half(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    bias = options.bias
    left, right = (reference.dequantize(x) if isinstance(x, ScaledTensor) else x for x in (a, b))
    product = through(np.matmul(left.astype(np.float16), right.astype(np.float16)))
    return product if bias is None else product + bias


def matmul_of_rows(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    bias = options.bias
    return reference.matmul(a, b, product_options("float32", bias=bias))[:-1]


def ignores_bias(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
    return reference.matmul(a, b)


def matmul_without_a_cast(x: Any, recipe: ScalingRecipe, b: Any, options: ProductOptions = FLOAT32) -> Any:
    bias = options.bias
    return reference.matmul(x, b, product_options("float32", bias=bias))


def groups_of_first(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """Every group times the first matrix."""
    return reference.grouped_matmul(a, b, np.full_like(offsets, offsets[-1]))


def groups_to_the_end(a: Any, b: Any, offsets: Any, options: ProductOptions = FLOAT32) -> Any:
    """Treat rows outside all groups as rows of the last group."""
    ends = offsets.copy()
    ends[-1] = a.shape[0]
    return reference.grouped_matmul(a, b, ends)


def the_input(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    return x


def trip_that_writes(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    back = reference.cast_ste(x, recipe, options)
    x[...] = 0
    return back


OP_FAULTS: dict[str, list[tuple[str, Callable[..., Any], str]]] = {
    "a_cast_writes_the_oracles_bytes": [
        ("cast", wrong_code, r"codes: 1 of \d+ differ, the first at \[0, 0\]"),
        ("cast", wrong_scale, r"scale: 1 of \d+ differ"),
        ("dequantize", by_halves, r"decoded: \d+ of \d+ differ"),
    ],
    "a_stochastic_cast_writes_the_oracles_bytes": [("cast", ignores_seed, r"codes: \d+ of \d+ differ")],
    "any_bit_pattern_is_cast_as_the_oracle_casts_it": [("cast", nan_is_zero, r"scale: \d+ of \d+ differ")],
    "every_code_under_every_scale_decodes_as_the_oracle_says": [("dequantize", numbers_only, r"decoded: \d+ of \d+ differ")],
    "casts_write_the_bytes_of_numpy": [
        ("cast", ignores_axis, r"^along rows: axis is -1, expected -2"),
        ("cast", ignores_seed, r"^stochastic: data: \d+ of \d+ differ"),
    ],
    "nothing_non_finite_becomes_finite": [
        ("cast", nan_is_zero, "a NaN or Inf decodes to a number"),
        ("dequantize", halves, "decoded: float16, expected float32"),
    ],
    "an_empty_array_stays_empty": [("dequantize", flat_where_empty, r"\(0, 32\) became \(0, 32\), then \(0,\)")],
    "requantize_writes_the_bytes_of_numpy": [("requantize", casts_again, r"(data|scale): \d+ of \d+ differ")],
}


@pytest.mark.parametrize(
    ("sentence", "op_name", "faulty", "message"),
    [
        pytest.param(sentence, *row, id=f"{row[0]}-{row[1].__name__}-{sentence}")
        for sentence, rows in OP_FAULTS.items()
        for row in rows
    ],
)
def test_the_laws_of_recipes_report_a_wrong_operation(
    declare: Callable[..., list[Law]], monkeypatch: pytest.MonkeyPatch, sentence: str, op_name: str, faulty: Any, message: str
) -> None:
    (law,) = [law for law in declare(recipes=[Stray]) if law.sentence == sentence]
    assert outcome(law) == ""
    monkeypatch.setattr(api, op_name, faulty if op_name == "dequantize" else as_op(faulty))
    assert re.search(message, outcome(law)), outcome(law)


def test_a_tensor_level_scale_is_checked_by_the_oracle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NumPy, where the generic algorithm itself is tested."""
    sound = breccia.Float8CurrentScaling()
    recipes.every_code_under_every_scale_decodes_as_the_oracle_says(sound, Place("numpy"))
    for module in (api, reference):
        monkeypatch.setattr(module, "dequantize", lambda s, genuine=reference.dequantize: -genuine(s))
    with pytest.raises(AssertionError, match="decoded: "):
        recipes.every_code_under_every_scale_decodes_as_the_oracle_says(sound, Place("numpy"))


KEPT: dict[str, dict[str, ScaledTensor]] = {}


def keep(tensors: dict[str, ScaledTensor], path: Any) -> None:
    KEPT[str(path)] = tensors


def find_again(path: Any) -> dict[str, ScaledTensor]:
    return KEPT.pop(str(path))


def find_another(path: Any) -> dict[str, ScaledTensor]:
    found = find_again(path)
    for kept in found.values():
        kept.data.flat[-1] ^= 1
    return {name: ScaledTensor.from_parts(k.data.copy(), k.scale, k.recipe, k.layout, padding=1) for name, k in found.items()}


@pytest.mark.parametrize(("load", "message"), [("find_again", "^$"), ("find_another", "^padding is 1, expected 0$")])
def test_a_file_that_does_not_keep_a_recipe_is_reported(declare: Callable[..., list[Law]], load: str, message: str) -> None:
    files = [Bridge("save_safetensors", f"{__name__}:keep"), Bridge("load_safetensors", f"{__name__}:{load}")]
    (law,) = [law for law in declare(recipes=[Stray], bridges=files) if law.sentence == "it_round_trips_through_safetensors"]
    assert re.search(message, outcome(law)), outcome(law)


def test_frameworks_are_held_to_numpys_bytes_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    framework_laws.casts_and_decoded_values_match_numpy(MX, Place("numpy"))
    for verb, faulty, message in (("cast", as_op(wrong_scale), "scale: 1 of"), ("dequantize", by_halves, "decoded: ")):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=message):
            patch.setattr(api, verb, faulty)
            framework_laws.casts_and_decoded_values_match_numpy(MX, Place("numpy"))


# ---------------------------------------------------------------------------------------------- kernels


def missing(device: Device) -> str:
    return "acme_npu is not installed"


def there(device: Device) -> bool:
    return True


def unsure(device: Device) -> None:
    raise OSError("no /dev/acme")


def surprised(device: Device) -> str | None:
    """Raises for a device that is not a CPU."""
    return {"cpu": None}[device.kind]


def numbered(device: Device) -> str | None:
    """Raises for a device whose capability is unknown."""
    return None if device.kind == "cpu" or device.capability >= (8, 0) else "too old"  # type: ignore[operator]


def nothing(call: Any) -> str:
    return "Acme takes nothing"


def refused(why: str, target: Callable[..., Any]) -> str:
    """The error pattern of dispatch, which refuses a kernel's result before a law sees it."""
    came = rf"It came from kernel 'stray\.{target.__name__}' of plug-in 'stray' \(.*test_kit\.py:\d+\)"
    return rf"^KernelError: {re.escape(why)}\. {came}; BRECCIA_BLOCK=stray sets that plug-in aside\.$"


CAST, VALUES = "casts_write_the_bytes_of_the_generic_algorithm", "decoded_values_match_the_generic_algorithm"
AGAIN, PRODUCT = "requantize_writes_the_bytes_of_the_generic_algorithm", "products_stay_within_the_error_bound"
CAST_OPTIONS, VALUE_OPTIONS = "options_of_a_cast_are_honoured", "options_of_dequantize_are_honoured"
PAIR, GROUPS = "cast_pair_equals_two_casts", "grouped_products_stay_within_the_error_bound"
TRIP, AVAILABLE = "round_trips_equal_dequantize_of_cast", "it_says_whether_it_is_available"
BEYOND, DECLINED = r"the error is \d+\.\d times the bound of FP32", "declined every array tried here$"
KERNEL_FAULTS: Faults[tuple[Kernel, str]] = {
    CAST: {
        "one code is wrong": (kernel(wrong_code), r"^data: 1 of \d+ differ, the first at \[0, 0\]: 0x\w+, expected 0x\w+$"),
        "one scale is wrong": (kernel(wrong_scale), r"^scale: 1 of \d+ differ, the first at \[\d+, 2\]: 0x\w+, expected 0x"),
        "codes are of four bytes": (kernel(wide_codes), "^data: items of 4 bytes, expected 1$"),
        "axis= is ignored": (kernel(ignores_axis), r"cast was to write blocks along axis -2; the result has axis -1"),
        "seed= is ignored": (kernel(ignores_seed), r"^data: \d+ of \d+ differ"),
        "NaN is dropped": (kernel(nan_is_zero), r"^(scale|data): \d+ of \d+ differ"),
        "half precision in between": (kernel(cast_in_half), r"^(scale|data): \d+ of \d+ differ"),
        "it writes into x": (kernel(writes_into_x), "^it writes into its input$"),
        "it gives the array back": (kernel(the_input), refused("cast returns a ScaledTensor, not ndarray", the_input)),
        "it fails": (kernel(fails), "^ValueError: the driver is upset$"),
        "what it accepts is wrong too": (kernel(wrong_scale, accepts=along_k), r"^scale: 1 of \d+ differ"),
        # Not faults: laws that cannot be tested are skipped with a reason.
        "it is not available": (kernel(wrong_code, available=missing), "^skipped: acme_npu is not installed$"),
        "it declines everything": (kernel(wrong_code, accepts=nothing), rf"^skipped: stray.wrong_code {DECLINED}"),
        "its device is not here": (kernel(wrong_code, device="cuda"),
            r"^skipped: no device 'cuda': NumPy arrays are on the 'cpu'; got device 'cuda'\.$"),
    },
    VALUES: {
        "values in half precision": (kernel(halves, "dequantize"),
            refused("dequantize was asked for float32; got float16", halves)),
        "values by half precision": (kernel(by_halves, "dequantize"), r"^decoded: \d+ of \d+ differ"),
        "values are all numbers": (kernel(numbers_only, "dequantize"), r"^decoded: \d+ of \d+ differ"),
        "it writes into the codes": (kernel(writes_into_codes, "dequantize"), r"^it writes into its input: data: \d+ of"),
    },
    AGAIN: {"values are rounded again": (kernel(casts_again, "requantize"), r"^(data|scale): \d+ of \d+ differ")},
    CAST_OPTIONS: {
        "scale= is ignored": (kernel(ignores_scale), r"^data: \d+ of \d+ differ"),
        "nonfinite= is ignored": (kernel(never_raises), '^nonfinite="raise" did not raise for a NaN$'),
        "out= is ignored": (kernel(ignores_out), "^it did not return out=$"),
        "out= is left as it was": (kernel(gives_out_back), r"^(scale|data): \d+ of \d+ differ"),
    },
    VALUE_OPTIONS: {
        "out_dtype= is ignored": (kernel(ignores_out_dtype, "dequantize"),
            refused("dequantize was asked for float16; got float32", ignores_out_dtype)),
        "BF16 is cut off": (kernel(cuts_off, "dequantize", recipe=breccia.Float8BlockScaling),
            r"^decoded to bfloat16: \d+ of \d+ differ"),
        "out= of values is left as it was": (kernel(leaves_out, "dequantize"), r"^out: \d+ of \d+ differ"),
    },
    PRODUCT: {
        "half precision accumulates": (kernel(matmul_in_half, "matmul"), rf"^matmul: {BEYOND}"),
        "a row is missing": (kernel(matmul_of_rows, "matmul"),
            refused("matmul gives shape (9, 7); got (8, 7)", matmul_of_rows)),
        "a bias is ignored": (kernel(ignores_bias, "matmul"), rf"^matmul with a bias: {BEYOND}"),
        "nothing is cast": (kernel(matmul_without_a_cast, "cast_matmul"), rf"^cast_matmul: {BEYOND}"),
        "it declines all products": (kernel(matmul_in_half, "matmul", accepts=nothing),
            rf"^skipped: stray.matmul_in_half {DECLINED}"),
    },
    GROUPS: {
        "all groups are of one matrix": (kernel(groups_of_first, "grouped_matmul"), rf"^grouped_matmul: {BEYOND}"),
        "rows of no group have products": (kernel(groups_to_the_end, "grouped_matmul"),
            "^grouped_matmul: rows of no group are not zeros$"),
    },
    PAIR: {
        "both of a pair lie one way": (kernel(one_twice, "cast_pair"), r"cast_pair was to write blocks along axis -2"),
        "nonfinite= of a pair is ignored": (kernel(pair_of_any_number, "cast_pair"),
            '^nonfinite="raise" did not raise for a NaN$'),
    },
    TRIP: {
        "no round trip": (kernel(the_input, "cast_ste"), r"^cast_ste: \d+ of \d+ differ"),
        "a round trip that writes into x": (kernel(trip_that_writes, "cast_ste"), "^it writes into its input$"),
    },
    AVAILABLE: {
        "available says True": (kernel(wrong_code, available=there),
            r"^[\w.]+:there\('cpu'\) returned True, expected None or a reason$"),
        "available fails": (kernel(wrong_code, available=unsure), r"^[\w.]+:unsure\('cpu'\) raised OSError: no /dev/acme$"),
        "available knows CPUs alone": (kernel(wrong_code, available=surprised),
            r"^[\w.]+:surprised\('cuda'\) raised KeyError: 'cuda'$"),
        "available needs a capability": (kernel(wrong_code, available=numbered),
            r"^[\w.]+:numbered\('cuda'\) raised TypeError: '>=' not supported"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("sentence", "fault"), planted(KERNEL_FAULTS))
def test_the_laws_of_kernels_report(declare: Callable[..., list[Law]], sentence: str, fault: str) -> None:
    faulty, message = KERNEL_FAULTS[sentence][fault]
    found = verdicts(declare(kernels=[faulty]))
    assert re.search(message, found[sentence]), found


def sound_cast(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return reference.cast(x, recipe, options)


TRIED = (CAST, CAST_OPTIONS, PAIR, VALUES, VALUE_OPTIONS, AGAIN, PRODUCT, GROUPS, TRIP)


def test_the_laws_of_kernels_hold_for_correct_ones(declare: Callable[..., list[Law]]) -> None:
    sound = [
        Kernel(op, "numpy", f"breccia.kernels.reference.{MODULES[op]}:{op}", f"stray.{op}", recipe=MXFP8BlockScaling)
        for op in SOUND
    ]
    laws = declare(kernels=[*sound, kernel(sound_cast, accepts=along_k, rank=1)])
    assert verdicts(laws) == {}
    tried = {law.subject for law in laws if law.sentence in TRIED}
    assert {f"stray.{op}.mxfp8" for op in (*SOUND, "sound_cast")} <= tried


# ---------------------------------------------------------------------------------------------- storages


def reversed_rows(ops: Ops, parts: dict[str, Any], plain: Plain) -> dict[str, Any]:
    """Scales with their rows reversed; the function is its own inverse."""
    return {name: part[..., ::-1, :] if name == "scale" else part for name, part in parts.items()}


def as_it_is(ops: Ops, parts: dict[str, Any], plain: Plain) -> dict[str, Any]:
    return dict(parts)


def with_another_bit(ops: Ops, parts: dict[str, Any], plain: Plain) -> dict[str, Any]:
    scale = parts["scale"].copy()
    scale.reshape(-1).view(np.uint8)[-1] ^= 1
    return {**parts, "scale": scale}


def no_tensors(plain: Plain) -> str | None:
    return "it is a storage of nothing"


def storage(from_plain: Any, to_plain: Any, **fields: Any) -> Storage:
    targets = (f"{__name__}:{function.__name__}" for function in (from_plain, to_plain))
    return Storage("stray_rows", *targets, **fields)


UNDONE, PLAINLY = "to_plain_undoes_from_plain", "storage_does_not_change_values_or_digests"
STORAGE_FAULTS: Faults[tuple[Storage, str]] = {
    UNDONE: {
        "it is never undone": (storage(reversed_rows, as_it_is), r"^scale: \d+ of \d+ differ"),
        "a bit is lost on the way in": (storage(with_another_bit, as_it_is), r"^scale: 1 of \d+ differ"),
        "it declares reordered codes that are not": (
            storage(as_it_is, as_it_is, data_axes=1),
            r"^(shape is|.*broadcast|.*reshape)",
        ),
    },
    PLAINLY: {"values are others": (storage(reversed_rows, as_it_is), "^its digest differs from that of the plain tensor$")},
}


@pytest.mark.parametrize(("sentence", "fault"), planted(STORAGE_FAULTS))
def test_the_laws_of_storages_report(declare: Callable[..., list[Law]], sentence: str, fault: str) -> None:
    faulty, message = STORAGE_FAULTS[sentence][fault]
    laws = [law for law in declare(storages=[faulty]) if law.sentence == sentence and "fp32" not in law.subject]
    found = [outcome(law) for law in laws if "mxfp8" in law.subject or ".block" in law.subject]
    assert any(re.search(message, text, re.DOTALL) for text in found), found


def test_the_laws_of_storages_hold_for_a_correct_one(declare: Callable[..., list[Law]]) -> None:
    laws = declare(storages=[storage(reversed_rows, reversed_rows, accepts="breccia.tensors.storage:accepts_blocks")])
    assert {law.sentence for law in laws} >= {UNDONE, PLAINLY}
    found = {law.subject: outcome(law) for law in here(laws)}
    whole = {subject for subject, text in found.items() if text}
    assert whole and all(found[subject].startswith("skipped: stray_rows holds no tensor") for subject in whole)
    assert any("mxfp8" in subject and not text for subject, text in found.items())


def test_a_storage_that_no_tensor_can_use_skips_its_laws(declare: Callable[..., list[Law]]) -> None:
    laws = declare(storages=[storage(as_it_is, as_it_is, accepts=f"{__name__}:no_tensors")])
    texts = {outcome(law) for law in laws if law.sentence == UNDONE}
    assert all(text.startswith("skipped: stray_rows holds no tensor of") for text in texts), texts


def test_a_result_that_dispatch_does_not_check_is_checked_by_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch does not check the results of core's kernels."""
    for sentence, op_name, faulty, message in (
        (CAST, "cast", lambda x, recipe, **options: x, "'numpy.ndarray' object has no attribute 'recipe'"),
        (VALUES, "dequantize", lambda scaled, **options: halves(scaled), "^decoded: float16, expected float32$"),
        (VALUE_OPTIONS, "dequantize", lambda scaled, **options: by_halves(scaled), "^out_dtype='float16' gave float32$"),
        (
            PRODUCT,
            "matmul",
            lambda a, b, **options: reference.matmul(a, b)[:-1],
            r"^matmul: shape \(8, 7\), expected \(9, 7\)$",
        ),
    ):
        with monkeypatch.context() as patch, pytest.raises((AssertionError, AttributeError), match=message):
            patch.setattr(api, op_name, faulty)
            getattr(products if op_name == "matmul" else kernels, sentence)(kernel(sound_cast, op_name), MX, Place("numpy"))


def test_a_kernel_that_runs_for_fewer_calls_than_declared_is_reported(declare: Callable[..., list[Law]]) -> None:
    """The kernel is declared for one recipe and tested with another: dispatch itself must report it."""
    faulty = kernel(sound_cast)
    declare(kernels=[replace(faulty, recipe=NVFP4BlockScaling)])
    with pytest.raises(AssertionError, match="it has no accepts=, but does not run for this call:\n(.|\n)*for cast of nvfp4"):
        kernels.casts_write_the_bytes_of_the_generic_algorithm(faulty, MX, Place("numpy"))


def test_an_opt_in_kernel_is_only_tested_for_running_when_named(
    declare: Callable[..., list[Law]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = kernel(wrong_code, opt_in=True)
    laws = declare(kernels=[fast])
    assert {law.sentence for law in laws} == {"the_object_reference_exists", AVAILABLE, "it_runs_only_when_named"}
    assert verdicts(laws) == {}
    chosen = breccia.dispatch.explanation.Explanation(
        "cast of mxfp8", "numpy", (breccia.dispatch.explanation.Verdict(fast, None),)
    )
    monkeypatch.setattr(api, "explain", lambda *operands: chosen)
    assert re.search(
        "^it is selected without being named:\ncast of mxfp8 on numpy\n -> ", verdicts(laws)["it_runs_only_when_named"]
    )


# ---------------------------------------------------------------------------------------------- bridges


def to_parts(scaled: ScaledTensor) -> tuple[Any, ...]:
    named = {name: getattr(scaled, name) for name in ("zero_point", "global_scale", "axis", "shape")}
    return scaled.data, scaled.scale, scaled.recipe, scaled.layout, named


def to_flipped(scaled: ScaledTensor) -> tuple[Any, ...]:
    data, *others = to_parts(scaled)
    return data ^ (np.arange(data.size).reshape(data.shape) == 3), *others


def to_nobody(scaled: ScaledTensor) -> Any:
    raise DialectError("Acme takes nothing.")


def to_one(scaled: ScaledTensor) -> Any:
    return to_parts(scaled) if scaled.recipe.name == "mxfp6" else to_nobody(scaled)


def from_parts(data: Any, scale: Any, recipe: Any, layout: Any, **others: Any) -> ScaledTensor:
    return ScaledTensor(data, scale, recipe, layout, **others)


def from_whole(data: Any, scale: Any, recipe: Any, layout: Any, *, shape: Any, **others: Any) -> ScaledTensor:
    return ScaledTensor(data, scale, recipe, layout, **others)


def from_dict(*parts: Any, **others: Any) -> dict[str, Any]:
    return others


BACK = "accepted_tensors_round_trip_byte_for_byte"
BRIDGE_FAULTS: Faults[tuple[Callable[..., Any], Callable[..., Any], str]] = {
    BACK: {
        "a byte is flipped": (to_flipped, from_parts, r"^data: 1 of \d+ differ, the first at \[0, 3\]"),
        "the padding is lost": (to_parts, from_whole, r"^padding is 0, expected [13]$"),
        "a dict comes back": (to_parts, from_dict, "^from_stray returned dict, expected a ScaledTensor$"),
    },
    "it_accepts_some_recipe": {
        "everything is refused": (to_nobody, from_parts, r"^it refuses every recipe: Acme takes nothing\.$")
    },
}


def crossing(out: Callable[..., Any], back: Callable[..., Any], **declared: Any) -> list[Bridge]:
    targets = {"to_stray": out, "from_stray": back}
    return [Bridge(name, f"{__name__}:{function.__name__}", **declared) for name, function in targets.items()]


@pytest.mark.parametrize(("sentence", "fault"), planted(BRIDGE_FAULTS))
def test_the_laws_of_bridges_report(declare: Callable[..., list[Law]], sentence: str, fault: str) -> None:
    out, back, message = BRIDGE_FAULTS[sentence][fault]
    found = [outcome(law) for law in declare(bridges=crossing(out, back)) if law.sentence == sentence]
    assert any(re.search(message, one) for one in found), found


@pytest.mark.parametrize("out", [to_parts, to_one])
def test_the_laws_of_bridges_hold_for_correct_ones(declare: Callable[..., list[Law]], out: Callable[..., Any]) -> None:
    assert verdicts(declare(bridges=crossing(out, from_parts))) == {}


def test_a_bridge_to_a_missing_library_must_say_what_to_install(
    declare: Callable[..., list[Law]], monkeypatch: pytest.MonkeyPatch
) -> None:
    laws = declare(bridges=crossing(to_parts, from_parts, requires=("acme_runtime",), install="acme-runtime"))
    skipped = "skipped: acme_runtime is not installed"
    assert verdicts(laws) == {"the_object_reference_exists": skipped, "it_accepts_some_recipe": skipped, BACK: skipped}
    there = [law for law in laws if law.sentence == "it_is_available_or_says_what_to_install"]
    assert {law.subject for law in there} == {"to_stray", "from_stray"}
    for facade, message in (
        (SimpleNamespace(to_stray=to_parts), " needs acme_runtime, which is not installed, but raises no ImportError"),
        (Curt(), " does not say what to install: no"),
    ):
        monkeypatch.setattr(bridges, "facade", facade)
        assert outcome(there[0]) == f"breccia.bridges.to_stray{message}"


class Curt:
    """A module whose missing attributes give no explanation."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("no")


def test_a_bridge_that_is_no_function_is_reported(declare: Callable[..., list[Law]]) -> None:
    (law,) = [
        w for w in declare(bridges=[Bridge("to_stray", f"{__name__}:BACK")]) if w.sentence.startswith("it_is_available_or")
    ]
    assert outcome(law) == "breccia.bridges.to_stray is not a function"


class Parcel:
    """A foreign tensor: the components and what the bytes do not tell."""

    def __init__(self, st: ScaledTensor) -> None:
        self.st = st


class Flipped(Parcel):
    """A parcel whose reader flips a byte."""


def to_parcel(st: ScaledTensor) -> Parcel:
    return Parcel(st)


def to_flipped_parcel(st: ScaledTensor) -> Flipped:
    return Flipped(st)


def from_parcel(parcel: Parcel) -> ScaledTensor:
    if type(parcel) is not Flipped:
        return parcel.st
    data = np.array(parcel.st.data)
    data.reshape(-1).view(np.uint8)[0] ^= 1
    return ScaledTensor(data, parcel.st.scale, parcel.st.recipe, parcel.st.layout, parcel.st.zero_point, parcel.st.global_scale)


def abroad(out: str | None, back: str = "from_parcel") -> list[Foreign]:
    classes = (f"{__name__}:Parcel", f"{__name__}:Flipped")
    return [Foreign("stray", classes, f"{__name__}:{back}", None if out is None else f"{__name__}:{out}")]


RETURNS = "what_it_builds_is_found_by_its_class_and_returns"


def test_the_laws_of_foreign_classes_hold_for_correct_ones(declare: Callable[..., list[Law]]) -> None:
    laws = declare(foreign=abroad("to_parcel"))
    assert {law.sentence for law in laws if law.kind == "foreign"} >= {RETURNS, "its_functions_load_or_say_what_is_missing"}
    assert verdicts([law for law in laws if law.kind == "foreign"]) == {}
    assert RETURNS not in {law.sentence for law in declare(foreign=abroad(None))}


def test_the_laws_of_foreign_classes_report_faults(declare: Callable[..., list[Law]]) -> None:
    found = [outcome(law) for law in declare(foreign=abroad("to_flipped_parcel")) if law.sentence == RETURNS]
    assert any(re.search(r"^data: 1 of \d+ differ, the first at \[0, 0\]", one) for one in found), found
    (law,) = [w for w in declare(foreign=abroad(None, "BACK")) if w.sentence.startswith("its_functions_load")]
    assert outcome(law) == f"{__name__}:BACK is not a function"


# ---------------------------------------------------------------------------------------------- manifests


def test_a_plug_in_that_was_set_aside_has_one_law_with_the_reason() -> None:
    aside = replace(STRAY, status="set aside", reason="RuntimeError: boom")
    assert verdicts(manifest.laws(Subject(aside, {}))) == {
        "it_is_active": "plug-in 'stray' (stray-breccia 0.1) is set aside: RuntimeError: boom"
    }
    assert len(list(manifest.laws(Subject(aside, {})))) == 1


def test_a_plug_in_without_declarations_has_the_laws_of_its_manifest() -> None:
    with pytest.raises(AssertionError, match="declares nothing; is each hook in stray_manifest marked @breccia.hookimpl"):
        manifest.it_is_active(STRAY)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import json, breccia\n", "^$"),
        (
            "import numpy\n",
            "importing stray_manifest also imports numpy; import it in the modules that the object references name$",
        ),
        ("import nobody_has_this\n", "`import stray_manifest` fails in a fresh process: (.|\n)*'nobody_has_this'"),
    ],
    ids=["light", "heavy", "broken"],
)
def test_a_manifest_is_imported_alone_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "stray_manifest.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (law,) = [law for law in manifest.laws(Subject(STRAY, {})) if law.sentence.startswith("it_imports")]
    assert re.search(message, outcome(law)), outcome(law)


def test_a_hook_that_returns_something_else_the_second_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("stray_manifest")
    monkeypatch.setitem(sys.modules, "stray_manifest", module)
    vars(module)["breccia_codecs"] = lambda: [NF4]
    manifest.it_declares_the_same_each_time(STRAY)
    drawn = iter([[NF4], [INT4]])
    vars(module)["breccia_codecs"] = lambda: next(drawn)
    with pytest.raises(AssertionError, match=r"breccia_codecs of stray_manifest returned \(Lookup\(.*, then \(Integer\("):
        manifest.it_declares_the_same_each_time(STRAY)


@pytest.mark.parametrize("field", ["target", "available", "accepts", "score", "plan"])
def test_a_misspelt_object_reference_is_reported(declare: Callable[..., list[Law]], field: str) -> None:
    wrong = {"available": missing, "accepts": along_k, "score": along_k, "plan": along_k}
    laws = declare(kernels=[replace(kernel(sound_cast, **wrong), **{field: f"{__name__}:wrong_cod"})])
    found = {law.subject: outcome(law) for law in laws if law.sentence == "the_object_reference_exists"}
    assert found.pop(f"stray.sound_cast.{field}").startswith(f"{__name__}:wrong_cod cannot be found: ")
    assert set(found.values()) == {""}
    gone = declare(kernels=[replace(kernel(sound_cast), target="nobody_has_this:cast")])
    (message,) = [outcome(law) for law in gone if law.sentence == "the_object_reference_exists"]
    assert message.startswith("nobody_has_this:cast cannot be found: ") and "ModuleNotFoundError" in message


# ---------------------------------------------------------------------------------------------- all laws

#: Laws with separate tests above, and laws of kernels whose faults are in test_kit_kernels.py.
TESTED_SEPARATELY = {
    "a_call_without_prefer_finds_one_kernel", "accepts_score_and_plan_answer_every_call",
    "declared_storages_are_read_and_written", "half_precision_and_views_cast_to_the_same_bytes",
    "options_of_requantize_are_honoured", "options_of_round_trips_are_honoured",
    "tensor_times_array_stays_within_the_error_bound", "array_times_tensor_stays_within_the_error_bound",
    "array_times_array_stays_within_the_error_bound", "views_decode_to_the_same_values",
    "its_arrays_are_recognized", "casts_and_decoded_values_match_numpy", "scales_match_the_oracle",
    "it_round_trips_through_safetensors", "it_runs_only_when_named", "it_is_available_or_says_what_to_install",
    "it_is_active", "it_imports_only_breccia_and_the_standard_library", "it_declares_the_same_each_time",
    "the_object_reference_exists",
}  # fmt: skip


def test_every_law_has_a_fault_planted_against_it(declare: Callable[..., list[Law]]) -> None:
    sound = [Kernel(op, "numpy", f"breccia.kernels.reference.{MODULES[op]}:{op}", f"stray.{op}") for op in SOUND]
    declare(
        codecs=[RenamedE4M3.made()],
        rules=[ForF32("mine")],
        recipes=[Stray],
        frameworks=[frameworks.Framework("acme", "acme", ("Array",), "acme.ops:OPS")],
        kernels=[
            *sound,
            kernel(wrong_code, opt_in=True, available=missing),
            kernel(sound_cast, accepts=along_k, reads=("transposed",)),
        ],
        bridges=crossing(to_parts, from_parts),
    )
    tables = (CODEC_FAULTS, RULE_FAULTS, RECIPE_FAULTS, KERNEL_FAULTS, BRIDGE_FAULTS)
    reported = {law.__name__ for law in FAULTS}.union(TESTED_SEPARATELY, OP_FAULTS, *tables)
    assert {law.sentence for law in laws_of("stray")} == reported


# ---------------------------------------------------------------------------------------------- conformance()


def test_ids_are_unique_and_stable(declare: Callable[..., list[Law]]) -> None:
    declare(
        Stray(8),
        recipes=[Stray],
        kernels=[kernel(sound_cast)],
        bridges=crossing(to_parts, from_parts),
        codecs=[RenamedE4M3.made()],
    )
    for plugin, tried in (("stray", (Stray(8),)), ("core", ())):
        first, second = ([law.id for law in laws_of(plugin, tried)] for _ in range(2))
        assert first == second and len(first) == len(set(first)) > 50
    found = {law.id for law in laws_of("stray", (Stray(8),))}
    assert found > {
        "manifest/stray/it_is_active",
        "codecs/A8/numpy/numbers_are_encoded_as_the_nearest_code",
        "recipes/stray,block=8/numpy/a_cast_writes_the_oracles_bytes",
        "kernels/stray.sound_cast.mxfp8/numpy/casts_write_the_bytes_of_the_generic_algorithm",
        "bridges/to_stray.nvfp4/accepted_tensors_round_trip_byte_for_byte",
    }


def test_every_framework_is_tested_unless_some_are_selected(declare: Callable[..., list[Law]]) -> None:
    declare(codecs=[RenamedE4M3.made()])
    (chosen,) = conformance("stray", frameworks="numpy").pytestmark
    everywhere = {law.id for law in laws_of("stray")}
    assert {case.id for case in chosen.args[1]} == everywhere
    (nowhere,) = conformance("stray", frameworks=()).pytestmark
    assert {case.id for case in nowhere.args[1]} == {found for found in everywhere if "/numpy/" not in found}


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (
            lambda: conformance("stary"),
            UnknownNameError,
            r"conformance\('stary'\): no such plug-in is installed; did you mean 'stray'\? .* the name of an entry point in "
            r"the group 'breccia'; after a change of pyproject\.toml install the distribution again\.",
        ),
        (
            lambda: conformance("stray", recipes=[MX]),
            UnknownNameError,
            r"recipes=: MXFP8BlockScaling\(.*\) is not a recipe of plug-in 'stray', which declares stray\.",
        ),
        (
            lambda: conformance("stray", recipes=[Stray]),  # type: ignore[list-item]
            UnsupportedError,
            r"recipe must be a ScalingRecipe instance, got Stray; did you mean Stray\(\)\?",
        ),
        (lambda: conformance("stray", frameworks=["nunpy"]), UnknownNameError, r"no framework 'nunpy'; did you mean 'numpy'\?"),
        (lambda: conformance("stray", frameworks="nunpy"), UnknownNameError, r"no framework 'nunpy'; did you mean 'numpy'\?"),
    ],
    ids=["no such plug-in", "a recipe of another plug-in", "a recipe class", "no such framework", "a framework as a string"],
)
def test_invalid_arguments_of_conformance_are_refused(
    declare: Callable[..., list[Law]], asked: Callable[[], Any], error: type[Exception], message: str
) -> None:
    declare(recipes=[Stray])
    with pytest.raises(error, match=f"^{message}"):
        asked()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            '"codecs/A8/its_declaration_is_complet" = "soon"',
            r"no law has the id 'codecs/A8/its_declaration_is_complet'; did you mean '.*'\?",
        ),
        ('"codecs/B*" = "soon"', r"no law has the id 'codecs/B\*'"),
        ('"codecs/*" = " "', r"'codecs/\*' needs a reason, as text in quotes; got ' '\."),
        ('"codecs/*" = true', r"'codecs/\*' needs a reason, as text in quotes; got True\."),
        ("[codecs]", r"'codecs' needs a reason, as text in quotes; got \{\}\."),
        ('codecs/A8 = "soon"', r"Expected '=' after a key .*\. A line is written \"law's id\" = \"reason\"\."),
        ("\udcff", r"'utf-8' codec can't decode byte 0xff .*\. A line is written"),
    ],
)
def test_an_invalid_xfail_file_is_refused(declare: Callable[..., list[Law]], tmp_path: Path, listed: str, message: str) -> None:
    declare(codecs=[RenamedE4M3.made()])
    file = tmp_path / "known.toml"
    file.write_bytes(listed.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: {message}"):
        conformance("stray", xfails=file)


def test_a_missing_xfail_file_is_reported(declare: Callable[..., list[Law]], tmp_path: Path) -> None:
    declare(codecs=[RenamedE4M3.made()])
    with pytest.raises(FileNotFoundError, match="known.toml"):
        conformance("stray", xfails=tmp_path / "known.toml")


def test_an_xfail_file_may_name_frameworks_that_are_not_selected(declare: Callable[..., list[Law]], tmp_path: Path) -> None:
    declare(codecs=[RenamedE4M3.made()])
    file = tmp_path / "known.toml"
    file.write_text('"codecs/A8/numpy/*" = "soon"\n"codecs/A8/its_*" = "later"\n')
    (parametrize,) = conformance("stray", xfails=file, frameworks=()).pytestmark
    marked = {case.id: [(mark.kwargs["reason"], mark.kwargs["strict"]) for mark in case.marks] for case in parametrize.args[1]}
    assert marked.pop("codecs/A8/its_declaration_is_complete") == [("later", True)]
    assert set(map(tuple, marked.values())) == {()}


# ---------------------------------------------------------------------------------------------- a run of pytest

ON_DISK = """
from breccia import Kernel, MXFP8BlockScaling, hookimpl
from breccia.codecs import Minifloat
api = 1

@hookimpl
def breccia_codecs():
    return [Minifloat(name, 8, None, source, 4, 3, 7, 448.0, nan=0x7F) for name, source in (("A8", "tests"), ("B8", ""))]

@hookimpl
def breccia_kernels():
    npu = "stray_npu"
    return [Kernel("cast", "numpy", f"{npu}:cast", "stray.cast", recipe=MXFP8BlockScaling, available=f"{npu}:missing")]
"""
NPU = "def missing(device):\n    return 'the NPU is out'\n\ndef cast(x, recipe, options):\n    pass\n"
#: The counts of a run: 1 + 3 laws per codec, 3 of the manifest, 2 of object references, 5 of the kernel.
COUNTED = "stray: 14 passed, 3 skipped, 1 xfailed"


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution stray-breccia."""
    folder = tmp_path_factory.mktemp("stray")
    info = folder / "stray_breccia-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stray-breccia\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[breccia]\nstray = stray_manifest\n")
    (folder / "stray_manifest.py").write_text(ON_DISK)
    (folder / "stray_npu.py").write_text(NPU)
    return folder


def ran(on_disk: Path, folder: Path, source: str, *words: str, code: int = 0) -> str:
    """The output of pytest on a file with this source, in a new process."""
    file = folder / "test_it.py"
    file.write_text(f"from breccia.testing import conformance\n{source}\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BRECCIA_", "PYTEST_"))}
    env = kept | {"PYTHONPATH": str(on_disk), "COLUMNS": "200"}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder))
    run = subprocess.run([*command, *words, str(file)], cwd=folder, env=env, capture_output=True, text=True)
    assert run.returncode == code, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


KNOWN = '"codecs/B8/its_declaration_is_complete" = "its manual is not out"\n'


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_prints_the_counts_and_reasons_of_the_laws(on_disk: Path, tmp_path: Path, workers: int) -> None:
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "known.toml").write_text(KNOWN)
    test = "test_it = conformance('stray', frameworks='numpy', xfails='known.toml')"
    out = ran(on_disk, tmp_path, test, *(("-n", str(workers)) if workers else ()))
    before, _, summary = out.partition("= breccia conformance =")
    if not workers:  # with workers the controller collects nothing itself
        assert before.startswith(f"conformance of stray\nbreccia {breccia.__version__}, numerics contract 1; plug-ins: core ")
        assert "stray 0.1" in before and re.search(r"^frameworks: .*numpy \d.*; ml_dtypes ", before, re.MULTILINE)
    assert f"\n{COUNTED}\n" in summary and f"breccia {breccia.__version__}, numerics contract 1" in summary
    assert "\n  skipped, 3: the NPU is out\n" in summary
    assert "\n  known to fail, 1: its manual is not out\n" in summary


@pytest.mark.long
def test_a_listed_law_that_holds_fails_the_run_and_so_does_one_that_is_broken(on_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text('"codecs/A8/its_declaration_is_complete" = "thought to be broken"\n')
    out = ran(on_disk, tmp_path, "test_it = conformance('stray', frameworks=(), xfails='known.toml')", code=1)
    assert "[XPASS(strict)] thought to be broken" in out
    assert "AssertionError: codec 'B8' has no source=; say where the format is defined" in out
    failed = re.findall(r"^FAILED [^[]*\[([^]]*)\]", out, re.MULTILINE)
    assert failed == [f"codecs/{name}/its_declaration_is_complete" for name in ("A8", "B8")]
    assert re.search(r"^stray: \d+ passed, 2 failed$", out, re.MULTILINE)
    assert "kit.py" not in out and "law.py" not in out, "frames of the kit are of no use to its caller"


def test_flushed_numbers_are_summed_over_all_workers(declare: Callable[..., list[Law]]) -> None:
    """From the test reports, since each worker counts separately."""
    declare(codecs=[RenamedE4M3.made()])
    xla = PlaceWithOps("xla", primitives=of_arrays(__mul__=flushing))
    zeros, subnormal = xla.array(np.zeros(2, np.float32)), np.full(2, 2.0**-130, np.float32)
    law = Law("ops", "xla", "numbers_are_read", lambda: expect_numbers("decoded", xla, zeros, subnormal))
    properties: list[tuple[str, Any]] = []
    conformance("stray")(law=law, record_property=lambda name, value: properties.append((name, value)))
    lines: list[str] = []
    reports = [SimpleNamespace(user_properties=properties)] * 3
    pytest_plugin.pytest_terminal_summary(SimpleNamespace(stats={"passed": reports}, section=lines.append, line=lines.append))
    assert lines[0] == "breccia conformance" and "stray: 3 passed" in lines
    assert lines[-1] == "  xla: 6 decoded values below 2^-126 came back as zeros, which the contract allows"


@pytest.mark.long
def test_a_run_without_conformance_tests_prints_no_summary(on_disk: Path, tmp_path: Path) -> None:
    out = ran(on_disk, tmp_path, "def test_nothing(): pass")
    assert "breccia" not in out and "1 passed" in out


# ---------------------------------------------------------------------------------------------- strategies

DRAWN = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    found: list[Any] = []

    @settings(DRAWN, max_examples=count)
    @given(strategy)
    def draw(x: Any) -> None:
        found.append(x)

    draw()
    return found


def patterns(numbers: Iterable[float]) -> np.ndarray:
    """Bit patterns of the FP32 numbers."""
    return np.array(list(numbers), np.float64).astype(np.float32).view(np.uint32)


@pytest.mark.long
def test_numbers_reach_every_kind_of_fp32_number() -> None:
    found = np.array(drawn(strategies.numbers(), 3000))
    with np.errstate(invalid="ignore"):
        assert np.isnan(found).any() and (found == np.float32(found)).sum() == (~np.isnan(found)).sum(), "FP32 all"
    finite = np.abs(found[np.isfinite(found)])
    assert set(np.copysign(1, found[found == 0])) == {1.0, -1.0}
    assert {np.inf, -np.inf} <= set(found.tolist())
    assert float(np.finfo(np.float32).max) in finite and 2.0**-149 in finite and 2.0**-126 in finite
    assert ((finite > 0) & (finite < 2.0**-126)).any() and ((finite > 2.0**-10) & (finite < 2.0**10)).sum() > 300
    powers = np.log2(finite[finite > 0])
    assert (powers == np.round(powers)).sum() > 100


@pytest.mark.long
@pytest.mark.parametrize("recipe", [MX, NVFP4BlockScaling(), breccia.NF4Scaling()], ids=lambda recipe: recipe.name)
def test_numbers_of_a_recipe_reach_its_values_and_midpoints(recipe: ScalingRecipe) -> None:
    found = set(patterns(abs(v) for v in drawn(strategies.numbers(recipe, finite=True), 1500)).tolist())
    values = sorted({abs(v) for v in oracle.ladder(recipe.format.element)[0]})
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    for wanted in (values, middles):
        reached = [v for v in patterns(map(float, wanted)).tolist() if v in found]
        assert len(reached) >= min(len(wanted), 30), f"{len(reached)} of {len(wanted)}"


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, MX], ids=["any", "mxfp8"])
def test_finite_numbers_are_finite(recipe: ScalingRecipe | None) -> None:
    assert all(map(np.isfinite, drawn(strategies.numbers(recipe, finite=True), 1000)))
    assert np.isfinite(np.concatenate([a.ravel() for a in drawn(strategies.arrays(recipe=recipe, finite=True), 50)])).all()


def test_arrays_contain_nans_with_several_payloads() -> None:
    found = np.concatenate(drawn(strategies.arrays((64,)), 200)).view(np.uint32)
    assert {0x7FC00000, 0x7F800001, 0xFFC00000, 0xFF800001} <= set(found.tolist())


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "axes"),
    [(None, {2, 3}), (MX, {2, 3}), (breccia.DelayedScaling(), {1, 2, 3})],
    ids=["any", "mxfp8", "fp8_delayed"],
)
def test_shapes_have_the_axes_of_a_recipe_and_may_be_empty_or_have_one_element(
    recipe: ScalingRecipe | None, axes: set[int]
) -> None:
    found = drawn(strategies.shapes(recipe, max_side=20), 1000)
    assert {len(shape) for shape in found} == axes
    assert {int(np.prod(shape)) for shape in found} >= {0, 1}
    assert {side for shape in found for side in shape} <= set(range(21))
    assert any(side % 16 for shape in found for side in shape[-1:])


def test_arrays_have_the_requested_shape() -> None:
    assert {a.shape for a in drawn(strategies.arrays((3, 5)), 20)} == {(3, 5)}
    assert {a.shape for a in drawn(strategies.arrays(st.sampled_from([(2,), (4, 4)])), 40)} == {(2,), (4, 4)}
    assert {a.dtype for a in drawn(strategies.arrays(), 20)} == {np.dtype(np.float32)}


def test_recipes_are_the_given_ones_or_all_defaults() -> None:
    assert (
        {r.name for r in drawn(strategies.recipes(), 300)}
        == {r.name for r in strategies.defaults()}
        >= {r.name for r in RECIPES}
    )
    assert set(drawn(strategies.recipes([MX, Stray()]), 30)) == {MX, Stray()}


@pytest.mark.long
@pytest.mark.parametrize("kind", RECIPES, ids=lambda kind: kind.name)
def test_tensors_are_casts_under_the_recipe(kind: type[ScalingRecipe]) -> None:
    for scaled in drawn(strategies.tensors(kind()), 10):
        assert isinstance(scaled, ScaledTensor) and scaled.recipe == kind()
        back = reference.dequantize(scaled)
        assert back.shape == scaled.shape and back.dtype == np.float32


@pytest.mark.long
def test_tensors_without_a_given_recipe_have_several() -> None:
    assert len({scaled.recipe.name for scaled in drawn(strategies.tensors(), 60)}) > 3


# ---------------------------------------------------------------------------------------------- imports


def test_importing_the_kit_imports_no_test_tool() -> None:
    script = "import sys, breccia.testing; print(*{'pytest', 'hypothesis', 'numpy'}.intersection(sys.modules))"
    assert printed(script) == "\n"


@pytest.mark.parametrize(("tool", "names"), [("pytest", ["conformance", "Law"]), ("hypothesis", ["strategies"])])
def test_without_test_tools_the_kit_says_what_to_install_and_the_oracle_works(tool: str, names: list[str]) -> None:
    script = f"""
import sys
sys.modules[{tool!r}] = None
from breccia import testing
for name in {names}:
    try:
        getattr(testing, name)
    except ImportError as e:
        print(e)
print(testing.oracle.decode(testing.oracle.F32, 0x3F800000), testing.vectors.__name__)
"""
    *errors, last = printed(script).splitlines()
    remedy = f"needs {tool}, which is not installed: {breccia.siblings.TESTING.remedy}."
    assert errors == [f"breccia.testing.{needing} {remedy}" for needing in names]
    assert last == "1.0 breccia.testing.vectors"
