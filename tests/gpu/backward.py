"""Forward and dL/dx of layers with a quantized weight on a GPU: errors against FP64, times beside BF16, host times.

python tests/gpu/backward.py results.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import breccia
import breccia_torch
from breccia.kernels import bounds

DEFAULT = "fp8_block,block_m=128;int4;nvfp4;mxfp8;nf4"
#: Recipes, separated by semicolons in the environment.
SPECS = tuple(os.environ.get("SPECS", DEFAULT).split(";"))
ROUNDED = "triton.matmul_bf16_rounded"
FLUSH = torch.empty(64 << 20, dtype=torch.int32, device="cuda")


def elapsed(calls: dict[str, Callable[[], Any]], rounds: int = 5, inner: int = 8) -> dict[str, float]:
    """Median microseconds of each call, interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            FLUSH.zero_()
            call()
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(end) * 1e3 / inner)
    return {name: round(statistics.median(times), 1) for name, times in taken.items()}


def host(call: Callable[[int], Any], count: int = 60) -> float:
    """Median microseconds of a call until it returns; it is passed its number."""
    for i in range(count):
        call(i)
    taken = []
    for i in range(count):
        if i % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(i)
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(statistics.median(taken) * 1e6, 1)


def over_bound(found: Any, a: Any, b: Any) -> float:
    """The largest error as a multiple of the bound of docs/spec/numerics.md, section 9, in up to 128 rows."""
    rows = torch.randperm(a.shape[0], device="cuda")[:128]
    x, y = a[rows].double(), breccia.dequantize(b.to_plain() if b.storage != "plain" else b).double()
    exact, size = x @ y, x.abs() @ y.abs()
    bound = bounds.accumulated(size, x.shape[1], x.shape[1])
    unit = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[found.dtype]
    error = (found[rows].double() - exact).abs()
    return round((error / (bound + unit * (exact.abs() + bound)).clamp(min=1e-300)).max().item(), 4)


def layer_of(weight: Any, spec: str, stored: bool) -> Any:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="cuda", dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    model = torch.nn.Sequential(linear)
    model.train(not stored)
    breccia_torch.quantize_(model, spec)
    return model[0]


def step(layer: Any, x: Any, gradient: Any) -> Callable[[], Any]:
    def run() -> Any:
        x.grad = None
        y = layer(x)
        y.backward(gradient)
        return x.grad

    return run


def errors(shapes: tuple[tuple[int, int, int], ...]) -> list[dict[str, Any]]:
    rows = []
    for m, n, k in shapes:
        torch.manual_seed(0)
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        gradient = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        for spec in SPECS:
            w = breccia.cast(weight, spec)
            for name, b in (("plain", w), ("stored", layer_of(weight, spec, True).weight.tensor)):
                if name == "stored" and b.storage == "plain":
                    continue
                row: dict[str, Any] = {"shape": [m, n, k], "spec": spec, "weight": b.storage}
                try:
                    row["kernel"] = breccia.explain("matmul", gradient, b).running
                    for dtype in ("float32", "bfloat16"):
                        row[dtype] = over_bound(breccia.matmul(gradient, b, dtype), gradient, b)
                    if k < 1024:
                        row["rounded"] = over_bound(breccia.matmul(gradient, b, "bfloat16", prefer=ROUNDED), gradient, b)
                except Exception as e:
                    row["error"] = f"{type(e).__name__}: {str(e)[:200]}"
                rows.append(row)
    return rows


