"""What tests of transformers' models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def no_progress_bars() -> Iterator[None]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
