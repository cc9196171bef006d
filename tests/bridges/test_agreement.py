"""The agreement table: its page matches the result file, new measurements match it, and each stated cause gives the bytes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT

import breccia
from breccia.arrays.ops import NUMPY
from breccia.codecs import E2M1, E2M3, E3M2, E4M3, E5M2, INT4, INT8, UINT4, UINT8, Codec
from breccia.errors import CorruptFileError
from breccia_bridges import agreement
from breccia_bridges.agreement import Library, Quantizer, Setting, Written, packed, table, transformer_engine
from breccia_bridges.agreement import __main__ as program

DOCS = ROOT / "docs"
#: Smaller than the arrays that the page was measured on.
SHAPE = (128, 256)

Row = dict[str, Any]


@cache
def result() -> dict[str, Any]:
    return table.read(DOCS / table.RESULT)


def rows() -> dict[tuple[str, str], Row]:
    """(library, quantizer) -> its row of the table."""
    return {(n["name"], row["name"]): row for n in result()["neighbours"] for row in n["rows"]}


DECLARED = {(n.name, q.name): (n, q) for n in agreement.libraries() for q in n.quantizers}


@cache
def inputs() -> dict[str, np.ndarray]:
    return table.matrices(SHAPE)


def measured_version(neighbour: str) -> str | None:
    return next(n["version"] for n in result()["neighbours"] if n["name"] == neighbour)


@pytest.fixture
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    """The quantizer of a (library, name); skips where another version is installed than the one measured."""
    neighbour, found = DECLARED[request.param]
    wanted, there = measured_version(neighbour.name), neighbour.version()
    if there is None:
        pytest.skip(f"{neighbour.name} is not installed")
    if there.partition("+")[0] != (wanted or "").partition("+")[0]:
        pytest.skip(f"{neighbour.name} is {there}, and the page is about {wanted}")
    return found


def theirs(quantizer: Quantizer, x: np.ndarray) -> Written:
    found = table.attempt(quantizer.write, x)
    assert isinstance(found, Written), found
    return found


#: qwix compiles each quantizer for seconds.
SLOW = [pytest.param(of, marks=pytest.mark.long) if of[0] == "qwix" else of for of in DECLARED]
every = pytest.mark.parametrize("quantizer", SLOW, indirect=True, ids=lambda of: f"{of[0]}: {of[1]}")

# -- the page and its result -----------------------------------------------------------------------------------------


def test_the_page_matches_the_result_file() -> None:
    assert (DOCS / table.PAGE).read_text(encoding="utf-8") == table.page(result())


def test_every_declared_library_has_its_rows() -> None:
    assert [n["name"] for n in result()["neighbours"]] == [n.name for n in agreement.libraries()]
    assert list(rows()) == list(DECLARED)
    for key, row in rows().items():
        measured = {name: (row[name]["writes"], row[name]["cause"]) for name in ("default", "closest") if name in row}
        declared = DECLARED[key][1].settings
        assert measured == {name: (table.label(o.writes), o.cause) for name, o in declared.items()}, key
        assert row["error"] is None, key


def test_at_least_six_other_libraries_were_measured() -> None:
    ran = {n["name"] for n in result()["neighbours"] if n["version"] and any(not row["recorded"] for row in n["rows"])}
    assert len(ran) >= 6, ran


@pytest.mark.parametrize("key", DECLARED, ids=lambda of: f"{of[0]}: {of[1]}")
def test_a_row_has_a_cause_exactly_where_bytes_differ(key: tuple[str, str]) -> None:
    row = rows()[key]
    for name in ("default", "closest"):
        if name in row:
            assert table.agrees(row[name]) != bool(row[name]["cause"]), (name, table.total(row[name]["shares"]))


def test_the_closest_setting_is_closer_than_the_default() -> None:
    def equal(setting: Row) -> float:
        return min(part[0] / part[1] for part in table.total(setting["shares"]).values())

    for key, row in rows().items():
        assert "closest" not in row or equal(row["closest"]) > equal(row["default"]), key


def test_recipe_labels_parse_as_the_recipes() -> None:
    for _, quantizer in DECLARED.values():
        for o in quantizer.settings.values():
            if not isinstance(o.writes, Codec):
                assert breccia.recipe(table.label(o.writes)) == o.writes


@pytest.mark.parametrize(("equal", "of", "text"), [(3, 3, "100"), (999_999, 1_000_000, "99.9"), (1, 3, "33.3"), (0, 7, "0")])
def test_a_share_is_100_percent_only_if_all_are_equal(equal: int, of: int, text: str) -> None:
    assert table.percent(equal, of) == text


# -- new measurements ------------------------------------------------------------------------------------------------


@every
def test_bytes_are_equal_where_the_page_says_100_percent(quantizer: Quantizer, request: pytest.FixtureRequest) -> None:
    key = request.node.callspec.params["quantizer"]
    claimed = [name for name in ("default", "closest") if name in rows()[key] and table.agrees(rows()[key][name])]
    matrices = quantizer.recorded() if quantizer.recorded else inputs()
    for name, given in matrices.items():
        x = table.fitting(quantizer.default.writes, given)
        there = theirs(quantizer, x)
        for setting in claimed:
            found = table.shares(there, table.ours(x, quantizer.settings[setting].writes))
            assert all(equal == of for equal, of in found.values()), (name, setting, found)


@pytest.mark.long
@every
def test_edge_cases_give_what_the_page_says(quantizer: Quantizer, request: pytest.FixtureRequest) -> None:
    if quantizer.recorded:
        pytest.skip("a recording has no faults in it")
    assert table.edges(quantizer) == rows()[request.node.callspec.params["quantizer"]]["edges"]


@pytest.mark.long
@pytest.mark.parametrize("quantizer", [("qwix", "mxfp8")], indirect=True, ids=["qwix"])
def test_qwix_drops_a_nan_only_in_large_arrays(quantizer: Quantizer) -> None:
    """The page must mention the size, since a small array keeps the NaN."""
    x = table.faulty("NaN", np.s_[:1, :32])
    assert table.word("NaN", x, theirs(quantizer, x).decoded, np.s_[:1, :32]) == "NaN; rest finite"
    small = np.ascontiguousarray(x[:2, :64])
    assert table.word("NaN", small, theirs(quantizer, small).decoded, np.s_[:1, :32]) == "block NaN"


# -- each cause reproduces the bytes ---------------------------------------------------------------------------------
# The arithmetic of the other library as the cause describes it, in NumPy. Only the rounding of elements is breccia's, which
# other tests check.

F = np.float32
Made = tuple[np.ndarray | None, np.ndarray]  # (scale, data); the scale is None where the cause concerns only the codes


def encode(codec: Codec, y: np.ndarray) -> np.ndarray:
    return codec.encode(NUMPY, np.asarray(y, F))


def split(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (blocks of k, their amax)."""
    b = x.reshape(x.shape[0], -1, k)
    return b, np.abs(b).max(-1, keepdims=True)


