"""The picture of the first page: a tensor, its codes and its scales. plots.py writes it, for light and for dark grounds.

Every number in it is computed: the values are `plots.bell`, the bytes are those of `breccia.cast(x, "nvfp4")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

import breccia
from breccia.arrays.ops import NUMPY
from breccia.codecs import E4M3

CELL, GAP, SCALE_WIDTH = 15, 12, 26
WIDTH = 560


@dataclass(frozen=True)
class Theme:
    """Colours of a ground: text, lines, and the ends and the middle of the scale of values."""

    text: str
    line: str
    zero: tuple[int, int, int]
    low: tuple[int, int, int]
    high: tuple[int, int, int]


THEMES = {
    "light": Theme("#1f2328", "#8c959f", (250, 250, 250), (86, 180, 233), (230, 159, 0)),
    "dark": Theme("#e6edf3", "#8b949e", (38, 42, 48), (0, 101, 162), (168, 84, 0)),
}


def colour(theme: Theme, part: float) -> str:
    """part: from -1, the lowest value, to 1."""
    end = theme.low if part < 0 else theme.high
    weight = min(abs(part), 1.0) ** 0.7
    return "#" + "".join(f"{round(a + (b - a) * weight):02x}" for a, b in zip(theme.zero, end, strict=True))


def cell(theme: Theme, x: float, y: float, width: float, part: float, label: str = "") -> str:
    """A box with a label. The text colour has a contrast of 4.5 or more on every tone of the theme."""
    box = f'<rect x="{x:g}" y="{y:g}" width="{width - 1:g}" height="{CELL - 1}" fill="{colour(theme, part)}"/>'
    if not label:
        return box
    centre = f'x="{x + (width - 1) / 2:g}" y="{y + 11:g}"'
    return f'{box}<text {centre} class="code" text-anchor="middle">{escape(label)}</text>'


def said(x: float, y: float, text: str, kind: str = "said") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def picture(theme: Theme, x: np.ndarray) -> str:
    """An SVG without a ground of its own."""
    st = breccia.cast(x, "nvfp4")
    rows, columns = x.shape
    codes = np.stack([st.data & 15, st.data >> 4], axis=-1).reshape(rows, columns)  # the even index is the low nibble
    values, scale = breccia.dequantize(st), st.scale
    part = E4M3.decode(NUMPY, scale)
    part = part / part.max()
    most, left = float(np.abs(x).max()), columns * CELL + GAP
    top, below = 26, 26 + rows * CELL + 66
    shapes = [said(0, 16, f"x, {rows} × {columns} numbers in FP32: {x.nbytes:,} bytes", "name")]
    shapes += [cell(theme, c * CELL, top + r * CELL, CELL, x[r, c] / most) for r in range(rows) for c in range(columns)]
    arrow = top + rows * CELL + 8
    shapes.append(f'<path d="M 20 {arrow} v 20 m -6 -7 l 6 8 l 6 -8" fill="none" stroke="{theme.line}" stroke-width="2"/>')
    shapes.append(said(40, arrow + 17, 'st = breccia.cast(x, "nvfp4")', "program"))
    shapes.append(said(0, below - 9, f"st.data: 4-bit codes, {st.data.nbytes} bytes", "name"))
    shapes.append(f'<text x="{WIDTH}" y="{below - 9}" class="name" text-anchor="end">st.scale: {st.scale.nbytes}</text>')
    for r in range(rows):
        y = below + r * CELL
        shapes += [cell(theme, c * CELL, y, CELL, values[r, c] / most, f"{codes[r, c]:X}") for c in range(columns)]
        for b in range(scale.shape[1]):
            shapes.append(
                cell(theme, left + b * (SCALE_WIDTH + 4), y, SCALE_WIDTH, float(part[r, b]) * 0.8, f"{scale[r, b]:02X}")
            )
    for b in range(1, columns // 16):
        x_line = b * 16 * CELL - 0.5
        shapes.append(f'<path d="M {x_line:g} {below - 3} v {rows * CELL + 5}" stroke="{theme.text}" stroke-width="1.5"/>')
    end = below + rows * CELL + 22
    number = float(np.asarray(st.global_scale))
    shapes.append(said(0, end, f"st.global_scale: {number:.6g}, one FP32 number, 4 bytes", "name"))
    shapes.append(said(0, end + 26, f"{x.nbytes:,} bytes become {st.nbytes}. One FP8 scale for each 16 codes, right;"))
    shapes.append(said(0, end + 46, "value = code × scale × global scale. The same bytes in NumPy,"))
    shapes.append(said(0, end + 66, f"PyTorch, JAX and MLX: digest {st.digest()[:12]}…"))
    style = (
        f"text{{fill:{theme.text};font-family:system-ui,sans-serif}}.name{{font-size:15px;font-weight:600}}"
        ".said{font-size:15px}.program,.code{font-family:ui-monospace,Menlo,Consolas,monospace}"
        ".program{font-size:15px}.code{font-size:10px}"
    )
    title = f"A tensor of {rows} × {columns} numbers, and the codes and scales that breccia writes for it"
    size = f'viewBox="0 0 {WIDTH} {end + 76}" width="{WIDTH}" height="{end + 76}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{style}</style>", *shapes, "</svg>", ""])


def pictures(x: np.ndarray) -> dict[str, str]:
    """By file name in docs/img, the text of the SVG."""
    return {f"tensor-{name}.svg": picture(theme, x) for name, theme in THEMES.items()}
