"""Third-party plug-ins, built, installed and tested as their authors would do; and four broken ones beside one of them.

Everything runs in processes of its own, which find the distributions in a folder that only they are told of.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, TESTS

#: They build distributions and start many processes.
pytestmark = pytest.mark.long

THIRD_PARTY = TESTS / "third_party"
ACME = THIRD_PARTY / "acme-breccia"
#: Plug-ins that declare a format.
FORMATS = ("hif4", "if4")
#: Broken plug-in -> (its status, what `breccia plugins` says of it).
BROKEN = {
    "raises": ("set aside", r"FileNotFoundError: .*settings\.toml"),
    "misspelt": ("set aside", r"it implements no hook of breccia: 'breccia_recipe'; did you mean 'breccia_recipes'\?"),
    "duplicate": ("set aside", r"breccia_recipes: the name 'mxfp8' is taken by plug-in 'core'; choose another\."),
    "heavy": ("active", r"bridges 1; imported (numpy, )?torch while declaring itself"),
}


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with acme-breccia installed from its wheel."""
    return installed(tmp_path_factory.mktemp("acme"), ACME)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the broken plug-ins installed."""
    return installed(tmp_path_factory.mktemp("broken"), *(THIRD_PARTY / "broken" / f"{name}-breccia" for name in BROKEN))


def installed(folder: Path, *sources: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(folder),
    ]
    run = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def python(*words: str, path: list[Path], cwd: Path, code: int = 0, **environ: str) -> str:
    """Standard output of a fresh interpreter that finds the distributions in `path`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BRECCIA_", "PYTEST_"))}
    env = clean | environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "250"}
    run = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == code, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def conformance(path: list[Path], cwd: Path, *words: str, source: Path = ACME) -> str:
    """The summary of a plug-in's own test file."""
    test = source / "tests" / "test_conformance.py"
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(cwd),
        "--confcutdir",
        str(test.parent),
        *words,
    )
    return python("-m", "pytest", *options, str(test), path=path, cwd=cwd)


# ---------------------------------------------------------------------------------------------- acme


def test_acme_is_forty_lines_of_python_and_its_cuda_kernel_is_thirty() -> None:
    lines = {
        file.stem: sum(bool(line.strip()) for line in file.read_text(encoding="utf-8").splitlines())
        for file in ACME.glob("src/**/*.py")
    }
    assert lines.pop("cuda") <= 30
    assert sum(lines.values()) <= 40


@pytest.mark.together
def test_acme_keeps_every_law_on_four_frameworks(acme: Path, tmp_path: Path) -> None:
    out = conformance([acme], tmp_path, "-rp")  # it lists what passed
    assert "conformance of acme" in out and "acme 0.1" in out
    counted = re.search(r"^acme: (\d+) passed, (\d+) skipped$", out, re.MULTILINE)
    assert counted and int(counted[1]) > 40, out
    skipped = {why: int(n) for n, why in re.findall(r"^  skipped, (\d+): (.*)$", out, re.MULTILINE)}
    assert sum(skipped.values()) == int(counted[2])
    assert skipped.pop("acme_npu, the driver of Acme's NPU, is not installed") > 0
    assert all(why.startswith("no device 'cuda': ") for why in skipped), "all else is the CUDA kernel, where there is no GPU"
    for framework in ("numpy", "torch", "jax", "mlx"):
        assert f"recipes/acme6/{framework}/a_cast_writes_the_oracles_bytes" in out


def test_the_vendors_kernel_says_why_it_does_not_run(acme: Path, tmp_path: Path) -> None:
    out = python("-m", "breccia", "explain", "cast", "acme6", "--on", "torch", path=[acme], cwd=tmp_path)
    assert "skipped: acme_npu, the driver of Acme's NPU, is not installed" in out
    assert " -> " in out and "acme_breccia/npu.py:" in out


def test_the_vendors_kernel_runs_if_its_driver_is_installed(acme: Path, tmp_path: Path) -> None:
    """With a driver that counts calls: it receives the kernel's arguments, and its result is returned."""
    driver = "from breccia.kernels import reference\ncalls = []\n"
    driver += "def cast(x, recipe, options):\n    calls.append(tuple(x.shape))\n    return reference.cast(x, recipe, options)\n"
    (tmp_path / "acme_npu.py").write_text(driver)
    script = "import breccia, torch, acme_npu; st = breccia.cast(torch.full((3, 128), 31.0), breccia.recipe('acme6')); "
    script += "print(acme_npu.calls, st.recipe.name, breccia.dequantize(st).unique().tolist())"
    assert python("-c", script, path=[acme, tmp_path], cwd=tmp_path).strip() == "[(3, 128)] acme6 [31.0]"


def test_the_bridge_refuses_what_acme_does_not_hold(acme: Path, tmp_path: Path) -> None:
    script = """
import numpy as np, breccia
try:
    breccia.bridges.to_acme(breccia.cast(np.ones((2, 64), np.float32), breccia.MXFP8BlockScaling()))
except breccia.DialectError as e:
    print(e)
"""
    out = python("-c", script, path=[acme], cwd=tmp_path)
    assert out.strip() == "Acme holds recipe 'acme6', not 'mxfp8'; breccia.requantize it first."


