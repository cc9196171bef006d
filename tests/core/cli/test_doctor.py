"""`breccia doctor` and `breccia bench`: what is installed, what is missing and how to install it, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from marks import jax_is_long
from paths import ROOT
from program import Run

import breccia
from breccia import siblings, targets
from breccia.arrays import frameworks
from breccia.backend import reference
from breccia.cli import bench, doctor
from breccia.cli.doctor import MISSING, NOT_INSTALLED, NOTE, OK, OPTIONAL, PROBLEM, Finding, examine
from breccia.dispatch.registry import Plugin, Registry, _installed
from breccia.kernels import threads
from breccia.options import FLOAT32, ProductOptions
from breccia.siblings import EXTRAS, SIBLINGS, install, unrelated
from breccia_native.availability import missing, missing_for_jax, missing_products


def found(section: str, subject: str) -> Finding:
    (one,) = [f for f in examine() if (f.section, f.subject) == (section, subject)]
    return one


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make distributions and modules of these names look uninstalled to doctor."""
    version, installed = importlib.metadata.version, targets.installed

    def without(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", without)
    monkeypatch.setattr(targets, "installed", lambda module: module not in names and installed(module))


def test_a_full_installation_is_listed_with_versions_and_no_problems(run: Run) -> None:
    assert found("breccia", "breccia-core") == Finding("breccia", "breccia-core", OK, breccia.__version__)
    for framework in ("numpy", "torch", "jax", "mlx"):
        line = found("frameworks", framework)
        assert line.status == OK and line.text.startswith(importlib.metadata.version(framework)) and "cpu" in line.text
    assert found("frameworks", "numpy").text.endswith(f"cpu, up to {threads.get_num_threads()} threads")
    assert {f.subject for f in examine() if f.section == "extras"} == {extra.name for extra in EXTRAS}
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "breccia-core" in out and "frameworks" in out and f"  {PROBLEM}" not in out and out.endswith("\nno problems found\n")
    code, out, _ = run("doctor", "--json")
    assert code == 0 and {"section", "subject", "status", "text", "remedy"} == set(json.loads(out)[0])


@pytest.mark.parametrize("sibling", SIBLINGS, ids=lambda s: s.distribution)
def test_a_distribution_that_nothing_needs_is_optional(sibling: siblings.Sibling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: [])
    absent(monkeypatch, sibling.distribution)
    line = found(NOT_INSTALLED, sibling.distribution)
    assert (line.status, line.text, line.remedy) == (OPTIONAL, sibling.purpose, install(sibling.distribution))
    assert examine()[-1] == line, "what is optional comes last"


def required(monkeypatch: pytest.MonkeyPatch, **declared: list[str]) -> None:
    """Make distributions require this; their names have _ for -."""
    monkeypatch.setattr(doctor, "requires", lambda name: declared.get(name.replace("-", "_"), []))


def test_what_an_installed_distribution_needs_is_missing_and_not_optional(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    required(
        monkeypatch,
        breccia_triton=["breccia-torch~=0.2.0", "triton>=3.6; sys_platform != 'none'", "absent>=1; sys_platform == 'none'"],
        breccia_torch=["torch>=2.8", "ml-dtypes>=0.5", "absent>=1; extra == 'other'"],
    )
    absent(monkeypatch, "breccia-torch", "breccia_torch", "triton")
    line = found("requirements", "breccia-torch")
    assert (line.status, line.remedy) == (MISSING, install("breccia-torch"))
    assert line.text == "not installed; breccia-triton needs breccia-torch~=0.2.0"
    line = found("requirements", "triton")
    assert (line.text, line.remedy) == ("not installed; breccia-triton needs triton>=3.6", "pip install 'triton>=3.6'")
    assert not [f for f in examine() if f.section == NOT_INSTALLED]
    code, out, _ = run("doctor")
    assert code == 1 and out.endswith("\n2 problems found: breccia-torch, triton\n")


def test_a_version_that_an_installed_distribution_refuses_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    required(monkeypatch, breccia_torch=["torch>=99"], breccia_triton=["torch>=98,!=98.1", "torch>=1"])
    line = found("requirements", "torch")
    by = "breccia-torch needs torch>=99, breccia-triton needs torch!=98.1,>=98"
    assert line.text == f"{importlib.metadata.version('torch')} is installed; {by}"
    assert line.remedy == "pip install 'torch>=99,!=98.1,>=98'"


def test_what_an_extra_of_a_requirement_needs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    required(
        monkeypatch,
        breccia_bridges=["breccia-core[ml-dtypes]~=0.2.0", "not a requirement!"],
        breccia_core=["breccia-core[ml-dtypes]; extra == 'ml-dtypes'", "ml-dtypes>=0.5.1; extra == 'ml-dtypes'"],
    )
    absent(monkeypatch, "ml-dtypes", "ml_dtypes")
    assert found("requirements", "ml-dtypes").text == "not installed; breccia-bridges needs ml-dtypes>=0.5.1"
    assert not [f for f in examine() if f.section == NOT_INSTALLED]


def test_nothing_is_missing_where_every_declared_requirement_is_installed() -> None:
    assert not [f for f in examine() if f.section == "requirements"]
    for sibling in SIBLINGS:
        assert any(text.startswith("breccia-") for text in importlib.metadata.requires(sibling.distribution) or [])


def test_an_absent_extra_is_optional_and_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "jinja2")
    line = found(NOT_INSTALLED, "breccia-bridges[report]")
    assert line.status == OPTIONAL and line.text == "--report of convert and compare; without jinja2"
    assert line.remedy == install("breccia-bridges[report]")


def test_the_program_needs_its_own_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "packaging")
    line = found("extras", "breccia-core[cli]")
    assert (line.status, line.text) == (MISSING, "packaging not installed: the `breccia` command")


