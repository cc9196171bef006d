"""Fixtures, and which cases are collected and marked."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

# Triton reads it when it is first imported, by torch too: without a GPU its kernels run in its interpreter.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from caches import keep_compiled_functions
from covering import excluded_by, mark_cases
from program import Run
from recipes import RECIPES, recipe_id

from breccia import ScalingRecipe
from breccia.testing.pytest_plugin import header

# Their assertions explain themselves as those of test files do.
pytest.register_assert_rewrite("gpu_weights", "in_frameworks", "native_weights", "products", "triton_casts")

keep_compiled_functions()

#: Separate distributions, which tests/across/test_third_party.py installs.
collect_ignore = ["third_party"]


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
    return True if collection_path.name.endswith("_slow.py") and "slow" in excluded_by(config.option.markexpr) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Mark the cases that `make test` or `make test-all` leaves out, and make none that `-m` excludes."""
    mark_cases(metafunc, excluded_by(metafunc.config.option.markexpr))


def pytest_collection_finish() -> None:
    """Exempt the imported libraries and the collected cases, millions of objects, from the garbage collector's passes."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Versions of everything whose bytes are compared."""
    return header()
