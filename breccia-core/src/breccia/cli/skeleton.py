"""`breccia plugin new`: writes a new plug-in's distribution from the files in templates/plugin."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from .. import __version__
from ..dispatch.registry import registry
from ..errors import OptionError

_TEMPLATES = Path(__file__).parent / "templates" / "plugin"
_SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def write_plugin(name: str, parent: Path = Path()) -> Path:
    """Write the distribution `NAME-breccia` into a new folder of that name in `parent`; returns the folder.

    The distribution is installable. It has a recipe, a NumPy kernel, and the test that checks both with `breccia.testing`.

    Raises OptionError for a name that is invalid or taken, FileExistsError if the folder exists.
    """
    check_name(name)
    folder = parent / f"{name.replace('_', '-')}-breccia"
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists and is not overwritten; choose another name or another --dir.")
    for path, text in files(name).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
    return folder


def files(name: str, description: str = "") -> dict[str, str]:
    """The files of the plug-in `name`, by their paths in its folder."""
    distribution, package = f"{name.replace('_', '-')}-breccia", f"{name}_breccia"
    release = ".".join(__version__.split(".")[:2]) + ".0"
    words = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "recipe": "".join(word.capitalize() for word in name.split("_")) + "Scaling",
        "version": release,
        "description": description or f"The plug-in {name!r} of breccia",
    }
    contents: dict[str, str] = {}
    for file in sorted(_TEMPLATES.rglob(f"*{_SUFFIX}")):
        path = file.relative_to(_TEMPLATES).as_posix().removesuffix(_SUFFIX).replace("src/package/", f"src/{package}/")
        contents[path] = Template(file.read_text(encoding="utf-8")).substitute(words)
    return contents


def check_name(name: str) -> None:
    """Raise OptionError unless `name` is valid for a new plug-in, its recipe and its package."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise OptionError(
            f"a plug-in's name has lowercase letters a-z, digits and single underscores between them, such as 'acme' or "
            f"'acme_npu'; got {name!r}.",
            name=name,
        )
    known = registry()
    for what, taken in (
        ("plug-in", [p.name for p in known.plugins]),
        ("recipe", [n for r in known.recipes.values() for n in (r.name, *r.aliases)]),
    ):
        if name in taken:
            raise OptionError(f"the name {name!r} is taken by a {what} that is installed here; choose another.", name=name)
