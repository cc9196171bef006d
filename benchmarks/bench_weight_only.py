"""On a Hopper GPU: products of BF16 activations and quantized weights, against BF16, torch's INT4 and humming-kernels.

    python benchmarks/bench_weight_only.py [--formats int4 --shapes 8192x8192 --rows 1 --rows 16] [--seconds 60] [--out RESULTS]
    python benchmarks/bench_weight_only.py --tune [--out RESULTS]     # also tries every configuration, and writes the fastest
    python benchmarks/bench_weight_only.py --groups 8 --rows 16 --rows 64 --rows 2048    # products of unequal groups of rows
    python benchmarks/bench_weight_only.py --rivals humming --table FILE    # writes the measured times that `score` reads

Each sample replays a CUDA graph of products by several copies of the weight, more bytes than the L2 cache holds. Samples of all
kernels of a row alternate, since a GPU lowers its clock under load. Every result is compared with FP64 first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import common
import typer

app = typer.Typer(add_completion=False)

#: Recipes of weights.
FORMATS = {
    "int4": "int4,group_size=128",
    "int4-32": "int4,group_size=32",
    "int4-asymmetric": "int4,group_size=128,symmetric=false,signed=false",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "fp8": "fp8_block,block_m=128",
    "mxfp8": "mxfp8",
    "int8": "int8",
}
OURS, BF16, TORCH, HUMMING = "breccia", "bf16", "torch-int4", "humming"
#: torch's product of groups of BF16 rows; and the same, one product for each group, whose sizes the host has to know.
BF16_GROUPED, BF16_EACH = "bf16-grouped", "bf16-each"
#: Kernels of other libraries in breccia's table; and by arm, whose time it is that `score` reads.
IN_TABLE = {TORCH: "torch.int4", HUMMING: "humming.weight_only"}
MEASURED = {OURS: "cuda", TORCH: "torch", HUMMING: "humming"}
#: Rows above which torch's INT4, which takes milliseconds there, is left out.
MOST = 128
#: Bytes of weights that a graph reads: more than the L2 cache of any GPU.
BEYOND_CACHE = 240 << 20
#: Products of a graph, fewer from LONG rows on.
PRODUCTS, LONG = 48, 512
#: The relative error of a result in BF16, over all elements, that is still rounding; and where weights, or parts of sums, are
#: rounded to BF16 too.
ROUNDING, ROUNDED = 4e-3, 12e-3


def weights_of(spec: str, n: int, k: int) -> tuple[Any, Any, list[Any]]:
    """(The plain tensor, its values in FP64, copies in the kernel's storage)."""
    import torch

    import breccia
    from breccia.backend import as_recipe

    torch.manual_seed(0)
    plain = breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, as_recipe(spec))
    stored = plain.to_storage("mma_16x128")
    count = max(2, -(-BEYOND_CACHE // stored.nbytes))
    copies = [stored, *(_copy(stored) for _ in range(count - 1))]
    return plain, breccia.dequantize(plain).double(), copies


def _copy(st: Any) -> Any:
    from breccia import ScaledTensor

    zero_point = None if st.zero_point is None else st.zero_point.clone()
    return ScaledTensor.from_parts(
        st.data.clone(), st.scale.clone(), st.recipe, st.layout, zero_point, st.global_scale, st.axis, st.padding
    )


def graph_of(calls: list[Callable[[], Any]], products: int = PRODUCTS) -> tuple[Any, int]:
    """A graph of `products` calls or a few more, each as often as the others; and how many."""
    import torch

    calls = calls * max(1, products // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[: len(calls)]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph, len(calls)


def timed(graphs: dict[str, tuple[Any, int]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a product, by kernel and round; the kernels alternate."""
    import torch

    events: dict[str, list[Any]] = {name: [] for name in graphs}
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e-3 / graphs[name][1] for a, b in pairs] for name, pairs in events.items()}


def error_of(y: Any, exact: Any) -> float:
    return float((y.double() - exact).norm() / exact.norm())


# -- configurations --------------------------------------------------------------------------------------------------


def candidates(operand: Any, m: int, n: int, k: int) -> list[Any]:
    """What `--tune` tries, without what does not fit."""
    from breccia_triton.weight_plans import Config, Decoded, DecodedCodes

    found = list(dict.fromkeys(_tried(Config, m)))
    return [config for config in [*found, *([Decoded(), DecodedCodes()] if m >= 128 else [])] if config.fits(operand, m, k)]


def label_of(config: Any) -> str:
    """A configuration in a table: its numbers, or what is decoded to memory."""
    from breccia_triton.weight_plans import Config, Decoded

    if not isinstance(config, Config):
        return "decoded" if isinstance(config, Decoded) else "decoded codes"
    numbers = (config.batch, config.high, config.deep, config.stages, config.split, config.per_sm)
    return " ".join(map(str, numbers)) + (" wide" if config.wide else "")


def call_of(config: Any, x: Any, w: Any) -> Any:
    """The prepared product of BF16 activations and a weight, with a BF16 result."""
    from breccia_triton.decoded_matmul import DecodedCall, DecodedCodesCall
    from breccia_triton.weight_only import Call
    from breccia_triton.weight_plans import Decoded, DecodedCodes

    if isinstance(config, Decoded):
        return DecodedCall(x, w, "bfloat16")
    if isinstance(config, DecodedCodes):
        return DecodedCodesCall(x, w, None, "bfloat16")
    return Call(x, w, None, "bfloat16", config)


def _tried(made: Any, m: int) -> list[Any]:
    if m <= 16:
        batch = 8 if m <= 8 else 16
        shapes = [(4, 16, 2), (4, 16, 1), (4, 12, 2), (4, 8, 2), (4, 8, 3), (4, 8, 4), (2, 16, 2), (2, 8, 3)]
        small = [made(batch, *s) for s in shapes]
        small += [made(batch, *s, split=2) for s in ((4, 16, 1), (4, 8, 2), (4, 8, 3), (2, 8, 3))]
        small += [made(batch, *s, per_sm=2) for s in ((4, 8, 2), (4, 8, 3), (2, 8, 3), (4, 4, 4))]
        if m <= 8:
            return small
        wide = [(1, 2, 8), (1, 3, 9), (2, 1, 4)]
        return [*small, *(made(16, *s, wide=True) for s in wide), made(16, 2, 1, 4, split=2, wide=True)]
    batch = next((b for b in (32, 64) if m <= b), 128)
    if batch < 128:
        shapes = [(1, 2, 6), (1, 2, 8), (1, 3, 6), (2, 1, 4), (2, 1, 6)]
        split = [(2, 1, 4), (1, 2, 4), (1, 1, 6)]
        found = [made(batch, *s, wide=True) for s in shapes] + [made(batch, *s, split=2, wide=True) for s in split]
        return [*found, made(batch, 1, 1, 4, split=2, per_sm=2, wide=True), made(batch, 1, 1, 4, per_sm=2, wide=True)]
    found = [made(128, 2, 1, stages, wide=True) for stages in (4, 3, 5)]
    if m <= 256:  # too few blocks for all processors
        found += [made(128, 2, 1, 4, split=2, wide=True), made(128, 1, 2, 4, wide=True)]
    if m > 128:
        return [*found, *(made(256, 2, 1, stages, wide=True) for stages in (3, 2)), made(256, 2, 1, 3, split=2, wide=True)]
    return [*found, *(made(64, *s, wide=True) for s in ((2, 1, 4), (1, 2, 6)))]


def build(operand: Any, configs: list[Any], grouped: bool = False) -> None:
    """Compile kernels several at a time, into the cache on disk."""
    import torch

    from breccia_triton import weight_only, weight_plans
    from breccia_triton.cuda import compiler

    nvrtc = compiler.nvrtc(int((torch.version.cuda or "13").partition(".")[0]))

    def one(config: Any) -> None:
        if isinstance(config, weight_plans.Config):
            macros = weight_plans.macros_of(operand, config, "bfloat16", "bfloat16", None, grouped)
            compiler.cubin(weight_only.source_of(config), "sm_90a", macros, nvrtc)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, configs))


# -- the benchmark ---------------------------------------------------------------------------------------------------


class _Row:
    """The graphs of one row by kernel. y: the result of breccia's kernels. exact: in FP64. notes: what went wrong."""

    def __init__(self, y: Any, exact: Any, m: int, notes: dict[str, str]) -> None:
        self.y, self.exact, self.m, self.notes = y, exact, m, notes
        self.graphs: dict[str, tuple[Any, int]] = {}

    def add(self, kernel: str, calls: list[Callable[[], Any]], check: bool = True, error: float = ROUNDING) -> None:
        """Capture the calls of a kernel, if the result of the first is right.

        check: False where the weight is another one. error: the largest relative error that is right.
        """
        self.y.fill_(float("nan"))
        try:
            found = calls[0]()
            wrong = error_of(found, self.exact) if check else 0.0
            if not wrong < error:
                self.notes[f"{kernel} M={self.m}"] = f"wrong: relative error {wrong:.2g}"
                return
            self.graphs[kernel] = graph_of(calls, PRODUCTS if self.m < LONG else PRODUCTS // 4)
        except Exception as e:  # one kernel that fails must not stop the rest
            self.notes[f"{kernel} M={self.m}"] = f"{type(e).__name__}: {e}"[:200]


def measured(name: str, n: int, k: int, rows: list[int], rivals: list[str], rounds: int, tune: bool, until: float) -> Any:
    """A row of the result for each M. Adds what was tuned, by its key."""
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
    plains = [plain, *(_copy(plain) for _ in range(count - 1))] if rivals else []
    table: list[dict[str, Any]] = []
    tuned: dict[str, Any] = {}
    for m in rows:
        if time.perf_counter() > until:
            notes["left out"] = f"M = {m}: out of time"
            continue
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ values.mT
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        row_of = _Row(y, exact, m, notes)
        add = row_of.add
        add(OURS, [lambda w=w: breccia.matmul(x, w, torch.bfloat16, out=y) for w in weights])  # noqa: B023
        name_of_device = torch.cuda.get_device_name()
        chosen = weight_plans.config_of(operand, codecs_of(plain.recipe.format), m, n, k, name_of_device, direct=True)
        by_name: dict[str, Any] = {OURS: chosen}
        if tune:
            tried = candidates(operand, m, n, k)
            build(operand, tried)
            for config in tried:
                label = label_of(config)
                by_name[label] = config
                try:
                    call = call_of(config, x, weights[0])
                except Exception as e:
                    notes[f"{label} M={m}"] = f"{type(e).__name__}: {e}"[:200]
                    continue
                add(label, [lambda w=w, call=call: call(x, w, None, y) for w in weights])  # noqa: B023
        add(BF16, [lambda w=w: torch.mm(x, w.t(), out=y) for w in bf16], check=False)  # noqa: B023
        for rival in rivals:
            if rival == TORCH and m > MOST:
                continue
            kernel, out = IN_TABLE[rival], None if rival == TORCH else y  # torch allocates its results
            operands = [w.mT for w in plains]
            named = breccia.explain("matmul", x, operands[0], out_dtype=torch.bfloat16, prefer=kernel)
            if named.winner is None:
                notes[rival] = next(v.reason for v in named.verdicts if v.kernel.name == kernel) or ""
                continue

            def multiply(w: Any, x: Any = x, kernel: str = kernel, out: Any = out) -> Any:
                return breccia.matmul(x, w, torch.bfloat16, out=out, prefer=kernel)

            add(rival, [lambda w=w, multiply=multiply: multiply(w) for w in operands], error=ROUNDED)
        seconds = {kernel: common.summary(found) for kernel, found in timed(row_of.graphs, rounds).items()}
        read = copies[0].nbytes + 2 * m * (n + k)
        row = {"format": name, "n": n, "k": k, "m": m, "bytes": read, "config": weight_plans.entry_of(chosen), "times": seconds}
        table.append(row)
        tell(row, notes)
        if tune and OURS in seconds:
            best = min((found["median_s"], kernel) for kernel, found in seconds.items() if kernel in by_name)[1]
            key = weight_plans.key_of(codecs_of(plain.recipe.format), operand.group, m, n, k)
            tuned[key] = {**weight_plans.entry_of(by_name[best])}
        row_of.graphs.clear()
    return table, tuned, notes


def slowdowns(table: list[dict[str, Any]]) -> dict[str, float]:
    """The medians of times over the bound of the roofline, as `breccia_triton.weight_times.slowdowns` has them."""
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
    """Rows of each group: from 1 to 2 g - 1 shares in a fixed order that is not sorted, which the first group rounds up."""
    shares = [1 + 2 * (5 * i % groups) for i in range(groups)]
    found = [m * share // sum(shares) for share in shares]
    return [found[0] + m - sum(found), *found[1:]]


def measured_groups(name: str, n: int, k: int, rows: list[int], groups: int, rounds: int, tune: bool, until: float) -> Any:
    """A row of the result for each M, the number of rows of all groups."""
    import torch

    import breccia
    from breccia_triton import weight_plans
    from breccia_triton.weight_only import GroupedCall

    recipe = breccia.recipe(FORMATS[name])
    torch.manual_seed(0)
    each = [breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, recipe) for _ in range(groups)]
    plain = breccia.stack(each)
    values = [breccia.dequantize(one).double() for one in each]
    stored = plain.to_storage("mma_16x128")
    operand: Any = weight_plans.operand_of(plain.recipe.format, plain.layout.block(-1))
    copies = [stored, *(_copy(stored) for _ in range(max(1, -(-BEYOND_CACHE // stored.nbytes) - 1)))]
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
        exact = torch.cat([rows.double() @ w.mT for rows, w in zip(x.split(sizes), values, strict=True)])
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        row_of = _Row(y, exact, m, notes)
        call = GroupedCall(x, weights[0], "bfloat16")
        row_of.add(OURS, [lambda w=w: breccia.grouped_matmul(x, w, ends, torch.bfloat16, out=y) for w in weights])  # noqa: B023
        tried = grouped_candidates(operand, m, groups, k) if tune else []
        build(operand, tried, grouped=True)
        for config in tried:
            try:
                other = GroupedCall(x, weights[0], "bfloat16", config)
            except Exception as e:
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
        seconds = {kernel: common.summary(found) for kernel, found in timed(row_of.graphs, rounds).items()}
        used = sum(size > 0 for size in sizes)
        read = copies[0].nbytes * used // groups + 2 * m * (n + k)
        row = {"format": name, "n": n, "k": k, "m": m, "groups": groups, "sizes": sizes, "bytes": read, "times": seconds}
        row["config"] = weight_plans.entry_of(call.config)
        table.append(row)
        tell(row, notes)
        row_of.graphs.clear()
    return table, notes


def grouped_candidates(operand: Any, m: int, groups: int, k: int) -> list[Any]:
    """What `--tune` tries for groups, to compare with the rule; no table is written."""
    from breccia_triton.weight_plans import Config

    mean = m / groups
    small = [(4, 8, 2, 2), (4, 12, 2, 1), (2, 8, 3, 1)] if mean <= 16 else []
    found = [Config(batch, high, deep, stages, per_sm=per_sm) for batch in (8, 16) for high, deep, stages, per_sm in small]
    wide = [(16, 2, 1, 4), (32, 2, 1, 4), (64, 2, 1, 4)] if mean <= 64 else []
    wide += [(128, 2, 1, 4), (128, 2, 1, 3), (256, 2, 1, 3)] if mean > 16 else []
    found += [Config(*s, wide=True) for s in wide]
    return [config for config in found if config.fits(operand, config.batch, k)]


def tell(row: dict[str, Any], notes: dict[str, str]) -> None:
    """Print a row: medians in microseconds, the bandwidth of breccia's, and the fastest of what was tried."""
    times = {kernel: found["median_s"] * 1e6 for kernel, found in row["times"].items()}
    known = [kernel for kernel in (OURS, BF16, BF16_GROUPED, TORCH, HUMMING) if kernel in times]
    text = "  ".join(f"{kernel} {times[kernel]:7.2f}" for kernel in known)
    others = sorted((value, kernel) for kernel, value in times.items() if kernel not in known)[:3]
    best = "  ".join(f"[{kernel}] {value:.2f}" for value, kernel in others)
    bandwidth = f"{row['bytes'] / times[OURS] / 1e6:5.2f} TB/s" if OURS in times else ""
    print(f"{row['format']:16s} {row['n']}x{row['k']} M={row['m']:4d}  {text}  {bandwidth}  {best}", flush=True)
    for what, note in notes.items():
        print(f"    {what}: {note}", flush=True)
    notes.clear()


@app.command()
def main(
    formats: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FORMATS)}; repeat for several.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="Weights as NxK; repeat for several.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of activations, M; repeat for several.")] = None,
    rivals: Annotated[list[str] | None, typer.Option(help="torch-int4, humming (13 to 18 s to compile each).")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each kernel.")] = 11,
    seconds: Annotated[float, typer.Option(help="Leave out what has not begun by then.")] = 600.0,
    tune: Annotated[bool, typer.Option("--tune", help="Try every configuration, and write the fastest.")] = False,
    groups: Annotated[int, typer.Option(min=0, help="Multiply so many groups of rows by weights of their own.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    times: Annotated[Path | None, typer.Option("--table", help="File for the measured times that `score` reads.")] = None,
) -> None:
    """Time products of 1 to 4096 rows."""
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

    until = time.perf_counter() + seconds
    table: list[dict[str, Any]] = []
    tuned: dict[str, Any] = {}
    notes: dict[str, str] = {}
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
                    found, best, _ = measured(
                        name, n, k, rows or [1, 4, 16, 32, 64, 128], rivals or [TORCH], rounds, tune, until
                    )
            except Exception as e:  # one format that fails must not stop the rest
                notes[f"{name} {shape}"] = f"{type(e).__name__}: {e}"[:500]
                print(f"{name} {shape}: {notes[f'{name} {shape}']}", flush=True)
                continue
            table += found
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
