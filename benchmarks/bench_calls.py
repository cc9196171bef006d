"""Time of small calls, where nearly all of it is Python: microseconds, and steps of a calibrated loop.

A step builds a key of four items and looks it up in a dictionary. A loop of steps is timed beside every loop of calls: ratios
can be compared between machines and moments, microseconds cannot. `--before` also times a checkout of another version.
"""

from __future__ import annotations

import os
import statistics
import sys
import timeit
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import Benchmark, Call, Result, Table, apart, normal, output, program, progress, provenance, summary, table

import breccia

RECIPES = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "int4")
#: Pairs of loops, and calls and steps in a loop.
PAIRS, CALLS, STEPS = 21, 50, 5000


def overhead(result: Result) -> Table:
    before = result["options"]["before"]
    columns: dict[str, Any] = {"call": "call"}
    for version in ("before", "now") if before else ("now",):
        heading = f"{version}, µs" if before else "µs"
        columns[heading] = lambda r, v=version: f"{1e6 * r['time'][v]['min_s']:.1f}" if v in r["time"] else ""
    for version in ("before", "now") if before else ("now",):
        columns[f"steps {version}" if before else "steps"] = lambda r, v=version: (
            f"{r['steps'][v]:.0f}" if v in r["steps"] else ""
        )
    note = (
        "Microseconds: the least of the runs. Steps: the median of loops of calls, each beside a loop of steps; a step builds "
        "a key of four items and looks it up in a dictionary. One thread."
    )
    if before:
        columns["now / before, in steps"] = lambda r: (
            f"{r['steps']['now'] / r['steps']['before']:.2f}" if len(r["steps"]) == 2 else ""
        )
        note += f" Before: commit {before[:10]}, in processes interleaved with those of now."
    return table("small calls", columns, result["rows"], note)


BENCHMARK = Benchmark("overhead", {"overhead": overhead})


def calls() -> dict[str, Call]:
    import torch

    from breccia_torch.nn import ScaledLinear

    torch.set_num_threads(1)
    x = normal((16, 128), 0)
    arrays = {"NumPy": x, "torch": torch.from_numpy(x)}
    token, square = torch.randn(1, 128), torch.nn.Linear(128, 128)
    found: dict[str, Call] = {}
    for name in RECIPES:
        recipe = breccia.recipe(name)
        for library, a in arrays.items():
            found[f"cast 16×128, {name}, {library}"] = lambda a=a, recipe=recipe: breccia.cast(a, recipe)
        for library, a in arrays.items():
            st = breccia.cast(a, recipe)
            found[f"dequantize 16×128, {name}, {library}"] = lambda st=st: breccia.dequantize(st)
    weight = breccia.cast(arrays["torch"], breccia.recipe("mxfp8"))
    found[".mT, torch"] = lambda: weight.mT
    found["matmul 1×128 by 128×16, mxfp8, torch"] = lambda w=weight.mT: breccia.matmul(token, w)
    for name in ("fp8_block", "mxfp8", "nvfp4", "int4"):
        layer = ScaledLinear.from_linear(square, breccia.recipe(name))
        found[f"ScaledLinear 128×128 at M = 1, {name}"] = lambda layer=layer: layer(token)
    both = ScaledLinear.from_linear(square, breccia.recipe("mxfp8"), activation=breccia.recipe("mxfp8"))
    found["ScaledLinear 128×128 at M = 1, mxfp8 by mxfp8"] = lambda: both(token)
    found["torch.nn.Linear 128×128 at M = 1"] = lambda: square(token)
    found["torch F.linear 128×128 at M = 1"] = lambda: torch.nn.functional.linear(token, square.weight, square.bias)
    return found


#: What the idle kernels return, by op.
IDLE: dict[str, Any] = {}


def with_idle_kernels() -> dict[str, Call]:
    """Calls of kernels that do nothing, from a plug-in: what breccia itself costs on every call, on any device.

    Nothing in a version that has no such table.
    """
    import torch

    from breccia.arrays import frameworks
    from breccia.dispatch.registry import Plugin, Registry, _installed

    if not hasattr(frameworks, "current"):
        return {}
    t, token, recipe = torch.zeros(16, 128), torch.randn(1, 128), breccia.recipe("mxfp8")
    st = breccia.cast(t, recipe)
    weight = st.mT
    IDLE.update(cast=st, dequantize=t, matmul=torch.zeros(1, 16))
    plugin = Plugin("idle", "idle", "1.0", "bench_calls")
    frameworks.current = Registry([*_installed(), (plugin, lambda: sys.modules[__name__])], {})
    return {
        "cast, kernel that does nothing, torch": lambda: breccia.cast(t, recipe),
        "dequantize, kernel that does nothing, torch": lambda: breccia.dequantize(st),
        "matmul, kernel that does nothing, torch": lambda: breccia.matmul(token, weight),
    }


api = 1


def _idle(op: str) -> Call:
    return lambda *arguments: IDLE[op]


idle_cast, idle_dequantize, idle_matmul = map(_idle, ("cast", "dequantize", "matmul"))


@breccia.hookimpl
def breccia_kernels() -> Iterable[breccia.Kernel]:
    for op in ("cast", "dequantize", "matmul"):
        function, score = f"{__name__}:idle_{op}", f"{__name__}:score"
        yield breccia.Kernel(op, "torch", function, f"idle.{op}", device="cpu", rank=1, score=score)


def score(call: Any) -> float:
    """A kernel's usual questions."""
    return 1.0 if call.a.contiguous and call.a.shape[-1] % 16 == 0 and call.a.address_alignment >= 16 else 2.0


def measured() -> dict[str, tuple[float, float]]:
    """The least seconds of each call, and how many steps it takes: the median of loops, each beside one of steps."""
    lookup, number = {("cast", int, type(None), "numpy"): 1}, 0
    found: dict[str, tuple[float, float]] = {}

    def step() -> int | None:
        return lookup.get(("cast", type(number), type(None), "numpy"))

    for made in (calls, with_idle_kernels):
        for name, call in made().items():
            call()
            pairs = [
                (timeit.timeit(call, number=CALLS) / CALLS, timeit.timeit(step, number=STEPS) / STEPS) for _ in range(PAIRS)
            ]
            found[name] = min(s for s, _ in pairs), statistics.median(s / u for s, u in pairs)
    return found


@program
def main(
    before: Annotated[Path | None, typer.Option(help="A checkout of the version to compare with.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each version.")] = 5,
) -> Result:
    """Time small calls."""
    paths: dict[str, str | None] = {"now": None}
    if before is not None:
        paths = {"before": os.pathsep.join(map(str, sorted(before.resolve().glob("breccia-*/src")))), **paths}
    taken: dict[str, dict[str, list[Any]]] = {}
    for _ in progress(range(rounds), "processes"):
        for version, path in paths.items():
            for name, pair in apart("bench_calls:measured", python_path=path).items():
                taken.setdefault(name, {}).setdefault(version, []).append(pair)
    rows: list[dict[str, Any]] = []
    for name, versions in taken.items():
        times = {version: summary([s for s, _ in pairs]) for version, pairs in versions.items()}
        steps = {version: round(statistics.median(n for _, n in pairs), 2) for version, pairs in versions.items()}
        rows.append({"call": name, "time": times, "steps": steps})
    commit = output("git", "-C", str(before.resolve()), "rev-parse", "HEAD") if before else None
    return BENCHMARK.result(rows, {"before": commit}, provenance())
