"""Plots as SVG files that carry the digest of the numbers they were drawn from. Only drawing needs matplotlib."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Mid-tones that keep a contrast of 3 or more on white and on the dark grounds of code hosts; Okabe and Ito's, which the
#: colour-blind can tell apart. Text and lines are a grey of 4 or more.
GREY, BLUE, ORANGE = "#767676", "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Plot:
    """A file in docs/img: what it is, the numbers, and how they are drawn."""

    file: str
    title: str
    series: Any
    draw: Callable[[Any], Any]

    @property
    def digest(self) -> str:
        """Of the numbers alone; it is written into the file."""
        return hashlib.sha256(json.dumps(self.series, sort_keys=True).encode()).hexdigest()[:32]

    def shown_in(self, folder: Path) -> bool:
        """Whether the file in the folder was drawn from these numbers."""
        path = folder / self.file
        return path.exists() and self.digest in path.read_text(encoding="utf-8")


def write(plot: Plot, folder: Path) -> None:
    """The plot as SVG: text as text, no ground, and the same bytes at every run."""
    import matplotlib

    style = {name: GREY for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    style |= {"svg.hashsalt": plot.file, "svg.fonttype": "none", "font.family": "sans-serif", "hatch.linewidth": 0.7}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlecolor": GREY, "savefig.transparent": True}
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style):
        metadata = {"Title": plot.title, "Description": f"drawn from numbers of digest {plot.digest}", "Date": None}
        plot.draw(plot.series).savefig(folder / plot.file, metadata={**metadata, "Creator": None})
