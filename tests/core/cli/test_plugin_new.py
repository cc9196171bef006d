"""`breccia plugin new`: a skeleton that installs and passes its own conformance test, and overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import TESTS
from program import Run

import breccia
from breccia.cli.skeleton import files, write_plugin
from breccia.errors import OptionError

ACME = TESTS / "third_party" / "acme-breccia"


def installed(source: Path, site: Path) -> Path:
    """A folder that holds the distribution as pip would install it."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(source / "src", site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"]["breccia"].items())
    (info / "entry_points.txt").write_text(f"[breccia]\n{points}")
    return site


def python(*words: str, site: Path, cwd: Path) -> str:
    """Standard output of a fresh interpreter that finds the distribution in `site`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BRECCIA_", "PYTEST_"))}
    path = os.pathsep.join([str(site), *filter(None, [clean.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=clean | {"PYTHONPATH": path, "COLUMNS": "200"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A skeleton, beside a folder "site" where it is installed."""
    folder = write_plugin("my_npu", tmp_path_factory.mktemp("skeleton"))
    installed(folder, folder.parent / "site")
    return folder


@pytest.mark.long
def test_the_skeleton_passes_its_conformance_test(mine: Path) -> None:
    """On NumPy, without the laws of the oracle, which are slow; the slow test below has them all."""
    left_out = "not torch and not jax and not mlx and not oracle and not bit_pattern"
    words = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-k", left_out)
    out = python("-m", "pytest", *words, "tests/test_conformance.py", site=mine.parent / "site", cwd=mine)
    counted = re.search(
        r"^my_npu: (\d+) passed(, 1 skipped\n  skipped, 1: breccia-bridges is not installed)?$", out, re.MULTILINE
    )
    assert counted and int(counted[1]) > 15, out
    assert (counted[2] is None) == (find_spec("breccia_bridges") is not None)


@pytest.mark.slow
@pytest.mark.together
def test_the_skeleton_passes_its_conformance_test_on_every_framework(mine: Path) -> None:
    words = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".")
    out = python("-m", "pytest", *words, "tests/test_conformance.py", site=mine.parent / "site", cwd=mine)
    assert re.search(r"^my_npu: \d+ passed(, \d+ skipped)?$", out, re.MULTILINE), out


def test_the_kernel_of_the_skeleton_runs(mine: Path) -> None:
    script = "import breccia, numpy as np; st = breccia.cast(np.full((3, 128), -31.0, np.float32), breccia.recipe('my_npu')); "
    script += "print(breccia.explain('dequantize', st).running, np.unique(breccia.dequantize(st)).tolist(), st.data.shape)"
    out = python("-c", script, site=mine.parent / "site", cwd=mine)
    assert out == "my_npu.dequantize [-31.0] (3, 96)\n"
    said = python("-m", "breccia", "explain", "dequantize", "my_npu", site=mine.parent / "site", cwd=mine)
    assert " -> my_npu.dequantize" in said


def test_the_skeleton_is_about_forty_lines_of_python(mine: Path) -> None:
    lines = [
        line for file in mine.glob("src/**/*.py") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    assert 30 <= len(lines) <= 50


def test_the_skeleton_has_the_form_of_the_distribution_in_the_tutorial() -> None:
    written = files("acme", "Acme's six-bit integers for breccia")
    for path in ("pyproject.toml", "tests/test_conformance.py", "src/acme_breccia/__init__.py"):
        assert written[path] == (ACME / path).read_text(encoding="utf-8")
    for path in written:
        assert "$" not in written[path] and "package" not in path


def test_the_skeleton_depends_on_the_core_that_wrote_it() -> None:
    major, minor, *_ = breccia.__version__.split(".")
    project = tomllib.loads(files("mine")["pyproject.toml"])["project"]
    assert project["dependencies"] == [f"breccia-core~={major}.{minor}.0"]


def test_the_command_says_what_it_wrote_and_what_to_type_next(tmp_path: Path, run: Run) -> None:
    code, out, err = run("plugin", "new", "my_npu", "--dir", tmp_path)
    folder = tmp_path / "my-npu-breccia"
    paths = ["pyproject.toml", *(f"src/my_npu_breccia/{name}.py" for name in ("__init__", "kernels", "plugin"))]
    lines = [f"wrote {folder / path}" for path in (*paths, "tests/test_conformance.py")]
    commands = [f"  cd {folder}", "  pip install -e '.[test]'", "  pytest", "  breccia explain dequantize my_npu"]
    assert (code, out.splitlines(), err) == (0, [*lines, "next:", *commands], "")
    code, out, _ = run("plugin", "new", "other", "--dir", tmp_path, "--json")
    found = json.loads(out)
    assert found["folder"] == str(tmp_path / "other-breccia") and "src/other_breccia/plugin.py" in found["files"]
    assert found["next"][1:3] == ["pip install -e '.[test]'", "pytest"]


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "mine-breccia"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("# years of work")
    code, out, err = run("plugin", "new", "mine", "--dir", tmp_path)
    assert (code, out) == (1, "")
    assert err == f"error: {folder} exists and is not overwritten; choose another name or another --dir.\n"
    assert [p.name for p in folder.iterdir()] == ["pyproject.toml"]
    assert (folder / "pyproject.toml").read_text() == "# years of work"


@pytest.mark.parametrize("name", ["", "Acme", "acme-npu", "1acme", "_acme", "acme_", "a__b", "../acme", "class", "ácme", "a b"])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as refused:
        write_plugin(name, tmp_path)
    assert str(refused.value) == (
        "a plug-in's name has lowercase letters a-z, digits and single underscores between them, such as 'acme' or "
        f"'acme_npu'; got {name!r}."
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "what"), [("core", "plug-in"), ("mxfp8", "recipe")])
def test_a_name_that_is_taken_is_refused(name: str, what: str, tmp_path: Path) -> None:
    message = f"the name {name!r} is taken by a {what} that is installed here; choose another."
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        write_plugin(name, tmp_path)
