"""`breccia rosetta`: what it prints is what `breccia.exactness` says."""

from __future__ import annotations

import json

import pytest

import breccia
from breccia.cli.main import run
from breccia.cli.rosetta import every_format, fitted
from breccia.dispatch.registry import registry


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run(["rosetta", *words])
    assert ended.value.code in (None, 0)
    return capsys.readouterr().out


def test_one_pair_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    title, row, note = printed(capsys, "mxfp4", "nvfp4").splitlines()
    assert title.split() == ["from", "mxfp4", "to", "bound", "why"]
    why = "exact if exponents of scales span at most 17 in a tensor"
    assert row.split(maxsplit=4) == ["values", "decide", "nvfp4", "1", why]
    assert note == "bound: how far a value that changes moves at most, as a multiple of its new scale."


def test_a_source_has_a_row_for_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(printed(capsys, "mxfp4", "--json"))
    assert [row["target"] for row in listed] == list(every_format(registry()))
    mxfp4 = breccia.recipe("mxfp4")
    for row in listed:
        found = breccia.exactness(mxfp4, fitted(mxfp4, breccia.recipe(row["target"])))
        assert (row["kind"], row["why"], row["bound"]) == (found.kind, found.why, found.bound)


def test_all_formats_are_listed_with_what_they_become_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()
    formats = every_format(registry())
    assert [line.split()[0] for line in lines[1:-1]] == list(formats)
    (row,) = (line.split() for line in lines if line.startswith("mxfp6 "))
    assert row[1:3] == ["1", "1"] and row[5:] == ["mxfp8", "fp8_block"]
    assert sum(int(n) for n in row[1:5]) == len(formats) - 1


def test_each_format_of_a_recipe_appears_once_under_a_spec_that_reads_back() -> None:
    formats = every_format(registry())
    assert {"mxfp8", "mxfp8,fp8_format=E5M2", "int4,offset=bias", "nvfp4,order=scales_first", "gguf,type=Q6_K"} <= set(formats)
    assert all(breccia.recipe(spec) == one for spec, one in formats.items())
    assert len({one.format for one in formats.values()}) == len(formats)


def test_targets_of_free_block_length_get_the_blocks_of_the_source() -> None:
    mxfp4 = breccia.recipe("mxfp4")
    assert fitted(mxfp4, breccia.recipe("fp8_block")) == breccia.recipe("fp8_block,block_k=32")
    assert fitted(mxfp4, breccia.recipe("nvfp4")) == breccia.recipe("nvfp4")
    assert fitted(breccia.recipe("fp8_row"), breccia.recipe("int4")) == breccia.recipe("int4")
