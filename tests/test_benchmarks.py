"""Benchmarks run at any size, say where and what they measured, and the documents show what they found."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"

TINY = {
    "cast": ["--size", "128", "--runs", "1", "--rivals", "ml_dtypes"],
    "memory": ["--size", "128", "--recipes", "nvfp4"],
    "accuracy": ["--size", "64", "--seeds", "2", "--recipes", "mxfp8", "--no-weights", "--jobs", "1"],
}


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/, and forgets them all afterwards: their names are common ones."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - known:
        if str(BENCHMARKS) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A copy of the pages and plots."""
    return Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))


@pytest.mark.parametrize("benchmark", TINY)
def test_each_benchmark_writes_what_it_measured_and_where(benchmark: str, tmp_path: Path, module) -> None:
    done = run(f"bench_{benchmark}.py", *TINY[benchmark], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    tables = module("tables")
    assert path.name == f"{benchmark}-{module('common').machine_tag()}.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["benchmark"], result["schema"]) == (benchmark, module("common").SCHEMA)
    where = result["provenance"]
    assert all(where[key] for key in ("date_utc", "cpu", "cores", "os", "python", "command"))
    assert where["versions"]["breccia-core"] and where["versions"]["numpy"]
    assert str(tmp_path) not in path.read_text(encoding="utf-8")
    for make in tables.TABLES[benchmark].values():
        table = make(result)
        assert table.title in done.stdout and table.note
        assert all(len(row) == len(table.headings) for row in table.rows) and (table.rows or benchmark == "accuracy")


def test_the_straightforward_rival_writes_our_scales_and_values(module) -> None:
    rivals, bench = module("rivals"), module("bench_cast")
    ours, theirs = rivals.rival(rivals.OURS), rivals.rival(rivals.STRAIGHTFORWARD)
    x = module("common").normal((16, 512), 0)
    for recipe in rivals.RECIPES:
        a, b = ours.cast(recipe)(x), theirs.cast(recipe)(x)
        assert bench.equal_share(ours.scale(a), theirs.scale(b), 0.0) == 1, recipe
        # It divides where we multiply by a reciprocal: now and then a tie goes the other way.
        assert bench.equal_share(ours.dequantize(a), theirs.dequantize(b), bench.SAME_VALUE) > 0.999, recipe


def test_a_rival_that_is_not_at_hand_is_skipped_with_a_line(tmp_path: Path, module, monkeypatch, capsys) -> None:
    bench, rivals = module("bench_cast"), module("rivals")
    monkeypatch.setattr(rivals, "old_folder", lambda: tmp_path / "absent")
    assert bench.chosen([]) == ["ml_dtypes"]
    assert "skipped breccia-0.1.3: not fetched yet; --rivals breccia-0.1.3 fetches it" in capsys.readouterr().err
    assert bench.chosen(["all"]) == ["ml_dtypes", "breccia-0.1.3"] and bench.chosen(["none"]) == []
    with pytest.raises(SystemExit, match=r"--rivals takes ml_dtypes, breccia-0\.1\.3, all or none; got 'torch'"):
        bench.chosen(["torch"])


def test_a_rival_is_not_measured_in_place_of_another(tmp_path: Path) -> None:
    done = run("bench_cast.py", "--rival", "breccia-0.1.3", "--size", "128", "--dump", str(tmp_path))
    assert done.returncode and "was to time breccia-0.1.3, but `import breccia` gives" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["bench_cast.py", "--size", "100"], "--size must be 128 or a multiple of 256"),
        (["bench_cast.py", "--runs", "0"], "--runs must be at least 1, got 0"),
        (["bench_memory.py", "--size", "0"], "--size must be at least 1, got 0"),
        (["bench_memory.py", "--recipes", "mxfp9"], "mxfp9"),
        (["bench_accuracy.py", "--seeds", "0"], "--size and --seeds must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_out_of_range_are_refused_in_words(options: list[str], said: str) -> None:
    done = run(*options)
    assert done.returncode and said in done.stderr and "Traceback" not in done.stderr


def test_documents_show_what_the_results_say() -> None:
    done = run("draw.py", "--check")
    assert done.returncode == 0, done.stderr


def test_every_benchmark_has_a_result_and_every_table_a_place(module) -> None:
    draw = module("draw")
    results = draw.load(BENCHMARKS / "results")
    assert all(results.values()), {name: len(found) for name, found in results.items()}
    asked = {
        name
        for page in draw.PAGES
        for _, name, _, _ in module("blocks").BLOCK.findall((ROOT / "docs" / page).read_text("utf-8"))
    }
    assert asked == set(draw.blocks_of(results, draw.plots_of(results)))


@pytest.mark.parametrize("page", ["benchmarks.md", "accuracy.md"])
def test_a_number_typed_into_a_table_is_found(page: str, documents: Path) -> None:
    text = (documents / page).read_text(encoding="utf-8")
    head, mark, rest = text.partition("| nvfp4 |")
    assert mark
    (documents / page).write_text(f"{head}{mark} 1{rest}", encoding="utf-8")
    done = run("draw.py", "--check", "--docs", str(documents))
    assert done.returncode and f"{page} differ(s) from the results" in done.stderr


def test_a_plot_of_other_numbers_is_found(documents: Path) -> None:
    plot = sorted((documents / "img").glob("sqnr-*.svg"))[0]
    plot.write_text("<svg/>", encoding="utf-8")
    done = run("draw.py", "--check", "--docs", str(documents))
    assert done.returncode and f"img/{plot.name} differ(s)" in done.stderr


def test_a_block_that_does_not_exist_or_does_not_end_is_refused(documents: Path) -> None:
    page = documents / "accuracy.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<!-- table: published -->", "<!-- table: publshed -->"), encoding="utf-8")
    assert "asks for a block 'publshed'; there are accuracy," in run("draw.py", "--check", "--docs", str(documents)).stderr
    page.write_text(text + "\n<!-- table: published -->\n", encoding="utf-8")
    assert "without its `<!-- end -->`" in run("draw.py", "--check", "--docs", str(documents)).stderr


def test_a_result_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cast-old.json").write_text('{"benchmark": "cast", "schema": 0}', encoding="utf-8")
    done = run("draw.py", "--check", "--results", str(tmp_path))
    assert done.returncode and "cast-old.json holds benchmark 'cast' of schema 0" in done.stderr


def test_drawing_again_changes_no_byte(documents: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for _ in range(2):
        done = run("draw.py", "--docs", str(documents))
        assert done.returncode == 0, done.stderr
        drawn.append({path.name: path.read_bytes() for path in documents.rglob("*.*") if path.is_file()})
    assert drawn[0] == drawn[1]
