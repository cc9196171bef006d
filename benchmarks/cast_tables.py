"""Tables of casts on CUDA devices: times, the goals, the share of the copy's rate by kernel, and what calls cost the host."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from cells import ABSENT, Result, Table, extent, failures, ratio, spread, three
from rivals import OLD, OURS, TILES

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
#: Goals: seconds of a first call with a filled cache on disk, and microseconds of a call on the host.
FIRST_CALL_S, HOST_US = 0.3, 15.0


def best_rival(row: Result, what: str) -> tuple[str, Result] | None:
    """(name, times) of the rival with the least median of "device", "graph" or "host" time."""
    found = {name: timed[what] for name, timed in row["times"].items() if name not in (OURS, COPY) and what in timed}
    return min(found.items(), key=lambda item: item[1]["median_s"]) if found else None


def versus(row: Result, what: str) -> str:
    """The best rival: its median in µs, and how many times faster breccia is."""
    ours, rival = row["times"][OURS].get(what), best_rival(row, what)
    if ours is None or rival is None:
        return ABSENT
    name, theirs = rival
    return f"{name} {three(1e6 * theirs['median_s'])} ({ratio(theirs['median_s'] / ours['median_s'])})"


def part_of_copy(row: Result, what: str = "device") -> float:
    """The rate of breccia's "device" or "graph" time over that of the copy."""
    ours, copied = (row["times"][name][what]["median_s"] for name in (OURS, COPY))
    return row["bytes"] / ours * copied / row["copy_bytes"]


def of_copy(row: Result, what: str) -> str:
    """`part_of_copy` in percent."""
    return f"{100 * part_of_copy(row, what):.1f} %"


def timed_rows(result: Result) -> Iterator[Result]:
    """Rows of the largest shape that have breccia's time on the device."""
    rows = [row for row in result["rows"] if "device" in row["times"].get(OURS, {})]
    largest = max((math.prod(row["shape"]) for row in rows), default=0)
    return (row for row in rows if math.prod(row["shape"]) == largest)


def named(row: Result) -> str:
    """The op of a row, with what it converts to."""
    return f"{row['op']} to {row['to']}" if "to" in row else row["op"]


def gpu_casts(result: Result) -> Table:
    """Device time of every op on the largest shape, its share of the copy's bandwidth, and the best rival."""
    options, every = result["options"], list(timed_rows(result))
    rows: list[tuple[str, ...]] = []
    for row in every:
        timed = row["times"][OURS]["device"]
        rate = three(row["bytes"] / timed["median_s"] / 1e12)
        cells = (row["recipe"], named(row), spread(timed, 1e6), rate, of_copy(row, "device"), versus(row, "device"))
        rows.append((*cells, row["kernel"]))
    headings = ("recipe", "op", "breccia, µs", "TB/s", "of copy", "best rival, µs", "kernel")
    note = "Nothing was measured. "
    if every:
        note = (
            f"{'×'.join(map(str, every[0]['shape']))} {options['dtype']}, by {options['clock']}: min / median / max of "
            f"at least {options['samples']} samples, "
            "each of at least 10 calls and 1 ms (fewer calls where they exceed 20 ms), interleaved with those of a copy and of "
            "all rivals. TB/s counts the bytes that the op has to read and write; computing a scale of the whole tensor is one "
            "read more. Of copy: that rate over the rate of copying the same matrix. "
        )
    clocks = [row["clock_mhz"] for row in every if row["clock_mhz"]]
    if options["state"] == "hot":
        note += "Hot: after 250 ms of matrix products"
        note += f", with the SM clock at {min(clocks)} to {max(clocks)} MHz. " if clocks else ". "
    elif options["state"] == "burst":
        note += "Burst: after 0.35 s of idling before every sample. "
    return Table("casts on the device", headings, tuple(rows), note + rivals_note(result))


def rivals_note(result: Result) -> str:
    """Versions of the rivals, and the reasons why others are absent or failed."""
    parts = [f"Rivals: {', '.join(f'{name} {v}' for name, v in result['rivals'].items()) or 'none'}."]
    if OLD in result["rivals"]:
        parts.append(f"{OLD.replace('-', ' ')}: in a process of its own, before and after; it decodes to FP32.")
        if any(row["times"].get(OLD, {}).get("part", 1) != 1 for row in result["rows"]):
            parts.append("Its casts of mxfp8 and nvfp4 were measured on a slab of rows and multiplied.")
    if result["left"]:
        parts.append(f"{result['left']} rows were left out for lack of time.")
    parts += [f"{name} is absent: {why}." for name, why in result["absent"].items()]
    errors = (
        (name, error, f"{row['op']} under {row['recipe']}")
        for row in result["rows"]
        for name, timed in [(OURS, row), *row["times"].items()]
        for error in (timed.get("error"), timed.get("graph_error"))
        if error
    )
    return " ".join(parts) + failures(errors)


