"""On a CUDA device: casts against a copy, torch.compile, TransformerEngine, torchao and breccia 0.1.3; `quantize_` of a model;
what calls cost the host.

    python benchmarks/bench_gpu.py casts [--recipes nvfp4] [--ops cast] [--shapes 4096x4096] [--burst] [--out RESULTS]
    python benchmarks/bench_gpu.py quantize [--recipes nvfp4] [--out RESULTS]
    python benchmarks/bench_gpu.py host [--rivals transformer-engine] [--out RESULTS]
    python benchmarks/bench_gpu.py matmul ...         # as bench_matmul.py
    python benchmarks/bench_gpu.py weight_only ...    # as bench_weight_only.py

A GPU lowers its clock under load, so times compare only if they are interleaved. For each row, one process takes samples of
breccia, of a device copy and of every rival in rotation. Only breccia 0.1.3, which has the same name, runs in a process of its
own, before and after. A rival that is missing or raises is recorded with the reason.

`--device cpu` tries the script without a GPU: the host's clock replaces CUDA events.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import common
import rivals
import tables
import typer
from cast_tables import COPY
from gpu_work import DTYPES, OPS, RECIPES, Call, cases, copying, host_calls, is_large, matrices, rival_call, rotating, work
from rivals import OLD, OURS, TORCH_COMPILED, TRANSFORMER_ENGINE, Rival

app = typer.Typer(add_completion=False)

SHAPES = ("16384x8192", "4096x4096", "1024x1024", "64x8192")

#: A sample lasts at least this long, and has at least this many calls unless they take longer than the maximum.
SAMPLE_S, SAMPLE_CALLS, SAMPLE_MOST_S = 1e-3, 10, 20e-3
#: All samples of a call together take at most about this long, unless FEWEST of them take longer.
SAMPLES_MOST_S, FEWEST = 2.0, 3
#: Calls in a CUDA graph, and in a sample of host time: with 50 launches each they still fit the queue of launches.
GRAPH_CALLS = HOST_CALLS = 20
#: Seconds of load before a row ("hot"), and of idling before every sample ("burst").
LOAD_S, IDLE_S = 0.25, 0.35
WARM_UP = 3
#: The part of `--seconds` that each pass of breccia 0.1.3 may take.
OLD_SHARE = 0.1
#: Seconds between two writings of the result.
SAVE_S = 10.0

#: Recipes of `quantize`, and sizes of its model: the linear layers of Llama 3.2 1B.
QUANTIZED = ("fp8_block", "mxfp8", "nvfp4", "int4")
LAYERS, WIDTH, KEYS, HIDDEN = 16, 2048, 512, 8192
TINY = (2, 128, 128, 256)

# ------------------------------------------------------------------------------------------------ time


@dataclass
class Timer:
    """Samples of one call, in seconds. each: how often one `call` does the work."""

    call: Call
    each: float = 1.0
    calls: int = 1
    most: float = math.inf
    seconds: list[float] = field(default_factory=list)

    def fit(self, device: str) -> None:
        """Set the number of calls of a sample, and the most samples."""
        once = elapsed(self.call, 1, device)
        if once < SAMPLE_MOST_S:
            once = elapsed(self.call, WARM_UP, device)
        most = max(1, int(SAMPLE_MOST_S / once))
        self.calls = min(max(SAMPLE_CALLS, math.ceil(SAMPLE_S / once)), most)
        self.most = max(FEWEST, SAMPLES_MOST_S / (once * self.calls))

    def anew(self) -> Timer:
        """The same call without samples."""
        return Timer(self.call, self.each, self.calls, self.most)

    def sample(self, device: str) -> None:
        if len(self.seconds) < self.most:
            self.seconds.append(elapsed(self.call, self.calls, device) / self.each)


def elapsed(call: Call, calls: int, device: str) -> float:
    """Seconds per call: between CUDA events, or of the host's clock on a CPU."""
    if device == "cpu":
        return timeit.timeit(call, number=calls) / calls
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if calls > 1:
        call()  # while the device is busy with it, the host prepares the first counted call
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_time(call: Call, device: str, calls: int = HOST_CALLS) -> float:
    """Seconds per call until it returns, with an empty queue at the start."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def graph_of(call: Call) -> Call:
    """The replay of a CUDA graph of GRAPH_CALLS calls. Unlike `torch.cuda.graph`, it does not empty the cache of memory."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # some libraries allocate on the first call on a stream, which a capture forbids
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(GRAPH_CALLS):
                call()
        except Exception:
            with contextlib.suppress(Exception):  # a call that cannot be captured makes this fail too, and says less
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


