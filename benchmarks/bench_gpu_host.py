"""On a CUDA device: what eager calls of casts, products and layers take on the host, until they return."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import rivals
import torch
import typer
from bench_gpu_casts import OPS, REQUANTIZED, RivalsOption, loaded, rival_call, versus, work
from harness import Benchmark, Device, Result, Table, command, failures, known, listed, spread, table
from harness.device import Arms, Call, HostTimer, Make, check_device, sampled, where
from plain import TILES
from rivals import OURS, TORCH_COMPILED, TRANSFORMER_ENGINE, Rival

import breccia

#: Recipes of the casts, layers and products (both operands) whose host time is measured.
RECIPES = (
    "fp8_block", TILES, "fp8_row", "mxfp8", "mxfp6", "mxfp4", "mxint8", "int4", "int8", "nf4", "fp8_current", "fp8_delayed",
    "nvfp4",
)  # fmt: skip
HOST_OPS = tuple(op for op in OPS if OPS[op].dtype == "bfloat16")
LAYERS = ("int4", "mxfp4", "nvfp4", TILES, "mxfp8")
PRODUCTS = (("fp8_row", "fp8_row"), ("fp8_block", TILES), ("mxfp8", "mxfp8"))
HOST_RIVALS = (TRANSFORMER_ENGINE, TORCH_COMPILED)
#: Calls in a sample. Each launches few kernels. The first ones run with cold CPU caches.
FEW_LAUNCHES = 100
#: The goal: microseconds of a call on the host.
HOST_US = 15.0


def times(result: Result) -> Table:
    options, rows = result["options"], result["rows"]

    def ours(row: Any) -> Any:
        return row["time"].get(OURS) or row["time"]["torch"]

    columns: dict[str, Any] = {"call": "call", "host, µs": lambda row: spread(ours(row), 1e6)}
    columns |= {"best rival, µs": versus} if result["rivals"] else {}
    note = (
        f"Min / median / max of {options['samples']} samples in rotation, each of {options['calls']} calls after a "
        f"synchronization, until they return. BF16, {options['side']}×{options['side']}; layers take one row."
    )
    casts = [row for row in rows if row["call"].split()[0].startswith(("cast", "dequantize", "requantize", "Amax"))]
    within = sum(1e6 * ours(row)["median_s"] <= HOST_US for row in casts)
    note += f" Within {HOST_US:g} µs: {within} of {len(casts)} calls of casts."
    if result["rivals"]:
        note += f" Rivals: {listed(result['rivals'])}; in brackets how many times faster breccia is."
    note += failures((arm, error, row["call"]) for row in rows for arm, error in row.get("errors", {}).items())
    return table("host time of calls", columns, [row for row in rows if row["time"]], note)


BENCHMARK = Benchmark("gpu-host", {"gpu-host": times}, key=("call",))


def calls(side: int, device: str, rivals: dict[str, Rival]) -> Iterator[tuple[str, str, Make]]:
    """(name of the call, "breccia", "torch" or a rival, function that prepares the call) for matrices of side x side."""
    import breccia_torch

    x, row = (torch.randn(rows, side, device=device, dtype=torch.bfloat16) for rows in (side, 1))

    def product(a: str, w: str) -> Call:
        left, right = breccia.cast(x, a), breccia.cast(x, w).mT
        return lambda: breccia.matmul(left, right, "bfloat16")

    def layer(spec: str) -> Call:
        linear = torch.nn.Linear(side, side, bias=False, device=device, dtype=torch.bfloat16)
        model = torch.nn.Sequential(linear).eval().requires_grad_(False)
        if spec:
            breccia_torch.quantize_(model, spec)  # also stores the weight in the kernel's order
        return partial(model[0], row)

    for op, spec in itertools.product(HOST_OPS, RECIPES):
        if spec in OPS[op].recipes:
            name = f"{op} {spec}" + (f" to {REQUANTIZED[spec]}" if op == "requantize" else "")
            yield name, "breccia", lambda op=op, spec=spec: work(op, spec, [x]).call
            for rival, one in rivals.items():
                yield name, rival, lambda op=op, spec=spec, one=one, rival=rival: rival_call(one, op, spec, [x], rival)
    for a, w in PRODUCTS:
        yield f"matmul {a} by {w}", "breccia", partial(product, a, w)
    for spec in LAYERS:
        yield f"ScaledLinear {spec}", "breccia", partial(layer, spec)
    out = torch.empty_like(x)
    yield "torch.nn.Linear", "torch", partial(layer, "")
    yield "torch.neg", "torch", lambda: lambda: torch.neg(x, out=out)
    yield "torch.empty", "torch", lambda: lambda: torch.empty((side, side), device=device, dtype=torch.bfloat16)


@command
def host(
    side: Annotated[int, typer.Option(help="Rows and columns of the matrices.")] = 1024,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 50,
    rivals_: RivalsOption = None,
    device: Device = "cuda",
) -> Result:
    """Time eager calls on the host, until they return."""
    check_device(device)
    wanted = known(rivals_, (*HOST_RIVALS, "none"), "--rivals")
    there, absent = loaded([n for n in wanted if n in HOST_RIVALS and (rivals_ or not rivals.absence(n))], device)
    rows: dict[str, Arms] = {}
    for name, whose, make in calls(side, device, there):
        rows.setdefault(name, Arms(device)).add({whose: make}, partial(HostTimer, calls=FEW_LAUNCHES))
    with torch.no_grad():
        sampled([timer for arms in rows.values() for timer in arms.timers.values()], samples)
    options = {"device": device, "side": side, "samples": samples, "calls": FEW_LAUNCHES}
    versions = {name: one.version for name, one in there.items()}
    measured = [{"call": name, "time": {}, **arms.times()} for name, arms in rows.items()]
    return BENCHMARK.result(measured, options, where(device), rivals=versions, absent=absent)
