"""What a visitor asks is at most two links from the first page, and pages stay short enough to read."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[`~]*$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"<!-- table: [\w-]+ -->\n.*?<!-- end -->", re.DOTALL)
#: Questions of visitors: the page with the answer, and what it must say.
ANSWERS = {
    "how fast is it on an H100": ("measured/gpu.md", r"On an H100 or H200\n(.|\n)*standing\.svg(.|\n)*gpu-casts\.md"),
    "how do I serve in vLLM": ("engines/vllm.md", r"breccia convert MODEL OUT --dialect .*\nvllm serve OUT"),
    "which recipe fits in 24 GB": ("choose.md", r'name="memory"[^>]*value="24"(.|\n)*\| 24 GB \|'),
    "how do I add a format": ("tutorial/plugin.md", r"breccia_recipes"),
}
#: Pages that are one document: the contract, whose sections are cited by number, and a page that a program writes.
WHOLE = ("spec/numerics.md", "agreement.md")
MOST = 300


def linked(page: str) -> Iterator[str]:
    """The pages of docs/ that a page links to."""
    text = FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s#]+\.md)", text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if (DOCS / path).is_file():
            yield path


def distances(start: str, most: int) -> dict[str, int]:
    """By page: how many links it is from the start, up to `most`."""
    found, now = {start: 0}, [start]
    for step in range(1, most + 1):
        now = [page for page in dict.fromkeys(path for page in now for path in linked(page)) if page not in found]
        found |= dict.fromkeys(now, step)
    return found


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_is_at_most_two_links_from_the_first_page(question: str) -> None:
    page, wanted = ANSWERS[question]
    assert distances("index.md", 2).get(page, 3) <= 2, f"{page} is further than two links from docs/index.md"
    assert re.search(wanted, (DOCS / page).read_text(encoding="utf-8")), f"{page} does not say {wanted!r}"


def test_every_page_can_be_reached_from_the_first_one() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    reached = distances("index.md", 9)
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {page for page in pages - set(reached) if f" {page}\n" not in navigation} == set()
    assert len(reached) > len(pages) / 2


def test_hand_written_parts_of_pages_are_at_most_300_lines() -> None:
    long: list[str] = []
    for path in sorted(DOCS.rglob("*.md")):
        name, text = path.relative_to(DOCS).as_posix(), path.read_text(encoding="utf-8")
        lines = len(BLOCK.sub("", text).splitlines())
        if lines > MOST and name not in WHOLE:
            long.append(f"{name}: {lines} lines")
    assert not long, f"split the page by what readers look for: {long}"
    assert all(len((DOCS / name).read_text(encoding="utf-8").splitlines()) > MOST for name in WHOLE), "no exception is needed"


@pytest.mark.parametrize("folder", ["measured"])
def test_a_page_of_measurements_opens_with_what_it_shows(folder: str) -> None:
    """A chart or two lines of prose stand before the first table."""
    for path in sorted((DOCS / folder).glob("*.md")):
        opening = path.read_text(encoding="utf-8").partition("<!-- table:")[0]
        prose = [line for line in opening.splitlines()[1:] if line and not line.startswith("#")]
        assert "![" in opening or len(prose) >= 2, f"{path.name} opens with a table"


def test_pages_of_every_kind_of_the_navigation_exist() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert re.findall(r"^  - ([A-Z][\w-]+)(?: a recipe)?:", navigation, re.MULTILINE) == [
        "Home", "Choose", "Tutorials", "How-to", "Reference", "Explanation", "Measured", "Project",
    ]  # fmt: skip
    for page in re.findall(r": ([\w./-]+\.md)$", navigation, re.MULTILINE):
        assert (DOCS / page).is_file() or page in ("architecture.md", "contributing.md", "changelog.md", "security.md"), page


def test_scripts_and_pictures_of_pages_exist() -> None:
    for path in DOCS.rglob("*.md"):
        for script in re.findall(r'<script src="([^"]+)"', path.read_text(encoding="utf-8")):
            assert Path(posixpath.normpath(path.with_suffix("") / script)).is_file(), f"{path}: {script}"
