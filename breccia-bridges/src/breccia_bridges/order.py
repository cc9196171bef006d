"""The orders in which `breccia compare` and `breccia inspect` list tensors: what deserves attention comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from .results import TensorReport

_T = TypeVar("_T")
_K = TypeVar("_K", bound=StrEnum)


class CompareKey(StrEnum):
    """What `compare --sort` takes."""

    SQNR = "sqnr"
    COSINE = "cosine"
    MAX_ERROR = "max-error"
    CLIPPED = "clipped"
    UNDERFLOW = "underflow"
    BITS = "bits"
    NAME = "name"


class InspectKey(StrEnum):
    """What `inspect --sort` takes."""

    BYTES = "bytes"
    BITS = "bits"
    NAME = "name"
    STORED_AS = "stored-as"


def in_order(items: Iterable[_T], key: _K | None, orders: Mapping[_K, Callable[[_T], Any]]) -> list[_T]:
    """`items` by one of `orders`, or unchanged without a key. Equal ones keep their order."""
    return list(items) if key is None else sorted(items, key=orders[key])


def _least_first(value: float | None) -> float:
    """Sorts NaN first and unknown values last."""
    return math.inf if value is None else -math.inf if math.isnan(value) else value


def _most_first(value: float | None) -> float:
    """Sorts NaN first and unknown values last."""
    return math.inf if value is None else -math.inf if math.isnan(value) else -value


#: The worst first; bits: the largest first.
COMPARED: dict[CompareKey, Callable[[TensorReport], Any]] = {
    CompareKey.SQNR: lambda t: _least_first(t.measured.sqnr),
    CompareKey.COSINE: lambda t: _least_first(t.measured.cosine),
    CompareKey.MAX_ERROR: lambda t: _most_first(t.measured.max_error),
    CompareKey.CLIPPED: lambda t: _most_first(t.measured.clip_rate),
    CompareKey.UNDERFLOW: lambda t: _most_first(t.measured.underflow_rate),
    CompareKey.BITS: lambda t: _most_first(t.bits_per_parameter),
    CompareKey.NAME: lambda t: t.name,
}

#: Rows of `inspected`: the largest first.
INSPECTED: dict[InspectKey, Callable[[dict[str, Any]], Any]] = {
    InspectKey.BYTES: lambda row: -row["bytes"],
    InspectKey.BITS: lambda row: _most_first(8 * row["bytes"] / row["parameters"] if row["parameters"] else None),
    InspectKey.NAME: lambda row: row["name"],
    InspectKey.STORED_AS: lambda row: row["stored_as"],
}
