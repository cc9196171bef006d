"""The page of `--report`: its text without a browser, and its behavior in one."""

from __future__ import annotations

import base64
import dataclasses
import importlib.resources
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from browser import WIDTHS, chromium, unreachable

from breccia import NVFP4BlockScaling, ScalingRecipe, UnsupportedError, __version__
from breccia.siblings import install
from breccia_bridges.report import check_report, recipe_fields, write_report

pytest.importorskip("jinja2", reason="jinja2 comes with breccia-bridges[report]")

HOSTILE = "</script><script>alert(1)</script><b>bold</b><a href='x'>&lt;<img src=x onerror=alert(2)>"
BINS = 11


def tensor(name: str, sqnr: float | None = 20.0, **changed: Any) -> dict[str, Any]:
    """One quantized tensor of a run."""
    return {
        "name": name,
        "shape": [64, 32],
        "dtype": "F32",
        "stored_as": "nvfp4",
        "spec": None,
        "quantized": True,
        "reason": None,
        "parameters": 2048,
        "bytes_in": 8192,
        "bytes_out": 1152,
        "sqnr_db": sqnr,
        "cosine": 0.995,
        "max_error": 0.0123,
        "clip_rate": 0.0,
        "underflow_rate": 0.07,
        "lossless": False,
        "histogram": {"low": -1.0, "high": 1.0, "before": list(range(BINS)), "after": [0, *range(1, BINS)], "outside": 3},
    } | changed


def kept(name: str, reason: str = "fewer than two axes") -> dict[str, Any]:
    figures = dict.fromkeys(("sqnr_db", "cosine", "max_error", "clip_rate", "underflow_rate", "histogram"))
    return tensor(name, stored_as="F32", quantized=False, reason=reason, bytes_out=8192) | figures


