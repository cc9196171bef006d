"""Laws of a manifest: it loads, imports little, and its object references resolve."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from ... import targets
from ...dispatch.hookspecs import Bridge
from ...dispatch.registry import KINDS, Plugin
from ..compare import expect
from .law import Law, Subject, each

#: What a manifest may import in addition to the standard library and its own package.
_ALLOWED = {"breccia", "pluggy"}


def laws(subject: Subject) -> Iterator[Law]:
    """The laws about the manifest of a plug-in."""
    yield from each("manifest", subject.plugin.name, (it_is_active,), subject.plugin)
    if subject.plugin.status != "active":  # nothing else can be tested
        return
    checks = (it_imports_only_breccia_and_the_standard_library, it_declares_the_same_each_time)
    yield from each("manifest", subject.plugin.name, checks, subject.plugin)
    for kind in subject.declared:
        for declared in subject.of(kind):
            for field, target in _targets(declared):
                yield from each(kind, f"{declared.name}.{field}", (the_object_reference_exists,), declared, target)


def it_is_active(plugin: Plugin) -> None:
    expect(plugin.status == "active", f"{plugin.title} is {plugin.status}: {plugin.reason}")
    expect(bool(plugin.declares), f"{plugin.title} declares nothing; is each hook in {plugin.module} marked @breccia.hookimpl?")


def it_imports_only_breccia_and_the_standard_library(plugin: Plugin) -> None:
    """Each process that uses breccia imports the manifest, whether it needs the plug-in or not."""
    script = f"import json, sys, breccia.dispatch.registry; before = set(sys.modules); import {plugin.module}; "
    script += "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    expect(run.returncode == 0, f"`import {plugin.module}` fails in a fresh process: {run.stderr[-500:]}")
    own = plugin.module.partition(".")[0]
    loaded = json.loads(run.stdout.splitlines()[-1])
    heavy = [m for m in loaded if m not in sys.stdlib_module_names and m not in _ALLOWED | {own}]
    expect(
        not heavy,
        f"importing {plugin.module} also imports {', '.join(heavy)}; import it in the modules that the object references name",
    )


def it_declares_the_same_each_time(plugin: Plugin) -> None:
    """The registry reads manifests again when the environment changes."""
    manifest = import_module(plugin.module)
    for hook in KINDS:
        implementation = getattr(manifest, hook, None)
        if implementation is not None:
            first, second = (tuple(implementation()) for _ in range(2))
            expect(first == second, f"{hook} of {plugin.module} returned {first!r}, then {second!r}")


def the_object_reference_exists(declared: Any, target: str) -> None:
    """Located in the Python source without importing it; without source, by importing it."""
    absent = [m for m in declared.requires if not targets.installed(m)] if isinstance(declared, Bridge) else []
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed")
    place = targets.locate(target)
    if not place.rpartition(":")[2].isdigit():
        try:
            targets.load(target)
        except Exception as e:
            raise AssertionError(f"{target} cannot be found: {place}; {type(e).__name__}: {e}") from e


_TARGETS = (
    "target",
    "available",
    "accepts",
    "score",
    "plan",
    "from_plain",
    "to_plain",
    "ops",
    "devices",
    "device",
    "container",
    "opaque",
    "capability",
)


def _targets(declared: Any) -> Iterator[tuple[str, str]]:
    """(field, object reference) pairs of a declaration."""
    for field in _TARGETS:
        value = getattr(declared, field, None)
        if isinstance(value, str) and ":" in value:
            yield field, value
