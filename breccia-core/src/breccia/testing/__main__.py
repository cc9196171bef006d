"""`python -m breccia.testing vectors FOLDER` writes the golden vectors of docs/spec/vectors.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import vectors


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m breccia.testing", description="Commands of breccia's conformance kit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("vectors", help="write the golden vectors, computed by the oracle (takes tens of seconds)")
    command.add_argument(
        "folder", type=Path, help=f"the folder of all sets; this set is written to its subfolder {vectors.VERSION}"
    )
    arguments = parser.parse_args()
    try:
        print(vectors.write(arguments.folder, vectors.files()))
    except (FileExistsError, FileNotFoundError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
