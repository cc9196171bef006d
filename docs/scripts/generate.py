"""Fills the blocks of docs/ that programs know: what plug-ins declare, and what the program prints.

    python docs/scripts/generate.py           # writes them
    python docs/scripts/generate.py --check   # exits with 1 where a page shows anything else

A page asks for a block by `<!-- table: NAME -->` and `<!-- end -->`. listings.py has the tables, boards.py matrices and the
tables of the log, cards.py the tables of single recipes and engines, differences.py libraries on the golden vectors, looks.py
the data of pages with a program, specimens.py the tables of single formats, tutorial.py files, terminal.py the sessions
(`session-NAME`). benchmarks/draw.py draws the blocks of benchmarks.
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

for variable in [name for name in os.environ if name.startswith("BRECCIA_")]:
    del os.environ[variable]  # before the registry reads them: the pages show what there is without

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import boards  # noqa: E402
import cards  # noqa: E402
import differences  # noqa: E402
import listings  # noqa: E402
import looks  # noqa: E402
import specimens  # noqa: E402
import terminal  # noqa: E402
import tutorial  # noqa: E402
from harness.blocks import BLOCK, filled, pages_in  # noqa: E402

#: Blocks by name, but for sessions.
DECLARED = (
    listings.BLOCKS | boards.BLOCKS | cards.BLOCKS | differences.BLOCKS | looks.BLOCKS | specimens.BLOCKS | tutorial.BLOCKS
)
_SHOWN = 12


def pages(docs: Path) -> dict[Path, str]:
    """The pages that ask for blocks of ours, as they should be."""
    found = [page for page in pages_in(docs, drawn=False) if "<!-- table:" in page.read_text(encoding="utf-8")]
    declared = {f"session-{s.name}": s for s in terminal.sessions()}
    asked = {name for page in found for _, name, _, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    blocks = dict.fromkeys([*DECLARED, *declared], "")
    for page in found:
        filled(page, blocks)  # exits on a name that is none, before anything is run
    blocks |= {name: DECLARED[name]() for name in DECLARED if name in asked}
    # A session stands on what those before it wrote, so it is all or none.
    blocks |= dict(terminal.recorded(terminal.sessions())) if asked & set(declared) else {}
    return {page: filled(page, blocks | kept(page, blocks, declared), len(page.relative_to(docs).parts) - 1) for page in found}


def kept(page: Path, blocks: dict[str, str], declared: dict[str, terminal.Session]) -> dict[str, str]:
    """The sessions of a page that say what they said before, but for what differs from run to run."""
    found: dict[str, str] = {}
    for _, name, shown, _ in BLOCK.findall(page.read_text(encoding="utf-8")):
        session = declared.get(name)
        if session and terminal.comparable(session, shown) == terminal.comparable(session, blocks[name]):
            found[name] = f"{shown.strip()}\n"
    return found


def differences(page: Path, wanted: str) -> list[str]:
    """A line by block that is stale, and the first of its lines that differ."""
    said: list[str] = []
    now = BLOCK.findall(page.read_text(encoding="utf-8"))
    for (_, name, before, _), (_, _, after, _) in zip(now, BLOCK.findall(wanted), strict=True):
        if before != after:
            changed = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "page", "now", n=0, lineterm=""))[2:]
            said += [f"{page.name}: block {name!r} is stale", *(f"    {line}" for line in changed[:_SHOWN])]
            said += [f"    ... {len(changed) - _SHOWN} more lines"] * (len(changed) > _SHOWN)
    return said


def main(
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = ROOT / "docs",
    check: Annotated[bool, typer.Option(help="Write nothing; fail where a page differs.")] = False,
) -> None:
    """Fill the generated blocks of the documents."""
    wanted = pages(docs)
    if check:
        said = [line for page, text in wanted.items() for line in differences(page, text)]
        if said:
            sys.exit("\n".join([*said, "generate: run `python docs/scripts/generate.py` (`make docs`), and commit the pages."]))
        return
    for page, text in wanted.items():
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
