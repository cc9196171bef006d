"""FP8 products on a CUDA device: breccia's kernels against torch's (cuBLAS, CUTLASS), other libraries' and BF16.

Products of MXFP8, MXFP4 and NVFP4 through BF16 are timed with their decoding.

    python benchmarks/bench_matmul.py [--kinds tiles] [--rivals humming] [--shapes 4096x7168x16384] [--burst] [--seconds 80]
        [--out RESULTS]

A GPU lowers its clock under load, so the samples of all kernels of a row are interleaved: after a load of 0.25 s ("hot"), or
each after 0.35 s without work ("burst"). A sample is one replay of a CUDA graph of 20 calls. Where the weight fits the device's
cache, calls rotate through copies of it that do not. Every product is compared with FP64 before it is timed. `--table` writes
what `score` reads (breccia_triton/configurations/matmul_<device>.json).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import bench_gpu
import common
import tables
import typer

app = typer.Typer(add_completion=False)

#: Shapes of shared/performance.md, and a sweep of M.
SHAPES = (
    "4096x7168x16384", "4096x4096x4096", "8192x8192x8192", "4096x2112x7168", "4096x24576x1536", "128x7168x16384",
    "64x7168x16384", "128x7168x2048", "1x7168x16384", "16x7168x16384", "32x7168x2048", "256x7168x7168", "512x7168x7168",
    "1024x7168x7168", "2048x7168x7168",
)  # fmt: skip
#: Kinds of scales, with the recipes of a and w.
KINDS = {
    "tiles": ("fp8_block", "fp8_block,block_m=128"),
    "row": ("fp8_row", "fp8_row"),
    "tensor": ("fp8_current", "fp8_current"),
    "blocks": ("fp8_block", "fp8_block"),
    "mx": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "row fast": ("fp8_row", "fp8_row"),
    "tensor fast": ("fp8_current", "fp8_current"),
    "grouped row": ("fp8_row", "fp8_row"),
}
#: Kinds that only the kernel through BF16 multiplies; and its name, also for kind "mx".
DECODED, THROUGH_BF16 = ("mxfp4", "nvfp4"), "triton.matmul_bf16"
#: Libraries whose products are timed where they are installed, by the module that says so.
TRANSFORMER_ENGINE, HUMMING, DEEP_GEMM = "transformer-engine", "humming", "deep_gemm"
RIVALS = {TRANSFORMER_ENGINE: "transformer_engine", HUMMING: "humming", DEEP_GEMM: "deep_gemm"}
#: Those that are kernels of breccia's table, and the kinds that they multiply.
IN_TABLE = {HUMMING: ("humming.fp8_matmul", ("tiles", "row")), DEEP_GEMM: ("deep_gemm.fp8_matmul", ("tiles",))}
#: Experts of grouped products, whose rows are uneven.
EXPERTS = 8
#: Relative errors above this, of random data in BF16, are a wrong product.
WRONG = 0.02
Call = Callable[[], object]
#: breccia's own rules that `force` replaces.
_RULES: dict[str, Any] = {}


def operands(kind: str, m: int, n: int, k: int, device: str) -> tuple[Any, list[Any]]:
    """(a, copies of w that together exceed the device's cache)."""
    import torch

    import breccia

    generator = torch.Generator(device).manual_seed(0)
    first, second = (breccia.recipe(spec) for spec in KINDS[kind])
    x = torch.randn(m, k, device=device, generator=generator, dtype=torch.bfloat16)
    lead = (EXPERTS,) if kind.startswith("grouped") else ()
    y = torch.randn(*lead, n, k, device=device, generator=generator, dtype=torch.bfloat16) * 0.02
    a, w = breccia.cast(x, first), breccia.cast(y, second)
    cache = torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else 0
    copies = min(math.ceil(2 * cache / w.nbytes), 20)
    return a, [w, *(breccia.cast(y, second) for _ in range(copies - 1))]


def makers(
    kind: str, a: Any, ws: list[Any], column_major: Any, tiles: list[str], rivals: list[str], copiers: bool
) -> dict[str, Callable[[], Call | None]]:  # fmt: skip
    """The calls of a row, by name; each makes what it needs before it is timed. tiles: those to try besides the chosen one."""
    import torch

    import breccia

    fast = " fast" if kind.endswith("fast") else ""
    shape = (a.shape[0], ws[0].shape[-2])
    out = torch.empty(shape, device=a.data.device, dtype=torch.bfloat16)
    rearranging = IN_TABLE[HUMMING][0]

    def by(kernel: str, left: Any = a, tile: str = "", copiers: bool | None = None) -> Callable[[], Call | None]:
        def make() -> Call | None:
            force(tile, copiers)
            if kernel == rearranging:
                for w in ws:  # once for each weight, which a graph cannot capture
                    breccia.matmul(left, w.mT, "bfloat16", out=out, prefer=kernel)
            return bench_gpu.rotating(lambda w: breccia.matmul(left, w, "bfloat16", out=out, prefer=kernel), [w.mT for w in ws])

        return make

    def bf16() -> Call:
        x = torch.randn(a.shape, device=a.data.device, dtype=torch.bfloat16)
        ys = [torch.randn(w.shape, device=a.data.device, dtype=torch.bfloat16) for w in ws[: max(1, len(ws) // 2)]]
        return bench_gpu.rotating(lambda y: torch.mm(x, y, out=out), [y.t() for y in ys])

    if kind.startswith("grouped"):
        return grouped_makers(a, ws, out)
    if kind in DECODED:
        return {"breccia, through BF16": by(THROUGH_BF16), "bf16": bf16}
    ours = "cuda.fp8_matmul_fast" if fast else "cuda.fp8_matmul"
    found = {"breccia": by(ours)}
    if kind == "mx":
        found["breccia, through BF16"] = by(THROUGH_BF16)
    else:
        found["torch"] = by("torch.scaled_mm" + ("_fast" if fast else ""))
    if column_major is not None:
        found["breccia, column-major scales"] = by(ours, column_major)
        found["torch, plain scales"] = found.pop("torch")  # as the table of kernels calls it, which copies them
        found["torch"] = lambda: torch_blocks(kind, column_major, ws, out)
    if TRANSFORMER_ENGINE in rivals and kind in ("tensor", "tensor fast", "tiles", "blocks"):
        found[TRANSFORMER_ENGINE] = lambda: transformer_engine(kind, a, ws, out)
    found |= {rival: by(name) for rival, (name, kinds) in IN_TABLE.items() if rival in rivals and kind in kinds}
    found |= {f"tile {name}": by(ours, tile=name) for name in tiles}
    if copiers and kind in ("tiles", "blocks", "mx"):
        found["breccia, copiers"] = by(ours, copiers=True)
        found |= {f"tile {name}, copiers": by(ours, tile=name, copiers=True) for name in tiles}
    return found | ({"bf16": bf16} if kind in ("tiles", "mx") else {})


def force(name: str, copiers: bool | None) -> None:
    """Let breccia's kernel take the tile named for calls that are prepared from now on; "" for the one that it chooses.

    copiers: whether warps copy plain scales; None for what it chooses.
    """
    from breccia_triton.cuda import fp8_matmul, fp8_plans

    rule = _RULES.setdefault("copiers", fp8_plans.copiers)
    tiles = {tile.name: tile for tile in (*fp8_plans.TABLE, fp8_plans.short(fp8_plans.TABLE[0], 1))}
    chosen = fp8_plans.tile_of if not name else lambda *lengths: tiles[name]
    fp8_matmul.tile_of = chosen  # pyright: ignore[reportAttributeAccessIssue]
    fp8_plans.copiers = rule if copiers is None else lambda *of: copiers
    fp8_matmul.forget()


def column_major(a: Any) -> Any:
    """`a` with column-major scales in memory of their own: `to_storage` gives a view, which would be copied at each call."""
    import breccia

    st = a.to_storage("column_major")
    return breccia.ScaledTensor.from_parts(
        st.data, st.scale.contiguous(), st.recipe, st.layout, axis=st.axis, padding=st.padding
    )


def torch_blocks(kind: str, a: Any, ws: list[Any], out: Any) -> Call:
    """cuBLAS for blocks, with scales in the order that it reads, so that no copy of them is timed."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    from breccia_triton.cuda.scaled_mm import rows_adjacent

    scale = rows_adjacent(a.to_plain().scale)
    across = ScalingType.BlockWise128x128 if kind == "tiles" else ScalingType.BlockWise1x128
    scales = [w.scale.t() if kind == "tiles" else rows_adjacent(w.scale) for w in ws]
    pairs = list(zip([w.data.t() for w in ws], scales, strict=True))

    def call(pair: Any) -> object:
        return scaled_mm(
            a.data, pair[0], scale, ScalingType.BlockWise1x128, pair[1], across, output_dtype=torch.bfloat16
        )  # fmt: skip

    return bench_gpu.rotating(call, pairs)


def transformer_engine(kind: str, a: Any, ws: list[Any], out: Any) -> Call:
    """TransformerEngine's products (cuBLAS behind its own checks), of the same codes and scales."""
    import torch
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    import breccia

    left, *weights = (breccia.to_foreign(st, "transformer_engine") for st in (a, *ws))
    precise = not kind.endswith("fast")

    def call(w: Any) -> object:
        return general_gemm(w, left, out_dtype=torch.bfloat16, out=out, use_split_accumulator=precise)[0]

    return bench_gpu.rotating(call, weights)


def grouped_makers(a: Any, ws: list[Any], out: Any) -> dict[str, Callable[[], Call | None]]:
    """Groups of uneven sizes."""
    import torch

    import breccia

    shares = torch.arange(1, EXPERTS + 1, dtype=torch.float64).cumsum(0)
    ends = (shares / shares[-1] * a.shape[0]).to(torch.int32).to(a.data.device)

    def ours() -> Call:
        def call(w: Any) -> object:
            return breccia.grouped_matmul(a, w, ends, "bfloat16", out=out, prefer="cuda.fp8_grouped_matmul")

        return bench_gpu.rotating(call, [w.mT for w in ws])

    def theirs() -> Call:
        scale = a.scale.reshape(-1)

        def call(w: Any) -> object:
            scales = w.scale.reshape(EXPERTS, -1)
            return torch._scaled_grouped_mm(
                a.data, w.data.mT, scale, scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
            )  # fmt: skip

        return bench_gpu.rotating(call, ws)

    return {"breccia": ours, "torch": theirs}


def checked(name: str, call: Call, kind: str, a: Any, w: Any) -> None:
    """Raise unless the first rows of the product are right."""
    import breccia

    found: Any = call()
    if name == "bf16" or kind.startswith("grouped"):
        return
    rows = min(a.shape[0], 64)
    exact = (breccia.dequantize(a[:rows] if a.storage == "plain" else a).double()[:rows]) @ breccia.dequantize(w).double().t()
    error = ((found[:rows].double() - exact).norm() / exact.norm()).item()
    if not error < WRONG:
        raise ValueError(f"the relative error is {error:.3g}")


def measured(
    calls: dict[str, Callable[[], Call | None]], kind: str, a: Any, w: Any, samples: int, device: str, burst: bool
) -> tuple[dict[str, Any], int | None]:  # fmt: skip
    """(by name the samples of each graph, or what it raised; the clock under load)."""
    found: dict[str, Any] = {}
    timers: dict[str, bench_gpu.Timer] = {}
    for name, make in calls.items():
        try:
            call = make()
            if call is None:
                continue
            checked(name, call, kind, a, w)
            for _ in range(bench_gpu.WARM_UP):
                call()
            bench_gpu.synchronize(device)
            found[name] = {}
            if name.startswith("breccia"):
                found[name]["host"] = common.summary([bench_gpu.host_time(call, device) for _ in range(3)])
            graph = bench_gpu.graph_of(call) if device == "cuda" else call
            timers[name] = bench_gpu.Timer(graph, bench_gpu.GRAPH_CALLS if device == "cuda" else 1, 1)
        except Exception as e:
            found[name] = {"error": bench_gpu.message(e)}
    clock = None if burst else bench_gpu.load(device)
    for _ in range(samples):
        for timer in timers.values():
            if burst:
                time.sleep(bench_gpu.IDLE_S)
            timer.sample(device)
    for name, timer in timers.items():
        found[name]["graph"] = common.summary(timer.seconds)
    return found, clock


def lengths(shape: str) -> tuple[int, int, int]:
    """M, N and K of "4096x7168x16384". Exits on others."""
    sides = shape.split("x")
    if len(sides) != 3 or not all(side.isdecimal() and int(side) for side in sides) or int(sides[2]) % 128:
        sys.exit(f"bench_matmul: --shapes takes MxNxK, K a multiple of 128; got {shape!r}.")
    return int(sides[0]), int(sides[1]), int(sides[2])


def line(row: dict[str, Any]) -> str:
    """A row in text: TFLOP/s, and breccia's over the best other's."""
    m, n, k = row["shape"]
    rates = {name: 2e-12 * m * n * k / t["graph"]["median_s"] for name, t in row["times"].items() if "graph" in t}
    said = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    ratio = f"  ({rates['breccia'] / rates['torch']:.3f} x torch)" if {"breccia", "torch"} <= rates.keys() else ""
    errors = "  ".join(f"{name}: {t['error']}" for name, t in row["times"].items() if "error" in t)
    return f"{row['kind']:11} {m}x{n}x{k} {row['tile']:16} {said}{ratio}  {errors}"


def tile_name(kind: str, m: int, n: int, k: int) -> str:
    """The tile that breccia's FP8 kernel takes; "-" for kinds that it does not multiply."""
    import torch

    from breccia_triton.cuda import fp8_plans

    if kind in DECODED:
        return "-"
    if kind.startswith("grouped"):
        return fp8_plans.grouped_tile_of(m, EXPERTS, k).name
    processors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132
    return fp8_plans.tile_of(m, n, k, 1, processors).name


def slowdowns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The medians of times over the bound of the roofline, as `breccia_triton.cuda.fp8_plans.slowdowns` has them."""
    from breccia_triton.cuda import fp8_plans

    pairs = {"tiles": ("1x128", "128x128"), "row": ("row", "row"), "tensor": ("tensor", "tensor"), "blocks": ("1x128", "1x128")}
    pairs["mx"] = "1x32", "1x32"
    found: dict[str, list[float]] = {}
    for row in rows:
        times = row["times"]
        for name, kernel in (
            ("breccia", "cuda"),
            ("torch, plain scales" if "torch, plain scales" in times else "torch", "torch"),
            (HUMMING, "humming"),
            (DEEP_GEMM, "deep_gemm"),
        ):
            taken = times.get(name, {}).get("graph")
            if taken and row["kind"] in pairs:
                m, n, k = row["shape"]
                key = fp8_plans.key_of(kernel, pairs[row["kind"]], m)
                found.setdefault(key, []).append(taken["median_s"] / fp8_plans.bound(m, n, k))
    return {key: round(statistics.median(values), 4) for key, values in sorted(found.items())}


@app.command()
def main(
    kinds: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; repeatable.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="MxNxK; repeatable.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 5,
    seconds: Annotated[float, typer.Option(help="Begin no row later than this; rows left out are counted.")] = math.inf,
    burst: Annotated[bool, typer.Option("--burst", help="Idle before every sample; no load before a row.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    rivals: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(RIVALS)}; repeatable; by default the installed.")
    ] = None,
    tiles: Annotated[list[str] | None, typer.Option(help="Also force these tiles of fp8_plans.TABLE; repeatable.")] = None,
    copiers: Annotated[bool, typer.Option("--copiers", help="Also with warps that copy plain scales, for any tile.")] = False,
    table: Annotated[Path | None, typer.Option(help="File for the measured times that `score` reads.")] = None,
) -> None:
    """Time products of FP8 tensors."""
    import torch

    bench_gpu.check_device(device)
    chosen = bench_gpu.known(kinds, tuple(KINDS), "--kinds")
    against = bench_gpu.known(rivals, tuple(RIVALS), "--rivals")
    against = [name for name in against if rivals or find_spec(RIVALS[name])]
    sides = [lengths(shape) for shape in shapes or SHAPES]
    options = {"device": device, "state": "burst" if burst else "hot", "samples": samples, "graph_calls": bench_gpu.GRAPH_CALLS}
    result: dict[str, Any] = {"benchmark": "matmul-gpu", "schema": common.SCHEMA}
    result |= {"provenance": bench_gpu.where(device), "options": options}
    rows, left, started = [], 0, time.monotonic()
    for shape in sides:
        for kind in chosen:
            if time.monotonic() - started > seconds:
                left += 1
                continue
            row: dict[str, Any] = {"kind": kind, "shape": shape, "tile": tile_name(kind, *shape), "times": {}}
            a, ws = None, []
            try:
                a, ws = operands(kind, *shape, device)
                blocks = kind in ("tiles", "blocks")
                turned = column_major(a) if blocks else None
                row["times"], row["clock_mhz"] = measured(
                    makers(kind, a, ws, turned, tiles or [], against, copiers), kind, a, ws[0], samples, device, burst
                )  # fmt: skip
            except Exception as e:
                row["error"] = bench_gpu.message(e)
            rows.append(row)
            print(line(row) + row.get("error", ""), flush=True)
            del a, ws
            if device == "cuda":
                torch.cuda.empty_cache()
    result |= {"left": left, "rows": rows}
    result = json.loads(json.dumps(result))
    if table is not None and rows:
        from breccia_triton import choices

        name = torch.cuda.get_device_name() if device == "cuda" else device
        choices.write_measured(table, name, "slowdowns", slowdowns(rows), result["provenance"])
    tables.tell(result, out, False, "burst" if burst else "")


if __name__ == "__main__":
    app()
