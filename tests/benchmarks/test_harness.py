"""The harness: interleaved and checked times, two passes that agree, results that are refused, joined and written."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import commands, device, results, timing
from harness.commands import Benchmark
from harness.tables import Table, judged


def test_calls_are_interleaved() -> None:
    made: list[str] = []
    rows = timing.rows_of([({"case": c}, {c: lambda c=c: made.append(c)}) for c in "ab"], 3)
    assert made == ["a", "a", "b", "b"] * 3  # one uncounted, one counted
    assert [row["case"] for row in rows] == ["a", "b"] and all(rows[i]["time"]["ab"[i]]["runs"] == 3 for i in (0, 1))
    assert len(timing.interleaved([lambda: time.sleep(0.01)], 1, 0.1)[0]) > 2


def test_passes_agree_within_the_limit() -> None:
    row = {"passes": [{"ours": timing.summary([1.0, 2.0, 3.0])}, {"ours": timing.summary([2.2])}]}
    assert timing.drift(row, "ours") == 1.1 and timing.pooled(row, "ours") == (1.0, 2.1, 3.0)
    assert timing.pooled(row, "none") is None and timing.agree(1, 1.15) and not timing.agree(1.16, 1)


def test_arms_that_fail_or_give_a_wrong_result_are_recorded_and_not_timed() -> None:
    made: list[str] = []

    def check(arm: str, result: Any) -> float | None:
        if result == "wrong":
            raise ValueError("it is wrong\nand more")
        return 0.5 if arm == "b" else None

    arms = device.Arms("cpu", check)
    arms.add({name: lambda name=name: lambda: made.append(name) for name in "ab"})
    arms.add({"none": lambda: None, "broken": lambda: lambda: 1 // 0, "wrong": lambda: lambda: "wrong"})
    device.sampled(arms.timers.values(), 2)
    found = arms.times()
    assert made[:2] == ["a", "b"]  # each once to check, then interleaved
    assert sorted(made[2:4]) == sorted(made[4:]) == ["a", "b"]
    assert found["errors"] == {
        "broken": "ZeroDivisionError: integer division or modulo by zero",
        "wrong": "ValueError: it is wrong",
    }
    assert found["over_bound"] == {"b": 0.5} and {arm: t["runs"] for arm, t in found["time"].items()} == {"a": 2, "b": 2}


def test_each_round_of_samples_has_an_order_of_its_own() -> None:
    """At its power limit a card is faster for what follows light work."""
    made: list[int] = []
    timers = [device.Timer(lambda n=n: made.append(n), "cpu") for n in range(4)]
    device.sampled(timers, 8)
    rounds = [tuple(made[at : at + 4]) for at in range(0, 32, 4)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds) and len(set(rounds)) > 4
    assert {len(timer.seconds) for timer in timers} == {8}


def test_samples_pause_where_asked_and_count_the_calls_in_a_graph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, slept = device.Timer(lambda: time.sleep(0.02), "cpu", each=2), list[float]()
    monkeypatch.setattr(device, "time", SimpleNamespace(sleep=slept.append))
    device.sampled([timer, dataclasses.replace(timer, seconds=[])], 2, idle=True)
    assert slept == [device.IDLE_S] * 4 and len(timer.seconds) == 2 and 0.01 <= min(timer.seconds) < 0.02


@pytest.mark.parametrize("ends", [[300], [40, 40, 300]])
def test_errors_of_products_are_multiples_of_the_bound_and_wrong_products_are_refused(ends: list[int]) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    x, weights = torch.randn(300, 256).bfloat16(), torch.randn(len(ends), 96, 256).double()
    groups = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    exact = torch.cat([rows.double() @ w.mT for rows, w in zip(x.split(groups), weights, strict=True)])
    bound = lambda magnitude, k: magnitude * k * 2**-24  # noqa: E731
    found = device.reference(lambda rows: x[rows].double(), weights.__getitem__, torch.tensor(ends), bound)
    assert found.exact.shape == (device.CHECKED, 96) and torch.allclose(found.exact, exact[found.rows], rtol=1e-12)
    assert 0 < found.error_over_bound(exact.bfloat16()) <= 1  # rounded once, to BF16
    assert 0 < found.error_over_bound(exact.float()) <= 1 < found.error_over_bound(exact.bfloat16().float())
    moved, row = exact.clone(), int(found.rows[3])
    moved[row, 5] += 3 * (found.allowed[3, 5] + device.UNIT * exact[row, 5].abs())
    # 3 times the bound without the rounding of `allowed`, which makes the bound at most 1 + 2^-8 times as large.
    assert found.error_over_bound(moved) == pytest.approx(3, rel=2.0**-7)
    with pytest.raises(ValueError, match=r"^the relative error is"):
        found.error_over_bound(exact.roll(7, 0))


@pytest.mark.parametrize(("flags", "suffix"), [("fpu avx2", ", AVX2"), ("fpu avx2 avx512f", ""), ("fpu", ""), (None, "")])
def test_results_tell_processors_without_avx512_apart(flags: str | None, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "model name\t: AMD EPYC\n" + (f"flags\t\t: {flags}\n" if flags else "")
    monkeypatch.setattr(results.Path, "exists", lambda self: True)
    monkeypatch.setattr(results.Path, "read_text", lambda self, encoding=None: told)
    assert results.cpu_model() == "AMD EPYC" + suffix


def test_provenance_names_no_folder_of_the_one_who_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["/home/me/bench_cast.py", "/home/me/a.gguf", "--size", "128", "--out", "/home/me/results", "--resume=/home/me/r.json"],
    )
    monkeypatch.setenv("BRECCIA_GGML", "/home/me/ggml")
    found = results.provenance(["torch"], device="GPU, CUDA 13")
    assert found["command"] == "python benchmarks/bench_cast.py a.gguf --size 128" and "/home/me" not in json.dumps(found)
    assert results.tag_of(found) == "gpu" and results.tag_of({**found, "device": ""}).endswith(f"-{found['cores']}c")


@pytest.fixture
def benchmark_of(monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """A benchmark of one table, which only this test knows."""
    monkeypatch.setattr(commands, "BENCHMARKS", {})
    return Benchmark(
        "trial", {"trial": lambda r: Table("a", ("b",), tuple((f"row {row['a']}",) for row in r["rows"]), "a note")}
    )


@pytest.mark.parametrize(("field", "written"), [("", True), ("failed", True), ("refused", False)])
def test_a_refused_result_is_shown_and_not_written(
    field: str, written: bool, benchmark_of: Benchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {field: "the reason"} if field else {}

    @commands.command
    def main(count: int = 1) -> Any:
        for n in range(count):
            yield benchmark_of.result([{"a": n}], {"count": count}, **more)

    if field:
        with pytest.raises(SystemExit, match="the reason"):
            main(count=3, out=tmp_path)
    else:
        main(count=3, out=tmp_path)
    assert "row 2" in capsys.readouterr().out
    found = [results.read(path) for path in tmp_path.glob("trial-*.json")]
    assert [(r["rows"], r["options"]) for r in found] == [([{"a": 2}], {"count": 3})] * written
    assert not found or (field not in found[0] and (found[0]["schema"], "date_utc" in found[0]["runs"][0]) == (2, True))


def test_files_have_a_row_per_line_and_functions_run_in_processes_of_their_own(tmp_path: Path) -> None:
    result = {"runs": [{"cpu": "é"}], "options": {"n": [1, 2]}, "rows": [{"a": 1.5}, {"a": None}]}
    text = results.text_of(result)
    assert json.loads(text) == result and ' "rows": [\n  {"a": 1.5},\n  {"a": null}\n ]\n' in text
    assert commands.apart("harness.results:tag_of", {"device": "One GPU, 2"}) == "one-gpu"
    with pytest.raises(SystemExit, match="harness.results:read failed with status 1"):
        commands.apart("harness.results:read", "absent")


def run_of(date: str, rows: list[tuple[str, int]], left: int = 0) -> dict[str, Any]:
    options = {"state": "hot", "samples": 5, "shapes": [[1, 2, 3]]}
    made = {"benchmark": "matmul-gpu", "schema": 2, "runs": [{"date_utc": date, "device": "GPU"}], "options": options}
    return {**made, "left": left, "rows": [{"kind": kind, "shape": [1, 2, 3], "value": value} for kind, value in rows]}


def test_rows_of_later_results_replace_those_of_earlier_ones_and_name_their_run() -> None:
    first, second = run_of("monday", [("row", 1), ("tiles", 2)], left=1), run_of("tuesday", [("tiles", 3), ("mx", 4)])
    made = results.joined([first, second], ("kind", "shape"))
    assert [(row["kind"], row["value"], made["runs"][row["run"]]["date_utc"]) for row in made["rows"]] == [
        ("row", 1, "monday"),
        ("tiles", 3, "tuesday"),
        ("mx", 4, "tuesday"),
    ]
    assert made["left"] == 0 and made["options"] == first["options"]
    third = run_of("wednesday", [("row", 5)])
    third["options"]["samples"] = 3
    again = results.joined([made, third], ("kind", "shape"))
    assert [run["date_utc"] for run in again["runs"]] == ["wednesday", "tuesday"], "no row of monday remains"
    assert [(row["value"], row["run"]) for row in again["rows"]] == [(5, 0), (3, 1), (4, 1)]
    assert again["options"]["samples"] == 3, "every row has at least so many"


def test_results_whose_floats_differ_by_rounding_belong_together() -> None:
    first, second = run_of("monday", [("row", 1)]), run_of("tuesday", [("row", 2)])
    first["options"]["perplexity"], second["options"]["perplexity"] = 28.378760876712338, 28.378753993414712
    assert [row["value"] for row in results.joined([first, second], ("kind",))["rows"]] == [2]
    second["options"]["perplexity"] = 28.3776
    with pytest.raises(SystemExit, match="must agree in their options"):
        results.joined([first, second], ("kind",))


@pytest.mark.parametrize(
    "change", [{"runs": [{"device": "another"}]}, {"benchmark": "gpu-casts"}, {"options": {"state": "burst"}}]
)
def test_results_that_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    first = run_of("monday", [("row", 1)])
    with pytest.raises(SystemExit, match=r"must agree in their (device|benchmark|options): found"):
        results.joined([first, {**first, **change}], ("kind",))


def test_goals_name_their_worst_product() -> None:
    every = {"a": 1.0, "b": 3.0, "c": None}
    assert judged("work", "goal", every, 2.0)[2:] == ("1.00 to 3.00", "a", "1 of 2; 1 not measured")
    assert judged("work", "goal", every, 3.0, at_most=True)[2:] == ("1.00 to 3.00", "b", "2 of 2; 1 not measured")
    assert judged("work", "goal", {"a": None}, 2.0)[2:] == ("not measured", "-", "-")
