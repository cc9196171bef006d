"""Test each distribution alone: build its wheel, install it into a clean environment, and run its tests there.

    python tests/tools/apart.py                             # every distribution of the tree
    python tests/tools/apart.py breccia-core breccia-jax    # these
    python tests/tools/apart.py --lowest breccia-core       # with the lowest versions that its dependencies allow

An environment has the wheel, the breccia distributions that it depends on, and their declared requirements. So an undeclared
import or a file missing from the wheel fails there; an editable installation hides both. Needs only Python with pip.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[2]
CORE = "breccia-core"
VECTORS = "breccia-vectors"  # no plug-in, and without breccia
TOOLS = ("pytest", "hypothesis")

#: Files that test a distribution beside those of the folder named after it. They skip what is not installed.
ALSO_TESTED: dict[str, tuple[str, ...]] = {
    CORE: ("across/test_layers.py", "across/test_ops.py"),
    "breccia-torch": (
        "across/test_layers.py", "across/test_ops.py", "across/test_parity.py", "across/test_training.py",
        "core/tensors/test_storage.py",
    ),
    "breccia-jax": ("across/test_layers.py", "across/test_ops.py", "across/test_parity.py"),
    "breccia-mlx": ("across/test_layers.py", "across/test_ops.py", "across/test_parity.py"),
    "breccia-native": ("core/kernels/test_numpy_kernels.py",),
}  # fmt: skip
#: Files of these folders that test several distributions at once: only `make test` runs them.
TOGETHER = (
    "bridges/test_agreement.py", "bridges/test_dlpack.py", "bridges/test_from_foreign.py", "bridges/test_gpu_bridges.py",
    "bridges/test_other_bridges.py", "core/cli/test_doctor.py", "core/dispatch/test_explain.py",
    "core/testing/test_vectors.py", "jax/test_jax_cpu.py", "torch/test_hf.py", "triton/test_cuda_kernel.py",
)  # fmt: skip
#: Breccia distributions that the tests need in addition to the dependencies.
ALSO_INSTALLED = {
    "breccia-bridges": ("breccia-torch", "breccia-native"),  # without compiled kernels, each conversion warns
    "breccia-torch": ("breccia-bridges",),
    "breccia-mlx": ("breccia-bridges", "breccia-native"),
    "breccia-native": ("breccia-bridges",),
    "breccia-triton": ("breccia-jax", "breccia-bridges"),
    VECTORS: (CORE,),  # for conftest.py
}
#: Packages whose module has another name.
IMPORTED = {"pyyaml": "yaml"}
#: Modules that a manifest must not load.
HEAVY = ("numpy", "torch", "jax", "mlx", "triton", "safetensors", "ml_dtypes", "typer", "rich")


class Fault(Exception):
    """A distribution has a fault."""


# ---------------------------------------------------------------------------------------------- what the tree declares


@cache
def project(distribution: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distributions() -> list[str]:
    """The distributions of the tree, each after its dependencies."""
    names = sorted(path.parent.name for path in ROOT.glob("breccia-*/pyproject.toml"))
    return sorted(names, key=lambda name: (len(with_dependencies(name)), name))


def package(distribution: str) -> Path:
    """The folder of the import package."""
    (found,) = (path.parent for path in (ROOT / distribution / "src").glob("*/__init__.py"))
    return found


def extras(distribution: str) -> dict[str, list[str]]:
    """Extras with third-party requirements -> those requirements."""
    declared: dict[str, list[str]] = project(distribution).get("optional-dependencies", {})
    return {name: needs for name, needs in declared.items() if not any(need.startswith("breccia-") for need in needs)}


def with_dependencies(distribution: str) -> set[str]:
    """The distribution and the breccia distributions that it depends on."""
    needed = (re.split(r"[\[~<>=! ]", need)[0] for need in project(distribution)["dependencies"])
    return {distribution}.union(*(with_dependencies(name) for name in needed if name.startswith("breccia-")))


def third_party(distribution: str, optional: bool) -> list[str]:
    """Third-party requirements of the distribution and its breccia dependencies; with those of extras if `optional`."""
    found: list[str] = []
    for name in sorted(with_dependencies(distribution)):
        found += project(name)["dependencies"]
        declared: dict[str, list[str]] = project(name).get("optional-dependencies", {}) if optional else {}
        found += [need for needs in declared.values() for need in needs]
    return [need for need in found if not need.startswith("breccia-")]


def bare(requirement: str) -> str:
    return re.split(r"[\[~<>=!; ]", requirement)[0]


def lowest(requirements: list[str]) -> list[str]:
    """Constraints that pin each `name>=version` to that version, except test tools, for which no version is promised."""
    found = {m[1]: m[2] for r in requirements if (m := re.match(r"([\w-]+)(?:\[.*\])?>=([\w.]+)", r))}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in TOOLS]


def tests(distribution: str, folder: Path) -> list[str]:
    """The test files of the distribution, by their paths in a folder. Raises Fault if there are none."""
    own = distribution.removeprefix("breccia-")
    found = {path.relative_to(folder).as_posix() for path in (folder / own).rglob("test_*.py")}
    if not found:
        raise Fault(f"there are no tests of {distribution} in tests/{own}.")
    also = ALSO_TESTED.get(distribution, ())
    if missing := [file for file in (*also, *TOGETHER) if not (folder / file).is_file()]:
        raise Fault(f"tests/tools/apart.py names tests that are not there: {', '.join(missing)}.")
    return sorted({*found, *also} - set(TOGETHER))


# ---------------------------------------------------------------------------------------------- wheels


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises Fault with its output if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        raise Fault(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done


def build(distribution: str, wheels: Path, scratch: Path) -> Path:
    """Build the wheel from a copy of the source, since build tools leave files behind."""
    source = scratch / "source" / distribution
    shutil.copytree(ROOT / distribution, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "*.so"))
    run(sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", wheels, source)
    (found,) = wheels.glob(f"{distribution.replace('-', '_')}-*.whl")
    return found


def check_wheel(distribution: str, wheel: Path) -> None:
    """Raise Fault unless the wheel contains the package, its types, its license and its description."""
    folder = package(distribution)
    wanted = {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".c", ".h", ".cpp", ".so")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        info = next(name.partition("/")[0] for name in held if ".dist-info/" in name)
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode("utf-8"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode("utf-8") if f"{info}/entry_points.txt" in held else ""
    strange = {name for name in held if name.partition("/")[0] not in (folder.name, info)}
    readme = (ROOT / distribution / "README.md").read_text(encoding="utf-8").strip()
    faults = {
        f"it lacks {', '.join(sorted(wanted - held))}": wanted - held,
        f"it holds {', '.join(sorted(strange))} as well": strange,
        "it lacks py.typed": f"{folder.name}/py.typed" not in held,
        "it lacks the license": not any(name.startswith(info) and name.endswith("LICENSE") for name in held),
        "its description is not its README": readme.splitlines()[0] not in metadata.get_payload(),
        "it declares no plug-in": distribution not in (CORE, VECTORS) and "[breccia]" not in entry_points,
    }
    if found := [fault for fault, there in faults.items() if there]:
        raise Fault(f"{wheel.name}: {'; '.join(found)}.")


# ---------------------------------------------------------------------------------------------- environments


class Environment:
    """A virtual environment, and the constraints under which anything is installed into it."""

    def __init__(self, folder: Path, wheels: Path, constraints: list[str]) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        self._constraints = folder / "constraints.txt"
        self._constraints.write_text("\n".join(constraints), encoding="utf-8")
        self._wheels = wheels

    def install(self, *requirements: Any) -> None:
        options = ("-q", "--disable-pip-version-check", "--find-links", self._wheels, "-c", self._constraints)
        run(sys.executable, "-m", "pip", "--python", self.python, "install", *options, *requirements)

    def run(self, *words: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BRECCIA_", "PYTHON"))}
        return run(self.python, *words, cwd=cwd, env=kept)


def constraints(distribution: str, low: bool) -> list[str]:
    """The constraints of development; if `low`, the lowest versions that the distribution allows."""
    if low:
        return lowest(third_party(distribution, optional=True))
    common = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in common if line and not line.startswith("#")]


def check_alone(distribution: str, wheels: Path, scratch: Path, low: bool) -> str:
    """Install and test one distribution. Returns a line about the result; raises Fault."""
    work = scratch / f"{distribution}{'-lowest' if low else ''}"
    environment = Environment(work / "env", wheels, constraints(distribution, low))
    needs = third_party(distribution, optional=False)
    environment.install("--no-deps", *(wheel_of(name, wheels) for name in sorted(with_dependencies(distribution))))
    if needs:
        environment.install(*needs)
    lacks = [bare(need) for need in third_party(distribution, optional=True) if need not in needs]
    probed = environment.run(
        "-W", "error", SCRIPT, "--probe", distribution, *sorted(with_dependencies(distribution)), "--lacks", *lacks, cwd=work
    )
    files = tests(distribution, scratch / "tests")
    shutil.copytree(scratch / "tests", work / "tests")
    shutil.copy(ROOT / "pyproject.toml", work)
    also = [wheel_of(name, wheels) for name in ALSO_INSTALLED.get(distribution, ())]
    optional = [f"{name}[{','.join(extras(name))}]" for name in sorted(with_dependencies(distribution)) if extras(name)]
    environment.install(*also, *optional, *TOOLS)
    return f"{probed.stdout.strip()}; {tested(environment, distribution, work, files, low)}"


def wheel_of(distribution: str, wheels: Path) -> Path:
    (found,) = wheels.glob(f"{distribution.replace('-', '_')}-*.whl")
    return found


#: Packages that tests use and no distribution declares; a skip reason begins with the name.
UNDECLARED = ("playwright",)
#: What torch's CPU wheels lack and its CUDA wheels depend on; a skip reason names it.
NVRTC = "NVRTC"
#: Prefix for the reason of an expected failure, which reports list among the skipped tests.
EXPECTED = "expected to fail: "
#: Skip reasons of `pytest.importorskip`, and of breccia's kit for a framework whose plug-in is not installed.
ABSENT = re.compile(r"(?:could not import '[\w.]+': No module named|no plug-in declares the framework) '([\w.]+)'")


def tested(environment: Environment, distribution: str, work: Path, files: list[str], low: bool) -> str:
    """Run the tests. A test may be skipped only because a package is not installed in the environment."""
    # Old packages use functions that newer dependencies deprecate.
    warnings = ("-W", "ignore::DeprecationWarning") if low else ()
    report = work / "report.xml"
    paths = [f"tests/{file}" for file in files]
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not (leftover or exhaustive or long or slow or gpu or together)",
        f"--junitxml={report}",
    )
    try:
        environment.run("-m", "pytest", *options, *warnings, *paths, cwd=work)
    except Fault as e:
        raise Fault(f"tests of {distribution} alone:\n{e}") from e
    cases = ElementTree.parse(report).getroot().iter("testcase")
    skipped: dict[str, int] = {}
    count = 0
    for case in cases:
        count += 1
        found = case.find("skipped")
        if found is not None:
            reason = (EXPECTED if found.get("type") == "pytest.xfail" else "") + (found.get("message") or "")
            if reason == "collection skipped":  # a whole file: its reason is in the text
                absent = ABSENT.search(found.text or "")
                reason = absent[0] if absent else found.text or reason
            skipped[reason] = skipped.get(reason, 0) + 1
    present = set(environment.run(SCRIPT, "--present", cwd=work).stdout.split())
    for reason, times in skipped.items():
        absent = ABSENT.search(reason)
        name = absent[1].partition(".")[0] if absent else reason.partition(" ")[0]
        known = absent or name in UNDECLARED or NVRTC in reason or reason.startswith(EXPECTED)
        if not known or name in present:
            raise Fault(f"{times} tests of {distribution} alone were skipped: {reason}")
    said = "".join(f", {times} not ({reason})" for reason, times in sorted(skipped.items()))
    return f"{count - sum(skipped.values())} tests passed{said}"


# ---------------------------------------------------------------------------------------------- inside an environment


def probe(distribution: str, family: list[str], lacks: list[str]) -> str:
    """Import every module of the wheel, without optional packages installed. Raises Fault."""
    if distribution != VECTORS:
        probe_plugins(family)
    optional = {IMPORTED.get(name.lower(), name.replace("-", "_").lower()) for name in lacks} | {"markupsafe"}
    name = "breccia" if distribution == CORE else distribution.replace("-", "_")
    found = importlib.import_module(name)
    if "site-packages" not in (found.__file__ or ""):
        raise Fault(f"{name} is imported from {found.__file__}, which is no installation.")
    imported, missing = 0, set[str]()
    for module in pkgutil.walk_packages(found.__path__, f"{name}."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
            imported += 1
        except ImportError as e:
            root = (e.name or "").partition(".")[0].lower()
            if root not in optional:
                raise Fault(f"{module.name} imports {e.name}, which {distribution} declares nowhere.") from e
            missing.add(root)
    return f"{imported} modules imported" + (f", others need {', '.join(sorted(missing))}" if missing else "")


def probe_plugins(family: list[str]) -> None:
    """Raise Fault unless the plug-ins of these distributions are found and light."""
    import breccia

    plugins = {p.distribution: p for p in breccia.plugins()}
    if set(plugins) != set(family):
        raise Fault(f"plug-ins of {sorted(plugins)} are found; installed are {sorted(family)}.")
    if wrong := [f"{p.title} is {p.status}: {p.reason}" for p in plugins.values() if p.status != "active"]:
        raise Fault("; ".join(wrong))
    if heavy := [name for name in HEAVY if name in sys.modules]:
        raise Fault(f"manifests load {', '.join(heavy)}.")


def present() -> set[str]:
    """Top-level modules that can be imported."""
    return {module.name for module in pkgutil.iter_modules()}


# ---------------------------------------------------------------------------------------------- the program


def main() -> int:
    parser = argparse.ArgumentParser(description="Test each distribution alone, from built wheels in clean environments.")
    parser.add_argument("names", nargs="*", help="distributions; by default all of the tree")
    parser.add_argument("--lowest", action="store_true", help="with the lowest versions of what they depend on")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which stays")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--present", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lacks", nargs="*", default=(), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(probe(given.names[0], given.names[1:], list(given.lacks)))
        return 0
    if given.present:
        print(*present())
        return 0
    known = distributions()
    if unknown := set(given.names) - set(known):
        parser.error(f"no distribution {', '.join(sorted(unknown))}; the tree has {', '.join(known)}")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.keep or Path(temporary)
        return check(given.names or known, scratch, given.lowest)


def check(names: list[str], scratch: Path, low: bool) -> int:
    """Build all wheels, and test the distributions `names`. Returns the number of faulty ones."""
    wheels = scratch / "wheels"
    wheels.mkdir(parents=True)
    wrong = 0
    shutil.copytree(ROOT / "tests", scratch / "tests", ignore=shutil.ignore_patterns("__pycache__"))  # a snapshot
    for distribution in distributions():
        check_wheel(distribution, build(distribution, wheels, scratch))
    for distribution in names:
        started = time.monotonic()
        try:
            said = check_alone(distribution, wheels, scratch, low)
        except Fault as e:
            said, wrong = f"FAULT: {e}", wrong + 1
        print(f"{distribution}{' (lowest versions)' if low else ''}: {said} ({time.monotonic() - started:.0f} s)", flush=True)
    return wrong


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Fault as e:
        sys.exit(f"apart: {e}")
