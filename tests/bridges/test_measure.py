"""SQNR, clip and underflow rates and histograms match their definitions for any slab size; and `breccia compare`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from program import Run
from safetensors.numpy import save_file

import breccia
from breccia import ErrorMetrics
from breccia.backend import components
from breccia.bridges import save_safetensors
from breccia.testing.examples import special_rows, wide
from breccia_bridges import measure
from breccia_bridges.compare import compare
from breccia_bridges.measure import BINS, NOTHING, FileTensor, slabs
from breccia_bridges.order import COMPARED, CompareKey, in_order
from breccia_bridges.results import EQUAL, TensorReport
from breccia_bridges.safetensors_file import Container, read
from breccia_bridges.safetensors_writer import Writer
from breccia_bridges.source import Source


def stored(tmp_path: Path, x: Any, name: str = "w.safetensors") -> FileTensor:
    save_safetensors({"w": x}, tmp_path / name, force=True)
    return Source.open(tmp_path / name).values["w"].numbers()


def of_one_code(st: breccia.ScaledTensor, code: int) -> breccia.ScaledTensor:
    """`st` with every element's code replaced; packs the codes independently."""
    bits = st.recipe.format.element.bits
    count = math.lcm(bits, 8) // bits
    group = sum(code << (bits * i) for i in range(count)).to_bytes(count * bits // 8, "little")
    data = np.resize(np.frombuffer(group, np.uint8), st.data.shape[-1])
    return breccia.ScaledTensor(
        np.broadcast_to(data, st.data.shape).copy(),
        st.scale,
        st.recipe,
        st.layout,
        st.zero_point,
        st.global_scale,
        shape=st.shape,
    )


def by_definition(x: np.ndarray, st: breccia.ScaledTensor) -> tuple[int, int]:
    """(clipped, flushed), from all decoded codes of every block; sorting finds the extremes."""
    codes = range(1 << st.recipe.format.element.bits)
    values = np.stack([breccia.dequantize(of_one_code(st, code)).astype(np.float64) for code in codes])
    values = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)  # NaN sorts last
    clipped = flushed = 0
    y = breccia.dequantize(st)
    for at in np.ndindex(*x.shape):
        held = np.unique(values[(slice(None), *at)])
        held = held[~np.isnan(held)]
        out = False
        if len(held) > 1:
            low, high = held[0] - (held[1] - held[0]) / 2, held[-1] + (held[-1] - held[-2]) / 2
            out = bool(x[at] < low or x[at] > high)
        clipped += out
        flushed += bool(x[at] != 0 and y[at] == 0 and not out)
    return clipped, flushed


CLIPPING = [
    "fp8_block,block_k=16",
    "mxfp8,scale_rule=floor",
    "mxfp6,scale_rule=floor",
    "mxfp6",
    "mxfp4,scale_rule=floor",
    "nvfp4",
    "nvfp4,two_level=false",
    "int4,group_size=16,signed=false",
    "int4,group_size=16,signed=false,symmetric=false",
    "int4,group_size=16,scale_rule=half_range",
    "nf4",
    "mxint8,scale_rule=floor",
]


@pytest.mark.parametrize("spec", CLIPPING)
def test_clip_and_underflow_counts_match_counts_over_all_decoded_codes(spec: str, tmp_path: Path) -> None:
    recipe = breccia.recipe(spec)
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((6, 70)) * 10.0 ** rng.integers(-3, 3, (6, 70))).astype(np.float32)
    x[0, :5] = 0
    st = breccia.cast(x, recipe)
    found = measure.measure(stored(tmp_path, x, "x.safetensors"), stored(tmp_path, st, "y.safetensors"))
    assert (found.clipped, found.flushed) == by_definition(x, st)
    assert (found.count, found.bounded, found.nonzero) == (420, 420, int((x != 0).sum()))


def test_the_cases_above_do_clip_and_flush(tmp_path: Path) -> None:
    normal = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    x = stored(tmp_path, normal, "x.safetensors")
    rates = {}
    for spec in CLIPPING:
        st = breccia.cast(normal, breccia.recipe(spec))
        found = measure.measure(x, stored(tmp_path, st, "y.safetensors"))
        rates[spec] = found.clip_rate, found.underflow_rate
    assert rates["mxfp4,scale_rule=floor"][0] and rates["int4,group_size=16,signed=false"][0]
    assert rates["nvfp4"][0] == rates["fp8_block,block_k=16"][0] == 0, "their scales come from the largest element"
    assert rates["nvfp4"][1] > 0


