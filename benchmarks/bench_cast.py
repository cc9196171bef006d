"""Time of cast and dequantize of an FP32 matrix on NumPy, torch or JAX, against the rivals of rivals.py.

One process per rival, breccia first and last in each of its ways so that drift of the machine shows. The run is repeated until
both passes agree; otherwise nothing is written. Ratios are minimum over minimum. Quality, stored scales and values are checked.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import rivals
import typer
from harness import ABSENT, Benchmark, Result, Table, apart, program, provenance, ratio, refuse, table, trio
from harness.plots import BLUE, GREY, ORANGE, Plot
from harness.timing import DRIFT, Call, Quality, drift, interleaved, normal, often, pooled, summary, timed
from rivals import MODULES, OLD, ON_NUMPY, OURS, RECIPES, SAME_SCALE, SLAB_ROWS, STRAIGHTFORWARD, WAYS, chosen

#: Shape of the call whose time is the price of a call rather than of its elements.
SMALL = (4, 128)
#: How much worse than the best rival breccia may decode before a run counts as broken: less than a tenth of a bit.
TOLERANCE_DB = 0.5
#: Decoded values count as the same within this part of them: q * s * g is two FP32 roundings, in either order.
SAME_VALUE = 2.0**-22


def rows_for(result: Result, op: str, small: bool = False) -> list[Any]:
    """The rows of an op, of the matrix or of the small call."""
    return [r for r in result["rows"] if r["op"] == op and (r["shape"] == result["options"]["small"]) == small]


def versioned(result: Result, name: str) -> str:
    """`name version`, the version once, and none after a way of breccia's."""
    spaced = name.replace("-", " ")
    return spaced if name in (OLD, *WAYS) else f"{spaced} {result['rivals'][name]}"


def speed_up(row: Any, rival: str) -> float:
    return pooled(row, rival)[0] / pooled(row, OURS)[0]


def unsteady(result: Result) -> str:
    """How much breccia's first and last pass differ, over every call and way to run it, if by more than is allowed."""
    full, allowed = rows_for(result, "cast") + rows_for(result, "dequantize"), result["options"]["drift"]
    found = [drift(row, name) for row in full for name in (OURS, *WAYS) if name in result["rivals"]]
    if max(*found, 1 / min(found)) <= allowed:
        return ""
    return (
        f"the last pass of breccia took {min(found):.2f} to {max(found):.2f} of the time of its first, where {1 / allowed:.2f} "
        f"to {allowed:.2f} is allowed"
    )


def times(op: str) -> Callable[[Result], Table]:
    def cell(row: Any, rival: str) -> str:
        found = pooled(row, rival)
        if found is None:
            return ABSENT
        faster = ratio(speed_up(row, rival))
        if rival == ON_NUMPY and "ratios" in row:
            low, middle, high = statistics.quantiles(row["ratios"], n=4)
            faster = f"{ratio(middle)} ({low:.2f} to {high:.2f})"
        slab = f" (×{row['factor'][rival]:g})" if rival in row["factor"] else ""
        return f"{faster}; {trio(found, 1e3)}{slab}"

    def made(result: Result) -> Table:
        rows, options = rows_for(result, op), result["options"]
        columns: dict[str, Any] = {
            "recipe": "recipe",
            versioned(result, OURS): lambda row: trio(pooled(row, OURS), 1e3),
            "last / first": lambda row: f"{drift(row, OURS):.2f}",
        }
        for name in (name for name in result["rivals"] if name != OURS):
            columns[versioned(result, name)] = lambda row, name=name: cell(row, name)
        columns["our kernel"] = lambda row: row["kernel"][OURS]
        size = options["size"]
        note = (
            f"Milliseconds for {size}×{size} FP32: min / median / max of at least {options['runs']} runs (ours: of two "
            "passes), and before them how many times faster breccia is."
        )
        if factors := {factor for row in rows for factor in row["factor"].values()}:
            note += f" (×{max(factors):g}): measured on a slab of {options['slab_rows']}×{size} and multiplied."
        if counts := [len(row["ratios"]) for row in rows if "ratios" in row]:
            note += f" Over {ON_NUMPY.replace('-', ' ')}: median and quartiles of {counts[0]} interleaved calls."
        why = unsteady(result)
        return compared(op, columns, rows, note, f" The machine was not steady: {why}." if why else "")

    return made


def compared(title: str, columns: Any, rows: Any, note: str, end: str = "") -> Table:
    """The table. Its note says if a rival lacks a recipe."""
    made = table(title, columns, rows)
    lacking = any(ABSENT in row for row in made.rows)
    return replace(made, note=note + lacking * f" {ABSENT}: that rival does not have it." + end)