# ---------------------------------------------------------------------------------------------- formats of one file


@pytest.mark.together
@pytest.mark.parametrize("name", [FORMATS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS[1:])])
def test_a_format_of_one_file_keeps_every_law_on_four_frameworks(name: str, tmp_path: Path) -> None:
    source = THIRD_PARTY / f"{name}-breccia"
    path = [installed(tmp_path / "installed", source)]
    out = conformance(path, tmp_path, "-rp", source=source)  # it lists what passed
    counted = re.search(rf"^{name}: (\d+) passed$", out, re.MULTILINE)
    assert counted and int(counted[1]) > 40, out
    for framework in ("numpy", "torch", "jax", "mlx"):
        assert f"recipes/{name}/{framework}/a_cast_writes_the_oracles_bytes" in out


# ---------------------------------------------------------------------------------------------- the broken ones


def test_each_broken_plug_in_is_named_with_what_is_wrong(acme: Path, broken: Path, tmp_path: Path) -> None:
    out = python("-W", "ignore", "-m", "breccia", "plugins", path=[acme, broken], cwd=tmp_path)
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    for name, (status, said) in BROKEN.items():
        assert f"{name}-breccia" in lines[name] and f" {status} " in lines[name]
        assert re.search(said, " ".join(lines[name].split())), lines[name]
    assert " active " in lines["acme"] and "recipes 1" in lines["acme"]
    found = json.loads(python("-W", "ignore", "-m", "breccia", "plugins", "--json", path=[broken], cwd=tmp_path))
    assert {p["name"]: p["status"] for p in found if p["name"] in BROKEN} == {name: BROKEN[name][0] for name in BROKEN}


def test_doctor_reports_a_plug_in_set_aside_as_a_problem_and_a_heavy_import_as_a_note(broken: Path, tmp_path: Path) -> None:
    out = python("-W", "ignore", "-m", "breccia", "doctor", "--json", path=[broken], cwd=tmp_path, code=1)
    found = {line["subject"]: line for line in json.loads(out) if line["section"] == "plug-ins"}
    assert {name: found[name]["status"] for name in BROKEN} == dict.fromkeys(BROKEN, "problem") | {"heavy": "note"}
    assert re.search("imported .*torch while declaring itself, in every process", found["heavy"]["text"])
    assert found["heavy"]["remedy"] == "tell the authors of heavy-breccia"
    assert found["raises"]["remedy"] == "pip install --upgrade raises-breccia, or pip uninstall it"


def test_each_broken_plug_in_causes_one_warning(broken: Path, tmp_path: Path) -> None:
    script = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import breccia
    breccia.plugins(), breccia.plugins()
print("\\n".join(str(w.message) for w in caught))
"""
    said = python("-c", script, path=[broken], cwd=tmp_path).splitlines()
    assert len(said) == len(BROKEN)
    for name in BROKEN:
        assert sum(f"plug-in {name!r}" in line for line in said) == 1


@pytest.mark.together
def test_the_others_keep_their_laws_beside_the_broken_ones(acme: Path, broken: Path, tmp_path: Path) -> None:
    out = conformance([acme, broken], tmp_path, "-W", "ignore::breccia.PluginWarning", "-k", "numpy or torch")
    assert re.search(r"^acme: \d+ passed, \d+ skipped", out, re.MULTILINE), out
    assert "raises 0.1 (set aside)" in out


@pytest.mark.slow
def test_the_suite_of_core_passes_beside_the_broken_ones(broken: Path, tmp_path: Path) -> None:
    """All of it that does not count plug-ins."""
    tests = ["tests/core/numerics", "tests/core/kernels", "tests/core/tensors", "tests/across/test_parity.py"]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::breccia.PluginWarning", "-m", "not slow and not gpu")
    out = python("-m", "pytest", *options, *tests, path=[broken], cwd=ROOT)
    assert re.search(r"\d{3,} passed", out)


@pytest.mark.parametrize("name", BROKEN)
def test_conformance_names_the_fault_of_a_broken_plug_in(broken: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"from breccia.testing import conformance\ntest_it = conformance({name!r}, frameworks=['numpy'])\n")
    options = ("-q", "-p", "no:cacheprovider", "-W", "ignore::breccia.PluginWarning", "--rootdir", str(tmp_path))
    out = python("-m", "pytest", *options, str(file), path=[broken], cwd=tmp_path, code=1)
    failed = re.findall(r"^FAILED .*\[manifest/\w+/(\w+)\]", out, re.MULTILINE)
    assert failed == (["it_imports_only_breccia_and_the_standard_library"] if name == "heavy" else ["it_is_active"])
    assert re.search("also imports .*torch" if name == "heavy" else BROKEN[name][1], out)
