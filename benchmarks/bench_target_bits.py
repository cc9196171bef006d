"""What a recipe for each tensor gains at equal bytes: KL divergence per token of a mix against that of one recipe.

    python benchmarks/bench_target_bits.py MODEL TEST [--calibrate TEXT] [--method gptq] [--bits 4.5] --out benchmarks/results

MODEL is a folder or GGUF file that transformers opens; TEST and TEXT are texts, or .npy files of token ids. The model is
converted to `--bits` and to `--uniform`, by the same method and calibration; the KL divergence is that from MODEL itself, on
the first 1,536 tokens of TEST. A second mix leaves out recipes that hold values of MODEL exactly, as those
on the grid of a GGUF type.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from harness import Benchmark, Result, Table, program, provenance, table
from harness.commands import known
from harness.tables import bits as of_bits

import breccia
from breccia_bridges.calibration import Calibration
from breccia_bridges.target_bits import LADDER

#: Tokens of the test and of the calibration.
TESTED, OBSERVED = 1536, 4096
ONE = "one recipe"
WAYS = (ONE, "mix", "mix, no zero-points")
#: The method of a conversion without a text.
PLAIN = "none"


def mixes(result: Result) -> Table:
    """What one recipe and mixes of several lose, by the method that chose their codes."""
    base = {row["method"]: row["kl"] for row in result["rows"] if row["way"] == ONE}
    columns: dict[str, Any] = {
        "calibration": "method",
        "conversion": "way",
        "bits/param": lambda row: of_bits(round(row["bits"], 3)),
        "KL per token": lambda row: f"{row['kl']:.4f}",
        "of one recipe's": lambda row: f"{row['kl'] / base[row['method']]:.2f}" if row["method"] in base else "",
        "tensors": lambda row: ", ".join(f"{count} `{spec}`" for spec, count in row["recipes"].items()),
    }
    options = result["options"]
    observed = max(row["observed"] for row in result["rows"])
    note = (
        f"KL divergence per token, in nats, from {options['model']}'s decoded weights, mean of {options['tested']} tokens"
        f"{f'; calibration: {observed} tokens of another text' if observed else ''}. Bits of the tensors that are quantized, "
        f"scales included. Without calibration recipes are chosen by squared error. Weights of a Q4_1 file lie on the grid "
        f"of INT4 with a bias for each 32, so the mix that may use it holds some layers exactly."
    )
    return table("target-bits", columns, result["rows"], note)


BENCHMARK = Benchmark("target-bits", {"target-bits": mixes}, ("method", "way"))


def _ids(model: Path, text: Path, count: int) -> np.ndarray:
    """The first tokens of a text."""
    calibration = Calibration.of(text, None, None)
    assert calibration is not None
    ids = calibration.ids(model).reshape(-1)[:count]
    if len(ids) < count:
        raise SystemExit(f"{text} has {len(ids)} tokens; {count} are needed. Pass a longer text.")
    return ids


def decoding(values: Any, name: str) -> Any:
    """Makes the FP32 numbers of a value."""

    def made() -> np.ndarray:
        value = values[name]
        return np.asarray(breccia.dequantize(value) if isinstance(value, breccia.ScaledTensor) else value, np.float32)

    return made


@program
def main(
    model: Path,
    test: Path,
    calibrate: Annotated[Path | None, typer.Option(help="Text whose activations choose recipes and codes.")] = None,
    method: Annotated[str | None, typer.Option(help="Of --calibrate; gptq by default.")] = None,
    bits: Annotated[float, typer.Option(help="Bits per parameter of the mix.")] = 4.5,
    uniform: Annotated[str, typer.Option(help="The one recipe.")] = "nvfp4,scale_rule=mse",
    ways: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; repeat for several. Default: all.")] = None,
    max_memory: str = "4GiB",
) -> Iterator[Result]:
    """KL divergence of one recipe and of mixes at equal bytes."""
    chosen = known(ways, WAYS, "--ways")
    where = provenance(["torch", "transformers"])
    ids = _ids(model, test, TESTED)
    observed = None if calibrate is None else _ids(model, calibrate, OBSERVED)
    given: dict[str, dict[str, Any]] = {
        ONE: {"recipe": uniform},
        "mix": {"recipe": None, "target_bits": bits},
        "mix, no zero-points": {"recipe": [spec for spec in LADDER if "offset=bias" not in spec], "target_bits": bits},
    }
    how: dict[str, Any] = {"calibrate": observed, "method": method, "max_memory": max_memory, "verify": "none"}
    options = {"model": model.stem, "tested": ids.size, "bits": bits}
    count = 0 if observed is None else observed.size
    rows: list[dict[str, Any]] = []
    for way in chosen:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            report = breccia.bridges.convert(model, Path(folder) / "out", **given[way], **how)
            seconds = time.perf_counter() - start
            values = breccia.bridges.load_checkpoint(Path(folder) / "out")
            changed = {t.name: decoding(values, t.name) for t in report.quantized}
            cost = breccia.bridges.divergences(model, ids, {"all": changed}).costs["all"]
        counts = report.mix.counts if report.mix else {uniform: len(report.quantized)}
        row = {"method": report.calibration or PLAIN, "way": way, "bits": report.bits_per_parameter, "kl": cost}
        rows.append({**row, "observed": count, "seconds": round(seconds, 1), "recipes": dict(counts)})
        print(f"{way:20s} {report.bits_per_parameter:.3f} bits, KL {cost:.4f}, {seconds:.0f} s", flush=True)
        yield BENCHMARK.result(rows, options, where)
