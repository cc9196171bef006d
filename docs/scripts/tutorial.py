"""The files of the plug-ins that the tutorials walk through, as they stand in tests/third_party."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

ACME = Path(__file__).resolve().parents[2] / "tests" / "third_party" / "acme-breccia"
VOLT = ACME.parent / "volt-breccia" / "src" / "volt_breccia"
_LANGUAGES = {".py": "python", ".toml": "toml"}


def shown(path: Path) -> str:
    """A file as a block of code."""
    return f"```{_LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}```\n"


def tree() -> str:
    """The folder of the distribution."""
    files = sorted(p.relative_to(ACME) for p in ACME.rglob("*") if p.suffix in _LANGUAGES)
    return "```text\n" + "\n".join(f"{ACME.name}/{file.as_posix()}" for file in files) + "\n```\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "acme-tree": tree,
    "acme-pyproject": partial(shown, ACME / "pyproject.toml"),
    "acme-plugin": partial(shown, ACME / "src" / "acme_breccia" / "plugin.py"),
    "acme-cuda": partial(shown, ACME / "src" / "acme_breccia" / "cuda.py"),
    "acme-npu": partial(shown, ACME / "src" / "acme_breccia" / "npu.py"),
    "acme-bridge": partial(shown, ACME / "src" / "acme_breccia" / "bridge.py"),
    "volt-plugin": partial(shown, VOLT / "plugin.py"),
    "volt-checks": partial(shown, VOLT / "checks.py"),
    "volt-kernels": partial(shown, VOLT / "kernels.py"),
    "acme-test": partial(shown, ACME / "tests" / "test_conformance.py"),
}