def test_a_supplied_scale_that_is_too_small_clips(tmp_path: Path) -> None:
    x = np.array([[1.0, 2.0, 3.0, -500.0, 480.0, 460.0, 465.0]], np.float32)
    st = breccia.cast(x, breccia.Float8CurrentScaling(), scale=1.0)
    found = measure.measure(stored(tmp_path, x, "x.safetensors"), stored(tmp_path, st, "y.safetensors"))
    assert found.clipped == 3, "448 is the largest, its step 32: above 464 an element saturates"


def test_blocks_of_nan_are_neither_clipped_nor_flushed(tmp_path: Path) -> None:
    x = np.ones((2, 32), np.float32)
    x[0, 3] = np.nan
    st = breccia.cast(x, breccia.MXFP8BlockScaling())
    found = measure.measure(stored(tmp_path, x, "x.safetensors"), stored(tmp_path, st, "y.safetensors"))
    assert (found.clipped, found.flushed) == (0, 0)
    assert math.isnan(found.sqnr) and math.isnan(found.max_error)
    assert found.to_dict()["sqnr_db"] is None and not found.lossless


@pytest.mark.covering(1, 3)
@pytest.mark.parametrize("slab", [1, 100, 1000])
def test_the_slab_size_does_not_change_counts(
    slab: int, recipe: breccia.ScalingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = wide((3, 9, 70), exponents=4)
    st = breccia.cast(x, recipe)
    pair = stored(tmp_path, x, "x.safetensors"), stored(tmp_path, st, "y.safetensors")
    whole, counts = measure.measure(*pair), measure.histogram(*pair)
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", slab)
    assert measure.histogram(*pair) == counts
    found = measure.measure(*pair)
    exact = ("count", "max_error", "nonzero", "flushed", "bounded", "clipped")
    assert [getattr(found, name) for name in exact] == [getattr(whole, name) for name in exact]
    for name in ("signal", "noise", "dot", "energy"):  # FP64 sums in another order, of 1890 terms: 1890 * 2^-53 < 1e-12
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_each_component_is_read_once(recipe: breccia.ScalingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of very many tensors are measured in the time of their reads."""
    x = wide((3, 9, 70), exponents=4)
    st = breccia.cast(x, recipe)
    pair = stored(tmp_path, x, "x.safetensors"), stored(tmp_path, st, "y.safetensors")
    sizes: list[int] = []

    def counted(part: np.ndarray, *empty: Callable[..., np.ndarray]) -> np.ndarray:
        sizes.append(part.nbytes)
        return read(part, *empty)

    monkeypatch.setattr(measure, "read", counted)
    measure.measure(*pair)
    assert sorted(sizes) == sorted([x.nbytes, *(part.nbytes for part in components(st).values())])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_plain_numbers_are_measured_against_scaled_ones_by_their_definition(dtype: str, tmp_path: Path) -> None:
    """As a checkpoint is that was decoded: nothing bounds the numbers."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32) * np.float32(1e-6)
    st = breccia.cast(x, "fp8_block,block_m=64")
    y = breccia.dequantize(st, out_dtype=dtype)
    found = measure.measure(stored(tmp_path, st), stored(tmp_path, y, "y.safetensors"))
    before, after = breccia.dequantize(st).astype(np.float64).reshape(-1), y.astype(np.float64).reshape(-1)
    flushed = int(((before != 0) & (after == 0)).sum())
    counts = (found.count, found.bounded, found.clipped, found.nonzero, found.flushed, found.bad)
    assert counts == (x.size, 0, 0, int(np.count_nonzero(before)), flushed, 0)
    assert found.max_error == np.abs(before - after).max() and (flushed > 0) == (dtype == "float16")
    # Additions of n nonnegative FP64 numbers: n roundings of 2^-53 each.
    for got, terms in ((found.noise, (before - after) ** 2), (found.energy, after**2), (found.signal, before**2)):
        assert got == pytest.approx(math.fsum(terms), rel=x.size * 2**-53, abs=0)


def test_slabs_cover_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breccia.kernels.measuring.SLAB", 50)
    for shape in [(7,), (), (5, 3), (4, 9, 5), (2, 3, 30, 7), (0, 4), (3, 0, 2)]:
        for units in [(1,), (4,), (3, 2), (1, None)]:
            lead, rows = (1, 1) if len(shape) < 2 else (math.prod(shape[:-2]), shape[-2])
            seen = np.zeros((lead, rows), int)
            for slab in slabs(shape, *units):
                seen[slab] += 1
                unit = None if None in units else math.lcm(*(u for u in units if u))
                assert unit is None or (slab[1].start % unit == 0 and (slab[1].stop % unit == 0 or slab[1].stop == rows))
            assert (seen == 1).all() or seen.size == 0


def test_a_histogram_counts_each_element_once_before_and_after(tmp_path: Path) -> None:
    x = special_rows(64)
    x = np.where(np.isfinite(x), x, 0).astype(np.float32)
    st = breccia.cast(x, breccia.MXFP4BlockScaling(scale_rule="floor"))
    h = measure.histogram(stored(tmp_path, x, "x.safetensors"), stored(tmp_path, st, "y.safetensors"))
    assert len(h.before) == len(h.after) == BINS
    limit = float(np.abs(x).max())
    assert h.limit == limit
    bins = np.minimum(np.floor((x.astype(np.float64) / limit + 1) / 2 * BINS), BINS - 1)
    assert h.before == tuple(int((bins == i).sum()) for i in range(BINS))
    assert sum(h.before) == x.size and sum(h.after) + h.outside == x.size


def test_error_metrics_of_an_empty_tensor_are_lossless_and_add_nothing() -> None:
    assert NOTHING.lossless and NOTHING.sqnr == math.inf and NOTHING.cosine == 1.0
    assert NOTHING.clip_rate is None and NOTHING.underflow_rate == 0.0
    one = ErrorMetrics(4, 2.0, 1.0, 1.5, 2.0, 0.5, 3, 1, 4, 2)
    assert one + NOTHING == one
    assert (one + one).to_dict() == one.to_dict() | {"sqnr_db": (one + one).sqnr}
    assert math.isnan((one + ErrorMetrics(max_error=math.nan)).max_error)


# -- compare ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and one with the same names in all other states."""
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal((40, 64)).astype(np.float32) for name in ("fp8", "fp4", "brain", "same", "moved", "gone")}
    others = {"steps": np.arange(3), "odd": np.arange(4), "half": w["fp8"].astype(np.float16)}
    save_file({**w, **others}, tmp_path / "a.safetensors")
    after = {
        "fp8": breccia.cast(w["fp8"], breccia.MXFP8BlockScaling()),
        "fp4": breccia.cast(w["fp4"].T.copy(), breccia.NVFP4BlockScaling(), axis=-2).mT,
        "brain": w["brain"].astype(ml_dtypes.bfloat16),
        "same": w["same"],
        "moved": w["moved"][:20],
        "steps": np.arange(3),
        "odd": np.arange(4) + 1,
        "half": breccia.cast(w["fp8"].astype(np.float16), breccia.INT4Scaling(group_size=32)),
        "new": np.ones(2, np.float32),
    }
    save_safetensors(after, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def test_compare_measures_comparable_tensors_and_gives_reasons_for_the_others(pair: tuple[Path, Path]) -> None:
    report = compare(*pair)
    assert {t.name: t.reason for t in report.tensors} == {
        "fp8": "",
        "fp4": "",
        "brain": "",
        "half": "",
        "same": EQUAL,
        "steps": EQUAL,
        "odd": "differ, and I64 is not floating",
        "moved": "shapes differ: 40x64 and 20x64",
    }
    assert (report.missing, report.added) == (["gone"], ["new"])
    by_name = {t.name: t for t in report.tensors}
    assert [by_name[n].stored_as for n in ("fp8", "fp4", "brain", "half")] == ["mxfp8", "nvfp4", "BF16", "int4"]
    x = Container(pair[0]).array("fp4").astype(np.float64)
    y = breccia.dequantize(breccia.bridges.load_safetensors(pair[1])["fp4"]).astype(np.float64)
    expected = 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())
    assert by_name["fp4"].measured.sqnr == pytest.approx(expected, rel=1e-12)  # FP64 sums in another order
    assert by_name["fp4"].measured.clip_rate == 0.0
    assert by_name["brain"].measured.clip_rate is None, "no block bounds BF16"


def test_compare_reports_the_metrics_that_convert_measured(recipe: breccia.ScalingRecipe, tmp_path: Path) -> None:
    from breccia_bridges.convert import convert

    save_file({"w": wide((33, 70), exponents=4), "norm": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    made = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", recipe, histograms=True)
    found = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors", histograms=True)
    (a,), (b,) = made.quantized, found.quantized
    assert a.fidelity == b.fidelity and a.fidelity is not None
    assert a.histogram == b.histogram and a.histogram is not None
    assert (made.bytes_in, made.bytes_out, made.recipes) == (found.bytes_in, found.bytes_out, found.recipes)


def test_compare_of_a_checkpoint_with_itself_finds_no_difference(pair: tuple[Path, Path], run: Run) -> None:
    for path in pair:
        assert {t.reason for t in compare(path, path).tensors} == {EQUAL}
        code, out, err = run("compare", path, path, "--fail-under", "1000")
        assert (code, err) == (0, "") and "nothing differs; " in out


def test_compare_prints_a_line_per_tensor_and_lists_unmatched_tensors(pair: tuple[Path, Path], run: Run) -> None:
    code, out, err = run("compare", *pair)
    assert code == 0
    assert f"warning: in {pair[0]} and not in {pair[1]}: gone." in err
    assert f"warning: in {pair[1]} and not in {pair[0]}: new." in err
    assert "4 tensors compared: " in out
    assert "; not measured: " in out and "2 same in both" in out and "1 shapes differ: 40x64 and 20x64" in out
    code, text, _ = run("compare", *pair, "--json")
    found = json.loads(text)["candidates"][0]
    assert {t["name"]: t["stored_as"] for t in found["tensors"]}["fp4"] == "nvfp4"
    assert found["missing"] == ["gone"] and found["recipe"] is None and "histogram" not in found["tensors"][0]


def compared(text: str) -> list[str]:
    """The names in the table of one comparison, in the order printed."""
    lines = text.splitlines()[2:]
    return [line.split()[-1] for line in lines[: next(i for i, line in enumerate(lines) if " tensors " in line)]]


@pytest.mark.parametrize(
    ("key", "figure", "falling"),
    [
        ("sqnr", lambda t: t.measured.sqnr, False),
        ("cosine", lambda t: t.measured.cosine, False),
        ("max-error", lambda t: t.measured.max_error, True),
        ("underflow", lambda t: t.measured.underflow_rate, True),
        ("bits", lambda t: t.bits_per_parameter, True),
        ("name", lambda t: t.name, False),
    ],
)
def test_compare_sorts_the_worst_first(
    key: str, figure: Callable[[Any], Any], falling: bool, pair: tuple[Path, Path], run: Run
) -> None:
    found = compare(*pair)
    code, out, _ = run("compare", *pair, "--sort", key)
    assert code == 0 and compared(out) == [t.name for t in sorted(found.quantized, key=figure, reverse=falling)]
    assert len({figure(t) for t in found.quantized}) > 2, "an order to see"


def test_an_order_puts_nan_first_and_what_is_unknown_last() -> None:
    def one(name: str, noise: float, bounded: int, clipped: int) -> TensorReport:
        return TensorReport(name, (4,), "F32", "x", "", 16, 4, ErrorMetrics(4, 1.0, noise, bounded=bounded, clipped=clipped))

    tensors = [one("plain", 0.5, 0, 0), one("few", 0.1, 4, 1), one("nan", math.nan, 4, 0), one("many", 0.2, 4, 3)]
    assert [t.name for t in in_order(tensors, CompareKey.CLIPPED, COMPARED)] == ["many", "few", "nan", "plain"]
    assert [t.name for t in in_order(tensors, CompareKey.SQNR, COMPARED)] == ["nan", "plain", "many", "few"]
    assert [t.name for t in in_order(tensors, None, COMPARED)] == ["plain", "few", "nan", "many"]


def test_compare_shows_the_first_tensors_and_says_how_many_it_leaves_out(pair: tuple[Path, Path], run: Run) -> None:
    worst = compare(*pair).worst
    assert worst is not None
    code, out, _ = run("compare", *pair, pair[1], "--sort", "sqnr", "--top", "1")
    one, _, other = out.partition(f"{pair[0]} -> {pair[1]}")[2].partition(f"{pair[0]} -> {pair[1]}")
    assert code == 0 and one == other.partition("\n\n")[0] + "\n"
    assert compared(f"\n{one.lstrip()}") == [worst.name]
    assert "3 of 4 tensors not shown; --top 4 shows all\n4 tensors compared: " in one
    assert one.endswith(f"\nworst: {worst.name}, {worst.measured.sqnr:.2f} dB\n")
    assert "not shown" not in run("compare", *pair, "--top", "4")[1]
    assert json.loads(run("compare", *pair, "--sort", "sqnr", "--top", "1", "--json")[1]) == json.loads(
        run("compare", *pair, "--json")[1]
    ), "JSON has all, in the order of the file"


def test_compare_names_no_worst_tensor_where_nothing_is_lost(tmp_path: Path, run: Run) -> None:
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "a.safetensors")
    save_file({"w": np.ones((2, 2), np.float16)}, tmp_path / "b.safetensors")
    code, out, _ = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 0 and "1 tensors compared" in out and "\nworst: " not in out


@pytest.mark.parametrize("command", ["compare", "inspect"])
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--sort", "size"], ["'--sort'", "'size' is not one of ", "'bits', 'name'"]),
        (["--top", "0"], ["'--top'", "1"]),
        (["--top", "all"], ["'--top'", "integer"]),
    ],
)
def test_a_wrong_order_or_number_of_rows_is_an_invalid_command_line(
    command: str, words: list[str], wanted: list[str], pair: tuple[Path, Path], run: Run
) -> None:
    code, out, err = run(command, *pair[: 2 if command == "compare" else 1], *words)
    assert (code, out) == (2, "") and all(text in err for text in wanted) and f"See `breccia {command} --help`." in err


