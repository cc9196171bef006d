"""Which libraries write breccia's bytes: a comparison on the same inputs, as a result and a page.

`python -m breccia_bridges.agreement docs` measures the installed libraries, writes `agreement.json` and from it `agreement.md`.
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

from breccia import Codec, CorruptFileError, PowerOfTwo, ScalingRecipe, cast, dequantize
from breccia.backend import CODECS, E2M1, E2M3, E3M2, E4M3, E5M2, INT4, INT8, NUMPY

from ..staging import write_text
from . import Library, Quantizer, Written, libraries, packed

RESULT, PAGE = "agreement.json", "agreement.md"
#: Version of the result file; incremented by changes that `page` cannot read.
SCHEMA = 1
#: The input matrices, and their rows and columns (the boundaries have 128 rows).
MATRICES = ("normal", "rows", "boundaries")
SHAPE = (512, 1024)
PARTS = ("scale", "data", "decoded")
NONE = "—"

# ------------------------------------------------------------------------------------------------ inputs


def matrices(shape: tuple[int, int] = SHAPE) -> dict[str, np.ndarray]:
    """The FP32 input matrices, by name. Both sides of the shape are multiples of 128."""
    drawn = np.random.default_rng(20)
    normal = drawn.standard_normal(shape, np.float32)
    powers = np.exp2(drawn.uniform(-9, 9, (shape[0], 1))).astype(np.float32)
    rows = drawn.standard_normal(shape, np.float32) * powers
    return dict(zip(MATRICES, (normal, rows, boundaries(shape[1])), strict=True))


def boundaries(columns: int) -> np.ndarray:
    """128 rows of rounding boundaries, times powers of two such that FP16 scales do not overflow.

    Midpoints between codes; the amax of each block of 16 is the largest value of a format, or an adjacent FP32 number.
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
    """`x` quantized by breccia under a recipe, or encoded by a codec alone."""
    if isinstance(what, Codec):
        with NUMPY.errstate():
            codes = what.encode(NUMPY, x)
            return Written(packed(codes, what), what.decode(NUMPY, codes))
    st = cast(x, what)
    scales = {
        name: None if (part := getattr(st, name)) is None else np.asarray(part)
        for name in ("scale", "global_scale", "zero_point")
    }
    return Written(np.asarray(st.data), np.asarray(dequantize(st)), **scales)


def fitting(what: ScalingRecipe | Codec, x: np.ndarray) -> np.ndarray:
    """`x`, or its magnitudes for an unsigned codec."""
    return np.abs(x) if isinstance(what, PowerOfTwo) else x


