"""Draws the plots and diagrams of docs/*.md. Every number in them is computed here by breccia, on NumPy, from fixed data.

    python docs/scripts/plots.py           # writes docs/img/*.svg; needs matplotlib
    python docs/scripts/plots.py --check   # exits with 1 where a picture shows other numbers; needs no matplotlib

The mechanism (digests, reproducible SVG) is that of benchmarks/harness/plots.py. Data are sums of whole numbers, results are
rounded, so that digests are the same on every machine.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import breccia
from breccia import codecs
from breccia.arrays.ops import NUMPY

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness.plots import BLUE, GREY, ORANGE, Plot, write  # noqa: E402
from picture import pictures  # noqa: E402
from rosetta import draw_rosetta, rosetta_series  # noqa: E402
from standing import draw_standing, standing_series  # noqa: E402

#: Two more mid-tones of at least 3:1 on white and on dark grounds, apart from blue and orange for the colour-blind too.
GREEN, PURPLE = "#009E73", "#A8609F"


# ------------------------------------------------------------------------------------------------ data


def bell(*shape: int, seed: int = 0) -> np.ndarray:
    """Nearly normal numbers of variance one, exact in FP32: each is a sum of twelve whole numbers."""
    parts = np.random.default_rng(seed).integers(0, 1 << 16, (12, *shape))
    return ((parts.sum(axis=0) - 6 * ((1 << 16) - 1)) / (1 << 16)).astype(np.float32)


def decibels(x: np.ndarray, y: np.ndarray) -> float:
    """SQNR of `y` against `x`, from sums without rounding; 0 where nothing is left of x, at most 99."""
    a, b = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    signal, noise = math.fsum(a * a), math.fsum((a - b) ** 2)
    return 99.0 if noise == 0 else round(10 * math.log10(signal / noise), 2) + 0.0


def round_trip(x: np.ndarray, recipe: breccia.ScalingRecipe, **options: Any) -> np.ndarray:
    """What `x` becomes through a cast and back."""
    return breccia.dequantize(breccia.cast(x, recipe, **options))


def through(codec: breccia.Codec, y: np.ndarray) -> np.ndarray:
    """`y` as the numbers that `codec` writes for it, under a scale of one."""
    return codec.decode(NUMPY, codec.encode(NUMPY, y))


# ------------------------------------------------------------------------------------------------ numbers

_ELEMENTS = ("E5M2", "E4M3", "E3M2", "E2M3", "E2M1", "INT8", "INT4", "NF4")


def element_series() -> Any:
    """By codec: log2 of each positive number it has, as a part of the largest."""
    found: dict[str, list[float]] = {}
    for name in _ELEMENTS:
        codec = getattr(codecs, name)
        values = {v for code in range(1 << codec.bits) if 0 < (v := codec.value(code)) <= codec.max}
        found[name] = [round(math.log2(v / codec.max), 3) for v in sorted(values)]
    return found


_OCTAVES = 20


def error_series() -> Any:
    """By codec: largest relative error within each octave below the largest number, from the top down."""
    found: dict[str, list[float]] = {}
    for name in ("E5M2", "E4M3", "E2M3", "E2M1", "INT8", "INT4"):
        codec = getattr(codecs, name)
        errors: list[float] = []
        for octave in range(_OCTAVES):
            y = np.array([codec.max * 2.0**-octave * (256 + n) / 512 for n in range(1, 257)], np.float32)
            error = np.abs(through(codec, y).astype(np.float64) - y) / y
            errors.append(float(f"{error.max():.2g}"))
        found[name] = errors
    return found


_MAGNITUDES = range(-36, 37, 1)
_BY_MAGNITUDE: dict[str, breccia.ScalingRecipe] = {
    "mxfp8": breccia.MXFP8BlockScaling(),
    "nvfp4": breccia.NVFP4BlockScaling(),
    "mxfp4": breccia.MXFP4BlockScaling(),
    "nvfp4, one level": breccia.NVFP4BlockScaling(two_level=False),
    "int4, FP16 scales": breccia.INT4Scaling(group_size=32),
}


def magnitude_series() -> Any:
    """By recipe: SQNR of the same numbers times 2^n, n from -36 to 36."""
    x = bell(32, 512)
    return {
        name: [round(decibels(x * np.float32(2.0**n), round_trip(x * np.float32(2.0**n), recipe)), 1) for n in _MAGNITUDES]
        for name, recipe in _BY_MAGNITUDE.items()
    }


_RULES = ("rceil", "floor", "even")
_SIGNIFICANDS = [1 + n / 32 for n in range(32)]


def rule_series() -> Any:
    """By recipe and scale rule: SQNR of blocks whose amax has the significand 1, 1 + 1/32, ..."""
    x = bell(256, 32, seed=1)
    x = x / np.abs(x).max(axis=1, keepdims=True)
    found: dict[str, Any] = {}
    for name, recipe in (("mxfp8", breccia.MXFP8BlockScaling), ("mxfp4", breccia.MXFP4BlockScaling)):
        by_rule: dict[str, list[float]] = {}
        for rule in _RULES:
            scaled = [x * np.float32(significand) for significand in _SIGNIFICANDS]
            by_rule[rule] = [round(decibels(y, round_trip(y, recipe(scale_rule=rule))), 1) for y in scaled]
        found[name] = by_rule
    return found


_STALE = [n / 2 for n in range(-8, 33)]


def stale_series() -> Any:
    """By FP8 format, for a supplied scale 2^n times the right one: SQNR, percent clipped, percent written as zero."""
    x = bell(64, 512, seed=2)
    amax = float(np.abs(x).max())
    found: dict[str, Any] = {}
    for name in ("E4M3", "E5M2"):
        recipe = breccia.DelayedScaling(name)
        largest = getattr(codecs, name).max
        rows: list[list[float]] = []
        for n in _STALE:
            scale = np.float32(amax / largest * 2.0**n)
            y = round_trip(x, recipe, scale=scale)
            clipped = 100 * float(np.mean(np.abs(x) > scale * largest))
            zeros = 100 * float(np.mean((y == 0) & (x != 0)))
            rows.append([round(decibels(x, y), 1), round(clipped, 2), round(zeros, 2)])
        found[name] = rows
    return found


_DRAWS = 2048


def stochastic_series() -> Any:
    """Numbers 0, 1/16, ... 6 in E2M1: what nearest rounding writes, and the mean of many stochastic roundings."""
    numbers = np.arange(0, 6 + 1 / 32, 1 / 16, dtype=np.float32)
    recipe = breccia.MXFP4BlockScaling()
    x = np.repeat(numbers[:, None], _DRAWS // 31 * 32, axis=1)
    x[:, ::32] = 6  # fixes each block's scale at one
    kept = np.ones(x.shape[1], bool)
    kept[::32] = False
    nearest = round_trip(x, recipe)[:, kept][:, 0]
    drawn = round_trip(x, recipe, rounding="stochastic", seed=0)[:, kept]
    means = [math.fsum(row) / len(row) for row in drawn.astype(np.float64)]
    return {
        "draws": int(kept.sum()),
        "numbers": numbers.tolist(),
        "nearest": nearest.tolist(),
        "mean": [round(m, 4) for m in means],
    }


def block_series() -> Any:
    """A small matrix, its MXFP4 codes, scales and bytes."""
    x = np.zeros((2, 64), np.float32)
    x[0, :8] = [5.0, -0.7, 1.2, 0.0, 3.0, -2.0, 0.5, 6.0]
    x[0, 32:36] = [0.3, -0.1, 0.05, 0.2]
    x[1, :4] = [100.0, 40.0, -64.0, 10.0]
    x[1, 32:36] = [1.0, 2.0, -3.0, 0.25]
    st = breccia.cast(x, breccia.MXFP4BlockScaling())
    y = breccia.dequantize(st)
    codes = [[int(st.data[r, k // 2] >> 4 * (k % 2)) & 15 for k in range(8)] for r in range(2)]
    return {
        "values": x[:, :8].tolist(),
        "codes": codes,
        "bytes": st.data[:, :4].tolist(),
        "scales": st.scale.tolist(),
        "decoded": y[:, :8].tolist(),
        "amax": np.abs(x.reshape(2, 2, 32)).max(axis=2).round(4).tolist(),
    }


# ------------------------------------------------------------------------------------------------ pictures


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _named(axes: Any, lines: Iterable[tuple[str, float, str]], x: float, apart: float) -> None:
    """Names of lines right of the plot, each at its line's end or as near as it fits without touching another."""
    level = -math.inf
    for name, y, colour in sorted(lines, key=lambda line: line[1]):
        level = max(y, level + apart)
        axes.annotate(name, (x, level), (6, 0), textcoords="offset points", va="center", color=colour, annotation_clip=False)


