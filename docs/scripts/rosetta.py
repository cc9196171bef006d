"""The picture of docs/rosetta.md: between which formats conversions keep every value. plots.py writes and checks it."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from harness.plots import BLUE, GREY, ORANGE

from breccia.cli.rosetta import every_format, matrix
from breccia.dispatch.registry import registry
from breccia.kernels.exactness import BY_VALUES, KINDS, NEW_CODES, SAME_CODES

#: Kinds by how they are drawn; what is inexact stays empty.
_TONES = {SAME_CODES: BLUE, NEW_CODES: ORANGE, BY_VALUES: "#C8C8C8"}
_CELL = 0.148  # inches


def rosetta_series() -> Any:
    """The specs of all formats, in the order of their recipes, and for each source a digit by target: its place in KINDS."""
    recipes = dict(sorted(every_format(registry()).items(), key=lambda item: item[0].partition(",")[0]))
    found = matrix(recipes)
    return {"formats": list(recipes), "kinds": ["".join(str(KINDS.index(found[a, b].kind)) for b in recipes) for a in recipes]}


def draw_rosetta(series: Any) -> Any:
    """A row by source, a column by target."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    specs, rows = series["formats"], series["kinds"]
    count = len(specs)
    side = _CELL * count
    figure = Figure(figsize=(side + 2.9, side + 2.9))
    axes = figure.add_axes((2.8 / (side + 2.9), 0.01, side / (side + 2.9), side / (side + 2.9)))
    axes.set_xlim(0, count)
    axes.set_ylim(count, 0)
    for kind, tone in _TONES.items():
        shapes: list[Any] = []
        for y, row in enumerate(rows):
            x = 0
            for digit, run in groupby(row):
                width = len(list(run))
                if KINDS[int(digit)] == kind:
                    corners = [(x, y), (x + width, y), (x + width, y + 1), (x, y + 1), (x, y)]
                    shapes.append(Path(corners, [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]))
                x += width
        axes.add_patch(PathPatch(Path.make_compound_path(*shapes), facecolor=tone, edgecolor="none"))
    # Lines between the formats of different recipes.
    names = [spec.partition(",")[0] for spec in specs]
    borders = [n for n in range(1, count) if names[n] != names[n - 1]]
    axes.hlines(borders, 0, count, color=GREY, linewidth=0.3)
    axes.vlines(borders, 0, count, color=GREY, linewidth=0.3)
    middles = [n + 0.5 for n in range(count)]
    axes.set_xticks(middles, specs, rotation=90, fontsize=5.5)
    axes.set_yticks(middles, specs, fontsize=5.5)
    axes.tick_params(length=0, pad=2, top=True, labeltop=True, bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linewidth(0.3)
    handles = [Patch(facecolor=tone, label=kind) for kind, tone in _TONES.items()]
    handles.append(Patch(facecolor="none", edgecolor=GREY, linewidth=0.3, label="inexact"))
    figure.legend(handles=handles, loc="upper left", fontsize=8, frameon=False, title="from (row) to (column)")
    return figure
