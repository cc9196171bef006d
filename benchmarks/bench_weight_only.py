"""On a Hopper GPU: products of BF16 activations and quantized weights, against BF16, torch's INT4, humming and Triton.

    python benchmarks/bench_weight_only.py [--formats int4 --shapes 8192x8192 --rows 1 --rows 16] [--seconds 60] [--out RESULTS]
    python benchmarks/bench_weight_only.py --tune [--rows 1024] [--out RESULTS]    # tries every configuration; see join.py
    python benchmarks/bench_weight_only.py --groups 8 --rows 16 --rows 64 --rows 2048    # products of unequal groups of rows
    python benchmarks/bench_weight_only.py --rivals humming --table FILE    # writes the measured times that `score` reads

Each sample replays a CUDA graph of products by several copies of the weight, which together exceed the L2 cache. Samples of all
kernels of a row are interleaved, since a GPU lowers its clock under load. Before that, up to 64 rows of each result are
compared with FP64; the largest error is recorded as a multiple of the contract's bound. Kernels are compiled in parallel
beforehand. The arm `triton` is breccia's kernel for other devices. A copy and a sum of 2 GiB measure the memory's rate in the
same run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import common
import typer
from weight_arms import (
    BEYOND_CACHE,
    BF16,
    BF16_EACH,
    BF16_GROUPED,
    FORMATS,
    HUMMING,
    IN_TABLE,
    MEASURED,
    MOST,
    OURS,
    ROWS,
    STORAGE,
    TORCH,
    TRITON,
    Row,
    compile_before,
    copy_of,
    grouped_reference,
    memory_rate,
    reference,
    weights_of,
)
from weight_configs import build, call_of, candidates, grouped_candidates, label_of

app = typer.Typer(add_completion=False)
#: With `--tune`, a configuration replaces the default one if it takes at most this part of its time: samples differ by 1 %.
FASTER = 0.99

# -- the benchmark ---------------------------------------------------------------------------------------------------


def measured(name: str, n: int, k: int, rows: list[int], rivals: list[str], rounds: int, tune: bool, until: float) -> Any:
    """(rows of the result, one for each M; tuned configurations by key; notes). until: start no row after this time."""
    import torch

    import breccia
    from breccia_triton import weight_plans
    from breccia_triton.choices import codecs_of

    plain, values, copies = weights_of(FORMATS[name], n, k)
    block = plain.layout.block(-1)
    operand: Any = weight_plans.operand_of(plain.recipe.format, block)
    weights = [st.mT for st in copies]
    count = len(weights)
    notes: dict[str, str] = {}
    bf16 = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, -(-BEYOND_CACHE // (2 * n * k))))]
    plains = [plain, *(copy_of(plain) for _ in range(count - 1))] if rivals else []
    table: list[dict[str, Any]] = []
    tuned: dict[str, Any] = {}
    for m in rows:
        if time.perf_counter() > until:
            notes["left out"] = f"M = {m}: out of time"
            continue
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        row_of = Row(y, reference(x, values), m, notes)
        add = row_of.add
        add(OURS, [lambda w=w: breccia.matmul(x, w, torch.bfloat16, out=y) for w in weights])  # noqa: B023
        name_of_device = torch.cuda.get_device_name()
        chosen = weight_plans.config_of(operand, codecs_of(plain.recipe.format), m, n, k, name_of_device, direct=True)
        by_name: dict[str, Any] = {OURS: chosen}
        if tune:
            tried = candidates(operand, m, k)
            build(operand, tried)
            for config in tried:
                label = label_of(config)
                by_name[label] = config
                try:
                    call = call_of(config, x, weights[0])
                except Exception as e:  # one configuration that fails must not stop the rest
                    notes[f"{label} M={m}"] = f"{type(e).__name__}: {e}"[:200]
                    continue
                add(label, [lambda w=w, call=call: call(x, w, None, y) for w in weights])  # noqa: B023
        add(BF16, [lambda w=w: torch.mm(x, w.t(), out=y) for w in bf16], check=False)  # noqa: B023
        for rival in rivals:
            if m > MOST.get(rival, m):
                continue
            kernel, out = IN_TABLE[rival], None if rival == TORCH else y  # torch allocates its results
            operands = [w.mT for w in plains]
            named = breccia.explain("matmul", x, operands[0], out_dtype=torch.bfloat16, prefer=kernel)
            if named.winner is None:
                notes[rival] = next(v.reason for v in named.verdicts if v.kernel.name == kernel) or ""
                continue

            def multiply(w: Any, x: Any = x, kernel: str = kernel, out: Any = out) -> Any:
                return breccia.matmul(x, w, torch.bfloat16, out=out, prefer=kernel)

            add(rival, [lambda w=w, multiply=multiply: multiply(w) for w in operands])
        seconds = row_of.times(rounds)
        read = copies[0].nbytes + 2 * m * (n + k)
        row = {"format": name, "n": n, "k": k, "m": m, "bytes": read, "config": weight_plans.entry_of(chosen), "times": seconds}
        table.append(row)
        tell(row, notes)
        if tune and OURS in seconds:
            least, best = min((found["median_s"], kernel) for kernel, found in seconds.items() if kernel in by_name)
            best = best if least <= FASTER * seconds[OURS]["median_s"] else OURS
            key = weight_plans.key_of(codecs_of(plain.recipe.format), operand.group, m, n, k)
            tuned[key] = {**weight_plans.entry_of(by_name[best])}
        row_of.graphs.clear()
    return table, tuned, notes


def slowdowns(table: list[dict[str, Any]]) -> dict[str, float]:
    """Median times relative to the roofline's bound, by the keys of `breccia_triton.weight_times.slowdowns`."""
    import breccia
    from breccia_triton import weight_times

    found: dict[str, list[float]] = {}
    for row in table:
        recipe = breccia.recipe(FORMATS[row["format"]])
        fmt, block = recipe.format, recipe.layout.block(-1)
        bound = weight_times.bound(row["m"], row["n"], row["k"], weight_times.bits_of(fmt, block))
        for arm, kernel in MEASURED.items():
            if arm in row["times"]:
                key = weight_times.key_of(kernel, fmt, block, row["m"])
                found.setdefault(key, []).append(row["times"][arm]["median_s"] / bound)
    return {key: round(statistics.median(values), 4) for key, values in sorted(found.items())}