def test_compare_takes_several_candidates_and_folders(pair: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    pair[1].rename(folder / "b.safetensors")
    code, text, _ = run("compare", pair[0], folder, pair[0], "--json")
    assert code == 0
    assert [c["destination"] for c in json.loads(text)["candidates"]] == [str(folder), str(pair[0])]


def test_fail_under_exits_with_1_and_names_the_tensors_below_the_limit(pair: tuple[Path, Path], run: Run) -> None:
    lossy = [t for t in compare(*pair).quantized if t.measured.sqnr < 25]
    words = ", ".join(f"{t.name} ({t.measured.sqnr:.2f} dB)" for t in lossy)
    assert sorted(t.name for t in lossy) == ["fp4", "half"]
    code, out, err = run("compare", *pair, "--fail-under", "25")
    assert code == 1 and "4 tensors compared" in out
    line = err.splitlines()[-1]
    assert line.startswith(f"error: tensors of {pair[1]} are below 25 dB: {words}, ")
    for other in ("odd (differ, and I64 is not floating)", "moved (shapes differ: 40x64 and 20x64)", "gone (missing)"):
        assert other in line
    code, out, err = run("compare", *pair, "--fail-under", "25", "--json")
    assert code == 1 and len(json.loads(out)["candidates"]) == 1
    assert len(json.loads(err[err.index("{") :])["error"]["found"]["below"][str(pair[1])]) == 5


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"a": np.ones((2, 2), np.float32)}, "b (missing)"),
        ({"a": np.ones((2, 2), np.float32), "b": np.arange(3) + 1}, "b (differ, and I64 is not floating)"),
        ({"a": np.ones((2, 3), np.float32), "b": np.arange(3)}, "a (shapes differ: 2x2 and 2x3)"),
    ],
)
def test_fail_under_fails_for_tensors_that_cannot_be_measured(after: Any, why: str, tmp_path: Path, run: Run) -> None:
    save_file({"a": np.ones((2, 2), np.float32), "b": np.arange(3)}, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    code, out, err = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--fail-under", "-1000")
    assert code == 1 and "nothing differs" not in out
    assert f"error: tensors of {tmp_path / 'b.safetensors'} are below -1000 dB: {why}." in err


def test_fail_under_refuses_nan(pair: tuple[Path, Path], run: Run) -> None:
    code, out, err = run("compare", *pair, "--fail-under", "nan")
    assert (code, out) == (2, "") and "--fail-under takes a number of dB; got NaN." in err


def test_fail_under_fails_for_nan(tmp_path: Path, run: Run) -> None:
    x = np.full((2, 32), np.nan, np.float32)
    save_file({"w": x}, tmp_path / "a.safetensors")
    save_safetensors({"w": breccia.cast(x, breccia.MXFP8BlockScaling())}, tmp_path / "b.safetensors")
    code, _, err = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--fail-under", "-100")
    assert code == 1 and "are below -100 dB: w (nan dB)." in err


def test_compare_refuses_checkpoints_without_common_tensors(tmp_path: Path, run: Run) -> None:
    save_file({"a": np.ones((2, 2), np.float32)}, tmp_path / "a.safetensors")
    save_file({f"b{i}": np.ones((2, 2), np.float32) for i in range(4)}, tmp_path / "b.safetensors")
    code, _, err = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 1
    assert "have no tensor in common (a; b0, b1, b2 and 1 more); compare checkpoints of one model." in err
    code, _, err = run("compare", tmp_path / "a.safetensors", tmp_path / "nowhere.safetensors")
    assert code == 1 and "error: no checkpoint " in err


def test_a_name_in_two_files_of_a_folder_is_an_error(tmp_path: Path) -> None:
    for name in ("1.safetensors", "2.safetensors"):
        save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / name)
    with pytest.raises(
        breccia.CorruptFileError,
        match=r"tensor 'w' is in both 1.safetensors and 2.safetensors of .*; pass one file or download",
    ):
        Source.open(tmp_path)