def draw_elements(series: Any) -> Any:
    """A stroke for each number a codec has."""
    figure = _figure(9, 3.9)
    axes = figure.subplots()
    kinds = {"E": BLUE, "I": ORANGE, "N": GREEN}
    for place, (name, values) in enumerate(series.items()):
        axes.vlines(values, place - 0.32, place + 0.32, color=kinds[name[0]], linewidth=0.9)
        axes.annotate(f"{len(values)} values", (0, place), (10, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(series)), list(series))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(-33, 0.3)
    axes.set_xticks(range(-32, 1, 4), [f"$2^{{{n}}}$" if n else "largest" for n in range(-32, 1, 4)])
    axes.set_xlabel("positive numbers, as a part of the largest one")
    return figure


def draw_error(series: Any) -> Any:
    """Relative error of elements, one line per codec."""
    figure = _figure(9, 4.4)
    axes = figure.subplots()
    styles = {"E": "-", "I": "--"}
    colours = {"E5M2": PURPLE, "E4M3": BLUE, "E2M3": GREEN, "E2M1": ORANGE, "INT8": BLUE, "INT4": ORANGE}
    # Each name stands where its line runs free of the others.
    places = {"E5M2": (-18.5, 0.125), "E4M3": (-10.5, 0.048), "E2M3": (-5.2, 0.5), "E2M1": (-0.8, 0.27)}
    places |= {"INT8": (-2.2, 0.0085), "INT4": (-2.35, 0.62)}
    for name, errors in series.items():
        x = [-n for n in range(len(errors) + 1)]
        axes.stairs(errors[::-1], x[::-1], baseline=None, linestyle=styles[name[0]], color=colours[name], linewidth=1.8)
        axes.annotate(name, places[name], color=colours[name], va="center", ha="center", fontweight="bold")
    axes.set_yscale("log")
    ticks = [0.003, 0.01, 0.03, 0.1, 0.3, 1]
    axes.set_yticks(ticks, [f"{100 * t:g} %" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.002, 1.35)
    axes.set_xlim(-20, 0.4)
    axes.set_xticks(range(-20, 1, 4), [f"$2^{{{n}}}$" if n else "amax" for n in range(-20, 1, 4)])
    axes.set_xlabel("magnitude of an element, as a part of its block's amax")
    axes.set_ylabel("largest relative error")
    axes.grid(axis="y", color=GREY, linewidth=0.3, alpha=0.5)
    return figure


def draw_magnitude(series: Any) -> Any:
    """SQNR of whole tensors, one line per recipe."""
    figure = _figure(9, 4.2)
    axes = figure.subplots()
    colours = dict(zip(series, (BLUE, GREEN, PURPLE, ORANGE, GREY), strict=True))
    x = list(_MAGNITUDES)
    ends: list[tuple[str, float, str]] = []
    for name, values in series.items():
        hard = name in ("nvfp4, one level", "int4, FP16 scales")
        axes.plot(x, values, "--" if hard else "-", color=colours[name], linewidth=1.8)
        if not hard:
            ends.append((name, values[-1], colours[name]))
    _named(axes, ends, x[-1], 1.9)
    for name, at, level, side in (("nvfp4, one level", -9, 9, "right"), ("int4, FP16 scales", -25, 9, "right")):
        axes.annotate(name, (at, level), color=colours[name], va="center", ha=side)
    axes.set_ylim(-1, 36)
    axes.set_xlim(x[0], x[-1])
    axes.set_xticks(range(-36, 37, 12), [f"$2^{{{n}}}$" if n else "1" for n in range(-36, 37, 12)])
    axes.set_xlabel("standard deviation of the tensor")
    axes.set_ylabel("SQNR, dB")
    axes.grid(axis="y", color=GREY, linewidth=0.3, alpha=0.5)
    return figure


def draw_rules(series: Any) -> Any:
    """The three E8M0 rules, MXFP8 and MXFP4 side by side."""
    figure = _figure(9, 3.7)
    colours = {"rceil": BLUE, "floor": ORANGE, "even": GREEN}
    styles = {"rceil": "-", "floor": "--", "even": "-."}
    limits = {"mxfp8": (1.75, "448 = 1.75 · $2^8$"), "mxfp4": (1.5, "6 = 1.5 · $2^2$")}
    panels = figure.subplots(1, 2)
    for axes, (name, by_rule) in zip(panels, series.items(), strict=True):
        for rule, values in by_rule.items():
            axes.plot(_SIGNIFICANDS, values, styles[rule], color=colours[rule], linewidth=1.8, label=rule)
        limit, why = limits[name]
        axes.axvline(limit, color=GREY, linewidth=0.8, linestyle=":")
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.12 * (high - low), high)
        side = {"ha": "right", "xytext": (-4, 3)}
        axes.annotate(why, (limit, low - 0.12 * (high - low)), textcoords="offset points", va="bottom", fontsize=9, **side)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("significand of the block's amax")
        axes.set_xlim(1, 2)
        axes.grid(axis="y", color=GREY, linewidth=0.3, alpha=0.5)
    panels[0].set_ylabel("SQNR, dB")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_stale(series: Any) -> Any:
    """SQNR left; what clips and what becomes zero right."""
    figure = _figure(9, 3.9)
    colours = {"E4M3": BLUE, "E5M2": ORANGE}
    left, right = figure.subplots(1, 2)
    for name, rows in series.items():
        quality, clipped, zeros = zip(*rows, strict=True)
        left.plot(_STALE, quality, color=colours[name], linewidth=1.8, label=name)
        right.plot(_STALE, clipped, "--", color=colours[name], linewidth=1.8)
        right.plot(_STALE, zeros, color=colours[name], linewidth=1.8)
    left.set_ylabel("SQNR, dB")
    left.annotate("E4M3", (5.6, 32.6), color=BLUE, va="center", fontweight="bold", ha="center")
    left.annotate("E5M2", (5.6, 23.3), color=ORANGE, va="center", fontweight="bold", ha="center")
    right.set_ylabel("elements, %")
    right.annotate("clipped\n(both alike)", (-2.7, 66), ha="left", va="center", fontsize=9)
    right.annotate("zero\nin E4M3", (13.1, 34), color=BLUE, ha="right", va="center", fontsize=9)
    right.annotate("none zero in E5M2", (4.5, 4), color=ORANGE, ha="center", va="center", fontsize=9)
    for axes in (left, right):
        axes.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(-4, 17, 4), [f"$2^{{{n}}}$" if n else "right" for n in range(-4, 17, 4)])
        axes.set_xlim(-4, 16)
        axes.set_xlabel("supplied scale over the right one")
        axes.grid(axis="y", color=GREY, linewidth=0.3, alpha=0.5)
    left.set_ylim(0, 36)
    return figure


