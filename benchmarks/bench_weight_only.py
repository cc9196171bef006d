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
import math
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
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

# -- one weight ------------------------------------------------------------------------------------------------------


@dataclass
class Weight:
    """A weight of one format and shape.

    values: in FP64. copies: in the kernel's storage. plains: in plain storage, for rivals. bf16: other weights, of BF16.
    """

    name: str
    plain: Any
    values: Any
    copies: list[Any]
    plains: list[Any]
    bf16: list[Any]

    @classmethod
    def made(cls, name: str, n: int, k: int, rivals: bool) -> Weight:
        import torch

        plain, values, copies = weights_of(FORMATS[name], n, k)
        many = max(2, -(-BEYOND_CACHE // (2 * n * k)))
        bf16 = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(many)]
        plains = [plain, *(copy_of(plain) for _ in range(len(copies) - 1))] if rivals else []
        return cls(name, plain, values, copies, plains, bf16)

    @property
    def operand(self) -> Any:
        """How the kernel decodes the weight."""
        from breccia_triton import weight_plans

        return weight_plans.operand_of(self.plain.recipe.format, self.plain.layout.block(-1))

    @property
    def codecs(self) -> str:
        """The codecs in the keys of configurations."""
        from breccia_triton.choices import codecs_of

        return codecs_of(self.plain.recipe.format)


def measured(name: str, n: int, k: int, rows: list[int], rivals: list[str], rounds: int, tune: bool, until: float) -> Any:
    """(rows of the result, one for each M; tuned configurations by key). until: start no row after this time."""
    weight = Weight.made(name, n, k, bool(rivals))
    table: list[dict[str, Any]] = []
    tuned: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for m in rows:
        if time.perf_counter() > until:
            notes["left out"] = f"M = {m}: out of time"
            continue
        row, best = measured_row(weight, m, rivals, rounds, tune, notes)
        table.append(row)
        tuned |= best
        tell(row, notes)
    return table, tuned


def measured_row(
    weight: Weight, m: int, rivals: list[str], rounds: int, tune: bool, notes: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a row of the result, the tuned configuration by its key)."""
    import torch

    import breccia
    from breccia_triton import weight_plans

    n, k = weight.plain.shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    arms = Row(y, reference(x, weight.values), m, notes)
    arms.add(OURS, [partial(breccia.matmul, x, st.mT, torch.bfloat16, out=y) for st in weight.copies])
    device = torch.cuda.get_device_name()
    configs = {OURS: weight_plans.config_of(weight.operand, weight.codecs, m, n, k, device, direct=True)}
    if tune:
        configs |= add_candidates(arms, weight, x)
    arms.add(BF16, [partial(torch.mm, x, w.t(), out=y) for w in weight.bf16], check=False)
    for rival in rivals:
        if m <= MOST.get(rival, m):
            add_rival(arms, rival, weight, x)
    times = arms.times(rounds)
    read = weight.copies[0].nbytes + 2 * m * (n + k)
    config = weight_plans.entry_of(configs[OURS])
    row = {"format": weight.name, "n": n, "k": k, "m": m, "bytes": read, "config": config, "times": times}
    if not tune or OURS not in times:
        return row, {}
    least, best = min((found["median_s"], arm) for arm, found in times.items() if arm in configs)
    best = best if least <= FASTER * times[OURS]["median_s"] else OURS
    return row, {weight_plans.key_of(weight.codecs, weight.operand.group, m, n, k): weight_plans.entry_of(configs[best])}


def add_candidates(arms: Row, weight: Weight, x: Any) -> dict[str, Any]:
    """Add the candidates of `--tune`. Returns their configurations by arm."""
    tried = {label_of(config): config for config in candidates(weight.operand, *x.shape)}
    build(weight.operand, list(tried.values()))
    weights = [st.mT for st in weight.copies]
    for label, config in tried.items():
        try:
            call = call_of(config, x, weights[0])
        except Exception as e:  # one configuration that fails must not stop the rest
            arms.note(label, e)
            continue
        arms.add(label, [partial(call, x, w, None, arms.y) for w in weights])
    return tried


def add_rival(arms: Row, rival: str, weight: Weight, x: Any) -> None:
    """Add a rival, or a note about the reason why it does not multiply this weight."""
    import torch

    import breccia

    kernel, out = IN_TABLE[rival], None if rival == TORCH else arms.y  # torch allocates its results
    operands = [w.mT for w in weight.plains]
    named = breccia.explain("matmul", x, operands[0], out_dtype=torch.bfloat16, prefer=kernel)
    if named.winner is None:
        arms.notes[rival] = next(v.reason for v in named.verdicts if v.kernel.name == kernel) or ""
        return
    arms.add(rival, [partial(breccia.matmul, x, w, torch.bfloat16, out=out, prefer=kernel) for w in operands])


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


@dataclass
class Experts:
    """Weights of one format and shape, one for each group. The fields are those of `Weight`, without rivals of the table."""

    name: str
    plain: Any
    values: list[Any]
    copies: list[Any]
    bf16: list[Any]

    @classmethod
    def made(cls, name: str, n: int, k: int, groups: int) -> Experts:
        import torch

        import breccia

        recipe = breccia.recipe(FORMATS[name])
        torch.manual_seed(0)
        each = [breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, recipe) for _ in range(groups)]
        plain = breccia.stack(each)
        stored = plain.to_storage(STORAGE)
        copies = [stored, *(copy_of(stored) for _ in range(max(1, -(-BEYOND_CACHE // stored.nbytes) - 1)))]
        many = max(2, -(-BEYOND_CACHE // (2 * groups * n * k)))
        bf16 = [torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(many)]
        return cls(name, plain, [breccia.dequantize(one).double() for one in each], copies, bf16)


def measured_groups(name: str, n: int, k: int, rows: list[int], groups: int, rounds: int, tune: bool, until: float) -> Any:
    """Rows of the result, one for each M, the number of rows of all groups. until: start no row after this time."""
    experts = Experts.made(name, n, k, groups)
    table: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for m in rows:
        if time.perf_counter() > until:
            notes["left out"] = f"M = {m}: out of time"
            continue
        row = measured_groups_row(experts, m, rounds, tune, notes)
        table.append(row)
        tell(row, notes)
    return table


def measured_groups_row(experts: Experts, m: int, rounds: int, tune: bool, notes: dict[str, str]) -> dict[str, Any]:
    """A row of the result."""
    import torch

    import breccia
    from breccia_triton import weight_plans
    from breccia_triton.weight_only import GroupedCall

    groups, n, k = experts.plain.shape
    weights, sizes = [st.mT for st in experts.copies], sizes_of(m, groups)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    arms = Row(y, grouped_reference(x, experts.values, sizes), m, notes)
    call = GroupedCall(x, weights[0], "bfloat16")
    arms.add(OURS, [partial(breccia.grouped_matmul, x, w, ends, torch.bfloat16, out=y) for w in weights])
    operand: Any = weight_plans.operand_of(experts.plain.recipe.format, experts.plain.layout.block(-1))
    tried = grouped_candidates(operand, m, groups, k) if tune else []
    build(operand, tried, grouped=True)
    for config in tried:
        try:
            other = GroupedCall(x, weights[0], "bfloat16", config)
        except Exception as e:  # one configuration that fails must not stop the rest
            arms.note(label_of(config), e)
            continue
        arms.add(label_of(config), [partial(other, x, w, ends, y) for w in weights])
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        arms.add(BF16_GROUPED, [partial(grouped, x, w.mT, offs=ends) for w in experts.bf16], check=False)
    pieces = list(zip(range(groups), x.split(sizes), y.split(sizes), strict=True))

    def each(w: Any) -> None:
        for i, rows, to in pieces:
            if len(rows):
                torch.mm(rows, w[i].t(), out=to)

    arms.add(BF16_EACH, [partial(each, w) for w in experts.bf16], check=False)
    times = arms.times(rounds)
    used = sum(size > 0 for size in sizes)
    read = experts.copies[0].nbytes * used // groups + 2 * m * (n + k)
    row = {"format": experts.name, "n": n, "k": k, "m": m, "groups": groups, "sizes": sizes, "bytes": read, "times": times}
    return row | {"config": weight_plans.entry_of(call.config)}


# -- the program -----------------------------------------------------------------------------------------------------


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


def summarize(table: list[dict[str, Any]]) -> None:
    """Print the median of each row, and how many times faster than the fastest BF16 product it is."""
    print("\nsummary: microseconds of breccia (and how many times faster than the fastest bf16)")
    for row in table:
        medians = {arm: found["median_s"] for arm, found in row["times"].items() if "median_s" in found}
        mine = medians.get(OURS)
        theirs, rival = min((medians.get(arm, math.inf), arm) for arm in (BF16, BF16_GROUPED, BF16_EACH))
        if mine and rival in medians:
            what = f"{row['format']:16s} {row['n']}x{row['k']} M={row['m']:4d}"
            print(f"{what} {mine * 1e6:8.2f}  {theirs / mine:5.2f} x {rival}")


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
                    found, best = measured_groups(name, n, k, rows or [16, 64, 2048], groups, rounds, tune, until), {}
                else:
                    found, best = measured(name, n, k, rows or list(ROWS), rivals or [TORCH], rounds, tune, until)
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
    summarize(table)
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
