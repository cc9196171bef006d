"""On a CUDA device: casts and their inverse against a copy, torch.compile, TransformerEngine and torchao.

For each row, one process takes samples of breccia, of a device copy and of every rival in rotation. Rivals that are missing or
raise are recorded.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import rivals
import torch
import typer
from harness import Benchmark, Device, Result, Seconds, command, known, progress, recipes_named, sizes
from harness.device import Arms, Call, Make, beyond_cache, check_device, graphed, load, message, rotating, sampled, where
from harness.tables import (
    ABSENT,
    Table,
    extent,
    failures,
    fastest,
    listed,
    median,
    over,
    pivoted,
    ratio,
    sides,
    spread,
    table,
    three,
)
from plain import SCALE, TILES
from rivals import EAGER, OLD, OURS, TORCH_COMPILED, Rival

import breccia

RECIPES = (
    "fp8_block", TILES, "fp8_row", "fp8_current", "fp8_delayed", "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4",
    "nvfp4,two_level=false", "int4", "int4,symmetric=false,signed=false", "int8", "nf4",
)  # fmt: skip
SHAPES = ("16384x8192", "4096x4096", "1024x1024", "64x8192")
#: The arm that copies the matrix on the device.
COPY = "copy"
#: Matrices with at most this many elements are small: launching a kernel takes a large part of the time.
SMALL_ELEMENTS = 4096 * 4096

_WITH_GOALS = ("fp8_block", TILES, "fp8_row", "mxfp8", "mxfp4", "nvfp4", "int4")
#: The goals of casts, as data: the least share of the copy's rate for a large matrix, by (recipe, op).
GOALS = {
    **{(recipe, "cast"): 0.95 for recipe in _WITH_GOALS},
    **{(recipe, "cast_pair"): 0.90 for recipe in _WITH_GOALS},
    ("fp8_current", "cast"): 0.95,
    ("fp8_current", "cast_pair"): 0.90,
}
#: What is requantized, and to what: the first keeps its codes, the others are decoded and cast.
REQUANTIZED = {TILES: "fp8_block", "mxfp8": "nvfp4", "fp8_block": "mxfp8"}
#: Recipes that are also cast from FP16 and FP32: one for each kind of scale.
OTHER_DTYPES = ("fp8_block", "fp8_current", "mxfp8", "nvfp4")
#: Recipes that search for scales, one for each kind of them.
SEARCHED = ("nvfp4,scale_rule=mse", "nvfp4,scale_rule=four_six", "mxfp4,scale_rule=mse", "int4,scale_rule=mse")


@dataclass(frozen=True)
class Op:
    """The call of a row. function: breccia's op. dtype: the input's; others than BF16 for large matrices only."""

    function: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: str = "bfloat16"
    recipes: tuple[str, ...] = RECIPES


OPS = {
    "cast": Op("cast"),
    "cast-axis-2": Op("cast", {"axis": -2}),
    "cast_pair": Op("cast_pair"),
    "dequantize": Op("dequantize"),
    "requantize": Op("requantize", recipes=tuple(REQUANTIZED)),
    "cast_ste": Op("cast_ste"),
    "AmaxHistory.cast": Op("cast_and_record", recipes=("fp8_delayed",)),
    "AmaxHistory.update": Op("record_amax", recipes=("fp8_delayed",)),
    "cast-fp16": Op("cast", dtype="float16", recipes=OTHER_DTYPES),
    "cast-fp32": Op("cast", dtype="float32", recipes=OTHER_DTYPES),
    "cast-search": Op("cast", recipes=SEARCHED),
}


def is_large(shape: tuple[int, int]) -> bool:
    """Whether a cast of the matrix takes the device many times longer than the launch takes the host."""
    return math.prod(shape) > SMALL_ELEMENTS


def cases(recipes: list[str], ops: list[str], shapes: list[tuple[int, int]]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(recipe, op, shape) of every row, shape by shape; rows with a goal come first. Recipes that are not in RECIPES run the
    ops that are measured for all recipes."""
    for shape in shapes:
        found = [
            (spec, op, shape)
            for spec, op in itertools.product(recipes, ops)
            if (spec in OPS[op].recipes or (spec not in (*RECIPES, *SEARCHED) and len(OPS[op].recipes) >= len(RECIPES) - 1))
            and (is_large(shape) or OPS[op].dtype == "bfloat16")
        ]
        yield from sorted(found, key=lambda row: row[:2] not in GOALS)


