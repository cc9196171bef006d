"""Where `convert` may write: checks that nothing else is destroyed, and that what is written has a place."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from breccia import UnsupportedError

from .checkpoint import INDEX, has_gguf
from .remote_path import RemotePath, is_remote, lexists
from .text import size


def location(path: Path) -> Path:
    """The absolute path, with parent folders resolved; a link as the last component is kept. A URL is what it is."""
    if is_remote(path):
        return path
    absolute = path.absolute()
    if absolute.name in ("", ".."):
        return Path(os.path.realpath(absolute))
    return Path(os.path.realpath(absolute.parent), absolute.name)


def is_folder(src: Path, files: list[Path], dst: Path) -> bool:
    """Is what becomes of a source a folder?

    That of a folder is one, and that of a GGUF file, beside whose weights a config and a tokenizer are made, unless
    the destination is named as a file of weights.
    """
    return src.is_dir() or (has_gguf(files[0]) and dst.suffix != ".safetensors")


def check_destination(src: Path, files: list[Path], dst: Path, force: bool, one: str = "") -> None:
    """Check, before anything is read, that the destination can be written without destroying other data.

    one: the suffix of the one file that a dialect has, whatever the source is.
    """
    folder, suffix = not one and is_folder(src, files, dst), one or ".safetensors"
    if overlap := _overlap(src, files, dst):
        wrong = overlap
    elif not folder and dst.is_dir():
        wrong = f"is a folder but {'the dialect writes' if one else 'the source is'} a file; give a name that ends in {suffix}"
    elif not one and src.is_dir() and dst.suffix == suffix:
        wrong = "names a file but the source is a folder; give the name of a folder"
    elif not folder and dst.suffix != suffix:
        wrong = f"does not end in {suffix}; add the suffix"
    elif not folder and not one and len(files) > 1:
        wrong = f"names a file, but the source has {len(files)}; give the name of a folder"
    else:
        wrong = ""
    if wrong:
        raise UnsupportedError(f"{dst} {wrong}.", path=str(dst))
    if is_remote(dst):
        return
    if not dst.parent.is_dir():
        raise FileNotFoundError(f"cannot write {dst}: there is no folder {dst.parent}; create it first.")
    if not os.access(dst.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {dst}: the folder {dst.parent} is read-only; choose another one.")
    check_taken(dst, force, folder)


def _overlap(src: Path, files: list[Path], dst: Path) -> str:
    """Why one of the source and the destination is or contains the other, or the current folder; empty if it does not."""
    if is_remote(dst) and str(dst).startswith(("http:", "https:")):
        return "is on a web server, where breccia does not write; choose another destination"
    if is_remote(src) and is_remote(dst):
        if src.samefile(dst):
            return "is the source; choose another destination"
        if src in dst.parents and src.is_dir():
            return f"lies inside the source {src}; choose a destination outside it"
        return f"contains the source {src}; choose another destination" if dst in src.parents else ""
    if is_remote(dst):
        return ""
    if within(Path.cwd(), dst):
        return "is or contains the current folder; choose a folder or file inside it"
    if is_remote(src):
        return ""
    if dst.exists() and dst.samefile(src):
        return "is the source; choose another destination"
    if within(dst, src) or within(dst.parent, src):
        return f"lies inside the source {src}; choose a destination outside it"
    return f"contains the source {src}; choose another destination" if any(within(p, dst) for p in (src, *files)) else ""


def check_taken(dst: Path, force: bool, folder: bool) -> None:
    """Refuse to replace an existing destination, unless `force` is set and it is a file, a link or a checkpoint."""
    if not (_has_files(dst) if isinstance(dst, RemotePath) else lexists(dst)):
        return
    if folder and dst.exists() and not dst.is_dir():
        raise FileExistsError(f"{dst} is a file but the source is a folder; choose another name.")
    if not force:
        raise FileExistsError(f"{dst} exists; choose another name, or replace it: force=True (--force).")
    if dst.is_symlink():
        return
    if not dst.is_dir() and not dst.is_file():
        raise FileExistsError(f"{dst} is neither a file nor a folder; choose another name.")
    if dst.is_dir() and os.path.ismount(dst):
        raise FileExistsError(f"{dst} is a mount point, which cannot be replaced; choose a folder in it.")
    if dst.is_dir() and not (dst / INDEX).exists() and not any(dst.glob("*.safetensors")):
        raise FileExistsError(
            f"{dst} does not look like a checkpoint (it contains no .safetensors file), so --force does not replace it; remove "
            "it yourself, or choose another name."
        )


def _has_files(path: RemotePath) -> bool:
    """Is it a file, or a folder with other than hidden names, under which an unfinished conversion is?"""
    path.refresh()
    return any(not one.name.startswith(".") for one in path.iterdir()) if path.is_dir() else path.exists()


def check_space(dst: Path, needed: int) -> None:
    """Raise OSError where the disk has less than `needed` bytes for what is written before it replaces anything."""
    free = shutil.disk_usage(dst.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{size(needed)} are needed and {size(free)} free; choose another disk", str(dst))


def within(path: Path, folder: Path) -> bool:
    """Is `path`, links resolved, `folder` or something in it?"""
    real = Path(os.path.realpath(path))
    return folder.exists() and any(p.exists() and p.samefile(folder) for p in (real, *real.parents))
