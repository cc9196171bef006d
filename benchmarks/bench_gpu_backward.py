"""On a CUDA device: forward and dL/dx of a layer with a quantized weight, and dL/dx of groups of weights, beside BF16.

"contract" is the default kernel of dL/dx, within the bound of docs/spec/numerics.md, section 9; "rounded" rounds each value of
the weight to one BF16 number there. Errors are multiples of that bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from bench_gpu_training import graph_of
from harness import Benchmark, Device, Result, Row, command, progress, recipes_named, sizes
from harness.device import Arms, Call, HostTimer, Make, Reference, Timer, check_device, load, message, reference, sampled, where
from harness.tables import ABSENT, Table, extent, failures, median, over, sides, table, three
from plain import TILES

import breccia
import breccia_torch
from breccia.kernels import bounds

WEIGHTS, GROUPED = (TILES, "int4", "nvfp4"), (TILES, "int4,symmetric=false,signed=false", "mxfp8")
BF16, CONTRACT, ROUNDED, DECODED, FP32 = "BF16", "contract", "rounded", "decoded to FP32", "contract, to FP32"
LINEAR, FUNCTION = "nn.Linear", "F.linear"
#: Of `prefer`, for ROUNDED and DECODED.
PREFER = {ROUNDED: "triton.matmul_bf16_rounded", DECODED: "composite.grouped_matmul"}
#: Rows of dL/dy, rows and columns of the weight, where errors are measured: no multiples of a tile.
ODD = (300, 1000, 520)
#: Where each group ends, of 4096 rows: groups of none, of one and of hundreds of rows, and rows of no group.
ENDS = (500, 500, 1100, 2048, 2049, 3000, 3500, 4000)
HOST_ROWS = 64

# ------------------------------------------------------------------------------------------------ tables


def of(result: Result, work: str) -> list[Row]:
    return [row for row in result["rows"] if row["work"] == work]


def cell(measure: str, arm: str, other: str = "") -> Callable[[Row], str]:
    """Microseconds, and in brackets how many times faster than another arm."""

    def text(row: Row) -> str:
        if (ours := median(row, arm, measure)) is None:
            return ABSENT
        return three(1e6 * ours) + (f" ({over(median(row, other, measure), ours)})" if other else "")

    return text


def raised(rows: list[Row]) -> str:
    every = [(arm, error, row["weight"]) for row in rows for arm, error in row.get("errors", {}).items()]
    every += [(f"{arm} in a graph", why, row["weight"]) for row in rows for arm, why in row.get("graph_errors", {}).items()]
    return failures(every)


def layers(result: Result) -> Table:
    rows = of(result, "layer")

    def bf16(measure: str) -> str:
        found = [1e6 * s for row in rows if (s := median(row, BF16, measure)) is not None]
        return extent(found, three) if found else ABSENT

    columns: dict[str, Any] = {"weight": "weight", "storage": "storage"}
    for name, measure in (("eager", "time"), ("graph", "graph")):
        columns |= {f"{name}, {arm}, µs": cell(measure, arm, BF16) for arm in (CONTRACT, ROUNDED)}
    m, n, k = result["options"]["shape"]
    note = (
        f"Forward and dL/dx of a layer with a weight of {n}×{k}, {m} rows of BF16; medians of at least "
        f"{result['options']['samples']} samples in rotation. In brackets: times as fast as the same layer in BF16, which "
        f"takes {bf16('time')} µs eager and {bf16('graph')} µs in a CUDA graph. Contract: within the bound of numerics.md, "
        "section 9. Rounded: the weight is rounded to BF16 for dL/dx."
    )
    return table("forward and dL/dx of a layer", columns, rows, note + raised(rows))


def groups(result: Result) -> Table:
    rows, columns = of(result, "groups"), {"weights": "weight", "dL/dx, µs": cell("time", CONTRACT, DECODED)}
    columns |= {"decoded to FP32, µs": cell("time", DECODED), "BF16, µs": cell("time", BF16)}
    m, n, k = rows[0]["shape"] if rows else (0, 0, 0)
    note = (
        f"dL/dx of {len(ENDS)} weights of {n}×{k} and {m} rows in groups, to BF16, eager. In brackets: times as fast as with "
        "weights decoded to FP32. BF16: torch's product of groups."
    )
    return table("dL/dx of groups", columns, rows, note + raised(rows))


def errors(result: Result) -> Table:
    rows = of(result, "error")
    columns: dict[str, Any] = {"weight": "weight", "storage": "storage"}
    columns |= {
        name: lambda row, arm=arm: three(row["over_bound"][arm]) if arm in row.get("over_bound", {}) else ABSENT
        for name, arm in (("to FP32", FP32), ("to BF16", CONTRACT), ("rounded, to BF16", ROUNDED))
    }
    note = (
        f"The largest error of dL/dx, of {sides(rows[0]['shape'] if rows else ODD)} (rows, columns of dL/dy, columns), as a "
        "multiple of the contract's bound. Results in BF16 are near 1, as half of a last place of BF16 is most of their bound."
    )
    return table("errors of dL/dx over the bound", columns, rows, note + raised(rows))


def hosts(result: Result) -> Table:
    rows, columns = of(result, "host"), {"weight": "weight", "forward and backward, µs": cell("host", CONTRACT)}
    columns |= {f"{arm}, µs": cell("host", arm) for arm in (LINEAR, FUNCTION)}
    m, n, k = rows[0]["shape"] if rows else (0, 0, 0)
    note = (
        f"What eager calls take on the host until they return: {m} rows and a weight of {n}×{k}. {LINEAR}: forward and dL/dx "
        f"of the layer in BF16. {FUNCTION}: its forward alone, without autograd."
    )
    return table("host time of a layer's forward and dL/dx", columns, rows, note + raised(rows))


BENCHMARK = Benchmark(
    "gpu-backward",
    {"gpu-backward": layers, "gpu-backward-groups": groups, "gpu-backward-errors": errors, "gpu-backward-host": hosts},
    key=("work", "weight", "storage", "shape"),
)

# ------------------------------------------------------------------------------------------------ arms


def numbers(device: str, *shape: int) -> Any:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def layer_of(weight: Any, spec: str, stored: bool, arm: str = CONTRACT) -> Any:
    """A layer with that weight, quantized; in plain storage unless `stored`."""
    n, k = weight.shape
    linear = torch.nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    model = torch.nn.Sequential(linear).train(not stored)  # in training weights keep their plain storage
    breccia_torch.quantize_(model, spec)
    made: Any = model[0]
    made.prefer_backward = PREFER.get(arm)
    return made


def in_bf16(weight: Any) -> Any:
    n, k = weight.shape
    linear = torch.nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype).requires_grad_(False)
    linear.weight.copy_(weight)
    return linear


def step(layer: Any, x: Any, dy: Any) -> Call:
    """Forward and dL/dx, which it returns."""

    def call() -> Any:
        x.grad = None
        layer(x).backward(dy)
        return x.grad

    return call


def exact(dy: Any, weights: list[Any], ends: Any) -> Reference:
    """dL/dx of groups of rows of dy, in FP64."""

    def values(group: int) -> Any:
        return breccia.dequantize(weights[group].to_plain()).double().mT

    return reference(lambda rows: dy[rows].double(), values, ends, lambda size, k: bounds.accumulated(size, k, k))


def checked(right: Reference) -> Callable[[str, Any], float | None]:
    """Errors over the bound of arms that multiply the quantized weight; those within the contract must be at most 1."""

    def check(arm: str, dx: Any) -> float | None:
        if arm == BF16:
            return None
        found = right.error_over_bound(dx)
        if arm != ROUNDED and found > 1:
            raise ValueError(f"the error is {found:.3g} times the bound of the contract")
        return found

    return check


def both_storages(weight: Any, spec: str) -> Iterator[tuple[bool, Any]]:
    """(whether it is stored for a kernel, the quantized layer)."""
    for stored in (False, True):
        layer = layer_of(weight, spec, stored)
        if not stored or layer.weight.layout.storage != "plain":
            yield stored, layer


def layer_rows(spec: str, shape: tuple[int, ...], device: str, samples: int) -> Iterator[Row]:
    m, n, k = shape
    weight, x, dy = numbers(device, n, k) * 0.02, numbers(device, m, k).requires_grad_(), numbers(device, m, n)
    for stored, layer in both_storages(weight, spec):
        arms = Arms(device, checked(exact(dy, [layer.weight.tensor], torch.tensor([m], device=device))))
        makers: dict[str, Make] = {BF16: lambda: step(in_bf16(weight), x, dy), CONTRACT: lambda layer=layer: step(layer, x, dy)}
        arms.add(makers | {ROUNDED: lambda stored=stored: step(layer_of(weight, spec, stored, ROUNDED), x, dy)})
        for arm, call in arms.calls.items() if device == "cuda" else ():
            try:
                arms.timers["graph", arm] = Timer(graph_of(call), device)
            except Exception as e:  # an arm that cannot be captured still has its eager time
                arms.note("graph_errors", arm, message(e))
        for timer in arms.timers.values():
            timer.fit()
        clock = load(device)
        sampled(arms.timers.values(), samples)
        row = {"work": "layer", "weight": spec, "storage": layer.weight.layout.storage, "shape": shape, "clock_mhz": clock}
        yield row | arms.times(every=False)


def group_row(spec: str, shape: tuple[int, ...], device: str, samples: int) -> Row:
    m, n, k = shape
    every, dy = [numbers(device, n, k) for _ in ENDS], numbers(device, m, n)
    ends = torch.tensor([end * m // 4096 for end in ENDS], dtype=torch.int32, device=device)
    experts = [breccia.cast(one, spec) for one in every]
    stack, plain = breccia.stack(experts), torch.stack(every)
    product: Any = getattr(torch, "_grouped_mm", None)

    def quantized(arm: str) -> Call:
        return lambda: breccia.grouped_matmul(dy, stack, ends, "bfloat16", prefer=PREFER.get(arm))

    arms = Arms(device, checked(exact(dy, experts, ends)))
    makers: dict[str, Make] = {arm: partial(quantized, arm) for arm in (CONTRACT, DECODED)}
    arms.add({BF16: lambda: lambda: product(dy, plain, offs=ends), **makers})
    for timer in arms.timers.values():
        timer.fit()
    clock = load(device)
    sampled(arms.timers.values(), samples)
    return {"work": "groups", "weight": spec, "shape": shape, "clock_mhz": clock, **arms.times(every=False)}


def error_rows(spec: str, device: str) -> Iterator[Row]:
    m, n, k = ODD
    weight, dy = numbers(device, n, k) * 0.02, numbers(device, m, n)
    for _, layer in both_storages(weight, spec):
        w = layer.weight.tensor
        arms = Arms(device, checked(exact(dy, [w], torch.tensor([m], device=device))))
        to = {FP32: "float32", CONTRACT: "bfloat16", ROUNDED: "bfloat16"}
        arms.add({arm: partial(partial, breccia.matmul, dy, w, dtype, prefer=PREFER.get(arm)) for arm, dtype in to.items()})
        row = {"work": "error", "weight": spec, "storage": w.storage, "shape": ODD}
        yield {**row, "kernel": breccia.explain("matmul", dy, w).running, **arms.fields}


def host_row(spec: str, shape: tuple[int, ...], device: str, samples: int) -> Row:
    m, n, k = shape
    weight, x, dy = numbers(device, n, k), numbers(device, m, k).requires_grad_(), numbers(device, m, n)
    arms = Arms(device)
    makers: dict[str, Make] = {CONTRACT: lambda: step(layer_of(weight, spec, True), x, dy)}
    makers |= {LINEAR: lambda: step(in_bf16(weight), x, dy)}
    makers |= {FUNCTION: lambda: partial(torch.nn.functional.linear, x.detach(), weight)}
    arms.add(makers, HostTimer)
    sampled(arms.timers.values(), samples)
    found = arms.times(every=False)
    return {"work": "host", "weight": spec, "shape": shape, "host": found.pop("time", {}), **found}


@command
def backward(
    weights: Annotated[list[str] | None, typer.Option(help="Recipes of weights; repeatable.")] = None,
    shape: Annotated[str, typer.Option(help="ROWSxOUTxIN of the layer; groups have half of IN.")] = "4096x4096x4096",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each arm, interleaved.")] = 15,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Time forward and dL/dx of layers with quantized weights, and measure the errors of dL/dx."""
    check_device(device)
    torch.manual_seed(0)
    specs, grouped = ([r.spec for r in recipes_named(weights or names)] for names in (WEIGHTS, GROUPED))
    m, n, k = lengths = sizes(shape, 3)
    run, rows = where(device), list[Row]()
    works: list[Callable[[], Iterator[Row]]] = []
    for spec in specs:
        works += [partial(layer_rows, spec, lengths, device, samples), partial(error_rows, spec, device)]
        works += [lambda spec=spec: iter([host_row(spec, (HOST_ROWS, n // 4, k // 4), device, samples)])]
    works += [lambda spec=spec: iter([group_row(spec, (m, n, k // 2), device, samples)]) for spec in grouped]
    for work in progress(works, "backward"):
        rows += work()
        yield BENCHMARK.result(rows, {"device": device, "samples": samples, "shape": lengths}, run)
