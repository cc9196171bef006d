"""Results as tables: the same cells on a terminal (rich) and in the documents (draw.py)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import common
import decoder_tables
import fp8_tables
import weight_tables
from cast_tables import first_calls, goals, gpu_casts, gpu_casts_small, gpu_host, instructions, profile, roofline
from cells import ABSENT, Result, Table, bits, percent, ratio, share, spread, three, trio
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rivals import OLD, ON_NUMPY, OURS, WAYS

#: The largest accepted ratio between the medians of breccia's first and last pass. If they differ by more, the machine was
#: disturbed, perhaps for some rivals and not for others, and the result is not published.
DRIFT = 1.15

#: Columns of text where the output is no terminal whose width could be asked.
WIDE = 180

PUBLISHED: dict[str, Any] = json.loads((common.HERE / "published.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------ cast


def timing(result: Result, rival: str, recipe: str, op: str, small: bool = False) -> dict[str, Any] | None:
    """The rival's times over all its passes, how they moved from the first to the last, and what kernel served."""
    shape = result["options"]["small"] if small else [result["options"]["size"]] * 2
    found = [
        row
        for one in result["passes"]
        if one["rival"] == rival
        for row in one["rows"]
        if (row["recipe"], row["op"], row["shape"]) == (recipe, op, shape)
    ]
    if not found:
        return None
    every = [s for row in found for s in row["seconds"]]
    drift = found[-1]["median_s"] / found[0]["median_s"]
    middle = (min(every), statistics.median(every), max(every))
    return {"trio": middle, "factor": found[0]["factor"], "drift": drift, "kernel": found[0]["kernel"]}


def rivals_of(result: Result) -> list[str]:
    """What ran against ours, in its order."""
    return [name for name in dict.fromkeys(one["rival"] for one in result["passes"]) if name != OURS]


def recipes_of(result: Result) -> list[str]:
    return [row["recipe"] for row in result["checks"]]


def speed_up(result: Result, rival: str, recipe: str, op: str) -> float:
    """The rival's least time over ours."""
    ours, theirs = timing(result, OURS, recipe, op), timing(result, rival, recipe, op)
    assert ours and theirs, "every pass measures every recipe"
    return theirs["trio"][0] / ours["trio"][0]


def over(result: Result, rival: str, recipe: str, op: str) -> str:
    """`speed_up`, or the median of pairs where calls were timed by turns, with the quartiles."""
    for pair in result.get("pairs", ()) if rival == ON_NUMPY else ():
        if (pair["recipe"], pair["op"]) == (recipe, op):
            low, middle, high = statistics.quantiles(pair["ratios"], n=4)
            return f"{ratio(middle)} ({low:.2f} to {high:.2f})"
    return ratio(speed_up(result, rival, recipe, op))


def versioned(result: Result, name: str) -> str:
    """`name version`, the version once, and none after a way of ours."""
    version = next(one["version"] for one in result["passes"] if one["rival"] == name)
    return name.replace("-", " ") if name in (OLD, *WAYS) else f"{name.replace('-', ' ')} {version}"


def drifts(result: Result) -> list[float]:
    """The median of breccia's last pass over that of its first, for every call and every way to run it."""
    ours = [OURS, *(name for name in rivals_of(result) if name in WAYS)]
    return [
        timing(result, name, recipe, op)["drift"]
        for name in ours
        for recipe in recipes_of(result)
        for op in ("cast", "dequantize")
    ]


def steady(result: Result) -> bool:
    """Whether breccia's first and last pass agree."""
    found = drifts(result)
    return max(*found, 1 / min(found)) <= result["options"]["drift"]


def drifted(result: Result) -> str:
    """How much breccia's first and last pass differ."""
    found = drifts(result)
    allowed = result["options"]["drift"]
    return (
        f"the last pass of breccia took {min(found):.2f} to {max(found):.2f} of the time of its first, where {1 / allowed:.2f} "
        f"to {allowed:.2f} is allowed"
    )