def main(path: str) -> None:
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def keep(name: str, measure: Callable[[], Any]) -> None:
        """Measure, print, and write what is there so far."""
        try:
            result[name] = measure()
        except Exception as e:
            result[name] = f"{type(e).__name__}: {str(e)[:300]}"
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
        if name not in ("profile, us", "errors"):
            print(name, json.dumps(result[name]), flush=True)

    keep("host, us", hosts)
    keep("times, us", times)
    keep("grouped, us", groups)
    keep("errors", lambda: errors(((300, 1000, 520),)))
    worst = {
        f"{row['spec']} {row['weight']}": [row.get(key) for key in ("float32", "bfloat16", "error")] for row in result["errors"]
    }
    print("error / bound", json.dumps(worst), flush=True)
    keep("profile, us", profiles)
    for name, kernels in result["profile, us"].items():
        print("profile", name, json.dumps({key[:24]: one[0] for key, one in kernels.items() if one[0] > 2}), flush=True)
    if "CASTS" in os.environ:
        keep("casts, us", casts)


def times() -> dict[str, dict[str, float]]:
    """Microseconds of a layer's forward and dL/dx, and of each product, at 4096 x 4096 x 4096."""
    m = n = k = 4096
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    both, single = {"BF16": step(linear, x, gradient)}, {"BF16 mm": lambda: torch.mm(gradient, weight)}
    for spec in SPECS:
        for stored in (False, True):
            layer, rounds = layer_of(weight, spec, stored), layer_of(weight, spec, stored)
            name = f"{spec} {layer.weight.layout.storage}"
            rounds.prefer_backward = ROUNDED
            both[name], both[f"{name} rounded"] = step(layer, x, gradient), step(rounds, x, gradient)
            w = layer.weight.tensor
            single[f"{name} forward"] = lambda layer=layer: layer(x.detach())
            single[f"{name} dx"] = lambda w=w: breccia.matmul(gradient, w, "bfloat16")
            single[f"{name} dx rounded"] = lambda w=w: breccia.matmul(gradient, w, "bfloat16", prefer=ROUNDED)
    for call in (*both.values(), *single.values()):
        call()
    found = {"forward and dx": elapsed(both, 5), "one product": elapsed(single, 3)}
    return found | {f"{name}, in graphs": elapsed(graphs_of(calls), 3) for name, calls in (("both", both), ("one", single))}