def test_float8_without_scales_is_not_measured(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "a.safetensors")
    with Writer(tmp_path / "b.safetensors", {"w": ("F8_E4M3", (4, 4))}) as w:
        w.write("w", np.zeros((4, 4), np.uint8))
    (t,) = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    assert t.reason == "differ, and breccia finds no scales for F8_E4M3"


def test_negative_scales_clip_like_positive_ones(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    st = breccia.cast(x, breccia.INT4Scaling(group_size=16))
    for sign in (0.25, -0.25):
        turned = breccia.from_buffer(st.data, st.scale * np.float16(sign), st.recipe, st.layout)
        found = measure.measure(stored(tmp_path, x, "x.safetensors"), stored(tmp_path, turned, "y.safetensors"))
        assert (found.clipped, found.flushed) == by_definition(x, turned) and found.clipped > 50


def test_fp64_is_compared_without_conversion(tmp_path: Path, run: Run) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = np.array([[1 / 3, 1e300, 2.0]])
    save_file({"w": x}, a)
    with np.errstate(over="ignore"):
        save_file({"w": x.astype(np.float32)}, b)
    assert compare(a, a).tensors[0].reason == EQUAL
    code, _, err = run("compare", a, b)
    assert (code, err) == (0, f"warning: NaN or Inf only in {b}: w.\n")
    save_file({"w": x[:, ::2].copy()}, a)
    save_file({"w": x[:, ::2].astype(np.float32)}, b)
    (t,) = compare(a, b).tensors
    assert t.measured.max_error == abs(1 / 3 - float(np.float32(1 / 3))) and not t.measured.lossless


def test_nan_is_reported_for_the_checkpoint_that_has_it(tmp_path: Path, run: Run) -> None:
    x = np.ones((2, 32), np.float32)
    nan = x.copy()
    nan[0, 0] = np.nan
    many = {f"w{n}": nan for n in range(9)}
    a, b = tmp_path / "nan.safetensors", tmp_path / "fine.safetensors"
    save_file(many, a)
    save_file(dict.fromkeys(many, x), b)
    assert run("compare", a, b)[2] == f"warning: NaN or Inf in {a}: w0, w1, w2 and 6 more.\n"
    assert run("compare", b, a)[2] == f"warning: NaN or Inf only in {a}: w0, w1, w2 and 6 more.\n"


def test_empty_and_scalar_tensors_are_compared(tmp_path: Path, run: Run) -> None:
    before = {"none": np.zeros((0, 4), np.float32), "one": np.full((), 0.1, np.float32), "row": np.ones(3, np.float32)}
    save_file(before, tmp_path / "a.safetensors")
    save_file({name: np.asarray(x.astype(np.float16)) for name, x in before.items()}, tmp_path / "b.safetensors")
    code, out, _ = run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 0 and {line.split()[-1] for line in out.splitlines()[2:5]} == {"none", "one", "row"}


#: Names that a terminal or markup could interpret -> what must be printed.
HOSTILE = {
    "a[/]b": "a[/]b",
    "[red]x[/red]": "[red]x[/red]",
    "line\nbreak": "line\\nbreak",
    "\x1b[31mescape": "\\x1b[31mescape",
    "t\tab": "t\\tab",
    "\u2028": "\\u2028",
    "caf\u00e9": "caf\u00e9",
}


def test_names_are_printed_literally_and_never_interpreted(tmp_path: Path, run: Run) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32), np.float32)
    source, out = tmp_path / "[red]a.safetensors", tmp_path / "b[bold].safetensors"
    save_file(dict.fromkeys(HOSTILE, x), source)
    assert run("convert", source, out, "-r", "nvfp4")[0] == 0
    for words in (("compare", source, out, out), ("inspect", out, "--scales")):
        code, text, _ = run(*words)
        assert code == 0
        for name in HOSTILE.values():
            assert any(line.endswith(f"  {name}") for line in text.split("\n")), name


