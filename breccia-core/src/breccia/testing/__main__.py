"""`python -m breccia.testing COMMAND`: `vectors` writes those of docs/spec/vectors.md, `agree` writes docs/agreement.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import CorruptFileError
from . import vectors


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m breccia.testing", description="What the conformance kit can be asked for.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("vectors", help="write the golden vectors, by the oracle (some tens of seconds)")
    command.add_argument("folder", type=Path, help=f"the folder of all sets; this one is its folder {vectors.VERSION}")
    command.set_defaults(run=_vectors)
    command = commands.add_parser("agree", help="compare with the neighbours that are installed (about a minute)")
    command.add_argument("folder", type=Path, nargs="?", default=Path("docs"), help="where the result and the page go (docs)")
    command.add_argument("--draw", action="store_true", help="measure nothing: draw the page from the result that is there")
    command.set_defaults(run=_agree)
    given = parser.parse_args()
    try:
        print(*given.run(given), sep="\n")
    except (FileExistsError, FileNotFoundError, CorruptFileError) as e:
        sys.exit(f"error: {e}")


def _vectors(given: argparse.Namespace) -> list[Path]:
    return [vectors.write(given.folder, vectors.files())]


def _agree(given: argparse.Namespace) -> list[Path]:
    from . import agree  # here, as neighbours are nobody else's concern

    return agree.write(given.folder, given.draw)


if __name__ == "__main__":
    main()
