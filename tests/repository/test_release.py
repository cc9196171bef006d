"""What release/ says of the distributions is so, and its checks find what is wrong."""

from __future__ import annotations

import hashlib
import importlib
import io
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

import breccia

RELEASE = ROOT / "release"
DAY = 86400


@pytest.fixture
def checklist(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded("checklist", monkeypatch)


@pytest.fixture
def dist(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded("dist", monkeypatch)


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A script of release/, forgotten afterwards."""
    monkeypatch.syspath_prepend(RELEASE)
    yield importlib.import_module(name)
    del sys.modules[name]


# -- versions --------------------------------------------------------------------------------------------------------


def test_all_distributions_have_one_version_and_ask_for_it(checklist: ModuleType) -> None:
    tables = checklist.projects()
    assert checklist.version() == breccia.__version__
    assert [item.todo for item in checklist.versions(tables, breccia.__version__)] == ["", ""]
    assert checklist.successor(tables).todo == ""


def test_the_checklist_names_what_has_another_version(checklist: ModuleType) -> None:
    tables = {
        "breccia": {"version": "0.3.0", "dependencies": ["breccia-core~=0.3.0"], "optional-dependencies": {}},
        "breccia-core": {"version": "0.3.0", "dependencies": ["numpy>=2.0"], "optional-dependencies": {"torch": ["x"]}},
        "breccia-torch": {"version": "0.2.0", "dependencies": ["breccia-core[ml-dtypes]~=0.2.0"]},
    }
    one, each_other = checklist.versions(tables, "0.3.0")
    assert one.todo == "breccia-torch has 0.2.0: set 0.3.0"
    assert each_other.todo == (
        "breccia depends on breccia-core~=0.3.0: write ==0.3.0; "
        "breccia-torch depends on breccia-core[ml-dtypes]~=0.2.0: write ~=0.3.0"
    )
    assert checklist.successor(tables).todo == "release/breccia/pyproject.toml lacks torch"


def test_the_distribution_breccia_holds_the_files_of_core() -> None:
    link = RELEASE / "breccia" / "src"
    assert link.is_symlink() and link.resolve() == ROOT / "breccia-core" / "src"


def test_what_links_of_a_distribution_lead_to_is_built_with_it(dist: ModuleType, tmp_path: Path) -> None:
    link = ROOT / "breccia-vectors" / "src" / "breccia_vectors" / "spec"
    assert link.is_symlink() and link.resolve() == ROOT / "docs" / "spec"
    dist.exported(tmp_path)
    copied = tmp_path / link.relative_to(ROOT)
    assert copied.is_symlink() and {path.name for path in copied.iterdir()} == {path.name for path in link.iterdir()}
    assert not (tmp_path / "docs" / "index.md").exists()


# -- the recipe for conda, and the workflows -------------------------------------------------------------------------


def test_the_conda_recipe_asks_for_what_the_distributions_ask_for(checklist: ModuleType) -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((RELEASE / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    tables = checklist.projects()
    core = tables["breccia-core"]["optional-dependencies"]
    names = {"torch": "pytorch", "ml-dtypes": "ml_dtypes"}
    assert recipe["context"]["version"] == breccia.__version__
    for output in recipe["outputs"][:-1]:  # the last, `breccia`, has no files and no source
        name = output["package"]["name"]
        table = tables[name]
        wanted = {"python >=3.11"} if name != "breccia-native" else {"python"}
        for need in [*table["dependencies"], *(core["cli"] if name == "breccia-core" else [])]:
            if need.startswith("breccia-core"):
                wanted.add('${{ pin_subpackage("breccia-core", upper_bound="x.x") }}')
                extras = re.findall(r"\[(.+)\]", need)
                wanted |= {core[extra][0].replace("ml-dtypes", "ml_dtypes").replace(">=", " >=") for extra in extras}
            else:
                bare, least = need.split(">=")
                wanted.add(f"{names.get(bare, bare)} >={least}")
        assert set(output["requirements"]["run"]) == wanted, name


def test_workflows_that_publish_use_actions_by_hash() -> None:
    for name in ("release.yml", "wheels.yml"):
        text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
        used = re.findall(r"uses: (.+)", text)
        assert used
        for action in used:
            assert action.startswith("./") or re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_cibuildwheel_builds_one_wheel_for_the_lowest_python() -> None:
    table = tomllib.loads((ROOT / "breccia-native" / "pyproject.toml").read_text(encoding="utf-8"))
    lowest = table["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert table["tool"]["cibuildwheel"]["build"] == f"cp{lowest}-*"
    assert f'"py_limited_api": "cp{lowest}"' in (ROOT / "breccia-native" / "setup.py").read_text(encoding="utf-8")


# -- builds ----------------------------------------------------------------------------------------------------------


def archive(names: list[str], time: int, owner: str) -> bytes:
    """A source distribution as setuptools writes it: in the order of the disk, with the dates and the owner of the build."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        folder = tarfile.TarInfo("x-1")
        folder.type, folder.mtime = tarfile.DIRTYPE, time
        tar.addfile(folder)
        for name in names:
            member = tarfile.TarInfo(f"x-1/{name}")
            member.size, member.mtime, member.uname, member.mode = len(name), time, owner, 0o664
            tar.addfile(member, io.BytesIO(name.encode()))
    return stream.getvalue()


def test_source_distributions_of_two_builds_have_the_same_bytes(dist: ModuleType) -> None:
    first, second = archive(["b", "a"], 10 * DAY, "root"), archive(["a", "b"], 20 * DAY, "someone")
    assert first != second
    made = dist.dated(first, 5 * DAY)
    assert made == dist.dated(second, 5 * DAY)
    with tarfile.open(fileobj=io.BytesIO(made)) as tar:
        members = [(m.name, m.mtime, m.mode, m.uname, tar.extractfile(m).read()) for m in tar.getmembers()]  # type: ignore[union-attr]
    assert members == [("x-1/a", 5 * DAY, 0o644, "", b"a"), ("x-1/b", 5 * DAY, 0o644, "", b"b")]


def test_a_wheel_that_lacks_an_extension_is_refused(dist: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "src" / "x"
    package.mkdir(parents=True)
    for name in ("fast.pyi", "other.pyi", "lazy.pyi", "lazy.py"):
        (package / name).touch()
    wheel = tmp_path / "x-1-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("x/fast.abi3.so", "")
    with pytest.raises(SystemExit, match=r"lacks the compiled other: the compiler failed, or there is none\.$"):
        dist.check_compiled(tmp_path, wheel)


def test_the_checklist_finds_what_is_wrong_in_a_folder_of_distributions(checklist: ModuleType, tmp_path: Path) -> None:
    for name in ("a_b-1.0.0.tar.gz", "a_b-1.0.0-cp311-abi3-linux_x86_64.whl", "c-1.0.0.tar.gz", "c-0.9.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(name.encode())
    good = hashlib.sha256(b"c-1.0.0.tar.gz").hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{good}  c-1.0.0.tar.gz\n{good}  a_b-1.0.0.tar.gz\n")
    hashes, complete, strange = checklist.built(tmp_path, "1.0.0", {"a-b", "c"})
    assert hashes.todo == "a_b-1.0.0-cp311-abi3-linux_x86_64.whl, a_b-1.0.0.tar.gz, c-0.9.0-py3-none-any.whl"
    assert complete.todo == f"{tmp_path} lacks c-1.0.0-*.whl"
    assert strange.todo == "a_b-1.0.0-cp311-abi3-linux_x86_64.whl, c-0.9.0-py3-none-any.whl"
