"""The documentation site: links out of docs/ lead to pages of source, and blocks say what the registry and the program say."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from browser import chromium
from paths import ROOT

from breccia import MXFP8BlockScaling, targets
from breccia.dispatch.registry import registry
from breccia.operations import OPERATIONS

SCRIPTS = ROOT / "docs" / "scripts"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of docs/scripts, and forgets it afterwards."""
    for folder in (ROOT / "benchmarks", SCRIPTS):
        monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith((str(SCRIPTS), str(ROOT / "benchmarks"))):
            del sys.modules[name]


def generate(docs: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "generate.py"), "--docs", str(docs), *options]
    return subprocess.run(command, capture_output=True, text=True)


def page(folder: Path, *blocks: str) -> Path:
    path = folder / "page.md"
    path.write_text("# Page\n" + "".join(f"\n<!-- table: {name} -->\n\n<!-- end -->\n" for name in blocks), encoding="utf-8")
    return path


# -- generated blocks ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_stale_blocks_are_named_with_the_difference_and_the_remedy(tmp_path: Path) -> None:
    path = page(tmp_path, "layouts", "scale-rules")
    assert generate(tmp_path).returncode == 0
    written = path.read_text(encoding="utf-8")
    path.write_text(written.replace("`per_tensor`", "`per_tensors`"), encoding="utf-8")
    done = generate(tmp_path, "--check")
    assert done.returncode == 1 and "per_tensors" in path.read_text(encoding="utf-8")
    assert "page.md: block 'layouts' is stale" in done.stderr and "scale-rules" not in done.stderr
    assert re.search(r"-\| `per_tensors` .*\n +\+\| `per_tensor` ", done.stderr)
    assert "run `python docs/scripts/generate.py`" in done.stderr
    assert generate(tmp_path).returncode == 0 and path.read_text(encoding="utf-8") == written
    assert generate(tmp_path, "--check").returncode == 0


def test_an_unknown_block_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    page(tmp_path, "suport-matrix")
    done = generate(tmp_path)
    assert done.returncode == 1
    assert "generate: page.md asks for a block 'suport-matrix'; there are acme-bridge," in done.stderr


@pytest.mark.long
def test_items_of_docstrings_become_a_list_and_examples_blocks_of_code(module) -> None:
    pytest.importorskip("griffe", reason="mkdocstrings reads the sources with griffe")
    markdown = module("docstrings").markdown
    text = "Add.\n\nx, y: numbers,\n    or arrays.\n\n    >>> add(1,\n    ...     2)\n    x: 3"
    listed = "Add.\n\n- `x`, `y`: numbers,\n    or arrays.\n\n"
    assert markdown(text, {"x", "y"}) == listed + "```pycon\n>>> add(1,\n...     2)\nx: 3\n```"
    assert markdown("One.\n\n>>> 1\n1\n\nThe end.", set()) == "One.\n\n```pycon\n>>> 1\n1\n```\n\nThe end."


def test_every_table_and_every_command_has_a_place(module) -> None:
    asked = {name for path in (ROOT / "docs").rglob("*.md") for _, name, _, _ in found(module, path)}
    assert {f"session-{session.name}" for session in module("terminal").sessions()} <= asked
    assert {f"session-help-{name}" for name in registry().commands} <= asked
    assert {"support-matrix", "frameworks", "bridges", "commands", "api-bridges", "storage"} <= asked


def found(module, path: Path) -> list[tuple[str, str, str, str]]:
    return module("harness.blocks").BLOCK.findall(path.read_text(encoding="utf-8"))


