"""FP8 products on a CUDA device: breccia's kernels against torch's (cuBLAS, CUTLASS), other libraries' and BF16.

Times of MXFP8, MXFP4 and NVFP4 products through BF16 include decoding.

    python benchmarks/bench_gpu.py matmul [--kinds tiles] [--rivals humming] [--shapes 4096x7168x16384] [--bursts tiles]
        [--seconds 250] [--out RESULTS] [--table FILE]
    python benchmarks/bench_matmul.py --from RESULT --table FILE

A GPU lowers its clock under load, so the samples of all kernels of a row are interleaved: after a load of 0.25 s ("hot"), or
each after 0.35 s without work ("burst"). With `--bursts`, large products of these kinds are measured in both states. A sample
is one replay of a CUDA graph of 20 calls, or as many replays as take 1 ms; the first replay is not counted. If the weight fits
the device's cache, calls rotate through enough copies of it to exceed the cache. Every product is compared with FP64 before it
is timed.

`--table` writes the measured times that `score` reads (breccia_triton/configurations/matmul_<device>.json). With `--from`, it
takes them from a stored result, and needs no GPU.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import bench_gpu
import common
import rivals
import tables
import typer
from fp8_arms import Call, Make, column_major, ends_of, makers, operands
from fp8_checks import Reference, reference
from fp8_plan import (
    BF16,
    COLUMN_MAJOR,
    DECODED,
    DECODING,
    DEEP_GEMM,
    EXPERTS,
    HUMMING,
    KINDS,
    LARGE,
    OURS,
    PAIRS,
    RIVALS,
    TORCH,
    TORCH_PLAIN,
    TORCH_ROWS,
    chosen_rivals,
    planned,
)
from rivals import OLD, TRANSFORMER_ENGINE

app = typer.Typer(add_completion=False)

#: The benchmark's name in results.
NAME = "matmul-gpu"
#: Arms with other operands, to which the row's reference does not apply.
UNCHECKED = (BF16, TORCH_ROWS)
#: Arms that have to keep the contract's bound, except for kinds that end in "fast".
KEEPING = (OURS, COLUMN_MAJOR, DECODING)
#: Arms that are also measured after a pause.
IN_BURSTS = (OURS, TORCH)
#: Rows with a graph that is shorter than a sample take this many times the samples.
SHORT = 3
#: Time limit in seconds and samples of breccia 0.1.3, which is many times slower than the others.
OLD_S, OLD_SAMPLES = 40.0, 3


def measured_row(
    kind: str,
    shape: tuple[int, int, int],
    samples: int,
    device: str,
    burst: bool,
    bursts: bool,
    tiles: list[str],
    libraries: Collection[str],
    copiers: bool,
) -> dict[str, Any]:
    """A row of the result. bursts: measure IN_BURSTS again, after pauses. tiles, libraries, copiers: as in `makers`."""
    row: dict[str, Any] = {"kind": kind, "shape": shape, "tile": tile_name(kind, *shape), "times": {}}
    try:
        a, ws = operands(kind, *shape, device)
        turned = column_major(a) if kind in ("tiles", "blocks") else None
        expected = reference(a, ws[0], ends_of(shape[0], a.data.device) if kind.startswith("grouped") else None)
        arms = makers(kind, a, ws, turned, tiles, libraries, copiers)
        row["times"], row["clock_mhz"] = measured(arms, kind, expected, samples, device, burst, bursts)
    except Exception as e:  # such as too little memory; one row that fails must not stop the rest
        row["error"] = bench_gpu.message(e)
    return row


def measured(
    calls: Mapping[str, Make], kind: str, expected: Reference, samples: int, device: str, burst: bool, bursts: bool
) -> tuple[dict[str, Any], int | None]:
    """(times or the error of each arm, the clock under load). bursts: measure IN_BURSTS again, after pauses."""
    found: dict[str, Any] = {}
    timers: dict[str, bench_gpu.Timer] = {}
    alive = list[Call]()  # a CUDA graph keeps addresses, not tensors: the calls hold the tensors
    for name, make in calls.items():
        try:
            alive.append(make())
            found[name], timers[name] = prepared(name, alive[-1], kind, expected, device)
        except Exception as e:  # of any library; one arm that fails must not stop the rest
            found[name] = {"error": bench_gpu.message(e)}
    clock = None if burst else bench_gpu.load(device)
    short = any(timer.calls > 1 for timer in timers.values())
    sampled(timers.values(), samples * (SHORT if short else 1), device, burst)
    paused = {name: timer.anew() for name, timer in timers.items() if bursts and name in IN_BURSTS}
    sampled(paused.values(), samples, device, True)
    for state, some in (("graph", timers), ("burst", paused)):
        for name, timer in some.items():
            found[name][state] = common.summary(timer.seconds)
    return found, clock


def prepared(name: str, call: Call, kind: str, expected: Reference, device: str) -> tuple[dict[str, Any], bench_gpu.Timer]:
    """(the error of the call's product and its host time, a timer). Raises ValueError for a wrong product."""
    found: dict[str, Any] = {}
    product = call()
    if name not in UNCHECKED:
        error = found["error_over_bound"] = expected.error_over_bound(product)
        if error > 1 and name in KEEPING and not kind.endswith("fast"):
            raise ValueError(f"the error is {error:.3g} times the bound of the contract")
    for _ in range(bench_gpu.WARM_UP):
        call()
    bench_gpu.synchronize(device)
    if name.startswith(OURS):
        found["host"] = common.summary([bench_gpu.host_time(call, device) for _ in range(3)])
    if device == "cpu":
        return found, bench_gpu.Timer(call)
    replay = bench_gpu.graph_of(call)
    # The first replay also uploads the graph to the device: 0.07 ms in the median, for products of 7 and of 100 µs alike.
    _, once = (bench_gpu.elapsed(replay, 1, device) for _ in range(2))
    return found, bench_gpu.Timer(replay, bench_gpu.GRAPH_CALLS, math.ceil(bench_gpu.SAMPLE_S / once))


def sampled(timers: Collection[bench_gpu.Timer], count: int, device: str, idle: bool) -> None:
    """Take `count` samples of each timer, interleaved. idle: pause before each sample."""
    for _ in range(count):
        for timer in timers:
            if idle:
                time.sleep(bench_gpu.IDLE_S)
            timer.sample(device)


def lengths(shape: str) -> tuple[int, int, int]:
    """M, N and K of "4096x7168x16384". Exits on any other text."""
    sides = shape.split("x")
    if len(sides) != 3 or not all(side.isdecimal() and int(side) for side in sides) or int(sides[2]) % 128:
        sys.exit(f"bench_matmul: --shapes takes MxNxK, K a multiple of 128; got {shape!r}.")
    return int(sides[0]), int(sides[1]), int(sides[2])


def line(row: dict[str, Any]) -> str:
    """A row as text: TFLOP/s of each arm, and breccia's speed relative to torch's."""
    m, n, k = row["shape"]
    rates = {
        f"{name}{' after pauses' if state == 'burst' else ''}": 2e-12 * m * n * k / t[state]["median_s"]
        for name, t in row["times"].items()
        for state in ("graph", "burst")
        if state in t
    }
    said = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    ratio = f"  ({rates[OURS] / rates[TORCH]:.3f} x torch)" if {OURS, TORCH} <= rates.keys() else ""
    errors = "  ".join(f"{name}: {t['error']}" for name, t in row["times"].items() if "error" in t)
    return f"{row['kind']:13} {m}x{n}x{k} {row['tile']:16} {said}{ratio}  {errors}"


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


#: The arms whose times `score` reads, with the prefixes of their keys. For torch's products of blocks it reads the times that
#: include breccia's copies of plain scales.
_SCORED = {OURS: "cuda", TORCH: "torch", HUMMING: "humming", DEEP_GEMM: "deep_gemm", TRANSFORMER_ENGINE: "transformer_engine"}


def slowdowns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median times relative to estimates, by the keys of `breccia_triton.cuda.fp8_plans.slowdowns`."""
    import breccia
    from breccia_triton import bf16_plans, choices
    from breccia_triton.cuda import fp8_plans

    found: dict[str, float] = {}
    for row in rows:
        (m, n, k), kind = row["shape"], row["kind"]
        taken = {name: timed["graph"]["median_s"] for name, timed in row["times"].items() if "graph" in timed}
        taken[TORCH] = taken.get(TORCH_PLAIN, taken.get(TORCH, 0.0))
        for arm, kernel in _SCORED.items():
            # breccia's table calls TransformerEngine for one scale per tensor only.
            unread = arm == TRANSFORMER_ENGINE and kind != "tensor"
            if kind in PAIRS and taken.get(arm) and not unread:
                key = choices.measured_key(fp8_plans.head_of(kernel, PAIRS[kind]), m, n, k)
                found[key] = taken[arm] / fp8_plans.bound(m, n, k)
        if DECODING in taken:
            formats = [breccia.recipe(spec).format for spec in KINDS[kind]]
            key = choices.measured_key(bf16_plans.head_of(formats), m, n, k)
            found[key] = taken[DECODING] / bf16_plans.estimate(m, n, k, 1, formats, False)
    return {key: round(value, 4) for key, value in sorted(found.items())}


def write_table(table: Path, result: Mapping[str, Any], anew: bool) -> None:
    """Write a result's measured times, which `score` reads. anew: replace the file instead of adding to it."""
    from breccia_triton import choices

    if anew:
        table.unlink(missing_ok=True)
    device = result["provenance"]["device"].partition(",")[0]
    choices.write_measured(table, device, "slowdowns", slowdowns(result["rows"]), result["provenance"])


def write_from(source: Path, table: Path | None) -> None:
    """Write the measured times of a stored result. Exits without a table's file, and on results of other benchmarks."""
    if table is None:
        sys.exit("bench_matmul: --from takes a result and writes its table; name the file by --table.")
    result = json.loads(source.read_text(encoding="utf-8"))
    if result.get("benchmark") != NAME:
        sys.exit(f"bench_matmul: --from takes a result of {NAME}; {source.name} is one of {result.get('benchmark')!r}.")
    write_table(table, result, anew=True)


def add_old(rows: list[dict[str, Any]], seconds: float) -> str:
    """Add breccia 0.1.3 to large products with one scale per tensor. Returns why it did not run, or \"\"."""
    large = [list(lengths(shape)) for shape in LARGE]
    wanted = {"x".join(map(str, row["shape"])): row for row in rows if row["kind"] == "tensor" and list(row["shape"]) in large}
    if not wanted:
        return "no large product with one scale per tensor was measured"
    flags = [word for shape in wanted for word in ("--shapes", shape)]
    flags += ["--samples", str(OLD_SAMPLES), "--seconds", str(seconds)]
    try:
        found = common.child("old_matmul.py", *flags, python_path=rivals.python_path(OLD))
    except SystemExit as e:
        return str(e)
    for shape, timed in found.items():
        wanted[shape]["times"][OLD] = timed
    return ""


@app.command()
def main(
    kinds: Annotated[
        list[str] | None, typer.Option(help=f"Kinds of scales: {', '.join(KINDS)}; repeatable. Default: a plan.")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(help="MxNxK, measured for every kind; repeatable. Default: a plan.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 5,
    seconds: Annotated[
        float, typer.Option(help="Start no row after this many seconds; the result counts the rows left out.")
    ] = math.inf,
    burst: Annotated[bool, typer.Option("--burst", help="Idle before every sample; no load before a row.")] = False,
    bursts: Annotated[
        list[str] | None, typer.Option(help="Also measure large products of these kinds after pauses; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    rivals_: Annotated[
        list[str] | None,
        typer.Option("--rivals", help=f"{', '.join((*RIVALS, OLD))}; repeatable. Default: those that are installed."),
    ] = None,
    tiles: Annotated[list[str] | None, typer.Option(help="Also time these tiles of fp8_plans.TABLE; repeatable.")] = None,
    copiers: Annotated[bool, typer.Option("--copiers", help="Also time kernels whose warps copy plain scales.")] = False,
    table: Annotated[Path | None, typer.Option(help="Write the measured times that `score` reads to this file.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Measure nothing; write --table from this result.")] = None,
) -> None:
    """Time products of FP8 tensors."""
    if source is not None:
        return write_from(source, table)
    import torch

    bench_gpu.check_device(device)
    bench_gpu.known(kinds, tuple(KINDS), "--kinds")
    bench_gpu.known(bursts, tuple(KINDS), "--bursts")
    bench_gpu.known(rivals_, (*RIVALS, OLD), "--rivals")
    versions, absent = chosen_rivals(rivals_ or [])
    plan = [(lengths(shape), kind) for shape, kind in planned(kinds, shapes)]
    large = [lengths(shape) for shape in LARGE]
    options = {"device": device, "state": "burst" if burst else "hot", "samples": samples, "graph_calls": bench_gpu.GRAPH_CALLS}
    result: dict[str, Any] = {"benchmark": NAME, "schema": common.SCHEMA}
    result |= {"provenance": bench_gpu.where(device), "options": options | {"bursts": bursts or []}}
    rows, started = list[dict[str, Any]](), time.monotonic()
    for shape, kind in plan:
        if time.monotonic() - started > seconds:
            break
        also = kind in (bursts or ()) and shape in large and not burst
        row = measured_row(kind, shape, samples, device, burst, also, tiles or [], versions, copiers)
        rows.append(row)
        print(line(row) + row.get("error", ""), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    if OLD in versions and (why := add_old(rows, OLD_S)):
        del versions[OLD]
        absent[OLD] = why
    result |= {"rivals": versions, "absent": absent, "left": len(plan) - len(rows), "rows": rows}
    result = json.loads(json.dumps(result))
    if table is not None and rows:
        write_table(table, result, anew=False)
    tables.tell(result, out, False, "burst" if burst else "")


if __name__ == "__main__":
    app()