def test_the_last_line_says_whether_anything_is_wrong(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    absent(monkeypatch, "jinja2")
    code, out, _ = run("doctor")
    assert code == 0 and out.endswith("\nno problems found; what is optional need not be installed\n")
    head, _, optional = out.partition(f"\n{NOT_INSTALLED}\n")
    said = f"--report of convert and compare; without jinja2: {install('breccia-bridges[report]')}"
    assert optional.splitlines()[0] == f"  -       breccia-bridges[report]  {said}" and "breccia-bridges[report]" not in head
    monkeypatch.setattr(sys, "byteorder", "big")
    version = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.1.9" if name == "breccia-jax" else version(name))
    code, out, _ = run("doctor")
    assert code == 1
    assert out.endswith("\n2 problems found: byte order, breccia-jax; what is optional need not be installed\n")


def test_a_framework_that_is_there_without_its_plug_in_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_BLOCK", "torch")
    from breccia.dispatch import registry

    registry.reload()
    try:
        line = found("frameworks", "torch")
        assert line.status == NOTE and line.text.endswith(" is installed, but breccia-torch, which supports it, is not active")
        assert line.remedy == install("breccia-torch")
        assert found("plug-ins", "torch").remedy == "unset BRECCIA_BLOCK"
        assert found("system", "BRECCIA_BLOCK").text == "is set to 'torch', which changes how breccia runs"
        absent(monkeypatch, "torch")
        assert not [f for f in examine() if f.subject == "torch" and f.section == "frameworks"], "without torch it is no matter"
    finally:
        monkeypatch.delenv("BRECCIA_BLOCK")
        registry.reload()


def test_a_framework_that_a_plug_in_declares_and_nobody_installed_is_missing(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: None)
    absent(monkeypatch, "mlx")
    line = found("frameworks", "mlx")
    assert (line.status, line.text) == (MISSING, "mlx is not installed; a plug-in that is installed supports it")
    assert run("doctor")[0] == 1


@pytest.mark.parametrize("error", [RuntimeError("no\n driver"), SystemExit("no driver")])
def test_a_framework_that_fails_to_list_its_devices_is_a_problem(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def broken() -> list[str]:
        raise error

    monkeypatch.setattr(threads, "devices", broken)
    targets.load.cache_clear()
    try:
        line = found("frameworks", "numpy")
        assert line.status == PROBLEM
        assert line.text.endswith(f"but listing its devices failed: {type(error).__name__}: no driver")
        assert line.remedy == "pip install --force-reinstall numpy"
        code, out, _ = run("doctor")
        assert code == 1 and "\n1 problem found" in out
    finally:
        targets.load.cache_clear()


def test_a_distribution_of_another_minor_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.1.9" if name == "breccia-jax" else version(name))
    line = found("breccia", "breccia-jax")
    assert line.status == PROBLEM
    assert line.text == f"0.1.9, but breccia-core is {breccia.__version__}; both must be 0.2.*"
    assert line.remedy == install("breccia-jax", "--upgrade")


def test_install_commands_use_the_clone_if_there_is_one_and_the_index_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = ROOT
    assert install("breccia-torch") == f"pip install -e {clone}/breccia-torch"
    assert install("breccia-bridges[report]") == f"pip install -e '{clone}/breccia-bridges[report]'"
    monkeypatch.setattr(siblings, "__file__", str(tmp_path / "site-packages" / "breccia" / "siblings.py"))
    assert install("breccia-torch", "--upgrade") == "pip install --upgrade breccia-torch"
    assert install("breccia-bridges[report]") == "pip install 'breccia-bridges[report]'"


def test_all_declared_extras_are_listed() -> None:
    for extra in EXTRAS:
        distribution, _, name = extra.name.removesuffix("]").partition("[")
        project = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
        brought = [d.partition(">")[0].replace("-", "_") for d in project["optional-dependencies"][name]]
        assert [{"pyyaml": "yaml"}.get(package, package) for package in brought] == list(extra.modules)


# -- the older distribution with the same import name ----------------------------------------------------------------


def older(folder: Path, package: Path) -> None:
    """Write metadata of the older distribution `breccia`, as pip installs it, with files in `package`."""
    info = folder / "breccia-0.1.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breccia\nVersion: 0.1.3\n")
    (info / "RECORD").write_text("breccia/__init__.py,,\n")
    package.mkdir(exist_ok=True)


def test_no_older_distribution_is_reported_if_there_is_none() -> None:
    assert unrelated() is None
    assert not [f for f in examine() if f.subject == "breccia"]


def test_the_older_distribution_next_to_this_one_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    older(tmp_path, tmp_path / "breccia")
    monkeypatch.syspath_prepend(tmp_path)
    line = found("breccia", "breccia")
    assert line.status == PROBLEM
    assert line.text == (f"the older, unrelated distribution `breccia` 0.1.3 is installed as well, in {tmp_path / 'breccia'}")
    assert line.remedy == "pip uninstall breccia; " + install("breccia-core", "--force-reinstall", "--no-deps")
    code, out, _ = run("doctor")
    assert code == 1 and line.text in out


def test_the_successor_of_the_older_distribution_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "release" / "breccia" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (need,) = project["dependencies"]
    info = tmp_path / f"breccia-{project['version']}.dist-info"
    info.mkdir()
    header = f"Metadata-Version: 2.1\nName: breccia\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(f"{header}Requires-Dist: {need}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert unrelated() is None
    (info / "METADATA").write_text(header)  # the same without the dependency
    assert unrelated() is not None


def overwritten(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m breccia doctor` in an installation that the older distribution has overwritten."""
    site = tmp_path / "site"
    shutil.copytree(Path(breccia.__file__).parent, site / "breccia", ignore=shutil.ignore_patterns("__pycache__"))
    older(site, site / "breccia")
    (site / "breccia" / "__init__.py").write_text('__version__ = "0.1.3"\n')
    (site / "breccia" / "recipes.py").write_text("class Float8CurrentScaling: ...\n")
    isolated = f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = ['breccia', 'doctor']; import runpy; "
    return subprocess.run(
        [sys.executable, "-c", isolated + "runpy.run_module('breccia', run_name='__main__')"], capture_output=True, text=True
    )


def test_an_overwritten_installation_gives_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = overwritten(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: the older, unrelated distribution `breccia` 0.1.3 is installed in the same folder as breccia-core, each "
        "overwriting the other. Type: pip uninstall breccia; pip install --force-reinstall --no-deps breccia-core\n"
    )


def test_other_import_errors_still_show(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(Path(breccia.__file__).parent, site / "breccia", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "breccia" / "recipes.py").write_text("class Float8CurrentScaling: ...\n")
    script = f"import sys; sys.path.insert(0, {str(site)!r}); import runpy; runpy.run_module('breccia', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: cannot import name" in done.stderr


# -- bench -----------------------------------------------------------------------------------------------------------


#: The prefix of the NumPy kernels: compiled ones if a compiler was available.
NUMPY = "numpy" if missing("cpu") else "native"
CAST = f"{NUMPY}.cast"
#: Framework -> prefix of the kernels for `cast` and `dequantize` on its CPU arrays, if not the generic algorithm.
KERNELS = {"numpy": NUMPY, "torch": "torch.cpu", "mlx": "mlx.cpu"} | ({} if missing_for_jax("cpu") else {"jax": "jax.cpu"})
#: Framework -> the kernel for `matmul` of few rows on its CPU arrays, if not the composite.
MATMULS = (
    {"numpy": "numpy.matmul"}
    if missing_products("cpu")
    else {"numpy": "native.matmul", "torch": "torch.cpu.matmul", "jax": "jax.cpu.matmul", "mlx": "mlx.cpu.matmul"}
)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_bench_times_three_ops_and_reports_their_kernels(framework: str) -> None:
    timings = bench.measure(breccia.NVFP4BlockScaling(), framework, size=64, runs=3)
    assert [t.op for t in timings] == ["cast", "dequantize", "matmul"]
    st_bytes = 64 * 64 // 2 + 64 * 4 + 4
    assert [t.bytes for t in timings] == [64 * 64 * 4 + st_bytes] * 2 + [8 * bench.ROWS * 64 + st_bytes]
    for t in timings:
        assert len(t.seconds) == 3 and 0 < t.least <= t.to_dict()["median_s"] <= max(t.seconds)
        if t.op == "matmul":
            assert t.kernel == MATMULS.get(framework, "composite.matmul")
        else:
            assert t.kernel == f"{KERNELS.get(framework, 'reference')}.{t.op}"


def test_bench_prints_a_line_for_each_op(run: Run) -> None:
    code, out, err = run("bench", "mxfp8", "fp8_block,block_m=32", "--size", "64", "--runs", "2")
    assert (code, err) == (0, "")
    assert out.count(CAST) == 2 and "fp8_block,block_m=32" in out and "64x64 FP32 on numpy" in out
    code, out, _ = run("bench", "int4", "--size", "64", "--runs", "2", "--json")
    listed = json.loads(out)
    assert (listed["on"], listed["size"], listed["runs"], len(listed["timings"])) == ("numpy", 64, 2, 3)


@pytest.mark.parametrize("framework", jax_is_long(["numpy", "torch", "jax", "mlx"]))
def test_bench_matmul_times_the_framework_s_dense_products_in_turns(framework: str) -> None:
    recipes = [("int4", breccia.INT4Scaling()), ("mine", breccia.NVFP4BlockScaling())]
    found = bench.measure_products(recipes, framework, size=64, rows=(1, 3), runs=2)
    dense = ["dense float32"] if framework == "numpy" else ["dense float32", "dense bfloat16"]
    assert [(p.rows, p.arm) for p in found] == [(m, arm) for m in (1, 3) for arm in (*dense, "int4", "mine")]
    for p in found:
        assert len(p.seconds) == 2 and min(p.seconds) > 0
        kernel = MATMULS.get(framework, "composite.matmul")
        assert p.kernel == ("" if p.arm in dense else kernel)
    for m in (1, 3):
        base, *others = [p for p in found if p.rows == m]
        assert base.over == 1
        for p in others:
            assert p.over == pytest.approx(base.spread[1] / p.spread[1])


def test_bench_matmul_prints_a_line_for_each_weight_and_number_of_rows(run: Run) -> None:
    code, out, err = run("bench", "matmul", "int4", "mxfp8", "--size", "64", "--runs", "1", "--rows", "1,2,5")
    assert (code, err) == (0, "")
    assert out.count("dense float32") == out.count("int4") == out.count("mxfp8") == 3
    assert "rows x 64 by 64 x 64 on numpy, in turns" in out and out.count("1.00x") >= 3
    code, out, _ = run("bench", "matmul", "--size", "64", "--runs", "1", "--rows", "2", "--json")
    listed = json.loads(out)
    assert [p["arm"] for p in listed["products"]] == ["dense float32", "fp8_block", "mxfp8", "nvfp4", "int4"]
    assert {p["rows"] for p in listed["products"]} == {2} and listed["products"][0]["over_dense"] == 1


class Vendor:
    """A plug-in with three kernels for products of FP8 tensors on CPU tensors of torch: one runs only where it is named."""

    api = 1
    ran: ClassVar[list[str]] = []

    @breccia.hookimpl
    def breccia_kernels(self) -> list[breccia.Kernel]:
        block, home = breccia.Float8BlockScaling, f"{__name__}:Vendor"
        return [
            breccia.Kernel(
                "matmul", "torch", f"{home}.{name}", f"vendor.{name}", block, block, device="cpu", score=f"{home}.score_{name}",
                opt_in=name == "rough",
            )
            for name in ("slow", "fast", "rough")
        ]  # fmt: skip

    @staticmethod
    def score_slow(call: Any) -> float:
        return 2.0

    @staticmethod
    def score_fast(call: Any) -> float:
        return 1.0

    score_rough = score_fast

    @staticmethod
    def slow(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
        Vendor.ran.append("slow")
        return reference.matmul(a, b, options)

    @staticmethod
    def fast(a: Any, b: Any, options: ProductOptions = FLOAT32) -> Any:
        Vendor.ran.append("fast")
        return reference.matmul(a, b, options)

    rough = fast


def test_bench_matmul_on_a_gpu_times_every_kernel_of_two_tensors_against_the_dense_product_in_bf16(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = Plugin("vendor", "vendor", "1.0", "vendor")
    monkeypatch.setattr(frameworks, "current", Registry([*_installed(), (plugin, Vendor)], dict(os.environ)))
    monkeypatch.setattr(bench, "HOSTS", ())  # so CPU tensors stand in for a GPU's
    Vendor.ran.clear()
    recipes = [("fp8_block", breccia.Float8BlockScaling())]
    found = bench.measure_products(recipes, "torch:cpu", size=128, rows=(4,), runs=2)
    pair = "fp8_block x fp8_block"
    arms = ["dense float32", "dense bfloat16", "fp8_block", pair, f"{pair} (vendor.slow)"]
    assert [p.arm for p in found][:5] == arms and not any("rough" in p.arm for p in found)
    by_arm = {p.arm: p for p in found}
    assert by_arm[pair].kernel == "vendor.fast" and by_arm[f"{pair} (vendor.slow)"].kernel == "vendor.slow"
    assert by_arm["dense bfloat16"].over == 1 and {p.base for p in found} == {"dense bfloat16"}
    assert {"slow", "fast"} <= set(Vendor.ran)
    code, out, _ = run("bench", "matmul", "fp8_block", "--on", "torch:cpu", "--size", "128", "--runs", "1", "--rows", "4")
    assert (
        code == 0 and "over BF16" in out and "vendor.fast" in out and "the median of the framework's dense BF16 product" in out
    )


def test_bench_refuses_invalid_arguments(run: Run) -> None:
    for words, message in [
        (["--size", "0"], "error: Invalid value for '--size'"),
        (["--on", "jx"], "error: no framework 'jx'; did you mean 'jax'?"),
        (["--on", "torch:abacus"], "error: torch cannot use device 'abacus': "),
        (["--size", "99999999"], "error: Unable to allocate "),
        (["matmul", "--rows", "1,x"], "error: --rows takes numbers separated by commas; got '1,x'."),
        (["matmul", "--rows", "1,0"], "error: bench: rows is at least 1; got 0."),
        (["matmul", "--on", "jx"], "error: no framework 'jx'; did you mean 'jax'?"),
        (["matmul", "nvpf4"], "error: no recipe 'nvpf4'; did you mean 'nvfp4'?"),
        (["nvpf4"], "error: no recipe 'nvpf4'; did you mean 'nvfp4'?"),
    ]:
        code, out, err = run("bench", *words)
        assert code in (1, 2) and out == "" and err.startswith(message) and err.count("\n") == 1
    with pytest.raises(breccia.OptionError, match="bench: runs is at least 1; got 0"):
        bench.measure(breccia.INT4Scaling(), runs=0)


@pytest.mark.parametrize("what", [[], ["matmul"]])
def test_bench_refuses_devices_without_values(what: list[str], run: Run) -> None:
    code, out, err = run("bench", *what, "--on", "torch:meta", "--size", "64")
    assert code == 1 and out == "" and err.startswith("error: bench cannot run on torch:meta: ") and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="bench runs there")
def test_bench_on_a_missing_device_prints_one_line(run: Run) -> None:
    for words in (["--size", "8"], ["matmul", "--size", "8"]):
        code, out, err = run("bench", *words, "--on", "torch:cuda")
        assert (code, out) == (1, "") and err.startswith("error: torch cannot use device 'cuda': ") and err.count("\n") == 1


def test_bench_reports_a_missing_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "jax")
    with pytest.raises(ImportError, match="bench on jax needs jax, which is not installed: pip install jax"):
        bench.measure(breccia.INT4Scaling(), "jax", size=8, runs=1)