def written(x: np.ndarray, codes: np.ndarray, codec: Codec, scale: np.ndarray | None) -> Made:
    return None if scale is None else scale[..., 0], packed(codes.astype(np.int64).reshape(x.shape), codec)


def powers(x: np.ndarray, codec: Codec, exponent: Callable[[np.ndarray], np.ndarray]) -> Made:
    """Scales of 2^exponent(amax)."""
    b, amax = split(x, 32)
    n = exponent(amax).astype(np.int32)
    return written(x, encode(codec, np.ldexp(b, -n)), codec, (n + 127).astype(np.uint8))


def field(amax: np.ndarray, added: int = 0) -> np.ndarray:
    """The exponent of amax after adding `added` to its bit pattern."""
    return ((amax.view(np.uint32) + np.uint32(added)) >> 23).astype(np.int32) - 127


def towards_zero(y: np.ndarray) -> np.ndarray:
    """E2M1 codes, ties towards zero, no −0."""
    code = (np.abs(y)[..., None] > np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], F)).sum(-1)
    return np.where((y < 0) & (code > 0), code | 8, code)


def torch_log2(ratio: np.ndarray) -> np.ndarray:
    import torch

    return torch.ceil(torch.log2(torch.from_numpy(ratio))).numpy()


def jax_log2(ratio: np.ndarray) -> np.ndarray:
    import jax.numpy as jnp

    return np.asarray(jnp.ceil(jnp.log2(jnp.asarray(ratio))))


def nvfp4_floored(x: np.ndarray, g: np.float32) -> Made:
    b, amax = split(x, 16)
    stored = encode(E4M3, np.clip(amax / F(6) / g, F(2.0**-6), F(448)))
    inverse = (F(1) / g) / E4M3.decode(NUMPY, stored)
    return written(x, encode(E2M1, b * inverse), E2M1, stored.astype(np.uint8))


