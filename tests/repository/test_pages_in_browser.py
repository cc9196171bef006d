"""The documentation site in a browser, on a phone and on a desktop.

No page scrolls sideways, and no table or code is cut; no link is dead, no program of a page fails, images have alternatives and
sizes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

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


def is_moved(page: Path) -> bool:
    """Does a page only lead to another?"""
    return 'http-equiv="refresh"' in page.read_text(encoding="utf-8")


def is_source(page: Path, site: Path) -> bool:
    return page.is_relative_to(site / "source")


def pages_of(site: Path) -> list[Path]:
    """All pages except those of source and redirects."""
    return [page for page in sorted(site.rglob("*.html")) if not is_source(page, site) and not is_moved(page)]


@pytest.mark.slow
def test_everything_on_pages_can_be_reached_on_a_phone_and_on_a_desktop(browser: Any, site: Path) -> None:
    pages = pages_of(site)
    names = {page.relative_to(site).as_posix() for page in pages}
    assert {
        "index.html",
        "cli/index.html",
        "support/index.html",
        "kernels/index.html",
        "reports/compare.html",
        "404.html",
    } <= names
    assert faults(browser.new_context(reduced_motion="reduce"), site, pages) == []


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing of each request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def served(site: Path) -> Generator[str]:
    """The address of a server of the site, on this machine alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


#: The links of a page as absolute addresses, its anchors, its images without an alternative, and those without a size.
_FOUND = """() => ({
    links: [...document.querySelectorAll("a[href]")].map((a) => a.href),
    anchors: [...document.querySelectorAll("[id], a[name]")].map((e) => e.id || e.name),
    silent: [...document.querySelectorAll("img:not([alt]), img[alt='']")].map((i) => i.src),
    unsized: [...document.querySelectorAll("img:not([width]), img:not([height])")].map((i) => i.src),
})"""


@pytest.mark.slow
def test_no_page_has_a_dead_link_an_error_or_an_image_without_an_alternative_or_a_size(browser: Any, site: Path) -> None:
    """Anchors on pages of source are those of lines, which the site's build checks."""
    pages = pages_of(site)
    faults: list[str] = []
    anchors: dict[str, set[str]] = {}
    links: dict[str, str] = {}
    with served(site) as address:
        context = browser.new_context(reduced_motion="reduce")
        page = context.new_page()
        page.set_default_timeout(120_000)

        def fault(event: Any) -> None:
            """An error on the console or in a program, or a request that failed; those that the next page cut off have not."""
            if "ERR_ABORTED" in (getattr(event, "failure", None) or ""):
                return
            if getattr(event, "type", "error") == "error":
                faults.append(f"{page.url}: {getattr(event, 'text', None) or getattr(event, 'url', None) or event}")

        for kind in ("console", "pageerror", "requestfailed"):
            page.on(kind, fault)
        for path in pages:
            page.goto(address + path.relative_to(site).as_posix().removesuffix("index.html"), wait_until="load")
            found = page.evaluate(_FOUND)
            anchors[page.url.removeprefix(address)] = set(found["anchors"])
            links |= {link: page.url for link in found["links"] if link.startswith(address)}
            faults += [f"{page.url}: no alternative of {image}" for image in found["silent"]]
            faults += [f"{page.url}: text moves when {image} arrives; it has no width and height" for image in found["unsized"]]
        context.close()
        for link, origin in links.items():
            target, anchor = urldefrag(unquote(link.removeprefix(address)))
            file = site / target / "index.html" if not target or target.endswith("/") else site / target
            if not file.is_file():
                faults.append(f"{origin}: dead link {link}")
            elif anchor and target in anchors and anchor not in anchors[target] and anchor != "__skip":
                faults.append(f"{origin}: no anchor {link}")
    assert len(anchors) == len(pages) and len(links) > 500
    assert faults == []


@pytest.mark.slow
def test_the_programs_of_pages_answer_in_a_browser(browser: Any, site: Path) -> None:
    with served(site) as address:
        page = browser.new_page()
        page.goto(f"{address}number/")
        page.fill("#x", "448")
        assert page.locator("#codes tr", has_text="E4M3").first.inner_text().split()[:2] == ["E4M3", "7E"]
        page.fill("#x", "twelve")
        assert "The number is not understood" in page.inner_text("#note")
        page.goto(f"{address}choose/")
        assert page.inner_text("#command").startswith("breccia convert MODEL OUT --recipe ")
        page.fill("#memory", "1")
        assert page.inner_text("#verdict").startswith("Nothing fits") and page.locator("#chosen tr").count() == 0
        page.close()


@pytest.mark.slow
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


@pytest.mark.long
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