def goals(result: Result) -> Table:
    """Each goal of casts, what was measured, and whether it is met."""
    by = {(row["recipe"], row["op"]): row for row in timed_rows(result) if math.prod(row["shape"]) > SMALL_ELEMENTS}
    rows: list[tuple[str, ...]] = []
    met = 0
    for (recipe, op), least in GOALS.items():
        row = by.get((recipe, op))
        if row is None:
            rows.append((recipe, op, f"{100 * least:.0f} %", ABSENT, "not measured", ABSENT))
            continue
        found = part_of_copy(row)
        met += found >= least
        rival = best_rival(row, "device")
        over = f"{rival[0]} {ratio(rival[1]['median_s'] / row['times'][OURS]['device']['median_s'])}" if rival else ABSENT
        rows.append((recipe, op, f"{100 * least:.0f} %", of_copy(row, "device"), "yes" if found >= least else "**no**", over))
    return Table(
        "goals of casts",
        ("recipe", "op", "goal, of copy", "measured", "met", "times faster than the best rival"),
        tuple(rows),
        f"{met} of {len(GOALS)} goals are met. Medians of the table of a large matrix, which counts bytes: `cast_pair` reads "
        "once and writes both orientations.",
    )


def roofline(result: Result) -> Table:
    """For each kernel, the bytes per number that its ops have to move, and the share of the copy's rate that they reach."""
    found: dict[tuple[str, str], list[Result]] = {}
    for row in timed_rows(result):
        kernels = " + ".join(row.get("functions", ())) or row["kernel"]
        found.setdefault((kernels, row["op"]), []).append(row)

    rows: list[tuple[str, ...]] = []
    for (kernel, op), every in found.items():
        shares = {row["recipe"]: part_of_copy(row) for row in every}
        least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        moved = extent((row["bytes"] / math.prod(row["shape"]) for row in every), lambda n: f"{n:.2f}")
        median = f"{100 * statistics.median(shares.values()):.0f} %"
        rows.append((kernel, op, moved, median, f"{least} {100 * shares[least]:.0f} %", f"{most} {100 * shares[most]:.0f} %"))
    return Table(
        "roofline of casts",
        ("kernel", "op", "bytes for each number", "of copy, median", "least", "most"),
        tuple(rows),
        "The roofline is the rate of the copy, which reads and writes each byte once. Medians are over the recipes of the "
        "table of a large matrix.",
    )


def gpu_casts_small(result: Result) -> Table:
    """Time of calls and in a CUDA graph on the smaller shapes, where launches take longer than the work."""
    shapes = sorted((s for s in result["options"]["shapes"] if math.prod(s) <= SMALL_ELEMENTS), key=math.prod, reverse=True)
    cells: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        if row["shape"] not in shapes or OURS not in row["times"]:
            continue
        line = cells.setdefault((row["recipe"], named(row)), [ABSENT] * (2 * len(shapes)))
        for place, what in enumerate(("device", "graph"), 2 * shapes.index(row["shape"])):
            if what in row["times"][OURS]:
                line[place] = three(1e6 * row["times"][OURS][what]["median_s"])
                if what == "graph" and what in row["times"][COPY]:
                    line[place] += f", {of_copy(row, what)}"
                if best_rival(row, what):
                    line[place] += f"; {versus(row, what)}"
    headings = ("recipe", "op", *(f"{m}×{n}: {what}" for m, n in shapes for what in ("events", "graph")))
    options = result["options"]
    note = (
        f"Median microseconds of a call, {options['dtype']}, {options['state']}, and those of the best rival, with how many "
        f"times faster breccia is. Events: by {options['clock']}, calls launched one after the other. Graph: in a CUDA graph "
        f"of 20 calls, with the share of the copy's rate there. {ABSENT}: not measured. On a GPU inputs rotate, so that they "
        "are not in its cache."
    )
    return Table("small casts on the device", headings, tuple((*key, *found) for key, found in cells.items()), note)