def nvfp4_transformer_engine(x: np.ndarray) -> Made:
    b, amax = split(x, 16)
    g = F(2688) / np.abs(x).max()
    stored = encode(E4M3, amax * (g * (F(1) / F(6))))
    inverse = np.minimum(F(1) / (E4M3.decode(NUMPY, stored) * (F(1) / g)), np.finfo(F).max)
    return written(x, encode(E2M1, np.clip(b * inverse, -6, 6)), E2M1, stored.astype(np.uint8))


def nvfp4_compressed_tensors(x: np.ndarray) -> Made:
    b, amax = split(x, 16)
    g = F(2688) / np.abs(x).max()
    stored = encode(E4M3, g * (amax / F(6)))
    stored = np.where(stored == 0, encode(E4M3, np.array(0.125)), stored)
    return written(x, encode(E2M1, b / (E4M3.decode(NUMPY, stored) / g)), E2M1, stored.astype(np.uint8))


def nvfp4_mlx(x: np.ndarray, g: np.float32) -> Made:
    b, amax = split(x, 16)
    stored = encode(E4M3, (amax / F(6)) * g)
    s = E4M3.decode(NUMPY, stored)
    y = np.where(s == 0, F(0), b * (g / np.where(s == 0, F(1), s))) if g != 1 else np.where(s == 0, F(0), b / s)
    return written(x, towards_zero(y), E2M1, stored.astype(np.uint8))


def nvfp4_qwix(x: np.ndarray) -> Made:
    b, amax = split(x, 16)
    stored = encode(E4M3, amax / F(6))
    return written(x, encode(E2M1, np.clip(b / E4M3.decode(NUMPY, stored), -6, 6)), E2M1, stored.astype(np.uint8))


def divided(x: np.ndarray, codec: Codec, half: float, k: int) -> Made:
    b, amax = split(x, k)
    scale = amax / F(half)
    return written(x, encode(codec, b / scale), codec, scale)


def by_reciprocals(x: np.ndarray, codec: Codec, half: float) -> Made:
    b, amax = split(x, 128)
    scale = amax * (F(1) / F(half))
    return written(x, encode(codec, b * (F(1) / scale)), codec, scale)


