"""The reports about other libraries: their programs print what they say, and the measured differences are there."""

from __future__ import annotations

import json
import math
import re
import struct
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "differences"))
import reports

pytest.importorskip("breccia_vectors")
from breccia_vectors import adapters
from breccia_vectors.adapters import LIBRARIES, NotInstalled, run
from breccia_vectors.adapters import __main__ as program

sys.path.remove(str(ROOT / "tests" / "differences"))

LIBRARY = {library.module: library for library in LIBRARIES}
REPORTS = reports.reports()
MEASURED = {of["module"]: of for of in json.loads((ROOT / "docs" / "vectors.json").read_text(encoding="utf-8"))["libraries"]}
every = pytest.mark.parametrize("report", REPORTS, ids=str)
#: A format for each library that is fast to run, and is run again here.
FAST = {
    "torchao": "mxfp4,scale_rule=floor",
    "compressed_tensors": "mxfp4,scale_rule=even",
    "mlx": "mxfp8",
    "gguf": "mxfp4,scale_rule=floor",
    "torch": "mxfp8",
    "ml_dtypes": "mxfp6",
}
#: Of these, those that take seconds to import.
SLOW = ("torchao", "compressed_tensors")


def installed(module: str) -> None:
    """Skip where the library is not installed, or in another version than the one measured."""
    there, wanted = LIBRARY[module].version, MEASURED[module]["version"]
    if there is None:
        pytest.skip(f"{module} is not installed")
    if there != wanted:
        pytest.skip(f"{module} is {there}, and the reports are about {wanted}")


@every
def test_breccia_gives_what_a_report_says(report: reports.Report) -> None:
    assert reports.ours(report) == report.breccia_prints


@pytest.mark.slow  # other libraries change where constraints.txt does
@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_the_program_of_a_report_prints_what_it_says(report: reports.Report) -> None:
    installed(report.module)
    assert reports.reproduced(report) == report.prints


@every
def test_the_smallest_input_is_the_same_number_in_bits_and_in_decimals(report: reports.Report) -> None:
    for bits, number in report.input:
        if len(bits) == len("0x00000000"):
            value = struct.unpack(">f", bytes.fromhex(bits[2:]))[0]
            wanted = struct.unpack(">f", struct.pack(">f", float(number)))[0]
            assert (value, math.copysign(1, value)) == (wanted, math.copysign(1, wanted)) or (
                math.isnan(value) and math.isnan(wanted)
            )
        else:
            assert " code" in number or " codes" in number, number
        assert bits[2:].upper() == bits[2:]


@every
def test_the_golden_vectors_of_a_report_were_measured_to_differ(report: reports.Report) -> None:
    found = {case for row in MEASURED[report.module]["rows"] for case in (*row["differ"], *row["failed"])}
    assert set(report.cases) <= found


def test_reports_have_a_place_and_programs_are_short() -> None:
    assert {report.module for report in REPORTS} <= set(MEASURED) == set(LIBRARY)
    assert len({(report.module, report.slug) for report in REPORTS}) == len(REPORTS) >= 10
    for report in REPORTS:
        assert report.kind in reports.KINDS
        page = ROOT / "docs" / "differences" / f"{report.module}.md"
        assert f"\n## {report.title}\n" in page.read_text(encoding="utf-8"), report
        assert len(report.code.splitlines()) <= 8 and "breccia" not in report.code, report


@pytest.mark.parametrize("module", [pytest.param(m, marks=pytest.mark.long) if m in SLOW else m for m in FAST])
def test_a_library_agrees_with_the_vectors_where_it_was_measured_to(module: str) -> None:
    installed(module)
    reports_of = dict((adapter.name, report) for adapter, report in run(LIBRARY[module], [FAST[module]]))
    rows = [row for row in MEASURED[module]["rows"] if row["format"] == FAST[module]]
    assert rows
    for row in rows:
        counts = reports_of[row["quantizer"]].counts()
        assert counts.get(("quantize", row["format"]), {}).get("agree", 0) == row["equal"]
        assert counts.get(("dequantize", row["format"]), {}).get("agree", 0) == row["decoded"]


def test_the_command_prints_a_report_and_refuses_an_unknown_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(sys, "argv", ["adapters", "ml_dtypes", "--format", "mxfp6"])
    program.main()
    assert f"ml_dtypes {LIBRARY['ml_dtypes'].version}, astype: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["adapters", "acme"])
    with pytest.raises(SystemExit):
        program.main()
    assert "no adapter is called acme; there are torchao," in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = type(LIBRARIES[0])("Acme", "acme-quantizer-that-is-not-there", "torchao")
    with pytest.raises(NotInstalled, match="Acme is not installed: pip install acme-quantizer-that-is-not-there"):
        next(run(absent))


def test_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    installed = next(library for library in LIBRARIES if library.version)
    wanted = "NumPy is not installed, which adapters need: pip install 'breccia-vectors[adapters]'"
    with pytest.raises(NotInstalled, match=re.escape(wanted)):
        next(run(installed))
    monkeypatch.setattr(sys, "argv", ["adapters"])
    monkeypatch.setattr(adapters.Library, "version", None)
    with pytest.raises(SystemExit, match=re.escape("is installed; install one, and 'breccia-vectors[adapters]'")):
        program.main()
