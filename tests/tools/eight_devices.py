"""Checks on eight devices of one CPU. JAX fixes its number of devices at start, so they run in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

COUNT = 8


def report(checks: Sequence[Callable[[], None]]) -> None:
    """Run every check in this process; print the error of each by its name, as JSON."""
    import jax

    assert len(jax.devices()) == COUNT, jax.devices()
    found: dict[str, str] = {}
    for check in checks:
        try:
            check()
            found[check.__name__] = ""
        except Exception:  # of any check, assertions too: the tests report it
            found[check.__name__] = traceback.format_exc()
    print(json.dumps(found))


def failures(file: str, checks: str = "CHECKS") -> dict[str, str]:
    """Run a list of checks of a test file in a process with eight devices. Returns the errors of those that fail by name."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={COUNT}"
    run = subprocess.run(
        [sys.executable, "-c", f"import eight_devices, runpy; eight_devices.report(runpy.run_path({file!r})[{checks!r}])"],
        cwd=Path(__file__).parent,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return {name: error for name, error in json.loads(run.stdout.splitlines()[-1]).items() if error}