def calls(result: Result) -> Table:
    both = {op: {row["recipe"]: row for row in rows_for(result, op, small=True)} for op in ("cast", "dequantize")}
    shape, columns = "×".join(map(str, result["options"]["small"])), dict[str, Any]({"recipe": lambda name: name})
    for op, by in both.items():
        for name in result["rivals"]:
            columns[f"{op}, {versioned(result, name)}"] = lambda recipe, by=by, name=name: (
                trio(found, 1e6) if (found := pooled(by[recipe], name)) else ABSENT
            )
    note = f"Microseconds per call at {shape}, call to result: min / median / max of loops of many calls."
    return compared(f"one {shape} call", columns, both["cast"], note)


def agreement(result: Result) -> Table:
    """What the rivals of the run wrote, next to breccia's. The ways of breccia agree, or there would be no result."""
    others = [name for name in result["rivals"] if name not in (OURS, *WAYS)]

    def share(row: Any, part: str, name: str) -> str:
        if name not in row[part]:
            return "other rule" if name in row["sqnr_db"] else ABSENT
        return "100 %" if row[part][name] == 1 else f"{np.floor(1e5 * row[part][name]) / 1e3:.3f} %"

    columns: dict[str, Any] = {"recipe": "recipe"}
    for name in (OURS, *others):
        columns[f"SQNR dB, {name.replace('-', ' ')}"] = lambda row, name=name: (
            f"{row['sqnr_db'][name]:.2f}" if name in row["sqnr_db"] else ABSENT
        )
    for part in ("same_scales", "same_values"):
        for name in others:
            heading = f"{part.replace('_', ' ')} as {name.replace('-', ' ')}"
            columns[heading] = lambda row, part=part, name=name: share(row, part, name)
    note = (
        "On standard normal data of the same run. Scales are compared bit for bit, values to two FP32 roundings. `other rule`: "
        "that rival defines the stored scale differently."
    )
    if len(others) < len(result["rivals"]) - 1:
        note += " What breccia wrote in its several ways is the same, bit for bit."
    return compared("what was written", columns, result["checks"], note)


def speed_series(result: Result) -> Any:
    """By op, recipe and rival: speed-up, and whether the rival's time was extrapolated."""
    names = [name for name in result["rivals"] if name not in (OURS, *WAYS)]
    bars = {
        op: {
            row["recipe"]: {n: [round(speed_up(row, n), 6), n in row["factor"]] for n in names} for row in rows_for(result, op)
        }
        for op in ("cast", "dequantize")
    }
    return {"rivals": {name: versioned(result, name) for name in names}, "bars": bars} if names else {}