def times(result: Result, op: str) -> Table:
    """Time at full size, and ours over each rival's."""
    rivals = rivals_of(result)
    rows: list[tuple[str, ...]] = []
    extrapolated = 1.0
    for recipe in recipes_of(result):
        ours = timing(result, OURS, recipe, op)
        cells = [recipe, trio(ours["trio"], 1e3), f"{ours['drift']:.2f}"]
        for name in rivals:
            theirs = timing(result, name, recipe, op)
            if theirs is None:
                cells.append(ABSENT)
                continue
            extrapolated = max(extrapolated, theirs["factor"])
            slab = f" (×{theirs['factor']:g})" if theirs["factor"] != 1 else ""
            cells.append(f"{over(result, name, recipe, op)}; {trio(theirs['trio'], 1e3)}{slab}")
        rows.append((*cells, ours["kernel"]))
    size, slab = result["options"]["size"], result["options"]["slab_rows"]
    note = (
        f"Milliseconds for {size}×{size} FP32: min / median / max of at least {result['options']['runs']} runs (ours: of two "
        "passes), and before them how many times faster breccia is."
    )
    if extrapolated != 1:
        note += f" (×{extrapolated:g}): measured on a slab of {slab}×{size} and multiplied."
    if result.get("pairs"):
        note += (
            f" Over {ON_NUMPY.replace('-', ' ')}: median and quartiles of {len(result['pairs'][0]['ratios'])} "
            "interleaved calls."
        )
    note += absent_note(rows)
    if not steady(result):
        note += f" The machine was not steady: {drifted(result)}."
    headings = ("recipe", versioned(result, OURS), "last / first", *(versioned(result, n) for n in rivals), "our kernel")
    return Table(op, headings, tuple(rows), note)


def absent_note(rows: Iterable[tuple[str, ...]]) -> str:
    return f" {ABSENT}: that rival does not have it." if any(ABSENT in row for row in rows) else ""


def calls(result: Result) -> Table:
    """Time of one small call."""
    names = [OURS, *rivals_of(result)]
    rows: list[tuple[str, ...]] = []
    for recipe in recipes_of(result):
        cells = [recipe]
        for op in ("cast", "dequantize"):
            found = [timing(result, name, recipe, op, small=True) for name in names]
            cells += [trio(one["trio"], 1e6) if one else ABSENT for one in found]
        rows.append(tuple(cells))
    shape = "×".join(map(str, result["options"]["small"]))
    headings = ("recipe", *(f"{op}, {versioned(result, n)}" for op in ("cast", "dequantize") for n in names))
    note = f"Microseconds per call at {shape}, call to result: min / median / max of loops of many calls."
    return Table(f"one {shape} call", headings, tuple(rows), note + absent_note(rows))


def agreement(result: Result) -> Table:
    """What the rivals of the run wrote, next to ours. The ways of ours agree, or there would be no result."""
    rivals = [name for name in rivals_of(result) if name not in WAYS]
    rows: list[tuple[str, ...]] = []
    for row in result["checks"]:
        cells = [row["recipe"]]
        cells += [f"{row['sqnr_db'][name]:.2f}" if name in row["sqnr_db"] else ABSENT for name in (OURS, *rivals)]
        for part in ("same_scales", "same_values"):
            other = ("other rule" if name in row["sqnr_db"] else ABSENT for name in rivals)
            cells += [share(row[part][n]) if n in row[part] else none for n, none in zip(rivals, other, strict=True)]
        rows.append(tuple(cells))
    headings = ("recipe", *(f"SQNR dB, {n.replace('-', ' ')}" for n in (OURS, *rivals)))
    headings += tuple(f"{part} as {n.replace('-', ' ')}" for part in ("same scales", "same values") for n in rivals)
    note = (
        "On standard normal data of the same run. Scales are compared bit for bit, values to two FP32 roundings. `other rule`: "
        "that rival defines the stored scale differently."
    )
    if len(rivals) < len(rivals_of(result)):
        note += " What breccia wrote in its several ways is the same, bit for bit."
    return Table("what was written", headings, tuple(rows), note + absent_note(rows))


# ------------------------------------------------------------------------------------------------ small calls


def overhead(result: Result) -> Table:
    """Microseconds of small calls, and of an earlier version in the same run."""
    before = result["options"]["before"]
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        versions = ("before", "now") if before else ("now",)
        cells = [f"{1e6 * row[v]['min_s']:.1f}" if v in row else "" for v in versions]
        cells += [f"{row[v]['steps']:.0f}" if v in row else "" for v in versions]
        if before:
            cells.append(f"{row['now']['steps'] / row['before']['steps']:.2f}" if "before" in row else "")
        rows.append((row["call"], *cells))
    columns = ("before, µs", "now, µs", "steps before", "steps now", "now / before, in steps") if before else ("µs", "steps")
    headings = ("call", *columns)
    note = (
        "Microseconds: the least of the runs. Steps: the median of loops of calls, each beside a loop of steps; a step builds "
        "a key of four items and looks it up in a dictionary. One thread."
    )
    if before:
        note += f" Before: commit {before[:10]}, in processes interleaved with those of now."
    return Table("small calls", headings, tuple(rows), note)