def attempt(write: Callable[[np.ndarray], Written], x: np.ndarray) -> Written | str:
    """The result, or a description of the error."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return write(x)
    except Exception as e:
        return f"raises {type(e).__name__}"


def _bits(a: np.ndarray) -> np.ndarray:
    """The bit patterns of stored numbers, with one pattern for all FP32 NaN."""
    patterns = np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")
    return np.where(np.isnan(a), np.uint32(0x7FC00000), patterns) if a.dtype == np.float32 else patterns


def _stored(written: Written) -> dict[str, list[np.ndarray]]:
    scales = (written.scale, written.global_scale, written.zero_point)
    return {
        "scale": [_bits(a) for a in scales if a is not None],
        "data": [written.data.view(np.uint8)],
        "decoded": [_bits(written.decoded)],
    }


def shares(theirs: Written, mine: Written) -> dict[str, tuple[int, int]]:
    """By part: (number equal, total). Global scales and offsets count as scales if both libraries store them."""
    both = [name for name in ("scale", "global_scale", "zero_point") if getattr(theirs, name) is not None]
    mine = dataclasses.replace(mine, **{name: None for name in ("scale", "global_scale", "zero_point") if name not in both})
    counts: dict[str, tuple[int, int]] = {}
    for part, there in _stored(theirs).items():
        here = _stored(mine)[part]
        if [a.shape for a in there] != [a.shape for a in here] or [a.dtype for a in there] != [a.dtype for a in here]:
            said = [[(a.shape, a.dtype.name) for a in arrays] for arrays in (there, here)]
            raise ValueError(
                f"{part}: the adapter gives {said[0]}, breccia stores {said[1]}; the adapter must convert to breccia's order."
            )
        if there:
            counts[part] = (sum(int((a == b).sum()) for a, b in zip(there, here, strict=True)), sum(a.size for a in there))
    return counts


def sqnr_db(x: np.ndarray, y: np.ndarray) -> float:
    """Signal-to-quantization-noise ratio in dB, computed in FP64, to four places."""
    a, b = x.astype(np.float64), y.astype(np.float64)
    return round(float(10 * np.log10((a * a).sum() / ((a - b) ** 2).sum())), 4)


def compared(quantizer: Quantizer, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """One row: shares and SQNR against each breccia setting, and the results on edge cases; `error` if the library raises.

    SQNR is measured on the first matrix. Shares are counts, (equal, all), by matrix and part.
    """
    matrices = quantizer.recorded() if quantizer.recorded else inputs
    settings: dict[str, dict[str, Any]] = {
        name: {"writes": label(o.writes), "cause": o.cause, "shares": {}} for name, o in quantizer.settings.items()
    }
    row: dict[str, Any] = {"name": quantizer.name, "error": None, "recorded": quantizer.recorded is not None, **settings}
    for name, matrix in matrices.items():
        x = fitting(quantizer.default.writes, matrix)
        theirs = attempt(quantizer.write, x)
        if isinstance(theirs, str):
            return {**row, "error": f"{theirs} on {name}"}
        first = "sqnr_db" not in row
        if first:
            row["sqnr_db"] = sqnr_db(x, theirs.decoded)
        for setting, o in quantizer.settings.items():
            mine = ours(x, o.writes)
            settings[setting]["shares"][name] = shares(theirs, mine)
            if first:
                settings[setting]["sqnr_db"] = sqnr_db(x, mine.decoded)
    return row if quantizer.recorded else {**row, "edges": edges(quantizer)}


# ------------------------------------------------------------------------------------------------ edges

#: Edges, in the order of the table.
EDGES = ("zero block", "zero tensor", "NaN", "Inf", "subnormal", "ragged")
#: Index of the only NaN or Inf.
_BAD = (0, 3)
_FULL_BLOCKS = (128, 256)


def faulty(edge: str, corner: tuple[slice, slice]) -> np.ndarray:
    """Normal numbers with one fault, either in the corner, whose elements share a scale, or everywhere."""
    x = np.random.default_rng(22).standard_normal(_FULL_BLOCKS, np.float32)
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
    """By edge: the outcome in the library and under breccia's closest setting, in a word or two."""
    what = list(quantizer.settings.values())[-1].writes
    m, k = (1, 16) if isinstance(what, Codec) else what.format.scale.block
    corner = np.s_[:m, :k]
    outcomes: dict[str, list[str]] = {}
    for edge in EDGES:
        x = fitting(what, faulty(edge, corner))
        results = (attempt(quantizer.write, x), attempt(partial(ours, what=what), x))
        alone = isinstance(what, Codec)
        outcomes[edge] = [r if isinstance(r, str) else word(edge, x, r.decoded, corner, alone) for r in results]
    return outcomes


def word(edge: str, x: np.ndarray, y: np.ndarray, corner: tuple[slice, slice], alone: bool = False) -> str:
    """The outcome of an edge case. alone: there are no scales, so elements are independent."""
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
    at, rest = _kind(y[_BAD]), _kind(y[inside])
    return f"block {at}" if at == rest else f"{at}; rest {rest}"


def _kind(y: np.ndarray) -> str:
    """The kind of a number, or of several."""
    for name, of in (("NaN", np.isnan), ("Inf", np.isinf)):
        if of(y).any():
            return name if of(y).all() else f"some {name}"
    return "finite" if np.any(y) else "zero"


# ------------------------------------------------------------------------------------------------ result


def label(what: ScalingRecipe | Codec) -> str:
    """A recipe as `breccia.recipe` reads it; the name of a codec."""
    return what.name if isinstance(what, Codec) else what.spec


def provenance() -> dict[str, Any]:
    """The machine and versions of the measurement."""
    cpuinfo = Path("/proc/cpuinfo")
    match = (
        re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE) if cpuinfo.exists() else None
    )
    return {
        "date_utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": match[1] if match else platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("breccia-core", "numpy")},
        "command": "python -m breccia_bridges.agreement docs",
    }