def matrices(shape: tuple[int, int], dtype: str, device: str) -> list[Any]:
    """Standard normal matrices, enough of them that the last one evicts the first from the device's cache."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator).to(getattr(torch, dtype))
    return [x, *(x.clone() for _ in range(beyond_cache(x.nbytes, device) - 1))]


@dataclass(frozen=True)
class Work:
    """breccia's call, the bytes that it has to read and write, and the kernel that runs. to: what is requantized to."""

    call: Call
    nbytes: int
    kernel: str
    to: str = ""

    def functions(self) -> list[str]:
        """Names of the Triton functions that the call launches, in order; empty if breccia-triton does not run it."""
        try:
            from breccia_triton.casts import cast, decode
            from breccia_triton.launch.cache import Remembered
        except ImportError:
            return []
        Remembered.forget()  # then the next call is the only one that is remembered
        self.call()
        launches = [each for call in cast._calls.values() for each in getattr(call, "launches", ())]
        launches += [call.plan for call in decode._calls.values() if not isinstance(call, str)]
        return [each.function.__name__ for each in launches]


def work(op: str, spec: str, xs: list[Any]) -> Work:
    """What a row measures: `op` under the recipe `spec`. Operands of dequantize and requantize are casts of `xs`."""
    recipe, name = breccia.recipe(spec), OPS[op].function
    supplied: dict[str, Any] = {"scale": torch.tensor(SCALE, device=xs[0].device)} if spec == "fp8_delayed" else {}
    if name in ("record_amax", "cast_and_record"):
        return _history(name, recipe, xs)
    to = breccia.recipe(REQUANTIZED.get(spec, spec))
    extras = {"dequantize": [], "requantize": [to]}.get(name, [recipe])
    given = {"dequantize": {"out_dtype": "bfloat16"}}.get(name, supplied if name in ("cast", "cast_pair", "cast_ste") else {})
    options = {**given, **OPS[op].options}
    casts = name not in ("dequantize", "requantize")
    operands = xs if casts else [breccia.cast(x, recipe, **supplied) for x in xs]
    function = getattr(breccia, name)
    results = function(operands[0], *extras, **options)
    # A scale of the whole tensor takes one more read, before the cast.
    reads = 2 if not supplied and ((casts and _tensor_wide(recipe)) or (name == "requantize" and _tensor_wide(to))) else 1
    written = sum(result.nbytes for result in (results if isinstance(results, tuple) else [results]))
    kernel = breccia.explain(name, operands[0], *extras, **options).running
    call = rotating(lambda x: function(x, *extras, **options), operands)
    return Work(call, reads * operands[0].nbytes + written, kernel, REQUANTIZED.get(spec, "") if name == "requantize" else "")


def _tensor_wide(recipe: Any) -> bool:
    fmt = recipe.format
    return fmt.global_scale is not None or fmt.scale.block == breccia.formats.TENSOR


def _history(name: str, recipe: Any, xs: list[Any]) -> Work:
    """`AmaxHistory.cast` or `AmaxHistory.update`: one read. The history is a few numbers, so its bytes are not counted."""
    history = breccia.AmaxHistory(recipe).update(xs[0])
    kernel = breccia.explain(name, xs[0], recipe).running
    if name == "record_amax":
        return Work(rotating(history.update, xs), xs[0].nbytes, kernel)
    st, _ = history.cast(xs[0])
    return Work(rotating(history.cast, xs), xs[0].nbytes + st.nbytes, kernel)


