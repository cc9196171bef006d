"""Each format has a page; its code tables agree with ml_dtypes, and its worked block with a cast by breccia."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from paths import ROOT

import breccia
from breccia.recipes import RECIPES

SPEC = ROOT / "docs" / "spec"
PAGES = sorted((SPEC / "formats").glob("*.md"))
BLOCK = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
FOREIGN = {
    "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn, "E3M2": ml_dtypes.float6_e3m2fn, "INT4": ml_dtypes.int4,
    "UINT4": ml_dtypes.uint4,
}  # fmt: skip


def blocks(prefix: str) -> dict[str, str]:
    """Name after the prefix -> generated block, for all pages."""
    found = (m.groups() for page in PAGES for m in BLOCK.finditer(page.read_text(encoding="utf-8")))
    return {name.removeprefix(prefix): text for name, text in found if name.startswith(prefix)}


def rows(text: str) -> list[list[str]]:
    """The cells of a table without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(text: str) -> np.float32:
    return np.float32({"NaN": "nan", "∞": "inf"}.get(text, text).replace("−", "-"))


def test_every_recipe_has_a_page_linked_from_the_overview() -> None:
    overview = (SPEC / "formats.md").read_text(encoding="utf-8")
    links = dict(re.findall(r"^\| (`.*`) \| \[.*\]\(formats/([\w-]+\.md)\) \|$", overview, re.MULTILINE))
    assert sorted(links.values()) == [page.name for page in PAGES]
    assert {name for names in links for name in re.findall(r"`(\w+)`", names)} == {kind.name for kind in RECIPES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_has_components_a_worked_block_rules_and_sources(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = [name for name, _ in BLOCK.findall(text)]
    (recipe,) = {name.partition("-")[2] for name in names if name.startswith(("components-", "worked-"))}
    assert "\n## MUST and MAY\n" in text and " MUST " in text and "\nSources: " in text
    wanted = {breccia.recipe(recipe).format.element.name} - {"INT8"}  # 8-bit integers need no table
    assert wanted <= {name.removeprefix("codes-") for name in names}


@pytest.mark.parametrize("name", FOREIGN)
def test_code_tables_agree_with_ml_dtypes(name: str) -> None:
    shown = [number(cell) for row in rows(blocks("codes-")[name]) for cell in row[1:]]
    theirs = np.arange(len(shown)).astype(np.uint8).view(FOREIGN[name]).astype(np.float32)
    np.testing.assert_array_equal(np.array(shown), theirs)  # NaN compares equal to NaN here
    assert len(shown) == {"E4M3": 128, "E5M2": 128, "E2M1": 8, "E2M3": 32, "E3M2": 32}.get(name, 16)


def test_mxint8_and_nf4_tables_follow_their_definitions() -> None:
    shown = {name: [number(cell) for row in rows(text) for cell in row[1:]] for name, text in blocks("codes-").items()}
    assert shown["MXINT8"] == (np.arange(256).astype(np.uint8).view(np.int8) / 64).astype(np.float32).tolist()
    assert shown["NF4"] == [np.float32(v) for v in breccia.codecs.NF4.values]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(blocks("worked-")))
def test_a_worked_block_has_the_bytes_of_a_cast(name: str) -> None:
    text = blocks("worked-")[name]
    recipe = eval(text.split("`")[1], vars(breccia) | {kind.__name__: kind for kind in RECIPES})
    assert recipe.name == name
    k = recipe.format.scale.block[1] or len(rows(text))
    x = np.zeros((1, -(-len(rows(text)) // k) * k), np.float32)
    x[0, : len(rows(text))] = [number(row[0]) for row in rows(text)]
    st = breccia.cast(x, recipe)
    data = st.data.tobytes()
    shown = bytes.fromhex(re.search(r"^- data `([\dA-F ]+)`", text, re.MULTILINE)[1])  # type: ignore[index]
    assert data == shown.ljust(len(data), b"\0")
    scales = re.search(r"^- scale (.*)$", text, re.MULTILINE)[1]  # type: ignore[index]
    assert [int(code, 16) for code in re.findall(r"`(\w+)`", scales)] == np.ravel(st.scale).view(
        f"u{st.scale.itemsize}"
    ).tolist()
    back = breccia.dequantize(st)[0, : len(rows(text))]
    assert [number(row[3]).view("u4") for row in rows(text)] == back.view("u4").tolist()
