"""A record of what libraries decoded, for docs/serving.md: the file that BRECCIA_WRITTEN names, if it names one."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path


def record(dialect: str, recipe: str, library: str, loader: str, outcome: str) -> None:
    """Add a row, or replace that of the dialect and recipe. library: a distribution, or "" for a definition."""
    if (name := os.environ.get("BRECCIA_WRITTEN")) is None:
        return
    file = Path(name)
    listed = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"versions": {}, "rows": []}
    if library:
        listed["versions"][library] = importlib.metadata.version(library)
    rows = [row for row in listed["rows"] if (row["dialect"], row["recipe"]) != (dialect, recipe)]
    rows.append({"dialect": dialect, "recipe": recipe, "library": library, "loader": loader, "outcome": outcome})
    listed["rows"] = sorted(rows, key=lambda row: row["dialect"])
    file.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
