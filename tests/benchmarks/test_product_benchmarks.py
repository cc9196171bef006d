"""The benchmark of FP8 products: checks of products, records, goals, and the kernels that its times choose."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("breccia_triton")

import torch

import breccia
from breccia.backend import Call
from breccia.dispatch.facts import Described
from breccia_triton import bf16_plans, choices
from breccia_triton.cuda import fp8_plans

BENCHMARKS = ROOT / "benchmarks"
RESULT: dict[str, Any] = json.loads((BENCHMARKS / "results" / "matmul-gpu-nvidia-h200.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------ what is chosen


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate for an H200."""
    for plans in (fp8_plans, bf16_plans):
        monkeypatch.setattr(plans, "device_name", lambda device: "NVIDIA H200")


def call_of(first: str, second: str, m: int, n: int, k: int) -> Call:
    a, b = map(breccia.recipe, (first, second))
    operands = Described(a, "float8_e4m3fn", (m, k), a.layout), Described(b, "float8_e4m3fn", (k, n), b.layout.mT, -2)
    return Call("matmul", "torch", (*operands, None, {}, None))


def test_the_shipped_times_are_those_of_the_published_result(tmp_path: Path, module) -> None:
    path = tmp_path / "table.json"
    path.write_text("of another run", encoding="utf-8")
    module("bench_matmul").main(source=BENCHMARKS / "results" / "matmul-gpu-nvidia-h200.json", table=path)
    shipped = choices.SHIPPED / "matmul_nvidia_h200.json"
    assert json.loads(path.read_text("utf-8")) == json.loads(shipped.read_text("utf-8")), (
        "run `python benchmarks/bench_matmul.py --from benchmarks/results/matmul-gpu-nvidia-h200.json --table` with its path"
    )


@pytest.mark.usefixtures("h200")
def test_the_kernel_that_was_measured_to_be_the_fastest_has_the_least_estimate_at_every_measured_shape(module) -> None:
    plan = module("fp8_plan")
    kernels = {plan.OURS: fp8_plans.score, plan.TORCH: fp8_plans.score_of_torch, plan.DECODING: bf16_plans.score}
    chosen = dict.fromkeys(kernels, 0)
    for row in RESULT["rows"]:
        taken = {name: timed["graph"]["median_s"] for name, timed in row["times"].items() if "graph" in timed}
        taken[plan.TORCH] = taken.pop(plan.TORCH_PLAIN, taken.get(plan.TORCH))  # the time of breccia's kernel that calls torch
        taken = {name: seconds for name, seconds in taken.items() if name in kernels and seconds}
        if row["kind"] in plan.PAIRS:
            call = call_of(*plan.KINDS[row["kind"]], *row["shape"])
            estimates = {name: kernels[name](call) for name in taken}
            for name, seconds in estimates.items():
                assert seconds == pytest.approx(taken[name], rel=1e-3), (
                    row["kind"],
                    row["shape"],
                    name,
                )  # the file has four decimals
            fastest = min(estimates, key=lambda name: estimates[name])
            assert taken[fastest] <= 1.001 * min(taken.values())
            chosen[fastest] += 1
    assert all(chosen.values()), chosen


@pytest.mark.usefixtures("h200")
def test_a_shape_that_was_not_measured_takes_the_ratio_of_the_nearest_one() -> None:
    known = fp8_plans.slowdowns("NVIDIA H200")
    over = known["cuda row row 4096x4096x4096"]
    expected = over * fp8_plans.bound(5120, 4096, 4096)
    assert fp8_plans.score(call_of("fp8_row", "fp8_row", 5120, 4096, 4096)) == pytest.approx(expected)


