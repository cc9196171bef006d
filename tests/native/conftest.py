"""Tests of compiled products run once for each instruction set of this CPU, where they ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "instruction_set" in metafunc.fixturenames:
        from breccia_native import products

        metafunc.parametrize("instruction_set", products.use(), indirect=True)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Products use the instruction set of this name."""
    from breccia_native import products

    products.use(request.param)
    yield request.param
    products.use(products.use()[0])
