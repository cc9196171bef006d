"""Diagnoses the installation: what is installed, missing or wrong, and which commands fix it."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .. import __version__, targets
from ..arrays.frameworks import Framework
from ..dispatch.registry import Plugin, registry
from ..siblings import CORE, EXTRAS, SIBLINGS, install, unrelated

#: The states of a finding. A problem makes results wrong, or makes part of breccia unusable.
OK, MISSING, NOTE, PROBLEM = "ok", "missing", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One line: subject, state, what was found, and the remedy if there is one."""

    section: str
    subject: str
    status: str
    text: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings about this installation, by section. Imports the installed frameworks to list devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plug-ins set aside are listed below
        found = registry()
    return [
        *_system(),
        *_distributions(),
        *_conflicting(),
        *(line for framework in found.frameworks.values() for line in _framework(framework)),
        *_absent_frameworks(found.frameworks),
        *_extras(),
        *_plugins(found.plugins),
    ]


def _system() -> Iterator[Finding]:
    yield Finding("system", "python", OK, f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")
    yield Finding("system", "platform", OK, f"{platform.platform()}, {os.cpu_count()} CPUs")
    if sys.byteorder != "little":
        text = "big-endian: breccia's files are little-endian, and breccia does not swap bytes"
        yield Finding("system", "byte order", PROBLEM, text, "use a little-endian host (x86-64, arm64)")
    for name in ("BRECCIA_BLOCK", "BRECCIA_PREFER", "BRECCIA_TRACE", "BRECCIA_CHECK"):
        if os.environ.get(name):
            yield Finding(
                "system", name, NOTE, f"is set to {os.environ[name]!r}, which changes how breccia runs", f"unset {name}"
            )


def _distributions() -> Iterator[Finding]:
    series = __version__.rpartition(".")[0]
    for name in (CORE, *(sibling.distribution for sibling in SIBLINGS)):
        found = _version(name)
        if found is None:
            yield Finding("breccia", name, MISSING, "not installed", install(name))
        elif found.rpartition(".")[0] != series:
            text = f"{found}, but breccia-core is {__version__}; both must be {series}.*"
            yield Finding("breccia", name, PROBLEM, text, install(name, "--upgrade"))
        else:
            yield Finding("breccia", name, OK, found)


def _conflicting() -> Iterator[Finding]:
    """An older, unrelated distribution with the same import name."""
    found = unrelated()
    if found is not None:
        yield Finding("breccia", "breccia", PROBLEM, found.text, found.remedy)


def _framework(framework: Framework) -> Iterator[Finding]:
    root = framework.package
    if not targets.installed(root):
        yield Finding("frameworks", framework.name, MISSING, f"{root} is not installed", f"pip install {root}")
        return
    text = _version(root) or "of unknown version"
    try:
        devices: list[str] = targets.load(framework.devices)() if framework.devices else []
    except (Exception, SystemExit) as e:
        line = f"{text}, but listing its devices failed: {type(e).__name__}: {' '.join(str(e).split())}"
        yield Finding("frameworks", framework.name, PROBLEM, line, f"pip install --force-reinstall {root}")
        return
    yield Finding("frameworks", framework.name, OK, "; ".join([text, *devices]))


def _absent_frameworks(known: dict[str, Framework]) -> Iterator[Finding]:
    """Frameworks that a breccia distribution which is not active supports."""
    for sibling in SIBLINGS:
        if sibling.arrays and sibling.plugin not in known:
            here = _version(sibling.arrays[0])
            text = (
                f"{here} is installed, but {sibling.distribution}, which supports it, is not active"
                if here
                else "not installed"
            )
            yield Finding("frameworks", sibling.plugin, NOTE if here else MISSING, text, sibling.remedy)


def _extras() -> Iterator[Finding]:
    for extra in EXTRAS:
        absent = [module for module in extra.modules if not targets.installed(module)]
        if absent:
            text = f"{', '.join(absent)} not installed: {extra.purpose}"
            yield Finding("extras", extra.name, MISSING, text, extra.remedy)
        else:
            found = ", ".join(f"{module} {_version(module) or ''}".strip() for module in extra.modules)
            yield Finding("extras", extra.name, OK, f"{found}: {extra.purpose}")


def _plugins(found: list[Plugin]) -> Iterator[Finding]:
    for plugin in found:
        if plugin.status == "blocked":
            yield Finding("plug-ins", plugin.name, NOTE, f"{plugin.status}: {plugin.reason}", "unset BRECCIA_BLOCK")
        elif plugin.status != "active":
            remedy = f"pip install --upgrade {plugin.distribution}, or pip uninstall it"
            yield Finding("plug-ins", plugin.name, PROBLEM, f"{plugin.status}: {plugin.reason}", remedy)
        elif plugin.reason:
            text = f"{plugin.reason}, in every process that uses breccia"
            yield Finding("plug-ins", plugin.name, NOTE, text, f"tell the authors of {plugin.distribution}")
        elif plugin.distribution not in (CORE, *(sibling.distribution for sibling in SIBLINGS)):
            text = f"{plugin.distribution} {plugin.version}, {len(plugin.declares)} declarations"
            yield Finding("plug-ins", plugin.name, OK, text)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution.replace("_", "-"))
    except PackageNotFoundError:
        return None