def draw_stochastic(series: Any) -> Any:
    """Staircase and diagonal left; their errors right."""
    figure = _figure(9, 3.9)
    left, right = figure.subplots(1, 2)
    x, nearest, mean = series["numbers"], series["nearest"], series["mean"]
    left.plot(x, nearest, color=ORANGE, linewidth=1.8, drawstyle="steps-mid")
    left.plot(x, mean, ".", color=BLUE, markersize=4)
    left.annotate("nearest", (4.35, 3.75), color=ORANGE, fontweight="bold")
    left.annotate(f"stochastic, mean of {series['draws']}", (3.35, 4.9), color=BLUE, fontweight="bold", ha="right")
    left.set_ylabel("decoded")
    right.plot(x, [a - b for a, b in zip(nearest, x, strict=True)], color=ORANGE, linewidth=1.5)
    right.plot(x, [a - b for a, b in zip(mean, x, strict=True)], color=BLUE, linewidth=1.5)
    right.axhline(0, color=GREY, linewidth=0.8)
    right.set_ylabel("error of the mean")
    for axes in (left, right):
        axes.set_xlabel("number, under a scale of one")
        axes.set_xlim(0, 6)
    return figure


def draw_blocks(series: Any) -> Any:
    """Two rows of a matrix from numbers to bytes and back."""
    from matplotlib.patches import Rectangle

    figure = _figure(9.4, 4.6)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 20.4)
    axes.set_ylim(-0.2, 10.2)
    tones = ((BLUE, PURPLE), (GREEN, ORANGE))

    def cell(x: float, y: float, width: float, text: str, colour: str, size: float = 9) -> None:
        axes.add_patch(Rectangle((x, y), width, 0.8, facecolor=colour, alpha=0.18, edgecolor="none"))
        axes.add_patch(Rectangle((x, y), width, 0.8, facecolor="none", edgecolor=colour, linewidth=1))
        axes.annotate(text, (x + width / 2, y + 0.4), ha="center", va="center", fontsize=size)

    def row(top: float, head: str, note: str, lines: list[list[str]], width: float) -> None:
        axes.annotate(head, (0, top + 0.45), fontsize=10, fontweight="bold", va="center")
        axes.annotate(note, (0, top - 0.15), fontsize=8.5, va="center")
        for r, items in enumerate(lines):
            y = top - 0.9 * r + 0.1
            for k, text in enumerate(items):
                cell(4.6 + width * k, y, width, text, tones[r][0])
            axes.annotate("…", (4.6 + 9.25, y + 0.4), ha="center", va="center", fontsize=9)
            cell(14.4, y, 1.7, "block 1", tones[r][1], 8)

    def text(v: float) -> str:
        return f"{v:g}".replace("-", "−")

    row(8.4, "x", "FP32, 2 × 64", [[text(v) for v in line] for line in series["values"]], 1.1)
    row(6.0, "codes", "E2M1, 4 bits each", [[f"{c:X}" for c in line] for line in series["codes"]], 1.1)
    row(3.6, "data", "bytes: the even index\nis the low nibble", [[f"{b:02X}" for b in line] for line in series["bytes"]], 2.2)
    row(0.9, "dequantized", "code × scale", [[text(v) for v in line] for line in series["decoded"]], 1.1)
    axes.annotate("block 0: 32 along K  →", (4.6, 9.75), fontsize=9, va="center")
    axes.annotate("amax", (17.0, 9.75), fontsize=9, va="center", ha="center")
    axes.annotate("scale (E8M0 byte)", (18.9, 9.75), fontsize=9, va="center", ha="center")
    for r in range(2):
        y = 8.4 - 0.9 * r + 0.1
        axes.annotate(", ".join(text(v) for v in series["amax"][r]), (17.0, y + 0.4), fontsize=9, va="center", ha="center")
        for b in range(2):
            cell(17.9 + 1.15 * b, y, 1.15, str(series["scales"][r][b]), tones[r][b])
    return figure


