"""Pages that moved: a hook of MkDocs that leaves a page at each old address, which leads to the new one."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

#: Old addresses, and the pages of docs/ that replace them.
MOVED = {
    "benchmarks": "measured/index.md",
    "accuracy": "measured/accuracy.md",
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>This page moved</title>
<link rel="canonical" href="{url}">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={url}">
<script>location.replace("{url}" + location.hash)</script>
</head>
<body><p>This page moved to <a href="{url}">{url}</a>.</p></body>
</html>
"""


def on_post_build(*, config: Any) -> None:
    """Write the pages at old addresses. Raises FileNotFoundError if a new page is not on the site."""
    site = Path(config["site_dir"])
    for old, page in MOVED.items():
        new = page.removesuffix("index.md").removesuffix(".md").rstrip("/")
        if not (site / new / "index.html").is_file():
            raise FileNotFoundError(
                f"docs/scripts/moved.py: {old} moved to {page}, which is not on the site; name the page there."
            )
        (site / old).mkdir(parents=True, exist_ok=True)
        url = posixpath.relpath(new, old) + "/"
        (site / old / "index.html").write_text(_PAGE.format(url=url), encoding="utf-8")
