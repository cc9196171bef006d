"""What the documents publish: pages equal the results, results say where they come from, and programs share no circle."""

from __future__ import annotations

import ast
import json
import shutil
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("breccia_triton")

import bench_matmul
import bench_weight_only
import draw
import fp8_products
from harness.blocks import BLOCK, pages_in
from harness.commands import BENCHMARKS
from harness.results import HERE, ROOT, read, told

from breccia_triton.tuning import measurements

RESULTS = sorted((HERE / "results").glob("*.json"))


def check(docs: Path = ROOT / "docs", results: Path = HERE / "results") -> str:
    """What `draw.py --check` says, or nothing."""
    try:
        draw.main(results, docs, check=True)
    except SystemExit as e:
        return str(e)
    return ""


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A copy of the pages and plots."""
    return Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))


def test_documents_match_the_results() -> None:
    assert check() == ""


def test_every_table_and_plot_is_shown_and_every_result_is_drawn() -> None:
    blocks, plots = draw.drawn(HERE / "results")
    texts = [page.read_text("utf-8") for page in pages_in(ROOT / "docs", drawn=True)]
    assert {name for page in texts for _, name, _, _ in BLOCK.findall(page)} == set(blocks)
    assert {read(path)["benchmark"] for path in RESULTS} == set(BENCHMARKS) and draw.NOTHING not in blocks.values()
    assert all(plot.shown_in(ROOT / "docs" / "img") for plot in plots) and len(plots) == 7


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_run_of_a_result_says_where_when_and_how_and_every_row_belongs_to_one(path: Path) -> None:
    result = read(path)
    runs = result["runs"]
    for run in runs:
        assert all(run[key] for key in ("date_utc", "cpu", "cores", "os", "python", "command", "commit"))
        assert run["versions"]["breccia-core"] and run["versions"]["numpy"]
        assert run["date_utc"] in told(run) and run["command"] in told(run) and "None" not in told(run)
        assert not any(word.startswith(("/", "~")) for word in run["command"].split()), "a folder of the one who ran it"
    assert {row.get("run", 0) for row in result["rows"]} == set(range(len(runs)))


@pytest.mark.parametrize(
    "page", ["measured/cpu-numpy.md", "measured/accuracy.md", "measured/parity.md", "measured/gpu-casts.md"]
)
def test_a_manual_edit_of_a_table_is_found(page: str, documents: Path) -> None:
    text = (documents / page).read_text(encoding="utf-8")
    place = next(block.start(3) + block[3].index("|", 2) for block in BLOCK.finditer(text) if "| nvfp4 |" in block[3])
    (documents / page).write_text(f"{text[:place]}1{text[place:]}", encoding="utf-8")
    assert f"{page} differ(s) from the results" in check(documents)


def test_an_outdated_plot_is_found(documents: Path) -> None:
    plot = sorted((documents / "img").glob("sqnr-*.svg"))[0]
    plot.write_text("<svg/>", encoding="utf-8")
    assert f"img/{plot.name} differ(s)" in check(documents)


def test_an_unknown_or_unterminated_block_is_refused(documents: Path) -> None:
    page = documents / "measured" / "accuracy.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<!-- table: published -->", "<!-- table: publshed -->"), encoding="utf-8")
    assert "asks for a block 'publshed'; there are accuracy," in check(documents)
    page.write_text(text + "\n<!-- table: published -->\n", encoding="utf-8")
    assert "without its `<!-- end -->`" in check(documents)


def test_results_of_another_schema_or_of_an_unsteady_machine_are_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "cast-old.json").write_text('{"benchmark": "cast", "schema": 1}', encoding="utf-8")
    assert "cast-old.json holds benchmark 'cast' of schema 1" in check(results=tmp_path)
    (tmp_path / "cast-old.json").unlink()
    (found,) = (path for path in RESULTS if path.name.startswith("cast-torch-"))
    result = read(found)
    result["options"]["drift"] = 1.5
    (tmp_path / found.name).write_text(json.dumps(result), encoding="utf-8")
    assert f"{found.name} was measured with --drift above 1.15; rerun" in check(results=tmp_path)


@pytest.mark.long
def test_drawing_writes_the_published_bytes(documents: Path) -> None:
    pytest.importorskip("matplotlib")
    before = {path.name: path.read_bytes() for path in documents.rglob("*.*") if path.is_file()}
    draw.main(docs=documents)
    assert {path.name: path.read_bytes() for path in documents.rglob("*.*") if path.is_file()} == before


def test_the_shipped_times_are_those_of_the_published_result(tmp_path: Path) -> None:
    path, source = tmp_path / "table.json", HERE / "results" / "matmul-gpu-nvidia-h200.json"
    path.write_text("of another run", encoding="utf-8")
    bench_matmul.main(source=source, table=path)
    shipped = measurements.SHIPPED / "matmul_nvidia_h200.json"
    assert json.loads(path.read_text("utf-8")) == json.loads(shipped.read_text("utf-8")), (
        f"run `python benchmarks/bench_matmul.py --from {source.relative_to(ROOT)} --table` with its path"
    )


def test_the_shipped_times_of_weights_are_those_of_the_published_result() -> None:
    rows = json.loads((HERE / "results" / "gpu-weight-only-nvidia-h200.json").read_text("utf-8"))["rows"]
    shipped = measurements.shipped("weight_times", "NVIDIA H200")
    assert measurements.read(shipped, "NVIDIA H200", float) == bench_weight_only.slowdowns(rows)


def test_every_product_of_a_goal_is_in_the_plan() -> None:
    rows = fp8_products.planned(None, None)
    assert len(rows) == len(set(rows))
    planned = {bench_matmul.named(kind, shape.split("x")) for shape, kind in rows}
    assert {case for goal in bench_matmul.GOALS for case in goal.cases} <= planned


def test_modules_do_not_import_each_other_in_circles_and_the_harness_imports_no_subject() -> None:
    imports: dict[str, set[str]] = {}
    for path in HERE.rglob("*.py"):
        name = ".".join(path.relative_to(HERE).with_suffix("").parts)
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports[name] = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module):
            imports[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = {name: found & imports.keys() for name, found in imports.items()}
    assert len(list(TopologicalSorter(own).static_order())) == len(own)  # raises CycleError
    harness = {name for name in own if name.startswith("harness")}
    assert len(harness) >= 7 and all(own[name] <= harness for name in harness)
