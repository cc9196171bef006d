"""What the tests share: one list of recipes, and arrays that reach every branch of the numerics contract."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# Triton reads it when it is first imported, by torch too: without a GPU its kernels run in its interpreter.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from covering import mark_the_rest

from breccia import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    MXINT8BlockScaling,
    NF4Scaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.kernels import exact
from breccia.testing.examples import every_decodable, special_rows, wide
from breccia.testing.places import Place
from breccia.testing.pytest_plugin import header

__all__ = ["RECIPES", "Run", "every_decodable", "is_exact", "jax_in_rest", "on_cuda", "recipe_id", "special_rows", "wide"]

#: Separate distributions, which tests/test_third_party.py installs.
collect_ignore = ["third_party"]
#: Calls the program with arguments and returns (exit code, standard output, standard error).
Run = Callable[..., tuple[int, str, str]]

RECIPES: list[ScalingRecipe] = [
    DelayedScaling(),
    DelayedScaling("E5M2", margin=3),
    DelayedScaling(margin=-126),
    DelayedScaling(margin=126),
    DelayedScaling(margin=3, scale_rule="te"),
    Float8CurrentScaling(),
    Float8CurrentScaling("E5M2"),
    Float8CurrentScaling(scale_rule="te"),
    Float8CurrentScaling("E5M2", scale_rule="divide"),
    Float8RowScaling(),
    Float8RowScaling("E5M2", scale_rule="recip"),
    Float8BlockScaling(),
    Float8BlockScaling("E5M2", block_k=16),
    Float8BlockScaling(block_k=16, block_m=4),
    Float8BlockScaling(block_k=8, block_m=2, power_of_two_scale=True),
    Float8BlockScaling(block_k=16, scale_rule="recip"),
    Float8BlockScaling(block_k=16, scale_rule="divide"),
    Float8BlockScaling(block_k=16, scale_rule="te"),
    Float8BlockScaling(block_k=16, block_m=2, power_of_two_scale=True, scale_rule="te"),
    MXFP8BlockScaling(),
    MXFP8BlockScaling("E5M2"),
    MXFP8BlockScaling(scale_rule="floor"),
    MXFP8BlockScaling(scale_rule="even"),
    MXFP6BlockScaling(),
    MXFP6BlockScaling("E3M2"),
    MXFP6BlockScaling("E3M2", scale_rule="floor"),
    MXFP4BlockScaling(),
    MXFP4BlockScaling(scale_rule="even"),
    MXINT8BlockScaling(),
    MXINT8BlockScaling(scale_rule="floor"),
    MXINT8BlockScaling(scale_rule="even"),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(two_level=False),
    INT4Scaling(),
    INT4Scaling(group_size=16, scale_dtype="bf16"),
    INT4Scaling(group_size=16, scale_dtype="fp32"),
    INT4Scaling(group_size=16, signed=False),
    INT4Scaling(group_size=16, signed=False, symmetric=False),
    INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="fp32"),
    INT4Scaling(group_size=16, scale_rule="half_range"),
    INT4Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
    INT4Scaling(group_size=8, signed=False, symmetric=False, scale_dtype="bf16", offset="bias"),
    INT8Scaling(),
    INT8Scaling(group_size=16, scale_dtype="fp16", scale_rule="half_range"),
    INT8Scaling(group_size=16, scale_dtype="bf16", scale_rule="divide"),
    INT8Scaling(signed=False, symmetric=False),
    INT8Scaling(group_size=16, signed=False, symmetric=False, offset="bias"),
    NF4Scaling(),
    NF4Scaling(block_size=16, scale_dtype="fp16"),
]


def recipe_id(recipe: ScalingRecipe) -> str:
    """A short test id: the recipe's name, and the fields that differ from their defaults."""
    default = type(recipe)()
    changed = [f.name for f in dataclasses.fields(recipe) if getattr(recipe, f.name) != getattr(default, f.name)]  # type: ignore[arg-type]
    return "-".join([recipe.name, *(f"{name}={getattr(recipe, name)}" for name in changed)])


def is_exact(source: ScalingRecipe, target: ScalingRecipe) -> bool:
    """Can `target` hold every tensor of `source` with the same decoded bits?"""
    names, scales = zip(*((r.format.element, r.format.scale.codec) for r in (source, target)), strict=True)
    return exact.renamed(*names) is not None and exact.same_scales(source, target) and exact.hold_scales(*scales)


def jax_in_rest(values: Iterable[Any]) -> list[Any]:
    """The values as parameters, with those for JAX marked `rest`: JAX compiles every op, so only `make test-all` runs them.

    A value is the name of a framework, or the path of a page named after one.
    """
    return [pytest.param(value, marks=pytest.mark.rest) if Path(value).stem in ("jax", "flax") else value for value in values]


def on_cuda(test: Any) -> Any:
    """Mark a test `gpu`, for `tests/gpu.sh`, and skip it where there is no CUDA device."""
    try:
        here = import_module("torch").cuda.is_available()
    except ImportError:
        here = False
    return pytest.mark.gpu(pytest.mark.skipif(not here, reason="no CUDA device")(test))


@pytest.fixture(params=RECIPES, ids=recipe_id)
def recipe(request: pytest.FixtureRequest) -> ScalingRecipe:
    return request.param


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the program in this process and returns (exit code, standard output, standard error)."""
    from breccia.cli.main import run as program

    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: Any) -> tuple[int, str, str]:
        try:
            program([str(w) for w in words])
            code: Any = 0
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not collect `*_slow.py`, thousands of cases, where `-m` excludes slow tests."""
    return True if collection_path.name.endswith("_slow.py") and "not slow" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that only `make test-all` runs as `rest`, before `-m` selects."""
    mark_the_rest(items)


def pytest_report_header() -> list[str]:
    """Versions of everything whose bytes are compared."""
    return header()


def here(framework: str) -> Place:
    """The `Place` of a framework. Skips the test where the framework is not installed."""
    place = Place(framework)
    if place.absence:
        pytest.skip(place.absence)
    return place


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of benchmarks/. All are removed from sys.modules afterwards, since their names are common."""
    benchmarks = str(Path(__file__).resolve().parents[1] / "benchmarks")
    monkeypatch.syspath_prepend(benchmarks)
    known = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - known:
        if benchmarks in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
