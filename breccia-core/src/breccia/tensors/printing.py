"""How a ScaledTensor prints: in one line, in a notebook, and with its components in error messages."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

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
    if (found := placeholders(st)) is not None:
        return f"breccia.ScaledTensor({st.recipe.spec!r}, {', '.join(f'{name}={part!r}' for name, part in found.items())})"
    others = "" if st.axis == -1 else f", axis={st.axis}"
    others += "" if st.storage == PLAIN else f", storage={st.storage!r}"
    where = f"{st.framework} {place_of(st.held_data)}"
    return f"breccia.ScaledTensor({st.recipe.spec!r}, shape={st.shape}, {where}, {bits_per_value(st)} bits per value{others})"


def placeholders(st: ScaledTensor) -> dict[str, Any] | None:
    """What the tensor holds in place of its components, if these are not the arrays of a tensor."""
    held = (st.data, st.scale, st.zero_point, st.global_scale) if st.held is None else st.held.leaves
    try:
        if all(place_of(part) is not None and int(part.nbytes) >= 0 for part in held if part is not None):
            st.framework, st.shape, st.nbytes  # noqa: B018
            return None
    except Exception:  # of any kind: placeholders may be any object
        pass
    return {name: part for name, part in zip(PARTS, held, strict=True) if part is not None or name in ("data", "scale")}


def description(st: ScaledTensor) -> str:
    """The tensor with the dtypes and shapes that decide whether another one can take its place."""
    parts = ", ".join(f"{name}={dtype_name(part)}{list(part.shape)}" for name, part in components(st).items())
    return f"breccia.ScaledTensor({st.recipe.spec!r}, shape={st.shape}, {parts}, layout={st.layout}, axis={st.axis})"


def table(st: ScaledTensor) -> str:
    """An HTML table, for notebooks."""
    if placeholders(st) is not None:
        return f"<code>{escape(line(st))}</code>"
    facts = {
        "recipe": st.recipe.spec,
        "shape": st.shape,
        "framework": f"{st.framework}, {place_of(st.held_data)}",
        "bits per value": bits_per_value(st),
        **{name: f"{dtype_name(part)}, {tuple(part.shape)}" for name, part in components(st).items()},
        "layout": st.layout.plain,
        "blocks along axis": st.axis,
        **({} if st.storage == PLAIN else {"storage": st.storage}),
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>" for name, fact in facts.items())
    return f"<table><caption>breccia.ScaledTensor</caption>{rows}</table>"
