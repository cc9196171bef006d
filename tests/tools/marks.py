"""Marks that depend on the machine, and cases that `make test` leaves to `make test-all`, or both to `make slow`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from breccia.testing.places import Place


def jax_is_long(values: Iterable[Any]) -> list[Any]:
    """The values as parameters, with those for JAX marked `long`: JAX compiles every op.

    A value is the name of a framework, its `Place`, or the path of a page named after one or after a
    library of JAX.
    """
    long = {"jax", "flax", "training-jax", "qwix"}
    names = ((value, value.framework if isinstance(value, Place) else Path(value).stem) for value in values)
    return [pytest.param(value, marks=pytest.mark.long) if name in long else value for value, name in names]


def long_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters, with all but those `kept` marked `long`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.long) for value in values]


def slow_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters, with all but those `kept` marked `slow`: each takes seconds, and a few show what breaks."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def on_cuda(test: Any) -> Any:
    """Mark a test `gpu`, for `tests/gpu/suite.sh`, and skip it where there is no CUDA device."""
    try:
        present = import_module("torch").cuda.is_available()
    except ImportError:
        present = False
    return pytest.mark.gpu(pytest.mark.skipif(not present, reason="no CUDA device")(test))


def here(framework: str) -> Place:
    """The `Place` of a framework. Skips the test where the framework is not installed."""
    place = Place(framework)
    if place.absence:
        pytest.skip(place.absence)
    return place
