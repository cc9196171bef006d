"""The C program of breccia-vectors, written from the pages alone, agrees with the golden vectors and sees a wrong byte."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import breccia_vectors
from breccia_vectors import Case
from breccia_vectors.__main__ import PATHS

SETS = PATHS["data"]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vectors.c, compiled with the command in its first lines."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on the path")
    if sys.byteorder != "little":
        pytest.skip("the program is for little-endian machines")
    source = PATHS["c"]
    command = next(line for line in source.read_text().splitlines() if " cc " in line).partition("&&")[0].split()[1:]
    assert command[0] == "cc" and command[-2] == source.name
    built = tmp_path_factory.mktemp("c") / "vectors"
    command[command.index("-o") + 1] = str(built)
    warnings = ("-Wall", "-Wextra", "-Werror")
    done = subprocess.run([compiler, *warnings, *command[1:]], cwd=source.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


def checked(program: Path, *words: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], capture_output=True, text=True)


def is_cast(case: Case) -> bool:
    """Whether the program computes the cast of a case, too."""
    plain = case.rounding == "nearest" and case.supplied is None and case.format.rotation is None
    return plain and case.format.levels[-1].codec.name == "E8M0" and case.format.rules[-1] in ("rceil", "mse")


@pytest.mark.parametrize(("number", "casts"), [(1, 84), (2, 0), (3, 0), (4, 0), (5, 64), (6, 0), (7, 0)])
def test_the_program_finds_no_difference_and_its_results_are_those_of_the_vectors(
    checker: Path, tmp_path: Path, number: int, casts: int
) -> None:
    every = list(breccia_vectors.cases(set=number))
    assert sum(map(is_cast, every)) == casts
    done = checked(checker, SETS / str(number), tmp_path / "results.txt")
    assert (done.returncode, done.stdout) == (0, f"{len(every)} cases, {casts} cast, 0 differences\n")
    report = breccia_vectors.compare(tmp_path / "results.txt")
    assert report.agrees and len(report.agreed) == len(every) + casts and report.library == "vectors.c"


@pytest.mark.parametrize(
    ("number", "name", "part"),
    [
        (1, "mxfp8", "data"),
        (1, "mxfp8", "scale"),
        (1, "mxfp6,fp6_format=E3M2", "input"),
        (1, "nvfp4", "global_scale"),
        (1, "int4,group_size=16,signed=False,symmetric=False", "zero_point"),
        (1, "int8,group_size=16,signed=False,scale_dtype=bf16,symmetric=False,offset=bias", "zero_point"),
        (1, "nf4,block_size=16", "decoded"),
        (3, "gguf,type=Q3_K", "scale"),
        (3, "gguf", "zero_point"),
        (3, "nvfp4,order=scales_first", "decoded"),
        (4, "two_codecs", "global_scale"),
        (4, "two_codecs,type=tiles", "data"),
        (5, "mxfp4,scale_rule=mse", "scale"),
        (6, "mxfp4,rotation=32", "decoded"),
        (7, "steps", "decoded"),
        (7, "steps,type=two_levels_factor", "global_scale"),
        (7, "steps,type=bf16_zero", "zero_point"),
        (7, "int4,group_size=12", "group_index"),
    ],
)
def test_the_program_detects_a_planted_wrong_byte(checker: Path, tmp_path: Path, number: int, name: str, part: str) -> None:
    edges = ("ordinary", "group_index")
    case = next(c for c in breccia_vectors.cases(name, set=number) if c.format.name == name and c.edge in edges)
    folder = shutil.copytree(SETS / str(number), tmp_path / "set")
    start, size = json.loads((folder / "index.json").read_text())["cases"][case.number][part]
    raw = bytearray((folder / "vectors.bin").read_bytes())
    raw[start + (size // 2 | 2) - 2 * (part == "group_index")] ^= 0x40 >> 6 * (
        part == "group_index"
    )  # the upper half of a number
    (folder / "vectors.bin").write_bytes(raw)
    done = checked(checker, folder)
    assert done.returncode == 1 and f"case {case.number}: " in done.stdout and ", 0 differences" not in done.stdout


def test_the_program_says_which_file_it_cannot_read_or_write(checker: Path, tmp_path: Path) -> None:
    done = checked(checker, tmp_path)
    assert done.returncode == 2 and "vectors.bin: No such file" in done.stderr
    done = checked(checker, SETS / "7", tmp_path / "missing" / "results.txt")
    assert done.returncode == 2 and "results.txt: No such file" in done.stderr