def measured(of: Sequence[Library] | None = None, shape: tuple[int, int] = SHAPE) -> dict[str, Any]:
    """The result: every library, with rows if it is installed."""
    inputs = matrices(shape)
    neighbours: list[dict[str, Any]] = []
    for library in libraries() if of is None else of:
        there = library.version()
        rows = [compared(quantizer, inputs) for quantizer in library.quantizers] if there else []
        neighbours.append({"name": library.name, "version": there, "rows": rows})
    return {"schema": SCHEMA, "provenance": provenance(), "shape": list(shape), "neighbours": neighbours}


def write(folder: Path, draw: bool = False) -> list[Path]:
    """Measure, or with `draw` read the existing result; write the result and the page into `folder` and return their paths.

    Raises FileNotFoundError for a missing folder or result, CorruptFileError for an invalid result.
    """
    result, drawn = folder / RESULT, folder / PAGE
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; pass the folder of the page, docs in the repository.")
    if not draw:
        write_text(result, json.dumps(measured(), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_text(drawn, page(read(result)))
    return [result, drawn]


def read(path: Path) -> dict[str, Any]:
    """Read a result. Raises FileNotFoundError or CorruptFileError."""
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

The same format name gives different bytes in different libraries. Here each library and breccia quantize the same matrices:
breccia once under its default recipe of that format, and once under the setting with the most equal bytes. Every difference
has a cause, and the test suite reproduces the library's bytes from the cause alone.

**How to read the tables.** Each line compares a library with one breccia setting: first the default, then the closest
setting if it is another one. Shares are percentages of equal scales (including global scales, zero-points and biases that
both libraries store), of equal code bytes, and of bitwise equal decoded FP32 values. They are rounded down: **100** means
all. They cover three matrices together: normal numbers, rows of very different magnitude, and boundaries. Boundaries are
midpoints between codes, in blocks whose amax is the largest value of a format or an adjacent FP32 number. [Shares by
matrix](#by-matrix) are listed below. dB is the SQNR of the normal numbers. The numbers in the column "why" refer to the
causes under each table.

The adapters only reorder other libraries' bytes into breccia's order (low nibble first, row by row) and compute nothing.
Everything ran on a CPU in FP32; GPU kernels may round differently. The kernels of TransformerEngine were recorded on an H200
with other inputs and have a section of their own. A tensor scale that a library stores as an amax or as a reciprocal is left
out, since [the scale convention](spec/numerics.md#4-dequantize) differs.
"""

_EDGES = """\
## Faults and edges

The table shows results for a block of zeros, a tensor of zeros, one NaN or one Inf in a block, a block of FP32 subnormal
numbers (2^-130), and a shape that is not a multiple of the block (100 × 250; column "ragged"). If breccia's closest setting
differs, its result follows after "here".

- *block NaN*: all elements that share the scale decode to NaN. *tensor NaN*: all elements do. *finite; rest zero*: the NaN or
  Inf becomes a finite number, and the rest of its block zeros.
- *kept*: subnormal numbers decode to approximately the same values; *times 2^n*: to that multiple of them.
- Without scales there are no blocks; a number is the decoded value of the element.
- In qwix a NaN turns its block to NaN in small arrays but is lost in large ones, as here: on a CPU, XLA's maximum reduction
  drops it.
"""

_USE = """\
## Writing another library's bytes

Each of these settings reproduces all of the library's bytes on all three matrices. `breccia.recipe` parses these strings, and
`cast` takes the result. [Bridges](bridges.md) wrap existing bytes, regardless of the rule that produced them.
"""

_BY_MATRIX = """\
## By matrix

Shares of equal scales, codes and values in percent, for quantizers whose closest setting does not write the same bytes.
"""


def percent(equal: int, of: int) -> str:
    """A share in percent, rounded down: 100 only if all are equal."""
    if equal == of:
        return "100"
    return f"{math.floor(1000 * equal / of) / 10:g}"


def total(shares: dict[str, dict[str, list[int]]]) -> dict[str, list[int]]:
    """Shares of all matrices together, by part."""
    parts = dict.fromkeys(part for of in shares.values() for part in of)
    return {part: [sum(of[part][i] for of in shares.values()) for i in (0, 1)] for part in parts}


def agrees(setting: dict[str, Any]) -> bool:
    """Are all bytes and values equal?"""
    return all(equal == of for equal, of in total(setting["shares"]).values())


def closest(row: dict[str, Any]) -> dict[str, Any]:
    """The comparison of a row with breccia's closest setting."""
    return row.get("closest") or row["default"]


def page(result: dict[str, Any]) -> str:
    """The page, from the result alone."""
    p = result["provenance"]
    versions = ", ".join(f"{name} {v}" for name, v in p["versions"].items())
    parts = [
        _INTRO,
        *(_section(library) for library in result["neighbours"]),
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


def _section(library: dict[str, Any]) -> str:
    """The table of a library: a line per breccia setting, and numbered causes below it."""
    head = f"## {library['name']}\n\n"
    if library["version"] is None:
        return f"{head}Not installed where this was measured.\n"
    causes: dict[str, int] = {}
    lines: list[list[str]] = []
    for row in library["rows"]:
        if row["error"]:
            lines.append([row["name"], row["error"], *[NONE] * 6])
            continue
        start = [row["name"], f"{row['sqnr_db']:.2f}"]
        for setting in (row[name] for name in ("default", "closest") if name in row):
            shares = total(setting["shares"])
            why = str(causes.setdefault(setting["cause"], len(causes) + 1)) if setting["cause"] else ""
            figures = [_percent(*shares[part]) if part in shares else NONE for part in PARTS]
            lines.append([start[0], _setting(setting), why, *figures, start[1], f"{setting['sqnr_db']:.2f}"])
            start = ["", ""]
    notes = "".join(f"{number}. {cause}\n" for cause, number in causes.items())
    headings = ["library writes", "breccia setting", "why", "scales", "codes", "values", "dB", "dB breccia"]
    return f"{head}Version {library['version']}.\n\n{_table(headings, lines)}" + (f"\n{notes}" if notes else "")


def _setting(setting: dict[str, Any]) -> str:
    """Its name and fields separately, so that narrow columns can wrap."""
    return ", ".join(f"`{part}`" for part in setting["writes"].split(","))


def _percent(equal: int, of: int) -> str:
    return f"**{percent(equal, of)}**" if equal == of else percent(equal, of)


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(library, row) of the rows without an error."""
    for library in result["neighbours"]:
        yield from ((library["name"], row) for row in library["rows"] if not row["error"])


def _edge_table(result: dict[str, Any]) -> str:
    """Rows of a library with the same results share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for library, row in _rows(result):
        if "edges" in row:
            words = (f"{theirs}, here {mine}" if theirs != mine else theirs for theirs, mine in row["edges"].values())
            lines.setdefault((library, *words), []).append(row["name"])
    return _table(["", "library writes", *EDGES], [[head, _listed(names), *words] for (head, *words), names in lines.items()])


def _listed(names: list[str]) -> str:
    """Names, grouped by their part before the first comma."""
    split = [name.partition(", ") for name in names]
    groups = ((head, [rest.replace(", ", " ") for *_, rest in group]) for head, group in groupby(split, lambda part: part[0]))
    return "; ".join(f"{head}: {', '.join(rests)}" if rests[0] else head for head, rests in groups)


def _matrix_table(result: dict[str, Any]) -> str:
    lines: list[list[str]] = []
    for library, row in _rows(result):
        setting = closest(row)
        if not agrees(setting) and not row["recorded"]:
            by = [", ".join(percent(*counts) for counts in setting["shares"][name].values()) for name in MATRICES]
            lines.append([library, row["name"], _setting(setting), *by])
    return _table(["", "library writes", "breccia setting", *MATRICES], lines)


def _use_table(result: dict[str, Any]) -> str:
    lines: list[list[str]] = []
    for library, row in _rows(result):
        settings = [row[name] for name in ("default", "closest") if name in row and agrees(row[name])]
        if settings and settings[-1]["writes"] not in {codec.name for codec in CODECS}:
            lines.append([library, row["name"], f"`{settings[-1]['writes']}`"])
    return _table(["", "library writes", "recipe"], lines)