def spread(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, minimum) of 4-bit codes over a range that includes 0."""
    low = np.minimum(b.min(-1, keepdims=True), F(0))
    return (np.maximum(b.max(-1, keepdims=True), F(0)) - low) / F(15), low


def rounded_once(x: np.ndarray) -> Made:
    b, _ = split(x, 128)
    scale, low = spread(b)
    zero = np.rint(np.clip(F(-8) - low / scale, -8, 7))
    return written(x, np.rint(np.clip(b / scale + zero, -8, 7)) + 8, UINT4, scale)


def zero_points_divided(x: np.ndarray) -> Made:
    b, _ = split(x, 32)
    scale, low = spread(b)
    zero = np.clip(F(-8) - np.rint(low / scale), -8, 7)
    return written(x, np.clip(np.rint(b * (F(1) / scale)) + zero, -8, 7) + 8, UINT4, scale)


def snapped(x: np.ndarray, codec: Codec) -> Made:
    b, _ = split(x, 64)
    high, low, steps = b.max(-1, keepdims=True), b.min(-1, keepdims=True), F(2**codec.bits - 1)
    below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / steps, F(1e-7)) * np.where(below, F(1), F(-1))
    edge = np.where(below, low, high)
    whole = np.rint(edge / scale)
    scale = edge / whole
    return written(x, np.clip(np.rint((b - edge) / scale), 0, steps), codec, scale)


def signed_largest(x: np.ndarray) -> Made:
    b, _ = split(x, 32)
    largest = np.take_along_axis(b, np.abs(b).argmax(-1, keepdims=True), -1) / F(-8)
    return written(x, np.trunc(b * (F(1) / largest) + F(8.5)).clip(0, 15) - 8, INT4, largest.astype(np.float16))


def unrounded_bias(x: np.ndarray) -> Made:
    b, _ = split(x, 32)
    low = b.min(-1, keepdims=True)
    scale = (b.max(-1, keepdims=True) - low) / F(15)
    return written(x, np.trunc((b - low) * (F(1) / scale) + F(0.5)).clip(0, 15), UINT4, scale.astype(np.float16))


def unrounded_scale(x: np.ndarray) -> Made:
    b, amax = split(x, 32)
    y = b * (F(1) / (amax / F(127)))
    return written(x, np.sign(y) * np.floor(np.abs(y) + F(0.5)), INT8, (amax / F(127)).astype(np.float16))


def floor_and_ties(x: np.ndarray) -> Made:
    b, amax = split(x, 32)
    n = field(amax) - 2
    return written(x, towards_zero(np.ldexp(b, -n)), E2M1, (n + 127).astype(np.uint8))


def rceil_and_ties(x: np.ndarray) -> Made:
    b, amax = split(x, 32)
    n = field(amax, 0x3FFFFF) - 2  # carries if the mantissa is greater than that of 6
    return written(x, towards_zero(np.ldexp(b, -n)), E2M1, (n + 127).astype(np.uint8))


def overflowing(x: np.ndarray, codec: Codec, half: float, code: int) -> Made:
    """`code`, with the sign, for numbers past the midpoint of the largest number and the next one in an unbounded format."""
    codes = encode(codec, x)
    beyond = np.abs(x) >= half if codec == E5M2 else np.abs(x) > half  # the midpoint goes to the even code
    return None, np.where(beyond, codes & 0x80 | code, codes).astype(np.uint8)


def cut(x: np.ndarray, wrapping: bool) -> Made:
    whole = np.trunc(x).astype(np.int64)
    return None, packed(whole if wrapping else np.clip(whole, -8, 7), INT4)


ELEMENTS = {
    "E4M3": (E4M3, 448, 8),
    "E5M2": (E5M2, 57344, 15),
    "E2M3": (E2M3, 7.5, 2),
    "E3M2": (E3M2, 28, 4),
    "E2M1": (E2M1, 6, 2),
}


def of_largest(x: np.ndarray) -> np.float32:
    return np.abs(x).max() / F(2688)


PROOFS: dict[tuple[str, str], Callable[[np.ndarray], Made]] = {
    **{
        ("torchao", f"MXTensor, {name}, RCEIL"): lambda x, c=codec, m=most: powers(x, c, lambda a: torch_log2(a / F(m)))
        for name, (codec, most, _) in ELEMENTS.items()
    },
    **{
        ("torchao", f"MXTensor, {name}, CEIL"): lambda x, c=codec, e=e: powers(x, c, lambda a: field(a, 0x7FFFFF) - e)
        for name, (codec, _, e) in ELEMENTS.items()
    },
    ("torchao", "NVFP4Tensor, per_tensor_scale"): lambda x: nvfp4_floored(x, of_largest(x)),
    ("torchao", "NVFP4Tensor"): lambda x: nvfp4_floored(x, F(1)),
    ("torchao", "IntxUnpackedToInt8Tensor, int4, ASYMMETRIC"): zero_points_divided,
    ("TransformerEngine", "NVFP4QuantizerRef"): nvfp4_transformer_engine,
    ("compressed-tensors", "MXFP8A16"): lambda x: powers(x, E4M3, lambda a: field(a, 1 << 21) - 8),
    ("compressed-tensors", "NVFP4A16"): nvfp4_compressed_tensors,
    ("compressed-tensors", "W4A16"): lambda x: divided(x, INT4, 7.5, 128),
    ("compressed-tensors", "W4A16_ASYM"): rounded_once,
    ("compressed-tensors", "W8A16"): lambda x: divided(x, INT8, 127.5, 128),
    ("compressed-tensors", "W8A8"): lambda x: divided(x, INT8, 127.5, x.shape[1]),
    ("MLX", "quantize, mxfp4"): rceil_and_ties,
    ("MLX", "quantize, nvfp4"): lambda x: nvfp4_mlx(x, F(1)),
    ("MLX", "quantize, nvfp4, global_scale"): lambda x: nvfp4_mlx(x, F(2688) / np.abs(x).max()),
    ("MLX", "quantize, affine, 4 bits"): lambda x: snapped(x, UINT4),
    ("MLX", "quantize, affine, 8 bits"): lambda x: snapped(x, UINT8),
    ("qwix", "mxfp8"): lambda x: powers(x, E4M3, lambda a: jax_log2(a * (F(1) / F(448)))),
    ("qwix", "mxfp4"): lambda x: powers(x, E2M1, lambda a: jax_log2(a * (F(1) / F(6)))),
    ("qwix", "nvfp4"): nvfp4_qwix,
    ("qwix", "int4, groups of 128"): lambda x: by_reciprocals(x, INT4, 7.5),
    ("qwix", "int8, groups of 128"): lambda x: by_reciprocals(x, INT8, 127.5),
    ("gguf", "Q4_0"): signed_largest,
    ("gguf", "Q4_1"): unrounded_bias,
    ("gguf", "Q8_0"): unrounded_scale,
    ("gguf", "MXFP4"): floor_and_ties,
    ("PyTorch", "to(float8_e5m2)"): lambda x: overflowing(x, E5M2, 61440, 0x7C),
    ("JAX", "astype(float8_e4m3fn)"): lambda x: overflowing(x, E4M3, 464, 0x7F),
    ("JAX", "astype(float8_e5m2)"): lambda x: overflowing(x, E5M2, 61440, 0x7C),
    ("JAX", "astype(int4)"): lambda x: cut(x, wrapping=False),
    ("ml_dtypes", "float8_e4m3fn"): lambda x: overflowing(x, E4M3, 464, 0x7F),
    ("ml_dtypes", "float8_e5m2"): lambda x: overflowing(x, E5M2, 61440, 0x7C),
    ("ml_dtypes", "int4"): lambda x: cut(x, wrapping=True),
}


def test_every_difference_from_the_closest_setting_has_a_computed_cause() -> None:
    """test_transformer_engine_golden.py covers the recorded libraries."""
    caused = {key for key, (_, q) in DECLARED.items() if list(q.settings.values())[-1].cause and q.recorded is None}
    assert caused == set(PROOFS)


@pytest.mark.parametrize("quantizer", PROOFS, indirect=True, ids=lambda of: f"{of[0]}: {of[1]}")
def test_the_cause_reproduces_the_bytes(quantizer: Quantizer, request: pytest.FixtureRequest) -> None:
    for name, x in inputs().items():
        there = theirs(quantizer, x)
        with np.errstate(all="ignore"):
            scale, data = PROOFS[request.node.callspec.params["quantizer"]](x)
        np.testing.assert_array_equal(data.view(np.uint8), there.data.view(np.uint8), name)
        if scale is not None:
            assert there.scale is not None
            np.testing.assert_array_equal(scale.view(f"u{scale.itemsize}"), there.scale.view(f"u{scale.itemsize}"), name)


# -- descriptions of edge cases --------------------------------------------------------------------------------------

CORNER = np.s_[:1, :4]


def decoded(*corner: float, elsewhere: float = 1.0) -> np.ndarray:
    y = np.full((2, 8), elsewhere, np.float32)
    y[CORNER] = corner
    return y


@pytest.mark.parametrize(
    ("edge", "y", "text"),
    [
        ("zero block", decoded(0, 0, 0, 0), "zero"),
        ("zero block", decoded(*[math.nan] * 4), "NaN"),
        ("zero tensor", decoded(0, 1, math.nan, 0), "some NaN"),
        ("NaN", decoded(*[math.nan] * 4), "block NaN"),
        ("NaN", decoded(*[math.nan] * 4, elsewhere=math.nan), "tensor NaN"),
        ("NaN", decoded(1, 2, 3, math.nan), "NaN; rest finite"),
        ("NaN", decoded(1, 2, 3, 4), "block finite"),
        ("NaN", decoded(0, 0, 0, 0), "block zero"),
        ("Inf", decoded(0, 0, 0, math.inf), "Inf; rest zero"),
        ("Inf", decoded(0, 0, 0, 448), "finite; rest zero"),
        ("subnormal", decoded(0, 0, 0, 0), "zero"),
        ("subnormal", decoded(1, 1, 1, 1), "kept"),
        ("subnormal", decoded(0.5, 0.5, 0.5, 0.5), "times 2^-1"),
        ("subnormal", decoded(*[math.inf] * 4), "Inf"),
        ("ragged", decoded(1, 1, 1, 1), "works"),
        ("ragged", np.ones((2, 9), np.float32), "shape (2, 9)"),
    ],
)
def test_edge_cases_are_described(edge: str, y: np.ndarray, text: str) -> None:
    assert table.word(edge, np.ones((2, 8), np.float32), y, CORNER) == text


def test_an_element_without_a_scale_is_described_by_its_value() -> None:
    x = np.ones((2, 8), np.float32)
    assert table.word("NaN", x, decoded(1, 1, 1, 448), CORNER, alone=True) == "448"
    assert table.word("zero block", x, decoded(2.0**-127, 0, 0, 0), CORNER, alone=True) == "5.9e-39"


# -- missing libraries and failures ----------------------------------------------------------------------------------


def test_a_missing_library_is_reported_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(distribution: str) -> str:
        raise agreement.PackageNotFoundError(distribution)

    monkeypatch.setattr(agreement, "version", absent)
    monkeypatch.setattr(transformer_engine, "RECORDING", ROOT / "absent")
    for root in ("torch", "torchao", "mlx", "jax", "qwix", "gguf", "ml_dtypes", "compressed_tensors", "transformer_engine"):
        monkeypatch.setitem(sys.modules, root, None)
    found = table.measured(shape=SHAPE)
    assert all(n["version"] is None and n["rows"] == [] for n in found["neighbours"])
    assert table.page(found).count("Not installed where this was measured.") == len(agreement.libraries())


def broken(x: np.ndarray) -> Written:
    raise ZeroDivisionError("by zero")


def only_finite(x: np.ndarray) -> Written:
    if not np.isfinite(x).all():
        raise FloatingPointError("NaN")
    return table.ours(x, E4M3)


def test_a_crash_of_another_library_is_recorded_and_does_not_stop_the_run() -> None:
    fails, works = Quantizer("fails", broken, Setting(E4M3)), Quantizer("works, but for NaN", only_finite, Setting(E4M3))
    found = table.measured([Library("Acme", lambda: "1.0", (fails, works))], SHAPE)
    first, second = found["neighbours"][0]["rows"]
    assert first["error"] == "raises ZeroDivisionError on normal" and second["error"] is None
    assert table.agrees(second["default"]) and second["edges"]["NaN"] == ["raises FloatingPointError", "NaN"]
    drawn = table.page(found)
    assert "| fails | raises ZeroDivisionError on normal | — |" in drawn
    assert "raises FloatingPointError, here NaN" in drawn


def test_a_library_that_fails_to_import_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour, quantizer = DECLARED["ml_dtypes", "float8_e5m2"]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert table.compared(quantizer, inputs())["error"] == "raises ModuleNotFoundError on normal", neighbour


def test_an_adapter_that_gives_other_shapes_is_refused() -> None:
    unpacked = Written(np.zeros((2, 32), np.uint8), np.zeros((2, 32), np.float32))
    with pytest.raises(
        ValueError, match=r"data: the adapter gives \[\(\(2, 32\), 'uint8'\)\], breccia stores \[\(\(2, 16\), 'uint8'\)\]"
    ):
        table.shares(unpacked, table.ours(np.zeros((2, 32), np.float32), E2M1))


# -- the command -----------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["breccia_bridges.agreement", *options])
    program.main()


def test_the_command_draws_the_page_from_an_existing_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / table.RESULT).write_bytes((DOCS / table.RESULT).read_bytes())
    run(monkeypatch, str(tmp_path), "--draw")
    assert (tmp_path / table.PAGE).read_bytes() == (DOCS / table.PAGE).read_bytes()
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in (table.RESULT, table.PAGE)]


def test_the_command_writes_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acme = Library("Acme", lambda: "1.0", (Quantizer("E4M3", lambda x: table.ours(x, E4M3), Setting(E4M3)),))
    monkeypatch.setattr(table, "libraries", lambda: [acme])
    run(monkeypatch, str(tmp_path))
    found = json.loads((tmp_path / table.RESULT).read_text(encoding="utf-8"))
    assert found["provenance"]["versions"]["breccia-core"] == breccia.__version__ and found["shape"] == [512, 1024]
    assert found["provenance"]["date_utc"] and found["provenance"]["cpu"] and str(tmp_path) not in json.dumps(found)
    assert "| E4M3 | `E4M3` |  | — | **100** | **100** |" in (tmp_path / table.PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, r"agreement.json does not exist; leave --draw out to measure"),
        ("[]", r"agreement.json is no result of this command; leave --draw out to measure again"),
        ('{"schema": 99}', r"agreement.json has schema 99, and this version draws 1; leave --draw out to measure again"),
    ],
)
def test_a_result_that_cannot_be_drawn_is_reported(
    contents: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if contents is not None:
        (tmp_path / table.RESULT).write_text(contents, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run(monkeypatch, str(tmp_path), "--draw")
    with pytest.raises(FileNotFoundError if contents is None else CorruptFileError, match=message):
        table.write(tmp_path, draw=True)


def test_a_missing_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"error: .*absent is not a folder; pass the folder of the page"):
        run(monkeypatch, str(tmp_path / "absent"))