# -- groups ----------------------------------------------------------------------------------------------------------


def sizes_of(m: int, groups: int) -> list[int]:
    """Rows of each group: in proportion to 1, 3, 5, ... in a fixed unsorted order. The first group takes the remainder."""
    shares = [1 + 2 * (5 * i % groups) for i in range(groups)]
    found = [m * share // sum(shares) for share in shares]
    return [found[0] + m - sum(found), *found[1:]]


def measured_groups(name: str, n: int, k: int, rows: list[int], groups: int, rounds: int, tune: bool, until: float) -> Any:
    """(rows of the result, one for each M; notes). M counts the rows of all groups."""
    import torch

    import breccia
    from breccia_triton import weight_plans
    from breccia_triton.weight_only import GroupedCall

    recipe = breccia.recipe(FORMATS[name])
    torch.manual_seed(0)
    each = [breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, recipe) for _ in range(groups)]
    plain = breccia.stack(each)
    values = [breccia.dequantize(one).double() for one in each]
    stored = plain.to_storage(STORAGE)
    operand: Any = weight_plans.operand_of(plain.recipe.format, plain.layout.block(-1))
    copies = [stored, *(copy_of(stored) for _ in range(max(1, -(-BEYOND_CACHE // stored.nbytes) - 1)))]
    weights = [st.mT for st in copies]
    many = max(2, -(-BEYOND_CACHE // (2 * groups * n * k)))
    bf16 = [torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(many)]
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    table: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for m in rows:
        if time.perf_counter() > until:
            notes["left out"] = f"M = {m}: out of time"
            continue
        sizes = sizes_of(m, groups)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        row_of = Row(y, grouped_reference(x, values, sizes), m, notes)
        call = GroupedCall(x, weights[0], "bfloat16")
        row_of.add(OURS, [lambda w=w: breccia.grouped_matmul(x, w, ends, torch.bfloat16, out=y) for w in weights])  # noqa: B023
        tried = grouped_candidates(operand, m, groups, k) if tune else []
        build(operand, tried, grouped=True)
        for config in tried:
            try:
                other = GroupedCall(x, weights[0], "bfloat16", config)
            except Exception as e:  # one configuration that fails must not stop the rest
                notes[f"{label_of(config)} M={m}"] = f"{type(e).__name__}: {e}"[:200]
                continue
            row_of.add(label_of(config), [lambda w=w, other=other: other(x, w, ends, y) for w in weights])  # noqa: B023
        if grouped is not None:
            row_of.add(BF16_GROUPED, [lambda w=w: grouped(x, w.mT, offs=ends) for w in bf16], check=False)  # noqa: B023
        pieces = list(zip(range(groups), x.split(sizes), y.split(sizes), strict=True))

        def alone(w: Any, pieces: Any = pieces) -> None:
            for i, rows, to in pieces:
                if len(rows):
                    torch.mm(rows, w[i].t(), out=to)

        row_of.add(BF16_EACH, [lambda w=w: alone(w) for w in bf16], check=False)
        seconds = row_of.times(rounds)
        used = sum(size > 0 for size in sizes)
        read = copies[0].nbytes * used // groups + 2 * m * (n + k)
        row = {"format": name, "n": n, "k": k, "m": m, "groups": groups, "sizes": sizes, "bytes": read, "times": seconds}
        row["config"] = weight_plans.entry_of(call.config)
        table.append(row)
        tell(row, notes)
        row_of.graphs.clear()
    return table, notes


def tell(row: dict[str, Any], notes: dict[str, str]) -> None:
    """Print a row: medians in microseconds, breccia's bandwidth and error, and the three fastest tuned configurations."""
    times = {kernel: found["median_s"] * 1e6 for kernel, found in row["times"].items()}
    known = [kernel for kernel in (OURS, BF16, BF16_GROUPED, TORCH, HUMMING, TRITON) if kernel in times]
    text = "  ".join(f"{kernel} {times[kernel]:7.2f}" for kernel in known)
    others = sorted((value, kernel) for kernel, value in times.items() if kernel not in known)[:3]
    best = "  ".join(f"[{kernel}] {value:.2f}" for value, kernel in others)
    bandwidth = error = ""
    if OURS in times:
        bandwidth = f"{row['bytes'] / times[OURS] / 1e6:5.2f} TB/s"
        error = f"error {row['times'][OURS]['error_over_bound']:.3f} of the bound"
    print(f"{row['format']:16s} {row['n']}x{row['k']} M={row['m']:4d}  {text}  {bandwidth}  {error}  {best}", flush=True)
    for what, note in notes.items():
        print(f"    {what}: {note}", flush=True)
    notes.clear()


@app.command()
def main(
    formats: Annotated[
        list[str] | None, typer.Option(help=f"Weights: {', '.join(FORMATS)}; repeat for several. Default: all.")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(help="Shapes of weights, NxK; repeat for several. Default: 8192x8192.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of activations, M; repeat for several. Default: 1 to 4096.")
    ] = None,
    rivals: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(IN_TABLE)}; repeat for several. Default: torch-int4.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each kernel.")] = 11,
    seconds: Annotated[float, typer.Option(help="Start no row after this many seconds.")] = 600.0,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time every configuration, and write the fastest ones to --out.")
    ] = False,
    groups: Annotated[int, typer.Option(min=0, help="Multiply this many groups of rows, each by its own weight.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    times: Annotated[
        Path | None, typer.Option("--table", help="Write the measured times that `score` reads to this file.")
    ] = None,
) -> None:
    """Time products of BF16 activations and quantized weights."""
    try:
        import torch
    except ImportError:
        sys.exit("bench_weight_only: torch is not installed; pip install torch.")
    if not torch.cuda.is_available():
        sys.exit("bench_weight_only: torch sees no CUDA device here.")
    if unknown := [name for name in formats or [] if name not in FORMATS]:
        sys.exit(f"bench_weight_only: --formats takes {', '.join(FORMATS)}; got {unknown[0]!r}.")
    if unknown := [name for name in rivals or [] if name not in IN_TABLE]:
        sys.exit(f"bench_weight_only: --rivals takes {', '.join(IN_TABLE)}; got {unknown[0]!r}.")
    from bench_gpu import sizes, where

    start = time.perf_counter()
    until = start + seconds
    table: list[dict[str, Any]] = []
    tuned: dict[str, Any] = {}
    notes: dict[str, str] = {}
    memory = memory_rate()
    print(f"memory: copy {memory['copy'] / 1e12:.2f} TB/s, sum {memory['sum'] / 1e12:.2f} TB/s", flush=True)
    if not groups:
        pairs = [(name, *sizes(shape)) for shape in shapes or ["8192x8192"] for name in formats or list(FORMATS)]
        notes |= compile_before(pairs, rows or list(ROWS), rivals or [TORCH])
        torch.cuda.empty_cache()
        print(f"compiled in {time.perf_counter() - start:.0f} s", *notes.items(), sep="\n    ", flush=True)
    for shape in shapes or ["8192x8192"]:
        n, k = sizes(shape)
        for name in formats or list(FORMATS):
            if time.perf_counter() > until:
                break
            try:
                if groups:
                    found, _ = measured_groups(name, n, k, rows or [16, 64, 2048], groups, rounds, tune, until)
                    best = {}
                else:
                    found, best, _ = measured(name, n, k, rows or list(ROWS), rivals or [TORCH], rounds, tune, until)
            except Exception as e:  # one format that fails must not stop the rest
                notes[f"{name} {shape}"] = f"{type(e).__name__}: {e}"[:500]
                print(f"{name} {shape}: {notes[f'{name} {shape}']}", flush=True)
                continue
            table += [{**row, "memory": memory} for row in found]
            tuned |= best
            torch.cuda.empty_cache()
    kind = "gpu-weight-only-groups" if groups else "gpu-weight-only"
    result = {
        "benchmark": kind,
        "schema": common.SCHEMA,
        "provenance": where("cuda"),
        "rows": table,
        "notes": notes,
    }
    print("\nsummary: microseconds of breccia (and how many times faster than the fastest bf16)")
    for row in table:
        medians = {kernel: found["median_s"] for kernel, found in row["times"].items() if "median_s" in found}
        mine = medians.get(OURS)
        theirs, rival = min((medians.get(kernel, 1e9), kernel) for kernel in (BF16, BF16_GROUPED, BF16_EACH))
        if mine and rival in medians:
            what = f"{row['format']:16s} {row['n']}x{row['k']} M={row['m']:4d}"
            print(f"{what} {mine * 1e6:8.2f}  {theirs / mine:5.2f} x {rival}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        tag = common.device_tag(torch.cuda.get_device_name())
        (out / f"{kind}-{tag}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if tune and not groups:
            from breccia_triton import choices

            path = out / f"weight_only_{choices.file_name(torch.cuda.get_device_name())}"
            choices.write_measured(path, torch.cuda.get_device_name(), "configs", tuned, where("cuda"))
    if times is not None and table:
        from breccia_triton import choices

        choices.write_measured(times, torch.cuda.get_device_name(), "slowdowns", slowdowns(table), where("cuda"))


if __name__ == "__main__":
    app()
