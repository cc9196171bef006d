"""`python -m breccia`, and the `breccia` command."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

from .siblings import install, unrelated

#: Objects made, less those freed, before Python looks for cycles: modules make many times its default, and free none.
_OBJECTS = 1 << 16


def main() -> None:
    """Run the command line, or exit with the command that installs its dependencies."""
    gc.set_threshold(_OBJECTS)
    try:
        try:
            for module in ("rich", "typer"):
                import_module(module)
        except ImportError as e:
            sys.exit(f"breccia: the command line needs {e.name}, which is not installed: {install('breccia-core[cli]')}")
        try:
            from .cli.main import run
            from .cli.streams import reserve_descriptors
        except ImportError:
            stranger = unrelated()
            if stranger is None:
                raise
            sys.exit(f"error: {stranger.text}. Type: {stranger.remedy}")

        reserve_descriptors()
        run()
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        # The interpreter ends with collections that go through all objects: a quarter of the time of a short command.
        gc.freeze()


if __name__ == "__main__":
    main()
