"""Plug-ins of one module, of tests/third_party, installed for some tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS

from breccia.dispatch import registry


def source_of(name: str) -> Path:
    """The folder of the plug-in's module."""
    return TESTS / "third_party" / f"{name}-breccia" / "src"


@contextmanager
def installed(name: str, folder: Path) -> Generator[Any]:
    """The module `{name}_breccia` of a plug-in, which is installed until the end. folder: an empty one, for its metadata."""
    info = folder / f"{name}_breccia-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-breccia\nVersion: 0.1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[breccia]\n{name} = {name}_breccia\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(source_of(name)))
        importlib.invalidate_caches()
        registry.reload()
        yield importlib.import_module(f"{name}_breccia")
    del sys.modules[f"{name}_breccia"]
    registry.reload()
