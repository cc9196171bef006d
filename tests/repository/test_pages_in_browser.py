"""The documentation site in a browser: no page scrolls sideways, and no table or code is cut, on a phone and on a desktop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import WIDTHS, chromium, unreachable
from paths import ROOT

SITE = ROOT / "site"
#: Folders and files that the site is built from.
SOURCES = ("docs", "mkdocs.yml", "examples", "benchmarks", *(path.name for path in ROOT.glob("breccia-*")), *ROOT.glob("*.md"))
#: Lines of each file of source that a browser lays out.
LONGEST = 3


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make check` built, if nothing changed since; else one built now."""
    pytest.importorskip("material", reason="mkdocs-material builds the site")
    if (SITE / "sitemap.xml").is_file() and changed() < (SITE / "sitemap.xml").stat().st_mtime:
        return SITE
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(built)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return built


def changed() -> float:
    """When a file that the site shows was changed last."""
    files = (path for source in SOURCES for path in [ROOT / source, *(ROOT / source).rglob("*.*")])
    return max(path.stat().st_mtime for path in files if path.is_file() and "__pycache__" not in path.parts)


def faults(context: Any, site: Path, pages: list[Path]) -> list[str]:
    """What cannot be reached on these pages of the site, each opened once."""
    context.set_offline(True)
    page = context.new_page()
    page.set_default_timeout(120_000)  # for a page that hangs, not for a slow machine
    said: list[str] = []
    for path in pages:
        page.goto(path.as_uri())
        said += [f"{path.stem}, {path.parent}: {fault}" for width in WIDTHS for fault in unreachable(page, width)]
    context.close()
    return [line.replace(f"{site}/", "") for line in said]


def is_source(page: Path, site: Path) -> bool:
    return page.is_relative_to(site / "source")


@pytest.mark.long
def test_everything_on_every_page_can_be_reached_on_a_phone_and_on_a_desktop(browser: Any, site: Path) -> None:
    pages = [page for page in sorted(site.rglob("*.html")) if not is_source(page, site)]
    names = {page.relative_to(site).as_posix() for page in pages}
    assert {"index.html", "cli/index.html", "support/index.html", "kernels/index.html", "404.html"} <= names
    assert faults(browser.new_context(reduced_motion="reduce"), site, pages) == []


@pytest.mark.long
def test_everything_on_pages_of_source_can_be_reached_without_javascript(browser: Any, site: Path, tmp_path: Path) -> None:
    """They differ in their names and lines alone, so one page is opened that has those of all, of lines the longest."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html")) if is_source(page, site)}
    articles = [re.search(r"<article.*?</article>", text, re.DOTALL)[0] for text in pages.values()]  # type: ignore[index]
    assert len(articles) > 50
    widest = max(pages, key=lambda page: len(re.search(r"<title>(.*?)</title>", pages[page])[1]))  # type: ignore[index]
    text = re.sub(r"<article.*?</article>", lambda found: "".join(map(shortened, articles)), pages[widest], flags=re.DOTALL)
    path = tmp_path / "source.html"
    path.write_text(text.replace("<head>", f'<head><base href="{widest.as_uri()}">', 1), encoding="utf-8")
    assert faults(browser.new_context(java_script_enabled=False), tmp_path, [path]) == []


def shortened(article: str) -> str:
    """The longest lines of a page of source; all of a list of files."""
    head, *lines = re.split(r'(?=<span id="__span-0-\d+">)', article)
    if not lines:
        return article
    lines[-1], end, foot = lines[-1].partition("</code>")
    return "".join([head, *sorted(lines, key=len)[-LONGEST:], end, foot])


@pytest.mark.parametrize(
    ("fault", "html"),
    [
        ("the page scrolls sideways", "<div style='width: 3000px'>wide</div>"),
        ("sticks out", "<body style='overflow-x: hidden'><table style='width: 3000px'><td>x</table>"),
        ("cut by div", "<div style='overflow: hidden'><table style='width: 3000px'><td>x</table></div>"),
        ("cut by div", "<div style='overflow: hidden'><div style='width: 3000px'><pre>x</pre></div></div>"),
        (
            "cuts its text",
            "<table style='table-layout: fixed; width: 99px'><td style='overflow: hidden'>" + "x" * 500 + "</table>",
        ),
        ("cuts its text", f"<pre style='overflow: hidden'>{'x' * 3000}</pre>"),
        ("cut by details", f"<details style='overflow: hidden'><pre>{'x' * 3000}</pre></details>"),
        ("sticks out", f"<div style='position: fixed; left: 0'><pre>{'x' * 3000}</pre></div>"),
    ],
)
def test_what_cannot_be_reached_is_named(browser: Any, fault: str, html: str) -> None:
    page = browser.new_page()
    page.set_content(html)
    for width in WIDTHS:
        faults = unreachable(page, width, wait=0)
        assert any(fault in said for said in faults), faults
    page.set_content("<div style='overflow-x: auto'><table style='width: 3000px'><td>x</table></div><pre>short</pre>")
    assert unreachable(page, 390) == []
    page.close()
