"""What a recipe for each tensor gains at equal bytes: KL divergence per token of a mix against that of one recipe.

    python benchmarks/bench_target_bits.py MODEL TEST [--calibrate TEXT] [--method gptq] [--bits 4.5]

MODEL is a folder or GGUF file that transformers opens; TEST and TEXT are texts, or .npy files of token ids. The model is
converted to `--bits` and to `--uniform`, by the same method and calibration; the KL divergence is that from MODEL itself, on
the first 1,536 tokens of TEST. A second mix leaves out recipes that hold values of MODEL exactly, as those
on the grid of a GGUF type.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import breccia
from breccia_bridges.calibration import Calibration
from breccia_bridges.target_bits import LADDER

#: Tokens of the test.
TESTED = 1536


def main(
    model: Path,
    test: Path,
    calibrate: Annotated[Path | None, typer.Option(help="Text whose activations choose recipes and codes.")] = None,
    method: Annotated[str | None, typer.Option(help="Of --calibrate.")] = None,
    bits: Annotated[float, typer.Option(help="Bits per parameter of the mix.")] = 4.5,
    uniform: Annotated[str, typer.Option(help="The one recipe.")] = "nvfp4,scale_rule=mse",
    max_memory: str = "4GiB",
) -> None:
    """Print a line for each conversion: bits, KL divergence, its share of the one recipe's, seconds, and the recipes."""
    calibration = Calibration.of(test, None, None)
    assert calibration is not None
    ids = calibration.ids(model)
    ids = ids[:TESTED] if ids.ndim == 1 else ids
    inexact = [spec for spec in LADDER if "offset=bias" not in spec]
    ways: dict[str, dict[str, Any]] = {
        "one recipe": {"recipe": uniform},
        "mix": {"recipe": None, "target_bits": bits},
        "mix, no zero-points": {"recipe": inexact, "target_bits": bits},
    }
    options: dict[str, Any] = {"calibrate": calibrate, "method": method, "max_memory": max_memory, "verify": "none"}
    base = None
    print(f"{'':20s} {'bits':>6s} {'KL':>8s} {'share':>6s} {'s':>6s}  recipes")
    for name, way in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            report = breccia.bridges.convert(model, Path(folder) / "out", **way, **options)
            seconds = time.perf_counter() - start
            values = breccia.bridges.load_checkpoint(Path(folder) / "out")
            changed = {t.name: decoding(values, t.name) for t in report.quantized}
            cost = breccia.bridges.divergences(model, ids, {"all": changed}).costs["all"]
        base = base or cost
        counts = report.mix.counts if report.mix else {uniform: len(report.quantized)}
        listed = ", ".join(f"{count} {spec}" for spec, count in counts.items())
        print(
            f"{name:20s} {report.bits_per_parameter:6.3f} {cost:8.4f} {cost / base:6.3f} {seconds:6.1f}  {listed}", flush=True
        )


def decoding(values: Any, name: str) -> Any:
    """Makes the FP32 numbers of a value."""

    def made() -> np.ndarray:
        value = values[name]
        return np.asarray(breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value, np.float32)

    return made


if __name__ == "__main__":
    typer.run(main)
