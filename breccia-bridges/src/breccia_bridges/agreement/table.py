"""Who writes the same bytes: the neighbours of this package and ours, on the same inputs, as a result and a page.

`python -m breccia_bridges.agreement docs` measures what is installed and writes `agreement.json`, and from it `agreement.md`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from breccia import CorruptFileError, ScalingRecipe, cast, dequantize
from breccia.backend import CODECS, E2M1, E2M3, E3M2, E4M3, E5M2, INT4, INT8, NUMPY, Codec, PowerOfTwo

from . import Neighbour, Quantizer, Written, neighbours, packed

RESULT, PAGE = "agreement.json", "agreement.md"
#: Of the result file; a change that `page` cannot read raises it.
SCHEMA = 1
#: What bytes are compared on, and its rows and columns (of the boundaries there are 128 rows).
MATRICES = ("normal", "rows", "boundaries")
SHAPE = (512, 1024)
PARTS = ("scale", "data", "decoded")
NONE = "—"

# ------------------------------------------------------------------------------------------------ inputs


def matrices(shape: tuple[int, int] = SHAPE) -> dict[str, np.ndarray]:
    """What bytes are compared on, FP32, by name. The shape is in multiples of 128."""
    drawn = np.random.default_rng(20)
    normal = drawn.standard_normal(shape, np.float32)
    powers = np.exp2(drawn.uniform(-9, 9, (shape[0], 1))).astype(np.float32)
    rows = drawn.standard_normal(shape, np.float32) * powers
    return dict(zip(MATRICES, (normal, rows, boundaries(shape[1])), strict=True))


def boundaries(columns: int) -> np.ndarray:
    """128 rows at the edges of decisions, times powers of two; scales in FP16 do not overflow.

    Midpoints between codes, and in each block of 16 a largest magnitude that fills a format, or the FP32 number next to it.
    """
    drawn = np.random.default_rng(21)
    full = ((E2M1, 6), (E2M3, 7.5), (E3M2, 28), (E4M3, 448), (E5M2, 57344), (INT4, 7), (INT8, 127), (INT8, 127.5))
    rows: list[np.ndarray] = []
    for codec, largest in full:
        values = sorted({abs(v) for code in range(1 << codec.bits) if math.isfinite(v := codec.value(code))})
        middles = np.array([m for a, b in pairwise(values) if (m := (a + b) / 2) <= largest], np.float32)
        end = np.array(largest, np.float32)
        ends = np.stack([np.nextafter(end, np.float32(0)), end, np.nextafter(end, np.float32(np.inf))])
        top = min(7, 18 - math.frexp(largest)[1])
        for power in range(top - 15, top + 1):
            row = drawn.choice(middles, columns) * drawn.choice(np.array([-1, 1], np.float32), columns)
            row[::16] = drawn.choice(ends, columns // 16)
            rows.append(row * np.float32(2.0**power))
    return np.stack(rows)


# ------------------------------------------------------------------------------------------------ measuring


def ours(x: np.ndarray, what: ScalingRecipe | Codec) -> Written:
    """What breccia makes of `x` under a recipe, or by a codec alone."""
    if isinstance(what, Codec):
        with NUMPY.errstate():
            codes = what.encode(NUMPY, x)
            return Written(packed(codes, what), what.decode(NUMPY, codes))
    st = cast(x, what)
    parts = {
        name: None if (part := getattr(st, name)) is None else np.asarray(part)
        for name in ("scale", "global_scale", "zero_point")
    }
    return Written(np.asarray(st.data), np.asarray(dequantize(st)), **parts)


def fitting(what: ScalingRecipe | Codec, x: np.ndarray) -> np.ndarray:
    """`x` as the codec can hold it: magnitudes, where it has no sign."""
    return np.abs(x) if isinstance(what, PowerOfTwo) else x


def attempt(write: Callable[[np.ndarray], Written], x: np.ndarray) -> Written | str:
    """What was written, or how it failed."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return write(x)
    except Exception as e:
        return f"raises {type(e).__name__}"


