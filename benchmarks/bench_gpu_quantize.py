"""On a CUDA device: seconds and memory of `quantize_` for a model of a billion parameters."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Annotated, Any

import torch
import typer
from harness import ABSENT, Benchmark, Device, Result, Table, command, recipes_named, spread, summary, table, three
from harness.device import check_device, synchronize, where

#: Recipes, and sizes of the model: the linear layers of Llama 3.2 1B.
QUANTIZED = ("fp8_block", "mxfp8", "nvfp4", "int4")
LAYERS, WIDTH, KEYS, HIDDEN = 16, 2048, 512, 8192
TINY = (2, 128, 128, 256)


def times(result: Result) -> Table:
    def mib(key: str, form: str) -> Any:
        return lambda row: ABSENT if row[key] is None else format(row[key] / 2**20, form)

    columns = {
        "recipe": "recipe",
        "cold, s": lambda row: three(row["cold_s"]),
        "warm, s": lambda row: spread(row["time"]["warm"], 1),
        "cold peak, MiB": mib("cold_peak_bytes", ".1f"),
        "warm peak, MiB": mib("peak_bytes", ".1f"),
        "model before, MiB": mib("bytes_before", ",.1f"),
        "after, MiB": mib("bytes_after", ",.1f"),
    }
    note = (
        f"The linear layers of a decoder of {result['rows'][0]['bytes_before'] / 2e6:,.1f} million parameters, BF16. Cold: the "
        f"first model of that recipe in the process, with no compiled kernel on disk; the first row includes imports. Warm: "
        f"min / median / max of {result['options']['runs']} further models. Peak: memory beyond the model's own "
        f"({ABSENT}: not known on a CPU)."
    )
    return table("quantize_", columns, result["rows"], note)


BENCHMARK = Benchmark("gpu-quantize", {"gpu-quantize": times})


def model_of(layers: int, width: int, keys: int, hidden: int, device: str) -> Any:
    shapes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}

    def layer() -> Any:
        made = {n: torch.nn.Linear(*s, bias=False, device=device, dtype=torch.bfloat16) for n, s in shapes.items()}
        return torch.nn.ModuleDict(made)

    return torch.nn.ModuleList(layer() for _ in range(layers))


def quantized(recipe: str, model: Any, device: str) -> dict[str, Any]:
    """Seconds of `quantize_`, the memory it takes beyond the model's (None on a CPU), and bytes before and after."""
    import breccia_torch

    held = 0
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    summary = breccia_torch.quantize_(model, recipe)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else None
    return {"seconds": seconds, "peak": peak, "before": summary.bytes_before, "after": summary.bytes_after}


@command
def quantize(
    recipes: Annotated[list[str] | None, typer.Option(help=f"Recipes; repeatable. Default: {', '.join(QUANTIZED)}.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Warm runs, after the cold one.")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of 0.3 million parameters, to try the script.")] = False,
    device: Device = "cuda",
) -> Result:
    """Time `quantize_` of a model of a billion parameters."""
    check_device(device)
    dimensions = TINY if tiny else (LAYERS, WIDTH, KEYS, HIDDEN)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # so that the cold run compiles
        for recipe in recipes_named(recipes or QUANTIZED):
            cold, *warm = [quantized(recipe.spec, model_of(*dimensions, device), device) for _ in range(1 + runs)]
            row: dict[str, Any] = {"recipe": recipe.spec, "cold_s": cold["seconds"], "cold_peak_bytes": cold["peak"]}
            row |= {"peak_bytes": warm[-1]["peak"], "bytes_before": cold["before"], "bytes_after": cold["after"]}
            rows.append({**row, "time": {"warm": summary([one["seconds"] for one in warm])}})
    return BENCHMARK.result(rows, {"device": device, "runs": runs, "layers": dimensions}, where(device))