def test_the_nearest_shape_has_the_smallest_ratios_and_rows_count_twice() -> None:
    known = {choices.measured_key("one", *shape): float(i) for i, shape in enumerate([(64, 512, 512), (128, 512, 4096)])}
    known |= {"one more 64x512x512": 7.0, "other 64x512x512": 8.0}
    assert choices.nearest(known, "one", 64, 512, 512) == 0
    assert (
        choices.nearest(known, "one", 64, 512, 2048) == 0
    )  # 2 octaves of K; the other shape is one octave of K and one of M away, which counts twice
    assert choices.nearest(known, "one", 128, 512, 1024) == 1
    assert choices.nearest(known, "two", 64, 512, 512) is None and choices.nearest({}, "one", 1, 1, 1) is None


# ------------------------------------------------------------------------------------------------ what is measured


def test_every_product_of_a_goal_is_in_the_plan_and_no_row_is_twice(module) -> None:
    plan, goals = module("fp8_plan"), module("goals").GOALS
    rows = plan.planned(None, None)
    assert len(rows) == len(set(rows))
    assert {(shape, kind) for goal in goals for shape in goal.shapes for kind in goal.kinds} <= set(rows)
    assert {(shape, kind) for shape in plan.SWEEP for kind in ("tensor", "row", "tiles", "blocks")} <= set(rows)
    assert plan.planned(["row"], ["8x8x128"]) == [("8x8x128", "row")]
    assert {kind for _, kind in plan.planned(["grouped tiles"], None)} == {"grouped tiles"}


def product(kind: str, m: int, module) -> tuple[Any, Any, Any]:
    """(a, w, the product in FP64) of a kind."""
    arms = module("fp8_arms")
    a, (w, *_) = arms.operands(kind, m, 96, 256, "cpu")
    if not kind.startswith("grouped"):
        return a, w, breccia.dequantize(a).double() @ breccia.dequantize(w).double().mT
    ends = arms.ends_of(m, "cpu").tolist()
    parts = zip([0, *ends], ends, range(arms.EXPERTS), strict=False)
    x, y = breccia.dequantize(a).double(), breccia.dequantize(w).double()
    return a, w, torch.cat([x[start:end] @ y[expert].mT for start, end, expert in parts])


@pytest.mark.parametrize(
    "kind", ["grouped tiles", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("tiles", "nvfp4", "grouped row"))]
)
def test_errors_are_measured_against_fp64_and_over_the_bound(kind: str, module) -> None:
    checks, (a, w, exact) = module("fp8_checks"), product(kind, 300, module)
    ends = module("fp8_arms").ends_of(300, "cpu") if kind.startswith("grouped") else None
    expected = checks.reference(a, w, ends)
    # Two orders of FP64 sums are within 2 K 2^-53 of the magnitudes' sum; `allowed` is at least K 2^-24 of it.
    assert ((expected.exact - exact[expected.rows]).abs() <= 2.0**-28 * expected.allowed).all()
    assert expected.exact.shape == (checks.CHECKED, 96)
    assert 0 < expected.error_over_bound(exact.bfloat16()) <= 1  # rounded once, to BF16
    moved = exact.clone()
    row = int(expected.rows[3])
    moved[row, 5] += 3 * (expected.allowed[3, 5] + checks.UNIT * exact[row, 5].abs())
    # 3 times the bound without the rounding of `allowed`, which makes the bound at most 1 + 2^-8 times as large.
    assert expected.error_over_bound(moved) == pytest.approx(3, rel=2.0**-7)
    with pytest.raises(ValueError, match=r"^the relative error is 1\.4"):  # sqrt(2), of unrelated rows
        expected.error_over_bound(exact.roll(7, 0))