def load(device: str) -> int | None:
    """Keep the device busy with matrix products. Returns its SM clock under that load in MHz, if it can be read."""
    if device == "cpu":
        return None
    import torch

    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    until = time.perf_counter() + LOAD_S
    while time.perf_counter() < until:
        for _ in range(50):
            torch.mm(a, a, out=b)
        synchronize(device)
    for _ in range(50):
        torch.mm(a, a, out=b)
    clock = None
    with contextlib.suppress(Exception):  # NVML's bindings may be missing, or a virtual machine may hide it
        clock = torch.cuda.clock_rate()
    synchronize(device)
    return clock


def measured(
    makers: dict[str, Callable[[], Call | None]], samples: int, device: str, burst: bool, small: bool, each: float = 1.0
) -> tuple[dict[str, Any], int | None]:
    """(by name the samples of each call, or the message of what it raised; the clock under load).

    makers: each returns the call, or None if it has no such op. small: take times in CUDA graphs too.
    """
    found: dict[str, Any] = {}
    timers: dict[tuple[str, str], Timer] = {}
    for name, make in makers.items():
        try:
            call = make()
            if call is None:
                continue
            call()
            synchronize(device)
            timers[name, "device"] = Timer(call, each)
        except Exception as e:
            found[name] = {"error": message(e)}
            continue
        found[name] = {}
        if small and device == "cuda":
            try:
                timers[name, "graph"] = Timer(graph_of(call), GRAPH_CALLS)
            except Exception as e:
                found[name]["graph_error"] = message(e)
    for timer in timers.values():
        timer.fit(device)
    clock = None if burst else load(device)
    for _ in range(samples):
        for timer in timers.values():
            if burst:
                time.sleep(IDLE_S)
            timer.sample(device)
    for (name, what), timer in timers.items():
        found[name][what] = common.summary(timer.seconds)
    return found, clock