def handovers(result: Result) -> Table:
    """Microseconds of hand-overs by DLPack: of a tensor, of a bundle, and of the bare calls of both libraries."""
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        cells = (row["recipe"], row["from"], row["to"] or "a bundle")
        rows.append((*cells, *(f"{1e6 * row[key]:.1f}" if key in row else "" for key in ("tensor_s", "bundle_s", "bare_s"))))
    options = result["options"]
    height, width = options["shape"]
    note = (
        f"{height}×{width}; mxfp8 has two components, nvfp4 three. The least of {options['samples']} interleaved samples. "
        "Bare: one export and one import of each component by the fastest functions of the two libraries, without dtypes and "
        "checks. One thread."
    )
    return Table("hand-overs by DLPack", ("recipe", "from", "to", "tensor, µs", "bundle, µs", "bare, µs"), tuple(rows), note)


# ------------------------------------------------------------------------------------------------ memory


def sizes(result: Result) -> Table:
    """Bytes per parameter against FP32, BF16 and the older package's published table."""
    table_size, size = result["options"]["table_size"], result["options"]["size"]
    published = PUBLISHED["memory"]["rows"]
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        small, large = (row["bytes"][str(n)] for n in (table_size, size))
        of_fp32 = small / (4 * table_size**2)
        old = published.get(row["recipe"])
        cells = (row["recipe"], bits(8 * small / table_size**2), bits(8 * large / size**2), f"{small / 1e6:.3f} MB")
        cells += (f"{of_fp32:.4f}×", f"{2 * of_fp32:.4f}×", f"{old['of_fp32']:.2f}× ({old['megabytes']:.2f} MB)" if old else "")
        rows.append(cells)
    headings = ("recipe", f"bits/param at {table_size}²", f"at {size}²", f"bytes at {table_size}²", "of FP32", "of BF16")
    note = f"Codes and scales, all of them. breccia {PUBLISHED['version']}: of FP32 at {table_size}², as its page publishes it."
    return Table("memory", (*headings, f"breccia {PUBLISHED['version']}"), tuple(rows), note)


def peaks(result: Result) -> Table:
    """Memory beyond input and output."""
    size = result["options"]["size"]
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        cells = [row["recipe"]]
        for op in ("cast", "dequantize"):
            peak = row["peak"][op]
            cells += [f"{peak[measure] / 2**20:.1f}" for measure in ("resident", "allocated")]
        rows.append(tuple(cells))
    headings = ("recipe", "cast, resident", "cast, allocated", "dequantize, resident", "dequantize, allocated")
    note = (
        f"MiB beyond input and output at {size}×{size}, of which the FP32 side is {4 * size * size / 2**20:g} MiB. Resident: "
        "growth of the process over its first call of that size. Allocated: the peak of what Python and NumPy asked for in a "
        "second call."
    )
    return Table("peak memory", headings, tuple(rows), note)


# ------------------------------------------------------------------------------------------------ accuracy

#: Names of data sets: what tables and plots single out.
GAUSSIAN = "normal x 1"
TRAINED = "all-MiniLM-L6-v2"


def quality(result: Result, defaults: bool) -> Table:
    """SQNR on every data set, for recipes as they are by default, or for their variants."""
    sources = list(result["rows"][0]["data"])
    trained = [source for source in sources if source == TRAINED]
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        if row["default"] != defaults:
            continue
        data = row["data"]
        cells = [row["recipe"], bits(data[GAUSSIAN]["bits_per_parameter"]), f"{data[GAUSSIAN]['cosine']:.5f}"]
        cells += [f"{data[source]['sqnr_db']:.2f}" for source in sources]
        cells += [f"{data[source]['worst_sqnr_db']:.2f}" for source in trained]
        cells.append(f"{100 * data[GAUSSIAN]['max_error']:.3g} %")
        rows.append(tuple(cells))
    headings = ("recipe", "bits/param", "cosine", *(f"dB, {s}" for s in sources))
    headings += (*(f"worst matrix of {s}" for s in trained), "largest error")
    size, seeds = result["options"]["size"], result["options"]["seeds"]
    note = (
        f"SQNR in dB over all matrices of a data set: drawn {size}×{size}, seeds 0 to {seeds - 1}; cosine (mean of the "
        "matrices), bits and largest error (as a part of the largest element) on standard normal data."
    )
    return Table("accuracy" if defaults else "variants", headings, tuple(rows), note)


