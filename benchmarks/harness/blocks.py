"""Blocks: the parts of the documents that benchmarks/draw.py and docs/scripts/generate.py write.

A page asks for one by `<!-- table: NAME -->` and `<!-- end -->`; what stands between is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: Path, blocks: Mapping[str, str]) -> str:
    """The page with its blocks replaced. Exits on a name that there is no block of, or a block that does not end."""
    program = Path(sys.argv[0]).stem
    text = page.read_text(encoding="utf-8")
    if text.count("<!-- table:") != len(BLOCK.findall(text)):
        sys.exit(f"{program}: {page.name} has a `<!-- table: NAME -->` without its `<!-- end -->`, or spelled otherwise.")

    def replaced(found: re.Match[str]) -> str:
        if found[2] not in blocks:
            sys.exit(f"{program}: {page.name} asks for a block {found[2]!r}; there are {', '.join(sorted(blocks))}.")
        return f"{found[1]}\n{blocks[found[2]]}\n{found[4]}"

    return BLOCK.sub(replaced, text)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = False) -> str:
    """A table in Markdown. numbers: all columns but the first are set to the right."""
    first = list(headings)
    lines = [first, ["---", *["---:" if numbers else "---"] * (len(first) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
