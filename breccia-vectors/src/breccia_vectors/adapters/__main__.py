"""`python -m breccia_vectors.adapters [LIBRARY...]` runs libraries on the vectors and prints their reports."""

from __future__ import annotations

import argparse
import sys

from . import LIBRARIES, NotInstalled, run


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m breccia_vectors.adapters", description="Run other libraries on the golden vectors, and report."
    )
    known = {library.module: library for library in LIBRARIES}
    parser.add_argument("library", nargs="*", help=f"{', '.join(known)}; by default those that are installed")
    parser.add_argument("--format", action="append", default=[], help="a format by its name, as `mxfp4,scale_rule=floor`")
    parser.add_argument("--reduce", action="store_true", help="look for the smallest input that shows each difference")
    said = parser.parse_args()
    if unknown := [name for name in said.library if name not in known]:
        parser.error(f"no adapter is called {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in said.library] or [library for library in LIBRARIES if library.version]
    if not chosen:
        sys.exit(f"error: none of {', '.join(known)} is installed; install one, and 'breccia-vectors[adapters]'")
    try:
        for library in chosen:
            for _, report in run(library, said.format, reduce=said.reduce):
                print(report)
    except NotInstalled as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