def published(result: Result) -> Table:
    """The older package's published cosines beside ours."""
    old = PUBLISHED["cosine"]["rows"]
    ours = {row["recipe"]: row["data"][GAUSSIAN]["cosine"] for row in result["rows"] if row["default"]}
    rows = tuple((name, f"{old[name]:.4f}", f"{ours[name]:.4f}") for name in old if name in ours)
    headings = ("recipe", f"breccia {PUBLISHED['version']}, published", "breccia, measured")
    seeds = result["options"]["seeds"]
    note = f"Cosine with FP32 on normal data, mean of {seeds} seeds (published: {PUBLISHED['cosine']['seeds']})."
    return Table("cosine", headings, rows, note)


# ------------------------------------------------------------------------------------------------ models

#: What trained and quantized models are held against; it stands in the place of a recipe.
FP32 = "FP32"


def embeddings(result: Result) -> Table:
    """Cosines of an encoder's embeddings with FP32's, and what its weights take."""
    rows: list[tuple[str, ...]] = []
    exact: Result = {"recipe": FP32, **result["fp32"], "cosine": {}}
    for row in [exact, *result["rows"]]:
        cells = [row["recipe"], f"{row['linear_bytes'] / 1e6:.2f}", f"{row['model_bytes'] / 1e6:.2f}"]
        for part in ("weights", "plain", "activations"):
            found = row["cosine"].get(part)
            cells += [f"{statistics.mean(found):.4f}", f"{min(found):.4f}"] if found else ["", ""]
        rows.append(tuple(cells))
    headings = ("recipe", "linear weights, MB", "model, MB")
    parts = ("weights", "plain rounding", "weights and inputs")
    headings += tuple(f"{part}, {which}" for part in parts for which in ("mean", "worst"))
    sentences, bound = result["options"]["sentences"], result["options"]["bound"]
    error = max(statistics.stdev(row["cosine"]["weights"]) for row in result["rows"]) / sentences**0.5
    note = (
        f"Cosine with FP32's embedding, mean and worst of {sentences} sentences. Other sentences give other means: standard "
        f"errors reach {error:.4f}. Plain rounding: the same weights, rounded by a few lines of FP64 that share no code with "
        f"breccia; the benchmark fails where a mean lies more than {bound:g} below its mean. MB: 10⁶ bytes, scales included."
    )
    return Table("embeddings", headings, tuple(rows), note)