def rival_call(rival: Rival, op: str, spec: str, xs: list[Any], name: str = "") -> Call | None:
    """The rival's call for the same work; None if it has no such recipe or op.

    name: the rival's. torch.compile takes seconds for each graph, so it runs ops other than `cast` and `dequantize` on large
    matrices only. Plain torch's formulas take only whole blocks.
    """
    down = bool(OPS[op].options) or op == "cast_pair" or spec == TILES
    if name in (EAGER, TORCH_COMPILED) and down and xs[0].shape[0] % 128:
        return None
    if name == TORCH_COMPILED and op not in ("cast", "dequantize") and not is_large(tuple(xs[0].shape)):
        return None
    made = rival.others.get(op) if op not in ("cast", "cast-fp16", "cast-fp32", "dequantize") else rival.cast
    if made is None:
        return None
    try:
        cast = made(spec)
    except KeyError:
        return None
    return rotating(rival.dequantize, [cast(x) for x in xs]) if op == "dequantize" else rotating(cast, xs)


def part_of_copy(row: Any, measure: str = "time") -> float:
    return row["bytes"] / median(row, OURS, measure) * median(row, COPY, measure) / row["copy_bytes"]


def of_copy(row: Any, measure: str = "time") -> str:
    return f"{100 * part_of_copy(row, measure):.1f} %"


def best_rival(row: Any, measure: str = "time") -> tuple[str, float] | None:
    return fastest(row, (arm for arm in row.get(measure, {}) if arm not in (OURS, COPY, "torch")), measure)


def versus(row: Any, measure: str = "time") -> str:
    """The best rival: its median in µs, and how many times faster breccia is."""
    found, ours = best_rival(row, measure), median(row, OURS, measure)
    return f"{found[0]} {three(1e6 * found[1])} ({ratio(found[1] / ours)})" if found and ours else ABSENT


def largest(result: Result) -> list[Any]:
    rows = [row for row in result["rows"] if median(row, OURS)]
    most = max((math.prod(row["shape"]) for row in rows), default=0)
    return [row for row in rows if math.prod(row["shape"]) == most]


def named(row: Any) -> str:
    return f"{row['op']} to {row['to']}" if "to" in row else row["op"]


def casts_table(result: Result) -> Table:
    options, rows = result["options"], largest(result)
    columns = {
        "recipe": "recipe",
        "op": named,
        "breccia, µs": lambda row: spread(row["time"][OURS], 1e6),
        "TB/s": lambda row: three(row["bytes"] / median(row, OURS) / 1e12),
        "of copy": of_copy,
        "best rival, µs": versus,
        "kernel": "kernel",
    }
    note = "Nothing was measured. "
    if rows:
        note = (
            f"{sides(rows[0]['shape'])} {options['dtype']}, by {options['clock']}: min / median / max of "
            f"at least {options['samples']} samples, "
            "each of at least 10 calls and 1 ms (fewer calls where they exceed 20 ms), interleaved with those of a copy and of "
            "all rivals. TB/s counts the bytes that the op has to read and write; computing a scale of the whole tensor is one "
            "read more. Of copy: that rate over the rate of copying the same matrix. "
        )
    clocks = [row["clock_mhz"] for row in rows if row["clock_mhz"]]
    if options["state"] == "hot":
        note += "Hot: after 250 ms of matrix products"
        note += f", with the SM clock at {min(clocks)} to {max(clocks)} MHz. " if clocks else ". "
    return table("casts on the device", columns, rows, note + rivals_note(result))


def rivals_note(result: Result) -> str:
    """Versions of the rivals, and the reasons why others are absent or failed."""
    parts = [f"Rivals: {listed(result['rivals']) or 'none'}."]
    if OLD in result["rivals"]:
        parts.append(f"{OLD.replace('-', ' ')}: in a process of its own, before and after; it decodes to FP32.")
        if any(row.get("part", {}).get(OLD, 1) != 1 for row in result["rows"]):
            parts.append("Its casts of mxfp8 and nvfp4 were measured on a slab of rows and multiplied.")
    if result["left"]:
        parts.append(f"{result['left']} rows were left out for lack of time.")
    parts += [f"{name} is absent: {why}." for name, why in result["absent"].items()]
    return " ".join(parts) + failures(
        (arm, error, f"{row['op']} under {row['recipe']}")
        for row in result["rows"]
        for measure in ("errors", "graph_errors")
        for arm, error in row.get(measure, {}).items()
    )