def message(e: BaseException) -> str:
    """The error's type and the start of its text."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200] if lines else ''}"


# ------------------------------------------------------------------------------------------------ rivals


def loaded(names: list[str], device: str, dtype: str) -> tuple[dict[str, Rival], dict[str, str]]:
    """(the rivals of this process, the reason for each that is absent)."""
    import torch

    found: dict[str, Rival] = {}
    absent = {name: rivals.absence(name) or "left out" for name in rivals.RIVALS["cuda"] if name not in names}
    for name in names:
        if name == OLD:
            continue
        try:
            found[name] = rivals.on_device(name, device, getattr(torch, dtype))
        except Exception as e:
            absent[name] = message(e)
    return found, absent


def old_rows(
    recipes: list[str],
    ops: list[str],
    shapes: list[tuple[int, int]],
    dtype: str,
    device: str,
    samples: int,
    burst: bool,
    seconds: float,
) -> list[dict[str, Any]]:
    """breccia 0.1.3, in this process, on slabs where it has many temporaries per element (see rivals.SLABS).

    Begins no row after `seconds`.
    """
    started = time.monotonic()
    rival = rivals.packaged(OLD, "torch")
    rows: list[dict[str, Any]] = []
    for spec, op, shape in cases(recipes, [op for op in ops if op in ("cast", "dequantize")], shapes):
        if spec not in rival.recipes or time.monotonic() - started > seconds:
            continue
        xs = matrices(shape, dtype, device)
        slab = min(rivals.SLAB_ROWS, shape[0]) if spec in rival.slabs else shape[0]
        cut = [x[:slab] for x in xs]

        def make(op: str = op, spec: str = spec, cut: list[Any] = cut, times: int = shape[0] // slab) -> Call | None:
            if op == "cast" or times == 1:
                return rival_call(rival, op, spec, cut)
            cast = rival.cast(spec)
            return rotating(rival.dequantize, [rival.taller(cast(x), times) for x in cut] if rival.taller else [])

        part = slab / shape[0] if op == "cast" else 1.0
        found, _ = measured({OLD: make}, samples, device, burst, False, part)
        rows.append({"recipe": spec, "op": op, "shape": shape, "part": part, **found.get(OLD, {})})
    return rows


def merged(rows: list[dict[str, Any]], passes: list[list[dict[str, Any]]]) -> None:
    """Add the passes of breccia 0.1.3 to the rows, all samples together."""
    for row in rows:
        key = (row["recipe"], row["op"], list(row["shape"]))
        same = [old for one in passes for old in one if (old["recipe"], old["op"], list(old["shape"])) == key]
        seconds = [s for old in same if "device" in old for s in old["device"]["seconds"]]
        if seconds:
            row["times"][OLD] = {"device": common.summary(seconds), "part": same[0]["part"]}
        elif same:
            row["times"][OLD] = {"error": same[0]["error"]}


# ------------------------------------------------------------------------------------------------ the program


def where(device: str) -> dict[str, Any]:
    """Provenance, with the versions of torch, Triton, CUDA and the driver, and the name of the device."""
    import torch

    found = common.provenance()
    found["versions"] |= {"torch": torch.__version__}
    if device == "cpu":
        return found | {"torch_threads": torch.get_num_threads()}
    with contextlib.suppress(ImportError):
        import triton  # pyright: ignore[reportMissingImports]

        found["versions"] |= {"triton": triton.__version__}
    driver = common.output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return found | {"device": f"{name}, driver {driver}" if driver else name}


def check_device(device: str) -> None:
    """Exit unless torch has the device."""
    if device not in ("cpu", "cuda"):
        sys.exit(f"bench_gpu: --device takes cuda or cpu; got {device!r}.")
    try:
        import torch
    except ImportError:
        sys.exit("bench_gpu: torch is not installed; pip install torch.")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench_gpu: torch sees no CUDA device here; --device cpu tries the script without one.")


def sizes(shape: str) -> tuple[int, int]:
    """Rows and columns of "16384x8192". Exits on others, and on columns that some rivals cannot divide into blocks."""
    rows, _, columns = shape.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) > 0 and int(columns) > 0 and int(columns) % 128 == 0):
        sys.exit(f"bench_gpu: --shapes takes ROWSxCOLUMNS, columns a multiple of 128; got {shape!r}.")
    return int(rows), int(columns)


def known(given: list[str] | None, there_are: tuple[str, ...], option: str) -> list[str]:
    """The given names, or all if there are none. Exits on an unknown one."""
    if unknown := [name for name in given or [] if name not in there_are]:
        sys.exit(f"bench_gpu: {option} takes {', '.join(there_are)}; got {unknown[0]!r}.")
    return given or list(there_are)


RecipesOption = Annotated[list[str] | None, typer.Option(help="Recipes by name or spec; repeat for several. Default: all.")]
DeviceOption = Annotated[str, typer.Option(help="cuda, or cpu to try the script.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder for the JSON result.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]


@app.command()
def casts(
    recipes: RecipesOption = None,
    ops: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OPS)}; repeat for several. Default: all.")] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(help="ROWSxCOLUMNS; repeat for several. Small ones are timed in CUDA graphs too.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 15,
    seconds: Annotated[
        float, typer.Option(help="Start no row after this many seconds; the result counts the rows left out.")
    ] = math.inf,
    burst: Annotated[bool, typer.Option("--burst", help="Idle before every sample; no load before a row.")] = False,
    rivals_: Annotated[
        list[str] | None,
        typer.Option(
            "--rivals", help=f"{', '.join(rivals.RIVALS['cuda'])}, all or none; repeatable. Default: those installed."
        ),
    ] = None,
    device: DeviceOption = "cuda",
    out: OutOption = None,
    rival: Annotated[str, typer.Option(help="Measure breccia 0.1.3 only, in this process.", hidden=True)] = "",
    as_json: JsonOption = False,
) -> None:
    """Time casts and their inverse against a device copy and rivals."""
    chosen_ops, sides = known(ops, tuple(OPS), "--ops"), [sizes(shape) for shape in shapes or SHAPES]
    if dtype not in DTYPES:
        sys.exit(f"bench_gpu: --dtype takes {', '.join(DTYPES)}; got {dtype!r}.")
    check_device(device)
    specs = list(recipes or RECIPES)
    if rival:
        print(json.dumps(old_rows(specs, chosen_ops, sides, DTYPES[dtype], device, samples, burst, seconds)))
        return
    specs = [recipe.spec for recipe in common.recipes(specs)]  # rivals know recipes by their canonical spec
    names = rivals.chosen(rivals_ or [], "cuda")
    options = {
        "device": device,
        "clock": "CUDA events" if device == "cuda" else "the host's clock",
        "state": "burst" if burst else "hot" if device == "cuda" else "unheated",
        "dtype": dtype,
        "shapes": sides,
        "samples": samples,
    }
    result = {"benchmark": "gpu-casts", "schema": common.SCHEMA, "provenance": where(device), "options": options}
    state = "burst" if burst else ""
    there, absent = loaded(names, device, DTYPES[dtype])
    flags = ["casts", "--device", device, "--dtype", dtype, "--samples", str(samples), *(["--burst"] if burst else [])]
    if seconds < math.inf:
        flags += ["--seconds", str(seconds * OLD_SHARE)]
    for option, given in (("--recipes", specs), ("--ops", chosen_ops), ("--shapes", shapes or SHAPES)):
        flags += [word for one in given for word in (option, one)]
    passes: list[list[dict[str, Any]]] = []

    def measure_old() -> None:
        if OLD not in names or OLD in absent:
            return
        try:
            passes.append(common.child("bench_gpu.py", *flags, "--rival", OLD, python_path=rivals.python_path(OLD)))
        except SystemExit as e:
            absent[OLD] = str(e)

    def so_far(rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The result with these rows. The remaining rows count as left out."""
        rows = json.loads(json.dumps(rows))
        merged(rows, passes)
        for row in rows:
            for timed in row["times"].values():
                for what in ("device", "graph"):  # thousands of samples: keep their minimum, median and maximum
                    timed.get(what, {}).pop("seconds", None)
        versions = {name: one.version for name, one in there.items()} | ({OLD: rivals.OLD_VERSION} if passes else {})
        return {**result, "rivals": versions, "absent": absent, "left": len(planned) - len(rows), "rows": rows}

    planned = list(cases(specs, chosen_ops, sides))
    started = saved = time.monotonic()
    measure_old()
    rows: list[dict[str, Any]] = []
    for spec, op, shape in planned:
        if time.monotonic() - started > seconds:
            break
        print(f"measuring {op} of {shape[0]}x{shape[1]} under {spec}", file=sys.stderr)
        row: dict[str, Any] = {"recipe": spec, "op": op, "shape": shape}
        row |= {"dtype": OPS[op].dtype} if OPS[op].dtype else {}
        xs = matrices(shape, OPS[op].dtype or DTYPES[dtype], device)
        try:
            ours = work(op, spec, xs, DTYPES[dtype])
        except Exception as e:
            rows.append({**row, "error": message(e), "times": {}})
            continue
        makers: dict[str, Callable[[], Call | None]] = {COPY: lambda xs=xs: copying(xs), OURS: lambda ours=ours: ours.call}
        for name, one in there.items():
            makers[name] = lambda name=name, one=one, op=op, spec=spec, xs=xs: rival_call(one, op, spec, xs, name)
        times, clock = measured(makers, samples, device, burst, not is_large(shape))
        row |= {"functions": ours.functions()} | ({"to": ours.to} if ours.to else {})
        row |= {"bytes": ours.nbytes, "copy_bytes": 2 * xs[0].nbytes, "kernel": ours.kernel, "clock_mhz": clock}
        rows.append({**row, "times": times})
        if out is not None and time.monotonic() - saved > SAVE_S:  # so that a run that is stopped leaves a result
            tables.save(so_far(rows), out, state)
            saved = time.monotonic()
    measure_old()
    tables.tell(so_far(rows), out, as_json, state)