def training(result: Result) -> Table:
    """Accuracy after training, and its paired difference from FP32's."""
    exact = {row["framework"]: row["accuracy"] for row in result["rows"] if row["recipe"] == FP32}
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        found = row["accuracy"]
        cells = [
            row["recipe"],
            row["framework"],
            str(len(found)),
            *(percent(value) for value in (statistics.mean(found), min(found), max(found))),
        ]
        if row["recipe"] == FP32:
            rows.append((*cells, "", "", ""))
            continue
        apart = [a - b for a, b in zip(found, exact[row["framework"]], strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        cells.append(f"{100 * statistics.mean(apart):+.2f} ± {100 * error:.2f}")
        cells.append(f"{100 * min(apart):+.2f} to {100 * max(apart):+.2f}")
        rows.append((*cells, f"within {100 * result['options']['bound']:g}" if row["held"] else ""))
    headings = ("recipe", "framework", "seeds", "accuracy, mean", "least", "most")
    headings += ("minus FP32, mean", "least to most", "held to")
    options = result["options"]
    note = (
        f"{options['classes']} classes in {options['width']} dimensions, {options['steps']} steps of {options['batch']} "
        f"samples. Percent of {options['test']:,} others, over seeds from 0 on. Differences are in "
        "percentage points, between runs of the same seed; ± one standard error of their mean. The benchmark fails where the "
        "mean of a recipe that is held to a bound is further from FP32's. The Bayes-optimal classifier scores "
        f"{percent(statistics.mean(result['best']))} %."
    )
    return Table("training", headings, tuple(rows), note)


# ------------------------------------------------------------------------------------------------ parity


def parity(result: Result) -> Table:
    """Values and bytes compared with NumPy's, and bytes that differ, by recipe and way of running."""
    options = result["options"]
    ways, framework = options["modes"], options.get("framework", "torch")
    by_name: dict[str, list[Result]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], []).append(row)
    flushing = any(row["modes"][way].get("flushed") for row in result["rows"] for way in ways)

    def cells(rows: list[Result], way: str) -> list[str]:
        found = [row["modes"][way] for row in rows]
        sums = [sum(one[what] for one in found) for what in ("values", "bytes", "differing")]
        if flushing:
            sums.append(sum(sum(one["flushed"].values()) for one in found))
        return [f"{n:,}" for n in sums]

    every = [*by_name.items(), ("all", result["rows"])]
    rows = [(name, str(len(found)), *(cell for way in ways for cell in cells(found, way))) for name, found in every]
    for row in result["beyond"]:
        counts = [f"{row[what]:,}" for what in ("values", "bytes", "differing")]
        rows.append((row["what"], "1", *(cell for way in ways for cell in (counts if way == "eager" else [""] * 3))))
    said = ("values", "bytes", "differing bytes", *(["flushed"] if flushing else []))
    headings = ("recipe", "with variants", *(f"{way}: {what}" for way in ways for what in said))
    least = min(row["modes"][way]["values"] for row in result["rows"] for way in ways)
    note = (
        f"{framework} on {result['provenance'].get('device', 'the CPU')} against NumPy: all parts, and what they decode to in "
        f"FP32, BF16 and FP16. At least {least:,} values of each recipe and variant in each way."
    )
    if options.get("grid"):
        note += (
            " Of each, FP32, BF16 and FP16 numbers along both axes; `cast_pair`, `cast_ste` and `requantize` of an eighth of "
            "them, whose bytes are counted too."
        )
    if left := result.get("left"):
        note += f" {left} settings were left out: the time was up."
    if flushing:
        note += (
            " Flushed: decoded numbers, of FP32 and BF16, whose exact value lies below 2⁻¹²⁶, and that are zeros of its sign. "
            "They are counted here, and not among the differing bytes."
        )
    return Table("parity" if framework == "torch" else f"parity, {framework}", headings, tuple(rows), note)


# ------------------------------------------------------------------------------------------------ CUDA devices


def gpu_quantize(result: Result) -> Table:
    """Seconds and memory of `quantize_`."""
    rows: list[tuple[str, ...]] = []
    for row in result["rows"]:
        peaks = [ABSENT if n is None else f"{n / 2**20:.1f}" for n in (row["cold_peak_bytes"], row["peak_bytes"])]
        before, after = (f"{row[key] / 2**20:,.1f}" for key in ("bytes_before", "bytes_after"))
        rows.append((row["recipe"], three(row["cold_s"]), spread(row["warm"], 1), *peaks, before, after))
    headings = ("recipe", "cold, s", "warm, s", "cold peak, MiB", "warm peak, MiB", "model before, MiB", "after, MiB")
    note = (
        f"The linear layers of a decoder of {result['rows'][0]['bytes_before'] / 2e6:,.1f} million parameters, BF16. Cold: the "
        f"first model of that recipe in the process, with no compiled kernel on disk; the first row includes imports. Warm: "
        f"min / median / max of {result['options']['runs']} further models. Peak: memory beyond the model's own "
        f"({ABSENT}: not known on a CPU)."
    )
    return Table("quantize_", headings, tuple(rows), note)


# ------------------------------------------------------------------------------------------------ products on the CPU


def matmul_cpu(result: Result) -> Table:
    """Microseconds of products and how many times faster they are than FP32 `F.linear`, by rows of activations."""
    options = result["options"]
    first, second = ({(row["rows"], row["arm"]): row for row in one} for one in result["runs"])
    rows, arms = dict.fromkeys(m for m, _ in first), dict.fromkeys(arm for _, arm in first)

    def faster(by: dict[tuple[int, str], Any], m: int, arm: str) -> float:
        return by[m, options["base"]]["median_s"] / by[m, arm]["median_s"]

    def cell(m: int, arm: str) -> str:
        if (m, arm) not in first or (m, arm) not in second:
            return ABSENT
        every = first[m, arm]["seconds"] + second[m, arm]["seconds"]
        both = sorted((faster(first, m, arm), faster(second, m, arm)))
        spread = f"{three(both[0])} to {ratio(both[1])}" if both[1] > DRIFT * both[0] else ratio(math.sqrt(both[0] * both[1]))
        return f"{trio((min(every), statistics.median(every)), 1e6)}; {spread}"

    read = min(one[key]["min_s"] for one in (first, second) for key in one if key[1] == "read")
    moved = [
        f"{arm} at M = {m}"
        for m, arm in first
        if (m, arm) in second and _disagrees(faster(first, m, arm), faster(second, m, arm))
    ]
    agree = (
        "Both passes agree"
        if not moved
        else f"**The passes disagree** in {len(moved)} of {len(first)} ratios, shown as a range"
    )
    absent = "".join(f" {name} did not run: {why}." for name, why in options["left_out"].items())
    rates = [
        2 * m * options["size"] ** 2 / row["min_s"]
        for one in (first, second)
        for (m, arm), row in one.items()
        if arm == "multiply-adds"
    ]
    limit = f" multiply-adds: those of the product, in registers, at best {max(rates) / 1e9:.0f} GFLOP/s." if rates else ""
    return Table(
        "matmul on the CPU",
        ("arm", *(f"M = {m}" for m in rows)),
        tuple((arm, *(cell(m, arm) for m in rows)) for arm in arms),
        f"Microseconds of activations (M, {options['size']}) by weights of {options['size']} × {options['size']}: min / "
        f"median; the ratio of {options['base']}'s median to it. {options['threads']} thread(s), arms interleaved in two "
        f"passes. {agree} (15 %).{absent} read: "
        f"{options['read_bytes'] >> 20} MiB, at best {options['read_bytes'] / read / 1e9:.0f} GB/s.{limit}",
    )


def jax_cpu(result: Result) -> Table:
    """Milliseconds of casts, products, layers and slices in JAX, and how many times faster than plain JAX they are."""
    by = {(row["what"], row["case"], row["arm"]): row for row in result["rows"]}
    titles = {"cast": "cast, {}", "product": "{}", "layer": "{}", "new shape": "eager, a new shape: {}", "slice": "{}"}

    def shown(what: str, case: str) -> tuple[str, ...]:
        found = [by.get((what, case, arm)) for arm in ("breccia", "generic", "plain")]
        unit = 1e6 if what == "slice" else 1e3
        cells = ["" if row is None else trio((row["min_s"], row["median_s"]), unit) for row in found]
        times = [by[what, case, arm]["min_s"] for arm in ("plain", "breccia") if (what, case, arm) in by]
        return titles[what].format(case), *cells, ratio(times[0] / times[1]) if len(times) == 2 else ""

    return Table(
        "JAX on the CPU",
        ("call", "breccia", "generic algorithm", "plain JAX", "plain JAX / breccia"),
        tuple(shown(*key) for key in dict.fromkeys(key[:2] for key in by)),
        "Milliseconds (microseconds for st[0:4]), min / median; ratios of the minima. "
        f"Matrices of {result['options']['size']} × {result['options']['size']}, compiled calls, "
        f"jax {result['options']['jax']}, arms interleaved. Plain products and layers have an FP32 weight in the same order; "
        "the generic algorithm's layers multiply decoded values. Calls of new shapes, with at least 64 rows under mxfp8, are "
        "eager; plain JAX is compiled.",
    )


def forms(result: Result) -> Table:
    """Milliseconds of each form of a cast, as a multiple of the recipe's plain form, of a copy, and of a write."""
    options = result["options"]
    rows = [row for row in result["rows"] if row["op"] not in ("copy", "write")]

    def times(row: Result, what: str) -> str:
        return f"{row[what]:.2f}" if what in row else ""

    return Table(
        "forms of casts on the CPU",
        ("recipe", "op", "form", "ms", "of plain", "of plain, CPU time", "of copy", "of write"),
        tuple(
            (
                row["recipe"],
                row["op"],
                row["form"],
                three(row["min_s"] * 1e3),
                *(times(row, what) for what in ("over_plain", "cpu_over_plain", "over_copy", "over_write")),
            )
            for row in rows
        ),
        f"A matrix of {options['size']} × {options['size']} in {options['framework']}, {options['threads']} thread(s), minima. "
        "plain: the default, of FP32 and along the last axis. copy: of the FP32 matrix. write: of the result's size. "
        f"The slowest copy took {options['copy_spread']:.2f} times the median one.",
    )


def native_parity(result: Result) -> Table:
    """Values and bytes compared with the generic algorithm's, and bytes that differ, by op and instruction set."""
    kinds = dict.fromkeys((row["op"], row["instructions"]) for row in result["rows"])

    def sums(op: str, name: str) -> tuple[str, ...]:
        rows = [row for row in result["rows"] if (row["op"], row["instructions"]) == (op, name)]
        return tuple(f"{sum(row[what] for row in rows):,}" for what in ("values", "bytes", "differing"))

    recipes = dict.fromkeys(row["recipe"] for row in result["rows"])
    return Table(
        "compiled kernels against the generic algorithm",
        ("op", "instruction set", "values", "bytes", "differing bytes"),
        tuple((*kind, *sums(*kind)) for kind in kinds),
        f"{len(recipes)} recipes with every form and option in turn, at least {result['options']['values']:,} values of each.",
    )


def mlx(result: Result, ops: str, arms: Sequence[str], what: str) -> Table:
    """Milliseconds on MLX's arrays beside MLX's own, by op and recipe; the ratios are of MLX's medians to breccia's."""
    by = {(row["op"], row["recipe"], row["arm"]): row for row in result["rows"] if row["op"].startswith(ops)}
    keys = dict.fromkeys((op, recipe) for op, recipe, _ in by)
    arms = [arm for arm in arms if any(arm == measured for *_, measured in by)]
    several = len({op for op, _ in keys}) > 1

    def cell(op: str, recipe: str, arm: str) -> str:
        found = by.get((op, recipe, arm))
        return "" if found is None else trio((found["min_s"], found["median_s"]), 1e3)

    def row(op: str, recipe: str) -> tuple[str, ...]:
        median = {arm: by[op, recipe, arm]["median_s"] for arm in arms if (op, recipe, arm) in by}
        named = (recipe, op.partition(", ")[2]) if several else (recipe,)
        eager = ratio(median["MLX"] / median["breccia"])
        graph = ratio(median.get("MLX compiled", median["MLX"]) / median["compiled"]) if "compiled" in median else ""
        held = (ratio(median["MLX captured"] / median["captured"]),) if "captured" in arms else ()
        return *named, *(cell(op, recipe, arm) for arm in arms), result["options"]["rivals"][recipe], eager, graph, *held

    return Table(
        f"MLX: {what}",
        (
            *("recipe", *(("rows",) if several else ()), *(_MLX_ARMS.get(arm, arm) for arm in arms)),
            *("MLX's mode", "ratio", "ratio, compiled", *(("ratio, captured",) if "captured" in arms else ())),
        ),
        tuple(row(*key) for key in keys),
        f"Milliseconds, min / median, arms interleaved, MLX {result['options']['mlx']} on the CPU. ratio: MLX's median to "
        "breccia's, and to that of breccia in mx.compile.",
    )


#: Headings of arms. Captured weights are constants of the compiled function.
_MLX_ARMS = {
    "generic": "generic algorithm",
    "compiled": "breccia in mx.compile",
    "generic compiled": "generic algorithm in mx.compile",
    "MLX compiled": "MLX in mx.compile",
    "captured": "breccia, captured",
    "MLX captured": "MLX, captured",
}
_MLX_CASTS = ("breccia", "compiled", "MLX", "generic", "generic compiled")


def _disagrees(one: float, other: float) -> bool:
    return max(one, other) > DRIFT * min(one, other)


# ------------------------------------------------------------------------------------------------ all of them

#: What each benchmark has to show, by the name that documents call it by.
TABLES: dict[str, dict[str, Callable[[Result], Table]]] = {
    **decoder_tables.TABLES,
    "cast": {
        "cast": lambda result: times(result, "cast"),
        "dequantize": lambda result: times(result, "dequantize"),
        "calls": calls,
        "agreement": agreement,
    },
    "cast-torch": {
        "cast-torch": lambda result: times(result, "cast"),
        "dequantize-torch": lambda result: times(result, "dequantize"),
        "calls-torch": calls,
        "agreement-torch": agreement,
    },
    "cast-jax": {
        "cast-jax": lambda result: times(result, "cast"),
        "dequantize-jax": lambda result: times(result, "dequantize"),
        "calls-jax": calls,
    },
    "overhead": {"overhead": overhead},
    "dlpack": {"dlpack": handovers},
    "memory": {"memory": sizes, "peaks": peaks},
    "accuracy": {
        "accuracy": lambda result: quality(result, True),
        "variants": lambda result: quality(result, False),
        "published": published,
    },
    "encoder": {"embeddings": embeddings},
    "parity": {"parity": parity},
    "parity-jax": {"parity-jax": parity},
    "parity-mlx": {"parity-mlx": parity},
    "training": {"training": training},
    "matmul-cpu": {"matmul-cpu": matmul_cpu},
    "jax-cpu": {"jax-cpu": jax_cpu},
    "mlx": {
        "mlx-cast": lambda result: mlx(result, "cast", _MLX_CASTS, "casts"),
        "mlx-dequantize": lambda result: mlx(result, "dequantize", _MLX_CASTS, "dequantize"),
        "mlx-layer": lambda result: mlx(
            result,
            "layer",
            ("breccia", "MLX", "generic", "compiled", "MLX compiled", "captured", "MLX captured"),
            "linear layers",
        ),
    },
    "matmul-gpu": fp8_tables.TABLES,
    "gpu-weight-only": weight_tables.TABLES,
    "weight-only-sass": {"weight-only-sass": weight_tables.instructions},
    "gpu-weight-only-groups": {"gpu-weight-only-groups": weight_tables.times},
    "forms": {"forms": forms},
    "native-parity": {"native-parity": native_parity},
    "gpu-casts": {
        "gpu-casts": gpu_casts,
        "gpu-casts-goals": goals,
        "gpu-casts-roofline": roofline,
        "gpu-casts-small": gpu_casts_small,
    },
    "gpu-casts-profile": {"gpu-casts-profile": profile},
    "gpu-casts-sass": {"gpu-casts-sass": instructions},
    "gpu-first-call": {"gpu-first-call": first_calls},
    "gpu-quantize": {"gpu-quantize": gpu_quantize},
    "gpu-host": {"gpu-host": gpu_host},
}


def machines(result: Result) -> list[str]:
    """Where and when, in a line for every run."""
    return [machine(run) for run in result.get("joined", [result["provenance"]])]


def machine(p: dict[str, Any]) -> str:
    """Where and when, in one line. p: the provenance of a run."""
    versions = ", ".join(f"{name.replace('-core', '')} {v}" for name, v in p["versions"].items() if v)
    commit = f"commit {p['commit'][:10]}{' with changes' if p['modified'] else ''}" if p["commit"] else "no commit known"
    steering = "".join(f", {k}={v}" for k, v in p["environment"].items())
    if "torch_threads" in p:
        versions += f" on {p['torch_threads']} thread(s)"
    machine = f"{p['device'] + '; ' if 'device' in p else ''}{p['cpu']}, {p['cores']} core(s), load {p['load_1m']}, {p['os']}"
    return f"{machine}, Python {p['python']}, {versions}, {commit}, {p['date_utc']} UTC{steering}: `{p['command']}`"


def tell(result: Result, out: Path | None, as_json: bool, state: str = "") -> None:
    """Print the result, as tables or JSON, and write it where asked. state: distinguishes files of one machine."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE)
        console.print(*machines(result), sep="\n", markup=False, highlight=False, soft_wrap=True)
        for made in TABLES[result["benchmark"]].values():
            table = made(result)
            drawn = RichTable(*table.headings, title=table.title, caption=escape(table.note), title_justify="left")
            drawn.caption_justify = "left"
            for row in table.rows:
                drawn.add_row(*row)
            console.print(drawn)
    if out is not None:
        path = save(result, out, state)
        if not as_json:
            Console().print(f"written: {path}", soft_wrap=True, markup=False)


def save(result: Result, out: Path, state: str = "") -> Path:
    """Write a result, and return its file, named after the device or the machine, and the state."""
    tag = common.device_tag(result["provenance"].get("device", "")) or common.machine_tag()
    return common.save(result, out, f"{tag}-{state}" if state else tag)
