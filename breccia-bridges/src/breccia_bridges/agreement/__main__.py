"""`python -m breccia_bridges.agreement` writes docs/agreement.json and docs/agreement.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from breccia import CorruptFileError

from . import table


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m breccia_bridges.agreement",
        description="Compare breccia's bytes with those of the libraries that are installed (about a minute).",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs"), help="folder of the result and the page (docs)")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the page from the existing result")
    arguments = parser.parse_args()
    try:
        print(*table.write(arguments.folder, arguments.draw), sep="\n")
    except (FileNotFoundError, CorruptFileError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
