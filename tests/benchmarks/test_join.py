"""Results of several runs of one benchmark are joined row by row."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def join(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("join")


def result(date: str, rows: list[tuple[str, int]], left: int = 0) -> dict[str, Any]:
    return {
        "benchmark": "matmul-gpu",
        "schema": 1,
        "provenance": {"date_utc": date, "device": "GPU, driver 1"},
        "options": {"state": "hot", "samples": 5, "shapes": [[1, 2, 3]]},
        "left": left,
        "rows": [{"kind": kind, "shape": [1, 2, 3], "value": value} for kind, value in rows],
    }


def test_rows_of_later_files_replace_those_of_earlier_ones_and_name_their_run(join: Any) -> None:
    first, second = result("monday", [("row", 1), ("tiles", 2)], left=1), result("tuesday", [("tiles", 3), ("mx", 4)])
    made = join.joined([first, second])
    assert [(row["kind"], row["value"], made["joined"][row["run"]]["date_utc"]) for row in made["rows"]] == [
        ("row", 1, "monday"),
        ("tiles", 3, "tuesday"),
        ("mx", 4, "tuesday"),
    ]
    assert made["left"] == 0 and made["options"] == first["options"] and made["provenance"]["date_utc"] == "tuesday"
    third = result("wednesday", [("row", 5)])
    third["options"]["samples"] = 3
    again = join.joined([made, third])
    assert [run["date_utc"] for run in again["joined"]] == ["wednesday", "tuesday"], "no row of monday remains"
    assert [(row["value"], row["run"]) for row in again["rows"]] == [(5, 0), (3, 1), (4, 1)]
    assert again["options"]["samples"] == 3, "every row has at least so many"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provenance": {"device": "another"}}, "must agree in their device: found 'another' beside 'GPU, driver 1'"),
        ({"benchmark": "gpu-casts"}, "must agree in their benchmark: found 'gpu-casts' beside 'matmul-gpu'"),
        ({"options": {"state": "burst"}}, "must agree in their options: found {'state': 'burst'} beside {'state': 'hot'}"),
        ({"schema": 0}, "must agree in their schema: found 0 beside 1"),
    ],
)
def test_results_that_do_not_belong_together_are_refused(join: Any, change: dict[str, Any], message: str) -> None:
    first = result("monday", [("row", 1)])
    with pytest.raises(SystemExit) as e:
        join.joined([first, {**copy.deepcopy(first), **change}])
    assert message in str(e.value)


def test_a_benchmark_whose_rows_have_no_names_is_refused(join: Any) -> None:
    one = {**result("monday", []), "benchmark": "dlpack"}
    with pytest.raises(SystemExit, match="takes results of gpu-casts, .*; got 'dlpack'"):
        join.joined([one])


def test_every_run_has_a_line_on_the_page(join: Any) -> None:
    """In the published results too."""
    tables = join.tables
    for path in (BENCHMARKS / "results").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "joined" in found:
            lines = tables.machines(found)
            assert len(lines) == len(found["joined"]) == len({row["run"] for row in found["rows"]})
            assert all(run["date_utc"] in line for run, line in zip(found["joined"], lines, strict=True))


def test_tuned_configurations_replace_those_of_the_same_products(join: Any, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("breccia_triton")
    name, small, wide = "weight_only_gpu.json", {"batch": 8, "high": 4, "deep": 8, "stages": 2}, {"decoded": "codes"}

    def file(folder: str, device: str, configs: dict[str, Any], run: str) -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        made = {"schema": 1, "device": device, "provenance": {"date_utc": run}, "configs": configs}
        path.write_text(json.dumps(made), encoding="utf-8")
        return path

    shipped = file("shipped", "GPU", {"a": small, "b": small}, "monday")
    join.main([file("tuned", "GPU", {"b": wide, "c": wide}, "tuesday")], shipped.parent)
    merged = json.loads(shipped.read_text(encoding="utf-8"))
    assert merged["configs"] == {"a": small, "b": wide, "c": wide} and merged["provenance"] == {"date_utc": "tuesday"}
    assert "1 new, 1 changed, 0 equal" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="must agree in their device: found 'other' beside 'GPU'"):
        join.main([file("tuned", "other", {"a": wide}, "friday")], shipped.parent)
    with pytest.raises(TypeError):
        join.main([file("tuned", "GPU", {"a": {"unknown": 1}}, "friday")], shipped.parent)
    assert json.loads(shipped.read_text(encoding="utf-8")) == merged
