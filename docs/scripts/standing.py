"""The chart of the first page: breccia's speed beside the best rival, by device. plots.py writes and checks it.

The numbers are those of benchmarks/results/*.json, medians of one run in which both were measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.plots import BLUE, GREY, ORANGE

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

#: Arms that are breccia in another way, or a copy; not rivals.
_OWN = {"breccia-on-numpy", "breccia-compiled", "compiled", "copy", "breccia, column-major scales", "breccia, through BF16"}
#: Products on a CPU that compute alike, by breccia's arm: of activations in FP32, in BF16, or rounded to 8 bits.
_CPU_PRODUCTS = {
    "int4, BF16 x": ("torch int4",),
    "int4,group_size=32": ("ONNX Runtime 4 bit, FP32 x", "MLX affine 4 bit"),
    "int4,group_size=32, INT8 mode": ("ggml Q4_0", "ggml Q4_0 repacked", "ONNX Runtime 4 bit, int8 x"),
    "mxfp4": ("MLX mxfp4",),
    "mxfp4, INT8 mode": ("ggml MXFP4", "ggml MXFP4 repacked"),
    "int8, INT8 mode": ("ggml Q8_0", "torch dynamic int8"),
}
#: Arms by the name of the library.
_NAMES = {
    "eager-torch": "plain PyTorch", "torch-compiled": "torch.compile", "torchao-compiled": "torchao",
    "transformer-engine": "TransformerEngine", "breccia-0.1.3": "breccia 0.1.3", "torch, plain scales": "torch",
    "torch, row scales": "torch", "bf16": "BF16", "torch-int4": "torch", "torch int4": "torch", "torch dynamic int8": "torch",
    "MLX affine 4 bit": "MLX", "MLX mxfp4": "MLX", "ggml Q4_0": "ggml", "ggml Q4_0 repacked": "ggml", "ggml MXFP4": "ggml",
    "ggml MXFP4 repacked": "ggml", "ggml Q8_0": "ggml", "ONNX Runtime 4 bit, FP32 x": "ONNX Runtime",
    "ONNX Runtime 4 bit, int8 x": "ONNX Runtime",
}  # fmt: skip
#: Fewer rows of activations than this: generating text.
_FEW = 64

Compared = tuple[float, str]


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def compared(time: Mapping[str, Any], ours: str = "breccia", rivals: Iterable[str] | None = None) -> Iterator[Compared]:
    """How many times faster than the best rival, and which that is; nothing where one of them was not measured."""
    names = [name for name in (time if rivals is None else rivals) if name in time and name not in _OWN and name != ours]
    if ours in time and names:
        best = min(names, key=lambda name: time[name]["median_s"])
        yield round(time[best]["median_s"] / time[ours]["median_s"], 3), _NAMES.get(best, best)


def by_op(name: str, op: str) -> Iterator[Compared]:
    """Casts or dequantizations of large matrices, a number by recipe."""
    rows = [row for row in result(name)["rows"] if row["op"] == op]
    most = max(math.prod(row.get("shape", ())) for row in rows)
    for row in (row for row in rows if math.prod(row.get("shape", ())) == most):
        yield from compared(row["passes"][0] if "passes" in row else row.get("time", {}))


def cpu_products(name: str) -> Iterator[Compared]:
    for row in (row for row in result(name)["rows"] if row["rows"] == 1):
        for ours, rivals in _CPU_PRODUCTS.items():
            yield from compared(row["passes"][0], ours, rivals)


def fp8_products() -> Iterator[Compared]:
    """Of two FP8 tensors of equal or blockwise scales; no rival computes those of MX on this device."""
    for row in result("matmul-gpu-nvidia-h200")["rows"]:
        if row["kind"] in ("tensor", "row", "tiles", "blocks"):
            yield from compared({arm: time for arm, time in row.get("time", {}).items() if arm != "bf16"})


def by_weights(few: bool) -> Iterator[Compared]:
    for row in result("gpu-weight-only-nvidia-h200")["rows"]:
        if (row["m"] < _FEW) == few:
            yield from compared(row.get("time", {}))


def by_coded_weights() -> Iterator[Compared]:
    for row in (row for row in result("gpu-coded-nvidia-h100-80gb-hbm3")["rows"] if row["m"]):
        yield from compared(row["time"])


#: By device: what was measured, and the numbers.
MEASURED: dict[str, dict[str, Callable[[], Iterator[Compared]]]] = {
    "NVIDIA H200, PyTorch": {
        "cast": partial(by_op, "gpu-casts-nvidia-h200", "cast"),
        "dequantize": partial(by_op, "gpu-casts-nvidia-h200", "dequantize"),
        "FP8 × FP8": fp8_products,
        f"BF16 × quantized weight, fewer than {_FEW} rows": partial(by_weights, True),
        f"BF16 × quantized weight, {_FEW} rows or more": partial(by_weights, False),
    },
    "NVIDIA H100, PyTorch": {"BF16 × GGUF and 3 to 8-bit integers, 1 and 16 rows": by_coded_weights},
    "AMD EPYC, 2 cores": {
        "NumPy: cast": partial(by_op, "cast-amd-epyc-x86-64-2c", "cast"),
        "NumPy: dequantize": partial(by_op, "cast-amd-epyc-x86-64-2c", "dequantize"),
        "PyTorch: cast": partial(by_op, "cast-torch-amd-epyc-x86-64-2c", "cast"),
        "PyTorch: dequantize": partial(by_op, "cast-torch-amd-epyc-x86-64-2c", "dequantize"),
        "MLX: cast": partial(by_op, "mlx-amd-epyc-x86-64-2c", "cast"),
        "MLX: dequantize": partial(by_op, "mlx-amd-epyc-x86-64-2c", "dequantize"),
        "PyTorch: FP32 or BF16 × quantized weight, 1 row": partial(cpu_products, "matmul-cpu-amd-epyc-x86-64-2c"),
    },
    "Intel Xeon, 2 cores": {
        "PyTorch: FP32 or BF16 × quantized weight, 1 row": partial(cpu_products, "matmul-cpu-intel-xeon-x86-64-2c"),
    },
}


def standing_series() -> Any:
    """By device and work: how many times faster than the best rival, in order, and which rivals were the best."""
    found: dict[str, Any] = {}
    for device, works in MEASURED.items():
        for work, numbers in works.items():
            every = list(numbers())
            best = [name for name, _ in Counter(name for _, name in every).most_common()]
            found.setdefault(device, {})[work] = {"faster": sorted(ratio for ratio, _ in every), "rivals": best}
    return found


def draw_standing(series: Any) -> Any:
    """A line for each work, a dot for each recipe and shape, the median, and a stroke at 1×; the axis is logarithmic."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    count = sum(len(works) + 1 for works in series.values())
    figure = Figure(figsize=(6.0, 0.46 * count + 0.7), layout="constrained")
    axes = figure.subplots()
    y = 0.0
    for device, works in series.items():
        axes.annotate(device, (0.0, y + 0.15), xycoords=("axes fraction", "data"), fontsize=11, fontweight="bold")
        for work, found in works.items():
            y -= 1
            middle, faster = statistics.median(found["faster"]), found["faster"]
            tone = BLUE if middle >= 1 else ORANGE
            axes.plot([1, 1], [y - 0.32, y + 0.18], color=GREY, linewidth=1)  # not through the line of text above
            axes.scatter(faster, [y] * len(faster), s=16, color=GREY, alpha=0.45, linewidths=0)
            axes.scatter([middle], [y], s=64, color=tone, marker="D", zorder=3)
            rivals = ", ".join(found["rivals"][:3])
            axes.annotate(f"{work}: {middle:.3g}×", (0.0, y + 0.24), xycoords=("axes fraction", "data"), fontsize=9.5)
            axes.annotate(rivals, (1.0, y + 0.24), xycoords=("axes fraction", "data"), fontsize=7.5, ha="right", style="italic")
        y -= 1
    axes.set_xscale("log")
    axes.set_ylim(y + 0.4, 0.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.3, 1, 3, 10, 30, 100]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("times as fast as the best rival of the same run (1×: as fast); diamond: median", fontsize=9)
    return figure
