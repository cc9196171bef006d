"""The calls that torch's kernels make, for `explain`. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from breccia.backend import Call, Options


def plan(call: Call) -> Iterator[Call]:
    """The same op on the same memory, for NumPy."""
    options: Any = call.cast_options() if call.op == "cast" else Options(call.options)
    a, b = (None if x is None else x.described() for x in (call.a, call.b))
    yield call.makes(call.op, a, b, recipe=call.recipe, framework="numpy", options=options)