def goals(result: Result) -> Table:
    by = {(row["recipe"], row["op"]): row for row in largest(result) if math.prod(row["shape"]) > SMALL_ELEMENTS}

    def measured(goal: Any) -> tuple[str, str, str]:
        if (row := by.get(goal)) is None:
            return ABSENT, "not measured", ABSENT
        rival = best_rival(row)
        faster = f"{rival[0]} {over(rival[1], median(row, OURS))}" if rival else ABSENT
        return of_copy(row), "yes" if part_of_copy(row) >= GOALS[goal] else "**no**", faster

    columns: dict[str, Any] = {"recipe": lambda goal: goal[0], "op": lambda goal: goal[1]}
    columns["goal, of copy"] = lambda goal: f"{100 * GOALS[goal]:.0f} %"
    for place, heading in enumerate(("measured", "met", "times faster than the best rival")):
        columns[heading] = lambda goal, place=place: measured(goal)[place]
    note = (
        f"{sum(measured(goal)[1] == 'yes' for goal in GOALS)} of {len(GOALS)} goals are met. Medians of the table of a large "
        "matrix, which counts bytes: `cast_pair` reads once and writes both orientations."
    )
    return table("goals of casts", columns, GOALS, note)


def roofline(result: Result) -> Table:
    """For each kernel, the bytes per number that its ops have to move, and the share of the copy's rate that they reach."""
    kernels: dict[tuple[str, str], list[Any]] = {}
    for row in largest(result):
        kernels.setdefault((" + ".join(row.get("functions", ())) or row["kernel"], row["op"]), []).append(row)

    def end(which: Any) -> Any:
        def cell(kernel: Any) -> str:
            row = which(kernels[kernel], key=part_of_copy)
            return f"{row['recipe']} {100 * part_of_copy(row):.0f} %"

        return cell

    columns = {
        "kernel": lambda kernel: kernel[0],
        "op": lambda kernel: kernel[1],
        "bytes for each number": lambda kernel: extent(
            (row["bytes"] / math.prod(row["shape"]) for row in kernels[kernel]), lambda n: f"{n:.2f}"
        ),
        "of copy, median": lambda kernel: f"{100 * statistics.median(map(part_of_copy, kernels[kernel])):.0f} %",
        "least": end(min),
        "most": end(max),
    }
    note = (
        "The roofline is the rate of the copy, which reads and writes each byte once. Medians are over the recipes of the "
        "table of a large matrix."
    )
    return table("roofline of casts", columns, kernels, note)


def small(result: Result) -> Table:
    options = result["options"]

    def cell(row: Any) -> str:
        measure = row["measure"]
        if not median(row, OURS, measure):
            return ABSENT
        text = three(1e6 * median(row, OURS, measure))
        if measure == "graph" and median(row, COPY, measure):
            text += f", {of_copy(row, measure)}"
        return text + (f"; {versus(row, measure)}" if best_rival(row, measure) else "")

    cells = [
        {**row, "measure": measure}
        for row in result["rows"]
        for measure in ("time", "graph")
        if math.prod(row["shape"]) <= SMALL_ELEMENTS and OURS in row.get("time", {})
    ]
    note = (
        f"Median microseconds of a call, {options['dtype']}, {options['state']}, and those of the best rival, with how many "
        f"times faster breccia is. Events: by {options['clock']}, calls launched one after the other. Graph: in a CUDA graph "
        f"of 20 calls, with the share of the copy's rate there. {ABSENT}: not measured. On a GPU inputs rotate, so that they "
        "are not in its cache."
    )
    return pivoted(
        "small casts on the device",
        {"recipe": lambda row: row["recipe"], "op": named},
        lambda row: (-math.prod(row["shape"]), *row["shape"], row["measure"] == "graph"),
        lambda key: f"{sides(key[1:3])}: {'graph' if key[3] else 'events'}",
        cell,
        cells,
        note,
    )


