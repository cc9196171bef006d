"""The calls that torch's kernels make, for `explain`. Imports no framework."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from breccia.backend import Call, Options


def plan(call: Call) -> Iterator[Call]:
    """The same op on the same memory, for NumPy."""
    x = call.a.described()
    options: Any = call.cast_options() if call.op == "cast" else Options(call.options)
    dtype = "float32" if x.dtype == "bfloat16" else x.dtype
    yield call.makes(call.op, x._replace(dtype=dtype), recipe=call.recipe, framework="numpy", options=options)
