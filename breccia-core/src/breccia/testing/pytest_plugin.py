"""The report of conformance tests in a pytest run: a header, and the number of laws by outcome.

The `pytest11` entry point loads this module in every pytest run where breccia-core is installed. It imports only the standard
library, and prints nothing unless the run has tests of `breccia.testing.conformance`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Property of a conformance test's report: the plug-in's name.
PROPERTY = "breccia.conformance"
#: Property that counts, by place, the decoded values below 2^-126 that came back as zeros.
FLUSHED = "breccia.flushed"

_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def header() -> list[str]:
    """Versions of breccia, the plug-ins and the frameworks; and the devices of imported frameworks."""
    from .. import __version__, targets
    from ..dispatch.registry import registry

    known = registry()
    frameworks: list[str] = []
    for framework in known.frameworks.values():
        version = _version(framework.package)
        devices: list[str] = []
        if framework.package in sys.modules and framework.devices:
            devices = targets.load(framework.devices)()
        frameworks.append(f"{framework.name} {version or 'absent'}" + (f" ({'; '.join(devices)})" if devices else ""))
    plugins = [f"{p.name} {p.version}" + ("" if p.status == "active" else f" ({p.status})") for p in known.plugins]
    numerics = sys.modules["breccia.formats"].NUMERICS
    return [
        f"breccia {__version__}, numerics contract {numerics}; plug-ins: {', '.join(plugins)}",
        f"frameworks: {', '.join(frameworks)}; ml_dtypes {_version('ml_dtypes') or 'absent'}",
    ]


def pytest_report_collectionfinish(items: list[Any]) -> list[str]:
    """The header, if the run has conformance tests."""
    plugins = dict.fromkeys(name for item in items if (name := getattr(getattr(item, "function", None), PROPERTY, None)))
    return [f"conformance of {', '.join(plugins)}", *header()] if plugins else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The number of laws by plug-in and outcome; and each reason for a skip, with its count."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[tuple[str, str]] = Counter()
    flushed: Counter[str] = Counter()
    for outcome in _OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            properties: dict[str, Any] = dict(getattr(report, "user_properties", ()))
            plugin = properties.get(PROPERTY)
            if plugin is not None:
                counts[plugin][outcome] += 1
                flushed.update(properties.get(FLUSHED, {}))
                if outcome == "skipped":
                    reasons["skipped", _reason(report)] += 1
                elif outcome == "xfailed":
                    reasons["known to fail", report.wasxfail.removeprefix("reason: ")] += 1
    if not counts:
        return
    terminalreporter.section("breccia conformance")
    for line in header():
        terminalreporter.line(line)
    for plugin, outcomes in counts.items():
        terminalreporter.line(f"{plugin}: " + ", ".join(f"{n} {outcome}" for outcome in _OUTCOMES if (n := outcomes[outcome])))
    for (what, reason), count in reasons.most_common():
        terminalreporter.line(f"  {what}, {count}: {reason}")
    for place, count in flushed.items():
        terminalreporter.line(f"  {place}: {count} decoded values below 2^-126 came back as zeros, which the contract allows")


def _reason(report: Any) -> str:
    return " ".join(str(report.longrepr[2]).removeprefix("Skipped: ").split())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
