"""On a Hopper GPU: products of BF16 activations and quantized weights, against BF16, torch's INT4, humming and Triton.

    python benchmarks/bench_weight_only.py [--formats int4 --shapes 8192x8192 --rows 1] [--groups 8] [--out RESULTS]
    python benchmarks/bench_weight_only.py --tune | --rivals humming --table FILE    # tries every configuration; see join.py

Each sample replays a CUDA graph of products by copies of the weight, which together exceed the L2 cache. Before that, up to 64
rows of each result are compared with FP64. A copy and a sum of 2 GiB measure the memory's rate in the same run.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import other_products
import torch
import typer
from harness import Benchmark, Device, Result, Seconds, known, program, progress, sizes
from harness.device import Arms, check_device, graphed, message, reference, rotating, sampled, where
from harness.tables import ABSENT, Goal, Table, goals, median, over, pivoted, tried

import breccia
from breccia.backend import components
from breccia.kernels import bounds

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
OURS, BF16, TORCH, HUMMING, TRITON = "breccia", "bf16", "torch-int4", "humming", "triton"
#: torch's grouped product of BF16 rows; and one torch product for each group, for which the host has to know the sizes.
BF16_GROUPED, BF16_EACH = "bf16-grouped", "bf16-each"
#: Rivals: products of `other_products`, and breccia's kernel for other devices.
KERNELS = {TORCH: "torch.int4", HUMMING: "humming.weight_only", TRITON: "triton.weight_only"}
#: Arms that are left out above this many rows, where they take milliseconds.
MOST = {TORCH: 128}
#: Default shapes of weights, and rows of activations.
SHAPES, ROWS, GROUPED_ROWS = ("8192x8192",), (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096), (16, 64, 2048)
#: The storage of `cuda.weight_only`.
STORAGE = "mma_16x128"
#: Bytes of weights that a CUDA graph reads: more than the L2 cache of any GPU.
BEYOND_CACHE = 240 << 20
#: Products in a CUDA graph; a quarter of them from LONG rows on.
PRODUCTS, LONG = 48, 512
#: Bytes of the array whose copy and sum measure the memory's rate.
STREAMED = 2 << 30
#: With `--tune`, a configuration replaces the default one if it takes at most this part of its time: samples differ by 1 %.
FASTER = 0.99


def cases(formats: Iterable[str], rows: Iterable[int]) -> tuple[str, ...]:
    """Products by weights of 8192 x 8192."""
    return tuple(f"{name} {m}×8192×8192" for name in formats for m in rows)


_FOUR_BITS, _EIGHT_BITS = ("int4", "mxfp4", "nvfp4"), ("fp8", "mxfp8")
_MANY = (256, 512, 1024, 2048, 4096)

WEIGHT_GOALS = (
    *(
        Goal(f"{name}, M = {m}", cases(formats, (m,)), most)
        for name, formats, limits in (
            ("INT4", ("int4",), (10.5, 14.0, 21.0)),
            ("MXFP4", ("mxfp4",), (12.0, 15.0, 21.0)),
            ("NVFP4", ("nvfp4",), (12.5, 16.0, 21.5)),
            ("FP8 and MXFP8", _EIGHT_BITS, (16.5, 18.0, 24.0)),
        )
        for m, most in zip((1, 16, 64), limits, strict=True)
    ),
    *(
        Goal(f"4 bits, M = {m}", cases(_FOUR_BITS, (m,)), least, (HUMMING,), "humming")
        for m, least in ((1, 1.5), (16, 1.3), (64, 1.2))
    ),
    Goal("4 bits, M = 128", cases(_FOUR_BITS, (128,)), 1 / 0.85, (BF16,), "BF16"),
    Goal("4 bits, M = 256 to 4096", cases(_FOUR_BITS, _MANY), 0.97, (BF16,), "BF16"),
)

_INDEX = {"weight": lambda row: row["format"], "N×K": lambda row: f"{row['n']}×{row['k']}"}


def by_rows(title: str, cell: Callable[[Any], str], rows: list[Any], note: str) -> Table:
    """A line for each weight, and a column for each number of rows of activations."""
    return pivoted(title, _INDEX, lambda row: row["m"], lambda m: f"M = {m}", cell, rows, note)


def times(result: Result) -> Table:
    rows = result["rows"]
    known = (BF16, BF16_GROUPED, BF16_EACH, TORCH, HUMMING, TRITON)
    rivals = [name for name in known if any(median(row, name) for row in rows)]

    def cell(row: Any) -> str:
        if not median(row, OURS):
            return ABSENT
        ours = row["time"][OURS]
        faster = " / ".join(over(median(row, name), ours["median_s"]) for name in rivals)
        return f"{ours['median_s'] * 1e6:.1f} ± {(ours['max_s'] - ours['min_s']) * 5e5:.1f}; {faster}"

    groups = {row["groups"] for row in rows if "groups" in row}
    what = f"groups of rows and {groups.pop()}" if groups else "BF16 activations and quantized"
    note = (
        f"Microseconds of a product in a CUDA graph, median ± half of the range; times faster than {' / '.join(rivals)}, "
        "interleaved. Weights rotate, so that they are not in the L2 cache."
    )
    return by_rows(f"products of {what} weights", cell, rows, note)


def bandwidth(result: Result) -> Table:
    rows = [row for row in result["rows"] if row.get("memory") and median(row, OURS)]

    def cell(row: Any) -> str:
        reached = row["bytes"] / median(row, OURS)
        return f"{reached / 1e12:.2f}, {100 * reached / max(row['memory'].values()):.0f} %; {row['over_bound'][OURS]:.2f}"

    rates = sorted({round(max(row["memory"].values()) / 1e12, 2) for row in rows})
    note = (
        "TB/s of the weight, activations and results; the share of the memory's rate, which is the higher rate of a copy and a "
        f"sum in the same run ({' or '.join(f'{rate:.2f}' for rate in rates)} TB/s); the largest error against FP64 in up to "
        "64 random rows, as a multiple of the bound of [the contract](spec/numerics.md), section 9. Most of that error is the "
        "rounding of the result to BF16."
    )
    title = "bandwidth and errors of products of quantized weights"
    return by_rows(title, cell, rows, note if rows else "*This result has no bandwidth.*")


def goals_table(result: Result) -> Table:
    rows = {f"{row['format']} {row['m']}×{row['n']}×{row['k']}": row for row in result["rows"]}
    note = (
        "Weights of 8192 × 8192, BF16 activations and results. Microseconds of a product, or speed relative to the rival, by "
        "medians of interleaved samples: the smallest and the largest value among the products of a goal."
    )
    return goals("goals of products of quantized weights", WEIGHT_GOALS, rows, note)


TRIED = "what was tried for products of quantized weights"
PLAIN = Benchmark(
    "gpu-weight-only",
    {
        "gpu-weight-only": times,
        "gpu-weight-only-bandwidth": bandwidth,
        "gpu-weight-only-goals": goals_table,
        "gpu-weight-only-tried": lambda _: tried("weight-only", "product", TRIED),
    },
    key=("format", "n", "k", "m"),
)
GROUPED = Benchmark("gpu-weight-only-groups", {"gpu-weight-only-groups": times}, key=("format", "n", "k", "m"))


@dataclass
class Weight:
    """A weight of one format and shape, or one for each group, stacked.

    values: in FP64, of each group. copies: in the kernel's storage. plains: in plain storage, for rivals. bf16: other weights.
    """

    plain: Any
    values: list[Any]
    copies: list[Any]
    plains: list[Any]
    bf16: list[Any]


def weight_of(name: str, n: int, k: int, device: str, rivals: bool, groups: int = 0) -> Weight:
    """A weight by the name of its format, or by spec. rivals: with copies in plain storage."""

    def numbers() -> Any:
        return torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02

    def many(nbytes: int, least: int) -> int:
        return max(least, -(-BEYOND_CACHE // nbytes)) if device == "cuda" else least

    torch.manual_seed(0)
    each = [breccia.cast(numbers(), breccia.recipe(FORMATS.get(name, name))) for _ in range(groups or 1)]
    plain = breccia.stack(each) if groups else each[0]
    stored = plain.to_storage(STORAGE) if device == "cuda" else plain
    copies = [stored, *(copy_of(stored) for _ in range(many(stored.nbytes, 1 if groups else 2) - 1))]
    plains = [plain, *(copy_of(plain) for _ in range(len(copies) - 1))] if rivals else []
    shape = (groups, n, k) if groups else (n, k)
    others = range(many(2 * math.prod(shape), 2))
    bf16 = [torch.randn(shape, device=device, dtype=torch.bfloat16) * (0.02 if groups else 1) for _ in others]
    return Weight(plain, [breccia.dequantize(one).double() for one in each], copies, plains, bf16)


def copy_of(st: Any) -> Any:
    return replace(st, **{name: part.clone() for name, part in components(st).items()})


class Products:
    """The arms of one row: products of x (M, K) by copies of a weight, into y. sizes: the rows of each group."""

    def __init__(self, x: Any, values: list[Any], sizes: list[int]) -> None:
        self.x, self.y = x, torch.empty(len(x), values[0].shape[0], device=x.device, dtype=torch.bfloat16)
        ends = torch.tensor(sizes, device=x.device).cumsum(0)
        self.exact = reference(
            lambda rows: x[rows].double(), values.__getitem__, ends, lambda magnitude, k: bounds.accumulated(magnitude, k, k)
        )
        self.arms = Arms(x.device.type, self.checked)

    def checked(self, arm: str, product: Any) -> float | None:
        """The error of a product by the row's weight; None for arms with others."""
        return None if arm.startswith(BF16) else round(self.exact.error_over_bound(product), 4)

    def add(self, arm: str, function: Callable[[Any], Any], operands: list[Any]) -> None:
        """Time a function of a copy of the weight, in a CUDA graph of calls by all copies."""
        products = PRODUCTS if len(self.x) < LONG else PRODUCTS // 4
        count = len(operands) * max(1, products // len(operands))

        def make() -> Any:
            self.y.fill_(float("nan"))
            return rotating(function, operands)

        self.arms.add({arm: make}, lambda call, device: graphed(call, device, count, len(operands)))

    def measures(self, rounds: int) -> dict[str, Any]:
        sampled(self.arms.timers.values(), rounds)
        return self.arms.times()


def measured(weight: Weight, m: int, rivals: list[str], rounds: int, tune: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a row of the result, the tuned configuration by its key)."""
    from breccia_triton.gemm.weight_only import plans as weight_plans
    from breccia_triton.tuning import choices

    (n, k), fmt = weight.plain.shape, weight.plain.recipe.format
    operand, codecs = weight_plans.weight_format_of(fmt, weight.plain.layout.block(-1)), choices.codecs_of(fmt)
    x = torch.randn(m, k, device=weight.bf16[0].device, dtype=torch.bfloat16)
    row = Products(x, weight.values, [m])
    row.add(OURS, lambda w: breccia.matmul(x, w, torch.bfloat16, out=row.y), [st.mT for st in weight.copies])
    configs = dict[str, Any]()
    if x.is_cuda:
        found = weight_plans.config_of(operand, codecs, m, n, k, torch.cuda.get_device_name(), direct=True)
        configs = {OURS: found, **(add_candidates(row, weight, operand) if tune else {})}
    row.add(BF16, lambda w: torch.mm(x, w, out=row.y), [w.t() for w in weight.bf16])
    for rival in (rival for rival in rivals if m <= MOST.get(rival, m)):
        add_rival(row, rival, [w.mT for w in weight.plains])
    measures = row.measures(rounds)
    made = {"n": n, "k": k, "m": m, "bytes": weight.copies[0].nbytes + 2 * m * (n + k)}
    made |= {"config": weight_plans.entry_of(configs[OURS])} if configs else {}
    tuned = {arm: s for arm in configs if (s := median(measures, arm))}
    if not tune or OURS not in tuned:
        return made | measures, {}
    best = min(tuned, key=lambda arm: tuned[arm])
    best = best if tuned[best] <= FASTER * tuned[OURS] else OURS
    key = weight_plans.key_of(codecs, operand.group, m, n, k)
    return made | measures, {key: weight_plans.entry_of(configs[best])}


def add_candidates(row: Products, weight: Weight, operand: Any) -> dict[str, Any]:
    """Add the candidates of `--tune`. Returns their configurations by arm."""
    from weight_configs import build, call_of, candidates, label_of

    tried = {label_of(config): config for config in candidates(operand, *row.x.shape)}
    build(operand, list(tried.values()))
    weights = [st.mT for st in weight.copies]
    for label, config in tried.items():
        try:
            call = call_of(config, row.x, weights[0])
        except Exception as e:  # one configuration that fails must not stop the rest
            row.arms.note("errors", label, message(e))
            continue
        row.add(label, lambda w, call=call: call(row.x, w, None, row.y), weights)
    return tried


def add_rival(row: Products, rival: str, operands: list[Any]) -> None:
    """Add a rival, or a note about the reason why it does not multiply this weight."""
    kernel, out = KERNELS[rival], None if rival == TORCH else row.y  # torch allocates its results
    if (why := refused(kernel, row.x, operands[0])) is not None:
        return row.arms.note("errors", rival, why)
    row.add(rival, lambda w: product(kernel, row.x, w, out), operands)


def refused(kernel: str, x: Any, w: Any) -> str | None:
    """Why a rival does not multiply these operands, or None."""
    if kernel in other_products.PRODUCTS:
        return other_products.refused(kernel, x, w)
    named = breccia.explain("matmul", x, w, out_dtype=torch.bfloat16, prefer=kernel)
    return None if named.winner is not None else next((v.reason for v in named.verdicts if v.kernel.name == kernel), "")


def product(kernel: str | None, x: Any, w: Any, out: Any = None) -> Any:
    """The product by a rival, by a kernel of breccia's table, or by the one that the table chooses."""
    if kernel in other_products.PRODUCTS:
        return other_products.matmul(kernel, x, w, out=out)
    return breccia.matmul(x, w, torch.bfloat16, out=out, prefer=kernel)


def sizes_of(m: int, groups: int) -> list[int]:
    """Rows of each group: in proportion to 1, 3, 5, ... in a fixed unsorted order. The first group takes the remainder."""
    shares = [1 + 2 * (5 * i % groups) for i in range(groups)]
    found = [m * share // sum(shares) for share in shares]
    return [found[0] + m - sum(found), *found[1:]]


def measured_groups(weight: Weight, m: int, rounds: int) -> dict[str, Any]:
    """A row of the result, for m rows of all groups."""
    groups, n, k = weight.plain.shape
    sizes, device = sizes_of(m, groups), weight.bf16[0].device
    x, ends = (
        torch.randn(m, k, device=device, dtype=torch.bfloat16),
        torch.tensor(sizes, device=device).cumsum(0).to(torch.int32),
    )
    row = Products(x, weight.values, sizes)
    weights = [st.mT for st in weight.copies]
    row.add(OURS, lambda w: breccia.grouped_matmul(x, w, ends, torch.bfloat16, out=row.y), weights)
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        row.add(BF16_GROUPED, lambda w: grouped(x, w.mT, offs=ends), weight.bf16)
    pieces = [(i, rows, to) for i, (rows, to) in enumerate(zip(x.split(sizes), row.y.split(sizes), strict=True)) if len(rows)]
    row.add(BF16_EACH, lambda w: [torch.mm(rows, w[i].t(), out=to) for i, rows, to in pieces], weight.bf16)
    used = sum(size > 0 for size in sizes)
    read = weight.copies[0].nbytes * used // groups + 2 * m * (n + k)
    return {"n": n, "k": k, "m": m, "groups": groups, "sizes": sizes, "bytes": read, **row.measures(rounds)}


def memory_rate(device: str, rounds: int = 7) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and of a sum, read only: medians of interleaved samples. On CUDA only."""
    if device == "cpu":
        return {}
    source = torch.ones(STREAMED // 4, device=device)
    target = torch.empty_like(source)
    timers = {"copy": graphed(lambda: target.copy_(source), device, 3), "sum": graphed(source.sum, device, 3)}
    sampled(timers.values(), rounds)
    taken = {what: statistics.median(timer.seconds) for what, timer in timers.items()}
    return {"copy": 2 * source.nbytes / taken["copy"], "sum": source.nbytes / taken["sum"]}


def compile_before(pairs: list[tuple[str, int, int]], rows: list[int], rivals: list[str]) -> dict[str, str]:
    """Compile all kernels in parallel, by one product for each format, shape and number of rows. Returns errors by product.

    humming compiles each kernel in a process, and NVRTC releases the GIL.
    """
    failed: dict[str, str] = {}

    def weight(pair: tuple[str, int, int]) -> tuple[str, Any, Any]:
        name, n, k = pair
        plain = breccia.cast(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, breccia.recipe(FORMATS[name]))
        return f"{name} {n}x{k}", plain.mT, plain.to_storage(STORAGE).mT

    def multiply(task: tuple[str, Any, int, str | None]) -> None:
        what, w, m, kernel = task
        try:
            product(kernel, torch.zeros(m, w.shape[0], device="cuda", dtype=torch.bfloat16), w)
        except Exception as e:  # of any library; an arm that fails here is tried and noted again when it is timed
            failed[f"{kernel or OURS} {what} M={m}"] = f"{type(e).__name__}: {e}"[:200]

    weights = [weight(pair) for pair in pairs]
    kernels = [KERNELS[rival] for rival in rivals if rival != TORCH]
    theirs = [(what, plain, m, kernel) for m in rows for what, plain, _ in weights for kernel in kernels]
    first, rest = theirs[: len(weights) * len(kernels)], theirs[len(weights) * len(kernels) :]  # the first rearrange the weight
    ours = [(what, stored, m, None) for what, _, stored in weights for m in rows]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(multiply, first))
        list(pool.map(multiply, rest + ours))
    torch.cuda.synchronize()
    return failed


def slowdowns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median times relative to the roofline's bound, by the keys of `breccia_triton.gemm.weight_only.plans.slowdowns`."""
    from breccia_triton.gemm.weight_only import plans as weight_plans

    found: dict[str, list[float]] = {}
    for row in rows:
        recipe = breccia.recipe(FORMATS[row["format"]])
        fmt, block = recipe.format, recipe.layout.block(-1)
        bound = weight_plans.bound(row["m"], row["n"], row["k"], weight_plans.bits_of(fmt, block))
        if taken := median(row, OURS):
            found.setdefault(weight_plans.time_key_of(fmt, block, row["m"]), []).append(taken / bound)
    return {key: round(statistics.median(values), 4) for key, values in sorted(found.items())}


@program
def main(
    formats: Annotated[list[str] | None, typer.Option(help=f"Weights: {', '.join(FORMATS)}; repeatable. Default: all.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="Shapes of weights, NxK; repeatable. Default: 8192x8192.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of activations, M; repeatable. Default: 1 to 4096.")] = None,
    rivals: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KERNELS)}; repeatable. Default: torch-int4.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each kernel.")] = 11,
    seconds: Seconds = 600.0,
    tune: Annotated[bool, typer.Option("--tune", help="Time every configuration; the result has the fastest.")] = False,
    groups: Annotated[int, typer.Option(min=0, help="Multiply this many groups of rows, each by its own weight.")] = 0,
    table: Annotated[Path | None, typer.Option(help="Write the measured times that `score` reads to this file.")] = None,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Time products of BF16 activations and quantized weights."""
    chosen, others = known(formats, FORMATS, "--formats"), known(rivals or [TORCH], KERNELS, "--rivals")
    check_device(device)

    benchmark, until = GROUPED if groups else PLAIN, time.perf_counter() + seconds
    counts = rows or list(GROUPED_ROWS if groups else ROWS)
    pairs = [(name, *sizes(shape)) for shape in shapes or SHAPES for name in chosen]
    run, memory, notes = where(device), memory_rate(device), dict[str, str]()
    found: list[dict[str, Any]] = []
    configs: dict[str, Any] = {}
    if not groups and device == "cuda":
        notes |= compile_before(pairs, counts, others)
        torch.cuda.empty_cache()
    for name, n, k in progress(pairs, "weights"):
        try:
            weight = weight_of(name, n, k, device, bool(others) and not groups, groups)
            for m in counts:
                if time.perf_counter() > until:
                    notes[f"{name} {n}x{k}"] = f"M = {m} on: out of time"
                    break
                row, best = (measured_groups(weight, m, rounds), {}) if groups else measured(weight, m, others, rounds, tune)
                found.append({"format": name, **row, "memory": memory})
                configs |= best
                yield benchmark.result(found, {}, run, notes=notes)
        except Exception as e:  # one format that fails must not stop the rest
            notes[f"{name} {n}x{k}"] = message(e)
        if device == "cuda":
            torch.cuda.empty_cache()
    if table is not None and found:
        from breccia_triton.tuning import measurements

        measurements.merge(table, torch.cuda.get_device_name(), slowdowns(found), run)
    yield benchmark.result(found, {}, run, notes=notes, **({"configs": configs} if configs else {}))