def model_of(layers: int, width: int, keys: int, hidden: int, device: str) -> Any:
    """The linear layers of a decoder, in BF16."""
    import torch

    shapes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}

    def layer() -> Any:
        made = {n: torch.nn.Linear(*s, bias=False, device=device, dtype=torch.bfloat16) for n, s in shapes.items()}
        return torch.nn.ModuleDict(made)

    return torch.nn.ModuleList(layer() for _ in range(layers))


def quantized(recipe: str, model: Any, device: str) -> dict[str, Any]:
    """Seconds of `quantize_`, the memory it takes beyond the model's (None on a CPU), and bytes before and after."""
    import torch

    import breccia_torch

    held = 0
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    summary = breccia_torch.quantize_(model, recipe)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else None
    return {"seconds": seconds, "peak": peak, "before": summary.bytes_before, "after": summary.bytes_after}


@app.command()
def quantize(
    recipes: Annotated[
        list[str] | None, typer.Option(help=f"Recipes; repeat for several. Default: {', '.join(QUANTIZED)}.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Warm runs, after the cold one.")] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of 0.3 million parameters, to try the script.")] = False,
    device: DeviceOption = "cuda",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time `quantize_` of a model of a billion parameters."""
    check_device(device)
    specs = [recipe.spec for recipe in common.recipes(recipes or QUANTIZED)]
    dimensions = TINY if tiny else (LAYERS, WIDTH, KEYS, HIDDEN)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # so that the cold run compiles
        for spec in specs:
            cold, *warm = [quantized(spec, model_of(*dimensions, device), device) for _ in range(1 + runs)]
            row: dict[str, Any] = {"recipe": spec, "cold_s": cold["seconds"], "cold_peak_bytes": cold["peak"]}
            row |= {"warm": common.summary([one["seconds"] for one in warm]), "peak_bytes": warm[-1]["peak"]}
            rows.append({**row, "bytes_before": cold["before"], "bytes_after": cold["after"]})
        result: dict[str, Any] = {"benchmark": "gpu-quantize", "schema": common.SCHEMA, "provenance": where(device)}
        options = {"device": device, "runs": runs, "layers": dimensions}
        tables.tell(json.loads(json.dumps({**result, "options": options, "rows": rows})), out, as_json)


#: Calls in a sample of `host`. Each launches few kernels. The first ones run with cold CPU caches.
FEW_LAUNCHES = 100
HOST_RIVALS = (TRANSFORMER_ENGINE, TORCH_COMPILED)


@app.command()
def host(
    side: Annotated[int, typer.Option(help="Rows and columns of the matrices.")] = 1024,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each call, interleaved.")] = 50,
    rivals_: Annotated[
        list[str] | None,
        typer.Option("--rivals", help="transformer-engine, torch-compiled or none; repeatable. Default: those installed."),
    ] = None,
    device: DeviceOption = "cuda",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time eager calls on the host, until they return."""
    import torch

    check_device(device)
    wanted = known(rivals_, (*HOST_RIVALS, "none"), "--rivals")
    names = [name for name in wanted if name in HOST_RIVALS and (rivals_ or not rivals.absence(name))]
    there, absent = loaded(names, device, "bfloat16")
    calls: dict[tuple[str, str], Call] = {}
    errors: dict[str, str] = {}
    for name, whose, make in host_calls(side, device, there):
        try:
            if (call := make()) is None:
                continue
            for _ in range(WARM_UP):
                call()
            calls[name, whose] = call
        except Exception as e:
            errors[name if whose in (OURS, "torch") else f"{name}, {whose}"] = message(e)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(samples):
            for name, call in calls.items():
                seconds[name].append(host_time(call, device, FEW_LAUNCHES))
    found: dict[str, dict[str, Any]] = {}
    for (name, whose), taken in seconds.items():
        found.setdefault(name, {})[whose] = common.summary(taken)
    rows = [
        {"call": name, "host": by.get(OURS) or by.get("torch"), "rivals": {who: t for who, t in by.items() if who in there}}
        for name, by in found.items()
        if OURS in by or "torch" in by
    ]
    result: dict[str, Any] = {"benchmark": "gpu-host", "schema": common.SCHEMA, "provenance": where(device)}
    result |= {"rivals": {name: one.version for name, one in there.items()}, "absent": absent}
    options = {"device": device, "side": side, "samples": samples, "calls": FEW_LAUNCHES}
    tables.tell(json.loads(json.dumps({**result, "options": options, "errors": errors, "rows": rows})), out, as_json)


if __name__ == "__main__":
    import bench_matmul  # both import this module
    import bench_weight_only

    for name, command in (("matmul", bench_matmul.main), ("weight_only", bench_weight_only.main)):
        app.command(name)(command)
    app()