def _bits(a: np.ndarray) -> np.ndarray:
    """Stored numbers as their bit patterns; NaN of FP32 as one pattern."""
    patterns = np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")
    return np.where(np.isnan(a), np.uint32(0x7FC00000), patterns) if a.dtype == np.float32 else patterns


def _stored(written: Written) -> dict[str, list[np.ndarray]]:
    beside = (written.scale, written.global_scale, written.zero_point)
    return {
        "scale": [_bits(a) for a in beside if a is not None],
        "data": [written.data.view(np.uint8)],
        "decoded": [_bits(written.decoded)],
    }


def shares(theirs: Written, mine: Written) -> dict[str, tuple[int, int]]:
    """By part: (how many are equal, of how many). Tensor scales and offsets count as scales, where both store them."""
    both = [name for name in ("scale", "global_scale", "zero_point") if getattr(theirs, name) is not None]
    mine = dataclasses.replace(mine, **{name: None for name in ("scale", "global_scale", "zero_point") if name not in both})
    found: dict[str, tuple[int, int]] = {}
    for part, there in _stored(theirs).items():
        here = _stored(mine)[part]
        if [a.shape for a in there] != [a.shape for a in here] or [a.dtype for a in there] != [a.dtype for a in here]:
            said = [[(a.shape, a.dtype.name) for a in arrays] for arrays in (there, here)]
            raise ValueError(f"{part}: the adapter gives {said[0]}, and we store {said[1]}; it must re-label theirs into ours.")
        if there:
            found[part] = (sum(int((a == b).sum()) for a, b in zip(there, here, strict=True)), sum(a.size for a in there))
    return found


def sqnr_db(x: np.ndarray, y: np.ndarray) -> float:
    """Signal to quantization noise, in FP64, to four places."""
    a, b = x.astype(np.float64), y.astype(np.float64)
    return round(float(10 * np.log10((a * a).sum() / ((a - b) ** 2).sum())), 4)


