"""How a ScaledTensor prints: in one line, in a notebook, and with its components in error messages."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ..arrays.frameworks import dtype_name, place_of
from ..options import PLAIN
from .components import PARTS, components

if TYPE_CHECKING:
    from .tensor import ScaledTensor


def bits_per_value(st: ScaledTensor) -> str:
    """Bits of all components per logical element, to four digits; "-" for an empty tensor."""
    count = math.prod(st.shape)
    return f"{8 * st.nbytes / count:.4g}" if count else "-"


def line(st: ScaledTensor) -> str:
    """`breccia.ScaledTensor('nvfp4', shape=(64, 256), torch cpu, 4.502 bits per value)`; axis and storage if not default.

    A tensor of placeholders, which trees pass around (shapes, dtypes, shardings, None), prints them.
    """
    try:
        return _line(st)
    except Exception:  # of any kind: placeholders may be any object
        return _placeholders(st)


def _line(st: ScaledTensor) -> str:
    others = "" if st.axis == -1 else f", axis={st.axis}"
    others += "" if st.storage == PLAIN else f", storage={st.storage!r}"
    where = f"{st.framework} {place_of(st.data_source)}"
    return f"breccia.ScaledTensor({st.recipe.spec!r}, shape={st.shape}, {where}, {bits_per_value(st)} bits per value{others})"


def _placeholders(st: ScaledTensor) -> str:
    parts = (st.data, st.scale, st.zero_point, st.global_scale) if st.held is None else st.held.leaves
    shown = [f"{name}={part!r}" for name, part in zip(PARTS, parts, strict=True) if part is not None or name in PARTS[:2]]
    return f"breccia.ScaledTensor({st.recipe.spec!r}, {', '.join(shown)})"


def description(st: ScaledTensor) -> str:
    """The tensor with the dtypes and shapes that decide whether another one can take its place."""
    parts = ", ".join(f"{name}={dtype_name(part)}{list(part.shape)}" for name, part in components(st).items())
    return f"breccia.ScaledTensor({st.recipe.spec!r}, shape={st.shape}, {parts}, layout={st.layout}, axis={st.axis})"


def table(st: ScaledTensor) -> str:
    """An HTML table, for notebooks."""
    try:
        return _table(st)
    except Exception:  # as in `line`
        return f"<code>{escape(_placeholders(st))}</code>"


def _table(st: ScaledTensor) -> str:
    facts = {
        "recipe": st.recipe.spec,
        "shape": st.shape,
        "framework": f"{st.framework}, {place_of(st.data_source)}",
        "bits per value": bits_per_value(st),
        **{name: f"{dtype_name(part)}, {tuple(part.shape)}" for name, part in components(st).items()},
        "layout": st.layout.plain,
        "blocks along axis": st.axis,
        **({} if st.storage == PLAIN else {"storage": st.storage}),
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>" for name, fact in facts.items())
    return f"<table><caption>breccia.ScaledTensor</caption>{rows}</table>"
