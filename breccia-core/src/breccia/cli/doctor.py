"""Diagnoses the installation: what is installed, missing or wrong, and which commands fix it.

What something installed needs is missing; what nothing needs is optional, and its absence is no fault.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from .. import __version__, targets
from ..arrays.frameworks import Framework
from ..dispatch.registry import Plugin, registry
from ..siblings import CORE, EXTRAS, SIBLINGS, install, unrelated

#: The states of a finding. A problem makes results wrong, or makes part of breccia unusable; what is missing is needed by
#: something installed.
OK, OPTIONAL, NOTE, MISSING, PROBLEM = "ok", "optional", "note", "missing", "problem"
#: States with which `breccia doctor` exits with 1.
FAULTS = (MISSING, PROBLEM)
#: The section of what is not installed and needs not be.
NOT_INSTALLED = "optional, not installed"


@dataclass(frozen=True)
class Finding:
    """One line: subject, state, what was found, and the remedy if there is one."""

    section: str
    subject: str
    status: str
    text: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings about this installation, by section, the optional ones last. Imports the frameworks to list devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plug-ins set aside are listed below
        declarations = registry()
    missing = {line.subject: line for line in _requirements(declarations.plugins)}
    lines = [
        *_system(),
        *_distributions(missing),
        *_conflicting(),
        *(line for framework in declarations.frameworks.values() for line in _framework(framework, missing)),
        *_unsupported_frameworks(declarations.frameworks),
        *missing.values(),
        *_extras(missing),
        *_plugins(declarations.plugins),
    ]
    return sorted(lines, key=lambda line: line.section == NOT_INSTALLED)


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


def _distributions(missing: Collection[str]) -> Iterator[Finding]:
    series = __version__.rpartition(".")[0]
    for name in (CORE, *(sibling.distribution for sibling in SIBLINGS)):
        release = _version(name)
        if release is None:
            if name == CORE:
                yield Finding("breccia", name, NOTE, "not installed: it runs from PYTHONPATH", install(name))
        elif release.rpartition(".")[0] != series:
            text = f"{release}, but breccia-core is {__version__}; both must be {series}.*"
            yield Finding("breccia", name, PROBLEM, text, install(name, "--upgrade"))
        else:
            yield Finding("breccia", name, OK, release)
    for sibling in SIBLINGS:
        if _version(sibling.distribution) is None and sibling.distribution not in missing:
            yield Finding(NOT_INSTALLED, sibling.distribution, OPTIONAL, sibling.purpose, sibling.remedy)


def _conflicting() -> Iterator[Finding]:
    """An older, unrelated distribution with the same import name."""
    conflict = unrelated()
    if conflict is not None:
        yield Finding("breccia", "breccia", PROBLEM, conflict.text, conflict.remedy)


def _framework(framework: Framework, missing: Collection[str]) -> Iterator[Finding]:
    root = framework.package
    if not targets.installed(root):
        if root not in missing:
            text = f"{root} is not installed; a plug-in that is installed supports it"
            yield Finding("frameworks", framework.name, MISSING, text, f"pip install {root}")
        return
    text = _version(root) or "of unknown version"
    try:
        devices: list[str] = targets.load(framework.devices)() if framework.devices else []
    except (Exception, SystemExit) as e:
        line = f"{text}, but listing its devices failed: {type(e).__name__}: {' '.join(str(e).split())}"
        yield Finding("frameworks", framework.name, PROBLEM, line, f"pip install --force-reinstall {root}")
        return
    yield Finding("frameworks", framework.name, OK, "; ".join([text, *devices]))


def _unsupported_frameworks(known: dict[str, Framework]) -> Iterator[Finding]:
    """Installed frameworks that a breccia distribution which is not active supports."""
    for sibling in SIBLINGS:
        if sibling.arrays and sibling.plugin not in known and (here := _version(sibling.arrays[0])):
            text = f"{here} is installed, but {sibling.distribution}, which supports it, is not active"
            yield Finding("frameworks", sibling.plugin, NOTE, text, sibling.remedy)


def _requirements(plugins: list[Plugin]) -> Iterator[Finding]:
    """What installed distributions of plug-ins declare that they need, and have not: a finding by name."""
    needed: dict[str, list[tuple[str, Any]]] = {}
    for owner in dict.fromkeys([CORE, *(p.distribution for p in plugins if p.status != "blocked")]):
        for need in _unsatisfied(owner, {""}, set()):
            needed.setdefault(need.name, []).append((owner, need))
    ours = (CORE, *(sibling.distribution for sibling in SIBLINGS))
    for name, needs in needed.items():
        by = ", ".join(f"{owner} needs {need.name}{need.specifier}" for owner, need in needs)
        here = _version(name)
        limits = ",".join(dict.fromkeys(str(need.specifier) for _, need in needs if need.specifier))
        remedy = install(name) if name in ours else shlex.join(["pip", "install", f"{name}{limits}"])
        yield Finding("requirements", name, MISSING, f"{f'{here} is' if here else 'not'} installed; {by}", remedy)


def _unsatisfied(owner: str, extras: set[str], seen: set[tuple[str, str]]) -> Iterator[Any]:
    """The requirements of a distribution with these extras that nothing installed satisfies, each once."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement

        declared = requires(owner) or []
    except (ImportError, PackageNotFoundError):  # `_extras` reports a missing packaging
        return
    for text in declared:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if (owner, text) in seen or not (need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras)):
            continue
        seen.add((owner, text))
        here = _version(need.name)
        if here is None and (need.name == CORE or targets.installed(need.name.replace("-", "_"))):
            continue  # there without metadata
        if here is None or not (need.name.startswith("breccia-") or need.specifier.contains(here, prereleases=True)):
            yield need  # `_distributions` compares versions of breccia's own
        elif need.extras:
            yield from _unsatisfied(need.name, need.extras, seen)


def _extras(missing: Collection[str]) -> Iterator[Finding]:
    for extra in EXTRAS:
        absent = [module for module in extra.modules if not targets.installed(module)]
        if not absent:
            versions = ", ".join(f"{module} {_version(module) or ''}".strip() for module in extra.modules)
            yield Finding("extras", extra.name, OK, f"{versions}: {extra.purpose}")
        elif extra is EXTRAS[0]:  # the program that is running
            yield Finding("extras", extra.name, MISSING, f"{', '.join(absent)} not installed: {extra.purpose}", extra.remedy)
        elif _version(extra.name.partition("[")[0]) and not {module.replace("_", "-") for module in absent} <= set(missing):
            text = f"{extra.purpose}; without {', '.join(absent)}"
            yield Finding(NOT_INSTALLED, extra.name, OPTIONAL, text, extra.remedy)


def _plugins(plugins: list[Plugin]) -> Iterator[Finding]:
    for plugin in plugins:
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