def test_wrong_products_and_those_beyond_the_bound_are_recorded_and_not_timed(module) -> None:
    bench, (a, w, exact) = module("bench_matmul"), product("row", 64, module)
    expected = module("fp8_checks").reference(a, w)
    found = exact.bfloat16()
    beyond = exact.clone()
    beyond[3, 5] += 2 * expected.allowed[3, 5] + 2.0**-6 * exact[3, 5].abs()
    made = {"breccia": found, "breccia, column-major scales": beyond, "torch": beyond, "humming": exact.roll(1, 0)}

    def broken() -> Any:
        raise breccia.UnsupportedError("N of 128")

    arms: dict[str, Any] = {name: lambda y=y: lambda: y for name, y in made.items()} | {"deep_gemm": broken}
    times, clock = bench.measured(arms, "row", expected, 2, "cpu", False, False)
    assert clock is None and times["breccia"]["graph"]["runs"] == 2 and times["breccia"]["error_over_bound"] <= 1
    assert times["torch"]["error_over_bound"] > 1 and "graph" in times["torch"]  # rivals may exceed the bound
    assert times["breccia, column-major scales"]["error"].endswith("times the bound of the contract")
    assert times["humming"]["error"].startswith("ValueError: the relative error is")
    assert times["deep_gemm"] == {"error": "UnsupportedError: N of 128"}
    fast, _ = bench.measured({"breccia": arms["torch"]}, "row fast", expected, 1, "cpu", False, False)
    assert fast["breccia"]["error_over_bound"] > 1 and "graph" in fast["breccia"]