def run(label: str, tensors: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    quantized = [t for t in tensors if t["quantized"]]
    reasons = [t["reason"] for t in tensors if not t["quantized"]]
    worst = min(quantized, key=lambda t: -math.inf if t["sqnr_db"] is None else t["sqnr_db"], default=None)
    return {
        "label": label,
        "source": "folder/model.safetensors",
        "destination": f"folder/{label}.safetensors",
        "recipe": {"name": label},
        "recipes": [label],
        "recipe_fields": [],
        "parameters": sum(t["parameters"] for t in tensors),
        "bytes_in": sum(t["bytes_in"] for t in tensors),
        "bytes_out": sum(t["bytes_out"] for t in tensors),
        "bytes_kept": sum(t["bytes_out"] for t in tensors if not t["quantized"]),
        "bits_per_parameter": 4.5,
        "sqnr_db": 20.25 if quantized else None,
        "cosine": 0.995 if quantized else None,
        "clip_rate": 0.001 if quantized else None,
        "underflow_rate": 0.0712 if quantized else None,
        "lossless": False,
        "worst": worst and worst["name"],
        "kept": {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
        "warnings": [],
        "tensors": tensors,
    } | changed


def two_runs() -> list[dict[str, Any]]:
    first = [tensor("layer.10.w", 19.5, bytes_out=900), tensor("layer.2.w", 21.0, bytes_out=10_000), kept("norm.w")]
    second = [tensor("layer.10.w", 32.0, stored_as="mxfp8"), tensor("layer.2.w", 31.0, stored_as="mxfp8"), kept("norm.w")]
    return [run("nvfp4", first), run("mxfp8", second, sqnr_db=31.5)]


def written(tmp_path: Path, runs: list[dict[str, Any]], **options: Any) -> str:
    write_report(tmp_path / "report.html", runs, **options)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()


class Parsed(HTMLParser):
    """Tags of a page, its text, and the JSON in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = self.json = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " " if tag in ("th", "td") else ""
        self._inside = "json" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "json":
            self.json += unpacked(data)
        elif self._inside not in ("script", "style"):
            self.text += data

    @property
    def lines(self) -> str:
        return " ".join(self.text.split())


# ------------------------------------------------------------------------------------------------ the file


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    first = written(tmp_path, [one | {"seconds": 1.0} for one in two_runs()])
    assert first == written(tmp_path, [one | {"seconds": 2.0} for one in two_runs()])


def test_nothing_in_the_page_makes_a_request(tmp_path: Path) -> None:
    page = written(tmp_path, two_runs()).replace("http://www.w3.org/2000/svg", "", 1)  # a name, which nothing asks for
    assert not re.search(r"https?://|\b(src|href|srcset|action|poster)\s*=|url\(|@import|<link|<iframe|import\(", page)
    assert "default-src 'none'" in page


def test_a_name_that_looks_like_markup_stays_text(tmp_path: Path) -> None:
    hostile = run(HOSTILE, [tensor(HOSTILE), kept("norm", HOSTILE)], warnings=[HOSTILE], recipes=[HOSTILE, "x"], source=HOSTILE)
    page = Parsed(written(tmp_path, [hostile], title=HOSTILE))
    assert page.tags.count("script") == 2
    assert not {"img", "a"} & set(page.tags)
    # Title twice, label, recipe, worst tensor, warning and reason; in the verdict the label twice and the worst tensor. The
    # source shows the last part of what looks like a path.
    assert page.text.count(HOSTILE) == 10
    assert json.loads(page.json)["runs"][0]["tensors"][0]["name"] == HOSTILE


def test_numbers_that_json_cannot_represent_become_null(tmp_path: Path) -> None:
    odd = run("nvfp4", [tensor("w", math.nan, max_error=math.inf)], sqnr_db=math.nan, cosine=-math.inf)
    page = Parsed(written(tmp_path, [odd]))
    found = json.loads(page.json, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["runs"][0]["tensors"][0]["sqnr_db"] is None
    assert found["runs"][0]["tensors"][0]["max_error"] is None
    assert "nvfp4 4.500 8.19 kB → 1.15 kB 0.141× 0 B 0 % not finite – 0.1 % 7.12 % w not finite" in page.lines


def test_an_unpaired_surrogate_in_a_name_is_written(tmp_path: Path) -> None:
    assert "a\\ud800b" in written(tmp_path, [run("nvfp4", [tensor("a\ud800b")])])


def test_the_summary_contains_every_figure_of_a_run(tmp_path: Path) -> None:
    page = Parsed(written(tmp_path, two_runs(), title="Two ways"))
    assert page.lines.count("Two ways") == 2
    assert "model.safetensors 6,144 parameters, 24.58 kB" in page.lines
    assert (
        "nvfp4 4.500 24.58 kB → 19.09 kB 0.777× 8.19 kB 42.9 % 20.25 dB 0.995000 0.1 % 7.12 % layer.10.w 19.50 dB" in page.lines
    )
    assert f"breccia {__version__}" in page.lines


def test_the_page_opens_with_a_verdict_and_the_plot_of_size_against_accuracy(tmp_path: Path) -> None:
    nvfp4, mxfp8 = two_runs()  # of 24,576 bytes, nvfp4 takes 19,092
    row = run("row", [tensor("layer.10.w", 15.0, bytes_out=20_000)], sqnr_db=15.0)
    page = written(tmp_path, [nvfp4, mxfp8 | {"bytes_out": 22_000}, row])
    for sentence in (
        "Most accurate: mxfp8, 0.895× the size, 31.50 dB.",
        "Smallest: nvfp4, 0.777× the size, 20.25 dB.",
        "row is no smaller than nvfp4, and less accurate.",
        "Worst tensor of nvfp4: layer.10.w, 19.50 dB.",
    ):
        assert sentence in Parsed(page).lines.replace("\xa0", " "), sentence
    places = [page.index(mark) for mark in ('class="verdict"', 'id="sizes"', 'id="summary-title"', 'id="tensor-title"')]
    assert places == sorted(places)
    assert "No tensor was quantized." in Parsed(written(tmp_path, [run("none", [kept("norm.w")])])).lines


def test_the_page_starts_at_the_run_whose_tensors_differ_most(tmp_path: Path) -> None:
    narrow, wide = run("narrow", [tensor("a", 20.0), tensor("b", 20.5)]), run("wide", [tensor("a", 20.0), tensor("b", 30.0)])
    for runs, place in (([narrow, wide], 1), ([wide, narrow], 0)):
        page = written(tmp_path, runs)
        assert re.findall(r'name="run" value="(\d)"[^>]* checked>', page) == [str(place)]


def test_zero_error_is_shown_as_infinite_sqnr(tmp_path: Path) -> None:
    exact = run("fp8_block", [tensor("w", None, lossless=True)], sqnr_db=None, lossless=True)
    assert "0 % ∞ 0.995000 0.1 % 7.12 % w ∞" in Parsed(written(tmp_path, [exact])).lines


def test_tiny_rates_are_shown_as_below_a_bound(tmp_path: Path) -> None:
    small = run("mxfp8", [tensor("w")], clip_rate=9e-6, underflow_rate=None)
    assert "0.995000 < 0.001 % – w" in Parsed(written(tmp_path, [small])).lines


def test_a_warning_names_its_runs_unless_all_runs_have_it(tmp_path: Path) -> None:
    first, second = two_runs()
    runs = [first | {"warnings": ["everywhere.", "once."]}, second | {"warnings": ["everywhere."]}]
    assert "Warnings everywhere. nvfp4: once. Left out" in Parsed(written(tmp_path, runs)).lines


@pytest.mark.long
def test_reasons_are_counted_once_if_all_runs_agree_and_per_run_otherwise(tmp_path: Path) -> None:
    agreeing = two_runs()
    assert "Reason Tensors fewer than two axes 1" in Parsed(written(tmp_path, agreeing)).lines
    differing = [agreeing[0], run("mxfp8", [tensor("w"), kept("a", "empty"), kept("b", "empty")])]
    page = Parsed(written(tmp_path, differing))
    assert "Reason nvfp4 mxfp8 fewer than two axes 1 0 empty 0 2" in page.lines


def test_the_recipes_are_listed_with_the_fields_that_differ_from_their_defaults(tmp_path: Path) -> None:
    plain, changed = recipe_fields(NVFP4BlockScaling()), recipe_fields(NVFP4BlockScaling(global_sense="amax"))
    assert changed["spec"] == "nvfp4,global_sense=amax" and plain["fields"][3] == {
        "name": "two_level",
        "value": "true",
        "default": "true",
    }
    first, second = two_runs()
    runs = [first | {"recipe_fields": [plain, changed]}, second | {"recipe_fields": [plain]}]
    lines = Parsed(written(tmp_path, runs)).lines
    others = (
        "fp4_format = E2M1, block_size = 16, scale_format = E4M3, two_level = true, order = codes_first, scale_rule = linear, "
        "block_m = 1, rotation = 0, rotation_seed = 0"
    )
    assert "Recipes Recipe Run Not at default At default nvfp4NVFP4BlockScaling nvfp4, mxfp8 –" in lines
    assert f"nvfp4,global_sense=amaxNVFP4BlockScaling nvfp4 global_sense = amax (default multiplier) {others} Left out" in lines
    alone = Parsed(written(tmp_path, runs[:1])).lines
    assert "Recipe Not at default At default nvfp4NVFP4BlockScaling – fp4_format" in alone
    assert "Not at default" not in Parsed(written(tmp_path, two_runs())).lines


@dataclasses.dataclass(frozen=True)
class Needing(ScalingRecipe):
    name: ClassVar[str] = "needing"
    block_size: int


def test_a_field_without_a_default_is_listed_with_its_value() -> None:
    assert recipe_fields(Needing(16))["fields"] == [{"name": "block_size", "value": "16", "default": None}]


def test_a_page_of_two_tensors_takes_less_than_100_kb(tmp_path: Path) -> None:
    assert len(written(tmp_path, two_runs()).encode()) < 100_000


@pytest.mark.parametrize("layers", [32, pytest.param(80, marks=pytest.mark.long)])
def test_the_page_of_five_candidates_of_a_large_model_takes_less_than_1500_kb(tmp_path: Path, layers: int) -> None:
    draw = np.random.default_rng(0)
    bell = np.exp(-(np.linspace(-4, 4, 101) ** 2) / 2) * 5e5

    def one(name: str, before: list[int]) -> dict[str, Any]:  # no two figures alike, as in real models
        sqnr, cosine, error, underflow = draw.random(4).tolist()
        drawn = {"low": -error, "high": error, "outside": 0, "before": before, "after": draw.poisson(bell).tolist()}
        return tensor(name, 20 + sqnr, cosine=cosine, max_error=error, underflow_rate=underflow, histogram=drawn)

    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    before = {f"model.layers.{n}.{part}.weight": draw.poisson(bell).tolist() for n in range(layers) for part in parts}
    page = written(tmp_path, [run(f"run{n}", [one(*item) for item in before.items()]) for n in range(5)])
    assert len(page.encode()) <= 1_500_000


def test_colours_stand_out_on_both_grounds() -> None:
    css = importlib.resources.files("breccia_bridges").joinpath("templates/report.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in css.split("prefers-color-scheme: dark"))
    for colours in (light, dark):
        for name in ("ink", "muted", *(f"run-{i}" for i in range(6))):
            # WCAG 2.2: 4.5 for text (1.4.3), 3 for marks (1.4.11).
            assert contrast(colours[name], colours["ground"]) >= (3 if name.startswith("run") else 4.5), name


def contrast(a: str, b: str) -> float:
    """WCAG 2.2's ratio."""
    bright, dim = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_report_must_be_named_as_html(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    with pytest.raises(UnsupportedError, match=re.escape(f"a report is an HTML page; name it report.html, got {path}.")):
        check_report(path)
    check_report(tmp_path / "report.HTM")


def test_a_folder_is_not_replaced_by_a_report(tmp_path: Path) -> None:
    path = tmp_path / "folder.html"
    path.mkdir()
    wanted = f"{path} is a folder; name a file for the report, such as {path / 'report.html'}."
    with pytest.raises(UnsupportedError, match=re.escape(wanted)):
        write_report(path, two_runs())
    assert path.is_dir()


def test_the_folder_of_a_report_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "no" / "report.html"
    wanted = f"cannot write {path}: there is no folder {path.parent}; create it first."
    with pytest.raises(FileNotFoundError, match=re.escape(wanted)):
        check_report(path)


def test_a_missing_extra_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    wanted = f"^--report needs jinja2: {re.escape(install('breccia-bridges[report]'))}$"
    with pytest.raises(ImportError, match=wanted):
        check_report(tmp_path / "report.html")


def test_a_report_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a report needs at least one run; got none"):
        write_report(tmp_path / "report.html", [])


def test_a_report_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_report(path, two_runs()[:1])
    old = path.read_bytes()

    def refuse(path: Path) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("breccia_bridges.staging.sync", refuse)
        with pytest.raises(OSError, match="disk full"):
            write_report(path, two_runs())
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    write_report(path, two_runs())
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>") and path.read_bytes() != old
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_replaces_no_page_but_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("<!doctype html>\n<title>my thesis</title>")
    wanted = f"{path} exists and is no report of breccia; choose another name, or remove it."
    with pytest.raises(FileExistsError, match=re.escape(wanted)):
        check_report(path)
    assert "my thesis" in path.read_text()
    path.write_text("")
    write_report(path, two_runs())
    check_report(path)


# ------------------------------------------------------------------------------------------------ the page in a browser

Open = Callable[..., Any]


def expect(locator: Any) -> Any:
    """Playwright's, which waits."""
    from playwright.sync_api import expect

    return expect(locator)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of some runs. Any network request, logged error or exception fails the test.

    The errors are in `page.errors`, for tests that provoke one. before: a script that runs before the page's own.
    """
    pages: list[Any] = []

    def open_page(runs: list[dict[str, Any]], before: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options)
        context.add_init_script(before)
        page = context.new_page()
        page.set_default_timeout(60_000)  # for a page that hangs, not for a slow machine
        page.errors = []
        pages.append(page)

        def only_files(route: Any) -> None:
            if route.request.url.startswith("file:"):
                route.continue_()
            else:
                page.errors.append(f"asked for {route.request.url}")
                route.abort()

        context.route("**/*", only_files)
        page.on("console", lambda message: page.errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("dialog", lambda dialog: (page.errors.append(f"alert: {dialog.message}"), dialog.dismiss()))
        write_report(tmp_path / "report.html", runs)
        page.goto((tmp_path / "report.html").as_uri())
        if options.get("java_script_enabled", True) and not before:
            page.locator("#drawn").wait_for()  # everything is unpacked and drawn
        return page

    yield open_page
    for page in pages:
        page.context.close()
        assert page.errors == []


#: The names beside the dots, and the dots.
NAMES, DOTS = "#dots text.name", "#dots path.mark"


def figures(page: Any) -> list[str]:
    """What stands beside the dots."""
    return page.locator("#dots text.figure").all_text_contents()


def column(page: Any, name: str) -> list[str]:
    """The texts of a column of the table, in visible rows."""
    heads = [head.rstrip() for head in page.locator("#table thead th").all_inner_texts()]
    cells = page.locator(f"#table tbody tr:visible td:nth-child({heads.index(name) + 1})")
    return cells.all_text_contents()


def dot_names(page: Any) -> list[str]:
    return page.locator(NAMES).all_text_contents()


def sort_by(page: Any, name: str) -> None:
    page.locator("#table thead").get_by_role("button", name=name).click()


@pytest.mark.long
def test_every_run_tensor_and_bin_is_drawn(opened: Open) -> None:
    page = opened(two_runs())
    assert page.locator("#checkpoints .mark").count() == 2
    assert sorted(page.locator("#checkpoints text.label").all_text_contents()) == ["mxfp8", "nvfp4"]
    assert page.locator("#tensors .mark").count() == 4
    assert page.locator("#legend li").all_text_contents() == ["nvfp4", "mxfp8"]
    assert page.locator(DOTS).count() == 2
    assert dot_names(page) == ["layer.10.w", "layer.2.w"]
    assert figures(page) == ["19.50", "21.00"]
    for outline in ("before", "after"):
        assert page.locator(f"#histogram .{outline}").get_attribute("d").count("H") == 2 * BINS
    assert page.locator("#histogram-note").inner_text() == "3 elements lie outside this range."


@pytest.mark.long
def test_a_header_sorts_both_ways_and_missing_figures_come_last(opened: Open) -> None:
    page = opened(two_runs())
    heads = page.locator("#table thead th")
    assert column(page, "SQNR, dB") == ["19.50", "21.00", "–"]  # worst first, before anything is clicked
    assert heads.evaluate_all("all => all.map(h => h.ariaSort)").count("ascending") == 1
    sort_by(page, "SQNR")
    assert column(page, "SQNR, dB") == ["21.00", "19.50", "–"]
    assert heads.nth(5).get_attribute("aria-sort") == "descending"
    sort_by(page, "Bytes")
    assert column(page, "Bytes") == ["900", "8,192", "10,000"]  # as numbers, not as text
    assert heads.evaluate_all("all => all.filter(h => h.ariaSort).map(h => h.innerText)") == ["Bytes"]
    page.keyboard.press("Enter")
    assert column(page, "Bytes") == ["10,000", "8,192", "900"]
    sort_by(page, "Name")
    assert column(page, "Name") == ["layer.2.w", "layer.10.w", "norm.w"]
    sort_by(page, "Why")
    assert column(page, "Why left out") == ["fewer than two axes", "–", "–"]


@pytest.mark.long
def test_the_filter_keeps_rows_whose_name_contains_it(opened: Open) -> None:
    page = opened(two_runs())
    assert page.locator("#count").inner_text() == "3 tensors"
    page.get_by_label("Names that contain").fill("LAYER.1")
    assert column(page, "Name") == ["layer.10.w"]
    assert page.locator("#count").inner_text() == "1 of 3 tensors"
    page.get_by_label("mxfp8").check()  # and goes on in another run
    assert column(page, "Name") == ["layer.10.w"]


@pytest.mark.long
def test_choosing_a_run_changes_dots_histogram_and_table_and_keeps_the_tensor(opened: Open) -> None:
    page = opened(two_runs())
    before = page.locator(DOTS).first.evaluate("bar => getComputedStyle(bar).fill")
    page.get_by_label("mxfp8").check()
    assert dot_names(page) == ["layer.2.w", "layer.10.w"]
    assert page.locator(DOTS).first.evaluate("bar => getComputedStyle(bar).fill") != before
    assert column(page, "Stored as") == ["mxfp8", "mxfp8", "F32"]
    assert page.locator("#about").inner_text().startswith("64 × 32, mxfp8, 4.500 bits per parameter. SQNR 32.00\xa0dB,")
    assert page.locator("#tensor option:checked").inner_text() == "layer.10.w"


@pytest.mark.long
def test_a_tensor_is_chosen_in_the_list_the_table_and_the_dots(opened: Open) -> None:
    page = opened(two_runs())

    def chosen() -> list[str]:
        row = page.locator("#table tr[aria-current='true'] td").first.text_content()
        bar = page.locator(NAMES).and_(page.locator(".chosen")).text_content()
        return [page.locator("#tensor option:checked").inner_text(), row, bar]

    assert page.locator("#tensor option").all_text_contents() == ["layer.2.w", "layer.10.w"]
    assert chosen() == ["layer.10.w"] * 3  # the worst
    page.locator("#tensor").select_option("layer.2.w")
    assert chosen() == ["layer.2.w"] * 3
    page.get_by_role("cell", name="900").click()
    assert chosen() == ["layer.10.w"] * 3
    page.get_by_role("button", name="layer.2.w").press("Enter")
    assert chosen() == ["layer.2.w"] * 3
    page.locator(DOTS).first.click()
    expect(page.locator("#tensor option:checked")).to_have_text("layer.10.w")
    assert chosen() == ["layer.10.w"] * 3
    page.get_by_role("cell", name="norm.w").click()  # has no histogram
    assert chosen() == ["layer.10.w"] * 3


@pytest.mark.long
def test_counts_are_logarithmic_or_linear(opened: Open) -> None:
    page = opened(two_runs())
    counts = page.locator("#histogram text[text-anchor=end]")  # and the title of the other axis
    assert counts.all_text_contents() == ["1", "10", "Value"]
    page.get_by_label("Logarithmic counts").uncheck()
    assert counts.all_text_contents() == ["0", "2", "4", "6", "8", "10", "Value"]


@pytest.mark.long
def test_the_dots_show_the_worst_until_all_are_asked_for(opened: Open) -> None:
    page = opened([run("nvfp4", [tensor(f"w{i}", 30.0 - i / 10) for i in range(41)])])
    drawn = page.locator(DOTS)
    assert drawn.count() == 20
    assert dot_names(page)[0] == "w40"
    page.get_by_role("button", name="Show all 41").click()
    assert drawn.count() == 41
    page.get_by_role("button", name="Show the 20 worst").click()
    assert drawn.count() == 20


def dots(page: Any) -> dict[str, Any]:
    """Range and title of the axis of the dots, and their places on it, as its ticks give them."""
    read = """() => {
        const all = (wanted) => [...document.querySelectorAll(`#dots ${wanted}`)];
        const wide = all("line.grid").find((line) => line.getAttribute("y1") === line.getAttribute("y2"));
        return {
            ticks: all("text[text-anchor=middle]").map((t) => [t.textContent.replace("−", "-"), t.getAttribute("x")]),
            titles: all("text.tick:not([text-anchor=middle])").map((t) => t.textContent),
            edges: [wide.getAttribute("x1"), wide.getAttribute("x2")],
            marks: all(".mark").map((m) => m.getAttribute("transform").match(/[\\d.]+/)[0]),
            open: all(".mark").map((m) => m.classList.contains("open")),
        };
    }"""
    found = page.evaluate(read)
    (a, xa), *_, (b, xb) = [[float(part) for part in tick] for tick in found["ticks"]]

    def value(x: str) -> float:
        return round(a + (float(x) - xa) * (b - a) / (xb - xa), 6)

    title = next(title for title in found["titles"] if title)
    half = 0.05 * abs((b - a) / (xb - xa))  # marks are placed at tenths of a pixel
    shown = {"range": [*map(value, found["edges"])], "x": [*map(value, found["marks"])], "title": title, "open": found["open"]}
    return shown | {"half": half + 1e-6}


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.long)])
@pytest.mark.long
def test_layers_are_told_apart_by_their_shortened_names(width: int, opened: Open) -> None:
    """Their numbers are in the middle of names that begin and end alike."""
    parts = ("self_attn.q_proj", "mlp.experts.17.down_proj")
    names = [f"model.language_model.layers.{n}.{part}.weight" for n in range(8) for part in parts]
    run_ = run("nvfp4", [tensor(name, 30.0 - n / 10) for n, name in enumerate(names)])
    page = opened([run_], viewport={"width": width, "height": 900})
    shown = dot_names(page)
    assert len(set(shown)) == len(names) and "…" not in "".join(shown)
    assert all(re.fullmatch(r"m.*\.l.*\.[0-7]\.[sm].*\.weight", name) for name in shown)


@pytest.mark.long
def test_the_axis_of_the_dots_starts_where_differences_show_and_says_so(opened: Open) -> None:
    found = dots(opened([run("mxfp8", [tensor("a", 28.0), tensor("b", 31.0), tensor("c", 30.0)])]))
    low, high = found["range"]
    assert found["x"] == pytest.approx([28, 30, 31], rel=0, abs=found["half"]) and 27 < low < 28 and 31 < high < 33
    assert found["title"] == "SQNR, dB (not from 0)"


@pytest.mark.long
def test_the_axis_of_the_dots_spans_two_decibels_at_least(opened: Open) -> None:
    low, high = dots(opened([run("mxfp8", [tensor("a", 31.5), tensor("b", 31.6)])]))["range"]
    assert low < 30.6 and high > 32.5
    found = dots(opened([run("mxfp8", [tensor("a", -0.5)])]))
    assert found["range"][0] < -1 and found["title"] == "SQNR, dB"


@pytest.mark.long
def test_dots_without_a_place_lie_open_at_an_edge(opened: Open) -> None:
    odd = [tensor("exact", None, lossless=True), tensor("nan", None, max_error=None), tensor("good", 20.0)]
    found = dots(opened([run("one", odd)]))
    assert found["open"] == [True, False, True]
    assert abs(found["x"][0] - found["range"][0]) <= found["half"]
    assert found["x"][0] < found["x"][1] < found["x"][2] < found["range"][1]
    found = dots(opened([run("one", odd[:2])]))
    assert found["open"] == [True, True] and found["x"][0] < found["x"][1]


@pytest.mark.long
def test_a_browser_that_cannot_unpack_the_plots_says_so(opened: Open) -> None:
    page = opened(two_runs(), before="delete globalThis.DecompressionStream")
    expect(page.locator("#old")).to_be_visible()
    assert page.locator("#old").inner_text().startswith("This browser cannot unpack the plots")
    assert not page.locator("#drawn").is_visible() and "20.25\xa0dB" in page.locator("body").inner_text()


@pytest.mark.long
def test_a_tensor_is_described_with_the_fields_of_its_recipe(opened: Open) -> None:
    page = opened([run("nvfp4", [tensor("w", spec="nvfp4,two_level=false")])])
    assert page.locator("#about").inner_text().startswith("64 × 32, nvfp4,two_level=false, 4.500 bits per parameter.")


@pytest.mark.long
def test_a_dark_scheme_recolours_page_and_plots(opened: Open) -> None:
    page = opened(two_runs(), color_scheme="light")

    def colours() -> list[str]:
        marks = ("body", NAMES, "#tensors .tick", "#histogram .before", "#tensors .mark")
        read = "node => { const s = getComputedStyle(node); return `${s.color} ${s.fill} ${s.stroke} ${s.backgroundColor}`; }"
        return [page.locator(mark).first.evaluate(read) for mark in marks]

    light = colours()
    page.emulate_media(color_scheme="dark")
    expect(page.locator(NAMES).first).to_have_css("fill", "rgb(228, 231, 234)")
    dark = colours()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    page.emulate_media(color_scheme="dark", media="print")  # paper is white
    assert colours() == light


@pytest.mark.long
def test_on_a_phone_nothing_scrolls_sideways_and_text_is_large_enough(opened: Open) -> None:
    long = "model.layers.11.self_attention." * 7
    runs = [run(f"a rather long label {i}", [tensor(f"{long}{j}", 20.0 + i + j) for j in range(5)]) for i in range(6)]
    page = opened(runs, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, device_scale_factor=2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    smallest = """() => Math.min(...[...document.querySelectorAll("body *")]
        .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length)
        .map((e) => parseFloat(getComputedStyle(e).fontSize)))"""
    assert page.evaluate(smallest) >= 14
    inside = """() => [...document.querySelectorAll(".plot text, #legend li")]
        .filter((e) => { const r = e.getBoundingClientRect(); return r.left < 0 || r.right > innerWidth; })
        .map((e) => e.textContent)"""
    assert page.evaluate(inside) == []
    assert "…" in page.locator(NAMES).first.text_content()


@pytest.mark.long
@pytest.mark.parametrize("script", [True, False])
def test_all_of_every_table_can_be_reached_in_narrow_and_wide_windows(script: bool, opened: Open) -> None:
    long = "model.layers.11.self_attention." * 7
    wide = [run(f"a rather long label {i}", [tensor(f"{long}w", 20.0 + i), kept(f"{long}norm")]) for i in range(6)]
    for runs in (wide, [run("none", [kept("norm.w")])]):
        page = opened(runs, java_script_enabled=script)
        assert [fault for width in WIDTHS for fault in unreachable(page, width)] == []


@pytest.mark.long
def test_a_hostile_name_is_inert_wherever_it_is_shown(opened: Open) -> None:
    page = opened([run(HOSTILE, [tensor(HOSTILE)]), run("plain", [tensor(HOSTILE, 25.0)])])
    assert column(page, "Name") == [HOSTILE]
    assert page.locator("#tensor option").all_text_contents() == [HOSTILE]
    assert page.locator("#drawn").locator("a[href], img, b").count() == 0
    page.locator(DOTS).first.hover()
    assert page.locator("#dots .tip").text_content().startswith(HOSTILE)
    assert page.locator("#dots .tip").locator("a, b, img").count() == 0


@pytest.mark.long
def test_the_page_refuses_to_send_anything(opened: Open) -> None:
    page = opened(two_runs())
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    refused = list(page.errors)
    page.errors.clear()
    assert refused
    assert all("Content Security Policy" in error for error in refused)


@pytest.mark.long
def test_without_javascript_the_summary_reads_and_says_what_is_missing(opened: Open) -> None:
    page = opened(two_runs(), java_script_enabled=False)
    text = page.locator("body").inner_text()
    assert "20.25\xa0dB" in text
    assert "The plots and the table of all tensors are drawn by this page's own script" in text
    assert "Tensor by tensor" not in text


@pytest.mark.long
def test_two_thousand_tensors_are_sorted_and_filtered(opened: Open) -> None:
    page = opened([run(f"run{i}", [tensor(f"layers.{j}.w", 20.0 + i + j / 1000) for j in range(2000)]) for i in range(2)])
    assert page.locator("#count").inner_text() == "2,000 tensors"
    assert page.locator("#tensors .mark").count() == 4000
    sort_by(page, "Name")
    sort_by(page, "Name")
    assert column(page, "Name")[0] == "layers.1999.w"
    page.locator(".controls").get_by_label("Names that contain").fill("layers.199")  # not the 4,000 points, which takes seconds
    assert page.locator("#count").inner_text() == "11 of 2,000 tensors"


@pytest.mark.long
@pytest.mark.parametrize("runs", [1, 2])
def test_the_page_says_that_nothing_was_quantized(opened: Open, runs: int) -> None:
    page = opened([run(f"run{i}", [kept("norm.w"), kept("id", "not floating")]) for i in range(runs)])
    assert page.locator("#tensors-note").inner_text() == "There is no tensor to draw."
    assert page.locator("#dots-note").inner_text() == "There is no tensor to draw."
    assert page.locator("#about").inner_text() == "There is no histogram to draw."
    assert not page.locator("#tensor").is_visible()
    assert page.locator(".plot svg").count() == 0
    assert column(page, "Why left out") == ["fewer than two axes", "not floating"]


@pytest.mark.long
def test_tensors_that_cannot_be_drawn_on_an_axis_are_listed(opened: Open) -> None:
    odd = [tensor("exact", None, lossless=True), tensor("nan", None, max_error=None), tensor("bad", -3.5), tensor("good", 20.0)]
    page = opened([run("one", odd), run("two", odd, sqnr_db=None, lossless=True)])
    assert page.locator("#checkpoints .mark").count() == 1
    assert page.locator("#checkpoints-note").inner_text() == "Not drawn: 1 without any error (runs)."
    assert page.locator("#tensors-note").inner_text() == "Not drawn: 2 without any error, 2 not finite (tensors)."
    assert dot_names(page) == ["nan", "bad", "good", "exact"]
    assert figures(page) == ["not finite", "−3.50", "20.00", "∞"]
    assert column(page, "SQNR, dB") == ["−3.50", "20.00", "∞", "not finite"]


@pytest.mark.long
def test_switching_to_a_run_with_tensors_draws_them(opened: Open) -> None:
    page = opened([run("none", [kept("norm.w")]), run("some", [tensor("w", histogram=None), tensor("v", 25.0)])])
    page.get_by_label("none").check()
    assert not page.locator("#dots").is_visible()
    page.get_by_label("some").check()
    assert page.locator(DOTS).count() == 2
    assert page.locator("#tensor option:checked").inner_text() == "v"  # the worst has no histogram
    page.get_by_label("none").check()
    assert not page.locator("#histogram").is_visible()
    assert not page.locator("#dots").is_visible()


@pytest.mark.long
def test_an_empty_name_and_an_empty_shape_are_shown(opened: Open) -> None:
    page = opened([run("nvfp4", [tensor("", shape=[], parameters=1)])])
    assert page.locator("#about").inner_text().startswith("scalar, nvfp4, ")
    assert dot_names(page) == [""]
    assert column(page, "Shape") == ["scalar"]
