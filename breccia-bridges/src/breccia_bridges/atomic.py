"""Files that appear complete or not at all: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import secrets
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """An unused path in the folder of `path`."""
    return path.with_name(f".breccia-{secrets.token_hex(8)}.tmp")


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 and replace an existing file.

    Lone surrogates, which names of tensors may contain and UTF-8 cannot encode, are written as escapes.
    """
    temporary = temporary_path(path)
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