def test_large_products_are_measured_again_after_pauses(module, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, (a, w, exact) = module("bench_matmul"), product("tiles", 64, module)
    slept: list[float] = []
    monkeypatch.setattr(bench.time, "sleep", slept.append)
    arms = {name: lambda: exact.bfloat16 for name in ("breccia", "torch", "humming")}
    expected = module("fp8_checks").reference(a, w)
    times, _ = bench.measured(arms, "tiles", expected, 3, "cpu", False, True)
    assert {name: timed.get("burst", {}).get("runs") for name, timed in times.items()} == {
        "breccia": 3,
        "torch": 3,
        "humming": None,
    }
    assert slept == [module("bench_gpu").IDLE_S] * 6


def test_breccia_0_1_3_is_added_to_large_products_with_one_scale_per_tensor(module, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module("bench_matmul")
    rows = [{"kind": kind, "shape": [4096, 4096, 4096], "times": {}} for kind in ("tensor", "row")]
    rows.append({"kind": "tensor", "shape": [1, 7168, 16384], "times": {}})
    asked: list[Any] = []

    def child(*words: str, python_path: Any) -> Any:
        asked.append(words)
        return {"4096x4096x4096": {"error": "none"}}

    monkeypatch.setattr(bench, "common", SimpleNamespace(child=child))
    monkeypatch.setattr(bench.rivals, "python_path", lambda name: Path(name))
    assert bench.add_old(rows, 20.0) == ""
    assert [row["times"] for row in rows] == [{"breccia-0.1.3": {"error": "none"}}, {}, {}]
    assert asked == [("old_matmul.py", "--shapes", "4096x4096x4096", "--samples", "3", "--seconds", "20.0")]
    assert bench.add_old(rows[1:], 20.0) == "no large product with one scale per tensor was measured"


# ------------------------------------------------------------------------------------------------ what is shown


def summary(median: float) -> dict[str, Any]:
    return {"runs": 5, "min_s": median / 1.25, "median_s": median, "max_s": median * 1.25}


def result(*rows: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"kind": kind, "shape": [int(side) for side in shape.split("x")], "tile": "-", "times": times}
        for kind, shape, times in rows
    ]
    return {"options": {"state": "hot", "graph_calls": 20}, "rows": made, "left": 0, "rivals": {"humming": "0.1.19"}}


def timed(**seconds: float) -> dict[str, Any]:
    return {name.replace("_", "-"): {"graph": summary(s)} for name, s in seconds.items()}


def test_goals_show_the_range_measured_its_worst_product_and_whether_they_are_met(module) -> None:
    large = module("fp8_plan").LARGE
    tensor = [("tensor", shape, timed(breccia=1.0, torch=1.2)) for shape in large]
    row = [("row", shape, timed(breccia=1.0, torch=1.0 + i / 10)) for i, shape in enumerate(large)]
    blocks = [("blocks", large[0], timed(breccia=1.0, torch=1.5, transformer_engine=1.25))]
    old = {"breccia-0.1.3": {"device": summary(6.0)}}
    tensor[0] = ("tensor", large[0], tensor[0][2] | old)
    cells = {row[0]: row[1:] for row in module("fp8_tables").goals(result(*tensor, *row, *blocks)).rows}
    shape = large[0].replace("x", "×")
    assert cells["scales per tensor and row"] == ("≥ 1.05 × `torch._scaled_mm`", "1.00 to 1.40", f"row {shape}", "9 of 10")
    assert cells["scales per tensor"][1:] == ("6.00", f"tensor {shape}", "1 of 1; 4 not measured")
    assert cells["1×128 by 1×128"][1:] == ("1.25", f"blocks {shape}", "1 of 1; 4 not measured")
    assert cells["MXFP8"][1:] == ("not measured", "-", "-")
    every = [
        ("mx", shape, timed(breccia=5.0, bf16=1.0) | {"breccia, through BF16": {"graph": summary(1.0)}}) for shape in large
    ]
    cells = {row[0]: row[1:] for row in module("fp8_tables").goals(result(*every)).rows}
    assert cells["MXFP8"][1:] == ("1.00", f"mx {shape}", "yes")


def test_both_states_errors_and_failures_of_arms_are_shown(module) -> None:
    tables = module("fp8_tables")
    times = {
        "breccia": {"graph": summary(1.0), "burst": summary(0.5), "error_over_bound": 0.25},
        "torch": {"graph": summary(1.5), "burst": summary(0.6), "error_over_bound": 0.5},
        "humming": {"error": "UnsupportedError: `N` is " + 200 * "x"},
    }
    found = result(("tiles", "4x5x6", times), ("tiles", "8x5x6", {"breccia": {"error_over_bound": 0.125}}))
    (states,) = tables.states(found).rows
    assert (states[4], states[7]) == ("1.50×", "1.20×")
    assert tables.errors(found).rows == (("tiles", "0.250", "0.500"),)
    said = tables.rates(found).note
    assert "humming raised `UnsupportedError: N is xxx" in said and "xxx ...` (tiles 4×5×6)." in said
    assert "Rivals: humming 0.1.19." in said and "min / median / max of 5 samples" in said
    plain = result(("row", "4x5x6", timed(breccia=1.0)))
    assert not tables.states(plain).rows and not tables.errors(plain).rows


def test_plots_have_the_rates_by_rows_and_the_share_of_the_limit(module) -> None:
    plots = module("product_plots")
    n, k = plots.SWEPT
    flop = 2.0 * 128 * n * k
    sweep = result(("row", f"128x{n}x{k}", timed(breccia=1e-12 * flop, torch=2e-12 * flop, bf16=1e-15)))
    assert plots.sweep_series(sweep) == {"row": [[128, 1.0, 0.5]]}
    limits = plots.LIMITS["NVIDIA H200"]
    moved = 128 * k + n * k + 2 * 128 * n
    found = result(("row", f"128x{n}x{k}", timed(breccia=2 * moved / limits.bandwidth)))
    found["provenance"] = {"device": "NVIDIA H200, CUDA 13.0"}
    weights = {"rows": [{"format": "int4", "m": 4096, "n": 512, "k": 512, "bytes": 1, "times": {"breccia": {"median_s": 1.0}}}]}
    weights["rows"][0]["times"]["breccia"]["median_s"] = 4 * 2.0 * 4096 * 512 * 512 / limits.bf16
    points = plots.roofline_series(found, weights)["points"]
    assert points["fp8"] == {"row": [[round(flop / moved, 4), 0.5]]}
    assert points["weights"]["int4"][0][1] == 0.25
    found["provenance"] = {"device": "NVIDIA H100"}
    assert plots.roofline_series(found, None) == {}
