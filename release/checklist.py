"""What comes before a release, in order: what this can check, it checks; the rest it prints.

    python release/checklist.py                # before the tag
    python release/checklist.py --built dist   # and what is in dist/
    python release/checklist.py --tag v0.2.0   # in the release workflow, on the tagged commit

Exits with the number of items that are not done.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
META = ROOT / "release" / "breccia" / "pyproject.toml"
#: What takes long or needs other machines, in this order.
BY_HAND = (
    "make check test test-rest: what CI runs",
    "make test-apart: each distribution alone, with the lowest versions too",
    "make slow: hours; the workflow `ci`, run by hand, does it",
    "bash tests/gpu/suite.sh on a machine with CUDA",
    "make dist test-dist, then this script with --built dist",
    "the workflow `release`, run by hand: wheels of all platforms, installed on all Pythons; it publishes nothing",
    "the index trusts release.yml and its environment `release` for each distribution (Trusted Publishing)",
    "git tag -s vX.Y.Z && git push origin vX.Y.Z: the workflow `release` publishes",
    "release/conda/recipe.yaml to conda-forge's feedstock, with the hashes of SHA256SUMS",
)


@dataclass(frozen=True)
class Item:
    """A line of the checklist. todo: what is left to do; empty if it is done."""

    text: str
    todo: str = ""


def projects() -> dict[str, dict[str, Any]]:
    """Distribution -> the `project` table of its pyproject.toml."""
    paths = [*ROOT.glob("breccia-*/pyproject.toml"), META]
    tables = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in paths]
    return {table["name"]: table for table in tables}


def version() -> str:
    """The version that is released: that of the import package."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', read("breccia-core/src/breccia/__init__.py"), re.MULTILINE)
    return str(found)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def git(*words: str) -> str:
    """The output of a git command; empty if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------------------------------------- what the tree says


def versions(tables: dict[str, dict[str, Any]], release: str) -> Iterator[Item]:
    """All distributions have one version, and ask for it of each other."""
    others = {name: table["version"] for name, table in tables.items() if table["version"] != release}
    yield Item(
        f"all distributions have version {release}",
        ", ".join(f"{name} has {found}: set {release}" for name, found in sorted(others.items())),
    )
    series = release.rpartition(".")[0]
    wrong = []
    for name, table in tables.items():
        allowed = {f"=={release}"} if name == "breccia" else {f"~={series}.0", ""}  # "" is the distribution's own extras
        for need in [*table["dependencies"], *chain(*table.get("optional-dependencies", {}).values())]:
            found = re.fullmatch(r"(breccia[\w-]*)(?:\[[\w,-]+\])?(.*)", need)
            if found and (found[2] not in allowed or (found[2] == "" and found[1] != name)):
                wrong.append(f"{name} depends on {need}: write {' or '.join(sorted(allowed - {''}))}")
    yield Item("dependencies on each other ask for this version", "; ".join(wrong))


def successor(tables: dict[str, dict[str, Any]]) -> Item:
    """The distribution `breccia` has every extra of core."""
    core, meta = (set(tables[name]["optional-dependencies"]) for name in ("breccia-core", "breccia"))
    lacks = ", ".join(sorted(core - meta))
    return Item("the distribution `breccia` has the extras of core", lacks and f"release/breccia/pyproject.toml lacks {lacks}")


def pages(release: str) -> Iterator[Item]:
    """The changelog has a date, and no page says that nothing is released."""
    heading = re.search(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    dated = re.fullmatch(rf"{re.escape(release)} \(\d{{4}}-\d\d-\d\d\)", heading[1]) if heading else None
    yield Item(
        "the changelog opens with this version and its date",
        "" if dated else f"CHANGELOG.md opens with `{heading[1] if heading else ''}`: write `{release} (YYYY-MM-DD)`",
    )
    saying = [
        page.relative_to(ROOT).as_posix()
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        if re.search(r"is not on a package index yet|Version \S+ is not released", page.read_text(encoding="utf-8"))
    ]
    yield Item("no page says that breccia is not released", ", ".join(saying))
    recipe = re.search(r'version: "(.+)"', read("release/conda/recipe.yaml"))
    found = recipe[1] if recipe else "none"
    yield Item("the conda recipe has this version", "" if found == release else f"release/conda/recipe.yaml has {found}")


def history(release: str, tag: str | None) -> Iterator[Item]:
    """The tree is committed, the tag is new or that of this version, and published vectors are as they were."""
    changed = git("status", "--porcelain")
    yield Item("everything is committed", changed and f"git status lists {len(changed.splitlines())} files")
    if tag is None:
        there = git("tag", "--list", f"v{release}")
        yield Item("the version is new", there and f"the tag {there} exists: raise the version")
    else:
        yield Item("the tag is that of the version", "" if tag == f"v{release}" else f"{tag} is not v{release}")
    last = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^" if tag else "HEAD")
    edited = last and git("diff", "--name-only", "--diff-filter=MD", last, "--", "docs/spec/vectors/")
    yield Item(
        "published golden vectors did not change",
        edited and f"changed since {last}: {' '.join(edited.split())}; add a set instead",
    )


# ---------------------------------------------------------------------------------------------- what was built


def built(folder: Path, release: str, names: set[str]) -> Iterator[Item]:
    """The folder has each distribution of this version, with its hash, and nothing else that would be published."""
    listed = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    files = {path.name: path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz"))}
    wrong = {name for name in listed.keys() ^ files.keys()}
    wrong |= {
        name for name in listed.keys() & files.keys() if hashlib.sha256(files[name].read_bytes()).hexdigest() != listed[name]
    }
    yield Item("SHA256SUMS has the hash of each file", ", ".join(sorted(wrong)))
    stems = {f"{name.replace('-', '_')}-{release}" for name in names}
    missing = [f"{stem}.tar.gz" for stem in sorted(stems) if f"{stem}.tar.gz" not in files]
    missing += [f"{stem}-*.whl" for stem in sorted(stems) if not any(name.startswith(f"{stem}-") for name in files)]
    lacks = ", ".join(missing)
    yield Item("each distribution has a wheel and a source distribution", lacks and f"{folder} lacks {lacks}")
    strange = [name for name in files if not any(name.startswith((f"{stem}-", f"{stem}.tar")) for stem in stems)]
    strange += [name for name in files if "-linux_" in name]  # the index takes no such wheel
    yield Item("nothing else is there", ", ".join(sorted(strange)))


def main() -> int:
    """Print the list; the number of items that are not done."""
    parser = argparse.ArgumentParser(description="What comes before a release, and what of it is done.")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="check what release/dist.py built there, too")
    parser.add_argument("--tag", help="the tag of this commit")
    given = parser.parse_args()
    tables, release = projects(), version()
    items = [*versions(tables, release), successor(tables), *pages(release), *history(release, given.tag)]
    if given.built:
        items += built(given.built, release, set(tables))
    print(f"breccia {release}")
    for item in items:
        print(f"  [{' ' if item.todo else 'x'}] {item.text}{f': {item.todo}' if item.todo else ''}")
    if given.tag is None:
        print("by hand:")
        for line in BY_HAND:
            print(f"  {line}")
    return sum(bool(item.todo) for item in items)


if __name__ == "__main__":
    sys.exit(main())
