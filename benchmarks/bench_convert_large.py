"""Speed and peak memory of `breccia convert` at 20 GB of DeepSeek-V3's shapes, beside other converters.

Sources are written by sources.py. Every run is a process of its own, whose times include its start; runs of all arms take
turns. The largest source is converted once. compressed-tensors runs if it is installed; llama.cpp where BRECCIA_LLAMA names the
folder of its libraries, and mlx_lm where --mlx-lm names a Python that has it. They verify nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import sources
import typer
from generators import FOLDER
from harness import HERE, Benchmark, Result, cores, program, progress, provenance, refuse, summary
from harness.plots import BLUE, GREY, ORANGE, Plot
from harness.tables import ABSENT, GOAL, Table, judged, median, table

from breccia_bridges.text import byte_count_of

#: The arms of breccia: how it verifies, and on how many cores it runs. On one core, and without measuring, one work alone.
ARMS = {
    "full": ("full", None),
    "none": ("none", None),
    "bytes": ("bytes", None),
    "one core": ("full", 1),
    "one core, bytes": ("bytes", 1),
    "one core, none": ("none", 1),
}
BRIEF = ("full", "none")
COPY, CAST, CAST_ONE = "cp", "cast in memory", "cast in memory, one core"
RIVALS = ("compressed-tensors", "llama.cpp", "mlx_lm")
#: Recipes of BF16, without another converter.
BF16 = ("nvfp4", "int4", "fp8_block")
#: MB/s of FP8 that is quantized again and of BF16, fully verified, and the share of the cast in memory without verification.
FP8_SPEED, BF16_SPEED, SHARE = 250, 400, 0.7
#: Casts in memory in each turn, of which the quickest counts.
ROUNDS = 5
#: Points of a line of the plot.
POINTS = 200


def rate(row: Any, arm: str) -> float | None:
    """MB of the source by second of the clock."""
    seconds = median(row, arm)
    return row["bytes"] / seconds / 1e6 if seconds else None


def speeds(result: Result) -> Table:
    def cell(*arms: str) -> Callable[[Any], str]:
        def made(row: Any) -> str:
            found = {arm: each for arm in arms if (each := rate(row, arm)) is not None}
            names = [f" ({arm})" if len(arms) > 1 else "" for arm in found]
            return ", ".join(f"{each:,.0f}{name}" for each, name in zip(found.values(), names, strict=True)) or ABSENT

        return made

    columns: dict[str, Any] = {"work": "work", "MB": lambda row: f"{row['bytes'] / 1e6:,.0f}"}
    columns |= {arm: cell(arm) for arm in (*list(ARMS)[:4], CAST)} | {"another converter": cell(*RIVALS), COPY: cell(COPY)}
    left_out = "".join(f" {arm} did not run: {why}." for arm, why in result["options"]["left_out"].items())
    note = (
        f"MB of the source by second of the clock, medians of {result['options']['runs']} run(s). full: fully verified; bytes: "
        "the bytes are read back; none: nothing is. one core: fully verified, on one. cast in memory: the best of several, of "
        f"one large matrix, decoded first where it has codes; all cores.{left_out}"
    )
    return table("convert at any size", columns, result["rows"], note)


def peaks(result: Result) -> Table:
    columns: dict[str, Any] = {
        "source, GB": lambda run: f"{run['bytes'] / 1e9:.2f}",
        "peak, MB": lambda run: f"{run['peak'] / 1e6:,.0f}",
        "limit, MB": lambda run: f"{result['options']['max_memory'] / 1e6:,.0f}",
        "seconds": lambda run: f"{run['seconds']:.1f}",
        "MB/s": lambda run: f"{run['bytes'] / run['seconds'] / 1e6:,.0f}",
        "of the processors, s": lambda run: f"{run['cpu']:.1f}",
    }
    note = (
        "Peak of RssAnon + RssShmem of the process, read every 5 ms: memory that is no page of a file. One run, fully verified."
    )
    return table("peak of memory", columns, result["memory"], note)


def parts(result: Result) -> Table:
    """What one core does: differences of its runs."""
    lines: list[tuple[str, ...]] = []
    for row in result["rows"]:
        full, read_back, none = (median(row, arm) for arm in list(ARMS)[3:])
        cast = median(row, CAST_ONE)
        if not (full and read_back and none and cast):
            continue
        taken = {
            "decode and cast": cast,
            "read, hash, write, and start": none - cast,
            "read back and hash": read_back - none,
            "decode both and measure": full - read_back,
        }
        lines += [(row["work"], what, f"{s:.2f}", f"{100 * s / full:.0f} %") for what, s in taken.items()]
    note = "Seconds of one core, from the differences of runs that verify less, and of a cast in memory."
    return Table("what bounds one core", ("work", "what", "seconds", "of all"), tuple(lines), note)


def goals(result: Result) -> Table:
    rows = {row["work"]: row for row in result["rows"]}
    again = {work: rate(row, "full") for work, row in rows.items() if work.startswith("FP8 → nvfp4")}
    verified = {work: rate(row, "full") for work, row in rows.items() if work.removeprefix("BF16 → ") in BF16}

    def shares(*arms: str) -> dict[str, float | None]:
        """The rate without verification, relative to the slowest of the arms."""
        found: dict[str, float | None] = {}
        for work, row in rows.items():
            if CAST in row["time"]:
                none, *bounds = (rate(row, arm) for arm in ("none", *arms))
                found[work] = none / min(bounds) if none and all(bounds) else None
        return found

    limit = result["options"]["max_memory"]
    of_limit = {f"{run['bytes'] / 1e9:.2f} GB": run["peak"] / limit for run in result["memory"]}
    small, *_, large = [run["peak"] for run in result["memory"]] * 2
    lines = [
        judged("fully verified, FP8", f"≥ {FP8_SPEED} MB/s", again, FP8_SPEED),
        judged("fully verified, BF16", f"≥ {BF16_SPEED} MB/s", verified, BF16_SPEED),
        judged("not verified", f"≥ {SHARE:.2f} × {CAST}", shares(CAST), SHARE),
        judged("not verified", f"≥ {SHARE:.2f} × the slower of {CAST} and {COPY}", shares(CAST, COPY), SHARE),
        judged("peak of memory", "≤ 1.00 × the limit", of_limit, 1, at_most=True),
        judged("ten times the size", "≤ 1.25 × the peak", {"all": large / small}, 1.25, at_most=True),
    ]
    return Table("goals of conversion", GOAL, tuple(lines), "Of the tables above.")


def memory_series(result: Result) -> Any:
    lines = [{"bytes": run["bytes"], "moments": run["moments"]} for run in result["memory"]]
    return {"limit": result["options"]["max_memory"], "lines": lines}


def memory_plot(series: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for line, colour in zip(series["lines"], (BLUE, ORANGE), strict=False):
        shares, sizes = zip(*line["moments"], strict=True)
        axes.plot([100 * share for share in shares], [size / 1e6 for size in sizes], color=colour, linewidth=1.2)
        axes.annotate(
            f"{line['bytes'] / 1e9:.0f} GB", (100, sizes[-1] / 1e6), xytext=(4, 0), textcoords="offset points", color=colour
        )
    axes.axhline(series["limit"] / 1e6, color=GREY, linestyle="--", linewidth=1)
    axes.annotate("--max-memory", (0, series["limit"] / 1e6), xytext=(0, 4), textcoords="offset points")
    axes.set_xlabel("% of the run")
    axes.set_ylabel("RssAnon + RssShmem, MB")
    axes.set_ylim(0)
    return figure


BENCHMARK = Benchmark(
    "convert-large",
    {
        "convert-large": speeds,
        "convert-large-memory": peaks,
        "convert-large-parts": parts,
        "convert-large-goals": goals,
    },
    plots={
        "convert-memory": lambda tag, r, _: Plot(
            f"convert-memory-{tag}.svg", "Memory while converting", memory_series(r), memory_plot
        )
    },
)


def thinned(moments: list[tuple[float, int]], seconds: float) -> list[tuple[float, int]]:
    """The largest size in each of so many equal parts of a run, by the share of it that has passed."""
    parts: dict[int, int] = {}
    for at, size in moments:
        part = min(POINTS - 1, int(POINTS * at / seconds))
        parts[part] = max(parts.get(part, 0), size)
    return [((part + 1) / POINTS, size) for part, size in sorted(parts.items())]


def convert(source: Path, destination: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "breccia", "convert", str(source), str(destination), "--force", "--json", *words]


class Work:
    """A conversion, and the programs that do it."""

    def __init__(self, name: str, size: int, source: Path, destination: Path, words: tuple[str, ...], recipe: str = "") -> None:
        """recipe: of a cast in memory, and of all arms; without it, `BRIEF`."""
        self.name, self.size, self.source, self.destination = name, size, source, destination
        self.commands: dict[str, tuple[list[str], int | None]] = {
            arm: (convert(source, destination, *words, "--verify", verify), count)
            for arm, (verify, count) in ARMS.items()
            if recipe or arm in BRIEF
        }
        self.commands[COPY] = ["cp", "-r", str(source), str(destination)], None
        self.recipe = recipe

    def rival(self, arm: str, command: list[str]) -> Work:
        self.commands[arm] = command, None
        return self

    def turn(self, taken: dict[str, list[sources.Spent]]) -> None:
        """One run of each program."""
        for arm, (command, count) in self.commands.items():
            remove(self.destination)
            taken.setdefault(arm, []).append(sources.spent(command, count))
        remove(self.destination)
        for arm, threads in ((CAST, cores()), (CAST_ONE, 1)) if self.recipe else ():
            script = str(HERE / "other_converters.py")
            words = [sys.executable, script, "in-memory", str(self.source), self.recipe, str(ROUNDS), str(threads)]
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            seconds, cpu, size = map(float, said.split())
            share = self.size / size  # as if of all bytes
            taken.setdefault(arm, []).append(sources.Spent(seconds * share, cpu * share, []))

    def row(self, taken: dict[str, list[sources.Spent]]) -> dict[str, Any]:
        times = {arm: summary([run.seconds for run in runs]) for arm, runs in taken.items()}
        cpu = {arm: summary([run.cpu for run in runs]) for arm, runs in taken.items()}
        return {"work": self.name, "bytes": self.size, "time": times, "cpu": cpu}


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def works(
    where: Path,
    medium: tuple[Path, int],
    small: tuple[Path, int],
    gigabytes: float,
    width: int,
    mlx_lm: Path | None,
    left: dict[str, str],
) -> Iterator[Work]:
    """All conversions. medium, small: sources in FP8 and their bytes. left: gets the converters that cannot run, and why."""
    other = [sys.executable, str(HERE / "other_converters.py")]
    fp8, size = medium
    yield Work("FP8 → nvfp4", size, fp8, where / "out", ("-r", "nvfp4"), "nvfp4")
    fp8, size = small
    decoded = Work("FP8 → bf16", size, fp8, where / "out", ("-r", "bf16"))
    if find_spec("compressed_tensors"):
        decoded.rival("compressed-tensors", [*other, "compressed-tensors", str(fp8), str(where / "out")])
    else:
        left["compressed-tensors"] = "it is not installed"
    yield decoded
    bf16 = where / "bf16"
    bf16_size = sources.llama(bf16, gigabytes, width)
    for recipe in BF16:
        yield Work(f"BF16 → {recipe}", bf16_size, bf16, where / "out", ("-r", recipe), recipe)
    if FOLDER in os.environ and find_spec("gguf"):
        path, out = where / "llama.gguf", where / "out.gguf"
        size = sources.gguf(path, gigabytes, width)
        found = Work("BF16 → Q4_0, both in GGUF", size, path, out, ("-r", "q4_0", "--dialect", "gguf"))
        yield found.rival("llama.cpp", [*other, "llama.cpp", str(path), str(out)])
    else:
        left["llama.cpp"] = f"{FOLDER} is not set, or gguf is not installed"
    if mlx_lm is not None:
        out, recipe = where / "out", "int4,group_size=64,offset=bias,scale_dtype=bf16"
        words = ("-r", recipe, "--dialect", "mlx", "--include", "model.embed*", "--include", "lm_head*")
        found = Work("BF16 → MLX, 4 bits", bf16_size, bf16, out, words)
        yield found.rival(
            "mlx_lm", [str(mlx_lm.absolute()), "-m", "mlx_lm", "convert", "--hf-path", str(bf16), "--mlx-path", str(out), "-q"]
        )
    else:
        left["mlx_lm"] = "--mlx-lm is not given"


@program
def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the large source; others have a quarter to a tenth of it.")] = 20,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm with the smaller sources.")] = 2,
    max_memory: Annotated[str, typer.Option(help="As of breccia convert, for the large source and its tenth.")] = "1GiB",
    mlx_lm: Annotated[Path | None, typer.Option(help="A Python that has mlx-lm.", exists=True)] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the files are written; a temporary folder by default.")] = None,
    shrink: Annotated[int, typer.Option(min=1, help="Divide all sides by this, to try the script.")] = 1,
) -> Result:
    """Time and memory of breccia convert at any size."""
    options: dict[str, Any] = {"runs": runs, "max_memory": byte_count_of(max_memory, "--max-memory"), "left_out": {}}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        where = Path(name)
        if (free := shutil.disk_usage(where).free) < 1.7e9 * gigabytes:
            refuse(f"--gigabytes {gigabytes:g} needs {1.7 * gigabytes:.0f} GB of disk, and {where} has {free / 1e9:.0f} GB.")
        found: dict[float, tuple[Path, int]] = {}
        memory: list[dict[str, Any]] = []
        for of in (gigabytes / 10, gigabytes):
            path = where / f"deepseek-{of:g}"
            found[of] = path, sources.deepseek(path, of, shrink)
            run = sources.spent(convert(path, where / "out", "-r", "nvfp4", "--max-memory", max_memory), watch=True)
            moments = thinned(run.moments, run.seconds)
            memory.append({"bytes": found[of][1], "seconds": run.seconds, "cpu": run.cpu, "peak": run.peak, "moments": moments})
            remove(where / "out")
        remove(found[gigabytes][0])
        width, path = max(128, 2048 // shrink // 128 * 128), where / "deepseek-medium"
        medium = path, sources.deepseek(path, gigabytes / 4, shrink)
        every = list(works(where, medium, found[gigabytes / 10], gigabytes / 5, width, mlx_lm, options["left_out"]))
        taken: list[dict[str, list[sources.Spent]]] = [{} for _ in every]
        for _ in progress(range(runs), "runs"):
            for work, of_work in zip(every, taken, strict=True):
                work.turn(of_work)
        rows = [work.row(of_work) for work, of_work in zip(every, taken, strict=True)]
    where_run = provenance(["compressed-tensors", "gguf"])
    return BENCHMARK.result(rows, options, where_run, memory=memory)
