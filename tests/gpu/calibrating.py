"""Whether calibration on a GPU chooses codes as good as on a CPU, and what it takes there.

    python tests/gpu/calibrating.py MODEL TEXT TEST [--recipe nvfp4] [--methods gptq importance] [--device cuda]

MODEL: a folder of transformers or a GGUF file. The KL divergence of both conversions is measured on TEST, on the device. They
may differ by 2 %: sums in another order change some codes. Needs transformers, which machines with GPUs may lack.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import breccia
from breccia_bridges.calibration import Calibration

#: Tokens that calibration sees, and on which the divergence is measured.
OBSERVED, TESTED = 8192, 4096
#: The largest difference between devices, of the divergence.
MOST = 0.02


def ids_of(model: Path, text: Path, count: int) -> np.ndarray:
    calibration = Calibration.of(text, None, None)
    assert calibration is not None
    return calibration.ids(model).reshape(-1)[:count]


def decoded(values: Any, name: str) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(breccia.dequantize(values[name]), np.float32)


def measured(model: Path, ids: np.ndarray, tested: np.ndarray, recipe: str, method: str, device: str, on: str) -> Any:
    """(KL divergence of a conversion that is calibrated on `device`, its seconds). on: the device that measures."""
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder) / "out", time.perf_counter()
        report = breccia.bridges.convert(
            model, out, recipe, calibrate=ids, method=method, device=device, verify="none", max_memory="8GiB"
        )
        seconds = time.perf_counter() - begin
        values = breccia.bridges.load_checkpoint(out)
        changed = {
            t.name: lambda name=t.name: np.asarray(breccia.dequantize(values[name]), np.float32) for t in report.quantized
        }
        return breccia.bridges.divergences(model, tested, {"all": changed}, device=on).costs["all"], seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Calibration on a device beside calibration on a CPU.")
    for name in ("model", "text", "test"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--methods", nargs="*", default=["gptq", "importance"])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    ids, tested = ids_of(options.model, options.text, OBSERVED), ids_of(options.model, options.test, TESTED)
    apart = False
    for method in options.methods:
        costs: dict[str, float] = {}
        for device in (options.device, "cpu"):
            costs[device], seconds = measured(options.model, ids, tested, options.recipe, method, device, options.device)
            print(f"{options.recipe} {method} on {device}: KL {costs[device]:.4f}, {seconds:.1f} s", flush=True)
        difference = costs[options.device] / costs["cpu"] - 1
        print(f"{options.recipe} {method}: {100 * difference:+.2f} %", flush=True)
        apart |= abs(difference) > MOST
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