BENCHMARK = Benchmark(
    "gpu-casts",
    {"gpu-casts": casts_table, "gpu-casts-goals": goals, "gpu-casts-roofline": roofline, "gpu-casts-small": small},
    key=("recipe", "op", "shape"),
)


def loaded(names: list[str], device: str) -> tuple[dict[str, Rival], dict[str, str]]:
    """(the rivals of this process, the reason for each that is absent)."""
    found: dict[str, Rival] = {}
    absent = {name: rivals.absence(name) or "left out" for name in rivals.RIVALS["cuda"] if name not in names}
    for name in names:
        try:
            found[name] = rivals.rival(name, device=device, dtype=torch.bfloat16)
        except Exception as e:
            absent[name] = message(e)
    return found, absent


def measured(spec: str, op: str, shape: tuple[int, int], there: dict[str, Rival], device: str, samples: int) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": spec, "op": op, "shape": shape}
    row |= {"dtype": OPS[op].dtype} if OPS[op].dtype != "bfloat16" else {}
    xs = matrices(shape, OPS[op].dtype, device)
    try:
        ours = work(op, spec, xs)
    except Exception as e:
        return {**row, "errors": {OURS: message(e)}}
    makers: dict[str, Make] = {COPY: lambda: rotating(torch.empty_like(xs[0]).copy_, xs), OURS: lambda: ours.call}
    makers |= {name: lambda name=name, one=one: rival_call(one, op, spec, xs, name) for name, one in there.items()}
    arms = Arms(device)
    arms.add(makers)
    if device == "cuda" and not is_large(shape):
        for arm, call in arms.calls.items():
            try:
                arms.timers["graph", arm] = graphed(call, device)
            except Exception as e:
                arms.note("graph_errors", arm, message(e))
    for timer in arms.timers.values():
        timer.fit()
    clock = load(device)
    sampled(arms.timers.values(), samples)
    row |= {"functions": ours.functions()} | ({"to": ours.to} if ours.to else {})
    row |= {"bytes": ours.nbytes, "copy_bytes": 2 * xs[0].nbytes, "kernel": ours.kernel, "clock_mhz": clock}
    return {**row, **arms.times(every=False)}  # thousands of samples: keep their minimum, median and maximum


RivalsOption = Annotated[list[str] | None, typer.Option("--rivals", help="Those of rivals.py, all or none.")]


@command
def casts(
    recipes: Annotated[list[str] | None, typer.Option(help="Recipes by name or spec; repeatable. Default: all.")] = None,
    ops: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OPS)}; repeat for several. Default: all.")] = None,
    shapes: Annotated[list[str] | None, typer.Option(help="ROWSxCOLUMNS. Small ones are timed in graphs too.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 15,
    seconds: Seconds = math.inf,
    rivals_: RivalsOption = None,
    device: Device = "cuda",
) -> Iterator[Result]:
    """Time casts and their inverse against a device copy and rivals."""
    chosen, lengths = known(ops, OPS, "--ops"), [sizes(shape) for shape in shapes or SHAPES]
    check_device(device)
    named = recipes_named(recipes or (*RECIPES, *SEARCHED))
    specs = [recipe.spec for recipe in named]  # rivals know recipes by their canonical spec
    names = rivals.chosen(rivals_ or [], "cuda")
    there, absent = loaded(names, device)
    options = {"device": device, "clock": "CUDA events" if device == "cuda" else "the host's clock"}
    options |= {"state": "hot" if device == "cuda" else "unheated", "dtype": "bf16", "shapes": lengths, "samples": samples}
    run, planned = where(device), list(cases(specs, chosen, lengths))
    versions = {name: one.version for name, one in there.items()}
    rows: list[dict[str, Any]] = []

    def so_far() -> Result:
        return BENCHMARK.result(rows, options, run, rivals=versions, absent=absent, left=len(planned) - len(rows))

    started = time.monotonic()
    for spec, op, shape in progress(planned, "casts"):
        if time.monotonic() - started > seconds:
            break
        rows.append(measured(spec, op, shape, there, device, samples))
        yield so_far()
    yield so_far()
