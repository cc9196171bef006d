"""Time of cast and dequantize of an FP32 matrix on NumPy, torch or JAX: breccia, the older package breccia 0.1.3, and a few
lines of NumPy with ml_dtypes, or of plain torch; on torch also torchao, with and without torch.compile. On torch and JAX also
breccia on NumPy, on torch breccia under torch.compile.

    python benchmarks/bench_cast.py [--framework torch|jax] [--size 4096] [--rivals all] [--out benchmarks/results]

One process per rival, breccia first and last in each of its ways so that drift of the machine shows. The run is repeated until
the first and the last pass agree; otherwise nothing is written. Ratios are minimum over minimum. Results are checked in the
same run: quality of every rival, and stored scales and values against ours.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import common
import numpy as np
import rivals
import tables
import typer
from rivals import MODULES, ON_NUMPY, OURS, RECIPES, SAME_SCALE, SLAB_ROWS, WAYS, chosen

#: Shape of the call whose time is the price of a call rather than of its elements.
SMALL = (4, 128)
#: What `--rival` calls the measurement of pairs.
PAIRS = "pairs"
#: How much worse than the best rival ours may decode before a run counts as broken: less than a tenth of a bit.
TOLERANCE_DB = 0.5
#: Decoded values count as the same within this part of them: q * s * g is two FP32 roundings, in either order.
SAME_VALUE = 2.0**-22


def one(name: str, framework: str, size: int, runs: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Everything about one rival, measured in this process; its scales and values of the check go to `folder`."""
    rival = rivals.rival(name, framework)
    shapes = ((size, size), (min(SLAB_ROWS, size), size), SMALL)
    x, check, small = (rival.given(common.normal(shape, seed)) for seed, shape in enumerate(shapes))
    rows: list[dict[str, Any]] = []
    sqnr_db: dict[str, float] = {}
    large: list[Callable[[], object]] = []
    for recipe in rival.recipes:
        cast = rival.cast(recipe)
        st = cast(check)
        written = {"scale": rival.scale(st), "values": rival.dequantize(st)}
        for part, found in written.items():
            if origin(found) != origin(x):
                sys.exit(f"bench_cast: {name} got a matrix of {origin(x)} and gave {part} of {origin(found)}; leave it out.")
            np.save(folder / f"{recipe}-{part}.npy", np.asarray(found))
        quality = common.Quality()
        quality.add(np.asarray(check), np.asarray(written["values"]))
        sqnr_db[recipe] = quality.sqnr_db

        slab = x[:SLAB_ROWS] if recipe in rival.slabs else x
        factor = x.shape[0] / slab.shape[0]
        st = cast(slab)
        whole = st if factor == 1 else rival.taller(st, int(factor))
        tiny = cast(small)
        rival.dequantize(tiny)  # what is compiled is compiled for a shape when it first meets it
        large += [lambda cast=cast, slab=slab: cast(slab), lambda st=whole: rival.dequantize(st)]
        for op, operand, shape, scale, times in (
            ("cast", x, slab.shape, factor, {}),
            ("dequantize", whole, x.shape, 1.0, {}),
            ("cast", small, SMALL, 1.0, common.timed_often(lambda cast=cast: cast(small), runs)),
            ("dequantize", tiny, SMALL, 1.0, common.timed_often(lambda st=tiny: rival.dequantize(st), runs)),
        ):
            stands_for = SMALL if shape == SMALL else x.shape
            row = {"recipe": recipe, "op": op, "shape": stands_for, "measured_shape": shape, "factor": scale, **times}
            rows.append({**row, "kernel": rival.kernel(op, recipe, operand)})
    full = [row for row in rows if row["shape"] != SMALL]
    for row, times in zip(full, common.swept(large, runs, seconds), strict=True):
        row |= common.summary([s * row["factor"] for s in times["seconds"]])
    return {"rival": name, "version": rival.version, "rows": rows, "sqnr_db": sqnr_db}


def pairs(framework: str, size: int, runs: int) -> list[dict[str, Any]]:
    """Ours on NumPy and on `framework`, turn by turn in this process: what disturbs the one disturbs the other.

    A ratio is NumPy's time over the framework's for two calls that follow each other, of which either is first as often.
    """
    ways = [rivals.rival(name, framework) for name in (OURS, ON_NUMPY)]
    given = [way.given(common.normal((size, size), 0)) for way in ways]
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
                seconds = [0.0, 0.0]
                for way in (0, 1) if turn % 2 else (1, 0):
                    seconds[way] = common.timed(both[way], 1, warm_up=0)["min_s"]
                ratios.append(round(seconds[1] / seconds[0], 4))
            rows.append({"recipe": recipe, "op": op, "ratios": ratios})
    return rows


def origin(array: Any) -> str:
    """The library whose array this is."""
    return type(array).__module__.partition(".")[0]


def equal_share(a: np.ndarray, b: np.ndarray, relative: float) -> float:
    """The part of elements that are equal to within `relative`; shapes may differ by axes of length one."""
    if a.size != b.size or a.dtype != b.dtype:
        return 0.0
    a, b = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    return float(np.mean(np.abs(a - b) <= relative * np.abs(a)))


