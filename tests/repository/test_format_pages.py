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
    "UINT4": ml_dtypes.uint4, "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


def blocks(prefix: str) -> dict[str, str]:
    """Name after the prefix -> generated block, for all pages."""
    found = (m.groups() for page in PAGES for m in BLOCK.finditer(page.read_text(encoding="utf-8")))
    return {name.removeprefix(prefix): text for name, text in found if name.startswith(prefix)}


def rows(text: str) -> list[list[str]]:
    """The cells of a table without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def shown_in(worked: str) -> breccia.ScalingRecipe:
    """The recipe of a worked block."""
    return eval(worked.split("`")[1], vars(breccia) | {kind.__name__: kind for kind in RECIPES})


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
    names = dict(BLOCK.findall(text))
    (recipe,) = {name.partition("-")[2] for name in names if name.startswith(("components-", "worked-"))}
    assert "\n## MUST and MAY\n" in text and " MUST " in text and "\nSources: " in text
    wanted = {shown_in(names[f"worked-{recipe}"]).format.element.name} - {"INT8"}  # 8-bit integers need no table
    assert wanted <= {name.removeprefix("codes-") for name in names}


@pytest.mark.parametrize("name", FOREIGN)
def test_code_tables_agree_with_ml_dtypes(name: str) -> None:
    shown = [number(cell) for row in rows(blocks("codes-")[name]) for cell in row[1:]]
    theirs = np.arange(len(shown)).astype(np.uint8).view(FOREIGN[name]).astype(np.float32)
    np.testing.assert_array_equal(np.array(shown), theirs)  # NaN compares equal to NaN here
    assert len(shown) == {"E2M1": 8, "E2M3": 32, "E3M2": 32}.get(name, 16 if "INT" in name else 128)


def test_tables_of_mxint8_nf4_and_gguf_follow_their_definitions() -> None:
    shown = {name: [number(cell) for row in rows(text) for cell in row[1:]] for name, text in blocks("codes-").items()}
    assert shown["MXINT8"] == (np.arange(256).astype(np.uint8).view(np.int8) / 64).astype(np.float32).tolist()
    for codec in (breccia.codecs.NF4, breccia.codecs.IQ4, breccia.codecs.TERNARY):
        assert shown[codec.name] == [np.float32(v) for v in codec.values]  # type: ignore[attr-defined]


def test_the_table_of_gguf_types_has_the_sizes_of_their_blocks() -> None:
    """Bytes per 256 elements, by llama.cpp's structures; TQ1_0 is held in 2 bits where files pack five codes into a byte."""
    of_256 = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136, "IQ4_NL": 8 * 18, "TQ2_0": 66}
    shown = {
        row[0]: float(row[5]) for row in rows(dict(BLOCK.findall((SPEC / "formats" / "gguf.md").read_text()))["types-gguf"])
    }
    assert shown == {name: size / 32 for name, size in of_256.items()} | {"TQ1_0": 66 / 32}


def bytes_shown(title: str, worked: str, count: int) -> bytes:
    """`count` bytes behind a title; zeros at the end may be left out."""
    return bytes.fromhex(re.search(rf"^- {title} `([\dA-F ]+)`", worked, re.MULTILINE)[1]).ljust(count, b"\0")  # type: ignore[index]


@pytest.mark.parametrize("name", sorted(blocks("worked-")))
def test_a_worked_block_has_the_bytes_of_a_cast(name: str) -> None:
    text = blocks("worked-")[name]
    recipe = shown_in(text)
    assert recipe.name == name
    k = recipe.format.block[1] or len(rows(text))
    x = np.zeros((1, -(-len(rows(text)) // k) * k), np.float32)
    x[0, : len(rows(text))] = [number(row[0]) for row in rows(text)]
    st = breccia.cast(x, recipe)
    assert st.data.tobytes() == bytes_shown("data", text, st.data.nbytes)
    if recipe.format.scale_record is None:
        scales = re.search(r"^- scale (.*)$", text, re.MULTILINE)[1]  # type: ignore[index]
        assert [int(code, 16) for code in re.findall(r"`(\w+)`", scales)] == np.ravel(st.scale).view(
            f"u{st.scale.itemsize}"
        ).tolist()
    else:
        assert st.scale.tobytes() == bytes_shown("scale record", text, st.scale.nbytes)
    if recipe.format.offset_record is not None:
        assert st.zero_point.tobytes() == bytes_shown("bias record", text, st.zero_point.nbytes)
    back = breccia.dequantize(st)[0, : len(rows(text))]
    assert [number(row[3]).view("u4") for row in rows(text)] == back.view("u4").tolist()