def graphs_of(calls: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Replays of graphs of the calls: what the device takes, without the host."""
    graphs: dict[str, Callable[[], Any]] = {}
    stream = torch.cuda.Stream()
    for name, call in calls.items():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs[name] = graph.replay
    return graphs


def profiles() -> dict[str, dict[str, list[float]]]:
    """Device microseconds and launches of each kernel of a product, and of a step of a layer, at 4096 x 4096 x 4096."""
    found = {}
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    for spec in SPECS:
        for stored in (False, True):
            layer = layer_of(weight, spec, stored)
            if stored and layer.weight.layout.storage == "plain":
                continue
            run = step(layer, x, weight)
            for rounds in (None, ROUNDED):
                layer.prefer_backward = rounds
                for _ in range(4):
                    run()
                torch.cuda.synchronize()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                    for _ in range(4):
                        run()
                    torch.cuda.synchronize()
                kernels = {e.key[:60]: [round(e.device_time_total / 4, 1), e.count / 4] for e in profiler.key_averages()}
                found[f"{spec} {layer.weight.layout.storage} {rounds}"] = kernels
    return found


def casts() -> dict[str, float]:
    x = torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {"copy": x.clone}
    for spec in ("fp8_block", "fp8_block,block_m=128", "fp8_current", "fp8_row", "mxfp8"):
        r = breccia.recipe(spec)
        calls[f"pair {spec}"] = lambda r=r: breccia.cast_pair(x, r)
        calls[f"cast {spec}"] = lambda r=r: breccia.cast(x, r)
        calls[f"columns {spec}"] = lambda r=r: breccia.cast(x, r, axis=-2)
    return elapsed(calls, 3, 4)


def groups() -> dict[str, float]:
    """8 experts of 4096 x 2048, 4096 rows: dL/dx of quantized experts beside torch's product of groups in BF16."""
    count, n, k, m = 8, 4096, 2048, 4096
    weights = torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([500, 500, 1100, 2048, 2049, 3000, 3500, 4000], dtype=torch.int32, device="cuda")
    product: Any = torch._grouped_mm  # pyright: ignore
    calls: dict[str, Callable[[], Any]] = {"BF16": lambda: product(gradient, weights, offs=ends)}
    for spec in ("fp8_block,block_m=128", "int4,symmetric=false,signed=false", "mxfp8"):
        experts = breccia.stack([breccia.cast(one, spec) for one in weights])
        found = breccia.grouped_matmul(gradient, experts, ends, "bfloat16")
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                assert over_bound(found[start:end], gradient[start:end], experts[expert]) <= 1, (spec, expert)
            start = end
        assert not found[4000:].any()
        changed = gradient.clone()
        changed[700, 5] = float("inf")
        again = breccia.grouped_matmul(changed, experts, ends, "bfloat16")
        assert torch.equal(again[:640], found[:640]) and again[700].isinf().sum() > k // 2, spec
        calls[spec] = lambda experts=experts: breccia.grouped_matmul(gradient, experts, ends, "bfloat16")
        calls[f"{spec}, decoded to FP32"] = lambda experts=experts: breccia.grouped_matmul(
            gradient, experts, ends, "bfloat16", prefer="composite.grouped_matmul"
        )
    return elapsed(calls, 3, 3)


def hosts() -> dict[str, float]:
    k = 1024
    data = torch.randn(2048, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(k, k, device="cuda", dtype=torch.bfloat16)
    from breccia_triton.cuda.driver import driver

    print("address in tensor maps:", driver().address_word)
    found = {"F.linear": host(lambda i: torch.nn.functional.linear(data[:64], weight))}
    tile, mx, r = (
        breccia.cast(weight, "fp8_block,block_m=128").mT,
        breccia.cast(weight, "mxfp8").mT,
        breccia.recipe("fp8_block"),
    )
    found["cast"] = host(lambda i: breccia.cast(data[:64], r))
    found["cast, new rows"] = host(lambda i: breccia.cast(data[: 1 + i], r))
    a = breccia.cast(data[:64], r)
    found["fp8 matmul, same"] = host(lambda i: breccia.matmul(a, tile, "bfloat16"))
    kept: list[Any] = []
    many = [breccia.cast(data[: 16 + i], r) for i in range(60)]

    def fresh(i: int) -> None:
        kept.append(breccia.matmul(many[i], tile, "bfloat16"))

    found["fp8 matmul, new addresses and rows"] = host(fresh)
    found["cast + fp8 matmul, same rows"] = host(
        lambda i: kept.append(breccia.matmul(breccia.cast(data[:64], r), tile, "bfloat16"))
    )
    found["cast + fp8 matmul, other rows"] = host(
        lambda i: kept.append(breccia.matmul(breccia.cast(data[: 100 + i], r), tile, "bfloat16"))
    )
    found["mxfp8 matmul"] = host(
        lambda i: breccia.matmul(breccia.cast(data[:64], "mxfp8"), mx, "bfloat16", prefer="cuda.fp8_matmul")
    )
    count = iter(range(200, 100_000))
    found["cast + fp8 matmul, rows never seen"] = host(
        lambda i: kept.append(breccia.matmul(breccia.cast(data[: next(count)], r), tile, "bfloat16"))
    )
    x, gradient = data[:64].detach().requires_grad_(), torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
    linear = torch.nn.Linear(k, k, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    found["nn.Linear, forward and backward"] = host(lambda i: step(linear, x, gradient)())
    for spec in ("int4", "fp8_block,block_m=128"):
        layer = layer_of(weight, spec, True)
        found[f"layer {spec}, forward and backward"] = host(lambda i, layer=layer: step(layer, x, gradient)())
        with torch.no_grad():
            found[f"layer {spec}, one row"] = host(lambda i, layer=layer: layer(data[:1]))
            found[f"layer {spec}, new rows"] = host(lambda i, layer=layer: layer(data[: 1 + i]))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