@pytest.mark.long
def test_the_matrix_names_every_recipe_and_each_kernel_by_the_line_it_is_defined_at(module) -> None:
    matrix = module("listings").support_matrix()
    assert all(f"`{name}`" in matrix for name in registry().recipes)
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./([^)#]+)#L(\d+)\)", matrix)
    assert {"numpy.cast", "reference.cast", "composite.matmul"} <= {name for name, _, _ in links}
    for name, file, line in links:
        kernel = next(k for k in registry().table.kernels if k.name == name)
        defined = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert kernel.target.rpartition(":")[2] in defined


@pytest.mark.long
def test_a_composite_is_followed_by_the_kernels_that_it_calls(module) -> None:
    rows = module("listings").support_matrix().splitlines()
    cells = {
        row.split(" | ")[0].strip("| `"): re.sub(r"\[(`[\w.]+`)\]\([^)]*\)", r"\1", row) for row in rows if "composite" in row
    }
    assert set(cells) == {op for op in OPERATIONS if op not in ("cast", "dequantize", "record_amax")}
    every = re.sub(r"\[(`[\w.]+`)\]\([^)]*\)", r"\1", "\n".join(rows))
    assert "`composite.requantize` (`torch.cpu.dequantize`, `torch.cpu.cast`, `reference.cast`)" in every
    assert "`composite.cast_pair` (`reference.cast`)" in cells["cast_pair"], "a kernel that is called twice is named once"
    assert "`composite.cast_matmul` (`reference.cast`, `composite.matmul`)" in cells["cast_matmul"]
    assert re.search(r"^\| `matmul` .*`numpy.matmul` \(`(numpy|native).dequantize`\)", every, re.MULTILINE)


def test_the_list_of_storages_has_every_one_that_is_declared(module) -> None:
    listed = module("listings").storages()
    assert re.findall(r"^\| `(\w+)` ", listed, re.MULTILINE) == list(registry().declared["breccia_storages"])
    assert re.search(r"^\| `interleaved` \| codes and scales \| Each block's codes, then its scale", listed, re.MULTILINE)


@pytest.mark.long
def test_a_kernel_that_moves_changes_the_matrix(module, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = module("listings")
    before = listings.support_matrix()
    where = ROOT / "breccia-core" / "src" / "breccia" / "cli" / "main.py"
    monkeypatch.setattr(targets, "locate", lambda target: f"{where}:7")
    after = listings.support_matrix()
    assert before != after and "[`numpy.cast`](../breccia-core/src/breccia/cli/main.py#L7)" in after
    monkeypatch.setattr(targets, "locate", lambda target: "/elsewhere/kernels.py:7")
    with pytest.raises(SystemExit, match=r"said to be at '/elsewhere/kernels.py:7', which is no line of this repository"):
        listings.support_matrix()


@pytest.mark.long
def test_an_added_recipe_and_kernel_appear_in_the_pages(module, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = module("listings")

    @dataclass(frozen=True)
    class Acme(MXFP8BlockScaling):
        name: ClassVar[str] = "acme"
        shift: int = 3

    reference = next(k for k in registry().table.kernels if k.name == "reference.cast")
    special = replace(reference, name="acme.cast", recipe=Acme, framework="torch", available="breccia:absent", rank=1)
    table = type(registry().table)([*registry().table.kernels, special])
    monkeypatch.setattr(registry(), "table", table)
    monkeypatch.setitem(registry().declared["breccia_recipes"], "acme", Acme)
    row = next(line for line in listings.support_matrix().splitlines() if "acme.cast" in line)
    assert row.startswith("| `cast` | `acme` |")
    assert re.search(r"\[`acme.cast`\]\S+ or, where it is not available, \[`reference.cast`\]", row)
    assert "| `acme` | `Acme` | E4M3 or E5M2 | E8M0 | 1×32 |" in listings.formats()
    assert "`shift` | `3` | int |" in listings.recipe_fields()


def test_the_table_of_fields_lists_the_allowed_values(module) -> None:
    fields = module("listings").recipe_fields()
    assert '| `mxfp6` | `MXFP6BlockScaling` | `fp6_format` | `"E2M3"` | `"E2M3"` or `"E3M2"` |' in fields
    assert "| `block_size` | `32` | only 32 by the OCP MX spec |" in fields
    assert "| `amax_history_len` | `16` | >= 1; affects no byte |" in fields
    assert "| `int8` | `INT8Scaling` | `group_size` | `None` | > 0, or None |" in fields


@pytest.mark.long
def test_a_session_is_the_output_of_its_commands_without_local_paths(module) -> None:
    terminal = module("terminal")
    wanted = [
        terminal.Session("one", ("breccia explain cast nvfp4 --on torch",)),
        terminal.Session("two", ("breccia inspect absent.safetensors", "echo $?"), status=1),
    ]
    blocks = dict(terminal.recorded(wanted))
    assert blocks["session-one"].startswith("```console\n$ breccia explain cast nvfp4 --on torch\ncast of nvfp4 on torch\n")
    assert "breccia-core/src/breccia/kernels/reference/casting.py:" in blocks["session-one"]
    assert str(ROOT) not in blocks["session-one"]
    assert blocks["session-two"].endswith("\n$ echo $?\n1\n```\n") and "error: " in blocks["session-two"]
    with pytest.raises(SystemExit, match=r"session 'three': `breccia --version` exited with 0, and not with 1"):
        dict(terminal.recorded([terminal.Session("three", ("breccia --version",), status=1)]))


def test_different_times_do_not_make_a_session_stale(module) -> None:
    terminal = module("terminal")
    session = terminal.Session("x", ())
    assert terminal.comparable(session, "done; 0.1 s") == terminal.comparable(session, "done; 12 s")
    assert terminal.comparable(session, "done; 0.1 s, 3 dB") != terminal.comparable(session, "done; 0.1 s, 4 dB")
    volatile = terminal.Session("x", (), volatile=True)
    assert terminal.comparable(volatile, " nvfp4  1.2\nsystem\n  ok  Linux") == terminal.comparable(
        volatile, " nvfp4  3.4\nsystem\n  ok  Darwin"
    )
    assert terminal.comparable(volatile, " nvfp4  1.2") != terminal.comparable(volatile, " mxfp8  1.2")


def test_another_heading_makes_a_session_stale_but_another_width_does_not(module) -> None:
    terminal = module("terminal")
    bench = terminal.Session("x", (), volatile=True)
    shown = terminal.comparable(bench, " recipe  op  min ms\n nvfp4  1.2")
    assert shown == terminal.comparable(bench, " recipe  op   min ms\n nvfp4  13")
    assert shown != terminal.comparable(bench, " recipe  op  least ms\n nvfp4  1.2")


def test_the_model_of_the_sessions_is_the_same_every_time(module) -> None:
    terminal = module("terminal")
    first, second = terminal.model(), terminal.model()
    assert list(first) == list(second) and all((first[name] == second[name]).all() for name in first)


def test_what_a_field_takes_is_told_in_words_and_not_as_an_error_message(module) -> None:
    cells = [line.split("|")[5].strip() for line in module("listings").recipe_fields().splitlines()[2:]]
    assert [cell for cell in cells if "got" in cell or "1000000" in cell] == []
    assert {"an integer of 0 to 2^64 - 1", "a power of two from 2 on", "only 16", "> 0, or None"} <= set(cells)


# -- the gallery of reports --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_gallery_writes_reports_of_real_runs_and_pictures_of_them(tmp_path: Path, module) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright takes the pictures")
    pytest.importorskip("jinja2", reason="jinja2 comes with breccia-bridges[report]")
    terminal, gallery = module("terminal"), module("gallery")
    model, images = tmp_path / "model", tmp_path / "img"
    weights = terminal.model()
    terminal.quantized_model(model, {}, {name: ("F16", array) for name, array in weights.items()})
    (model / "config.json").write_text('{"model_type": "tiny"}')  # nothing in it is quantized
    found = gallery.reports(model, tmp_path / "reports", None)
    said = {"compare": "Most accurate: ", "mixed": "Worst tensor of ", "why": "What each layer costs"}
    for name, path in zip(said, found, strict=True):
        page = path.read_text(encoding="utf-8")
        assert path.stem == name and said[name] in page and str(tmp_path) not in page
    assert all(f">{recipe}</span>" in found[0].read_text(encoding="utf-8") for recipe in gallery.RECIPES)
    images.mkdir()
    with chromium() as browser:
        gallery.pictures(browser, found[:1], images)
    shown = ["report-compare-dark.png", "report-compare-light.png", "report-phone.png"]
    assert sorted(path.name for path in images.iterdir()) == shown


def test_the_reports_that_the_gallery_shows_are_there_and_small() -> None:
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((reports/\w+\.html)\)", page))
    assert linked == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "reports").iterdir()}
    assert len(linked) == 3 and all((ROOT / "docs" / name).stat().st_size < 200_000 for name in linked)


# -- pages that moved ------------------------------------------------------------------------------------------------


def test_an_old_address_leads_to_the_page_that_replaced_it_and_keeps_the_anchor(tmp_path: Path, module) -> None:
    moved = module("moved")
    for page in moved.MOVED.values():
        folder = tmp_path / page.removesuffix("index.md").removesuffix(".md")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text("new", encoding="utf-8")
    moved.on_post_build(config={"site_dir": str(tmp_path)})
    page = (tmp_path / "benchmarks" / "index.html").read_text(encoding="utf-8")
    assert 'content="0; url=../measured/"' in page and 'location.replace("../measured/" + location.hash)' in page
    assert (tmp_path / "measured" / "index.html").read_text(encoding="utf-8") == "new"


def test_an_old_address_of_a_page_that_is_not_there_is_an_error_that_says_where_to_name_it(tmp_path: Path, module) -> None:
    with pytest.raises(FileNotFoundError, match=r"moved\.py: benchmarks moved to .*; name the page there"):
        module("moved").on_post_build(config={"site_dir": str(tmp_path)})


def test_relative_links_of_a_block_lead_to_the_same_places_from_a_page_further_down(tmp_path: Path, module) -> None:
    blocks = module("harness.blocks")
    path = page(tmp_path, "one")
    links = "[a](../x.py#L1) [b](spec/a.md) [c](https://x.org) [d](#here)"
    moved = "[a](../../x.py#L1) [b](../spec/a.md) [c](https://x.org) [d](#here)"
    assert links in blocks.filled(path, {"one": links}) and moved in blocks.filled(path, {"one": links}, depth=1)
    assert "[b](spec/a.md)" in blocks.filled(path, {"one": f"```text\n{links}\n```\n"}, depth=1), "code is left alone"


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("", ' width="576" height="288"'),
        (' width="640"', ' width="640" height="320"'),
        (' height="100"', ' height="100" width="200"'),
        (' width="1" height="2"', ' width="1" height="2"'),
        (' width="50%"', ' width="50%"'),
        (' data-width="7"', ' data-width="7" width="576" height="288"'),
    ],
)
def test_an_image_gets_what_it_lacks_of_width_and_height_in_the_proportions_of_its_file(
    given: str, written: str, tmp_path: Path, module
) -> None:
    path = tmp_path / "a.svg"
    path.write_text(
        '<?xml version="1.0"?>\n<svg xmlns:x="y" width="432pt" height="216pt" viewBox="0 0 1 1"></svg>', encoding="utf-8"
    )
    images = module("images")
    assert images.sized(given, *images.size_of(path)) == written


