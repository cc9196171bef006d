"""Files of results, and the command line of breccia_vectors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import breccia_vectors
from breccia_vectors import ResultError, compare
from breccia_vectors import __main__ as program


def written(path: Path, *lines: str, heading: str = "breccia-results 1 acme 1.2") -> Path:
    path.write_text("\n".join([heading, *lines]) + "\n", encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["breccia_vectors", *map(str, words)])
    code = program.main()
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A file with a right case, a wrong one, one skipped and one that failed."""
    right, wrong = list(breccia_vectors.cases("mxfp4,scale_rule=floor"))[:2]
    scale = bytearray(wrong.scale)
    scale[0] ^= 1
    return written(
        tmp_path / "results.txt",
        "# a comment",
        f"{right.set}:{right.number} codes {right.codes.hex()}",
        f"{right.set}:{right.number} scale {right.scale.hex().upper()}",
        f"{right.set}:{right.number} dequantized {right.decoded.hex()}",
        f"{wrong.set}:{wrong.number} scale {scale.hex(' ')}",
        "1:0 skipped one scale for a tensor",
        "1:1 failed out of memory",
    )


def test_a_file_of_results_is_compared_part_by_part(results: Path) -> None:
    report = compare(results)
    assert report.library == "acme 1.2"
    assert [(operation, parts) for operation, _, parts in report.agreed] == [
        ("quantize", ("codes", "scale")),
        ("dequantize", ("decoded",)),
    ]
    (found,) = report.differences
    assert (found.part, found.index, found.wanted ^ found.found, found.smallest) == ("scale", 0, 1, None)
    assert [s.reason for s in report.skipped] == ["one scale for a tensor"]
    assert [f.error for f in report.failures] == ["out of memory"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("9:0 codes 00", "results.txt:2: '9:0' is no case; cases are 1:0 to 1:1597; 2:0 to 2:407; "),
        ("1:1598 codes 00", "results.txt:2: '1:1598' is no case; "),
        ("1:0 input 00", "results.txt:2: 'input' is no part of a result; parts are global_scale, scale, "),
        ("1:0 codes 0g", "results.txt:2: non-hexadecimal number found"),
        ("1:0 codes 00", "1:0 fp8_delayed ordinary: codes has 1 bytes; 48 expected"),
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ResultError) as e:
        compare(written(tmp_path / "results.txt", line))
    assert message in str(e.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ResultError, match="results.txt:1: the file opens with 'hello'; results open with 'breccia-results 1' and"
    ):
        compare(written(tmp_path / "results.txt", heading="hello"))


def test_the_command_compares_and_writes_json(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "compare", results, "--json", results.with_suffix(".json"))
    assert code == 1 and out.startswith("acme 1.2: 2 agree, 1 differ, 1 fail, 1 skipped\n")
    assert len(json.loads(results.with_suffix(".json").read_text())["differences"]) == 1
    assert sorted(path.name for path in results.parent.iterdir()) == ["results.json", "results.txt"]
    code, out, err = run(monkeypatch, capsys, "compare", results.with_name("absent.txt"))
    assert (code, out) == (2, "") and err.startswith("error: [Errno 2] No such file or directory: ")


def test_a_file_that_agrees_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(breccia_vectors.cases("nf4"))
    path = written(tmp_path / "results.txt", f"1:{case.number} data {case.data.hex()}")
    assert run(monkeypatch, capsys, "compare", path)[0] == 0


def test_the_command_lists_formats_shows_cases_and_prints_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "formats")
    assert code == 0 and len(out.splitlines()) == 1 + len(breccia_vectors.formats())
    _, out, _ = run(monkeypatch, capsys, "formats", "mxint8")
    assert [line.split()[:3] for line in out.splitlines()[1:3]] == [
        ["mxint8", "MXINT8", "E8M0"],
        ["mxint8,scale_rule=floor", "MXINT8", "E8M0"],
    ]
    code, _, err = run(monkeypatch, capsys, "formats", "mxfp5")
    assert code == 2 and err.startswith("error: no recipe is called 'mxfp5'; recipes are fp8_delayed, fp8_current, ")
    case = next(breccia_vectors.cases("mxfp4"))
    _, out, _ = run(monkeypatch, capsys, "show", f"{case.set}:{case.number}")
    assert out.startswith(f"{case.name}: numbers of medium exponents\n") and f"(2, 2): {case.scale.hex(' ')}\n" in out
    assert run(monkeypatch, capsys, "show", "1") == (2, "", f"error: {no_case('1')}\n")
    for what, name in (("data", "vectors"), ("spec", "spec"), ("c", "vectors.c")):
        path = Path(run(monkeypatch, capsys, "path", what)[1].strip())
        assert path.exists() and path.name == name


def no_case(name: str) -> str:
    with pytest.raises(ResultError) as e:
        program.case_of(name)
    return str(e.value)
