"""The sets, their formats and cases, as breccia_vectors reads them."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import breccia
import breccia_vectors
from breccia_vectors import EDGES, SPEC
from breccia_vectors.sets import PARTS, sets


def test_the_version_is_that_of_all_distributions() -> None:
    assert breccia_vectors.__version__ == breccia.__version__


def test_nothing_but_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import breccia_vectors.__main__; list(breccia_vectors.cases())\n"
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['breccia_vectors']\n", done.stderr


def test_the_package_holds_the_pages_and_every_set_unchanged() -> None:
    assert {"vectors.md", "formats.md", "numerics.md", "cross-walk.md"} <= {path.name for path in SPEC.iterdir()}
    for number in sets():
        folder = SPEC / "vectors" / str(number)
        for name, facts in json.loads((folder / "index.json").read_text())["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"], (number, name)


def test_every_edge_of_the_cases_has_words() -> None:
    assert {case.edge for case in breccia_vectors.cases()} == set(EDGES)
    page = (SPEC / "vectors.md").read_text(encoding="utf-8")
    assert [edge for edge in EDGES if f"`{edge}`" not in page] == []


def test_cases_are_chosen_by_format_edge_and_set() -> None:
    (case,) = breccia_vectors.cases("mxfp4,scale_rule=floor", edge="ties")
    assert (case.set, case.format.fields, case.format.rules) == (1, {"scale_rule": "floor"}, ("floor",))
    assert case.format in breccia_vectors.formats("mxfp4") and case.format not in breccia_vectors.formats("mxfp8")
    assert {case.set for case in breccia_vectors.cases("nvfp4", set=6)} == {6}
    assert list(breccia_vectors.cases("mxfp5")) == []


def test_a_case_says_its_shape_codes_and_numbers() -> None:
    """Numbers of the E2M1 table, on the page of MXFP4."""
    (case,) = breccia_vectors.cases("mxfp4,scale_rule=floor", edge="axis=-2")
    assert (case.shape, case.k_last, case.axis) == ((59, 3), (3, 59), -2)
    assert case.stored("data") == ((30, 3), 8) and case.stored("scale") == ((2, 3), 8)
    assert case.format.element.values[:8] == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    codes, scales, decoded = (case.array(part).tolist() for part in ("codes", "scale", "decoded"))
    for k in range(59):
        for m in range(3):
            assert decoded[k][m] == case.format.element.values[codes[k][m]] * 2.0 ** (scales[k // 32][m] - 127)
            assert codes[k][m] == case.data[(k // 2) * 3 + m] >> 4 * (k % 2) & 15
    with pytest.raises(KeyError, match="axis=-2 has no zero_point"):
        case.array("zero_point")


def test_a_clone_without_links_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spec").write_text("../../../docs/spec")  # what git writes in place of a link
    monkeypatch.setattr("breccia_vectors.sets.SPEC", tmp_path / "spec")
    with pytest.raises(FileNotFoundError, match="vectors is no folder: the repository was cloned without symbolic links"):
        sets()


def test_another_input_keeps_everything_else() -> None:
    case = next(breccia_vectors.cases("fp8_current"))
    other = case.with_input(struct.pack("<f", 1.0) * (len(case.input) // 4))
    assert all(getattr(other, part) == getattr(case, part) for part in PARTS if part != "input")
    assert set(other.array("input").cast("B").cast("f").tolist()) == {1.0}