def gpu_host(result: Result) -> Table:
    """Host time of calls, and of the best rival's."""
    options, rivals = result["options"], any(row.get("rivals") for row in result["rows"])

    def against(row: Result) -> str:
        if not row.get("rivals"):
            return ABSENT
        name, theirs = min(row["rivals"].items(), key=lambda item: item[1]["median_s"])
        return f"{name} {three(1e6 * theirs['median_s'])} ({ratio(theirs['median_s'] / row['host']['median_s'])})"

    rows = tuple((row["call"], spread(row["host"], 1e6), *((against(row),) if rivals else ())) for row in result["rows"])
    note = (
        f"Min / median / max of {options['samples']} samples in rotation, each of {options['calls']} calls after a "
        f"synchronization, until they return. BF16, {options['side']}×{options['side']}; layers take one row."
    )
    casts = [row for row in result["rows"] if row["call"].split()[0].startswith(("cast", "dequantize", "requantize", "Amax"))]
    within = sum(1e6 * row["host"]["median_s"] <= HOST_US for row in casts)
    note += f" Within {HOST_US:g} µs: {within} of {len(casts)} calls of casts."
    if versions := ", ".join(f"{name} {version}" for name, version in result.get("rivals", {}).items()):
        note += f" Rivals: {versions}; in brackets how many times faster breccia is."
    # A rival's errors are kept under "call, rival".
    errors = ((*key.partition(", ")[::2], error) for key, error in result.get("errors", {}).items())
    note += failures((rival or OURS, error, call) for call, rival, error in errors)
    return Table("host time of calls", ("call", "host, µs", *(("best rival, µs",) if rivals else ())), rows, note)


def first_calls(result: Result) -> Table:
    """Milliseconds of first calls in fresh processes, with an empty and with a filled cache on disk."""

    def cell(row: Result, what: str) -> str:
        return spread(row[what], 1e3) if what in row else ABSENT

    met = [row for row in result["rows"] if "warm" in row and row["warm"]["median_s"] <= FIRST_CALL_S]
    note = (
        "Milliseconds, min / median / max, each in a process of its own, after the device and the libraries have been "
        "initialized: the first call of a kernel, and the second. Empty: without a cache of compiled kernels, one process. "
        f"Filled: {result['options']['processes']} processes that find what another compiled. Within {1e3 * FIRST_CALL_S:g} ms "
        f"with a filled cache: {len(met)} of {len(result['rows'])}."
    )
    note += "".join(f" {row['call']} raised {row['error']}." for row in result["rows"] if "error" in row)
    what = ("cold", "warm", "again")
    rows = tuple((row["call"], row.get("kernel", ABSENT), *(cell(row, each) for each in what)) for row in result["rows"])
    return Table("first calls", ("call", "kernel", "empty cache, ms", "filled cache, ms", "second call, ms"), rows, note)


def profile(result: Result) -> Table:
    """What Nsight Compute counted for each kernel of a call."""
    rows = tuple(
        (
            row["call"],
            row["kernel"],
            three(1e6 * row["seconds"]),
            f"{row['dram_bytes'] / row['elements']:.2f}",
            *(f"{row[what]:.0f} %" for what in ("dram", "issue", "alu", "warps")),
            f"{row['registers']:.0f}",
        )
        for row in result["rows"]
    )
    headings = ("call", "kernel", "µs", "bytes of DRAM for each number", "DRAM", "issue slots", "integer pipe", "warps")
    clocks = [row["clock"] / 1e6 for row in result["rows"]]
    note = (
        f"{'×'.join(map(str, result['options']['shape']))} BF16, by Nsight Compute, with caches flushed before each kernel and "
        "clocks as they are"
        + (f" ({min(clocks):.0f} to {max(clocks):.0f} MHz)" if clocks else "")
        + ". Percent of the peak, of the time (DRAM) or of active cycles."
    )
    return Table("profile of casts", (*headings, "registers"), rows, note)


def instructions(result: Result) -> Table:
    """Instructions of kernels of casts for each number, in their machine code."""
    rows = tuple(
        (
            row["op"] + ("-axis-2" if row["axis"] == -2 else ""),
            row["recipe"],
            row["kernel"],
            f"{row['issue']:.1f}",
            f"{row['alu']:.1f}",
            str(row["registers"]),
        )
        for row in result["rows"]
    )
    headings = ("op", "recipe", "kernel", "instructions for each number", "slots of the integer pipe", "registers")
    note = (
        f"{'×'.join(map(str, result['options']['shape']))} BF16, compiled for compute capability "
        f"{result['options']['capability'] / 10:.1f}. A multiprocessor issues instructions for 128 threads per clock; an "
        "integer instruction takes two of the 128 slots of its pipe. The larger of the two numbers bounds the rate. Passes for "
        "an amax are left out."
    )
    return Table("instructions of casts", headings, rows, note)