#: The decision tree: (question or answer, children as (edge, node)).
_TREE: Any = (
    "How many bits per weight or activation?",
    [
        (
            "about 8",
            (
                "Whose scales?",
                [
                    ("MX hardware", ("MXFP8BlockScaling", [])),
                    ("128 × 128 tiles", ("Float8BlockScaling(block_m=128)", [])),
                    ("1 × 128 blocks", ("Float8BlockScaling()", [])),
                    ("one per row or channel", ("Float8RowScaling, INT8Scaling", [])),
                    ("one per tensor", ("Float8CurrentScaling", [])),
                    ("from a history", ("DelayedScaling + AmaxHistory", [])),
                ],
            ),
        ),
        ("about 6", ("MXFP6BlockScaling", [])),
        (
            "about 4",
            (
                "For what?",
                [
                    ("NVIDIA FP4 hardware", ("NVFP4BlockScaling", [])),
                    ("MX hardware, gpt-oss", ("MXFP4BlockScaling", [])),
                    ("integer kernels, GPTQ, AWQ", ("INT4Scaling", [])),
                    ("QLoRA storage", ("NF4Scaling", [])),
                ],
            ),
        ),
    ],
)


def decision_series() -> Any:
    """The decision tree."""
    return _TREE


def draw_decision(series: Any) -> Any:
    """The decision tree, from left to right."""
    figure = _figure(9.6, 5.4)
    axes = figure.subplots()
    axes.set_axis_off()
    columns = (0.0, 3.1, 6.9)
    leaves = 0

    def place(node: Any, depth: int, edge: str) -> float:
        nonlocal leaves
        name, children = node
        if children:
            levels = [place(child, depth + 1, label) for label, child in children]
            y = (levels[0] + levels[-1]) / 2
        else:
            y, leaves = -float(leaves), leaves + 1
        x = columns[depth] if children else columns[2]
        if children:
            start = x + (1.13 if depth == 0 else 0.083 * len(name))
            for level, (label, child) in zip(levels, children, strict=True):
                end = columns[2] if not child[1] else columns[depth + 1]
                bend = start + 0.18
                axes.plot([start, bend, bend, end - 0.08], [y, y, level, level], color=GREY, linewidth=0.8)
                axes.annotate(label, (bend + 0.1, level + 0.07), fontsize=8.5, va="bottom", style="italic")
        style = {"boxstyle": "round,pad=0.35", "facecolor": "none", "edgecolor": ORANGE if children else BLUE}
        words = name.replace(" per weight", "\nper weight").replace(" or activation", "\nor activation") if depth == 0 else name
        axes.annotate(
            words, (x, y), fontsize=9.5, va="center", ha="left", bbox=style, fontweight="normal" if children else "bold"
        )
        return y

    place(series, 0, "")
    axes.set_xlim(-0.15, 10.2)
    axes.set_ylim(-leaves + 0.4, 0.7)
    return figure