def compared(quantizer: Quantizer, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """One row: shares and SQNR beside each setting of ours, and what becomes of faults. A failure of theirs is its `error`.

    SQNR is that of the first matrix. Shares are counts, (equal, all), by matrix and part.
    """
    matrices = quantizer.recorded() if quantizer.recorded else inputs
    beside: dict[str, dict[str, Any]] = {
        name: {"writes": label(o.writes), "cause": o.cause, "shares": {}} for name, o in quantizer.settings.items()
    }
    row: dict[str, Any] = {"name": quantizer.name, "error": None, "recorded": quantizer.recorded is not None, **beside}
    for name, given in matrices.items():
        x = fitting(quantizer.default.writes, given)
        theirs = attempt(quantizer.write, x)
        if isinstance(theirs, str):
            return {**row, "error": f"{theirs} on {name}"}
        first = "sqnr_db" not in row
        if first:
            row["sqnr_db"] = sqnr_db(x, theirs.decoded)
        for setting, o in quantizer.settings.items():
            mine = ours(x, o.writes)
            beside[setting]["shares"][name] = shares(theirs, mine)
            if first:
                beside[setting]["sqnr_db"] = sqnr_db(x, mine.decoded)
    return row if quantizer.recorded else {**row, "edges": edges(quantizer)}


# ------------------------------------------------------------------------------------------------ edges

#: Edges, in the order of the table.
EDGES = ("zero block", "zero tensor", "NaN", "Inf", "subnormal", "ragged")
#: Where the one bad number is.
_BAD = (0, 3)
_WHOLE = (128, 256)


def faulty(edge: str, corner: tuple[slice, slice]) -> np.ndarray:
    """A matrix of normal numbers with one fault: in the corner, whose elements share a scale, or throughout."""
    x = np.random.default_rng(22).standard_normal(_WHOLE, np.float32)
    match edge:
        case "zero block":
            x[corner] = 0
        case "zero tensor":
            x[:] = 0
        case "subnormal":
            x[corner] *= np.float32(2.0**-130)
        case "ragged":
            x = np.ascontiguousarray(x[:100, :250])
        case _:
            x[_BAD] = np.float32(edge.lower())
    return x


def edges(quantizer: Quantizer) -> dict[str, list[str]]:
    """By edge, in a word or two: what becomes of it there, and under our closest setting."""
    what = list(quantizer.settings.values())[-1].writes
    m, k = (1, 16) if isinstance(what, Codec) else what.format.scale.block
    corner = np.s_[:m, :k]
    found: dict[str, list[str]] = {}
    for edge in EDGES:
        x = fitting(what, faulty(edge, corner))
        results = (attempt(quantizer.write, x), attempt(partial(ours, what=what), x))
        alone = isinstance(what, Codec)
        found[edge] = [r if isinstance(r, str) else word(edge, x, r.decoded, corner, alone) for r in results]
    return found


def word(edge: str, x: np.ndarray, y: np.ndarray, corner: tuple[slice, slice], alone: bool = False) -> str:
    """What became of an edge. alone: elements have no scale, so that each stands for itself."""
    if edge == "ragged":
        return "works" if y.shape == x.shape else f"shape {y.shape}"
    if edge not in ("NaN", "Inf"):
        before, after = x[corner].astype(np.float64), y[corner]
        kind = f"{after[0, 0]:.2g}".replace("nan", "NaN") if alone and edge != "subnormal" else _kind(after)
        if edge != "subnormal" or kind != "finite":
            return kind
        power = round(math.log2(abs((before * after).sum()) / (before * before).sum()))
        return "kept" if power == 0 else f"times 2^{power}"
    if alone:
        return f"{y[_BAD]:g}".replace("nan", "NaN").replace("inf", "Inf")
    inside = np.zeros(y.shape, bool)
    inside[corner] = True
    if np.isnan(y).all():
        return "tensor NaN"
    if np.isnan(y[inside]).all():
        return "block NaN"
    inside[_BAD] = False
    at, beside = _kind(y[_BAD]), _kind(y[inside])
    return f"block {at}" if at == beside else f"{at}; rest {beside}"


def _kind(y: np.ndarray) -> str:
    """What a number is, or several."""
    for name, of in (("NaN", np.isnan), ("Inf", np.isinf)):
        if of(y).any():
            return name if of(y).all() else f"some {name}"
    return "finite" if np.any(y) else "zero"


# ------------------------------------------------------------------------------------------------ result


def label(what: ScalingRecipe | Codec) -> str:
    """As `breccia.recipe` reads it; of a codec its name."""
    return what.name if isinstance(what, Codec) else what.spec


def provenance() -> dict[str, Any]:
    """What a reader must know to measure this again, or to doubt it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE) if cpuinfo.exists() else None
    )
    return {
        "date_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": found[1] if found else platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("breccia-core", "numpy")},
        "command": "python -m breccia_bridges.agreement docs",
    }


def measured(of: Sequence[Neighbour] | None = None, shape: tuple[int, int] = SHAPE) -> dict[str, Any]:
    """The result: every neighbour, those that are installed with their rows."""
    inputs = matrices(shape)
    found: list[dict[str, Any]] = []
    for neighbour in neighbours() if of is None else of:
        there = neighbour.version()
        rows = [compared(quantizer, inputs) for quantizer in neighbour.quantizers] if there else []
        found.append({"name": neighbour.name, "version": there, "rows": rows})
    return {"schema": SCHEMA, "provenance": provenance(), "shape": list(shape), "neighbours": found}


def write(folder: Path, draw: bool = False) -> list[Path]:
    """Measure, or with `draw` read what was measured; write the result and the page into `folder`, and say where.

    Raises FileNotFoundError where the folder, or the result to draw, is not; CorruptFileError where that is no result of ours.
    """
    result, drawn = folder / RESULT, folder / PAGE
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; name the one the page belongs in, docs in the repository.")
    if not draw:
        _put(result, json.dumps(measured(), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    _put(drawn, page(read(result)))
    return [result, drawn]


def _put(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A result that was written. Raises FileNotFoundError, or CorruptFileError naming what is wrong."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; leave --draw out to measure.")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        schema = result["schema"]
    except (ValueError, KeyError, TypeError) as e:
        raise CorruptFileError(
            f"{path} is no result of this command; leave --draw out to measure again.", file=str(path)
        ) from e
    if schema != SCHEMA:
        raise CorruptFileError(
            f"{path} has schema {schema!r}, and this version draws {SCHEMA}; leave --draw out to measure again.", file=str(path)
        )
    return result


# ------------------------------------------------------------------------------------------------ page

_INTRO = """\
# Who writes the same bytes

<!-- Written by `python -m breccia_bridges.agreement docs` from agreement.json; edit breccia_bridges.agreement.table. -->

The same format name gives different bytes in different libraries. Here each of them writes the same matrices as breccia,
once under our default recipe of that format, and once under our setting that comes closest. Every difference has its cause
beside it, and the test suite computes those bytes again from the cause alone.

**How to read it.** Each line is a setting of ours beside what the neighbour writes, the default first and then, where it is
another, the closest. Shares are percentages of equal scales (with tensor scales, zero-points and biases, where both store
the same number), of equal bytes of codes, and of equal decoded FP32 values, bit by bit. They are rounded down: **100** is
all. They are of three matrices together: normal numbers, rows of very different magnitude, and boundaries: midpoints
between codes, in blocks whose largest magnitude fills a format exactly, or is the FP32 number next to that. [Further
below](#by-matrix) they are told apart. dB is the SQNR of the normal numbers. Under each table are the causes that its
column "why" names.

Their bytes are put into our order (low nibble first, one row after the other) by renaming, never by computing. Everything
ran on a CPU in FP32; a GPU's kernels may round otherwise, and those of TransformerEngine, recorded on an H200 with inputs
of their own, have rows of their own. Where a neighbour keeps the tensor's scale as an amax or as its reciprocal, that
number is left out: [another sense](spec/numerics.md#4-dequantize), another number.
"""

_EDGES = """\
## Faults and edges

What becomes of a block of zeros, a tensor of zeros, one NaN or one Inf in a block, a block of FP32 subnormal numbers
(2^-130), and a shape that is no multiple of the block (100 × 250). Where breccia's closest setting does something else,
that is said behind it.

- *block NaN*: all that shares the scale decodes to NaN. *tensor NaN*: everything does. *finite; rest zero*: the bad element
  becomes a number, and its neighbours zeros.
- *kept*: subnormal numbers decode to about what they were; *times 2^n*: to that multiple of it.
- Without scales there are no blocks: a number is what the element becomes.
- In qwix a NaN marks its block in small arrays and is lost in large ones, as here: on a CPU, XLA's reduction to the largest
  element drops it.
"""

_USE = """\
## Writing a neighbour's bytes

Each of these settings wrote the neighbour's bytes, all of them, on all three matrices. `breccia.recipe` reads them as they
are spelled here; `cast` takes what it returns. [Bridges](bridges.md) wrap bytes that are there already, whatever rule wrote
them.
"""

_BY_MATRIX = """\
## By matrix

Where the closest setting does not write the same bytes: scales, codes, values, in percent.
"""


def percent(equal: int, of: int) -> str:
    """A share, rounded down: 100 where all are equal, and only there."""
    if equal == of:
        return "100"
    return f"{math.floor(1000 * equal / of) / 10:g}"


def total(shares: dict[str, dict[str, list[int]]]) -> dict[str, list[int]]:
    """Shares of all matrices together, by part."""
    parts = dict.fromkeys(part for of in shares.values() for part in of)
    return {part: [sum(of[part][i] for of in shares.values()) for i in (0, 1)] for part in parts}


def agrees(beside: dict[str, Any]) -> bool:
    """Are all bytes and values equal?"""
    return all(equal == of for equal, of in total(beside["shares"]).values())


def closest(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says beside our closest setting."""
    return row.get("closest") or row["default"]


def page(result: dict[str, Any]) -> str:
    """The page, from the result alone."""
    p = result["provenance"]
    versions = ", ".join(f"{name} {v}" for name, v in p["versions"].items())
    parts = [
        _INTRO,
        *(_section(n) for n in result["neighbours"]),
        _EDGES,
        _edge_table(result),
        _BY_MATRIX,
        _matrix_table(result),
    ]
    parts += [_USE, _use_table(result)]
    parts += [
        "## Measured\n",
        f"{p['date_utc']} UTC, {p['cpu']}, {p['os']}, Python {p['python']}, {versions}; matrices of {result['shape'][0]} × "
        f"{result['shape'][1]}. `{p['command']}` measures again; the figures are in [{RESULT}]({RESULT}).\n",
    ]
    return "\n".join(parts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _section(neighbour: dict[str, Any]) -> str:
    """A neighbour's table: a line for each setting of ours, and the causes below it by number."""
    head = f"## {neighbour['name']}\n\n"
    if neighbour["version"] is None:
        return f"{head}Not installed where this was measured.\n"
    causes: dict[str, int] = {}
    lines: list[list[str]] = []
    for row in neighbour["rows"]:
        if row["error"]:
            lines.append([row["name"], row["error"], *[NONE] * 6])
            continue
        start = [row["name"], f"{row['sqnr_db']:.2f}"]
        for beside in (row[name] for name in ("default", "closest") if name in row):
            shares = total(beside["shares"])
            why = str(causes.setdefault(beside["cause"], len(causes) + 1)) if beside["cause"] else ""
            figures = [_percent(*shares[part]) if part in shares else NONE for part in PARTS]
            lines.append([start[0], _setting(beside), why, *figures, start[1], f"{beside['sqnr_db']:.2f}"])
            start = ["", ""]
    notes = "".join(f"{number}. {cause}\n" for cause, number in causes.items())
    headings = ["writes", "ours", "why", "scales", "codes", "values", "dB theirs", "dB ours"]
    return f"{head}Version {neighbour['version']}.\n\n{_table(headings, lines)}" + (f"\n{notes}" if notes else "")


def _setting(beside: dict[str, Any]) -> str:
    """Its name and fields apart, so that narrow columns can hold them."""
    return ", ".join(f"`{part}`" for part in beside["writes"].split(","))


def _percent(equal: int, of: int) -> str:
    return f"**{percent(equal, of)}**" if equal == of else percent(equal, of)


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(neighbour, row) of those that did not fail."""
    for neighbour in result["neighbours"]:
        yield from ((neighbour["name"], row) for row in neighbour["rows"] if not row["error"])


def _edge_table(result: dict[str, Any]) -> str:
    """Rows of a neighbour that say the same share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for neighbour, row in _rows(result):
        if "edges" in row:
            words = (f"{theirs}, here {mine}" if theirs != mine else theirs for theirs, mine in row["edges"].values())
            lines.setdefault((neighbour, *words), []).append(row["name"])
    return _table(["", "writes", *EDGES], [[head, _listed(names), *words] for (head, *words), names in lines.items()])


def _listed(names: list[str]) -> str:
    """Names, those that begin alike together."""
    parted = [name.partition(", ") for name in names]
    groups = ((head, [tail.replace(", ", " ") for *_, tail in group]) for head, group in groupby(parted, lambda part: part[0]))
    return "; ".join(f"{head}: {', '.join(tails)}" if tails[0] else head for head, tails in groups)


def _matrix_table(result: dict[str, Any]) -> str:
    lines: list[list[str]] = []
    for neighbour, row in _rows(result):
        beside = closest(row)
        if not agrees(beside) and not row["recorded"]:
            by = [", ".join(percent(*counts) for counts in beside["shares"][name].values()) for name in MATRICES]
            lines.append([neighbour, row["name"], _setting(beside), *by])
    return _table(["", "writes", "beside", *MATRICES], lines)


def _use_table(result: dict[str, Any]) -> str:
    lines: list[list[str]] = []
    for neighbour, row in _rows(result):
        settings = [row[name] for name in ("default", "closest") if name in row and agrees(row[name])]
        if settings and settings[-1]["writes"] not in {codec.name for codec in CODECS}:
            lines.append([neighbour, row["name"], f"`{settings[-1]['writes']}`"])
    return _table(["", "writes", "recipe"], lines)