def speed_plot(series: Any) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = {STRAIGHTFORWARD: BLUE, OLD: ORANGE}
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (op, recipes) in zip(figure.subplots(1, 2, sharey=True), series["bars"].items(), strict=True):
        height = 0.8 / len(series["rivals"])
        longest = 1.0
        for place, bars in enumerate(recipes.values()):
            for turn, (name, (value, scaled)) in enumerate(bars.items()):
                y = place - 0.4 + (turn + 0.5) * height
                style = {"color": colours[name], "hatch": "///" if scaled else None, "edgecolor": GREY, "linewidth": 0}
                axes.barh(y, value - 1, height * 0.9, 1, **style)
                where = {"textcoords": "offset points", "va": "center", "fontsize": 9}
                axes.annotate(ratio(value), (max(value, 1), y), (4, 0), **where)
                longest = max(longest, value)
        axes.set_xscale("log")
        axes.set_xlim(right=longest * 4)
        axes.set_yticks(range(len(recipes)), list(recipes))
        axes.set_title(op, fontsize=11)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.axvline(1, color=GREY, linewidth=1)
    figure.axes[0].invert_yaxis()
    keys = [Patch(color=colours[name], label=f"over {label}") for name, label in series["rivals"].items()]
    if any(scaled for recipes in series["bars"].values() for bars in recipes.values() for _, scaled in bars.values()):
        keys.append(Patch(facecolor="none", edgecolor=GREY, hatch="///", label="rival's time extrapolated"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


TITLE = "Times faster than each rival"
BENCHMARKS = {
    framework: Benchmark(
        f"cast{end}",
        {
            f"cast{end}": times("cast"),
            f"dequantize{end}": times("dequantize"),
            f"calls{end}": calls,
            **({} if framework == "jax" else {f"agreement{end}": agreement}),
        },
        plots={"speed-up": lambda tag, r, _: Plot(f"speed-up-{tag}.svg", TITLE, speed_series(r), speed_plot)}
        if not end
        else {},
    )
    for framework, end in (("numpy", ""), ("torch", "-torch"), ("jax", "-jax"))
}


def one(name: str, framework: str, size: int, runs: int, seconds: float, folder: str) -> dict[str, Any]:
    """Everything about one rival, measured in this process; its scales and values of the check go to `folder`."""
    rival = rivals.rival(name, framework)
    shapes = ((size, size), (min(SLAB_ROWS, size), size), SMALL)
    x, check, small = (rival.given(normal(shape, seed)) for seed, shape in enumerate(shapes))
    rows: list[dict[str, Any]] = []
    sqnr_db: dict[str, float] = {}
    large: list[Call] = []
    for recipe in rival.recipes:
        cast = rival.cast(recipe)
        st = cast(check)
        values = rival.dequantize(st)
        for part, found in {"scale": rival.scale(st), "values": values}.items():
            if origin(found) != origin(x):
                refuse(f"{name} got a matrix of {origin(x)} and gave {part} of {origin(found)}; leave it out.")
            np.save(Path(folder) / f"{recipe}-{part}.npy", np.asarray(found))
        sqnr_db[recipe] = Quality((np.asarray(check), np.asarray(values))).sqnr_db

        slab = x[:SLAB_ROWS] if recipe in rival.slabs else x
        factor = x.shape[0] / slab.shape[0]
        st = cast(slab)
        whole = st if factor == 1 else rival.taller(st, int(factor))
        tiny = cast(small)
        rival.dequantize(tiny)  # what is compiled is compiled for a shape when it first meets it
        large += [lambda cast=cast, slab=slab: cast(slab), lambda st=whole: rival.dequantize(st)]
        for op, operand, shape, scale, call in (
            ("cast", x, x.shape, factor, None),
            ("dequantize", whole, x.shape, 1.0, None),
            ("cast", small, SMALL, 1.0, lambda cast=cast: cast(small)),
            ("dequantize", tiny, SMALL, 1.0, lambda st=tiny: rival.dequantize(st)),
        ):
            row = {"recipe": recipe, "op": op, "shape": shape, "factor": scale, "kernel": rival.kernel(op, recipe, operand)}
            rows.append(row | ({"time": often(call, runs)} if call else {}))
    for row, taken in zip((r for r in rows if "time" not in r), interleaved(large, runs, seconds), strict=True):
        row["time"] = summary([s * row["factor"] for s, _ in taken])
    return {"rival": name, "version": rival.version, "rows": rows, "sqnr_db": sqnr_db}


def pairs(framework: str, size: int, runs: int) -> list[dict[str, Any]]:
    """breccia on NumPy and on `framework`, interleaved in this process: what disturbs the one disturbs the other.

    A ratio is NumPy's time over the framework's for two calls that follow each other, of which either is first as often.
    """
    ways = [rivals.rival(name, framework) for name in (OURS, ON_NUMPY)]
    given = [way.given(normal((size, size), 0)) for way in ways]
    rows: list[dict[str, Any]] = []
    for recipe in RECIPES:
        casts = [way.cast(recipe) for way in ways]
        stored = [cast(x) for cast, x in zip(casts, given, strict=True)]
        calls = {
            "cast": [lambda cast=cast, x=x: cast(x) for cast, x in zip(casts, given, strict=True)],
            "dequantize": [lambda way=way, st=st: way.dequantize(st) for way, st in zip(ways, stored, strict=True)],
        }
        for op, both in calls.items():
            ratios: list[float] = []
            for turn in range(2 * runs):
                seconds = {way: timed(both[way], warm_up=False)[0] for way in ((0, 1) if turn % 2 else (1, 0))}
                ratios.append(round(seconds[1] / seconds[0], 4))
            rows.append({"recipe": recipe, "op": op, "ratios": ratios})
    return rows


def origin(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def equal_share(a: np.ndarray, b: np.ndarray, relative: float) -> float:
    """The part of elements that are equal to within `relative`; shapes may differ by axes of length one."""
    if a.size != b.size or a.dtype != b.dtype:
        return 0.0
    a, b = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    return float(np.mean(np.abs(a - b) <= relative * np.abs(a)))


def checks(passes: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Per recipe: SQNR of everybody, and the part of stored scales and decoded values that equal breccia's.

    Exits if breccia's are off, or differ between its ways.
    """
    found: list[dict[str, Any]] = []
    for recipe in RECIPES:
        sqnr_db = {p["rival"]: p["sqnr_db"][recipe] for p in passes if recipe in p["sqnr_db"]}
        best = max((name for name in sqnr_db if name == OURS or recipe in SAME_SCALE[name]), key=lambda name: sqnr_db[name])
        if sqnr_db[OURS] < sqnr_db[best] - TOLERANCE_DB:
            refuse(
                f"{recipe} decodes with {sqnr_db[OURS]:.2f} dB, while {best} has {sqnr_db[best]:.2f} dB on the same matrix. "
                "Times of a wrong result mean nothing: run the tests first."
            )
        row: dict[str, Any] = {"recipe": recipe, "sqnr_db": sqnr_db, "same_scales": {}, "same_values": {}}
        for name in (name for name in sqnr_db if name != OURS and recipe in SAME_SCALE[name]):
            within = 0.0 if name in WAYS else SAME_VALUE
            for part, into, relative in (("scale", "same_scales", 0.0), ("values", "same_values", within)):
                ours, theirs = (np.load(folder / who / f"{recipe}-{part}.npy") for who in (OURS, name))
                row[into][name] = equal_share(ours, theirs, relative)
                if name in WAYS and row[into][name] != 1:
                    refuse(f"{recipe} of {name} has other {part} than that of {OURS}: run the tests first.")
        found.append(row)
    return found


def measured(names: list[str], *arguments: Any) -> dict[str, Any]:
    """Fields of the result. breccia runs first and last. arguments: of `one`, after the name and before the folder."""
    passes: list[dict[str, Any]] = []
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [OURS, *names, *(way for way in reversed(names) if way in WAYS), OURS]:
            arrays = Path(folder) / name
            arrays.mkdir(exist_ok=True)
            print(f"measuring {name}", file=sys.stderr)
            passes.append(
                apart(
                    "bench_cast:one", name, *arguments, str(arrays), python_path=rivals.fetched_old() if name == OLD else None
                )
            )
        agreed = checks(passes, Path(folder))
    for one in passes:
        for found in one["rows"]:
            fields = {name: found[name] for name in ("recipe", "op", "shape")}
            row = rows.setdefault(tuple(map(str, fields.values())), {**fields, "kernel": {}, "factor": {}, "passes": [{}, {}]})
            row["kernel"] |= {one["rival"]: found["kernel"]} if found["kernel"] else {}
            row["factor"] |= {one["rival"]: found["factor"]} if found["factor"] != 1 else {}
            row["passes"][one["rival"] in row["passes"][0]][one["rival"]] = found["time"]
    ordered = sorted(rows.values(), key=lambda row: row["shape"] == list(SMALL))
    return {"rivals": {one["rival"]: one["version"] for one in passes}, "checks": agreed, "rows": ordered}


@program
def main(
    framework: Annotated[str, typer.Option(help="Whose arrays are cast: numpy, torch or jax (on the CPU).")] = "numpy",
    size: Annotated[int, typer.Option(help="Rows and columns of the matrix; a multiple of 128.")] = 4096,
    runs: Annotated[int, typer.Option(min=1, help="Least counted runs of each call; after each that is not.")] = 7,
    seconds: Annotated[float, typer.Option(help="Least seconds of the turns of a rival; longer means more runs.")] = 15.0,
    attempts: Annotated[int, typer.Option(min=1, help="How often to repeat the run until both passes agree.")] = 4,
    drift: Annotated[float, typer.Option(help="They agree if one's median is at most this multiple of the other's.")] = DRIFT,
    rivals: Annotated[list[str] | None, typer.Option(help="Those of RIVALS in rivals.py, all or none; repeatable.")] = None,
) -> Result:
    """Time cast and dequantize on NumPy, torch or JAX against rivals, one process each."""
    if framework not in MODULES:
        refuse(f"--framework takes {', '.join(MODULES)}; got {framework!r}.")
    if framework != "numpy" and (find_spec(framework) is None or find_spec(f"breccia_{framework}") is None):
        refuse(f"--framework {framework} needs {framework} and breccia-{framework}; pip install both.")
    if size < 128 or size % 128 or (size > SLAB_ROWS and size % SLAB_ROWS):
        refuse(f"--size must be 128 or a multiple of {SLAB_ROWS}, so that every rival takes it; got {size}.")
    names = chosen(rivals or [], framework)
    options = {"size": size, "runs": runs, "seconds": seconds, "drift": drift, "small": list(SMALL), "slab_rows": SLAB_ROWS}
    where, result = provenance([framework] if framework != "numpy" else []), dict[str, Any]()
    if framework == "torch":
        import torch

        where["torch_threads"] = torch.get_num_threads()
    for attempt in range(1, attempts + 1):
        found = measured(names, framework, size, runs, seconds)
        result = BENCHMARKS[framework].result(found.pop("rows"), options, where, attempt=attempt, **found)
        if not (why := unsteady(result)):
            break
        print(f"attempt {attempt} of {attempts}: {why}", file=sys.stderr)
    if ON_NUMPY in names:
        print("measuring breccia and breccia-on-numpy, interleaved", file=sys.stderr)
        by = {(pair["recipe"], pair["op"]): pair["ratios"] for pair in apart("bench_cast:pairs", framework, size, runs)}
        for row in rows_for(result, "cast") + rows_for(result, "dequantize"):
            row["ratios"] = by[row["recipe"], row["op"]]
    if why := unsteady(result):
        result["refused"] = f"{why}. Nothing was written: run it again on a machine that does nothing else."
    return result