@pytest.mark.parametrize(
    "content", ["<svg viewBox='0 0 1 1'/>", '<svg width="100%" height="2"/>', '<svg width="2em" height="2"/>']
)
def test_an_image_that_does_not_say_its_size_in_lengths_has_none(content: str, tmp_path: Path, module) -> None:
    (tmp_path / "a.svg").write_text(content, encoding="utf-8")
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert [module("images").size_of(tmp_path / name) for name in ("a.svg", "a.png")] == [None, None]


@pytest.mark.long
def test_images_of_a_built_site_have_the_size_of_their_files(tmp_path: Path) -> None:
    """Of a page in a folder, with an image of each kind, and one of another site."""
    pytest.importorskip("mkdocs")
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    for name in ("standing.svg", "report-phone.png"):
        (tmp_path / "docs" / name).write_bytes((ROOT / "docs" / "img" / name).read_bytes())
    links = '![a](../standing.svg#only-light){ width="640" } ![b](../report-phone.png) ![c](https://x.org/c.svg)\n'
    (tmp_path / "docs" / "sub" / "page.md").write_text(links, encoding="utf-8")
    settings = "site_name: x\ntheme: mkdocs\nplugins: []\nnot_in_nav: '*'\nmarkdown_extensions: [attr_list]\n"
    (tmp_path / "mkdocs.yml").write_text(f"{settings}hooks: [{SCRIPTS / 'images.py'}]\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "site" / "sub" / "page" / "index.html").read_text(encoding="utf-8")
    images = re.findall(r"<img[^>]*>", html)
    shape = {name: tuple(re.findall(rf'{name}="(\d+)"', image) for image in images) for name in ("width", "height")}
    assert shape == {"width": (["640"], ["716"], []), "height": (["958"], ["1122"], [])}, images


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "kept"),
    [
        ("10.6 ± 0.3 µs; 3.16× / 1.93× / -", "10.6_±_0.3_µs; 3.16×_/ 1.93×_/ -"),
        ("98.8 / 100.0 / 101", "98.8_/_100.0_/_101"),
        ("M = 64, ≤ 14 µs, 0.628 %", "M_=_64, ≤_14_µs, 0.628_%"),
        ("16.60 to 17.08 seconds, FLOOR = x", "16.60 to 17.08 seconds, FLOOR = x"),
        ('<code>M = 4</code> <a title="1 / 2">1 / 2</a>', '<code>M = 4</code> <a title="1 / 2">1_/_2</a>'),
    ],
)
def test_a_number_of_a_table_stays_in_one_line_with_its_spread_and_unit(cell: str, kept: str, module) -> None:
    """Code and attributes are unchanged, and so is text outside of tables. A "_" stands for a space that does not break."""
    hooks = module("hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    html = "<table><thead><tr><th>{0}</th></tr></thead><tr><td class='a / b'>{0}</td></tr></table><p>1 / 2</p>"
    found = hooks.on_page_content(html.format(cell), page=page, config=None, files=None)
    assert found.replace("\N{NO-BREAK SPACE}", "_") == html.format(kept)


# -- links and source ------------------------------------------------------------------------------------------------


def test_links_out_of_docs_lead_to_pages_of_source(module) -> None:
    hooks = module("hooks")
    assert hooks.rewritten("[x](../benchmarks/draw.py#L12)", "cli.md") == "[x](source/benchmarks/draw.py.md#L12)"
    assert hooks.rewritten("[x](../../benchmarks)", "spec/a.md") == "[x](../source/benchmarks/index.md)"
    assert hooks.rewritten("[x](../CHANGELOG.md#a)", "cli.md") == "[x](changelog.md#a)"
    assert hooks.rewritten("[x](docs/spec/numerics.md)", "architecture.md") == "[x](spec/numerics.md)"
    assert hooks.rewritten("[x](examples/demo.py)", "contributing.md") == "[x](source/examples/demo.py.md)"


@pytest.mark.parametrize("link", ["https://x.org/a", "#here", "spec/numerics.md#codecs", "../absent.py", "../../outside"])
def test_internal_external_and_broken_links_are_unchanged(link: str, module) -> None:
    assert module("hooks").rewritten(f"[x]({link})", "cli.md") == f"[x]({link})"


def test_link_syntax_inside_code_is_unchanged(module) -> None:
    text = "`a[0](../README.md)`\n\n```python\na[0](../README.md)\n```\n"
    assert module("hooks").rewritten(text, "cli.md") == text


@pytest.mark.long
def test_a_linked_line_becomes_an_anchor_and_a_broken_link_is_reported(tmp_path: Path) -> None:
    """In a site of one page, under the settings of the real one that matter here."""
    pytest.importorskip("mkdocs")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    kept = re.findall(r"^(?:markdown_extensions|validation):\n(?:  .*\n)+", settings, re.MULTILINE)
    assert len(kept) == 2
    (tmp_path / "docs").mkdir()
    links = ("../benchmarks/harness/blocks.py#L14", "../examples", "../benchmarks/harness/blocks.py#L9999", "../absent.py")
    (tmp_path / "docs" / "index.md").write_text("".join(f"[x]({link})\n" for link in links), encoding="utf-8")
    ours = f"site_name: x\ntheme: mkdocs\nplugins: []\nnot_in_nav: '*'\nhooks: [{SCRIPTS / 'hooks.py'}]\n"
    (tmp_path / "mkdocs.yml").write_text(ours + "".join(kept), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "'index.md'" in line]
    assert len(warnings) == 2, done.stderr
    assert "'../absent.py'" in warnings[0] + warnings[1] and "#L9999" in warnings[0] + warnings[1]
    html = tmp_path / "site"
    assert 'href="source/benchmarks/harness/blocks.py/#L14"' in (html / "index.html").read_text(encoding="utf-8")
    assert 'id="L14"' in (html / "source" / "benchmarks" / "harness" / "blocks.py" / "index.html").read_text(encoding="utf-8")
    assert 'href="demo.py/"' in (html / "source" / "examples" / "index.html").read_text(encoding="utf-8")
