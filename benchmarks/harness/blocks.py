"""Blocks: the parts of the documents that benchmarks/draw.py and docs/scripts/generate.py write.

A page asks for one by `<!-- table: NAME -->` and `<!-- end -->`; what stands between is replaced. Either all
blocks of a page are drawn from results, or none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

#: The folders and pages of docs/ whose blocks are drawn from results, by benchmarks/draw.py.
DRAWN = ("measured", "kernels", "training.md", "training-jax.md", "recipes/rotations.md", "recipes/search.md")
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


#: The target of a relative link.
_RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])")


def pages_in(docs: Path, drawn: bool) -> list[Path]:
    """The pages that are drawn from results, or all others."""
    pages = {page: page.relative_to(docs) for page in sorted(docs.rglob("*.md"))}
    return [page for page, path in pages.items() if any(map(path.is_relative_to, DRAWN)) == drawn]


def filled(page: Path, blocks: Mapping[str, str], depth: int = 0) -> str:
    """The page with its blocks replaced. Exits on a name that there is no block of, or a block that does not end.

    depth: how many folders below docs/ the page is; links of blocks are written as for a page directly in docs/.
    """
    program = Path(sys.argv[0]).stem
    text = page.read_text(encoding="utf-8")
    if text.count("<!-- table:") != len(BLOCK.findall(text)):
        sys.exit(f"{program}: {page.name} has a `<!-- table: NAME -->` without its `<!-- end -->`, or spelled otherwise.")

    def replaced(found: re.Match[str]) -> str:
        if found[2] not in blocks:
            sys.exit(f"{program}: {page.name} asks for a block {found[2]!r}; there are {', '.join(sorted(blocks))}.")
        block = blocks[found[2]]
        return f"{found[1]}\n{block if block.startswith('```') else _RELATIVE.sub('../' * depth, block)}\n{found[4]}"

    return BLOCK.sub(replaced, text)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = False) -> str:
    """A table in Markdown. numbers: all columns but the first are set to the right."""
    first = list(headings)
    lines = [first, ["---", *["---:" if numbers else "---"] * (len(first) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