def plots() -> list[Plot]:
    """All of them, their numbers computed."""
    made: list[tuple[str, str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("elements.svg", "The positive numbers of each element format", element_series, draw_elements),
        ("relative-error.svg", "Relative error against magnitude, by element format", error_series, draw_error),
        ("magnitude.svg", "SQNR against the magnitude of a tensor, by recipe", magnitude_series, draw_magnitude),
        ("exponent-rules.svg", "SQNR under the E8M0 rules rceil, floor and even", rule_series, draw_rules),
        ("stale-scale.svg", "What a wrong supplied scale costs FP8", stale_series, draw_stale),
        ("stochastic.svg", "Nearest and stochastic rounding to E2M1", stochastic_series, draw_stochastic),
        ("blocks.svg", "A matrix, its blocks, codes, bytes and scales", block_series, draw_blocks),
        ("decision.svg", "Which recipe to choose", decision_series, draw_decision),
        ("rosetta.svg", "Between which formats conversions keep every value", rosetta_series, draw_rosetta),
        ("standing.svg", "Speed beside the best rival, by device", standing_series, draw_standing),
    ]
    return [Plot(file, title, series(), draw) for file, title, series, draw in made]


def main(
    docs: Annotated[Path, typer.Option(help="Folder of the pages, with their pictures in img/.")] = ROOT / "docs",
    check: Annotated[bool, typer.Option(help="Write nothing; fail where a picture shows other numbers.")] = False,
) -> None:
    """Draw the pictures of the pages, or check them."""
    every, written = plots(), pictures(bell(8, 32))
    if check:
        stale = [
            plot.file
            for plot in every
            if not (docs / "img" / plot.file).exists()
            or plot.digest not in (docs / "img" / plot.file).read_text(encoding="utf-8")
        ]
        stale += [file for file, text in written.items() if not same(docs / "img" / file, text)]
        if stale:
            sys.exit(f"plots: {', '.join(stale)} differ(s) from what breccia computes; run `python docs/scripts/plots.py`.")
        return
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("plots: drawing needs matplotlib, which is not installed; --check does not.")
    for plot in every:
        write(plot, docs / "img")
    for file, text in written.items():
        (docs / "img" / file).write_text(text, encoding="utf-8")


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    typer.run(main)