@pytest.mark.long
def test_output_that_cannot_be_encoded_is_escaped_without_an_error(tmp_path: Path) -> None:
    save_file({"caf\u00e9": np.ones((2, 32), np.float32)}, tmp_path / "a.safetensors")
    words = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "-r", "mxfp8"]
    for command in (words, ["inspect", str(tmp_path / "b.safetensors")]):
        done = subprocess.run(
            [sys.executable, "-m", "breccia", *command],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_output_is_not_truncated_at_eighty_columns(pair: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("compare", *pair, pair[1])
    assert "\u2026" not in out and "..." not in out
    lines = out.splitlines()
    assert sum(line.endswith("  fp4") for line in lines) == 2
    assert sum(line.endswith(f"  {pair[1]}") for line in lines) == 2, "one line for each candidate"
    assert lines[1].split() == [
        "SQNR",
        "dB",
        "cosine",
        "max",
        "error",
        "clipped",
        "underflow",
        "bits/param",
        "stored",
        "as",
        "tensor",
    ]


def test_many_files_use_few_file_descriptors(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for n in range(80):
            save_file({f"w{n}": np.full((2, 2), n + (folder == "b"), np.float32)}, tmp_path / folder / f"{n}.safetensors")
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from breccia.cli import main as cli\n"
        "for words in (['compare', 'a', 'b', '--json'], ['inspect', 'a', '--json', '--scales']):\n"
        "    try: cli.run(words)\n"
        "    except SystemExit as e: assert not e.code"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_cannot_be_encoded_is_printed_too(tmp_path: Path, run: Run) -> None:
    header = b'{"\\ud800x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    done = subprocess.run([sys.executable, "-m", "breccia", "inspect", str(tmp_path / "a.safetensors")], capture_output=True)
    assert done.returncode == 0 and done.stdout.decode().splitlines()[1].endswith("\\ud800x")


@pytest.mark.parametrize("shape", [(256, 384), (3, 130, 200), (40, 48), (5, 7, 33), (64, 1)], ids=str)
@pytest.mark.parametrize("recipe", ["nvfp4", "int4", "fp8_block,block_m=128", "mxfp4", "fp8_row", "int4,offset=bias"])
def test_the_bounds_of_blocks_count_what_those_of_elements_do(
    recipe: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from breccia.kernels import measuring

    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    try:
        st = breccia.cast(x, recipe)
    except breccia.BrecciaError:
        pytest.skip("the recipe has no such layout")
    larger = measuring.Source(x * np.float32(1.3))  # beyond the numbers of some blocks
    found = measuring.measure(larger, measuring.Source(st))
    monkeypatch.setattr(measuring, "_ends_of_blocks", lambda st: None)
    assert found == measuring.measure(larger, measuring.Source(st))
    assert found.clipped