def checks(passes: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Per recipe: SQNR of everybody, and the part of stored scales and decoded values that equal ours.

    Exits if ours is off, or differs between its ways.
    """
    found: list[dict[str, Any]] = []
    for recipe in RECIPES:
        sqnr_db = {p["rival"]: p["sqnr_db"][recipe] for p in passes if recipe in p["sqnr_db"]}
        best = max((name for name in sqnr_db if name == OURS or recipe in SAME_SCALE[name]), key=lambda name: sqnr_db[name])
        if sqnr_db[OURS] < sqnr_db[best] - TOLERANCE_DB:
            sys.exit(
                f"bench_cast: {recipe} decodes with {sqnr_db[OURS]:.2f} dB, while {best} has {sqnr_db[best]:.2f} dB on the "
                "same matrix. Times of a wrong result mean nothing: run the tests first."
            )
        row: dict[str, Any] = {"recipe": recipe, "sqnr_db": sqnr_db, "same_scales": {}, "same_values": {}}
        for name in sqnr_db:
            if name == OURS:
                continue
            within = 0.0 if name in WAYS else SAME_VALUE
            for part, into, relative in (("scale", "same_scales", 0.0), ("values", "same_values", within)):
                if recipe in SAME_SCALE[name]:
                    ours, theirs = (np.load(folder / who / f"{recipe}-{part}.npy") for who in (OURS, name))
                    row[into][name] = equal_share(ours, theirs, relative)
                    if name in WAYS and row[into][name] != 1:
                        sys.exit(f"bench_cast: {recipe} of {name} has other {part} than that of {OURS}: run the tests first.")
        found.append(row)
    return found


def where(framework: str) -> dict[str, Any]:
    """Provenance, and of torch and JAX what their times depend on."""
    found = common.provenance()
    if framework == "torch":
        import torch

        found["versions"] |= {"torch": torch.__version__}
        found |= {"torch_threads": torch.get_num_threads()}
    if framework == "jax":
        import jax

        found["versions"] |= {"jax": jax.__version__}
        if jax.default_backend() != "cpu":
            found |= {"device": str(jax.devices()[0])}
    return found


def main(
    framework: Annotated[str, typer.Option(help="Whose arrays are cast: numpy, torch or jax (on the CPU).")] = "numpy",
    size: Annotated[int, typer.Option(help="Rows and columns of the matrix; a multiple of 128.")] = 4096,
    runs: Annotated[int, typer.Option(help="Least counted runs of each call; after each that is not.")] = 7,
    seconds: Annotated[float, typer.Option(help="Least seconds of the turns of a rival; longer means more runs.")] = 15.0,
    attempts: Annotated[int, typer.Option(help="How often to repeat the run until the passes of ours agree.")] = 4,
    drift: Annotated[
        float, typer.Option(help="The passes agree if the median of the one is at most this multiple of the other's.")
    ] = tables.DRIFT,
    rivals_: Annotated[
        list[str] | None,
        typer.Option("--rivals", help="Those of RIVALS in rivals.py (one is fetched on first use), all or none; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the JSON result.")] = None,
    rival: Annotated[str, typer.Option(help="Measure this rival only, in this process.", hidden=True)] = "",
    dump: Annotated[Path | None, typer.Option(help="Where --rival leaves arrays to compare.", hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Time cast and dequantize on NumPy, torch or JAX against rivals, one process each."""
    if framework not in MODULES:
        sys.exit(f"bench_cast: --framework takes {', '.join(MODULES)}; got {framework!r}.")
    if framework != "numpy" and (find_spec(framework) is None or find_spec(f"breccia_{framework}") is None):
        sys.exit(f"bench_cast: --framework {framework} needs {framework} and breccia-{framework}; pip install both.")
    if size < 128 or size % 128 or (size > SLAB_ROWS and size % SLAB_ROWS):
        sys.exit(f"bench_cast: --size must be 128 or a multiple of {SLAB_ROWS}, so that every rival takes it; got {size}.")
    if runs < 1 or attempts < 1:
        sys.exit(f"bench_cast: --runs and --attempts must be at least 1, got {runs} and {attempts}.")
    if rival == PAIRS:
        print(json.dumps(pairs(framework, size, runs)))
        return
    if rival:
        if dump is None:
            sys.exit("bench_cast: --rival is how the benchmark calls itself and needs --dump; leave it out.")
        print(json.dumps(one(rival, framework, size, runs, seconds, dump)))
        return
    names = chosen(rivals_ or [], framework)
    benchmark = "cast" if framework == "numpy" else f"cast-{framework}"
    options = {"size": size, "runs": runs, "seconds": seconds, "drift": drift, "small": SMALL, "slab_rows": SLAB_ROWS}
    result = {"benchmark": benchmark, "schema": common.SCHEMA, "provenance": where(framework), "options": options}
    flags = ["--framework", framework, "--size", str(size), "--runs", str(runs), "--seconds", str(seconds)]
    for attempt in range(1, attempts + 1):
        passes, compared = measured(names, flags)
        result |= {"attempt": attempt, "passes": passes, "checks": compared, "pairs": []}
        if tables.steady(result):
            break
        print(f"attempt {attempt} of {attempts}: {tables.drifted(result)}", file=sys.stderr)
    if ON_NUMPY in names:
        print("measuring breccia and breccia-on-numpy by turns", file=sys.stderr)
        result |= {"pairs": common.child("bench_cast.py", *flags, "--rival", PAIRS)}
    steady = tables.steady(result)
    tables.tell(json.loads(json.dumps(result)), out if steady else None, as_json)
    if not steady:
        sys.exit(
            f"bench_cast: {tables.drifted(result)}. Nothing was written: run it again on a machine that does nothing else."
        )


def measured(names: list[str], flags: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure breccia and these rivals, breccia first and last. Returns the passes and the comparison of their results."""
    passes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in [OURS, *names, *(way for way in reversed(names) if way in WAYS), OURS]:
            arrays = Path(folder) / name
            arrays.mkdir(exist_ok=True)
            print(f"measuring {name}", file=sys.stderr)
            path = rivals.python_path(name)
            passes.append(common.child("bench_cast.py", *flags, "--rival", name, "--dump", str(arrays), python_path=path))
        return passes, checks(passes, Path(folder))


if __name__ == "__main__":
    typer.run(main)
